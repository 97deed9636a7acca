"""jrl's own files: npz archives of the columns of an EpisodeStore, each whole by itself.

A shard holds `about.json` (spaces, meta, names) and the arrays `obs`, `action`, `reward`, `offsets`, `terminated`,
`truncated`, `column/NAME` and `label/NAME`; of trees `obs/PATH`. numpy reads it, too: `numpy.load(path)["reward"]`.
"""

import contextlib
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.data.formats import files
from jrl.data.store import NO_REWARDS, EpisodeStore, checked, concatenated
from jrl.errors import InputError
from jrl.types import PyTree

SUFFIXES = (".npz",)
_FORMAT = "jrl-data-1"
_ABOUT = "about.json"
_OF_ROWS = ("obs", "action", "reward", "column/")  # names of arrays [R, *] begin so
_PART = 2**18  # bytes that are read at once: they stay in the processor's cache


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a shard, which is there whole or not at all."""
    said = {"format": _FORMAT, **files.about_to_json(store), "columns": _column_paths(store)}
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with (
        files.written_file(path) as temporary,
        zipfile.ZipFile(temporary, "w", method, compresslevel=1 if compress else None) as archive,
    ):
        archive.writestr(_ABOUT, json.dumps(said, allow_nan=False))
        for name, array in _arrays(store).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Reads shards as one, the rows of all straight into one array where they have one shape and dtype.

    Raises:
      InputError: one is damaged, or none; their spaces differ.
    """
    shards = [_shard(path) for path in paths]
    announced = sum(math.prod(h.shape) * h.dtype.itemsize for shard in shards for h in shard.heads.values())
    files.check_size(paths[0] if len(paths) == 1 else paths[0].parent, announced)
    blocks: dict[str, np.ndarray] = {}  # what the rows of all shards go into
    for name in [n for n in shards[0].heads if n.startswith(_OF_ROWS)]:
        heads = [shard.heads.get(name) for shard in shards]
        first, kinds = heads[0], {head and (head.shape[1:], head.dtype) for head in heads}
        if first and first.shape and len(kinds) == 1:
            blocks[name] = np.empty((sum(head.shape[0] for head in heads if head), *first.shape[1:]), first.dtype)
    starts = dict.fromkeys(blocks, 0)
    return concatenated([_read(shard, blocks, starts) for shard in shards])


