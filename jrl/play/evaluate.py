"""Playing until a goal is reached, block by block: in one vector of environments here, or in several of runners.

    player = Player(env, algo.act, carry=algo.carry)
    print(player.play(weights, key, Goal(100)).summary())

A runner has a `Player` in its process; `jrl.play.tally` says which rows and episodes count.
"""

import dataclasses
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl.errors import EnvironmentFailed
from jrl.metrics import episodes
from jrl.play.tally import Episode, Evaluation, Goal, Rows, Tally, joined
from jrl.rollout import sources
from jrl.rollout.ray_cluster import RunnerOptions
from jrl.rollout.runner_group import Runner, RunnerGroup, received, sendable
from jrl.rollout.source import Source
from jrl.types import POLICY_ID, ActOut, AsyncEnv, Env, JaxEnv, Key, PyTree, Rollout

LENGTH = 64  # rows between two looks at who has finished
MAX_STEPS = 1_000_000  # per environment, against environments that never end
_LONG = 30_000  # steps without an end that are worth a warning: the longest episode of Atari has 27,000
_POLL = 0.05  # seconds between two looks at whether an evaluation in runners is over

# (rollout of numpy arrays, infos of its rows or None): sees the rows that count, block by block
Watch = Callable[[Rollout, Any], None]
# rows; with them, where a watch wants to see them, the rollout as numpy arrays and its infos where there are any
Block = tuple[Rows, tuple[Rollout, Any] | None]


class Until:
    """End of an evaluation though its goal is not reached.

    Args:
      seconds: from now; None: when it is stopped.
    """

    def __init__(self, seconds: float | None = None):
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped = threading.Event()

    def stop(self, seconds: float | None = None) -> None:
        """Ends the evaluation now; what is under way may take so many seconds more, as long as it likes with None."""
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped.set()

    def over(self) -> bool:
        return self._stopped.is_set() or time.monotonic() >= self._end

    def left(self) -> float:
        """Returns the seconds to wait for others: `_GRACE` after the end, as they look at the clock between blocks."""
        return self._end + _GRACE - time.monotonic()


_GRACE = 1.0


