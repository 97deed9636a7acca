"""Whole episodes in numpy arrays. Readers of all file formats return an EpisodeStore, writers take one.

An episode of T steps takes T + 1 rows; the last row holds only the final observation. A replay ring
(`jrl.replay.storage`) has the same rows: the next observation of a step is in the next row, even if the episode
terminated there, reached a time limit or was cut.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.data.episode import Episode
from jrl.errors import InputError, counted, format_names
from jrl.spaces_json import space_from_json
from jrl.types import Box, Discrete, Leaf, MultiDiscrete, PyTree, Space

NO_REWARDS = {"rewards": "none"}  # in meta: the file has no rewards, and the rewards of the store are 0
_MAX_CHOICE = 2**31 - 2  # choices are int32 in jax
LOG_PROB = "log_prob"  # column with the behaviour policy's log-probability of each action, [R] f32


@dataclasses.dataclass(frozen=True)
class EpisodeStore:
    """E episodes in R rows; see the module. The arrays have the dtypes of their file.

    `meta` can be written as JSON. Its known keys:

        env         id of the environment
        source      program that wrote the data
        rewards     "none" if the file has no rewards; the store's rewards are 0
        actions     "normalized" if the Boxes of `action_space` are the policy's [-1, 1], mapped to the bounds of
                    `env_action`; otherwise actions are the environment's own
        env_action  the environment's action space, as JSON
    """

    observation: Space
    action_space: Space
    obs: PyTree  # [R, *]
    action: PyTree  # [R, *]; actions, rewards and columns are 0 in an episode's last row
    reward: np.ndarray  # [R]
    offsets: np.ndarray  # [E + 1] i64: episode e has the rows offsets[e] .. offsets[e + 1] - 1
    terminated: np.ndarray  # [E] bool
    truncated: np.ndarray  # [E] bool
    columns: dict[str, PyTree] = dataclasses.field(default_factory=dict)  # [R, *] each, by name
    labels: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # [E] each, numbers or texts
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # parts that the reader left out or did not know, each with the effect

    @property
    def has_rewards(self) -> bool:
        """Whether the file has rewards; otherwise the store's rewards are 0."""
        return self.meta.get("rewards") != NO_REWARDS["rewards"]

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        """Number of rows, R, with final observations."""
        return int(self.offsets[-1])

    @property
    def num_steps(self) -> int:
        """Number of transitions."""
        return self.num_rows - self.num_episodes

    def observations(self) -> list[tuple[str, Leaf, np.ndarray]]:
        """Returns path, space and array [R, *] of each leaf of the observations."""
        return _leaves(self.observation, self.obs)

    def actions(self) -> list[tuple[str, Leaf, np.ndarray]]:
        """Returns path, space and array [R, *] of each leaf of the actions."""
        return _leaves(self.action_space, self.action)

    def lengths(self) -> np.ndarray:
        """Returns the number of steps of each episode, [E] i64."""
        return np.diff(self.offsets) - 1

    def is_step(self) -> np.ndarray:
        """Returns which rows are steps, not final observations, [R] bool."""
        is_step = np.ones(self.num_rows, bool)
        is_step[self.offsets[1:] - 1] = False
        return is_step

    def returns(self) -> np.ndarray:
        """Returns the sum of each episode's rewards, [E] f64."""
        return np.add.reduceat(self.reward, self.offsets[:-1], dtype=np.float64) if self.num_episodes else np.zeros(0)

    def episode(self, e: int) -> Episode:
        """Returns episode number `e`; its arrays are views."""
        first, last = int(self.offsets[e]), int(self.offsets[e + 1])
        steps = lambda tree: jax.tree.map(lambda x: x[first : last - 1], tree)
        return Episode(
            obs=jax.tree.map(lambda x: x[first:last], self.obs),
            action=steps(self.action),
            reward=self.reward[first : last - 1],
            terminated=bool(self.terminated[e]),
            truncated=bool(self.truncated[e]),
            columns={name: steps(column) for name, column in self.columns.items()},
            labels={name: label[e] for name, label in self.labels.items()},
        )

    def episodes(self) -> Iterator[Episode]:
        """Yields all episodes."""
        return map(self.episode, range(self.num_episodes))

    def take(self, index: np.ndarray) -> "EpisodeStore":
        """Returns the store of the episodes `index` [n], in that order."""
        index = np.asarray(index)
        lengths = self.lengths()[index] + 1
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths)
        return dataclasses.replace(
            self.map_rows(lambda x: x[rows]),
            offsets=offsets,
            terminated=self.terminated[index],
            truncated=self.truncated[index],
            labels={name: label[index] for name, label in self.labels.items()},
        )

    def where(self, labels: Mapping[str, str | int]) -> "EpisodeStore":
        """Returns the store of the episodes whose labels have these values, such as `{"policy": "main"}`.

        Raises:
          InputError: no episode has such a label; lists the labels and values of the store.
        """
        chosen = np.ones(self.num_episodes, bool)
        for name, value in labels.items():
            if name not in self.labels:
                raise InputError(f"{self.name} has no label {name}: it has {format_names([*self.labels]) or 'none'}")
            have = self.labels[name].astype(str)
            chosen &= have == str(value)
            if not chosen.any():
                raise InputError(
                    f"{self.name} has no episode with {name}={value}: it has {format_names(np.unique(have).tolist())}"
                )
        return self if chosen.all() else self.take(np.flatnonzero(chosen))

    def map_rows(self, fn: Callable[[np.ndarray], np.ndarray]) -> "EpisodeStore":
        """Returns the store with `fn` applied to every array [R, *]."""
        apply = lambda tree: jax.tree.map(fn, tree)
        return dataclasses.replace(
            self,
            obs=apply(self.obs),
            action=apply(self.action),
            reward=fn(self.reward),
            columns={name: apply(column) for name, column in self.columns.items()},
        )

    def split(self, share: float, seed: int = 0) -> tuple["EpisodeStore", "EpisodeStore"]:
        """Returns two stores of whole episodes: the rest, and a random part with about `share` of the steps.

        Each store has at least one episode.

        Raises:
          InputError: the store has a single episode.
        """
        if self.num_episodes < 2:
            raise InputError(f"{self.name}: {counted(self.num_episodes, 'episode')} cannot be split into two sets")
        order = np.random.default_rng(seed).permutation(self.num_episodes)
        steps = np.cumsum(self.lengths()[order])
        count = int(np.searchsorted(steps, share * self.num_steps)) + 1
        count = min(max(1, count), self.num_episodes - 1)
        return self.take(np.sort(order[count:])), self.take(np.sort(order[:count]))

    @property
    def name(self) -> str:
        """Path of the data set, for messages."""
        return str(self.meta.get("path", "the data set"))

    def num_bytes(self) -> int:
        """Returns the bytes of all rows."""
        return sum(x.nbytes for x in jax.tree.leaves((self.obs, self.action, self.reward, self.columns)))

    def checksum(self) -> str:
        """Returns a checksum of rows and ends, sixteen hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        rows, ends = (self.obs, self.action, self.reward, self.columns), (self.offsets, self.terminated, self.truncated)
        for x in (*jax.tree.leaves(rows), *ends):
            digest.update(np.ascontiguousarray(x).view(np.uint8).data)
        return digest.hexdigest()


def _leaves(space: Space, tree: PyTree) -> list[tuple[str, Leaf, np.ndarray]]:
    return [(*leaf, x) for leaf, x in zip(spaces.leaves(space), jax.tree.leaves(tree), strict=True)]


def of_episodes(
    observation: Space, action: Space, episodes: Sequence[Episode], *, meta: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> EpisodeStore:  # fmt: skip
    """Returns a store of episodes.

    Args:
      observation, action: spaces of the episodes.
      episodes: at least one episode; all have the same columns and labels.
      meta, notes: fields of the store.
    Raises:
      InputError: there is no episode, or an episode does not fit the spaces or the first episode.
    """
    name = str((meta or {}).get("path", "the data set"))
    if not episodes:
        raise InputError(f"{name}: expected at least one episode, got none")
    errors = []
    for number, episode in enumerate(episodes):
        if found := find_episode_fault(episode, observation, action, episodes[0]):
            errors.append(f"{name}: episode {number}: {found}")
    if errors:
        raise InputError(*errors[:10], *([f"and {len(errors) - 10} more episodes"] if len(errors) > 10 else []))
    pad = lambda tree: jax.tree.map(lambda x: np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)]), tree)
    return EpisodeStore(
        observation=observation,
        action_space=action,
        obs=_join([e.obs for e in episodes]),
        action=_join([pad(e.action) for e in episodes]),
        reward=_join([pad(np.asarray(e.reward)) for e in episodes]),
        offsets=np.concatenate([[0], np.cumsum([len(e.reward) + 1 for e in episodes])]).astype(np.int64),
        terminated=np.array([e.terminated for e in episodes], bool),
        truncated=np.array([e.truncated for e in episodes], bool),
        columns={k: _join([pad(e.columns[k]) for e in episodes]) for k in episodes[0].columns},
        labels={k: np.array([e.labels[k] for e in episodes]) for k in episodes[0].labels},
        meta=dict(meta or {}),
        notes=tuple(notes),
    )


def _join(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: np.concatenate(x), *trees)


def concatenated(stores: Sequence[EpisodeStore]) -> EpisodeStore:
    """Returns the episodes of all stores, in their order. Columns and labels that a store lacks are left out.

    Raises:
      InputError: spaces, kinds of actions or rewards differ; or `check_store` finds a fault.
    """
    stores = list(map(check_store, stores))
    first = stores[0]
    for other in stores[1:]:
        for what, a, b in (
            ("observations", first.observation, other.observation),
            ("actions", first.action_space, other.action_space),
            ("kinds of actions", first.meta.get("actions"), other.meta.get("actions")),
            ("rewards", first.meta.get("rewards"), other.meta.get("rewards")),
        ):
            if a != b:
                raise InputError(f"{first.name} and {other.name} have different {what}: {a} and {b}")
    if len(stores) == 1:
        return first
    notes = [note for store in stores for note in store.notes]
    kinds = lambda store, name: [(x.shape[1:], x.dtype.kind) for x in jax.tree.leaves(store.columns[name])]
    columns = []
    for name in dict.fromkeys(k for s in stores for k in s.columns):
        if any(name not in s.columns for s in stores):
            notes.append(f"the column {name} was left out: some files lack it")
        elif any(kinds(s, name) != kinds(first, name) for s in stores):
            notes.append(f"the column {name} was left out: its shape differs between files")
        else:
            columns.append(name)
    labels = [k for k in first.labels if all(k in s.labels for s in stores)]
    starts = np.cumsum([0, *(s.num_rows for s in stores)])
    return EpisodeStore(
        observation=first.observation,
        action_space=first.action_space,
        obs=_join([s.obs for s in stores]),
        action=_join([s.action for s in stores]),
        reward=np.concatenate([s.reward for s in stores]),
        offsets=np.concatenate([[0], *(s.offsets[1:] + start for s, start in zip(stores, starts, strict=False))]),
        terminated=np.concatenate([s.terminated for s in stores]),
        truncated=np.concatenate([s.truncated for s in stores]),
        columns={k: _join([s.columns[k] for s in stores]) for k in columns},
        labels={k: np.concatenate([s.labels[k] for s in stores]) for k in labels},
        meta={k: v for k, v in first.meta.items() if all(s.meta.get(k) == v for s in stores)},
        notes=tuple(dict.fromkeys(notes)),
    )


def check_store(store: EpisodeStore) -> EpisodeStore:
    """Returns a store whose arrays fit its spaces and each other, in numpy's own byte order and with bool flags.

    Readers check only their format; this function checks their result. Later code relies on the fields of EpisodeStore.

    Raises:
      InputError: arrays that are not numbers or have a wrong shape, or offsets that are not episodes.
    """
    offsets = store.offsets
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or len(offsets) < 2:
        raise _build_damage_error(store, [f"offsets: expected [E + 1] integers, got {_describe_array(offsets)}"])
    offsets = offsets.astype(np.int64)  # uint64 beyond int64 becomes negative, and is refused
    if offsets[0] != 0 or (offsets[1:] - 2 < offsets[:-1]).any():
        raise _build_damage_error(store, ["offsets: expected to begin at 0 and to rise by 2 or more with each episode"])
    rows, episodes = int(offsets[-1]), len(offsets) - 1
    faults = find_element_faults("obs", store.obs, store.observation, rows)
    faults += find_element_faults("action", store.action, store.action_space, rows)
    faults.append(find_array_fault("reward", store.reward, rows, ()))
    for name, tree in store.columns.items():
        shape = () if name == LOG_PROB else None  # other columns have any shape
        faults += [find_array_fault(f"column {name}", x, rows, shape) for x in jax.tree.leaves(tree)]
    ends = {"terminated": store.terminated, "truncated": store.truncated}
    faults += [find_array_fault(name, x, episodes, (), "biu") for name, x in ends.items()]
    faults += [find_array_fault(f"label {name}", x, episodes, (), "biufUS") for name, x in store.labels.items()]
    if "env_action" in store.meta:
        try:
            space_from_json(store.meta["env_action"])
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            faults.append(f"meta env_action: expected a space as JSON ({e})")
    if faults := list(filter(None, faults)):
        raise _build_damage_error(store, faults)
    native = lambda x: x.astype(x.dtype.newbyteorder("="), copy=False)
    store = store.map_rows(native)
    return dataclasses.replace(
        store,
        offsets=offsets,
        labels={name: native(x) for name, x in store.labels.items()},
        **{name: x != 0 for name, x in ends.items()},
    )


def find_element_faults(name: str, tree: PyTree, space: Space, rows: int) -> list[str]:
    """Returns the fault of each array [rows, *] of a tree of elements of a space; an empty string for none."""
    found: Any = jax.tree.structure(tree)
    if found != jax.tree.structure(spaces.map_leaves(lambda leaf: 0, space)):
        return [f"{name}: expected an array for each part of {space}"]
    return [find_array_fault(f"{name} {path}".strip(), x, rows, leaf.shape) for path, leaf, x in _leaves(space, tree)]


def find_array_fault(name: str, x: Any, rows: int, shape: tuple[int, ...] | None = None, kinds: str = "biuf") -> str:
    """Returns the fault of an array [rows, *shape] of numpy's dtype `kinds`; an empty string for none."""
    if not isinstance(x, np.ndarray):
        return f"{name}: expected an array, got {type(x).__name__}"
    what = "numbers" if "U" not in kinds else "numbers or texts"
    if x.dtype.kind not in kinds or (x.dtype.kind in "iuf" and x.dtype.itemsize > 8):
        return f"{name}: expected {what}, got {_describe_array(x)}"
    if x.ndim < 1 or len(x) != rows or (shape is not None and x.shape[1:] != shape):
        return f"{name}: expected the shape {(rows, *(shape if shape is not None else ('*',)))}, got {x.shape}"
    return ""


