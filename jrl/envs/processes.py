"""Gymnasium environments in worker processes, one each, seen from the process that steps them.

Python's multiprocessing starts the processes from a fork server that has imported Gymnasium. Observations, actions and
results lie in memory that all share; a byte over a pipe says "step" and "done". `jrl.gym.worker` is the other side.
"""

import contextlib
import dataclasses
import mmap
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from jrl.envs.context import SeveralAgents
from jrl.envs.vector import ATTEMPTS, Infos, Restarts
from jrl.errors import EnvironmentFailed
from jrl.gym import masked
from jrl.gym import worker as process
from jrl.gym.block import Block, sizes
from jrl.gym.faults import FIRST_STEPS
from jrl.host.room import check_observations

_NEVER_S = 1e6
_MAKE_S = 60.0  # at least, to make an environment where steps have a time limit
_CONTEXT = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


@dataclasses.dataclass(slots=True)
class _Worker:
    process: BaseProcess | None = None
    pid: int = 0
    link: Connection | None = None  # None: its process is gone
    fd: int = -1  # of the link
    has_memory: bool = False  # its process
    how: str = ""  # its process ended
    asked: bytes | None = None  # what is under way
    deadline: float = float("inf")
    ended: bool = False  # its episode: the next step is a reset
    fresh: bool = True  # what is under way begins an episode, as it should
    failures: int = 0  # in a row
    cause: str = ""  # of the first of them
    answer: Any = None  # to the last call


