"""Output of a command: to a terminal or pipe that may close, and into a log file of its run.

    with record_output() as transcript:
        print("...")                            # to stdout, and kept
        transcript.open(directory / "log.txt")  # receives the kept text and all later text
        display = open_progress(stop, transcript.screen)  # not recorded

Standard library only: commands answer `--help` and bad input before jax loads.
"""

import contextlib
import datetime
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from jrl.host import files

# escape sequences of terminals, then other control characters except tab and newline
_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])|[\x00-\x08\x0b-\x1f\x7f]")

_DATED = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # format of records in log.txt


class SafeStream:
    """A text stream that never raises: after its reader has gone, text is dropped.

    Characters that the stream cannot encode are written as escapes.

    Args:
      stream: sys.stdout or sys.stderr; None (Python's value for a closed file): nothing is shown.
      copy: function that also receives each text.
    """

    def __init__(self, stream: TextIO | None, copy: Callable[[str], None] = lambda text: None):
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy(text)
        self._call("write", text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        """Does nothing, because the stream is the process's: loggers that took this one close it at exit."""

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def _call(self, method: str, *args: Any) -> None:
        if self._stream is None:
            return
        try:
            try:
                getattr(self._stream, method)(*args)
            except UnicodeEncodeError:  # the stream's encoding lacks a character
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                known = [text.encode(encoding, "backslashreplace").decode(encoding) for text in args]
                getattr(self._stream, method)(*known)
        except (OSError, ValueError):  # ValueError: closed in Python
            stream, self._stream = self._stream, None
            _discard(stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._stream is None:
            raise AttributeError(name)
        return getattr(self._stream, name)


def _discard(stream: TextIO) -> None:
    """Redirects a stream's file to the null device, for its remaining buffer and for other writers."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        handle = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)


class Transcript:
    """Printed text, line by line, without control characters.

    Attributes:
      screen: stdout alone, for a progress bar.
      file: stream into the transcript alone.
    """

    def __init__(self, screen: TextIO | None):
        self.screen, self.file = cast(TextIO, SafeStream(screen)), cast(TextIO, SafeStream(None, self.write))
        self._kept: list[str] = []
        self._line = ""
        self._open: Any = None
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            # a progress bar overwrites its line: keep the last version
            clean = [_CONTROL.sub("", line.rstrip("\r").rsplit("\r", 1)[-1]) for line in lines]
            self._kept += [line + "\n" for line in clean]
            self._save()

    def open(self, path: Path) -> None:
        """Appends to that file from now on, beginning with the text printed before. A second call does nothing."""
        with self._lock:
            if self._open is not None:
                return
            self._open = path.open("ab", buffering=0)
            head = "\n" if self._open.seek(0, os.SEEK_END) else ""
            now = datetime.datetime.now().isoformat(" ", "seconds")
            self._kept.insert(0, f"{head}# {now}\n")
            self._save()

    def listen(self) -> None:
        """Wraps sys.stdout and sys.stderr again, if other code (such as a live bar) has replaced them."""
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), SafeStream):
                setattr(sys, name, SafeStream(stream, self.write))

    def _save(self) -> None:
        if self._open is None or not self._kept:
            return
        text, self._kept = "".join(self._kept), []
        # a full disk is reported elsewhere
        with contextlib.suppress(OSError):
            files.append(self._open, text.encode("utf-8", "replace"))

    def close(self) -> None:
        """Closes the file, and ends an unfinished line."""
        with self._lock:
            if self._line:
                self.write("\n")
            if self._open is not None:
                self._open.close()
                self._open = None


@contextlib.contextmanager
def record_output() -> Iterator[Transcript]:
    """Copies stdout and stderr into a Transcript; neither stream can raise meanwhile.

    Records of jrl's loggers (run.log_level) are copied with their time. They also go to stderr, unless other handlers
    exist. An exception that ends the block is written as Python will print it.
    """
    _fill_closed_descriptors()
    out, err = sys.stdout, sys.stderr
    transcript = Transcript(out)
    own: Any = SafeStream(out, transcript.write), SafeStream(err, transcript.write)
    sys.stdout, sys.stderr = own
    logger = logging.getLogger("jrl")
    handlers = [_handler(transcript.file, _DATED)]
    propagates = logger.propagate
    if not logger.hasHandlers():
        handlers.append(_handler(SafeStream(err), "%(levelname)s %(name)s: %(message)s"))
        logger.propagate = False  # a library such as absl may add a root handler later
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield transcript
    except SystemExit:
        raise
    except BaseException:
        transcript.write(traceback.format_exc())
        raise
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.propagate = propagates
        for stream in own:
            stream.flush()
        sys.stdout, sys.stderr = out, err
        transcript.close()


class _FileHandler(logging.StreamHandler):
    """Handler that writes records to a file, and leaves the default handling on if no other handler exists."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        handlers = [*logging.getLogger("jrl").handlers, *logging.getLogger().handlers]
        last = logging.lastResort
        is_first = handlers[0] is self  # several runs of a process show a record once
        if last and is_first and all(isinstance(h, _FileHandler) for h in handlers) and record.levelno >= last.level:
            last.handle(record)


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[TextIO]:
    """Yields a stream into a log.txt; records of jrl's loggers are copied into it. An existing file is continued."""
    transcript, logger = Transcript(None), logging.getLogger("jrl")
    transcript.open(path)
    handler = _FileHandler(transcript.file)
    handler.setFormatter(logging.Formatter(_DATED))
    logger.addHandler(handler)
    try:
        yield transcript.file
    finally:
        logger.removeHandler(handler)
        transcript.close()


def _handler(stream: Any, form: str) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(form))
    return handler


def _fill_closed_descriptors() -> None:
    """Opens the null device for closed standard files; otherwise the next opened file would get their descriptor."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open uses the lowest free descriptor
