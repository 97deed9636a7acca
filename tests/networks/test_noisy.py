"""Noisy layers: moments of the noise, silence without a key, one draw for all rows; heads with layers of their own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import networks
from jrl.networks import Head, NetworkConfig
from jrl.networks.noisy import NoisyDense
from jrl.types import Box, Discrete, EnvSpec

IN, OUT = 5, 4
SPEC = EnvSpec(Box((IN,)), Discrete(3), 4)


@pytest.fixture(scope="module")
def layer():
    module = NoisyDense(OUT, 0.7)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, IN)), jnp.float32)
    return module, jax.device_get(jax.jit(module.init)(jax.random.key(0), x)["params"]), x


def test_initial_parameters():
    params = jax.device_get(jax.jit(NoisyDense(200, 0.5).init)(jax.random.key(0), np.zeros((1, 16), "f4"))["params"])
    assert {k: v.shape for k, v in params.items()} == {
        "kernel": (16, 200), "kernel_sigma": (16, 200), "bias": (200,), "bias_sigma": (200,)
    }  # fmt: skip
    for name in ("kernel", "bias"):  # uniform in +- 1 / sqrt(16)
        assert 0.24 < np.abs(params[name]).max() <= 0.25
        np.testing.assert_allclose(params[name].std(), 0.25 / math.sqrt(3), rtol=0.1)
        np.testing.assert_array_equal(params[name + "_sigma"], np.full_like(params[name], 0.5 / 4))


def test_moments_of_the_noise(layer):
    """f(e) = sign(e) sqrt|e| has mean 0 and variance sqrt(2 / pi)."""
    module, params, x = layer
    rng = np.random.default_rng(1)
    params = {**params, "kernel_sigma": jnp.asarray(rng.uniform(0, 1, (IN, OUT)), jnp.float32)}
    params["bias_sigma"] = jnp.asarray(rng.uniform(0, 1, OUT), jnp.float32)
    silent = np.asarray(jax.jit(module.apply)({"params": params}, x))
    np.testing.assert_allclose(silent, np.asarray(x) @ params["kernel"] + params["bias"][None], atol=1e-6)
    keys = jax.random.split(jax.random.key(2), 40_000)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: module.apply({"params": params}, x, key)))(keys))
    square = math.sqrt(2 / math.pi)
    kernel_sigma, bias_sigma = np.asarray(params["kernel_sigma"]), np.asarray(params["bias_sigma"])
    variance = square * (square * np.asarray(x) ** 2 @ kernel_sigma**2 + bias_sigma[None] ** 2)
    np.testing.assert_allclose(draws.mean(0), silent, atol=5 * math.sqrt(variance.max() / 40_000))
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.08)


def test_factorised_noise_is_one_draw_for_all_rows(layer):
    module, params, _ = layer
    key = jax.random.key(3)
    noisy = jax.jit(lambda x: module.apply({"params": params}, x, key))
    apply = lambda x: np.asarray(noisy(np.asarray(x, np.float32)))
    bias = apply(np.zeros((1, IN)))
    kernel = apply(np.eye(IN)) - bias  # the noisy kernel, read off row by row
    factor = (kernel - params["kernel"]) / np.asarray(params["kernel_sigma"])
    assert np.linalg.matrix_rank(factor, tol=1e-4) == 1  # an outer product
    f = (bias - params["bias"][None]) / np.asarray(params["bias_sigma"])[None]
    np.testing.assert_allclose(factor / f, np.broadcast_to((factor / f)[:, :1], factor.shape), rtol=1e-3)
    x = np.random.default_rng(4).normal(size=(7, IN)).astype(np.float32)
    np.testing.assert_allclose(apply(x), np.asarray(x) @ kernel + bias, atol=1e-5)


def test_noisy_heads():
    heads = {"value": Head(2, 1.0, 0.5), "policy": Head(3)}
    network = networks.build(SPEC, NetworkConfig(hidden=(8,), head_hidden=(6,), shared=True), heads)
    params = jax.jit(network.init)(jax.random.key(0))
    assert set(params) == {"torso", "value_hidden_0", "value_head", "policy_hidden_0", "policy_head"}
    noisy = {name for name in params if "kernel_sigma" in params[name]}
    assert noisy == {"value_hidden_0", "value_head"}
    obs = jnp.ones((2, IN))
    a, b = jax.random.split(jax.random.key(1))
    apply = jax.jit(network.apply, static_argnums=2)
    silent = jax.device_get(apply(params, obs))
    first, again, second = (jax.device_get(apply(params, obs, key=key)) for key in (a, a, b))
    np.testing.assert_array_equal(first[1], silent[1])  # an ordinary head
    np.testing.assert_array_equal(first[0], again[0])
    assert np.abs(first[0] - silent[0]).min() > 0 and np.abs(first[0] - second[0]).min() > 0
    # the noise of a head does not depend on which others are asked for
    np.testing.assert_allclose(apply(params, obs, "value", key=a)[0], first[0], rtol=1e-6)
    # a layer's noise is its own: silent last layers leave that of the hidden one
    quiet = {**params, "value_head": {**params["value_head"]}}
    for name in ("kernel_sigma", "bias_sigma"):
        quiet["value_head"][name] = np.zeros_like(params["value_head"][name])
    partly = np.asarray(apply(quiet, obs, "value", key=a)[0])
    assert np.abs(partly - silent[0]).min() > 0 and np.abs(partly - first[0]).min() > 0


def test_a_head_with_layers_of_its_own_by_hand():
    cfg = NetworkConfig(hidden=(8,), head_hidden=(6, 7), activation="relu", shared=True)
    network = networks.build(SPEC, cfg, {"value": Head(1), "policy": Head(3)})
    params = jax.jit(network.init)(jax.random.key(0))
    mlp = lambda outputs: (8 * 6 + 6) + (6 * 7 + 7) + (7 * outputs + outputs)
    assert sum(x.size for x in jax.tree.leaves(params)) == (IN * 8 + 8) + mlp(1) + mlp(3)
    x = np.random.default_rng(0).normal(size=(5, IN)).astype(np.float32)
    found = jax.jit(lambda params: network.apply(params, x, "value", "policy"))(params)
    for name, out in zip(("value", "policy"), found):
        y = x
        layers = [params["torso"]["Dense_0"], params[f"{name}_hidden_0"], params[f"{name}_hidden_1"]]
        for w in layers:
            y = np.maximum(y @ np.asarray(w["kernel"]) + np.asarray(w["bias"])[None], 0)
        head = params[f"{name}_head"]
        np.testing.assert_allclose(out, y @ np.asarray(head["kernel"]) + np.asarray(head["bias"])[None], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.5])
def test_options_reach_the_layers_of_heads(noise):
    cfg = NetworkConfig(hidden=(8,), head_hidden=(6,), norm="layer", dtype="bfloat16", shared=True)
    network = networks.build(SPEC, cfg, {"value": Head(1, 1.0, noise)})
    params = jax.jit(network.init)(jax.random.key(0))
    assert "value_norm_0" in params
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    out = np.asarray(jax.jit(network.apply)(params, jnp.ones((2, IN)), key=jax.random.key(1))[0])
    exact_cfg = NetworkConfig(hidden=(8,), head_hidden=(6,), norm="layer", shared=True)
    exact = networks.build(SPEC, exact_cfg, {"value": Head(1, 1.0, noise)})
    want = np.asarray(jax.jit(exact.apply)(params, jnp.ones((2, IN)), key=jax.random.key(1))[0])
    assert out.dtype == jnp.float32
    assert not np.array_equal(out, out.astype(jnp.bfloat16))  # with all its digits
    np.testing.assert_allclose(out, want, atol=0.05)
    assert not np.array_equal(out, want)
