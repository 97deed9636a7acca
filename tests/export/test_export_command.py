"""python -m jrl.export, as a user types it."""

import importlib.util
import json
import os

import numpy as np
import pytest
from export_helpers import CONTINUOUS, VECTOR, load, run_bare, trained
from saved import save

import jrl
from jrl import train
from jrl.errors import InputError
from jrl.export import __main__ as command
from jrl.export import directory, formats, policy_function
from jrl.types import Discrete, EnvSpec


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint."""
    found = tmp_path_factory.mktemp("command") / "run"
    save(found, "ppo", EnvSpec(VECTOR, Discrete(3), 1), change=trained)
    return found


def refused(capsys, *args):
    """Returns the error message of the command."""
    assert command.main([*map(str, args)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and all(line.startswith("error: ") for line in err.splitlines())
    return err


@pytest.mark.slow
def test_an_export_of_a_trained_run_has_its_actions(tmp_path, capsys):
    """Including observation statistics and the environment's bounds of -2 .. 2."""
    options = [
        "--algo=ppo", "--env=Pendulum-v1", "--set=env.backend=jax", "--set=algo.normalize_obs=true",
        "--set=env.num_envs=4", "--set=rollout.length=16", "--set=network.hidden=[8]", "--stop=env_steps=256",
        "--set=run.log=[jsonl]", "--set=run.compile_cache=false", f"--out={tmp_path / 'run'}",
    ]  # fmt: skip
    assert train.main(options) == 0
    capsys.readouterr()
    out = tmp_path / "deep" / "policy"
    assert command.main([str(tmp_path / "run"), "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "npz" and said["algorithm"] == "ppo" and said["env"] == "Pendulum-v1"
    assert said["agreement"] == 1.0 and said["env_steps"] == 256
    assert said["bytes"] == sum(p.stat().st_size for p in out.iterdir())
    policy = jrl.load(tmp_path / "run")
    obs = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32) * [[1, 1, 8]]
    np.save(out.with_suffix(".obs.npy"), obs)
    run_bare("jrl,jax", out)
    expected = policy.act(obs)
    assert np.abs(expected).max() <= 2 and np.ptp(expected) > 0.01
    np.testing.assert_allclose(np.load(out.with_suffix(".32.npy")), expected, atol=1e-5)


def test_only_an_earlier_export_is_replaced(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main([str(run), "--out", str(out)]) == 0
    assert command.main([str(run), "--format", "stablehlo", "--out", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["policy.jax_export", "policy.json", "policy.py"]
    load(out).act(np.zeros(4, np.float32))
    (out / "notes.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    capsys.readouterr()
    assert "notes.txt" in refused(capsys, run, "--out", out)
    assert before == {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}


def test_a_directory_with_other_files_is_refused(run, tmp_path, capsys):
    (tmp_path / "policy.json").write_text('{"kind": "something else", "files": ["a"]}')
    assert "policy.json, not an export of jrl" in refused(capsys, run, "--out", tmp_path)
    (tmp_path / "policy.json").write_text('{"kind": "jrl policy", "files": ["../run"]}')
    assert "not an export of jrl" in refused(capsys, run, "--out", tmp_path)


def test_bad_input_is_named(run, tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    assert f"{file}: expected a directory, got a file" in refused(capsys, run, "--out", file)
    assert f"cannot write to {file}" in refused(capsys, run, "--out", file / "below")
    assert "does not exist" in refused(capsys, tmp_path / "none", "--out", tmp_path / "out")
    assert "holds no complete checkpoint" in refused(capsys, tmp_path, "--out", tmp_path / "out")
    assert "keep_best_by" in refused(capsys, run, "--best", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax2onnx" else find(name))
    error = refused(capsys, run, "--format", "onnx", "--out", tmp_path / "out")
    assert "jax2onnx" in error and "pip install 'jrl[onnx]'" in error


def test_a_full_disk_leaves_the_earlier_export(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert command.main([str(run), "--out", str(out)]) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    capsys.readouterr()
    write = type(out).write_bytes

    def full(path, content):
        if path.name == "policy.py.partial":
            raise OSError(28, os.strerror(28))
        return write(path, content)

    monkeypatch.setattr(type(out), "write_bytes", full)
    assert "No space left" in refused(capsys, run, "--format", "stablehlo", "--out", out)
    assert before == {p.name: p.read_bytes() for p in out.iterdir()}


def test_an_export_with_other_actions_is_not_written(tmp_path, monkeypatch):
    """Each export is compared with jrl before it is written."""
    save(tmp_path / "run", "ppo", CONTINUOUS, change=trained)
    policy = policy_function.load_function(tmp_path / "run")
    own = formats._read_file
    monkeypatch.setattr(formats, "_read_file", lambda name: own(name).replace(b'"tanh": np.tanh', b'"tanh": np.sin'))
    with pytest.raises(InputError, match="random observations"):
        formats.export(policy, format="npz", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_names_of_the_formats_agree():
    assert set(command.FORMATS) == set(formats.FILES)
    assert directory.ABOUT == "policy.json"
