"""Conversion of Gymnasium's spaces to ours, and of their elements."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.gym.faults import kind
from jrl.spaces import ACTION_MASK, num_choices
from jrl.types import Box, Dict, Discrete, InputError, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

_HUGE = 1e30  # EnvPool and gymnax write the largest float, and EnvPool the smallest positive one, for no bound
# dtypes that jax has not, and those in their place
NARROW = {"float64": "float32", "longdouble": "float32", "float128": "float32", "int64": "int32", "uint64": "uint32"}
_MOST_CHOICES = 2**16  # of one action element, beyond which the bounds of an integer are those of its dtype


class Observations(NamedTuple):
    """A space and the function that brings a batch of raw observations into it (numpy or jax arrays alike)."""

    space: Space
    convert: Callable[[Any], PyTree]


class Actions(NamedTuple):
    """A space and the function that brings a batch of its elements (numpy or jax arrays alike) into the environment's
    dtypes, shapes and first numbers; dicts and tuples of arrays [B, *] stay such."""

    space: Space
    convert: Callable[[PyTree], Any]


def _bound(values: np.ndarray) -> float | tuple[float, ...]:
    """Returns bounds as one number where all are equal, else as the numbers in C order."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(flat[0]) if flat.size and (flat == flat[0]).all() else tuple(flat.tolist())


def box(shape: tuple[int, ...], low: Any, high: Any, dtype: str = "float32") -> Box:
    """Makes a Box of bounds that broadcast to `shape`, infinite where a library means so."""
    low, high = map(_one, (low, high))
    unbounded = (high > _HUGE) & (low > 0) & (low < 1 / _HUGE)
    low = np.where(unbounded | (low < -_HUGE), -np.inf, low)
    high = np.where(high > _HUGE, np.inf, high)
    return Box(shape, dtype, *(_bound(b if b.size == 1 else np.broadcast_to(b, shape)) for b in (low, high)))


def _one(values: Any) -> np.ndarray:
    """Returns an array f64, as one number where all are equal: a large image's bounds need no copies."""
    values = np.asarray(values)
    return (
        np.array(values.flat[0], np.float64)
        if values.size and (values == values.flat[0]).all()
        else values.astype(np.float64)
    )


def _from_box(space: Any) -> Box:
    name = np.dtype(space.dtype).name
    return box(tuple(space.shape), space.low, space.high, NARROW.get(name, name))


def _parts(what: str, space: Any) -> dict[Any, Any]:
    """Returns the spaces in a Dict (by name) or Tuple (by place). Raises InputError: none, or no name as text."""
    found = dict(space.spaces.items() if kind(space) == "Dict" else enumerate(space.spaces))
    if not found:
        raise InputError(f"{what}: it is empty: leave it out")
    if kind(space) == "Dict" and not all(isinstance(name, str) for name in found):
        raise InputError(f"{what}: names of a Dict must be strings, not {list(found)}")
    return found


# ---------------------------------------------------------------- observations


def observations(space: Any) -> Observations:
    """Returns our observation space, and the conversion of observations into it.

    Dict and Tuple stay such, dtypes stay what they are where jax has them (float64 becomes float32, int64 int32, uint64
    uint32; of a Discrete or a MultiDiscrete with 64 bits, int32), a Discrete or MultiDiscrete begins at 0, and a
    MultiDiscrete of several axes has one.

    Raises:
      InputError: a space without an equivalent, with the path to it.
    """
    return _observations("observation", space)


def _observations(what: str, space: Any) -> Observations:
    name = kind(space)
    if name == "Box":
        target = _from_box(space)
        return Observations(target, _narrowed(space, target.dtype))
    if name == "Discrete":
        start = int(space.start)
        return Observations(Discrete(int(space.n)), lambda x: (x - start).astype("int32"))
    if name == "MultiDiscrete":
        parts = _multi_discrete(space.nvec, space.dtype)
        size, dtype, first = len(parts.nvec), parts.dtype, np.asarray(space.start).reshape(1, -1)
        if not first.any():
            return Observations(parts, lambda x: x.reshape(-1, size).astype(dtype))
        return Observations(parts, lambda x: (x.reshape(-1, size) - first.astype(x.dtype)).astype(dtype))
    if name == "MultiBinary":
        return Observations(MultiBinary(tuple(space.shape)), lambda x: x if x.dtype == "int8" else x.astype("int8"))
    if name in ("Dict", "Tuple"):
        raw = _parts(what, space)
        found = {key: _observations(f"{what}[{key!r}]", part) for key, part in raw.items()}
        fns = {key: part.convert for key, part in found.items()}
        if name == "Dict":
            spaces = Dict(tuple((key, part.space) for key, part in found.items()))
            return Observations(spaces, lambda x: {key: fn(x[key]) for key, fn in fns.items()})
        return Observations(
            Tuple(tuple(part.space for part in found.values())),
            lambda x: tuple(fn(x[i]) for i, fn in fns.items()),
        )
    mend = "gymnasium.wrappers.TransformObservation makes a Box of others, such as the numbers of a Text's characters"
    raise InputError(
        f"{what} space {space} is not supported: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of "
        f"those; {mend}"
    )


