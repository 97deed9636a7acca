"""A wrapper that copies the action mask from a Gymnasium environment's infos into its observations."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.gym import space_kind
from jrl.gym.faults import Breach


class MaskError(Breach):
    """The action mask is missing from an environment's infos, or has the wrong size."""


def list_numeric_shapes(info: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each numeric entry of an info; a dict or tuple of numbers is add_mask into one array."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(Exception):
            array = _join_arrays(value)
            if array.dtype.kind in "biuf":
                found[str(name)] = array.shape
    return found


def _join_arrays(value: Any) -> np.ndarray:
    """Return one flat array; a dict's parts are in the order of their names."""
    if isinstance(value, Mapping):
        return np.concatenate([_join_arrays(value[name]).reshape(-1) for name in sorted(value)])
    if isinstance(value, tuple):
        return np.concatenate([_join_arrays(part).reshape(-1) for part in value])
    return np.asarray(value)


class MaskWrapper:
    """A Gymnasium environment whose observations contain the action mask of its infos.

    Args:
      name: key of the mask in the infos.
      shape: shape of the mask.
    """

    def __init__(self, env: Any, name: str, shape: tuple[int, ...]):
        from gymnasium import spaces

        self.env, self._name, self._shape = env, name, tuple(shape)
        yes_or_no: Any = np.bool_
        own, mask = env.observation_space, spaces.Box(0, 1, self._shape, yes_or_no)
        self._is_dict = space_kind(own) == "Dict"
        parts = {**own.spaces, "action_mask": mask} if self._is_dict else {"obs": own, "action_mask": mask}
        self.observation_space = spaces.Dict(list(parts.items()))  # a list keeps its order, a dict is sorted

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # unpickling asks before __init__ ran
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**how)
        return result if len(result) != 2 else (self.add_mask(*result), result[1])

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(action)
        if len(result) != 5:  # `jrl.gym.faults` reports the error
            return result
        obs, reward, terminated, truncated, info = result
        return self.add_mask(obs, info), reward, terminated, truncated, info

    def add_mask(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        """Return the observation with its mask. Raises MaskError: the mask is missing or has the wrong size."""
        if self._name not in info:
            raise MaskError(
                f"env.action_mask_info {self._name}: the infos of a step or reset have no such entry, only "
                f"{', '.join(map(str, info)) or 'nothing'}: add it to all infos, also the last of an episode"
            )
        mask = _join_arrays(info[self._name])
        if mask.size != math.prod(self._shape):
            raise MaskError(
                f"env.action_mask_info {self._name}: the mask has {mask.size} entries, but the first mask had "
                f"{math.prod(self._shape)}: return one entry per action of the action space"
            )
        mask = (mask != 0).reshape(self._shape)
        return {**obs, "action_mask": mask} if self._is_dict else {"obs": obs, "action_mask": mask}


def wrap_with_mask(env: Any, mask: Any) -> tuple[Any, Any]:
    """Return the environment to step, and its `MaskWrapper`.

    Args:
      mask: name, shape, and whether `env` is a `jrl.envs.limits.Limited`. That wrapper repeats observations without an
        info, so the mask goes inside it.
    """
    name, shape, limited = mask
    if limited:
        env.env = MaskWrapper(env.env, name, shape)
        return env, env.env
    env = MaskWrapper(env, name, shape)
    return env, env
