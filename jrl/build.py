"""From a RunConfig to the parts of a run: environments, algorithm, program."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jrl import algos, envs, learner, loop, parallel, plan, watch
from jrl.config import RunConfig, algo_name
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.replay import memory, prioritized, ring
from jrl.rollout import ray_hosts, sources, unroll
from jrl.types import Algo, AsyncEnv, Buffer, Env, EnvSpec, GraphEnv, Key, PyTree, Rollout, element

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


def environment(
    cfg: RunConfig, *, num_envs: int, role: str = "train", index: int = 0, offset: int = 0
) -> GraphEnv | Env | AsyncEnv:
    """`num_envs` environments as `cfg.env` and `cfg.rollout.collector` describe them.

    Args:
      cfg: the run.
      num_envs: of this vector.
      role, index: see `envs.make`; those of an evaluation wait for each other.
      offset: of its first environment among those of the run.
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


def algorithm(cfg: RunConfig, spec: EnvSpec, *, axis_name: str | None = None) -> Algo:
    """The algorithm that `cfg.algo` belongs to, for the spaces of `spec`."""
    return algos.get(algo_name(cfg)).make(cfg.algo, spec, cfg.network, axis_name=axis_name)


def run(cfg: RunConfig, *, timers: Timers | None = None, restarts: int = 0) -> Run:
    """Environments, algorithm and the program that trains it.

    Args:
      cfg: the run.
      timers: where stages are timed.
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
    # pure environments are part of the program, a share on each device; EnvPool's may be of the program of one device
    pools = plan.num_pools(cfg, learners)
    vectors = _vectors(cfg, pools, restarts)
    try:
        spec = vectors[0].spec
        algo = algorithm(cfg, spec, axis_name=parallel.AXIS)
        if algo.on_policy:
            like = functools.partial(unroll.rollout_like, spec, algo, length=plan.rollout_length(cfg))
            of_one = like(num_envs=cfg.env.num_envs // learners)
            make_learner = functools.partial(learner.on_policy, like=of_one)
            learn, replay = _watched(cfg, algo, like(num_envs=cfg.env.num_envs), make_learner), ""
        else:
            learn, replay = _replay_learner(cfg, algo, spec, learners)
    except InputError:
        _close(vectors)
        raise
    refilled = cfg.replay is not None and cfg.checkpoint.replay == "none"
    # EnvPool too, where one process steps it for one device and an iteration is short: with a rollout of a few rows and
    # a few gradient steps, dispatching two programs takes a quarter of the time. A pool is a constant of its program:
    # where pools are made anew, the program that holds one is a small one
    short = learners == 1 and not algo.on_policy and not cfg.checkpoint.exact
    env = vectors[0]
    if here and isinstance(env, GraphEnv) and (env.pure or short):
        iterations = plan.iterations_per_call(cfg)
        collect = unroll.make(env, algo.act, **_collecting(cfg, algo, pools))
        program = loop.fused(learn, collect, mesh, iterations=iterations, rows=rows, close=lambda: _close(vectors))
        backend = f"{backend}, {iterations} iterations per call"
        guarantee = "refilled" if refilled else "bitwise" if env.pure else "learner"
        return Run(spec, algo, program, backend, True, replay, guarantee, learners)
    timers = timers or Timers()
    source = functools.partial(_source, cfg, algo, devices, timers)
    exact = cfg.checkpoint.exact
    program = loop.staged(
        learn,
        lambda key: source(key, vectors, restarts),
        mesh,
        rows=rows,
        timers=timers,
        stage="collect" if cfg.rollout.mode == "sync" and not cfg.env_runners.num else "wait",
        remake=(lambda key, count: source(key, _vectors(cfg, pools, count), count)) if exact else None,
    )
    graph = isinstance(env, GraphEnv)
    how = "inside a program" if graph else "from the host"
    if cfg.env_runners.num:
        how, graph = f"in {cfg.env_runners.num} env runners", False
    guarantee = "refilled" if refilled else "restarted" if exact else "learner"
    return Run(spec, algo, program, f"{backend}, {how}", graph, replay, guarantee, learners)


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
        "window": episodes.window_of(pools),
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
) -> sources.Source:
    """Where the rollouts of a staged program come from; those of the whole batch, on the devices that learn."""
    lag = plan.policy_lag(cfg)
    join = functools.partial(parallel.deal, mesh=devices.learners)
    if cfg.env_runners.num:
        _close(vectors)
        return _env_runners(cfg, algo, vectors[0].spec, timers, count, join)
    collecting = _collecting(cfg, algo, len(vectors))
    parts = [
        sources.make(env, algo.act, key=jax.random.fold_in(key, i), timers=timers, device=d, **collecting)
        for i, (env, d) in enumerate(zip(vectors, devices.actors, strict=True))
    ]
    pools = sources.Pools(parts, devices=devices.actors, join=join, stack=parallel.stack)
    return pools if lag is None else sources.Async(pools, lag=lag, timers=timers)


def collector(cfg: RunConfig) -> tuple[sources.Source, PyTree]:
    """The source of a run's rollouts without its learner, and an untrained actor for it."""
    devices = parallel.devices(learners=cfg.devices.learners, actors=cfg.devices.actors, fake=cfg.devices.fake)
    vectors = _vectors(cfg, plan.num_pools(cfg, devices.learners.devices.size), 0)
    algo = algorithm(cfg, vectors[0].spec)
    source = _source(cfg, algo, devices, Timers(), jax.random.key(cfg.run.seed), vectors, 0)
    return source, jax.jit(lambda key: algo.actor(algo.init(key)))(jax.random.key(0))


