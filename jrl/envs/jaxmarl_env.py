"""Environments of JaxMARL (`jaxmarl:NAME`), if it is installed: each agent of each game has a slot in the batch.

JaxMARL's own `step` resets in the step that ends an episode, so that the last observation is lost, and tells a time
limit as an end like any other. Here `step_env` is called instead, and once more of a copy without a limit: that one's
ends are true ones. XLA computes what both have in common once.
"""

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.envs.jax_env import select, time_limit
from jrl.envs.multi_agent import add_state, with_state
from jrl.envs.spec import check_action, with_mask
from jrl.spaces import ACTION_MASK, columns, combine_agents, from_parts, kinds, map_leaves, parts_by_kind
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, JaxEnv, Key, PyTree, Several, Space, StepResult

PREFIX = "jaxmarl:"
_WORLD = "world_state"  # the view of all, among JaxMARL's observations, whose other names are agents
_NEVER = 2**30
_OVER = -1  # JaxmarlState.elapsed of a game whose next step begins another


@struct.dataclass
class JaxmarlState:
    """State of B / A games."""

    inner: PyTree  # JaxMARL's own, leaves [B / A, ...]
    elapsed: Array  # [B / A] i32, steps since the reset; -1 once the game is over
    ended: Array  # [B / A, A] bool, whose last row in this game has been


def make(env: Any, name: str, num_envs: int, limit: int | None, space: Any, *, state: bool = False) -> JaxEnv:
    """Makes games of a JaxMARL environment.

    Args:
      env: the environment.
      name: for errors.
      num_envs: games.
      limit: steps of a game; None: the environment's own `max_steps`, where it has one.
      space: from JaxMARL's spaces to ours.
      state: observations get one more item, `state`, as of `jrl.envs.multi_agent.build`: see `_view`.
    Raises:
      InputError: `state` of observations that have such an item.
    """
    agents = tuple(env.agents)
    own = [(space(env.observation_space(agent)), space(env.action_space(agent))) for agent in agents]
    limit = getattr(env, "max_steps", None) if limit is None else time_limit(limit)
    unlimited = env
    if limit is not None and hasattr(env, "max_steps"):
        env, unlimited = copy.copy(env), copy.copy(env)
        env.max_steps, unlimited.max_steps = limit, _NEVER
    groups = kinds(own) or (tuple(range(len(agents))),)
    firsts = [(agents[kind[0]], own[kind[0]][1]) for kind in groups]
    masked = [isinstance(action, Discrete) and _has_mask(env, agent, action) for agent, action in firsts]
    shown = {i: with_mask(*own[i]) if has else own[i][0] for kind, has in zip(groups, masked) for i in kind}
    parts = tuple(_Kind(kind, own[kind[0]][0], shown[kind[0]], has) for kind, has in zip(groups, masked, strict=True))
    view = None
    if state:
        whole, view = _view(env, agents)
        shown = {i: with_state(one, whole) for i, one in shown.items()}
    observation, action, found = combine_agents([(shown[i], own[i][1]) for i in range(len(agents))])
    spec = EnvSpec(observation, action, num_envs * len(agents), limit, agents=agents, kinds=found)
    games = _Games(env, unlimited, spec, parts, view)
    return JaxEnv(spec, games.reset, games.step)


class _Kind(NamedTuple):
    """Agents of equal spaces."""

    numbers: tuple[int, ...]
    observation: Space  # JaxMARL's, of one agent
    seen: Space  # the same with the mask
    masked: bool  # observations get a mask of the actions


