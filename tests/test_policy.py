"""A policy from a checkpoint: the algorithm's own actions, in the environment's units, for one observation or many."""

import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import save

import jrl
from jrl import api, config, evaluate, train
from jrl.fields import shipped
from jrl.fields.data import Fresh
from jrl.ops import normalize
from jrl.play.actor import Actor
from jrl.rllib import hints
from jrl.run.store import checkpoint
from jrl.types import ActOut, Algo, Box, Dict, Discrete, EnvSpec, InputError, MultiBinary, MultiDiscrete, Tuple

VECTOR = Box((4,))
PIXELS = Box((2, 36, 40), "uint8", 0.0, 255.0)
NORMAL = Box((2,), "float32", -1.0, 1.0)
OWN = Box((2,), "float32", (-2.0, 0.0), (2.0, 10.0))  # of the environment, where the policy acts in NORMAL
CONTINUOUS = EnvSpec(VECTOR, NORMAL, 1, None, OWN)


def observations(space, num, seed=0):
    rng = np.random.default_rng(seed)
    if space.dtype == "uint8":
        light = rng.uniform(size=(num, *(1 for _ in space.shape)))
        return (light * rng.integers(0, 256, (num, *space.shape))).astype(np.uint8)
    return rng.normal(size=(num, *space.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("algo", "spec"),
    [
        ("ppo", EnvSpec(VECTOR, Discrete(3), 1)),
        pytest.param("ppo", EnvSpec(VECTOR, MultiDiscrete((2, 3)), 1), marks=pytest.mark.slow),
        ("ppo", CONTINUOUS),
        pytest.param("ppo", EnvSpec(PIXELS, Discrete(3), 1), marks=pytest.mark.slow),
        pytest.param("pqn", EnvSpec(VECTOR, Discrete(3), 1), marks=pytest.mark.slow),
        ("dqn", EnvSpec(VECTOR, Discrete(3), 1)),
        pytest.param("dqn", EnvSpec(PIXELS, Discrete(3), 1), marks=pytest.mark.slow),
        ("sac", CONTINUOUS),
        pytest.param("td3", CONTINUOUS, marks=pytest.mark.slow),
    ],
)
def test_actions_are_the_algorithms_own_in_the_environments_units(tmp_path, algo, spec):
    made, state = save(tmp_path, algo, spec, "network.init=orthogonal")  # acts differently from the start
    obs = observations(spec.observation, 16)
    expected = np.asarray(made.act(made.actor(state), obs, made.carry(16), jax.random.key(0), False).action)
    if spec.env_action:  # -1 .. 1 to -2 .. 2, and to 0 .. 10
        assert np.abs(expected).max() <= 1
        expected = expected * [[2.0, 5.0]] + [[0.0, 5.0]]
    policy = jrl.load(tmp_path)
    actions = policy.act(obs)
    assert isinstance(actions, np.ndarray)
    assert actions.dtype == ("float32" if isinstance(spec.action, Box) else "int32")
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert len(np.unique(actions, axis=0)) > 1  # otherwise nothing above says that the observation counts
    one = policy.act(obs[2])
    assert one.shape == spec.action.shape
    assert one.dtype == actions.dtype
    np.testing.assert_allclose(one, expected[2], atol=1e-5)
    assert policy.spec == spec
    assert policy.env_steps == 77
    assert config.algo_name(policy.config) == algo


def test_observation_statistics_are_applied_and_stay(tmp_path):
    mean, std = np.array([5.0, -3.0, 0.0, 100.0], np.float32), np.array([2.0, 0.5, 1.0, 10.0], np.float32)
    found = {"count": jnp.float32(10.0), "mean": jnp.asarray(mean), "m2": jnp.asarray(10.0 * std**2)}
    stats = normalize.init((4,)).replace(**found)
    save(tmp_path / "plain", "ppo", CONTINUOUS, "algo.normalize_obs=false")
    on = "algo.normalize_obs=true"
    save(tmp_path / "stats", "ppo", CONTINUOUS, on, change=lambda state: state.replace(obs_stats=stats))
    obs = observations(VECTOR, 6)
    raw = obs * std[None] + mean[None]
    policy, plain = jrl.load(tmp_path / "stats"), jrl.load(tmp_path / "plain")
    first = policy.act(raw)
    np.testing.assert_allclose(first, plain.act(obs), atol=1e-4)
    assert np.abs(first - plain.act(raw)).max() > 1e-3
    for _ in range(5):
        policy.act(raw + 1000, explore=True)
    np.testing.assert_array_equal(policy.act(raw), first)


def test_actions_are_clipped_to_the_environments_bounds(tmp_path):
    save(tmp_path, "ppo", CONTINUOUS, "network.log_std_init=3.0")
    actions = jrl.load(tmp_path).act(observations(VECTOR, 200), explore=True)
    np.testing.assert_array_equal(actions.min(0), [-2.0, 0.0])
    np.testing.assert_array_equal(actions.max(0), [2.0, 10.0])
    save(tmp_path, "ppo", EnvSpec(VECTOR, NORMAL, 1), "network.log_std_init=3.0", "env.clip_actions=false")
    assert jrl.load(tmp_path).act(observations(VECTOR, 200), explore=True).max() > 1.5


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    path = tmp_path_factory.mktemp("ppo")
    save(path, "ppo", EnvSpec(VECTOR, Discrete(3), 1))
    return path


def test_exploration_follows_from_the_seed_and_the_number_of_calls(ppo):
    obs = np.zeros((64, 4), np.float32)
    draw = lambda policy: np.stack([policy.act(obs, explore=True) for _ in range(3)])
    first = draw(jrl.load(ppo))
    np.testing.assert_array_equal(first, draw(jrl.load(ppo)))
    assert (first != draw(jrl.load(ppo, seed=1))).any()
    assert (first[0] != first[1]).any()
    policy = jrl.load(ppo)
    assert (policy.act(obs) == policy.act(obs)).all()
    assert len(np.unique(policy.act(obs))) == 1


def test_numbers_of_another_precision_are_converted(ppo):
    policy = jrl.load(ppo)
    obs = observations(VECTOR, 8)
    expected = policy.act(obs)
    for other in (obs.astype(np.float64), obs.tolist(), jnp.asarray(obs)):
        np.testing.assert_array_equal(policy.act(other), expected)
    assert policy.act([0, 1, 0, 1]) == policy.act(np.array([0, 1, 0, 1], np.float32))


@pytest.mark.parametrize(
    ("obs", "got"),
    [
        (np.zeros(3, np.float32), r"float32 \(3,\)"),
        (np.zeros((2, 5), np.float32), r"float32 \(2, 5\)"),
        (np.zeros((2, 1, 4), np.float32), r"float32 \(2, 1, 4\)"),
        (np.float32(1), r"float32 \(\)"),
        (np.array(["a", "b", "c", "d"]), r"<U1 \(4,\)"),
        ({"x": 1}, r"object \(\)"),
        ([[0.0] * 4, [0.0] * 3], "inhomogeneous"),
    ],
)
def test_what_is_no_observation_is_refused(ppo, obs, got):
    with pytest.raises(ValueError, match=r"expected float32 \(4,\), or a batch \(N, 4\).*" + got):
        jrl.load(ppo).act(obs)


def test_bytes_must_be_bytes(tmp_path):
    save(tmp_path, "ppo", EnvSpec(Box((6,), "uint8", 0.0, 255.0), Discrete(3), 1))
    with pytest.raises(ValueError, match=r"expected uint8 \(6,\).*got float32"):
        jrl.load(tmp_path).act(np.zeros(6, np.float32))


class Counting:
    """An algorithm that acts the number of steps of the episode, and counts how often it is traced."""

    def __init__(self):
        self.traced = 0

    def act(self, actor, obs, carry, key, explore=True):
        self.traced += 1
        return ActOut(carry, carry + 1, {})

    def policy(self):
        carry = lambda batch_size: jnp.zeros((batch_size,), jnp.int32)
        algo = Algo(lambda key: (), lambda state: state, carry, self.act, lambda *args: args, data=Fresh())
        cfg = config.load(None, algo="ppo", env="CartPole-v1", stop=["env_steps=100000"])
        return Actor(algo, EnvSpec(Box((1,)), Discrete(100), 1), cfg, ())


def test_what_is_carried_through_an_episode():
    policy = Counting().policy()
    one, three = np.zeros(1, np.float32), np.zeros((3, 1), np.float32)
    assert [int(policy.act(one)) for _ in range(3)] == [0, 1, 2]
    policy.reset()
    assert [int(policy.act(one)) for _ in range(2)] == [0, 1]
    assert policy.act(three).tolist() == [0, 0, 0]  # another batch size begins anew
    assert policy.act(three).tolist() == [1, 1, 1]
    assert policy.act(three, reset=[False, True, False]).tolist() == [2, 0, 2]
    assert policy.act(three, reset=np.zeros(3, bool)).tolist() == [3, 1, 3]
    assert int(policy.act(one)) == 0
    assert int(policy.act(one, reset=False)) == 1
    assert int(policy.act(one, reset=True)) == 0
    with pytest.raises(ValueError, match=r"reset: expected bool \[3\]"):
        policy.act(three, reset=[True, False])


def large(state):
    """Parameters so large that actions differ."""
    rng = np.random.default_rng(0)
    return state.replace(params=jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(x.dtype), state.params))


