"""Guard against non-finite updates: rejects them and stores the data to reproduce the first one.

    algo = guard.refuse_bad_updates(algo, batch_like)      # an Algo whose State is a Guarded

The check is part of the program, so the host never waits for it. After a bad update the state stays the last good
state. The caller reads `state.fault.found` or the metric NOT_FINITE at any later time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.ops import collectives
from jrl.types import NOT_FINITE, Algo, Array, Key, PyTree, Rollout, UpdateAux

_SMALL = 1 << 20  # bytes up to which accelerators select instead of branching, because a branch waits for the host


@struct.dataclass
class BadUpdate:
    """The first non-finite update; empty if there is none."""

    found: Array  # [] bool
    in_loss: Array  # [] bool, a loss was not finite
    in_params: Array  # [] bool, a new parameter was not finite
    key: Array  # [2] u32, key data of the update
    batch: PyTree  # Batch or Rollout of the update, of all devices


@struct.dataclass
class Guarded:
    state: PyTree  # the algorithm's State; the last good one once `fault.found`
    fault: BadUpdate

    @property
    def updates(self) -> Array:
        return self.state.updates


def refuse_bad_updates(algo: Algo, like: PyTree, *, axis_name: str | None = None) -> Algo:
    """Returns an Algo that rejects non-finite updates and stores the first of them.

    Args:
      algo: any algorithm; its State has `params`.
      like: shapes and dtypes of its Batch [N] or Rollout [T, B], over all devices.
      axis_name: mapped axis over devices; None: no such axis.
    Returns:
      An Algo with the State Guarded.
    """

    def init(key: Key) -> Guarded:
        return init_state(algo.init(key), like)

    def update(state: Guarded, batch: PyTree, key: Key) -> tuple[Guarded, UpdateAux]:
        new, aux = algo.update(state.state, batch, key)
        bad_loss = ~_finite({k: v for k, v in aux.metrics.items() if k.startswith("loss/")})
        bad_params = ~_finite(new.params)
        # all devices must reject the update, or none
        bad_loss, bad_params = collectives.any_device(jnp.stack([bad_loss, bad_params]), axis_name)
        fault, bad = state.fault, bad_loss | bad_params

        def note(fault: BadUpdate) -> BadUpdate:
            data = jax.random.key_data(key)
            return BadUpdate(jnp.ones((), bool), bad_loss, bad_params, data, _of_all_devices(batch, axis_name))

        first = bad & ~fault.found
        branch = lambda fault: jax.lax.cond(first, note, lambda fault: fault, fault)
        choice = lambda fault: jax.tree.map(lambda old, new: jnp.where(first, new, old), fault, note(fault))
        if collectives.is_single_device(axis_name) and _bytes(batch) <= _SMALL:
            fault = jax.lax.platform_dependent(fault, cpu=branch, default=choice)
        else:
            fault = branch(fault)
        state = jax.tree.map(lambda old, new: jnp.where(fault.found, old, new), state.state, new)
        metrics = aux.metrics | {NOT_FINITE: fault.found.astype(jnp.float32)}
        return Guarded(state, fault), aux._replace(metrics=metrics)

    def ingest(state: Guarded, rollout: Rollout) -> Guarded:
        assert algo.ingest is not None
        new = algo.ingest(state.state, rollout)
        # non-finite observation statistics would spoil the last good state before the update is checked
        refused = state.fault.found | ~_finite(new) if algo.on_policy else state.fault.found
        return Guarded(jax.tree.map(lambda old, new: jnp.where(refused, old, new), state.state, new), state.fault)

    return algo._replace(
        init=init,
        actor=lambda state: algo.actor(state.state),
        update=update,
        ingest=ingest if algo.ingest else None,
    )


def init_state(state: PyTree, like: PyTree, zeros: Callable[..., Any] = jnp.zeros) -> Guarded:
    """Returns a state without a fault; `zeros` makes its arrays, on the device or (np.zeros) on the host."""
    no = lambda: zeros((), bool)
    batch = jax.tree.map(lambda x: zeros(x.shape, x.dtype), like)
    return Guarded(state, BadUpdate(no(), no(), no(), zeros((2,), np.uint32), batch))


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _finite(tree: PyTree) -> Array:
    """Returns whether all floats are finite; 0 times a non-finite number is NaN."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.isfinite(sum((jnp.sum(x * 0, dtype=jnp.float32) for x in floats), jnp.zeros(())))


def _of_all_devices(batch: PyTree, axis_name: str | None) -> PyTree:
    gather = functools.partial(collectives.all_gather, axis_name=axis_name)
    if not isinstance(batch, Rollout):
        return gather(batch)
    columns_first = {name: getattr(batch, name) for name in ("last_obs", "contiguous", "carry", "count")}
    rows_first = {name: x for name, x in vars(batch).items() if name not in columns_first}
    return Rollout(**gather(columns_first), **gather(rows_first, axis=1))
