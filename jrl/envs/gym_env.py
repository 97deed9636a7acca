"""Gymnasium environments, vectorised in this process or in worker processes."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.envs import spec as spaces
from jrl.types import Array, EnvSpec, InputError, PyTree, StepResult


def ids() -> tuple[str, ...]:
    """Every registered id; none where Gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError:
        return ()
    return tuple(gymnasium.registry)


def load_class(id: str) -> Callable[..., Any] | None:
    """The class or function that `package.module:Name` names, None if the id is of another form.

    Raises:
      InputError: no such module or name.
    """
    module, colon, name = id.partition(":")
    if not colon:
        return None
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError) as e:  # ValueError: an empty name
        raise InputError(f"env.id {id}: cannot import {module or 'a module without a name'}: {e}") from e
    if not hasattr(found, name):
        # Gymnasium's own `module:Id-v0` form: importing the module registers the id
        import gymnasium

        if name in gymnasium.registry:
            return None
        raise InputError(f"env.id {id}: module {module} has no {name}: name a class or function of it")
    return getattr(found, name)


def check(id: str, options: dict[str, Any]) -> list[str]:
    """What is wrong, as far as can be told without making one: a class that is not there, the vectorization."""
    errors: list[str] = []
    try:
        load_class(id)
    except InputError as e:
        errors += e.errors
    kind = options.get("vectorization", "sync")
    if kind not in ("sync", "async"):
        errors.append(f"env.options.vectorization: expected sync or async, got {kind!r}")
    return errors


class GymnasiumEnv:
    """Host environments. `spec` is the environment's own, before any action transform.

    The option `vectorization` is `sync` (default: one after the other) or `async` (a process each); all others go to
    the environment's constructor.
    """

    def __init__(self, id: str, *, num_envs: int, seed: int, options: dict[str, Any]):
        import gymnasium
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

        errors = check(id, options)
        if errors:
            raise InputError(*errors)
        options = dict(options)
        kind = options.pop("vectorization", "sync")
        make = load_class(id) or functools.partial(gymnasium.make, id)
        try:
            probe = make(**options)  # one in this process first: its error is the user's, not a worker's
        except (TypeError, ImportError, gymnasium.error.Error) as e:
            raise InputError(f"env {id} cannot be made with options {options}: {e}") from e
        self._observed = spaces.observations(probe.observation_space)
        action, raw = spaces.action_space(probe.action_space), probe.action_space
        self._action_dtype, self._action_shape = raw.dtype, (num_envs, *(raw.shape or ()))
        limit = getattr(probe.spec, "max_episode_steps", None)
        self.spec = EnvSpec(self._observed.space, action, num_envs, limit)
        probe.close()
        constructors = [functools.partial(make, **options)] * num_envs
        self._vector: VectorEnv
        if kind == "sync":
            self._vector = SyncVectorEnv(constructors, autoreset_mode=AutoresetMode.NEXT_STEP)
        else:
            # not forked from this process: JAX's threads may hold a lock that a fork would never see released
            self._vector = AsyncVectorEnv(constructors, autoreset_mode=AutoresetMode.NEXT_STEP, context="forkserver")
        self._seed: int | None = seed

    def reset(self) -> PyTree:
        """[B, *] observations of new episodes; the first reset seeds the environments."""
        obs, _ = self._vector.reset(seed=self._seed)
        self._seed = None
        return self._observed.convert(obs)

    def step(self, action: Array) -> StepResult:
        """Raises ValueError for actions of another shape, dtype or range than `spec.action`."""
        action = np.asarray(action)
        spaces.check_action(self.spec.action, self.spec.num_envs, action)
        raw = action.astype(self._action_dtype).reshape(self._action_shape)
        obs, reward, terminated, truncated, _ = self._vector.step(raw)
        return StepResult(self._observed.convert(obs), reward.astype(np.float32), terminated, truncated)

    def close(self) -> None:
        """Ends the worker processes, if any."""
        self._vector.close()
