"""Runs as they lie on disk, read into one plain structure: run directories of jrl, and rows of others as CSV.

Runs whose configs differ in the seed alone are one method, which is named by the keys that differ from others.
"""

import csv
import difflib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jrl.errors import InputError, counted, short, shown
from jrl.fields import schema
from jrl.metrics import criteria, loggers, report

AXES = ("env_steps", "updates", "time_s")
MEMBERS = "members"  # of a directory whose runs were made together, the folder where they are
CSV_COLUMNS = ("method", "task", "seed", "step", "value")
_NAME = 200  # characters of a name or fact that a report shows
_LARGEST = 1e100  # size of a number that is drawn and averaged: squares and sums of these are finite
_VALUE = "value"  # the column of a CSV's rows that stands for any objective

FINISHED, NOT_FINITE, UNFINISHED, EMPTY = "finished", "not finite", "unfinished", "no rows"
STOPPED = "stopped by the scheduler"
# keys of a config that say nothing about what was learned
APART = ("run.seed", "run.out", "run.log", "run.compile_cache", "run.report_every", "checkpoint", "stop")
_LONGEST = 300  # characters of a method's name
_MOST_KEYS = 4  # in a method's name; of more those that tell the groups apart

Flat = Mapping[str, Any]  # dotted key -> leaf
Key = TypeVar("Key", bound=Hashable)


class Run(NamedTuple):
    """One run: a method on a task with one seed."""

    name: str  # its directory as it was given, or where in a CSV file it is from
    method: str  # of `named`
    task: str  # id of the environment, or of data alone their name
    seed: int | None
    config: Flat  # empty of a CSV
    rows: Sequence[Mapping[str, Any]]
    state: str  # FINISHED, NOT_FINITE, UNFINISHED, EMPTY or STOPPED
    provenance: Mapping[str, Any]  # env.json: versions, git, machine, command
    path: Path | None  # the run directory; None of a CSV
    source: str | None = None  # of a population, the member whose copy it was last
    stopped_at: float = math.inf  # env_steps at which a scheduler stopped it; inf: none did

    def curve(self, axis: str, objective: str) -> report.Curve:
        """Axis and objective, f64 [N] each, of the rows that have both; an evaluation counts once, not in each row."""
        x, y = report.curve(self.rows, x=axis, y=objective if self.path else _VALUE)
        x, y = x[finite := np.isfinite(x + y)], y[finite]
        order = np.argsort(x, kind="stable")
        return x[order], y[order]

    def last(self, axis: str, objective: str, until: float = math.inf) -> float:
        """Returns the last value of the objective up to that place of the axis; NaN where there is none."""
        x, y = self.curve(axis, objective)
        return float(y[x <= until][-1]) if (x <= until).any() else math.nan

    def best(self, axis: str, objective: str) -> float:
        """Returns the greatest value of the objective; means over the first few episodes count only without others."""
        window = _window(self.config)
        full = [row for row in self.rows if criteria.counts(objective, _numbers(row, objective), window)]
        values = self._replace(rows=full).curve(axis, objective)[1]
        return float(max(values)) if len(values) else float(max(self.curve(axis, objective)[1], default=math.nan))

    def column(self, name: str) -> np.ndarray:
        """Returns a column of the rows as f64 [rows], NaN where a row has no such number."""
        values = [row.get(name) for row in self.rows]
        return np.array([value if isinstance(value, int | float) else math.nan for value in values], np.float64)

    def reached(self, axis: str) -> float:
        """Returns the last number of a counter in the rows; NaN where there is none."""
        found = self.column(axis)
        found = found[np.isfinite(found)]
        return float(found[-1]) if len(found) else math.nan


class NoRows(InputError):
    """Runs are there, and none of them has a result row yet."""


class Found(NamedTuple):
    """Runs that were read."""

    runs: list[Run]
    cautions: list[str]  # of what could not be read, or not whole


def read(paths: Iterable[str | Path], by: Sequence[str] = ()) -> Found:
    """Reads run directories, directories of such, and CSV files; runs of one method are named alike.

    A directory is itself a run (config.yaml and result.jsonl), or has its runs in `members/`, or right in it.

    Args:
      paths: of what to read; what is named twice is read once.
      by: the keys that make a method, as of `method_names`.
    Raises:
      InputError: a path does not exist or holds no run, a CSV file has no such rows, or there is no run at all.
    """
    runs: list[Run] = []
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
        raise NoRows("none of the runs has a result row yet" + "".join(f": {said}" for said in cautions[:1]))
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


