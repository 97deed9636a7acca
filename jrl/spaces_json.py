"""Spaces as JSON: jrl's form, in checkpoints and data sets, and Gymnasium's form in Minari, {"type": "Box", ...}."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

_MAX_SIZE = 2**31 - 1  # elements of an observation or action


def plain(tree: Any) -> Any:
    """Returns a tree that JSON can express: numbers that are not finite become strings that `float` reads."""
    if isinstance(tree, Mapping):
        return {k: plain(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(v) for v in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return str(tree)
    return tree


def space_to_json(space: Space) -> dict[str, Any]:
    """Returns a space as JSON: `kind` and the space's fields; parts of Dict and Tuple are under `spaces`."""
    match space:
        case Dict():
            return {"kind": "Dict", "spaces": {name: space_to_json(part) for name, part in space.items}}
        case Tuple():
            return {"kind": "Tuple", "spaces": [space_to_json(part) for part in space.items]}
    fields = {name: value for name, value in vars(space).items() if (name, value) != ("channels", None)}
    return {"kind": type(space).__name__, **fields}


def space_from_json(found: Any) -> Space:
    """Returns the space that `space_to_json` wrote. Raises ValueError, TypeError: another form."""
    match found:
        case {"kind": "Discrete", "n": n, "dtype": dtype}:
            return Discrete(_whole(n, least=1), _dtype(dtype))
        case {"kind": "MultiDiscrete", "nvec": list(nvec), "dtype": dtype}:
            return MultiDiscrete(tuple(_whole(n, least=1) for n in nvec), _dtype(dtype))
        case {"kind": "MultiBinary", "shape": list(shape), "dtype": dtype}:
            return MultiBinary(_shape(shape), _dtype(dtype))
        case {"kind": "Box", "shape": list(shape), "dtype": dtype, "low": low, "high": high}:
            box = Box(_shape(shape), _dtype(dtype), _bound(low), _bound(high), found.get("channels"))
            if box.channels is not None and (box.channels not in (0, 2) or len(box.shape) != 3):
                raise ValueError(f"spec: expected channels 0 or 2 of three axes, got {str(box.channels)[:40]}")
            if any(isinstance(b, tuple) and len(b) != math.prod(box.shape) for b in (box.low, box.high)):
                raise ValueError("spec: expected a bound with one element for each element of the space")
            return box
        case {"kind": "Dict", "spaces": dict(parts)}:
            return Dict(tuple((name, space_from_json(part)) for name, part in parts.items()))
        case {"kind": "Tuple", "spaces": list(parts)}:
            return Tuple(tuple(map(space_from_json, parts)))
    raise ValueError(f"spec: unknown space {str(found)[:100]}")


def _whole(n: Any, *, least: int = 0) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not least <= n <= _MAX_SIZE:
        raise ValueError(f"spec: expected a size of {least} to {_MAX_SIZE}, got {str(n)[:40]}")
    return n


def _shape(shape: list[Any]) -> tuple[int, ...]:
    found = tuple(map(_whole, shape))
    _whole(math.prod(found))
    return found


def _dtype(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"spec: expected the name of a dtype, got {str(name)[:40]}")
    if np.dtype(name).kind not in "biuf" or np.dtype(name).itemsize > 8:
        raise TypeError(f"spec: expected a dtype of numbers, got {name}")
    return name


def _bound(x: Any) -> float | tuple[float, ...]:
    return tuple(map(float, x)) if isinstance(x, list) else float(x)


def space_from_gymnasium(found: Any, what: str) -> Space:
    """Returns the space of a Gymnasium space. Its choices begin at 0; `gymnasium_starts` has their starts in the files.

    Args:
      found: Gymnasium space as plain data.
      what: name of the space, for messages.
    Raises:
      InputError: the data are not a Gymnasium space, or jrl has no such space.
    """
    try:
        match found["type"]:
            case "Dict":
                parts = found["subspaces"]
                if wrong := [name for name in parts if "/" in name or not name]:
                    raise InputError(
                        f"{what}: expected names of parts, not empty and without /, got {', '.join(wrong)!r}"
                    )
                return Dict(tuple((k, space_from_gymnasium(part, f"{what}[{k!r}]")) for k, part in parts.items()))
            case "Tuple":
                parts = enumerate(found["subspaces"])
                return Tuple(tuple(space_from_gymnasium(part, f"{what}[{i}]") for i, part in parts))
            case "Box":
                low, high = _common(found["low"]), _common(found["high"])
                fields = {**found, "dtype": found["dtype"], "low": low, "high": high}
            case "Discrete":
                fields = {**found, "n": found["n"]}
            case "MultiDiscrete":
                fields = {**found, "nvec": np.asarray(found["nvec"]).reshape(-1).tolist()}
            case "MultiBinary":
                fields = {"shape": found["n"] if isinstance(found["n"], list) else [found["n"]], "dtype": "int8"}
            case other:
                known = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
                raise InputError(f"{what}: expected {known}, got a space of the type {str(other)[:80]}")
        return space_from_json({"dtype": "int64", **fields, "kind": found["type"]})
    except InputError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as e:
        raise InputError(f"{what}: expected a Gymnasium space, got {str(found)[:80]} ({e})") from e


def _common(bound: Any) -> float | list[float]:
    """Returns a bound as one number if all elements are equal."""
    numbers = np.asarray(bound, np.float64).reshape(-1)
    return float(numbers[0]) if numbers.size and (numbers == numbers[0]).all() else numbers.tolist()


def gymnasium_starts(found: Any) -> PyTree:
    """Returns the first choice of each part of a space in the files, as a tree like the space; 0 if not given."""
    match found["type"]:
        case "Dict":
            return {name: gymnasium_starts(part) for name, part in found["subspaces"].items()}
        case "Tuple":
            return tuple(map(gymnasium_starts, found["subspaces"]))
    has_start = found["type"] in ("Discrete", "MultiDiscrete")
    return np.asarray(found.get("start") or 0).reshape(-1) if has_start else np.zeros(1, int)


def space_to_gymnasium(space: Space) -> dict[str, Any]:
    """Returns a space in Gymnasium's form, as Minari writes it."""
    found: dict[str, Any] = {"type": type(space).__name__}
    match space:
        case Dict():
            return found | {"subspaces": {name: space_to_gymnasium(part) for name, part in space.items}}
        case Tuple():
            return found | {"subspaces": [space_to_gymnasium(part) for part in space.items]}
        case Discrete():
            return found | {"dtype": "int64", "start": 0, "n": space.n}
        case MultiDiscrete():
            return found | {"dtype": space.dtype, "nvec": list(space.nvec), "start": [0] * len(space.nvec)}
        case MultiBinary():
            return found | {"n": list(space.shape)}
    low, high = (_in_dtype(bound, np.dtype(space.dtype)) for bound in space.bounds())
    return found | {"dtype": space.dtype, "shape": list(space.shape), "low": low, "high": high}


def _in_dtype(bound: np.ndarray, dtype: np.dtype) -> Any:
    """Returns a bound as nested lists. Integers have no infinity, so infinite bounds become the dtype's limits."""
    if dtype.kind not in "iu":
        return bound.astype(dtype).tolist()
    limits = np.iinfo(dtype)
    return np.vectorize(lambda x: int(min(max(x, limits.min), limits.max)), otypes=[object])(bound).tolist()
