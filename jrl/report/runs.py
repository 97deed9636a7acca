"""Runs read from disk into one plain structure: run directories, and CSV files of other tools.

Runs whose configs differ only in the seed are one method, named by the keys that differ from other methods.
"""

import csv
import difflib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jrl.errors import InputError, counted, shown
from jrl.fields import schema
from jrl.metrics import loggers, plots, progress
from jrl.report import tables

AXES = ("env_steps", "updates", "time_s")
MEMBERS = "members"  # folder of the runs of a population or sweep
CSV_COLUMNS = ("method", "task", "seed", "step", "value")
_NAME = 200  # maximum characters of a displayed name or fact
_LARGEST = 1e100  # largest number that is drawn and averaged: its squares and sums are finite
_VALUE = "value"  # column of a CSV file that serves as any objective

FINISHED, NOT_FINITE, UNFINISHED, EMPTY = "finished", "not finite", "unfinished", "no rows"
STOPPED = "stopped by the scheduler"
# keys of a config that do not affect learning
APART = ("run.seed", "run.out", "run.log", "run.compile_cache", "run.report_every", "checkpoint", "stop")
_LONGEST = 300  # maximum characters of a method's name
_MOST_KEYS = 4  # maximum keys in a method's name; with more, only those that distinguish the groups

Flat = Mapping[str, Any]  # dotted key -> leaf
Key = TypeVar("Key", bound=Hashable)


class ReportedRun(NamedTuple):
    """One run: a method on a task with one seed."""

    name: str  # directory as given by the user, or origin in a CSV file
    method: str  # name of the method
    task: str  # environment id, or name of the data set
    seed: int | None
    config: Flat  # empty for a CSV file
    rows: Sequence[Mapping[str, Any]]
    state: str  # FINISHED, NOT_FINITE, UNFINISHED, EMPTY or STOPPED
    provenance: Mapping[str, Any]  # env.json: versions, git, machine, command
    path: Path | None  # run directory; None: a CSV file
    source: str | None = None  # in a population, the member that it last copied
    stopped_at: float = math.inf  # env_steps at which a scheduler stopped it; inf: not stopped

    def curve(self, axis: str, objective: str) -> plots.Curve:
        """Returns axis and objective, f64 [N] each, of the rows that have both; each evaluation counts once."""
        x, y = plots.extract_curve(self.rows, x=axis, y=objective if self.path else _VALUE)
        x, y = x[finite := np.isfinite(x + y)], y[finite]
        order = np.argsort(x, kind="stable")
        return x[order], y[order]

    def last(self, axis: str, objective: str, until: float = math.inf) -> float:
        """Returns the last value of the objective up to `until` on the axis; NaN: no value."""
        x, y = self.curve(axis, objective)
        return float(y[x <= until][-1]) if (x <= until).any() else math.nan

    def best(self, axis: str, objective: str) -> float:
        """Returns the greatest value of the objective; means over few episodes count only if there are no others."""
        window = _window(self.config)
        full = [row for row in self.rows if progress.is_reliable(objective, _numbers(row, objective), window)]
        values = self._replace(rows=full).curve(axis, objective)[1]
        return float(max(values)) if len(values) else float(max(self.curve(axis, objective)[1], default=math.nan))

    def column(self, name: str) -> np.ndarray:
        """Returns a metric of all rows f64 [rows]; NaN: the row has no such number."""
        values = [row.get(name) for row in self.rows]
        return np.array([value if isinstance(value, int | float) else math.nan for value in values], np.float64)

    def reached(self, axis: str) -> float:
        """Returns the last value of a counter; NaN: no row has it."""
        found = self.column(axis)
        found = found[np.isfinite(found)]
        return float(found[-1]) if len(found) else math.nan


class Found(NamedTuple):
    """Runs read from disk."""

    runs: list[ReportedRun]
    cautions: list[str]  # unreadable or damaged files


