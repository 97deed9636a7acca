"""Sources of the training loop: `next(actor, key) -> (Rollout, Episodes)`, `reset(key)` and `close()`.

`make` returns the source of one vector of environments, `Pools` joins several, `Async` collects in a thread.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jrl.envs.context import EnvContext
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import unroll
from jrl.rollout.source import FAILURES, Parts, Source
from jrl.types import ActOut, AsyncEnv, Env, Episodes, InputError, JaxEnv, Key, PyTree, Rollout

if TYPE_CHECKING:
    from jrl.envs import task as tasks


class JaxSource(Source):
    """Rollouts of a JaxEnv as a separate program on `device`. Other arguments as for `rollout.unroll.make`."""

    def __init__(
        self, env: JaxEnv, act: Callable[..., ActOut], *, key: Key, device: jax.Device | None = None, **options
    ):
        functions = unroll.make(env, act, **options)
        self._env = env
        self._task: PyTree = None  # latest task of `set_task`
        step = jax.jit(functions.step, donate_argnums=0)
        self._traced = step
        self._step = step if env.pure else outside_compile_cache(step)
        # compiled, as in the fused program: op by op, numbers are rounded differently
        self._init = jax.jit(functions.init) if env.pure else functions.init
        self.device = device or jax.local_devices()[0]
        self._metrics: dict[str, float] = {}
        self._state: unroll.UnrollState
        self.reset(key)

    @property
    def columns(self) -> episodes.EpisodeState:
        return self._state.columns

    @columns.setter
    def columns(self, columns: episodes.EpisodeState) -> None:
        self._state = dataclasses.replace(self._state, columns=jax.device_put(columns, self.device))

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        self._state, rollout, report = self._step(self._state, actor, key)
        return rollout, report

    def like(self, actor: PyTree, key: Key) -> Rollout | None:
        return jax.eval_shape(self._traced, self._state, actor, key)[1]

    def reset(self, key: Key) -> None:
        # committed to the device like the outputs of a step, because other inputs would compile again
        self._state = jax.device_put(self._init(key), self.device)
        if self._task is not None:
            self.set_task(self._task)

    def discontinue(self) -> None:
        self._state = dataclasses.replace(self._state, started=jnp.zeros_like(self._state.started))

    def get_task(self) -> PyTree:
        """Returns the task of all environments. Raises InputError if they have no task."""
        from jrl.envs import task as tasks

        return tasks.get_in(self._state, self._env)

    def set_task(self, task: PyTree) -> None:
        """Sets the task of all environments from the next step on; a reset keeps it, except in its first observation.

        Raises:
          InputError: the environments have no task, or it does not fit.
        """
        from jrl.envs import task as tasks

        self._state = tasks.set_in(self._state, self._env, task)
        self._task = task

    def apply_task(self, fn: "tasks.TaskFn", result: dict[str, Any], context: EnvContext) -> list[Any]:
        from jrl.envs import task as tasks

        return [tasks.call_task_fn(fn, result, context, tasks.Handle(self.get_task, self.set_task))]

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn` of one `jrl.envs.task.Handle` for all environments, if they have a task."""
        if self._env.set_task is not None:
            from jrl.envs import task as tasks

            return [fn(tasks.Handle(self.get_task, self.set_task))]
        raise InputError("foreach_env: expected environments that are Python objects, got environments in a program")

    def close(self) -> None:
        self._env.close()


def put(tree: PyTree, device: jax.Device) -> PyTree:
    """Copies leaves to the device unless all are there: `jax.device_put` takes 10 us per leaf even then."""
    here = SingleDeviceSharding(device)
    is_here = lambda x: isinstance(x, jax.Array) and x.committed and x.sharding == here
    return tree if all(map(is_here, jax.tree.leaves(tree))) else jax.device_put(tree, device)


def outside_compile_cache(fn: Callable) -> Callable:
    """Returns the jitted `fn`; its first call compiles without writing to the persistent cache.

    An EnvPool program contains the address of its pool, so no other process could use the cache entry.
    """
    compiled = False

    def call(*args):
        nonlocal compiled
        if compiled:
            return fn(*args)
        with _compiling:  # the setting is global
            before = getattr(jax.config, _SECONDS_UNTIL_CACHED)
            jax.config.update(_SECONDS_UNTIL_CACHED, float("inf"))
            try:
                out = fn(*args)
            finally:
                jax.config.update(_SECONDS_UNTIL_CACHED, before)
        compiled = True
        return out

    return call


