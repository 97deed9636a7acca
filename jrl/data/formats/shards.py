"""Shards, jrl's own files: npz archives of the arrays of an EpisodeStore. Each shard is a complete data set.

A shard holds `about.json` (spaces, meta, names) and the arrays `obs`, `action`, `reward`, `offsets`, `terminated`,
`truncated`, `column/NAME` and `label/NAME`; a tree has arrays such as `obs/PATH`. numpy reads a shard, too:
`numpy.load(path)["reward"]`.
"""

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.data.formats import files
from jrl.data.store import NO_REWARDS, EpisodeStore, check_store, concatenated
from jrl.errors import InputError
from jrl.fields.paths import written
from jrl.types import PyTree

SUFFIXES = (".npz",)
_FORMAT = "jrl-data-1"
_ABOUT = "about.json"


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a shard, completely or not at all."""
    header = {"format": _FORMAT, **files.description_to_json(store), "columns": _column_paths(store)}
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with (
        written(path) as temporary,
        zipfile.ZipFile(temporary, "w", method, compresslevel=1 if compress else None) as archive,
    ):
        archive.writestr(_ABOUT, json.dumps(header, allow_nan=False))
        for name, array in _list_arrays(store).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Returns shards as one store. Raises InputError: a damaged file, a file that is not a shard, or other spaces."""
    headers, sizes = zip(*map(_read_header, paths), strict=True)
    files.check_size(paths[0] if len(paths) == 1 else paths[0].parent, sum(sizes))
    return concatenated([check_store(_read(path, header)) for path, header in zip(paths, headers, strict=True)])


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns a shard's about.json, and the bytes of its arrays. Raises InputError: damaged, or not a shard."""
    with files.reading(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if _ABOUT in names and archive.getinfo(_ABOUT).file_size > files.MAX_TEXT:
            raise InputError(f"data: {path}: {_ABOUT} takes more than {files.MAX_TEXT} bytes: write it again")
        header = json.loads(archive.read(_ABOUT)) if _ABOUT in names else None
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            expected = f"expected {_ABOUT} with the format {_FORMAT}: docs/data.md shows how to write one from arrays"
            raise InputError(f"data: {path} is not a data set of jrl: {expected}")
        return header, sum(_check_array_size(archive, name) for name in names if name != _ABOUT)


def _check_array_size(archive: zipfile.ZipFile, name: str) -> int:
    """Returns the bytes of an array. Raises ValueError: its shape needs another number of bytes."""
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{name}: expected numbers or texts, got objects")
        if any(n < 0 for n in shape):
            raise ValueError(f"{name} has the shape {shape}")
        size, needed = archive.getinfo(name).file_size - file.tell(), math.prod(shape) * dtype.itemsize
        if size != needed:
            raise ValueError(f"{name}: expected {needed} bytes for its shape, got {size}")
        return size


def _read(path: Path, header: dict[str, Any]) -> EpisodeStore:
    arrays = {}
    with files.reading(path), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name != _ABOUT:
                with archive.open(name) as file:
                    arrays[name.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
        return _build_store(path, header, arrays)


def _list_arrays(store: EpisodeStore) -> dict[str, np.ndarray]:
    named = {"reward": store.reward, "offsets": store.offsets}
    named |= {"terminated": store.terminated, "truncated": store.truncated}
    named |= {_join("obs", path): x for path, _, x in store.observations()}
    named |= {_join("action", path): x for path, _, x in store.actions()}
    for (name, path), key in _column_keys(_column_paths(store)).items():
        column = store.columns[name]
        named[key] = column[path] if isinstance(column, dict) else column
    return named | {f"label/{name}": label for name, label in store.labels.items()}


def _build_store(path: Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> EpisodeStore:
    known = files.description_from_json(header)
    tree = lambda space, name: spaces.from_leaves(
        space, [arrays[_join(name, path)] for path, _ in spaces.leaves(space)]
    )
    action, columns = tree(known.action_space, "action"), dict[str, PyTree]()
    for (name, part), key in _column_keys(header["columns"]).items():
        if list(header["columns"][name]) == [""]:
            columns[name] = arrays[key]
        else:
            columns.setdefault(name, {})[part] = arrays[key]
    return EpisodeStore(
        observation=known.observation,
        action_space=known.action_space,
        obs=tree(known.observation, "obs"),
        action=action,
        reward=arrays["reward"] if "reward" in arrays else np.zeros(len(jax.tree.leaves(action)[0]), np.float32),
        offsets=arrays["offsets"],
        terminated=arrays["terminated"],
        truncated=arrays["truncated"],
        columns=columns,
        labels={name.removeprefix("label/"): x for name, x in arrays.items() if name.startswith("label/")},
        meta={**known.meta, **({} if "reward" in arrays else NO_REWARDS), "path": str(path)},
        notes=known.notes,
    )


def _column_paths(store: EpisodeStore) -> dict[str, list[str]]:
    return {name: sorted(tree) if isinstance(tree, dict) else [""] for name, tree in store.columns.items()}


def _column_keys(paths: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    pairs = [(name, path) for name, found in paths.items() for path in found]
    return {pair: f"column/{name}" for pair, name in zip(pairs, spaces.join_paths(pairs), strict=True)}


def _join(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name
