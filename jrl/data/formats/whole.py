"""Files and directories that are written whole or not at all, whenever the process dies."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which takes its place at the end of the block."""
    temporary = _beside(path)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `path`, which takes its place at the end of the block."""
    temporary = _beside(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
