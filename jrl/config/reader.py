"""Reads a run's config from YAML, Python and the command line; check it; write it.

    cfg = load("configs/ppo.yaml", ["algo.lr=1e-3", "rollout.length=256"])
    python -m jrl.config show configs/ppo.yaml --set algo.lr=1e-3
    python -m jrl.config show configs/ppo.yaml --network
    python -m jrl.config validate configs/ppo.yaml
    python -m jrl.config list

Imports no jax and no environment library, so that `--help` and errors appear at once.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jrl import registry
from jrl.config import metric_names
from jrl.config.checks import command_faults, faults
from jrl.config.datasets import SAMPLER
from jrl.config.external import ExternalConfig
from jrl.config.plan import STEPS_PER_REPORT, Sizes
from jrl.config.sections import SYNONYMS, ReplayConfig, RunConfig
from jrl.errors import InputError, did_you_mean, short, shown
from jrl.fields import schema, shipped, validation
from jrl.fields.bounds import Count, is_number
from jrl.fields.data import Fresh, learns_from, traits
from jrl.fields.paths import resolve, resolve_glob
from jrl.fields.schema import Problem, as_plain
from jrl.host import files

# help text of --drop
DROP = "leave out the keys of an RLlib config that jrl does not have, such as those of other replay buffers"
_OWN = ("algo", "network", "rollout", "replay", "checkpoint", "devices", "env_runners", "run", "custom", "evaluation")
_LINE = "lin_"  # Stable-Baselines3: a line to 0 at the end of the run
_PATTERN = set("*?[")  # characters of a glob pattern
_EXTERNAL = ("spaces", "token_file", "certificate", "private_key")  # paths in the section `external`
# key of earlier versions of the section `network` -> its present name, and the values of false and true
_RENAMED = {
    "orthogonal": ("init", ("lecun", "orthogonal")),
    "layer_norm": ("norm", ("none", "layer")),
    "critic_layer_norm": ("critic_norm", (None, "layer")),
}
_MOST_DOTS = 40  # dots in a key of the command line
_MOST_PROBLEMS = 50  # problems that are printed


# ---------------------------------------------------------------- reading


def load(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Iterable[str] = (),
    *,
    algo: str | None = None,
    env: str | None = None,
    stop: Iterable[str] = (),
    out: str | None = None,
) -> RunConfig:
    """Reads a config of jrl and apply options of the command line. `jrl.migrate` reads configs of RLlib.

    Args:
      path: path of a file, name of a shipped config, the data of a config, or None for defaults.
      overrides: texts such as "rollout.length=256"; values are YAML.
      algo, env, out: short for algo.name, env.id and run.out.
      stop: texts such as "env_steps=1e6", short for stop.env_steps=1e6; or JSON as for RLlib,
        '{"training_iteration": 30}'.
    Raises:
      InputError: all faults of the config.
    """
    flags = {"--algo": algo, "--env": env, "--out": out}
    return read(path, overrides, flags, stop)[0]


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Builds a RunConfig from plain data, the inverse of `to_dict`; stop criteria are optional.

    Raises:
      InputError: all faults of the data.
    """
    cfg, problems = _build(with_present_names(data), ends=False)
    if problems:
        raise InputError(*_messages(problems))
    return cfg


def override(data: Mapping[str, Any], overrides: Iterable[str]) -> RunConfig:
    """Returns `from_dict` of plain data after overrides such as "a.b=v". Raises InputError with all faults."""
    return read(data, overrides, {}, (), ends=False)[0]


def to_dict(cfg: RunConfig) -> dict[str, Any]:
    """Returns plain data for YAML and JSON, with every key; `algo.name` is first."""
    tree = schema.plain(cfg)
    return {**tree, "algo": {"name": algo_name(cfg), **tree["algo"]}}


def to_yaml(cfg: RunConfig, *, origins: Mapping[str, str] | None = None) -> str:
    """Returns the complete config as YAML, which `load` reads.

    Args:
      origins: dotted key -> origin of its value ("file", "--set"), for a comment on each line; None: no comments.
    """
    data = to_dict(cfg)
    if origins is None:
        return schema.dump(data)
    docs = validation.tree_docs(cfg)
    comments = {k: "; ".join(filter(None, [origins.get(k, "default"), docs.get(k)])) for k in schema.flatten(data)}
    return schema.dump(data, comments)


