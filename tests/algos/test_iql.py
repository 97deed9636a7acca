"""IQL against a slow reference that spells everything out, its options by hand, and bandits whose answer is known."""

import dataclasses
import functools
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, assert_same, differ
from sac_reference import forward, one
from scipy import stats

from jrl.algos import iql
from jrl.networks import NetworkConfig
from jrl.types import Batch, Box, Discrete, EnvSpec

KEY = jax.random.key(2)
BOX, CHOICES = Box((2,), low=-1.0, high=1.0), Discrete(3)
# a large adam_eps makes the first step lr * g / (|g| + eps): the gradient itself is seen, not only its sign
BASE = iql.Config(lr=0.1, actor_lr=0.2, value_lr=0.3, adam_eps=1.0, gamma=0.9, tau=0.1, beta=2.0, weight_clip=1.5)
PREDICTED = dataclasses.replace(fakes.NETWORK, state_dependent_std=True, log_std_init=-0.5)
N = 32


@functools.cache
def setting(cfg=BASE, action=BOX, seed=0, network=fakes.NETWORK):
    """(algo, state, batch), the state away from its start and its targets away from the critics."""
    env_spec = fakes.spec(action)
    algo = iql.make(cfg, env_spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    moved = fakes.perturbed(state.replace(params=state.target_params["critic"]), 0.5).params
    state = state.replace(target_params={"critic": moved})
    return algo, state, fakes.batch(algo, env_spec, algo.actor(state), N=N, seed=seed)


@functools.cache
def _jitted(num_critics, action, network):
    """The update with the config's floats as an argument: one compilation for all of their values."""
    env_spec = fakes.spec(action)
    fill = lambda cfg: dataclasses.replace(cfg, num_critics=num_critics)
    return jax.jit(lambda cfg, *args: iql.make(fill(cfg), env_spec, network).update(*args))


def update(cfg, state, batch, action=BOX, network=fakes.NETWORK):
    return _jitted(cfg.num_critics, action, network)(jax.tree.map(jnp.float32, cfg), state, batch, KEY)


# ---------------------------------------------------------------- the reference


def log_prob_of(params, obs, action, network):
    """Of the policy [N], and its entropy [N]."""
    out = forward(params, obs)
    if jnp.issubdtype(action.dtype, jnp.integer):
        prob = jnp.exp(out) / jnp.exp(out).sum(-1, keepdims=True)
        return jnp.log(prob[jnp.arange(len(action)), action]), -(prob * jnp.log(prob)).sum(-1)
    mean, log_std = (out[:, :2], out[:, 2:] - 0.5) if network.state_dependent_std else (out, params["log_std"][None])
    std = jnp.exp(jnp.clip(log_std, -5, 2)) * jnp.ones_like(mean)
    density = jnp.exp(-0.5 * ((action - jnp.tanh(mean)) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    return jnp.log(density).sum(-1), jnp.log(std * math.sqrt(2 * math.pi * math.e)).sum(-1)


@functools.partial(jax.jit, static_argnums=(0, 3))
def reference(cfg, state, batch, network):
    """(params, target_critic, metrics, priority, weights [N]) after one update with Adam's first step."""
    mean = lambda x: jnp.sum(batch.weight * x) / N
    discrete = jnp.issubdtype(batch.action.dtype, jnp.integer)

    def q_of(critic):
        x = batch.obs if discrete else jnp.concatenate([batch.obs, batch.action], -1)
        each = [forward(one(critic, i), x) for i in range(cfg.num_critics)]
        return jnp.stack([y[jnp.arange(N), batch.action] if discrete else y[:, 0] for y in each])

    value_of = lambda params, obs: forward(params, obs)[:, 0]
    # not functions of what is differentiated, so that a gradient through them would be seen
    q, v = q_of(state.target_params["critic"]).min(0), value_of(state.params["value"], batch.obs)
    target = batch.reward + batch.discount * value_of(state.params["value"], batch.next_obs)
    weight = jnp.minimum(jnp.exp(cfg.beta * (q - v)), cfg.weight_clip)

    def value_loss(params):
        u = q - value_of(params, batch.obs)
        return mean(jnp.where(u > 0, cfg.expectile, 1 - cfg.expectile) * u**2)

    def policy_loss(params):
        return -mean(weight * log_prob_of(params, batch.obs, batch.action, network)[0])

    def critic_loss(params):
        return sum(mean(0.5 * (each - target) ** 2) for each in q_of(params))

    parts = {"value": (value_loss, 0.3), "actor": (policy_loss, 0.2), "critic": (critic_loss, 0.1)}
    params = {}
    for name, (loss, lr) in parts.items():
        gradient = jax.grad(loss)(state.params[name])
        params[name] = jax.tree.map(lambda p, g, lr=lr: p - lr * g / (jnp.abs(g) + 1.0), state.params[name], gradient)
    moved = jax.tree.map(lambda t, p: (1 - cfg.tau) * t + cfg.tau * p, state.target_params["critic"], params["critic"])
    now = q_of(state.params["critic"])
    metrics = {
        "loss/value": critic_loss(state.params["critic"]) / cfg.num_critics,
        "loss/expectile": value_loss(state.params["value"]),
        "loss/policy": policy_loss(state.params["actor"]),
        "policy/entropy": mean(log_prob_of(state.params["actor"], batch.obs, batch.action, network)[1]),
        "policy/weight": mean(weight),
        "value/q": mean(now.mean(0)),
        "value/target": mean(target),
        "value/v": mean(v),
        "train/lr": cfg.lr,
    }
    priority = jnp.where(batch.weight > 0, jnp.abs(now - target[None]).mean(0), 0.0)
    return params, moved, metrics, priority, weight


UPDATES = [(BOX, fakes.NETWORK, 2), (BOX, PREDICTED, 1), (CHOICES, fakes.NETWORK, 3)]


@pytest.mark.parametrize(
    ("action", "network", "num_critics"),
    some_quick(UPDATES, UPDATES[0]),
    ids=["box", "predicted deviation", "discrete"],
)
def test_one_update_by_hand(action, network, num_critics):
    cfg = dataclasses.replace(BASE, num_critics=num_critics)
    _, state, batch = setting(cfg, action, network=network)
    assert 4 < int((batch.weight == 0).sum()) < N / 2
    after, aux = update(cfg, state, batch, action, network)
    params, target_critic, metrics, priority, weight = reference(cfg, state, batch, network)
    assert 3 < (np.asarray(weight) == np.float32(cfg.weight_clip)).sum() < N - 3
    assert_close(dict(after.params), params, atol=2e-6, rtol=2e-5)
    assert_close(after.target_params["critic"], target_critic, atol=2e-6, rtol=2e-5)
    assert set(aux.metrics) == set(metrics)
    for name, want in metrics.items():
        np.testing.assert_allclose(aux.metrics[name], want, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(aux.priority, priority, rtol=1e-4, atol=1e-5)
    assert int(after.updates) == 1


def test_without_beta_it_clones_and_a_huge_one_stays_finite():
    _, state, batch = setting()
    assert_close(
        float(update(dataclasses.replace(BASE, beta=0.0), state, batch)[1].metrics["policy/weight"]), 1.0, atol=1e-6
    )
    after, aux = update(dataclasses.replace(BASE, beta=1e30, weight_clip=100.0), state, batch)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.params, aux.metrics)))
    assert float(aux.metrics["policy/weight"]) > 10


@pytest.mark.slow
def test_step_sizes_are_separate_and_default_to_lr():
    _, state, batch = setting()
    moved = lambda **rates: {
        part
        for part, before in state.params.items()
        if differ(update(dataclasses.replace(BASE, **rates), state, batch)[0].params[part], before)
    }
    off = {"lr": 0.0, "actor_lr": 0.0, "value_lr": 0.0}
    for part, name in (("critic", "lr"), ("actor", "actor_lr"), ("value", "value_lr")):
        assert moved(**{**off, name: 0.1}) == {part}
    assert moved(lr=0.1, actor_lr=None, value_lr=None) == {"critic", "actor", "value"}
    assert moved(lr=0.0, actor_lr=None, value_lr=None) == set()


# ---------------------------------------------------------------- the policy


def test_actions_stay_in_the_box():
    """The best is tanh of the network; samples are normal around it, and clipped."""
    algo, state, batch = setting()
    act = jax.jit(algo.act, static_argnames="explore")
    best = act(algo.actor(state), batch.obs, (), KEY, explore=False).action
    np.testing.assert_allclose(best, np.tanh(forward(state.params["actor"], batch.obs)), rtol=1e-5, atol=1e-6)
    wide = {**state.params, "actor": {**state.params["actor"], "log_std": jnp.zeros(2)}}
    actor = algo.actor(state.replace(params=wide))
    taken = np.stack(jax.device_get([act(actor, batch.obs, (), key).action for key in jax.random.split(KEY, 400)]))
    np.testing.assert_array_equal(np.abs(taken).max((0, 1)), 1.0)
    at_the_top = (taken == 1).mean(0)
    np.testing.assert_allclose(at_the_top, stats.norm.sf(1 - np.asarray(best)), atol=0.12)


def test_actions_on_the_bounds_have_a_density():
    """A gradient that is finite and pulls towards them, where a squashed Gaussian has none or one without bound."""
    dist = lambda mean: iql.ClippedGaussian(mean, jnp.full(2, -5.0))
    edge = jnp.array([1.0, -1.0])
    value, slope = jax.jit(jax.value_and_grad(lambda mean: dist(mean).log_prob(edge)))(jnp.array([0.9, -0.9]))
    want = stats.norm.logpdf(1.0, 0.9, math.exp(-5)) * 2
    np.testing.assert_allclose(value, want, rtol=1e-4)
    np.testing.assert_allclose(slope, np.array([0.1, -0.1]) * math.exp(10), rtol=1e-4)
    action, log_prob = jax.device_get(jax.jit(lambda key: dist(edge).sample_and_log_prob(key))(KEY))
    assert np.abs(action).max() <= 1
    assert np.isfinite(log_prob)


# ---------------------------------------------------------------- what it comes to


def learned(cfg, action, batch_of, steps, network):
    """The State after so many updates on batches of (key)."""
    algo = iql.make(cfg, EnvSpec(Box((1,)), action, 1), network)

    @jax.jit
    def run(state):
        step = lambda state, key: (algo.update(state, batch_of(key), key)[0], None)
        return jax.lax.scan(step, state, jax.random.split(KEY, steps))[0]

    return algo, run(fakes.made_up_state(algo))


@pytest.mark.slow
@pytest.mark.parametrize(("expectile", "want"), [(0.5, 0.5), (0.9, 0.9)])
def test_the_value_is_the_expectile_of_the_rewards(expectile, want):
    """Of two actions as frequent, worth 0 and 1, the expectile e is e: e (1 - v) = (1 - e) v."""

    def batch_of(key):
        action = jax.random.bernoulli(key, 0.5, (64,)).astype(jnp.int32)
        obs = jnp.ones((64, 1))
        reward = action.astype(jnp.float32)
        return Batch(obs, action, reward, jnp.zeros(64), obs, jnp.ones(64), jnp.arange(64))

    cfg = iql.Config(lr=3e-3, tau=0.05, expectile=expectile, beta=5.0)
    algo, state = learned(cfg, Discrete(2), batch_of, 1500, NetworkConfig(hidden=(16,)))
    found = jax.jit(algo.outputs)(state, jnp.ones((1, 1)))
    np.testing.assert_allclose(found["q"], [[0.0, 1.0]], atol=0.03)
    np.testing.assert_allclose(found["value"], want, atol=0.05)
    # each action as likely as its weight says: exp(beta) : 1
    prob = jax.nn.softmax(found["distribution"].logits)[0]
    np.testing.assert_allclose(prob[1], 1 / (1 + math.exp(-5)), atol=0.02)


@pytest.mark.slow
def test_it_stays_with_the_actions_of_the_data():
    """Worth is the action itself; the data have actions in [-0.9, 0.1] alone, and no more of it is promised."""

    def batch_of(key):
        action = jax.random.uniform(key, (64, 1), minval=-0.9, maxval=0.1)
        obs = jnp.ones((64, 1))
        return Batch(obs, action, action[:, 0], jnp.zeros(64), obs, jnp.ones(64), jnp.arange(64))

    cfg = iql.Config(lr=3e-3, tau=0.05, beta=10.0)
    box = Box((1,), low=-1.0, high=1.0)
    algo, state = learned(cfg, box, batch_of, 1500, NetworkConfig(hidden=(32, 32)))
    act = jax.jit(algo.act, static_argnames="explore")
    action = float(act(algo.actor(state), jnp.ones((1, 1)), (), KEY, explore=False).action[0, 0])
    # density exp(10 a) on [-0.9, 0.1]: its mean is 0.1 - 1 / 10
    assert -0.08 < action < 0.06
    assert_same(algo.carry(3), ())
