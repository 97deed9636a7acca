"""Small tasks, each for one ability: credit assignment, memory, curricula."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jrl.envs import classic
from jrl.envs.jax_env import Definition
from jrl.types import Array, Box, Discrete, InputError


def catch() -> Definition:
    """Returns the definition of Catch-v0: move a paddle under a falling ball; +1 or -1 when it lands.

    As in bsuite and EnvPool. Observation [10, 5], ones at ball and paddle. Actions: left, stay, right. State: ball row,
    ball column, paddle.
    """
    rows, cols = 10, 5

    def reset(draws):
        ball = jnp.floor(draws[0] * cols).astype(jnp.int32)
        return jnp.zeros_like(ball), ball, jnp.full_like(ball, cols // 2)

    def step(state, action, draws):
        row, ball, paddle = state
        row, paddle = row + 1, jnp.clip(paddle + action - 1, 0, cols - 1)
        landed = row == rows - 1
        reward = jnp.where(landed, jnp.where(ball == paddle, 1.0, -1.0), 0.0)
        return (row, ball, paddle), reward, landed

    def observe(state):
        row, ball, paddle = state
        board = jax.nn.one_hot(row * cols + ball, rows * cols)
        board = jnp.maximum(board, jax.nn.one_hot((rows - 1) * cols + paddle, rows * cols))
        return board.reshape(-1, rows, cols)

    return Definition(Box((rows, cols), "float32", 0.0, 1.0), Discrete(3), None, 1, reset, step, observe)


def stateless_cartpole(
    gravity: float = 9.8, masscart: float = 1.0, masspole: float = 0.1, length: float = 0.5, force_mag: float = 10.0
) -> Definition:
    """Returns the definition of StatelessCartPole-v1: CartPole-v1 with observation [x, theta], without velocities."""
    task = classic.cartpole(gravity, masscart, masspole, length, force_mag)
    assert isinstance(task.observation, Box)
    low, high = (tuple(bound[[0, 2]].tolist()) for bound in task.observation.bounds())
    space = Box((2,), "float32", low, high)
    return task._replace(observation=space, observe=lambda state: jnp.stack([state[0], state[2]], -1))


@struct.dataclass
class _Tokens:
    history: Array  # [B, delay + 1] i32, the newest last
    steps: Array  # [B] i32


def repeat_after_me(delay: int = 1, episode_length: int = 100) -> Definition:
    """Returns the definition of RepeatAfterMe-v0: repeat the token, 0 or 1, of `delay` steps ago (as RLlib's).

    +1 if right, -1 if not; before the first token the answer is 0. An episode has `episode_length` steps, and ends.

    Raises:
      InputError: a negative delay, or an episode without steps.
    """
    tokens = 2
    if delay < 0 or episode_length < 1:
        raise InputError(
            "env.options: RepeatAfterMe-v0: expected delay >= 0 and episode_length >= 1, "
            f"got {delay} and {episode_length}"
        )

    def token(draws):
        return jnp.floor(draws[0] * tokens).astype(jnp.int32)[:, None]

    def reset(draws):
        new = token(draws)
        before = jnp.zeros((new.shape[0], delay), jnp.int32)
        return _Tokens(jnp.concatenate([before, new], -1), jnp.zeros((new.shape[0],), jnp.int32))

    def step(state, action, draws):
        reward = jnp.where(action == state.history[:, 0], 1.0, -1.0)
        history = jnp.concatenate([state.history[:, 1:], token(draws)], -1)
        steps = state.steps + 1
        return _Tokens(history, steps), reward, steps >= episode_length

    space = Discrete(tokens)
    return Definition(space, space, None, 1, reset, step, lambda state: state.history[:, -1])


def corridor(length: float = 5.0) -> Definition:
    """Returns the definition of Corridor-v0: walk to the far end (as RLlib's SimpleCorridor); its length is a task.

    Observation [2], position and length. Actions: left (stays at the near end), right. Reward 1 at the far end, where
    the episode ends, else -0.01 per step; at most 200 steps. A new length takes effect at once: an agent beyond it
    arrives with the next step that does not lead back. A random walk needs about length squared steps.

    Raises:
      InputError: a length below 1.
    """
    if length < 1:
        raise InputError(f"env.options.length: Corridor-v0: expected at least 1, got {length}: use 5")

    def reset(draws, length):
        return jnp.zeros_like(length)

    def step(position, action, draws, length):
        position = jnp.maximum(position + jnp.where(action == 1, 1.0, -1.0), 0.0)
        arrived = position >= length
        return position, jnp.where(arrived, 1.0, -0.01), arrived

    def observe(position, length):
        return jnp.stack([position, length], -1)

    space = Box((2,), "float32", 0.0, math.inf)
    return Definition(space, Discrete(2), 200, 1, reset, step, observe, task=float(length))
