"""Garbage collections that do not stop those who answer requests.

A full collection holds the interpreter while it looks at every object there is, a tenth of a second after jax has
traced and compiled.
"""

import gc

_NEVER = 2**31 - 1
_usual = gc.get_threshold()
_before: int | None = None  # objects that somebody else had frozen when it was postponed


def postpone() -> None:
    """Leaves old objects uncollected until `settle`, while programs are compiled that make many."""
    global _before
    _before = gc.get_freeze_count()
    gc.set_threshold(*_usual[:2], _NEVER)


def settle() -> None:
    """Takes all present objects out of what collections look at, and collects again among those to come."""
    gc.freeze()
    gc.set_threshold(*_usual)


def restore() -> None:
    """Lets collections look at everything again that nobody else had frozen, if they were postponed."""
    global _before
    if _before is None:
        return
    if not _before:
        gc.unfreeze()
    _before = None
    gc.set_threshold(*_usual)
