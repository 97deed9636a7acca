"""Hyper-parameters that change during training."""

import itertools

import jax
import jax.numpy as jnp

__all__ = ["value"]


def value(schedule, step) -> jax.Array:
    """Returns a hyper-parameter at `step`: a constant, or piecewise linear between (step, value) pairs.

    The value is constant before the first and after the last pair. Two pairs with the same step make a jump. Steps and
    values may be traced, so schedules can be vmapped.

    Args:
      schedule: scalar, or a tuple or list of (step, value) pairs of scalars, steps ascending.
      step:     scalar, usually the number of environment steps so far.
    Returns:
      [] f32.
    Raises:
      ValueError: `schedule` is neither a scalar nor a sequence of pairs.

    >>> [float(value(((0, 1.0), (100, 0.5)), step)) for step in (0, 50, 1000)]
    [1.0, 0.75, 0.5]
    """
    if not isinstance(schedule, tuple | list):
        if jnp.ndim(schedule) != 0:
            raise ValueError(f"schedule must be a scalar or a sequence of pairs, got an array {jnp.shape(schedule)}")
        return jnp.asarray(schedule, jnp.float32)
    if not schedule or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in schedule):
        raise ValueError(f"schedule must be a scalar or a sequence of (step, value) pairs, got {schedule}")
    step = jnp.asarray(step, jnp.float32)
    pairs = [tuple(jnp.asarray(x, jnp.float32) for x in pair) for pair in schedule]
    now = pairs[0][1]
    # not jnp.interp: the loop of its search is ten kernels on an accelerator
    for (begin, first), (end, last) in itertools.pairwise(pairs):
        between = first + (step - begin) / jnp.where(end == begin, 1.0, end - begin) * (last - first)
        now = jnp.where(step >= begin, between, now)
    return jnp.where(step >= pairs[-1][0], pairs[-1][1], now)
