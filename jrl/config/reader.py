"""A run's configuration: frozen dataclasses, the one source of defaults, and the same tree as YAML.

    cfg = load("configs/ppo.yaml", ["algo.lr=1e-3", "rollout.length=256"])
    python -m jrl.config show configs/ppo.yaml --set algo.lr=1e-3
    python -m jrl.config show configs/ppo.yaml --network
    python -m jrl.config validate configs/ppo.yaml
    python -m jrl.config list

Imports no jax and no environment library, so that commands answer `--help` and bad input at once.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jrl import registry
from jrl.config import metric_names, path_keys, sb3_names
from jrl.config.checks import endless, faults
from jrl.config.plan import STEPS_PER_REPORT, asked_iteration, batch_plan, counts_by
from jrl.config.sections import SYNONYMS, ReplayConfig, RunConfig
from jrl.errors import InputError, short, shown
from jrl.fields import schema, shipped, validation
from jrl.fields.bounds import Count, is_number
from jrl.fields.data import Fresh, learns_from
from jrl.fields.plain_yaml import as_plain, check_limits
from jrl.fields.schema import Problem
from jrl.host import files

Algos = Mapping[str, type]
# for --help of the commands that take a config
DROP = "leave out the keys of RLlib's configuration that jrl does not have, such as those of other replay buffers"
_OURS = ("algo", "network", "rollout", "replay", "checkpoint", "devices", "env_runners", "run", "custom", "evaluation")
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
) -> RunConfig:
    """Reads the YAML file with the command line over it. One of RLlib's is for `jrl.migrate`.

    Args:
      path: of a file, or the name of a config that comes with jrl; what a file holds; None for defaults only.
      overrides: "rollout.length=256"; the value is read as YAML.
      algo, env, out: short for algo.name, env.id and run.out.
      stop: "env_steps=1e6", short for stop.env_steps; or RLlib's JSON '{"training_iteration": 30}'.
      algos: name -> Config class; None for `jrl.algos`.
    Raises:
      InputError: all that is wrong.
    """
    flags = {"--algo": algo, "--env": env, "--out": out}
    return read(path, overrides, flags, stop, algos)[0]


def from_dict(data: Mapping[str, Any], *, algos: Algos | None = None) -> RunConfig:
    """Makes a RunConfig of plain data, with or without an end; inverts `to_dict`. Raises InputError with all faults."""
    cfg, problems = _build(renamed(data), algos, ends=False)
    if problems:
        raise InputError(*_told(problems))
    return cfg


def override(data: Mapping[str, Any], overrides: Iterable[str]) -> RunConfig:
    """Returns `from_dict` of plain data with "a.b=v" texts over it. Raises InputError with all that is wrong."""
    return read(data, overrides, {}, (), None, ends=False)[0]


def to_dict(cfg: RunConfig, *, algos: Algos | None = None) -> dict[str, Any]:
    """Returns plain data that YAML and JSON can hold, every key present, `algo.name` first."""
    tree = schema.plain(cfg)
    return {**tree, "algo": {"name": algo_name(cfg, algos=algos), **tree["algo"]}}


def to_yaml(cfg: RunConfig, *, origins: Mapping[str, str] | None = None, algos: Algos | None = None) -> str:
    """Returns the complete config as YAML. With `origins` (dotted key -> word) each line says where its value is from.

    `load` gives an equal config back, with or without the comments.
    """
    if origins is None:
        return schema.dump(to_dict(cfg, algos=algos))
    docs = schema.tree_docs(cfg)
    data = to_dict(cfg, algos=algos)
    comments = {k: "; ".join(filter(None, [origins.get(k, "default"), docs.get(k)])) for k in schema.flatten(data)}
    return schema.dump(data, comments)


def renamed(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns plain data with the present names of keys of earlier versions."""
    given = data.get("multi_agent")
    if isinstance(given, Mapping) and "capacity" in given:  # policies are added without places for them
        data = {**data, "multi_agent": {name: value for name, value in given.items() if name != "capacity"}}
    network = data.get("network")
    if not isinstance(network, Mapping) or not isinstance(network.get("orthogonal"), bool):
        return data
    rest = {name: value for name, value in network.items() if name != "orthogonal"}
    return {**data, "network": {"init": "orthogonal" if network["orthogonal"] else "lecun", **rest}}


