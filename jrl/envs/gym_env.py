"""Gymnasium environments, in this process or in worker processes, synchronous or asynchronous."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.envs import spec as spaces
from jrl.envs.context import OnFailure
from jrl.envs.infos import Infos, find_mask
from jrl.envs.precision import Precision
from jrl.envs.vector import Vector
from jrl.fields.env import EnvConfig
from jrl.gym.factory import EnvFactory
from jrl.gym.wrappers import unwrap
from jrl.types import Array, Box, EnvSpec, InputError, PyTree, StepResult


class HostEnv:
    """Environments that a vector steps on the host; a subclass converts their spaces.

    Args:
      cfg: section checked by `jrl.envs.check`.
      make: function from i to environment i.
      options: options of the environments, for errors.
      seed: environment i gets seed + i at the first reset.
      on_failure: see `OnFailure`. An environment that fails eleven times in a row ends the run.
    Raises:
      InputError: an unsupported space, or an environment that cannot be made; by `reset` and `step`, an environment
        that violates its interface in its first steps.
      EnvironmentFailed: by `reset` and `step`, an environment failed. Its cause is the exception that the environment
        raised in this process, SystemExit included.
    """

    spec: EnvSpec
    _observe: Callable[[Any], PyTree]
    _action: Callable[[PyTree, int], Any]  # (actions, number of environments) -> actions of the vector
    _result: Callable[[Any, np.ndarray], StepResult]  # (environments [n] or None for all, failed [n]) -> copied result

    def __init__(
        self, cfg: EnvConfig, make: Callable[[int], Any], options: dict[str, Any], seed: int, on_failure: OnFailure
    ):
        kind: Any = Vector
        if cfg.remote_worker_envs:
            from jrl.envs.processes import WorkerPool as kind  # needs a fork server, which Windows does not have
        self._vector: Any = kind(
            make, id=cfg.id, options=options, num_envs=cfg.num_envs, seed=seed, on_failure=on_failure
        )
        self._restart_failed, self._batch_wait_ms = on_failure.restart, cfg.batch_wait_ms

    def _prepare_reset(self) -> None:
        """Does nothing; a subclass resets its own state."""

    @property
    def infos(self) -> Infos:
        """Infos of the latest step, kept while `wanted`."""
        return self._vector.infos

    @property
    def num_restarts(self) -> int:
        """Number of environments that failed and were made again."""
        return self._vector.restarts.count

    def close(self) -> None:
        """Closes the environments; ends their processes within five seconds."""
        self._vector.close()


class SyncMethods(HostEnv):
    """Methods of environments that wait for each other; see `jrl.types.Env`."""

    def reset(self) -> PyTree:
        """Begins new episodes; returns observations [B, *]. The first reset seeds the environments."""
        self._prepare_reset()
        self._vector.reset()
        return self._observe(self._vector.block.observations())

    def step(self, action: PyTree) -> StepResult:
        """Steps all environments. Raises ValueError: the action's shape, dtype or range is not of `spec.action`."""
        failed = self._vector.step(self._action(action, self.spec.games))
        return self._result(None, failed)


