"""Uniform replay: every unmasked row is drawn with the same probability.

buffer = ring.make(obs, action, capacity=100_000, num_envs=8, batch_size=128, gamma=0.99)
state = jax.jit(buffer.add, donate_argnums=0)(buffer.init(), rollout)
batch = buffer.sample(state, key)
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jrl.replay import storage
from jrl.replay.frames import FrameStack as FrameStack
from jrl.replay.hindsight import Hindsight
from jrl.types import Buffer, Key, PyTree


def make(
    obs: PyTree,
    action: PyTree,
    *,
    capacity: int,
    num_envs: int,
    batch_size: int,
    gamma,
    n_step: int | tuple[int, int] = 1,
    frame_stack: FrameStack | None = None,
    extras: Mapping[str, PyTree] | None = None,
    in_step: bool = True,
    next_action: bool = False,
    redraw: bool = True,
    to_end: bool = False,
    hindsight: Hindsight | None = None,
) -> Buffer:
    """Makes a ring of the latest rows, sampled uniformly.

    Args:
      obs, action: of one environment, pytrees of ShapeDtypeStructs.
      capacity: rows, over all columns; a whole number of vector steps is used of it. One step of them is the hole at
        the head, and with frame stacks of S the oldest S - 1 steps are not sampled.
      num_envs: B, environments on this device.
      batch_size: N, transitions per sample on this device.
      gamma: discount of one step; may be traced.
      n_step: steps of a transition, or a range [low, high] from which each draws its own. A window is cut at an
        episode's end and at the newest row, and bootstraps there from what follows unless the end was a true one.
      frame_stack: store one frame per row of observations that are stacks of them.
      extras: name -> of one environment; what is kept of `Rollout.extras`, for `Batch.extras`.
      in_step: every add brings each column as many rows, and `Rollout.count` is not read. Without, writes are slower.
      next_action: samples tell what was done after each transition: `types.NEXT_ACTION` in `Batch.extras`.
      redraw: draw another row where one is masked. Without, which rows are drawn follows from the key alone, and
        buffers whose columns are masked at other times draw the same.
      to_end: transitions go to the end of their episode instead; the extras TO_END say where that is, see `layout`.
      hindsight: relabels a part of each sample with goals that its episodes achieved; None: samples are as stored.
    Returns:
      A Buffer. The weight of a masked row is 0, of all others the same, 1 on average.
    Raises:
      InputError: the capacity does not hold a rollout, or n_step or frame_stack cannot be.
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
        in_step=in_step,
        to_end=to_end,
        next_action=next_action,
        hindsight=hindsight,
    )

    def sample(state, key: Key):
        draw_key, window_key = jax.random.split(key)
        # draw two candidates and use the second if the first is masked: all unmasked rows stay equally likely
        slot, column = rows.draw(state, draw_key, (2 if redraw else 1, batch_size))
        valid = rows.valid(state, slot, column)
        slot, column = (jnp.where(valid[0], x[0], x[-1]) for x in (slot, column))
        weight = valid.any(0).astype(jnp.float32)
        weight = weight / jnp.maximum(weight.mean(), 1.0 / batch_size)
        return rows.transitions(state, slot, column, weight, window_key)

    live = lambda state: state.live
    return Buffer(rows.init, rows.add, sample, rows.can_begin, rows.held, live=live)
