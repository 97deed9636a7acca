"""RLlib's configurations of any generation as jrl's.

    migration = migrate(data)           # a config dict, or a tuned example {name: {run, env, stop, config}}
    cfg = jrl.settings.config.from_dict(migration.config)
    python -m jrl.config migrate old.yaml > new.yaml       # what became of each key on stderr

What a file does not set has jrl's default, not RLlib's: those that differ are listed. A key that asks for what jrl does
not have is an error, unless it is to be dropped. docs/rllib-users.md has the table of keys.
"""

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.errors import InputError, short
from jrl.fields import schema
from jrl.fields.paths import resolve
from jrl.host import command
from jrl.migrate import defaults, hyper, memory, offline, rules, several
from jrl.migrate.experiment import conditions, experiment, is_experiment
from jrl.migrate.job import Job, canonical, translate
from jrl.migrate.tables import ALGORITHMS, INSTEAD, KEYS, PARTS
from jrl.settings import config

__all__ = [
    "KEYS", "Migration", "defaults", "hyper", "looks_like_rllib", "main", "memory", "migrate", "offline", "rules",
    "several",
]  # fmt: skip


class Migration(NamedTuple):
    config: dict[str, Any]  # plain, jrl's; only what differs from a default
    lines: list[str]  # one for each key: translated, dropped with the reason, lacking here, or unknown
    dropped: Sequence[str] = ()  # those that are lacking here, or unknown
    defaults: Sequence[str] = ()  # one for each key that is left out and has another default in RLlib

    def told(self) -> list[str]:
        """Returns all lines of the report."""
        listed = {"dropped, as was asked:": self.dropped, "not set, with another default in RLlib:": self.defaults}
        more = [[title, *(f"  {line}" for line in lines)] for title, lines in listed.items() if lines]
        return [*self.lines, *(line for part in more for line in part)]


def looks_like_rllib(data: Mapping[str, Any]) -> bool:
    """Returns whether this is RLlib's configuration: a tuned example, an experiment, or a dict of its keys. Cheap."""
    env = data.get("env")
    if config.is_ours(data):
        return False
    if isinstance(env, Mapping) and "grid_search" not in env:
        return False
    if data and all(is_experiment(body) for body in data.values()):
        return True
    return any(str(name) in KEYS and name != "stop" for name, _ in canonical(data))


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
      name: which experiment, where `data` has several.
      drop: leave out what asks for something that jrl does not have: a model for torch, an unknown key.
    Raises:
      InputError: all that is wrong, in words of the keys that were given.
    """
    return _migration(_job(data, algo, env, name), drop)


def over(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Puts further keys of RLlib's over those of its configuration; of several experiments, in each."""
    if data and all(is_experiment(body) for body in data.values()):
        return {name: over(body, given) for name, body in data.items()}
    inner = data.get("config")
    if not isinstance(inner, Mapping):
        return {**data, "config": dict(given)}
    return {**data, "config": schema.merge(inner, given)}


def _migration(job: Job, drop: bool) -> Migration:
    """Translates a job. Raises InputError with all that is wrong."""
    found = _check(job, drop)
    return Migration(_differing(job), job.lines, job.lacking, list(defaults.differing(job, found)))


def _job(data: Mapping[str, Any], algo: str | None, env: Any, name: str | None) -> Job:
    if not isinstance(data, Mapping):
        raise InputError(f"expected a mapping of RLlib's keys, got {short(data)}")
    body = experiment(data, name)
    source = _algorithm(algo or body.algo)
    ours, note = ALGORITHMS[source]
    from jrl.algos import get_config_class

    given, choices = _first_choices(body.config)
    raw = dict(canonical(given))
    if env is not None:
        raw["env"] = env
    job = Job(ours, source, get_config_class(ours), raw)
    job.put(body.algo_key if algo is None else "--algo", "algo.name", ours, note)
    for key, value in PARTS.get(source, {}).items():
        job.set(key, value, f"run: {source.upper()}")
    job.base = copy.deepcopy(job.tree)
    job.lines += choices
    memory.begin(job)
    if not raw.get("env") and not job.from_data and not job.with_clients:
        job.faults.append("env is missing: set it, e.g. --env CartPole-v1")
    translate(job)
    conditions(job, body)
    return job


