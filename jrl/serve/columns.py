"""The rows of episodes that clients play, column by column, from the action to the learner that takes them.

A row is written when its action is chosen, and complete once the next observation of its column has come: with it the
reward and how the step ended. The rows of a column are those of a `Rollout` (`jrl.types.StepResult` says which): a row
with the final observation stands behind an end and is masked, and one that broke off is masked and marked as failed.
"""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jrl.rollout import complete
from jrl.rollout.complete import Agents
from jrl.types import PyTree

# what the latest row of a column is, whose result has not come
_NONE, _STEP, _FINAL, _BROKEN = range(4)


class Ends(NamedTuple):
    """Ends of the latest rows of N columns, which clients send with the observations after them."""

    reward: np.ndarray  # [N] f32
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool


class Taken(NamedTuple):
    """T rows of B columns; those behind `filled` are padding with the observation that comes next."""

    rows: tuple[PyTree, PyTree, PyTree]  # obs, action, extras [T, B, *]
    last_obs: PyTree  # [B, *]
    ends: Ends  # [T, B]
    mask: np.ndarray  # [T, B] bool
    failed: np.ndarray  # [T, B] bool
    filled: np.ndarray  # [B] i32, rows that are no padding
    carry: PyTree  # [B, ...] before row 0; () without
    contiguous: np.ndarray  # [B] bool
    version: np.ndarray  # [T, B] i64, of the weights that chose
    # of rows that were dropped before row 0: where their episode began anew [B] bool, and since then its return [B] f32
    # and steps [B] i32
    lost: tuple[np.ndarray, np.ndarray, np.ndarray]


