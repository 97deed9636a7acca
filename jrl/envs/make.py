"""Makes environments: `make` applies the options of a config to the environments of a backend."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jrl.envs import context as contexts
from jrl.envs import history, jax_ids, limits, scaling, several, team, views
from jrl.envs.backends import has, resolve
from jrl.envs.context import ENDS_RUN, TRAINING, EnvContext, OnFailure, Place, seed_range
from jrl.envs.transform import Option, transformed
from jrl.fields import schema
from jrl.fields.env import REFUSED, EnvConfig
from jrl.fields.refusals import refused
from jrl.host.room import check_observations
from jrl.spaces import by_kind, leaves
from jrl.types import AsyncEnv, Env, EnvSpec, InputError, JaxEnv

_KEYS = tuple(f.name for f in dataclasses.fields(EnvConfig))


def check(env: EnvConfig | str, *, on_failure: OnFailure = ENDS_RUN, **settings: Any) -> list[str]:
    """Says what is wrong with these, without making an environment, each with its mend. Arguments as `make`."""
    try:
        cfg = section(env, **settings)
        found = resolve(cfg.id, cfg.backend)
    except InputError as e:
        return list(e.errors)
    errors = [message for _, message in refused(REFUSED, SimpleNamespace(env=cfg))]
    errors += _refused(cfg, found, on_failure)
    try:
        if found == "envpool":
            from jrl.envs import envpool_env

            errors += envpool_env.check(cfg.id, cfg.options)
        elif found == "gymnasium":
            from jrl.envs import gym_env

            errors += (several if several.declared(cfg.id, cfg.options) else gym_env).check(cfg.id, cfg.options)
        else:
            errors += jax_ids.check(cfg)
    except InputError as e:
        errors += e.errors
    return errors


def section(env: EnvConfig | str, **settings: Any) -> EnvConfig:
    """Returns the `env` section of a config, from an id and its other keys; None of them is its default.

    Raises:
      InputError: an unknown key, a value of another type or out of range: as for a config file.
    """
    if isinstance(env, EnvConfig) and not settings:
        return env
    data = {key: getattr(env, key) for key in _KEYS} if isinstance(env, EnvConfig) else {"id": env}
    data |= {key: value for key, value in settings.items() if value is not None}
    problems: list[schema.Problem] = []
    cfg = schema.build(EnvConfig, data, problems, prefix="env.", known=[f"env.{key}" for key in _KEYS])
    if problems:
        raise InputError(*(p.message for p in problems))
    return cfg


_RESTARTS = "env_runners.restart_failed_sub_environments"
_MASKS = "environments in JAX have no infos (their observation may be a Dict with an action_mask)"
# options that not all backends have: key, backends that have it, why others lack it
LIMITED = (
    ("env.batch_size", ("envpool",), "only EnvPool takes it"),
    ("env.remote_worker_envs", ("gymnasium",), "only Gymnasium's environments run in processes"),
    (_RESTARTS, ("gymnasium",), "only Gymnasium's environments are made anew"),
    ("env.soft_horizon", ("gymnasium", "jax"), "EnvPool steps and resets all environments of a pool together"),
    ("env.action_mask_info", ("envpool", "gymnasium"), _MASKS),
)


def _refused(cfg: EnvConfig, backend: str, on_failure: OnFailure) -> Iterator[str]:
    """Yields the options that do not go with the backend or with each other, each with its mend."""
    given = {**{f"env.{key}": getattr(cfg, key) for key in _KEYS}, _RESTARTS: on_failure.restart}
    has_several = is_multi_agent(cfg)
    if backend == "envpool" and cfg.batch_size is not None and cfg.batch_size > cfg.num_envs:
        yield f"env.batch_size {cfg.batch_size}: a vector has {cfg.num_envs} environments only: use at most so many"
    elif backend == "envpool" and cfg.batch_size is not None and has_several:
        yield f"env.batch_size: {cfg.id} has several agents, and their games wait for each other: leave it out"
    for key, backends, why in LIMITED:
        if not given[key] or backend in backends:
            continue
        able = [name for name in backends if has(cfg.id, name)]
        mend = f"use env.backend {' or '.join(able)}, or leave it out" if able else "leave it out"
        yield f"{key}: {why}, and {cfg.id} is stepped by the {backend} backend: {mend}"
    if has_several:
        yield from _refused_with_agents(cfg)
    if cfg.remote_worker_envs and not hasattr(os, "fork"):
        yield "env.remote_worker_envs: worker processes need an operating system that can fork: leave it out"
    if on_failure.step_timeout_s is not None and not cfg.remote_worker_envs and not has_several:
        name = "env_runners.env_step_timeout_s"
        yield f"{name}: only a worker process can be ended: set env.remote_worker_envs, or leave it out"


def _refused_with_agents(cfg: EnvConfig) -> Iterator[str]:
    if cfg.soft_horizon:
        yield (
            f"env.soft_horizon: {cfg.id} has several agents, and a game ends for all of them: leave it out; "
            "env.horizon alone ends the game for all who are there"
        )


def is_multi_agent(env: EnvConfig | str, **settings: Any) -> bool:
    """Returns whether environments of an id have several agents, without making one. Arguments as `make`.

    A definition written in JAX is made for it. False for whatever cannot be made, which `check` tells the reason of,
    and for a function that does not say what it returns.
    """
    try:
        cfg = section(env, **settings)
        found = resolve(cfg.id, cfg.backend)
        if found == "jax":
            return jax_ids.has_several(cfg)
        if found == "envpool":
            from jrl.envs import envpool_env

            return envpool_env.num_players(cfg.id) > 1
        return several.declared(cfg.id, cfg.options) is True
    except InputError:
        return False


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


class AgentOptions(NamedTuple):
    """Options of environments with several agents, which become the Transforms of `options`."""

    observation_fn: str | None = None  # see `views.observation_fn`
    agent_id: bool = False  # see `views.agent_ids`
    group: Mapping[str, Sequence[str]] | None = None  # see `team.teams`
    game_numbers: bool = False  # see `views.game_numbers`
    # (number of agents) -> (columns that keep their rewards, columns of a block), see `views.rewards_of`
    rewards_of: Callable[[int], tuple[np.ndarray, int]] | None = None


NO_OPTIONS = AgentOptions()


def options(
    cfg: EnvConfig,
    *,
    use_prev_action: bool = False,
    use_prev_reward: bool = False,
    agents: AgentOptions = NO_OPTIONS,
) -> list[Option]:
    """Returns the options of environments in the order in which they are applied, from the environments to the policy.

    1. actions are scaled and clipped, which history must not see: a previous action is the policy's
    2. the meaning of ends
    3. history, of each agent's own observations
    4. `observation_fn`, which may remove any leaf, history among them
    5. `agent_id`, which a user's function does not see
    6. teams, of all that their members observe
    7. numbers of games, which only the policy mapping reads
    8. rewards that do not count
    """
    found: list[Option] = [
        partial(scaling.actions, env=cfg),
        partial(limits.ends, no_done_at_end=cfg.no_done_at_end),
        partial(
            history.remember,
            frame_stack=cfg.frame_stack,
            prev_action=use_prev_action,
            prev_reward=use_prev_reward,
        ),
    ]
    if agents.observation_fn is not None:
        found.append(partial(views.observation_fn, path=agents.observation_fn))
    if agents.agent_id:
        found.append(views.agent_ids)
    if agents.group is not None:
        found.append(partial(team.teams, groups=agents.group))
    if agents.game_numbers:
        found.append(views.game_numbers)
    if (rewards_of := agents.rewards_of) is not None:
        found.append(lambda spec: views.rewards_of(spec, *rewards_of(len(spec.agents))))
    return found


def make(
    env: EnvConfig | str,
    *,
    seed: int = 0,
    place: Place = TRAINING,
    host: bool = False,
    on_failure: OnFailure = ENDS_RUN,
    use_prev_action: bool = False,
    use_prev_reward: bool = False,
    state: bool = False,
    agents: AgentOptions = NO_OPTIONS,
    **settings: Any,
) -> JaxEnv | Env | AsyncEnv:
    """Makes B environments under one contract (see `jrl.types.StepResult`).

    >>> env = make("CartPole-v1", backend="jax", num_envs=4)
    >>> env.spec.action
    Discrete(n=2, dtype='int32')

    Args:
      env: the `env` section of a config, or its `id`: `CartPole-v1`, `package.module:Class`, `gymnax:NAME`,
        `brax:NAME`, `jaxmarl:NAME`, `pettingzoo:MODULE`, or a name that was registered (see `jrl.registry`). A function
        that returns a `jrl.envs.jax_env.Definition`, or a `jrl.envs.multi_agent.MultiDefinition` of several agents,
        gives environments written in JAX.
      seed: with `place`, of which environments these are. Environments written in JAX take their randomness from
        the keys that they are given instead.
      host: an EnvPool environment is stepped from Python rather than inside a program.
      use_prev_action, use_prev_reward: observations have the previous action or reward; see `jrl.envs.history`.
      state: of several agents, all see the view of everything, too; see `jrl.envs.multi_agent.build`.
      agents: further options of several agents.
      settings: other keys of the section, such as num_envs=16, backend="gymnasium", options={"start": 2}; they
        stand over those of `env`.
    Returns:
      An AsyncEnv with `batch_wait_ms`, or a `batch_size` below `num_envs`; else a JaxEnv where the environment can be
      stepped inside a program, and an Env where it cannot. Gymnasium's have two members more, `foreach_env(fn)` and
      `num_restarts`. Of several agents, `num_envs` counts games, and the spec has a column for each agent of each.
    Raises:
      InputError: unknown id, backend, key or option, a value out of its range, a space that is not supported, or a
        setting that does not go with the backend or another setting.
    """
    cfg = section(env, **settings)
    errors = check(cfg, on_failure=on_failure)
    if state and not errors and not is_multi_agent(cfg):
        errors = [f"multi_agent.state: {cfg.id} has one agent, which has no global view beside its own: leave it out"]
    if errors:
        raise InputError(*errors)
    made = _stepped(cfg, seed, place, host=host, on_failure=on_failure, state=state)
    try:
        for one in by_kind(made.spec):
            _check_sizes(cfg.id, one)
        asked = options(cfg, use_prev_action=use_prev_action, use_prev_reward=use_prev_reward, agents=agents)
        return transformed(made, *asked)
    except InputError:
        made.close()
        raise


def _stepped(cfg: EnvConfig, seed: int, place: Place, *, host: bool, on_failure: OnFailure, state: bool = False) -> Any:
    """Makes the environments as their library steps them, with its own spaces."""
    first, found = seed_range(seed, place.role, place.index) + place.offset, resolve(cfg.id, cfg.backend)
    if found == "jax":
        return jax_ids.make(cfg, state=state)
    if found == "envpool":
        from jrl.envs import envpool_env

        if is_multi_agent(cfg):
            from jrl.envs.envpool_games import EnvPoolGames

            return EnvPoolGames(cfg, seed=first, state=state)
        if cfg.batch_size is not None and cfg.batch_size < cfg.num_envs:
            return envpool_env.AsyncEnvPoolEnv(cfg, seed=first)
        from_host = envpool_env.EnvPoolEnv(cfg, seed=first)
        return from_host if host else from_host.to_jax() or from_host
    from jrl.envs import gym_env, multi_host

    context = EnvContext(
        cfg.options,
        worker_index=place.worker_index,
        num_workers=place.num_workers,
        vector_index=place.offset,
        num_envs=cfg.num_envs,
        remote=cfg.remote_worker_envs,
        in_evaluation=place.role == "eval",
        seed=first,
    )
    how: dict[str, Any] = {"seed": first, "on_failure": on_failure}
    if several.declared(cfg.id, cfg.options):
        cfg = dataclasses.replace(cfg, options={**cfg.options, "state": True}) if state else cfg
        return multi_host.games(cfg, context, **how)
    kind = gym_env.GymnasiumEnv if cfg.batch_wait_ms is None else gym_env.AsyncGymnasiumEnv
    try:
        return kind(cfg, context=context, **how)
    except contexts.SeveralAgents as e:
        if errors := list(_refused_with_agents(cfg)):
            raise InputError(*errors) from e
        return multi_host.games(cfg, context, first=e.env, **how)
