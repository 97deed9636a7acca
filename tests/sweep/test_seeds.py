"""`jrl.train --seeds`: directories, ends and resumed populations; the commands of docs/sweeps.md."""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from sweep_runs import SMALL, rows

import jrl
from jrl import config, evaluate, train
from jrl.host import output
from jrl.learn import memory
from jrl.learn.population import Population
from jrl.run.store import checkpoint
from jrl.sweep import __main__, member_processes, members
from jrl.sweep import train as populations
from jrl.sweep.members import Record

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
SMALLER = ["--set=network.hidden=[8]", "--set=algo.num_epochs=1", "--set=algo.num_minibatches=1"]


def run(*args):
    return train.main([*SMALL, "--set=checkpoint.every=32", *args])


def table(directory):
    with (directory / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    started = []

    def start(command, **more):
        """Starts a process for the first member only, as an import of jax takes seconds."""
        started.append(command)
        if len(started) == 1:
            return subprocess.Popen(command, **more)
        return SimpleNamespace(poll=lambda: 0, returncode=train.main(command[3:]))

    monkeypatch.setattr(member_processes, "subprocess", SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT))
    commands = {"train": train, "evaluate": evaluate, "sweep": __main__}
    for command, line in re.findall(r"^python -m jrl\.(train|evaluate|sweep) (.+)$", PAGE, re.M):
        args = shlex.split(line)
        small = SMALLER if args[0] == "ppo" else ()
        assert commands[command].main([*args, *small]) == 0, capsys.readouterr().err
    made = Path("runs/seeds")
    assert [json.loads((made / "members" / f"0{i}" / "params.json").read_text())["run"]["seed"] for i in range(3)] == [
        0,
        1,
        2,
    ]
    found = table(made)
    assert [(row["member"], row["run.seed"], row["ended"]) for row in found] == [
        (f"0{i}", str(i), "env_steps") for i in range(3)
    ]
    best = max(found, key=lambda row: float(row["last"]))
    assert rows(made / "best") == rows(made / "members" / best["member"])
    assert (made / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert all(int(row["env_steps"]) >= 8192 for row in found)
    said = capsys.readouterr().out
    assert "3 members, each with its run.seed, in one program" in said
    assert "2 members, 2 at once, each in its own process" in said
    assert [row["ended"] for row in table(Path("runs/processes"))] == ["ended", "ended"]
    assert [command[1:3] for command in started] == [["-m", "jrl.train"]] * 2
    assert (
        "  run.seed: not vmapped: --processes gives each member its own process"
        in Path("runs/processes/log.txt").read_text()
    )
    assert train.main(["--resume=runs/processes", "--processes=2"]) == 0  # no member starts again
    assert [row["ended"] for row in table(Path("runs/processes"))] == ["complete", "complete"] and len(started) == 2
    found = [(float(row["algo.lr"]), row["run.seed"]) for row in table(Path("runs/sweep"))]
    assert found == [(lr, seed) for lr in (1e-4, 1e-3, 1e-2) for seed in ("0", "1")]
    assert "6 members, each with its algo.lr, run.seed, in one program" in said
    assert re.search(r"^  [\d.]+  algo.lr=0.01  \(2 seeds\)$", said, re.M)
    assert [row["ended"] for row in table(Path("runs/tpe"))] == ["env_steps"] * 6
    assert sorted(row["ended"] for row in table(Path("runs/asha"))) == [
        "env_steps",
        *["stopped at 2048"] * 6,
        *["stopped at 6144"] * 2,
    ]
    assert re.search(r"^2,048 steps: 4 members, the best of them at [\d.]+; 0\d from 0\d$", said, re.M)


@pytest.mark.slow
def test_one_seed_is_the_plain_run_to_the_bit(tmp_path, capsys):
    assert run("--stop=env_steps=64", f"--out={tmp_path / 'plain'}") == 0
    assert run("--stop=env_steps=64", "--seeds=1", f"--out={tmp_path / 'one'}") == 0
    plain, one = tmp_path / "plain", tmp_path / "one" / "members" / "00"
    assert rows(one) == rows(plain) and len(rows(plain)) == 4
    for part in ("learner", "source"):
        found, expected = (checkpoint.read(checkpoint.locate(of), part) for of in (one, plain))
        assert jax.tree.structure(found) == jax.tree.structure(expected) and jax.tree.leaves(found)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_members_that_do_not_fit_the_memory_train_in_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Population, "memory", lambda self: 1_000_000)
    monkeypatch.setattr(memory, "available", lambda device=None: 2_300_000)
    assert run("--stop=env_steps=64", "--seeds=3", f"--out={tmp_path / 'turns'}") == 0
    said = capsys.readouterr().out
    assert "3 members take more memory than is free: 2 at once\n" in said
    assert re.search(r"2 members, .* in one program: vmap over members; 2 would fit the memory\n", said)
    assert [row["ended"] for row in table(tmp_path / "turns")] == ["env_steps"] * 3
    assert len({rows(tmp_path / "turns" / "members" / f"0{i}")[-1]["loss/value"] for i in range(3)}) == 3


