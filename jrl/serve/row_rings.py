"""Rows of clients' episodes, in a ring for each column, from the action to the rollout.

A row is written when its action is chosen. It is complete when the column's next observation arrives, with the reward
and the end flags of the step. The rows of a column are rows of a `Rollout` (see `jrl.types.StepResult`): a masked row
with the final observation follows an end, and an interrupted row is masked and marked as failed.
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

_NONE, _STEP, _FINAL, _BROKEN = range(4)  # kinds of a column's latest row, which is not complete


class RowResults(NamedTuple):
    """Results of the latest rows of N columns, which clients send with the next observations."""

    reward: np.ndarray  # [N] f32
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool


class RowBatch(NamedTuple):
    """T rows of B columns. Rows after the first `filled` are padding with the next observation."""

    rows: tuple[PyTree, PyTree, PyTree]  # obs, action, extras [T, B, *]
    last_obs: PyTree  # [B, *]
    results: RowResults  # [T, B]
    mask: np.ndarray  # [T, B] bool
    failed: np.ndarray  # [T, B] bool
    filled: np.ndarray  # [B] i32, rows without padding
    carry: PyTree  # [B, ...] memory before row 0; () without memory
    contiguous: np.ndarray  # [B] bool
    version: np.ndarray  # [T, B] i64, version of the weights that chose the action
    # rows dropped before row 0: whether an episode started [B] bool, the episode's return [B] f32 and steps [B] i32
    dropped: tuple[np.ndarray, np.ndarray, np.ndarray]


class RowRings:
    """Rings of rows, of one size, for B columns. Not thread-safe: `EpisodeTable.lock` guards them.

    Args:
      num: B.
      length: T, rows of a column in a rollout.
      capacity: maximum number of waiting rows of a column; the oldest rows are dropped.
      agents: agents of the columns; None: a single agent. Leaves that only some columns have are stored for all
        columns, and read for these columns.
    Attributes:
      dropped: number of rows that no rollout got.
      failures: number of interrupted episodes.
    """

    def __init__(self, num: int, length: int, capacity: int, agents: Agents | None = None):
        self._num, self._length, self._agents = num, length, agents
        self._capacity = max(capacity, length)
        self._slots = self._capacity + 1  # an incomplete row has a slot, too
        self.dropped = self.failures = 0
        flags = np.zeros((4, self._slots, num), bool)
        self._terminated, self._truncated, self._mask, self._failed = flags
        self._reward = np.zeros((self._slots, num), np.float32)
        self._version = np.zeros((self._slots, num), np.int64)
        self._first, self._next = np.zeros((2, num), np.int64)  # complete rows are first .. next - 1
        self._kind = np.full(num, _NONE)
        self._continues, self._restarted, self._is_active = np.zeros((3, num), bool)
        self._return, self._steps = np.zeros(num, np.float32), np.zeros(num, np.int32)  # sums over dropped rows
        self._rows: PyTree = None  # (obs, action, extras, carry) [S, B, *]; None: before the first row
        self._taken_at = time.monotonic()
        self._full_at: float | None = None

    def write(
        self, column: np.ndarray, row: PyTree, version: int | np.ndarray, results: RowResults, final: np.ndarray
    ) -> None:
        """Completes the latest rows of N different columns, and writes their next rows.

        Args:
          column: [N] column indices.
          row: (obs, action, extras, carry before), [N, *].
          version: version of the weights that chose the actions, [N] or a single number.
          results: results of the latest rows.
          final: [N] bool, the observation is the last of its episode, and its action is ignored.
        """
        self._complete(column, results)
        if self._rows is None:
            self._rows = jax.tree.map(lambda x: np.zeros((self._slots, self._num, *x.shape[1:]), x.dtype), row)
        slot = self._next[column] % self._slots

        def put(ring: np.ndarray, x: np.ndarray) -> None:
            ring[slot, column] = x

        jax.tree.map(put, self._rows, row)
        self._version[slot, column] = version
        self._kind[column] = np.where(final, _FINAL, _STEP)
        self._is_active[column] = True
        if self._full_at is None and (self._next - self._first >= self._length).any():
            self._full_at = time.monotonic()

    def _complete(self, column: np.ndarray, results: RowResults) -> None:
        kind = self._kind[column]
        has_row = kind != _NONE
        column, kind = column[has_row], kind[has_row]
        slot, is_step = self._next[column] % self._slots, kind == _STEP
        self._mask[slot, column], self._failed[slot, column] = is_step, kind == _BROKEN
        self._reward[slot, column] = np.where(is_step, results.reward[has_row], 0)
        self._terminated[slot, column] = is_step & results.terminated[has_row]
        self._truncated[slot, column] = is_step & results.truncated[has_row]
        self._next[column] += 1
        full = column[self._next[column] - self._first[column] > self._capacity]
        if len(full):
            self._drop(full)

    def _drop(self, column: np.ndarray) -> None:
        """Drops the oldest row of each of these columns."""
        slot = self._first[column] % self._slots
        is_step = self._mask[slot, column]
        self._return[column] += np.where(is_step, self._reward[slot, column], 0)
        self._steps[column] += is_step
        over = self._terminated[slot, column] | self._truncated[slot, column] | self._failed[slot, column]
        ended = column[over]
        self._return[ended], self._steps[ended], self._restarted[ended] = 0, 0, True
        self._first[column] += 1
        self._continues[column] = False
        self.dropped += int(is_step.sum())

    def break_off(self, column: Sequence[int]) -> None:
        """Marks the latest steps of an episode's columns as failed, because their results are lost."""
        steps = [i for i in column if self._kind[i] == _STEP]
        self._kind[steps] = _BROKEN
        self.failures += bool(steps)

    # ------------------------------------------------------------ for the learner

    def find_wait(self) -> float | None:
        """Returns the seconds until a rollout is ready, 0: now; None: unknown until more rows arrive.

        A rollout is ready when all active columns have T rows, or after twice the time of the first such column.
        """
        ready = self._next - self._first >= self._length
        if not ready.any() or self._full_at is None:
            return None
        if ready[self._is_active].all():
            return 0.0
        return max(0.0, 2 * self._full_at - self._taken_at - time.monotonic())

    def take(self) -> RowBatch:
        """Removes and return the oldest T rows of each column, or all rows of a shorter column."""
        count = np.minimum(self._next - self._first, self._length).astype(np.int32)
        t, columns = np.arange(self._length)[:, None], np.arange(self._num)
        slot = (self._first + np.minimum(t, count)) % self._slots
        is_filled = t < count
        obs, action, extras, carry = self._rows
        find_columns = functools.partial(complete.find_leaf_columns, self._agents, self._num)

        def read(tree: PyTree, slot: np.ndarray, leaf_columns: Sequence[np.ndarray | None]) -> PyTree:
            leaves, structure = jax.tree.flatten(tree)
            pairs = zip(leaves, leaf_columns, strict=True)
            parts = [ring[slot, columns] if own is None else ring[slot[..., own], own] for ring, own in pairs]
            return jax.tree.unflatten(structure, parts)

        obs_columns, all_columns = find_columns((obs,), {}), [None] * len(jax.tree.leaves(carry))
        read_flags = lambda ring: ring[slot, columns] & is_filled
        reward = np.where(is_filled, self._reward[slot, columns], 0)
        batch = RowBatch(
            (
                read(obs, slot, obs_columns),
                read(action, slot, find_columns((action,), {})),
                read(extras, slot, find_columns((), extras)),
            ),
            read(obs, (self._first + count) % self._slots, obs_columns),
            RowResults(reward, read_flags(self._terminated), read_flags(self._truncated)),
            read_flags(self._mask),
            read_flags(self._failed),
            count,
            read(carry, self._first % self._slots, all_columns),
            self._continues.copy(),
            self._version[slot, columns],
            (self._restarted.copy(), self._return.copy(), self._steps.copy()),
        )
        self._first += count
        self._continues |= count > 0
        self._return[:], self._steps[:], self._restarted[:], self._is_active[:] = 0, 0, False, False
        self._taken_at = time.monotonic()
        self._full_at = self._taken_at if (self._next - self._first >= self._length).any() else None
        return batch

    def drop_before(self, oldest: int) -> None:
        """Drops the rows of weights of versions below `oldest`, and all rows before them."""
        ready = self._next - self._first
        t = np.arange(int(ready.max(initial=0)))[:, None]
        is_stale = (self._version[(self._first + t) % self._slots, np.arange(self._num)] < oldest) & (t < ready)
        count = np.max(np.where(is_stale, t + 1, 0), axis=0, initial=0)  # up to the last stale row
        while (column := np.flatnonzero(count)).size:
            self._drop(column)
            count[column] -= 1
