"""Wrappers of a Gymnasium environment: a horizon, repeated actions, action chunks, and the action mask of its infos."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jrl.gym import faults, space_kind
from jrl.gym.exceptions import Breach


class MaskError(Breach):
    """The action mask is missing from an environment's infos, or has the wrong size."""


def list_numeric_shapes(info: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each numeric entry of an info; a dict or tuple of numbers is joined to one array."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(Exception):
            array = _join_arrays(value)
            if array.dtype.kind in "biuf":
                found[str(name)] = array.shape
    return found


def _join_arrays(value: Any) -> np.ndarray:
    """Returns one flat array; a dict's parts are in the order of their names."""
    if isinstance(value, Mapping):
        return np.concatenate([_join_arrays(value[name]).reshape(-1) for name in sorted(value)])
    if isinstance(value, tuple):
        return np.concatenate([_join_arrays(part).reshape(-1) for part in value])
    return np.asarray(value)


class _Wrapper:
    """An environment that passes all other members of `env` through; `env` need not inherit from `gymnasium.Env`."""

    def __init__(self, env: Any):
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # unpickling asks before __init__ ran
            raise AttributeError(name)
        return getattr(self.env, name)


class Limited(_Wrapper):
    """An environment whose episodes end after `horizon` steps.

    With `soft`, the reset after the horizon does not reset the environment, unless `end_episode` was called.
    """

    def __init__(self, env: Any, horizon: int, soft: bool):
        super().__init__(env)
        self._horizon, self._soft = horizon, soft
        self._steps, self._continues, self._obs = 0, False, None

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        continues, self._continues, self._steps = self._continues, False, 0
        return (self._obs, {}) if continues and not how else self.env.reset(**how)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(action)
        if len(result) != 5:  # `jrl.gym.faults` reports the error
            return result
        obs, reward, terminated, truncated, info = result
        self._steps += 1
        if self._steps >= self._horizon and not (terminated or truncated):
            truncated = True
            self._continues, self._obs = self._soft, obs
        return obs, reward, terminated, truncated, info

    def end_episode(self) -> None:
        """Makes the next reset a reset of the environment."""
        self._continues = False


class Repeated(_Wrapper):
    """An environment that takes each action `times` times, fewer at the end of an episode; rewards are summed."""

    def __init__(self, env: Any, times: int):
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._play(action for _ in range(self._times))

    def _play(self, actions: Iterable[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        total = 0.0
        for action in actions:
            result = self.env.step(action)
            if len(result) != 5 or not faults.has_no_fatal_fault(*result[1:]):  # `jrl.gym.faults` reports the error
                return result
            obs, reward, terminated, truncated, info = result
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class Chunked(Repeated):
    """An environment whose action has `times` actions [times, *], taken one after the other; otherwise as `Repeated`.

    `jrl.envs.gym_env` refuses action spaces that are not a Box of floats; they stay here.
    """

    def __init__(self, env: Any, times: int):
        super().__init__(env, times)
        space = env.action_space
        if space_kind(space) == "Box":
            from gymnasium import spaces

            low, high = (np.stack([bound] * times) for bound in (space.low, space.high))
            self.action_space = spaces.Box(low, high, dtype=space.dtype)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._play(action)


class MaskWrapper(_Wrapper):
    """An environment whose observations contain the action mask of its infos.

    Args:
      name: key of the mask in the infos.
      shape: shape of the mask.
    """

    def __init__(self, env: Any, name: str, shape: tuple[int, ...]):
        super().__init__(env)
        self._name, self._shape = name, tuple(shape)
        self._is_dict = space_kind(env.observation_space) == "Dict"
        self.observation_space = add_mask_space(env.observation_space, self._shape)

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
        """Returns the observation with its mask. Raises MaskError: the mask is missing or has the wrong size."""
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


def add_mask_space(space: Any, shape: tuple[int, ...]) -> Any:
    """Returns an observation space with a mask; a space that is not a Dict becomes its item `obs`."""
    from gymnasium import spaces

    yes_or_no: Any = np.bool_
    parts = space.spaces if space_kind(space) == "Dict" else {"obs": space}
    # a list keeps its order, a dict is sorted
    return spaces.Dict([*parts.items(), ("action_mask", spaces.Box(0, 1, shape, yes_or_no))])


def wrap_with_mask(env: Any, mask: tuple[str, tuple[int, ...]]) -> tuple[Any, MaskWrapper]:
    """Returns the environment to step, and its `MaskWrapper`; `mask` is its name and shape.

    `Limited` repeats observations without an info, so the mask goes inside it.
    """
    if isinstance(env, Limited | Repeated):
        env.env, wrapper = wrap_with_mask(env.env, mask)
        return env, wrapper
    wrapper = MaskWrapper(env, *mask)
    return wrapper, wrapper


def unwrap(env: Any) -> Any:
    """Returns the user's environment inside jrl's wrappers."""
    while isinstance(env, _Wrapper):
        env = env.env
    return env
