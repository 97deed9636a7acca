"""Episodes end to end in numpy arrays: every file of experience is read to such a store and written from it.

An episode of T steps takes T + 1 rows, the last of which holds its final observation and nothing else. So the rows are
those of a replay ring (`jrl.replay.storage`): the observation after every step stands in the row behind it, whether the
episode truly ended there, reached a time limit or was cut.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.errors import InputError, counted
from jrl.spaces_json import 
<<<<<<< OURS
space_from_json
||||||| BASE
InputError, counted
=======
InputError, counted, format_names
>>>>>>> THEIRS

from jrl.types import Box, Discrete, Leaf, MultiDiscrete, PyTree, Space

NO_REWARDS = {"rewards": "none"}  # in meta: the file had none, and those of the store are 0
_MOST_CHOICES = 2**31 - 2  # the largest choice: jax counts them in int32
LOG_PROB = "log_prob"  # the column of the log-probability [R] f32 that the behaviour policy gave to each action


class Episode(NamedTuple):
    """One episode of T steps."""

    obs: PyTree  # [T + 1, *]
    action: PyTree  # [T, *]
    reward: np.ndarray  # [T]
    terminated: bool  # it came to a true end
    truncated: bool  # it reached a time limit; neither: recording was cut there
    columns: Mapping[str, PyTree] = {}  # further columns [T, *]
    labels: Mapping[str, Any] = {}  # what is known of the episode: a number or a text each


@dataclasses.dataclass(frozen=True)
class EpisodeStore:
    """Episodes, R rows in all; see the module. The arrays have the dtypes of the file that they came from.

    `meta` can be written as JSON. It may have: `env`, the id of the environment; `source`, the program that wrote the
    data; `rewards`, "none" where there were none, so that they are 0; `actions`, "normalized" where the Boxes of
    `action_space` are the policy's [-1, 1], which are mapped to the bounds of the environment, the space `env_action`
    as JSON. Else actions are the environment's own.
    """

    observation: Space
    action_space: Space
    obs: PyTree  # [R, *]
    action: PyTree  # [R, *], 0 in an episode's last row; so are reward and columns
    reward: np.ndarray  # [R]
    offsets: np.ndarray  # [E + 1] i64: episode e has the rows offsets[e] .. offsets[e + 1] - 1
    terminated: np.ndarray  # [E] bool
    truncated: np.ndarray  # [E] bool
    columns: dict[str, PyTree] = dataclasses.field(default_factory=dict)  # [R, *] each, by name
    labels: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # [E] each, numbers or texts
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader had to leave out or could not know, each with what it means

    @property
    def has_rewards(self) -> bool:
        """Returns whether the file had rewards; else they are 0, and mean nothing."""
        return self.meta.get("rewards") != NO_REWARDS["rewards"]

    @property
    def num_episodes(self) -> int:
        """Returns the number of episodes, E."""
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        """Returns the number of rows, R, final observations included."""
        return int(self.offsets[-1])

    @property
    def num_steps(self) -> int:
        """Returns the number of transitions."""
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
        """Returns whether each row is a step, not a final observation, [R] bool."""
        found = np.ones(self.num_rows, bool)
        found[self.offsets[1:] - 1] = False
        return found

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
          InputError: there is no such label, or no such episode: what there is.
        """
        chosen = np.ones(self.num_episodes, bool)
        for name, value in labels.items():
            if name not in self.labels:
                raise InputError(f"{self.name} has no label {name}: it has {format_names([*self.labels]) or 'none'}")
            have = self.labels[name].astype(str)
            chosen &= have == str(value)
            if not chosen.any():
                known = format_names(np.unique(have).tolist())
                raise InputError(f"{self.name} has no episode with {name}={value}: it has {known}")
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
        """Splits off a second store, of whole episodes with about `share` of the steps (at least one in each store).

        Raises:
          InputError: there is one episode only.
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
        """Returns where the store came from, for messages."""
        return str(self.meta.get("path", "the data set"))

    def num_bytes(self) -> int:
        """Returns the bytes of all rows."""
        return sum(x.nbytes for x in jax.tree.leaves((self.obs, self.action, self.reward, self.columns)))

    def checksum(self) -> str:
        """Returns sixteen hexadecimal digits that differ where rows or ends do."""
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
    """Makes a store of episodes, whose columns and labels all have the same names.

    Raises:
      InputError: there is none, or one of them does not fit the spaces or the others: its number and what is wrong.
    """
    name = str((meta or {}).get("path", "the data set"))
    if not episodes:
        raise InputError(f"{name}: there is no episode in it")
    errors = []
    for number, episode in enumerate(episodes):
        if found := fault(episode, observation, action, episodes[0]):
            errors.append(f"{name}: episode {number}: {found}")
    if errors:
        raise InputError(*errors[:10], *([f"and {len(errors) - 10} more episodes"] if len(errors) > 10 else []))
    final = lambda x: np.zeros((1, *x.shape[1:]), x.dtype)
    padded = lambda tree: jax.tree.map(lambda x: np.concatenate([x, final(x)]), tree)
    joined = lambda trees: jax.tree.map(lambda *x: np.concatenate(x), *trees)
    return EpisodeStore(
        observation=observation,
        action_space=action,
        obs=joined([e.obs for e in episodes]),
        action=joined([padded(e.action) for e in episodes]),
        reward=joined([padded(np.asarray(e.reward)) for e in episodes]),
        offsets=np.concatenate([[0], np.cumsum([len(e.reward) + 1 for e in episodes])]).astype(np.int64),
        terminated=np.array([e.terminated for e in episodes], bool),
        truncated=np.array([e.truncated for e in episodes], bool),
        columns={k: joined([padded(e.columns[k]) for e in episodes]) for k in episodes[0].columns},
        labels={k: np.array([e.labels[k] for e in episodes]) for k in episodes[0].labels},
        meta=dict(meta or {}),
        notes=tuple(notes),
    )


def concatenated(stores: Sequence[EpisodeStore]) -> EpisodeStore:
    """Joins the episodes of all stores, in their order. Columns and labels that one of them lacks are left out.

    Raises:
      InputError: their spaces, or what their actions are, differ; or see `checked`.
    """
    stores = list(map(checked, stores))
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
            notes.append(f"the column {name} is not in all of the files, and was left out")
        elif any(kinds(s, name) != kinds(first, name) for s in stores):
            notes.append(f"the column {name} has not the same shape in all of the files, and was left out")
        else:
            columns.append(name)
    labels = [k for k in first.labels if all(k in s.labels for s in stores)]
    joined = lambda trees: jax.tree.map(lambda *x: np.concatenate(x), *trees)
    starts = np.cumsum([0, *(s.num_rows for s in stores)])
    return EpisodeStore(
        observation=first.observation,
        action_space=first.action_space,
        obs=joined([s.obs for s in stores]),
        action=joined([s.action for s in stores]),
        reward=np.concatenate([s.reward for s in stores]),
        offsets=np.concatenate([[0], *(s.offsets[1:] + start for s, start in zip(stores, starts, strict=False))]),
        terminated=np.concatenate([s.terminated for s in stores]),
        truncated=np.concatenate([s.truncated for s in stores]),
        columns={k: joined([s.columns[k] for s in stores]) for k in columns},
        labels={k: np.concatenate([s.labels[k] for s in stores]) for k in labels},
        meta={k: v for k, v in first.meta.items() if all(s.meta.get(k) == v for s in stores)},
        notes=tuple(dict.fromkeys(notes)),
    )


def checked(store: EpisodeStore) -> EpisodeStore:
    """Returns a store whose arrays fit each other and its spaces, in the byte order and with the flags that numpy has.

    Readers check what only their format knows. This is the one check of all that they return: whatever stood in the
    files, code behind it can rely on the fields of EpisodeStore.

    Raises:
      InputError: the arrays that are no numbers, have another shape or length, or offsets that are not episodes.
    """
    offsets = store.offsets
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or len(offsets) < 2:
        raise _unfit(store, [f"offsets: expected [E + 1] integers, got {_kind(offsets)}"])
    offsets = offsets.astype(np.int64)  # of uint64 beyond int64 some are negative then, and refused
    if offsets[0] != 0 or (offsets[1:] - 2 < offsets[:-1]).any():
        raise _unfit(store, ["offsets: expected to begin at 0 and to rise by 2 or more with each episode"])
    rows, episodes = int(offsets[-1]), len(offsets) - 1
    faults = element_faults("obs", store.obs, store.observation, rows)
    faults += element_faults("action", store.action, store.action_space, rows)
    faults.append(array_fault("reward", store.reward, rows, ()))
    for name, tree in store.columns.items():
        shape = () if name == LOG_PROB else None  # one of each action; other columns are whatever was recorded
        faults += [array_fault(f"column {name}", x, rows, shape) for x in jax.tree.leaves(tree)]
    ends = {"terminated": store.terminated, "truncated": store.truncated}
    faults += [array_fault(name, x, episodes, (), "biu") for name, x in ends.items()]
    faults += [array_fault(f"label {name}", x, episodes, (), "biufUS") for name, x in store.labels.items()]
    if "env_action" in store.meta:
        try:
            space_from_json(store.meta["env_action"])
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            faults.append(f"meta env_action: expected a space as JSON ({e})")
    if faults := list(filter(None, faults)):
        raise _unfit(store, faults)
    native = lambda x: x.astype(x.dtype.newbyteorder("="), copy=False)
    store = store.map_rows(native)
    return dataclasses.replace(
        store,
        offsets=offsets,
        labels={name: native(x) for name, x in store.labels.items()},
        **{name: x != 0 for name, x in ends.items()},
    )


def element_faults(name: str, tree: PyTree, space: Space, rows: int) -> list[str]:
    """Describes what is wrong with arrays [rows, *] of the elements of a space; "" for nothing."""
    if not _is_element(tree, space):
        return [f"{name}: expected an array for each part of {space}"]
    return [array_fault(f"{name} {path}".strip(), x, rows, leaf.shape) for path, leaf, x in _leaves(space, tree)]


def array_fault(name: str, x: Any, rows: int, shape: tuple[int, ...] | None = None, kinds: str = "biuf") -> str:
    """Describes what is wrong with an array [rows, *shape] of the dtype kinds, numpy's letters; "" for nothing."""
    if not isinstance(x, np.ndarray):
        return f"{name}: expected an array, got {type(x).__name__}"
    what = "numbers" if "U" not in kinds else "numbers or texts"
    if x.dtype.kind not in kinds or (x.dtype.kind in "iuf" and x.dtype.itemsize > 8):
        return f"{name}: expected {what}, got {_kind(x)}"
    if x.ndim < 1 or len(x) != rows or (shape is not None and x.shape[1:] != shape):
        return f"{name}: expected the shape {(rows, *(shape if shape is not None else ('*',)))}, got {x.shape}"
    return ""


