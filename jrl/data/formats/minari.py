"""Minari's data sets (as of 0.5.4): a directory NAME-vN with data/metadata.json and the episodes.

The episodes are in data/main_data.hdf5. Observations have T + 1 rows. An info with T + 1 rows begins with the reset's
info, which the column leaves out. Data sets written by jrl have images without compression loss (Minari's default is
lossy), and jrl's spaces and meta under "jrl".

The package minari is not safe with untrusted files. If metadata lack spaces, it makes the named environment, which
imports modules. It opens images of any format and size.
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
from jrl.data.episode import Episode
from jrl.data.formats import files, hdf5
from jrl.data.store import EpisodeStore, of_episodes
from jrl.errors import InputError
from jrl.spaces_json import gymnasium_starts, space_from_gymnasium, space_to_gymnasium
from jrl.types import Dict, PyTree, Space, Tuple

VERSION = "0.5.4"  # version of Minari's layout that is written
LOSSY = "images are JPEG, which is lossy: they differ a little from the environment's"
_METADATA, _MAIN = "metadata.json", "main_data.hdf5"
_FLAT = ("rewards", "terminations", "truncations")  # a number for each step
_PARTS = ("observations", "actions", *_FLAT)
_LABEL = (str, bool, int, float, np.generic)


def is_data_set(directory: Path) -> bool:
    """Returns whether a directory is a Minari data set, or the directory `data` of one."""
    return _find_data(directory) is not None


def _find_data(directory: Path) -> Path | None:
    if (directory / "data" / _METADATA).is_file():
        return directory / "data"
    if not (directory / _METADATA).is_file():
        return None
    with open(directory / _METADATA, errors="replace") as file:
        return directory if '"total_episodes"' in file.read(files.MAX_TEXT) else None


def read(directory: Path) -> EpisodeStore:
    """Returns a data set. Raises InputError: damaged data; names the file and the episode."""
    if (data := _find_data(directory)) is None:
        raise InputError(f"data: {directory} is not a Minari data set: data/{_METADATA} is missing")
    with _naming_errors(f"data: {data / _METADATA}"):
        metadata = json.loads(files.read_small_text(data / _METADATA))
        if not isinstance(metadata["total_episodes"], int) or metadata["total_episodes"] < 1:
            raise ValueError("it has no episodes")
        given = {name: metadata.get(name) for name in ("observation_space", "action_space")}
        raw = {name: json.loads(space) if isinstance(space, str) else space for name, space in given.items()}
        if missing := [name for name, space in raw.items() if not isinstance(space, dict)]:
            fix = f"write the data set again with Minari {VERSION}, which stores spaces"
            raise InputError(f"it has no {' and no '.join(missing)}: {fix}")
        if (form := metadata.get("data_format", "hdf5")) != "hdf5":
            raise InputError(f"data_format: expected hdf5, got {form!r}: write it with Minari's data_format='hdf5'")
        known = _read_description(raw, metadata)
    notes = list(known.notes)
    episodes = []
    for where, episode, labels in _read_episodes(data / _MAIN, metadata["total_episodes"]):
        with _naming_errors(where):
            episodes.append(_build_episode(episode, labels, known, notes))
    episodes = _keep_shared(episodes, notes)
    meta = {"path": str(directory), **known.meta}
    store = of_episodes(known.observation, known.action_space, episodes, meta=meta, notes=tuple(dict.fromkeys(notes)))
    return dataclasses.replace(
        store,
        obs=_shift_choices(store.obs, raw["observation_space"]),
        action=_shift_choices(store.action, raw["action_space"], store.is_step()),
    )


def _read_description(raw: dict[str, Any], metadata: dict[str, Any]) -> files.Description:
    if "jrl" in metadata:
        return files.description_from_json(metadata["jrl"])
    name = f"{metadata.get('minari_version', '')}: {metadata.get('dataset_id', 'without an id')}"
    meta: dict[str, Any] = {"source": f"Minari {name}"}
    with contextlib.suppress(KeyError, ValueError, TypeError):
        spec = json.loads(metadata["env_spec"])
        meta = {"env": str(spec["id"]), "env_options": dict(spec.get("kwargs") or {}), **meta}
    observation, action = (space_from_gymnasium(raw[name], name) for name in raw)
    return files.Description(observation, action, meta, ())


@contextlib.contextmanager
def _naming_errors(where: str) -> Iterator[None]:
    """Turns errors of the block into an InputError that names a part of the data set."""
    try:
        with files.reading(where.removeprefix("data: ")):
            yield
    except InputError as e:
        raise InputError(*(line if line.startswith("data: ") else f"{where}: {line}" for line in e.errors)) from e


def _read_episodes(path: Path, count: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields (name for messages, trees of arrays by name, labels) of each episode."""
    with hdf5.open_file(path) as file:
        names = sorted((n for n in file if re.fullmatch(r"episode_\d+", n)), key=lambda n: int(n[8:]))
        if len(names) != count:
            raise InputError(
                f"data: {path}: expected {count} episodes by {_METADATA}, got {len(names)}: download the data set again"
            )
        for name in names:
            where = f"data: {path}: {name.replace('_', ' ')}"
            with _naming_errors(where):
                group = file[name]
                episode = {part: _read_tree(group[part]) for part in (*_PARTS, "infos") if part in group}
                labels = {k: v for k, v in group.attrs.items() if "/" not in k}
            yield where, episode, labels