@pytest.mark.slow
def test_memory_frames_and_the_step_before_are_kept_through_an_episode(tmp_path):
    """Against a plain loop that makes the observations, and carries the network's memory, by hand."""
    stack = Box((3, 4))
    told = Dict((("obs", stack), ("prev_action", NORMAL), ("prev_reward", Box(()))))
    past = ["env.frame_stack=3", "network.use_prev_action=true", "network.use_prev_reward=true"]
    core = "network.core={name: lstm, size: 8}"
    made, state = save(tmp_path, "ppo", EnvSpec(told, NORMAL, 1, None, OWN), *past, core, own=VECTOR, change=large)
    act = jax.jit(lambda obs, carry: made.act(made.actor(state), obs, carry, jax.random.key(0), False))
    policy, rng = jrl.load(tmp_path), np.random.default_rng(1)
    assert policy.observation_space == VECTOR
    seen = []
    for _ in range(2):  # episodes
        frames, action, reward, carry = None, np.zeros(2, np.float32), np.float32(0), made.carry(1)
        policy.reset()
        for t in range(12):
            obs = rng.normal(size=4).astype(np.float32)
            frames = [obs, obs, obs] if frames is None else [*frames[1:], obs]
            by_hand = {"obs": np.stack(frames), "prev_action": action, "prev_reward": reward}
            out = act(jax.tree.map(lambda x: x[None], by_hand), carry)
            found = policy.act(obs, reward=reward if t else None)
            action, carry, reward = np.asarray(out.action)[0], out.carry, np.float32(rng.normal())
            np.testing.assert_allclose(found, np.clip(action * [2, 5] + [0, 5], OWN.low, OWN.high), atol=1e-4)
            seen.append(action)
    assert np.std(seen, 0).min() > 0.1
    with pytest.raises(ValueError, match=r"use_prev_reward.*pass act\(obs, reward=...\)"):
        policy.act(obs)
    policy.reset()
    items = {"prev_action": action, "prev_reward": reward}  # those in the observation count
    expected = act({"obs": np.stack([obs] * 3)[None], **jax.tree.map(lambda x: x[None], items)}, made.carry(1)).action
    expected = np.clip(np.asarray(expected)[0] * [2, 5] + [0, 5], OWN.low, OWN.high)
    np.testing.assert_allclose(policy.act({"obs": obs, **items}), expected, atol=1e-4)


