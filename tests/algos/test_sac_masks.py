"""Discrete SAC under action masks: its expectations are over the actions that are allowed."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
from sac_reference import forward, one

from jrl.algos import sac
from jrl.types import Box, Dict, Discrete, EnvSpec

KEY = jax.random.key(2)
N, A = 32, 4
MASKED = EnvSpec(Dict((("action_mask", Box((A,), "int8", 0, 1)), ("obs", Box((3,))))), Discrete(A), 8)
BASE = {"lr": 0.1, "adam_eps": 1.0, "gamma": 0.9}


def masked_setting(**options):
    """(algo, state, batch, masks of obs and next_obs); nothing is allowed on a few rows, the last action on none."""
    algo = sac.make(sac.Config(**BASE, **options), MASKED, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
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
