"""Environments of several agents written in JAX: the dynamics of one step, and the reset contract around them.

Agents are columns: of G environments with A agents each, agent k of environment i has column i * A + k of B = G * A.
So what a definition says of all agents of an environment, arrays [G, A, *], are the columns without being moved.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs.jax_env import ENDED, check_arrays, ends, next_state, tick
from jrl.envs.spec import box, check_action
from jrl.gym.exceptions import place_of
from jrl.ops import random
from jrl.spaces import STATE, combine_agents, elements
from jrl.spaces import columns as columns_of
from jrl.types import Array, Box, Dict, EnvSpec, InputError, JaxEnv, Key, PyTree, Several, Space, StepResult, Tuple


class MultiDefinition(NamedTuple):
    """Definition of an environment of several agents: functions of G environments of A agents at once.

    `draws` [num_draws, G] f32 are uniform numbers in [0, 1), all the randomness there is. State leaves are [G, ...].
    Actions have the structure of the action space, arrays [G, A, *]; those of agents that are not there mean nothing.

    Agents of different spaces have them in dicts by agent. Those of equal ones are of a kind (`EnvSpec.kinds`, in the
    order of the first of each), and actions and what `observe` returns are tuples by kind, arrays [G, A_k, *] of the
    A_k agents of kind k.

    An agent is there until it ends: `step` says so, or `present`, which no longer has it. Where `present` has it again
    later, it is there again, though never on the very next step, which tells that it ended. The game is over when
    nobody is present. What `observe` shows of agents that are not there must be finite.
    """

    agents: tuple[str, ...]  # A names
    observation: Space | Mapping[str, Space]  # of each agent, or by agent
    action: Space | Mapping[str, Space]  # of each agent, or by agent
    max_episode_steps: int | None  # of a game: it truncates all who are there
    num_draws: int
    reset: Callable[..., PyTree]  # draws -> state
    # (state, actions, draws) -> state, reward [G, A], true ends [G, A] bool
    step: Callable[..., tuple[PyTree, Array, Array]]
    observe: Callable[..., PyTree]  # state -> [G, A, *], or by kind
    present: Callable[..., Array] | None = None  # state -> [G, A] bool, who is there to act; None: all, until they end
    state: Space | None = None  # of the view of all, of which an agent may see a part only; None: there is none
    view: Callable[..., PyTree] | None = None  # state -> [G, *] of that space
    # the state of one game, numpy leaves without their axis [G] -> picture [H, W, 3] u8; None: it cannot be drawn
    draw: Callable[[PyTree], np.ndarray] | None = None
    fps: float = 10.0  # steps per second at which pictures look natural


@struct.dataclass
class GamesState:
    """State of G environments of A agents."""

    inner: PyTree  # the definition's own state, leaves [G, ...]
    elapsed: Array  # [G] i32, steps since the reset; -1 after the game is over: the next step resets
    there: Array  # [G, A] bool: who acts on the next step; nobody where that resets


def build(definition: MultiDefinition, num_envs: int, *, state: bool = False) -> JaxEnv:
    """Makes G environments of a definition: a batch of G * A, as `jrl.types.StepResult` and `Several` say.

    Rows of an agent that is not there are absent: their action is ignored, reward 0, flags False. The step after a game
    is over resets it: on it all agents are absent, and observations are the first of the next game.

    Args:
      definition: the environments' functions.
      num_envs: G.
      state: the observation of every agent is a Dict with one more item, `state`: the definition's view, the same for
        all agents of an environment. An observation that is no Dict becomes its item `obs`.
    Raises:
      InputError: no agents or two of one name, spaces by agent that are not of those agents, `state` without a view, or
        an observation that has such an item.
    """
    agents, count = definition.agents, len(definition.agents)
    if not agents or len(set(agents)) < count:
        raise InputError(f"MultiDefinition.agents: expected one name or more, each once, got {agents}: mend the names")
    each = [(_of("observation", definition, agent), _of("action", definition, agent)) for agent in agents]
    observation, action_space, kinds = combine_agents(each)
    of_game = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape), x.dtype),
        elements(observation, tuple(map(len, kinds)) or count),
    )

    def observe(inner: PyTree) -> PyTree:
        obs = definition.observe(inner)
        check_arrays(f"MultiDefinition.observe{place_of(definition.observe)}", obs, of_game)
        return obs

    shown: Callable[[PyTree], PyTree] = observe
    if state:
        observation, shown = _with_state(definition, observation, kinds, observe, num_envs)
    num_columns = num_envs * count
    limit = definition.max_episode_steps
    spec = EnvSpec(observation, action_space, num_columns, limit, agents=agents, kinds=kinds)
    # of all agents, or of one kind of them
    columns = lambda tree: jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)
    of_games = lambda tree: jax.tree.map(lambda x: x.reshape(num_envs, x.shape[0] // num_envs, *x.shape[1:]), tree)

    def present(inner: PyTree) -> Array | None:
        if definition.present is None:
            return None
        return _checked("present", definition.present(inner), num_envs, count)

    def draw(key: Key) -> Array:
        return random.uniform(key, (definition.num_draws, num_envs))

    def reset(key: Key) -> tuple[GamesState, PyTree]:
        inner = definition.reset(draw(key))
        here = present(inner)
        there = jnp.ones((num_envs, count), bool) if here is None else jnp.copy(here)
        # a copy: the caller donates state and observation, which must not share a buffer
        obs = jax.tree.map(jnp.copy, columns(shown(inner)))
        return GamesState(inner, jnp.zeros((num_envs,), jnp.int32), there), obs

    def step(games: GamesState, action: PyTree, key: Key) -> tuple[GamesState, StepResult]:
        check_action(spec.action, columns_of(spec), action)  # while tracing: shape and dtype
        draws = draw(key)  # an environment uses them to reset or to step, never for both
        fresh, elapsed, at_limit = tick(games.elapsed, definition.max_episode_steps)
        stepped = definition.step(games.inner, of_games(action), draws)
        name = f"MultiDefinition.step{place_of(definition.step)}"
        inner, reward, ended = next_state(name, games.inner, fresh, definition.reset(draws), stepped)
        reward, ended = (_checked("step", x, num_envs, count) for x in (reward, ended))
        acted, here = games.there, present(inner)
        if here is not None:
            ended = ended | ~here
        terminated, truncated, reward = ends(~acted, ended, at_limit[:, None] & acted, reward)
        if here is None:
            here = (acted & ~ended) | fresh[:, None]
        over = (at_limit | ~here.any(-1)) & ~fresh
        there = here & ~terminated & ~over[:, None]
        told = Several(columns(~acted), over, columns(there))
        result = StepResult(
            columns(shown(inner)), columns(reward), columns(terminated), columns(truncated), several=told
        )
        return GamesState(inner, jnp.where(over, ENDED, elapsed), there), result

    def picture(games: GamesState, number: int) -> np.ndarray:
        assert definition.draw is not None
        return definition.draw(jax.tree.map(lambda x: np.asarray(x[number]), games.inner))

    return JaxEnv(spec, reset, step, draw=None if definition.draw is None else picture, fps=definition.fps)


def acting_next(state: PyTree) -> Array | None:
    """Returns the agents that act next, [B] bool, by the state of environments, in whatever wrappers have put it.

    None: the environments are not those of `build`.
    """
    is_games = lambda x: isinstance(x, GamesState)
    found = next((x for x in jax.tree.leaves(state, is_leaf=is_games) if is_games(x)), None)
    return None if found is None else found.there.reshape(-1)


def _checked(name: str, x: Array, num_envs: int, count: int) -> Array:
    """Returns `x`. Raises InputError, while tracing, unless it is [G, A]: it would be broadcast silently."""
    if x.shape != (num_envs, count):
        raise InputError(
            f"MultiDefinition.{name}: expected arrays of shape {(num_envs, count)}, environments and agents, got "
            f"{x.shape}: return one number for each agent"
        )
    return x


def _of(what: str, definition: MultiDefinition, agent: str) -> Space:
    """Returns the space of one agent."""
    given: Space | Mapping[str, Space] = getattr(definition, what)
    if not isinstance(given, Mapping):
        return given
    if set(given) != set(definition.agents):
        raise InputError(
            f"MultiDefinition.{what}: expected one space, or one for each of {', '.join(definition.agents)}, got those "
            f"of {', '.join(given) or 'nobody'}: name each agent once"
        )
    return given[agent]


def _with_state(
    definition: MultiDefinition,
    observation: Space,
    kinds: tuple[tuple[int, ...], ...],
    own_observe: Callable[[PyTree], PyTree],
    num_envs: int,
) -> tuple[Space, Callable[[PyTree], PyTree]]:
    """Returns the observation space and function of agents that see the global view, too."""
    space, view = definition.state, definition.view
    if space is None or view is None:
        raise InputError(
            f"multi_agent.{STATE}: the environment has no view of all that its agents could read: give its "
            "MultiDefinition a state and a view"
        )
    each = observation.items if kinds and isinstance(observation, Tuple) else (observation,)
    shown = tuple(with_state(own, space) for own in each)

    def observe(inner: PyTree) -> PyTree:
        obs, seen = own_observe(inner), view(inner)
        check_arrays(f"MultiDefinition.view{place_of(view)}", seen, elements(space, num_envs))
        if not kinds:
            return add_state(observation, obs, seen)
        return tuple(add_state(own, x, seen) for own, x in zip(each, obs, strict=True))

    return Tuple(shown) if kinds else shown[0], observe


def with_state(own: Space, state: Space) -> Dict:
    """Returns an agent's observation space with the view of all; one that is no Dict becomes its item `obs`.

    Raises:
      InputError: the observation has such an item already.
    """
    items = own.items if isinstance(own, Dict) else (("obs", own),)
    if STATE in dict(items):
        raise InputError(f"multi_agent.{STATE}: the observation has an item {STATE} of its own: give that another name")
    return Dict((*items, (STATE, state)))


def add_state(own: Space, obs: PyTree, view: PyTree) -> PyTree:
    """Returns what agents observe, leaves [G, A, *] of the space `own`, with the view of all, leaves [G, *]."""
    count = jax.tree.leaves(obs)[0].shape[1]
    repeated = lambda x: jnp.repeat(x[:, None], count, axis=1)
    return {**(obs if isinstance(own, Dict) else {"obs": obs}), STATE: jax.tree.map(repeated, view)}


def joined(observation: Box, num_agents: int) -> Box:
    """Returns the space of all agents' observations one after the other, flat: what `[G, A, *]` are as [G, A * n]."""
    low, high = (np.tile(bound.reshape(-1), num_agents) for bound in observation.bounds())
    return box((num_agents * math.prod(observation.shape),), low, high, observation.dtype)


def number_of_agents(value: object, id: str, least: int) -> int:
    """Returns `num_agents` as an option gives it. Raises InputError unless it is an integer of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(
            f"env.options.num_agents: {id} takes an integer >= {least}, got {value!r}: use {least} or more"
        )
    return value
