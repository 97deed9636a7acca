"""The files of a run directory beside its checkpoints, opened in one way for the command and for `jrl.api`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jrl import config
from jrl.metrics import loggers, report

if TYPE_CHECKING:
    from jrl.hooks import Sink
    from jrl.session import Session


@contextlib.contextmanager
def opened(session: "Session", directory: Path, rows_until: int | None, **logging: Any) -> Iterator["Sink"]:
    """config.yaml, params.json and env.json of a run, and the files of its result rows, which are closed at the end.

    Args:
      session: of the run.
      directory: made if missing.
      rows_until: env_steps of the last result row that counts, of a run that is continued; None: it begins.
      logging: further arguments of `jrl.metrics.loggers.open_loggers`.
    Yields:
      What takes a result row.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config.write(session.config, directory)
    report.write_env_json(directory, devices=[str(d) for d in jax.devices()])
    log = loggers.open_loggers(directory, session.config.run.log, rows_until, **logging)
    try:
        yield log.write
    finally:
        log.close()


def plot(session: "Session", directory: Path) -> None:
    """Draws the result rows of a run as learning_curve.png."""
    cfg = session.config
    title = f"{config.algo_name(cfg)} on {cfg.env.id}"
    report.plot_learning_curve(directory, directory / "learning_curve.png", stop=cfg.stop, title=title)