def read(paths: Iterable[str | Path], by: Sequence[str] = ()) -> Found:
    """Reads run directories, directories of runs, and CSV files; runs of one method get the same name.

    A directory is a run (config.yaml and result.jsonl), or has its runs in `members/`, or directly in it.

    Args:
      paths: paths to read; duplicates are read once.
      by: keys that define a method, as in `method_names`.
    Raises:
      InputError: a path does not exist or holds no run, a CSV file is invalid, or there is no run at all.
    """
    runs: list[ReportedRun] = []
    cautions: list[str] = []
    errors: list[str] = []
    seen: set[Path] = set()
    populations: dict[Path, Decisions] = {}
    for path in map(Path, paths):
        if path.suffix == ".csv":
            runs += read_csv(path) if path.resolve() not in seen else []
            seen.add(path.resolve())
            continue
        try:
            directories = _run_directories(path)
        except InputError as e:
            errors += e.errors
            continue
        for directory in directories:
            if directory.resolve() not in seen:
                seen.add(directory.resolve())
                decided: Decisions = {}, {}
                if directory.parent.name == MEMBERS:
                    if (whole := directory.parent.parent) not in populations:
                        populations[whole], said = _read_decisions(whole)
                        cautions += said
                    decided = populations[whole]
                run, said = _read_run(directory, decided)
                runs += [run] if run else []
                cautions += said
    if errors:
        raise InputError(*errors)
    if not any(run.rows for run in runs):
        raise InputError("none of the runs has a result row yet" + "".join(f": {said}" for said in cautions[:1]))
    return Found(_named(runs, by), cautions)


def _run_directories(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is no run directory" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}: give the --out of a run, a directory of runs or a .csv file")
    is_run = lambda place: (place / "config.yaml").is_file()
    own = lambda place: sorted(filter(is_run, (place / MEMBERS).glob("*"))) or [place][: is_run(place)]
    found = own(path) or [directory for inside in sorted(path.iterdir()) for directory in own(inside)]
    if not found:
        raise InputError(f"{path} holds no run: expected config.yaml and result.jsonl in it, in {MEMBERS}/* or in *")
    return found


def _named(runs: Sequence[ReportedRun], by: Sequence[str]) -> list[ReportedRun]:
    own = {i: run.config for i, run in enumerate(runs) if run.path}
    labels = method_names(own, ignored=("env.id",), by=by)
    names = {i: label or str(runs[i].config.get("algo.name", "run")) for i, label in labels.items()}
    taken = {*names.values()}
    of_file = lambda run: f"{run.method} of {Path(run.name.partition(': ')[0]).name}"
    return [
        run._replace(method=names[i] if i in own else of_file(run) if run.method in taken else run.method)
        for i, run in enumerate(runs)
    ]


def numbers(runs: Iterable[ReportedRun]) -> list[str]:
    """Returns the names of all numeric metrics of the runs."""
    found = {name for run in runs if run.path for row in run.rows for name, x in row.items() if _is_number(x)}
    return sorted(found)


def suggest_names(name: str, known: Sequence[str]) -> str:
    """Suggests names for an unknown name, in words."""
    close = difflib.get_close_matches(name, known, 4, 0.6)
    close += [k for k in known if k not in close and k.rpartition("/")[2] == name.rpartition("/")[2]]
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known) or 'none'}"


# ---------------------------------------------------------------- methods: runs that differ only in their seeds


