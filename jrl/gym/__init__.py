"""Gymnasium environments without jax: what worker processes import. Faults, action masks, shared memory, the worker."""

from typing import Any

FIRST_STEPS = 32  # steps of each environment that a run checks fully
_KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")


def space_kind(space: Any) -> str:
    """Return the name of a space's class, or of its first base class that is a known space."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])
