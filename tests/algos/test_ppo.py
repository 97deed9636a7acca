"""PPO against a slow reference that spells everything out, and each of its options by hand."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, assert_same, differ
from ppo_reference import B, T, reference_update

from jrl.algos import actor_critic, optimizers, ppo
from jrl.envs import classic
from jrl.envs.jax_env import build
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.types import Box, Discrete

KEY = jax.random.key(2)


def update(cfg, env_spec, network, state, rollout, key=KEY):
    state, aux = fakes.update(ppo, cfg, env_spec, network, state, rollout, key)
    return state, aux.metrics


def setting(cfg, action=None, network=fakes.NETWORK, observation=fakes.VECTOR, seed=0):
    """(spec, state, rollout): a policy away from its start, whose rollout was made by slightly different parameters."""
    env_spec = fakes.spec(action, observation, B)
    algo = ppo.make(cfg, env_spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return env_spec, state, fakes.rollout(algo, env_spec, algo.actor(state), T=T, seed=seed)


# ---------------------------------------------------------------- against the reference


SEPARATE, SHARED = fakes.NETWORK, NetworkConfig(hidden=(8, 8), shared=True)
BASE = ppo.Config(num_epochs=2, num_minibatches=4, lr=3e-3)
CASES = {
    "discrete": (BASE, Discrete(3), SEPARATE),
    "discrete, value clipping, KL penalty, shared": (
        dataclasses.replace(BASE, value_clip_eps=0.02, kl_coef=0.5, ent_coef=0.01, vf_coef=0.7),
        Discrete(3),
        SHARED,
    ),
    "advantages normalised over each minibatch": (
        dataclasses.replace(BASE, normalize_advantage="minibatch"),
        Discrete(3),
        SEPARATE,
    ),
    "box, KL penalty, clipped hard, gradients not": (
        dataclasses.replace(
            BASE,
            kl_coef=0.5,
            clip_eps=0.01,
            normalize_advantage=False,
            num_minibatches=2,
            ent_coef=0.02,
            max_grad_norm=None,
        ),
        Box((2,)),
        SEPARATE,
    ),
}


@pytest.mark.parametrize("case", some_quick(CASES, *list(CASES)[:3]))
def test_update_is_the_reference(case):
    cfg, action, network = CASES[case]
    env_spec, state, rollout = setting(cfg, action, network)
    mask = np.asarray(rollout.mask)
    assert 8 < mask.sum() < T * B - 8
    assert min(np.asarray(rollout.terminated).sum(), np.asarray(rollout.truncated).sum()) > 2
    if case.startswith("discrete, value"):
        # old data: ratios away from 1, so that clipping and KL matter from the first step
        moved = jax.tree.map(lambda x: x * np.float32(1.1), jax.device_get(state.params))
        rollout = rollout.replace(extras={**rollout.extras, "value": _values(env_spec, network, moved, rollout.obs)})
        state = state.replace(params=moved)
    want, want_metrics, _ = reference_update(cfg, env_spec, network, state, rollout, KEY)
    got, metrics = update(cfg, env_spec, network, state, rollout)
    moved = max(np.abs(np.asarray(a) - b).max() for a, b in zip(*map(jax.tree.leaves, (state.params, want))))
    assert moved > 5e-3
    assert_close(got.params, want, atol=2e-5)
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert set(metrics) == set(want_metrics) | {"train/lr"}
    assert int(got.env_steps) == mask.sum()


def _values(env_spec, network, params, obs):
    return jax.jit(actor_critic.make(env_spec, network).value)(params, obs)


def test_target_kl_stops_the_gradient_steps():
    cfg = dataclasses.replace(BASE, target_kl=1e-5, kl_coef=0.2, kl_target=0.01)
    env_spec, state, rollout = setting(cfg)
    want, _, steps = reference_update(cfg, env_spec, SEPARATE, state, rollout, KEY)
    assert 0 < steps < 8
    got, metrics = update(cfg, env_spec, SEPARATE, state, rollout)
    assert_close(got.params, want, atol=1e-5)
    assert float(metrics["policy/stopped_early"]) == 1.0
    counts = [int(x) for x in jax.tree.leaves(got.opt_state) if x.dtype == jnp.int32]
    assert counts == [steps]  # Adam's moments stopped as well
    # and the next rollout, which the new policy makes, is learned from again
    algo = ppo.make(cfg, env_spec, SEPARATE)
    following = fakes.rollout(algo, env_spec, algo.actor(got), T=T, seed=1)
    assert differ(got.params, update(cfg, env_spec, SEPARATE, got, following)[0].params)
    free, metrics = update(dataclasses.replace(cfg, target_kl=10.0), env_spec, SEPARATE, state, rollout)
    assert float(metrics["policy/stopped_early"]) == 0.0
    assert differ(free.params, got.params)


@pytest.mark.slow
def test_adaptive_kl_coefficient():
    cfg = dataclasses.replace(BASE, kl_coef=0.2, kl_target=1.0)
    env_spec, state, rollout = setting(cfg)
    state = state.replace(own={"kl_coef": jnp.float32(0.4)})  # as it became meanwhile
    kl = float(update(cfg, env_spec, SEPARATE, state, rollout)[1]["policy/kl"])
    assert kl > 1e-5
    for target, factor in ((kl / 2.1, 1.5), (kl / 1.9, 1.0), (kl * 1.9, 1.0), (kl * 2.1, 0.5)):
        after, metrics = update(dataclasses.replace(cfg, kl_target=target), env_spec, SEPARATE, state, rollout)
        assert float(after.own["kl_coef"]) == pytest.approx(0.4 * factor), target
        assert float(metrics["policy/kl_coef"]) == float(after.own["kl_coef"])


@pytest.mark.slow
def test_a_lag_alone_stops_no_gradient_step():
    """The rollout is of parameters that are far away: KL from there is no news, KL from here is 0 at first."""
    cfg = dataclasses.replace(BASE, target_kl=0.01, num_epochs=2, lr=1e-5, kl_coef=0.2, kl_target=0.01)
    env_spec, state, _ = setting(cfg)
    algo = ppo.make(cfg, env_spec, SEPARATE)
    rollout = fakes.rollout(algo, env_spec, algo.actor(fakes.perturbed(state, 0.5)), T=T)
    _, free = update(dataclasses.replace(cfg, target_kl=None), env_spec, SEPARATE, state, rollout)
    assert free["policy/approx_kl"] > 0.05  # from the acting policy
    got, metrics = update(cfg, env_spec, SEPARATE, state, rollout)
    assert metrics["policy/stopped_early"] == 0
    assert [int(x) for x in jax.tree.leaves(got.opt_state) if x.dtype == jnp.int32] == [8]
    assert metrics["policy/approx_kl"] < 0.01 and metrics["policy/kl"] < 0.01
    assert got.own["kl_coef"] == pytest.approx(0.1)  # nor does the weight of the penalty grow by it
    want, _, steps = reference_update(cfg, env_spec, SEPARATE, state, rollout, KEY)
    assert steps == 8
    assert_close(got.params, want, atol=1e-5)


# ---------------------------------------------------------------- clipping of gradients


GRADIENT = {"a": np.array([[3.0, -4.0], [0.0, 12.0]], np.float32), "b": np.array([0.1, -0.2], np.float32)}


def clipped(max_grad_value, max_leaf_norm, max_grad_norm):
    """The gradient after clipping, in numpy: elements, then arrays, then the whole."""
    g = {k: v.astype(np.float64) for k, v in GRADIENT.items()}
    if max_grad_value:
        g = {k: np.clip(v, -max_grad_value, max_grad_value) for k, v in g.items()}
    if max_leaf_norm:
        g = {k: v * min(1, max_leaf_norm / np.linalg.norm(v)) for k, v in g.items()}
    norm = np.sqrt(sum((v**2).sum() for v in g.values()))
    if max_grad_norm and norm > max_grad_norm:
        g = {k: v * max_grad_norm / norm for k, v in g.items()}
    return g


@pytest.mark.parametrize(
    ("max_grad_value", "max_leaf_norm", "max_grad_norm"),
    [(None, None, None), (2.0, None, None), (None, 6.5, None), (None, None, 6.5), (None, None, 100.0), (2.0, 1.5, 0.5)],
)
def test_the_three_ways_to_clip(max_grad_value, max_leaf_norm, max_grad_norm):
    """Adam's first step is g / (|g| + eps); with a large eps the size of g shows."""
    cfg = ppo.Config(
        max_grad_value=max_grad_value, max_leaf_norm=max_leaf_norm, max_grad_norm=max_grad_norm, adam_eps=10.0
    )
    optimizer = optimizers.make(cfg)
    params = jax.tree.map(np.zeros_like, GRADIENT)
    got, _ = jax.jit(lambda g: optimizer.update(g, optimizer.init(params), params))(GRADIENT)
    for name, g in clipped(max_grad_value, max_leaf_norm, max_grad_norm).items():
        np.testing.assert_allclose(got[name], g / (np.abs(g) + 10.0), rtol=1e-4, err_msg=name)


