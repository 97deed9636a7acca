"""What stands between policy and environment, and the small tasks: by numbers worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper, jitted, make, random_actions, run

from jrl import envs
from jrl.envs import toys
from jrl.envs.scaling import action_transform, reward_transform
from jrl.envs.transform import Transform, transformed
from jrl.types import Box, Discrete, MultiDiscrete

inf = math.inf

# ---------------------------------------------------------------- one option in every shell


def counted(spec):
    """An option with a state: rewards become the steps since the reset, actions are mirrored."""

    def observe(xp, state, action, result):
        steps = xp.where(state["ended"], 0, state["steps"] + 1)
        state = {**state, "steps": steps, "ended": result.terminated | result.truncated}
        return state, result._replace(reward=steps.astype("float32") + 100 * action.astype("float32"))

    init = lambda xp: {"steps": xp.zeros(spec.num_envs, "int32"), "ended": xp.ones(spec.num_envs, bool)}
    return Transform(spec, act=lambda xp, state, action: 1 - action, observe=observe, init=init)


@pytest.mark.parametrize("kind", ["jax", "program", "host", "gymnasium", "ready_host", "ready_workers"])
def test_an_option_is_written_once_for_all_environments(kind):
    """The environment gets the mirrored actions; the state follows the ends, and a reset of all begins it anew."""
    actions = random_actions(Discrete(2), 80, 4)
    expected = run("CartPole-v1", kind, 1 - actions).done
    stepper = Stepper(transformed(make("CartPole-v1", kind), counted, lambda spec: None))
    for again in (False, True) if kind != "program" else (False,):  # a pool in a program is reset once
        stepper.reset()
        ended, steps = np.zeros(4, bool), np.zeros(4, int)
        for t, action in enumerate(actions):
            result = stepper.step(action)
            steps = np.where(ended, 0, steps + 1)
            np.testing.assert_array_equal(result.reward, steps + 100 * action)
            ended = result.terminated | result.truncated
            assert again or (ended == expected[t]).all()
    stepper.env.close()
    assert expected.any()


def test_without_options_the_environment_stays_as_it_is():
    env = make("CartPole-v1", "jax")
    assert transformed(env, lambda spec: None) is env


# ---------------------------------------------------------------- actions


def both(fn, action):
    """`fn` of a numpy and of a jax array: they must agree; float32 stays float32 and numpy stays numpy."""
    action = np.asarray(action, np.float32)
    host, device = fn(action), jax.jit(fn)(action)
    assert isinstance(host, np.ndarray) and isinstance(device, jax.Array)
    assert host.dtype == device.dtype == np.float32
    np.testing.assert_allclose(host, device, rtol=1e-6)
    return host


def test_finite_bounds_are_normalised_and_clipped():
    space, fn = action_transform(Box((2,), "float32", (0.0, -4.0), (10.0, 2.0)), normalize=True, clip=True)
    low, high = space.bounds()
    assert space.shape == (2,) and low.tolist() == [-1, -1] and high.tolist() == [1, 1]
    # middle 5 and -1, half widths 5 and 3; what lies beyond [-1, 1] is clipped after the change of units
    np.testing.assert_allclose(
        both(fn, [[-1, -1], [0, 0], [1, 1], [0.5, -0.5], [2, -3]]), [[0, -4], [5, -1], [10, 2], [7.5, -2.5], [10, -4]]
    )


def test_without_clip_values_go_beyond_the_bounds():
    _, fn = action_transform(Box((1,), "float32", 0.0, 10.0), normalize=True, clip=False)
    np.testing.assert_allclose(both(fn, [[2.0], [-3.0]]), [[15.0], [-10.0]])


def test_clip_alone_keeps_the_units_and_the_space():
    box = Box((1,), "float32", 0.0, 10.0)
    space, fn = action_transform(box, normalize=False, clip=True)
    assert space == box
    np.testing.assert_allclose(both(fn, [[-3.0], [4.0], [12.0]]), [[0.0], [4.0], [10.0]])


def test_clipped_actions_lie_between_the_bounds_in_double_precision():
    low, high = (-0.3, 1 / 3), (0.1, 0.7)
    for normalize in (True, False):
        _, fn = action_transform(Box((2,), "float32", low, high), normalize=normalize, clip=True)
        taken = both(fn, [[-9, -9], [-1, -1], [1, 1], [9, 9]]).astype(np.float64)
        assert (taken >= low).all() and (taken <= high).all()
        np.testing.assert_allclose(taken[[0, -1]], [low, high], rtol=2e-7)


def test_mixed_bounds():
    """Elements: finite, no bounds, a lower bound only (kept in its units, clipped on that side)."""
    space, fn = action_transform(Box((3,), "float32", (2.0, -inf, 0.0), (4.0, inf, inf)), normalize=True, clip=True)
    assert [b.tolist() for b in space.bounds()] == [[-1, -inf, 0], [1, inf, inf]]
    np.testing.assert_allclose(both(fn, [[0.5, 9.0, 9.0], [-2.0, -9.0, -9.0]]), [[3.5, 9, 9], [2, -9, 0]])


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete((2, 3)), Box((1,), "float32", 0.0, 2.0)])
def test_nothing_to_do_is_none(space):
    flags = not isinstance(space, Box)
    assert action_transform(space, normalize=flags, clip=flags) == (space, None)


def test_make_applies_the_transform():
    """Pendulum's torque is in [-2, 2]: the policy's 0.5 is the environment's 1."""
    halves, ones = np.full((20, 3, 1), 0.5, np.float32), np.full((20, 3, 1), 1.0, np.float32)
    for kind in ("jax", "host", "program", "gymnasium", "workers", "ready_host"):
        raw = run_pendulum(kind, ones, normalize_actions=False, clip_actions=False)
        np.testing.assert_array_equal(raw, run_pendulum(kind, halves), err_msg=kind)
        np.testing.assert_array_equal(raw, run_pendulum(kind, ones, normalize_actions=False), err_msg=kind)
        assert not np.array_equal(raw, run_pendulum(kind, ones)), kind


