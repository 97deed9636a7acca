"""Faults in what an environment of several agents returned: for the first steps of runs, and for the checker.

The words are those of `jrl.gym.faults`, with the agent's name before them. A kind that ends in `manners` is for
the checker alone: a run can do without.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

from jrl.gym.faults import Fault, is_flag, of_observation, of_reward

ALL, COMMON = "__all__", "__common__"  # keys of RLlib's dicts that are no agents
# what a reset and a step return, each a dict by agent
RESET = ("observations", "infos")
PARALLEL = ("observations", "rewards", "terminations", "truncations", "infos")
RLLIB = ("observations", "rewards", "terminateds", "truncateds", "infos")
SAME_SPACE = "return the same object each time, such as self.observation_spaces[agent]: its seed is lost otherwise"


def refused(faults: Iterator[Fault]) -> list[str]:
    """Returns a line for each fault that a run cannot learn from: see `step_faults.refused`."""
    return [message for kind, wrong, message in faults if wrong and not kind.endswith(("bounds", "finite", "manners"))]


def misnamed(possible: Set[Any], parts: Any, wanted: Sequence[Set[Any] | None]) -> bool:
    """Returns whether dicts by agent lack an agent, name one that may not be there, or have None: for every step.

    A fault that this sees is one that the functions below describe. It costs a microsecond or two.

    Args:
      possible: all agents that may ever be there, and other keys that are allowed.
      parts: dicts by agent, as a reset or step returns them.
      wanted: the agents that each of them must have; None: it is not looked at.
    """
    try:
        if len(parts) != len(wanted):
            return True
        for part, agents in zip(parts, wanted):
            if agents is None:
                continue
            names = part.keys()
            if not (names <= possible and names >= agents):
                return True
            for value in part.values():
                if value is None:
                    return True
    except (AttributeError, TypeError):  # not a dict, or names that have no hash
        return True
    return False


# ---------------------------------------------------------------- PettingZoo, parallel


def of_parallel_reset(env: Any, possible: Collection[Any], result: Any, where: str) -> Iterator[Fault]:
    """Yields faults of the reset of a PettingZoo parallel environment, and of its agents after it.

    Args:
      env: the environment.
      possible: all agents that may ever be there.
      result: what `reset` returned.
      where: when, in words.
    """
    if (fault := of_parts(result, RESET, where)) is not None:
        yield fault
        return
    yield from _of_agents(env.agents, possible, where)
    if not env.agents:
        yield "agents", True, f"{where}: agents is empty: put the agents into it that act first"
    if isinstance(result[0], dict):
        yield from _unknown("observations", result[0], possible, where)
        yield from _of_observations(env.observation_space, result[0], env.agents, where, "is in agents")
    if isinstance(result[1], dict):
        yield from _lacking("infos", result[1], env.agents, where, "infos manners")
    for name, part in zip(RESET, result):
        if isinstance(part, dict) and (extra := [agent for agent in part if agent not in env.agents]):
            message = f"{where}: {name} has agent {extra[0]!r}, which is not in agents: leave it out"
            yield f"{name} reset manners", False, message
    yield from _of_class(env)
    yield from of_space_objects(env, possible, where)


def of_parallel_step(
    env: Any, possible: Collection[Any], acted: Collection[Any], ended: Collection[Any], result: Any, where: str
) -> Iterator[Fault]:
    """Yields faults of a step of a PettingZoo parallel environment, and of its agents after it.

    Args:
      env: the environment.
      possible: all agents that may ever be there.
      acted: who had an action.
      ended: agents whose end came before, in this game.
      result: what `step` returned.
      where: when, in words.
    """
    if (fault := of_parts(result, PARALLEL, where)) is not None:
        yield fault
        return
    obs, reward, terminated, truncated, infos = result
    agents = list(env.agents)
    yield from _of_agents(agents, possible, where)
    over = {agent for agent in acted if terminated.get(agent) or truncated.get(agent)}
    for name, part in zip(PARALLEL[1:4], result[1:4]):
        yield from _lacking(name, part, acted, where, name)
    yield from _lacking("infos", infos, acted, where, "infos manners")
    yield from _lacking("observations", obs, over, where, "final observation manners", "the last one of its episode")
    there = [*(agent for agent in acted if agent not in over), *agents]
    yield from _of_observations(env.observation_space, obs, dict.fromkeys(there), where, "has not ended")
    yield from _observed(env.observation_space, obs, over, where)
    for name, part in zip(PARALLEL[:4], result):
        yield from _unknown(name, part, possible, where)
    yield from _of_numbers(reward, (("terminations", terminated), ("truncations", truncated)), where)
    for agent in acted:
        if agent in over and agent in agents:
            yield "agents", True, f"{where}: agent {agent!r} has ended, but is in agents still: take it out of them"
        elif agent not in over and agent not in agents:
            mend = "say so in terminations or truncations on its last step"
            yield "agents", True, f"{where}: agent {agent!r} is not in agents any more, but has not ended: {mend}"
    for name, part in zip(PARALLEL, result):
        extra = [agent for agent in part if agent in possible and agent not in acted and agent not in agents]
        if extra:
            message = f"{where}: {name} has agent {extra[0]!r}, which is not there: leave out agents that have ended"
            yield f"{name} manners", False, message
    yield from _back(agents, ended, where)
    yield from of_space_objects(env, possible, where)


# ---------------------------------------------------------------- RLlib


def of_rllib_reset(agents: Collection[Any], space: Callable[[Any], Any], result: Any, where: str) -> Iterator[Fault]:
    """Yields faults of the reset of an environment with RLlib's interface.

    Args:
      agents: all that may ever be there.
      space: from an agent to its observation space, Gymnasium's.
      result: what `reset` returned.
      where: when, in words.
    """
    if (fault := of_parts(result, RESET, where)) is not None:
        yield fault
        return
    if not result[0]:
        yield "agents", True, f"{where}: observations is empty: give one for each agent that acts first"
    yield from _of_agents(result[0], agents, where)
    yield from _observed(space, result[0], agents, where)


def of_rllib_step(
    agents: Collection[Any],
    space: Callable[[Any], Any],
    acted: Collection[Any],
    ended: Collection[Any],
    result: Any,
    where: str,
    *,
    waits: bool,
) -> Iterator[Fault]:
    """Yields faults of a step of an environment with RLlib's interface; arguments as of the two before.

    Args:
      waits: an agent that has not ended and has no observation waits for its turn.
    """
    if (fault := of_parts(result, RLLIB, where)) is not None:
        yield fault
        return
    obs, reward, terminated, truncated, _ = result
    if ALL not in terminated:
        yield ALL, True, f"{where}: terminateds has no {ALL!r}: put it there, True where the episode ends for all"
    for name, part in zip(RLLIB, result):
        yield from _unknown(name, part, agents, where)
    yield from _observed(space, obs, agents, where)
    rewards = {agent: number for agent, number in reward.items() if agent in agents}
    yield from _of_numbers(rewards, (("terminateds", terminated), ("truncateds", truncated)), where)
    over = bool(terminated.get(ALL) or truncated.get(ALL))
    for agent in acted:
        if agent not in obs and not (over or waits or terminated.get(agent) or truncated.get(agent)):
            mend = "where agents take turns say turn_based = True in the class, or env.options.turn_based=true"
            yield "turn_based", False, f"{where}: agent {agent!r} has not ended, but has no observation: {mend}"
    yield from _back(obs, ended, where)


def of_return(agent: Any, where: str) -> Iterator[Fault]:
    """Yields the fault of an agent that acted, then had no observation for a while, and has one again."""
    yield (
        "turns",
        True,
        f"{where}: agent {agent!r} acted before, had no observation since, and has one again: say turn_based = True in "
        "the class, or env.options.turn_based=true, where it waits for its turns and earns meanwhile for its action "
        "before; or false where it leaves and comes back",
    )


# ---------------------------------------------------------------- PettingZoo, agent by agent


def of_turn(
    env: Any, possible: Collection[Any], ended: Collection[Any], where: str, *, reset: bool, returned: Any = None
) -> Iterator[Fault]:
    """Yields faults in the attributes of a PettingZoo environment whose agents take turns, after a reset or step.

    Args:
      env: the environment.
      possible: all agents that may ever be there.
      ended: agents whose end came before, in this game.
      where: when, in words.
      reset: it is a reset.
      returned: by `step`.
    """
    yield from _of_agents(env.agents, possible, where)
    if reset and not env.agents:
        yield "agents", True, f"{where}: agents is empty: put the agents into it that act first"
    if env.agents and env.agent_selection not in env.agents:
        message = f"{where}: agent_selection is {env.agent_selection!r}, but agents {list(env.agents)}: select one"
        yield "agent_selection", True, message
    names = ("rewards", "terminations", "truncations", "infos")
    parts: list[Any] = [getattr(env, name, None) for name in names]
    wrong = list(_dicts(names, parts, where))
    yield from wrong
    if wrong:
        return
    for name, part in zip(names, parts):
        yield from _lacking(name, part, env.agents, where, name)
        yield from _unknown(name, part, possible, where)
        if extra := [agent for agent in part if agent not in env.agents and agent in possible]:
            message = f"{where}: {name} has agent {extra[0]!r}, which is not in agents: leave it out"
            yield f"{name} manners", False, message
    flags = tuple(zip(names[1:3], parts[1:3]))
    yield from _of_numbers(parts[0], flags, where)
    for agent, info in parts[3].items():
        if not isinstance(info, dict):
            message = f"{where}: infos[{agent!r}] is a {type(info).__name__}: put a dict there, such as {{}}"
            yield "infos", True, message
    yield from _of_num_agents(env, where)
    if reset:
        yield from _of_class(env)
        for name, part in flags:
            if already := [agent for agent in env.agents if part.get(agent)]:
                yield name, True, f"{where}: agent {already[0]!r} has ended already: set its flags to False"
    if returned is not None:
        yield "step manners", True, f"{where} returned a {type(returned).__name__}: step of an AECEnv returns nothing"
    yield from _back(env.agents, ended, where)
    yield from of_space_objects(env, possible, where)


def of_gone(gone: Collection[Any], over: Collection[Any], where: str) -> Iterator[Fault]:
    """Yields faults of agents that left without a `step(None)`; those in `over` ended, but `last()` did not say so."""
    mend = "set its flags, and keep it in agents until its step(None)"
    for agent in gone:
        if agent in over:
            message = (
                f"{where}: agent {agent!r} has ended, but was skipped: select it, and keep it until its step(None)"
            )
            yield "skipped manners", True, message
        else:
            yield "gone", True, f"{where}: agent {agent!r} is not in agents any more, but has not ended: {mend}"


def of_last(env: Any, before: Mapping[Any, float], reward: Mapping[Any, Any], where: str) -> Iterator[Fault]:
    """Yields faults of `last()`, which must agree with the attributes and sum the rewards since the agent's own step.

    Args:
      env: after a reset or step.
      before: by agent, what it earned since its own step and before this one.
      reward: by agent, what it earned in this one.
      where: when, in words.
    """
    agent = env.agent_selection
    if agent not in env.agents or agent not in reward:
        return
    told = env.last()
    if not isinstance(told, tuple) or len(told) != 5:
        mend = "return (observation, reward, terminated, truncated, info)"
        yield "last manners", True, f"{where}: last() returned a {type(told).__name__}, no 5 values: {mend}"
        return
    summed = before[agent] + float(reward[agent])
    if abs(float(told[1]) - summed) > 1e-6 * (1 + abs(summed)):
        mend = "set self._cumulative_rewards[agent] = 0 first in step and call self._accumulate_rewards() last"
        message = f"{where}: last() tells agent {agent!r} of a reward of {float(told[1]):g}, but its rewards sum to"
        yield "last manners", True, f"{message} {summed:g}: {mend}"
    for name, flag in zip(("terminations", "truncations"), told[2:4]):
        if bool(flag) != bool(kept := getattr(env, name)[agent]):
            message = f"{where}: last() tells agent {agent!r} {flag!r}, but {name}[{agent!r}] is {kept!r}: return that"
            yield f"last {name} manners", True, message
    info = env.infos[agent]
    if told[4] is not info and set(told[4] or ()) != set(info):  # not ==, which arrays do not have
        message = f"{where}: last() tells agent {agent!r} another info than infos[{agent!r}]: return that"
        yield "last infos manners", True, message
    try:
        unseen = env.last(observe=False)[0]
    except TypeError:
        yield "last observe manners", True, "last takes no observe: PettingZoo wants last(self, observe=True)"
        return
    if unseen is not None:
        message = f"{where}: last(observe=False) gives an observation: give None, which costs nothing"
        yield "last observe manners", True, message


def of_stayed(agent: Any, where: str) -> Fault:
    """Returns the fault of an agent that has ended, had its step(None), and is still in `agents`."""
    mend = "remove it there from agents and all dicts, such as by `self._was_dead_step(action); return` first in step"
    return "agents", True, f"{where}: agent {agent!r} has ended, but is in agents after its step(None): {mend}"


# ---------------------------------------------------------------- parts


def of_space_objects(env: Any, possible: Collection[Any], where: str) -> Iterator[Fault]:
    """Yields a fault for each space that is another object at each call."""
    for agent in env.agents:
        for name in ("observation_space", "action_space"):
            space = getattr(env, name)
            if agent in possible and space(agent) is not space(agent):
                yield (
                    f"{name} manners",
                    True,
                    f"{where}: {name}({agent!r}) is another object at each call: {SAME_SPACE}",
                )


def _of_class(env: Any) -> Iterator[Fault]:
    """Yields faults in members of the class, which stay the same."""
    if getattr(env, "possible_agents", None) is None:
        message = (
            "possible_agents is missing, and agents stands for it: give a list of all names that may ever be there"
        )
        yield "possible_agents manners", False, message
    mro = type(env).__mro__
    makers = [next((c.__name__ for c in mro if name in vars(c)), "AECEnv") for name in ("render", "close")]
    if makers[0] != "AECEnv" and makers[1] == "AECEnv":
        yield "close manners", False, "render is there, but no close: write one, which closes what render opened"
    yield from _of_reset_options(env)


def _of_num_agents(env: Any, where: str) -> Iterator[Fault]:
    count = getattr(env, "num_agents", None)
    if count is None:
        yield "num_agents manners", False, "num_agents is missing: PettingZoo wants the property, len(self.agents)"
    elif isinstance(count, bool) or not isinstance(count, int) or count != len(env.agents):
        message = f"{where}: num_agents is {count!r}, but agents has {len(env.agents)}: return len(self.agents)"
        yield "num_agents manners", True, message


def _of_reset_options(env: Any) -> Iterator[Fault]:
    try:
        parameters = inspect.signature(getattr(env, "unwrapped", env).reset).parameters
    except (TypeError, ValueError):  # of a builtin
        return
    if "options" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield "options manners", False, "reset takes no options: PettingZoo wants reset(self, seed=None, options=None)"


def of_parts(result: Any, names: tuple[str, ...], where: str) -> Fault | None:
    """Returns the fault that keeps a result from being read: it is not a tuple of a dict for each of `names`."""
    if not isinstance(result, tuple) or len(result) != len(names):
        size = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        what = "reset" if names is RESET else "step"
        return what, True, f"{where} returned {size}: return ({', '.join(names)}), a dict of each by agent"
    return next(_dicts(names, result, where), None)


def _dicts(names: Collection[str], parts: Collection[Any], where: str) -> Iterator[Fault]:
    for name, part in zip(names, parts):
        if not isinstance(part, Mapping):
            yield name, True, f"{where}: {name} is a {type(part).__name__}, no dict by agent: return one"


def _of_agents(agents: Collection[Any], possible: Collection[Any], where: str) -> Iterator[Fault]:
    if extra := [agent for agent in agents if agent not in possible]:
        message = f"{where}: agent {extra[0]!r} is not in possible_agents {list(possible)}: add it to them"
        yield "possible_agents", True, message
    if len(set(agents)) < len(agents):
        yield "agents twice", True, f"{where}: agents {list(agents)} names one twice: name each once"


def _unknown(name: str, part: Mapping[Any, Any], possible: Collection[Any], where: str) -> Iterator[Fault]:
    if extra := [agent for agent in part if agent not in possible and agent not in (ALL, COMMON)]:
        message = f"{where}: {name} has {extra[0]!r}, which is not in possible_agents: add it to them"
        yield f"{name} agents", True, message


def _lacking(
    name: str, part: Mapping[Any, Any], agents: Collection[Any], where: str, kind: str, mend: str = "one"
) -> Iterator[Fault]:
    for agent in agents:
        if agent not in part:
            yield kind, True, f"{where}: {name} has nothing of agent {agent!r}: give {mend}"


def _of_observations(
    space: Callable[[Any], Any], obs: Mapping[Any, Any], agents: Collection[Any], where: str, why: str
) -> Iterator[Fault]:
    for agent in agents:
        if agent not in obs:
            yield "observations", True, f"{where}: observations has nothing of agent {agent!r}, which {why}: give one"
    yield from _observed(space, obs, agents, where)


def _observed(
    space: Callable[[Any], Any], obs: Mapping[Any, Any], agents: Collection[Any], where: str
) -> Iterator[Fault]:
    for agent in agents:
        if agent in obs:
            yield from of_one(agent, space, obs[agent], where)


def of_one(agent: Any, space: Callable[[Any], Any], obs: Any, where: str) -> Iterator[Fault]:
    """Yields faults in one agent's observation; none where the agent's space is not known."""
    if obs is None:
        yield "observation", True, f"{where}: agent {agent!r}: the observation is None: give one of its space"
        return
    try:
        found = space(agent)
    except (KeyError, LookupError):
        return
    for kind, wrong, message in of_observation("observation", found, obs):
        yield kind, wrong, f"{where}: agent {agent!r}: {message}"


def _of_numbers(
    reward: Mapping[Any, Any], flags: Collection[tuple[str, Mapping[Any, Any]]], where: str
) -> Iterator[Fault]:
    for agent, number in reward.items():
        for kind, message in of_reward(number):
            yield kind, True, f"{where}: agent {agent!r}: {message}"
    for name, part in flags:
        for agent, flag in part.items():
            if not is_flag(flag):
                message = f"{where}: {name}[{agent!r}] is {flag!r}, a {type(flag).__name__}: put bool(...) around it"
                yield name, True, message


def _back(agents: Collection[Any], ended: Collection[Any], where: str) -> Iterator[Fault]:
    if again := [agent for agent in agents if agent in ended]:
        yield (
            "back manners",
            False,
            f"{where}: agent {again[0]!r} has ended in this episode before, and is back: jrl begins a new episode of "
            "its own for it; PettingZoo wants another name for it",
        )
