"""Worker processes, seen from inside: each steps one Gymnasium environment for the process of `jrl.envs.workers`.

Runs as a script, in an interpreter of its own that imports neither jrl nor jax nor the main module of the run. Its
first process, the nursery, imports numpy and Gymnasium once and then only forks workers and ends them: it has one
thread, so that a fork is safe. It ends with the process that started it, and takes all workers with it.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import io
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
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np


def _beside(name: str) -> Any:
    """Loads the module of a file beside this one, which imports neither jrl nor jax."""
    spec: Any = importlib.util.spec_from_file_location(
        f"jrl.envs.{name}", os.path.join(os.path.dirname(__file__), f"{name}.py")
    )
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING or __name__ != "__main__":
    from jrl.envs import masked, step_faults
else:
    step_faults, masked = _beside("step_faults"), _beside("masked")

kind, _NUMBERS, _FLAGS = step_faults.kind, step_faults.NUMBERS, step_faults.FLAGS
# what a worker is asked; all from SEED on bring a pickled argument. In capitals: and to tell its info
STEP, RESET, MAKE, SEED, LOOK, MASK, CALL = b"s", b"r", b"m", b"i", b"l", b"k", b"c"
# what it answers; VALUE, ERROR and INFO, which is DONE with an info, bring a pickled one; SEVERAL: it has many agents
DONE, VALUE, ERROR, INFO, SEVERAL = b"d", b"v", b"e", b"n", b"a"
# what the nursery is asked, with a process id, and its answer: the id, an exit code, or minus an errno
FORK, KILL = b"f", b"k"
REQUEST, ANSWER, LENGTH = struct.Struct("<cq"), struct.Struct("<q"), struct.Struct("<I")
_GRACE_S = 2.0  # for workers to close their environments


# ---------------------------------------------------------------- spaces of Gymnasium's and their elements


def leaves(space: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the spaces of arrays in `space`, each with the names and places that lead to it."""
    name = kind(space)
    if name not in ("Dict", "Tuple"):
        return [(path, space)]
    parts = space.spaces.items() if name == "Dict" else enumerate(space.spaces)
    return [leaf for key, part in parts for leaf in leaves(part, (*path, key))]


def sizes(space: Any) -> list[tuple[str, tuple[int, ...], int]]:
    """Returns name, shape and item size of an observation's arrays, for `jrl.host.room.check_observations`."""
    name = lambda path: "observation" + "".join(f"[{key!r}]" for key in path)
    arrays = [leaf for leaf in leaves(space) if leaf[1].shape is not None and leaf[1].dtype is not None]
    return [(name(path), tuple(part.shape), np.dtype(part.dtype).itemsize) for path, part in arrays]


def element(space: Any, parts: Iterator[Any]) -> Any:
    """Returns `parts`, one for each of `leaves(space)`, as an element of `space`."""
    name = kind(space)
    if name == "Dict":
        return {key: element(part, parts) for key, part in space.spaces.items()}
    return tuple(element(part, parts) for part in space.spaces) if name == "Tuple" else next(parts)


def row(batch: Any, i: Any) -> Any:
    """Returns element i of a batch, dicts and tuples included."""
    if isinstance(batch, dict):
        return {key: row(part, i) for key, part in batch.items()}
    return tuple(row(part, i) for part in batch) if isinstance(batch, tuple) else batch[i]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


