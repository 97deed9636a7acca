"""Schedule of a session's evaluations, whose metrics go to result rows."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.config import EvaluationConfig, datasets
from jrl.learn.program import StepInfo
from jrl.run import reporter
from jrl.run.base_session import BaseSession
from jrl.types import PyTree

if TYPE_CHECKING:
    from jrl import callbacks
    from jrl.play.elo import Elo
    from jrl.play.evaluation import Evaluations
    from jrl.play.video import Videos

_MAX_EPISODES = 1000  # episodes whose returns and lengths a row lists


class Schedule:
    """Plays the evaluations of a session when they are due, calls callbacks, and adds the metrics to result rows.

    The session calls `prepare`, `start` once its reporter exists, and `close`.

    Attributes:
      elo: ratings by `evaluation.elo_games`, once prepared; None: no ratings.
      decides: (metrics `evaluation/...`) -> whether the run acts on them, such as ending. A parallel evaluation is then
        repeated with the present weights.

    Args:
      callback_target: object that callbacks and a custom evaluation function get as `algorithm`.
      directory: run directory, for videos.
    Raises:
      InputError: see `Evaluations`.
    """

    def __init__(
        self,
        session: BaseSession,
        callback_list: "callbacks.CallbackList | None",
        callback_target: Any,
        directory: Path | None,
    ):
        self._cfg = cfg = session.config
        self._session, self._settings = session, cfg.evaluation
        self._callbacks, self._callback_target = callback_list, callback_target
        self._evaluations: Evaluations | None = None
        self._videos: Videos | None = None
        if cfg.custom.evaluation or cfg.evaluation != EvaluationConfig():
            from jrl.play import video

            self._videos = video.build_videos(self.evaluations.config, cfg, directory)
        self.decides: Callable[[Mapping[str, Any]], bool] = lambda metrics: reporter.evaluation_ends(cfg.stop, metrics)
        self._is_scheduled = bool(cfg.evaluation.every or cfg.evaluation.interval)
        self._plays = datasets.plays(cfg)  # without environments an evaluation is the estimates by `data.estimate`
        self._parallel = cfg.evaluation.parallel and self._plays
        self._estimated: dict[str, float] = {}  # estimates of the unfinished evaluation
        self.elo: Elo | None = None
        self._rated: dict[str, float] = {}  # ratings of the unfinished evaluation
        self._is_reached: Callable[[StepInfo], bool] = lambda info: False
        self._in_next_row = False  # whether `is_due` has scheduled an evaluation for the next row

    @property
    def evaluations(self) -> "Evaluations":
        if self._evaluations is None:
            from jrl.play.evaluation import Evaluations

            self._evaluations = Evaluations(self._cfg, callbacks=self._callbacks, algorithm=self._callback_target)
        return self._evaluations

    @property
    def is_busy(self) -> bool:
        """Returns whether an evaluation has begun and is not finished."""
        return self._evaluations is not None and self._evaluations.is_busy

    def prepare(self) -> None:
        """Makes the environments, if the config schedules evaluations. Raises InputError."""
        if self._is_scheduled and self._plays:
            self.evaluations.prepare()
        if self._settings.elo_games:
            from jrl.play.elo import Elo

            self.elo = Elo(self.evaluations.config, seed=self._cfg.run.seed)
        if self._videos:
            self._videos.prepare(self._session.run.spec)

    def start(self) -> None:
        """Adds the evaluation keys to result rows, and counts from the session's present step."""
        if self._is_scheduled and self._plays:
            self._session.reporter.extra.update(self._nan_metrics())
        if self._settings.every:
            most, done = self._session.steps_per_call, self._session.env_steps
            self._is_reached = reporter.every_steps(self._settings.every, most=most, env_steps=done)

    def _nan_metrics(self) -> dict[str, float]:
        """Returns the metrics of rows without an evaluation."""
        ratings = self.elo.names if self.elo else ()
        return {**self.evaluations.nan_metrics(), **{f"evaluation/{name}": math.nan for name in ratings}}

    def close(self) -> None:
        if self._evaluations is not None:
            self._evaluations.close()
        if self._videos:
            self._videos.close()

    # ------------------------------------------------------------ when

    def is_due(self, info: StepInfo) -> bool:
        """Returns whether an evaluation by `evaluation.every` is due after a call, for the row that ends here.

        A parallel evaluation starts now and ends with a later row, unless another evaluation is unfinished.
        """
        if not self._is_reached(info):
            return False
        if self._parallel and not self.is_busy:
            self._run_due()
            return False
        self._in_next_row = True
        return True

    def in_row(self, ahead: int) -> bool:
        """Returns whether `evaluation.interval` schedules an evaluation for the row `ahead` rows after the latest."""
        interval = self._settings.interval
        return interval is not None and (self._session.reporter.count + ahead) % interval == 0

    def begin_first(self) -> None:
        """Starts the parallel evaluation of the first row, if scheduled."""
        if self._parallel and self.in_row(1):
            self._begin()

    def before_row(self) -> None:
        """Finishes or plays the evaluation of the next row."""
        extra = self._session.reporter.extra
        if not self._settings.always_attach and extra.get("evaluation/weights_version") is not None:
            extra.update(self._nan_metrics())
        if self.is_busy:
            found = self._finish()
            if self.decides({f"evaluation/{name}": value for name, value in found.items()}):
                self.play()  # the evaluated weights are lost: repeat with the present weights
        # a parallel evaluation of the following row starts now
        if self._in_next_row or self.in_row(1 + self._parallel):
            self._in_next_row = False
            self._run_due()

    def _run_due(self) -> None:
        self._finish()
        if self._session.config.checkpoint.exact:  # a resumed run has new environments, too
            self.evaluations.restart(self._session.iteration)
        if self._parallel:
            self._begin()
        else:
            self.play()

    # ------------------------------------------------------------ one evaluation

    def _begin(self) -> None:
        count = self._session.iteration
        self.evaluations.begin(self._start_evaluation(), count=count, version=count)

    def play(self, duration: int | None = None) -> dict[str, Any]:
        """Plays an evaluation with the present weights; see `Session.evaluate`."""
        self._finish()
        actor, count = self._start_evaluation(), self._session.iteration
        if self._estimated and not self._plays:
            return self._report({})
        return self._report(self.evaluations.play(actor, count=count, version=count, duration=duration))

    def _finish(self) -> dict[str, Any]:
        metrics = self.evaluations.finish() if self._evaluations is not None else None
        return {} if metrics is None else self._report(metrics)

    def _start_evaluation(self) -> PyTree:
        """Calls callbacks, estimates and video of a new evaluation; returns its actor."""
        if self._callbacks:
            self._callbacks.call("on_evaluate_start", algorithm=self._callback_target)
        actor = self._session.actor()
        estimates = self._session.run.estimates
        if estimates and estimates.with_evaluations:
            self._estimated = estimates.estimate(actor, self._session.iteration)
        if self.elo:
            self._rated = self.elo.play(actor, count=self._session.iteration)
        if self._videos:
            self._videos.begin(actor, self._session.counted())
        return actor

    def _report(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Calls callbacks, and adds the metrics to the next row."""
        if self._callbacks:
            self._callbacks.recreated(
                self._callback_target, self.evaluations.workers, self.evaluations, is_evaluation=True
            )
            metrics.update(self._callbacks.drain_evaluation())
        estimated, self._estimated = self._estimated, {}
        rated, self._rated = self._rated, {}
        metrics.update(estimated | rated)
        if self._callbacks:
            self._callbacks.call("on_evaluate_end", algorithm=self._callback_target, evaluation_metrics=metrics)
        in_row = lambda name: name if name in estimated else f"evaluation/{name}"
        self._session.reporter.extra.update({in_row(name): value for name, value in metrics.items()})
        if (played := self.evaluations.latest) is not None:
            every = math.ceil(len(played.returns) / _MAX_EPISODES) or 1  # spread over the environments
            lists = {"returns": played.returns[::every].tolist(), "lengths": played.lengths[::every].tolist()}
            self._session.reporter.once.update({f"evaluation/{name}": values for name, values in lists.items()})
        return metrics
