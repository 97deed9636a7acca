"""Rollouts from other processes, on this or other machines: environment runners, which are Ray actors.

    runners = EnvRunners(make, RunnerOptions(num=2), num_envs=16, like=like, join=join)
    rollout, episodes = runners.next(actor, key)
    runners.close()

Each runner holds a source of its share of the columns, collects with the weights that come with the order, and keeps
nothing that a new one could not do without. Arrays are read where the object store has them, without a copy.

Code in a runner (an environment, a function given to `foreach_worker`) finds the caller's named Ray actors: after
`Counter.options(name="counter").remote()`, `ray.get_actor("counter")` is the same counter in every runner. Ray is begun
in the namespace "jrl" unless the caller has begun it.
"""

import collections
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.errors import RunnersLost
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import compression, ray_cluster
from jrl.rollout.collect import FAILURES
from jrl.rollout.ray_cluster import Cluster, Failure
from jrl.rollout.runner_health import Part, Runner, RunnerOptions, Slots, newest_allowed
from jrl.rollout.source import Parts
from jrl.types import Episodes, Key, PyTree, Rollout

__all__ = ["EnvRunners", "RunnerOptions", "RunnersLost"]

_STORE = 128 * 2**20  # bytes of the object store beside rollouts: weights, mostly

# of a block of columns that nobody has filled; its windows are put in
_NO_EPISODES = Episodes(
    count=np.zeros((), np.int32),
    return_sum=np.zeros((), np.float32),
    return_min=np.full((), np.inf, np.float32),
    return_max=np.full((), -np.inf, np.float32),
    length_sum=np.zeros((), np.int32),
    steps=np.zeros((), np.int32),
    window_return=np.empty(0),
    window_length=np.empty(0),
)


class _Request(NamedTuple):
    ref: Any  # ray.ObjectRef of `Host.next`
    version: int
    number: int


@dataclasses.dataclass
class _Runner(Runner):
    requests: collections.deque[_Request] = dataclasses.field(default_factory=collections.deque)
    ordered: int = 0


