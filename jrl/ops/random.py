"""Random numbers that cost one fused loop.

`jax.random` runs twenty rounds of threefry per number. This takes longer than a step of CartPole, and each draw adds a
quarter of a second of compilation. Keys still come from jax.random, so draws are as independent as their keys. A hash
then spreads one key over the elements.
"""

import math

import jax
import jax.numpy as jnp


def bits(key, shape: tuple[int, ...]):
    """Returns uniform u32 numbers: a hash of (key, position)."""
    out = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    for word in jnp.ravel(jax.random.key_data(key)):
        out = _mix(out ^ word)
    return out


def uniform(key, shape: tuple[int, ...]):
    """Returns f32 numbers in [0, 1), multiples of 2**-24."""
    return (bits(key, shape) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def normal(key, shape: tuple[int, ...]):
    """Returns standard normal f32 numbers, by the inverse of the distribution function."""
    return math.sqrt(2.0) * jax.lax.erf_inv(2.0 * _between(key, shape) - 1.0)


def gumbel(key, shape: tuple[int, ...]):
    """Returns standard Gumbel f32 numbers for sampling by argmax; at most 17, so odds below 1e-7 are never drawn."""
    return -jnp.log(-jnp.log(_between(key, shape)))


def integers(key, shape: tuple[int, ...], high: int):
    """Returns i32 numbers in 0 .. high - 1, high <= 2**24."""
    return jnp.minimum((uniform(key, shape) * high).astype(jnp.int32), high - 1)


def permutation(key, n: int):
    """Returns a random order of 0 .. n - 1, i32 [n]."""
    return jnp.argsort(bits(key, (n,))).astype(jnp.int32)


def _between(key, shape):
    """Returns f32 numbers in (0, 1), both ends excluded: odd multiples of 2**-24."""
    return (bits(key, shape) >> 9).astype(jnp.float32) * jnp.float32(2**-23) + jnp.float32(2**-24)


def _mix(x):
    """Returns a bijection of u32 with good avalanche (constants: github.com/skeeto/hash-prospector, 16-15-15)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)
