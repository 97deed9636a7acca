"""RLlib's Parquet files of its new stack (ray 2.60), with a row for each transition or for each episode.

Ray writes small arrays as lists with extension types; pyarrow returns the lists, and the schema has their shapes as
JSON. Ray writes a directory for each call, with many small files; the reader joins all of them. Whole episodes are
states of SingleAgentEpisode in msgpack. Files written by jrl have spaces, labels and meta in the schema's metadata,
which RLlib ignores.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.episode import Episode
from jrl.data.formats import arrow, files, packed_arrays
from jrl.data.formats import rllib_columns as names
from jrl.data.formats.transitions import guess_space
from jrl.data.store import LOG_PROB, EpisodeStore, guess_action, guess_observation, of_episodes
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
_EPISODES = "item"  # the only column of files of whole episodes


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Returns several files as one store; an episode may continue in the next. Raises InputError: damaged files."""
    tables = [(path, table) for path in paths if len(table := _read_table(path))]
    name = names.name_files(paths)
    if not tables:
        raise InputError(f"data: {name}: expected transitions, got none")
    first = tables[0][1].column_names
    for path, table in tables:
        if {*table.column_names} != {*first}:
            got, expected = ", ".join(table.column_names), ", ".join(first)
            raise InputError(
                f"data: {path}: expected the columns {expected} of {tables[0][0]}, got {got}: read them separately"
            )
    if _EPISODES in first:
        return _build_episode_store(((path, x.as_py()) for path, table in tables for x in table[_EPISODES]), name)
    if missing := [k for k in names.REQUIRED if k not in first]:
        raise InputError(f"data: {name}: the columns {', '.join(missing)} are missing: write obs and actions")
    return _build_store(name, [table for _, table in tables])


def _read_table(path: Path) -> Any:
    with files.reading(path):
        found = arrow.read_parquet(path, left_out=names.LEFT_OUT, coded=_TEXTS)
        found.validate(full=True)
        return found


def _build_store(name: str, tables: list[Any]) -> EpisodeStore:
    notes: list[str] = []
    columns, texts = _read_columns(name, tables, notes)
    labels = {label: columns[k] for label, k in _LABELS.items() if k in columns}
    texts = {label: texts[k] for label, k in _LABELS.items() if k in texts}
    parts = [_read_description(table, name) for table in tables]
    if any(part is None or part[0][:2] != parts[0][0][:2] for part in parts):
        return names.build_store(columns, labels, name, notes, texts=texts)
    known, first_labels = parts[0]
    notes[:0] = dict.fromkeys(note for description, _ in parts for note in description.notes)
    column_spaces = {names.OBS: known.observation, names.NEXT_OBS: known.observation, names.ACTIONS: known.action_space}
    with files.reading(name):
        columns |= {k: _to_space(space, columns[k]) for k, space in column_spaces.items()}
    store = names.build_store(columns, labels, name, notes, texts=texts, known=known[:2], meta=known.meta)
    stored = {k: np.concatenate([x[k] for _, x in parts if k in x]) for k in first_labels}
    store.labels.clear()
    store.labels.update({k: label for k, label in stored.items() if len(label) == store.num_episodes})
    return store


def _read_description(table: Any, name: str) -> Any:
    """Returns the description and labels that `write_file` stored in a file; None: another program wrote the file."""
    if _ABOUT not in (table.schema.metadata or {}):
        return None
    with files.reading(f"the metadata of {name}"):
        found = json.loads(table.schema.metadata[_ABOUT])
        labels = {k: np.array(values, np.dtype(dtype)) for k, (dtype, values) in found["labels"].items()}
        return files.description_from_json(found), labels


def _to_space(space: Space, tree: PyTree) -> PyTree:
    """Returns a tree as elements of a space; the names of a Tuple's parts in the file are their indices."""
    if isinstance(space, Dict):
        return {k: _to_space(part, tree[k]) for k, part in space.items}
    if isinstance(space, Tuple):
        return tuple(_to_space(part, tree[str(i)]) for i, part in enumerate(space.items))
    if tree.shape[1:] != space.shape:
        raise ValueError(f"expected rows of {space}, got the shape {tree.shape[1:]}")
    return tree


def _read_columns(name: str, tables: list[Any], notes: list[str]) -> tuple[dict[str, PyTree], dict[str, np.ndarray]]:
    columns: dict[str, PyTree] = {}
    texts: dict[str, np.ndarray] = {}
    for column in tables[0].column_names:
        parts = [table.column(column) for table in tables]
        if column not in names.REQUIRED and all(len(part) == part.null_count for part in parts):
            continue  # such as the agent's id with a single agent
        try:
            if column in _TEXTS:
                columns[column], texts[column] = _read_texts(parts)
            else:
                pieces = [(table.field(column), c) for table in tables for c in table.column(column).chunks if len(c)]
                columns[column] = names.join_arrays([_read_rows(field, chunk) for field, chunk in pieces])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            if column in names.NEEDED or column in _TEXTS:
                raise InputError(f"data: {name}: column {column}: {e}") from e
            notes.append(f"the column {column} was left out: {e}")
    return columns, texts


