"""Collecting and learning as two compiled programs, for host environments and for user code in between."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jrl.learn import parallel
from jrl.learn.learner import Learner
from jrl.learn.program import LoopState, Program, Role, empty_replay, over_iterations, role_key
from jrl.metrics import episodes as episode_metrics
from jrl.metrics.timers import Timers
from jrl.rollout.source import Source
from jrl.types import Episodes, Key, Metrics, Rollout

# every n-th call is timed; timing waits for each stage, which costs more if the stages overlap
_TIMED_EVERY = {"collect": 16, "wait": 64}


class Staged(Program):
    """Collects and learns as two programs. Only some calls are timed; the others run without waiting.

    Args:
      learner: learner made with axis_name=parallel.AXIS.
      make_source: key -> source over all environments, for `init`.
      rows: T * B over all devices.
      stage: timer name: "collect", or "wait" if another thread or process collects.
      remake: (key, count) -> source with new environments, for `restart`; None: the environments continue.
      training_step: iteration as a function of a `Step`; None: `step.learn(step.sample())`. Its result is ignored.
    """

    def __init__(
        self,
        learner: Learner,
        make_source: Callable[[Key], Source],
        mesh: Mesh,
        *,
        rows: int,
        timers: Timers,
        stage: str = "collect",
        remake: Callable[[Key, int], Source] | None = None,
        training_step: Callable[["Step"], Any] | None = None,
    ):
        super().__init__(learner, mesh, rows=rows)
        self._make_source, self._remake = make_source, remake
        self._timers, self._stage, self._every = timers, stage, _TIMED_EVERY[stage]
        self.training_step = training_step
        self._seam = False  # whether the next rollout must not continue the latest
        self._source_key: Key | None = None
        self._waits = parallel.must_wait(mesh)
        self._is_lowered = False
        self._lowering: threading.Thread | None = None

    def init(self, seed: int) -> LoopState:
        def start(root):
            replay = empty_replay(self.learner, self.mesh.devices.size)
            return self.learner.init(role_key(root, Role.INIT)), replay, role_key(root, Role.ENV)

        out_specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.REPLICATED)
        state, replay, key = parallel.place_outputs(start, self.mesh, out_specs)(jax.random.key(seed))
        self._source_key = parallel.first_copy(key)
        self.source = self._make_source(self._source_key)
        return LoopState(state, self._initial_replay(replay), ())

    def advance(self, state: LoopState, seed: int, iteration: int, count: int = 1):
        assert self.source is not None
        if self.training_step is None:
            state, rollout, report = self.collect(state, seed, iteration)
            state, metrics = self.learn(state, rollout, seed, iteration)
            return state, {**metrics, **self.source.metrics}, report
        step = Step(self, state, seed, iteration)
        self.training_step(step)
        reports, learned = step._reports, step._learned
        if not reports:
            report = episode_metrics.empty_report(self.source.columns)
        else:
            report = reports[0] if len(reports) == 1 else episode_metrics.add_reports(reports)
        metrics = learned[0] if len(learned) == 1 else _mean(learned)
        return step.state, {**metrics, **self.source.metrics, **step.metrics}, report

    def collect(self, state: LoopState, seed: int, iteration: int, call: int = 0):
        timed, key = iteration % self._every == 1, self._keys(seed, iteration, call)[0]
        actor = self.actor(state)
        if timed:
            jax.block_until_ready(actor)
        start = time.perf_counter()
        assert self.source is not None
        if not self._is_lowered:
            self._lower_ahead(state, actor, key)
        rollout, report = self.source.next(actor, key)
        if self._seam:
            self._seam = False
            rollout = dataclasses.replace(rollout, contiguous=jnp.zeros_like(rollout.contiguous))
        if self.mesh.devices.size > 1:
            rollout = parallel.shard(rollout, self.mesh, parallel.ROLLOUT)
        if timed:
            jax.block_until_ready(rollout)
            self._timers.add(self._stage, (time.perf_counter() - start) * self._every)
        return state, rollout, report

    def _lower_ahead(self, state: LoopState, actor: Any, key: Key) -> None:
        """Traces and lowers learning in a thread while the collecting program compiles, which takes longer.

        The thread does not compile: meanwhile no program is written to the persistent cache, see
        `jrl.rollout.sources.outside_compile_cache`.
        """
        assert self.source is not None
        self._is_lowered = True
        like = self.source.like(actor, key)
        if like is None or self.mesh.devices.size > 1:
            return
        device = SingleDeviceSharding(self.mesh.devices.flat[0])
        # exactly the types and places of `learn`'s arguments; otherwise jax traces the program again
        shape = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        learned, replay = jax.tree.map(lambda x: shape(x, x.sharding), (state.learner, state.replay))
        rollout = jax.tree.map(lambda x: shape(x, device), like)

        def lower() -> None:
            with contextlib.suppress(Exception):  # the next call of `learn` raises it
                self._learning.lower(learned, replay, rollout, shape(key, None))

        self._lowering = threading.Thread(target=lower, name="jrl-lower", daemon=True)
        self._lowering.start()

    def learn(self, state: LoopState, rollout: Rollout, seed: int, iteration: int, call: int = 0):
        timed, key = iteration % self._every == 1, self._keys(seed, iteration, call)[1]
        start = time.perf_counter()
        if self._lowering is not None:
            self._lowering.join()
            self._lowering = None
        learned, replay, metrics = self._learning(state.learner, state.replay, rollout, key)
        if timed or self._waits:
            jax.block_until_ready(learned)
        if timed:
            self._timers.add("update", (time.perf_counter() - start) * self._every)
        return LoopState(learned, replay, ()), metrics

    def discontinue(self, state: LoopState) -> LoopState:
        self._seam = True
        return state

    def keep(self, state: LoopState) -> LoopState:
        assert self.source is not None
        return LoopState(self.learner.keep(state.learner), self._without_data(state.replay), self.source.columns)

    def place(self, state: LoopState) -> LoopState:
        assert self.source is not None
        self.source.columns = episode_metrics.clear_running(state.source)
        learned = parallel.replicate(self.learner.resume(state.learner), self.mesh)
        return LoopState(learned, parallel.shard(self._with_data(state.replay), self.mesh), ())

    def restart(self, count: int) -> None:
        if self._remake is None:
            return
        assert self.source is not None and self._source_key is not None
        columns = jax.device_get(self.source.columns)
        self.source.close()
        self.source = self._remake(jax.random.fold_in(self._source_key, count), count)
        self.source.columns = episode_metrics.clear_running(columns)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


class Step:
    """One iteration for a user's function that decides when to collect and learn.

    Attributes:
      state: LoopState; `learn` donates its buffers.
      seed, iteration: seed of the run, and number of earlier iterations.
      metrics: name -> scalar for the result row, in addition to the learner's metrics; initially empty.
    """

    def __init__(self, program: Program, state: LoopState, seed: int, iteration: int):
        self.state, self.seed, self.iteration = state, seed, iteration
        self.metrics: Metrics = {}
        self._program = program
        self._reports: list[Episodes] = []
        self._learned: list[Metrics] = []

    def sample(self) -> Rollout:
        """Collects the next rollout [T, B] with the present state. May be called any number of times."""
        number = self.seed, self.iteration, len(self._reports)
        self.state, rollout, report = self._program.collect(self.state, *number)
        self._reports.append(report)
        return rollout

    def learn(self, rollout: Rollout) -> Metrics:
        """Makes one step of the learner: on-policy all epochs on `rollout`, with replay all updates.

        Returns:
          Metrics on the device: reading one waits. An iteration reports the mean over its calls.
        """
        self.state, metrics = self._program.learn(self.state, rollout, self.seed, self.iteration, len(self._learned))
        self._learned.append(metrics)
        return metrics


def _mean(calls: list[Metrics]) -> Metrics:
    names = list(dict.fromkeys(name for metrics in calls for name in metrics))
    stack = lambda name: jnp.stack([jnp.asarray(m[name]) for m in calls if name in m])
    return {name: over_iterations({name: stack(name)})[name] for name in names}
