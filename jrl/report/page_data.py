"""Data of the page: a report's own parts, every run over each axis, and the files beside the rows."""

import json
import math
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.fields import schema
from jrl.metrics import report
from jrl.metrics.timers import RECOMPILES
from jrl.report import content
from jrl.report.content import Groups, Options
from jrl.report.runs import AXES, Found, Run

POINTS = (400, 200, 100, 50, 25, 12, 0)  # of a run's curve; the page takes the most that fit into it
VIDEOS = ("*.mp4", "*.gif")
_MOST_VIDEOS = 20  # of a run, the latest
_BINS = 24
_DIGITS = 5
_INSIDE = (
    "episode/return", "episode/length", "loss/policy", "loss/value", "policy/entropy", "policy/approx_kl",
    "value/explained_variance", "train/lr", "perf/steps_per_s",
)  # fmt: skip
_INSIDE_POINTS = 40

Link = Callable[[Path], str | None]  # what a file or a directory is called in the page


def data(found: Found, said: Mapping[str, Any], options: Options, link: Link) -> dict[str, Any]:
    """Says what a page shows; `thinned` makes it as small as it has to be.

    Beside the keys of `content.content` there are:

        axes      those that rows have
        curves    of each task and method: of every run each axis and y, [N]; of each axis the band
        over_tasks  axis -> method and band, of normalised scores
        inside    of each task, method and run: metric -> y [N] over env_steps
        keys      algorithm -> the hyper-parameters that differ, the most important first
        runs      with `link` to the directory, `values` of hyper-parameters, `seconds` by stage, `videos`
        histograms  of each column of the rows that holds lists: the counts between edges, of each method

    Args:
      found: what was read.
      said: `content.content` of it.
      options: as it was asked for.
      link: of a run's directory and of its videos; None for what cannot be opened.
    """
    options = options._replace(objective=said["objective"])
    by_name = {run.name: run for run in found.runs}
    groups = {(c["task"], c["method"]): [by_name[line["name"]] for line in c["runs"]] for c in said["curves"]}
    keys: dict[str, list[str]] = {}
    for row in said["hyper_parameters"]:
        keys.setdefault(row["algo"], []).append(row["key"])
    axes = [axis for axis in AXES if any(np.isfinite(run.column(axis)).any() for run in found.runs)]
    own = {
        "axes": axes,
        "curves": [_curves(*key, runs, axes, said, options) for key, runs in groups.items()],
        "over_tasks": {axis: _over_tasks(groups, axis, said, options) for axis in axes},
        "inside": [_inside(task, run) for (task, _), runs in groups.items() for run in runs],
        "keys": keys,
        "runs": [{**told, **_beside(by_name[told["name"]], keys, link)} for told in said["runs"]],
        "histograms": _histograms(found.runs),
    }
    return content.plain({key: value for key, value in said.items() if key != "curves_over_tasks"} | own)