_SECONDS_UNTIL_CACHED = "jax_persistent_cache_min_compile_time_secs"
_compiling = threading.Lock()


def make(
    env: JaxEnv | Env | AsyncEnv,
    act: Callable[..., ActOut],
    *,
    key: Key,
    timers: Timers | None = None,
    device: jax.Device | None = None,
    **options,
) -> Source:
    """Returns the source for the kind of environment; a host environment's source acts on the actor's device."""
    from jrl.rollout.collect import HostCollector

    if isinstance(env, JaxEnv):
        return JaxSource(env, act, key=key, device=device, **options)
    if isinstance(env, AsyncEnv):
        from jrl.rollout.collect_async import AsyncCollector

        return AsyncCollector(env, act, timers=timers, **options)
    return HostCollector(env, act, timers=timers, **options)


# ---------------------------------------------------------------- threads


class _Thread:
    """Runs calls in order, in its own thread."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        # daemon, so that a hanging environment does not keep the process alive
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, fn: Callable, *args: Any) -> concurrent.futures.Future:
        """Queues a call; the future has its result, or its exception with the thread's traceback."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((future, fn, args))
        return future

    def _run(self) -> None:
        while order := self._calls.get():
            future, fn, args = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn(*args))
            except BaseException as e:  # raised in the caller by the future
                future.set_exception(e)
            del order, future, fn, args  # else the latest rollout stays in memory until the next call

    def close(self) -> None:
        """Waits up to `_PATIENCE` seconds for the current call; cancel the queued calls first."""
        self._calls.put(None)
        self._thread.join(_PATIENCE)


_PATIENCE = 2.0  # seconds for the current call when a thread is closed


