"""Data sets of single actions as data sets of action chunks, for runs with `env.action_chunk`."""

import dataclasses

import jax
import numpy as np

from jrl import spaces
from jrl.data.store import EpisodeStore
from jrl.errors import InputError
from jrl.spaces_json import space_from_json, space_to_json


def chunk(store: EpisodeStore, length: int) -> EpisodeStore:
    """Returns the store whose transitions are the windows of `length` steps, from each step of an episode.

    A transition has the observation before its window, the actions [length, *], the sum of the rewards, and the
    observation after the window. No window crosses an episode's end; the last steps of an episode, fewer than `length`,
    begin none. In the store the next observation is in the next row, so the windows that begin at step i, i + length,
    i + 2 length, ... of an episode become one episode, for each i below `length`. An episode whose last window ends
    before its end is cut there. Columns are left out, because they are of single actions.

    Args:
      store: data set of the environment's steps.
      length: actions of a chunk, at least 1.
    Raises:
      InputError: no episode has `length` steps.
    """
    # one entry for each new episode: the old one, its first step, its windows
    steps = store.lengths()
    of = np.repeat(np.arange(store.num_episodes), length)
    start = np.tile(np.arange(length), store.num_episodes)
    windows = np.maximum(steps[of] - start, 0) // length
    of, start, windows = (x[windows > 0] for x in (of, start, windows))
    if not len(of):
        raise InputError(
            f"env.action_chunk: expected episodes of {length} steps or more, got at most {int(steps.max())} in "
            f"{store.name}: lower env.action_chunk"
        )
    offsets = np.concatenate([[0], np.cumsum(windows + 1)]).astype(np.int64)
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], windows + 1)  # index of each window in its episode
    rows = np.repeat(store.offsets[:-1][of] + start, windows + 1) + number * length
    is_last = number == np.repeat(windows, windows + 1)
    inside = np.where(is_last[:, None], 0, rows[:, None] + np.arange(length))  # [R, length]

    def actions(x: np.ndarray) -> np.ndarray:
        return np.where(np.expand_dims(is_last, tuple(range(1, x.ndim + 1))), np.zeros((), x.dtype), x[inside])

    ends = start + windows * length == steps[of]
    meta = dict(store.meta)
    if "env_action" in meta:
        meta["env_action"] = space_to_json(spaces.stack_space(space_from_json(meta["env_action"]), length))
    return dataclasses.replace(
        store,
        action_space=spaces.stack_space(store.action_space, length),
        obs=jax.tree.map(lambda x: x[rows], store.obs),
        action=jax.tree.map(actions, store.action),
        reward=np.where(is_last, 0.0, store.reward[inside].sum(1)).astype(np.result_type(store.reward, np.float32)),
        offsets=offsets,
        terminated=store.terminated[of] & ends,
        truncated=store.truncated[of] & ends,
        columns={},
        labels={name: label[of] for name, label in store.labels.items()},
        meta=meta,
    )
