"""Ids, backends and seeds: `make` is how everything else comes by an environment."""

import dataclasses
import difflib
import math
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl import registry
from jrl.envs import (
    board_games,
    classic,
    history,
    limits,
    multi_agent,
    multi_toys,
    parametric,
    several,
    spread,
    suites,
    toys,
)
from jrl.envs import context as contexts
from jrl.envs.context import ENDS_RUN, TRAINING, EnvContext, OnFailure, Place, is_in_jax
from jrl.envs.jax_env import Definition, build, time_limit
from jrl.envs.multi_agent import MultiDefinition
from jrl.envs.wrappers import wrap
from jrl.fields import schema
from jrl.fields.bounds import Backend, renamed
from jrl.fields.env import EnvConfig
from jrl.gym import exceptions as step_faults
from jrl.host.room import check_observations
from jrl.spaces import by_kind, columns, elements, leaves
from jrl.types import AsyncEnv, Env, EnvSpec, InputError, JaxEnv

BACKENDS = ("envpool", "gymnasium", "jax")  # in the order that `auto` asks them

IN_JAX: dict[str, Callable[..., Definition | MultiDefinition]] = {
    "CartPole-v1": classic.cartpole,
    "Pendulum-v1": classic.pendulum,
    "MountainCar-v0": classic.mountain_car,
    "MountainCarContinuous-v0": classic.mountain_car_continuous,
    "Acrobot-v1": classic.acrobot,
    "Catch-v0": toys.catch,
    "StatelessCartPole-v1": toys.stateless_cartpole,
    "RepeatAfterMe-v0": toys.repeat_after_me,
    "Corridor-v0": toys.corridor,
    "ParametricCartPole-v0": parametric.parametric_cartpole,
    "MultiAgentCartPole-v1": multi_toys.multi_agent_cartpole,
    "MultiAgentPendulum-v1": multi_toys.multi_agent_pendulum,
    "TwoStepGame-v0": multi_toys.two_step_game,
    "RockPaperScissors-v0": multi_toys.rock_paper_scissors,
    "SwitchRiddle-v0": multi_toys.switch_riddle,
    "SimpleSpread-v0": spread.simple_spread,
    "TicTacToe-v0": board_games.tic_tac_toe,
    "ConnectFour-v0": board_games.connect_four,
}
ROLES = ("train", "eval", "data")
_KEYS = tuple(f.name for f in dataclasses.fields(EnvConfig))
_BLOCKS = 8_192  # per role, of 65,536 seeds each: int32 holds those of four roles


def ids(backend: str) -> tuple[str, ...]:
    """Returns the ids of one backend that can be listed; prefixes such as `gymnax:` name others."""
    if backend == "jax":
        return tuple(IN_JAX)
    if backend == "envpool":
        from jrl.envs import envpool_env

        return envpool_env.ids()
    from jrl.envs import gym_env

    return gym_env.ids()


def backends_of(id: str) -> tuple[str, ...]:
    """Returns the backends that have `id`, in the order in which `auto` asks them; empty for an unknown id."""
    return tuple(backend for backend in BACKENDS if _has(id, backend))


def _has(id: str, backend: str) -> bool:
    if registry.registered(id) is None:
        if ":" not in id:
            return id in ids(backend)
        if id.startswith(suites.PREFIXES):
            return backend == "jax"
        if id.startswith(several.PREFIX):
            return backend == "gymnasium"
    # the user's own: a class, a function, or a name that only looks like one, whose fault the backend tells
    if backend == "envpool":
        return False
    from jrl.envs import gym_env

    try:
        found = gym_env.load_class(id)
    except InputError:
        found = None
    in_jax = is_in_jax(found)
    return in_jax is not False if backend == "jax" else not in_jax