# ---------------------------------------------------------------- sizes and options


def test_initial_standard_deviation():
    for network in (
        NetworkConfig(hidden=(8,), log_std_init=-1.0),
        NetworkConfig(hidden=(8,), log_std_init=-1.0, state_dependent_std=True),
    ):
        net = actor_critic.make(fakes.spec(Box((2,))), network)
        dist, _ = jax.jit(lambda key, net=net: net.apply(net.init(key), jnp.ones((3, 4))))(KEY)
        np.testing.assert_allclose(jnp.broadcast_to(dist.log_std, (3, 2)), -1.0, atol=0.05)
        np.testing.assert_allclose(dist.mean, 0.0, atol=0.05)


# ---------------------------------------------------------------- normalisation


@pytest.mark.slow
def test_observation_statistics():
    cfg = dataclasses.replace(BASE, normalize_obs=True, gamma=0.9)
    env_spec, state, _ = setting(cfg)
    algo, start = ppo.make(cfg, env_spec, SEPARATE), state
    seen = []
    for seed in range(3):
        rollout = fakes.rollout(algo, env_spec, algo.actor(state), T=T, seed=seed)
        # the statistics that acted are those that learn: without a step, the policy is the one that acted; but for the
        # first rollout, which was acted on raw observations and is weighted by that policy
        _, metrics = update(dataclasses.replace(cfg, lr=0.0), env_spec, SEPARATE, state, rollout)
        assert (abs(float(metrics["policy/approx_kl"])) < 1e-9) == (seed > 0)
        assert seed == 0 or float(metrics["policy/clip_fraction"]) == 0.0
        assert_same(state.return_stats, ())
        state, _ = update(cfg, env_spec, SEPARATE, state, rollout)
        seen.append(np.asarray(rollout.obs)[np.asarray(rollout.mask)])
        rows = np.concatenate(seen).astype(np.float64)
        stats = state.obs_stats
        assert float(stats.count) == len(rows)
        np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(stats.m2 / stats.count, rows.var(0), rtol=1e-4)
    # and they are used: 2 +- 3 becomes 0 +- 1
    shifted = seen[0] * np.float32(2)
    act = jax.jit(lambda actor: algo.act(actor, shifted, (), KEY).extras["log_prob"])
    assert differ(act(algo.actor(state)), act(algo.actor(state).replace(obs_stats=start.obs_stats)))


