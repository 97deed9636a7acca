"""Collecting and learning as one compiled program, for environments written in JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.learn import parallel
from jrl.learn.learner import Learner
from jrl.learn.program import (
    LoopState,
    Program,
    Role,
    empty_replay,
    joined_replay,
    over_iterations,
    own_replay,
    role_key,
    role_keys,
    vector_key,
)  # fmt: skip
from jrl.metrics import episodes as episode_metrics
from jrl.ops import scans
from jrl.rollout.sources import outside_compile_cache
from jrl.rollout.unroll import Unroll, UnrollState
from jrl.types import Episodes, Key, Metrics, PyTree, Rollout


class Fused(Program):
    """Collects and learns in one program, `iterations` times per call, on every device of the mesh.

    Args:
      learner: learner made with axis_name=parallel.AXIS.
      unroll: unroll over the environments of one device; if not pure, there must be a single device.
      rows: T * B over all devices.
      close: closes the environments.
    """

    def __init__(
        self,
        learner: Learner,
        unroll: Unroll,
        mesh: Mesh,
        *,
        iterations: int,
        rows: int,
        close: Callable[[], None] = lambda: None,
    ):
        super().__init__(learner, mesh, rows=rows)
        self.unroll, self.iterations = unroll, iterations
        self._devices = mesh.devices.size
        if self._devices > 1 and not unroll.pure:
            raise ValueError(
                f"mesh: expected one device, as the environments are not pure, got {mesh.size}: use Staged"
            )
        self._close_environments = close
        self._initial_source: UnrollState | None = None  # result of `init`; impure environments cannot be made again
        self._advance: Callable[..., Any] | None = None
        self._waits = parallel.must_wait(mesh)

    def init(self, seed: int) -> LoopState:
        pure = self.unroll.pure
        root = jax.random.key(seed)
        source = () if pure else self._environments(root)  # not while tracing: the reset runs on the host
        if self._advance is None:
            loops = self.learner.sample is not None
            specs = self._in_specs, self._out_specs
            mapped = parallel.pmap(self.body, self.mesh, *specs, donate_argnums=(0,), loops=loops, pure=pure)
            if pure:  # compile in a thread while the state is made
                counts = [jax.ShapeDtypeStruct((), jnp.uint32)] * 2
                shapes = (*jax.eval_shape(self._start, root, source), *counts)
                self._advance = parallel.compile_ahead(mapped, shapes, self.mesh, self._in_specs)
            else:
                self._advance = outside_compile_cache(mapped)
        state, self._roots[seed] = self._start(root, source)
        state = dataclasses.replace(state, replay=self._initial_replay(state.replay))
        self._initial_source = None if pure else state.source
        return state

    @functools.cached_property
    def _start(self) -> jax.stages.Wrapped:
        """Returns the program that makes the initial state; it also returns the key."""

        def start(root, source):
            return self.init_state(root, source), root

        return parallel.place_outputs(start, self.mesh, (self._specs, parallel.REPLICATED))

    def init_state(self, root: Key, source: PyTree = ()) -> LoopState:
        """Returns the initial state of a run; `source` are the environments if they are not pure."""
        source = self._environments(root) if self.unroll.pure else source
        learned = self.learner.init(role_key(root, Role.INIT))
        return LoopState(learned, empty_replay(self.learner, self._devices), source)

    _specs = LoopState(parallel.REPLICATED, parallel.PER_DEVICE, parallel.PER_DEVICE)
    _in_specs = (_specs, parallel.REPLICATED, parallel.REPLICATED, parallel.REPLICATED)
    _out_specs = (_specs, parallel.REPLICATED, parallel.PER_DEVICE)

    def _environments(self, root: Key) -> UnrollState:
        key = role_key(root, Role.ENV)
        states = [self.unroll.init(vector_key(key, i, self._devices), i) for i in range(self._devices)]
        return jax.tree.map(lambda *x: jnp.stack(x), *states)

    def _collect(self, learner: PyTree, source: UnrollState, key: Key):
        device = jax.lax.axis_index(parallel.AXIS)
        return self.unroll.step(source, self.learner.actor(learner), vector_key(key, device, self._devices), device)

    def body(self, state: LoopState, root: Key, iteration: Any, count: Any) -> tuple[LoopState, Metrics, Episodes]:
        """Makes `count` iterations from number `iteration` on, on one device inside a mapped program."""

        def one(state: LoopState, i):
            collect_key, update_key = keys[:, i]
            source, rollout, report = self._collect(state.learner, state.source, collect_key)
            learned, replay, metrics = self.learner.step(state.learner, state.replay, rollout, update_key)
            return LoopState(learned, replay, source), (metrics, report)

        numbers = iteration + jnp.arange(self.iterations, dtype=jnp.uint32)
        keys = role_keys(root, (Role.COLLECT, Role.UPDATE), numbers)
        state = LoopState(state.learner, own_replay(state.replay, self.learner), _mine(state.source))
        state, (metrics, reports) = _repeat(one, state, self.iterations, count)
        state = LoopState(state.learner, joined_replay(state.replay), _stacked(state.source))
        reports = episode_metrics.add_stacked_reports(reports, count)
        return state, over_iterations(metrics, count), _stacked(reports)

    def advance(self, state: LoopState, seed: int, iteration: int, count: int | None = None):
        assert self._advance is not None
        numbers = np.uint32(iteration), np.uint32(self.iterations if count is None else count)
        out = self._advance(state, self._roots[seed], *numbers)
        return jax.block_until_ready(out) if self._waits else out

    @functools.cached_property
    def _collecting(self) -> Callable[..., Any]:
        def body(learner, source, key):
            source, rollout, report = self._collect(learner, _mine(source), key)
            return _stacked(source), rollout, _stacked(report)

        per_device, same = parallel.PER_DEVICE, parallel.REPLICATED
        out_specs = (per_device, parallel.ROLLOUT, per_device)
        return parallel.pmap(body, self.mesh, (same, per_device, same), out_specs, pure=self.unroll.pure)

    def collect(self, state: LoopState, seed: int, iteration: int, call: int = 0):
        key = self._keys(seed, iteration, call)[0]
        source, rollout, report = self._collecting(state.learner, state.source, key)
        return dataclasses.replace(state, source=source), rollout, report

    def learn(self, state: LoopState, rollout: Rollout, seed: int, iteration: int, call: int = 0):
        key = self._keys(seed, iteration, call)[1]
        learned, replay, metrics = self._learning(state.learner, state.replay, rollout, key)
        return LoopState(learned, replay, state.source), metrics

    def discontinue(self, state: LoopState) -> LoopState:
        started = jnp.zeros_like(state.source.started)
        return dataclasses.replace(state, source=dataclasses.replace(state.source, started=started))

    def keep(self, state: LoopState) -> LoopState:
        source = state.source if self.unroll.pure else state.source.columns
        return LoopState(self.learner.keep(state.learner), self._without_data(state.replay), source)

    def place(self, state: LoopState) -> LoopState:
        source = state.source
        if self._initial_source is not None:
            source = dataclasses.replace(self._initial_source, columns=episode_metrics.clear_running(source))
        learned = parallel.replicate(self.learner.resume(state.learner), self.mesh)
        replay = parallel.shard(self._with_data(state.replay), self.mesh)
        return LoopState(learned, replay, parallel.shard(source, self.mesh))

    def close(self) -> None:
        self._close_environments()


def _mine(tree: PyTree) -> PyTree:
    """Returns this device's part inside a mapped program: [1, ...] -> [...]."""
    return jax.tree.map(lambda x: x[0], tree)


def _stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)


def _repeat(one: Callable, state: PyTree, most: int, count) -> tuple[PyTree, PyTree]:
    """Repeats `state, out = one(state, i)` for i = 0 .. count - 1, like `lax.scan` with a traced length up to `most`.

    Stacked rows beyond `count` are 0.
    """
    if most == 1:
        state, out = one(state, jnp.uint32(0))
        return state, _stacked(out)
    one, (_, like) = scans.trace_once(one, state, jax.ShapeDtypeStruct((), jnp.uint32))
    # most outputs are scalars: writing one into a row of a loop costs a kernel
    rows = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), jax.eval_shape(scans.pack, like))

    def body(i, carry):
        state, out = one(carry[0], i)
        return state, jax.tree.map(lambda row, rows: rows.at[i].set(row), scans.pack(out), carry[1])

    state, rows = jax.lax.fori_loop(jnp.uint32(0), count, body, (state, rows))
    return state, scans.unpack(rows)
