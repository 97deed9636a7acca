"""Conversion of Gymnasium's spaces and their elements to jrl's."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.gym import space_kind
from jrl.spaces import ACTION_MASK, num_choices
from jrl.types import Box, Dict, Discrete, InputError, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

_HUGE = 1e30  # "no bound": EnvPool and gymnax use the largest float, EnvPool also the smallest positive one
# dtypes that jax lacks by default -> dtypes used instead
NARROW = {"float64": "float32", "longdouble": "float32", "float128": "float32", "int64": "int32", "uint64": "uint32"}
_MOST_CHOICES = 2**16  # choices of one action element; more means that its bounds are the dtype's


class Converted(NamedTuple):
    """A space of jrl's, and a conversion of batches, numpy or jax arrays in dicts and tuples.

    Raw observations [B, *] are converted to elements of the space; actions [B, *] in the space to the environment's.
    """

    space: Space
    convert: Callable[[Any], Any]


def _bound(values: np.ndarray) -> float | tuple[float, ...]:
    """Returns equal bounds as one number, other bounds as a tuple in C order."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(flat[0]) if flat.size and (flat == flat[0]).all() else tuple(flat.tolist())


def make_box(shape: tuple[int, ...], low: Any, high: Any, dtype: str = "float32") -> Box:
    """Returns a Box with bounds that broadcast to `shape`; a library's "no bound" values become infinite."""
    low, high = map(_to_float64, (low, high))
    unbounded = (high > _HUGE) & (low > 0) & (low < 1 / _HUGE)
    low = np.where(unbounded | (low < -_HUGE), -np.inf, low)
    high = np.where(high > _HUGE, np.inf, high)
    low, high = (_bound(b if b.size == 1 else np.broadcast_to(b, shape)) for b in (low, high))
    return Box(shape, dtype, low, high)


def _to_float64(values: Any) -> np.ndarray:
    """Returns an array f64; equal values become one number, so that a large image's bounds need no copies."""
    values = np.asarray(values)
    return (
        np.array(values.flat[0], np.float64)
        if values.size and (values == values.flat[0]).all()
        else values.astype(np.float64)
    )


def _convert_box(space: Any) -> Box:
    name = np.dtype(space.dtype).name
    return make_box(tuple(space.shape), space.low, space.high, NARROW.get(name, name))


def _named_parts(what: str, space: Any) -> dict[Any, Any]:
    """Returns the spaces in a Dict (by name) or Tuple (by index). Raises InputError: it is empty or has other names."""
    found = dict(space.spaces.items() if space_kind(space) == "Dict" else enumerate(space.spaces))
    if not found:
        raise InputError(f"{what}: the space is empty: leave it out")
    if space_kind(space) == "Dict" and not all(isinstance(name, str) for name in found):
        raise InputError(f"{what}: names of a Dict must be strings, not {list(found)}")
    return found


def _convert_parts(what: str, space: Any, convert: Callable[[str, Any], Converted]) -> Converted:
    """Returns a Dict or Tuple, each part converted by `convert`, a function of its path and space."""
    found = {key: convert(f"{what}[{key!r}]", part) for key, part in _named_parts(what, space).items()}
    fns = {key: part.convert for key, part in found.items()}
    if space_kind(space) == "Dict":
        named = Dict(tuple((key, part.space) for key, part in found.items()))
        return Converted(named, lambda x: {key: fn(x[key]) for key, fn in fns.items()})
    return Converted(
        Tuple(tuple(part.space for part in found.values())), lambda x: tuple(fn(x[i]) for i, fn in fns.items())
    )


# ---------------------------------------------------------------- observations


def convert_observation_space(space: Any) -> Converted:
    """Returns jrl's observation space, and the conversion of observations into it.

    Dict and Tuple keep their structure. Dtypes stay if jax has them; float64 becomes float32, int64 int32, uint64
    uint32. A Discrete or MultiDiscrete of 64 bits becomes int32 and begins at 0. A MultiDiscrete becomes flat.

    Raises:
      InputError: an unsupported space, with the path to it.
    """
    return _convert_observation("observation", space)


def _convert_observation(what: str, space: Any) -> Converted:
    name = space_kind(space)
    if name == "Box":
        target = _convert_box(space)
        return Converted(target, _clip_to_dtype(space, target.dtype))
    if name == "Discrete":
        start = int(space.start)
        return Converted(Discrete(int(space.n)), lambda x: (x - start).astype("int32"))
    if name == "MultiDiscrete":
        parts = _multi_discrete(space.nvec, space.dtype)
        size, dtype, first = len(parts.nvec), parts.dtype, np.asarray(space.start).reshape(1, -1)
        if not first.any():
            return Converted(parts, lambda x: x.reshape(-1, size).astype(dtype))
        return Converted(parts, lambda x: (x.reshape(-1, size) - first.astype(x.dtype)).astype(dtype))
    if name == "MultiBinary":
        return Converted(MultiBinary(tuple(space.shape)), lambda x: x if x.dtype == "int8" else x.astype("int8"))
    if name in ("Dict", "Tuple"):
        return _convert_parts(what, space, _convert_observation)
    fix = "gymnasium.wrappers.TransformObservation converts others to a Box, such as a Text to its character codes"
    raise InputError(
        f"{what} space {space} is not supported: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of "
        f"these; {fix}"
    )


