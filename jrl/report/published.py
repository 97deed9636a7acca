"""Published results of other libraries beside our runs: means and deviations over seeds, with source and licence.

The data are `assets/published.jsonl`, a curve per line, and `assets/published_sources.yaml`, the repositories.
"""

import difflib
import functools
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import counted
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
    half_width: float  # of the 95 % interval of the difference; NaN: one run on each side

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
    """Returns the rows of `jrl reproduce`: name -> config, env, set, steps, seeds, objective, published, settings."""
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


def common_step(lines: Sequence[plots.Curve]) -> float:
    """Returns the last step that all of our curves have."""
    return min(float(x[-1]) for x, _ in lines)


def values_at(lines: Sequence[plots.Curve], steps: float) -> list[float]:
    """Returns the value of each curve after `steps`, linear between two rows; the last value if it ends before."""
    return [float(np.interp(steps, x, y)) for x, y in lines]


def content(runs: Sequence[ReportedRun], objective: str) -> list[dict[str, Any]]:
    """Returns per task the published results beside each method's runs, as plain data.

    Keys of a task: `task`, `note` (why nothing is compared; else ""), `steps` (where each method is compared),
    `rows` (a method beside a published curve) and `sources`. Keys of a row: method, algorithm, repository, file, licence,
    evaluation, published_seeds, published_deviation ("seeds" or "episodes"), mean, deviation, steps, and those of
    `Difference` with its verdict.

    A published curve that ends before our last common step is compared at its end, and one that begins later is left
    out. A curve with one point is compared if we have gone as far; at that step.
    """
    found = []
    for task in dict.fromkeys(run.task for run in runs):
        own = [run for run in runs if run.task == task]
        known = of_task(task)
        if not known:
            found.append({"task": task, "note": explain_missing(task), "rows": [], "sources": []})
            continue
        changed = [
            f"{key} {run.config[key]}"
            for run in own
            for key in ("env.action_repeat", "env.action_chunk")
            if run.config.get(key, 1) != 1
        ]
        if changed:
            note = f"{task}: {changed[0]}: published results have 1, and are not comparable"
            found.append({"task": task, "note": note, "rows": [], "sources": []})
            continue
        rows = []
        for method in dict.fromkeys(run.method for run in own):
            lines = [run.curve("env_steps", objective) for run in own if run.method == method]
            if lines := [line for line in lines if len(line[0])]:
                rows += [row for curve in known if (row := _row(method, lines, curve))]
        note = "" if rows else f"{task}: our runs end before the first published step: train longer"
        sources = {row["repository"]: row["licence"] for row in rows}
        found.append({"task": task, "note": note, "rows": rows, "sources": [*map(list, sources.items())]})
    return found


def _row(method: str, lines: Sequence[plots.Curve], curve: PublishedCurve) -> dict[str, Any] | None:
    steps = min(common_step(lines), float(curve.steps[-1]))
    if steps < 0.99 * curve.steps[0]:
        return None
    mean, deviation = curve.at(steps)
    found = compare(values_at(lines, steps), mean, deviation, curve.seeds)
    return {
        "method": method, "algorithm": curve.algorithm, "repository": curve.source.repository, "file": curve.file,
        "licence": curve.source.licence, "evaluation": curve.source.evaluation, "published_seeds": curve.seeds,
        "published_deviation": curve.source.deviation, "mean": mean, "published_sd": deviation, "steps": round(steps),
        **found._asdict(), "verdict": found.verdict,
    }  # fmt: skip


# ---------------------------------------------------------------- tables and pictures

BAND = (
    "The band is the 95 % interval of the difference of the means (Welch's t); with a single run on one side, the 95 % "
    "interval for one more run of the other side. Inside: the difference may be chance. It does not say that both are "
    "equal: few seeds make a wide band."
)


