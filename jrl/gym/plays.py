"""Three ways to step several agents, seen as one: PettingZoo's parallel and turn-taking ones, and RLlib's.

Neither PettingZoo nor Ray is needed for an object that has their members: which interface it has is told from those.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from jrl.errors import InputError
from jrl.gym import faults
from jrl.gym.faults import ALL, COMMON, Breach, Fault, misnamed, place_in_time, seeded

# takes what gives the faults of the latest result and, for results that are not looked at closely, what tells whether
# there may be some; without it there are none that matter to a run under way
Look = Callable[..., None]


_NOBODY, _ALONE = frozenset[Any](), frozenset((ALL,))  # agents that a dict of RLlib's must have


class Turn(NamedTuple):
    """Result of a reset or step of one game, each part by agent."""

    obs: Mapping[Any, Any]
    reward: Mapping[Any, Any]
    terminated: Mapping[Any, Any]
    truncated: Mapping[Any, Any]
    infos: Mapping[Any, Any]
    movers: tuple[Any, ...]  # who act next
    waiting: tuple[Any, ...] = ()  # who are there, and wait for their turn
    over: bool = False  # the game


class Play(Protocol):
    """One environment of several agents, behind whichever interface it has."""

    env: Any
    agents: tuple[Any, ...]  # all that may ever be there, in the order of columns
    waits: bool  # agents may have to wait for their turn
    look: Look  # is called with each result before it is read

    def observation_space(self, agent: Any) -> Any: ...

    def action_space(self, agent: Any) -> Any: ...

    def reset(self, seed: int | None) -> Turn: ...

    def step(self, action: dict[Any, Any]) -> Turn: ...


def of(env: Any, id: str, turn_based: bool | None) -> Play:
    """Wraps an environment by the interface that it has.

    Args:
      env: an environment of several agents.
      id: for errors.
      turn_based: `env.options.turn_based`; None: as the attribute `turn_based` of the environment says; where it
        has none, an agent that comes back is a fault, for it may have waited or been away.
    Raises:
      InputError: its agents are not known before the first reset, or it needs PettingZoo and that is not installed.
    """
    agents = _agents(env, id)
    if _is_aec(env):
        if not (getattr(env, "metadata", None) or {}).get("is_parallelizable", False):
            return TurnTaking(env, agents)
        try:
            from pettingzoo.utils import conversions
        except ImportError as e:
            raise InputError(f"env.id {id}: is_parallelizable takes pettingzoo: pip install pettingzoo") from e
        return Parallel(conversions.aec_to_parallel(env), agents, turns=TurnTaking(env, agents))
    if callable(getattr(env, "observation_space", None)):
        return Parallel(env, agents)
    declared = getattr(env, "turn_based", None) if turn_based is None else turn_based
    return Rllib(env, agents, waits=None if declared is None else bool(declared), id=id)


def _is_aec(env: Any) -> bool:
    return all(callable(getattr(env, name, None)) for name in ("observe", "last", "observation_space"))


def _agents(env: Any, id: str) -> tuple[Any, ...]:
    for name in ("possible_agents", "_agent_ids", "agents"):
        if found := getattr(env, name, None):
            agents = tuple(found) if isinstance(found, list | tuple) else tuple(sorted(found, key=str))
            if len(set(map(str, agents))) < len(agents):
                raise InputError(f"env.id {id}: possible_agents {list(agents)} has names twice: name each agent once")
            return agents
    raise InputError(
        f"env.id {id}: the {type(env).__name__} does not say which agents there may be: give it possible_agents, a "
        "list of all names"
    )


def _parts(result: Any, names: tuple[str, ...], where: str) -> tuple[Any, ...]:
    """Returns a result. Raises Breach: it has other parts, whose names Python would unpack from a dict of agents."""
    if (fault := faults.of_parts(result, names, where)) is not None:
        raise Breach(fault.message)
    return result


class _Base:
    waits = False

    def __init__(self, env: Any, agents: tuple[Any, ...]):
        self.env, self.agents = env, agents
        self.look: Look = lambda faults, may_be=None: None
        self._steps, self._ended = 0, set[Any]()
        self._movers: tuple[Any, ...] = ()
        self._known = frozenset((*agents, ALL, COMMON))  # keys of dicts by agent

    def observation_space(self, agent: Any) -> Any:
        return self.env.observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        return self.env.action_space(agent)

    def _began(self) -> str:
        where = place_in_time(self._steps, reset=True)
        self._ended = set()
        return where

    def _stepped(self) -> str:
        self._steps += 1
        return place_in_time(self._steps, reset=False)

    def _reset(self, seed: int | None) -> Any:
        return self.env.reset() if seed is None else seeded(self.env, seed)


class Parallel(_Base):
    """PettingZoo's parallel interface: all that are in `agents` act at once.

    Attributes:
      turns: the AECEnv that was made parallel, which whoever checks it looks at, too; None: there is none.
    """

    def __init__(self, env: Any, agents: tuple[Any, ...], turns: "TurnTaking | None" = None):
        super().__init__(env, agents)
        self.turns = turns

    def reset(self, seed: int | None) -> Turn:
        where, result = self._began(), self._reset(seed)
        self.look(
            lambda: faults.of_parallel_reset(self.env, self.agents, result, where),
            lambda: misnamed(self._known, result, [set(self.env.agents), None]),
        )
        obs, infos = _parts(result, faults.RESET, where)
        self._movers = tuple(self.env.agents)
        return Turn(obs, {}, {}, {}, infos, self._movers)

    def step(self, action: dict[Any, Any]) -> Turn:
        where, result = self._stepped(), self.env.step(action)
        acted, ended = self._movers, self._ended

        def may_be() -> bool:
            were, are = set(acted), set(self.env.agents)
            stay = were & are  # of one that has left no flags are wanted: it is cut off
            return misnamed(self._known, result, [are, were, stay, stay, None])

        self.look(lambda: faults.of_parallel_step(self.env, self.agents, acted, ended, result, where), may_be)
        obs, reward, terminated, truncated, infos = _parts(result, faults.PARALLEL, where)
        now = tuple(self.env.agents)
        over = {agent for agent in acted if terminated.get(agent) or truncated.get(agent)}
        # one that left without an end: a value after it can be had only from what it saw last
        truncated = {**truncated, **{agent: True for agent in acted if agent not in now and agent not in over}}
        self._ended = ended | over
        self._movers = tuple(agent for agent in now if agent not in over)
        return Turn(obs, reward, terminated, truncated, infos, self._movers, over=not self._movers)


class TurnTaking(_Base):
    """PettingZoo's AECEnv: `agent_selection` acts, and the others in `agents` wait."""

    waits = True

    def reset(self, seed: int | None) -> Turn:
        where = self._began()
        self._reset(seed)
        self._earned = dict.fromkeys(self.agents, 0.0)
        found = lambda: faults.of_turn(self.env, self.agents, (), where, reset=True)
        self.look(found, lambda: self._turn_misnamed())
        self.look(lambda: faults.of_last(self.env, self._earned, dict.fromkeys(self.agents, 0.0), where))
        return self._turn({}, {}, {}, {}, {}, where)

    def step(self, action: dict[Any, Any]) -> Turn:
        where, env = self._stepped(), self.env
        before = tuple(env.agents)
        self._earned[env.agent_selection] = 0.0
        returned = env.step(action[env.agent_selection])
        ended = self._ended
        found = lambda: faults.of_turn(env, self.agents, ended, where, reset=False, returned=returned)
        self.look(found, lambda: self._turn_misnamed())
        there = list(env.agents)
        reward, infos = dict(env.rewards), dict(env.infos)
        terminated, truncated = dict(env.terminations), dict(env.truncations)
        over = [agent for agent in there if terminated[agent] or truncated[agent]]
        obs = {agent: env.observe(agent) for agent in over}
        told = self._leave(where)
        gone = [agent for agent in dict.fromkeys((*before, *there)) if agent not in env.agents and agent not in told]
        self.look(lambda: faults.of_gone(gone, over, where))
        # one that left without an end: a value after it can be had only from what it saw last
        truncated |= {agent: True for agent in gone if agent not in over}
        self._ended = ended | set(over)
        self.look(lambda: faults.of_last(env, self._earned, reward, where))
        return self._turn(obs, reward, terminated, truncated, infos, where)

    def _turn_misnamed(self) -> bool:
        env = self.env
        parts = [getattr(env, name, None) for name in ("rewards", "terminations", "truncations")]
        are = set(env.agents)
        return not are <= self._known or misnamed(self._known, parts, [are] * len(parts))

    def _leave(self, where: str) -> list[Any]:
        """Steps each agent that has ended and is selected, which leaves by that, and returns those.

        Raises:
          Breach: one does not leave, so that this would never end.
        """
        env, told = self.env, list[Any]()
        for _ in (*self.agents, None):
            agent = env.agent_selection
            if not env.agents or not (env.terminations[agent] or env.truncations[agent]):
                return told
            env.step(None)
            told.append(agent)
            if agent in env.agents:
                break
        undead = faults.fault("undead", where, agent=agent)
        self.look(lambda: iter((undead,)))
        raise Breach(undead.message)

    def _turn(self, obs: dict, reward: dict, terminated: dict, truncated: dict, infos: dict, where: str) -> Turn:
        env = self.env
        for agent, earned in reward.items():
            if agent in self._earned:
                self._earned[agent] += float(earned)
        there = tuple(env.agents)
        live = {agent: env.observe(agent) for agent in there}  # a mask is that of whoever is selected now

        def found() -> Iterator[Fault]:
            for agent, one in live.items():
                yield from faults.of_one(agent, self.observation_space, one, where)

        self.look(found, lambda: any(one is None for one in live.values()))
        movers = (env.agent_selection,) if there else ()
        waiting = tuple(agent for agent in there if agent not in movers)
        infos = {**infos, **{agent: env.infos.get(agent, {}) for agent in there}}
        return Turn({**obs, **live}, reward, terminated, truncated, infos, movers, waiting, over=not there)


