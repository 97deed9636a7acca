"""HDF5 files, also from untrusted sources: opening, reading and writing."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.data.formats import files
from jrl.errors import InputError

_ROWS = 64  # rows of different lengths that are read at a time
_CHUNK_BYTES = 2**20  # chunk cache of HDF5


def import_h5py() -> Any:
    """Returns the module h5py. Raises InputError: not installed."""
    return files.import_library("h5py", "HDF5 files")


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Opens a file for reading, after a check of all groups and arrays.

    HDF5 can read an array, or whole parts of a file, from other files of the reader's machine. An untrusted file could
    copy private files into a data set, so all such links are refused.

    Raises:
      InputError: the file is not HDF5, is damaged, refers to other files, or is larger than the memory.
    """
    with files.reading(path), import_h5py().File(path, "r") as file:
        files.check_size(path, _measure_arrays(file, path))
        yield file


def _measure_arrays(file: Any, path: Path) -> int:
    """Returns the unpacked size of all arrays of a file in bytes, without reading them.

    Raises:
      InputError: a link, an array in another file, or a group that contains itself.
    """
    module = import_h5py()
    total, groups, left = 0, set(), [("", file)]
    while left:
        place, group = left.pop()
        address = module.h5o.get_info(group.id).addr
        if address in groups:
            raise InputError(f"data: {path}: {place[:200]}: the file contains this group twice: write the file again")
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
                raise InputError(f"data: {path}: {where[:200]}: {what}: write the arrays into the file")
    return total


def read_array(found: Any) -> np.ndarray:
    """Returns the array of an HDF5 data set.

    Raises:
      InputError: rows of different lengths, such as texts, take more than the memory; no header gives their size.
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
    """Checks the names of arrays, each from the file's root. Raises InputError: two arrays with one path, or bad names.

    HDF5 reads names with / as paths: "a/b" is also the "b" of a Dict "a". `nested`: whether the reader accepts them.
    """
    fix = "rename it, or write the format jrl"
    taken: dict[tuple[str, ...], tuple[tuple[str, ...], bool]] = {}  # path -> name, whether it is an array
    for name in names:
        place = tuple(part for piece in name for part in piece.split("/"))
        if not all(place) or "." in place or (len(place) > len(name) and not nested):
            raise InputError(f"data: {path}: HDF5 cannot store the name {name[-1]!r:.80}: {fix}")
        for end in range(1, len(place) + 1):
            other, is_array = taken.setdefault(place[:end], (name, end == len(place)))
            if other is not name and (is_array or end == len(place)):
                first, second = (str(list(found))[:80] for found in (other, name))
                raise InputError(f"data: {path}: the names {first} and {second} are one path in HDF5: {fix}")


def write_array(group: Any, name: str, array: np.ndarray, *, compress: bool) -> None:
    """Writes an array [n, *] as a data set to which other programs can append rows."""
    how = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compress else {}
    rows = min(len(array), _CHUNK_BYTES // max(1, array[:1].nbytes))
    chunks = tuple(max(1, n) for n in (rows, *array.shape[1:]))
    group.create_dataset(name, data=array, maxshape=(None, *array.shape[1:]), chunks=chunks, **how)
