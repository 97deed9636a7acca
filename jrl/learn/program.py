"""Programs that collect and learn, their random keys, and the training loop over their calls.

    program = Staged(learner, source, make_mesh(), ...) or Fused(learner, unroll, make_mesh(), iterations=16, ...)
    for info in train(program, program.init(seed), seed=seed, total_env_steps=300_000): ...

Both derive the same keys from the seed, so environments written in JAX give the same bits in one program or in two.
"""

import abc
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jrl.learn import parallel
from jrl.learn.learner import Learner
from jrl.metrics.timers import Timers
from jrl.rollout.source import Source
from jrl.types import Array, Episodes, Key, Metrics, PyTree, Rollout

# ---------------------------------------------------------------- random keys


class Role(enum.IntEnum):
    """Purpose of a key; each role has its own stream."""

    INIT = 0
    ENV = 1
    COLLECT = 2
    UPDATE = 3
    EVALUATE = 4
    VALIDATE = 5
    DATA = 6
    ESTIMATE = 7
    ELO = 8


def role_key(seed: int | Key, role: Role, counter=0) -> Key:
    """Returns the key of a role at a counter, for example the number of the iteration or evaluation."""
    root = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    return jax.random.fold_in(jax.random.fold_in(root, role), counter)


def role_keys(root: Key, roles: Sequence[Role], counters: Array) -> Key:
    """Returns `role_key` of each role and counter [K]: [R, K]. Separate calls would compile a loop each."""
    of_roles = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.asarray(roles, jnp.uint32))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(of_roles, counters)


def vector_key(key: Key, vector, vectors: int) -> Key:
    """Returns the key of vector `vector` of environments, on any device; with a single vector `key` itself."""
    return key if vectors == 1 else jax.random.fold_in(key, vector)


# ---------------------------------------------------------------- programs


@struct.dataclass
class LoopState:
    """State that changes from call to call."""

    learner: PyTree  # replicated over devices
    replay: PyTree  # per device: [D * n, ...] for leaves [n, ...], [D] for scalars; () without replay
    # environments in the program, [D, ...]; else (), or their episode statistics in a checkpoint
    source: PyTree


