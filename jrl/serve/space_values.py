"""Values of spaces in requests: parsed from JSON or npz with all checks, and described as JSON Schema."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.serve.wire import RequestError
from jrl.types import Box, Dict, Discrete, Leaf, MultiDiscrete, PyTree, Space, Tuple

NUMBER, INTEGER, FLAG = Box(()), Box((), "int32"), Box((), "bool")
# Largest absolute value of a number in a request. Losses square numbers, and gradients multiply them: an update with a
# larger number may not be finite in float32, and would end the run of all clients.
LARGEST = 1e9
FIX = "scale the environment's numbers down"


def parse_value(space: Space, x: Any, name: str, lead: tuple[int, ...] = ()) -> PyTree:
    """Returns an element of a space in its dtypes, or a batch of elements with the leading axes `lead`.

    Args:
      space: space of the element.
      x: decoded JSON or npz.
      name: name of the field, for errors.
      lead: sizes of the leading axes.
    Raises:
      RequestError: wrong structure, shape or type; numbers that are not finite or outside of the space.
    """
    match space:
        case Dict():
            names = [key for key, _ in space.items]
            if not isinstance(x, Mapping) or set(x) != set(names):
                got = ", ".join(map(str, x))[:200] if isinstance(x, Mapping) else type(x).__name__
                raise RequestError(422, f"{name}: expected a mapping of {', '.join(names)}, got {got}")
            return {key: parse_value(part, x[key], f"{name}/{key}", lead) for key, part in space.items}
        case Tuple():
            if isinstance(x, Mapping):  # npz has parts by number
                x = [x.get(str(i)) for i in range(len(x))]
            if not isinstance(x, list) or len(x) != len(space.items):
                raise RequestError(422, f"{name}: expected a list of {len(space.items)} parts")
            return tuple(parse_value(part, x[i], f"{name}/{i}", lead) for i, part in enumerate(space.items))
    return parse_array(space, x, lead, name)


def parse_number(x: Any, name: str) -> float:
    """Returns a finite number. Raises RequestError as `parse_value`."""
    return x if type(x) is float and abs(x) <= LARGEST else float(parse_array(NUMBER, x, (), name))


def parse_array(leaf: Leaf, x: Any, lead: tuple[int, ...], name: str) -> np.ndarray:
    """Returns an array [*lead, *shape] in the dtype of a space of arrays. Raises RequestError as `parse_value`."""
    dtype, shape = np.dtype(leaf.dtype), (*lead, *leaf.shape)

    def error(got: str) -> RequestError:
        return RequestError(422, f"{name}: expected {dtype} {list(shape)}{got}")

    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError):  # rows of different lengths
        raise error(", got lists of different lengths") from None
    if array.dtype.kind not in "biuf":
        raise error(", got values that are not numbers")
    if array.shape != shape:
        raise error(f", got {list(array.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise error(" of finite numbers, got some that are not")
    if dtype.kind == "f":
        if array.dtype.kind != "b" and ((array > LARGEST) | (array < -LARGEST)).any():
            raise error(f" of numbers from {-LARGEST:g} to {LARGEST:g}, got some beyond: {FIX}")
        return array.astype(dtype, copy=False)
    if array.dtype.kind == "f" and (array != np.floor(array)).any():
        raise error(" of whole numbers, got fractions")
    low, high = _find_range(leaf, dtype)
    if ((array < low) | (array > high)).any():
        most = high if np.ndim(high) == 0 else list(map(int, high))
        raise error(f" of numbers from {low} to {most}, got some beyond")
    return array.astype(dtype, copy=False)


def _find_range(leaf: Leaf, dtype: np.dtype) -> tuple[int, Any]:
    """Returns the minimum and the maximum of a space of integers; the maximum of MultiDiscrete is an array."""
    if isinstance(leaf, Discrete):
        return 0, leaf.n - 1
    if isinstance(leaf, Box):
        return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return 0, np.asarray(getattr(leaf, "nvec", 2)) - 1


def build_schema(space: Space, *sizes: int) -> dict[str, Any]:
    """Returns the JSON Schema of an element of a space, or of a batch.

    Args:
      space: the space.
      sizes: maximum length of each leading axis of a batch, which is a tree of arrays.
    """
    match space:
        case Dict():
            parts = {name: build_schema(part, *sizes) for name, part in space.items}
            return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        case Tuple():
            each = [build_schema(part, *sizes) for part in space.items]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
    schema = _build_leaf_schema(space)
    for size in reversed(sizes):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": size}
    return schema


def _build_leaf_schema(leaf: Leaf) -> dict[str, Any]:
    match leaf:
        case Discrete():
            schema: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": leaf.n - 1}
        case MultiDiscrete():
            each = [{"type": "integer", "minimum": 0, "maximum": n - 1} for n in leaf.nvec]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
        case Box() if np.dtype(leaf.dtype).kind == "f":
            schema = {"type": "number"}
        case _:
            schema = {"type": ["integer", "boolean"]}
    for size in reversed(leaf.shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
