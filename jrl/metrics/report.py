"""Files that a run leaves beside its numbers: `env.json` (what it ran on, by which command) and learning curves."""

import functools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jrl.errors import shown
from jrl.fields.paths import written
from jrl.host import room
from jrl.host.installed import require, version
from jrl.metrics.loggers import read_rows

PACKAGES = ("jrl", "jax", "jaxlib", "flax", "optax", "numpy", "envpool", "gymnasium", "orbax-checkpoint")


# ---------------------------------------------------------------- env.json


def write_env_json(directory: str | Path, *, devices: Iterable[str] = ()) -> Path:
    """Writes versions, git state, machine and the command that runs to `directory`/env.json.

    Args:
      devices: the accelerators in words; passed in, so that this file needs no jax.
    """
    path = Path(directory) / "env.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git": _own_git_state(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": room.usable_cpus()},
        "memory_gib": _memory_gib(),
        "devices": list(devices),
        "command": shlex.join(sys.orig_argv),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def git_state(file: str | Path) -> dict[str, Any] | None:
    """Returns {"commit", "dirty"} of the repository that tracks `file`; None if none does."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(file).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed jrl may lie in a virtual environment inside somebody else's repository.
        git("ls-files", "--error-unmatch", Path(file).name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache  # members of a population have it in common
def _own_git_state() -> dict[str, Any] | None:
    return git_state(Path(__file__))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


# ---------------------------------------------------------------- learning curves


Curve = tuple[np.ndarray, np.ndarray]  # x and y of a run, f64 [N] each
Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # grid, middle, low and high, f64 [points] each

_FEW = 40  # rows that are drawn as points, too
LABELS = {
    "env_steps": "environment steps", "updates": "updates", "time_s": "seconds of training",
    "evaluation/return": "return of evaluations", "episode/return": "return of an episode",
    "episode/length": "length of an episode", "perf/steps_per_s": "steps per second",
}  # fmt: skip


def read_curve(path: str | Path, *, x: str = "env_steps", y: str = "episode/return") -> Curve:
    """Returns columns `x` and `y` of a result.jsonl, f64 [N] each, without the rows where one of them is missing or
    null; of an evaluation's metric the row that first has it.
    """
    return curve(read_rows(path), x=x, y=y)


def curve(rows: Sequence[Mapping[str, Any]], *, x: str, y: str) -> Curve:
    """Returns columns `x` and `y` of rows, as `read_curve`."""
    found, values = _columns(evaluations(rows) if y.startswith("evaluation/") else rows, x, y)
    return found, values


def evaluations(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows that are the first to tell of an evaluation; those after it repeat its numbers until the
    next.
    """
    found: list[Mapping[str, Any]] = []
    before: dict[str, Any] = {}
    for row in rows:
        told = {k: v for k, v in row.items() if k.startswith("evaluation/") and v is not None}
        now = {k: v for k, v in told.items() if not isinstance(v, list)}
        if now and now != before:
            found.append(row)
        before = now
    return found


def _columns(rows: Iterable[Mapping[str, Any]], *names: str) -> tuple[np.ndarray, ...]:
    """Returns f64 [N] each, of the result rows that have all of them as numbers."""
    kept = [[row.get(name) for name in names] for row in rows]
    numbers = [r for r in kept if all(isinstance(x, int | float) for x in r)]
    table = np.asarray(numbers, np.float64).reshape(-1, len(names))
    return tuple(table.T)


def _result(path: str | Path) -> Path:
    return Path(path) / "result.jsonl" if Path(path).is_dir() else Path(path)


def on_one_grid(curves: Sequence[Curve], points: int = 200) -> Curve:
    """Curves of N runs that were reported at different points, over one grid: f64 [points] and [N, points].

    The grid covers the steps that all curves have; between its rows a curve is linear. As a step function it would lag
    by up to the distance of two rows, and the curve of whom reports more seldom would look slower.
    """
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(low, max(low, high), points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def plot_learning_curve(
    result: str | Path,
    png: str | Path,
    *,
    x: str = "env_steps",
    y: str = "episode/return",
    stop: Mapping[str, float] = MappingProxyType({}),
    title: str = "",
) -> Path:
    """Draws one run: its rows as they are, the band of the episodes behind them, evaluations, what ends the run.

    Args:
      result: a result.jsonl, or the run directory that holds it. Without rows the plot is empty and says so.
      png: is written.
      x, y: metrics of the rows. Where y is `episode/return`, evaluations are drawn beside it.
      stop: metric -> value; of what is drawn, the values are dashed lines.
      title: above it.
    """
    rows, (figure, axes) = read_rows(_result(result)), _axes(x, y, title)
    steps, values = _columns(rows, x, y)
    drawn = {y: "C0"} if len(steps) else {}
    few = "." if len(steps) <= _FEW else ""
    if y == "episode/return":
        at, low, high = _columns(rows, x, f"{y}_p10", f"{y}_p90")
        if len(at):
            axes.fill_between(at, low, high, color="C0", alpha=0.15, linewidth=0, label="10 to 90 % of these episodes")
        window = max((row.get("episode/window") or 0 for row in rows), default=0)
        at, evaluated = _columns(evaluations(rows), x, "evaluation/return")
        if len(at):
            axes.plot(at, evaluated, "o", color="C1", markersize=4, label="evaluations", zorder=3)
            drawn["evaluation/return"] = "C1"
    if y in drawn:
        label = f"mean of the last {window} episodes" if y == "episode/return" and window else y
        axes.plot(steps, values, color="C0", marker=few, label=label)
    for name in drawn:
        if name in stop:
            axes.axhline(stop[name], color=drawn[name], linestyle="--", linewidth=1, label=f"{name} {stop[name]:g}")
    if drawn:
        axes.legend(framealpha=0.85, edgecolor="none", fontsize=9)
    else:
        axes.text(0.5, 0.5, f"no {y} in {Path(result).name}", ha="center", transform=axes.transAxes)
    return save(figure, png)


def _draw(axes: Any, color: str, label: str, curves: Sequence[Curve], around: Band | None) -> None:
    """Draws a group of runs: a thin line each, and their middle and band where there is one."""
    single = len(curves) == 1
    for steps, values in curves:
        marker = "." if len(steps) <= _FEW else ""
        axes.plot(
            steps, values, color=color, marker=marker, linewidth=1.5 if single else 0.7, alpha=1 if single else 0.5
        )
    if around is not None:
        grid, middle, low, high = around
        axes.fill_between(grid, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(grid, middle, color=color)
    count = "" if single or not curves else f" ({len(curves)} runs)"
    axes.plot([], [], color=color, label=label + (count if curves or around else " (no rows)"))


_MOST_NAMED = 12  # groups that a legend names


def plot_groups(
    panels: Mapping[str, Mapping[str, tuple[Sequence[Curve], Band | None]]],
    png: str | Path,
    *,
    x: str,
    y: str,
    thresholds: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """Draws a panel for each task, in it groups of runs: each run as a thin line, and the band that is given.

    Args:
      panels: title -> label -> the curves of its runs, and (grid, middle, low, high), which may be missing. Where all
        labels are empty, one legend above the panels says what the lines are.
      png: is written.
      x, y: what the axes are.
      thresholds: title -> value of y that is a dashed line.
    """
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    figure = figure_of((max(7.0, 4.5 * columns), 4.5 if lines == 1 else 3.4 * lines))
    from matplotlib.ticker import EngFormatter

    colors = {label: f"C{i}" for i, label in enumerate(dict.fromkeys(name for own in panels.values() for name in own))}
    for number, (title, groups) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        for label, (curves, around) in groups.items():
            _draw(axes, colors[label], label, curves, around)
        if title in thresholds:
            axes.axhline(thresholds[title], color="0.4", linestyle="--", linewidth=1)
        axes.set_title(shown(title), fontsize=10, parse_math=False)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        if any(groups) and len(groups) <= _MOST_NAMED:
            legend = axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
            for text in legend.get_texts():
                text.set_parse_math(False)  # names are anybody's: a $ is not the start of a formula
                text.set_text(shown(text.get_text()))
    if colors and not any(colors):
        figure.legend(handles=_meanings(thresholds), loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    figure.supxlabel(LABELS.get(x, x), fontsize=10, parse_math=False)
    figure.supylabel(LABELS.get(y, y), fontsize=10, parse_math=False)
    return save(figure, png)


def _meanings(thresholds: Mapping[str, float]) -> list[Any]:
    """Returns the entries of a legend that says what is drawn of one group of runs."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [
        Line2D([], [], color="C0", linewidth=0.7, alpha=0.5, label="one seed"),
        Line2D([], [], color="C0", label="interquartile mean of the seeds"),
        Patch(color="C0", alpha=0.15, linewidth=0, label="its 95 % interval"),
    ]
    if thresholds:
        entries.append(Line2D([], [], color="0.4", linestyle="--", linewidth=1, label="threshold"))
    return entries


def figure_of(size: tuple[float, float]):
    """Makes a figure of that width and height, in inches. Raises InputError: matplotlib is not installed."""
    require("matplotlib", "plot", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps every figure alive and is not safe in threads.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _axes(x: str, y: str, title: str):
    figure = figure_of((7, 4.5))
    from matplotlib.ticker import EngFormatter

    axes = figure.add_subplot()
    axes.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(y, y), title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure, png: str | Path) -> Path:
    """Writes a figure as a PNG file, whose directory is made if missing, and returns its path. Raises OSError."""
    png = Path(png)
    png.parent.mkdir(parents=True, exist_ok=True)
    with written(png) as part:
        figure.savefig(part, format="png", dpi=120)
    return png
