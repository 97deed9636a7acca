"""Plays a trained policy of TicTacToe-v0 or ConnectFour-v0 against a player that looks one move ahead.

    python scripts/one_ply_games.py runs/RUN                        # acts by search, if the algorithm searches
    python scripts/one_ply_games.py runs/RUN --by network --games 1000
    python scripts/one_ply_games.py runs/RUN --set algo.search.simulations=200

The player takes a move that wins at once, else a move that keeps the other player from winning at once, else a random
move. The policy is greedy; it begins one half of the games. Prints wins, draws and losses of the policy by seat.
"""

import argparse
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs import board_games, multi_agent
from jrl.envs.board_games import _Board
from jrl.errors import InputError
from jrl.run import build_collect
from jrl.types import Array, Key

GAMES = {"TicTacToe-v0": board_games.tic_tac_toe, "ConnectFour-v0": board_games.connect_four}


def one_ply(definition: multi_agent.MultiDefinition, board: _Board, key: Key) -> Array:
    """Returns the moves [G] i32 of a player that wins if it can, blocks if it must, and else moves at random."""
    mover = jnp.arange(len(board.turn)), board.turn
    allowed = definition.observe(board)["action_mask"][mover][:, :-1] == 1  # [G, moves]
    num_moves = allowed.shape[-1]

    def wins(turn: Array, move: int) -> Array:
        action = jnp.full((len(turn), 2), move, jnp.int32)
        _, reward, _ = definition.step(_Board(board.pieces, turn), action, jnp.zeros((1, len(turn))))
        return reward[jnp.arange(len(turn)), turn] > 0

    win, block = (jnp.stack([wins(turn, i) for i in range(num_moves)], -1) for turn in (board.turn, 1 - board.turn))
    rank = jnp.where(win, 3.0, jnp.where(block, 2.0, jnp.where(allowed, 1.0, 0.0)))
    return jnp.argmax(rank + jax.random.uniform(key, rank.shape, maxval=0.5), -1).astype(jnp.int32)


def play(path: str, games: int, by: str = "search", settings: Sequence[str] = (), seed: int = 0) -> list[Counter]:
    """Returns the results of the policy as the first and as the second player: win, draw and loss.

    Args:
      path: run directory or checkpoint.
      games: number of games, an even number.
      by: "search", or "network" for the network alone.
      settings: overrides of the run's config.
      seed: seed of the other player.
    Raises:
      InputError: the run is not of a board game, or `games` is odd.
    """
    found = build_collect.restore(path, best=None, settings=settings)
    name = found.config.env.id
    if name not in GAMES:
        raise InputError(f"{path}: expected a run on one of {', '.join(GAMES)}, got {name}: give another run")
    if games < 2 or games % 2:
        raise InputError(f"games: expected an even number from 2, got {games}: half of them begins the policy")
    definition = GAMES[name]()
    env, actor = multi_agent.build(definition, games), found.algo.actor(found.state)
    search = found.algo.act_in(env) if by == "search" and found.algo.act_in is not None else None
    seat = jnp.arange(games) % 2  # seat that the policy has

    @jax.jit
    def step(state, obs, key):
        other_key, key = jax.random.split(key)
        given = actor, obs, found.algo.carry(2 * games), key, False
        mine = (found.algo.act(*given) if search is None else search(*given, state)).action.reshape(games, 2)
        others = one_ply(definition, state.inner, other_key)
        action = jnp.where(jnp.arange(2)[None] == seat[:, None], mine, others[:, None])
        state, result = env.step(state, action.reshape(-1), key)
        return state, result.obs, result.reward.reshape(games, 2), result.several.over

    state, obs = env.reset(jax.random.key(seed))
    returns, running = np.zeros((games, 2)), np.ones(games, bool)
    for turn in range(definition.max_episode_steps):
        state, obs, reward, over = step(state, obs, jax.random.fold_in(jax.random.key(seed), turn))
        returns += np.where(running[:, None], reward, 0.0)
        running &= ~np.asarray(over)
        if not running.any():
            break
    mine = returns[np.arange(games), np.asarray(seat)]
    names = np.select([mine > 0, mine < 0], ["win", "loss"], "draw")
    return [Counter({name: int((names[i::2] == name).sum()) for name in ("win", "draw", "loss")}) for i in (0, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory or checkpoint")
    parser.add_argument("--games", type=int, default=200, help="number of games, an even number")
    parser.add_argument("--by", choices=("search", "network"), default="search", help="how the policy acts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the other player")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", help="override a key of the run's config"
    )
    args = parser.parse_args()
    try:
        results = play(args.run, args.games, args.by, args.set, args.seed)
    except InputError as e:
        parser.error(str(e))
    for name, found in zip(("first", "second"), results, strict=True):
        print(f"moves {name}: {dict(found)}")
    print(f"wins: {100 * sum(x['win'] for x in results) / args.games:.1f} %")


if __name__ == "__main__":
    main()
