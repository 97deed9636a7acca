"""Settings of jax before it starts, and a watch for programs that it compiles again and again.

`apply` comes before anything touches a device. `Recompiles` is started with a run; around each of its iterations stands
`with recompiles.iteration(rows)`, and `recompiles.check()` before the next.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from jrl.errors import InputError
from jrl.fields.bounds import Interval, Share, bounded
from jrl.host import room


@dataclasses.dataclass(frozen=True)
@bounded
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

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also where the program came from the cache on disk
_LOGGER = "jax._src.interpreters.pxla"  # says at DEBUG what it compiles for; without it only the names are known
_WARM_UP = 3  # iterations: the first calls see arrays that lie elsewhere than those that programs return
_SHOWN = 5  # programs, and arguments of each, in a message


class Recompiled(RuntimeError):
    """Iterations compile programs again, more often than `run.max_recompiles`. The message says which and why."""


class Recompiles:
    """Counts the programs that iterations compile again: of a function that was compiled before, for other shapes or
    dtypes, or because it is another function object of the same name.

    Counting begins after the first result row, and after three iterations. What result rows, evaluation and
    checkpoints compile does not count, nor what other threads do.

    Args:
      most: compilations that are allowed; None: nothing is watched.
    """

    def __init__(self, most: int | None):
        self._most = most
        self._watching = False
        self._known: dict[str, list[tuple[str, ...]]] = {}  # name -> types of the arguments, per compilation
        self._found: list[str] = []
        self._iterations, self._rows = 0, 0
        self._thread: int | None = None  # in which compilations count

    def start(self) -> None:
        """Begins to watch; may be called again."""
        if self._most is None or self._watching:
            return
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(self._compiled)
        _types.use()
        self._watching = True

    def close(self) -> None:
        """Ends the watch; may be called again."""
        if not self._watching:
            return
        from jax import monitoring

        self._watching = False
        _types.leave()
        with contextlib.suppress(AssertionError, ValueError):  # somebody has cleared all listeners
            monitoring.unregister_event_duration_listener(self._compiled)

    def __enter__(self) -> "Recompiles":
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def iteration(self, rows: int) -> Iterator[None]:
        """Watches one iteration, in the thread that makes it.

        Args:
          rows: result rows so far.
        """
        if not self._watching:
            yield
            return
        if not self._iterations:
            self._rows = rows  # of a run that goes on
        counts = rows > self._rows and self._iterations >= _WARM_UP
        self._iterations += 1
        self._thread = threading.get_ident() if counts else None
        try:
            yield
        finally:
            self._thread = None

    def check(self) -> None:
        """Raises Recompiled once there were too many."""
        if self._most is None or len(self._found) <= self._most:
            return
        raise Recompiled(
            f"run.max_recompiles {self._most}: since the first result row iterations have compiled "
            f"{len(self._found)} programs again:\n  "
            + "\n  ".join(self._found[-_SHOWN:])
            + "\nkeep shapes and dtypes the same (pad what varies), call jax.jit once and not in each iteration, or "
            "raise run.max_recompiles"
        )

    def _compiled(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != _COMPILED:
            return
        name = str(about.get("fun_name", "a program"))
        types, before = _types.latest.get(name), self._known.setdefault(name, [])
        if before and self._thread == threading.get_ident():
            self._found.append(f"{name}{_where()}: {_changes(types, before)}")
        before.append(types or ())


class _Types:
    """The types of arguments of the latest program of each name, from jax's log, which stays as quiet as it was."""

    def __init__(self) -> None:
        self.latest: dict[str, tuple[str, ...]] = {}
        self._users = 0
        self._level = self._shown = logging.NOTSET
        self._lock = threading.Lock()

    def use(self) -> None:
        logger = logging.getLogger(_LOGGER)
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._level, self._shown = logger.level, logger.getEffectiveLevel()
                logger.addFilter(self._read)
                logger.setLevel(logging.DEBUG)

    def leave(self) -> None:
        logger = logging.getLogger(_LOGGER)
        with self._lock:
            self._users -= 1
            if self._users == 0:
                logger.removeFilter(self._read)
                logger.setLevel(self._level)
                self.latest.clear()

    def _read(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Compiling") and isinstance(record.args, tuple) and len(record.args) > 1:
            name, types = record.args[:2]
            if isinstance(types, list | tuple):
                self.latest[str(name)] = tuple(map(str, types))
        return record.levelno >= self._shown


_types = _Types()


def _changes(types: tuple[str, ...] | None, before: list[tuple[str, ...]]) -> str:
    """Describes what is new about the types of a program's arguments, against the nearest that there were before."""
    if types is None:
        return "compiled again"
    if types in before:
        return (
            "for the same shapes and dtypes: another function of that name (jitted anew?), other static arguments, or "
            "arrays that lie elsewhere"
        )
    same = [old for old in before if len(old) == len(types)]
    if not same:
        return f"{len(types)} arguments ({', '.join(types[:_SHOWN])}), before {len(before[-1])}"
    differs = lambda old: [i for i, (a, b) in enumerate(zip(types, old)) if a != b]
    nearest = min(reversed(same), key=lambda old: len(differs(old)))
    found = [f"argument {i} is {types[i]}, before {nearest[i]}" for i in differs(nearest)]
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _where() -> str:
    """Returns the line outside of jax that is being executed, as text."""
    import jax
    import jaxlib

    own = [os.path.dirname(str(package.__file__)) + os.sep for package in (jax, jaxlib)]
    for frame, line in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_filename != __file__ and not code.co_filename.startswith(tuple(own)):
            return f", at {code.co_filename}:{line} in {code.co_name}"
    return ""
