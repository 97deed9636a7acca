"""A team: all agents of an environment as one, with all their observations, actions and the sum of their rewards.

A joint policy (VDN, QMIX, PPO over the agents' choices at once) learns from it like from any other environment.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.envs import spec as env_spaces
from jrl.envs.behind import View, through
from jrl.envs.multi_agent import acting_next
from jrl.spaces import ACTION_MASK, AGENTS, PRESENT, STATE
from jrl.types import (
    Array,
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
    element,
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

    The agents that act on the next step are `present`, an agent that joins a game under way from its first action on.
    The observation of an absent agent is left as it is; a mask of its that allows nothing allows everything.

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
    spec, view = joint_spec(env.spec), joint_view(env.spec.observation, len(env.spec.agents))

    def first(xp: Any, obs: PyTree, there: Array | None) -> PyTree:
        everybody = xp.ones((env.spec.games, len(env.spec.agents)), bool)
        return view(xp, obs, everybody, everybody if there is None else there.reshape(everybody.shape))

    return shown(
        env,
        Joint(
            spec,
            to_columns=lambda xp, action: action.reshape(-1, *element(env.spec.action).shape),
            first=first,
            joined=lambda xp, result: _joined(xp, env.spec, view, result),
        ),
    )


class Joint(NamedTuple):
    """Functions that join the agents of an environment to a team. `xp` is numpy or jax.numpy."""

    spec: EnvSpec  # of what they become
    to_columns: Callable[[Any, PyTree], PyTree]  # (xp, actions in that spec) -> the columns' actions
    # (xp, the columns' observations after a reset, agents that act next, [B] bool, or None: all) -> those in that spec
    first: Callable[[Any, PyTree, Array | None], PyTree]
    joined: Callable[[Any, StepResult], StepResult]  # (xp, a step of the columns) -> that in that spec


def shown(env: JaxEnv | Env, joint: Joint) -> JaxEnv | Env:
    """Returns `env` with its agents joined."""
    spec, sizes = joint.spec, spaces.columns(joint.spec)
    if not isinstance(env, JaxEnv):
        return through(env, _Joint(joint, env))

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key)
        return state, joint.first(jnp, obs, acting_next(state))

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, StepResult]:
        env_spaces.check_action(spec.action, sizes, action)
        state, result = env.step(state, joint.to_columns(jnp, action), key)
        return state, joint.joined(jnp, result)

    return env._replace(spec=spec, reset=reset, step=step)


class _Joint(View):
    """Environments with their agents joined."""

    def __init__(self, joint: Joint, env: Any):
        super().__init__(joint.spec)
        self._joint, self._env = joint, env

    def first(self, obs: PyTree) -> PyTree:
        return self._joint.first(np, obs, getattr(self._env, "there", None))

    def taken(self, action: PyTree, rows: Array | None) -> PyTree:
        action, games = env_spaces.on_host(action), self.spec.games if rows is None else len(rows)
        env_spaces.check_action(self.spec.action, spaces.columns(self.spec, games), action)
        return self._joint.to_columns(np, action)

    def told(self, result: StepResult, rows: Array | None) -> StepResult:
        return self._joint.joined(np, result)


# ---------------------------------------------------------------- spaces


def check_agents(env: Any) -> None:
    """Raises InputError where `env` does not have several agents."""
    if not env.spec.agents:
        raise InputError(
            "multi_agent.group: expected an environment with several agents, got one with a single one: leave it out"
        )


def _check(env: Any, agents: tuple[str, ...] | None) -> None:
    """Raises InputError where `env` cannot be made a team of."""
    spec, key = env.spec, "multi_agent.group"
    check_agents(env)
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


def joint_spec(spec: EnvSpec) -> EnvSpec:
    """Returns the spec of a team of all agents. Raises InputError: their actions cannot be put together."""
    if not isinstance(spec.action, Discrete | MultiDiscrete | Box):
        raise InputError(
            f"multi_agent.group: expected agents with Discrete, MultiDiscrete or Box actions, got {spec.action}: leave "
            "it out, and each agent acts for itself"
        )
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
    """Returns what an agent observes beside the state and its mask: one part by itself, without any the state."""
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


def joint_view(space: Space, count: int) -> Callable[..., PyTree]:
    """Makes the function from what the agents of teams see to what their teams do.

    Args:
      space: observation space of an agent.
      count: A.
    Returns:
      (numpy or jax.numpy, the agents' observations [G * A, *], `absent` [G, A] bool, agents whose masks may allow
      nothing, `present` [G, A] bool) -> the teams' observations [G, *], of any number of games G.
    """
    own, named = _own(space), dict(space.items) if isinstance(space, Dict) else {}

    def part(obs: PyTree) -> PyTree:
        if not named:
            return obs
        rest = {name: x for name, x in obs.items() if name not in (STATE, ACTION_MASK)}
        return rest if len(rest) > 1 else next(iter(rest.values()), obs.get(STATE))

    def view(xp: Any, obs: PyTree, absent: Array, present: Array) -> PyTree:
        games = present.shape[0]
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
            anything = absent & ~(mask != 0).any(-1)
            seen[ACTION_MASK] = xp.where(anything[..., None], xp.ones_like(mask), mask).reshape(games, -1)
        return seen

    return view


def _joined(xp: Any, spec: EnvSpec, view: Callable[..., PyTree], result: StepResult) -> StepResult:
    """Makes a step of the team of one of its agents."""
    assert isinstance(result.several, Several)
    by_game = lambda x: x.reshape(-1, len(spec.agents))
    over, absent = result.several.over, by_game(result.several.absent)
    cut = by_game(result.truncated)
    gone = absent | by_game(result.terminated) | (cut & ~over[:, None])
    truncated = over & cut.any(-1)
    stays = ~gone
    if (there := result.several.there) is None:
        present = stays | absent.all(-1, keepdims=True)  # nobody joins a game under way: all begin it
    else:  # nobody acts after the last row, from which those are bootstrapped whom the time limit cut off
        present = by_game(there) | (over[:, None] & stays)
    failed = None if result.failed is None else by_game(result.failed).any(-1)
    reward = by_game(result.reward).sum(-1)
    return StepResult(view(xp, result.obs, gone, present), reward, over & ~truncated, truncated, failed)


__all__ = ["Joint", "check_agents", "joint_spec", "joint_view", "observation", "shown", "team"]
