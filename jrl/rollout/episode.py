"""Episodes on the host: of one agent, and of a game of several."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import PyTree


class Block(NamedTuple):
    """A rollout on the host, numpy, of the columns of one kind of agents; trees are None where nobody wants them."""

    obs: PyTree  # [T, B, *]
    last_obs: PyTree  # [B, *]
    action: PyTree  # [T, B, *]
    reward: np.ndarray  # [T, B] as the environment gave it
    extras: Mapping[str, PyTree]  # what acting recorded and is kept, [T, B, *] each
    infos: Sequence[Sequence[Any]] | None  # [T][B]


class Facts:
    """Facts about an episode, up to a step.

    Attributes:
      episode_id: its number, from 0; training and evaluation count on their own.
      env_index: its environment.
      worker_index: 0, or 1 + the index of the environment runner.
      in_evaluation: whether it is one of an evaluation.
      begin: steps that it had before the first that was seen; above 0 the beginning was not seen.
      length, total_reward: steps so far and the sum of their rewards, as reported: before any reward transform.
      terminated, truncated: how it ended; both False while it goes on, and for ever where it was cut.
      user_data: the user's own, for the time of the episode.
      custom_metrics: name -> number (or numbers), reported when the episode has ended.
      hist_data: name -> list of numbers, reported as they are.
    """

    def __init__(self, env_index: int, worker_index: int = 0, in_evaluation: bool = False, begin: int = 0):
        self.episode_id, self.env_index = 0, env_index
        self.worker_index, self.in_evaluation, self.begin = worker_index, in_evaluation, begin
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


class Episode(Facts):
    """One episode of one agent. Arrays may be views of the rollout: do not write to them.

    Attributes:
      agent_id, policy_id: of several agents, the names of its own; None elsewhere.
      kind: the number of its agent's kind, see `EnvSpec.kinds`.
      iteration: in which it began.
    """

    agent_id: str | None = None
    policy_id: str | None = None
    kind = iteration = 0

    def __init__(self, *facts: Any, history: int | None = None, info: Any = None):
        super().__init__(*facts)
        self._history = history
        # rows [start, stop) of column `column` of the block; the rows of blocks before as lists of arrays
        self._block: Block | None = None
        self._column = self._start = self._stop = 0
        self._past: list[_Rows] = []
        self._tail: PyTree = None  # the latest observation, once the block is gone
        self._info = info  # of the reset; None where the backend has none
        self._is_shown = False  # it has its first observation

    @property
    def obs(self) -> PyTree:
        """Returns [n + 1, *] observations, from that of the reset to the latest; n is `length`, or
        `Callbacks.history`.
        """
        self._check_history()
        last = [_map(lambda x: x[None], self.last_obs)] if self._is_shown else []
        return self._latest([*(rows.obs for rows in self._rows()), *last], 1)

    @property
    def actions(self) -> PyTree:
        """Returns [n, *] as the policy chose them: before they are brought into the environment's bounds."""
        self._check_history()
        return self._latest([rows.action for rows in self._rows()])

    @property
    def rewards(self) -> np.ndarray:
        """Returns [n] f32, as the environment gave them."""
        return self._latest([rows.reward for rows in self._rows()])

    @property
    def extras(self) -> dict[str, PyTree]:
        """Returns what acting recorded beside the actions and is kept: name -> [n, *]."""
        return self._latest([rows.extras for rows in self._rows()])

    @property
    def infos(self) -> list[dict[Any, Any]]:
        """Returns n + 1 dicts, from that of the reset to the latest; none where the backend has none."""
        if self._info is None:
            return []
        found = [info for rows in self._rows() for info in rows.infos]
        whole = [self._info, *found] if len(found) == self.length else found
        return whole if self._history is None else whole[-self._history - 1 :]

    @property
    def last_obs(self) -> PyTree:
        """Returns [*] the latest observation; of an episode that has ended, the final one."""
        block = self._block
        if block is None:
            return self._tail
        self._check_history()
        if self._stop < len(block.reward):
            return _map(lambda x: x[self._stop, self._column], block.obs)
        return _map(lambda x: x[self._column], block.last_obs)

    @property
    def last_action(self) -> PyTree:
        """Returns [*] the latest action; None before the first."""
        if self._stop > self._start and self._block is not None:
            self._check_history()
            return _map(lambda x: x[self._stop - 1, self._column], self._block.action)
        return _map(lambda x: x[-1], self._past[-1].action) if self._past else None

    @property
    def last_reward(self) -> float:
        """Returns the latest reward; 0 before the first step."""
        if self._stop > self._start and self._block is not None:
            return float(self._block.reward[self._stop - 1, self._column])
        return float(self._past[-1].reward[-1]) if self._past else 0.0

    @property
    def last_info(self) -> dict[Any, Any]:
        """Returns the latest info; {} where the backend has none."""
        infos = None if self._block is None else self._block.infos
        if infos is not None and self._stop > self._start:
            return infos[self._stop - 1][self._column] or {}
        found = self._past[-1].infos if self._past else []
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

    # ------------------------------------------------------------ for Stitch

    def enter(self, block: Block, column: int, row: int) -> None:
        """Goes on with row `row` of a column of a block, none of whose rows is shown so far."""
        self._block, self._column, self._start, self._stop = block, column, row, row

    def advance(self, stop: int) -> float:
        """Shows the rows before `stop`, and the observation there. Returns the sum of their rewards."""
        assert self._block is not None
        if stop == self._stop + 1:  # which takes a third of the time of a sum
            reward = float(self._block.reward.item(self._stop, self._column))
        else:
            reward = float(self._block.reward[self._stop : stop, self._column].sum(dtype=np.float64))
        self.length += stop - self._stop
        self.total_reward += reward
        self._stop, self._is_shown = stop, True
        return reward

    def leave(self) -> None:
        """Copies the rows that are kept: they are few, and the block is all columns."""
        if self._block is None:  # of an agent that has ended before its game does
            return
        if self._history != 0:
            self._tail = _map(np.copy, self.last_obs)
        history = self._history if self._history is None else max(self._history, 1)
        first = self._start if history is None else max(self._start, self._stop - history)
        if first < self._stop:
            self._past.append(_of_column(self._block, self._column, slice(first, self._stop), np.copy))
            while history is not None and sum(len(rows.reward) for rows in self._past[1:]) >= history:
                del self._past[0]
        self._block, self._start, self._stop = None, 0, 0

    def _check_history(self) -> None:
        if self._history == 0:
            raise RuntimeError("Callbacks.history is 0: observations and actions are not kept; set it to None, or to 1")

    def _rows(self) -> list["_Rows"]:
        if self._block is None:
            return self._past
        return [*self._past, _of_column(self._block, self._column, slice(self._start, self._stop), lambda x: x)]

    def _latest(self, parts: list[PyTree], more: int = 0) -> Any:
        """Returns the parts one behind the other, of which the latest that `history` allows."""
        whole = parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)
        if self._history is None:
            return whole
        keep = self._history + more
        return _map(lambda x: x[max(0, len(x) - keep) :], whole)


