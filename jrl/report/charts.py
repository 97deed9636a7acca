"""Charts of the page: options of Apache ECharts as plain data.

A chart is a list of views, {"task": ..., "axis": ..., "option": ...}; the page shows the view selected by its controls.
A colour is the name of a variable in page.css, such as `--c0`, so that one option serves light and dark mode.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.fields import schema
from jrl.metrics import plots
from jrl.metrics.timers import RECOMPILES
from jrl.report import content, published, statistics
from jrl.report.content import ReportOptions
from jrl.report.runs import AXES, Found, ReportedRun

Views = list[dict[str, Any]]
Band = Mapping[str, Sequence[float]]  # keys: x, value, low, high
Curves = tuple[Sequence[plots.Curve], Band | None]  # curves of a method's runs, and their interval (None: one run)

ALL_TASKS = "*"
MOST_CURVES = 10  # methods shown initially
_INSIDE = (
    "episode/return", "episode/length", "loss/policy", "loss/value", "policy/entropy", "policy/approx_kl",
    "value/explained_variance", "train/lr", "perf/steps_per_s",
)  # fmt: skip
_STAGES = ("env", "act", "collect", "transfer", "wait", "update", "log")
MOST_METHODS = 50  # in the legend
_MOST_WITH_RUNS = 5  # maximum number of methods whose single runs are drawn
_MOST_SMALL = 20  # methods in the small charts
_MOST_TIMED = 16
_MOST_AXES = 8  # hyper-parameters in parallel
_BINS, _CELLS, _MOST_LEVELS = 24, 12, 16
_COLORS, _DASHES = 7, ("solid", "dashed", "dotted")

_TEXT, _SMALL = {"color": "--soft"}, {"color": "--soft", "fontSize": 11}
_MIDDLE = {"nameLocation": "middle", "nameGap": 28}
_TO_THE_END = {"type": "value", "max": "dataMax", "axisLabel": {"alignMaxLabel": "right"}}
_AT_X = {"trigger": "axis", "order": "valueDesc"}
_HALO = {"textBorderColor": "--card", "textBorderWidth": 4}
_AXIS = {
    "nameTextStyle": _TEXT, "axisLabel": {**_SMALL, "hideOverlap": True}, "axisTick": {"show": False},
    "axisLine": {"lineStyle": {"color": "--line"}}, "splitLine": {"lineStyle": {"color": "--grid"}},
}  # fmt: skip
THEME = {
    "textStyle": {**_TEXT, "fontFamily": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"},
    "title": {"left": 0, "top": 0, "textStyle": {"color": "--ink", "fontSize": 13, "fontWeight": 600}},
    "legend": {"textStyle": _TEXT},
    "tooltip": {
        "confine": True, "backgroundColor": "--card", "borderColor": "--line", "textStyle": {"color": "--ink"},
        "extraCssText": "max-width: 90vw; white-space: normal; overflow-wrap: anywhere",
    },
    "toolbox": {"iconStyle": {"borderColor": "--soft"}},
    "visualMap": {"textStyle": _TEXT, "inRange": {"color": [f"--r{i}" for i in range(6)]}},
    "valueAxis": _AXIS, "logAxis": _AXIS, "categoryAxis": {**_AXIS, "splitLine": {"show": False}},
}  # fmt: skip
_TOOLBOX = {
    "right": 4, "top": 0, "itemSize": 13,
    "feature": {
        "dataZoom": {"filterMode": "none", "title": {"zoom": "Zoom by a box", "back": "Zoom back"}},
        "restore": {"title": "All"}, "saveAsImage": {"type": "svg", "name": "curves", "title": "Save as SVG"},
    },
}  # fmt: skip
# parallel coordinates on a phone and on a wide screen: position, and style of each axis
_UPRIGHT = (
    {"layout": "vertical", "left": 34, "right": 26, "top": 46, "bottom": 36},
    {
        "nameLocation": "start",
        "nameTextStyle": {"align": "left", "verticalAlign": "bottom", "padding": [0, 0, 7, -20]},
    },
)
_LEVEL = (
    {"layout": "horizontal", "left": 44, "right": 66, "top": 40, "bottom": 26},
    {"nameLocation": "end", "nameTextStyle": {"align": "center", "verticalAlign": "bottom", "padding": 0}},
)
_PARALLEL_AXIS = {
    "nameTextStyle": {"color": "--ink", "fontWeight": 600, **_HALO},
    "axisLabel": {"color": "--ink", "fontSize": 11, "hideOverlap": True, **_HALO},
    "axisLine": {"lineStyle": {"color": "--soft"}}, "axisTick": {"show": False},
    "areaSelectStyle": {"color": "--accent", "borderColor": "--accent", "opacity": 0.18, "width": 18},
}  # fmt: skip


class Measured(NamedTuple):
    """Data of the charts, before methods and points are selected."""

    said: Mapping[str, Any]  # result of `content.content`
    runs: Mapping[str, ReportedRun]
    groups: Mapping[tuple[str, str], Sequence[ReportedRun]]  # task, method -> runs with scores
    curves: Mapping[str, Mapping[tuple[str, str], Curves]]  # axis -> (task or ALL_TASKS, method) -> curves
    names: Mapping[str, str]  # short names of methods
    rank: Mapping[str, int]  # rank of each method, which selects its colour and dashes


class Size(NamedTuple):
    """Limits of a page."""

    points: int  # maximum points of a curve
    most: int  # maximum number of runs, and of methods


def measure(found: Found, said: Mapping[str, Any], options: ReportOptions) -> Measured:
    """Returns the curves over each axis that rows have, for the runs and the result of `content.content`."""
    options = options._replace(objective=said["objective"])
    runs = {run.name: run for run in found.runs}
    groups = {(c["task"], c["method"]): [runs[line["name"]] for line in c["runs"]] for c in said["curves"]}
    curves: dict[str, dict[tuple[str, str], Curves]] = {}
    for axis in (axis for axis in AXES if any(np.isfinite(run.reached(axis)) for run in found.runs)):
        over = said["curves_over_tasks"]
        if axis != options.axis:
            asked = options._replace(axis=axis)
            over = content.curves_over_tasks(groups, said["tasks"], said["methods"], asked)
        curves[axis] = {(ALL_TASKS, c["method"]): ([], c["band"]) for c in over}
        for c, (key, members) in zip(said["curves"], groups.items(), strict=True):
            lines = [run.curve(axis, options.objective) for run in members]
            band = c["band"] if axis == options.axis else content.interquartile_band([lines], options)
            curves[axis][key] = [line for line in lines if len(line[0])], band
    brief = {method: re.sub(r"\balgo\.(?=\w+=)", "", method) for method in said["methods"]}
    if len({*brief.values()}) < len(brief):
        brief = {method: method for method in brief}
    rank = {method: i for i, method in enumerate(said["methods"])}
    return Measured(said, runs, groups, curves, brief, rank)


# ---------------------------------------------------------------- over steps, updates or seconds


def draw_curves(m: Measured, size: Size) -> Views:
    """Returns a view per task and axis: a method's runs, and their interquartile mean with its interval."""
    found = []
    for task, axis in itertools.product((ALL_TASKS, *m.said["tasks"]), m.curves):
        methods = m.said["methods"][: min(size.most, MOST_METHODS)]
        own = {method: m.curves[axis][task, method] for method in methods if (task, method) in m.curves[axis]}
        main = [x for lines, band in own.values() for x in ([np.array(band["x"])] if band else [x for x, _ in lines])]
        if not main:
            continue
        grid = _shared_grid(main, size.points)
        series: list[dict[str, Any]] = []
        for method, (lines, band) in own.items():
            i, name = m.rank[method], m.names[method]
            if band:
                columns = np.array([band[column] for column in ("x", "value", "low", "high")], np.float64)
                series += _band(name, i, _on_grid(grid, columns))
            for line in lines if not band or len(own) <= _MOST_WITH_RUNS else ():
                thin = {"z": 2, "silent": True, "tooltip": {"show": False}} if band else {}
                series.append(_line(name, i, _on_grid(grid, np.stack(line))) | thin)
                if band:
                    series[-1]["lineStyle"] |= {"width": 1, "opacity": 0.4}
        y = "normalised score" if task == ALL_TASKS else plots.LABELS.get(m.said["objective"], m.said["objective"])
        option = _chart(series, plots.LABELS[axis], y) | {
            "toolbox": _TOOLBOX, "tooltip": {**_AT_X, "axisPointer": {"lineStyle": {"color": "--soft"}}},
        }  # fmt: skip
        found.append({"task": task, "axis": axis, "option": option})
    return found