def learning_config(config: Flat, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys of a config that affect learning, without `ignored`."""
    return {key: value for key, value in config.items() if not key.startswith((*APART, *ignored))}


def method_names(configs: Mapping[Key, Flat], ignored: Sequence[str] = (), by: Sequence[str] = ()) -> dict[Key, str]:
    """Returns the name of each run's method; runs whose configs differ only in APART and `ignored` have the same name.

    A name is the algorithm, if there are several, and its differing keys: `ppo, algo.lr=0.001`. If more than four keys
    differ, it has enough of them to be unique. It is empty if there is one method only.

    Args:
      configs: configs of the runs.
      ignored: further keys that do not define a method.
      by: keys that alone define a method; empty: all keys.
    Raises:
      InputError: no config has a key of `by`.
    """
    known = list(dict.fromkeys(key for config in configs.values() for key in config))
    if errors := [
        f"--by {key}: no run has that key in its config.yaml"
        + (f": did you mean {close}?" if (close := schema.nearest(key, known, {})) else "")
        for key in by
        if key not in known
    ]:
        raise InputError(*errors)
    kept = {
        run: {key: config[key] for key in by if key in config} if by else learning_config(config, ignored)
        for run, config in configs.items()
    }
    group = lambda config: repr(sorted(config.items(), key=repr))
    labels = _labels({group(config): config for config in kept.values()})
    return {run: labels[group(config)] for run, config in kept.items()}


def differing_keys(configs: Iterable[Flat]) -> list[str]:
    """Returns the keys whose values differ, or that some configs lack."""
    configs = list(configs)
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _labels(groups: Mapping[str, Flat]) -> dict[str, str]:
    algos = dict.fromkeys(str(config.get("algo.name")) for config in groups.values())
    labels = {}
    for algo in algos:
        own = {group: config for group, config in groups.items() if str(config.get("algo.name")) == algo}
        keys = _distinguishing(list(own.values()))
        for group, config in own.items():
            parts = [shown(algo)] if len(algos) > 1 else []
            parts += [f"{key}={shown(schema.flow(config[key]))}" for key in keys if key in config]
            labels[group] = shown(", ".join(parts), _LONGEST)
    taken: dict[str, int] = {}
    for group, label in labels.items():  # truncated labels may be equal
        taken[label] = taken.get(label, 0) + 1
        labels[group] = label if taken[label] == 1 else f"{label} ({taken[label]})"
    return labels


def _distinguishing(configs: Sequence[Flat]) -> list[str]:
    """Returns the differing keys; of many keys, enough to distinguish the configs, in their order."""
    keys = differing_keys(configs)
    if len(keys) <= _MOST_KEYS:
        return keys
    chosen: list[str] = []
    count = lambda found: len({tuple(repr(config.get(key)) for key in found) for config in configs})
    while count(chosen) < len(configs):
        chosen.append(max(keys, key=lambda key: count([*chosen, key])))
    return sorted(chosen, key=keys.index)


# ---------------------------------------------------------------- a run directory

Decisions = tuple[dict[str, int], dict[str, str]]  # member -> steps at which it was stopped; member -> its source


def _read_run(directory: Path, decided: Decisions) -> tuple[ReportedRun | None, list[str]]:
    """Returns a run (None: unreadable), and its faults in one line each."""
    try:
        return _run_of(directory, *decided)
    except InputError as e:
        why = e.errors[0]
    except OSError as e:  # its files may be deleted or moved at the same time
        why = f"result.jsonl cannot be read: {e.strerror or e}"
    except Exception as e:  # a broken directory must not end the report
        why = f"its files are not those of a run: {type(e).__name__}: {shown(str(e))}"
    return None, [f"{directory} is left out: {why}"]


def _run_of(directory: Path, stopped: Mapping[str, int], sources: Mapping[str, str]) -> tuple[ReportedRun, list[str]]:
    tree = schema.read_yaml(directory / "config.yaml")
    config = {shown(str(key)): value for key, value in schema.flatten(tree).items()}
    if "algo.name" in config:
        config["algo.name"] = shown(str(config["algo.name"]))
    raw, damage = loggers.read_damaged(directory / "result.jsonl")
    rows = [{name: None if _is_beyond(x) else x for name, x in row.items()} for row in raw]
    beyond = sum(_is_beyond(x) for row in raw for x in row.values())
    budget = {key.removeprefix("stop."): x for key, x in config.items() if key.startswith("stop.") and _is_number(x)}
    met = lambda row, name: progress.is_met(name, _numbers(row, name), budget[name], _window(config))
    if not rows:
        state = EMPTY
    elif any(met(row, name) for name in budget for row in rows):  # also after a fault
        state = FINISHED
    elif directory.name in stopped:
        state = STOPPED
    else:
        state = NOT_FINITE if any((directory / "nonfinite").glob("*")) else UNFINISHED
    provenance, unread = _provenance(directory)
    seed = config.get("run.seed")
    run = ReportedRun(
        name=str(directory),
        method="",
        task=_task(tree),
        seed=seed if isinstance(seed, int) else None,
        config=config,
        rows=rows,
        state=state,
        provenance=provenance,
        path=directory,
        source=sources.get(directory.name),
        stopped_at=stopped[directory.name] if state == STOPPED else math.inf,
    )
    axis = next((name for name in AXES if name in budget), "env_steps")
    count = lambda number: f"{number:,.0f}" if abs(number) < 1e15 else f"{number:.4g}"
    reached = f"{count(run.reached(axis))}{f' of {count(budget[axis])}' if axis in budget else ''} {axis}"
    said = [f"result.jsonl has {damage}, which is left out"] if damage else []
    said += [f"{counted(beyond, 'number')} beyond {_LARGEST:g}, which count as missing"] if beyond else []
    said += ["it has no result row yet"] if state == EMPTY else []
    said += [f"it is not finished: {reached}"] if state == UNFINISHED else []
    said += [f"it ended by an update that was not finite: {reached}"] if state == NOT_FINITE else []
    return run, [f"{directory}: {'; '.join(said + unread)}"] if said + unread else []


def _is_beyond(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > _LARGEST and value not in (math.inf, -math.inf)


def _task(tree: Mapping[str, Any]) -> str:
    """Returns the task of a run: its environment id, or the name of its data set."""
    section = lambda name: tree[name] if isinstance(tree.get(name), Mapping) else {}
    if env := section("env").get("id"):
        return shown(str(env), _NAME)
    data = section("data").get("input") or "unknown"
    first = next(iter(data)) if isinstance(data, Mapping | list) else data
    return shown(Path(str(first)).name, _NAME)


def _provenance(directory: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the facts in env.json (a member has its population's), and the faults of the file."""
    places = [directory / "env.json"]
    if directory.parent.name == MEMBERS:
        places.append(directory.parent.parent / "env.json")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return {}, []
    try:
        found = schema.parse_json(schema.read_text(path))
        tuple(tables.facts(found))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):  # damaged or edited
        return {}, [f"{path.name} is no JSON of this form, and is left out"]
    return found, []


