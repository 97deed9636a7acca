"""An environment whose state determines everything: what may be done, what it pays, when an episode ends."""

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

ACTIONS = 4


def allowed(x):
    """Which actions a state allows: [..., 3] -> [..., 4] bool; of each at least one."""
    index, episode, step = (x[..., i] for i in range(3))
    first = (index + 3 * episode + step) % ACTIONS
    others = (5 * episode + 7 * step) % 3 == 0
    columns = [(first == a) | (others & ((a + step) % 2 == 0)) for a in range(ACTIONS)]
    return np.stack(columns, -1) if isinstance(x, np.ndarray) else jnp.stack(columns, -1)


def paid(x, action):
    return 0.25 * x[..., 2] + action - 0.5 * x[..., 0]


def length(index, episode):
    return 3 + (index + episode) % 5


class Rules(gymnasium.Env):
    """States (environment, episode, step), of which all else follows; every other episode has a time limit."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(0, 1e4, (3,), np.float32), "action_mask": spaces.MultiBinary(ACTIONS)}
    )
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self):
        self.state = np.array([0, -1, 0], np.float32)

    def _observe(self):
        return {"x": self.state.copy(), "action_mask": allowed(self.state).astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.state[0] = seed % 50
        self.state[1] += 1
        self.state[2] = 0
        return self._observe(), {}

    def step(self, action):
        reward = float(paid(self.state, action))
        self.state[2] += 1
        end, limit = self.state[2] == length(*self.state[:2]), self.state[1] % 2 == 1
        return self._observe(), reward, bool(end and not limit), bool(end and limit), {}