def to_markdown(tasks: Sequence[Mapping[str, Any]], picture: str | None = None) -> str:
    """Returns the section on published results as Markdown."""
    parts = ["## Published results", BAND]
    if picture:
        parts.append(f"![published curves]({picture})")
    header = ("published", "after steps", "ours: mean ± deviation (seeds)", "95 % interval", "published mean ± deviation",
              "difference ± band", "verdict")  # fmt: skip
    for task in tasks:
        parts.append(f"### {escape(task['task'])}")
        if task["note"]:
            parts.append(escape(task["note"]) + ".")
        for method in dict.fromkeys(row["method"] for row in task["rows"]):
            parts.append(f"{escape(method)}:")
            own = [row for row in task["rows"] if row["method"] == method]
            parts.append(format_table(header, [cells(row) for row in own]))
        seen = {row["repository"]: row for row in task["rows"]}
        lines = [
            f"* {name} ({row['licence']}, deviation over {row['published_deviation']}): {row['evaluation']}. Files such as `{row['file']}`"
            for name, row in seen.items()
        ]
        if lines:
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row of `content` for a table."""
    number = lambda x: format_number(None if x is None or math.isnan(x) else x)
    published = f"{number(row['mean'])} ± {number(row['published_sd'])} ({_count(row)})"
    return (
        f"{escape(row['algorithm'])}, {row['repository']}", f"{row['steps']:,}",
        f"{number(row['ours'])} ± {number(row['deviation'])} ({row['seeds']})",
        "-" if row["low"] is None or math.isnan(row["low"]) else f"{number(row['low'])} to {number(row['high'])}",
        published, f"{number(row['difference'])} ± {number(row['half_width'])}", row["verdict"],
    )  # fmt: skip


def _count(row: Mapping[str, Any]) -> str:
    if row["published_deviation"] == "episodes":
        return "1 run, episodes"
    return counted(row["published_seeds"], "seed")


def draw(runs: Sequence[ReportedRun], objective: str, png: Path, first: Sequence[str] = ()) -> Path | None:
    """Draws our runs over the published curves of their tasks, mean and deviation each; None: no task has any.

    Args:
      runs: our runs.
      objective: metric of the result rows.
      png: output file.
      first: published algorithms that are drawn first; others follow up to six.
    """
    tasks = [task for task in dict.fromkeys(run.task for run in runs) if of_task(task)]
    if not tasks:
        return None
    columns = min(len(tasks), 2)
    figure = plots.make_figure((7.0 * columns, 4.5 * math.ceil(len(tasks) / columns)))
    for i, task in enumerate(tasks):
        axes = figure.add_subplot(math.ceil(len(tasks) / columns), columns, i + 1)
        own = [run for run in runs if run.task == task]
        last = 0.0
        for j, method in enumerate(dict.fromkeys(run.method for run in own)):
            lines = [run.curve("env_steps", objective) for run in own if run.method == method]
            lines = [line for line in lines if len(line[0])]
            if not lines:
                continue
            last = max([last, *(float(x[-1]) for x, _ in lines)])
            grid, values = plots.interpolate(lines)
            label = f"ours: {method} ({counted(len(lines), 'seed')})"
            axes.plot(grid, values.mean(0), color=f"C{j}", linewidth=2.2, label=label, zorder=3)
            if len(lines) > 1:
                low, high = (values.mean(0) + sign * values.std(0, ddof=1) for sign in (-1, 1))
                axes.fill_between(grid, low, high, color=f"C{j}", alpha=0.25, linewidth=0, zorder=2)
        known = [c for c in of_task(task) if c.steps[0] <= 1.01 * last]
        known.sort(key=lambda c: (c.algorithm not in first, -len(c.steps)))
        for j, c in enumerate(known[:_MOST_DRAWN]):
            color, label = f"C{j + 3}", f"{c.name} ({counted(c.seeds, 'seed')})"
            at = c.steps <= 1.05 * last
            if at.sum() > 1:
                x, y, d = c.steps[at], c.mean[at], c.deviation[at]
                axes.plot(x, y, color=color, linestyle="--", linewidth=1.2, label=label)
                axes.fill_between(x, y - d, y + d, color=color, alpha=0.08, linewidth=0)
            else:
                axes.errorbar(
                    c.steps[:1], c.mean[:1], c.deviation[:1], color=color, fmt="o", capsize=3, label=label
                )
        axes.set(title=task, xlabel="environment steps", ylabel=plots.LABELS.get(objective, objective))
        plots.style(axes)
        legend = axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return plots.save(figure, png)
