"""Adds finished rows of `jrl reproduce` to docs/reproduced.json, and writes docs/reproduced.md and its pictures.

    python scripts/reproduced_page.py --add runs/reproduce/sac-halfcheetah-50k    # and again without --add
    python scripts/algorithm_pages.py --write docs/algorithms/                    # their tables and pictures

A row of the same name is replaced. Figures are never written by hand.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jrl.metrics import plots  # noqa: E402
from jrl.report import published  # noqa: E402
from jrl.report.tables import format_number, format_table  # noqa: E402
from jrl.reproduce import __main__ as reproduce  # noqa: E402

DOCS = ROOT / "docs"
HEADER = ("row", "task", "after steps", "ours: mean ± deviation (seeds)", "published: mean ± deviation (seeds)",
          "difference ± band", "verdict")  # fmt: skip

HEAD = """# Reproduced results

<!-- by scripts/reproduced_page.py from reproduced.json -->

For checking jrl against published numbers: the same task, steps and measurement, ours beside theirs. One command trains
the seeds of a row and compares them:

```bash
python -m jrl.reproduce --list
python -m jrl.reproduce ppo-pendulum
```"""
HOW = "[How they are compared](reports.md#published-results)."
TRIED = """Every row that was run is here, with all of its complete seeds: 1, 2, ... Most had one setting. For SAC
on HalfCheetah [two step sizes](benchmarks.md#sac-on-halfcheetah-v4) were tried, for PPO on HalfCheetah, Hopper and
Walker2d [two ways to normalise advantages](benchmarks.md#ppo-on-mujoco), on the same seeds; the better one is here.
A row with one seed says little: its band is wide."""


def results() -> dict[str, dict[str, Any]]:
    """Returns the stored rows by name, in the order of `jrl reproduce --list`."""
    found = json.loads((DOCS / "reproduced.json").read_text(encoding="utf-8"))
    return {name: found[name] for name in published.reproducible() if name in found}


def cells(row: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a row under HEADER."""
    theirs = row["published"]
    found = published.compare(row["returns"], theirs["mean"], theirs["sd"], theirs["seeds"])
    spread = f" ± {format_number(found.deviation)}" if found.seeds > 1 else ""
    band = "" if found.half_width != found.half_width else f" ± {format_number(found.half_width)}"
    count = "1 run; over episodes" if theirs["deviation"] == "episodes" else theirs["seeds"]
    return [
        f"`{row['name']}`", f"{theirs['algorithm']}, {row['task']}", f"{row['steps']:,}",
        f"{format_number(found.ours)}{spread} ({found.seeds})",
        f"{format_number(theirs['mean'])} ± {format_number(theirs['sd'])} ({count})",
        f"{format_number(found.difference)}{band}", found.verdict,
    ]  # fmt: skip


def picture(row: Mapping[str, Any]) -> str | None:
    """Returns the name of a row's picture in docs/images; None: the published result is a single point."""
    curve = published.of_row(published.reproducible()[row["name"]])
    return f"reproduced-{row['name']}.png" if len(curve.steps) > 1 else None


def draw(row: Mapping[str, Any], png: Path) -> None:
    """Draws our mean and deviation over the published ones."""
    curve = published.of_row(published.reproducible()[row["name"]])
    figure = plots.make_figure((4.0, 2.6))
    axes = figure.add_subplot()
    last = row["curve"]["steps"][-1]
    at = curve.steps <= max(1.1 * last, curve.steps[0])
    ours = [row["curve"][key] for key in ("steps", "mean", "deviation")]
    count = "1 run" if curve.source.deviation == "episodes" else f"{curve.seeds} seeds"
    theirs = (curve.steps[at], curve.mean[at], curve.deviation[at])
    labels = (f"jrl ({len(row['seeds'])} seeds)", f"{curve.source.repository} ({count})")
    for i, (label, (x, mean, spread)) in enumerate(zip(labels, (ours, theirs))):
        axes.plot(x, mean, color=f"C{i}", label=label, linestyle="-" if i == 0 else "--")
        low, high = ([m + sign * s for m, s in zip(mean, spread)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
    axes.set(title=f"{curve.algorithm}, {row['task']}", xlabel="environment steps", ylabel="return")
    plots.style(axes)
    axes.legend(fontsize=7, framealpha=0.85, edgecolor="none")
    plots.save(figure, png)


def page() -> str:
    """Returns the Markdown of docs/reproduced.md."""
    rows = results()
    inside = sum(cells(row)[-1] == "inside" for row in rows.values())
    lines = [HEAD, ""]
    lines += [f"{len(rows)} rows were run; {inside} are inside the band. {HOW}", ""]
    lines += [format_table(HEADER, [cells(row) for row in rows.values()]), "", TRIED, ""]
    for name, row in rows.items():
        theirs = row["published"]
        lines += [f"## {name}", ""]
        lines += [f"![{name}: ours and published](images/{picture(row)})", ""] if picture(row) else []
        known = len(published.reproducible()[name].get("set", ()))
        overrides = f" with {known} overrides" if known else ""
        lines += [
            f"* Ours: `configs/{row['config']}.yaml`{overrides}; settings: {row['settings']}. Returns of the seeds: "
            + ", ".join(format_number(x) for x in row["returns"]) + f". Commits: {', '.join(row['commits'])}.",
            f"* Published: {theirs['repository']} at {theirs['commit'][:12]}, `{theirs['file']}`, {theirs['licence']}. "
            f"Measured: {theirs['evaluation']}; our `{theirs['metric']}`.",
            "",
        ]  # fmt: skip
    missing = [f"`{name}`" for name in published.reproducible() if name not in rows]
    if missing:
        lines += ["## Not run yet", "", f"`jrl reproduce` has these rows, too: {', '.join(missing)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    p.add_argument("--add", nargs="+", type=Path, default=[], metavar="DIR", help="directories of `jrl reproduce`")
    args = p.parse_args()
    store = DOCS / "reproduced.json"
    found = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    for directory in args.add:
        row = json.loads((directory / reproduce.RESULT).read_text(encoding="utf-8"))
        found[row["name"]] = row
    lines = [f"{json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in sorted(found.items())]
    store.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for row in results().values():
        if name := picture(row):
            draw(row, DOCS / "images" / name)
    (DOCS / "reproduced.md").write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
