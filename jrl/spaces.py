"""Spaces as trees: their leaves, their sizes, and action masks.

A Dict observation may have a leaf `action_mask`, an array [K] of bool or numbers: 0 marks an action that is not
allowed. K is the number of choices of the action space, `num_choices`: n for a Discrete, sum(nvec) for a MultiDiscrete.
For a Dict or Tuple, K is the sum over its Discrete and MultiDiscrete leaves in the order of `leaves`. Networks do not
read the mask.

With several agents, a leaf `state` is the global state for critics and mixers. A team's observation also has leaves
`agents` and `present` (`jrl.envs.team`).
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import InputError
from jrl.types import (
    Array,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    PyTree,
    Space,
    Tuple,
    element,
)

ACTION_MASK = "action_mask"
AGENTS = "agents"
PRESENT = "present"
STATE = "state"


def leaves(space: Space) -> list[tuple[str, Leaf]]:
    """Returns the array spaces in `space`, each with its path ("" for `space` itself, "goal/0").

    The order is that of `jax.tree.leaves` for an element. Paths are unique (`join_paths`).

    >>> leaves(Dict((("pos", Box((2,))), ("goal", Tuple((Discrete(3), Discrete(4)))))))
    [('goal/0', Discrete(n=3, dtype='int32')), ('goal/1', Discrete(n=4, dtype='int32')), ('pos', Box(shape=(2,), ...))]
    """
    found, join = _leaves(space), _join(space)
    return [(join(names), leaf) for names, leaf in found]


def _leaves(space: Space) -> list[tuple[tuple[str, ...], Leaf]]:
    match space:
        case Dict():
            parts = sorted(space.items)
        case Tuple():
            parts = [(str(i), part) for i, part in enumerate(space.items)]
        case _:
            return [((), space)]
    return [((name, *names), leaf) for name, part in parts for names, leaf in _leaves(part)]


def join_paths(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Joins the names of each path by "/", one-to-one.

    If two paths would give the same text, "/" in names is written "~1" and "~" is written "~0" in all paths.

    >>> join_paths([("goal", "at"), ("pos",)]), join_paths([("goal", "at"), ("goal/at",)])
    (['goal/at', 'pos'], ['goal/at', 'goal~1at'])
    """
    return list(map(_find_join(paths), paths))


def _find_join(paths: Sequence[tuple[str, ...]]) -> Callable[[Sequence[str]], str]:
    """Returns the function that joins the names of one of these paths."""
    return _join_plainly if len(set(map(_join_plainly, paths))) == len(set(paths)) else _join_escaped


def _join(space: Space) -> Callable[[Sequence[str]], str]:
    """Returns the function that joins the names of a leaf or part of `space` to its path."""
    return _find_join([names for names, _ in _leaves(space)])


def _join_plainly(names: Sequence[str]) -> str:
    path = ""
    for name in reversed(names):  # empty names at the end are left out
        path = f"{name}/{path}" if path else name
    return path


def _join_escaped(names: Sequence[str]) -> str:
    return "/".join(map(escape, names))


def escape(name: str) -> str:
    """Returns the name without "/", one-to-one.

    >>> escape("goal/at"), escape("goal~1at")
    ('goal~1at', 'goal~01at')
    """
    return name.replace("~", "~0").replace("/", "~1")


def map_leaves(fn: Callable[..., Any], space: Space, *trees: PyTree) -> PyTree:
    """Returns `fn(leaf, *parts of trees)` for each leaf, in the tree structure of an element of `space`."""
    match space:
        case Dict():
            return {name: map_leaves(fn, part, *(t[name] for t in trees)) for name, part in space.items}
        case Tuple():
            return tuple(map_leaves(fn, part, *(t[i] for t in trees)) for i, part in enumerate(space.items))
    return fn(space, *trees)


def from_leaves(space: Space, parts: list[Any]) -> PyTree:
    """Returns the element of `space` whose leaves are `parts`, in the order of `leaves(space)`."""
    return jax.tree.unflatten(jax.tree.structure(map_leaves(lambda leaf: 0, space)), parts)


