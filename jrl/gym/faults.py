"""Faults of environments: one table for `check_env`, the first steps of a run and worker processes.

Functions that look at a result yield its faults. Agents of an environment of several have the same faults, with the
agent's name before them.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

FIRST_STEPS = 32  # of each environment, that a run looks at closely
# types of rewards and flags with which nothing is wrong
NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_))
FLAGS = frozenset((bool, np.bool_))
ALL, COMMON = "__all__", "__common__"  # keys of RLlib's dicts that are no agents
# what a reset and a step of several agents return, each a dict by agent
RESET = ("observations", "infos")
PARALLEL = ("observations", "rewards", "terminations", "truncations", "infos")
RLLIB = ("observations", "rewards", "terminateds", "truncateds", "infos")
_ROUNDING = 1e-5  # of a bound, by which float32 may be beyond it
_KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")

# The table: what is wrong and, after the colon, what fixes it. Faults that end a run in its first steps
RUN = {
    "no pair": "{where} returned no pair: return (observation, info)",
    "no five": "{where} returned {got}: return (observation, reward, terminated, truncated, info)",
    "no seed": "reset takes no seed: declare reset(self, *, seed=None, options=None)",
    "info": "{where}: {what} is {got}, a {type}: return a dict, such as {{}}",
    "reward shape": "{where}: reward of shape {got}: return one number, such as float(reward.sum())",
    "reward": "{where}: reward {got} is no number: return a float",
    "flag": "{where}: {what} is {got}, a {type}: return bool({what})",
    "keys": "{where}: {what} has {got}, but the space has {want}: return a dict",
    "tuple": "{where}: {what} is {got}, but the space is a Tuple of {want}: return one",
    "array": "{where}: {what} is {got}, no array: return one of the space {want}",
    "shape": "{where}: {what} of shape {got}, but the space has {want}: change the one or the other",
    "no numbers": "{where}: {what} of {got}, no numbers: return {want}",
    "fractions": "{where}: {what} of {got}, but the space has {want}, which cuts fractions off: return {want}, or "
    "change the space",
    "dtype": "{where}: {what} of {got}, but the space has {want}: convert it with astype",
    "range": "{where}: {what}{index} is {got:g}, outside {want}: widen the space, or clip it",
    "dicts": "{where} returned {got}: return ({want}), a dict of each by agent",
    "dict": "{where}: {what} is a {got}, no dict by agent: return one",
    "unseen": "{where}: {what} has nothing of agent {agent!r}, which {why}: give one",
    "lacking": "{where}: {what} has nothing of agent {agent!r}: give one",
    "none": "{where}: the observation is None: give one of its space",
    "unknown": "{where}: {what} has {agent!r}, which is not in possible_agents: add it to them",
    "flags": "{where}: {what}[{agent!r}] is {got!r}, a {type}: put bool(...) around it",
    "infos": "{where}: infos[{agent!r}] is a {type}: put a dict there, such as {{}}",
    "stranger": "{where}: agent {agent!r} is not in possible_agents {want}: add it to them",
    "twice": "{where}: agents {got} names one twice: name each once",
    "nobody": "{where}: agents is empty: put the agents into it that act first",
    "nobody seen": "{where}: observations is empty: give one for each agent that acts first",
    "stays": "{where}: agent {agent!r} has ended, but is in agents still: take it out of them",
    "leaves": "{where}: agent {agent!r} is not in agents any more, but has not ended: {fix}",
    "undead": "{where}: agent {agent!r} has ended, but is in agents after its step(None): remove it there from agents "
    "and all dicts, such as by `self._was_dead_step(action); return` first in step",
    "ended": "{where}: agent {agent!r} has ended already: set its flags to False",
    "selection": "{where}: agent_selection is {agent!r}, but agents {want}: select one",
    "no all": "{where}: terminateds has no '__all__': put it there, True where the episode ends for all",
    "returns": "{where}: agent {agent!r} acted before, had no observation since, and has one again: say turn_based = "
    "True in the class, or env.options.turn_based=true, where it waits for its turns and earns meanwhile for its "
    "action before; or false where it leaves and comes back",
}
# problems that only `check_env` reports
CHECK = {
    "reward finite": "{where}: reward is {got}: no algorithm can learn from it; find the division or logarithm",
    "finite": "{where}: {what}{index} is {got}: no network can read it; find the division or overflow",
    "bounds": "{where}: {what}{index} is {got:g}, outside {want}: widen the space, or clip it",
    "no info": "{where}: {what} has nothing of agent {agent!r}: give one",
    "no last": "{where}: {what} has nothing of agent {agent!r}: give the last one of its episode",
    "skipped": "{where}: agent {agent!r} has ended, but was skipped: select it, and keep it until its step(None)",
    "step value": "{where} returned a {got}: step of an AECEnv returns nothing",
    "last size": "{where}: last() returned a {got}, no 5 values: return (observation, reward, terminated, truncated, "
    "info)",
    "last reward": "{where}: last() tells agent {agent!r} of a reward of {got:g}, but its rewards sum to {want:g}: set"
    " self._cumulative_rewards[agent] = 0 first in step and call self._accumulate_rewards() last",
    "last flag": "{where}: last() tells agent {agent!r} {got!r}, but {what}[{agent!r}] is {want!r}: return that",
    "last info": "{where}: last() tells agent {agent!r} another info than infos[{agent!r}]: return that",
    "last observe": "last takes no observe: PettingZoo wants last(self, observe=True)",
    "last unseen": "{where}: last(observe=False) gives an observation: give None, which costs nothing",
    "new space": "{where}: {what}({agent!r}) is another object at each call: return the same object each time, such as"
    " self.observation_spaces[agent]: its seed is lost otherwise",
    "count": "{where}: num_agents is {got!r}, but agents has {want}: return len(self.agents)",
    "rewards": "{where}: rewards of shape {got}, not ({want},): one per environment",
    "flags of all": "{where}: {what} is {got}, not bool ({want},): one per environment",
    "stuck": "{where}: the action_mask of environment {env} allows no action{what}, but its episode goes on: allow "
    "one, or end the episode on this step",
    "acts nothing": "{where} is absent, but has a reward or an end: give it neither",
    "after an end": "{where} has ended on the step before, but is not absent: mark it absent",
    "new game": "{where} is not absent on the step that begins a new game: mark all absent",
    "over": "{where} has not ended, but the game is over: terminate or truncate it",
    "not over": "{where} and all others have ended, but the game is not over: say so in Several.over",
    "make": "{id} cannot be made: {error}: fix it, or give the options",
    "raises": "environment {env} raises in {where}: {error}: fix it; with env_runners.restart_failed_sub_environments "
    "a run goes on and makes it anew",
    "cannot step": "{id} cannot be stepped: {error}",
    "close": "close() raises {error}: fix it",
    "memory": "an observation takes {got}: {steps} x {envs} take {needed}, but {free} are free: {fix}",
    "seed twice": "the same seed and actions gave another stream, from {where} on: {fix}",
    "contract": "{where} of environment {env} follows an end, but has reward {got:g} and {ends} end: environments "
    "reset on the step after an end, with reward 0 and no end (see jrl.types.StepResult)",
}
# notes of `check_env`
NOTE = {
    "converted": "{where}: {what} of {got}, but the space has {want}: it is converted; return {want} to save that",
    "extra": "{where}: {what} has agent {agent!r}, which is not in agents: leave it out",
    "dead": "{where}: {what} has agent {agent!r}, which is not there: leave out agents that have ended",
    "back": "{where}: agent {agent!r} has ended in this episode before, and is back: jrl begins a new episode of its "
    "own for it; PettingZoo wants another name for it",
    "turns": "{where}: agent {agent!r} has not ended, but has no observation: where agents take turns say turn_based ="
    " True in the class, or env.options.turn_based=true",
    "no count": "num_agents is missing: PettingZoo wants the property, len(self.agents)",
    "no names": "possible_agents is missing, and agents stands for it: give a list of all names that may ever be there",
    "no close": "render is there, but no close: write one, which closes what render opened",
    "no options": "reset takes no options: PettingZoo wants reset(self, seed=None, options=None)",
    "other seed": "another seed gives the same stream: nothing is random, or reset does not pass its seed on",
    "final observation": "the last observation of each episode is also the first of the next: if the environment "
    "resets itself, let it return the true final observation, from which the value after a time limit is estimated",
    "no end": "no episode ended within {got} steps, and no time limit is known: if episodes should end, set "
    "env.horizon; an episode without an end is in no statistics of returns",
    "uneven": "{got} of {want} steps and resets take {slow:.2g} ms, most {median:.2g} ms: all wait for the slowest, "
    "unless env.remote_worker_envs and env.batch_wait_ms are set",
    "slow": "a step takes {median:.2g} ms: with env.remote_worker_envs each environment has a process of its own, "
    "which pays where cores are idle",
}


class Fault(NamedTuple):
    """A fault that was found."""

    name: str  # in the table, with what it is of
    message: str  # one line, with the fix
    ends_run: bool = False
    is_note: bool = False


def fault(name: str, where: str = "", **values: Any) -> Fault:
    """Returns the fault of an entry of the table, with `values` in the places that its text has."""
    text = RUN.get(name) or CHECK.get(name) or NOTE[name]
    message = text.format(where=where, **values)
    return Fault(f"{name} {values.get('what', '')}", message, name in RUN, name in NOTE)


class Breach(ValueError):
    """An environment does not keep to its interface, so that making it anew would not help. A line for each fault."""


def refused(found: Iterable[Fault]) -> list[str]:
    """Returns a line for each fault that a run cannot learn from.

    Bounds of floats are not among these, which many environments exceed by a little; nor are numbers that are not
    finite, which a transform of the user's may replace: `run.on_nonfinite` says what becomes of an update.
    """
    return [one.message for one in found if one.ends_run]


def place_in_time(steps: int, *, reset: bool) -> str:
    """Describes when a result came: after so many steps."""
    if not reset:
        return f"step {steps}"
    return f"the reset after step {steps}" if steps else "the first reset"


# ---------------------------------------------------------------- one agent


def of_reset(space: Any, result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the result of a reset, whose observation is of `space`."""
    if not isinstance(result, tuple) or len(result) != 2:
        yield fault("no pair", where)
        return
    yield from of_observation("observation", space, result[0], where)
    yield from _of_info(result[1], where)


