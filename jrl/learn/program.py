"""The interface of programs that collect and learn: one compiled program (fused.py) or two (staged.py).

Both derive the same keys from the seed, so environments written in JAX give the same bits either way.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jrl.learn import parallel
from jrl.learn.keys import Role, role_key
from jrl.learn.learner import Learner
from jrl.rollout.source import Source
from jrl.types import Episodes, Key, Metrics, PyTree, Rollout


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
      learner: learner of one device.
      mesh: devices that learn.
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

    @abc.abstractmethod
    def collect(
        self, state: LoopState, seed: int, iteration: int, call: int = 0
    ) -> tuple[LoopState, Rollout, Episodes]:
        """Collects the next rollout with the present state. `call` numbers the calls within an iteration, from 0."""

    @abc.abstractmethod
    def learn(
        self, state: LoopState, rollout: Rollout, seed: int, iteration: int, call: int = 0
    ) -> tuple[LoopState, Metrics]:
        """LearnerMethods from a rollout; donates the buffers of `state`, not those of the rollout."""

    @abc.abstractmethod
    def discontinue(self, state: LoopState) -> LoopState:
        """Returns a state whose next rollout does not continue the latest rollout."""

    @abc.abstractmethod
    def keep(self, state: LoopState) -> LoopState:
        """Returns the part of a state that a checkpoint stores."""

    @abc.abstractmethod
    def place(self, state: LoopState) -> LoopState:
        """Returns the state of a checkpoint's content, on the devices; call it after `init`."""

    @abc.abstractmethod
    def restart(self, count: int) -> None:
        """Replaces environments that a checkpoint cannot store; `count` seeds the new environments."""

    @abc.abstractmethod
    def close(self) -> None:
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
