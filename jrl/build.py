"""From a RunConfig to the parts of a run: environments, algorithm, program."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import algos, build_learner, callbacks, envs, learner, loop, parallel, plan, registry
from jrl.config import RunConfig, algo_name, to_dict
from jrl.envs import task as tasks
from jrl.envs.context import EnvContext
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import complete, fake, ray_hosts, sources, unroll
from jrl.types import Algo, AsyncEnv, Env, EnvSpec, GraphEnv, Key, PyTree, Rollout

GUARANTEES = {
    "bitwise": "resume continues exactly: the environments are part of a checkpoint",
    "restarted": "resume continues exactly: at each checkpoint the environments start anew, interrupted or not",
    "learner": "resume continues the learner exactly; the environments start anew, with other seeds",
    "refilled": "resume continues the learner exactly; the replay is filled anew",
}


class Run(NamedTuple):
    """The parts of one run; `program.close()` ends its environments."""

    spec: EnvSpec  # as one device sees it
    algo: Algo
    program: loop.Program
    backend: str  # how the environments are stepped, in words
    in_program: bool  # whether they are stepped inside a compiled program
    replay: str  # what the replay buffer takes, in words; "" without
    guarantee: str  # what a resumed run has in common with one that was never interrupted: a key of GUARANTEES
    learners: int  # devices that learn
    num_params: int  # of the networks that learn
    note: str  # what callbacks cannot have in this run, in words; "" for nothing
    # (state, curriculum function, result row, a number that differs from call to call) -> state: see `jrl.envs.task`
    apply_task: Callable[[loop.LoopState, tasks.TaskFn, dict[str, Any], int], loop.LoopState]


def environment(
    cfg: RunConfig, *, num_envs: int, role: str = "train", index: int = 0, offset: int = 0, worker_index: int = 0
) -> GraphEnv | Env | AsyncEnv:
    """`num_envs` environments as `cfg.env` and `cfg.rollout.collector` describe them.

    Args:
      cfg: the run.
      num_envs: of this vector.
      role, index: see `envs.make`; those of an evaluation wait for each other.
      offset: of its first environment among those of the run.
      worker_index: 0 in the process that learns; environment runners count from 1.
    Raises:
      InputError: the id is unknown, or the collector does not fit the backend.
    """
    training = role == "train"
    env = envs.make(
        cfg.env.id,
        backend=cfg.env.backend,
        num_envs=num_envs,
        seed=cfg.run.seed,
        role=role,
        index=index,
        offset=offset,
        options=cfg.env.options,
        normalize_actions=cfg.env.normalize_actions,
        clip_actions=cfg.env.clip_actions,
        host=cfg.rollout.collector == "host",
        batch_size=cfg.env.batch_size if training else None,
        remote_worker_envs=cfg.env.remote_worker_envs,
        batch_wait_ms=cfg.env.batch_wait_ms if training else None,
        restart_failed=cfg.env_runners.restart_failed_sub_environments,
        step_timeout_s=cfg.env_runners.env_step_timeout_s,
        horizon=cfg.env.horizon,
        soft_horizon=cfg.env.soft_horizon,
        no_done_at_end=cfg.env.no_done_at_end,
        worker_index=worker_index,
        num_workers=cfg.env_runners.num,
    )
    if cfg.rollout.collector == "graph" and not isinstance(env, GraphEnv):
        env.close()
        raise InputError(
            f"rollout.collector graph: {cfg.env.id} cannot be stepped inside a program: use auto, or env.backend graph"
        )
    if cfg.rollout.collector == "host" and isinstance(env, GraphEnv):
        raise InputError(
            f"rollout.collector host: {cfg.env.id} is a graph environment: use auto, or another env.backend"
        )
    return env


def algorithm(
    cfg: RunConfig, spec: EnvSpec, *, axis_name: str | None = None, hooks: callbacks.Hooks | None = None
) -> Algo:
    """The algorithm that `cfg.algo` belongs to, for the spaces of `spec`; with the user's loss and what `hooks` does
    to batches in the program.
    """
    loss = None if cfg.custom.loss is None else registry.load(cfg.custom.loss, "custom.loss")
    given = {} if loss is None else {"loss": loss}
    made = algos.get(algo_name(cfg)).make(cfg.algo, spec, cfg.network, axis_name=axis_name, **given)
    return learner.batches_transformed(made, hooks.batch_transforms() if hooks else (), axis_name=axis_name)


def run(
    cfg: RunConfig,
    *,
    timers: Timers | None = None,
    restarts: int = 0,
    hooks: callbacks.Hooks | None = None,
    training_step: Callable[[loop.Step], Any] | None = None,
) -> Run:
    """Environments, algorithm and the program that trains it.

    Args:
      cfg: the run.
      timers: where stages are timed.
      hooks: what callbacks have to do with rollouts and batches; None: nothing.
      training_step: what an iteration does; None: as the config says.
      restarts: a number that differs between a run and its continuations, for environments that cannot be restored:
        they start anew, with other seeds.
    Raises:
      InputError: more devices than there are, an environment or a space that cannot be handled.
    """
    devices = parallel.devices(learners=cfg.devices.learners, actors=cfg.devices.actors, fake=cfg.devices.fake)
    mesh, learners = devices.learners, devices.learners.devices.size
    if found := list(plan.split_faults(cfg, learners)):
        raise InputError(*(message for _, message in found))
    rows = plan.batch_plan(cfg).rows
    backend = envs.resolve(cfg.env.id, cfg.env.backend)
    here = not cfg.env_runners.num and cfg.rollout.mode == "sync" and devices.actors == tuple(mesh.devices.flat)
    # what looks at rollouts between collecting and learning, or decides what to learn from, needs them apart
    if training_step is None and cfg.custom.training_step:
        training_step = registry.load(cfg.custom.training_step, "custom.training_step")
    here = here and not (cfg.rollout.fake or training_step or (hooks and hooks.needs_rollouts))
    here = here and cfg.rollout.batch_mode == "truncate_episodes"
    # pure environments are part of the program, a share on each device; EnvPool's may be of the program of one device
    pools = plan.num_pools(cfg, learners)
    vectors = _vectors(cfg, pools, restarts)
    try:
        spec = vectors[0].spec
        if cfg.custom.env_task:
            tasks.check(vectors[0])
        algo = algorithm(cfg, spec, axis_name=parallel.AXIS, hooks=hooks)
        if hooks:
            hooks.check(on_policy=algo.on_policy)
        length = plan.rollout_length(cfg) + _whole_episodes(cfg, spec)
        learn, replay = build_learner.make(cfg, algo, spec, devices=learners, length=length)
        learn = learner.transformed(learn, _transforms(cfg, hooks))
    except InputError:
        _close(vectors)
        raise
    params = jax.eval_shape(algo.init, jax.random.key(0)).params
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    refilled = cfg.replay is not None and cfg.checkpoint.replay == "none"
    # EnvPool too, where one process steps it for one device and an iteration is short: with a rollout of a few rows and
    # a few gradient steps, dispatching two programs takes a quarter of the time. A pool is a constant of its program:
    # where pools are made anew, the program that holds one is a small one
    short = learners == 1 and not algo.on_policy and not cfg.checkpoint.exact and not cfg.custom.env_task
    env = vectors[0]
    if here and isinstance(env, GraphEnv) and (env.pure or short):
        iterations = plan.iterations_per_call(cfg)
        collect = unroll.make(env, algo.act, **_collecting(cfg, algo, pools))
        program = loop.fused(learn, collect, mesh, iterations=iterations, rows=rows, close=lambda: _close(vectors))
        backend = f"{backend}, {iterations} iterations per call"
        guarantee = "refilled" if refilled else "bitwise" if env.pure else "learner"

        def task_in_program(state: loop.LoopState, fn: tasks.TaskFn, result: dict[str, Any], count: int):
            if not env.pure:
                raise InputError(
                    f"set_task: {cfg.env.id} is stepped by EnvPool inside the program that learns, and cannot be made "
                    "anew there: use rollout.collector host, or name the curriculum in custom.env_task"
                )
            context = EnvContext(cfg.env.options)
            return dataclasses.replace(state, source=tasks.apply_in(state.source, env, fn, result, context)[0])

        return Run(spec, algo, program, backend, True, replay, guarantee, learners, num_params, "", task_in_program)
    timers = timers or Timers()
    latest = [cfg]  # a task of EnvPool is other options of the environment
    given: list[Any] = []  # the task of the others

    def source(key: Key, vectors: list[Any], count: int) -> sources.Source:
        made = _source(latest[0], algo, devices, timers, key, vectors, count, hooks)
        watched = hooks is not None and hooks.needs_rollouts
        whole = cfg.rollout.batch_mode == "complete_episodes" and not cfg.env_runners.num
        if hooks and watched:  # episodes with the rows as they were collected, rollouts as they are learned from
            made = hooks.watch(made, cfg.env.num_envs, batches=not whole)
        if whole:
            made = _completed(cfg, made, spec, algo)
        if hooks and watched and whole:
            made = hooks.watch(made, cfg.env.num_envs, episodes=False)
        return fake.Fake(made) if cfg.rollout.fake else made

    def remake(key: Key, count: int) -> sources.Source:
        made = source(key, _vectors(latest[0], pools, count), count)
        for task in given:
            sources.set_task(made, task)
        return made

    program = loop.staged(
        learn,
        lambda key: source(key, vectors, restarts),
        mesh,
        rows=rows,
        timers=timers,
        stage="collect" if cfg.rollout.mode == "sync" and not cfg.env_runners.num else "wait",
        remake=remake,
    )
    if training_step is not None:
        program = loop.custom(program, training_step)

    def apply_task(state: loop.LoopState, fn: tasks.TaskFn, result: dict[str, Any], count: int) -> loop.LoopState:
        assert program.source is not None and program.restart is not None
        if envs.resolve(cfg.env.id, cfg.env.backend) != "envpool":
            found = tasks.apply(program.source(), fn, result, EnvContext(cfg.env.options))
            given[:] = found[:1] if all(repr(x) == repr(found[0]) for x in found) else []
            return state
        options, wanted = latest[0].env.options, list[Any]()
        task = fn(result, tasks.Handle(lambda: options, wanted.append), EnvContext(options))
        for changed in [*wanted, *([] if task is None else [task])][-1:]:
            if changed != options:
                latest[0] = _with_options(latest[0], changed)
                program.restart(count)
        return state

    exact = cfg.checkpoint.exact
    note = hooks.collecting(env, env_runners=cfg.env_runners.num > 0)[1] if hooks else ""
    graph = isinstance(env, GraphEnv)
    how = "inside a program" if graph else "from the host"
    if cfg.env_runners.num:
        how, graph = f"in {cfg.env_runners.num} env runners", False
    guarantee = "refilled" if refilled else "restarted" if exact else "learner"
    return Run(
        spec, algo, program, f"{backend}, {how}", graph, replay, guarantee, learners, num_params, note, apply_task
    )


def _whole_episodes(cfg: RunConfig, spec: EnvSpec) -> int:
    """Rows that a rollout of whole episodes has beyond its length; 0 where episodes may be cut.

    Raises:
      InputError: nobody knows how long an episode can be, or replay would hold little but padding.
    """
    if cfg.rollout.batch_mode == "truncate_episodes":
        return 0
    longest, length = complete.longest_episode(cfg.env.horizon, spec.max_episode_steps), plan.rollout_length(cfg)
    if cfg.replay is not None and length < longest:
        raise InputError(
            f"rollout.batch_mode complete_episodes: replay would store rollouts of {length} steps as "
            f"{length + longest} rows, most of them padding: use rollout.length {longest} or more, or truncate_episodes"
        )
    # whole minibatches, and of a size that can be cut into equal parts
    unit = math.lcm(getattr(cfg.algo, "num_minibatches", 1), 16)
    return -(-(length + longest) // unit) * unit - length


def _completed(cfg: RunConfig, source: sources.Source, spec: EnvSpec, algo: Algo) -> sources.Source:
    limit = _whole_episodes(cfg, spec)
    return complete.Complete(source, limit=limit, carry=algo.carry) if limit else source


def _transforms(cfg: RunConfig, hooks: callbacks.Hooks | None) -> tuple[Callable[[Rollout], Rollout], ...]:
    """What becomes of a rollout between collecting and learning: the config's, then those of callbacks."""
    given = [registry.load(path, "custom.transforms") for path in cfg.custom.transforms]
    return (*given, *(hooks.program_transforms() if hooks else ()))