def _narrowed(space: Any, dtype: str) -> Callable[[Any], Any]:
    convert = lambda x: x if x.dtype == dtype else x.astype(dtype)
    if np.dtype(space.dtype).kind not in "iu" or space.dtype == dtype:
        return convert
    limits = np.iinfo(dtype)
    if np.min(space.low, initial=0) >= limits.min and np.max(space.high, initial=0) <= limits.max:
        return convert
    return lambda x: x.clip(limits.min, limits.max).astype(dtype)  # rather than another number altogether


def _multi_discrete(nvec: Any, dtype: Any) -> MultiDiscrete:
    name = np.dtype(dtype).name
    return MultiDiscrete(tuple(int(n) for n in np.asarray(nvec).reshape(-1)), NARROW.get(name, name))


# ---------------------------------------------------------------- actions


def actions(space: Any, dtype: Any = None) -> Actions:
    """Returns our action space, and the conversion of its actions to the environment's.

    A Box of integers becomes a MultiDiscrete, or a Discrete if it has one element. All choices are int32 and begin
    at 0, MultiBinary is int8, a Box float32.

    Args:
      space: Gymnasium's.
      dtype: of the environment's actions, where it is not the space's; for a space that is one array.
    Raises:
      InputError: a space without an equivalent, with the path to it.
    """
    return _actions("action", space, dtype)


def _actions(what: str, space: Any, dtype: Any = None) -> Actions:
    name = kind(space)
    if name in ("Dict", "Tuple"):
        found = {key: _actions(f"{what}[{key!r}]", part) for key, part in _parts(what, space).items()}
        fns = {key: part.convert for key, part in found.items()}
        if name == "Dict":
            spaces = Dict(tuple((key, part.space) for key, part in found.items()))
            return Actions(spaces, lambda x: {key: fn(x[key]) for key, fn in fns.items()})
        return Actions(
            Tuple(tuple(part.space for part in found.values())), lambda x: tuple(fn(x[i]) for i, fn in fns.items())
        )
    target, first = _action_leaf(what, name, space)
    dtype, shape = np.dtype(space.dtype if dtype is None else dtype), tuple(space.shape)
    if first.any():
        added = first.astype(dtype).reshape(1, *shape)
        return Actions(target, lambda x: x.astype(dtype).reshape(x.shape[0], *shape) + added)
    if dtype.kind == "f" and dtype.itemsize > 4 and (narrow := _narrow(space)).any():
        held = lambda x: np.where(narrow, np.clip(x, space.low, space.high), x).astype(dtype)
        return Actions(target, lambda x: held(x) if isinstance(x, np.ndarray) else x.astype(dtype))
    if shape == target.shape:
        return Actions(target, lambda x: x.astype(dtype))
    return Actions(target, lambda x: x.astype(dtype).reshape(x.shape[0], *shape))


