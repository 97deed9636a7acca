"""Minari's data sets (as of 0.5.4): a directory NAME-vN with data/metadata.json and the episodes, read without Minari.

The episodes are in data/main_data.hdf5, or in the Arrow form in a directory each (`minari_arrow`). Observations have
T + 1 rows. An info with T + 1 rows, the first of which is that of the reset, is a column here without that row.
What is written has HDF5, pictures as they are (Minari's own default is lossy), and our spaces and meta under "jrl".
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.formats import about, gymnasium_json, hdf5, minari_arrow, size, whole
from jrl.data.store import Episode, EpisodeStore, of_episodes
from jrl.errors import InputError, cannot_import
from jrl.types import Dict, PyTree, Space, Tuple

VERSION = "0.5.4"  # of Minari, whose layout is written
LOSSY = "pictures were stored as JPEG, which is lossy: they are not to the bit what the environment showed"
_METADATA = "metadata.json"
_LABEL = (str, bool, int, float, np.generic)
_MAIN = "main_data.hdf5"


def is_one(directory: Path) -> bool:
    """Returns whether a directory is a Minari data set, or the `data` in one."""
    return _data(directory) is not None


def _data(directory: Path) -> Path | None:
    if (directory / "data" / _METADATA).is_file():
        return directory / "data"
    found = directory / _METADATA
    if not found.is_file():
        return None
    with open(found, errors="replace") as file:
        return directory if '"total_episodes"' in file.read(size.MOST_TEXT) else None


# ---------------------------------------------------------------- reading


def read(directory: Path) -> EpisodeStore:
    """Reads a data set. Raises InputError: something in it is wrong, with the file and the episode."""
    if (data := _data(directory)) is None:
        raise InputError(f"data: {directory} is no Minari data set: data/{_METADATA} is missing")
    metadata = _read_metadata(data / _METADATA)
    raw = {name: _raw_space(metadata, name, data) for name in ("observation_space", "action_space")}
    with _of(f"data: {data / _METADATA}"):
        known = _about(raw, metadata)
    notes = list(known.notes)
    of_form = _hdf5_episodes if metadata.get("data_format", "hdf5") == "hdf5" else _arrow_episodes
    found = _alike(list(of_form(data, metadata, known, notes)), notes)
    meta = {"path": str(directory), **known.meta}
    store = of_episodes(known.observation, known.action_space, found, meta=meta, notes=tuple(dict.fromkeys(notes)))
    return dataclasses.replace(
        store,
        obs=_from_zero(store.obs, raw["observation_space"]),
        action=_from_zero(store.action, raw["action_space"], store.is_step()),
    )


def _about(raw: dict[str, Any], metadata: dict[str, Any]) -> about.About:
    """Returns what jrl wrote about a data set of its own, else what Minari says."""
    if "jrl" in metadata:
        return about.read(metadata["jrl"])
    observation, action = (gymnasium_json.space(raw[name], name) for name in raw)
    return about.About(observation, action, _meta(metadata), ())


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(size.text(path))
        if not isinstance(found["total_episodes"], int) or found["total_episodes"] < 1:
            raise ValueError("it has no episodes")
        return found
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"data: {path} is damaged ({e}): fetch the data set again") from e


def _raw_space(metadata: dict[str, Any], name: str, data: Path) -> dict[str, Any]:
    given = metadata.get(name)
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as e:
        raise InputError(f"data: {data / _METADATA}: {name} is no JSON ({e}): fetch the data set again") from e
    if not isinstance(found, dict):
        raise InputError(
            f"data: {data / _METADATA} has no {name}: write the data set anew with Minari {VERSION}, which keeps spaces"
        )
    return found


def _meta(metadata: dict[str, Any]) -> dict[str, Any]:
    meta = {"source": f"Minari {metadata.get('minari_version', '')}: {metadata.get('dataset_id', 'without an id')}"}
    try:
        spec = json.loads(metadata["env_spec"])
        return {"env": str(spec["id"]), "env_options": dict(spec.get("kwargs") or {}), **meta}
    except (KeyError, ValueError, TypeError):
        return meta


def _from_zero(tree: PyTree, raw: dict[str, Any], steps: np.ndarray | None = None) -> PyTree:
    """Returns choices that begin at 0, of those that begin at a space's `start`; rows that are no steps stay 0."""

    def shift(start: np.ndarray, x: np.ndarray) -> np.ndarray:
        if not start.any():
            return x
        shifted = x - start.astype(x.dtype).reshape(x.shape[1:] if x.ndim > 1 else ())
        return shifted if steps is None else np.where(steps.reshape(-1, *[1] * (x.ndim - 1)), shifted, 0)

    return jax.tree.map(shift, gymnasium_json.starts(raw), tree)


