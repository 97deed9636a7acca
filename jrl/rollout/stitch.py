"""Rollouts become episodes here, whoever collects the rollouts and whoever reads the episodes.

    stitch = Stitch(num_envs, take=found.append)  # gets each episode that has ended or was cut
    stitch.add(rollout)
    stitch.add(next_rollout)
    stitch.reset()  # cuts the episodes under way

An episode goes on from rollout to rollout. It ends by termination or at a time limit. It is cut, with neither, where
the columns do not go on, its environment or runner broke, or its agent is gone.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.envs.agent_options import OBS
from jrl.rollout.episode import Block, Episode, GameEpisode
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import POLICY_ID, PyTree, Rollout


class Moments(NamedTuple):
    """Functions called with an `Episode`, or a `GameEpisode` of several agents; None where nothing is.

    Row by row, and within a row column by column (of games: game by game), an episode is created and started with the
    row of its first step, stepped, and ended. An episode that is cut has no end, and an episode whose beginning was not
    seen is left out.
    """

    created: Callable[[Any], Any] | None
    start: Callable[[Any], Any] | None
    step: Callable[[Any], Any] | None
    end: Callable[[Any], Any] | None
    finished: Callable[[Any], None]  # after `end`: takes its metrics
    ids: Iterator[int]  # numbers for the episodes
    lock: Any  # held meanwhile: training and an evaluation beside it have the same callbacks


@dataclasses.dataclass
class Piece:
    """Rows [start, stop) of an episode in one rollout."""

    episode: Any
    start: int
    stop: int
    begins: bool
    goes_on: bool  # in the next rollout
    ends: tuple[bool, bool] | None  # (terminated, truncated); None: it goes on, or is cut

    def __post_init__(self) -> None:
        self.shown = self.start  # rows before this one are shown

    def advance(self, stop: int) -> float:
        """Shows the rows before `stop`, and the observation there. Returns the sum of their rewards."""
        if stop == self.shown > self.start:
            return 0.0
        reward = self._show(stop)
        self.shown = stop
        if stop == self.stop and self.ends is not None:
            self.episode.terminated, self.episode.truncated = self.ends
        return reward

    def _show(self, stop: int) -> float:
        return self.episode.advance(stop)


@dataclasses.dataclass
class GamePiece(Piece):
    """Rows [start, stop) of a game of several agents, and the pieces of the agents' episodes among them."""

    agents: Sequence[Piece]  # agent by agent

    def _show(self, stop: int) -> float:
        game, reward = self.episode, 0.0
        for piece in self.agents:
            if piece.start < max(stop, self.start + 1) and piece.shown < piece.stop:
                agent = piece.episode.agent_id
                if game.agent_episodes.get(agent) is not piece.episode:
                    game.join(agent, piece.episode)
                reward += piece.advance(min(max(stop, piece.start), piece.stop))
        game.length += stop - self.shown
        game.total_reward += reward
        return reward


def find_pieces(mask: np.ndarray, done: np.ndarray, count: np.ndarray) -> Iterable[tuple[int, int, int, bool, bool]]:
    """Finds the consecutive steps of one episode, column by column.

    Args:
      mask: [T, B] bool, steps.
      done: [T, B] bool, ends.
      count: [B], rows of each column.
    Returns:
      (column, start, stop, whether it ends, whether it may go on in the next rollout) of each.
    """
    before, after = np.zeros_like(mask), np.zeros_like(mask)
    before[1:], after[:-1] = mask[:-1] & ~done[:-1], mask[1:]
    column, start = np.nonzero((mask & ~before).T)
    _, last = np.nonzero((mask & (~after | done)).T)
    ends = done[last, column]
    goes_on = ~ends & (last + 1 >= count[column])
    return zip(*(x.tolist() for x in (column, start, last + 1, ends, goes_on)), strict=True)