def float32_inside(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest and the largest float32 between bounds f64; where there is none, the first is larger.

    float32(0.1) is larger than 0.1, and an environment may refuse an action beyond its bound.
    """
    with np.errstate(over="ignore"):  # a bound beyond the range of float32 becomes infinite
        first, last = low.astype(np.float32), high.astype(np.float32)
        return (
            np.where(first < low, np.nextafter(first, np.float32(np.inf)), first),
            np.where(last > high, np.nextafter(last, np.float32(-np.inf)), last),
        )


def _narrow(space: Any) -> np.ndarray:
    first, last = float32_inside(np.asarray(space.low, np.float64), np.asarray(space.high, np.float64))
    return first > last


def _action_leaf(what: str, name: str, space: Any) -> tuple[Leaf, np.ndarray]:
    """Returns our space, and the numbers [*] that its zeros stand for."""
    dtype = np.dtype(space.dtype) if space.dtype is not None else None
    if name == "Discrete":
        return Discrete(int(space.n)), np.asarray(space.start)
    if name == "MultiDiscrete":
        return _multi_discrete(space.nvec, "int32"), np.asarray(space.start)
    if name == "MultiBinary" or (name == "Box" and dtype is not None and dtype.kind == "b"):
        return MultiBinary(tuple(space.shape)), np.zeros(())
    if name == "Box" and dtype is not None and dtype.kind == "f":
        found = _from_box(space)
        return Box(found.shape, "float32", found.low, found.high), np.zeros(())
    if name == "Box" and dtype is not None and dtype.kind in "iu":
        low, high = (np.asarray(b).reshape(-1).astype(object) for b in (space.low, space.high))  # no overflow
        sizes = high - low + 1
        if sizes.size and max(sizes) > _MOST_CHOICES:
            raise InputError(
                f"{what} space {space} is not supported: an element has {max(sizes)} choices: give a Box of integers "
                f"bounds, of at most {_MOST_CHOICES} numbers for each"
            )
        return (Discrete(int(sizes[0])) if sizes.size == 1 else _multi_discrete(sizes, "int32")), np.asarray(space.low)
    raise InputError(
        f"{what} space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of "
        "those"
    )


def on_host(tree: Any) -> Any:
    """Returns a tree as numpy arrays; one array without the microsecond that looking for a tree takes."""
    return jax.tree.map(np.asarray, tree) if isinstance(tree, dict | tuple | list) else np.asarray(tree)


def check_action(space: Space, num_envs: int | tuple[int, ...], action: PyTree, path: str = "") -> None:
    """Raises ValueError unless `action` has the structure, the batch shape, the dtype and (on the host) the range of
    the space; `num_envs` of each part where it is a tuple, as `jrl.spaces.columns` gives it of agents by kind.

    EnvPool itself looks at the first call only, and takes any number of actions and any integer.
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


def with_flat_mask(seen: Observations, taken: Actions) -> tuple[Observations, Actions]:
    """Returns both spaces, with an `action_mask` of several axes made flat: [K], as `jrl.spaces` says.

    A mask [elements, choices] goes with a MultiDiscrete whose elements can be chosen each by itself. A mask with an
    axis for each element, of all combinations, goes with one choice among all of them: the space becomes Discrete.
    """
    if not isinstance(seen.space, Dict):
        return seen, taken
    mask = dict(seen.space.items).get(ACTION_MASK)
    if not isinstance(mask, Box | MultiBinary) or len(mask.shape) < 2:
        return seen, taken
    size, sizes, inner = math.prod(mask.shape), getattr(taken.space, "nvec", ()), taken.convert
    if size != num_choices(taken.space):
        if mask.shape != sizes:
            return seen, taken  # `jrl.spaces.masks_actions` says what is wrong
        taken = Actions(Discrete(size), lambda x: inner(_unravelled(x, sizes)))
    flat = MultiBinary((size,), mask.dtype) if isinstance(mask, MultiBinary) else Box((size,), mask.dtype, 0.0, 1.0)

    def convert(x: Any) -> PyTree:
        found = seen.convert(x)
        return {**found, ACTION_MASK: found[ACTION_MASK].reshape(-1, size)}

    items = tuple((name, flat if name == ACTION_MASK else part) for name, part in seen.space.items)
    return Observations(Dict(items), convert), taken


def _unravelled(x: Any, sizes: tuple[int, ...]) -> Any:
    """Returns numbers of combinations [B] as [B, len(sizes)], the last element changing fastest."""
    xp = x.__array_namespace__()  # numpy or jax.numpy
    strides = np.cumprod((1, *sizes[:0:-1]))[::-1]
    return xp.stack([x // int(stride) % int(n) for stride, n in zip(strides, sizes)], axis=-1)


def with_mask_of_infos(seen: Observations, choices: tuple[int, ...]) -> Observations:
    """Adds an `action_mask` bool of shape `choices` to a space; converts (raw observation, mask [B, *choices])."""
    inner = seen.convert
    mask = (ACTION_MASK, Box(choices, "bool", 0.0, 1.0))
    if isinstance(seen.space, Dict):
        return Observations(
            Dict((*seen.space.items, mask)), lambda pair: {**inner(pair[0]), ACTION_MASK: pair[1].astype(bool)}
        )
    return Observations(
        Dict((("obs", seen.space), mask)), lambda pair: {"obs": inner(pair[0]), ACTION_MASK: pair[1].astype(bool)}
    )


def with_mask(observation: Space, action: Discrete) -> Dict:
    """Returns an observation space with a mask of the actions; a space that is no Dict becomes its item `obs`."""
    parts = observation.items if isinstance(observation, Dict) else (("obs", observation),)
    return Dict((*parts, (ACTION_MASK, Box((action.n,), "bool", 0.0, 1.0))))
