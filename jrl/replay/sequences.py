"""Sequences from replay for recurrent learners (R2D2, Kapturowski et al., 2019), uniform or by priority.

buffer = sequences.make(obs, action, capacity=100_000, num_envs=8, batch_size=32, gamma=0.99, length=80, burn_in=40)
batch = buffer.sample(state, key)  # a SequenceBatch: batch.window.obs [32, 121, *], batch.reward [32, 80]
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jrl.replay import prioritized, storage
from jrl.replay.frames import FrameStack as FrameStack
from jrl.replay.layout import State
from jrl.types import Buffer, Key, PyTree, SequenceBatch


def make(
    obs: PyTree,
    action: PyTree,
    *,
    capacity: int,
    num_envs: int,
    batch_size: int,
    gamma,
    length: int,
    burn_in: int = 0,
    n_step: int | tuple[int, int] = 1,
    frame_stack: FrameStack | None = None,
    extras: Mapping[str, PyTree] | None = None,
    alpha=None,
    beta=1.0,
    eps=1e-6,
    num_devices: int = 1,
    by_updates: bool = False,
    in_step: bool = True,
    next_action: bool = False,
) -> Buffer:
    """Makes a ring of the latest rows, sampled as sequences that may begin at any row and overlap.

    Args:
      obs, action, capacity, num_envs, gamma, frame_stack, in_step, next_action: see `ring.make`.
      batch_size: N, sequences per sample on this device.
      length: L, rows to learn from.
      burn_in: K, rows before them, which recover the recurrent state.
      n_step: as for `ring.make`; a window also ends with the sequence and bootstraps from the next row.
      extras: name -> ShapeDtypeStruct of one environment: the part of `Rollout.extras` to store for
        `SequenceBatch.extras`. `carry` is the recurrent state before a row; a sample's first becomes `window.carry`.
      alpha: exponent of the priorities; None: uniform sampling.
      beta, eps, num_devices, by_updates: see `prioritized.sampler`. A sequence has the priority of its first row.
    Returns:
      A Buffer of SequenceBatches; a sequence can begin at a row once all K + L rows exist. Weights of masked rows are
      0. Other weights are 1 on average, times the importance weight of their sequence with priorities.
    Raises:
      InputError: the capacity is too small for a sequence beside a rollout, or invalid n_step or frame_stack.
    """
    rows = storage.make(
        obs,
        action,
        capacity=capacity,
        num_envs=num_envs,
        gamma=gamma,
        n_step=n_step,
        frame_stack=frame_stack,
        extras=extras,
        length=burn_in + length,
        in_step=in_step,
        next_action=next_action,
    )

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
