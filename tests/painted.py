"""A Gymnasium environment whose pictures are known, for the tests of what shows them."""

import os

import gymnasium
import numpy as np


class Painted(gymnasium.Env):
    """Its picture's red is the number of steps so far; four of them, 1.5 each."""

    def __init__(self, render_mode: str | None = None, shade: int = 0, draws: bool = True, moves_to: str | None = None):
        if moves_to is not None:
            os.chdir(moves_to)
        self.observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.render_mode, self.shade, self.draws, self.steps = render_mode, shade, draws, 0
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return np.full(1, self.steps, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.5, self.steps == 4, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        if not self.draws:
            return None
        return np.broadcast_to(np.array([50 * self.steps, self.shade, 0], np.uint8), (31, 40, 3))
