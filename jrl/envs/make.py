"""Ids, backends and seeds: `make` is how everything else comes by an environment."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.envs import classic, suites, toys
from jrl.envs.graph import Definition, build
from jrl.envs.spec import check_action
from jrl.envs.wrappers import action_transform
from jrl.types import Array, Env, EnvSpec, GraphEnv, InputError, Key, PyTree, StepResult

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
_ROLES = {"train": 0, "eval": 1}


def _has(id: str, backend: str) -> bool:
    if backend == "graph":
        return id in GRAPH or id.startswith(suites.PREFIXES)
    if id.startswith(suites.PREFIXES):
        return False
    if backend == "envpool":
        from jrl.envs import envpool_env

        return ":" not in id and id in envpool_env.ids()
    from jrl.envs import gym_env

    return ":" in id or id in gym_env.ids()


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
    others = [b for b in BACKENDS if _has(id, b)]
    if others:
        raise InputError(f"env.id {id}: the {backend} backend does not have it: use env.backend {' or '.join(others)}")
    from jrl.envs import envpool_env, gym_env

    known = list(dict.fromkeys([*GRAPH, *gym_env.ids(), *envpool_env.ids()]))
    near = difflib.get_close_matches(id, known, 3)
    mend = f"did you mean {', '.join(near)}?" if near else "name an id of EnvPool or Gymnasium, or package.module:Class"
    raise InputError(f"env.id {id}: no backend has it: {mend}")


def check(id: str, backend: str = "auto", options: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with these, without making an environment; each message names the mend."""
    try:
        found = resolve(id, backend)
        if found == "envpool":
            from jrl.envs import envpool_env

            return envpool_env.check(id, options or {})
        if found == "graph":
            _definition(id, options or {}) if id in GRAPH else suites.check(id)
        if found == "gymnasium":
            from jrl.envs import gym_env

            gym_env.check(id, options or {})
    except InputError as e:
        return list(e.errors)
    return []


def _definition(id: str, options: dict[str, Any]) -> Definition:
    options = dict(options)
    limit = options.pop("max_episode_steps", None)
    known = list(inspect.signature(GRAPH[id]).parameters)
    unknown = [k for k in options if k not in known]
    if unknown:
        takes = ", ".join(["max_episode_steps", *known])
        raise InputError(*(f"env.options.{k}: {id} has no such option: it takes {takes}" for k in unknown))
    task = GRAPH[id](**options)
    return task if limit is None else task._replace(max_episode_steps=int(limit))


def seed_range(seed: int, role: str = "train", index: int = 0) -> int:
    """First seed of a pool; a pool of up to 65,536 environments shares none with one of another role or index.

    EnvPool's environment i of seed s is environment 0 of seed s + i: with seed + 1, an evaluation would replay the
    training environments. Indices that differ by a multiple of 8,192 share.
    """
    block = (seed * 2_654_435_761 + index) % 8_192
    return (_ROLES[role] * 8_192 + block) << 16


def is_atari(id: str) -> bool:
    """Whether the id is one of EnvPool's Atari games."""
    if not id.endswith("-v5") or ":" in id:
        return False
    from jrl.envs import envpool_env

    return id in envpool_env.ids() and envpool_env.is_of(id, "envpool.atari")


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
      seed, role ("train" or "eval"), index: pools that differ in any have no environment in common. Graph environments
        take their randomness from the keys they are given instead.
      options: passed to the environment.
      normalize_actions, clip_actions: see `wrappers.action_transform`.
      host: an EnvPool environment from Python rather than inside a program.
    Returns:
      A GraphEnv where the environment can be stepped inside a program, else an Env.
    Raises:
      InputError: unknown id, backend or option; a space that is not supported.
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
    if fn is None:
        return env
    spec = env.spec._replace(action=space)
    if isinstance(env, GraphEnv):
        inner = env.step

        def step(state: PyTree, action: Array, key: Key) -> tuple[PyTree, StepResult]:
            check_action(spec, action)  # before the transform, which would broadcast it
            return inner(state, fn(action), key)

        return env._replace(spec=spec, step=step)
    return _Transformed(env, spec, fn)


class _Transformed:
    """A host environment behind an action transform."""

    def __init__(self, env: Env, spec: EnvSpec, fn: Callable[[Array], Array]):
        self._env, self.spec, self._fn = env, spec, fn

    def reset(self) -> PyTree:
        return self._env.reset()

    def step(self, action: Array) -> StepResult:
        action = np.asarray(action)
        check_action(self.spec, action)  # before the transform, which would broadcast it
        return self._env.step(self._fn(action))

    def close(self) -> None:
        self._env.close()
