"""Episodes on the host, in callbacks, data sets and recordings: of one agent, or of a game of several agents."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import PyTree

_NOTHING: Mapping[str, Any] = {}
_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "columns", "labels")
_AGENT_ATTRIBUTES = ("obs", "actions", "rewards", "infos", "last_obs", "last_action", "last_reward", "last_info")


class Steps(NamedTuple):
    """Consecutive steps of an episode; None: arrays that are not needed."""

    obs: PyTree  # [n + 1, *]
    action: PyTree  # [n, *]
    reward: np.ndarray  # [n], the environment's own
    columns: Mapping[str, PyTree]  # [n, *] each, by name
    infos: Sequence[Any] = ()  # [n], or empty without infos


class _Played(abc.ABC):
    """Attributes and methods of the episodes of one or several agents.

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

    episode_id = env_index = worker_index = begin = length = 0
    total_reward = 0.0
    in_evaluation = terminated = truncated = False

    def __init__(self) -> None:
        self.user_data: dict[Any, Any] = {}
        self.custom_metrics: dict[str, Any] = {}
        self.hist_data: dict[str, Any] = {}

    @property
    def is_done(self) -> bool:
        return self.terminated or self.truncated

    def __len__(self) -> int:
        return self.length

    # names of RLlib's episodes

    def get_return(self) -> float:
        return self.total_reward

    def last_observation_for(self, agent_id: Any = None) -> PyTree:
        return self._find(agent_id).last_obs

    def last_action_for(self, agent_id: Any = None) -> PyTree:
        return self._find(agent_id).last_action

    def last_reward_for(self, agent_id: Any = None) -> float:
        return self._find(agent_id).last_reward

    def last_info_for(self, agent_id: Any = None) -> dict[Any, Any]:
        return self._find(agent_id).last_info

    def get_observations(self, indices: Any = None) -> Any:
        return self._each(lambda e: e.last_obs if indices == -1 else _select(e.obs, indices))

    def get_actions(self, indices: Any = None) -> Any:
        return self._each(lambda e: e.last_action if indices == -1 else _select(e.actions, indices))

    def get_rewards(self, indices: Any = None) -> Any:
        return self._each(lambda e: _select(e.rewards, indices))

    def get_infos(self, indices: Any = None) -> Any:
        return self._each(lambda e: e.infos if indices is None else e.infos[indices])

    @abc.abstractmethod
    def _find(self, agent_id: Any) -> "Episode":
        """Returns the episode of an agent."""

    @abc.abstractmethod
    def _each(self, fn: "Callable[[Episode], Any]") -> Any:
        """Returns `fn` of the episode, or of each agent's episode by agent."""


