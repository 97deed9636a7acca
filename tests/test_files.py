"""Run directories that one process writes to, and files that are whole."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from jrl.errors import InputError
from jrl.fields import paths
from jrl.host import files

HOLD = """
import os, sys, time
from pathlib import Path
from jrl.fields import paths
from jrl.host import files
with files.lock_directory(Path(sys.argv[1])):
    (ended := os.fork()) or os._exit(0)  # a forked process that ends does not release it
    os.waitpid(ended, 0)
    reader, writer = os.pipe()
    # a process that was forked and outlives this one, as those of libraries do
    started = os.fork() or (os.write(writer, b"."), time.sleep(60))
    os.read(reader, 1)  # it runs
    print(started, flush=True)
    time.sleep(60)
"""


def test_another_process_is_named_and_holds_nothing_once_it_is_dead(tmp_path):
    out = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    forked = int(holder.stdout.readline())
    try:
        with pytest.raises(InputError) as e, files.lock_directory(out):
            pass
        assert f"run.out: {out} is in use by process {holder.pid} on {os.uname().nodename} since 20" in str(e.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(forked, 0)  # still there
        with files.lock_directory(out):
            assert (out / files.LOCK).exists()
        assert not (out / files.LOCK).exists()
    finally:
        os.kill(forked, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_the_same_process_holds_a_directory_once(tmp_path):
    refused = pytest.raises(InputError, match=f"is in use by process {os.getpid()} ")
    with files.lock_directory(tmp_path), refused, files.lock_directory(tmp_path):
        pass
    with files.lock_directory(tmp_path):
        pass


def test_a_directory_that_was_made_for_nothing_goes(tmp_path):
    with files.lock_directory(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "c").mkdir()
    with files.lock_directory(tmp_path / "c"):
        pass
    assert (tmp_path / "c").exists()  # somebody else's
    with files.lock_directory(tmp_path / "d"):
        (tmp_path / "d" / "config.yaml").write_text("")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["config.yaml"]


def test_what_cannot_be_a_run_directory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path / "file", "expected a directory, got a file"),
        (tmp_path / "file" / "run", "is a file"),
    ):
        refused = pytest.raises(InputError, match=rf"run\.out: .*{why}: choose")
        with refused, files.lock_directory(path):
            pass

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "ftruncate", full)
    refused = pytest.raises(InputError, match="No space left on device: free space, or choose another --out")
    with refused, files.lock_directory(tmp_path / "full"):
        pass
    assert not (tmp_path / "full").exists()


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "run" / "result.jsonl").mkdir(parents=True)
    refused = pytest.raises(InputError, match=r"cannot write to \S+/run/result.jsonl: Is a directory: choose another")
    with refused, files.report_unwritable(tmp_path / "run"):
        (tmp_path / "run" / "result.jsonl").open("ab")
    with pytest.raises(IsADirectoryError), files.report_unwritable(tmp_path / "elsewhere"):
        (tmp_path / "run" / "result.jsonl").open("ab")
    with pytest.raises(OSError, match="No space"), files.report_unwritable(tmp_path):
        raise OSError(errno.ENOSPC, "No space", str(tmp_path / "x"))


def test_a_file_system_without_locks_is_told_once(tmp_path, monkeypatch, caplog):
    def none(*args, **kwargs):
        raise OSError(errno.ENOLCK, "No locks available")

    import filelock

    monkeypatch.setattr(filelock.FileLock, "acquire", none)
    with files.lock_directory(tmp_path):
        pass
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}: cannot be locked: No locks available: let no other run write there"
    ]


def test_a_deleted_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert paths.resolve(tmp_path, "--out") == tmp_path
    with pytest.raises(InputError, match="the working directory was deleted"):
        paths.resolve("runs", "--out")


def test_new_names_never_meet(tmp_path):
    made = [files.make_numbered(tmp_path / "runs" / "a") for _ in range(3)]
    assert [path.name for path in made] == ["a", "a-2", "a-3"]


def test_replace_leaves_the_old_file_on_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    files.replace(path, "old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as e:
        files.replace(path, "new")
    assert e.value.filename == str(path) and files.is_disk_full(e.value)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.yaml"]