def draw_published(m: Measured) -> Views:
    """Returns a view per task with published results: our methods over the published curves, mean and deviation."""
    own, found = [run for run in m.runs.values() if run.path], []
    for task in m.said["tasks"]:
        series: list[dict[str, Any]] = []
        for i, line in enumerate(published.lines(own, m.said["objective"], task)):
            around = (line.mean - line.deviation, line.mean + line.deviation)
            series += _band(line.label, i, np.stack([line.x, line.mean, *around]))
            series[-1]["lineStyle"] |= (
                {"width": 3, "type": "solid"} if line.is_ours else {"width": 1.5, "type": "dashed"}
            )
        y = plots.LABELS.get(m.said["objective"], m.said["objective"])
        option = _chart(series, plots.LABELS["env_steps"], y) | {
            "tooltip": _AT_X, "legend": {"show": True, "type": "scroll", "left": 0, "top": 0},
        }  # fmt: skip
        option["grid"] |= {"top": 60}
        found += [{"task": task, "option": option}] if series else []
    return found


def draw_profiles(m: Measured, size: Size) -> Views:
    """Returns the share of runs above each normalised score; []: one task."""
    of, series = m.said["profiles"].get("methods", {}), []
    for method in m.said["methods"][: min(size.most, MOST_METHODS)]:
        if p := of.get(method):
            columns = [m.said["profiles"]["thresholds"], p["value"], p["low"], p["high"]]
            series += _band(m.names[method], m.rank[method], np.array(columns, float))
            series[-1]["step"] = "end"
    option = _chart(series, "normalised score", "share of runs above it")
    option["yAxis"] |= {"min": 0, "max": 1}
    return [{"option": option}] if series else []


