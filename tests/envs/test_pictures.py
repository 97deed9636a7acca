"""Pictures of environments written in JAX: what is where."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import envs
from jrl.envs import pictures
from jrl.envs.history import add_history
from jrl.envs.transform import transformed

RED, BLUE, WHITE = pictures.color(0), pictures.color(1), (255, 255, 255)


def at(picture, x, y):
    """The colour at a share of the width and of the height, from the left and from the top."""
    return tuple(picture[int(y * picture.shape[0]), int(x * picture.shape[1])].tolist())


def played(id, actions, **options):
    """(environments, state) of two games, of which the second alone is played; actions by step and agent."""
    env = envs.make(id, num_envs=2, options=options)
    state, _ = env.reset(jax.random.key(0))
    for i, each in enumerate(actions):
        idle = [env.spec.action.n - 1] * len(each)
        action = jnp.array([*(idle if i else each), *each], jnp.int32)
        state, _ = env.step(state, action, jax.random.key(i))
    return env, state


@pytest.mark.slow
def test_pieces_lie_where_they_were_put():
    env, state = played("TicTacToe-v0", [(4, 9), (9, 2)])  # the middle, then the corner on the top right
    picture = env.draw(state, 1)
    assert at(picture, 0.5, 0.5) == RED and at(picture, 5 / 6, 1 / 6) == BLUE and at(picture, 1 / 6, 5 / 6) == WHITE
    env, state = played("ConnectFour-v0", [(0, 7), (7, 0)])
    picture = env.draw(state, 1)
    assert picture.shape[0] < picture.shape[1]  # six rows, seven columns
    assert at(picture, 1 / 14, 11 / 12) == RED and at(picture, 1 / 14, 9 / 12) == BLUE  # a piece falls on the other


@pytest.mark.slow
def test_discs_lie_where_agents_are_and_further_out_where_one_is():
    position, landmark = np.array([[-0.75, 0.0], [0.75, 0.0]]), np.array([[0.75], [-0.75]])
    picture = pictures.discs(position, landmark, 0.15)
    assert at(picture, 0.25, 0.25) == RED and at(picture, 0.5, 0.5) == BLUE and at(picture, 0.75, 0.75) != WHITE
    far = pictures.discs(position * 10, landmark, 0.15)
    assert at(far, 0.02, 0.02) == RED or RED in {tuple(c) for c in far.reshape(-1, 3).tolist()}
    env, state = played("SimpleSpread-v0", [])
    assert env.draw(state, 0).shape == (240, 240, 3) and (env.draw(state, 0) != env.draw(state, 1)).any()


@pytest.mark.parametrize(
    ("draw", "state", "tip"),
    [
        (pictures.cartpole, (0.0, 0.0, 0.2, 0.0), (0.5 + np.sin(0.2) * 0.9 / 4.8, (1.4 - 0.9 * np.cos(0.2)) / 2)),
        (pictures.pendulum, (np.pi / 2, 0.0), (0.5 - 0.9 / 2.6, 0.5)),
    ],
)
def test_where_a_pole_points(draw, state, tip):
    picture = draw(state)
    assert at(picture, *tip) != WHITE and at(picture, 1 - tip[0], tip[1]) == WHITE


def test_who_has_left_is_pale():
    env = envs.make("MultiAgentCartPole-v1", num_envs=1)
    state, _ = env.reset(jax.random.key(0))
    state = state.replace(inner=state.inner.replace(alive=jnp.array([[True, False]])))
    picture = env.draw(state, 0)
    assert picture.shape == (100, 482, 3)
    assert picture[:, :240].min() < 60 and picture[:, 242:].min() > 180


def test_five_stand_in_two_rows():
    small, large = np.zeros((4, 6, 3), np.uint8), np.zeros((5, 6, 3), np.uint8)
    whole = pictures.side_by_side([small, small, small, small, large])
    assert whole.shape == (5 + 2 + 5, 4 * 6 + 3 * 2, 3)
    assert (whole[7:, :6] == 0).all() and (whole[7:, 6:] == 190).all() and (whole[4] == 190).all()


@pytest.mark.slow
def test_environments_that_remember_are_drawn_as_they_are():
    env = envs.make("TicTacToe-v0", num_envs=2)
    around = transformed(env, functools.partial(add_history, prev_action=True))
    state, _ = around.reset(jax.random.key(0))
    state, _ = around.step(state, jnp.array([4, 9, 0, 9]), jax.random.key(1))
    assert at(around.draw(state, 0), 0.5, 0.5) == RED and at(around.draw(state, 1), 1 / 6, 1 / 6) == RED
