"""Running mean and variance of observations or returns: safe in float32, weighted, exact over devices.

The statistics of a pytree are pytrees of its structure with one shared count. Batches are merged by the parallel
formula of Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".
After a million samples, a batch moves a mean far from 0 by less than float32's precision. The rounding error is
therefore kept as well (`ops.scans`); otherwise the statistics would stop changing.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jrl.ops import collectives, scans

__all__ = ["MAX_COUNT", "RunningStats", "init", "normalize", "std", "update"]

MAX_COUNT = 2.0**23
"""Maximum sample count. Beyond 2^24, float32 cannot count by ones. From this count on older samples fade out, and the
statistics become an exponential average over about the last eight million samples."""

_TINY = 1e-8  # added to denominators so that 0 / 0 is 0


@struct.dataclass
class RunningStats:
    count: jax.Array  # [] f32, weight of all samples, at most MAX_COUNT (or one larger batch)
    mean: jax.Array  # [*] f32, or a pytree of arrays
    m2: jax.Array  # [*] f32, weighted sum of squared distances from the mean
    mean_rest: jax.Array  # [*] f32, rounding error of `mean`, read only when the mean is updated
    m2_rest: jax.Array  # [*] f32, rounding error of `m2`


def init(shape) -> RunningStats:
    """Returns empty statistics.

    Args:
      shape: shape of one sample, a tuple of ints, or a pytree of such tuples.
    Returns:
      RunningStats with count 0.
    """

    def is_shape(node):
        return isinstance(node, tuple) and all(isinstance(size, int) for size in node)

    def zeros():  # separate arrays for each field, because a donated buffer may appear only once
        return jax.tree.map(lambda shape: jnp.zeros(shape, jnp.float32), shape, is_leaf=is_shape)

    return RunningStats(jnp.zeros((), jnp.float32), zeros(), zeros(), zeros(), zeros())


def update(stats: RunningStats, x, weight=None, *, axis_name=None) -> RunningStats:
    """Returns the statistics with a batch added.

    Args:
      stats:     statistics of samples of shape [*].
      x:         [..., *], any real dtype, or a pytree of such arrays with the same leading batch axes.
      weight:    [...], f32 or bool, at least 0: 0 ignores a sample. None: all 1.
      axis_name: mapped axis over devices that hold parts of the batch; all devices get the statistics of the whole
        batch.
    Returns:
      RunningStats, the same on every device if `stats` was.
    Raises:
      ValueError: `x` does not end in the sample's shape, or `weight` does not have the batch's shape.

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

    # distances from the running mean, then from the batch mean: sums of small numbers lose fewer digits
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
    """Returns the population standard deviation, sqrt(variance + eps); 1 before any data.

    Args:
      stats: statistics of samples of shape [*].
      eps:   scalar, keeps the result positive for a constant sample.
    Returns:
      [*] f32, or a pytree of arrays.
    """
    count = jnp.maximum(stats.count, _TINY)
    return jax.tree.map(lambda m2: jnp.where(stats.count > 0, jnp.sqrt(m2 / count + eps), 1.0), stats.m2)


def normalize(stats: RunningStats, x, *, clip=10.0, eps=1e-8) -> jax.Array:
    """Returns (x - mean) / std, clipped to +-clip; `x` itself before any data.

    Args:
      stats: statistics of samples of shape [*].
      x:     [..., *], any real dtype, or a pytree of such arrays.
      clip:  positive scalar, or None for no bound.
      eps:   as in `std`.
    Returns:
      f32 of the shape of `x`, or a pytree of arrays.
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
    """Adds `count` samples with mean `stats.mean + shift`."""
    kept = jnp.minimum(stats.count, jnp.maximum(MAX_COUNT - count, 0.0))
    faded = jnp.where(stats.count > 0, (stats.count - kept) / jnp.maximum(stats.count, _TINY), 0.0)
    share = count / jnp.maximum(kept + count, _TINY)
    step = jax.tree.map(lambda s: s * share, shift)
    gain = jax.tree.map(lambda old, new, s: new + s * s * kept * share - old * faded, stats.m2, m2, shift)
    mean, mean_rest = _add(stats.mean, stats.mean_rest, step)
    m2, m2_rest = _add(stats.m2, stats.m2_rest, gain)
    return RunningStats(kept + count, mean, m2, mean_rest, m2_rest)


def _add(total, rest, x):
    """Applies `scans.compensated_add` to each leaf; returns a pair of trees."""
    pairs = jax.tree.map(scans.compensated_add, total, rest, x)
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
