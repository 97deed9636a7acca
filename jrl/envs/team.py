"""Option `multi_agent.group`: agents of an environment that act as one, a team.

One team of all agents makes an environment with a single agent, which any algorithm can learn from: a joint policy
(VDN, QMIX, PPO over the agents' choices at once) reads all observations, chooses all actions and earns all rewards.

Other teams are agents beside those in no team. A team's name stands in the place of the first of its members. It
observes, does and earns what it would as the only one. It is there while any of its members is, and so has rows, ends
and masks of its own like any agent (`jrl.types.Several`): on rows on which none of them acted it is absent, and it ends
when the last of those who are there does, with a time limit if that cut one of them off. A member that ends before ends
nothing, one that comes later joins in, and a team with a returned member begins another episode.
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

Groups = Mapping[str, Sequence[str]]  # team -> the names of its members


def teams(spec: EnvSpec, *, groups: Groups) -> Transform:
    """Makes teams of agents: with one team of all agents as `team`, else as `grouped`."""
    members = list(groups.values())
    if len(members) == 1 and sorted(members[0]) == sorted(spec.agents):
        return team(spec, agents=tuple(members[0]))
    return grouped(spec, groups=groups)


# ---------------------------------------------------------------- one team of all agents


def team(spec: EnvSpec, *, agents: tuple[str, ...] | None = None) -> Transform:
    """Makes of environments with several agents environments with a single agent, their team.

    The B of the team are the games. An observation is a dict:

        agents       the agents' observations, each array [A, *]; choices in a row (`spaces.stack_space`)
        state        the leaf `state` of their observations, which all of them share, once; only where they have one
        present      [A] i8, 1 for agents that are there
        action_mask  [A * n], the agents' masks one after the other; only where they have them

    An action is the agents' one after the other: MultiDiscrete([n] * A) of Discrete ones, of a Box of d elements one of
    A * d. The reward is the sum over the agents. A game that is over is truncated if the time limit cut off an agent
    that was there until then, else it is terminated; an agent that ends before the others ends nothing.

    The agents that act on the next step are `present`, an agent that joins a game under way from its first action on.
    The observation of an absent agent is left as it is; a mask of its that allows nothing allows everything.

    Args:
      spec: with `agents`, all of one observation and action space.
      agents: names of those in the team; None: all.
    Raises:
      InputError: `agents` are not all that there are, or have different spaces, actions that cannot be put together, or
        an environment that does not have several agents.
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
            f"{key}: expected agents of equal spaces, but those of {first} and {other} differ: leave it out, and each "
            "kind of agents follows a policy of its own"
        )
    named, view = _grouped(spec, {"team": spec.agents})

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        return state, view.joined(xp, result, ends_with_game=True)._replace(several=None)

    return named._replace(spec=named.spec._replace(agents=()), observe=observe)


