"""Torsos for images: Nature CNN, IMPALA ResNet, small CNN; the encoder of grids; a convolution that is fast on CPU.

XLA's CPU backend uses its fast convolution kernel only for the NHWC / HWIO layout. It converts other layouts only
outside loops. The gradients that JAX derives for a convolution use other layouts, so a training step inside a
`lax.scan` falls back to a naive kernel, about 12 times slower (jax issue 12868). Here both gradients are NHWC / HWIO
convolutions with explicit transposes. Convolutions of small grids are one matrix product of all windows instead.
"""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jrl.fields.hyper import NetworkConfig
from jrl.networks.dense import Dense, bias_init, kernel_init, linear, parameter
from jrl.networks.encoders import cells, grid_values, layer_options

_LAYOUT = ("NHWC", "HWIO", "NHWC")
_WINDOW_NUMBERS = 8192  # most numbers in the windows of a row for a matrix product: 32 kB of float32, an L1 cache


def _conv(x, kernel, stride, padding):
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=_LAYOUT)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _canonical(x, kernel, stride, padding):
    return _conv(x, kernel, stride, padding)


def _canonical_fwd(x, kernel, stride, padding):
    return _conv(x, kernel, stride, padding), (x, kernel)


def _canonical_bwd(stride, padding, residuals, grad):
    x, kernel = residuals
    # kernel gradient: x with batch and channels exchanged, convolved with the strided output gradient
    x_t, grad_t = jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(grad, (1, 2, 0, 3))
    # input gradient: the output gradient dilated by the stride, convolved with the flipped kernel
    flipped = jnp.transpose(kernel[::-1, ::-1], (0, 1, 3, 2))
    # without the barrier XLA folds the transposes back into a layout that its fast kernel does not support
    x_t, grad_t, flipped = jax.lax.optimization_barrier((x_t, grad_t, flipped))
    kernel_pad, input_pad = [], []
    for size, k, out, (low, high) in zip(x.shape[1:3], kernel.shape[:2], grad.shape[1:3], padding, strict=True):
        unused = size + low + high - (stride * (out - 1) + k)  # rows at the high end outside all windows
        kernel_pad.append((low, high - unused))
        input_pad.append((k - 1 - low, size + low - stride * (out - 1) - 1))
    d_kernel = jax.lax.conv_general_dilated(
        x_t, grad_t, (1, 1), kernel_pad, rhs_dilation=(stride, stride), dimension_numbers=_LAYOUT
    )
    d_x = jax.lax.conv_general_dilated(
        grad, flipped, (1, 1), input_pad, lhs_dilation=(stride, stride), dimension_numbers=_LAYOUT
    )
    return d_x, jnp.transpose(d_kernel, (1, 2, 0, 3))


_canonical.defvjp(_canonical_fwd, _canonical_bwd)


def _product(x, kernel, stride, padding):
    """Convolves by a matrix product of all windows, each concatenated to a vector."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, height, width, channels = x.shape
    across, down = range(kernel.shape[1]), range(kernel.shape[0])
    bottom, right = height - len(down) + 1, width - len(across) + 1
    # the positions that each number of the kernel multiplies; `lax.slice`, because indexing is a gather
    place = lambda i, j: jax.lax.slice(x, (0, i, j, 0), (rows, i + bottom, j + right, channels), (1, stride, stride, 1))
    windows = jnp.concatenate([place(i, j) for i in down for j in across], -1)
    y = linear(windows.reshape(-1, windows.shape[-1]), kernel.reshape(-1, kernel.shape[-1]))
    return y.reshape(*windows.shape[:3], -1)


def conv2d(x, kernel, *, stride: int = 1, padding: str = "VALID"):
    """Convolves [N, H, W, C] with [h, w, C, F]: [N, H', W', F].

    Args:
      x: [N, H, W, C] floating point.
      kernel: [h, w, C, F], the dtype of `x`.
      stride: stride in both directions.
      padding: "VALID" or "SAME".
    """
    explicit = tuple(jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (stride, stride), padding))
    if jax.default_backend() != "cpu":
        return _conv(x, kernel, stride, explicit)
    sizes = zip(x.shape[1:3], kernel.shape[:2], explicit, strict=True)
    outputs = math.prod((size + sum(pad) - k) // stride + 1 for size, k, pad in sizes)
    # gradients of 64 grids of the encoder `grid` take 0.7 of the time; wider windows are slower than convolutions
    fn = _product if outputs * math.prod(kernel.shape[:3]) <= _WINDOW_NUMBERS else _canonical
    return fn(x, kernel, stride, explicit)


class Conv(nn.Module):
    """`conv2d` with a bias; parameters `kernel` [h, w, C, F] and `bias` [F], as in flax's Conv."""

    features: int
    size: int
    stride: int = 1
    padding: str = "VALID"
    weights: str | None = None  # initial weights, see NetworkConfig.init
    scale: float = 1.0  # gain of orthogonal kernels
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        shape = self.size, self.size, x.shape[-1], self.features
        kernel: Any = parameter(self, "kernel", kernel_init(self.weights, self.scale, shape), shape)
        bias: Any = parameter(self, "bias", bias_init(self.weights, shape), shape[-1:])
        x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
        return conv2d(x, kernel, stride=self.stride, padding=self.padding) + jnp.expand_dims(bias, (0, 1, 2))


# ---------------------------------------------------------------- torsos


class NatureCnn(nn.Module):
    """Three convolutions and a dense layer of 512 (Mnih et al., Nature 518, 2015), ReLU throughout."""

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x):
        options = layer_options(self.cfg)
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, size, stride, **options)(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(Dense(512, **options)(x))


class ImpalaResNet(nn.Module):
    """Three stages of 16, 32 and 32 channels with two residual blocks each (arXiv:1802.01561, figure 3), dense 256."""

    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x):
        options = layer_options(self.cfg)
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
        options = layer_options(self.cfg)
        for features, stride in ((16, 1), (32, 2), (64, 2)):
            x = nn.relu(Conv(features, 3, stride, padding="SAME", **options)(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(Dense(128, **options)(x))


class Grid(nn.Module):
    """Encoder of a grid of integers `leaf`: learned vectors of the cells, and three 2 x 2 convolutions with ReLU.

    As in the baselines of XLand-MiniGrid (arXiv:2312.12044): each channel has its own table, the vectors of a cell are
    concatenated, and the convolutions have 16, 32 and 64 channels. Vectors have `cfg.encoder_hidden[-1]` numbers.
    """

    leaf: Any  # Box
    cfg: NetworkConfig

    @nn.compact
    def __call__(self, x):
        width = self.cfg.encoder_hidden[-1]
        least, sizes = (np.array(x, np.int32).reshape(1, 1, 1, -1) for x in grid_values(self.leaf))
        first = np.cumsum(sizes, -1, dtype=np.int32) - sizes  # first row of each channel in the table
        init = nn.initializers.normal(1.0 / math.sqrt(width))
        table: Any = parameter(self, "table", init, (int(sizes.sum()), width))
        # clipped: an integer beyond its bounds would read another channel's vectors
        index = jnp.clip(cells(self.leaf, x).astype(jnp.int32) - least, 0, sizes - 1) + first
        x = table.at[index].get(mode="promise_in_bounds")
        x = x.reshape(*x.shape[:3], -1)
        for features in (16, 32, 64):
            x = nn.relu(Conv(features, 2, **layer_options(self.cfg))(x))
        return x.reshape(x.shape[0], -1)
