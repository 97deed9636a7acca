"""Source wrapper that returns whole episodes only: rows wait until their episode has ended.

    source = Complete(source, limit=longest_episode(env.spec.max_episode_steps), carry=algo.carry)
    rollout, report = source.next(actor, key)  # [T + limit, B]

For learners that need whole episodes (Monte-Carlo returns, rewards at the end only). With several agents an episode is
one agent's, from its first step to its end, independent of the other agents.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.rollout.source import Wrapper
from jrl.rollout.stitch import find_pieces
from jrl.types import COUNTS_STEP, POLICY_ID, Episodes, Key, PyTree, Rollout

PADDING = "rollout/padding"  # metric: share of masked rows, resets included


def longest_episode(max_episode_steps: int | None) -> int:
    """Returns the maximum length of an episode. Raises InputError: the EnvSpec has no limit."""
    if max_episode_steps is None:
        raise InputError(
            "rollout.batch_mode: expected environments with a time limit for complete_episodes, since rollouts hold "
            "the longest episode: set env.horizon, e.g. env.horizon=1000"
        )
    return max_episode_steps


class Agents(NamedTuple):
    """Agents of a block of N columns, the A agents of one or several games; blocks repeat.

    Agent k of game i has column i * A + k.
    """

    policies: tuple[int, ...]  # [N], number of each column's policy, unless rollouts have it by row (`POLICY_ID`)
    kinds: tuple[tuple[int, ...], ...] = ()  # see `EnvSpec.kinds`; for blocks of one game
    extras: Mapping[str, tuple[int, ...]] = {}  # name of an extra with fewer columns -> these columns, in order


def mark_counted_steps(rollout: Rollout, agents: Agents) -> Rollout:
    """Returns a rollout on the host with `COUNTS_STEP` instead of `over`.

    `COUNTS_STEP` marks one row per game step and policy: that of the policy's first present agent.
    """
    if rollout.over is None:
        return rollout
    size: int = rollout.mask.shape[1] // rollout.over.shape[1]
    numbers: Any = rollout.extras.get(POLICY_ID, np.array(agents.policies)[None])
    policy = numbers.reshape(len(numbers), -1, size)  # [T, G, A], or [1, games of a block, A]
    # [..., A, A] bool: the first agent precedes the second and has the same policy
    precedes = np.triu(policy[..., :, None] == policy[..., None, :], 1)[:, None]
    present: Any = rollout.mask.reshape(len(rollout.mask), -1, *policy.shape[1:])
    is_first = present & ~(present[..., None] & precedes).any(-2)
    extras = {**rollout.extras, COUNTS_STEP: is_first.reshape(rollout.mask.shape)}
    return dataclasses.replace(rollout, over=None, extras=extras)


def mark_counted_steps_like(like: Rollout) -> Rollout:
    """Returns the shapes and dtypes of `mark_counted_steps`, for a rollout of these shapes and dtypes."""
    if like.over is None:
        return like
    return dataclasses.replace(like, over=None, extras={**like.extras, COUNTS_STEP: like.mask})


def find_leaf_columns(
    agents: Agents | None, num: int, by_kind: Iterable[PyTree], extras: Mapping[str, PyTree]
) -> list[np.ndarray | None]:
    """Returns, for each leaf, which of `num` columns the leaf has; None: all columns.

    Args:
      agents: agents of the columns; None: a single agent.
      num: B, number of columns.
      by_kind: trees of observations and actions, tuples by kind if there are kinds.
      extras: extras of a rollout.
    """
    repeated = lambda tree, own: [own] * len(jax.tree.leaves(tree))
    columns_by_leaf: list[np.ndarray | None] = []
    all_columns = np.arange(num)
    for tree in by_kind:
        parts: Iterable[Any] = [(tree, None)]
        if agents is not None and agents.kinds:
            parts = zip(tree, spaces.split_by_kind(agents.kinds, all_columns), strict=True)
        columns_by_leaf += [own for part, columns in parts for own in repeated(part, columns)]
    by_game = all_columns.reshape(-1, 1 if agents is None else len(agents.policies))
    recorded = {} if agents is None else agents.extras
    by_extra = {name: by_game[:, list(own)].reshape(-1) for name, own in recorded.items()}
    return columns_by_leaf + [own for name in sorted(extras) for own in repeated(extras[name], by_extra.get(name))]


class Complete(Wrapper):
    """A source of rollouts [T + limit, B] of whole episodes, from rollouts [T, B] of `source`.

    Each column has whole episodes in order: the rows of an episode, a masked row with its last observation, then the
    next episode. Padding follows: masked rows without an end, which `count` leaves out. The last row is always masked.
    An episode that broke off is truncated. So is an episode of more than `limit` steps, which should not happen; its
    next step is lost to the masked row, unless the rollout ends there.

    `next` waits for rollouts until at least one episode has ended, since padding alone teaches nothing. The report is
    the source's: it counts steps when they are taken, not when they are learned from. Metric `rollout/padding`.

    Args:
      source: source whose columns begin new episodes where `contiguous` is False.
      limit: H, maximum steps of an episode.
      carry: batch_size -> recurrent state at an episode's start, `Algo.carry`.
      agents: agents of the columns; rollouts then have `COUNTS_STEP`, see `mark_counted_steps`. None: a single agent.
    """

    def __init__(
        self,
        source: Any,
        *,
        limit: int,
        carry: Callable[[int], PyTree] = lambda batch_size: (),
        agents: Agents | None = None,
    ):
        super().__init__(source)
        if limit < 1:
            raise ValueError(f"limit: expected at least 1 step, got {limit}")
        self._limit, self._carry, self._agents = limit, carry, agents
        self._waiting: PyTree = None  # obs, action, reward, extras [H, B, *]: rows of unfinished episodes
        self._count: np.ndarray  # [B], number of waiting rows, from row 0 on
        self._padding: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return self._source.metrics | ({} if self._padding is None else {PADDING: self._padding})

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the episodes that have ended; `key` is the key of the first rollout."""
        reports, num_rollouts = [], 0
        while True:
            rollout, report = self._source.next(actor, jax.random.fold_in(key, num_rollouts) if num_rollouts else key)
            reports.append(report)
            shardings = jax.tree.map(lambda x: x.sharding, jax.tree.map(jnp.asarray, rollout))
            rollout = jax.device_get(dataclasses.replace(rollout, carry=()))
            if self._agents is not None:
                rollout = mark_counted_steps(rollout, self._agents)
                shardings = mark_counted_steps_like(shardings)
            packed = self._pack(rollout)
            steps, num_rollouts = int(packed.mask.sum()), num_rollouts + 1
            # more rows than an episode can have, without an end: the environments fail all the time
            if steps or num_rollouts * rollout.reward.shape[0] > self._limit + 1:
                break
        self._padding = 1.0 - steps / packed.mask.size
        carry = jax.device_get(self._carry(packed.mask.shape[1]))
        by_column = shardings.contiguous
        shardings = dataclasses.replace(shardings, carry=jax.tree.map(lambda _: by_column, carry), count=by_column)
        packed = jax.device_put(dataclasses.replace(packed, carry=carry), shardings)  # columns stay on their devices
        return packed, reports[0] if len(reports) == 1 else episodes.add_reports(reports)

    def _pack(self, rollout: Rollout) -> Rollout:
        """Returns the episodes that end in a rollout [T, B]; the rows of other episodes wait."""
        (length, num), limit = rollout.mask.shape, self._limit
        rows = (rollout.obs, rollout.action, rollout.reward, rollout.extras)
        if self._waiting is None:
            self._waiting = jax.tree.map(lambda x: np.zeros((limit, *x.shape[1:]), x.dtype), rows)
            self._count = np.zeros(num, np.int32)
        count = np.where(rollout.contiguous, self._count, 0).tolist()
        # row numbers: 0 .. limit - 1 are the waiting rows; then the rollout's rows; then the observation after it
        whole: list[list[int]] = [[] for _ in range(num)]  # by column: an episode's rows, then that of its last obs
        waiting: list[list[int]] = [list(range(n)) for n in count]
        mask, done = np.asarray(rollout.mask), np.asarray(rollout.terminated | rollout.truncated)
        last = np.zeros((length + limit, num), bool)

        def close(b: int, after: int) -> None:
            whole[b] += [*waiting[b], after]
            last[len(whole[b]) - 2, b] = True
            waiting[b] = []

        for b in np.flatnonzero(np.array(count, bool) & ~mask[0]).tolist():
            close(b, limit)  # its environment failed
        for b, start, stop, ends, _ in find_pieces(mask, done, np.full(num, length)):
            for t in range(start, stop):
                if len(waiting[b]) == limit:
                    close(b, limit + t)  # loses this step
                else:
                    waiting[b].append(limit + t)
            if waiting[b] and (ends or stop < length or len(waiting[b]) == limit):
                close(b, limit + stop)
        index = _to_array(whole, length + limit)
        live = (np.arange(length + limit)[:, None] < [len(x) for x in whole]) & ~_shift(last)
        terminated = np.concatenate([np.zeros((limit, num), bool), rollout.terminated, np.zeros((1, num), bool)])
        is_terminated = last & np.take_along_axis(terminated, index, 0)
        after = (rollout.last_obs, *jax.tree.map(lambda x: x[-1], rows[1:]))
        whole_rows = jax.tree.map(lambda *x: np.concatenate([*x[:2], x[2][None]]), self._waiting, rows, after)
        obs, action, reward, extras = self._take_rows(whole_rows, index)
        self._waiting = self._take_rows(whole_rows, _to_array(waiting, limit))
        self._count = np.array([len(x) for x in waiting], np.int32)
        return Rollout(
            obs=obs,
            last_obs=rollout.last_obs,
            action=action,
            reward=np.where(live, reward, np.float32(0)),
            terminated=is_terminated,
            truncated=last & ~is_terminated,  # episodes that broke off are truncated, too
            mask=live,
            contiguous=np.zeros(num, bool),
            extras=extras,
            carry=(),
            count=np.array([len(x) for x in whole], np.int32),
        )

    def _take_rows(self, rows: PyTree, index: np.ndarray) -> PyTree:
        """Returns the rows with the numbers `index` [N, B] of each column, see `_pack`."""
        obs, action, _, extras = rows
        num = index.shape[1]
        columns = find_leaf_columns(self._agents, num, (obs, action), {})
        columns += [None, *find_leaf_columns(self._agents, num, (), extras)]
        leaves, structure = jax.tree.flatten(rows)
        by_leaf = [index if own is None else index[:, own] for own in columns]
        taken = [x[i, np.arange(x.shape[1])] for x, i in zip(leaves, by_leaf, strict=True)]
        return jax.tree.unflatten(structure, taken)

    def discontinue(self) -> None:
        """Does nothing: no rollout continues another."""

    def reset(self, key: Key) -> None:
        """Resets all environments, and drops the waiting rows."""
        self._waiting = None
        self._source.reset(key)


def _to_array(rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Returns the row numbers of each column, [size, B] i32, padded with 0."""
    padded = np.zeros((size, len(rows)), np.int32)
    for b, own in enumerate(rows):
        padded[: len(own), b] = own
    return padded


def _shift(flags: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(flags[:1]), flags[:-1]])
