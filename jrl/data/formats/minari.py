"""Minari's data sets (as of 0.5.4): a directory NAME-vN with data/metadata.json and the episodes.

The episodes are in data/main_data.hdf5, or in the Arrow form: a directory each, with tables whose columns are padded to
T + 1 rows. Observations have T + 1 rows. An info with T + 1 rows, the first of which is that of the reset, is a column
here without that row. What is written has HDF5, pictures as they are (Minari's own default is lossy), and our spaces
and meta under "jrl".

The package minari does not read files of anybody. It makes the environment that metadata without spaces name, which
imports what stands there; opens pictures of any format and size; and lets pyarrow hand extension types to whoever
registered them.
"""

import contextlib
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.data.formats import arrow, files, hdf5
from jrl.data.store import Episode, EpisodeStore, of_episodes
from jrl.errors import InputError
from jrl.spaces_json import gymnasium_starts, space_from_gymnasium, space_to_gymnasium
from jrl.types import Dict, PyTree, Space, Tuple

VERSION = "0.5.4"  # of Minari, whose layout is written
LOSSY = "pictures were stored as JPEG, which is lossy: they are not to the bit what the environment showed"
_METADATA, _MAIN = "metadata.json", "main_data.hdf5"
_FLAT = ("rewards", "terminations", "truncations")  # a number for each step
_PARTS = ("observations", "actions", *_FLAT)
_NOT_ROWS = ("_", ".", _METADATA)  # names of files of an Arrow episode that begin so
_LABEL = (str, bool, int, float, np.generic)


def is_one(directory: Path) -> bool:
    """Returns whether a directory is a Minari data set, or the `data` in one."""
    return _data(directory) is not None


def _data(directory: Path) -> Path | None:
    if (directory / "data" / _METADATA).is_file():
        return directory / "data"
    if not (directory / _METADATA).is_file():
        return None
    with open(directory / _METADATA, errors="replace") as file:
        return directory if '"total_episodes"' in file.read(files.MOST_TEXT) else None


# ---------------------------------------------------------------- reading


def read(directory: Path) -> EpisodeStore:
    """Reads a data set. Raises InputError: something in it is wrong, with the file and the episode."""
    if (data := _data(directory)) is None:
        raise InputError(f"data: {directory} is no Minari data set: data/{_METADATA} is missing")
    with _part(f"data: {data / _METADATA}"):
        metadata = json.loads(files.small_text(data / _METADATA))
        if not isinstance(metadata["total_episodes"], int) or metadata["total_episodes"] < 1:
            raise ValueError("it has no episodes")
        given = {name: metadata.get(name) for name in ("observation_space", "action_space")}
        raw = {name: json.loads(space) if isinstance(space, str) else space for name, space in given.items()}
        if missing := [name for name, space in raw.items() if not isinstance(space, dict)]:
            mend = f"write the data set anew with Minari {VERSION}, which keeps spaces"
            raise InputError(f"it has no {' and no '.join(missing)}: {mend}")
        known = _about(raw, metadata)
    notes = list(known.notes)
    is_hdf5 = metadata.get("data_format", "hdf5") == "hdf5"
    found = []
    for where, episode, labels in (_hdf5_episodes if is_hdf5 else _arrow_episodes)(data, metadata):
        with _part(where):
            found.append(_episode(episode, labels, known, "_index_" if is_hdf5 else "", notes))
    found = _alike(found, notes)
    meta = {"path": str(directory), **known.meta}
    store = of_episodes(known.observation, known.action_space, found, meta=meta, notes=tuple(dict.fromkeys(notes)))
    return dataclasses.replace(
        store,
        obs=_from_zero(store.obs, raw["observation_space"]),
        action=_from_zero(store.action, raw["action_space"], store.is_step()),
    )


