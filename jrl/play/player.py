"""Players of evaluations: `Player` in this process, `EvaluationRunners` in env runners. They play block by block.

    player = Player(env, algo.act, carry=algo.carry)
    print(player.play(weights, key, Goal(100)).summary())

Each runner has a `Player` in its process. `jrl.play.tally` decides which rows and episodes count.
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
from jrl.play.tally import CountedEpisode, Evaluation, Goal, PlayedRows, Tally, concatenate
from jrl.rollout import sources
from jrl.rollout.ray_cluster import RunnerOptions
from jrl.rollout.runner_group import RunnerGroup, RunnerProcess, received, sendable
from jrl.rollout.source import Source
from jrl.types import POLICY_ID, ActOut, AsyncEnv, Env, JaxEnv, Key, PyTree, Rollout

LENGTH = 64  # rows of a block
MAX_STEPS = 1_000_000  # maximum steps per environment, for environments that never end
_STALL_STEPS = 30_000  # steps without an end that give a warning: the longest episode of Atari has 27,000
_POLL = 0.05  # seconds between two checks of the deadline of an evaluation in runners

# called with (rollout of numpy arrays, infos of its rows or None) for each block; the mask has the counted rows
OnRows = Callable[[Rollout, Any], None]
# rows; and, if `on_rows` is given, the rollout as numpy arrays and its infos or None
Block = tuple[PlayedRows, tuple[Rollout, Any] | None]


class Deadline:
    """Time at which an evaluation ends before its goal is reached.

    Args:
      seconds: seconds from now; None: the evaluation ends when `stop` is called.
    """

    def __init__(self, seconds: float | None = None):
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped = threading.Event()

    def stop(self, seconds: float | None = None) -> None:
        """Ends the evaluation now. Unfinished blocks may take `seconds` more; None: any time."""
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._stopped.set()

    def is_over(self) -> bool:
        return self._stopped.is_set() or time.monotonic() >= self._end

    def seconds_left(self) -> float:
        """Returns the seconds to wait for unfinished blocks: `_GRACE` longer than until the end."""
        return self._end + _GRACE - time.monotonic()


_GRACE = 1.0


class _Evaluating:
    """Counts the latest evaluation in one or several vectors of environments."""

    _tallies: Mapping[int, Tally]  # by index of the vector
    _warned = False

    def result(self) -> Evaluation:
        """Returns the episodes of the latest evaluation that have ended."""
        return concatenate([tally.result() for _, tally in sorted(self._tallies.items())])

    @property
    def missing(self) -> int:
        """Returns the episodes or steps that the latest evaluation still needs to reach its goal."""
        return sum(tally.missing for tally in self._tallies.values())

    def _add_block(self, index: int, block: Block, on_rows: OnRows | None) -> None:
        rows, recorded = block
        tally = self._tallies[index]
        counts = tally.add(rows)
        if tally.stalled >= _STALL_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"evaluation: no episode has ended in the last {tally.stalled:,} steps of each environment: {_MEND}; "
                f"after {MAX_STEPS:,} steps the evaluation fails",
                RuntimeWarning,
                stacklevel=3,
            )
        if on_rows is not None and recorded is not None:
            rollout, infos = recorded
            counts = np.repeat(counts, rollout.mask.shape[1] // counts.shape[1], 1)  # from games to agents
            on_rows(dataclasses.replace(rollout, mask=rollout.mask & counts), infos)

    def _max_steps_error(self, max_steps: int) -> EnvironmentFailed:
        ended = len(self.result().returns)
        return EnvironmentFailed(
            f"evaluation: {ended} of {ended + self.missing} episodes ended within {max_steps:,} steps per environment: "
            f"{_MEND}"
        )


_MEND = (
    "set env.horizon (or env.options.max_episode_steps), count timesteps with evaluation.unit, or set "
    "evaluation.timeout_s"
)


class Player(_Evaluating):
    """Plays evaluations in one vector of environments, block by block. The player owns the environments.

    Args:
      env: B environments.
      act, carry, act_in: functions of the Algo.
      explore: argument of `act`.
      length: rows of a block.
      infos: record the infos of host environments, for `on_rows`.
      record: record the ends of episodes as data sets need them, for `on_rows`; see `rollout.unroll.finish`.
    """

    healthy: int | None = None  # number of healthy env runners; None: no env runners
    recreated: Sequence[int] = ()

    def __init__(
        self, env: JaxEnv | Env | AsyncEnv, act: Callable[..., ActOut], *,
        carry: Callable[[int], PyTree] = lambda batch_size: (), explore: bool = False, length: int = LENGTH,
        infos: bool = False, record: bool = False, act_in: Callable[[JaxEnv], Callable[..., ActOut]] | None = None,
    ):  # fmt: skip
        self.spec, self.num_envs, self.length = env.spec, env.spec.games, length
        self.in_program = isinstance(env, JaxEnv)
        self._tallies = {}
        self._surplus: list[CountedEpisode] = []  # `Tally.surplus` of the last evaluation
        self._env = env
        self._lock = threading.RLock()  # `call` waits for the end of a block
        options: dict[str, Any] = {"length": length, "carry": carry, "explore": explore, "record": record}
        options |= {"cut": False} | ({"record_infos": True} if infos and not self.in_program else {})
        options |= {} if act_in is None else {"act_in": act_in}
        self._make = functools.partial(sources.make, env, act, **options)
        self._track, self._games = jax.jit(episodes.track), jax.jit(episodes.to_games)
        self._source: Source | None = None
        self._games_state: episodes.EpisodeState  # statistics of the games
        self._agents_state: episodes.EpisodeState  # statistics of each agent in its unfinished game
        self._is_reset = False  # no step since the environments were made or reset

    def begin(self, key: Key, *, reset: bool = True) -> None:
        """Resets all environments; with `reset` False only before the first evaluation."""
        with self._lock:
            if self._source is None:
                self._source, self._is_reset = self._make(key=key), True
            elif reset and (self.in_program or not self._is_reset):
                self._source.reset(key)
                self._surplus = []
            else:
                return
            self._games_state, self._agents_state = episodes.init(self.num_envs), episodes.init(self.spec.num_envs)

    def _use_source(self) -> Source:
        """Returns the source, whose environments are no longer freshly reset."""
        self.begin(jax.random.key(0), reset=False)
        self._is_reset = False
        assert self._source is not None
        return self._source

    def block(self, weights: PyTree, key: Key, *, record: bool = False) -> Block:
        """Returns the next rows; with `record` the rollout and its infos, too."""
        with self._lock:
            source = self._use_source()
            if self.in_program:
                weights = jax.device_put(weights, jax.local_devices()[0])  # the device of the environments
            rollout, _ = source.next(weights, key)
            # a masked row also follows an episode whose environment failed: that episode does not count
            reward, mask, done = rollout.reward, rollout.mask, rollout.terminated | rollout.truncated
            if rollout.over is not None:
                (reward, mask), done = self._games(reward, mask, rollout.over), rollout.over
            done = done | ~mask
            self._games_state, tracked = self._track(self._games_state, reward, done, mask)
            arrays = [done & mask, mask, tracked.episode_return, tracked.length]
            if rollout.over is not None:
                arrays += self._track_agents(rollout, done)
            rows = PlayedRows(*(np.asarray(x) for x in arrays))
            return rows, (jax.device_get(rollout), source.infos) if record else None

    def _track_agents(self, rollout: Rollout, done: Any) -> list[Any]:
        """Returns each agent's return in its game so far, and its policy's number if recorded, [T, G, A] each.

        Args:
          rollout: [T, G * A].
          done: [T, G], ends of games.
        """
        split = lambda x: x.reshape(*done.shape, -1)
        agents_done = done.repeat(len(self.spec.agents), -1)
        self._agents_state, tracked = self._track(self._agents_state, rollout.reward, agents_done, rollout.mask)
        policies = [split(rollout.extras[POLICY_ID])] if POLICY_ID in rollout.extras else []
        return [split(tracked.episode_return), *policies]

    def play(
        self, weights: PyTree, key: Key, goal: Goal, deadline: Deadline | None = None,
        on_rows: Sequence[OnRows | None] | None = None, *, max_steps: int = MAX_STEPS, first: int = 0,
    ) -> Evaluation:  # fmt: skip
        """Plays until the goal is reached, or until the first block after the deadline.

        Args:
          weights: Actor of `Algo.act`.
          key: key of the evaluation; JAX environments play the same episodes with the same key.
          goal: amount of episodes or steps, and whether to begin new episodes.
          deadline: time limit; None: no limit.
          on_rows: callback of each vector of environments, here of one; None: no callback.
          max_steps: maximum steps per environment.
          first: number of the first block; the keys of blocks depend on their numbers.
        Raises:
          EnvironmentFailed: the goal was not reached within `max_steps`, since episodes do not end.
        """
        tally = Tally(goal, self.num_envs, [] if goal.reset else self._surplus)
        self._tallies = {0: tally}
        callback = on_rows[0] if on_rows else None
        self.begin(key, reset=goal.reset)
        for number in range(first, first - (-max_steps // self.length)):
            block = self.block(weights, jax.random.fold_in(key, number), record=callback is not None)
            self._add_block(0, block, callback)
            if not tally.missing or (deadline is not None and deadline.is_over()):
                self._surplus = tally.surplus()
                return self.result()
        raise self._max_steps_error(max_steps)

    def call(self, fn: Callable[[Source], Any]) -> Any:
        """Returns fn(source), called between two blocks."""
        with self._lock:
            return fn(self._use_source())

    def foreach_worker(self, fn: Callable[[Source], Any]) -> list[Any]:
        """Returns [fn(source)] of this process, called between two blocks."""
        return [self.call(fn)]

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns fn(environment) for each environment. Raises InputError: environments are not Python objects."""
        return self.call(lambda source: list(source.foreach_env(fn)))

    def close(self) -> None:
        (self._env if self._source is None else self._source).close()


