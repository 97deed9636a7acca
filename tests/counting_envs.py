"""Gymnasium environments that say what happened; without jax, for worker processes."""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from jrl.callbacks import Callbacks


class Counter(gymnasium.Env):
    """Observation (index of the environment, episode, step), reward 3 * step, episodes of 2 + index steps.

    Its infos say where it stands; every other episode ends by a time limit.
    """

    observation_space, action_space = gymnasium.spaces.Box(0, 1e6, (3,)), gymnasium.spaces.Discrete(2)

    def __init__(self, size: int = 1) -> None:
        self.index, self.episode, self.steps = -1, -1, 0

    def _obs(self) -> tuple[np.ndarray, dict[str, Any]]:
        where = [self.index, self.episode, self.steps]
        return np.array(where, np.float32), {"where": tuple(where), "open": (lambda: self)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self.index = seed % 100
        self.episode, self.steps = self.episode + 1, 0
        return self._obs()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        end, limit = self.steps == 2 + self.index, self.episode % 2 == 1
        obs, info = self._obs()
        return obs, 3.0 * self.steps, end and not limit, end and limit, info


class Marks(Callbacks):
    """Writes into each environment what it was told."""

    def on_sub_environment_created(self, *, sub_environment, env_context, env_index, worker, **kwargs):
        sub_environment.unwrapped.mark = (env_index, env_context["size"], worker is None)


class Turns:
    """RLlib's interface: a and b act by turns without waiting, four steps, of which both are told in their infos."""

    turn_based = False
    fails: ClassVar[list] = []

    def __init__(self, config=None):
        self.possible_agents = ["a", "b"]
        self.observation_space, self.action_space = (
            gymnasium.spaces.Box(0.0, 9.0, (1,), np.float32),
            gymnasium.spaces.Discrete(2),
        )

    def _now(self):
        agent = "ab"[self.t % 2]
        return {agent: np.array([self.t], np.float32)}, {agent: {"turn": self.t} for agent in "ab"}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._now()

    def step(self, actions):
        self.t += 1
        if self.t == 3 and Turns.fails:
            raise RuntimeError(Turns.fails.pop())
        obs, infos = self._now()
        return obs, dict.fromkeys(actions, 1.0), {"__all__": self.t == 4}, {"__all__": False}, infos

    def close(self):
        pass
