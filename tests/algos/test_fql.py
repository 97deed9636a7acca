"""FQL against its equations in numpy: the flow, the policy's loss, the targets."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import critics, fql
from jrl.networks import NetworkConfig
from jrl.types import Batch, Box, Dict, EnvSpec

KEY = jax.random.key(5)
CFG = fql.Config(flow_steps=4, alpha=3.0)
SPEC = EnvSpec(Box((3,)), Box((2,), low=-1.0, high=1.0), 1)
N = 5


@pytest.fixture(scope="module")
def made():
    """The Agent of a network without hidden layers, which is linear, and parameters away from their start."""
    network = NetworkConfig(hidden=(), activation="relu", init="lecun")
    algo = fql.make(CFG, SPEC, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    agent = algo.update.args[1]
    return agent, state


def linear(params, x):
    """[C, N, outputs] of critics without hidden layers."""
    (leaf,) = [x for x in jax.tree.leaves(params) if x.ndim == 3]
    (bias,) = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    return np.einsum("ni,cio->cno", x, np.asarray(leaf)) + np.asarray(bias)[:, None]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_flow_follows_its_velocity_in_euler_steps(made):
    agent, state = made
    obs, x = normal(N, 3), 0.3 * normal(N, 2, seed=1)
    found = fql.follow_flow(CFG, agent, state.params["flow"], obs, x)
    for t in (0.0, 0.25, 0.5, 0.75):
        x = x + linear(state.params["flow"], np.concatenate([obs, x, np.full((N, 1), t)], -1))[0] / 4
    np.testing.assert_allclose(found, np.clip(x, -1, 1), rtol=1e-4, atol=1e-5)


def test_the_loss_of_the_flow_compares_with_straight_lines(made):
    agent, state = made
    obs, action, noise = normal(N, 3), normal(N, 2, seed=1), normal(N, 2, seed=2)
    t, weight = np.linspace(0, 0.9, N, dtype=np.float32)[:, None], np.array([0, 1, 1, 2, 1], np.float32)
    found = fql.flow_loss(agent, state.params["flow"], obs, action, noise, t, weight)
    velocity = linear(state.params["flow"], np.concatenate([obs, noise + t * (action - noise), t], -1))[0]
    error = ((velocity - action + noise) ** 2).mean(-1)
    np.testing.assert_allclose(found, (weight * error).mean(), rtol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_policy_is_near_the_flow_and_where_q_is_high(made, normalize):
    """Q gets the clipped action, the distance the action before it; no gradient through the flow and the scale."""
    agent, state = made
    cfg = dataclasses.replace(CFG, normalize_q=normalize)
    obs, noise, target = normal(N, 3), 2 * normal(N, 2, seed=1), 0.5 * normal(N, 2, seed=2)
    weight = np.array([0, 1, 1, 2, 1], np.float32)
    no = jnp.zeros(N)
    batch = Batch(obs, normal(N, 2), no, no, obs, weight, no, {})
    slope, level = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), np.array([[4.0], [-1.0]], np.float32)
    q = lambda action: jnp.einsum("na,ca->cn", action, slope) + level  # values of two critics

    def loss(params):
        return fql.policy_loss(cfg, agent, params, batch, noise, target, q)

    params = state.params["actor"]
    gradient, metrics = jax.grad(loss, has_aux=True)(params)
    action = linear(params, np.concatenate([obs, noise], -1))[0]
    inside = np.abs(action) < 1
    assert inside.any() and not inside.all()
    value = np.asarray(q(np.clip(action, -1, 1))).mean(0)
    scale = 1 / (weight * np.abs(value)).mean() if normalize else 1.0
    distance = (weight * ((action - target) ** 2).mean(-1)).mean()
    np.testing.assert_allclose(metrics["policy/flow_distance"], distance, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss/policy"], 3 * distance - scale * (weight * value).mean(), rtol=1e-4)
    per_action = weight[:, None] / N * (3 * (action - target) - scale * slope.mean(0) * inside)
    (bias,) = [x for x in jax.tree.leaves(gradient) if x.ndim == 2]
    np.testing.assert_allclose(bias[0], per_action.sum(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "min"])
def test_targets_have_the_policys_next_action(made, reduction):
    agent, state = made
    cfg = dataclasses.replace(CFG, target_q=reduction)
    rows = [normal(N, seed=i) for i in range(2)]
    batch = Batch(normal(N, 3), normal(N, 2), *rows, normal(N, 3, seed=3), np.ones(N, np.float32), rows[0], {})
    action = critics.policy_output(agent, state.params["actor"], batch.next_obs, 0).at(
        jnp.asarray(normal(N, 2, seed=4))
    )
    outputs = agent.net.critic.outputs(state.target_params["critic"], batch.next_obs, action)
    q = linear(state.target_params["critic"], np.concatenate([batch.next_obs, action], -1))[..., 0]
    want = rows[0] + rows[1] * (q.mean(0) if reduction == "mean" else q.min(0))
    np.testing.assert_allclose(fql.target_of(cfg, agent, batch, outputs), want, rtol=1e-4, atol=1e-5)


def test_the_best_action_is_that_of_no_noise_and_only_critics_read_the_state():
    space = Dict((("x", Box((3,))), ("state", Box((2,)))))
    network = NetworkConfig(hidden=(8,), value_inputs=("state",))
    algo = fql.make(CFG, SPEC._replace(observation=space), network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    obs = {"x": normal(N, 3), "state": normal(N, 2, seed=1)}
    other = {**obs, "state": obs["state"] + 1}
    act = lambda obs, key, explore: algo.act(algo.actor(state), obs, algo.carry(N), key, explore).action
    best = act(obs, KEY, False)
    np.testing.assert_array_equal(best, act(obs, jax.random.key(6), False))
    np.testing.assert_array_equal(best, act(other, KEY, False))
    assert (np.abs(best - act(obs, KEY, True)) > 1e-4).any() and (np.abs(act(obs, KEY, True)) <= 1).all()
    assert (np.abs(algo.outputs(state, obs)["value"] - algo.outputs(state, other)["value"]) > 1e-4).any()


def test_the_mean_of_distributions_is_refused():
    assert fql.Config(critic=fql.Critic(kind="quantiles")).validate() == [
        "target_q: expected min, which quantiles has its own form of, got mean: set it to min, or critic.kind to mse "
        "or hl_gauss"
    ]


def test_it_takes_the_better_of_two_modes_of_the_data():
    """Actions near -0.6 pay 0, actions near 0.6 pay 1: the flow has both modes, the policy the better one."""
    spec = EnvSpec(Box((1,)), Box((1,), low=-1.0, high=1.0), 1)
    cfg = fql.Config(lr=3e-3, tau=0.1, alpha=0.2, flow_steps=10)
    algo = fql.make(cfg, spec, NetworkConfig(hidden=(32, 32), activation="relu"))
    state, ones, agent = algo.init(KEY), jnp.ones(128), algo.update.args[1]

    def update(state, key):
        draw, spread, key = jax.random.split(key, 3)
        is_better = jax.random.bernoulli(draw, 0.5, (128,))
        action = jnp.where(is_better, 0.6, -0.6) + 0.05 * jax.random.normal(spread, (128,))
        obs = jax.random.normal(draw, (128, 1))
        batch = Batch(obs, action[:, None], is_better.astype(jnp.float32), 0 * ones, obs, ones, 0 * ones, {})
        return algo.update(state, batch, key)[0], None

    state, _ = jax.jit(lambda state, keys: jax.lax.scan(update, state, keys))(state, jax.random.split(KEY, 800))
    obs = jnp.asarray(normal(256, 1))
    flow = np.asarray(fql.follow_flow(cfg, agent, state.params["flow"], obs, jnp.asarray(normal(256, 1, seed=1))))
    is_in_data = np.abs(np.abs(flow) - 0.6) < 0.25
    assert is_in_data.mean() > 0.8 and 0.3 < (flow > 0).mean() < 0.7
    act = lambda explore: np.asarray(algo.act(algo.actor(state), obs, (), KEY, explore).action)
    assert (act(True) > 0.3).mean() > 0.95 and (act(False) > 0.3).mean() > 0.95
