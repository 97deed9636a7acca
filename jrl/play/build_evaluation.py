"""Builds the evaluation of a run from its RunConfig: config, environments and environment runners."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jrl import agents, config, registry, spaces
from jrl.agents import Policies
from jrl.config import EvaluationConfig, RunConfig
from jrl.errors import InputError
from jrl.fields import schema
from jrl.play.player import LENGTH, EvaluationRunners, Player
from jrl.run import build, build_collect
from jrl.types import EnvSpec

_MAX_ENVS = 16  # environments, unless evaluation.num_envs is set
_SECTIONS = ("algo", "env", "rollout", "env_runners", "run", "custom")  # sections that evaluation.config may change


def build_config(cfg: RunConfig) -> RunConfig:
    """Returns the run's config merged with `evaluation.config`; `rollout.explore` is `evaluation.explore`.

    Raises:
      InputError: `evaluation.config` has an unknown key, a key without effect on evaluations, or another algorithm or
        network than the trained one.
    """
    overrides = cfg.evaluation.config
    errors = []
    for section in overrides:
        if section == "network":
            errors.append("evaluation.config.network: expected the trained network: leave it out")
        elif section not in _SECTIONS and section in {f.name for f in dataclasses.fields(RunConfig)}:
            errors.append(
                f"evaluation.config: expected sections of {', '.join(_SECTIONS)}, got {section}: leave it out"
            )
    algo, env = overrides.get("algo") or {}, overrides.get("env") or {}
    name = algo.get("name") if isinstance(algo, Mapping) else None
    if name is not None and str(name).lower() != config.algo_name(cfg):
        errors.append(
            f"evaluation.config.algo.name: expected {config.algo_name(cfg)}, as trained, got {name}: leave it out"
        )
    num = env.get("num_envs") if isinstance(env, Mapping) else None
    if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 1):
        errors.append(f"evaluation.config.env.num_envs: expected a whole number of at least 1, got {num!r}")
    if errors:
        raise InputError(*errors)
    if isinstance(env, Mapping) and "num_envs" in env:  # `num_envs` below; training's number has to suit batches
        overrides = {**overrides, "env": {k: v for k, v in env.items() if k != "num_envs"}}
    explore, rollout = cfg.evaluation.explore, overrides.get("rollout")
    if isinstance(rollout, Mapping) and isinstance(rollout.get("explore"), bool):
        # set below: an algorithm that must explore in training need not do so in evaluations
        explore = rollout["explore"]
        overrides = {**overrides, "rollout": {k: v for k, v in rollout.items() if k != "explore"}}
    evaluation = dataclasses.replace(cfg, evaluation=dataclasses.replace(cfg.evaluation, config={}))
    try:
        if overrides:
            evaluation = config.from_dict(schema.merge(config.to_dict(evaluation), overrides))
    except InputError as e:
        raise InputError(*(f"evaluation.config: {message}" for message in e.errors)) from e
    return dataclasses.replace(evaluation, rollout=dataclasses.replace(evaluation.rollout, explore=explore))


def num_envs(section: EvaluationConfig, policies: Policies) -> list[int]:
    """Returns the number of environments of each process: of this process, or of each env runner of evaluation.

    With self-play each number is rounded up to whole blocks of games, in which every seat meets every opponent slot.

    Raises:
      InputError: there are fewer environments than processes.
    """
    env = section.config.get("env") or {}
    processes = section.num_env_runners or 1
    total, key = (section.num_envs, "evaluation.num_envs")
    if total is None and env.get("num_envs") is not None:
        total, key = env["num_envs"], "evaluation.config.env.num_envs"
    if total is None:
        each = _MAX_ENVS if section.duration == "auto" else min(-(-section.duration // processes), _MAX_ENVS)
        return [policies.whole_games(each)] * processes
    if total < processes:
        raise InputError(f"{key}: expected at least {processes}, one per env runner, got {total}")
    shares = (total // processes + (i < total % processes) for i in range(processes))
    return [policies.whole_games(share) for share in shares]


def _build_player(
    cfg: RunConfig,
    registered: Mapping[str, Any],
    count: int,
    *,
    sizes: Sequence[int],
    infos: bool,
    length: int,
    index: int = 0,
    restarts: int = 0,
) -> Player:
    """Returns the Player of one process.

    Args:
      cfg: config of the evaluation, from `build_config`.
      registered: `registry.find_registered` of the learner's process.
      count: number of environments made before with this index; gives other seeds.
      sizes: environments of each process.
      infos, length: see `Player`.
      index: index of the process.
      restarts: number of restarts of the process.
    """
    registry.install(registered)
    number, offset = build_collect.restarted(count, restarts), sum(sizes[:index])
    env = build_environments(cfg, sizes[index], index=number, offset=offset)
    algo = build.algorithm(config.without_loss(cfg), env.spec)
    options: dict[str, Any] = {"carry": algo.carry, "act_in": algo.act_in, "explore": cfg.rollout.explore}
    return Player(env, algo.act, length=length, infos=infos, **options)


def build_environments(cfg: RunConfig, num_envs: int, *, index: int = 0, offset: int = 0) -> Any:
    """Returns environments of an evaluation; with self-play, rewards are the learner's."""
    rewards_of = agents.make(cfg).rewards_of
    return build.environment(cfg, num_envs=num_envs, role="eval", index=index, offset=offset, rewards_of=rewards_of)