def _hdf5_episodes(data: Path, metadata: dict[str, Any], known: about.About, notes: list[str]) -> Iterator[Episode]:
    path = data / _MAIN
    with hdf5.opened(path) as file:
        names = sorted((n for n in file if re.fullmatch(r"episode_\d+", n)), key=lambda n: int(n[8:]))
        if len(names) != metadata["total_episodes"]:
            raise InputError(
                f"data: {path} has {len(names)} episodes, where {_METADATA} says {metadata['total_episodes']}: fetch "
                "the data set again"
            )
        for name in names:
            with _of(f"data: {path}: {name.replace('_', ' ')}"):
                group = file[name]
                attributes = {k: v for k, v in group.attrs.items() if "/" not in k}
                infos = group.get("infos", {})
                decoded = {
                    "observations": _decoded(group["observations"], known.observation, _hdf5_leaf, notes, "_index_"),
                    "actions": _decoded(group["actions"], known.action_space, _hdf5_leaf, notes, "_index_"),
                    **{k: hdf5.array(group[k]) for k in ("rewards", "terminations", "truncations")},
                }
                yield _episode(decoded, _flat_infos(infos), attributes, notes)


def _arrow_episodes(data: Path, metadata: dict[str, Any], known: about.About, notes: list[str]) -> Iterator[Episode]:
    for number in range(metadata["total_episodes"]):
        directory = data / str(number)
        if not directory.is_dir():
            raise InputError(
                f"data: {directory} is missing: {data / _METADATA} says {metadata['total_episodes']} episodes"
            )
        with _of(f"data: {directory}: episode {number}"):
            table = minari_arrow.table(directory, metadata["data_format"])
            attributes = json.loads(size.text(directory / _METADATA))
            leaf = functools.partial(_pictures_or, minari_arrow.array)
            steps = lambda x: x[:-1]
            decoded = {
                "observations": _decoded(table["observations"], known.observation, leaf, notes, ""),
                "actions": jax.tree.map(steps, _decoded(table["actions"], known.action_space, leaf, notes, "")),
                **{k: steps(minari_arrow.column(table[k])) for k in ("rewards", "terminations", "truncations")},
            }
            infos = minari_arrow.infos(table["infos"]) if "infos" in table else {}
            yield _episode(decoded, infos, attributes, notes)


@contextlib.contextmanager
def _of(where: str) -> Iterator[None]:
    """Turns errors while a part of a data set is read into an InputError that names the part."""
    try:
        yield
    except InputError as e:
        raise InputError(*(f"{where}: {line}" for line in e.errors)) from e
    except (KeyError, ValueError, TypeError, OSError, IndexError, AttributeError, RuntimeError) as e:
        why = str(e).strip("\"'") or type(e).__name__
        raise InputError(f"{where} is damaged ({why}): fetch the data set again") from e


def _decoded(
    node: Any, space: Space, leaf: Callable[[Any, Space, list[str]], np.ndarray], notes: list[str], index: str
) -> PyTree:
    """Returns the arrays of an element of `space` below `node`, with a Dict's names, or `index` and 0, 1, ..."""
    match space:
        case Dict():
            return {name: _decoded(node[name], part, leaf, notes, index) for name, part in space.items}
        case Tuple():
            parts = enumerate(space.items)
            return tuple(_decoded(node[f"{index}{i}"], part, leaf, notes, index) for i, part in parts)
    x = leaf(node, space, notes)
    return x.reshape(len(x), *space.shape)


def _hdf5_leaf(node: Any, space: Any, notes: list[str]) -> np.ndarray:
    return _pictures_or(lambda found, _: hdf5.array(found), node, space, notes)


