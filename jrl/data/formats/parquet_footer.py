"""Parquet files whose columns are read by their storage types, without extension types.

The footer may name an extension type for a column, and pyarrow asks whoever registered one of that name to read its
description. Ray 2.49 to 2.54 unpickle it, where ray.data was imported. So the names are hidden before pyarrow sees
them; the description stays in the metadata of the field.
"""

import base64
import mmap
from pathlib import Path
from typing import Any

_SCHEMA = b"ARROW:schema"  # the key behind whose value, base64 of an IPC message, the fields with their metadata stand
NAME, HIDDEN = b"ARROW:extension:name", b"ARROW:extension_name"
DESCRIPTION = b"ARROW:extension:metadata"
_TEXT = 0x18  # Thrift's compact protocol: the next field is a text, of which length and bytes follow


def hidden(path: Path) -> mmap.mmap:
    """Returns a file's content without extension types: their key in the fields' metadata becomes `HIDDEN`.

    It is a private map of the file: only its last pages are copied.

    Raises:
      OSError: it cannot be read.
      ValueError: it is empty, or its footer is damaged.
    """
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    at = max(0, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    while (at := content.find(_SCHEMA, at)) >= 0:
        start, size = _text(content, at + len(_SCHEMA))
        schema = base64.b64decode(content[start : start + size], validate=True)
        content[start : start + size] = base64.b64encode(schema.replace(NAME, HIDDEN))
        at = start + size
    return content


def announced(metadata: Any) -> int:
    """Returns the bytes that a file's columns take once they are unpacked, by its footer.

    A run of equal numbers takes a few bytes in the file, so that the rows count, too, each with 8 bytes.
    """
    total = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        chunks = [group.column(j) for j in range(group.num_columns)]
        total += sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
    return total


def _text(content: mmap.mmap, at: int) -> tuple[int, int]:
    """Returns where a text begins, and its bytes. Raises ValueError: there is none, so that none is overlooked."""
    size = shift = 0
    if content[at : at + 1] != bytes([_TEXT]):
        raise ValueError("its footer has a schema of another form")
    for end in range(at + 1, at + 6):
        byte = int.from_bytes(content[end : end + 1], "little")
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return end + 1, size
    raise ValueError("its footer is damaged")
