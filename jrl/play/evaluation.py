"""Evaluation beside training, after the training step or parallel to it.

    evaluations = Evaluations(cfg)
    row = evaluations.play(actor, count=3, version=3)                        # blocks
    evaluations.begin(actor, count=4, version=3); ...; row = evaluations.finish()   # parallel

See docs/evaluation.md.
"""

import concurrent.futures
import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl import agents, registry, spaces
from jrl.config import RunConfig, Sizes
from jrl.errors import InputError
from jrl.learn.program import Role, role_key
from jrl.play import build_evaluation
from jrl.play.evaluate import LENGTH, EvaluationRunners, Player, Until, Watch
from jrl.play.tally import SUMMARY, Evaluation, Goal
from jrl.rollout.sources import copied
from jrl.types import EnvSpec, Key, PyTree


@dataclasses.dataclass
class _Running:
    """An evaluation that has begun."""

    group: Player | EvaluationRunners
    weights: PyTree
    key: Key
    goal: Goal
    version: int
    until: Until
    found: concurrent.futures.Future
    start: float = dataclasses.field(default_factory=time.perf_counter)
    parts: int = 0  # that a custom function has played


class Evaluations:
    """The evaluations of a run, one at a time. Cheap to make: environments come with the first, or with `prepare`.

    An evaluation is reproducible: the seed of the run, `count` and the weights decide its numbers, unless runners fail
    or its time is over. It never changes training.

    Attributes:
      config: of the evaluation, the run's with `evaluation.config` over it.
      workers: the environments, for callbacks and custom evaluation functions.
      num_envs: over all processes.
      names: keys of every result; of a custom function's none is known.
      latest: the episodes of the latest evaluation; of a custom function's none are known.

    Args:
      cfg: the run.
      callbacks: an object whose `episode_watch(num_envs, evaluation=True)` gives None, or a function of (rollout as
        numpy arrays, infos or None) which sees the rows that count, block by block, in the thread of the evaluation.
        With runners each has one. None: nothing is computed for it.
      algorithm: what a custom evaluation function gets first.
      spec: of the training environments; None: found out, if the evaluation has others.
    Raises:
      InputError: what is wrong with `evaluation` and `custom.evaluation`.
    """

    def __init__(self, cfg: RunConfig, *, callbacks: Any = None, algorithm: Any = None, spec: EnvSpec | None = None):
        self.config = build_evaluation.config_of(cfg)
        self.algorithm = algorithm
        self._policies = agents.make(cfg)
        self._cfg, self._settings, self._callbacks, self._spec = cfg, cfg.evaluation, callbacks, spec
        self._sizes = build_evaluation.num_envs(cfg.evaluation, self._policies)
        self.num_envs, self.workers = sum(self._sizes), EvaluationWorkers(self)
        self._custom = registry.load(cfg.custom.evaluation, "custom.evaluation") if cfg.custom.evaluation else None
        self._group: Player | EvaluationRunners | None = None
        self._host: Evaluations | None = None  # whose environments these are, too
        self._watches: list[Watch | None] | None = None  # of each process: they follow episodes over evaluations
        self._index = 0  # of the environments
        self._running: _Running | None = None
        self.latest: Evaluation | None = None
        runners = ("num_healthy_workers",) if self._settings.num_env_runners else ()
        played = (*SUMMARY, "timesteps", *runners, *self._policies.returns(None))
        self.names: tuple[str, ...] = (*(() if self._custom else played), "weights_version", "timed_out", "time_s")

    @property
    def busy(self) -> bool:
        """Returns whether an evaluation has begun and is not finished."""
        return self._running is not None

    @property
    def _may_hang(self) -> bool:
        """Returns whether environments in Python are played in this process: all others look at the clock."""
        return isinstance(self._group, Player) and not self._group.in_program and not self._custom

    @property
    def recreated(self) -> Sequence[int]:
        """Indices of the runners that another has started in place of, since the list was emptied."""
        return self._group.recreated if self._group else ()

    def nothing(self) -> dict[str, float]:
        """Returns the keys `evaluation/...` of result rows before the first evaluation: every row has every key."""
        return {f"evaluation/{name}": math.nan for name in self.names}

    def share(self, other: "Evaluations") -> None:
        """Plays in the environments of another run's evaluations, one after the other, where they are a program."""
        if not (self._settings.parallel or self._custom or self._callbacks):
            self._host = other

    def prepare(self) -> Player | EvaluationRunners:
        """Makes the environments, if there are none, and returns who plays in them.

        Raises:
          InputError: they cannot be made, or have other spaces than those of training.
        """
        if self._group is None and self._host is not None:
            theirs = self._host.prepare()
            if isinstance(theirs, Player) and theirs.in_program:
                return theirs
            self._host = None
        if self._group is None:
            infos = self._callbacks is not None
            self._group = build_evaluation.group(
                self._cfg, self.config, self._sizes, self._index, infos=infos, spec=self._spec
            )
        return self._group

    # ------------------------------------------------------------ one evaluation

    def play(self, weights: PyTree, *, count: int, version: int, duration: int | None = None) -> dict[str, float]:
        """Plays now.

        Args:
          weights: of `Algo.act`; the caller's, not copied.
          count: of evaluations or iterations; decides the random numbers.
          version: of the weights, reported as `weights_version`.
          duration: in the place of `evaluation.duration`. Without it `auto` means an episode of each environment.
        Returns:
          `return`, `return_std`, `return_min`, `return_max`, `length` (NaN if no episode ended), `episodes`,
          `timesteps`, `weights_version`, `timed_out` (0 or 1), `time_s`, and `num_healthy_workers` with runners; or
          what the custom function returned, with the last three.
        Raises:
          InputError: see `prepare`.
          RuntimeError: another is under way.
        """
        self.prepare()
        # where one hangs, only another thread can go on
        threaded = self._may_hang and self._settings.timeout_s is not None
        amount = self._settings.duration if duration is None else duration
        goal = Goal(self.num_envs, "episodes", self._settings.force_reset)
        if amount != "auto":
            goal = Goal(amount, self._settings.unit, self._settings.force_reset)
        self._begin(weights, goal, count, version, threaded=threaded)
        return self._result()

    def begin(self, weights: PyTree, *, count: int, version: int) -> None:
        """Begins to play, in a thread of its own and with a copy of the weights; `finish` has the result.

        Arguments and errors as `play`; with `evaluation.duration` auto until `finish` is called, at least one block of
        rows, whose episodes that end count.
        """
        amount = self._settings.duration
        goal = Goal(None if amount == "auto" else amount, self._settings.unit, self._settings.force_reset)
        self._begin(copied(weights), goal, count, version, threaded=True)

    def finish(self) -> dict[str, float] | None:
        """Waits for what `begin` has begun, and tells it to end if it is to last as long as training. None: nothing
        is under way. Keys as `play`; what the evaluation raised is raised here.
        """
        if self._running is None:
            return None
        if self._running.goal.amount is None and not self._custom:
            self._running.until.stop(self._settings.timeout_s)
        return self._result()

    def _begin(self, weights: PyTree, goal: Goal, count: int, version: int, *, threaded: bool) -> None:
        if self._running is not None:
            raise RuntimeError("an evaluation is under way: finish it first")
        limit = None if goal.amount is None or self._custom else self._settings.timeout_s
        key = role_key(self._cfg.run.seed, Role.EVALUATE, count)
        future: concurrent.futures.Future = concurrent.futures.Future()
        group = self.prepare()
        self._running = running = _Running(group, weights, key, goal, version, Until(limit), future)
        if threaded:
            # a daemon: an environment that hangs must not keep the process
            threading.Thread(target=self._fill, args=(running,), name="jrl-evaluate", daemon=True).start()
        else:
            self._fill(running)

    def _fill(self, running: _Running) -> None:
        try:
            running.found.set_result(self._measure(running))
        except BaseException as e:  # whoever waits for it decides
            running.found.set_exception(e)

    def _measure(self, running: _Running) -> dict[str, float]:
        if self._custom:
            return numbers(self._custom(self.algorithm, self.workers))
        if self._callbacks is not None and self._watches is None:
            agents = Sizes(self._cfg).columns // self._cfg.env.num_envs  # each has a column
            self._watches = [self._callbacks.episode_watch(n * agents, evaluation=True) for n in self._sizes]
        self.latest = running.group.play(running.weights, running.key, running.goal, running.until, self._watches)
        return self._row(self.latest)

    def play_part(self, goal: Goal) -> Evaluation:
        """Plays with the weights of the evaluation under way, for its custom function. Raises RuntimeError: none is."""
        running = self._running
        if running is None or not self._custom:
            raise RuntimeError("evaluation_workers has weights to play with while a custom evaluation function runs")
        key = jax.random.fold_in(running.key, 2**31 + running.parts) if running.parts else running.key
        running.parts += 1
        group, limit = self.prepare(), self._settings.timeout_s
        found = group.play(running.weights, key, goal, Until(limit))
        if group.missing:
            warnings.warn(
                f"evaluation.timeout_s: {group.missing} {goal.unit} are missing after {limit:g} s",
                RuntimeWarning,
                stacklevel=3,
            )
        return found

    def _row(self, found: Evaluation) -> dict[str, float]:
        return {**found.summary(), "timesteps": found.timesteps, **self._policies.returns(found)}

    def _result(self) -> dict[str, float]:
        running = self._running
        assert running is not None
        group = running.group
        left = running.until.left() if self._may_hang else math.inf
        concurrent.futures.wait([running.found], timeout=None if left == math.inf else max(0.0, left))
        self._running, timed_out = None, False
        if running.found.done():
            row = running.found.result()
        else:
            self.latest, timed_out = group.found(), True
            row = self._row(self.latest)
            self._abandon(running)
        if not self._custom and running.goal.amount is not None and group.missing:
            timed_out = True
        if timed_out:
            self._warn(row, group.missing, running)
        healthy = {} if group.healthy is None or self._custom else {"num_healthy_workers": group.healthy}
        own = {"weights_version": running.version, "timed_out": int(timed_out)}
        return {**row, **healthy, **own, "time_s": round(time.perf_counter() - running.start, 3)}

    def _abandon(self, running: _Running) -> None:
        """Leaves alone a thread that hangs in an environment: it closes them if it ever comes back."""
        running.until.stop(0.0)
        self._group = self._watches = None
        self._index += 1
        running.found.add_done_callback(lambda _: running.group.close())

    def _warn(self, row: Mapping[str, float], missing: int, running: _Running) -> None:
        what = "it did not end" if running.goal.amount is None else f"{missing} {running.goal.unit} are missing"
        warnings.warn(
            f"evaluation.timeout_s: {what} after {self._settings.timeout_s:g} s; the {row['episodes']} episodes that "
            "ended are the result, among which short ones are more frequent than they should be: allow more time, play "
            "fewer episodes, or use evaluation.num_env_runners",
            RuntimeWarning,
            stacklevel=4,
        )

    # ------------------------------------------------------------ the end

    def restart(self, count: int) -> None:
        """Makes environments anew with other seeds, those of `count`, as after a resume."""
        self._index = count
        if isinstance(self._group, EvaluationRunners):
            self._group.restart(count)
        elif self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        """Ends what is under way, and the environments."""
        running, self._running = self._running, None
        if running is not None:
            running.until.stop(0.0)
            concurrent.futures.wait([running.found], timeout=max(0.0, running.until.left()))
            if not running.found.done() and isinstance(running.group, Player):
                self._abandon(running)
        group, self._group = self._group, None
        if group is not None:
            group.close()