def replace_leaves(space: Space, new: Iterator[Leaf]) -> Space:
    """Returns `space` with its leaves replaced by those of `new`, in the order of `leaves(space)`."""
    if isinstance(space, Dict):
        found = {name: replace_leaves(part, new) for name, part in sorted(space.items)}
        return Dict(tuple((name, found[name]) for name, _ in space.items))
    if isinstance(space, Tuple):
        return Tuple(tuple(replace_leaves(part, new) for part in space.items))
    return next(new)


# ---------------------------------------------------------------- agents of different kinds


def kinds(each: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Groups equal items: indices by group, in the order of each group's first item; () if all items are equal.

    >>> kinds(["a", "b", "a"]), kinds(["a", "a"])
    (((0, 2), (1,)), ())
    """
    groups: list[list[int]] = []
    for i, item in enumerate(each):
        same = next((group for group in groups if each[group[0]] == item), None)
        if same is None:
            groups.append([i])
        else:
            same.append(i)
    return tuple(map(tuple, groups)) if len(groups) > 1 else ()


def combine_agents(each: Sequence[tuple[Space, Space]]) -> tuple[Space, Space, tuple[tuple[int, ...], ...]]:
    """Returns the observation space, action space and kinds (`EnvSpec.kinds`) of agents with these pairs of spaces."""
    found = kinds(each)
    if not found:
        return *each[0], ()
    observation, action = zip(*(each[kind[0]] for kind in found), strict=True)
    return Tuple(observation), Tuple(action), found


def columns(spec: EnvSpec, games: int | None = None) -> int | tuple[int, ...]:
    """Returns the columns of observations and actions: B, or a tuple with the columns of each kind of agents.

    `games` overrides the number of environments.
    """
    if len(spec.groups) == 1:  # not games * num_agents: a policy of some agents has fewer columns
        return spec.num_envs if games is None else games * spec.num_agents
    games = spec.games if games is None else games
    return tuple(games * len(group) for group in spec.groups)


def by_kind(spec: EnvSpec) -> tuple[EnvSpec, ...]:
    """Returns one EnvSpec per kind of agents; `spec` alone if all agents have the same spaces."""
    if len(spec.groups) == 1:
        return (spec,)
    fields = ("observation", "action", "env_action", "env_observation")

    def spec_of_kind(k: int, group: tuple[int, ...]) -> EnvSpec:
        kind_spaces: dict[str, Any] = {
            name: space.items[k] for name in fields if isinstance(space := getattr(spec, name), Tuple)
        }
        agents = tuple(name for i, name in enumerate(spec.agents) if i in group)
        return spec._replace(**kind_spaces, num_envs=spec.games * len(group), agents=agents, kinds=())

    return tuple(spec_of_kind(k, group) for k, group in enumerate(spec.groups))


def split_by_kind(kinds: Sequence[tuple[int, ...]], x: Any, axis: int = 0) -> tuple[Any, ...]:
    """Splits an array with the columns of all agents along `axis` (0 or 1) by kind; (x,) without kinds.

    >>> split_by_kind(((0, 2), (1,)), np.arange(6))
    (array([0, 2, 3, 5]), array([1, 4]))
    """
    if len(kinds) < 2:
        return (x,)
    split = x.reshape(*x.shape[:axis], -1, sum(map(len, kinds)), *x.shape[axis + 1 :])
    take = lambda kind: split[(slice(None),) * (axis + 1) + (np.array(kind),)]
    return tuple(take(kind).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :]) for kind in kinds)


def rows_by_kind(spec: EnvSpec, x: Any, axis: int = 0) -> tuple[Any, ...]:
    """Splits an array with the columns of all agents by `spec`'s kinds; (x,) without kinds."""
    return split_by_kind(spec.groups, x, axis)


def parts_by_kind(spec: EnvSpec, tree: PyTree) -> tuple[PyTree, ...]:
    """Returns the observations, actions or spaces of each kind of agents; (tree,) without kinds."""
    return tuple(tree) if len(spec.groups) > 1 else (tree,)


def from_parts(spec: EnvSpec, parts: Sequence[PyTree]) -> PyTree:
    """Joins the observations or actions of all kinds of agents: the inverse of `parts_by_kind`."""
    return tuple(parts) if len(spec.groups) > 1 else parts[0]


def kind_names(spec: EnvSpec) -> tuple[str, ...]:
    """Returns the name of each kind's first agent; ("",) without kinds."""
    return tuple(spec.agents[group[0]] for group in spec.groups) if len(spec.groups) > 1 else ("",)


def elements(space: Space, columns: int | tuple[int, ...]) -> PyTree:
    """Returns shapes and dtypes [columns, *] of a batch of elements; for a Tuple by kind, one column count per kind."""
    if isinstance(columns, tuple):
        assert isinstance(space, Tuple)
        return tuple(elements(part, n) for part, n in zip(space.items, columns, strict=True))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((columns, *x.shape), x.dtype), element(space))


