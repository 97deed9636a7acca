"""IQL against a slow reference that spells everything out, and its options by hand."""

import dataclasses
import functools
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close
from sac_reference import forward, one
from scipy import stats

from jrl.algos import iql
from jrl.types import Box, Discrete

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


def update(cfg, state, batch, action=BOX, network=fakes.NETWORK):
    return fakes.update(iql, cfg, fakes.spec(action), network, state, batch, KEY)


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