def _pictures_or(array: Callable[[Any, Any], np.ndarray], node: Any, space: Any, notes: list[str]) -> np.ndarray:
    """Returns `array(node, space)` [n, *], decoded if it is a JPEG file for each row."""
    found = array(node, space)
    encoded = found.dtype == object or (len(space.shape) >= 2 and found.dtype == np.uint8 and found.ndim == 2)
    if not encoded:
        return found
    notes.append(LOSSY)
    size.check("pictures", len(found) * math.prod(space.shape))
    return np.stack([_picture(bytes(row), space) for row in found])


def _picture(file: bytes, space: Any) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as e:
        raise InputError(f"its pictures are JPEG files: {cannot_import('PIL', e, 'pillow')}") from e
    with Image.open(io.BytesIO(file), formats=("JPEG", "PNG")) as image:
        if (image.height, image.width) != space.shape[:2]:  # a picture of few bytes can have many more
            raise ValueError(f"a picture of {image.height} x {image.width} for {space}")
        return np.array(image, np.uint8)


def _flat_infos(group: Any) -> dict[str, PyTree]:
    """Yields infos as columns: arrays, and dicts of arrays by path."""

    def leaves(node: Any, path: str) -> Iterator[tuple[str, np.ndarray]]:
        for name, part in node.items():
            if hasattr(part, "items"):
                yield from leaves(part, f"{path}{name}/")
            else:
                yield f"{path}{name}", hdf5.array(part)

    return {
        name: dict(leaves(part, "")) if hasattr(part, "items") else hdf5.array(part) for name, part in group.items()
    }


def _episode(found: dict[str, Any], infos: dict[str, PyTree], attributes: dict[str, Any], notes: list[str]) -> Episode:
    """Makes an episode of what a file has; infos that are no numbers for each step are left out, with a note."""
    for name in ("rewards", "terminations", "truncations"):
        if np.asarray(found[name]).dtype.kind not in "biuf":
            raise InputError(f"{name}: expected numbers, got the dtype {np.asarray(found[name]).dtype}")
    reward = np.asarray(found["rewards"])
    ends = {name: np.asarray(found[name]).astype(bool) for name in ("terminations", "truncations")}
    if any(x.shape != reward.shape for x in ends.values()) or reward.ndim != 1 or not len(reward):
        shapes = {"rewards": reward.shape, **{k: x.shape for k, x in ends.items()}}
        raise InputError(f"rewards, terminations and truncations need one number for each step, not {shapes}")
    if any(x[:-1].any() for x in ends.values()):
        notes.append("episodes go on behind a termination or truncation; the last one alone counts as their end")
    columns = {name: x for name, given in infos.items() if (x := _column(name, given, len(reward), notes)) is not None}
    return Episode(
        obs=found["observations"],
        action=found["actions"],
        reward=reward,
        terminated=bool(ends["terminations"][-1]),
        truncated=bool(ends["truncations"][-1]),
        columns=columns,
        labels={k: v for k, v in attributes.items() if k not in ("id", "total_steps") and _is_label(v)},
    )


def _is_label(x: Any) -> bool:
    return isinstance(x, _LABEL) and (not isinstance(x, str | bytes) or len(x) <= size.LONGEST_LABEL)


def _column(name: str, given: PyTree, steps: int, notes: list[str]) -> PyTree | None:
    arrays = [np.asarray(x) for x in jax.tree.leaves(given)]
    if not arrays or any(x.dtype.kind not in "biuf" or x.ndim < 1 or len(x) not in (steps, steps + 1) for x in arrays):
        notes.append(f"the info {name} is not a number or array for each step, and was left out")
        return None
    if any(len(x) > steps and x[0].any() for x in arrays):
        notes.append(f"the info {name} of resets was left out")
    return jax.tree.map(lambda x: np.asarray(x)[-steps:], given)


def _alike(episodes: Sequence[Episode], notes: list[str]) -> list[Episode]:
    """Returns the episodes with the columns and labels that all of them have, of the same shapes and dtypes."""

    def shared(parts: list[dict[str, Any]], what: str) -> list[str]:
        kind = lambda part: str(jax.tree.map(lambda x: (np.shape(x)[what == "info" :], np.asarray(x).dtype.kind), part))
        names = dict.fromkeys(name for part in parts for name in part)
        kept = [n for n in names if len({kind(part[n]) if n in part else None for part in parts}) == 1]
        notes.extend(f"the {what} {n} is not alike in all episodes, and was left out" for n in names if n not in kept)
        return kept

    columns = shared([dict(e.columns) for e in episodes], "info")
    labels = shared([dict(e.labels) for e in episodes], "label")
    return [
        e._replace(columns={n: e.columns[n] for n in columns}, labels={n: e.labels[n] for n in labels})
        for e in episodes
    ]


