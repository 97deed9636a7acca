"""Tasks with goals and sparse rewards, for hindsight experience replay. The mean return is the rate of success.

Observations are dicts `observation`, `achieved_goal` and `desired_goal`, as Gymnasium-Robotics has them. The episode
ends at the goal, with reward 1; all other rewards are 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs.jax_env import Definition, index
from jrl.types import Array, Box, Dict, Discrete, InputError, Leaf, MultiBinary

# walls #, free cells .
MAZES = {
    "u": ("...", "##.", "..."),
    "medium": ("..##..", "..#...", "#...##", "..#...", ".#..#.", "...#.."),
}


def _space(observation: Leaf, goal: Leaf) -> Dict:
    return Dict((("observation", observation), ("achieved_goal", goal), ("desired_goal", goal)))


def _observe(observation: Array, achieved: Array, desired: Array) -> dict[str, Array]:
    return {"observation": observation, "achieved_goal": achieved, "desired_goal": desired}


@struct.dataclass
class _Bits:
    bits: Array  # [B, n] i8
    goal: Array  # [B, n] i8


def bit_flip(bits: int = 15) -> Definition:
    """Returns the definition of BitFlip-v0: flip bits, one per step, until they equal the goal.

    The example of hindsight experience replay (arXiv:1707.01495, section 3.1, with rewards 0 and 1, not -1 and 0). Bits
    and goal are uniform; an episode has at most `bits` steps.

    Raises:
      InputError: no bits.
    """
    if bits < 1:
        raise InputError(f"env.options.bits: BitFlip-v0: expected at least 1, got {bits}: use 15")

    def reset(draws):
        drawn = (draws.T < 0.5).astype(jnp.int8)
        return _Bits(drawn[:, :bits], drawn[:, bits:])

    def goal_reward(achieved, desired):
        at_goal = (achieved == desired).all(-1)
        return at_goal.astype(jnp.float32), at_goal

    def step(state, action, draws):
        flipped = state.bits ^ jax.nn.one_hot(action, bits, dtype=jnp.int8)
        return state.replace(bits=flipped), *goal_reward(flipped, state.goal)

    space = MultiBinary((bits,))
    return Definition(
        observation=_space(space, space),
        action=Discrete(bits),
        max_episode_steps=bits,
        num_draws=2 * bits,
        reset=reset,
        step=step,
        observe=lambda state: _observe(state.bits, state.bits, state.goal),
        goal_reward=goal_reward,
    )


@struct.dataclass
class _Point:
    position: Array  # [B, 2] f32, row and column of the maze; cell (i, j) is [i, i + 1) x [j, j + 1)
    velocity: Array  # [B, 2] f32, cells per step
    goal: Array  # [B, 2] f32


def point_maze(maze: str = "u", force: float = 0.02, radius: float = 0.45) -> Definition:
    """Returns the definition of PointMaze-v0: push a point through a maze to a goal, in at most 100 steps.

    As Gymnasium-Robotics' PointMaze, with dynamics in JAX. Start and goal are within 0.25 of the centre of a free cell,
    all cells equally likely. A wall stops the point.

    Args:
      maze: "u" or "medium".
      force: change of the velocity by an action of 1, in cells per step. Friction takes a tenth of the velocity.
      radius: distance to the goal, in cells, at which the episode ends.
    Raises:
      InputError: unknown maze.
    """
    if maze not in MAZES:
        raise InputError(f"env.options.maze: PointMaze-v0: expected {' or '.join(MAZES)}, got {maze!r}: use u")
    free = np.array([[cell == "." for cell in row] for row in MAZES[maze]])
    cells = jnp.asarray(np.argwhere(free), jnp.float32) + 0.5
    is_free = jnp.asarray(np.pad(free, 1))  # with walls around

    def place(draws):
        return cells[index(draws[0], len(cells))] + (draws[1:3].T - 0.5) / 2

    def reset(draws):
        position = place(draws[:3])
        return _Point(position, jnp.zeros_like(position), place(draws[3:]))

    def goal_reward(achieved, desired):
        at_goal = jnp.linalg.norm(achieved - desired, axis=-1) <= radius
        return at_goal.astype(jnp.float32), at_goal

    def step(state, action, draws):
        velocity = 0.9 * state.velocity + jnp.reshape(force, (-1, 1)) * jnp.clip(action, -1.0, 1.0)
        position = state.position
        for axis in (0, 1):  # one axis after the other, so that the point slides along walls
            moved = position.at[:, axis].add(velocity[:, axis])
            row, column = jnp.floor(moved).astype(jnp.int32).T + 1
            passes = is_free[row, column]
            position = jnp.where(passes[:, None], moved, position)
            velocity = velocity.at[:, axis].multiply(passes)
        reward, at_goal = goal_reward(position, state.goal)
        return _Point(position, velocity, state.goal), reward, at_goal

    def observe(state):
        observation = jnp.concatenate([state.position, state.velocity], -1)
        return _observe(observation, state.position, state.goal)

    size = tuple(map(float, free.shape))
    goal = Box((2,), "float32", 0.0, size)
    fastest = 10 * force
    return Definition(
        observation=_space(Box((4,), "float32", (0.0, 0.0, -fastest, -fastest), (*size, fastest, fastest)), goal),
        action=Box((2,), "float32", -1.0, 1.0),
        max_episode_steps=100,
        num_draws=6,
        reset=reset,
        step=step,
        observe=observe,
        goal_reward=goal_reward,
    )