def _read_texts(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes [N] i64 of a column of texts or numbers, and the text or number of each code."""
    pyarrow = arrow.import_pyarrow()
    chunks = [chunk for part in parts for chunk in part.chunks if len(chunk)]
    coded = [c if isinstance(c, pyarrow.DictionaryArray) else c.dictionary_encode() for c in chunks]
    whole_column = pyarrow.chunked_array(coded).unify_dictionaries()
    if whole_column.null_count:
        raise ValueError("some rows are empty")
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in whole_column.chunks]).astype(np.int64)
    values = whole_column.chunk(0).dictionary.to_pylist()
    is_text = bool(values) and isinstance(values[0], str)
    return codes, files.build_text_array(values, "its ids") if is_text else np.array(values)


def _read_rows(field: Any, chunk: Any) -> PyTree:
    """Returns the numbers of a chunk of a column, if possible without a copy."""
    types = arrow.import_pyarrow("types")
    shape = _read_shape(field.metadata or {})
    if chunk.null_count:
        raise ValueError("some rows are empty")
    kind = chunk.type
    if types.is_struct(kind):
        return {kind.field(i).name: _read_rows(kind.field(i), part) for i, part in enumerate(chunk.flatten())}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _read_rows(kind.value_field, chunk.flatten())
        size = len(inner) // len(chunk) if isinstance(inner, np.ndarray) else -1
        is_even = types.is_fixed_size_list(kind) or (np.diff(chunk.offsets.to_numpy()) == size).all()
        if size * len(chunk) != len(inner) or not is_even:
            raise ValueError("expected rows of one length")
        return inner.reshape(len(chunk), *((size, *inner.shape[1:]) if shape is None else shape))
    if types.is_string(kind) or types.is_large_string(kind):
        rows = [packed_arrays.unpack(text) for text in chunk.to_pylist()]
        return names.join_arrays([jax.tree.map(lambda x: x[None], row) for row in rows])
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise ValueError(f"expected numbers, got the type {kind}")
    return chunk.to_numpy(zero_copy_only=False)


def _read_shape(metadata: dict[bytes, bytes]) -> tuple[int, ...] | None:
    """Returns the shape of the rows of a column of arrays; None: the lengths of its lists are the shape."""
    name = metadata.get(arrow.HIDDEN, b"").decode(errors="replace")
    if not name:
        return None
    if name not in _TENSORS:
        raise ValueError(f"expected arrays of one shape, got the type {name}")
    try:
        found = json.loads(metadata[arrow.DESCRIPTION])
    except (ValueError, KeyError, RecursionError) as e:
        fix = "write it with a later Ray, or with RAY_DATA_ARROW_EXTENSION_SERIALIZATION_CLOUDPICKLE=0"
        raise ValueError(f"its shape was written as a pickle, as Ray 2.49 to 2.54 do: {fix}") from e
    shape, order = (found.get("shape"), found.get("permutation")) if isinstance(found, dict) else (found, None)
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected the shape of the rows in the schema, got {str(found)[:80]}")
    if order not in (None, list(range(len(shape)))):
        raise ValueError("expected arrays without permuted axes")
    return tuple(shape)


def _build_episode_store(blobs: Iterable[tuple[Path, Any]], name: str) -> EpisodeStore:
    """Returns the store of msgpack blobs, each with its file. Raises InputError: a damaged episode."""
    msgpack = files.import_library("msgpack", f"{name}: whole episodes of RLlib")
    episodes = []
    for number, (path, blob) in enumerate(blobs):
        with files.reading(f"{path}: episode {number}"):
            episodes.append(_parse_episode(msgpack.unpackb(blob, strict_map_key=False)))
    episodes = [episode for episode in episodes if len(episode.reward)]
    if not episodes:
        raise InputError(f"data: {name}: expected transitions, got none")
    try:
        observation = guess_space(guess_observation, names.join_arrays([e.obs for e in episodes]))
        action = guess_space(guess_action, names.join_arrays([e.action for e in episodes]))
    except ValueError as e:
        raise InputError(f"data: {name}: the spaces of episodes differ ({e}): read them as different data sets") from e
    shared = sorted(k for k in episodes[0].columns if all(k in e.columns for e in episodes))
    episodes = [e.replace(columns={k: e.columns[k] for k in shared}) for e in episodes]
    meta, notes = {"source": "RLlib", "path": name}, ("infos were left out",)
    return of_episodes(observation, action, episodes, meta=meta, notes=notes)


def _parse_episode(state: Any) -> Episode:
    extra = {k: _parse_buffer(part) for k, part in state["extra_model_outputs"].items()}
    if names.LOGP in extra:
        extra[LOG_PROB] = extra.pop(names.LOGP).astype(np.float32)
    reward = _parse_buffer(state["rewards"])
    is_set = lambda value: bool(np.all(_parse_tree(value)))  # a bool of Python or numpy
    reward = reward if reward.dtype.kind == "f" else reward.astype(np.float32)
    columns = {k: x for k, x in extra.items() if isinstance(x, np.ndarray) and len(x) == len(reward)}
    ends = is_set(state["is_terminated"]), is_set(state["is_truncated"])
    obs, action = _parse_buffer(state["observations"]), _parse_buffer(state["actions"])
    return Episode(obs, action, reward, *ends, columns, {names.EPISODE: str(state["id_"])})


def _parse_buffer(state: Any) -> PyTree:
    """Returns the rows of an InfiniteLookbackBuffer after its lookback, which belongs to another fragment."""
    data, first = state["data"], int(state["lookback"])
    if isinstance(data, dict):
        rows = _parse_tree(data)
    else:
        rows = jax.tree.map(lambda *x: np.stack(x), *map(_parse_tree, data)) if data else np.zeros(0)
    return jax.tree.map(lambda x: x[first:], rows)


def _parse_tree(value: Any) -> PyTree:
    """Returns the arrays of a tree of msgpack_numpy. Raises TypeError: other content, such as a pickle."""
    if isinstance(value, dict):
        is_array = b"nd" in value
        return _parse_array(value) if is_array else {str(k): _parse_tree(part) for k, part in value.items()}
    if isinstance(value, list):
        return tuple(map(_parse_tree, value))
    if not isinstance(value, bool | int | float):
        raise TypeError(f"expected numbers, got a {type(value).__name__}")
    return np.asarray(value)


def _parse_array(value: dict[Any, Any]) -> np.ndarray:
    name, shape, data = value[b"type"], value.get(b"shape", ()), value[b"data"]
    if not isinstance(name, str) or np.dtype(name).kind not in "biuf":
        raise TypeError(f"expected an array of numbers, got the dtype {str(name)[:40]}")
    dtype = np.dtype(name)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"expected an array {tuple(shape)} of {dtype}, got {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a file that RLlib reads, with a row for each transition.

    Args:
      store: data set; its label `policy` becomes the column module_id, `agent` becomes agent_id.
      path: file, written completely or not at all.
      compress: whether to compress with zstd.
    Raises:
      InputError: pyarrow is not installed, or a column has a name with another meaning in RLlib.
    """
    columns = names.build_columns(store)
    for label, column in _LABELS.items():
        if label in store.labels and column != names.EPISODE:
            columns[column] = np.repeat(store.labels[label], store.lengths())
    labels = {k: (label.dtype.str, label.tolist()) for k, label in store.labels.items()}
    about = {**files.description_to_json(store), "labels": labels}
    fields, arrays = zip(*(_build_field(name, x) for name, x in columns.items()), strict=True)
    schema = arrow.import_pyarrow().schema(fields, metadata={_ABOUT: json.dumps(plain(about))})
    table = arrow.import_pyarrow().Table.from_arrays(list(arrays), schema=schema)
    options = {"compression": "zstd" if compress else "none", "use_dictionary": [*_TEXTS]}
    with written(path) as temporary:
        arrow.import_pyarrow("parquet").write_table(table, temporary, **options)


def _build_field(name: str, tree: PyTree) -> tuple[Any, Any]:
    """Returns the field and the array of a column, as Ray builds them."""
    pyarrow, metadata = arrow.import_pyarrow(), None
    if isinstance(tree, tuple):
        tree = {str(i): part for i, part in enumerate(tree)}
    if isinstance(tree, dict):
        fields, arrays = zip(*(_build_field(k, part) for k, part in tree.items()), strict=True)
        found = pyarrow.StructArray.from_arrays(list(arrays), fields=list(fields))
    elif tree.ndim < 2:
        found = pyarrow.array(tree)
    else:
        size = math.prod(tree.shape[1:])
        found = pyarrow.LargeListArray.from_arrays(np.arange(len(tree) + 1) * size, pyarrow.array(tree.reshape(-1)))
        metadata = {arrow.NAME: _TENSOR, arrow.DESCRIPTION: json.dumps(tree.shape[1:])}
    return pyarrow.field(name, found.type, metadata=metadata), found
