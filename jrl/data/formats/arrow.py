"""Parquet files, read by the storage types of their columns.

A file may name an extension type for a column. pyarrow then calls the library that registered the name with the type's
description, and Ray 2.49 to 2.54 unpickle that description. Therefore these functions hide the names from pyarrow; the
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
# keys in a Parquet footer: base64 of an IPC message, with the metadata of the fields
_SCHEMA, _HIDDEN_SCHEMA = b"ARROW:schema", b"ARROW_schema"


def import_pyarrow(module: str = "") -> Any:
    """Returns pyarrow, or a module of it. Raises InputError: not installed."""
    return files.import_library(f"pyarrow.{module}" if module else "pyarrow", "Parquet files")


def read_parquet(path: Path, *, left_out: Collection[str], coded: Collection[str]) -> Any:
    """Returns the table of a Parquet file without the columns `left_out`, with columns `coded` as dictionary arrays.

    Raises:
      InputError: the arrays take more than `files.size_limit`.
      OSError, ValueError: the file is damaged.
    """
    parquet = import_pyarrow("parquet")
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _hide_types(content)
    metadata = parquet.read_metadata(_open_buffer(content))
    files.check_size(path, _measure_columns(metadata))
    names = [name for name in metadata.schema.to_arrow_schema().names if name not in left_out]
    coded = [name for name in names if name in coded]
    with parquet.ParquetFile(_open_buffer(content), metadata=metadata, read_dictionary=coded, pre_buffer=True) as file:
        return file.read(names)


def _open_buffer(content: mmap.mmap) -> Any:
    return import_pyarrow().BufferReader(import_pyarrow().py_buffer(content))


def _hide_types(content: mmap.mmap) -> None:
    """Hides the extension types in the Arrow schema of a Parquet footer. Raises ValueError: a damaged footer."""
    at = max(0, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    keys = []
    while (at := content.find(_SCHEMA, at)) >= 0:  # hide the whole schema while pyarrow reads the footer
        content[at : at + len(_SCHEMA)] = _HIDDEN_SCHEMA
        keys.append(at)
    if not keys:
        return
    schema = (import_pyarrow("parquet").read_metadata(_open_buffer(content)).metadata or {}).get(_HIDDEN_SCHEMA, b"")
    if len(keys) > 1 or (at := content.find(schema, keys[0])) < 0 or not schema:
        raise ValueError("expected one Arrow schema in the footer")
    content[at : at + len(schema)] = base64.b64encode(base64.b64decode(schema, validate=True).replace(NAME, HIDDEN))
    content[keys[0] : keys[0] + len(_SCHEMA)] = _SCHEMA


def _measure_columns(metadata: Any) -> int:
    """Returns the unpacked size of a file's columns, in bytes, by its footer.

    A run of equal numbers takes a few bytes in the file, so each row counts with at least 8 bytes.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(j) for group in groups for j in range(group.num_columns)]
    return sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
