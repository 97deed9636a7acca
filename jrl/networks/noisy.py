"""A dense layer with learned noise on its weights, which replaces random actions (arXiv:1706.10295)."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl.networks.dense import linear, parameter
from jrl.ops import random


class NoisyDense(nn.Module):
    """x (W + S * f(e) f(e')^T) + b + s * f(e') with f(e) = sign(e) sqrt(|e|): factorised noise (eq. 9, 10 and 11).

    Parameters: `kernel` W and `kernel_sigma` S [in, out], `bias` b and `bias_sigma` s [out]. All rows of `x` [N, in]
      share one standard normal draw of e [in] and e' [out]. Without a key the output is x W + b.
    """

    features: int
    sigma: Any = 0.5  # S and s start at sigma / sqrt(in) (section 3.2)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, key=None):
        inputs, bound = x.shape[-1], 1.0 / math.sqrt(x.shape[-1])
        mean = lambda key, shape, _: bound * (2.0 * random.uniform(key, shape) - 1.0)
        deviation = lambda _, shape, dtype: jnp.full(shape, self.sigma * bound, dtype)
        make: Any = functools.partial(parameter, self)
        kernel = make("kernel", mean, (inputs, self.features))
        bias = make("bias", mean, (self.features,))
        kernel_sigma = make("kernel_sigma", deviation, (inputs, self.features))
        bias_sigma = make("bias_sigma", deviation, (self.features,))
        if key is not None:
            noise = random.normal(key, (inputs + self.features,))
            # without the barrier XLA recomputes the noise for each element of the kernel
            noise = jax.lax.optimization_barrier(jnp.sign(noise) * jnp.sqrt(jnp.abs(noise)))
            rows, columns = noise[:inputs], noise[inputs:]
            kernel = kernel + kernel_sigma * rows[:, None] * columns[None]
            bias = bias + bias_sigma * columns
        x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
        return linear(x, kernel) + bias[None]
