"""An evaluation in other processes: each environment runner plays its share of the episodes, block by block.

What ends on a block is counted here, so that little is lost with a runner: one that fails gives its environments' part
of the evaluation to the one that takes its place, or to the others.
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import RunnersLost
from jrl.rollout.evaluate import MAX_STEPS, Evaluation, Goal, Player, Tally, Until, Watch, joined, too_long, watched
from jrl.rollout.ray_cluster import Cluster, Failure, answers
from jrl.rollout.runner_health import Runner, RunnerOptions
from jrl.types import Key, PyTree

_STORE = 128 * 2**20  # bytes of the object store
_POLL = 0.05  # seconds between two looks at whether the evaluation is over


# ---------------------------------------------------------------- in the process of a runner


class Holder:
    """What a runner holds: its player, and how to make another."""

    def __init__(self, make: Callable[..., Player], count: int, index: int, restarts: int):
        self._make: Callable[[int], Player] = functools.partial(make, index=index, restarts=restarts)
        self.player = self._make(count)

    def remake(self, count: int) -> None:
        self.player.close()
        self.player = self._make(count)

    def close(self) -> None:
        self.player.close()


def _block(holder: Holder, actor: PyTree, data: np.ndarray, impl: str, number: int, reset: bool, whole: bool):
    """Block `number` of an evaluation; the first begins it."""
    key = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    if number == 0:
        holder.player.begin(key, reset=reset)
    return holder.player.block(jax.device_put(actor), jax.random.fold_in(key, number), whole=whole)


def _remake(holder: Holder, count: int) -> None:
    holder.remake(count)


def _call(holder: Holder, fn: Callable[[Any], Any]) -> Any:
    return holder.player.call(fn)


def _foreach_env(holder: Holder, fn: Callable[[Any], Any]) -> list[Any]:
    return holder.player.call(lambda source: list(source.foreach_env(fn)))


# ---------------------------------------------------------------- here


@dataclasses.dataclass
class _Runner(Runner):
    ref: Any = None  # ray.ObjectRef of the block under way
    blocks: int = 0  # of this evaluation, ordered


class Runners:
    """K vectors of environments in processes of their own, which play one evaluation together.

    Of N episodes each runner has N / K, the first N mod K one more, and of timesteps N / K rounded up; K is the number
    of those that are left. A runner fails when it raises, when its process ends or when it does not answer in time. By
    the options that ends the run, another starts in its place and plays what is missing of its share, or the others do.
    Runners that are under way when the time of an evaluation is over are ended, too, and others start in their places.

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

    def __init__(
        self,
        make: Callable[..., Player],
        options: RunnerOptions,
        *,
        num_envs: Sequence[int],
        length: int,
        count: int = 0,
    ):
        import ray

        options.check()
        self._make, self._options, self._num_envs, self._count = make, options, list(num_envs), count
        self._length = length
        self._runners: dict[int, _Runner] = {}  # those that live, by index
        self._left: list[list[tuple[float, int]]] = [[] for _ in num_envs]
        self._tallies: dict[int, Tally] = {}  # of the latest evaluation, by index
        self._restarts = 0
        self._closed = False
        self.recreated: list[int] = []  # runners that another has started in place of, since this was emptied
        self._cluster = Cluster(ray, options, _STORE)
        try:
            for index in range(options.num):
                self._start(index, 0)
        except BaseException:
            self.close()
            raise

    @property
    def healthy(self) -> int:
        """Runners that have started and have not failed."""
        return len(self._ready())

    def play(
        self, actor: PyTree, key: Key, goal: Goal, until: Until, watches: Sequence[Watch | None] | None = None
    ) -> Evaluation:
        """Plays until the goal is reached, or it is told to end; see `evaluate.play`. `watches`: of each runner."""
        self._tallies = {}
        while self._starting() and not until.over():
            self._event([], until)
        ready = self._ready()
        shares = goal.split(len(ready)) if ready else []
        self._tallies = {r.index: self._tally(r.index, share) for r, share in zip(ready, shares)}
        weights = self._cluster.put(jax.device_get(actor))
        for runner in self._runners.values():
            runner.blocks, runner.ref = 0, None
        while True:
            playing = [r for r in self._ready() if r.index in self._tallies]
            for runner in playing:
                # at least one block each, however little time there is
                if runner.ref is None and self._tallies[runner.index].missing and not (runner.blocks and until.over()):
                    self._order(runner, weights, key, goal, bool(watches and watches[runner.index]))
            under_way = [r for r in playing if r.ref is not None]
            coming = [r for r in self._starting() if r.index in self._tallies and self._tallies[r.index].missing]
            if not under_way and (not coming or until.over()):
                break
            if until.late():
                self._replace(under_way)
                break
            for index, rows, seen in self._event(under_way, until):
                counts = self._tallies[index].add(rows)
                if watches and (watch := watches[index]) is not None and seen is not None:
                    watched(watch, seen, counts)
        for index, tally in self._tallies.items():
            self._left[index] = tally.rest()
        return self.found()

    def found(self) -> Evaluation:
        """What of the latest evaluation has ended so far."""
        return joined([tally.result() for _, tally in sorted(self._tallies.items())])

    @property
    def missing(self) -> int:
        """What the latest evaluation lacks of its goal, in episodes or steps."""
        return sum(tally.missing for tally in self._tallies.values())

    def _tally(self, index: int, share: Goal) -> Tally:
        return Tally(share, self._num_envs[index], [] if share.reset else self._left[index])

    def _order(self, runner: _Runner, weights: Any, key: Key, goal: Goal, whole: bool) -> None:
        if runner.blocks * self._length > MAX_STEPS:
            raise too_long(len(self.found().returns), self.missing, MAX_STEPS)
        own = jax.random.fold_in(jax.random.fold_in(key, runner.index), runner.restarts)
        data, impl = np.asarray(jax.random.key_data(own)), str(jax.random.key_impl(own))
        runner.since = time.monotonic()
        runner.ref = runner.actor.call.remote(_block, weights, data, impl, runner.blocks, goal.reset, whole)
        runner.blocks += 1

    # ------------------------------------------------------------ health

    def _ready(self) -> list[_Runner]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is None]

    def _starting(self) -> list[_Runner]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is not None]

    def _start(self, index: int, restarts: int) -> None:
        actor, starting = self._cluster.start(functools.partial(Holder, self._make, self._count), index, restarts, None)
        self._runners[index] = _Runner(index, restarts, actor, starting, time.monotonic())

    def _event(self, wanted: Sequence[_Runner], until: Until) -> list[tuple]:
        """The block that comes first, (index, rows, seen), or nothing: a runner has started or failed, or some time
        has passed."""
        watched_runners = [*wanted, *self._starting()]
        if not watched_runners:
            raise RunnersLost("no environment runner of the evaluation is left")
        refs = [r.ref if r.starting is None else r.starting for r in watched_runners]
        now = time.monotonic()
        patience = min(r.deadline(self._options) for r in watched_runners) - now
        found = self._cluster.wait(refs, max(0.0, min(patience, _POLL)))
        if found is None:
            for runner in watched_runners:
                if time.monotonic() > (end := runner.deadline(self._options)):
                    what = "has not started" if runner.starting is not None else "has sent nothing"
                    key = "health_check_timeout_s" if runner.starting is not None else "sample_timeout_s"
                    self._fail(runner, f"it {what} within {end - runner.since:g} s (env_runners.{key})")
            return []
        runner = watched_runners[found]
        try:
            answer = self._cluster.get(refs[found])
        except Failure as e:
            self._fail(runner, str(e))
            return []
        runner.since = time.monotonic()
        if runner.starting is not None:
            runner.starting = None
            return []
        runner.ref, runner.warm = None, True
        return [(runner.index, *answer)]

    def _replace(self, runners: Sequence[_Runner]) -> None:
        """Ends those that did not answer in the time of an evaluation, and starts others."""
        for runner in runners:
            self._cluster.kill(runner.actor)
            self._start(runner.index, runner.restarts + 1)
            self.recreated.append(runner.index)

    def _fail(self, runner: _Runner, cause: str) -> None:
        """Ends the runner. Starts another or goes on without, where the options say so."""
        options, name = self._options, f"environment runner {runner.index} of the evaluation"
        self._cluster.kill(runner.actor)
        del self._runners[runner.index]
        if options.recreate_failed_env_runners:
            if self._restarts >= options.max_restarts or not (runner.warm or self._restarts < options.num):
                raise RunnersLost(f"{name} failed, as others did before: {cause}")
            self._restarts += 1
            warnings.warn(f"{name} failed, another starts in its place: {cause}", RuntimeWarning, stacklevel=2)
            self._start(runner.index, runner.restarts + 1)
            self.recreated.append(runner.index)
        elif options.ignore_env_runner_failures:
            if not self._runners:
                raise RunnersLost(f"{name}, the last one, failed: {cause}")
            warnings.warn(f"{name} failed, the others play its share: {cause}", RuntimeWarning, stacklevel=2)
            self._deal(runner.index)
        else:
            raise RunnersLost(
                f"{name} failed: {cause}\n"
                "env_runners.recreate_failed_env_runners=true starts another in its place, "
                "env_runners.ignore_env_runner_failures=true goes on without it"
            )

    def _deal(self, index: int) -> None:
        """What is missing of a runner's share, to the others."""
        others = [r.index for r in self._ready() if r.index in self._tallies]
        if index not in self._tallies or not others:
            return
        each, rest = divmod(self._tallies[index].give_up(), len(others))
        for i, other in enumerate(others):
            self._tallies[other].more(each + (i < rest))

    # ------------------------------------------------------------ the runners' environments

    def _each(self, fn: Callable, *args: Any) -> list[Any]:
        """fn(holder, *args) of every healthy runner, in their order; what it raises is raised here."""
        until = Until()
        while self._starting():
            self._event([], until)
        patience = 2 * self._options.sample_timeout_s + self._options.health_check_timeout_s
        calls = [(r, r.actor.call.remote(fn, *args)) for r in self._ready()]
        return [answer for _, answer in answers(self._cluster, calls, patience, self._fail)]

    def foreach_worker(self, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(source) in the process of every healthy runner."""
        return self._each(_call, fn)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(environment) of every environment of every healthy runner."""
        return [x for found in self._each(_foreach_env, fn) for x in found]

    def restart(self, count: int) -> None:
        """Environments made anew, with the seeds of `count`."""
        self._count = count
        self._left = [[] for _ in self._num_envs]
        self._each(_remake, count)

    def close(self) -> None:
        """Ends the runners, and Ray if it was begun here. May be called again."""
        if self._closed:
            return
        self._closed = True
        idle = [r.actor for r in self._ready() if r.ref is None]
        self._cluster.close([r.actor for r in self._runners.values()], idle)
        self._runners.clear()
