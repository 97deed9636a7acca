"""The user's line of an exception that an environment raised, and whether the exception is the environment's own."""

import contextlib
import dis
import os
import signal
import sysconfig
import traceback
from typing import Any

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
