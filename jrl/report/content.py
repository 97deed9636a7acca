"""Content of a report, as plain data: the single source of its tables, JSON and page.

`content` returns a dict of lists, dicts, texts and numbers; non-finite numbers are None. Its keys:

    objective, axis, seed, against   options of the report
    notes, cautions                  lines: how scores were taken; reasons for doubt
    tasks, methods, runs             names, the best method first; runs with task, method, seed, state, counters, last
                                     and best value
    ranking                          task (or "*" for all) -> methods, the best first
    recommendation                   recommended method and reason; {}: a single method
    per_task                         per task and method: seeds, last, best, iqm, median, mean as {value, low, high}
    aggregate                        over tasks, per method; `none` is the reason why it is missing
    profiles                         thresholds, and per method the share of runs above them
    improvement                      per pair of methods, the probability that a run of the first is better
    curves                           per task and method: every run, and the interquartile mean with its interval
    curves_over_tasks                per method: the same for normalised scores of all tasks
    hyper_parameters                 influence of each hyper-parameter on the score
    equal_steps                      if a scheduler stopped runs: comparison at equal steps, as a note and scores by
      name;
                                     else {}
    differences                      key -> method -> its values
    failures, provenance             unfinished runs and runs without scores; origin of runs
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import InputError, counted, format_names
from jrl.fields import schema
from jrl.metrics import plots
from jrl.report import runs, statistics
from jrl.report.runs import (
    EMPTY,
    FINISHED,
    NOT_FINITE,
    STOPPED,
    Found,
    ReportedRun,
    differing_keys,
    learning_config,
)

Bounds = Mapping[str, tuple[float, float]]  # task -> scores normalised to 0 and 1
Groups = dict[tuple[str, str], list[ReportedRun]]  # task, method -> runs that have scores
Scores = Mapping[tuple[str, str], np.ndarray]  # task, method -> scores of these runs

OBJECTIVE, TRAINING = "evaluation/return", "episode/return"
FEW_SEEDS = 5
_UNEQUAL = 0.05  # allowed relative difference of budgets
_TIMING = ("time", "timestamp", "perf/", "sys/")  # metrics that differ between equal runs
_MOST_LEVELS = 8  # maximum number of single values of a numeric key; more are grouped into ranges
_MOST_PAIRED = 8  # maximum number of methods for comparisons of all pairs
_STATISTICS = (statistics.interquartile_mean, statistics.median, statistics.mean, statistics.optimality_gap)


class ReportOptions(NamedTuple):
    """Options of a report."""

    objective: str = OBJECTIVE  # metric; greater is better
    axis: str = "env_steps"
    against: str | None = None  # reference method
    normalize: Bounds | None = None
    seed: int = 0  # seed of the bootstrap


def content(found: Found, options: ReportOptions) -> dict[str, Any]:
    """Returns the content of a report.

    Raises:
      InputError: no row has the objective, an unknown method or task, or too few scores for pairs.
    """
    options, notes = select_objective(found.runs, options)
    described = {run.name: _describe_run(run, options) for run in found.runs}
    scored = [run for run in found.runs if math.isfinite(described[run.name]["last"])]
    if not scored:
        raise InputError(f"--axis {options.axis}: no row has it beside {options.objective}: take --axis env_steps")
    names = list(dict.fromkeys(run.method for run in scored))
    if options.against is not None and options.against not in names:
        has_runs = any(run.method == options.against for run in found.runs)
        why = f"none of its runs has {options.objective} beside {options.axis}" if has_runs else "no such method"
        raise InputError(f"--against {options.against}: {why}: {runs.suggest_names(options.against, names)}")
    tasks = list(dict.fromkeys(run.task for run in scored))
    places = {task: rank_methods([run for run in found.runs if run.task == task], options) for task in tasks}
    overall = _rank_over_tasks(places, names)
    names = sorted(overall, key=lambda name: name != options.against)
    groups: Groups = {}
    for key in itertools.product(tasks, names):
        if own := [run for run in scored if (run.task, run.method) == key]:
            groups[key] = own
    scores = {key: np.array([described[run.name]["last"] for run in own]) for key, own in groups.items()}
    best = {key: np.array([described[run.name]["best"] for run in own]) for key, own in groups.items()}
    normal = _normalized(scores, tasks, options.normalize)
    equal = _equal_steps(scored, options.objective)
    per_task = [_per_task(*key, scores[key], best[key], options) for key in groups]
    said = {
        "objective": options.objective,
        "axis": options.axis,
        "seed": options.seed,
        "against": options.against,
        "notes": notes,
        "cautions": [*found.cautions, *cautions(groups, options.axis)],
        "tasks": tasks,
        "methods": names,
        "runs": list(described.values()),
        "ranking": {**{task: [place.method for place in own] for task, own in places.items()}, "*": overall},
        "recommendation": _recommendation(places, overall, per_task, options),
        "per_task": per_task,
        "aggregate": _aggregate(normal, tasks, names, options),
        "profiles": _profiles(normal, tasks, names, options),
        "improvement": _improvement(scores, tasks, names, options),
        "curves": [_curve(*key, own, options) for key, own in groups.items()],
        "curves_over_tasks": curves_over_tasks(groups, tasks, names, options),
        "hyper_parameters": _hyper_parameters(groups, scores, equal.get("scores", {}), overall),
        "equal_steps": equal,
        "differences": _differences(scored, names),
        "failures": _failures(found.runs, described, options),
        "provenance": _origins(found.runs),
    }
    return to_plain(said)


def to_plain(value: Any) -> Any:
    """Returns a value with lists for arrays and None for non-finite numbers, as JSON allows."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(x) for key, x in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [to_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_bounds(path: Path) -> dict[str, tuple[float, float]]:
    """Returns the scores normalised to 0 and 1 per task, from a JSON file {"task": [low, high]}. Raises InputError."""
    found, errors = {}, []
    for task, pair in schema.read_mapping(path).items():
        numbers = pair if isinstance(pair, list) and len(pair) == 2 else []
        if not numbers or not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            errors.append(f"{path}: {task}: expected [low, high], two numbers, got {pair!r}")
        elif numbers[0] == numbers[1]:
            errors.append(
                f"{path}: {task}: expected low and high to differ, got {pair[0]!r} twice: set the task's range"
            )
        else:
            found[task] = (float(numbers[0]), float(numbers[1]))
    if errors:
        raise InputError(*errors)
    return found


