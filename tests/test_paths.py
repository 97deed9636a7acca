"""Paths that users give: each is absolute from the start, of the right kind, and can be written, or is one error."""

import os
from pathlib import Path

import numpy as np
import pytest

from jrl import config, data, debug, evaluate, plot, record, train
from jrl.api import PPOConfig
from jrl.config import __main__ as config_command
from jrl.data import __main__ as data_command
from jrl.errors import InputError
from jrl.export import __main__ as export
from jrl.fields.paths import resolve, written
from jrl.report import __main__ as report
from jrl.serve import __main__ as serve
from jrl.sweep import __main__ as sweep

TRAIN = ["--algo=ppo", "--env=CartPole-v1", "--stop=env_steps=1"]
# command -> its `main`, what is typed before the path that is written, and the ending of that path
WRITERS = {
    "train": (train.main, [*TRAIN, "--out"], ""),
    "record": (record.main, ["run", "--out"], ".gif"),
    "plot": (plot.main, ["run", "--out"], ".png"),
    "export": (export.main, ["run", "--out"], ""),
    "report": (report.main, ["run", "--out"], ""),
    "data record": (data_command.main, ["record", "--env=CartPole-v1", "--random=1", "--steps=9", "--out"], ""),
    "data convert": (data_command.main, ["convert", "data", "--to=d4rl", "--out"], ""),
    "data inspect": (data_command.main, ["inspect", "data", "--out"], ".png"),
    "serve": (serve.main, ["--write-client"], ".py"),
}
READERS = {
    "train": (train.main, []),
    "train --resume": (train.main, ["--resume"]),
    "train --init-from": (train.main, [*TRAIN, "--out=run", "--init-from"]),
    "data.input": (train.main, ["--algo=bc", "--stop=updates=1", "--out=run", "--set", "data.input="]),
    "evaluate": (evaluate.main, []),
    "record": (record.main, []),
    "plot": (plot.main, []),
    "report": (report.main, ["--out=report"]),
    "--normalize": (report.main, ["run", "--out=report", "--normalize"]),
    "debug": (debug.main, []),
    "sweep": (sweep.main, ["--resume"]),
    "config": (config_command.main, ["show"]),
    "data inspect": (data_command.main, ["inspect"]),
    "data record": (data_command.main, ["record", "--out=new", "--steps=9"]),
    "serve": (serve.main, ["--no-learn"]),
    "serve --token-file": (serve.main, ["--no-learn", "run", "--token-file"]),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x")
    return tmp_path


def refused(main, argv, capsys):
    """The one line that a command prints before it exits with 2."""
    try:
        status = main(argv)
    except SystemExit as e:
        status = e.code
    err = capsys.readouterr().err
    assert status == 2 and "Traceback" not in err, err
    assert len(err) < 900 and len(err.splitlines()) <= 3, err
    return err


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_is_one_error_and_nothing_is_left(here, capsys, name):
    main, words, suffix = WRITERS[name]
    before = sorted(here.iterdir())
    for path in (f"{here}/fifo", f"{here}/file/x{suffix}", f"$NOT_SET_ANYWHERE/x{suffix}"):
        refused(main, [*words, path], capsys)
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("name", READERS)
def test_what_cannot_be_read_is_one_error(here, capsys, name):
    main, words = READERS[name]
    before = sorted(here.iterdir())
    for path in (f"{here}/fifo", f"{here}/missing", "$NOT_SET_ANYWHERE/x"):
        *rest, last = [*words, ""] if not words or not words[-1].endswith("=") else words
        refused(main, [*rest, last + path], capsys)
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "expected a path, got ''"), ("a\0b", "expected a path"), ("x" * 5_000, "File name too long"),
        ("$NOT_SET_ANYWHERE/x", "the variable 'NOT_SET_ANYWHERE' is not set"), ("~no_such_user/x", "there is no user"),
        ("fifo", "got a pipe"), ("/dev/full", "got a device"), ("file/x", "a part of its path is a file"),
        ("/proc/x/y", "cannot write to /proc/x/y"),
    ],
)  # fmt: skip
def test_what_is_no_path_names_the_option_and_the_fix(here, path, message):
    with pytest.raises(InputError, match=f"^--out: .*{message}") as e:
        resolve(path, "--out", "new file")
    assert len(str(e.value)) < 400