# ---------------------------------------------------------------- env runners


class EvaluationHost:
    """Plays blocks in the process of an env runner; `remake` replaces the environments."""

    def __init__(self, make: Callable[..., Player], index: int, restarts: int, count: int):
        self._make: Callable[[int], Player] = functools.partial(make, index=index, restarts=restarts)
        self._player = self._make(count)

    def started(self) -> None:
        pass

    def block(self, weights: PyTree, data: np.ndarray, impl: str, number: int, reset: bool, record: bool) -> Block:
        """Returns block `number` of an evaluation; block 0 begins the evaluation."""
        key = received(data, impl)
        if number == 0:
            self._player.begin(key, reset=reset)
        return self._player.block(jax.device_put(weights), jax.random.fold_in(key, number), record=record)

    def remake(self, count: int) -> None:
        self._player.close()
        self._player = self._make(count)

    def call(self, fn: Callable, *args: Any) -> Any:
        return self._player.call(lambda source: fn(source, *args))

    def close(self) -> None:
        self._player.close()


class EvaluationRunners(RunnerGroup, _Evaluating):
    """Plays evaluations in K vectors of environments, each in the process of an env runner.

    Each of K healthy runners plays N / K of N episodes, the first N mod K runners one more; N / K timesteps are rounded
    up. This process counts the episodes of each block, so a failed runner loses at most a block: its replacement plays
    the rest of its share, or the other runners do. Runners that do not answer by the deadline are replaced.

    Args:
      make: (count, index=, restarts=) -> Player of runner `index`, called in its process and pickled by Ray's
        cloudpickle. `count` and `restarts` give other seeds.
      options: options of the runners.
      num_envs: environments of each runner.
      length: rows of a block.
      count: argument of `make`.
    Raises:
      InputError: the cluster has too few resources, or cannot be reached.
      RunnersLost: in `play` and the calls.
    """

    _of = " of the evaluation"

    def __init__(
        self, make: Callable[..., Player], options: RunnerOptions, *, num_envs: Sequence[int], length: int,
        count: int = 0,
    ):  # fmt: skip
        self._num_envs, self._length, self._count = list(num_envs), length, count
        self._surplus: list[list[CountedEpisode]] = [[] for _ in num_envs]
        self._tallies: dict[int, Tally] = {}
        super().__init__(EvaluationHost, make, options)

    @property
    def healthy(self) -> int:
        """Number of runners that have started and have not failed."""
        return len(self._ready())

    def play(
        self, weights: PyTree, key: Key, goal: Goal, deadline: Deadline | None = None,
        on_rows: Sequence[OnRows | None] | None = None,
    ) -> Evaluation:  # fmt: skip
        """Plays until the goal is reached or the deadline is over; arguments and errors as `Player.play`."""
        deadline = deadline or Deadline()
        self._tallies = {}
        while (self._starting() or not self._runners) and not deadline.is_over():
            self._event([], seconds=_POLL)
        ready = self._ready()
        for runner, share in zip(ready, goal.split(len(ready)) if ready else ()):
            surplus = [] if share.reset else self._surplus[runner.index]
            self._tallies[runner.index] = Tally(share, self._num_envs[runner.index], surplus)
        sent = self._cluster.put(jax.device_get(weights))
        self._forget(ready)
        for runner in ready:
            runner.ordered = 0  # blocks of this evaluation
        callback = lambda index: on_rows[index] if on_rows else None
        while True:
            playing = [r for r in self._ready() if r.index in self._tallies]
            for runner in playing:
                # at least one block each, even after the deadline
                needs_block = self._tallies[runner.index].missing and not (runner.ordered and deadline.is_over())
                if needs_block and not runner.requests:
                    self._order(runner, sent, key, goal, callback(runner.index) is not None)
            busy = [r for r in playing if r.requests]
            starting = [r for r in self._starting() if r.index in self._tallies and self._tallies[r.index].missing]
            if not busy and (not starting or deadline.is_over()):
                break
            if deadline.seconds_left() <= 0:
                self._replace(busy)
                break
            if event := self._event(busy, seconds=_POLL):
                runner, _, block = event
                self._add_block(runner.index, block, callback(runner.index))
        for index, tally in self._tallies.items():
            self._surplus[index] = tally.surplus()
        return self.result()

    def _order(self, runner: RunnerProcess, weights: Any, key: Key, goal: Goal, record: bool) -> None:
        if runner.ordered * self._length > MAX_STEPS:
            raise self._max_steps_error(MAX_STEPS)
        runner_key = jax.random.fold_in(jax.random.fold_in(key, runner.index), runner.restarts)
        runner.order(runner.actor.block.remote(weights, *sendable(runner_key), runner.ordered, goal.reset, record))

    def _given(self, index: int, restarts: int) -> tuple:
        return (self._count,)

    def _start(self, index: int, restarts: int) -> None:
        super()._start(index, restarts)
        if restarts:
            self.recreated.append(index)

    def _proven(self, runner: RunnerProcess) -> bool:
        return runner.warm

    def _lose(self, runner: RunnerProcess) -> None:
        others = [r.index for r in self._ready() if r.index in self._tallies]
        if runner.index not in self._tallies or not others:
            return
        each, rest = divmod(self._tallies[runner.index].give_up(), len(others))
        for i, other in enumerate(others):
            self._tallies[other].add_amount(each + (i < rest))

    def _replace(self, runners: Sequence[RunnerProcess]) -> None:
        """Ends runners that did not answer by the deadline, and starts others."""
        for runner in runners:
            self._cluster.kill(runner.actor)
            self._start(runner.index, runner.restarts + 1)

    def restart(self, count: int) -> None:
        """Makes new environments, with the seeds of `count`."""
        self._count = count
        self._surplus = [[] for _ in self._num_envs]
        self._each(lambda r: r.actor.remake.remote(count))
