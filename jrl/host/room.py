"""The memory and the processors of this machine: what is free, and whether observations of environments would fit it.

The standard library only: worker processes and commands ask before anything is allocated.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from jrl.errors import InputError

SHARE = 0.9  # of the free memory: the rest is for memory that is not counted


def host_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns how many bytes this process may still take: what the machine has free, and its control groups leave."""
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


def check_observations(id: str, shapes: Iterable[tuple[str, tuple[int, ...], int]], num_envs: int) -> None:
    """Refuses environments whose observations would fill the memory: two for each, its own and the copy that is kept.

    Args:
      id: of the environment, for the error.
      shapes: of the arrays of one observation: name, shape, bytes of a number.
      num_envs: side by side.
    Raises:
      InputError: they would not fit.
    """
    arrays = {f"{name} of shape {shape}": math.prod(shape) * width for name, shape, width in shapes}
    one, free = sum(arrays.values()), host_available()
    if free is None or 2 * num_envs * one <= SHARE * free:
        return
    largest, fit = max(arrays, key=lambda name: arrays[name]), int(SHARE * free / (2 * one))
    mend = f"make it smaller, or take fewer environments: {fit:,} would fit" if fit else "make it smaller"
    raise InputError(
        f"env.id {id}: {largest} takes {words(arrays[largest])}; two observations for each environment ({num_envs:,} "
        f"side by side) take {words(2 * num_envs * one)}, but {words(free)} are free: {mend}"
    )


def usable_cpus() -> int:
    """Counts the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def words(count: int) -> str:
    """Returns a number of bytes in words.

    >>> words(1_500_000), words(2_500_000_000)
    ('1.5 MB', '2.50 GB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
