"""Gymnasium environments for models: images that are not square, channels last and first; other action spaces."""

import gymnasium
import numpy as np


class Images(gymnasium.Env):
    """Random images, 10 steps per episode; the reward is a number of the image."""

    def __init__(self, shape=(36, 44, 3), action=None, dtype=np.uint8):
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, dtype)
        self.action_space = gymnasium.spaces.Discrete(3) if action is None else action
        self.steps = 0

    def _image(self):
        return self.np_random.integers(0, 256, self.observation_space.shape).astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._image(), {}

    def step(self, action):
        self.steps += 1
        image = self._image()
        return image, float(image.flat[0]) / 255.0, False, self.steps == 10, {}


def make_last():
    return Images()


def make_first():
    return Images((2, 44, 36))


def make_continuous():
    return Images((1, 36, 40), gymnasium.spaces.Box(np.float32([-2, 0]), np.float32([1, 4])))


def make_choices():
    return Images((4,), gymnasium.spaces.MultiDiscrete([3, 2]), np.float32)


def make_bits():
    return Images((4,), gymnasium.spaces.MultiBinary(3), np.float32)
