"""Spaces as JSON, in checkpoints and data sets. Anybody may have written what is read."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

_MOST = 2**31 - 1  # elements of an observation or action


def plain(tree: Any) -> Any:
    """Returns a tree as JSON can hold it. Numbers that are not finite become strings that `float` reads."""
    if isinstance(tree, Mapping):
        return {k: plain(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(v) for v in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return str(tree)
    return tree


def space_to_json(space: Space) -> dict[str, Any]:
    """Returns a space as JSON: `kind` and its fields; Dict and Tuple have their parts under `spaces`."""
    match space:
        case Dict():
            return {"kind": "Dict", "spaces": {name: space_to_json(part) for name, part in space.items}}
        case Tuple():
            return {"kind": "Tuple", "spaces": [space_to_json(part) for part in space.items]}
    return {"kind": type(space).__name__, **vars(space)}


def space_from_json(found: Any) -> Space:
    """Reads a space that `space_to_json` wrote. Raises ValueError, TypeError: it is not of that form."""
    match found:
        case {"kind": "Discrete", "n": n, "dtype": dtype}:
            return Discrete(_whole(n, least=1), _dtype(dtype))
        case {"kind": "MultiDiscrete", "nvec": list(nvec), "dtype": dtype}:
            return MultiDiscrete(tuple(_whole(n, least=1) for n in nvec), _dtype(dtype))
        case {"kind": "MultiBinary", "shape": list(shape), "dtype": dtype}:
            return MultiBinary(_shape(shape), _dtype(dtype))
        case {"kind": "Box", "shape": list(shape), "dtype": dtype, "low": low, "high": high}:
            box = Box(_shape(shape), _dtype(dtype), _bound(low), _bound(high))
            if any(isinstance(b, tuple) and len(b) != math.prod(box.shape) for b in (box.low, box.high)):
                raise ValueError("spec: a bound does not have the elements of its space")
            return box
        case {"kind": "Dict", "spaces": dict(parts)}:
            return Dict(tuple((name, space_from_json(part)) for name, part in parts.items()))
        case {"kind": "Tuple", "spaces": list(parts)}:
            return Tuple(tuple(map(space_from_json, parts)))
    raise ValueError(f"spec: unknown space {str(found)[:100]}")


def _whole(n: Any, *, least: int = 0) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not least <= n <= _MOST:
        raise ValueError(f"spec: expected a size of {least} to {_MOST}, got {str(n)[:40]}")
    return n


def _shape(shape: list[Any]) -> tuple[int, ...]:
    found = tuple(map(_whole, shape))
    _whole(math.prod(found))
    return found


def _dtype(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"spec: expected the name of a dtype, got {str(name)[:40]}")
    if np.dtype(name).kind not in "biuf" or np.dtype(name).itemsize > 8:
        raise TypeError(f"spec: {name} is no dtype of numbers")
    return name


def _bound(x: Any) -> float | tuple[float, ...]:
    return tuple(map(float, x)) if isinstance(x, list) else float(x)
