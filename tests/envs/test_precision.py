"""Observations that float32 and int32 do not hold: one warning at the start of a run, and a note of check_env."""

import warnings
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from agent_envs import Walkers
from env_helpers import make

from jrl.envs.checker import check_env

box = gymnasium.spaces.Box
NOW = 1.7e9  # seconds since 1970


class Clock(gymnasium.Env):
    """A step takes `dt` seconds, and is seen in several units; what goes by `fine` is fine in float32."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Dict(
        time=box(-np.inf, np.inf, (2,), np.float64),
        nanoseconds=box(0, 2**62, (1,), np.int64),
        seconds=box(0, 2**31 - 1, (), np.int32),
        fine=box(-np.inf, np.inf, (4,), np.float64),
    )

    def __init__(self, dt=1.0):
        self._dt, self._steps = dt, 0

    def _obs(self):
        self._steps += 1
        now = NOW + self._steps * self._dt
        fine = [self._steps * 1e-12, 1 - self._steps * 1e-12, NOW, np.sin(self._steps)]  # small, at rest, constant
        return {
            "time": np.array([self._steps, now]),
            "nanoseconds": np.array([int(now * 1e9)]),
            "seconds": np.array(int(now), np.int32),
            "fine": np.array(fine),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(), 0.0, self._steps % 9 == 0, False, {}


class ClockOfOne(Walkers):
    """Agents of whom w_1 sees the time."""

    seen: ClassVar = box(-np.inf, np.inf, (2,), np.float64)

    def observation_space(self, agent):
        return self.seen

    def _see(self, agent):
        k, t = super()._see(agent)
        self.steps = getattr(self, "steps", 0) + 1
        return np.array([NOW + self.steps if agent == "w_1" else k, t], np.float64)


NAME = "test_precision"


def told(id, kind, **options):
    env = make(f"{NAME}:{id}", kind, num_envs=2, options=options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        first = env.reset()
        zeros = np.zeros(env.spec.num_envs, np.int32)
        for _ in range(80 if first is not None else 800):
            if first is None:  # these do not wait for each other, and one may be ahead
                env_id, _ = env.recv()
                env.send(zeros[env_id], env_id)
            else:
                env.step(zeros)
    env.close()
    return [str(one.message) for one in found if "env.id" in str(one.message)]


@pytest.mark.parametrize("kind", ["gymnasium", "workers", "ready_workers"])
def test_one_warning_names_the_features_and_the_fix(kind):
    large, merged = told("Clock", kind)
    assert large.startswith(f"env.id {NAME}:Clock: expected integers within int32, got larger integers in observation")
    assert "in observation['time'][1], observation['seconds'], almost constant for" in merged
    assert "differences or scaled numbers" in large and "differences or scaled numbers" in merged


def test_coarse_steps_are_told_apart():
    (large,) = told("Clock", "gymnasium", dt=600.0)
    assert "int32" in large


@pytest.mark.parametrize("kind", ["gymnasium", "workers"])
def test_the_agent_is_named(kind):
    (message,) = told("ClockOfOne", kind)
    assert "in observation[0] of agent w_1, almost constant for the policy" in message


def test_check_env_has_the_same_notes_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        notes = [note for note in check_env(Clock, steps=40).notes if "expected" in note]
    assert [("int32" in note, "float32" in note) for note in notes] == [(True, False), (False, True)]
