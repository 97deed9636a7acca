"""RLlib's Parquet files: a row for each transition, as its new stack writes them (ray 2.60), or an episode each.

Ray writes small arrays as lists that its own extension types describe; pyarrow gives the lists, and their shapes stand
in the schema as JSON. It makes a directory for each call, and of few rows a file each: all are read together. Whole
episodes are the states of SingleAgentEpisode in msgpack. What is written here has spaces, labels and meta in the
schema's metadata, which RLlib does not read.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.formats import arrow, files, packed_arrays
from jrl.data.formats import rllib_columns as names
from jrl.data.formats.transitions import guessed
from jrl.data.store import LOG_PROB, Episode, EpisodeStore, guessed_action, guessed_observation, of_episodes
from jrl.errors import InputError
from jrl.fields.paths import written
from jrl.spaces_json import plain
from jrl.types import Dict, PyTree, Space, Tuple

SUFFIXES = (".parquet",)
NESTED = True
_ABOUT = b"jrl"
_TENSOR = "ray.data.arrow_tensor_v2"
_TENSORS = ("ray.data.arrow_tensor", _TENSOR, "arrow.fixed_shape_tensor")
_TEXTS = (names.EPISODE, names.AGENT_ID, names.MODULE_ID)
_LABELS = {names.POLICY: names.MODULE_ID, names.AGENT_LABEL: names.AGENT_ID, names.EPISODE: names.EPISODE}
_BLOBS = "item"  # the only column of files of whole episodes


# ---------------------------------------------------------------- tables of transitions


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Reads files whose episodes may go on from one to the next. Raises InputError: the file and what is wrong."""
    tables = [(path, table) for path in paths if len(table := _table(path))]
    name = names.name_of(paths)
    if not tables:
        raise InputError(f"data: {name}: there is no transition in it")
    first = tables[0][1].column_names
    for path, table in tables:
        if {*table.column_names} != {*first}:
            here, there = ", ".join(table.column_names), ", ".join(first)
            raise InputError(f"data: {path} has the columns {here}, where {tables[0][0]} has {there}: read them apart")
    if _BLOBS in first:
        return _store_of_episodes(((path, blob.as_py()) for path, table in tables for blob in table[_BLOBS]), name)
    if missing := [k for k in names.REQUIRED if k not in first]:
        raise InputError(f"data: {name}: the columns {', '.join(missing)} are missing: write obs and actions")
    return _store(name, [table for _, table in tables])


def _table(path: Path) -> Any:
    with files.reading(path):
        found = arrow.read_parquet(path, left_out=names.LEFT_OUT, coded=_TEXTS)
        found.validate(full=True)
        return found


def _store(name: str, tables: list[Any]) -> EpisodeStore:
    notes: list[str] = []
    columns, texts = _columns(name, tables, notes)
    labels = {label: columns[k] for label, k in _LABELS.items() if k in columns}
    texts = {label: texts[k] for label, k in _LABELS.items() if k in texts}
    abouts = [_about(table, name) for table in tables]
    if any(about is None or about[0][:2] != abouts[0][0][:2] for about in abouts):
        return names.store_of_columns(columns, labels, name, notes, texts=texts)
    known, of_episodes = abouts[0]
    notes[:0] = dict.fromkeys(note for about, _ in abouts for note in about.notes)
    of_space = {names.OBS: known.observation, names.NEXT_OBS: known.observation, names.ACTIONS: known.action_space}
    with files.reading(name):
        columns |= {k: _of_space(space, columns[k]) for k, space in of_space.items()}
    store = names.store_of_columns(columns, labels, name, notes, texts=texts, known=known[:2], meta=known.meta)
    given = {k: np.concatenate([own[k] for _, own in abouts if k in own]) for k in of_episodes}
    store.labels.clear()
    store.labels.update({k: label for k, label in given.items() if len(label) == store.num_episodes})
    return store


def _about(table: Any, name: str) -> Any:
    """Returns what `write_file` wrote about a file: its About, and labels. None: another program wrote it."""
    if _ABOUT not in (table.schema.metadata or {}):
        return None
    with files.reading(f"the metadata of {name}"):
        found = json.loads(table.schema.metadata[_ABOUT])
        labels = {k: np.array(values, np.dtype(dtype)) for k, (dtype, values) in found["labels"].items()}
        return files.about_from_json(found), labels


def _of_space(space: Space, tree: PyTree) -> PyTree:
    """Returns a tree as elements of a space; a Tuple's parts stand under their numbers."""
    if isinstance(space, Dict):
        return {k: _of_space(part, tree[k]) for k, part in space.items}
    if isinstance(space, Tuple):
        return tuple(_of_space(part, tree[str(i)]) for i, part in enumerate(space.items))
    if tree.shape[1:] != space.shape:
        raise ValueError(f"rows of the shape {tree.shape[1:]} for {space}")
    return tree


