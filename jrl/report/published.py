"""Published results of other libraries beside our runs: means and deviations over seeds, with source and licence.

The data are `assets/published.jsonl`, a curve per line, and `assets/published_sources.yaml`, the repositories.
"""

import difflib
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import counted, shown
from jrl.fields import schema
from jrl.metrics import plots
from jrl.report.runs import ReportedRun
from jrl.report.tables import escape, format_number, format_table

_ASSETS = importlib.resources.files("jrl.report") / "assets"
_MOST_DRAWN = 6  # published curves in a panel, those of the compared algorithm first


class Source(NamedTuple):
    """A repository with result files."""

    repository: str
    commit: str
    licence: str
    evaluation: str  # how its returns were measured
    metric: str  # our key for the same measurement: evaluation/return, or episode/return of training episodes
    deviation: str  # "seeds", or "episodes" if a single run was evaluated


class PublishedCurve(NamedTuple):
    """Published returns of an algorithm on a task."""

    task: str
    algorithm: str
    source: Source
    file: str
    seeds: int
    steps: np.ndarray  # f64 [N], environment steps, increasing
    mean: np.ndarray  # f64 [N]
    deviation: np.ndarray  # f64 [N], sample standard deviation over what `source.deviation` says

    @property
    def name(self) -> str:
        """Algorithm and repository."""
        return f"{self.algorithm}, {self.source.repository}"

    def at(self, steps: float) -> tuple[float, float]:
        """Returns mean and deviation after `steps`, linear between two points."""
        return float(np.interp(steps, self.steps, self.mean)), float(np.interp(steps, self.steps, self.deviation))


class Difference(NamedTuple):
    """Our returns beside a published mean."""

    ours: float  # mean
    deviation: float  # sample standard deviation; NaN: one seed
    seeds: int
    low: float  # 95 % interval of our mean; NaN: one seed
    high: float
    difference: float  # ours - published
    half_width: float  # half of the 95 % interval of the difference; NaN: one run on each side

    @property
    def verdict(self) -> str:
        """`inside`, `above by ...`, `below by ...` the band, or `no band`."""
        if math.isnan(self.half_width):
            return "no band: one run on each side"
        beyond = abs(self.difference) - self.half_width
        if beyond <= 1e-9 * max(1.0, abs(self.ours)):
            return "inside"
        return f"{'above' if self.difference > 0 else 'below'} by {format_number(beyond)}"


@functools.cache
def curves() -> tuple[PublishedCurve, ...]:
    """Returns all published curves."""
    sources = {key: Source(**value) for key, value in _read_yaml("published_sources.yaml").items()}
    lines = map(json.loads, (_ASSETS / "published.jsonl").read_text(encoding="utf-8").splitlines())
    arrays = ("steps", "mean", "deviation")
    return tuple(
        PublishedCurve(
            **line | {"source": sources[line["source"]]} | {name: np.array(line[name], np.float64) for name in arrays}
        )
        for line in lines
    )


def of_task(task: str) -> list[PublishedCurve]:
    """Returns the published curves of a task; []: none."""
    return [curve for curve in curves() if curve.task == task]


def explain_missing(task: str) -> str:
    """Returns one sentence on a task without published results, with the ids that have some."""
    known = sorted({curve.task for curve in curves()})
    near = difflib.get_close_matches(task, known, 1, 0.8)
    hint = f"there are some of {near[0]}, another task or version" if near else f"there are some of {', '.join(known)}"
    return f"{task}: no published results are stored: {hint}"


@functools.cache
def reproducible() -> Mapping[str, Mapping[str, Any]]:
    """Returns the rows of `jrl reproduce`: name -> config, env, set, steps, seeds, published, settings."""
    return _read_yaml("reproduce.yaml")


def of_row(row: Mapping[str, Any]) -> PublishedCurve:
    """Returns the published curve of a row of `reproducible`. Raises LookupError: none is stored."""
    wanted = (row["env"], row["published"]["algorithm"], row["published"]["source"])
    repository = _read_yaml("published_sources.yaml")[wanted[2]]["repository"]
    found = [c for c in curves() if (c.task, c.algorithm, c.source.repository) == (*wanted[:2], repository)]
    if len(found) != 1:
        raise LookupError(f"{wanted}: expected one published curve, got {len(found)}")
    return found[0]


@functools.cache
def _read_yaml(name: str) -> dict[str, Any]:
    return schema.read_mapping(Path(str(_ASSETS / name)))


# ---------------------------------------------------------------- comparison


