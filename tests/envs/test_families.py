"""EnvPool's families start and step under the contract. MuJoCo is never rendered: EnvPool ends the process."""

import jax
import numpy as np
import pytest
from env_helpers import Stepper, assert_same, make, random_actions, run

from jrl import envs, spaces
from jrl.envs.envpool_env import EnvPoolEnv
from jrl.types import Box, Dict, Discrete, InputError, MultiBinary, MultiDiscrete

# id: observation shape, dtype, action, time limit
FAMILIES = {
    "Pong-v5": ((4, 84, 84), "uint8", Discrete(6), 27_000),
    "HalfCheetah-v4": ((17,), "float32", Box((6,), "float32", -1.0, 1.0), 1000),
    "HalfCheetah-v5": ((17,), "float32", Box((6,), "float32", -1.0, 1.0), 1000),
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
    env = EnvPoolEnv(envs.section("HalfCheetah-v4", backend="envpool", num_envs=2), seed=0)
    env.reset()
    costs = []
    for scale in (0.25, 0.5):
        _, _, _, _, info = env._pool.step(np.full((2, 6), scale, np.float64))
        costs.append(info["reward_ctrl"])
    np.testing.assert_allclose(costs[1], np.float64(4) * costs[0])
    env.close()
    zero, quarter = np.zeros((1, 2, 6), np.float32), np.full((1, 2, 6), 0.25, np.float32)
    raw = EnvPoolEnv(envs.section("HalfCheetah-v4", backend="envpool", num_envs=2), seed=envs.seed_range(0))
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
    action = DICTS[id][1] if id in DICTS else FAMILIES[id][2]
    actions = random_actions(action, 12, 2)
    for kind in ("host", "program"):
        trajectory = run(id, kind, actions, options={"max_episode_steps": 3})
        at_limit = np.arange(12) % 4 == 2
        np.testing.assert_array_equal(trajectory.truncated, np.repeat(at_limit[:, None], 2, 1))
        rewarded = (trajectory.reward != 0).all(1)
        np.testing.assert_array_equal(rewarded, np.arange(12) % 4 != 3)


DICTS = {
    "CartpoleBalance-v1": (
        Dict((("position", Box((3,))), ("velocity", Box((2,))))),
        Box((1,), "float32", -1.0, 1.0),
    ),
    "FetchReach-v4": (
        Dict((("observation", Box((10,))), ("achieved_goal", Box((3,))), ("desired_goal", Box((3,))))),
        Box((4,), "float32", -1.0, 1.0),
    ),
    "MiniGrid-Empty-5x5-v0": (
        Dict(
            (
                ("direction", Discrete(4)),
                ("image", Box((7, 7, 3), "uint8", 0.0, 255.0)),
                ("mission", Box((96,), "uint8", 0.0, 255.0)),
            )
        ),
        Discrete(7),
    ),
    "Jumanji/Maze-v0": (  # nested, with a mask
        Dict(
            (
                ("agent_position", Dict((("row", Discrete(10)), ("col", Discrete(10))))),
                ("target_position", Dict((("row", Discrete(10)), ("col", Discrete(10))))),
                ("walls", MultiBinary((10, 10))),
                ("step_count", Discrete(101)),
                ("action_mask", MultiBinary((4,))),
            )
        ),
        Discrete(4),
    ),
}


@pytest.mark.parametrize("id", DICTS)
def test_a_dict_is_what_the_pool_gives_on_the_host_and_in_a_program(id):
    observation, action = DICTS[id]
    actions = random_actions(action, 12, 2)
    raw = EnvPoolEnv(envs.section(id, backend="envpool", num_envs=2), seed=envs.seed_range(0))
    assert (raw.spec.observation, raw.spec.action) == (observation, action)
    typed = lambda obs: spaces.map_leaves(lambda leaf, x: np.asarray(x).astype(leaf.dtype), observation, obs)
    first = typed(raw._pool.reset()[0])
    pooled = [typed(raw._pool.step(a.astype(raw._pool.action_space.dtype))[0]) for a in actions]
    raw.close()
    for kind in ("host", "program"):
        found = run(id, kind, actions)
        assert_same(found.first, first)
        assert_same(found.obs, jax.tree.map(lambda *x: np.stack(x), *pooled))


JUMANJI = {  # a Box of integers, and a mask of each element's choices or of all combinations
    "Jumanji/RubiksCube-v0": (MultiDiscrete((6, 1, 3)), None),
    "Jumanji/Connector-v2": (MultiDiscrete((5,) * 10), 50),
    "Jumanji/MultiCVRP-v0": (MultiDiscrete((21,) * 2), 42),  # in int16
    "Jumanji/Tetris-v0": (Discrete(40), 40),
}


@pytest.mark.parametrize("id", JUMANJI)
def test_integers_in_a_box_are_choices(id):
    action, size = JUMANJI[id]
    env = make(id, "host", num_envs=2)
    assert env.spec.action == action and spaces.masks_actions(env.spec) == (size is not None)
    env.close()
    actions = random_actions(action, 6, 2)
    host, program = run(id, "host", actions), run(id, "program", actions)
    assert_same(list(host)[:5], list(program)[:5])
    raw = EnvPoolEnv(envs.section(id, backend="envpool", num_envs=2), seed=envs.seed_range(0))
    first, taken = raw._pool.reset()[0], raw._pool.action_space
    if size is not None:
        np.testing.assert_array_equal(host.first["action_mask"], first["action_mask"].reshape(2, size))
    own = actions if isinstance(action, MultiDiscrete) else np.stack(np.unravel_index(actions, (4, 10)), -1)
    pooled = [raw._pool.step((a + taken.low).astype(taken.dtype))[0] for a in own]
    raw.close()
    name = next(name for name in host.obs if name != "action_mask")
    for t, obs in enumerate(pooled):
        np.testing.assert_array_equal(jax.tree.leaves(host.obs[name])[0][t], jax.tree.leaves(obs[name])[0])


def test_a_mask_in_the_infos_joins_the_observation():
    """Of Play2048: the board as bits, and the moves that change it. Both interfaces have it in its own row."""
    id, how = "Play2048-v1", {"action_mask_info": "legal_action_mask"}
    actions = random_actions(Discrete(4), 40, 3)
    raw = EnvPoolEnv(envs.section(id, backend="envpool", num_envs=3), seed=envs.seed_range(0))
    assert raw.spec.observation == MultiBinary((4, 4, 31))  # no entry `action_mask`: nothing by itself
    first, told = raw._pool.reset()
    pooled = [raw._pool.step(a) for a in actions]
    raw.close()
    for kind in ("host", "program"):
        found = run(id, kind, actions, **how)
        assert_same(found.first, {"obs": first.astype(np.int8), "action_mask": told["legal_action_mask"]})
        for t, (obs, *_, info) in enumerate(pooled):
            assert_same(
                jax.tree.map(lambda x: x[t], found.obs),  # noqa: B023
                {"obs": obs.astype(np.int8), "action_mask": info["legal_action_mask"]},
            )
        assert not found.obs["action_mask"].all() and found.obs["action_mask"].any()
    env = make(id, "ready_host", num_envs=2, **how)
    assert set(Stepper(env).reset()) == {"obs", "action_mask"}
    env.close()


@pytest.mark.parametrize(
    ("id", "name", "message"),
    [
        ("Play2048-v1", "legal", "env.action_mask_info legal: the infos of Play2048-v1 have no such entry, only"),
        ("Play2048-v1", "board", r"the mask in the infos of Play2048-v1 has 16 entries, .* has 4 choices"),
        ("CartPole-v1", "mask", "CartPole-v1 have no such entry, only no numbers"),
        ("Pendulum-v1", "mask", "no choices to mask"),
        ("Jumanji/Maze-v0", "mask", "have an action_mask already"),
    ],
)
def test_a_mask_that_is_not_in_the_infos(id, name, message):
    with pytest.raises(InputError, match=message):
        envs.make(id, backend="envpool", num_envs=2, action_mask_info=name)


def test_bounds_that_are_cpp_limits_are_none():
    """EnvPool gives 1.2e-38 .. 3.4e38 (2.2e-308 .. 1.8e308) where it knows no bounds: a negative number is within."""
    for id in ("LunarLander-v3", "BipedalWalker-v3", "CartpoleBalance-v1"):
        env = make(id, "host", num_envs=2)
        for _, leaf in spaces.leaves(env.spec.observation):
            assert (leaf.low, leaf.high) == (-np.inf, np.inf), id
        assert any((x < 0).any() for x in jax.tree.leaves(env.reset()))
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
