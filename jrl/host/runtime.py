"""Settings of jax before it starts, and a counter of programs that jax compiles again.

Call `apply` before anything touches a device. A run starts `Recompiles`, wraps each iteration in
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
from jrl.host import room


@section
class RuntimeConfig:
    """Settings made before jax starts, as environment variables. null: as the environment says."""

    xla_flags: str | None = None  # appended to XLA_FLAGS, e.g. --xla_gpu_deterministic_ops=true
    preallocate: bool | None = None  # take the share of a GPU's memory at once, not as it is needed
    mem_fraction: Share | None = None  # that share
    # in which XLA computes on the CPU, at least one per device; null: one per core
    cpu_threads: Annotated[int, Interval(ge=1, le=4096)] | None = None
    # further variables by name, for this process and environment runners
    env: dict[str, str | int | float] = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------- before jax starts

# jax says that the second name is out of date, and takes one of the two only
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_READ_AT_START = ("XLA_", "PJRT_", "TF_", "CUDA_", "NVIDIA_", "NCCL_", "TPU_", "LIBTPU_", "NPROC")
_for_runners: dict[str, str] = {}


def variables(cfg: RuntimeConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that a config asks for, where `environ` is what there is."""
    found = {name: str(value) for name, value in cfg.env.items()}
    if cfg.xla_flags:
        there = found.get("XLA_FLAGS", environ.get("XLA_FLAGS", "")).split()
        latest = {flag.partition("=")[0]: flag for flag in there}  # of a flag given twice the later counts
        new = [flag for flag in cfg.xla_flags.split() if latest.get(flag.partition("=")[0]) != flag]
        found["XLA_FLAGS"] = " ".join([*there, *new])
    if cfg.preallocate is not None:
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if cfg.preallocate else "false"
    if cfg.mem_fraction is not None:
        found[_FRACTION] = str(cfg.mem_fraction)
    if cfg.cpu_threads is not None:
        found["PJRT_NPROC"] = str(cfg.cpu_threads)
    return found


def apply(cfg: RuntimeConfig) -> list[str]:
    """Sets the environment variables that `runtime` asks for. Call it before anything touches a device.

    jax may be imported. Environment runners that are started later get those of `runtime.env` too.

    Returns:
      What was asked for, as NAME=value.
    Raises:
      InputError: jax has started already, and with other values.
    """
    there = dict(os.environ)
    if _FRACTION not in there and _OLD_FRACTION in there:
        there[_FRACTION] = there[_OLD_FRACTION]
    wanted = variables(cfg, there)
    new = {name: value for name, value in wanted.items() if there.get(name) != value}
    late = [name for name in new if name.startswith(_READ_AT_START)]
    if late and started():
        raise InputError(
            f"runtime: jax has started in this process, and reads {', '.join(late)} only then: build the first run of "
            "a process with these keys, before anything else uses jax, or set the variables before the process starts"
        )
    os.environ.update(wanted)
    if cfg.mem_fraction is not None:
        os.environ.pop(_OLD_FRACTION, None)
    _for_runners.clear()
    _for_runners.update({name: str(value) for name, value in cfg.env.items()})
    return [f"{name}={value}" for name, value in wanted.items()]


def for_runners() -> dict[str, str]:
    """Returns the variables of `runtime.env` that `apply` set last: environment runners have them too."""
    return dict(_for_runners)


def cpu_threads() -> int:
    """Counts the threads in which XLA computes on the CPU, as `runtime.cpu_threads` says or one per core."""
    asked = os.environ.get("PJRT_NPROC", "")
    return int(asked) if asked.isdigit() and int(asked) else room.usable_cpus()


def started() -> bool:
    """Returns whether jax has looked for its devices, after which it ignores changes of its environment variables."""
    if "jax" not in sys.modules:
        return False
    import jax

    # there is no function that tells; but this setting, which has no other effect here, can no longer be changed then
    config: Any = jax.config
    count = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", count)
    return False


# ---------------------------------------------------------------- compiled again and again

_COMPILED = "/jax/core/compile/backend_compile_duration"  # jax also sends it for a program read from the disk cache
_WARM_UP = 3  # iterations: the first calls get arrays with other placements than those that programs return
_SHOWN = 5  # function names in a message


class Recompiled(RuntimeError):
    """More programs were compiled again during iterations than `run.max_recompiles` allows."""


class Recompiles:
    """Counts the programs that iterations compile again: the function name was compiled before in this run.

    Counting starts after the first result row and three iterations. Compilations for result rows, evaluation and
    checkpoints do not count, nor do those of other threads.

    Args:
      most: compilations that `check` allows; None: any number.
    """

    def __init__(self, most: int | None):
        self._most = most
        self._watching = False
        self._known: set[str] = set()  # names of compiled functions
        self._names: list[str] = []  # of functions that were compiled again
        self._iterations, self._rows = 0, 0
        self._thread: int | None = None  # compilations of this thread count

    @property
    def count(self) -> int:
        """Returns the number of programs that were compiled again."""
        return len(self._names)

    def start(self) -> None:
        """Starts counting; may be called again."""
        if self._watching:
            return
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(self._compiled)
        self._watching = True

    def close(self) -> None:
        """Stops counting; may be called again."""
        if not self._watching:
            return
        from jax import monitoring

        self._watching = False
        with contextlib.suppress(AssertionError, ValueError):  # other code may have cleared all listeners
            monitoring.unregister_event_duration_listener(self._compiled)

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
        counts = self._watching and rows > self._rows and self._iterations >= _WARM_UP
        self._iterations += 1
        self._thread = threading.get_ident() if counts else None
        try:
            yield
        finally:
            self._thread = None

    def check(self) -> None:
        """Raises Recompiled if more programs were compiled again than allowed."""
        if self._most is None or self.count <= self._most:
            return
        names = ", ".join(dict.fromkeys(self._names[-_SHOWN:]))
        raise Recompiled(
            f"run.max_recompiles: expected at most {self._most} programs compiled again since the first result row, "
            f"got {self.count} (latest: {names}): keep shapes and dtypes the same (pad what varies), call jax.jit "
            "once and not in each iteration, or raise run.max_recompiles. JAX_LOG_COMPILES=1 prints the shapes"
        )

    def _compiled(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != _COMPILED:
            return
        name = str(about.get("fun_name", "a program"))
        if name in self._known and self._thread == threading.get_ident():
            self._names.append(name)
        self._known.add(name)
