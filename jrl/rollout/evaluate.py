"""Which episodes of an evaluation count: exactly N, chosen without bias; or those of so many environment steps.

    play = evaluator(env, algo.act, num_episodes=100, carry=algo.carry)
    print(play(actor, key).summary())

`Player` plays blocks of rows in one vector of environments, a `Tally` says what of them counts, `play` does both until
the tally is complete. Environment runners use the same two (`rollout.ray_evaluate`).
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jrl.metrics import episodes
from jrl.rollout import sources
from jrl.rollout.source import Source
from jrl.types import ActOut, AsyncEnv, Env, GraphEnv, Key, PyTree, Rollout

LENGTH = 64  # rows between two looks at who has finished
MAX_STEPS = 1_000_000  # per environment, against environments that never end

# (rollout of numpy arrays, infos of its rows or None): sees the rows that count, block by block
Watch = Callable[[Rollout, Any], None]


class Evaluation(NamedTuple):
    """Undiscounted returns and lengths of N episodes."""

    returns: np.ndarray  # [N] f32
    lengths: np.ndarray  # [N] i32
    timesteps: int = 0  # environment steps that counted; with unit episodes those of these N

    def summary(self) -> dict[str, float]:
        """`return`, `return_std`, `return_min`, `return_max`, `length`, `episodes`; NaN where no episode has ended."""
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


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Several as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    together = lambda x, dtype: np.concatenate(x) if x else np.zeros(0, dtype)
    returns, lengths = together([p.returns for p in parts], np.float32), together([p.lengths for p in parts], np.int32)
    return Evaluation(returns, lengths, sum(p.timesteps for p in parts))


class Goal(NamedTuple):
    """How long an evaluation lasts."""

    amount: int | None  # None: until it is told to end
    unit: Literal["episodes", "timesteps"] = "episodes"
    reset: bool = True  # begins with new episodes; False: goes on with those of the last evaluation

    def split(self, parts: int) -> list["Goal"]:
        """The goal of each of so many vectors: of 10 episodes over 7, the first three have 2; steps are rounded up."""
        if self.amount is None:
            return [self] * parts
        each, rest = divmod(self.amount, parts)
        if self.unit == "timesteps":
            return [self._replace(amount=each + (rest > 0))] * parts
        return [self._replace(amount=each + (i < rest)) for i in range(parts)]


class Until:
    """When an evaluation is over though its goal is not reached.

    Args:
      seconds: from now; None: when it is stopped.
    """

    def __init__(self, seconds: float | None = None):
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped = threading.Event()

    def stop(self, seconds: float | None = None) -> None:
        """Now; what is under way may take so many seconds more, as long as it likes with None."""
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped.set()

    def over(self) -> bool:
        return self._stopped.is_set() or time.monotonic() >= self._end

    def late(self) -> bool:
        """Whether nobody is to be waited for any more."""
        return self.left() <= 0

    def left(self) -> float:
        """Seconds until `late`: those that there are, and one for whoever looks at the clock between two blocks."""
        return self._end + _GRACE - time.monotonic()


_GRACE = 1.0


class Rows(NamedTuple):
    """A block of rows [T, B]; `episode_return` and `length` are those of an episode on the row where it ends."""

    ended: np.ndarray  # bool
    step: np.ndarray  # bool, False on reset rows and on those of an environment that broke
    episode_return: np.ndarray  # f32
    length: np.ndarray  # i32


# ---------------------------------------------------------------- what counts


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

    def __init__(self, goal: Goal, num_envs: int, left: Iterable[tuple[float, int]] = ()):
        """`left`: `rest()` of the last tally, for one that goes on."""
        self._goal, self._amount, self._steps = goal, goal.amount, 0
        self._quota: list[int] | None = None  # of each environment, where each has a share
        self._found: list[list[tuple[float, int]]] = [list(left)]
        if goal.amount is not None and goal.unit == "episodes" and goal.reset:
            each, rest = divmod(goal.amount, num_envs)
            self._quota = [each + (i < rest) for i in range(num_envs)]
            self._found = [[] for _ in range(num_envs)]

    @property
    def missing(self) -> int:
        """Episodes or steps that have not been played yet; 1 where there is no amount."""
        if self._amount is None:
            return 1
        if self._quota is not None:
            return sum(max(0, q - len(f)) for q, f in zip(self._quota, self._found))
        return max(0, self._amount - (self._steps if self._goal.unit == "timesteps" else len(self._found[0])))

    def more(self, amount: int) -> None:
        """So many more episodes or steps."""
        if self._amount is not None:
            self._amount += amount
        if self._quota is not None:
            for _ in range(amount):
                self._quota[self._quota.index(min(self._quota))] += 1

    def give_up(self) -> int:
        """No more is to come. Returns what was missing."""
        missing = 0 if self._amount is None else self.missing
        if self._quota is not None:
            self._quota = [min(q, len(f)) for q, f in zip(self._quota, self._found)]
        elif self._amount is not None:
            self._amount -= missing
        return missing

    def add(self, rows: Rows) -> np.ndarray:
        """Takes the next block. Returns which rows count, [T, B] bool: those up to the end of the share or goal."""
        counts = np.ones(rows.step.shape, bool)
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
            found.append((float(rows.episode_return[t, b]), int(rows.length[t, b])))
            if self._quota is not None and len(found) == self._quota[b]:
                counts[t + 1 :, b] = False
        return counts

    def result(self) -> Evaluation:
        """Of what was played so far: by environment where each has a share, else in the order in which they ended."""
        found = self._found[0]
        if self._quota is not None:
            found = [e for f, q in zip(self._found, self._quota) for e in f[:q]]
        elif self._goal.unit == "episodes":
            found = found[: self._amount]
        returns, lengths = np.array([r for r, _ in found], np.float32), np.array([n for _, n in found], np.int32)
        of_episodes = self._goal.unit == "episodes" and self._amount is not None
        return Evaluation(returns, lengths, int(lengths.sum()) if of_episodes else self._steps)

    def rest(self) -> list[tuple[float, int]]:
        """Episodes beyond the goal, of one that goes on: they ended on the same row as the last that counted."""
        goes_on = self._goal.unit == "episodes" and self._quota is None and self._amount is not None
        return self._found[0][self._amount :] if goes_on else []


# ---------------------------------------------------------------- who plays


class Player:
    """Plays blocks of rows in one vector of environments. Owns them.

    Args:
      env: B environments of its own.
      act, carry: of the Algo.
      explore: passed to `act`.
      length: rows of a block.
      infos: record what host environments say beside observations and rewards, for a watch.
    """

    def __init__(
        self,
        env: GraphEnv | Env | AsyncEnv,
        act: Callable[..., ActOut],
        *,
        carry: Callable[[int], PyTree] = lambda batch_size: (),
        explore: bool = False,
        length: int = LENGTH,
        infos: bool = False,
    ):
        self.spec, self.num_envs, self.length = env.spec, env.spec.num_envs, length
        self.in_program = isinstance(env, GraphEnv)
        self.left: list[tuple[float, int]] = []  # `Tally.rest` of the last evaluation
        self._env, self._act = env, act
        self._lock = threading.RLock()  # between two blocks others may ask for the environments
        self._options: dict[str, Any] = {"length": length, "carry": carry, "explore": explore}
        if not self.in_program:
            self._options |= {"cut": False} | ({"record_infos": True} if infos else {})
        self._track = jax.jit(episodes.track)
        self._source: Source | None = None
        self._columns: episodes.Columns
        self._at_start = False  # environments that stand where their making, or a reset, has left them

    def _made(self, key: Key | None = None) -> Source:
        if self._source is None:
            key = jax.random.key(0) if key is None else key
            self._source = sources.make(self._env, self._act, key=key, **self._options)
            self._columns = episodes.init(self.num_envs)
            self._at_start = True
        return self._source

    def begin(self, key: Key, *, reset: bool = True) -> None:
        """Brings all environments to the start of an episode; with `reset` False only if there has been none."""
        with self._lock:
            if self._source is None:
                self._made(key)
            elif reset and (self.in_program or not self._at_start):
                self._source.reset(key)
                self._columns, self.left = episodes.init(self.num_envs), []

    def block(self, actor: PyTree, key: Key, *, whole: bool = False) -> tuple[Rows, tuple[Rollout, Any] | None]:
        """The next rows. With `whole` also the rollout as numpy arrays, and its infos where there are any."""
        with self._lock:
            source = self._made()
            self._at_start = False
            if self.in_program:
                actor = jax.device_put(actor, jax.local_devices()[0])  # where the environments are
            rollout, _ = source.next(actor, key)
            # an episode whose environment broke is followed by a void row, too: it does not count
            done = rollout.terminated | rollout.truncated | ~rollout.mask
            self._columns, tracked = self._track(self._columns, rollout.reward, done, rollout.mask)
            found = (done & rollout.mask, rollout.mask, tracked.episode_return, tracked.length)
            rows = Rows(*(np.asarray(x) for x in found))
            return rows, (jax.device_get(rollout), source.infos) if whole else None

    def call(self, fn: Callable[[Source], Any]) -> Any:
        """`fn` of the environments' source, between two blocks."""
        with self._lock:
            source = self._made()
            self._at_start = False  # what it did may matter from the next reset on
            return fn(source)

    def close(self) -> None:
        (self._env if self._source is None else self._source).close()