# ---------------------------------------------------------------- scores


def select_objective(given: Sequence[ReportedRun], options: ReportOptions) -> tuple[ReportOptions, list[str]]:
    """Returns the options with the objective of all methods, and notes. Raises InputError: no row has it.

    A run that was not evaluated yet has no score. If a method has no evaluated run at all, all methods are compared by
    training episodes.
    """
    wanted, notes = options.objective, []
    own = [run for run in given if run.path and run.rows]
    having = {run.method for run in own if len(run.curve("env_steps", wanted)[0])}
    lacking = list(dict.fromkeys(run.method for run in own if run.method not in having))
    if wanted == OBJECTIVE and lacking and any(len(run.curve("env_steps", TRAINING)[0]) for run in own):
        notes.append(
            f"{format_names(lacking)}: no run was evaluated: all are compared by {TRAINING}, the mean of "
            "the latest training episodes, with exploration"
        )
        wanted, having = TRAINING, {run.method for run in own if len(run.curve("env_steps", TRAINING)[0])}
    elif lacking and having:
        notes.append(f"{format_names(lacking)}: no run has {wanted}: left out of all that needs it")
    if own and not having:
        raise InputError(f"--objective {wanted}: no row has it: {runs.suggest_names(wanted, runs.numbers(own))}")
    return options._replace(objective=wanted), notes


