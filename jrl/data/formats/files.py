"""Functions shared by all formats: error messages, limits of sizes, and the description of a store as JSON."""

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.data.store import EpisodeStore
from jrl.errors import InputError, cannot_import
from jrl.host import machine
from jrl.spaces_json import plain, space_from_json, space_to_json
from jrl.types import Space

_EXTRA = "'jrl[data]'"
_MEMORY_SHARE = 0.5  # share of the free memory: reading copies most arrays, and learning needs memory, too
MAX_TEXT = 2**24  # bytes of a file of spaces and notes: Python's objects take fifty times as much
MAX_LABEL = 1000  # characters of a label: numpy stores each text of an array with the length of the longest


def import_library(name: str, what: str) -> Any:
    """Returns a module of a package of the extra `data`. Raises InputError: not installed, but needed by `what`."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(f"data: {what}: {cannot_import(name.partition('.')[0], e, _EXTRA)}") from e


def describe_error(error: BaseException) -> str:
    """Returns the text of an error for a message, or its class name if the text is empty."""
    if isinstance(error, KeyError) and error.args:
        name = str(error.args[0])  # h5py's is a sentence
        return name if " " in name else f"{name} is missing"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns any error of reading into an InputError: a damaged file can raise errors of many types."""
    try:
        yield
    except InputError:
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.strerror:
            fix = "check that the path exists and may be read"
            raise InputError(f"data: {path} cannot be read ({e.strerror}): {fix}") from e
        raise InputError(f"data: {path} is damaged ({describe_error(e)}): download or write it again") from e


@contextlib.contextmanager
def write_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `path`, and renames it to `path` at the end of the block."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def size_limit() -> int:
    """Returns the largest size of a data set's unpacked arrays, in bytes."""
    free = machine.free_bytes()
    return 2**62 if free is None else int(_MEMORY_SHARE * free)


def check_size(path: Path | str, needed: int) -> None:
    """Checks the size of a file's unpacked arrays, in bytes. Raises InputError: above `size_limit`."""
    if needed > (limit := size_limit()):
        raise InputError(
            f"data: {path}: expected at most {machine.format_bytes(limit)} of arrays, half of the free memory, got "
            f"{machine.format_bytes(needed)} unpacked: split the data set, or read it on a larger machine"
        )


def build_text_array(given: Sequence[str], where: str) -> np.ndarray:
    """Returns texts as an array. Raises InputError: a text is longer than MAX_LABEL."""
    if (longest := max(map(len, given), default=0)) > MAX_LABEL:
        limit = f"texts of at most {MAX_LABEL} characters"
        raise InputError(f"{where}: expected {limit}, got {longest:,}: shorten them")
    return np.array(given, str)


def read_small_text(path: Path) -> str:
    """Returns the text of a file. Raises InputError: larger than MAX_TEXT. OSError, UnicodeDecodeError: damaged."""
    if (found := path.stat().st_size) > MAX_TEXT:
        limit = f"at most {machine.format_bytes(MAX_TEXT)} of JSON"
        raise InputError(f"data: {path}: expected {limit}, got {machine.format_bytes(found)}: write it again")
    return path.read_text(encoding="utf-8")


class Description(NamedTuple):
    """Fields of an EpisodeStore without its arrays."""

    observation: Space
    action_space: Space
    meta: dict[str, Any]
    notes: tuple[str, ...]


def description_to_json(store: EpisodeStore) -> dict[str, Any]:
    """Returns the description of a store as JSON, without the store's path."""
    meta = {k: v for k, v in store.meta.items() if k != "path"}
    spaces = {"observation": space_to_json(store.observation), "action": space_to_json(store.action_space)}
    return plain({**spaces, "meta": meta, "notes": list(store.notes)})


def description_from_json(found: Any) -> Description:
    """Returns the description that `description_to_json` wrote. Raises KeyError, ValueError, TypeError: other forms."""
    spaces = space_from_json(found["observation"]), space_from_json(found["action"])
    return Description(*spaces, dict(found["meta"]), tuple(map(str, found.get("notes", ()))))
