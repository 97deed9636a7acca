"""Torsos from an observation to a feature vector: MLP, Nature CNN, IMPALA ResNet, small CNN."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jrl.networks.config import NetworkConfig
from jrl.networks.conv import Conv
from jrl.networks.dense import Dense
from jrl.types import Array, Box, Discrete, Leaf, MultiDiscrete, Space

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "elu": nn.elu,
}


_GAIN = math.sqrt(2)  # gain before an activation that halves the variance


def _layer_options(cfg: NetworkConfig) -> dict[str, Any]:
    return {"dtype": cfg.dtype, "weights": cfg.init, "scale": _GAIN}


NATURE_LEAST = 36  # height and width of the smallest image for nature_cnn


def is_image(space: Space) -> bool:
    return (
        isinstance(space, Box)
        and len(space.shape) == 3
        and (space.dtype == "uint8" or np.issubdtype(np.dtype(space.dtype), np.floating))
    )


def to_float(space: Leaf, obs: Array, image_max: float = 255.0) -> Array:
    """Returns observations [..., *space.shape] as float32 features [N, F] or images [N, H, W, C] in [0, 1].

    Integers become one-hot vectors. An array with three axes is an image; its channel axis is the smaller of the first
    and the last axis. uint8 is divided by 255, in images by `image_max`.
    """
    if isinstance(space, Discrete):
        return jax.nn.one_hot(obs.reshape(-1), space.n)
    if isinstance(space, MultiDiscrete):
        flat = obs.reshape(-1, len(space.nvec))
        return jnp.concatenate([jax.nn.one_hot(flat[:, i], n) for i, n in enumerate(space.nvec)], -1)
    x = obs.astype(jnp.float32)
    if obs.dtype == jnp.uint8:
        x = x / (image_max if is_image(space) else 255.0)
    if not is_image(space):
        return x.reshape(-1, math.prod(space.shape))
    x = x.reshape(-1, *space.shape)
    return jnp.moveaxis(x, 1, 3) if space.shape[0] < space.shape[2] else x


class Mlp(nn.Module):
    """Dense layers of widths `hidden` (None: `cfg.hidden`), each followed by the activation.

    `beside` is a second input, see Dense.
    """

    cfg: NetworkConfig
    hidden: tuple[int, ...] | None = None

    @nn.compact
    def __call__(self, x, beside=None):
        for width in self.cfg.hidden if self.hidden is None else self.hidden:
            x, beside = Dense(width, **_layer_options(self.cfg))(x, beside), None
            if self.cfg.layer_norm:
                x = nn.LayerNorm(dtype=self.cfg.dtype)(x)
            x = ACTIVATIONS[self.cfg.activation](x)
        return x


class NatureCnn(nn.Module):
    """Three convolutions and a dense layer of 512 (Mnih et al., Nature 518, 2015), ReLU throughout."""

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x):
        options = _layer_options(self.cfg)
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, size, stride, **options)(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(Dense(512, **options)(x))


class ImpalaResNet(nn.Module):
    """Three stages of 16, 32 and 32 channels with two residual blocks each (arXiv:1802.01561, figure 3), dense 256."""

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x):
        options = _layer_options(self.cfg)
        conv = lambda features, x: Conv(features, 3, padding="SAME", **options)(x)
        for features in (16, 32, 32):
            x = nn.max_pool(conv(features, x), (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                x = x + conv(features, nn.relu(conv(features, nn.relu(x))))
        x = nn.relu(x).reshape(x.shape[0], -1)
        return nn.relu(Dense(256, **options)(x))


class SmallCnn(nn.Module):
    """Small CNN for images of any size, such as grid cells.

    Three 3 x 3 convolutions, the last two with stride 2, and a dense layer of 128; ReLU throughout.
    """

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x):
        options = _layer_options(self.cfg)
        for features, stride in ((16, 1), (32, 2), (64, 2)):
            x = nn.relu(Conv(features, 3, stride, padding="SAME", **options)(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(Dense(128, **options)(x))


CNNS: dict[str, type[nn.Module]] = {"nature_cnn": NatureCnn, "impala": ImpalaResNet, "small_cnn": SmallCnn}
