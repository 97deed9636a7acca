"""The errors that a command reports without a traceback. Imports nothing, so that every module may raise them."""

from typing import Any

_LONGEST = 1200  # characters of an error


class InputError(ValueError):
    """Bad input from a user: config, environment, checkpoint or data.

    Each message names the thing and the mend; `errors` holds all that were found. Commands print them and exit with 2.
    `details` is the traceback of the user's own code, where that is at fault.
    """

    details = ""

    def __init__(self, *errors: str):
        self.errors = tuple(map(message, errors))
        super().__init__("\n".join(self.errors))


class RunnersLost(RuntimeError):
    """Processes that collect have failed, and none is left or none may be missing. The message names cause and mend."""


class EnvironmentFailed(RuntimeError):
    """An environment has raised, ended its process or not answered in time. The user's line comes first.

    `details` is the whole traceback, for those who want to see ours, too.
    """

    details = ""


def short(value: Any, most: int = 80) -> str:
    """Returns `repr(value)` for a message, in about `most` characters; raises nothing whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, nested too deeply, the user's own class
        return f"a {type(value).__name__}"
    return shown(text, most)


def shown(text: str, most: int = 80) -> str:
    """Returns a name, key or path that a user gave, without quotes, in about `most` characters.

    >>> shown("algo.lr"), shown("x" * 30_000, 25)
    ('algo.lr', 'xxxxx... (30,000 characters)')
    """
    return text if len(text) <= most else f"{text[: most - 20]}... ({len(text):,} characters)"


def message(text: str) -> str:
    """Returns the text of an error without the middle of one that is too long to read: its end says what to do."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 400]} ... ({len(text):,} characters) ... {text[-300:]}"


def details(error: BaseException) -> str:
    """Returns the traceback behind an error whose message has only the user's lines; empty where there is none."""
    at: BaseException | None = error
    while at is not None:
        if found := getattr(at, "details", ""):
            return found
        at = at.__cause__ or at.__context__
    return ""


def cannot_import(package: str, error: ImportError, install: str = "") -> str:
    """Returns why a package cannot be imported, and what to install: the package, or another one that it needs.

    Args:
      package: its name.
      error: of the import.
      install: what to install for it, where that has another name.
    """
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing == package.partition(".")[0]:
        return f"{package} is not installed: pip install {install or package}"
    if missing:
        return f"{package} needs {missing}, which is not installed: pip install {missing}"
    mend = f"a version that goes with the others may help: pip install -U {install or package}"
    return f"{package} cannot be imported ({error}): {mend}"


def counted(n: int, noun: str, form: str = "") -> str:
    """Writes a number, in the form of a format string, with its noun, in the plural unless it is 1: 2 minibatches."""
    return f"{n:{form}} {noun}{('es' if noun.endswith('batch') else 's') * (n != 1)}"
