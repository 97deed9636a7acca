"""Episodes on the host, for callbacks and data sets: of one agent, or of a game of several agents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import PyTree


class Block(NamedTuple):
    """A rollout on the host, in numpy, for the columns of one kind of agents; None: data that is not needed."""

    obs: PyTree  # [T, B, *]
    last_obs: PyTree  # [B, *]
    action: PyTree  # [T, B, *]
    reward: np.ndarray  # [T, B], the environment's own
    extras: Mapping[str, PyTree]  # other outputs of `Algo.act`, [T, B, *] each
    infos: Sequence[Sequence[Any]] | None  # [T][B]


class Facts:
    """Attributes of an episode, up to its latest step.

    Attributes:
      episode_id: number of the episode, from 0; training and evaluation have separate numbers.
      env_index: index of the environment.
      worker_index: 0, or 1 + the index of the env runner.
      in_evaluation: whether the episode belongs to an evaluation.
      begin: number of steps before the first recorded step; above 0, the episode's start was not recorded.
      length, total_reward: steps so far, and the sum of their rewards before any reward transform.
      terminated, truncated: how the episode ended; both False if it is unfinished or was cut.
      user_data: user data of the episode.
      custom_metrics: name -> number (or numbers), reported when the episode ends.
      hist_data: name -> list of numbers, reported unchanged.
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
      agent_id, policy_id: names of its agent and policy; None with a single agent.
      kind: number of its agent's kind, see `EnvSpec.kinds`.
      iteration: iteration of its first step.
    """

    agent_id: str | None = None
    policy_id: str | None = None
    kind = iteration = 0

    def __init__(self, *facts: Any, history: int | None = None, info: Any = None):
        super().__init__(*facts)
        self._history = history
        # rows [start, stop) of column `column` of the present block; `_past` has the rows of earlier blocks
        self._block: Block | None = None
        self._column = self._start = self._stop = 0
        self._past: list[_Rows] = []
        self._tail: PyTree = None  # the latest observation, without a block
        self._info = info  # info of the reset; None: the backend has no infos
        self._has_obs = False

    @property
    def obs(self) -> PyTree:
        """Returns [n + 1, *] observations, from the reset to the latest; n is `length`, or `Callbacks.history`."""
        self._check_history()
        last = [_map(lambda x: x[None], self.last_obs)] if self._has_obs else []
        return self._latest([*(rows.obs for rows in self._rows()), *last], 1)

    @property
    def actions(self) -> PyTree:
        """Returns [n, *] actions as the policy chose them, before scaling and clipping."""
        self._check_history()
        return self._latest([rows.action for rows in self._rows()])

    @property
    def rewards(self) -> np.ndarray:
        """Returns [n] f32, the environment's own rewards."""
        return self._latest([rows.reward for rows in self._rows()])

    @property
    def extras(self) -> dict[str, PyTree]:
        """Returns the other outputs of `Algo.act`: name -> [n, *]."""
        return self._latest([rows.extras for rows in self._rows()])

    @property
    def infos(self) -> list[dict[Any, Any]]:
        """Returns n + 1 dicts, from the reset to the latest; [] if the backend has no infos."""
        if self._info is None:
            return []
        infos = [info for rows in self._rows() for info in rows.infos]
        infos = [self._info, *infos] if len(infos) == self.length else infos
        return infos if self._history is None else infos[-self._history - 1 :]

    @property
    def last_obs(self) -> PyTree:
        """Returns [*], the latest observation; the final observation of an episode that has ended."""
        block = self._block
        if block is None:
            return self._tail
        self._check_history()
        if self._stop < len(block.reward):
            return _map(lambda x: x[self._stop, self._column], block.obs)
        return _map(lambda x: x[self._column], block.last_obs)

    @property
    def last_action(self) -> PyTree:
        """Returns [*], the latest action; None before the first step."""
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
        """Returns the latest info; {} if the backend has no infos."""
        infos = None if self._block is None else self._block.infos
        if infos is not None and self._stop > self._start:
            return infos[self._stop - 1][self._column] or {}
        past = self._past[-1].infos if self._past else []
        return (past[-1] if past else self._info) or {}

    # names of RLlib's episodes

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
        """Continues the episode with row `row` of a column of a block."""
        self._block, self._column, self._start, self._stop = block, column, row, row

    def advance(self, stop: int) -> float:
        """Adds the rows before `stop`; returns the sum of their rewards."""
        assert self._block is not None
        if stop == self._stop + 1:  # a third of the time of a sum
            reward = float(self._block.reward.item(self._stop, self._column))
        else:
            reward = float(self._block.reward[self._stop : stop, self._column].sum(dtype=np.float64))
        self.length += stop - self._stop
        self.total_reward += reward
        self._stop, self._has_obs = stop, True
        return reward

    def leave(self) -> None:
        """Copies the rows that the episode keeps, so that the block of all columns can be freed."""
        if self._block is None:  # the agent ended before its game
            return
        if self._history != 0:
            self._tail = _map(np.copy, self.last_obs)
        history = self._history if self._history is None else max(self._history, 1)
        first = self._start if history is None else max(self._start, self._stop - history)
        if first < self._stop:
            self._past.append(_slice_column(self._block, self._column, slice(first, self._stop), np.copy))
            while history is not None and sum(len(rows.reward) for rows in self._past[1:]) >= history:
                del self._past[0]
        self._block, self._start, self._stop = None, 0, 0

    def _check_history(self) -> None:
        if self._history == 0:
            raise RuntimeError(
                "Callbacks.history: expected None or at least 1 for observations and actions, got 0: set it to 1"
            )

    def _rows(self) -> list["_Rows"]:
        if self._block is None:
            return self._past
        return [*self._past, _slice_column(self._block, self._column, slice(self._start, self._stop), lambda x: x)]

    def _latest(self, parts: list[PyTree], more: int = 0) -> Any:
        """Returns the concatenated parts, cut to the latest `history` + `more` rows."""
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


