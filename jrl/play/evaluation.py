"""Evaluations of a run, after a training step or parallel to training.

    evaluations = Evaluations(cfg)
    row = evaluations.play(actor, count=3, version=3)                        # waits
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
from jrl.play.player import LENGTH, Deadline, EvaluationRunners, OnRows, Player
from jrl.play.tally import SUMMARY, Evaluation, Goal
from jrl.rollout.sources import copied
from jrl.types import EnvSpec, Key, PyTree


@dataclasses.dataclass
class _Running:
    """An unfinished evaluation."""

    group: Player | EvaluationRunners
    weights: PyTree
    key: Key
    goal: Goal
    version: int
    deadline: Deadline
    future: concurrent.futures.Future
    start: float = dataclasses.field(default_factory=time.perf_counter)
    parts: int = 0  # number of plays by a custom function


class Evaluations:
    """Plays the evaluations of a run, one at a time. `prepare` or the first evaluation makes the environments.

    An evaluation is reproducible: the seed of the run, `count` and the weights decide its result, unless runners fail
    or the time limit is reached. Evaluations never change training.

    Attributes:
      config: config of the evaluations: the run's, merged with `evaluation.config`.
      workers: the environments, for callbacks and custom evaluation functions.
      num_envs: number of environments, over all processes.
      names: keys of every result, without those of a custom function.
      latest: episodes of the latest evaluation; None with a custom function.

    Args:
      cfg: config of the run.
      callbacks: object whose `episode_watch(num_envs, evaluation=True)` returns None or an `OnRows` function. Each
        process has its function, which is called in the thread of the evaluation. None: no callbacks.
      algorithm: first argument of a custom evaluation function.
      spec: spec of the training environments; None: an environment is made to find the spec, if needed.
    Raises:
      InputError: `evaluation` or `custom.evaluation` are invalid.
    """

    def __init__(self, cfg: RunConfig, *, callbacks: Any = None, algorithm: Any = None, spec: EnvSpec | None = None):
        self.config = build_evaluation.build_config(cfg)
        self.algorithm = algorithm
        self._policies = agents.make(cfg)
        self._cfg, self._settings, self._callbacks, self._spec = cfg, cfg.evaluation, callbacks, spec
        self._sizes = build_evaluation.num_envs(cfg.evaluation, self._policies)
        self.num_envs, self.workers = sum(self._sizes), EvaluationWorkers(self)
        self._custom = registry.load(cfg.custom.evaluation, "custom.evaluation") if cfg.custom.evaluation else None
        self._group: Player | EvaluationRunners | None = None
        self._lender: Evaluations | None = None  # evaluations of another run, whose environments are used
        self._on_rows: list[OnRows | None] | None = None  # by process; they follow episodes over evaluations
        self._index = 0  # index of the environments
        self._running: _Running | None = None
        self.latest: Evaluation | None = None
        runners = ("num_healthy_workers",) if self._settings.num_env_runners else ()
        standard = (*SUMMARY, "timesteps", *runners, *self._policies.returns(None))
        self.names: tuple[str, ...] = (*(() if self._custom else standard), "weights_version", "timed_out", "time_s")

    @property
    def is_busy(self) -> bool:
        """Returns whether an evaluation is unfinished."""
        return self._running is not None

    @property
    def _may_hang(self) -> bool:
        """Returns whether a step can block for ever: environments in Python are stepped in this process."""
        return isinstance(self._group, Player) and not self._group.in_program and not self._custom

    @property
    def recreated(self) -> Sequence[int]:
        """Indices of the runners that were restarted since this list was last emptied."""
        return self._group.recreated if self._group else ()

    def nan_metrics(self) -> dict[str, float]:
        """Returns the metrics `evaluation/...` of result rows without an evaluation: NaN for each name."""
        return {f"evaluation/{name}": math.nan for name in self.names}

    def share_environments(self, other: "Evaluations") -> None:
        """Uses the environments of another run's evaluations, if they are JAX environments."""
        if not (self._settings.parallel or self._custom or self._callbacks):
            self._lender = other

    def prepare(self) -> Player | EvaluationRunners:
        """Makes the environments, if they do not exist yet, and returns their player.

        Raises:
          InputError: the environments cannot be made, or have other spaces than those of training.
        """
        if self._group is None and self._lender is not None:
            shared = self._lender.prepare()
            if isinstance(shared, Player) and shared.in_program:
                return shared
            self._lender = None
        if self._group is None:
            infos = self._callbacks is not None
            self._group = build_evaluation.build_players(
                self._cfg, self.config, self._sizes, self._index, infos=infos, spec=self._spec
            )
        return self._group

    # ------------------------------------------------------------ one evaluation

    def play(self, weights: PyTree, *, count: int, version: int, duration: int | None = None) -> dict[str, float]:
        """Plays an evaluation and returns its result.

        Args:
          weights: Actor of `Algo.act`; not copied.
          count: number of the evaluation or iteration; decides the random numbers.
          version: version of the weights, reported as `weights_version`.
          duration: replaces `evaluation.duration`; None: that value, where `auto` means an episode per environment.
        Returns:
          `return`, `return_std`, `return_min`, `return_max`, `length` (NaN if no episode ended), `episodes`,
          `timesteps`, `weights_version`, `timed_out` (0 or 1), `time_s`, and `num_healthy_workers` with runners. With
          a custom function: its result, `weights_version`, `timed_out` and `time_s`.
        Raises:
          InputError: see `prepare`.
          RuntimeError: another evaluation is unfinished.
        """
        self.prepare()
        # a time limit needs a second thread if a step can block
        threaded = self._may_hang and self._settings.timeout_s is not None
        amount = self._settings.duration if duration is None else duration
        goal = Goal(self.num_envs, "episodes", self._settings.force_reset)
        if amount != "auto":
            goal = Goal(amount, self._settings.unit, self._settings.force_reset)
        self._begin(weights, goal, count, version, threaded=threaded)
        return self._result()

    def begin(self, weights: PyTree, *, count: int, version: int) -> None:
        """Starts an evaluation in a thread, with a copy of the weights; `finish` returns the result.

        Arguments and errors as `play`. With `evaluation.duration` auto the evaluation lasts until `finish` is called,
        at least one block of rows.
        """
        amount = self._settings.duration
        goal = Goal(None if amount == "auto" else amount, self._settings.unit, self._settings.force_reset)
        self._begin(copied(weights), goal, count, version, threaded=True)

    def finish(self) -> dict[str, float] | None:
        """Waits for the evaluation that `begin` started and returns its result, as `play`; None: there is none.

        Raises:
          Exception: any error of the evaluation.
        """
        if self._running is None:
            return None
        if self._running.goal.amount is None and not self._custom:
            self._running.deadline.stop(self._settings.timeout_s)
        return self._result()

    def _begin(self, weights: PyTree, goal: Goal, count: int, version: int, *, threaded: bool) -> None:
        if self._running is not None:
            raise RuntimeError("evaluation: expected no unfinished evaluation: call finish() first")
        limit = None if goal.amount is None or self._custom else self._settings.timeout_s
        key = role_key(self._cfg.run.seed, Role.EVALUATE, count)
        future: concurrent.futures.Future = concurrent.futures.Future()
        group = self.prepare()
        self._running = running = _Running(group, weights, key, goal, version, Deadline(limit), future)
        if threaded:
            # a daemon: a blocked environment must not keep the process alive
            threading.Thread(target=self._complete, args=(running,), name="jrl-evaluate", daemon=True).start()
        else:
            self._complete(running)

    def _complete(self, running: _Running) -> None:
        try:
            running.future.set_result(self._measure(running))
        except BaseException as e:  # `_result` raises the error
            running.future.set_exception(e)

    def _measure(self, running: _Running) -> dict[str, float]:
        if self._custom:
            return read_numbers(self._custom(self.algorithm, self.workers))
        if self._callbacks is not None and self._on_rows is None:
            num_agents = Sizes(self._cfg).columns // self._cfg.env.num_envs
            self._on_rows = [self._callbacks.episode_watch(n * num_agents, evaluation=True) for n in self._sizes]
        self.latest = running.group.play(running.weights, running.key, running.goal, running.deadline, self._on_rows)
        return self._row(self.latest)

    def play_part(self, goal: Goal) -> Evaluation:
        """Plays with the weights of the unfinished evaluation, for its custom function.

        Raises:
          RuntimeError: no evaluation is unfinished.
        """
        running = self._running
        if running is None or not self._custom:
            raise RuntimeError(
                "evaluation_workers: expected a call inside a custom evaluation function, which has weights"
            )
        key = jax.random.fold_in(running.key, 2**31 + running.parts) if running.parts else running.key
        running.parts += 1
        group, limit = self.prepare(), self._settings.timeout_s
        result = group.play(running.weights, key, goal, Deadline(limit))
        if group.missing:
            warnings.warn(
                f"evaluation.timeout_s: {group.missing} {goal.unit} are missing after {limit:g} s",
                RuntimeWarning,
                stacklevel=3,
            )
        return result

    def _row(self, found: Evaluation) -> dict[str, float]:
        return {**found.summary(), "timesteps": found.timesteps, **self._policies.returns(found)}

    def _result(self) -> dict[str, float]:
        running = self._running
        assert running is not None
        group = running.group
        seconds = running.deadline.seconds_left() if self._may_hang else math.inf
        concurrent.futures.wait([running.future], timeout=None if seconds == math.inf else max(0.0, seconds))
        self._running, timed_out = None, False
        if running.future.done():
            row = running.future.result()
        else:
            self.latest, timed_out = group.result(), True
            row = self._row(self.latest)
            self._abandon(running)
        if not self._custom and running.goal.amount is not None and group.missing:
            timed_out = True
        if timed_out:
            self._warn(row, group.missing, running)
        healthy = {} if group.healthy is None or self._custom else {"num_healthy_workers": group.healthy}
        common = {"weights_version": running.version, "timed_out": int(timed_out)}
        return {**row, **healthy, **common, "time_s": round(time.perf_counter() - running.start, 3)}

    def _abandon(self, running: _Running) -> None:
        """Gives up a thread that is blocked in an environment; it closes the environments if the step returns."""
        running.deadline.stop(0.0)
        self._group = self._on_rows = None
        self._index += 1
        running.future.add_done_callback(lambda _: running.group.close())

    def _warn(self, row: Mapping[str, float], missing: int, running: _Running) -> None:
        fault = "it did not end" if running.goal.amount is None else f"{missing} {running.goal.unit} are missing"
        warnings.warn(
            f"evaluation.timeout_s: {fault} after {self._settings.timeout_s:g} s; the {row['episodes']} episodes that "
            "ended are the result, which is biased to short episodes: allow more time, play fewer episodes, or use "
            "evaluation.num_env_runners",
            RuntimeWarning,
            stacklevel=4,
        )

    # ------------------------------------------------------------ restart and close

    def restart(self, count: int) -> None:
        """Makes new environments with the seeds of `count`, as after a resume."""
        self._index = count
        if isinstance(self._group, EvaluationRunners):
            self._group.restart(count)
        elif self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        """Ends the unfinished evaluation and closes the environments."""
        running, self._running = self._running, None
        if running is not None:
            running.deadline.stop(0.0)
            concurrent.futures.wait([running.future], timeout=max(0.0, running.deadline.seconds_left()))
            if not running.future.done() and isinstance(running.group, Player):
                self._abandon(running)
        group, self._group = self._group, None
        if group is not None:
            group.close()