def _with_options(cfg: RunConfig, task: Any) -> RunConfig:
    """The run in environments with other options, the task's over its own. Raises InputError."""
    if not isinstance(task, Mapping):
        raise InputError(f"a task of {cfg.env.id}, which EnvPool steps, is a mapping of its options, not {task!r}")
    options = {**cfg.env.options, **task}
    if errors := envs.check(cfg.env.id, cfg.env.backend, options):
        raise InputError(*errors)
    return dataclasses.replace(cfg, env=dataclasses.replace(cfg.env, options=options))


# ---------------------------------------------------------------- who collects


def _vectors(cfg: RunConfig, pools: int, count: int) -> list[GraphEnv | Env | AsyncEnv]:
    """The environments of each pool; with env_runners one of a single environment, for its spaces.

    Args:
      cfg: the run.
      pools: how many.
      count: differs from call to call: environments with other seeds.
    """
    if cfg.env_runners.num:
        return [environment(cfg, num_envs=1)]
    size, vectors = cfg.env.num_envs // pools, []
    try:
        for i in range(pools):
            vectors.append(environment(cfg, num_envs=size, index=count, offset=i * size))
    except InputError:
        _close(vectors)
        raise
    return vectors


def _close(vectors: Iterable[GraphEnv | Env | AsyncEnv]) -> None:
    for env in vectors:
        env.close()