def _describe_array(x: Any) -> str:
    return f"the dtype {str(x.dtype)[:40]} and the shape {x.shape}"


def _build_damage_error(store: EpisodeStore, faults: Sequence[str]) -> InputError:
    more = [f"{len(faults) - 8} more arrays"] if len(faults) > 8 else []
    return InputError(f"data: {store.name} is damaged: {'; '.join([*faults[:8], *more])}: write it again")


def find_episode_fault(episode: Episode, observation: Space, action: Space, first: Episode) -> str:
    """Returns the fault of an episode, compared with the first episode of its data set; an empty string for none."""
    steps = len(episode.reward)
    if steps == 0:
        return "it has no step"
    faults = find_element_faults("observations", episode.obs, observation, steps + 1)
    if found := [*filter(None, faults + find_element_faults("actions", episode.action, action, steps))]:
        return f"{found[0]}, for {counted(steps, 'step')}"
    if episode.columns.keys() != first.columns.keys() or episode.labels.keys() != first.labels.keys():
        return f"its columns are {sorted(episode.columns)}, the first episode's are {sorted(first.columns)}"
    for name, column in episode.columns.items():
        if any(len(x) != steps for x in jax.tree.leaves(column)):
            return f"column {name}: expected one row for each of {steps} steps"
    return ""