def _read_tree(node: Any) -> Any:
    return {k: _read_tree(part) for k, part in node.items()} if hasattr(node, "items") else hdf5.read_array(node)


def _build_episode(parts: dict[str, Any], labels: Any, known: files.Description, notes: list[str]) -> Episode:
    """Returns the episode of a file's parts. Infos without numbers for each step are left out, with a note."""
    obs = _read_element(parts["observations"], known.observation, notes)
    action = _read_element(parts["actions"], known.action_space, notes)
    for name in _FLAT:
        if parts[name].dtype.kind not in "biuf":
            raise InputError(f"{name}: expected numbers, got the dtype {parts[name].dtype}")
    shapes = {name: parts[name].shape for name in _FLAT}
    if len({*shapes.values()}) > 1 or len(shapes["rewards"]) != 1 or shapes["rewards"] == (0,):
        raise InputError(f"rewards, terminations and truncations: expected one number for each step, got {shapes}")
    reward, terminations, truncations = (parts[name] for name in _FLAT)
    if terminations[:-1].any() or truncations[:-1].any():
        notes.append("episodes continue after a termination or truncation; only the last row counts as their end")
    columns = {name: _build_column(name, x, len(reward), notes) for name, x in parts.get("infos", {}).items()}
    columns = {name: x for name, x in columns.items() if x is not None}
    is_label = lambda x: isinstance(x, _LABEL) and (not isinstance(x, str | bytes) or len(x) <= files.MAX_LABEL)
    labels = {k: v for k, v in labels.items() if k not in ("id", "total_steps") and is_label(v)}
    return Episode(obs, action, reward, bool(terminations[-1]), bool(truncations[-1]), columns, labels)


def _read_element(node: Any, space: Space, notes: list[str]) -> PyTree:
    """Returns the arrays of `space` in a tree. A Tuple's parts have the names "_index_0", "_index_1", ... there."""
    match space:
        case Dict():
            return {name: _read_element(node[name], part, notes) for name, part in space.items}
        case Tuple():
            return tuple(_read_element(node[f"_index_{i}"], part, notes) for i, part in enumerate(space.items))
    if node.dtype == object or (node.dtype == np.uint8 and node.ndim == 2 and len(space.shape) >= 2):  # JPEG files
        notes.append(LOSSY)
        files.check_size("images", len(node) * math.prod(space.shape))
        node = np.stack([_decode_picture(bytes(row), space) for row in node])
    return node.reshape(len(node), *space.shape)


def _decode_picture(file: bytes, space: Any) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(file), formats=("JPEG", "PNG")) as image:
        if (image.height, image.width) != space.shape[:2]:  # checked first: a small file can be a huge image
            raise ValueError(f"expected an image of {space}, got {image.height} x {image.width}")
        return np.array(image, np.uint8)