def _collecting(cfg: RunConfig, algo: Algo, pools: int) -> dict[str, Any]:
    """What whoever collects for one of so many pools has to know, beside the environments and how to act."""
    return {
        "window": episodes.window_of(pools, cfg.run.smoothing_episodes),
        "explore": cfg.rollout.explore,
        "length": plan.rollout_length(cfg),
        "carry": algo.carry,
        "reward_transform": envs.reward_transform(cfg.env.clip_rewards, is_atari=envs.is_atari(cfg.env.id)),
        "running_return_gamma": algo.running_return_gamma,
    }


def _source(
    cfg: RunConfig,
    algo: Algo,
    devices: parallel.Devices,
    timers: Timers,
    key: Key,
    vectors: list[GraphEnv | Env | AsyncEnv],
    count: int,
    hooks: callbacks.Hooks | None = None,
) -> sources.Source:
    """Where the rollouts of a staged program come from; those of the whole batch, on the devices that learn."""
    lag = plan.policy_lag(cfg)
    join = functools.partial(parallel.deal, mesh=devices.learners)
    if cfg.env_runners.num:
        _close(vectors)
        record = hooks is not None and hooks.needs_episodes
        return _env_runners(cfg, algo, vectors[0].spec, timers, count, join, record=record)
    collecting = _collecting(cfg, algo, len(vectors))
    if hooks:
        collecting |= hooks.collecting(vectors[0])[0]
    parts = [
        sources.make(env, algo.act, key=jax.random.fold_in(key, i), timers=timers, device=d, **collecting)
        for i, (env, d) in enumerate(zip(vectors, devices.actors, strict=True))
    ]
    if hooks:
        for i, part in enumerate(parts):
            hooks.created(part, _contexts(cfg, 0), offset=i * vectors[0].spec.num_envs)
    pools = sources.Pools(parts, devices=devices.actors, join=join, stack=parallel.stack)
    return pools if lag is None or cfg.rollout.fake else sources.Async(pools, lag=lag, timers=timers)


