"""A page per algorithm, docs/algorithms/NAME.md, from its Config, its docstring, its configs and the README's tables.

    python scripts/algorithm_pages.py --write docs/algorithms/

The written parts are scripts/algorithm_notes/NAME.md: what the algorithm is for, when to use it, and how it differs
from its paper and from other implementations. tests/test_site.py compares the pages with what this script writes.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import reproduced_page  # noqa: E402

from jrl import algos  # noqa: E402
from jrl.algos.agent import Common  # noqa: E402
from jrl.fields import schema, validation  # noqa: E402
from jrl.fields.bounds import hints, range_words  # noqa: E402
from jrl.fields.data import DataSets, Fresh, Replay, traits  # noqa: E402

NOTES = Path(__file__).resolve().parent / "algorithm_notes"
_DATA = {
    Fresh: "rollouts of its own steps",
    Replay: "a [replay buffer](../replay.md), and [data sets](../data.md)",
    DataSets: "[data sets](../data.md)",
}


def cells(line: str) -> list[str]:
    """Returns the cells of a row of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def table_rows(path: Path, heading: str) -> list[list[str]]:
    """Returns the rows of the table whose first line contains `heading`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and heading in line)
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows


def from_readme(text: str) -> str:
    """Returns Markdown of README.md with links that hold in docs/algorithms/."""
    return re.sub(r"\]\((?!https?:)(docs/)?", lambda m: "](../" if m[1] else "](../../", text)


def readme_row(name: str) -> list[str]:
    """Returns actions and description of an algorithm in the README's table."""
    rows = table_rows(ROOT / "README.md", "`algo.name`")
    return next(([from_readme(cell) for cell in row[1:]] for row in rows if f"`{name}`" in row[0]), ["", ""])


def configs(name: str) -> list[tuple[str, str]]:
    """Returns name and header comment of each shipped config of an algorithm, its own name first."""
    found = []
    for path in sorted((ROOT / "configs").glob("*.yaml"), key=lambda path: (path.stem != name, path.stem)):
        text = path.read_text(encoding="utf-8")
        algo = (schema.parse(text) or {}).get("algo")
        if (algo.get("name") if isinstance(algo, dict) else algo) != name:
            continue
        lines = []
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("# "))
        found.append((path.stem, " ".join(line for line in lines if "yaml-language-server" not in line)))
    return found


def escape(text: str) -> str:
    """Returns plain text as a cell of a Markdown table."""
    return re.sub(r"([|*<>\[\]])", r"\\\1", text)


def shown(value: Any) -> str:
    """Returns a default value as YAML in one line."""
    if isinstance(value, tuple):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, float) and value == int(value) and abs(value) >= 1e4:
        return f"{value:.0f}"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def key_rows(config: Any, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Returns key, default, range or choices, and meaning of each key of a Config, with those of its sections."""
    rows = []
    docs, annotations = validation.docs(type(config)), hints(type(config))
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            chosen = validation.choices(annotations[field.name])
            if chosen:
                default = next(label for label, kind in chosen.items() if kind is type(value))
                meaning = docs.get(field.name, "") or "a section; see [config](../config.md)"
                rows.append((f"{key}.name", default, "one of " + ", ".join(chosen), meaning))
            rows += [row for row in key_rows(value, f"{key}.") if row[0] != f"{key}.name" or not chosen]
            continue
        limits = range_words(annotations[field.name])
        literal = [
            choice
            for part in (annotations[field.name], *get_args(annotations[field.name]))
            for choice in get_args(part)
        ]
        if not limits and literal and all(isinstance(choice, str) for choice in literal):
            limits = "one of " + ", ".join(literal)
        rows.append((key, shown(value), limits, escape(docs.get(field.name, ""))))
    return rows


def notes(name: str) -> str:
    """Returns the written part of an algorithm's page. Raises FileNotFoundError with the fix."""
    path = NOTES / f"{name}.md"
    if not path.exists():
        raise FileNotFoundError(f"scripts/algorithm_notes/{name}.md: expected a file, got none: write one like ppo.md")
    return path.read_text(encoding="utf-8").strip()


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table, and an empty line."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [*("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines), ""]


def key_table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Returns the table of keys of `key_rows`."""
    named = [[f"`{key}`", f"`{default}`", escape(limits), meaning] for key, default, limits, meaning in rows]
    return table(["key", "default", "range", "meaning"], named)


def measured(shipped: set[str]) -> list[list[str]]:
    """Returns the rows of the README's table of learning that belong to configs; "the same" is the row above."""
    found, last = [], ""
    for row in table_rows(ROOT / "README.md", "steps to reach it"):
        stated = re.match(r"`configs/(\w+)\.yaml`", row[0])
        last = stated[1] if stated else last
        found += [row] if last in shipped else []
    return found


def other_names(known: set[str]) -> list[list[str]]:
    """Returns the rows of docs/algorithm-names.md with one of the known names of jrl."""
    rows = table_rows(ROOT / "docs" / "algorithm-names.md", "Stable-Baselines3")
    return [row for row in rows if set(re.findall(r"`(\w+)`", row[0])) & known]


