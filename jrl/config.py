"""A run's configuration: frozen dataclasses, the one source of defaults, and the same tree as YAML.

    cfg = load("configs/ppo.yaml", ["algo.lr=1e-3", "rollout.length=256"])
    python -m jrl.config show configs/ppo.yaml --set algo.lr=1e-3
    python -m jrl.config show configs/ppo.yaml --network
    python -m jrl.config validate configs/ppo.yaml
    python -m jrl.config list

Imports no jax and no environment library, so that commands answer `--help` and bad input at once.
"""

import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jrl import command, files, schema, shipped
from jrl.bounds import Count, short
from jrl.errors import InputError
from jrl.hyper import NetworkConfig
from jrl.plain_yaml import limited
from jrl.plan import STEPS_PER_REPORT, batch_plan, num_learners, num_pools
from jrl.plan import lines as plan_lines
from jrl.plan_faults import endless, faults
from jrl.schema import Problem, merge
from jrl.sections import (
    SYNONYMS,
    CheckpointConfig,
    CustomConfig,
    DevicesConfig,
    EnvConfig,
    EnvRunnersConfig,
    EvaluationConfig,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    RunSettings,
    RuntimeConfig,
)

__all__ = [
    "CheckpointConfig", "CustomConfig", "DevicesConfig", "EnvConfig", "EnvRunnersConfig", "EvaluationConfig",
    "InputError", "NetworkConfig", "ReplayConfig", "RolloutConfig", "RunConfig", "RunSettings", "RuntimeConfig",
    "algo_name", "batch_plan", "check_env", "from_dict", "load", "main", "merge", "override", "renamed", "to_dict",
    "to_yaml", "without_loss", "write",
]  # fmt: skip


Algos = Mapping[str, type]
# for --help of the commands that take a config
DROP = "of RLlib's configuration, leave out what jrl does not have (several agents, data from files); else an error"
_MOST_DOTS = 40  # in a key of the command line
_MOST_PROBLEMS = 50  # that are told at once


# ---------------------------------------------------------------- reading


