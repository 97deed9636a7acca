"""RLlib's configurations of any generation as jrl's.

    migration = migrate(data)           # a config dict, or a tuned example {name: {run, env, stop, config}}
    cfg = jrl.settings.config.from_dict(migration.config)
    python -m jrl.config migrate old.yaml > new.yaml       # what became of each key on stderr

Keys that a file does not set have jrl's defaults; those that differ from RLlib's are listed. A key that asks for what
jrl does not have is an error, unless it is to be dropped. docs/rllib-users.md has the table of keys.
"""

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.errors import InputError, short
from jrl.fields import schema
from jrl.fields.bounds import INT64, is_number
from jrl.fields.paths import resolve
from jrl.host import command
from jrl.rllib import defaults, multi_agent, rules
from jrl.rllib.table import ALGORITHMS, GROUPS, INSTEAD, KEYS
from jrl.rllib.translation import Job, begin, canonical, shown, translate
from jrl.settings import config, metric_names

RULES = (multi_agent, rules)  # modules that register rules when they are imported
_KNOWN = "PPO, APPO, IMPALA, A2C, A3C, DQN, APEX, R2D2, SimpleQ, SAC, TD3, DDPG, and from data BC, MARWIL, CQL, IQL, DT"
_EXPERIMENT = {name: row for row in GROUPS["Experiment"] for name in row.names}


class Migration(NamedTuple):
    """A translated configuration, and its report."""

    config: dict[str, Any]  # plain, jrl's; only what differs from a default
    lines: list[str]  # one for each key: translated, dropped with the reason, lacking here, or unknown
    dropped: Sequence[str] = ()  # keys that are lacking here, or unknown
    defaults: Sequence[str] = ()  # one for each key that is left out and has another default in RLlib

    def report(self) -> list[str]:
        """Returns all lines of the report."""
        listed = {"dropped, as was asked:": self.dropped, "not set, with another default in RLlib:": self.defaults}
        more = [[title, *(f"  {line}" for line in lines)] for title, lines in listed.items() if lines]
        return [*self.lines, *(line for part in more for line in part)]


def looks_like_rllib(data: Mapping[str, Any]) -> bool:
    """Returns whether this is RLlib's configuration: a tuned example, an experiment, or a dict of its keys. Cheap."""
    env = data.get("env")
    if config.is_ours(data) or (isinstance(env, Mapping) and "grid_search" not in env):
        return False
    return _has_experiments(data) or any(str(name) in KEYS and name != "stop" for name, _ in canonical(data))


def migrate(
    data: Mapping[str, Any],
    *,
    algo: str | None = None,
    env: Any = None,
    name: str | None = None,
    drop: bool = False,
) -> Migration:
    """Translates RLlib's configuration to jrl's, checked by `jrl.settings.config.from_dict`.

    Args:
      data: `{name: {run, env, stop, config}}`, `{run, env, stop, config}`, or a config dict.
      algo: RLlib's name of the algorithm, in place of that in `data`.
      env: the environment, in place of that in `data`.
      name: name of the experiment, where `data` has several.
      drop: leave out what asks for something that jrl does not have: a model for torch, an unknown key.
    Raises:
      InputError: all that is wrong, in words of the given keys.
    """
    return _migration(_job(data, algo, env, name), drop)


def _migration(job: Job, drop: bool) -> Migration:
    lacking = [] if drop else [f"{line}: remove it, or let --drop do so" for line in job.lacking]
    if job.faults or lacking:
        raise InputError(*job.faults, *lacking)
    try:
        whole = config.to_dict(config.from_dict(job.tree))
    except InputError as e:
        spelled = {ours: given for ours, given in job.origins.items() if ours != given}
        raise InputError(*(_with_origins(message, spelled) for message in e.errors)) from None
    return Migration(_differing(job), job.lines, job.lacking, list(defaults.differing(job, whole)))


def _with_origins(message: str, spelled: Mapping[str, str]) -> str:
    keys = [f"{ours} was {given}" for ours, given in spelled.items() if ours in message]
    return f"{message} ({', '.join(keys)})" if keys else message