class Episode(_Played):
    """One episode of T steps of one agent, or its steps so far. Do not write to its arrays: they may be views.

    Args:
      obs: [T + 1, *] observations, from the reset to the final observation.
      action: [T, *] actions as the policy chose them, before scaling and clipping.
      reward: [T], the environment's own rewards.
      terminated: true end.
      truncated: time limit; neither: the recording was cut.
      columns: further arrays [T, *], by name, such as outputs of `Algo.act`.
      labels: properties of the episode, each a number or a text.
    Attributes:
      agent_id, policy_id: names of its agent and policy; None with a single agent.
      kind: number of its agent's kind, see `EnvSpec.kinds`.
      iteration: iteration of its first step.
      history: number of latest steps that are kept; None: all; 0: observations and actions are unknown.
      reset_info: info of the reset; None: the backend has no infos.
    """

    agent_id: str | None = None
    policy_id: str | None = None
    kind = iteration = 0
    history: int | None = None
    reset_info: Any = None

    def __init__(
        self,
        obs: PyTree,
        action: PyTree,
        reward: np.ndarray,
        terminated: bool,
        truncated: bool,
        columns: Mapping[str, PyTree] = _NOTHING,
        labels: Mapping[str, Any] = _NOTHING,
    ):
        super().__init__()
        self.terminated, self.truncated, self.labels = terminated, truncated, labels
        self._parts = [Steps(obs, action, reward, columns)]
        self._shown = 0  # rows of the last part that the episode has
        self.show(len(reward))

    def replace(self, **changes: Any) -> "Episode":
        """Returns an episode with other values of some arguments."""
        return Episode(**{name: getattr(self, name) for name in _FIELDS} | changes)

    @property
    def obs(self) -> PyTree:
        """Returns [n + 1, *] observations, from the reset to the latest; n is `length`, or `history`."""
        return self._join("obs", 1)

    @property
    def action(self) -> PyTree:
        """Returns [n, *] actions."""
        return self._join("action")

    @property
    def reward(self) -> np.ndarray:
        """Returns [n] rewards."""
        return self._join("reward")

    @property
    def columns(self) -> dict[str, PyTree]:
        """Returns further arrays [n, *], by name."""
        return self._join("columns")

    actions, rewards, extras = action, reward, columns

    @property
    def infos(self) -> list[dict[Any, Any]]:
        """Returns n + 1 dicts, from the reset to the latest; [] if the backend has no infos."""
        if self.reset_info is None:
            return []
        *before, last = (part.infos for part in self._parts)
        infos = [info for part in (*before, last[: self._shown]) for info in part]
        infos = [self.reset_info, *infos] if len(infos) == self.length else infos
        return infos if self.history is None else infos[-self.history - 1 :]

    @property
    def last_obs(self) -> PyTree:
        """Returns [*], the latest observation; the final observation of an episode that has ended."""
        self._check_history()
        return _select(self._parts[-1].obs, self._shown)

    @property
    def last_action(self) -> PyTree:
        """Returns [*], the latest action; None before the first step."""
        self._check_history()
        return _select(self._parts[-1].action, self._shown - 1) if self._shown else None

    @property
    def last_reward(self) -> float:
        """Returns the latest reward; 0 before the first step."""
        return float(self._parts[-1].reward[self._shown - 1]) if self._shown else 0.0

    @property
    def last_info(self) -> dict[Any, Any]:
        """Returns the latest info; {} if the backend has no infos."""
        infos = self._parts[-1].infos
        return (infos[self._shown - 1] if infos and self._shown else self.reset_info) or {}

    def _find(self, agent_id: Any) -> "Episode":
        return self

    def _each(self, fn: Callable[["Episode"], Any]) -> Any:
        return fn(self)

    def _check_history(self) -> None:
        if self.history == 0:
            raise RuntimeError(
                "Callbacks.history: expected None or at least 1 for observations and actions, got 0: set it to 1"
            )

    def _join(self, name: str, more: int = 0) -> Any:
        """Returns the rows of all parts, cut to the latest `history` + `more` rows."""
        if name in ("obs", "action"):
            self._check_history()
        *before, last = (getattr(part, name) for part in self._parts)
        if self._shown < len(self._parts[-1].reward):
            last = _select(last, slice(self._shown + more))
        if before:
            before = [_select(rows, slice(-1)) for rows in before] if more else before
            last = jax.tree.map(lambda *x: np.concatenate(x), *before, last)
        if self.history is None:
            return last
        keep = self.history + more
        return map_arrays(lambda x: x[max(0, len(x) - keep) :], last)

    # ------------------------------------------------------------ for Stitch

    def append(self, steps: Steps) -> None:
        """Adds steps, of which the episode has none until `show`."""
        if not self._shown:
            self._parts.pop()
        self._parts.append(steps)
        self._shown = 0

    def show(self, count: int) -> None:
        """Adds the rows of the appended steps before row `count` to the episode."""
        reward, first, self._shown = self._parts[-1].reward, self._shown, count
        self.length += count - first
        if count == first + 1:  # a third of the time of a sum
            self.total_reward += float(reward[first])
        elif count > first:
            self.total_reward += float(np.sum(reward[first:count], dtype=np.float64))

    def detach(self) -> None:
        """Copies the appended steps, so that the rollout can be freed; forgets steps beyond `history`."""
        least = None if self.history is None else max(self.history, 1)
        first = 0 if least is None else max(0, self._shown - least)
        copy = lambda tree: map_arrays(lambda x: x[first:].copy(), tree)
        last = self._parts[-1]
        self._parts[-1] = Steps(
            copy(last.obs), copy(last.action), copy(last.reward), copy(last.columns), last.infos[first:]
        )
        self._shown -= first
        while least is not None and sum(len(part.reward) for part in self._parts[1:]) >= least:
            del self._parts[0]


class GameEpisode(_Played):
    """A game of several agents, with the names of RLlib's episodes.

    Attributes:
      agent_ids: agents that have joined so far, in the order of the environment's agents.
      agent_episodes: agent -> its `Episode`; the latest if the agent joined several times.
      agent_rewards: (agent, policy) -> sum of rewards in this game, over all times that the agent joined.
    """

    def __init__(self, policies: Mapping[str, str]):
        super().__init__()
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

    def _find(self, agent_id: str) -> Episode:
        if agent_id not in self.agent_episodes:
            present = ", ".join(self.agent_ids) or "none"
            raise KeyError(f"agent_id: expected an agent of this episode, {present}, got {agent_id!r}")
        return self.agent_episodes[agent_id]

    def _each(self, fn: Callable[[Episode], Any]) -> dict[str, Any]:
        return {agent: fn(self.agent_episodes[agent]) for agent in self.agent_ids}

    def __getattr__(self, name: str) -> Any:
        if name in _AGENT_ATTRIBUTES:
            raise AttributeError(
                f"an episode of several agents has no {name}: use episode.agent_episodes[agent].{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def join(self, agent: str, episode: Episode) -> None:
        """Adds the episode of an agent that joins the game, perhaps again."""
        if agent in self.agent_episodes:
            self._before[agent] += self.agent_episodes[agent].total_reward
        self.agent_episodes[agent] = episode
        episode.episode_id = self.episode_id


def map_arrays(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Returns the result of `jax.tree.map`, in a tenth of the time for a single array."""
    return fn(tree) if isinstance(tree, np.ndarray) else jax.tree.map(fn, tree)


def _select(tree: PyTree, index: Any) -> PyTree:
    return tree if index is None else map_arrays(lambda x: x[index], tree)
