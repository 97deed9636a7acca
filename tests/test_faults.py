"""Signals, stacks on request, and the watchdog: in processes of their own where a signal could end this one."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jrl.host import interruption
from jrl.run.store import checkpoint

HERE = Path(__file__).parent
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

BLOCKED = """
def blocked():
    # a call that comes back neither to Python nor at a signal, as a compilation does
    signal.siginterrupt(signal.SIGINT, False)
    signal.siginterrupt(signal.SIGTERM, False)
    reader, _ = os.pipe()
    ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
"""
LOOP = """
def loop(found):
    until = time.monotonic() + 60
    while not found and time.monotonic() < until:
        time.sleep(0.01)
"""


class Child:
    """A Python process that says "ready" when it wants to be signalled."""

    def __init__(self, code):
        preamble = "import ctypes, os, signal, sys, threading, time\n"
        preamble += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # children of nohup inherit that it is ignored
        preamble += "from jrl.host import interruption\n" + BLOCKED + LOOP
        ready = "\nready = lambda: print('ready', flush=True)\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", preamble + ready + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n", self.end()
        time.sleep(0.2)  # for the line after

    def signal(self, *numbers, pause=0.3):
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(pause)

    def end(self):
        """(status, stdout, stderr)"""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


ENDS_CLEANLY = """
with interruption.watch_signals() as found:
    ready()
    loop(found)
    time.sleep(0.5)  # saves
    print(signal.Signals(found.number).name)
sys.exit(found.exit_status)
"""


@posix
@pytest.mark.parametrize(
    ("sent", "name", "status"),
    [
        ([signal.SIGTERM, signal.SIGTERM], "SIGTERM", 143),  # schedulers repeat it
        ([signal.SIGINT, signal.SIGTERM], "SIGINT", 130),
        ([signal.SIGHUP, signal.SIGHUP], "SIGHUP", 129),  # the terminal is closed
    ],
)
def test_the_loop_ends_by_itself_with_the_status_of_the_signal(sent, name, status):
    child = Child(ENDS_CLEANLY)
    child.signal(*sent)
    assert child.end()[:2] == (status, f"{name}\n")


@posix
def test_nohup_is_heeded():
    child = Child("signal.signal(signal.SIGHUP, signal.SIG_IGN)" + ENDS_CLEANLY)
    child.signal(signal.SIGHUP)
    assert child.process.poll() is None
    child.signal(signal.SIGTERM)
    assert child.end()[:2] == (143, "SIGTERM\n")


@posix
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_process_at_once(first):
    child = Child("with interruption.watch_signals() as found:\n    ready()\n    loop(())\nprint('saved')")
    child.signal(first, signal.SIGINT)
    status, out, err = child.end()
    name = signal.Signals(first).name
    first_line, second_line = err.splitlines()  # and not a traceback
    assert first_line == f"{name}: saving after this call; press Ctrl-C again to stop now"
    assert status == 130 and second_line.startswith("interrupted twice") and "saved" not in out


@posix
def test_a_second_ctrl_c_is_one_line_whatever_becomes_of_the_exception():
    """A library may raise an error of its own for it, and what is closed on the way out is still closed."""
    code = (
        "def work():\n    try:\n        loop(())\n    except KeyboardInterrupt:\n        raise ValueError('callback')\n"
    )
    child = Child(
        code
        + "with interruption.watch_signals():\n    try:\n        ready()\n        work()\n"
        + "    finally:\n        print('closed')"
    )
    child.signal(signal.SIGINT, signal.SIGINT)
    status, out, err = child.end()
    assert (status, out, len(err.splitlines())) == (130, "closed\n", 2), err


@posix
def test_a_second_ctrl_c_ends_a_process_whose_main_thread_is_in_a_call():
    child = Child("with interruption.watch_signals() as found:\n    ready()\n    blocked()\nprint('saved')")
    child.signal(signal.SIGINT)
    assert child.process.poll() is None
    told = child.process.stderr.readline()  # at once, though no handler of Python's runs in the call
    assert told == "SIGINT: saving after this call; press Ctrl-C again to stop now\n"
    child.signal(signal.SIGINT)
    status, out, err = child.end()
    assert status == 130 and "interrupted twice" in err and "saved" not in out


def test_signals_leave_everything_as_it_was():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyError), interruption.watch_signals() as found:
        assert not found and found.exit_status is None
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise KeyError
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "jrl-signals" not in [t.name for t in threading.enumerate()]


@posix
def test_an_event_loop_keeps_its_wakeup_file():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with interruption.watch_signals() as found:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            assert found.exit_status == 143
        assert os.read(reader, 1) == bytes([signal.SIGTERM])
        assert signal.set_wakeup_fd(before) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def test_in_another_thread_signals_stay_as_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with interruption.watch_signals() as found:
            seen.append((bool(found), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


@posix
def test_sigusr1_prints_all_stacks_and_the_process_goes_on():
    child = Child("""
def waiting():
    time.sleep(60)
threading.Thread(target=waiting, daemon=True).start()
time.sleep(0.1)
with interruption.watch_signals() as found, interruption.enable_stack_dumps():
    ready()
    loop(found)
