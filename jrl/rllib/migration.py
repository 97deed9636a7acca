"""RLlib's configurations of any generation as jrl's: `migrate(data).config`, `python -m jrl.config migrate old.yaml`.

Keys that a file does not set have jrl's defaults; those that differ from RLlib's are listed. A key that asks for what
jrl does not have is an error, unless it is to be dropped. docs/rllib-users.md has the table of keys.
"""

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import config
from jrl.errors import InputError, short
from jrl.fields import schema
from jrl.fields.paths import resolve
from jrl.host import command
from jrl.rllib import defaults, multi_agent, rules
from jrl.rllib.table import ALGORITHMS, GROUPS, INSTEAD, KEYS
from jrl.rllib.translation import Job, begin, canonical, translate, value_at

RULES = (multi_agent, rules)  # modules that register rules when they are imported
_KNOWN = "PPO, APPO, IMPALA, A2C, A3C, DQN, APEX, R2D2, SimpleQ, SAC, TD3, DDPG, and from data BC, MARWIL, CQL, IQL, DT"
_EXPERIMENT = {name for row in GROUPS["Experiment"] for name in row.names} - {"algo_class"}


class Migration(NamedTuple):
    """A translated configuration, and its report."""

    config: dict[str, Any]  # plain, jrl's; only what differs from a default
    lines: list[str]  # one for each key: translated, dropped with the reason, lacking here, or unknown
    dropped: Sequence[str] = ()  # keys that are lacking here, or unknown
    defaults: Sequence[str] = ()  # one for each key that is left out and has another default in RLlib

    def report(self) -> list[str]:
        """Returns all lines of the report."""
        found = list(self.lines)
        for title, lines in (
            ("dropped, as was asked:", self.dropped),
            ("not set, with another default in RLlib:", self.defaults),
        ):
            found += [title, *(f"  {line}" for line in lines)] if lines else []
        return found


def looks_like_rllib(data: Mapping[str, Any]) -> bool:
    """Returns whether this is RLlib's configuration: a tuned example, an experiment, or a dict of its keys. Cheap."""
    env = data.get("env")
    if config.is_jrl_config(data) or (isinstance(env, Mapping) and "grid_search" not in env):
        return False
    return _has_experiments(data) or any(str(name) in KEYS and name != "stop" for name, _ in canonical(data))


def migrate(
    data: Mapping[str, Any], *, algo: str | None = None, env: Any = None, name: str | None = None, drop: bool = False
) -> Migration:
    """Translates RLlib's configuration to jrl's, checked by `jrl.config.reader.from_dict`.

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
        origins = lambda message: ", ".join(f"{ours} was {given}" for ours, given in spelled.items() if ours in message)
        raise InputError(*(f"{x} ({origins(x)})" if origins(x) else x for x in e.errors)) from None
    return Migration(_differing(job), job.lines, job.lacking, list(defaults.differing(job, whole)))


def _differing(job: Job) -> dict[str, Any]:
    """Returns the keys whose value is not jrl's default; sections with a name as a whole."""
    needed = {"env": {"id": value_at(job.tree, "env.id")}, "data": {"input": value_at(job.tree, "data.input")}}
    needed = {section: values for section, values in needed.items() if any(values.values())}
    if "external" in job.tree:  # kept whole
        needed["external"] = {"observation": {"box": [1]}, "action": {"discrete": 1}}
    default = config.to_dict(config.from_dict({"algo": {"name": job.algo}, **needed}))
    found: dict[str, Any] = {}
    order = ["algo", "env", "network", "rollout", "replay"]
    place = lambda name: (order.index(name) if name in order else len(order), name == "stop")
    for section in sorted(job.tree, key=place):
        values, same = job.tree[section], default[section] or {}
        if section not in ("stop", "external"):
            values = {k: v for k, v in values.items() if k in ("name", "id", "input") or not _equal(v, same.get(k))}
        if values:
            found[section] = dict(values)
    return found


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return all(_equal(v, default.get(k)) for k, v in value.items()) and bool(value)
    return schema.plain(value) == default and isinstance(value, bool) == isinstance(default, bool)


def _job(data: Mapping[str, Any], algo: str | None, env: Any, name: str | None) -> Job:
    """Translates all keys. Raises InputError: the algorithm or the experiment is not known."""
    from jrl.algos import get_config_class

    given = _experiment(data, name)
    named = next((key for key in ("run", "algo", "algo_class") if isinstance(given.get(key), str)), "run")
    source = _algorithm(algo or given.get(named))
    given.pop("algo_class", None)
    if algo is None:
        given.pop(named, None)
    given, choices = _first_choices(given)
    raw = dict(canonical(given))
    if env is not None:
        raw["env"] = env
    ours = ALGORITHMS[source]
    job = Job(ours.name, source, get_config_class(ours.name), raw)
    job.put(named if algo is None else "--algo", "algo.name", ours.name, ours.note)
    for key, value in ours.parts.items():
        job.set(key, value, f"run: {source.upper()}")
    job.base = copy.deepcopy(job.tree)
    job.lines += choices
    begin(job)
    if not raw.get("env") and not job.from_data and not job.with_clients:
        job.faults.append("env is missing: set it, e.g. --env CartPole-v1")
    translate(job)
    return job


def _algorithm(given: Any) -> str:
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


def _is_experiment(body: Any) -> bool:
    """Returns whether this is the value under the name of a tuned example."""
    if not isinstance(body, Mapping):
        return False
    return isinstance(body.get("run", body.get("algo")), str) or (
        "env" in body and isinstance(body.get("config"), Mapping)
    )


def _has_experiments(data: Mapping[str, Any]) -> bool:
    return bool(data) and all(_is_experiment(body) for body in data.values())


def _experiment(data: Any, name: str | None) -> dict[str, Any]:
    """Returns the keys of a tuned example, of one experiment, or of a config dict: those beside `config` last."""
    if not isinstance(data, Mapping):
        raise InputError(f"expected a mapping of RLlib's keys, got {short(data)}")
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
    outer = {k: v for k, v in data.items() if str(k) in _EXPERIMENT}
    return {**{k: v for k, v in data.items() if k not in outer and k != "config"}, **inner, **outer}


# ---------------------------------------------------------------- commands


def _over(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Puts further keys of RLlib over those of its configuration; of several experiments, in each."""
    if _has_experiments(data):
        return {name: _over(body, given) for name, body in data.items()}
    inner = data.get("config")
    return {**data, "config": schema.merge(inner if isinstance(inner, Mapping) else {}, given)}


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
        data, is_rllib = _over(data, over_it), True
    if drop and not is_rllib:
        raise InputError("--drop: there is no configuration of RLlib: leave it out")
    if not is_rllib:
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
    except InputError as e:
        return command.report_input_error(e)
    for line in found.report()[len(job.lines) :]:
        print(line, file=sys.stderr)
    comments = {ours: given for ours, given in job.origins.items() if ours in schema.flatten(found.config)}
    print(f"# from {Path(args.config).name}, a configuration of RLlib; the comments are its keys")
    print(schema.dump(found.config, comments), end="")
    return 0
