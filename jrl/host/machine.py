"""Memory, processors and packages of this machine, a check that observations fit the memory, and `env.json`.

Standard library only: worker processes and commands call it before anything is allocated.
"""

import functools
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jrl.errors import InputError

SHARE = 0.9  # usable share of the free memory; the rest is for allocations that are not counted


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the bytes that this process may still allocate; None: unknown.

    The machine's free memory and the control groups limit it.
    """
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
        # parent groups have limits, too; in a container the path may be the host's
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = root.joinpath(*parts[:depth])
            limit, used = (_read(group / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                # the page cache counts as used, but is freed on demand
                cache = [row.split()[1] for row in _read(group / "memory.stat").splitlines() if "inactive_file" in row]
                found.append(int(limit) - int(used) + max(map(int, cache), default=0))
    return max(min(found), 0) if found else None


def check_observations(id: str, shapes: Iterable[tuple[str, tuple[int, ...], int]], num_envs: int) -> None:
    """Raises if observations would fill the memory; each environment needs two, its own and a copy.

    Args:
      id: environment id, for the error.
      shapes: name, shape and item size of each array of one observation.
      num_envs: number of environments.
    Raises:
      InputError: they do not fit.
    """
    arrays = {f"{name} of shape {shape}": math.prod(shape) * width for name, shape, width in shapes}
    one, free = sum(arrays.values()), free_bytes()
    if free is None or 2 * num_envs * one <= SHARE * free:
        return
    largest, fit = max(arrays, key=lambda name: arrays[name]), int(SHARE * free / (2 * one))
    fix = f"make it smaller, or use at most {fit:,} environments" if fit else "make it smaller"
    raise InputError(
        f"env.id {id}: {largest} takes {format_bytes(arrays[largest])}; two observations for each of {num_envs:,} "
        f"environments take {format_bytes(2 * num_envs * one)}, but {format_bytes(free)} are free: {fix}"
    )


def usable_cpus() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def format_bytes(count: int) -> str:
    """Returns a number of bytes with its unit.

    >>> format_bytes(1_500_000), format_bytes(2_500_000_000)
    ('1.5 MB', '2.50 GB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------- installed packages


@functools.cache
def version(package: str) -> str | None:
    """Returns the version of a package; None: not installed, or a checkout on the path."""
    from importlib import metadata  # `--help` does not need it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require(package: str, extra: str, user: str) -> None:
    """Checks that an optional package is installed.

    Args:
      package: top-level module.
      extra: extra of jrl that installs it.
      user: key, option or command that needs it.
    Raises:
      InputError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{user}: {package} is not installed: pip install 'jrl[{extra}]'")


# ---------------------------------------------------------------- env.json of a run directory

PACKAGES = ("jrl", "jax", "jaxlib", "flax", "optax", "numpy", "envpool", "gymnasium", "orbax-checkpoint")


def write_env_json(directory: str | Path, *, devices: Iterable[str] = ()) -> Path:
    """Writes versions, git state, machine and command to `directory`/env.json.

    Args:
      devices: names of the accelerators; an argument, so that this module needs no jax.
    """
    path = Path(directory) / "env.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git": _own_git_state(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": usable_cpus()},
        "memory_gib": _memory_gib(),
        "devices": list(devices),
        "command": shlex.join(sys.orig_argv),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def git_state(file: str | Path) -> dict[str, Any] | None:
    """Returns {"commit", "dirty"} of the repository that tracks `file`; None: no repository does."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(file).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # an installed jrl may be in a virtual environment inside another repository
        git("ls-files", "--error-unmatch", Path(file).name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache  # shared by the members of a population
def _own_git_state() -> dict[str, Any] | None:
    return git_state(Path(__file__))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None
