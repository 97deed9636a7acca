"""Gymnasium environments with a fault, for `env.id: faulty_envs:NAME` in a process whose PYTHONPATH has this folder."""

import time

import gymnasium
import numpy as np


class Plain(gymnasium.Env):
    """Episodes of 20 steps of nothing."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    _steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        self.fault()
        return np.zeros(2, np.float32), 1.0, self._steps % 20 == 0, False, {}

    def fault(self):
        pass


class Stalling(Plain):
    """Its step `at` takes `seconds`."""

    def __init__(self, at=300, seconds=6.0):
        self._at, self._seconds = at, seconds

    def fault(self):
        if self._steps == self._at:
            time.sleep(self._seconds)


class Leaking(Plain):
    """Every step keeps so many bytes."""

    def __init__(self, size=20_000):
        self._size, self._kept = size, []

    def fault(self):
        self._kept.append(bytearray(self._size))