@pytest.mark.slow
def test_reward_normalisation():
    """CartPole: the running return by a loop, its deviation over all rows that count, rewards divided by it."""
    cfg = dataclasses.replace(BASE, normalize_reward=True, gamma=0.9)
    env = build(classic.cartpole(), B)
    algo = ppo.make(cfg, env.spec, SEPARATE)
    state = fakes.perturbed(fakes.made_up_state(algo))
    collect = unroll.make(env, algo.act, length=T, running_return_gamma=algo.running_return_gamma)
    step, source = jax.jit(collect.step), jax.jit(collect.init)(KEY)
    running, seen = np.zeros(B), []
    for i in range(4):
        source, rollout, _ = step(source, algo.actor(state), jax.random.fold_in(KEY, i))
        rollout = jax.device_get(rollout)
        for t in range(T):
            for b in range(B):
                if rollout.mask[t, b]:
                    running[b] = float(rollout.reward[t, b]) + 0.9 * running[b]
                    seen.append(running[b])
                if rollout.terminated[t, b] | rollout.truncated[t, b]:
                    running[b] = 0.0
        scale = np.std(seen)
        plain = dataclasses.replace(cfg, normalize_reward=False)
        scaled = rollout.replace(reward=rollout.reward / np.float32(scale))
        want, want_metrics = update(plain, env.spec, SEPARATE, state.replace(return_stats=()), scaled)
        state, metrics = update(cfg, env.spec, SEPARATE, state, rollout)
        assert float(state.return_stats.count) == len(seen)
        np.testing.assert_allclose(state.return_stats.m2 / state.return_stats.count, scale**2, rtol=1e-4)
        assert_close(state.params, want.params, atol=2e-5)
        np.testing.assert_allclose(metrics["value/target"], want_metrics["value/target"], rtol=1e-3)
    assert len(seen) < 4 * T * B  # there were masked rows


# ---------------------------------------------------------------- schedules and counters


def test_environment_steps_saturate():
    env_spec, state, rollout = setting(BASE)
    counted = int(np.asarray(rollout.mask).sum())
    for room, want in ((0, 2**32 - 1), (5, 2**32 - 1), (counted, 2**32 - 1), (counted + 3, 2**32 - 4)):
        near = state.replace(env_steps=jnp.uint32(2**32 - 1 - room))
        assert int(update(BASE, env_spec, SEPARATE, near, rollout)[0].env_steps) == want
