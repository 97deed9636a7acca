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
from jrl.envs.context import EnvContext, Maker
from jrl.envs.step_faults import FIRST_STEPS, line, mend_of_import, own
from jrl.envs.vector import Infos, Vector
from jrl.envs.workers import Workers
from jrl.types import Array, EnvSpec, InputError, PyTree, Space, StepResult


def ids() -> tuple[str, ...]:
    """Every registered id; none where Gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError:
        return ()
    return tuple(gymnasium.registry)


def load_class(id: str) -> Callable[..., Any] | None:
    """What `package.module:Name` names, or was registered under the id; None if the id is of another form.

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
    """What is wrong, as far as can be told without making one: a class that is not there, an option that was."""
    errors: list[str] = []
    try:
        found = load_class(id)
    except InputError as e:
        errors += e.errors
    else:
        if found is not None and not contexts.takes_context(found, creator=_registered(id), options=options):
            errors += contexts.option_errors(id, found, options)
    if "vectorization" in options:
        errors.append(
            "env.options.vectorization: there is no such option any more: env.remote_worker_envs true gives each "
            "environment a process of its own"
        )
    return errors


def _registered(id: str) -> bool:
    return registry.registered(id) is not None


def _maker(id: str, context: EnvContext, horizon: int | None, soft_horizon: bool) -> Maker:
    """What makes the environments, here or in a process that has registered nothing of this one's.

    Raises:
      InputError: see `check`.
    """
    import gymnasium

    errors = check(id, context)
    if errors:
        raise InputError(*errors)
    limits: dict[str, Any] = {"horizon": horizon, "soft_horizon": soft_horizon}
    found = load_class(id)
    if found is not None:
        return contexts.maker(found, context, creator=_registered(id), **limits)
    name = id if id in gymnasium.registry else id.partition(":")[2]
    found = functools.partial(gymnasium.make, gymnasium.registry.get(name, id))
    return Maker(found, context, by_context=False, **limits)


def _in_workers(make: Maker, **settings: Any) -> Workers:
    import cloudpickle  # takes what the main module defines, too

    with contexts.by_value():
        pickled = cloudpickle.dumps(make)
    return Workers(pickled, **settings)