class Program(abc.ABC):
    """Iterations of a run: one call of `advance` dispatches up to `iterations` of them and does not wait.

    `collect` and `learn` are the two parts of an iteration and can be called separately.

    Attributes:
      learner: learner of one device of the mesh.
      rows: T * B over all devices, masked steps included: the maximum number of steps per iteration.
      iterations: maximum number of iterations per call.
      source: source of rollouts after `init`; None if collection is part of the learning program.
    """

    source: Source | None = None
    iterations = 1

    def __init__(self, learner: Learner, mesh: Mesh, *, rows: int):
        self.learner, self.mesh, self.rows = learner, mesh, rows
        self._roots: dict[int, Key] = {}

    def drain(self) -> dict[str, float]:
        """Returns `Source.drain()` of the source."""
        return self.source.drain() if self.source is not None else {}

    @abc.abstractmethod
    def init(self, seed: int) -> LoopState:
        """Returns the initial state of a run."""

    @abc.abstractmethod
    def advance(
        self, state: LoopState, seed: int, iteration: int, count: int = 1
    ) -> tuple[LoopState, Metrics, Episodes]:
        """Makes `count` iterations, 1 to `iterations`; donates the buffers of `state`."""

    def collect(
        self, state: LoopState, seed: int, iteration: int, call: int = 0
    ) -> tuple[LoopState, Rollout, Episodes]:
        """Collects the next rollout with the present state. `call` numbers the calls within an iteration, from 0."""
        raise RuntimeError(f"{type(self).__name__} does not collect by itself")

    def learn(
        self, state: LoopState, rollout: Rollout, seed: int, iteration: int, call: int = 0
    ) -> tuple[LoopState, Metrics]:
        """Learns from a rollout; donates the buffers of `state`, not those of the rollout."""
        raise RuntimeError(f"{type(self).__name__} does not learn from single rollouts")

    def discontinue(self, state: LoopState) -> LoopState:
        """Returns a state whose next rollout does not continue the latest rollout."""
        return state

    @abc.abstractmethod
    def keep(self, state: LoopState) -> LoopState:
        """Returns the part of a state that a checkpoint stores."""

    @abc.abstractmethod
    def place(self, state: LoopState) -> LoopState:
        """Returns the state of a checkpoint's content, on the devices; call it after `init`."""

    def restart(self, count: int) -> None:  # noqa: B027  # most programs have nothing to replace
        """Replaces environments that a checkpoint cannot store; `count` seeds the new environments."""

    def close(self) -> None:  # noqa: B027
        """Closes the environments."""

    def actor(self, state: LoopState) -> PyTree:
        """Returns the actor, on one device."""
        return parallel.first_copy(self.learner.actor(state.learner))

    def assign(self, state: LoopState, kept: PyTree) -> LoopState:
        """Returns the state with a learner from a checkpoint (`keep`) and everything else unchanged."""
        return dataclasses.replace(state, learner=parallel.replicate(self.learner.resume(kept), self.mesh))

    def _initial_replay(self, replay: PyTree) -> PyTree:
        """Returns the initial replay on the devices: `replay`, or the data sets with initial priorities."""
        data = self.learner.data
        return replay if data is None else parallel.shard(data.fill(), self.mesh)

    def _with_data(self, replay: PyTree) -> PyTree:
        """Returns a checkpoint's replay on the devices, with the rows of the data sets."""
        data = self.learner.data
        return replay if data is None else parallel.shard(data.with_rows(replay, data.fill()), self.mesh)

    def _without_data(self, replay: PyTree) -> PyTree:
        """Returns the part of a replay that a checkpoint stores."""
        return replay if self.learner.data is None else self.learner.data.without_rows(replay)

    def _keys(self, seed: int, iteration: int, call: int) -> tuple[Key, Key]:
        if seed not in self._roots:
            self._roots[seed] = jax.random.key(seed)
        collect, update = _iteration_keys(self._roots[seed], np.uint32(iteration))
        return (_later(collect, np.uint32(call)), _later(update, np.uint32(call))) if call else (collect, update)

    @functools.cached_property
    def _learning(self) -> Any:
        """Returns (learner, replay, rollout, key) -> (learner, replay, metrics), mapped over the devices."""

        def body(state, replay, rollout, key):
            state, replay, metrics = self.learner.step(state, own_replay(replay, self.learner), rollout, key)
            return state, joined_replay(replay), metrics

        specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.ROLLOUT, parallel.REPLICATED)
        out_specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.REPLICATED)
        return parallel.pmap(body, self.mesh, specs, out_specs, donate_argnums=(0, 1))


_iteration_keys = jax.jit(lambda root, i: (role_key(root, Role.COLLECT, i), role_key(root, Role.UPDATE, i)))
_later = jax.jit(jax.random.fold_in)


# The replays of D devices are concatenated, not stacked along a new axis: removing and adding a device axis made XLA
# copy the buffer several times.


def empty_replay(learner: Learner, devices: int) -> PyTree:
    repeat = lambda x: jnp.broadcast_to(x[None], (devices, *x.shape)).reshape(-1, *x.shape[1:])
    return jax.tree.map(repeat, learner.init_replay())


def own_replay(replay: PyTree, learner: Learner) -> PyTree:
    """Returns this device's replay inside a mapped program, in the learner's shapes."""
    return jax.tree.map(lambda x, like: x.reshape(like.shape), replay, jax.eval_shape(learner.init_replay))


def joined_replay(replay: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, replay)


def over_iterations(metrics: Metrics, count: Any = None) -> Metrics:
    """Returns the mean [] of each metric [K] over iterations, ignoring NaN; the last value of integer metrics.

    Only the first `count` iterations count; None: all.
    """
    found = {name: x[-1 if count is None else count - 1] for name, x in metrics.items()}
    floats = [name for name, x in metrics.items() if jnp.issubdtype(x.dtype, jnp.floating) and x.shape[0] > 1]
    if not floats:
        return found
    rows = jnp.stack([metrics[name] for name in floats])  # stacked, so that few operations handle all metrics
    if count is not None:
        rows = jnp.where(jnp.arange(rows.shape[1], dtype=jnp.uint32) < count, rows, jnp.nan)
    return found | dict(zip(floats, jnp.nanmean(rows, 1), strict=True))


# ---------------------------------------------------------------- the loop


