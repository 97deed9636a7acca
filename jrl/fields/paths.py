"""Paths from the user. `resolve` checks each path once, before anything slow starts.

    config = resolve(args.config, "config", "file")
    png = resolve(args.out, "--out", "new file")  # checks that the file can be written
    with written(png, "--out") as part:           # `part` replaces `png` at the end of the block
        figure.savefig(part)

The returned paths are absolute, because environments may call `os.chdir`.
"""

import contextlib
import glob
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jrl.errors import InputError, short

Expected = Literal["any", "file", "directory", "new file", "new directory"]
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_]\w*))")


def resolve(given: Any, key: str, expected: Expected | None = None) -> Path:
    """Returns the absolute path of a text or a Path, with `~`, `~user`, `$NAME` and `${NAME}` expanded.

    Args:
      given: text or Path from the user.
      key: config key or command option, for errors.
      expected: kind of path. "any", "file" and "directory" accept a missing path, and refuse devices, pipes, sockets
        and the other kind. "new file" and "new directory" also need permission to write; "new file" makes the
        directory around it. None: do not check the disk.
    Raises:
      InputError: the path cannot be used; the message names the key and the fix.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"{key}: expected a path, got {short(given)}: give text without null characters")
    try:
        path = Path(_expand(text, key)).absolute()
    except FileNotFoundError as e:
        raise InputError(f"{key}: the working directory was deleted: change to a directory that exists") from e
    if expected is not None:
        _check_kind(path, key, expected)
    if expected is not None and expected.startswith("new "):
        _check_writable(path, key, expected)
    return path


def resolve_as_typed(given: Any, key: str, expected: Expected) -> Path:
    """Checks a path as `resolve` does, but returns it relative if the user typed it so, for messages that name it."""
    path = resolve(given, key, expected)
    return Path(given) if Path(given).absolute() == path else path


def resolve_glob(given: Any, key: str) -> str:
    """Returns an absolute glob; characters of the working directory are escaped. An existing path is no glob."""
    path, here = str(resolve(given, key)), str(Path.cwd())
    if os.path.lexists(path) or Path(given).is_absolute() or not path.startswith(here):
        return path
    return glob.escape(here) + path[len(here) :]


def _expand(text: str, key: str) -> str:
    expanded = os.path.expanduser(text)
    name = expanded.partition("/")[0]
    if expanded.startswith("~") and not os.path.lexists(name):
        raise InputError(f"{key}: there is no user {short(name[1:])}: write ./{name} for a file of that name")
    if "$" not in expanded or os.path.lexists(expanded):
        return expanded
    unset = [a or b for a, b in _VARIABLE.findall(expanded) if (a or b) not in os.environ]
    if unset:
        raise InputError(f"{key}: {short(text)}: the variable {short(unset[0])} is not set: set it, or write its value")
    return os.path.expandvars(expanded)


def _check_kind(path: Path, key: str, expected: Expected) -> None:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        if expected.startswith("new "):
            raise unwritable(path, key, e) from e
        raise InputError(f"{key}: cannot read {shorten(path)}: {e.strerror}: choose another path") from e
    wanted = "file or directory" if expected == "any" else expected.removeprefix("new ")
    is_wanted = (stat.S_ISREG(mode) and wanted != "directory") or (stat.S_ISDIR(mode) and wanted != "file")
    # `jrl train <(...)`: the pipe of the shell has no name on the disk
    is_piped = expected == "file" and stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path))
    if not (is_wanted or is_piped):
        raise InputError(f"{key}: {shorten(path)}: expected a {wanted}, got a {_kind(mode)}: choose another path")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISREG, "file"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")


def _check_writable(path: Path, key: str, expected: Expected) -> None:
    """Tries to make a temporary file in the directory, or in its nearest existing parent."""
    try:
        if expected == "new file":
            path.parent.mkdir(parents=True, exist_ok=True)
            directory = path.parent
        else:
            directory = next(candidate for candidate in (path, *path.parents) if candidate.exists())
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as e:
        raise unwritable(path, key, e) from e


def unwritable(path: Path, key: str, e: OSError) -> InputError:
    """Returns the InputError for a path that cannot be written."""
    why = "a part of its path is a file" if isinstance(e, FileExistsError | NotADirectoryError) else e.strerror or e
    return InputError(f"{key}: cannot write to {shorten(path)}: {why}: choose another path")


def shorten(path: Path) -> str:
    """Returns a path for messages, at most 200 characters."""
    return str(path) if len(str(path)) <= 200 else short(str(path))


@contextlib.contextmanager
def written(path: Path, key: str | None = None) -> Iterator[Path]:
    """Yields a temporary path with the same suffix beside `path`; its file replaces `path` at the end of the block.

    Raises:
      InputError: the file could not be written; without a key an OSError. An earlier file at `path` stays.
    """
    part = path.with_name(f".jrl-{os.getpid()}-{os.urandom(4).hex()}{path.suffix}")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as e:
        if key is None:
            raise OSError(e.errno, e.strerror or str(e), str(path)) from e
        raise unwritable(path, key, e) from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
