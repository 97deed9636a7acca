"""Ids, backends and seeds: `make` is how everything else comes by an environment."""

import difflib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrl import registry
from jrl.envs import classic, history, limits, nested, parametric, step_faults, suites, toys
from jrl.envs import context as contexts
from jrl.envs.context import EnvContext, makes_graph
from jrl.envs.graph import Definition, build, time_limit
from jrl.envs.wrappers import wrap
from jrl.host.room import check_observations
from jrl.spaces import leaves
from jrl.types import AsyncEnv, Env, EnvSpec, GraphEnv, InputError

BACKENDS = ("envpool", "gymnasium", "graph")  # in the order that `auto` asks them

GRAPH: dict[str, Callable[..., Definition]] = {
    "CartPole-v1": classic.cartpole,
    "Pendulum-v1": classic.pendulum,
    "MountainCar-v0": classic.mountain_car,
    "MountainCarContinuous-v0": classic.mountain_car_continuous,
    "Acrobot-v1": classic.acrobot,
    "Catch-v0": toys.catch,
    "StatelessCartPole-v1": toys.stateless_cartpole,
    "RepeatAfterMe-v0": toys.repeat_after_me,
    "Corridor-v0": toys.corridor,
    "ParametricCartPole-v0": parametric.parametric_cartpole,
    "Nested-v0": nested.nested,
}
ROLES = ("train", "eval")
_BLOCKS = 8_192  # per role, of 65,536 seeds each: int32 holds those of four roles


def ids(backend: str) -> tuple[str, ...]:
    """The ids of one backend that can be listed; the graph backend also has `gymnax:NAME` and `brax:NAME`."""
    if backend == "graph":
        return tuple(GRAPH)
    if backend == "envpool":
        from jrl.envs import envpool_env

        return envpool_env.ids()
    from jrl.envs import gym_env

    return gym_env.ids()


def backends_of(id: str) -> tuple[str, ...]:
    """The backends that have `id`, in the order that `auto` asks them; empty for an unknown id."""
    return tuple(backend for backend in BACKENDS if _has(id, backend))


def _has(id: str, backend: str) -> bool:
    if registry.registered(id) is None:
        if ":" not in id:
            return id in ids(backend)
        if id.startswith(suites.PREFIXES):
            return backend == "graph"
    # the user's own: a class, a function, or a name that only looks like one, whose fault the backend tells
    if backend == "envpool":
        return False
    from jrl.envs import gym_env

    try:
        found = gym_env.load_class(id)
    except InputError:
        found = None
    graph = makes_graph(found)
    return graph is not False if backend == "graph" else not graph


