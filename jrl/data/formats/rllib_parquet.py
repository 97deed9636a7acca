"""RLlib's Parquet files: a row for each transition, as its new stack writes them (ray 2.60), or an episode each.

Ray writes small arrays as lists that its own extension types describe; pyarrow gives the lists, and their shapes stand
in the schema as JSON. It makes a directory for each call, and of few rows a file each: all are read together.
What is written here has spaces, labels and meta in the schema's metadata, which RLlib does not read.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.formats import parquet_footer, rllib_episodes, size, whole
from jrl.data.formats import rllib_columns as names
from jrl.data.spaces_json import plain, space_from_json, space_to_json
from jrl.data.store import EpisodeStore
from jrl.errors import InputError, cannot_import
from jrl.types import Dict, PyTree, Space, Tuple

SUFFIXES = (".parquet",)
NESTED = True
_ABOUT = b"jrl"
_TENSOR = "ray.data.arrow_tensor_v2"
_TENSORS = ("ray.data.arrow_tensor", _TENSOR, "arrow.fixed_shape_tensor")
_TEXTS = (names.EPISODE, names.AGENT_ID, names.MODULE_ID)
_BLOBS = "item"  # the only column of files of whole episodes


def _arrow(module: str = "pyarrow") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise InputError(f"data: Parquet files: {cannot_import('pyarrow', e)}") from e


# ---------------------------------------------------------------- reading


def read_file(path: Path) -> EpisodeStore:
    """Reads one file. Raises InputError: what is wrong with it."""
    return read_files([path])


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Reads files whose episodes may go on from one to the next. Raises InputError: the file and what is wrong."""
    tables = [(str(path), table) for path in paths if len(table := _table(path))]
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if not tables:
        raise InputError(f"data: {name}: there is no transition in it")
    first = tables[0][1]
    for path, table in tables:
        if {*table.column_names} != {*first.column_names}:
            raise InputError(
                f"data: {path} has the columns {', '.join(table.column_names)}, where {tables[0][0]} has "
                f"{', '.join(first.column_names)}: read them apart"
            )
    if _BLOBS in first.column_names:
        blobs = ((path, blob.as_py()) for path, table in tables for blob in table.column(_BLOBS))
        return rllib_episodes.store_of(blobs, name)
    if missing := [k for k in names.REQUIRED if k not in first.column_names]:
        raise InputError(f"data: {name}: the columns {', '.join(missing)} are missing: write obs and actions")
    return _store(name, [table for _, table in tables])


def _table(path: Path) -> Any:
    pyarrow, parquet = _arrow(), _arrow("pyarrow.parquet")
    try:
        content = pyarrow.py_buffer(parquet_footer.hidden(path))
        metadata = parquet.read_metadata(pyarrow.BufferReader(content))
        size.check(path, parquet_footer.announced(metadata))
        columns = [k for k in metadata.schema.to_arrow_schema().names if k not in names.LEFT_OUT]
        coded = [k for k in columns if k in _TEXTS]
        with parquet.ParquetFile(pyarrow.BufferReader(content), metadata=metadata, read_dictionary=coded) as file:
            found = file.read(columns)
        found.validate(full=True)
        return found
    except InputError:
        raise
    except (OSError, ValueError, KeyError, IndexError, TypeError, pyarrow.ArrowException) as e:
        raise InputError(f"data: {path} is damaged ({e}): remove it, or write it anew") from e


def _store(name: str, tables: list[Any]) -> EpisodeStore:
    notes: list[str] = []
    columns, texts = _columns(name, tables, notes)
    abouts = [_about(table, name) for table in tables]
    about = abouts[0] if all(a and a["spaces"] == (abouts[0] or {}).get("spaces") for a in abouts) else None
    if about:
        observation, action = about["spaces"]
        of_space = {names.OBS: observation, names.NEXT_OBS: observation, names.ACTIONS: action}
        try:
            columns |= {k: _of_space(space, columns[k]) for k, space in of_space.items()}
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"data: {name}: the columns do not fit its spaces ({e}): write the file anew") from e
    store = names.store_of_columns(
        columns, {label: columns[k] for label, k in _LABELS.items() if k in columns}, name, notes,
        texts={label: texts[k] for label, k in _LABELS.items() if k in texts},
        known=about["spaces"] if about else None, meta=about["meta"] if about else None,
    )  # fmt: skip
    if about:
        labels = {
            k: np.concatenate([a["labels"][k] for a in abouts if a and k in a["labels"]]) for k in about["labels"]
        }
        store.labels.clear()
        store.labels.update({k: label for k, label in labels.items() if len(label) == store.num_episodes})
    return store