class _Evaluating:
    """Knows what has ended of the latest evaluation, however many vectors of environments play it."""

    _tallies: Mapping[int, Tally]  # by vector
    _warned = False

    def found(self) -> Evaluation:
        """Returns what of the latest evaluation has ended so far."""
        return joined([tally.result() for _, tally in sorted(self._tallies.items())])

    @property
    def missing(self) -> int:
        """Counts what the latest evaluation lacks of its goal, in episodes or steps."""
        return sum(tally.missing for tally in self._tallies.values())

    def _take(self, index: int, block: Block, watch: Watch | None) -> None:
        rows, whole = block
        tally = self._tallies[index]
        counts = tally.add(rows)
        if tally.stalled >= _LONG and not self._warned:
            self._warned = True
            warnings.warn(
                f"evaluation: no episode has ended in the last {tally.stalled:,} steps of each environment: {_MEND}; "
                f"after {MAX_STEPS:,} steps the evaluation fails",
                RuntimeWarning,
                stacklevel=3,
            )
        if watch is not None and whole is not None:
            rollout, infos = whole
            counts = np.repeat(counts, rollout.mask.shape[1] // counts.shape[1], 1)  # of a game: of all its agents
            watch(dataclasses.replace(rollout, mask=rollout.mask & counts), infos)

    def _too_long(self, max_steps: int) -> EnvironmentFailed:
        found = len(self.found().returns)
        return EnvironmentFailed(
            f"evaluation: {found} of {found + self.missing} episodes ended within {max_steps:,} steps per environment: "
            f"{_MEND}"
        )


_MEND = (
    "end them by env.horizon (or env.options.max_episode_steps), count timesteps by evaluation.unit, or let "
    "evaluation.timeout_s end the evaluation"
)


class Player(_Evaluating):
    """Plays evaluations in one vector of environments, which it owns, block by block.

    Args:
      env: B environments of its own.
      act, carry: of the Algo.
      explore: passed to `act`.
      length: rows of a block.
      infos: record what host environments say beside observations and rewards, for a watch.
      record: record the ends of episodes as data sets need them, for a watch; see `rollout.unroll.finish`.
    """

    healthy: int | None = None  # of environment runners: there are none
    recreated: Sequence[int] = ()

    def __init__(
        self, env: JaxEnv | Env | AsyncEnv, act: Callable[..., ActOut], *,
        carry: Callable[[int], PyTree] = lambda batch_size: (), explore: bool = False, length: int = LENGTH,
        infos: bool = False, record: bool = False,
    ):  # fmt: skip
        self.spec, self.num_envs, self.length = env.spec, env.spec.games, length
        self.in_program = isinstance(env, JaxEnv)
        self._tallies = {}
        self._left: list[Episode] = []  # `Tally.rest` of the last evaluation
        self._env = env
        self._lock = threading.RLock()  # between two blocks others may ask for the environments
        options: dict[str, Any] = {"length": length, "carry": carry, "explore": explore, "record": record}
        if not self.in_program:
            options |= {"cut": False} | ({"record_infos": True} if infos else {})
        self._make = functools.partial(sources.make, env, act, **options)
        self._track, self._games = jax.jit(episodes.track), jax.jit(episodes.to_games)
        self._source: Source | None = None
        self._columns: episodes.EpisodeState  # of the games
        self._of_agents: episodes.EpisodeState  # of each agent in the game under way, where there are several
        self._at_start = False  # nothing has happened since the environments were made or reset

    def begin(self, key: Key, *, reset: bool = True) -> None:
        """Brings all environments to the start of an episode; with `reset` False only if there has been none."""
        with self._lock:
            if self._source is None:
                self._source, self._at_start = self._make(key=key), True
            elif reset and (self.in_program or not self._at_start):
                self._source.reset(key)
                self._left = []
            else:
                return
            self._columns, self._of_agents = episodes.init(self.num_envs), episodes.init(self.spec.num_envs)

    def _begun(self) -> Source:
        """Returns the source, after which its environments do not stand at their start."""
        self.begin(jax.random.key(0), reset=False)
        self._at_start = False
        assert self._source is not None
        return self._source

    def block(self, weights: PyTree, key: Key, *, whole: bool = False) -> Block:
        """Returns the next rows, with `whole` also for a watch."""
        with self._lock:
            source = self._begun()
            if self.in_program:
                weights = jax.device_put(weights, jax.local_devices()[0])  # where the environments are
            rollout, _ = source.next(weights, key)
            # an episode whose environment broke is followed by a masked row, too: it does not count
            reward, mask, done = rollout.reward, rollout.mask, rollout.terminated | rollout.truncated
            if rollout.over is not None:
                (reward, mask), done = self._games(reward, mask, rollout.over), rollout.over
            done = done | ~mask
            self._columns, tracked = self._track(self._columns, reward, done, mask)
            found = [done & mask, mask, tracked.episode_return, tracked.length]
            if rollout.over is not None:
                found += self._by_agent(rollout, done)
            rows = Rows(*(np.asarray(x) for x in found))
            return rows, (jax.device_get(rollout), source.infos) if whole else None

    def _by_agent(self, rollout: Rollout, done: Any) -> list[Any]:
        """Returns what each agent has earned in its game so far, [T, G, A], and the policy it follows where recorded;
        `done` [T, G]: where games end.
        """
        split = lambda x: x.reshape(*done.shape, -1)
        everyone = done.repeat(len(self.spec.agents), -1)
        self._of_agents, found = self._track(self._of_agents, rollout.reward, everyone, rollout.mask)
        return [
            split(found.episode_return),
            *([split(rollout.extras[POLICY_ID])] if POLICY_ID in rollout.extras else []),
        ]

    def play(
        self, weights: PyTree, key: Key, goal: Goal, until: Until | None = None,
        watches: Sequence[Watch | None] | None = None, *, max_steps: int = MAX_STEPS, first: int = 0,
    ) -> Evaluation:  # fmt: skip
        """Plays until the goal is reached or, after a block, `until` is over.

        Args:
          weights: of `Algo.act`.
          key: of the evaluation; the same one gives the same episodes of environments that follow keys.
          goal: how long, and whether it begins with new episodes.
          until: None: without a limit.
          watches: of each vector of environments, here of the one: sees the rows that count.
          max_steps: per environment.
          first: number of the first block, from which the keys of blocks follow.
        Raises:
          EnvironmentFailed: it was not complete within `max_steps`, as episodes do not end.
        """
        tally = Tally(goal, self.num_envs, [] if goal.reset else self._left)
        self._tallies = {0: tally}
        watch = watches[0] if watches else None
        self.begin(key, reset=goal.reset)
        for number in range(first, first - (-max_steps // self.length)):
            self._take(0, self.block(weights, jax.random.fold_in(key, number), whole=watch is not None), watch)
            if not tally.missing or (until is not None and until.over()):
                self._left = tally.rest()
                return self.found()
        raise self._too_long(max_steps)

    def call(self, fn: Callable[[Source], Any]) -> Any:
        """Returns `fn` of the environments' source, between two blocks."""
        with self._lock:
            return fn(self._begun())  # what it did may matter from the next reset on

    def foreach_worker(self, fn: Callable[[Source], Any]) -> list[Any]:
        """Calls fn(source), as of one process that plays, between two blocks."""
        return [self.call(fn)]

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Calls fn(environment) of every environment. Raises InputError where they are not Python objects."""
        return self.call(lambda source: list(source.foreach_env(fn)))

    def close(self) -> None:
        (self._env if self._source is None else self._source).close()


# ---------------------------------------------------------------- in runners


class Host:
    """Holds the player of a runner, in its process, and makes another on request."""

    def __init__(self, make: Callable[..., Player], index: int, restarts: int, count: int):
        self._make: Callable[[int], Player] = functools.partial(make, index=index, restarts=restarts)
        self._player = self._make(count)

    def started(self) -> None:
        pass

    def block(self, weights: PyTree, data: np.ndarray, impl: str, number: int, reset: bool, whole: bool) -> Block:
        """Returns block `number` of an evaluation; the first begins it."""
        key = received(data, impl)
        if number == 0:
            self._player.begin(key, reset=reset)
        return self._player.block(jax.device_put(weights), jax.random.fold_in(key, number), whole=whole)

    def remake(self, count: int) -> None:
        self._player.close()
        self._player = self._make(count)

    def call(self, fn: Callable, *args: Any) -> Any:
        return self._player.call(lambda source: fn(source, *args))

    def close(self) -> None:
        self._player.close()


class EvaluationRunners(RunnerGroup, _Evaluating):
    """Plays an evaluation in K vectors of environments together, each in a process of its own.

    Of N episodes each runner has N / K, the first N mod K one more, and of timesteps N / K rounded up; K is the number
    of those that are left. What ends on a block is counted here, so that little is lost with a runner: one that takes
    the place of a failed one plays what is missing of its share, or the others do. A runner has proven that it can work
    when it has answered itself. Runners that are under way when the time of an evaluation is over are ended, too, and
    others start in their places.

    Args:
      make: (count, index=, restarts=) -> the player of runner `index`, called in its process. `count` and `restarts`
        are to give other seeds. Pickled by Ray's cloudpickle.
      options: of the runners.
      num_envs: of each runner.
      length: rows of a block.
      count: given to `make`.
    Raises:
      InputError: the cluster has no place for them, or cannot be reached.
      RunnersLost: by `play` and the calls.
    """

    _of = " of the evaluation"
    _owed = "nothing"
    _unproven = ""
    _without = "the others play its share"

    def __init__(
        self, make: Callable[..., Player], options: RunnerOptions, *, num_envs: Sequence[int], length: int,
        count: int = 0,
    ):  # fmt: skip
        self._num_envs, self._length, self._count = list(num_envs), length, count
        self._left: list[list[Episode]] = [[] for _ in num_envs]
        self._tallies: dict[int, Tally] = {}
        super().__init__(Host, make, options)

    @property
    def healthy(self) -> int:
        """Runners that have started and have not failed."""
        return len(self._ready())

    def play(
        self, weights: PyTree, key: Key, goal: Goal, until: Until | None = None,
        watches: Sequence[Watch | None] | None = None,
    ) -> Evaluation:  # fmt: skip
        """Plays until the goal is reached or `until` is over; arguments and errors as `Player.play`."""
        until = until or Until()
        self._tallies = {}
        while (self._starting() or not self._runners) and not until.over():
            self._event([], seconds=_POLL)
        ready = self._ready()
        for runner, share in zip(ready, goal.split(len(ready)) if ready else ()):
            left = [] if share.reset else self._left[runner.index]
            self._tallies[runner.index] = Tally(share, self._num_envs[runner.index], left)
        sent = self._cluster.put(jax.device_get(weights))
        self._forget(ready)
        for runner in ready:
            runner.ordered = 0  # blocks of this evaluation
        watch = lambda index: watches[index] if watches else None
        while True:
            playing = [r for r in self._ready() if r.index in self._tallies]
            for runner in playing:
                # at least one block each, however little time there is
                more = self._tallies[runner.index].missing and not (runner.ordered and until.over())
                if more and not runner.requests:
                    self._order(runner, sent, key, goal, watch(runner.index) is not None)
            under_way = [r for r in playing if r.requests]
            coming = [r for r in self._starting() if r.index in self._tallies and self._tallies[r.index].missing]
            if not under_way and (not coming or until.over()):
                break
            if until.left() <= 0:
                self._replace(under_way)
                break
            if found := self._event(under_way, seconds=_POLL):
                runner, _, block = found
                self._take(runner.index, block, watch(runner.index))
        for index, tally in self._tallies.items():
            self._left[index] = tally.rest()
        return self.found()

    def _order(self, runner: Runner, weights: Any, key: Key, goal: Goal, whole: bool) -> None:
        if runner.ordered * self._length > MAX_STEPS:
            raise self._too_long(MAX_STEPS)
        own = jax.random.fold_in(jax.random.fold_in(key, runner.index), runner.restarts)
        runner.order(runner.actor.block.remote(weights, *sendable(own), runner.ordered, goal.reset, whole))

    def _given(self, index: int, restarts: int) -> tuple:
        return (self._count,)

    def _start(self, index: int, restarts: int) -> None:
        super()._start(index, restarts)
        if restarts:
            self.recreated.append(index)

    def _proven(self, runner: Runner) -> bool:
        return runner.warm

    def _lose(self, runner: Runner) -> None:
        others = [r.index for r in self._ready() if r.index in self._tallies]
        if runner.index not in self._tallies or not others:
            return
        each, rest = divmod(self._tallies[runner.index].give_up(), len(others))
        for i, other in enumerate(others):
            self._tallies[other].more(each + (i < rest))

    def _replace(self, runners: Sequence[Runner]) -> None:
        """Ends those that did not answer in the time of an evaluation, and starts others."""
        for runner in runners:
            self._cluster.kill(runner.actor)
            self._start(runner.index, runner.restarts + 1)

    def restart(self, count: int) -> None:
        """Environments made anew, with the seeds of `count`."""
        self._count = count
        self._left = [[] for _ in self._num_envs]
        self._each(lambda r: r.actor.remake.remote(count))
