"""Events that come between a run and its end: signals, a request for the stacks, a step that never returns.

    with faults.signals() as interrupted, faults.stacks_on_request(), faults.Watchdog(300.0) as watchdog:
        for info in steps:
            watchdog.beat("environment steps and update")
            if interrupted:
                break
    sys.exit(interrupted.exit_status or 0)

The standard library only: these are there before jax is.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple, TextIO

__all__ = [
    "FROM_THE_HOST", "IN_A_PROGRAM", "NOT_FINITE", "Interrupted", "Signals", "Watchdog", "signals", "stacks_on_request",
]  # fmt: skip

_TOGETHER = 0.1  # seconds: `timeout` and some shells send one interruption twice, to the process and to its group
_PATIENCE = 1.0  # seconds for Python to answer a second Ctrl-C, before the process is ended over its head
_CLOSING = 10.0  # seconds for environments and processes to be closed then
SAVES = "saving after this call"
NOT_FINITE = "not finite"  # how the end of a run begins whose update was not: it stays at its last good state
_TWICE = "interrupted twice: ended at once, without a checkpoint of the latest steps"

# where to look when an iteration does not return; for `Watchdog.beat`
FROM_THE_HOST = (
    "the environments are stepped from Python: the stack of the loop's thread ends in the environment's step if that "
    "is what hangs, and in jax if it is the device"
)
IN_A_PROGRAM = (
    "the environments are stepped inside a compiled program: the loop's thread only waits for it in jax, whether an "
    "environment or the device hangs"
)


# ---------------------------------------------------------------- signals


class Interrupted(Exception):
    """A wait for others, who may never come, has seen that the run is to end."""


class Signals:
    """Signals that have come, of SIGINT, SIGTERM and SIGHUP: false until then."""

    def __init__(self, then: str = SAVES) -> None:
        self._then = then
        self._said = threading.Lock()  # taken by the thread that says it
        self.number: int | None = None  # the first that came
        self._since = 0.0
        self._answered = threading.Event()  # the second Ctrl-C has been raised
        self._left = threading.Event()  # the block of `signals` has ended

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str | None:
        """Returns SIGINT, SIGTERM, SIGHUP or None."""
        return None if self.number is None else signal.Signals(self.number).name

    @property
    def exit_status(self) -> int | None:
        """Returns 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, None if none came."""
        return None if self.number is None else 128 + self.number

    def _say(self, number: int) -> None:
        if self._said.acquire(blocking=False):
            _tell(f"{signal.Signals(number).name}: {self._then}; press Ctrl-C again to stop now")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._since = number, now
            self._say(number)
        elif number == signal.SIGINT and now - self._since > _TOGETHER:
            self._answered.set()
            raise KeyboardInterrupt


def _tell(line: str) -> None:
    """Writes a line to stderr from any thread, behind what a progress bar has drawn there."""
    with contextlib.suppress(OSError):
        os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())


@contextlib.contextmanager
def signals(then: str = SAVES) -> Iterator[Signals]:
    """Watches for SIGINT, SIGTERM and SIGHUP, so that a loop can end where its state is whole.

    The first signal prints `then` at once, whatever the main thread does. A Ctrl-C after it raises KeyboardInterrupt
    inside the block, which becomes one line and the exit status 130 where the block ends. Where the main thread is in a
    call that does not come back to Python (a compilation, a program that hangs), the process ends a second later, with
    the same line and status. Another SIGTERM or SIGHUP is ignored: schedulers repeat them. SIGHUP comes when the
    terminal is closed; where it is ignored, as by nohup, it stays so.

    In another thread than the main one this does nothing, and what it yields stays false.

    Args:
      then: what happens after the first signal, in words.
    Raises:
      SystemExit: Ctrl-C came twice.
    """
    found = Signals(then)
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, found._handle) for number in numbers}
    try:
        with _over_the_head_of_python(found, numbers):
            yield found
    except BaseException:  # of whatever kind: others may have made their own of the KeyboardInterrupt
        if not found._answered.is_set():
            raise
        before[signal.SIGINT] = signal.SIG_DFL  # a third Ctrl-C ends what Python still waits for
        _tell(_TWICE)
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        for s, handler in before.items():
            signal.signal(s, handler or signal.SIG_DFL)  # None: it was not installed from Python


@contextlib.contextmanager
def _over_the_head_of_python(found: Signals, awaited: list[signal.Signals]) -> Iterator[None]:
    """Tells of the first signal at once, and ends the process at a second Ctrl-C that the main thread does not answer.

    Python runs handlers between two of its instructions, in the main thread. The number of a signal is written to the
    wakeup file at once, where another thread reads it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:  # an event loop reads its own
        signal.set_wakeup_fd(before)

    def watch() -> None:
        first: float | None = None
        while numbers := reader.recv(64):
            for number in numbers:
                now = time.monotonic()
                if number not in awaited:
                    continue
                if first is None:
                    first = now
                    found._say(number)
                elif (
                    number == signal.SIGINT
                    and now - first > _TOGETHER
                    and not (found._answered.wait(_PATIENCE) and found._left.wait(_CLOSING))
                ):
                    _tell(_TWICE)
                    os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=watch, name="jrl-signals", daemon=True)
    try:
        thread.start()
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        found._left.set()
        writer.close()  # the thread reads the end
        thread.join()
        reader.close()


