"""Parts of a run that act, made of a RunConfig: the environments, the algorithm, the sources of rollouts."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jrl import agents, algos, envs, registry
from jrl.agents.policies import rollout_like
from jrl.config import (
    EnvRunnersConfig,
    RunConfig,
    Sizes,
    algo_name,
    override,
    policy_mapping,
    to_dict,
    without_loss,
)
from jrl.envs.context import EnvContext, Place
from jrl.envs.scaling import learner_reward
from jrl.errors import InputError
from jrl.fields.data import traits
from jrl.learn import learner, parallel
from jrl.learn.program import Role, vector_key
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import sources
from jrl.rollout.source import Source
from jrl.run.plan import Plan
from jrl.run.preflight import check_environments, on_failure, spec_of_clients
from jrl.run.store import checkpoint
from jrl.types import Algo, AsyncEnv, Env, EnvSpec, JaxEnv, Key, PyTree, Rollout

if TYPE_CHECKING:  # parts that most runs do not have: imported where they are made
    from jrl import callbacks
    from jrl.algos import distill
    from jrl.rollout import ray_hosts
    from jrl.run.data_output import Recorder

MakeSource = Callable[..., Source]  # as `sources.make`


class Restored(NamedTuple):
    """An algorithm with the State of a checkpoint."""

    algo: Algo
    spec: EnvSpec  # spaces of its environments
    config: RunConfig
    state: PyTree  # on the host
    directory: Path  # the checkpoint
    meta: dict[str, Any]  # its description


def environment(
    cfg: RunConfig,
    *,
    num_envs: int,
    role: str = "train",
    index: int = 0,
    offset: int = 0,
    worker_index: int = 0,
    rewards_of: Callable[[int], tuple[np.ndarray, int]] | None = None,
) -> JaxEnv | Env | AsyncEnv:
    """Makes `num_envs` environments as `cfg.env` and `cfg.rollout.collector` describe them.

    Args:
      role, index, offset, worker_index: see `envs.Place`; environments of an evaluation wait for each other.
      rewards_of: see `envs.AgentOptions`.
    Raises:
      InputError: the id is unknown, or the collector does not fit the backend.
    """
    section = dataclasses.replace(cfg.env, num_envs=num_envs) if role == "train" else cfg.env.waiting(num_envs)
    given, options, shows_state = cfg.multi_agent, envs.AgentOptions(rewards_of=rewards_of), False
    if given is not None:
        games = policy_mapping.by_game(given)
        options = envs.AgentOptions(given.observation_fn, given.agent_id, given.group, games, rewards_of)
        reads_state = "state" in getattr(cfg.network, "value_inputs", ())
        shows_state = reads_state if given.state is None else given.state
    env = envs.make(
        section,
        seed=cfg.run.seed,
        place=Place(role, index, offset, worker_index, cfg.env_runners.num),
        # EnvPool cannot begin new episodes inside a program
        host=cfg.rollout.collector == "host" or _take_turns(cfg) or traits(cfg.algo).has_members,
        on_failure=on_failure(cfg.env_runners),
        use_prev_action=cfg.network.use_prev_action,
        use_prev_reward=cfg.network.use_prev_reward,
        state=shows_state,
        agents=options,
    )
    if cfg.rollout.collector == "program" and not isinstance(env, JaxEnv):
        env.close()
        raise InputError(
            f"rollout.collector program: {cfg.env.id} cannot be stepped inside a program: use auto, or env.backend jax"
        )
    if cfg.rollout.collector == "host" and isinstance(env, JaxEnv):
        raise InputError(f"rollout.collector host: {cfg.env.id} is written in JAX: use auto, or another env.backend")
    return env


def _take_turns(cfg: RunConfig) -> bool:
    """Returns whether one accelerator acts in several pools: a pool inside a program would hold up the other ones."""
    actors = cfg.devices.actors or ()
    return len(set(actors)) < len(actors) and jax.default_backend() != "cpu"


def spec_of(cfg: RunConfig) -> EnvSpec:
    """Returns the spec of an environment of evaluations, which is made and closed. Raises as `environment`."""
    env = environment(cfg, num_envs=1, role="eval")
    env.close()
    return env.spec


def algorithm(
    cfg: RunConfig, spec: EnvSpec, *, axis_name: str | None = None, callback_list: callbacks.CallbackList | None = None
) -> Algo:
    """Makes the algorithm of all policies for the spaces of `spec`, with the user's loss and batch functions."""
    policies = agents.make(cfg, spec)
    make = functools.partial(algorithm_of_one, axis_name=axis_name, callback_list=callback_list)
    return policies.acting(policies.bind(make))


