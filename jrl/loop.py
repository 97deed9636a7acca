"""The one training loop: a generator of StepInfo over a Program, which collects and learns.

    program = staged(learner, source, make_mesh()) or fused(learner, unroll, make_mesh(), iterations=16)
    for info in run(program, program.init(seed), total_env_steps=300_000): ...

Every random number follows from the seed and a counter: `fold_in(fold_in(key(seed), role), counter)`.
"""

import dataclasses
import enum
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jrl import parallel
from jrl.learner import Learner
from jrl.metrics import episodes as episode_metrics
from jrl.metrics.timers import Timers
from jrl.rollout.sources import Source, outside_compile_cache
from jrl.rollout.unroll import Unroll, UnrollState
from jrl.types import Episodes, Key, Metrics, PyTree, Rollout, StepInfo

# calls between two whose stages are timed, which means to wait for each: where they overlap, that costs more
_TIMED_EVERY = {"collect": 16, "wait": 64}


class Role(enum.IntEnum):
    """What a key is for; each role has its own stream."""

    INIT = 0
    ENV = 1
    COLLECT = 2
    UPDATE = 3
    EVALUATE = 4


def role_key(seed: int | Key, role: Role, counter=0) -> Key:
    """The key of one role at one count (of iterations, of evaluations)."""
    root = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    return jax.random.fold_in(jax.random.fold_in(root, role), counter)


@struct.dataclass
class LoopState:
    """All that changes from call to call."""

    learner: PyTree  # replicated over devices
    replay: PyTree  # each device's own, [D * n, ...] of leaves [n, ...] and [D] of scalars; () without
    # environments in the program, [D, ...]; of others nothing, and in what is kept their episode statistics
    source: PyTree


class Parts(NamedTuple):
    """The halves of an iteration. `call` counts those of one iteration and is part of their keys; 0 is `advance`'s."""

    collect: Callable[[LoopState, int, int, int], tuple[Rollout, Episodes]]  # (state, seed, iteration, call)
    # (state, rollout, seed, iteration, call); takes over the state's buffers, not the rollout's
    learn: Callable[[LoopState, Rollout, int, int, int], tuple[LoopState, Metrics]]
    apart: Callable[[], None]  # what is collected next does not continue the latest rollout, which nobody may learn


class Program(NamedTuple):
    """One call of `advance` makes `iterations` iterations, or fewer if told; it is dispatched, not waited for."""

    init: Callable[[int], LoopState]  # seed -> state
    # (state, seed, iteration, count=iterations), count of 1 to `iterations`
    advance: Callable[..., tuple[LoopState, Metrics, Episodes]]
    keep: Callable[[LoopState], LoopState]  # what of a state a checkpoint can hold
    place: Callable[[LoopState], LoopState]  # what was kept, onto the devices; after `init`
    # (state, learner as `keep` gave it) -> state, in which nothing else has changed
    assign: Callable[[LoopState, PyTree], LoopState]
    actor: Callable[[LoopState], PyTree]  # on one device, for evaluation
    iterations: int
    rows: int  # rows per iteration (T * B over all devices), reset rows included: no more steps than that
    close: Callable[[], None]
    # environments that cannot be kept are made anew for a count, between two calls; None where they can
    restart: Callable[[int], None] | None = None
    source: Callable[[], Source] | None = None  # of a staged program, after `init`; a fused one has none
    parts: Parts | None = None  # of a staged program