def test_home_and_variables_are_expanded_once(here, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PLACE", "/data")
    for given, path in {
        "~/x": "/home/me/x", "$HOME/x": "/home/me/x", "${PLACE}/a b": "/data/a b", "x/../y": f"{here}/x/../y",
        "5$": f"{here}/5$", "$5": f"{here}/$5", "a~": f"{here}/a~",
    }.items():  # fmt: skip
        assert str(resolve(given, "--out")) == path and str(resolve(Path(given), "--out")) == path
        assert str(resolve(path, "--out")) == path
    (here / "$NOT_SET_ANYWHERE").mkdir()
    assert resolve("$NOT_SET_ANYWHERE", "--out") == here / "$NOT_SET_ANYWHERE"  # there is one of that name


def test_all_paths_of_a_config_are_absolute(here, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = [
        "replay.learning_starts=1", "run.out=~/run", "data.output.path=out",
        "data.input={sampler: 0.5, $HOME/a: 0.25, b: 0.25}",
        "external={token_file: ~/token, certificate: c.pem, private_key: $HOME/k.pem}",
    ]  # fmt: skip
    cfg = config.load(None, settings, algo="sac", env="Pendulum-v1", stop=["env_steps=9"])
    assert cfg.run.out == "/home/me/run" and cfg.data.output.path == f"{here}/out"
    assert cfg.data.input == {"sampler": 0.5, "/home/me/a": 0.25, f"{here}/b": 0.25}
    found = cfg.external
    assert (found.token_file, found.certificate) == ("/home/me/token", f"{here}/c.pem")
    assert found.private_key == "/home/me/k.pem"
    api = PPOConfig().environment("CartPole-v1").debugging(out="~/run").to_run_config()
    assert api.run.out == "/home/me/run"
    assert config.from_dict(config.to_dict(cfg)) == cfg
    names = config.load(None, ["data.input=[a, sub/*.npz]"], algo="bc", stop=["updates=9"]).data.input
    assert names == (f"{here}/a", f"{here}/sub/*.npz")
    assert config.load(None, ["data.input=mine:read"], algo="bc", stop=["updates=9"]).data.input == "mine:read"
    with pytest.raises(InputError, match=r"data\.input: expected different paths, got a and \./a, which are one path"):
        config.load(None, ["data.input={a: 0.5, ./a: 0.5}"], algo="bc", stop=["updates=9"])


def test_a_glob_below_a_directory_with_brackets(tmp_path, monkeypatch):
    from jrl.data.store import Episode, of_episodes
    from jrl.types import Box, Discrete

    space, flags = Box((1,), "float32", 0.0, 1.0), (True, False)
    for name in ("x[1]", "x1"):
        obs = np.full((3, 1), len(name) / 10, np.float32)
        episode = Episode(obs, np.zeros(2, np.int32), np.ones(2, np.float32), *flags, {}, {})
        data.write(of_episodes(space, Discrete(2), [episode]), tmp_path / name / "set")
    monkeypatch.chdir(tmp_path / "x[1]")
    given = config.load(None, ["data.input=set/*.npz"], algo="bc", stop=["updates=9"]).data.input
    monkeypatch.chdir(tmp_path)
    for path in (given, "x[1]/set"):
        assert float(data.read(path).obs[0, 0]) == pytest.approx(0.4)


def test_a_file_is_whole_or_as_it_was(tmp_path):
    out = tmp_path / ("x" * 240 + ".png")  # as long as names can be
    out.write_text("before")
    with pytest.raises(InputError, match=r"--out: cannot write to .*: No space left on device"):  # noqa: SIM117
        with written(out, "--out") as part:
            part.write_text("half")
            raise OSError(28, "No space left on device")
    assert out.read_text() == "before" and list(tmp_path.iterdir()) == [out]
    with written(out, "--out") as part:
        part.write_text("after")
    assert out.read_text() == "after" and list(tmp_path.iterdir()) == [out]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_run_of_an_environment_that_changes_the_working_directory(here, monkeypatch, capsys):
    (here / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(here / "home"))
    options = f"{{moves_to: {here}/elsewhere}}"
    settings = [
        "env.backend=gymnasium", "env.num_envs=2", "rollout.length=16", "network.hidden=[4]", "run.compile_cache=false",
        "data.output.path=~/data", f"env.options={options}",
    ]  # fmt: skip
    words = ["--algo=ppo", "--env=painted:Painted", *(f"--set={one}" for one in settings), "--stop"]
    assert train.main([*words, "env_steps=64", "--out", "a[1]/run"]) == 0
    assert os.getcwd() == str(here / "elsewhere") and not list((here / "elsewhere").iterdir())
    assert list((here / "home" / "data").glob("*.npz"))
    monkeypatch.chdir(here)
    capsys.readouterr()
    assert evaluate.main(["a[1]/run", "--episodes", "1"]) == 0
    assert f"{here}/a[1]/run/checkpoints/" in capsys.readouterr().out and not list((here / "elsewhere").iterdir())


def test_the_directory_of_an_algorithm_is_that_of_its_start(here):
    (here / "elsewhere").mkdir()
    made = (
        PPOConfig()
        .environment("painted:Painted", env_config={"moves_to": f"{here}/elsewhere"}, backend="gymnasium")
        .update_from_dict({"env": {"num_envs": 2}, "network": {"hidden": [4]}, "run": {"compile_cache": False}})
        .build()
    )
    try:
        assert os.getcwd() == f"{here}/elsewhere" and Path(made.save()).is_relative_to(here / "runs")
        assert not list((here / "elsewhere").iterdir())
    finally:
        made.stop()
