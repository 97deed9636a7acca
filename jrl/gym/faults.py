"""Faults in what a Gymnasium environment returned, and the user's line that raised.

One set of words for `jrl.envs.checker`, for the first steps of every run and for worker processes. These load this file
by itself: it imports nothing of jrl.
"""

import contextlib
import dis
import inspect
import math
import os
import signal
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

FIRST_STEPS = 32  # of each environment, that a run looks at closely
# types of rewards and flags with which nothing is wrong
NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_))
FLAGS = frozenset((bool, np.bool_))
_ROUNDING = 1e-5  # of a bound, by which float32 may be beyond it
_KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")

Fault = tuple[str, bool, str]  # kind, whether it is a problem, message


def kind(space: Any) -> str:
    """Returns the name of a space's class, or of the first known one that it extends."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


# ---------------------------------------------------------------- what a reset or step returned


class Breach(ValueError):
    """An environment does not keep to its interface, so that making it anew would not help. A line for each fault."""


def refused(space: Any, result: Any, *, reset: bool, where: str = "") -> list[str]:
    """Returns a line for each fault in the result of a reset or step that a run cannot learn from.

    Bounds of floats are not among it, which many environments exceed by a little; nor are numbers that are not finite,
    which a transform of the user's may replace: `run.on_nonfinite` says what becomes of an update.
    """
    found = (of_reset if reset else of_step)(space, result, where or ("a reset" if reset else "a step"))
    return [message for fault, wrong, message in found if wrong and not fault.endswith(("bounds", "finite"))]


def place_in_time(steps: int, *, reset: bool) -> str:
    """Describes when a result came: after so many steps."""
    if not reset:
        return f"step {steps}"
    return f"the reset after step {steps}" if steps else "the first reset"


def of_reset(space: Any, result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the result of a reset."""
    if not isinstance(result, tuple) or len(result) != 2:
        yield "reset", True, f"{where} returned no pair: return (observation, info)"
    else:
        for fault, wrong, message in of_observation("observation", space, result[0]):
            yield fault, wrong, f"{where}: {message}"
        yield from _of_info(result[1], where)


def of_step(space: Any, result: Any, where: str) -> Iterator[Fault]:
    """Yields faults in the result of a step."""
    if not isinstance(result, tuple) or len(result) != 5:
        size = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        mend = "return (observation, reward, terminated, truncated, info)"
        yield "step", True, f"{where} returned {size}: {mend}"
        return
    obs, reward, terminated, truncated, info = result
    for fault, wrong, message in of_observation("observation", space, obs):
        yield fault, wrong, f"{where}: {message}"
    yield from _of_rest(reward, terminated, truncated, info, where)


def _of_rest(reward: Any, terminated: Any, truncated: Any, info: Any, where: str) -> Iterator[Fault]:
    yield from _of_info(info, where)
    for fault, message in of_reward(reward):
        yield fault, True, f"{where}: {message}"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not is_flag(flag):
            message = f"{where}: {name} is {_short(flag)}, a {type(flag).__name__}: return bool({name})"
            yield name, True, message


def _of_info(info: Any, where: str) -> Iterator[Fault]:
    if not isinstance(info, dict):
        yield "info", True, f"{where}: info is {_short(info)}, a {type(info).__name__}: return a dict, such as {{}}"


def of_reward(reward: Any) -> Iterator[tuple[str, str]]:
    """Yields faults of a reward: kind and message."""
    number = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if shape := np.shape(reward):
            yield "reward", f"reward of shape {shape}: return one number, such as float(reward.sum())"
            return
        # of a text, too, float makes a number, and of a complex one
        if not isinstance(reward, str | bytes) and getattr(getattr(reward, "dtype", None), "kind", "f") not in "cmMSU":
            number = float(reward)
    if number is None:
        yield "reward", f"reward {_short(reward)} is no number: return a float"
    elif not math.isfinite(number):
        yield "reward finite", f"reward is {number}: no algorithm can learn from it; find the division or logarithm"


