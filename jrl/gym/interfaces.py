"""One interface for three kinds of multi-agent environment: PettingZoo parallel, PettingZoo AEC, and RLlib.

An object is recognised by its members: neither PettingZoo nor Ray needs to be installed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from jrl.errors import InputError
from jrl.gym import faults
from jrl.gym.exceptions import Breach
from jrl.gym.faults import ALL, COMMON, Fault, describe_time, has_wrong_keys, reset_with_seed

# callback(list_faults, is_suspicious=None). `list_faults` yields all faults of the latest result. `is_suspicious` is a
# cheap test for steps after the first ones; None: skip the check on those steps
Check = Callable[..., None]

_NO_KEYS, _ALL_KEY = frozenset[Any](), frozenset((ALL,))  # keys that a dict of RLlib's must have


class GameStep(NamedTuple):
    """Result of a reset or step of one game; each mapping is by agent."""

    obs: Mapping[Any, Any]
    reward: Mapping[Any, Any]
    terminated: Mapping[Any, Any]
    truncated: Mapping[Any, Any]
    infos: Mapping[Any, Any]
    movers: tuple[Any, ...]  # agents that act next
    waiting: tuple[Any, ...] = ()  # agents in the game that wait for their turn
    over: bool = False  # the game has ended


class AgentInterface(Protocol):
    """A multi-agent environment behind one of the three interfaces."""

    env: Any
    agents: tuple[Any, ...]  # all agents that may ever join, in the order of the agent indices
    waits: bool  # agents may have to wait for their turn
    check: Check  # called with each result before it is read

    def observation_space(self, agent: Any) -> Any: ...

    def action_space(self, agent: Any) -> Any: ...

    def reset(self, seed: int | None) -> GameStep: ...

    def step(self, action: dict[Any, Any]) -> GameStep: ...


def wrap(env: Any, id: str, turn_based: bool | None) -> AgentInterface:
    """Wraps a multi-agent environment by the interface that its members match.

    Args:
      id: environment id, for errors.
      turn_based: `env.options.turn_based`; None: the environment's attribute `turn_based`. Without either, an agent
        that acts again after a step without observation is a fault: it may have waited or left.
    Raises:
      InputError: the agents are unknown before the first reset, or PettingZoo is needed and not installed.
    """
    agents = _list_agents(env, id)
    if _is_aec(env):
        if not (getattr(env, "metadata", None) or {}).get("is_parallelizable", False):
            return TurnTaking(env, agents)
        try:
            from pettingzoo.utils import conversions
        except ImportError as e:
            raise InputError(f"env.id {id}: is_parallelizable needs pettingzoo: pip install pettingzoo") from e
        return Parallel(conversions.aec_to_parallel(env), agents)
    if callable(getattr(env, "observation_space", None)):
        return Parallel(env, agents)
    declared = getattr(env, "turn_based", None) if turn_based is None else turn_based
    return Rllib(env, agents, waits=None if declared is None else bool(declared), id=id)


def _is_aec(env: Any) -> bool:
    return all(callable(getattr(env, name, None)) for name in ("observe", "last", "observation_space"))


def _list_agents(env: Any, id: str) -> tuple[Any, ...]:
    for name in ("possible_agents", "_agent_ids", "agents"):
        if found := getattr(env, name, None):
            agents = tuple(found) if isinstance(found, list | tuple) else tuple(sorted(found, key=str))
            if len(set(map(str, agents))) < len(agents):
                raise InputError(f"env.id {id}: possible_agents {list(agents)} has a name twice: list each agent once")
            return agents
    raise InputError(
        f"env.id {id}: {type(env).__name__} does not list its agents: set possible_agents, a list of all names"
    )


def _check_parts(result: Any, names: tuple[str, ...], where: str) -> tuple[Any, ...]:
    """Returns a result. Raises Breach: it has other parts (a dict of agents would be unpacked into its keys)."""
    if (fault := faults.check_parts(result, names, where)) is not None:
        raise Breach(fault.message)
    return result


class _Interface:
    waits = False

    def __init__(self, env: Any, agents: tuple[Any, ...]):
        self.env, self.agents = env, agents
        self.check: Check = lambda list_faults, is_suspicious=None: None
        self._steps = 0
        self._movers: tuple[Any, ...] = ()
        self._known = frozenset((*agents, ALL, COMMON))  # allowed keys of dicts by agent

    def observation_space(self, agent: Any) -> Any:
        return self.env.observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        return self.env.action_space(agent)

    def _reset(self, seed: int | None) -> tuple[str, Any]:
        result = self.env.reset() if seed is None else reset_with_seed(self.env, seed)
        return describe_time(self._steps, reset=True), result

    def _count_step(self) -> str:
        self._steps += 1
        return describe_time(self._steps, reset=False)


class Parallel(_Interface):
    """PettingZoo's parallel interface: all agents in `agents` act on each step."""

    def reset(self, seed: int | None) -> GameStep:
        where, result = self._reset(seed)
        self.check(
            lambda: faults.check_parallel_reset(self.env, self.agents, result, where),
            lambda: has_wrong_keys(self._known, result, [set(self.env.agents), None]),
        )
        obs, infos = _check_parts(result, faults.RESET, where)
        self._movers = tuple(self.env.agents)
        return GameStep(obs, {}, {}, {}, infos, self._movers)

    def step(self, action: dict[Any, Any]) -> GameStep:
        where, result = self._count_step(), self.env.step(action)
        acted = self._movers

        def is_suspicious() -> bool:
            before, after = set(acted), set(self.env.agents)
            stayed = before & after  # an agent that has left needs no flags: it is truncated below
            return has_wrong_keys(self._known, result, [after, before, stayed, stayed, None])

        self.check(lambda: faults.check_parallel_step(self.env, self.agents, acted, result, where), is_suspicious)
        obs, reward, terminated, truncated, infos = _check_parts(result, faults.PARALLEL, where)
        now = tuple(self.env.agents)
        over = {agent for agent in acted if terminated.get(agent) or truncated.get(agent)}
        # an agent that left without an end is truncated: its last observation bootstraps the value
        truncated = {**truncated, **{agent: True for agent in acted if agent not in now and agent not in over}}
        self._movers = tuple(agent for agent in now if agent not in over)
        return GameStep(obs, reward, terminated, truncated, infos, self._movers, over=not self._movers)


