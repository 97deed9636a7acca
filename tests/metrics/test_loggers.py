"""Row files: what is in them, after a kill and after a resume."""

import csv
import errno
import importlib
import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from jrl import registry
from jrl.errors import InputError
from jrl.host import files
from jrl.metrics.loggers import Logger, check, open_csv, open_jsonl, open_loggers, read_rows


def rows_of_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(opened, *rows):
    for row in rows:
        opened.write(row)
    opened.close()


def test_jsonl_keeps_keys_and_writes_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "result.jsonl"
    nan, inf = float("nan"), float("inf")
    write(
        open_jsonl(path), {"env_steps": 1, "a": nan}, {"env_steps": 2, "b": np.float32(0.5)}, {"env_steps": 3, "b": inf}
    )
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"env_steps": 1, "a": None},
        {"env_steps": 2, "a": None, "b": 0.5},
        {"env_steps": 3, "a": None, "b": None},
    ]


def test_jsonl_repairs_a_half_line_and_knows_the_old_keys(tmp_path):
    path = tmp_path / "result.jsonl"
    path.write_text('{"env_steps": 1, "a": 5}\n{"env_steps": 2, "a": 6}\n{"env_steps": 3, "a')
    assert [row["env_steps"] for row in read_rows(path)] == [1, 2]
    write(open_jsonl(path), {"env_steps": 3})
    assert read_rows(path) == [{"env_steps": 1, "a": 5}, {"env_steps": 2, "a": 6}, {"env_steps": 3, "a": None}]


GARBAGE = ["\0" * 20, "not a row", "7", "[" * 5000, '{"env_steps": "x"}', '{"env_steps": 1e999}', '{"a": "']


def test_jsonl_drops_garbage_and_keeps_the_rows(tmp_path, caplog):
    path = tmp_path / "result.jsonl"
    lines = ['{"env_steps": 1}', *GARBAGE, '{"env_steps": 2}', '{"env_steps": 9}']
    path.write_text("".join(line + "\n" for line in lines))
    assert [row["env_steps"] for row in read_rows(path)] == [1, 2, 9]
    write(open_jsonl(path, resume_at=2), {"env_steps": 3})
    assert path.read_text() == '{"env_steps": 1}\n{"env_steps": 2}\n{"env_steps": 3}\n'
    assert [r.getMessage() for r in caplog.records] == [f"{path}: dropped 7 damaged lines; all other rows stay"]


def test_csv_drops_garbage_and_keeps_the_rows(tmp_path):
    path = tmp_path / "progress.csv"
    garbage = "".join(line + "\n" for line in ("\0" * 20, "1", "1,2,3", "x,5", '"1,5', "1e999,5"))
    path.write_text(f"env_steps,a\n1,5\n{garbage}2,6\n9,6\n10,66")
    write(open_csv(path, resume_at=2), {"env_steps": 3, "a": "two\nlines"})
    assert path.read_text() == "env_steps,a\n1,5\n2,6\n3,two lines\n"