def test_actions_are_masked(tmp_path):
    places = Tuple((Discrete(3), Box((2,), "int8", -5.0, 5.0)))
    spec = EnvSpec(Dict((("place", places), ("action_mask", MultiBinary((5,))))), MultiDiscrete((2, 3)), 1)
    save(tmp_path, "ppo", spec, change=large)
    policy, rng = jrl.load(tmp_path), np.random.default_rng(0)
    mask = rng.integers(0, 2, (200, 5))
    mask[:, 1] |= 1 - mask[:, 0]
    mask[:, 4] |= 1 - mask[:, 2] | mask[:, 3]
    obs = {"place": (rng.integers(0, 3, 200), rng.integers(-5, 6, (200, 2)).astype(np.int8)), "action_mask": mask}
    for explore in (False, True):
        action = policy.act(obs, explore)
        assert mask[np.arange(200), action[:, 0]].all() and mask[np.arange(200), 2 + action[:, 1]].all()
        assert len(np.unique(action, axis=0)) == 6
    one = {"place": (1, np.zeros(2, np.int8))}
    assert policy.act(one, action_mask=[True, False, False, False, True]).tolist() == [0, 2]
    with pytest.raises(ValueError, match="obs/action_mask: entries 0 to 1 are all 0 in row 0: expected at least one 1"):
        policy.act(one, action_mask=[0, 0, 1, 1, 1])
    for wrong, message in [
        (one, "obs: expected a dict of place, action_mask, got one of place"),
        ({"place": 1, "action_mask": mask[0]}, "obs/place: expected a tuple of 2, got int"),
        ({"place": (1, np.zeros(2)), "action_mask": mask[0]}, r"obs/place/1: expected int8 \(2,\)"),
        ({"place": (1, [0, 0]), "action_mask": mask}, "as the rest is a single observation"),
    ]:
        with pytest.raises(ValueError, match=message):
            policy.act(wrong)


