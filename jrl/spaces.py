"""Spaces as trees: their leaves, their sizes, and which actions a mask in the observation allows.

A Dict observation with a leaf `action_mask` says which actions can be taken: an array [K] of bool or numbers, 0 for an
action that cannot. K counts the choices of the action space, `num_choices`: n of a Discrete, sum(nvec) of a
MultiDiscrete; of a Dict or Tuple those of its Discrete and MultiDiscrete leaves one after the other, in the order of
`leaves`. Networks do not read that leaf.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import InputError
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

ACTION_MASK = "action_mask"


def leaves(space: Space) -> list[tuple[str, Leaf]]:
    """The spaces of arrays in `space`, each with its path ("" for `space` itself, "goal/0"), in the order in which
    `jax.tree.leaves` gives those of an element.

    >>> leaves(Dict((("pos", Box((2,))), ("goal", Tuple((Discrete(3), Discrete(4)))))))
    [('goal/0', Discrete(n=3, dtype='int32')), ('goal/1', Discrete(n=4, dtype='int32')), ('pos', Box(shape=(2,), ...))]
    """
    match space:
        case Dict():
            parts = sorted(space.items)
        case Tuple():
            parts = [(str(i), part) for i, part in enumerate(space.items)]
        case _:
            return [("", space)]
    return [(f"{name}/{path}" if path else name, leaf) for name, part in parts for path, leaf in leaves(part)]


def map_leaves(fn: Callable[..., Any], space: Space, *trees: PyTree) -> PyTree:
    """`fn(leaf, *parts of trees)` for each leaf; the results as an element of `space` has them."""
    match space:
        case Dict():
            return {name: map_leaves(fn, part, *(t[name] for t in trees)) for name, part in space.items}
        case Tuple():
            return tuple(map_leaves(fn, part, *(t[i] for t in trees)) for i, part in enumerate(space.items))
    return fn(space, *trees)


def of_leaves(space: Space, parts: list[Any]) -> PyTree:
    """`parts`, one for each of `leaves(space)`, as an element of `space` has them."""
    return jax.tree.unflatten(jax.tree.structure(map_leaves(lambda leaf: 0, space)), parts)


def alike(a: Space, b: Space) -> bool:
    """Whether what reads or acts in one space can do so in the other: leaves of the same kinds, shapes and dtypes at
    the same places. Only the bounds of a Box may differ.
    """
    kind = lambda leaf: (type(leaf), leaf.shape, leaf.dtype)
    paths = lambda space: [path for path, _ in jax.tree.leaves_with_path(map_leaves(lambda leaf: 0, space))]
    if paths(a) != paths(b):
        return False
    pairs = [(x, y) for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True)]
    return all(kind(x) == kind(y) and (isinstance(x, Box) or x == y) for x, y in pairs)


def num_bytes(space: Space) -> int:
    """Of one element.

    >>> num_bytes(Dict((("image", Box((8, 8, 3), "uint8")), ("speed", Box((2,))))))
    200
    """
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for _, leaf in leaves(space))


def batch_shape(space: Space, tree: PyTree) -> tuple[int, ...]:
    """The leading axes of elements [..., *]."""
    _, leaf = leaves(space)[0]
    x = jax.tree.leaves(tree)[0]
    return tuple(x.shape[: x.ndim - len(leaf.shape)])


def num_choices(space: Space) -> int:
    """How many entries a mask over the actions of `space` has; 0 where there is nothing to mask.

    >>> num_choices(Discrete(3)), num_choices(Tuple((MultiDiscrete((2, 3)), Box((4,)))))
    (3, 5)
    """
    return sum(sum(_sizes(leaf)) for _, leaf in leaves(space))


def _sizes(leaf: Leaf) -> tuple[int, ...]:
    match leaf:
        case Discrete():
            return (leaf.n,)
        case MultiDiscrete():
            return leaf.nvec
    return ()


def any_allowed(space: Space, mask: Array) -> Array:
    """[...] bool: whether a mask [..., K] over the actions of `space` leaves each choice an entry.

    >>> any_allowed(MultiDiscrete((2, 2)), jnp.array([[True, False, False, True], [True, True, False, False]]))
    Array([ True, False], dtype=bool)
    """
    return jnp.stack([part.any(-1) for part in _choices(space, mask)]).all(0)


def any_choice(space: Space, mask: Array) -> Array:
    """[...] bool: whether a mask [..., K] over the actions of `space` allows more than one action.

    >>> any_choice(MultiDiscrete((2, 2)), jnp.array([[True, False, True, True], [True, False, True, False]]))
    Array([ True, False], dtype=bool)
    """
    return jnp.stack([(part != 0).sum(-1) > 1 for part in _choices(space, mask)]).any(0)


def _choices(space: Space, mask: Array) -> Sequence[Array]:
    """The parts of a mask, one for each choice."""
    sizes = [n for _, leaf in leaves(space) for n in _sizes(leaf)]
    return jnp.split(jnp.asarray(mask), np.cumsum(sizes)[:-1].tolist(), -1)


def masks_actions(spec: EnvSpec) -> bool:
    """Whether observations say which actions can be taken.

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
    """The part of an observation space that networks read: without the mask. One part that is left stands for itself.

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
    """(the elements [..., *] of `seen(space)`, which actions can be taken [..., K] bool; None: all can).

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
    "any_allowed",
    "batch_shape",
    "leaves",
    "map_leaves",
    "masks_actions",
    "num_bytes",
    "num_choices",
    "of_leaves",
    "seen",
    "split_mask",
]
