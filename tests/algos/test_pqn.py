"""PQN against a slow reference that spells everything out, and each of its options by hand."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, differ

from jrl import networks
from jrl.algos import pqn
from jrl.networks import NetworkConfig

KEY = jax.random.key(2)
T, B = 8, 8
SPEC = fakes.spec(num_envs=B)
NETWORK = NetworkConfig(hidden=(8, 8), norm="layer")
# one step over all rows; its direction is g / (|g| + 1), smooth where Adam's usual one is a sign
WHOLE = pqn.Config(num_epochs=1, num_minibatches=1, adam_eps=1.0, max_grad_norm=None, lr=0.1)


def update(cfg, state, rollout):
    state, aux = fakes.update(pqn, cfg, SPEC, NETWORK, state, rollout, KEY)
    return state, aux.metrics


def setting(cfg, seed=0):
    """A state away from its start, and a rollout that it made."""
    algo = pqn.make(cfg, SPEC, NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return state, fakes.rollout(algo, SPEC, algo.actor(state), T=T, seed=seed)


@jax.jit
def q_values(params, obs):
    return networks.build(SPEC, NETWORK, {"q": networks.Head(SPEC.action.n)}).apply(params, obs, "q")[0]


# ---------------------------------------------------------------- the reference


def reference_targets(cfg, reward, terminated, truncated, best):
    """Peng's Q(lambda), backwards, one environment after the other; best [T + 1, B] is max_a Q."""
    target = np.zeros(reward.shape)
    for b in range(reward.shape[1]):
        after = best[-1, b]
        for t in reversed(range(reward.shape[0])):
            if terminated[t, b]:
                target[t, b] = reward[t, b]
            elif truncated[t, b]:
                target[t, b] = reward[t, b] + cfg.gamma * best[t + 1, b]
            else:
                mixed = (1 - cfg.q_lambda) * best[t + 1, b] + cfg.q_lambda * after
                target[t, b] = reward[t, b] + cfg.gamma * mixed
            after = target[t, b]
    return target


def reference_update(cfg, state, rollout, reward_scale=1.0):
    """(params, mean loss) after one step over all rows of the rollout that count."""
    rollout = jax.device_get(rollout)
    best = np.asarray(q_values(state.params, np.concatenate([rollout.obs, rollout.last_obs[None]])), np.float64).max(-1)
    reward = np.asarray(rollout.reward, np.float64) * reward_scale
    target = reference_targets(cfg, reward, np.asarray(rollout.terminated), np.asarray(rollout.truncated), best)
    rows = np.argwhere(np.asarray(rollout.mask))
    obs, action = rollout.obs[tuple(rows.T)], rollout.action[tuple(rows.T)]
    target = target[tuple(rows.T)].astype(np.float32)

    def loss(params):
        error = q_values(params, obs)[jnp.arange(len(rows)), action] - target
        small = jnp.abs(error) <= 1.0
        huber = jnp.where(small, 0.5 * error**2, jnp.abs(error) - 0.5)
        return jnp.mean(huber if cfg.loss == "huber" else 0.5 * error**2)

    params, (value, gradient) = jax.device_get((state.params, jax.jit(jax.value_and_grad(loss))(state.params)))
    if cfg.max_grad_norm is not None:
        norm = np.sqrt(sum(float(np.sum(g**2)) for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * min(1.0, cfg.max_grad_norm / norm), gradient)
    step = lambda p, g: p - cfg.lr * g / (np.abs(g) + cfg.adam_eps)
    return jax.tree.map(step, params, gradient), value


CHANGES = [{}, {"gamma": 0.7, "q_lambda": 0.0}, {"q_lambda": 1.0}, {"loss": "huber"}, {"max_grad_norm": 0.1}]


@pytest.mark.parametrize(
    "changes",
    some_quick(CHANGES, *CHANGES[:3]),
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_update_is_that_of_the_reference(changes, seed):
    cfg = dataclasses.replace(WHOLE, **changes)
    state, rollout = setting(cfg, seed)
    assert rollout.terminated.any() and rollout.truncated.any() and not rollout.mask.all()
    after, metrics = update(cfg, state, rollout)
    params, loss = reference_update(cfg, state, rollout)
    assert_close(after.params, params, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss/q"], loss, rtol=1e-5)
    assert differ(state.params, params)


def test_targets_by_hand():
    """One column: three steps, the last at a time limit, its reset row, a true end, its reset row, two more steps."""
    cfg = dataclasses.replace(WHOLE, gamma=0.5, q_lambda=0.5)
    state, rollout = setting(cfg)
    best = [1.0, 2.0, 4.0, 8.0, 16.0, 2.0, 4.0, 6.0]  # max_a Q(obs_t); row 3 is the final observation of the first
    last = float(q_values(state.params, rollout.last_obs).max(-1)[0])
    by_hand = {
        0: 1 + 0.5 * (0.5 * 2 + 0.5 * 3.25),
        1: 1 + 0.5 * (0.5 * 4 + 0.5 * 5.0),  # 3.25
        2: 1 + 0.5 * 8.0,  # time limit: from its final observation
        4: 1.0,  # true end
        6: 1 + 0.5 * (0.5 * 6 + 0.5 * (1 + 0.5 * last)),
        7: 1 + 0.5 * last,  # the rollout's last row: from the observation after it
    }
    column = lambda *rows: jnp.zeros((T, B), bool).at[jnp.asarray(rows), 0].set(True)
    for row, target in by_hand.items():
        one = rollout.replace(
            reward=jnp.ones((T, B)).at[3].set(jnp.nan).at[5].set(jnp.nan),
            terminated=column(4),
            truncated=column(2),
            mask=column(row),  # the metric is then the target of this row alone
            extras={"value": jnp.broadcast_to(jnp.asarray(best)[:, None], (T, B))},
        )
        _, metrics = update(cfg, state, one)
        np.testing.assert_allclose(metrics["value/target"], target, rtol=1e-5, err_msg=f"row {row}")


def test_what_acting_stored_is_what_a_second_pass_gives():
    state, rollout = setting(WHOLE)
    np.testing.assert_allclose(
        rollout.extras["value"], q_values(state.params, rollout.obs).max(-1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_rewards_are_divided_by_the_deviation_of_the_return():
    cfg = dataclasses.replace(WHOLE, normalize_reward=True)
    state, rollout = setting(cfg)
    returns = np.asarray(rollout.extras["running_return"], np.float64)[np.asarray(rollout.mask)]
    params, _ = reference_update(cfg, state, rollout, reward_scale=1 / returns.std())
    after, _ = update(cfg, state, rollout)
    assert_close(after.params, params, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(after.return_stats.mean, returns.mean(), rtol=1e-4, atol=1e-5)
    assert pqn.make(cfg, SPEC).running_return_gamma == cfg.gamma
    assert pqn.make(WHOLE, SPEC).running_return_gamma is None
