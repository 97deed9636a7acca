"""Trains a population from its beginning, or on from where it was, and tells how it ended."""

import contextlib
import csv
import io
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError, counted
from jrl.fields.plain_yaml import flow
from jrl.host import command, faults, files, output
from jrl.metrics import loggers
from jrl.report import figures
from jrl.settings.config import RunConfig
from jrl.sweep import members as populations
from jrl.sweep.members import Member

BEST = "best"
_OBJECTIVES = ("evaluation/return", "episode/return")  # the first that rows have


def train(
    cfg: RunConfig,
    directory: Path,
    changes: Sequence[Mapping[str, Any]] | None,
    transcript: output.Transcript,
    *,
    processes: int | None = None,
    objective: str | None = None,
) -> int:
    """Trains the members of a population; `sweep.csv` and `best/` of its directory tell what became of them.

    Args:
      cfg: what members have in common.
      directory: of the population.
      changes: what differs, by dotted key, of each member; None: a population that was begun before goes on.
      transcript: of what is printed.
      processes: so many members at once in processes of their own; None: one program, where that can be.
      objective: key of result rows whose last value says which member is best; None: an evaluation's return, or else
        that of episodes.
    Returns:
      The exit status: 0; 1 where a member failed; 129, 130 or 143 after a signal.
    Raises:
      InputError: what cannot be run.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.held(directory))
        if changes is None:
            changes = populations.read(directory)
            members = populations.of(cfg, directory, changes)
        else:
            members = populations.of(cfg, directory, changes)
            if (directory / "config.yaml").exists():
                raise InputError(f"run.out: {directory} holds a run already: add --resume, or choose another --out")
            populations.write(cfg, directory, members)
        interrupted = stack.enter_context(faults.signals())
        stack.enter_context(faults.stacks_on_request())
        ended = _trained(members, directory, transcript, interrupted, processes)
        table = _table(members, ended, objective)
        _write(directory, table)
        if not interrupted:
            _draw(directory)
        return _tell(directory, members, table, interrupted)


def _trained(
    members: Sequence[Member],
    directory: Path,
    transcript: output.Transcript,
    interrupted: faults.Signals,
    processes: int | None,
) -> dict[str, str]:
    """Why each member ended, by name: those that can be one program together, unless somebody asks for processes."""
    from jrl.run import build_population
    from jrl.sweep import processes as apart
    from jrl.sweep import together

    alone, ended = list(members), dict[str, str]()
    if processes is None:
        groups, alone = build_population.grouped([member.config for member in members]), []
        for numbers, why in groups:
            group = [members[i] for i in numbers]
            try:
                if not why:
                    ended |= together.train(group, directory, transcript, interrupted)
            except build_population.NotOneProgram as e:
                (why,) = e.errors
            if why:
                print(f"{', '.join(member.name for member in group)}: not one program: {why}")
                alone += group
            if interrupted:
                return {**dict.fromkeys((member.name for member in members), "interrupted"), **ended}
    if alone:
        ended |= apart.train(alone, directory, processes or max(1, (os.cpu_count() or 1) // 2), interrupted)
    return ended


def _table(members: Sequence[Member], ended: Mapping[str, str], objective: str | None) -> list[dict[str, Any]]:
    """A row for each member: what differs, how it ended, and its objective, last and best."""
    table = []
    for member in members:
        rows = loggers.read_rows(member.directory / "result.jsonl")
        names = (objective,) if objective else _OBJECTIVES
        name = next((n for n in names if any(_is_number(row.get(n)) for row in rows)), names[-1])
        values = [row[name] for row in rows if _is_number(row.get(name))]
        last = rows[-1] if rows else {}
        table.append({
            "member": member.name, **member.changed, "ended": ended.get(member.name, ""),
            "env_steps": last.get("env_steps"), "updates": last.get("updates"), "time_s": last.get("time_s"),
            "objective": name, "last": values[-1] if values else math.nan, "best": max(values, default=math.nan),
        })  # fmt: skip
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_MOST = 10  # points that are told


def _tell_points(members: Sequence[Member], table: Sequence[Mapping[str, Any]]) -> None:
    """Prints the points of a sweep in the order of their mean over seeds, the best first."""
    points: dict[str, list[float]] = {}
    for member, row in zip(members, table, strict=True):
        name = ", ".join(f"{key}={flow(value)}" for key, value in member.changed.items() if key != "run.seed")
        points.setdefault(name, []).append(row["last"])
    if len(points) < 2:
        return
    of_all = {name: sum(values) / len(values) for name, values in points.items()}
    order = sorted(of_all, key=lambda name: -of_all[name] if _is_number(of_all[name]) else math.inf)
    for name in order[:_MOST]:
        print(f"  {of_all[name]:.4g}  {name}  ({counted(len(points[name]), 'seed')})")


def _write(directory: Path, table: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in table for name in row))
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(table)
    files.replace(directory / "sweep.csv", text.getvalue())


def _draw(directory: Path) -> None:
    """Draws the interquartile mean of each point's seeds with its interval."""
    try:
        figures.learning_curve([directory], directory / "learning_curve.png")
    except (InputError, OSError) as e:  # the population itself is whole; without a row there is nothing to draw
        print(f"learning_curve.png was not drawn: {e}", file=sys.stderr)


def _tell(
    directory: Path, members: Sequence[Member], table: Sequence[Mapping[str, Any]], interrupted: faults.Signals
) -> int:
    """Prints how the population ended, and keeps its best member; the exit status."""
    if interrupted:
        print(f"interrupted: continue with --resume {directory}")
        return interrupted.exit_status or 1
    failed = [row["member"] for row in table if str(row["ended"]).startswith(("failed", "not finite"))]
    if failed:
        print(f"failed: {', '.join(failed)}: see the end of their log.txt or console.txt", file=sys.stderr)
    good = [(row["last"], i) for i, row in enumerate(table) if row["member"] not in failed and _is_number(row["last"])]
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