# ---------------------------------------------------------------- a custom evaluation function


class EvaluationWorkers:
    """The environments of evaluation: `algorithm.evaluation_workers`, with which a custom evaluation function plays.

    def corridors(algorithm, evaluation_workers):
        evaluation_workers.foreach_env(lambda env: env.unwrapped.set_length(7))
        return {"long": evaluation_workers.play(10).returns.mean()}
    """

    def __init__(self, evaluations: Evaluations):
        self._evaluations = evaluations

    def foreach_worker(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls `func` with the source of each process that plays, in its process, between two blocks of rows."""
        return self._evaluations.prepare().foreach_worker(func)

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls `func` with each environment. Raises InputError where they are not Python objects."""
        return self._evaluations.prepare().foreach_env(func)

    def play(self, episodes: int) -> Evaluation:
        """Plays exactly so many episodes from a reset: `returns` [N] f32, `lengths` [N] i32, and `summary()`.

        Raises:
          RuntimeError: no evaluation is under way, so that there are no weights.
        """
        return self._evaluations.play_part(Goal(episodes))

    def sample(self, num_rollouts: int = 1) -> Evaluation:
        """Plays on for 64 * `num_rollouts` steps of each environment; returns the episodes that end."""
        steps = LENGTH * num_rollouts * self._evaluations.num_envs
        return self._evaluations.play_part(Goal(steps, "timesteps", reset=False))


def numbers(found: Any) -> dict[str, float]:
    """Returns the numbers of a custom evaluation function's result, nested ones as `a/b`.

    Raises:
      InputError: it is not a mapping of numbers.
    """
    if not isinstance(found, Mapping):
        raise InputError(f"custom.evaluation: expected a mapping of names to numbers, got {type(found).__name__}")
    named = dict(_numbers(found, ()))
    return dict(zip(spaces.join_paths([*named]), named.values(), strict=True))


def _numbers(found: Mapping[Any, Any], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in found.items():
        path = (*at, str(name))
        if isinstance(value, Mapping):
            yield from _numbers(value, path)
        elif np.ndim(value) != 0 or np.asarray(value).dtype.kind not in "buif":
            raise InputError(f"custom.evaluation: {'/'.join(path)} must be a number, got {value!r}")
        else:
            yield path, np.asarray(value).item()
