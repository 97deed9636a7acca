"""python -m jrl.plot RUN ...: draw learning curves of run directories; the seeds of a config are one curve."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jrl.errors import InputError
from jrl.fields.paths import resolve_as_typed
from jrl.host import command
from jrl.metrics import plots
from jrl.report import figures
from jrl.report.runs import MEMBERS, read


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; nothing heavy is imported for it."""
    p = command.parser("plot", "Draw the learning curves of runs. The seeds of a config are one curve.")
    p.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    p.add_argument("--out", help="PNG file (default: learning_curve.png, for a single run in its directory)")
    p.add_argument(
        "--y",
        metavar="METRIC",
        help="key of the result rows (default episode/return; evaluation/return for a population with evaluations)",
    )
    p.add_argument("--x", default="env_steps", metavar="METRIC", help="axis, such as time_s (default env_steps)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the picture and prints its path; returns the exit status 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        print(plot(args.runs, args.out, x=args.x, y=args.y))
    except InputError as e:
        return command.report_input_error(e)
    return 0


class Picture(type(Path())):  # type: ignore[misc]  # before Python 3.12 only the platform's own class can be a base
    """Path of a picture; a notebook shows the picture."""

    def _repr_png_(self) -> bytes:
        return self.read_bytes()


def plot(
    runs: str | Path | Iterable[str | Path],
    png: str | Path | None = None,
    *,
    x: str = "env_steps",
    y: str | None = None,
) -> Picture:
    """Draws the learning curves of run directories.

    A single run has its curve with a percentile band and its evaluations. Several runs and populations have the
    interquartile mean over the seeds of each config, with its interval.

    Args:
      runs: run directory or directories; runs whose configs differ only in the seed are one curve.
      png: file to write; None: learning_curve.png, for a single run or population in its directory.
      x, y: metrics of the result rows; y None: `episode/return`, for a population `evaluation/return` if rows have it.
    Returns:
      The path of the picture, which a notebook shows.
    Raises:
      InputError: a directory holds no run, or no row has both metrics.
    """
    given = [runs] if isinstance(runs, str | Path) else runs
    directories = [resolve_as_typed(run, "plot", "any") for run in given]
    if png is not None or len(directories) > 1:
        png = resolve_as_typed(png or "learning_curve.png", "--out", "new file")
    else:
        png = directories[0] / "learning_curve.png"
    try:
        return Picture(_draw(directories, png, x=x, y=y))
    except OSError as e:
        raise InputError(f"plot: {e.filename or png}: {e.strerror or e}: choose another --out, or other runs") from e


def _draw(directories: Sequence[Path], png: Path, *, x: str, y: str | None) -> Path:
    if len(directories) == 1 and (directories[0] / MEMBERS).is_dir():
        return figures.plot_runs(directories, png, x=x, y=y)
    y = y or "episode/return"
    found = read(directories).runs
    stops = {run.config.get(f"stop.{y}") for run in found}
    if len(found) > 1 or not len(found[0].curve(x, y)[0]):
        return figures.plot_runs(directories, png, x=x, y=y, stop=stops.pop() if len(stops) == 1 else None)
    (run,) = found
    stop = {key.removeprefix("stop."): value for key, value in run.config.items() if key.startswith("stop.")}
    title = f"{run.config.get('algo.name')} on {run.task}"
    assert run.path is not None
    return plots.plot_learning_curve(run.path, png, x=x, y=y, stop=stop, title=title)


__all__ = ["Picture", "main", "plot"]

if __name__ == "__main__":
    sys.exit(command.run(main))
