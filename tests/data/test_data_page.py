"""docs/data.md: its lines of Python and its commands of files, as written, one after the other."""

import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

import jrl
from jrl import config, data, evaluate, train
from jrl.config.datasets import OutputConfig
from jrl.data import __main__

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()
OWN, RECORD, LEARN, JUDGE, LOOK, FORMATS, TUNE = (
    PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for title in (
        "Your own episodes, in five lines",
        "Recording",
        "Learning from data",
        "Judging a policy without running it",
        "What is in it, and what is wrong with it",
        "Other formats",
        "Pre-train, then fine-tune",
    )
)
SMALL = ["--set=network.hidden=[8]"]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs the lines of Python in an empty directory; their names."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", OWN, re.S):
        exec(block, names)
    return names


def commands(section):
    """Runs the commands of a section; all are right."""
    lines = re.findall(r"^python -m jrl\.data (.+)$", section, re.M)
    assert lines and [__main__.main(line.split()) for line in lines] == [0] * len(lines)


def test_the_lines_of_python(made):
    store = data.read("my-data")
    assert store.lengths().tolist() == [20, 35, 50] and store.meta["env"] == "CartPole-v1"
    assert store.checksum() == made["store"].checksum() == data.read("more-data").checksum()
    assert OWN.split("```python\n")[2].partition("```")[0].count("\n") == 6  # one of them empty


@pytest.mark.slow
def test_learning(made, capsys):
    (section,) = re.findall(r"```yaml\n(.*?)```", LEARN, re.S)
    Path("cloned.yaml").write_text(section)
    (training,) = re.findall(r"^python -m jrl\.train (.+)$", LEARN, re.M)
    assert train.main([*training.split(), *SMALL]) == 0
    assert "held out" in capsys.readouterr().out
    (playing,) = re.findall(r"^python -m jrl\.evaluate (.+)$", LEARN, re.M)
    assert evaluate.main(playing.split()) == 0
    commands(LEARN)
    policy, seen = jrl.load("runs/cloned"), data.read("sets/cloned")
    chosen = policy.act(seen.obs[:100])
    assert chosen.shape == (100,) and set(chosen.tolist()) <= {0, 1}
    np.testing.assert_array_equal(chosen, [policy.act(obs) for obs in seen.obs[:100]])
    for algo in re.findall(r"`(\{name: .*?\})`", LEARN):
        spaces = {"algo": yaml.safe_load(algo), "data": {"input": "my-data"}, "stop": {"updates": 1}}
        config.load(spaces)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory in which the commands that record were run, and what they printed."""
    root, out = tmp_path_factory.mktemp("recorded"), io.StringIO()
    with contextlib.chdir(root), contextlib.redirect_stdout(out):
        (training,) = re.findall(r"^python -m jrl\.train (.+)$", RECORD, re.M)
        assert train.main([*training.split(), *SMALL, "--set=algo.num_epochs=1", "--set=algo.num_minibatches=1"]) == 0
        commands(RECORD)
    return root, out.getvalue()


@pytest.mark.slow
def test_recording(recorded):
    root, out = recorded
    assert out.count("checksum ") == 4
    assert all(2000 <= data.read(path).num_steps < 2032 for path in (root / "sets").iterdir())
    (section,) = re.findall(r"```yaml\n(.*?)```", RECORD, re.S)
    given = config.load(
        {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 1}, **yaml.safe_load(section)}
    )
    assert given.data.output == OutputConfig(str(Path("sets/replay").absolute()), columns=("log_prob",))


@pytest.mark.slow
def test_judging(recorded, monkeypatch, capsys):
    root, _ = recorded
    monkeypatch.chdir(root)
    commands(JUDGE.replace("--updates 2000", "--updates 200"))
    table, _, found = capsys.readouterr().out.rpartition("\n{")
    assert all(re.search(rf"^{name} +[\d.]+ ", table, re.M) for name in ("is", "wis", "pdis", "dm", "dr"))
    own = json.loads("{" + found)  # the policy's own episodes weigh alike
    assert own["estimates"]["wis"]["value"] == pytest.approx(own["mean_return"], rel=1e-3)
    assert own["ess"] == pytest.approx(own["episodes"], rel=1e-3)
    (section,) = re.findall(r"```yaml\n(.*?)```", JUDGE, re.S)
    Path("judged.yaml").write_text(section)
    (training,) = re.findall(r"^python -m jrl\.train (.+)$", JUDGE, re.M)
    assert train.main([*training.split(), *SMALL, "--set=data.estimate.fqe.updates=20"]) == 0
    rows = [json.loads(line) for line in Path("runs/judged/result.jsonl").read_text().splitlines()]
    judged = [row for row in rows if "estimate/dr" in row]
    assert judged[0]["updates"] == 200 and len({row["estimate/dr"] for row in judged}) == 2  # the latest stands in all
    assert all(
        {"estimate/wis", "estimate/wis_low", "estimate/wis_high", "estimate/ess", "estimate/return"} <= row.keys()
        for row in judged
    )


def test_looking_at_them(made, capsys):
    commands(LOOK)
    out = capsys.readouterr().out
    assert "every reward is 1" in out and '"episodes": 3' in out and "are copies of earlier ones" in out
    assert Path("returns.png").is_file()


def test_other_formats(made, capsys):
    pytest.importorskip("h5py")
    commands(FORMATS)
    assert capsys.readouterr().out.count("wrote ") == 5
    assert data.read("parts/*").num_episodes == 6 and data.read("both").num_steps == 210
    assert data.read("mine.hdf5").checksum() == made["store"].checksum()


def test_the_table_of_formats_is_whole():
    assert re.findall(r"^\| `([\w-]+)` \|", FORMATS, re.M) == ["--to", *data.NAMES]


@pytest.mark.slow
def test_pre_training_and_fine_tuning(recorded, monkeypatch, capsys):
    monkeypatch.chdir(recorded[0])
    lines = re.findall(r"^python -m jrl\.train (.+)$", TUNE.replace("\\\n", ""), re.M)
    assert len(lines) == 4
    for line in lines:
        args = [str(ROOT / word) if word.startswith("configs/") else word for word in line.split()]
        small = [*SMALL, "--set=run.compile_cache=false", "--stop=updates=5"]
        if "--init-from" in line:
            small += ["--set=evaluation.every=100000", "--stop=env_steps=64"]
        if "sac" in line:
            small += ["--set=replay.learning_starts=16", "--set=replay.batch_size=8"]
        if "ppo" in line:
            small += ["--set=algo.num_epochs=1", "--set=algo.num_minibatches=1", "--set=rollout.length=8"]
        assert train.main([*args, *small]) == 0
    out = capsys.readouterr().out
    assert out.count("init-from: not taken: params.value") == 4  # of PPO's value, two layers of two arrays
    assert "not taken: params.actor" not in out and "not taken: params.policy" not in out