def fused(
    learner: Learner, unroll: Unroll, mesh: Mesh, *, iterations: int, rows: int, close: Callable[[], None] | None = None
) -> Program:
    """Collect and learn in one program, `iterations` times per call, on every device of the mesh.

    Args:
      learner: made with axis_name=parallel.AXIS.
      unroll: over the environments of one device; not pure, only of the single device that there is.
      mesh: the devices.
      iterations: per call; Python is out of the way in between.
      rows: T * B over all devices.
      close: ends the environments.
    """
    devices = mesh.devices.size
    if devices > 1 and not unroll.pure:
        raise ValueError("environments that are not pure are stepped once, not once per device: use staged")

    def environments(root):
        keys = jax.random.split(role_key(root, Role.ENV), devices)
        return jax.tree.map(lambda *x: jnp.stack(x), *map(unroll.init, keys, range(devices)))

    def init(seed: int) -> LoopState:
        def start(root, source):
            source = environments(root) if unroll.pure else source
            return LoopState(learner.init(role_key(root, Role.INIT)), _empty_replay(learner, devices), source), root

        root = jax.random.key(seed)
        source = () if unroll.pure else environments(root)  # from the host, not while tracing
        if not program and unroll.pure:  # compiles while the state is made
            counts = [jax.ShapeDtypeStruct((), jnp.uint32)] * 2
            shapes = (*jax.eval_shape(start, root, source), *counts)
            program.append(parallel.compile_ahead(mapped, shapes, mesh, in_specs))
        elif not program:
            program.append(outside_compile_cache(mapped))
        state, roots[seed] = parallel.place_outputs(start, mesh, (specs, parallel.REPLICATED))(root, source)
        begun[:] = [] if unroll.pure else [state.source]
        return state

    def one(state: LoopState, seed, iteration):
        device = jax.lax.axis_index(parallel.AXIS)
        collect_key = jax.random.fold_in(role_key(seed, Role.COLLECT, iteration), device)
        source, rollout, report = unroll.step(state.source, learner.actor(state.learner), collect_key, device)
        update_key = role_key(seed, Role.UPDATE, iteration)
        learned, replay, metrics = learner.step(state.learner, state.replay, rollout, update_key)
        return LoopState(learned, replay, source), (metrics, report)

    def body(state: LoopState, root, iteration, count):
        state = LoopState(state.learner, own_replay(state.replay, learner), _mine(state.source))
        state, (metrics, reports) = _repeat(lambda s, i: one(s, root, iteration + i), state, iterations, count)
        state = LoopState(state.learner, _joined_replay(state.replay), _stacked(state.source))
        reports = episode_metrics.add_up_stacked(reports, count)
        return state, jax.tree.map(lambda metric: _over_iterations(metric, count), metrics), _stacked(reports)

    specs = LoopState(parallel.REPLICATED, parallel.PER_DEVICE, parallel.PER_DEVICE)
    in_specs = (specs, parallel.REPLICATED, parallel.REPLICATED, parallel.REPLICATED)
    out_specs = (specs, parallel.REPLICATED, parallel.PER_DEVICE)
    mapped = parallel.pmap(body, mesh, in_specs, out_specs, donate_argnums=(0,))
    program: list[Callable] = []
    roots: dict[int, Key] = {}
    begun: list[UnrollState] = []  # environments that are not pure, as they were made
    waits = parallel.waits(mesh)

    def advance(state, seed, iteration, count=iterations):
        out = program[0](state, roots[seed], np.uint32(iteration), np.uint32(count))
        return jax.block_until_ready(out) if waits else out

    def keep(state: LoopState) -> LoopState:
        source = state.source if unroll.pure else state.source.columns
        return LoopState(learner.keep(state.learner), state.replay, source)

    def place(state: LoopState) -> LoopState:
        source = state.source
        if not unroll.pure:
            source = dataclasses.replace(begun[0], columns=episode_metrics.restarted(source))
        learned = parallel.replicate(learner.resume(state.learner), mesh)
        return LoopState(learned, parallel.shard(state.replay, mesh), parallel.shard(source, mesh))

    actor = lambda s: parallel.first(learner.actor(s.learner))
    assign = lambda s, kept: s.replace(learner=parallel.replicate(learner.resume(kept), mesh))
    return Program(init, advance, keep, place, assign, actor, iterations, rows, close or (lambda: None))


