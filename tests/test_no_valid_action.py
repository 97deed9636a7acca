"""An environment in which, in the middle of an episode, nothing can be done."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from jrl import registry
from jrl.api import PPO
from jrl.errors import InputError


class Dead(gymnasium.Env):
    """Episodes of eight steps; before the fifth the mask allows nothing."""

    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "action_mask": spaces.MultiBinary(3)})
    action_space = spaces.Discrete(3)

    steps = 0

    def _observe(self):
        mask = [0, 0, 0] if self.steps == 4 else [1, 1, 0]
        return {"x": np.zeros(2, np.float32), "action_mask": np.array(mask, np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), 1.0, False, self.steps >= 8, {}


@pytest.mark.slow
def test_it_is_an_explained_error(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("dead", Dead)
    algo = PPO(
        {
            "env": {"id": "dead", "backend": "gymnasium", "num_envs": 2},
            "rollout": {"length": 16},
            "network": {"hidden": [8]},
            "run": {"log": [], "report_every": 1},
            "stop": {"env_steps": 64},
        }
    )
    try:
        with pytest.raises(InputError, match="action_mask allowed no action on a step that was not the last"):
            algo.train()
    finally:
        algo.stop()
