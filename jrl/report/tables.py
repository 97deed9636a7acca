"""A report as Markdown and as JSON, of what `content.content` says."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jrl.errors import counted

_MOST_COLUMNS = 6  # of a table; of more methods each is a row


def markdown(said: Mapping[str, Any], picture: str | None = None) -> str:
    """Returns the whole report.

    Args:
      said: of `content.content`.
      picture: file name of the learning curves.
    """
    commands = [origin["commands"] for origin in said["provenance"]]
    said = _safe(said)
    parts = [_head(said), _recommendation(said), _cautions(said)]
    parts += [f"## Learning curves\n\n![learning curves]({picture})\n\n{_BAND}"] if picture else []
    parts += [_per_task(said), _aggregate(said), _improvement(said), _hyper_parameters(said)]
    parts += [_differences(said), _failures(said), _provenance(said, commands)]
    return "\n\n".join(filter(None, parts)) + "\n"


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


def _head(said: Mapping[str, Any]) -> str:
    count = f"{counted(len(said['runs']), 'run')} of {counted(len(said['methods']), 'method')}"
    lines = [f"# {', '.join(said['tasks'])}", f"{count} by {said['objective']}, over {said['axis']}."]
    return "\n\n".join([*lines, *said["notes"]])


def _recommendation(said: Mapping[str, Any]) -> str:
    if not (found := said["recommendation"]):
        return ""
    return f"## Recommendation\n\n{found['method']}: {found['why']}."


def _cautions(said: Mapping[str, Any]) -> str:
    return "## Cautions\n\n" + "\n".join(f"* {line}" for line in said["cautions"]) if said["cautions"] else ""


def _marked(said: Mapping[str, Any], method: str) -> str:
    return f"{method} (reference)" if method == said["against"] else method


def _per_task(said: Mapping[str, Any]) -> str:
    header = ("method", "seeds", "last, least to most", "best, mean (most)", "IQM", "median", "mean")
    parts = ["## Scores", _HOW]
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
        parts += [f"### {task}", table(header, rows)]
    return "\n\n".join(parts)


def _aggregate(said: Mapping[str, Any]) -> str:
    found = said["aggregate"]
    if "none" in found:
        return f"## Over tasks\n\nNone: {found['none']}." if len(said["tasks"]) > 1 else ""
    names = ("iqm", "median", "mean", "optimality_gap")
    rows = [
        (_marked(said, row["method"]), row["runs"], *(interval(row[name]) for name in names)) for row in found["rows"]
    ]
    parts = [f"## Over {counted(len(found['tasks']), 'task')}", "Of normalised scores; every task weighs the same."]
    parts += [table(("method", "runs", "IQM", "median", "mean", "optimality gap"), rows)] if rows else []
    parts += [f"{name} is left out: it has no runs on {', '.join(gaps)}." for name, gaps in found["left_out"].items()]
    return "\n\n".join(parts)


def _improvement(said: Mapping[str, Any]) -> str:
    if not said["improvement"]:
        many = len(said["methods"]) > 1
        return "## Improvement\n\nToo many methods to compare each with each: --against NAME says with which." * many
    rows = [(row["method"], row["over"], len(row["tasks"]), interval(row)) for row in said["improvement"]]
    text = "The probability that a run of a method is better than one of another, averaged over tasks: a half is none. "
    text += "An interval without width says that the runs at hand lie apart, not that all would."
    return f"## Improvement\n\n{text}\n\n{table(('method', 'over', 'tasks', 'probability'), rows)}"


def _hyper_parameters(said: Mapping[str, Any]) -> str:
    if not said["hyper_parameters"]:
        return ""
    rows = [
        (row["algo"], row["key"], row["values"], row["runs"], *map(number, numbers(row)), row["recommended"])
        for row in said["hyper_parameters"]
    ]
    header = (
        "algorithm",
        "key",
        "values",
        "runs",
        "rank correlation",
        "share of the ranks",
        "by chance",
        "recommended",
    )
    text = (
        "The rank correlation of a number with the score, and for any key the share of the variance of the scores' "
        "ranks that lies between its values, beside what chance gives. The last column is of the best method."
    )
    text = "\n\n".join(filter(None, (text, said["equal_steps"].get("note"))))
    return f"## Hyper-parameters\n\n{text}\n\n{table(header, rows)}"


def numbers(row: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Returns the measures of a hyper-parameter."""
    return row["correlation"], row["share"], row["by_chance"]


def _differences(said: Mapping[str, Any]) -> str:
    found, names = said["differences"], said["methods"]
    if not found:
        return ""
    cell = lambda key, name: " / ".join(found[key].get(name, ())) or "-"
    if len(names) <= _MOST_COLUMNS:
        text = table(("key", *names), [(f"`{key}`", *(cell(key, name) for name in names)) for key in found])
    else:
        keys = tuple(f"`{key}`" for key in found)
        text = table(("method", *keys), [(name, *(cell(key, name) for key in found)) for name in names])
    return f"## Differences of their configs\n\n{text}"


def _failures(said: Mapping[str, Any]) -> str:
    if not said["failures"]:
        return ""
    rows = [(row["name"], row["method"], row["task"], row["why"], number(row["env_steps"])) for row in said["failures"]]
    return f"## Failures\n\n{table(('run', 'method', 'task', 'why', 'env_steps'), rows)}"


def _provenance(said: Mapping[str, Any], commands: Sequence[Mapping[str, Sequence[str]]]) -> str:
    parts = ["## Where they come from"]
    for origin, typed in zip(said["provenance"], commands, strict=True):
        rows = [(name, value) for name, value in facts(origin) if value]
        parts += [f"{counted(len(origin['runs']), 'run')}:", table(("what", "value"), rows)]
        if typed:
            lines = [f"{' '.join(line.split())}  # {counted(len(own), 'run')}" for line, own in typed.items()]
            fence = "`" * (1 + max(map(len, re.findall("``+", "\n".join(["``", *lines])))))
            parts.append("\n".join([fence, *lines, fence]))
    return "\n\n".join(parts) if len(parts) > 1 else ""


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
