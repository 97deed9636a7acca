"""Losses against numbers worked by hand, plain Python, and what a void row must not do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import losses

# as updates call them: within a program
weighted_mean, approx_kl = jax.jit(losses.weighted_mean), jax.jit(losses.approx_kl)
clipped_surrogate = jax.jit(losses.clipped_surrogate, static_argnames="clip_eps")
clipped_value_loss = jax.jit(losses.clipped_value_loss, static_argnames="clip_eps")
huber, explained_variance = jax.jit(losses.huber), jax.jit(losses.explained_variance)


def rows(*numbers):
    return np.array(numbers, np.float32)


def test_weighted_mean_by_hand():
    # (1*1 + 2*0 + 4*3) / (1 + 0 + 3) = 13/4
    assert weighted_mean(rows(1, 2, 4), rows(1, 0, 3)) == 3.25
    assert weighted_mean(rows(1, 2, 4), np.array([True, False, True])) == 2.5
    assert weighted_mean(np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)) == 0.0  # nothing counts: not NaN


def test_weighted_mean_ignores_void_rows():
    weight = rows(1, 0, 3, 0)
    loss = lambda x: weighted_mean(jnp.square(x), weight)
    slope = jax.jit(jax.value_and_grad(loss))
    value, gradient = slope(rows(1, 2, 4, 8))
    moved, moved_gradient = slope(rows(1, -70, 4, 1e6))
    assert value == moved
    np.testing.assert_array_equal(gradient, moved_gradient)
    np.testing.assert_array_equal(gradient, [0.5, 0.0, 6.0, 0.0])  # 2 x w / 4


def test_clipped_surrogate_by_hand():
    # eps 0.2. ratio 1.5, A 2: min(3, 1.2*2) = 2.4;    ratio 1.5, A -2: min(-3, -2.4) = -3
    #          ratio .5, A 2: min(1, 1.6) = 1;          ratio .5, A -2: min(-1, -1.6) = -1.6
    #          ratio 1.1, A 2: 2.2, not clipped
    ratio, advantage = rows(1.5, 1.5, 0.5, 0.5, 1.1), rows(2, -2, 2, -2, 2)
    old = rows(-1, -2, -3, -4, -5)
    loss, clipped = clipped_surrogate(old + np.log(ratio), old, advantage, clip_eps=0.2)
    np.testing.assert_allclose(loss, [-2.4, 3.0, -1.0, 1.6, -2.2], rtol=1e-5)
    np.testing.assert_array_equal(clipped, [1, 1, 1, 1, 0])
    assert loss.dtype == clipped.dtype == jnp.float32


def test_clipped_surrogate_gradient_by_hand():
    # d loss / d log_prob = -A ratio where the minimum is the unclipped term, else 0; nothing into old or A.
    ratio, advantage = rows(1.5, 1.5, 0.5, 0.5, 1.1), rows(2, -2, 2, -2, 2)
    total = lambda new, old, adv: clipped_surrogate(new, old, adv, clip_eps=0.2)[0].sum()
    slopes = jax.jit(jax.grad(total, (0, 1, 2)))
    new, old, adv = slopes(np.log(ratio), np.zeros(5, np.float32), advantage)
    np.testing.assert_allclose(new, [0.0, 3.0, -1.0, 0.0, -2.2], rtol=1e-5)
    np.testing.assert_array_equal(old, np.zeros(5))
    np.testing.assert_array_equal(adv, np.zeros(5))
    # On-policy it is the policy gradient, -A.
    np.testing.assert_allclose(slopes(np.zeros(5, np.float32), np.zeros(5, np.float32), advantage)[0], -advantage)


def test_overflowing_ratio_of_a_void_row_is_harmless():
    weight, advantage = rows(1, 0), rows(1, -1)

    def loss(log_prob):
        row, clipped = clipped_surrogate(log_prob, np.zeros(2, np.float32), advantage, clip_eps=0.2)
        kl = approx_kl(log_prob, np.zeros(2, np.float32))
        return sum(weighted_mean(x, weight) for x in (row, clipped, kl))

    value, gradient = jax.jit(jax.value_and_grad(loss))(rows(0, 1e4))
    assert np.isfinite(value) and np.all(np.isfinite(gradient)) and gradient[1] == 0


def test_clipped_value_loss_by_hand():
    # eps 1. value 5, old 2, target 3: kept 3; max(2^2, 0)/2 = 2
    #        value 5, old 2, target 6: kept 3; max(1, 9)/2 = 4.5;   value 2.5, old 2, target 3: kept 2.5; .25/2 = .125
    value, old, target = rows(5, 5, 2.5), rows(2, 2, 2), rows(3, 6, 3)
    np.testing.assert_allclose(clipped_value_loss(value, old, target, clip_eps=1.0), [2.0, 4.5, 0.125])
    np.testing.assert_allclose(clipped_value_loss(value, old, target, clip_eps=None), [2.0, 0.5, 0.125])
    total = lambda v, o, t: clipped_value_loss(v, o, t, clip_eps=1.0).sum()
    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(value, old, target)
    np.testing.assert_allclose(gradients[0], [2.0, 0.0, -0.5])  # v - t; 0 where the clipped one is larger
    assert not np.any(gradients[1]) and not np.any(gradients[2])


def test_approx_kl():
    # ratio e^.5: e^.5 - 1 - .5;  ratio 1: 0;  ratio e^-2: e^-2 - 1 + 2
    expected = [math.exp(0.5) - 1.5, 0.0, math.exp(-2) + 1]
    np.testing.assert_allclose(approx_kl(rows(-1, -3, -4), rows(-1.5, -3, -2)), expected, rtol=1e-5)
    # Small steps keep their digits: x^2 / 2 + x^3 / 6.
    step = np.array([1e-3, -3e-4, 7e-4])
    np.testing.assert_allclose(approx_kl(rows(*step), rows(0, 0, 0)), step**2 / 2 + step**3 / 6, rtol=1e-3)


def test_approx_kl_is_unbiased():
    old, new = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
    kl = np.sum(np.exp(old) * (old - new))  # KL(old || new)
    estimate = np.sum(np.exp(old) * np.asarray(approx_kl(np.float32(new), np.float32(old))))
    np.testing.assert_allclose(estimate, kl, rtol=1e-5)


def test_huber_by_hand():
    # delta 2: .5^2/2 = .125;  2^2/2 = 2;  2*(5 - 1) = 8;  symmetric. delta 1: 1*(5 - .5) = 4.5
    np.testing.assert_allclose(huber(rows(0, 0.5, 2, 5, -5), 2.0), [0.0, 0.125, 2.0, 8.0, 8.0])
    assert huber(rows(5))[0] == 4.5
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: huber(x, 2.0))))(rows(0, 0.5, -1.5, 5, -5))
    np.testing.assert_allclose(gradient, [0.0, 0.5, -1.5, 2.0, -2.0])  # clip(x, -2, 2)


def test_explained_variance_by_hand():
    # target 1 3 5: variance 8/3. residuals of value 1 2 6: 0 1 -1, mean 0, variance 2/3: 1 - 1/4
    target, value, every = rows(1, 3, 5), rows(1, 2, 6), np.ones(3, np.float32)
    np.testing.assert_allclose(explained_variance(target, value, every), 0.75, rtol=1e-6)
    np.testing.assert_allclose(explained_variance(target, target + 7, every), 1.0)  # an offset is not variance
    np.testing.assert_allclose(explained_variance(target, jnp.zeros(3), every), 0.0, atol=1e-6)
    assert explained_variance(jnp.full(7, 0.1), jnp.arange(7.0), jnp.ones(7)) == 0.0  # constant target
    assert explained_variance(target, value, jnp.zeros(3)) == 0.0


def test_explained_variance_leaves_void_rows_out():
    target, value, weight = rows(1, 3, 5, -400), rows(1, 2, 6, 900), np.array([True, True, True, False])
    np.testing.assert_allclose(explained_variance(target, value, weight), 0.75, rtol=1e-6)


WRONG = {
    "weighted_mean": lambda x, y: losses.weighted_mean(x, y),
    "surrogate": lambda x, y: losses.clipped_surrogate(x, x, y, clip_eps=0.2),
    "surrogate old": lambda x, y: losses.clipped_surrogate(x, y, x, clip_eps=0.2),
    "value": lambda x, y: losses.clipped_value_loss(x, x, y),
    "approx_kl": lambda x, y: losses.approx_kl(x, y),
    "explained_variance": lambda x, y: losses.explained_variance(x, x, y),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shape_raises(name):
    with pytest.raises(ValueError, match=r"\(4,\).*\(1,\)|\(1,\).*\(4,\)"):
        jax.eval_shape(WRONG[name], jnp.ones(4), jnp.ones(1))  # would broadcast
