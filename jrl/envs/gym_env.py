"""Gymnasium environments, in this process or in worker processes, synchronous or asynchronous."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl import registry
from jrl.envs import context as contexts
from jrl.envs import spec as spaces
from jrl.envs.context import ENDS_RUN, EnvContext, EnvFactory, OnFailure
from jrl.envs.infos import Infos, find_mask, may_have_mask
from jrl.envs.precision import Precision
from jrl.envs.processes import WorkerPool
from jrl.envs.vector import Vector
from jrl.fields.env import EnvConfig
from jrl.gym.exceptions import format_line, is_environment_error, suggest_install
from jrl.types import Array, EnvSpec, InputError, PyTree, Space, StepResult


def ids() -> tuple[str, ...]:
    """Return every registered id; empty without Gymnasium."""
    try:
        import gymnasium
    except ImportError:
        return ()
    return tuple(gymnasium.registry)


def load_class(id: str) -> Callable[..., Any] | None:
    """Return the object that `package.module:Name` names or that was registered under the id; None: another form of id.

    Raises:
      InputError: the module or name does not exist.
    """
    if registry.registered(id) is not None or id.startswith("local:"):
        return registry.load(id, "env.id")
    module, colon, name = id.partition(":")
    if not colon:
        return None
    try:
        found = importlib.import_module(module)
    except BaseException as e:
        if not is_environment_error(e):
            raise
        missing = isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")
        # an error inside the module is reported with its line
        reason = e if missing or not module else format_line(e) + suggest_install(e)
        raise InputError(f"env.id {id}: cannot import {module or 'a module without a name'}: {reason}") from e
    if not hasattr(found, name):
        # Gymnasium's own `module:Id-v0` form: importing the module registers the id
        import gymnasium

        if name in gymnasium.registry:
            return None
        raise InputError(f"env.id {id}: module {module} has no {name}: name a class or function of that module")
    return getattr(found, name)


def check(id: str, options: dict[str, Any]) -> list[str]:
    """Return faults that can be found without making an environment: an unknown class or option."""
    errors: list[str] = []
    try:
        found = load_class(id)
    except InputError as e:
        errors += e.errors
    else:
        if found is not None and contexts.is_vector(found):
            return [f"env.id {id}: {contexts.NOT_ONE.format('a vector of several')}"]
        if found is not None and not contexts.takes_context(found, creator=_registered(id), options=options):
            errors += contexts.check_options(id, found, options)
    if "vectorization" in options:
        errors.append(
            "env.options.vectorization: the option was removed: set env.remote_worker_envs=true to give each "
            "environment a process of its own"
        )
    return errors


def _registered(id: str) -> bool:
    return registry.registered(id) is not None


def _make_factory(cfg: EnvConfig, context: EnvContext) -> EnvFactory:
    """Return the factory of the environments; it also works in a process that registered nothing."""
    import gymnasium

    found, by_context = load_class(cfg.id), False
    if found is not None:
        by_context = contexts.takes_context(found, creator=_registered(cfg.id), options=context)
    else:
        name = cfg.id if cfg.id in gymnasium.registry else cfg.id.partition(":")[2]
        found = functools.partial(gymnasium.make, gymnasium.registry.get(name, cfg.id))
    return EnvFactory(found, context, by_context=by_context, horizon=cfg.horizon, soft_horizon=cfg.soft_horizon)


def start_workers(make: Callable[[int], Any], **settings: Any) -> WorkerPool:
    """Start one worker process per environment; `make`, a function of the index, is pickled."""
    import cloudpickle  # also pickles classes of the main module

    with contexts.pickle_by_value():
        pickled = cloudpickle.dumps(make)
    return WorkerPool(pickled, **settings)


def _unwrap(fn: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    """Return a function that calls `fn` on the environment inside `depth` wrappers (`Limited`, `MaskWrapper`)."""

    def call(env: Any) -> Any:
        for _ in range(depth):
            env = env.env
        return fn(env)

    if hasattr(fn, "for_index"):  # see `WorkerPool.foreach_env`
        call.for_index = lambda i: _unwrap(fn.for_index(i), depth)  # type: ignore[attr-defined]  # a function's attribute
    return call


class HostMembers:
    """Members of environments that a vector steps on the host."""

    _vector: Any

    @property
    def infos(self) -> Infos:
        """Infos of the latest step, kept while `wanted`."""
        return self._vector.infos

    @property
    def num_restarts(self) -> int:
        """Number of environments that failed and were made again."""
        return self._vector.restarts.count

    def close(self) -> None:
        """Close the environments; end their processes within five seconds."""
        self._vector.close()


class _Adapter(HostMembers):
    """Conversion between jrl's and Gymnasium's spaces around a vector. `spec` is the environment's, without options.

    Args:
      cfg: section checked by `jrl.envs.check`.
      seed: environment i gets seed + i at the first reset.
      context: context of environment 0, options included; None: a context with the options only.
      on_failure: see `OnFailure`. An environment that fails eleven times in a row ends the run.
    Raises:
      InputError: an unsupported space, or an environment that cannot be made; by `reset` and `step`, an environment
        that violates Gymnasium's interface in its first steps.
      EnvironmentFailed: by `reset` and `step`, an environment failed. Its cause is the exception that the environment
        raised in this process, SystemExit included.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        *,
        seed: int,
        context: EnvContext | None = None,
        on_failure: OnFailure = ENDS_RUN,
    ):
        make = _make_factory(cfg, context or EnvContext(cfg.options, num_envs=cfg.num_envs, seed=seed))
        how: dict[str, Any] = {"id": cfg.id, "options": cfg.options, "num_envs": cfg.num_envs, "seed": seed}
        how |= {"restart_failed": on_failure.restart, "check_steps": on_failure.check_steps}
        if cfg.remote_worker_envs:
            vector: Any = start_workers(make, step_timeout_s=on_failure.step_timeout_s, **how)
        else:
            vector = Vector(make, **how)
        self._vector = vector
        self._depth = int(cfg.horizon is not None)  # number of wrappers
        self._is_soft, self._restart_failed, self._was_reset = cfg.soft_horizon, on_failure.restart, False
        self._batch_wait_ms = cfg.batch_wait_ms
        try:
            action = spaces.convert_action_space(vector.action_space)
            self._add_mask(action.space, cfg.action_mask_info)
            observation = spaces.convert_observation_space(vector.observation_space)
            observation, action = spaces.flatten_mask(observation, action)
        except BaseException:
            vector.close()
            raise
        self._convert_observation, self._convert_action = observation.convert, action.convert
        warns = on_failure.check_steps > 0
        self.precision = Precision(cfg.id, vector.observation_space, cfg.num_envs, warns=warns)
        limit = min((n for n in (vector.max_episode_steps, cfg.horizon) if n is not None), default=None)
        self.spec = EnvSpec(observation.space, action.space, cfg.num_envs, limit)

    def _add_mask(self, action: Space, name: str | None) -> None:
        """Add the mask of the infos, if any, to the observations."""
        vector, id = self._vector, self._vector.restarts.id
        if not may_have_mask(name, vector.observation_space, action, id):
            return
        found = find_mask(name, vector.peek_info_shapes(), action, id)
        if found is not None:
            vector.add_mask(*found, limited=self._depth > 0)
            self._depth += 1

    def _action(self, action: PyTree, num_envs: int) -> Any:
        """Return the action [n, *] in the environment's space. Raises ValueError: it is not of `spec.action`."""
        action = spaces.to_numpy(action)
        spaces.check_action(self.spec.action, num_envs, action)
        return self._convert_action(action)

    def _result(self, rows: Any, failed: np.ndarray) -> StepResult:
        """Return a copy of the latest step of all environments, or of environments `rows` [n]."""
        block = self._vector.block
        every = slice(None) if rows is None else rows
        obs = block.observations(rows)
        if self.precision.is_active:
            self.precision.record(obs, rows)
        return StepResult(
            self._convert_observation(obs),
            block.reward[every].astype(np.float32),
            np.array(block.terminated[every]),
            np.array(block.truncated[every]),
            failed if self._restart_failed else None,
        )

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return `fn(env)` of each environment, after the steps under way.

        `jrl.envs.context.of(env)` returns the context of an environment. In worker processes, `fn` and its result are
        pickled; if `fn` raises, the RuntimeError has its traceback.
        """
        return self._vector.foreach_env(_unwrap(fn, self._depth) if self._depth else fn)

    def _prepare_reset(self) -> None:
        """Let environments at a soft horizon reset, too."""
        if self._is_soft and self._was_reset:
            self._vector.foreach_env(lambda limited: limited.end_episode())
        self._was_reset = True


class GymnasiumEnv(_Adapter):
    """Synchronous host environments."""

    def reset(self) -> PyTree:
        """Begin new episodes; return observations [B, *]. The first reset seeds the environments."""
        self._prepare_reset()
        self._vector.reset()
        return self._convert_observation(self._vector.block.observations())

    def step(self, action: PyTree) -> StepResult:
        """Step all environments. Raises ValueError: the action's shape, dtype or range is not that of `spec.action`."""
        failed = self._vector.step(self._action(action, self.spec.num_envs))
        return self._result(None, failed)


