"""Creation of environments: `make` applies the options of a config to the environments of a backend."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jrl.envs import limits, scaling
from jrl.envs.backends import has_id, module, resolve, suite_of
from jrl.envs.context import ENDS_RUN, TRAINING, OnFailure, Place, agent_faults, seed_range
from jrl.envs.transform import Option, transformed
from jrl.fields import schema
from jrl.fields.env import REFUSED, EnvConfig
from jrl.fields.validation import refused
from jrl.host.machine import check_observations
from jrl.spaces import by_kind, leaves
from jrl.types import Array, AsyncEnv, Env, EnvSpec, InputError, JaxEnv

_KEYS = tuple(f.name for f in dataclasses.fields(EnvConfig))


def check(env: EnvConfig | str, *, on_failure: OnFailure = ENDS_RUN, **settings: Any) -> list[str]:
    """Returns the faults of these settings, each with its fix, without making an environment. Arguments as `make`."""
    try:
        cfg = section(env, **settings)
        backend = resolve(cfg.id, cfg.backend)
    except InputError as e:
        return list(e.errors)
    errors = [message for _, message in refused(REFUSED, SimpleNamespace(env=cfg))]
    errors += _check_options(cfg, backend, on_failure)
    try:
        errors += module(backend).check(cfg)
    except InputError as e:
        errors += e.errors
    return errors


def section(env: EnvConfig | str, **settings: Any) -> EnvConfig:
    """Returns the `env` section of a config from an id and further keys; a key that is None has its default.

    Raises:
      InputError: an unknown key, or a value of the wrong type or range, as in a config file.
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
_MASKS = "environments in JAX have no infos (put action_mask into a Dict observation)"
_TOGETHER = "EnvPool steps and resets all environments of a pool together"
# options of some backends: key, backends that have it, reason
LIMITED = (
    ("env.batch_size", ("envpool",), "only EnvPool takes it"),
    ("env.remote_worker_envs", ("gymnasium",), "only Gymnasium's environments run in processes"),
    (_RESTARTS, ("gymnasium",), "only Gymnasium's environments are made again"),
    ("env.soft_horizon", ("gymnasium", "jax"), _TOGETHER),
    ("env.action_repeat", ("gymnasium", "jax"), _TOGETHER),
    ("env.action_chunk", ("gymnasium", "jax"), _TOGETHER),
    ("env.on_nonfinite", ("jax",), "only environments in JAX are checked"),
    ("env.action_mask_info", ("envpool", "gymnasium"), _MASKS),
    ("env.randomize", ("jax",), "only environments in JAX have numbers that differ between environments"),
)


def _check_options(cfg: EnvConfig, backend: str, on_failure: OnFailure) -> Iterator[str]:
    """Yields the options that conflict with the backend or with each other, each with its fix."""
    given = {**{f"env.{key}": getattr(cfg, key) for key in _KEYS}, _RESTARTS: on_failure.restart}
    given |= {"env.action_repeat": cfg.action_repeat > 1, "env.action_chunk": cfg.action_chunk > 1}
    has_several = is_multi_agent(cfg)
    if backend == "envpool" and cfg.batch_size is not None and cfg.batch_size > cfg.num_envs:
        yield f"env.batch_size: expected at most env.num_envs = {cfg.num_envs}, got {cfg.batch_size}: lower it"
    elif backend == "envpool" and cfg.batch_size is not None and has_several:
        yield f"env.batch_size: {cfg.id} has several agents, and games wait for each other: leave it out"
    for key, backends, why in LIMITED:
        if not given[key] or backend in backends:
            continue
        able = [name for name in backends if has_id(cfg.id, name)]
        fix = f"use env.backend {' or '.join(able)}, or leave it out" if able else "leave it out"
        yield f"{key}: {why}, and {cfg.id} is stepped by the {backend} backend: {fix}"
    if has_several:
        yield from agent_faults(cfg)
    for key, value in (("observation_noise", cfg.observation_noise), ("action_delay", cfg.longest_delay)):
        if has_several and value:
            yield f"env.{key}: {cfg.id} has several agents, and the option is for one: leave it out"
    if cfg.reset != "each" and (suite_of(cfg.id) is None or has_several):
        yield f"env.reset: only single agents of suites in JAX share resets, and {cfg.id} is not one: leave it out"
    if cfg.randomize and backend == "jax":
        yield from _check_randomize(cfg, has_several)
    if cfg.remote_worker_envs and not hasattr(os, "fork"):
        yield "env.remote_worker_envs: worker processes need an operating system with fork: leave it out"
    if on_failure.step_timeout_s is not None and not cfg.remote_worker_envs and not has_several:
        name = "env_runners.env_step_timeout_s"
        yield f"{name}: only a worker process can be ended: set env.remote_worker_envs, or leave it out"


