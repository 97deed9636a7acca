"""Ids of environments written in JAX: jrl's own, the suites', and the user's."""

import importlib.util
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrl import registry
from jrl.envs import jax_options, limits, multi_agent
from jrl.envs.backends import IN_JAX, SUITES, suite_of
from jrl.envs.context import check_options, parameters_of
from jrl.envs.gym_ids import load_class
from jrl.envs.jax_env import Definition, build, check_time_limit
from jrl.envs.jumanji_env import is_team
from jrl.envs.multi_agent import MultiDefinition
from jrl.envs.pgx_env import num_players
from jrl.errors import InputError, did_you_mean
from jrl.fields.env import EnvConfig
from jrl.gym import exceptions
from jrl.spaces import columns, elements
from jrl.types import Array, JaxEnv


def ids() -> tuple[str, ...]:
    """Returns the ids of jrl's own environments."""
    return tuple(IN_JAX)


def check(cfg: EnvConfig) -> list[str]:
    """Returns faults of the id, without making an environment. Raises InputError as `load_definition`."""
    if (suite := suite_of(cfg.id)) is None:
        load_definition(cfg.id, cfg.options, cfg.ranges)
    elif importlib.util.find_spec("mujoco_playground" if suite == "playground" else suite) is None:
        return [f"env.id {cfg.id}: {suite} is not installed: pip install {suite}"]
    return []


def has_agents(cfg: EnvConfig) -> bool:
    """Returns whether the environments have several agents. Raises InputError as `load_definition`."""
    if (suite := suite_of(cfg.id)) is not None:
        name = cfg.id.partition(":")[2]
        return (
            suite == "jaxmarl" or (suite == "pgx" and num_players(name) > 1) or (suite == "jumanji" and is_team(name))
        )
    return isinstance(load_definition(cfg.id, cfg.options), MultiDefinition)


def load_definition(id: str, options: dict[str, Any], ranges: Mapping[str, Any] = {}) -> Definition | MultiDefinition:
    """Returns the definition of an id that is not of a suite.

    Args:
      id: value of `env.id`.
      options: arguments of the function, and `max_episode_steps`.
      ranges: names of numbers that become a task, a dict. They are arguments of the function, or entries of its task.
    Raises:
      InputError: an unknown option or number, or a user's function that does not return a definition.
    """
    options = dict(options)
    found: Any = registry.registered(id)
    if found is None and id in IN_JAX:
        found = registry.load(IN_JAX[id], "env.id")
    elif found is None:
        found = load_class(id)
    if not isinstance(found, Definition | MultiDefinition) and (
        errors := check_options(id, found, options, ("max_episode_steps",))
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
    if ranges and isinstance(made, Definition):
        made = _add_task(id, made, found, options, ranges)
    return made if limit is None else made._replace(max_episode_steps=check_time_limit(limit))


def _add_task(id: str, made: Definition, found: Any, options: dict[str, Any], ranges: Iterable[str]) -> Definition:
    """Returns a definition whose task is a dict with the numbers `ranges`; `found(**options)` is `made`."""
    if made.task is None:
        arguments = (parameters_of(found) or {}) if callable(found) else {}
        is_float = lambda p: isinstance(p.default, float) or p.annotation in (float, "float")
        known = [name for name, p in arguments.items() if is_float(p)]
    else:
        known = [x for x in made.task if jnp.ndim(made.task[x]) == 0] if isinstance(made.task, dict) else []
    if unknown := [name for name in ranges if name not in known]:
        fix = did_you_mean(unknown[0], known) or (f": it has {', '.join(known)}" if known else ": it has none")
        raise InputError(f"env.randomize.{unknown[0]}: {id} has no such number{fix}")
    if made.task is not None:
        return made
    define = lambda task: found(**options, **task)  # with an array [B] for each number
    return made._replace(
        reset=lambda draws, task: define(task).reset(draws),
        step=lambda state, action, draws, task: define(task).step(state, action, draws),
        observe=lambda state, task: define(task).observe(state),
        task=dict.fromkeys(ranges, 0.0),
    )


def make(cfg: EnvConfig, *, state: bool, **unused: Any) -> JaxEnv:
    """Makes the environments with their time limits; `state` as in `multi_agent.build`. Raises InputError.

    Seed and place are unused: random numbers come from the keys that the environments are stepped with.
    """
    suite = suite_of(cfg.id)

    def build_env(**limit: int) -> JaxEnv:
        options = {**cfg.options, **limit}
        if suite is not None:
            make_suite = registry.load(SUITES[suite], "env.id")
            return make_suite(cfg.id.partition(":")[2], cfg, options, state)
        found = load_definition(cfg.id, options, cfg.ranges)
        if isinstance(found, MultiDefinition):
            return multi_agent.build(found, cfg.num_envs, state=state)
        if not cfg.ranges:
            return build(found, cfg.num_envs)
        from jrl.envs.randomization import draw_uniformly

        return build(found, cfg.num_envs, draw_uniformly(cfg, found.task))

    env = build_env()
    own = env.spec.max_episode_steps
    if suite is None and (cfg.ranges or registry.registered(cfg.id) is not None or cfg.id not in IN_JAX):
        _trace(cfg.id, env)
    if cfg.horizon is not None and cfg.soft_horizon:
        env = limits.soften(env, cfg.horizon)
    elif cfg.horizon is not None and (own is None or own > cfg.horizon):
        env = build_env(max_episode_steps=cfg.horizon)
    if cfg.action_repeat > 1:
        env = jax_options.repeat(env, cfg.action_repeat)
    if cfg.action_chunk > 1:
        env = jax_options.chunk(env, cfg.action_chunk)
    if cfg.on_nonfinite is not None:
        env = jax_options.reset_nonfinite(env)
    return env


def goal_reward(cfg: EnvConfig) -> Callable[[Array, Array], tuple[Array, Array]] | None:
    """Returns `Definition.goal_reward`; None: environments of suites, or a definition without one."""
    found = None if suite_of(cfg.id) is not None else load_definition(cfg.id, cfg.options)
    return found.goal_reward if isinstance(found, Definition) else None


def _trace(id: str, env: JaxEnv) -> None:
    """Traces a reset and a step of the user's functions, without computing anything.

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
