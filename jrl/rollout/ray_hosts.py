"""Rollouts from other processes, on this or other machines: environment runners, which are Ray actors.

    runners = EnvRunners(make, RunnerOptions(num=2), num_envs=16, like=like, join=join)
    rollout, episodes = runners.next(actor, key)
    runners.close()

Each runner has a source for its share of the columns and collects with the weights of the order. A new runner can
replace it without further state. Arrays are read from the object store without a copy.

Code in a runner (an environment, a function of `foreach_worker`) finds the caller's named Ray actors: after
`Counter.options(name="counter").remote()`, `ray.get_actor("counter")` is the same counter in every runner. Ray starts
in the namespace "jrl" unless the caller has started it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.errors import RunnersLost
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import compression
from jrl.rollout.ray_cluster import RunnerOptions
from jrl.rollout.runner_group import RunnerGroup, RunnerProcess, received, sendable
from jrl.rollout.source import FAILURES, Parts
from jrl.types import Episodes, Key, PyTree, Rollout

__all__ = ["EnvRunners", "RunnerOptions", "RunnersLost"]


# ---------------------------------------------------------------- in the process of a runner


class Host:
    """Actor with the source of a runner. With a `codec`, it sends observations packed by `compression.pack`."""

    def __init__(
        self,
        make: Callable[[int, int], Any],
        index: int,
        restarts: int,
        columns: episodes.EpisodeState | None,
        codec: str | None,
    ):
        self._source, self._codec = make(index, restarts), codec
        if columns is not None:
            self._source.columns = columns

    def started(self) -> None:
        pass

    def next(self, actor: PyTree, key: np.ndarray, impl: str, number: int):
        # upload the weights once, not at each of the T steps
        own = jax.random.fold_in(received(key, impl), number)
        rollout, report = self._source.next(jax.device_put(actor), own)
        rollout, report, columns = jax.device_get((rollout, report, self._source.columns))
        if self._codec is not None:
            rollout = compression.pack(rollout, self._codec)
        return rollout, report, columns, dict(self._source.metrics)

    def call(self, fn: Callable, *args: Any) -> Any:
        return fn(self._source, *args)

    def close(self) -> None:
        self._source.close()


def _reset(source, data: np.ndarray, impl: str, number: int) -> episodes.EpisodeState:
    source.reset(jax.random.fold_in(received(data, impl), number))
    return jax.device_get(source.columns)


def _set_columns(source, columns: episodes.EpisodeState) -> None:
    source.columns = columns


# ---------------------------------------------------------------- order and columns of the parts


class Part(NamedTuple):
    """Rollout of one runner."""

    runner: int  # index of the runner
    restarts: int  # number of earlier runners with that index
    number: int  # number of earlier rollouts ordered from the runner
    version: int  # number of the call of `next` whose weights acted
    rollout: Rollout
    episodes: Episodes
    metrics: Mapping[str, float]


class Slots:
    """Assignment of parts to blocks of columns, and whether each continues the block's previous part."""

    def __init__(self, num: int):
        self._last: list[Any] = [None] * num

    def assign(self, parts: Sequence[Part]) -> list[tuple[Part | None, bool]]:
        """Returns (part or None, whether it continues the previous part) of each block.

        A part takes the block of its runner's previous part, else its runner's own block, else a free one.
        """
        slots: list[Part | None] = [None] * len(self._last)
        others = []
        for part in parts:
            before = (part.runner, part.restarts, part.number - 1)
            if before in self._last:
                slots[self._last.index(before)] = part
            else:
                others.append(part)
        for part in others:
            slots[part.runner if slots[part.runner] is None else slots.index(None)] = part
        found: list[tuple[Part | None, bool]] = []
        for i, (slot, last) in enumerate(zip(slots, self._last)):
            if slot is None:
                self._last[i] = None
                found.append((None, False))
                continue
            found.append((slot, last == (slot.runner, slot.restarts, slot.number - 1)))
            self._last[i] = (slot.runner, slot.restarts, slot.number)
        return found


def newest_allowed(versions: Sequence[int], *, call: int, left: int, per_call: int, lag: int) -> int:
    """Returns the newest version that may be taken next if no part may be older than `lag` calls.

    Parts of version v or older must be taken by call v + lag. This call takes `left` more parts, and each later call
    `per_call`. While there are more places than parts, any part may be taken first.

    Args:
      versions: versions of the pending parts: at most per_call * lag.
      call: number of the present call.
      left: number of parts that this call still takes.
    """
    for version in sorted(set(versions)):
        places = left + per_call * (version + lag - call)
        if sum(v <= version for v in versions) >= places:
            return version
    return call


