"""Environments of jumanji and xminigrid (`jumanji:NAME`, `xminigrid:NAME`), if installed. Steps return a TimeStep.

A TimeStep's discount is 0 after a true end. xminigrid keeps the discount at 1 at its time limit. Most environments of
jumanji do not, so their limit is removed and applied outside.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.envs.jax_env import check_time_limit
from jrl.envs.spec import make_box
from jrl.envs.suites import NEVER, import_suite, unknown, vectorize
from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK, num_choices
from jrl.types import Array, Dict, Discrete, EnvSpec, JaxEnv, Key, MultiBinary, MultiDiscrete, PyTree, Space

_MOST_CHOICES = 64  # more values of an observed integer are a number, not a choice


def make_jumanji(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of jumanji; options: `max_episode_steps`, and arguments of jumanji's class.

    Observations are dicts of the fields of jumanji's observations, `action_mask` included. One policy chooses the
    actions of all agents, and receives their mean reward.
    """
    jumanji = import_suite("jumanji")
    if name not in (known := jumanji.registered_environments()):
        raise unknown(f"env.id jumanji:{name}: jumanji has no such environment", name, known)
    limit = options.pop("max_episode_steps", None)
    try:
        env = jumanji.make(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: jumanji:{name}: {e}") from e
    limit = getattr(env, "time_limit", None) if limit is None else check_time_limit(limit)
    action, to_env = _convert_action(env.action_spec, env.observation_spec)
    observation = _convert_observation(env.observation_spec, action)
    if hasattr(env, "time_limit"):
        env.time_limit = NEVER  # after the spaces, some of which contain the limit

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        inner, timestep = env.reset(key)
        return inner, _read(observation, timestep.observation)

    def step_one(inner: Any, action: Array, key: Key) -> tuple[Any, PyTree, Array, Array]:
        inner, timestep = env.step(inner, to_env(action))
        obs = _read(observation, timestep.observation)
        return inner, obs, jnp.mean(timestep.reward), timestep.last() & (jnp.max(timestep.discount) == 0)

    return vectorize(EnvSpec(observation, action, cfg.num_envs, limit), reset_one, step_one, cfg.reset)


def make_xminigrid(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of xminigrid; options: `max_episode_steps`, and parameters such as `view_size`."""
    xminigrid = import_suite("xminigrid")
    if name not in (known := xminigrid.registered_environments()):
        raise unknown(f"env.id xminigrid:{name}: xminigrid has no such environment", name, known)
    if "max_episode_steps" in options:
        options["max_steps"] = check_time_limit(options.pop("max_episode_steps"))
    try:
        env, params = xminigrid.make(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: xminigrid:{name}: {e}") from e
    constants = import_suite("xminigrid.core.constants")
    shape = env.observation_shape(params)
    sizes = np.broadcast_to([constants.NUM_TILES - 1, constants.NUM_COLORS - 1], shape)
    observation = make_box(shape, np.zeros(shape), sizes, "int32")

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        timestep = env.reset(params, key)
        return timestep, timestep.observation.astype(jnp.int32)

    def step_one(timestep: Any, action: Array, key: Key) -> tuple[Any, PyTree, Array, Array]:
        timestep = env.step(params, timestep, action)
        return timestep, timestep.observation.astype(jnp.int32), timestep.reward, timestep.discount == 0

    action = Discrete(env.num_actions(params))
    return vectorize(EnvSpec(observation, action, cfg.num_envs, params.max_steps), reset_one, step_one, cfg.reset)


# ---------------------------------------------------------------- spaces of jumanji


def _parts(spec: Any) -> dict[str, Any]:
    """Returns the named specs of a nested spec; {}: a spec of one array."""
    return dict(spec._specs) if type(spec).__name__ == "Spec" else {}


def _convert_action(spec: Any, observed: Any) -> tuple[Space, Any]:
    """Returns the space of actions, and the function from its elements to jumanji's actions.

    A mask over all combinations of a MultiDiscrete action makes it Discrete.
    """
    unchanged = lambda action: action
    if hasattr(spec, "num_values"):
        sizes = tuple(int(n) for n in np.asarray(spec.num_values).reshape(-1))
        if np.ndim(spec.num_values) == 0:
            return Discrete(sizes[0]), unchanged
        mask = _parts(observed).get(ACTION_MASK)
        if mask is not None and tuple(mask.shape) == sizes:
            return Discrete(math.prod(sizes)), lambda action: jnp.stack(jnp.unravel_index(action, sizes), -1)
        return MultiDiscrete(sizes), lambda action: action.reshape(np.shape(spec.num_values))
    return make_box(tuple(spec.shape), spec.minimum, spec.maximum), unchanged


def _convert_observation(spec: Any, action: Space) -> Space:
    if parts := _parts(spec):
        found = {name: _convert_observation(part, action) for name, part in parts.items()}
        if ACTION_MASK in found and (choices := num_choices(action)) == math.prod(parts[ACTION_MASK].shape):
            found[ACTION_MASK] = MultiBinary((choices,))
        return Dict(tuple(found.items()))
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b":
        return MultiBinary(tuple(spec.shape))
    if type(spec).__name__ == "DiscreteArray" and int(spec.num_values) <= _MOST_CHOICES:
        return Discrete(int(spec.num_values))
    low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
    return make_box(tuple(spec.shape), low, high)


def _read(space: Any, obs: Any) -> PyTree:
    """Returns an observation of jumanji, nested named tuples, as an element of the space.

    A mask without allowed actions, as after an end, allows all.
    """
    if not isinstance(space, Dict):
        return obs.reshape(space.shape).astype(space.dtype)
    found = {name: _read(part, getattr(obs, name)) for name, part in space.items}
    if (mask := found.get(ACTION_MASK)) is not None and isinstance(space[ACTION_MASK], MultiBinary):
        found[ACTION_MASK] = jnp.where(mask.any(), mask, 1).astype(mask.dtype)
    return found