def thinned(page: Mapping[str, Any], points: int) -> dict[str, Any]:
    """Returns the same with at most so many points of each curve, and numbers of five digits; 0 leaves the runs'
    curves out.
    """
    lines = lambda runs: [{**run, **_columns(run, ("y", *AXES), points)} for run in runs] if points else []
    band = lambda found: found and {**found, **_columns(found, ("x", "value", "low", "high"), max(points // 2, 25))}
    curves = [
        {**c, "runs": lines(c["runs"]), "bands": {axis: band(found) for axis, found in c["bands"].items()}}
        for c in page["curves"]
    ]
    over = {axis: [{**c, "band": band(c["band"])} for c in found] for axis, found in page["over_tasks"].items()}
    few = min(points // 4, _INSIDE_POINTS)
    inside = [{**run, "metrics": {k: _columns(m, m, few) for k, m in run["metrics"].items()}} for run in page["inside"]]
    return {**page, "points": points, "curves": curves, "over_tasks": over, "inside": inside if few > 2 else []}


def best_runs(page: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Returns the same with the best of the runs alone, at most so many, and the methods that they are of; a note says
    so.

    What was computed of all runs stays as it is.
    """
    order = sorted(page["runs"], key=lambda run: -math.inf if run["last"] is None else run["last"], reverse=True)
    kept = {run["name"]: run["method"] for run in order[:most]}
    methods = {*kept.values()}
    named = lambda rows: [row for row in rows if row["name"] in kept]
    of = lambda rows: [row for row in rows if row["method"] in methods]
    inside = lambda found: {name: value for name, value in found.items() if name in methods}
    cautions, rest = page["cautions"][:most], len(page["cautions"][most:])
    note = (
        f"Of {len(page['runs']):,} runs this page shows the best {len(kept):,}, with {len(methods):,} of "
        f"{len(page['methods']):,} methods: it would be too large with all of them, which report.json has."
    )
    equal = page["equal_steps"]
    return {
        **page,
        "notes": [*page["notes"], note],
        "cautions": [*cautions, f"and {rest:,} more: see report.md"] if rest else cautions,
        "runs": named(page["runs"]),
        "methods": [name for name in page["methods"] if name in methods],
        "curves": [{**c, "runs": named(c["runs"])} for c in of(page["curves"])],
        "inside": named(page["inside"]),
        "failures": named(page["failures"]),
        "per_task": of(page["per_task"]),
        "improvement": [row for row in of(page["improvement"]) if row["over"] in methods],
        "over_tasks": {axis: of(found) for axis, found in page["over_tasks"].items()},
        "aggregate": {**page["aggregate"], "rows": of(rows)}
        if (rows := page["aggregate"].get("rows"))
        else page["aggregate"],
        "profiles": {**p, "methods": inside(p["methods"])} if (p := page["profiles"]) else p,
        "differences": {key: found for key, by in page["differences"].items() if (found := inside(by))},
        "histograms": [{**h, "methods": inside(h["methods"])} for h in page["histograms"]],
        "equal_steps": equal and {**equal, "scores": {k: v for k, v in equal["scores"].items() if k in kept}},
        "provenance": [
            {
                **origin,
                "runs": [name for name in origin["runs"] if name in kept],
                "commands": {
                    line: own for line, names in origin["commands"].items() if (own := [n for n in names if n in kept])
                },
            }
            for origin in page["provenance"]
        ],
    }


def text(page: Mapping[str, Any]) -> str:
    """Returns JSON without spaces."""
    return json.dumps(page, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def relative(directory: Path) -> Link:
    """Links from a page in `directory` to what lies elsewhere on the same disk."""

    def link(path: Path) -> str | None:
        try:
            way = os.path.relpath(path, directory)
        except ValueError:  # another drive of Windows
            return path.resolve().as_uri()
        return urllib.parse.quote(Path(way).as_posix()) + "/" * path.is_dir()

    return link


def videos(run: Run) -> list[Path]:
    """Returns the latest videos that a run has left, in the order of their steps."""
    if run.path is None:
        return []
    found = [path for pattern in VIDEOS for path in (run.path / "videos").glob(pattern)]
    finished = [path for path in found if not path.stem.endswith(".unfinished")]
    return sorted(finished, key=lambda path: (len(path.stem), path.stem))[-_MOST_VIDEOS:]


# ---------------------------------------------------------------- curves


def _curves(
    task: str, method: str, runs: Sequence[Run], axes: Sequence[str], said: Mapping[str, Any], options: Options
) -> dict[str, Any]:
    """Returns a method on a task, over every axis."""
    bands = {}
    for axis in axes:
        (made,) = (c for c in said["curves"] if (c["task"], c["method"]) == (task, method))
        curves = [run.curve(axis, options.objective) for run in runs]
        bands[axis] = made["band"] if axis == options.axis else content.band([curves], options)
    lines = [{"name": run.name, **_points(run, options.objective, axes)} for run in runs]
    return {"task": task, "method": method, "runs": lines, "bands": bands}


def _points(run: Run, objective: str, axes: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns each axis and y, f64 [N] each, of the rows that have the objective; NaN where a row lacks an axis."""
    name = objective if run.path else "value"
    rows = report.evaluations(run.rows) if name.startswith("evaluation/") else run.rows
    own = run._replace(rows=rows)
    y = own.column(name)
    kept = np.isfinite(y)
    return {"y": y[kept], **{axis: own.column(axis)[kept] for axis in axes}}


def _over_tasks(groups: Groups, axis: str, said: Mapping[str, Any], options: Options) -> list[Any]:
    if axis == options.axis:
        return list(said["curves_over_tasks"])
    asked = options._replace(axis=axis)
    return content.curves_over_tasks(groups, said["tasks"], said["methods"], asked)


def _inside(task: str, run: Run) -> dict[str, Any]:
    """Returns the metrics of a run's learning, over env_steps."""
    steps = run.column("env_steps")
    found = {}
    for name in _INSIDE if run.path else ():
        values = run.column(name)
        kept = np.isfinite(values + steps)
        if kept.sum() > 1:
            found[name] = {"x": steps[kept], "y": values[kept]}
    return {"task": task, "method": run.method, "name": run.name, "metrics": found}


def _columns(found: Mapping[str, Any], names: Iterable[str], most: int) -> dict[str, Any]:
    """Returns columns of equal length at so many of their points, the first and the last among them; others as they
    are.
    """
    columns = {name: found[name] for name in names if name in found}
    length = len(next(iter(columns.values()), ()))
    kept = np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(int))
    return {name: [_short(column[i]) for i in kept] for name, column in columns.items()}


def _short(value: float | None) -> float | None:
    """
    >>> [_short(x) for x in (500.0, 0.123456789, 1048576.0, 20.4861, None)]
    [500, 0.12346, 1048576, 20.486, None]
    """
    if value is None or float(value).is_integer():
        return None if value is None else int(value)
    return float(f"{value:.{_DIGITS}g}")


# ---------------------------------------------------------------- what lies beside the rows


def _beside(run: Run, keys: Mapping[str, Sequence[str]], link: Link) -> dict[str, Any]:
    """Returns a run's entries for the table and the sweep's pictures."""
    own = keys.get(str(run.config.get("algo.name")), ())
    shown = lambda value: value if isinstance(value, int | float | str) else schema.flow(value)
    return {
        "algo": run.config.get("algo.name"),
        "link": link(run.path) if run.path else None,
        "values": {key: shown(run.config[key]) for key in own if key in run.config},
        "seconds": _seconds(run),
        "videos": [{"name": path.stem, "link": where} for path in videos(run) if (where := link(path))],
    }


def _seconds(run: Run) -> dict[str, float]:
    """Seconds of each stage over the whole run; rows have those since the row before."""
    names = dict.fromkeys(name for row in run.rows for name in row if name.startswith("time/") and name != RECOMPILES)
    sums = {name.removeprefix("time/"): float(np.nansum(run.column(name))) for name in names}
    return {name: _short(value) or 0 for name, value in sums.items() if value > 0}


def _histograms(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns columns that hold lists, such as `hist/x` of callbacks: of all rows, since each has what came since
    the last.
    """
    pooled: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in runs:
        for row in run.rows:
            for name, values in row.items():
                if isinstance(values, list):
                    numbers = [x for x in values if isinstance(x, int | float) and math.isfinite(x)]
                    pooled.setdefault((run.task, name), {}).setdefault(run.method, []).extend(numbers)
    found = []
    for (task, name), by_method in pooled.items():
        if together := [x for values in by_method.values() for x in values]:
            try:
                edges = np.histogram_bin_edges(together, _BINS)
            except ValueError:  # numbers so large that no edges lie between them
                continue
            counts = {method: np.histogram(values, edges)[0] for method, values in by_method.items()}
            short = [_short(float(edge)) for edge in edges]
            found.append({"task": task, "name": name, "edges": short, "methods": counts})
    return found
