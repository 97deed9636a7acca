"""What one step of an environment says: shapes, dtypes, bounds, rewards, flags, exceptions. For `jrl.envs.checker`."""

import inspect
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jrl.envs.worker_process import kind as kind_of
from jrl.spaces import leaves
from jrl.types import Box, Dict, Discrete, MultiDiscrete, PyTree, Space, StepResult, Tuple

_ROUNDING = 1e-5  # of a bound, by which float32 may be beyond it


class Findings:
    """The first of each kind: a fault in every step is one line."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._notes: dict[str, str] = {}

    def problem(self, kind: str, message: str) -> None:
        self._problems.setdefault(kind, message)

    def note(self, kind: str, message: str) -> None:
        self._notes.setdefault(kind, message)

    def __len__(self) -> int:
        return len(self._problems)

    @property
    def problems(self) -> list[str]:
        return list(self._problems.values())

    @property
    def notes(self) -> list[str]:
        return list(self._notes.values())


class Watch:
    """Looks at what one Gymnasium environment returns, and how long it takes."""

    def __init__(self, i: int, env: Any, found: Findings):
        self._i, self._found, self._count = i, found, 0
        self._space, self._reset, self._step = env.observation_space, env.reset, env.step
        self.seconds: list[float] = []
        self.attached = True
        try:
            env.reset, env.step = self.reset, self.step
        except AttributeError:  # a class of its own kind, with __slots__
            self.attached = False

    def reset(self, **kwargs: Any) -> Any:
        where = f"the reset after step {self._count}" if self._count else "the first reset"
        if self._count == 0 and "seed" in kwargs and not _takes_seed(self._reset):
            self._found.problem("seed", "reset takes no seed: declare reset(self, *, seed=None, options=None)")
            raise TypeError("reset takes no seed")
        result = self._timed(where, self._reset, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            self._found.problem("reset", f"{where} returned no pair: return (observation, info)")
            return result
        obs, info = result
        self._look(where, obs, info)
        return result

    def step(self, action: Any) -> Any:
        self._count += 1
        where = f"step {self._count}"
        result = self._timed(where, self._step, action)
        if not isinstance(result, tuple) or len(result) != 5:
            size = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
            mend = "return (observation, reward, terminated, truncated, info)"
            self._found.problem("step", f"{where} returned {size}: {mend}")
            return result
        obs, reward, terminated, truncated, info = result
        self._look(where, obs, info)
        _look_at_reward(self._found, where, reward)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                message = f"{where}: {name} is {_short(flag)}, a {type(flag).__name__}: return bool({name})"
                self._found.problem(name, message)
        return result

    def _timed(self, where: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            result = fn(*args, **kwargs)
        except Exception as e:
            self._found.problem(
                f"raises in {'step' if args else 'reset'}",
                f"environment {self._i} raises in {where}: {described(e)}: mend it; with "
                "env_runners.restart_failed_sub_environments a run goes on and makes it anew",
            )
            raise
        if self._count:  # what is made ready at the first reset is no measure
            self.seconds.append(time.perf_counter() - began)
        return result

    def _look(self, where: str, obs: Any, info: Any) -> None:
        for kind, wrong, message in _observation_faults("observation", self._space, obs):
            (self._found.problem if wrong else self._found.note)(kind, f"{where}: {message}")
        if not isinstance(info, dict):
            message = f"{where}: info is {_short(info)}, a {type(info).__name__}: return a dict, such as {{}}"
            self._found.problem("info", message)


def _takes_seed(reset: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):  # of a builtin
        return True
    return "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# ---------------------------------------------------------------- looking at one row

_Fault = tuple[str, bool, str]  # kind, whether it is a problem, message


def look_at(
    found: Findings, space: Space, num_envs: int, where: str, obs: PyTree, result: StepResult | None = None
) -> None:
    """A row of B environments that was not looked at before its conversion."""
    for kind, message in _row_faults("observation", space, num_envs, obs):
        found.problem(kind, f"{where}: {message}")
    if result is None:
        return
    rewards: Any = result.reward
    if rewards.shape != (num_envs,):
        found.problem("reward", f"{where}: rewards of shape {rewards.shape}, not ({num_envs},): one per environment")
    else:
        for reward in rewards:
            _look_at_reward(found, where, reward)
    for name in ("terminated", "truncated"):
        flags = getattr(result, name)
        if flags.shape != (num_envs,) or flags.dtype != bool:
            message = f"{where}: {name} is {flags.dtype} {flags.shape}, not bool ({num_envs},): one per environment"
            found.problem(name, message)


def _row_faults(name: str, space: Space, num_envs: int, obs: PyTree) -> Iterator[tuple[str, str]]:
    """Of B environments, in our space: kinds and messages."""
    if isinstance(space, Dict | Tuple):
        parts: Any = dict(space.items) if isinstance(space, Dict) else dict(enumerate(space.items))
        named = isinstance(space, Dict)
        fits = isinstance(obs, dict) and set(obs) == set(parts) if named else isinstance(obs, tuple)
        if not fits or len(obs) != len(parts):
            has = f"a dict of {sorted(obs)}" if isinstance(obs, dict) else f"a {type(obs).__name__}"
            yield (
                name,
                f"{name} is {has}, but the space has {sorted(parts) if named else len(parts)}: return such a one",
            )
            return
        for key, part in parts.items():
            yield from _row_faults(f"{name}[{key!r}]", part, num_envs, obs[key])
        return
    low, high = _bounds(space)
    if obs.dtype != space.dtype:  # nothing converts it
        yield f"{name} dtype", f"{name} of {obs.dtype}, but the space has {space.dtype}: convert it with astype"
    batched = (num_envs, *space.shape)
    for kind, wrong, message in _array_faults(name, np.asarray(obs), batched, obs.dtype, low[None], high[None]):
        if wrong:
            yield kind, message


def look_at_mask(found: Findings, action: Space, where: str, mask: np.ndarray, done: np.ndarray) -> None:
    """Environments [B] that go on must allow an action: one of each choice that `mask` [B, K] bool is of."""
    at = 0
    for path, size in choices(action):
        none = ~mask[:, at : at + size].any(axis=-1) & ~done
        at += size
        if none.any():
            (i,) = place(none)
            what = f" for {path}" if path else ""
            found.problem(
                "action_mask",
                f"{where}: the action_mask of environment {i} allows no action{what}, but its episode goes on: allow "
                "one, or end the episode on this step",
            )


def choices(action: Space) -> list[tuple[str, int]]:
    """What a mask is of: the path to a choice and how many numbers it is among, in the order of the mask."""
    found: list[tuple[str, int]] = []
    for path, leaf in leaves(action):
        if isinstance(leaf, Discrete):
            found.append((path, leaf.n))
        elif isinstance(leaf, MultiDiscrete):
            found += [(f"{path}/{i}" if path else str(i), n) for i, n in enumerate(leaf.nvec)]
    return found


def _look_at_reward(found: Findings, where: str, reward: Any) -> None:
    if np.ndim(reward) != 0:
        message = f"{where}: reward of shape {np.shape(reward)}: return one number, such as float(reward.sum())"
        found.problem("reward", message)
        return
    try:
        number = float(reward)
    except (TypeError, ValueError):
        found.problem("reward", f"{where}: reward {_short(reward)} is no number: return a float")
        return
    if not math.isfinite(number):
        message = f"{where}: reward is {number}: no algorithm can learn from it; find the division or logarithm"
        found.problem("reward finite", message)


def _observation_faults(name: str, space: Any, obs: Any) -> Iterator[_Fault]:
    """Of one environment, in Gymnasium's space."""
    kind = kind_of(space)
    if kind == "Dict":
        if not isinstance(obs, Mapping) or set(obs) != set(space.spaces):
            keys = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            yield name, True, f"{name} has {keys}, but the space has {sorted(map(str, space.spaces))}: return a dict"
            return
        for key, part in space.spaces.items():
            yield from _observation_faults(f"{name}[{key!r}]", part, obs[key])
    elif kind == "Tuple":
        if not isinstance(obs, tuple | list) or len(obs) != len(space.spaces):
            yield name, True, f"{name} is {_short(obs)}, but the space is a Tuple of {len(space.spaces)}: return one"
            return
        for i, part in enumerate(space.spaces):
            yield from _observation_faults(f"{name}[{i}]", part, obs[i])
    else:
        try:
            value = np.asarray(obs)
        except (TypeError, ValueError):
            yield name, True, f"{name} is {_short(obs)}, no array: return one of the space {space}"
            return
        low, high = _bounds(space)
        yield from _array_faults(name, value, tuple(space.shape), np.dtype(space.dtype), low, high)