def algorithm_of_one(
    cfg: RunConfig, spec: EnvSpec, *, axis_name: str | None = None, callback_list: callbacks.CallbackList | None = None
) -> Algo:
    """Makes the algorithm of one policy; arguments as `algorithm`."""
    loss = None if cfg.custom.loss is None else registry.load(cfg.custom.loss, "custom.loss")
    own: dict[str, Any] = {} if loss is None else {"loss": loss}
    if traits(cfg.algo).has_teacher and cfg.algo.teacher is not None:
        own["teacher"] = load_teacher(cfg.algo.teacher)
    made = algos.get(algo_name(cfg)).make(cfg.algo, spec, cfg.network, axis_name=axis_name, **own)
    algos.check(algo_name(cfg), cfg.algo, made)
    transforms = [registry.load(path, "custom.batch") for path in cfg.custom.batch]
    transforms += callback_list.batch_transforms() if callback_list else ()
    made = made._replace(init=jax.jit(made.init, inline=True))  # asked for its shapes again and again: traced once
    return learner.transform_batches(made, transforms, axis_name=axis_name)


def restore(
    path: str | os.PathLike[str], *, best: bool | None, settings: Sequence[str] = (), allow_missing: bool = False
) -> Restored:
    """Returns the algorithm of all policies of a checkpoint with their State, without making an environment.

    Args:
      path: a run directory or a checkpoint.
      best: which checkpoint of a run directory, see `checkpoint.locate`.
      settings: overrides of the run's config, `a.b=value`.
      allow_missing: see `resume.restore_learner`.
    Raises:
      InputError: the checkpoint is missing, damaged, or of a later version; or it lacks a policy.
    """
    from jrl.run.store import resume

    directory = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(directory)
    cfg, spec = override(meta["config"], settings), checkpoint.read_spec(meta)
    algo = algorithm(without_loss(cfg), spec)
    state = resume.restore_learner(directory, jax.eval_shape(algo.init, jax.random.key(0)), allow_missing=allow_missing)
    return Restored(algo, spec, cfg, state, directory, meta)


def restore_policy(
    path: str | os.PathLike[str], *, best: bool | None = None, policy: str | None = None, search: bool = True
) -> Restored:
    """Returns the algorithm of one policy of a checkpoint with its State.

    Args:
      path, best: see `restore`.
      policy: name of a policy, if the run has several.
      search: whether an algorithm with `algo.search` searches, as in evaluations.
    Raises:
      InputError: as `restore`; or the run has several policies, and `policy` does not name one of them.
    """
    whole = restore(path, best=best, allow_missing=True)
    if not search and hasattr(whole.config.algo, "search"):
        own = dataclasses.replace(whole.config.algo.search, in_evaluation=False)
        cfg = dataclasses.replace(whole.config, algo=dataclasses.replace(whole.config.algo, search=own))
        whole = whole._replace(config=cfg, algo=algorithm(without_loss(cfg), whole.spec))
    policies = agents.make(whole.config, whole.spec)
    policy, names = policy or policies.the_one, policies.names
    if not names and policy is None:
        return whole
    if policy not in names:
        known = f"expected one of {', '.join(names)}" if names else "the run has one agent, leave it out"
        raise InputError(f"policy: {known}, got {policy!r}: {whole.directory}")
    from jrl.run.store import resume

    state = resume.require_policy(whole.directory, policy, policies.states(whole.state)[policy])
    cfg, spec = policies.of(policy)
    return whole._replace(algo=algorithm(without_loss(cfg), spec), spec=spec, config=cfg, state=state)


@functools.lru_cache(maxsize=4)  # a program that is built again for other floats may be traced
def load_teacher(path: str) -> distill.Teacher:
    """Returns the policy of a checkpoint as a teacher. Raises InputError: see `restore_policy`."""
    from jrl.algos import distill

    try:
        found = restore_policy(path)
    except InputError as e:
        raise InputError(f"algo.teacher: {e}") from e
    return distill.Teacher(found.algo, found.algo.actor(found.state), found.spec)


def completed(plan: Plan, source: Source, algo: Algo, first: int = 0) -> Source:
    """Returns the source of whole episodes, if the run wants them; its columns begin at the run's column `first`.

    Raises:
      InputError: the longest possible episode is unknown.
    """
    if not (limit := plan.whole_episode_rows):
        return source
    from jrl.rollout import complete

    return complete.Complete(source, limit=limit, carry=placed(plan, algo, first), agents=plan.policies.columns)


