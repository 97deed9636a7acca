"""A run's configuration: frozen dataclasses, the one source of defaults, and the same tree as YAML.

    cfg = load("configs/ppo.yaml", ["algo.lr=1e-3", "rollout.length=256"])
    python -m jrl.config show configs/ppo.yaml --set algo.lr=1e-3
    python -m jrl.config validate configs/ppo.yaml

Imports no jax and no environment library, so that commands answer `--help` and bad input at once. The comment on a
field is its documentation: `show` prints it.
"""

import argparse
import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from jrl import schema
from jrl.errors import InputError
from jrl.hyper import NetworkConfig
from jrl.schema import Problem, merge

__all__ = [
    "CheckpointConfig", "EnvConfig", "EvaluationConfig", "InputError", "NetworkConfig", "RolloutConfig", "RunConfig",
    "RunSettings", "algo_name", "batch_plan", "from_dict", "load", "main", "merge", "override", "to_dict", "to_yaml",
    "validate",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """The vector of environments."""

    id: str  # as its library names it: CartPole-v1, Pong-v5, HalfCheetah-v4
    backend: Literal["auto", "envpool", "gymnasium", "graph"] = "auto"  # who steps it; auto: the first that has the id
    num_envs: int = 8  # environments in all, over all devices
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # passed to the environment as they are
    normalize_actions: bool = True  # the policy's actions lie in [-1, 1] and are mapped to the bounds
    clip_actions: bool = True  # clip actions to the bounds
    # null or false: as they are; true: the sign; a number c: to [-c, c]; [low, high]. Reported returns stay unclipped
    clip_rewards: bool | float | tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How experience is collected."""

    length: int = 128  # steps per environment and iteration
    collector: Literal["auto", "graph", "host"] = "auto"  # graph: inside the compiled program; host: from Python
    iterations_per_call: int | None = None  # graph only: iterations inside one compiled call; null: chosen by size


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Episodes played beside training, which never change it."""

    every: int | None = None  # environment steps between evaluations; null: none during training
    episodes: int = 100  # exactly so many per evaluation
    num_envs: int | None = None  # environments of the evaluation; null: as many as suit `episodes`
    explore: bool = False  # sample actions as in training; false: the policy's best action


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is kept to resume from."""

    every: int | None = None  # environment steps between checkpoints; null: every 5 minutes. The end has one
    keep_last: int = 3  # older ones are deleted


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What does not change the algorithm."""

    seed: int = 0  # root of every random key
    out: str | None = None  # run directory; null: runs/<config name>_<env>_<time>
    devices: int = 1  # accelerators to train on; 0: all
    report_every: int | None = None  # environment steps between result rows; null: a hundredth of the run
    compile_cache: bool = True  # keep compiled programs on disk for the next run
    log: tuple[Literal["jsonl", "csv", "tensorboard"], ...] = ("jsonl", "csv", "tensorboard")  # where rows go
    disable_jit: bool = False  # run operation by operation, so that breakpoint() stops inside a loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    algo: Any  # the Config of the algorithm that `algo.name` picks
    env: EnvConfig
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunSettings = RunSettings()
    # metric -> number; the run ends when the first is reached. env_steps must be among them
    stop: dict[str, int | float] = dataclasses.field(default_factory=dict)


# Names used by other libraries -> ours, for "did you mean". A dotted one is meant as it stands.
SYNONYMS = {
    "learning_rate": "lr", "discount": "gamma", "discount_factor": "gamma", "lambda": "gae_lambda", "lam": "gae_lambda",
    "clip_range": "clip_eps", "clip_param": "clip_eps", "clip_coef": "clip_eps", "entropy_coeff": "ent_coef",
    "entropy_coef": "ent_coef", "vf_loss_coeff": "vf_coef", "value_coef": "vf_coef", "grad_clip": "max_grad_norm",
    "n_epochs": "num_epochs", "update_epochs": "num_epochs", "num_sgd_iter": "num_epochs",
    "n_minibatches": "num_minibatches", "n_envs": "num_envs", "num_env_runners": "num_envs", "env_id": "env.id",
    "env_name": "env.id", "env_config": "env.options", "env_kwargs": "env.options", "hidden_sizes": "network.hidden",
    "fcnet_hiddens": "network.hidden", "hiddens": "network.hidden", "n_steps": "rollout.length",
    "num_steps": "rollout.length", "rollout_fragment_length": "rollout.length", "num_gpus": "run.devices",
    "num_devices": "run.devices", "total_timesteps": "stop.env_steps", "total_steps": "stop.env_steps",
    "timesteps_total": "stop.env_steps", "num_env_steps": "stop.env_steps",
}  # fmt: skip

Algos = Mapping[str, type]


# ---------------------------------------------------------------- reading


def load(
    path: str | Path | None,
    overrides: Iterable[str] = (),
    *,
    algo: str | None = None,
    env: str | None = None,
    stop: Iterable[str] = (),
    out: str | None = None,
    algos: Algos | None = None,
) -> RunConfig:
    """The YAML file with the command line over it.

    Args:
      path: None for defaults only.
      overrides: "rollout.length=256"; the value is read as YAML.
      algo, env, out: short for algo.name, env.id and run.out.
      stop: "env_steps=1e6", short for stop.env_steps.
      algos: name -> Config class; None for `jrl.algos`.
    Raises:
      InputError: all that is wrong.
    """
    return _load(path, overrides, {"--algo": algo, "--env": env, "--out": out}, stop, algos)[0]


def from_dict(data: Mapping[str, Any], *, algos: Algos | None = None) -> RunConfig:
    """Plain data -> RunConfig; the inverse of `to_dict`. Raises InputError with all that is wrong."""
    cfg, problems = _build(data, algos)
    if problems:
        raise InputError(*(p.message for p in problems))
    return cfg


def override(data: Mapping[str, Any], overrides: Iterable[str]) -> RunConfig:
    """Plain data with "a.b=v" texts over it, as `load` does with a file. Raises InputError with all that is wrong."""
    return _load(data, overrides, {}, (), None)[0]


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
    docs = {f"algo.{k}": v for k, v in schema.docs(type(cfg.algo)).items()}
    for field in dataclasses.fields(cfg):
        section = getattr(cfg, field.name)
        if field.name != "algo" and dataclasses.is_dataclass(section):
            docs |= {f"{field.name}.{k}": v for k, v in schema.docs(type(section)).items()}
    data = to_dict(cfg, algos=algos)
    comments = {k: "; ".join(filter(None, [origins.get(k, "default"), docs.get(k)])) for k in schema.flatten(data)}
    return schema.dump(data, comments)


def algo_name(cfg: RunConfig, *, algos: Algos | None = None) -> str:
    """The name under which the Config class of `cfg.algo` is registered."""
    own = getattr(cfg.algo, "name", None)
    if isinstance(own, str):
        return own
    registry = _Registry(algos)
    found = [name for name in registry.names if registry.get(name) is type(cfg.algo)]
    if len(found) != 1:
        raise InputError(f"algo: {type(cfg.algo).__qualname__} is registered {len(found)} times, must be once")
    return found[0]


class _Registry:
    """Algorithm name -> Config class, without importing `jrl.algos` (and jax) before it is asked."""

    def __init__(self, algos: Algos | None):
        if algos is None:
            from jrl.algos import get_config_class, names

            self.names: tuple[str, ...] = tuple(names())
            self.get: Callable[[str], type] = get_config_class
        else:
            self.names, self.get = tuple(algos), algos.__getitem__


def _load(
    source: str | Path | Mapping[str, Any] | None,
    overrides: Iterable[str],
    flags: Mapping[str, str | None],
    stop: Iterable[str],
    algos: Algos | None,
) -> tuple[RunConfig, dict[str, str]]:
    """The config, and the origin of each key that is not a default."""
    from_file = source if isinstance(source, Mapping) else {} if source is None else schema.read_yaml(Path(source))
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    short = {"--algo": "algo.name", "--env": "env.id", "--out": "run.out"}
    assignments: list[tuple[str, str, Any]] = [(f, short[f], value) for f, value in flags.items() if value is not None]
    for flag, prefix, texts in (("--stop", "stop.", stop), ("--set", "", overrides)):
        for text in texts:
            key, equals, value = text.partition("=")
            try:
                if not equals or not all(key.split(".")):
                    raise ValueError
                assignments.append((flag, prefix + key.strip(), schema.parse(value)))
            except (ValueError, yaml.YAMLError):
                problems.append(Problem(key, f"{flag} {text}: expected key=value, such as rollout.length=256"))
    for flag, key, value in assignments:
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        given = merge(given, nested)
        origins |= dict.fromkeys(schema.flatten(nested), flag)
    data = merge(from_file, given)
    cfg, found = _build(data, algos)
    if problems or found:
        raise InputError(*(p.message for p in problems + found))
    return cfg, {key: origins.get(key, "file") for key in schema.flatten(data)}


def _build(data: Mapping[str, Any], algos: Algos | None) -> tuple[RunConfig, list[Problem]]:
    """A config and all problems; where there are any, the config is for further checks only."""
    problems: list[Problem] = []
    algo = data.get("algo")
    cls = None
    if "algo" in data and not isinstance(algo, Mapping):
        problems.append(Problem("algo", f"algo: expected a mapping such as {{name: ppo}}, got {algo!r}"))
    else:
        algo = dict(algo or {})
        registry = _Registry(algos)
        name = next((n for n in registry.names if n.lower() == str(algo.get("name")).lower()), None)
        if name is not None:
            cls = registry.get(name)
            algo.pop("name")
            if "name" in {f.name for f in dataclasses.fields(cls)}:
                algo["name"] = name
        elif algo.get("name") is None:
            problems.append(Problem("algo", f"algo.name is missing: expected one of {', '.join(registry.names)}"))
        else:
            near = difflib.get_close_matches(str(algo["name"]).lower(), registry.names, 1)
            mend = f": did you mean {near[0]}?" if near else ""
            known = ", ".join(registry.names)
            problems.append(Problem("algo", f"algo.name: expected one of {known}, got {algo['name']!r}{mend}"))
    cfg = schema.build(
        RunConfig, {**data, "algo": algo}, problems,
        swap={"algo": cls}, synonyms=SYNONYMS, known=("algo.name", "stop.env_steps"),
    )  # fmt: skip
    steps = cfg.stop.get("env_steps")
    if isinstance(steps, float) and steps.is_integer():
        cfg = dataclasses.replace(cfg, stop={**cfg.stop, "env_steps": int(steps)})
    # A check that reads a broken key would speak of that key's default: leave it out.
    broken = [p.key + "." for p in problems]
    for keys, message in _checks(cfg, None):
        if not any(b.startswith(k + ".") or (k + ".").startswith(b) for k in keys for b in broken):
            problems.append(Problem(keys[0], message))
    return cfg, problems


# ---------------------------------------------------------------- checks over several keys


def validate(cfg: RunConfig, *, spec: Any = None) -> list[str]:
    """What is wrong although each key alone is of the right type; `spec` (an EnvSpec) adds what only it can tell."""
    return [message for _, message in _checks(cfg, spec)]


def _checks(cfg: RunConfig, spec: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """(the keys that were read, the message) of each fault."""
    for key, least in _LEAST.items():
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        if value is not None and value < least:
            yield (key,), f"{key}: expected at least {least}, got {value}"
    for width in cfg.network.hidden:
        if width < 1:
            yield ("network.hidden",), f"network.hidden: expected widths of at least 1, got {width}"

    steps = cfg.stop.get("env_steps")
    if steps is None:
        near = difflib.get_close_matches("env_steps", cfg.stop, 1)
        mend = f"rename stop.{near[0]}" if near else "set it, e.g. stop.env_steps=1000000"
        yield ("stop.env_steps", "stop"), f"stop.env_steps is missing: every run needs an end: {mend}"
    elif steps <= 0 or steps != int(steps):
        yield ("stop.env_steps",), f"stop.env_steps: expected a whole number above 0, got {steps}"
    for metric, value in cfg.stop.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            yield (f"stop.{metric}",), f"stop.{metric}: expected a number, got {value!r}"

    for name in ("gamma", "gae_lambda"):
        value = getattr(cfg.algo, name, None)
        outside = [v for v in _values(value) if not 0 <= v <= 1]
        if outside:
            yield (f"algo.{name}",), f"algo.{name}: expected a number in [0, 1], got {outside[0]}"
    own = getattr(cfg.algo, "validate", None)
    for message in own() if callable(own) else ():
        yield ("algo",), f"algo: {message}"

    yield from _batch_checks(cfg)
    shape = getattr(getattr(spec, "observation", None), "shape", None)
    if shape is not None and len(shape) != 3 and cfg.network.torso in ("nature_cnn", "impala"):
        mend = "network.torso mlp (or auto) fits"
        yield ("network.torso",), f"network.torso {cfg.network.torso} needs images, observations are {shape}: {mend}"


_LEAST = {
    "env.num_envs": 1, "rollout.length": 1, "rollout.iterations_per_call": 1, "evaluation.every": 1,
    "evaluation.episodes": 1, "evaluation.num_envs": 1, "checkpoint.every": 1, "checkpoint.keep_last": 1,
    "run.seed": 0, "run.devices": 0, "run.report_every": 1,
}  # fmt: skip


def _batch_checks(cfg: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    envs, length, devices = cfg.env.num_envs, cfg.rollout.length, max(1, cfg.run.devices)
    minibatches = getattr(cfg.algo, "num_minibatches", 1)
    if min(envs, length) < 1:
        return
    if envs % devices:
        near = _either([envs - envs % devices, envs + devices - envs % devices])
        message = f"env.num_envs {envs} is not divisible by {devices} devices: {near}"
        yield ("env.num_envs", "run.devices"), message
        return
    if not isinstance(minibatches, int):
        return
    keys = ("algo.num_minibatches", "env.num_envs", "rollout.length", "run.devices")
    if minibatches < 1:
        yield keys[:1], f"algo.num_minibatches: expected at least 1, got {minibatches}"
        return
    rows = envs // devices * length
    if rows % minibatches:
        below = next(n for n in range(minibatches, 0, -1) if rows % n == 0)
        above = next((n for n in range(minibatches, rows + 1) if rows % n == 0), 0)
        step = minibatches // math.gcd(minibatches, envs // devices)
        lengths = _either([length - length % step, length + step - length % step])
        on = f" on each of {devices} devices" if devices > 1 else ""
        message = (
            f"the batch of {envs // devices} envs x {length} steps = {rows} rows{on} is not divisible by "
            f"algo.num_minibatches {minibatches}: {_either([below, above])} would do, or rollout.length {lengths}"
        )
        yield keys, message


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers if n > 0)


def _values(value: Any) -> list[float]:
    """The numbers of a hyper-parameter or of its schedule."""
    if isinstance(value, tuple):
        return [v for _, v in value]
    return [value] if isinstance(value, int | float) else []


class BatchPlan(NamedTuple):
    """Numbers that follow from the config. Rows are over all devices."""

    rows: int  # per iteration: environments x steps
    minibatch: int | None  # rows; None where the algorithm has no num_minibatches
    updates: int | None  # gradient steps per iteration
    iterations: int  # until stop.env_steps, if no row is void


def batch_plan(cfg: RunConfig) -> BatchPlan:
    """Rows, minibatches and updates of an iteration, and the number of iterations."""
    rows = cfg.env.num_envs * cfg.rollout.length
    minibatches = getattr(cfg.algo, "num_minibatches", None)
    return BatchPlan(
        rows=rows,
        minibatch=rows // minibatches if minibatches else None,
        updates=minibatches * getattr(cfg.algo, "num_epochs", 1) if minibatches else None,
        iterations=math.ceil(cfg.stop["env_steps"] / rows),
    )


def _plan_lines(cfg: RunConfig) -> Iterator[str]:
    plan = batch_plan(cfg)
    yield f"{cfg.env.num_envs} envs x {cfg.rollout.length} steps = {plan.rows} rows per iteration"
    if plan.minibatch is not None:
        split = f"{getattr(cfg.algo, 'num_epochs', 1)} epochs x {cfg.algo.num_minibatches} minibatches"
        yield f"{split} of {plan.minibatch} rows = {plan.updates} updates per iteration"
    yield f"{plan.iterations} iterations until stop.env_steps {cfg.stop['env_steps']}"


# ---------------------------------------------------------------- python -m jrl.config


def main(argv: Sequence[str] | None = None) -> int:
    """`show` or `validate` a config; the exit status: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m jrl.config", description="Show or validate a run's configuration.")
    parser.add_argument("command", choices=("show", "validate"))
    parser.add_argument("config", nargs="?", help="YAML file; without it: the defaults")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")
    parser.add_argument("--stop", action="append", default=[], metavar="metric=v")
    parser.add_argument("--algo", help="short for --set algo.name=...")
    parser.add_argument("--env", help="short for --set env.id=...")
    args = parser.parse_args(argv)
    try:
        cfg, origins = _load(args.config, args.overrides, {"--algo": args.algo, "--env": args.env}, args.stop, None)
        if args.command == "show":
            print(to_yaml(cfg, origins=origins), end="")
            return 0
        print(*_plan_lines(cfg), sep="\n")
        _check_env(cfg.env)
    except InputError as e:
        print(*e.errors, sep="\n", file=sys.stderr)
        return 2
    print("ok")
    return 0


def _check_env(env: EnvConfig) -> None:
    try:
        from jrl.envs import check
    except ImportError as e:
        print(f"the environment was not checked: {e}")
        return
    errors = check(env.id, env.backend, env.options)
    if errors:
        raise InputError(*errors)


if __name__ == "__main__":
    sys.exit(main())