@pytest.mark.slow
def test_members_with_different_checkpoints_resume_to_the_same_end(tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run("--stop=env_steps=96", "--seeds=2", f"--out={whole}") == 0
    shutil.copytree(whole, cut)
    for name, left in {"00": 1, "01": None}.items():  # killed while saving; the last member is complete
        found = (cut / "members" / name / "checkpoints").iterdir()
        saved = sorted((path for path in found if path.name.isdigit()), key=lambda path: int(path.name))
        assert len(saved) > 1
        for path in saved[left:] if left else []:
            shutil.rmtree(path)
    capsys.readouterr()
    assert train.main([f"--resume={cut}"]) == 0
    assert "resume: 2 of them from their checkpoints" in capsys.readouterr().out
    for i in range(2):
        name = Path("members") / f"0{i}"
        assert rows(cut / name) == rows(whole / name) and rows(whole / name)[-1]["env_steps"] >= 96


@pytest.mark.slow
def test_members_that_met_their_criterion_train_on_to_a_larger_budget(tmp_path, capsys):
    goals = ["--stop=episode/return=9", "--set=run.smoothing_episodes=1", "--stop=env_steps=256"]
    goals.append("--set=checkpoint.every=1000")  # at the end of each
    assert run(*goals, "--seeds=2", f"--out={tmp_path}") == 0
    assert all(row["ended"].startswith("episode/return") for row in table(tmp_path))
    assert train.main([f"--resume={tmp_path}", "--stop=env_steps=512"]) == 0
    assert "resume: stop.episode/return 9 was met before: it does not count" in capsys.readouterr().out
    assert [(row["ended"], int(row["env_steps"]) >= 512) for row in table(tmp_path)] == [("env_steps", True)] * 2


@pytest.mark.slow
def test_a_member_that_is_not_finite_stays_at_its_last_good_state(tmp_path, capsys):
    out = tmp_path / "x"
    cfg = config.load(
        "ppo", [arg.removeprefix("--set=") for arg in SMALL[2:]], env="CartPole-v1", stop=["env_steps=64"]
    )
    changes = [{"algo.lr": 1e-3}, {"algo.lr": 1e38}, {"algo.lr": 1e-2}]
    with output.record_output() as transcript:
        assert populations.train(cfg, out, Record(out, changes, rounds=[3]), transcript) == 1
    found = table(out)
    assert [row["ended"].split(":")[0] for row in found] == ["env_steps", "not finite", "env_steps"]
    assert [row["frozen"] for row in found] == ["0", "1", "0"]
    assert Path(found[1]["ended"].partition(": ")[2]).is_dir()
    said = capsys.readouterr().err
    assert "failed" not in said and "frozen: 1 of 3 members, at the last good state" in said and "finite (01);" in said
    assert (out / "best" / "config.yaml").exists()
    policy = jrl.load(out / "members" / "01")
    assert policy.act(np.zeros(4, np.float32)) in (0, 1)
    saved = checkpoint.locate(out / "members" / "01")
    learner = checkpoint.read(saved, "learner")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner) if leaf.dtype == np.float32)
    # the frozen member does not start again
    before = rows(out / "members" / "01")
    assert train.main([f"--resume={out}"]) == 1
    assert [row["frozen"] for row in table(out)] == ["0", "1", "0"]
    assert checkpoint.locate(out / "members" / "01") == saved and rows(out / "members" / "01") == before


def test_a_process_with_a_nonfinite_update_is_not_a_failed_process(tmp_path, monkeypatch, capsys):
    cfg = config.load("ppo", env="CartPole-v1", stop=["env_steps=64"])
    runs = members.build_members(cfg, tmp_path, [{"run.seed": seed} for seed in range(3)])
    bundles = [run.directory / "nonfinite" / "7" for run in runs[:2]]
    bundles[0].mkdir(parents=True)
    os.utime(bundles[0], (1e9, 1e9))  # an earlier run

    def start_process(run, *_):
        if run.name == "01":
            bundles[1].mkdir(parents=True)
        return SimpleNamespace(poll=lambda: 1, returncode=1)

    monkeypatch.setattr(member_processes, "_start_process", start_process)
    record = Record(tmp_path, [run.values for run in runs])
    found = member_processes.train_processes(runs, record, 2, ())
    assert found == {"00": "failed: status 1", "01": f"not finite: {bundles[1]}", "02": "failed: status 1"}
    assert [(name, end["why"], end["at"]) for name, end in record.ended.items()] == [("01", found["01"], 0)]


def test_the_rows_of_a_run_have_the_columns_of_the_option_rows(tmp_path, capsys):
    columns = {"pbt/source": 1, "pbt/algo.lr": 0.25, "env_steps": -1}
    out = f"--out={tmp_path}"
    assert run("--stop=env_steps=64", "--until=32", f"--rows={json.dumps(columns)}", out) == 0
    assert run("--stop=env_steps=64", "--resume=auto", f"--rows={json.dumps(columns | {'pbt/source': 2})}", out) == 0
    found = [(row["pbt/source"], row["pbt/algo.lr"], row["env_steps"] > 32) for row in rows(tmp_path)]
    assert found == [(1, 0.25, False)] * 2 + [(2, 0.25, True)] * 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rows={"], "--rows: expected JSON such as '{\"x/y\": 1}', got '{'"),
        (["--seeds=2", "--rows={}"], "--rows is for one run: leave it out"),
        (["--seeds=0"], "--seeds: expected 1 to 1,000, got 0"),
        (["--seeds=2", "--processes=-1"], "--processes: expected 1 to 1,000, got -1"),
        (["--processes=2"], "--processes: expected --seeds, too: add --seeds N"),
        (["--seeds=2", "--init-from=x"], "leave out --init-from, --as-test and --resume PATH"),
    ],
)
def test_invalid_options_are_refused_first(args, message, capsys, tmp_path):
    assert run("--stop=env_steps=64", f"--out={tmp_path / 'x'}", *args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_directory_holds_a_single_population(tmp_path, capsys):
    config.write(config.load("ppo", env="CartPole-v1", stop=["env_steps=64"]), tmp_path)
    assert run("--stop=env_steps=64", "--seeds=2", f"--out={tmp_path}") == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err
    (tmp_path / "population.json").write_text("{")
    assert train.main([f"--resume={tmp_path}"]) == 2
    assert "population.json cannot be read" in capsys.readouterr().err
