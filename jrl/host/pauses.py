"""Garbage collections that do not stop those who answer requests.

A full collection holds the interpreter while it looks at every object there is, a tenth of a second after jax has
traced and compiled.
"""

import gc

_NEVER = 2**31 - 1
_usual = gc.get_threshold()
_frozen = 0  # objects that somebody else had frozen before


def postpone() -> None:
    """Leaves old objects uncollected until `settle`, while programs are compiled that make many."""
    global _frozen
    _frozen = gc.get_freeze_count()
    gc.set_threshold(*_usual[:2], _NEVER)


def settle() -> None:
    """Takes all present objects out of what collections look at, and collects again among those to come."""
    gc.freeze()
    gc.set_threshold(*_usual)


def restore() -> None:
    """Lets collections look at everything again, unless somebody else had frozen some of it."""
    if not _frozen:
        gc.unfreeze()
    gc.set_threshold(*_usual)
