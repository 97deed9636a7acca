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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.errors import RunnersLost
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import compression
from jrl.rollout.collect import FAILURES
from jrl.rollout.ray_cluster import RunnerOptions
from jrl.rollout.runner_group import Runner, RunnerGroup, received, sendable
from jrl.rollout.source import Parts
from jrl.types import Episodes, Key, PyTree, Rollout

__all__ = ["EnvRunners", "RunnerOptions", "RunnersLost"]


# ---------------------------------------------------------------- in the process of a runner


class Host:
    """Holds the source of a runner. With a `codec`, it sends observations as `compression.pack` makes them."""

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
        # uploaded once, not at each of the T steps
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


# ---------------------------------------------------------------- whose turn it is, and where it stands


class Part(NamedTuple):
    """One runner's rollout, as it came."""

    runner: int  # its index
    restarts: int  # runners that had the index before
    number: int  # rollouts that were ordered from it before this one
    version: int  # the call of `next` whose weights acted
    rollout: Rollout
    episodes: Episodes
    metrics: Mapping[str, float]


class Slots:
    """Blocks of columns and the parts that stand in them, each with whether it goes on from the part before."""

    def __init__(self, num: int):
        self._last: list[Any] = [None] * num

    def assign(self, parts: Sequence[Part]) -> list[tuple[Part | None, bool]]:
        """Returns (part or None, goes on) of each block. A part takes the block of its runner's part in the latest
        call, else its runner's own block, else a free one."""
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
    """Returns the newest version that may be taken next, if every part is to be taken at most `lag` calls after its
    own.

    What is of version v or older has to be taken by call v + lag, and there are `left` places in this call and
    `per_call` in each later one. As long as these are more than the parts, anything may be taken first.

    Args:
      versions: of the parts that are under way: at most per_call * lag of them.
      call: the present call.
      left: parts that this call still takes.
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
    """K sources in processes of their own as one; a Source.

    Synchronous: every call orders one rollout of each runner with the weights of this call and waits for all of them;
    the result does not depend on which comes first. Asynchronous: every runner always has rollouts on order, with the
    newest weights there were; a call takes K parts, one of each runner, if need be two of a quick one that would have
    to wait in place of one of a slow one, but never one that is more than `lag` updates old: before that it waits for
    the slow one.

    The columns of a runner that fails are masked (mask False) from then on, or until another has started in its place,
    unless the options say that the run ends. A runner has proven that it can work when any rollout has come.

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
      agents: of each environment, where it has several.
      stand_in: whether a quick runner stands in for a slow one, whose columns then do not go on. For replay, which
        needs consecutive steps, none does, unless the other is gone.
      compress: observations on their way from the runners, without loss: see `rollout.compression`.
    Raises:
      InputError: the cluster has no place for them, or cannot be reached.
      RunnersLost: by `next`, `reset`, `foreach_worker` and the setter of `columns`.
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
            raise ValueError(f"{num_envs} environments over {options.num} runners are not {size} each")
        self._join, self._lag, self._stand_in = join, lag or 0, stand_in
        self._in_flight = min(options.max_requests_in_flight, self._lag) if self._lag else 1
        # rows of each column: all, unless the runner's source says otherwise; of a block that nobody has filled none
        like = dataclasses.replace(like, count=np.zeros(size, np.int32))
        self._masked: Rollout = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        self._all = np.full(size, len(self._masked.mask), np.int32)
        self._fresh = jax.device_get(episodes.init(size, window, agents=agents))
        self._columns: list[episodes.EpisodeState] = [self._fresh] * options.num
        self._slots = Slots(options.num)
        self._calls = 0
        self._failures: dict[tuple[int, int], float] = {}  # so far, of each runner that there has been
        self._metrics: dict[str, float] = {}
        # of each block of columns of the latest rollout: index, restarts and the rollout's number, as in Part
        self.blocks: list[tuple[int, int, int] | None] = [None] * options.num
        self._codec = compression.codec() if compress else None
        part = sum(x.nbytes for x in jax.tree.leaves(self._masked))
        under_way = 2 * options.num * (self._in_flight + 2) * part
        super().__init__(Host, make, options, store=under_way, timers=timers)

    # ------------------------------------------------------------ rollouts

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the next T steps of every column; episodes of each block of columns, [K, ...]."""
        jax.block_until_ready((actor, key))  # the time of the update that made it, none of the stages
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
            # the latest of each runner, whose rollout may stand elsewhere, or not have come
            latest = map(episodes.empty_report, self._columns)
            reports = [now if told is None else _with_windows(told, now) for told, now in zip(reports, latest)]
            report = jax.tree.map(lambda *x: np.stack(x), *reports)
            rollout = self._join(rollouts)
        self._measure(parts)
        self._calls += 1
        return rollout, report

    def _take_all(self, order: tuple) -> list[Part]:
        """Takes one part of each runner that has started; of at least one."""
        self._forget(self._ready())  # there is something only if the last call was interrupted
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
        """Returns K parts, in the order in which they come."""
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
            if (part := self._part(*wanted)) is not None:
                parts.append(part)
        fill()
        return parts

    def _send(self, runner: Runner, order: tuple, number: int) -> None:
        with self._timers("send"):
            runner.order(runner.actor.next.remote(*order, number), self._calls)

    def _part(self, wanted: Sequence[Runner], spare: Sequence[Runner] = ()) -> Part | None:
        """Returns the rollout that comes first; None and arguments as `_event`."""
        if (found := self._event(wanted, spare)) is None:
            return None
        runner, request, (rollout, report, self._columns[runner.index], metrics) = found
        if self._codec:
            sent = compression.num_bytes(rollout) / max(1, int(np.count_nonzero(rollout.mask)))
            metrics = metrics | {"env_runners/bytes_per_step": sent}
            with self._timers("receive"):
                rollout = compression.unpack(rollout, self._masked.obs)
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
        # the statistics of a runner outlive it, but for the episodes that were in flight
        return jax.device_get(episodes.clear_running(self._columns[index])) if restarts else None, self._codec

    def _started(self, runner: Runner) -> None:
        if runner.restarts:
            self.recreated.append(runner.index)

    def _lose(self, runner: Runner) -> None:
        self._columns[runner.index] = self._fresh

    def _begin(self) -> None:
        """Waits for the runners that the run began with; of others, looks who has started meanwhile."""
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
            raise ValueError(f"statistics of {len(columns.window_next)} runners for {self._options.num}")
        self._columns = [jax.tree.map(lambda x, i=i: x[i], columns) for i in range(self._options.num)]
        self._forget(self._ready())
        self._each(lambda r: r.actor.call.remote(_set_columns, self._columns[r.index]))

    def reset(self, key: Key) -> None:
        """Resets all environments; rollouts that are on order are dropped."""
        sent = sendable(key)
        self._forget(self._ready())
        for index, columns in self._each(lambda r: r.actor.call.remote(_reset, *sent, r.index)).items():
            self._columns[index] = columns
