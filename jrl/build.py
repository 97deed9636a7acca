"""From a RunConfig to the parts of a run: environments, algorithm, program."""

import os
from pathlib import Path
from typing import NamedTuple

import jax

from jrl import algos, envs, learner, loop, parallel
from jrl.config import RunConfig, algo_name
from jrl.errors import InputError
from jrl.metrics.timers import Timers
from jrl.rollout import sources, unroll
from jrl.types import Algo, Env, EnvSpec, GraphEnv, Key

_STEPS_PER_CALL = 16_384  # graph environments: rows per compiled call, so that Python's share is under a percent


class Run(NamedTuple):
    """The parts of one run; `program.close()` ends its environments."""

    spec: EnvSpec  # as one device sees it
    algo: Algo
    program: loop.Program
    backend: str  # how the environments are stepped, in words
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
    rows = cfg.env.num_envs * cfg.rollout.length
    # a pure environment is part of the program, one set per device; another is stepped once, for all devices
    pure = cfg.env.backend == "graph" or envs.resolve(cfg.env.id, cfg.env.backend) == "graph"
    num_envs = cfg.env.num_envs // devices if pure else cfg.env.num_envs
    env = environment(cfg, num_envs=num_envs, index=restarts)
    try:
        algo = algorithm(cfg, env.spec, axis_name=parallel.AXIS)
    except InputError:
        env.close()
        raise
    learn = learner.on_policy(algo)
    options = {
        "length": cfg.rollout.length,
        "carry": algo.carry,
        "reward_transform": envs.reward_transform(cfg.env.clip_rewards, is_atari=envs.is_atari(cfg.env.id)),
        "running_return_gamma": algo.running_return_gamma,
    }
    if isinstance(env, GraphEnv) and env.pure:
        iterations = cfg.rollout.iterations_per_call or max(1, _STEPS_PER_CALL // rows)
        program = loop.fused(learn, unroll.make(env, algo.act, **options), mesh, iterations=iterations, rows=rows)
        return Run(env.spec, algo, program, f"graph, {iterations} iterations per call", resumable=True)
    timers = timers or Timers()

    def source(key: Key) -> sources.Source:
        return sources.make(env, algo.act, key=key, timers=timers, **options)

    program = loop.staged(learn, source, mesh, rows=rows, timers=timers)
    how = "inside a program" if isinstance(env, GraphEnv) else "from the host"
    return Run(env.spec, algo, program, f"{envs.resolve(cfg.env.id, cfg.env.backend)}, {how}", resumable=False)


def enable_compile_cache() -> None:
    """Keeps compiled programs for the next process, in JAX_COMPILATION_CACHE_DIR or ~/.cache/jrl.

    Call before the first compilation.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path.home() / ".cache" / "jrl" / "programs")
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
