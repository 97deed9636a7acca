"""Program of a run: iterations that collect and learn, in one compiled program (fused.py) or in two (staged.py).

Both draw the same keys from the seed, so that environments written in JAX give the same bits either way.
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
    replay: PyTree  # each device's own, [D * n, ...] of leaves [n, ...] and [D] of scalars; () without
    # environments in the program, [D, ...]; of others nothing, and in what is kept their episode statistics
    source: PyTree


class Program(abc.ABC):
    """Iterations by which a run advances: one call of `advance` makes up to `iterations`, dispatched, not waited for.

    The parts of an iteration can be called by themselves: `collect` and `learn`.

    Attributes:
      learner: of one device.
      mesh: the devices that learn.
      rows: T * B over all devices, masked steps included: an iteration takes no more steps than that.
      iterations: of one call, at most.
      source: where rollouts come from, after `init`; None where they are part of the program that learns.
    """

    source: Source | None = None
    iterations = 1

    def __init__(self, learner: Learner, mesh: Mesh, *, rows: int):
        self.learner, self.mesh, self.rows = learner, mesh, rows
        self._roots: dict[int, Key] = {}

    def drain(self) -> dict[str, float]:
        """Returns `Source.drain()` of its source."""
        return self.source.drain() if self.source is not None else {}

    @abc.abstractmethod
    def init(self, seed: int) -> LoopState:
        """Makes the state at the start of a run."""

    @abc.abstractmethod
    def advance(
        self, state: LoopState, seed: int, iteration: int, count: int = 1
    ) -> tuple[LoopState, Metrics, Episodes]:
        """Makes `count` iterations, 1 to `iterations`; takes over the buffers of `state`."""

    @abc.abstractmethod
    def collect(
        self, state: LoopState, seed: int, iteration: int, call: int = 0
    ) -> tuple[LoopState, Rollout, Episodes]:
        """Collects the next rollout, with the present state. `call` counts those of one iteration; `advance`'s is 0."""

    @abc.abstractmethod
    def learn(
        self, state: LoopState, rollout: Rollout, seed: int, iteration: int, call: int = 0
    ) -> tuple[LoopState, Metrics]:
        """Learns from a rollout; takes over the buffers of `state`, not those of the rollout."""

    @abc.abstractmethod
    def discontinue(self, state: LoopState) -> LoopState:
        """Returns the state whose next rollout does not continue the latest, which may not have been learned from."""

    @abc.abstractmethod
    def keep(self, state: LoopState) -> LoopState:
        """Returns what of a state a checkpoint holds."""

    @abc.abstractmethod
    def place(self, state: LoopState) -> LoopState:
        """Puts what was kept on the devices again; call it after `init`."""

    @abc.abstractmethod
    def restart(self, count: int) -> None:
        """Makes environments anew that a checkpoint cannot hold; another `count` makes others."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the environments."""

    def actor(self, state: LoopState) -> PyTree:
        """Returns the actor, on one device."""
        return parallel.first_copy(self.learner.actor(state.learner))

    def assign(self, state: LoopState, kept: PyTree) -> LoopState:
        """Returns the state with the learner `kept`, as `keep` returned it; all else stays."""
        return dataclasses.replace(state, learner=parallel.replicate(self.learner.resume(kept), self.mesh))

    def _begun_with_data(self, replay: PyTree) -> PyTree:
        """Returns an empty replay, or with data sets one that has them, priorities of their rows and all."""
        data = self.learner.data
        return replay if data is None else parallel.shard(data.fill(), self.mesh)

    def _with_data(self, replay: PyTree) -> PyTree:
        """Returns a checkpoint's replay on the devices, with the data sets that it is to have."""
        data = self.learner.data
        return replay if data is None else parallel.shard(data.with_rows(replay, data.fill()), self.mesh)

    def _without_data(self, replay: PyTree) -> PyTree:
        """Returns what of a replay a checkpoint holds."""
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


# The replays of D devices are one array behind the other, not stacked along a new axis: a device sees its part as is.
# With an axis to take off and put back on, XLA copies the buffer several times.


def empty_replay(learner: Learner, devices: int) -> PyTree:
    repeat = lambda x: jnp.broadcast_to(x[None], (devices, *x.shape)).reshape(-1, *x.shape[1:])
    return jax.tree.map(repeat, learner.init_replay())


def own_replay(replay: PyTree, learner: Learner) -> PyTree:
    """Returns this device's part inside a mapped program, as the learner knows it."""
    return jax.tree.map(lambda x, like: x.reshape(like.shape), replay, jax.eval_shape(learner.init_replay))


def joined_replay(replay: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, replay)


def over_iterations(metrics: Metrics, count: Any = None) -> Metrics:
    """Returns the mean [] of each metric [K] over iterations that have one (NaN is none); of whole numbers, which
    count, the last. Of the first `count` iterations; None: of all.
    """
    found = {name: x[-1 if count is None else count - 1] for name, x in metrics.items()}
    floats = [name for name, x in metrics.items() if jnp.issubdtype(x.dtype, jnp.floating) and x.shape[0] > 1]
    if not floats:
        return found
    rows = jnp.stack([metrics[name] for name in floats])  # side by side: a few operations for all
    if count is not None:
        rows = jnp.where(jnp.arange(rows.shape[1], dtype=jnp.uint32) < count, rows, jnp.nan)
    return found | dict(zip(floats, jnp.nanmean(rows, 1), strict=True))
