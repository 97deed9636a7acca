"""D4RL's HDF5 files: flat arrays of N transitions, one episode after the other.

A file has `observations` [N, *], `actions` [N, *], `rewards` [N], `terminals` [N], and at least one of `timeouts` [N]
and `next_observations` [N, *]; `transitions.build_store` describes files without the latter. Imitation needs no
`rewards`. d3rlpy 1 has `episode_terminals` [N], any end, instead of `timeouts`. Arrays in the group `infos` are
columns; `infos/action_log_probs` is the behaviour's log-probability. Files written by jrl have all of these, and other
fields of the EpisodeStore under `metadata`.
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
    drop_choice_axis,
    guess_action,
    guess_observation,
)
from jrl.errors import InputError
from jrl.fields.paths import written

SUFFIXES = (".hdf5", ".h5")
_NEEDED = ("observations", "actions", "terminals")
_ANY_END = "episode_terminals"  # d3rlpy 1
_LOG_PROBS = "action_log_probs"
_DESCRIPTION = "jrl"  # attribute of `metadata`: spaces and meta as JSON
_LABELS, _LAST = "metadata/labels", "metadata/last_rows"


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Returns several files as one store. Raises InputError: missing or damaged arrays."""
    return concatenated(list(map(_read_file, paths)))


def _read_file(path: Path) -> EpisodeStore:
    with hdf5.open_file(path) as file:
        flat, columns = _read_arrays(file, path)
        json_text = file["metadata"].attrs.get(_DESCRIPTION) if "metadata" in file else None
        labels = {n: _read_label(x, f"data: {path}: label {n}") for n, x in file.get(_LABELS, {}).items()}
        known = files.description_from_json(json.loads(json_text)) if json_text else None
    if known is None:
        flat["actions"] = drop_choice_axis(flat["actions"])
        guessed = guess_observation(flat["observations"]), guess_action(flat["actions"])
        known = files.Description(*guessed, {"source": "D4RL's format"}, ())
    for name in {"rewards", "terminals", "timeouts", _ANY_END} & flat.keys():
        flat[name] = flat[name].reshape(-1) if flat[name].shape[1:] == (1,) else flat[name]
    if "timeouts" not in flat:
        ends = flat.get(_ANY_END, flat["terminals"])
        flat["timeouts"] = (ends != 0) & (flat["terminals"] == 0)
    episode = _read_episode_numbers(path, flat, labels)
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
    return transitions.build_store(steps, known.observation, known.action_space, meta=meta, notes=known.notes)


def _read_label(found: Any, where: str) -> np.ndarray:
    label = hdf5.read_array(found)
    if label.dtype.kind != "O":
        return label
    return files.build_text_array([str(x, "utf-8") for x in label.reshape(-1)], where)


def _read_arrays(file: Any, path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the flat arrays by name, and the columns: arrays of numbers in `infos` with a row for each step."""
    missing = [name for name in _NEEDED if name not in file]
    if missing and any(name.startswith("episode_") for name in file):
        raise InputError(f"data: {path} is a file of a Minari data set: give the directory that contains data/")
    if missing:
        needed, got = ", ".join(_NEEDED), ", ".join(file) or "nothing"
        raise InputError(f"data: {path} has no {' and no '.join(missing)}: a D4RL file has {needed}, got {got}")
    if not {"timeouts", "next_observations", _ANY_END} & {*file}:
        what = "neither timeouts nor next_observations, so time limits of episodes are unknown"
        raise InputError(f"data: {path} has {what}: add one (timeouts: all False if there are no time limits)")
    names = [name for name in (*_NEEDED, "rewards", "timeouts", "next_observations", _ANY_END, _LAST) if name in file]
    if groups := [name for name in names if not hasattr(file[name], "dtype")]:
        raise InputError(f"data: {path}: {', '.join(groups)}: expected an array, got a group: write it again")
    flat = {name: hdf5.read_array(file[name]) for name in names}
    if wrong := [name for name in names if flat[name].dtype.kind not in "biuf"]:
        raise InputError(f"data: {path}: {', '.join(wrong)}: expected numbers, got another dtype: write it again")
    if empty := [name for name in _NEEDED if not flat[name].size]:
        raise InputError(f"data: {path}: {', '.join(empty)}: expected a row for each step, got no rows")
    is_column = lambda x: hasattr(x, "dtype") and x.dtype.kind in "biuf" and x.shape[:1] == (len(flat["actions"]),)
    infos = {name: x[()] for name, x in file.get("infos", {}).items() if is_column(x)}
    return flat, {LOG_PROB if name == _LOG_PROBS else name: x for name, x in infos.items()}


def _read_episode_numbers(path: Path, flat: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> np.ndarray | None:
    """Returns the number of each row's episode, [N] i64, as jrl wrote it; None: another program wrote the file.

    Raises:
      InputError: episodes that do not cover all rows, or episodes without a label.
    """
    if _LAST not in flat:
        return None
    last, rows = flat[_LAST], len(flat["actions"])
    is_whole = last.dtype.kind in "iu" and last.ndim == 1 and last[-1:].tolist() == [rows - 1]
    if not is_whole or not (np.diff(last, prepend=-1) > 0).all() or {*map(len, labels.values())} - {len(last)}:
        raise InputError(
            f"data: {path}: expected {_LAST} to rise to the last of {rows:,} rows, and a label for each episode: "
            "remove the group metadata, or write the file again"
        )
    return np.repeat(np.arange(len(last)), np.diff(last, prepend=-1))


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a file. Raises InputError: observations, actions or a column are not a single array."""
    trees = {"observations": store.obs, "actions": store.action, **store.columns}
    if several := [name for name, tree in trees.items() if not isinstance(tree, np.ndarray)]:
        raise InputError(
            f"data: {path}: the format d4rl needs single arrays, but {', '.join(several)} of {store.name} are trees: "
            "write jrl or minari"
        )
    infos = {name: _LOG_PROBS if name == LOG_PROB else name for name in store.columns}
    named = [*(("infos", name) for name in infos.values()), *(("labels", name) for name in store.labels)]
    hdf5.check_names(path, named, nested=False)
    steps = transitions.build_table(store)
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
    with written(path) as temporary, hdf5.import_h5py().File(temporary, "w") as file:
        for name, x in arrays.items():
            hdf5.write_array(file, name, x, compress=compress)
        for name, x in store.labels.items():
            text = hdf5.import_h5py().string_dtype() if x.dtype.kind == "U" else x.dtype
            file.create_dataset(f"{_LABELS}/{name}", data=x.astype(object) if x.dtype.kind == "U" else x, dtype=text)
        file["metadata"].attrs[_DESCRIPTION] = json.dumps(files.description_to_json(store))
