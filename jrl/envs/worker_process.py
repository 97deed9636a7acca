"""Worker processes, seen from inside: each steps one Gymnasium environment for the process of `jrl.envs.workers`.

Runs as a script, in an interpreter of its own that imports neither jrl nor jax nor the main module of the run. Its
first process, the nursery, imports numpy and Gymnasium once and then only forks workers and ends them: it has one
thread, so that a fork is safe. It ends with the process that started it, and takes all workers with it.
"""

import contextlib
import ctypes
import faulthandler
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

# what a worker is asked; SEED and CALL bring a pickled argument. In capitals: and to tell its info
STEP, RESET, SEED, MAKE, CALL = b"s", b"r", b"i", b"m", b"c"
# what it answers; VALUE, ERROR and INFO, which is DONE with an info, bring a pickled one
DONE, VALUE, ERROR, INFO = b"d", b"v", b"e", b"n"
# what the nursery is asked, with a process id, and its answer: the id, an exit code, or minus an errno
FORK, KILL = b"f", b"k"
REQUEST, ANSWER, LENGTH = struct.Struct("<cq"), struct.Struct("<q"), struct.Struct("<I")
_GRACE_S = 2.0  # for workers to close their environments


class Block:
    """The latest step of B environments, in one piece of memory that processes can share.

    `obs` has an array [B, *] per part of a Dict or Tuple, and one under the key None for any other space; `action`
    [B, *] in the environment's own dtype, `reward` [B] f64, `terminated` and `truncated` [B] bool.
    """

    def __init__(self, observation: Any, action: Any, num_envs: int, buffer: Any = None):
        kind = type(observation).__name__
        parts: dict[Any, Any] = {None: observation}
        if kind in ("Dict", "Tuple"):
            parts = dict(observation.spaces.items() if kind == "Dict" else enumerate(observation.spaces))
        fields = [(space.shape, space.dtype) for space in (*parts.values(), action)]
        fields += [((), np.dtype(dtype)) for dtype in (np.float64, bool, bool)]
        offsets, size = [], 0
        for shape, dtype in fields:
            offsets.append(size)
            size += -(-num_envs * int(np.prod(shape)) * dtype.itemsize // 64) * 64  # each at a cache line of its own
        self.size = max(size, 1)
        buffer = bytearray(self.size) if buffer is None else buffer(self.size)
        make = lambda where, field: np.ndarray((num_envs, *field[0]), field[1], buffer, where)
        *obs, self.action, self.reward, self.terminated, self.truncated = map(make, offsets, fields)
        self.obs = dict(zip(parts, obs))
        self._plain = self.obs.get(None)
        self._shape = fields[0][0]

    def put(self, i: int, obs: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        """A step of environment i. Raises ValueError for an observation of another shape than its space."""
        if self._plain is not None:
            value = np.asarray(obs)
            if value.shape != self._shape:  # numpy would repeat a smaller one
                raise ValueError(f"observation of shape {value.shape}, but the space has {self._shape}")
            self._plain[i] = value
        else:
            for name, array in self.obs.items():
                value = np.asarray(obs[name])
                if value.shape != array.shape[1:]:
                    raise ValueError(
                        f"observation {name!r} of shape {value.shape}, but its space has {array.shape[1:]}"
                    )
                array[i] = value
        self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated

    def observations(self, rows: Any = None) -> Any:
        """A copy: an array [n, *], or a dict of them, of all environments or those of `rows` [n]."""
        taken = {name: array.copy() if rows is None else array[rows] for name, array in self.obs.items()}
        return taken[None] if self._plain is not None else taken


def message(kind: bytes, value: Any) -> bytes:
    """What brings a value to the other side, where `receive` gives it, pickled."""
    payload = pickle.dumps(value)
    return kind + LENGTH.pack(len(payload)) + payload


def receive(source: socket.socket) -> bytes:
    """The pickled value of a message whose kind was just read. Raises ConnectionError: the other side is gone."""
    return _exactly(source, LENGTH.unpack(_exactly(source, LENGTH.size))[0])


def _exactly(source: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        more = source.recv(size - len(got))
        if not more:
            raise ConnectionError("the other side is gone")
        got += more
    return bytes(got)


# ---------------------------------------------------------------- one worker


class _Worker:
    """One environment, and what it is asked to do."""

    def __init__(self, memory: int, index: int, setup: dict[str, Any]):
        self._memory, self._index, self._setup = memory, index, setup
        self._make: Any = None
        self._env: Any = None
        self._block: Any = None

    def answer(self, kind: bytes, argument: bytes) -> Any:
        """Does what it is asked, and returns what goes back."""
        if kind == STEP:
            # a copy: the environment may keep its action, and the next one is written to the same place
            obs, reward, terminated, truncated, info = self._env.step(self._block.action[self._index].copy())
            self._block.put(self._index, obs, reward, terminated, truncated)
            return info
        if kind == RESET:
            obs, info = self._env.reset()
            self._block.put(self._index, obs, 0.0, False, False)
            return info
        if kind == SEED:
            if self._block is None:
                spaces = self._env.observation_space, self._env.action_space
                self._block = Block(*spaces, self._setup["num_envs"], lambda size: mmap.mmap(self._memory, size))
            obs, info = self._env.reset(seed=pickle.loads(argument))
            self._block.put(self._index, obs, 0.0, False, False)
            return info
        if kind == MAKE:
            self.close()
            self._make = self._make or pickle.loads(self._setup["make"])
            self._env = env = self._make(self._index)
            return env.observation_space, env.action_space, getattr(env.spec, "max_episode_steps", None)
        if kind == CALL:
            return pickle.loads(pickle.loads(argument))(self._env)  # the function was pickled by cloudpickle
        return None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may have failed already
            if self._env is not None:
                self._env.close()


def _work(source: socket.socket, worker: _Worker) -> None:
    """Answers until nobody asks. Raises ConnectionError where nobody waits for the answer."""
    while asked := source.recv(1):
        kind = asked.lower()
        argument = receive(source) if kind in (SEED, CALL) else b""
        try:
            value = worker.answer(kind, argument)
            if kind in (MAKE, CALL):
                answer = message(VALUE, value)
            else:
                answer = DONE if asked == kind else message(INFO, _sendable(value))
        except BaseException as e:  # SystemExit, too: an environment has no say in when its process ends
            import gymnasium

            # of the user's making, rather than a fault
            wrong = kind == MAKE and isinstance(e, TypeError | ImportError | gymnasium.error.Error)
            answer = message(ERROR, (wrong, f"{type(e).__name__}: {e}", traceback.format_exc()))
        source.sendall(answer)


def _sendable(info: Any) -> dict[Any, Any]:
    """What of an info can be pickled."""
    try:
        pickle.dumps(info)
        return dict(info)
    except Exception:
        return {name: value for name, value in info.items() if _picklable(value)}


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _run_worker(source: socket.socket, worker: _Worker) -> NoReturn:
    """Never returns: what stands above it on the stack is the nursery's."""
    if sys.platform == "linux":  # should the nursery be killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    code = 0
    try:
        _work(source, worker)
    except ConnectionError:
        pass  # the run has ended
    except BaseException:
        traceback.print_exc()
        code = 1
    worker.close()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------- the nursery


def _main(control: socket.socket) -> None:
    # Ctrl-C and an orderly end reach the whole group: the run wants to finish a step, then it closes the environments.
    # A handler rather than SIG_IGN, which programs that an environment starts would inherit
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: None)
    faulthandler.enable()
    # of a BLAS that was told to have several: those are safe, and Python 3.12 cannot know
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    setup = pickle.loads(receive(control))
    sys.path[:] = setup["path"]
    import gymnasium  # noqa: F401  once for all workers

    workers: set[int] = set()
    for kind, number, received in _requests(control):
        if kind == FORK:
            control.sendall(ANSWER.pack(_fork(control, received, number, setup, workers)))
        else:
            os.kill(
                number, signal.SIGKILL
            )  # it may have ended by itself; nobody else has its id before it is waited for
            workers.discard(number)
            control.sendall(ANSWER.pack(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))
        for fd in received:
            os.close(fd)
    _end(workers)


def _requests(control: socket.socket) -> Iterator[tuple[bytes, int, list[int]]]:
    while True:
        try:
            message, received, _, _ = socket.recv_fds(control, REQUEST.size, 2, socket.MSG_WAITALL)
        except ConnectionError:
            return
        if len(message) < REQUEST.size:
            return
        yield (*REQUEST.unpack(message), received)


def _fork(control: socket.socket, received: list[int], index: int, setup: dict[str, Any], workers: set[int]) -> int:
    """The new worker's process id, or minus an errno."""
    try:
        process = os.fork()
    except OSError as e:
        return -(e.errno or 1)
    if process == 0:
        control.close()
        _run_worker(socket.socket(fileno=received[0]), _Worker(received[1], index, setup))
    workers.add(process)
    return process


def _end(workers: set[int]) -> None:
    """Waits for workers to end, which they do by themselves once nobody listens to them; kills those that hang."""
    deadline = time.monotonic() + _GRACE_S
    while workers and time.monotonic() < deadline:
        workers -= {process for process in workers if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(0.005)
    for process in workers:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
