"""How far a run is: a live bar in a terminal, plain lines in a file or a pipe."""

import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO, TypeGuard


class Progress(NamedTuple):
    update: Callable[[Mapping[str, Any]], None]  # takes a result row
    close: Callable[[], None]


def open_progress(
    total: int,
    stream: TextIO | None = None,
    *,
    interval: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """A display of result rows: steps, steps/s, return and time left.

    Args:
      total: env_steps at which the run ends.
      stream: where to; None for stdout. A bar if it is a terminal.
      interval: seconds at least between two plain lines; the last row is always told.
      clock: seconds; for tests.
    """
    stream = sys.stdout if stream is None else stream
    return _bar(total, stream) if stream.isatty() else _lines(total, stream, interval, clock)


def describe(row: Mapping[str, Any], total: int) -> str:
    """One row in words: `12,800 / 100,000 steps (12%)  5,120 steps/s  return 21.5  0:00:17 left`."""
    steps = int(row["env_steps"])
    speed, score = row.get("perf/steps_per_s"), row.get("episode/return")
    parts = [f"{steps:,} / {total:,} steps ({100 * steps // total}%)"]
    if _known(speed):
        parts.append(f"{speed:,.0f} steps/s")
    parts.append(f"return {score:.1f}" if _known(score) else "return -")
    if _known(speed) and speed > 0:
        left = max(0, total - steps) / speed
        # A first row that holds the compilation can promise centuries, more than timedelta's days.
        parts.append(f"{datetime.timedelta(seconds=round(left))} left" if left < 1e9 else "years left")
    return "  ".join(parts)


def _known(value: Any) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _lines(total: int, stream: TextIO, interval: float, clock: Callable[[], float]) -> Progress:
    last: float | None = None
    waiting: Mapping[str, Any] | None = None

    def tell(row: Mapping[str, Any]) -> None:
        nonlocal last, waiting
        last, waiting = clock(), None
        print(describe(row, total), file=stream, flush=True)

    def update(row: Mapping[str, Any]) -> None:
        nonlocal waiting
        if last is None or clock() - last >= interval:
            tell(row)
        else:
            waiting = row

    def close() -> None:
        if waiting is not None:
            tell(waiting)

    return Progress(update, close)


def _bar(total: int, stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    # Redrawn by `update` alone: no thread of its own beside the training loop.
    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    bar = Bar(*columns, console=Console(file=stream), auto_refresh=False)
    task = bar.add_task("compiling", total=total)
    bar.start()

    def update(row: Mapping[str, Any]) -> None:
        bar.update(task, completed=int(row["env_steps"]), description=describe(row, total), refresh=True)

    return Progress(update, bar.stop)