def collector(cfg: RunConfig) -> tuple[sources.Source, PyTree]:
    """The source of a run's rollouts without its learner, and an untrained actor for it."""
    devices = parallel.devices(learners=cfg.devices.learners, actors=cfg.devices.actors, fake=cfg.devices.fake)
    vectors = _vectors(cfg, plan.num_pools(cfg, devices.learners.devices.size), 0)
    algo = algorithm(cfg, vectors[0].spec)
    source = _source(cfg, algo, devices, Timers(), jax.random.key(cfg.run.seed), vectors, 0)
    return source, jax.jit(lambda key: algo.actor(algo.init(key)))(jax.random.key(0))


def _env_runners(
    cfg: RunConfig,
    algo: Algo,
    spec: EnvSpec,
    timers: Timers,
    count: int,
    join: Callable[[Sequence[Rollout]], Rollout],
    *,
    record: bool,
) -> sources.Source:
    share = cfg.env.num_envs // cfg.env_runners.num
    length = plan.rollout_length(cfg) + _whole_episodes(cfg, spec)
    like = unroll.rollout_like(spec, algo, length=length, num_envs=share, record=record)
    options = {f: getattr(cfg.env_runners, f) for f in ray_hosts.RunnerOptions._fields}
    return ray_hosts.EnvRunners(
        functools.partial(runner_source, cfg, count, registry.needed(to_dict(cfg)), record),
        ray_hosts.RunnerOptions(**options),
        num_envs=cfg.env.num_envs,
        like=like,
        join=join,
        lag=plan.policy_lag(cfg),
        timers=timers,
        window=episodes.window_of(cfg.env_runners.num, cfg.run.smoothing_episodes),
        compress=cfg.env_runners.compress_observations,
    )


