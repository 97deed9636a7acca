"""Two-player turn-based board games: TicTacToe-v0 and ConnectFour-v0."""

import jax.numpy as jnp
from flax import struct

from jrl.envs import pictures
from jrl.envs.multi_agent import MultiDefinition
from jrl.types import Array, Box, Dict, Discrete, MultiBinary, PyTree


@struct.dataclass
class _Board:
    pieces: Array  # [G, 2, rows, cols] bool, by player
    turn: Array  # [G] i32, index of the player that moves


def tic_tac_toe() -> MultiDefinition:
    """Returns the definition of TicTacToe-v0: players put pieces on a 3 x 3 board in turn; three in a line win.

    Actions: squares 0 .. 8, row by row, and 9, to wait. See `_build_game` for the rest.
    """
    return _build_game(3, 3, 3, falls=False)


def connect_four() -> MultiDefinition:
    """Returns the definition of ConnectFour-v0: players drop pieces into 7 columns of 6 rows; four in a line win.

    Actions: columns 0 .. 6, and 7, to wait. A piece falls to the lowest free square; row 5 is the lowest. See
    `_build_game` for the rest.
    """
    return _build_game(6, 7, 4, falls=True)


def _build_game(rows: int, cols: int, length: int, *, falls: bool) -> MultiDefinition:
    """Returns a game of player_0, who begins, and player_1. It ends for both with a line or a full board.

    The winner gets +1 and the loser -1; a full board without a line gives 0. The waiting player may only wait, and its
    action is ignored. The moving player must move. A move that the mask forbids loses.

    Observation: obs [2 * rows * cols + 1] f32: own pieces, square by square, the other player's pieces, and 1 if the
    agent moves; action_mask over the moves and, last, waiting. Global state, of the same shape: the pieces of player_0,
    the pieces of player_1, and 1 if player_0 moves. The observation is flat: three planes would be taken for an image,
    and convolutions over so few squares cost more than they find.
    """
    moves, squares = cols if falls else rows * cols, rows * cols

    def reset(draws: Array) -> _Board:
        num_envs = draws.shape[1]
        return _Board(jnp.zeros((num_envs, 2, rows, cols), bool), jnp.zeros(num_envs, jnp.int32))

    def free(pieces: Array) -> Array:
        """Returns the valid moves [G, moves] bool."""
        taken = jnp.any(pieces, axis=1)
        return ~(taken[:, 0] if falls else taken.reshape(-1, moves))

    def square(pieces: Array, action: Array) -> Array:
        """Returns the square of the new piece [G, rows, cols] bool; all False for the waiting action."""
        if not falls:
            return (action[:, None] == jnp.arange(moves)[None]).reshape(-1, rows, cols)
        at_column = action[:, None] == jnp.arange(cols)[None]
        lowest = rows - 1 - pieces.any(1).sum(1)  # [G, cols]
        return at_column[:, None] & (jnp.arange(rows)[None, :, None] == lowest[:, None])

    def step(state: _Board, actions: Array, draws: Array) -> tuple[_Board, Array, Array]:
        action = jnp.take_along_axis(actions, state.turn[:, None], axis=1)[:, 0]
        open_moves = jnp.pad(free(state.pieces), ((0, 0), (0, 1)))
        legal = jnp.take_along_axis(open_moves, action[:, None], axis=1)[:, 0]
        moves_now = state.turn[:, None] == jnp.arange(2)[None]
        put = (legal[:, None] & moves_now)[:, :, None, None] & square(state.pieces, action)[:, None]
        pieces = state.pieces | put
        won = (_has_line(pieces, length) & moves_now).any(-1)
        score = jnp.where(legal, jnp.where(won, 1.0, 0.0), -1.0)  # score of the moving player
        over = won | ~legal | jnp.any(pieces, axis=1).all((1, 2))
        reward = jnp.where(moves_now, score[:, None], -score[:, None])
        state = _Board(pieces, jnp.where(over, state.turn, 1 - state.turn))
        return state, reward, jnp.stack([over, over], -1)

    def observe(state: _Board) -> PyTree:
        mine = state.turn[:, None] == jnp.arange(2)[None]  # [G, 2]
        allowed = mine[:, :, None] & free(state.pieces)[:, None]
        waits = ~allowed.any(-1, keepdims=True)  # also on a full board
        own = state.pieces.reshape(-1, 2, squares)
        return {
            "action_mask": jnp.concatenate([allowed, waits], -1).astype(jnp.int8),
            "obs": jnp.concatenate([own, own[:, ::-1], mine[:, :, None]], -1).astype(jnp.float32),
        }

    board = Box((2 * squares + 1,), "float32", 0.0, 1.0)
    return MultiDefinition(
        agents=("player_0", "player_1"),
        observation=Dict((("action_mask", MultiBinary((moves + 1,))), ("obs", board))),
        action=Discrete(moves + 1),
        max_episode_steps=rows * cols,
        num_draws=1,
        reset=reset,
        step=step,
        observe=observe,
        state=board,
        view=lambda state: observe(state)["obs"][:, 0],
        draw=lambda state: pictures.board(state.pieces),
        fps=2.0,
    )


def _has_line(pieces: Array, length: int) -> Array:
    """Returns whether `length` pieces of [..., rows, cols] bool form a row, column or diagonal, [...] bool."""
    rows, cols = pieces.shape[-2:]
    found = jnp.zeros(pieces.shape[:-2], bool)
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        height, width = rows - (length - 1) * down, cols - (length - 1) * abs(right)
        line = jnp.ones((*pieces.shape[:-2], height, width), bool)
        for i in range(length):
            top, left = i * down, i * right if right >= 0 else length - 1 - i
            line &= pieces[..., top : top + height, left : left + width]
        found |= line.any((-2, -1))
    return found
