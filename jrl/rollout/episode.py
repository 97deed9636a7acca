"""One episode as callbacks see it, on the host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import PyTree


class Block(NamedTuple):
    """A rollout on the host, numpy; `obs` and `action` None where nobody wants them."""

    obs: PyTree  # [T, B, *]
    last_obs: PyTree  # [B, *]
    action: PyTree  # [T, B, *]
    reward: np.ndarray  # [T, B] as the environment gave it
    infos: Sequence[Sequence[Any]] | None  # [T][B]


class Told:
    """Facts that callbacks are told of an episode, up to a step.

    Attributes:
      episode_id: its number, from 0; training and evaluation count on their own.
      env_index: its environment.
      worker_index: 0, or 1 + the index of the environment runner.
      in_evaluation: whether it is one of an evaluation.
      length, total_reward: steps so far and the sum of their rewards, as reported: before any reward transform.
      terminated, truncated: how it ended; both False while it goes on.
      user_data: the user's own, for the time of the episode.
      custom_metrics: name -> number (or numbers), reported when the episode has ended.
      hist_data: name -> list of numbers, reported as they are.
    """

    def __init__(self, episode_id: int, env_index: int, worker_index: int, in_evaluation: bool):
        self.episode_id, self.env_index = episode_id, env_index
        self.worker_index, self.in_evaluation = worker_index, in_evaluation
        self.length, self.total_reward = 0, 0.0
        self.terminated = self.truncated = False
        self.user_data: dict[Any, Any] = {}
        self.custom_metrics: dict[str, Any] = {}
        self.hist_data: dict[str, Any] = {}

    @property
    def is_done(self) -> bool:
        return self.terminated or self.truncated

    def get_return(self) -> float:
        return self.total_reward

    def __len__(self) -> int:
        return self.length


class Episode(Told):
    """One episode of one agent. Arrays may be views of the rollout: do not write to them.

    Attributes:
      agent_id, policy_id: of several agents that clients play, whose episodes are told of one by one; None elsewhere.
    """

    agent_id: str | None = None
    policy_id: str | None = None

    def __init__(self, episode_id: int, env_index: int, worker_index: int, in_evaluation: bool, history: int | None):
        super().__init__(episode_id, env_index, worker_index, in_evaluation)
        self._history = history
        # rows [start, stop) of column `column` of the block; the rows of blocks before as lists of arrays
        self._block: Block | None = None
        self._column = self._start = self._stop = 0
        self._past: list[tuple[PyTree, PyTree, np.ndarray, list[Any]]] = []
        self._tail: PyTree = None  # the latest observation, once the block is gone
        self._info: Any = None  # of the reset; None where the backend has none
        self._reset = False

    @property
    def obs(self) -> PyTree:
        """Returns [n + 1, *] observations, from that of the reset to the latest; n is `length`, or
        `Callbacks.history`.
        """
        parts = [obs for obs, *_ in self._past]
        if self._block is not None:
            self._kept()
            parts.append(_map(lambda x: x[self._start : self._stop, self._column], self._block.obs))
        if self._reset:
            parts.append(_map(lambda x: x[None], self.last_obs))
        return self._latest(parts, 1)

    @property
    def actions(self) -> PyTree:
        """Returns [n, *] as the policy chose them: before they are brought into the environment's bounds."""
        parts = [action for _, action, _, _ in self._past]
        if self._block is not None:
            self._kept()
            parts.append(_map(lambda x: x[self._start : self._stop, self._column], self._block.action))
        return self._latest(parts)

    @property
    def rewards(self) -> np.ndarray:
        """Returns [n] f32, as the environment gave them."""
        parts = [reward for _, _, reward, _ in self._past]
        if self._block is not None:
            parts.append(self._block.reward[self._start : self._stop, self._column])
        return self._latest(parts)

    @property
    def infos(self) -> list[dict[Any, Any]]:
        """Returns n + 1 dicts, from that of the reset to the latest; none where the backend has none."""
        if self._info is None:
            return []
        found = [info for *_, infos in self._past for info in infos]
        if self._block is not None and self._block.infos is not None:
            found += [row[self._column] for row in self._block.infos[self._start : self._stop]]
        whole = [self._info, *found] if len(found) == self.length else found
        return whole if self._history is None else whole[-self._history - 1 :]

    @property
    def last_obs(self) -> PyTree:
        """Returns [*] the latest observation; of an episode that has ended, the final one."""
        block = self._block
        if block is None:
            return self._tail
        self._kept()
        if self._stop < len(block.reward):
            return _map(lambda x: x[self._stop, self._column], block.obs)
        return _map(lambda x: x[self._column], block.last_obs)

    @property
    def last_action(self) -> PyTree:
        """Returns [*] the latest action; None before the first."""
        if self._stop > self._start and self._block is not None:
            self._kept()
            return _map(lambda x: x[self._stop - 1, self._column], self._block.action)
        return _map(lambda x: x[-1], self._past[-1][1]) if self._past else None

    @property
    def last_reward(self) -> float:
        """Returns the latest reward; 0 before the first step."""
        if self._stop > self._start and self._block is not None:
            return float(self._block.reward[self._stop - 1, self._column])
        return float(self._past[-1][2][-1]) if self._past else 0.0

    @property
    def last_info(self) -> dict[Any, Any]:
        """Returns the latest info; {} where the backend has none."""
        infos = None if self._block is None else self._block.infos
        if infos is not None and self._stop > self._start:
            return infos[self._stop - 1][self._column] or {}
        found = self._past[-1][3] if self._past else []
        return (found[-1] if found else self._info) or {}

    # the same by the names that RLlib's episodes have; there is one agent

    def last_observation_for(self, agent_id: Any = None) -> PyTree:
        return self.last_obs

    def last_action_for(self, agent_id: Any = None) -> PyTree:
        return self.last_action

    def last_reward_for(self, agent_id: Any = None) -> float:
        return self.last_reward

    def last_info_for(self, agent_id: Any = None) -> dict[Any, Any]:
        return self.last_info

    def get_observations(self, indices: Any = None) -> PyTree:
        if indices == -1:
            return self.last_obs
        return self.obs if indices is None else _map(lambda x: x[indices], self.obs)

    def get_actions(self, indices: Any = None) -> PyTree:
        if indices == -1:
            return self.last_action
        return self.actions if indices is None else _map(lambda x: x[indices], self.actions)

    def get_rewards(self, indices: Any = None) -> Any:
        return self.rewards if indices is None else self.rewards[indices]

    def get_infos(self, indices: Any = None) -> Any:
        return self.infos if indices is None else self.infos[indices]

    # ------------------------------------------------------------ for the replay

    def _kept(self) -> None:
        if self._history == 0:
            raise RuntimeError("Callbacks.history is 0: observations and actions are not kept; set it to None, or to 1")

    def _latest(self, parts: list[PyTree], more: int = 0) -> Any:
        """Returns the parts one behind the other, of which the latest that `history` allows."""
        whole = parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)
        if self._history is None:
            return whole
        keep = self._history + more
        return _map(lambda x: x[max(0, len(x) - keep) :], whole)

    def _enter(self, block: Block, column: int, row: int) -> None:
        self._block, self._column, self._start, self._stop = block, column, row, row

    def _leave(self) -> None:
        """Copies its rows: they are few, and the block is all columns."""
        block = self._block
        assert block is not None
        if self._history != 0:
            self._tail = _map(np.copy, self.last_obs)
        start, history = self._start, self._history
        if history is not None:
            start = max(start, self._stop - max(history, 1))
        rows, column = slice(start, self._stop), self._column
        if start < self._stop:
            take = lambda tree: _map(lambda x: x[rows, column].copy(), tree)
            infos = [] if block.infos is None else [row[column] for row in block.infos[rows]]
            past = (take(block.obs), take(block.action), block.reward[rows, column].copy(), infos)
            self._past.append(past)
            while history is not None and sum(len(reward) for *_, reward, _ in self._past[1:]) >= max(history, 1):
                del self._past[0]
        self._block, self._start, self._stop = None, 0, 0


def _map(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Does what `jax.tree.map` does, at a tenth of its time where there is one array."""
    return fn(tree) if isinstance(tree, np.ndarray) else jax.tree.map(fn, tree)
