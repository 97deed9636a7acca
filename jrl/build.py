"""From a RunConfig to the parts of a run: environments, algorithm, program."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jrl import algos, envs, learner, loop, parallel
from jrl.config import RunConfig, algo_name
from jrl.errors import InputError
from jrl.metrics.timers import Timers
from jrl.plan import batch_plan, iterations_per_call
from jrl.replay import memory, prioritized, ring
from jrl.rollout import sources, unroll
from jrl.types import Algo, Buffer, Env, EnvSpec, GraphEnv, Key, element


class Run(NamedTuple):
    """The parts of one run; `program.close()` ends its environments."""

    spec: EnvSpec  # as one device sees it
    algo: Algo
    program: loop.Program
    backend: str  # how the environments are stepped, in words
    replay: str  # what the replay buffer takes, in words; "" without
    resumable: bool  # whether the environments' state is part of a checkpoint


def environment(cfg: RunConfig, *, num_envs: int, role: str = "train", index: int = 0) -> GraphEnv | Env:
    """`num_envs` environments as `cfg.env` and `cfg.rollout.collector` describe them.

    Raises:
      InputError: the id is unknown, or the collector does not fit the backend.
    """
    env = envs.make(
        cfg.env.id,
        backend=cfg.env.backend,
        num_envs=num_envs,
        seed=cfg.run.seed,
        role=role,
        index=index,
        options=cfg.env.options,
        normalize_actions=cfg.env.normalize_actions,
        clip_actions=cfg.env.clip_actions,
        host=cfg.rollout.collector == "host",
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
    mesh = parallel.make_mesh(cfg.run.devices)
    devices = mesh.devices.size
    if cfg.env.num_envs % devices:
        raise InputError(f"env.num_envs {cfg.env.num_envs} is not divisible by {devices} devices")
    rows = batch_plan(cfg).rows
    # a pure environment is part of the program, one set per device; another is stepped once, for all devices
    backend = envs.resolve(cfg.env.id, cfg.env.backend)
    pure = backend == "graph"
    num_envs = cfg.env.num_envs // devices if pure else cfg.env.num_envs
    env = environment(cfg, num_envs=num_envs, index=restarts)
    try:
        algo = algorithm(cfg, env.spec, axis_name=parallel.AXIS)
        learn, replay = learner.on_policy(algo), ""
        if not algo.on_policy:
            learn, replay = _replay_learner(cfg, algo, env.spec, devices)
    except InputError:
        env.close()
        raise
    options = {
        "length": rows // cfg.env.num_envs,
        "carry": algo.carry,
        "reward_transform": envs.reward_transform(cfg.env.clip_rewards, is_atari=envs.is_atari(cfg.env.id)),
        "running_return_gamma": algo.running_return_gamma,
    }
    # EnvPool too, where one process steps it for one device and an iteration is short: with a rollout of a few rows and
    # a few gradient steps, dispatching two programs takes a quarter of the time
    if isinstance(env, GraphEnv) and (env.pure or (devices == 1 and not algo.on_policy)):
        iterations = iterations_per_call(cfg)
        collect = unroll.make(env, algo.act, **options)
        program = loop.fused(learn, collect, mesh, iterations=iterations, rows=rows, close=env.close)
        backend = f"{backend}, {iterations} iterations per call"
        return Run(env.spec, algo, program, backend, replay, resumable=env.pure)
    timers = timers or Timers()

    def source(key: Key) -> sources.Source:
        return sources.make(env, algo.act, key=key, timers=timers, **options)

    program = loop.staged(learn, source, mesh, rows=rows, timers=timers)
    how = "inside a program" if isinstance(env, GraphEnv) else "from the host"
    return Run(env.spec, algo, program, f"{backend}, {how}", replay, resumable=False)


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
    learn = learner.off_policy(
        algo,
        buffer(replay.capacity),
        updates=batch_plan(cfg).updates or 1,
        learning_starts=min(replay.learning_starts, _most_held(cfg, spec)),
        axis_name=parallel.AXIS,
    )
    return learn, size


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
    if size == 1:
        return None
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