class EnvRunners(Parts):
    """K sources in processes of their own as one; a Source.

    Synchronous: every call orders one rollout of each runner with the weights of this call and waits for all of them;
    the result does not depend on which comes first. Asynchronous: every runner always has rollouts on order, with the
    newest weights there were; a call takes K parts, one of each runner, if need be two of a quick one that would have
    to wait in place of one of a slow one, but never one that is more than `lag` updates old: before that it waits for
    the slow one.

    A runner fails when it raises, when its process ends, or when it does not answer in time (it is killed). By the
    options this ends the run, or its columns are void (mask False) from then on, or until another has started in its
    place. Runners that fail before any rollout has come are not replaced for ever: when each has failed once, it ends.

    Metrics: `rollout/policy_lag` and `rollout/policy_lag_max` in calls of `next`, `env_runners/num_healthy_workers`,
    `env_runners/num_restarts`, `env_runners/dropped` (rollouts that were ordered and lost), with `compress` also
    `env_runners/bytes_per_step` (of rollouts as they were sent), and those of the runners' sources: their means, of
    `env/failures` the sum. Stages: `wait` for the runners; `receive`, `join`, `send`.

    Args:
      make: (index, restarts) -> the source of runner `index`, called in its process; `restarts` counts those that had
        the index before, and is to give other seeds. Pickled by Ray's cloudpickle.
      options: see there.
      num_envs: over all runners, a multiple of K.
      like: shapes and dtypes of one runner's rollouts [T, num_envs / K].
      join: K rollouts of numpy arrays, perhaps read-only -> the rollout of all columns.
      lag: most updates (calls of `next`) between weights and the update that learns from what they did; None or 0:
        synchronous.
      timers: where stages are timed.
      window: the latest so many episodes each runner's source reports on.
      stand_in: whether a quick runner stands in for a slow one, whose columns then do not go on. For replay, which
        needs consecutive steps, none does, unless the other is gone.
      compress: observations on their way from the runners, without loss: see `rollout.compression`.
    Raises:
      InputError: the cluster has no place for them, or cannot be reached.
      RunnersLost: by `next`, `reset`, `foreach_worker` and the setter of `columns`.
    """

    def __init__(
        self,
        make: Callable[[int, int], Any],
        options: RunnerOptions,
        *,
        num_envs: int,
        like: Rollout,
        join: Callable[[Sequence[Rollout]], Rollout],
        lag: int | None = None,
        timers: Timers | None = None,
        window: int = episodes.WINDOW,
        compress: bool = False,
        stand_in: bool = True,
    ):
        import ray

        options.check()
        size = like.mask.shape[1]
        if num_envs != options.num * size:
            raise ValueError(f"{num_envs} environments over {options.num} runners are not {size} each")
        self._make, self._options, self._join = make, options, join
        self._lag, self._timers, self._stand_in = lag or 0, timers or Timers(), stand_in
        self._in_flight = min(options.max_requests_in_flight, self._lag) if self._lag else 1
        # rows of each column: all, unless the runner's source says otherwise; of a block that nobody has filled none
        like = dataclasses.replace(like, count=np.zeros(size, np.int32))
        self._void: Rollout = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        self._all = np.full(size, len(self._void.mask), np.int32)
        fresh = jax.device_get(episodes.init(size, window))
        self._columns: list[episodes.Columns] = [fresh] * options.num
        self._slots = Slots(options.num)
        self._runners: dict[int, _Runner] = {}  # those that live, by index
        self._calls = self._restarts = self._dropped = 0
        self._failures: dict[tuple[int, int], float] = {}  # so far, of each runner that there has been
        self._answered = self._closed = False  # a rollout has come from any of them
        self._metrics: dict[str, float] = {}
        self.recreated: list[int] = []  # runners that have started in the place of failed ones; readers empty it
        # of each block of columns of the latest rollout: index, restarts and the rollout's number, as in Part
        self.blocks: list[tuple[int, int, int] | None] = [None] * options.num
        part = sum(x.nbytes for x in jax.tree.leaves(self._void))
        self._packed, codec = compress, compression.codec() if compress else None
        self._cluster = Cluster(ray, options, 2 * options.num * (self._in_flight + 2) * part + _STORE, codec)
        try:
            for index in range(options.num):
                self._start(index, 0)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ rollouts

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """The next T steps of every column; episodes of each block of columns, [K, ...]."""
        jax.block_until_ready((actor, key))  # the time of the update that made it, none of the stages
        with self._timers("send"):
            weights = self._cluster.put(jax.device_get(actor))
            order = (weights, np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key)))
        self._begin()
        parts = self._take_ready(order) if self._lag else self._take_all(order)
        with self._timers("join"):
            rollouts, reports = [], []
            assigned = self._slots.assign(parts)
            self.blocks = [part and (part.runner, part.restarts, part.number) for part, _ in assigned]
            for part, goes_on in assigned:
                rollout = self._void if part is None else part.rollout
                if part is not None and not goes_on:
                    rollout = dataclasses.replace(rollout, contiguous=np.zeros_like(self._void.contiguous))
                if rollout.count is None:
                    rollout = dataclasses.replace(rollout, count=self._all)
                rollouts.append(rollout)
                reports.append(_NO_EPISODES if part is None else part.episodes)
            # the latest of each runner, whose rollout may stand elsewhere, or not have come
            windows = [(c.window_return, c.window_length) for c in self._columns]
            reports = [dataclasses.replace(r, window_return=w, window_length=n) for r, (w, n) in zip(reports, windows)]
            report = jax.tree.map(lambda *x: np.stack(x), *reports)
            rollout = self._join(rollouts)
        self._measure(parts)
        self._calls += 1
        return rollout, report

    def _take_all(self, order: tuple) -> list[Part]:
        """One part of each runner that has started; of at least one."""
        self._forget()  # there is something only if the last call was interrupted
        parts: list[Part] = []
        while not parts:
            while not self._ready():
                self._event([])
            asked = self._ready()
            for runner in asked:
                self._send(runner, order, runner.index)
            while waiting := [r for r in asked if r.requests]:
                if (part := self._event(waiting)) is not None:
                    parts.append(part)
        return parts

    def _take_ready(self, order: tuple) -> list[Part]:
        """K parts, in the order in which they come."""
        parts: list[Part] = []
        places, sent = self._options.num, 0

        def fill() -> None:
            nonlocal sent
            for runner in self._ready():
                while len(runner.requests) < self._in_flight:
                    self._send(runner, order, sent)
                    sent += 1

        while len(parts) < places:
            fill()
            heads = [r for r in self._ready() if r.requests]
            under_way = [request.version for r in heads for request in r.requests]
            newest = newest_allowed(
                under_way, call=self._calls, left=places - len(parts), per_call=places, lag=self._lag
            )
            taken = {part.runner for part in parts}
            heads = [r for r in heads if r.requests[0].version <= newest]
            heads.sort(key=lambda r: (r.requests[0].version, r.index))
            # one of each, so that columns go on; a runner stands in for another only when it has nothing left to do
            due = [r for r in heads if r.index not in taken]
            spare = [r for r in heads if r.index in taken]
            wanted = (due, spare if self._stand_in else ()) if due else (spare,)
            if (part := self._event(*wanted)) is not None:
                parts.append(part)
        fill()
        return parts

    def _send(self, runner: _Runner, order: tuple, number: int) -> None:
        with self._timers("send"):
            if not runner.requests:
                runner.since = time.monotonic()
            ref = runner.actor.next.remote(*order, number)
            runner.requests.append(_Request(ref, self._calls, runner.ordered))
            runner.ordered += 1

    def _measure(self, parts: Sequence[Part]) -> None:
        lags = [self._calls - part.version for part in parts]
        names = {name for part in parts for name in part.metrics} - {FAILURES}
        found = {name: [part.metrics[name] for part in parts if name in part.metrics] for name in names}
        self._metrics = {
            **{name: sum(x) / len(x) for name, x in found.items()},
            **({FAILURES: sum(self._failures.values())} if self._failures else {}),
            "rollout/policy_lag": sum(lags) / len(lags),
            "rollout/policy_lag_max": float(max(lags)),
            "env_runners/num_healthy_workers": float(len(self._ready())),
            "env_runners/num_restarts": float(self._restarts),
            "env_runners/dropped": float(self._dropped),
        }

    # ------------------------------------------------------------ health

    def _ready(self) -> list[_Runner]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is None]

    def _starting(self) -> list[_Runner]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is not None]

    def _start(self, index: int, restarts: int) -> None:
        # the statistics of a runner outlive it, but for the episodes that were in flight
        columns = jax.device_get(episodes.restarted(self._columns[index])) if restarts else None
        actor, starting = self._cluster.start(self._make, index, restarts, columns)
        self._runners[index] = _Runner(index, restarts, actor, starting, time.monotonic())

    def _begin(self) -> None:
        """Waits for the runners that the run began with; of others, looks who has started meanwhile."""
        while any(r.restarts == 0 for r in self._starting()):
            self._event([])
        for _ in self._starting():
            self._event([], wait=False)

    def _event(self, wanted: Sequence[_Runner], spare: Sequence[_Runner] = (), wait: bool = True) -> Part | None:
        """The first rollout that comes from the runners `wanted`, or from one of `spare` that has answered all it was
        asked; None if something else came first: a runner has started, or failed."""
        watched = [*wanted, *self._starting()]
        refs = [r.requests[0].ref if r.starting is None else r.starting for r in watched]
        if not watched and wait:
            raise RunnersLost("no environment runner is left")
        patience = max(0.0, min(r.deadline(self._options) for r in watched) - time.monotonic()) if wait else 0.0
        with self._timers("wait"):
            found = self._cluster.wait([*refs, *(r.requests[-1].ref for r in spare)], patience)
        if found is None:
            for runner in watched:
                if time.monotonic() > (end := runner.deadline(self._options)):
                    what = "has not started" if runner.starting is not None else "has sent no rollout"
                    key = "health_check_timeout_s" if runner.starting is not None else "sample_timeout_s"
                    self._fail(runner, f"it {what} within {end - runner.since:g} s (env_runners.{key})")
            return None
        runner = [*watched, *spare][found]
        try:
            with self._timers("receive"):
                answer = self._cluster.get(runner.requests[0].ref if runner.starting is None else runner.starting)
        except Failure as e:
            self._fail(runner, str(e))
            return None
        runner.since = time.monotonic()
        if runner.starting is not None:
            runner.starting = None
            if runner.restarts:
                self.recreated.append(runner.index)
            return None
        request = runner.requests.popleft()
        rollout, report, self._columns[runner.index], metrics = answer
        if self._packed:
            sent = compression.num_bytes(rollout) / max(1, int(np.count_nonzero(rollout.mask)))
            metrics = metrics | {"env_runners/bytes_per_step": sent}
            with self._timers("receive"):
                rollout = compression.unpack(rollout, self._void.obs)
        runner.warm = self._answered = True
        if FAILURES in metrics:
            self._failures[runner.index, runner.restarts] = metrics[FAILURES]
        return Part(runner.index, runner.restarts, request.number, request.version, rollout, report, metrics)

    def _fail(self, runner: _Runner, cause: str) -> None:
        """Ends the runner. Starts another or goes on without, where the options say so."""
        options, name = self._options, f"environment runner {runner.index}"
        self._cluster.kill(runner.actor)
        self._dropped += len(runner.requests)
        runner.requests.clear()
        del self._runners[runner.index]
        if options.recreate_failed_env_runners:
            if not self._answered and self._restarts >= options.num:
                raise RunnersLost(f"{name} failed, as others did before, and no rollout has come yet: {cause}")
            if self._restarts >= options.max_restarts:
                raise RunnersLost(
                    f"{name} failed: {cause}\n{self._restarts} runners have been replaced already, and "
                    "env_runners.max_restarts allows no more"
                )
            self._restarts += 1
            warnings.warn(f"{name} failed, another starts in its place: {cause}", RuntimeWarning, stacklevel=2)
            self._start(runner.index, runner.restarts + 1)
        elif options.ignore_env_runner_failures:
            if not self._runners:
                raise RunnersLost(
                    f"{name}, the last one, failed: {cause}\n"
                    "env_runners.recreate_failed_env_runners=true starts another in the place of one that fails"
                )
            warnings.warn(f"{name} failed, the others go on without it: {cause}", RuntimeWarning, stacklevel=2)
            nothing = np.full_like(self._columns[runner.index].window_return, np.nan)
            self._columns[runner.index] = dataclasses.replace(
                episodes.restarted(self._columns[runner.index]), window_return=nothing, window_length=nothing
            )
        else:
            raise RunnersLost(
                f"{name} failed: {cause}\n"
                "env_runners.recreate_failed_env_runners=true starts another in its place, "
                "env_runners.ignore_env_runner_failures=true goes on without it"
            )

    def _forget(self) -> None:
        """Drops what is on order."""
        for runner in self._ready():
            self._dropped += len(runner.requests)
            runner.requests.clear()

    # ------------------------------------------------------------ the runners' sources

    def _call(self, fn: Callable, args: Callable[[int], tuple] = lambda index: ()) -> dict[int, Any]:
        """fn(source, *args(index)) of every healthy runner, by index, in order."""
        self._begin()
        # a runner answers in turn: after what is on order
        patience = self._options.sample_timeout_s * (1 + self._in_flight) + self._options.health_check_timeout_s
        calls = [(r, r.actor.call.remote(fn, *args(r.index))) for r in self._ready()]
        found = ray_cluster.answers(self._cluster, calls, patience, self._fail)
        return {runner.index: answer for runner, answer in found}

    def foreach_worker(self, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(source) in the process of every healthy runner, in their order; what it raises is raised here."""
        return list(self._call(fn).values())

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(environment) of every sub-environment of every healthy runner, in the order of columns."""
        return [x for found in self._call(ray_cluster.foreach_env, lambda _: (fn,)).values() for x in found]

    @property
    def columns(self) -> episodes.Columns:
        """Episode statistics [K, ...] after the latest rollouts; numpy."""
        return jax.tree.map(lambda *x: np.stack(x), *self._columns)

    @columns.setter
    def columns(self, columns: episodes.Columns) -> None:
        columns = jax.device_get(columns)
        if len(columns.window_next) != self._options.num:
            raise ValueError(f"statistics of {len(columns.window_next)} runners for {self._options.num}")
        self._columns = [jax.tree.map(lambda x, i=i: x[i], columns) for i in range(self._options.num)]
        self._forget()
        self._call(ray_cluster.set_columns, lambda index: (self._columns[index],))

    def reset(self, key: Key) -> None:
        """All environments to the start of an episode; rollouts that are on order are dropped."""
        data, kind = np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key))
        self._forget()
        for index, columns in self._call(ray_cluster.reset, lambda index: (data, kind, index)).items():
            self._columns[index] = columns

    def close(self) -> None:
        """Ends the runners, and Ray if it was begun here. May be called again."""
        if self._closed:
            return
        self._closed = True
        idle = [r.actor for r in self._ready() if not r.requests]
        self._cluster.close([r.actor for r in self._runners.values()], idle)
        self._runners.clear()