# ---------------------------------------------------------------- parts and sizes


def part_names(space: Space) -> list[str]:
    """Returns the paths of a Dict's parts, nested Dicts included; [] for any other space.

    >>> part_names(Dict((("goal", Dict((("at", Box((2,))), ("kind", Discrete(3))))), ("pos", Box((2,))))))
    ['goal', 'goal/at', 'goal/kind', 'pos']
    """

    def parts(space: Space, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
        named = sorted(space.items) if isinstance(space, Dict) else []
        return [path for name, part in named for path in ((*prefix, name), *parts(part, (*prefix, name)))]

    return list(map(_join(space), parts(space, ())))


def is_within(path: str, paths: Collection[str]) -> bool:
    """Returns whether a path is in `paths` or lies below one of them.

    >>> is_within("goal/at", ["goal"]), is_within("goals", ["goal"])
    (True, False)
    """
    return any(f"{path}/".startswith(f"{other}/") for other in paths)


def without(space: Space, paths: Collection[str]) -> Space:
    """Returns `space` without the parts `paths`, which are names of `part_names(space)`; empty Dicts are removed, too.

    >>> without(Dict((("goal", Dict((("at", Box((2,))), ("kind", Discrete(3))))), ("pos", Box((2,))))), ["goal/at"])
    Dict(items=(('goal', Dict(items=(('kind', Discrete(n=3, dtype='int32')),))), ('pos', Box(shape=(2,), ...))))
    """
    join = _join(space)

    def remove(space: Space, prefix: tuple[str, ...]) -> Space:
        if not isinstance(space, Dict):
            return space
        rest = [
            (name, remove(part, (*prefix, name))) for name, part in space.items if join((*prefix, name)) not in paths
        ]
        return Dict(tuple((name, part) for name, part in rest if leaves(part)))

    return remove(space, ())


def remove_parts(space: Space, paths: Collection[str], obs: PyTree) -> PyTree:
    """Returns the elements [..., *] of `without(space, paths)` for elements of `space`."""
    pairs = zip(leaves(space), jax.tree.leaves(obs), strict=True)
    return from_leaves(without(space, paths), [x for (path, _), x in pairs if not is_within(path, paths)])


def fill_parts(space: Space, paths: Collection[str], obs: PyTree, zeros: Callable[[Leaf], Any]) -> PyTree:
    """Returns elements [..., *] of `space` for elements of `without(space, paths)`, with `zeros(leaf)` at `paths`."""
    rest = iter(jax.tree.leaves(obs))
    return from_leaves(space, [zeros(leaf) if is_within(path, paths) else next(rest) for path, leaf in leaves(space)])


def are_compatible(a: Space, b: Space) -> bool:
    """Returns whether a policy for one space can also be used in the other.

    Leaves must agree in path, kind, shape and dtype. The bounds of a Box may differ.
    """
    kind = lambda leaf: (type(leaf), leaf.shape, leaf.dtype)
    paths = lambda space: [path for path, _ in jax.tree.leaves_with_path(map_leaves(lambda leaf: 0, space))]
    if paths(a) != paths(b):
        return False
    pairs = [(x, y) for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True)]
    return all(kind(x) == kind(y) and (isinstance(x, Box) or x == y) for x, y in pairs)


