"""Convolutions on a CPU, hand-written gradients or matrix products of windows, against JAX's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl.networks.conv import Conv, conv2d


def plain(x, kernel, stride, padding):
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def data(height, width, size, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(2, height, width, channels)), jnp.float32)
    return x, jnp.asarray(rng.normal(size=(size, size, channels, 4)) / np.sqrt(channels), jnp.float32)


def gradients(conv, x, kernel, weight):
    """Of a sum that weighs every output differently, so that a transposed or shifted gradient shows."""
    return jax.grad(lambda x, kernel: jnp.sum(conv(x, kernel) * weight), argnums=(0, 1))(x, kernel)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize(
    ("height", "width", "size", "channels"),  # 3 channels: a product of windows; 512: a convolution
    some_quick(
        [(8, 8, 4, 3), (9, 7, 3, 3), (9, 7, 3, 512), (11, 10, 4, 3), (11, 10, 4, 512), (5, 6, 5, 3), (6, 5, 1, 3)],
        (9, 7, 3, 3),
        (11, 10, 4, 512),
    ),
)
def test_values_and_gradients(height, width, size, channels, stride, padding):
    # 11 rows, size 4, stride 4: the last three rows are in no window
    x, kernel = data(height, width, size, channels)

    @jax.jit
    def both(x, kernel):
        ours, theirs = (
            lambda x, k: conv2d(x, k, stride=stride, padding=padding),
            lambda x, k: plain(x, k, stride, padding),
        )
        y = theirs(x, kernel)
        weight = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return (ours(x, kernel), y), (gradients(ours, x, kernel, weight), gradients(theirs, x, kernel, weight))

    (y, expected), (gradient, expected_gradient) = both(x, kernel)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradient, expected_gradient):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [3, 512])
def test_under_vmap(channels):
    x, kernel = data(9, 9, 3, channels)
    kernels = jnp.stack([kernel, -kernel, 2 * kernel])
    grad = lambda conv: jax.jit(jax.vmap(jax.grad(lambda k: jnp.sum(jnp.sin(conv(x, k))))))(kernels)
    ours, theirs = grad(lambda x, k: conv2d(x, k, stride=2)), grad(lambda x, k: plain(x, k, 2, "VALID"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_parameters_are_those_of_flax():
    x, _ = data(9, 9, 3)
    ours, theirs = Conv(5, 3, 2), nn.Conv(5, (3, 3), 2, padding="VALID")
    params = jax.jit(ours.init)(jax.random.key(0), x)["params"]
    assert {name: p.shape for name, p in params.items()} == {"kernel": (3, 3, 3, 5), "bias": (5,)}
    reference = jax.eval_shape(theirs.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda s: s.shape, reference)
    params["bias"] = np.arange(5.0, dtype=np.float32)
    y, expected = (jax.jit(module.apply)({"params": params}, x) for module in (ours, theirs))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_keeps_float32_parameters():
    x, _ = data(9, 9, 3)
    module = Conv(5, 3, dtype=jnp.bfloat16)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert {p.dtype for p in params.values()} == {jnp.dtype("float32")}
    assert jax.eval_shape(module.apply, {"params": params}, x).dtype == jnp.bfloat16
