"""Limits on what reading a data set may take, checked before anything is unpacked."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jrl.errors import InputError
from jrl.host import room

SHARE = 0.5  # of the free memory: reading makes a second copy of most arrays, and learning needs room, too
MOST_TEXT = 2**24  # bytes of a file of spaces and notes: as Python's objects they take fifty times as much
LONGEST_LABEL = 1000  # characters of a text: numpy gives all texts of an array the room of the longest


def most() -> int:
    """Returns the bytes that the arrays of a data set may take, unpacked."""
    free = room.host_available()
    return 2**62 if free is None else int(SHARE * free)


def check(path: Path | str, needed: int) -> None:
    """Raises InputError: the arrays of a file take more than their share of the free memory."""
    if needed > (limit := most()):
        raise InputError(
            f"data: {path}: expected at most {room.words(limit)} of arrays, half of the free memory, got "
            f"{room.words(needed)} once they are unpacked: split the data set, or read it on a larger machine"
        )


def texts(given: Sequence[str], where: str) -> np.ndarray:
    """Returns texts as an array. Raises InputError: one of them is too long for a label."""
    if (longest := max(map(len, given), default=0)) > LONGEST_LABEL:
        raise InputError(
            f"{where}: expected texts of at most {LONGEST_LABEL} characters, got {longest:,}: shorten them"
        )
    return np.array(given, str)


def text(path: Path) -> str:
    """Returns the text of a small file. Raises InputError: it is too large. OSError, UnicodeDecodeError: damaged."""
    found = path.stat().st_size
    if found > MOST_TEXT:
        raise InputError(
            f"data: {path}: expected at most {room.words(MOST_TEXT)} of JSON, got {room.words(found)}: write it anew"
        )
    return path.read_text(encoding="utf-8")
