"""Games of pgx (`pgx:NAME`), if it is installed: games by turns of several agents, or an environment of one agent."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jrl.envs import multi_agent
from jrl.envs.jax_env import check_time_limit
from jrl.envs.multi_agent import MultiDefinition
from jrl.envs.suites import import_suite, unknown, vectorize
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, JaxEnv, Key, MultiBinary, PyTree


def num_players(name: str) -> int:
    """Returns the number of players of a game. Raises InputError: pgx is not installed, or has no such game."""
    return _load(name).num_players


def _load(name: str) -> Any:
    pgx = import_suite("pgx")
    if name not in (known := pgx.available_envs()):
        raise unknown(f"env.id pgx:{name}: pgx has no such environment", name, known)
    return pgx.make(name)


def make_pgx(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B games of pgx; option: `max_episode_steps`.

    The agents are player_0, player_1, ...; which of them begins is random, if the game draws it. A waiting agent can
    only choose the last action, which pgx does not have. Observations are `obs` as its player sees the game, and
    `action_mask`.
    """
    env = _load(name)
    limit = options.pop("max_episode_steps", None)
    limit = None if limit is None else check_time_limit(limit)
    for key in options:
        raise unknown(f"env.options.{key}: pgx:{name} has no such option", key, ["max_episode_steps"])
    board = Box(tuple(env.observation_shape), "float32")
    if env.num_players == 1:
        return _make_single(env, board, cfg, limit)
    return multi_agent.build(_define(env, board, limit), cfg.num_envs, state=state)


def _make_single(env: Any, board: Box, cfg: EnvConfig, limit: int | None) -> JaxEnv:
    read = lambda inner: {
        "obs": inner.observation.astype(jnp.float32),
        ACTION_MASK: inner.legal_action_mask.astype(jnp.int8),
    }
    observation = Dict(((ACTION_MASK, MultiBinary((env.num_actions,))), ("obs", board)))

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        inner = env.init(key)
        return inner, read(inner)

    def step_one(inner: Any, action: Array, key: Key) -> tuple[Any, PyTree, Array, Array]:
        inner = env.step(inner, action, key)
        return inner, read(inner), inner.rewards[0], inner.terminated

    return vectorize(
        EnvSpec(observation, Discrete(env.num_actions), cfg.num_envs, limit), reset_one, step_one, cfg.reset
    )


def _define(env: Any, board: Box, limit: int | None) -> MultiDefinition:
    players, moves = jnp.arange(env.num_players), env.num_actions

    def keys(draws: Array) -> Array:
        """Returns a random key for each game, from draws [2, G]."""
        return jax.random.wrap_key_data(jax.lax.bitcast_convert_type(draws, jnp.uint32).T, impl="threefry2x32")

    def step(inner: Any, actions: Array, draws: Array) -> tuple[Any, Array, Array]:
        action = jnp.take_along_axis(actions, inner.current_player[:, None], 1)[:, 0]
        # a player that waits instead of moving plays an illegal move, and loses; where all moves are legal, move 0
        action = jnp.where(action < moves, action, jnp.argmin(inner.legal_action_mask, -1))
        inner = jax.vmap(env.step)(inner, action, keys(draws))
        ends = jnp.broadcast_to(inner.terminated[:, None], inner.rewards.shape)
        return inner, inner.rewards, ends

    def observe(inner: Any) -> PyTree:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # `observe` of a given player, who may be waiting
            seen = jax.vmap(jax.vmap(env.observe, (None, 0)), (0, None))(inner, players)
        mine = inner.current_player[:, None] == players[None]
        allowed = mine[:, :, None] & inner.legal_action_mask[:, None]
        return {
            ACTION_MASK: jnp.concatenate([allowed, ~mine[:, :, None]], -1).astype(jnp.int8),
            "obs": seen.astype(jnp.float32),
        }

    return MultiDefinition(
        agents=tuple(f"player_{i}" for i in range(env.num_players)),
        observation=Dict(((ACTION_MASK, MultiBinary((moves + 1,))), ("obs", board))),
        action=Discrete(moves + 1),
        max_episode_steps=limit,
        num_draws=2,
        reset=lambda draws: jax.vmap(env.init)(keys(draws)),
        step=step,
        observe=observe,
    )