def with_present_names(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns plain data with keys of earlier versions translated to the present ones."""
    data = _with_present_network(data)
    section = data.get("multi_agent")
    if not isinstance(section, Mapping):
        return data
    changed = {name: value for name, value in section.items() if name != "capacity"}  # no longer needed
    if isinstance(policies := section.get("policies"), Mapping):
        rename = lambda own: _with_present_network(own) if isinstance(own, Mapping) else own
        changed["policies"] = {name: rename(own) for name, own in policies.items()}
    return {**data, "multi_agent": changed}


def _with_present_network(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of a run or a policy with present names of the keys of `network`."""
    network = data.get("network")
    if not isinstance(network, Mapping):
        return data
    renamed = {}
    for old, (name, values) in _RENAMED.items():
        if isinstance(network.get(old), bool):
            renamed[name] = values[network[old]]
            network = {key: value for key, value in network.items() if key != old}
    return {**data, "network": {**renamed, **network}} if renamed else data


def without_loss(cfg: RunConfig) -> RunConfig:
    """Returns the config without the user's loss and the teacher: acting needs neither, and may not find them."""
    algo = dataclasses.replace(cfg.algo, teacher=None) if traits(cfg.algo).has_teacher else cfg.algo
    return dataclasses.replace(cfg, algo=algo, custom=dataclasses.replace(cfg.custom, loss=None))


def write(cfg: RunConfig, directory: Path) -> None:
    """Writes the complete config to config.yaml, and to params.json for other tools."""
    files.replace(directory / "config.yaml", to_yaml(cfg))
    files.replace(directory / "params.json", json.dumps(to_dict(cfg), indent=2) + "\n")


def algo_name(cfg: RunConfig) -> str:
    """Returns the name of the algorithm of `cfg.algo`: registered, or the module of the user's own algorithm."""
    name = getattr(cfg.algo, "name", None)
    if isinstance(name, str):
        return name
    from jrl import algos

    module = type(cfg.algo).__module__
    for name in (*algos.of_module(module), module):
        if algos.get_config_class(name) is type(cfg.algo):
            return name
    raise InputError(f"algo: {type(cfg.algo).__qualname__} is not the Config of its module: rename it to Config")


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merges as `schema.merge` does, but treat `data.input` with its shares as one value.

    >>> merge({"data": {"input": {"sampler": 0.5, "a": 0.5}}}, {"data": {"input": {"b": 1.0}}})
    {'data': {'input': {'b': 1.0}}}
    """
    old, new = base.get("data"), override.get("data")
    if isinstance(old, Mapping) and isinstance(new, Mapping) and "input" in new:
        base = {**base, "data": {name: value for name, value in old.items() if name != "input"}}
    return schema.merge(base, override)


def read(
    source: str | Path | Mapping[str, Any] | None,
    overrides: Iterable[str],
    flags: Mapping[str, str | None],
    stop: Iterable[str],
    *,
    ends: bool = True,
) -> tuple[RunConfig, dict[str, str]]:
    """Reads a config as `load` does.

    Args:
      flags: option --algo, --env or --out -> value or None.
      ends: require a stop criterion that ends the run.
    Returns:
      The config, and the origin of each key that was set.
    """
    from_file = source if isinstance(source, Mapping) else mapping(source)
    problems: list[Problem] = []
    from_options: dict[str, Any] = {}
    origins: dict[str, str] = {}
    short = {"--algo": "algo.name", "--env": "env.id", "--out": "run.out"}
    assignments: list[tuple[str, str, Any]] = [(f, short[f], value) for f, value in flags.items() if value is not None]
    for flag, prefix, texts in (("--stop", "stop.", stop), ("--set", "", overrides)):
        for text in texts:
            if flag == "--stop" and text.lstrip().startswith("{"):
                criteria, problem = _json_stop(text)
                assignments += [(flag, prefix + name, value) for name, value in criteria.items()]
                problems += problem
                continue
            key, equals, value = text.partition("=")
            try:
                if not equals or not all(key.split(".")) or key.count(".") > _MOST_DOTS:
                    raise ValueError
                assignments.append((flag, prefix + key.strip(), schema.parse(value)))
            except (ValueError, yaml.YAMLError) as e:
                why = f"{schema.describe_yaml_error(e)}: " if isinstance(e, yaml.YAMLError) else ": "
                example = "env_steps=300000" if flag == "--stop" else "rollout.length=256"
                expected = f"expected key=value, such as {example}"
                problems.append(Problem(key, f"{flag} {shown(text)}{why}{expected}"))
    problems += _unknown_criteria(from_file, assignments)
    for flag, key, value in assignments:
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        nested = with_present_names(nested)
        from_options = (schema.merge if key.startswith("data.input.") else merge)(from_options, nested)
        origins |= dict.fromkeys(schema.flatten(nested), flag)
    keeps_mix = all(key not in ("data", "data.input") for _, key, _ in assignments)
    data = (schema.merge if keeps_mix else merge)(with_present_names(from_file), from_options)
    cfg, problems_of_data = _build(data, ends=ends)
    if problems or problems_of_data:
        raise InputError(*_messages(problems + problems_of_data))
    return cfg, {key: origins.get(key, "file") for key in schema.flatten(data)}


def _unknown_criteria(data: Mapping[str, Any], assignments: Sequence[tuple[str, str, Any]]) -> Iterator[Problem]:
    """Yields a problem for each option KEY=null of the command line without a stop criterion KEY."""
    metric = lambda name: metric_names.ours(schema.text(name)) or schema.text(name)
    stop = data.get("stop")
    known = {metric(name) for name in stop} if isinstance(stop, Mapping) else set()
    for flag, key, value in assignments:
        section, _, name = key.partition(".")
        if section != "stop" or value is not None:
            known |= {metric(name)} if section == "stop" else set()
        elif metric(name) not in known:
            expected = f"one of {', '.join(sorted(known))}" if known else "no name, because there are no criteria"
            yield Problem(key, f"{flag} {shown(name)}=null: it drops a criterion, expected {expected}: leave it out")


def _messages(problems: Sequence[Problem]) -> Iterator[str]:
    yield from (p.message for p in problems[:_MOST_PROBLEMS])
    if len(problems) > _MOST_PROBLEMS:
        yield f"and {len(problems) - _MOST_PROBLEMS:,} more errors"


def mapping(path: str | Path | None) -> Mapping[str, Any]:
    """Reads the mapping in a YAML or JSON file, or in a shipped config by its name; {} for None. Raises InputError."""
    return {} if path is None else schema.read_mapping(shipped.locate(path))


def is_jrl_config(data: Mapping[str, Any]) -> bool:
    """Returns whether plain data are certainly not an RLlib config: empty, or with a section of jrl. Cheap."""
    return not data or any(isinstance(data.get(section), Mapping) for section in _OWN)


def _json_stop(text: str) -> tuple[dict[str, Any], list[Problem]]:
    try:
        criteria = schema.parse(text)
    except yaml.YAMLError:
        criteria = None
    if not isinstance(criteria, dict):
        return {}, [Problem("stop", f'--stop {shown(text)}: expected metric=number, or JSON such as {{"time_s": 60}}')]
    return {key.replace(".", "/"): value for key, value in schema.flatten(criteria).items()}, []


def plain(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns the data of a config as plain data, and (key, message) of each value that YAML cannot hold.

    Raises:
      InputError: the data are nested without an end.
    """
    try:
        plain_data, unusable = as_plain(data)
    except RecursionError:
        raise InputError("the config: expected plain data, got a part that contains itself: write it out") from None
    expected = "expected numbers, text, lists or mappings, as in YAML"
    fix = "make it with the environment: jrl.api.register_env(NAME, lambda context: ...), with env.id=NAME"
    faults = [(key, f"{shown(key)}: {expected}, got a {type(value).__name__}: {fix}") for key, value in unusable]
    return plain_data, faults


_SECTIONS = tuple(f.name for f in dataclasses.fields(RunConfig))


def _hint_for_algorithm(given: Any, known: Sequence[str]) -> str:
    name = short(given)[1:-1] if isinstance(given, str) else short(given)
    from jrl.config import sb3_names

    if answer := sb3_names.algorithm(name):
        return f": {answer}"
    if (config := name.lower().replace("-", "_")) in shipped.names():
        return f": it is a config of jrl: leave out --algo and give its name, as in `jrl train {config}`"
    return did_you_mean(short(given).lower(), known)


def _unknown_key(key: str, *, cls: type | None) -> str | None:
    from jrl.config import sb3_names

    if key.startswith("algo.curiosity") and not hasattr(cls, "curiosity"):
        return "only ppo and a2c have intrinsic rewards: use one of them, or leave it out"
    replay = learns_from(cls) is not Fresh
    return sb3_names.answer(key, replay=replay, sections=_SECTIONS)


def _budget(data: Mapping[str, Any]) -> float | None:
    """Returns the environment steps or updates that end a run with these plain data, or None."""
    stop: Any = data.get("stop")
    for name in ("env_steps", "updates") if isinstance(stop, Mapping) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            if 1 <= (steps := float(stop[name])) < math.inf:
                return steps
    return None


def _in_steps(value: Any, steps: float | None) -> Any:
    """Returns plain data with schedules in steps of the run; unchanged if the number of `steps` is not known.

    `lin_0.001` is a line to 0 at the end of the run. [[0, 0.001], [0.5, 0.0001]] is in fractions of the run.

    >>> _in_steps({"lr": "lin_0.001", "clip_eps": [[0, 0.2], [0.5, 0.1]]}, 1000)
    {'lr': [[0, 0.001], [1000, 0.0]], 'clip_eps': [[0, 0.2], [500, 0.1]]}
    """
    if steps is None:
        return value
    if isinstance(value, Mapping):
        return {name: _in_steps(item, steps) for name, item in value.items()}
    if isinstance(value, str) and value.startswith(_LINE):
        with contextlib.suppress(ValueError):
            return [[0, float(value.removeprefix(_LINE))], [round(steps), 0.0]]
    if isinstance(value, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in value):
        times = [time for time, _ in value]
        if all(is_number(time) for time in times) and times and 0 < times[-1] <= 1:
            return [[round(time * steps), number] for time, number in value]
    return value


def _algorithm(section: Any) -> tuple[type | None, str, list[str]]:
    """Returns the Config class and the name of the algorithm in plain data, or (None, "", messages)."""
    from jrl import algos

    if not isinstance(section, Mapping):
        return None, "", [f"algo: expected a mapping such as {{name: ppo}}, got {short(section)}"]
    name, names = section.get("name"), ", ".join(algos.names())
    if name is None:
        return None, "", [f"algo.name is missing: expected one of {names}"]
    name = algos.spelled(schema.text(name))
    if name not in algos.names() and not algos.is_own(name):
        hint = _hint_for_algorithm(section["name"], algos.names())
        return None, "", [f"algo.name: expected one of {names}, got {short(section['name'])}{hint}"]
    try:
        return algos.get_config_class(name), name, []
    except InputError as e:  # raised by the user's own module
        return None, "", list(e.errors)


def _prepare(data: Mapping[str, Any], cls: type | None, name: str) -> dict[str, Any]:
    """Returns plain data under the names of the fields, with schedules in steps."""
    data = {**data, "replay": data.get("replay")}
    if cls is not None:
        algo = {**data["algo"], "name": name}
        if "name" not in cls.__dataclass_fields__:  # type: ignore[attr-defined]  # a Config is a dataclass
            del algo["name"]
        data["algo"] = algo
    if isinstance(data.get("devices"), str):
        data["devices"] = {"platform": data["devices"]}  # devices: auto
    env, stop, agents = data.get("env"), data.get("stop"), data.get("multi_agent")
    if isinstance(env, Mapping) and isinstance(id := env.get("id"), str) and "." in id and ":" not in id:
        data["env"] = {**env, "id": registry.importable_name(id) or id}  # package.module.Class
    if isinstance(stop, Mapping):
        criteria = {metric_names.ours(schema.text(key)) or key: value for key, value in stop.items()}
        data["stop"] = {key: value for key, value in criteria.items() if value is not None}  # null drops a criterion
    if learns_from(cls) is not Fresh:
        data["replay"] = data["replay"] or {}
    steps = _budget(data)
    data |= {key: _in_steps(data[key], steps) for key in ("algo", "replay") if key in data}
    if isinstance(agents, Mapping) and "policies" in agents:
        data["multi_agent"] = {**agents, "policies": _in_steps(agents["policies"], steps)}
    return data


def _build(data: Mapping[str, Any], *, ends: bool) -> tuple[Any, list[Problem]]:
    """Returns a config and all problems. With problems, the config is only good for further checks, or None."""
    from jrl import algos

    data, unusable = plain(data)
    cls, name, messages = _algorithm(data.get("algo", {}))
    problems = [Problem("algo", message) for message in messages]
    if data.pop("sweep", None) is not None:
        problems.append(Problem("sweep", "sweep: the file describes a sweep: run `python -m jrl.sweep FILE`"))
    if cls is not None and learns_from(cls) is Fresh and data.get("replay") is not None:
        with_replay = [n for n in algos.names() if learns_from(algos.get_config_class(n)) is not Fresh]
        fix = f"remove the section, or use {', '.join(with_replay)}"
        problems.append(Problem("replay", f"replay: {name} learns from each rollout once and keeps no replay: {fix}"))
    data = _prepare({**data, "algo": data["algo"] if cls else None}, cls, name)
    iterations = data["stop"].pop("training_iteration", None) if isinstance(data.get("stop"), dict) else None
    cfg = schema.build(
        RunConfig, data, problems,
        swap={"algo": cls} if cls else {}, synonyms=SYNONYMS, known=("algo.name", "stop.env_steps"),
        answer=functools.partial(_unknown_key, cls=cls),
    )  # fmt: skip
    reported = tuple(f"{problem.key}." for problem in problems)
    problems += [Problem(key, message) for key, message in unusable if not f"{key}.".startswith(reported)]
    if cfg is None:
        return None, problems
    if cfg.replay is None and learns_from(cls) is not Fresh:  # the section was faulty
        cfg = dataclasses.replace(cfg, replay=ReplayConfig())
    cfg, path_faults = resolve_paths(cfg)
    problems += [Problem(key, message) for key, message in path_faults]
    sizes = Sizes(cfg)
    key = sizes.counts_by
    steps = cfg.stop.get(key)
    if isinstance(steps, float) and steps.is_integer():
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, key: int(steps)})
    if iterations is not None and (fault := validation.fault(iterations, Count, "stop.training_iteration")):
        problems.append(Problem("stop.training_iteration", fault))
    elif iterations is not None and key not in cfg.stop and not problems:
        # the same length as an iteration of Algorithm.train
        length = max(sizes.rows, sizes.asked_iteration or STEPS_PER_REPORT)
        run = dataclasses.replace(cfg.run, report_every=cfg.run.report_every or length)
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, key: int(float(iterations) * length)}, run=run)
    # skip checks that read a broken key: they would complain about its default
    broken = [problem.key + "." for problem in problems]
    for keys, message in (*faults(cfg), *(command_faults(cfg) if ends else ())):
        if not any(b.startswith(k + ".") or (k + ".").startswith(b) for k in keys for b in broken):
            problems.append(Problem(keys[0], message))
    return cfg, problems


