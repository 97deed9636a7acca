"""Running mean and variance of observations or returns: float32-safe, weighted, exact over devices.

The statistics of a pytree are pytrees of its structure with one shared count. Batches are merged by the parallel
formula of Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".
After a million samples a batch moves the mean by less than float32 can say of a mean that is far from 0: what rounding
loses is kept beside it (`ops.sums`), or the statistics would stand still.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jrl.ops import collectives, sums

__all__ = ["MAX_COUNT", "RunningStats", "init", "normalize", "std", "update"]

MAX_COUNT = 2.0**23
"""Samples remembered. Beyond 2^24, float32 no longer counts by ones; from here on older samples fade out, so that the
statistics become an exponential average over about the last eight million."""

_TINY = 1e-8  # divides 0 / 0 to 0


@struct.dataclass
class RunningStats:
    count: jax.Array  # [] f32, the weight of all samples, at most MAX_COUNT (or one larger batch)
    mean: jax.Array  # [*] f32, or a pytree of them
    m2: jax.Array  # [*] f32, the weighted sum of squared distances from the mean
    mean_rest: jax.Array  # [*] f32, what the mean is beyond `mean`, by which only adding to it goes
    m2_rest: jax.Array  # [*] f32, likewise of `m2`


def init(shape) -> RunningStats:
    """Statistics of nothing yet.

    Args:
      shape: a tuple of ints, the shape of one sample, or a pytree of such tuples.
    Returns:
      RunningStats with count 0.
    """

    def is_shape(node):
        return isinstance(node, tuple) and all(isinstance(size, int) for size in node)

    def zeros():  # one for each, not one for all: a donated buffer may appear only once
        return jax.tree.map(lambda shape: jnp.zeros(shape, jnp.float32), shape, is_leaf=is_shape)

    return RunningStats(jnp.zeros((), jnp.float32), zeros(), zeros(), zeros(), zeros())


def update(stats: RunningStats, x, weight=None, *, axis_name=None) -> RunningStats:
    """Returns the statistics with a batch added.

    Args:
      stats:     of samples shaped [*].
      x:         [..., *], any real dtype, or a pytree of these with the same leading batch axes.
      weight:    [...], f32 or bool, not negative: 0 leaves a sample out. None: all 1.
      axis_name: of the mapped devices that hold parts of the batch; all get the statistics of the whole.
    Returns:
      RunningStats, the same on every device if `stats` was.
    Raises:
      ValueError: `x` does not end in the sample's shape, or `weight` has not the batch's.

    >>> stats = update(init((2,)), jnp.array([[1.0, 0.0], [3.0, 8.0], [100.0, 100.0]]), jnp.array([1, 1, 0]))
    >>> stats.mean, std(stats)
    (Array([2., 4.], dtype=float32), Array([1., 4.], dtype=float32))
    """
    batch = _batch_shape(stats, x)
    if weight is not None and jnp.shape(weight) != batch:
        raise ValueError(f"weight must have the batch's shape {batch}, got {jnp.shape(weight)}")
    rows = math.prod(batch)
    weight = jnp.ones((rows,), jnp.float32) if weight is None else jnp.asarray(weight, jnp.float32).reshape(rows)

    def total(leaf):  # [rows, *] -> [*], over all devices
        return collectives.psum(jnp.sum(leaf * weight.reshape(rows, *[1] * (leaf.ndim - 1)), axis=0), axis_name)

    count = total(jnp.ones((rows,), jnp.float32))

    # Distances from the running mean, then from the batch's: sums of small numbers keep their digits.
    x = jax.tree.map(
        lambda m, rest, x: jnp.asarray(x, jnp.float32).reshape(rows, *m.shape) - m[None] - rest[None],
        stats.mean,
        stats.mean_rest,
        x,
    )
    shift = jax.tree.map(lambda x: total(x) / jnp.maximum(count, _TINY), x)
    m2 = jax.tree.map(lambda x, s: total(jnp.square(x - s[None])), x, shift)
    return _combine(stats, count, shift, m2)


def std(stats: RunningStats, eps=1e-8) -> jax.Array:
    """Returns the standard deviation (population formula), sqrt(variance + eps); 1 before any data.

    Args:
      stats: of samples shaped [*].
      eps:   scalar, keeps the result positive for a constant sample.
    Returns:
      [*] f32, or a pytree of them.
    """
    count = jnp.maximum(stats.count, _TINY)
    return jax.tree.map(lambda m2: jnp.where(stats.count > 0, jnp.sqrt(m2 / count + eps), 1.0), stats.m2)


def normalize(stats: RunningStats, x, *, clip=10.0, eps=1e-8) -> jax.Array:
    """Returns (x - mean) / std, within +-clip; before any data `x` itself.

    Args:
      stats: of samples shaped [*].
      x:     [..., *], any real dtype, or a pytree of these.
      clip:  positive scalar, or None for no bound.
      eps:   as in `std`.
    Returns:
      f32 of the shape of `x`, or a pytree of them.
    Raises:
      ValueError: `x` does not end in the sample's shape.

    >>> normalize(update(init(()), jnp.array([1.0, 3.0])), jnp.array([2.0, 5.0, 1e6]))
    Array([ 0.,  3., 10.], dtype=float32)
    """
    _batch_shape(stats, x)
    bound = None if clip is None else jnp.where(stats.count > 0, clip, jnp.inf)

    def leaf(mean, scale, x):
        x = jnp.asarray(x, jnp.float32)
        lead = tuple(range(x.ndim - mean.ndim))
        x = (x - jnp.expand_dims(mean, lead)) * jnp.expand_dims(1.0 / scale, lead)
        return x if bound is None else jnp.clip(x, -bound, bound)

    return jax.tree.map(leaf, stats.mean, std(stats, eps), x)


def _combine(stats, count, shift, m2):
    """Adds `count` samples whose mean is that of `stats` + shift."""
    kept = jnp.minimum(stats.count, jnp.maximum(MAX_COUNT - count, 0.0))
    faded = jnp.where(stats.count > 0, (stats.count - kept) / jnp.maximum(stats.count, _TINY), 0.0)
    share = count / jnp.maximum(kept + count, _TINY)
    step = jax.tree.map(lambda s: s * share, shift)
    gain = jax.tree.map(lambda old, new, s: new + s * s * kept * share - old * faded, stats.m2, m2, shift)
    mean, mean_rest = _add(stats.mean, stats.mean_rest, step)
    m2, m2_rest = _add(stats.m2, stats.m2_rest, gain)
    return RunningStats(kept + count, mean, m2, mean_rest, m2_rest)


def _add(total, rest, x):
    """Applies `sums.add` leaf by leaf: a pair of trees."""
    pairs = jax.tree.map(sums.add, total, rest, x)
    return jax.tree.transpose(jax.tree.structure(total), jax.tree.structure((0, 0)), pairs)


def _batch_shape(stats, x):
    """Returns the leading axes of `x`, the same for all leaves."""
    if jax.tree.structure(x) != jax.tree.structure(stats.mean):  # type: ignore[operator]  # jax types it as unknown
        raise ValueError(f"x is {jax.tree.structure(x)}, the statistics are of {jax.tree.structure(stats.mean)}")
    batches = set()
    for leaf, mean in zip(jax.tree.leaves(x), jax.tree.leaves(stats.mean), strict=True):
        shape, lead = jnp.shape(leaf), max(jnp.ndim(leaf) - mean.ndim, 0)
        if shape[lead:] != mean.shape:
            raise ValueError(f"x must end in the sample's shape {mean.shape}, got {shape}")
        batches.add(shape[:lead])
    if len(batches) > 1:
        raise ValueError(f"the leaves of x have different batch axes: {sorted(batches)}")
    return batches.pop() if batches else ()