def _kind(x: Any) -> str:
    return f"the dtype {str(x.dtype)[:40]} and the shape {x.shape}"


def _unfit(store: EpisodeStore, faults: Sequence[str]) -> InputError:
    more = [f"{len(faults) - 8} more arrays"] if len(faults) > 8 else []
    return InputError(f"data: {store.name} is damaged: {'; '.join([*faults[:8], *more])}: write it anew")


def fault(episode: Episode, observation: Space, action: Space, first: Episode) -> str:
    """Describes what is wrong with an episode beside the first of its data set; "" for nothing."""
    steps = len(episode.reward)
    if steps == 0:
        return "it has no step"
    faults = element_faults("observations", episode.obs, observation, steps + 1)
    if found := [*filter(None, faults + element_faults("actions", episode.action, action, steps))]:
        return f"{found[0]}, for {counted(steps, 'step')}"
    if episode.columns.keys() != first.columns.keys() or episode.labels.keys() != first.labels.keys():
        return f"it has the columns {sorted(episode.columns)}, the first has {sorted(first.columns)}"
    for name, column in episode.columns.items():
        if any(len(x) != steps for x in jax.tree.leaves(column)):
            return f"its column {name} has not one row for each of {steps} steps"
    return ""


def _is_element(tree: PyTree, space: Space) -> bool:
    found: Any = jax.tree.structure(tree)
    return bool(found == jax.tree.structure(spaces.map_leaves(lambda leaf: 0, space)))


