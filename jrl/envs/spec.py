"""From Gymnasium's spaces to ours."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jrl.types import Array, Box, Discrete, InputError, MultiDiscrete, Space

_HUGE = 1e30  # EnvPool and gymnax write the largest float, and EnvPool the smallest positive one, for no bound


class Observations(NamedTuple):
    """A space and the function that brings a batch of raw observations into it (numpy or jax arrays alike)."""

    space: Space
    convert: Callable[[Any], Any]


def _bound(values: np.ndarray) -> float | tuple[float, ...]:
    """One number where all are equal; the numbers in C order otherwise."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(flat[0]) if flat.size and (flat == flat[0]).all() else tuple(flat.tolist())


def box(shape: tuple[int, ...], low: Any, high: Any, dtype: str = "float32") -> Box:
    """A Box from bounds that broadcast to `shape`, infinite where a library means so."""
    low, high = (np.broadcast_to(np.asarray(b, np.float64), shape) for b in (low, high))
    unbounded = (high > _HUGE) & (low > 0) & (low < 1 / _HUGE)
    low = np.where(unbounded | (low < -_HUGE), -np.inf, low)
    return Box(shape, dtype, _bound(low), _bound(np.where(high > _HUGE, np.inf, high)))


def _from_box(space: Any) -> Box:
    dtype = "uint8" if str(space.dtype) == "uint8" else "float32"  # networks read float32; pixels are kept small
    return box(tuple(space.shape), space.low, space.high, dtype)


def observations(space: Any) -> Observations:
    """The observation space; a Dict or Tuple of Boxes becomes one flat Box, its parts in the space's own order.

    float64 and small integers become float32, uint8 stays uint8 (in a flat Box it becomes float32, too).

    Raises:
      InputError: a space without an equivalent.
    """
    kind = type(space).__name__
    if kind == "Box":
        target = _from_box(space)
        return Observations(target, lambda x: x if x.dtype == target.dtype else x.astype(target.dtype))
    if kind == "Discrete":
        start = int(space.start)
        return Observations(Discrete(int(space.n)), lambda x: (x - start).astype("int32"))
    if kind in ("MultiDiscrete", "MultiBinary"):
        parts = _discrete_parts(space)
        return Observations(parts, lambda x: x.reshape(-1, len(parts.nvec)).astype("int32"))
    if kind in ("Dict", "Tuple"):
        named = dict(space.spaces.items()) if kind == "Dict" else dict(enumerate(space.spaces))
        if all(type(part).__name__ == "Box" for part in named.values()):
            return _flat(named)
    raise InputError(
        f"observation space {space} is not supported: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or "
        "Tuple of Boxes; gymnasium.wrappers.FlattenObservation makes a Box of most others"
    )


def _flat(parts: dict[Any, Any]) -> Observations:
    boxes = {name: _from_box(part) for name, part in parts.items()}
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
    if kind in ("MultiDiscrete", "MultiBinary"):
        return _discrete_parts(space)
    if kind == "Box" and np.issubdtype(space.dtype, np.floating):
        return _from_box(space)
    raise InputError(
        f"action space {space} is not supported: use Discrete (from 0), MultiDiscrete, MultiBinary or a Box of floats"
    )


def check_action(space: Space, num_envs: int, action: Array) -> None:
    """Raises ValueError unless `action` has the batch shape, the dtype and (on the host) the range of the space.

    EnvPool itself looks at the first call only, and takes any number of actions and any integer.
    """
    expected = (num_envs, *space.shape)
    if tuple(action.shape) != expected or action.dtype != space.dtype:
        raise ValueError(f"actions must be {space.dtype} {expected}, not {action.dtype} {tuple(action.shape)}")
    if isinstance(action, np.ndarray) and not isinstance(space, Box) and action.size:
        sizes = np.asarray(space.n if isinstance(space, Discrete) else space.nvec)
        if action.min() < 0 or (action >= sizes).any():
            raise ValueError(f"actions must lie in 0 .. {sizes - 1}, but range over {action.min()} .. {action.max()}")
