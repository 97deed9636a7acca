"""The Arrow form of Minari's episodes: a directory each, with tables whose columns are padded to T + 1 rows."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from jrl import spaces
from jrl.data.formats import parquet_footer, size
from jrl.errors import InputError, cannot_import
from jrl.types import PyTree

_NOT_ROWS = ("_", ".", "metadata.json")  # names of files that begin so


class Part:
    """A column, or a part of it by name, of a table that was read whole."""

    def __init__(self, values: Any):
        self.values = values  # a pyarrow.Array

    def __getitem__(self, name: str) -> "Part":
        if self.values.type.get_field_index(name) < 0:
            raise KeyError(f"there is no part {name}")
        return Part(self.values.field(name))


def table(directory: Path, format: str) -> dict[str, Part]:
    """Returns the columns of an episode by name.

    Args:
      directory: of the episode.
      format: "arrow" or "parquet".
    Raises:
      InputError: pyarrow is not there.
    """
    if format not in ("arrow", "parquet"):
        raise InputError(f"its data_format is {format!r}: hdf5, arrow and parquet are read")
    try:
        import pyarrow.parquet as parquet
        from pyarrow import BufferReader, concat_tables, ipc, py_buffer
    except ImportError as e:
        raise InputError(f"its files are of the format {format}: {cannot_import('pyarrow', e, 'pyarrow')}") from e
    tables = []
    for path in sorted(p for p in directory.iterdir() if p.is_file() and not p.name.startswith(_NOT_ROWS)):
        # in this thread alone: one of pyarrow's that lets go of the map while the process ends would abort it
        if format == "parquet":
            source = BufferReader(py_buffer(parquet_footer.hidden(path)))
            file = parquet.ParquetFile(source, pre_buffer=False)
            size.check(path, parquet_footer.announced(file.metadata))
            tables.append(file.read(use_threads=False))
        else:
            source = BufferReader(py_buffer(_hidden(path)))
            tables.append(ipc.open_file(source, options=ipc.IpcReadOptions(use_threads=False)).read_all())
    found = concat_tables(tables)
    found.validate(full=True)  # offsets in a damaged file point anywhere
    return {name: Part(found[name].combine_chunks()) for name in found.column_names}


def _hidden(path: Path) -> mmap.mmap:
    """Returns the content of an Arrow file without its extension types, for the reasons in `parquet_footer`."""
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    at = 0
    while (at := content.find(parquet_footer.NAME, at)) >= 0:
        content[at : at + len(parquet_footer.NAME)] = parquet_footer.HIDDEN
    return content


def column(part: Part) -> np.ndarray:
    """Returns a column of one number for each row, [n]."""
    return part.values.to_numpy(zero_copy_only=False)


def array(part: Part, space: Any) -> np.ndarray:
    """Returns a leaf [n, *]; of images the bytes of each, [n] object."""
    import pyarrow

    values = part.values
    if not pyarrow.types.is_fixed_size_list(values.type):
        return column(part)
    return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), *space.shape)


def infos(part: Part) -> dict[str, PyTree]:
    """Returns infos as columns: arrays, and dicts of arrays by path."""
    found: dict[str, PyTree] = {}
    for field in part.values.type:
        inner = _leaves(part.values.field(field.name), field, ())
        named = dict(zip(spaces.joined([*inner]), inner.values(), strict=True))
        found[field.name] = inner.get((), named)
    return found


def _leaves(values: Any, field: Any, path: tuple[str, ...]) -> dict[tuple[str, ...], np.ndarray]:
    import pyarrow

    if pyarrow.types.is_struct(values.type):
        parts = [_leaves(values.field(part.name), part, (*path, part.name)) for part in values.type]
        return {names: x for part in parts for names, x in part.items()}
    if pyarrow.types.is_fixed_size_list(values.type):
        shape = (field.metadata or {}).get(b"shape", b"-1")
        sizes = [int(n) for n in shape.split(b",") if n]
        return {path: values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), *sizes)}
    return {path: values.to_numpy(zero_copy_only=False)}
