"""Gymnasium environments in worker processes, one each.

Python's multiprocessing starts the processes from a fork server that has imported Gymnasium. Observations, actions
and results are in shared memory; a byte over a pipe means "step" or "done". `jrl.gym.worker` is the other side.
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
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from jrl.envs.context import OnFailure
from jrl.envs.infos import Infos
from jrl.envs.vector import ATTEMPTS, Restarts
from jrl.errors import EnvironmentFailed
from jrl.gym import worker as process
from jrl.gym import wrappers
from jrl.gym.block import StepMemory
from jrl.gym.exceptions import SeveralAgents

# imported by the fork server, once for all processes
_PRELOAD = ["jrl.gym.preload", "jrl.gym.worker", "jrl.gym.game", "jrl.gym.factory", "gymnasium"]
_NEVER_S = 1e6
_MAKE_S = 60.0  # minimum time limit for making an environment
_CONTEXT = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


@dataclasses.dataclass(slots=True)
class _Worker:
    process: BaseProcess | None = None
    pid: int = 0
    link: Connection | None = None  # None: the process has ended
    fd: int = -1  # file descriptor of the link
    has_memory: bool = False  # whether the process has the shared memory
    exit_reason: str = ""  # exit code or signal name of the process
    request: bytes | None = None  # request under way
    deadline: float = float("inf")
    ended: bool = False  # the episode has ended: the next step is a reset
    fresh: bool = True  # the request under way begins an episode
    failures: int = 0  # failures in a row
    cause: str = ""  # cause of the first of these failures
    answer: Any = None  # answer to the last call


class WorkerPool:
    """B environments in one process each, as `jrl.types.StepResult`; actions and observations are unconverted.

    Args:
      make: function from i to environment i; it is pickled.
      id, options: for errors.
      num_envs, seed: environment i is seeded with seed + i at the first reset.
      on_failure: whether an environment is made again that raises, whose process ends, or that exceeds the time limit;
        by the same process if possible.
    Raises:
      InputError: by all methods, an environment cannot be made, or violates its interface.
      SeveralAgents: an environment has several agents.
      EnvironmentFailed: by all methods, an environment failed; with restarts, again and again.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        id: str,
        options: Mapping[str, Any],
        num_envs: int,
        seed: int,
        on_failure: OnFailure,
    ):
        import cloudpickle  # also pickles classes of the main module

        self.restarts = Restarts(id, num_envs, seed, options)
        self.ready: set[int] = set()  # environments with a result
        self.busy: set[int] = set()  # environments under way
        self.failed = np.zeros(num_envs, bool)  # ready environments that failed mid-episode
        self.block: StepMemory
        self.infos = Infos(num_envs)
        self._latest: list[Any] = [None] * num_envs
        self._restart_failed, self._limit = on_failure.restart, on_failure.step_timeout_s
        self._seed: int | None = seed
        self.observation_space: Any = None
        self.action_space: Any = None
        self.max_episode_steps: int | None = None
        self._spaces: Any = None  # without the mask
        self._mask: Any = None  # see `wrappers.wrap_with_mask`
        self._poller = select.poll()
        self._owner: dict[int, int] = {}  # file descriptor -> environment
        self._workers = [_Worker() for _ in range(num_envs)]
        self._setup = process.Setup(cloudpickle.dumps(make), num_envs, on_failure.check_steps, dict(os.environ))
        # runs at interpreter exit at the latest, before multiprocessing joins the processes
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

    def peek_info_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Resets environment 0 early; return the shapes of its infos by name. None: the reset failed.

        The next `begin` uses this result, unless `foreach_env` is called before.
        """
        self._ask(0, process.LOOK, self._seed)
        self.wait()
        self.ready.clear()
        return self._workers[0].answer

    def add_mask(self, name: str, shape: tuple[int, ...]) -> None:
        """Adds the mask of the infos to observations. Call it before the first reset."""
        self._mask = (name, shape)
        self.observation_space = wrappers.add_mask_space(self.observation_space, shape)
        for i in range(len(self._workers)):
            self._ask(i, process.MASK, self._mask)
        self.wait()
        self.ready.clear()

    def reset(self) -> None:
        """Begins new episodes in all environments; wait for them."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Begins new episodes in all environments after the steps under way; `wait` waits for them."""
        self.wait()
        self.ready.clear()
        seed, self._seed = self._seed, None
        if seed is not None:
            spaces = self.observation_space, self.action_space
            self.block = StepMemory(*spaces, len(self._workers), self._allocate)
        for i, worker in enumerate(self._workers):
            worker.fresh = True
            self._ask(i, process.RESET) if seed is None else self._first_reset(i, seed + i)

    def _allocate(self, size: int) -> mmap.mmap:
        self._memory = _anonymous_file()
        self._memory.truncate(size)
        return mmap.mmap(self._memory.fileno(), size)

    def step(self, action: Any) -> np.ndarray:
        """Steps all environments; return which failed mid-episode [B] bool. The result is in `block`."""
        self.ready.clear()
        self.send(action, range(len(self._workers)))
        self.wait()
        return self.failed.copy()

    def send(self, action: Any, index: Iterable[int]) -> None:
        """Steps the environments `index` [n], none of them under way, with `action` [n, *]."""
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
            self.infos.latest = list(self._latest)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` of each environment, called in its process; `fn` must be picklable.

        Raises:
          RuntimeError: `fn` raised; with its traceback.
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
        """Ends all processes; a process that does not end within two seconds is killed."""
        self._finish()

    # ------------------------------------------------------------ one environment

    def _start(self, i: int) -> None:
        link, worker_end = _CONTEXT.Pipe()
        started = _CONTEXT.Process(target=process.main, args=(worker_end, i, self._setup), name=f"environment {i}")
        with worker_end:
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
            with contextlib.suppress(ConnectionError):  # the process has ended; the next answer shows it
                reduction.send_handle(worker.link, self._memory.fileno(), worker.pid)
            worker.has_memory = True

    def _ask(self, i: int, kind: bytes, argument: Any = None) -> None:
        worker = self._workers[i]
        worker.request = kind
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
            os.write(worker.fd, kind)  # one byte: a multiprocessing message costs CartPole a fifth of its speed
            if argument is not None:
                worker.link.send(argument)
        except ConnectionError:
            self._on_process_exit(i)

    def _poll(self, timeout_s: float | None) -> None:
        """Reads the available answers; wait for one, but not beyond a time limit."""
        if self._limit is not None:
            nearest = max(0.0, min(self._workers[i].deadline for i in self.busy) - time.monotonic())
            timeout_s = min(nearest, _NEVER_S if timeout_s is None else timeout_s)
        for fd, _ in self._poller.poll(None if timeout_s is None else timeout_s * 1000):
            self._on_answer(self._owner[fd])
        if self._limit is not None:
            now = time.monotonic()
            for i in [i for i in self.busy if self._workers[i].deadline < now]:
                exit_reason = self._end_process(i)
                if self._workers[i].request == process.LOOK:
                    self._skip_peek(i)
                    continue
                limit = f"env_step_timeout_s {self._limit:g}"
                self._on_lost(i, f"no answer in time ({limit}): its process was ended by {exit_reason}")

    def _on_answer(self, i: int) -> None:
        worker = self._workers[i]
        assert worker.link is not None
        try:
            kind = os.read(worker.fd, 1)
            if kind == process.DONE:
                return self._on_success(i)
            if kind == process.SEVERAL:
                raise SeveralAgents()
            value = worker.link.recv()
        except (ConnectionError, EOFError):
            return self._on_process_exit(i)
        if kind == process.INFO:
            self._latest[i] = value
            return self._on_success(i)
        if worker.request == process.CALL:
            worker.answer = (kind == process.VALUE, value if kind == process.VALUE else value[2][2])
            return self._mark_ready(i)
        if worker.request == process.LOOK:
            worker.answer = value if kind == process.VALUE else None
            return self._mark_ready(i)
        if kind == process.ERROR:
            breach, fault, texts = value
            if breach:
                raise self.restarts.breach(i, breach)
            first = worker.request == process.MAKE and self._seed is not None
            if first and (fault or not self._restart_failed):
                raise self.restarts.make_error(fault, texts)
            where = f" in its worker process {worker.pid}"
            return self._fail(i, texts[2], self.restarts.failure(i, texts, where), texts[0])
        if self._spaces is None:
            self.observation_space, self.action_space, self.max_episode_steps = value
            self._spaces = value[:2]
        if value[:2] != self._spaces:
            return self._on_lost(i, f"its spaces {value[:2]} differ from environment 0's {self._spaces}")
        if self._seed is None:  # not the first reset
            return self._first_reset(i, self.restarts.next_seed(i))
        return self._on_success(i)

    def _on_success(self, i: int) -> None:
        worker = self._workers[i]
        self.failed[i] = worker.failures > 0 and not worker.fresh
        if worker.failures:
            self.restarts.count_restart(i, worker.cause)
            worker.failures = 0
        if self._seed is None:
            worker.ended = bool(self.block.terminated[i] | self.block.truncated[i])
        self._mark_ready(i)

    def _mark_ready(self, i: int) -> None:
        self._workers[i].request = None
        self.busy.discard(i)
        self.ready.add(i)

    # ------------------------------------------------------------ failures

    def _skip_peek(self, i: int) -> None:
        """Replaces a worker that died in `peek_info_shapes`; the real first reset will report the error."""
        self._workers[i].answer = None
        self._start(i)
        self._ask(i, process.MAKE)

    def _on_process_exit(self, i: int) -> None:
        """Handles a worker whose process ended by itself."""
        worker = self._workers[i]
        cause = f"its worker process {worker.pid} ended: {self._end_process(i)}"
        if worker.request == process.CALL:
            worker.answer = (False, cause)
            self._mark_ready(i)
        elif worker.request == process.LOOK:
            self._skip_peek(i)
        elif worker.request:
            self._on_lost(i, cause)
        # otherwise the next step notices

    def _end_process(self, i: int) -> str:
        """Ends a worker's process; return how it ended."""
        worker = self._workers[i]
        if worker.link is None:
            return worker.exit_reason
        assert worker.process is not None
        self._poller.unregister(worker.fd)
        worker.link.close()
        worker.process.kill()
        worker.process.join()
        code = worker.process.exitcode or 0
        worker.link, worker.exit_reason = None, f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return worker.exit_reason

    def _on_lost(self, i: int, cause: str) -> None:
        self._fail(i, cause, EnvironmentFailed(f"{self.restarts.name(i)} failed: {cause}"), cause)

    def _fail(self, i: int, cause: str, error: EnvironmentFailed, line: str) -> None:
        """Makes environment i again, or raise.

        Args:
          cause: cause of the failure, for the log.
          error: error of a run without restarts.
          line: cause in one line.
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
    """Opens a file without a name for shared memory; unlike /dev/shm, no container limits its size."""
    return open(os.memfd_create("jrl"), "w+b", buffering=0) if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _launch(started: BaseProcess) -> None:
    """Starts a process that does not import the run's script, which then needs no `if __name__` guard.

    Raises:
      OSError: the process cannot be started.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    current = multiprocessing.current_process()
    with _starting:
        kept: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
        is_daemon = current.daemon
        try:
            # multiprocessing reads the script's name here, and forbids its daemons to start processes
            main.update(dict.fromkeys(kept))
            current.daemon = False
            _CONTEXT.set_forkserver_preload(_PRELOAD)
            started.start()
        except (EOFError, ConnectionError) as e:
            raise OSError("cannot start a worker process: the fork server has ended") from e
        finally:
            main.update(kept)
            current.daemon = is_daemon


def _finish(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.link is not None:
            worker.link.close()  # ends the worker's loop
    end = time.monotonic() + process.GRACE_S
    for worker in workers:
        if worker.link is not None and worker.process is not None:
            worker.process.join(max(0.0, end - time.monotonic()))
            worker.process.kill()
            worker.process.join()
