"""Tables of steps: episodes made of files that have a row for each transition, in whatever order, and the reverse."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.data.store import EpisodeStore, array_fault, element_faults
from jrl.errors import InputError, counted
from jrl.types import Dict, PyTree, Space, Tuple


class Transitions(NamedTuple):
    """Table of N steps."""

    obs: PyTree  # [N, *]
    action: PyTree  # [N, *]
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    next_obs: PyTree | None = None  # [N, *]
    episode: np.ndarray | None = None  # [N] i64: steps of one episode have one number; None: an end begins the next
    t: np.ndarray | None = None  # [N] i64: the step in its episode; None: as the rows stand
    columns: Mapping[str, PyTree] = {}  # [N, *] each
    labels: Mapping[str, np.ndarray] = {}  # [N] each, the same for all steps of an episode


_ROUNDING = 4 * float(np.finfo(np.float32).eps)


def store_of(
    steps: Transitions, observation: Space, action: Space, *, meta: Mapping[str, Any], notes: Sequence[str] = ()
) -> EpisodeStore:
    """Returns the episodes of a table.

    The rows of an episode may stand apart. It ends where they say so, where a step is missing, and where the next
    observation of a row is not the observation of the following one, up to float32's rounding: no transition becomes
    another one. Without next observations a true end repeats the last observation, and of any other end the last
    transition is left out.

    Raises:
      InputError: there is no transition in it, or its columns are not arrays of numbers of the same length.
    """
    name, told = meta.get("path", "the data set"), list(notes)
    _check(steps, observation, action, name)
    order = _order(steps.episode, steps.t)
    if order is not None:
        steps = _rows(steps, order)
    last = _ends(steps, told)
    if steps.next_obs is None:
        steps, last = _with_next_obs(steps, last, told)
        if not len(last):
            raise InputError(f"{name}: there is no whole transition in it: write new_obs, too")
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
        notes=tuple(told),
    )


def _with_next_obs(steps: Transitions, last: np.ndarray, notes: list[str]) -> tuple[Transitions, np.ndarray]:
    """Returns the steps with the next observations that they have, without those of which it is not known."""
    unknown = last & ~steps.terminated
    if count := int(unknown.sum()):
        which = f"of {counted(count, 'episode')} without a true end the last transition was left out"
        notes.append(f"new_obs is missing: {which}, whose next observation is not known")
    if (last & steps.terminated).any():
        what = "the final observation of true ends, which nothing reads, is the last one again"
        notes.append(f"new_obs is missing: {what}")
    next_obs = jax.tree.map(lambda x: x[np.arange(len(last)) + ~last], steps.obs)
    ends = unknown[1:] & ~last[:-1]  # rows before one that is left out end its episode
    truncated = steps.truncated.copy()
    truncated[:-1] |= ends & steps.truncated[1:]
    last[:-1] |= ends
    return _rows(steps._replace(next_obs=next_obs, truncated=truncated), ~unknown), last[~unknown]


def table_of(store: EpisodeStore) -> Transitions:
    """Returns the table of all steps of a store, one episode after the other."""
    is_step, lengths = store.is_step(), store.lengths()
    steps, follows = store.map_rows(lambda x: x[is_step]), np.flatnonzero(is_step) + 1
    last = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros((2, store.num_steps), bool)
    terminated[last], truncated[last] = store.terminated, store.truncated
    return Transitions(
        obs=steps.obs,
        action=steps.action,
        reward=steps.reward,
        terminated=terminated,
        truncated=truncated,
        next_obs=jax.tree.map(lambda x: x[follows], store.obs),
        episode=np.repeat(np.arange(store.num_episodes), lengths),
        t=np.arange(len(follows)) - np.repeat(np.cumsum(lengths) - lengths, lengths),
        columns=steps.columns,
    )


def _check(steps: Transitions, observation: Space, action: Space, name: str) -> None:
    """Raises InputError: a column is not an array of numbers with a row for each step, of its space's shape."""
    if not (size := len(steps.reward)):
        raise InputError(f"{name}: there is no transition in it")
    elements = [("observations", steps.obs, observation), ("actions", steps.action, action)]
    elements += [("next observations", steps.next_obs, observation)] if steps.next_obs is not None else []
    expected: Any = (
        ("rewards", steps.reward, (), "biuf"), ("terminated", steps.terminated, (), "b"),
        ("truncated", steps.truncated, (), "b"), ("episode", steps.episode, (), "iu"),
        ("the step in its episode", steps.t, (), "iuf"),
        *((f"column {k}", x, None, "biuf") for k, x in steps.columns.items()),
        *((f"label {k}", x, (), "biufUS") for k, x in steps.labels.items()),
    )  # fmt: skip
    faults = [fault for what, tree, space in elements for fault in element_faults(what, tree, space, size)]
    faults += [array_fault(what, x, size, *how) for what, tree, *how in expected for x in jax.tree.leaves(tree)]
    if faults := list(filter(None, faults)):
        raise InputError(f"data: {name} is damaged: {'; '.join(faults[:8])}: write it anew")


