"""Schedules by hand, traced and vmapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import schedules

# 1 at 0, falls to 0.5 at 100, rises to 2 at 400. Between: 1 - .5*50/100 = .75; .5 + 1.5*100/300 = 1.
PAIRS = ((0, 1.0), (100, 0.5), (400, 2.0))
BY_HAND = ((0, 1.0), (50, 0.75), (100, 0.5), (200, 1.0), (400, 2.0), (10**9, 2.0))


@pytest.mark.parametrize(("step", "expected"), BY_HAND)
def test_piecewise_linear_by_hand(step, expected):
    for schedule in (PAIRS, list(map(list, PAIRS))):
        got = schedules.value(schedule, step)
        assert got.shape == () and got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda s: schedules.value(PAIRS, s))(step), expected, rtol=1e-6)


@pytest.mark.parametrize("number", (3, 0.25, np.float64(0.25), jnp.float32(0.25), jnp.int32(3)))
def test_a_number_is_itself(number):
    got = schedules.value(number, 17)
    assert got.shape == () and got.dtype == jnp.float32 and got == float(number)


def test_jump_and_single_pair():
    jump = ((0, 1.0), (10, 1.0), (10, 5.0), (20, 5.0))
    assert [float(schedules.value(jump, step)) for step in (9, 10, 11)] == [1.0, 5.0, 5.0]
    assert [float(schedules.value(((5, 2.0),), step)) for step in (0, 5, 9)] == [2.0, 2.0, 2.0]


def test_vmapped_hyperparameters():
    """Values and steps are traced; each member of the batch has its own schedule."""
    last = jnp.array([0.0, 1.0, 4.0])
    end = jnp.array([100, 200, 400])
    run = jax.jit(jax.vmap(lambda v, s: schedules.value(((0, 2.0), (s, v)), 100)))
    np.testing.assert_allclose(run(last, end), [0.0, 1.5, 2.5])  # 2 + (v - 2) * 100 / s
    np.testing.assert_allclose(jax.vmap(lambda v: schedules.value(v, 100))(last), last)


@pytest.mark.parametrize("schedule", ((0, 1e-3), (), ((0, 1, 2),), jnp.ones(3)))
def test_neither_number_nor_pairs_raises(schedule):
    with pytest.raises(ValueError, match="schedule must be a scalar or a sequence of"):
        schedules.value(schedule, 0)