def resolve(id: str, backend: str = "auto") -> str:
    """The backend that will step `id`: the first of EnvPool, Gymnasium and graph that has it, under `auto`.

    Raises:
      InputError: unknown id or backend, or that backend lacks the id.
    """
    if backend not in ("auto", *BACKENDS):
        raise InputError(f"env.backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    for candidate in BACKENDS if backend == "auto" else (backend,):
        if _has(id, candidate):
            return candidate
    others = backends_of(id)
    if others:
        raise InputError(f"env.id {id}: the {backend} backend does not have it: use env.backend {' or '.join(others)}")
    known = [*registry.everything(), *(name for b in BACKENDS for name in ids(b))]
    near = [f"{name} ({', '.join(backends_of(name))})" for name in difflib.get_close_matches(id, set(known), 3)]
    mend = f"did you mean {', '.join(near)}?" if near else "name an id of EnvPool or Gymnasium, or package.module:Class"
    raise InputError(f"env.id {id}: no backend has it: {mend}")


def check(
    id: str,
    backend: str = "auto",
    options: dict[str, Any] | None = None,
    *,
    num_envs: int | None = None,
    batch_size: int | None = None,
    remote_worker_envs: bool = False,
    batch_wait_ms: float | None = None,
    restart_failed: bool = False,
    step_timeout_s: float | None = None,
    horizon: int | None = None,
    soft_horizon: bool = False,
    action_mask_info: str | None = None,
    frame_stack: int = 1,
) -> list[str]:
    """What is wrong with these, without making an environment; each message names the mend. Arguments as `make`."""
    try:
        found = resolve(id, backend)
    except InputError as e:
        return list(e.errors)
    errors = [
        *_size_errors(id, found, num_envs, batch_size),
        *_worker_errors(id, found, remote_worker_envs, batch_wait_ms, restart_failed, step_timeout_s),
        *limits.errors(horizon, soft_horizon, id, found, backends_of(id) if soft_horizon else ()),
        *_mask_errors(id, found, action_mask_info),
        *history.check(frame_stack),
    ]
    try:
        if found == "envpool":
            from jrl.envs import envpool_env

            errors += envpool_env.check(id, options or {})
        elif found == "gymnasium":
            from jrl.envs import gym_env

            errors += gym_env.check(id, options or {})
        elif _is_suites(id):
            errors += suites.check(id)
        else:
            _definition(id, options or {})
    except InputError as e:
        errors += e.errors
    return errors


def _size_errors(id: str, found: str, num_envs: int | None, batch_size: int | None) -> Iterator[str]:
    if batch_size is None:
        return
    if found != "envpool":
        yield f"env.batch_size: only EnvPool takes it, and {id} is stepped by the {found} backend: leave it out"
    elif batch_size < 1:
        yield f"env.batch_size: expected at least 1, got {batch_size}"
    elif num_envs is not None and batch_size > num_envs:
        yield f"env.batch_size {batch_size}: a vector has {num_envs} environments only: use at most so many"


def _mask_errors(id: str, found: str, action_mask_info: str | None) -> Iterator[str]:
    if action_mask_info == "":
        yield "env.action_mask_info: expected the name of an entry of the infos, or null, got ''"
    elif action_mask_info is not None and found == "graph":
        yield (
            f"env.action_mask_info {action_mask_info}: environments in JAX have no infos, and {id} is stepped by the "
            "graph backend: let its observation be a Dict with an action_mask, or leave it out"
        )


def _worker_errors(
    id: str, found: str, remote: bool, batch_wait_ms: float | None, restart_failed: bool, step_timeout_s: float | None
) -> Iterator[str]:
    stepped = f"{id} is stepped by the {found} backend: "
    other = "use env.backend gymnasium, or leave it out" if _has(id, "gymnasium") else "leave it out"
    if remote and found != "gymnasium":
        yield f"env.remote_worker_envs: only Gymnasium's environments run in processes, and {stepped}{other}"
    elif remote and not hasattr(os, "fork"):
        yield "env.remote_worker_envs: worker processes need an operating system that can fork: leave it out"
    if batch_wait_ms is not None and not remote:
        yield "env.batch_wait_ms: only worker processes are waited for: set env.remote_worker_envs, or leave it out"
    elif batch_wait_ms is not None and not 0 <= batch_wait_ms < float("inf"):
        yield f"env.batch_wait_ms: expected 0 or more, got {batch_wait_ms}"
    name = "env_runners.restart_failed_sub_environments"
    if restart_failed and found != "gymnasium":
        yield f"{name}: only Gymnasium's environments are made anew, and {stepped}{other}"
    name = "env_runners.env_step_timeout_s"
    if step_timeout_s is not None and not remote:
        yield f"{name}: only a worker process can be ended: set env.remote_worker_envs, or leave it out"
    elif step_timeout_s is not None and not step_timeout_s > 0:
        yield f"{name}: expected more than 0, got {step_timeout_s}"


def _is_suites(id: str) -> bool:
    return id.startswith(suites.PREFIXES) and registry.registered(id) is None


def _definition(id: str, options: dict[str, Any]) -> Definition:
    """Raises InputError: an option that it does not take, or a function of the user's that gives no Definition."""
    options = dict(options)
    found: Any = registry.registered(id) or GRAPH.get(id)
    if found is None:
        from jrl.envs import gym_env

        found = gym_env.load_class(id)
    if not isinstance(found, Definition) and (
        errors := contexts.option_errors(id, found, options, ("max_episode_steps",))
    ):
        raise InputError(*errors)
    limit = options.pop("max_episode_steps", None)
    try:
        made = found if isinstance(found, Definition) else found(**options)
    except BaseException as e:
        if not step_faults.own(e):
            raise
        raise InputError(f"env.id {id}: it cannot be made with options {options}: {step_faults.line(e)}") from e
    if not isinstance(made, Definition):
        raise InputError(
            f"env.id {id}: the graph backend takes a function that returns a jrl.envs.graph.Definition, and this one "
            f"returns a {type(made).__name__}: use env.backend gymnasium if that is an environment"
        )
    return made if limit is None else made._replace(max_episode_steps=time_limit(limit))


def _graph(id: str, num_envs: int, options: dict[str, Any], horizon: int | None, soft_horizon: bool) -> GraphEnv:
    def made(**limit: int) -> GraphEnv:
        given = {**options, **limit}
        return suites.make(id, num_envs, given) if _is_suites(id) else build(_definition(id, given), num_envs)

    env = made()
    if horizon is None:
        return env
    if soft_horizon:
        return limits.soften(env, horizon)
    own = env.spec.max_episode_steps
    return env if own is not None and own <= horizon else made(max_episode_steps=horizon)


def _check_sizes(id: str, spec: EnvSpec) -> None:
    """Raises InputError: an array of observations or actions has no elements, so that nothing can be read or chosen; or
    observations would fill the memory."""
    errors = []
    for what, space in (("observation", spec.observation), ("action", spec.action)):
        for path, leaf in leaves(space):
            if math.prod(leaf.shape) == 0:
                mend = "leave it out" if path else "give it one, such as a constant 0"
                errors.append(f"env.id {id}: {_named(what, path)} has shape {leaf.shape}, no elements: {mend}")
    if errors:
        raise InputError(*errors)
    arrays = [
        (_named("observation", path), leaf.shape, np.dtype(leaf.dtype).itemsize)
        for path, leaf in leaves(spec.observation)
    ]
    check_observations(id, arrays, spec.num_envs)


def _named(what: str, path: str) -> str:
    return what + "".join(f"[{name!r}]" for name in path.split("/") if name)


def seed_range(seed: int, role: str = "train", index: int = 0) -> int:
    """First seed of a vector; one of up to 65,536 environments shares none with one of another role or index.

    EnvPool's environment i of seed s is environment 0 of seed s + i: with seed + 1, an evaluation would replay the
    training environments. Indices that differ by a multiple of 8,192 share. All seeds fit int32.

    Raises:
      ValueError: unknown role.
    """
    if role not in ROLES:
        raise ValueError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    block = (seed * 2_654_435_761 + index) % _BLOCKS  # an odd factor: seeds that are close do not meet at close indices
    return (ROLES.index(role) * _BLOCKS + block) << 16


def is_atari(id: str) -> bool:
    """Whether the id is an Atari game, of EnvPool (`Pong-v5`) or of ale-py (`ALE/Pong-v5`, `PongNoFrameskip-v4`)."""
    if id.startswith("ALE/") or "NoFrameskip-v" in id:
        return True
    if not id.endswith("-v5") or "/" in id or ":" in id:  # without importing EnvPool
        return False
    from jrl.envs import envpool_env

    return id in envpool_env.ids() and envpool_env.family(id).startswith("envpool.atari")


def make(
    id: str,
    *,
    backend: str = "auto",
    num_envs: int,
    seed: int = 0,
    role: str = "train",
    index: int = 0,
    options: dict[str, Any] | None = None,
    normalize_actions: bool = True,
    clip_actions: bool = True,
    host: bool = False,
    offset: int = 0,
    batch_size: int | None = None,
    remote_worker_envs: bool = False,
    batch_wait_ms: float | None = None,
    restart_failed: bool = False,
    step_timeout_s: float | None = None,
    horizon: int | None = None,
    soft_horizon: bool = False,
    no_done_at_end: bool | None = None,
    action_mask_info: str | None = None,
    frame_stack: int = 1,
    use_prev_action: bool = False,
    use_prev_reward: bool = False,
    worker_index: int = 0,
    num_workers: int = 0,
    check_steps: int = step_faults.FIRST_STEPS,
) -> GraphEnv | Env | AsyncEnv:
    """B environments under one contract (see `jrl.types.StepResult`).

    Args:
      id: `CartPole-v1`, `package.module:Class`, `gymnax:NAME`, `brax:NAME`, or a name that was registered (see
        `jrl.registry`). A function that returns a `jrl.envs.graph.Definition` gives graph environments.
      backend: auto, envpool, gymnasium or graph.
      num_envs: B.
      seed, role (one of ROLES), index: pools that differ in role or index have no environment in common. Graph
        environments take their randomness from the keys they are given instead.
      options: passed to the environment; graph ones take `max_episode_steps`, too.
      normalize_actions, clip_actions: see `wrappers.action_transform`.
      host: an EnvPool environment from Python rather than inside a program.
      offset: environments of the same seed, role and index that other vectors have before this one: split so, they
        stay what they are in one vector.
      batch_size: EnvPool only: fewer than num_envs come at a time, those that are ready first.
      remote_worker_envs: Gymnasium only: each environment in a process of its own.
      batch_wait_ms: of worker processes: those that are ready come so many milliseconds after the first; None: all
        wait for each other.
      restart_failed: Gymnasium only: an environment that fails is made anew (`StepResult.failed`).
      step_timeout_s: of worker processes: a step or reset that takes longer has failed; seconds.
      action_mask_info: EnvPool and Gymnasium: the entry of the infos that says which actions can be taken. It joins the
        observation as `action_mask` bool [K] (see `jrl.spaces`): {"obs": what it was, "action_mask": mask}, or one more
        item of a Dict. None: `action_mask`, where the infos of a first reset have one that fits the action space.
      frame_stack, use_prev_action, use_prev_reward: what observations tell of earlier steps; see `jrl.envs.history`.
      horizon, soft_horizon, no_done_at_end: where episodes end and what that means; see `jrl.envs.limits`.
      worker_index, num_workers: which env runner of how many this is; for `jrl.envs.context.EnvContext`.
      check_steps: Gymnasium only: how many of the first steps of each are looked at: see `jrl.envs.step_faults`.
    Returns:
      An AsyncEnv with `batch_wait_ms`, or a `batch_size` below `num_envs`; else a GraphEnv where the environment can be
      stepped inside a program, and an Env where it cannot. Gymnasium's have two members more, `foreach_env(fn)` and
      `num_restarts`.
    Raises:
      InputError: unknown id, backend or option, no environments, a space that is not supported, or a setting that does
        not go with the backend or another setting.
    """
    if num_envs < 1:
        raise InputError(f"env.num_envs: expected at least 1, got {num_envs}")
    errors = check(
        id,
        backend,
        options,
        num_envs=num_envs,
        batch_size=batch_size,
        remote_worker_envs=remote_worker_envs,
        batch_wait_ms=batch_wait_ms,
        restart_failed=restart_failed,
        step_timeout_s=step_timeout_s,
        horizon=horizon,
        soft_horizon=soft_horizon,
        action_mask_info=action_mask_info,
        frame_stack=frame_stack,
    )
    if errors:
        raise InputError(*errors)
    found, options = resolve(id, backend), dict(options or {})
    first = seed_range(seed, role, index) + offset
    pool: dict[str, Any] = {"num_envs": num_envs, "seed": first, "options": options}
    env: Any
    if found == "graph":
        env = _graph(id, num_envs, options, horizon, soft_horizon)
    elif found == "envpool":
        from jrl.envs import envpool_env

        pool["mask_info"] = action_mask_info
        pool["options"] = envpool_env.limited(id, options, horizon)
        if batch_size is not None and batch_size < num_envs:
            env = envpool_env.AsyncEnvPoolEnv(id, batch_size=batch_size, **pool)
        else:
            from_host = envpool_env.EnvPoolEnv(id, **pool)
            env = from_host if host else from_host.to_graph() or from_host
    else:
        from jrl.envs import gym_env

        pool |= {"restart_failed": restart_failed, "step_timeout_s": step_timeout_s}
        pool |= {"horizon": horizon, "soft_horizon": soft_horizon, "mask_info": action_mask_info}
        pool["check_steps"] = check_steps
        pool["context"] = EnvContext(
            options,
            worker_index=worker_index,
            num_workers=num_workers,
            vector_index=offset,
            num_envs=num_envs,
            remote=remote_worker_envs,
            in_evaluation=role == "eval",
            seed=first,
        )
        if batch_wait_ms is not None:
            env = gym_env.AsyncGymnasiumEnv(id, batch_wait_ms=batch_wait_ms, **pool)
        else:
            env = gym_env.GymnasiumEnv(id, remote=remote_worker_envs, **pool)
    try:
        _check_sizes(id, env.spec)
    except InputError:
        env.close()
        raise
    env = wrap(env, normalize=normalize_actions, clip=clip_actions, no_done_at_end=no_done_at_end)
    try:
        return history.remember(env, frame_stack=frame_stack, prev_action=use_prev_action, prev_reward=use_prev_reward)
    except InputError:
        env.close()
        raise