class _Rows(NamedTuple):
    """A rollout's flags on the host."""

    mask: Any  # [T, B], as the next two
    terminated: Any
    truncated: Any
    contiguous: Any  # [B]
    count: Any  # [B]
    length: Any  # [T, B], steps of the episode, this row included; None: rollouts without a record
    over: Any  # [T, G], of games
    policy: Any  # [T, B], the agents' policies by number, where they change from game to game
    infos: Sequence[Sequence[Any]] | None = None
    reset_infos: Sequence[Any] | None = None


class Stitch:
    """Makes the episodes of B columns, from one rollout after the other.

    Args:
      num_envs: B.
      take: gets each episode that has ended or was cut, column by column.
      moments: functions of the episodes' moments.
      agents: names of the A agents of an environment; () where there is one.
      policies: of several agents the policy of each column, after which they repeat.
      kinds: of agents, see `EnvSpec.kinds`: an episode has the observations and actions of its agent alone.
      games: whether episodes are games of all agents; else each agent has its own.
      named: (number of a policy) -> its name, where rollouts say which one each agent follows in a game (`POLICY_ID`).
      history: steps that an episode remembers; None: all; 0: observations are not fetched.
      extras: (a rollout's extras) -> those that episodes have.
      first: the number of the first column.
      worker_index, in_evaluation: of the episodes.
      iteration: () -> the one under way, for the episodes that begin.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        take: Callable[[Any], Any] | None = None,
        moments: Moments | None = None,
        agents: Sequence[str] = (),
        policies: Sequence[str] = (),
        kinds: Sequence[tuple[int, ...]] = (),
        games: bool = False,
        named: Callable[[int], str] | None = None,
        history: int | None = None,
        extras: Callable[[Mapping[str, PyTree]], dict[str, PyTree]] = lambda extras: {},
        first: int = 0,
        worker_index: int = 0,
        in_evaluation: bool = False,
        iteration: Callable[[], int] = lambda: 0,
    ):
        self._take, self._moments, self._games, self._named = take, moments, games, named
        self._agents, self._policies, self._history, self._extras = agents, policies, history, extras
        self._first, self._worker_index, self._in_evaluation = first, worker_index, in_evaluation
        self._iteration, self._num_envs, self._kinds = iteration, num_envs, kinds
        # columns of each kind, and of each column its kind and its place in it
        self._own = spaces.split_by_kind(kinds, np.arange(num_envs))
        self._place = {c: (k, j) for k, own in enumerate(self._own) for j, c in enumerate(own.tolist())}
        self._open: dict[int, Episode] = {}
        self._open_games: dict[int, GameEpisode] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._reset_infos: dict[int, Any] = {}  # by column: of a reset whose episode has no step yet
        self._began = np.zeros(self._num_envs, bool)

    def reset(self) -> None:
        """Cuts the episodes under way: the environments begin anew."""
        self._cut(np.zeros(self._num_envs, bool), np.zeros(self._num_envs, bool))
        self._begin_anew()

    def unfinished(self) -> list[Episode]:
        """Returns the episodes of single agents that have not ended, column by column; they go on."""
        return [episode for _, episode in sorted(self._open.items())]

    def add(
        self,
        rollout: Rollout,
        infos: Sequence[Sequence[Any]] | None = None,
        *,
        reset_infos: Sequence[Any] | None = None,
        goes_on: bool | None = None,
    ) -> None:
        """Takes the next rollout.

        Args:
          rollout: [T, B], with a record in its extras, or whose rewards and flags are the environment's own.
          infos: [T][B] of its rows, None where there is none.
          reset_infos: [B] of the reset before the first rollout.
          goes_on: whether its columns continue those of the call before; None: as the rollout says.
        """
        rows, whole = self._fetch(rollout, infos)
        rows = rows._replace(reset_infos=reset_infos)
        if goes_on is not None:
            rows = rows._replace(contiguous=np.full_like(rows.contiguous, goes_on))
        self._cut(rows.contiguous, rows.mask[0] | (rows.count == 0))
        pieces = self._pieces(rows, self._blocks(whole))
        units: Sequence[Piece] = self._game_pieces(rows, pieces) if self._games else [piece for _, piece in pieces]
        if self._moments is not None:
            with self._moments.lock:
                _tell(units, self._moments)
        for unit in units:
            unit.advance(unit.stop)
            if not unit.goes_on and self._take is not None:
                self._take(unit.episode)
        for episode in self._open.values():
            episode.leave()
        for game in self._open_games.values():
            for episode in game.agent_episodes.values():  # also of agents that have ended here
                episode.leave()
        if infos is not None:
            for b in np.flatnonzero(~rows.mask[-1]).tolist():
                self._reset_infos[b] = _latest_reset(rows, len(rows.mask), b) or self._reset_infos.get(b)

    def _fetch(self, rollout: Rollout, infos: Any) -> tuple[_Rows, Block]:
        """Copies what is read of a rollout to the host."""
        obs, last_obs, action = rollout.obs, rollout.last_obs, rollout.action
        if self._history == 0:
            obs = last_obs = action = None
        elif self._named is not None:
            obs, last_obs = obs[OBS], last_obs[OBS]
        own: Any = {name: getattr(rollout, name) for name in ("reward", "terminated", "truncated")} | {"length": None}
        own = rollout.extras.get(RAW_STEPS, own)
        over = own["over"][:, :: len(self._agents)] if "over" in own else rollout.over
        rows = _Rows(
            rollout.mask, own["terminated"], own["truncated"], rollout.contiguous, rollout.count, own["length"],
            over if self._games else None, rollout.extras[POLICY_ID] if self._named is not None else None,
        )  # fmt: skip
        whole = Block(obs, last_obs, action, own["reward"], self._extras(rollout.extras), None)
        rows, whole = jax.device_get((rows, whole))
        if rows.count is None:
            rows = rows._replace(count=np.full(self._num_envs, len(rows.mask)))
        return rows._replace(infos=infos), whole._replace(infos=infos)

    def _cut(self, contiguous: np.ndarray, continued: np.ndarray) -> None:
        goes_on = contiguous & continued
        for b in sorted(b for b in self._open if not goes_on[b]):
            episode = self._open.pop(b)
            if self._take is not None:
                self._take(episode)
        if self._open_games:
            of_game = lambda x: x.reshape(-1, len(self._agents))
            goes_on = of_game(contiguous).all(-1) & of_game(continued).any(-1)
            self._open_games = {g: game for g, game in self._open_games.items() if goes_on[g]}

    def _blocks(self, whole: Block) -> list[Block]:
        """Returns the block of each kind of agents."""
        if not self._kinds:
            return [whole]
        blocks = []
        for k, own in enumerate(self._own):
            obs, last_obs, action = (None if x is None else x[k] for x in (whole.obs, whole.last_obs, whole.action))
            extras = jax.tree.map(lambda x, own=own: x[:, own], whole.extras)
            infos = whole.infos and [[row[c] for c in own] for row in whole.infos]
            blocks.append(Block(obs, last_obs, action, whole.reward[:, own], extras, infos))
        return blocks

    def _pieces(self, rows: _Rows, blocks: list[Block]) -> list[tuple[int, Piece]]:
        """Returns (column, piece) of each agent's episodes, which have entered the rollout."""
        pieces = []
        for b, start, stop, ends, goes_on in find_pieces(rows.mask, rows.terminated | rows.truncated, rows.count):
            episode = self._open.pop(b, None) if start == 0 else None
            begins = episode is None
            if episode is None:
                episode = self._new(rows, start, b)
            kind, place = self._place[b]
            episode.enter(blocks[kind], place, start)
            if goes_on:
                self._open[b] = episode
            flags = (bool(rows.terminated[stop - 1, b]), bool(rows.truncated[stop - 1, b])) if ends else None
            pieces.append((b, Piece(episode, start, stop, begins, goes_on, flags)))
        return pieces

    def _new(self, rows: _Rows, start: int, b: int) -> Episode:
        begin = 0 if rows.length is None else int(rows.length[start, b]) - 1
        env, agent = divmod(self._first + b, max(1, len(self._agents)))
        facts = (env, self._worker_index, self._in_evaluation, begin)
        episode = Episode(*facts, history=self._history, info=self._info(rows, start, b))
        episode.kind, episode.iteration = self._place[b][0], self._iteration()
        if self._agents:
            episode.agent_id, episode.policy_id = self._agents[agent], self._policy(rows, start, b)
        return episode

    def _policy(self, rows: _Rows, t: int, b: int) -> str:
        if self._named is None:
            return self._policies[(self._first + b) % len(self._policies)]
        return self._named(int(rows.policy[t, b]))

    def _info(self, rows: _Rows, start: int, b: int) -> Any:
        """Returns the info of the reset before a column's episode."""
        info = self._reset_infos.pop(b, None)
        if rows.infos is not None and start > 0 and not rows.mask[start - 1, b]:
            info = _latest_reset(rows, start, b) or info
        elif not self._began[b] and rows.reset_infos is not None:
            info = rows.reset_infos[b]
        self._began[b] = True
        return info if rows.infos is None else info or {}

    def _game_pieces(self, rows: _Rows, pieces: list[tuple[int, Piece]]) -> list[GamePiece]:
        size = len(self._agents)
        by_game: dict[int, list[Piece]] = {}
        for b, piece in pieces:
            by_game.setdefault(b // size, []).append(piece)
        there = rows.mask.reshape(len(rows.mask), -1, size).any(-1)
        found = []
        for g, start, stop, ends, goes_on in find_pieces(there, rows.over, rows.count.reshape(-1, size).max(-1)):
            own = [piece for piece in by_game[g] if start <= piece.start < stop]
            game = self._open_games.pop(g, None) if start == 0 else None
            begins = game is None
            if game is None:
                first = [piece for piece in own if piece.start == start]
                seen = all(piece.begins and not piece.episode.begin for piece in first)
                facts = (first[0].episode.env_index, self._worker_index, self._in_evaluation, int(not seen))
                policies = {agent: self._policy(rows, start, g * size + k) for k, agent in enumerate(self._agents)}
                game = GameEpisode(*facts, policies=policies)
            if goes_on:
                self._open_games[g] = game
            cut = any(piece.stop == stop and piece.ends is not None and piece.ends[1] for piece in own)
            found.append(GamePiece(game, start, stop, begins, goes_on, (not cut, cut) if ends else None, own))
        return found


def _tell(pieces: Sequence[Piece], moments: Moments) -> None:
    """Calls the moments of the pieces' episodes, in the order of `Moments`."""
    by_row: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.episode.begin:
            continue
        rows: Iterable[int] = range(piece.start, piece.stop)
        if moments.step is None:
            rows = {piece.start} if piece.begins else set[int]()
            rows |= {piece.stop - 1} if piece.ends is not None else set()
        for t in rows:
            by_row.setdefault(t, []).append(piece)
    for t, found in sorted(by_row.items()):
        for piece in found:
            episode = piece.episode
            if piece.begins and t == piece.start:
                episode.episode_id = next(moments.ids)
                if moments.created is not None:
                    moments.created(episode)
                piece.advance(t)
                if moments.start is not None:
                    moments.start(episode)
            if moments.step is not None:
                piece.advance(t + 1)
                moments.step(episode)
            if piece.ends is not None and t + 1 == piece.stop:
                piece.advance(t + 1)
                if moments.end is not None:
                    moments.end(episode)
                moments.finished(episode)


def _latest_reset(rows: _Rows, t: int, b: int) -> Any:
    """Returns the info of the latest row before t, back to the latest step, that has one."""
    assert rows.infos is not None
    while t > 0 and not rows.mask[t - 1, b]:
        t -= 1
        if rows.infos[t][b] is not None:
            return rows.infos[t][b]
    return None