def facts(name: str, doc: str) -> list[str]:
    """Returns the table at the top of a page: actions, data, papers, source."""
    actions, what = readme_row(name)
    papers = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", doc + what))
    rows = [["actions", actions], ["learns from", _DATA[traits(algos.get_config_class(name)).learns_from]]]
    rows += [["in short", what]] if what else []
    rows += [["papers", ", ".join(f"[arXiv:{id}](https://arxiv.org/abs/{id})" for id in papers)]] if papers else []
    return table(["", ""], [*rows, ["source", f"[`jrl/algos/{name}.py`](../../jrl/algos/{name}.py)"]])


def keys(name: str) -> list[str]:
    """Returns the tables of keys: those of the algorithm or with another default, then those of all algorithms."""
    config = algos.get_config_class(name)()
    defaults = {field.name: validation.default_of(field) for field in dataclasses.fields(Common)}
    is_common = lambda key: key in defaults and defaults[key] == getattr(config, key)
    rows = key_rows(config)
    common = [row for row in rows if is_common(row[0].split(".")[0])]
    lines = [
        "## Keys",
        "",
        "Keys of `algo`. `python -m jrl.config show` prints them with the values of your config.",
        "",
    ]
    lines += key_table([row for row in rows if row not in common])
    return [*lines, "Keys that all algorithms have, with the same default:", "", *key_table(common)]


def page(name: str) -> str:
    """Returns the Markdown of an algorithm's page."""
    shipped = configs(name)
    introduction, _, sections = notes(name).partition("\n## ")
    doc = inspect.getdoc(algos.get(name)) or ""
    title, _, body = doc.partition("\n\n")
    command = f"configs/{shipped[0][0]}.yaml" if shipped else f"--algo {name}"
    heading, _, text = introduction.strip().partition("\n")
    lines = [
        heading,
        "",
        f"<!-- by scripts/algorithm_pages.py, with the text of scripts/algorithm_notes/{name}.md -->",
        "",
    ]
    lines += [text.strip(), "", "```", f"python -m jrl.train {command}", "```", "", *facts(name, doc)]
    lines += ["Spaces, masks, memory and agents that it works with: [which algorithm can do what](../matrix.md).", ""]
    lines += [f"## {sections.strip()}", ""]
    lines += ["## How it works", "", " ".join(title.split()), "", body.strip("\n"), ""]
    if shipped:
        lines += ["## Configs", "", "Run one with `jrl train NAME`. The comment is the file's own.", ""]
        lines += table(["config", "task and measured result"], [[f"`{stem}`", escape(text)] for stem, text in shipped])
    names = {stem for stem, _ in shipped}
    if rows := measured(names):
        lines += [
            "## Measured",
            "",
            "Steps to the threshold: of 5 seeds the interquartile mean, with its 95 % interval",
        ]
        lines += ['([how](../benchmarks.md#learning)). "The same" is the config of the row above.', ""]
        lines += table(["config", "task", "threshold", "steps to reach it", "seeds passed"], rows)
    if rows := [row for row in reproduced_page.results().values() if row["config"] in names]:
        lines += ["## Beside published results", ""]
        lines += ["Ours beside published means on the same task ([all rows, sources and licences](../reproduced.md))."]
        lines += ["", *table(list(reproduced_page.HEADER), [reproduced_page.cells(row) for row in rows])]
        for row in rows:
            if picture := reproduced_page.picture(row):
                lines += [f"![{row['name']}: ours and published](../images/{picture})", ""]
    if rows := other_names(names | {name}):
        lines += ["## Names in other libraries", ""]
        lines += table(["here", "Stable-Baselines3, contrib, sbx", "RLlib", "CleanRL", "Stoix"], rows)
    return "\n".join([*lines, *keys(name)]).rstrip() + "\n"


def index() -> str:
    """Returns the Markdown of the list of algorithms."""
    lines = ["# Algorithms", "", "<!-- by scripts/algorithm_pages.py -->", ""]
    lines += ["For choosing an algorithm. Each page has keys, papers, measured results, and the differences from other"]
    lines += ["implementations.", "", "```", "python -m jrl.config list    # the shipped configs"]
    lines += ["python -m jrl.train sac", "```", ""]
    short = {Fresh: "rollouts", Replay: "replay, data sets", DataSets: "data sets"}
    rows = []
    for name in algos.names():
        actions, what = readme_row(name)
        rows.append([f"[`{name}`]({name}.md)", actions, short[traits(algos.get_config_class(name)).learns_from], what])
    return "\n".join([*lines, *table(["algorithm", "actions", "learns from", "what"], rows)]).rstrip() + "\n"


def pages() -> dict[str, str]:
    """Returns the pages by file name, and an index."""
    return {"index.md": index(), **{f"{name}.md": page(name) for name in algos.names()}}


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--write", type=Path, metavar="DIR", required=True, help="directory of the pages")
    args = parser.parse_args()
    args.write.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (args.write / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