class AsyncMethods(HostEnv):
    """Methods of asynchronous environments in worker processes; see `jrl.types.AsyncEnv`.

    `recv` waits for one environment, then `batch_wait_ms` milliseconds for others. An environment that is being made
    again blocks no other: its first observation arrives when it is ready.
    """

    least = 1

    @property
    def batch_size(self) -> int:
        """Number of environments, all of which may answer at once."""
        return self._vector.restarts.num_envs

    def reset(self) -> None:
        """Begins new episodes in all environments. Steps under way are finished first; their results are dropped."""
        self._prepare_reset()
        self._vector.begin()

    def send(self, action: PyTree, env_id: Array) -> None:
        """Sends actions to the environments `env_id` [n] i32.

        Raises:
          ValueError: the shape, dtype or range is not that of `spec.action`, or an environment is under way.
        """
        index = np.asarray(env_id).tolist()
        action = self._action(action, len(index))
        under_way = self._vector.busy | self._vector.ready
        if len(set(index)) < len(index) or not under_way.isdisjoint(index):
            raise ValueError(f"environments {index}: {sorted(under_way)} are under way: send each idle one an action")
        self._vector.send(action, index)

    def recv(self) -> tuple[np.ndarray, StepResult]:
        """Returns `env_id` [n] i32, ascending, and their results. Raises RuntimeError: no environment is under way."""
        if not self._vector.busy and not self._vector.ready:
            raise RuntimeError("no environment is under way: reset, or send actions")
        self._vector.wait(1, (self._batch_wait_ms or 0.0) / 1000)
        env_id = np.array(sorted(self._vector.ready), np.int32)
        self._vector.ready.clear()
        return env_id, self._result(env_id, self._vector.failed[env_id])


class _Gymnasium(HostEnv):
    """Conversion between jrl's and Gymnasium's spaces. `spec` is the environment's, without options."""

    def __init__(self, cfg: EnvConfig, make: EnvFactory, *, seed: int, on_failure: OnFailure):
        super().__init__(cfg, make, make.options, seed, on_failure)
        vector = self._vector
        self._is_soft, self._was_reset = cfg.soft_horizon, False
        try:
            action = spaces.convert_action_space(vector.action_space)
            if cfg.action_chunk > 1 and not isinstance(action.space, Box):
                raise InputError(
                    f"env.action_chunk: expected actions in a Box of floats, got {action.space}: leave it out"
                )
            spaces.convert_observation_space(vector.observation_space)  # before a reset looks for a mask
            mask = find_mask(
                cfg.action_mask_info, vector.observation_space, action.space, cfg.id, vector.peek_info_shapes
            )
            if mask is not None:
                vector.add_mask(*mask)
            observation = spaces.convert_observation_space(vector.observation_space)
            observation, action = spaces.flatten_mask(observation, action)
        except BaseException:
            vector.close()
            raise
        self._observe, self._convert_action = observation.convert, action.convert
        warns = on_failure.check_steps > 0
        self.precision = Precision(cfg.id, vector.observation_space, cfg.num_envs, warns=warns)
        limits = [-(-n // cfg.steps_per_action) for n in (vector.max_episode_steps, cfg.horizon) if n is not None]
        self.spec = EnvSpec(observation.space, action.space, cfg.num_envs, min(limits, default=None))

    def _prepare_reset(self) -> None:
        """Lets environments at a soft horizon reset, too."""
        if self._is_soft and self._was_reset:
            self._vector.foreach_env(lambda limited: limited.end_episode())
        self._was_reset = True

    def _action(self, action: PyTree, num_envs: int) -> Any:
        action = spaces.to_numpy(action)
        spaces.check_action(self.spec.action, num_envs, action)
        return self._convert_action(action)

    def _result(self, rows: Any, failed: np.ndarray) -> StepResult:
        block = self._vector.block
        every = slice(None) if rows is None else rows
        obs = block.observations(rows)
        if self.precision.is_active:
            self.precision.record(obs, rows)
        return StepResult(
            self._observe(obs),
            block.reward[every].astype(np.float32),
            np.array(block.terminated[every]),
            np.array(block.truncated[every]),
            failed if self._restart_failed else None,
        )

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` of each environment, after the steps under way.

        `jrl.envs.context.of(env)` returns the context of an environment. In worker processes, `fn` and its result are
        pickled; if `fn` raises, the RuntimeError has its traceback.
        """
        return self._vector.foreach_env(lambda env: fn(unwrap(env)))


class GymnasiumEnv(SyncMethods, _Gymnasium):
    """Synchronous host environments."""


class AsyncGymnasiumEnv(AsyncMethods, _Gymnasium):
    """Asynchronous host environments in worker processes."""