def runner_source(
    cfg: RunConfig, count: int, registered: Mapping[str, Any], record: bool, index: int, restarts: int
) -> sources.Source:
    """The source of one env runner, in its own process.

    Args:
      cfg: the run.
      count: differs between a run and its continuations.
      registered: `registry.needed` of the process that learns.
      record: whether somebody looks at the episodes: see `unroll.finish`.
      index: of the runner.
      restarts: how often runners were started in its place: each has environments of its own.
    """
    registry.install(registered)
    share = cfg.env.num_envs // cfg.env_runners.num
    seeds = count + _RESTARTED * restarts
    env = environment(cfg, num_envs=share, index=seeds, offset=index * share, worker_index=index + 1)
    algo = algorithm(cfg, env.spec)
    key = jax.random.key(cfg.run.seed)
    for number in (loop.Role.ENV, count, index, restarts):
        key = jax.random.fold_in(key, number)
    made = sources.make(env, algo.act, key=key, record=record, **_collecting(cfg, algo, cfg.env_runners.num))
    source: Any = _completed(cfg, made, env.spec, algo)
    source.worker_index = index + 1
    if loaded := callbacks.load(cfg.custom.callbacks):
        callbacks.Hooks(loaded).created(source, _contexts(cfg, index + 1), offset=index * share)
    return source


def _contexts(cfg: RunConfig, worker_index: int) -> Callable[[int], EnvContext]:
    """What environment i of the run is told of its place."""
    runners = cfg.env_runners.num
    return lambda i: EnvContext(cfg.env.options, worker_index=worker_index, num_workers=runners, vector_index=i)


_RESTARTED = 4_099  # between the indices of a runner's environments and those of the next in its place


def enable_compile_cache() -> None:
    """Keeps compiled programs for the next process, where jax was told to, or in ~/.cache/jrl.

    Call before the first compilation.
    """
    settings: Any = jax.config
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings.jax_compilation_cache_dir
    directory = chosen or str(Path.home() / ".cache" / "jrl" / "programs")
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
