"""Environments with goals: rewards and ends follow from goals alone, and the dynamics are those of a plain loop."""

import jax
import numpy as np
import pytest

from jrl import envs
from jrl.envs.goals import MAZES
from jrl.envs.jax_ids import load_definition
from jrl.errors import InputError


def play(id, steps, actions, **options):
    """(obs, action, result) of so many steps of 8 environments, on the host; `actions`: obs -> [8, *]."""
    env = envs.make(id, backend="jax", num_envs=8, options=options)
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    step = jax.jit(env.step)
    for i in range(steps):
        action = actions(jax.device_get(obs))
        state, result = step(state, action, jax.random.key(i))
        yield jax.device_get(obs), np.asarray(action), jax.device_get(result)
        obs = result.obs


def check_ends(id, results, **options):
    """Holds rewards and ends against `goal_reward`, off the steps that reset; returns how often goals were reached."""
    goal_reward, over, reached = load_definition(id, options).goal_reward, np.zeros(8, bool), 0
    for _, _, result in results:
        reward, end = goal_reward(result.obs["achieved_goal"], result.obs["desired_goal"])
        np.testing.assert_array_equal(result.reward, np.where(over, 0.0, reward))
        np.testing.assert_array_equal(result.terminated, ~over & end)
        reached += result.terminated.sum()
        over = result.terminated | result.truncated
    return reached


def test_bits_flip_one_at_a_time():
    rng = np.random.default_rng(0)
    results = list(play("BitFlip-v0", 60, lambda obs: rng.integers(0, 4, 8).astype(np.int32), bits=4))
    over = np.zeros(8, bool)
    for obs, action, result in results:
        wanted = obs["achieved_goal"] ^ np.eye(4, dtype=np.int8)[action]
        np.testing.assert_array_equal(result.obs["achieved_goal"][~over], wanted[~over])
        np.testing.assert_array_equal(result.obs["desired_goal"][~over], obs["desired_goal"][~over])
        np.testing.assert_array_equal(result.obs["observation"], result.obs["achieved_goal"])
        over = result.terminated | result.truncated
    assert check_ends("BitFlip-v0", results, bits=4) > 10
    assert any(result.truncated.any() for _, _, result in results)


@pytest.mark.parametrize("maze", MAZES)
def test_a_point_stays_in_its_maze(maze):
    rng = np.random.default_rng(0)

    def towards_the_goal(obs):
        return np.clip(obs["desired_goal"] - obs["achieved_goal"] + rng.normal(size=(8, 2)), -1, 1).astype(np.float32)

    results = list(play("PointMaze-v0", 250, towards_the_goal, maze=maze))
    free, stopped = np.array([[cell == "." for cell in row] for row in MAZES[maze]]), 0
    for obs, _, result in results:
        for x in (result.obs["achieved_goal"], result.obs["desired_goal"]):
            assert free[tuple(np.floor(x).astype(int).T)].all()
        velocity = result.obs["observation"][:, 2:]
        moved = result.obs["achieved_goal"] - obs["achieved_goal"]
        is_same = (result.obs["desired_goal"] == obs["desired_goal"]).all(1)
        np.testing.assert_allclose(moved[is_same], velocity[is_same], atol=1e-5)
        stopped += (velocity[is_same] == 0).sum()
    assert stopped > 10  # at walls
    assert check_ends("PointMaze-v0", results, maze=maze) > 5


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("BitFlip-v0", {"bits": 0}, r"env\.options\.bits: BitFlip-v0: expected at least 1, got 0: use 15"),
        ("PointMaze-v0", {"maze": "x"}, r"env\.options\.maze: PointMaze-v0: expected u or medium, got 'x': use u"),
    ],
)
def test_options_that_are_refused(id, options, message):
    with pytest.raises(InputError, match=message):
        load_definition(id, options)
