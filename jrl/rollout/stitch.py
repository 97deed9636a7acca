"""Stitch: builds episodes from consecutive rollouts, for callbacks and data sets.

    stitch = Stitch(num_envs, take=episodes.append)  # called with each episode that has ended or was cut
    stitch.add(rollout)
    stitch.add(next_rollout)
    stitch.reset()  # cuts the unfinished episodes

An episode can span several rollouts. It ends by termination or by a time limit. An episode is cut, without either, if
its columns are not contiguous, its environment or runner failed, or its agent left.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.data.episode import Episode, GameEpisode, Steps, map_arrays
from jrl.envs.agent_options import OBS
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import POLICY_ID, PyTree, Rollout


class Moments(NamedTuple):
    """Functions called with an `Episode`, or a `GameEpisode` of several agents; None: no call.

    Calls go row by row, and within a row by column or game. An episode is created and started with the row of its first
    step, then stepped, then ended. `end` is not called for an episode that is cut. Episodes without their first step
    are left out.
    """

    created: Callable[[Any], Any] | None
    start: Callable[[Any], Any] | None
    step: Callable[[Any], Any] | None
    end: Callable[[Any], Any] | None
    finished: Callable[[Any], None]  # called after `end`, to collect the episode's metrics
    ids: Iterator[int]  # numbers of the episodes
    lock: Any  # held during the calls: training and a parallel evaluation share their callbacks


@dataclasses.dataclass
class Piece:
    """Rows [start, stop) of an episode in one rollout."""

    episode: Any
    start: int
    stop: int
    begins: bool
    goes_on: bool  # the next rollout can continue the episode
    ends: tuple[bool, bool] | None  # (terminated, truncated); None: the episode continues, or is cut
    steps: Steps | None = None
    shown: int | None = None  # the episode has the rows before this row; None: no row of the rollout

    def advance(self, stop: int) -> None:
        """Adds the rows before `stop` to the episode."""
        if stop == self.shown:
            return
        self._add_rows(stop)
        self.shown = stop
        if stop == self.stop and self.ends is not None:
            self.episode.terminated, self.episode.truncated = self.ends

    def _add_rows(self, stop: int) -> None:
        if self.shown is None:
            self.episode.append(self.steps)
        self.episode.show(stop - self.start)

    def detach(self) -> None:
        self.episode.detach()


@dataclasses.dataclass
class GamePiece(Piece):
    """Rows [start, stop) of a game of several agents, with the pieces of the agents' episodes."""

    agents: Sequence[Piece] = ()  # in the order of the agents

    def _add_rows(self, stop: int) -> None:
        game = self.episode
        for piece in self.agents:
            if piece.start < max(stop, self.start + 1) and (piece.shown is None or piece.shown < piece.stop):
                agent = piece.episode.agent_id
                if game.agent_episodes.get(agent) is not piece.episode:
                    game.join(agent, piece.episode)
                before = piece.episode.total_reward
                piece.advance(min(max(stop, piece.start), piece.stop))
                game.total_reward += piece.episode.total_reward - before
        game.length += stop - (self.start if self.shown is None else self.shown)

    def detach(self) -> None:
        for piece in self.agents:
            piece.detach()


