"""Gymnasium environments, in this process or in worker processes, that wait for each other or do not."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl import registry
from jrl.envs import context as contexts
from jrl.envs import masks
from jrl.envs import spec as spaces
from jrl.envs.context import ENDS_RUN, EnvContext, Maker, OnFailure
from jrl.envs.precision import Precision
from jrl.envs.processes import Workers
from jrl.envs.vector import Infos, Vector
from jrl.fields.env import EnvConfig
from jrl.gym.exceptions import line, mend_of_import, own
from jrl.types import Array, EnvSpec, InputError, PyTree, Space, StepResult


def ids() -> tuple[str, ...]:
    """Returns every registered id; none where Gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError:
        return ()
    return tuple(gymnasium.registry)


def load_class(id: str) -> Callable[..., Any] | None:
    """Returns what `package.module:Name` names, or was registered under the id; None if the id is of another form.

    Raises:
      InputError: no such module or name.
    """
    if registry.registered(id) is not None or id.startswith("local:"):
        return registry.load(id, "env.id")
    module, colon, name = id.partition(":")
    if not colon:
        return None
    try:
        found = importlib.import_module(module)
    except BaseException as e:
        if not own(e):
            raise
        missing = isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")
        # ValueError: an empty name; of what the module itself does, its line
        said = e if missing or not module else line(e) + mend_of_import(e)
        raise InputError(f"env.id {id}: cannot import {module or 'a module without a name'}: {said}") from e
    if not hasattr(found, name):
        # Gymnasium's own `module:Id-v0` form: importing the module registers the id
        import gymnasium

        if name in gymnasium.registry:
            return None
        raise InputError(f"env.id {id}: module {module} has no {name}: name a class or function of it")
    return getattr(found, name)


def check(id: str, options: dict[str, Any]) -> list[str]:
    """Returns faults that can be found without making an environment: an unknown class or option."""
    errors: list[str] = []
    try:
        found = load_class(id)
    except InputError as e:
        errors += e.errors
    else:
        if found is not None and contexts.is_vector(found):
            return [f"env.id {id}: {contexts.NOT_ONE.format('a vector of several')}"]
        if found is not None and not contexts.takes_context(found, creator=_registered(id), options=options):
            errors += contexts.option_errors(id, found, options)
    if "vectorization" in options:
        errors.append(
            "env.options.vectorization: the option was removed: env.remote_worker_envs true gives each "
            "environment a process of its own"
        )
    return errors


def _registered(id: str) -> bool:
    return registry.registered(id) is not None


def _maker(cfg: EnvConfig, context: EnvContext) -> Maker:
    """Returns the Maker of the environments, which also works in a process that registered nothing."""
    import gymnasium

    found, by_context = load_class(cfg.id), False
    if found is not None:
        by_context = contexts.takes_context(found, creator=_registered(cfg.id), options=context)
    else:
        name = cfg.id if cfg.id in gymnasium.registry else cfg.id.partition(":")[2]
        found = functools.partial(gymnasium.make, gymnasium.registry.get(name, cfg.id))
    return Maker(found, context, by_context=by_context, horizon=cfg.horizon, soft_horizon=cfg.soft_horizon)


def in_workers(make: Callable[[int], Any], **settings: Any) -> Workers:
    """Makes environments in a process each, by a function of their number, which travels pickled."""
    import cloudpickle  # takes what the main module defines, too

    with contexts.by_value():
        pickled = cloudpickle.dumps(make)
    return Workers(pickled, **settings)


