"""Groups of agents that act as one: each group is an agent, a team, and agents in no group stay alone.

The names of the view follow those of the environment: a team stands where the first of its members does. What a team
sees, does and earns is what it would as the only one (`jrl.envs.team`). It is there while any of its members is, and so
has rows, ends and masks of its own like any agent (`jrl.types.Several`): on rows on which none of them acted it is
absent, and it ends when the last of those who are there does, with a time limit if that cut one of them off. A member
that ends before ends nothing, one that comes later joins in, and a team with a returned member begins another episode.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.envs import team
from jrl.envs.team import Joint
from jrl.types import Array, Env, EnvSpec, JaxEnv, PyTree, Several, StepResult, Tuple, element

Groups = Mapping[str, Sequence[str]]  # team -> the names of its members


def grouped(env: JaxEnv | Env, groups: Groups) -> JaxEnv | Env:
    """Makes teams of the agents of an environment.

    Args:
      env: of several agents.
      groups: as `settings.multi_agent.check_group` wants them: members are of one kind, and in one team.
    Returns:
      An environment of the same kind whose agents are the teams and those in none. Teams of other sizes or spaces are
      of other kinds (`EnvSpec.kinds`). One team of all agents is an agent with a name; `team.team` gives it none.
    Raises:
      InputError: agents that cannot be put together, or whose columns do not step together.
    """
    team.check_agents(env)
    units = _units(env.spec, groups)
    view, spec = _View(env.spec, units), spec_of(env.spec, groups)
    return team.shown(env, Joint(spec, _to_columns(env.spec, spec, units), view.first, view.joined))


def spec_of(spec: EnvSpec, groups: Groups) -> EnvSpec:
    """Returns what `grouped` makes of a spec. Raises InputError: agents whose actions cannot be put together."""
    units = _units(spec, groups)
    each = [unit.spec for unit in units]
    kinds = spaces.kinds([one._replace(agents=()) for one in each])
    of_kinds = [each[kind[0]] for kind in kinds or [(0,)]]
    whole = lambda parts: Tuple(tuple(parts)) if kinds else parts[0]
    transformed = any(one.env_action is not None for one in of_kinds)
    return spec._replace(
        observation=whole([one.observation for one in of_kinds]),
        action=whole([one.action for one in of_kinds]),
        num_envs=spec.games * len(units),
        env_action=whole([one.env_action or one.action for one in of_kinds]) if transformed else None,
        env_observation=None,
        agents=tuple(unit.name for unit in units),
        kinds=kinds,
    )


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
    kinds = spec.kinds or (tuple(range(len(spec.agents))),)
    of_team = {agent: name for name, members in groups.items() for agent in members}
    members: dict[str, list[int]] = {}
    for i, agent in enumerate(spec.agents):
        members.setdefault(of_team.get(agent, agent), []).append(i)

    def unit(name: str, numbers: list[int]) -> _Unit:
        k = next(k for k, kind in enumerate(kinds) if numbers[0] in kind)
        seats, is_team = tuple(kinds[k].index(i) for i in numbers), spec.agents[numbers[0]] in of_team
        own = spaces.by_kind(spec)[k]._replace(num_envs=spec.games * len(numbers), agents=(name,) * len(numbers))
        own = team.joint_spec(own) if is_team else own
        return _Unit(name, tuple(numbers), k, seats, own._replace(agents=(name,), env_observation=None), is_team)

    return tuple(unit(name, numbers) for name, numbers in members.items())


def _to_columns(spec: EnvSpec, shown: EnvSpec, units: Sequence[_Unit]) -> Callable[[Any, PyTree], PyTree]:
    """Makes the function from (xp, actions of the view) to those of the environment's agents, whose spec is `spec`."""
    kinds = shown.kinds or (tuple(range(len(units))),)
    place = {i: (k, j) for k, kind in enumerate(kinds) for j, i in enumerate(kind)}
    by_kind = spaces.by_kind(spec)

    def of_members(action: PyTree, i: int) -> PyTree:
        """Returns the actions [G, n, *] of the members of unit i."""
        unit, (k, j) = units[i], place[i]
        mine = jax.tree.map(
            lambda x: x.reshape(-1, len(kinds[k]), *x.shape[1:])[:, j], action[k] if shown.kinds else action
        )
        if not unit.is_team:
            return jax.tree.map(lambda x: x[:, None], mine)
        return mine.reshape(-1, len(unit.members), *element(by_kind[unit.kind].action).shape)

    def to_columns(xp: Any, action: PyTree) -> PyTree:
        found = []
        for k in range(len(by_kind)):
            own = [i for i, unit in enumerate(units) if unit.kind == k]
            order = np.argsort(np.concatenate([units[i].seats for i in own]))
            join = lambda *x, order=order: xp.concatenate(x, 1)[:, order].reshape(-1, *x[0].shape[2:])
            found.append(jax.tree.map(join, *(of_members(action, i) for i in own)))
        return tuple(found) if spec.kinds else found[0]

    return to_columns


