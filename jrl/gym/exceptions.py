"""Errors of environments: their classes, the user's line, and whether the environment itself raised them."""

import contextlib
import dis
import os
import signal
import sysconfig
import traceback
from typing import Any

_JRL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GYM_MAKE = os.path.join("gymnasium", "envs", "registration.py")  # calls the constructor
_IN_JAX = os.path.join("", "jax", "_src", "")
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Breach(ValueError):
    """An environment violates its interface, so that making it again would not help. One argument per fault."""


class NotAnEnvironment(Exception):
    """The user's function did not return one environment."""


class SeveralAgents(Exception):
    """The new environment has several agents. The exception holds it, unless it is in another process."""

    def __init__(self, env: Any = None):
        super().__init__("the environment has several agents: declare them in its class or return annotation")
        self.env = env


def is_environment_error(error: BaseException) -> bool:
    """Returns whether the environment raised an exception, and not a signal such as Ctrl-C that arrived meanwhile.

    SystemExit and KeyboardInterrupt count as environment errors if the environment raises them: it may not end the run.
    """
    if isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = last = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return False
        last, trace = trace, trace.tb_next
    if (
        isinstance(error, KeyboardInterrupt) and last is not None
    ):  # Python's default handler has no frame and no `raise`
        return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]].startswith("RAISE")
    return not isinstance(error, GeneratorExit)


def _code_of(handler: Any) -> Any:
    return getattr(getattr(handler, "__func__", handler), "__code__", handler)


def format_line(error: BaseException) -> str:
    """Returns `file:line: Type: text` of the user's line that raised, or of the library line that it called."""
    error, frames = _find_user_frames(error)
    if not frames:
        return _format_error(error)
    return f"{_shorten_path(frames[-1].filename)}:{frames[-1].lineno}: {_format_error(error)}"


def describe(error: BaseException) -> str:
    """Returns type, message and place of an exception, as part of a sentence."""
    error, frames = _find_user_frames(error)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return _format_error(error) + where


def format_stack(error: BaseException) -> str:
    """Returns the user's frames of an exception, one line each, outermost first."""
    return "".join(
        f"\n  {_shorten_path(f.filename)}:{f.lineno}, in {f.name}: {f.line}" for f in _find_user_frames(error)[1]
    )


def _format_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else text[:400] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find_user_frames(error: BaseException) -> tuple[BaseException, list[traceback.FrameSummary]]:
    """Returns an exception, or the cause that has user frames, and its frames, outermost first.

    Without a frame in the user's files the frames of all other libraries are returned.
    """
    fallback: list[traceback.FrameSummary] = []
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, SyntaxError) and current.filename:
            line = traceback.FrameSummary(current.filename, current.lineno or 0, "", lookup_line=False, line="")
            return current, [line]
        trace = traceback.extract_tb(current.__traceback__)
        frames = [f for f in trace if not f.filename.startswith((_JRL, "<frozen"))]
        if users := [f for f in frames if not f.filename.startswith(_INSTALLED)]:
            return current, users
        # an installed environment that jax traces: show the line that called jax, not jax's own
        fallback = fallback or [f for f in frames if _IN_JAX not in f.filename] or frames
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return error, fallback


def format_definition(fn: Any) -> str:
    """Returns ` (file:line)`, where a function is defined; empty if unknown."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)  # functools.partial has `func`
    return f" ({_shorten_path(code.co_filename)}:{code.co_firstlineno})" if code else ""


def explain_make_error(error: BaseException) -> tuple[str, str] | None:
    """Returns the key (`options` or `id`) that keeps an environment from being made, and the reason; None: neither key.

    A TypeError of the constructor call (an unknown argument) blames `options`; a TypeError in its body blames `id`.
    """
    if isinstance(error, NotAnEnvironment):
        return "id", str(error)
    if isinstance(error, ImportError):
        return "id", format_line(error) + suggest_install(error)
    if "gymnasium.error" in {cls.__module__ for cls in type(error).__mro__}:
        return "id", str(error)
    if isinstance(error, TypeError):
        return ("options", str(error)) if _is_call_error(error) else ("id", format_line(error))
    return None


def _is_call_error(error: BaseException) -> bool:
    current: BaseException | None = error
    while current is not None:
        files = [f.filename for f in traceback.extract_tb(current.__traceback__)]
        if not isinstance(current, TypeError) or not all(f.startswith(_JRL) or f.endswith(_GYM_MAKE) for f in files):
            return False
        current = current.__cause__ or current.__context__
    return True


def _shorten_path(path: str) -> str:
    """Returns the path relative to the working directory if it is inside; otherwise the path."""
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(path)
        return relative if not relative.startswith("..") and os.path.isabs(path) else path
    return path


def suggest_install(error: BaseException) -> str:
    """Returns `: pip install NAME` for a missing module; otherwise an empty text."""
    name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    return f": pip install {name.partition('.')[0]}" if name else ""