def _differing(job: Job) -> dict[str, Any]:
    """Returns the keys whose value is not jrl's default; sections with a name as a whole."""
    needed = {section: {key: job.tree.get(section, {}).get(key)} for section, key in (("env", "id"), ("data", "input"))}
    needed = {section: values for section, values in needed.items() if any(values.values())}
    if "external" in job.tree:  # kept whole
        needed["external"] = {"observation": {"box": [1]}, "action": {"discrete": 1}}
    default = config.to_dict(config.from_dict({"algo": {"name": job.algo}, **needed}))
    found: dict[str, Any] = {}
    for section, values in job.tree.items():
        if section in ("stop", "external"):
            found[section] = dict(values)
            continue
        same = default[section] or {}
        kept = {k: v for k, v in values.items() if k in ("name", "id", "input") or not _equal(v, same.get(k))}
        if kept:
            found[section] = kept
    order = ["algo", "env", "network", "rollout", "replay"]
    return {k: found[k] for k in sorted(found, key=lambda k: (order.index(k) if k in order else 9, k == "stop"))}


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return all(_equal(v, default.get(k)) for k, v in value.items()) and bool(value)
    return schema.plain(value) == default and isinstance(value, bool) == isinstance(default, bool)


def _job(data: Mapping[str, Any], algo: str | None, env: Any, name: str | None) -> Job:
    """Translates all keys. Raises InputError: the algorithm or the experiment is not known."""
    if not isinstance(data, Mapping):
        raise InputError(f"expected a mapping of RLlib's keys, got {short(data)}")
    body = _experiment(data, name)
    source = _algorithm(algo or body.algo)
    ours = ALGORITHMS[source]
    from jrl.algos import get_config_class

    given, choices = _first_choices(body.config)
    raw = dict(canonical(given))
    if env is not None:
        raw["env"] = env
    job = Job(ours.name, source, get_config_class(ours.name), raw)
    job.put(body.algo_key if algo is None else "--algo", "algo.name", ours.name, ours.note)
    for key, value in ours.parts.items():
        job.set(key, value, f"run: {source.upper()}")
    job.base = copy.deepcopy(job.tree)
    job.lines += choices
    begin(job)
    if not raw.get("env") and not job.from_data and not job.with_clients:
        job.faults.append("env is missing: set it, e.g. --env CartPole-v1")
    translate(job)
    _outer(job, body.outer)
    return job


def _algorithm(given: str | None) -> str:
    """Returns the key of ALGORITHMS for RLlib's name, class or trainer."""
    if given is None:
        raise InputError(f"the algorithm is not named: give --algo with one of {_KNOWN}")
    name = given.strip().strip("<>'\" ").rpartition(".")[2].lower()
    for suffix in ("", "trainer", "config"):
        if name.removesuffix(suffix) in ALGORITHMS:
            return name.removesuffix(suffix)
        if fix := INSTEAD.get(name.removesuffix(suffix)):
            raise InputError(f"the algorithm {short(given)} is not part of jrl: {fix}")
    raise InputError(f"the algorithm {short(given)} is not part of jrl: there are {_KNOWN}")