def _inside(fn: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    """Makes `fn` act on the environments inside `jrl.envs.limits.Limited`, `masked.Masked` or both."""

    def call(around: Any) -> Any:
        for _ in range(depth):
            around = around.env
        return fn(around)

    if hasattr(fn, "for_index"):  # see `Workers.foreach_env`
        call.for_index = lambda i: _inside(fn.for_index(i), depth)  # type: ignore[attr-defined]  # a function's attribute
    return call


class OnHost:
    """Members of environments that a vector steps on the host."""

    _vector: Any

    @property
    def infos(self) -> Infos:
        """Returns the infos of the latest step, kept once they are wanted."""
        return self._vector.infos

    @property
    def num_restarts(self) -> int:
        """Returns how many environments failed and were made anew."""
        return self._vector.restarts.count

    def close(self) -> None:
        """Closes the environments, and ends their processes within five seconds."""
        self._vector.close()


class _Adapter(OnHost):
    """A vector between our spaces and Gymnasium's. `spec` is the environment's own, before any action transform.

    Args:
      cfg: the section, checked by `jrl.envs.check`.
      seed: environment i gets seed + i at the first reset.
      context: of environment 0, options included; None: they know of their options only.
      on_failure: see there. One that fails eleven times in a row ends the run.
    Raises:
      InputError: a space that cannot be handled, an environment that cannot be made; by `reset` and `step`, one that
        does not keep to Gymnasium's interface in its first steps.
      EnvironmentFailed: by `reset` and `step`, an environment failed; the exception that it raised in this process,
        SystemExit included, is the cause.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        *,
        seed: int,
        context: EnvContext | None = None,
        on_failure: OnFailure = ENDS_RUN,
    ):
        make = _maker(cfg, context or EnvContext(cfg.options, num_envs=cfg.num_envs, seed=seed))
        how: dict[str, Any] = {"id": cfg.id, "options": cfg.options, "num_envs": cfg.num_envs, "seed": seed}
        how |= {"restart_failed": on_failure.restart, "check_steps": on_failure.check_steps}
        if cfg.remote_worker_envs:
            vector: Any = in_workers(make, step_timeout_s=on_failure.step_timeout_s, **how)
        else:
            vector = Vector(make, **how)
        self._vector = vector
        self._depth = int(cfg.horizon is not None)  # of what is around an environment
        self._goes_on, self._restart_failed, self._was_reset = cfg.soft_horizon, on_failure.restart, False
        self._batch_wait_ms = cfg.batch_wait_ms
        try:
            seen, taken = spaces.observations(vector.observation_space), spaces.actions(vector.action_space)
            if self._mask(taken.space, cfg.action_mask_info):
                seen = spaces.observations(vector.observation_space)
            seen, taken = spaces.with_flat_mask(seen, taken)
        except BaseException:
            vector.close()
            raise
        self._observe, self._taken = seen.convert, taken.convert
        warns = on_failure.check_steps > 0
        self.precision = Precision(cfg.id, vector.observation_space, cfg.num_envs, warns=warns)
        limit = min((n for n in (vector.max_episode_steps, cfg.horizon) if n is not None), default=None)
        self.spec = EnvSpec(seen.space, taken.space, cfg.num_envs, limit)

    def _mask(self, action: Space, name: str | None) -> bool:
        """Returns whether the infos have a mask, which the environments then show."""
        vector, id = self._vector, self._vector.restarts.id
        if not masks.looked_for(name, vector.observation_space, action, id):
            return False
        found = masks.shape(name, vector.look(), action, id)
        if found is not None:
            vector.mask(*found, limited=self._depth > 0)
            self._depth += 1
        return found is not None

    def _action(self, action: PyTree, num_envs: int) -> Any:
        """Returns the action [n, *] as the environment takes it. Raises ValueError unless it is of `spec.action`."""
        action = spaces.on_host(action)
        spaces.check_action(self.spec.action, num_envs, action)
        return self._taken(action)

    def _result(self, rows: Any, failed: np.ndarray) -> StepResult:
        """Returns copies of the latest step of all environments, or of `rows` [n]."""
        block = self._vector.block
        every = slice(None) if rows is None else rows
        obs = block.observations(rows)
        if self.precision.looks:
            self.precision.look(obs, rows)
        return StepResult(
            self._observe(obs),
            block.reward[every].astype(np.float32),
            np.array(block.terminated[every]),
            np.array(block.truncated[every]),
            failed if self._restart_failed else None,
        )

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` of each environment, after the steps under way.

        In worker processes `fn` and what it returns travel pickled, and where it raises, a RuntimeError has its
        traceback. What an environment was made with: `jrl.envs.context.of(env)`.
        """
        return self._vector.foreach_env(_inside(fn, self._depth) if self._depth else fn)

    def _begin_anew(self) -> None:
        """Resets environments that stand at a soft horizon, too, before a reset of all."""
        if self._goes_on and self._was_reset:
            self._vector.foreach_env(lambda limited: limited.begin_anew())
        self._was_reset = True


class GymnasiumEnv(_Adapter):
    """Host environments that wait for each other."""

    def reset(self) -> PyTree:
        """Begins new episodes and returns their observations [B, *]; the first reset seeds the environments."""
        self._begin_anew()
        self._vector.reset()
        return self._observe(self._vector.block.observations())

    def step(self, action: PyTree) -> StepResult:
        """Steps all. Raises ValueError for actions of another shape, dtype or range than `spec.action`."""
        failed = self._vector.step(self._action(action, self.spec.num_envs))
        return self._result(None, failed)


class NotWaiting:
    """Members of environments in worker processes that do not wait for each other; see `jrl.types.AsyncEnv`.

    `recv` waits for one, then `batch_wait_ms` milliseconds for others. One that is made anew holds up no other: its
    first observation comes when it is ready.
    """

    least = 1
    _vector: Any
    _begin_anew: Callable[[], None]
    _action: Callable[[PyTree, int], Any]
    _result: Callable[[Any, np.ndarray], StepResult]
    _batch_wait_ms: float | None

    @property
    def batch_size(self) -> int:
        """Returns the number of environments, which may all answer at once."""
        return self._vector.restarts.num_envs

    def reset(self) -> None:
        """Begins new episodes in all. Steps under way are finished first, and their results are lost."""
        self._begin_anew()
        self._vector.begin()

    def send(self, action: PyTree, env_id: Array) -> None:
        """Sends actions to the environments `env_id` [n] i32.

        Raises:
          ValueError: another shape, dtype or range than `spec.action`, or an environment that is under way.
        """
        index = np.asarray(env_id).tolist()
        action = self._action(action, len(index))
        under_way = self._vector.busy | self._vector.ready
        if len(set(index)) < len(index) or not under_way.isdisjoint(index):
            raise ValueError(f"environments {index}: {sorted(under_way)} are under way, and no two actions go to one")
        self._vector.send(action, index)

    def recv(self) -> tuple[np.ndarray, StepResult]:
        """Returns `env_id` [n] i32, ascending, and their results. Raises RuntimeError where none is under way."""
        if not self._vector.busy and not self._vector.ready:
            raise RuntimeError("no environment is under way: reset, or send actions")
        self._vector.wait(1, (self._batch_wait_ms or 0.0) / 1000)
        env_id = np.array(sorted(self._vector.ready), np.int32)
        self._vector.ready.clear()
        return env_id, self._result(env_id, self._vector.failed[env_id])


class AsyncGymnasiumEnv(NotWaiting, _Adapter):
    """Host environments in worker processes that do not wait for each other."""