def guessed_observation(x: np.ndarray) -> Space:
    """Returns the space of observations [N, *] of which nothing is known: a Box without bounds, of their dtype."""
    return Box(x.shape[1:], x.dtype.name)


def without_axis(x: np.ndarray) -> np.ndarray:
    """Returns integers [N, 1] as [N], a choice each; other arrays as they are."""
    return x[:, 0] if x.dtype.kind in "iu" and x.ndim == 2 and x.shape[1] == 1 else x


def guessed_action(x: np.ndarray) -> Space:
    """Returns the space of actions [N, *] of which nothing is known.

    Integers [N] are a Discrete of as many choices as the largest needs, [N, K] a MultiDiscrete; numbers are a Box of
    [-1, 1] where they lie in it, else of the smallest and the largest number of each element.
    """
    if x.dtype.kind in "iub":
        if not x.size or x.max() > _MOST_CHOICES:
            found = int(x.max()) if x.size else "none"
            raise InputError(f"integer actions: expected 0 to {_MOST_CHOICES}, got {found}")
        most = np.maximum(x.astype(np.int64).max(0), 0) + 1  # what is below 0 is a finding
        return Discrete(int(most), x.dtype.name) if x.ndim == 1 else MultiDiscrete(tuple(map(int, most)), x.dtype.name)
    low, high = x.min(0), x.max(0)
    if (low >= -1).all() and (high <= 1).all():
        return Box(x.shape[1:], x.dtype.name, -1.0, 1.0)
    return Box(x.shape[1:], x.dtype.name, tuple(map(float, low.reshape(-1))), tuple(map(float, high.reshape(-1))))
