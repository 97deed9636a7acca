"""Spaces as trees: their leaves, their sizes, and which actions a mask in the observation allows.

A Dict observation with a leaf `action_mask` says which actions can be taken: an array [K] of bool or numbers, 0 for an
action that cannot. K counts the choices of the action space, `num_choices`: n of a Discrete, sum(nvec) of a
MultiDiscrete; of a Dict or Tuple those of its Discrete and MultiDiscrete leaves one after the other, in the order of
`leaves`. Networks do not read that leaf.

Of several agents a leaf `state` is the view of all that critics and mixers may read; a team's observation has leaves
`agents` and `present` beside it (`jrl.envs.team`).
"""

import math
from collections.abc import Callable, Collection, Sequence
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
AGENTS, PRESENT, STATE = "agents", "present", "state"


def leaves(space: Space) -> list[tuple[str, Leaf]]:
    """Returns the spaces of arrays in `space`, each with its path ("" for `space` itself, "goal/0"), in the order in
    which `jax.tree.leaves` gives those of an element. No two have the same path (`joined`).

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


def joined(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Joins the names of each path by /, one-to-one.

    Where two paths would become the same text, / in a name is written ~1 and ~ is written ~0 in all of them.

    >>> joined([("goal", "at"), ("pos",)]), joined([("goal", "at"), ("goal/at",)])
    (['goal/at', 'pos'], ['goal/at', 'goal~1at'])
    """
    return list(map(_plain if len(set(map(_plain, paths))) == len(set(paths)) else _escaped, paths))


def _join(space: Space) -> Callable[[Sequence[str]], str]:
    """Returns the function that joins the names of each leaf of `space`, and of each part, to its path."""
    paths = [names for names, _ in _leaves(space)]
    return _plain if len(set(map(_plain, paths))) == len(paths) else _escaped


def _plain(names: Sequence[str]) -> str:
    path = ""
    for name in reversed(names):
        path = f"{name}/{path}" if path else name
    return path


def _escaped(names: Sequence[str]) -> str:
    return "/".join(map(escaped, names))


def escaped(name: str) -> str:
    """Returns a text without /, another one for each text.

    >>> escaped("goal/at"), escaped("goal~1at")
    ('goal~1at', 'goal~01at')
    """
    return name.replace("~", "~0").replace("/", "~1")


def map_leaves(fn: Callable[..., Any], space: Space, *trees: PyTree) -> PyTree:
    """Returns `fn(leaf, *parts of trees)` for each leaf; the results as an element of `space` has them."""
    match space:
        case Dict():
            return {name: map_leaves(fn, part, *(t[name] for t in trees)) for name, part in space.items}
        case Tuple():
            return tuple(map_leaves(fn, part, *(t[i] for t in trees)) for i, part in enumerate(space.items))
    return fn(space, *trees)


def of_leaves(space: Space, parts: list[Any]) -> PyTree:
    """Returns `parts`, one for each of `leaves(space)`, as an element of `space` has them."""
    return jax.tree.unflatten(jax.tree.structure(map_leaves(lambda leaf: 0, space)), parts)


# ---------------------------------------------------------------- agents of different kinds


