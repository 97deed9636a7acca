"""End of a population: the table of its members, its best member, and the printed summary."""

import csv
import io
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError, counted
from jrl.host import command, files, interruption
from jrl.metrics import loggers
from jrl.report import content, figures
from jrl.report.runs import FINISHED, NOT_FINITE, ReportedRun
from jrl.sweep.members import FAILED, MemberSpec
from jrl.sweep.schedule import format_point

BEST = "best"
STOPPED = "stopped at"  # prefix of the end reason of a member that a scheduler stopped
_OBJECTIVES = ("evaluation/return", "episode/return")  # default objective: the first key that rows have
_PRINTED_POINTS = 10


def _read_run(member: MemberSpec, why: str) -> ReportedRun:
    """Returns a member as a run of a report: its method is its point, its state and budget follow from its end."""
    return ReportedRun(
        name=member.name, method=format_point(member.values), task="", seed=None, config={},
        rows=loggers.read_rows(member.directory / "result.jsonl"),
        state=NOT_FINITE if why.startswith(FAILED) else FINISHED, provenance={}, path=member.directory,
        stopped_at=float(why.removeprefix(STOPPED)) if why.startswith(STOPPED) else math.inf,
    )  # fmt: skip


def _build_row(member: MemberSpec, run: ReportedRun, why: str, objective: str) -> dict[str, Any]:
    _, values = run.curve("env_steps", objective)
    last = run.rows[-1] if run.rows else {}
    return {
        "member": member.name, **member.values, "ended": why, "frozen": int(why.startswith(interruption.NOT_FINITE)),
        "env_steps": last.get("env_steps"), "updates": last.get("updates"), "time_s": last.get("time_s"),
        "objective": objective, "last": run.last("env_steps", objective), "best": max(values, default=math.nan),
    }  # fmt: skip


def _find_failure(member: MemberSpec, why: str) -> str:
    """Returns the failure of a member that reached its end without an update; "": no failure."""
    from jrl.run import reporter
    from jrl.run.store import checkpoint

    if not checkpoint.exists(member.directory) or why.startswith((*FAILED, STOPPED, "interrupted")):
        return ""
    metrics = checkpoint.read_meta(checkpoint.locate(member.directory)).get("metrics", {})
    fault = reporter.explain_no_update(metrics, member.config.replay)
    return f"{FAILED[0]}: {fault}" if fault else ""


def is_finite_number(value: Any) -> bool:
    """Returns whether a value of a row is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def report_end(
    directory: Path,
    members: Sequence[MemberSpec],
    ended: Mapping[str, str],
    objective: str | None,
    interrupted: interruption.Signals,
) -> int:
    """Writes `sweep.csv`, copies the best seed of the best point to `best/`, and prints a summary.

    Args:
      directory: directory of the population.
      members: members with their latest values.
      ended: end reason of each member by name.
      objective: key of result rows; None: the return of evaluations, otherwise of episodes.
      interrupted: received signals; after a signal there is no best member yet.
    Returns:
      The exit status.
    """
    ends = {m.name: _find_failure(m, ended.get(m.name, "")) or ended.get(m.name, "") for m in members}
    runs = [_read_run(member, ends[member.name]) for member in members]
    if objective is None:
        has = lambda run, name: any(is_finite_number(row.get(name)) for row in run.rows)
        found = (n for n in _OBJECTIVES if all(has(run, n) for run in runs if run.rows))
        objective = next(found, _OBJECTIVES[-1])
    table = [_build_row(m, run, ends[m.name], objective) for m, run in zip(members, runs, strict=True)]
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
    scores = {i: row["last"] for i, row in enumerate(table) if runs[i].state == FINISHED and math.isfinite(row["last"])}
    if scores:
        points = content.rank_methods(runs, content.ReportOptions(objective))
        i = max((i for i in scores if runs[i].method == points[0].method), key=scores.__getitem__)
        shutil.rmtree(directory / BEST, ignore_errors=True)
        shutil.copytree(members[i].directory, directory / BEST, ignore=shutil.ignore_patterns("*.lock"))
        mean = sum(scores.values()) / len(scores)
        print(f"{objective}: {mean:.4g} on average, {min(scores.values()):.4g} to {max(scores.values()):.4g}")
        origin = ""
        if len(points) > 1:
            for point in points[:_PRINTED_POINTS]:
                seeds = counted(sum(run.method == point.method for run in runs), "seed")
                seeds += f", {point.lost} without a score" if point.lost else ""
                stopped = f", {STOPPED} {point.budget:,.0f} steps" if point.budget < math.inf else ""
                print(f"  {point.score:.4g}  {point.method}  ({seeds}{stopped})")
            origin = f", the best seed of {points[0].method}"
        print(f"best: member {members[i].name}, {scores[i]:.4g}{origin}, copied to {directory / BEST}")
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
