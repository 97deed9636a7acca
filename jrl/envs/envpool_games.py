"""EnvPool's games of several players, stepped on the host: each player of each game has a slot in the batch.

EnvPool gives a row for each player and one for each game, in the order in which its threads were done; `env_id` says of
which game each is. Here they are in order: player k of game i is column i * P + k. All players of a game end with it.

Some games take an action of each player. In the others the players take turns, `current_player` says whose it is: who
waits has a row like any other, whose action_mask allows the last action alone, as in `jrl.envs.multi_host`.
"""

from typing import Any

import jax
import numpy as np

from jrl.envs import masks
from jrl.envs import spec as spaces
from jrl.envs.envpool_env import Pool, info_shapes, num_players
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK
from jrl.types import Array, Discrete, EnvSpec, InputError, PyTree, Several, Space, StepResult

_LEGAL = "legal_action_mask"  # the entry of the infos that is the mask of whoever moves, where the config names none


class EnvPoolGames(Pool):
    """A `jrl.types.Env` over games of P players. `cfg.num_envs` counts games.

    Raises:
      InputError: see `Pool`; `state`, a view of all, which they do not have; players who take turns with actions that
        have no number.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int, state: bool = False):
        if state:
            raise InputError(f"multi_agent.state: EnvPool's {cfg.id} has no view of all: leave it out")
        super().__init__(cfg, seed=seed)
        self._games, self._players = cfg.num_envs, num_players(cfg.id)
        self._key = next(name for name in self._pool.spec.action_array_spec if not name.endswith("env_id"))
        self._choices: int | None = None  # of whoever moves; None: all do
        self._legal = _LEGAL
        try:
            observation, action = self._shown(cfg)
        except InputError:
            self.close()
            raise
        agents = tuple(f"player_{k}" for k in range(self._players))
        # no limit is known: the games take max_episode_steps, and go on beyond it
        self.spec = EnvSpec(observation, action, self._games * self._players, agents=agents)
        self._over = np.zeros(self._games, bool)
        self._current = np.zeros(self._games, np.int32)  # who moves

    def _shown(self, cfg: EnvConfig) -> tuple[Space, Space]:
        """Returns the spaces of a player; where players take turns, with the action that waits and the mask."""
        observation, action = self.spec.observation, self.spec.action
        if self._key.startswith("players."):
            if cfg.action_mask_info is not None:
                mend = f"its players all act at once and have no mask in {cfg.action_mask_info}: leave it out"
                raise InputError(f"env.action_mask_info: {cfg.id} has several agents, and {mend}")
            return observation, action
        infos = info_shapes(self._pool)
        if "current_player" not in infos or not isinstance(action, Discrete):
            raise InputError(
                f"env.id {cfg.id}: expected Discrete actions and infos that say who moves (current_player), got "
                f"{action} and {', '.join(infos)}: use a game whose players take turns so, or all act at once"
            )
        self._legal, self._choices = cfg.action_mask_info or _LEGAL, action.n
        masks.shape(self._legal, infos, action, cfg.id)
        waiting = Discrete(action.n + 1)
        return spaces.with_mask(observation, waiting), waiting

    def _mask(self, id: str, name: str | None, observed: Any, action: Space) -> str | None:
        """Returns None: the infos have one mask per game, of the player who moves, and none per player."""
        return None

    def reset(self) -> PyTree:
        """Begins new games and returns their observations [B, *]."""
        obs, info = self._pool.reset()
        self._over[:] = False
        return self._seen(obs, info, np.argsort(info["env_id"]))

    def step(self, action: PyTree) -> StepResult:
        """Steps all games. Raises ValueError: no actions of `spec.action`, or the player who moves waits."""
        given = self._given(self._action(action, self.spec.num_envs))
        obs, reward, terminated, truncated, info = self._pool.step(given)
        order = np.argsort(info["env_id"])
        seen = self._seen(obs, info, order)
        to_all = lambda x: np.repeat(x, self._players)
        fresh = info["elapsed_step"][order] == 0  # the rows that begin a game
        terminated, truncated = terminated[order], truncated[order]
        self._over = terminated | truncated
        earned = np.where(to_all(fresh), np.float32(0), reward[_by_game(info)].astype(np.float32))
        several = Several(to_all(fresh), self._over, to_all(~self._over))
        return StepResult(seen, earned, to_all(terminated), to_all(truncated), several=several)

    def _given(self, action: Array) -> dict[str, Array]:
        """Returns actions [B] as the pool takes them: of each player, or of those who move."""
        games = np.arange(self._games, dtype=np.int32)
        if self._choices is None:
            return {self._key: action, "env_id": games, "players.env_id": np.repeat(games, self._players)}
        moves = action.reshape(self._games, self._players)[games, self._current]
        if (waits := (moves == self._choices) & ~self._over).any():
            game = int(waits.argmax())
            raise ValueError(
                f"game {game}: player_{self._current[game]} is to move, and its action was to wait, which its "
                "action_mask rules out"
            )
        moves = np.where(self._over, 0, moves).astype(action.dtype)  # the next step of those begins another game
        return {self._key: moves, "env_id": games, "players.env_id": games}

    def _seen(self, obs: Any, info: dict[str, Any], order: Array) -> PyTree:
        """Returns the observations of all players; `order` [G] sorts the rows of games."""
        self.infos.of_pool(info)
        rows = _by_game(info)
        seen = self._observe(jax.tree.map(lambda x: x[rows], obs), info)
        if self._choices is None:
            return seen
        self._current = info["current_player"][order]
        moves = self._current[:, None, None] == np.arange(self._players)[:, None]  # [G, P, 1]
        legal = (info[self._legal][order] != 0).reshape(self._games, 1, self._choices)
        mask = np.concatenate([legal & moves, ~moves], -1).reshape(self.spec.num_envs, -1)
        return {**(seen if isinstance(seen, dict) else {"obs": seen}), ACTION_MASK: mask}


def _by_game(info: dict[str, Any]) -> Array:
    """Returns the order of the players' rows in which those of a game follow one another."""
    return np.argsort(info["players"]["env_id"], kind="stable")