def _about(raw: dict[str, Any], metadata: dict[str, Any]) -> files.About:
    if "jrl" in metadata:
        return files.about_from_json(metadata["jrl"])
    name = f"{metadata.get('minari_version', '')}: {metadata.get('dataset_id', 'without an id')}"
    meta: dict[str, Any] = {"source": f"Minari {name}"}
    with contextlib.suppress(KeyError, ValueError, TypeError):
        spec = json.loads(metadata["env_spec"])
        meta = {"env": str(spec["id"]), "env_options": dict(spec.get("kwargs") or {}), **meta}
    observation, action = (space_from_gymnasium(raw[name], name) for name in raw)
    return files.About(observation, action, meta, ())


@contextlib.contextmanager
def _part(where: str) -> Iterator[None]:
    """Turns errors while a part of a data set is read into an InputError that names the part."""
    try:
        with files.reading(where.removeprefix("data: ")):
            yield
    except InputError as e:
        raise InputError(*(line if line.startswith("data: ") else f"{where}: {line}" for line in e.errors)) from e


def _hdf5_episodes(data: Path, metadata: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields the place, the trees of arrays and the labels of each episode."""
    path = data / _MAIN
    with hdf5.opened(path) as file:
        names = sorted((n for n in file if re.fullmatch(r"episode_\d+", n)), key=lambda n: int(n[8:]))
        if len(names) != (count := metadata["total_episodes"]):
            what = f"{len(names)} episodes, where {_METADATA} says {count}"
            raise InputError(f"data: {path} has {what}: fetch the data set again")
        for name in names:
            where = f"data: {path}: {name.replace('_', ' ')}"
            with _part(where):
                group = file[name]
                episode = {part: _hdf5_tree(group[part]) for part in (*_PARTS, "infos") if part in group}
                labels = {k: v for k, v in group.attrs.items() if "/" not in k}
            yield where, episode, labels


def _hdf5_tree(node: Any) -> Any:
    return {k: _hdf5_tree(part) for k, part in node.items()} if hasattr(node, "items") else hdf5.array(node)


def _arrow_episodes(data: Path, metadata: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for number in range(metadata["total_episodes"]):
        directory = data / str(number)
        if not directory.is_dir():
            count = metadata["total_episodes"]
            raise InputError(f"data: {directory} is missing: {data / _METADATA} says {count} episodes")
        where = f"data: {directory}: episode {number}"
        with _part(where):
            paths = sorted(p for p in directory.iterdir() if p.is_file() and not p.name.startswith(_NOT_ROWS))
            table = arrow.pyarrow().concat_tables([_table(path, metadata["data_format"]) for path in paths])
            table.validate(full=True)  # offsets in a damaged file point anywhere
            fields = {field.name: field for field in table.schema if field.name in (*_PARTS, "infos")}
            episode = {name: _arrow_tree(field, table[name].combine_chunks()) for name, field in fields.items()}
            episode |= {name: jax.tree.map(lambda x: x[:-1], episode[name]) for name in ("actions", *_FLAT)}
            labels = json.loads(files.small_text(directory / _METADATA))
        yield where, episode, labels


def _table(path: Path, format: str) -> Any:
    if format not in ("arrow", "parquet"):
        raise InputError(f"its data_format is {format!r}: hdf5, arrow and parquet are read")
    return arrow.read_ipc(path) if format == "arrow" else arrow.read_parquet(path, threads=False)


def _arrow_tree(field: Any, values: Any) -> Any:
    types = arrow.pyarrow("types")
    if types.is_struct(values.type):
        return {part.name: _arrow_tree(part, values.field(part.name)) for part in values.type}
    if types.is_fixed_size_list(values.type):
        shape = (field.metadata or {}).get(b"shape", str(values.type.list_size).encode())  # of an info
        sizes = [int(n) for n in shape.split(b",") if n]
        return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), *sizes)
    return values.to_numpy(zero_copy_only=False)


def _episode(found: dict[str, Any], labels: Any, known: files.About, index: str, notes: list[str]) -> Episode:
    """Makes an episode of what a file has; infos that are no numbers for each step are left out, with a note."""
    obs = _element(found["observations"], known.observation, index, notes)
    action = _element(found["actions"], known.action_space, index, notes)
    for name in _FLAT:
        if found[name].dtype.kind not in "biuf":
            raise InputError(f"{name}: expected numbers, got the dtype {found[name].dtype}")
    shapes = {name: found[name].shape for name in _FLAT}
    if len({*shapes.values()}) > 1 or len(shapes["rewards"]) != 1 or shapes["rewards"] == (0,):
        raise InputError(f"rewards, terminations and truncations need one number for each step, not {shapes}")
    reward, terminations, truncations = (found[name] for name in _FLAT)
    if terminations[:-1].any() or truncations[:-1].any():
        notes.append("episodes go on behind a termination or truncation; the last one alone counts as their end")
    columns = {name: _column(name, x, len(reward), notes) for name, x in found.get("infos", {}).items()}
    columns = {name: x for name, x in columns.items() if x is not None}
    is_label = lambda x: isinstance(x, _LABEL) and (not isinstance(x, str | bytes) or len(x) <= files.LONGEST_LABEL)
    labels = {k: v for k, v in labels.items() if k not in ("id", "total_steps") and is_label(v)}
    return Episode(obs, action, reward, bool(terminations[-1]), bool(truncations[-1]), columns, labels)


def _element(node: Any, space: Space, index: str, notes: list[str]) -> PyTree:
    """Returns the arrays of an element of `space` in a tree with a Dict's names, and `index` with 0, 1, ..."""
    match space:
        case Dict():
            return {name: _element(node[name], part, index, notes) for name, part in space.items}
        case Tuple():
            return tuple(_element(node[f"{index}{i}"], part, index, notes) for i, part in enumerate(space.items))
    flat = bool(index) and node.dtype == np.uint8 and node.ndim == 2 and len(space.shape) >= 2  # in HDF5
    if node.dtype == object or flat:  # a JPEG file for each row
        notes.append(LOSSY)
        files.check_size("pictures", len(node) * math.prod(space.shape))
        node = np.stack([_picture(bytes(row), space) for row in node])
    return node.reshape(len(node), *space.shape)


def _picture(file: bytes, space: Any) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(file), formats=("JPEG", "PNG")) as image:
        if (image.height, image.width) != space.shape[:2]:  # a picture of few bytes can have many more
            raise ValueError(f"a picture of {image.height} x {image.width} for {space}")
        return np.array(image, np.uint8)


