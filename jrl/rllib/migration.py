"""Migration of RLlib's configurations: `migrate(data).config`, `python -m jrl.config migrate old.yaml`.

Missing keys have jrl's defaults. A key whose feature jrl lacks is an error, unless the caller drops it.
docs/rllib-users.md has the table of keys.
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
from jrl.rllib import multi_agent, rules
from jrl.rllib.table import ALGORITHMS, GROUPS, INSTEAD, KEYS
from jrl.rllib.translation import Job, split_containers, translate

RULES = (multi_agent, rules)  # modules that register rules when they are imported
_KNOWN = (
    "PPO, APPO, IMPALA, A2C, A3C, PG, DQN, APEX, R2D2, SimpleQ, SAC, TQC, TD3, DDPG, and from data BC, MARWIL, CQL, "
    "IQL, DT"
)
_EXPERIMENT = {name for row in GROUPS["Experiment"] for name in row.names} - {"algo_class"}


class Migration(NamedTuple):
    """Migrated configuration and its report."""

    config: dict[str, Any]  # jrl's config as plain data
    lines: list[str]  # a line for each key: its translation, or the reason why it has none
    dropped: Sequence[str] = ()  # a line for each key whose feature jrl lacks, and each unknown key

    def report(self) -> list[str]:
        """Returns all lines of the report."""
        return self.lines + ["dropped, as was asked:", *(f"  {line}" for line in self.dropped)] * bool(self.dropped)


def looks_like_rllib(data: Mapping[str, Any]) -> bool:
    """Returns whether data are a configuration of RLlib: a tuned example, an experiment, or a dict of its keys."""
    env = data.get("env")
    if config.is_jrl_config(data) or (isinstance(env, Mapping) and "grid_search" not in env):
        return False
    return _has_experiments(data) or any(str(name) in KEYS and name != "stop" for name, _ in split_containers(data))


def migrate(
    data: Mapping[str, Any], *, algo: str | None = None, env: Any = None, name: str | None = None, drop: bool = False
) -> Migration:
    """Returns the migration of a configuration of RLlib, checked by `jrl.config.reader.from_dict`.

    Args:
      data: `{name: {run, env, stop, config}}`, `{run, env, stop, config}`, or a config dict.
      algo: RLlib's name of the algorithm; None: the name in `data`.
      env: environment; None: the environment in `data`.
      name: name of the experiment, if `data` has several.
      drop: whether to drop unknown keys and keys whose feature jrl lacks, such as a model for torch.
    Raises:
      InputError: all faults, by the keys in `data`.
    """
    return _build_migration(_build_job(data, algo, env, name), drop)


def _build_migration(job: Job, drop: bool) -> Migration:
    refused = [] if drop else [f"{line}: remove it, or use --drop" for line in job.refused]
    if job.faults or refused:
        raise InputError(*job.faults, *refused)
    try:
        config.from_dict(job.tree)
    except InputError as e:
        spelled = {ours: given for ours, given in job.origins.items() if ours != given}
        origins = lambda message: ", ".join(f"{ours} was {given}" for ours, given in spelled.items() if ours in message)
        raise InputError(*(f"{x} ({origins(x)})" if origins(x) else x for x in e.errors)) from None
    return Migration(job.tree, job.lines, job.refused)


def _build_job(data: Mapping[str, Any], algo: str | None, env: Any, name: str | None) -> Job:
    """Returns the translation of all keys. Raises InputError: unknown algorithm or experiment."""
    from jrl.algos import get_config_class

    given = _find_experiment(data, name)
    named = next((key for key in ("run", "algo", "algo_class") if isinstance(given.get(key), str)), "run")
    source = _find_algorithm(algo or given.get(named))
    given.pop("algo_class", None)
    if algo is None:
        given.pop(named, None)
    given, choices = _take_first_choices(given)
    raw = dict(split_containers(given))
    if env is not None:
        raw["env"] = env
    ours = ALGORITHMS[source]
    job = Job(ours.name, source, get_config_class(ours.name), raw)
    job.put(named if algo is None else "--algo", "algo.name", ours.name, ours.note)
    for key, value in ours.parts.items():
        job.set(key, value, f"run: {source.upper()}")
    job.base = copy.deepcopy(job.tree)
    job.lines += choices
    if not raw.get("env") and not job.is_offline and not job.has_clients:
        job.faults.append("env is missing: set it, e.g. --env CartPole-v1")
    translate(job)
    return job


def _find_algorithm(given: Any) -> str:
    """Returns the key of ALGORITHMS for RLlib's name, class or trainer."""
    if given is None:
        raise InputError(f"the name of the algorithm is missing: give --algo with one of {_KNOWN}")
    name = given.strip().strip("<>'\" ").rpartition(".")[2].lower()
    for suffix in ("", "trainer", "config"):
        if name.removesuffix(suffix) in ALGORITHMS:
            return name.removesuffix(suffix)
        if fix := INSTEAD.get(name.removesuffix(suffix)):
            raise InputError(f"unknown algorithm {short(given)}: {fix}")
    raise InputError(f"unknown algorithm {short(given)}: expected one of {_KNOWN}")


