"""Evaluation of a run, made of a RunConfig: its config, environments and runners.

What is built is the config of an evaluation, its environments, and its runners where it has some.
"""

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
from jrl.play.evaluate import LENGTH, EvaluationRunners, Player
from jrl.run import build, build_collect
from jrl.types import EnvSpec

_MOST = 16  # environments, unless evaluation.num_envs says otherwise
_SECTIONS = ("algo", "env", "rollout", "env_runners", "run", "custom")  # that evaluation.config may change


def config_of(cfg: RunConfig) -> RunConfig:
    """Returns the run's config with `evaluation.config` over it, and `evaluation.explore` as `rollout.explore`.

    Raises:
      InputError: `evaluation.config` names an unknown key, one that has no meaning in an evaluation, or
        another algorithm or network than the one that is trained.
    """
    given = cfg.evaluation.config
    errors = []
    for section in given:
        if section == "network":
            errors.append("evaluation.config.network: the network is the trained one: leave it out")
        elif section not in _SECTIONS and section in {f.name for f in dataclasses.fields(RunConfig)}:
            takes = ", ".join(_SECTIONS)
            errors.append(f"evaluation.config.{section}: has no meaning in an evaluation, which takes {takes}")
    algo, env = given.get("algo") or {}, given.get("env") or {}
    name = algo.get("name") if isinstance(algo, Mapping) else None
    if name is not None and str(name).lower() != config.algo_name(cfg):
        errors.append(
            f"evaluation.config.algo.name {name}: it is {config.algo_name(cfg)} that is trained: leave it out"
        )
    num = env.get("num_envs") if isinstance(env, Mapping) else None
    if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 1):
        errors.append(f"evaluation.config.env.num_envs: expected a whole number of at least 1, got {num!r}")
    if errors:
        raise InputError(*errors)
    if isinstance(env, Mapping) and "num_envs" in env:  # not that of training, which has to suit batches and devices
        given = {**given, "env": {k: v for k, v in env.items() if k != "num_envs"}}
    plays = dataclasses.replace(
        cfg,
        rollout=dataclasses.replace(cfg.rollout, explore=cfg.evaluation.explore),
        evaluation=dataclasses.replace(cfg.evaluation, config={}),
    )
    try:
        return config.from_dict(schema.merge(config.to_dict(plays), given)) if given else plays
    except InputError as e:
        raise InputError(*(f"evaluation.config: {message}" for message in e.errors)) from e


def num_envs(found: EvaluationConfig, policies: Policies) -> list[int]:
    """Returns the environments of each process that plays: one number, or one for each env runner of evaluation.

    With self-play each number is rounded up to whole blocks of games, in which every seat meets every place.

    Raises:
      InputError: fewer than there are processes.
    """
    env = found.config.get("env") or {}
    processes = found.num_env_runners or 1
    total, key = (found.num_envs, "evaluation.num_envs")
    if total is None and env.get("num_envs") is not None:
        total, key = env["num_envs"], "evaluation.config.env.num_envs"
    if total is None:
        each = _MOST if found.duration == "auto" else min(-(-found.duration // processes), _MOST)
        return [policies.whole_games(each)] * processes
    if total < processes:
        raise InputError(f"{key} {total}: each of {processes} runners needs one: use at least {processes}")
    shares = (total // processes + (i < total % processes) for i in range(processes))
    return [policies.whole_games(share) for share in shares]


def _player(
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
    """Makes the environments of one process, and the policy's way to act in them.

    Args:
      cfg: of the evaluation, from `config_of`.
      registered: `registry.find_registered` of the process that learns.
      count: differs between environments that are made one after the other.
      sizes: environments of each process.
      infos, length: see `Player`.
      index: of the process.
      restarts: processes that had the index before.
    """
    registry.install(registered)
    number, offset = build_collect.restarted(count, restarts), sum(sizes[:index])
    env = environments(cfg, sizes[index], index=number, offset=offset)
    algo = build.algorithm(cfg, env.spec)
    return Player(env, algo.act, carry=algo.carry, explore=cfg.rollout.explore, length=length, infos=infos)


def environments(cfg: RunConfig, num_envs: int, *, index: int = 0, offset: int = 0) -> Any:
    """Makes environments of an evaluation; of self-play, of which rewards are the learner's alone."""
    rewards_of = agents.make(cfg).rewards_of
    return build.environment(cfg, num_envs=num_envs, role="eval", index=index, offset=offset, rewards_of=rewards_of)


def check_spaces(found: EnvSpec, trained: EnvSpec) -> None:
    """Raises InputError if a policy that was trained in the one cannot act in the other."""
    for name in ("observation", "action"):
        a, b = getattr(found, name), getattr(trained, name)
        if not spaces.are_compatible(a, b):
            raise InputError(
                f"evaluation: the {name} space of its environments is {a}, that of training {b}: the policy can act in "
                "environments of the same spaces only"
            )


def _check_weights(cfg: RunConfig, own: RunConfig, spec: EnvSpec) -> None:
    """Raises InputError if the algorithm as `own` says would act with other weights than those that are trained."""
    shapes = []
    for each in (cfg, own):
        algo = build.algorithm(each, spec)
        tree = jax.eval_shape(lambda key, algo=algo: algo.actor(algo.init(key)), jax.random.key(0))
        shapes.append([(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(tree)])
    if shapes[0] != shapes[1]:
        raise InputError(
            f"evaluation.config.algo: {', '.join(schema.flatten(cfg.evaluation.config['algo']))} would need other "
            "weights than those that are trained: leave it out"
        )


def group(
    cfg: RunConfig, own: RunConfig, sizes: Sequence[int], index: int, *, infos: bool, spec: EnvSpec | None = None
) -> Player | EvaluationRunners:
    """Makes the environments of an evaluation, here or in the processes of runners.

    Args:
      cfg: the run.
      own: the config of the evaluation, from `config_of`.
      sizes: environments of each process, from `num_envs`.
      index: differs between environments that are made one after the other.
      infos: see `Player`.
      spec: of the training environments; None: found out, if the evaluation has others.
    Raises:
      InputError: they cannot be made, or have other spaces than those of training.
    """
    found = cfg.evaluation
    if spec is None and (found.config.get("env") or found.config.get("algo")):
        spec = build_collect.spec_of(cfg)
    if spec and found.config.get("algo"):
        _check_weights(cfg, own, spec)
    # one row at a time where episodes go on: those that end later than the last that counts are the next to count
    length = LENGTH if found.force_reset or found.duration == "auto" else 1
    options: dict[str, Any] = {"sizes": sizes, "length": length, "infos": infos}
    if not found.num_env_runners:
        here = _player(own, {}, index, **options)
        try:
            check_spaces(here.spec, spec or here.spec)
        except InputError:
            here.close()
            raise
        return here
    if spec:
        check_spaces(build_collect.spec_of(own), spec)
    make = functools.partial(_player, own, registry.find_registered(config.to_dict(own)), **options)
    runners = build_collect.runner_options(own.env_runners)._replace(num=found.num_env_runners)
    try:
        return EvaluationRunners(make, runners, num_envs=options["sizes"], length=length, count=index)
    except InputError as e:
        raise InputError(*(f"evaluation.num_env_runners: {message}" for message in e.errors)) from e