@contextlib.contextmanager
def stacks_on_request() -> Iterator[None]:
    """Makes SIGUSR1 print the Python stacks of all threads to stderr; the run goes on. Does nothing on Windows.

    It works while the main thread is in a call that does not return. A handler that somebody else has installed stays.
    """
    number = getattr(signal, "SIGUSR1", None)
    # not sys.stderr: that of a notebook or a test is no file
    if number is None or sys.__stderr__ is None or signal.getsignal(number) != signal.SIG_DFL:
        yield
        return
    faulthandler.register(number, file=sys.__stderr__, all_threads=True)
    try:
        yield
    finally:
        # another thread's run may count on it too: there it stays, for by default SIGUSR1 ends the process
        if threading.current_thread() is threading.main_thread():
            faulthandler.unregister(number)


# ---------------------------------------------------------------- stalls


class _Beat(NamedTuple):
    what: str
    hint: str
    grace: float
    time: float


class Watchdog:
    """Reports a loop that does not come round: what it was doing, since when, and the stacks of all threads.

        with Watchdog(300.0) as watchdog:
            watchdog.beat("compilation", grace=600.0)
            for info in steps:
                watchdog.beat("environment steps and update", hint=FROM_THE_HOST)

    One report per stall: the next comes after another beat. The run is left alone. Time in which the whole process was
    stopped (Ctrl-Z) does not count. A library that hangs while it holds Python's global lock stops the watchdog as
    well; SIGUSR1 and py-spy still work then.

    Args:
      seconds: without a beat; None: never report.
      pulse: the latest stage, with its start by `clock`, of what works between two beats, such as single environment
        steps; called from the watchdog's thread. A change counts as a beat.
      out: where to; None for stderr.
      clock: seconds; for tests.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        pulse: Callable[[], tuple[str, float] | None] = lambda: None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if seconds is not None and seconds <= 0:
            raise ValueError(f"seconds: expected more than 0, or None, got {seconds}")
        self._seconds, self._pulse, self._out, self._clock = seconds, pulse, out, clock
        self._interval = min(max((seconds or 0.0) / 20, 0.02), 5.0)
        self._beat = _Beat("start", "", 0.0, clock())
        self._seen: tuple[_Beat, tuple[str, float] | None] = (self._beat, None)
        self._looked, self._quiet, self._told = clock(), 0.0, False
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, what: str, *, hint: str = "", grace: float = 0.0) -> None:
        """Marks that the loop is alive and goes on to `what`. Costs well under a microsecond.

        Args:
          what: the stage that begins, for the report.
          hint: where to look if it does not end.
          grace: seconds that it may take beyond `seconds`, such as for a compilation.
        """
        self._beat = _Beat(what, hint, grace, self._clock())

    def __enter__(self) -> "Watchdog":
        self._loop_thread = threading.get_ident()
        self.beat(self._beat.what)
        if self._seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="jrl-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)  # not for ever: it may be writing to a pipe that nobody reads

    def check(self) -> bool:
        """Looks once: reports a stall, once, and returns whether it did. The watchdog's thread calls it regularly."""
        if self._seconds is None:
            return False
        now, beat, pulse = self._clock(), self._beat, self._pulse()
        # Between two looks lies the interval, or a time in which this process was stopped.
        passed = min(now - self._looked, 2 * self._interval)
        self._looked = now
        if beat is not self._seen[0] or pulse != self._seen[1]:
            self._seen, self._quiet, self._told = (beat, pulse), 0.0, False
            return False
        self._quiet += passed
        if self._told or self._quiet < self._seconds + beat.grace:
            return False
        self._told = True
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to end
            self._report(beat, pulse, now)
        return True

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.check()

    def _report(self, beat: _Beat, pulse: tuple[str, float] | None, now: float) -> None:
        out = self._out or sys.stderr
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._quiet))
        request = f"kill -USR1 {os.getpid()}, or " if hasattr(signal, "SIGUSR1") else ""
        lines = [
            f"no progress for {self._quiet:.0f} s, since {since}, in: {beat.what}",
            f"its latest stage: {pulse[0]}" if pulse and pulse[1] >= beat.time else "",
            beat.hint,
            f"the run goes on waiting; the stacks again, later: {request}py-spy dump --native --pid {os.getpid()}, "
            "which shows threads of C++ too",
            "if this run's steps do take so long, raise run.stall_seconds",
            f"the stacks of all threads follow; the loop's is 0x{self._loop_thread:016x}",
        ]
        # in one piece, among the lines of other threads
        out.write("\n" + "".join(f"watchdog: {line}\n" for line in lines if line))
        out.flush()
        _dump_stacks(out)


def _dump_stacks(out: TextIO) -> None:
    try:  # by way of a file, for `out` may have none, such as a notebook's, or not be all that there is
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            out.write(file.read())
    except OSError:  # no room for it
        faulthandler.dump_traceback(file=out, all_threads=True)
    out.flush()