def stack_space(space: Space, count: int) -> Space:
    """Returns the space of `count` elements of `space`, stacked along the first axis of each array.

    A Discrete or MultiDiscrete becomes one longer MultiDiscrete, because its arrays have no second axis. An element is
    an element of `space` with a batch axis [count], each array reshaped.

    >>> stack_space(Box((3,), low=0.0), 2), stack_space(Discrete(4), 2)
    (Box(shape=(2, 3), dtype='float32', low=0.0, high=inf), MultiDiscrete(nvec=(4, 4), dtype='int32'))
    """
    match space:
        case Dict():
            return Dict(tuple((name, stack_space(part, count)) for name, part in space.items))
        case Tuple():
            return Tuple(tuple(stack_space(part, count) for part in space.items))
        case Discrete():
            return MultiDiscrete((space.n,) * count, space.dtype)
        case MultiDiscrete():
            return MultiDiscrete(space.nvec * count, space.dtype)
        case MultiBinary():
            return MultiBinary((count, *space.shape), space.dtype)
    low, high = (b * count if isinstance(b, tuple) else b for b in (space.low, space.high))
    return Box((count, *space.shape), space.dtype, low, high)


def unstack_space(space: Space, count: int) -> Space | None:
    """Returns the space whose `stack_space(..., count)` is `space`; None if there is no such space.

    A Box gets the bounds of its first element.

    >>> unstack_space(MultiDiscrete((4, 4)), 2), unstack_space(Box((2, 3)), 2), unstack_space(Box((3,)), 2)
    (MultiDiscrete(nvec=(4,), dtype='int32'), Box(shape=(3,), dtype='float32', low=-inf, high=inf), None)
    """
    match space:
        case Dict():
            named = [(name, found) for name, part in space.items if (found := unstack_space(part, count)) is not None]
            return Dict(tuple(named)) if len(named) == len(space.items) else None
        case Tuple():
            parts = [found for part in space.items if (found := unstack_space(part, count)) is not None]
            return Tuple(tuple(parts)) if len(parts) == len(space.items) else None
        case MultiDiscrete():
            nvec = space.nvec[: len(space.nvec) // count]
            return MultiDiscrete(nvec, space.dtype) if nvec and nvec * count == space.nvec else None
        case Box() | MultiBinary():
            if space.shape[:1] != (count,):
                return None
            if isinstance(space, MultiBinary):
                return MultiBinary(space.shape[1:], space.dtype)
            size = math.prod(space.shape[1:])
            low, high = (b[:size] if isinstance(b, tuple) else b for b in (space.low, space.high))
            return Box(space.shape[1:], space.dtype, low, high)
    return None


def channel_axis(box: Box) -> int:
    """Returns the axis of the channels of an image or grid, 0 or 2: `box.channels`, or by its three sizes.

    Two equal neighbours are height and width, as in stacked frames with more channels than rows. Otherwise the smaller
    of the first and the last size is the channels.

    >>> [channel_axis(Box(shape)) for shape in ((3, 84, 84), (4, 4, 6), (5, 7, 8), (7, 5, 2))]
    [0, 2, 0, 2]
    >>> channel_axis(Box((5, 7, 8), channels=2))
    2
    """
    first, middle, last = box.shape
    if box.channels is not None:
        return box.channels
    return 0 if middle == last != first or (first < last and middle != first) else 2


def num_bytes(space: Space) -> int:
    """Returns the bytes of one element.

    >>> num_bytes(Dict((("image", Box((8, 8, 3), "uint8")), ("speed", Box((2,))))))
    200
    """
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for _, leaf in leaves(space))


def batch_shape(space: Space, tree: PyTree) -> tuple[int, ...]:
    """Returns the leading axes of elements [..., *]."""
    _, leaf = leaves(space)[0]
    x = jax.tree.leaves(tree)[0]
    return tuple(x.shape[: x.ndim - len(leaf.shape)])