def test_a_plain_observation_takes_its_mask_beside_it(tmp_path):
    """Where the mask comes with the infos of the environment."""
    spec = EnvSpec(Dict((("obs", VECTOR), ("action_mask", MultiBinary((3,))))), Discrete(3), 1)
    save(tmp_path, "ppo", spec)
    policy = jrl.load(tmp_path)
    assert [policy.act(np.zeros(4), action_mask=mask) for mask in np.eye(3)] == [0, 1, 2]
    save(tmp_path / "without", "ppo", EnvSpec(VECTOR, Discrete(3), 1))
    with pytest.raises(ValueError, match="trained without a mask"):
        jrl.load(tmp_path / "without").act(np.zeros(4), action_mask=np.ones(3))


def test_names_of_other_packages_say_what_does_it_instead():
    for name, mend in hints.HINTS["jrl"].items():
        with pytest.raises(AttributeError, match=f"^jrl has no {name}: {re.escape(mend)}$"):
            getattr(jrl, name)
        if found := re.match(r"from jrl.api import (\w+)", mend):
            assert getattr(api, found[1])
        if found := re.search(r"configs/(\w+)\.yaml", mend):
            assert found[1] in shipped.names()
    for name in dir(api):
        if not name.islower() and name not in hints.HINTS["jrl"]:
            with pytest.raises(AttributeError, match=f"^jrl has no {name}: from jrl.api import {name}$"):
                getattr(jrl, name)


def test_importing_jrl_loads_nothing_else():
    code = "import jrl, sys; hasattr(jrl, 'PPO')"
    code += "; assert not {'jax', 'numpy', 'yaml'} & set(sys.modules); assert callable(jrl.load)"
    subprocess.run([sys.executable, "-c", code + "; assert 'jax' in sys.modules"], check=True, timeout=120)


def test_errors_name_the_mend(tmp_path):
    with pytest.raises(InputError, match="does not exist: give a run directory"):
        jrl.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        jrl.load(tmp_path)
    with pytest.raises(AttributeError, match=r"jrl.*no attribute 'laod'"):
        jrl.laod  # noqa: B018


def test_of_a_run_the_best_checkpoint_acts(tmp_path):
    save(tmp_path, "ppo", EnvSpec(VECTOR, Discrete(3), 1))
    first = tmp_path / "checkpoints" / "3"
    for iteration, found in ((1, 20.0), (2, 90.0), (3, 40.0)):
        meta = {**checkpoint.read_meta(first), "env_steps": iteration, "metrics": {"evaluation/return": found}}
        state = checkpoint.read(first, "learner")
        checkpoint.write(tmp_path / "checkpoints" / str(iteration), {"learner": state}, meta)
    assert jrl.load(tmp_path).env_steps == jrl.load(tmp_path, best=True).env_steps == 2
    assert jrl.load(tmp_path, best=False).env_steps == 3
    assert jrl.load(tmp_path / "checkpoints" / "1").env_steps == 1


@pytest.mark.slow
def test_a_recurrent_run_is_evaluated_alike_from_a_copy_in_another_process(tmp_path, capsys):
    small = [
        "env.backend=jax",
        "env.num_envs=4",
        "rollout.length=32",
        "network.hidden=[8]",
        "run.compile_cache=false",
    ]
    core = ["network.core={name: lstm, size: 8}", "algo.normalize_obs=true", "run.log=[jsonl]"]
    run = ["--algo=ppo", "--env=CartPole-v1", "--stop=env_steps=512", "--out", str(tmp_path / "run")]
    assert train.main([*run, *(f"--set={s}" for s in [*small, *core])]) == 0
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "run"), "--episodes=5", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    command = [sys.executable, "-m", "jrl.evaluate", str(tmp_path / "copy"), "--episodes=5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    there = json.loads(done.stdout)
    assert {**there, "checkpoint": here["checkpoint"]} == here and here["episodes"] == 5
