"""Does a replay buffer fit the device? Asked before anything is allocated."""

import math
from collections.abc import Callable
from pathlib import Path

import jax

from jrl.errors import InputError
from jrl.types import Buffer

_SHARE = 0.9  # of what is free: the rest of the program needs memory, too


def nbytes(buffer: Buffer) -> int:
    """Size of a buffer's state in bytes; nothing is allocated."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(buffer.init)))


def available() -> int | None:
    """Free bytes of the memory that a buffer would be allocated in, on one device; None where it cannot be told."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None
    free = [_meminfo(Path("/proc/meminfo")), *(_cgroup(*files) for files in _CGROUPS)]
    known = [n for n in free if n is not None]
    return min(known) if known else None


def check_fits(make: Callable[[int], Buffer], capacity: int, *, devices: int = 1) -> str:
    """The size of the buffer that `make(capacity)` gives on each device, in words.

    Args:
      make: capacity over all devices -> the buffer of one device.
      capacity: transitions, over all devices.
      devices: that hold a buffer each; fake ones on the CPU share its memory.
    Raises:
      InputError: it does not fit, with the largest capacity that would.
    """
    size, free = nbytes(make(capacity)), available()
    if free is not None and jax.local_devices()[0].platform == "cpu":
        free //= devices
    each = " on each device" if devices > 1 else ""
    if free is None:
        return f"replay: {capacity:,} transitions, {_words(size)}{each}"
    if size > _SHARE * free:
        largest = _round_down(int(capacity * _SHARE * free / size))
        raise InputError(
            f"replay.capacity: {capacity:,} transitions take {_words(size)}{each}, of which {_words(free)} are free: "
            f"at most {largest:,} would fit"
        )
    return f"replay: {capacity:,} transitions, {_words(size)} of {_words(free)} free{each}"


_CGROUPS = (  # limit, usage: version 2, version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def _meminfo(file: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _cgroup(limit: Path, usage: Path) -> int | None:
    try:
        return int(limit.read_text()) - int(usage.read_text())  # "max" is no number: no limit
    except (OSError, ValueError):
        return None


def _round_down(number: int) -> int:
    """To two digits, so that it is easy to type and surely fits."""
    step = 10 ** max(len(str(number)) - 2, 0)
    return number // step * step


def _words(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
