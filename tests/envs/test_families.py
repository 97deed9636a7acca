"""EnvPool's families start and step under the contract. MuJoCo is never rendered: EnvPool ends the process."""

import jax
import numpy as np
import pytest
from env_helpers import Stepper, make, random_actions, run

from jrl import envs
from jrl.envs.envpool_env import EnvPoolEnv
from jrl.types import Box, Discrete, InputError

# id: observation shape, dtype, action, time limit
FAMILIES = {
    "Pong-v5": ((4, 84, 84), "uint8", Discrete(6), 27_000),
    "HalfCheetah-v4": ((17,), "float32", Box((6,), "float32", -1.0, 1.0), 1000),
    "HalfCheetah-v5": ((17,), "float32", Box((6,), "float32", -1.0, 1.0), 1000),
    "CartpoleBalance-v1": ((5,), "float32", Box((1,), "float32", -1.0, 1.0), 1000),  # a Dict, made flat
    "LunarLander-v3": ((8,), "float32", Discrete(4), 1000),
    "BipedalWalker-v3": ((24,), "float32", Box((4,), "float32", -1.0, 1.0), 1600),
    "FrozenLake-v1": ((), "int32", Discrete(4), 100),
}


@pytest.mark.parametrize("id", FAMILIES)
def test_a_family_steps_alike_on_the_host_and_in_a_program(id):
    shape, dtype, action, limit = FAMILIES[id]
    env = make(id, "host", num_envs=2)
    env.close()
    spec = env.spec
    assert (spec.observation.shape, spec.observation.dtype) == (shape, dtype)
    assert (spec.action.shape, spec.action.dtype) == (action.shape, action.dtype)
    if isinstance(action, Box):
        np.testing.assert_array_equal(spec.action.bounds(), action.bounds())
    else:
        assert spec.action == action
    assert spec.max_episode_steps == limit
    actions = random_actions(spec.action, 12, 2)
    host, program = run(id, "host", actions), run(id, "program", actions)
    for a, b in zip(host, program):
        np.testing.assert_array_equal(a, b)
    assert host.obs.shape == (12, 2, *shape) and host.first.dtype == host.obs.dtype == np.dtype(dtype)
    assert host.reward.dtype == np.float32 and host.reward.shape == (12, 2)
    assert host.reward.any() or id in ("Pong-v5", "FrozenLake-v1")  # whose first steps earn nothing
    if isinstance(spec.observation, Box):
        low, high = (b.astype(np.float32) for b in spec.observation.bounds())
        assert (host.obs >= low).all() and (host.obs <= high).all()
        assert len(np.unique(host.obs)) > 1 and np.isfinite(host.obs).all()
    else:
        assert spec.observation == Discrete(16) and host.obs.max() < 16


def test_float64_actions_arrive_as_they_were_sent():
    """HalfCheetah takes float64; its control cost tells what it got: half the actions, a quarter of the cost."""
    env = EnvPoolEnv("HalfCheetah-v4", num_envs=2, seed=0, options={})
    env.reset()
    costs = []
    for scale in (0.25, 0.5):
        _, _, _, _, info = env._pool.step(np.full((2, 6), scale, np.float64))
        costs.append(info["reward_ctrl"])
    np.testing.assert_allclose(costs[1], np.float64(4) * costs[0])
    env.close()
    zero, quarter = np.zeros((1, 2, 6), np.float32), np.full((1, 2, 6), 0.25, np.float32)
    raw = EnvPoolEnv("HalfCheetah-v4", num_envs=2, seed=envs.seed_range(0), options={})
    raw.reset()
    expected = raw._pool.step(np.full((2, 6), 0.25))[0]
    raw.close()
    for kind in ("host", "program"):
        np.testing.assert_array_equal(run("HalfCheetah-v4", kind, quarter).obs[0], expected.astype(np.float32))
        assert not np.array_equal(run("HalfCheetah-v4", kind, zero).obs[0], expected.astype(np.float32))
    assert not jax.config.jax_enable_x64  # the program's x64 stays its own


@pytest.mark.parametrize("id", ["HalfCheetah-v4", "CartpoleBalance-v1", "LunarLander-v3"])
def test_the_reset_row_is_void(id):
    """EnvPool's dm_control repeats the last reward there."""
    actions = random_actions(FAMILIES[id][2], 12, 2)
    for kind in ("host", "program"):
        trajectory = run(id, kind, actions, options={"max_episode_steps": 3})
        at_limit = np.arange(12) % 4 == 2
        np.testing.assert_array_equal(trajectory.truncated, np.repeat(at_limit[:, None], 2, 1))
        rewarded = (trajectory.reward != 0).all(1)
        np.testing.assert_array_equal(rewarded, np.arange(12) % 4 != 3)


def test_dict_parts_lie_in_the_spaces_order():
    raw = EnvPoolEnv("CartpoleBalance-v1", num_envs=2, seed=0, options={})
    parts = raw._pool.reset()[0]
    names = list(raw._pool.observation_space.spaces)
    flat = np.concatenate([np.asarray(parts[n]).reshape(2, -1) for n in names], -1).astype(np.float32)
    raw.close()
    ours = EnvPoolEnv("CartpoleBalance-v1", num_envs=2, seed=0, options={})
    np.testing.assert_array_equal(ours.reset(), flat)
    ours.close()
    assert len(names) == 2 and flat.shape == (2, 5)


def test_bounds_that_are_cpp_limits_are_none():
    """EnvPool gives 1.2e-38 .. 3.4e38 (2.2e-308 .. 1.8e308) where it knows no bounds: a negative number is within."""
    for id in ("LunarLander-v3", "BipedalWalker-v3", "CartpoleBalance-v1"):
        env = make(id, "host", num_envs=2)
        assert (env.spec.observation.low, env.spec.observation.high) == (-np.inf, np.inf), id
        assert (env.reset() < 0).any()
        env.close()


def test_pong_keeps_raw_pixels_and_frames():
    stepper = Stepper(make("Pong-v5", "host", num_envs=2))
    first = stepper.reset()
    assert first.max() > 100
    assert all(
        np.array_equal(first[:, 0], first[:, i]) for i in range(4)
    )  # the stack starts as four of the first frame
    obs = stepper.step(np.zeros(2, np.int32)).obs
    np.testing.assert_array_equal(obs[:, :3], first[:, 1:])
    stepper.env.close()


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("MiniGrid-Empty-5x5-v0", "observation space Dict.*Discrete.*not supported.*FlattenObservation"),
        ("TicTacToe-v1", "several players"),
    ],
)
def test_what_is_not_supported_says_so(id, message):
    for host in (True, False):
        with pytest.raises(InputError, match=message):
            envs.make(id, backend="envpool", num_envs=2, host=host)