def watched(
    plan: Plan,
    source: Source,
    algo: Algo,
    recorder: Recorder | None,
    callback_list: callbacks.CallbackList | None,
) -> Source:
    """Wraps a source in what reads its rollouts: `data.output`, callbacks, whole episodes and `rollout.fake`."""
    reader = callback_list if callback_list is not None and callback_list.needs_rollouts else None
    whole = plan.cfg.rollout.batch_mode == "complete_episodes" and not plan.cfg.env_runners.num
    if recorder is not None:
        asked = plan.policies.watches_games or (callback_list is not None and callback_list.needs_episodes)
        from jrl.rollout.watch import Watch

        source = Watch(source, recorder.stitch, [], plan.columns, take=recorder.write, keep_record=asked)
    if reader:  # episodes as they were collected, rollouts as they are learned from
        source = reader.watch(source, plan.columns, batches=not whole)
    if whole:
        source = completed(plan, source, algo)
        source = reader.watch(source, plan.columns, episodes=False) if reader else source
    if not plan.cfg.rollout.fake:
        return source
    from jrl.rollout.fake import Fake

    return Fake(source)


def make_vectors(cfg: RunConfig, pools: int, count: int) -> list[JaxEnv | Env | AsyncEnv]:
    """Makes the environments of each pool; with env_runners a single environment, for its spaces.

    Args:
      count: number that differs from call to call, for other seeds.
    Raises:
      InputError: they cannot be made; of clients: no spaces, or more than one device that learns.
    """
    if cfg.env_runners.num:
        check_environments(cfg.env, cfg.env_runners, pools)
        alone = dataclasses.replace(cfg.env, batch_size=None)
        return [environment(dataclasses.replace(cfg, env=alone), num_envs=1)]
    if cfg.external is not None:
        if pools > 1:
            raise InputError(f"external: clients play for one device, and {pools} learn: set devices.learners=[0]")
        from jrl.envs import client_spaces

        return [client_spaces.ClientEnv(spec_of_clients(cfg.external, cfg.env), cfg.env)]
    size, vectors = cfg.env.num_envs // pools, []
    try:
        for i in range(pools):
            vectors.append(environment(cfg, num_envs=size, index=count, offset=i * size))
    except InputError:
        close_all(vectors)
        raise
    return vectors


def close_all(vectors: Iterable[JaxEnv | Env | AsyncEnv]) -> None:
    for env in vectors:
        env.close()


def collecting(plan: Plan, algo: Algo, *, record: bool = False) -> dict[str, Any]:
    """Returns the options of a source of one pool; `record`: whether episodes are read, see `unroll.finish`."""
    cfg = plan.cfg
    gamma = algo.running_return_gamma  # with several policies an array, one per column of a game
    reward = registry.load(cfg.custom.reward, "custom.reward") if cfg.custom.reward else None
    games = plan.spec.num_envs // len(gamma) if isinstance(gamma, np.ndarray) else 1
    return {
        "window": episodes.window_per_pool(plan.pools, cfg.run.smoothing_episodes),
        "explore": cfg.rollout.explore,
        "length": plan.length,
        "carry": algo.carry,
        "reward_transform": learner_reward(cfg.env, reward),
        "running_return_gamma": np.tile(gamma, games) if isinstance(gamma, np.ndarray) else gamma,
        **({"record": True} if record or plan.policies.watches_games else {}),
        "count_agents": cfg.rollout.count_steps_by == "agent_steps",
        **({"restart": True} if traits(cfg.algo).has_members else {}),
        **({"act_in": algo.act_in} if algo.act_in is not None else {}),
    }


def placed(plan: Plan, algo: Algo, first: int) -> Callable[..., PyTree]:
    """Returns `algo.carry` of environments from the run's number `first` on."""
    return functools.partial(algo.carry, first=first, total=plan.columns) if plan.is_numbered else algo.carry


def make_source(
    plan: Plan,
    algo: Algo,
    timers: Timers,
    key: Key,
    vectors: list[JaxEnv | Env | AsyncEnv],
    count: int,
    callback_list: callbacks.CallbackList | None = None,
    make: MakeSource = sources.make,
) -> Source:
    """Makes the source of the whole batch, on the devices that learn; `make` makes the source of each vector."""
    cfg, devices = plan.cfg, plan.devices
    assert devices is not None
    record = cfg.data.output is not None or (callback_list is not None and callback_list.needs_episodes)
    join = functools.partial(parallel.deal, mesh=devices.learners)
    if cfg.env_runners.num:
        close_all(vectors)
        return _env_runners(plan, algo, timers, count, join, record=record)
    how = collecting(plan, algo, record=record) | {"timers": timers}
    if callback_list:
        how |= callback_list.collecting(vectors[0])[0]
    if cfg.external is not None:  # for clients that act by themselves
        how |= {"choice": algo.choice}
    parts = []
    for i, (env, device) in enumerate(zip(vectors, devices.actors, strict=True)):
        how |= {"carry": placed(plan, algo, i * env.spec.num_envs), "key": vector_key(key, i, len(vectors))}
        parts.append(make(env, algo.act, device=device, **how))
    if callback_list:
        for i, part in enumerate(parts):
            callback_list.created(part, _contexts(cfg.env.options, 0), offset=i * vectors[0].spec.games)
    pools = sources.Pools(parts, devices=devices.actors, join=join, stack=parallel.stack)
    lag = plan.policy_lag
    return pools if lag is None or cfg.rollout.fake else sources.Async(pools, lag=lag, timers=timers)


