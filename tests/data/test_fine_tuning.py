"""A policy from a data set that goes on in an environment: what acts is the same before and after the switch."""

from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import jrl
from jrl import config, data, train
from jrl.run.store import checkpoint
from jrl.types import Box, Discrete

pytestmark = pytest.mark.slow  # runs that learn

CONFIGS = Path(__file__).parents[2] / "configs"
PENDULUM = Box((3,)), Box((1,), "float32", -2.0, 2.0)
CARTPOLE = Box((4,)), Discrete(2, "int64")
SMALL = ["--set=network.hidden=[8]", "--set=run.log=[jsonl]", "--set=run.compile_cache=false"]
ONLINE = [
    "--set=env.backend=jax", "--set=replay.capacity=400", "--set=replay.batch_size=8",
    "--set=replay.learning_starts=20", "--stop=env_steps=60",
]  # fmt: skip


def write(path, observation, action):
    """Four episodes of random numbers of these spaces."""
    rng, episodes = np.random.default_rng(0), []
    for _ in range(4):
        acted = rng.integers(0, 2, 20) if isinstance(action, Discrete) else rng.uniform(-2, 2, (20, 1))
        obs = rng.uniform(-1, 1, (21, *observation.shape)).astype(np.float32)
        episodes.append(data.Episode(obs, acted, rng.normal(size=20), False, True))
    data.write(data.of_episodes(observation, action, episodes), path)
    return str(path)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    return write(tmp_path_factory.mktemp("pendulum") / "set", *PENDULUM)


def learn(algo, env, out, *args):
    lines = ["--algo", algo, "--env", env, *SMALL, "--out", str(out), *args]
    assert train.main(lines) == 0
    return checkpoint.read(checkpoint.locate(out), "learner")


def taught(algo, env, path, out, *args):
    """The learner of a run that saw a data set alone, with weights that have gone far from the first ones."""
    return learn(
        algo, env, out, f"--set=data.input={path}", "--set=env.backend=jax", "--set=replay.batch_size=16",
        "--set=algo.lr=0.03", "--stop=updates=30", *args,
    )  # fmt: skip


def actions(path, size):
    obs = np.random.default_rng(1).uniform(-1, 1, (64, size)).astype(np.float32)
    return jrl.load(path, best=False).act(obs, explore=False)


# SAC predicts its deviation, as IQL does where it is told to; TD3 has none, and IQL's parameter of it stays unused
@pytest.mark.parametrize(("after", "options"), [("sac", ["--set=network.state_dependent_std=true"]), ("td3", [])])
def test_the_policy_of_iql_acts_the_same_in(after, options, pendulum, tmp_path, capsys):
    before = taught("iql", "Pendulum-v1", pendulum, tmp_path / "iql", *options)
    start = [f"--init-from={tmp_path / 'iql'}", "--set=algo.policy_after=1000", *ONLINE]
    now = learn(after, "Pendulum-v1", tmp_path / "after", *start)
    out = capsys.readouterr().out
    assert "not taken: params.actor" not in out and "not taken: params.critic" not in out
    for name, x in before["params"]["actor"]["policy_head"].items():
        np.testing.assert_array_equal(now["params"]["actor"]["policy_head"][name], x)
    assert now["updates"] > 30  # of the critics alone
    acted = actions(tmp_path / "iql", 3)
    np.testing.assert_allclose(actions(tmp_path / "after", 3), acted, rtol=1e-5, atol=1e-6)
    assert acted.std() > 0.01  # the networks begin near 0 everywhere


def test_the_policy_of_bc_acts_the_same_in_ppo_while_the_value_learns(tmp_path, capsys):
    path = write(tmp_path / "set", *CARTPOLE)
    taught("bc", "CartPole-v1", path, tmp_path / "bc")
    start = [
        f"--init-from={tmp_path / 'bc'}", "--set=env.backend=jax", "--set=env.num_envs=4", "--set=rollout.length=16",
        "--set=algo.policy_after=2",
    ]  # fmt: skip
    learn("ppo", "CartPole-v1", tmp_path / "waits", *start, "--stop=env_steps=100")
    assert "not taken: params.policy" not in capsys.readouterr().out
    learn("ppo", "CartPole-v1", tmp_path / "goes-on", *start, "--stop=env_steps=400")
    before = checkpoint.read(checkpoint.locate(tmp_path / "bc"), "learner")["params"]["policy_head"]["kernel"]
    heads = [
        checkpoint.read(checkpoint.locate(tmp_path / name), "learner")["params"]["policy_head"]["kernel"]
        for name in ("waits", "goes-on")
    ]
    np.testing.assert_array_equal(heads[0], before)
    assert np.abs(heads[1] - before).max() > 0
    np.testing.assert_array_equal(actions(tmp_path / "waits", 4), actions(tmp_path / "bc", 4))


def test_iql_goes_on_with_the_data_beside_its_own_experience(pendulum, tmp_path, capsys):
    before = taught("iql", "Pendulum-v1", pendulum, tmp_path / "iql")
    mix = f"--set=data.input={{sampler: 0.5, '{pendulum}': 0.5}}"
    now = learn("iql", "Pendulum-v1", tmp_path / "on", f"--init-from={tmp_path / 'iql'}", mix, *ONLINE)
    assert "not taken" not in capsys.readouterr().out
    assert now["updates"] > 30
    moved = np.abs(now["params"]["actor"]["policy_head"]["kernel"] - before["params"]["actor"]["policy_head"]["kernel"])
    assert 0 < moved.max() < 0.1  # tens of small steps from there


def test_fql_goes_on_with_chunks_of_actions_and_a_run_that_is_resumed_is_the_same(pendulum, tmp_path, capsys):
    """The data set has single actions; a chunk of 3 has the actions of a window of 3 of its steps."""
    small = ["--set=env.action_chunk=3", "--set=algo.flow_steps=2"]
    before = taught("fql", "Pendulum-v1", pendulum, tmp_path / "fql", *small)
    mix = f"--set=data.input={{sampler: 0.5, '{pendulum}': 0.5}}"
    online = [f"--init-from={tmp_path / 'fql'}", mix, *small, *ONLINE]
    now = learn("fql", "Pendulum-v1", tmp_path / "on", *online)
    assert "not taken" not in capsys.readouterr().out
    for part in ("actor", "flow", "critic"):
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), now["params"][part], before["params"][part])
        assert 0 < max(jax.tree.leaves(moved)) < 0.1  # tens of small steps from there
    assert jrl.load(tmp_path / "on", best=False).act(np.zeros((4, 3), np.float32)).shape == (4, 3, 1)
    learn("fql", "Pendulum-v1", tmp_path / "part", *online, "--stop=env_steps=40")
    assert train.main(["--resume", str(tmp_path / "part"), "--stop=env_steps=60"]) == 0
    resumed = checkpoint.read(checkpoint.locate(tmp_path / "part"), "learner")
    for x, y in zip(jax.tree.leaves(now), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["ppo_from_bc", "sac_from_iql", "rlpd"])
def test_configs_can_be_read(name):
    given = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    cfg = config.load(given)
    assert (cfg.algo.policy_after > 0) == ("from" in name)
    assert (cfg.data.input is not None) == (name == "rlpd")