print("afterwards", flush=True)
time.sleep(60)
""")
    child.signal(signal.SIGUSR1, signal.SIGTERM)
    assert child.process.stdout.readline() == "afterwards\n"
    child.signal(signal.SIGUSR1)  # by default it ends a process
    status, _, err = child.end()
    assert status == -signal.SIGUSR1
    assert len(re.findall(r"hread 0x\w+ .*most recent call first", err)) == 3  # signals() has one of its own
    assert "in waiting" in err and "in loop" in err


@posix
def test_the_handler_of_somebody_else_stays():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(True))
    try:
        with interruption.enable_stack_dumps():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
        assert seen == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


# ---------------------------------------------------------------- the watchdog, by a clock of its own


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Watched:
    """A watchdog of 10 s that looks twice a second."""

    def __init__(self, seconds=10.0, **options):
        self.clock, self.out = Time(), io.StringIO()
        self.dog = interruption.Watchdog(seconds, out=self.out, clock=self.clock, **options)

    def after(self, seconds):
        """How many reports so many seconds bring."""
        reports = 0
        for _ in range(round(seconds * 2)):
            self.clock.now += 0.5
            reports += self.dog.check()
        return reports

    def text(self):
        text = self.out.getvalue()
        self.out.truncate(self.out.seek(0))
        return text


def test_a_stall_is_reported_once_with_its_stage_and_the_stacks():
    watched = Watched()
    watched.dog.beat("environment steps", hint=interruption.FROM_THE_HOST)
    assert watched.after(9.5) == 0 and watched.text() == ""
    assert watched.after(1.5) == 1
    text = watched.text()
    assert re.search(r"watchdog: no progress for 10 s, since \d\d:\d\d:\d\d, in: environment steps\n", text)
    assert interruption.FROM_THE_HOST in text and f"--pid {os.getpid()}" in text
    assert f"0x{threading.get_ident():016x} (most recent call first)" in text
    assert "test_a_stall_is_reported_once_with_its_stage_and_the_stacks" in text  # this frame
    assert watched.after(100) == 0 and watched.text() == ""


def test_grace_is_for_one_beat():
    watched = Watched()
    watched.dog.beat("compilation", grace=30.0)
    assert watched.after(39.5) == 0
    assert watched.after(1.5) == 1
    watched.dog.beat("update")
    assert watched.after(11) == 1


def test_a_pulse_counts_as_a_beat_and_is_named():
    pulse = [None]
    watched = Watched(pulse=lambda: pulse[0])
    watched.dog.beat("environment steps")
    for _ in range(5):
        pulse[0] = ("env", watched.clock())
        assert watched.after(9) == 0
    assert watched.after(2) == 1
    assert "in: environment steps\nwatchdog: its latest stage: env\n" in watched.text()
    watched.dog.beat("update")
    assert watched.after(11) == 1
    assert "env" not in watched.text().partition("the stacks")[0]  # it was before the update


def test_time_in_which_the_process_was_stopped_does_not_count():
    watched = Watched()
    assert watched.after(5) == 0
    watched.clock.now += 3600.0
    assert watched.after(3) == 0
    assert watched.after(2) == 1


def test_none_disables():
    watched = Watched(None)
    assert watched.after(1e4) == 0
    with watched.dog:
        watched.dog.beat("update")
        assert "jrl-watchdog" not in [t.name for t in threading.enumerate()]


def test_its_thread_looks_by_itself_and_ends_with_the_block(capfd):
    with interruption.Watchdog(0.2) as dog:
        dog.beat("a nap")
        time.sleep(1.0)
    assert "jrl-watchdog" not in [t.name for t in threading.enumerate()]
    err = capfd.readouterr().err
    assert err.count("no progress") == 1 and "in: a nap" in err and "test_its_thread_looks_by_itself" in err


# ---------------------------------------------------------------- in training


def train(*args, out):
    """`python -m jrl.train` in a process, with the environments of this folder."""
    small = ["--algo=ppo", "--set=rollout.length=16", "--set=network.hidden=[8]", "--set=run.log=[jsonl]"]
    small += ["--set=algo.num_minibatches=2", "--set=algo.num_epochs=1", "--set=run.compile_cache=false"]
    return subprocess.Popen(
        [sys.executable, "-m", "jrl.train", *small, *args, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
    )


@pytest.mark.slow
def test_a_stalled_environment_is_reported_and_the_run_goes_on(tmp_path):
    settings = ["--env=faulty_envs:Stalling", "--set=env.num_envs=2", "--set=run.stall_seconds=2"]
    process = train(*settings, "--stop=env_steps=1000", out=tmp_path / "run")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    reports = [line for line in err.splitlines() if "watchdog: no progress" in line]
    assert len(reports) == 1, err
    assert "environment steps" in reports[0] and interruption.FROM_THE_HOST in err
    assert re.search(r"faulty_envs.py\", line \d+ in fault", err)
    assert "stopped: env_steps" in out


@posix
def test_sigusr1_and_ctrl_c_in_training(tmp_path):
    process = train("--env=CartPole-v1", "--set=env.num_envs=4", "--stop=env_steps=1000000000", out=tmp_path / "run")
    try:
        while process.poll() is None and not (tmp_path / "run" / "result.jsonl").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 130, err
    assert "most recent call first" in err and "Traceback" not in err
    assert "interrupted" in out
    assert checkpoint.read_meta(checkpoint.locate(tmp_path / "run"))["env_steps"] > 0
