"""jrl's own files: npz archives of the columns of an EpisodeStore, each whole by itself.

A shard holds `about.json` (spaces, meta, names) and the arrays `obs`, `action`, `reward`, `offsets`, `terminated`,
`truncated`, `column/NAME` and `label/NAME`; of trees `obs/PATH`. numpy reads it, too: `numpy.load(path)["reward"]`.
"""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.data.formats import about, whole
from jrl.data.store import EpisodeStore
from jrl.errors import InputError
from jrl.types import PyTree, Space

SUFFIXES = (".npz",)
_FORMAT = "jrl-data-1"
_ABOUT = "about.json"


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a shard, which is there whole or not at all."""
    columns = {name: _paths(tree) for name, tree in store.columns.items()}
    said = {"format": _FORMAT, **about.of_store(store), "columns": columns}
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with (
        whole.file(path) as temporary,
        zipfile.ZipFile(temporary, "w", method, compresslevel=1 if compress else None) as archive,
    ):
        archive.writestr(_ABOUT, json.dumps(said, allow_nan=False))
        for name, array in _arrays(store).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def read_file(path: Path) -> EpisodeStore:
    """Reads a shard. Raises InputError: it is damaged, or none."""
    try:
        with zipfile.ZipFile(path) as archive:
            said = json.loads(archive.read(_ABOUT)) if _ABOUT in archive.namelist() else None
            if not isinstance(said, dict) or said.get("format") != _FORMAT:
                raise InputError(
                    f"data: {path} is no data set of jrl's: {_ABOUT} in it should say {_FORMAT}: "
                    "docs/data.md tells how to make one of arrays"
                )
            arrays = {name.removesuffix(".npy"): _array(archive, name) for name in archive.namelist() if name != _ABOUT}
        store = _store(said, arrays)
        _check(store)
    except InputError:
        raise
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(f"data: {path} is damaged ({e or type(e).__name__}): remove it, or write it anew") from e
    return store


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _arrays(store: EpisodeStore) -> dict[str, np.ndarray]:
    """Every array of a store by its name in the file."""
    named = {"reward": store.reward, "offsets": store.offsets}
    named |= {"terminated": store.terminated, "truncated": store.truncated}
    for name, space, tree in (("obs", store.observation, store.obs), ("action", store.action_space, store.action)):
        paths = [path for path, _ in spaces.leaves(space)]
        named |= {_join(name, path): x for path, x in zip(paths, jax.tree.leaves(tree), strict=True)}
    for name, tree in store.columns.items():
        named |= {_join(f"column/{name}", path): x for path, x in zip(_paths(tree), jax.tree.leaves(tree), strict=True)}
    return named | {f"label/{name}": label for name, label in store.labels.items()}


def _store(said: dict[str, Any], arrays: dict[str, np.ndarray]) -> EpisodeStore:
    known = about.read(said)
    return EpisodeStore(
        observation=known.observation,
        action_space=known.action_space,
        obs=_tree(known.observation, "obs", arrays),
        action=_tree(known.action_space, "action", arrays),
        reward=arrays["reward"],
        offsets=arrays["offsets"],
        terminated=arrays["terminated"],
        truncated=arrays["truncated"],
        columns={name: _column(name, paths, arrays) for name, paths in said["columns"].items()},
        labels={name.removeprefix("label/"): x for name, x in arrays.items() if name.startswith("label/")},
        meta=known.meta,
        notes=known.notes,
    )


def _tree(space: Space, name: str, arrays: dict[str, np.ndarray]) -> PyTree:
    return spaces.of_leaves(space, [arrays[_join(name, path)] for path, _ in spaces.leaves(space)])


def _paths(tree: PyTree) -> list[str]:
    """Paths of a column's leaves; a column is an array or a dict of such."""
    return sorted(tree) if isinstance(tree, dict) else [""]


def _column(name: str, paths: list[str], arrays: dict[str, np.ndarray]) -> PyTree:
    if paths == [""]:
        return arrays[f"column/{name}"]
    return {path: arrays[f"column/{name}/{path}"] for path in paths}


def _join(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name


def _check(store: EpisodeStore) -> None:
    """Raises ValueError: the arrays do not belong together."""
    rows = {len(x) for x in jax.tree.leaves((store.obs, store.action, store.reward, store.columns))}
    offsets, episodes = store.offsets, store.num_episodes
    if offsets.ndim != 1 or episodes < 1 or offsets[0] != 0 or (np.diff(offsets) < 2).any() or rows != {offsets[-1]}:
        raise ValueError(f"offsets of {episodes} episodes do not fit arrays of {sorted(rows)} rows")
    if {len(x) for x in (store.terminated, store.truncated, *store.labels.values())} != {episodes}:
        raise ValueError(f"there are {episodes} episodes, but not as many ends and labels")
    for what, space, tree in (("obs", store.observation, store.obs), ("action", store.action_space, store.action)):
        for (path, leaf), x in zip(spaces.leaves(space), jax.tree.leaves(tree), strict=True):
            if x.shape[1:] != leaf.shape:
                raise ValueError(f"{_join(what, path)} has the shape {x.shape}, where the space says {leaf.shape}")
