"""Signals, stack dumps on request, and a watchdog for steps that never return.

    with watch_signals() as interrupted, enable_stack_dumps(), Watchdog(300.0) as watchdog:
        for info in steps:
            watchdog.beat("environment steps and update")
            if interrupted:
                break
    sys.exit(interrupted.exit_status or 0)

Standard library only: this module is imported before jax.
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
    "FROM_THE_HOST", "IN_A_PROGRAM", "NOT_FINITE", "Interrupted", "Signals", "Watchdog", "enable_stack_dumps",
    "watch_signals",
]  # fmt: skip

_DUPLICATE_S = 0.1  # `timeout` and some shells send one interruption twice, to the process and to its group
_ANSWER_S = 1.0  # time for Python to answer a second Ctrl-C before the process is ended
_CLOSE_S = 10.0  # time to close environments and processes after that answer
SAVES = "saving after this call"
NOT_FINITE = "not finite"  # how the end of a run begins whose update was not: it stays at its last good state
_TWICE = "interrupted twice: ended at once, without a checkpoint of the latest steps"

# hints for `Watchdog.beat`
FROM_THE_HOST = (
    "the environments are stepped from Python: if the environment hangs, the stack of the loop's thread ends in its "
    "step; if the device hangs, it ends in jax"
)
IN_A_PROGRAM = (
    "the environments are stepped inside a compiled program: the loop's thread waits in jax, whether an environment or "
    "the device hangs"
)


# ---------------------------------------------------------------- signals


class Interrupted(Exception):
    """A wait was given up because the run must end."""


class Signals:
    """The received signals among SIGINT, SIGTERM and SIGHUP; false before the first."""

    def __init__(self, then: str = SAVES) -> None:
        self._then = then
        self._message_lock = threading.Lock()  # acquired by the thread that prints the message
        self.number: int | None = None  # first received signal
        self._since = 0.0
        self._answered = threading.Event()  # the second Ctrl-C was raised
        self._left = threading.Event()  # the block of `watch_signals` ended

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def exit_status(self) -> int | None:
        """130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, None without a signal."""
        return None if self.number is None else 128 + self.number

    def _print_message(self, number: int) -> None:
        if self._message_lock.acquire(blocking=False):
            _write_line(f"{signal.Signals(number).name}: {self._then}; press Ctrl-C again to stop now")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._since = number, now
            self._print_message(number)
        elif number == signal.SIGINT and now - self._since > _DUPLICATE_S:
            self._answered.set()
            raise KeyboardInterrupt


def _is_in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which must survive an interruption."""
    return "ipykernel.kernelapp" in sys.modules


def _write_line(line: str) -> None:
    """Writes a line to stderr from any thread, below a progress bar."""
    with contextlib.suppress(OSError):
        os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())


@contextlib.contextmanager
def watch_signals(then: str = SAVES) -> Iterator[Signals]:
    """Watches for SIGINT, SIGTERM and SIGHUP, so that a loop can end between two iterations.

    The first signal prints `then` at once, whatever the main thread does. A Ctrl-C after it raises KeyboardInterrupt
    inside the block; at the end of the block it becomes one line and exit status 130. If the main thread is in a call
    that does not return to Python (a compilation, a program that hangs), the process ends a second later, with the same
    line and status. Another SIGTERM or SIGHUP is ignored: schedulers repeat them. SIGHUP means that the terminal was
    closed; if it is ignored, as by nohup, it stays ignored.

    In the kernel of a notebook the process never ends: a second interruption stays a KeyboardInterrupt of the cell, and
    the variables of the notebook are kept.

    Outside of the main thread nothing is watched, and the yielded object stays false.

    Args:
      then: effect of the first signal, in words.
    Raises:
      SystemExit: two Ctrl-C.
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
        with _watch_wakeup_pipe(found, numbers):
            yield found
    except BaseException:  # any type: a library may have replaced the KeyboardInterrupt by its own exception
        if not found._answered.is_set() or _is_in_notebook():
            raise
        before[signal.SIGINT] = signal.SIG_DFL  # a third Ctrl-C ends Python's own waits at exit
        _write_line(_TWICE)
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        for s, handler in before.items():
            signal.signal(s, handler or signal.SIG_DFL)  # None: not installed from Python


@contextlib.contextmanager
def _watch_wakeup_pipe(found: Signals, awaited: list[signal.Signals]) -> Iterator[None]:
    """Reports the first signal at once, and ends the process at a second Ctrl-C that the main thread does not answer.

    Python runs handlers in the main thread, between two instructions. The signal's number is written to the wakeup file
    at once, and another thread reads it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:  # an event loop uses the wakeup file
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
                    found._print_message(number)
                elif (
                    number == signal.SIGINT
                    and now - first > _DUPLICATE_S
                    and not _is_in_notebook()
                    and not (found._answered.wait(_ANSWER_S) and found._left.wait(_CLOSE_S))
                ):
                    _write_line(_TWICE)
                    os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=watch, name="jrl-signals", daemon=True)
    try:
        thread.start()
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        found._left.set()
        writer.close()  # ends the thread's loop
        thread.join()
        reader.close()


