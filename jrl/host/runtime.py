"""Settings of jax before it starts, and a counter of recompiled programs.

Call `apply` before anything uses a device. A run starts `Recompiles`, wraps each iteration in
`with recompiles.iteration(rows)`, and calls `recompiles.check()` before the next one.
"""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from jrl.errors import InputError
from jrl.fields.bounds import Interval, Share
from jrl.fields.validation import section
from jrl.host import machine


@section
class RuntimeConfig:
    """Settings made before jax starts, as environment variables. null: the environment's value."""

    xla_flags: str | None = None  # appended to XLA_FLAGS, e.g. --xla_gpu_deterministic_ops=true
    preallocate: bool | None = None  # take the share of a GPU's memory at once, not as it is needed
    mem_fraction: Share | None = None  # share of the device memory; null: JAX's default
    # in which XLA computes on the CPU, at least one per device; null: one per core
    cpu_threads: Annotated[int, Interval(ge=1, le=4096)] | None = None
    # further variables by name, for this process and environment runners
    env: dict[str, str | int | float] = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------- before jax starts

# the second name is deprecated; jax rejects both together
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_READ_AT_START = ("XLA_", "PJRT_", "TF_", "CUDA_", "NVIDIA_", "NCCL_", "TPU_", "LIBTPU_", "NPROC")
_for_runners: dict[str, str] = {}


def build_environment(cfg: RuntimeConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a config, given the current variables `environ`."""
    found = {name: str(value) for name, value in cfg.env.items()}
    if cfg.xla_flags:
        present = found.get("XLA_FLAGS", environ.get("XLA_FLAGS", "")).split()
        latest = {flag.partition("=")[0]: flag for flag in present}  # the last of a repeated flag counts
        new = [flag for flag in cfg.xla_flags.split() if latest.get(flag.partition("=")[0]) != flag]
        found["XLA_FLAGS"] = " ".join([*present, *new])
    if cfg.preallocate is not None:
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if cfg.preallocate else "false"
    if cfg.mem_fraction is not None:
        found[_FRACTION] = str(cfg.mem_fraction)
    if cfg.cpu_threads is not None:
        found["PJRT_NPROC"] = str(cfg.cpu_threads)
    return found


def apply(cfg: RuntimeConfig) -> list[str]:
    """Sets the environment variables of `runtime`. Call it before anything uses a device; jax may be imported.

    Env runners that start later get the variables of `runtime.env`, too.

    Returns:
      The variables, as NAME=value.
    Raises:
      InputError: jax has started already, with other values.
    """
    current = dict(os.environ)
    if _FRACTION not in current and _OLD_FRACTION in current:
        current[_FRACTION] = current[_OLD_FRACTION]
    wanted = build_environment(cfg, current)
    new = {name: value for name, value in wanted.items() if current.get(name) != value}
    late = [name for name in new if name.startswith(_READ_AT_START)]
    if late and has_started():
        raise InputError(
            f"runtime: jax has started in this process, and reads {', '.join(late)} only at its start: build the first "
            "run of a process with these keys, before other code uses jax, or set the variables before the process "
            "starts"
        )
    os.environ.update(wanted)
    if cfg.mem_fraction is not None:
        os.environ.pop(_OLD_FRACTION, None)
    _for_runners.clear()
    _for_runners.update({name: str(value) for name, value in cfg.env.items()})
    return [f"{name}={value}" for name, value in wanted.items()]


def runner_environment() -> dict[str, str]:
    """Returns the variables of `runtime.env` that `apply` set last, for env runners."""
    return dict(_for_runners)


def cpu_threads() -> int:
    """Returns the number of XLA's CPU threads: `runtime.cpu_threads`, or one per core."""
    value = os.environ.get("PJRT_NPROC", "")
    return int(value) if value.isdigit() and int(value) else machine.usable_cpus()


def has_started() -> bool:
    """Returns whether jax has initialised its devices; from then on it ignores changes of its environment variables."""
    if "jax" not in sys.modules:
        return False
    import jax

    # jax has no public function for this; but this setting cannot be changed afterwards, and is harmless before
    config: Any = jax.config
    count = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", count)
    return False


# ---------------------------------------------------------------- recompilations

_COMPILED = "/jax/core/compile/backend_compile_duration"  # jax also sends it for a program read from the disk cache
_WARM_UP = 3  # iterations: the first calls get arrays with other placements than programs return
_MOST_NAMES = 5  # function names in a message


class Recompiled(RuntimeError):
    """More programs were recompiled during iterations than `run.max_recompiles` allows."""


class Recompiles:
    """Counts the programs that iterations recompile: a function of that name was compiled before in this run.

    Counting starts after the first result row and three iterations. Compilations for result rows, evaluation and
    checkpoints do not count, nor do other threads' compilations.

    Args:
      most: compilations allowed by `check`; None: no limit.
    """

    def __init__(self, most: int | None):
        self._most = most
        self._is_active = False
        self._known: set[str] = set()  # names of compiled functions
        self._names: list[str] = []  # names of recompiled functions
        self._iterations, self._rows = 0, 0
        self._thread: int | None = None  # compilations of this thread count

    @property
    def count(self) -> int:
        """Number of recompiled programs."""
        return len(self._names)

    def start(self) -> None:
        """Starts counting; may be called again."""
        if self._is_active:
            return
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(self._on_compile)
        self._is_active = True

    def close(self) -> None:
        """Stops counting; may be called again."""
        if not self._is_active:
            return
        from jax import monitoring

        self._is_active = False
        with contextlib.suppress(AssertionError, ValueError):  # other code may have removed all listeners
            monitoring.unregister_event_duration_listener(self._on_compile)

    def __enter__(self) -> "Recompiles":
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def iteration(self, rows: int) -> Iterator[None]:
        """Counts the compilations of one iteration, in the thread that runs it.

        Args:
          rows: number of result rows so far.
        """
        if not self._iterations:
            self._rows = rows  # a resumed run has rows already
        counts = self._is_active and rows > self._rows and self._iterations >= _WARM_UP
        self._iterations += 1
        self._thread = threading.get_ident() if counts else None
        try:
            yield
        finally:
            self._thread = None

    def check(self) -> None:
        """Raises Recompiled if more programs were recompiled than allowed."""
        if self._most is None or self.count <= self._most:
            return
        names = ", ".join(dict.fromkeys(self._names[-_MOST_NAMES:]))
        raise Recompiled(
            f"run.max_recompiles: expected at most {self._most} programs compiled again since the first result row, "
            f"got {self.count} (latest: {names}): keep shapes and dtypes the same (pad varying arrays), call jax.jit "
            "once and not in each iteration, or raise run.max_recompiles. JAX_LOG_COMPILES=1 prints the shapes"
        )

    def _on_compile(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != _COMPILED:
            return
        name = str(about.get("fun_name", "a program"))
        if name in self._known and self._thread == threading.get_ident():
            self._names.append(name)
        self._known.add(name)