def resolve(id: str, backend: str = "auto") -> str:
    """Returns the backend that steps `id`: under `auto` the first of EnvPool, gymnasium and jax that has it.

    Raises:
      InputError: unknown id or backend, or that backend lacks the id.
    """
    backend = renamed(backend, Backend)
    if not id:
        raise InputError("env.id is missing: name an environment, e.g. --set env.id=CartPole-v1")
    if backend not in ("auto", *BACKENDS):
        raise InputError(f"env.backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    for candidate in BACKENDS if backend == "auto" else (backend,):
        if _has(id, candidate):
            return candidate
    others = backends_of(id)
    if others:
        raise InputError(f"env.id {id}: the {backend} backend does not have it: use env.backend {' or '.join(others)}")
    known = [*registry.everything(), *(name for b in BACKENDS for name in ids(b))]
    near = [f"{name} ({', '.join(backends_of(name))})" for name in difflib.get_close_matches(id, set(known), 3)]
    mend = f"did you mean {', '.join(near)}?" if near else "name an id of EnvPool or Gymnasium, or package.module:Class"
    raise InputError(f"env.id {id}: no backend has it: {mend}")


def check(env: EnvConfig | str, *, on_failure: OnFailure = ENDS_RUN, **settings: Any) -> list[str]:
    """Says what is wrong with these, without making an environment, each with its mend. Arguments as `make`."""
    try:
        cfg = section(env, **settings)
        found = resolve(cfg.id, cfg.backend)
    except InputError as e:
        return list(e.errors)
    errors = [*(message for _, message in cfg.faults()), *_backend_errors(cfg, found, on_failure)]
    try:
        if found == "envpool":
            from jrl.envs import envpool_env

            errors += envpool_env.check(cfg.id, cfg.options)
        elif found == "gymnasium":
            from jrl.envs import gym_env

            errors += (several if several.declared(cfg.id, cfg.options) else gym_env).check(cfg.id, cfg.options)
        elif _is_suites(cfg.id):
            errors += suites.check(cfg.id)
        elif isinstance(_definition(cfg.id, cfg.options), MultiDefinition):
            errors += _several_errors(cfg)
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


def _backend_errors(cfg: EnvConfig, found: str, on_failure: OnFailure) -> Iterator[str]:
    """Yields the settings that the backend does not have."""
    if found == "gymnasium" and several.declared(cfg.id, cfg.options):
        yield from several.refused(cfg)
        return
    stepped = f"{cfg.id} is stepped by the {found} backend: "
    other = "use env.backend gymnasium, or leave it out" if _has(cfg.id, "gymnasium") else "leave it out"
    if cfg.batch_size is not None and found != "envpool":
        yield f"env.batch_size: only EnvPool takes it, and {stepped}leave it out"
    elif cfg.batch_size is not None and cfg.batch_size > cfg.num_envs:
        yield (f"env.batch_size {cfg.batch_size}: a vector has {cfg.num_envs} environments only: use at most so many")
    elif cfg.batch_size is not None and is_multi_agent(cfg):
        yield f"env.batch_size: {cfg.id} has several agents, and their games wait for each other: leave it out"
    if cfg.remote_worker_envs and found != "gymnasium":
        yield f"env.remote_worker_envs: only Gymnasium's environments run in processes, and {stepped}{other}"
    elif cfg.remote_worker_envs and not hasattr(os, "fork"):
        yield "env.remote_worker_envs: worker processes need an operating system that can fork: leave it out"
    if on_failure.restart and found != "gymnasium":
        name = "env_runners.restart_failed_sub_environments"
        yield f"{name}: only Gymnasium's environments are made anew, and {stepped}{other}"
    if on_failure.step_timeout_s is not None and not cfg.remote_worker_envs:
        name = "env_runners.env_step_timeout_s"
        yield f"{name}: only a worker process can be ended: set env.remote_worker_envs, or leave it out"
    if cfg.soft_horizon and found == "envpool":
        able = [name for name in backends_of(cfg.id) if name != "envpool"]
        mend = f"use env.backend {' or '.join(able)}" if able else "leave it out"
        yield (
            "env.soft_horizon: EnvPool steps and resets all environments of a pool, none can be held back, and "
            f"{stepped}{mend}"
        )
    if cfg.action_mask_info and found == "jax":
        yield (
            f"env.action_mask_info {cfg.action_mask_info}: environments in JAX have no infos, and {stepped}"
            "let its observation be a Dict with an action_mask, or leave it out"
        )


def _several_errors(cfg: EnvConfig) -> Iterator[str]:
    """Yields the settings that environments of several agents do not have."""
    if cfg.soft_horizon:
        yield (
            f"env.soft_horizon: {cfg.id} has several agents, who would go on at different times: leave it out; "
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
        if found == "jax" and not _is_suites(cfg.id):
            return isinstance(_definition(cfg.id, cfg.options), MultiDefinition)
        if found == "envpool":
            from jrl.envs import envpool_env

            return envpool_env.num_players(cfg.id) > 1
        return several.declared(cfg.id, cfg.options) is True
    except InputError:
        return False


def _is_suites(id: str) -> bool:
    return id.startswith(suites.PREFIXES) and registry.registered(id) is None


def _definition(id: str, options: dict[str, Any]) -> Definition | MultiDefinition:
    """Raises InputError: an option that it does not take, or a function of the user's that gives no definition."""
    options = dict(options)
    found: Any = registry.registered(id) or IN_JAX.get(id)
    if found is None:
        from jrl.envs import gym_env

        found = gym_env.load_class(id)
    if not isinstance(found, Definition | MultiDefinition) and (
        errors := contexts.option_errors(id, found, options, ("max_episode_steps",))
    ):
        raise InputError(*errors)
    limit = options.pop("max_episode_steps", None)
    try:
        made = found if isinstance(found, Definition | MultiDefinition) else found(**options)
    except InputError:
        raise  # it says what to mend
    except BaseException as e:
        if not step_faults.own(e):
            raise
        raise InputError(f"env.id {id}: it cannot be made with options {options}: {step_faults.line(e)}") from e
    if not isinstance(made, Definition | MultiDefinition):
        raise InputError(
            f"env.id {id}: the jax backend takes a function that returns a jrl.envs.jax_env.Definition or a "
            "jrl.envs.multi_agent.MultiDefinition, and this one "
            f"returns a {type(made).__name__}: use env.backend gymnasium if that is an environment"
        )
    return made if limit is None else made._replace(max_episode_steps=time_limit(limit))


def _in_jax(cfg: EnvConfig, state: bool) -> JaxEnv:
    def made(**limit: int) -> JaxEnv:
        given = {**cfg.options, **limit}
        if _is_suites(cfg.id):
            return suites.make(cfg.id, cfg.num_envs, given, state=state)
        definition = _definition(cfg.id, given)
        if isinstance(definition, MultiDefinition):
            return multi_agent.build(definition, cfg.num_envs, state=state)
        return build(definition, cfg.num_envs)

    env = made()
    if registry.registered(cfg.id) is not None or (cfg.id not in IN_JAX and not _is_suites(cfg.id)):
        _trace(cfg.id, env)
    if cfg.horizon is None:
        return env
    if cfg.soft_horizon:
        return limits.soften(env, cfg.horizon)
    own = env.spec.max_episode_steps
    return env if own is not None and own <= cfg.horizon else made(max_episode_steps=cfg.horizon)


def _trace(id: str, env: JaxEnv) -> None:
    """Traces a reset and a step of the user's functions, without computing anything.

    Raises:
      InputError: they raise, with the user's line first, or return other arrays than the definition says.
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
        if not step_faults.own(e):
            raise
        mend = "jax traces it with arrays of all environments: fix that line, and try it with python -m jrl.check_env"
        found = InputError(f"{step_faults.line(e)}{step_faults.stack(e)}\nenv.id {id}: its {what} fails: {mend}")
        found.details = "".join(traceback.format_exception(e))
        raise found from e
    if result.reward.shape != (env.spec.num_envs,):
        raise InputError(
            f"env.id {id}: expected rewards of shape {(env.spec.num_envs,)}, got {result.reward.shape}: return one "
            "number for each environment"
        )


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


def seed_range(seed: int, role: str = "train", index: int = 0) -> int:
    """Returns the first seed of a vector; one of up to 65,536 environments shares none with another role or index.

    EnvPool's environment i of seed s is environment 0 of seed s + i: with seed + 1, an evaluation would replay the
    training environments. Indices that differ by a multiple of 8,192 share. All seeds fit int32.

    Raises:
      ValueError: unknown role.
    """
    if role not in ROLES:
        raise ValueError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    block = (seed * 2_654_435_761 + index) % _BLOCKS  # an odd factor: seeds that are close do not meet at close indices
    return (ROLES.index(role) * _BLOCKS + block) << 16


def is_atari(id: str) -> bool:
    """Returns whether `id` is an Atari game: EnvPool's `Pong-v5`, ale-py's `ALE/Pong-v5`, `PongNoFrameskip-v4`."""
    if id.startswith("ALE/") or "NoFrameskip-v" in id:
        return True
    if not id.endswith("-v5") or "/" in id or ":" in id:  # without importing EnvPool
        return False
    from jrl.envs import envpool_env

    return id in envpool_env.ids() and envpool_env.family(id).startswith("envpool.atari")


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
      use_prev_action, use_prev_reward: what observations tell of earlier steps; see `jrl.envs.history`.
      state: of several agents, all see the view of everything, too; see `jrl.envs.multi_agent.build`.
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
        made = wrap(
            made,
            normalize=cfg.normalize_actions,
            clip=cfg.clip_actions,
            no_done_at_end=cfg.no_done_at_end,
        )
        return history.remember(
            made, frame_stack=cfg.frame_stack, prev_action=use_prev_action, prev_reward=use_prev_reward
        )
    except InputError:
        made.close()
        raise


def _stepped(cfg: EnvConfig, seed: int, place: Place, *, host: bool, on_failure: OnFailure, state: bool = False) -> Any:
    """Makes the environments as their library steps them, with its own spaces."""
    first, found = seed_range(seed, place.role, place.index) + place.offset, resolve(cfg.id, cfg.backend)
    if found == "jax":
        return _in_jax(cfg, state)
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
        return multi_host.games(cfg, context, first=e.env, **how)
