"""Jumps between the steps of episodes, by which ends that a file lacks, or has a row too early or late, show up."""

from collections.abc import Iterator

import jax
import numpy as np

from jrl import spaces
from jrl.data.store import EpisodeStore
from jrl.types import Box, Discrete

_MOST_ROWS = 100_000  # that are looked at: the first ones
_MOST_FEATURES = 256  # pictures are left out
_JUMP = 3.3  # score of a jump. On twelve control tasks 1 step of 10,000 has it, and about 8 of 10 resets
_LEAST = 3  # jumps, or episodes, that are evidence


def scores(store: EpisodeStore) -> np.ndarray:
    """Returns how unlike the others each step's change of the observation is, [R] f64, about 1 for the largest tenth.

    The change is measured twice, as it is and as the error of a linear prediction from observation and action: a reset
    is far away, and follows from neither. The score is the geometric mean of both. 0 on final rows, behind the first
    100,000 rows, and where observations are not numbers of a continuum.
    """
    found = np.zeros(store.num_rows)
    rows = min(store.num_rows, _MOST_ROWS)
    x = _features(store, rows)
    step = store.is_step()[: rows - 1]
    if x is None or step.sum() < 50:
        return found
    change = np.diff(x, axis=0)
    usual = np.median(abs(change[step]), 0)
    kept = usual > 0  # what stands still most of the time, as a contact does, jumps whenever it moves
    if not kept.any():
        return found
    given = np.concatenate([x, _actions(store, rows), np.ones((rows, 1))], 1)[:-1]
    given /= np.maximum(abs(given).max(0), 1e-12)
    square = given[step].T @ given[step] + 1e-6 * np.eye(given.shape[1])
    error = change[:, kept] - given @ np.linalg.solve(square, given[step].T @ change[step][:, kept])
    total = np.ones(rows - 1)
    for part, scale in ((change[:, kept], usual[kept]), (error, np.median(abs(error[step]), 0))):
        size = np.sqrt(((part / np.maximum(scale, 1e-12)) ** 2).mean(1))
        total *= size / max(np.quantile(size[step], 0.9), 1e-12)
    found[: rows - 1] = np.where(step, np.sqrt(total), 0)
    return found


def _features(store: EpisodeStore, rows: int) -> np.ndarray | None:
    """Returns the observations as numbers [rows, F]; None where they are pictures, choices or not finite."""
    parts = [
        x[:rows].reshape(rows, -1)
        for (_, leaf), x in zip(spaces.leaves(store.observation), jax.tree.leaves(store.obs), strict=True)
        if isinstance(leaf, Box) and x.dtype.kind == "f" and x[:1].size <= _MOST_FEATURES
    ]
    x = np.concatenate(parts, 1).astype(np.float64) if parts else np.zeros((rows, 0))
    return x if 0 < x.shape[1] <= _MOST_FEATURES and np.isfinite(x).all() and abs(x).max() < 1e100 else None


def _actions(store: EpisodeStore, rows: int) -> np.ndarray:
    """Returns the actions for a linear prediction, [rows, A]; A is 0 where they are neither numbers nor a choice."""
    if isinstance(store.action_space, Discrete) and store.action_space.n <= _MOST_FEATURES:
        return np.asarray(store.action[:rows, None] == np.arange(store.action_space.n), np.float64)
    if isinstance(store.action_space, Box) and isinstance(store.action, np.ndarray):
        x = store.action[:rows].reshape(rows, -1).astype(np.float64)
        if x.shape[1] <= _MOST_FEATURES and np.isfinite(x).all() and abs(x).max(initial=0) < 1e100:
            return x
    return np.zeros((rows, 0))


def evidence(store: EpisodeStore) -> Iterator[tuple[str, str]]:
    """Yields (what was found, what to do about it) where the ends of episodes seem to be missing or in other rows."""
    lengths = store.lengths()
    first, last = store.offsets[:-1], store.offsets[1:] - 2
    alone = int((lengths == 1).sum())
    mixed = alone * 4 >= len(lengths) and (lengths > 1).any()
    if alone >= _LEAST and mixed and not store.terminated[lengths == 1].any():
        yield (
            f"{alone:,} of {len(lengths):,} episodes have one step and no true end, beside others of up to "
            f"{lengths.max():,} steps",
            "timeouts may be marked a row too early or too late: mark the last row of each episode",
        )
    jump = scores(store) > _JUMP
    inside = jump.copy()
    inside[first] = inside[last] = False
    places = np.flatnonzero(inside)
    if len(places) >= max(_LEAST, 2 * len(lengths)):  # a lander that falls over bounces once or twice in an episode
        episode = np.searchsorted(store.offsets, places, "right") - 1
        where = ", ".join(f"{row - store.offsets[e]} of episode {e}" for row, e in list(zip(places, episode))[:3])
        yield (
            f"{len(places):,} steps inside of {len(lengths):,} episodes jump to an observation far away, as a reset "
            f"does (steps {where})",
            "ends of episodes may be missing: mark the last row of each in terminals or timeouts, or a value learns to "
            "look through resets",
        )
        return
    whole = lengths > 2
    for what, rows, limited in (
        ("last", last, store.truncated & ~store.terminated),
        ("first", first, np.concatenate([[False], ~store.terminated[:-1]])),
    ):
        those = rows[whole & limited & (rows < _MOST_ROWS - 1)]
        count = int(jump[those].sum())
        if count >= _LEAST and 2 * count >= len(those):
            which = "late" if what == "last" else "early"
            yield (
                f"the {what} step of {count:,} of {len(those):,} episodes beside a time limit jumps to an observation "
                "far away, as a reset does",
                f"timeouts seem to be marked a row too {which}: mark the last row of each episode",
            )
