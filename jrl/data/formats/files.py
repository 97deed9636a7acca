"""What all formats share: files written whole or not at all, limits on what is read, spaces and notes as JSON."""

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
_SHARE = 0.5  # of the free memory: reading makes a second copy of most arrays, and learning needs room, too
MOST_TEXT = 2**24  # bytes of a file of spaces and notes: as Python's objects they take fifty times as much
LONGEST_LABEL = 1000  # characters of a text: numpy gives all texts of an array the room of the longest


def library(name: str, what: str) -> Any:
    """Imports a module of a package of the extra `data`. Raises InputError: it is not installed; `what` needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(f"data: {what}: {cannot_import(name.partition('.')[0], e, _EXTRA)}") from e


def reason(error: BaseException) -> str:
    """Returns the text of an error, for a message of ours; its name if it has none."""
    if isinstance(error, KeyError) and error.args:
        name = str(error.args[0])  # HDF5's are sentences
        return name if " " in name else f"{name} is missing"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns what reading raises into an InputError: a file may be damaged in ways that no reader has thought of."""
    try:
        yield
    except InputError:
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.strerror:
            fix = "check that the path exists and may be read"
            raise InputError(f"data: {path} cannot be read ({e.strerror}): {fix}") from e
        raise InputError(f"data: {path} is damaged ({reason(e)}): fetch it again, or write it anew") from e


# ---------------------------------------------------------------- writing


@contextlib.contextmanager
def written_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `path`, which takes its place at the end of the block."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---------------------------------------------------------------- limits


def most() -> int:
    """Returns the bytes that the arrays of a data set may take, unpacked."""
    free = machine.free_bytes()
    return 2**62 if free is None else int(_SHARE * free)


def check_size(path: Path | str, needed: int) -> None:
    """Raises InputError: the arrays of a file take more than their share of the free memory."""
    if needed > (limit := most()):
        raise InputError(
            f"data: {path}: expected at most {machine.format_bytes(limit)} of arrays, half of the free memory, got "
            f"{machine.format_bytes(needed)} once they are unpacked: split the data set, or read it on a larger machine"
        )


def texts(given: Sequence[str], where: str) -> np.ndarray:
    """Returns texts as an array. Raises InputError: a text is too long for a label."""
    if (longest := max(map(len, given), default=0)) > LONGEST_LABEL:
        most = f"texts of at most {LONGEST_LABEL} characters"
        raise InputError(f"{where}: expected {most}, got {longest:,}: shorten them")
    return np.array(given, str)


def small_text(path: Path) -> str:
    """Returns the text of a small file. Raises InputError: it is too large. OSError, UnicodeDecodeError: damaged."""
    if (found := path.stat().st_size) > MOST_TEXT:
        most = f"at most {machine.format_bytes(MOST_TEXT)} of JSON"
        raise InputError(f"data: {path}: expected {most}, got {machine.format_bytes(found)}: write it anew")
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------- the description beside the arrays


class About(NamedTuple):  # fields of an EpisodeStore beside its arrays
    observation: Space
    action_space: Space
    meta: dict[str, Any]
    notes: tuple[str, ...]


def about_to_json(store: EpisodeStore) -> dict[str, Any]:
    """Describes a store as JSON; the path that it was read from is left out."""
    meta = {k: v for k, v in store.meta.items() if k != "path"}
    spaces = {"observation": space_to_json(store.observation), "action": space_to_json(store.action_space)}
    return plain({**spaces, "meta": meta, "notes": list(store.notes)})


def about_from_json(found: Any) -> About:
    """Reads what `about_to_json` wrote. Raises KeyError, ValueError, TypeError: it is not of that form."""
    spaces = space_from_json(found["observation"]), space_from_json(found["action"])
    return About(*spaces, dict(found["meta"]), tuple(map(str, found.get("notes", ()))))