class Pools(Parts):
    """Several sources of neighbouring columns as one; each acts on its own device in its own thread.

    Args:
      parts: K sources, in column order.
      devices: device of each source.
      join: K rollouts -> one rollout of all columns.
      stack: K trees -> one tree with leaves [K, ...].
    """

    def __init__(
        self,
        parts: Sequence[Source],
        *,
        devices: Sequence[jax.Device],
        join: Callable[[Sequence[Rollout]], Rollout],
        stack: Callable[[Sequence[PyTree]], PyTree],
    ):
        self._parts, self._devices, self._join, self._stack = list(parts), list(devices), join, stack
        # no thread for a single part: it would cost a few percent of a short rollout
        self._threads = [_Thread(f"jrl-collect-{i}") for i in range(len(self._parts))] if len(self._parts) > 1 else []

    def _each(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        if not self._threads:
            return [call() for call in calls]
        orders = [thread.call(call) for thread, call in zip(self._threads, calls)]
        return [order.result() for order in orders]

    @property
    def columns(self) -> episodes.EpisodeState:
        found = [part.columns for part in self._parts]
        return self._stack(found) if len(found) > 1 else found[0]

    @columns.setter
    def columns(self, columns: episodes.EpisodeState) -> None:
        for i, part in enumerate(self._parts):
            part.columns = jax.tree.map(lambda x, i=i: x[i], columns) if len(self._parts) > 1 else columns

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the parts; counts of failures are summed."""
        found = [part.metrics for part in self._parts]
        total = {name: sum(m.get(name, 0.0) for m in found) for m in found for name in m}
        return {name: x if name == FAILURES else x / len(found) for name, x in total.items()}

    def drain(self) -> dict[str, float]:
        return {name: x for part in self._parts for name, x in part.drain().items()}

    @property
    def infos(self) -> list[Any] | None:
        """Returns [T][B] of the latest rollout, see FromHost; None where a part has none."""
        found = [part.infos for part in self._parts]
        if len(found) == 1 or any(rows is None for rows in found):
            return found[0] if len(found) == 1 else None
        return [_side_by_side(rows) for rows in zip(*found)]

    @property
    def reset_infos(self) -> Any:
        found = [part.reset_infos for part in self._parts]
        if len(found) == 1 or any(row is None for row in found):
            return found[0] if len(found) == 1 else None
        return _side_by_side(found)

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        if not self._threads:
            rollout, report = self._parts[0].next(put(actor, self._devices[0]), key)
            return self._join([rollout]), report

        def collect(i: int) -> tuple[Rollout, Episodes]:
            here = jax.device_put((actor, jax.random.fold_in(key, i)), self._devices[i])
            return self._parts[i].next(*here)

        made = self._each([functools.partial(collect, i) for i in range(len(self._parts))])
        return self._join([rollout for rollout, _ in made]), self._stack([report for _, report in made])

    def like(self, actor: PyTree, key: Key) -> Rollout | None:
        return self._parts[0].like(actor, key) if len(self._parts) == 1 else None

    def reset(self, key: Key) -> None:
        def again(i: int) -> None:
            self._parts[i].reset(jax.random.fold_in(key, i))

        self._each([functools.partial(again, i) for i in range(len(self._parts))])

    def foreach_worker(self, fn: Callable[[Source], Any]) -> list[Any]:
        """Returns `fn` of each part, in its thread."""
        return self._each([functools.partial(fn, part) for part in self._parts])

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [x for found in self.foreach_worker(lambda part: part.foreach_env(fn)) for x in found]

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
        for part in self._parts:
            part.close()


def _side_by_side(rows: Sequence[Any]) -> list[Any]:
    """Returns the infos of neighbouring columns; those of a pool go by environment."""
    return [row[i] for row in rows for i in range(len(row))]


@jax.jit
def copied(actor: PyTree) -> PyTree:
    """Copies an actor for a thread: the learner's own arrays are donated to its next update, perhaps before they are
    read.
    """
    return jax.tree.map(jnp.copy, actor)


class _Order(NamedTuple):
    made: concurrent.futures.Future
    version: int  # updates before the weights that act in it


class Async(Parts):
    """Collects in a thread while the caller learns.

    Call n of `next` orders rollout n + lag, to be made with the actor of this call, and returns rollout n. Once the
    pipe is full every rollout is made by weights `lag` updates old, and no call depends on which thread was quicker: a
    run is as reproducible as one that waits. Metric `rollout/policy_lag`. An exception in the thread is raised by the
    call that would have returned the rollout.

    Args:
      source: of the rollouts.
      lag: at least 1, rollouts that are under way while one is learned from. 1 is enough to keep one thread busy; more
        help where the time to collect varies.
      timers: get `collect`, the time of the thread.
    """

    def __init__(self, source: Source, *, lag: int, timers: Timers | None = None):
        if lag < 1:
            raise ValueError(f"lag: expected at least 1, got {lag}")
        self._source, self._lag, self._timers = source, lag, timers or Timers()
        self._thread = _Thread("jrl-async")
        self._orders: collections.deque[_Order] = collections.deque()
        self._calls = 0
        self._metrics: dict[str, float] = {}
        self.infos: Any = None  # see `Source`
        self.reset_infos: Any = None

    def _collect(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes, dict[str, float], Any]:
        start = time.perf_counter()
        rollout, report = self._source.next(actor, key)
        jax.block_until_ready(rollout)  # else the thread would run ahead of the device
        self._timers.add("collect", time.perf_counter() - start)
        infos = self._source.infos, self._source.reset_infos
        return rollout, report, self._source.metrics, infos

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        actor = copied(actor)
        for i in range(self._lag + 1) if self._calls == 0 else (self._lag,):
            order = self._thread.call(self._collect, actor, jax.random.fold_in(key, i))
            self._orders.append(_Order(order, self._calls))
        order, version = self._orders.popleft()
        rollout, report, metrics, (self.infos, self.reset_infos) = order.result()
        self._metrics = {**metrics, "rollout/policy_lag": float(self._calls - version)}
        self._calls += 1
        return rollout, report

    @property
    def columns(self) -> episodes.EpisodeState:
        """Waits for the pending rollouts; returns the episode statistics after them."""
        return self._thread.call(lambda: self._source.columns).result()

    @columns.setter
    def columns(self, columns: episodes.EpisodeState) -> None:
        self._thread.call(setattr, self._source, "columns", columns).result()

    def reset(self, key: Key) -> None:
        """Resets the source and drops the pending rollouts."""
        self._drop()
        self._thread.call(self._source.reset, key).result()

    def foreach_worker(self, fn: Callable[[Source], Any]) -> list[Any]:
        """Returns `fn` of each part of the source, after the pending rollouts."""
        return self._thread.call(lambda: self._source.foreach_worker(fn)).result()

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self._thread.call(lambda: self._source.foreach_env(fn)).result()

    def _drop(self) -> None:
        for order in self._orders:
            order.made.cancel()
        self._orders.clear()
        self._calls = 0

    def close(self) -> None:
        self._drop()
        self._thread.close()
        self._source.close()