def without_loss(cfg: RunConfig) -> RunConfig:
    """Returns the run without the user's loss, which may be out of reach of those who only act."""
    return dataclasses.replace(cfg, custom=dataclasses.replace(cfg.custom, loss=None))


def write(cfg: RunConfig, directory: Path) -> None:
    """Writes the complete config to `directory`/config.yaml, and for other tools to params.json."""
    files.replace(directory / "config.yaml", to_yaml(cfg))
    files.replace(directory / "params.json", json.dumps(to_dict(cfg), indent=2) + "\n")


def algo_name(cfg: RunConfig, *, algos: Algos | None = None) -> str:
    """Returns the name under which the Config class of `cfg.algo` is registered."""
    own = getattr(cfg.algo, "name", None)
    if isinstance(own, str):
        return own
    known = _Registry(algos)
    found = [name for name in known.names if known.get(name) is type(cfg.algo)]
    if not found and algos is None and known.get(type(cfg.algo).__module__) is type(cfg.algo):
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


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merges as `schema.merge`, but the inputs of `data.input` with their shares are one value.

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
    algos: Algos | None,
    *,
    ends: bool = True,
) -> tuple[RunConfig, dict[str, str]]:
    """Returns the config, which has to name an end of the run if `ends`, and the origin of each key that was set."""
    from_file = source if isinstance(source, Mapping) else mapping(source)
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
            except (ValueError, yaml.YAMLError) as e:
                why = f"{schema.describe_yaml_error(e)}: " if isinstance(e, yaml.YAMLError) else ": "
                mend = "expected key=value, such as rollout.length=256"
                problems.append(Problem(key, f"{flag} {shown(text)}{why}{mend}"))
    problems += _unknown_criteria(from_file, assignments)
    for flag, key, value in assignments:
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        nested = renamed(nested)
        given = (schema.merge if key.startswith("data.input.") else merge)(given, nested)
        origins |= dict.fromkeys(schema.flatten(nested), flag)
    keeps_mix = all(key not in ("data", "data.input") for _, key, _ in assignments)
    data = (schema.merge if keeps_mix else merge)(renamed(from_file), given)
    cfg, found = _build(data, algos, ends=ends)
    if problems or found:
        raise InputError(*_told(problems + found))
    return cfg, {key: origins.get(key, "file") for key in schema.flatten(data)}


def _unknown_criteria(data: Mapping[str, Any], assignments: Sequence[tuple[str, str, Any]]) -> Iterator[Problem]:
    """Yields the stop criteria that the command line drops by null, and that there are not."""
    ours = lambda name: metric_names.ours(schema.text(name)) or schema.text(name)
    stop = data.get("stop")
    known = {ours(name) for name in stop} if isinstance(stop, Mapping) else set()
    for flag, key, value in assignments:
        section, _, name = key.partition(".")
        if section != "stop" or value is not None:
            known |= {ours(name)} if section == "stop" else set()
        elif ours(name) not in known:
            having = f"one of {', '.join(sorted(known))}" if known else "no name, as there are no criteria"
            yield Problem(key, f"{flag} {shown(name)}=null: it drops a criterion, expected {having}: leave it out")


def _told(problems: Sequence[Problem]) -> Iterator[str]:
    yield from (p.message for p in problems[:_MOST_PROBLEMS])
    if len(problems) > _MOST_PROBLEMS:
        yield f"and {len(problems) - _MOST_PROBLEMS:,} more errors"


def mapping(path: str | Path | None) -> Mapping[str, Any]:
    """Reads the mapping in a YAML or JSON file, or in one that comes with jrl, by name; without a path an empty one.

    Raises:
      InputError: it cannot be read, or holds something else.
    """
    return {} if path is None else schema.read_mapping(shipped.locate(path))


def is_ours(data: Mapping[str, Any]) -> bool:
    """Returns whether plain data are not RLlib's for certain: they have a section of ours, or nothing. Cheap."""
    return not data or any(isinstance(data.get(section), Mapping) for section in _OURS)


