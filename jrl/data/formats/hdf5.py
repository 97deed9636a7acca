"""HDF5 files: the import of h5py, and errors of a file as one."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.errors import InputError, cannot_import

_CHUNK_BYTES = 2**20  # what HDF5 keeps of a data set in memory


def h5py() -> Any:
    """Imports h5py. Raises InputError: it is not installed."""
    try:
        import h5py as module
    except ImportError as e:
        raise InputError(f"data: HDF5 files: {cannot_import('h5py', e, 'h5py')}") from e
    return module


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a file for reading. Raises InputError: it is no such file, or damaged where the block reads it."""
    try:
        with h5py().File(path, "r") as file:
            yield file
    except InputError:
        raise
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as e:
        why = str(e).strip("\"'")
        raise InputError(f"data: {path} is damaged, or no HDF5 file ({why}): fetch it again, or write it anew") from e


def check_names(path: Path, names: Sequence[tuple[str, ...]], *, nested: bool) -> None:
    """Raises InputError: two arrays would have one name in the file, or HDF5 cannot keep a name.

    HDF5 takes names with / for paths: "a/b" and the "b" of a Dict "a" are one array.

    Args:
      path: of the file, for the error.
      names: of each array and of what it is in, from the outermost.
      nested: a name with / is found again.
    """
    mend = "rename it, or write the format jrl"
    arrays: dict[tuple[str, ...], tuple[str, ...]] = {}
    groups: dict[tuple[str, ...], tuple[str, ...]] = {}
    for name in names:
        place = tuple(part for one in name for part in one.split("/"))
        if not all(place) or "." in place or (len(place) > len(name) and not nested):
            raise InputError(f"data: {path}: HDF5 cannot keep the name {name[-1]!r:.80}: {mend}")
        above = [place[:end] for end in range(1, len(place))]
        other = next((arrays[one] for one in (*above, place) if one in arrays), groups.get(place))
        if other is not None:
            one, two = (str(list(found))[:80] for found in (other, name))
            raise InputError(f"data: {path}: HDF5 cannot tell the names {one} and {two} apart: {mend}")
        arrays[place] = name
        groups |= dict.fromkeys(above, name)


def put(group: Any, name: str, array: np.ndarray, *, compress: bool) -> None:
    """Writes an array [n, *] that other programs can append rows to."""
    how = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compress else {}
    rows = min(len(array), _CHUNK_BYTES // max(1, array[:1].nbytes))
    chunks = tuple(max(1, n) for n in (rows, *array.shape[1:]))
    group.create_dataset(name, data=array, maxshape=(None, *array.shape[1:]), chunks=chunks, **how)
