"""Tally: decides which episodes of an evaluation count, without bias to short or long episodes. Numpy only."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np


class Evaluation(NamedTuple):
    """Undiscounted returns and lengths of N episodes."""

    returns: np.ndarray  # [N] f32
    lengths: np.ndarray  # [N] i32
    timesteps: int = 0  # counted environment steps; with unit episodes, steps of these episodes
    agents: np.ndarray | None = None  # [N, A] f32, return of each agent; None: a single agent
    # [N, A] i32, number of each agent's policy; None: policies do not change from game to game
    policy_ids: np.ndarray | None = None

    def summary(self) -> dict[str, float]:
        """Returns the metrics `SUMMARY`; NaN if no episode has ended."""
        if not len(self.returns):
            return {**dict.fromkeys(SUMMARY, math.nan), "episodes": 0}
        return {
            "return": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length": float(self.lengths.mean()),
            "episodes": len(self.returns),
        }


SUMMARY = ("return", "return_std", "return_min", "return_max", "length", "episodes")


def concatenate(parts: Sequence[Evaluation]) -> Evaluation:
    """Returns the episodes of several evaluations, in their order."""
    join = lambda arrays, dtype: np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    returns, lengths = join([p.returns for p in parts], np.float32), join([p.lengths for p in parts], np.int32)
    columns = [[x for x in (getattr(p, name) for p in parts) if x is not None] for name in ("agents", "policy_ids")]
    agents, policy_ids = (np.concatenate(arrays) if arrays else None for arrays in columns)
    return Evaluation(returns, lengths, sum(p.timesteps for p in parts), agents, policy_ids)


class Goal(NamedTuple):
    """Amount of episodes or steps that an evaluation plays."""

    amount: int | None  # None: until the evaluation is stopped
    unit: Literal["episodes", "timesteps"] = "episodes"
    reset: bool = True  # begin new episodes; False: continue the episodes of the last evaluation

    def split(self, parts: int) -> list["Goal"]:
        """Returns the goals of `parts` vectors of environments: 10 episodes over 7 are 2, 2, 2, 1, 1, 1, 1.

        Steps are divided and rounded up.
        """
        if self.amount is None:
            return [self] * parts
        each, rest = divmod(self.amount, parts)
        if self.unit == "timesteps":
            return [self._replace(amount=each + (rest > 0))] * parts
        return [self._replace(amount=each + (i < rest)) for i in range(parts)]


class PlayedRows(NamedTuple):
    """A block of rows [T, B]. `episode_return` and `length` are valid on an episode's last row."""

    ended: np.ndarray  # bool
    step: np.ndarray  # bool, False on masked rows and on rows of a failed environment
    episode_return: np.ndarray  # f32
    length: np.ndarray  # i32
    agents: np.ndarray | None = None  # [T, B, A] f32, as `Evaluation.agents`
    policy_ids: np.ndarray | None = None  # [T, B, A] i32, as `Evaluation.policy_ids`


class CountedEpisode(NamedTuple):
    """An episode that has ended."""

    episode_return: float
    length: int
    agents: np.ndarray | None = None  # [A] f32
    policy_ids: np.ndarray | None = None  # [A] i32


