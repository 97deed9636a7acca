"""EnvPool's games of several players, stepped on the host: each player of each game has an index in the batch.

EnvPool returns a row per player and a row per game, in the order in which its threads finish; `env_id` is the game of
each. Here they are sorted: player k of game i has index i * P + k. All players of a game end with it.

Some games take an action of each player. In the others, players take turns, and `current_player` moves. A waiting
player has an ordinary transition whose action_mask allows only the last action, as in `jrl.envs.multi_host`.
"""

from typing import Any

import jax
import numpy as np

from jrl.envs import spec as spaces
from jrl.envs.envpool_env import Pool, info_shapes, num_players
from jrl.envs.infos import find_mask
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK
from jrl.types import Array, Discrete, EnvSpec, InputError, PyTree, Several, Space, StepResult

_LEGAL = "legal_action_mask"  # default key of the moving player's mask in the infos


class EnvPoolGames(Pool):
    """A `jrl.types.Env` of games of P players. `cfg.num_envs` counts games.

    Raises:
      InputError: see `Pool`; `state`, because there is no global state; players who take turns with actions that are
        not Discrete.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int, state: bool = False):
        if state:
            raise InputError(f"multi_agent.state: EnvPool's {cfg.id} has no global state: leave it out")
        super().__init__(cfg, seed=seed)
        self._games, self._players = cfg.num_envs, num_players(cfg.id)
        self._key = next(name for name in self._pool.spec.action_array_spec if not name.endswith("env_id"))
        self._choices: int | None = None  # number of moves; None: all players act on each step
        self._legal = _LEGAL
        try:
            observation, action = self._player_spaces(cfg)
        except InputError:
            self.close()
            raise
        agents = tuple(f"player_{k}" for k in range(self._players))
        # no time limit: the games accept max_episode_steps, but continue beyond it
        self.spec = EnvSpec(observation, action, self._games * self._players, agents=agents)
        self._over = np.zeros(self._games, bool)
        self._current = np.zeros(self._games, np.int32)  # moving player

    def _player_spaces(self, cfg: EnvConfig) -> tuple[Space, Space]:
        """Return the spaces of a player; if players take turns, with the waiting action and the mask."""
        observation, action = self.spec.observation, self.spec.action
        if self._key.startswith("players."):
            if cfg.action_mask_info is not None:
                reason = f"all its players act at once, without a mask in {cfg.action_mask_info}"
                raise InputError(f"env.action_mask_info: {cfg.id} has several agents, {reason}: leave it out")
            return observation, action
        infos = info_shapes(self._pool)
        if "current_player" not in infos or not isinstance(action, Discrete):
            raise InputError(
                f"env.id {cfg.id}: expected Discrete actions and infos with current_player, got {action} and "
                f"{', '.join(infos)}: use a game whose players take turns this way, or all act at once"
            )
        self._legal, self._choices = cfg.action_mask_info or _LEGAL, action.n
        find_mask(self._legal, infos, action, cfg.id)
        waiting = Discrete(action.n + 1)
        return spaces.add_mask_space(observation, waiting), waiting

    def _find_mask(self, id: str, name: str | None, observed: Any, action: Space) -> str | None:
        """Return None: the infos have one mask per game, the moving player's, and none per player."""
        return None

    def reset(self) -> PyTree:
        """Begin new games; return observations [B, *]."""
        obs, info = self._pool.reset()
        self._over[:] = False
        return self._build_observations(obs, info, np.argsort(info["env_id"]))

    def step(self, action: PyTree) -> StepResult:
        """Step all games. Raises ValueError: the action is not of `spec.action`, or the moving player waits."""
        pool_action = self._pool_action(self._action(action, self.spec.num_envs))
        obs, reward, terminated, truncated, info = self._pool.step(pool_action)
        order = np.argsort(info["env_id"])
        obs = self._build_observations(obs, info, order)
        to_all = lambda x: np.repeat(x, self._players)
        fresh = info["elapsed_step"][order] == 0  # steps that begin a game
        terminated, truncated = terminated[order], truncated[order]
        self._over = terminated | truncated
        earned = np.where(to_all(fresh), np.float32(0), reward[_by_game(info)].astype(np.float32))
        several = Several(to_all(fresh), self._over, to_all(~self._over))
        return StepResult(obs, earned, to_all(terminated), to_all(truncated), several=several)

    def _pool_action(self, action: Array) -> dict[str, Array]:
        """Return actions [B] as the pool takes them: of each player, or of the moving players."""
        games = np.arange(self._games, dtype=np.int32)
        if self._choices is None:
            return {self._key: action, "env_id": games, "players.env_id": np.repeat(games, self._players)}
        moves = action.reshape(self._games, self._players)[games, self._current]
        if (waits := (moves == self._choices) & ~self._over).any():
            game = int(waits.argmax())
            raise ValueError(
                f"game {game}: player_{self._current[game]}: expected a move, got the waiting action, which its "
                "action_mask forbids"
            )
        moves = np.where(self._over, 0, moves).astype(action.dtype)  # the next step of an ended game begins a new game
        return {self._key: moves, "env_id": games, "players.env_id": games}

    def _build_observations(self, obs: Any, info: dict[str, Any], order: Array) -> PyTree:
        """Return the observations of all players; `order` [G] sorts the rows of games."""
        self.infos.set_from_pool(info)
        rows = _by_game(info)
        obs = self._observe(jax.tree.map(lambda x: x[rows], obs), info)
        if self._choices is None:
            return obs
        self._current = info["current_player"][order]
        moves = self._current[:, None, None] == np.arange(self._players)[:, None]  # [G, P, 1]
        legal = (info[self._legal][order] != 0).reshape(self._games, 1, self._choices)
        mask = np.concatenate([legal & moves, ~moves], -1).reshape(self.spec.num_envs, -1)
        return {**(obs if isinstance(obs, dict) else {"obs": obs}), ACTION_MASK: mask}


def _by_game(info: dict[str, Any]) -> Array:
    """Return the order of the players' rows that groups them by game."""
    return np.argsort(info["players"]["env_id"], kind="stable")
