"""docs/reports.md and the command: its lines as written, one after the other; bad input."""

import json
import re
from pathlib import Path

import pytest
from run_files import run

from jrl import train
from jrl.report import __main__, runs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reports.md").read_text()
COMMANDS = re.findall(r"^python -m jrl\.report (.+)$", PAGE, re.M)
SMALL = ["--set=network.hidden=[8]", "--set=run.compile_cache=false", "--set=env.backend=jax", "--set=env.num_envs=8"]
SHORT = [
    "--set=evaluation.every=256", "--set=evaluation.duration=2", "--set=run.report_every=256",
    "--set=rollout.length=16", "--set=algo.num_epochs=1", "--set=algo.num_minibatches=1",
]  # fmt: skip


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    training = re.findall(r"^python -m jrl\.train (.+)$", PAGE, re.M)
    assert len(training) == 6
    for line in training:
        assert train.main([*line.split(), *SMALL, *SHORT, "--stop=env_steps=500"]) == 0
    for language, name in (("json", "scores.json"), ("csv", "sb3.csv")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
        Path(name).write_text(text)
    capsys.readouterr()
    said = []
    for line in COMMANDS:
        assert __main__.main(line.split()) == 0
        assert "caution: fewer than 5 seeds" in capsys.readouterr().out
        said.append(json.loads(Path("report/report.json").read_text()))
        assert Path("report/curves.png").read_bytes().startswith(b"\x89PNG")
        assert Path("report/report.md").read_text().startswith("# CartPole-v1\n")
    first, by_time, with_others, beside = said
    assert "CartPole-v1: published results begin after 50,000 steps" in beside["published"][0]["note"]
    assert len(first["methods"]) == 2 and "algo.lr=0.0001" in first["methods"]
    assert all(run["state"] == runs.FINISHED for run in first["runs"])
    assert first["provenance"][0]["versions"]["jrl"] and len(first["provenance"][0]["runs"]) == 6
    assert (by_time["against"], by_time["axis"]) == ("algo.lr=0.0001", "time_s")
    assert with_others["against"] == "sb3" and len(with_others["improvement"]) == 2
    assert with_others["aggregate"]["rows"][0]["method"] == "sb3"


def test_the_page_tells_of_every_option():
    told = set(re.findall(r"^\| `(--[\w]+)", PAGE, re.M))
    known = {option for action in __main__.parser()._actions for option in action.option_strings}
    assert told == known - {"-h", "--help"}


@pytest.mark.parametrize(
    "line, says",
    [
        ("nowhere --out r", "nowhere does not exist: give the --out of a run"),
        (
            "run --out r --objective custom/x",
            "--objective custom/x: no row has it: there are env_steps, evaluation/return",
        ),
        ("run --out r --objective evaluation/retur", "did you mean evaluation/return"),
        ("run --out r --against dqn", "--against dqn: no such method"),
        ("run --out r --against none.csv", "none.csv cannot be read: No such file"),
        ("run --out r --against two.csv", "--against two.csv: the file has several methods, a, b"),
        ("run --out r --normalize none.json", "none.json"),
        ("run --out r --by algo.nam", "did you mean algo.name?"),
        ("run --out r --seed -1", "--seed -1: expected 0 or more"),
        ("run --out two.csv", "two.csv: expected a directory, got a file"),
    ],
)
def test_bad_input_is_one_error(tmp_path, monkeypatch, capsys, line, says):
    monkeypatch.chdir(tmp_path)
    run(Path("run"), seed=0, values=(1, 2, 3))
    Path("two.csv").write_text("method,task,seed,step,value\na,x,0,1,1\nb,x,0,1,1\n")
    assert __main__.main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not Path("r").exists()


def test_a_reference_whose_name_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(Path("run"), seed=0, values=(1, 2, 3))
    Path("theirs.csv").write_text("method,task,seed,step,value\nppo,CartPole-v1,0,100,1\nppo,CartPole-v1,0,300,2\n")
    assert __main__.main(["run", "./theirs.csv", "--out", "r", "--against", "theirs.csv"]) == 0
    said = json.loads(Path("r/report.json").read_text())
    assert said["methods"] == ["ppo of theirs.csv", "ppo"] and said["against"] == "ppo of theirs.csv"
    assert said["improvement"][0]["value"] == 1
