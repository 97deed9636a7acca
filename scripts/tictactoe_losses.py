"""Counts the games of TicTacToe-v0 that a trained policy can lose, over all replies of the other player.

    python scripts/tictactoe_losses.py runs/RUN                     # acts by search, if the algorithm searches
    python scripts/tictactoe_losses.py runs/RUN --by network        # acts by the network alone
    python scripts/tictactoe_losses.py runs/RUN --set algo.search.simulations=200

The policy is greedy, so that it has one move in each position. Prints positions, games and results of both seats.
"""

import argparse
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs import board_games, multi_agent
from jrl.envs.board_games import _Board
from jrl.envs.multi_agent import GamesState
from jrl.run import build_collect

BATCH = 256  # positions per call
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]

Board = tuple[frozenset[int], frozenset[int]]  # squares of each player


def result(board: Board) -> str | None:
    """Returns the winner's number, "draw", or None: the game goes on."""
    for player, own in enumerate(board):
        if any(own.issuperset(line) for line in LINES):
            return str(player)
    return "draw" if len(board[0]) + len(board[1]) == 9 else None


def play(choose: Callable[[list[Board]], list[int]], seat: int) -> tuple[int, Counter]:
    """Returns the number of positions in which `seat` moves, and its results over all replies: wins, draws, losses.

    Args:
      choose: positions in which `seat` moves -> one square each.
      seat: 0 begins.
    """
    results, positions = Counter({"win": 0, "draw": 0, "loss": 0}), 0
    boards: Counter = Counter({(frozenset(), frozenset()): 1})  # position -> number of games that lead to it
    for turn in range(9):
        player, after = turn % 2, Counter()
        moves: list[tuple[Board, int, int]] = []
        if player == seat:
            positions += len(boards)
            moves = [(board, square, boards[board]) for board, square in zip(boards, choose(list(boards)), strict=True)]
        else:
            moves = [(b, s, games) for b, games in boards.items() for s in range(9) if s not in b[0] | b[1]]
        for board, square, games in moves:
            illegal = square in board[0] | board[1] or square not in range(9)
            own = board[player] | {square}
            after_move: Board = (own, board[1]) if player == 0 else (board[0], own)
            end = str(1 - player) if illegal else result(after_move)
            if end is None:
                after[after_move] += games
            else:
                results["draw" if end == "draw" else "win" if end == str(seat) else "loss"] += games
        boards = after
    return positions, results


def chooser(
    path: str, by: str = "search", settings: Sequence[str] = ()
) -> Callable[[int], Callable[[list[Board]], list[int]]]:
    """Returns seat -> `choose` of `play` for the policy of a run or checkpoint, with overrides of its config."""
    found = build_collect.restore(path, best=None, settings=settings)
    env = multi_agent.build(board_games.tic_tac_toe(), BATCH)
    actor = found.algo.actor(found.state)
    search = found.algo.act_in(env) if by == "search" and found.algo.act_in is not None else None

    @jax.jit
    def act(pieces, turn):
        count = jnp.full((BATCH,), pieces.sum((1, 2, 3))[0], jnp.int32)
        games = GamesState(_Board(pieces, turn), count, jnp.ones((BATCH, 2), bool))
        obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), board_games.tic_tac_toe().observe(games.inner))
        given = actor, obs, found.algo.carry(2 * BATCH), jax.random.key(0), False
        out = found.algo.act(*given) if search is None else search(*given, games)
        return out.action.reshape(BATCH, 2)

    def choose(seat: int, boards: list[Board]) -> list[int]:
        squares: list[int] = []
        for first in range(0, len(boards), BATCH):
            part = boards[first : first + BATCH]
            pieces = np.zeros((BATCH, 2, 9), bool)
            for i, board in enumerate(part):
                for player in range(2):
                    pieces[i, player, list(board[player])] = True
            action = act(pieces.reshape(BATCH, 2, 3, 3), np.full(BATCH, seat, np.int32))
            squares += np.asarray(action)[: len(part), seat].tolist()
        return squares

    return lambda seat: functools.partial(choose, seat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory or checkpoint")
    parser.add_argument("--by", choices=("search", "network"), default="search", help="how the policy acts")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", help="override a key of the run's config"
    )
    args = parser.parse_args()
    choose = chooser(args.run, args.by, args.set)
    for seat, name in enumerate(("first", "second")):
        positions, results = play(choose(seat), seat)
        print(f"moves {name}: {positions} positions, {dict(results)}")


if __name__ == "__main__":
    main()