class _Head(NamedTuple):
    """Header of an array in an archive, and where its numbers begin."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    offset: int


class _Shard(NamedTuple):
    path: Path
    said: dict[str, Any]  # about.json
    heads: dict[str, _Head]  # by the names of the arrays


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens an archive; errors in the block become an InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except InputError:
        raise
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(f"data: {path} is damaged ({e or type(e).__name__}): remove it, or write it anew") from e


def _shard(path: Path) -> _Shard:
    with _opened(path) as archive:
        names = archive.namelist()
        if _ABOUT in names and archive.getinfo(_ABOUT).file_size > files.MOST_TEXT:
            raise InputError(f"data: {path}: {_ABOUT} takes more than {files.MOST_TEXT} bytes: write it anew")
        said = json.loads(archive.read(_ABOUT)) if _ABOUT in names else None
        if not isinstance(said, dict) or said.get("format") != _FORMAT:
            expected = f"{_ABOUT} in it should say {_FORMAT}: docs/data.md tells how to make one of arrays"
            raise InputError(f"data: {path} is no data set of jrl's: {expected}")
        heads = {name.removesuffix(".npy"): _head(archive, name) for name in names if name != _ABOUT}
        return _Shard(path, said, heads)


def _head(archive: zipfile.ZipFile, name: str) -> _Head:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{name} has objects, which are not read")
        if any(n < 0 for n in shape):
            raise ValueError(f"{name} has the shape {shape}")
        size, needed = archive.getinfo(name).file_size - file.tell(), math.prod(shape) * dtype.itemsize
        if size != needed:
            raise ValueError(f"{name} has {size} bytes of numbers, where its shape needs {needed}")
        return _Head(shape, fortran, dtype, file.tell())


def _read(shard: _Shard, blocks: dict[str, np.ndarray], starts: dict[str, int]) -> EpisodeStore:
    """Reads the store of a shard. Arrays in `blocks` go there, each from its row in `starts` on, which moves on."""
    arrays = {}
    with _opened(shard.path) as archive:
        for name, head in shard.heads.items():
            if name in blocks:
                first, starts[name] = starts[name], starts[name] + head.shape[0]
                arrays[name] = blocks[name][first : starts[name]]
            else:
                arrays[name] = np.empty(head.shape, head.dtype)
            with archive.open(f"{name}.npy") as file:
                _read_into(arrays[name], file, head)
        return checked(_store(shard.path, shard.said, arrays))


def _read_into(array: np.ndarray, file: IO[bytes], head: _Head) -> None:
    """Reads the numbers of an array, which is contiguous."""
    if head.fortran or not array.shape:
        array[...] = np.lib.format.read_array(file, allow_pickle=False)
        return
    file.read(head.offset)
    octets, at = array.reshape(-1).view(np.uint8), 0
    while part := file.read(_PART):  # to the end, where the archive looks at its checksum
        octets[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)


def _arrays(store: EpisodeStore) -> dict[str, np.ndarray]:
    """Returns every array of a store by its name in the file."""
    named = {"reward": store.reward, "offsets": store.offsets}
    named |= {"terminated": store.terminated, "truncated": store.truncated}
    named |= {_join("obs", path): x for path, _, x in store.observations()}
    named |= {_join("action", path): x for path, _, x in store.actions()}
    for (name, path), key in _column_keys(_column_paths(store)).items():
        column = store.columns[name]
        named[key] = column[path] if isinstance(column, dict) else column
    return named | {f"label/{name}": label for name, label in store.labels.items()}


def _store(path: Path, said: dict[str, Any], arrays: dict[str, np.ndarray]) -> EpisodeStore:
    known = files.about_from_json(said)
    tree = lambda space, name: spaces.of_leaves(space, [arrays[_join(name, path)] for path, _ in spaces.leaves(space)])
    action = tree(known.action_space, "action")
    return EpisodeStore(
        observation=known.observation,
        action_space=known.action_space,
        obs=tree(known.observation, "obs"),
        action=action,
        reward=arrays["reward"] if "reward" in arrays else np.zeros(len(jax.tree.leaves(action)[0]), np.float32),
        offsets=arrays["offsets"],
        terminated=arrays["terminated"],
        truncated=arrays["truncated"],
        columns=_columns(said["columns"], arrays),
        labels={name.removeprefix("label/"): x for name, x in arrays.items() if name.startswith("label/")},
        meta={**known.meta, **({} if "reward" in arrays else NO_REWARDS), "path": str(path)},
        notes=known.notes,
    )


def _column_paths(store: EpisodeStore) -> dict[str, list[str]]:
    """Returns the paths of each column's arrays; a column is an array or a dict of arrays."""
    return {name: sorted(tree) if isinstance(tree, dict) else [""] for name, tree in store.columns.items()}


def _columns(paths: Mapping[str, Sequence[str]], arrays: dict[str, np.ndarray]) -> dict[str, PyTree]:
    keys = _column_keys(paths)
    of = lambda name: {path: arrays[keys[name, path]] for path in paths[name]}
    return {name: arrays[keys[name, ""]] if list(paths[name]) == [""] else of(name) for name in paths}


def _column_keys(paths: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Returns the name in the file of each array of the columns, by column and path."""
    pairs = [(name, path) for name, found in paths.items() for path in found]
    return {pair: f"column/{name}" for pair, name in zip(pairs, spaces.joined(pairs), strict=True)}


def _join(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name