def _columns(name: str, tables: list[Any], notes: list[str]) -> tuple[dict[str, PyTree], dict[str, np.ndarray]]:
    columns: dict[str, PyTree] = {}
    texts: dict[str, np.ndarray] = {}
    for column in tables[0].column_names:
        parts = [table.column(column) for table in tables]
        if column not in names.REQUIRED and all(len(part) == part.null_count for part in parts):
            continue  # such as the agent where there is but one
        try:
            if column in _TEXTS:
                columns[column], texts[column] = _texts(parts)
            else:
                pieces = [(table.field(column), c) for table in tables for c in table.column(column).chunks if len(c)]
                columns[column] = names.joined([_rows(field, chunk) for field, chunk in pieces])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            if column in names.NEEDED or column in _TEXTS:
                raise InputError(f"data: {name}: column {column}: {e}") from e
            notes.append(f"the column {column} was left out: {e}")
    return columns, texts


def _texts(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers [N] i64 for a column of texts or numbers, and what they stand for."""
    pyarrow = arrow.pyarrow()
    chunks = [chunk for part in parts for chunk in part.chunks if len(chunk)]
    coded = [c if isinstance(c, pyarrow.DictionaryArray) else c.dictionary_encode() for c in chunks]
    whole_column = pyarrow.chunked_array(coded).unify_dictionaries()
    if whole_column.null_count:
        raise ValueError("some of its rows are empty")
    numbers = np.concatenate([chunk.indices.to_numpy() for chunk in whole_column.chunks]).astype(np.int64)
    found = whole_column.chunk(0).dictionary.to_pylist()
    return numbers, files.texts(found, "its ids") if found and isinstance(found[0], str) else np.array(found)


def _rows(field: Any, chunk: Any) -> PyTree:
    """Returns the numbers of a piece of a column, without a copy where that is possible."""
    types = arrow.pyarrow("types")
    shape = _shape(field.metadata or {})
    if chunk.null_count:
        raise ValueError("some of its rows are empty")
    kind = chunk.type
    if types.is_struct(kind):
        return {kind.field(i).name: _rows(kind.field(i), part) for i, part in enumerate(chunk.flatten())}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _rows(kind.value_field, chunk.flatten())
        size = len(inner) // len(chunk) if isinstance(inner, np.ndarray) else -1
        is_even = types.is_fixed_size_list(kind) or (np.diff(chunk.offsets.to_numpy()) == size).all()
        if size * len(chunk) != len(inner) or not is_even:
            raise ValueError("its rows have different lengths: they make no array")
        return inner.reshape(len(chunk), *((size, *inner.shape[1:]) if shape is None else shape))
    if types.is_string(kind) or types.is_large_string(kind):
        rows = [packed_arrays.unpacked(text) for text in chunk.to_pylist()]
        return names.joined([jax.tree.map(lambda x: x[None], row) for row in rows])
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ValueError(f"it has the type {kind}: only numbers are read")
    return chunk.to_numpy(zero_copy_only=False)


def _shape(metadata: dict[bytes, bytes]) -> tuple[int, ...] | None:
    """Returns the shape of the rows of a column of arrays; None: its lists say it themselves."""
    name = metadata.get(arrow.HIDDEN, b"").decode(errors="replace")
    if not name:
        return None
    if name not in _TENSORS:
        raise ValueError(f"it has the type {name}: its rows make no array")
    try:
        found = json.loads(metadata[arrow.DESCRIPTION])
    except (ValueError, KeyError, RecursionError) as e:
        mend = "write it with a later Ray, or with RAY_DATA_ARROW_EXTENSION_SERIALIZATION_CLOUDPICKLE=0"
        raise ValueError(f"its shape was written as a pickle, as Ray 2.49 to 2.54 do: {mend}") from e
    shape, order = (found.get("shape"), found.get("permutation")) if isinstance(found, dict) else (found, None)
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected the shape of its rows in the schema, got {str(found)[:80]}")
    if order not in (None, list(range(len(shape)))):
        raise ValueError("its rows are arrays whose axes are permuted")
    return tuple(shape)


# ---------------------------------------------------------------- whole episodes


def _store_of_episodes(blobs: Iterable[tuple[Path, Any]], name: str) -> EpisodeStore:
    """Reads the episodes of blobs, each with its file. Raises InputError: the episode and what is wrong with it."""
    msgpack = files.library("msgpack", f"{name}: whole episodes of RLlib's")
    episodes = []
    for number, (path, blob) in enumerate(blobs):
        with files.reading(f"{path}: episode {number}"):
            episodes.append(_episode(msgpack.unpackb(blob, strict_map_key=False)))
    episodes = [episode for episode in episodes if len(episode.reward)]
    if not episodes:
        raise InputError(f"data: {name}: there is no transition in it")
    try:
        observation = guessed(guessed_observation, names.joined([e.obs for e in episodes]))
        action = guessed(guessed_action, names.joined([e.action for e in episodes]))
    except ValueError as e:
        raise InputError(f"data: {name}: its episodes have different spaces ({e}): read them apart") from e
    shared = sorted(k for k in episodes[0].columns if all(k in e.columns for e in episodes))
    episodes = [e._replace(columns={k: e.columns[k] for k in shared}) for e in episodes]
    meta, notes = {"source": "RLlib", "path": name}, ("infos were left out",)
    return of_episodes(observation, action, episodes, meta=meta, notes=notes)


def _episode(state: Any) -> Episode:
    further = {k: _buffer(part) for k, part in state["extra_model_outputs"].items()}
    if names.LOGP in further:
        further[LOG_PROB] = further.pop(names.LOGP).astype(np.float32)
    reward = _buffer(state["rewards"])
    is_set = lambda value: bool(np.all(_tree(value)))  # a bool, which an environment may have given as numpy's
    reward = reward if reward.dtype.kind == "f" else reward.astype(np.float32)
    columns = {k: x for k, x in further.items() if isinstance(x, np.ndarray) and len(x) == len(reward)}
    ends = is_set(state["is_terminated"]), is_set(state["is_truncated"])
    obs, action = _buffer(state["observations"]), _buffer(state["actions"])
    return Episode(obs, action, reward, *ends, columns, {names.EPISODE: str(state["id_"])})


def _buffer(state: Any) -> PyTree:
    """Returns an InfiniteLookbackBuffer's rows of the episode itself: those before are another fragment's."""
    data, first = state["data"], int(state["lookback"])
    if isinstance(data, dict):
        rows = _tree(data)
    else:
        rows = jax.tree.map(lambda *x: np.stack(x), *map(_tree, data)) if data else np.zeros(0)
    return jax.tree.map(lambda x: x[first:], rows)


def _tree(value: Any) -> PyTree:
    """Returns the arrays in what msgpack_numpy wrote; what it would unpickle is refused."""
    if isinstance(value, dict):
        is_array = b"nd" in value
        return _numpy(value) if is_array else {str(k): _tree(part) for k, part in value.items()}
    if isinstance(value, list):
        return tuple(map(_tree, value))
    if not isinstance(value, bool | int | float):
        raise TypeError(f"it holds a {type(value).__name__}, where numbers are read only")
    return np.asarray(value)


def _numpy(value: dict[Any, Any]) -> np.ndarray:
    name, shape, data = value[b"type"], value.get(b"shape", ()), value[b"data"]
    if not isinstance(name, str) or np.dtype(name).kind not in "biuf":
        raise TypeError(f"it holds an array of dtype {str(name)[:40]}, where numbers are read only")
    dtype = np.dtype(name)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"it holds {len(data)} bytes for an array {tuple(shape)} of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


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
    columns = names.columns_of(store)
    for label, column in _LABELS.items():
        if label in store.labels and column != names.EPISODE:
            columns[column] = np.repeat(store.labels[label], store.lengths())
    labels = {k: (label.dtype.str, label.tolist()) for k, label in store.labels.items()}
    about = {**files.about_to_json(store), "labels": labels}
    fields, arrays = zip(*(_field(name, x) for name, x in columns.items()), strict=True)
    schema = arrow.pyarrow().schema(fields, metadata={_ABOUT: json.dumps(plain(about))})
    table = arrow.pyarrow().Table.from_arrays(list(arrays), schema=schema)
    options = {"compression": "zstd" if compress else "none", "use_dictionary": [*_TEXTS]}
    with written(path) as temporary:
        arrow.pyarrow("parquet").write_table(table, temporary, **options)


def _field(name: str, tree: PyTree) -> tuple[Any, Any]:
    """Returns the field and the array of a column, as Ray would make them."""
    pyarrow, metadata = arrow.pyarrow(), None
    if isinstance(tree, tuple):
        tree = {str(i): part for i, part in enumerate(tree)}
    if isinstance(tree, dict):
        fields, arrays = zip(*(_field(k, part) for k, part in tree.items()), strict=True)
        found = pyarrow.StructArray.from_arrays(list(arrays), fields=list(fields))
    elif tree.ndim < 2:
        found = pyarrow.array(tree)
    else:
        size = math.prod(tree.shape[1:])
        found = pyarrow.LargeListArray.from_arrays(np.arange(len(tree) + 1) * size, pyarrow.array(tree.reshape(-1)))
        metadata = {arrow.NAME: _TENSOR, arrow.DESCRIPTION: json.dumps(tree.shape[1:])}
    return pyarrow.field(name, found.type, metadata=metadata), found
