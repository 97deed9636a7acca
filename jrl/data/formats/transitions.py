"""Tables of transitions, in any order: conversion to an EpisodeStore and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.data.store import EpisodeStore, find_array_fault, find_element_faults
from jrl.errors import InputError, counted
from jrl.types import Dict, PyTree, Space, Tuple


class Transitions(NamedTuple):
    """Table of N transitions."""

    obs: PyTree  # [N, *]
    action: PyTree  # [N, *]
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    next_obs: PyTree | None = None  # [N, *]
    episode: np.ndarray | None = None  # [N] i64, number of the row's episode; None: a new episode follows each end
    t: np.ndarray | None = None  # [N] i64, index of the step in its episode; None: rows are in order
    columns: Mapping[str, PyTree] = {}  # [N, *] each
    labels: Mapping[str, np.ndarray] = {}  # [N] each, equal for all steps of an episode


_ROUNDING = 4 * float(np.finfo(np.float32).eps)


def build_store(
    steps: Transitions, observation: Space, action: Space, *, meta: Mapping[str, Any], notes: Sequence[str] = ()
) -> EpisodeStore:
    """Returns the episodes of a table.

    An episode ends at a terminated or truncated row, before a missing step, and where a row's next observation differs
    from the following row's observation by more than float32's rounding. Without next observations, a true end repeats
    the last observation, and an episode with another end loses its last transition.

    Args:
      steps: transitions; the rows of an episode need not be adjacent.
      observation, action: spaces.
      meta, notes: fields of the store.
    Raises:
      InputError: the table has no transition, or its columns are not arrays of numbers of the same length.
    """
    name, all_notes = meta.get("path", "the data set"), list(notes)
    _check(steps, observation, action, name)
    order = _find_order(steps.episode, steps.t)
    if order is not None:
        steps = _take_rows(steps, order)
    last = _find_last_steps(steps, all_notes)
    if steps.next_obs is None:
        steps, last = _add_next_obs(steps, last, all_notes)
        if not len(last):
            raise InputError(f"{name}: expected transitions with next observations, got none: write new_obs, too")
    lengths = np.diff(np.flatnonzero(last), prepend=-1)  # steps [E]
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)]).astype(np.int64)
    firsts, final = np.cumsum(lengths) - lengths, offsets[1:] - 1
    rows = np.arange(len(last)) + np.repeat(np.arange(len(lengths)), lengths)

    def padded(x: np.ndarray, at_end: np.ndarray | None = None) -> np.ndarray:
        found = np.empty((int(offsets[-1]), *x.shape[1:]), x.dtype)
        found[rows] = x
        found[final] = 0 if at_end is None else at_end[last]
        return found

    return EpisodeStore(
        observation=observation,
        action_space=action,
        obs=jax.tree.map(padded, steps.obs, steps.next_obs),
        action=jax.tree.map(padded, steps.action),
        reward=padded(steps.reward),
        offsets=offsets,
        terminated=steps.terminated[last],
        truncated=steps.truncated[last],
        columns={k: jax.tree.map(padded, column) for k, column in steps.columns.items()},
        labels={k: label[firsts] for k, label in steps.labels.items()},
        meta=dict(meta),
        notes=tuple(all_notes),
    )


def _add_next_obs(steps: Transitions, last: np.ndarray, notes: list[str]) -> tuple[Transitions, np.ndarray]:
    """Returns the steps with a known next observation, with that observation, and their flags of the last step."""
    unknown = last & ~steps.terminated
    if count := int(unknown.sum()):
        which = f"the last transition of {counted(count, 'episode')} without a true end was left out"
        notes.append(f"new_obs is missing: {which}, because its next observation is unknown")
    if (last & steps.terminated).any():
        notes.append("new_obs is missing: true ends repeat their last observation as final observation, never read")
    next_obs = jax.tree.map(lambda x: x[np.arange(len(last)) + ~last], steps.obs)
    ends = unknown[1:] & ~last[:-1]  # the row before a row that is left out ends the episode
    truncated = steps.truncated.copy()
    truncated[:-1] |= ends & steps.truncated[1:]
    last[:-1] |= ends
    return _take_rows(steps._replace(next_obs=next_obs, truncated=truncated), ~unknown), last[~unknown]


def build_table(store: EpisodeStore) -> Transitions:
    """Returns the table of all transitions of a store, in the order of its episodes."""
    is_step, lengths = store.is_step(), store.lengths()
    steps, next_rows = store.map_rows(lambda x: x[is_step]), np.flatnonzero(is_step) + 1
    last = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros((2, store.num_steps), bool)
    terminated[last], truncated[last] = store.terminated, store.truncated
    return Transitions(
        obs=steps.obs,
        action=steps.action,
        reward=steps.reward,
        terminated=terminated,
        truncated=truncated,
        next_obs=jax.tree.map(lambda x: x[next_rows], store.obs),
        episode=np.repeat(np.arange(store.num_episodes), lengths),
        t=np.arange(len(next_rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths),
        columns=steps.columns,
    )


def _check(steps: Transitions, observation: Space, action: Space, name: str) -> None:
    """Checks that each column is an array of numbers with a row for each step. Raises InputError."""
    if not (size := len(steps.reward)):
        raise InputError(f"{name}: expected transitions, got none")
    elements = [("observations", steps.obs, observation), ("actions", steps.action, action)]
    elements += [("next observations", steps.next_obs, observation)] if steps.next_obs is not None else []
    expected: Any = (
        ("rewards", steps.reward, (), "biuf"), ("terminated", steps.terminated, (), "b"),
        ("truncated", steps.truncated, (), "b"), ("episode", steps.episode, (), "iu"),
        ("the step in its episode", steps.t, (), "iuf"),
        *((f"column {k}", x, None, "biuf") for k, x in steps.columns.items()),
        *((f"label {k}", x, (), "biufUS") for k, x in steps.labels.items()),
    )  # fmt: skip
    faults = [fault for what, tree, space in elements for fault in find_element_faults(what, tree, space, size)]
    faults += [find_array_fault(what, x, size, *how) for what, tree, *how in expected for x in jax.tree.leaves(tree)]
    if faults := list(filter(None, faults)):
        raise InputError(f"data: {name} is damaged: {'; '.join(faults[:8])}: write it again")


def number_groups(*keys: np.ndarray) -> np.ndarray:
    """Returns the group of each row, [N] i64: rows with equal keys [N] are a group, numbered by first appearance."""
    size = len(keys[0])
    begins = np.zeros(size, bool)
    begins[:1] = True
    for key in keys:
        begins[1:] |= key[1:] != key[:-1]
    runs = np.flatnonzero(begins)  # sorting runs, not rows: runs are few
    found = np.zeros(len(runs), np.int64)
    for key in keys:
        _, inverse = np.unique(key[runs], return_inverse=True)
        found = found * (int(inverse.max(initial=0)) + 1) + inverse
        _, first, found = np.unique(found, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        found = rank[found]
    return np.repeat(found, np.diff(runs, append=size))


def guess_space(fn: Callable[[Any], Space], tree: PyTree) -> Space:
    """Returns the space of a tree of arrays [N, *]; `fn` returns the space of each array."""
    if isinstance(tree, dict):
        return Dict(tuple((name, guess_space(fn, part)) for name, part in tree.items()))
    if isinstance(tree, tuple):
        return Tuple(tuple(guess_space(fn, part) for part in tree))
    return fn(tree)


def _take_rows(steps: Transitions, index: np.ndarray) -> Transitions:
    return Transitions(*(jax.tree.map(lambda x: x[index], part) for part in steps))


def _find_order(episode: np.ndarray | None, t: np.ndarray | None) -> np.ndarray | None:
    """Returns the order of rows by episode and step; None: no change. Episodes with repeated `t` keep their order."""
    if episode is None or not len(episode):
        return None
    runs = episode[np.concatenate([[True], episode[1:] != episode[:-1]])]
    is_adjacent = len(np.unique(runs)) == len(runs)
    if is_adjacent and (t is None or ((t[1:] > t[:-1]) | (episode[1:] != episode[:-1])).all()):
        return None
    if t is not None:
        order = np.lexsort((t, episode))
        same = (episode[order][1:] == episode[order][:-1]) & (t[order][1:] == t[order][:-1])
        repeated = np.unique(episode[order][1:][same])
        return np.lexsort((np.where(np.isin(episode, repeated), 0, t), episode))
    return None if is_adjacent else np.argsort(episode, kind="stable")


def _find_last_steps(steps: Transitions, notes: list[str]) -> np.ndarray:
    last = steps.terminated | steps.truncated
    last[-1] = True
    if steps.episode is not None:
        last[:-1] |= steps.episode[1:] != steps.episode[:-1]
    if steps.t is not None:
        gaps = ~last[:-1] & (steps.t[1:] != steps.t[:-1] + 1)
        _add_note(notes, gaps, "a step is missing: the episode was cut there")
        last[:-1] |= gaps
    if steps.next_obs is not None:
        differs = np.zeros(len(last) - 1, bool)
        for x, following in zip(jax.tree.leaves(steps.obs), jax.tree.leaves(steps.next_obs), strict=True):
            differs |= _find_differences(following[:-1], x[1:])
        differs &= ~last[:-1]
        _add_note(notes, differs, "the next observation differs from the following step's: the episode was cut there")
        last[:-1] |= differs
    return last


def _add_note(notes: list[str], where: np.ndarray, what: str) -> None:
    if count := int(where.sum()):
        notes.append(f"at {counted(count, 'place')} {what}")


def _find_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns which rows [N, *] of two arrays differ, [N] bool; NaN equals NaN.

    Floats may differ by a few roundings of float32: a program may compute an observation twice, or store one copy in
    another dtype. The tolerance near 0 is the rounding of the feature's usual size.
    """
    differs = np.zeros(len(a), bool)
    usual: Any = 0.0
    if {a.dtype.kind, b.dtype.kind} & {"f"}:
        some = b[:: max(1, len(b) // 2**16)].astype(np.float64)
        usual = abs(np.where(np.isfinite(some), some, 0)).mean(0)
    for start in range(0, len(a), 2**14):  # blocks that fit the CPU's cache
        x, y = a[start : start + 2**14], b[start : start + 2**14]
        unlike = x != y
        if unlike.any():
            unlike &= (x == x) | (y == y)
            if x.dtype.kind == "f" or y.dtype.kind == "f":
                with np.errstate(all="ignore"):
                    unlike &= ~(abs(x - y) <= _ROUNDING * (np.maximum(abs(x), abs(y)) + usual))
            differs[start : start + 2**14] = unlike.reshape(len(x), -1).any(1)
    return differs