def staged(
    learner: Learner,
    make_source: Callable[[Key], Source],
    mesh: Mesh,
    *,
    rows: int,
    timers: Timers,
    stage: str = "collect",
    remake: Callable[[Key, int], Source] | None = None,
) -> Program:
    """Collect and learn as two programs: for environments that are not part of one.

    Args:
      learner: made with axis_name=parallel.AXIS.
      make_source: over all environments, for `init`.
      mesh: the devices.
      rows: T * B over all devices.
      timers: where stages are timed.
      stage: what a rollout's time is called: that of collecting it or, where others do, of waiting for it.
      remake: (key, count) -> a source with new environments, for `Program.restart`.

    The stages of some calls are timed; the others run without a wait.
    """

    def body(state, replay, rollout, key):
        state, replay, metrics = learner.step(state, own_replay(replay, learner), rollout, key)
        return state, _joined_replay(replay), metrics

    specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.ROLLOUT, parallel.REPLICATED)
    out_specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.REPLICATED)
    step = parallel.pmap(body, mesh, specs, out_specs, donate_argnums=(0, 1))
    keys = jax.jit(lambda root, i: (role_key(root, Role.COLLECT, i), role_key(root, Role.UPDATE, i)))
    source: list[Source] = []
    seams: list[None] = []  # one before a rollout that continues nothing
    keys_made: list[Key] = []  # of the source
    root: dict[int, Key] = {}
    later = jax.jit(jax.random.fold_in)
    waits, every = parallel.waits(mesh), _TIMED_EVERY[stage]

    def init(seed: int) -> LoopState:
        def start(root):
            replay = _empty_replay(learner, mesh.devices.size)
            return learner.init(role_key(root, Role.INIT)), replay, role_key(root, Role.ENV)

        out_specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.REPLICATED)
        state, replay, key = parallel.place_outputs(start, mesh, out_specs)(jax.random.key(seed))
        keys_made[:] = [parallel.first(key)]
        source[:] = [make_source(keys_made[0])]
        return LoopState(state, replay, ())

    @functools.lru_cache(maxsize=1)
    def keys_of(seed: int, iteration: int) -> tuple[Key, Key]:
        return keys(root.setdefault(seed, jax.random.key(seed)), np.uint32(iteration))

    def collect(state: LoopState, seed: int, iteration: int, call: int = 0):
        timed, (key, _) = iteration % every == 1, keys_of(seed, iteration)
        actor = parallel.first(learner.actor(state.learner))
        if timed:
            jax.block_until_ready(actor)
        start = time.perf_counter()
        rollout, report = source[0].next(actor, later(key, np.uint32(call)) if call else key)
        if seams:
            seams.clear()
            rollout = dataclasses.replace(rollout, contiguous=jnp.zeros_like(rollout.contiguous))
        if mesh.devices.size > 1:
            rollout = parallel.shard(rollout, mesh, parallel.ROLLOUT)
        if timed:
            jax.block_until_ready(rollout)
            timers.add(stage, (time.perf_counter() - start) * every)
        return rollout, report

    def learn(state: LoopState, rollout: Rollout, seed: int, iteration: int, call: int = 0):
        timed, (_, key) = iteration % every == 1, keys_of(seed, iteration)
        start = time.perf_counter()
        learned, replay, metrics = step(
            state.learner, state.replay, rollout, later(key, np.uint32(call)) if call else key
        )
        if timed or waits:
            jax.block_until_ready(learned)
        if timed:
            timers.add("update", (time.perf_counter() - start) * every)
        return LoopState(learned, replay, ()), metrics

    def advance(state: LoopState, seed: int, iteration: int, count: int = 1):
        rollout, report = collect(state, seed, iteration)
        state, metrics = learn(state, rollout, seed, iteration)
        return state, {**metrics, **source[0].metrics}, report

    def keep(state: LoopState) -> LoopState:
        return LoopState(learner.keep(state.learner), state.replay, source[0].columns)

    def place(state: LoopState) -> LoopState:
        source[0].columns = episode_metrics.restarted(state.source)
        learned = parallel.replicate(learner.resume(state.learner), mesh)
        return LoopState(learned, parallel.shard(state.replay, mesh), ())

    def restart(count: int) -> None:
        assert remake is not None
        columns = jax.device_get(source[0].columns)
        source[0].close()
        source[0] = remake(jax.random.fold_in(keys_made[0], count), count)
        source[0].columns = episode_metrics.restarted(columns)

    def close() -> None:
        for s in source:
            s.close()

    actor = lambda s: parallel.first(learner.actor(s.learner))
    assign = lambda s, kept: s.replace(learner=parallel.replicate(learner.resume(kept), mesh))
    again = restart if remake else None
    parts = Parts(collect, learn, lambda: seams.append(None))
    return Program(init, advance, keep, place, assign, actor, 1, rows, close, again, lambda: source[0], parts)


class Step:
    """One iteration in the hands of a user's function, which decides what is collected and learned from.

    Attributes:
      state: the LoopState; its buffers are taken over by `learn`.
      seed, iteration: of the run, and the iterations before this one.
      metrics: name -> scalar, put into the result row beside those of learning; empty at first.
    """

    def __init__(self, parts: Parts, state: LoopState, seed: int, iteration: int):
        self.state, self.seed, self.iteration = state, seed, iteration
        self.metrics: Metrics = {}
        self._parts = parts
        self._reports: list[Episodes] = []
        self._learned: list[Metrics] = []

    def sample(self) -> Rollout:
        """The next rollout [T, B], collected with the state as it is now. May be called again, or not at all."""
        rollout, report = self._parts.collect(self.state, self.seed, self.iteration, len(self._reports))
        self._reports.append(report)
        return rollout

    def learn(self, rollout: Rollout) -> Metrics:
        """One step of the learner: on-policy all epochs on `rollout`, which stays as it is; from replay all updates.

        Returns:
          Its metrics, on the device: reading one waits. An iteration reports the mean over its calls.
        """
        self.state, metrics = self._parts.learn(self.state, rollout, self.seed, self.iteration, len(self._learned))
        self._learned.append(metrics)
        return metrics


