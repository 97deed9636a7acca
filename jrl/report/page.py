"""The report as a page: one HTML file with data, drawing library and code, which needs no network."""

import base64
import hashlib
import importlib.resources
import importlib.util
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import counted
from jrl.metrics import plots
from jrl.report import charts, published, tables
from jrl.report.charts import Measured, Size
from jrl.report.content import ReportOptions
from jrl.report.runs import AXES, FINISHED, STOPPED, Found

NAME = "index.html"
LIMIT = 2_000_000  # bytes
INSTALL = "pip install 'jrl[report]'"
SIZES = [Size(points, most) for most in (1000, 300, 100, 30, 10, 3) for points in (200, 100, 50, 25)]
_MOST_VIDEOS = 20  # latest videos shown per run
_MOST_CARDS = 12  # maximum number of runs with videos
_LIBRARY = "dist/bundled/echarts/echarts@*/dist/echarts.min.js"  # Apache ECharts inside the package `panel`


def library() -> str | None:
    """Returns the code of the installed Apache ECharts; None: not installed. Does not import `panel`."""
    found = importlib.util.find_spec("jinja2") and importlib.util.find_spec("panel")
    places = found.submodule_search_locations if found else None
    files = sorted(path for place in places or () for path in Path(place).glob(_LIBRARY))
    return files[-1].read_text(encoding="utf-8") if files else None


def html(found: Found, said: Mapping[str, Any], options: ReportOptions, directory: Path, library: str) -> str:
    """Returns the page, with as many points and runs as fit into LIMIT.

    Args:
      found: runs.
      said: result of `content.content` for these runs.
      options: options of the report.
      directory: directory of the page, from which links to run directories and videos start.
      library: code of the drawing library.
    """
    measured = charts.measure(found, said, options)
    fixed = {f"histogram-{i}": views for i, views in enumerate(charts.draw_histograms(measured))}
    fixed["time"] = charts.draw_seconds(measured)
    for size in SIZES:
        text = _render(library, **_parts(measured, size, directory, fixed))
        if len(text.encode()) <= LIMIT:
            break
    return text


def _render(library: str, **parts: Any) -> str:
    """Returns page.html filled in. Jinja escapes all texts; only scripts whose hash is in the page's policy run."""
    import jinja2

    assets = importlib.resources.files("jrl.report") / "assets"
    read = lambda name: (assets / name).read_text(encoding="utf-8")
    env = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    env.filters |= {"number": tables.format_number, "interval": tables.format_interval, "counted": counted}
    env.globals |= {"color": charts.color, "dash": charts.dash}
    scripts = [_in_script(library), _in_script(read("page.js"))]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    return env.from_string(read("page.html")).render(style=read("page.css"), scripts=scripts, hashes=hashes, **parts)


