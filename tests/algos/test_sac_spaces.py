"""SAC and TD3 on dictionaries, with action masks and with running statistics."""

import dataclasses
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close, assert_same
from sac_reference import forward, one

from jrl.algos import sac, td3
from jrl.types import Box, Dict, Discrete, EnvSpec

KEY = jax.random.key(2)
N, A = 32, 4
BOX = Box((2,), low=-1.0, high=1.0)
MASKED = EnvSpec(Dict((("action_mask", Box((A,), "int8", 0, 1)), ("obs", Box((3,))))), Discrete(A), 8)
BASE = {"lr": 0.1, "adam_eps": 1.0, "gamma": 0.9}


def masked_setting(**options):
    """(algo, state, batch, masks of obs and next_obs); nothing is allowed on a few rows, the last action on none."""
    algo = sac.make(sac.Config(**BASE, **options), MASKED, fakes.NETWORK)
    state = fakes.perturbed(jax.jit(algo.init)(jax.random.key(0)))
    plain = fakes.spec(Discrete(A), Box((3,)))
    other = sac.make(sac.Config(**BASE), plain, fakes.NETWORK)
    batch = fakes.batch(other, plain, other.actor(state), N=N)
    rng = np.random.default_rng(0)
    masks = rng.random((2, N, A)) < 0.6
    masks[:, :, 1], masks[:, :, A - 1] = True, False
    masks[:, :3] = False
    with_mask = lambda x, mask: {"obs": x, "action_mask": jnp.asarray(mask, jnp.int8)}
    batch = batch.replace(
        obs=with_mask(batch.obs, masks[0]),
        next_obs=with_mask(batch.next_obs, masks[1]),
        action=jnp.asarray(np.where(masks[0][np.arange(N), batch.action], batch.action, 1)),
        weight=batch.weight.at[:3].set(0.0),  # nothing is allowed on void rows alone
    )
    return algo, state, batch, masks


def test_expectations_over_allowed_actions_by_hand():
    algo, state, batch, masks = masked_setting()
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    weight = np.asarray(batch.weight, np.float64)
    mean = lambda x: np.sum(np.where(weight > 0, weight * x, 0)) / N

    def policy(obs, mask):
        """Of the allowed actions [(index, probability)] a row."""
        outputs = np.asarray(forward(state.params["actor"], obs["obs"]), np.float64)
        rows = []
        for row, ok in zip(outputs, mask, strict=True):
            index = np.flatnonzero(ok) if ok.any() else np.arange(A)
            p = np.exp(row[index])
            rows.append((index, p / p.sum()))
        return rows

    q = lambda critic, obs: np.stack([forward(one(critic, i), obs["obs"]) for i in range(2)]).min(0)
    temperature = float(jnp.exp(state.params["log_ent_coef"]))
    soft = [
        np.sum(p * (values[index] - temperature * np.log(p)))
        for (index, p), values in zip(
            policy(batch.next_obs, masks[1]), q(state.target_params["critic"], batch.next_obs)
        )
    ]
    target = np.asarray(batch.reward) + np.asarray(batch.discount) * np.array(soft)
    np.testing.assert_allclose(aux.metrics["value/target"], mean(target), rtol=1e-4)
    now = policy(batch.obs, masks[0])
    entropy = np.array([-np.sum(p * np.log(p)) for _, p in now])
    np.testing.assert_allclose(aux.metrics["policy/entropy"], mean(entropy), rtol=1e-4)
    values = q(after.params["critic"], batch.obs)
    loss = [np.sum(p * (temperature * np.log(p) - row[index])) for (index, p), row in zip(now, values)]
    np.testing.assert_allclose(aux.metrics["loss/policy"], mean(np.array(loss)), rtol=1e-4, atol=1e-5)
    # d/d log_ent_coef of -exp(log_ent_coef) (log pi + 0.98 log(allowed actions)), by Adam with eps 1
    goal = 0.98 * np.log([len(index) for index, _ in now])
    gradient = -temperature * mean(goal - entropy)
    want = float(state.params["log_ent_coef"]) - 0.1 * gradient / (abs(gradient) + 1.0)
    np.testing.assert_allclose(after.params["log_ent_coef"], want, rtol=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, aux)))