def numbered(*keys: np.ndarray) -> np.ndarray:
    """Returns numbers [N] i64 that are equal where all keys [N] are, in the order in which they first appear."""
    size = len(keys[0])
    begins = np.zeros(size, bool)
    begins[:1] = True
    for key in keys:
        begins[1:] |= key[1:] != key[:-1]
    runs = np.flatnonzero(begins)  # few beside the rows: what is sorted are they
    found = np.zeros(len(runs), np.int64)
    for key in keys:
        _, inverse = np.unique(key[runs], return_inverse=True)
        found = found * (int(inverse.max(initial=0)) + 1) + inverse
        _, first, found = np.unique(found, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        found = rank[found]
    return np.repeat(found, np.diff(runs, append=size))


def guessed(fn: Callable[[Any], Space], tree: PyTree) -> Space:
    """Returns the space of the elements of a tree of arrays [N, *], by `fn` of each array."""
    if isinstance(tree, dict):
        return Dict(tuple((name, guessed(fn, part)) for name, part in tree.items()))
    if isinstance(tree, tuple):
        return Tuple(tuple(guessed(fn, part) for part in tree))
    return fn(tree)


def _rows(steps: Transitions, index: np.ndarray) -> Transitions:
    return Transitions(*(jax.tree.map(lambda x: x[index], part) for part in steps))


def _order(episode: np.ndarray | None, t: np.ndarray | None) -> np.ndarray | None:
    """Returns the order of rows by episode and step; None: as they stand. Numbers of steps that repeat are ignored."""
    if episode is None or not len(episode):
        return None
    runs = episode[np.concatenate([[True], episode[1:] != episode[:-1]])]
    together = len(np.unique(runs)) == len(runs)
    if together and (t is None or ((t[1:] > t[:-1]) | (episode[1:] != episode[:-1])).all()):
        return None
    if t is not None:
        order = np.lexsort((t, episode))
        same = (episode[order][1:] == episode[order][:-1]) & (t[order][1:] == t[order][:-1])
        repeated = np.unique(episode[order][1:][same])
        return np.lexsort((np.where(np.isin(episode, repeated), 0, t), episode))
    return None if together else np.argsort(episode, kind="stable")


def _ends(steps: Transitions, notes: list[str]) -> np.ndarray:
    last = steps.terminated | steps.truncated
    last[-1] = True
    if steps.episode is not None:
        last[:-1] |= steps.episode[1:] != steps.episode[:-1]
    if steps.t is not None:
        gaps = ~last[:-1] & (steps.t[1:] != steps.t[:-1] + 1)
        _tell(notes, gaps, "steps of an episode do not follow each other: it was cut there")
        last[:-1] |= gaps
    if steps.next_obs is not None:
        differs = np.zeros(len(last) - 1, bool)
        for x, following in zip(jax.tree.leaves(steps.obs), jax.tree.leaves(steps.next_obs), strict=True):
            differs |= _differs(following[:-1], x[1:])
        differs &= ~last[:-1]
        _tell(notes, differs, "the next observation is not that of the following step: the episode was cut there")
        last[:-1] |= differs
    return last


def _tell(notes: list[str], where: np.ndarray, what: str) -> None:
    if count := int(where.sum()):
        notes.append(f"at {counted(count, 'place')} {what}")


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns where rows [N, *] of two arrays are not the same numbers, [N] bool; NaN equals itself.

    Floats may differ by a few roundings of float32: programs compute an observation twice, or store one copy of it in
    another dtype. Near 0 the rounding is that of the numbers that a feature usually has.
    """
    found = np.zeros(len(a), bool)
    usual: Any = 0.0
    if {a.dtype.kind, b.dtype.kind} & {"f"}:
        some = b[:: max(1, len(b) // 2**16)].astype(np.float64)
        usual = abs(np.where(np.isfinite(some), some, 0)).mean(0)
    for start in range(0, len(a), 2**14):  # so many that they stay in the cache
        x, y = a[start : start + 2**14], b[start : start + 2**14]
        unlike = x != y
        if unlike.any():
            unlike &= (x == x) | (y == y)
            if x.dtype.kind == "f" or y.dtype.kind == "f":
                with np.errstate(all="ignore"):
                    unlike &= ~(abs(x - y) <= _ROUNDING * (np.maximum(abs(x), abs(y)) + usual))
            found[start : start + 2**14] = unlike.reshape(len(x), -1).any(1)
    return found
