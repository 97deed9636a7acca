"""JaxMARL's environments (`jaxmarl:NAME`), if it is installed: each agent of each game has an index in the batch.

JaxMARL's own `step` resets in the step that ends an episode, so that the last observation is lost, and reports a time
limit as an ordinary end. Here `step_env` is called instead, and once more on a copy without a limit, whose ends are
true ends. XLA computes their common part once.
"""

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.envs.jax_env import check_time_limit, count_step, select
from jrl.envs.multi_agent import GamesState, add_state, add_state_space, end_step
from jrl.envs.spec import add_mask_space, check_action
from jrl.envs.suites import convert_space, import_suite, unknown
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK, columns, combine_agents, from_parts, kinds, map_leaves, parts_by_kind
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, InputError, JaxEnv, Key, PyTree, Space, StepResult

_WORLD = "world_state"  # key of the global state among JaxMARL's observations; all other keys are agents
_NEVER = 2**30


def make_jaxmarl(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes games of JaxMARL; options: `max_episode_steps`, and arguments of JaxMARL's class. Raises InputError."""
    with contextlib.redirect_stdout(io.StringIO()):  # the import prints
        jaxmarl = import_suite("jaxmarl")
    if name not in jaxmarl.registered_envs:
        raise unknown(f"env.id jaxmarl:{name}: JaxMARL has no such environment", name, jaxmarl.registered_envs)
    limit = options.pop("max_episode_steps", None)
    try:
        env = jaxmarl.make(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: jaxmarl:{name}: {e}") from e
    return make(env, cfg.num_envs, limit, convert_space, state=state)


def make(env: Any, num_envs: int, limit: int | None, space: Any, *, state: bool = False) -> JaxEnv:
    """Makes games of a JaxMARL environment.

    Args:
      num_envs: number of games.
      limit: steps of a game; None: the environment's `max_steps`, if it has one.
      space: function from JaxMARL's spaces to jrl's.
      state: whether observations get an item `state`, as in `jrl.envs.multi_agent.build`: see `_find_state`.
    Raises:
      InputError: `state`, but observations have such an item.
    """
    agents = tuple(env.agents)
    own = [(space(env.observation_space(agent)), space(env.action_space(agent))) for agent in agents]
    limit = getattr(env, "max_steps", None) if limit is None else check_time_limit(limit)
    unlimited = env
    if limit is not None and hasattr(env, "max_steps"):
        env, unlimited = copy.copy(env), copy.copy(env)
        env.max_steps, unlimited.max_steps = limit, _NEVER
    groups = kinds(own) or (tuple(range(len(agents))),)
    firsts = [(agents[kind[0]], own[kind[0]][1]) for kind in groups]
    masked = [isinstance(action, Discrete) and _has_mask(env, agent, action) for agent, action in firsts]
    with_mask = lambda i: add_mask_space(own[i][0], (own[i][1].n,))
    observed = {i: with_mask(i) if has else own[i][0] for kind, has in zip(groups, masked) for i in kind}
    parts = tuple(
        _Kind(kind, own[kind[0]][0], observed[kind[0]], has) for kind, has in zip(groups, masked, strict=True)
    )
    get_state = None
    if state:
        state_space, get_state = _find_state(env, agents)
        observed = {i: add_state_space(own_space, state_space) for i, own_space in observed.items()}
    observation, action, found = combine_agents([(observed[i], own[i][1]) for i in range(len(agents))])
    spec = EnvSpec(observation, action, num_envs * len(agents), limit, agents=agents, kinds=found)
    games = _Games(env, unlimited, spec, parts, get_state)
    return JaxEnv(spec, games.reset, games.step)


class _Kind(NamedTuple):
    """Agents of equal spaces."""

    numbers: tuple[int, ...]
    observation: Space  # observation space of one agent
    with_mask: Space  # observation space with the mask
    has_mask: bool  # whether observations get an action mask


@dataclasses.dataclass(frozen=True)
class _Games:
    """Games of a JaxMARL environment that step synchronously."""

    env: Any
    unlimited: Any  # copy of `env` without a time limit
    spec: EnvSpec
    kinds: tuple[_Kind, ...]
    get_state: Callable[[Any, PyTree], Array] | None  # second result of `_find_state`; None: no global state

    def reset(self, key: Key) -> tuple[GamesState, PyTree]:
        inner, obs = self._reset(key)
        num_envs, size = self.spec.games, len(self.spec.agents)
        state = GamesState(inner, jnp.zeros(num_envs, jnp.int32), jnp.ones((num_envs, size), bool))
        # copies: the caller donates state and observation, which must not share a buffer
        return state, jax.tree.map(lambda x: jnp.copy(x.reshape(-1, *x.shape[2:])), obs)

    def step(self, state: GamesState, action: PyTree, key: Key) -> tuple[GamesState, StepResult]:
        check_action(self.spec.action, columns(self.spec), action)  # while tracing: shape and dtype
        given = self._by_agent(action)
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, self.spec.games)
        counted = count_step(state.elapsed, self.spec.max_episode_steps)
        obs, inner, rewards, ends, _ = jax.vmap(self.env.step_env)(keys, state.inner, given)
        if self.unlimited is not self.env:
            ends = jax.vmap(self.unlimited.step_env)(keys, state.inner, given)[3]
        moved, fresh = (inner, self._observe(obs, inner)), counted[0]
        # cond: most steps reset no environment
        inner, obs = jax.lax.cond(fresh.any(), lambda: select(fresh, self._reset(reset_key), moved), lambda: moved)
        ended = self._stack(ends).astype(bool) | jnp.asarray(ends["__all__"], bool)[:, None]
        return end_step(state.there, counted, inner, obs, self._stack(rewards), ended)

    def _reset(self, key: Key) -> tuple[PyTree, PyTree]:
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(key, self.spec.games))
        return inner, self._observe(obs, inner)

    def _observe(self, obs: dict[str, Any], inner: PyTree) -> PyTree:
        """Returns observations [games, A, *]; with several kinds a tuple by kind."""
        parts = []
        state = None if self.get_state is None else jax.vmap(self.get_state)(obs, inner)
        for kind in self.kinds:
            own = self._stack(obs, kind.numbers)
            part = map_leaves(lambda leaf, x: x.astype(leaf.dtype), kind.observation, own)
            if kind.has_mask:
                mask = self._stack(jax.vmap(self.env.get_avail_actions)(inner), kind.numbers) != 0
                part = {**(part if isinstance(kind.observation, Dict) else {"obs": part}), ACTION_MASK: mask}
            parts.append(part if state is None else add_state(kind.with_mask, part, state))
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

    def _stack(self, by_agent: dict[str, Any], numbers: Iterable[int] | None = None) -> PyTree:
        """Stacks JaxMARL's dict by agent, leaves [games, *], to [games, A, *]; `numbers` selects agents."""
        named = self.spec.agents if numbers is None else [self.spec.agents[i] for i in numbers]
        return jax.tree.map(lambda *x: jnp.stack(x, 1), *(by_agent[agent] for agent in named))


