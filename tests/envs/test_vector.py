"""Environments in this process: equal to Gymnasium's own vector; and what happens when one of them fails."""

from typing import ClassVar

import faulty_envs
import gymnasium
import numpy as np
import pytest
from env_helpers import Spaces, Stepper, random_actions, run
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from jrl import envs, errors
from jrl.errors import EnvironmentFailed
from jrl.types import Discrete

RESTART = envs.OnFailure(restart=True)

CRASHING = "faulty_envs:Crashing"


def actions(steps, num_envs, seed=0):
    return random_actions(Discrete(2), steps, num_envs, seed)


class Recorded(faulty_envs.Crashing):
    """Remembers the seeds of all."""

    seeds: ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Recorded.seeds.append(seed)
        return super().reset(seed=seed, options=options)


class Fragile(gymnasium.Env):
    """Episodes of two steps; the reset after the first fails, once in a process."""

    observation_space, action_space = gymnasium.spaces.Box(0, 9, (1,)), gymnasium.spaces.Discrete(2)
    failures: ClassVar[int] = 0

    def __init__(self):
        self._resets = self._steps = 0

    def reset(self, *, seed=None, options=None):
        self._resets, self._steps = self._resets + 1, 0
        if self._resets == 2 and Fragile.failures == 0:
            Fragile.failures += 1
            raise OSError("no reset")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        return np.full(1, self._steps, np.float32), 1.0, self._steps == 2, False, {}


