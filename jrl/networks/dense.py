"""Dense layers, and initial weights by `NetworkConfig.init`.

    orthogonal   kernels with orthonormal columns (or rows) times the layer's gain, biases 0 (arXiv:1312.6120)
    lecun        kernels normal with variance 1 / fan_in, biases 0: flax's default
    uniform      kernels and biases uniform in +-1 / sqrt(fan_in): torch's default

Each algorithm's DEFAULT_NETWORK holds its default.

`Dense` has a training step that is up to a fifth faster on CPU (MLP of 64 x 64, 2048 rows; 8% at 128): the kernel
gradient, x^T dy, contracts the leading axes of both operands. XLA's CPU backend folds the transpose into the
product, which is slower than an explicit transpose.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError

from jrl.ops import random
from jrl.types import Array, Key, PyTree

Init = Callable[..., Array]  # (key, shape, dtype) -> array


@jax.custom_batching.sequential_vmap
def _qr(a):
    # LAPACK's QR hangs under vmap on jaxlib 0.10 with two cores, so vmap over seeds runs it one by one
    return jnp.linalg.qr(a)


def orthogonal(scale: float) -> Init:
    """Returns an initializer with orthonormal columns (or rows) times `scale` (arXiv:1312.6120).

    The last axis is the output.
    """

    def init(key, shape, dtype=jnp.float32):
        rows, cols = math.prod(shape[:-1]), shape[-1]
        normal = random.normal(key, (max(rows, cols), min(rows, cols)))
        q, r = _qr(normal)
        q = q * jnp.sign(jnp.diagonal(r))[None, :]  # uniform over orthogonal matrices only with these signs
        return (scale * (q if rows >= cols else q.T)).reshape(shape).astype(dtype)

    return init


def uniform_init(fan_in: int) -> Init:
    """Returns an initializer with numbers uniform in +-1 / sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32):
        return ((2.0 * random.uniform(key, shape) - 1.0) / math.sqrt(fan_in)).astype(dtype)

    return init


def kernel_init(name: str | None, scale: float, shape: tuple[int, ...]) -> Init:
    """Returns the initializer of a kernel.

    Args:
      name: name of `NetworkConfig.init`, or he: normal, variance 2 / inputs; None: orthogonal.
      scale: gain of orthogonal kernels.
      shape: shape of the kernel, output last; fan_in is the product of the other axes.
    """
    match name:
        case "lecun":
            return nn.initializers.lecun_normal()
        case "he":
            return nn.initializers.he_normal()
        case "uniform":
            return uniform_init(math.prod(shape[:-1]))
    return orthogonal(scale)


def bias_init(name: str | None, shape: tuple[int, ...]) -> Init:
    """Returns the initializer of a bias for a kernel of `shape`."""
    return uniform_init(math.prod(shape[:-1])) if name == "uniform" else nn.initializers.zeros


def parameter(module: nn.Module, name: str, init: Init, shape: tuple[int, ...]) -> Array:
    """Returns a module's parameter, f32; creates it with `init(key, shape, dtype)` if it does not exist.

    `module.param` traces `init` at every application to compare shapes. This took a quarter of the time until a run's
    first update.

    Raises:
      flax.errors.ScopeParamShapeError: the parameter exists with another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, jnp.float32)
    found: Any = module.get_variable("params", name)
    if jnp.shape(found) != tuple(shape):
        raise ScopeParamShapeError(name, "/".join(module.path), jnp.shape(found), tuple(shape))
    return found


# ---------------------------------------------------------------- weights of norm 1


def unit(x: Array, axis: int = -1) -> Array:
    """Returns `x` divided by its Euclidean norm along `axis`."""
    return x / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis, keepdims=True), 1e-16))


def unit_init(init: Init) -> Init:
    """Returns an initializer of kernels [in, out] whose columns, the weights of one output each, have norm 1."""
    return lambda key, shape, dtype=jnp.float32: unit(init(key, shape, dtype), -2)


def with_unit_weights(params: PyTree) -> PyTree:
    """Returns parameters whose arrays `unit_kernel`, [..., in, out], have columns of norm 1.

    Columns whose norm is 1 up to rounding do not change, so a step of size 0 changes nothing.
    """

    def scaled(path, x):
        if jax.tree_util.keystr(path[-1:], simple=True) != "unit_kernel":
            return x
        is_unit = jnp.abs(jnp.sum(jnp.square(x), -2, keepdims=True) - 1.0) < 1e-6
        return jnp.where(is_unit, x, unit(x, -2))

    return jax.tree.map_with_path(scaled, params)


# ---------------------------------------------------------------- layers


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
    """Dense layer for [N, in], with the parameters of flax's Dense: `kernel` [in, out] and `bias` [out].

    `has_unit_weights`: the kernel is `unit_kernel`, whose columns keep the norm 1: see `with_unit_weights`.
    """

    features: int
    dtype: Any = jnp.float32
    weights: str | None = None  # initial weights, see NetworkConfig.init
    scale: float = 1.0  # gain of orthogonal kernels
    has_unit_weights: bool = False
    has_bias: bool = True  # a layer without a bias takes no `beside`

    @nn.compact
    def __call__(self, x, beside=None):
        """Returns [N, features]. With `beside` [N, K, G]: [N * K, features] of each concatenation [x, beside].

        The product with x is computed once for all K.
        """
        shape = x.shape[-1] + (0 if beside is None else beside.shape[-1]), self.features
        init = kernel_init(self.weights, self.scale, shape)
        if self.has_unit_weights:
            kernel: Any = parameter(self, "unit_kernel", unit_init(init), shape)
        else:
            kernel = parameter(self, "kernel", init, shape)
        if not self.has_bias:
            return linear(x.astype(self.dtype), kernel.astype(self.dtype))
        bias: Any = parameter(self, "bias", bias_init(self.weights, shape), shape[-1:])
        x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
        if beside is None:
            return linear(x, kernel) + bias[None]
        shared, beside = linear(x, kernel[: x.shape[-1]]) + bias[None], beside.astype(self.dtype)
        each = linear(beside.reshape(-1, beside.shape[-1]), kernel[x.shape[-1] :])
        return (shared[:, None] + each.reshape(*beside.shape[:2], -1)).reshape(-1, self.features)


def layer(key: Key, inputs: int, outputs: int) -> dict[str, Array]:
    """Draws a layer's `kernel` [inputs, outputs] and `bias` [outputs], uniform in +-1/sqrt(inputs)."""
    draws = uniform_init(inputs)(key, (inputs + 1, outputs))
    return {"kernel": draws[:-1], "bias": draws[-1]}


def dense(weights: dict[str, Array], x: Array) -> Array:
    """Applies a layer of `layer` to x [..., inputs]: [..., outputs]."""
    y = linear(x.reshape(-1, x.shape[-1]), weights["kernel"]) + weights["bias"][None]
    return y.reshape(*x.shape[:-1], -1)
