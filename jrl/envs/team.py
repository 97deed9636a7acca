"""Option `multi_agent.group`: teams, groups of agents that act as one agent.

One team of all agents makes an environment with a single agent for any algorithm: a joint policy (VDN, QMIX, PPO over
the joint action) gets all observations, chooses all actions and gets all rewards.

Other teams are agents beside the agents without a team. A team takes the index of its first member. It observes, does
and earns the same as a team of all agents. It is present while any member is present, so it has steps, ends and masks
like any agent (`jrl.types.Several`). It is absent on steps on which no member acted. It ends when its last present
member ends, by a time limit if the limit truncated a member. A member that ends earlier ends nothing. A member may join
later, and a team whose member joins again begins another episode.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.envs import spec as env_spaces
from jrl.envs.transform import State, Transform
from jrl.spaces import ACTION_MASK, AGENTS, PRESENT, STATE
from jrl.types import (
    Array,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    InputError,
    MultiBinary,
    MultiDiscrete,
    PyTree,
    Several,
    Space,
    StepResult,
    Tuple,
    element,
)

Groups = Mapping[str, Sequence[str]]  # team -> names of its members


def group_agents(spec: EnvSpec, *, groups: Groups) -> Transform:
    """Option `multi_agent.group`: `join_all_agents` for one team of all agents, else `join_groups`."""
    members = list(groups.values())
    if len(members) == 1 and sorted(members[0]) == sorted(spec.agents):
        return join_all_agents(spec, agents=tuple(members[0]))
    return join_groups(spec, groups=groups)


# ---------------------------------------------------------------- one team of all agents


def join_all_agents(spec: EnvSpec, *, agents: tuple[str, ...] | None = None) -> Transform:
    """Returns the Transform of a multi-agent environment to one with a single agent, the team of all agents.

    The team's B counts games. An observation is a dict:

        agents       the agents' observations, each array [A, *]; discrete ones are concatenated (`spaces.stack_space`)
        state        the leaf `state` of their observations, which all share, once; only if they have it
        present      [A] i8, 1 for agents that act next
        action_mask  [A * n], the agents' masks concatenated; only if they have masks

    An action concatenates the agents' actions: MultiDiscrete([n] * A) for Discrete ones, a Box of A * d elements for
    Boxes of d. The reward is the sum over agents. A game that is over is truncated if the time limit truncated a
    present agent, otherwise terminated. An agent that ends before the others ends nothing.

    An agent that joins during a game is `present` from its first action on. The observation of an absent agent stays as
    it is; its mask, if it allows nothing, becomes all ones.

    Args:
      spec: spec with `agents`, all with equal spaces.
      agents: names of the team's agents; None: all.
    Raises:
      InputError: `agents` are not all agents, spaces differ, actions cannot be joined, or the environment has one
        agent.
    """
    key = "multi_agent.group"
    _check_agents(spec)
    if agents is not None and sorted(agents) != sorted(spec.agents):
        raise InputError(
            f"{key}: expected one team of all agents, {', '.join(spec.agents)}, got {', '.join(agents) or 'none'}: "
            "name each of them once"
        )
    if spec.kinds:
        first, other = (spec.agents[kind[0]] for kind in spec.kinds[:2])
        raise InputError(
            f"{key}: expected agents of equal spaces, but the spaces of {first} and {other} differ: leave it out, so "
            "that each kind of agents has its own policy"
        )
    named, view = _build_units(spec, {"team": spec.agents})

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        return state, view.join(xp, result, ends_with_game=True)._replace(several=None)

    return named._replace(spec=named.spec._replace(agents=()), observe=observe)


def _check_agents(spec: EnvSpec) -> None:
    if not spec.agents:
        raise InputError(
            "multi_agent.group: expected an environment with several agents, got a single agent: leave it out"
        )


def joint_spec(spec: EnvSpec) -> EnvSpec:
    """Returns the spec of a team of all agents. Raises InputError: their actions cannot be joined."""
    if not isinstance(spec.action, Discrete | MultiDiscrete | Box):
        raise InputError(
            f"multi_agent.group: expected agents with Discrete, MultiDiscrete or Box actions, got {spec.action}: leave "
            "it out, so that each agent acts for itself"
        )
    count = len(spec.agents)
    return spec._replace(
        observation=joint_observation(spec.observation, count),
        action=_joint_action(spec.action, count),
        num_envs=spec.games,
        env_action=None if spec.env_action is None else _joint_action(spec.env_action, count),
        env_observation=None,
        agents=(),
    )


def joint_observation(space: Space, count: int) -> Dict:
    """Returns the observation space of a team of `count` agents with observations of `space`."""
    named = dict(space.items) if isinstance(space, Dict) else {}
    parts: list[tuple[str, Space]] = [(AGENTS, spaces.stack_space(_own_part(space), count))]
    parts.append((PRESENT, MultiBinary((count,))))
    if STATE in named:
        parts.append((STATE, named[STATE]))
    if (mask := named.get(ACTION_MASK)) is not None:
        assert isinstance(mask, Box | MultiBinary)
        size = count * mask.shape[0]
        parts.append((ACTION_MASK, MultiBinary((size,), mask.dtype)))
    return Dict(tuple(parts))


def _own_part(space: Space) -> Space:
    """Returns an agent's observation without state and mask; a single part is unwrapped.

    The state itself is returned if nothing else is left.
    """
    if not isinstance(space, Dict):
        return space
    rest = tuple((name, part) for name, part in space.items if name not in (STATE, ACTION_MASK))
    if len(rest) > 1:
        return Dict(rest)
    return rest[0][1] if rest else space[STATE]


def _joint_action(space: Space, count: int) -> Space:
    if not isinstance(space, Box):
        return spaces.stack_space(space, count)
    low, high = (np.tile(bound.reshape(-1), count) for bound in space.bounds())
    return env_spaces.make_box(low.shape, low, high, space.dtype)


def build_joint_view(space: Space, count: int) -> Callable[..., PyTree]:
    """Returns the function from the agents' observations to their teams'.

    Args:
      space: observation space of an agent.
      count: A.
    Returns:
      function of numpy or jax.numpy, observations [G * A, *], `absent` [G, A] bool (agents whose masks may allow
      nothing) and `present` [G, A] bool. It returns the teams' observations [G, *], for any number of games G.
    """
    own, named = _own_part(space), dict(space.items) if isinstance(space, Dict) else {}

    def part(obs: PyTree) -> PyTree:
        if not named:
            return obs
        rest = {name: x for name, x in obs.items() if name not in (STATE, ACTION_MASK)}
        return rest if len(rest) > 1 else next(iter(rest.values()), obs.get(STATE))

    def view(xp: Any, obs: PyTree, absent: Array, present: Array) -> PyTree:
        games = present.shape[0]
        stack = lambda leaf, x: x.reshape(games, *leaf.shape)
        seen = {
            AGENTS: spaces.map_leaves(stack, spaces.stack_space(own, count), part(obs)),
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


# ---------------------------------------------------------------- teams beside other agents


def join_groups(spec: EnvSpec, *, groups: Groups) -> Transform:
    """Returns the Transform that joins groups of agents into teams, beside the agents without a team.

    Args:
      groups: groups as checked by `config`: members are of one kind, and in one team only.
    Returns:
      A Transform whose spec has the teams and the agents without a team. Teams of different sizes or spaces are
      different kinds (`EnvSpec.kinds`). One team of all agents is a named agent here; `join_all_agents` gives it no
      name.
    Raises:
      InputError: agents that cannot be joined.
    """
    _check_agents(spec)
    found, view = _build_units(spec, groups)
    return found._replace(observe=lambda xp, state, action, result: (state, view.join(xp, result)))


def _build_units(spec: EnvSpec, groups: Groups) -> tuple[Transform, "_View"]:
    units = _list_units(spec, groups)
    each = [unit.spec for unit in units]
    kinds = spaces.kinds([unit_spec._replace(agents=()) for unit_spec in each])
    split_by_kind = [each[kind[0]] for kind in kinds or [(0,)]]
    whole = lambda parts: Tuple(tuple(parts)) if kinds else parts[0]
    transformed = any(kind.env_action is not None for kind in split_by_kind)
    joined = spec._replace(
        observation=whole([kind.observation for kind in split_by_kind]),
        action=whole([kind.action for kind in split_by_kind]),
        num_envs=spec.games * len(units),
        env_action=whole([kind.env_action or kind.action for kind in split_by_kind]) if transformed else None,
        env_observation=None,
        agents=tuple(unit.name for unit in units),
        kinds=kinds,
    )
    return Transform(joined, act=_split_actions(spec, joined, units)), _View(spec, units, joined)


class _Unit(NamedTuple):
    """A team of n agents, or one agent without a team."""

    name: str
    members: tuple[int, ...]  # agent indices
    kind: int  # index of the members' kind
    seats: tuple[int, ...]  # indices within that kind
    spec: EnvSpec  # spec of G environments with this unit alone
    is_team: bool


def _list_units(spec: EnvSpec, groups: Groups) -> tuple[_Unit, ...]:
    """Returns the teams and the agents without a team. Raises InputError: actions that cannot be joined."""
    kinds = spec.groups
    of_team = {agent: name for name, members in groups.items() for agent in members}
    members: dict[str, list[int]] = {}
    for i, agent in enumerate(spec.agents):
        members.setdefault(of_team.get(agent, agent), []).append(i)

    def unit(name: str, numbers: list[int]) -> _Unit:
        k = next(k for k, kind in enumerate(kinds) if numbers[0] in kind)
        seats, is_team = tuple(kinds[k].index(i) for i in numbers), spec.agents[numbers[0]] in of_team
        own = spaces.by_kind(spec)[k]._replace(num_envs=spec.games * len(numbers), agents=(name,) * len(numbers))
        own = joint_spec(own) if is_team else own
        return _Unit(name, tuple(numbers), k, seats, own._replace(agents=(name,), env_observation=None), is_team)

    return tuple(unit(name, numbers) for name, numbers in members.items())


def _split_actions(spec: EnvSpec, joined: EnvSpec, units: Sequence[_Unit]) -> Callable[[Any, State, PyTree], PyTree]:
    """Returns the function from (xp, state, units' actions) to the agents' actions, of `spec`."""
    kinds = joined.groups
    place = {i: (k, j) for k, kind in enumerate(kinds) for j, i in enumerate(kind)}
    by_kind = spaces.by_kind(spec)

    def of_members(action: PyTree, i: int) -> PyTree:
        """Returns the actions [G, n, *] of the members of unit i."""
        unit, (k, j) = units[i], place[i]
        of_kind = spaces.parts_by_kind(joined, action)[k]
        own = jax.tree.map(lambda x: x.reshape(-1, len(kinds[k]), *x.shape[1:])[:, j], of_kind)
        if not unit.is_team:
            return jax.tree.map(lambda x: x[:, None], own)
        return own.reshape(-1, len(unit.members), *element(by_kind[unit.kind].action).shape)

    def split(xp: Any, state: State, action: PyTree) -> PyTree:
        found = []
        for k in range(len(by_kind)):
            own = [i for i, unit in enumerate(units) if unit.kind == k]
            order = np.argsort(np.concatenate([units[i].seats for i in own]))
            join = lambda *x, order=order: _take(xp.concatenate(x, 1), order).reshape(-1, *x[0].shape[2:])
            found.append(jax.tree.map(join, *(of_members(action, i) for i in own)))
        return spaces.from_parts(spec, found)

    return split


class _Rows(NamedTuple):
    """One step of a unit's members, [G, n] bool each, numpy or jax."""

    absent: Any
    terminated: Any
    truncated: Any
    there: Any  # members that act on the next step


class _View:
    """Conversion of the agents' steps to the units' steps."""

    def __init__(self, spec: EnvSpec, units: Sequence[_Unit], joined: EnvSpec):
        self._spec, self._units, self._joined = spec, units, joined
        self._views = [
            build_joint_view(spaces.by_kind(spec)[unit.kind].observation, len(unit.members)) for unit in units
        ]

    def join(self, xp: Any, result: StepResult, *, ends_with_game: bool = False) -> StepResult:
        """Returns the units' step of an environment's step.

        A team ends with its game, or, beside other agents, when no member acts next.
        """
        several = result.several
        assert several is not None
        there = several.there
        if there is None:
            begins = self._by_game(several.absent).all(-1, keepdims=True)  # the first step of a game
            stays = ~(several.absent | result.terminated | result.truncated)
            there = (begins | self._by_game(stays)).reshape(-1)
        each = zip(*map(self._by_unit, (several.absent, result.terminated, result.truncated, there)), strict=True)
        rows = [_Rows(*flags) for flags in each]
        over = several.over if ends_with_game else None
        ends = (_find_ends(unit, own, over) for unit, own in zip(self._units, rows, strict=True))
        terminated, truncated, absent, present = zip(*ends, strict=True)
        stack = lambda parts: xp.stack(parts, -1).reshape(-1)
        any_of = lambda x: stack([part.any(-1) for part in self._by_unit(x)])
        return StepResult(
            self._join_observations(xp, result.obs, absent, present),
            stack([part.sum(-1) for part in self._by_unit(result.reward)]),
            stack(terminated),
            stack(truncated),
            None if result.failed is None else any_of(result.failed),
            Several(stack([own.absent.all(-1) for own in rows]), several.over, any_of(there)),
        )

    def _by_game(self, x: Array) -> Array:
        return x.reshape(-1, len(self._spec.agents))

    def _by_unit(self, x: Array) -> list[Array]:
        """Returns the members' part [G, n] of x [G * A], for each unit."""
        return [_take(self._by_game(x), unit.members) for unit in self._units]

    def _join_observations(self, xp: Any, obs: PyTree, absent: Sequence[Array], present: Sequence[Array]) -> PyTree:
        each: list[PyTree] = [None] * len(self._units)
        split_by_kind = zip(self._spec.groups, spaces.parts_by_kind(self._spec, obs), strict=True)
        for k, (numbers, of_kind) in enumerate(split_by_kind):
            for i, unit in enumerate(self._units):
                if unit.kind != k:
                    continue
                own = jax.tree.map(partial(_take_rows, size=len(numbers), seats=unit.seats), of_kind)
                each[i] = self._views[i](xp, own, absent[i], present[i]) if unit.is_team else own
        join = lambda *x: xp.stack(x, 1).reshape(-1, *x[0].shape[1:])
        kinds = self._joined.groups
        return spaces.from_parts(self._joined, [jax.tree.map(join, *(each[i] for i in kind)) for kind in kinds])


def _take_rows(x: Array, size: int, seats: Sequence[int]) -> Array:
    """Returns the rows [G * n, *] of x [G * size, *] that belong to n indices of each game."""
    return _take(x.reshape(-1, size, *x.shape[1:]), seats).reshape(-1, *x.shape[1:])


def _take(x: Array, numbers: Sequence[int]) -> Array:
    """Returns x[:, numbers]; `x` itself, without a copy, if these are all in order."""
    return x if list(numbers) == list(range(x.shape[1])) else x[:, np.asarray(numbers)]


def _find_ends(unit: _Unit, rows: _Rows, over: Array | None) -> tuple[Array, Array, Array, Array]:
    """Returns (terminated [G], truncated [G], absent members [G, n], present members [G, n]) after a step.

    A team ends with its game if `over` [G] is given. Members truncated as the team ends count as present in the
    observation that bootstraps the value.
    """
    ended = rows.terminated | rows.truncated
    if not unit.is_team:
        return rows.terminated[:, 0], rows.truncated[:, 0], rows.absent | ended, rows.there
    ends = ended.any(-1) & ~rows.there.any(-1) if over is None else over
    cut = rows.truncated & ends[:, None]
    truncated = cut.any(-1)
    return ends & ~truncated, truncated, rows.absent | (ended & ~cut), rows.there | cut