class Rllib(_Base):
    """RLlib's interface: those that have an observation act next.

    With `waits`, an agent that was there, has not ended and has no observation waits for its turn; without, it is
    absent until it has one.
    """

    def __init__(self, env: Any, agents: tuple[Any, ...], *, waits: bool | None, id: str):
        super().__init__(env, agents)
        self.waits = bool(waits)
        self._id, self._declared = id, waits is not None
        self._away = set[Any]()  # who acted in this episode and has no observation since
        self._there: dict[Any, None] = {}

    def observation_space(self, agent: Any) -> Any:
        return self._space("observation", agent)

    def action_space(self, agent: Any) -> Any:
        return self._space("action", agent)

    def _space(self, what: str, agent: Any) -> Any:
        if callable(given := getattr(self.env, f"get_{what}_space", None)):
            return given(agent)
        if (by_agent := getattr(self.env, f"{what}_spaces", None)) is not None:
            return by_agent[agent]
        found = getattr(self.env, f"{what}_space", None)
        named = getattr(found, "spaces", None)
        if isinstance(named, Mapping) and set(self.agents) <= set(named):
            return named[agent]
        if found is None:
            raise InputError(
                f"env.id {self._id}: the {type(self.env).__name__} has no {what} space of agent {agent!r}: give it "
                f"{what}_spaces, a dict by agent"
            )
        return found

    def reset(self, seed: int | None) -> Turn:
        where, result = self._began(), self._reset(seed)
        self.look(
            lambda: faults.of_rllib_reset(self.agents, self.observation_space, result, where),
            lambda: misnamed(self._known, result, [_NOBODY, None]) or not result[0],
        )
        obs, infos = _parts(result, faults.RESET, where)
        self._movers = tuple(agent for agent in self.agents if agent in obs)
        self._there, self._away = dict.fromkeys(self._movers), set()
        return Turn(obs, {}, {}, {}, infos, self._movers)

    def step(self, action: dict[Any, Any]) -> Turn:
        where, result = self._stepped(), self.env.step(action)
        acted, ended = self._movers, self._ended
        self.look(
            lambda: faults.of_rllib_step(
                self.agents, self.observation_space, acted, ended, result, where, waits=self.waits
            ),
            lambda: misnamed(self._known, result, [_NOBODY, _NOBODY, _ALONE, _NOBODY, _NOBODY]),
        )
        obs, reward, terminated, truncated, infos = _parts(result, faults.RLLIB, where)
        end, cut = bool(terminated.get(ALL)), bool(truncated.get(ALL))
        flags = [{agent: bool(part.get(agent)) for agent in self.agents} for part in (terminated, truncated)]
        over = {agent for agent in self.agents if flags[0][agent] or flags[1][agent]}
        self._ended = (ended - set(obs)) | over
        if end or cut:  # for those who have not ended by themselves
            rest = [agent for agent in self.agents if agent not in over]
            flags[0 if end else 1].update(dict.fromkeys(rest, True))
        self._movers = tuple(agent for agent in self.agents if agent in obs and agent not in over)
        self._there = dict.fromkeys(agent for agent in (*self._there, *self._movers) if agent not in over)
        waiting = tuple(agent for agent in self._there if agent not in self._movers) if self.waits else ()
        done = end or cut or self._ended >= set(self.agents)
        if not self._declared:
            if back := [agent for agent in self._movers if agent in self._away]:
                self.look(lambda: iter((faults.fault("returns", where, agent=back[0]),)))
            self._away = (self._away | set(acted)) - set(self._movers) - over
        return Turn(obs, reward, flags[0], flags[1], infos, self._movers, waiting, done)
