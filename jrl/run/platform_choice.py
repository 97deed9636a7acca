"""`devices.platform: auto`: chooses the faster of the accelerators and the CPU for a run, before it begins.

A child process measures each platform: it makes a few iterations of the run, with its updates. So the memory of an
accelerator is free again, and the run finds its programs in the compile cache.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jrl import config
from jrl.config import RunConfig, Sizes
from jrl.host import runtime

_MOST_SECONDS = 120.0  # a child's time to start, compile and measure


class Measurement(NamedTuple):
    platform: str  # jax's name of the platform: cpu, gpu, tpu
    rate: float  # steps per second, or updates of data alone; 0: not measured, because there is no other platform


def recorded(cfg: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """Returns the config with the platform that its run chose before, instead of auto.

    Args:
      cfg: config of the continued run.
      saved: plain config of its checkpoint.
    """
    if cfg.devices.platform != "auto":
        return cfg
    return _on(saved.get("devices", {}).get("platform"), cfg)


def choose(cfg: RunConfig, measure: Callable[[RunConfig], Measurement] | None = None) -> tuple[RunConfig, str]:
    """Returns the config with the faster platform instead of auto, and a line that says what was measured.

    The platform is "cpu", or None for the accelerators. Without two measurements it is None, and the run reports its
    own errors.

    Args:
      cfg: config with `devices.platform: auto`.
      measure: function of the config with one platform that raises RuntimeError if it fails; None: a child process,
        unless this process or this machine has a single platform.
    """
    if measure is None:
        if runtime.has_started():
            used = jax.default_backend()
            return _on("cpu" if used == "cpu" else None, cfg), _line(used, "jax uses it in this process already")
        if not _may_have_two():
            return _on(None, cfg), _line(_named() or "cpu", "the only platform here")
        measure = measure_in_child
    found: list[Measurement] = []
    for platform in (None, "cpu"):
        try:
            found.append(measure(_on(platform, cfg)))
        except RuntimeError as e:
            return _on(None, cfg), _line("jax's default", f"{platform or 'it'} was not measured: {e}")
        if found[0].platform == "cpu":
            return _on(None, cfg), _line("cpu", "the only platform here")
    best = max(found, key=lambda one: one.rate)
    unit = "updates/s" if Sizes(cfg).counts_by == "updates" else "steps/s"
    rates = ", ".join(f"{one.platform} {one.rate:,.0f} {unit}" for one in found)
    return _on("cpu" if best.platform == "cpu" else None, cfg), _line(best.platform, rates)


def _on(platform: Any, cfg: RunConfig) -> RunConfig:
    return dataclasses.replace(cfg, devices=dataclasses.replace(cfg.devices, platform=platform))


def _line(platform: str, why: str) -> str:
    return f"devices.platform auto: {platform} ({why})"


def _named() -> str | None:
    """Returns the platforms of JAX_PLATFORMS, or None."""
    settings: Any = jax.config
    return settings.jax_platforms or None


def _may_have_two() -> bool:
    """Returns whether jax may find an accelerator beside the CPU; does not start jax."""
    if named := _named():
        return "," in named
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


def measure_in_child(cfg: RunConfig, most_seconds: float = _MOST_SECONDS) -> Measurement:
    """Measures a run with one platform in a child process. Raises RuntimeError: it failed, or took too long."""
    command = [sys.executable, "-m", "jrl.run.platform_probe"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    given = json.dumps(config.to_dict(cfg))
    try:
        child = subprocess.run(command, input=given, env=env, capture_output=True, text=True, timeout=most_seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it takes more than {most_seconds:.0f} s") from None
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines() or [f"exit {child.returncode}"]
    if child.returncode:
        raise RuntimeError(lines[-1][:200])
    return Measurement(**json.loads(lines[-1]))