def _take_first_choices(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the keys with the first value of each grid_search, and a line for each."""
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


def _is_experiment(body: Any) -> bool:
    """Returns whether a value is an experiment, as under the name of a tuned example."""
    if not isinstance(body, Mapping):
        return False
    return isinstance(body.get("run", body.get("algo")), str) or (
        "env" in body and isinstance(body.get("config"), Mapping)
    )


def _has_experiments(data: Mapping[str, Any]) -> bool:
    return bool(data) and all(_is_experiment(body) for body in data.values())


def _find_experiment(data: Any, name: str | None) -> dict[str, Any]:
    """Returns the keys of a tuned example, an experiment, or a config dict; keys outside of `config` are last."""
    if not isinstance(data, Mapping):
        raise InputError(f"expected a mapping of RLlib's keys, got {short(data)}")
    if _has_experiments(data):
        names = [str(key) for key in data]
        if name is None and len(names) > 1:
            raise InputError(f"expected one experiment, got {', '.join(names)}: choose by --name")
        if name is not None and name not in names:
            raise InputError(f"--name {name}: unknown experiment: choose one of {', '.join(names)}")
        data = data[name or names[0]]
    inner = data.get("config", {})
    if not isinstance(inner, Mapping):
        raise InputError(f"config: expected a mapping, got {short(inner)}")
    outer = {k: v for k, v in data.items() if str(k) in _EXPERIMENT}
    return {**{k: v for k, v in data.items() if k not in outer and k != "config"}, **inner, **outer}


def _override(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration of RLlib, or each of its experiments, with some keys of `config` overridden."""
    if _has_experiments(data):
        return {name: _override(body, given) for name, body in data.items()}
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
    """Returns a config of jrl as plain data, from a config of jrl or RLlib.

    Args:
      data: content of a config file, or empty.
      name: name of the file, for messages.
      algo, env, drop: arguments of `migrate`.
      over_it: keys of RLlib that override `data`.
      tell: function that takes each line of the report.
    Raises:
      InputError: all faults.
    """
    is_rllib = looks_like_rllib(data)
    if over_it:
        if data and not is_rllib:
            raise InputError(f"--config: {name} is a configuration of jrl: use --set a.b=v for keys of it")
        if not data and not looks_like_rllib({"run": "PPO", "config": over_it}):
            return over_it
        data, is_rllib = _override(data, over_it), True
    if drop and not is_rllib:
        raise InputError("--drop: expected a configuration of RLlib, got none: leave it out")
    if not is_rllib:
        return data
    found = migrate(data, algo=algo, env=env, drop=drop)
    tell(f"{name} is a configuration of RLlib: it was migrated (python -m jrl.config migrate prints the result)")
    for line in found.report():
        tell(f"migrated: {line}")
    return found.config


def main(argv: Sequence[str] | None = None) -> int:
    """Prints jrl's config on stdout and the report on stderr. Return the exit status: 2 for bad input."""
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
            raise InputError(f"{args.config}: expected a configuration of RLlib, got no key of RLlib at the top")
        job = _build_job(data, args.algo, args.env, args.name)
        print(*job.lines, sep="\n", file=sys.stderr)  # before errors of the whole config
        found = _build_migration(job, args.drop)
    except InputError as e:
        return command.report_input_error(e)
    for line in found.report()[len(job.lines) :]:
        print(line, file=sys.stderr)
    comments = {ours: given for ours, given in job.origins.items() if ours in schema.flatten(found.config)}
    print(f"# from {Path(args.config).name}, a configuration of RLlib; the comments are its keys")
    print(schema.dump(found.config, comments), end="")
    return 0
