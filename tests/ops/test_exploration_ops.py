"""Exploration against the distributions and numbers it claims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jrl.ops import exploration

N = 100_000
KEY = jax.random.key(3)
Q = np.float32([0.1, -0.4, 0.7, 0.2])  # the best is action 2
SAME = np.broadcast_to(Q, (N, 4))

# as runs call them: within a program
epsilon_greedy, soft_q, gaussian = map(jax.jit, (exploration.epsilon_greedy, exploration.soft_q, exploration.gaussian))
ornstein_uhlenbeck, epsilon_ladder = map(jax.jit, (exploration.ornstein_uhlenbeck, exploration.epsilon_ladder))
softmax_kl, masked_argmax = map(jax.jit, (exploration.softmax_kl, exploration.masked_argmax))
uniform_action = jax.jit(exploration.uniform_action, static_argnums=(1, 2))


def chi_square(actions, probabilities):
    probabilities = np.asarray(probabilities, np.float64)
    expected = len(actions) * probabilities / probabilities.sum()
    return stats.chisquare(np.bincount(actions, minlength=len(expected)), expected).pvalue


@pytest.mark.parametrize("epsilon", (0.3, 1.0))
def test_epsilon_greedy_frequencies(epsilon):
    actions = epsilon_greedy(SAME, KEY, epsilon)
    assert (actions.shape, actions.dtype) == ((N,), jnp.int32)
    expected = np.full(4, epsilon / 4) + (1 - epsilon) * (np.arange(4) == 2)
    assert chi_square(actions, expected) > 1e-3
    assert chi_square(actions, np.roll(expected, 1) if epsilon < 1 else [0.24, 0.25, 0.25, 0.26]) < 1e-3


def test_epsilon_zero_is_greedy_and_each_environment_has_its_own_epsilon():
    q = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    best = np.argmax(q, -1)
    np.testing.assert_array_equal(epsilon_greedy(q, KEY, 0.0), best)
    epsilon = np.where(np.arange(N) % 2 == 0, 0.0, 0.8).astype(np.float32)
    same = np.asarray(epsilon_greedy(q, KEY, epsilon)) == best
    assert same[::2].all()
    assert abs(same[1::2].mean() - (0.2 + 0.8 / 4)) < 0.01


def test_epsilon_ladder_by_hand():
    # 0.4 ** (1 + 7 i / 7), i = 0 .. 7
    by_hand = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    np.testing.assert_allclose(epsilon_ladder(0.4, 7.0, exploration.ladder_rung(8)), by_hand, rtol=1e-5)
    np.testing.assert_allclose(epsilon_ladder(0.4, 7.0, exploration.ladder_rung(3)), [0.4, 0.4**4.5, 0.4**8], rtol=1e-5)
    np.testing.assert_allclose(epsilon_ladder(0.4, 7.0, exploration.ladder_rung(1)), [0.4])
    last = exploration.ladder_rung(3, first=5, total=8)  # the last three of eight
    np.testing.assert_allclose(epsilon_ladder(0.4, 7.0, last), by_hand[5:], rtol=1e-5)


@pytest.mark.parametrize("temperature", (0.2, 1.0, 5.0))
def test_soft_q_frequencies(temperature):
    actions = soft_q(SAME, KEY, temperature)
    assert (actions.shape, actions.dtype) == ((N,), jnp.int32)
    assert chi_square(actions, special.softmax(Q / temperature)) > 1e-3
    assert chi_square(actions, special.softmax(Q / (1.3 * temperature))) < 1e-3


def test_soft_q_at_temperature_zero_is_greedy():
    q = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    np.testing.assert_array_equal(soft_q(q, KEY, 0.0), np.argmax(q, -1))


def test_gaussian_moments_and_bounds():
    near, edge = (gaussian(np.full((N, 2), x, np.float32), KEY, 0.2) for x in (-0.1, 0.95))
    assert (near.shape, near.dtype) == ((N, 2), jnp.float32)
    assert stats.kstest(np.ravel(near), stats.norm(-0.1, 0.2).cdf).pvalue > 1e-3
    assert np.asarray(edge).max() == 1.0
    assert abs((np.asarray(edge) == 1.0).mean() - stats.norm.sf(0.05 / 0.2)) < 0.005
    np.testing.assert_array_equal(gaussian(near, KEY, 0.0), near)


def test_ornstein_uhlenbeck_step_by_hand():
    noise = np.float32([[1.0, -2.0]])
    still = ornstein_uhlenbeck(noise, KEY, theta=0.5, sigma=0.0, dt=0.1)
    np.testing.assert_allclose(still, [[0.95, -1.9]], rtol=1e-6)
    step = ornstein_uhlenbeck(np.zeros(N, np.float32), KEY, theta=0.5, sigma=2.0, dt=0.25)
    assert stats.kstest(np.asarray(step), stats.norm(0, 1.0).cdf).pvalue > 1e-3


def test_ornstein_uhlenbeck_variance_and_correlation():
    theta, sigma, dt = 0.3, 0.5, 0.5

    def step(noise, key):
        noise = ornstein_uhlenbeck(noise, key, theta=theta, sigma=sigma, dt=dt)
        return noise, noise

    path = np.asarray(
        jax.jit(functools.partial(jax.lax.scan, step))(np.zeros(2000, np.float32), jax.random.split(KEY, 200))[1]
    )[60:]
    variance = sigma**2 / (theta * (2 - theta * dt))
    np.testing.assert_allclose(path.var(), variance, rtol=0.03)
    np.testing.assert_allclose((path[1:] * path[:-1]).mean() / path.var(), 1 - theta * dt, rtol=0.02)


def test_uniform_actions():
    one = uniform_action(KEY, (N,), 5)
    assert one.dtype == jnp.int32
    assert chi_square(one, np.full(5, 0.2)) > 1e-3
    two = np.asarray(uniform_action(KEY, (N, 2), (3, 2)))
    joint = two[:, 0] * 2 + two[:, 1]
    assert two.dtype == np.int32
    assert chi_square(joint, np.full(6, 1 / 6)) > 1e-3
    box = uniform_action(KEY, (N, 2), None)
    assert box.dtype == jnp.float32
    assert stats.kstest(np.ravel(box), stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_noise_on_parameters():
    zeros, ones = np.zeros(300, np.float32), np.ones((200, 300), np.float32)
    params = {"layer": {"kernel": ones, "bias": zeros}, "LayerNorm_0": {"scale": Q}}
    perturbed = jax.jit(exploration.perturbed)
    noisy = jax.device_get(perturbed(params, KEY, 0.3))
    for name in ("kernel", "bias"):
        noise = np.ravel(noisy["layer"][name] - params["layer"][name])
        assert stats.kstest(noise, stats.norm(0, 0.3).cdf).pvalue > 1e-3
    np.testing.assert_array_equal(noisy["LayerNorm_0"]["scale"], Q)
    np.testing.assert_array_equal(perturbed(params, KEY, 0.0)["layer"]["kernel"], ones)


def test_distances_of_policies_by_hand():
    # softmax([0, log 3]) is (1/4, 3/4): KL = 1/4 log((1/4) / (1/2)) + 3/4 log((3/4) / (1/2)), and the other way round
    q, flat = np.log(np.float32([[1.0, 3.0], [5.0, 5.0]])), np.zeros((2, 2), np.float32)
    np.testing.assert_allclose(softmax_kl(q, flat), [0.25 * np.log(0.5) + 0.75 * np.log(1.5), 0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(softmax_kl(flat, q)[0], 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-5)
    # with epsilon 0.4 and 4 actions the greedy one has the probability 0.7
    kl = jax.jit(exploration.epsilon_kl)(np.float32([0.4, 1.0, 0.0]), 4)
    np.testing.assert_allclose(kl, [-np.log(0.7), np.log(4), 0], rtol=1e-6)


def test_the_deviation_adapts_by_hand():
    adapted = lambda distance: exploration.adapted_std(np.float32(0.5), distance, 0.2, 1.25)
    np.testing.assert_allclose([adapted(0.1), adapted(0.3)], [0.625, 0.4], rtol=1e-6)
    assert exploration.adapted_std(jnp.float32(999), 0.0, 0.2, 2.0) == 1000


# ---------------------------------------------------------------- masks

MASK = np.array(  # the best of Q, action 2, is allowed in the first two rows alone
    [[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 1]], bool
)
MASKS = np.tile(MASK, (N // 5, 1))
BEST = [2, 2, 3, 1, 3]


def by_row(actions):
    """How often each action was taken under each row of MASK."""
    got = np.zeros(MASK.shape, int)
    np.add.at(got, (np.arange(N) % 5, np.asarray(actions)), 1)
    return got


@pytest.mark.parametrize("epsilon", (0.3, 1.0))
def test_epsilon_greedy_is_random_among_what_is_allowed(epsilon):
    actions = epsilon_greedy(SAME, KEY, epsilon, MASKS)
    assert (actions.shape, actions.dtype) == ((N,), jnp.int32)
    for got, allowed, best in zip(by_row(actions), MASK, BEST, strict=True):
        expected = epsilon * allowed / allowed.sum() + (1 - epsilon) * (np.arange(4) == best)
        assert not got[~allowed].any()
        assert allowed.sum() == 1 or stats.chisquare(got[allowed], N / 5 * expected[allowed]).pvalue > 1e-4


def test_soft_q_draws_from_the_softmax_of_what_is_allowed():
    actions = soft_q(SAME, KEY, 0.5, MASKS)
    for got, allowed in zip(by_row(actions), MASK, strict=True):
        expected = np.where(allowed, np.exp(np.float64(Q) / 0.5), 0)
        assert not got[~allowed].any()
        assert (
            allowed.sum() == 1 or stats.chisquare(got[allowed], N / 5 * (expected / expected.sum())[allowed])[1] > 1e-4
        )


def test_the_best_is_one_of_those_allowed_whatever_the_values():
    inner, outer = np.meshgrid([-1e9, -3.4e38, -np.inf, 1e30, np.nan], [1e9, np.inf, np.nan])
    values = jnp.asarray(np.where(MASK, inner.reshape(15, 1, 1), outer.reshape(15, 1, 1)), jnp.float32)
    mask = jnp.broadcast_to(MASK, (15, 5, 4))

    @jax.jit
    def actions():
        best = jnp.argmax(exploration.masked_q(values, mask), -1)
        return masked_argmax(values, mask), best, soft_q(values, KEY, 0.0, mask)

    for action in actions():
        assert np.take_along_axis(np.asarray(mask), np.asarray(action)[..., None], -1).all()


def test_masked_values_by_hand():
    q = np.broadcast_to(Q, MASK.shape)
    np.testing.assert_array_equal(masked_argmax(q, MASK), BEST)
    np.testing.assert_array_equal(masked_argmax(q), np.full(5, 2))
    assert exploration.masked_q(q, None) is q and exploration.masked_logits(q, None) is q
    np.testing.assert_array_equal(exploration.masked_q(q, MASK), np.where(MASK, q, np.finfo(np.float32).min))
    np.testing.assert_array_equal(exploration.masked_logits(q, MASK), np.where(MASK, q, np.float32(-1e9)))
    slope = jax.jit(jax.grad(lambda q: (exploration.masked_q(q, MASK) + exploration.masked_logits(q, MASK)).sum()))(q)
    np.testing.assert_array_equal(slope, 2.0 * MASK)


def test_a_row_that_allows_nothing_allows_all():
    nothing = np.zeros((1000, 4), bool)
    q = SAME[:1000]
    np.testing.assert_array_equal(exploration.allowed(nothing[:2]), ~nothing[:2])
    np.testing.assert_array_equal(exploration.masked_q(q[:2], nothing[:2]), q[:2])

    @jax.jit
    def actions(q, key, mask):
        return (
            epsilon_greedy(q, key, 0.7, mask),
            soft_q(q, key, 0.5, mask),
            exploration.uniform_action(key, (1000,), 4, mask),
            exploration.uniform_action(key, (1000, 2), (1, 3), mask),
        )

    jax.tree.map(np.testing.assert_array_equal, actions(q, KEY, nothing), actions(q, KEY, None))


def test_uniform_actions_under_a_mask():
    one = by_row(uniform_action(KEY, (N,), 4, MASKS))
    # two choices, the second one's mask the first one's upside down
    pair = exploration.uniform_action(
        KEY, (N, 2), (4, 4), np.concatenate([MASKS, np.tile(MASK[::-1], (N // 5, 1))], -1)
    )
    for got, mask in ((one, MASK), (by_row(pair[:, 0]), MASK), (by_row(pair[:, 1]), MASK[::-1])):
        for row, allowed in zip(got, mask, strict=True):
            assert not row[~allowed].any()
            assert allowed.sum() == 1 or stats.chisquare(row[allowed]).pvalue > 1e-4


def test_distances_of_policies_under_a_mask_by_hand():
    # of (1/4, 3/4) and (1/2, 1/2), beside an action that neither may take; and of one action alone
    q, flat = np.log(np.float32([[1.0, 7.0, 3.0], [1.0, 7.0, 3.0]])), np.zeros((2, 3), np.float32)
    mask = np.array([[True, False, True], [False, False, True]])
    kl = lambda q, flat: (softmax_kl(q, flat, mask).sum(), softmax_kl(q, flat, mask))
    slopes, value = jax.jit(jax.grad(kl, (0, 1), has_aux=True))(q, flat)
    np.testing.assert_allclose(value, [0.25 * np.log(0.5) + 0.75 * np.log(1.5), 0], rtol=1e-5, atol=1e-7)
    for slope in slopes:
        assert np.all(np.isfinite(slope)) and not np.asarray(slope)[~np.asarray(mask)].any()
    by_count = jax.jit(exploration.epsilon_kl)(0.4, np.array([4, 2, 1]))
    np.testing.assert_allclose(by_count, [-np.log(0.7), -np.log(0.8), 0], rtol=1e-6, atol=1e-7)