class Wrong(Spaces):
    """Observations are of another shape than their space."""

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_equal_to_gymnasiums_own_vector(id):
    """Row by row, with the same seeds and actions: observations, rewards, ends, and the rows that reset."""
    num_envs, seed = 5, envs.seed_range(7)
    theirs = SyncVectorEnv([lambda: gymnasium.make(id)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
    ours = envs.make(id, backend="gymnasium", num_envs=num_envs, seed=7, normalize_actions=False, clip_actions=False)
    np.testing.assert_array_equal(ours.reset(), theirs.reset(seed=seed)[0])
    ends = 0
    for action in random_actions(ours.spec.action, 250, num_envs):
        raw = action.astype(theirs.single_action_space.dtype)
        obs, reward, terminated, truncated, _ = theirs.step(raw)
        result = ours.step(action)
        np.testing.assert_array_equal(result.obs, obs)
        np.testing.assert_array_equal(result.reward, reward.astype(np.float32))
        np.testing.assert_array_equal(result.terminated, terminated)
        np.testing.assert_array_equal(result.truncated, truncated)
        assert result.failed is None
        ends += (terminated | truncated).sum()
    assert ends > 4
    np.testing.assert_array_equal(ours.reset(), theirs.reset()[0])  # continues their random numbers
    ours.close()
    theirs.close()


# ---------------------------------------------------------------- failures


def test_without_restart_the_exception_ends_the_run():
    env = envs.make(CRASHING, num_envs=3, options={"p_step": 0.05})
    env.reset()
    with pytest.raises(
        EnvironmentFailed, match=r"^\S*faulty_envs.py:\d+: ZeroDivisionError: crashed in step\n"
    ) as caught:
        for action in actions(500, 3):
            env.step(action)
    text = str(caught.value)
    assert "of 3, faulty_envs:Crashing, failed; env_runners.restart_failed_sub_environments=true" in text
    assert "in _roll: raise ZeroDivisionError" in text and "vector.py" not in text  # frames of the user's alone
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and "vector.py" in errors.details(caught.value)
    env.close()


def test_a_failed_row_begins_an_episode():
    """Reward 0, no end, a start; then CartPole goes on from there. The others do not notice."""
    steps, num_envs = 400, 4
    plan = actions(steps, num_envs)
    env = envs.make(CRASHING, num_envs=num_envs, options={"p_step": 0.03}, on_failure=RESTART)
    stepper = Stepper(env)
    obs, rows = [stepper.reset()], []
    for action in plan:
        rows.append(stepper.step(action))
        obs.append(rows[-1].obs)
    failed, done = np.stack([r.failed for r in rows]), np.stack([r.terminated | r.truncated for r in rows])
    assert failed.dtype == bool and 20 < failed.sum() == env.num_restarts < 100
    env.close()
    reward = np.stack([r.reward for r in rows])
    assert (reward[failed] == 0).all() and not done[failed].any()
    obs = np.stack(obs)
    assert (np.abs(obs[1:][failed]) <= 0.05).all()
    reset = np.concatenate([np.zeros((1, num_envs), bool), done[:-1]])
    assert not (failed & reset).any()
    # positions move with the velocities, x' = x + 0.02 v, except where an episode begins
    moved = np.isclose(obs[1:, :, 0], obs[:-1, :, 0] + 0.02 * obs[:-1, :, 1], atol=1e-6)
    np.testing.assert_array_equal(moved, ~(failed | reset))
    calm = run(CRASHING, "gymnasium", plan)
    for i, first in enumerate(np.argmax(failed, 0)):
        np.testing.assert_array_equal(obs[1 : first + 1, i], calm.obs[:first, i])


def test_a_reset_that_fails_after_an_end_loses_nothing():
    """That row was to begin an episode anyway: it is no failed one, but it counts as a restart."""
    Fragile.failures = 0
    env = envs.make("test_vector:Fragile", num_envs=1, on_failure=RESTART)
    env.reset()
    rows = [env.step(np.zeros(1, np.int32)) for _ in range(6)]
    env.close()
    assert [r.obs[0, 0] for r in rows] == [1, 2, 0, 1, 2, 0]
    assert [bool(r.terminated[0]) for r in rows] == [False, True, False] * 2
    assert not any(r.failed[0] for r in rows) and env.num_restarts == 1


def test_the_first_reset_may_fail():
    env = envs.make(CRASHING, num_envs=16, options={"p_reset": 0.4}, on_failure=RESTART)
    assert (np.abs(env.reset()) <= 0.05).all()
    assert 2 <= env.num_restarts <= 16
    env.close()


def test_an_environment_that_cannot_be_made_anew_ends_the_run(caplog):
    env = envs.make(CRASHING, num_envs=2, options={"p_reset": 1.0}, on_failure=RESTART)
    with pytest.raises(RuntimeError, match=r"environment 0 of 2, faulty_envs:Crashing, failed 11 times in a row") as e:
        env.reset()
    assert isinstance(e.value.__cause__, ZeroDivisionError) and env.num_restarts == 0
    assert "crashed in reset" in str(e.value) and "in _roll" in errors.details(e.value)
    env.close()


def test_failures_are_reported_less_and_less_often(caplog):
    env = envs.make(CRASHING, num_envs=4, options={"p_step": 0.1}, on_failure=RESTART)
    env.reset()
    for action in actions(100, 4):
        env.step(action)
    env.close()
    messages = [record.getMessage() for record in caplog.records if record.name == "jrl.envs.vector"]
    assert env.num_restarts >= 16 and len(messages) == int(np.log2(env.num_restarts)) + 1
    assert "faulty_envs:Crashing" in messages[0] and "1 so far" in messages[0] and "ZeroDivisionError" in messages[0]


def test_seeds_are_never_used_twice():
    def seeds():
        Recorded.seeds.clear()
        env = envs.make("test_vector:Recorded", num_envs=4, options={"p_step": 0.1}, on_failure=RESTART, seed=3)
        env.reset()
        for action in actions(200, 4):
            env.step(action)
        env.close()
        assert env.num_restarts > 20 and len(Recorded.seeds) == 4 + env.num_restarts
        return list(Recorded.seeds)

    once = seeds()
    first = envs.seed_range(3)
    assert once[:4] == [first, first + 1, first + 2, first + 3]
    assert len(set(once)) == len(once) and min(once[4:]) >= 2**30 and max(once) < 2**31
    assert seeds() == once


def test_an_observation_of_another_shape_is_refused():
    """numpy would fill the row with it."""
    env = envs.make("test_vector:Wrong", num_envs=2)
    env.reset()
    with pytest.raises(ValueError, match=r"shape \(1,\), but the space has \(2,\)"):
        env.step(np.zeros(2, np.int32))
    env.close()


def test_foreach_env():
    env = envs.make("Pendulum-v1", backend="gymnasium", num_envs=3)  # behind an action transform
    env.reset()
    env.foreach_env(lambda env: setattr(env.unwrapped, "g", 5.0))
    assert env.foreach_env(lambda env: env.unwrapped.g) == [5.0] * 3
    assert env.num_restarts == 0
    env.close()
