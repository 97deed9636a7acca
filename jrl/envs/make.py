"""Ids, backends and seeds: `make` is how everything else comes by an environment."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.envs import classic, suites, toys
from jrl.envs.graph import Definition, build, time_limit
from jrl.envs.spec import check_action
from jrl.envs.wrappers import action_transform
from jrl.types import Array, Env, EnvSpec, GraphEnv, InputError, Key, PyTree, Space, StepResult

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
    if ":" in id:  # package.module:Class, or a suite's
        return backend == ("graph" if id.startswith(suites.PREFIXES) else "gymnasium")
    return id in ids(backend)


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
    known = [name for b in BACKENDS for name in ids(b)]
    near = [f"{name} ({', '.join(backends_of(name))})" for name in difflib.get_close_matches(id, set(known), 3)]
    mend = f"did you mean {', '.join(near)}?" if near else "name an id of EnvPool or Gymnasium, or package.module:Class"
    raise InputError(f"env.id {id}: no backend has it: {mend}")


def check(id: str, backend: str = "auto", options: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with these, without making an environment; each message names the mend."""
    try:
        found = resolve(id, backend)
        if found == "envpool":
            from jrl.envs import envpool_env

            return envpool_env.check(id, options or {})
        if found == "graph" and id not in GRAPH:
            return suites.check(id)
        if found == "graph":
            _definition(id, options or {})
        if found == "gymnasium":
            from jrl.envs import gym_env

            return gym_env.check(id, options or {})
    except InputError as e:
        return list(e.errors)
    return []


def _definition(id: str, options: dict[str, Any]) -> Definition:
    options = dict(options)
    known = ["max_episode_steps", *inspect.signature(GRAPH[id]).parameters]
    errors = []
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            mend = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            errors.append(f"env.options.{key}: {id} has no such option: {mend}")
    if errors:
        raise InputError(*errors)
    limit = options.pop("max_episode_steps", None)
    task = GRAPH[id](**options)
    return task if limit is None else task._replace(max_episode_steps=time_limit(limit))


def seed_range(seed: int, role: str = "train", index: int = 0) -> int:
    """First seed of a pool; a pool of up to 65,536 environments shares none with one of another role or index.

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
) -> GraphEnv | Env:
    """B environments under one contract (see `jrl.types.StepResult`).

    Args:
      id: `CartPole-v1`, `package.module:Class`, `gymnax:NAME`, `brax:NAME`.
      backend: auto, envpool, gymnasium or graph.
      num_envs: B.
      seed, role (one of ROLES), index: pools that differ in role or index have no environment in common. Graph
        environments take their randomness from the keys they are given instead.
      options: passed to the environment; Gymnasium's also take `vectorization`, graph ones `max_episode_steps`.
      normalize_actions, clip_actions: see `wrappers.action_transform`.
      host: an EnvPool environment from Python rather than inside a program.
    Returns:
      A GraphEnv where the environment can be stepped inside a program, else an Env.
    Raises:
      InputError: unknown id, backend or option, no environments, or a space that is not supported.
    """
    if num_envs < 1:
        raise InputError(f"env.num_envs: expected at least 1, got {num_envs}")
    found, options = resolve(id, backend), dict(options or {})
    env: GraphEnv | Env
    if found == "graph":
        graph = id in GRAPH
        env = build(_definition(id, options), num_envs) if graph else suites.make(id, num_envs, options)
    elif found == "envpool":
        from jrl.envs import envpool_env

        pool = envpool_env.EnvPoolEnv(id, num_envs=num_envs, seed=seed_range(seed, role, index), options=options)
        env = pool if host else pool.to_graph() or pool
    else:
        from jrl.envs import gym_env

        env = gym_env.GymnasiumEnv(id, num_envs=num_envs, seed=seed_range(seed, role, index), options=options)
    space, fn = action_transform(env.spec.action, normalize=normalize_actions, clip=clip_actions)
    if isinstance(env, GraphEnv):
        return _acting_in(env, space, fn) if fn else env
    return _Transformed(env, env.spec._replace(action=space, env_action=env.spec.action), fn) if fn else env


def _acting_in(env: GraphEnv, space: Space, fn: Callable[[Array], Array]) -> GraphEnv:
    """`env` with the policy's action space in front of its own."""

    def step(state: PyTree, action: Array, key: Key) -> tuple[PyTree, StepResult]:
        check_action(space, env.spec.num_envs, action)  # before the transform, which would broadcast it
        return env.step(state, fn(action), key)

    return env._replace(spec=env.spec._replace(action=space, env_action=env.spec.action), step=step)


class _Transformed:
    """A host environment behind an action transform."""

    def __init__(self, env: Env, spec: EnvSpec, fn: Callable[[Array], Array]):
        self._env, self.spec, self._fn = env, spec, fn

    def reset(self) -> PyTree:
        return self._env.reset()

    def step(self, action: Array) -> StepResult:
        action = np.asarray(action)
        check_action(self.spec.action, self.spec.num_envs, action)  # before the transform, which would broadcast it
        return self._env.step(self._fn(action))

    def close(self) -> None:
        self._env.close()
