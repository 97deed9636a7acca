"""The same config on several devices, collected beside learning, and by other processes; and what breaks there."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jrl import config, train
from jrl.learn import parallel
from jrl.metrics import loggers
from jrl.run import build, build_collect
from jrl.run.store import checkpoint

HERE = Path(__file__).parent
slow = pytest.mark.slow
PPO = str(HERE.parent / "configs" / "ppo.yaml")
SMALL = [
    "--algo=ppo", "--env=CartPole-v1", "--set=env.num_envs=4", "--set=rollout.length=16", "--set=network.hidden=[8]",
    "--set=run.log=[jsonl]", "--set=run.compile_cache=false", "--set=algo.num_minibatches=2",
    "--set=algo.num_epochs=1",
]  # fmt: skip
ASYNC = "--set=rollout.mode=async"


def rows(out):
    return loggers.read_rows(out / "result.jsonl")


def started(*args, out):
    """`python -m jrl.train` in a process, with the environments of this folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "jrl.train", *SMALL, *args, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip


# ---------------------------------------------------------------- it learns as it does alone


@slow
@pytest.mark.parametrize("knob", ["rollout.mode=async", "devices.fake=4", "env_runners.num=2"])
def test_one_config_reaches_its_return_everywhere(knob, tmp_path):
    out = tmp_path / "run"
    args = [f"--set={knob}", "--as-test", "--set=run.log=[jsonl]", "--set=algo.normalize_obs=true"]
    assert train.main([PPO, *args, "--out", str(out)]) == 0
    last = rows(out)[-1]
    assert last["episode/return"] >= 475 and last["env_steps"] < 300_000
    if "async" in knob:
        assert last["rollout/policy_lag"] == 1.0
    if "runners" in knob:
        assert last["env_runners/num_healthy_workers"] == 2.0
    # every observation counts once in the statistics, whoever collected it
    kept = checkpoint.locate(out)
    counted = float(checkpoint.read(kept, "learner")["obs_stats"]["count"])
    assert counted == checkpoint.read_meta(kept)["env_steps"]


def parameters(out):
    return checkpoint.read(checkpoint.locate(out), "learner")["params"]


@slow
def test_an_asynchronous_run_repeats_itself(tmp_path):
    for name in "ab":
        args = [*SMALL, ASYNC, "--set=env.backend=jax", "--set=rollout.max_policy_lag=2", "--stop=env_steps=640"]
        assert train.main([*args, "--out", str(tmp_path / name)]) == 0
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path / "a"), parameters(tmp_path / "b"))
    assert {row["rollout/policy_lag"] for row in rows(tmp_path / "a")[2:]} == {2.0}


@slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", ["envpool", "jax", "gymnasium"])
def test_other_devices_act_than_learn(backend, mode, tmp_path):
    args = [f"--set=env.backend={backend}", f"--set=rollout.mode={mode}", "--stop=env_steps=400"]
    args += ["--set=devices.actors=[0,1]", "--set=devices.learners=[2,3]"]
    assert train.main([*SMALL, *args, "--out", str(tmp_path / "run")]) == 0
    last = rows(tmp_path / "run")[-1]
    assert last["env_steps"] >= 400 and last["episode/count"] >= 0 and np.isfinite(last["loss/value"])
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("jrl-collect", "jrl-async"))]


@slow
def test_pools_have_the_environments_of_one_pool():
    """Splitting a vector over devices, or in two shares on one device, leaves each environment as it is."""
    load = lambda *more: config.load(None, ["env.id=CartPole-v1", "stop.env_steps=1000", *more], algo="ppo")
    rollouts = []
    splits = ("devices.learners=[0]", "devices.learners=[0, 1]", "devices.learners=[0, 1, 2, 3]")
    for devices in (*splits, "devices.actors=[0, 0]"):
        for collector in ("auto", "host"):
            more = f"rollout.collector={collector}", "rollout.explore=false", "devices.fake=4"
            if "learners" not in devices:
                more += ("devices.learners=[0]",)
            source, actor = build_collect.collector(load(devices, "env.num_envs=8", *more))
            rollouts.append([jax.device_get(source.next(actor, jax.random.key(i))[0]) for i in range(2)])
            source.close()
    for other in rollouts[1:]:
        jax.tree.map(np.testing.assert_array_equal, rollouts[0], other)


@slow
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_nothing_is_kept_of_the_states_before(algo):
    """Each call takes over the buffers of the last: the device holds no more after ten of them than after two."""
    more = ["replay.capacity=4096", "replay.learning_starts=64"] if algo == "dqn" else []
    settings = ["env.backend=jax", "env.num_envs=8", "devices.fake=4", "stop.env_steps=100000", *more]
    run = build.run(config.load(None, ["env.id=CartPole-v1", *settings], algo=algo))
    state, held = run.program.init(0), []
    for i in range(10):
        before = jax.tree.leaves((state.learner, state.replay))
        state, metrics, _ = jax.block_until_ready(run.program.advance(state, 0, i * run.program.iterations))
        assert all(x.is_deleted() for x in before)
        del before, metrics
        held.append(sum(x.nbytes for x in jax.live_arrays()))
    assert max(held[2:]) <= held[1]
    assert parallel.find_diverged(state.learner) == []
    run.program.close()


# ---------------------------------------------------------------- what breaks


@slow
def test_ctrl_c_ends_a_run_with_threads_after_a_checkpoint(tmp_path):
    """First rows, then the interruption, a checkpoint that is not behind them, and the end: no thread keeps it."""
    out = tmp_path / "run"
    endless = ("--stop=env_steps=1000000000", "--set=run.report_every=2000")
    process = started(ASYNC, "--set=env.backend=envpool", *endless, out=out)
    while process.poll() is None and not ((out / "result.jsonl").exists() and rows(out)):
        time.sleep(0.1)
    before = rows(out)[-1]["env_steps"]
    process.send_signal(signal.SIGINT)
    text, err = process.communicate()
    assert process.returncode == 130, err
    assert "interrupted" in text and "Traceback" not in err
    assert checkpoint.read_meta(checkpoint.locate(out))["env_steps"] >= before


@slow
def test_an_environment_that_raises_in_a_thread_ends_the_run_with_its_own_traceback(tmp_path):
    out = tmp_path / "run"
    process = started(
        "--env=faulty_envs:Crashing", "--set=env.options={p_step: 0.0005}", ASYNC, "--stop=env_steps=100000", out=out
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ZeroDivisionError: crashed in step" in err and "in _roll" in err and "faulty_envs.py" in err
    assert checkpoint.read_meta(checkpoint.locate(out))["env_steps"] > 0  # what was learned until then


@slow
def test_all_runners_dead_is_a_clear_error_after_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    settings = ["--env=faulty_envs:Crashing", "--set=env.options={p_step: 0.001, how: exit}", "--set=env_runners.num=2"]
    process = started(
        *settings, "--set=env_runners.ignore_env_runner_failures=true", "--stop=env_steps=1000000", out=out
    )
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1, err
    assert "Traceback" not in err and "error: " in err and "recreate_failed_env_runners" in err
    assert checkpoint.read_meta(checkpoint.locate(out))["env_steps"] > 0


@slow
def test_a_resource_that_no_node_has_is_one_error(tmp_path, capsys):
    runners = ["--set=env_runners.num=2", "--set=env_runners.custom_resources={moon: 1}"]
    assert train.main([*SMALL, *runners, "--stop=env_steps=100", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "moon" in err and err.count("error:") == 1