def is_flag(value: Any) -> bool:
    """Returns whether a value is true or false: a bool, 0, 1, or an array of such a value without axes."""
    if type(value) in FLAGS:
        return True
    with contextlib.suppress(Exception):  # the value may be an object of any class
        array = np.asarray(value)
        return array.shape == () and array.dtype.kind in "biuf" and bool((array == 0) | (array == 1))
    return False


def plain(reward: Any, terminated: Any, truncated: Any, info: Any) -> bool:
    """Returns whether `of_step` would find nothing wrong beside the observation."""
    if not (isinstance(info, dict) and is_flag(terminated) and is_flag(truncated)):
        return False
    return type(reward) in NUMBERS or all(fault.endswith("finite") for fault, _ in of_reward(reward))


def of_observation(name: str, space: Any, obs: Any) -> Iterator[Fault]:
    """Yields faults in the observation of one environment, in Gymnasium's space."""
    what = kind(space)
    if what == "Dict":
        if not isinstance(obs, Mapping) or set(obs) != set(space.spaces):
            keys = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            yield name, True, f"{name} has {keys}, but the space has {sorted(map(str, space.spaces))}: return a dict"
            return
        for key, part in space.spaces.items():
            yield from of_observation(f"{name}[{key!r}]", part, obs[key])
    elif what == "Tuple":
        if not isinstance(obs, tuple | list) or len(obs) != len(space.spaces):
            yield name, True, f"{name} is {_short(obs)}, but the space is a Tuple of {len(space.spaces)}: return one"
            return
        for i, part in enumerate(space.spaces):
            yield from of_observation(f"{name}[{i}]", part, obs[i])
    else:
        try:
            value = np.asarray(obs)
        except (TypeError, ValueError):
            yield name, True, f"{name} is {_short(obs)}, no array: return one of the space {space}"
            return
        yield from of_array(name, value, tuple(space.shape), np.dtype(space.dtype), *bounds(space))


def bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and highest values [*shape] of a space that is one array."""
    what = kind(space)
    if what == "Box":
        return np.asarray(space.low), np.asarray(space.high)
    low = np.asarray(getattr(space, "start", 0))
    sizes = {"Discrete": lambda: space.n, "MultiDiscrete": lambda: space.nvec, "MultiBinary": lambda: 2}[what]()
    shape = tuple(space.shape)
    return np.broadcast_to(low, shape), np.broadcast_to(low + np.asarray(sizes) - 1, shape)


def of_array(
    name: str, value: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, low: np.ndarray, high: np.ndarray
) -> Iterator[Fault]:
    """Yields faults in an array of a space; `low` and `high` broadcast to `shape`."""
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
        limits = f"[{low[where]:g}, {high[where]:g}]"
        message = f"{name}{_index(where)} is {float(value[where]):g}, outside {limits}: widen the space, or clip it"
        yield f"{name} range" if plain(dtype) else f"{name} bounds", True, message


def place(wrong: np.ndarray) -> tuple[int, ...]:
    """Returns the index of the first true element."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]" if where else ""


def takes_seed(env: Any) -> bool:
    """Returns whether the reset of an environment, or of what it wraps, takes a seed."""
    reset = getattr(env, "unwrapped", env).reset
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):  # of a builtin
        return True
    return "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def seeded(env: Any, seed: int) -> Any:
    """Returns `env.reset(seed=seed)`. Raises Breach: it takes no seed."""
    try:
        return env.reset(seed=seed)
    except TypeError as e:
        if takes_seed(env):
            raise
        raise Breach(NO_SEED) from e


NO_SEED = "reset takes no seed: declare reset(self, *, seed=None, options=None)"