# ---------------------------------------------------------------- paths


def resolve_paths(cfg: RunConfig) -> tuple[RunConfig, list[tuple[str, str]]]:
    """Returns a config with absolute paths, and (key, message) of each value that cannot be a path."""
    faults: list[tuple[str, str]] = []

    def resolve_key(section: Any, name: str, key: str, read: Callable[[Any, str], Any] = _path) -> Any:
        value = None if section is None else getattr(section, name)
        if value is None:
            return section
        try:
            return dataclasses.replace(section, **{name: read(value, f"{key}.{name}")})
        except InputError as e:
            faults.extend((f"{key}.{name}", line) for line in e.errors)
            return section

    data = dataclasses.replace(cfg.data, output=resolve_key(cfg.data.output, "path", "data.output"))
    data, external = resolve_key(data, "input", "data", _inputs), cfg.external
    for name in _EXTERNAL:
        external = resolve_key(external, name, "external")
    run = resolve_key(cfg.run, "out", "run")
    return dataclasses.replace(cfg, run=run, data=data, external=external), faults


def resolve_external(section: ExternalConfig) -> ExternalConfig:
    """Returns the section `external` with absolute paths. Raises InputError: a value cannot be a path."""
    values = {name: getattr(section, name) for name in _EXTERNAL}
    paths: dict[str, Any] = {name: _path(path, f"external.{name}") for name, path in values.items() if path is not None}
    return dataclasses.replace(section, **paths)


def _path(value: Any, key: str) -> str:
    return str(resolve(value, key))


def _inputs(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return _input(value, key)
    inputs = [_input(name, key) for name in value]
    if not isinstance(value, dict):
        return tuple(inputs)
    if len(set(inputs)) < len(inputs):
        twice = next(name for name in inputs if inputs.count(name) > 1)
        same = " and ".join(name for name in value if _input(name, key) == twice)
        raise InputError(f"{key}: expected different paths, got {same}, which are one path: leave one out")
    return dict(zip(inputs, value.values(), strict=True))


def _input(name: str, key: str) -> str:
    """Returns an input of data: an absolute path or glob, the name of a function, or `sampler`."""
    if not name or name == SAMPLER or registry.registered(name) is not None:
        return name
    path = resolve(name, key)
    if ":" in name and not os.path.isabs(name) and not os.path.lexists(path):  # package.module:name
        return name
    return resolve_glob(name, key) if _PATTERN & set(name) else str(path)