def _named(runs: Sequence[Run], by: Sequence[str]) -> list[Run]:
    """Returns the same runs with the names of their methods, which tell what differs between them."""
    own = {i: run.config for i, run in enumerate(runs) if run.path}
    labels = method_names(own, apart=("env.id",), by=by)
    names = {i: label or str(runs[i].config.get("algo.name", "run")) for i, label in labels.items()}
    taken = {*names.values()}
    of_file = lambda run: f"{run.method} of {Path(run.name.partition(': ')[0]).name}"
    return [
        run._replace(method=names[i] if i in own else of_file(run) if run.method in taken else run.method)
        for i, run in enumerate(runs)
    ]


def numbers(runs: Iterable[Run]) -> list[str]:
    """Returns the names of all numbers that rows of the runs have."""
    found = {name for run in runs if run.path for row in run.rows for name, x in row.items() if _is_number(x)}
    return sorted(found)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Returns names in a line, the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def near(name: str, known: Sequence[str]) -> str:
    """Suggests names for an unknown one, in words."""
    close = difflib.get_close_matches(name, known, 4, 0.6)
    close += [k for k in known if k not in close and k.rpartition("/")[2] == name.rpartition("/")[2]]
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known) or 'none'}"


# ---------------------------------------------------------------- methods: runs that differ in their seeds


def learning_config(config: Flat, apart: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys of a config that say what is learned and how, without those `apart`."""
    return {key: value for key, value in config.items() if not key.startswith((*APART, *apart))}


def method_names(configs: Mapping[Key, Flat], apart: Sequence[str] = (), by: Sequence[str] = ()) -> dict[Key, str]:
    """Returns the name of each run's method; runs whose configs differ in APART and `apart` alone have one name.

    A name is the algorithm, if there are several, and of each its keys that differ: `ppo, algo.lr=0.001`; where more
    than four differ, some that are enough to tell them apart. It is empty where all are one method.

    Args:
      configs: of the runs.
      apart: further keys that make no other method.
      by: the keys that alone make a method; empty: all.
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
        run: {key: config[key] for key in by if key in config} if by else learning_config(config, apart)
        for run, config in configs.items()
    }
    group = lambda config: repr(sorted(config.items(), key=repr))
    labels = _labels({group(config): config for config in kept.values()})
    return {run: labels[group(config)] for run, config in kept.items()}


def differing_keys(configs: Iterable[Flat]) -> list[str]:
    """Returns the keys whose values differ, or that some have not."""
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
    for group, label in labels.items():  # long ones may differ only where they are not shown
        taken[label] = taken.get(label, 0) + 1
        labels[group] = label if taken[label] == 1 else f"{label} ({taken[label]})"
    return labels


def _distinguishing(configs: Sequence[Flat]) -> list[str]:
    """Returns the keys that differ, or of many some that tell the configs apart, in the order of the configs."""
    keys = differing_keys(configs)
    if len(keys) <= _MOST_KEYS:
        return keys
    chosen: list[str] = []
    count = lambda found: len({tuple(repr(config.get(key)) for key in found) for config in configs})
    while count(chosen) < len(configs):
        chosen.append(max(keys, key=lambda key: count([*chosen, key])))
    return sorted(chosen, key=keys.index)


# ---------------------------------------------------------------- a run directory

Decisions = tuple[dict[str, int], dict[str, str]]  # member -> steps at which it was stopped; -> whose copy it is


def _read_run(directory: Path, decided: Decisions) -> tuple[Run | None, list[str]]:
    """Returns a run, None where nobody can tell which it is; and what is wrong with it, in one line."""
    try:
        return _run_of(directory, *decided)
    except InputError as e:
        why = e.errors[0]
    except OSError as e:  # its files may be deleted or moved at the same time
        why = f"result.jsonl cannot be read: {e.strerror or e}"
    except Exception as e:  # one directory of many, whose files may hold anything
        why = f"its files are not those of a run: {type(e).__name__}: {shown(str(e))}"
    return None, [f"{directory} is left out: {why}"]


