"""Gymnasium environments for worker processes: a module that imports neither jrl nor jax."""

import gymnasium
import numpy as np


class Counter(gymnasium.Env):
    """Shows and pays the steps since its reset; the first of a run ends after 5, the second after 2."""

    def __init__(self, config):
        self.observation_space, self.action_space = gymnasium.spaces.Box(0, 99, (1,)), gymnasium.spaces.Discrete(2)
        self._end, self.count, self.resets = (5, 2)[config.vector_index], 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.resets = 0, self.resets + 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), self.count, self.count == self._end, False, {}


class Pusher(gymnasium.Env):
    """Shows its steps and the sum of its actions, weighted by the step; pays the action's parts as 1 and 10."""

    def __init__(self, config):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
        self._end = (5, 2)[config.vector_index]

    def _obs(self):
        return np.array([self.count, self.total], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.total = 0, 0.0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        self.total += self.count * action.sum()
        return self._obs(), action[0] + 10 * action[1], self.count == self._end, False, {}


class Level(gymnasium.Env):
    """Shows its task and where it stands in the run; an episode has as many steps as the task."""

    def __init__(self, env_config):
        self.observation_space, self.action_space = gymnasium.spaces.Box(0, 99, (2,)), gymnasium.spaces.Discrete(2)
        self._task, self._index, self._steps = env_config.get("task", 1), env_config.vector_index, 0
        self.context = env_config

    def get_task(self):
        return self._task

    def set_task(self, task):
        self._task = task

    def _obs(self):
        return np.array([self._task, self._index], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._obs(), {}

    def step(self, action):
        self._steps += 1
        return self._obs(), 1.0, self._steps >= self._task, False, {}


class Taskless(gymnasium.Env):
    """One step, no task; takes its options as arguments, like most."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, size=3):
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}
