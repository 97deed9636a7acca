"""A2C: its gradient by hand, its targets, and what it has in common with PPO."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, differ

from jrl.algos import a2c, actor_critic, ppo
from jrl.networks import NetworkConfig
from jrl.types import Box, Discrete

KEY = jax.random.key(4)
T, B = 8, 8
CFG = a2c.Config(lr=3e-3, gamma=0.9, vf_coef=0.7, ent_coef=0.02, max_grad_norm=None)


def setting(cfg, action=None, network=fakes.NETWORK):
    env_spec = fakes.spec(action, num_envs=B)
    algo = a2c.make(cfg, env_spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    rollout = fakes.rollout(algo, env_spec, algo.actor(state), T=T)
    assert 8 < np.asarray(rollout.mask).sum() < T * B - 8
    return env_spec, algo, state, rollout


@pytest.mark.parametrize("normalize", some_quick([False, True], False))
def test_one_step_of_the_policy_gradient(normalize):
    """With lambda 1 a target is the return to the end, the time limit or the rollout's last row, and V from there."""
    cfg = dataclasses.replace(CFG, normalize_advantage=normalize)
    env_spec, algo, state, rollout = setting(cfg)
    net = actor_critic.make(env_spec, fakes.NETWORK)
    rollout = jax.device_get(rollout)
    value = np.asarray(jax.jit(net.value)(state.params, np.concatenate([rollout.obs, rollout.last_obs[None]])))
    done = rollout.terminated | rollout.truncated
    target, after = np.zeros((T, B)), np.asarray(value[-1], np.float64)
    for t in reversed(range(T)):
        after = np.where(done[t], np.where(rollout.terminated[t], 0.0, value[t + 1]), after)
        target[t] = after = rollout.reward[t] + 0.9 * after
    mask = np.asarray(rollout.mask)
    advantage = target - np.asarray(value[:-1], np.float64)
    if normalize:
        advantage = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-8)

    def loss(params):
        dist, value = net.apply(params, rollout.obs)
        log_p = jax.nn.log_softmax(dist.logits)
        taken = jnp.take_along_axis(log_p, rollout.action[..., None], -1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        per_row = -taken * np.float32(advantage) + 0.35 * (value - np.float32(target)) ** 2 - 0.02 * entropy
        return jnp.sum(jnp.where(mask, per_row, 0.0)) / mask.sum()

    params, gradient = jax.device_get((state.params, jax.jit(jax.grad(loss))(state.params)))
    want = jax.tree.map(lambda x, g: x - 3e-3 * g / (np.abs(g) + cfg.adam_eps), params, gradient)
    got, aux = jax.jit(algo.update)(state, rollout, KEY)
    assert_close(got.params, want)
    np.testing.assert_allclose(aux.metrics["value/target"], target[mask].mean(), rtol=1e-4)
    assert [int(x) for x in jax.tree.leaves(got.opt_state) if x.dtype == jnp.int32] == [1]  # steps of Adam
    assert int(got.env_steps) == mask.sum()


OPTIONS = {"normalize_advantage": True, "normalize_obs": True, "gae_lambda": 0.8}


# nothing in the options reads the action
@pytest.mark.slow
@pytest.mark.parametrize(("action", "options"), [(Discrete(3), {}), (Box((2,)), OPTIONS)], ids=["discrete", "box"])
def test_it_is_ppo_with_one_pass_in_one_minibatch(action, options):
    """Where the ratio is 1, the gradient of the clipped surrogate is the policy gradient."""
    cfg = dataclasses.replace(CFG, **options)
    common = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    env_spec, algo, state, rollout = setting(cfg, action)
    relative = ppo.make(ppo.Config(**common, num_epochs=1, num_minibatches=1), env_spec, fakes.NETWORK)
    if cfg.normalize_obs:  # the first rollout is read by its own statistics, which did not act: the ratio is another
        state = jax.jit(algo.update)(state, rollout, KEY)[0]
        rollout = fakes.rollout(algo, env_spec, algo.actor(state), T=T, seed=1)
    got, _ = jax.jit(algo.update)(state, rollout, KEY)
    want, _ = jax.jit(relative.update)(state.replace(own={"kl_coef": jnp.float32(0)}), rollout, KEY)
    assert differ(got.params, state.params)
    for field in [f for f in dataclasses.fields(got) if f.name != "own"]:
        assert_close(getattr(got, field.name), getattr(want, field.name), atol=1e-6)


@pytest.mark.slow
def test_with_a_shared_torso_the_values_of_acting_are_used():
    network = NetworkConfig(hidden=(8, 8), shared=True)
    _, algo, state, rollout = setting(CFG, network=network)
    assert "value" in rollout.extras and "value" not in setting(CFG)[3].extras
    before, _ = jax.jit(algo.update)(state, rollout, KEY)
    other = rollout.replace(extras={**rollout.extras, "value": rollout.extras["value"] + 1.0})
    assert differ(before.params, jax.jit(algo.update)(state, other, KEY)[0].params)
