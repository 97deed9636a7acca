"""Output of a command: to a terminal or pipe that may go away meanwhile, and into a file of its run.

    with recorded() as transcript:
        print("...")                            # to stdout, and kept
        transcript.open(directory / "log.txt")  # what was kept goes there, and what follows
        display = open_progress(stop, transcript.screen)  # not into the file

The standard library only: commands answer `--help` and bad input through it before jax loads.
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

# escape sequences of terminals, then what else has no width, but for tabs and ends of lines
_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])|[\x00-\x08\x0b-\x1f\x7f]")

_DATED = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # of a record in log.txt


class Lasting:
    """A text stream that outlives its reader: once that is gone, what is written is dropped. Characters that the stream
    cannot encode are written as escapes.

    Args:
      stream: sys.stdout or sys.stderr; None, as Python has them where the file was closed: nothing is shown.
      copy: gets each text as well.
    """

    def __init__(self, stream: TextIO | None, copy: Callable[[str], None] = lambda text: None):
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy(text)
        self._do("write", text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._do("flush")

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def _do(self, method: str, *args: Any) -> None:
        if self._stream is None:
            return
        try:
            try:
                getattr(self._stream, method)(*args)
            except UnicodeEncodeError:  # a terminal or a pipe that knows no such character
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                known = [text.encode(encoding, "backslashreplace").decode(encoding) for text in args]
                getattr(self._stream, method)(*known)
        except (OSError, ValueError):  # ValueError: closed in Python
            stream, self._stream = self._stream, None
            _to_nowhere(stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._stream is None:
            raise AttributeError(name)
        return getattr(self._stream, name)


def _to_nowhere(stream: TextIO) -> None:
    """Discards what the stream still holds when Python ends, and what others write to its file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        handle = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)


class Transcript:
    """Printed text, line by line, without control characters.

    Attributes:
      screen: stdout alone, for what is drawn over itself.
      file: to write to the transcript alone.
    """

    def __init__(self, screen: TextIO | None):
        self.screen, self.file = cast(TextIO, Lasting(screen)), cast(TextIO, Lasting(None, self.write))
        self._kept: list[str] = []
        self._line = ""
        self._open: Any = None
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            # of what a progress bar drew over itself, the last
            clean = [_CONTROL.sub("", line.rstrip("\r").rsplit("\r", 1)[-1]) for line in lines]
            self._kept += [line + "\n" for line in clean]
            self._save()

    def open(self, path: Path) -> None:
        """Appends to that file from now on, and first what was printed before; once."""
        with self._lock:
            if self._open is not None:
                return
            self._open = path.open("ab", buffering=0)
            head = "\n" if self._open.seek(0, os.SEEK_END) else ""
            now = datetime.datetime.now().isoformat(" ", "seconds")
            self._kept.insert(0, f"{head}# {now}\n")
            self._save()

    def listen(self) -> None:
        """Goes on where somebody, such as a live bar, has put streams of their own in the place of these."""
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), Lasting):
                setattr(sys, name, Lasting(stream, self.write))

    def _save(self) -> None:
        if self._open is None or not self._kept:
            return
        text, self._kept = "".join(self._kept), []
        # a disk that is full is for others to tell
        with contextlib.suppress(OSError):
            files.append(self._open, text.encode("utf-8", "replace"))

    def close(self) -> None:
        """Ends the file, and a line that has no end."""
        with self._lock:
            if self._line:
                self.write("\n")
            if self._open is not None:
                self._open.close()
                self._open = None


@contextlib.contextmanager
def recorded() -> Iterator[Transcript]:
    """Copies all that Python prints, to stdout and stderr, into a Transcript; neither can fail meanwhile.

    What jrl's loggers let through (run.log_level) is in it as well, with the time, and goes to stderr unless somebody
    has said where else. An exception that ends the block is written as Python will print it.
    """
    _reopen()
    out, err = sys.stdout, sys.stderr
    transcript = Transcript(out)
    own: Any = Lasting(out, transcript.write), Lasting(err, transcript.write)
    sys.stdout, sys.stderr = own
    logger = logging.getLogger("jrl")
    handlers = [_handler(transcript.file, _DATED)]
    propagates = logger.propagate
    if not logger.hasHandlers():
        handlers.append(_handler(Lasting(err), "%(levelname)s %(name)s: %(message)s"))
        logger.propagate = False  # to the handler that a library gives Python's root meanwhile, as absl does
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


class _Copied(logging.StreamHandler):
    """Writes records to a file. Where nobody else handles them, Python shows them as if this were not there either."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        heard = [*logging.getLogger("jrl").handlers, *logging.getLogger().handlers]
        last = logging.lastResort
        # several runs of a process show a record once
        if last and heard[0] is self and all(isinstance(h, _Copied) for h in heard) and record.levelno >= last.level:
            last.handle(record)


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[TextIO]:
    """Yields a log.txt to write to, beside what a program of the user's prints.

    What jrl's loggers let through is in it as well. A file that is there already goes on.
    """
    transcript, logger = Transcript(None), logging.getLogger("jrl")
    transcript.open(path)
    handler = _Copied(transcript.file)
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


def _reopen() -> None:
    """Opens the null device in the place of standard files that are closed: another file would get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