def _build_column(name: str, given: Any, steps: int, notes: list[str]) -> PyTree | None:
    """Returns an info as a column, an array or a dict of arrays by path; None: the info has other values."""
    flat = {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(given)}
    arrays = dict(zip(spaces.join_paths([*flat]), flat.values(), strict=True))
    is_row = lambda x: x.dtype.kind in "biuf" and x.shape[:1] in ((steps,), (steps + 1,))
    if not arrays or not all(map(is_row, arrays.values())):
        notes.append(f"the info {name} was left out: it is not a number or array for each step")
        return None
    if any(len(x) > steps and x[0].any() for x in arrays.values()):
        notes.append(f"the info {name} of resets was left out")
    columns = {path: x[-steps:] for path, x in arrays.items()}
    return columns if isinstance(given, dict) else columns[""]


def _keep_shared(episodes: Sequence[Episode], notes: list[str]) -> list[Episode]:
    def shared(parts: list[Any], what: str) -> list[dict[str, Any]]:
        kind = lambda part: str(jax.tree.map(lambda x: (np.shape(x)[what == "info" :], np.asarray(x).dtype.kind), part))
        names = dict.fromkeys(name for part in parts for name in part)
        kept = [n for n in names if len({kind(part[n]) if n in part else None for part in parts}) == 1]
        notes.extend(f"the {what} {n} was left out: it differs between episodes" for n in names if n not in kept)
        return [{n: part[n] for n in kept} for part in parts]

    columns, labels = shared([e.columns for e in episodes], "info"), shared([e.labels for e in episodes], "label")
    return [e.replace(columns=c, labels=ls) for e, c, ls in zip(episodes, columns, labels, strict=True)]


def _shift_choices(tree: PyTree, raw: dict[str, Any], steps: np.ndarray | None = None) -> PyTree:
    """Returns choices with a space's `start` subtracted; rows that are not `steps` stay 0."""

    def shift(start: np.ndarray, x: np.ndarray) -> np.ndarray:
        if not start.any():
            return x
        shifted = x - start.astype(x.dtype).reshape(x.shape[1:] if x.ndim > 1 else ())
        return shifted if steps is None else np.where(steps.reshape(-1, *[1] * (x.ndim - 1)), shifted, 0)

    return jax.tree.map(shift, gymnasium_starts(raw), tree)


def write(store: EpisodeStore, directory: Path, *, compress: bool) -> None:
    """Writes a data set with HDF5. Minari loads a directory under MINARI_DATASETS_PATH by its name.

    A name without a version gets -v0 in the metadata.
    """
    trees = {"observations": store.obs, "actions": store.action, "infos": store.columns}
    hdf5.check_names(directory, [names for names, _ in _list_arrays(trees)], nested=True)
    hdf5.check_names(directory, [(name,) for name in store.labels], nested=False)
    with files.write_directory(directory) as temporary:
        data = temporary / "data"
        data.mkdir()
        with hdf5.import_h5py().File(data / _MAIN, "w", track_order=True) as file:
            for e, episode in enumerate(store.episodes()):
                group = file.create_group(f"episode_{e}")
                labels = {name: str(x) if isinstance(x, str) else x for name, x in episode.labels.items()}
                group.attrs.update({"id": e, "total_steps": len(episode.reward), **labels})
                for names, x in _list_arrays(_build_trees(episode)):
                    hdf5.write_array(group, "/".join(names), x, compress=compress)
        size = round((data / _MAIN).stat().st_size / 1e6, 1)
        (data / _METADATA).write_text(json.dumps(_build_metadata(store, directory, size)))


def _list_arrays(tree: PyTree, *names: str) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    if isinstance(tree, np.ndarray):
        yield names, tree
        return
    parts = tree.items() if isinstance(tree, dict) else ((f"_index_{i}", part) for i, part in enumerate(tree))
    for name, part in parts:
        yield from _list_arrays(part, *names, name)


def _build_trees(episode: Episode) -> dict[str, Any]:
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


def _build_metadata(store: EpisodeStore, directory: Path, size_mb: float) -> dict[str, Any]:
    name = re.sub(r"[^-\w]", "-", directory.name)
    spec = _find_env_spec(store.meta.get("env"))
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
        "jrl": files.description_to_json(store),
    }


def _find_env_spec(env: Any) -> str | None:
    """Returns Gymnasium's specification of an environment id as JSON; None: unknown id."""
    import gymnasium

    try:
        return gymnasium.spec(str(env)).to_json()
    except (gymnasium.error.Error, ImportError, TypeError):  # not registered, missing package, not JSON
        return None
