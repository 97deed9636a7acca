"""From a RunConfig to the parts of a run: environments, algorithm, program."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jrl import algos, envs, learner, loop, parallel, watch
from jrl.config import RunConfig, algo_name
from jrl.errors import InputError
from jrl.metrics.timers import Timers
from jrl.plan import batch_plan, iterations_per_call
from jrl.replay import memory, prioritized, ring
from jrl.rollout import sources, unroll
from jrl.types import Algo, Buffer, Env, EnvSpec, GraphEnv, Key, PyTree, element

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
        if algo.on_policy:
            like = unroll.rollout_like(env.spec, algo, length=rows // cfg.env.num_envs, num_envs=cfg.env.num_envs)
            learn, replay = _watched(cfg, algo, like, learner.on_policy), ""
        else:
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
    refilled = cfg.replay is not None and cfg.checkpoint.replay == "none"
    # EnvPool too, where one process steps it for one device and an iteration is short: with a rollout of a few rows and
    # a few gradient steps, dispatching two programs takes a quarter of the time. A pool is a constant of its program:
    # where pools are made anew, the program that holds one is a small one
    short = devices == 1 and not algo.on_policy and not cfg.checkpoint.exact
    if isinstance(env, GraphEnv) and (env.pure or short):
        iterations = iterations_per_call(cfg)
        collect = unroll.make(env, algo.act, **options)
        program = loop.fused(learn, collect, mesh, iterations=iterations, rows=rows, close=env.close)
        backend = f"{backend}, {iterations} iterations per call"
        guarantee = "refilled" if refilled else "bitwise" if env.pure else "learner"
        return Run(env.spec, algo, program, backend, True, replay, guarantee)
    timers = timers or Timers()

    def source(key: Key) -> sources.Source:
        return sources.make(env, algo.act, key=key, timers=timers, **options)

    def remake(key: Key, count: int) -> sources.Source:
        env = environment(cfg, num_envs=num_envs, index=count)
        return sources.make(env, algo.act, key=key, timers=timers, **options)

    exact = cfg.checkpoint.exact
    program = loop.staged(learn, source, mesh, rows=rows, timers=timers, remake=remake if exact else None)
    how = "inside a program" if isinstance(env, GraphEnv) else "from the host"
    guarantee = "refilled" if refilled else "restarted" if exact else "learner"
    return Run(env.spec, algo, program, f"{backend}, {how}", isinstance(env, GraphEnv), replay, guarantee)


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
        updates=batch_plan(cfg).updates or 1,
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