class Tally:
    """Counts the episodes of B environments, block by block.

    * N episodes from a reset: each environment plays N / B episodes, rounded up or down. Only its first episodes count,
      since the first N episodes over all environments would be biased to short episodes.
    * N episodes without a reset: the next N episodes to end, in order of time, then of environment. Every episode
      counts once, in this evaluation or a later one, so there is no bias by length. (An episode that is unfinished at
      a fixed time is longer than the average. Counting the first end of each environment would favour long episodes.)
    * Timesteps: all rows up to the one on which the sum of steps reaches the amount, and the episodes that end there.
    * No amount: all rows.

    Args:
      goal: the goal.
      num_envs: B.
      surplus: `surplus()` of the last tally, if the goal has no reset.
    Attributes:
      stalled: rows per environment since the last progress to the goal.
    """

    def __init__(self, goal: Goal, num_envs: int, surplus: Iterable[CountedEpisode] = ()):
        self._goal, self._amount, self._steps = goal, goal.amount, 0
        self.stalled = 0
        self._quota: list[int] | None = None  # episodes of each environment; None: no fixed share
        self._episodes: list[list[CountedEpisode]] = [list(surplus)]  # by environment, if there are quotas
        if goal.amount is not None and goal.unit == "episodes" and goal.reset:
            each, rest = divmod(goal.amount, num_envs)
            self._quota = [each + (i < rest) for i in range(num_envs)]
            self._episodes = [[] for _ in range(num_envs)]

    @property
    def missing(self) -> int:
        """Returns the episodes or steps still to play; 1 without an amount."""
        if self._amount is None:
            return 1
        if self._quota is not None:
            return sum(max(0, q - len(e)) for q, e in zip(self._quota, self._episodes))
        return max(0, self._amount - (self._steps if self._goal.unit == "timesteps" else len(self._episodes[0])))

    def add_amount(self, amount: int) -> None:
        """Adds episodes or steps to the goal."""
        if self._amount is not None:
            self._amount += amount
        if self._quota is not None:
            for _ in range(amount):
                self._quota[self._quota.index(min(self._quota))] += 1

    def give_up(self) -> int:
        """Ends the tally; returns the episodes or steps that were missing."""
        missing = 0 if self._amount is None else self.missing
        if self._quota is not None:
            self._quota = [min(q, len(e)) for q, e in zip(self._quota, self._episodes)]
        elif self._amount is not None:
            self._amount -= missing
        return missing

    def add(self, rows: PlayedRows) -> np.ndarray:
        """Adds the next block; returns which rows count, [T, B] bool: rows up to the end of the goal or share."""
        counts, before = np.ones(rows.step.shape, bool), self.missing
        if self._goal.unit == "timesteps" and self._amount is not None:
            total = self._steps + np.cumsum(rows.step.sum(1))
            counts &= (np.concatenate([[self._steps], total[:-1]]) < self._amount)[:, None]
        if self._quota is not None:
            counts[:, [len(e) >= q for e, q in zip(self._episodes, self._quota)]] = False
        self._steps += int((rows.step & counts).sum())
        has_quota = self._quota is not None
        # episodes beyond a share are kept: they count if `add_amount` raises the share
        for t, b in zip(*np.nonzero(rows.ended if has_quota else rows.ended & counts)):
            episodes = self._episodes[b if has_quota else 0]
            by_agent = (None if x is None else x[t, b] for x in (rows.agents, rows.policy_ids))
            episodes.append(CountedEpisode(float(rows.episode_return[t, b]), int(rows.length[t, b]), *by_agent))
            if self._quota is not None and len(episodes) == self._quota[b]:
                counts[t + 1 :, b] = False
        self.stalled = 0 if self._amount is None or self.missing < before else self.stalled + len(counts)
        return counts

    def result(self) -> Evaluation:
        """Returns the counted episodes: by environment with quotas, else in the order of their ends."""
        episodes = self._episodes[0]
        if self._quota is not None:
            episodes = [x for env, q in zip(self._episodes, self._quota) for x in env[:q]]
        elif self._goal.unit == "episodes":
            episodes = episodes[: self._amount]
        returns = np.array([x.episode_return for x in episodes], np.float32)
        lengths = np.array([x.length for x in episodes], np.int32)
        counts_episodes = self._goal.unit == "episodes" and self._amount is not None
        steps = int(lengths.sum()) if counts_episodes else self._steps
        columns = [[getattr(x, name) for x in episodes] for name in ("agents", "policy_ids")]
        stack = lambda arrays: np.stack(arrays) if arrays and arrays[0] is not None else None
        return Evaluation(returns, lengths, steps, *map(stack, columns))

    def surplus(self) -> list[CountedEpisode]:
        """Returns the episodes beyond a goal without reset, which ended on the same row as the last counted episode."""
        has_surplus = self._goal.unit == "episodes" and self._quota is None and self._amount is not None
        return self._episodes[0][self._amount :] if has_surplus else []
