"""Columns of RLlib's files, JSON and Parquet alike: their names and their place in a store."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.formats.transitions import Transitions, guessed, numbered, store_of, table_of
from jrl.data.store import LOG_PROB, NO_REWARDS, EpisodeStore, guessed_action, guessed_observation, without_axis
from jrl.errors import InputError
from jrl.types import PyTree, Space

OBS, NEXT_OBS, ACTIONS, REWARDS = "obs", "new_obs", "actions", "rewards"
TERMINATED, TRUNCATED, DONE = "terminateds", "truncateds", "dones"
EPISODE, T, AGENT, UNROLL = "eps_id", "t", "agent_index", "unroll_id"
AGENT_ID, MODULE_ID, INFOS = "agent_id", "module_id", "infos"
LOGP, PROB = "action_logp", "action_prob"
POLICY, AGENT_LABEL = "policy", "agent"  # labels of the store
REQUIRED = (OBS, ACTIONS)  # imitation needs no rewards
KEYS = {EPISODE, T, AGENT, AGENT_ID, MODULE_ID, UNROLL}  # whose step a row is
NEEDED = {*REQUIRED, REWARDS, NEXT_OBS, TERMINATED, TRUNCATED, DONE, EPISODE, T, AGENT, LOGP, PROB}  # wrong is an error
# what follows from other columns, or says nothing of a step
LEFT_OUT = {"prev_actions", "prev_rewards", "prev_obs", "seq_lens", "batch_indexes", UNROLL, INFOS}
_FLAT = (REWARDS, TERMINATED, TRUNCATED, DONE, T, LOGP, PROB)  # a number for each step
_OWN = NEEDED | KEYS | LEFT_OUT


def shapes(tree: PyTree) -> Any:
    """Returns the shapes of the rows of a tree of arrays [n, *], in a tree that can be compared."""
    if isinstance(tree, dict):
        return {name: shapes(part) for name, part in tree.items()}
    return tuple(map(shapes, tree)) if isinstance(tree, tuple) else [*tree.shape[1:]]


def joined(parts: Sequence[PyTree]) -> PyTree:
    """Returns trees of arrays [n, *] end to end. Raises ValueError: their rows have different shapes."""
    if len({str(shapes(part)) for part in parts}) > 1:
        raise ValueError("its rows have different shapes: they make no array")
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)


def name_of(paths: Sequence[Path]) -> str:
    """Returns the name of files that are read together, for messages."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def store_of_columns(
    columns: Mapping[str, PyTree], labels: Mapping[str, np.ndarray], path: str, notes: list[str], *,
    texts: Mapping[str, np.ndarray] = {}, known: tuple[Space, Space] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> EpisodeStore:  # fmt: skip
    """Returns the episodes of RLlib's columns [N, *], by RLlib's names.

    The `labels` [N] of the store tell episodes apart; `texts` are what numbers of labels stand for; `notes` say what
    was left out so far. `known` are the spaces, which are guessed where the file does not say them.
    """
    count = len(jax.tree.leaves(columns[ACTIONS])[0])
    meta = {"source": "RLlib"} if meta is None else meta
    if REWARDS not in columns:
        columns, meta = {**columns, REWARDS: np.zeros(count, np.float32)}, {**meta, **NO_REWARDS}
    action = columns[ACTIONS] if known else jax.tree.map(without_axis, columns[ACTIONS])
    if wrong := [k for k in _FLAT if k in columns and getattr(columns[k], "size", None) != count]:
        raise InputError(f"data: {path}: {', '.join(wrong)}: expected a number for each of {count:,} steps")
    flags = {k: np.asarray(columns[k], bool).reshape(count) for k in (TERMINATED, TRUNCATED, DONE) if k in columns}
    if not flags:
        notes.append("no column says where episodes end (terminateds, truncateds): all of them count as cut")
    reward = columns[REWARDS].reshape(count)
    steps = Transitions(
        obs=columns[OBS],
        action=action,
        reward=reward if reward.dtype.kind == "f" else reward.astype(np.float32),
        terminated=flags.get(TERMINATED, flags.get(DONE, np.zeros(count, bool))),
        truncated=flags.get(TRUNCATED, np.zeros(count, bool)),
        next_obs=columns.get(NEXT_OBS),
        episode=numbered(*labels.values()) if labels else None,
        t=columns[T].reshape(count) if T in columns else None,
        columns=_further(columns),
        labels=labels,
    )
    space = known or (guessed(guessed_observation, steps.obs), guessed(guessed_action, steps.action))
    store = store_of(steps, *space, meta={**meta, "path": path}, notes=notes)
    return dataclasses.replace(store, labels=store.labels | {k: of[store.labels[k]] for k, of in texts.items()})


def _further(columns: Mapping[str, PyTree]) -> dict[str, PyTree]:
    found = {k: x for k, x in columns.items() if k not in _OWN}
    if LOGP in columns:
        found[LOG_PROB] = columns[LOGP].reshape(-1).astype(np.float32)
    elif PROB in columns:
        with np.errstate(divide="ignore", invalid="ignore"):
            found[LOG_PROB] = np.log(columns[PROB].reshape(-1)).astype(np.float32)
    return found


def columns_of(store: EpisodeStore) -> dict[str, PyTree]:
    """Returns RLlib's columns [N, *] of a store, for all of its steps, one episode after the other.

    Raises:
      InputError: a column has the name of one of RLlib's that means something else.
    """
    if clash := sorted(_OWN & {*store.columns}):
        raise InputError(f"{store.name}: the columns {', '.join(clash)} are RLlib's own, and mean something else there")
    steps = table_of(store)
    return {
        OBS: steps.obs,
        ACTIONS: steps.action,
        **({REWARDS: steps.reward} if store.has_rewards else {}),
        NEXT_OBS: steps.next_obs,
        TERMINATED: steps.terminated,
        TRUNCATED: steps.truncated,
        T: steps.t,
        EPISODE: episode_ids(store)[steps.episode],
        **{LOGP if name == LOG_PROB else name: column for name, column in steps.columns.items()},
    }


def episode_ids(store: EpisodeStore) -> np.ndarray:
    """Returns RLlib's ids of episodes, [E]: the label of that name, else numbers that other files hardly have."""
    if EPISODE in store.labels:
        given = store.labels[EPISODE]
        keys = numbered(given, *(store.labels[k] for k in (POLICY, AGENT_LABEL) if k in store.labels))
        if len(np.unique(keys)) == len(keys):
            return given
    return int(store.checksum()[:8], 16) * 2**20 + np.arange(store.num_episodes)
