"""Dense: the results, parameters and gradients of flax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from jrl.networks.dense import Dense, linear, parameter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_flax_dense(dtype):
    x = jax.random.normal(jax.random.key(0), (32, 5))
    ours, theirs = Dense(7, dtype), nn.Dense(7, dtype=dtype)
    params = ours.init(jax.random.key(1), x)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, theirs.init(jax.random.key(1), x))
    params = jax.tree.map(lambda p: p + 0.1, params)
    loss = lambda layer: lambda params, x: jnp.sum(jnp.sin(layer.apply(params, x).astype(jnp.float32)))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.05}
    found, expected = (jax.jit(jax.value_and_grad(loss(m), (0, 1)))(params, x) for m in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)
    assert ours.apply(params, x).dtype == dtype


def test_the_gradient_under_vmap_is_that_of_each():
    x, kernel = jax.random.normal(jax.random.key(0), (3, 8, 5)), jax.random.normal(jax.random.key(1), (3, 5, 2))
    gradient = jax.grad(lambda x, kernel: jnp.sum(linear(x, kernel) ** 2), (0, 1))
    together = jax.vmap(gradient)(x, kernel)
    for i in range(3):
        alone = gradient(x[i], kernel[i])
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_the_transpose_is_not_folded_into_the_product():
    """Else the gradient is right and slow."""
    gradient = jax.jit(jax.grad(lambda kernel, x: jnp.sum(jnp.tanh(linear(x, kernel)))))
    text = gradient.lower(jnp.ones((64, 32)), jnp.ones((128, 64))).compile().as_text()
    products = [line for line in text.splitlines() if " dot(" in line]
    assert products
    assert not any("lhs_contracting_dims={0}" in line for line in products), products


def test_a_parameter_that_is_there_is_not_made_again():
    made = []

    def init(key, shape, dtype):
        made.append(shape)
        return jnp.ones(shape, dtype)

    class Scale(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            return x * parameter(self, "scale", init, (self.width,))

    params = Scale(3).init(jax.random.key(0), jnp.ones(3))
    assert made == [(3,)] and params["params"]["scale"].dtype == jnp.float32
    np.testing.assert_array_equal(Scale(3).apply(params, jnp.full(3, 2.0)), np.full(3, 2.0))
    assert made == [(3,)]
    with pytest.raises(ScopeParamShapeError, match=r"scale"):
        Scale(1).apply(params, jnp.ones(3))
