"""What a run leaves beside its numbers: `env.json` (what it ran on) and learning curves."""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.metrics.loggers import read_rows

PACKAGES = ("jrl", "jax", "jaxlib", "flax", "optax", "numpy", "envpool", "gymnasium", "orbax-checkpoint")


# ---------------------------------------------------------------- env.json


def write_env_json(directory: str | Path, *, devices: Iterable[str] = ()) -> Path:
    """Writes versions, git state and machine to `directory`/env.json.

    Args:
      devices: the accelerators in words; passed in, so that this file needs no jax.
    """
    path = Path(directory) / "env.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "git": git_state(Path(__file__)),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": _usable_cpus()},
        "memory_gib": _memory_gib(),
        "devices": list(devices),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def git_state(file: str | Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository that tracks `file`; None if none does."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(file).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed jrl may lie in a virtual environment inside somebody else's repository.
        git("ls-files", "--error-unmatch", Path(file).name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


# ---------------------------------------------------------------- learning curves


def read_curve(path: str | Path, *, x: str = "env_steps", y: str = "episode/return") -> tuple[np.ndarray, np.ndarray]:
    """Columns `x` and `y` of a result.jsonl, f64 [N] each, without the rows where one of them is missing or null."""
    pairs = [(row.get(x), row.get(y)) for row in read_rows(path)]
    kept = np.asarray([(a, b) for a, b in pairs if a is not None and b is not None], np.float64).reshape(-1, 2)
    return kept[:, 0], kept[:, 1]


def windowed_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place; fewer at the start. [N] -> [N]."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    return (total[end] - total[start]) / (end - start)


def band(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], points: int = 200
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Curves over one grid: (grid, median, min, max), f64 [points] each.

    The grid covers the steps that all curves have; between its rows a curve is linear.
    """
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(low, max(low, high), points)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, np.median(values, 0), values.min(0), values.max(0)


def plot_learning_curve(
    result: str | Path,
    png: str | Path,
    *,
    x: str = "env_steps",
    y: str = "episode/return",
    window: int = 10,
    title: str = "",
) -> Path:
    """One run: its rows, faint, and their mean over `window` rows. A run without episodes gives an empty plot."""
    figure, axes = _axes(x, y, title)
    steps, values = read_curve(result, x=x, y=y)
    if len(steps):
        axes.plot(steps, values, ".", color="C0", alpha=0.25)
        axes.plot(steps, windowed_mean(values, window), color="C0", label=f"mean of {window} rows")
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, f"no {y} in {Path(result).name}", ha="center", transform=axes.transAxes)
    return _save(figure, png)


def plot_runs(
    runs: Mapping[str, Sequence[str | Path]],
    png: str | Path,
    *,
    x: str = "env_steps",
    y: str = "episode/return",
    window: int = 10,
    title: str = "",
) -> Path:
    """Groups of runs: label -> the result.jsonl of each seed; median over the seeds and the band from min to max."""
    figure, axes = _axes(x, y, title)
    for number, (label, paths) in enumerate(runs.items()):
        curves = [c for c in (read_curve(path, x=x, y=y) for path in paths) if len(c[0])]
        if not curves:
            axes.plot([], [], color=f"C{number}", label=f"{label} (no rows)")
            continue
        grid, median, low, high = band([(steps, windowed_mean(values, window)) for steps, values in curves])
        axes.fill_between(grid, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        axes.plot(grid, median, color=f"C{number}", label=f"{label} ({len(curves)} runs)")
    if runs:
        axes.legend(frameon=False)
    return _save(figure, png)


def plot_panels(
    runs: Mapping[str, Sequence[str | Path]],
    png: str | Path,
    *,
    x: str = "env_steps",
    y: str = "episode/return",
    columns: int = 3,
) -> Path:
    """Groups of runs whose values do not compare: a panel per label, a line per seed."""
    figure = _figure((3.2 * columns, 2.2 * math.ceil(len(runs) / columns)))
    for number, (label, paths) in enumerate(runs.items()):
        axes = figure.add_subplot(math.ceil(len(runs) / columns), columns, number + 1)
        for path in paths:
            axes.plot(*read_curve(path, x=x, y=y), color="C0", linewidth=1)
        axes.set_title(label, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    figure.supxlabel(x, fontsize=9)
    figure.supylabel(y, fontsize=9)
    return _save(figure, png)


def _figure(size: tuple[float, float]):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps every figure alive and is not safe in threads.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _axes(x: str, y: str, title: str):
    figure = _figure((7, 4.5))
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure, png: str | Path) -> Path:
    png = Path(png)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, format="png", dpi=120)
    return png
