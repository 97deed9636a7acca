"""Grid worlds of xminigrid and navix (`xminigrid:NAME`, `navix:NAME`), if installed. Steps return a TimeStep.

Observations are integers: which thing is in each cell, its colour and its state. See the encoder `grid`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.envs.jax_env import check_time_limit
from jrl.envs.spec import make_box
from jrl.envs.suites import import_suite, unknown, vectorize
from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.types import Array, Discrete, EnvSpec, JaxEnv, Key, PyTree


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


# observation of navix, without `_first_person` -> its dtype, and the bounds of a cell's channels
_NAVIX_OBSERVATIONS: dict[str, tuple[str, Any, Any]] = {
    "symbolic": ("int32", 0, (10, 5, 3)),  # entity, colour, state; navix 0.7's own bound, 8, is too small
    "categorical": ("int32", -1, 10),  # -1: a wall
    "rgb": ("uint8", 0, 255),
}


def make_navix(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of navix.

    Options: `max_episode_steps`, `observation`, the name of a function of `navix.observations` such as
    `symbolic_first_person`, and arguments of navix's class.
    """
    navix = import_suite("navix")
    if name not in (known := navix.registry()):
        raise unknown(f"env.id navix:{name}: navix has no such environment", name, known)
    if "max_episode_steps" in options:
        options["max_steps"] = check_time_limit(options.pop("max_episode_steps"))
    if "observation" in options:
        chosen = options.pop("observation")
        views = [*_NAVIX_OBSERVATIONS, *(f"{kind}_first_person" for kind in _NAVIX_OBSERVATIONS)]
        if chosen not in views:
            raise unknown(f"env.options.observation: navix has no such observation as {chosen!r}", str(chosen), views)
        options["observation_fn"] = getattr(navix.observations, chosen)
    try:
        env = navix.make(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: navix:{name}: {e}") from e
    dtype, low, high = _NAVIX_OBSERVATIONS[env.observation_fn.__name__.removesuffix("_first_person")]
    observation = make_box(tuple(env.observation_space.shape), low, high, dtype)
    going_on, ended = navix.StepType.TRANSITION, navix.StepType.TERMINATION

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        timestep = env.reset(key)
        return timestep, timestep.observation.astype(dtype)

    def step_one(timestep: Any, action: Array, key: Key) -> tuple[Any, PyTree, Array, Array]:
        # a constant step_type, so that XLA removes the reset by which navix begins again after an end
        timestep = env.step(timestep.replace(step_type=going_on), action)
        return timestep, timestep.observation.astype(dtype), timestep.reward, timestep.step_type == ended

    action = Discrete(int(env.action_space.maximum) + 1)
    return vectorize(EnvSpec(observation, action, cfg.num_envs, env.max_steps), reset_one, step_one, cfg.reset)
