"""End of a population: the table of its members, its best, and what is printed."""

import csv
import io
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError, counted
from jrl.host import command, faults, files
from jrl.metrics import loggers
from jrl.report import figures
from jrl.sweep.members import NOT_FINITE, Member
from jrl.sweep.schedule import point_of

BEST = "best"
FAILED = ("failed", NOT_FINITE)  # how the end of a member begins that did not end well
_OBJECTIVES = ("evaluation/return", "episode/return")  # the first that rows have
_MOST = 10  # points that are told


def _table(members: Sequence[Member], ended: Mapping[str, str], objective: str | None) -> list[dict[str, Any]]:
    """Returns a row for each member: what differs, how it ended, and its objective, last and best."""
    table = []
    for member in members:
        rows = loggers.read_rows(member.directory / "result.jsonl")
        names = (objective,) if objective else _OBJECTIVES
        name = next((n for n in names if any(is_number(row.get(n)) for row in rows)), names[-1])
        values = [row[name] for row in rows if is_number(row.get(name))]
        last, why = rows[-1] if rows else {}, ended.get(member.name, "")
        table.append({
            "member": member.name, **member.changed, "ended": why, "frozen": int(why.startswith(NOT_FINITE)),
            "env_steps": last.get("env_steps"), "updates": last.get("updates"), "time_s": last.get("time_s"),
            "objective": name, "last": values[-1] if values else math.nan, "best": max(values, default=math.nan),
        })  # fmt: skip
    return table


def _draw(directory: Path) -> None:
    """Draws the interquartile mean of each point's seeds with its interval."""
    try:
        figures.learning_curve([directory], directory / "learning_curve.png")
    except (InputError, OSError) as e:  # the population itself is whole; without a row there is nothing to draw
        print(f"learning_curve.png was not drawn: {e}", file=sys.stderr)


def is_number(value: Any) -> bool:
    """Returns whether a value of a row is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _tell_points(members: Sequence[Member], table: Sequence[Mapping[str, Any]]) -> None:
    """Prints the points of a sweep in the order of their mean over seeds, the best first."""
    points: dict[str, list[float]] = {}
    for member, row in zip(members, table, strict=True):
        points.setdefault(point_of(member.changed), []).append(row["last"])
    if len(points) < 2:
        return
    of_all = {name: sum(values) / len(values) for name, values in points.items()}
    order = sorted(of_all, key=lambda name: -of_all[name] if is_number(of_all[name]) else math.inf)
    for name in order[:_MOST]:
        print(f"  {of_all[name]:.4g}  {name}  ({counted(len(points[name]), 'seed')})")


def _write(directory: Path, table: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in table for name in row))
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(table)
    files.replace(directory / "sweep.csv", text.getvalue())


def tell(
    directory: Path,
    members: Sequence[Member],
    ended: Mapping[str, str],
    objective: str | None,
    interrupted: faults.Signals,
) -> int:
    """Writes `sweep.csv`, keeps the best member in `best/`, and prints how the population ended.

    Args:
      directory: of the population.
      members: as they are at the end.
      ended: why each ended, by name.
      objective: key of result rows whose last value says which member is best; None: an evaluation's return, or else
        that of episodes.
      interrupted: by a signal: there is no best yet.
    Returns:
      The exit status.
    """
    table = _table(members, ended, objective)
    _write(directory, table)
    if interrupted:
        print(f"interrupted: continue with --resume {directory}")
        return interrupted.exit_status or 1
    _draw(directory)
    failed = [row["member"] for row in table if str(row["ended"]).startswith(FAILED)]
    frozen = [row for row in table if row["frozen"]]
    if other := [name for name in failed if name not in {row["member"] for row in frozen}]:
        print(f"failed: {', '.join(other)}: see the end of their console.txt", file=sys.stderr)
    if frozen:
        path, names = frozen[0]["ended"].removeprefix(f"{NOT_FINITE}: "), ", ".join(row["member"] for row in frozen)
        print(
            f"frozen: {len(frozen)} of {counted(len(table), 'member')}, at the last good state before an update that "
            f"was not finite ({names}); {command.typed('debug')} {path} tells why",
            file=sys.stderr,
        )
    good = [(row["last"], i) for i, row in enumerate(table) if row["member"] not in failed and is_number(row["last"])]
    if good:
        value, i = max(good, key=lambda found: (found[0], -found[1]))
        best = directory / BEST
        shutil.rmtree(best, ignore_errors=True)
        shutil.copytree(members[i].directory, best, ignore=shutil.ignore_patterns("*.lock"))
        values = [last for last, _ in good]
        name = table[i]["objective"]
        print(f"{name}: {sum(values) / len(values):.4g} on average, {min(values):.4g} to {max(values):.4g}")
        _tell_points(members, table)
        print(f"best: member {table[i]['member']}, {value:.4g}, which is also in {best}")
    print(
        f"population: {directory}    table: {directory / 'sweep.csv'}    "
        f"evaluate: {command.typed('evaluate')} {directory / BEST}"
    )
    return 1 if failed else 0
