"""Each algorithm on each probe environment: the answers are known."""

import functools

import fakes
import jax.numpy as jnp
import numpy as np
import probes
import pytest
from cases import CASES
from probes import train

from jrl import algos
from jrl.types import Box

# the probe environments are no teams, and are learned by acting in them
NAMES = tuple(name for name in algos.names() if not (fakes.in_teams(name) or fakes.from_data(name)))
GAMMA = 0.9

QUICK = [name for name in NAMES if CASES[name].like is None] + ["impala"]
each = pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in NAMES])


@functools.cache
def of_one_step(name):
    """(value, act) of each probe whose episodes are one step and whose actions are two."""
    tasks = {
        task.__name__: task()
        for task in (
            probes.constant_reward,
            probes.obs_dependent_reward,
            probes.action_dependent_reward,
            probes.obs_and_action_dependent_reward,
        )
    }
    return dict(zip(tasks, probes.train_each(name, tuple(tasks.values()), iterations=60), strict=True))


@each
def test_constant_reward(name):
    value, _ = of_one_step(name)["constant_reward"]
    np.testing.assert_allclose(value([0.0]), [1.0], atol=0.05)


@each
def test_obs_dependent_reward(name):
    value, _ = of_one_step(name)["obs_dependent_reward"]
    np.testing.assert_allclose(value([-1.0, 1.0]), [-1.0, 1.0], atol=0.1)


@each
def test_action_dependent_reward(name):
    value, act = of_one_step(name)["action_dependent_reward"]
    np.testing.assert_array_equal(act([0.0]), [1])
    np.testing.assert_allclose(value([0.0]), [1.0], atol=0.15)


@each
def test_obs_and_action_dependent_reward(name):
    value, act = of_one_step(name)["obs_and_action_dependent_reward"]
    np.testing.assert_array_equal(act([-1.0, 1.0]), [0, 1])
    np.testing.assert_allclose(value([-1.0, 1.0]), [1.0, 1.0], atol=0.15)


@each
def test_delayed_reward(name):
    value, _ = train(name, probes.delayed_reward(), gamma=0.7)
    np.testing.assert_allclose(value([0.0, 1.0]), [0.7, 1.0], atol=0.05)


@pytest.mark.parametrize("name", [n for n in NAMES if fakes.acts_in(n, Box)])
def test_continuous_action(name):
    _, act = train(name, probes.continuous_action(), iterations=160)
    np.testing.assert_allclose(act([-1.0, 1.0])[:, 0], [-0.5, 0.5], atol=0.12)


@functools.cache
def of_the_endless(name):
    """(value, act) of a learner, and of one that takes a time limit for an end."""

    def ends(rollout, which):
        ended = rollout.truncated & (which == 1)
        return rollout.replace(terminated=rollout.terminated | ended, truncated=rollout.truncated & ~ended)

    return probes.train_each(name, (probes.endless(),) * 2, iterations=150, mutate=ends)


@each
def test_a_time_limit_is_not_an_end(name):
    value, _ = of_the_endless(name)[0]
    np.testing.assert_allclose(value([0.0]), [1 / (1 - GAMMA)], rtol=0.05)


@each
def test_the_endless_probe_catches_a_learner_that_takes_a_time_limit_for_an_end(name):
    value, _ = of_the_endless(name)[1]
    # between the mean of (1 - gamma^left) / (1 - gamma) over ten steps, 4.1, and 1 / (1 - 0.9 gamma), 5.3: it depends
    # on how much an algorithm bootstraps
    assert 4.0 < value([0.0])[0] < 6.0


@each
def test_the_probes_catch_a_learner_that_counts_reset_rows(name):
    """With the mask gone, a reset row is a step of reward 0 to the next episode: V = (1 + gamma) / 2."""
    unmask = lambda rollout: rollout.replace(mask=jnp.ones_like(rollout.mask))
    value, _ = train(name, probes.constant_reward(), iterations=40, mutate=unmask, gamma=0.2)
    np.testing.assert_allclose(value([0.0]), [0.6], atol=0.05)
