"""Where the loop's rollouts come from: `next(actor, key) -> (Rollout, Episodes)`, `reset(key)` and `close()`."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import unroll
from jrl.rollout.collect import HostCollector
from jrl.types import ActOut, Env, Episodes, GraphEnv, Key, PyTree, Rollout


class Source(Protocol):
    """Yields rollouts of the same columns, one after the other."""

    columns: episodes.Columns  # episode statistics

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]: ...

    def reset(self, key: Key) -> None:
        """All environments to the start of an episode; `key` counts for graph environments only."""

    def close(self) -> None: ...


class GraphSource:
    """Rollouts of a GraphEnv as a program of its own. Arguments as `rollout.unroll.make`."""

    def __init__(self, env: GraphEnv, act: Callable[..., ActOut], *, key: Key, **options):
        functions = unroll.make(env, act, **options)
        self._env = env
        step = jax.jit(functions.step, donate_argnums=0)
        self._step = step if env.pure else outside_compile_cache(step)
        self._init = functions.init
        self._state: unroll.UnrollState
        self.reset(key)

    @property
    def columns(self) -> episodes.Columns:
        return self._state.columns

    @columns.setter
    def columns(self, columns: episodes.Columns) -> None:
        self._state = dataclasses.replace(self._state, columns=jax.device_put(columns, jax.local_devices()[0]))

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        self._state, rollout, report = self._step(self._state, actor, key)
        return rollout, report

    def reset(self, key: Key) -> None:
        # committed to the device, as the outputs of a step will be: another kind of input is another compilation
        self._state = jax.device_put(self._init(key), jax.local_devices()[0])

    def close(self) -> None:
        self._env.close()


def outside_compile_cache(fn: Callable) -> Callable:
    """`fn`, jitted, whose program is compiled at the first call and not written to the persistent cache.

    An EnvPool program holds the address of its pool: no other process could ever use the entry.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    compiled = False

    def call(*args):
        nonlocal compiled
        if compiled:
            return fn(*args)
        before = getattr(jax.config, name)
        jax.config.update(name, float("inf"))
        try:
            out = fn(*args)
        finally:
            jax.config.update(name, before)
        compiled = True
        return out

    return call


def make(
    env: GraphEnv | Env, act: Callable[..., ActOut], *, key: Key, timers: Timers | None = None, **options
) -> Source:
    """The source that fits the kind of environment."""
    if isinstance(env, GraphEnv):
        return GraphSource(env, act, key=key, **options)
    return HostCollector(env, act, timers=timers, **options)
