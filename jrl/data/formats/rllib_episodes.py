"""RLlib's whole episodes: the states of SingleAgentEpisode in msgpack, one in each row of a Parquet file (ray 2.60).

Arrays stand in them as msgpack_numpy writes them: dicts of dtype, shape and bytes. What it would unpickle is refused.
"""

import importlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jrl.data.formats import rllib_columns as names
from jrl.data.formats.transitions import guessed
from jrl.data.store import LOG_PROB, Episode, EpisodeStore, guessed_action, guessed_observation, of_episodes
from jrl.errors import InputError, cannot_import
from jrl.types import PyTree


def store_of(blobs: Iterable[tuple[str, Any]], name: str) -> EpisodeStore:
    """Reads the episodes of blobs, each with its file. Raises InputError: the episode and what is wrong with it."""
    try:
        msgpack = importlib.import_module("msgpack")
    except ImportError as e:
        raise InputError(f"data: {name}: whole episodes of RLlib's: {cannot_import('msgpack', e)}") from e
    episodes = []
    for number, (path, blob) in enumerate(blobs):
        try:
            state = msgpack.unpackb(blob, strict_map_key=False)
            episodes.append(_episode(state))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, msgpack.UnpackException) as e:
            what = f"{type(e).__name__}: {e}"
            raise InputError(f"data: {path}: episode {number} is damaged ({what}): write the file anew") from e
    episodes = [episode for episode in episodes if len(episode.reward)]
    if not episodes:
        raise InputError(f"data: {name}: there is no transition in it")
    joined = lambda trees: jax.tree.map(lambda *x: np.concatenate(x), *trees)
    try:
        observation = guessed(guessed_observation, joined([e.obs for e in episodes]))
        action = guessed(guessed_action, joined([e.action for e in episodes]))
    except ValueError as e:
        raise InputError(f"data: {name}: its episodes have different spaces ({e}): read them apart") from e
    shared = {k for k in episodes[0].columns if all(k in e.columns for e in episodes)}
    episodes = [e._replace(columns={k: e.columns[k] for k in sorted(shared)}) for e in episodes]
    notes = ("infos were left out",)
    return of_episodes(observation, action, episodes, meta={"source": "RLlib", "path": name}, notes=notes)


def _episode(state: Any) -> Episode:
    further = {k: _buffer(part) for k, part in state["extra_model_outputs"].items()}
    if names.LOGP in further:
        further[LOG_PROB] = further.pop(names.LOGP).astype(np.float32)
    reward = _buffer(state["rewards"])
    return Episode(
        obs=_buffer(state["observations"]),
        action=_buffer(state["actions"]),
        reward=reward if reward.dtype.kind == "f" else reward.astype(np.float32),
        terminated=_flag(state["is_terminated"]),
        truncated=_flag(state["is_truncated"]),
        columns={k: x for k, x in further.items() if isinstance(x, np.ndarray) and len(x) == len(reward)},
        labels={names.EPISODE: str(state["id_"])},
    )


def _flag(value: Any) -> bool:
    """Returns a bool, which an environment may have given as one of numpy's."""
    return bool(np.all(_tree(value)))


def _buffer(state: Any) -> PyTree:
    """Returns an InfiniteLookbackBuffer's rows of the episode itself: those before are another fragment's."""
    lookback = int(state["lookback"])
    data = (
        _tree(state["data"]) if _is_array(state["data"]) or isinstance(state["data"], dict) else _stacked(state["data"])
    )
    return jax.tree.map(lambda x: x[lookback:], data)


def _stacked(rows: list[Any]) -> PyTree:
    return jax.tree.map(lambda *x: np.stack(x), *map(_tree, rows)) if rows else np.zeros(0)


def _tree(value: Any) -> PyTree:
    if _is_array(value):
        return _array(value)
    if isinstance(value, dict):
        return {str(k): _tree(part) for k, part in value.items()}
    if isinstance(value, list):
        return tuple(map(_tree, value))
    if not isinstance(value, bool | int | float):
        raise TypeError(f"it holds a {type(value).__name__}, where numbers are read only")
    return np.asarray(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, dict) and b"nd" in value


def _array(value: dict[bytes, Any]) -> np.ndarray:
    name, shape, data = value[b"type"], value.get(b"shape", ()), value[b"data"]
    if not isinstance(name, str) or np.dtype(name).kind not in "biuf":
        raise TypeError(f"it holds an array of dtype {str(name)[:40]}, where numbers are read only")
    dtype = np.dtype(name)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"it holds {len(data)} bytes for an array {tuple(shape)} of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)