def custom(program: Program, fn: Callable[[Step], Any]) -> Program:
    """The program in which an iteration is `fn(step)`; `lambda step: step.learn(step.sample())` is the ordinary one.

    Environment steps are those of all samples. What `fn` returns is ignored.

    Raises:
      ValueError: the program is a fused one, whose iterations have no parts.
    """
    if program.parts is None or program.source is None:
        raise ValueError("a fused program collects and learns in one: only a staged one can be taken apart")
    parts, source = program.parts, program.source

    def advance(state: LoopState, seed: int, iteration: int, count: int = 1):
        step = Step(parts, state, seed, iteration)
        fn(step)
        reports, learned = step._reports, step._learned
        if not reports:
            report = episode_metrics.nothing(source().columns)
        else:
            report = reports[0] if len(reports) == 1 else episode_metrics.add_up(reports)
        metrics = learned[0] if len(learned) == 1 else _mean(learned)
        return step.state, {**metrics, **source().metrics, **step.metrics}, report

    return program._replace(advance=advance)


def run(
    program: Program,
    state: LoopState,
    *,
    seed: int,
    total_env_steps: int | None,
    iteration: int = 0,
    env_steps: int = 0,
    timers: Timers | None = None,
) -> Iterator[StepInfo]:
    """Advances the program until `total_env_steps` environment steps have been counted; None: for ever.

    Args:
      program, state: from `fused` or `staged`, and its `init` or a checkpoint.
      seed: of the run.
      total_env_steps: the budget; the iteration that reaches it is the last.
      iteration, env_steps: counters to continue from.
    """
    timers = timers or Timers()
    total = math.inf if total_env_steps is None else total_env_steps
    rows, most = program.rows, program.iterations
    uncounted: Episodes | None = None  # of the call under way
    count = 0  # its iterations
    while True:
        # to count a call is to wait for it: only where this one might go beyond the budget
        if uncounted is not None and env_steps + (count + most) * rows > total:
            steps, uncounted = episode_metrics.steps(uncounted), None
            env_steps += steps
            rows = max(rows, -(-steps // count))  # a user's training step may sample more
            if env_steps >= total:
                return
        count = most if uncounted is not None or total == math.inf else _iterations(total - env_steps, rows, most)
        state, metrics, report = program.advance(state, seed, iteration, count)
        iteration += count
        if uncounted is not None:
            env_steps += episode_metrics.steps(uncounted)
        yield StepInfo(state, metrics, report, iteration, env_steps, timers)
        uncounted = report


def _iterations(left: float, rows: int, most: int) -> int:
    """The iterations of a call that may count `left` more steps: the last of them is the first that may reach it."""
    return int(min(most, max(1, -(-left // rows))))


# The replays of D devices are one array behind the other, not stacked along a new axis: a device sees its part as is.
# With an axis to take off and put back on, XLA copies the buffer several times.


def _empty_replay(learner: Learner, devices: int) -> PyTree:
    repeat = lambda x: jnp.broadcast_to(x[None], (devices, *x.shape)).reshape(-1, *x.shape[1:])
    return jax.tree.map(repeat, learner.init_replay())


def own_replay(replay: PyTree, learner: Learner) -> PyTree:
    """This device's part inside a mapped program, as the learner knows it."""
    return jax.tree.map(lambda x, like: x.reshape(like.shape), replay, jax.eval_shape(learner.init_replay))


def _joined_replay(replay: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, replay)


def _mine(tree: PyTree) -> PyTree:
    """[1, ...], this device's part inside a mapped program -> [...]"""
    return jax.tree.map(lambda x: x[0], tree)


def _stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)


def _repeat(one: Callable, state: PyTree, most: int, count) -> tuple[PyTree, PyTree]:
    """`state, out = one(state, i)` for i = 0 .. count - 1, count at most `most`: as `lax.scan`, but for a length that
    may be traced. Beyond `count` the rows of what is stacked are 0.
    """
    if most == 1:
        state, out = one(state, jnp.uint32(0))
        return state, _stacked(out)
    shapes = jax.eval_shape(one, state, jax.ShapeDtypeStruct((), jnp.uint32))[1]
    outs = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)

    def body(i, carry):
        state, out = one(carry[0], i)
        return state, jax.tree.map(lambda row, rows: rows.at[i].set(row), out, carry[1])

    return jax.lax.fori_loop(jnp.uint32(0), count, body, (state, outs))


def _over_iterations(metric, count=None):
    """[K] -> []: the mean over iterations that have one (NaN is none); of a whole number, which counts, the last. Of
    the first `count` iterations; None: of all.
    """
    if not jnp.issubdtype(metric.dtype, jnp.floating):
        return metric[-1 if count is None else count - 1]
    if count is not None:
        metric = jnp.where(jnp.arange(metric.shape[0], dtype=jnp.uint32) < count, metric, jnp.nan)
    return jnp.nanmean(metric)


def _mean(calls: list[Metrics]) -> Metrics:
    """Metrics of several calls as those of one."""
    names = list(dict.fromkeys(name for metrics in calls for name in metrics))
    together = lambda name: jnp.stack([jnp.asarray(m[name]) for m in calls if name in m])
    return {name: _over_iterations(together(name)) for name in names}