def _first_choices(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Takes the first value of each grid_search."""
    lines: list[str] = []

    def first(value: Any, key: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        found = value.get("grid_search")
        if not isinstance(found, list | tuple) or not found:
            return {k: first(v, f"{key}.{k}") for k, v in value.items()}
        choices = json.dumps(found, default=str)
        lines.append(f'{key}: the first of {choices}: jrl.api.tune takes {{"grid_search": [...]}} and runs all')
        return found[0]

    return {key: first(value, key) for key, value in raw.items()}, lines


# ---------------------------------------------------------------- experiments


class _Experiment(NamedTuple):
    algo: str | None
    algo_key: str  # the key that named it
    config: dict[str, Any]
    outer: dict[str, Any]  # keys beside the config


def _is_experiment(body: Any) -> bool:
    """Returns whether this is the value under the name of a tuned example."""
    if not isinstance(body, Mapping):
        return False
    return isinstance(body.get("run", body.get("algo")), str) or (
        "env" in body and isinstance(body.get("config"), Mapping)
    )


def _has_experiments(data: Mapping[str, Any]) -> bool:
    return bool(data) and all(_is_experiment(body) for body in data.values())


def _experiment(data: Mapping[str, Any], name: str | None) -> _Experiment:
    """Returns the parts of a tuned example, of one experiment, or of a config dict."""
    if _has_experiments(data):
        names = [str(key) for key in data]
        if name is None and len(names) > 1:
            raise InputError(f"there are {len(names)} experiments, {', '.join(names)}: choose one with --name")
        if name is not None and name not in names:
            raise InputError(f"--name {name}: unknown experiment: choose one of {', '.join(names)}")
        data = data[name or names[0]]
    inner = data.get("config", {})
    if not isinstance(inner, Mapping):
        raise InputError(f"config: expected a mapping, got {short(inner)}")
    is_outer = lambda key: str(key) in _EXPERIMENT and str(key) != "algo_class"
    outer = {str(k): v for k, v in data.items() if is_outer(k)}
    given = {**{k: v for k, v in data.items() if not is_outer(k) and k != "config"}, **inner}
    named = {"run": outer.get("run"), "algo": outer.get("algo"), "algo_class": given.pop("algo_class", None)}
    key = next((k for k, v in named.items() if isinstance(v, str)), "run")
    return _Experiment(named[key] if isinstance(named[key], str) else None, key, given, outer)


def _outer(job: Job, outer: Mapping[str, Any]) -> None:
    """Translates stop criteria, checkpoints and Tune's keys."""
    flat: dict[str, Any] = {}
    for key, value in outer.items():
        is_nested = key == "checkpoint_config" and isinstance(value, Mapping)
        flat |= {f"{key}.{inner}": given for inner, given in value.items()} if is_nested else {key: value}
    for key, value in flat.items():
        row = _EXPERIMENT.get(key)
        name = row.name if row else ""
        if name == "run":
            if key != job.origins["algo.name"]:
                job.drop(key, f"{job.origins['algo.name']} is given, too")
        elif value is None:
            job.drop(key, "null: not set")
        elif key == "stop" and isinstance(value, Mapping):
            _stop(job, value)
        elif key == "stop":
            job.wrong(key, "a mapping of metrics to numbers", value)
        elif name == "checkpoint_freq":
            _checkpoints(job, key, value)
        elif name == "checkpoint_score_attr":
            _best(job, key, str(value))
        elif row is not None and row.ours:
            job.put(key, row.ours, value)
        else:
            job.drop(key, row.note if row else "of Tune")


def _stop(job: Job, criteria: Mapping[str, Any]) -> None:
    steps: dict[str, int] = {}
    budget = "updates" if job.from_data else "env_steps"
    for name, value in criteria.items():
        key, ours = f"stop.{name}", metric_names.ours(str(name))
        if not is_number(value) or not -INT64 <= value <= INT64:
            job.wrong(key, "a number", value)
        elif name == "training_iteration":
            each = job.sizes.iteration(job)
            steps[key] = int(value) * each
            job.lines.append(f"{key} -> stop.{budget}: {steps[key]}  ({value:g} iterations of {job.steps(each)})")
        elif ours == "env_steps" and job.from_data:
            steps[key] = job.sizes.updates_of(job, value, trained="trained" in name)
            job.lines.append(f"{key} -> stop.{budget}: {steps[key]}  (of {job.sizes.drawn} rows)")
        elif ours == "env_steps":
            steps[key] = int(value)
            job.lines.append(f"{key} -> stop.env_steps: {steps[key]}")
        elif ours is not None:
            job.tree.setdefault("stop", {})[ours] = value
            job.origins[f"stop.{ours}"] = key
            note = "  (of the episodes since the last row)" if ours.startswith("episode/return_") else ""
            job.lines.append(f"{key} -> stop.{ours}: {shown(value)}{note}")
        else:
            job.drop(key, "no metric of jrl's result rows: see docs/config.md")
    if steps:
        first = min(steps, key=lambda k: steps[k])
        job.tree.setdefault("stop", {})[budget] = steps[first]
        job.origins[f"stop.{budget}"] = first
        if len(steps) > 1:
            job.lines.append(f"stop.{budget}: {steps[first]}, the first of {len(steps)} that is reached")


def _checkpoints(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, f"{value}: jrl keeps one every 5 minutes and at the end")
    if not isinstance(value, int):
        return job.wrong(key, "a whole number", value)
    each = job.sizes.iteration(job)
    return job.put(key, "checkpoint.every", value * each, f"{value} iterations of {job.steps(each)}")


def _best(job: Job, key: str, name: str) -> None:
    ours = metric_names.ours(name.removeprefix("min-"))
    if ours is None:
        return job.drop(key, f"{name} is no metric of jrl's result rows")
    job.put(key, "checkpoint.keep_best_by", ours)
    return job.put(key, "checkpoint.keep_best", "min") if name.startswith("min-") else None


# ---------------------------------------------------------------- commands


def over(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Puts further keys of RLlib over those of its configuration; of several experiments, in each."""
    if _has_experiments(data):
        return {name: over(body, given) for name, body in data.items()}
    inner = data.get("config")
    if not isinstance(inner, Mapping):
        return {**data, "config": dict(given)}
    return {**data, "config": schema.merge(inner, given)}


def translated(
    data: Mapping[str, Any],
    name: str,
    *,
    algo: str | None = None,
    env: str | None = None,
    drop: bool = False,
    over_it: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Mapping[str, Any]:
    """Returns a run's config as plain data of jrl, from jrl's or RLlib's.

    Args:
      data: contents of a file, or empty.
      name: name of that file, for messages.
      algo, env, drop: as of `migrate`.
      over_it: keys of RLlib, put over those in `data`.
      tell: gets what became of each key, line by line.
    Raises:
      InputError: all that is wrong.
    """
    is_rllib = looks_like_rllib(data)
    if over_it:
        if data and not is_rllib:
            raise InputError(f"--config: {name} is a configuration of jrl: use --set a.b=v for keys of it")
        if not data and not looks_like_rllib({"run": "PPO", "config": over_it}):
            return over_it
        data, is_rllib = over(data, over_it), True
    if not is_rllib:
        if drop:
            raise InputError("--drop: there is no configuration of RLlib: leave it out")
        return data
    found = migrate(data, algo=algo, env=env, drop=drop)
    tell(f"{name} is a configuration of RLlib: it was migrated (python -m jrl.config migrate writes it down)")
    for line in found.report():
        tell(f"migrated: {line}")
    return found.config


def main(argv: Sequence[str] | None = None) -> int:
    """Prints jrl's config on stdout, what became of each key on stderr. Returns the exit status: 2 for bad input."""
    parser = command.parser("config migrate", "RLlib's configuration as jrl's, on stdout.")
    parser.add_argument("config", help="YAML or JSON file: a tuned example, or a config dict such as params.json")
    parser.add_argument("--algo", help="RLlib's name of the algorithm, where the file has none")
    parser.add_argument("--env", help="the environment, where the file has none")
    parser.add_argument("--name", help="which experiment, of a file with several")
    parser.add_argument("--drop", action="store_true", help=config.DROP)
    args = parser.parse_args(argv)
    try:
        data = schema.read_mapping(resolve(args.config, "config", "file"))
        if not looks_like_rllib(data):
            raise InputError(f"{args.config}: no configuration of RLlib: there is none of its keys at the top")
        job = _job(data, args.algo, args.env, args.name)
        print(*job.lines, sep="\n", file=sys.stderr)  # before an error of the whole config
        found = _migration(job, args.drop)
        for line in found.report()[len(job.lines) :]:
            print(line, file=sys.stderr)
    except InputError as e:
        return command.refused(e)
    comments = {ours: given for ours, given in job.origins.items() if ours in schema.flatten(found.config)}
    print(f"# from {Path(args.config).name}, a configuration of RLlib; the comments are its keys")
    print(schema.dump(found.config, comments), end="")
    return 0
