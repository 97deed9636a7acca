"""What `data.output` writes is what was acted on: environments whose state determines everything, whoever collects.

An episode is checked against the rules: each of its steps follows upon the one before, none is there twice, and none
that the learner got is missing.
"""

import json
import shutil
import typing
from typing import ClassVar

import jax
import numpy as np
import pytest
from ruled_env import Rules, length, paid

from jrl import config, data, registry, train
from jrl.callbacks import Callbacks
from jrl.config.datasets import OutputConfig
from jrl.data import formats
from jrl.errors import InputError
from jrl.fields import schema
from jrl.run.session import Session


class Seen(Callbacks):
    """Keeps the rollouts that the learner gets."""

    rollouts: ClassVar[list] = []

    def on_sample_end(self, *, samples, **kwargs):
        self.rollouts.append(jax.device_get(samples))


COMMON = {
    "env": {"id": "rules", "backend": "gymnasium", "num_envs": 4, "clip_rewards": True},
    "network": {"hidden": [8]},
    "custom": {"callbacks": ["seen"]},
    "run": {"log": [], "report_every": 1},
    "stop": {"env_steps": 100_000},
    "data": {"output": {"compress": False}},
}
PPO = {"algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1}, "rollout": {"length": 16}}
SAC = {
    "algo": {"name": "sac"},
    "replay": {"capacity": 2_000, "batch_size": 32, "learning_starts": 16},
    "rollout": {"length": 8},
}
MEMORY = {"network": {"core": {"name": "lstm", "size": 8}, "use_prev_action": True}}
WHOLE = {"rollout": {"batch_mode": "complete_episodes"}, "env": {"horizon": 10}}
READY = {"env": {"batch_wait_ms": 1, "remote_worker_envs": True}}
RUNNERS, ASYNC = {"env_runners": {"num": 2}}, {"rollout": {"mode": "async"}}
# what is written is what happened, whatever the learner makes of it
NO_ENDS, ENDS_ALONE = {"env": {"no_done_at_end": True}}, {"env": {"no_done_at_end": False}}
CASES = {
    "PPO": (PPO, {"algo": {"normalize_obs": True}}),
    "PPO, memory, whole episodes": (PPO, MEMORY, WHOLE, ENDS_ALONE),
    "SAC, a thread": (SAC, ASYNC, NO_ENDS),
    "PPO, workers that do not wait": (PPO, READY, ENDS_ALONE),
    "PPO, asynchronous runners": (PPO, RUNNERS, ASYNC),
    "SAC, runners, whole episodes": (SAC, RUNNERS, WHOLE),
}
QUICK = tuple(CASES)[:1]


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(Seen, "rollouts", [])
    registry.register("rules", Rules)
    registry.register("seen", Seen)


def merged(*parts):
    cfg = COMMON
    for part in parts:
        cfg = schema.merge(cfg, part)
    return cfg


def collected(cfg, directory, calls=8):
    """The data set of a run of so many iterations."""
    with Session(config.load(cfg), endless=True, directory=directory) as session:
        session.start()
        for _ in range(calls):
            session.reporter.add(session.advance())
    return data.read(directory / "data")


def rows_of(rollouts):
    """The states of the steps that learners got, and what was done in them."""
    return {
        tuple(r.obs["x"][t, b].astype(int).tolist()): int(r.action[t, b])
        for r in rollouts
        for t, b in np.argwhere(r.mask)
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_what_is_written_is_what_was_acted_on(name, tmp_path, known):
    store = collected(merged(*CASES[name]), tmp_path)
    found = {}
    for episode in store.episodes():
        x, steps = episode.obs["x"], len(episode.reward)
        assert (np.diff(x, axis=0) == [0, 0, 1]).all() and x[0, 2] == episode.labels["begin"]
        assert x[0, 0] % 50 == x[0, 0] and (x[:, :2] == x[0, :2]).all()
        whole = x[-1, 2] == length(*x[0, :2])
        limit = x[0, 1] % 2 == 1
        assert (episode.terminated, episode.truncated) == (whole and not limit, whole and limit)
        assert (episode.obs["action_mask"][np.arange(steps), episode.action] == 1).all()
        np.testing.assert_allclose(episode.reward, [paid(s, a) for s, a in zip(x, episode.action)], rtol=1e-6)
        for state, action in zip(x.astype(int).tolist(), episode.action.tolist()):
            assert tuple(state) not in found  # none comes twice
            found[tuple(state)] = action
    seen = rows_of(Seen.rollouts)
    assert len(seen) > 100 and len({state[0] for state in seen}) == 4
    assert {state: found[state] for state in seen} == seen
    # a learner of whole episodes has not got those under way
    assert "whole" in name or len(found) == len(seen)
    assert ("log_prob" in store.columns) == ("PPO" in name)
    if "PPO" in name:
        logs = np.concatenate([episode.columns["log_prob"] for episode in store.episodes()])
        assert (logs <= 0).all() and (logs < 0).any()


@pytest.mark.slow
def test_agents_of_games_that_do_not_wait_have_their_own_steps(tmp_path, known):
    game = {"env": {"id": "games:Numbered", "num_envs": 2}, "multi_agent": {"mapping": "by_agent"}}
    own = {"network": {"hidden": [8]}, "run": {"log": []}, "data": {"output": {}}, "stop": {"env_steps": 1_000}}
    store = collected(merged(PPO, READY, game, own), tmp_path, calls=3)
    episodes = list(store.episodes())
    assert len(episodes) > 25 and {(e.labels["agent"], e.labels["policy"]) for e in episodes} == {
        ("left",) * 2,
        ("right",) * 2,
    }
    for episode in episodes:  # each sees the step and the sum of its own actions
        np.testing.assert_array_equal(np.diff(episode.obs[:, 1]), 1)
        np.testing.assert_array_equal(np.diff(episode.obs[:, 2]), episode.action)
        np.testing.assert_array_equal(episode.reward, 1.0 + episode.action)


CARTPOLE = {
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
    "env": {"id": "CartPole-v1", "backend": "jax", "num_envs": 4},
    "network": {"hidden": [8]},
    "rollout": {"length": 32, "iterations_per_call": 1},
    "run": {"log": [], "report_every": 128},
    "data": {"output": {"columns": ["log_prob"], "max_file_mb": 0.003}},
}


@pytest.mark.slow
def test_a_resumed_run_loses_nothing_and_writes_nothing_twice(tmp_path):
    whole, cut, path = tmp_path / "whole", tmp_path / "cut", tmp_path / "run.yaml"
    path.write_text(json.dumps(CARTPOLE))
    options = ["--stop=env_steps=1500", "--set=checkpoint.every=500", "--set=checkpoint.exact=true"]
    assert train.main([str(path), *options, f"--out={whole}"]) == 0
    shutil.copytree(whole, cut)
    for later in sorted((cut / "checkpoints").iterdir(), key=lambda found: int(found.name))[1:]:
        shutil.rmtree(later)
    assert train.main([f"--resume={cut}", *options]) == 0
    # environments begin anew at each of these checkpoints, interrupted or not: so both runs act on the same steps
    first, second = data.read(whole / "data"), data.read(cut / "data")
    assert first.num_steps >= 1500 and first.checksum() == second.checksum()
    assert len(list((cut / "data").glob("*.npz"))) > 3


def test_a_directory_that_holds_data_is_left_alone(tmp_path):
    cfg = config.load({**CARTPOLE, "stop": {"env_steps": 1000}, "data": {"output": {"path": str(tmp_path / "a")}}})
    with Session(cfg) as session:
        session.start()
        session.advance()
    with Session(cfg) as session, pytest.raises(InputError, match="expected a new directory"):
        session.start()


def test_columns_that_nobody_records_are_refused():
    cfg = config.load({**CARTPOLE, "stop": {"env_steps": 1000}, "data": {"output": {"columns": ["q"]}}})
    with pytest.raises(InputError, match=r"data\.output\.columns: expected some of log_prob.*, got q"):
        Session(cfg)


@pytest.mark.slow
def test_episodes_of_self_play_tell_the_learner_from_its_opponents(tmp_path):
    small = ["env.num_envs=8", "multi_agent.self_play.pool=2", "rollout.length=16", "network.hidden=[8]", "run.log=[]"]
    cfg = config.to_dict(config.load("tictactoe", [*small, "stop.env_steps=100000", "data.output.columns=[log_prob]"]))
    store = collected(cfg, tmp_path, calls=2)
    assert (store.columns["log_prob"][store.is_step()] <= 0).all()
    names = store.labels["agent"].tolist()
    for agent, env, policy in zip(names, store.labels["env"].tolist(), store.labels["policy"].tolist(), strict=True):
        assert (policy == "main") == (sorted(set(names)).index(agent) == env % 2) and policy in ("main", "opponents")
    assert set(store.labels["policy"]) == {"main", "opponents"}


def test_every_format_of_files_can_be_written():
    chosen = typing.get_type_hints(OutputConfig)["format"]
    assert set(typing.get_args(chosen)) == set(formats.FILE_FORMATS)


def in_format(format):
    return {**CARTPOLE, "stop": {"env_steps": 1000}, "data": {"output": {"format": format}}}


def test_formats_hold_the_same_steps(tmp_path):
    plain, store = (collected(in_format(name), tmp_path / name, calls=2) for name in ("jrl", "rllib-parquet"))
    assert store.num_steps == plain.num_steps
    np.testing.assert_array_equal(store.reward, plain.reward)
    for found, wanted in ((store.obs, plain.obs), (store.action, plain.action)):
        np.testing.assert_array_equal(np.asarray(found, wanted.dtype), wanted)


@pytest.mark.slow
def test_agents_of_different_spaces_have_directories_of_their_own(tmp_path):
    cfg = {
        "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
        "env": {"id": "test_agent_kinds:pursuit", "num_envs": 4},
        "network": {"hidden": [8]},
        "multi_agent": {},
        "rollout": {"length": 16},
        "run": {"log": []},
        "data": {"output": {}},
        "stop": {"env_steps": 1_000},
    }
    with Session(config.load(cfg), endless=True, directory=tmp_path) as session:
        session.start()
        for _ in range(3):
            session.advance()
    found = {path.name: data.read(path) for path in (tmp_path / "data").iterdir()}
    assert set(found) == {"hunter_0", "prey_0"}
    assert set(found["hunter_0"].labels["agent"]) == {"hunter_0", "hunter_1"}
    assert set(found["prey_0"].labels["agent"]) == {"prey_0"}
    assert set(found["prey_0"].obs) == {"me", "hunters"}
    # who hunts sees itself first, then the prey, which sees itself as "me": the same game, at the same time
    games = {(e.labels["env"], e.labels["iteration"]): e for e in found["prey_0"].episodes() if e.labels["begin"] == 0}
    assert len(games) >= 4
    for store in found.values():
        assert store.columns["log_prob"].shape == (store.num_rows,)
        assert (store.columns["log_prob"][store.is_step()] != 0).all()
