"""Each algorithm on each probe environment: the answers are known."""

import functools

import fakes
import numpy as np
import probes
import pytest
from cases import CASES, some_quick

from jrl import algos
from jrl.algos.critic_heads import Critic
from jrl.types import Box

# the probe environments are no teams, are learned by acting in them, and ask for values
UNREWARDED = ("in_teams", "from_data", "has_teacher", "has_members", "searches")
NAMES = tuple(name for name in algos.names() if not any(getattr(fakes, kind)(name) for kind in UNREWARDED))
GAMMA = 0.9
ITERATIONS = {"ppo": 100, "dqn": 100, "impala": 100}  # that are enough of those whose tests are not slow
# the case's initial temperature of 0.001 is too low: actions ended at -1.0 and 0.77
CONTINUOUS = {
    "reppo": {
        "ent_coef": 0.1,
        "target_entropy": -1.0,
        "critic": Critic(kind="hl_gauss", atoms=71, value_range=(-2.5, 1.0)),
    }
}

each = pytest.mark.parametrize("name", some_quick(NAMES, "ppo"))


@functools.cache
def learned(name):
    """(value, act) of each probe whose actions are two, of the two learners that make a mistake, too: one program."""
    tasks = {
        "constant": probes.constant_reward(),
        "of obs": probes.obs_dependent_reward(),
        "of action": probes.action_dependent_reward(),
        "of both": probes.obs_and_action_dependent_reward(),
        "delayed": probes.delayed_reward(),
        "endless": probes.endless(),
        "a limit ends": probes.endless(),
        "resets count": probes.constant_reward(),
    }
    which_is = lambda name: list(tasks).index(name)
    gamma = [{"delayed": 0.7, "resets count": 0.2}.get(task, GAMMA) for task in tasks]

    def mistake(rollout, which):
        ended = rollout.truncated & (which == which_is("a limit ends"))
        return rollout.replace(
            terminated=rollout.terminated | ended,
            truncated=rollout.truncated & ~ended,
            mask=rollout.mask | (which == which_is("resets count")),
        )

    found = probes.train_each(
        name, tuple(tasks.values()), iterations=ITERATIONS.get(name, 150), mutate=mistake, gamma=gamma
    )
    return dict(zip(tasks, found, strict=True))


@each
def test_known_answers(name):
    """An algorithm learns the known value or action of each probe; each probe needs one more mechanism."""
    found = learned(name)
    close = lambda task, seen, want, **near: np.testing.assert_allclose(found[task][0](seen), want, **near)
    close("constant", [0.0], [1.0], atol=0.05)
    close("of obs", [-1.0, 1.0], [-1.0, 1.0], atol=0.1)
    np.testing.assert_array_equal(found["of action"][1]([0.0]), [1])
    close("of action", [0.0], [1.0], atol=0.15)
    np.testing.assert_array_equal(found["of both"][1]([-1.0, 1.0]), [0, 1])
    close("of both", [-1.0, 1.0], [1.0, 1.0], atol=0.15)
    close("delayed", [0.0, 1.0], [0.7, 1.0], atol=0.05)
    close("endless", [0.0], [1 / (1 - GAMMA)], rtol=0.05)  # a time limit is no end


@each
def test_the_probes_catch_a_learner_that_makes_a_mistake(name):
    # a learner that treats a time limit as an end finds a value from 4.1, the mean of (1 - gamma^left) / (1 - gamma)
    # over ten steps, to 5.3, which is 1 / (1 - 0.9 gamma); algorithms differ in how much they bootstrap
    assert 4.0 < learned(name)["a limit ends"][0]([0.0])[0] < 6.0
    # with the mask gone, a reset row is a step of reward 0 to the next episode: V = (1 + gamma) / 2
    np.testing.assert_allclose(learned(name)["resets count"][0]([0.0]), [0.6], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(  # what PPO's relatives learn with its Gaussian is compared with equations in their own tests
    "name", [n for n in NAMES if fakes.acts_in(n, Box) and (CASES[n].like != "ppo" or n in CONTINUOUS)]
)
def test_continuous_action(name):
    tasks = (probes.continuous_action(),)
    ((_, act),) = probes.train_each(name, tasks, iterations=160 if name == "sac" else 100, **CONTINUOUS.get(name, {}))
    np.testing.assert_allclose(act([-1.0, 1.0])[:, 0], [-0.5, 0.5], atol=0.12)
