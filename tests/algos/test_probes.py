"""Each algorithm on each probe environment: the answers are known."""

import jax.numpy as jnp
import numpy as np
import probes
import pytest
from probes import train

from jrl import algos

NAMES = algos.names()
GAMMA = 0.9

each = pytest.mark.parametrize("name", NAMES)


@each
def test_constant_reward(name):
    value, _ = train(name, probes.constant_reward(), iterations=40)
    np.testing.assert_allclose(value([0.0]), [1.0], atol=0.05)


@each
def test_obs_dependent_reward(name):
    value, _ = train(name, probes.obs_dependent_reward(), iterations=40)
    np.testing.assert_allclose(value([-1.0, 1.0]), [-1.0, 1.0], atol=0.1)


@each
def test_delayed_reward(name):
    value, _ = train(name, probes.delayed_reward(), gamma=0.7)
    np.testing.assert_allclose(value([0.0, 1.0]), [0.7, 1.0], atol=0.05)


@each
def test_action_dependent_reward(name):
    value, act = train(name, probes.action_dependent_reward(), iterations=40)
    np.testing.assert_array_equal(act([0.0]), [1])
    np.testing.assert_allclose(value([0.0]), [1.0], atol=0.15)


@each
def test_obs_and_action_dependent_reward(name):
    value, act = train(name, probes.obs_and_action_dependent_reward(), iterations=60)
    np.testing.assert_array_equal(act([-1.0, 1.0]), [0, 1])
    np.testing.assert_allclose(value([-1.0, 1.0]), [1.0, 1.0], atol=0.15)


@each
def test_continuous_action(name):
    _, act = train(name, probes.continuous_action(), iterations=80)
    np.testing.assert_allclose(act([-1.0, 1.0])[:, 0], [-0.5, 0.5], atol=0.12)


@each
def test_a_time_limit_is_not_an_end(name):
    value, _ = train(name, probes.endless(), iterations=150)
    np.testing.assert_allclose(value([0.0]), [1 / (1 - GAMMA)], rtol=0.05)


@each
def test_the_endless_probe_catches_a_learner_that_takes_a_time_limit_for_an_end(name):
    def ends(rollout):
        nothing = jnp.zeros_like(rollout.truncated)
        return rollout.replace(terminated=rollout.terminated | rollout.truncated, truncated=nothing)

    value, _ = train(name, probes.endless(), iterations=150, mutate=ends)
    # the mean over ten steps of (1 - gamma^left) / (1 - gamma)
    expected = np.mean([(1 - GAMMA**left) / (1 - GAMMA) for left in range(1, 11)])
    assert expected < 4.2
    np.testing.assert_allclose(value([0.0]), [expected], rtol=0.15)


@each
def test_the_probes_catch_a_learner_that_counts_reset_rows(name):
    """With the mask gone, reward 0 of the reset rows halves the value."""
    value, _ = train(name, probes.constant_reward(), iterations=40, mutate=lambda r: r.replace(mask=jnp.ones_like(r.mask)))
    assert value([0.0])[0] < 0.8