@pytest.mark.parametrize("text", ["\0\0,a\n1,5\n", "a,a\n1,5\n", "env_steps,\n1,5\n", "", "env_st"])
def test_a_csv_without_its_header_begins_anew(text, tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text(text)
    write(open_csv(path, resume_at=2), {"env_steps": 3})
    assert path.read_text() == "env_steps\n3\n"


class SmallDisk:
    """Files of it are written until there is no room."""

    def __init__(self, monkeypatch, room):
        self.room, append = room, files.append
        monkeypatch.setattr(files, "append", lambda file, data: append(self.of(file), data))

    def of(self, file):
        def write(data):
            taken = min(len(data), self.room)
            self.room -= taken
            if not taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            return file.write(data[:taken])

        return types.SimpleNamespace(write=write, seek=file.seek, truncate=file.truncate, name=file.name)


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_full_disk_leaves_whole_rows(name, tmp_path, monkeypatch):
    log = open_loggers(tmp_path, [name])
    log.write({"env_steps": 1, "a": 0.5})
    SmallDisk(monkeypatch, room=5)  # of less than a row
    with pytest.raises(OSError, match="No space left") as e:
        log.write({"env_steps": 2, "a": 0.5})
    log.close()
    assert Path(e.value.filename).is_file()
    read = {
        "jsonl": lambda: [row["env_steps"] for row in read_rows(tmp_path / "result.jsonl")],
        "csv": lambda: [int(row["env_steps"]) for row in rows_of_csv(tmp_path / "progress.csv")],
    }
    assert read[name]() == [1]


def test_csv_new_column_and_missing_value(tmp_path):
    path = tmp_path / "progress.csv"
    write(open_csv(path), {"env_steps": 1, "a": 1.5}, {"env_steps": 2, "b": "x,y"}, {"env_steps": 3, "a": 2, "b": "z"})
    assert path.read_text() == 'env_steps,a,b\n1,1.5,\n2,,"x,y"\n3,2,z\n'
    assert [p.name for p in tmp_path.iterdir()] == ["progress.csv"]


def test_resume_drops_the_rows_beyond_the_checkpoint(tmp_path):
    names = ["jsonl", "csv"]
    write(open_loggers(tmp_path, names), *({"env_steps": n, "a": n} for n in (100, 200, 300, 1000)))
    write(open_loggers(tmp_path, names, resume_at=200), {"env_steps": 300, "a": -3})
    wanted = [(100, 100), (200, 200), (300, -3)]
    assert [(r["env_steps"], r["a"]) for r in read_rows(tmp_path / "result.jsonl")] == wanted
    assert [(int(r["env_steps"]), int(r["a"])) for r in rows_of_csv(tmp_path / "progress.csv")] == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["progress.csv", "result.jsonl"]


def test_resume_from_the_start_keeps_the_csv_columns_only(tmp_path):
    write(open_loggers(tmp_path, ["csv"]), {"env_steps": 5, "a": 1})
    write(open_loggers(tmp_path, ["csv"], resume_at=0), {"env_steps": 7, "a": 2})
    assert (tmp_path / "progress.csv").read_text() == "env_steps,a\n7,2\n"


def events(directory):
    """Of all files of TensorBoard in a directory; each is whole."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:  # a record: length u64, crc u32, content, crc u32
            size = int.from_bytes(data[:8], "little")
            assert masked_crc32c(data[:8]) == int.from_bytes(data[8:12], "little")
            assert masked_crc32c(data[12 : 12 + size]) == int.from_bytes(data[12 + size : 16 + size], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_tensorboard_scalars_at_env_steps(tmp_path):
    rows = [{"env_steps": 10, "episode/return": 1.5, "x": float("nan"), "s": "text"}, {"env_steps": 20, "y": 2}]
    write(open_loggers(tmp_path, ["tensorboard"], resume_at=4), *rows)
    found = events(tmp_path / "tb")
    scalars = {(v.tag, e.step): v.simple_value for e in found for v in e.summary.value}
    assert scalars == {("episode/return", 10): 1.5, ("y", 20): 2.0}
    assert found[0].file_version == "brain.Event:2"
    assert 5 in [e.step for e in found if e.HasField("session_log")]  # purged from env_steps 5 on


def test_tensorboard_has_a_file_for_each_process(tmp_path):
    for i in range(1, 4):  # within a second
        write(open_loggers(tmp_path, ["tensorboard"]), {"env_steps": i})
    assert len(list((tmp_path / "tb").iterdir())) == 3
    assert [e.step for e in events(tmp_path / "tb") if e.step] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json", "run.log: unknown logger json: did you mean jsonl? use jsonl, csv, tensorboard, wandb, or "),
        ("xyz", "run.log: unknown logger xyz: use jsonl"),
        ("no_such_module:x", "run.log no_such_module:x: no_such_module cannot be imported"),
        ("jrl.metrics.loggers:no_such", "run.log jrl.metrics.loggers:no_such: jrl.metrics.loggers has no function"),
        ("json:loads", None),
        ("pathlib:Path", None),
        ("time:sleep", None),  # without a signature: told once it is called
        ("uuid:uuid4", "run.log uuid:uuid4: expected a function of the run directory, a Path: too many positional"),
    ],
)
def test_a_logger_that_is_not_there(name, message):
    errors = check(["jsonl", name])
    assert [e[: len(message or "")] for e in errors] == ([] if message is None else [message])


def test_all_faults_are_told_before_anything_is_opened(tmp_path):
    with pytest.raises(InputError) as e:
        open_loggers(tmp_path / "run", ["jsonl", "json", "xyz"])
    assert len(e.value.errors) == 2
    assert not (tmp_path / "run").exists()


class Kept:
    """A logger of one's own: rows in a list, and when it was closed."""

    made: ClassVar[list] = []

    def __init__(self, directory, resume_at=0):
        self.directory, self.resume_at, self.rows, self.closed = directory, resume_at, [], False
        Kept.made.append(self)

    def write(self, row):
        self.rows.append(dict(row))

    def close(self):
        self.closed = True


def broken(directory):
    return open


@pytest.fixture
def names():
    """Of the two above, and of a function that returns a Logger."""
    registry.register("kept", Kept)
    registry.register("broken", broken)
    registry.register("to-stdout", lambda directory: Logger(lambda row: print(directory.name, row), lambda: None))
    Kept.made.clear()
    yield
    for name in ("kept", "broken", "to-stdout"):
        registry._registered.pop(name)


def test_a_logger_of_ones_own(tmp_path, names, capsys):
    row = {"env_steps": 1, "hist/angles": [0.5]}
    write(open_loggers(tmp_path / "run", ["kept", "jsonl", "to-stdout"], resume_at=7), row)
    (kept,) = Kept.made
    assert (kept.directory, kept.resume_at, kept.rows, kept.closed) == (tmp_path / "run", 7, [row], True)
    assert read_rows(tmp_path / "run" / "result.jsonl") == [row]
    assert capsys.readouterr().out == f"run {row}\n"


def test_what_is_no_logger_closes_the_others(tmp_path, names):
    with pytest.raises(InputError, match=r"run.log broken: expected an object with write\(row\) and close\(\)"):
        open_loggers(tmp_path, ["kept", "broken"])
    assert Kept.made[0].closed


# a client that writes down how it is used, in the place of W&B's
CLIENT = """
calls = []

class Error(Exception): pass

class Run:
    def log(self, row, step): calls.append((step, row))
    def finish(self): calls.append("finished")

def init(**kwargs):
    if kwargs["project"] == "forbidden":
        raise Error("no API key")
    calls.append(kwargs)
    return Run()
"""


@pytest.fixture
def client(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wandb", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delenv(name, raising=False)
    yield importlib.import_module("wandb")
    sys.modules.pop("wandb")


def test_wandb_continues_its_own_run(tmp_path, client):
    run = tmp_path / "mine" / "ppo_1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("algo: {lr: 0.5}\n")
    write(open_loggers(run, ["wandb"]), {"env_steps": 8, "a": np.float32(0.5), "b": float("nan"), "hist/x": [1.0]})
    write(open_loggers(run, ["wandb"], resume_at=8), {"env_steps": 16})
    first, row, end, second, *_ = client.calls
    assert (first["project"], first["name"], first["dir"]) == ("mine", "ppo_1", str(run))
    assert first["config"] == {"algo": {"lr": 0.5}}
    assert (row, end) == ((8, {"env_steps": 8, "a": 0.5}), "finished")
    assert first["id"] == second["id"] and len(first["id"]) == 16 and second["resume"] == "allow"


def test_wandb_that_refuses_names_the_mend(tmp_path, client, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "forbidden")
    with pytest.raises(InputError, match=r"run\.log wandb: no API key: log in with `wandb login`, or set WANDB_MODE="):
        open_loggers(tmp_path, ["wandb"])


def test_wandb_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check(["wandb"]) == ["run.log wandb: W&B is not installed: pip install wandb, or leave it out"]
    monkeypatch.undo()
    (tmp_path / "wandb").mkdir()  # such as offline runs leave in the working directory
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    assert len(check(["wandb"])) == 1


def test_a_row_is_on_disk_before_close_and_lists_go_to_jsonl_only(tmp_path):
    logger = open_loggers(tmp_path, ["jsonl", "csv", "tensorboard"])
    logger.write({"env_steps": 1, "x": 2.0, "hist/angles": [0.5, float("nan")]})
    assert read_rows(tmp_path / "result.jsonl") == [{"env_steps": 1, "x": 2.0, "hist/angles": [0.5, None]}]
    assert (tmp_path / "progress.csv").read_text() == "env_steps,x\n1,2.0\n"
    assert [e.step for e in events(tmp_path / "tb") if e.step] == [1]
    logger.close()