def _inside(fn: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    """`fn` of the environments that are in `jrl.envs.limits.Limited`, `masked.Masked` or both."""

    def call(around: Any) -> Any:
        for _ in range(depth):
            around = around.env
        return fn(around)

    if hasattr(fn, "for_index"):  # see `Workers.foreach_env`
        call.for_index = lambda i: _inside(fn.for_index(i), depth)  # type: ignore[attr-defined]
    return call


class _Adapter:
    """A vector between our spaces and Gymnasium's. `spec` is the environment's own, before any action transform."""

    def __init__(
        self,
        vector: Vector | Workers,
        num_envs: int,
        restart_failed: bool,
        horizon: int | None,
        soft_horizon: bool,
        mask_info: str | None,
    ):
        self._vector: Any = vector
        self._depth, self._goes_on = int(horizon is not None), soft_horizon  # depth: of what is around an environment
        self._restart_failed, self._was_reset = restart_failed, False
        try:
            seen, taken = spaces.observations(vector.observation_space), spaces.actions(vector.action_space)
            if self._mask(taken.space, mask_info):
                seen = spaces.observations(vector.observation_space)
            seen, taken = spaces.with_flat_mask(seen, taken)
        except BaseException:
            vector.close()
            raise
        self._observe, self._taken = seen.convert, taken.convert
        limit = min((n for n in (vector.max_episode_steps, horizon) if n is not None), default=None)
        self.spec = EnvSpec(seen.space, taken.space, num_envs, limit)

    def _mask(self, action: Space, name: str | None) -> bool:
        """Whether the infos have a mask, which the environments then show."""
        vector, id = self._vector, self._vector.restarts.id
        if not masks.looked_for(name, vector.observation_space, action, id):
            return False
        found = masks.shape(name, vector.look(), action, id)
        if found is not None:
            vector.mask(*found, limited=self._depth > 0)
            self._depth += 1
        return found is not None

    def _action(self, action: PyTree, num_envs: int) -> Any:
        """[n, *] in the environment's own dtypes and shapes. Raises ValueError unless it is of `spec.action`."""
        action = spaces.on_host(action)
        spaces.check_action(self.spec.action, num_envs, action)
        return self._taken(action)

    def _result(self, rows: Any, failed: np.ndarray) -> StepResult:
        """The latest step of all environments, or of `rows` [n]: copies."""
        block = self._vector.block
        every = slice(None) if rows is None else rows
        return StepResult(
            self._observe(block.observations(rows)),
            block.reward[every].astype(np.float32),
            np.array(block.terminated[every]),
            np.array(block.truncated[every]),
            failed if self._restart_failed else None,
        )

    @property
    def infos(self) -> Infos:
        """What the environments say beside the results of the latest step, once it is wanted."""
        return self._vector.infos

    @property
    def num_restarts(self) -> int:
        """How many environments failed and were made anew."""
        return self._vector.restarts.count

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """What `fn(env)` returns for each environment, after the steps under way.

        In worker processes `fn` and what it returns travel pickled, and where it raises, a RuntimeError has its
        traceback. What an environment was made with: `jrl.envs.context.of(env)`.
        """
        return self._vector.foreach_env(_inside(fn, self._depth) if self._depth else fn)

    def _begin_anew(self) -> None:
        """Before a reset of all: those that stand at a soft horizon are reset, too."""
        if self._goes_on and self._was_reset:
            self._vector.foreach_env(lambda limited: limited.begin_anew())
        self._was_reset = True

    def close(self) -> None:
        """Closes the environments, and ends their processes within five seconds."""
        self._vector.close()


class GymnasiumEnv(_Adapter):
    """Host environments that wait for each other.

    Args:
      id, options: what Gymnasium, or the class that the id names, makes an environment of.
      num_envs, seed: B environments; i gets seed + i at the first reset.
      context: of environment 0, options included; None: they know of `options` only.
      horizon, soft_horizon: see `jrl.envs.limits`.
      mask_info: entry of the infos that joins the observation as `action_mask`; None: `action_mask`, where the infos
        of the first reset have one that fits the action space.
      remote: each in a process of its own.
      restart_failed: an environment that raises, or whose process ends or exceeds the time limit, is closed and made
        anew with another seed; `StepResult.failed` tells. One that fails eleven times in a row ends the run. Without
        it, the first failure does.
      step_timeout_s: the time limit of a step or reset, for worker processes, in seconds.
      check_steps: how many of the first steps of each are looked at: see `jrl.envs.step_faults`.
    Raises:
      InputError: no such environment, an option or a space that cannot be handled, an environment that cannot be made;
        by `reset` and `step`, one that does not keep to Gymnasium's interface in its first steps.
      EnvironmentFailed: by `reset` and `step`, an environment failed; the exception that it raised in this process,
        SystemExit included, is the cause.
    """

    def __init__(
        self,
        id: str,
        *,
        num_envs: int,
        seed: int,
        options: dict[str, Any],
        remote: bool = False,
        restart_failed: bool = False,
        step_timeout_s: float | None = None,
        context: EnvContext | None = None,
        horizon: int | None = None,
        soft_horizon: bool = False,
        mask_info: str | None = None,
        check_steps: int = FIRST_STEPS,
    ):
        make = _maker(id, context or EnvContext(options, num_envs=num_envs, seed=seed), horizon, soft_horizon)
        common: dict[str, Any] = {"id": id, "options": options, "num_envs": num_envs, "seed": seed}
        common |= {"restart_failed": restart_failed, "check_steps": check_steps}
        vector: Vector | Workers
        vector = _in_workers(make, step_timeout_s=step_timeout_s, **common) if remote else Vector(make, **common)
        super().__init__(vector, num_envs, restart_failed, horizon, soft_horizon, mask_info)

    def reset(self) -> PyTree:
        """[B, *] observations of new episodes; the first reset seeds the environments."""
        self._begin_anew()
        self._vector.reset()
        return self._observe(self._vector.block.observations())

    def step(self, action: PyTree) -> StepResult:
        """Raises ValueError for actions of another shape, dtype or range than `spec.action`."""
        failed = self._vector.step(self._action(action, self.spec.num_envs))
        return self._result(None, failed)


class AsyncGymnasiumEnv(_Adapter):
    """Host environments in worker processes that do not wait for each other; a `jrl.types.AsyncEnv`.

    `recv` waits for one, then `batch_wait_ms` milliseconds for others. One that is made anew holds up no other: its
    first observation comes when it is ready. Arguments otherwise as `GymnasiumEnv`.
    """

    least = 1

    def __init__(
        self,
        id: str,
        *,
        num_envs: int,
        seed: int,
        options: dict[str, Any],
        batch_wait_ms: float,
        context: EnvContext | None = None,
        horizon: int | None = None,
        soft_horizon: bool = False,
        mask_info: str | None = None,
        **limits: Any,
    ):
        make = _maker(id, context or EnvContext(options, num_envs=num_envs, seed=seed), horizon, soft_horizon)
        workers = _in_workers(make, id=id, options=options, num_envs=num_envs, seed=seed, **limits)
        restart_failed = limits.get("restart_failed", False)
        super().__init__(workers, num_envs, restart_failed, horizon, soft_horizon, mask_info)
        self._workers, self.batch_size, self._more_s = workers, num_envs, batch_wait_ms / 1000

    def reset(self) -> None:
        """Begins new episodes in all, when the steps under way are done; their results are lost."""
        self._begin_anew()
        self._workers.begin()

    def send(self, action: PyTree, env_id: Array) -> None:
        """Actions [n, *] for the environments `env_id` [n] i32.

        Raises:
          ValueError: another shape, dtype or range than `spec.action`, or an environment that is under way.
        """
        index = np.asarray(env_id).tolist()
        action = self._action(action, len(index))
        under_way = self._workers.busy | self._workers.ready
        if len(set(index)) < len(index) or not under_way.isdisjoint(index):
            raise ValueError(f"environments {index}: {sorted(under_way)} are under way, and no two actions go to one")
        self._workers.send(action, index)

    def recv(self) -> tuple[np.ndarray, StepResult]:
        """`env_id` [n] i32, ascending, and results [n, *]. Raises RuntimeError where none is under way."""
        if not self._workers.busy and not self._workers.ready:
            raise RuntimeError("no environment is under way: reset, or send actions")
        self._workers.wait(1, self._more_s)
        env_id = np.array(sorted(self._workers.ready), np.int32)
        self._workers.ready.clear()
        return env_id, self._result(env_id, self._workers.failed[env_id])