def _algorithm(given: str | None) -> str:
    known = (
        "PPO, APPO, IMPALA, A2C, A3C, DQN, APEX, R2D2, SimpleQ, SAC, TD3, DDPG, and from data BC, MARWIL, CQL, IQL, DT"
    )
    if given is None:
        raise InputError(f"the algorithm is not named: give --algo with one of {known}")
    name = given.strip().strip("<>'\" ").rpartition(".")[2].lower()
    for suffix in ("", "trainer", "config"):
        if name.removesuffix(suffix) in ALGORITHMS:
            return name.removesuffix(suffix)
        if mend := INSTEAD.get(name.removesuffix(suffix)):
            raise InputError(f"the algorithm {short(given)} is not part of jrl: {mend}")
    raise InputError(f"the algorithm {short(given)} is not part of jrl: there are {known}")


def _first_choices(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Takes the first value of each grid_search."""
    lines: list[str] = []

    def first(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            found = value.get("grid_search")
            if isinstance(found, list | tuple) and found:
                lines.append(
                    f"{key}: the first of {json.dumps(found, default=str)}: jrl.api.tune takes "
                    '{"grid_search": [...]} and runs all'
                )
                return found[0]
            return {k: first(v, f"{key}.{k}") for k, v in value.items()}
        return value

    return {key: first(value, key) for key, value in raw.items()}, lines


def _check(job: Job, drop: bool) -> dict[str, Any]:
    """Returns the whole config. Raises InputError with all that is wrong."""
    lacking = [] if drop else [f"{line}: remove it, or let --drop do so" for line in job.lacking]
    if job.faults or lacking:
        raise InputError(*job.faults, *lacking)
    try:
        return config.to_dict(config.from_dict(job.tree))
    except InputError as e:
        where = {ours: theirs for ours, theirs in job.origins.items() if ours != theirs}
        raise InputError(*(_in_their_words(message, where) for message in e.errors)) from None


def _in_their_words(message: str, where: Mapping[str, str]) -> str:
    keys = [f"{ours} was {theirs}" for ours, theirs in where.items() if ours in message]
    return f"{message} ({', '.join(keys)})" if keys else message


def _differing(job: Job) -> dict[str, Any]:
    """Returns the keys whose value is not jrl's default; sections with a name as a whole."""
    needed = {section: {key: job.tree.get(section, {}).get(key)} for section, key in (("env", "id"), ("data", "input"))}
    needed = {section: values for section, values in needed.items() if any(values.values())}
    if "external" in job.tree:  # of which all stands there
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
    """Returns a run's config as plain data of ours, from ours or RLlib's.

    Args:
      data: of a file, or empty.
      name: of that file, for messages.
      algo, env, drop: as of `migrate`.
      over_it: keys of RLlib's, put over those in `data`.
      tell: gets what became of each key, line by line.
    Raises:
      InputError: all that is wrong.
    """
    theirs = looks_like_rllib(data)
    if over_it:
        if data and not theirs:
            raise InputError(f"--config: {name} is a configuration of jrl: use --set a.b=v for keys of it")
        if not data and not looks_like_rllib({"run": "PPO", "config": over_it}):
            return over_it
        data, theirs = over(data, over_it), True
    if not theirs:
        if drop:
            raise InputError("--drop: there is no configuration of RLlib: leave it out")
        return data
    found = migrate(data, algo=algo, env=env, drop=drop)
    tell(f"{name} is a configuration of RLlib: it was migrated (python -m jrl.config migrate writes it down)")
    for line in found.told():
        tell(f"migrated: {line}")
    return found.config


# ---------------------------------------------------------------- python -m jrl.config migrate


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
        print(*job.lines, sep="\n", file=sys.stderr)
        migration = _migration(job, args.drop)
        for line in migration.told()[len(job.lines) :]:
            print(line, file=sys.stderr)
    except InputError as e:
        return command.refused(e)
    found = migration.config
    comments = {ours: theirs for ours, theirs in job.origins.items() if ours in schema.flatten(found)}
    print(f"# from {Path(args.config).name}, a configuration of RLlib; the comments are its keys")
    print(schema.dump(found, comments), end="")
    return 0