class Workers:
    """B environments in a process each. Rows as `jrl.types.StepResult` says; actions and observations unconverted.

    Args:
      make: pickled, what makes environment i when called with i.
      id, options: for errors.
      num_envs, seed: environment i is seeded with seed + i at the first reset.
      restart_failed: an environment that raises, whose process ends, or that exceeds the time limit is made anew, by
        the same process if that can go on.
      step_timeout_s: the time limit of a step and of a reset, in seconds; None: none.
      check_steps: how many of the first steps of each are looked at: see `jrl.gym.block.Block`.
    Raises:
      InputError: an environment cannot be made, or does not keep to its interface; here and in all methods.
      SeveralAgents: an environment has several agents.
      EnvironmentFailed: one failed, here and in all methods; with restart_failed, one that fails again and again.
    """

    def __init__(
        self,
        make: bytes,
        *,
        id: str,
        options: Mapping[str, Any],
        num_envs: int,
        seed: int,
        restart_failed: bool = False,
        step_timeout_s: float | None = None,
        check_steps: int = FIRST_STEPS,
    ):
        self.restarts = Restarts(id, num_envs, seed, options)
        self.ready: set[int] = set()  # environments whose results have come
        self.busy: set[int] = set()  # those under way
        self.failed = np.zeros(num_envs, bool)  # of those that are ready: they failed in the middle of an episode
        self.block: Block
        self.infos = Infos(num_envs)
        self._told: list[Any] = [None] * num_envs
        self._restart_failed, self._limit = restart_failed, step_timeout_s
        self._seed: int | None = seed
        self.observation_space: Any = None
        self.action_space: Any = None
        self.max_episode_steps: int | None = None
        self._spaces: Any = None  # of those that are made
        self._mask: Any = None  # see `masked.put_around`
        self._poller = select.poll()
        self._owner: dict[int, int] = {}  # file descriptor -> environment
        self._workers = [_Worker() for _ in range(num_envs)]
        self._setup = process.Setup(make, num_envs, check_steps, dict(os.environ))
        # runs at the latest when Python ends, before multiprocessing waits for the processes
        self._finish = util.Finalize(self, _finish, (self._workers,), exitpriority=1)
        try:
            for i in range(num_envs):
                self._start(i)
                self._ask(i, process.MAKE)
            self.wait()
        except BaseException:
            self.close()
            raise
        self.ready.clear()

    def look(self) -> dict[str, tuple[int, ...]] | None:
        """Returns the shapes of the first environment's infos at its first reset, by name; None where that fails.

        The reset is the one that `begin` would make, and stands in its place unless `foreach_env` comes in between.
        """
        self._ask(0, process.LOOK, self._seed)
        self.wait()
        self.ready.clear()
        return self._workers[0].answer

    def mask(self, name: str, shape: tuple[int, ...], *, limited: bool) -> None:
        """Puts the mask of the infos into observations; see `masked.put_around`. Call it before the first reset."""
        self._mask = (name, shape, limited)
        shown = masked.Masked(types.SimpleNamespace(observation_space=self.observation_space), name, shape)
        self.observation_space = shown.observation_space
        for i in range(len(self._workers)):
            self._ask(i, process.MASK, self._mask)
        self.wait()
        self.ready.clear()

    def reset(self) -> None:
        """Begins new episodes in all."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Begins new episodes in all, when what is under way has come; `wait` waits for them."""
        self.wait()
        self.ready.clear()
        seed, self._seed = self._seed, None
        if seed is not None:
            spaces = self.observation_space, self.action_space
            self.block = Block(*spaces, len(self._workers), self._allocate)
        for i, worker in enumerate(self._workers):
            worker.fresh = True
            self._ask(i, process.RESET) if seed is None else self._first_reset(i, seed + i)

    def _allocate(self, size: int) -> mmap.mmap:
        self._memory = _anonymous_file()
        self._memory.truncate(size)
        return mmap.mmap(self._memory.fileno(), size)

    def step(self, action: Any) -> np.ndarray:
        """Steps all, waits, and returns which failed in the middle of an episode, [B] bool; the rest is in `block`."""
        self.ready.clear()
        self.send(action, range(len(self._workers)))
        self.wait()
        return self.failed.copy()

    def send(self, action: Any, index: Iterable[int]) -> None:
        """Steps the environments of `index` [n], none of which is under way, with `action` [n, *]."""
        index = list(index)
        self.block.put_actions(index, action)
        for i in index:
            worker = self._workers[i]
            worker.fresh = worker.ended
            self._ask(i, process.RESET if worker.ended else process.STEP)

    def wait(self, least: int | None = None, more_s: float = 0.0) -> None:
        """Waits until `least` environments are ready (default: all), then up to `more_s` seconds for the others."""
        while self.busy and (least is None or len(self.ready) < least):
            self._poll(None)
        until = time.monotonic() + more_s
        while self.busy and (left := until - time.monotonic()) > 0:
            self._poll(left)
        if self.infos.wanted:
            self.infos.latest = list(self._told)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` of each environment, called in their own processes; `fn` must be picklable.

        Raises:
          RuntimeError: it raised, with the traceback.
        """
        import cloudpickle

        pickled = cloudpickle.dumps(fn)
        self.wait()
        before, self.ready = self.ready, set()
        for i in range(len(self._workers)):
            self._ask(i, process.CALL, pickled)
        self.wait()
        self.ready = before
        answers = [worker.answer for worker in self._workers]
        for i, (ok, answer) in enumerate(answers):
            if not ok:
                raise RuntimeError(f"{self.restarts.name(i)} in a call by foreach_env:\n{answer}")
        return [answer for _, answer in answers]

    def close(self) -> None:
        """Ends all processes, and after two seconds kills a process that hangs."""
        self._finish()

    # ------------------------------------------------------------ one environment

    def _start(self, i: int) -> None:
        link, theirs = _CONTEXT.Pipe()
        started = _CONTEXT.Process(target=process.main, args=(theirs, i, self._setup), name=f"environment {i}")
        with theirs:
            _launch(started)
        worker = self._workers[i]
        worker.process, worker.pid, worker.link, worker.fd = started, started.pid or 0, link, link.fileno()
        worker.has_memory = False
        self._poller.register(worker.fd, select.POLLIN)
        self._owner[worker.fd] = i

    def _first_reset(self, i: int, seed: int) -> None:
        """Asks environment i, which was just made, for its first reset."""
        worker, lacks = self._workers[i], not self._workers[i].has_memory
        self._ask(i, process.SEED, (seed, self._mask, lacks))
        if lacks and worker.link is not None:
            with contextlib.suppress(ConnectionError):  # its process has ended, which the next answer shows
                reduction.send_handle(worker.link, self._memory.fileno(), worker.pid)
            worker.has_memory = True

    def _ask(self, i: int, kind: bytes, argument: Any = None) -> None:
        worker = self._workers[i]
        worker.asked = kind
        worker.deadline = float("inf")
        if self._limit is not None and kind != process.CALL:
            limit = max(self._limit, _MAKE_S) if kind == process.MAKE else self._limit
            worker.deadline = time.monotonic() + limit
        self.busy.add(i)
        try:
            if worker.link is None:
                raise ConnectionError
            if self.infos.wanted and kind in (process.STEP, process.RESET, process.SEED):
                kind = kind.upper()
            os.write(worker.fd, kind)  # a message of multiprocessing's costs CartPole a fifth of its speed
            if argument is not None:
                worker.link.send(argument)
        except ConnectionError:
            self._gone(i)

    def _poll(self, timeout_s: float | None) -> None:
        """Takes the answers that are there; waits for one, but not beyond a time limit."""
        if self._limit is not None:
            nearest = max(0.0, min(self._workers[i].deadline for i in self.busy) - time.monotonic())
            timeout_s = min(nearest, _NEVER_S if timeout_s is None else timeout_s)
        for fd, _ in self._poller.poll(None if timeout_s is None else timeout_s * 1000):
            self._answered(self._owner[fd])
        if self._limit is not None:
            now = time.monotonic()
            for i in [i for i in self.busy if self._workers[i].deadline < now]:
                how = self._bury(i)
                if self._workers[i].asked == process.LOOK:
                    self._blind(i)
                    continue
                cause = f"no answer in time (env_step_timeout_s {self._limit:g}): its process was ended by {how}"
                self._ended(i, cause)

    def _answered(self, i: int) -> None:
        worker = self._workers[i]
        assert worker.link is not None
        try:
            kind = os.read(worker.fd, 1)
            if kind == process.DONE:
                return self._done(i)
            if kind == process.SEVERAL:
                raise SeveralAgents()
            value = worker.link.recv()
        except (ConnectionError, EOFError):
            return self._gone(i)
        if kind == process.INFO:
            self._told[i] = value
            return self._done(i)
        if worker.asked == process.CALL:
            worker.answer = (kind == process.VALUE, value if kind == process.VALUE else value[2][2])
            return self._settled(i)
        if worker.asked == process.LOOK:
            worker.answer = value if kind == process.VALUE else None
            return self._settled(i)
        if kind == process.ERROR:
            breach, fault, said = value
            if breach:
                raise self.restarts.breach(i, breach)
            first = worker.asked == process.MAKE and self._seed is not None
            if first and (fault or not self._restart_failed):
                raise self.restarts.not_made(fault, said)
            where = f" in its worker process {worker.pid}"
            return self._fail(i, said[2], self.restarts.failure(i, said, where), said[0])
        if self._spaces is None:
            self.observation_space, self.action_space, self.max_episode_steps = value
            self._spaces = value[:2]
            check_observations(self.restarts.id, sizes(value[0]), len(self._workers))
        if value[:2] != self._spaces:
            return self._ended(i, f"its spaces {value[:2]} are unlike the others' {self._spaces}")
        if self._seed is None:  # it has been reset before
            return self._first_reset(i, self.restarts.next_seed(i))
        return self._done(i)

    def _done(self, i: int) -> None:
        worker = self._workers[i]
        self.failed[i] = worker.failures > 0 and not worker.fresh
        if worker.failures:
            self.restarts.done(i, worker.cause)
            worker.failures = 0
        if self._seed is None:
            worker.ended = bool(self.block.terminated[i] | self.block.truncated[i])
        self._settled(i)

    def _settled(self, i: int) -> None:
        self._workers[i].asked = None
        self.busy.discard(i)
        self.ready.add(i)

    # ------------------------------------------------------------ failures

    def _blind(self, i: int) -> None:
        """Replaces a worker that died while its first environment was only looked at, for the reset that counts."""
        self._workers[i].answer = None
        self._start(i)
        self._ask(i, process.MAKE)

    def _gone(self, i: int) -> None:
        """Handles a worker whose process ended by itself."""
        worker = self._workers[i]
        how = self._bury(i)
        cause = f"its worker process {worker.pid} ended: {how}"
        if worker.asked == process.CALL:
            worker.answer = (False, cause)
            self._settled(i)
        elif worker.asked == process.LOOK:
            self._blind(i)
        elif worker.asked:
            self._ended(i, cause)
        # else it is noticed by the next step

    def _bury(self, i: int) -> str:
        """Ends a worker's process, and returns how it ended."""
        worker = self._workers[i]
        if worker.link is None:
            return worker.how
        assert worker.process is not None
        self._poller.unregister(worker.fd)
        worker.link.close()
        worker.process.kill()
        worker.process.join()
        code = worker.process.exitcode or 0
        worker.link, worker.how = None, f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return worker.how

    def _ended(self, i: int, cause: str) -> None:
        self._fail(i, cause, self.restarts.ended(i, cause), cause)

    def _fail(self, i: int, cause: str, error: EnvironmentFailed, line: str) -> None:
        """Makes environment i anew, or raises.

        Args:
          cause: for the log.
          error: what a run without restarts ends with.
          line: the cause in one.
        """
        worker = self._workers[i]
        if not self._restart_failed:
            raise error
        worker.failures += 1
        if worker.failures == 1:
            worker.cause = cause
        if worker.failures > ATTEMPTS:
            raise self.restarts.exhausted(i, line, error.details)
        if worker.link is None:
            self._start(i)
        self._ask(i, process.MAKE)


def _anonymous_file() -> Any:
    """Opens a file without a name, for memory that processes share: unlike /dev/shm, no container limits it."""
    return open(os.memfd_create("jrl"), "w+b", buffering=0) if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _launch(started: BaseProcess) -> None:
    """Starts a process that does not import the script of the run, which need not have an `if __name__` for that.

    Raises:
      OSError: there can be no more processes.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    current = multiprocessing.current_process()
    with _starting:
        kept: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
        is_daemon = current.daemon
        try:
            # multiprocessing reads the script's name here, and lets no daemon of its own start others
            main.update(dict.fromkeys(kept))
            current.daemon = False
            _CONTEXT.set_forkserver_preload(["jrl.gym.preload", "jrl.gym.worker", "jrl.gym.game", "gymnasium"])
            started.start()
        except (EOFError, ConnectionError) as e:
            raise OSError("cannot start a worker process: the fork server has ended") from e
        finally:
            main.update(kept)
            current.daemon = is_daemon


def _finish(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.link is not None:
            worker.link.close()  # which tells its process to end
    end = time.monotonic() + process.GRACE_S
    for worker in workers:
        if worker.link is not None and worker.process is not None:
            worker.process.join(max(0.0, end - time.monotonic()))
            worker.process.kill()
            worker.process.join()
