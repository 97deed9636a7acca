"""Cautions about a comparison, a line each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jrl.errors import counted
from jrl.report import methods
from jrl.report.runs import FINISHED, STOPPED, Run, listed

FEW_SEEDS = 5
_UNEQUAL = 0.05  # by which budgets may differ
_OF_THE_MACHINE = ("time", "timestamp", "perf/", "sys/")  # rows have other numbers there whenever they run

Groups = Mapping[tuple[str, str], Sequence[Run]]  # task, method -> runs


def cautions(groups: Groups, axis: str) -> list[str]:
    """Returns everything that is doubtful about the runs beside what could not be read; [] for nothing."""
    checks: tuple[Callable[[Groups, str], Iterator[str]], ...] = (
        _few_seeds, _one_task, _other_tasks, _seeds_twice, _same_numbers, _budgets, _stopped, _machines
    )  # fmt: skip
    return [line for check in checks for line in check(groups, axis)]


def _few_seeds(groups: Groups, axis: str) -> Iterator[str]:
    few = [f"{method} on {task} ({len(runs)})" for (task, method), runs in groups.items() if len(runs) < FEW_SEEDS]
    if few:
        yield (
            f"fewer than {FEW_SEEDS} seeds: {listed(few)}: so few tell little of how runs vary; their intervals are "
            "too narrow, or missing"
        )


def _one_task(groups: Groups, axis: str) -> Iterator[str]:
    tasks = {task for task, _ in groups}
    if len(tasks) == 1 and len(groups) > 1:
        yield f"one task, {tasks.pop()}: which method is better there says little of other tasks"


def _other_tasks(groups: Groups, axis: str) -> Iterator[str]:
    """Methods that nothing is compared with: a task whose id is spelled in another way is another one."""
    tasks_of: dict[str, set[str]] = {}
    for task, method in groups:
        tasks_of.setdefault(method, set()).add(task)
    for method, own in tasks_of.items():
        others = {task for other, tasks in tasks_of.items() if other != method for task in tasks}
        if others and not own & others:
            yield f"{method} is compared with nothing: no other method has {listed(sorted(own))} (see --by)"


def _seeds_twice(groups: Groups, axis: str) -> Iterator[str]:
    for (task, method), runs in groups.items():
        by_seed: dict[int, list[str]] = {}
        for run in runs:
            if run.seed is not None:
                by_seed.setdefault(run.seed, []).append(run.name)
        for seed, names in by_seed.items():
            if len(names) > 1:
                yield f"{method} on {task} has seed {seed} more than once: {listed(names)}: it counts as several runs"


def _same_numbers(groups: Groups, axis: str) -> Iterator[str]:
    by_task: dict[str, dict[Any, list[Run]]] = {}
    for (task, _), runs in groups.items():
        for run in runs:
            if (found := _fingerprint(run)) is not None:
                by_task.setdefault(task, {}).setdefault(found, []).append(run)
    for task, found_runs in by_task.items():
        for same in (runs for runs in found_runs.values() if len(runs) > 1):
            names = listed([run.name for run in same])
            if len({run.method for run in same}) == 1:
                seeds = listed([str(run.seed) for run in same])
                yield f"the same numbers on {task} under the seeds {seeds}: {names}: they are one run, not {len(same)}"
            else:
                keys = listed(methods.differing([methods.learning(run.config) for run in same])) or "what differs"
                yield f"the same numbers on {task} of other methods: {names}: {keys} changed nothing"


def _fingerprint(run: Run) -> Any:
    """Returns the numbers of a run that do not depend on the machine; None where they are too few to be told from
    chance.
    """
    kept = [{k: v for k, v in row.items() if not k.startswith(_OF_THE_MACHINE)} for row in run.rows]
    values = {repr(value) for row in kept for name, value in row.items() if name != "env_steps"}
    return repr(kept) if len(kept) > 1 and len(values) > 2 else None


def _budgets(groups: Groups, axis: str) -> Iterator[str]:
    """Compares env_steps over all methods, updates within one: a method may learn more often from as many steps."""
    for task in dict.fromkeys(task for task, _ in groups):
        of_task = {method: runs for (where, method), runs in groups.items() if where == task}
        said = list(_unequal(task, [run for runs in of_task.values() for run in runs], "env_steps"))
        yield from said or (line for runs in of_task.values() for line in _unequal(task, runs, "updates"))


def _unequal(task: str, runs: Sequence[Run], axis: str) -> Iterator[str]:
    reached = [(steps, run) for run in runs if run.state == FINISHED and math.isfinite(steps := run.reached(axis))]
    if not reached:
        return
    (least, first), (most, last) = min(reached, key=lambda pair: pair[0]), max(reached, key=lambda pair: pair[0])
    if most * (1 - _UNEQUAL) > least:
        yield (
            f"unequal budgets on {task}: {least:,.0f} {axis} of {first.name} ({first.method}), {most:,.0f} of "
            f"{last.name} ({last.method}): curves compare where both are, last values do not"
        )


def _stopped(groups: Groups, axis: str) -> Iterator[str]:
    runs = [run for found in groups.values() for run in found]
    if reached := [run.reached("env_steps") for run in runs if run.state == STOPPED]:
        least, most = f"{min(reached):,.0f}", f"{max(reached):,.0f}"
        after = least if least == most else f"{least} to {most}"
        yield (
            f"{len(reached)} of {counted(len(runs), 'run')} stopped by the scheduler of a sweep after {after} "
            "env_steps: their last values are of less training than those of the others"
        )


def _machines(groups: Groups, axis: str) -> Iterator[str]:
    runs = [run for found in groups.values() for run in found if run.provenance]
    commits = {(run.provenance.get("git") or {}).get("commit") for run in runs} - {None}
    if len(commits) > 1:
        yield f"runs of {len(commits)} commits of jrl: see their provenance"
    machines = {repr((run.provenance.get("cpu"), run.provenance.get("devices"))) for run in runs}
    if axis == "time_s" and len(machines) > 1:
        yield f"seconds of {len(machines)} machines do not compare: take --axis env_steps"