@dataclasses.dataclass(frozen=True)
class _Games:
    """Games of a JaxMARL environment, which step together."""

    env: Any
    unlimited: Any  # the same without a time limit
    spec: EnvSpec
    kinds: tuple[_Kind, ...]
    view: Callable[[Any, PyTree], Array] | None  # what `_view` gives; None: observations have none

    def reset(self, key: Key) -> tuple[JaxmarlState, PyTree]:
        inner, obs = self._begun(key)
        num_envs, size = self.spec.games, len(self.spec.agents)
        state = JaxmarlState(inner, jnp.zeros(num_envs, jnp.int32), jnp.zeros((num_envs, size), bool))
        # copies: the caller donates state and observation, which must not share a buffer
        return state, jax.tree.map(lambda x: jnp.copy(_flat(x)), obs)

    def step(self, state: JaxmarlState, action: PyTree, key: Key) -> tuple[JaxmarlState, StepResult]:
        check_action(self.spec.action, columns(self.spec), action)  # while tracing: shape and dtype
        given = self._by_agent(action)
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, self.spec.games)
        fresh = state.elapsed == _OVER
        obs, inner, rewards, ends, _ = jax.vmap(self.env.step_env)(keys, state.inner, given)
        if self.unlimited is not self.env:
            ends = jax.vmap(self.unlimited.step_env)(keys, state.inner, given)[3]
        moved = inner, self._observe(obs, inner)
        # most steps reset nothing
        inner, seen = jax.lax.cond(fresh.any(), lambda: select(fresh, self._begun(reset_key), moved), lambda: moved)

        absent = fresh[:, None] | state.ended
        end = jnp.asarray(ends["__all__"], bool)
        terminated = (self._stacked(ends).astype(bool) | end[:, None]) & ~absent
        elapsed, limit = jnp.where(fresh, 0, state.elapsed + 1), self.spec.max_episode_steps
        late = jnp.zeros_like(fresh) if limit is None else elapsed >= limit
        truncated = late[:, None] & ~absent & ~terminated
        ended = (state.ended | terminated | truncated) & ~fresh[:, None]
        over = (end | ended.all(-1)) & ~fresh
        reward = jnp.where(absent, 0.0, self._stacked(rewards).astype(jnp.float32))
        result = StepResult(
            jax.tree.map(_flat, seen),
            reward.reshape(-1),
            terminated.reshape(-1),
            truncated.reshape(-1),
            several=Several(absent.reshape(-1), over),
        )
        return JaxmarlState(inner, jnp.where(over, _OVER, elapsed), ended), result

    def _begun(self, key: Key) -> tuple[PyTree, PyTree]:
        """Returns new games and their observations."""
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(key, self.spec.games))
        return inner, self._observe(obs, inner)

    def _observe(self, obs: dict[str, Any], inner: PyTree) -> PyTree:
        """Returns observations [games, A, *]; of several kinds a tuple of those of each."""
        parts = []
        view = None if self.view is None else jax.vmap(self.view)(obs, inner)
        for kind in self.kinds:
            own = self._stacked(obs, kind.numbers)
            seen = map_leaves(lambda leaf, x: x.astype(leaf.dtype), kind.observation, own)
            if kind.masked:
                allowed = self._stacked(jax.vmap(self.env.get_avail_actions)(inner), kind.numbers) != 0
                seen = {**(seen if isinstance(kind.observation, Dict) else {"obs": seen}), ACTION_MASK: allowed}
            parts.append(seen if view is None else add_state(kind.seen, seen, view))
        return from_parts(self.spec, parts)

    def _by_agent(self, action: PyTree) -> dict[str, PyTree]:
        """Returns each agent's actions [games, *], by name."""
        num_envs = self.spec.games
        by_game = jax.tree.map(lambda x: x.reshape(num_envs, x.shape[0] // num_envs, *x.shape[1:]), action)
        given: dict[str, PyTree] = {}
        for kind, part in zip(self.kinds, parts_by_kind(self.spec, by_game), strict=True):
            for j, i in enumerate(kind.numbers):
                given[self.spec.agents[i]] = jax.tree.map(lambda x, j=j: x[:, j], part)
        return given

    def _stacked(self, by_agent: dict[str, Any], numbers: Iterable[int] | None = None) -> PyTree:
        """Stacks JaxMARL's dict by agent, leaves [games, *], to [games, A, *], for all agents or some of them."""
        named = self.spec.agents if numbers is None else [self.spec.agents[i] for i in numbers]
        return jax.tree.map(lambda *x: jnp.stack(x, 1), *(by_agent[agent] for agent in named))


def _flat(x: Array) -> Array:
    """Returns [games, A, *] as [games * A, *]."""
    return x.reshape(-1, *x.shape[2:])


def quiet_import() -> Any:
    """Imports the package jaxmarl without what it prints while it is imported. Raises ImportError."""
    with contextlib.redirect_stdout(io.StringIO()):
        import jaxmarl
    return jaxmarl


def _has_mask(env: Any, agent: str, action: Discrete) -> bool:
    """Returns whether the environment has an action mask with one entry for each action."""
    try:
        shapes = jax.eval_shape(lambda key: env.get_avail_actions(env.reset(key)[1]), jax.random.key(0))
    except NotImplementedError:  # what JaxMARL's base class says where an environment has no masks
        return False
    return agent in shapes and shapes[agent].shape == (action.n,)


def _view(env: Any, agents: tuple[str, ...]) -> tuple[Box, Callable[[Any, PyTree], Array]]:
    """Returns the space of the global view, flat f32, and the function from one game's observations and state to it.

    It is what the environment says, as `world_state` among its observations or by `get_world_state`. Where it says
    nothing, all agents' observations are joined in their order, as JaxMARL's own MAPPO does.
    """

    def view(obs: Mapping[str, Any], inner: PyTree) -> Array:
        if _WORLD in obs:
            whole = obs[_WORLD]
        elif hasattr(env, "get_world_state"):
            whole = env.get_world_state(inner)  # of one array, or several
        else:  # a list: leaves of the dict come by name, agent_10 before agent_2
            whole = [obs[agent] for agent in agents]
        return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(whole)])

    return Box(jax.eval_shape(lambda key: view(*env.reset(key)), jax.random.key(0)).shape), view
