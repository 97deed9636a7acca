"""Plots of learning curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jrl.errors import shown
from jrl.fields.paths import written
from jrl.host.machine import require
from jrl.metrics.loggers import read_rows

Curve = tuple[np.ndarray, np.ndarray]  # x and y of a run, f64 [N] each
Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # grid, middle, low and high, f64 [points] each

_FEW = 40  # curves of at most so many rows get point markers
LABELS = {
    "env_steps": "environment steps", "updates": "updates", "time_s": "seconds of training",
    "evaluation/return": "return of evaluations", "episode/return": "return of an episode",
    "episode/length": "length of an episode", "perf/steps_per_s": "steps per second",
}  # fmt: skip


def read_curve(path: str | Path, *, x: str = "env_steps", y: str = "episode/return") -> Curve:
    """Returns columns `x` and `y` of a result.jsonl, f64 [N] each, without rows that lack one of them.

    Of an evaluation metric, only the first row of each evaluation counts.
    """
    return extract_curve(read_rows(path), x=x, y=y)


def extract_curve(rows: Sequence[Mapping[str, Any]], *, x: str, y: str) -> Curve:
    """Returns columns `x` and `y` of rows, as `read_curve`."""
    found, values = _columns(select_evaluations(rows) if y.startswith("evaluation/") else rows, x, y)
    return found, values


def select_evaluations(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the first row of each evaluation; later rows repeat its numbers until the next."""
    found: list[Mapping[str, Any]] = []
    before: dict[str, Any] = {}
    for row in rows:
        metrics = {k: v for k, v in row.items() if k.startswith("evaluation/") and v is not None}
        now = {k: v for k, v in metrics.items() if not isinstance(v, list)}
        if now and now != before:
            found.append(row)
        before = now
    return found


def _columns(rows: Iterable[Mapping[str, Any]], *names: str) -> tuple[np.ndarray, ...]:
    kept = [[row.get(name) for name in names] for row in rows]
    numbers = [r for r in kept if all(isinstance(x, int | float) for x in r)]
    table = np.asarray(numbers, np.float64).reshape(-1, len(names))
    return tuple(table.T)


def interpolate(curves: Sequence[Curve], points: int = 200) -> Curve:
    """Interpolates N curves with different points to one grid: f64 [points] and [N, points].

    The grid covers the range that all curves have. Interpolation is linear: a step function would lag by up to one row,
    so that a run with fewer rows would look slower.
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
    """Plots one run: its rows, the band of their episodes, evaluations, and stop criteria.

    Args:
      result: result.jsonl or its run directory. Without rows the plot says so.
      png: output file.
      x, y: metrics of the rows. With `episode/return` as y, evaluations are drawn, too.
      stop: metric -> value, drawn as a dashed line.
      title: title of the plot.
    """
    path = Path(result) / "result.jsonl" if Path(result).is_dir() else result
    rows, figure = read_rows(path), make_figure((7, 4.5))
    axes = figure.add_subplot()
    axes.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(y, y), title=title)
    style(axes)
    steps, values = _columns(rows, x, y)
    drawn = {y: "C0"} if len(steps) else {}
    few = "." if len(steps) <= _FEW else ""
    if y == "episode/return":
        band_steps, low, high = _columns(rows, x, f"{y}_p10", f"{y}_p90")
        if len(band_steps):
            axes.fill_between(
                band_steps, low, high, color="C0", alpha=0.15, linewidth=0, label="10 to 90 % of these episodes"
            )
        window = max((row.get("episode/window") or 0 for row in rows), default=0)
        eval_steps, evaluated = _columns(select_evaluations(rows), x, "evaluation/return")
        if len(eval_steps):
            axes.plot(eval_steps, evaluated, "o", color="C1", markersize=4, label="evaluations", zorder=3)
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


_MOST_NAMED = 12  # maximum number of groups in a legend


def plot_groups(
    panels: Mapping[str, Mapping[str, tuple[Sequence[Curve], Band | None]]],
    png: str | Path,
    *,
    x: str,
    y: str,
    thresholds: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """Plots a panel per task with groups of runs: each run as a thin line, and the given band.

    Args:
      panels: title -> label -> curves of the runs, and (grid, middle, low, high) or None. If all labels are empty, one
        legend above the panels explains the lines.
      png: output file.
      x, y: metrics of the axes.
      thresholds: title -> value of y, drawn as a dashed line.
    """
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    figure = make_figure((max(7.0, 4.5 * columns), 4.5 if lines == 1 else 3.4 * lines))
    colors = {label: f"C{i}" for i, label in enumerate(dict.fromkeys(name for own in panels.values() for name in own))}
    for number, (title, groups) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        for label, (curves, around) in groups.items():
            _draw(axes, colors[label], label, curves, around)
        if title in thresholds:
            axes.axhline(thresholds[title], color="0.4", linestyle="--", linewidth=1)
        axes.set_title(shown(title), fontsize=10, parse_math=False)
        style(axes)
        if any(groups) and len(groups) <= _MOST_NAMED:
            legend = axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
            for text in legend.get_texts():
                text.set_parse_math(False)  # a $ in a user's name does not start a formula
                text.set_text(shown(text.get_text()))
    if colors and not any(colors):
        figure.legend(
            handles=_legend_entries(thresholds), loc="outside upper center", ncols=4, frameon=False, fontsize=10
        )
    figure.supxlabel(LABELS.get(x, x), fontsize=10, parse_math=False)
    figure.supylabel(LABELS.get(y, y), fontsize=10, parse_math=False)
    return save(figure, png)


def _legend_entries(thresholds: Mapping[str, float]) -> list[Any]:
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


def make_figure(size: tuple[float, float]):
    """Returns a figure of that width and height in inches. Raises InputError: matplotlib is not installed."""
    require("matplotlib", "plot", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # not pyplot: it keeps every figure alive and is not thread-safe
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Any) -> None:
    """Gives axes short numbers of steps and a grid."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
    axes.grid(alpha=0.3)


def save(figure, png: str | Path) -> Path:
    """Writes a figure as a PNG file, and makes its directory if missing; returns its path. Raises OSError."""
    png = Path(png)
    png.parent.mkdir(parents=True, exist_ok=True)
    with written(png) as part:
        figure.savefig(part, format="png", dpi=120)
    return png
