"""End of a population: the table of its members, its best member, and the printed summary."""

import csv
import io
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.errors import InputError, counted
from jrl.host import command, files, interruption
from jrl.metrics import loggers
from jrl.report import figures
from jrl.sweep.members import MemberSpec
from jrl.sweep.schedule import format_point

BEST = "best"
FAILED = ("failed", interruption.NOT_FINITE)  # prefixes of a failed member's end reason
STOPPED = "stopped at"  # prefix of the end reason of a member that a scheduler stopped
_OBJECTIVES = ("evaluation/return", "episode/return")  # default objective: the first key that rows have
_PRINTED_POINTS = 10


def _build_table(
    members: Sequence[MemberSpec], ended: Mapping[str, str], objective: str | None
) -> list[dict[str, Any]]:
    table = []
    for member in members:
        rows = loggers.read_rows(member.directory / "result.jsonl")
        names = (objective,) if objective else _OBJECTIVES
        name = next((n for n in names if any(is_finite_number(row.get(n)) for row in rows)), names[-1])
        values = [row[name] for row in rows if is_finite_number(row.get(name))]
        last, why = rows[-1] if rows else {}, ended.get(member.name, "")
        why = _find_failure(member, why) or why
        table.append({
            "member": member.name, **member.values, "ended": why,
            "frozen": int(why.startswith(interruption.NOT_FINITE)),
            "env_steps": last.get("env_steps"), "updates": last.get("updates"), "time_s": last.get("time_s"),
            "objective": name, "last": values[-1] if values else math.nan, "best": max(values, default=math.nan),
        })  # fmt: skip
    return table


def _find_failure(member: MemberSpec, why: str) -> str:
    """Return the failure of a member that reached its end without an update; "": no failure."""
    from jrl.run import reporter
    from jrl.run.store import checkpoint

    if not checkpoint.exists(member.directory) or why.startswith((*FAILED, STOPPED, "interrupted")):
        return ""
    metrics = checkpoint.read_meta(checkpoint.locate(member.directory)).get("metrics", {})
    fault = reporter.explain_no_update(metrics, member.config.replay)
    return f"{FAILED[0]}: {fault}" if fault else ""


def is_finite_number(value: Any) -> bool:
    """Return whether a value of a row is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


class RankedPoint(NamedTuple):
    """Seeds and score of a point of a sweep."""

    name: str  # values as typed; "" if members differ only in their seeds
    members: list[int]  # indices of its seeds, the best first, failed ones last
    budget: float  # steps at which a scheduler stopped it; inf: not stopped
    score: float  # mean objective over the seeds with an objective; NaN: no such seed
    failed: int  # number of seeds that failed or have no objective


def rank_points(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[RankedPoint]:
    """Return the points of a sweep, the best first: longest training first, then the highest mean over seeds.

    Scores after different numbers of steps are not comparable, so a stopped point ranks below the points that
    continued. Among points of the same budget, points with failed seeds rank last.

    Args:
      table: row of each member.
      names: name of each member's point.
    """
    budget = lambda why: float(why.removeprefix(STOPPED)) if why.startswith(STOPPED) else math.inf
    points = []
    for name in dict.fromkeys(names):
        scores = {i: _find_score(table[i]) for i, other in enumerate(names) if other == name}
        good = sorted((i for i in scores if is_finite_number(scores[i])), key=lambda i: -scores[i])
        mean = sum(scores[i] for i in good) / len(good) if good else math.nan
        order = good + [i for i in scores if i not in good]
        steps = min(budget(str(table[i]["ended"])) for i in scores)
        points.append(RankedPoint(name, order, steps, mean, len(scores) - len(good)))
    return sorted(points, key=lambda point: (math.isnan(point.score), -point.budget, point.failed, -point.score))


def _find_score(row: Mapping[str, Any]) -> float:
    return math.nan if str(row["ended"]).startswith(FAILED) else row["last"]


def report_end(
    directory: Path,
    members: Sequence[MemberSpec],
    ended: Mapping[str, str],
    objective: str | None,
    interrupted: interruption.Signals,
) -> int:
    """Write `sweep.csv`, copy the best seed of the best point to `best/`, and print a summary.

    Args:
      directory: directory of the population.
      members: members with their latest values.
      ended: end reason of each member by name.
      objective: key of result rows; None: the return of evaluations, otherwise of episodes.
      interrupted: received signals; after a signal there is no best member yet.
    Returns:
      The exit status.
    """
    table = _build_table(members, ended, objective)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in table for name in row)))
    writer.writeheader()
    writer.writerows(table)
    files.replace(directory / "sweep.csv", text.getvalue())
    if interrupted:
        print(f"interrupted: continue with --resume {directory}")
        return interrupted.exit_status or 1
    try:
        figures.plot_runs([directory], directory / "learning_curve.png")
    except (InputError, OSError) as e:  # the members are complete; without rows the figure has no content
        print(f"learning_curve.png was not drawn: {e}", file=sys.stderr)
    failed = [row["member"] for row in table if str(row["ended"]).startswith(FAILED)]
    _print_failures(members, table, failed)
    points = rank_points(table, [format_point(member.values) for member in members])
    best, scores = points[0], [row["last"] for row in table if is_finite_number(_find_score(row))]
    if scores:
        i = best.members[0]
        shutil.rmtree(directory / BEST, ignore_errors=True)
        shutil.copytree(members[i].directory, directory / BEST, ignore=shutil.ignore_patterns("*.lock"))
        name = table[i]["objective"]
        print(f"{name}: {sum(scores) / len(scores):.4g} on average, {min(scores):.4g} to {max(scores):.4g}")
        origin = ""
        if len(points) > 1:
            for point in points[:_PRINTED_POINTS]:
                seeds = counted(len(point.members), "seed")
                seeds += f", {point.failed} without a score" if point.failed else ""
                stopped = f", {STOPPED} {point.budget:,.0f} steps" if point.budget < math.inf else ""
                print(f"  {point.score:.4g}  {point.name}  ({seeds}{stopped})")
            origin = f", the best seed of {best.name}"
        print(f"best: member {table[i]['member']}, {table[i]['last']:.4g}{origin}, copied to {directory / BEST}")
    print(
        f"population: {directory}    table: {directory / 'sweep.csv'}    "
        f"evaluate: {command.format_command('evaluate')} {directory / BEST}"
    )
    return 1 if failed else 0


def _print_failures(members: Sequence[MemberSpec], table: Sequence[Mapping[str, Any]], failed: Sequence[str]) -> None:
    frozen = [row for row in table if row["frozen"]]
    other = {row["member"]: row["ended"] for row in table if row["member"] in failed and not row["frozen"]}
    if other:
        reasons = dict.fromkeys(why.removeprefix("failed: ") for why in other.values())
        has_console = any((member.directory / "console.txt").exists() for member in members if member.name in other)
        hint = ": see the end of their console.txt" if has_console else ""
        print(f"failed: {', '.join(other)}: {'; '.join(reasons)}{hint}", file=sys.stderr)
    if frozen:
        path = frozen[0]["ended"].removeprefix(f"{interruption.NOT_FINITE}: ")
        names = ", ".join(row["member"] for row in frozen)
        print(
            f"frozen: {len(frozen)} of {counted(len(table), 'member')}, at the last good state before an update that "
            f"was not finite ({names}); {command.format_command('debug')} {path} reports why",
            file=sys.stderr,
        )