class _Rows(NamedTuple):
    """Consecutive rows of one column: leaves [n, *]."""

    obs: PyTree
    action: PyTree
    reward: np.ndarray
    extras: Mapping[str, PyTree]
    infos: Sequence[Any]


def _of_column(block: Block, column: int, rows: slice, fn: Callable[[np.ndarray], np.ndarray]) -> _Rows:
    take = lambda tree: _map(lambda x: fn(x[rows, column]), tree)
    infos = [] if block.infos is None else [row[column] for row in block.infos[rows]]
    return _Rows(take(block.obs), take(block.action), take(block.reward), take(block.extras), infos)


def _map(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Does what `jax.tree.map` does, at a tenth of its time where there is one array."""
    return fn(tree) if isinstance(tree, np.ndarray) else jax.tree.map(fn, tree)


_OF_AGENTS = ("obs", "actions", "rewards", "infos", "last_obs", "last_action", "last_reward", "last_info")


class GameEpisode(Facts):
    """One game of several agents, by the names that RLlib's episodes have.

    Attributes:
      agent_ids: agents that have been there so far, in the order of the environment's agents.
      agent_episodes: agent -> its `Episode`; of an agent that came back, the latest.
      agent_rewards: (agent, policy) -> what it has earned in this game, however often it came.
    """

    def __init__(self, *facts: Any, policies: Mapping[str, str]):
        super().__init__(*facts)
        self.agent_episodes: dict[str, Episode] = {}
        self._policies = policies
        self._before = dict.fromkeys(policies, 0.0)  # earned in lives that are over

    @property
    def agent_ids(self) -> tuple[str, ...]:
        return tuple(agent for agent in self._policies if agent in self.agent_episodes)

    def get_agents(self) -> list[str]:
        return list(self.agent_ids)

    @property
    def agent_rewards(self) -> dict[tuple[str, str], float]:
        earned = lambda agent: self._before[agent] + self.agent_episodes[agent].total_reward
        return {(agent, self._policies[agent]): earned(agent) for agent in self.agent_ids}

    def policy_for(self, agent_id: str) -> str:
        """Returns the name of the policy that an agent follows. Raises KeyError: there is no such agent."""
        return self._policies[agent_id]

    module_for = policy_for

    def last_observation_for(self, agent_id: str) -> PyTree:
        return self._of(agent_id).last_obs

    def last_action_for(self, agent_id: str) -> PyTree:
        return self._of(agent_id).last_action

    def last_reward_for(self, agent_id: str) -> float:
        return self._of(agent_id).last_reward

    def last_info_for(self, agent_id: str) -> dict[Any, Any]:
        return self._of(agent_id).last_info

    def get_observations(self, indices: Any = None) -> dict[str, PyTree]:
        return {agent: self._of(agent).get_observations(indices) for agent in self.agent_ids}

    def get_actions(self, indices: Any = None) -> dict[str, PyTree]:
        return {agent: self._of(agent).get_actions(indices) for agent in self.agent_ids}

    def get_rewards(self, indices: Any = None) -> dict[str, Any]:
        return {agent: self._of(agent).get_rewards(indices) for agent in self.agent_ids}

    def get_infos(self, indices: Any = None) -> dict[str, Any]:
        return {agent: self._of(agent).get_infos(indices) for agent in self.agent_ids}

    def _of(self, agent_id: str) -> Episode:
        if agent_id not in self.agent_episodes:
            there = ", ".join(self.agent_ids) or "nobody"
            raise KeyError(f"agent {agent_id!r} has not been in this episode so far: expected one of {there}")
        return self.agent_episodes[agent_id]

    def __getattr__(self, name: str) -> Any:
        if name in _OF_AGENTS:
            raise AttributeError(
                f"an episode of several agents has no {name} of its own: use episode.agent_episodes[agent].{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ------------------------------------------------------------ for Stitch

    def join(self, agent: str, episode: Episode) -> None:
        """Adds the episode of an agent that comes, or comes back."""
        if agent in self.agent_episodes:
            self._before[agent] += self.agent_episodes[agent].total_reward
        self.agent_episodes[agent] = episode
        episode.episode_id = self.episode_id
