"""D4RL's HDF5 files: flat arrays of N transitions, one episode after the other.

`observations` [N, *], `actions` [N, *], `rewards` [N], `terminals` [N], and `timeouts` [N] or `next_observations`
[N, *] or both; without the latter see `transitions.store_of`. Imitation needs no `rewards`. d3rlpy 1 has
`episode_terminals` [N] in the place of `timeouts`: any end. Arrays in the group `infos` are columns;
`infos/action_log_probs` is the behaviour's log-probability. What is written has all of these, and under `metadata` what
else there is of an EpisodeStore.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.data.formats import files, hdf5, transitions
from jrl.data.store import (
    LOG_PROB,
    NO_REWARDS,
    EpisodeStore,
    concatenated,
    guessed_action,
    guessed_observation,
    without_axis,
)
from jrl.errors import InputError
from jrl.fields.paths import written

SUFFIXES = (".hdf5", ".h5")
_NEEDED = ("observations", "actions", "terminals")
_ANY_END = "episode_terminals"  # d3rlpy 1
_LOG_PROBS = "action_log_probs"
_OWN = "jrl"  # attribute of `metadata`: spaces and meta as JSON
_LABELS, _LAST = "metadata/labels", "metadata/last_rows"


# ---------------------------------------------------------------- reading


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Reads files as one data set. Raises InputError: something in them is missing or does not fit."""
    return concatenated(list(map(_file, paths)))


def _file(path: Path) -> EpisodeStore:
    with hdf5.opened(path) as file:
        flat, columns = _arrays(file, path)
        own = json.loads(file["metadata"].attrs.get(_OWN, "null")) if "metadata" in file else None
        labels = {n: _label(x, f"data: {path}: label {n}") for n, x in _group(file, _LABELS)}
        known = files.about_from_json(own) if own else None
    if known is None:
        flat["actions"] = without_axis(flat["actions"])
        spaces_of = guessed_observation(flat["observations"]), guessed_action(flat["actions"])
        known = files.About(*spaces_of, {"source": "D4RL's format"}, ())
    for name in {"rewards", "terminals", "timeouts", _ANY_END} & flat.keys():
        flat[name] = flat[name].reshape(-1) if flat[name].shape[1:] == (1,) else flat[name]
    if "timeouts" not in flat:
        ends = flat.get(_ANY_END, flat["terminals"])
        flat["timeouts"] = (ends != 0) & (flat["terminals"] == 0)
    episode = _episodes(path, flat, labels)
    steps = transitions.Transitions(
        obs=flat["observations"],
        action=flat["actions"],
        reward=flat.get("rewards", np.zeros(len(flat["actions"]), np.float32)),
        terminated=flat["terminals"] != 0,
        truncated=flat["timeouts"] != 0,
        next_obs=flat.get("next_observations"),
        episode=episode,
        columns=columns,
        labels={name: label[episode] for name, label in labels.items()} if episode is not None else {},
    )
    meta = {"path": str(path), **known.meta, **({} if "rewards" in flat else NO_REWARDS)}
    return transitions.store_of(steps, known.observation, known.action_space, meta=meta, notes=known.notes)


def _group(file: Any, name: str) -> Any:
    return file[name].items() if name in file else ()


def _label(found: Any, where: str) -> np.ndarray:
    given = hdf5.array(found)
    return files.texts([str(x, "utf-8") for x in given.reshape(-1)], where) if given.dtype.kind == "O" else given


