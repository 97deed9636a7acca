"""Ids of environments written in JAX: jrl's own, the suites', and the user's."""

import traceback
from typing import Any

import jax

from jrl import registry
from jrl.envs import context as contexts
from jrl.envs import limits, multi_agent, suites
from jrl.envs.backends import IN_JAX, SUITES
from jrl.envs.jax_env import Definition, build, check_time_limit
from jrl.envs.multi_agent import MultiDefinition
from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.gym import exceptions
from jrl.spaces import columns, elements
from jrl.types import JaxEnv


def check(cfg: EnvConfig) -> list[str]:
    """Return faults of the id, without making an environment. Raises InputError as `load_definition`."""
    if is_suite_id(cfg.id):
        return suites.check(cfg.id)
    load_definition(cfg.id, cfg.options)
    return []


def has_agents(cfg: EnvConfig) -> bool:
    """Return whether the environments have several agents. Raises InputError as `load_definition`."""
    if is_suite_id(cfg.id):
        return cfg.id.startswith("jaxmarl:")
    return isinstance(load_definition(cfg.id, cfg.options), MultiDefinition)


def is_suite_id(id: str) -> bool:
    """Return whether an id is one of gymnax, brax or JaxMARL."""
    return id.startswith(SUITES) and registry.registered(id) is None


def load_definition(id: str, options: dict[str, Any]) -> Definition | MultiDefinition:
    """Return the definition of an id that is not of a suite.

    Raises:
      InputError: an unknown option, or a user's function that does not return a definition.
    """
    options = dict(options)
    found: Any = registry.registered(id)
    if found is None and id in IN_JAX:
        found = registry.load(IN_JAX[id], "env.id")
    elif found is None:
        from jrl.envs import gym_env

        found = gym_env.load_class(id)
    if not isinstance(found, Definition | MultiDefinition) and (
        errors := contexts.check_options(id, found, options, ("max_episode_steps",))
    ):
        raise InputError(*errors)
    limit = options.pop("max_episode_steps", None)
    try:
        made = found if isinstance(found, Definition | MultiDefinition) else found(**options)
    except InputError:
        raise
    except BaseException as e:
        if not exceptions.is_environment_error(e):
            raise
        reason = exceptions.format_line(e)
        raise InputError(f"env.id {id}: the environment cannot be made with options {options}: {reason}") from e
    if not isinstance(made, Definition | MultiDefinition):
        raise InputError(
            f"env.id {id}: expected a function that returns a jrl.envs.jax_env.Definition or a "
            f"jrl.envs.multi_agent.MultiDefinition, got one that returns a {type(made).__name__}: set "
            "env.backend=gymnasium if this is an environment"
        )
    return made if limit is None else made._replace(max_episode_steps=check_time_limit(limit))


def make(cfg: EnvConfig, *, state: bool) -> JaxEnv:
    """Make the environments with their time limits; `state` as in `multi_agent.build`. Raises InputError."""

    def build_env(**limit: int) -> JaxEnv:
        options = {**cfg.options, **limit}
        if is_suite_id(cfg.id):
            return suites.make(cfg.id, cfg.num_envs, options, state=state)
        found = load_definition(cfg.id, options)
        if isinstance(found, MultiDefinition):
            return multi_agent.build(found, cfg.num_envs, state=state)
        return build(found, cfg.num_envs)

    env = build_env()
    if registry.registered(cfg.id) is not None or (cfg.id not in IN_JAX and not is_suite_id(cfg.id)):
        _trace(cfg.id, env)
    if cfg.horizon is None:
        return env
    if cfg.soft_horizon:
        return limits.soften(env, cfg.horizon)
    own = env.spec.max_episode_steps
    return env if own is not None and own <= cfg.horizon else build_env(max_episode_steps=cfg.horizon)


def _trace(id: str, env: JaxEnv) -> None:
    """Trace a reset and a step of the user's functions, without computing anything.

    Raises:
      InputError: the functions raise (the user's line comes first), or return other arrays than declared.
    """
    what = "reset"
    try:
        key = jax.eval_shape(jax.random.key, 0)
        state, _ = jax.eval_shape(env.reset, key)
        what = "step"
        _, result = jax.eval_shape(env.step, state, elements(env.spec.action, columns(env.spec)), key)
    except InputError as e:
        raise InputError(*(f"env.id {id}: {text}" for text in e.errors)) from e
    except BaseException as e:
        if not exceptions.is_environment_error(e):
            raise
        fix = "jax traces it with arrays of all environments: fix that line, and try it with python -m jrl.check_env"
        found = InputError(
            f"{exceptions.format_line(e)}{exceptions.format_stack(e)}\nenv.id {id}: its {what} fails: {fix}"
        )
        found.details = "".join(traceback.format_exception(e))
        raise found from e
    if result.reward.shape != (env.spec.num_envs,):
        raise InputError(
            f"env.id {id}: expected rewards of shape {(env.spec.num_envs,)}, got {result.reward.shape}: return one "
            "number per environment"
        )