_LABELS = {names.POLICY: names.MODULE_ID, names.AGENT_LABEL: names.AGENT_ID, names.EPISODE: names.EPISODE}


def _columns(name: str, tables: list[Any], notes: list[str]) -> tuple[dict[str, PyTree], dict[str, np.ndarray]]:
    """Returns the columns of all files, and the texts that the numbers in some of them stand for."""
    columns: dict[str, PyTree] = {}
    texts: dict[str, np.ndarray] = {}
    for column in tables[0].column_names:
        parts = [(table.field(column), table.column(column)) for table in tables]
        if column not in names.REQUIRED and all(len(part) == part.null_count for _, part in parts):
            continue  # such as the agent where there is but one
        try:
            if column in _TEXTS:
                columns[column], texts[column] = _texts([part for _, part in parts])
            else:
                columns[column] = _joined([_array(field, part) for field, part in parts])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            if column in names.NEEDED or column in _TEXTS:
                raise InputError(f"data: {name}: column {column}: {e}") from e
            notes.append(f"the column {column} was left out: {e}")
    if names.NEXT_OBS in columns and names.shapes(columns[names.OBS]) != names.shapes(columns[names.NEXT_OBS]):
        raise InputError(f"data: {name}: obs and new_obs have different shapes: write both alike")
    return columns, texts