def _check_randomize(cfg: EnvConfig, has_several: bool) -> Iterator[str]:
    suite = suite_of(cfg.id)
    if has_several:
        yield f"env.randomize: {cfg.id} has several agents, which share one task: leave it out"
    elif suite == "playground" and cfg.ranges:
        yield "env.randomize: playground draws whole models: use true, or a function package.module:name, not ranges"
    elif suite not in (None, "gymnax", "craftax", "playground"):
        yield f"env.randomize: environments of {suite} have no numbers by name: leave it out"
    elif suite != "playground" and not cfg.ranges:
        fix = "use ranges of numbers, such as {mass: [0.5, 2.0]}"
        yield f"env.randomize: only playground has functions that draw models, and {cfg.id} is not of playground: {fix}"


def is_multi_agent(env: EnvConfig | str, **settings: Any) -> bool:
    """Returns whether environments of an id have several agents, without making one. Arguments as `make`.

    A definition written in JAX is made for it. False for an id that cannot be made (`check` reports the reason), and
    for a function without a return annotation.
    """
    try:
        cfg = section(env, **settings)
        return module(resolve(cfg.id, cfg.backend)).has_agents(cfg)
    except InputError:
        return False


def goal_reward(cfg: EnvConfig) -> Callable[[Array, Array], tuple[Array, Array]] | None:
    """Returns how an environment's rewards follow from goals: (achieved [N, *], desired [N, *]) -> (reward, end) [N].

    None: it does not say. Raises InputError: the environment cannot be made.
    """
    return module(resolve(cfg.id, cfg.backend)).goal_reward(cfg)


def _check_sizes(id: str, spec: EnvSpec) -> None:
    """Raises InputError: an array of observations or actions is empty, or observations would fill the memory."""
    errors = []
    for what, space in (("observation", spec.observation), ("action", spec.action)):
        for path, leaf in leaves(space):
            if math.prod(leaf.shape) == 0:
                fix = "leave it out" if path else "add an element, such as a constant 0"
                errors.append(f"env.id {id}: {_format_path(what, path)} has shape {leaf.shape}, no elements: {fix}")
    if errors:
        raise InputError(*errors)
    arrays = [
        (_format_path("observation", path), leaf.shape, np.dtype(leaf.dtype).itemsize)
        for path, leaf in leaves(spec.observation)
    ]
    check_observations(id, arrays, spec.num_envs)


def _format_path(what: str, path: str) -> str:
    return what + "".join(f"[{name!r}]" for name in path.split("/") if name)


class AgentOptions(NamedTuple):
    """Options of multi-agent environments; `list_options` turns them into Transforms."""

    observation_fn: str | None = None  # see `agent_options.apply_observation_fn`
    agent_id: bool = False  # see `agent_options.add_agent_ids`
    group: Mapping[str, Sequence[str]] | None = None  # see `team.group_agents`
    game_numbers: bool = False  # see `agent_options.add_game_numbers`
    # (number of agents) -> (agent indices that keep their rewards, block size), see `agent_options.keep_rewards`
    rewards_of: Callable[[int], tuple[np.ndarray, int]] | None = None


NO_OPTIONS = AgentOptions()


