"""ParametricCartPole-v0, and the task of nested spaces in scripts: rows worked out by hand, and properties of many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import jitted
from test_scripts import load

from jrl import spaces
from jrl.envs import classic
from jrl.envs.jax_env import build
from jrl.envs.parametric import parametric_cartpole
from jrl.types import Box, Discrete, InputError, MultiBinary, MultiDiscrete, element


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


# ---------------------------------------------------------------- nested spaces

nested = load("nested").nested

# side 1 (0.6 of 2), place 2 (0.9 of 3), bits 0 and 1, force 2 * 0.75 - 1, digits 1 (0.5 of 2) and 0 (0.3 of 3)
DRAWS = [0.6, 0.9, 0.2, 0.7, 0.75, 0.5, 0.3]


def first(task, mask=()):
    return task.reset(jnp.float32([*DRAWS, *mask])[:, None])


def test_the_observation_by_hand():
    task = jitted(nested())
    obs = task.observe(first(task))
    fits(task.observation, obs, 1)
    image = np.zeros((8, 8), np.uint8)
    image[:, 4:] = 255
    np.testing.assert_array_equal(obs["image"][0, :, :, 0], image)
    assert obs["place"].tolist() == [2] and obs["bits"].tolist() == [[0, 1]]
    assert obs["pair"][0].tolist() == [[0.5]] and obs["pair"][1].tolist() == [[1, 0]]
    other = task.reset(jnp.float32(DRAWS).at[0].set(0.4)[:, None])
    np.testing.assert_array_equal(task.observe(other)["image"][0, :, :, 0], 255 - image)


arrays = functools.partial(jax.tree.map, lambda x: jnp.asarray(x)[None], is_leaf=lambda x: isinstance(x, list))
CASES = [
    ("discrete", np.int32(5), 1),
    ("discrete", np.int32(2), 0),
    ("multi_discrete", np.int32([1, 2, 1, 0]), 4),
    ("multi_discrete", np.int32([1, 0, 1, 2]), 2),
    ("multi_binary", np.int8([1, 0, 1]), 3),
    ("multi_binary", np.int8([0, 1, 1]), 1),
    ("box", np.float32([0.5, 0.5]), 2),
    ("box", np.float32([-0.75, 0.25]), 0.75),  # 1.25 and 0.25 off
    (
        "dict",
        {
            "side": np.int32(1), "place": np.int32(2), "bits": np.int8([0, 1]), "digits": np.int32([1, 0]),
            "force": np.float32([0.5]),
        },
        7,
    ),
    (
        "dict",
        {
            "side": np.int32(0), "place": np.int32(2), "bits": np.int8([1, 1]), "digits": np.int32([0, 1]),
            "force": np.float32([0.25]),
        },
        2.75,
    ),
    ("tuple", (np.int32(2), {"force": np.float32([0.0])}), 1.5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "action", "reward"), CASES)
def test_rewards_by_hand(kind, action, reward):
    task = jitted(nested(kind))
    action = arrays(action)
    fits(task.action, action, 1)
    _, found, _ = task.step(first(task), action, jnp.zeros((7, 1)))
    assert found.dtype == jnp.float32 and found.tolist() == [reward]


def test_episodes_have_their_length_and_every_step_asks_anew():
    env = build(nested("dict", length=3), 4)
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    ends, seen = [], []
    step = jax.jit(env.step)
    for t in range(8):
        action = {
            "side": (obs["image"][:, 0, 7, 0] > 0).astype(jnp.int32), "place": obs["place"], "bits": obs["bits"],
            "digits": obs["pair"][1], "force": obs["pair"][0],
        }  # fmt: skip
        state, result = step(state, action, jax.random.key(t + 1))
        ends.append(bool(result.terminated.all()))
        assert (result.reward == (0 if t in (3, 7) else 7)).all()  # the optimal policy reads it from the observation
        obs = result.obs
        seen.append(np.asarray(obs["pair"][0][:, 0]))
    assert ends == [t in (2, 6) for t in range(8)]
    assert len(np.unique(seen)) == 32


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "dict", "tuple"])
def test_masks(kind):
    """What is right can be taken; else a draw below one half allows it. In the order of `spaces.leaves`."""
    choices = {  # name of each choice that is right, by hand, among all of the action
        "discrete": (6, {5}),
        "multi_discrete": (10, {1, 2 + 2, 5 + 1, 7 + 0}),
        "dict": (10, {0 + 1, 2 + 0, 5 + 2, 8 + 1}),  # digits (2, 3), place 3, side 2; bits and force have none
        "tuple": (3, {2}),
    }
    size, right = choices[kind]
    task = jitted(nested(kind, mask=True))
    assert spaces.num_choices(task.action) == size and task.num_draws == 7 + size
    for draw, expected in ((0.9, right), (0.4, set(range(size)))):
        mask = task.observe(first(task, [draw] * size))["action_mask"]
        assert mask.dtype == jnp.int8 and set(np.flatnonzero(mask[0])) == expected
    fits(task.observation, task.observe(first(task, [0.9] * size)), 1)
    assert dict(task.observation.items)["action_mask"] == MultiBinary((size,))


def test_nested_errors():
    for bad in (
        {"action": "boxes"},
        {"length": 0},
        {"action": "box", "mask": True},
        {"action": "multi_binary", "mask": True},
    ):
        with pytest.raises(InputError, match=r"env\.options\."):
            nested(**bad)
    assert [type(nested(kind).action) for kind in ("discrete", "multi_discrete", "multi_binary", "box")] == [
        Discrete, MultiDiscrete, MultiBinary, Box
    ]  # fmt: skip