# ---------------------------------------------------------------- writing


def write(store: EpisodeStore, directory: Path, *, compress: bool) -> None:
    """Writes a data set with HDF5, which Minari loads by its directory's name if that is under MINARI_DATASETS_PATH.

    That name gets -v0 in the metadata if it has no version.
    """
    hdf5.check_names(directory, _names(store), nested=True)
    hdf5.check_names(directory, [(name,) for name in store.labels], nested=False)
    with whole.directory(directory) as temporary:
        data = temporary / "data"
        data.mkdir()
        with hdf5.h5py().File(data / _MAIN, "w", track_order=True) as file:
            for e, episode in enumerate(store.episodes()):
                group = file.create_group(f"episode_{e}")
                group.attrs.update({"id": e, "total_steps": len(episode.reward), **_attributes(episode.labels)})
                _write_episode(group, episode, store, compress)
        size = round((data / _MAIN).stat().st_size / 1e6, 1)
        (data / _METADATA).write_text(json.dumps(_written_metadata(store, directory, size)))


def _names(store: EpisodeStore) -> list[tuple[str, ...]]:
    """Returns the names on the way to each array of an episode."""

    def of(space: Space) -> list[tuple[str, ...]]:
        match space:
            case Dict():
                return [(key, *names) for key, part in space.items for names in of(part)]
            case Tuple():
                return [(f"_index_{i}", *names) for i, part in enumerate(space.items) for names in of(part)]
        return [()]

    spaces = {"observations": store.observation, "actions": store.action_space}
    found = [(name, *names) for name, space in spaces.items() for names in of(space)]
    for name, column in store.columns.items():
        found += [("infos", name, *path) for path in ([(key,) for key in column] if isinstance(column, dict) else [()])]
    return found


def _attributes(labels: Any) -> dict[str, Any]:
    return {name: str(x) if isinstance(x, str) else x for name, x in labels.items()}


def _write_episode(group: Any, episode: Episode, store: EpisodeStore, compress: bool) -> None:
    put = functools.partial(hdf5.put, compress=compress)

    def tree(parent: Any, name: str, space: Space, x: PyTree) -> None:
        match space:
            case Dict():
                inner = parent.create_group(name)
                for key, part in space.items:
                    tree(inner, key, part, x[key])
            case Tuple():
                inner = parent.create_group(name)
                for i, part in enumerate(space.items):
                    tree(inner, f"_index_{i}", part, x[i])
            case _:
                put(parent, name, x)

    tree(group, "observations", store.observation, episode.obs)
    tree(group, "actions", store.action_space, episode.action)
    steps = len(episode.reward)
    put(group, "rewards", episode.reward)
    for name, end in (("terminations", episode.terminated), ("truncations", episode.truncated)):
        put(group, name, np.arange(steps) == (steps - 1 if end else steps))
    for name, column in episode.columns.items():
        for path, x in column.items() if isinstance(column, dict) else [("", column)]:
            of_reset = np.zeros((1, *x.shape[1:]), x.dtype)
            put(group, f"infos/{name}/{path}".rstrip("/"), np.concatenate([of_reset, x]))


def _written_metadata(store: EpisodeStore, directory: Path, size_mb: float) -> dict[str, Any]:
    name = re.sub(r"[^-\w]", "-", directory.name)
    spec = _env_spec(store.meta.get("env"))
    return {
        "total_episodes": store.num_episodes,
        "total_steps": store.num_steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(gymnasium_json.plain(store.observation)),
        "action_space": json.dumps(gymnasium_json.plain(store.action_space)),
        "dataset_id": name if re.search(r"-v\d+$", name) else f"{name}-v0",
        "minari_version": VERSION,
        "dataset_size": size_mb,
        **({"env_spec": spec} if spec else {}),
        "jrl": about.of_store(store),
    }


def _env_spec(env: Any) -> str | None:
    """Returns Gymnasium's specification of an id, by which Minari makes the environment; None: the id is unknown."""
    import gymnasium

    try:
        return gymnasium.spec(str(env)).to_json()
    except (gymnasium.error.Error, ImportError, TypeError):  # not registered, of another package, not JSON
        return None
