"""Sequences from replay, for recurrent learners: uniform, or by priority.

buffer = sequences.make(obs, action, capacity=100_000, num_envs=8, batch_size=32, length=80, burn_in=40)
sample = buffer.sample(state, key)  # sample.rollout.obs [120, 32, *]
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import struct

from jrl.replay import prioritized, ring, storage
from jrl.replay.storage import FrameStack as FrameStack
from jrl.types import Array, Buffer, Key, PyTree, Rollout


@struct.dataclass
class Sequences:
    """N stretches of consecutive rows, as if they were the columns of a rollout.

    They run on over episode ends; as in a rollout, the recurrent state starts anew after a row that is not in the mask.
    """

    rollout: Rollout  # [burn_in + length, N]; carry is what extras["carry"] was at row 0, () if that is not kept
    weight: Array  # [N] f32, 1, or the importance weight of prioritised sampling
    index: Array  # [N] i32, for `Buffer.set_priority`


def make(
    obs: PyTree,
    action: PyTree,
    *,
    capacity: int,
    num_envs: int,
    batch_size: int,
    length: int,
    burn_in: int = 0,
    frame_stack: FrameStack | None = None,
    extras: Mapping[str, PyTree] | None = None,
    alpha=None,
    beta=1.0,
    eps=1e-6,
    num_devices: int = 1,
) -> Buffer:
    """A ring of the latest rows, sampled as sequences that may begin at any row and overlap.

    Args:
      obs, action, capacity, num_envs, frame_stack: see `ring.make`.
      batch_size: N, sequences per sample on this device.
      length: rows to learn from.
      burn_in: rows before them, from which the recurrent state is recovered (R2D2, Kapturowski et al., 2019).
      extras: name -> of one environment; what is kept of `Rollout.extras`. `carry` is the recurrent state before a row.
      alpha: exponent of the priorities; None samples uniformly.
      beta, eps, num_devices: see `prioritized.sampler`. A sequence's priority is that of its first row's index.
    Returns:
      A Buffer whose samples are `Sequences`; a row can begin one as soon as all rows of it are there.
    Raises:
      InputError: the capacity holds no sequence beside a rollout, or frame_stack cannot be.
    """
    rows = storage.make(
        obs,
        action,
        capacity=capacity,
        num_envs=num_envs,
        gamma=1.0,
        frame_stack=frame_stack,
        extras=extras,
        length=burn_in + length,
    )

    def read(state: storage.State, slot, column, weight, key: Key) -> Sequences:
        return Sequences(rows.sequences(state, slot, column), weight, slot * num_envs + column)

    if alpha is not None:
        sampler = prioritized.sampler(rows, batch_size, alpha=alpha, beta=beta, eps=eps, num_devices=num_devices)
        return prioritized.buffer(rows, sampler, read)

    def sample(state: storage.State, key: Key):
        slot, column = ring.draw(rows, state, key, (batch_size,))
        return read(state, slot, column, jnp.ones((batch_size,)), key)

    can_sample = lambda state: state.length >= rows.length
    size = lambda state: state.length * num_envs
    return Buffer(rows.init, rows.add, sample, can_sample, size)
