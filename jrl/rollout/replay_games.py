"""Games of several agents as callbacks see them: an episode is a game, which has an episode for each agent."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jrl.envs.agent_options import OBS
from jrl.rollout.episode import Block, Episode, Told
from jrl.rollout.replay_episodes import Replay
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import POLICY_ID, PyTree, Rollout

_OF_AGENTS = ("obs", "actions", "rewards", "infos", "last_obs", "last_action", "last_reward", "last_info")


class GameEpisode(Told):
    """One game of several agents, by the names that RLlib's episodes have.

    Attributes:
      agent_ids: who has been there so far, in the order of the environment's agents.
      agent_episodes: agent -> its `Episode`; of one that came back, the latest.
      agent_rewards: (agent, policy) -> what it has earned in this game, however often it came.
    """

    def __init__(self, *place: Any, agents: Sequence[str], follows: Sequence[str]):
        super().__init__(*place)
        self.agent_episodes: dict[str, Episode] = {}
        self._agents, self._follows = agents, dict(zip(agents, follows, strict=True))
        self._before = dict.fromkeys(agents, 0.0)  # earned in lives that are over

    @property
    def agent_ids(self) -> tuple[str, ...]:
        return tuple(agent for agent in self._agents if agent in self.agent_episodes)

    def get_agents(self) -> list[str]:
        return list(self.agent_ids)

    @property
    def agent_rewards(self) -> dict[tuple[str, str], float]:
        earned = lambda agent: self._before[agent] + self.agent_episodes[agent].total_reward
        return {(agent, self._follows[agent]): earned(agent) for agent in self.agent_ids}

    def policy_for(self, agent_id: str) -> str:
        """Returns the name of the policy that an agent follows. Raises KeyError: there is no such agent."""
        return self._follows[agent_id]

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

    # ------------------------------------------------------------ for the replay

    _since = (0, 0.0)  # steps and rewards of the game that were counted before it began, among those of the block

    def _comes(self, agent: str, episode: Episode) -> None:
        if agent in self.agent_episodes:
            self._before[agent] += self.agent_episodes[agent].total_reward
        self.agent_episodes[agent] = episode

    def _count(self, steps: Any, paid: Any) -> None:
        self.length, self.total_reward = int(steps) - self._since[0], float(paid) - self._since[1]


class _Rows(NamedTuple):
    """Rows of a block's columns, [T, B] each, and what the first reset told."""

    block: Block
    mask: np.ndarray
    begins: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    length: np.ndarray
    total: np.ndarray
    reset_infos: Any


class AgentReplay(Replay):
    """Replays episodes of agents that play by their own turns, each by itself, since their steps do not stand together.

    Args:
      agents: their A names.
      follows: the policy of each column, after which they repeat.
      args, how: as of `Replay`.
    """

    def __init__(self, *args: Any, agents: Sequence[str], follows: Sequence[str], **how: Any):
        self._agents, self._follows = agents, follows
        super().__init__(*args, **how)

    def _new(self, b: int) -> Episode:
        episode = super()._new(b)
        episode.env_index, agent = divmod(episode.env_index, len(self._agents))
        episode.agent_id, episode.policy_id = self._agents[agent], self._follows[b % len(self._follows)]
        return episode


