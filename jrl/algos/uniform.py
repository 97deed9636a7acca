"""Uniformly random allowed actions of any space, and their log-probabilities."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.ops import exploration as ops
from jrl.types import Array, Box, Dict, Discrete, Key, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple


def sample(space: Space, key: Key, batch: tuple[int, ...], mask: Array | None = None) -> PyTree:
    """Returns random actions. Box elements are uniform between their bounds, or in [-1, 1] without finite bounds.

    Args:
      space: action space.
      key: PRNG key.
      batch: leading axes.
      mask: [*batch, K] bool, allowed actions (`jrl.spaces`); None: all.
    Returns:
      [*batch, *], an element of the space in its dtypes.
    """
    if not isinstance(space, Dict | Tuple):
        return _sample_leaf(space, key, batch, mask).astype(space.dtype)
    parts = [leaf for _, leaf in spaces.leaves(space)]
    keys = jax.random.split(key, len(parts))
    leaves = zip(parts, keys, _masks(parts, mask), strict=True)
    return spaces.from_leaves(space, [sample(leaf, k, batch, leaf_mask) for leaf, k, leaf_mask in leaves])


def log_prob(space: Space, mask: Array | None = None) -> Array | float:
    """Returns the log-probability (a log density for a Box) of any action of `sample`; [*batch] with a mask."""
    parts = [leaf for _, leaf in spaces.leaves(space)]
    terms = [_leaf_log_prob(leaf, leaf_mask) for leaf, leaf_mask in zip(parts, _masks(parts, mask), strict=True)]
    return sum(terms[1:], start=terms[0])


def covers(space: Space, action: PyTree) -> Array | bool:
    """Returns whether `sample` without a mask can draw each action [*batch, *]: bool [*batch], or one bool for all."""
    is_covered: Array | bool = True
    for (_, leaf), x in zip(spaces.leaves(space), jax.tree.leaves(action), strict=True):
        if isinstance(leaf, Box):
            low, high = _finite_bounds(leaf)
            is_covered &= jnp.all((x >= low) & (x <= high), tuple(range(x.ndim - len(leaf.shape), x.ndim)))
    return is_covered


def _masks(parts: list[Leaf], mask: Array | None) -> list[Array | None]:
    """Returns the mask of each part; None for parts without choices."""
    if mask is None:
        return [None] * len(parts)
    choices = [spaces.num_choices(leaf) for leaf in parts]
    split = jnp.split(mask, np.cumsum(choices)[:-1].tolist(), axis=-1)
    return [part if n else None for part, n in zip(split, choices, strict=True)]


def _sample_leaf(space: Leaf, key: Key, batch: tuple[int, ...], mask: Array | None) -> Array:
    shape = (*batch, *space.shape)
    match space:
        case Discrete():
            return ops.uniform_action(key, shape, space.n, mask)
        case MultiDiscrete():
            return ops.uniform_action(key, shape, space.nvec, mask)
        case MultiBinary():
            return ops.uniform_action(key, shape, 2)
        case Box():
            action = ops.uniform_action(key, shape, None)
            low, high = _finite_bounds(space)
            if (low == -1).all() and (high == 1).all():
                return action
            low, high = (np.broadcast_to(x, shape).astype(np.float32) for x in (low, high))
            return low + 0.5 * (action + 1.0) * (high - low)


def _leaf_log_prob(space: Leaf, mask: Array | None) -> Array | float:
    match space:
        case Discrete():
            return -math.log(space.n) if mask is None else _log_share(mask)
        case MultiDiscrete():
            if mask is None:
                return -sum(math.log(n) for n in space.nvec)
            terms = [_log_share(part) for part in jnp.split(mask, np.cumsum(space.nvec)[:-1].tolist(), axis=-1)]
            return sum(terms[1:], start=terms[0])
        case MultiBinary():
            return -math.prod(space.shape) * math.log(2)
        case Box():
            low, high = _finite_bounds(space)
            return -float(np.log(high - low).sum())


def _log_share(mask: Array) -> Array:
    """Returns the log-probability [...] f32 of one of the allowed actions of a mask [..., A]."""
    return -jnp.log(jnp.sum(ops.allowed(mask), -1, dtype=jnp.float32))


def _finite_bounds(space: Box) -> tuple[np.ndarray, np.ndarray]:
    low, high = space.bounds()
    finite = np.isfinite(low) & np.isfinite(high)
    return np.where(finite, low, -1.0), np.where(finite, high, 1.0)