def _in_script(code: str) -> str:
    """Returns code that is safe inside a script element: its strings cannot end the element."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", code, flags=re.IGNORECASE)


def _parts(m: Measured, size: Size, directory: Path, fixed: Mapping[str, charts.Views]) -> dict[str, Any]:
    said, most = m.said, size.most
    described = sorted(said["runs"], key=lambda run: (run["last"] is None, -(run["last"] or 0)))
    methods = said["methods"][:most]
    notes = [*said["notes"], *said["cautions"][:most]]
    if len(said["cautions"]) > most:
        notes.append(f"and {len(said['cautions']) - most:,} more: see report.md")
    if len(described) > most:
        notes.append(
            f"of {len(described):,} runs of {counted(len(said['methods']), 'method')} this page shows the best "
            f"{most:,} of each, to limit its size: report.json has all"
        )
    algos = dict.fromkeys(row["algo"] for row in said["hyper_parameters"])
    swept = {algo: charts.select_swept(m, size, algo) for algo in algos}
    drawn = {"curves": charts.draw_curves(m, size), "profiles": charts.draw_profiles(m, size), **fixed}
    drawn |= {"published": charts.draw_published(m)} if said.get("published") else {}
    for i, given in enumerate(swept.values()):
        drawn |= {f"parallel-{i}": charts.draw_parallel(given), f"map-{i}": charts.draw_score_maps(given, f"map{i}")}
    inside = charts.draw_metrics(m, size)
    drawn |= {f"inside-{i}": views for i, views in enumerate(inside)}
    drawn = {name: views for name, views in drawn.items() if views}
    labels = {**plots.LABELS, charts.ALL_TASKS: "all, normalised"}
    views = [view for own in drawn.values() for view in own]
    choices = {
        key: [(value, labels.get(value, value)) for value in dict.fromkeys(view[key] for view in views if key in view)]
        for key in ("task", "axis", *(f"map{i}" for i in range(len(swept))))
    }
    return {
        **said,
        "methods": methods,
        "all_methods": said["methods"],
        "rank": m.rank,
        "names": m.names,
        "notes": notes,
        "told": described,
        "in_legend": methods[: charts.MOST_METHODS],
        "first_on": said["ranking"]["*"][: charts.MOST_CURVES],
        "scores": {task: _scores(said, task, {*methods}) for task in said["tasks"]},
        "improvement": [row for row in said["improvement"] if {row["method"], row["over"]} <= {*methods}],
        "aggregate": [row for row in said["aggregate"].get("rows", ()) if row["method"] in methods],
        "table": _run_table(m, described[:most], directory),
        "swept": swept,
        "failures": said["failures"][:most],
        "published_header": published.HEADER,
        "published": [{**task, "rows": [*map(published.cells, task["rows"])]} for task in said.get("published", ())],
        "published_sources": published.describe_sources([row for t in said.get("published", ()) for row in t["rows"]]),
        "band": published.BAND,
        "videos": _videos(m, described, directory),
        "difference_columns": tables.MOST_COLUMNS,
        "origins": [{**origin, "facts": [*tables.facts(origin)]} for origin in said["provenance"]],
        "most": most,
        "choices": choices,
        "inside": len(inside),
        "histograms": sum(name.startswith("histogram-") for name in drawn),
        "charts": drawn,
        "data": {"theme": charts.THEME, "charts": drawn},
    }


def _scores(said: Mapping[str, Any], task: str, methods: set[str]) -> dict[str, Any]:
    order = said["ranking"][task]
    rows = [row for row in said["per_task"] if row["task"] == task and row["method"] in methods]
    rows.sort(key=lambda row: order.index(row["method"]))
    dots: dict[str, list[float]] = {}
    for run in said["runs"]:
        if run["task"] == task and run["last"] is not None:
            dots.setdefault(run["method"], []).append(run["last"])
    ends = [x for row in rows for x in (*row["last"].values(), row["iqm"]["low"], row["iqm"]["high"]) if x is not None]
    return {"rows": rows, "dots": dots, "low": min(ends, default=0), "high": max(ends, default=1)}


def _run_table(m: Measured, described: Sequence[Mapping[str, Any]], directory: Path) -> dict[str, Any]:
    said, runs = m.said, [m.runs[one["name"]] for one in described]
    keys = list(dict.fromkeys(row["key"] for row in said["hyper_parameters"]))
    differ = lambda name: len({run[name] for run in said["runs"]}) > 1
    titles = {"source": "copied from", "time_s": "seconds"}
    first = [name for name, is_shown in (("method", not keys), ("task", True)) if is_shown and differ(name)]
    last = ["seed", *["source"] * any(run["source"] for run in said["runs"]), "last", "best", "state", *AXES]
    columns = {name: [one[name] for one in described] for name in first}
    for key in keys:
        columns[key] = [charts.plain_value(run.config[key]) if key in run.config else None for run in runs]
    columns |= {titles.get(name, name): [one[name] for one in described] for name in last}
    columns["steps/s"] = [one["env_steps"] and one["time_s"] and one["env_steps"] / one["time_s"] for one in described]
    names = _short_names([one["name"] for one in described])
    links = [run.path and _link(run.path, directory) for run in runs]
    rows = [
        {"told": one, "name": name, "link": where, "cells": cells}
        for one, name, where, *cells in zip(described, names, links, *columns.values())
    ]
    numeric = [any(isinstance(cell, int | float) for cell in column) for column in columns.values()]
    return {"columns": [*zip(columns, numeric)], "rows": rows, "ends": (FINISHED, STOPPED)}


def _short_names(names: Sequence[str]) -> list[str]:
    """Returns names without their common directory.

    >>> _short_names(["runs/a/0", "runs/a/1", "runs/b"]), _short_names(["/a/0", "b.csv: ppo, CartPole-v1, seed 0"])
    (['a/0', 'a/1', 'b'], ['/a/0', 'b.csv: ppo, CartPole-v1, seed 0'])
    """
    try:
        common = os.path.commonpath([os.path.dirname(name) for name in names])
    except ValueError:  # absolute and relative paths mixed
        common = ""
    return [os.path.relpath(name, common) if common else name for name in names]


def _videos(m: Measured, described: Sequence[Mapping[str, Any]], directory: Path) -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = []
    for one in described:
        path = m.runs[one["name"]].path
        found = [path for path in (path / "videos").glob("*.*") if path.suffix in (".mp4", ".gif")] if path else []
        finished = [film for film in found if not film.stem.endswith(".unfinished")]
        finished.sort(key=lambda film: (len(film.stem), film.stem))
        films = [{"name": film.stem, "link": _link(film, directory)} for film in finished[-_MOST_VIDEOS:]]
        if films and len(cards) < _MOST_CARDS:
            cards.append({"told": one, "films": films})
    return cards


def _link(path: Path, directory: Path) -> str:
    return urllib.parse.quote(Path(os.path.relpath(path, directory)).as_posix()) + "/" * path.is_dir()