def run_pendulum(kind, actions, **flags):
    stepper = Stepper(make("Pendulum-v1", kind, num_envs=3, **flags))
    stepper.reset()
    obs = np.stack([stepper.step(a).obs for a in actions])
    stepper.env.close()
    return obs


# ---------------------------------------------------------------- rewards

REWARDS = np.float32([-7.0, -0.5, 0.0, 0.25, 3.0])


@pytest.mark.parametrize(
    ("clip_rewards", "is_atari", "expected"),
    [
        (None, False, None),
        (False, True, None),
        (None, True, [-1, -1, 0, 1, 1]),
        (True, False, [-1, -1, 0, 1, 1]),
        (2.0, True, [-2, -0.5, 0, 0.25, 2]),
        (1, False, [-1, -0.5, 0, 0.25, 1]),  # a number, not True
        ((-1.0, 0.1), False, [-1, -0.5, 0, 0.1, 0.1]),
        ([-1.0, 0.1], False, [-1, -0.5, 0, 0.1, 0.1]),
    ],
)
def test_reward_transform(clip_rewards, is_atari, expected):
    fn = reward_transform(clip_rewards, is_atari=is_atari)
    if expected is None:
        assert fn is None
        return
    out = fn(jnp.asarray(REWARDS))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.float32(expected))


def test_atari_is_told_by_its_id():
    assert all(map(envs.is_atari, ["Pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4"]))
    assert not any(map(envs.is_atari, ["HalfCheetah-v5", "CartPole-v1", "pkg.mod:Pong-v5", "Nothing-v5"]))


# ---------------------------------------------------------------- small tasks


def test_catch_equals_envpools():
    """The same columns and actions give the same boards, rewards and ends as EnvPool's Catch-v0."""
    num_envs = 16
    actions = random_actions(Discrete(3), 9, num_envs)
    theirs = run("Catch-v0", "host", actions)
    columns = theirs.first[:, 0].argmax(-1)
    assert set(columns) == set(range(5))
    task = jitted(toys.catch())
    state = task.reset((columns[None] + 0.5).astype(np.float32) / 5)
    np.testing.assert_array_equal(task.observe(state), theirs.first)
    for t, action in enumerate(actions):
        state, reward, end = task.step(state, action, None)
        np.testing.assert_array_equal(task.observe(state), theirs.obs[t])
        np.testing.assert_array_equal(reward, theirs.reward[t])
        np.testing.assert_array_equal(end, theirs.terminated[t])
    assert set(theirs.reward[8]) == {-1.0, 1.0}


@pytest.mark.parametrize(
    ("delay", "answers"),
    [  # tokens 1 0 1 1 0 are shown; the one to say after each
        (0, [1, 0, 1, 1, 0]),
        (1, [0, 1, 0, 1, 1]),
        (2, [0, 0, 1, 0, 1]),
    ],
)
def test_repeat_after_me_by_hand(delay, answers):
    task = toys.repeat_after_me(delay=delay, episode_length=5)
    draws = jnp.float32([0.7, 0.2, 0.5, 0.9, 0.49, 0.0])[:, None, None]  # tokens 1 0 1 1 0 0
    state = task.reset(draws[0])
    shown, wrong_state = [], state
    for t, answer in enumerate(answers):
        shown.append(int(task.observe(state)[0]))
        state, reward, end = task.step(state, jnp.int32([answer]), draws[t + 1])
        wrong_state, penalty, _ = task.step(wrong_state, jnp.int32([1 - answer]), draws[t + 1])
        assert (reward.tolist(), penalty.tolist()) == ([1.0], [-1.0])
        assert end.tolist() == [t == 4]
    assert shown == [1, 0, 1, 1, 0]


def test_stateless_cartpole_shows_the_positions_of_cartpole():
    actions = random_actions(Discrete(2), 40, 4)
    full, part = run("CartPole-v1", "jax", actions), run("StatelessCartPole-v1", "jax", actions)
    np.testing.assert_array_equal(part.first, full.first[:, [0, 2]])
    np.testing.assert_array_equal(part.obs, full.obs[..., [0, 2]])
    np.testing.assert_array_equal(part.terminated, full.terminated)
    assert full.terminated.any()
    spec = envs.make("StatelessCartPole-v1", num_envs=1).spec
    assert spec.observation.shape == (2,) and spec.max_episode_steps == 500
    np.testing.assert_allclose(spec.observation.high, (4.8, 24 * math.pi / 180))
