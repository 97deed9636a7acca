"""Every algorithm with discrete actions under action masks: what is forbidden is never done, and never learned from."""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

from jrl import algos
from jrl.envs import history, jax_env
from jrl.envs.transform import transformed
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.replay import ring
from jrl.rollout import unroll
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, element

ACTIONS = 5
OBSERVATION = Dict((("x", Box((3,))), ("action_mask", MultiBinary((ACTIONS,)))))
DISCRETE = tuple(name for name in algos.names() if fakes.acts_in(name, Discrete))
REMEMBERING = tuple(name for name in DISCRETE if algos.get_config_class(name).has_memory)
NETWORK = NetworkConfig(hidden=(8,))
MEMORY = NetworkConfig(hidden=(8,), core=hyper.Gru(size=8))


def make(name, network):
    module = algos.get(name)
    return module.make(module.Config(), EnvSpec(fakes.observes(name, OBSERVATION), Discrete(ACTIONS), 1), network)


def rare(name, slow, network=NETWORK):
    return pytest.param(name, network, marks=[pytest.mark.slow] if slow else [])


@functools.partial(jax.jit, static_argnums=1)
def masks(key, rows):
    """At random, at least one of each row is allowed."""
    allowed = jax.random.bernoulli(key, 0.4, (rows, ACTIONS))
    return allowed | (jnp.arange(ACTIONS)[None] == jax.random.randint(key, (rows, 1), 0, ACTIONS))


@pytest.mark.parametrize(
    ("name", "network"),
    [*(rare(name, CASES[name].like) for name in DISCRETE), *(rare(name, True, MEMORY) for name in REMEMBERING)],
)
def test_of_100_000_actions_none_is_forbidden(name, network):
    algo = make(name, network)
    state, rows = fakes.made_up_state(algo), 500 if fakes.searches(name) else 20_000  # a search takes its time
    act = jax.jit(algo.act, static_argnames="explore")
    seen = np.zeros(ACTIONS, int)
    for i in range(6):
        key = jax.random.fold_in(jax.random.key(1), i)
        allowed = masks(key, rows)
        x = np.random.default_rng(i).normal(0.0, 3.0, (rows, 3)).astype(np.float32)
        obs = {"x": x, "action_mask": np.asarray(allowed, np.int8)}
        if fakes.plays_for_a_return(name):
            obs["prev_reward"] = jnp.zeros(rows)
        out = act(algo.actor(state), obs, algo.carry(rows), key, explore=i < 5)
        action = np.asarray(out.action)
        assert np.asarray(allowed)[np.arange(rows), action].all()
        seen += np.bincount(action, minlength=ACTIONS)
    assert (seen > 0).all()
    said = jax.jit(algo.outputs)(state, obs)
    if "q" in said and "distribution" not in said:  # without exploration the best of those that are allowed
        q = np.where(allowed, said["q"], -np.inf)
        np.testing.assert_array_equal(action, q.argmax(1))
        if "value" in out.extras:
            np.testing.assert_allclose(out.extras["value"], q.max(1), rtol=1e-5, atol=1e-6)


def world(num_envs):
    """The last action is never allowed, the others at random; episodes of five steps, at whose end nothing is."""

    def reset(draws):
        return draws.T, jnp.zeros(draws.shape[1:], jnp.int32)

    def step(state, action, draws):
        steps = state[1] + 1
        return (draws.T, steps), (action == 1) * 1.0, steps >= 5

    def observe(state):
        draws, steps = state
        allowed = (draws[:, 3:] > 0.5) & (steps < 5)[:, None]
        first = (steps < 5) & ~allowed.any(1)
        allowed = allowed.at[:, 0].set(allowed[:, 0] | first)
        mask = jnp.concatenate([allowed, jnp.zeros((num_envs, 1), bool)], 1)
        return {"x": draws[:, :3], "action_mask": mask.astype(jnp.int8)}

    return jax_env.build(
        jax_env.Definition(OBSERVATION, Discrete(ACTIONS), None, 3 + ACTIONS - 1, reset, step, observe), num_envs
    )


@pytest.mark.slow
# MuZero's model has no masks: it learns that the search never takes a forbidden action
@pytest.mark.parametrize("name", [name for name in DISCRETE if name != "muzero"])
def test_gradients_never_see_a_masked_output(name):
    remember = functools.partial(history.add_history, prev_reward=fakes.plays_for_a_return(name))
    env = transformed(world(8), remember)
    algo = fakes.make(name, env.spec, NETWORK)
    unrolled = unroll.make(env, algo.act, length=16, carry=algo.carry)
    key = jax.random.key(0)
    state = fakes.made_up_state(algo)
    _, rollout, _ = jax.jit(unrolled.step)(jax.jit(unrolled.init)(key), algo.actor(state), key)
    batch = rollout
    if not algo.on_policy:
        extras = fakes.told(np.random.default_rng(0), rollout.reward.shape)
        rollout = rollout.replace(extras={**rollout.extras, **extras})
        buffer = ring.make(
            element(env.spec.observation), element(env.spec.action), capacity=1000, num_envs=8, batch_size=64,
            gamma=0.9, extras={name: jax.ShapeDtypeStruct((), x.dtype) for name, x in extras.items()},
        )  # fmt: skip
        batch = jax.jit(lambda r, k: buffer.sample(buffer.add(buffer.init(), r), k))(rollout, key)
    after, aux = jax.jit(algo.update)(state, batch, key)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, aux.metrics)))
    networks = [s.params.get("actor", s.params) for s in (state, after)]
    before, now = (np.asarray((net.get("policy_head") or net["q_head"])["kernel"]) for net in networks)
    np.testing.assert_array_equal(before[:, -1], now[:, -1])
    assert (before[:, :-1] != now[:, :-1]).any(0).all()
