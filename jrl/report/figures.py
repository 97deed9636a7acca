"""Pictures of a report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import InputError
from jrl.metrics import report
from jrl.report import content, runs
from jrl.report.content import Options

_MOST = 8  # methods of a task that are drawn


def curves(said: Mapping[str, Any], png: Path) -> Path:
    """Draws the curves of `content.content`, of many methods the best, with their intervals, a panel for each task."""
    panels: dict[str, dict[str, Any]] = {}
    for task in said["tasks"]:
        own = {c["method"]: c for c in said["curves"] if c["task"] == task}
        lines = {name: [(np.array(run["x"]), np.array(run["y"])) for run in c["runs"]] for name, c in own.items()}
        panels |= _panel(task, said["ranking"][task], {name: (lines[name], c["band"]) for name, c in own.items()})
    if over := [c for c in said["curves_over_tasks"] if c["band"]]:
        panels["all tasks, normalised"] = {c["method"]: ([], _around(c["band"])) for c in over}
    return report.plot_groups(panels, png, x=said["axis"], y=said["objective"])


def learning_curve(
    paths: Sequence[str | Path], png: str | Path, *, x: str = "env_steps", y: str | None = None,
    stop: float | None = None,
) -> Path:  # fmt: skip
    """Draws runs, and the interquartile mean of each config's seeds with its 95 % interval; of many configs the best.

    Args:
      paths: as of `runs.read`: run directories, or directories that hold runs.
      png: is written.
      x, y: metrics of the rows; y None: the return of evaluations, or where there are none that of episodes.
      stop: value of y that is a dashed line.
    Raises:
      InputError: there are no runs, or no row has both metrics.
    """
    found = runs.read(paths).runs
    options = Options(y or content.OBJECTIVE, x)
    options = content.with_objective(found, options)[0] if y is None else options
    groups: dict[str, dict[str, list[report.Curve]]] = {}
    for run in found:
        line = run.curve(x, options.objective)
        if len(line[0]):
            groups.setdefault(run.task, {}).setdefault(run.method, []).append(line)
    if not groups:
        raise InputError(
            f"no result row has both {x} and {options.objective}: there are {', '.join(runs.numbers(found))}"
        )
    drawn: dict[str, dict[str, Any]] = {}
    for task, own in groups.items():
        order = [place.method for place in content.ranked_methods([r for r in found if r.task == task], options)]
        drawn |= _panel(task, order, {name: (own[name], content.band([own[name]], options)) for name in own})
    thresholds = {} if stop is None else dict.fromkeys(drawn, stop)
    return report.plot_groups(drawn, png, x=x, y=options.objective, thresholds=thresholds)


def _panel(task: str, order: Sequence[str], own: Mapping[str, tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
    """Returns title -> method -> its curves and band, of the best methods."""
    best = [name for name in order if name in own][:_MOST]
    title = f"{task}: the best {_MOST} of {len(own)}" if len(own) > _MOST else task
    return {title: {name: (own[name][0], _around(own[name][1])) for name in best}}


class Panel(NamedTuple):
    """One panel of `panels`."""

    paths: Sequence[str | Path]  # run directories, the seeds of one config
    metric: str = content.TRAINING  # of the result rows
    threshold: float | None = None  # a dashed line


def panels(named: Mapping[str, Panel], png: str | Path) -> Path:
    """Draws groups of runs whose values do not compare: title -> panel. Raises InputError: a path holds no run."""
    drawn = dict[str, dict[str, Any]]()
    for title, panel in named.items():
        options = Options(panel.metric)
        lines = [run.curve(options.axis, panel.metric) for run in runs.read(panel.paths).runs]
        lines = [line for line in lines if len(line[0])]
        drawn[title] = {"": (lines, _around(content.band([lines], options)) if lines else None)}
    thresholds = {title: panel.threshold for title, panel in named.items() if panel.threshold is not None}
    return report.plot_groups(drawn, png, x=Options().axis, y="return", thresholds=thresholds)


def _around(band: Mapping[str, Any] | None) -> report.Band | None:
    """Returns grid, middle, low and high; what is None becomes NaN, which is not drawn."""
    if band is None:
        return None
    x, value, low, high = (np.array(band[name], np.float64) for name in ("x", "value", "low", "high"))
    return x, value, low, high
