"""Environments of JaxMARL (`jaxmarl:NAME`), when that package is installed: each agent of each game is a column.

JaxMARL's own `step` resets in the step that ends an episode, so that the last observation is lost, and tells a time
limit as an end like any other. Here `step_env` is called instead, and once more of a copy without a limit: that one's
ends are true ones. XLA computes what both have in common once.
"""

import contextlib
import copy
import io
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.envs.jax_env import select, time_limit
from jrl.envs.spec import check_action
from jrl.spaces import ACTION_MASK, map_leaves
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, InputError, JaxEnv, Key, PyTree, Several, Space, StepResult

PREFIX = "jaxmarl:"
_NEVER = 2**30
_OVER = -1  # JaxmarlState.elapsed of a game whose next step begins another


@struct.dataclass
class JaxmarlState:
    """Where B / A games stand."""

    inner: PyTree  # JaxMARL's own, leaves [B / A, ...]
    elapsed: Array  # [B / A] i32, steps since the reset; -1 once the game is over
    ended: Array  # [B / A, A] bool, whose last row in this game has been


def make(env: Any, name: str, num_envs: int, limit: int | None, space: Any) -> JaxEnv:
    """Games of a JaxMARL environment, all agents of which have equal spaces.

    Args:
      env: the environment.
      name: for errors.
      num_envs: games.
      limit: steps of a game; None: the environment's own `max_steps`, where it has one.
      space: from JaxMARL's spaces to ours.
    Raises:
      InputError: agents of different spaces.
    """
    agents = tuple(env.agents)
    observation, action = _common(env, name, agents, space)
    limit = getattr(env, "max_steps", None) if limit is None else time_limit(limit)
    unlimited = env
    if limit is not None and hasattr(env, "max_steps"):
        env, unlimited = copy.copy(env), copy.copy(env)
        env.max_steps, unlimited.max_steps = limit, _NEVER
    masked = False
    if isinstance(action, Discrete) and _has_mask(env, agents[0], action):
        masked, mask = True, (ACTION_MASK, Box((action.n,), "bool", 0.0, 1.0))
        parts = observation.items if isinstance(observation, Dict) else (("obs", observation),)
        shown: Space = Dict((*parts, mask))
    else:
        shown = observation
    size = len(agents)
    spec = EnvSpec(shown, action, num_envs * size, limit, agents=agents)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    stacked = lambda by_agent: jax.tree.map(lambda *x: jnp.stack(x, 1), *(by_agent[agent] for agent in agents))

    def observe(obs: dict[str, Any], inner: PyTree) -> PyTree:
        seen = map_leaves(lambda leaf, x: x.astype(leaf.dtype), observation, stacked(obs))
        if masked:
            allowed = stacked(jax.vmap(env.get_avail_actions)(inner)) != 0
            seen = {**(seen if isinstance(observation, Dict) else {"obs": seen}), ACTION_MASK: allowed}
        return seen  # leaves [games, A, *]

    def begun(key: Key) -> tuple[PyTree, PyTree]:
        obs, inner = jax.vmap(env.reset)(jax.random.split(key, num_envs))
        return inner, observe(obs, inner)

    def reset(key: Key) -> tuple[JaxmarlState, PyTree]:
        inner, obs = begun(key)
        state = JaxmarlState(inner, jnp.zeros(num_envs, jnp.int32), jnp.zeros((num_envs, size), bool))
        # copies: the caller donates state and observation, which must not share a buffer
        return state, jax.tree.map(lambda x: jnp.copy(flat(x)), obs)

    def step(state: JaxmarlState, action: PyTree, key: Key) -> tuple[JaxmarlState, StepResult]:
        check_action(spec.action, spec.num_envs, action)  # while tracing: shape and dtype
        by_game = jax.tree.map(lambda x: x.reshape(num_envs, size, *x.shape[1:]), action)
        given = {agent: jax.tree.map(lambda x: x[:, k], by_game) for k, agent in enumerate(agents)}  # noqa: B023
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, num_envs)
        fresh = state.elapsed == _OVER
        obs, inner, rewards, ends, _ = jax.vmap(env.step_env)(keys, state.inner, given)
        if unlimited is not env:
            ends = jax.vmap(unlimited.step_env)(keys, state.inner, given)[3]
        moved = inner, observe(obs, inner)
        # most steps reset nothing
        inner, seen = jax.lax.cond(fresh.any(), lambda: select(fresh, begun(reset_key), moved), lambda: moved)

        absent = fresh[:, None] | state.ended
        end = jnp.asarray(ends["__all__"], bool)
        terminated = (stacked(ends).astype(bool) | end[:, None]) & ~absent
        elapsed = jnp.where(fresh, 0, state.elapsed + 1)
        late = jnp.zeros_like(fresh) if limit is None else elapsed >= limit
        truncated = late[:, None] & ~absent & ~terminated
        ended = (state.ended | terminated | truncated) & ~fresh[:, None]
        over = (end | ended.all(-1)) & ~fresh
        reward = jnp.where(absent, 0.0, stacked(rewards).astype(jnp.float32))
        result = StepResult(
            jax.tree.map(flat, seen),
            reward.reshape(-1),
            terminated.reshape(-1),
            truncated.reshape(-1),
            several=Several(absent.reshape(-1), over),
        )
        return JaxmarlState(inner, jnp.where(over, _OVER, elapsed), ended), result

    return JaxEnv(spec, reset, step)


def quiet_import() -> Any:
    """The package jaxmarl, which prints what it looks for while it is imported. Raises ImportError."""
    with contextlib.redirect_stdout(io.StringIO()):
        import jaxmarl
    return jaxmarl


def _common(env: Any, name: str, agents: tuple[str, ...], space: Any) -> tuple[Space, Space]:
    found = [(space(env.observation_space(agent)), space(env.action_space(agent))) for agent in agents]
    for agent, there in zip(agents, found):
        if there != found[0]:
            told = lambda agent, both: f"{agent}: observations {both[0]}, actions {both[1]}"
            raise InputError(
                f"env.id {PREFIX}{name}: expected agents of equal spaces, got {told(agents[0], found[0])}; "
                f"{told(agent, there)}: choose an environment whose agents are alike"
            )
    return found[0]


def _has_mask(env: Any, agent: str, action: Discrete) -> bool:
    """Whether the environment says which actions can be taken: one entry for each."""
    try:
        shapes = jax.eval_shape(lambda key: env.get_avail_actions(env.reset(key)[1]), jax.random.key(0))
    except NotImplementedError:
        return False
    return agent in shapes and shapes[agent].shape == (action.n,)