def load(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Iterable[str] = (),
    *,
    algo: str | None = None,
    env: str | None = None,
    stop: Iterable[str] = (),
    out: str | None = None,
    algos: Algos | None = None,
    drop: bool = False,
    rllib: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> RunConfig:
    """The YAML file with the command line over it. One of RLlib's is migrated (see `jrl.migrate`).

    Args:
      path: of a file, or the name of a config that comes with jrl; what a file holds; None for defaults only.
      overrides: "rollout.length=256"; the value is read as YAML.
      algo, env, out: short for algo.name, env.id and run.out.
      stop: "env_steps=1e6", short for stop.env_steps; or RLlib's JSON '{"training_iteration": 30}'.
      drop: of a configuration of RLlib, leave out what jrl does not have.
      rllib: keys of RLlib's over those of the file, which then is one of RLlib's, too.
      algos: name -> Config class; None for `jrl.algos`.
      tell: called with each line about a migration.
    Raises:
      InputError: all that is wrong.
    """
    flags = {"--algo": algo, "--env": env, "--out": out}
    return _load(path, overrides, flags, stop, algos, drop=drop, rllib=rllib, tell=tell)[0]


def from_dict(data: Mapping[str, Any], *, algos: Algos | None = None) -> RunConfig:
    """Plain data -> RunConfig; the inverse of `to_dict`. A run without an end is one. Raises InputError with all that
    is wrong.
    """
    cfg, problems = _build(renamed(data), algos, ends=False)
    if problems:
        raise InputError(*_told(problems))
    return cfg


def override(data: Mapping[str, Any], overrides: Iterable[str]) -> RunConfig:
    """`from_dict` of plain data with "a.b=v" texts over it. Raises InputError with all that is wrong."""
    return _load(data, overrides, {}, (), None, ends=False)[0]


def to_dict(cfg: RunConfig, *, algos: Algos | None = None) -> dict[str, Any]:
    """Plain data that YAML and JSON can hold, every key present, `algo.name` first."""
    tree = schema.plain(cfg)
    return {**tree, "algo": {"name": algo_name(cfg, algos=algos), **tree["algo"]}}


def to_yaml(cfg: RunConfig, *, origins: Mapping[str, str] | None = None, algos: Algos | None = None) -> str:
    """The complete config. With `origins` (dotted key -> word) each line says where its value is from and what it is.

    `load` gives an equal config back, with or without the comments.
    """
    if origins is None:
        return schema.dump(to_dict(cfg, algos=algos))
    docs = schema.tree_docs(cfg)
    data = to_dict(cfg, algos=algos)
    comments = {k: "; ".join(filter(None, [origins.get(k, "default"), docs.get(k)])) for k in schema.flatten(data)}
    return schema.dump(data, comments)


def renamed(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Plain data with names of earlier versions as the present ones."""
    network = data.get("network")
    if not isinstance(network, Mapping) or not isinstance(network.get("orthogonal"), bool):
        return data
    rest = {name: value for name, value in network.items() if name != "orthogonal"}
    return {**data, "network": {"init": "orthogonal" if network["orthogonal"] else "lecun", **rest}}


def without_loss(cfg: RunConfig) -> RunConfig:
    """The run for those who only act: a loss of the user's, which may be out of reach, is not loaded."""
    return dataclasses.replace(cfg, custom=dataclasses.replace(cfg.custom, loss=None))


def write(cfg: RunConfig, directory: Path) -> None:
    """Writes the complete config to `directory`/config.yaml, and for other tools to params.json."""
    files.replace(directory / "config.yaml", to_yaml(cfg))
    files.replace(directory / "params.json", json.dumps(to_dict(cfg), indent=2) + "\n")


def algo_name(cfg: RunConfig, *, algos: Algos | None = None) -> str:
    """The name under which the Config class of `cfg.algo` is registered."""
    own = getattr(cfg.algo, "name", None)
    if isinstance(own, str):
        return own
    registry = _Registry(algos)
    found = [name for name in registry.names if registry.get(name) is type(cfg.algo)]
    if not found and algos is None and registry.get(type(cfg.algo).__module__) is type(cfg.algo):
        return type(cfg.algo).__module__  # the user's own
    if len(found) != 1:
        raise InputError(f"algo: {type(cfg.algo).__qualname__} is registered {len(found)} times, must be once")
    return found[0]


class _Registry:
    """Algorithm name -> Config class, without importing `jrl.algos` (and jax) before it is asked."""

    def __init__(self, algos: Algos | None):
        if algos is None:
            from jrl.algos import get_config_class, is_own, names

            self.names: tuple[str, ...] = tuple(names())
            self.get: Callable[[str], type] = get_config_class
            self.is_own: Callable[[Any], bool] = is_own
        else:
            self.names, self.get, self.is_own = tuple(algos), algos.__getitem__, lambda name: False


def _load(
    source: str | Path | Mapping[str, Any] | None,
    overrides: Iterable[str],
    flags: Mapping[str, str | None],
    stop: Iterable[str],
    algos: Algos | None,
    *,
    ends: bool = True,
    drop: bool = False,
    rllib: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[RunConfig, dict[str, str]]:
    """The config, which has to name an end of the run if `ends`, and the origin of each key that is not a default."""
    from_file = source if isinstance(source, Mapping) else _read(source, flags, tell, drop=drop, given=rllib)
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    short = {"--algo": "algo.name", "--env": "env.id", "--out": "run.out"}
    assignments: list[tuple[str, str, Any]] = [(f, short[f], value) for f, value in flags.items() if value is not None]
    for flag, prefix, texts in (("--stop", "stop.", stop), ("--set", "", overrides)):
        for text in texts:
            if flag == "--stop" and text.lstrip().startswith("{"):
                found_stop, problem = _json_stop(text)
                assignments += [(flag, prefix + name, value) for name, value in found_stop.items()]
                problems += problem
                continue
            key, equals, value = text.partition("=")
            try:
                if not equals or not all(key.split(".")) or key.count(".") > _MOST_DOTS:
                    raise ValueError
                assignments.append((flag, prefix + key.strip(), schema.parse(value)))
            except (ValueError, yaml.YAMLError):
                given_as = f"{flag} {schema.shown(text)}"
                problems.append(Problem(key, f"{given_as}: expected key=value, such as rollout.length=256"))
    for flag, key, value in assignments:
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        nested = renamed(nested)
        given = merge(given, nested)
        origins |= dict.fromkeys(schema.flatten(nested), flag)
    data = merge(renamed(from_file), given)
    cfg, found = _build(data, algos, ends=ends)
    if problems or found:
        raise InputError(*_told(problems + found))
    return cfg, {key: origins.get(key, "file") for key in schema.flatten(data)}


def _told(problems: Sequence[Problem]) -> Iterator[str]:
    yield from (p.message for p in problems[:_MOST_PROBLEMS])
    if len(problems) > _MOST_PROBLEMS:
        yield f"and {len(problems) - _MOST_PROBLEMS:,} more errors"


def _read(
    path: str | Path | None,
    flags: Mapping[str, str | None],
    tell: Callable[[str], None],
    *,
    drop: bool = False,
    given: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The mapping in a file, with the keys that are `given` over it; of one of RLlib's what the migration makes of it.

    Raises:
      InputError: all that is wrong.
    """
    from jrl import migrate

    data = {} if path is None else migrate.read(shipped.locate(path))
    theirs = migrate.looks_like_rllib(data)
    if given:
        if data and not theirs:
            raise InputError(f"--config: {path} is a configuration of jrl: use --set a.b=v for keys of it")
        if not data and not migrate.looks_like_rllib({"run": "PPO", "config": given}):
            return given
        data, theirs = migrate.over(data, given), True
    if not theirs:
        if drop:
            raise InputError("--drop: there is no configuration of RLlib: leave it out")
        return data
    found = migrate.migrate(data, algo=flags.get("--algo"), env=flags.get("--env"), drop=drop)
    name = path or "--config"
    tell(f"{name} is a configuration of RLlib: it was migrated (python -m jrl.config migrate writes it down)")
    for line in found.told():
        tell(f"migrated: {line}")
    return found.config


def _json_stop(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """The criteria in RLlib's form, '{"env_runners/episode_return_mean": 150}', and what is wrong with them."""
    try:
        found = schema.parse(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        return {}, [
            Problem("stop", f'--stop {schema.shown(text)}: expected metric=number, or JSON such as {{"time_s": 60}}')
        ]
    return {key.replace(".", "/"): value for key, value in schema.flatten(found).items()}, []


@dataclasses.dataclass(frozen=True)
class _Iterations:
    """RLlib's other end of a run."""

    training_iteration: Count = 1


def _build(data: Mapping[str, Any], algos: Algos | None, *, ends: bool) -> tuple[RunConfig, list[Problem]]:
    """A config and all problems; where there are any, the config is for further checks only."""
    limited(data)
    problems: list[Problem] = []
    algo = data.get("algo")
    cls = None
    if "algo" in data and not isinstance(algo, Mapping):
        problems.append(Problem("algo", f"algo: expected a mapping such as {{name: ppo}}, got {short(algo)}"))
    else:
        algo = dict(algo or {})
        registry = _Registry(algos)
        name = next((n for n in registry.names if n.lower() == str(algo.get("name")).lower()), None)
        if name is None and registry.is_own(algo.get("name")):  # the user's own module
            try:
                registry.get(name := str(algo["name"]))
            except InputError as e:
                problems += [Problem("algo", line) for line in e.errors]
                name = None
        if problems:
            algo = {}
        elif name is not None:
            cls = registry.get(name)
            algo.pop("name")
            if "name" in {f.name for f in dataclasses.fields(cls)}:
                algo["name"] = name
        elif algo.get("name") is None:
            problems.append(Problem("algo", f"algo.name is missing: expected one of {', '.join(registry.names)}"))
        else:
            near = difflib.get_close_matches(short(algo["name"]).lower(), registry.names, 1)
            mend = f": did you mean {near[0]}?" if near else ""
            known = ", ".join(registry.names)
            problems.append(Problem("algo", f"algo.name: expected one of {known}, got {short(algo['name'])}{mend}"))
    data, iterations = {**data, "algo": algo}, None
    if isinstance(env := data.get("env"), Mapping) and "." in str(env.get("id")) and ":" not in str(env["id"]):
        from jrl.migrate.rules import reference

        data["env"] = {**env, "id": reference(env["id"]) or env["id"]}  # package.module.Class
    if isinstance(data.get("stop"), Mapping):
        from jrl.migrate.experiment import metric

        data["stop"] = {metric(str(name)) or name: value for name, value in data["stop"].items()}  # RLlib's names
        iterations = data["stop"].pop("training_iteration", None)
    if getattr(cls, "uses_replay", False):
        data["replay"] = data.get("replay") or {}
    elif cls is not None and data.get("replay") is not None:
        having = [n for n in registry.names if getattr(registry.get(n), "uses_replay", False)]
        mend = f"remove the section, or use {', '.join(having) or 'another algorithm'}"
        problems.append(Problem("replay", f"replay: {name} learns from each rollout once and keeps no replay: {mend}"))
    cfg = schema.build(
        RunConfig, data, problems,
        swap={"algo": cls}, synonyms=SYNONYMS, known=("algo.name", "stop.env_steps"),
    )  # fmt: skip
    steps = cfg.stop.get("env_steps")
    if isinstance(steps, float) and steps.is_integer():
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, "env_steps": int(steps)})
    if iterations is not None:
        schema.build(_Iterations, {"training_iteration": iterations}, problems, prefix="stop.")
    if iterations is not None and "env_steps" not in cfg.stop and not problems:
        each = max(
            batch_plan(cfg).rows, cfg.run.report_every or STEPS_PER_REPORT
        )  # as long as those of Algorithm.train
        run = dataclasses.replace(cfg.run, report_every=cfg.run.report_every or each)
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, "env_steps": int(float(iterations) * each)}, run=run)
    # A check that reads a broken key would speak of that key's default: leave it out.
    broken = [p.key + "." for p in problems]
    for keys, message in (*faults(cfg), *(endless(cfg) if ends else ())):
        if not any(b.startswith(k + ".") or (k + ".").startswith(b) for k in keys for b in broken):
            problems.append(Problem(keys[0], message))
    return cfg, problems


# ---------------------------------------------------------------- python -m jrl.config


def main(argv: Sequence[str] | None = None) -> int:
    """`show` or `validate` a config, or `migrate` one of RLlib's; the exit status: 0, or 2 for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "migrate":
        from jrl import migrate

        return migrate.main(argv[1:])
    parser = command.parser(
        "config",
        "List the configs that come with jrl, show or validate one or your own, or migrate RLlib's (migrate --help "
        "tells how).",
    )
    parser.add_argument("command", choices=("list", "show", "validate", "migrate"))
    parser.add_argument("config", nargs="?", help="YAML file, or a name of `list`; without it: the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")
    parser.add_argument("--stop", action="append", default=[], metavar="metric=v")
    parser.add_argument("--algo", help="short for --set algo.name=...")
    parser.add_argument("--env", help="short for --set env.id=...")
    parser.add_argument("--drop", action="store_true", help=DROP)
    parser.add_argument(
        "--network",
        action="store_true",
        help="with show: the networks' parameters instead, for which one environment is made",
    )
    args = parser.parse_args(argv)
    if args.network and args.command != "show":
        parser.error(f"--network goes with show, not with {args.command}")
    if args.command == "list":
        print(*shipped.lines(), sep="\n")
        return 0
    try:
        flags = {"--algo": args.algo, "--env": args.env}
        tell = lambda line: print(line, file=sys.stderr)
        cfg, origins = _load(args.config, args.overrides, flags, args.stop, None, drop=args.drop, tell=tell)
        if args.network:
            print(*_network(cfg), sep="\n")
            return 0
        if args.command == "show":
            print(to_yaml(cfg, origins=origins), end="")
            return 0
        print(*plan_lines(cfg), sep="\n")
        try:
            check_env(cfg)
        except ImportError as e:
            print(f"the environment was not checked: {e}")
    except InputError as e:
        print(*e.errors, sep="\n", file=sys.stderr)
        return 2
    print("ok")
    return 0


def _network(cfg: RunConfig) -> Iterable[str]:
    from jrl import network_table

    return network_table.lines(network_table.rows(cfg))


def check_env(cfg: RunConfig) -> None:
    """Raises InputError with what is wrong with the environments and loggers of a run, without making one. Imports the
    environments' library.

    Raises:
      ImportError: that library is not there.
    """
    from jrl.envs import check
    from jrl.metrics import loggers

    env, runners = cfg.env, cfg.env_runners
    errors = check(
        env.id,
        env.backend,
        env.options,
        num_envs=env.num_envs // num_pools(cfg, num_learners(cfg) or 1),
        batch_size=env.batch_size,
        remote_worker_envs=env.remote_worker_envs,
        batch_wait_ms=env.batch_wait_ms,
        restart_failed=runners.restart_failed_sub_environments,
        step_timeout_s=runners.env_step_timeout_s,
        horizon=env.horizon,
        soft_horizon=env.soft_horizon,
    )
    errors += loggers.check(cfg.run.log)
    if errors:
        raise InputError(*errors)


if __name__ == "__main__":
    sys.exit(command.run(main))