def _column(name: str, given: Any, steps: int, notes: list[str]) -> PyTree | None:
    """Returns an info as a column, an array or a dict of arrays by path; None: it is none."""
    flat = {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(given)}
    arrays = dict(zip(spaces.join_paths([*flat]), flat.values(), strict=True))
    is_row = lambda x: x.dtype.kind in "biuf" and x.shape[:1] in ((steps,), (steps + 1,))
    if not arrays or not all(map(is_row, arrays.values())):
        notes.append(f"the info {name} is not a number or array for each step, and was left out")
        return None
    if any(len(x) > steps and x[0].any() for x in arrays.values()):
        notes.append(f"the info {name} of resets was left out")
    columns = {path: x[-steps:] for path, x in arrays.items()}
    return columns if isinstance(given, dict) else columns[""]


def _alike(episodes: Sequence[Episode], notes: list[str]) -> list[Episode]:
    def shared(parts: list[Any], what: str) -> list[dict[str, Any]]:
        kind = lambda part: str(jax.tree.map(lambda x: (np.shape(x)[what == "info" :], np.asarray(x).dtype.kind), part))
        names = dict.fromkeys(name for part in parts for name in part)
        kept = [n for n in names if len({kind(part[n]) if n in part else None for part in parts}) == 1]
        notes.extend(f"the {what} {n} is not alike in all episodes, and was left out" for n in names if n not in kept)
        return [{n: part[n] for n in kept} for part in parts]

    columns, labels = shared([e.columns for e in episodes], "info"), shared([e.labels for e in episodes], "label")
    return [e._replace(columns=c, labels=ls) for e, c, ls in zip(episodes, columns, labels, strict=True)]


