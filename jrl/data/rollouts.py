"""Data sets as rollouts: the inverse of `jrl.rollout.stitch`, which makes episodes of rollouts."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from jrl.data.store import EpisodeStore
from jrl.types import PyTree, Rollout

CHUNK = 65_536  # rows of a rollout


def fold_rollouts(
    fn: Callable[[PyTree, Rollout], PyTree], state: PyTree, store: EpisodeStore, *,
    extras: Mapping[str, PyTree] = {}, rows: int | None = None,
) -> PyTree:  # fmt: skip
    """Returns `state` after fn(state, rollout) for the rollouts [T, 1] of a data set, one after the other.

    It fills a ring of one column (`Buffer.add`), and computes running statistics (`Algo.ingest`).

    Args:
      fn: pure function; compiled here, with its state donated.
      state: state before the first rollout.
      store: episodes end to end; their final observations become masked rows.
      extras: columns of the rows [R, *], by name.
      rows: rows of all rollouts; rows beyond the store's are masked. None: the store's rows.
    """
    step, rows = jax.jit(fn, donate_argnums=0), rows or store.num_rows
    ends = np.zeros((2, store.num_rows), bool)
    ends[0, store.offsets[1:] - 2] = store.terminated
    # at time limits and where episodes were cut the data have the next observation
    ends[1, store.offsets[1:] - 2] = ~store.terminated
    columns = (store.obs, store.action, store.reward, *ends, store.is_step(), dict(extras))
    for first in range(0, rows, CHUNK):
        last = min(first + CHUNK, rows)

        def cut(x: np.ndarray, first: int = first, last: int = last) -> np.ndarray:
            found = x[first:last]
            if lacking := (last - first) - len(found):
                found = np.concatenate([found, np.zeros((lacking, *x.shape[1:]), x.dtype)])
            return found[:, None]

        obs, action, reward, terminated, truncated, mask, recorded = jax.tree.map(cut, columns)
        after = jax.tree.map(lambda x, last=last: x[min(last, len(x) - 1)][None], store.obs)
        flags = (reward, terminated, truncated, mask, np.array([first > 0]))
        state = step(state, Rollout(obs, after, action, *flags, recorded, ()))
    return state
