"""`python -m jrl.data record`: who plays, with the log-probability of what was really done."""

import json
import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from saved import save_games

from jrl import data
from jrl.data.__main__ import main
from jrl.play import behaviour_policy
from jrl.rollout.stitch import Stitch
from jrl.types import Box, Rollout

RUN = {
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
    "env": {"id": "CartPole-v1", "backend": "jax", "num_envs": 4},
    "network": {"hidden": [8]},
    "rollout": {"length": 32},
    "run": {"log": []},
    "stop": {"env_steps": 256},
}


def saved(directory, cfg):
    """A run of these sections, as before its first update."""
    save_games(directory, **cfg)
    return directory


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("runs") / "ppo", RUN)


@pytest.fixture(scope="module")
def dqn(tmp_path_factory):
    own = {"algo": {"name": "dqn"}, "replay": {"learning_starts": 64, "capacity": 1000, "batch_size": 32}}
    return saved(tmp_path_factory.mktemp("runs") / "dqn", {**RUN, **own, "rollout": {"length": 8}})


def recorded(out, *arguments):
    assert main(["record", *map(str, arguments), f"--out={out}", "--num-envs=4"]) == 0
    return data.read(out)


def steps_of(store):
    """Observations, actions and log-probabilities of all steps."""
    rows = store.is_step()
    return store.obs[rows], store.action[rows], store.columns["log_prob"][rows]


def policy(run, obs):
    actor = behaviour_policy.load_behaviour(str(run), 1.0, best=None, settings=[]).actor
    return actor.algo.outputs(actor.state, obs)


def test_a_policy_that_draws_has_its_own_log_probabilities(ppo, tmp_path):
    store = recorded(tmp_path / "a", ppo, "--steps=500", "--seed=3")
    assert 500 <= store.num_steps < 504
    obs, action, log_prob = steps_of(store)
    np.testing.assert_allclose(policy(ppo, obs)["distribution"].log_prob(action), log_prob, atol=1e-5)
    again = recorded(tmp_path / "b", ppo, "--steps=500", "--seed=3")
    other = recorded(tmp_path / "c", ppo, "--steps=500", "--seed=4")
    assert store.checksum() == again.checksum() != other.checksum()
    whole = store.terminated | store.truncated
    assert store.returns()[whole].min() >= 8 and (~whole).sum() <= 4


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.25, 1.0])
def test_epsilon_has_the_density_of_the_mixture(ppo, dqn, tmp_path, epsilon):
    share = lambda p: np.log((1 - epsilon) * np.asarray(p) + epsilon / 2)
    obs, action, log_prob = steps_of(recorded(tmp_path / "p", ppo, "--steps=400", f"--epsilon={epsilon}"))
    of_policy = np.exp(policy(ppo, obs)["distribution"].log_prob(action))
    np.testing.assert_allclose(log_prob, share(of_policy), atol=1e-5)
    obs, action, log_prob = steps_of(recorded(tmp_path / "q", dqn, "--steps=400", f"--epsilon={epsilon}"))
    best = np.argmax(policy(dqn, obs)["q"], -1)
    np.testing.assert_allclose(log_prob, share(best == action), atol=1e-5)
    # the actions are as frequent as that says: within four standard errors
    assert abs((best != action).mean() - epsilon / 2) < 4 * np.sqrt(epsilon / 2 * (1 - epsilon / 2) / len(action))


@pytest.mark.slow
def test_a_mix_has_its_shares(ppo, dqn, tmp_path):
    store = recorded(
        tmp_path / "m",
        "--mix",
        f"{ppo}=0.5",
        f"{dqn}=0.25",
        "random=0.25",
        "--steps=800",
        "--greedy",
        "--set=env.backend=gymnasium",
    )
    source = store.labels["source"]
    steps = {name: int(store.lengths()[source == name].sum()) for name in np.unique(source)}
    for name, share in ((str(ppo), 400), (str(dqn), 200), ("random", 200)):
        assert share <= steps[name] < share + 4
    log_prob = store.columns["log_prob"][store.is_step()]
    played = np.repeat(source, store.lengths())
    assert (log_prob[played != "random"] == 0).all()  # the best action, always
    np.testing.assert_allclose(log_prob[played == "random"], -np.log(2), rtol=1e-6)


WAYS = {  # to step the same environment
    "in a program": ["backend=jax"],
    "here": ["backend=gymnasium"],
    "in processes": ["backend=gymnasium", "remote_worker_envs=true"],
    "as they are ready": ["backend=gymnasium", "remote_worker_envs=true", "batch_wait_ms=1"],
    "by EnvPool": ["backend=envpool"],
}


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    core = {"hidden": [8], "core": {"name": "lstm", "size": 8}}
    return saved(tmp_path_factory.mktemp("runs") / "lstm", {**RUN, "network": core})


