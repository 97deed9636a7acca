"""IMPALA against a slow reference, on rollouts of older policies."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close, differ

from jrl.algos import actor_critic, impala
from jrl.errors import InputError
from jrl.ops import minibatch
from jrl.types import Box

KEY = jax.random.key(3)
T, B = 8, 8
COMMON = {"lr": 3e-3, "gamma": 0.95, "vf_coef": 0.7, "ent_coef": 0.02, "max_grad_norm": None}


def setting(cfg, action=None, moved=0.0):
    """(algo, state, rollout): the rollout was made by parameters that are `moved` away from those that learn."""
    env_spec = fakes.spec(action, num_envs=B)
    algo = impala.make(cfg, env_spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    rollout = fakes.rollout(algo, env_spec, algo.actor(fakes.perturbed(state, moved)), T=T)
    assert 8 < np.asarray(rollout.mask).sum() < T * B - 8
    return algo, state, rollout


def reference_vtrace(cfg, reward, terminated, done, value, ratio):
    """(advantage, target) by the sums of the paper's eq. 1, one environment and one row after the other."""
    advantage, target = np.zeros(reward.shape), np.zeros(reward.shape)
    for b in range(reward.shape[1]):
        for t in range(reward.shape[0]):
            total, trace = 0.0, 1.0
            for k in range(t, reward.shape[0]):
                bootstrap = 0.0 if terminated[k, b] else value[k + 1, b]
                error = reward[k, b] + cfg.gamma * bootstrap - value[k, b]
                total += trace * min(cfg.clip_rho, ratio[k, b]) * error
                if done[k, b]:
                    break
                trace *= cfg.gamma * cfg.vtrace_lambda * min(cfg.clip_c, ratio[k, b])
            target[t, b] = value[t, b] + total
        for t in range(reward.shape[0]):
            after = 0.0 if terminated[t, b] else value[t + 1, b]
            if not done[t, b] and t + 1 < reward.shape[0]:
                after += cfg.vtrace_lambda * (target[t + 1, b] - value[t + 1, b])
            error = reward[t, b] + cfg.gamma * after - value[t, b]
            advantage[t, b] = min(cfg.clip_pg_rho, ratio[t, b]) * error
    return advantage, target


def test_update_of_an_older_policys_rollout_is_the_reference():
    action = Box((2,))
    cfg = impala.Config(
        **COMMON, vtrace_lambda=0.9, clip_rho=1.2, clip_c=0.9, clip_pg_rho=1.5, num_epochs=1, num_minibatches=2
    )
    algo, state, rollout = setting(cfg, action, moved=0.2)
    net = actor_critic.make(fakes.spec(action, num_envs=B), fakes.NETWORK, lambda obs: None)
    mask, terminated = np.asarray(rollout.mask), np.asarray(rollout.terminated)
    done = terminated | np.asarray(rollout.truncated)
    share = mask.mean()

    @jax.jit
    def evaluate(params):
        dist, value = net.apply(params, rollout.obs)
        values = jnp.concatenate([value, net.value(params, rollout.last_obs)[None]])
        return values, jnp.exp(dist.log_prob(rollout.action) - rollout.extras["log_prob"])

    @jax.jit
    @jax.grad
    def gradient(params, advantage, target, counts):
        dist, value = net.apply(params, rollout.obs)
        per_row = -dist.log_prob(rollout.action) * advantage + cfg.vf_coef * 0.5 * (value - target) ** 2
        # masked rows are absent, the others weigh the same in every minibatch
        return jnp.sum(jnp.where(counts, per_row - cfg.ent_coef * dist.entropy(), 0.0)) / (T * B / 2 * share)

    params, treedef = jax.tree.flatten(state.params)
    params = [np.asarray(x, np.float64) for x in params]
    first, second = ([np.zeros_like(x) for x in params] for _ in range(2))
    steps, ratios = 0, []
    for key in jax.random.split(KEY, 1):
        for index in np.asarray(minibatch.shuffle(key, 1, B, 2)):
            steps += 1
            tree = jax.tree.unflatten(treedef, [jnp.float32(x) for x in params])
            values, ratio = (np.asarray(x, np.float64) for x in evaluate(tree))
            ratios.append(ratio[mask])
            advantage, target = reference_vtrace(
                cfg, np.asarray(rollout.reward, np.float64), terminated, done, values, ratio
            )
            counts = mask & np.isin(np.arange(B), index)[None]
            grads = gradient(tree, np.float32(advantage), np.float32(target), counts)
            grads = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
            first = [0.9 * m + 0.1 * g for m, g in zip(first, grads)]
            second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, grads)]
            params = [
                x - cfg.lr * (m / (1 - 0.9**steps)) / (np.sqrt(v / (1 - 0.999**steps)) + cfg.adam_eps)
                for x, m, v in zip(params, first, second)
            ]
    assert steps == 2
    assert (np.concatenate(ratios) > 1.5).any() and (np.concatenate(ratios) < 0.9).any()  # every clip matters
    got, aux = jax.jit(algo.update)(state, rollout, KEY)
    assert differ(got.params, state.params)
    assert_close(got.params, jax.tree.unflatten(treedef, params), atol=2e-5)
    want_rho = np.mean([np.minimum(ratio, cfg.clip_rho).mean() for ratio in ratios])
    assert float(aux.metrics["policy/rho"]) == pytest.approx(want_rho, rel=0.02)
    assert int(got.env_steps) == mask.sum()


# ---------------------------------------------------------------- sizes


def test_minibatches_are_shares_of_the_environments():
    cfg = impala.Config(**COMMON, num_minibatches=3)
    algo, state, rollout = setting(cfg)
    with pytest.raises(InputError, match=r"3 does not divide the 8 environments.*use 2, or 9 environments"):
        algo.update(state, rollout, KEY)
    cfg = dataclasses.replace(cfg, num_minibatches=16)
    with pytest.raises(InputError, match=r"use 8, or 16 environments"):
        impala.make(cfg, fakes.spec(num_envs=B), fakes.NETWORK).update(state, rollout, KEY)
