"""Small tasks that ask one question each: credit, memory."""

import jax
import jax.numpy as jnp
from flax import struct

from jrl.envs import classic
from jrl.envs.graph import Definition
from jrl.types import Array, Box, Discrete


def catch() -> Definition:
    """Catch-v0: move a paddle under a falling ball; +1 or -1 when it lands (bsuite; the board of EnvPool's Catch-v0).

    Observation [10, 5], ones at ball and paddle. Actions: left, stay, right.
    """
    rows, cols = 10, 5

    def reset(draws):  # state: ball row, ball column, paddle column
        ball = jnp.floor(draws[:, 0] * cols).astype(jnp.int32)
        return jnp.stack([jnp.zeros_like(ball), ball, jnp.full_like(ball, cols // 2)], -1)

    def step(state, action, draws):
        row, ball, paddle = state[:, 0] + 1, state[:, 1], jnp.clip(state[:, 2] + action - 1, 0, cols - 1)
        landed = row == rows - 1
        reward = jnp.where(landed, jnp.where(ball == paddle, 1.0, -1.0), 0.0)
        return jnp.stack([row, ball, paddle], -1), reward, landed

    def observe(state):
        ball = jax.nn.one_hot(state[:, 0] * cols + state[:, 1], rows * cols)
        paddle = jax.nn.one_hot((rows - 1) * cols + state[:, 2], rows * cols)
        return jnp.maximum(ball, paddle).reshape(-1, rows, cols)

    return Definition(Box((rows, cols), "float32", 0.0, 1.0), Discrete(3), None, 1, reset, step, observe)


def stateless_cartpole() -> Definition:
    """StatelessCartPole-v1: CartPole-v1 that shows positions only, [x, theta]: velocities must be remembered."""
    task = classic.cartpole()
    assert isinstance(task.observation, Box)
    low, high = task.observation.bounds()
    space = Box((2,), "float32", (float(low[0]), float(low[2])), (float(high[0]), float(high[2])))
    return task._replace(observation=space, observe=lambda state: jnp.stack([state[:, 0], state[:, 2]], -1))


@struct.dataclass
class _Tokens:
    history: Array  # [B, delay + 1] i32, the newest last
    steps: Array  # [B] i32


def repeat_after_me(delay: int = 1, episode_length: int = 100) -> Definition:
    """RepeatAfterMe-v0: say the token shown `delay` steps ago; +1 if right, -1 if not.

    Tokens are 0 or 1; before the first one, 0 is to be said. An episode has `episode_length` steps.
    """

    def token(draws):
        return jnp.floor(draws[:, 0] * 2).astype(jnp.int32)

    def reset(draws):
        new = token(draws)
        before = jnp.zeros((new.shape[0], delay), jnp.int32)
        return _Tokens(jnp.concatenate([before, new[:, None]], -1), jnp.zeros_like(new))

    def step(state, action, draws):
        reward = jnp.where(action == state.history[:, 0], 1.0, -1.0)
        history = jnp.concatenate([state.history[:, 1:], token(draws)[:, None]], -1)
        steps = state.steps + 1
        return _Tokens(history, steps), reward, steps >= episode_length

    return Definition(Discrete(2), Discrete(2), None, 1, reset, step, lambda state: state.history[:, -1])
