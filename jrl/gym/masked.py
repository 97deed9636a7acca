"""One Gymnasium environment with the action mask of its infos in its observations."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.gym.faults import Breach, kind


class MaskError(Breach):
    """An environment's infos lack the action mask, or have one of another size."""


def shapes(info: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an info's entries that are numbers, or dicts and tuples of them, which are joined."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(Exception):
            array = _array(value)
            if array.dtype.kind in "biuf":
                found[str(name)] = array.shape
    return found


def _array(value: Any) -> np.ndarray:
    """Returns one array; parts of a dict are in the order of their names."""
    if isinstance(value, Mapping):
        return np.concatenate([_array(value[name]).reshape(-1) for name in sorted(value)])
    if isinstance(value, tuple):
        return np.concatenate([_array(part).reshape(-1) for part in value])
    return np.asarray(value)


class Masked:
    """One Gymnasium environment with the action mask of its infos in its observations; all else is its own.

    Args:
      env: the environment.
      name: of the entry in its infos.
      shape: of the mask.
    """

    def __init__(self, env: Any, name: str, shape: tuple[int, ...]):
        from gymnasium import spaces

        self.env, self._name, self._shape = env, name, tuple(shape)
        yes_or_no: Any = np.bool_
        seen, mask = env.observation_space, spaces.Box(0, 1, self._shape, yes_or_no)
        self._named = kind(seen) == "Dict"
        named = {**seen.spaces, "action_mask": mask} if self._named else {"obs": seen, "action_mask": mask}
        self.observation_space = spaces.Dict(list(named.items()))  # a list keeps its order

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # of one that is only half there
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**how)
        return result if len(result) != 2 else (self.joined(*result), result[1])

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(action)
        if len(result) != 5:  # `jrl.gym.faults` has the words
            return result
        obs, reward, terminated, truncated, info = result
        return self.joined(obs, info), reward, terminated, truncated, info

    def joined(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        """Raises MaskError: there is no mask, or one of another size."""
        if self._name not in info:
            raise MaskError(
                f"env.action_mask_info {self._name}: the infos of a step or reset have no such entry: they have "
                f"{', '.join(map(str, info)) or 'nothing'}: put it into all of them, the last of an episode too"
            )
        mask = _array(info[self._name])
        if mask.size != math.prod(self._shape):
            raise MaskError(
                f"env.action_mask_info {self._name}: the infos have {mask.size} entries, but the first had "
                f"{math.prod(self._shape)}: give one for each choice of the action space"
            )
        mask = (mask != 0).reshape(self._shape)
        return {**obs, "action_mask": mask} if self._named else {"obs": obs, "action_mask": mask}


def put_around(env: Any, mask: Any) -> tuple[Any, Any]:
    """Returns (what is stepped, its `Masked`).

    Args:
      env: the environment.
      mask: name, shape, and whether `env` is in `jrl.envs.limits.Limited`, which repeats observations without an info.
    """
    name, shape, limited = mask
    if limited:
        env.env = Masked(env.env, name, shape)
        return env, env.env
    env = Masked(env, name, shape)
    return env, env
