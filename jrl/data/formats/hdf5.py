"""HDF5 files: opening those of anybody, reading and writing arrays in them."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.data.formats import files
from jrl.errors import InputError

_ROWS = 64  # rows that are read at once where each has a length of its own
_CHUNK_BYTES = 2**20  # what HDF5 keeps of a data set in memory


def h5py() -> Any:
    """Imports h5py. Raises InputError: it is not installed."""
    return files.library("h5py", "HDF5 files")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a file for reading, after a check of everything in it.

    HDF5 can take the numbers of an array, or whole parts of a file, from other files of the reader's machine. A file
    from another person would bring these into the data set, so all such links are refused.

    Raises:
      InputError: the file is not HDF5, is damaged where the block reads it, refers to other files, or holds more than
        the memory takes.
    """
    with files.reading(path), h5py().File(path, "r") as file:
        files.check_size(path, _announced(file, path))
        yield file


def _announced(file: Any, path: Path) -> int:
    """Returns the bytes of all arrays in a file, unpacked. Nothing of them is read.

    Raises:
      InputError: a link or an array refers to another place or file, or a group stands in itself.
    """
    module = h5py()
    total, groups, left = 0, set(), [("", file)]
    while left:
        place, group = left.pop()
        address = module.h5o.get_info(group.id).addr
        if address in groups:
            raise InputError(f"data: {path}: {place[:200]}: the group stands in the file twice: write the file anew")
        groups.add(address)
        for name in group:
            where, outside = f"{place}/{name}".lstrip("/"), ""
            if not isinstance(group.get(name, getlink=True), module.HardLink):
                outside = "a link"
            elif isinstance(found := group[name], module.Group):
                left.append((where, found))
            elif isinstance(found, module.Dataset):
                if found.external:
                    outside = "an array in another file (external storage)"
                elif found.is_virtual:
                    outside = "an array of parts of other files (a virtual data set)"
                total += found.nbytes if found.shape is not None else 0
            if outside:
                what = f"expected numbers in this file, got {outside}, which is not followed"
                raise InputError(f"data: {path}: {where[:200]}: {what}: write the file anew with the arrays themselves")
    return total


def array(found: Any) -> np.ndarray:
    """Reads an array. Of rows with lengths of their own, such as texts, no header says how much they take together.

    Raises:
      InputError: such rows take more than the memory has.
    """
    if found.dtype.kind != "O" or not found.shape:
        return np.asarray(found[()])
    parts, taken = [], 0
    for first in range(0, len(found), _ROWS):
        part = found[first : first + _ROWS]
        taken += sum(getattr(x, "nbytes", 0) or len(x) for x in part.reshape(-1) if x is not None)
        files.check_size(found.file.filename, taken)
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, object)


def check_names(path: Path, names: Sequence[tuple[str, ...]], *, nested: bool) -> None:
    """Raises InputError: two arrays would have one name in the file, or HDF5 cannot keep a name.

    HDF5 takes names with / for paths: "a/b" and the "b" of a Dict "a" are one array. `names` has those on the way to
    each array; `nested` says that a name with / is found again.
    """
    mend = "rename it, or write the format jrl"
    taken: dict[tuple[str, ...], tuple[tuple[str, ...], bool]] = {}  # place -> name, whether an array is there
    for name in names:
        place = tuple(part for one in name for part in one.split("/"))
        if not all(place) or "." in place or (len(place) > len(name) and not nested):
            raise InputError(f"data: {path}: HDF5 cannot keep the name {name[-1]!r:.80}: {mend}")
        for end in range(1, len(place) + 1):
            other, is_array = taken.setdefault(place[:end], (name, end == len(place)))
            if other is not name and (is_array or end == len(place)):
                one, two = (str(list(found))[:80] for found in (other, name))
                raise InputError(f"data: {path}: HDF5 cannot tell the names {one} and {two} apart: {mend}")


def put(group: Any, name: str, array: np.ndarray, *, compress: bool) -> None:
    """Writes an array [n, *] that other programs can append rows to."""
    how = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compress else {}
    rows = min(len(array), _CHUNK_BYTES // max(1, array[:1].nbytes))
    chunks = tuple(max(1, n) for n in (rows, *array.shape[1:]))
    group.create_dataset(name, data=array, maxshape=(None, *array.shape[1:]), chunks=chunks, **how)
