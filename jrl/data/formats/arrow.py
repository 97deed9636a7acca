"""Arrow and Parquet files, read by the storage types of their columns.

A file may name an extension type for a column, and pyarrow asks whoever registered that name to read its description.
Ray 2.49 to 2.54 unpickle it, where ray.data was imported. So the names are hidden before pyarrow sees them; the
description stays in the metadata of the field.
"""

import base64
import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jrl.data.formats import files

NAME, HIDDEN = b"ARROW:extension:name", b"ARROW:extension_name"
DESCRIPTION = b"ARROW:extension:metadata"
# key in a Parquet footer: base64 of an IPC message, with the metadata of the fields
_SCHEMA, _HIDDEN_SCHEMA = b"ARROW:schema", b"ARROW_schema"


def pyarrow(module: str = "") -> Any:
    """Imports pyarrow, or a module of it. Raises InputError: it is not installed."""
    return files.library(f"pyarrow.{module}" if module else "pyarrow", "Arrow and Parquet files")


def read_ipc(path: Path) -> Any:
    """Returns the table of an Arrow IPC file."""
    content = _mapped(path)
    at = 0
    while (at := content.find(NAME, at)) >= 0:
        content[at : at + len(NAME)] = HIDDEN
    ipc = pyarrow("ipc")
    # in this thread: a thread of pyarrow's that releases the map while the process ends would abort the process
    return ipc.open_file(_source(content), options=ipc.IpcReadOptions(use_threads=False)).read_all()


def read_parquet(
    path: Path, *, left_out: Collection[str] = (), coded: Collection[str] = (), threads: bool = True
) -> Any:
    """Returns the table of a Parquet file without the columns `left_out`; texts of those `coded` with a dictionary.

    Raises:
      InputError: the arrays take more than their share of the memory.
      OSError, ValueError: the file is damaged.
    """
    parquet, content = pyarrow("parquet"), _mapped(path)
    _hide_types(content)
    metadata = parquet.read_metadata(_source(content))
    files.check_size(path, _announced(metadata))
    names = [name for name in metadata.schema.to_arrow_schema().names if name not in left_out]
    coded = [name for name in names if name in coded]
    options = {"metadata": metadata, "read_dictionary": coded, "pre_buffer": threads}
    with parquet.ParquetFile(_source(content), **options) as file:
        return file.read(names, use_threads=threads)


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _source(content: mmap.mmap) -> Any:
    return pyarrow().BufferReader(pyarrow().py_buffer(content))


def _hide_types(content: mmap.mmap) -> None:
    """Hides the extension types in the Arrow schema of a Parquet footer. Raises ValueError: it is damaged."""
    at = max(0, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    keys = []
    while (at := content.find(_SCHEMA, at)) >= 0:  # hidden as a whole first: pyarrow reads no footer without it
        content[at : at + len(_SCHEMA)] = _HIDDEN_SCHEMA
        keys.append(at)
    if not keys:
        return
    schema = (pyarrow("parquet").read_metadata(_source(content)).metadata or {}).get(_HIDDEN_SCHEMA, b"")
    if len(keys) > 1 or (at := content.find(schema, keys[0])) < 0 or not schema:
        raise ValueError("its footer has a schema of another form, or several")
    content[at : at + len(schema)] = base64.b64encode(base64.b64decode(schema, validate=True).replace(NAME, HIDDEN))
    content[keys[0] : keys[0] + len(_SCHEMA)] = _SCHEMA


def _announced(metadata: Any) -> int:
    """Returns the bytes that a file's columns take once they are unpacked, by its footer.

    A run of equal numbers takes a few bytes in the file, so that the rows count, too, each with 8 bytes.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(j) for group in groups for j in range(group.num_columns)]
    return sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