class TurnTaking(_Interface):
    """PettingZoo's AECEnv: `agent_selection` acts, the other agents in `agents` wait."""

    waits = True

    def reset(self, seed: int | None) -> GameStep:
        where, _ = self._reset(seed)
        list_faults = lambda: faults.check_aec_state(self.env, self.agents, where, reset=True)
        self.check(list_faults, self._has_wrong_attributes)
        return self._build_step({}, {}, {}, {}, {}, where)

    def step(self, action: dict[Any, Any]) -> GameStep:
        where, env = self._count_step(), self.env
        before = tuple(env.agents)
        env.step(action[env.agent_selection])
        list_faults = lambda: faults.check_aec_state(env, self.agents, where, reset=False)
        self.check(list_faults, self._has_wrong_attributes)
        agents = list(env.agents)
        reward, infos = dict(env.rewards), dict(env.infos)
        terminated, truncated = dict(env.terminations), dict(env.truncations)
        over = [agent for agent in agents if terminated[agent] or truncated[agent]]
        obs = {agent: env.observe(agent) for agent in over}
        kept = {*self._remove_ended(where), *env.agents}
        gone = [agent for agent in dict.fromkeys((*before, *agents)) if agent not in kept]
        self.check(lambda: faults.check_absent(gone, over, where))
        # an agent that left without an end is truncated: its last observation bootstraps the value
        truncated |= {agent: True for agent in gone if agent not in over}
        return self._build_step(obs, reward, terminated, truncated, infos, where)

    def _has_wrong_attributes(self) -> bool:
        parts = [getattr(self.env, name, None) for name in ("rewards", "terminations", "truncations")]
        agents = set(self.env.agents)
        return not agents <= self._known or has_wrong_keys(self._known, parts, [agents] * len(parts))

    def _remove_ended(self, where: str) -> list[Any]:
        """Calls step(None) while the selected agent has ended; returns these agents.

        Raises:
          Breach: an agent stays in `agents` after step(None), so that this loop would never end.
        """
        env, removed = self.env, list[Any]()
        for _ in (*self.agents, None):
            agent = env.agent_selection
            if not env.agents or not (env.terminations[agent] or env.truncations[agent]):
                return removed
            env.step(None)
            removed.append(agent)
            if agent in env.agents:
                break
        undead = faults.fault("undead", where, agent=agent)
        self.check(lambda: iter((undead,)))
        raise Breach(undead.message)

    def _build_step(
        self, obs: dict, reward: dict, terminated: dict, truncated: dict, infos: dict, where: str
    ) -> GameStep:
        env = self.env
        agents = tuple(env.agents)
        live = {agent: env.observe(agent) for agent in agents}  # observed now: masks depend on the selected agent

        def list_faults() -> Iterator[Fault]:
            for agent, own in live.items():
                yield from faults.check_agent_observation(agent, self.observation_space, own, where)

        self.check(list_faults, lambda: any(own is None for own in live.values()))
        movers = (env.agent_selection,) if agents else ()
        waiting = tuple(agent for agent in agents if agent not in movers)
        infos = {**infos, **{agent: env.infos.get(agent, {}) for agent in agents}}
        return GameStep({**obs, **live}, reward, terminated, truncated, infos, movers, waiting, over=not agents)