def _arrays(file: Any, path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the flat arrays by name, and the columns: arrays of numbers in `infos` with as many rows."""
    missing = [name for name in _NEEDED if name not in file]
    if missing and any(name.startswith("episode_") for name in file):
        raise InputError(f"data: {path} is the file of a Minari data set: give the directory that holds its data/")
    if missing:
        needed, found = ", ".join(_NEEDED), ", ".join(file) or "nothing"
        raise InputError(
            f"data: {path} has no {' and no '.join(missing)}: a D4RL file has {needed}, this one has {found}"
        )
    if not {"timeouts", "next_observations", _ANY_END} & {*file}:
        what = "neither timeouts nor next_observations, so that time limits of episodes are unknown"
        raise InputError(f"data: {path} has {what}: add one of them (timeouts: False everywhere, if none did)")
    names = [name for name in (*_NEEDED, "rewards", "timeouts", "next_observations", _ANY_END, _LAST) if name in file]
    if groups := [name for name in names if not hasattr(file[name], "dtype")]:
        raise InputError(f"data: {path}: {', '.join(groups)}: expected an array, got a group: write it anew")
    flat = {name: hdf5.array(file[name]) for name in names}
    if wrong := [name for name in names if flat[name].dtype.kind not in "biuf"]:
        raise InputError(f"data: {path}: {', '.join(wrong)}: expected numbers, got another dtype: write it anew")
    if empty := [name for name in _NEEDED if not flat[name].size]:
        raise InputError(f"data: {path}: {', '.join(empty)}: there are no rows: every array needs a row for each step")
    of_steps = lambda x: hasattr(x, "dtype") and x.dtype.kind in "biuf" and x.shape[:1] == (len(flat["actions"]),)
    infos = {name: x[()] for name, x in _group(file, "infos") if of_steps(x)}
    return flat, {LOG_PROB if name == _LOG_PROBS else name: x for name, x in infos.items()}


def _episodes(path: Path, flat: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> np.ndarray | None:
    """Returns the number of each row's episode, [N] i64, as jrl wrote it; None: the file does not say.

    Raises:
      InputError: these are not episodes of all rows, or there is not a label for each.
    """
    if _LAST not in flat:
        return None
    last, rows = flat[_LAST], len(flat["actions"])
    is_whole = last.dtype.kind in "iu" and last.ndim == 1 and last[-1:].tolist() == [rows - 1]
    if not is_whole or not (np.diff(last, prepend=-1) > 0).all() or {*map(len, labels.values())} - {len(last)}:
        raise InputError(
            f"data: {path}: {_LAST} does not rise to the last of {rows:,} rows, or there is not a label for each "
            "episode: remove the group metadata, or write the file anew"
        )
    return np.repeat(np.arange(len(last)), np.diff(last, prepend=-1))


# ---------------------------------------------------------------- writing


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a file. Raises InputError: an observation, action or column is no single array."""
    trees = {"observations": store.obs, "actions": store.action, **store.columns}
    if several := [name for name, tree in trees.items() if not isinstance(tree, np.ndarray)]:
        what = f"{', '.join(several)} of {store.name} {'is' if len(several) == 1 else 'are'} a tree"
        one = "one array for all observations, and so for actions and columns"
        raise InputError(f"data: {path}: the format d4rl has {one}: {what}: write jrl or minari")
    infos = {name: _LOG_PROBS if name == LOG_PROB else name for name in store.columns}
    named = [*(("infos", name) for name in infos.values()), *(("labels", name) for name in store.labels)]
    hdf5.check_names(path, named, nested=False)
    steps = transitions.table_of(store)
    arrays = {
        "observations": steps.obs,
        "next_observations": steps.next_obs,
        "actions": steps.action,
        **({"rewards": steps.reward} if store.has_rewards else {}),
        "terminals": steps.terminated,
        "timeouts": steps.truncated,
        **{f"infos/{infos[name]}": x for name, x in steps.columns.items()},
        _LAST: np.cumsum(store.lengths()) - 1,
    }
    with written(path) as temporary, hdf5.h5py().File(temporary, "w") as file:
        for name, x in arrays.items():
            hdf5.put(file, name, x, compress=compress)
        for name, x in store.labels.items():
            text = hdf5.h5py().string_dtype() if x.dtype.kind == "U" else x.dtype
            file.create_dataset(f"{_LABELS}/{name}", data=x.astype(object) if x.dtype.kind == "U" else x, dtype=text)
        file["metadata"].attrs[_OWN] = json.dumps(files.about_to_json(store))