def _has_mask(env: Any, agent: str, action: Discrete) -> bool:
    """Returns whether the environment has an action mask with one entry per action."""
    try:
        shapes = jax.eval_shape(lambda key: env.get_avail_actions(env.reset(key)[1]), jax.random.key(0))
    except NotImplementedError:  # JaxMARL's base class raises it for environments without masks
        return False
    return agent in shapes and shapes[agent].shape == (action.n,)


def _find_state(env: Any, agents: tuple[str, ...]) -> tuple[Box, Callable[[Any, PyTree], Array]]:
    """Returns the space of the global state, flat f32, and the function from a game's observations and state to it.

    The environment provides it as `world_state` among its observations or by `get_world_state`. Otherwise all agents'
    observations are concatenated, as JaxMARL's own MAPPO does.
    """

    def view(obs: Mapping[str, Any], inner: PyTree) -> Array:
        if _WORLD in obs:
            whole = obs[_WORLD]
        elif hasattr(env, "get_world_state"):
            whole = env.get_world_state(inner)  # one array, or several
        else:  # a list: dict leaves are sorted by name, agent_10 before agent_2
            whole = [obs[agent] for agent in agents]
        return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(whole)])

    return Box(jax.eval_shape(lambda key: view(*env.reset(key)), jax.random.key(0)).shape), view
