"""Faults of environments: one table for `check_env`, the first steps of a run and worker processes.

Check functions yield the faults of a result. Multi-agent environments use the same table; the message begins with the
agent's name.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from jrl.gym import space_kind
from jrl.gym.exceptions import Breach

# exact types of rewards and flags that need no further check
NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_))
FLAGS = frozenset((bool, np.bool_))
ALL, COMMON = "__all__", "__common__"  # keys of RLlib's dicts that are not agents
# parts of a multi-agent reset or step result, each a dict by agent
RESET = ("observations", "infos")
PARALLEL = ("observations", "rewards", "terminations", "truncations", "infos")
RLLIB = ("observations", "rewards", "terminateds", "truncateds", "infos")
_ROUNDING = 1e-5  # relative float32 error allowed beyond a bound

# The table: the fault and, after the last colon, its fix. These faults end a run in its first steps
RUN = {
    "no pair": "{where} did not return a pair: return (observation, info)",
    "no five": "{where} returned {got}: return (observation, reward, terminated, truncated, info)",
    "no seed": "reset takes no seed: declare reset(self, *, seed=None, options=None)",
    "info": "{where}: {what} is {got}, a {type}: return a dict, such as {{}}",
    "reward shape": "{where}: reward of shape {got}: return one number, such as float(reward.sum())",
    "reward": "{where}: reward {got} is not a number: return a float",
    "flag": "{where}: {what} is {got}, a {type}: return bool({what})",
    "keys": "{where}: {what} has {got}, but the space has {want}: return a dict",
    "tuple": "{where}: {what} is {got}, but the space is a Tuple of {want}: return a tuple",
    "array": "{where}: {what} is {got}, not an array: return an element of the space {want}",
    "shape": "{where}: {what} of shape {got}, but the space has {want}: change the space or the {what}",
    "no numbers": "{where}: {what} of {got}, not numbers: return {want}",
    "fractions": "{where}: {what} of {got}, but the space has {want}, which drops fractions: return {want}, or "
    "change the space",
    "range": "{where}: {what}{index} is {got:g}, outside {want}: widen the space, or clip it",
    "dicts": "{where} returned {got}: return ({want}), each a dict by agent",
    "dict": "{where}: {what} is a {got}, not a dict by agent: return a dict",
    "unseen": "{where}: {what} has no entry for agent {agent!r}, which {why}: add the entry",
    "lacking": "{where}: {what} has no entry for agent {agent!r}: add the entry",
    "none": "{where}: the observation is None: return an element of the agent's space",
    "unknown": "{where}: {what} has {agent!r}, which is not in possible_agents: add it there",
    "flags": "{where}: {what}[{agent!r}] is {got!r}, a {type}: put bool(...) around it",
    "stranger": "{where}: agent {agent!r} is not in possible_agents {want}: add it there",
    "twice": "{where}: agents {got} has a name twice: list each agent once",
    "nobody": "{where}: agents is empty: add the agents that act first",
    "nobody seen": "{where}: observations is empty: add an observation for each agent that acts first",
    "stays": "{where}: agent {agent!r} has ended, but is still in agents: remove it from agents",
    "leaves": "{where}: agent {agent!r} is no longer in agents, but has not ended: {fix}",
    "undead": "{where}: agent {agent!r} has ended, but is in agents after its step(None): remove it there from agents "
    "and all dicts, for example by `self._was_dead_step(action); return` first in step",
    "selection": "{where}: agent_selection is {agent!r}, but agents is {want}: select an agent of agents",
    "no all": "{where}: terminateds has no '__all__': add it, True when the episode ends for all agents",
    "returns": "{where}: agent {agent!r} acted before, then had no observation, and has one again: set turn_based = "
    "True in the class, or env.options.turn_based=true, if the agent waits for its turn and collects the rewards "
    "meanwhile; set it to false if the agent leaves and joins again",
}
# faults that only `check_env` reports
CHECK = {
    "reward finite": "{where}: reward is {got}: no algorithm can learn from it; find the division or logarithm",
    "finite": "{where}: {what}{index} is {got}: no network can read it; find the division or overflow",
    "bounds": "{where}: {what}{index} is {got:g}, outside {want}: widen the space, or clip it",
    "no last": "{where}: {what} has no entry for agent {agent!r}: add the last observation of its episode",
    "stuck": "{where}: the action_mask of environment {env} allows no action{what}, but its episode goes on: allow "
    "an action, or end the episode on this step",
    "raises": "{where} raises {error}: fix it; env_runners.restart_failed_sub_environments=true makes the environment "
    "again and continues the run",
    "pettingzoo": "PettingZoo's {what} fails: {error}: fix it",
    "cannot step": "{id} cannot be stepped: {error}",
    "seed twice": "the same seed and actions gave another stream, from {where} on: {fix}",
    "contract": "{where} of environment {env} follows an end, but has reward {got:g} and {ends} end: reset on the step "
    "after an end, with reward 0 and no end (see jrl.types.StepResult)",
}
# notes of `check_env`
NOTE = {
    "converted": "{where}: {what} of {got}, but the space has {want}: it is converted; return {want} to save the copy",
    "turns": "{where}: agent {agent!r} has not ended, but has no observation: if agents take turns, set turn_based ="
    " True in the class, or env.options.turn_based=true",
    "other seed": "another seed gives the same stream: the environment is not random, or reset ignores its seed",
    "final observation": "the last observation of each episode is also the first of the next: if the environment "
    "resets itself, let it return the true final observation, which bootstraps the value after a time limit",
    "no end": "no episode ended within {got} steps, and no time limit is known: if episodes should end, set "
    "env.horizon; episodes without an end do not count in mean returns",
    "uneven": "{got} of {want} steps and resets take {slow:.2g} ms, most {median:.2g} ms: all environments wait for "
    "the slowest, unless env.remote_worker_envs and env.batch_wait_ms are set",
    "slow": "a step takes {median:.2g} ms: env.remote_worker_envs runs each environment in its own process, which "
    "helps if cores are idle",
}


class Fault(NamedTuple):
    """A fault found in an environment."""

    name: str  # table key and the faulty part
    message: str  # one line, with the fix
    ends_run: bool = False
    is_note: bool = False


def fault(name: str, where: str = "", **values: Any) -> Fault:
    """Returns the fault of a table entry, its text filled with `values`."""
    text = RUN.get(name) or CHECK.get(name) or NOTE[name]
    message = text.format(where=where, **values)
    return Fault(f"{name} {values.get('what', '')}", message, name in RUN, name in NOTE)


def list_fatal(found: Iterable[Fault]) -> list[str]:
    """Returns the messages of the faults that end a run.

    Values beyond float bounds do not end it: many environments exceed their bounds a little. Non-finite numbers do not
    either: a user's transform may replace them, and `run.on_nonfinite` decides about the update.
    """
    return [one.message for one in found if one.ends_run]


def report_or_raise(found: Iterable[Fault], report: Callable[[Fault], None] | None) -> None:
    """Passes faults to `report`. Raises Breach: `report` is None, and some end a run."""
    if report is not None:
        for one in found:
            report(one)
    elif lines := list_fatal(found):
        raise Breach(*lines)


def describe_time(steps: int, *, reset: bool) -> str:
    """Describes the time of a result: the step count, or the reset after so many steps."""
    if not reset:
        return f"step {steps}"
    return f"the reset after step {steps}" if steps else "the first reset"


# ---------------------------------------------------------------- one agent


def check_reset(space: Any, result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the result of a reset."""
    if not isinstance(result, tuple) or len(result) != 2:
        yield fault("no pair", where)
        return
    yield from check_observation("observation", space, result[0], where)
    yield from _check_info(result[1], where)


