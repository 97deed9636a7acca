"""A report as Markdown and as JSON, from the result of `content.content`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jrl.errors import counted

MOST_COLUMNS = 6  # maximum number of methods as columns; with more, each method is a row


def to_markdown(said: Mapping[str, Any], picture: str | None = None) -> str:
    """Returns the report as Markdown; `picture` is the file name of the learning curves."""
    commands = [origin["commands"] for origin in said["provenance"]]
    said = _safe(said)
    count = f"{counted(len(said['runs']), 'run')} of {counted(len(said['methods']), 'method')}"
    parts = [f"# {', '.join(said['tasks'])}", f"{count} by {said['objective']}, over {said['axis']}.", *said["notes"]]
    if best := said["recommendation"]:
        parts.append(f"## Recommendation\n\n{best['method']}: {best['why']}.")
    if said["cautions"]:
        parts += ["## Cautions", "\n".join(f"* {line}" for line in said["cautions"])]
    if picture:
        parts += ["## Learning curves", f"![learning curves]({picture})", _BAND]
    parts += ["## Scores", _HOW, *_per_task(said), *_aggregate(said)]
    if said["improvement"]:
        rows = [(row["method"], row["over"], len(row["tasks"]), format_interval(row)) for row in said["improvement"]]
        parts += ["## Improvement", _PROBABILITY, format_table(("method", "over", "tasks", "probability"), rows)]
    elif len(said["methods"]) > 1:
        parts.append("## Improvement\n\nToo many methods to compare each with each: --against NAME says with which.")
    if found := said["hyper_parameters"]:
        names = ("algo", "key", "values", "runs", "correlation", "share", "by_chance", "recommended")
        header = ("algorithm", *names[1:4], "rank correlation", "share of the ranks", "by chance", names[-1])
        cell = lambda row, name: format_number(row[name]) if name in names[4:7] else row[name]
        parts += ["## Hyper-parameters", _INFLUENCE, *filter(None, [said["equal_steps"].get("note")])]
        parts.append(format_table(header, [[cell(row, name) for name in names] for row in found]))
    if said["differences"]:
        parts += ["## Differences of their configs", _differences(said)]
    if said["failures"]:
        lost = [(r["name"], r["method"], r["task"], r["why"], format_number(r["env_steps"])) for r in said["failures"]]
        parts += ["## Failures", format_table(("run", "method", "task", "why", "env_steps"), lost)]
    if said["provenance"]:
        parts += ["## Where they come from", *_provenance(said, commands)]
    return "\n\n".join(parts) + "\n"


def to_json(said: Mapping[str, Any]) -> str:
    """Returns the report as JSON; non-finite numbers are null."""
    return json.dumps(said, indent=1, allow_nan=False) + "\n"


def _safe(value: Any) -> Any:
    """Returns the content with all texts escaped for Markdown: no tags, links or images."""
    if isinstance(value, Mapping):
        return {_safe(key): _safe(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_safe(x) for x in value]
    return escape(value) if isinstance(value, str) else value


def escape(text: str) -> str:
    r"""Returns a text in one line, escaped for Markdown; underscores inside a word such as env_steps stay.

    >>> escape("![x](http://y) <b>"), escape("algo.lr=0.1, env_steps"), escape("# _a_")
    ('!\\[x\\](http://y) &lt;b&gt;', 'algo.lr=0.1, env_steps', '\\# \\_a\\_')
    """
    line = " ".join("".join(x if x.isprintable() else " " for x in text).split())
    line = re.sub(r"[\\*\[\]~]|^[#+=-](?=[ #=-]|$)|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "&#96;")


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; bars in cells are escaped."""
    line = lambda cells: "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def format_number(value: float | None) -> str:
    """Returns a number with four digits; a dash for None.

    >>> [format_number(x) for x in (475.0, 0.123456, 1234567.0, -0.00012, None)]
    ['475', '0.1235', '1,234,567', '-0.00012', '-']
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def format_interval(found: Mapping[str, Any]) -> str:
    """Returns a value with its interval.

    >>> format_interval({"value": 0.5, "low": 0.25, "high": 0.75})
    '0.5 [0.25, 0.75]'
    """
    inside = "" if found["low"] is None else f" [{format_number(found['low'])}, {format_number(found['high'])}]"
    return format_number(found["value"]) + inside


_BAND = (
    "A thin line is a run; the thick one is the interquartile mean of a method's runs with its 95 % interval, as far "
    "as all of them go."
)
_HOW = (
    "Intervals are 95 % percentile intervals of the stratified bootstrap (arXiv:2108.13264). IQM: the mean of the "
    "middle half. Best values are maxima over a run, and luck is in them."
)
_PROBABILITY = (
    "The probability that a run of a method is better than one of another, averaged over tasks: a half is none. An "
    "interval without width says that the runs at hand lie apart, not that all would."
)
_INFLUENCE = (
    "The rank correlation of a number with the score, and for any key the share of the variance of the scores' ranks "
    "that lies between its values, beside what chance gives. The last column is of the best method."
)


def _marked(said: Mapping[str, Any], method: str) -> str:
    return f"{method} (reference)" if method == said["against"] else method


def _per_task(said: Mapping[str, Any]) -> Iterator[str]:
    header = ("method", "seeds", "last, least to most", "best, mean (most)", "IQM", "median", "mean")
    for task in said["tasks"]:
        rows = [
            (
                _marked(said, row["method"]),
                row["seeds"],
                f"{format_number(row['last']['least'])} to {format_number(row['last']['most'])}",
                f"{format_number(row['best']['mean'])} ({format_number(row['best']['most'])})",
                *(format_interval(row[name]) for name in ("iqm", "median", "mean")),
            )
            for row in said["per_task"]
            if row["task"] == task
        ]
        yield f"### {task}\n\n{format_table(header, rows)}"


def _aggregate(said: Mapping[str, Any]) -> Iterator[str]:
    found = said["aggregate"]
    if "none" in found:
        if len(said["tasks"]) > 1:
            yield f"## Over tasks\n\nNone: {found['none']}."
        return
    names = ("iqm", "median", "mean", "optimality_gap")
    rows = [
        (_marked(said, row["method"]), row["runs"], *(format_interval(row[name]) for name in names))
        for row in found["rows"]
    ]
    yield f"## Over {counted(len(found['tasks']), 'task')}\n\nOf normalised scores; every task weighs the same."
    if rows:
        yield format_table(("method", "runs", "IQM", "median", "mean", "optimality gap"), rows)
    yield from (f"{name} is left out: it has no runs on {', '.join(gaps)}." for name, gaps in found["left_out"].items())


def _differences(said: Mapping[str, Any]) -> str:
    found, names = said["differences"], said["methods"]
    cell = lambda key, name: " / ".join(found[key].get(name, ())) or "-"
    if len(names) <= MOST_COLUMNS:
        return format_table(("key", *names), [(f"`{key}`", *(cell(key, name) for name in names)) for key in found])
    keys = tuple(f"`{key}`" for key in found)
    return format_table(("method", *keys), [(name, *(cell(key, name) for key in found)) for name in names])


def _provenance(said: Mapping[str, Any], commands: Sequence[Mapping[str, Sequence[str]]]) -> Iterator[str]:
    for origin, typed in zip(said["provenance"], commands, strict=True):
        rows = [(name, value) for name, value in facts(origin) if value]
        yield f"{counted(len(origin['runs']), 'run')}:\n\n{format_table(('what', 'value'), rows)}"
        if typed:
            lines = [f"{' '.join(line.split())}  # {counted(len(own), 'run')}" for line, own in typed.items()]
            fence = "`" * (1 + max(map(len, re.findall("``+", "\n".join(["``", *lines])))))
            yield "\n".join([fence, *lines, fence])


def facts(origin: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields name and text of each fact about the origin of runs; a text may be empty."""
    git, cpu = origin.get("git") or {}, origin.get("cpu") or {}
    changed = " with changes that are in no commit" * bool(git.get("dirty"))
    yield "commit", f"{git['commit']}{changed}" if git.get("commit") else ""
    yield "versions", ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items() if version)
    yield "machine", str(origin.get("platform") or "")
    yield "CPU", f"{cpu.get('model')}, {cpu.get('usable')} of {cpu.get('count')} cores" if cpu else ""
    yield "memory", f"{origin['memory_gib']} GiB" if origin.get("memory_gib") else ""
    yield "devices", ", ".join(origin.get("devices", ()))