class AsyncMethods:
    """Methods of asynchronous environments in worker processes; see `jrl.types.AsyncEnv`.

    `recv` waits for one environment, then `batch_wait_ms` milliseconds for others. An environment that is being made
    again blocks no other: its first observation arrives when it is ready.
    """

    least = 1
    _vector: Any
    _prepare_reset: Callable[[], None]
    _action: Callable[[PyTree, int], Any]
    _result: Callable[[Any, np.ndarray], StepResult]
    _batch_wait_ms: float | None

    @property
    def batch_size(self) -> int:
        """Number of environments, all of which may answer at once."""
        return self._vector.restarts.num_envs

    def reset(self) -> None:
        """Begin new episodes in all environments. Steps under way are finished first; their results are dropped."""
        self._prepare_reset()
        self._vector.begin()

    def send(self, action: PyTree, env_id: Array) -> None:
        """Send actions to the environments `env_id` [n] i32.

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
        """Return `env_id` [n] i32, ascending, and their results. Raises RuntimeError: no environment is under way."""
        if not self._vector.busy and not self._vector.ready:
            raise RuntimeError("no environment is under way: reset, or send actions")
        self._vector.wait(1, (self._batch_wait_ms or 0.0) / 1000)
        env_id = np.array(sorted(self._vector.ready), np.int32)
        self._vector.ready.clear()
        return env_id, self._result(env_id, self._vector.failed[env_id])


class AsyncGymnasiumEnv(AsyncMethods, _Adapter):
    """Asynchronous host environments in worker processes."""