def list_options(
    cfg: EnvConfig,
    *,
    use_prev_action: bool = False,
    use_prev_reward: bool = False,
    agents: AgentOptions = NO_OPTIONS,
) -> list[Option]:
    """Returns the options of environments in their order, from the environments to the policy.

    1. the delay of actions, in the environment's own units
    2. actions are scaled and clipped; history must not see this: a previous action is the policy's
    3. the meaning of ends
    4. noise: frames of a stack keep theirs
    5. history, of each agent's own observations
    6. `observation_fn`, which may remove any leaf, history included
    7. `agent_id`, which a user's function does not see
    8. teams, of their members' observations
    9. game numbers, which only the policy mapping reads
    10. rewards that do not count
    """
    found: list[Option] = []
    if cfg.longest_delay:
        from jrl.envs import latency

        found.append(partial(latency.delay_actions, delay=cfg.action_delay))
    found.append(partial(scaling.scale_actions, env=cfg))
    found.append(partial(limits.ends, no_done_at_end=cfg.no_done_at_end))
    if cfg.observation_noise:
        from jrl.envs import noise

        found.append(partial(noise.add_noise, deviation=cfg.observation_noise))
    if cfg.frame_stack > 1 or use_prev_action or use_prev_reward:
        from jrl.envs import history

        added = {"prev_action": use_prev_action, "prev_reward": use_prev_reward}
        found.append(lambda spec: history.add_history(spec, frame_stack=cfg.frame_stack, **added))
    if agents == NO_OPTIONS:
        return found
    from jrl.envs import agent_options, team

    if agents.observation_fn is not None:
        found.append(partial(agent_options.apply_observation_fn, path=agents.observation_fn))
    if agents.agent_id:
        found.append(agent_options.add_agent_ids)
    if agents.group is not None:
        found.append(partial(team.group_agents, groups=agents.group))
    if agents.game_numbers:
        found.append(agent_options.add_game_numbers)
    if (rewards_of := agents.rewards_of) is not None:
        found.append(lambda spec: agent_options.keep_rewards(spec, *rewards_of(len(spec.agents))))
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
        `brax:NAME`, `jaxmarl:NAME`, `pettingzoo:MODULE`, or a registered name (see `jrl.registry`). A function that
        returns a `jrl.envs.jax_env.Definition` or `jrl.envs.multi_agent.MultiDefinition` makes environments written in
        JAX.
      seed: with `place`, the seed of these environments. Environments written in JAX use the keys passed to them
        instead.
      host: whether an EnvPool environment is stepped from Python instead of inside a program.
      use_prev_action, use_prev_reward: add the previous action or reward to observations; see `jrl.envs.history`.
      state: add the global state to the observations of several agents; see `jrl.envs.multi_agent.build`.
      agents: further options of several agents.
      settings: other keys of the section, such as num_envs=16, backend="gymnasium", options={"start": 2}; they override
        `env`.
    Returns:
      An AsyncEnv with `batch_wait_ms`, or with a `batch_size` below `num_envs`; otherwise a JaxEnv if the environment
      can be stepped inside a program, else an Env. Gymnasium's have two more members, `foreach_env(fn)` and
      `num_restarts`. With several agents, `num_envs` counts games, and the batch has an index for each agent of each
      game.
    Raises:
      InputError: unknown id, backend, key or option, a value out of its range, an unsupported space, or a setting that
        conflicts with the backend or another setting.
    """
    cfg = section(env, **settings)
    errors = check(cfg, on_failure=on_failure)
    if state and not errors and not is_multi_agent(cfg):
        errors = [f"multi_agent.state: expected several agents, but {cfg.id} has one: leave it out"]
    if errors:
        raise InputError(*errors)
    first = seed_range(seed, place.role, place.index) + place.offset
    backend = module(resolve(cfg.id, cfg.backend))
    made = backend.make(cfg, seed=first, place=place, host=host, on_failure=on_failure, state=state)
    try:
        for kind in by_kind(made.spec):
            _check_sizes(cfg.id, kind)
        chain = list_options(cfg, use_prev_action=use_prev_action, use_prev_reward=use_prev_reward, agents=agents)
        return transformed(made, *chain, seed=first)
    except InputError:
        made.close()
        raise
