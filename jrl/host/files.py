"""Files of a run directory: one process writes to it, and each file is whole or unchanged.

    with lock_directory(directory):
        replace(directory / "config.yaml", text)

Standard library and filelock only: a directory in use is reported before anything slow starts.
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
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # file systems without locks
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- lock of a directory


@contextlib.contextmanager
def lock_directory(directory: Path, *, made: bool = False) -> Iterator[None]:
    """Locks a run directory, which is made if missing, until the block or this process ends.

    The operating system holds the lock: a killed process leaves nothing behind, and child processes do not hold it.

    Args:
      directory: run directory.
      made: whether it was made for this run; such a directory is removed if still empty at the end.
    Raises:
      InputError: another run writes to it, or it is not writable.
    """
    from filelock import FileLock, Timeout

    directory = resolve(directory, "run.out", "directory")
    path = directory / LOCK
    lock = FileLock(path, timeout=0, mode=0o644, on_acquired=_write_owner, thread_local=False)
    try:
        made = made or not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        owner = "process {} on {} since {}".format(*found) if (found := _read_owner(path)) else "another process"
        raise InputError(
            f"run.out: {directory} is in use by {owner}: wait until that run has ended, or choose another --out"
        ) from None
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            _remove_lock(path, made)
            raise unwritable_error(directory, e) from e
        _log.warning("%s: cannot be locked: %s: let no other run write there", directory, e.strerror)
    try:
        yield
    finally:
        if lock.is_locked:
            _remove_lock(path, made)  # before the release, so that no other run locks a deleted file
            with contextlib.suppress(OSError):
                lock.release()


def _remove_lock(lock: Path, made: bool) -> None:
    with contextlib.suppress(OSError):
        lock.unlink()
        if made:
            lock.parent.rmdir()  # fails unless it is empty


def _write_owner(handle: int) -> None:
    now = datetime.datetime.now().isoformat(" ", "seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, text.encode())


def _read_owner(path: Path) -> tuple[int, str, str] | None:
    try:
        found = json.loads(path.read_text())
        return int(found["pid"]), str(found["host"]), str(found["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_locked_here(directory: Path) -> bool:
    """Returns whether this process holds the lock of a directory."""
    found = _read_owner(directory.absolute() / LOCK)
    return found is not None and found[:2] == (os.getpid(), socket.gethostname())


def make_numbered(directory: Path) -> Path:
    """Makes a directory of that name, or with -2, -3, ... appended if it exists; returns its path."""
    directory = resolve(directory, "run.out")
    for path in (directory, *(directory.with_name(f"{directory.name}-{n}") for n in range(2, 10_000))):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as e:
            raise unwritable_error(path, e) from e
    raise InputError(f"run.out: {directory} and {directory.name}-2 to -9999 exist: choose another --out")


def unwritable_error(path: Path, e: OSError) -> InputError:
    """Returns the error of a run directory that is not writable."""
    taken, full = e.errno in (errno.EEXIST, errno.ENOTDIR), e.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "a part of its path is a file" if taken else e.strerror or str(e)
    fix = "free space, or choose another --out" if full else "choose another --out"
    return InputError(f"run.out: cannot write to {path}: {why}: {fix}")


@contextlib.contextmanager
def report_unwritable(directory: Path) -> Iterator[None]:
    """Converts a failure to open a run directory's file for writing, such as another user's, into an InputError.

    Raises:
      InputError: names the file.
    """
    try:
        yield
    except OSError as e:
        path = Path(str(e.filename))
        if is_disk_full(e) or not path.is_relative_to(directory):
            raise
        raise unwritable_error(path, e) from e


# ---------------------------------------------------------------- atomic writes


def is_disk_full(e: BaseException) -> bool:
    """Returns whether an error means that nothing more can be written: full disk, quota, read-only file system."""
    if isinstance(e, OSError):
        return e.errno in _CANNOT_WRITE
    # tensorstore raises ValueError
    return type(e) is ValueError and any(word in str(e) for word in ("RESOURCE_EXHAUSTED", os.strerror(errno.ENOSPC)))


def replace(path: Path, text: str) -> None:
    """Replaces a file's content by `text`. If the process dies or the disk is full, the old content stays."""
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
    """Appends `data` to an unbuffered file: all of it, or nothing with an OSError that names the file."""
    start, left = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as e:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise OSError(e.errno, e.strerror, str(file.name)) from e


def sync(directory: Path) -> None:
    """Flushes a directory's entries to disk; on systems whose directories cannot be opened (Windows), do nothing."""
    with contextlib.suppress(PermissionError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
