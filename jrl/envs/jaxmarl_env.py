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
from jrl.spaces import ACTION_MASK, columns, kinds, map_leaves, of_agents
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, JaxEnv, Key, PyTree, Several, Space, StepResult

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
    """Games of a JaxMARL environment.

    Args:
      env: the environment.
      name: for errors.
      num_envs: games.
      limit: steps of a game; None: the environment's own `max_steps`, where it has one.
      space: from JaxMARL's spaces to ours.
    """
    agents = tuple(env.agents)
    own = [(space(env.observation_space(agent)), space(env.action_space(agent))) for agent in agents]
    limit = getattr(env, "max_steps", None) if limit is None else time_limit(limit)
    unlimited = env
    if limit is not None and hasattr(env, "max_steps"):
        env, unlimited = copy.copy(env), copy.copy(env)
        env.max_steps, unlimited.max_steps = limit, _NEVER
    size = len(agents)
    groups = kinds(own) or (tuple(range(size)),)
    masked = [
        isinstance(own[kind[0]][1], Discrete) and _has_mask(env, agents[kind[0]], own[kind[0]][1]) for kind in groups
    ]
    shown = {i: _with_mask(*own[i]) if has else own[i][0] for kind, has in zip(groups, masked) for i in kind}
    observation, taken, found = of_agents([(shown[i], own[i][1]) for i in range(size)])
    spec = EnvSpec(observation, taken, num_envs * size, limit, agents=agents, kinds=found)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    of_kind = lambda by_agent, kind: jax.tree.map(lambda *x: jnp.stack(x, 1), *(by_agent[agents[i]] for i in kind))
    stacked = lambda by_agent: of_kind(by_agent, range(size))

    def observe(obs: dict[str, Any], inner: PyTree) -> PyTree:
        """Leaves [games, A, *], of several kinds a tuple of those of each."""
        parts = []
        for kind, has in zip(groups, masked, strict=True):
            seen = map_leaves(lambda leaf, x: x.astype(leaf.dtype), own[kind[0]][0], of_kind(obs, kind))
            if has:
                allowed = of_kind(jax.vmap(env.get_avail_actions)(inner), kind) != 0
                seen = {**(seen if isinstance(own[kind[0]][0], Dict) else {"obs": seen}), ACTION_MASK: allowed}
            parts.append(seen)
        return tuple(parts) if found else parts[0]

    def begun(key: Key) -> tuple[PyTree, PyTree]:
        obs, inner = jax.vmap(env.reset)(jax.random.split(key, num_envs))
        return inner, observe(obs, inner)

    def reset(key: Key) -> tuple[JaxmarlState, PyTree]:
        inner, obs = begun(key)
        state = JaxmarlState(inner, jnp.zeros(num_envs, jnp.int32), jnp.zeros((num_envs, size), bool))
        # copies: the caller donates state and observation, which must not share a buffer
        return state, jax.tree.map(lambda x: jnp.copy(flat(x)), obs)

    def step(state: JaxmarlState, action: PyTree, key: Key) -> tuple[JaxmarlState, StepResult]:
        check_action(spec.action, columns(spec), action)  # while tracing: shape and dtype
        by_game = jax.tree.map(lambda x: x.reshape(num_envs, x.shape[0] // num_envs, *x.shape[1:]), action)
        given: dict[str, PyTree] = {}
        for kind, part in zip(groups, by_game if found else (by_game,), strict=True):
            given |= {agents[i]: jax.tree.map(lambda x, j=j: x[:, j], part) for j, i in enumerate(kind)}
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


def _with_mask(observation: Space, action: Discrete) -> Space:
    """An observation space with a mask of the actions."""
    parts = observation.items if isinstance(observation, Dict) else (("obs", observation),)
    return Dict((*parts, (ACTION_MASK, Box((action.n,), "bool", 0.0, 1.0))))


def _has_mask(env: Any, agent: str, action: Discrete) -> bool:
    """Whether the environment says which actions can be taken: one entry for each."""
    try:
        shapes = jax.eval_shape(lambda key: env.get_avail_actions(env.reset(key)[1]), jax.random.key(0))
    except NotImplementedError:  # what JaxMARL's base class says where an environment has no masks
        return False
    return agent in shapes and shapes[agent].shape == (action.n,)
