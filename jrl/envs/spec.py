"""From Gymnasium's spaces to ours."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jrl.types import Array, Box, Discrete, EnvSpec, InputError, MultiDiscrete, Space


class Observations(NamedTuple):
    """A space and the function that brings a batch of raw observations into it (numpy or jax arrays alike)."""

    space: Space
    convert: Callable[[Any], Any]


def _bound(values: np.ndarray) -> float | tuple[float, ...]:
    """One number where all are equal; the numbers in C order otherwise."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(flat[0]) if flat.size and (flat == flat[0]).all() else tuple(flat.tolist())


def _box(space: Any) -> Box:
    dtype = str(space.dtype)
    if dtype != "uint8":
        dtype = "float32"  # float64 and small integers: networks read float32
    low, high = np.asarray(space.low), np.asarray(space.high)
    if np.issubdtype(space.dtype, np.floating):
        # EnvPool writes C++'s limits where there is none, and takes the smallest positive number for the lowest
        limits = np.finfo(space.dtype)
        low = np.where((low == limits.tiny) | (low <= limits.min), -np.inf, low)
        high = np.where(high >= limits.max, np.inf, high)
    return Box(tuple(space.shape), dtype, _bound(low), _bound(high))


def observations(space: Any) -> Observations:
    """The observation space; a Dict or Tuple of Boxes becomes one flat Box, its parts in the space's own order.

    Raises:
      InputError: a space without an equivalent.
    """
    kind = type(space).__name__
    if kind == "Box":
        box = _box(space)
        return Observations(box, lambda x: x if x.dtype == box.dtype else x.astype(box.dtype))
    if kind == "Discrete":
        start = int(space.start)
        return Observations(Discrete(int(space.n)), lambda x: (x - start).astype("int32"))
    if kind in ("MultiDiscrete", "MultiBinary"):
        return Observations(_discrete_parts(space), lambda x: x.reshape(x.shape[0], -1).astype("int32"))
    if kind in ("Dict", "Tuple"):
        parts = dict(space.spaces.items()) if kind == "Dict" else dict(enumerate(space.spaces))
        if all(type(part).__name__ == "Box" for part in parts.values()):
            return _flat(parts)
    raise InputError(
        f"observation space {space} is not supported: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or "
        "Tuple of Boxes; gymnasium.wrappers.FlattenObservation makes a Box of most others"
    )


def _flat(parts: dict[Any, Any]) -> Observations:
    boxes = {name: _box(part) for name, part in parts.items()}
    size = sum(math.prod(b.shape) for b in boxes.values())
    low, high = (np.concatenate([b.bounds()[i].reshape(-1) for b in boxes.values()]) for i in (0, 1))

    def convert(x: Any) -> Any:
        columns = [x[name].reshape(x[name].shape[0], -1).astype("float32") for name in boxes]
        xp = columns[0].__array_namespace__()  # numpy or jax.numpy
        return xp.concatenate(columns, axis=-1)

    return Observations(Box((size,), "float32", _bound(low), _bound(high)), convert)


def _discrete_parts(space: Any) -> MultiDiscrete:
    if type(space).__name__ == "MultiBinary":
        return MultiDiscrete((2,) * int(np.prod(space.n)))
    return MultiDiscrete(tuple(int(n) for n in np.asarray(space.nvec).reshape(-1)))


def action_space(space: Any) -> Space:
    """The action space.

    Raises:
      InputError: a space without an equivalent.
    """
    kind = type(space).__name__
    if kind == "Discrete" and int(space.start) == 0:
        return Discrete(int(space.n))
    if kind in ("MultiDiscrete", "MultiBinary") and len(space.shape) == 1:
        return _discrete_parts(space)
    if kind == "Box" and np.issubdtype(space.dtype, np.floating):
        return _box(space)
    raise InputError(
        f"action space {space} is not supported: use Discrete (from 0), flat MultiDiscrete or MultiBinary, or a Box of "
        "floats"
    )


def check_action(spec: EnvSpec, action: Array) -> None:
    """Raises ValueError unless `action` has the batch shape, the dtype and (on the host) the range of the space.

    EnvPool itself looks at the first call only, and takes any number of actions and any integer.
    """
    space = spec.action
    expected = (spec.num_envs, *space.shape)
    if tuple(action.shape) != expected or action.dtype != space.dtype:
        raise ValueError(f"actions must be {space.dtype} {expected}, not {action.dtype} {tuple(action.shape)}")
    if isinstance(action, np.ndarray) and not isinstance(space, Box) and action.size:
        high = np.asarray(space.n if isinstance(space, Discrete) else space.nvec)
        if action.min() < 0 or (action >= high).any():
            raise ValueError(f"actions must lie in 0 .. {high} - 1, but range over {action.min()} .. {action.max()}")
