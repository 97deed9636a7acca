"""Columns of RLlib's JSON and Parquet files: their names, and their conversion to a store and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.formats import transitions
from jrl.data.formats.transitions import Transitions, guess_space, number_groups
from jrl.data.store import LOG_PROB, NO_REWARDS, EpisodeStore, drop_choice_axis, guess_action, guess_observation
from jrl.errors import InputError
from jrl.types import PyTree, Space

OBS, NEXT_OBS, ACTIONS, REWARDS = "obs", "new_obs", "actions", "rewards"
TERMINATED, TRUNCATED, DONE = "terminateds", "truncateds", "dones"
EPISODE, T, AGENT, UNROLL = "eps_id", "t", "agent_index", "unroll_id"
AGENT_ID, MODULE_ID, INFOS = "agent_id", "module_id", "infos"
LOGP, PROB = "action_logp", "action_prob"
POLICY, AGENT_LABEL = "policy", "agent"  # labels of the store
REQUIRED = (OBS, ACTIONS)  # imitation needs no rewards
KEYS = {EPISODE, T, AGENT, AGENT_ID, MODULE_ID, UNROLL}  # columns that identify the step of a row
# columns whose faults are errors; other columns with faults are left out
NEEDED = {*REQUIRED, REWARDS, NEXT_OBS, TERMINATED, TRUNCATED, DONE, EPISODE, T, AGENT, LOGP, PROB}
# columns that follow from others, or do not describe a step
LEFT_OUT = {"prev_actions", "prev_rewards", "prev_obs", "seq_lens", "batch_indexes", UNROLL, INFOS}
_FLAT = (REWARDS, TERMINATED, TRUNCATED, DONE, T, LOGP, PROB)  # a number for each step
_RLLIB_COLUMNS = NEEDED | KEYS | LEFT_OUT


def row_shapes(tree: PyTree) -> Any:
    """Returns the shapes of the rows of a tree of arrays [n, *]."""
    if isinstance(tree, dict):
        return {name: row_shapes(part) for name, part in tree.items()}
    return tuple(map(row_shapes, tree)) if isinstance(tree, tuple) else [*tree.shape[1:]]


def join_arrays(parts: Sequence[PyTree]) -> PyTree:
    """Returns the concatenation of trees of arrays [n, *]. Raises ValueError: different shapes."""
    if len({str(row_shapes(part)) for part in parts}) > 1:
        raise ValueError("expected rows of one shape")
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)


def name_files(paths: Sequence[Path]) -> str:
    """Returns the name of several files, for messages."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def build_store(
    columns: Mapping[str, PyTree], labels: Mapping[str, np.ndarray], path: str, notes: list[str], *,
    texts: Mapping[str, np.ndarray] = {}, known: tuple[Space, Space] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> EpisodeStore:  # fmt: skip
    """Returns the episodes of RLlib's columns [N, *]. Raises InputError: columns of wrong sizes.

    Rows with equal `labels` [N] are an episode. `texts` has the text of each number of a label. `known` are the spaces
    of observations and actions; None: guess them.
    """
    count = len(jax.tree.leaves(columns[ACTIONS])[0])
    meta = {"source": "RLlib"} if meta is None else meta
    if REWARDS not in columns:
        columns, meta = {**columns, REWARDS: np.zeros(count, np.float32)}, {**meta, **NO_REWARDS}
    action = columns[ACTIONS] if known else jax.tree.map(drop_choice_axis, columns[ACTIONS])
    if wrong := [k for k in _FLAT if k in columns and getattr(columns[k], "size", None) != count]:
        raise InputError(f"data: {path}: {', '.join(wrong)}: expected one number for each of {count:,} steps")
    flags = {k: np.asarray(columns[k], bool).reshape(count) for k in (TERMINATED, TRUNCATED, DONE) if k in columns}
    if not flags:
        notes.append("the columns terminateds and truncateds are missing: all episodes count as cut")
    reward = columns[REWARDS].reshape(count)
    steps = Transitions(
        obs=columns[OBS],
        action=action,
        reward=reward if reward.dtype.kind == "f" else reward.astype(np.float32),
        terminated=flags.get(TERMINATED, flags.get(DONE, np.zeros(count, bool))),
        truncated=flags.get(TRUNCATED, np.zeros(count, bool)),
        next_obs=columns.get(NEXT_OBS),
        episode=number_groups(*labels.values()) if labels else None,
        t=columns[T].reshape(count) if T in columns else None,
        columns=_extra_columns(columns),
        labels=labels,
    )
    space = known or (guess_space(guess_observation, steps.obs), guess_space(guess_action, steps.action))
    store = transitions.build_store(steps, *space, meta={**meta, "path": path}, notes=notes)
    return dataclasses.replace(store, labels=store.labels | {k: of[store.labels[k]] for k, of in texts.items()})


def _extra_columns(columns: Mapping[str, PyTree]) -> dict[str, PyTree]:
    found = {k: x for k, x in columns.items() if k not in _RLLIB_COLUMNS}
    if LOGP in columns:
        found[LOG_PROB] = columns[LOGP].reshape(-1).astype(np.float32)
    elif PROB in columns:
        with np.errstate(divide="ignore", invalid="ignore"):
            found[LOG_PROB] = np.log(columns[PROB].reshape(-1)).astype(np.float32)
    return found


def build_columns(store: EpisodeStore) -> dict[str, PyTree]:
    """Returns RLlib's columns [N, *] of all steps of a store, in the order of its episodes.

    Raises:
      InputError: a column has a name with another meaning in RLlib.
    """
    if clash := sorted(_RLLIB_COLUMNS & {*store.columns}):
        raise InputError(f"{store.name}: the columns {', '.join(clash)} have another meaning in RLlib: rename them")
    steps = transitions.build_table(store)
    return {
        OBS: steps.obs,
        ACTIONS: steps.action,
        **({REWARDS: steps.reward} if store.has_rewards else {}),
        NEXT_OBS: steps.next_obs,
        TERMINATED: steps.terminated,
        TRUNCATED: steps.truncated,
        T: steps.t,
        EPISODE: build_episode_ids(store)[steps.episode],
        **{LOGP if name == LOG_PROB else name: column for name, column in steps.columns.items()},
    }


def build_episode_ids(store: EpisodeStore) -> np.ndarray:
    """Returns RLlib's ids of episodes, [E]: the label `eps_id` if it is unique, otherwise numbers from the checksum."""
    if EPISODE in store.labels:
        given = store.labels[EPISODE]
        keys = number_groups(given, *(store.labels[k] for k in (POLICY, AGENT_LABEL) if k in store.labels))
        if len(np.unique(keys)) == len(keys):
            return given
    return int(store.checksum()[:8], 16) * 2**20 + np.arange(store.num_episodes)