def guess_observation(x: np.ndarray) -> Space:
    """Returns the space of observations [N, *] without a known space: a Box without bounds, of their dtype."""
    return Box(x.shape[1:], x.dtype.name)


def drop_choice_axis(x: np.ndarray) -> np.ndarray:
    """Returns integers [N, 1] as choices [N]; other arrays unchanged."""
    return x[:, 0] if x.dtype.kind in "iu" and x.ndim == 2 and x.shape[1] == 1 else x


def guess_action(x: np.ndarray) -> Space:
    """Returns the space of actions [N, *] without a known space.

    Integers [N] are Discrete, integers [N, K] MultiDiscrete, up to the largest choice. Other numbers are a Box: of
    [-1, 1] if all numbers are in it, otherwise of each element's smallest and largest number.
    """
    if x.dtype.kind in "iub":
        if not x.size or x.max() > _MAX_CHOICE:
            got = int(x.max()) if x.size else "none"
            raise InputError(f"integer actions: expected 0 to {_MAX_CHOICE}, got {got}")
        n = np.maximum(x.astype(np.int64).max(0), 0) + 1  # choices below 0 are a finding
        return Discrete(int(n), x.dtype.name) if x.ndim == 1 else MultiDiscrete(tuple(map(int, n)), x.dtype.name)
    low, high = x.min(0), x.max(0)
    if (low >= -1).all() and (high <= 1).all():
        return Box(x.shape[1:], x.dtype.name, -1.0, 1.0)
    return Box(x.shape[1:], x.dtype.name, tuple(map(float, low.reshape(-1))), tuple(map(float, high.reshape(-1))))