def _run_of(directory: Path, stopped: Mapping[str, int], sources: Mapping[str, str]) -> tuple[Run, list[str]]:
    tree = schema.read_yaml(directory / "config.yaml")
    config = {shown(str(key)): value for key, value in schema.flatten(tree).items()}
    if "algo.name" in config:
        config["algo.name"] = shown(str(config["algo.name"]))
    raw, damage = loggers.read_damaged(directory / "result.jsonl")
    rows = [{name: None if _is_beyond(x) else x for name, x in row.items()} for row in raw]
    beyond = sum(_is_beyond(x) for row in raw for x in row.values())
    budget = {key.removeprefix("stop."): x for key, x in config.items() if key.startswith("stop.") and _is_number(x)}
    met = lambda row, name: criteria.met(name, _numbers(row, name), budget[name], _window(config))
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
    run = Run(
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
    progress = f"{count(run.reached(axis))}{f' of {count(budget[axis])}' if axis in budget else ''} {axis}"
    said = [f"result.jsonl has {damage}, which is left out"] if damage else []
    said += [f"{counted(beyond, 'number')} beyond {_LARGEST:g}, which count as missing"] if beyond else []
    said += ["it has no result row yet"] if state == EMPTY else []
    said += [f"it is not finished: {progress}"] if state == UNFINISHED else []
    said += [f"it ended by an update that was not finite: {progress}"] if state == NOT_FINITE else []
    return run, [f"{directory}: {'; '.join(said + unread)}"] if said + unread else []


def _is_beyond(value: Any) -> bool:
    """Returns whether sums and pictures could not hold a number."""
    return isinstance(value, int | float) and abs(value) > _LARGEST and value not in (math.inf, -math.inf)


def _task(tree: Mapping[str, Any]) -> str:
    """Returns the task of a run: the id of its environment, or the name of its data."""
    section = lambda name: tree[name] if isinstance(tree.get(name), Mapping) else {}
    if env := section("env").get("id"):
        return shown(str(env), _NAME)
    data = section("data").get("input") or "unknown"
    first = next(iter(data)) if isinstance(data, Mapping | list) else data
    return shown(Path(str(first)).name, _NAME)


def _provenance(directory: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the facts of env.json that training writes, of a member that of its population; and what is wrong."""
    places = [directory / "env.json"]
    if directory.parent.name == MEMBERS:
        places.append(directory.parent.parent / "env.json")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return {}, []
    try:
        found = schema.parse_json(schema.read_text(path))
    except ValueError:  # InputError, too
        found = None
    if not isinstance(found, dict):
        return {}, [f"{path.name} is no JSON, and is left out"]
    told: dict[str, Any] = {}
    for name, value in found.items():
        if name in ("git", "cpu", "versions") and isinstance(value, Mapping):
            told[name] = {shown(str(key)): _fact(x) for key, x in value.items()}
        elif name == "devices" and isinstance(value, list):
            told[name] = [str(_fact(x)) for x in value]
        elif name in ("platform", "memory_gib"):
            told[name] = _fact(value)
        elif name == "command" and isinstance(value, str):
            told[name] = shown(value, 2_000)
    return told, []


def _fact(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and abs(value) < _LARGEST):
        return value
    return shown(value if isinstance(value, str) else short(value), _NAME)


def _read_decisions(directory: Path) -> tuple[Decisions, list[str]]:
    """Returns the decisions of a population's scheduler, and what is wrong with their file, in one line."""
    path = directory / "population.json"
    stopped: dict[str, int] = {}
    sources: dict[str, str] = {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # a pipe would never end
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


# ---------------------------------------------------------------- rows of others


def read_csv(path: Path) -> list[Run]:
    """Returns the runs of a CSV file with the columns method, task, seed, step and value, and perhaps `updates` and
    `time_s`.

    A row is one measurement of the objective; rows of one method, task and seed are one run, in the order of its steps.

    Raises:
      InputError: it cannot be read, lacks a column, has no rows, or a row has no number where one is expected.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            header, lines = reader.fieldnames or [], [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise InputError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    if missing := [name for name in CSV_COLUMNS if name not in header]:
        raise InputError(f"{path} lacks {', '.join(missing)}: its first line has to name {', '.join(CSV_COLUMNS)}")
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
        found.append(Run(f"{path}: {method}, {task}, seed {seed}", method, task, seed, {}, rows, FINISHED, {}, None))
    return found


def only_method(path: Path) -> str:
    """Returns the method that a CSV file has rows of. Raises InputError: it has several."""
    found = list(dict.fromkeys(run.method for run in read_csv(path)))
    if len(found) > 1:
        raise InputError(
            f"--against {path}: it has several methods, {', '.join(found)}: give the file among the runs, and one of "
            "them as --against"
        )
    return found[0]


def _measured(line: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Returns the numbers of a line under the names of rows. Raises ValueError: one is missing or not finite."""
    for name, column in (("env_steps", "step"), (_VALUE, _VALUE), ("updates", "updates"), ("time_s", "time_s")):
        if column in CSV_COLUMNS or line.get(column):
            number = float(line[column])
            if not math.isfinite(number):
                raise ValueError(name)
            yield name, number
