"""ParametricCartPole-v0: rows worked out by hand, and properties of many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import jitted

from jrl.envs import classic
from jrl.envs.jax_env import build
from jrl.envs.parametric import parametric_cartpole
from jrl.types import InputError, element


def fits(space, tree, num_envs):
    like = jax.tree.map(lambda x: ((num_envs, *x.shape), x.dtype), element(space))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == like


# ---------------------------------------------------------------- ParametricCartPole-v0


def slots(obs):
    """The slots that push left and right, of observations of which each has one."""
    valid = np.asarray(obs["avail_actions"])
    assert (valid.sum(-2) == 1).all()
    np.testing.assert_array_equal(valid.sum(-1), np.asarray(obs["action_mask"]))  # and they are different slots
    return valid.argmax(-2)


def test_valid_slots_push_the_cart_and_others_end_the_episode():
    """Slots by hand: draws of 0.3 and 0.5 of 8 slots are slot 2, and 3 + floor(0.5 * 7) = 6."""
    task, plain = jitted(parametric_cartpole()), jitted(classic.cartpole())
    draws = jnp.concatenate([jnp.full((1, 3), 0.3), jnp.full((5, 3), 0.5)])  # the cart begins at rest in the middle
    state = task.reset(draws)
    obs = task.observe(state)
    fits(task.observation, obs, 3)
    assert slots(obs).tolist() == [[2, 6]] * 3
    new = draws.at[0].set(0.95).at[1].set(0.01)  # slot 7, and the one after it, 0
    state, reward, end = task.step(state, jnp.int32([2, 6, 3]), new)
    assert reward.tolist() == [1, 1, 0] and end.tolist() == [False, False, True]
    pushed, _, _ = plain.step((jnp.zeros(2),) * 4, jnp.int32([0, 1]), None)
    np.testing.assert_allclose(task.observe(state)["cart"][:2], plain.observe(pushed), rtol=1e-6)
    assert task.observe(state)["cart"][2].tolist() == [0, 0, 0, 0]
    assert slots(task.observe(state)).tolist() == [[7, 0]] * 3


@pytest.mark.parametrize("fixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_slots_are_drawn_anew_for_each_step(fixed):
    task = parametric_cartpole(num_actions=5, fixed=fixed)
    env = build(task, 64)

    def step(carry, key):
        state, obs = carry
        state, result = env.step(state, obs["action_mask"].argmax(-1).astype(jnp.int32), key)
        return (state, result.obs), (result.obs, result.terminated, result.reward)

    @jax.jit
    def play():
        return jax.lax.scan(step, env.reset(jax.random.key(0)), jax.random.split(jax.random.key(1), 20))[1]

    obs, end, reward = jax.device_get(play())
    left, right = np.moveaxis(slots(obs), -1, 0)
    halves = ({0, 1}, {2, 3, 4})
    assert (set(left.flat), set(right.flat)) == (halves if fixed else ({*range(5)},) * 2)
    assert (left[1:] != left[:-1]).any(0).all()
    # valid actions end an episode as CartPole's do: none of them within the first steps
    assert not end[:7].any() and (reward[:7] == 1).all()


def test_two_actions_are_the_least():
    task = jitted(parametric_cartpole(2))
    assert slots(task.observe(task.reset(jnp.full((6, 1), 0.9)))).tolist() == [[1, 0]]
    for bad in (1, 2.0):
        with pytest.raises(InputError, match=r"env\.options\.num_actions"):
            parametric_cartpole(bad)