def collector(cfg: RunConfig) -> tuple[Source, PyTree]:
    """Returns the source of a run's rollouts without its learner, and an untrained actor for it."""
    devices = parallel.devices(**dataclasses.asdict(cfg.devices))
    vectors = make_vectors(cfg, Sizes(cfg).num_pools(devices.learners.devices.size), 0)
    plan = Plan(cfg, vectors[0].spec, devices)
    algo = algorithm(cfg, plan.spec)
    source = make_source(plan, algo, Timers(), jax.random.key(cfg.run.seed), vectors, 0)
    return source, jax.jit(lambda key: algo.actor(algo.init(key)))(jax.random.key(0))


def _env_runners(
    plan: Plan,
    algo: Algo,
    timers: Timers,
    count: int,
    join: Callable[[Sequence[Rollout]], Rollout],
    *,
    record: bool,
) -> Source:
    cfg, runners = plan.cfg, plan.cfg.env_runners
    shape = {"length": plan.learned_length, "num_envs": plan.columns // runners.num}
    from jrl.rollout import ray_hosts

    return ray_hosts.EnvRunners(
        functools.partial(runner_source, cfg, count, registry.find_registered(to_dict(cfg)), record),
        runner_options(runners),
        num_envs=plan.columns,
        like=rollout_like(plan, plan.spec, algo, record=record or plan.policies.watches_games, **shape),
        join=join,
        lag=plan.policy_lag,
        timers=timers,
        window=episodes.window_per_pool(plan.pools, cfg.run.smoothing_episodes),
        agents=len(plan.spec.agents),
        compress=runners.compress_observations,
        stand_in=cfg.replay is None,
    )


def runner_options(section: EnvRunnersConfig, key: str = "env_runners.num") -> ray_hosts.RunnerOptions:
    """Reads the options of environment runners; `key`: config key of their number.

    Raises:
      InputError: Ray is not installed.
    """
    from jrl.rollout import ray_hosts

    if importlib.util.find_spec("ray") is None:
        raise InputError(f"{key}: Ray, which runs env runners, is not installed: pip install ray, or set {key}=0")

    return ray_hosts.RunnerOptions(**{f: getattr(section, f) for f in ray_hosts.RunnerOptions._fields})


def restarted(count: int, restarts: int) -> int:
    """Returns an index, and thereby seeds, for the environments of a runner that was replaced."""
    return count + 4_099 * restarts


def runner_source(
    cfg: RunConfig, count: int, registered: Mapping[str, Any], record: bool, index: int, restarts: int
) -> Source:
    """Makes the source of env runner `index`, in its own process.

    Args:
      count: number that differs between a run and its continuations.
      registered: `registry.find_registered` of the process that learns.
      record: whether episodes are read: see `unroll.finish`.
      restarts: how often this runner was replaced: each replacement has its own seeds.
    """
    registry.install(registered)
    share = cfg.env.num_envs // cfg.env_runners.num
    seeds = restarted(count, restarts)
    env = environment(cfg, num_envs=share, index=seeds, offset=index * share, worker_index=index + 1)
    plan, first = Plan(cfg, env.spec), index * env.spec.num_envs
    algo = algorithm(cfg, env.spec)
    key = jax.random.key(cfg.run.seed)
    for number in (Role.ENV, count, index, restarts):
        key = jax.random.fold_in(key, number)
    how = collecting(plan, algo, record=record) | {"carry": placed(plan, algo, first)}
    source: Any = completed(plan, sources.make(env, algo.act, key=key, **how), algo, first)
    source.worker_index = index + 1
    from jrl import callbacks

    if loaded := callbacks.load(cfg.custom.callbacks):
        contexts = _contexts(cfg.env.options, index + 1, cfg.env_runners.num)
        callbacks.CallbackList(loaded).created(source, contexts, offset=index * share)
    return source


def _contexts(options: dict[str, Any], worker_index: int, runners: int = 0) -> Callable[[int], EnvContext]:
    return lambda i: EnvContext(options, worker_index=worker_index, num_workers=runners, vector_index=i)