def check_spaces(evaluation: EnvSpec, trained: EnvSpec) -> None:
    """Raises InputError if a policy of the `trained` spaces cannot act in those of the evaluation."""
    for name in ("observation", "action"):
        a, b = getattr(evaluation, name), getattr(trained, name)
        if not spaces.are_compatible(a, b):
            raise InputError(
                f"evaluation: expected environments with the {name} space of training, {b}, got {a}: change "
                "evaluation.config.env"
            )


def _check_weights(cfg: RunConfig, evaluation: RunConfig, spec: EnvSpec) -> None:
    """Raises InputError if the algorithm of the evaluation has other weights than the trained algorithm."""
    shapes = []
    for each in (cfg, evaluation):
        algo = build.algorithm(config.without_loss(each), spec)
        tree = jax.eval_shape(lambda key, algo=algo: algo.actor(algo.init(key)), jax.random.key(0))
        shapes.append([(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(tree)])
    if shapes[0] != shapes[1]:
        raise InputError(
            f"evaluation.config.algo: expected the trained weights, got other shapes by "
            f"{', '.join(schema.flatten(cfg.evaluation.config['algo']))}: leave it out"
        )


def build_players(
    cfg: RunConfig, evaluation: RunConfig, sizes: Sequence[int], index: int, *, infos: bool, spec: EnvSpec | None = None
) -> Player | EvaluationRunners:
    """Returns the environments of an evaluation, in this process or in env runners.

    Args:
      cfg: config of the run.
      evaluation: config of the evaluation, from `build_config`.
      sizes: environments of each process, from `num_envs`.
      index: number of players made before; gives other seeds.
      infos: see `Player`.
      spec: spec of the training environments; None: an environment is made to find the spec, if needed.
    Raises:
      InputError: the environments cannot be made, or have other spaces than those of training.
    """
    section = cfg.evaluation
    if spec is None and (section.config.get("env") or section.config.get("algo")):
        spec = build_collect.spec_of(cfg)
    if spec and section.config.get("algo"):
        _check_weights(cfg, evaluation, spec)
    # without resets, blocks of one row: an episode that ends after the last counted one belongs to the next evaluation
    length = LENGTH if section.force_reset or section.duration == "auto" else 1
    options: dict[str, Any] = {"sizes": sizes, "length": length, "infos": infos}
    if not section.num_env_runners:
        player = _build_player(evaluation, {}, index, **options)
        try:
            check_spaces(player.spec, spec or player.spec)
        except InputError:
            player.close()
            raise
        return player
    if spec:
        check_spaces(build_collect.spec_of(evaluation), spec)
    make = functools.partial(_build_player, evaluation, registry.find_registered(config.to_dict(evaluation)), **options)
    runners = build_collect.runner_options(evaluation.env_runners, "evaluation.num_env_runners")
    runners = runners._replace(num=section.num_env_runners)
    try:
        return EvaluationRunners(make, runners, num_envs=options["sizes"], length=length, count=index)
    except InputError as e:
        raise InputError(*(f"evaluation.num_env_runners: {message}" for message in e.errors)) from e
