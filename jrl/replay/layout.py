"""Layout of a ring: positions and flags of its rows."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.replay import frames, hindsight
from jrl.replay.frames import FrameStack
from jrl.replay.hindsight import Hindsight
from jrl.types import PyTree

# State.flags: three bits, then the age: steps since the episode's first observation, at most `Layout.most_age`
MASK = 1
TERMINATED = 2
TRUNCATED = 4
AGE = 3
# key of a ring's extras if transitions extend to the end of their episode: {"reward": f32, discounted return to the
# end, "discount": f32, discount of the value after the episode, "steps": i32, number of steps to the end}
TO_END = "to_end"
SEAM = TRUNCATED  # flag of a masked row: the next row does not continue the previous one


@struct.dataclass
class State:
    """Ring of rows. Row t of the rollouts is in slot t % C."""

    obs: PyTree  # [C, B, *]; only the newest frame of frame stacks
    action: PyTree  # [C, B, *]
    reward: jax.Array  # [C, B] f32
    flags: jax.Array  # [C, B] `Layout.flags_dtype`: mask, terminated, truncated, age
    extras: dict[str, PyTree]  # [C, B, *]
    head: jax.Array  # i32, slot of the next row: [], or [1, B] if each column has its own head
    length: jax.Array  # number of stored rows per column, before the head; shape of `head`
    live: jax.Array  # [] i32, number of stored rows that are not masked


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static facts about a ring.

    Numbers per head are [] if the columns share one head, else [1, B]; n consecutive slots are [n] or [n, B].
    """

    obs: PyTree  # ShapeDtypeStructs of one environment, as for `action` and `extras`
    action: PyTree
    extras: dict[str, PyTree]
    stack: FrameStack
    capacity: int  # number of rows over all columns
    columns: int  # B
    every: jax.Array  # [B] i32, indices of all columns
    length: int  # rows per sample, 1 for transitions
    gamma: Any  # discount of one step; may be traced
    n_step: int | tuple[int, int]  # steps per transition, or their minimum and maximum
    in_step: bool  # whether the columns share one head
    to_end: bool = False  # whether transitions extend to the end of their episode, by the extras TO_END
    next_action: bool = False  # whether samples have the extras `types.NEXT_ACTION`
    hindsight: Hindsight | None = None  # relabelling of the samples' goals; None: none

    @property
    def slots(self) -> int:
        """Returns C, the number of slots per column."""
        return self.capacity // self.columns

    @property
    def spare(self) -> int:
        """Returns the number of slots never sampled: the head, and the oldest S - 1 rows with incomplete stacks."""
        return self.stack.size

    @property
    def lead(self) -> int:
        """Returns S - 1, the number of slots for older frames in front of the rows after a seam."""
        return self.stack.size - 1

    @property
    def most_age(self) -> int:
        """Returns the largest age in the flags: S - 1 for frame stacks; hindsight needs the steps of episodes."""
        return self.lead if self.hindsight is None else 2**29 - 1

    @property
    def flags_dtype(self) -> Any:
        """Returns the dtype of the flags."""
        return jnp.uint8 if self.hindsight is None else jnp.uint32

    @property
    def clock(self) -> tuple[int, ...]:
        """Returns the shape of a number per head."""
        return () if self.in_step else (1, self.columns)

    @property
    def reach(self) -> tuple[int, int]:
        """Returns the minimum and maximum number of steps of a transition."""
        return self.n_step if isinstance(self.n_step, tuple) else (self.n_step, self.n_step)

    def slot_of(self, number):
        """Returns a number per head as the slots of one row, [1] or [1, B]."""
        return number[None] if self.in_step else number

    def after(self, start, count: int):
        """Returns `count` slots from each head on, [count] or [count, B], not yet modulo C."""
        return start + (jnp.arange(count) if self.in_step else jnp.arange(count)[:, None])

    def at_column(self, number, column):
        """Returns a number per head for the columns [...]."""
        return number if self.in_step else number[0, column]

    def too_small(self, slots: int, rollouts: str = "") -> str:
        """Returns the error message for a capacity with fewer than `slots` slots."""
        spans = f", for sequences of {self.length} steps (network.max_seq_len and replay.burn_in)"
        return (
            f"replay.capacity: {self.capacity} is too small for {rollouts}{self.columns} environments: at least "
            f"{slots * self.columns}{spans if self.length > 1 else ''}"
        )

    def faults(self) -> Iterator[str]:
        """Yields one message per invalid option."""
        stack, (low, high) = self.stack, self.reach
        if self.slots < (least := self.spare + self.length + 1):
            yield self.too_small(least)
        if not 1 <= low <= high:
            yield f"replay.n_step: {self.n_step} must be a number >= 1 or a range [low, high] of such"
        if stack.size > 1 and not any(frames.is_stack(x, stack) for x in jax.tree.leaves(self.obs)):
            shapes = [x.shape for x in jax.tree.leaves(self.obs)]
            yield f"replay.frame_stack: no {stack.size} frames on axis {stack.axis} of observations {shapes}: use 1"
        if self.hindsight is not None and frames.is_stack(self.obs[hindsight.DESIRED], stack):
            yield "replay.frame_stack: goals that are stacks cannot be relabelled: use 1, or leave replay.hindsight out"
        if not 1 <= stack.size <= 256 >> AGE:
            yield f"replay.frame_stack: {stack.size} must be in 1 .. {256 >> AGE}"


def take(ring, slot, column):
    """Reads rows of one leaf [C, B, *] for slots and columns [...]: [..., *]."""
    return ring.at[slot, column].get(mode="promise_in_bounds")


def take_all(rings: PyTree, slot, column) -> PyTree:
    """Reads rows of all leaves [C, B, *] of a tree, as `take` does."""
    return jax.tree.map(lambda ring: take(ring, slot, column), rings)


def is_seam(flags):
    """Returns whether rows with flags [...] u8 are seams: the next row does not continue the previous one."""
    return (flags & (MASK | SEAM)) == SEAM