def num_choices(space: Space) -> int:
    """Returns K, the length of an action mask for the action space; 0 if no action can be masked.

    >>> num_choices(Discrete(3)), num_choices(Tuple((MultiDiscrete((2, 3)), Box((4,)))))
    (3, 5)
    """
    return sum(choices(space))


def choices(space: Space) -> tuple[int, ...]:
    """Returns the lengths of the parts of a mask over the actions of `space`; of each part one choice is taken."""
    return tuple(n for _, leaf in leaves(space) for n in _sizes(leaf))


def _sizes(leaf: Leaf) -> tuple[int, ...]:
    match leaf:
        case Discrete():
            return (leaf.n,)
        case MultiDiscrete():
            return leaf.nvec
    return ()


def any_allowed(space: Space, mask: Array) -> Array:
    """Returns [...] bool: whether a mask [..., K] allows at least one option of each choice.

    >>> any_allowed(MultiDiscrete((2, 2)), jnp.array([[True, False, False, True], [True, True, False, False]]))
    Array([ True, False], dtype=bool)
    """
    found = [part.any(-1) for part in _choices(space, mask)]
    stacked: Any = np.stack(found) if isinstance(mask, np.ndarray) else jnp.stack(found)
    return stacked.all(0)


def any_choice(space: Space, mask: Array) -> Array:
    """Returns [...] bool: whether a mask [..., K] allows more than one action.

    >>> any_choice(MultiDiscrete((2, 2)), jnp.array([[True, False, True, True], [True, False, True, False]]))
    Array([ True, False], dtype=bool)
    """
    return jnp.stack([(part != 0).sum(-1) > 1 for part in _choices(space, mask)]).any(0)


def _choices(space: Space, mask: Array) -> Sequence[Array]:
    """Splits a mask into one part per choice."""
    ends = np.cumsum(choices(space))[:-1].tolist()
    return np.split(mask, ends, -1) if isinstance(mask, np.ndarray) else jnp.split(jnp.asarray(mask), ends, -1)


def masks_actions(spec: EnvSpec) -> bool:
    """Returns whether observations have an action mask.

    Raises:
      InputError: the leaf `action_mask` does not fit the action space.
    """
    if not isinstance(spec.observation, Dict) or ACTION_MASK not in dict(spec.observation.items):
        return False
    mask, choices = spec.observation[ACTION_MASK], num_choices(spec.action)
    if choices == 0:
        raise InputError(
            f"observation {ACTION_MASK}: the action space {spec.action} has no choices to mask: use Discrete or "
            "MultiDiscrete actions, or rename this part of the observation"
        )
    if not isinstance(mask, Box | MultiBinary) or mask.shape != (choices,):
        raise InputError(
            f"observation {ACTION_MASK}: expected {choices} entries, one for each choice of the action space "
            f"{spec.action}, got {mask}: change the mask's shape"
        )
    return True


def without_mask(space: Space) -> Space:
    """Returns the part of an observation space that networks read, without the mask; a single part is unwrapped.

    Raises:
      InputError: no part is left.
    """
    if not isinstance(space, Dict) or ACTION_MASK not in dict(space.items):
        return space
    rest = tuple((name, part) for name, part in space.items if name != ACTION_MASK)
    if not rest:
        raise InputError(f"observation: expected parts beside {ACTION_MASK}, got none: add one to the Dict")
    return rest[0][1] if len(rest) == 1 else Dict(rest)


def split_mask(space: Space, obs: PyTree) -> tuple[PyTree, Array | None]:
    """Returns (elements [..., *] of `without_mask(space)`, action mask [..., K] bool or None without a mask).

    >>> space = Dict((("action_mask", MultiBinary((2,))), ("x", Box((3,)))))
    >>> split_mask(space, {"action_mask": jnp.array([1, 0]), "x": jnp.ones(3)})
    (Array([1., 1., 1.], dtype=float32), Array([ True, False], dtype=bool))
    """
    if not isinstance(space, Dict) or ACTION_MASK not in dict(space.items):
        return obs, None
    rest = {name: x for name, x in obs.items() if name != ACTION_MASK}
    return (next(iter(rest.values())) if len(rest) == 1 else rest), obs[ACTION_MASK] != 0
