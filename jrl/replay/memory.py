"""What a replay buffer will take, and what there is, before anything is allocated."""

import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jrl.errors import InputError
from jrl.types import Buffer

_SHARE = 0.9  # of the free memory: the rest is for what training makes beside replay


def nbytes(buffer: Buffer) -> int:
    """Bytes of a buffer's state; nothing is allocated."""
    leaves = jax.tree.leaves(jax.eval_shape(buffer.init))
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)


def available(device: jax.Device | None = None) -> int | None:
    """Free bytes of an accelerator, or of the host for a CPU device; None if nobody can tell."""
    device = device or jax.local_devices()[0]
    if device.platform == "cpu":
        return host_available()
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def check_fits(make: Callable[[int], Buffer], capacity: int, *, devices: int = 1) -> str:
    """The size of a replay buffer in words, if there is room for it.

    Args:
      make: from a capacity over all devices to one device's buffer. Nothing is allocated.
      capacity: rows over all devices.
      devices: that hold a buffer each, the first local ones.
    Raises:
      InputError: it does not fit; with the largest capacity that would.
    """
    device = jax.local_devices()[0]
    shared = devices if device.platform == "cpu" else 1  # CPU devices share the host's memory
    size = lambda capacity: nbytes(make(capacity)) * shared
    free, needed = available(device), size(capacity)
    where = "" if shared == devices else f" on each of {devices} devices"
    words = f"{capacity:,} transitions take {_words(needed)}{where}"
    if free is None:
        return f"replay: {words}"
    if needed > _SHARE * free:
        raise InputError(
            f"replay.capacity: {words}, but {_words(free)} are free: "
            f"at most {_largest(size, capacity, _SHARE * free):,} would fit"
        )
    return f"replay: {words}, {_words(free)} are free"


def host_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: what the machine has free, and what its control groups leave it."""
    found = []
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # every group above has a limit, too; in a container the path may be the one outside of it
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = root.joinpath(*parts[:depth])
            limit, used = (_read(group / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                # files in the page cache count as used, but give way
                cache = [row.split()[1] for row in _read(group / "memory.stat").splitlines() if "inactive_file" in row]
                found.append(int(limit) - int(used) + max(map(int, cache), default=0))
    return max(min(found), 0) if found else None


def _largest(size: Callable[[int], int], capacity: int, room: float) -> int:
    """The largest capacity, of two digits, that needs no more than `room`; 0 if none does."""
    while capacity > 0:
        capacity = min(int(capacity * room / size(capacity)), capacity - 1)
        capacity -= capacity % 10 ** max(len(str(capacity)) - 2, 0)
        try:
            if size(capacity) <= room:
                return capacity
        except InputError:  # too small to be a buffer
            return 0
    return 0


def _words(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
