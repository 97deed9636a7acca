"""Storage of every replay buffer: a time-major ring that stores each row once.

Arrays are [C, B, *]: C slots for each of B columns (environments). The slot at the head stores only the observation
after the newest row. So every row finds its successor in the next slot, and can be sampled at once.

Rows that do not continue the previous rows begin one slot later, behind a seam. The slot at the head becomes a masked
row with the observation after the newest row, so that no row loses its successor. If frames of stacks are stored, the
older frames of the first observation come before the new rows. Windows and sequences end at a seam.

Columns of synchronous environments share one head, and one step of all columns is one write. Otherwise each column has
its own head and its own number of new rows (`Rollout.count`); padding is not stored.

`layout` defines the positions of rows, `writing` adds rows, `reading` makes batches, `frames` handles frame stacks.

A donated state is updated in place. Within a program, add before you sample; in the other order, or if a number read
from storage is used after a write, XLA copies the buffer.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import InputError
from jrl.replay import frames, reading, writing
from jrl.replay.frames import FrameStack
from jrl.replay.hindsight import Hindsight
from jrl.replay.layout import MASK, Layout, State
from jrl.types import Array, Batch, Key, PyTree, Rollout, SequenceBatch


class Storage(NamedTuple):
    """Functions of one ring. Slots and columns are i32 arrays of one shape."""

    init: Callable[[], State]
    add: Callable[[State, Rollout], State]
    draw: Callable[[State, Key, tuple[int, ...]], tuple[Array, Array]]  # -> slot, column: see `reading.draw`
    valid: Callable[[State, Array, Array], Array]  # (state, slot, column) -> bool, unmasked rows
    can_begin: Callable[[State], Array]  # state -> [] bool, see `reading.can_begin`
    held: Callable[[State], Array]  # state -> [] i32, number of rows over all columns, masked rows included
    # (state, slot [N], column [N], weight [N], key) -> Batch
    transitions: Callable[[State, Array, Array, Array, Key], Batch]
    # (state, slot [N], column [N], weight [N], burn_in, key) -> SequenceBatch of the `length` rows from there on
    sequences: Callable[[State, Array, Array, Array, int, Key], SequenceBatch]
    layout: Layout


def make(
    obs: PyTree,
    action: PyTree,
    *,
    capacity: int,
    num_envs: int,
    gamma,
    n_step: int | tuple[int, int] = 1,
    frame_stack: FrameStack | None = None,
    extras: Mapping[str, PyTree] | None = None,
    length: int = 1,
    in_step: bool = True,
    to_end: bool = False,
    next_action: bool = False,
    hindsight: Hindsight | None = None,
) -> Storage:
    """Returns the Storage of one ring. Arguments: see `ring.make`; `length` is the number of rows of a sample.

    Raises:
      InputError: capacity, n_step or frame_stack is not valid.
    """
    layout = Layout(
        obs=obs,
        action=action,
        extras=dict(extras or {}),
        stack=frame_stack or FrameStack(1),
        capacity=capacity,
        columns=num_envs,
        every=jnp.arange(num_envs),
        length=length,
        gamma=gamma,
        n_step=n_step,
        in_step=in_step,
        to_end=to_end,
        next_action=next_action,
        hindsight=hindsight,
    )
    if faults := list(layout.faults()):
        raise InputError(*faults)
    bind = lambda function: functools.partial(function, layout)
    return Storage(
        init=bind(_init),
        add=bind(writing.add),
        draw=bind(reading.draw),
        valid=bind(reading.valid),
        can_begin=bind(reading.can_begin),
        held=bind(reading.held),
        transitions=bind(reading.transitions),
        sequences=bind(reading.sequences),
        layout=layout,
    )


def _init(layout: Layout) -> State:
    rows = lambda x: jnp.zeros((layout.slots, layout.columns, *x.shape), x.dtype)
    flat = lambda dtype: jnp.zeros((layout.slots, layout.columns), dtype)
    return State(
        obs=jax.tree.map(lambda x: rows(frames.stored(x, layout.stack)), layout.obs),
        action=jax.tree.map(rows, layout.action),
        reward=flat(jnp.float32),
        flags=flat(layout.flags_dtype),
        extras=jax.tree.map(rows, layout.extras),
        head=jnp.zeros(layout.clock, jnp.int32),
        length=jnp.zeros(layout.clock, jnp.int32),
        live=jnp.zeros((), jnp.int32),
    )


def live(flags: np.ndarray, head: np.ndarray, length: np.ndarray, devices: int) -> np.ndarray:
    """Returns `State.live` of each device, [D] i32, for concatenated rings; on the host."""
    flags = flags.reshape(devices, -1, flags.shape[1])
    head, length = (np.broadcast_to(x.reshape(devices, 1, -1), (devices, 1, flags.shape[2])) for x in (head, length))
    age = (head - 1 - np.arange(flags.shape[1])[None, :, None]) % flags.shape[1]
    return (((flags & MASK) != 0) & (age < length)).sum((1, 2), dtype=np.int32)
