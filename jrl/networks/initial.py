"""Initial weights: initializers of kernels and biases, by `NetworkConfig.init`.

    orthogonal   kernels with orthonormal columns (or rows) times the layer's gain, biases 0 (arXiv:1312.6120)
    lecun        kernels normal with variance 1 / fan_in, biases 0: flax's default
    uniform      kernels and biases uniform in +-1 / sqrt(fan_in): torch's default

Each algorithm's DEFAULT_NETWORK holds its default.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError

from jrl.ops import random
from jrl.types import Array

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


def uniform(fan_in: int) -> Init:
    """Returns an initializer with numbers uniform in +-1 / sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32):
        return ((2.0 * random.uniform(key, shape) - 1.0) / math.sqrt(fan_in)).astype(dtype)

    return init


def kernel(name: str | None, scale: float, shape: tuple[int, ...]) -> Init:
    """Returns the initializer of a kernel.

    Args:
      name: name of `NetworkConfig.init`; None: orthogonal.
      scale: gain of orthogonal kernels.
      shape: shape of the kernel, output last; fan_in is the product of the other axes.
    """
    match name:
        case "lecun":
            return nn.initializers.lecun_normal()
        case "uniform":
            return uniform(math.prod(shape[:-1]))
    return orthogonal(scale)


def bias(name: str | None, shape: tuple[int, ...]) -> Init:
    """Returns the initializer of a bias for a kernel of `shape`."""
    return uniform(math.prod(shape[:-1])) if name == "uniform" else nn.initializers.zeros


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


__all__ = ["bias", "kernel", "orthogonal", "parameter", "uniform"]
