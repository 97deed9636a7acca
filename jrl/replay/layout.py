"""Layout of a ring: where its rows lie, and what a byte says of each."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.replay import frames
from jrl.replay.frames import FrameStack
from jrl.types import PyTree

# State.flags: three bits, and from the fourth on the age: steps since the episode's first observation, at most S - 1
MASK, TERMINATED, TRUNCATED, AGE = 1, 2, 4, 3
# in a ring's extras, of rows whose transitions go to the end of their episode: {"reward": f32, the discounted return
# from there on, "discount": f32, of what follows upon the episode, "steps": i32, to its end}
TO_END = "to_end"
SEAM = TRUNCATED  # of a masked row: what comes next does not continue what was before


@struct.dataclass
class State:
    """The ring. Row t of the rollouts lies in slot t % C."""

    obs: PyTree  # [C, B, *]; of frame stacks the newest frame
    action: PyTree  # [C, B, *]
    reward: jax.Array  # [C, B] f32
    flags: jax.Array  # [C, B] u8: mask, terminated, truncated, age
    extras: dict[str, PyTree]  # [C, B, *]
    head: jax.Array  # i32, the slot of the next row: [], or [1, B] where each column has its own
    length: jax.Array  # as `head`, rows per column that are held: the slots before the head
    live: jax.Array  # [] i32, those of them that are not masked


@dataclasses.dataclass(frozen=True)
class Layout:
    """Facts known of a ring before any row comes.

    A number of each head is [] where the columns share one, else [1, B]; slots of n rows in a row are [n] or [n, B].
    """

    obs: PyTree  # of one environment, ShapeDtypeStructs; so are the next two
    action: PyTree
    extras: dict[str, PyTree]
    stack: FrameStack
    capacity: int  # rows of all columns
    columns: int  # B
    every: jax.Array  # [B] i32, all of them
    length: int  # rows of a column that a sample spans
    gamma: Any  # discount of one step; may be traced
    n_step: int | tuple[int, int]  # steps of a transition, or the fewest and the most
    in_step: bool  # the columns share one head
    to_end: bool = False  # transitions go to the end of their episode, as the extras TO_END say
    next_action: bool = False  # samples have `types.NEXT_ACTION` among their extras

    @property
    def slots(self) -> int:
        """Returns C."""
        return self.capacity // self.columns

    @property
    def spare(self) -> int:
        """Slots that are never sampled: the head, and the oldest S - 1 rows, whose stacks have lost a frame."""
        return self.stack.size

    @property
    def lead(self) -> int:
        """Slots of the older frames in front of rows behind a seam, S - 1."""
        return self.stack.size - 1

    @property
    def clock(self) -> tuple[int, ...]:
        """Returns the shape of a number of each head."""
        return () if self.in_step else (1, self.columns)

    @property
    def reach(self) -> tuple[int, int]:
        """Returns the fewest and the most steps of a transition."""
        return self.n_step if isinstance(self.n_step, tuple) else (self.n_step, self.n_step)

    def slot_of(self, number):
        """Returns a number of each head as the slots of one row, [1] or [1, B]."""
        return number[None] if self.in_step else number

    def after(self, start, count: int):
        """Returns the slots from each head on, [count] or [count, B]; not yet taken round the ring."""
        return start + (jnp.arange(count) if self.in_step else jnp.arange(count)[:, None])

    def of_column(self, number, column):
        """Returns a number of each head for the columns [...]."""
        return number if self.in_step else number[0, column]

    def too_small(self, slots: int, rollouts: str = "") -> str:
        """Says what is wrong with a capacity that holds fewer than so many slots."""
        spans = f", for sequences of {self.length} steps (network.max_seq_len and replay.burn_in)"
        return (
            f"replay.capacity: {self.capacity} is too small for {rollouts}{self.columns} environments: at least "
            f"{slots * self.columns}{spans if self.length > 1 else ''}"
        )

    def faults(self) -> Iterator[str]:
        """Yields what cannot be, each with what can."""
        stack, (low, high) = self.stack, self.reach
        if self.slots < (least := self.spare + self.length + 1):
            yield self.too_small(least)
        if not 1 <= low <= high:
            yield f"replay.n_step: {self.n_step} must be a number >= 1 or a range [low, high] of such"
        if stack.size > 1 and not any(frames.is_stack(x, stack) for x in jax.tree.leaves(self.obs)):
            shapes = [x.shape for x in jax.tree.leaves(self.obs)]
            yield f"replay.frame_stack: no {stack.size} frames on axis {stack.axis} of observations {shapes}: use 1"
        if not 1 <= stack.size <= 256 >> AGE:
            yield f"replay.frame_stack: {stack.size} must be in 1 .. {256 >> AGE}"


def take(ring, slot, column):
    """Reads rows of one leaf [C, B, *]: [..., *] for slots and columns [...]."""
    return ring.at[slot, column].get(mode="promise_in_bounds")


def take_all(rings: PyTree, slot, column) -> PyTree:
    """Reads rows of all leaves [C, B, *] of a tree, as `take` does."""
    return jax.tree.map(lambda ring: take(ring, slot, column), rings)


def is_seam(flags):
    """Says whether what comes next does not continue what was before, of flags [...] u8."""
    return (flags & (MASK | SEAM)) == SEAM