def _json_stop(text: str) -> tuple[dict[str, Any], list[Problem]]:
    try:
        found = schema.parse(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        return {}, [Problem("stop", f'--stop {shown(text)}: expected metric=number, or JSON such as {{"time_s": 60}}')]
    return {key.replace(".", "/"): value for key, value in schema.flatten(found).items()}, []


def plain(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns a config's data as YAML can hold it, and (key, message) of each value that it cannot hold.

    Raises:
      InputError: the data are too large or too deep for a config.
    """
    check_limits(data)
    found, odd = as_plain(data)
    check_limits(found)
    expected = "expected numbers, text, lists or mappings, which YAML holds"
    make = "make it where the environment is made: jrl.api.register_env(NAME, lambda context: ...), with env.id=NAME"
    return found, [(key, f"{shown(key)}: {expected}, got a {type(value).__name__}: {make}") for key, value in odd]


_SECTIONS = tuple(f.name for f in dataclasses.fields(RunConfig))


def _algorithm_meant(given: Any, known: Sequence[str]) -> str:
    name = short(given)[1:-1] if isinstance(given, str) else short(given)
    if answer := sb3_names.algorithm(name):
        return f": {answer}"
    if (config := name.lower().replace("-", "_")) in shipped.names():
        return f": it is a config of jrl: leave out --algo and give its name, as in `jrl train {config}`"
    near = difflib.get_close_matches(short(given).lower(), known, 1)
    return f": did you mean {near[0]}?" if near else ""


def _budget(data: Mapping[str, Any]) -> float | None:
    """Returns the number of steps that ends a run, or of updates, by plain data; None where there is none."""
    stop: Any = data.get("stop")
    for name in ("env_steps", "updates") if isinstance(stop, Mapping) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            if 1 <= (steps := float(stop[name])) < math.inf:
                return steps
    return None


def _in_steps(value: Any, steps: float | None) -> Any:
    """Returns plain data whose schedules count steps: `lin_0.001`, a line to 0 at the end of the run, and schedules
    in fractions of it, [[0, 0.001], [0.5, 0.0001]]. Without a number of steps they stay as they are.

    >>> _in_steps({"lr": "lin_0.001", "clip_eps": [[0, 0.2], [0.5, 0.1]]}, 1000)
    {'lr': [[0, 0.001], [1000, 0.0]], 'clip_eps': [[0, 0.2], [500, 0.1]]}
    """
    if steps is None:
        return value
    if isinstance(value, Mapping):
        return {name: _in_steps(given, steps) for name, given in value.items()}
    if isinstance(value, str) and value.startswith(sb3_names.LINE):
        with contextlib.suppress(ValueError):
            return [[0, float(value.removeprefix(sb3_names.LINE))], [round(steps), 0.0]]
    if isinstance(value, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in value):
        times = [at for at, _ in value]
        if all(is_number(at) for at in times) and times and 0 < times[-1] <= 1:
            return [[round(at * steps), given] for at, given in value]
    return value


def _algorithm(given: Any, known: _Registry) -> tuple[type | None, str, list[str]]:
    """Returns the Config class and the name of the algorithm in plain data; (None, "", why there is none)."""
    if not isinstance(given, Mapping):
        return None, "", [f"algo: expected a mapping such as {{name: ppo}}, got {short(given)}"]
    name, names = given.get("name"), ", ".join(known.names)
    if name is None:
        return None, "", [f"algo.name is missing: expected one of {names}"]
    found = next((one for one in known.names if one.lower() == schema.text(name).lower()), None)
    if found is None and not known.is_own(name):
        return None, "", [f"algo.name: expected one of {names}, got {short(name)}{_algorithm_meant(name, known.names)}"]
    try:
        return known.get(found or str(name)), found or str(name), []
    except InputError as e:  # of the user's own module
        return None, "", list(e.errors)


def _to_build(data: Mapping[str, Any], cls: type | None, name: str) -> dict[str, Any]:
    """Returns plain data under the names of the fields, with schedules in steps."""
    data = {**data, "replay": data.get("replay")}
    if cls is not None:
        has_name = "name" in cls.__dataclass_fields__  # type: ignore[attr-defined]  # of any Config
        data["algo"] = {**data["algo"], "name": name}
        data["algo"] = data["algo"] if has_name else {key: one for key, one in data["algo"].items() if key != "name"}
    env, stop, agents = data.get("env"), data.get("stop"), data.get("multi_agent")
    if isinstance(env, Mapping) and isinstance(id := env.get("id"), str) and "." in id and ":" not in id:
        data["env"] = {**env, "id": registry.importable_name(id) or id}  # package.module.Class
    if isinstance(stop, Mapping):
        named = {metric_names.ours(schema.text(key)) or key: value for key, value in stop.items()}
        data["stop"] = {key: value for key, value in named.items() if value is not None}  # null drops a criterion
    if learns_from(cls) is not Fresh:
        data["replay"] = data["replay"] or {}
    steps = _budget(data)
    data |= {key: _in_steps(data[key], steps) for key in ("algo", "replay") if key in data}
    if isinstance(agents, Mapping) and "policies" in agents:
        data["multi_agent"] = {**agents, "policies": _in_steps(agents["policies"], steps)}
    return data


def _build(data: Mapping[str, Any], algos: Algos | None, *, ends: bool) -> tuple[Any, list[Problem]]:
    """Returns a config and all problems; where there are any, the config is for further checks only, or None."""
    data, odd = plain(data)
    known = _Registry(algos)
    cls, name, messages = _algorithm(data.get("algo", {}), known)
    problems = [Problem("algo", message) for message in messages]
    if data.pop("sweep", None) is not None:
        problems.append(Problem("sweep", "sweep: the file is of a sweep: `python -m jrl.sweep FILE`, or remove it"))
    if cls is not None and learns_from(cls) is Fresh and data.get("replay") is not None:
        having = [one for one in known.names if learns_from(known.get(one)) is not Fresh]
        mend = f"remove the section, or use {', '.join(having) or 'another algorithm'}"
        problems.append(Problem("replay", f"replay: {name} learns from each rollout once and keeps no replay: {mend}"))
    data = _to_build({**data, "algo": data["algo"] if cls else None}, cls, name)
    iterations = data["stop"].pop("training_iteration", None) if isinstance(data.get("stop"), dict) else None
    cfg = schema.build(
        RunConfig, data, problems,
        swap={"algo": cls} if cls else {}, synonyms=SYNONYMS, known=("algo.name", "stop.env_steps"),
        answer=functools.partial(sb3_names.answer, replay=learns_from(cls) is not Fresh, sections=_SECTIONS),
    )  # fmt: skip
    told = [f"{problem.key}." for problem in problems]
    problems += [Problem(*one) for one in odd if not f"{one[0]}.".startswith(tuple(told))]
    if cfg is None:
        return None, problems
    if cfg.replay is None and learns_from(cls) is not Fresh:  # what was given is at fault
        cfg = dataclasses.replace(cfg, replay=ReplayConfig())
    cfg, of_paths = path_keys.resolved(cfg)
    problems += [Problem(*one) for one in of_paths]
    key = counts_by(cfg)
    steps = cfg.stop.get(key)
    if isinstance(steps, float) and steps.is_integer():
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, key: int(steps)})
    if iterations is not None and (fault := validation.fault(iterations, Count, "stop.training_iteration")):
        problems.append(Problem("stop.training_iteration", fault))
    elif iterations is not None and key not in cfg.stop and not problems:
        # as long as those of Algorithm.train
        each = max(batch_plan(cfg).rows, asked_iteration(cfg) or STEPS_PER_REPORT)
        run = dataclasses.replace(cfg.run, report_every=cfg.run.report_every or each)
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, key: int(float(iterations) * each)}, run=run)
    # A check that reads a broken key would speak of that key's default: leave it out.
    broken = [problem.key + "." for problem in problems]
    for keys, message in (*faults(cfg), *(endless(cfg) if ends else ())):
        if not any(b.startswith(k + ".") or (k + ".").startswith(b) for k in keys for b in broken):
            problems.append(Problem(keys[0], message))
    return cfg, problems