# ---------------------------------------------------------------- here


def _with_windows(report: Episodes, latest: Episodes) -> Episodes:
    own = report.agents
    if isinstance(own, Episodes):
        own = _with_windows(own, latest.agents)
    return dataclasses.replace(
        report, window_return=latest.window_return, window_length=latest.window_length, agents=own
    )


class EnvRunners(RunnerGroup, Parts):
    """K sources in separate processes as one; a Source.

    Synchronous: every call orders one rollout of each runner with the present weights and waits for all of them. The
      result does not depend on the order of arrival. Asynchronous: every runner always has pending rollouts with the
      newest weights at the time of the order. A call takes K parts, one of each runner. A fast runner may supply a
      second part instead of a slow one, but never a part more than `lag` updates old: then the call waits for the slow
      runner.

    The columns of a failed runner are masked until another runner replaces it, unless the options end the run. A runner
    counts as working once any rollout has arrived.

    Metrics: `rollout/policy_lag` and `rollout/policy_lag_max` in calls of `next`, `env_runners/num_healthy_workers`,
    `env_runners/num_restarts`, `env_runners/dropped` (lost rollouts), with `compress` also `env_runners/bytes_per_step`
    (as sent), and the means of the sources' metrics; for `env/failures` the sum. Stages: `wait`, `receive`, `join`,
    `send`.

    Args:
      make: (index, restarts) -> source of runner `index`, called in its process. `restarts`, the number of earlier
        runners with the index, should change the seeds. Pickled by Ray's cloudpickle.
      options: see RunnerOptions.
      num_envs: number of environments over all runners, a multiple of K.
      like: shapes and dtypes of one runner's rollouts [T, num_envs / K].
      join: K rollouts of numpy arrays, which may be read-only -> rollout of all columns.
      lag: maximum number of updates (calls of `next`) between acting and learning; None or 0: synchronous.
      timers: timers of the stages.
      window: number of latest episodes in each source's report.
      agents: number of agents per environment; 0: a single agent.
      stand_in: whether a fast runner may replace a slow one, whose columns are then discontinued. False for replay,
        which
        needs consecutive steps: then only a missing runner is replaced.
      compress: whether to compress observations from the runners, without loss: see `rollout.compression`.
    Raises:
      InputError: the cluster has no room for the runners, or cannot be reached.
      RunnersLost: from `next`, `reset`, `foreach_worker` and the setter of `columns`.
    """

    recreated: list[int]

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
        agents: int = 0,
        compress: bool = False,
        stand_in: bool = True,
    ):
        size = like.mask.shape[1]
        if num_envs != options.num * size:
            raise ValueError(f"num_envs: expected {options.num * size}, {size} per runner, got {num_envs}")
        self._join, self._lag, self._stand_in = join, lag or 0, stand_in
        self._in_flight = min(options.max_requests_in_flight, self._lag) if self._lag else 1
        # 0 rows in each column of a block without a part
        like = dataclasses.replace(like, count=np.zeros(size, np.int32))
        self._masked: Rollout = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        self._all = np.full(size, len(self._masked.mask), np.int32)
        self._initial_columns = jax.device_get(episodes.init(size, window, agents=agents))
        self._columns: list[episodes.EpisodeState] = [self._initial_columns] * options.num
        self._slots = Slots(options.num)
        self._calls = 0
        self._failures: dict[tuple[int, int], float] = {}  # environment failures of each runner so far
        self._metrics: dict[str, float] = {}
        # (runner, restarts, number) of each block of the latest rollout, see Part
        self.blocks: list[tuple[int, int, int] | None] = [None] * options.num
        self._codec = compression.codec() if compress else None
        part = sum(x.nbytes for x in jax.tree.leaves(self._masked))
        under_way = 2 * options.num * (self._in_flight + 2) * part
        super().__init__(Host, make, options, store=under_way, timers=timers)

    # ------------------------------------------------------------ rollouts

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the next T steps of every column, and the episodes of each block of columns, [K, ...]."""
        jax.block_until_ready((actor, key))  # the wait for the update belongs to none of the stages
        with self._timers("send"):
            weights = self._cluster.put(jax.device_get(actor))
            order = (weights, *sendable(key))
        self._begin()
        parts = self._take_ready(order) if self._lag else self._take_all(order)
        with self._timers("join"):
            rollouts, reports = [], []
            assigned = self._slots.assign(parts)
            self.blocks = [part and (part.runner, part.restarts, part.number) for part, _ in assigned]
            for part, goes_on in assigned:
                rollout = self._masked if part is None else part.rollout
                if part is not None and not goes_on:
                    rollout = dataclasses.replace(rollout, contiguous=np.zeros_like(self._masked.contiguous))
                if rollout.count is None:
                    rollout = dataclasses.replace(rollout, count=self._all)
                rollouts.append(rollout)
                reports.append(None if part is None else part.episodes)
            # windows of each runner's latest statistics, as its part may be missing or in another block
            latest = map(episodes.empty_report, self._columns)
            reports = [now if part is None else _with_windows(part, now) for part, now in zip(reports, latest)]
            report = jax.tree.map(lambda *x: np.stack(x), *reports)
            rollout = self._join(rollouts)
        self._measure(parts)
        self._calls += 1
        return rollout, report

    def _take_all(self, order: tuple) -> list[Part]:
        """Returns one part of each started runner; at least one part."""
        self._forget(self._ready())  # drops pending orders of an interrupted call
        parts: list[Part] = []
        while not parts:
            while not self._ready():
                self._event([])
            asked = self._ready()
            for runner in asked:
                self._send(runner, order, runner.index)
            while waiting := [r for r in asked if r.requests]:
                if (part := self._part(waiting)) is not None:
                    parts.append(part)
        return parts

    def _take_ready(self, order: tuple) -> list[Part]:
        """Returns K parts, in order of arrival."""
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
            # one part of each runner, so that columns continue; only idle runners replace others
            due = [r for r in heads if r.index not in taken]
            spare = [r for r in heads if r.index in taken]
            wanted = (due, spare if self._stand_in else ()) if due else (spare,)
            if (part := self._part(*wanted)) is not None:
                parts.append(part)
        fill()
        return parts

    def _send(self, runner: RunnerProcess, order: tuple, number: int) -> None:
        with self._timers("send"):
            runner.order(runner.actor.next.remote(*order, number), self._calls)

    def _part(self, wanted: Sequence[RunnerProcess], spare: Sequence[RunnerProcess] = ()) -> Part | None:
        """Returns the first rollout to arrive; None and arguments as for `_event`."""
        if (found := self._event(wanted, spare)) is None:
            return None
        runner, request, (rollout, report, self._columns[runner.index], metrics) = found
        if self._codec:
            sent = compression.num_bytes(rollout) / max(1, int(np.count_nonzero(rollout.mask)))
            metrics = metrics | {"env_runners/bytes_per_step": sent}
            with self._timers("receive"):
                rollout = compression.unpack(rollout, self._masked.obs, self._codec)
        if FAILURES in metrics:
            self._failures[runner.index, runner.restarts] = metrics[FAILURES]
        return Part(runner.index, runner.restarts, request.number, request.version, rollout, report, metrics)

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

    def _given(self, index: int, restarts: int) -> tuple:
        # a new runner inherits the statistics, without the unfinished episodes
        return jax.device_get(episodes.clear_running(self._columns[index])) if restarts else None, self._codec

    def _started(self, runner: RunnerProcess) -> None:
        if runner.restarts:
            self.recreated.append(runner.index)

    def _lose(self, runner: RunnerProcess) -> None:
        self._columns[runner.index] = self._initial_columns

    def _begin(self) -> None:
        """Waits for the initial runners to start; handles replacements that have started since, without waiting."""
        while any(r.restarts == 0 for r in self._starting()):
            self._event([])
        for _ in self._starting():
            self._event([], seconds=0.0)

    # ------------------------------------------------------------ the runners' sources

    @property
    def columns(self) -> episodes.EpisodeState:
        """Returns episode statistics [K, ...] after the latest rollouts; numpy."""
        return jax.tree.map(lambda *x: np.stack(x), *self._columns)

    @columns.setter
    def columns(self, columns: episodes.EpisodeState) -> None:
        columns = jax.device_get(columns)
        if len(columns.window_next) != self._options.num:
            raise ValueError(f"columns: expected {self._options.num} runners, got {len(columns.window_next)}")
        self._columns = [jax.tree.map(lambda x, i=i: x[i], columns) for i in range(self._options.num)]
        self._forget(self._ready())
        self._each(lambda r: r.actor.call.remote(_set_columns, self._columns[r.index]))

    def reset(self, key: Key) -> None:
        """Resets all environments; drops pending rollouts."""
        sent = sendable(key)
        self._forget(self._ready())
        for index, columns in self._each(lambda r: r.actor.call.remote(_reset, *sent, r.index)).items():
            self._columns[index] = columns