def _bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest values [*shape] of a space of Gymnasium's or ours."""
    if isinstance(space, Box):
        return space.bounds()
    kind = kind_of(space)
    if kind == "Box":
        return np.asarray(space.low), np.asarray(space.high)
    low = np.asarray(getattr(space, "start", 0))
    sizes = {"Discrete": lambda: space.n, "MultiDiscrete": lambda: space.nvec, "MultiBinary": lambda: 2}[kind]()
    shape = tuple(space.shape)
    return np.broadcast_to(low, shape), np.broadcast_to(low + np.asarray(sizes) - 1, shape)


def _array_faults(
    name: str, value: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, low: np.ndarray, high: np.ndarray
) -> Iterator[_Fault]:
    """`low` and `high` broadcast to `shape`."""
    if value.shape != shape:
        message = f"{name} of shape {value.shape}, but the space has {shape}: change the one or the other"
        yield f"{name} shape", True, message
        return
    plain = lambda x: np.issubdtype(x, np.integer) or np.issubdtype(x, np.bool_)
    floating = np.issubdtype(value.dtype, np.floating)
    if not (plain(value.dtype) or floating):
        yield f"{name} dtype", True, f"{name} of {value.dtype}, no numbers: return {dtype}"
        return
    if floating and plain(dtype):
        message = f"{name} of {value.dtype}, but the space has {dtype}, which cuts fractions off: return {dtype}"
        yield f"{name} dtype", True, f"{message}, or change the space"
    elif value.dtype != dtype and not (plain(value.dtype) and plain(dtype)):
        message = f"{name} of {value.dtype}, but the space has {dtype}: it is converted; return {dtype} to save that"
        yield f"{name} dtype", False, message
    if floating and not np.isfinite(value).all():
        where = place(~np.isfinite(value))
        message = f"{name}{_index(where)} is {value[where]}: no network can read it; find the division or overflow"
        yield f"{name} finite", True, message
        return
    low, high = (np.broadcast_to(np.asarray(b, np.float64), shape) for b in (low, high))
    slack = [np.where(np.isfinite(b), _ROUNDING * (1 + np.abs(b)), 0.0) if floating else 0.0 for b in (low, high)]
    outside = (value < low - slack[0]) | (value > high + slack[1])
    if outside.any():
        where = place(outside)
        bounds = f"[{low[where]:g}, {high[where]:g}]"
        message = f"{name}{_index(where)} is {float(value[where]):g}, outside {bounds}: widen the space, or clip it"
        yield f"{name} bounds", True, message


def place(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]" if where else ""


# ---------------------------------------------------------------- words


def described(error: Exception) -> str:
    """Kind, message and place of an exception, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{place}" if text else f"{type(error).__name__}{place}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
