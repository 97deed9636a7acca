"""Evaluation beside training, after the training step or parallel to it: its results, and when one is due.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl import agents, callbacks, registry
from jrl.config import RunConfig, datasets, plan
from jrl.learn.clock import StepInfo
from jrl.learn.keys import Role, role_key
from jrl.play import build_evaluation, video
from jrl.play.evaluate import EvaluationRunners, Player, Until, Watch
from jrl.play.tally import SUMMARY, Evaluation, Goal
from jrl.rollout.sources import copied
from jrl.run import reporter
from jrl.run.workers import EvaluationWorkers, numbers
from jrl.types import EnvSpec, Key, PyTree

if TYPE_CHECKING:
    from jrl.run.session import Session


@dataclasses.dataclass
class _Running:
    """An evaluation that has begun."""

    group: Player | EvaluationRunners
    actor: PyTree
    key: Key
    goal: Goal
    version: int
    plays_for: RunConfig  # the run as it was when the evaluation began
    until: Until
    found: concurrent.futures.Future
    start: float = dataclasses.field(default_factory=time.perf_counter)


class Evaluations:
    """The evaluations of a run, one at a time. Cheap to make: environments come with the first, or with `prepare`.

    An evaluation is reproducible: the seed of the run, `count` and the weights decide its numbers, unless runners fail
    or its time is over. It never changes training.

    Attributes:
      config: of the evaluation, the run's with `evaluation.config` over it.
      workers: the environments, for callbacks and custom evaluation functions.
      plays_for: the run with the policies that it has by now: their names are those of the results.
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
        self.plays_for = cfg
        self._cfg, self._settings, self._callbacks, self._spec = cfg, cfg.evaluation, callbacks, spec
        self._sizes = build_evaluation.num_envs(cfg)
        limit = cfg.evaluation.timeout_s
        self.workers = EvaluationWorkers(self.prepare, num_envs=sum(self._sizes), timeout_s=limit)
        self._custom = registry.load(cfg.custom.evaluation, "custom.evaluation") if cfg.custom.evaluation else None
        self._group: Player | EvaluationRunners | None = None
        self._host: Evaluations | None = None  # whose environments these are, too
        self._watches: list[Watch | None] | None = None  # of each process: they follow episodes over evaluations
        self._index = 0  # of the environments
        self._running: _Running | None = None
        self.latest: Evaluation | None = None
        runners = ("num_healthy_workers",) if self._settings.num_env_runners else ()
        played = (*SUMMARY, "timesteps", *runners, *agents.make(cfg).returns(None))
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
            self._group = build_evaluation.group(self._cfg, self.config, self._index, infos=infos, spec=self._spec)
        return self._group

    # ------------------------------------------------------------ one evaluation

    def play(self, actor: PyTree, *, count: int, version: int, duration: int | None = None) -> dict[str, float]:
        """Plays now.

        Args:
          actor: of the algorithm; the caller's, not copied.
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
        goal = Goal(sum(self._sizes), "episodes", self._settings.force_reset)
        if amount != "auto":
            goal = Goal(amount, self._settings.unit, self._settings.force_reset)
        self._begin(actor, goal, count, version, threaded=threaded)
        return self._result()

    def begin(self, actor: PyTree, *, count: int, version: int) -> None:
        """Begins to play, in a thread of its own and with a copy of the actor; `finish` has the result.

        Arguments and errors as `play`; with `evaluation.duration` auto until `finish` is called, at least one block of
        rows, whose episodes that end count.
        """
        amount = self._settings.duration
        goal = Goal(None if amount == "auto" else amount, self._settings.unit, self._settings.force_reset)
        self._begin(copied(actor), goal, count, version, threaded=True)

    def finish(self) -> dict[str, float] | None:
        """Waits for what `begin` has begun, and tells it to end if it is to last as long as training. None: nothing
        is under way. Keys as `play`; what the evaluation raised is raised here.
        """
        if self._running is None:
            return None
        if self._running.goal.amount is None and not self._custom:
            self._running.until.stop(self._settings.timeout_s)
        return self._result()

    def _begin(self, actor: PyTree, goal: Goal, count: int, version: int, *, threaded: bool) -> None:
        if self._running is not None:
            raise RuntimeError("an evaluation is under way: finish it first")
        limit = None if goal.amount is None or self._custom else self._settings.timeout_s
        key = role_key(self._cfg.run.seed, Role.EVALUATE, count)
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._running = running = _Running(
            self.prepare(), actor, key, goal, version, self.plays_for, Until(limit), future
        )
        if self._custom:
            self.workers.begin(actor, key)
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
            agents = plan.columns(self._cfg) // self._cfg.env.num_envs  # each has a column
            self._watches = [self._callbacks.episode_watch(n * agents, evaluation=True) for n in self._sizes]
        self.latest = running.group.play(running.actor, running.key, running.goal, running.until, self._watches)
        return self._row(self.latest, running)

    def _row(self, found: Evaluation, running: _Running) -> dict[str, float]:
        of_agents = agents.make(running.plays_for).returns(found)
        return {**found.summary(), "timesteps": found.timesteps, **of_agents}

    def _result(self) -> dict[str, float]:
        running = self._running
        assert running is not None
        group = running.group
        left = running.until.left() if self._may_hang else math.inf
        concurrent.futures.wait([running.found], timeout=None if left == math.inf else max(0.0, left))
        self._running = None
        self.workers.end()
        timed_out = False
        if running.found.done():
            row = running.found.result()
        else:
            self.latest, timed_out = group.found(), True
            row = self._row(self.latest, running)
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


_MOST_EPISODES = 1000  # whose returns and lengths a row lists


class Schedule:
    """Says when a session evaluates, tells callbacks of it, and puts the numbers into result rows.

    Attributes:
      decides: whether a result of an evaluation, by the names of result rows, has consequences. One that was played
        beside training is played again then, with the weights as they are.
      evaluations: who plays them.

    Args:
      session: of the run, which calls `prepare`, `start` once it has a reporter, and `close`.
      told: the user's callbacks.
      face: what callbacks and a custom evaluation function are given as `algorithm`.
      directory: of the run, for videos; None: `run.out`.
    Raises:
      InputError: see `Evaluations`.
    """

    def __init__(self, session: "Session", told: callbacks.CallbackList | None, face: Any, directory: Path | None):
        cfg = session.config
        self._session, self._told, self._face, self._settings = session, told, face, cfg.evaluation
        self.evaluations = Evaluations(cfg, callbacks=told, algorithm=face)
        self._videos = video.of_run(self.evaluations.config, cfg, directory)
        self.decides: Callable[[Mapping[str, Any]], bool] = lambda found: reporter.evaluation_ends(cfg.stop, found)
        self._some = bool(cfg.evaluation.every or cfg.evaluation.interval)
        self._plays = datasets.plays(cfg)  # without environments an evaluation is the estimates by `data.estimate`
        self._parallel = cfg.evaluation.parallel and self._plays
        self._estimated: dict[str, float] = {}  # of the evaluation under way
        self._reaches: Callable[[StepInfo], bool] | None = None
        self._asked = False  # for the row that comes next

    def prepare(self) -> None:
        """Makes the environments, where evaluations are due by the config. Raises InputError."""
        if self._some and self._plays:
            self.evaluations.prepare()
        if self._videos:
            self._videos.prepare(self._session.run.spec)

    def start(self) -> None:
        """Puts the keys into result rows, and counts from where the session stands."""
        if self._some and self._plays:
            self._session.reporter.extra.update(self.evaluations.nothing())
        if self._settings.every:
            most, done = self._session.steps_per_call, self._session.env_steps
            self._reaches = reporter.reached(self._settings.every, most=most, env_steps=done)

    def close(self) -> None:
        self.evaluations.close()
        if self._videos:
            self._videos.close()

    # ------------------------------------------------------------ when

    def reached(self, info: StepInfo) -> bool:
        """Returns whether a call takes the run to an evaluation by `evaluation.every`, whose result is in the row that
        ends here. One beside training begins at once and ends with a later row, unless another is under way.
        """
        if self._reaches is None or not self._reaches(info):
            return False
        if self._parallel and not self.evaluations.busy:
            self._due()
            return False
        self._asked = True
        return True

    def in_row(self, ahead: int) -> bool:
        """Returns whether the row that is so many ahead of the latest has an evaluation by `evaluation.interval`."""
        interval = self._settings.interval
        return interval is not None and (self._session.reporter.count + ahead) % interval == 0

    def begin_first(self) -> None:
        """Begins the evaluation beside the first row, where it is to have one."""
        if self._parallel and self.in_row(1):
            self._begin()

    def before_row(self) -> None:
        """Finishes the evaluation for the row that is about to be made, or plays it."""
        extra = self._session.reporter.extra
        if not self._settings.always_attach and extra.get("evaluation/weights_version") is not None:
            extra.update(self.evaluations.nothing())
        if self.evaluations.busy:
            found = self._finish()
            if self.decides({f"evaluation/{name}": value for name, value in found.items()}):
                self.play()  # those weights are gone
        # beside training, that of the next row begins now
        if self._asked or self.in_row(1 + self._parallel):
            self._asked = False
            self._due()

    def _due(self) -> None:
        self._finish()
        if self._session.config.checkpoint.exact:  # environments that would go on where they were the last time
            self.evaluations.restart(self._session.iteration)
        if self._parallel:
            self._begin()
        else:
            self.play()

    # ------------------------------------------------------------ one evaluation

    def _begin(self) -> None:
        self.evaluations.begin(self._actor(), **self._count())

    def play(self, duration: int | None = None) -> dict[str, Any]:
        """Plays an evaluation with the present weights, now; see `Session.evaluate`."""
        self._finish()
        actor = self._actor()
        played = self._plays or not self._estimated
        return self._attached(self.evaluations.play(actor, **self._count(), duration=duration) if played else {})

    def _finish(self) -> dict[str, Any]:
        found = self.evaluations.finish()
        return {} if found is None else self._attached(found)

    def _count(self) -> dict[str, int]:
        return {"count": self._session.iteration, "version": self._session.iteration}

    def _actor(self) -> PyTree:
        """Returns the actor of an evaluation that begins, tells callbacks of it, and begins its video."""
        if self._told:
            self._told.call("on_evaluate_start", algorithm=self._face)
        actor = self._session.actor()
        self.evaluations.plays_for = self._session.config
        judge = self._session.run.judge
        if judge and judge.with_evaluations:
            self._estimated = judge.of(actor, self._session.iteration)
        if self._videos:
            self._videos.begin(actor, self._session.counted())
        return actor

    def _attached(self, found: dict[str, Any]) -> dict[str, Any]:
        if self._told:
            self._told.recreated(self._face, self.evaluations.workers, self.evaluations, is_evaluation=True)
            found.update(self._told.drain_evaluation())
        estimated, self._estimated = self._estimated, {}
        found.update(estimated)
        if self._told:
            self._told.call("on_evaluate_end", algorithm=self._face, evaluation_metrics=found)
        in_row = lambda name: name if name in estimated else f"evaluation/{name}"
        self._session.reporter.extra.update({in_row(name): value for name, value in found.items()})
        if (played := self.evaluations.latest) is not None:
            every = math.ceil(len(played.returns) / _MOST_EPISODES) or 1  # spread over the environments
            lists = {"returns": played.returns[::every].tolist(), "lengths": played.lengths[::every].tolist()}
            self._session.reporter.once.update({f"evaluation/{name}": values for name, values in lists.items()})
        return found
