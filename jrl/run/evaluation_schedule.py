"""When a session evaluates, and how the numbers come into its result rows."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jrl import callbacks
from jrl.config import datasets
from jrl.learn.clock import StepInfo
from jrl.play import video
from jrl.play.evaluation import Evaluations
from jrl.run import reporter
from jrl.run.policies import BaseSession
from jrl.types import PyTree

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

    def __init__(self, session: BaseSession, told: callbacks.CallbackList | None, face: Any, directory: Path | None):
        cfg = session.config
        self._session, self._told, self._face, self._settings = session, told, face, cfg.evaluation
        self.evaluations = Evaluations(cfg, callbacks=told, algorithm=face)
        self._videos = video.build_videos(self.evaluations.config, cfg, directory)
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
            self._session.reporter.extra.update(self.evaluations.nan_metrics())
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
        if self._parallel and not self.evaluations.is_busy:
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
            extra.update(self.evaluations.nan_metrics())
        if self.evaluations.is_busy:
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
        self.evaluations.run = self._session.config
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