def _read_decisions(directory: Path) -> tuple[Decisions, list[str]]:
    """Returns the decisions of a population's scheduler, and the faults of their file in one line each."""
    path = directory / "population.json"
    stopped: dict[str, int] = {}
    sources: dict[str, str] = {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # a pipe may be endless
        for decision in kept.get("decisions", []):
            stopped |= {str(name): int(decision["at"]) for name in decision.get("stopped", ())}
            sources |= {str(copy["member"]): str(copy["source"]) for copy in decision.get("copies", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return ({}, {}), [f"{path} cannot be read: what a scheduler did to the members is not known"]
    return (stopped, sources), []


def _window(config: Flat) -> int:
    window = config.get("run.smoothing_episodes")
    return window if isinstance(window, int) else 1


def _numbers(row: Mapping[str, Any], name: str) -> dict[str, float]:
    return {key: row[key] for key in (name, "episode/window") if _is_number(row.get(key))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---------------------------------------------------------------- CSV files


def read_csv(path: Path) -> list[ReportedRun]:
    """Returns the runs of a CSV file: columns method, task, seed, step, value, optionally `updates`, `time_s`.

    A row is one measurement of the objective; rows of the same method, task and seed form a run, in the order of steps.

    Raises:
      InputError: the file cannot be read, lacks a column, has no rows, or has a text instead of a number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            header, lines = reader.fieldnames or [], [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise InputError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    if missing := [name for name in CSV_COLUMNS if name not in header]:
        raise InputError(f"{path} lacks {', '.join(missing)}: name {', '.join(CSV_COLUMNS)} in its first line")
    runs: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    errors = []
    for number, line in lines:
        try:
            key = (line["method"], line["task"], int(line["seed"]))
            runs.setdefault(key, []).append(dict(_measured(line)))
        except (TypeError, ValueError):
            errors.append(f"{path}:{number}: expected a whole number as seed, and numbers as step and value")
    if errors:
        raise InputError(*errors[:5], *([f"and {counted(len(errors) - 5, 'more such line')}"] if errors[5:] else []))
    if not runs:
        raise InputError(f"{path} has no rows below its first line")
    found = []
    for (method, task, seed), rows in runs.items():
        rows.sort(key=lambda row: row["env_steps"])
        found.append(
            ReportedRun(f"{path}: {method}, {task}, seed {seed}", method, task, seed, {}, rows, FINISHED, {}, None)
        )
    return found


def only_method(path: Path) -> str:
    """Returns the only method of a CSV file. Raises InputError: the file has several."""
    found = list(dict.fromkeys(run.method for run in read_csv(path)))
    if len(found) > 1:
        raise InputError(
            f"--against {path}: the file has several methods, {', '.join(found)}: pass the file as a run, and one "
            "method as --against"
        )
    return found[0]


def _measured(line: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a line under the names of rows. Raises ValueError: a number is missing or not finite."""
    for name, column in (("env_steps", "step"), (_VALUE, _VALUE), ("updates", "updates"), ("time_s", "time_s")):
        if column in CSV_COLUMNS or line.get(column):
            number = float(line[column])
            if not math.isfinite(number):
                raise ValueError(name)
            yield name, number