# ---------------------------------------------------------------- custom evaluation functions


class EvaluationWorkers:
    """The environments of evaluation, `algorithm.evaluation_workers`, for custom evaluation functions.

    def corridors(algorithm, evaluation_workers):
        evaluation_workers.foreach_env(lambda env: env.unwrapped.set_length(7))
        return {"long": evaluation_workers.play(10).returns.mean()}
    """

    def __init__(self, evaluations: Evaluations):
        self._evaluations = evaluations

    def foreach_worker(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns func(source) of each process, called in that process between two blocks of rows."""
        return self._evaluations.prepare().foreach_worker(func)

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns func(environment) for each environment. Raises InputError: environments are not Python objects."""
        return self._evaluations.prepare().foreach_env(func)

    def play(self, episodes: int) -> Evaluation:
        """Plays exactly N = `episodes` episodes from a reset: `returns` [N] f32, `lengths` [N] i32, and `summary()`.

        Raises:
          RuntimeError: no evaluation is unfinished, so there are no weights.
        """
        return self._evaluations.play_part(Goal(episodes))

    def sample(self, num_rollouts: int = 1) -> Evaluation:
        """Plays 64 * `num_rollouts` more steps of each environment; returns the episodes that end."""
        steps = LENGTH * num_rollouts * self._evaluations.num_envs
        return self._evaluations.play_part(Goal(steps, "timesteps", reset=False))


def read_numbers(result: Any) -> dict[str, float]:
    """Returns the numbers of a custom evaluation function's result, with paths `a/b` of nested mappings.

    Raises:
      InputError: the result is not a mapping of numbers.
    """
    if not isinstance(result, Mapping):
        raise InputError(f"custom.evaluation: expected a mapping of names to numbers, got {type(result).__name__}")
    named = dict(_iterate_numbers(result, ()))
    return dict(zip(spaces.join_paths([*named]), named.values(), strict=True))


def _iterate_numbers(result: Mapping[Any, Any], parent: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in result.items():
        path = (*parent, str(name))
        if isinstance(value, Mapping):
            yield from _iterate_numbers(value, path)
        elif np.ndim(value) != 0 or np.asarray(value).dtype.kind not in "buif":
            raise InputError(f"custom.evaluation: {'/'.join(path)}: expected a number, got {value!r}")
        else:
            yield path, np.asarray(value).item()
