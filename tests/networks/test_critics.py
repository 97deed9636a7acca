"""Stacked critics against one network after the other, on every kind of observation and action."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import networks
from jrl.errors import InputError
from jrl.fields import hyper
from jrl.networks import Head, NetworkConfig
from jrl.networks.critics import build_critics
from jrl.types import Box, Discrete, EnvSpec, MultiDiscrete, Window

KEY = jax.random.key(3)
ACTION = Box((2,), low=-1.0, high=1.0)
CFG = NetworkConfig(hidden=(8, 6))


def spec(observation=None, action=ACTION):
    return EnvSpec(observation or Box((4,)), action, 1)


def some(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def applied(critics, *args):
    """What they say, in numpy."""
    return jax.device_get(jax.jit(critics.apply)(*args))


def by_hand(params, i, x):
    """Critic i of a tanh network in float64, row by row."""
    kernel = lambda p: np.asarray(p["kernel"][i], np.float64)
    out = []
    for row in np.asarray(x, np.float64):
        for layer in ("Dense_0", "Dense_1"):
            p = params["layers"][layer]
            row = np.tanh(row @ kernel(p) + np.asarray(p["bias"][i]))
        out.append((row @ kernel(params["head"]) + np.asarray(params["head"]["bias"][i]))[0])
    return np.array(out)


@pytest.mark.parametrize("num_critics", some_quick([1, 2, 5], 2))
def test_each_critic_is_a_network_of_observation_and_action(num_critics):
    critics = build_critics(spec(), CFG, num_critics)
    params = jax.tree.map(lambda x: x + np.float32(0.1) * some(x.shape), jax.device_get(jax.jit(critics.init)(KEY)))
    obs, action = some((7, 4), 1), some((7, 2), 2)
    q = applied(critics, params, obs, action)
    assert (q.shape, q.dtype) == ((num_critics, 7), jnp.float32)
    for i in range(num_critics):
        want = by_hand(params, i, np.concatenate([obs, action], -1))
        np.testing.assert_allclose(q[i], want, rtol=1e-5, atol=1e-6)
    assert {x.shape[0] for x in jax.tree.leaves(params)} == {num_critics}


def test_critics_start_apart():
    q = build_critics(spec(), CFG, 3)
    values = applied(q, jax.jit(q.init)(KEY), some((5, 4)), some((5, 2)))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(values[i] - values[j]).min() > 1e-3
    assert np.abs(values - applied(q, jax.jit(q.init)(jax.random.key(4)), some((5, 4)), some((5, 2)))).min() > 1e-4


@pytest.mark.parametrize("num_critics", some_quick([1, 3], 3))
def test_discrete_actions_have_a_value_each(num_critics):
    env_spec = spec(action=Discrete(3))
    critics = build_critics(env_spec, CFG, num_critics)
    params, obs = jax.device_get(jax.jit(critics.init)(KEY)), some((7, 4))
    q = applied(critics, params, obs)
    assert (q.shape, q.dtype) == ((num_critics, 7, 3), jnp.float32)
    network = networks.build(env_spec, CFG, {"value": Head(3)})
    valued = jax.jit(lambda params: network.apply(params, obs, "value")[0])
    for i in range(num_critics):
        one = valued(jax.tree.map(lambda x, i=i: x[i], params))
        np.testing.assert_allclose(q[i], one, rtol=1e-5, atol=1e-6)


IMAGE = Box((9, 9, 2), "uint8", 0, 255)
OBSERVATIONS = [
    (Box((4, 2)), CFG, ACTION),
    (Box((4,)), CFG, Box((2, 2), low=-1.0, high=1.0)),
    (Box((6,), "uint8", 0, 255), CFG, ACTION),
    (Discrete(5), CFG, ACTION),
    (MultiDiscrete((3, 2)), CFG, ACTION),
    (IMAGE, NetworkConfig(hidden=(8,), torso="impala"), ACTION),
    (IMAGE, NetworkConfig(hidden=(8,), torso="mlp"), ACTION),
    (Box((36, 36, 1), "uint8", 0, 255), NetworkConfig(hidden=(8,)), ACTION),
]


@pytest.mark.parametrize(("observation", "cfg", "action"), some_quick(OBSERVATIONS, *OBSERVATIONS[1:3]), ids=str)
def test_observation_and_action_both_count(observation, cfg, action):
    critics = build_critics(spec(observation, action), cfg, 2)
    rng = np.random.default_rng(0)
    high = {"Discrete": lambda s: s.n, "MultiDiscrete": lambda s: s.nvec}.get(type(observation).__name__)
    integers = high is not None or observation.dtype == "uint8"
    draw = lambda: rng.integers(0, 256 if high is None else high(observation), (6, *observation.shape))
    obs = np.asarray(draw() if integers else rng.normal(size=(6, *observation.shape)), observation.dtype)
    if isinstance(observation, Discrete):
        obs = np.arange(6, dtype=np.int32) % 5
    params, actions = jax.jit(critics.init)(KEY), some((6, *action.shape))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def slope_and_value(action, obs):
        q = critics.apply(params, obs, action)
        return q.sum(), q

    slope, q = jax.device_get(slope_and_value(actions, obs))
    assert q.shape == (2, 6)
    assert np.isfinite(q).all()
    assert np.abs(slope).min() > 0  # every element of every action
    assert np.abs(q - np.asarray(slope_and_value(actions, np.roll(obs, 1, 0))[1])).max() > 1e-4


def test_bytes_are_scaled():
    critics = build_critics(spec(Box((6,), "uint8", 0, 255)), CFG, 2)
    floats = build_critics(spec(Box((6,))), CFG, 2)
    params, obs, action = jax.jit(critics.init)(KEY), np.arange(0, 240, 10).reshape(4, 6), some((4, 2))
    want = applied(floats, params, np.asarray(obs / 255, np.float32), action)
    np.testing.assert_allclose(applied(critics, params, np.asarray(obs, np.uint8), action), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layer_norm_and_dtype():
    cfg = NetworkConfig(hidden=(8, 6), norm="layer", dtype="bfloat16")
    critics = build_critics(spec(), cfg, 2)
    params = jax.jit(critics.init)(KEY)
    assert sorted(params["layers"]) == ["Dense_0", "Dense_1", "LayerNorm_0", "LayerNorm_1"]
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    q = applied(critics, params, some((5, 4)), some((5, 2)))
    assert q.dtype == jnp.float32
    assert not np.array_equal(q, q.astype(jnp.bfloat16))  # with all its digits
    plain = applied(build_critics(spec(), CFG, 2), {**params, "layers": _dense(params)}, some((5, 4)), some((5, 2)))
    assert np.abs(plain - applied(critics, params, some((5, 4)), some((5, 2)))).max() > 1e-2


def _dense(params):
    return {name: p for name, p in params["layers"].items() if name.startswith("Dense")}


@pytest.mark.parametrize("action", [ACTION, Discrete(3)], ids=str)
def test_a_torso_that_does_not_fit(action):
    with pytest.raises(InputError, match=r"network\.torso impala"):
        build_critics(spec(action=action), NetworkConfig(torso="impala"), 2)
    with pytest.raises(InputError, match="36 x 36"):
        build_critics(spec(IMAGE, action), NetworkConfig(torso="nature_cnn"), 2)


@pytest.mark.parametrize("action", some_quick([ACTION, Discrete(3)], ACTION), ids=str)
def test_memory_runs_over_windows(action):
    """Row by row is all at once; a row knows of those before it, but of none before a reset."""
    critics = build_critics(spec(action=action), NetworkConfig(hidden=(8,), core=hyper.Gru(size=5)), 2)
    params, obs = jax.jit(critics.init)(KEY), some((3, 6, 4), 1)
    reset = np.zeros((3, 6), bool)
    reset[1, 2] = True
    actions = () if isinstance(action, Discrete) else (some((3, 6, 2), 2),)
    start = critics.carry(params, 3)
    assert {x.shape[:2] for x in jax.tree.leaves(start)} == {(2, 3)}
    apply, unroll = jax.jit(critics.apply), jax.jit(critics.unroll)
    whole = np.asarray(apply(params, Window(obs, start, reset), *actions))
    assert whole.shape == ((2, 3, 6, 3) if isinstance(action, Discrete) else (2, 3, 6))
    carry = start
    for t in range(6):
        row = lambda x, t=t: x[:, t : t + 1]
        window = Window(row(obs), carry, row(reset))
        one = np.asarray(apply(params, window, *(row(a) for a in actions)))
        np.testing.assert_allclose(one[:, :, 0], whole[:, :, t], rtol=1e-5, atol=1e-6)
        carry = unroll(params, window)[1]
    second = np.float32(np.arange(6) == 1)[None, :, None]
    other = np.asarray(apply(params, Window(obs + second, start, reset), *actions))
    changed = np.abs(other - whole).reshape(2, 3, 6, -1).max((0, 3)) > 1e-6
    np.testing.assert_array_equal(changed[0], [False, *[True] * 5])
    np.testing.assert_array_equal(changed[1], [False, True, True, False, False, False])
