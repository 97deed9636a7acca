"""Gymnasium's spaces as Minari's JSON has them: {"type": "Box", "dtype", "shape", "low", "high"} and its like."""

import math
from typing import Any

import numpy as np

from jrl.data.spaces_json import space_from_json
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, PyTree, Space, Tuple


def space(found: Any, what: str) -> Space:
    """Returns our space for Gymnasium's. Choices begin at 0: `starts` says where they begin in the files.

    Args:
      found: the space as plain data.
      what: it is of, for messages.
    Raises:
      InputError: there is no space of ours for it, or it is none.
    """
    try:
        return _space(found, what)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as e:
        raise InputError(f"{what}: {str(found)[:80]} is no space of Gymnasium's ({e})") from e


def _space(found: Any, what: str) -> Space:
    match found["type"]:
        case "Dict":
            parts = found["subspaces"].items()
            if wrong := [name for name, _ in parts if "/" in name or not name]:
                raise InputError(f"{what}: names of parts must not have a / or be empty: {', '.join(wrong)!r}")
            return Dict(tuple((name, space(part, f"{what}[{name!r}]")) for name, part in parts))
        case "Tuple":
            return Tuple(tuple(space(part, f"{what}[{i}]") for i, part in enumerate(found["subspaces"])))
        case "Box":
            bounds = {name: _bound(found[name]) for name in ("low", "high")}
            return space_from_json({"kind": "Box", "shape": found["shape"], "dtype": found["dtype"], **bounds})
        case "Discrete":
            return space_from_json({"kind": "Discrete", "n": found["n"], "dtype": found.get("dtype", "int64")})
        case "MultiDiscrete":
            nvec = np.asarray(found["nvec"]).reshape(-1).tolist()
            return space_from_json({"kind": "MultiDiscrete", "nvec": nvec, "dtype": found.get("dtype", "int64")})
        case "MultiBinary":
            shape = found["n"] if isinstance(found["n"], list) else [found["n"]]
            return space_from_json({"kind": "MultiBinary", "shape": shape, "dtype": "int8"})
    raise InputError(
        f"{what}: spaces of the type {found['type']} are not read: use Box, Discrete, MultiDiscrete, MultiBinary, or a "
        "Dict or Tuple of those"
    )


def _bound(given: Any) -> float | list[float]:
    """Returns a bound as one number where all elements have the same."""
    numbers = np.asarray(given, np.float64).reshape(-1)
    return float(numbers[0]) if numbers.size and (numbers == numbers[0]).all() else numbers.tolist()


def starts(found: Any) -> PyTree:
    """Returns the first choice of each part in the files, as an element of the space; 0 where they say nothing."""
    match found["type"]:
        case "Dict":
            return {name: starts(part) for name, part in found["subspaces"].items()}
        case "Tuple":
            return tuple(map(starts, found["subspaces"]))
        case "Discrete" | "MultiDiscrete":
            return np.asarray(found.get("start") or 0).reshape(-1)
    return np.zeros(1, int)


def plain(space: Space) -> dict[str, Any]:
    """Returns a space of ours as Minari writes Gymnasium's."""
    match space:
        case Dict():
            return {"type": "Dict", "subspaces": {name: plain(part) for name, part in space.items}}
        case Tuple():
            return {"type": "Tuple", "subspaces": [plain(part) for part in space.items]}
        case Discrete():
            return {"type": "Discrete", "dtype": "int64", "start": 0, "n": space.n}
        case MultiDiscrete():
            return {
                "type": "MultiDiscrete",
                "dtype": space.dtype,
                "nvec": list(space.nvec),
                "start": [0] * len(space.nvec),
            }
        case MultiBinary():
            return {"type": "MultiBinary", "n": list(space.shape)}
    low, high = (_in_dtype(b, space) for b in space.bounds())
    return {"type": "Box", "dtype": space.dtype, "shape": list(space.shape), "low": low, "high": high}


def _in_dtype(bound: np.ndarray, box: Box) -> Any:
    """Returns the numbers as nested lists; of integers, which have no infinity, the smallest or the largest."""
    dtype = np.dtype(box.dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.vectorize(lambda x: int(min(max(x, limits.min), limits.max)), otypes=[object])(bound).tolist()
    return bound.astype(dtype).tolist() if math.prod(box.shape) else []
