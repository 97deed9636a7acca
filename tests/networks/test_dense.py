"""Dense: the results, parameters and gradients of flax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from flax.errors import ScopeParamShapeError

from jrl.networks.dense import Dense, linear, parameter


@pytest.mark.parametrize("dtype", some_quick(["float32", "bfloat16"], "float32"))
def test_it_is_flax_dense(dtype):
    x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    ours, theirs = Dense(7, dtype), nn.Dense(7, dtype=dtype)
    params = jax.jit(ours.init)(jax.random.key(1), x)
    same = jax.eval_shape(theirs.init, jax.random.key(1), x)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda s: s.shape, same)
    params = jax.tree.map(lambda p: np.asarray(p) + np.float32(0.1), params)
    loss = lambda layer: lambda params, x: jnp.sum(jnp.sin(layer.apply(params, x).astype(jnp.float32)))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.05}
    found, expected = (jax.jit(jax.value_and_grad(loss(m), (0, 1)))(params, x) for m in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)
    assert jax.eval_shape(ours.apply, params, x).dtype == dtype


def test_the_gradient_under_vmap_is_that_of_each():
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 8, 5), (3, 5, 2)))
    gradient = jax.jit(jax.grad(lambda x, kernel: jnp.sum(linear(x, kernel) ** 2), (0, 1)))
    together = jax.jit(jax.vmap(gradient))(x, kernel)
    for i in range(3):
        alone = gradient(x[i], kernel[i])
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(np.asarray(a)[i], b, rtol=1e-5, atol=1e-5)


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
