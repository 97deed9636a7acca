"""Storage of every replay buffer here: a time-major ring that holds each row once.

Storage is [C, B, *]: C slots for each of B columns (environments). The slot at the head holds the observation after the
newest row and nothing else, so that every row finds its successor in the next slot, and can be sampled at once.

Rows that do not continue those before them begin one slot later, behind a seam: the slot at the head stays as it is, a
masked row with the observation after the newest. So no row loses its successor. In front of them stand the older frames
of their first observation, where stacks are stored as frames. Windows and sequences end at a seam.

Columns whose environments wait for each other share one head, and a step of all of them is one write. Others have heads
of their own and take as many rows as came (`Rollout.count`): what is padding in a rollout is not stored.

Where rows lie is `layout`, how they come there `writing`, what becomes of them `reading`; stacks are `frames`.

Written in place when the state is donated: in one program, add first and sample then. The other way round, or when a
number that is read from storage outlives a write to it, XLA copies the buffer.
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
from jrl.replay.layout import MASK, Layout, State
from jrl.types import Array, Batch, Key, PyTree, Rollout, SequenceBatch


class Storage(NamedTuple):
    """The functions of one ring. Slots and columns are i32 arrays of one shape."""

    init: Callable[[], State]
    add: Callable[[State, Rollout], State]
    draw: Callable[[State, Key, tuple[int, ...]], tuple[Array, Array]]  # -> slot, column: see `reading.draw`
    valid: Callable[[State, Array, Array], Array]  # (state, slot, column) -> bool: the row is not masked
    can_begin: Callable[[State], Array]  # state -> [] bool: one can, and not all rows are masked
    held: Callable[[State], Array]  # state -> [] i32, rows of all columns, masked ones too
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
) -> Storage:
    """See `ring.make`; `length` is how many rows of a column a sample spans.

    Raises:
      InputError: capacity, n_step or frame_stack cannot be.
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
    )
    if faults := list(layout.faults()):
        raise InputError(*faults)
    of_layout = lambda function: functools.partial(function, layout)
    return Storage(
        init=of_layout(_init),
        add=of_layout(writing.add),
        draw=of_layout(reading.draw),
        valid=of_layout(reading.valid),
        can_begin=of_layout(reading.can_begin),
        held=of_layout(reading.held),
        transitions=of_layout(reading.transitions),
        sequences=of_layout(reading.sequences),
        layout=layout,
    )


def _init(layout: Layout) -> State:
    """Makes the ring before any row came."""
    rows = lambda x: jnp.zeros((layout.slots, layout.columns, *x.shape), x.dtype)
    flat = lambda dtype: jnp.zeros((layout.slots, layout.columns), dtype)
    return State(
        obs=jax.tree.map(lambda x: rows(frames.stored(x, layout.stack)), layout.obs),
        action=jax.tree.map(rows, layout.action),
        reward=flat(jnp.float32),
        flags=flat(jnp.uint8),
        extras=jax.tree.map(rows, layout.extras),
        head=jnp.zeros(layout.clock, jnp.int32),
        length=jnp.zeros(layout.clock, jnp.int32),
        live=jnp.zeros((), jnp.int32),
    )


def live(flags: np.ndarray, head: np.ndarray, length: np.ndarray, devices: int) -> np.ndarray:
    """Returns `State.live` on each of some devices, [D] i32, whose rings lie one behind the other; on the host."""
    flags = flags.reshape(devices, -1, flags.shape[1])
    head, length = (np.broadcast_to(x.reshape(devices, 1, -1), (devices, 1, flags.shape[2])) for x in (head, length))
    age = (head - 1 - np.arange(flags.shape[1])[None, :, None]) % flags.shape[1]
    return (((flags & MASK) != 0) & (age < length)).sum((1, 2), dtype=np.int32)
