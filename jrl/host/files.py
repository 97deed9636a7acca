"""Files of a run directory: one process writes to it, and each file is whole or stays as it was.

    with held(directory):
        replace(directory / "config.yaml", text)

The standard library and filelock only: a directory that is in use is told before anything slow starts.
"""

import contextlib
import datetime
import errno
import io
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jrl.errors import InputError
from jrl.fields.paths import resolve

LOCK = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems that have none
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- who writes to a directory


@contextlib.contextmanager
def held(directory: Path, *, made: bool = False) -> Iterator[None]:
    """Keeps other runs out of a directory, which is made if it is missing, until the block or this process ends.

    The lock is the operating system's: nothing is left behind by a process that was killed, and processes that were
    started or forked from this one do not hold it.

    Args:
      directory: of the run.
      made: it was made for this run; one that was made and is still empty at the end goes.
    Raises:
      InputError: another run writes to it, or it cannot be written to.
    """
    from filelock import FileLock, Timeout

    directory = resolve(directory, "run.out", "directory")
    path = directory / LOCK
    lock = FileLock(path, timeout=0, mode=0o644, on_acquired=_sign, thread_local=False)
    try:
        made = made or not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"run.out: {directory} is in use by {_holder(path)}: wait until that run has ended, or choose another --out"
        ) from None
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            _leave(path, made)
            raise unwritable(directory, e) from e
        _log.warning("%s: no lock: %s: take care that no other run writes there", directory, e.strerror)
    try:
        yield
    finally:
        if lock.is_locked:
            _leave(path, made)  # before the release: nobody can hold a lock on a file that is gone
            with contextlib.suppress(OSError):
                lock.release()


def _leave(lock: Path, made: bool) -> None:
    with contextlib.suppress(OSError):
        lock.unlink()
        if made:
            lock.parent.rmdir()  # fails unless it is empty


def _sign(handle: int) -> None:
    now = datetime.datetime.now().isoformat(" ", "seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def _signed(path: Path) -> tuple[int, str, str] | None:
    try:
        found = json.loads(path.read_text())
        return int(found["pid"]), str(found["host"]), str(found["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holder(path: Path) -> str:
    found = _signed(path)
    return f"process {found[0]} on {found[1]} since {found[2]}" if found else "another process"


def is_held_here(directory: Path) -> bool:
    """Returns whether this process keeps other runs out of a directory, see `held`."""
    found = _signed(directory.absolute() / LOCK)
    return found is not None and found[:2] == (os.getpid(), socket.gethostname())


def new(directory: Path) -> Path:
    """Makes a directory of that name, or with -2, -3, ... behind it where there is one already; returns its path."""
    directory = resolve(directory, "run.out")
    for path in (directory, *(directory.with_name(f"{directory.name}-{n}") for n in range(2, 10_000))):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as e:
            raise unwritable(path, e) from e
    raise InputError(f"run.out: {directory} and all that are named like it exist: choose another --out")


def unwritable(path: Path, e: OSError) -> InputError:
    """Returns the error of a run directory in which nothing can be written."""
    taken, full = e.errno in (errno.EEXIST, errno.ENOTDIR), e.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "a part of its path is a file" if taken else e.strerror or str(e)
    mend = "free space, or choose another --out" if full else "choose another --out"
    return InputError(f"run.out: cannot write to {path}: {why}: {mend}")


@contextlib.contextmanager
def opening(directory: Path) -> Iterator[None]:
    """Turns the failure to open a file of a run directory for writing, such as another user's, into an InputError.

    Raises:
      InputError: names the file.
    """
    try:
        yield
    except OSError as e:
        path = Path(str(e.filename))
        if no_room(e) or not path.is_relative_to(directory):
            raise
        raise unwritable(path, e) from e


# ---------------------------------------------------------------- whole files, and room for them


def no_room(e: BaseException) -> bool:
    """Returns whether an error says that nothing more can be written: a full disk, a quota, a read-only file system."""
    if isinstance(e, OSError):
        return e.errno in _CANNOT_WRITE
    # tensorstore has errors of its own kind
    return type(e) is ValueError and any(word in str(e) for word in ("RESOURCE_EXHAUSTED", os.strerror(errno.ENOSPC)))


def replace(path: Path, text: str) -> None:
    """Writes a file anew: it holds either what it held or `text`, whenever the process dies or the disk is full."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(e.errno, e.strerror, str(path)) from e


def append(file: io.FileIO, data: bytes) -> None:
    """Adds `data` at the end of an unbuffered file, all of it or, with an OSError that names the file, nothing."""
    start, left = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as e:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise OSError(e.errno, e.strerror, str(file.name)) from e


def sync(directory: Path) -> None:
    """Puts a directory's entries on disk; where directories cannot be opened, as on Windows, the system decides."""
    with contextlib.suppress(PermissionError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