def _clip_to_dtype(space: Any, dtype: str) -> Callable[[Any], Any]:
    convert = lambda x: x if x.dtype == dtype else x.astype(dtype)
    if np.dtype(space.dtype).kind not in "iu" or space.dtype == dtype:
        return convert
    limits = np.iinfo(dtype)
    if np.min(space.low, initial=0) >= limits.min and np.max(space.high, initial=0) <= limits.max:
        return convert
    return lambda x: x.clip(limits.min, limits.max).astype(dtype)  # a cast alone would wrap around


def _multi_discrete(nvec: Any, dtype: Any) -> MultiDiscrete:
    name = np.dtype(dtype).name
    return MultiDiscrete(tuple(int(n) for n in np.asarray(nvec).reshape(-1)), NARROW.get(name, name))


# ---------------------------------------------------------------- actions


def convert_action_space(space: Any, dtype: Any = None) -> Converted:
    """Returns jrl's action space, and the conversion of its actions to the environment's.

    A Box of integers becomes a MultiDiscrete, or a Discrete if it has one element. All choices are int32 and begin at
    0, MultiBinary is int8, a Box is float32.

    Args:
      space: Gymnasium's space.
      dtype: dtype of the environment's actions, if it differs from the space's; for a space that is one array.
    Raises:
      InputError: an unsupported space, with the path to it.
    """
    return _convert_action("action", space, dtype)


def _convert_action(what: str, space: Any, dtype: Any = None) -> Converted:
    name = space_kind(space)
    if name in ("Dict", "Tuple"):
        return _convert_parts(what, space, _convert_action)
    target, first = _action_leaf(what, name, space)
    dtype, shape = np.dtype(space.dtype if dtype is None else dtype), tuple(space.shape)
    if first.any():
        added = first.astype(dtype).reshape(1, *shape)
        return Converted(target, lambda x: x.astype(dtype).reshape(x.shape[0], *shape) + added)
    if dtype.kind == "f" and dtype.itemsize > 4 and (narrow := _has_no_float32(space)).any():
        clip = lambda x: np.where(narrow, np.clip(x, space.low, space.high), x).astype(dtype)
        return Converted(target, lambda x: clip(x) if isinstance(x, np.ndarray) else x.astype(dtype))
    if shape == target.shape:
        return Converted(target, lambda x: x.astype(dtype))
    return Converted(target, lambda x: x.astype(dtype).reshape(x.shape[0], *shape))


