"""Environments of gymnax, brax and JaxMARL (`gymnax:NAME`, `brax:NAME`, `jaxmarl:NAME`), if installed."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs import jaxmarl_env
from jrl.envs import spec as spaces
from jrl.envs.jax_env import check_time_limit, select, under_contract
from jrl.errors import cannot_import
from jrl.spaces import map_leaves
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, InputError, JaxEnv, Key, MultiDiscrete, PyTree, Space, Tuple

_NEVER = 2**30


def check(id: str) -> list[str]:
    """Return faults in the id that can be found without importing its package."""
    package = id.partition(":")[0]
    if importlib.util.find_spec(package) is None:
        return [f"env.id {id}: {package} is not installed: pip install {package}"]
    return []


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise InputError(f"env.id {package}:...: {cannot_import(package, e)}") from e


def make(id: str, num_envs: int, options: dict[str, Any], *, state: bool = False) -> JaxEnv:
    """Make B environments `gymnax:NAME` or `brax:NAME`, or B games `jaxmarl:NAME`.

    Args:
      id: id with its prefix.
      num_envs: B.
      options: `max_episode_steps`, and the package's own: gymnax's parameters, arguments of brax's and JaxMARL's class.
      state: whether JaxMARL's observations get the global state; see `jaxmarl_env.make`.
    Raises:
      InputError: the package is not installed, or has no such environment or option, or a space is unsupported.
    """
    errors = check(id)
    if errors:
        raise InputError(*errors)
    package, name = id.split(":", 1)
    if package == "jaxmarl":
        return _jaxmarl(name, num_envs, dict(options), state)
    makers = {"gymnax": _gymnax, "brax": _brax}
    return makers[package](name, num_envs, dict(options))


def _vectorize(
    spec: EnvSpec,
    reset_one: Callable[[Key], tuple[PyTree, PyTree]],
    step_one: Callable[[PyTree, PyTree, Key], tuple[PyTree, PyTree, Array, Array]],
) -> JaxEnv:
    """Return B environments of the two functions of one environment; `step_one` returns (state, obs, reward, end)."""

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


def _unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    known = list(known)
    near = difflib.get_close_matches(name, known, 3)
    return InputError(f"{what}: " + (f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known)}"))


def _gymnax(name: str, num_envs: int, options: dict[str, Any]) -> JaxEnv:
    gymnax = _import("gymnax")
    known = list(gymnax.registered_envs)
    if name not in known:
        raise _unknown(f"env.id gymnax:{name}: gymnax has no such environment", name, known)
    env, params = gymnax.make(name)
    own = getattr(params, "max_steps_in_episode", None)
    limit = options.pop("max_episode_steps", options.get("max_steps_in_episode", own))
    limit = None if limit is None else check_time_limit(limit)
    fields = list(params.__dataclass_fields__)
    for key in options:
        if key not in fields:
            raise _unknown(f"env.options.{key}: gymnax:{name} has no such parameter", key, fields)
    params = params.replace(**options)
    endless = params
    if own is not None:
        # keep the type: BernoulliBandit's is a float
        params, endless = (params.replace(max_steps_in_episode=type(own)(x)) for x in (limit, _NEVER))
    observation = _gymnax_space(env.observation_space(params))
    action = _gymnax_space(env.action_space(params))
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
    return _vectorize(spec, reset_one, step_one)


def _gymnax_space(space: Any) -> Space:
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "Box":
        dtype = np.dtype(space.dtype).name
        return spaces.make_box(tuple(space.shape), space.low, space.high, spaces.NARROW.get(dtype, dtype))
    if kind == "MultiDiscrete":  # JaxMARL only
        return MultiDiscrete(tuple(int(n) for n in space.num_categories))
    if kind == "Dict":
        return Dict(tuple((name, _gymnax_space(part)) for name, part in space.spaces.items()))
    if kind == "Tuple":
        return Tuple(tuple(_gymnax_space(part) for part in space.spaces))
    raise InputError(f"space {kind} is not supported: use an environment with Box, Discrete, Dict or Tuple spaces")


def _brax_space(size: Any) -> Space:
    """Return the space of a size, a shape, or a dict of these."""
    if isinstance(size, Mapping):
        return Dict(tuple((name, _brax_space(part)) for name, part in size.items()))
    return Box(tuple(size) if isinstance(size, tuple | list) else (int(size),))


def _brax(name: str, num_envs: int, options: dict[str, Any]) -> JaxEnv:
    envs = _import("brax.envs")
    if name not in envs._envs:
        raise _unknown(f"env.id brax:{name}: brax has no such environment", name, envs._envs)
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

    return _vectorize(spec, reset_one, step_one)


def _jaxmarl(name: str, num_envs: int, options: dict[str, Any], state: bool) -> JaxEnv:
    try:
        jaxmarl = jaxmarl_env.quiet_import()
    except ImportError as e:
        raise InputError(f"env.id jaxmarl:{name}: {cannot_import('jaxmarl', e)}") from e
    if name not in jaxmarl.registered_envs:
        raise _unknown(f"env.id jaxmarl:{name}: JaxMARL has no such environment", name, jaxmarl.registered_envs)
    limit = options.pop("max_episode_steps", None)
    try:
        env = jaxmarl.make(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: jaxmarl:{name}: {e}") from e
    return jaxmarl_env.make(env, name, num_envs, limit, _gymnax_space, state=state)
