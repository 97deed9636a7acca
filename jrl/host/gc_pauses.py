"""Control of the garbage collector, so that collections do not delay answers to requests.

A full collection visits every object, and stops the interpreter for 0.1 s after jax has traced and compiled.
"""

import gc

_NEVER = 2**31 - 1
_thresholds = gc.get_threshold()
_frozen_before: int | None = None  # number of objects frozen by other code before `pause_gc`; None: not paused


def pause_gc() -> None:
    """Skip full collections until `freeze_objects`, while compilation makes many objects."""
    global _frozen_before
    _frozen_before = gc.get_freeze_count()
    gc.set_threshold(*_thresholds[:2], _NEVER)


def freeze_objects() -> None:
    """Exclude all present objects from collections, and collect newer objects as usual."""
    gc.freeze()
    gc.set_threshold(*_thresholds)


def unfreeze_objects() -> None:
    """Undo `freeze_objects`, unless other code had frozen objects before `pause_gc`."""
    global _frozen_before
    if _frozen_before is None:
        return
    if not _frozen_before:
        gc.unfreeze()
    _frozen_before = None
    gc.set_threshold(*_thresholds)
