"""Progress of a run: whether a result row meets a stop criterion, and the display of rows.

The display is a live bar in a terminal, plain lines in a file or a pipe.
"""

import collections
import datetime
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO, TypeGuard

_COUNTERS = ("env_steps", "time_s", "iteration", "updates")  # start at 0 and grow evenly
_ROWS = 10  # latest rows that measure the speed
_BAR = 10  # minimum width of the bar
_WINDOW_MEAN = re.compile(r"(episode|agent/.+|policy/[^/]+)/(?:return|length)")


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
    """Returns a display of result rows: nearest stop criterion, steps, return, evaluation, steps/s and time left.

    The row that meets a criterion is the last one displayed.

    Args:
      stop: stop criteria with env_steps, as in `reporter.end_by_criteria`; empty: the run is endless.
      stream: output stream; None: stdout. A terminal gets a bar, unless TERM=dumb says that its cursor cannot move.
      window: as in `reporter.end_by_criteria`.
      interval: minimum seconds between two plain lines; the last row is always printed.
      clock: function that returns seconds; for tests.
    """
    stream = sys.stdout if stream is None else stream
    progress = RunProgress(stop, window)
    has_bar = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return _open_bar(progress, stream) if has_bar else _open_lines(progress, stream, interval, clock)


# ---------------------------------------------------------------- progress towards the stop criteria


class RunProgress:
    """Progress of a run towards its stop criteria, from its result rows.

    A counter starts at 0; any other metric starts at its first value. Means over the latest episodes count from the row
    on whose `episode/window` is full.
    """

    def __init__(self, stop: Mapping[str, float], window: int = 0):
        self._stop, self._window = dict(stop), window
        self._first: dict[str, float] = {}
        self._marks: collections.deque[tuple[float, float]] = collections.deque(maxlen=_ROWS)  # seconds, steps
        self.row: Mapping[str, Any] = {}
        self.fraction = 0.0  # progress to the nearest criterion
        self.nearest = "env_steps"  # name of the nearest criterion
        self.over = False  # a criterion is met

    def add_row(self, row: Mapping[str, Any]) -> bool:
        """Adds the next row; returns whether to display it: False after a row that met a criterion."""
        if self.over:
            return False
        self.row = row
        if _is_finite(row.get("time_s")):
            self._marks.append((row["time_s"], row["env_steps"]))
        reached = {name: self._fraction_of(name, row) for name in self._stop}
        self.nearest = max(reached, key=reached.__getitem__, default="env_steps")
        self.fraction = reached.get(self.nearest, 0.0)
        self.over = self.fraction >= 1.0
        return True

    def _fraction_of(self, name: str, row: Mapping[str, Any]) -> float:
        """Returns the progress to a criterion, 1 when it is met."""
        value, target = row.get(name), self._stop[name]
        if not _is_finite(value) or not is_reliable(name, row, self._window):
            return 0.0
        if is_met(name, row, target, self._window):
            return 1.0
        start = 0.0 if name in _COUNTERS else self._first.setdefault(name, value)
        # below 1, even with rounding
        return min(max(0.0, (value - start) / (target - start)), 0.999) if math.isfinite(target) else 0.0

    def speed(self) -> float | None:
        """Returns environment steps per second of the latest rows.

        The first row, which includes compilation, only starts the measurement.
        """
        (then, before), (now, steps) = (self._marks[0], self._marks[-1]) if self._marks else ((0, 0), (0, 0))
        return (steps - before) / (now - then) if now > then and steps > before else None

    def time_left(self) -> float | None:
        """Returns seconds until a counter meets its criterion, if no other metric does before; None: unknown."""
        speed, found = self.speed(), []
        for name in ("env_steps", "time_s"):
            pace = 1.0 if name == "time_s" else speed
            if speed and pace and name in self._stop and _is_finite(self.row.get(name)):
                found.append(max(0.0, self._stop[name] - self.row[name]) / pace)
        return min(found, default=None)

    def describe(self, short: bool = False) -> list[str]:
        """Returns the texts about the latest row, the most important first."""
        row, target = self.row, self._stop.get(self.nearest, math.inf)
        number = _format_short if short else "{:,.0f}".format
        percent = math.floor(100 * self.fraction)
        steps = lambda n: f"{number(n)} step{'s' * (n != 1)}"
        goal = f"{self.nearest.removeprefix('episode/').replace('/', ' ')} {target:g}"
        goal = {"env_steps": steps(target), "time_s": f"{target:g} s"}.get(self.nearest, goal)
        texts = [f"{percent}% of {goal}"] if self._stop else []
        if not (short and self.nearest == "env_steps" and self._stop):
            texts.append(steps(row["env_steps"]))
        score, evaluation, speed = row.get("episode/return"), row.get("evaluation/return"), self.speed()
        texts.append(f"return {_format_score(score)}" if _is_finite(score) else "return -")
        if _is_finite(evaluation):
            texts.append(f"{'eval' if short else 'evaluation'} {_format_score(evaluation)}")
        left = self.time_left()
        if left is not None and not self.over:
            most = any(name not in _COUNTERS for name in self._stop)
            texts.append(f"{'<' if short else 'at most ' if most else ''}{_format_duration(left)} left")
        if speed is not None:
            texts.append(f"{number(round(speed))} steps/s")
        return texts


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _format_score(number: float) -> str:
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"  # two digits, because returns of 0 to 1 are common