def kinds(each: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Groups agents by what each has: numbers by kind, in the order of the first of each; () where all are alike.

    >>> kinds(["a", "b", "a"]), kinds(["a", "a"])
    (((0, 2), (1,)), ())
    """
    found: list[list[int]] = []
    for i, own in enumerate(each):
        alike = next((kind for kind in found if each[kind[0]] == own), None)
        if alike is None:
            found.append([i])
        else:
            alike.append(i)
    return tuple(map(tuple, found)) if len(found) > 1 else ()


def of_agents(each: Sequence[tuple[Space, Space]]) -> tuple[Space, Space, tuple[tuple[int, ...], ...]]:
    """Returns the observation space, action space and kinds (`EnvSpec.kinds`) of agents with these two spaces each."""
    found = kinds(each)
    if not found:
        return *each[0], ()
    observation, action = zip(*(each[kind[0]] for kind in found), strict=True)
    return Tuple(observation), Tuple(action), found


def columns(spec: EnvSpec, games: int | None = None) -> int | tuple[int, ...]:
    """Returns the columns of observations and actions: B, or of agents of different kinds those of each kind.

    With `games`, those of so many environments.
    """
    if len(spec.groups) == 1:  # a policy of some agents has fewer columns than there are agents
        return spec.num_envs if games is None else games * spec.num_agents
    games = spec.games if games is None else games
    return tuple(games * len(group) for group in spec.groups)


def by_kind(spec: EnvSpec) -> tuple[EnvSpec, ...]:
    """Returns the environments as the agents of each kind see them; `spec` alone where all are alike."""
    if len(spec.groups) == 1:
        return (spec,)
    whole = ("observation", "action", "env_action", "env_observation")

    def one(k: int, group: tuple[int, ...]) -> EnvSpec:
        own: dict[str, Any] = {
            name: space.items[k] for name in whole if isinstance(space := getattr(spec, name), Tuple)
        }
        agents = tuple(name for i, name in enumerate(spec.agents) if i in group)
        return spec._replace(**own, num_envs=spec.games * len(group), agents=agents, kinds=())

    return tuple(one(k, group) for k, group in enumerate(spec.groups))


def of_kinds(kinds: Sequence[tuple[int, ...]], x: Any, axis: int = 0) -> tuple[Any, ...]:
    """Returns what each kind has of an array with the columns of all agents along `axis`, 0 or 1; (x,) without kinds.

    >>> of_kinds(((0, 2), (1,)), np.arange(6))
    (array([0, 2, 3, 5]), array([1, 4]))
    """
    if len(kinds) < 2:
        return (x,)
    split = x.reshape(*x.shape[:axis], -1, sum(map(len, kinds)), *x.shape[axis + 1 :])
    take = lambda kind: split[(slice(None),) * (axis + 1) + (np.array(kind),)]
    return tuple(take(kind).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :]) for kind in kinds)


def rows_by_kind(spec: EnvSpec, x: Any, axis: int = 0) -> tuple[Any, ...]:
    """Returns what each kind of agents has of an array with the columns of all agents; (x,) where all are alike."""
    return of_kinds(spec.groups, x, axis)


def parts_by_kind(spec: EnvSpec, tree: PyTree) -> tuple[PyTree, ...]:
    """Returns the observations, actions or spaces of each kind of agents; (tree,) where all are alike."""
    return tuple(tree) if len(spec.groups) > 1 else (tree,)


def from_parts(spec: EnvSpec, parts: Sequence[PyTree]) -> PyTree:
    """Returns observations or actions as the environments have them, of those of each kind: undoes `parts_by_kind`."""
    return tuple(parts) if len(spec.groups) > 1 else parts[0]


def kind_names(spec: EnvSpec) -> tuple[str, ...]:
    """Names each kind of agents after its first agent; ("",) where all are alike."""
    return tuple(spec.agents[group[0]] for group in spec.groups) if len(spec.groups) > 1 else ("",)


def elements(space: Space, columns: int | tuple[int, ...]) -> PyTree:
    """Returns shapes and dtypes [columns, *] of so many elements of a space; of a Tuple by kind of so many of each."""
    if isinstance(columns, tuple):
        assert isinstance(space, Tuple)
        return tuple(elements(part, n) for part, n in zip(space.items, columns, strict=True))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((columns, *x.shape), x.dtype), element(space))


# ---------------------------------------------------------------- parts and sizes


def names(space: Space) -> list[str]:
    """Returns the paths of the parts of a Dict, those of its Dicts among them; none of any other space.

    >>> names(Dict((("goal", Dict((("at", Box((2,))), ("kind", Discrete(3))))), ("pos", Box((2,))))))
    ['goal', 'goal/at', 'goal/kind', 'pos']
    """

    def parts(space: Space, at: tuple[str, ...]) -> list[tuple[str, ...]]:
        named = sorted(space.items) if isinstance(space, Dict) else []
        return [found for name, part in named for found in ((*at, name), *parts(part, (*at, name)))]

    return list(map(_join(space), parts(space, ())))


def within(path: str, paths: Collection[str]) -> bool:
    """Tells whether a path is one of `paths`, or that of a part of one.

    >>> within("goal/at", ["goal"]), within("goals", ["goal"])
    (True, False)
    """
    return any(f"{path}/".startswith(f"{other}/") for other in paths)


def without(space: Space, paths: Collection[str]) -> Space:
    """Returns `space` without the parts `paths`, each one of `names(space)`, and without Dicts that become empty.

    >>> without(Dict((("goal", Dict((("at", Box((2,))), ("kind", Discrete(3))))), ("pos", Box((2,))))), ["goal/at"])
    Dict(items=(('goal', Dict(items=(('kind', Discrete(n=3, dtype='int32')),))), ('pos', Box(shape=(2,), ...))))
    """
    join = _join(space)

    def rest_of(space: Space, at: tuple[str, ...]) -> Space:
        if not isinstance(space, Dict):
            return space
        rest = [(name, rest_of(part, (*at, name))) for name, part in space.items if join((*at, name)) not in paths]
        return Dict(tuple((name, part) for name, part in rest if leaves(part)))

    return rest_of(space, ())


def removed(space: Space, paths: Collection[str], obs: PyTree) -> PyTree:
    """Turns elements [..., *] of `space` into those of `without(space, paths)`."""
    pairs = zip(leaves(space), jax.tree.leaves(obs), strict=True)
    return of_leaves(without(space, paths), [x for (path, _), x in pairs if not within(path, paths)])


def filled(space: Space, paths: Collection[str], obs: PyTree, zeros: Callable[[Leaf], Any]) -> PyTree:
    """Turns elements [..., *] of `without(space, paths)` into those of `space`, with `zeros(leaf)` at `paths`."""
    given = iter(jax.tree.leaves(obs))
    return of_leaves(space, [zeros(leaf) if within(path, paths) else next(given) for path, leaf in leaves(space)])


def alike(a: Space, b: Space) -> bool:
    """Returns whether what reads or acts in one space can do so in the other.

    Leaves have the same kinds, shapes and dtypes at the same places; the bounds of a Box may differ.
    """
    kind = lambda leaf: (type(leaf), leaf.shape, leaf.dtype)
    paths = lambda space: [path for path, _ in jax.tree.leaves_with_path(map_leaves(lambda leaf: 0, space))]
    if paths(a) != paths(b):
        return False
    pairs = [(x, y) for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True)]
    return all(kind(x) == kind(y) and (isinstance(x, Box) or x == y) for x, y in pairs)


def stacked(space: Space, count: int) -> Space:
    """Returns the space of `count` elements of a space, one after the other along the first axis of each array.

    Choices follow one another in a MultiDiscrete, whose arrays have no second axis. An element is that of `space`
    with a batch axis [count], each array reshaped.

    >>> stacked(Box((3,), low=0.0), 2), stacked(Discrete(4), 2)
    (Box(shape=(2, 3), dtype='float32', low=0.0, high=inf), MultiDiscrete(nvec=(4, 4), dtype='int32'))
    """
    match space:
        case Dict():
            return Dict(tuple((name, stacked(part, count)) for name, part in space.items))
        case Tuple():
            return Tuple(tuple(stacked(part, count) for part in space.items))
        case Discrete():
            return MultiDiscrete((space.n,) * count, space.dtype)
        case MultiDiscrete():
            return MultiDiscrete(space.nvec * count, space.dtype)
        case MultiBinary():
            return MultiBinary((count, *space.shape), space.dtype)
    low, high = (b * count if isinstance(b, tuple) else b for b in (space.low, space.high))
    return Box((count, *space.shape), space.dtype, low, high)


def member(space: Space, count: int) -> Space | None:
    """Returns the space of which `space` holds `count` elements, as `stacked` makes it; None: it does not hold so many.

    The bounds of a Box are those of its first element.

    >>> member(MultiDiscrete((4, 4)), 2), member(Box((2, 3)), 2), member(Box((3,)), 2)
    (MultiDiscrete(nvec=(4,), dtype='int32'), Box(shape=(3,), dtype='float32', low=-inf, high=inf), None)
    """
    match space:
        case Dict():
            named = [(name, found) for name, part in space.items if (found := member(part, count)) is not None]
            return Dict(tuple(named)) if len(named) == len(space.items) else None
        case Tuple():
            parts = [found for part in space.items if (found := member(part, count)) is not None]
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


def num_bytes(space: Space) -> int:
    """Bytes of one element.

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
    """Returns the number of entries that a mask over the actions of `space` has; 0 where there is nothing to mask.

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
    """Returns [...] bool: whether a mask [..., K] over the actions of `space` leaves each choice an entry.

    >>> any_allowed(MultiDiscrete((2, 2)), jnp.array([[True, False, False, True], [True, True, False, False]]))
    Array([ True, False], dtype=bool)
    """
    found = [part.any(-1) for part in _choices(space, mask)]
    stacked: Any = np.stack(found) if isinstance(mask, np.ndarray) else jnp.stack(found)
    return stacked.all(0)


def any_choice(space: Space, mask: Array) -> Array:
    """Returns [...] bool: whether a mask [..., K] over the actions of `space` allows more than one action.

    >>> any_choice(MultiDiscrete((2, 2)), jnp.array([[True, False, True, True], [True, False, True, False]]))
    Array([ True, False], dtype=bool)
    """
    return jnp.stack([(part != 0).sum(-1) > 1 for part in _choices(space, mask)]).any(0)


def _choices(space: Space, mask: Array) -> Sequence[Array]:
    """Returns the parts of a mask, one for each choice."""
    ends = np.cumsum(choices(space))[:-1].tolist()
    return np.split(mask, ends, -1) if isinstance(mask, np.ndarray) else jnp.split(jnp.asarray(mask), ends, -1)


def masks_actions(spec: EnvSpec) -> bool:
    """Returns whether observations say which actions can be taken.

    Raises:
      InputError: a leaf `action_mask` that does not fit the action space.
    """
    if not isinstance(spec.observation, Dict) or ACTION_MASK not in dict(spec.observation.items):
        return False
    mask, choices = spec.observation[ACTION_MASK], num_choices(spec.action)
    if choices == 0:
        raise InputError(
            f"observation {ACTION_MASK}: the action space {spec.action} has no choices to mask: use Discrete or "
            "MultiDiscrete actions, or give that part of the observation another name"
        )
    if not isinstance(mask, Box | MultiBinary) or mask.shape != (choices,):
        raise InputError(
            f"observation {ACTION_MASK}: expected {choices} entries, one for each choice of the action space "
            f"{spec.action}, not {mask}"
        )
    return True


def seen(space: Space) -> Space:
    """Returns the part of an observation space that networks read: without the mask. One part that is left stands for
    itself.

    Raises:
      InputError: nothing is left.
    """
    if not isinstance(space, Dict) or ACTION_MASK not in dict(space.items):
        return space
    rest = tuple((name, part) for name, part in space.items if name != ACTION_MASK)
    if not rest:
        raise InputError(f"the observation is an {ACTION_MASK} and nothing else: a policy needs something to see")
    return rest[0][1] if len(rest) == 1 else Dict(rest)


def split_mask(space: Space, obs: PyTree) -> tuple[PyTree, Array | None]:
    """Returns (the elements [..., *] of `seen(space)`, which actions can be taken [..., K] bool; None: all can).

    >>> space = Dict((("action_mask", MultiBinary((2,))), ("x", Box((3,)))))
    >>> split_mask(space, {"action_mask": jnp.array([1, 0]), "x": jnp.ones(3)})
    (Array([1., 1., 1.], dtype=float32), Array([ True, False], dtype=bool))
    """
    if not isinstance(space, Dict) or ACTION_MASK not in dict(space.items):
        return obs, None
    rest = {name: x for name, x in obs.items() if name != ACTION_MASK}
    return (next(iter(rest.values())) if len(rest) == 1 else rest), obs[ACTION_MASK] != 0


__all__ = [
    "ACTION_MASK",
    "AGENTS",
    "PRESENT",
    "STATE",
    "any_allowed",
    "batch_shape",
    "escaped",
    "filled",
    "joined",
    "leaves",
    "map_leaves",
    "masks_actions",
    "member",
    "names",
    "num_bytes",
    "num_choices",
    "of_leaves",
    "removed",
    "seen",
    "split_mask",
    "stacked",
    "within",
    "without",
]
