"""The commands, as a user types them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jrl import checkpoint, config, evaluate, train
from jrl.metrics import loggers

SMALL = [
    "--algo=ppo", "--env=CartPole-v1", "--set=env.backend=graph", "--set=env.num_envs=4", "--set=rollout.length=16",
    "--set=network.hidden=[8]", "--set=rollout.iterations_per_call=2", "--set=run.log=[jsonl,csv]",
    "--set=run.compile_cache=false",
]  # fmt: skip


def run(*args, out):
    return train.main([*SMALL, "--out", str(out), *args])


def learner_of(directory):
    """The arrays of a run's latest checkpoint, without knowing their structure."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        return jax.tree.leaves(reader.restore(checkpoint.locate(directory) / "learner"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a"
    assert run("--stop=env_steps=1500", "--set=run.report_every=300", out=out) == 0
    return out


def test_a_run_leaves_its_files(finished):
    names = {p.name for p in finished.iterdir()}
    assert names >= {"config.yaml", "result.jsonl", "progress.csv", "env.json", "learning_curve.png", "checkpoints"}
    assert names >= {"params.json", "log.txt"}
    assert json.loads((finished / "params.json").read_text()) == config.to_dict(config.load(finished / "config.yaml"))
    rows = loggers.read_rows(finished / "result.jsonl")
    assert len(rows) >= 4
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert {"episode/return", "loss/policy", "policy/entropy", "time/update", "perf/steps_per_s"} <= rows[0].keys()
    steps = [row["env_steps"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] >= 1500
    assert rows[-1]["updates"] == rows[-1]["iteration"] * 16
    assert config.load(finished / "config.yaml").stop == {"env_steps": 1500}
    assert json.loads((finished / "env.json").read_text())["versions"]["jax"] == jax.__version__


def test_evaluate_plays_exactly_the_episodes_asked_for(finished, capsys):
    assert evaluate.main([str(finished), "--episodes", "7", "--envs", "3"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["episodes"] == 7 and 8 <= first["return_min"] <= first["return"] <= first["return_max"] <= 500
    assert evaluate.main([str(finished), "--episodes", "7", "--envs", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == first  # the seed is the run's
    assert evaluate.main([str(finished), "--episodes", "7", "--envs", "3", "--seed", "5"]) == 0
    assert json.loads(capsys.readouterr().out) != first


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(finished, tmp_path):
    out = tmp_path / "b"
    assert run("--stop=env_steps=500", "--set=run.report_every=300", out=out) == 0
    assert checkpoint.read_meta(checkpoint.locate(out))["env_steps"] < 1000
    assert run("--stop=env_steps=1500", "--set=run.report_every=300", "--resume=auto", out=out) == 0
    whole, resumed = checkpoint.locate(finished), checkpoint.locate(out)
    assert checkpoint.read_meta(whole)["iteration"] == checkpoint.read_meta(resumed)["iteration"]
    assert checkpoint.read_meta(whole)["env_steps"] == checkpoint.read_meta(resumed)["env_steps"]
    for a, b in zip(learner_of(finished), learner_of(out), strict=True):
        np.testing.assert_array_equal(a, b)
    last, again = (loggers.read_rows(d / "result.jsonl")[-1] for d in (finished, out))
    assert last["episode/return"] == again["episode/return"]  # episodes in flight were kept


def test_resume_tells_what_changed(tmp_path, capsys):
    out = tmp_path / "c"
    run("--stop=env_steps=200", out=out)
    run("--stop=env_steps=400", "--resume", str(out), "--set=algo.lr=1e-2", out=out)
    assert "changed since the checkpoint: algo.lr: 0.0003 -> 0.01" in capsys.readouterr().out


def test_resume_auto_without_a_checkpoint_starts_afresh(tmp_path, capsys):
    assert run("--stop=env_steps=100", "--resume=auto", out=tmp_path / "d") == 0
    assert "starting afresh" in capsys.readouterr().out


def test_resume_with_another_network_is_refused(finished, capsys):
    assert run("--stop=env_steps=2000", "--resume=auto", "--set=network.hidden=[16]", out=finished) == 2
    assert "does not hold the learner state" in capsys.readouterr().err


def test_as_test_is_the_criterion(tmp_path, capsys):
    assert run("--stop=env_steps=400", "--stop=episode/return=1e6", "--as-test", out=tmp_path / "e") == 1
    assert "not met within the step budget" in capsys.readouterr().out
    wanted = ["--stop=env_steps=20000", "--stop=episode/return=9"]
    assert run(*wanted, "--as-test", out=tmp_path / "f") == 0
    assert "stopped: episode/return" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set=algo.learning_rate=1"], "did you mean algo.lr?"),
        (["--set=rollout.length=15", "--set=algo.num_minibatches=7"], "not divisible by algo.num_minibatches 7"),
        (["--env=CartPole-v99"], "did you mean CartPole-v1"),
        (["--set=env.options.delay=2"], "env.options.delay: CartPole-v1 has no such option"),
        (["--set=network.torso=nature_cnn"], "needs image"),
        (["--set=devices.learners=[0,63]"], "devices.learners: [0, 63] asked for, but there are"),
        (["--set=rollout.collector=host"], "CartPole-v1 is a graph environment"),
        (["--resume=/no/such/run"], "/no/such/run does not exist"),
        (["--as-test"], "--as-test needs a criterion"),
    ],
)
def test_bad_input_exits_with_2(args, message, tmp_path, capsys):
    assert run("--stop=env_steps=100", *args, out=tmp_path / "bad") == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_a_run_is_never_overwritten(finished, capsys):
    before = (finished / "result.jsonl").read_bytes()
    assert run("--stop=env_steps=100", out=finished) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (finished / "result.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    out = tmp_path / "g"
    run("--stop=env_steps=100", out=out)
    (checkpoint.locate(out) / "checkpoint.json").write_text("{")
    assert evaluate.main([str(out)]) == 2
    assert "damaged or not made by jrl" in capsys.readouterr().err


def test_ctrl_c_saves_a_checkpoint(tmp_path):
    out = tmp_path / "h"
    command = [sys.executable, "-m", "jrl.train", *SMALL, "--out", str(out), "--stop=env_steps=1000000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (out / "result.jsonl").exists():
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, text
    assert "interrupted" in text and "Traceback" not in text
    assert checkpoint.read_meta(checkpoint.locate(out))["env_steps"] > 0


@pytest.mark.parametrize(
    "env", [["--set=env.backend=envpool"], ["--set=rollout.collector=host"], ["--set=env.backend=gymnasium"]]
)
def test_the_same_run_on_every_backend(env, tmp_path):
    settings = [s for s in SMALL if "backend" not in s]
    args = [*settings, *env, "--stop=env_steps=300", "--set=evaluation.every=100", "--set=evaluation.duration=3"]
    assert train.main([*args, "--out", str(tmp_path / "i")]) == 0
    last = loggers.read_rows(tmp_path / "i" / "result.jsonl")[-1]
    assert last["evaluation/episodes"] == 3 and last["evaluation/return"] >= 8


@pytest.mark.parametrize(
    "name", ["ppo_atari", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ppo_mujoco", "ppo_dmc", "ppo_box2d"))]
)
def test_the_config_of_every_family_trains(name, tmp_path):
    config_file = Path(__file__).parent.parent / "configs" / f"{name}.yaml"
    small = ["env.num_envs=2", "rollout.length=8", "algo.num_minibatches=2", "algo.num_epochs=1", "run.log=[jsonl]"]
    settings = [f"--set={s}" for s in small]
    assert train.main([str(config_file), *settings, "--stop=env_steps=30", "--out", str(tmp_path / "j")]) == 0
    rows = loggers.read_rows(tmp_path / "j" / "result.jsonl")
    assert rows[-1]["env_steps"] >= 30 and all(np.isfinite(rows[-1][k]) for k in rows[-1] if k.startswith("loss/"))


@pytest.mark.parametrize(
    ("algo", "setting"),
    [
        pytest.param("dqn", "--set=replay.learning_starts=64", marks=pytest.mark.slow),
        pytest.param("ppo", "--set=rollout.length=16", marks=pytest.mark.slow),
    ],
)
def test_envpool_programs_stay_out_of_the_compile_cache(algo, setting, tmp_path):
    """Their keys hold an address: every process would add an entry that none can use."""
    counts = []
    for i in range(2):
        command = [sys.executable, "-m", "jrl.train", f"--algo={algo}", "--env=CartPole-v1", "--stop=env_steps=200"]
        settings = [setting, "--set=network.hidden=[8]", "--out", str(tmp_path / f"run{i}")]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
        subprocess.run([*command, *settings], check=True, env=environment, capture_output=True)
        counts.append(len(list((tmp_path / "cache").glob("*-cache"))))
    assert counts[0] == counts[1] > 3


def test_a_complete_run_is_not_trained_on_by_accident(finished, capsys):
    before = (finished / "result.jsonl").read_bytes()
    assert run("--stop=env_steps=1500", "--resume=auto", out=finished) == 2
    steps = checkpoint.read_meta(checkpoint.locate(finished))["env_steps"]
    assert f"the run is complete, with {steps:,} of 1,500 steps" in capsys.readouterr().err
    assert (finished / "result.jsonl").read_bytes() == before
