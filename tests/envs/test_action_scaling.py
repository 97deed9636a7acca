"""What stands between policy and environment, for actions of several parts; rewards clipped, scaled and the user's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.envs.jax_env import Definition, build
from jrl.envs.scaling import action_transform, reward_transform, scale_actions
from jrl.envs.transform import transformed
from jrl.fields.env import EnvConfig
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, StepResult, Tuple

FORCE = Box((1,), "float32", 0.0, 10.0)
ACTION = Dict((("move", Tuple((Discrete(3), FORCE))), ("aim", Box((2,), "float32", -4.0, 2.0))))
POLICYS = {
    "move": (np.int32([1, 2]), np.float32([[-1.0], [0.5]])),
    "aim": np.float32([[0.0, 1.0], [-1.0, 3.0]]),
}


def check(taken):
    """Normalised: 5 + 5 a of a force, -1 + 3 a of an aim; clipped to [-4, 2] afterwards."""
    assert taken["move"][0].tolist() == [1, 2]
    np.testing.assert_allclose(taken["move"][1], [[0.0], [7.5]])
    np.testing.assert_allclose(taken["aim"], [[-1.0, 2.0], [-4.0, 2.0]])


def test_boxes_of_a_tree_are_transformed():
    space, fn = action_transform(ACTION, normalize=True, clip=True)
    assert space["move"] == Tuple((Discrete(3), Box((1,), "float32", -1.0, 1.0)))
    assert [b.tolist() for b in space["aim"].bounds()] == [[-1, -1], [1, 1]]
    assert [name for name, _ in space.items] == ["move", "aim"]
    check(fn(POLICYS))
    check(jax.jit(fn)(POLICYS))


def test_a_tree_without_boxes_stays():
    space = Dict((("a", Discrete(3)), ("b", Tuple((Discrete(2),)))))
    assert action_transform(space, normalize=True, clip=True) == (space, None)
    assert action_transform(ACTION, normalize=False, clip=False) == (ACTION, None)


def recorded() -> Definition:
    """The observation is the last action, as one vector."""
    flat = lambda a: jnp.concatenate([a["move"][0][:, None] * 1.0, a["move"][1], a["aim"]], -1)
    step = lambda state, action, draws: (flat(action), draws[0], draws[0] > 2)
    return Definition(Box((4,)), ACTION, None, 1, lambda draws: jnp.zeros((2, 4)), step, lambda state: state)


class Host:
    spec = EnvSpec(Box((1,)), ACTION, 2)

    def step(self, action):
        self.taken = action
        return StepResult(np.zeros((2, 1)), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))


def test_trees_reach_the_environment():
    inner = Host()
    env = transformed(inner, partial(scale_actions, env=EnvConfig()))
    env.step(jax.tree.map(jnp.asarray, POLICYS))
    check(inner.taken)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(inner.taken))
    assert env.spec.env_action == ACTION and env.taken is inner.taken
    graph = transformed(build(recorded(), 2), partial(scale_actions, env=EnvConfig()))
    state, _ = jax.jit(graph.reset)(jax.random.key(0))
    _, result = jax.jit(graph.step)(state, POLICYS, jax.random.key(1))
    np.testing.assert_allclose(result.obs, [[1, 0, -1, 2], [2, 7.5, -4, 2]])


REWARDS = np.float32([[-7.0, -0.5], [0.25, 3.0]])


def test_rewards_are_clipped_then_scaled_then_the_users():
    kinds = lambda **how: np.asarray(reward_transform(2.0, is_atari=False, **how)(jnp.asarray(REWARDS)))
    np.testing.assert_allclose(kinds(scale=10.0), [[-20, -5], [2.5, 20]])
    np.testing.assert_allclose(kinds(scale=10.0, custom=lambda r: r + 1), [[-19, -4], [3.5, 21]])
    np.testing.assert_allclose(kinds(custom=lambda r: r + 1), [[-1, 0.5], [1.25, 3]])
    scaled = reward_transform(None, is_atari=False, scale=0.5)
    np.testing.assert_allclose(scaled(jnp.asarray(REWARDS)), REWARDS / 2)
    whole = reward_transform(None, is_atari=False, custom=lambda r: (r > 0).astype(jnp.int32))(jnp.asarray(REWARDS))
    assert whole.dtype == jnp.float32 and whole.tolist() == [[0, 0], [1, 1]]
    assert reward_transform(None, is_atari=False, scale=1.0) is None
    assert reward_transform(True, is_atari=False, scale=1.0) is jnp.sign


def test_a_users_reward_of_another_shape():
    fn = reward_transform(None, is_atari=False, custom=lambda r: r.sum(0))
    with pytest.raises(InputError, match=r"custom\.reward: expected rewards of shape \(2, 2\), got \(2,\)"):
        jax.jit(fn)(REWARDS)
