"""A tally says which episodes of an evaluation count.

Exactly N episodes count, chosen without bias, or those of so many environment steps. In numpy alone.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np


class Evaluation(NamedTuple):
    """Undiscounted returns and lengths of N episodes."""

    returns: np.ndarray  # [N] f32
    lengths: np.ndarray  # [N] i32
    timesteps: int = 0  # environment steps that counted; with unit episodes those of these N
    agents: np.ndarray | None = None  # [N, A] f32, each agent's part of the returns; None: there is one agent
    # [N, A] i32, number of the policy that each agent followed; None: the policies do not change from game to game
    followed: np.ndarray | None = None

    def summary(self) -> dict[str, float]:
        """Returns `return`, `return_std`, `return_min`, `return_max`, `length`, `episodes`; NaN where no episode has
        ended.
        """
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


# keys of `summary`
SUMMARY = ("return", "return_std", "return_min", "return_max", "length", "episodes")


def _stacked(each: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [x for x in each if x is not None]
    return np.stack(known) if known else None


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Returns several as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    together = lambda x, dtype: np.concatenate(x) if x else np.zeros(0, dtype)
    returns, lengths = together([p.returns for p in parts], np.float32), together([p.lengths for p in parts], np.int32)
    agents, followed = ([x for x in found if x is not None] for found in zip(*(p[3:] for p in parts), strict=True))
    joint = lambda x: np.concatenate(x) if x else None
    return Evaluation(returns, lengths, sum(p.timesteps for p in parts), joint(agents), joint(followed))


class Goal(NamedTuple):
    """Goal of an evaluation: how long it lasts."""

    amount: int | None  # None: until it is stopped
    unit: Literal["episodes", "timesteps"] = "episodes"
    reset: bool = True  # begins with new episodes; False: goes on with those of the last evaluation

    def split(self, parts: int) -> list["Goal"]:
        """Returns the goal of each of so many vectors: of 10 episodes over 7, the first three have 2; steps are
        rounded up.
        """
        if self.amount is None:
            return [self] * parts
        each, rest = divmod(self.amount, parts)
        if self.unit == "timesteps":
            return [self._replace(amount=each + (rest > 0))] * parts
        return [self._replace(amount=each + (i < rest)) for i in range(parts)]


class Rows(NamedTuple):
    """A block of rows [T, B]; `episode_return` and `length` are those of an episode on the row where it ends."""

    ended: np.ndarray  # bool
    step: np.ndarray  # bool, False on masked steps and on those of an environment that broke
    episode_return: np.ndarray  # f32
    length: np.ndarray  # i32
    agents: np.ndarray | None = None  # [T, B, A] f32, as `Evaluation.agents`
    followed: np.ndarray | None = None  # [T, B, A] i32, as `Evaluation.followed`


class Episode(NamedTuple):
    """One episode that has ended."""

    episode_return: float
    length: int
    agents: np.ndarray | None = None  # [A] f32
    followed: np.ndarray | None = None  # [A] i32


class Tally:
    """Counts the episodes of B environments as their rows come.

    * N episodes from a reset: each environment plays a fixed share, N / B rounded up or down, and only its first
      episodes count: the first N to finish, over all environments, would favour short ones.
    * N episodes, going on: the next N to finish, in the order in which they do, those of one row by environment. Every
      episode counts once, in this evaluation or a later one, and none is left out, which leaves nothing to choose by
      length. (What is under way at a fixed time is longer than the average: to count the first of each environment
      that ends after it would favour long ones, to leave it out takes away the point of going on.)
    * Timesteps: the rows until all environments together have made so many steps, the row that reaches them included,
      and the episodes that end on these rows.
    * No amount: all rows.
    """

    def __init__(self, goal: Goal, num_envs: int, left: Iterable[Episode] = ()):
        """`left`: `rest()` of the last tally, for one that goes on."""
        self._goal, self._amount, self._steps = goal, goal.amount, 0
        self.stalled = 0  # rows since the goal last came nearer
        self._quota: list[int] | None = None  # of each environment, where each has a share
        self._found: list[list[Episode]] = [list(left)]
        if goal.amount is not None and goal.unit == "episodes" and goal.reset:
            each, rest = divmod(goal.amount, num_envs)
            self._quota = [each + (i < rest) for i in range(num_envs)]
            self._found = [[] for _ in range(num_envs)]

    @property
    def missing(self) -> int:
        """Returns episodes or steps that have not been played yet; 1 where there is no amount."""
        if self._amount is None:
            return 1
        if self._quota is not None:
            return sum(max(0, q - len(f)) for q, f in zip(self._quota, self._found))
        return max(0, self._amount - (self._steps if self._goal.unit == "timesteps" else len(self._found[0])))

    def more(self, amount: int) -> None:
        """Asks for so many more episodes or steps."""
        if self._amount is not None:
            self._amount += amount
        if self._quota is not None:
            for _ in range(amount):
                self._quota[self._quota.index(min(self._quota))] += 1

    def give_up(self) -> int:
        """Ends the tally: no more is to come. Returns what was missing."""
        missing = 0 if self._amount is None else self.missing
        if self._quota is not None:
            self._quota = [min(q, len(f)) for q, f in zip(self._quota, self._found)]
        elif self._amount is not None:
            self._amount -= missing
        return missing

    def add(self, rows: Rows) -> np.ndarray:
        """Takes the next block. Returns which rows count, [T, B] bool: those up to the end of the share or goal."""
        counts, before = np.ones(rows.step.shape, bool), self.missing
        if self._goal.unit == "timesteps" and self._amount is not None:
            made = self._steps + np.cumsum(rows.step.sum(1))
            counts &= (np.concatenate([[self._steps], made[:-1]]) < self._amount)[:, None]
        if self._quota is not None:
            counts[:, [len(f) >= q for f, q in zip(self._found, self._quota)]] = False
        self._steps += int((rows.step & counts).sum())
        shares = self._quota is not None
        # of a share that is played already: should it grow, they are the next
        for t, b in zip(*np.nonzero(rows.ended if shares else rows.ended & counts)):
            found = self._found[b if shares else 0]
            of_agents = (None if x is None else x[t, b] for x in (rows.agents, rows.followed))
            found.append(Episode(float(rows.episode_return[t, b]), int(rows.length[t, b]), *of_agents))
            if self._quota is not None and len(found) == self._quota[b]:
                counts[t + 1 :, b] = False
        self.stalled = 0 if self._amount is None or self.missing < before else self.stalled + len(counts)
        return counts

    def result(self) -> Evaluation:
        """Returns what was played so far: by environment where each has a share, else in the order of the ends."""
        found = self._found[0]
        if self._quota is not None:
            found = [e for f, q in zip(self._found, self._quota) for e in f[:q]]
        elif self._goal.unit == "episodes":
            found = found[: self._amount]
        returns = np.array([one.episode_return for one in found], np.float32)
        lengths = np.array([one.length for one in found], np.int32)
        of_episodes = self._goal.unit == "episodes" and self._amount is not None
        steps = int(lengths.sum()) if of_episodes else self._steps
        agents, followed = [one.agents for one in found], [one.followed for one in found]
        return Evaluation(returns, lengths, steps, _stacked(agents), _stacked(followed))

    def rest(self) -> list[Episode]:
        """Returns episodes beyond the goal, of one that goes on: they ended on the same row as the last that
        counted.
        """
        goes_on = self._goal.unit == "episodes" and self._quota is None and self._amount is not None
        return self._found[0][self._amount :] if goes_on else []