class GameReplay(Replay):
    """Replays the games of B columns; of each row the agents' episodes go on first, and then the game is told of.

    A game is dropped as episodes are: its environment or runner broke, or its beginning was not seen.

    Args:
      agents: their A names.
      follows: the policy of each column, after which they repeat.
      named: the name of the policy of a number, where it may change from game to game who follows which; None:
        `follows` says it for ever.
      args, how: as of `Replay`.
    """

    def __init__(
        self,
        *args: Any,
        agents: Sequence[str],
        follows: Sequence[str],
        named: Callable[[int], str] | None = None,
        **how: Any,
    ):
        self._agents, self._follows, self._named = agents, follows, named
        self._followed = np.zeros((0, 0), np.int32)  # [T, B], policies by their numbers
        super().__init__(*args, **how)

    def reset(self) -> None:
        super().reset()
        count = self._num_envs // len(self._agents)
        self._games: list[GameEpisode | None] = [None] * count
        self._lost = [False] * count  # a game is under way whose beginning was not seen
        self._under_way = np.zeros(count, bool)  # what `_derived` knows
        self._over = np.zeros((0, count), bool)

    def __call__(self, rollout: Rollout, *args: Any, **how: Any) -> None:
        """Takes a rollout, as `Replay` does."""
        recorded: Any = rollout.extras.get(RAW_STEPS, {})
        over = recorded["over"][:, :: len(self._agents)] if "over" in recorded else rollout.over
        self._over = np.asarray(over)
        if self._named is not None:
            self._followed = np.asarray(rollout.extras[POLICY_ID])
            seen, last = (cast(Any, obs)[OBS] for obs in (rollout.obs, rollout.last_obs))
            rollout = dataclasses.replace(rollout, obs=seen, last_obs=last)
        super().__call__(rollout, *args, **how)

    def _goes_on(self, contiguous: np.ndarray) -> None:
        super()._goes_on(contiguous)
        for g, goes_on in enumerate(self._by_game(contiguous).all(-1)):
            if not goes_on:
                self._games[g], self._lost[g] = None, False

    def _by_game(self, x: np.ndarray) -> Any:
        return x.reshape(*x.shape[:-1], len(self._games), len(self._agents))

    def _tell(self, block, mask, terminated, truncated, failed, length, total, reset_infos) -> None:
        moments, over = self._moments, self._over
        there, broke = self._by_game(mask).any(-1), self._by_game(failed).any(-1)
        begins, ends = mask & (length == 1), mask & (terminated | truncated)
        rows = _Rows(block, mask, begins, terminated, truncated, length, total, reset_infos)
        paid = self._by_game(np.where(mask, block.reward, 0.0).astype(np.float64)).sum(-1).cumsum(0)
        steps = there.cumsum(0)
        for under_way in filter(None, self._games):
            under_way._since = (-under_way.length, -under_way.total_reward)
        visited = ~there | over | broke | self._by_game(begins | ends).any(-1) | (moments.step is not None)
        for t, g in zip(*(x.tolist() for x in np.nonzero(visited))):
            if broke[t, g] or not there[t, g]:
                self._drop(g)
                continue
            since = (int(steps[t - 1, g]), float(paid[t - 1, g])) if t else (0, 0.0)
            game = self._games[g] or self._begun(rows, t, g, since)
            if game is None:
                continue
            cut = self._agents_step(rows, t, g)
            game._count(steps[t, g], paid[t, g])
            if over[t, g]:
                game.terminated, game.truncated = not cut, cut
            if moments.step is not None:
                moments.step(game)
            if over[t, g]:
                if moments.end is not None:
                    moments.end(game)
                moments.finished(game)
                self._games[g] = None
        for g, left in enumerate(self._games):
            if left is not None:
                left._count(steps[-1, g], paid[-1, g])

    def _columns_of(self, g: int) -> range:
        return range(g * len(self._agents), (g + 1) * len(self._agents))

    def _drop(self, g: int) -> None:
        """Drops a game that was under way, since nobody is there: what comes next is another."""
        self._games[g], self._lost[g] = None, False
        for b in self._columns_of(g):
            self._flying[b] = None

    def _begun(self, rows: _Rows, t: int, g: int, since: tuple[int, float]) -> GameEpisode | None:
        """Returns the game that begins with row t; None: it began before."""
        present = [b for b in self._columns_of(g) if rows.mask[t, b]]
        self._lost[g] = self._lost[g] or not all(rows.begins[t, b] for b in present)
        if self._lost[g]:
            return None
        first = self._env_index + g * len(self._agents)
        if self._named is None:
            follows = [self._follows[(first + k) % len(self._follows)] for k in range(len(self._agents))]
        else:
            follows = [self._named(number) for number in self._followed[t, list(self._columns_of(g))].tolist()]
        place = (next(self._ids), first // len(self._agents), self._worker_index, self._in_evaluation)
        self._games[g] = game = GameEpisode(*place, agents=self._agents, follows=follows)
        game._since = since
        if self._moments.created is not None:
            self._moments.created(game)
        for b in present:
            self._comes(rows, t, b)
        if self._moments.start is not None:
            self._moments.start(game)
        return game

    def _comes(self, rows: _Rows, t: int, b: int) -> None:
        episode, info = self._entered(rows.block, rows.mask, t, b, rows.reset_infos)
        self._show(episode, info)
        game = self._games[b // len(self._agents)]
        assert game is not None
        game._comes(self._agents[b % len(self._agents)], episode)

    def _new(self, b: int) -> Episode:
        game = self._games[b // len(self._agents)]
        assert game is not None
        place = (game.episode_id, game.env_index, self._worker_index, self._in_evaluation)
        return Episode(*place, self._moments.history)

    def _agents_step(self, rows: _Rows, t: int, g: int) -> bool:
        """The episodes of the agents that are there go on by row t; whether one of them is cut there."""
        cut = False
        for b in self._columns_of(g):
            if not rows.mask[t, b]:
                continue
            episode = self._flying[b]
            if rows.begins[t, b] and (episode is None or episode.length):  # who begins with the game is there already
                self._comes(rows, t, b)
                episode = self._flying[b]
            assert episode is not None
            episode._stop, episode.length, episode.total_reward = t + 1, int(rows.length[t, b]), float(rows.total[t, b])
            episode.terminated, episode.truncated = bool(rows.terminated[t, b]), bool(rows.truncated[t, b])
            cut |= episode.truncated
            if episode.is_done:
                self._flying[b] = None
        return cut

    def _leave(self, block: Block, mask, length, total) -> None:
        super()._leave(block, mask, length, total)
        for game in filter(None, self._games):
            for episode in game.agent_episodes.values():
                if episode._block is not None:  # it ended here, and its game goes on
                    episode._leave()

    def _derived(self, reward, done, mask, contiguous) -> Mapping[str, np.ndarray]:
        """Derives what `Replay` does, but that it is games that break off: an agent may come and go."""
        found = super()._derived(reward, done, mask, contiguous)
        under_way = self._under_way & self._by_game(contiguous).all(-1)
        there, failed = self._by_game(mask).any(-1), np.zeros((len(mask), len(self._games)), bool)
        for t, somebody in enumerate(there):
            failed[t], under_way = under_way & ~somebody, somebody & ~self._over[t]
        self._under_way = under_way
        return {**found, "failed": np.repeat(failed, len(self._agents), 1)}
