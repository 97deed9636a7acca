"""Compensated sums of many float32 numbers (Kahan 1965, with the exact error of Knuth's 2Sum)."""

from typing import Any

import jax

__all__ = ["add"]


def add(total: Any, rest: Any, x: Any) -> tuple[jax.Array, jax.Array]:
    """Adds `x` to a sum that is stored as two numbers.

    Args:
      total: f32, the sum rounded to float32.
      rest:  f32 of the same shape, the rounding error: at most half a unit in the last place of `total`.
      x:     f32 of the same shape.
    Returns:
      The new (total, rest); `total` alone is correct to its last place.

    2^24 + 1 is not a float32 number:

    >>> import jax.numpy as jnp
    >>> total, rest = add(jnp.float32(2.0**24), jnp.float32(0.0), jnp.float32(1.0))
    >>> float(total), float(rest), float(add(total, rest, jnp.float32(1.0))[0]) - 2**24
    (16777216.0, 1.0, 2.0)
    """
    coarse = total + x
    added = coarse - total
    rest = rest + ((total - (coarse - added)) + (x - added))  # the exact error of the first line
    total = coarse + rest
    return total, rest - (total - coarse)