@contextlib.contextmanager
def enable_stack_dumps() -> Iterator[None]:
    """Lets SIGUSR1 print the Python stacks of all threads to stderr; the run continues. Does nothing on Windows.

    The dump works while the main thread is in a call that does not return. Another installed handler stays.
    """
    number = getattr(signal, "SIGUSR1", None)
    # __stderr__: sys.stderr of a notebook or a test is not a file
    if number is None or sys.__stderr__ is None or signal.getsignal(number) != signal.SIG_DFL:
        yield
        return
    faulthandler.register(number, file=sys.__stderr__, all_threads=True)
    try:
        yield
    finally:
        # only in the main thread: other threads' runs may still need it, and by default SIGUSR1 ends the process
        if threading.current_thread() is threading.main_thread():
            faulthandler.unregister(number)


# ---------------------------------------------------------------- stalls


class _Beat(NamedTuple):
    what: str
    hint: str
    grace: float
    time: float


class Watchdog:
    """Reports a loop that stalls: its stage, the time of the last beat, and the stacks of all threads.

        with Watchdog(300.0) as watchdog:
            watchdog.beat("compilation", grace=600.0)
            for info in steps:
                watchdog.beat("environment steps and update", hint=FROM_THE_HOST)

    Each stall is reported once; the run is not interrupted. Time in which the whole process was stopped (Ctrl-Z) does
    not count. A library that hangs while it holds Python's global lock stops the watchdog, too; SIGUSR1 and py-spy
    still work then.

    Args:
      seconds: time without a beat; None: never report.
      pulse: function that returns the latest stage between two beats (such as a single environment step) and its start
        by `clock`; called from the watchdog's thread. A change counts as a beat.
      out: stream of the report; None: stderr.
      clock: function that returns seconds; for tests.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        pulse: Callable[[], tuple[str, float] | None] = lambda: None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds, self._pulse, self._out, self._clock = seconds, pulse, out, clock
        self._interval = min(max((seconds or 0.0) / 20, 0.02), 5.0)
        self._beat = _Beat("start", "", 0.0, clock())
        self._last: tuple[_Beat, tuple[str, float] | None] = (self._beat, None)
        self._last_check, self._quiet, self._is_reported = clock(), 0.0, False
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, what: str, *, hint: str = "", grace: float = 0.0) -> None:
        """Marks that the loop is alive and enters `what`. Costs well under a microsecond.

        Args:
          what: stage that begins, for the report.
          hint: advice if the stage does not end.
          grace: allowed seconds beyond `seconds`, such as for a compilation.
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
            self._thread.join(1.0)  # with a limit: it may be blocked on a pipe without a reader

    def check(self) -> bool:
        """Reports a stall, once; returns whether it did. The watchdog's thread calls it regularly."""
        if self._seconds is None:
            return False
        now, beat, pulse = self._clock(), self._beat, self._pulse()
        # a longer time than the interval means that the process was stopped
        passed = min(now - self._last_check, 2 * self._interval)
        self._last_check = now
        if beat is not self._last[0] or pulse != self._last[1]:
            self._last, self._quiet, self._is_reported = (beat, pulse), 0.0, False
            return False
        self._quiet += passed
        if self._is_reported or self._quiet < self._seconds + beat.grace:
            return False
        self._is_reported = True
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the run
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
            f"the run continues to wait; to print the stacks again: {request}py-spy dump --native --pid {os.getpid()}, "
            "which shows C++ threads, too",
            "if steps of this run take so long, raise run.stall_seconds",
            f"the stacks of all threads follow; the loop's is 0x{self._loop_thread:016x}",
        ]
        # one write, so that lines of other threads do not mix in
        out.write("\n" + "".join(f"watchdog: {line}\n" for line in lines if line))
        out.flush()
        _dump_stacks(out)


def _dump_stacks(out: TextIO) -> None:
    try:  # through a file: faulthandler needs a file descriptor, which a notebook's stream lacks
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            out.write(file.read())
    except OSError:  # disk full
        faulthandler.dump_traceback(file=out, all_threads=True)
    out.flush()
