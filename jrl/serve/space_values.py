"""Elements of spaces as clients send them: read from JSON or npz with every check, and described as JSON Schema."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.serve.wire import Refused
from jrl.types import Box, Dict, Discrete, Leaf, MultiDiscrete, PyTree, Space, Tuple

NUMBER, WHOLE, FLAG = Box(()), Box((), "int32"), Box((), "bool")
# Largest size of a number that clients send. Losses square it, and gradients multiply it by others of its size: an
# update with a larger number may not be finite in float32, and would end the run of all clients.
LARGEST = 1e9
_FIX = "scale the environment's numbers down"


def summed(before: float, reward: float, name: str) -> float:
    """Returns the sum of rewards since an action. Raises Refused: the sum is beyond `LARGEST`."""
    found = before + reward
    if abs(found) > LARGEST:
        most = f"{name}: expected a sum of at most {LARGEST:g} since the latest action"
        raise Refused(422, f"{most}, got {found:g}: {_FIX}")
    return found


def read(space: Space, x: Any, name: str, lead: tuple[int, ...] = ()) -> PyTree:
    """Returns an element of a space, or a batch of them with the leading axes `lead`, in the dtypes of the space.

    Raises:
      Refused: another structure, shape or kind of numbers; numbers that are not finite, or no choice of the space.
    """
    match space:
        case Dict():
            names = [key for key, _ in space.items]
            if not isinstance(x, Mapping) or set(x) != set(names):
                got = ", ".join(map(str, x))[:200] if isinstance(x, Mapping) else type(x).__name__
                raise Refused(422, f"{name}: expected a mapping of {', '.join(names)}, got {got}")
            return {key: read(part, x[key], f"{name}/{key}", lead) for key, part in space.items}
        case Tuple():
            if isinstance(x, Mapping):  # of npz, by number
                x = [x.get(str(i)) for i in range(len(x))]
            if not isinstance(x, list) or len(x) != len(space.items):
                raise Refused(422, f"{name}: expected a list of {len(space.items)} parts")
            return tuple(read(part, x[i], f"{name}/{i}", lead) for i, part in enumerate(space.items))
    return array(space, x, lead, name)


def number(x: Any, name: str) -> float:
    """Returns a number. Raises Refused as `read`."""
    return x if type(x) is float and abs(x) <= LARGEST else float(array(NUMBER, x, (), name))


def array(leaf: Leaf, x: Any, lead: tuple[int, ...], name: str) -> np.ndarray:
    """Returns [*lead, *shape] of the dtype of a space of arrays. Raises Refused as `read`."""
    dtype, shape = np.dtype(leaf.dtype), (*lead, *leaf.shape)

    def refused(got: str) -> Refused:
        return Refused(422, f"{name}: expected {dtype} {list(shape)}{got}")

    try:
        found = np.asarray(x)
    except (ValueError, TypeError, OverflowError):  # rows of different lengths
        raise refused(", got lists of different lengths") from None
    if found.dtype.kind not in "biuf":
        raise refused(", got values that are not numbers")
    if found.shape != shape:
        raise refused(f", got {list(found.shape)}")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise refused(" of finite numbers, got some that are not")
    if dtype.kind == "f":
        if found.dtype.kind != "b" and ((found > LARGEST) | (found < -LARGEST)).any():
            raise refused(f" of numbers from {-LARGEST:g} to {LARGEST:g}, got some beyond: {_FIX}")
        return found.astype(dtype, copy=False)
    if found.dtype.kind == "f" and (found != np.floor(found)).any():
        raise refused(" of whole numbers, got fractions")
    low, high = _range(leaf, dtype)
    if ((found < low) | (found > high)).any():
        most = high if np.ndim(high) == 0 else list(map(int, high))
        raise refused(f" of numbers from {low} to {most}, got some beyond")
    return found.astype(dtype, copy=False)


def _range(leaf: Leaf, dtype: np.dtype) -> tuple[int, Any]:
    """Returns the least and the greatest whole number of a space; of several numbers an array."""
    if isinstance(leaf, Discrete):
        return 0, leaf.n - 1
    if isinstance(leaf, Box):
        return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return 0, np.asarray(getattr(leaf, "nvec", 2)) - 1


def schema(space: Space, *sizes: int) -> dict[str, Any]:
    """Returns the JSON Schema of an element of a space; with `sizes` of a tree of arrays with these leading axes.

    Each size is the largest length of its axis.
    """
    match space:
        case Dict():
            parts = {name: schema(part, *sizes) for name, part in space.items}
            return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        case Tuple():
            each = [schema(part, *sizes) for part in space.items]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
    found = _leaf(space)
    for size in reversed(sizes):
        found = {"type": "array", "items": found, "minItems": 1, "maxItems": size}
    return found


def _leaf(leaf: Leaf) -> dict[str, Any]:
    match leaf:
        case Discrete():
            number: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": leaf.n - 1}
        case MultiDiscrete():
            each = [{"type": "integer", "minimum": 0, "maximum": n - 1} for n in leaf.nvec]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
        case Box() if np.dtype(leaf.dtype).kind == "f":
            number = {"type": "number"}
        case _:
            number = {"type": ["integer", "boolean"]}
    for size in reversed(leaf.shape):
        number = {"type": "array", "items": number, "minItems": size, "maxItems": size}
    return number
