"""A report as Markdown and as JSON, of what `content.content` says."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jrl.errors import counted

MOST_COLUMNS = 6  # most methods that are columns of a table; with more, each method is a row


def markdown(said: Mapping[str, Any], picture: str | None = None) -> str:
    """Returns the whole report of what `content.content` said; `picture` is the file name of the learning curves."""
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
        rows = [(row["method"], row["over"], len(row["tasks"]), interval(row)) for row in said["improvement"]]
        parts += ["## Improvement", _PROBABILITY, table(("method", "over", "tasks", "probability"), rows)]
    elif len(said["methods"]) > 1:
        parts.append("## Improvement\n\nToo many methods to compare each with each: --against NAME says with which.")
    if found := said["hyper_parameters"]:
        names = ("algo", "key", "values", "runs", "correlation", "share", "by_chance", "recommended")
        header = ("algorithm", *names[1:4], "rank correlation", "share of the ranks", "by chance", names[-1])
        cell = lambda row, name: number(row[name]) if name in names[4:7] else row[name]
        parts += ["## Hyper-parameters", _INFLUENCE, *filter(None, [said["equal_steps"].get("note")])]
        parts.append(table(header, [[cell(row, name) for name in names] for row in found]))
    if said["differences"]:
        parts += ["## Differences of their configs", _differences(said)]
    if said["failures"]:
        lost = [(r["name"], r["method"], r["task"], r["why"], number(r["env_steps"])) for r in said["failures"]]
        parts += ["## Failures", table(("run", "method", "task", "why", "env_steps"), lost)]
    if said["provenance"]:
        parts += ["## Where they come from", *_provenance(said, commands)]
    return "\n\n".join(parts) + "\n"


def to_json(said: Mapping[str, Any]) -> str:
    """Returns the same as JSON; numbers that are not finite are null."""
    return json.dumps(said, indent=1, allow_nan=False) + "\n"


def _safe(value: Any) -> Any:
    """Returns the same with all names and texts so that Markdown shows them as they are: no tags, links or pictures."""
    if isinstance(value, Mapping):
        return {_safe(key): _safe(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_safe(x) for x in value]
    return escaped(value) if isinstance(value, str) else value


def escaped(text: str) -> str:
    r"""Returns a text, in one line, that Markdown shows as it is; the inside of a word such as env_steps stays.

    >>> escaped("![x](http://y) <b>"), escaped("algo.lr=0.1, env_steps"), escaped("# _a_")
    ('!\\[x\\](http://y) &lt;b&gt;', 'algo.lr=0.1, env_steps', '\\# \\_a\\_')
    """
    line = " ".join("".join(x if x.isprintable() else " " for x in text).split())
    line = re.sub(r"[\\*\[\]~]|^[#+=-](?=[ #=-]|$)|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "&#96;")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; bars in its cells do not end them."""
    line = lambda cells: "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def number(value: float | None) -> str:
    """Returns a number to four digits; a dash for one that is not there.

    >>> [number(x) for x in (475.0, 0.123456, 1234567.0, -0.00012, None)]
    ['475', '0.1235', '1,234,567', '-0.00012', '-']
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def interval(found: Mapping[str, Any]) -> str:
    """Returns a value with its interval.

    >>> interval({"value": 0.5, "low": 0.25, "high": 0.75})
    '0.5 [0.25, 0.75]'
    """
    inside = "" if found["low"] is None else f" [{number(found['low'])}, {number(found['high'])}]"
    return number(found["value"]) + inside


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
                f"{number(row['last']['least'])} to {number(row['last']['most'])}",
                f"{number(row['best']['mean'])} ({number(row['best']['most'])})",
                *(interval(row[name]) for name in ("iqm", "median", "mean")),
            )
            for row in said["per_task"]
            if row["task"] == task
        ]
        yield f"### {task}\n\n{table(header, rows)}"


def _aggregate(said: Mapping[str, Any]) -> Iterator[str]:
    found = said["aggregate"]
    if "none" in found:
        if len(said["tasks"]) > 1:
            yield f"## Over tasks\n\nNone: {found['none']}."
        return
    names = ("iqm", "median", "mean", "optimality_gap")
    rows = [
        (_marked(said, row["method"]), row["runs"], *(interval(row[name]) for name in names)) for row in found["rows"]
    ]
    yield f"## Over {counted(len(found['tasks']), 'task')}\n\nOf normalised scores; every task weighs the same."
    if rows:
        yield table(("method", "runs", "IQM", "median", "mean", "optimality gap"), rows)
    yield from (f"{name} is left out: it has no runs on {', '.join(gaps)}." for name, gaps in found["left_out"].items())


def _differences(said: Mapping[str, Any]) -> str:
    found, names = said["differences"], said["methods"]
    cell = lambda key, name: " / ".join(found[key].get(name, ())) or "-"
    if len(names) <= MOST_COLUMNS:
        return table(("key", *names), [(f"`{key}`", *(cell(key, name) for name in names)) for key in found])
    keys = tuple(f"`{key}`" for key in found)
    return table(("method", *keys), [(name, *(cell(key, name) for key in found)) for name in names])


def _provenance(said: Mapping[str, Any], commands: Sequence[Mapping[str, Sequence[str]]]) -> Iterator[str]:
    for origin, typed in zip(said["provenance"], commands, strict=True):
        rows = [(name, value) for name, value in facts(origin) if value]
        yield f"{counted(len(origin['runs']), 'run')}:\n\n{table(('what', 'value'), rows)}"
        if typed:
            lines = [f"{' '.join(line.split())}  # {counted(len(own), 'run')}" for line, own in typed.items()]
            fence = "`" * (1 + max(map(len, re.findall("``+", "\n".join(["``", *lines])))))
            yield "\n".join([fence, *lines, fence])


def facts(origin: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each fact about the origin of runs; a text may be empty."""
    git, cpu = origin.get("git") or {}, origin.get("cpu") or {}
    changed = " with changes that are in no commit" * bool(git.get("dirty"))
    yield "commit", f"{git['commit']}{changed}" if git.get("commit") else ""
    yield "versions", ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items() if version)
    yield "machine", str(origin.get("platform") or "")
    yield "CPU", f"{cpu.get('model')}, {cpu.get('usable')} of {cpu.get('count')} cores" if cpu else ""
    yield "memory", f"{origin['memory_gib']} GiB" if origin.get("memory_gib") else ""
    yield "devices", ", ".join(origin.get("devices", ()))