def _from_zero(tree: PyTree, raw: dict[str, Any], steps: np.ndarray | None = None) -> PyTree:
    """Returns choices that begin at 0, of those that begin at a space's `start`; rows that are no steps stay 0."""

    def shift(start: np.ndarray, x: np.ndarray) -> np.ndarray:
        if not start.any():
            return x
        shifted = x - start.astype(x.dtype).reshape(x.shape[1:] if x.ndim > 1 else ())
        return shifted if steps is None else np.where(steps.reshape(-1, *[1] * (x.ndim - 1)), shifted, 0)

    return jax.tree.map(shift, gymnasium_starts(raw), tree)


# ---------------------------------------------------------------- writing


def write(store: EpisodeStore, directory: Path, *, compress: bool) -> None:
    """Writes a data set with HDF5, which Minari loads by its directory's name if that is under MINARI_DATASETS_PATH.

    That name gets -v0 in the metadata if it has no version.
    """
    trees = {"observations": store.obs, "actions": store.action, "infos": store.columns}
    hdf5.check_names(directory, [names for names, _ in _arrays(trees)], nested=True)
    hdf5.check_names(directory, [(name,) for name in store.labels], nested=False)
    with files.written_directory(directory) as temporary:
        data = temporary / "data"
        data.mkdir()
        with hdf5.h5py().File(data / _MAIN, "w", track_order=True) as file:
            for e, episode in enumerate(store.episodes()):
                group = file.create_group(f"episode_{e}")
                labels = {name: str(x) if isinstance(x, str) else x for name, x in episode.labels.items()}
                group.attrs.update({"id": e, "total_steps": len(episode.reward), **labels})
                for names, x in _arrays(_trees(episode)):
                    hdf5.put(group, "/".join(names), x, compress=compress)
        size = round((data / _MAIN).stat().st_size / 1e6, 1)
        (data / _METADATA).write_text(json.dumps(_written_metadata(store, directory, size)))


def _arrays(tree: PyTree, *names: str) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    if isinstance(tree, np.ndarray):
        yield names, tree
        return
    parts = tree.items() if isinstance(tree, dict) else ((f"_index_{i}", part) for i, part in enumerate(tree))
    for name, part in parts:
        yield from _arrays(part, *names, name)


def _trees(episode: Episode) -> dict[str, Any]:
    is_last = np.arange(len(episode.reward)) == len(episode.reward) - 1
    with_reset = lambda x: np.concatenate([np.zeros((1, *x.shape[1:]), x.dtype), x])
    return {
        "observations": episode.obs,
        "actions": episode.action,
        "rewards": episode.reward,
        "terminations": is_last & episode.terminated,
        "truncations": is_last & episode.truncated,
        "infos": jax.tree.map(with_reset, dict(episode.columns)),
    }


def _written_metadata(store: EpisodeStore, directory: Path, size_mb: float) -> dict[str, Any]:
    name = re.sub(r"[^-\w]", "-", directory.name)
    spec = _env_spec(store.meta.get("env"))
    return {
        "total_episodes": store.num_episodes,
        "total_steps": store.num_steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(space_to_gymnasium(store.observation)),
        "action_space": json.dumps(space_to_gymnasium(store.action_space)),
        "dataset_id": name if re.search(r"-v\d+$", name) else f"{name}-v0",
        "minari_version": VERSION,
        "dataset_size": size_mb,
        **({"env_spec": spec} if spec else {}),
        "jrl": files.about_to_json(store),
    }


def _env_spec(env: Any) -> str | None:
    """Returns Gymnasium's specification of an id, by which Minari makes the environment; None: the id is unknown."""
    import gymnasium

    try:
        return gymnasium.spec(str(env)).to_json()
    except (gymnasium.error.Error, ImportError, TypeError):  # not registered, of another package, not JSON
        return None