def watched(watch: Watch, seen: tuple[Rollout, Any], counts: np.ndarray) -> None:
    """Shows a block to a watch, without the rows that do not count."""
    rollout, infos = seen
    watch(dataclasses.replace(rollout, mask=rollout.mask & counts), infos)


def play(
    player: Player,
    tally: Tally,
    actor: PyTree,
    key: Key,
    *,
    reset: bool = True,
    until: Until | None = None,
    watch: Watch | None = None,
    max_steps: int = MAX_STEPS,
) -> None:
    """Plays until the tally is complete or, after a block, `until` is over.

    Args:
      player, tally: of the same environments.
      actor: of `Algo.act`.
      key: of the evaluation; the same one gives the same episodes of environments that follow keys.
      reset: begin with new episodes.
      until: None: without a limit.
      watch: sees the rows that count.
      max_steps: per environment.
    Raises:
      RuntimeError: it was not complete within `max_steps`.
    """
    player.begin(key, reset=reset)
    for block in range(-(-max_steps // player.length)):
        rows, seen = player.block(actor, jax.random.fold_in(key, block), whole=watch is not None)
        counts = tally.add(rows)
        if watch is not None and seen is not None:
            watched(watch, seen, counts)
        if not tally.missing or (until is not None and until.over()):
            player.left = tally.rest()
            return
    raise too_long(len(tally.result().returns), tally.missing, max_steps)


def too_long(found: int, missing: int, max_steps: int) -> RuntimeError:
    """The error for environments whose episodes do not end."""
    return RuntimeError(
        f"evaluation: {found} of {found + missing} episodes ended within {max_steps} steps per environment: give the "
        "environment a time limit (env.horizon, or env.options.max_episode_steps)"
    )


class Here:
    """The environments of an evaluation in this process.

    Args:
      make: count -> the player; `count` is to give other seeds.
      count: given to `make`.
    """

    healthy: int | None = None  # of environment runners: there are none

    def __init__(self, make: Callable[[int], Player], count: int = 0):
        self._make = make
        self._player = make(count)
        self._tally = Tally(Goal(0), 1)
        self.spec, self.in_program = self._player.spec, self._player.in_program
        self.recreated: list[int] = []

    def play(
        self, actor: PyTree, key: Key, goal: Goal, until: Until, watches: Sequence[Watch | None] | None = None
    ) -> Evaluation:
        """Plays until the goal is reached, or it is told to end; see `play`."""
        left = [] if goal.reset else self._player.left
        self._tally = Tally(goal, self._player.num_envs, left)
        watch = watches[0] if watches else None
        play(self._player, self._tally, actor, key, reset=goal.reset, until=until, watch=watch)
        return self.found()

    def found(self) -> Evaluation:
        """What of the latest evaluation has ended so far."""
        return self._tally.result()

    @property
    def missing(self) -> int:
        """What the latest evaluation lacks of its goal, in episodes or steps."""
        return self._tally.missing

    def foreach_worker(self, fn: Callable[[Source], Any]) -> list[Any]:
        """[fn(source)]"""
        return [self._player.call(fn)]

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(environment) of every environment. Raises InputError where they are not Python objects."""
        return self._player.call(lambda source: list(source.foreach_env(fn)))

    def restart(self, count: int) -> None:
        """Environments made anew, with the seeds of `count`."""
        self._player.close()
        self._player = self._make(count)

    def close(self) -> None:
        self._player.close()


def evaluator(
    env: GraphEnv | Env | AsyncEnv,
    act: Callable[..., ActOut],
    *,
    num_episodes: int,
    carry: Callable[[int], PyTree] = lambda batch_size: (),
    explore: bool = False,
    max_steps: int = MAX_STEPS,
) -> Callable[[PyTree, Key], Evaluation]:
    """Builds `evaluate(actor, key)`, which plays `num_episodes` episodes from a reset, a share in each environment.

    An episode that broke off with its environment does not count.

    Args:
      env: B environments of its own.
      act, carry: of the Algo.
      explore: passed to `act`.
      max_steps: per environment, against environments that never end.
    Raises (by evaluate):
      RuntimeError: the episodes have not ended within `max_steps`.
    """
    player = Player(env, act, carry=carry, explore=explore)

    def evaluate(actor: PyTree, key: Key) -> Evaluation:
        tally = Tally(Goal(num_episodes), player.num_envs)
        play(player, tally, actor, key, max_steps=max_steps)
        return tally.result()

    return evaluate
