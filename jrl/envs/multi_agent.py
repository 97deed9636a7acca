"""Multi-agent environments written in JAX: the dynamics of one step, and the reset contract around them.

Of G environments with A agents each, agent k of environment i has index i * A + k of B = G * A. A definition's arrays
[G, A, *] are thus reshaped to the batch without a copy.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs.jax_env import ENDED, check_arrays, check_step, count_step, find_ends
from jrl.envs.spec import check_action, make_box
from jrl.gym.exceptions import format_definition
from jrl.ops import random
from jrl.spaces import STATE, combine_agents, elements
from jrl.spaces import columns as columns_of
from jrl.types import Array, Box, Dict, EnvSpec, InputError, JaxEnv, Key, PyTree, Several, Space, StepResult, Tuple


class MultiDefinition(NamedTuple):
    """Definition of a multi-agent environment: functions of G environments of A agents at once.

    `draws` [num_draws, G] f32 are uniform numbers in [0, 1), the only randomness. State leaves are [G, ...]. Actions
    have the structure of the action space, arrays [G, A, *]; actions of absent agents are ignored.

    Agents with different spaces list them in dicts by agent. Agents with equal spaces form a kind (`EnvSpec.kinds`, in
    the order of the first agent of each); actions and observations are tuples by kind, arrays [G, A_k, *].

    An agent is present until it ends: `step` reports the end, or `present` becomes False. An agent may join again
    later, but not on the very next step, which reports its end. The game is over when no agent is present. Observations
    of absent agents must be finite.
    """

    agents: tuple[str, ...]  # A names
    observation: Space | Mapping[str, Space]  # one space for all agents, or a dict by agent
    action: Space | Mapping[str, Space]  # one space for all agents, or a dict by agent
    max_episode_steps: int | None  # time limit of a game, which truncates all present agents
    num_draws: int
    reset: Callable[..., PyTree]  # draws -> state
    # (state, actions, draws) -> state, reward [G, A], true ends [G, A] bool
    step: Callable[..., tuple[PyTree, Array, Array]]
    observe: Callable[..., PyTree]  # state -> [G, A, *], or by kind
    present: Callable[..., Array] | None = None  # state -> [G, A] bool, agents that act next; None: all, until they end
    state: Space | None = None  # space of the global state; None: no global state
    view: Callable[..., PyTree] | None = None  # state -> global state [G, *]
    # state of one game, numpy leaves without the axis [G] -> picture [H, W, 3] u8; None: it cannot be drawn
    draw: Callable[[PyTree], np.ndarray] | None = None
    fps: float = 10.0  # natural speed of the pictures, in steps per second


@struct.dataclass
class GamesState:
    """State of G environments of A agents."""

    inner: PyTree  # the definition's own state, leaves [G, ...]
    elapsed: Array  # [G] i32, steps since the reset; -1 after the game is over: the next step resets
    there: Array  # [G, A] bool: agents that act on the next step; all False if that step resets


def build(definition: MultiDefinition, num_envs: int, *, state: bool = False) -> JaxEnv:
    """Returns G environments of a definition: a batch of G * A, as in `jrl.types.StepResult` and `Several`.

    Steps of absent agents have reward 0 and no flags; their action is ignored. The step after a game is over resets it:
    all agents are absent, and observations are the first of the next game.

    Args:
      num_envs: G.
      state: whether each agent's observation has one more item, `state`: the definition's global state. An observation
        that is not a Dict becomes its item `obs`.
    Raises:
      InputError: no agents or a duplicate name, spaces by agent with wrong names, `state` without a global state, or an
        observation that has an item `state`.
    """
    agents, count = definition.agents, len(definition.agents)
    if not agents or len(set(agents)) < count:
        raise InputError(f"MultiDefinition.agents: expected one name or more, each once, got {agents}: fix the names")
    each = [
        (_agent_space("observation", definition, agent), _agent_space("action", definition, agent)) for agent in agents
    ]
    observation, action_space, kinds = combine_agents(each)
    of_game = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape), x.dtype),
        elements(observation, tuple(map(len, kinds)) or count),
    )

    def observe(inner: PyTree) -> PyTree:
        obs = definition.observe(inner)
        check_arrays(f"MultiDefinition.observe{format_definition(definition.observe)}", obs, of_game)
        return obs

    observe_all: Callable[[PyTree], PyTree] = observe
    if state:
        observation, observe_all = _observe_with_state(definition, observation, kinds, observe, num_envs)
    num_columns = num_envs * count
    limit = definition.max_episode_steps
    spec = EnvSpec(observation, action_space, num_columns, limit, agents=agents, kinds=kinds)
    # for arrays of all agents, or of one kind
    columns = lambda tree: jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)
    of_games = lambda tree: jax.tree.map(lambda x: x.reshape(num_envs, x.shape[0] // num_envs, *x.shape[1:]), tree)

    def present(inner: PyTree) -> Array | None:
        if definition.present is None:
            return None
        return _check_shape("present", definition.present(inner), num_envs, count)

    def draw(key: Key) -> Array:
        return random.uniform(key, (definition.num_draws, num_envs))

    def reset(key: Key) -> tuple[GamesState, PyTree]:
        inner = definition.reset(draw(key))
        here = present(inner)
        there = jnp.ones((num_envs, count), bool) if here is None else jnp.copy(here)
        # a copy: the caller donates state and observation, which must not share a buffer
        obs = jax.tree.map(jnp.copy, columns(observe_all(inner)))
        return GamesState(inner, jnp.zeros((num_envs,), jnp.int32), there), obs

    def step(games: GamesState, action: PyTree, key: Key) -> tuple[GamesState, StepResult]:
        check_action(spec.action, columns_of(spec), action)  # while tracing: shape and dtype
        draws = draw(key)  # each environment either resets or steps, so both may use the same draws
        fresh, elapsed, at_limit = count_step(games.elapsed, definition.max_episode_steps)
        stepped = definition.step(games.inner, of_games(action), draws)
        name = f"MultiDefinition.step{format_definition(definition.step)}"
        inner, reward, ended = check_step(name, games.inner, fresh, definition.reset(draws), stepped)
        reward, ended = (_check_shape("step", x, num_envs, count) for x in (reward, ended))
        counted = fresh, elapsed, at_limit
        return end_step(games.there, counted, inner, observe_all(inner), reward, ended, present(inner))

    def picture(games: GamesState, number: int) -> np.ndarray:
        assert definition.draw is not None
        return definition.draw(jax.tree.map(lambda x: np.asarray(x[number]), games.inner))

    return JaxEnv(spec, reset, step, draw=None if definition.draw is None else picture, fps=definition.fps)


def end_step(
    acted: Array,
    counted: tuple[Array, Array, Array],
    inner: PyTree,
    obs: PyTree,
    reward: Array,
    ended: Array,
    here: Array | None = None,
) -> tuple[GamesState, StepResult]:
    """Returns the state and the result of a step of G games under the contract of `jrl.types.Several`.

    Args:
      acted: [G, A] bool, agents that acted on this step.
      counted: result of `count_step` [G].
      inner: state after the step, or after the reset of a fresh game.
      obs: its observations [G, A, *].
      reward, ended: [G, A], true ends; ignored for agents that did not act.
      here: [G, A] bool, present agents; None: all, until they end.
    """
    fresh, elapsed, at_limit = counted
    if here is not None:
        ended = ended | ~here
    terminated, truncated, reward = find_ends(~acted, ended, at_limit[:, None] & acted, reward)
    if here is None:
        here = (acted & ~ended) | fresh[:, None]
    over = (at_limit | ~here.any(-1)) & ~fresh
    there = here & ~terminated & ~over[:, None]
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)
    several = Several(flat(~acted), over, flat(there))
    result = StepResult(flat(obs), flat(reward), flat(terminated), flat(truncated), several=several)
    return GamesState(inner, jnp.where(over, ENDED, elapsed), there), result


def acting_next(state: PyTree) -> Array | None:
    """Returns the agents that act next [B] bool, from the state of wrapped environments; None: not made by `build`."""
    is_games = lambda x: isinstance(x, GamesState)
    found = next((x for x in jax.tree.leaves(state, is_leaf=is_games) if is_games(x)), None)
    return None if found is None else found.there.reshape(-1)


def _check_shape(name: str, x: Array, num_envs: int, count: int) -> Array:
    """Returns `x`. Raises InputError, while tracing, unless it is [G, A]: it would be broadcast silently."""
    if x.shape != (num_envs, count):
        raise InputError(
            f"MultiDefinition.{name}: expected arrays of shape {(num_envs, count)}, environments and agents, got "
            f"{x.shape}: return one number per agent"
        )
    return x


def _agent_space(what: str, definition: MultiDefinition, agent: str) -> Space:
    """Returns the space of one agent."""
    given: Space | Mapping[str, Space] = getattr(definition, what)
    if not isinstance(given, Mapping):
        return given
    if set(given) != set(definition.agents):
        raise InputError(
            f"MultiDefinition.{what}: expected one space, or one for each of {', '.join(definition.agents)}, got "
            f"spaces of {', '.join(given) or 'no agent'}: name each agent once"
        )
    return given[agent]


def _observe_with_state(
    definition: MultiDefinition,
    observation: Space,
    kinds: tuple[tuple[int, ...], ...],
    own_observe: Callable[[PyTree], PyTree],
    num_envs: int,
) -> tuple[Space, Callable[[PyTree], PyTree]]:
    """Returns the observation space and function of agents that also observe the global state."""
    space, view = definition.state, definition.view
    if space is None or view is None:
        raise InputError(
            f"multi_agent.{STATE}: the environment has no global state: set `state` and `view` of its MultiDefinition"
        )
    each = observation.items if kinds and isinstance(observation, Tuple) else (observation,)
    with_state = tuple(add_state_space(own, space) for own in each)

    def observe(inner: PyTree) -> PyTree:
        obs, seen = own_observe(inner), view(inner)
        check_arrays(f"MultiDefinition.view{format_definition(view)}", seen, elements(space, num_envs))
        if not kinds:
            return add_state(observation, obs, seen)
        return tuple(add_state(own, x, seen) for own, x in zip(each, obs, strict=True))

    return Tuple(with_state) if kinds else with_state[0], observe


def add_state_space(own: Space, state: Space) -> Dict:
    """Returns an agent's observation space with the global state; a space that is not a Dict becomes its item `obs`.

    Raises:
      InputError: the observation has such an item already.
    """
    items = own.items if isinstance(own, Dict) else (("obs", own),)
    if STATE in dict(items):
        raise InputError(f"multi_agent.{STATE}: the observation has an item {STATE} already: rename that item")
    return Dict((*items, (STATE, state)))


def add_state(own: Space, obs: PyTree, view: PyTree) -> PyTree:
    """Returns observations, leaves [G, A, *] of the space `own`, with the global state, leaves [G, *]."""
    count = jax.tree.leaves(obs)[0].shape[1]
    repeated = lambda x: jnp.repeat(x[:, None], count, axis=1)
    return {**(obs if isinstance(own, Dict) else {"obs": obs}), STATE: jax.tree.map(repeated, view)}


def join_spaces(observation: Box, num_agents: int) -> Box:
    """Returns the space of all agents' observations concatenated, flat: [G, A, *] as [G, A * n]."""
    low, high = (np.tile(bound.reshape(-1), num_agents) for bound in observation.bounds())
    return make_box((num_agents * math.prod(observation.shape),), low, high, observation.dtype)


def check_num_agents(value: object, id: str, least: int) -> int:
    """Returns the option `num_agents`. Raises InputError unless it is an integer of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(
            f"env.options.num_agents: expected an integer >= {least} for {id}, got {value!r}: use {least} or more"
        )
    return value
