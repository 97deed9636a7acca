"""Agents of different spaces that step on the host: each kind has columns of its own."""

import numpy as np
import pytest

from jrl.envs.make import make
from jrl.types import Box, Discrete

NAME = "agent_envs"


@pytest.mark.parametrize("name", ["Unequal", "UnequalDicts"])
def test_agents_of_different_spaces_have_columns_by_kind(name):
    env = make(f"{NAME}:{name}", num_envs=2)
    assert env.spec.kinds == ((0, 2), (1,)) and env.spec.num_envs == 6
    walker, other = env.spec.observation.items
    assert walker == Box((2,), "float32", -100.0, 100.0) and other["k"] == Discrete(3) and other["t"].shape == (1, 2)
    assert env.spec.action.items[0] == Discrete(3) and env.spec.action.items[1] == Box((2,), low=-1.0, high=1.0)
    assert env.spec.env_action.items[1] == Box((2,), low=-2.0, high=4.0)
    walkers, others = env.reset()
    np.testing.assert_array_equal(walkers[:, 0], [0, 2, 0, 2])
    np.testing.assert_array_equal(others["k"], [1, 1])
    action = np.array([0, 1, 2, 0], np.int32), np.array([[1.0, -1.0], [0.0, 1.0]], np.float32)
    rows = [env.step(action) for _ in range(6)]
    first, second = env.foreach_env(lambda one: one.given)
    assert first[0]["w_0"] == 0 and first[0]["w_2"] == 1 and second[0]["w_0"] == 2 and second[0]["w_2"] == 0
    np.testing.assert_array_equal(first[0]["w_1"], [4.0, -2.0])
    np.testing.assert_array_equal(second[0]["w_1"], [1.0, 4.0])
    np.testing.assert_array_equal(rows[0].reward, [1, 2, 3, 1, 2, 3])  # of all agents, in their order
    np.testing.assert_array_equal(np.stack([row.terminated[:3] for row in rows]).nonzero(), [[1, 3, 4], [0, 1, 2]])
    with pytest.raises(ValueError, match="actions"):
        env.step(np.zeros(6, np.int32))


def test_agents_of_different_spaces_by_turns_have_masks_of_their_own():
    env = make(f"{NAME}:Duel", num_envs=1)
    assert env.spec.kinds == ((0,), (1,)) and [part.n for part in env.spec.action.items] == [4, 3]
    first, second = env.reset()
    np.testing.assert_array_equal(first["action_mask"], [[1, 1, 1, 0]])
    np.testing.assert_array_equal(second["action_mask"], [[0, 0, 1]])
    first, second = env.step((np.array([2], np.int32), np.array([2], np.int32))).obs
    np.testing.assert_array_equal(first["action_mask"], [[0, 0, 0, 1]])
    np.testing.assert_array_equal(second["action_mask"], [[1, 1, 0]])
    assert first["left"] == second["left"] == 4


def test_a_global_view_is_shown_to_each_kind():
    walkers, others = make(f"{NAME}:Unequal", num_envs=1, state=True).reset()
    np.testing.assert_array_equal(walkers["state"], [[0, 3, 7]] * 2)
    np.testing.assert_array_equal(others["state"], [[0, 3, 7]])