def _env_runners(
    cfg: RunConfig, algo: Algo, spec: EnvSpec, timers: Timers, count: int, join: Callable[[Sequence[Rollout]], Rollout]
) -> sources.Source:
    share = cfg.env.num_envs // cfg.env_runners.num
    like = unroll.rollout_like(spec, algo, length=plan.rollout_length(cfg), num_envs=share)
    options = {f: getattr(cfg.env_runners, f) for f in ray_hosts.RunnerOptions._fields}
    return ray_hosts.EnvRunners(
        functools.partial(runner_source, cfg, count),
        ray_hosts.RunnerOptions(**options),
        num_envs=cfg.env.num_envs,
        like=like,
        join=join,
        lag=plan.policy_lag(cfg),
        timers=timers,
        window=episodes.window_of(cfg.env_runners.num),
    )


def runner_source(cfg: RunConfig, count: int, index: int, restarts: int) -> sources.Source:
    """The source of one env runner, in its own process.

    Args:
      cfg: the run.
      count: differs between a run and its continuations.
      index: of the runner.
      restarts: how often runners were started in its place: each has environments of its own.
    """
    share = cfg.env.num_envs // cfg.env_runners.num
    env = environment(cfg, num_envs=share, index=count + _RESTARTED * restarts, offset=index * share)
    algo = algorithm(cfg, env.spec)
    key = jax.random.key(cfg.run.seed)
    for number in (loop.Role.ENV, count, index, restarts):
        key = jax.random.fold_in(key, number)
    return sources.make(env, algo.act, key=key, **_collecting(cfg, algo, cfg.env_runners.num))


_RESTARTED = 4_099  # between the indices of a runner's environments and those of the next in its place


# ---------------------------------------------------------------- who learns


def _replay_learner(cfg: RunConfig, algo: Algo, spec: EnvSpec, devices: int) -> tuple[learner.Learner, str]:
    """The learner around a replay buffer that fits the devices' memory, and its size in words.

    Raises:
      InputError: it does not fit.
    """
    replay = cfg.replay
    assert replay is not None
    options = {
        "num_envs": cfg.env.num_envs // devices,
        "batch_size": replay.batch_size // devices,
        "gamma": cfg.algo.gamma,
        "n_step": replay.n_step,
        "frame_stack": _frame_stack(cfg, spec),
    }
    if replay.prioritized:
        options |= {"alpha": replay.priority_alpha, "beta": replay.priority_beta, "eps": replay.priority_eps}
        options["num_devices"] = devices
    make = prioritized.make if replay.prioritized else ring.make

    def buffer(capacity: int) -> Buffer:
        return make(element(spec.observation), element(spec.action), capacity=capacity // devices, **options)

    size = memory.check_fits(buffer, replay.capacity, devices=devices)
    held = buffer(replay.capacity)
    of_all = lambda x: jax.ShapeDtypeStruct((x.shape[0] * devices, *x.shape[1:]), x.dtype)
    like = jax.tree.map(of_all, jax.eval_shape(lambda: held.sample(held.init(), jax.random.key(0))))
    make_learner = functools.partial(
        learner.off_policy,
        buffer=held,
        updates=plan.batch_plan(cfg).updates or 1,
        learning_starts=min(replay.learning_starts, _most_held(cfg, spec)),
        axis_name=parallel.AXIS,
    )
    return _watched(cfg, algo, like, make_learner), size


def _watched(cfg: RunConfig, algo: Algo, like: PyTree, make: Callable[[Algo], learner.Learner]) -> learner.Learner:
    """The learner of `algo`, with a watch over updates that are not finite unless the config says to ignore them."""
    if cfg.run.on_nonfinite == "ignore":
        return make(algo)
    learn = make(watch.watched(algo, like, axis_name=parallel.AXIS))
    return learn._replace(keep=lambda state: state.state, resume=lambda kept: watch.fresh(kept, like))


def _most_held(cfg: RunConfig, spec: EnvSpec) -> int:
    """Rows that a full buffer can be sampled from: all but the head and those whose frame stacks are incomplete."""
    assert cfg.replay is not None
    stack = _frame_stack(cfg, spec)
    return (cfg.replay.capacity // cfg.env.num_envs - (stack.size if stack else 1)) * cfg.env.num_envs


def _frame_stack(cfg: RunConfig, spec: EnvSpec) -> ring.FrameStack | None:
    """How many images of an observation are frames of a stack: as told, or what EnvPool makes of Atari."""
    assert cfg.replay is not None
    size, shape = cfg.replay.frame_stack, spec.observation.shape
    if size is None:
        atari = envs.is_atari(cfg.env.id) and envs.resolve(cfg.env.id, cfg.env.backend) == "envpool"
        size = shape[0] if atari and len(shape) == 3 else 1
    if cfg.env.batch_size is not None and cfg.replay.frame_stack is None:
        size = 1  # rows that a rollout leaves empty hold no frame: stacks around them could not be put together again
    if size == 1:
        return None
    if cfg.env.batch_size is not None or cfg.env.batch_wait_ms is not None:
        raise InputError(
            f"replay.frame_stack {size}: environments that do not wait for each other leave rows empty, and frames are "
            "missing there: use 1, or leave env.batch_size and env.batch_wait_ms out"
        )
    ends: tuple[Literal[0], Literal[-1]] = (0, -1)
    axes = [axis for axis in ends if len(shape) == 3 and shape[axis] == size]
    if not axes:
        raise InputError(f"replay.frame_stack {size}: observations {shape} are no stacks of {size} images: use 1")
    return ring.FrameStack(size, axes[0])


def enable_compile_cache() -> None:
    """Keeps compiled programs for the next process, in JAX_COMPILATION_CACHE_DIR or ~/.cache/jrl.

    Call before the first compilation.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path.home() / ".cache" / "jrl" / "programs")
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