def _check_agents(spec: EnvSpec) -> None:
    if not spec.agents:
        raise InputError(
            "multi_agent.group: expected an environment with several agents, got one with a single one: leave it out"
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
    parts: list[tuple[str, Space]] = [(AGENTS, spaces.stack_space(_own(space), count))]
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
        return spaces.stack_space(space, count)
    low, high = (np.tile(bound.reshape(-1), count) for bound in space.bounds())
    return env_spaces.box(low.shape, low, high, space.dtype)


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


def grouped(spec: EnvSpec, *, groups: Groups) -> Transform:
    """Makes teams of some agents, beside those in no team.

    Args:
      spec: of several agents.
      groups: as `settings.multi_agent.check_group` wants them: members are of one kind, and in one team.
    Returns:
      A Transform whose spec has the teams and the agents in none. Teams of other sizes or spaces are of other kinds
      (`EnvSpec.kinds`). One team of all agents is an agent with a name; `team` gives it none.
    Raises:
      InputError: agents that cannot be put together.
    """
    _check_agents(spec)
    found, view = _grouped(spec, groups)
    return found._replace(observe=lambda xp, state, action, result: (state, view.joined(xp, result)))


def _grouped(spec: EnvSpec, groups: Groups) -> tuple[Transform, "_View"]:
    units = _units(spec, groups)
    each = [unit.spec for unit in units]
    kinds = spaces.kinds([one._replace(agents=()) for one in each])
    of_kinds = [each[kind[0]] for kind in kinds or [(0,)]]
    whole = lambda parts: Tuple(tuple(parts)) if kinds else parts[0]
    transformed = any(one.env_action is not None for one in of_kinds)
    shown = spec._replace(
        observation=whole([one.observation for one in of_kinds]),
        action=whole([one.action for one in of_kinds]),
        num_envs=spec.games * len(units),
        env_action=whole([one.env_action or one.action for one in of_kinds]) if transformed else None,
        env_observation=None,
        agents=tuple(unit.name for unit in units),
        kinds=kinds,
    )
    return Transform(shown, act=_to_columns(spec, shown, units)), _View(spec, units, shown)


class _Unit(NamedTuple):
    """An agent of the view: n agents of the environment that act as one, or one of them alone."""

    name: str
    members: tuple[int, ...]  # among the environment's agents
    kind: int  # theirs
    seats: tuple[int, ...]  # among the agents of that kind
    spec: EnvSpec  # of G environments with this agent alone
    is_team: bool


def _units(spec: EnvSpec, groups: Groups) -> tuple[_Unit, ...]:
    """Returns the agents of the view. Raises InputError: a team whose actions cannot be put together."""
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


def _to_columns(spec: EnvSpec, shown: EnvSpec, units: Sequence[_Unit]) -> Callable[[Any, PyTree], PyTree]:
    """Makes the function from (xp, actions of the view) to those of the environment's agents, whose spec is `spec`."""
    kinds = shown.groups
    place = {i: (k, j) for k, kind in enumerate(kinds) for j, i in enumerate(kind)}
    by_kind = spaces.by_kind(spec)

    def of_members(action: PyTree, i: int) -> PyTree:
        """Returns the actions [G, n, *] of the members of unit i."""
        unit, (k, j) = units[i], place[i]
        of_kind = spaces.parts_by_kind(shown, action)[k]
        mine = jax.tree.map(lambda x: x.reshape(-1, len(kinds[k]), *x.shape[1:])[:, j], of_kind)
        if not unit.is_team:
            return jax.tree.map(lambda x: x[:, None], mine)
        return mine.reshape(-1, len(unit.members), *element(by_kind[unit.kind].action).shape)

    def to_columns(xp: Any, action: PyTree) -> PyTree:
        found = []
        for k in range(len(by_kind)):
            own = [i for i, unit in enumerate(units) if unit.kind == k]
            order = np.argsort(np.concatenate([units[i].seats for i in own]))
            join = lambda *x, order=order: _take(xp.concatenate(x, 1), order).reshape(-1, *x[0].shape[2:])
            found.append(jax.tree.map(join, *(of_members(action, i) for i in own)))
        return spaces.from_parts(spec, found)

    return to_columns


class _Rows(NamedTuple):
    """One step of a unit's members, [G, n] bool each, of numpy or jax."""

    absent: Any
    terminated: Any
    truncated: Any
    there: Any  # who act on the next step


class _View:
    """Observations of the units, and the joining of their members' steps."""

    def __init__(self, spec: EnvSpec, units: Sequence[_Unit], shown: EnvSpec):
        self._spec, self._units, self._shown = spec, units, shown
        self._views = [joint_view(spaces.by_kind(spec)[unit.kind].observation, len(unit.members)) for unit in units]

    def joined(self, xp: Any, result: StepResult, *, ends_with_game: bool = False) -> StepResult:
        """Returns a step of the view's agents, made of one of the environment's.

        A team ends with its game, or, with other agents beside it, when nobody of it acts next.
        """
        told = result.several
        assert told is not None
        there = told.there
        if there is None:
            begun = self._by_game(told.absent).all(-1, keepdims=True)  # the first row of a game
            stays = ~(told.absent | result.terminated | result.truncated)
            there = (begun | self._by_game(stays)).reshape(-1)
        each = zip(*map(self._by_unit, (told.absent, result.terminated, result.truncated, there)), strict=True)
        rows = [_Rows(*columns) for columns in each]
        over = told.over if ends_with_game else None
        standing = (_standing(unit, own, over) for unit, own in zip(self._units, rows, strict=True))
        terminated, truncated, absent, present = zip(*standing, strict=True)
        obs = self._seen(xp, result.obs, absent, present)
        together = lambda parts: xp.stack(parts, -1).reshape(-1)
        any_of = lambda x: together([part.any(-1) for part in self._by_unit(x)])
        return StepResult(
            obs,
            together([part.sum(-1) for part in self._by_unit(result.reward)]),
            together(terminated),
            together(truncated),
            None if result.failed is None else any_of(result.failed),
            Several(together([one.absent.all(-1) for one in rows]), told.over, any_of(there)),
        )

    def _by_game(self, x: Array) -> Array:
        return x.reshape(-1, len(self._spec.agents))

    def _by_unit(self, x: Array) -> list[Array]:
        """Returns the members' part [G, n] of x [G * A], for each unit."""
        return [_take(self._by_game(x), unit.members) for unit in self._units]

    def _seen(self, xp: Any, obs: PyTree, absent: Sequence[Array], present: Sequence[Array]) -> PyTree:
        """Returns the observations of the view's agents, made of the environment's."""
        each: list[PyTree] = [None] * len(self._units)
        of_kinds = zip(self._spec.groups, spaces.parts_by_kind(self._spec, obs), strict=True)
        for k, (numbers, of_kind) in enumerate(of_kinds):
            for i, unit in enumerate(self._units):
                if unit.kind != k:
                    continue
                mine = jax.tree.map(partial(_of_seats, size=len(numbers), seats=unit.seats), of_kind)
                each[i] = self._views[i](xp, mine, absent[i], present[i]) if unit.is_team else mine
        join = lambda *x: xp.stack(x, 1).reshape(-1, *x[0].shape[1:])
        kinds = self._shown.groups
        return spaces.from_parts(self._shown, [jax.tree.map(join, *(each[i] for i in kind)) for kind in kinds])


def _of_seats(x: Array, size: int, seats: Sequence[int]) -> Array:
    """Returns the rows [G * n, *] of x [G * size, *] that belong to n seats of each game."""
    return _take(x.reshape(-1, size, *x.shape[1:]), seats).reshape(-1, *x.shape[1:])


def _take(x: Array, numbers: Sequence[int]) -> Array:
    """Returns x[:, numbers]; `x` itself, which costs nothing, if these are all in their order."""
    return x if list(numbers) == list(range(x.shape[1])) else x[:, np.asarray(numbers)]


def _standing(unit: _Unit, rows: _Rows, over: Array | None) -> tuple[Array, Array, Array, Array]:
    """Returns (terminated [G], truncated [G], members that have left, members that are present [G, n]) after a step.

    A team ends with its game if `over` [G] is given. Members that a time limit cuts off as the team ends are present in
    the observation from which is bootstrapped.
    """
    ended = rows.terminated | rows.truncated
    if not unit.is_team:
        return rows.terminated[:, 0], rows.truncated[:, 0], rows.absent | ended, rows.there
    ends = ended.any(-1) & ~rows.there.any(-1) if over is None else over
    cut = rows.truncated & ends[:, None]
    truncated = cut.any(-1)
    return ends & ~truncated, truncated, rows.absent | (ended & ~cut), rows.there | cut
