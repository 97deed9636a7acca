"""Learning from data sets alone: one compiled program of many updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.learn import parallel
from jrl.learn.learner import Data, Learner, UpdateKeys
from jrl.learn.program import LoopState, Program, Role, joined_replay, own_replay, role_key
from jrl.metrics import episodes as episode_metrics
from jrl.ops.scans import trace_once
from jrl.types import Episodes, Key, Metrics, PyTree

VALIDATION = "validation/"  # prefix of metrics on held-out data


class Offline(Program):
    """Updates on samples of data sets, `iterations` of them per call, on every device of the mesh.

    An iteration is one update, and a run counts updates. There are no environments.

    Args:
      learner: learner of `learner.from_data_sets`, made with axis_name=parallel.AXIS.
      held_out: learner on validation data: reports metrics, changes nothing; None: no validation.
      batches: validation batches per call.
      epoch: updates that draw as many rows as the data have, for the metric `data/epoch`.
    """

    def __init__(
        self,
        learner: Learner,
        mesh: Mesh,
        *,
        iterations: int,
        held_out: Learner | None = None,
        batches: int = 1,
        epoch: float = 1.0,
    ):
        super().__init__(learner, mesh, rows=1)
        self.iterations, self._held_out, self._batches, self._epoch = iterations, held_out, batches, epoch
        self._devices, self._waits = mesh.devices.size, parallel.must_wait(mesh)
        same, own = parallel.REPLICATED, parallel.PER_DEVICE
        self._advance = parallel.pmap(
            self._body, mesh, (same, own, own, own, same, same, same), (same, own, same), (0, 1), loops=True
        )
        self._sample = parallel.pmap(self._one_sample, mesh, (own, own, same), own)
        self._rows: PyTree = None  # replay with the data; its changing part is in the LoopState
        self._held_out_rows: PyTree = ()
        self._empty_report = episode_metrics.empty_report(episode_metrics.init(1, 1))

    def init(self, seed: int) -> LoopState:
        self._roots[seed] = root = jax.random.key(seed)
        learned = self._start(root)
        if self._rows is None:
            self._rows = self._filled()
            if self._held_out is not None and self._held_out.data is not None:
                self._held_out_rows = parallel.shard(self._held_out.data.fill(), self.mesh)
        return LoopState(learned, self._initial_changing(), ())

    @functools.cached_property
    def _start(self) -> jax.stages.Wrapped:
        start = lambda root: self.learner.init(role_key(root, Role.INIT))
        return parallel.place_outputs(start, self.mesh, parallel.REPLICATED)

    def _filled(self) -> PyTree:
        return parallel.shard(self._data.fill(), self.mesh)

    def _initial_changing(self) -> PyTree:
        return jax.tree.map(jnp.copy, self._data.without_rows(self._rows))

    @property
    def _data(self) -> Data:
        assert self.learner.data is not None
        return self.learner.data

    def _body(
        self,
        learned: PyTree,
        changing: PyTree,
        rows: PyTree,
        held_out_rows: PyTree,
        root: Key,
        iteration: Any,
        count: Any,
    ):
        """Makes `count` updates from number `iteration` on; also returns validation metrics after them."""
        rows = own_replay(rows, self.learner)
        keys = keys_of(root, iteration, self.iterations)

        def update(state: tuple[PyTree, PyTree], i: Any):
            learned, changing = state
            key = UpdateKeys(*jax.tree.map(lambda x: x[i], keys))
            learned, replay, metrics = self.learner.step(learned, self._data.with_rows(changing, rows), None, key)
            metrics.pop("train/updates")
            return (learned, self._data.without_rows(replay)), metrics

        (learned, changing), total = repeat_updates(update, (learned, self._own(changing, rows)), count)
        metrics = {name: x / count for name, x in total.items()}
        if self._held_out is not None:
            metrics |= self._validated(self._held_out, learned, held_out_rows, root, iteration)
        return learned, joined_replay(changing), metrics

    def _own(self, changing: PyTree, rows: PyTree) -> PyTree:
        return jax.tree.map(lambda x, like: x.reshape(like.shape), changing, self._data.without_rows(rows))

    def _one_sample(self, changing: PyTree, rows: PyTree, key: Key) -> PyTree:
        rows = own_replay(rows, self.learner)
        assert self.learner.sample is not None
        return self.learner.sample(self._data.with_rows(self._own(changing, rows), rows), key)

    def sampled(self, state: LoopState, key: Key) -> PyTree:
        """Draws a batch of all devices, as an update does."""
        return self._sample(state.replay, self._rows, key)

    def _validated(
        self, held_out: Learner, learned: PyTree, held_out_rows: PyTree, root: Key, iteration: Any
    ) -> Metrics:
        """Returns the metrics of updates on held-out data, without making the updates."""
        held_out_rows = own_replay(held_out_rows, held_out)

        def body(total: Metrics, i: Any):
            key = jax.random.fold_in(role_key(root, Role.VALIDATE, iteration), i)
            _, _, metrics = held_out.step(learned, held_out_rows, None, key)
            return total, metrics

        metrics = jax.lax.scan(body, {}, jnp.arange(self._batches))[1]
        return {f"{VALIDATION}{name}": x.mean(0) for name, x in metrics.items() if not name.startswith("train/")}

    def advance(self, state: LoopState, seed: int, iteration: int, count: int = 1):
        numbers = np.uint32(iteration), np.uint32(count)
        out = self._advance(state.learner, state.replay, self._rows, self._held_out_rows, self._roots[seed], *numbers)
        learned, changing, metrics = jax.block_until_ready(out) if self._waits else out
        return LoopState(learned, changing, ()), self._counted(metrics, iteration + count), self._report(count)

    def _counted(self, metrics: Metrics, updates: int) -> Metrics:
        return {**metrics, "train/updates": np.uint32(updates), "data/epoch": np.float32(updates / self._epoch)}

    def _report(self, count: int) -> Episodes:
        """Returns the report of a call without episodes; its steps are updates."""
        report = dataclasses.replace(self._empty_report, steps=np.full((), count, np.int32))
        return jax.tree.map(lambda x: np.asarray(x)[None], report)

    def keep(self, state: LoopState) -> LoopState:
        return LoopState(self.learner.keep(state.learner), state.replay, ())

    def place(self, state: LoopState) -> LoopState:
        learned = parallel.replicate(self.learner.resume(state.learner), self.mesh)
        return LoopState(learned, parallel.shard(state.replay, self.mesh), ())


def repeat_updates(update: Callable[..., tuple[PyTree, Metrics]], state: PyTree, count: Any) -> tuple[PyTree, Metrics]:
    """Repeats `state, metrics = update(state, i)` for i = 0 .. count - 1; returns the state and the sums of metrics."""
    update, (_, shapes) = trace_once(update, state, jax.ShapeDtypeStruct((), jnp.uint32))

    def body(i, carry):
        state, metrics = update(carry[0], i)
        return state, jax.tree.map(jnp.add, carry[1], metrics)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(jnp.uint32(0), count, body, (state, zeros))


def keys_of(root: Key, first: Any, count: int) -> UpdateKeys:
    """Returns the keys of `count` updates from number `first` on, [count] each.

    They are computed together: one by one in the loop they took a twentieth of a small update.
    """
    split = lambda i: jax.random.split(role_key(root, Role.UPDATE, i))
    keys = jax.vmap(split)(first + jnp.arange(count, dtype=jnp.uint32))
    return UpdateKeys(keys[:, 0], keys[:, 1])
