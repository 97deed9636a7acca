"""Timers of the stages of an iteration."""

import threading
import time

__all__ = ["RECOMPILES", "Timers"]

RECOMPILES = "time/recompiles"  # metric: number of recompiled programs, not seconds


class Timers:
    """Seconds per stage, summed over all threads. A stage costs under a microsecond.

        with timers("env"):
            obs = env.step(action)
        timers.drain()  # {"time/env": 0.0021}

    Stages of the loop: env act transfer update log. Stages that overlap in several threads may sum to more than the
    wall time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self.latest: tuple[str, float] | None = None  # latest stage, and its start by time.monotonic

    def __call__(self, name: str) -> "_Stage":
        """Returns a context manager that adds the time of its body, even if the body raises."""
        return _Stage(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Returns `time/<stage>` -> seconds since the last drain. A known stage stays, with 0."""
        with self._lock:
            drained, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {f"time/{name}": seconds for name, seconds in drained.items()}


class _Stage:
    __slots__ = ("_name", "_start", "_timers")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers, self._name = timers, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._timers.latest = (self._name, time.monotonic())

    def __exit__(self, *_: object) -> None:
        self._timers.add(self._name, time.perf_counter() - self._start)