class Columns:
    """Rings of rows, of one size, for B columns. Not thread-safe: `Table.lock` guards it.

    Args:
      num: B.
      length: T, rows of a column in a rollout.
      capacity: rows of a column that are kept until they are taken; then the oldest go.
      agents: of several what the columns are; None: one. Leaves of rows that are of some columns alone are written for
        all, and taken of those.
    Attributes:
      dropped: rows that no learner got, so far.
      failures: episodes that broke off, so far.
    """

    def __init__(self, num: int, length: int, capacity: int, agents: Agents | None = None):
        self._num, self._length, self._agents = num, length, agents
        self._capacity = max(capacity, length)
        self._slots = self._capacity + 1  # the row under way has one
        self.dropped = self.failures = 0
        flags = np.zeros((4, self._slots, num), bool)
        self._terminated, self._truncated, self._mask, self._failed = flags
        self._reward = np.zeros((self._slots, num), np.float32)
        self._version = np.zeros((self._slots, num), np.int64)
        self._first, self._next = np.zeros((2, num), np.int64)  # complete rows are first .. next - 1
        self._kind = np.full(num, _NONE)
        self._continues, self._restarted, self._wrote = np.zeros((3, num), bool)
        self._return, self._steps = np.zeros(num, np.float32), np.zeros(num, np.int32)  # of rows that were dropped
        self._rows: PyTree = None  # (obs, action, extras, carry), [S, B, *], once the first were written
        self._taken_at = time.monotonic()
        self._full_at: float | None = None

    def write(self, column: np.ndarray, row: PyTree, version: int | np.ndarray, ends: Ends, final: np.ndarray) -> None:
        """Completes the latest rows of N different columns, and begins the next.

        Args:
          column: [N].
          row: (obs, action, extras, carry before), [N, *].
          version: of the weights that chose, [N] or one.
          ends: of the latest rows.
          final: [N] bool, the observation is the last of its episode: its action is never taken.
        """
        self._complete(column, ends)
        if self._rows is None:
            self._rows = jax.tree.map(lambda x: np.zeros((self._slots, self._num, *x.shape[1:]), x.dtype), row)
        slot = self._next[column] % self._slots

        def put(ring: np.ndarray, x: np.ndarray) -> None:
            ring[slot, column] = x

        jax.tree.map(put, self._rows, row)
        self._version[slot, column] = version
        self._kind[column] = np.where(final, _FINAL, _STEP)
        self._wrote[column] = True
        if self._full_at is None and (self._next - self._first >= self._length).any():
            self._full_at = time.monotonic()

    def _complete(self, column: np.ndarray, ends: Ends) -> None:
        kind = self._kind[column]
        begun = kind != _NONE
        column, kind = column[begun], kind[begun]
        slot, real = self._next[column] % self._slots, kind == _STEP
        self._mask[slot, column], self._failed[slot, column] = real, kind == _BROKEN
        self._reward[slot, column] = np.where(real, ends.reward[begun], 0)
        self._terminated[slot, column] = real & ends.terminated[begun]
        self._truncated[slot, column] = real & ends.truncated[begun]
        self._next[column] += 1
        full = column[self._next[column] - self._first[column] > self._capacity]
        if len(full):
            self._drop(full)

    def _drop(self, column: np.ndarray) -> None:
        """Drops the oldest row of these columns."""
        slot = self._first[column] % self._slots
        real = self._mask[slot, column]
        self._return[column] += np.where(real, self._reward[slot, column], 0)
        self._steps[column] += real
        over = self._terminated[slot, column] | self._truncated[slot, column] | self._failed[slot, column]
        ended = column[over]
        self._return[ended], self._steps[ended], self._restarted[ended] = 0, 0, True
        self._first[column] += 1
        self._continues[column] = False
        self.dropped += int(real.sum())

    def break_off(self, column: Sequence[int]) -> None:
        """Marks the steps under way of an episode's columns as failed: their results will never come."""
        begun = [i for i in column if self._kind[i] == _STEP]
        self._kind[begun] = _BROKEN
        self.failures += bool(begun)

    # ------------------------------------------------------------ for the learner

    def wait(self) -> float | None:
        """Seconds until a rollout can be taken, 0 for now; None: not before more rows have come.

        That is when all columns at work have T rows, or when twice the time has passed that the first of them took.
        """
        ready = self._next - self._first >= self._length
        if not ready.any() or self._full_at is None:
            return None
        if ready[self._wrote].all():
            return 0.0
        return max(0.0, 2 * self._full_at - self._taken_at - time.monotonic())

    def take(self) -> Taken:
        """Returns the oldest T rows of each column, or those that there are."""
        count = np.minimum(self._next - self._first, self._length).astype(np.int32)
        t, every = np.arange(self._length)[:, None], np.arange(self._num)
        slot = (self._first + np.minimum(t, count)) % self._slots
        real = t < count
        obs, action, extras, carry = self._rows
        columns_of = functools.partial(complete.find_leaf_columns, self._agents, self._num)

        def at(tree: PyTree, slot: np.ndarray, own: Sequence[np.ndarray | None]) -> PyTree:
            leaves, structure = jax.tree.flatten(tree)
            pairs = zip(leaves, own, strict=True)
            found = [ring[slot, every] if own is None else ring[slot[..., own], own] for ring, own in pairs]
            return jax.tree.unflatten(structure, found)

        seen, everywhere = columns_of((obs,), {}), [None] * len(jax.tree.leaves(carry))
        flags = lambda ring: ring[slot, every] & real
        taken = Taken(
            (
                at(obs, slot, seen),
                at(action, slot, columns_of((action,), {})),
                at(extras, slot, columns_of((), extras)),
            ),
            at(obs, (self._first + count) % self._slots, seen),
            Ends(np.where(real, self._reward[slot, every], 0), flags(self._terminated), flags(self._truncated)),
            flags(self._mask),
            flags(self._failed),
            count,
            at(carry, self._first % self._slots, everywhere),
            self._continues.copy(),
            self._version[slot, every],
            (self._restarted.copy(), self._return.copy(), self._steps.copy()),
        )
        self._first += count
        self._continues |= count > 0
        self._return[:], self._steps[:], self._restarted[:], self._wrote[:] = 0, 0, False, False
        self._taken_at = time.monotonic()
        self._full_at = self._taken_at if (self._next - self._first >= self._length).any() else None
        return taken

    def drop_before(self, oldest: int) -> None:
        """Drops rows that weights of versions below `oldest` chose, and those before them."""
        ready = self._next - self._first
        t = np.arange(int(ready.max(initial=0)))[:, None]
        stale = (self._version[(self._first + t) % self._slots, np.arange(self._num)] < oldest) & (t < ready)
        count = np.max(np.where(stale, t + 1, 0), axis=0, initial=0)  # up to the last of them
        while (column := np.flatnonzero(count)).size:
            self._drop(column)
            count[column] -= 1
