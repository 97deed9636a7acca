"""The policies that come with jrl: complete, small, and as good as their table says."""

import json
import re
import zipfile

import pytest

from jrl import train, zoo
from jrl.zoo import __main__ as command

NAMES = list(zoo.entries())


def test_the_table_lists_the_files_which_are_small():
    files = sorted(zoo.HERE.glob("*.zip"))
    assert sorted(NAMES) == [file.stem for file in files] and len(NAMES) >= 12
    assert sum(file.stat().st_size for file in files) < 5_000_000
    for name in NAMES:
        with zipfile.ZipFile(zoo.HERE / f"{name}.zip") as file:
            assert "config.yaml" in file.namelist()
            text = file.read("config.yaml").decode()
            assert not re.search(r"(^|[\s'\"])/(work|tmp|home|root)/", text), name
            (meta,) = (json.loads(file.read(x)) for x in file.namelist() if x.endswith("checkpoint.json"))
            assert meta["env_steps"] == zoo.entries()[name]["env_steps"]


def test_the_page_shows_the_table():
    page = (zoo.HERE.parent.parent / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert command.format_table() in page


def test_list_and_play(capsys):
    assert command.main(["list"]) == 0
    found = capsys.readouterr().out
    assert all(text in found for text in ("cartpole", "CartPole-v1", "ppo"))
    assert command.main(["play", "cartpole", "--episodes", "4"]) == 0
    (mean,) = re.findall(r"return ([\d.]+) ±", capsys.readouterr().out)
    assert float(mean) >= 400


def test_get_writes_a_run_that_trains_on(tmp_path, capsys):
    run = tmp_path / "run"
    assert command.main(["get", "catch", "--out", str(run)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("train on: ") and f"--resume {run} --stop env_steps=" in line
    steps = zoo.entries()["catch"]["env_steps"] + 1000
    assert train.main(["--resume", str(run), "--stop", f"env_steps={steps}"]) == 0
    rows = [json.loads(row) for row in (run / "result.jsonl").read_text().splitlines()]
    assert rows[-1]["env_steps"] >= steps


def test_an_unknown_name_and_an_occupied_directory(tmp_path, capsys):
    assert command.main(["play", "cartpol"]) == 2
    assert "zoo: no policy has the name cartpol: did you mean cartpole?" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert command.main(["get", "cartpole", "--out", str(tmp_path)]) == 2
    assert f"--out: {tmp_path} is not empty: choose another directory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not zoo.entries()[name]["needs"]])
def test_each_policy_has_its_return(name, capsys):
    entry = zoo.entries()[name]
    assert command.main(["play", name, "--episodes", "20"]) == 0
    (mean,) = re.findall(r"return (-?[\d.]+) ±", capsys.readouterr().out)
    assert abs(float(mean) - entry["return"]) <= 4 * entry["return_std"] / 20**0.5 + 1e-2
