"""APPO: the paper's ratio, its target network, and how often a rollout counts."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close, assert_same
from test_impala import reference_vtrace

from jrl.algos import actor_critic, appo
from jrl.fields.data import Fresh
from jrl.learn import learner

KEY = jax.random.key(5)
T, B = 8, 8
COMMON = {"lr": 3e-3, "gamma": 0.95, "num_epochs": 2, "num_minibatches": 2, "vf_coef": 0.7, "ent_coef": 0.02}


def setting(cfg, action=None, moved=0.0):
    """(algo, state, rollout): the rollout was made by parameters that are `moved` away from those that learn."""
    env_spec = fakes.spec(action, num_envs=B)
    algo = appo.make(cfg, env_spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    state = state.replace(target_params=jax.tree.map(jnp.copy, state.params))
    rollout = fakes.rollout(algo, env_spec, algo.actor(fakes.perturbed(state, moved)), T=T)
    assert 8 < np.asarray(rollout.mask).sum() < T * B - 8
    return algo, state, rollout


def test_the_ratio_and_the_advantages_of_the_paper():
    """min(acting / target, bound) * pi / acting, with V-trace of target over acting: each policy another."""
    cfg = appo.Config(
        **{**COMMON, "num_epochs": 1, "num_minibatches": 1},
        vtrace_lambda=0.9,
        clip_rho=1.2,
        clip_c=0.9,
        clip_pg_rho=1.5,
        clip_target_ratio=1.3,
        normalize_advantage=False,
        max_grad_norm=None,
        adam_eps=1.0,
    )
    algo, state, rollout = setting(cfg, moved=0.2)
    leaves, treedef = jax.tree.flatten(state.params)
    rng = np.random.default_rng(1)
    target = jax.tree.unflatten(treedef, [x + 0.2 * rng.normal(size=x.shape).astype(np.float32) for x in leaves])
    net = actor_critic.make(fakes.spec(num_envs=B), fakes.NETWORK, lambda obs: None)
    rollout = jax.device_get(rollout)

    @jax.jit
    def of_target(params):
        dist, value = net.apply(params, rollout.obs)
        last = net.value(params, rollout.last_obs)[None]
        return jnp.concatenate([value, last]), dist.log_prob(rollout.action)

    values, log_prob = jax.device_get(of_target(target))
    values = np.float64(values)
    acting, reference = np.exp(rollout.extras["log_prob"]), np.exp(log_prob)
    mask, terminated = np.asarray(rollout.mask), np.asarray(rollout.terminated)
    done = terminated | np.asarray(rollout.truncated)
    advantage, goal = reference_vtrace(
        cfg, np.asarray(rollout.reward), terminated, done, values, np.float64(reference / acting)
    )
    assert (acting / reference)[mask].max() > 1.3 and (reference / acting)[mask].max() > 1.5  # every clip matters

    @jax.jit
    @jax.grad
    def gradient(params):
        dist, value = net.apply(params, rollout.obs)
        ratio = jnp.minimum(acting / reference, 1.3) * jnp.exp(dist.log_prob(rollout.action)) / acting
        a = np.float32(advantage)
        policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        per_row = policy + 0.35 * (value - np.float32(goal)) ** 2 - 0.02 * dist.entropy()
        return jnp.sum(jnp.where(mask, per_row, 0.0)) / mask.sum()

    params, slope = jax.device_get((state.params, gradient(state.params)))
    want = jax.tree.map(lambda x, g: x - 3e-3 * g / (np.abs(g) + 1.0), params, slope)
    got, aux = jax.jit(algo.update)(state.replace(target_params=target), rollout, KEY)
    assert max(np.abs(x - y).max() for x, y in zip(jax.tree.leaves(want), leaves)) > 1e-4
    assert_close(got.params, want, atol=1e-6)
    np.testing.assert_allclose(aux.metrics["policy/rho"], np.minimum((reference / acting)[mask], 1.2).mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "tau"), [(1, 1.0), (3, 1.0), (2, 0.25)])
def test_the_target_moves_every_so_many_updates(every, tau):
    algo, state, rollout = setting(appo.Config(**COMMON, target_update_every=every, tau=tau))
    update, target = jax.jit(algo.update), state.target_params
    for i in range(1, 5):
        state, _ = update(state, rollout, jax.random.fold_in(KEY, i))
        if i % every == 0:
            target = jax.tree.map(lambda t, p: np.float32((1 - tau) * t + tau * p), target, state.params)
        if tau == 1:
            assert_same(state.target_params, jax.tree.map(jnp.asarray, target))
        assert_close(state.target_params, target, atol=1e-7)
        assert int(state.updates) == i


@pytest.mark.slow
def test_a_rollout_is_counted_once_however_often_it_is_learned_from():
    options = {"circular_buffer_num_batches": 3, "circular_buffer_iterations_per_batch": 4}
    cfg = appo.Config(**COMMON, **options, normalize_obs=True, normalize_reward=True)
    algo, state, rollout = setting(cfg)
    assert algo.data == Fresh(kept=3, updates=4)
    made = learner.on_policy(algo, jax.eval_shape(lambda: rollout))
    after, _, _ = jax.jit(made.step)(state, made.init_replay(), rollout, KEY)
    counted = int(np.asarray(rollout.mask).sum())
    assert (int(after.env_steps), int(after.updates)) == (counted, 4)
    assert float(after.obs_stats.count) == float(after.return_stats.count) == counted
    kept, rows = np.asarray(rollout.mask), np.asarray(rollout.obs, np.float64)
    np.testing.assert_allclose(after.obs_stats.mean, rows[kept].mean(0), rtol=1e-4, atol=1e-5)
    assert_close(after.obs_stats, algo.ingest(state, rollout).obs_stats)