def _joined(parts: list[PyTree]) -> PyTree:
    if len({str(names.shapes(part)) for part in parts}) > 1:
        raise ValueError("its rows have not the same shape in all of the files")
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _texts(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers [N] i64 for a column of texts or numbers, and what they stand for."""
    pyarrow = _arrow()
    chunks = [chunk for part in parts for chunk in part.chunks if len(chunk)]
    coded = [c if isinstance(c, pyarrow.DictionaryArray) else c.dictionary_encode() for c in chunks]
    whole_column = pyarrow.chunked_array(coded).unify_dictionaries()
    if whole_column.null_count:
        raise ValueError("some of its rows are empty")
    numbers = np.concatenate([chunk.indices.to_numpy() for chunk in whole_column.chunks]).astype(np.int64)
    found = whole_column.chunk(0).dictionary.to_pylist()
    return numbers, size.texts(found, "its ids") if found and isinstance(found[0], str) else np.array(found)


def _array(field: Any, column: Any) -> PyTree:
    """Returns the rows of a column [N, *]. Raises ValueError: it is no array of numbers."""
    return _joined([_rows(field, chunk) for chunk in column.chunks if len(chunk)])


def _shape(metadata: dict[bytes, bytes]) -> tuple[int, ...] | None:
    """Returns the shape of the rows of a column of arrays; None: its lists say it themselves."""
    name = metadata.get(parquet_footer.HIDDEN, b"").decode(errors="replace")
    if not name:
        return None
    if name not in _TENSORS:
        raise ValueError(f"it has the type {name}: its rows make no array")
    try:
        found = json.loads(metadata[parquet_footer.DESCRIPTION])
    except (ValueError, KeyError, RecursionError) as e:
        raise ValueError(
            "its shape was written as a pickle, as Ray 2.49 to 2.54 do: write it with a later Ray, or with "
            "RAY_DATA_ARROW_EXTENSION_SERIALIZATION_CLOUDPICKLE=0"
        ) from e
    shape, order = (found.get("shape"), found.get("permutation")) if isinstance(found, dict) else (found, None)
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected the shape of its rows in the schema, got {str(found)[:80]}")
    if order not in (None, list(range(len(shape)))):
        raise ValueError("its rows are arrays whose axes are permuted")
    return tuple(shape)


def _rows(field: Any, chunk: Any) -> PyTree:
    """Returns the numbers of a piece of a column, without a copy where that is possible."""
    types = _arrow("pyarrow.types")
    shape = _shape(field.metadata or {})
    if chunk.null_count:
        raise ValueError("some of its rows are empty")
    kind = chunk.type
    if types.is_struct(kind):
        return {kind.field(i).name: _rows(kind.field(i), part) for i, part in enumerate(chunk.flatten())}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _rows(kind.value_field, chunk.flatten())
        size = len(inner) // len(chunk) if isinstance(inner, np.ndarray) else -1
        if size * len(chunk) != len(inner) or not (types.is_fixed_size_list(kind) or _even(chunk, size)):
            raise ValueError("its rows have different lengths: they make no array")
        return inner.reshape(len(chunk), *((size, *inner.shape[1:]) if shape is None else shape))
    if types.is_string(kind) or types.is_large_string(kind):
        return _joined_rows([names.unpacked(text) for text in chunk.to_pylist()])
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ValueError(f"it has the type {kind}: only numbers are read")
    return chunk.to_numpy(zero_copy_only=False)


def _even(chunk: Any, size: int) -> bool:
    """Returns whether all lists have `size` items."""
    offsets = chunk.offsets.to_numpy()
    return bool((np.diff(offsets) == size).all())


def _joined_rows(rows: list[PyTree]) -> PyTree:
    if len({str(names.shapes(row, first=0)) for row in rows}) > 1:
        raise ValueError("its rows have different shapes: they make no array")
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _about(table: Any, name: str) -> dict[str, Any] | None:
    """Returns what `write_file` wrote about a file: spaces, meta, labels. None: another program wrote it."""
    if _ABOUT not in (table.schema.metadata or {}):
        return None
    try:
        found = json.loads(table.schema.metadata[_ABOUT])
        return {
            "spaces": (space_from_json(found["observation"]), space_from_json(found["action"])),
            "meta": dict(found["meta"]),
            "labels": {k: np.array(values, np.dtype(dtype)) for k, (dtype, values) in found["labels"].items()},
        }
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise InputError(f"data: {name} is damaged (its metadata: {e}): remove it, or write it anew") from e


def _of_space(space: Space, tree: PyTree) -> PyTree:
    """Returns a tree as elements of a space; a Tuple's parts stand under their numbers."""
    if isinstance(space, Dict):
        return {k: _of_space(part, tree[k]) for k, part in space.items}
    if isinstance(space, Tuple):
        return tuple(_of_space(part, tree[str(i)]) for i, part in enumerate(space.items))
    if tree.shape[1:] != space.shape:
        raise ValueError(f"rows of the shape {tree.shape[1:]} for {space}")
    return tree


# ---------------------------------------------------------------- writing


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a file that RLlib reads, a row for each transition.

    Args:
      store: of its labels `policy` stands in the column module_id, `agent` in agent_id.
      path: of the file, which is there whole or not at all.
      compress: by zstd.
    Raises:
      InputError: pyarrow is not installed, or a column has the name of one of RLlib's.
    """
    pyarrow, parquet = _arrow(), _arrow("pyarrow.parquet")
    columns = names.columns_of(store)
    for label, column in _LABELS.items():
        if label in store.labels and column != names.EPISODE:
            columns[column] = np.repeat(store.labels[label], store.lengths())
    about = {
        "observation": space_to_json(store.observation),
        "action": space_to_json(store.action_space),
        "meta": {k: v for k, v in store.meta.items() if k != "path"},
        "labels": {k: (label.dtype.str, label.tolist()) for k, label in store.labels.items()},
    }
    fields, arrays = zip(*(_field(name, x) for name, x in columns.items()), strict=True)
    schema = pyarrow.schema(fields, metadata={_ABOUT: json.dumps(plain(about))})
    table = pyarrow.Table.from_arrays(list(arrays), schema=schema)
    with whole.file(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd" if compress else "none", use_dictionary=[*_TEXTS])


def _field(name: str, tree: PyTree) -> tuple[Any, Any]:
    """Returns the field and the array of a column, as Ray would make them."""
    pyarrow = _arrow()
    if isinstance(tree, tuple):
        tree = {str(i): part for i, part in enumerate(tree)}
    if isinstance(tree, dict):
        fields, arrays = zip(*(_field(k, part) for k, part in tree.items()), strict=True)
        found = pyarrow.StructArray.from_arrays(list(arrays), fields=list(fields))
        return pyarrow.field(name, found.type), found
    if tree.ndim < 2:
        found = pyarrow.array(tree)
        return pyarrow.field(name, found.type), found
    size = int(np.prod(tree.shape[1:]))
    found = pyarrow.LargeListArray.from_arrays(np.arange(len(tree) + 1) * size, pyarrow.array(tree.reshape(-1)))
    metadata = {parquet_footer.NAME: _TENSOR, parquet_footer.DESCRIPTION: json.dumps(tree.shape[1:])}
    return pyarrow.field(name, found.type, metadata=metadata), found
