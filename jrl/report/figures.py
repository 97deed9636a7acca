"""Pictures of a report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import InputError
from jrl.metrics import report
from jrl.report import content, runs
from jrl.report.content import Options

_MOST = 8  # configs of a population that are drawn


def curves(said: Mapping[str, Any], png: Path) -> Path:
    """Draws the learning curves of every task, of many methods the best, with the intervals of interquartile means.

    Args:
      said: of `content.content`.
      png: is written.
    """
    panels: dict[str, dict[str, Any]] = {}
    for task in said["tasks"]:
        own = {found["method"]: found for found in said["curves"] if found["task"] == task}
        best = [name for name in said["ranking"][task] if name in own][:_MOST]
        panels[_title(task, len(own))] = {
            name: ([(np.array(run["x"]), np.array(run["y"])) for run in own[name]["runs"]], _around(own[name]["band"]))
            for name in best
        }
    if said["curves_over_tasks"]:
        panels["all tasks, normalised"] = {
            found["method"]: ([], _around(found["band"])) for found in said["curves_over_tasks"] if found["band"]
        }
    return report.plot_groups(panels, png, x=said["axis"], y=said["objective"])


def learning_curve(paths: Sequence[str | Path], png: str | Path, *, x: str = "env_steps", y: str | None = None) -> Path:
    """Draws runs, and the interquartile mean of each config's seeds with its 95 % interval; of many configs the best.

    Args:
      paths: as of `runs.read`: run directories, or directories that hold runs.
      png: is written.
      x, y: metrics of the rows; y None: the return of evaluations, or where there are none that of episodes.
    Raises:
      InputError: there are no runs, or no row has both metrics.
    """
    found = runs.read(paths).runs
    options = Options(y or content.OBJECTIVE, x)
    options = content.with_objective(found, options)[0] if y is None else options
    panels: dict[str, dict[str, Any]] = {}
    for run in found:
        line = run.curve(x, options.objective)
        if len(line[0]):
            panels.setdefault(run.task, {}).setdefault(run.method, []).append(line)
    if not panels:
        raise InputError(
            f"no result row has both {x} and {options.objective}: there are {', '.join(runs.numbers(found))}"
        )
    drawn = {}
    for task, groups in panels.items():
        order = content.ranked_methods([run for run in found if run.task == task], options)
        best = [place.method for place in order if place.method in groups][:_MOST]
        drawn[_title(task, len(groups))] = {
            name: (groups[name], _around(content.band([groups[name]], options))) for name in best
        }
    return report.plot_groups(drawn, png, x=x, y=options.objective)


class Panel(NamedTuple):
    """One panel of `panels`."""

    paths: Sequence[str | Path]  # run directories, the seeds of one config
    metric: str = content.TRAINING  # of the result rows
    threshold: float | None = None  # a dashed line


def _title(task: str, methods: int) -> str:
    return f"{task}: the best {_MOST} of {methods}" if methods > _MOST else task


def panels(named: Mapping[str, Panel], png: str | Path) -> Path:
    """Draws groups of runs whose values do not compare: a panel for each, with the interval of its interquartile mean.

    Args:
      named: title -> its Panel.
      png: is written.
    Raises:
      InputError: a path holds no run.
    """
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