@pytest.mark.slow
def test_no_gradient_reaches_the_outputs_of_actions_that_are_not_allowed():
    algo, state, batch, masks = masked_setting()
    assert not masks[0][:, A - 1].any()
    after, _ = jax.jit(algo.update)(state, batch, KEY)
    old, new = (x.params["actor"]["policy_head"] for x in (state, after))
    assert_same(old["kernel"][:, A - 1], new["kernel"][:, A - 1])
    assert_same(old["bias"][A - 1], new["bias"][A - 1])
    assert (np.asarray(old["bias"] != new["bias"])[: A - 1]).all()


@pytest.mark.slow
def test_only_allowed_actions_are_taken():
    algo, state, batch, masks = masked_setting()
    act = jax.jit(jax.vmap(lambda key: algo.act(algo.actor(state), batch.obs, (), key).action))
    for taken in (*np.asarray(act(jax.random.split(KEY, 300))), _best(algo, state, batch)):
        assert masks[0][np.arange(N), taken][3:].all()
    assert "q" in algo.outputs(state, batch.obs)


def _best(algo, state, batch):
    return np.asarray(algo.act(algo.actor(state), batch.obs, (), KEY, explore=False).action)


@pytest.mark.parametrize("name", [pytest.param("sac", marks=pytest.mark.slow), "td3"])
@pytest.mark.slow
def test_a_dictionary_of_vectors_is_their_concatenation(name):
    """In the order of the names; the parameters are the same."""
    module = {"sac": sac, "td3": td3}[name]
    plain = EnvSpec(Box((5,)), BOX, 8)
    nested = EnvSpec(Dict((("velocity", Box((3,))), ("position", Box((2,))))), BOX, 8)
    cfg = module.Config(**BASE)
    algo, other = (module.make(cfg, spec, fakes.NETWORK) for spec in (plain, nested))
    state = fakes.perturbed(jax.jit(algo.init)(KEY))
    assert jax.tree.structure(state) == jax.tree.structure(other.init(KEY))
    batch = fakes.batch(algo, plain, algo.actor(state), N=N)
    split = lambda x: {"position": x[:, :2], "velocity": x[:, 2:]}
    parts = batch.replace(obs=split(batch.obs), next_obs=split(batch.next_obs))
    assert_close(jax.jit(other.update)(state, parts, KEY), jax.jit(algo.update)(state, batch, KEY), atol=1e-5)


@pytest.mark.parametrize("name", ["sac", pytest.param("td3", marks=pytest.mark.slow)])
def test_running_statistics(name):
    """What acts and learns sees (obs - mean) / deviation of all rows that came; rewards by the return's deviation."""
    module = {"sac": sac, "td3": td3}[name]
    spec = EnvSpec(fakes.VECTOR, BOX, 8)
    cfg = module.Config(**BASE, normalize_obs=True, normalize_reward=True)
    algo, plain = module.make(cfg, spec, fakes.NETWORK), module.make(module.Config(**BASE), spec, fakes.NETWORK)
    assert algo.running_return_gamma == 0.9
    state, rows, returns = fakes.perturbed(jax.jit(algo.init)(KEY)), [], []
    for seed in range(2):
        rollout = fakes.rollout(algo, spec, algo.actor(state), seed=seed)
        state = jax.jit(algo.ingest)(state, rollout)
        mask = np.asarray(rollout.mask)
        rows.append(np.asarray(rollout.obs, np.float64)[mask])
        returns.append(np.asarray(rollout.extras["running_return"], np.float64)[mask])
    rows, returns = np.concatenate(rows), np.concatenate(returns)
    batch = fakes.batch(algo, spec, algo.actor(state), N=N)
    see = lambda x: jnp.asarray((np.asarray(x, np.float64) - rows.mean(0)) / rows.std(0), jnp.float32)
    without = dataclasses.replace(state, obs_stats=(), return_stats=())
    want = plain.act(plain.actor(without), see(batch.obs), (), KEY).action
    np.testing.assert_allclose(algo.act(algo.actor(state), batch.obs, (), KEY).action, want, rtol=1e-3, atol=1e-4)
    seen = batch.replace(
        obs=see(batch.obs), next_obs=see(batch.next_obs), reward=batch.reward / np.float32(returns.std())
    )
    got, aux = jax.jit(algo.update)(state, batch, KEY)
    want, want_aux = jax.jit(plain.update)(without, seen, KEY)
    assert_close(got.params, want.params, atol=1e-4, rtol=1e-3)
    assert_close(aux.metrics, want_aux.metrics, atol=1e-4, rtol=1e-3)
    assert math.isfinite(float(aux.metrics["value/q"]))
