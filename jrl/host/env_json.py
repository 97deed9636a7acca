"""`env.json` of a run directory: versions, git state, machine and command."""

import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jrl.host import machine
from jrl.host.installed import version

PACKAGES = ("jrl", "jax", "jaxlib", "flax", "optax", "numpy", "envpool", "gymnasium", "orbax-checkpoint")


def write_env_json(directory: str | Path, *, devices: Iterable[str] = ()) -> Path:
    """Write versions, git state, machine and command to `directory`/env.json.

    Args:
      devices: names of the accelerators; an argument, so that this module needs no jax.
    """
    path = Path(directory) / "env.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git": _own_git_state(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": machine.usable_cpus()},
        "memory_gib": _memory_gib(),
        "devices": list(devices),
        "command": shlex.join(sys.orig_argv),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def git_state(file: str | Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the repository that tracks `file`; None: no repository does."""

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