class RankedMethod(NamedTuple):
    """A method's result on a task."""

    method: str
    budget: float  # env_steps at which a scheduler stopped it; inf: not stopped
    lost: int  # number of runs without a score, or with a non-finite update
    score: float  # mean of the other runs' last values


def rank_methods(given: Sequence[ReportedRun], options: ReportOptions) -> list[RankedMethod]:
    """Returns the methods of a task that have scores, the best first, as a sweep ranks its points.

    Methods that a scheduler stopped rank below the others: their scores are of fewer steps. With equal budgets, methods
    without lost runs rank first, then methods of higher mean.
    """
    found = []
    for name in dict.fromkeys(run.method for run in given):
        own = [run for run in given if run.method == name]
        last = [run.last(options.axis, options.objective) for run in own]
        good = [x for run, x in zip(own, last) if run.state != NOT_FINITE and math.isfinite(x)]
        if any(map(math.isfinite, last)):
            score = sum(good) / len(good) if good else -math.inf
            found.append(RankedMethod(name, min(run.stopped_at for run in own), len(own) - len(good), score))
    return sorted(found, key=lambda place: (place.score == -math.inf, -place.budget, place.lost, -place.score))


def _rank_over_tasks(places: Mapping[str, Sequence[RankedMethod]], names: Sequence[str]) -> list[str]:
    order = {task: [place.method for place in own] for task, own in places.items()}
    of_task = lambda name, own: own.index(name) if name in own else len(names)
    return sorted(names, key=lambda name: sum(of_task(name, own) for own in order.values()))


def _recommendation(
    places: Mapping[str, Sequence[RankedMethod]],
    order: Sequence[str],
    per_task: Sequence[Mapping[str, Any]],
    options: ReportOptions,
) -> dict[str, Any]:
    if len(order) < 2:
        return {}
    name, second = order[:2]
    if len(places) > 1:
        of_all = [[place.method for place in own] for own in places.values()]
        first = sum(own[0] == name for own in of_all)
        return {"method": name, "why": f"the best mean place over {len(of_all)} tasks, the first on {first} of them"}
    (found,) = places.values()
    best, after = found[:2]
    means = {row["method"]: row["mean"] for row in per_task}
    seeds = next(row["seeds"] for row in per_task if row["method"] == name)
    why = f"the highest {options.objective}, {best.score:.4g}" + f" as the mean of {seeds} seeds" * (seeds > 1)
    if found[-1].budget < best.budget:
        why += ", of those that the scheduler did not stop"
    if after.budget == best.budget:
        why += f"; the next, {second}, has {after.score:.4g}"
        low, high = means[name]["low"], means[second]["high"]
        if low is None or high is None:
            why += ", and one seed says little: train both with more --seeds"
        elif low <= high:
            why += ", and their intervals overlap: more --seeds tell them apart"
    return {"method": name, "why": why}


def _describe_run(run: ReportedRun, options: ReportOptions) -> dict[str, Any]:
    return {
        "name": run.name,
        "method": run.method,
        "task": run.task,
        "seed": run.seed,
        "state": run.state,
        "source": run.source,
        "last": run.last(options.axis, options.objective),
        "best": run.best(options.axis, options.objective),
        **{axis: run.reached(axis) for axis in runs.AXES},
    }


def _per_task(task: str, method: str, scores: np.ndarray, best: np.ndarray, options: ReportOptions) -> dict[str, Any]:
    measures = (statistics.interquartile_mean, statistics.median_run, statistics.mean)
    return {
        "task": task,
        "method": method,
        "seeds": len(scores),
        "last": {"least": scores.min(), "most": scores.max()},
        "best": {"mean": best.mean(), "most": best.max()},
        **_estimates(measures, [scores], options),
    }


