"""The commands, as a user types them."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jrl import config, evaluate, train
from jrl.host import files
from jrl.metrics import loggers
from jrl.run.session import Session
from jrl.run.store import checkpoint

SMALL = [
    "--algo=ppo", "--env=CartPole-v1", "--set=env.backend=jax", "--set=env.num_envs=4", "--set=rollout.length=16",
    "--set=network.hidden=[8]", "--set=rollout.iterations_per_call=2", "--set=run.log=[jsonl,csv]",
    "--set=run.compile_cache=false",
]  # fmt: skip


def run(*args, out):
    return train.main([*SMALL, "--out", str(out), *args])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a"
    assert run("--stop=env_steps=1500", "--set=run.report_every=300", out=out) == 0
    return out


def test_a_run_leaves_its_files(finished):
    names = {p.name for p in finished.iterdir()}
    assert names >= {"config.yaml", "result.jsonl", "progress.csv", "env.json", "learning_curve.png", "checkpoints"}
    assert names >= {"params.json", "log.txt"}
    assert (finished / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
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


def test_log_txt_holds_what_was_printed(finished):
    text = (finished / "log.txt").read_text()
    assert text.startswith("# 20") and "ppo on CartPole-v1 (jax" in text and "107 parameters" in text
    assert "% of 1,500 steps" in text and "\x1b" not in text
    assert text.endswith(
        f"run: {finished}\nevaluate: python -m jrl.evaluate {finished} --episodes 100\n"
        f"page: python -m jrl.report {finished} --out {finished}/report\n"
    )
    assert "\nstopped: env_steps reached 1,500\n" in text


def test_a_run_goes_on_with_its_own_config(finished, tmp_path, capsys, caplog, monkeypatch):
    """Also where nobody reads what it prints, and where files of it are damaged."""
    out = shutil.copytree(finished, tmp_path / "moved")  # its config.yaml names another directory
    before = len(loggers.read_rows(out / "result.jsonl"))
    with (out / "result.jsonl").open("a") as file:
        file.write("\0\0\0 after a power cut\n")
    monkeypatch.setattr(sys, "stdout", open(os.open(os.devnull, os.O_RDONLY), "w"))  # noqa: SIM115
    assert train.main(["--resume", str(out), "--stop=env_steps=1800", "--set=algo.lr=0.01"]) == 0
    monkeypatch.undo()
    assert config.load(out / "config.yaml").run.report_every == 300  # as it was
    added = (out / "log.txt").read_text().removeprefix((finished / "log.txt").read_text())
    assert "resume: changed: algo.lr 0.0003 -> 0.01\n" in added and "changed: stop.env_steps 1500 -> 1800\n" in added
    assert added.count("changed: ") == 2 and "result.jsonl: dropped 1 damaged line" in added
    assert f"stopped: env_steps reached 1,800\nrun: {out}\n" in added
    assert len(loggers.read_rows(out / "result.jsonl")) > before
    assert train.main(["--resume", str(tmp_path / "nowhere")]) == 2
    assert f"error: --resume: {tmp_path / 'nowhere'} does not exist: give a run" in capsys.readouterr().err
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert f"error: --resume: {tmp_path} holds no run to continue: begin one" in capsys.readouterr().err
    (out / "config.yaml").write_text("algo: [")
    assert train.main(["--resume", str(out)]) == 2
    assert "config.yaml: it is damaged" in caplog.text and "the run is complete, with" in capsys.readouterr().err


def test_a_run_that_is_under_way_is_left_alone(finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    checked = str(checkpoint.locate(finished))
    with files.lock_directory(finished):
        for more in ((), ("--resume=auto",), ("--resume", str(finished)), ("--resume", checked)):
            assert run("--stop=env_steps=5000", *more, out=finished) == 2
            err = capsys.readouterr().err
            assert f"error: run.out: {finished} is in use by process {os.getpid()} on " in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_disk_that_becomes_full_costs_nothing(tmp_path, capsys, monkeypatch):
    """Rows are whole, and the checkpoint is that of the latest of them."""
    out, append, rows = tmp_path / "full", files.append, []

    def small(file, data):
        if Path(file.name).name == "progress.csv":
            rows.append(data)
            if len(rows) == 4:
                raise OSError(errno.ENOSPC, "No space left on device", file.name)
        append(file, data)

    monkeypatch.setattr(files, "append", small)
    assert run("--stop=env_steps=100000", "--set=run.report_every=128", out=out) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: cannot write to ") and captured.err.count("\n") == 1
    meta = checkpoint.read_meta(checkpoint.locate(out))
    assert f"saved: the state after {meta['env_steps']:,} steps" in captured.out
    monkeypatch.undo()
    last = loggers.read_rows(out / "result.jsonl")[-1]
    assert meta["rows"]["env_steps"] == last["env_steps"] and len((out / "progress.csv").read_text().split("\n")) == 5
    assert not list((out / "checkpoints").glob("*.unfinished"))


def test_an_evaluation_is_of_the_weights_that_are_kept(tmp_path, capsys):
    out = tmp_path / "best"
    evaluation = ["--set=evaluation.every=300", "--set=evaluation.duration=3", "--set=run.report_every=500"]
    best = ["--set=checkpoint.keep_best_by=evaluation/return", "--set=checkpoint.keep_last=1"]
    best += ["--set=run.seed=3"]  # whose best evaluation is not the last
    assert run("--stop=env_steps=2500", *evaluation, *best, "--set=algo.lr=0.01", out=out) == 0
    rows = loggers.read_rows(out / "result.jsonl")
    played = [row for row in rows if row["evaluation/weights_version"] == row["iteration"]]
    assert all(bool(row.get("evaluation/returns")) == (row in played) for row in rows)  # in the first row of each alone
    for row in played:
        assert len(row["evaluation/returns"]) == len(row["evaluation/lengths"]) == row["evaluation/episodes"]
        assert max(row["evaluation/returns"]) == row["evaluation/return_max"]
    # of each 300 steps the first call that got there, none late; calls take at most 128
    assert [row["env_steps"] // 300 for row in played] == list(range(1, 1 + rows[-1]["env_steps"] // 300))
    assert all(row["env_steps"] % 300 < 128 for row in played)
    top = max(played, key=lambda row: row["evaluation/return"])
    kept = checkpoint.read_meta(checkpoint.locate(out, best=True))
    assert (kept["iteration"], kept["env_steps"]) == (top["iteration"], top["env_steps"])
    assert kept["metrics"]["evaluation/return"] == top["evaluation/return"]
    told = f"best: evaluation/return {top['evaluation/return']:.4g} after {top['env_steps']:,} steps, which other"
    assert top is not rows[-1] and told in capsys.readouterr().out


@pytest.mark.parametrize("parallel", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_run_ends_with_the_weights_that_met_its_criterion(parallel, tmp_path):
    out = tmp_path / "ended"
    evaluation = ["--set=evaluation.every=300", "--set=evaluation.duration=3", "--set=run.report_every=500"]
    more = [f"--set=evaluation.parallel={parallel}", "--set=algo.lr=0.01", "--as-test"]
    assert run("--stop=env_steps=100000", "--stop=evaluation/return=90", *evaluation, *more, out=out) == 0
    rows, meta = loggers.read_rows(out / "result.jsonl"), checkpoint.read_meta(checkpoint.locate(out))
    last = rows[-1]
    assert last["evaluation/return"] >= 90 > max((row["evaluation/return"] or 0 for row in rows[:-1]), default=0)
    assert last["evaluation/weights_version"] == last["iteration"] == meta["iteration"]
    assert last["env_steps"] == meta["env_steps"]


def test_a_run_without_a_checkpoint_does_not_advertise_one(tmp_path, capsys, monkeypatch):
    call = Session.dispatch

    def hang_up(self, count):
        os.kill(os.getpid(), signal.SIGHUP)  # the terminal is closed
        return call(self, count)

    monkeypatch.setattr(Session, "dispatch", hang_up)
    options = ["--set=checkpoint.exact=true", "--set=checkpoint.every=100000", "--stop=env_steps=50000"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the suite runs under nohup
    try:
        assert run(*options, out=tmp_path / "none") == 129
    finally:
        signal.signal(signal.SIGHUP, before)
    out = capsys.readouterr().out
    assert "interrupted before the first checkpoint" in out and out.endswith(f"run: {tmp_path}/none\n")


def test_evaluate_plays_exactly_the_episodes_asked_for(finished, capsys):
    assert evaluate.main([str(finished), "--episodes", "7", "--envs", "3", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["episodes"] == 7 and 8 <= first["return_min"] <= first["return"] <= first["return_max"] <= 500
    assert evaluate.main([str(finished), "--episodes", "7", "--envs", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first  # the seed is the run's
    more = ["--seed", "5", "--json", "--per-episode"]
    assert evaluate.main([str(finished), "--episodes", "7", "--envs", "3", *more]) == 0
    other = json.loads(capsys.readouterr().out)
    assert {name: other[name] for name in first} != first
    assert evaluate.main([str(finished), "--episodes", "1", "--algo", "PPO", "--env", "CartPole-v1"]) == 0
    assert evaluate.main([str(finished), "--run", "SAC"]) == 2
    assert "--algo: expected ppo, the checkpoint's algorithm, got 'SAC'" in capsys.readouterr().err
    assert len(other["returns"]) == len(other["lengths"]) == 7 and "returns" not in first
    np.testing.assert_allclose(np.mean(other["returns"]), other["return"])
    np.testing.assert_allclose(np.std(other["lengths"]), other["length_std"])


def test_rllibs_word_in_front_of_a_file(tmp_path, monkeypatch, capsys):
    """`train file x.yaml` is `train x.yaml`, unless there is a file of that name."""
    monkeypatch.chdir(tmp_path)
    assert train.main(["file", "x.yaml"]) == 2 and "x.yaml: there is no such file" in capsys.readouterr().err
    Path("file").write_text("algo: {name: zzz}")
    with pytest.raises(SystemExit):
        train.main(["file", "x.yaml"])
    assert "unrecognized arguments: x.yaml" in capsys.readouterr().err


def test_resume_with_another_network_is_refused(finished, capsys):
    assert run("--stop=env_steps=2000", "--resume=auto", "--set=network.hidden=[16]", out=finished) == 2
    assert "does not hold the learner state" in capsys.readouterr().err


def test_as_test_is_the_criterion_and_resume_auto_without_a_checkpoint_starts_afresh(tmp_path, capsys):
    more = ["--as-test", "--resume=auto"]
    assert run("--stop=env_steps=400", "--stop=episode/return=1e6", *more, out=tmp_path / "e") == 1
    said = capsys.readouterr().out
    assert "not met within the step budget" in said and "starting afresh" in said


def test_a_run_is_never_overwritten(finished, capsys):
    before = (finished / "result.jsonl").read_bytes()
    assert run("--stop=env_steps=100", out=finished) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (finished / "result.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_refused(finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / "g")
    (checkpoint.locate(out) / "checkpoint.json").write_text("{")
    assert evaluate.main([str(out)]) == 2
    assert "damaged or not made by jrl" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        ["--set=env.backend=envpool"],
        ["--set=env.backend=gymnasium"],
        ["--set=rollout.collector=host"],
    ],
)
def test_the_same_run_on_every_backend(env, tmp_path):
    settings = [s for s in SMALL if "backend" not in s]
    args = [*settings, *env, "--stop=env_steps=300", "--set=evaluation.every=100", "--set=evaluation.duration=3"]
    pool = env == ["--set=env.backend=envpool"]
    assert train.main([*args, f"--set=evaluation.record={int(pool)}", "--out", str(tmp_path / "i")]) == 0
    last = loggers.read_rows(tmp_path / "i" / "result.jsonl")[-1]
    assert last["evaluation/episodes"] == 3 and last["evaluation/return"] >= 8
    videos = sorted(int(p.stem) for p in (tmp_path / "i" / "videos").glob("*.mp4"))
    assert bool(videos) == pool and all(100 <= steps < 400 for steps in videos)  # one for each evaluation


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_atari", "ppo_mujoco", "ppo_dmc", "ppo_box2d"])
def test_the_config_of_every_family_trains(name, tmp_path):
    config_file = Path(__file__).parent.parent / "configs" / f"{name}.yaml"
    small = ["env.num_envs=2", "rollout.length=8", "algo.num_minibatches=2", "algo.num_epochs=1", "run.log=[jsonl]"]
    settings = [f"--set={s}" for s in small]
    assert train.main([str(config_file), *settings, "--stop=env_steps=30", "--out", str(tmp_path / "j")]) == 0
    rows = loggers.read_rows(tmp_path / "j" / "result.jsonl")
    assert rows[-1]["env_steps"] >= 30 and all(np.isfinite(rows[-1][k]) for k in rows[-1] if k.startswith("loss/"))


@pytest.mark.slow
def test_envpool_programs_stay_out_of_the_compile_cache(tmp_path):
    """Their keys hold an address: every process would add an entry that none can use."""
    counts = []
    for i in range(2):
        command = [sys.executable, "-m", "jrl.train", "--algo=ppo", "--env=CartPole-v1", "--stop=env_steps=200"]
        settings = ["--set=rollout.length=16", "--set=network.hidden=[8]", "--out", str(tmp_path / f"run{i}")]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
        subprocess.run([*command, *settings], check=True, env=environment, capture_output=True)
        counts.append(len(list((tmp_path / "cache").glob("*-cache"))))
    assert counts[0] == counts[1] > 3


def test_a_run_that_met_its_criterion_trains_on(tmp_path, capsys, monkeypatch):
    """The line of docs/from-sb3.md with fewer steps: criteria that were met before do not count, and null drops one."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "from-sb3.md").read_text()
    recipe = re.search(r"`(--resume runs/cartpole --stop env_steps=)200000`", page)[1]
    goals = ["--set=run.smoothing_episodes=2", "--stop=episode/return=9", "--stop=env_steps=5000"]
    assert run(*goals, "--as-test", out=Path("runs/cartpole")) == 0
    assert "stopped: episode/return" in capsys.readouterr().out
    steps = checkpoint.read_meta(checkpoint.locate(Path("runs/cartpole")))["env_steps"]
    shutil.copytree("runs/cartpole", "copy")
    assert train.main(f"{recipe}{steps + 600}".split()) == 0
    said = capsys.readouterr().out
    assert "resume: stop.episode/return 9 was met before: it does not count from now on" in said
    assert f"stopped: env_steps reached {steps + 600:,}" in said
    assert train.main(["--resume", "copy"]) == 0  # nothing was asked for
    said = capsys.readouterr().out
    assert "was met before, and ends the run again: to train on, --stop episode/return=null" in said
    assert "stopped: episode/return" in said
    assert train.main(["--resume", "copy", "--stop=episode_return_mean=null", f"--stop=env_steps={steps + 600}"]) == 0
    said = capsys.readouterr().out
    assert "was met before" not in said and f"stopped: env_steps reached {steps + 600:,}" in said
    assert config.load("copy/config.yaml").stop == {"env_steps": steps + 600}


def test_a_complete_run_is_not_trained_on_by_accident(finished, capsys):
    before = (finished / "result.jsonl").read_bytes()
    assert run("--stop=env_steps=100", "--resume=auto", out=finished) == 2
    steps = checkpoint.read_meta(checkpoint.locate(finished))["env_steps"]
    told = capsys.readouterr().err
    assert f"the run is complete, with {steps:,} of 100 steps" in told and f"--stop env_steps={2 * steps}" in told
    assert (finished / "result.jsonl").read_bytes() == before
