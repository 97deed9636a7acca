"""Sequences from replay for recurrent learners (R2D2, Kapturowski et al., 2019), uniform or by priority.

buffer = sequences.make(obs, action, capacity=100_000, num_envs=8, batch_size=32, gamma=0.99, length=80, burn_in=40)
batch = buffer.sample(state, key)  # a SequenceBatch: batch.window.obs [32, 121, *], batch.reward [32, 80]
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrl.replay import prioritized, storage
from jrl.replay.layout import State
from jrl.types import Buffer, Key, PyTree, SequenceBatch


def make(
    obs: PyTree,
    action: PyTree,
    *,
    batch_size: int,
    length: int,
    burn_in: int = 0,
    alpha=None,
    beta=1.0,
    eps=1e-6,
    num_devices: int = 1,
    by_updates: bool = False,
    **options: Any,
) -> Buffer:
    """Makes a ring of the latest rows, sampled as sequences that may begin at any row and overlap.

    Args:
      obs, action, options: see `ring.make`. A window of `n_step` also ends with the sequence and bootstraps from the
        next row. `extras` are stored for `SequenceBatch.extras`: `carry` is the recurrent state before a row; a
        sample's first becomes `window.carry`.
      batch_size: N, sequences per sample on this device.
      length: L, rows to learn from.
      burn_in: K, rows before them, which recover the recurrent state.
      alpha: exponent of the priorities; None: uniform sampling.
      beta, eps, num_devices, by_updates: see `prioritized.sampler`. A sequence has the priority of its first row.
    Returns:
      A Buffer of SequenceBatches; a sequence can begin at a row once all K + L rows exist. Weights of masked rows are
      0. Other weights are 1 on average, times the importance weight of their sequence with priorities.
    Raises:
      InputError: the capacity is too small for a sequence beside a rollout, or invalid n_step or frame_stack.
    """
    rows = storage.make(obs, action, length=burn_in + length, **options)

    def read(state: State, slot, column, weight, key: Key) -> SequenceBatch:
        return rows.sequences(state, slot, column, weight, burn_in, key)

    if alpha is not None:
        sampler = prioritized.sampler(
            rows.layout, batch_size, alpha=alpha, beta=beta, eps=eps, num_devices=num_devices, by_updates=by_updates
        )
        return prioritized.buffer(rows, sampler, read)

    def sample(state: State, key: Key):
        draw_key, window_key = jax.random.split(key)
        slot, column = rows.draw(state, draw_key, (batch_size,))
        return read(state, slot, column, jnp.ones((batch_size,)), window_key)

    return Buffer(rows.init, rows.add, sample, rows.can_begin, rows.held, live=lambda state: state.live)
