"""Errors that a command reports without a traceback. Imports nothing of jrl, so that every module can raise them."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST = 1200  # maximum characters of an error message


class InputError(ValueError):
    """Invalid input from a user: config, environment, checkpoint or data.

    Each message names the wrong value and the fix. `errors` holds all messages. Commands print them and exit with 2.
    `details` is the traceback of the user's own code, if that code failed.
    """

    details = ""

    def __init__(self, *errors: str):
        self.errors = tuple(map(message, errors))
        super().__init__("\n".join(self.errors))


class RunnersLost(RuntimeError):
    """Env runners have failed, and too few are left to continue. The message names the cause and the fix."""


class EnvironmentFailed(RuntimeError):
    """An environment raised, ended its process or exceeded its time limit. The message begins with the user's own line.

    `details` is the complete traceback, including jrl's frames.
    """

    details = ""


def short(value: Any, most: int = 80) -> str:
    """Returns `repr(value)` for a message, shortened to about `most` characters. Never raises."""
    try:
        text = repr(value)
    except Exception:  # repr fails for ints of too many digits, deep nesting and some user classes
        return f"a {type(value).__name__}"
    return shown(text, most)


def shown(text: str, most: int = 80) -> str:
    """Returns a name, key or path from a user without quotes, shortened to about `most` characters.

    >>> shown("algo.lr"), shown("x" * 30_000, 25)
    ('algo.lr', 'xxxxx... (30,000 characters)')
    """
    return text if len(text) <= most else f"{text[: most - 20]}... ({len(text):,} characters)"


def format_names(names: Sequence[str], most: int = 8) -> str:
    """Returns names in a line; after the first `most`, only how many more there are.

    >>> format_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns ": did you mean X?" with the most similar of `names`; "" if none is similar.

    >>> did_you_mean("lenght", ["length", "mode"]), did_you_mean("x", ["length"])
    (': did you mean length?', '')
    """
    near = difflib.get_close_matches(name[:80], [*names], 1)
    return f": did you mean {near[0]}?" if near else ""


def message(text: str) -> str:
    """Returns an error message without its middle if it is too long to read; the end is kept, as it names the fix."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 400]} ... ({len(text):,} characters) ... {text[-300:]}"


def details(error: BaseException) -> str:
    """Returns the traceback stored in an error or in its causes; "" if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if traceback := getattr(cause, "details", ""):
            return traceback
        cause = cause.__cause__ or cause.__context__
    return ""


def cannot_import(package: str, error: Exception, install: str = "") -> str:
    """Returns why a package cannot be imported, and the pip command that fixes it.

    Args:
      package: name of the package.
      error: exception of the import; it may name another package that `package` needs.
      install: name to install if it differs from `package`.
    """
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing == package.partition(".")[0]:
        return f"{package} is not installed: pip install {install or package}"
    if missing:
        return f"{package} needs {missing}, which is not installed: pip install {missing}"
    fix = f"try a newer version: pip install -U {install or package}"
    return f"{package} cannot be imported ({error}): {fix}"


def counted(n: int, noun: str, form: str = "") -> str:
    """Returns a number and its noun, plural unless the number is 1: "2 minibatches". `form` is a format spec."""
    return f"{n:{form}} {noun}{('es' if noun.endswith('batch') else 's') * (n != 1)}"
