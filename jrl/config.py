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
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jrl import schema
from jrl.errors import InputError
from jrl.hyper import NetworkConfig, Schedule
from jrl.plan import batch_plan, faults, num_learners, num_pools
from jrl.plan import lines as plan_lines
from jrl.schema import Problem, merge

__all__ = [
    "CheckpointConfig", "DevicesConfig", "EnvConfig", "EnvRunnersConfig", "EvaluationConfig", "InputError",
    "NetworkConfig", "ReplayConfig", "RolloutConfig", "RunConfig", "RunSettings", "algo_name", "batch_plan",
    "check_env", "from_dict", "load", "main", "merge", "override", "to_dict", "to_yaml",
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
    # EnvPool, from the host: environments per step; fewer than a pool has: act on those that are ready first
    batch_size: int | None = None
    remote_worker_envs: bool = False  # Gymnasium: each environment in a process of its own
    # of worker processes: act once one is ready and so many milliseconds have passed for more; null: wait for all
    batch_wait_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How experience is collected."""

    # steps per environment and iteration; null: 128, or what replay.train_every asks for
    length: int | None = None
    collector: Literal["auto", "graph", "host"] = "auto"  # graph: inside the compiled program; host: from Python
    mode: Literal["sync", "async"] = "sync"  # async: the next rollouts are collected while one is learned from
    # async: updates between the weights that acted and the update that learns from it; null: 1, or 2 with env_runners
    max_policy_lag: int | None = None
    # iterations in one call, where environments and learning are one program; null: chosen by size
    iterations_per_call: int | None = None


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """The replay buffer and how often is learned from it. Steps and rows count over all environments and devices."""

    capacity: int = 100_000  # transitions kept
    batch_size: int = 256  # transitions per gradient step
    learning_starts: int = 1_000  # environment steps before the first gradient step
    train_every: int | None = None  # environment steps between two learning phases; null: one of each environment
    updates_per_step: float = 1.0  # gradient steps per environment step (the update-to-data ratio)
    n_step: int | tuple[int, int] = 1  # steps summed up before bootstrapping; [2, 5]: a random number for each sample
    frame_stack: int | None = None  # images of an observation, stored once each; null: Atari's; 1: store stacks whole
    prioritized: bool = False  # sample in proportion to priority ** priority_alpha, not uniformly
    priority_alpha: float = 0.6  # 0: uniform
    priority_beta: Schedule = 0.4  # exponent of the importance weights
    priority_eps: float = 1e-6  # added to each priority


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
    keep_last: int = 3  # older ones are deleted, but those that the next three keys name
    keep_every: int | None = None  # environment steps; of each such stretch the first checkpoint stays
    keep_best_by: str | None = None  # metric of the result rows, e.g. evaluation/return; the best checkpoint stays
    keep_best: Literal["max", "min"] = "max"  # which value of it is best
    replay: Literal["full", "none"] = "full"  # whether the replay buffer is kept; none: it is filled anew
    # environments that cannot be stored start anew at each checkpoint, so that a resumed run is the same as one that
    # was never interrupted; needs `every`
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class DevicesConfig:
    """Which of this machine's devices do what, by index."""

    actors: tuple[int, ...] | None = None  # act in the environments; null: those that learn
    learners: tuple[int, ...] | None = None  # learn, each from its share of the batch; null: all accelerators
    fake: int | None = None  # split the CPU into so many devices, to try what several do; null: real ones


@dataclasses.dataclass(frozen=True)
class EnvRunnersConfig:
    """Further processes, on this or other machines, that collect; by Ray. What to do when they or environments fail."""

    num: int = 0  # they share env.num_envs; 0: this process collects, and Ray is not started
    num_cpus: float = 1.0  # of each
    num_gpus: float = 0.0  # of each
    custom_resources: dict[str, float] = dataclasses.field(default_factory=dict)  # of each, by name
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"  # over the nodes of the cluster
    address: str | None = None  # of a Ray cluster, or auto; null: this machine
    max_requests_in_flight: int = 2  # rollouts that each has on order, with rollout.mode async
    ignore_env_runner_failures: bool = False  # go on without one that failed, as long as there are others
    recreate_failed_env_runners: bool = False  # start another in its place
    restart_failed_sub_environments: bool = False  # an environment that fails is made anew, and its episode dropped
    max_restarts: int = 1000  # of runners, in all
    sample_timeout_s: float = 180.0  # without an answer until a runner has failed
    health_check_timeout_s: float = 60.0  # for one that starts
    env_step_timeout_s: float | None = None  # of worker processes: a step that takes longer has failed; null: never


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What does not change the algorithm."""

    seed: int = 0  # root of every random key
    out: str | None = None  # run directory; null: runs/<config name>_<env>_<time>
    report_every: int | None = None  # environment steps between result rows; null: a hundredth of the run
    compile_cache: bool = True  # keep compiled programs on disk for the next run
    log: tuple[Literal["jsonl", "csv", "tensorboard"], ...] = ("jsonl", "csv", "tensorboard")  # where rows go
    disable_jit: bool = False  # run operation by operation, so that breakpoint() stops inside a loss
    # a loss or parameter that is not finite; stop: the run ends with a bundle for jrl.debug; rollback: it goes on from
    # the last checkpoint with a smaller algo.lr; ignore: nothing looks
    on_nonfinite: Literal["stop", "rollback", "ignore"] = "stop"
    max_rollbacks: int = 3  # then it stops
    rollback_lr: float = 0.5  # factor of algo.lr at each
    stall_seconds: float | None = 300.0  # without progress until all stacks are printed; null: never


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    algo: Any  # the Config of the algorithm that `algo.name` picks
    env: EnvConfig
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig | None = None  # algorithms that learn from replay have one, others none
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    devices: DevicesConfig = DevicesConfig()
    env_runners: EnvRunnersConfig = EnvRunnersConfig()
    run: RunSettings = RunSettings()
    # metric -> number; the run ends when the first is reached. env_steps must be among them
    stop: dict[str, int | float] = dataclasses.field(default_factory=dict)


# Names used by other libraries -> ours, for "did you mean". A dotted one is meant as it stands.
SYNONYMS = {
    "learning_rate": "lr", "discount": "gamma", "discount_factor": "gamma", "lambda": "gae_lambda", "lam": "gae_lambda",
    "clip_range": "clip_eps", "clip_param": "clip_eps", "clip_coef": "clip_eps", "entropy_coeff": "ent_coef",
    "entropy_coef": "ent_coef", "vf_loss_coeff": "vf_coef", "value_coef": "vf_coef", "grad_clip": "max_grad_norm",
    "n_epochs": "num_epochs", "update_epochs": "num_epochs", "num_sgd_iter": "num_epochs",
    "n_minibatches": "num_minibatches", "n_envs": "num_envs", "num_env_runners": "env_runners.num", "env_id": "env.id",
    "env_name": "env.id", "env_config": "env.options", "env_kwargs": "env.options", "hidden_sizes": "network.hidden",
    "fcnet_hiddens": "network.hidden", "hiddens": "network.hidden", "n_steps": "rollout.length",
    "num_steps": "rollout.length", "rollout_fragment_length": "rollout.length", "num_gpus": "devices.learners",
    "num_devices": "devices.learners", "devices": "devices.learners", "_fake_gpus": "devices.fake",
    "num_workers": "env_runners.num", "num_rollout_workers": "env_runners.num",
    "sample_async": "rollout.mode", "remote_env_batch_wait_ms": "env.batch_wait_ms",
    "ignore_worker_failures": "env_runners.ignore_env_runner_failures",
    "recreate_failed_workers": "env_runners.recreate_failed_env_runners",
    "max_requests_in_flight_per_sampler_worker": "env_runners.max_requests_in_flight",
    "placement_strategy": "env_runners.placement", "total_timesteps": "stop.env_steps", "total_steps": "stop.env_steps",
    "timesteps_total": "stop.env_steps", "num_env_steps": "stop.env_steps", "buffer_size": "replay.capacity",
    "replay_buffer_capacity": "replay.capacity", "train_freq": "replay.train_every",
    "train_batch_size": "replay.batch_size",
    "gradient_steps": "replay.updates_per_step", "updates_to_data": "replay.updates_per_step",
    "utd": "replay.updates_per_step", "training_intensity": "replay.updates_per_step",
    "num_steps_sampled_before_learning_starts": "replay.learning_starts", "prioritized_replay": "replay.prioritized",
    "prioritized_replay_alpha": "replay.priority_alpha", "prioritized_replay_beta": "replay.priority_beta",
    "prioritized_replay_eps": "replay.priority_eps", "target_network_update_freq": "target_update_every",
    "target_update_interval": "target_update_every", "exploration_config": "algo.exploration",
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
    docs = schema.tree_docs(cfg)
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
    data = {**data, "algo": algo}
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
    # A check that reads a broken key would speak of that key's default: leave it out.
    broken = [p.key + "." for p in problems]
    for keys, message in faults(cfg):
        if not any(b.startswith(k + ".") or (k + ".").startswith(b) for k in keys for b in broken):
            problems.append(Problem(keys[0], message))
    return cfg, problems


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


def check_env(cfg: RunConfig) -> None:
    """Raises InputError with what is wrong with the environments of a run, without making one. Imports their library.

    Raises:
      ImportError: that library is not there.
    """
    from jrl.envs import check

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
    )
    if errors:
        raise InputError(*errors)


if __name__ == "__main__":
    sys.exit(main())