def _estimates(
    measures: Sequence[statistics.Statistic], scores: statistics.Scores, options: ReportOptions
) -> dict[str, Any]:
    found = statistics.estimate(lambda s: np.stack([measure(s) for measure in measures]), scores, seed=options.seed)
    named = zip(("iqm", "median", "mean", "optimality_gap"), zip(*found))
    return {name: dict(zip(found._fields, values)) for name, values in named}


def _normalized(scores: Scores, tasks: Sequence[str], bounds: Bounds | None) -> Scores:
    """Returns (score - low) / (high - low); {} without bounds. Raises InputError: a task has no bounds."""
    if bounds is None:
        return {}
    if missing := [task for task in tasks if task not in bounds]:
        has = f" (it has {', '.join(bounds) or 'none'})"
        raise InputError(*(f"--normalize: {task} is missing{has}: add it, as [low, high]" for task in missing))
    return {key: _between(x, *bounds[key[0]]) for key, x in scores.items()}


def _between(scores: np.ndarray, low: float, high: float) -> np.ndarray:
    return (scores - low) / (high - low)


# ---------------------------------------------------------------- over tasks


def _all_task_scores(scores: Scores, tasks: Sequence[str], name: str) -> list[np.ndarray]:
    return [scores[task, name] for task in tasks] if all((task, name) in scores for task in tasks) else []


def _aggregate(normal: Scores, tasks: Sequence[str], names: Sequence[str], options: ReportOptions) -> dict[str, Any]:
    if not normal:
        return {"none": "scores of different tasks have different scales: set their ranges by --normalize FILE"}
    rows, left_out = [], {}
    for name in names:
        if not (scores := _all_task_scores(normal, tasks, name)):
            left_out[name] = [task for task in tasks if (task, name) not in normal]
            continue
        rows.append({"method": name, "runs": sum(map(len, scores)), **_estimates(_STATISTICS, scores, options)})
    return {"tasks": tasks, "rows": rows, "left_out": left_out}


def _profiles(normal: Scores, tasks: Sequence[str], names: Sequence[str], options: ReportOptions) -> dict[str, Any]:
    whole = {name: scores for name in names if (scores := _all_task_scores(normal, tasks, name))}
    if not whole:
        return {}
    most = max(float(task.max()) for scores in whole.values() for task in scores)
    thresholds = np.linspace(0.0, max(1.0, most), 51)
    profile = lambda scores: statistics.performance_profile(scores, thresholds)
    found = {
        name: statistics.estimate(profile, scores, replicates=statistics.CURVE_REPLICATES, seed=options.seed)._asdict()
        for name, scores in whole.items()
    }
    return {"thresholds": thresholds, "methods": found}


def _improvement(
    scores: Scores, tasks: Sequence[str], names: Sequence[str], options: ReportOptions
) -> list[dict[str, Any]]:
    if options.against is None and len(names) > _MOST_PAIRED:
        return []
    others = [options.against] if options.against else names
    rows = []
    for ours, theirs in ((ours, theirs) for i, theirs in enumerate(others) for ours in names[i + 1 :]):
        both = [task for task in tasks if (task, ours) in scores and (task, theirs) in scores]
        if both:
            samples = [[scores[task, name] for task in both] for name in (ours, theirs)]
            found = statistics.estimate(statistics.probability_of_improvement, *samples, seed=options.seed)
            rows.append({"method": ours, "over": theirs, "tasks": both, **found._asdict()})
    return rows


# ---------------------------------------------------------------- learning curves


def _curve(task: str, method: str, own: Sequence[ReportedRun], options: ReportOptions) -> dict[str, Any]:
    found = [run.curve(options.axis, options.objective) for run in own]
    lines = [dict(zip(("name", "x", "y"), (run.name, *_thin(*c)))) for run, c in zip(own, found)]
    return {"task": task, "method": method, "runs": lines, "band": interquartile_band([found], options)}


def _thin(x: np.ndarray, y: np.ndarray, most: int = 500) -> plots.Curve:
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).round().astype(int))
    return x[kept], y[kept]