class _Rows(NamedTuple):
    """One step of a unit's members, [G, n] bool each, of numpy or jax."""

    absent: Any
    terminated: Any
    truncated: Any
    there: Any  # who act on the next step


class _View:
    """Observations of the units, and the joining of their members' steps."""

    def __init__(self, spec: EnvSpec, units: Sequence[_Unit]):
        self._spec, self._units = spec, units
        self._views = [
            team.joint_view(spaces.by_kind(spec)[unit.kind].observation, len(unit.members)) for unit in units
        ]
        self._kinds = spaces.kinds([unit.spec._replace(agents=()) for unit in units])

    def first(self, xp: Any, obs: PyTree, there: Array | None) -> PyTree:
        """Returns the observations after a reset; `there` [B] bool are the agents that act next, None: all."""
        everybody = [xp.ones((self._spec.games, len(unit.members)), bool) for unit in self._units]
        return self._seen(xp, obs, everybody, everybody if there is None else self._by_unit(there))

    def joined(self, xp: Any, result: StepResult) -> StepResult:
        """Returns a step of the view's agents, made of one of the environment's."""
        told = result.several
        assert told is not None
        there = told.there
        if there is None:
            begun = self._by_game(told.absent).all(-1, keepdims=True)  # the first row of a game
            stays = ~(told.absent | result.terminated | result.truncated)
            there = (begun | self._by_game(stays)).reshape(-1)
        each = zip(*map(self._by_unit, (told.absent, result.terminated, result.truncated, there)), strict=True)
        rows = [_Rows(*columns) for columns in each]
        terminated, truncated, absent, present = zip(*map(_standing, self._units, rows), strict=True)
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
        return [self._by_game(x)[:, np.array(unit.members)] for unit in self._units]

    def _seen(self, xp: Any, obs: PyTree, absent: Sequence[Array], present: Sequence[Array]) -> PyTree:
        """Returns the observations of the view's agents, made of the environment's."""
        each: list[PyTree] = [None] * len(self._units)
        for k, of_kind in enumerate(obs if self._spec.kinds else (obs,)):
            for i, unit in enumerate(self._units):
                if unit.kind != k:
                    continue
                size = len(self._spec.kinds[k]) if self._spec.kinds else len(self._spec.agents)
                mine = jax.tree.map(partial(_of_seats, size=size, seats=np.array(unit.seats)), of_kind)
                each[i] = self._views[i](xp, mine, absent[i], present[i]) if unit.is_team else mine
        join = lambda *x: xp.stack(x, 1).reshape(-1, *x[0].shape[1:])
        kinds = self._kinds or (tuple(range(len(each))),)
        found = tuple(jax.tree.map(join, *(each[i] for i in kind)) for kind in kinds)
        return found if self._kinds else found[0]


def _of_seats(x: Array, size: int, seats: np.ndarray) -> Array:
    """Returns the rows [G * n, *] of x [G * size, *] that belong to n seats of each game."""
    return x.reshape(-1, size, *x.shape[1:])[:, seats].reshape(-1, *x.shape[1:])


def _standing(unit: _Unit, rows: _Rows) -> tuple[Array, Array, Array, Array]:
    """Returns (terminated [G], truncated [G], members that have left, members that are present [G, n]) after a step.

    Those whom a time limit cuts off as the team ends are there in the observation from which is bootstrapped.
    """
    ended = rows.terminated | rows.truncated
    if not unit.is_team:
        return rows.terminated[:, 0], rows.truncated[:, 0], rows.absent | ended, rows.there
    ends = ended.any(-1) & ~rows.there.any(-1)
    cut = rows.truncated & ends[:, None]
    truncated = cut.any(-1)
    return ends & ~truncated, truncated, rows.absent | (ended & ~cut), rows.there | cut


__all__ = ["grouped", "spec_of"]
