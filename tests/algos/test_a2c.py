"""A2C: its gradient and its targets by hand."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close

from jrl.algos import a2c, actor_critic

KEY = jax.random.key(4)
T, B = 8, 8
CFG = a2c.Config(lr=3e-3, gamma=0.9, vf_coef=0.7, ent_coef=0.02, max_grad_norm=None)


def setting(cfg):
    env_spec = fakes.spec(num_envs=B)
    algo = a2c.make(cfg, env_spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    rollout = fakes.rollout(algo, env_spec, algo.actor(state), T=T)
    assert 8 < np.asarray(rollout.mask).sum() < T * B - 8
    return env_spec, algo, state, rollout


@pytest.mark.parametrize("use_critic", some_quick([True, False], False))
def test_one_step_of_the_policy_gradient(use_critic):
    """With lambda 1 a target is the return to the end, the time limit or the rollout's last row, and V from there.

    Without critic V is 0 everywhere.
    """
    env_spec, algo, state, rollout = setting(dataclasses.replace(CFG, use_critic=use_critic))
    net = actor_critic.make(env_spec, fakes.NETWORK)
    rollout = jax.device_get(rollout)
    value = np.asarray(jax.jit(net.value)(state.params, np.concatenate([rollout.obs, rollout.last_obs[None]])))
    value = use_critic * value
    done = rollout.terminated | rollout.truncated
    target, after = np.zeros((T, B)), np.asarray(value[-1], np.float64)
    for t in reversed(range(T)):
        after = np.where(done[t], np.where(rollout.terminated[t], 0.0, value[t + 1]), after)
        target[t] = after = rollout.reward[t] + 0.9 * after
    mask = np.asarray(rollout.mask)
    advantage = target - np.asarray(value[:-1], np.float64)

    def loss(params):
        dist, value = net.apply(params, rollout.obs)
        log_p = jax.nn.log_softmax(dist.logits)
        taken = jnp.take_along_axis(log_p, rollout.action[..., None], -1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        value_loss = use_critic * 0.35 * (value - np.float32(target)) ** 2
        per_row = -taken * np.float32(advantage) + value_loss - 0.02 * entropy
        return jnp.sum(jnp.where(mask, per_row, 0.0)) / mask.sum()

    params, gradient = jax.device_get((state.params, jax.jit(jax.grad(loss))(state.params)))
    want = jax.tree.map(lambda x, g: x - 3e-3 * g / (np.abs(g) + CFG.adam_eps), params, gradient)
    got, aux = jax.jit(algo.update)(state, rollout, KEY)
    assert_close(got.params, want)
    np.testing.assert_allclose(aux.metrics["value/target"], target[mask].mean(), rtol=1e-4)
    assert [int(x) for x in jax.tree.leaves(got.opt_state) if x.dtype == jnp.int32] == [1]  # steps of Adam
    assert int(got.env_steps) == mask.sum()