def curves_over_tasks(groups: Groups, tasks: Sequence[str], names: Sequence[str], options: ReportOptions) -> list[Any]:
    """Returns the interquartile mean of normalised scores, per method with runs on all tasks; []: one task."""
    found = []
    for name in names:
        if options.normalize is None or len(tasks) == 1 or any((task, name) not in groups for task in tasks):
            continue
        scaled = []
        for task in tasks:
            own = [run.curve(options.axis, options.objective) for run in groups[task, name]]
            scaled.append([(x, _between(y, *options.normalize[task])) for x, y in own])
        found.append({"method": name, "band": interquartile_band(scaled, options)})
    return found


def interquartile_band(tasks: Sequence[Sequence[plots.Curve]], options: ReportOptions) -> dict[str, Any] | None:
    """Returns the interquartile mean of runs with its interval; None: a single run, or runs without a common range."""
    found = statistics.efficiency(tasks, seed=options.seed) if sum(map(len, tasks)) > 1 else None
    return {"x": found[0], **found[1]._asdict()} if found else None


# ---------------------------------------------------------------- hyper-parameters


def _equal_steps(given: Sequence[ReportedRun], objective: str) -> dict[str, Any]:
    """Returns the scores of the runs of each task and algorithm at the step where a scheduler stopped the first run.

    Returns:
      `scores` by name, of all runs of these tasks and algorithms; `note` explains. {}: no run was stopped.
    """
    sets: dict[Any, list[ReportedRun]] = {}
    for run in given:
        if run.path:
            sets.setdefault((run.task, run.config.get("algo.name")), []).append(run)
    found: dict[str, float] = {}
    steps: list[float] = []
    for own in sets.values():
        if reached := [run.reached("env_steps") for run in own if run.state == STOPPED]:
            steps.append(min(reached))
            found |= {run.name: run.last("env_steps", objective, steps[-1]) for run in own}
    if not found:
        return {}
    after = " or ".join(f"{step:,.0f}" for step in dict.fromkeys(steps))
    note = (
        "A scheduler stopped runs early. To compare all runs after equal training, the score of a run is here its "
        f"value after {after} env_steps, where the first runs were stopped."
    )
    return {"note": note, "scores": found}