class Rllib(_Interface):
    """RLlib's interface: agents with an observation act next.

    With `waits`, an agent of the game that has no observation waits for its turn. Otherwise it is absent.
    """

    def __init__(self, env: Any, agents: tuple[Any, ...], *, waits: bool | None, id: str):
        super().__init__(env, agents)
        self.waits = bool(waits)
        self._id, self._is_declared = id, waits is not None
        self._ended = set[Any]()
        self._silent = set[Any]()  # agents that acted in this episode and have no observation since
        self._present: dict[Any, None] = {}

    def observation_space(self, agent: Any) -> Any:
        return self._find_space("observation", agent)

    def action_space(self, agent: Any) -> Any:
        return self._find_space("action", agent)

    def _find_space(self, what: str, agent: Any) -> Any:
        if callable(get := getattr(self.env, f"get_{what}_space", None)):
            return get(agent)
        if (by_agent := getattr(self.env, f"{what}_spaces", None)) is not None:
            return by_agent[agent]
        space = getattr(self.env, f"{what}_space", None)
        parts = getattr(space, "spaces", None)
        if isinstance(parts, Mapping) and set(self.agents) <= set(parts):
            return parts[agent]
        if space is None:
            raise InputError(
                f"env.id {self._id}: {type(self.env).__name__} has no {what} space of agent {agent!r}: set "
                f"{what}_spaces, a dict by agent"
            )
        return space

    def reset(self, seed: int | None) -> GameStep:
        where, result = self._reset(seed)
        self.check(
            lambda: faults.check_rllib_reset(self.agents, self.observation_space, result, where),
            lambda: has_wrong_keys(self._known, result, [_NO_KEYS, None]) or not result[0],
        )
        obs, infos = _check_parts(result, faults.RESET, where)
        self._movers = tuple(agent for agent in self.agents if agent in obs)
        self._present, self._silent, self._ended = dict.fromkeys(self._movers), set(), set()
        return GameStep(obs, {}, {}, {}, infos, self._movers)

    def step(self, action: dict[Any, Any]) -> GameStep:
        where, result = self._count_step(), self.env.step(action)
        acted = self._movers
        self.check(
            lambda: faults.check_rllib_step(
                self.agents, self.observation_space, acted, result, where, waits=self.waits
            ),
            lambda: has_wrong_keys(self._known, result, [_NO_KEYS, _NO_KEYS, _ALL_KEY, _NO_KEYS, _NO_KEYS]),
        )
        obs, reward, terminated, truncated, infos = _check_parts(result, faults.RLLIB, where)
        end, cut = bool(terminated.get(ALL)), bool(truncated.get(ALL))
        flags = [{agent: bool(part.get(agent)) for agent in self.agents} for part in (terminated, truncated)]
        over = {agent for agent in self.agents if flags[0][agent] or flags[1][agent]}
        self._ended = (self._ended - set(obs)) | over
        if end or cut:  # '__all__' ends the agents that have no flag of their own
            rest = [agent for agent in self.agents if agent not in over]
            flags[0 if end else 1].update(dict.fromkeys(rest, True))
        self._movers = tuple(agent for agent in self.agents if agent in obs and agent not in over)
        self._present = dict.fromkeys(agent for agent in (*self._present, *self._movers) if agent not in over)
        waiting = tuple(agent for agent in self._present if agent not in self._movers) if self.waits else ()
        done = end or cut or self._ended >= set(self.agents)
        if not self._is_declared:
            if back := [agent for agent in self._movers if agent in self._silent]:
                self.check(lambda: iter((faults.fault("returns", where, agent=back[0]),)))
            self._silent = (self._silent | set(acted)) - set(self._movers) - over
        return GameStep(obs, reward, flags[0], flags[1], infos, self._movers, waiting, done)