def _slice_column(block: Block, column: int, rows: slice, fn: Callable[[np.ndarray], np.ndarray]) -> _Rows:
    take = lambda tree: _map(lambda x: fn(x[rows, column]), tree)
    infos = [] if block.infos is None else [row[column] for row in block.infos[rows]]
    return _Rows(take(block.obs), take(block.action), take(block.reward), take(block.extras), infos)


def _map(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Returns the result of `jax.tree.map`, in a tenth of the time for a single array."""
    return fn(tree) if isinstance(tree, np.ndarray) else jax.tree.map(fn, tree)


_AGENT_ATTRIBUTES = ("obs", "actions", "rewards", "infos", "last_obs", "last_action", "last_reward", "last_info")


class GameEpisode(Facts):
    """A game of several agents, with the names of RLlib's episodes.

    Attributes:
      agent_ids: agents that have joined so far, in the order of the environment's agents.
      agent_episodes: agent -> its `Episode`; the latest if the agent joined several times.
      agent_rewards: (agent, policy) -> sum of rewards in this game, over all times that the agent joined.
    """

    def __init__(self, *facts: Any, policies: Mapping[str, str]):
        super().__init__(*facts)
        self.agent_episodes: dict[str, Episode] = {}
        self._policies = policies
        self._before = dict.fromkeys(policies, 0.0)  # sum of rewards of earlier times that the agent joined

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
        """Returns the name of an agent's policy. Raises KeyError: unknown agent."""
        return self._policies[agent_id]

    module_for = policy_for

    def last_observation_for(self, agent_id: str) -> PyTree:
        return self._find_episode(agent_id).last_obs

    def last_action_for(self, agent_id: str) -> PyTree:
        return self._find_episode(agent_id).last_action

    def last_reward_for(self, agent_id: str) -> float:
        return self._find_episode(agent_id).last_reward

    def last_info_for(self, agent_id: str) -> dict[Any, Any]:
        return self._find_episode(agent_id).last_info

    def get_observations(self, indices: Any = None) -> dict[str, PyTree]:
        return {agent: self._find_episode(agent).get_observations(indices) for agent in self.agent_ids}

    def get_actions(self, indices: Any = None) -> dict[str, PyTree]:
        return {agent: self._find_episode(agent).get_actions(indices) for agent in self.agent_ids}

    def get_rewards(self, indices: Any = None) -> dict[str, Any]:
        return {agent: self._find_episode(agent).get_rewards(indices) for agent in self.agent_ids}

    def get_infos(self, indices: Any = None) -> dict[str, Any]:
        return {agent: self._find_episode(agent).get_infos(indices) for agent in self.agent_ids}

    def _find_episode(self, agent_id: str) -> Episode:
        if agent_id not in self.agent_episodes:
            present = ", ".join(self.agent_ids) or "none"
            raise KeyError(f"agent_id: expected an agent of this episode, {present}, got {agent_id!r}")
        return self.agent_episodes[agent_id]

    def __getattr__(self, name: str) -> Any:
        if name in _AGENT_ATTRIBUTES:
            raise AttributeError(
                f"an episode of several agents has no {name}: use episode.agent_episodes[agent].{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ------------------------------------------------------------ for Stitch

    def join(self, agent: str, episode: Episode) -> None:
        """Adds the episode of an agent that joins the game, perhaps again."""
        if agent in self.agent_episodes:
            self._before[agent] += self.agent_episodes[agent].total_reward
        self.agent_episodes[agent] = episode
        episode.episode_id = self.episode_id