def _hyper_parameters(
    groups: Groups, scores: Scores, equal: Mapping[str, float], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the influence of each differing key on the scores, per algorithm, the greatest first.

    Scores count by their rank on their task, at equal steps if given. At least three methods are needed. `recommended`
    is the value of the algorithm's best method in `order`.
    """
    last = [(run, score) for key, own in groups.items() for run, score in zip(own, scores[key]) if run.path]
    pairs = [(run, x) for run, score in last if math.isfinite(x := equal.get(run.name, score))]
    found = []
    for algo in dict.fromkeys(run.config.get("algo.name") for run, _ in pairs):
        own = [(run, score) for run, score in pairs if run.config.get("algo.name") == algo]
        if len({run.method for run, _ in own}) < 3:
            continue
        configs = [learning_config(run.config, ("env.id",)) for run, _ in own]
        _, best = min(zip((order.index(run.method) for run, _ in own), configs), key=lambda pair: pair[0])
        ranked = _ranked([run.task for run, _ in own], np.array([score for _, score in own]))
        for key in differing_keys(configs):
            measured = _importance([config.get(key) for config in configs], ranked)
            found.append({"algo": algo, "key": key, **measured, "recommended": schema.flow(best.get(key))})
    return sorted(found, key=lambda row: -row["share"] if math.isfinite(row["share"]) else 0.0)


def _ranked(tasks: Sequence[str], scores: np.ndarray) -> np.ndarray:
    ranked = np.zeros(len(scores))
    for task in dict.fromkeys(tasks):
        own = np.array([name == task for name in tasks])
        ranked[own] = (statistics.ranks(scores[own]) - 0.5) / own.sum()
    return ranked


def _parts(given: Sequence[float]) -> list[str]:
    if len({*given}) <= _MOST_LEVELS:
        return [schema.flow(value) for value in given]
    values = np.array(given, float)
    part = np.searchsorted(np.quantile(values, np.linspace(0, 1, _MOST_LEVELS + 1)[1:-1]), values, side="right")
    ends = {i: (values[part == i].min(), values[part == i].max()) for i in np.unique(part)}
    return [f"{ends[i][0]:.4g} to {ends[i][1]:.4g}" for i in part]


def _importance(values: Sequence[Any], ranked: np.ndarray) -> dict[str, Any]:
    """Returns the rank correlation of numbers, and the share of the rank variance between (ranges of) values."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    shown = _parts(values) if numeric else [schema.flow(value) for value in values]
    levels = list(dict.fromkeys(shown))
    return {
        "values": len(set(map(schema.flow, values))),
        "runs": len(shown),
        "correlation": statistics.rank_correlation(np.array(values, float), ranked) if numeric else None,
        "share": statistics.rank_share(shown, ranked),
        "by_chance": (len(levels) - 1) / (len(shown) - 1),
    }


# ---------------------------------------------------------------- cautions, a line each


def cautions(groups: Groups, axis: str) -> list[str]:
    """Returns the cautions about the comparison; [] for none."""
    checks = (_seeds_and_tasks(groups), _repeated(groups), _budgets(groups), _stopped(groups), _machines(groups, axis))
    return [line for check in checks for line in check]


def _seeds_and_tasks(groups: Groups) -> Iterator[str]:
    """Yields methods with few seeds, and methods that share no task with others (perhaps by another spelling)."""
    few = [f"{method} on {task} ({len(runs)})" for (task, method), runs in groups.items() if len(runs) < FEW_SEEDS]
    if few:
        yield (f"fewer than {FEW_SEEDS} seeds: {format_names(few)}: their intervals are too narrow, or missing")
    tasks_of: dict[str, set[str]] = {}
    for task, method in groups:
        tasks_of.setdefault(method, set()).add(task)
    tasks = {task for task, _ in groups}
    if len(tasks) == 1 and len(groups) > 1:
        yield f"one task, {tasks.pop()}: the best method there need not be the best on other tasks"
    for method, own in tasks_of.items():
        others = {task for other, tasks in tasks_of.items() if other != method for task in tasks}
        if others and not own & others:
            yield f"{method} is compared with nothing: no other method has {format_names(sorted(own))} (see --by)"


def _repeated(groups: Groups) -> Iterator[str]:
    """Yields repeated seeds of a method, and runs with identical numbers."""
    by_numbers: dict[tuple[str, str], list[ReportedRun]] = {}
    for (task, method), own in groups.items():
        by_seed: dict[int, list[str]] = {}
        for run in own:
            if run.seed is not None:
                by_seed.setdefault(run.seed, []).append(run.name)
            if (numbers := _fingerprint(run)) is not None:
                by_numbers.setdefault((task, numbers), []).append(run)
        for seed, same in by_seed.items():
            if len(same) > 1:
                names = format_names(same)
                yield f"{method} on {task} has seed {seed} more than once: {names}: it counts as several runs"
    for (task, _), runs_ in by_numbers.items():
        names = format_names([run.name for run in runs_])
        if len(runs_) > 1 and len({run.method for run in runs_}) == 1:
            seeds = format_names([str(run.seed) for run in runs_])
            yield f"the same numbers on {task} under the seeds {seeds}: {names}: they are one run, not {len(runs_)}"
        elif len(runs_) > 1:
            keys = format_names(differing_keys([learning_config(run.config) for run in runs_])) or "what differs"
            yield f"the same numbers on {task} of other methods: {names}: {keys} changed nothing"


def _fingerprint(run: ReportedRun) -> str | None:
    """Returns a run's numbers without timings; None: too few numbers, which may be equal by chance."""
    kept = [{k: v for k, v in row.items() if not k.startswith(_TIMING)} for row in run.rows]
    values = {repr(value) for row in kept for name, value in row.items() if name != "env_steps"}
    return repr(kept) if len(kept) > 1 and len(values) > 2 else None


def _budgets(groups: Groups) -> Iterator[str]:
    for task in dict.fromkeys(task for task, _ in groups):
        of_task = [runs for (where, _), runs in groups.items() if where == task]
        said = list(_unequal(task, [run for runs in of_task for run in runs], "env_steps"))
        yield from said or (line for runs in of_task for line in _unequal(task, runs, "updates"))


def _unequal(task: str, runs: Sequence[ReportedRun], axis: str) -> Iterator[str]:
    reached = [(steps, run) for run in runs if run.state == FINISHED and math.isfinite(steps := run.reached(axis))]
    if not reached:
        return
    (least, first), (most, last) = min(reached, key=lambda pair: pair[0]), max(reached, key=lambda pair: pair[0])
    if most * (1 - _UNEQUAL) > least:
        yield (
            f"unequal budgets on {task}: {least:,.0f} {axis} of {first.name} ({first.method}), {most:,.0f} of "
            f"{last.name} ({last.method}): compare curves where both exist, not last values"
        )


def _stopped(groups: Groups) -> Iterator[str]:
    runs = [run for found in groups.values() for run in found]
    if reached := [run.reached("env_steps") for run in runs if run.state == STOPPED]:
        after = " to ".join(dict.fromkeys(f"{steps:,.0f}" for steps in (min(reached), max(reached))))
        yield (
            f"{len(reached)} of {counted(len(runs), 'run')} stopped by the scheduler of a sweep after {after} "
            "env_steps: their last values are after less training than the others'"
        )


def _machines(groups: Groups, axis: str) -> Iterator[str]:
    origins = [run.provenance for found in groups.values() for run in found if run.provenance]
    commits = {str(git["commit"]) for origin in origins if (git := origin.get("git") or {}).get("commit")}
    if len(commits) > 1:
        yield f"runs of {len(commits)} commits of jrl: see their provenance"
    machines = {repr((origin.get("cpu"), origin.get("devices"))) for origin in origins}
    if axis == "time_s" and len(machines) > 1:
        yield f"seconds of {len(machines)} machines do not compare: use --axis env_steps"


# ---------------------------------------------------------------- differences, failures, provenance


def _differences(given: Sequence[ReportedRun], names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    configs = {run.name: learning_config(run.config, ("env.id",)) for run in given if run.path}
    found: dict[str, dict[str, list[str]]] = {}
    for key in differing_keys(configs.values()):
        for name in names:
            own = [configs[run.name] for run in given if run.method == name and run.path]
            values = dict.fromkeys(schema.flow(config[key]) for config in own if key in config)
            if values:
                found.setdefault(key, {})[name] = list(values)
    return found


def _failures(
    given: Sequence[ReportedRun], described: Mapping[str, Any], options: ReportOptions
) -> list[dict[str, Any]]:
    found = []
    for run in given:
        scored = math.isfinite(described[run.name]["last"])
        if run.state in (FINISHED, STOPPED) and scored:
            continue
        lacks = f"no row has {options.objective} beside {options.axis}"
        why = {FINISHED: lacks, EMPTY: "it has no rows"}.get(run.state, run.state)
        why += "; its last value counts" if scored else "; it is left out"
        found.append({**{key: described[run.name][key] for key in ("name", "method", "task", "env_steps")}, "why": why})
    return found


def _origins(given: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for run in given:
        if run.path:
            origin = {key: value for key, value in run.provenance.items() if key != "command"}
            entry = found.setdefault(repr(origin), {**origin, "runs": [], "commands": {}})
            entry["runs"].append(run.name)
            if command := run.provenance.get("command"):
                entry["commands"].setdefault(str(command), []).append(run.name)
    return list(found.values())