def compare(ours: Sequence[float], mean: float, deviation: float, seeds: int) -> Difference:
    """Compares returns of our seeds with a published mean: the 95 % interval of the difference of the means.

    Several seeds on both sides: Welch's t (two variances). A single run on one side: that run is one more draw from the
    other side's runs, so the interval is t * deviation * sqrt(1 + 1 / n) with the deviation of the n runs.

    Args:
      ours: returns of our seeds [n].
      mean, deviation: published mean, and its sample standard deviation over seeds.
      seeds: number of published seeds; with 1 the deviation is not used.
    """
    from scipy.stats import t  # slow to import

    x, n = np.asarray(ours, np.float64), len(ours)
    own = float(x.std(ddof=1)) if n > 1 else math.nan
    quantile = lambda degrees: float(t.ppf(0.975, degrees))
    half = quantile(n - 1) * own / math.sqrt(n) if n > 1 else math.nan
    if n > 1 and seeds > 1:
        a, b = own**2 / n, deviation**2 / seeds
        degrees = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (seeds - 1)) if a + b else math.inf
        width = quantile(degrees) * math.sqrt(a + b)
    elif n > 1 or seeds > 1:
        spread, count = (own, n) if n > 1 else (deviation, seeds)
        width = quantile(count - 1) * spread * math.sqrt(1 + 1 / count)
    else:
        width = math.nan
    center = float(x.mean())
    return Difference(center, own, n, center - half, center + half, center - mean, width)


def values_at(lines: Sequence[plots.Curve], steps: float) -> list[float]:
    """Returns the value of each curve after `steps`, linear between two rows; the last value if it ends before."""
    return [float(np.interp(steps, x, y)) for x, y in lines]