def find_pieces(mask: np.ndarray, done: np.ndarray, count: np.ndarray) -> Iterable[tuple[int, int, int, bool, bool]]:
    """Finds the pieces of episodes in a rollout, column by column.

    Args:
      mask: [T, B] bool, steps.
      done: [T, B] bool, ends of episodes.
      count: [B], number of rows of each column.
    Returns:
      (column, start, stop, whether the episode ends, whether the next rollout can continue it) of each piece.
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

    mask: Any  # [T, B]
    terminated: Any  # [T, B]
    truncated: Any  # [T, B]
    contiguous: Any  # [B]
    count: Any  # [B]
    length: Any  # [T, B], steps of the episode up to this row; None: rollouts have no `RAW_STEPS`
    over: Any  # [T, G], ends of games
    policy: Any  # [T, B], numbers of the agents' policies; None: policies do not change from game to game
    infos: Sequence[Sequence[Any]] | None = None  # [T][B]
    reset_infos: Sequence[Any] | None = None  # [B]


@dataclasses.dataclass
class Stitch:
    """Builds the episodes of columns from consecutive rollouts."""

    num_envs: int  # B, number of columns
    _: dataclasses.KW_ONLY
    moments: Moments | None = None  # functions called at the moments of episodes
    agents: Sequence[str] = ()  # names of the A agents of an environment; (): a single agent
    policies: Sequence[str] = ()  # with several agents: policy of each column of a block of games; blocks repeat
    kinds: Sequence[tuple[int, ...]] = ()  # kinds of agents, see `EnvSpec.kinds`
    games: bool = False  # build games of all agents; False: an episode for each agent
    named: Callable[[int], str] | None = None  # number of a policy -> its name, if rollouts have `POLICY_ID`
    history: int | None = None  # steps that an episode keeps; None: all; 0: observations and actions are not fetched
    extras: Callable[[Mapping[str, PyTree]], dict[str, PyTree]] = lambda extras: {}  # a rollout's -> an episode's
    first: int = 0  # number of the first column
    worker_index: int = 0  # attribute of the episodes, as `in_evaluation`
    in_evaluation: bool = False
    iteration: Callable[[], int] = lambda: 0  # present iteration, for new episodes

    def __post_init__(self) -> None:
        self._columns_by_kind = spaces.split_by_kind(self.kinds, np.arange(self.num_envs))
        # column -> (its kind, its index among the columns of that kind)
        self._kind_index = {
            c: (k, j) for k, own in enumerate(self._columns_by_kind) for j, c in enumerate(own.tolist())
        }
        self._open: dict[int, Episode] = {}
        self._open_games: dict[int, GameEpisode] = {}
        self._forget_resets()

    def _forget_resets(self) -> None:
        self._reset_infos: dict[int, Any] = {}  # column -> info of a reset whose episode has no step yet
        self._has_begun = np.zeros(self.num_envs, bool)

    def reset(self) -> list[Episode]:
        """Cuts the unfinished episodes, as after a reset of all environments; returns them, column by column."""
        cut = self._cut(np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool))
        self._forget_resets()
        return cut

    def unfinished(self) -> list[Episode]:
        """Returns the unfinished episodes of single agents, column by column."""
        return [episode for _, episode in sorted(self._open.items())]

    def add(
        self,
        rollout: Rollout,
        infos: Sequence[Sequence[Any]] | None = None,
        *,
        reset_infos: Sequence[Any] | None = None,
        goes_on: bool | None = None,
    ) -> list[Any]:
        """Adds the next rollout; returns the episodes, or games, that it cuts or ends.

        Args:
          rollout: [T, B], with `RAW_STEPS` in its extras, or with the environment's own rewards and flags.
          infos: [T][B], infos of the rows or None.
          reset_infos: [B], infos of the reset before the first rollout.
          goes_on: whether the columns continue those of the previous call; None: as `rollout.contiguous`.
        """
        rows, block = self._fetch(rollout, infos)
        rows = rows._replace(reset_infos=reset_infos)
        if goes_on is not None:
            rows = rows._replace(contiguous=np.full_like(rows.contiguous, goes_on))
        found: list[Any] = self._cut(rows.contiguous, rows.mask[0] | (rows.count == 0))
        pieces = self._build_pieces(rows, self._split_by_kind(block))
        units: Sequence[Piece] = self._build_game_pieces(rows, pieces) if self.games else [piece for _, piece in pieces]
        if self.moments is not None:
            with self.moments.lock:
                _call_moments(units, self.moments)
        for unit in units:
            unit.advance(unit.stop)
            if unit.goes_on:
                unit.detach()
            else:
                found.append(unit.episode)
        if infos is not None:
            for b in np.flatnonzero(~rows.mask[-1]).tolist():
                self._reset_infos[b] = _latest_reset(rows, len(rows.mask), b) or self._reset_infos.get(b)
        return found

    def _fetch(self, rollout: Rollout, infos: Any) -> tuple[_Rows, Steps]:
        """Returns the flags and the steps of all columns [T, B, *], on the host."""
        obs, last_obs, action = rollout.obs, rollout.last_obs, rollout.action
        if self.history == 0:
            obs = last_obs = action = None
        elif self.named is not None:
            obs, last_obs = obs[OBS], last_obs[OBS]
        raw: Any = {name: getattr(rollout, name) for name in ("reward", "terminated", "truncated")} | {"length": None}
        raw = rollout.extras.get(RAW_STEPS, raw)
        over = raw["over"][:, :: len(self.agents)] if "over" in raw else rollout.over
        rows = _Rows(
            rollout.mask, raw["terminated"], raw["truncated"], rollout.contiguous, rollout.count, raw["length"],
            over if self.games else None, rollout.extras[POLICY_ID] if self.named is not None else None,
        )  # fmt: skip
        steps = Steps(obs, action, raw["reward"], self.extras(rollout.extras))
        rows, steps, last_obs = jax.device_get((rows, steps, last_obs))
        obs = jax.tree.map(lambda x, last: np.concatenate([x, last[None]]), steps.obs, last_obs)
        if rows.count is None:
            rows = rows._replace(count=np.full(self.num_envs, len(rows.mask)))
        return rows._replace(infos=infos), steps._replace(obs=obs, infos=infos or ())

    def _cut(self, contiguous: np.ndarray, continued: np.ndarray) -> list[Episode]:
        goes_on = contiguous & continued
        cut = [self._open.pop(b) for b in sorted(b for b in self._open if not goes_on[b])]
        if self._open_games:
            by_game = lambda x: x.reshape(-1, len(self.agents))
            goes_on = by_game(contiguous).all(-1) & by_game(continued).any(-1)
            self._open_games = {g: game for g, game in self._open_games.items() if goes_on[g]}
        return cut

    def _split_by_kind(self, block: Steps) -> list[Steps]:
        """Returns the steps of each kind of agents."""
        if not self.kinds:
            return [block]
        blocks = []
        for k, own in enumerate(self._columns_by_kind):
            obs, action = (None if x is None else x[k] for x in (block.obs, block.action))
            reward, columns = jax.tree.map(lambda x, own=own: x[:, own], (block.reward, block.columns))
            blocks.append(Steps(obs, action, reward, columns, [[row[c] for c in own] for row in block.infos]))
        return blocks

    def _build_pieces(self, rows: _Rows, blocks: list[Steps]) -> list[tuple[int, Piece]]:
        """Returns (column, piece) of the agents' episodes in the rollout."""
        pieces = []
        for b, start, stop, ends, goes_on in find_pieces(rows.mask, rows.terminated | rows.truncated, rows.count):
            episode = self._open.pop(b, None) if start == 0 else None
            begins = episode is None
            if episode is None:
                episode = self._build_episode(rows, start, b)
            kind, index = self._kind_index[b]
            steps = _take_column(blocks[kind], index, start, stop)
            if goes_on:
                self._open[b] = episode
            flags = (bool(rows.terminated[stop - 1, b]), bool(rows.truncated[stop - 1, b])) if ends else None
            pieces.append((b, Piece(episode, start, stop, begins, goes_on, flags, steps)))
        return pieces

    def _build_episode(self, rows: _Rows, start: int, b: int) -> Episode:
        episode = Episode(None, None, np.zeros(0, np.float32), False, False)
        self._set_facts(episode, self.first + b, 0 if rows.length is None else int(rows.length[start, b]) - 1)
        episode.history, episode.reset_info = self.history, self._find_reset_info(rows, start, b)
        episode.kind, episode.iteration = self._kind_index[b][0], self.iteration()
        if self.agents:
            agent = self.agents[(self.first + b) % len(self.agents)]
            episode.agent_id, episode.policy_id = agent, self._find_policy(rows, start, b)
        return episode

    def _set_facts(self, episode: Any, column: int, begin: int) -> None:
        episode.env_index, episode.begin = column // max(1, len(self.agents)), begin
        episode.worker_index, episode.in_evaluation = self.worker_index, self.in_evaluation

    def _find_policy(self, rows: _Rows, t: int, b: int) -> str:
        if self.named is None:
            return self.policies[(self.first + b) % len(self.policies)]
        return self.named(int(rows.policy[t, b]))

    def _find_reset_info(self, rows: _Rows, start: int, b: int) -> Any:
        """Returns the info of the reset before the episode of column `b`."""
        info = self._reset_infos.pop(b, None)
        if rows.infos is not None and start > 0 and not rows.mask[start - 1, b]:
            info = _latest_reset(rows, start, b) or info
        elif not self._has_begun[b] and rows.reset_infos is not None:
            info = rows.reset_infos[b]
        self._has_begun[b] = True
        return info if rows.infos is None else info or {}

    def _build_game_pieces(self, rows: _Rows, pieces: list[tuple[int, Piece]]) -> list[GamePiece]:
        size = len(self.agents)
        by_game: dict[int, list[Piece]] = {}
        for b, piece in pieces:
            by_game.setdefault(b // size, []).append(piece)
        game_mask = rows.mask.reshape(len(rows.mask), -1, size).any(-1)
        game_pieces = []
        for g, start, stop, ends, goes_on in find_pieces(game_mask, rows.over, rows.count.reshape(-1, size).max(-1)):
            own = [piece for piece in by_game[g] if start <= piece.start < stop]
            game = self._open_games.pop(g, None) if start == 0 else None
            begins = game is None
            if game is None:
                first = [piece for piece in own if piece.start == start]
                is_whole = all(piece.begins and not piece.episode.begin for piece in first)
                policies = {agent: self._find_policy(rows, start, g * size + k) for k, agent in enumerate(self.agents)}
                game = GameEpisode(policies)
                self._set_facts(game, self.first + g * size, int(not is_whole))
            if goes_on:
                self._open_games[g] = game
            truncated = any(piece.stop == stop and piece.ends is not None and piece.ends[1] for piece in own)
            flags = (not truncated, truncated) if ends else None
            game_pieces.append(GamePiece(game, start, stop, begins, goes_on, flags, agents=own))
        return game_pieces


def _take_column(block: Steps, column: int, start: int, stop: int) -> Steps:
    """Returns the rows [start, stop) of a column, as views."""
    take = lambda tree, more=0: map_arrays(lambda x: x[start : stop + more, column], tree)
    infos = [row[column] for row in block.infos[start:stop]]
    return Steps(take(block.obs, 1), take(block.action), take(block.reward), take(block.columns), infos)


def _call_moments(pieces: Sequence[Piece], moments: Moments) -> None:
    """Calls the functions of `Moments` in their order."""
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
    for t, row_pieces in sorted(by_row.items()):
        for piece in row_pieces:
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
    """Returns the latest info of the masked rows just before row t; None: there is none."""
    assert rows.infos is not None
    while t > 0 and not rows.mask[t - 1, b]:
        t -= 1
        if rows.infos[t][b] is not None:
            return rows.infos[t][b]
    return None