def _format_short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            digits = f"{number / size:.3g}"
            return f"{float(digits):g}{unit}" if float(digits) < 1000 else f"{float(digits):.0f}{unit}"
    return f"{number:.0f}"


def _format_duration(seconds: float) -> str:
    # timedelta overflows for very slow steps
    return str(datetime.timedelta(seconds=round(seconds))) if seconds < 1e9 else "years"


# ---------------------------------------------------------------- displays


def _open_lines(progress: RunProgress, stream: TextIO, interval: float, clock: Callable[[], float]) -> Progress:
    last: float | None = None
    waiting = False

    def print_row() -> None:
        nonlocal last, waiting
        last, waiting = clock(), False
        print("  ".join(progress.describe()), file=stream, flush=True)

    def update(row: Mapping[str, Any]) -> None:
        nonlocal waiting
        if not progress.add_row(row):
            return
        waiting = True
        if last is None or clock() - last >= interval:
            print_row()

    def close() -> None:
        if waiting:
            print_row()

    return Progress(update, close)


def _open_bar(progress: RunProgress, stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def draw() -> Table:
        texts = progress.describe(short=True) if progress.row else ["compiling"]
        while len(texts) > 1 and _BAR + 2 + len("  ".join(texts)) > console.width:
            texts.pop()
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1, min_width=1)
        line.add_column(no_wrap=True)
        line.add_row(ProgressBar(total=1.0, completed=progress.fraction), "  ".join(texts))
        return line

    # only `update` redraws: no refresh thread beside the training loop
    console = Console(file=stream)
    live = Live(draw(), console=console, auto_refresh=False)
    live.start(refresh=True)

    def update(row: Mapping[str, Any]) -> None:
        if progress.add_row(row):
            live.update(draw(), refresh=True)

    return Progress(update, live.stop)


# ---------------------------------------------------------------- stop criteria


def is_reliable(name: str, row: Mapping[str, Any], window: int) -> bool:
    """Returns whether a row's metric can meet a criterion: a mean over fewer than `window` episodes is luck.

    Args:
      name: metric.
      row: result row; `episode/window`, `agent/NAME/window` and `policy/NAME/window` count the episodes of its means.
      window: required number of episodes.
    """
    return window_size(name, row) >= window


def window_size(name: str, row: Mapping[str, Any]) -> float:
    """Returns the number of episodes in the mean of a row's metric; inf: the metric is not such a mean."""
    found = _WINDOW_MEAN.fullmatch(name)
    if found is None:
        return math.inf
    of_games = row.get("episode/window", math.inf)  # rows of earlier versions have no other window
    return float(row.get(f"{found[1]}/window", of_games))


def is_met(name: str, row: Mapping[str, Any], target: float, window: int) -> bool:
    """Returns whether the row has the metric, reliable and at least `target`.

    A mean over 3 episodes is not yet reliable:

    >>> [is_met("episode/return", {"episode/return": 500, "episode/window": n}, 475, window=10) for n in (3, 10)]
    [False, True]
    """
    value = row.get(name)
    return value is not None and is_reliable(name, row, window) and value >= target
