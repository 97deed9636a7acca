"""Off-policy estimators against decision processes whose values a linear solve gives, and against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tabular import GAMMA, as_jax, chain, played, values

from jrl.ops import estimators

METHODS = ("is", "wis", "pdis", "wpdis", "dm", "dr", "wdr")


def model(process, state, action, reward, mask, weight):
    """Q [S, A] and V [S] of pi in the process that weighted episodes [E] show: fitted Q evaluation to its end."""
    num_states, num_actions = process.reward.shape
    weight = jnp.where(mask, weight[:, None], 0.0)
    last = jnp.concatenate([~mask[:, 1:], jnp.ones_like(mask[:, :1])], 1)
    counts = lambda *shape: jnp.zeros(shape, jnp.float32)
    visits = counts(num_states, num_actions).at[state[:, :-1], action].add(weight) + 1e-6
    rewards = counts(num_states, num_actions).at[state[:, :-1], action].add(weight * reward) / visits
    follow = counts(num_states, num_actions, num_states)
    follow = follow.at[state[:, :-1], action, state[:, 1:]].add(jnp.where(last, 0.0, weight)) / visits[..., None]
    step = jnp.einsum("sa,sat->st", process.pi, follow)
    v = jnp.linalg.solve(jnp.eye(num_states) - GAMMA * step, (process.pi * rewards).sum(1))
    return rewards + GAMMA * follow @ v, v


def along(q, v, state, action, mask):
    """Q of the actions taken [E, T], and V [E, T + 1], 0 behind the end."""
    q, v = jnp.asarray(q, jnp.float32), jnp.asarray(v, jnp.float32)
    there = jnp.concatenate([jnp.ones_like(mask[:, :1]), mask[:, 1:], jnp.zeros_like(mask[:, :1])], 1)
    return q[state[:, :-1], action], jnp.where(there, v[state], 0.0)


@jax.jit
def of_all(reward, mask, ratio, q, v, weight):
    """[len(METHODS)] f32."""
    plain = (reward, mask, ratio, GAMMA, weight)
    robust = (reward, mask, ratio, q, v, GAMMA, weight)
    return jnp.stack([
        estimators.importance_sampling(*plain),
        estimators.weighted_importance_sampling(*plain),
        estimators.per_decision(*plain),
        estimators.weighted_per_decision(*plain),
        estimators.direct(v[:, 0], weight),
        estimators.doubly_robust(*robust),
        estimators.weighted_doubly_robust(*robust),
    ])  # fmt: skip


# ---------------------------------------------------------------- what a linear solve says


@pytest.mark.slow
def test_estimates_of_ten_thousand_episodes_are_within_three_standard_errors():
    process, steps = chain(), 50
    truth = float(process.begin @ values(process, process.pi)[1])
    own = as_jax(process)
    state, action, reward, mask, ratio = played(own, jax.random.key(1), 10_000, steps)

    @jax.jit
    def judged(state, action, reward, mask, ratio, key):  # none of them a constant, which XLA would fold for minutes
        q, v = along(*model(own, state, action, reward, mask, jnp.ones(10_000)), state, action, mask)
        found = estimators.bootstrap(functools.partial(of_all, reward, mask, ratio, q, v), 10_000, key, replicates=60)

        def fitted(weight):  # what is fitted to other episodes is another Q
            v = model(own, state, action, reward, mask, weight)[1]
            return estimators.direct(v[state[:, 0]], weight)[None]

        return found, estimators.bootstrap(fitted, 10_000, key, replicates=30)

    found, fitted = judged(state, action, reward, mask, ratio, jax.random.key(2))
    value, error = np.array(found.value), np.array(found.error)
    error[METHODS.index("dm")] = fitted.error[0]
    rows = [f"{name:6}{x:9.4f} +- {e:.4f}" for name, x, e in zip(METHODS, value, error, strict=True)]
    print(f"V = {truth:.4f}", *rows, sep="\n")
    assert (np.abs(value - truth) <= 3 * error).all()
    assert error[METHODS.index("dr")] <= error[METHODS.index("is")]
    assert abs(value[METHODS.index("dr")] - truth) <= abs(value[METHODS.index("is")] - truth)
    behaviour = float(process.begin @ values(process, process.mu)[1])
    assert abs(behaviour - truth) > 3 * error[METHODS.index("dr")]  # the mean return is another number
    mean = float(estimators.returns(reward, mask, GAMMA))
    assert abs(mean - behaviour) < 0.05


@pytest.fixture(scope="module")
def repeated():
    """300 times 200 episodes of the chain: the truth, estimates, errors, low and high ends [300, len(METHODS)]."""
    process = chain()
    q, v = values(process, process.pi)
    truth = float(process.begin @ v)
    bumps = np.random.default_rng(3).normal(scale=0.2, size=q.shape)  # a Q that is not right
    wrong = q + bumps
    wrong_v = (process.pi * wrong).sum(1)
    own = as_jax(process)

    def one(key):
        play, draw = jax.random.split(key)
        state, action, reward, mask, ratio = played(own, play, 200, 40)
        q_taken, along_v = along(wrong, wrong_v, state, action, mask)
        of_first = jnp.asarray(v, jnp.float32)[state[:, 0]]

        def estimate(weight):  # the direct method knows nothing but Q: of a wrong one it is as wrong
            found = of_all(reward, mask, ratio, q_taken, along_v, weight)
            return found.at[METHODS.index("dm")].set(estimators.direct(of_first, weight))

        return estimators.bootstrap(estimate, 200, draw, replicates=60)

    found = jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(4), 300))
    return truth, jax.tree.map(np.asarray, found)


@pytest.mark.slow
def test_intervals_of_95_percent_cover_as_often(repeated):
    truth, found = repeated
    covered = ((found.low <= truth) & (truth <= found.high)).mean(0)
    print(dict(zip(METHODS, covered.tolist(), strict=True)))
    assert ((covered >= 0.92) & (covered <= 0.98)).all()


@pytest.mark.slow
def test_standard_errors_are_those_of_the_repetitions(repeated):
    truth, found = repeated
    np.testing.assert_allclose(found.error.mean(0), found.value.std(0), rtol=0.15)
    assert (np.abs(found.value.mean(0) - truth) < 4 * found.value.std(0) / np.sqrt(300) + 0.01).all()


@pytest.mark.slow
def test_what_is_doubly_robust_errs_less_than_importance_sampling(repeated):
    truth, found = repeated
    error = dict(zip(METHODS, np.sqrt(np.square(found.value - truth).mean(0)), strict=True))
    assert error["dr"] < error["pdis"] < error["is"] and error["wdr"] < error["wpdis"] < error["is"]


# ---------------------------------------------------------------- by hand


effective_sample_size = jax.jit(estimators.effective_sample_size)


def arrays(seed=0, E=7, T=6):
    rng = np.random.default_rng(seed)
    mask = np.arange(T)[None] < rng.integers(1, T + 1, E)[:, None]
    number = lambda *shape: rng.normal(size=shape).astype(np.float32)
    terminated = rng.random(E) < 0.5
    value = number(E, T + 1)
    value[terminated, mask.sum(1)[terminated]] = 0.0
    return number(E, T), mask, 0.5 * number(E, T), number(E, T), value


def test_each_is_what_a_loop_over_episodes_makes():
    reward, mask, ratio, q, v = arrays()
    rho = np.exp(ratio)
    w = np.cumprod(np.where(mask, rho, 1.0), 1)
    powers = GAMMA ** np.arange(6)
    discounted = np.where(mask, reward, 0.0) * powers
    total = discounted.sum(1)
    recursive = []
    for e in range(7):
        length = mask[e].sum()
        found = v[e, length]
        for t in reversed(range(length)):
            found = v[e, t] + rho[e, t] * (reward[e, t] + GAMMA * found - q[e, t])
        recursive.append(found)
    error = np.where(mask, reward + GAMMA * v[:, 1:] - q, 0.0) * powers
    weighted = lambda x: sum((w[:, t] * x[:, t]).sum() / w[:, t].sum() for t in range(6))
    expected = [
        (w[:, -1] * total).mean(),
        (w[:, -1] * total).sum() / w[:, -1].sum(),
        (w * discounted).sum(1).mean(),
        weighted(discounted),
        v[:, 0].mean(),
        np.mean(recursive),
        v[:, 0].mean() + weighted(error),
    ]
    np.testing.assert_allclose(of_all(reward, mask, ratio, q, v, None), expected, rtol=2e-5)
    counts = np.array([2, 0, 1, 3, 0, 1, 0])
    taken = [np.repeat(x, counts, 0) for x in (reward, mask, ratio, q, v)]
    np.testing.assert_allclose(
        of_all(reward, mask, ratio, q, v, counts.astype(np.float32)), of_all(*taken, None), rtol=2e-5
    )


def test_one_policy_s_own_episodes_give_their_mean_return():
    reward, mask, ratio = arrays()[:3]
    mean = estimators.returns(reward, mask, GAMMA)
    for estimate in (estimators.importance_sampling, estimators.per_decision, estimators.weighted_per_decision):
        np.testing.assert_allclose(estimate(reward, mask, 0 * ratio, GAMMA), mean, rtol=1e-6)
    assert estimators.importance_sampling(reward, mask, 0 * ratio, GAMMA) == mean
    assert effective_sample_size(mask, 0 * ratio) == 7
    assert estimators.mean_ratio(mask, 0 * ratio) == 1


def test_what_stands_behind_the_end_changes_nothing():
    reward, mask, ratio, q, v = arrays()
    behind = np.concatenate([np.zeros((7, 1), bool), ~mask], 1)
    behind[np.arange(7), mask.sum(1)] = False  # the final observation
    for junk in (5.0, np.nan, -np.inf):
        fill = lambda x, where, junk=junk: np.where(where, np.float32(junk), x)
        filled = (fill(reward, ~mask), mask, fill(ratio, ~mask), fill(q, ~mask), fill(v, behind))
        np.testing.assert_array_equal(of_all(*filled, None), of_all(reward, mask, ratio, q, v, None))


def test_weights_of_long_episodes_stay_finite():
    """Products of a thousand ratios are no float32; the weighted estimators need only the ratios of products."""
    mask = np.ones((3, 1000), bool)
    reward = np.ones((3, 1000), np.float32) * np.array([[1.0], [2.0], [3.0]], np.float32)
    ratio = np.full((3, 1000), 0.5, np.float32)
    ratio[1, 0] += np.log(3.0)
    ratio[2] = -0.5
    q, v = np.zeros((3, 1000), np.float32), np.zeros((3, 1001), np.float32)
    found = dict(zip(METHODS, np.asarray(of_all(reward, mask, ratio, q, v, None)), strict=True))
    assert all(map(np.isfinite, found.values()))
    np.testing.assert_allclose(found["wis"], (1 + 3 * 2) / 4 * (1 - GAMMA**1000) / (1 - GAMMA), rtol=1e-4)
    np.testing.assert_allclose(effective_sample_size(mask, ratio), 16 / 10, rtol=1e-4)
    never = np.full((3, 1000), -np.inf, np.float32)
    assert (of_all(reward, mask, never, q, v, None) == 0).all()
    assert effective_sample_size(mask, never) == 0


def test_arrays_that_do_not_fit_are_named():
    reward, mask, ratio, q, v = arrays()
    with pytest.raises(ValueError, match=r"value must be \(7, 7\), got \(7, 6\)"):
        estimators.doubly_robust(reward, mask, ratio, q, v[:, 1:], GAMMA)
    with pytest.raises(ValueError, match=r"reward must be \[E, T\]"):
        estimators.per_decision(reward[0], mask, ratio, GAMMA)