# ---------------------------------------------------------------- exceptions

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CALLER = os.path.join("gymnasium", "envs", "registration.py")  # calls constructors, too
_IN_JAX = os.path.join("", "jax", "_src", "")
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def own(error: BaseException) -> bool:
    """Returns whether an exception is the environment's own, and not a Ctrl-C or other signal that came while it ran.

    SystemExit and KeyboardInterrupt are, where the environment raises them: it has no say in when the run ends.
    """
    if isinstance(error, Exception):
        return True
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = last = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return False
        last, trace = trace, trace.tb_next
    if isinstance(error, KeyboardInterrupt) and last is not None:  # Python's own handler has no frame, and no `raise`
        return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]].startswith("RAISE")
    return not isinstance(error, GeneratorExit)


def _code(handler: Any) -> Any:
    return getattr(getattr(handler, "__func__", handler), "__code__", handler)


def line(error: BaseException) -> str:
    """Returns `file:line: Type: text` of the user's line that raised, or of what it called."""
    error, frames = _traced(error)
    if not frames:
        return _said(error)
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}: {_said(error)}"


def described(error: BaseException) -> str:
    """Returns kind, message and place of an exception, as part of a sentence."""
    error, frames = _traced(error)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return _said(error) + where


def stack(error: BaseException) -> str:
    """Returns the user's frames of an exception, a line each, outermost first."""
    return "".join(f"\n  {_shown(f.filename)}:{f.lineno}, in {f.name}: {f.line}" for f in _traced(error)[1])


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else text[:400] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _traced(error: BaseException) -> tuple[BaseException, list[traceback.FrameSummary]]:
    """Returns the exception, or its cause where only others' frames are in it, and its frames, outermost first, of the
    user's files or, where there are none, of all that are not jrl's."""
    others: list[traceback.FrameSummary] = []
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, SyntaxError) and at.filename:
            return at, [traceback.FrameSummary(at.filename, at.lineno or 0, "", lookup_line=False, line="")]
        frames = [f for f in traceback.extract_tb(at.__traceback__) if not f.filename.startswith((_OURS, "<frozen"))]
        if users := [f for f in frames if not f.filename.startswith(_INSTALLED)]:
            return at, users
        # of an installed environment that jax traces, the line that called jax
        others = others or [f for f in frames if _IN_JAX not in f.filename] or frames
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return error, others


def place_of(fn: Any) -> str:
    """Returns ` (file:line)`, where a function is defined; empty where that is not known."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)  # `func`: of a functools.partial
    return f" ({_shown(code.co_filename)}:{code.co_firstlineno})" if code else ""


def of_making(error: BaseException) -> tuple[str, str] | None:
    """Returns the key, `options` or `id`, that keeps an environment from being made, and why; None where it is another.

    A TypeError of the call itself, an argument that the constructor does not take, is told from one in its body.
    """
    if type(error).__name__ == "NotAnEnvironment":  # a worker process has another copy of its class
        return "id", str(error)
    if isinstance(error, ImportError):
        return "id", line(error) + mend_of_import(error)
    if "gymnasium.error" in {cls.__module__ for cls in type(error).__mro__}:
        return "id", str(error)
    if isinstance(error, TypeError):
        return ("options", str(error)) if _of_call(error) else ("id", line(error))
    return None


def _of_call(error: BaseException) -> bool:
    at: BaseException | None = error
    while at is not None:
        files = [f.filename for f in traceback.extract_tb(at.__traceback__)]
        if not isinstance(at, TypeError) or not all(f.startswith(_OURS) or f.endswith(_CALLER) for f in files):
            return False
        at = at.__cause__ or at.__context__
    return True


def _shown(path: str) -> str:
    """Returns the path relative to the working directory, where that is shorter."""
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(path)
        return relative if not relative.startswith("..") and os.path.isabs(path) else path
    return path


def mend_of_import(error: BaseException) -> str:
    """Returns `: pip install NAME` of a module that is missing."""
    name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    return f": pip install {name.partition('.')[0]}" if name else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
