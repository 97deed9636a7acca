"""Torsos of residual blocks: SimBa, SimbaV2, BroNet and FlashSAC's.

Each has one block for each width of `hidden`, and is called as a Mlp: its first layer reads x and `beside`.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from jrl.fields.hyper import NetworkConfig
from jrl.networks.batch_renorm import BatchRenorm
from jrl.networks.dense import Dense, parameter, unit
from jrl.networks.encoders import ACTIVATIONS, dense_options
from jrl.types import Array

_EXPANSION = 4  # hidden width of a block of SimBa and SimbaV2, relative to the block's width
_SHIFT = 3.0  # input that SimbaV2 appends to the features, so that their size is not lost


class Simba(nn.Module):
    """SimBa (arXiv:2410.09754, section 4): a dense layer, blocks, layer norm. With the activation f, a block is

        x + W2 f(W1 layer_norm(x)),  W1 [width, 4 width], W2 [4 width, width]

    Without `init`, kernels of blocks are normal with variance 2 / inputs, and the first is orthogonal with gain 1.
    """

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x, beside=None, valid=None):
        """Returns [N, width]; [N * K, width] with `beside` [N, K, G], see Dense."""
        cfg, width = self.cfg, self.cfg.hidden[0]
        norm = functools.partial(nn.LayerNorm, dtype=cfg.dtype)
        block_options = {**dense_options(cfg), "weights": cfg.init or "he"}
        x = Dense(width, **{**dense_options(cfg), "scale": 1.0})(x, beside)
        for _ in cfg.hidden:
            y = norm()(x)
            y = ACTIVATIONS[cfg.activation](Dense(_EXPANSION * width, **block_options)(y))
            x = x + Dense(width, **block_options)(y)
        return norm()(x)


class Bro(nn.Module):
    """BroNet (arXiv:2405.16158, section 2): a dense layer, layer norm, the activation f, blocks. A block is

    x + layer_norm(W2 f(layer_norm(W1 x))),  W1 and W2 [width, width]
    """

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x, beside=None, valid=None):
        """Returns [N, width]; [N * K, width] with `beside` [N, K, G], see Dense."""
        cfg, width, act = self.cfg, self.cfg.hidden[0], ACTIVATIONS[self.cfg.activation]
        dense = functools.partial(Dense, width, **dense_options(cfg))
        norm = functools.partial(nn.LayerNorm, dtype=cfg.dtype)
        x = dense()(x, beside)
        x = act(norm()(x))
        for _ in cfg.hidden:
            y = dense()(x)
            y = dense()(act(norm()(y)))
            x = x + norm()(y)
        return x


class Scaler(nn.Module):
    """x times a learned vector: initially `start`, learned as a parameter of size `size` (arXiv:2502.15280, section 4).

    Adam's steps have the same size for all parameters, so a smaller `size` learns faster relative to `start`.
    """

    start: float
    size: float

    @nn.compact
    def __call__(self, x):
        scale: Array = parameter(self, "scale", nn.initializers.constant(self.size), x.shape[-1:])
        return x * (scale * (self.start / self.size))[None].astype(x.dtype)


class SimbaV2(nn.Module):
    """SimbaV2 (arXiv:2502.15280, section 4): features and weights of norm 1. With u(x) = x / |x|, scalers s and f:

        x = u(s * W u([input, 3]))
        x = u(x + a * (u(W2 (f(s * W1 x) + 1e-8)) - x))        for each block; a is a scaler, at first 1 / (blocks + 1)

    Kernels have columns of norm 1, which each learning step restores (`dense.with_unit_weights`), and no biases.
    """

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x, beside=None, valid=None):
        """Returns [N, width], rows of norm 1; [N * K, width] with `beside` [N, K, G], see Dense."""
        cfg, width = self.cfg, self.cfg.hidden[0]
        dense = _unit_dense(cfg)
        gain = math.sqrt(2.0 / width)
        x = _joined(x, beside)  # the norm is that of both together
        x = unit(jnp.concatenate([x, jnp.full_like(x[:, :1], _SHIFT)], -1))
        x = dense(width)(x)
        x = unit(Scaler(gain, gain)(x))
        gain = gain / math.sqrt(_EXPANSION)
        for _ in cfg.hidden:
            y = dense(_EXPANSION * width)(x)
            y = ACTIVATIONS[cfg.activation](Scaler(gain, gain)(y))
            y = unit(dense(width)(y + 1e-8))  # the sum is never a vector of zeros
            x = unit(x + Scaler(1.0 / (len(cfg.hidden) + 1), 1.0 / math.sqrt(width))(y - x))
        return x


class Flash(nn.Module):
    """FlashSAC's network (arXiv:2604.04539): batch normalisation bn and weights of norm 1, with the activation f:

        x = W bn(input)
        x = x + f(bn(W2 f(bn(W1 x))))       for each block, W1 [width, 4 width], W2 [4 width, width]
        x = rms_norm(x)

    bn is `batch_renorm`. Kernels have no biases. The paper also keeps the norms of bn's scale and bias.
    """

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x, beside=None, valid=None):
        """Returns [N, width]; [N * K, width] with `beside` [N, K, G]. `valid` [N]: see `networks.Network`."""
        cfg, width, act = self.cfg, self.cfg.hidden[0], ACTIVATIONS[self.cfg.activation]
        dense = _unit_dense(cfg)
        norm = functools.partial(BatchRenorm, cfg.dtype)
        x = norm()(_joined(x, beside), valid)
        x = dense(width)(x)
        for _ in cfg.hidden:
            y = dense(_EXPANSION * width)(x)
            y = dense(width)(act(norm()(y, valid)))
            x = x + act(norm()(y, valid))
        return nn.RMSNorm(dtype=cfg.dtype)(x)


def _unit_dense(cfg: NetworkConfig) -> Callable[[int], Dense]:
    """Returns the function from a width to a layer with weights of norm 1 and without biases."""
    return functools.partial(Dense, dtype=cfg.dtype, weights=cfg.init, has_unit_weights=True, has_bias=False)


def _joined(x: Array, beside: Array | None) -> Array:
    """Returns x [N, F] unchanged, or with `beside` [N, K, G] their concatenations [N * K, F + G]."""
    if beside is None:
        return x
    return jnp.concatenate([jnp.repeat(x, beside.shape[1], 0), beside.reshape(-1, beside.shape[-1])], -1)


class UnitHead(nn.Module):
    """SimbaV2's output layers: W2 (s * W1 x) + b with W1 [F, F], the scaler s and columns of norm 1; float32."""

    size: int

    @nn.compact
    def __call__(self, x):
        """Returns [N, size] f32."""
        x = Dense(x.shape[-1], has_unit_weights=True, has_bias=False)(x)
        return Dense(self.size, has_unit_weights=True)(Scaler(1.0, 1.0)(x))