def of_step(space: Any, result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the result of a step, whose observation is of `space`."""
    if not isinstance(result, tuple) or len(result) != 5:
        yield fault("no five", where, got=_size(result))
        return
    obs, reward, terminated, truncated, info = result
    yield from of_observation("observation", space, obs, where)
    yield from _of_info(info, where)
    yield from of_reward(reward, where)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not is_flag(flag):
            yield fault("flag", where, what=name, got=_short(flag), type=type(flag).__name__)


def _of_info(info: Any, where: str) -> Iterator[Fault]:
    if not isinstance(info, dict):
        yield fault("info", where, what="info", got=_short(info), type=type(info).__name__)


def of_reward(reward: Any, where: str) -> Iterator[Fault]:
    """Yields faults of a reward."""
    number = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if shape := np.shape(reward):
            yield fault("reward shape", where, got=shape)
            return
        # of a text, too, float makes a number, and of a complex one
        if not isinstance(reward, str | bytes) and getattr(getattr(reward, "dtype", None), "kind", "f") not in "cmMSU":
            number = float(reward)
    if number is None:
        yield fault("reward", where, got=_short(reward))
    elif not math.isfinite(number):
        yield fault("reward finite", where, got=number)


def is_flag(value: Any) -> bool:
    """Returns whether a value is true or false: a bool, 0, 1, or an array of such a value without axes."""
    if type(value) in FLAGS:
        return True
    with contextlib.suppress(Exception):  # the value may be an object of any class
        array = np.asarray(value)
        return array.shape == () and array.dtype.kind in "biuf" and bool((array == 0) | (array == 1))
    return False


def is_plain(reward: Any, terminated: Any, truncated: Any, info: Any) -> bool:
    """Returns whether `of_step` would find nothing that ends a run, beside the observation."""
    if not (isinstance(info, dict) and is_flag(terminated) and is_flag(truncated)):
        return False
    return type(reward) in NUMBERS or not refused(of_reward(reward, ""))


# ---------------------------------------------------------------- observations


def kind(space: Any) -> str:
    """Returns the name of a space's class, or of the first known one that it extends."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


def of_observation(name: str, space: Any, obs: Any, where: str, num_envs: int | None = None) -> Iterator[Fault]:
    """Yields faults in an observation.

    Args:
      name: of the observation, for the messages.
      space: Gymnasium's or ours.
      obs: the observation of one environment, before it is converted.
      where: when, in words.
      num_envs: observations [B, *] of so many environments, which nothing converts; None: of one.
    """
    what = kind(space)
    if what in ("Dict", "Tuple"):
        inner = space.spaces if hasattr(space, "spaces") else space.items  # ours
        parts = dict(inner if what == "Dict" else enumerate(inner))
        if what == "Dict" and not (isinstance(obs, Mapping) and set(obs) == set(parts)):
            got = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            yield fault("keys", where, what=name, got=got, want=sorted(map(str, parts)))
        elif what == "Tuple" and not (isinstance(obs, tuple | list) and len(obs) == len(parts)):
            yield fault("tuple", where, what=name, got=_short(obs), want=len(parts))
        else:
            for key, part in parts.items():
                yield from of_observation(f"{name}[{key!r}]", part, obs[key], where, num_envs)
        return
    try:
        value = np.asarray(obs)
    except (TypeError, ValueError):
        yield fault("array", where, what=name, got=_short(obs), want=space)
        return
    yield from _of_array(name, space, value, where, num_envs)


def _of_array(name: str, space: Any, value: np.ndarray, where: str, num_envs: int | None) -> Iterator[Fault]:
    dtype, shape = np.dtype(space.dtype), tuple(space.shape)
    low, high = (np.asarray(bound, np.float64) for bound in bounds(space))
    typed: dict[str, Any] = {"what": name, "got": value.dtype, "want": dtype}
    if num_envs is not None:
        shape = (num_envs, *shape)
        if value.dtype != dtype:
            yield fault("dtype", where, **typed)
    if value.shape != shape:
        yield fault("shape", where, what=name, got=value.shape, want=shape)
        return
    whole, floating = dtype.kind in "biu", value.dtype.kind == "f"
    if value.dtype.kind not in "biuf":
        yield fault("no numbers", where, **typed)
        return
    if num_envs is None and floating and whole:
        yield fault("fractions", where, **typed)
    elif num_envs is None and value.dtype != dtype and (floating or not whole):
        yield fault("converted", where, **typed)
    if floating and not np.isfinite(value).all():
        at = place(~np.isfinite(value))
        yield fault("finite", where, what=name, index=_index(at), got=value[at])
        return
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    slack = [np.where(np.isfinite(b), _ROUNDING * (1 + np.abs(b)), 0.0) if floating else 0.0 for b in (low, high)]
    outside = (value < low - slack[0]) | (value > high + slack[1])
    if outside.any():
        at = place(outside)
        limits = f"[{low[at]:g}, {high[at]:g}]"
        kept = "range" if whole else "bounds"
        yield fault(kept, where, what=name, index=_index(at), got=float(value[at]), want=limits)


def bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and highest values [*shape] of a space that is one array."""
    what = kind(space)
    if what == "Box":
        return space.bounds() if hasattr(space, "bounds") else (np.asarray(space.low), np.asarray(space.high))
    low = np.asarray(getattr(space, "start", 0))
    sizes = {"Discrete": lambda: space.n, "MultiDiscrete": lambda: space.nvec, "MultiBinary": lambda: 2}[what]()
    shape = tuple(space.shape)
    return np.broadcast_to(low, shape), np.broadcast_to(low + np.asarray(sizes) - 1, shape)


def place(wrong: np.ndarray) -> tuple[int, ...]:
    """Returns the index of the first true element."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _index(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]" if at else ""


# ---------------------------------------------------------------- seeds


def takes(env: Any, name: str) -> bool:
    """Returns whether the reset of an environment, or of what it wraps, takes an argument, such as `seed`."""
    try:
        parameters = inspect.signature(getattr(env, "unwrapped", env).reset).parameters
    except (TypeError, ValueError):  # of a builtin
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def seeded(env: Any, seed: int) -> Any:
    """Returns `env.reset(seed=seed)`. Raises Breach: it takes no seed."""
    try:
        return env.reset(seed=seed)
    except TypeError as e:
        if takes(env, "seed"):
            raise
        raise Breach(fault("no seed").message) from e


# ---------------------------------------------------------------- several agents
# Arguments: env, the environment after a reset or step; possible, all agents that may ever be there; acted, agents that
# had an action; ended, agents whose end came before, in this game; result, what `reset` or `step` returned; where, when
# the result came, in words; space, from an agent to its observation space.


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


def of_parts(result: Any, names: tuple[str, ...], where: str) -> Fault | None:
    """Returns the fault that keeps a result from being read: it is not a tuple of a dict for each of `names`."""
    if not isinstance(result, tuple) or len(result) != len(names):
        return fault("dicts", where, got=_size(result), want=", ".join(names))
    return next(_dicts(names, result, where), None)


def _dicts(names: Collection[str], parts: Collection[Any], where: str) -> Iterator[Fault]:
    for name, part in zip(names, parts):
        if not isinstance(part, Mapping):
            yield fault("dict", where, what=name, got=type(part).__name__)


def of_parallel_reset(env: Any, possible: Collection[Any], result: Any, where: str) -> Iterator[Fault]:
    """Yields faults of the reset of a PettingZoo parallel environment, and of its agents after it."""
    if (wrong := of_parts(result, RESET, where)) is not None:
        yield wrong
        return
    obs, infos = result
    yield from _of_agents(env.agents, possible, where)
    if not env.agents:
        yield fault("nobody", where)
    yield from _unknown("observations", obs, possible, where)
    yield from _each("unseen", _lacking(obs, env.agents), where, what="observations", why="is in agents")
    yield from _observed(env.observation_space, obs, env.agents, where)
    yield from _each("no info", _lacking(infos, env.agents), where, what="infos")
    for name, part in zip(RESET, result):
        yield from _each("extra", _lacking(env.agents, part)[:1], where, what=name)
    yield from _of_class(env)
    yield from _of_spaces(env, possible, where)


def of_parallel_step(
    env: Any, possible: Collection[Any], acted: Collection[Any], ended: Collection[Any], result: Any, where: str
) -> Iterator[Fault]:
    """Yields faults of a step of a PettingZoo parallel environment, and of its agents after it."""
    if (wrong := of_parts(result, PARALLEL, where)) is not None:
        yield wrong
        return
    obs, reward, terminated, truncated, infos = result
    agents = list(env.agents)
    yield from _of_agents(agents, possible, where)
    over = [agent for agent in acted if terminated.get(agent) or truncated.get(agent)]
    going = [agent for agent in acted if agent not in over]
    for name, part in zip(PARALLEL[1:4], result[1:4]):
        yield from _each("lacking", _lacking(part, acted), where, what=name)
    yield from _each("no info", _lacking(infos, acted), where, what="infos")
    yield from _each("no last", _lacking(obs, over), where, what="observations")
    there = list(dict.fromkeys([*going, *agents]))
    yield from _each("unseen", _lacking(obs, there), where, what="observations", why="has not ended")
    yield from _observed(env.observation_space, obs, dict.fromkeys([*there, *over]), where)
    for name, part in zip(PARALLEL[:4], result):
        yield from _unknown(name, part, possible, where)
    yield from _of_numbers(reward, {"terminations": terminated, "truncations": truncated}, where)
    yield from _each("stays", [agent for agent in over if agent in agents], where)
    fix = "say so in terminations or truncations on its last step"
    yield from _each("leaves", _lacking(agents, going), where, fix=fix)
    for name, part in zip(PARALLEL, result):
        gone = [agent for agent in part if agent in possible and agent not in acted and agent not in agents]
        yield from _each("dead", gone[:1], where, what=name)
    yield from _each("back", [agent for agent in agents if agent in ended][:1], where)
    yield from _of_spaces(env, possible, where)


def of_rllib_reset(agents: Collection[Any], space: Callable[[Any], Any], result: Any, where: str) -> Iterator[Fault]:
    """Yields faults of the reset of an environment with RLlib's interface."""
    if (wrong := of_parts(result, RESET, where)) is not None:
        yield wrong
        return
    if not result[0]:
        yield fault("nobody seen", where)
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
    """Yields faults of a step of an environment with RLlib's interface. waits: a silent agent waits for its turn."""
    if (wrong := of_parts(result, RLLIB, where)) is not None:
        yield wrong
        return
    obs, reward, terminated, truncated, _ = result
    if ALL not in terminated:
        yield fault("no all", where)
    for name, part in zip(RLLIB, result):
        yield from _unknown(name, part, agents, where)
    yield from _observed(space, obs, agents, where)
    rewards = {agent: number for agent, number in reward.items() if agent in agents}
    yield from _of_numbers(rewards, {"terminateds": terminated, "truncateds": truncated}, where)
    if not (waits or terminated.get(ALL) or truncated.get(ALL)):
        silent = [a for a in acted if a not in obs and not (terminated.get(a) or truncated.get(a))]
        yield from _each("turns", silent, where)
    yield from _each("back", [agent for agent in obs if agent in ended][:1], where)


def of_turn(
    env: Any, possible: Collection[Any], ended: Collection[Any], where: str, *, reset: bool, returned: Any = None
) -> Iterator[Fault]:
    """Yields faults in the attributes of a PettingZoo AECEnv. returned: by its step."""
    agents, selected = list(env.agents), env.agent_selection
    yield from _of_agents(agents, possible, where)
    if reset and not agents:
        yield fault("nobody", where)
    if agents and selected not in agents:
        yield fault("selection", where, agent=selected, want=agents)
    names = ("rewards", "terminations", "truncations", "infos")
    parts: dict[str, Any] = {name: getattr(env, name, None) for name in names}
    if wrong := list(_dicts(names, parts.values(), where)):
        yield from wrong
        return
    for name, part in parts.items():
        yield from _each("lacking", _lacking(part, agents), where, what=name)
        yield from _unknown(name, part, possible, where)
        extra = [agent for agent in _lacking(agents, part) if agent in possible]
        yield from _each("extra", extra[:1], where, what=name)
    flags = {name: parts[name] for name in names[1:3]}
    yield from _of_numbers(parts["rewards"], flags, where)
    for agent, info in parts["infos"].items():
        if not isinstance(info, dict):
            yield fault("infos", where, agent=agent, type=type(info).__name__)
    count = getattr(env, "num_agents", None)
    if count is None:
        yield fault("no count")
    elif isinstance(count, bool) or not isinstance(count, int) or count != len(agents):
        yield fault("count", where, got=count, want=len(agents))
    if reset:
        yield from _of_class(env)
        for part in flags.values():
            yield from _each("ended", [agent for agent in agents if part.get(agent)][:1], where)
    if returned is not None:
        yield fault("step value", where, got=type(returned).__name__)
    yield from _each("back", [agent for agent in agents if agent in ended][:1], where)
    yield from _of_spaces(env, possible, where)


def of_gone(gone: Collection[Any], over: Collection[Any], where: str) -> Iterator[Fault]:
    """Yields faults of agents that left without a `step(None)`; those in `over` ended, but `last()` did not say so."""
    fix = "set its flags, and keep it in agents until its step(None)"
    yield from _each("skipped", [agent for agent in gone if agent in over], where)
    yield from _each("leaves", [agent for agent in gone if agent not in over], where, fix=fix)


def of_last(env: Any, before: Mapping[Any, float], reward: Mapping[Any, Any], where: str) -> Iterator[Fault]:
    """Yields faults of `last()`, which agrees with the attributes and sums the rewards since the agent's own step.

    Args:
      before, reward: by agent, what it earned since its own step and before this one, and in this one.
    """
    agent = env.agent_selection
    if agent not in env.agents or agent not in reward:
        return
    last = env.last()
    if not isinstance(last, tuple) or len(last) != 5:
        yield fault("last size", where, got=type(last).__name__)
        return
    earned, summed, info = float(last[1]), before[agent] + float(reward[agent]), env.infos[agent]
    if abs(earned - summed) > 1e-6 * (1 + abs(summed)):
        yield fault("last reward", where, agent=agent, got=earned, want=summed)
    for name, flag in zip(("terminations", "truncations"), last[2:4]):
        if bool(flag) != bool(kept := getattr(env, name)[agent]):
            yield fault("last flag", where, agent=agent, what=name, got=flag, want=kept)
    if last[4] is not info and set(last[4] or ()) != set(info):  # not ==, which arrays do not have
        yield fault("last info", where, agent=agent)
    try:
        unseen = env.last(observe=False)[0]
    except TypeError:
        yield fault("last observe")
        return
    if unseen is not None:
        yield fault("last unseen", where)


def of_one(agent: Any, space: Callable[[Any], Any], obs: Any, where: str) -> Iterator[Fault]:
    """Yields faults in one agent's observation; none where the agent's space is not known."""
    where = f"{where}: agent {agent!r}"
    if obs is None:
        yield fault("none", where)
        return
    with contextlib.suppress(LookupError):
        found = space(agent)
        yield from of_observation("observation", found, obs, where)


def _each(name: str, agents: Iterable[Any], where: str, **values: Any) -> Iterator[Fault]:
    return (fault(name, where, agent=agent, **values) for agent in agents)


def _lacking(part: Collection[Any], agents: Iterable[Any]) -> list[Any]:
    return [agent for agent in agents if agent not in part]


def _unknown(name: str, part: Mapping[Any, Any], possible: Collection[Any], where: str) -> Iterator[Fault]:
    return _each("unknown", _lacking((*possible, ALL, COMMON), part)[:1], where, what=name)


def _observed(
    space: Callable[[Any], Any], obs: Mapping[Any, Any], agents: Iterable[Any], where: str
) -> Iterator[Fault]:
    for agent in agents:
        if agent in obs:
            yield from of_one(agent, space, obs[agent], where)


def _of_agents(agents: Collection[Any], possible: Collection[Any], where: str) -> Iterator[Fault]:
    yield from _each("stranger", _lacking(possible, agents)[:1], where, want=list(possible))
    if len(set(agents)) < len(agents):
        yield fault("twice", where, got=list(agents))


def _of_numbers(reward: Mapping[Any, Any], flags: Mapping[str, Mapping[Any, Any]], where: str) -> Iterator[Fault]:
    for agent, number in reward.items():
        yield from of_reward(number, f"{where}: agent {agent!r}")
    for name, part in flags.items():
        for agent, flag in part.items():
            if not is_flag(flag):
                yield fault("flags", where, what=name, agent=agent, got=flag, type=type(flag).__name__)


def _of_spaces(env: Any, possible: Collection[Any], where: str) -> Iterator[Fault]:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        changing = [agent for agent in env.agents if agent in possible and space(agent) is not space(agent)]
        yield from _each("new space", changing, where, what=name)


def _of_class(env: Any) -> Iterator[Fault]:
    """Yields faults in members of the class, which stay the same."""
    if getattr(env, "possible_agents", None) is None:
        yield fault("no names")
    mro = type(env).__mro__
    makers = [next((c.__name__ for c in mro if name in vars(c)), "AECEnv") for name in ("render", "close")]
    if makers[0] != "AECEnv" and makers[1] == "AECEnv":
        yield fault("no close")
    if not takes(env, "options"):
        yield fault("no options")


def _size(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