class Clock(NamedTuple):
    """Progress of a run: what budgets, reports, checkpoints and schedules count by."""

    env_steps: int = 0  # environment steps, or agent steps with rollout.count_steps_by: agent_steps
    agent_steps: int = 0  # steps of all agents; equal to environment steps with one agent
    updates: int = 0  # gradient steps; counted when a result row is made
    time_s: float = 0.0  # seconds of training; read when a result row is made

    def after(self, report: Episodes) -> "Clock":
        """Adds the steps of a report, of all devices and iterations in it. Waits for it."""
        total = lambda x: int(np.asarray(x).astype(np.int64).sum())
        steps = total(report.steps)
        agents = total(report.agents.steps) if isinstance(report.agents, Episodes) else steps
        return self._replace(env_steps=self.env_steps + steps, agent_steps=self.agent_steps + agents)


NO_STEPS = Clock()


class StepInfo(NamedTuple):
    """Result of a call. Reading its arrays waits for the device."""

    state: Any  # LoopState, donated to the next call
    metrics: Metrics  # name -> scalar, mean over the call's iterations
    episodes: Episodes  # episodes of this call
    iteration: int  # number of iterations, this call's included
    clock: Clock  # exact, up to the previous call, so that counting never waits for the call just begun
    timers: Timers

    @property
    def env_steps(self) -> int:
        """Returns the environment steps up to the previous call."""
        return self.clock.env_steps

    def clock_after(self) -> Clock:
        """Returns the clock up to and including this call. Waits for it."""
        return self.clock.after(self.episodes)

    def env_steps_after(self) -> int:
        """Returns the environment steps up to and including this call. Waits for it."""
        return self.clock_after().env_steps


class Calls:
    """Counts the calls of a program.

    Args:
      program: the program.
      state: state of `program.init`, or of a checkpoint.
      total_env_steps: budget; the iteration that reaches it is the last. None: no budget.
      iteration, clock: progress to continue from.
      prepare: function of the state before each call.
    Attributes:
      state: state for the next call.
      iteration: number of iterations so far.
    """

    def __init__(
        self,
        program: Program,
        state: LoopState,
        *,
        total_env_steps: int | None,
        iteration: int = 0,
        clock: Clock = NO_STEPS,
        timers: Timers | None = None,
        prepare: Callable[[LoopState], LoopState] = lambda state: state,
    ):
        self.state, self.iteration = state, iteration
        self._rows, self._most, self._clock, self._prepare = program.rows, program.iterations, clock, prepare
        self._timers = timers or Timers()
        self._total = math.inf if total_env_steps is None else total_env_steps
        self._uncounted: Episodes | None = None  # report of the latest call
        self._count = 0  # iterations of the latest call

    def next_count(self) -> int | None:
        """Returns the number of iterations of the next call; None: the budget is spent."""
        total, most = self._total, self._most
        # counting a call waits for it: only if the next call might exceed the budget
        if self._uncounted is not None and self._clock.env_steps + (self._count + most) * self._rows > total:
            before, self._clock, self._uncounted = self._clock, self._clock.after(self._uncounted), None
            # a user's training step may sample more
            self._rows = max(self._rows, -(-(self._clock.env_steps - before.env_steps) // self._count))
        if self._uncounted is None and self._clock.env_steps >= total:
            return None
        left = total - self._clock.env_steps
        unlimited = self._uncounted is not None or total == math.inf
        # the last iteration of the call is the first that may reach the budget
        self._count = most if unlimited else int(min(most, max(1, -(-left // self._rows))))
        self.state = self._prepare(self.state)
        return self._count

    def count_call(self, state: LoopState, metrics: Metrics, report: Episodes) -> StepInfo:
        """Takes the result of the latest call."""
        self.state = state
        self.iteration += self._count
        if self._uncounted is not None:
            self._clock = self._clock.after(self._uncounted)
        self._uncounted = report
        return StepInfo(state, metrics, report, self.iteration, self._clock, self._timers)


def train(program: Program, state: LoopState, *, seed: int, **more: Any) -> Iterator[StepInfo]:
    """Advances the program until the budget is spent; `more`: options of `Calls`."""
    calls = Calls(program, state, **more)
    while (count := calls.next_count()) is not None:
        yield calls.count_call(*program.advance(calls.state, seed, calls.iteration, count))
