"""Environments of gymnax (`gymnax:NAME`) and brax (`brax:NAME`), when those packages are installed."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jrl.envs import spec as spaces
from jrl.envs.graph import GraphState, select
from jrl.types import Array, Box, EnvSpec, GraphEnv, InputError, Key, StepResult

PREFIXES = ("gymnax:", "brax:")


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as e:
        raise InputError(f"env.id {package}:...: {package} cannot be imported ({e}): pip install {package}") from e


def check(id: str) -> None:
    """Raises InputError when the package is not installed."""
    _import(id.split(":", 1)[0])


def make(id: str, num_envs: int, options: dict[str, Any]) -> GraphEnv:
    """B environments `gymnax:NAME` or `brax:NAME`; options go to that package's own `make`.

    Raises:
      InputError: the package is not installed or has no such environment.
    """
    package, name = id.split(":", 1)
    return (_gymnax if package == "gymnax" else _brax)(name, num_envs, dict(options))


def _graph(spec: EnvSpec, reset_one: Any, step_one: Any) -> GraphEnv:
    """The reset contract around single-environment functions.

    `reset_one(key) -> (state, obs)`, `step_one(state, action, key) -> (state, obs, reward, end)`.
    """

    def reset(key: Key) -> tuple[GraphState, Array]:
        state, obs = jax.vmap(reset_one)(jax.random.split(key, spec.num_envs))
        zeros = jnp.zeros((spec.num_envs,), jnp.int32)
        return GraphState(state, zeros, jnp.zeros((spec.num_envs,), bool)), jax.tree.map(jnp.copy, obs)

    def step(state: GraphState, action: Array, key: Key) -> tuple[GraphState, StepResult]:
        spaces.check_action(spec, action)
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, spec.num_envs)
        inner, obs, reward, terminated = jax.vmap(step_one)(state.inner, action, keys)
        fresh, first_obs = jax.vmap(reset_one)(jax.random.split(reset_key, spec.num_envs))
        inner, obs = select(state.done, fresh, inner), select(state.done, first_obs, obs)
        elapsed = jnp.where(state.done, 0, state.elapsed + 1)
        terminated = terminated & ~state.done
        truncated = jnp.zeros_like(terminated)
        if spec.max_episode_steps is not None:
            truncated = (elapsed >= spec.max_episode_steps) & ~terminated & ~state.done
        reward = jnp.where(state.done, 0.0, reward.astype(jnp.float32))
        return GraphState(inner, elapsed, terminated | truncated), StepResult(obs, reward, terminated, truncated)

    return GraphEnv(spec, reset, step)


def _gymnax(name: str, num_envs: int, options: dict[str, Any]) -> GraphEnv:
    gymnax = _import("gymnax")
    try:
        env, params = gymnax.make(name)
    except (ValueError, KeyError) as e:
        known = ", ".join(getattr(gymnax, "registered_envs", ()))
        raise InputError(f"env.id gymnax:{name}: unknown environment: gymnax has {known}") from e
    if not hasattr(env, "is_truncated"):
        raise InputError(
            f"env.id gymnax:{name}: an older gymnax ends episodes at the time limit: pip install -U gymnax"
        )
    limit = options.pop("max_episode_steps", None)
    try:
        params = params.replace(**options)
    except TypeError as e:
        raise InputError(f"env.options: gymnax:{name}: {e}") from e
    # `step_env` leaves the time limit to its caller, but some observations show the part of it that is over
    own = getattr(params, "max_steps_in_episode", None)
    limit = int(limit or own or 0) or None
    if own is not None:
        params = params.replace(max_steps_in_episode=type(own)(limit))
    observed = spaces.observations(_with_dtype(env.observation_space(params)))
    action = spaces.action_space(_with_dtype(env.action_space(params)))

    def reset_one(key: Key) -> tuple[Any, Array]:
        obs, state = env.reset_env(key, params)
        return state, obs.astype(observed.space.dtype)

    def step_one(state: Any, action: Array, key: Key) -> tuple[Any, Array, Array, Array]:
        obs, state, reward, end = env.step_env(key, state, action, params)[:4]
        return state, obs.astype(observed.space.dtype), reward, end

    return _graph(EnvSpec(observed.space, action, num_envs, limit), reset_one, step_one)


def _with_dtype(space: Any) -> Any:
    """gymnax's spaces look like Gymnasium's but for the bounds of a Box (numbers) and a Discrete's start."""
    import gymnasium
    import numpy as np

    if hasattr(space, "n"):
        return gymnasium.spaces.Discrete(int(space.n))
    low, high = (np.broadcast_to(np.asarray(b, np.float32), space.shape) for b in (space.low, space.high))
    return gymnasium.spaces.Box(low, high, dtype=np.float32)


def _brax(name: str, num_envs: int, options: dict[str, Any]) -> GraphEnv:
    _import("brax")
    envs = _import("brax.envs")
    limit = int(options.pop("max_episode_steps", 1000))
    try:
        env = envs.get_environment(name, **options)
    except KeyError as e:
        raise InputError(f"env.id brax:{name}: unknown environment: brax has {', '.join(envs._envs)}") from e
    spec = EnvSpec(Box((env.observation_size,)), Box((env.action_size,), "float32", -1.0, 1.0), num_envs, limit)

    def reset_one(key: Key) -> tuple[Any, Array]:
        state = env.reset(key)
        return state, state.obs

    def step_one(state: Any, action: Array, key: Key) -> tuple[Any, Array, Array, Array]:
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done > 0

    return _graph(spec, reset_one, step_one)