class Block:
    """The latest step of B environments, in one piece of memory that processes can share.

    Observations and actions are arrays [B, *] in the environment's own dtype, one for each leaf of its space, `reward`
    [B] f64, `terminated` and `truncated` [B] bool.

    Args:
      observation, action: spaces of Gymnasium's.
      num_envs: B.
      buffer: gives so many bytes of memory; None: memory of its own.
      check_steps: how many of the first steps of each environment are looked at closely before they are taken; 0: none
        is looked at. Later ones are refused where a conversion would hide what is no number, flag or info.
    """

    def __init__(self, observation: Any, action: Any, num_envs: int, buffer: Any = None, *, check_steps: int = 0):
        seen, taken = leaves(observation), leaves(action)
        fields = [(space.shape, space.dtype) for _, space in (*seen, *taken)]
        fields += [((), np.dtype(dtype)) for dtype in (np.float64, bool, bool)]
        offsets, size = [], 0
        for shape, dtype in fields:
            offsets.append(size)
            size += -(-num_envs * int(np.prod(shape)) * dtype.itemsize // 64) * 64  # each at a cache line of its own
        self.size = max(size, 1)
        buffer = bytearray(self.size) if buffer is None else buffer(self.size)
        make = lambda where, field: np.ndarray((num_envs, *field[0]), field[1], buffer, where)
        *arrays, self.reward, self.terminated, self.truncated = map(make, offsets, fields)
        self._observation, self._shape, self._dtype = observation, *fields[0]
        self._seen = list(zip([path for path, _ in seen], arrays))
        self._taken = list(zip([path for path, _ in taken], arrays[len(seen) :]))
        self._plain = arrays[0] if len(seen) == 1 and not seen[0][0] else None
        self._actions = element(action, iter(arrays[len(seen) :]))
        self._unseen = [check_steps] * num_envs  # steps of each that are still to be looked at
        self._check_steps, self._checks = check_steps, check_steps > 0

    def take(self, i: int, result: Any, *, reset: bool = False) -> Any:
        """Keeps what a step or a reset of environment i returned, and returns its info.

        Raises:
          Breach: it is not what Gymnasium's interface says, in one of the first steps.
          ValueError: it cannot be kept; in the same words.
        """
        if self._unseen[i] > 0:
            self._look(i, result, reset)
        try:
            if reset:
                (obs, info), reward, terminated, truncated = result, 0.0, False, False
            else:
                obs, reward, terminated, truncated, info = result
                # numpy would make a number of None and of a text, and a flag of anything
                if not (
                    type(reward) in _NUMBERS
                    and type(terminated) in _FLAGS
                    and type(truncated) in _FLAGS
                    and type(info) is dict
                ):
                    self._look_at_rest(reward, terminated, truncated, info)
            if self._plain is not None:
                value = np.asarray(obs)
                if value.shape != self._shape:  # numpy would repeat a smaller one
                    raise ValueError(f"observation of shape {value.shape}, but the space has {self._shape}")
                if value.dtype is not self._dtype:
                    self._look_at_dtype(value, self._dtype)
                self._plain[i] = value
            else:
                for path, array in self._seen:
                    value = np.asarray(_at(obs, path))
                    if value.shape != array.shape[1:]:
                        raise ValueError(f"observation of shape {value.shape}, but its space has {array.shape[1:]}")
                    if value.dtype is not array.dtype:
                        self._look_at_dtype(value, array.dtype)
                    array[i] = value
            self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated
        except Exception:  # what the space does not allow may fail in any way
            lines = step_faults.refused(self._observation, result, reset=reset)
            if not lines:
                raise
            raise ValueError("; ".join(lines)) from None
        return info

    def _look(self, i: int, result: Any, reset: bool) -> None:
        self._unseen[i] -= not reset
        where = step_faults.place_in_time(self._check_steps - self._unseen[i], reset=reset)
        if lines := step_faults.refused(self._observation, result, reset=reset, where=where):
            raise step_faults.Breach(*lines)

    def _look_at_rest(self, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        if self._checks and not step_faults.plain(reward, terminated, truncated, info):
            raise ValueError("no step")

    def _look_at_dtype(self, value: np.ndarray, dtype: np.dtype) -> None:
        if self._checks and value.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            raise ValueError(f"observation of {value.dtype}, but the space has {dtype}")

    def observations(self, rows: Any = None) -> Any:
        """Returns a copy of the observations [n, *], of all environments or of `rows` [n]."""
        if self._plain is not None:
            return self._plain.copy() if rows is None else self._plain[rows]
        taken = (array.copy() if rows is None else array[rows] for _, array in self._seen)
        return element(self._observation, taken)

    def put_actions(self, index: list[int], action: Any) -> None:
        """Writes actions [n, *] of the environments `index` [n]."""
        for path, array in self._taken:
            array[index] = _at(action, path)

    def action(self, i: int) -> Any:
        """Returns a copy of an action: the environment may keep it, and the next one is written to the same place."""
        return _copied(row(self._actions, i))


def _copied(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: _copied(part) for key, part in action.items()}
    return tuple(map(_copied, action)) if isinstance(action, tuple) else action.copy()


# ---------------------------------------------------------------- messages


def message(kind: bytes, value: Any) -> bytes:
    """Returns the bytes that bring a value, pickled, to the other side, where `receive` reads it."""
    payload = pickle.dumps(value)
    return kind + LENGTH.pack(len(payload)) + payload


def receive(source: socket.socket) -> bytes:
    """Reads the pickled value of a message whose kind was just read. Raises ConnectionError: the other side is gone."""
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
    """One environment and the requests to it."""

    def __init__(self, memory: int, index: int, setup: dict[str, Any]):
        self._memory, self._index, self._setup = memory, index, setup
        self._make: Any = None
        self._env: Any = None
        self._block: Any = None
        self._around: Any = None  # its `Masked`, if it has one
        self._begun: Any = None  # the seed and the result of a reset that was not used yet

    def answer(self, kind: bytes, argument: bytes) -> Any:
        """Does what is asked, and returns the answer."""
        if kind == STEP:
            return self._block.take(self._index, self._env.step(self._block.action(self._index)))
        if kind == RESET:
            return self._block.take(self._index, self._env.reset(), reset=True)
        if kind == SEED:
            return self._seeded(*pickle.loads(argument))
        if kind == LOOK:
            seed = pickle.loads(argument)
            self._begun = (seed, step_faults.seeded(self._env, seed))
            return masked.shapes(self._begun[1][1])
        if kind == MASK:
            self._env, self._around = masked.put_around(self._env, pickle.loads(argument))
        if kind == MAKE:
            self.close()
            self._make = self._make or pickle.loads(self._setup["make"])
            self._env = env = self._make(self._index)
            self._around = self._begun = None
            # a class that does not inherit from gymnasium.Env may lack `spec`
            limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
            return env.observation_space, env.action_space, limit
        if kind == CALL:
            self._begun = None  # what it does to the environment may show in the reset
            return pickle.loads(pickle.loads(argument))(self._env)  # the function was pickled by cloudpickle
        return None

    def _seeded(self, seed: int, mask: Any) -> Any:
        """Resets an environment that was just made, with its seed, and returns its info."""
        begun, self._begun = self._begun, None
        if mask is not None and self._around is None:
            self._env, self._around = masked.put_around(self._env, mask)
        if self._block is None:
            spaces, setup = (self._env.observation_space, self._env.action_space), self._setup
            buffer = lambda size: mmap.mmap(self._memory, size)
            self._block = Block(*spaces, setup["num_envs"], buffer, check_steps=setup["check_steps"])
        if begun is not None and begun[0] == seed:
            result = begun[1]
            if self._around is not None:
                result = self._around.joined(*result), result[1]
        else:
            result = step_faults.seeded(self._env, seed)
        return self._block.take(self._index, result, reset=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may have failed already
            if self._env is not None:
                self._env.close()


def _work(source: socket.socket, worker: _Worker) -> None:
    """Answers requests until there are no more. Raises ConnectionError where the asking side is gone."""
    while asked := source.recv(1):
        kind = asked.lower()
        argument = receive(source) if kind in (SEED, LOOK, MASK, CALL) else b""
        try:
            value = worker.answer(kind, argument)
            if kind in (MAKE, LOOK, CALL):
                answer = message(VALUE, value)
            else:
                answer = DONE if asked == kind else message(INFO, _sendable(value))
        except BaseException as e:  # SystemExit, too: an environment has no say in when its process ends
            breach = e.args if isinstance(e, step_faults.Breach) else ()
            said = step_faults.line(e), step_faults.stack(e), traceback.format_exc()
            answer = message(ERROR, (breach, step_faults.of_making(e) if kind == MAKE else None, said))
            if kind == MAKE and type(e).__name__ == "SeveralAgents":  # of jrl.envs.context, which is not imported here
                answer = SEVERAL
        source.sendall(answer)


def _sendable(info: Any) -> dict[Any, Any]:
    """Returns the part of an info that can be pickled."""
    try:
        pickle.dumps(info)
        return dict(info)
    except Exception:  # an object's own __reduce__ may raise whatever it likes
        return {name: value for name, value in info.items() if _picklable(value)}


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # as above
        return False
    return True


def _run_worker(source: socket.socket, worker: _Worker) -> NoReturn:
    """Runs a worker and never returns: the frames above it on the stack are the nursery's."""
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
    # Ctrl-C, an orderly end and a closed terminal reach the whole group: the run wants to finish a step, then it closes
    # the environments. A handler rather than SIG_IGN, which programs that an environment starts would inherit
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an environment may print what a pipe cannot encode
            stream.reconfigure(errors="backslashreplace")
    # of a BLAS that was told to have several: those are safe, and Python 3.12 cannot know
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    setup = pickle.loads(receive(control))
    sys.path[:] = setup["path"]
    # that of several agents imports jax, which takes a second, warns of forks, and computes nothing in a worker
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    importlib.import_module(setup["module"])

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
    """Forks, and returns the new worker's process id, or minus an errno."""
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
    """Waits for workers to end, which they do by themselves once their sockets are closed; kills those that hang."""
    deadline = time.monotonic() + _GRACE_S
    while workers and time.monotonic() < deadline:
        workers -= {process for process in workers if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(0.005)
    for process in workers:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
