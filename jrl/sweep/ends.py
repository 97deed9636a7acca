"""End of a population: the table of its members, its best, and what is printed."""

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
from jrl.sweep.members import Member
from jrl.sweep.schedule import point_of

BEST = "best"
FAILED = ("failed", interruption.NOT_FINITE)  # how the end of a member begins that did not end well
STOPPED = "stopped at"  # how the end of a member begins that a scheduler has stopped
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
        why = _failure(member, why) or why
        table.append({
            "member": member.name, **member.changed, "ended": why,
            "frozen": int(why.startswith(interruption.NOT_FINITE)),
            "env_steps": last.get("env_steps"), "updates": last.get("updates"), "time_s": last.get("time_s"),
            "objective": name, "last": values[-1] if values else math.nan, "best": max(values, default=math.nan),
        })  # fmt: skip
    return table


def _failure(member: Member, why: str) -> str:
    """Returns why a member failed that ended by itself: it made no update. "" if it did not fail."""
    from jrl.run import reporter
    from jrl.run.store import checkpoint

    if not checkpoint.exists(member.directory) or why.startswith((*FAILED, STOPPED, "interrupted")):
        return ""
    metrics = checkpoint.read_meta(checkpoint.locate(member.directory)).get("metrics", {})
    fault = reporter.without_update(metrics, member.config.replay)
    return f"{FAILED[0]}: {fault}" if fault else ""


def is_number(value: Any) -> bool:
    """Returns whether a value of a row is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


class Point(NamedTuple):
    """A point of a sweep and its seeds."""

    name: str  # values as typed; "" where members differ in their seeds alone
    members: list[int]  # numbers of its seeds, the best first, those that failed last
    budget: float  # steps at which a scheduler stopped it; inf: it was trained to its end
    score: float  # mean objective of the seeds that have one; NaN: none has
    failed: int  # number of seeds that failed or have no objective


def ranked(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Point]:
    """Returns the points of a sweep, the best first: those trained longest, and of these by the mean of their seeds.

    A score after fewer steps is not comparable: a point that was stopped early stands below each that went on. A point
    with a failed seed stands below those of its budget without one. `table` has each member's row, `names` its point.
    """
    budget = lambda why: float(why.removeprefix(STOPPED)) if why.startswith(STOPPED) else math.inf
    points = []
    for name in dict.fromkeys(names):
        scores = {i: _score(table[i]) for i, own in enumerate(names) if own == name}
        good = sorted((i for i in scores if is_number(scores[i])), key=lambda i: -scores[i])
        mean = sum(scores[i] for i in good) / len(good) if good else math.nan
        order = good + [i for i in scores if i not in good]
        points.append(
            Point(name, order, min(budget(str(table[i]["ended"])) for i in scores), mean, len(scores) - len(good))
        )
    place = lambda point: (math.isnan(point.score), -point.budget, point.failed, -point.score)
    return sorted(points, key=place)


def _score(row: Mapping[str, Any]) -> float:
    return math.nan if str(row["ended"]).startswith(FAILED) else row["last"]


def tell(
    directory: Path,
    members: Sequence[Member],
    ended: Mapping[str, str],
    objective: str | None,
    interrupted: interruption.Signals,
) -> int:
    """Writes `sweep.csv`, keeps the best seed of the best point in `best/`, and prints how the population ended.

    Args:
      directory: of the population.
      members: as they are at the end.
      ended: why each ended, by name.
      objective: key of result rows; None: an evaluation's return, or else that of episodes.
      interrupted: by a signal: there is no best yet.
    Returns:
      The exit status.
    """
    table = _table(members, ended, objective)
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
    except (InputError, OSError) as e:  # the population itself is whole; without a row there is nothing to draw
        print(f"learning_curve.png was not drawn: {e}", file=sys.stderr)
    failed = [row["member"] for row in table if str(row["ended"]).startswith(FAILED)]
    frozen = [row for row in table if row["frozen"]]
    other = {row["member"]: row["ended"] for row in table if row["member"] in failed and not row["frozen"]}
    if other:
        whys = dict.fromkeys(why.removeprefix("failed: ") for why in other.values())
        said = any((member.directory / "console.txt").exists() for member in members if member.name in other)
        more = ": see the end of their console.txt" if said else ""
        print(f"failed: {', '.join(other)}: {'; '.join(whys)}{more}", file=sys.stderr)
    if frozen:
        path = frozen[0]["ended"].removeprefix(f"{interruption.NOT_FINITE}: ")
        names = ", ".join(row["member"] for row in frozen)
        print(
            f"frozen: {len(frozen)} of {counted(len(table), 'member')}, at the last good state before an update that "
            f"was not finite ({names}); {command.format_command('debug')} {path} tells why",
            file=sys.stderr,
        )
    points = ranked(table, [point_of(member.changed) for member in members])
    best, good = points[0], [row["last"] for row in table if is_number(_score(row))]
    if good:
        i = best.members[0]
        shutil.rmtree(directory / BEST, ignore_errors=True)
        shutil.copytree(members[i].directory, directory / BEST, ignore=shutil.ignore_patterns("*.lock"))
        name = table[i]["objective"]
        print(f"{name}: {sum(good) / len(good):.4g} on average, {min(good):.4g} to {max(good):.4g}")
        of = ""
        if len(points) > 1:
            for point in points[:_MOST]:
                seeds = counted(len(point.members), "seed")
                seeds += f", {point.failed} without a score" if point.failed else ""
                stopped = f", {STOPPED} {point.budget:,.0f} steps" if point.budget < math.inf else ""
                print(f"  {point.score:.4g}  {point.name}  ({seeds}{stopped})")
            of = f", the best seed of {best.name}"
        print(f"best: member {table[i]['member']}, {table[i]['last']:.4g}{of}, which is also in {directory / BEST}")
    print(
        f"population: {directory}    table: {directory / 'sweep.csv'}    "
        f"evaluate: {command.format_command('evaluate')} {directory / BEST}"
    )
    return 1 if failed else 0
