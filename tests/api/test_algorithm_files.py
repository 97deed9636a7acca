"""What an Algorithm leaves on disk, and what goes on from there: checkpoints, run directories, rows."""

import re

import numpy as np
import pytest
from test_algorithm import same, small

import jrl
from jrl import config
from jrl.api import PPO, Algorithm
from jrl.errors import InputError
from jrl.metrics import loggers


def test_save_restore_and_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with small().build() as algo:
        algo.train()
        path = algo.save(tmp_path / "c")
        after = algo.train()
        weights = algo.get_weights()
        with pytest.raises(InputError, match="exists: name another"):
            algo.save(tmp_path / "c")
        algo.restore(path)
        again = algo.train()
        assert again["num_env_steps_sampled_lifetime"] == after["num_env_steps_sampled_lifetime"]
        same(algo.get_weights(), weights)
    obs = np.ones(4, np.float32)
    with Algorithm.from_checkpoint(path) as other:
        assert type(other) is PPO and other.iteration == 1 and other.config == small()
        assert other.compute_single_action(obs, explore=False) == jrl.load(path).act(obs)
        assert other.train()["training_iteration"] == 2
        same(other.get_weights(), weights)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]  # log=[] writes nothing


RUN_DIRECTORY = {
    "config.yaml",
    "params.json",
    "result.jsonl",
    "progress.csv",
    "tb",
    "env.json",
    "checkpoints",
    "log.txt",
}


def test_a_run_directory_as_the_command_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = small(min_sample_timesteps_per_iteration=1).debugging(log=["jsonl", "csv", "tensorboard"])
    with made.checkpointing(checkpoint_every=100, keep_last=1).build() as algo:
        assert not (tmp_path / "runs").exists()  # who only acts leaves nothing
        first = algo.train()
        assert capsys.readouterr().out == f"run: {algo.logdir}\n"
        kept = algo.save()
        results = [first, *(algo.train() for _ in range(3))]
    assert algo.logdir.parent == tmp_path / "runs" and algo.logdir.name.startswith("ppo_CartPole-v1_")
    assert {p.name for p in algo.logdir.iterdir()} == {*RUN_DIRECTORY, "learning_curve.png"}
    log = (algo.logdir / "log.txt").read_text()
    assert re.match(r"# 20.*\nppo on CartPole-v1 \(.*parameters\n", log, re.DOTALL) and "steps  return" in log
    assert log.endswith(f"closed after {results[-1]['num_env_steps_sampled_lifetime']:,} steps\n") and "%" not in log
    rows = loggers.read_rows(algo.logdir / "result.jsonl")
    assert [row["env_steps"] for row in rows] == [r["num_env_steps_sampled_lifetime"] for r in results]
    assert jrl.load(algo.logdir).env_steps == rows[-1]["env_steps"]  # the end has a checkpoint
    assert jrl.load(kept).env_steps == rows[0]["env_steps"]
    with Algorithm.from_checkpoint(algo.logdir) as other:
        found = other.train()
        assert (found["training_iteration"], found["iterations_since_restore"]) == (5, 1)
        assert found["episodes_total"] == results[-1]["episodes_total"] + found["episodes_this_iter"]
        assert other.logdir != algo.logdir


def test_rows_go_to_files_where_out_is_set(tmp_path):
    with small().debugging(out=str(tmp_path / "run"), log=["jsonl"]).build() as algo:
        result = algo.train()
        with pytest.raises(InputError, match=r"run\.out: .*/run is in use by process"):
            small().debugging(out=str(tmp_path / "run"), log=["jsonl"]).build()
        saved, second = algo.save(), algo.save()
        assert saved != second and jrl.load(saved).env_steps == jrl.load(second).env_steps
        algo.restore(saved)
        again = algo.train()
    with pytest.raises(RuntimeError, match="is stopped"):
        algo.train()
    rows = loggers.read_rows(tmp_path / "run" / "result.jsonl")
    with pytest.raises(InputError, match="already has a run"):
        small().debugging(out=str(tmp_path / "run")).build()
    assert [row["env_steps"] for row in rows] == [x["timesteps_total"] for x in (result, again)]
    assert config.load(tmp_path / "run" / "config.yaml", ["stop.env_steps=1"]).run.seed == 5