def check_step(space: Any, result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the result of a step."""
    if not isinstance(result, tuple) or len(result) != 5:
        yield fault("no five", where, got=_describe_size(result))
        return
    obs, reward, terminated, truncated, info = result
    yield from check_observation("observation", space, obs, where)
    yield from _check_info(info, where)
    yield from check_reward(reward, where)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not is_flag(flag):
            yield fault("flag", where, what=name, got=_shorten(flag), type=type(flag).__name__)


def _check_info(info: Any, where: str) -> Iterator[Fault]:
    if not isinstance(info, dict):
        yield fault("info", where, what="info", got=_shorten(info), type=type(info).__name__)


def check_reward(reward: Any, where: str) -> Iterator[Fault]:
    number = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if shape := np.shape(reward):
            yield fault("reward shape", where, got=shape)
            return
        # float() also accepts text, and complex numpy scalars
        if not isinstance(reward, str | bytes) and getattr(getattr(reward, "dtype", None), "kind", "f") not in "cmMSU":
            number = float(reward)
    if number is None:
        yield fault("reward", where, got=_shorten(reward))
    elif not math.isfinite(number):
        yield fault("reward finite", where, got=number)


def is_flag(value: Any) -> bool:
    """Returns whether a value is a flag: a bool, 0, 1, or an array without axes of one of these."""
    if type(value) in FLAGS:
        return True
    with contextlib.suppress(Exception):  # a value of any class
        array = np.asarray(value)
        return array.shape == () and array.dtype.kind in "biuf" and bool((array == 0) | (array == 1))
    return False


def has_no_fatal_fault(reward: Any, terminated: Any, truncated: Any, info: Any) -> bool:
    """Returns whether `check_step` would find no fatal fault outside the observation."""
    if not (isinstance(info, dict) and is_flag(terminated) and is_flag(truncated)):
        return False
    return type(reward) in NUMBERS or not list_fatal(check_reward(reward, ""))


# ---------------------------------------------------------------- observations


def check_observation(name: str, space: Any, obs: Any, where: str, num_envs: int | None = None) -> Iterator[Fault]:
    """Yields faults in an observation.

    Args:
      name: observation's name in messages.
      space: Gymnasium's or jrl's space.
      obs: observation of one environment, before conversion.
      where: time of the result, in words.
      num_envs: B, for observations [B, *] that are not converted; None: one environment.
    """
    what = space_kind(space)
    if what in ("Dict", "Tuple"):
        inner = space.spaces if hasattr(space, "spaces") else space.items  # jrl's space has items
        parts = dict(inner if what == "Dict" else enumerate(inner))
        if what == "Dict" and not (isinstance(obs, Mapping) and set(obs) == set(parts)):
            got = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            yield fault("keys", where, what=name, got=got, want=sorted(map(str, parts)))
        elif what == "Tuple" and not (isinstance(obs, tuple | list) and len(obs) == len(parts)):
            yield fault("tuple", where, what=name, got=_shorten(obs), want=len(parts))
        else:
            for key, part in parts.items():
                yield from check_observation(f"{name}[{key!r}]", part, obs[key], where, num_envs)
        return
    try:
        value = np.asarray(obs)
    except (TypeError, ValueError):
        yield fault("array", where, what=name, got=_shorten(obs), want=space)
        return
    yield from _check_array(name, space, value, where, num_envs)


def _check_array(name: str, space: Any, value: np.ndarray, where: str, num_envs: int | None) -> Iterator[Fault]:
    dtype, shape = np.dtype(space.dtype), tuple(space.shape)
    low, high = (np.asarray(bound, np.float64) for bound in get_bounds(space))
    typed: dict[str, Any] = {"what": name, "got": value.dtype, "want": dtype}
    if num_envs is not None:
        shape = (num_envs, *shape)
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
        at = find_first(~np.isfinite(value))
        yield fault("finite", where, what=name, index=_format_index(at), got=value[at])
        return
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    slack = [np.where(np.isfinite(b), _ROUNDING * (1 + np.abs(b)), 0.0) if floating else 0.0 for b in (low, high)]
    outside = (value < low - slack[0]) | (value > high + slack[1])
    if outside.any():
        at = find_first(outside)
        limits = f"[{low[at]:g}, {high[at]:g}]"
        kept = "range" if whole else "bounds"
        yield fault(kept, where, what=name, index=_format_index(at), got=float(value[at]), want=limits)


def get_bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and highest values [*shape] of a space that is one array."""
    what = space_kind(space)
    if what == "Box":
        return space.bounds() if hasattr(space, "bounds") else (np.asarray(space.low), np.asarray(space.high))
    low = np.asarray(getattr(space, "start", 0))
    sizes = {"Discrete": lambda: space.n, "MultiDiscrete": lambda: space.nvec, "MultiBinary": lambda: 2}[what]()
    shape = tuple(space.shape)
    return np.broadcast_to(low, shape), np.broadcast_to(low + np.asarray(sizes) - 1, shape)


def find_first(wrong: np.ndarray) -> tuple[int, ...]:
    """Returns the index of the first true element."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _format_index(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]" if at else ""


# ---------------------------------------------------------------- seeds


def reset_with_seed(env: Any, seed: int) -> Any:
    """Returns `env.reset(seed=seed)`. Raises Breach: reset has no parameter seed."""
    try:
        return env.reset(seed=seed)
    except TypeError as e:
        try:
            parameters = inspect.signature(getattr(env, "unwrapped", env).reset).parameters
        except (TypeError, ValueError):  # a builtin has no signature
            raise e from None
        if "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise
        raise Breach(fault("no seed").message) from e


# ---------------------------------------------------------------- several agents
# Arguments: env, environment after a reset or step; possible, all agents that may ever join; acted, agents that had an
# action; result, value of `reset` or `step`; where, time of the result, in words; space, function from an agent to its
# observation space.


def has_wrong_keys(possible: Set[Any], parts: Any, wanted: Sequence[Set[Any] | None]) -> bool:
    """Returns whether dicts by agent lack an agent, have an unknown key, or contain None.

    Runs on every step and costs about 2 microseconds. The check functions below describe each fault that it detects.

    Args:
      possible: allowed keys: all agents, and special keys.
      parts: dicts by agent, as a reset or step returns them.
      wanted: agents that each dict must have; None: the dict is not checked.
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
    except (AttributeError, TypeError):  # not a dict, or a name that cannot be hashed
        return True
    return False


def check_parts(result: Any, names: tuple[str, ...], where: str) -> Fault | None:
    """Returns the fault of a result that is not a tuple of one dict per name; None: it is."""
    if not isinstance(result, tuple) or len(result) != len(names):
        return fault("dicts", where, got=_describe_size(result), want=", ".join(names))
    return next(_check_dicts(names, result, where), None)


def _check_dicts(names: Collection[str], parts: Collection[Any], where: str) -> Iterator[Fault]:
    for name, part in zip(names, parts):
        if not isinstance(part, Mapping):
            yield fault("dict", where, what=name, got=type(part).__name__)


def check_parallel_reset(env: Any, possible: Collection[Any], result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the reset of a PettingZoo parallel environment, and in its agents afterwards."""
    if (wrong := check_parts(result, RESET, where)) is not None:
        yield wrong
        return
    obs = result[0]
    yield from _check_agents(env.agents, possible, where)
    if not env.agents:
        yield fault("nobody", where)
    yield from _check_names("observations", obs, possible, where)
    yield from _per_agent("unseen", _list_missing(obs, env.agents), where, what="observations", why="is in agents")
    yield from _check_agent_observations(env.observation_space, obs, env.agents, where)


def check_parallel_step(
    env: Any, possible: Collection[Any], acted: Collection[Any], result: Any, where: str
) -> Iterator[Fault]:
    """Yields faults in a step of a PettingZoo parallel environment, and in its agents afterwards."""
    if (wrong := check_parts(result, PARALLEL, where)) is not None:
        yield wrong
        return
    obs, reward, terminated, truncated, _ = result
    agents = list(env.agents)
    yield from _check_agents(agents, possible, where)
    over = [agent for agent in acted if terminated.get(agent) or truncated.get(agent)]
    going = [agent for agent in acted if agent not in over]
    for name, part in zip(PARALLEL[1:4], result[1:4]):
        yield from _per_agent("lacking", _list_missing(part, acted), where, what=name)
    yield from _per_agent("no last", _list_missing(obs, over), where, what="observations")
    there = list(dict.fromkeys([*going, *agents]))
    yield from _per_agent("unseen", _list_missing(obs, there), where, what="observations", why="has not ended")
    yield from _check_agent_observations(env.observation_space, obs, dict.fromkeys([*there, *over]), where)
    for name, part in zip(PARALLEL[:4], result):
        yield from _check_names(name, part, possible, where)
    yield from _check_rewards_and_flags(reward, {"terminations": terminated, "truncations": truncated}, where)
    yield from _per_agent("stays", [agent for agent in over if agent in agents], where)
    fix = "set its termination or truncation on its last step"
    yield from _per_agent("leaves", _list_missing(agents, going), where, fix=fix)


def check_rllib_reset(agents: Collection[Any], space: Callable[[Any], Any], result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the reset of an environment with RLlib's interface."""
    if (wrong := check_parts(result, RESET, where)) is not None:
        yield wrong
        return
    if not result[0]:
        yield fault("nobody seen", where)
    yield from _check_agents(result[0], agents, where)
    yield from _check_agent_observations(space, result[0], agents, where)


def check_rllib_step(
    agents: Collection[Any],
    space: Callable[[Any], Any],
    acted: Collection[Any],
    result: Any,
    where: str,
    *,
    waits: bool,
) -> Iterator[Fault]:
    """Yields faults in a step of an environment with RLlib's interface.

    waits: an agent without observation waits for its turn.
    """
    if (wrong := check_parts(result, RLLIB, where)) is not None:
        yield wrong
        return
    obs, reward, terminated, truncated, _ = result
    if ALL not in terminated:
        yield fault("no all", where)
    for name, part in zip(RLLIB, result):
        yield from _check_names(name, part, agents, where)
    yield from _check_agent_observations(space, obs, agents, where)
    rewards = {agent: number for agent, number in reward.items() if agent in agents}
    yield from _check_rewards_and_flags(rewards, {"terminateds": terminated, "truncateds": truncated}, where)
    if not (waits or terminated.get(ALL) or truncated.get(ALL)):
        silent = [a for a in acted if a not in obs and not (terminated.get(a) or truncated.get(a))]
        yield from _per_agent("turns", silent, where)


def check_aec_state(env: Any, possible: Collection[Any], where: str, *, reset: bool) -> Iterator[Fault]:
    """Yields faults in the attributes of a PettingZoo AECEnv."""
    agents, selected = list(env.agents), env.agent_selection
    yield from _check_agents(agents, possible, where)
    if reset and not agents:
        yield fault("nobody", where)
    if agents and selected not in agents:
        yield fault("selection", where, agent=selected, want=agents)
    names = ("rewards", "terminations", "truncations", "infos")
    parts: dict[str, Any] = {name: getattr(env, name, None) for name in names}
    if wrong := list(_check_dicts(names, parts.values(), where)):
        yield from wrong
        return
    for name, part in parts.items():
        yield from _per_agent("lacking", _list_missing(part, agents), where, what=name)
        yield from _check_names(name, part, possible, where)
    yield from _check_rewards_and_flags(parts["rewards"], {name: parts[name] for name in names[1:3]}, where)


def check_absent(gone: Collection[Any], over: Collection[Any], where: str) -> Iterator[Fault]:
    """Yields faults of agents of an AECEnv that left without an end; agents in `over` had ended."""
    fix = "set its flags, and keep it in agents until its step(None)"
    return _per_agent("leaves", [agent for agent in gone if agent not in over], where, fix=fix)


def check_agent_observation(agent: Any, space: Callable[[Any], Any], obs: Any, where: str) -> Iterator[Fault]:
    """Yields faults in one agent's observation; none if the agent's space is unknown."""
    where = f"{where}: agent {agent!r}"
    if obs is None:
        yield fault("none", where)
        return
    with contextlib.suppress(LookupError):
        found = space(agent)
        yield from check_observation("observation", found, obs, where)


def _per_agent(name: str, agents: Iterable[Any], where: str, **values: Any) -> Iterator[Fault]:
    return (fault(name, where, agent=agent, **values) for agent in agents)


def _list_missing(part: Collection[Any], agents: Iterable[Any]) -> list[Any]:
    return [agent for agent in agents if agent not in part]


def _check_names(name: str, part: Mapping[Any, Any], possible: Collection[Any], where: str) -> Iterator[Fault]:
    return _per_agent("unknown", _list_missing((*possible, ALL, COMMON), part)[:1], where, what=name)


def _check_agent_observations(
    space: Callable[[Any], Any], obs: Mapping[Any, Any], agents: Iterable[Any], where: str
) -> Iterator[Fault]:
    for agent in agents:
        if agent in obs:
            yield from check_agent_observation(agent, space, obs[agent], where)


def _check_agents(agents: Collection[Any], possible: Collection[Any], where: str) -> Iterator[Fault]:
    yield from _per_agent("stranger", _list_missing(possible, agents)[:1], where, want=list(possible))
    if len(set(agents)) < len(agents):
        yield fault("twice", where, got=list(agents))


def _check_rewards_and_flags(
    reward: Mapping[Any, Any], flags: Mapping[str, Mapping[Any, Any]], where: str
) -> Iterator[Fault]:
    for agent, number in reward.items():
        yield from check_reward(number, f"{where}: agent {agent!r}")
    for name, part in flags.items():
        for agent, flag in part.items():
            if not is_flag(flag):
                yield fault("flags", where, what=name, agent=agent, got=flag, type=type(flag).__name__)


def _describe_size(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
