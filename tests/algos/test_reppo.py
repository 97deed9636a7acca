"""REPPO's targets against a plain loop, its policy's loss in numpy, and the way of its multipliers."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from scipy import special

from jrl.algos import reppo
from jrl.algos.critic_heads import Critic
from jrl.distributions import Categorical
from jrl.networks import NetworkConfig
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(3)
CFG = reppo.Config(
    num_epochs=2, num_minibatches=2, critic=Critic(kind="hl_gauss", atoms=9, value_range=(-4.0, 4.0)), ent_coef=0.3
)
NETWORK = NetworkConfig(hidden=(8,))
BOX = Box((2,), low=-1.0, high=1.0)


@functools.cache
def setting(action):
    """(agent, state, rollout, update) of CFG, with compiled parts that tests share."""
    return make(action, CFG)


def make(action, cfg):
    spec = EnvSpec(fakes.VECTOR, action, 8)
    algo = reppo.make(cfg, spec, NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo), 0.1)
    agent = algo.update.args[1]
    return agent, state, fakes.rollout(algo, spec, algo.actor(state)), jax.jit(algo.update)


@pytest.mark.parametrize("action", some_quick([BOX, Discrete(3)], BOX), ids=str)
def test_targets_are_soft_lambda_returns(action):
    """A time limit has the value of its last observation, with the entropy there; an end has none."""
    agent, state, rollout, _ = setting(action)
    rows, metrics = reppo.targets(CFG, agent, state, rollout, KEY)
    noise = reppo.draw(agent, jax.random.split(KEY)[0], 9, 8)
    q, log_prob = reppo.soft_values(agent, state, rollout.obs, rollout, noise)
    q, bonus = np.asarray(q, np.float64), -np.exp(state.params["log_ent_coef"]) * np.asarray(log_prob, np.float64)
    want, mask = np.zeros((8, 8)), np.asarray(rollout.mask)
    for b in range(8):
        after = None
        for t in reversed(range(8)):
            ahead = q[t + 1, b] + bonus[t + 1, b]
            if after is not None and not rollout.truncated[t, b]:
                ahead += 0.95 * (after - q[t + 1, b])
            if rollout.terminated[t, b]:
                ahead = 0.0
            after = want[t, b] = float(rollout.reward[t, b]) + 0.99 * ahead
    assert rollout.truncated.any() and rollout.terminated.any()
    target = np.asarray(rows.target).reshape(8, 8)
    np.testing.assert_allclose(target[mask], want[mask], rtol=1e-4, atol=1e-5)
    assert (target[~mask] == 0).all()
    np.testing.assert_allclose(metrics["value/outside_range"], (np.abs(want[mask]) > 4).mean(), rtol=1e-5)


def test_the_policy_follows_the_critic_within_the_bound_and_returns_from_outside():
    """Discrete actions, with the expectations by numpy; half of the rows are far from the policy before the update."""
    agent, state, rollout, _ = setting(Discrete(3))
    rows, _ = reppo.targets(CFG, agent, state, rollout, KEY)
    params = state.params
    dist, q = agent.net.policy.apply(params["actor"], rows.obs), agent.net.critic.apply(params["critic"], rows.obs)[0]
    logits, q = np.asarray(dist.logits, np.float64), np.asarray(q, np.float64)
    far = np.arange(64) % 2 == 0
    old = logits + 3.0 * far[:, None] * np.eye(3)[0]
    rows = dataclasses.replace(rows, dist=Categorical(jnp.asarray(old, jnp.float32)))
    p, before = special.softmax(logits, -1), special.softmax(old, -1)
    kl = (before * np.log(before / p)).sum(-1)
    assert (kl[far] > CFG.kl_bound).all() and (kl[~far] < 1e-6).all()
    neg_entropy = (p * np.log(p)).sum(-1)
    weight = np.asarray(rows.weight, np.float64)
    each = np.where(far, 0.7 * kl, 0.3 * neg_entropy - (p * q).sum(-1))
    loss, metrics = reppo.policy_loss(CFG, agent, params["actor"], rows, params["critic"], 0.3, 0.7)
    np.testing.assert_allclose(loss, (weight * each).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/kl"], (weight * kl).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/kl_exceeded"], (weight * far).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/target_entropy"], 0.5 * np.log(3), rtol=1e-5)


@pytest.mark.parametrize(("kl_bound", "target_entropy"), some_quick([(1e-3, -9.0), (9.0, 9.0)], (9.0, 9.0)))
def test_the_multipliers_grow_where_their_constraint_is_broken(kl_bound, target_entropy):
    """Adam's first step is the step size. The KL of means that differ by 1 is between the two bounds."""
    cfg = dataclasses.replace(CFG, kl_bound=kl_bound, target_entropy=target_entropy, lr=1e-2, max_grad_norm=None)
    agent, state, rollout, _ = make(BOX, cfg)
    rows, _ = reppo.targets(cfg, agent, state, rollout, KEY)
    shifted = dataclasses.replace(rows.dist, mean=rows.dist.mean + 1.0)
    rows = dataclasses.replace(rows, noise=rows.noise[:, 0], dist=shifted)
    after, _ = jax.jit(lambda state, rows: reppo.step(cfg, agent, state, rows, 64))(state, rows)
    moved = {name: float(after.params[name] - state.params[name]) for name in ("log_kl_coef", "log_ent_coef")}
    grows = kl_bound == 1e-3, target_entropy == 9.0
    np.testing.assert_allclose(moved["log_kl_coef"], 1e-2 if grows[0] else -1e-2, rtol=1e-3)
    np.testing.assert_allclose(moved["log_ent_coef"], 1e-2 if grows[1] else -1e-2, rtol=1e-3)


def test_each_epoch_draws_its_own_noise_and_every_part_learns():
    agent, state, rollout, update = setting(BOX)
    rows, _ = reppo.targets(CFG, agent, state, rollout, KEY)
    assert rows.noise.shape == (64, 2, 2)
    assert fakes.differ(rows.noise[:, 0], rows.noise[:, 1])
    after, aux = update(state, rollout, KEY)
    for name in state.params:
        assert fakes.differ(after.params[name], state.params[name]), name
    assert int(after.updates) == int(state.updates) + 1
    assert aux.metrics["policy/kl"] > 0  # KL from the policy before the update, in the last pass


def test_a_critic_of_one_output_learns_by_squared_errors():
    cfg = dataclasses.replace(CFG, critic=Critic())
    agent, state, rollout, _ = make(BOX, cfg)
    rows, metrics = reppo.targets(cfg, agent, state, rollout, KEY)
    value = agent.net.critic.apply(state.params["critic"], rows.obs, rows.action)[0]
    loss, _ = reppo.critic_loss(agent, state.params["critic"], rows)
    np.testing.assert_allclose(loss, jnp.mean(rows.weight * 0.5 * (value - rows.target) ** 2), rtol=1e-5)
    assert "value/outside_range" not in metrics
