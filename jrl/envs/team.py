"""A team: all agents of an environment as one, which sees what they see, acts for them and earns what they earn.

A joint policy (VDN, QMIX, PPO over the agents' choices at once) learns from it like from any other environment.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.envs import spec as env_spaces
from jrl.envs.wrappers import Behind
from jrl.spaces import ACTION_MASK, AGENTS, PRESENT, STATE
from jrl.types import (
    Array,
    AsyncEnv,
    Box,
    Dict,
    Discrete,
    Env,
    EnvSpec,
    InputError,
    JaxEnv,
    Key,
    MultiBinary,
    MultiDiscrete,
    PyTree,
    Several,
    Space,
    StepResult,
)


def team(env: JaxEnv | Env, *, agents: tuple[str, ...] | None = None) -> JaxEnv | Env:
    """Makes of an environment with several agents one with a single agent, their team.

    Its B are the games. An observation is a dict:

        agents       the agents' observations, each array [A, *]; their choices one after the other (`spaces.stacked`)
        state        the leaf `state` of their observations, which all of them share, once; only where they have one
        present      [A] i8, 1 for agents that are there
        action_mask  [A * n], the agents' masks one after the other; only where they have them

    An action is the agents' one after the other: MultiDiscrete([n] * A) of Discrete ones, of a Box of d elements one of
    A * d. The reward is the sum over the agents. A game that is over is truncated if the time limit cut off an agent
    that was there until then, else it is terminated; an agent that ends before the others ends nothing.

    An agent that has ended is not `present`. Whether one is born is known when it acts first: one that comes late is
    taken for present at the first step of a game and is present from its second step on. What an absent agent sees
    stands as it is; where its mask allows nothing, it allows everything.

    Args:
      env: with `spec.agents`, all of one observation and action space.
      agents: names of those in the team; None: all. The order on the axis A is the environment's.
    Returns:
      An environment of the same kind, without `spec.agents`.
    Raises:
      InputError: `agents` are not all that there are, or have different spaces, actions that cannot be put together, or
        an environment that does not have several agents, or whose columns do not step together.
    """
    _check(env, agents)
    spec, view = _spec(env.spec), _view(env.spec)
    if not isinstance(env, JaxEnv):
        return _Team(env, spec, view)

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key)
        return state, view(jnp, obs, None)

    def step(state: PyTree, action: Array, key: Key) -> tuple[PyTree, StepResult]:
        env_spaces.check_action(spec.action, spec.num_envs, action)
        state, result = env.step(state, _to_columns(env.spec, action), key)
        return state, _joined(jnp, env.spec, view, result)

    return env._replace(spec=spec, reset=reset, step=step)


class _Team(Behind):
    """A team of a host environment."""

    def __init__(self, env: Any, spec: EnvSpec, view: Callable[..., PyTree]):
        super().__init__(env, spec)
        self._view = view

    def reset(self) -> PyTree:
        return self._view(np, self._env.reset(), None)

    def step(self, action: Array) -> StepResult:
        action = env_spaces.on_host(action)
        env_spaces.check_action(self.spec.action, self.spec.num_envs, action)
        result = self._env.step(_to_columns(self._env.spec, action))
        return _joined(np, self._env.spec, self._view, result)


# ---------------------------------------------------------------- spaces


def _check(env: Any, agents: tuple[str, ...] | None) -> None:
    """Raises InputError where `env` cannot be made a team of."""
    spec, key = env.spec, "multi_agent.group"
    if not spec.agents:
        raise InputError(f"{key}: expected an environment with several agents, got one with a single one: leave it out")
    if isinstance(env, AsyncEnv):
        raise InputError(
            f"{key}: expected agents that step together, got environments that do not wait for each other: leave out "
            "env.batch_size and env.batch_wait_ms"
        )
    if agents is not None and sorted(agents) != sorted(spec.agents):
        raise InputError(
            f"{key}: expected one team of all agents, {', '.join(spec.agents)}, got {', '.join(agents) or 'none'}: "
            "name each of them once"
        )
    if spec.kinds:
        first, other = (spec.agents[kind[0]] for kind in spec.kinds[:2])
        raise InputError(
            f"{key}: expected agents of equal spaces, but those of {first} and {other} differ: leave it out, and each "
            "kind of agents follows a policy of its own"
        )
    if not isinstance(spec.action, Discrete | MultiDiscrete | Box):
        raise InputError(
            f"{key}: expected agents with Discrete, MultiDiscrete or Box actions, got {spec.action}: leave it out, and "
            "each agent acts for itself"
        )


def _spec(spec: EnvSpec) -> EnvSpec:
    """The spec of a team of all agents."""
    count = len(spec.agents)
    return spec._replace(
        observation=observation(spec.observation, count),
        action=_actions(spec.action, count),
        num_envs=spec.games,
        env_action=None if spec.env_action is None else _actions(spec.env_action, count),
        env_observation=None,
        agents=(),
    )


def observation(space: Space, count: int) -> Dict:
    """Returns the observation space of a team of `count` agents with observations of `space`."""
    named = dict(space.items) if isinstance(space, Dict) else {}
    parts: list[tuple[str, Space]] = [(AGENTS, spaces.stacked(_own(space), count))]
    parts.append((PRESENT, MultiBinary((count,))))
    if STATE in named:
        parts.append((STATE, named[STATE]))
    if (mask := named.get(ACTION_MASK)) is not None:
        assert isinstance(mask, Box | MultiBinary)
        size = count * mask.shape[0]
        parts.append((ACTION_MASK, MultiBinary((size,), mask.dtype)))
    return Dict(tuple(parts))


def _own(space: Space) -> Space:
    """What an agent sees beside the state and its mask, one part alone for itself; the state where there is no more."""
    if not isinstance(space, Dict):
        return space
    rest = tuple((name, part) for name, part in space.items if name not in (STATE, ACTION_MASK))
    if len(rest) > 1:
        return Dict(rest)
    return rest[0][1] if rest else space[STATE]


def _actions(space: Space, count: int) -> Space:
    if not isinstance(space, Box):
        return spaces.stacked(space, count)
    low, high = (np.tile(bound.reshape(-1), count) for bound in space.bounds())
    return env_spaces.box(low.shape, low, high, space.dtype)


# ---------------------------------------------------------------- elements


def _to_columns(spec: EnvSpec, action: Array) -> Array:
    """Actions [B / A, *] of teams as those of the columns [B, *]."""
    assert isinstance(spec.action, Discrete | MultiDiscrete | Box)  # see `_check`
    return action.reshape(spec.num_envs, *spec.action.shape)


def _view(spec: EnvSpec) -> Callable[..., PyTree]:
    """(numpy or jax.numpy, the columns' observations [B, *], their StepResult or None) -> a team's [B / A, *]."""
    count, games, space = len(spec.agents), spec.games, spec.observation
    own, named = _own(space), dict(space.items) if isinstance(space, Dict) else {}

    def part(obs: PyTree) -> PyTree:
        if not named:
            return obs
        rest = {name: x for name, x in obs.items() if name not in (STATE, ACTION_MASK)}
        return rest if len(rest) > 1 else next(iter(rest.values()), obs.get(STATE))

    def view(xp: Any, obs: PyTree, result: StepResult | None) -> PyTree:
        gone, present = _standing(xp, result, games, count)
        stack = lambda leaf, x: x.reshape(games, *leaf.shape)
        seen = {
            AGENTS: spaces.map_leaves(stack, spaces.stacked(own, count), part(obs)),
            PRESENT: present.astype(np.int8),
        }
        if STATE in named:  # the same for all agents of a game
            first = lambda leaf, x: x.reshape(games, count, *leaf.shape)[:, 0]
            seen[STATE] = spaces.map_leaves(first, named[STATE], obs[STATE])
        if ACTION_MASK in named:
            mask = obs[ACTION_MASK].reshape(games, count, -1)
            anything = gone & ~(mask != 0).any(-1)
            seen[ACTION_MASK] = xp.where(anything[..., None], xp.ones_like(mask), mask).reshape(games, -1)
        return seen

    return view


def _standing(xp: Any, result: StepResult | None, games: int, count: int) -> tuple[Array, Array]:
    """(agents whose masks may allow nothing, agents that are present), both [B / A, A] bool, after a step."""
    if result is None:
        return xp.ones((games, count), bool), xp.ones((games, count), bool)
    assert result.several is not None
    by_game = lambda x: x.reshape(games, count)
    absent, over = by_game(result.several.absent), result.several.over[:, None]
    ended = by_game(result.terminated) | (by_game(result.truncated) & ~over)
    begun = absent.all(-1, keepdims=True)  # the first row of a game
    return absent | ended, begun | ~(absent | ended)


def _joined(xp: Any, spec: EnvSpec, view: Callable[..., PyTree], result: StepResult) -> StepResult:
    """A step of a team, of that of its agents' columns."""
    assert isinstance(result.several, Several)
    by_game = lambda x: x.reshape(spec.games, len(spec.agents))
    over = result.several.over
    truncated = over & by_game(result.truncated).any(-1)
    failed = None if result.failed is None else by_game(result.failed).any(-1)
    reward = by_game(result.reward).sum(-1)
    return StepResult(view(xp, result.obs, result), reward, over & ~truncated, truncated, failed)


__all__ = ["observation", "team"]
