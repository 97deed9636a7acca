"""Paths that a user gives. Each goes through `resolve` once, before anything slow starts.

    config = resolve(args.config, "config", "file")
    png = resolve(args.out, "--out", "new file")  # tried: something can be written there
    with written(png, "--out") as part:           # takes the place of `png` at the end
        figure.savefig(part)

Afterwards a path is absolute: environments may call `os.chdir`.
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
_LONGEST_NAME, _LONGEST_PATH = 255, 3_500  # bytes; Linux has 255 and 4096, and a run directory needs names below it
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_]\w*))")


def resolve(given: Any, key: str, expected: Expected | None = None) -> Path:
    """Returns the absolute path that a text or a Path means, with `~`, `~user`, `$NAME` and `${NAME}` expanded.

    Args:
      given: as the user typed it.
      key: of the config, or the option, for errors.
      expected: what is looked at on the disk. "any", "file" and "directory" refuse devices, pipes, sockets and the
        wrong one of the two, and take a path where nothing is. The new ones raise as well where nothing can be written:
        "new file" makes the directory around it. None: the disk is not looked at.
    Raises:
      InputError: names the key, and what to do.
    """
    text = _text(given, key)
    path = _absolute(_expanded(text, key), key)
    names = _utf8(str(path), key).split(b"/")
    if max(map(len, names)) > _LONGEST_NAME or sum(map(len, names)) + len(names) > _LONGEST_PATH:
        most = f"names of at most {_LONGEST_NAME} bytes and {_LONGEST_PATH:,} in all"
        raise InputError(f"{key}: expected a path with {most}, got {short(text)}: use a shorter one")
    if expected is not None:
        _check_kind(path, key, expected)
    if expected is not None and expected.startswith("new "):
        _check_writable(path, key, expected)
    return path


def as_typed(given: Any, key: str, expected: Expected) -> Path:
    """Returns `resolve`'s path in the words of the user: for commands that name it and make no environment."""
    found = resolve(given, key, expected)
    return Path(given) if Path(given).absolute() == found else found


def resolve_glob(given: Any, key: str) -> str:
    """Returns an absolute glob, in which the working directory is not a pattern; of a path that exists the path."""
    path = resolve(given, key)
    if _exists(str(path)) or Path(given).is_absolute() or not str(path).startswith(here := str(Path.cwd())):
        return str(path)
    return glob.escape(here) + str(path)[len(here) :]


def _text(given: Any, key: str) -> str:
    try:
        text = os.fspath(given)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise InputError(f"{key}: expected a path, got {short(given)}")
    if "\0" in text:
        raise InputError(f"{key}: expected a path, got {short(text)}: leave the null character out")
    return text


def _utf8(text: str, key: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # bytes of the command line or of the working directory
        mend = "rename it, since JSON and YAML hold no other names"
        raise InputError(f"{key}: expected a path in UTF-8, got {short(text)}: {mend}") from None


def _expanded(text: str, key: str) -> str:
    found = os.path.expanduser(text)
    if found.startswith("~") and not os.path.lexists(found.partition("/")[0]):
        name = found.partition("/")[0]
        raise InputError(f"{key}: there is no user {short(name[1:])}: write ./{name} for a file of that name")
    if "$" not in found or _exists(found):
        return found
    unset = [a or b for a, b in _VARIABLE.findall(found) if (a or b) not in os.environ]
    if unset:
        raise InputError(f"{key}: {short(text)}: the variable {short(unset[0])} is not set: set it, or write its value")
    return os.path.expandvars(found)


def _exists(text: str) -> bool:
    try:
        return os.path.lexists(text)
    except (OSError, ValueError):
        return False


def _absolute(text: str, key: str) -> Path:
    try:
        return Path(text).absolute()
    except FileNotFoundError as e:
        raise InputError(f"{key}: the working directory was deleted: change to one that exists") from e


def _check_kind(path: Path, key: str, expected: Expected) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        if expected.startswith("new "):
            raise unwritable(path, key, e) from e
        if isinstance(e, NotADirectoryError):
            return  # as where nothing is
        raise InputError(f"{key}: cannot read {_named(path)}: {e.strerror}: choose another path") from e
    wanted = "file or directory" if expected == "any" else expected.removeprefix("new ")
    is_wanted = (stat.S_ISREG(mode) and wanted != "directory") or (stat.S_ISDIR(mode) and wanted != "file")
    # `jrl train <(...)`: the shell's own pipe, which has no name on the disk
    is_piped = expected == "file" and stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path))
    if not (is_wanted or is_piped):
        raise InputError(f"{key}: {_named(path)}: expected a {wanted}, got a {_kind(mode)}: choose another path")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISREG, "file"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_one, name in kinds if is_one(mode)), "device")


def _check_writable(path: Path, key: str, expected: Expected) -> None:
    """Makes a file that has no name in the directory, or in the nearest directory above that there is."""
    try:
        if expected == "new file":
            path.parent.mkdir(parents=True, exist_ok=True)
            place = path.parent
        else:
            place = next(directory for directory in (path, *path.parents) if directory.exists())
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as e:
        raise unwritable(path, key, e) from e


def unwritable(path: Path, key: str, e: OSError) -> InputError:
    """Returns the error of a path at which nothing can be written."""
    why = "a part of its path is a file" if isinstance(e, FileExistsError | NotADirectoryError) else e.strerror or e
    return InputError(f"{key}: cannot write to {_named(path)}: {why}: choose another path")


def _named(path: Path) -> str:
    return str(path) if len(str(path)) <= 200 else short(str(path))


@contextlib.contextmanager
def written(path: Path, key: str | None = None) -> Iterator[Path]:
    """Yields the path of a new file of the same ending beside `path`, which takes its place at the end of the block.

    Raises:
      InputError: the file could not be written; without a key the OSError. The file that was there before stays.
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
