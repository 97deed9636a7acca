"""Initial weights: what a kernel and a bias begin with, by `NetworkConfig.init`.

    orthogonal   kernels with orthonormal columns (or rows) times the layer's gain, biases 0 (arXiv:1312.6120)
    lecun        kernels normal with variance 1 / fan_in, biases 0: flax's default
    uniform      kernels and biases uniform in +-1 / sqrt(fan_in): torch's default

Which of them an algorithm begins with, unless told, is its DEFAULT_NETWORK's matter.
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
    # LAPACK's QR hangs under vmap on jaxlib 0.10 with two cores, so that vmap over seeds maps it one by one
    return jnp.linalg.qr(a)


def orthogonal(scale: float) -> Init:
    """Makes an initializer with orthonormal columns (or rows) times `scale` (arXiv:1312.6120); the last axis is the
    output.
    """

    def init(key, shape, dtype=jnp.float32):
        rows, cols = math.prod(shape[:-1]), shape[-1]
        normal = random.normal(key, (max(rows, cols), min(rows, cols)))
        q, r = _qr(normal)
        q = q * jnp.sign(jnp.diagonal(r))[None, :]  # makes the distribution uniform over orthogonal matrices
        return (scale * (q if rows >= cols else q.T)).reshape(shape).astype(dtype)

    return init


def uniform(fan_in: int) -> Init:
    """Makes an initializer with numbers uniform in +-1 / sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32):
        return ((2.0 * random.uniform(key, shape) - 1.0) / math.sqrt(fan_in)).astype(dtype)

    return init


def kernel(name: str | None, scale: float, shape: tuple[int, ...]) -> Init:
    """Returns the initializer of a kernel.

    Args:
      name: of `NetworkConfig.init`; None: orthogonal.
      scale: gain of the layer, which orthogonal kernels have.
      shape: of the kernel, the output last; fan_in is the product of the others.
    """
    match name:
        case "lecun":
            return nn.initializers.lecun_normal()
        case "uniform":
            return uniform(math.prod(shape[:-1]))
    return orthogonal(scale)


def bias(name: str | None, shape: tuple[int, ...]) -> Init:
    """Returns the initializer of the bias behind a kernel of `shape`."""
    return uniform(math.prod(shape[:-1])) if name == "uniform" else nn.initializers.zeros


def parameter(module: nn.Module, name: str, init: Init, shape: tuple[int, ...]) -> Array:
    """Returns the parameter of a module, f32; `init(key, shape, dtype)` makes it where there is none yet.

    `module.param` traces `init` at every application, to compare shapes: a quarter of the time from the start of a run
    to its first update.

    Raises:
      flax.errors.ScopeParamShapeError: there is one of another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, jnp.float32)
    found: Any = module.get_variable("params", name)
    if jnp.shape(found) != tuple(shape):
        raise ScopeParamShapeError(name, "/".join(module.path), jnp.shape(found), tuple(shape))
    return found


__all__ = ["bias", "kernel", "orthogonal", "parameter", "uniform"]
