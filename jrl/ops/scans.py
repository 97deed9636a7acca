"""Scans over time whose body is a few elementwise operations, and sums of many float32 numbers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

__all__ = ["compensated_add", "elementwise"]

_UNROLL = 16  # loop steps per kernel on an accelerator; 8 was slower on an H100


def elementwise(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, reverse: bool = False) -> Any:
    """Returns the result of `lax.scan` for an elementwise body, fast on every backend.

    An accelerator starts a kernel per loop step, which takes longer than such a body, so several steps share a kernel.
    A CPU starts no kernels; there unrolled loops over many environments are up to five times slower.
    """
    scan = functools.partial(lax.scan, body, reverse=reverse)
    return lax.platform_dependent(init, xs, cpu=scan, default=functools.partial(scan, unroll=_UNROLL))


def compensated_add(total: Any, rest: Any, x: Any) -> tuple[jax.Array, jax.Array]:
    """Adds `x` to a sum that is stored as two numbers (Kahan 1965, with the exact error of Knuth's 2Sum).

    Args:
      total: f32, the sum rounded to float32.
      rest:  f32 of the same shape, the rounding error: at most half a unit in the last place of `total`.
      x:     f32 of the same shape.
    Returns:
      The new (total, rest); `total` alone is correct to its last place.

    2^24 + 1 is not a float32 number:

    >>> import jax.numpy as jnp
    >>> total, rest = compensated_add(jnp.float32(2.0**24), jnp.float32(0.0), jnp.float32(1.0))
    >>> float(total), float(rest), float(compensated_add(total, rest, jnp.float32(1.0))[0]) - 2**24
    (16777216.0, 1.0, 2.0)
    """
    coarse = total + x
    added = coarse - total
    rest = rest + ((total - (coarse - added)) + (x - added))  # the exact error of the first line
    total = coarse + rest
    return total, rest - (total - coarse)
