"""Torsos, heads and initial weights: counts, shapes, layouts, and observations of every space."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import networks
from jrl.errors import InputError
from jrl.networks import Head, NetworkConfig
from jrl.networks.dense import orthogonal
from jrl.networks.encoders import to_float
from jrl.types import Box, Discrete, EnvSpec, MultiDiscrete

HEADS = {"policy": Head(3, 0.01), "value": Head(1)}


def build(observation, cfg=None, heads=None):
    return networks.build(EnvSpec(observation, Discrete(3), 4), cfg or NetworkConfig(hidden=(8, 8)), heads or HEADS)


@functools.cache
def _orthogonal(shape):
    """From a gain to a kernel: one compilation for all gains."""
    return jax.jit(lambda scale: orthogonal(scale)(jax.random.key(0), shape))


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6), (3, 3, 4, 8), (3, 3, 16, 8)])
@pytest.mark.parametrize("scale", [1.0, np.sqrt(2), 0.01])
def test_orthogonal_columns_or_rows_are_orthonormal(shape, scale):
    w = np.asarray(_orthogonal(shape)(scale)).reshape(-1, shape[-1])
    gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5 * scale**2 + 1e-9)


def test_orthogonal_is_uniform_in_sign():
    """Without the sign of R's diagonal LAPACK's Q has a negative first diagonal element nearly always."""
    keys = jax.random.split(jax.random.key(0), 400)
    w = np.asarray(jax.jit(lambda keys: jax.lax.map(lambda key: orthogonal(1.0)(key, (4, 3)), keys))(keys))
    positive = (w > 0).mean(0)
    np.testing.assert_allclose(positive, 0.5, atol=5 * 0.5 / np.sqrt(400))
    # uniform over directions: each element of a unit vector in R^4 has variance 1 / 4
    np.testing.assert_allclose((w**2).mean(0), 0.25, atol=0.06)


def test_parameter_count_of_separate_and_shared_torsos():
    key, space = jax.random.key(0), Box((4,))
    mlp = lambda outputs: (4 * 8 + 8) + (8 * 8 + 8) + (8 * outputs + outputs)
    separate = jax.eval_shape(build(space).init, key)
    assert sum(x.size for x in jax.tree.leaves(separate)) == mlp(3) + mlp(1)
    assert set(separate) == {"policy_torso", "policy_head", "value_torso", "value_head"}
    shared = jax.eval_shape(build(space, NetworkConfig(hidden=(8, 8), shared=True)).init, key)
    assert sum(x.size for x in jax.tree.leaves(shared)) == mlp(3) + (8 * 1 + 1)
    assert set(shared) == {"torso", "policy_head", "value_head"}


def test_heads_have_their_gain():
    params = jax.jit(build(Box((4,))).init)(jax.random.key(0))
    for name, gain in (("policy", 0.01), ("value", 1.0)):
        w = np.asarray(params[f"{name}_head"]["kernel"])
        np.testing.assert_allclose(np.linalg.norm(w, axis=0), gain, rtol=1e-4)
    hidden = np.asarray(params["value_torso"]["Dense_1"]["kernel"])
    np.testing.assert_allclose(hidden.T @ hidden, 2 * np.eye(8), atol=1e-4)


@pytest.mark.parametrize("init", ["lecun", "uniform"])
@pytest.mark.parametrize(
    ("torso", "layer", "fan_in"),
    some_quick([("mlp", "Dense_0", 300), ("small_cnn", "Conv_1", 3 * 3 * 16)], ("mlp", "Dense_0", 300)),
)
def test_initial_weights_go_by_the_number_of_inputs(init, torso, layer, fan_in):
    space = Box((10, 10, 3), "uint8", 0, 255)
    network = build(space, NetworkConfig(hidden=(200,), torso=torso, init=init), {"value": Head(1)})
    params = jax.jit(network.init)(jax.random.key(0))["value_torso"][layer]
    kernel, bias, bound = np.asarray(params["kernel"]), np.asarray(params["bias"]), fan_in**-0.5
    if init == "lecun":
        assert not bias.any()
        np.testing.assert_allclose(kernel.std(), bound, rtol=0.05)
        return
    for x in (kernel, bias):
        assert 0.9 * bound < np.abs(x).max() <= bound
        np.testing.assert_allclose(x.std(), bound / np.sqrt(3), rtol=0.15)  # of a uniform distribution
        assert abs(x.mean()) < 0.2 * bound


def test_an_mlp_by_hand():
    network = build(Box((4,)))
    params = jax.jit(network.init)(jax.random.key(0))
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)

    def forward(name):
        x = obs
        for layer in ("Dense_0", "Dense_1"):
            w = params[f"{name}_torso"][layer]
            x = np.tanh(x @ np.asarray(w["kernel"]) + np.asarray(w["bias"])[None])
        head = params[f"{name}_head"]
        return x @ np.asarray(head["kernel"]) + np.asarray(head["bias"])[None]

    apply = jax.jit(network.apply, static_argnums=(2, 3))
    value, policy = apply(params, obs, "value", "policy")  # in the order asked for
    np.testing.assert_allclose(policy, forward("policy"), atol=1e-5)
    np.testing.assert_allclose(value, forward("value"), atol=1e-5)
    assert len(apply(params, obs)) == 2  # all of them


SPACES = {
    "vector": (Box((4,)), lambda rng, b: rng.normal(size=(*b, 4)).astype(np.float32)),
    "matrix": (Box((3, 2)), lambda rng, b: rng.normal(size=(*b, 3, 2)).astype(np.float32)),
    "discrete": (Discrete(5), lambda rng, b: rng.integers(0, 5, b, dtype=np.int32)),
    "multi": (MultiDiscrete((3, 2)), lambda rng, b: rng.integers(0, 2, (*b, 2), dtype=np.int32)),
    "bytes": (Box((6,), "uint8", 0, 255), lambda rng, b: rng.integers(0, 256, (*b, 6), dtype=np.uint8)),
    "small image": (Box((3, 9, 8), "uint8", 0, 255), lambda rng, b: rng.integers(0, 256, (*b, 3, 9, 8), np.uint8)),
}


@pytest.mark.parametrize("name", some_quick(SPACES, "vector", "multi"))
def test_leading_axes(name):
    space, draw = SPACES[name]
    network = build(space, NetworkConfig(hidden=(8,), torso="impala" if "image" in name else "auto"))
    params = jax.jit(network.init)(jax.random.key(0))
    obs = draw(np.random.default_rng(0), (2, 3))
    apply = jax.jit(network.apply)
    policy, value = jax.device_get(apply(params, obs))
    assert (policy.shape, value.shape) == ((2, 3, 3), (2, 3, 1))
    assert policy.dtype == value.dtype == jnp.float32
    flat, _ = apply(params, obs.reshape(6, *space.shape))
    np.testing.assert_allclose(policy.reshape(6, 3), flat, atol=1e-6)
    one, _ = apply(params, obs[1, 2])
    np.testing.assert_allclose(policy[1, 2], one, atol=1e-6)
    assert np.ptp(policy) > 0


def test_integers_become_one_hot():
    np.testing.assert_array_equal(to_float(Discrete(3), jnp.array([2, 0])), [[0, 0, 1], [1, 0, 0]])
    both = to_float(MultiDiscrete((2, 3)), jnp.array([[1, 0], [0, 2]]))
    np.testing.assert_array_equal(both, [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])
    np.testing.assert_allclose(
        to_float(Box((2,), "uint8"), jnp.array([[0, 255], [51, 0]], jnp.uint8)), [[0, 1], [0.2, 0]]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("torso", "size"), [("nature_cnn", 36), ("impala", 9)])
def test_channels_first_and_last_give_the_same(torso, size):
    cfg = NetworkConfig(torso=torso)
    last = build(Box((size, size + 1, 3), "uint8", 0, 255), cfg)
    first = build(Box((3, size, size + 1), "uint8", 0, 255), cfg)
    obs = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, size, size + 1, 3), dtype=np.uint8))
    params = jax.jit(last.init)(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, jax.eval_shape(first.init, jax.random.key(0)))
    a = jax.jit(last.apply)(params, obs)
    b = jax.jit(first.apply)(params, jnp.moveaxis(obs, 3, 1))
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x, y)
    assert float(jnp.abs(a[0][0] - a[0][1]).max()) > 0


def test_nature_cnn_has_the_published_size():
    """84 x 84 x 4: 1,684,128 up to the dense layer of 512 (Mnih et al., 2015)."""
    network = build(Box((4, 84, 84), "uint8", 0, 255), NetworkConfig(shared=True), {"q": Head(6)})
    params = jax.eval_shape(network.init, jax.random.key(0))
    torso = sum(x.size for x in jax.tree.leaves(params["torso"]))
    convolutions = (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64)
    assert torso == convolutions + 7 * 7 * 64 * 512 + 512 == 1_684_128


@pytest.mark.parametrize(
    "cfg", some_quick([{"dtype": "bfloat16"}, {"norm": "layer"}, {"init": "lecun"}], {"norm": "layer"})
)
def test_options(cfg):
    network = build(Box((4,)), NetworkConfig(hidden=(8,), **cfg))
    params = jax.jit(network.init)(jax.random.key(0))
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    policy, _ = jax.jit(network.apply)(params, jnp.ones((2, 4)))
    assert policy.dtype == jnp.float32
    assert ("LayerNorm_0" in params["policy_torso"]) == ("norm" in cfg)
    plain = build(Box((4,)), NetworkConfig(hidden=(8,), norm=cfg.get("norm", "none")))
    exact, _ = jax.jit(plain.apply)(params, jnp.ones((2, 4)))
    np.testing.assert_allclose(policy, exact, atol=0.05)
    assert np.array_equal(policy, exact) == ("dtype" not in cfg)


def test_torsos_that_do_not_fit():
    with pytest.raises(InputError, match="nature_cnn needs image observations"):
        build(Box((4,)), NetworkConfig(torso="nature_cnn"))
    with pytest.raises(InputError, match="impala needs image observations"):
        build(Discrete(4), NetworkConfig(torso="impala"))
    with pytest.raises(InputError, match="36 x 36 or more"):
        build(Box((3, 20, 20), "uint8"), NetworkConfig(torso="nature_cnn"))