def content(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Returns per task the published results beside each method's runs, as plain data.

    Keys of a task: `task`, `note` (why nothing is compared; else "") and `rows`, a method beside a published curve
    each. Keys of a row: method, algorithm, repository, file, licence, evaluation, metric, published_seeds,
    published_deviation ("seeds" or "episodes"), mean, published_sd, steps, and those of `Difference` with its verdict.

    A method is compared by the metric of the published curve, at the last step that all its seeds have; with a
    published curve that ends before, at its end. A published curve that begins later is left out.
    """
    return [_compare_task(task, [run for run in runs if run.task == task]) for task in _tasks(runs)]


def _tasks(runs: Sequence[ReportedRun]) -> list[str]:
    return list(dict.fromkeys(run.task for run in runs))


def _compare_task(task: str, runs: Sequence[ReportedRun]) -> dict[str, Any]:
    found: dict[str, Any] = {"task": task, "note": "", "rows": []}
    if not (known := _ordered(of_task(task), runs)):
        return found | {"note": explain_missing(task)}
    for run in runs:
        for key in ("env.action_repeat", "env.action_chunk"):
            if run.config.get(key, 1) != 1:
                return found | {"note": f"{task}: {key} {run.config[key]}: published results have 1: not comparable"}
    pairs = itertools.product(dict.fromkeys(run.method for run in runs), known)
    rows = [_row(method, [run for run in runs if run.method == method], curve) for method, curve in pairs]
    found["rows"] = [row for row in rows if row]
    if not found["rows"]:
        wanted = min(known, key=lambda curve: curve.steps[0])
        metrics = " or ".join(dict.fromkeys(curve.source.metric for curve in known))
        found["note"] = (
            f"{task}: published results begin after {wanted.steps[0]:,.0f} steps and need rows with {metrics}"
        )
    return found


def _ordered(curves: Sequence[PublishedCurve], runs: Sequence[ReportedRun]) -> list[PublishedCurve]:
    """Returns the curves of our algorithms first, then those with more points."""
    names = {str(run.config.get("algo.name")) for run in runs}
    return sorted(curves, key=lambda curve: (curve.algorithm.lower().split(",")[0] not in names, -len(curve.steps)))


def _row(method: str, runs: Sequence[ReportedRun], curve: PublishedCurve) -> dict[str, Any] | None:
    lines = [run.curve("env_steps", curve.source.metric) for run in runs]
    lines = [line for line in lines if len(line[0])]
    steps = min([float(curve.steps[-1]), *(float(x[-1]) for x, _ in lines)])
    if not lines or steps < 0.99 * max(curve.steps[0], *(x[0] for x, _ in lines)):
        return None
    mean, deviation = curve.at(steps)
    found = compare(values_at(lines, steps), mean, deviation, curve.seeds)
    return {
        "method": method, "algorithm": curve.algorithm, "repository": curve.source.repository, "file": curve.file,
        "licence": curve.source.licence, "evaluation": curve.source.evaluation, "metric": curve.source.metric,
        "published_seeds": curve.seeds, "published_deviation": curve.source.deviation, "mean": mean,
        "published_sd": deviation, "steps": round(steps), **found._asdict(), "verdict": found.verdict,
    }  # fmt: skip


# ---------------------------------------------------------------- tables and pictures

BAND = (
    "The band is the 95 % interval of the difference of the means (Welch's t); with a single run on one side, the 95 % "
    "interval for one more run of the other side. Inside: the difference may be chance. It does not say that both are "
    "equal: few seeds make a wide band."
)


HEADER = (
    "ours", "published", "verdict", "after steps", "ours: mean ± deviation (seeds)", "95 % interval",
    "published: mean ± deviation", "difference ± band",
)  # fmt: skip


def to_markdown(tasks: Sequence[Mapping[str, Any]], picture: str | None = None) -> str:
    """Returns the section on published results as Markdown."""
    parts = ["## Published results", BAND, *([f"![published curves]({picture})"] if picture else [])]
    for task in tasks:
        parts.append(f"### {escape(task['task'])}")
        parts += [f"{escape(task['note'])}."] if task["note"] else []
        if task["rows"]:
            parts.append(format_table(HEADER, [[*map(escape, row[:2]), *row[2:]] for row in map(cells, task["rows"])]))
            parts.append("\n".join(f"* {line}" for line in describe_sources(task["rows"])))
    return "\n\n".join(parts) + "\n"


def describe_sources(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line on each repository of rows: licence, how it measured, a file."""
    return [
        f"{name}, {row['licence']}: {row['evaluation']}; deviation over {row['published_deviation']}. Our metric: "
        f"{row['metric']}. Files such as "
        f"{row['file']}."
        for name, row in {row["repository"]: row for row in rows}.items()
    ]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row of `content` under HEADER."""
    has = lambda key: row[key] is not None and math.isfinite(row[key])
    number = lambda key: format_number(row[key] if has(key) else None)
    spread = lambda key: f" ± {number(key)}" if has(key) else ""
    return (
        row["method"], f"{row['algorithm']}, {row['repository']}", row["verdict"], f"{row['steps']:,}",
        f"{number('ours')}{spread('deviation')} ({row['seeds']})",
        f"{number('low')} to {number('high')}" if has("low") else "-",
        f"{number('mean')} ± {number('published_sd')} ({_count(row)})",
        f"{number('difference')}{spread('half_width')}",
    )  # fmt: skip


def _count(row: Mapping[str, Any]) -> str:
    if row["published_deviation"] == "episodes":
        return "1 run, episodes"
    return counted(row["published_seeds"], "seed")


class Line(NamedTuple):
    """A curve of a picture."""

    label: str
    is_ours: bool
    x: np.ndarray  # f64 [N], environment steps
    mean: np.ndarray  # f64 [N]
    deviation: np.ndarray  # f64 [N]; 0 for a single run of ours


def lines(runs: Sequence[ReportedRun], objective: str, task: str) -> list[Line]:
    """Returns our methods on a task and up to six published curves of the objective, those of our algorithms first.

    [] if the task has no published curve of the objective up to our last step.
    """
    own = [run for run in runs if run.task == task]
    known = [curve for curve in _ordered(of_task(task), own) if curve.source.metric == objective]
    found = []
    for method in dict.fromkeys(run.method for run in own) if known else ():
        drawn = [run.curve("env_steps", objective) for run in own if run.method == method]
        if drawn := [line for line in drawn if len(line[0])]:
            x, values = plots.interpolate(drawn, 100)
            spread = values.std(0, ddof=1) if len(values) > 1 else 0 * x
            found.append(Line(f"ours: {method} ({counted(len(drawn), 'seed')})", True, x, values.mean(0), spread))
    last = max((float(line.x[-1]) for line in found), default=0.0)
    known = [curve for curve in known if curve.steps[0] <= 1.01 * last]
    found = found if known else []
    for curve in known[:_MOST_DRAWN]:
        at = curve.steps <= max(1.3 * last, curve.steps[0])
        count = "1 run" if curve.source.deviation == "episodes" else counted(curve.seeds, "seed")
        label = f"{curve.algorithm} ({count}; {curve.source.repository}, {curve.source.licence})"
        found.append(Line(label, False, curve.steps[at], curve.mean[at], curve.deviation[at]))
    return found


def draw(runs: Sequence[ReportedRun], objective: str, png: Path) -> Path | None:
    """Draws our runs over the published curves of their tasks, mean and deviation each; None: no task has any."""
    panels = {task: drawn for task in _tasks(runs) if (drawn := lines(runs, objective, task))}
    if not panels:
        return None
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    figure = plots.make_figure((7.0 * columns, 4.5 * rows))
    for i, (task, drawn) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for j, line in enumerate(drawn):
            look = {"linewidth": 2.2, "zorder": 3} if line.is_ours else {"linewidth": 1.2, "linestyle": "--"}
            if len(line.x) > 1:
                axes.plot(line.x, line.mean, color=f"C{j}", label=line.label, **look)
                low, high = line.mean - line.deviation, line.mean + line.deviation
                axes.fill_between(line.x, low, high, color=f"C{j}", alpha=0.25 if line.is_ours else 0.08, linewidth=0)
            else:
                axes.errorbar(line.x, line.mean, line.deviation, color=f"C{j}", fmt="o", capsize=3, label=line.label)
        axes.set(xlabel=plots.LABELS["env_steps"], ylabel=plots.LABELS.get(objective, objective))
        axes.set_title(shown(task), fontsize=10, parse_math=False)
        plots.style(axes)
        for text in axes.legend(framealpha=0.85, edgecolor="none", fontsize=8).get_texts():
            text.set_parse_math(False)
    return plots.save(figure, png)
