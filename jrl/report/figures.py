"""Figures of a report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.errors import InputError
from jrl.metrics import plots
from jrl.report import content, runs
from jrl.report.content import ReportOptions

_MOST = 8  # maximum number of methods in a panel


def plot_curves(said: Mapping[str, Any], png: Path) -> Path:
    """Plots the curves of `content.content` with their intervals, a panel per task; of many methods, the best."""
    panels: dict[str, dict[str, Any]] = {}
    for task in said["tasks"]:
        own = {c["method"]: c for c in said["curves"] if c["task"] == task}
        lines = {name: [(np.array(run["x"]), np.array(run["y"])) for run in c["runs"]] for name, c in own.items()}
        panels |= _panel(task, said["ranking"][task], {name: (lines[name], c["band"]) for name, c in own.items()})
    if over := [c for c in said["curves_over_tasks"] if c["band"]]:
        panels["all tasks, normalised"] = {c["method"]: ([], to_band(c["band"])) for c in over}
    return plots.plot_groups(panels, png, x=said["axis"], y=said["objective"])


def plot_runs(
    paths: Sequence[str | Path], png: str | Path, *, x: str = "env_steps", y: str | None = None,
    stop: float | None = None,
) -> Path:  # fmt: skip
    """Plots runs, and the interquartile mean of each config's seeds with its 95 % interval; of many configs, the best.

    Args:
      paths: run directories, or directories that hold runs, as in `runs.read`.
      png: output file.
      x, y: metrics of the rows; y None: evaluation return, or episode return without evaluations.
      stop: value of y, drawn as a dashed line.
    Raises:
      InputError: no runs, or no row has both metrics.
    """
    found = runs.read(paths).runs
    options = ReportOptions(y or content.OBJECTIVE, x)
    options = content.select_objective(found, options)[0] if y is None else options
    groups: dict[str, dict[str, list[plots.Curve]]] = {}
    for run in found:
        line = run.curve(x, options.objective)
        if len(line[0]):
            groups.setdefault(run.task, {}).setdefault(run.method, []).append(line)
    if not groups:
        raise InputError(f"no result row has both {x} and {options.objective}: use {', '.join(runs.numbers(found))}")
    drawn: dict[str, dict[str, Any]] = {}
    for task, own in groups.items():
        order = [place.method for place in content.rank_methods([r for r in found if r.task == task], options)]
        drawn |= _panel(
            task, order, {name: (own[name], content.interquartile_band([own[name]], options)) for name in own}
        )
    thresholds = {} if stop is None else dict.fromkeys(drawn, stop)
    return plots.plot_groups(drawn, png, x=x, y=options.objective, thresholds=thresholds)


def _panel(task: str, order: Sequence[str], own: Mapping[str, tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
    best = [name for name in order if name in own][:_MOST]
    title = f"{task}: the best {_MOST} of {len(own)}" if len(own) > _MOST else task
    return {title: {name: (own[name][0], to_band(own[name][1])) for name in best}}


def to_band(band: Mapping[str, Any] | None) -> plots.Band | None:
    """Returns grid, middle, low and high; None becomes NaN, which is not drawn."""
    if band is None:
        return None
    x, value, low, high = (np.array(band[name], np.float64) for name in ("x", "value", "low", "high"))
    return x, value, low, high
