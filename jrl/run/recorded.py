"""Episodes of a data set, made of rollouts: each has the observation after its last step.

columns = Columns(take, num_envs=8)  # take(kind, episode) gets each episode that has ended or was cut
columns(rollout); columns(next_rollout)
columns.reset()                      # cuts those under way
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.config.multi_agent import LEAGUE
from jrl.data.store import Episode
from jrl.errors import InputError
from jrl.rollout.complete import Agents
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import COUNTS_STEP, NORMALIZED_OBS, POLICY_ID, PyTree, Rollout

# of what acting records: what is for learning alone, and memories
_UNKEPT = (NORMALIZED_OBS, RAW_STEPS, COUNTS_STEP, POLICY_ID, LEAGUE, "carry", "running_return")


class Who(NamedTuple):
    """Agents of the batch axis of rollouts, of environments with several agents."""

    names: tuple[str, ...]  # of the A agents
    policies: tuple[str, ...]  # [N], the policy of each column of a block, after which they repeat
    agents: Agents


def recorded_names(extras: Mapping[str, PyTree], who: Who | None) -> list[str]:
    """Returns the names of what acting recorded beside the action; of several policies what all of them recorded."""
    groups = [extras[label] for label in who.agents.extras] if who and who.agents.extras else [extras]
    return [name for name in groups[0] if name not in _UNKEPT and all(name in group for group in groups)]


def _kept(extras: Mapping[str, PyTree], who: Who | None, wanted: Sequence[str] | None) -> dict[str, PyTree]:
    """Returns what acting recorded: name -> [T, B, ...], of `wanted`, None: of all."""
    names = recorded_names(extras, who)
    names = names if wanted is None else [name for name in wanted if name in names]
    if who is None or not who.agents.extras:
        return {name: extras[name] for name in names}
    found = {name: _together(extras, name, who) for name in names}
    return {name: tree for name, tree in found.items() if tree is not None}


def _together(extras: Mapping[str, PyTree], name: str, who: Who) -> PyTree:
    """Joins what the policies recorded to one array [T, B, ...]; None where shapes or dtypes differ."""
    parts = [(own, jax.tree.leaves(extras[label][name])) for label, own in who.agents.extras.items()]
    if len({tuple((x.shape[2:], x.dtype) for x in leaves) for _, leaves in parts}) > 1 or len(parts[0][1]) != 1:
        return None
    first = np.asarray(parts[0][1][0])
    blocks, width = first.shape[1] // len(parts[0][0]), sum(len(own) for own, _ in parts)
    whole = np.zeros((len(first), blocks, width, *first.shape[2:]), first.dtype)
    for own, (x,) in parts:
        whole[:, :, list(own)] = np.asarray(x).reshape(len(first), blocks, len(own), *first.shape[2:])
    return whole.reshape(len(first), -1, *first.shape[2:])


@dataclasses.dataclass
class _Open:
    begin: int  # steps that it had before the first row
    iteration: int
    pieces: list[tuple[PyTree, PyTree, np.ndarray, dict[str, PyTree]]]  # obs, action, reward, columns: [n, *]
    tail: PyTree = None  # the observation after the last row

    def episode(self, labels: Mapping[str, Any], *, terminated: bool = False, truncated: bool = False) -> Episode:
        """Makes an episode of the rows so far; one of neither end was cut."""
        joined = lambda *x: x[0] if len(x) == 1 else np.concatenate(x)
        obs, action, reward, columns = jax.tree.map(joined, *self.pieces)
        whole = jax.tree.map(lambda x, last: np.concatenate([x, last[None]]), obs, self.tail)
        labels = {**labels, "begin": self.begin, "iteration": self.iteration}
        return Episode(whole, action, reward, terminated, truncated, columns, labels)


class Columns:
    """Episodes of B environments or agents' slots ("columns"), made of one rollout after the other.

    An episode goes on in the next rollout. It is cut, with neither end, where the columns do not go on, its environment
    broke, or its agent is gone. Labels of each are `env`, the number of its environment, `iteration`, in which it
    began, and `begin`, the steps that it had before its first row, which is above 0 of what goes on where rows are
    missing; of several agents `agent` and `policy`, too.

    Args:
      take: gets (kind of agents, episode) of each; arrays may be views of a rollout's, which nobody changes.
      num_envs: B.
      who: whose they are; None: of environments with one agent.
      wanted: names of what acting recorded that are columns; None: all.
      first: the number of the first column.
      labels: further ones.
      iteration: () -> that under way.
    """

    def __init__(
        self,
        take: Callable[[int, Episode], None],
        num_envs: int,
        *,
        who: Who | None = None,
        wanted: Sequence[str] | None = None,
        first: int = 0,
        labels: Mapping[str, Any] | None = None,
        iteration: Callable[[], int] = lambda: 0,
    ):
        self._take, self._who, self._wanted = take, who, wanted
        self._first, self._labels, self._iteration = first, dict(labels or {}), iteration
        kinds = who.agents.kinds if who else ()
        self._own = spaces.split_by_kind(kinds, np.arange(num_envs))
        self._by_kind = bool(kinds)
        self._open: dict[int, _Open] = {}

    def __call__(
        self, rollout: Rollout, infos: Any = None, *, reset_infos: Any = None, goes_on: bool | None = None
    ) -> None:
        """Takes a rollout [T, B] with a record in its extras; arguments as of `replay_episodes.Replay`."""
        if RAW_STEPS not in rollout.extras:
            raise InputError("data.output: these rollouts do not say what their environments did: leave it out")
        extras = _kept(rollout.extras, self._who, self._wanted)
        arrays = (rollout.obs, rollout.last_obs, rollout.action, extras, rollout.extras[RAW_STEPS])
        flags = (rollout.mask, rollout.contiguous, rollout.count)
        (obs, last_obs, action, columns, record), flags = jax.device_get((arrays, flags))
        mask, contiguous, count = flags
        if goes_on is not None:
            contiguous = np.full_like(contiguous, goes_on)
        rows = np.full(mask.shape[1], len(mask)) if count is None else count
        self._cut(contiguous & (mask[0] | (rows == 0)))
        per_column = (mask, *(record[name] for name in ("terminated", "truncated", "reward", "length")), columns)
        for kind, own in enumerate(self._own):
            seen = [tree[kind] if self._by_kind else tree for tree in (obs, action, last_obs)]
            block = (seen[0], seen[1], jax.tree.map(lambda x, own=own: x[:, own], per_column))
            self._add(kind, own, _by_column(block), seen[2], rows[own])

    def _cut(self, goes_on: np.ndarray) -> None:
        for column in sorted(column for column in self._open if not goes_on[column]):
            self._emit(column, self._open.pop(column))

    def _add(self, kind: int, own: np.ndarray, block: Any, last_obs: PyTree, rows: np.ndarray) -> None:
        """Takes the rows of the columns `own` [n], all of one kind: leaves [n, T, *]."""
        obs, action, (mask, terminated, truncated, reward, length, columns) = block
        done = terminated | truncated
        steps = mask.shape[1]
        before, after = np.zeros_like(mask), np.zeros_like(mask)
        before[:, 1:], after[:, :-1] = mask[:, :-1] & ~done[:, :-1], mask[:, 1:]
        at, starts = np.nonzero(mask & ~before)
        _, lasts = np.nonzero(mask & (~after | done))
        for j, start, last in zip(at.tolist(), starts.tolist(), lasts.tolist(), strict=True):
            column, stop = int(own[j]), last + 1
            part = lambda tree, j=j, rows=slice(start, stop): jax.tree.map(lambda leaf: leaf[j, rows], tree)
            episode = self._open.pop(column, None) if start == 0 else None
            episode = episode or _Open(int(length[j, start]) - 1, self._iteration(), [])
            episode.pieces.append((part(obs), part(action), reward[j, start:stop], part(columns)))
            if stop < steps:
                episode.tail = jax.tree.map(lambda x, j=j, t=stop: x[j, t], obs)
            else:
                episode.tail = jax.tree.map(lambda x, j=j: np.array(x[j]), last_obs)
            if not done[j, last] and stop >= rows[j]:
                self._open[column] = episode
            else:
                ends = {"terminated": bool(terminated[j, last]), "truncated": bool(truncated[j, last])}
                self._emit(column, episode, kind, **ends)

    def _emit(self, column: int, episode: _Open, kind: int | None = None, **ends: bool) -> None:
        kind = self._kind(column) if kind is None else kind
        self._take(kind, episode.episode(self._labels_of(column), **ends))

    def _kind(self, column: int) -> int:
        return next(kind for kind, own in enumerate(self._own) if column in own)

    def _labels_of(self, column: int) -> dict[str, Any]:
        number = self._first + column
        if self._who is None:
            return {**self._labels, "env": number}
        env, agent = divmod(number, len(self._who.names))
        policy = self._who.policies[number % len(self._who.policies)]
        named: dict[str, Any] = {"agent": self._who.names[agent], "policy": policy}
        return {**named, **self._labels, "env": env}

    def under_way(self) -> list[tuple[int, Episode]]:
        """Returns the episodes under way as if cut now, each with its kind; they go on."""
        return [(self._kind(c), self._open[c].episode(self._labels_of(c))) for c in sorted(self._open)]

    def reset(self) -> None:
        """Cuts the episodes under way: the environments begin anew."""
        self._cut(np.zeros(sum(map(len, self._own)), bool))


def _by_column(tree: PyTree) -> PyTree:
    """Returns leaves [T, n, *] as [n, T, *], copies: jax arrays may be donated to the program that learns."""
    return jax.tree.map(lambda x: np.array(np.swapaxes(x, 0, 1), order="C"), tree)
