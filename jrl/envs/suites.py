"""Environments of gymnax and brax (`gymnax:NAME`, `brax:NAME`), if installed.

A suite is a function that returns `vectorize(spec, reset_one, step_one)`, and its line in `backends.SUITES`.
"""

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs import spec as spaces
from jrl.envs.jax_env import check_time_limit, select, under_contract
from jrl.errors import cannot_import
from jrl.spaces import map_leaves
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, InputError, JaxEnv, Key, MultiDiscrete, PyTree, Space, Tuple

_NEVER = 2**30


def import_suite(module: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Returns a module of a suite. Raises InputError: it, or a package that it needs, is not installed."""
    package = module.partition(".")[0]
    try:
        return load(module)
    except ImportError as e:
        raise InputError(f"env.id {package}:...: {cannot_import(package, e)}") from e


def vectorize(
    spec: EnvSpec,
    reset_one: Callable[[Key], tuple[PyTree, PyTree]],
    step_one: Callable[[PyTree, PyTree, Key], tuple[PyTree, PyTree, Array, Array]],
) -> JaxEnv:
    """Returns B environments under the contract from the functions of one environment.

    Args:
      spec: spec of the B environments, with the time limit to apply.
      reset_one: key -> (state, obs).
      step_one: (state, action, key) -> (state, obs, reward, true end), without a reset and without a time limit.
    """

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        return jax.vmap(reset_one)(jax.random.split(key, spec.num_envs))

    def advance(inner: PyTree, action: PyTree, key: Key, fresh: Array) -> tuple[PyTree, PyTree, Array, Array]:
        step_key, reset_key = jax.random.split(key)
        inner, obs, reward, end = jax.vmap(step_one)(inner, action, jax.random.split(step_key, spec.num_envs))
        # cond: a reset may cost more than a step (brax), and most steps reset nothing
        stepped = (inner, obs)
        inner, obs = jax.lax.cond(fresh.any(), lambda: select(fresh, reset(reset_key), stepped), lambda: stepped)
        return inner, obs, reward, end

    return under_contract(spec, reset, advance)


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """Returns the error of a name that is not among the known."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 3)
    return InputError(f"{what}: " + (f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known)}"))


def make_gymnax(name: str, num_envs: int, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of gymnax; options: `max_episode_steps`, and gymnax's parameters."""
    gymnax = import_suite("gymnax")
    known = list(gymnax.registered_envs)
    if name not in known:
        raise unknown(f"env.id gymnax:{name}: gymnax has no such environment", name, known)
    env, params = gymnax.make(name)
    own = getattr(params, "max_steps_in_episode", None)
    limit = options.pop("max_episode_steps", options.get("max_steps_in_episode", own))
    limit = None if limit is None else check_time_limit(limit)
    fields = list(params.__dataclass_fields__)
    for key in options:
        if key not in fields:
            raise unknown(f"env.options.{key}: gymnax:{name} has no such parameter", key, fields)
    params = params.replace(**options)
    endless = params
    if own is not None:
        # keep the type: BernoulliBandit's is a float
        params, endless = (params.replace(max_steps_in_episode=type(own)(x)) for x in (limit, _NEVER))
    observation = convert_space(env.observation_space(params))
    action = convert_space(env.action_space(params))
    typed = lambda obs: map_leaves(lambda leaf, x: x.astype(leaf.dtype), observation, obs)

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        obs, state = env.reset_env(key, params)
        return state, typed(obs)

    def step_one(state: Any, action: PyTree, key: Key) -> tuple[Any, PyTree, Array, Array]:
        # gymnax 0.0.9: obs, state, reward, done, info; 1.0: obs, state, reward, terminated, truncated, info
        obs, state, reward, end = env.step_env(key, state, action, params)[:4]
        if not hasattr(env, "is_truncated"):  # gymnax 0.0.9 reports its limit as an end
            end = env.is_terminal(state, endless)
        return state, typed(obs), reward, end

    spec = EnvSpec(observation, action, num_envs, limit)
    return vectorize(spec, reset_one, step_one)


def convert_space(space: Any) -> Space:
    """Returns jrl's space for gymnax's or JaxMARL's."""
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "Box":
        dtype = np.dtype(space.dtype).name
        return spaces.make_box(tuple(space.shape), space.low, space.high, spaces.NARROW.get(dtype, dtype))
    if kind == "MultiDiscrete":  # JaxMARL only
        return MultiDiscrete(tuple(int(n) for n in space.num_categories))
    if kind == "Dict":
        return Dict(tuple((name, convert_space(part)) for name, part in space.spaces.items()))
    if kind == "Tuple":
        return Tuple(tuple(convert_space(part) for part in space.spaces))
    raise InputError(f"space {kind} is not supported: use an environment with Box, Discrete, Dict or Tuple spaces")


def _brax_space(size: Any) -> Space:
    """Returns the space of a size, a shape, or a dict of these."""
    if isinstance(size, Mapping):
        return Dict(tuple((name, _brax_space(part)) for name, part in size.items()))
    return Box(tuple(size) if isinstance(size, tuple | list) else (int(size),))


def make_brax(name: str, num_envs: int, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of brax; options: `max_episode_steps`, and arguments of brax's class."""
    envs = import_suite("brax.envs")
    if name not in envs._envs:
        raise unknown(f"env.id brax:{name}: brax has no such environment", name, envs._envs)
    limit = check_time_limit(options.pop("max_episode_steps", 1000))
    try:
        env = envs.get_environment(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: brax:{name}: {e}") from e
    action = Box((env.action_size,), "float32", -1.0, 1.0)
    spec = EnvSpec(_brax_space(env.observation_size), action, num_envs, limit)

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        state = env.reset(key)
        return state, state.obs

    def step_one(state: Any, action: Array, key: Key) -> tuple[Any, PyTree, Array, Array]:
        state = env.step(state, action)
        return state, state.obs, state.reward, jnp.asarray(state.done, bool)

    return vectorize(spec, reset_one, step_one)