# the ways to act in a program have tests of their own
@pytest.mark.parametrize(
    ("way", "how"),
    [
        pytest.param(way, how, marks=[] if (way, how) == ("here", ["--greedy"]) else [pytest.mark.slow])
        for way, how in (*((way, []) for way in WAYS), ("here", ["--greedy"]), ("here", ["--epsilon=0.5"]))
    ],
    ids=str,
)
def test_every_player_plays_in_every_way_to_step(ppo, dqn, memory, tmp_path, way, how):
    settings = [f"--set=env.{setting}" for setting in WAYS[way]]
    store = recorded(tmp_path / "x", ppo, dqn, memory, "--random=0.25", "--steps=160", *how, *settings)
    source = store.labels["source"]
    for name in (str(ppo), str(dqn), str(memory), "random"):
        assert 40 <= store.lengths()[source == name].sum() < 44
    assert store.observation.shape == (4,) and set(np.unique(store.action)) == {0, 1}
    assert ("log_prob" in store.columns) == ("--epsilon=0.5" not in how)  # of memory and epsilon it is not known
    assert (store.lengths() == store.returns()).all()  # CartPole's rewards are 1


def test_random_actions_need_no_run(tmp_path, capsys):
    store = recorded(tmp_path / "r", "--env=Pendulum-v1", "--random=1", "--steps=500", "--set=env.backend=jax")
    assert store.meta["actions"] == "normalized" and store.action_space == Box((1,), "float32", -1.0, 1.0)
    _, action, log_prob = steps_of(store)
    assert (np.abs(action) <= 1).all() and np.abs(action).max() > 0.9
    np.testing.assert_allclose(log_prob, -np.log(2), rtol=1e-6)
    assert "checksum " + store.checksum() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a policy, got none: give a run, or --env ID --random 1"),
        (["--random=1"], "expected an environment for random actions, got none: give --env ID"),
        (["--random=2", "--env=CartPole-v1"], "--random: expected a share from 0 to 1, got 2.0"),
        (["--mix", "random=0.5"], "expected shares that sum to 1, got 0.5"),
        (["--mix", "random"], "--mix random: expected RUN=SHARE"),
        (["nowhere"], "nowhere"),
        (["--random=1", "--env=CartPole-v1", "--format=csv"], "data format 'csv': expected one of"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments, message, tmp_path, capsys):
    assert main(["record", *arguments, f"--out={tmp_path / 'x'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def rollout(mask, done, count=None, contiguous=True):
    """[T, 1], whose observation and action are numbers of the row."""
    steps = len(mask)
    column = lambda x, dtype: jnp.asarray(x, dtype)[:, None]
    flags = {"terminated": column(done, bool), "truncated": column(np.zeros(steps), bool), "mask": column(mask, bool)}
    record = {
        "reward": column(np.ones(steps), np.float32), **{name: flags[name] for name in ("terminated", "truncated")},
        "failed": column(np.zeros(steps), bool), "length": column(np.arange(1, steps + 1), np.int32),
    }  # fmt: skip
    return Rollout(
        obs=column(np.arange(steps), np.float32), last_obs=jnp.full(1, steps, jnp.float32),
        action=column(np.arange(steps), np.int32), reward=record["reward"], **flags,
        contiguous=jnp.array([contiguous]), extras={"record": record}, carry=(),
        count=None if count is None else jnp.array([count]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        # an end, its reset row, and what goes on
        ([rollout([1, 1, 0, 1], [0, 1, 0, 0])], [([0, 1, 2], True), ([3, 4], False)]),
        # the environment broke on row 1
        ([rollout([1, 0, 1, 1], [0, 0, 0, 0])], [([0, 1], False), ([2, 3, 4], False)]),
        # the first goes on in the second, behind padding, and the third does not continue it
        (
            [rollout([1, 1, 0], [0, 0, 0], count=2), rollout([1, 0], [1, 0]), rollout([1], [0], contiguous=False)],
            [([0, 1, 0, 1], True), ([0, 1], False)],
        ),
        # an end that is the last row
        ([rollout([1, 1], [0, 1]), rollout([0, 1], [0, 0])], [([0, 1, 2], True), ([1, 2], False)]),
        # a reset that failed on the first row of the next rollout
        ([rollout([1, 1], [0, 0]), rollout([0, 1], [0, 0])], [([0, 1, 2], False), ([1, 2], False)]),
    ],
)
def test_rollouts_are_cut_into_episodes(rollouts, expected):
    stitch = Stitch(1)
    found = [episode for one in rollouts for episode in stitch.add(one)] + stitch.reset()
    assert [(e.obs.tolist(), e.terminated) for e in found] == expected
    assert all(len(e.obs) == len(e.rewards) + 1 == len(e.actions) + 1 for e in found)
    assert all((e.actions == e.obs[:-1]).all() for e in found)
    assert stitch.unfinished() == []


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_whole_files(tmp_path):
    path, out = tmp_path / "run.yaml", tmp_path / "run"
    output = {"data": {"output": {"max_file_mb": 0.002}}, "stop": {"env_steps": 10**9}}
    path.write_text(json.dumps({**RUN, **output}))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-m", "jrl.train", str(path), f"--out={out}"], env=environment)
    try:
        end = time.monotonic() + 120
        while len(list((out / "data").glob("*.npz"))) < 20 and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = data.read(out / "data")  # each file is whole
    assert store.num_episodes >= 20
    assert (store.terminated | store.truncated).all() and np.isfinite(store.obs).all()