def draw_metrics(m: Measured, size: Size) -> list[Views]:
    """Returns a small chart per metric: the interquartile mean of a method's runs, and their quartiles."""
    found = []
    for metric in _INSIDE if size.points > 25 else ():
        views = []
        for task in m.said["tasks"] if metric != m.said["objective"] else ():
            series: list[dict[str, Any]] = []
            for method in m.said["methods"][: min(size.most, _MOST_SMALL)]:
                i, name = m.rank[method], m.names[method]
                curves = [run.curve("env_steps", metric) for run in m.groups.get((task, method), ()) if run.path]
                lines = [(x, y) for x, y in curves if len(x) > 1]
                if len(lines) > 1 and max(x[0] for x, _ in lines) < min(x[-1] for x, _ in lines):
                    grid, values = plots.interpolate(lines, size.points // 5)
                    middle = statistics.interquartile_mean([values.T])
                    series += _band(name, i, np.stack([grid, middle, *np.quantile(values, (0.25, 0.75), axis=0)]))
                else:
                    grids = [_shared_grid([x], size.points // 5) for x, _ in lines]
                    series += [_line(name, i, _on_grid(grid, np.stack(line))) for grid, line in zip(grids, lines)]
            if series:
                views.append({"task": task, "option": _small(m, plots.LABELS.get(metric, metric), task, series)})
        found.append(views)
    return [views for views in found if views]


def draw_histograms(m: Measured) -> list[Views]:
    """Returns a small chart per metric that is a list, such as `hist/x` of callbacks.

    All rows count, because each has the values since the previous row.
    """
    pooled: dict[str, dict[str, dict[str, list[float]]]] = {}
    methods = m.said["methods"][:_MOST_SMALL]
    for run in m.runs.values():
        for row in run.rows if run.method in methods else ():
            for name, values in row.items():
                if isinstance(values, list):
                    numbers = [x for x in values if isinstance(x, int | float) and math.isfinite(x)]
                    pooled.setdefault(name, {}).setdefault(run.task, {}).setdefault(run.method, []).extend(numbers)
    found = []
    for name, tasks in pooled.items():
        views = []
        for task, by_method in tasks.items():
            try:
                edges = np.histogram_bin_edges([*itertools.chain(*by_method.values())], _BINS)
            except ValueError:  # numbers too large for bin edges
                continue
            area = {"step": "end", "showSymbol": False, "areaStyle": {"opacity": 0.14}}
            columns = {
                method: np.stack((edges, np.append(np.histogram(by_method[method], edges)[0], 0)))
                for method in methods
                if by_method.get(method)
            }
            series = [_line(m.names[method], m.rank[method], both) | area for method, both in columns.items()]
            if series:
                views.append({"task": task, "option": _small(m, name, task, series)})
        found.append(views)
    return [views for views in found if views]


def _shared_grid(given: Sequence[np.ndarray], points: int) -> np.ndarray:
    """Returns common x values for curves, so that a tooltip compares them at the same point."""
    x = np.unique(np.concatenate(given))
    return x if len(x) <= points else np.linspace(x[0], x[-1], points)


def _on_grid(grid: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns x and y of a curve [columns, points] at the grid's points and at its own ends."""
    x = columns[0]
    at = np.unique(np.concatenate((x[[0, -1]], grid[(grid > x[0]) & (grid < x[-1])])))
    return np.stack([at, *(np.interp(at, x, y) for y in columns[1:])])


def _line(name: str, i: int, columns: np.ndarray) -> dict[str, Any]:
    rows = _rows(columns[:2])
    width = 3.25 if i == 0 else 2.25 if i < _COLORS else 1.25
    return {
        "type": "line", "name": name, "data": rows, "showSymbol": len(rows) == 1, "z": 3,
        "lineStyle": {"width": width, "type": dash(i)}, "itemStyle": {"color": color(i)},
    }  # fmt: skip


def _band(name: str, i: int, columns: np.ndarray) -> list[dict[str, Any]]:
    """Returns a curve with its interval, f64 [x, value, low and high, points], for `band` in page.js."""
    around = {
        "type": "custom", "renderItem": "band", "name": name, "data": _rows(columns[[0, 2, 3]]), "z": 1, "clip": True,
        "encode": {"x": 0, "y": [1, 2]}, "itemStyle": {"color": color(i)}, "silent": True, "tooltip": {"show": False},
    }  # fmt: skip
    return [around, _line(name, i, columns)]


def color(i: int) -> str:
    """Returns the colour of method `i` by rank."""
    return f"--c{i % _COLORS}"


def dash(i: int) -> str:
    """Returns the dashes of method `i`; they differ when colours repeat."""
    return _DASHES[i // _COLORS % len(_DASHES)]


def _chart(series: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[str, Any]:
    return {
        "grid": {"left": 8, "right": 22, "top": 34, "bottom": 28, "containLabel": True},
        "xAxis": {"name": x, **_MIDDLE, **_TO_THE_END},
        "yAxis": {"type": "value", "name": y, "scale": True, "nameTextStyle": {"align": "left"}},
        "legend": {"show": False},
        "series": series,
    }


def _small(m: Measured, title: str, task: str, series: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for line in series:
        if "lineStyle" in line:
            line["lineStyle"]["width"] = 1.6
    return _chart(series, "", "") | {
        "title": {"text": f"{title}, {task}" if len(m.said["tasks"]) > 1 else title},
        "grid": {"left": 2, "right": 10, "top": 30, "bottom": 4, "containLabel": True},
        "xAxis": {"scale": True, "splitNumber": 3, **_TO_THE_END},
        "tooltip": _AT_X,
    }


def _rows(columns: np.ndarray) -> list[list[float | None]]:
    return [[_short(x) for x in row] for row in columns.T.tolist()]


def _short(value: float) -> float | None:
    """
    >>> [_short(x) for x in (500.0, 0.123456789, 1048576.0, 20.4861, float("nan"))]
    [500, 0.12346, 1048576, 20.486, None]
    """
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


# ---------------------------------------------------------------- hyper-parameters


class Swept(NamedTuple):
    """Runs of an algorithm on a task, and the hyper-parameters that differ between them."""

    task: str
    keys: Sequence[str]  # most important first
    values: Mapping[str, Sequence[float | str]]
    scores: np.ndarray  # scores at equal steps, if a scheduler stopped runs


def select_swept(m: Measured, size: Size, algo: str) -> list[Swept]:
    """Returns the runs of each task for the charts of hyper-parameters."""
    found = []
    equal = m.said["equal_steps"].get("scores", {})
    keys = [row["key"] for row in m.said["hyper_parameters"] if row["algo"] == algo]
    for task in m.said["tasks"]:
        last = {told["name"]: told["last"] for told in m.said["runs"] if told["task"] == task} | equal
        own = [run for run in m.runs.values() if run.task == task and run.config.get("algo.name") == algo]
        own = [run for run in own if last.get(run.name) is not None]
        own = sorted(own, key=lambda run: last[run.name])[-size.most :]  # the best are drawn last, on top
        common = [key for key in keys if all(key in run.config for run in own)]
        values = {key: [plain_value(run.config[key]) for run in own] for key in common}
        differ = [key for key in values if len({*values[key]}) > 1]
        if differ:
            found.append(Swept(task, differ, values, np.array([last[run.name] for run in own])))
    return found


def draw_parallel(given: Sequence[Swept]) -> Views:
    """Returns parallel coordinates: a line per run through its hyper-parameters and its score."""
    found = []
    for task, all_keys, values, scores in given:
        keys = all_keys[:_MOST_AXES]
        texts = lambda column: [*map(str, column)] if _scale(column)["type"] == "category" else column
        columns = [*(texts(values[key]) for key in keys), scores.tolist()]
        ends = [key.rpartition(".")[2] for key in keys]
        names = [end if ends.count(end) == 1 else key for key, end in zip(keys, ends)]
        axes = [{"dim": i, "name": name, **_scale(c)} for i, (name, c) in enumerate(zip([*names, "score"], columns))]
        axes[-1]["type"] = "value"
        width, opacity = (1, 0.55) if len(scores) > 100 else (1.6, 0.75)
        option = {
            "parallel": {"parallelAxisDefault": _PARALLEL_AXIS},
            "parallelAxis": axes,
            "visualMap": {"show": False, "dimension": len(keys), **_limits(scores)},
            "series": [
                {
                    "type": "parallel", "progressive": 0, "inactiveOpacity": 0.04, "activeOpacity": 0.9,
                    "lineStyle": {"width": width, "opacity": opacity}, "data": [list(row) for row in zip(*columns)],
                }
            ],
            "tooltip": {"show": False},
        }  # fmt: skip
        upright, level = (
            {"parallel": place, "parallelAxis": [axis for _ in axes]} for place, axis in (_UPRIGHT, _LEVEL)
        )
        widths = [{"query": {"maxWidth": 560}, "option": upright}, {"option": level}]
        found.append({"task": task, "option": {"baseOption": option, "media": widths}})
    return found


def draw_score_maps(given: Sequence[Swept], choice: str) -> Views:
    """Returns heat maps of the mean score over pairs of hyper-parameters, and scatter plots over each one.

    `choice` is the control that selects the pair.
    """
    found = []
    for task, all_keys, values, scores in given:
        keys = all_keys[: 5 if len(given) == 1 else 3]
        found += [
            {"task": task, choice: f"{y} over {x}", "option": _heat(x, y, values[x], values[y], scores)}
            for x, y in itertools.combinations(keys, 2)
        ]
        found += [{"task": task, choice: f"score over {x}", "option": _scatter(x, values[x], scores)} for x in keys]
    return found


def _heat(x: str, y: str, across: Sequence[Any], up: Sequence[Any], scores: np.ndarray) -> dict[str, Any]:
    (columns, i), (rows, j) = _cells(across), _cells(up)
    cells: dict[tuple[int, int], list[float]] = {}
    for key, score in zip(zip(i, j), scores.tolist()):
        cells.setdefault(key, []).append(score)
    means = {key: sum(own) / len(own) for key, own in cells.items()}
    limits = _limits(list(means.values()))
    ink = lambda score: "--on-high" if score > (limits["min"] + limits["max"]) / 2 else "--on-low"
    data = [
        {
            "value": [columns[key[0]], rows[key[1]], _short(mean), len(cells[key])],
            "label": {"color": ink(mean), "formatter": f"{mean:.3g}"},
        }
        for key, mean in means.items()
    ]
    return {
        "grid": {"left": 12, "right": 12, "top": 34, "bottom": 76, "containLabel": True},
        "xAxis": {"type": "category", "data": columns, "name": x, **_MIDDLE},
        "yAxis": {"type": "category", "data": rows, "name": y, "nameTextStyle": {"align": "left"}},
        "visualMap": {
            **limits, "dimension": 2, "orient": "horizontal", "left": "center", "bottom": 0, "itemHeight": 150,
            "itemWidth": 10, "text": [f"{limits[end]:.4g}" for end in ("max", "min")],
        },
        "tooltip": {},
        "series": [
            {
                "type": "heatmap", "dimensions": [x, y, "mean score", "runs"],
                "encode": {"x": 0, "y": 1, "tooltip": [0, 1, 2, 3]}, "data": data,
                "label": {"show": len(columns) <= _CELLS and len(rows) <= _CELLS, "fontSize": 11},
                "itemStyle": {"borderColor": "--card", "borderWidth": 2, "borderRadius": 3},
            }
        ],
    }  # fmt: skip


def _scatter(x: str, values: Sequence[Any], scores: np.ndarray) -> dict[str, Any]:
    scale = _scale(values)
    values = [str(value) for value in values] if scale["type"] == "category" else values
    levels = sorted({*values})
    middle = {level: scores[[value == level for value in values]] for level in levels}
    line = [[level, _short(float(statistics.interquartile_mean([own])))] for level, own in middle.items()]
    style = {"color": "--accent"}
    points = [list(pair) for pair in zip(values, scores.tolist())]
    series = [{"type": "scatter", "symbolSize": 6, "itemStyle": {**style, "opacity": 0.45}, "data": points}]
    if len(levels) <= _MOST_LEVELS:
        series.append({"type": "line", "itemStyle": style, "data": line, "silent": True})
    option = _chart(series, x, "score")
    option["xAxis"] = option["xAxis"] | scale
    return option | {"tooltip": {}}


def plain_value(value: Any) -> float | str:
    """Returns a config value that is a number or a text; any other value as YAML."""
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    return value if is_plain else schema.flow(value)


def _scale(values: Sequence[float | str]) -> dict[str, Any]:
    """Returns an axis: numbers, logarithmic if they differ by a factor of 30, or categories."""
    if any(isinstance(value, str) for value in values):
        return {"type": "category", "data": sorted({*map(str, values)})}
    low, high = _outwards(float(min(values)), math.floor), _outwards(float(max(values)), math.ceil)
    return {"type": "log" if low > 0 and high / low >= 30 else "value", "min": low, "max": high}


def _outwards(value: float, rounded: Callable[[float], int]) -> float:
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 3) if value else 1.0
    return float(f"{rounded(value / unit) * unit:.4g}")


def _limits(scores: Iterable[float]) -> dict[str, float]:
    low, high = float(min(scores)), float(max(scores))
    return {"min": low, "max": high if high > low else low + 1}


def _cells(values: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Returns the names of an axis' cells and the cell of each value; many numbers are grouped into ranges."""
    scale = _scale(values)
    if scale["type"] == "category":
        return scale["data"], [scale["data"].index(str(value)) for value in values]
    levels = sorted({*values})
    if len(levels) <= _MOST_LEVELS:
        return format_distinct(levels), [levels.index(value) for value in values]
    edges = (np.geomspace if scale["type"] == "log" else np.linspace)(scale["min"], scale["max"], _CELLS + 1)
    cell = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _CELLS - 1)
    return [f"{name} ..." for name in format_distinct(edges[:-1].tolist())], cell.tolist()


def format_distinct(numbers: Sequence[float]) -> list[str]:
    """Returns numbers as short as possible while no two look the same.

    >>> format_distinct([0.97, 0.9725, 0.975]), format_distinct([1000, 2000, 3001])
    (['0.97', '0.973', '0.975'], ['1000', '2000', '3000'])
    """
    for digits in range(2, 18):
        names = [f"{float(f'{x:.{digits}g}'):.12g}" for x in numbers]
        if len({*names}) == len(numbers):
            break
    return names


# ---------------------------------------------------------------- seconds


def draw_seconds(m: Measured) -> Views:
    """Returns the seconds per stage of a method's runs; []: no stage was measured."""
    found = []
    timed = [(run, stage_seconds(run)) for run in m.runs.values() if run.reached("time_s") > 0]
    for task in (ALL_TASKS, *m.said["tasks"]) if m.said["curves_over_tasks"] else m.said["tasks"]:
        rows = []
        for method in m.said["methods"]:
            own = [(run, parts) for run, parts in timed if run.method == method and task in (ALL_TASKS, run.task)]
            stages = {*itertools.chain(*(parts for _, parts in own))}
            mean = {name: sum(parts.get(name, 0) for _, parts in own) / len(own) for name in stages}
            total = sum(run.reached("time_s") for run, _ in own) / max(len(own), 1)
            if sum(mean.values()) > 0.02 * total:  # otherwise the iteration is one program without stages
                rows.append((total, m.names[method], {**mean, "rest": max(0.0, total - sum(mean.values()))}))
        if not rows:
            continue
        rows = sorted(rows, key=lambda row: row[0])[-_MOST_TIMED:]
        order = {name: i for i, name in enumerate(_STAGES)}
        names = sorted({name for *_, parts in rows for name in parts} - {"rest"}, key=lambda x: (order.get(x, 99), x))
        series = [
            {
                "type": "bar", "stack": "seconds", "name": name,
                "data": [_short(parts.get(name, 0)) for *_, parts in rows],
                "itemStyle": {"color": "--bar" if name == "rest" else color(i)}, "barMaxWidth": 22,
            }
            for i, name in enumerate([*names, "rest"])
        ]  # fmt: skip
        label = {"width": 220, "overflow": "truncate"}
        option = {
            "grid": {"left": 4, "right": 22, "top": 34, "bottom": 28, "containLabel": True},
            "xAxis": {"type": "value", "name": "seconds", **_MIDDLE},
            "yAxis": {"type": "category", "data": [name for _, name, _ in rows], "axisLabel": label},
            "legend": {"show": True, "type": "scroll", "left": 0, "top": 0},
            "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}},
            "series": series,
        }
        found.append({"task": task, "option": option, "rows": len(rows)})
    return found


def stage_seconds(run: ReportedRun) -> dict[str, float]:
    """Returns the seconds of each stage over the whole run; a row has the seconds since the previous row."""
    names = dict.fromkeys(name for row in run.rows for name in row if name.startswith("time/") and name != RECOMPILES)
    sums = {name.removeprefix("time/"): float(np.nansum(run.column(name))) for name in names}
    return {name: value for name, value in sums.items() if value > 0}
