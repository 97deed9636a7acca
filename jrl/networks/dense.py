"""A dense layer whose training step is up to a fifth faster on CPU (MLP of 64 x 64, 2048 rows; 8% at 128).

The kernel gradient, x^T dy, contracts the leading axes of both operands. XLA's CPU backend folds the transpose into the
product, which is slower than an explicit transpose.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl.networks import initial
from jrl.types import Array, Key


@jax.custom_vjp
def linear(x, kernel):
    """Returns x [N, in] @ kernel [in, out]."""
    return x @ kernel


def _forward(x, kernel):
    return x @ kernel, (x, kernel)


def _backward(residuals, grad):
    x, kernel = residuals
    x_t = x.T
    if jax.default_backend() == "cpu":
        x_t = jax.lax.optimization_barrier(x_t)  # else XLA would fold the transpose
    return grad @ kernel.T, x_t @ grad


linear.defvjp(_forward, _backward)


class Dense(nn.Module):
    """Dense layer for [N, in], with the parameters of flax's Dense: `kernel` [in, out] and `bias` [out]."""

    features: int
    dtype: Any = jnp.float32
    weights: str | None = None  # initial weights, see NetworkConfig.init
    scale: float = 1.0  # gain of orthogonal kernels

    @nn.compact
    def __call__(self, x, beside=None):
        """Returns [N, features]. With `beside` [N, K, G]: [N * K, features] of each concatenation [x, beside].

        The product with x is computed once for all K.
        """
        shape = x.shape[-1] + (0 if beside is None else beside.shape[-1]), self.features
        kernel: Any = initial.parameter(self, "kernel", initial.kernel(self.weights, self.scale, shape), shape)
        bias: Any = initial.parameter(self, "bias", initial.bias(self.weights, shape), shape[-1:])
        x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
        if beside is None:
            return linear(x, kernel) + bias[None]
        shared, beside = linear(x, kernel[: x.shape[-1]]) + bias[None], beside.astype(self.dtype)
        each = linear(beside.reshape(-1, beside.shape[-1]), kernel[x.shape[-1] :])
        return (shared[:, None] + each.reshape(*beside.shape[:2], -1)).reshape(-1, self.features)


def layer(key: Key, inputs: int, outputs: int) -> dict[str, Array]:
    """Draws a layer's `kernel` [inputs, outputs] and `bias` [outputs], uniform in +-1/sqrt(inputs)."""
    draws = initial.uniform(inputs)(key, (inputs + 1, outputs))
    return {"kernel": draws[:-1], "bias": draws[-1]}


def dense(weights: dict[str, Array], x: Array) -> Array:
    """Applies a layer of `layer` to x [..., inputs]: [..., outputs]."""
    y = linear(x.reshape(-1, x.shape[-1]), weights["kernel"]) + weights["bias"][None]
    return y.reshape(*x.shape[:-1], -1)


__all__ = ["Dense", "dense", "layer", "linear"]