def float32_inside(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest and the largest float32 between bounds f64; if there is none, the first is larger.

    float32(0.1) is larger than 0.1, and an environment may refuse an action beyond its bound.
    """
    with np.errstate(over="ignore"):  # a bound beyond the range of float32 becomes infinite
        first, last = low.astype(np.float32), high.astype(np.float32)
        return (
            np.where(first < low, np.nextafter(first, np.float32(np.inf)), first),
            np.where(last > high, np.nextafter(last, np.float32(-np.inf)), last),
        )


def _has_no_float32(space: Any) -> np.ndarray:
    first, last = float32_inside(np.asarray(space.low, np.float64), np.asarray(space.high, np.float64))
    return first > last


def _action_leaf(what: str, name: str, space: Any) -> tuple[Leaf, np.ndarray]:
    """Returns jrl's space, and the environment's numbers [*] of its zeros."""
    dtype = np.dtype(space.dtype) if space.dtype is not None else None
    if name == "Discrete":
        return Discrete(int(space.n)), np.asarray(space.start)
    if name == "MultiDiscrete":
        return _multi_discrete(space.nvec, "int32"), np.asarray(space.start)
    if name == "MultiBinary" or (name == "Box" and dtype is not None and dtype.kind == "b"):
        return MultiBinary(tuple(space.shape)), np.zeros(())
    if name == "Box" and dtype is not None and dtype.kind == "f":
        found = _convert_box(space)
        return Box(found.shape, "float32", found.low, found.high), np.zeros(())
    if name == "Box" and dtype is not None and dtype.kind in "iu":
        low, high = (np.asarray(b).reshape(-1).astype(object) for b in (space.low, space.high))  # no overflow
        sizes = high - low + 1
        if sizes.size and max(sizes) > _MOST_CHOICES:
            raise InputError(
                f"{what} space {space} is not supported: an element has {max(sizes)} choices: set the bounds of the "
                f"integer Box, at most {_MOST_CHOICES} numbers per element"
            )
        return (Discrete(int(sizes[0])) if sizes.size == 1 else _multi_discrete(sizes, "int32")), np.asarray(space.low)
    raise InputError(
        f"{what} space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of "
        "these"
    )


def to_numpy(tree: Any) -> Any:
    """Returns a tree as numpy arrays; the branch for one array saves the microsecond of a tree map."""
    return jax.tree.map(np.asarray, tree) if isinstance(tree, dict | tuple | list) else np.asarray(tree)


def check_action(space: Space, num_envs: int | tuple[int, ...], action: PyTree, path: str = "") -> None:
    """Raises ValueError unless `action` has the space's structure, batch shape, dtype and (on the host) range.

    EnvPool itself checks the first call only, and accepts any number of actions and any integer.

    Args:
      num_envs: batch size; a tuple has the size of each part, as `jrl.spaces.columns` returns for agents by kind.
    """
    if isinstance(space, Dict | Tuple):
        _check_parts(space, num_envs, action, path)
        return
    expected = (num_envs, *space.shape)
    if not hasattr(action, "dtype") or tuple(action.shape) != expected or action.dtype != space.dtype:
        found = f"{action.dtype} {tuple(action.shape)}" if hasattr(action, "dtype") else f"a {type(action).__name__}"
        raise ValueError(f"actions{path} must be {space.dtype} {expected}, not {found}")
    if isinstance(action, np.ndarray) and not isinstance(space, Box) and action.size:
        sizes = np.asarray(space.n if isinstance(space, Discrete) else getattr(space, "nvec", 2))
        if action.min() < 0 or (action >= sizes).any():
            raise ValueError(
                f"actions{path} must lie in 0 .. {sizes - 1}, but range over {action.min()} .. {action.max()}"
            )


def _check_parts(space: Dict | Tuple, num_envs: int | tuple[int, ...], action: PyTree, path: str) -> None:
    parts: dict[Any, Space]
    if isinstance(space, Dict):
        parts, fits = dict(space.items), isinstance(action, dict) and set(action) == set(dict(space.items))
        wanted = f"a dict of {', '.join(parts)}"
    else:
        parts = dict(enumerate(space.items))
        fits = isinstance(action, tuple | list) and len(action) == len(parts)
        wanted = f"a tuple of {len(parts)}"
    if not fits:
        raise ValueError(f"actions{path} must be {wanted}, not {type(action).__name__} {list(action)!r:.200}")
    counts = num_envs if isinstance(num_envs, tuple) else (num_envs,) * len(parts)
    for (key, part), count in zip(parts.items(), counts, strict=True):
        check_action(part, count, action[key], f"{path}[{key!r}]")


# ---------------------------------------------------------------- masks


def flatten_mask(observation: Converted, action: Converted) -> tuple[Converted, Converted]:
    """Returns both spaces, with an `action_mask` of several axes made flat: [K], as in `jrl.spaces`.

    A mask [elements, choices] belongs to a MultiDiscrete whose elements are masked independently. A mask with an axis
    per element masks combinations: the action space becomes a Discrete of all combinations.
    """
    if not isinstance(observation.space, Dict):
        return observation, action
    mask = dict(observation.space.items).get(ACTION_MASK)
    if not isinstance(mask, Box | MultiBinary) or len(mask.shape) < 2:
        return observation, action
    size, sizes, inner = math.prod(mask.shape), getattr(action.space, "nvec", ()), action.convert
    if size != num_choices(action.space):
        if mask.shape != sizes:
            return observation, action  # `jrl.spaces.masks_actions` reports the error
        action = Converted(Discrete(size), lambda x: inner(_unravel(x, sizes)))
    flat = MultiBinary((size,), mask.dtype) if isinstance(mask, MultiBinary) else Box((size,), mask.dtype, 0.0, 1.0)

    def convert(x: Any) -> PyTree:
        found = observation.convert(x)
        return {**found, ACTION_MASK: found[ACTION_MASK].reshape(-1, size)}

    items = tuple((name, flat if name == ACTION_MASK else part) for name, part in observation.space.items)
    return Converted(Dict(items), convert), action


def _unravel(x: Any, sizes: tuple[int, ...]) -> Any:
    """Returns numbers of combinations [B] as [B, len(sizes)], the last element changing fastest."""
    xp = x.__array_namespace__()  # numpy or jax.numpy
    strides = np.cumprod((1, *sizes[:0:-1]))[::-1]
    return xp.stack([x // int(stride) % int(n) for stride, n in zip(strides, sizes)], axis=-1)


def add_info_mask(observation: Converted, shape: tuple[int, ...]) -> Converted:
    """Adds an `action_mask` bool to a space; the result converts (raw observation, mask [B, *shape])."""

    def convert(pair: Any) -> PyTree:
        obs = observation.convert(pair[0])
        return {**(obs if isinstance(observation.space, Dict) else {"obs": obs}), ACTION_MASK: pair[1].astype(bool)}

    return Converted(add_mask_space(observation.space, shape), convert)


def add_mask_space(observation: Space, shape: tuple[int, ...]) -> Dict:
    """Returns an observation space with an action mask; a space that is not a Dict becomes its item `obs`."""
    parts = observation.items if isinstance(observation, Dict) else (("obs", observation),)
    return Dict((*parts, (ACTION_MASK, Box(shape, "bool", 0.0, 1.0))))
