"""Progress of a run: a live bar in a terminal, plain lines in a file or a pipe."""

import collections
import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO, TypeGuard

from jrl.metrics import criteria

_COUNTERS = ("env_steps", "time_s", "iteration", "updates")  # that begin at 0 and grow evenly
_ROWS = 10  # the latest so many tell the speed
_BAR = 10  # columns of the bar, at least


class Progress(NamedTuple):
    update: Callable[[Mapping[str, Any]], None]  # takes a result row
    close: Callable[[], None]


def open_progress(
    stop: Mapping[str, float],
    stream: TextIO | None = None,
    *,
    window: int = 0,
    interval: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Returns a display of result rows: the nearest end of the run, steps, return, evaluation, steps/s and time left.

    The row that meets a criterion is the last that is shown.

    Args:
      stop: the run's criteria, as `reporter.stop_at` reads them, with env_steps; none: it goes on for ever.
      stream: where to; None for stdout. A bar if it is a terminal.
      window: as of `reporter.stop_at`.
      interval: seconds at least between two plain lines; the last row is always told.
      clock: seconds; for tests.
    """
    stream = sys.stdout if stream is None else stream
    course = Course(stop, window)
    return _bar(course, stream) if stream.isatty() else _lines(course, stream, interval, clock)


# ---------------------------------------------------------------- where the run is


class Course:
    """Follows the rows of a run towards its criteria.

    A counter goes from 0 to its criterion; any other metric from its first value, which counts once `episode/window` is
    full for those of the latest episodes.
    """

    def __init__(self, stop: Mapping[str, float], window: int = 0):
        self._stop, self._window = dict(stop), window
        self._first: dict[str, float] = {}
        self._marks: collections.deque[tuple[float, float]] = collections.deque(maxlen=_ROWS)  # seconds, steps
        self.row: Mapping[str, Any] = {}
        self.fraction = 0.0  # of the way to the nearest criterion
        self.nearest = "env_steps"  # its name
        self.over = False  # a criterion is met

    def see(self, row: Mapping[str, Any]) -> bool:
        """Takes the next row; whether it is to be shown: not after one that ended the run."""
        if self.over:
            return False
        self.row = row
        if _known(row.get("time_s")):
            self._marks.append((row["time_s"], row["env_steps"]))
        reached = {name: self._reached(name, row) for name in self._stop}
        self.nearest = max(reached, key=reached.__getitem__, default="env_steps")
        self.fraction = reached.get(self.nearest, 0.0)
        self.over = self.fraction >= 1.0
        return True

    def _reached(self, name: str, row: Mapping[str, Any]) -> float:
        """Returns the share of the way to a criterion, 1 where it is met."""
        value, target = row.get(name), self._stop[name]
        if not _known(value) or not criteria.counts(name, row, self._window):
            return 0.0
        if criteria.met(name, row, target, self._window):
            return 1.0
        start = 0.0 if name in _COUNTERS else self._first.setdefault(name, value)
        # never the whole way where rounding alone would say so
        return min(max(0.0, (value - start) / (target - start)), 0.999) if math.isfinite(target) else 0.0

    def speed(self) -> float | None:
        """Returns environment steps per second of the latest rows. The first row, which holds the compilation, only
        begins.
        """
        (then, before), (now, steps) = (self._marks[0], self._marks[-1]) if self._marks else ((0, 0), (0, 0))
        return (steps - before) / (now - then) if now > then and steps > before else None

    def left(self) -> float | None:
        """Seconds until a counter meets its criterion, if no other metric does before; None: not known yet."""
        speed, found = self.speed(), []
        for name in ("env_steps", "time_s"):
            pace = 1.0 if name == "time_s" else speed
            if speed and pace and name in self._stop and _known(self.row.get(name)):
                found.append(max(0.0, self._stop[name] - self.row[name]) / pace)
        return min(found, default=None)

    def parts(self, short: bool = False) -> list[str]:
        """Lists what there is to say of the latest row, the most important first."""
        row, target = self.row, self._stop.get(self.nearest, math.inf)
        number = _short if short else _long
        percent = math.floor(100 * self.fraction)
        steps = lambda n: f"{number(n)} step{'s' * (n != 1)}"
        said = [f"{percent}% of {steps(target)}" if self.nearest == "env_steps" else
                f"{percent}% of {_name(self.nearest)} {target:g}"] if self._stop else []  # fmt: skip
        if not (short and self.nearest == "env_steps" and self._stop):
            said.append(steps(row["env_steps"]))
        score, evaluation, speed = row.get("episode/return"), row.get("evaluation/return"), self.speed()
        said.append(f"return {_score(score)}" if _known(score) else "return -")
        if _known(evaluation):
            said.append(f"{'eval' if short else 'evaluation'} {_score(evaluation)}")
        left = self.left()
        if left is not None and not self.over:
            most = any(name not in _COUNTERS for name in self._stop)
            said.append(f"{'<' if short else 'less than ' if most else ''}{_duration(left)} left")
        if speed is not None:
            said.append(f"{number(round(speed))} steps/s")
        return said


def _known(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _name(metric: str) -> str:
    """Returns a metric as people call it: `return`, `evaluation return`, `seconds`."""
    return {"time_s": "seconds"}.get(metric, metric.removeprefix("episode/").replace("/", " "))


def _long(number: float) -> str:
    return f"{number:,.0f}"


def _score(number: float) -> str:
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"  # returns of 0 to 1 are common


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            digits = f"{number / size:.3g}"
            return f"{float(digits):g}{unit}" if float(digits) < 1000 else f"{float(digits):.0f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    # more than timedelta's days where a step takes for ever
    return str(datetime.timedelta(seconds=round(seconds))) if seconds < 1e9 else "years"


# ---------------------------------------------------------------- how it is shown


def _lines(course: Course, stream: TextIO, interval: float, clock: Callable[[], float]) -> Progress:
    last: float | None = None
    waiting = False

    def tell() -> None:
        nonlocal last, waiting
        last, waiting = clock(), False
        print("  ".join(course.parts()), file=stream, flush=True)

    def update(row: Mapping[str, Any]) -> None:
        nonlocal waiting
        if not course.see(row):
            return
        waiting = True
        if last is None or clock() - last >= interval:
            tell()

    def close() -> None:
        if waiting:
            tell()

    return Progress(update, close)


def _bar(course: Course, stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def drawn() -> Table:
        said = course.parts(short=True) if course.row else ["compiling"]
        while len(said) > 1 and _BAR + 2 + len("  ".join(said)) > console.width:
            said.pop()
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1, min_width=1)
        line.add_column(no_wrap=True)
        line.add_row(ProgressBar(total=1.0, completed=course.fraction), "  ".join(said))
        return line

    # redrawn by `update` alone: no thread of its own beside the training loop
    console = Console(file=stream)
    live = Live(drawn(), console=console, auto_refresh=False)
    live.start(refresh=True)

    def update(row: Mapping[str, Any]) -> None:
        if course.see(row):
            live.update(drawn(), refresh=True)

    return Progress(update, live.stop)
