"""Worker processes, seen from inside: each steps one Gymnasium environment for the process of `jrl.envs.workers`.

Runs as a script, in an interpreter of its own that imports neither jrl nor jax nor the main module of the run. Its
first process, the nursery, imports numpy and Gymnasium once and then only forks workers and ends them: it has one
thread, so that a fork is safe. It ends with the process that started it, and takes all workers with it.
"""

import contextlib
import ctypes
import faulthandler
import math
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
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

# what a worker is asked; all from SEED on bring a pickled argument. In capitals: and to tell its info
STEP, RESET, MAKE, SEED, LOOK, MASK, CALL = b"s", b"r", b"m", b"i", b"l", b"k", b"c"
# what it answers; VALUE, ERROR and INFO, which is DONE with an info, bring a pickled one
DONE, VALUE, ERROR, INFO = b"d", b"v", b"e", b"n"
# what the nursery is asked, with a process id, and its answer: the id, an exit code, or minus an errno
FORK, KILL = b"f", b"k"
REQUEST, ANSWER, LENGTH = struct.Struct("<cq"), struct.Struct("<q"), struct.Struct("<I")
_GRACE_S = 2.0  # for workers to close their environments


# ---------------------------------------------------------------- spaces of Gymnasium's and their elements

_KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")


def kind(space: Any) -> str:
    """The name of the class of a space, or of the first known one that it extends."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


def leaves(space: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """The spaces of arrays in `space`, each with the names and places that lead to it."""
    name = kind(space)
    if name not in ("Dict", "Tuple"):
        return [(path, space)]
    parts = space.spaces.items() if name == "Dict" else enumerate(space.spaces)
    return [leaf for key, part in parts for leaf in leaves(part, (*path, key))]


def element(space: Any, parts: Iterator[Any]) -> Any:
    """`parts`, one for each of `leaves(space)`, as an element of `space` has them."""
    name = kind(space)
    if name == "Dict":
        return {key: element(part, parts) for key, part in space.spaces.items()}
    return tuple(element(part, parts) for part in space.spaces) if name == "Tuple" else next(parts)


def row(batch: Any, i: Any) -> Any:
    """Element i of a batch, or elements: dicts and tuples of `array[i]`."""
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
    """

    def __init__(self, observation: Any, action: Any, num_envs: int, buffer: Any = None):
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
        self._observation, self._shape = observation, fields[0][0]
        self._seen = list(zip([path for path, _ in seen], arrays))
        self._taken = list(zip([path for path, _ in taken], arrays[len(seen) :]))
        self._plain = arrays[0] if len(seen) == 1 and not seen[0][0] else None
        self._actions = element(action, iter(arrays[len(seen) :]))

    def put(self, i: int, obs: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        """A step of environment i. Raises ValueError for an observation of another shape than its space."""
        if self._plain is not None:
            value = np.asarray(obs)
            if value.shape != self._shape:  # numpy would repeat a smaller one
                raise ValueError(f"observation of shape {value.shape}, but the space has {self._shape}")
            self._plain[i] = value
        else:
            for path, array in self._seen:
                value = np.asarray(_at(obs, path))
                if value.shape != array.shape[1:]:
                    where = "".join(f"[{key!r}]" for key in path)
                    raise ValueError(f"observation{where} of shape {value.shape}, but its space has {array.shape[1:]}")
                array[i] = value
        self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated

    def observations(self, rows: Any = None) -> Any:
        """A copy: arrays [n, *] as an element has them, of all environments or those of `rows` [n]."""
        if self._plain is not None:
            return self._plain.copy() if rows is None else self._plain[rows]
        taken = (array.copy() if rows is None else array[rows] for _, array in self._seen)
        return element(self._observation, taken)

    def put_actions(self, index: list[int], action: Any) -> None:
        """Actions [n, *] of the environments `index` [n]."""
        for path, array in self._taken:
            array[index] = _at(action, path)

    def action(self, i: int) -> Any:
        """A copy: the environment may keep its action, and the next one is written to the same place."""
        return _copied(row(self._actions, i))


def _copied(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: _copied(part) for key, part in action.items()}
    return tuple(map(_copied, action)) if isinstance(action, tuple) else action.copy()


# ---------------------------------------------------------------- masks


class MaskError(ValueError):
    """An environment's infos lack the action mask, or have one of another size. Restarting it would not help."""


def shapes(info: Any) -> dict[str, tuple[int, ...]]:
    """Of the entries of an info that are numbers, or dicts and tuples of them; those are one after the other."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(Exception):
            array = _array(value)
            if array.dtype.kind in "biuf":
                found[str(name)] = array.shape
    return found


def _array(value: Any) -> np.ndarray:
    """Parts of a dict are in the order of their names."""
    if isinstance(value, Mapping):
        return np.concatenate([_array(value[name]).reshape(-1) for name in sorted(value)])
    if isinstance(value, tuple):
        return np.concatenate([_array(part).reshape(-1) for part in value])
    return np.asarray(value)


class Masked:
    """One Gymnasium environment with the action mask of its infos in its observations; all else is its own.

    Args:
      env: the environment.
      name: of the entry in its infos.
      shape: of the mask.
    """

    def __init__(self, env: Any, name: str, shape: tuple[int, ...]):
        from gymnasium import spaces

        self.env, self._name, self._shape = env, name, tuple(shape)
        yes_or_no: Any = np.bool_
        seen, mask = env.observation_space, spaces.Box(0, 1, self._shape, yes_or_no)
        self._named = kind(seen) == "Dict"
        named = {**seen.spaces, "action_mask": mask} if self._named else {"obs": seen, "action_mask": mask}
        self.observation_space = spaces.Dict(list(named.items()))  # a list keeps its order

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # of one that is only half there
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        return self.joined(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.joined(obs, info), reward, terminated, truncated, info

    def joined(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        """Raises MaskError: there is no mask, or one of another size."""
        if self._name not in info:
            raise MaskError(
                f"env.action_mask_info {self._name}: the infos of a step or reset have no such entry: they have "
                f"{', '.join(map(str, info)) or 'nothing'}: put it into all of them, the last of an episode too"
            )
        mask = _array(info[self._name])
        if mask.size != math.prod(self._shape):
            raise MaskError(
                f"env.action_mask_info {self._name}: the infos have {mask.size} entries, but the first had "
                f"{math.prod(self._shape)}: give one for each choice of the action space"
            )
        mask = (mask != 0).reshape(self._shape)
        return {**obs, "action_mask": mask} if self._named else {"obs": obs, "action_mask": mask}


def masked(env: Any, mask: Any) -> tuple[Any, Any]:
    """(what is stepped, its `Masked`).

    Args:
      env: the environment.
      mask: name, shape, and whether `env` is in `jrl.envs.limits.Limited`, which repeats observations without an info.
    """
    name, shape, limited = mask
    if limited:
        env.env = Masked(env.env, name, shape)
        return env, env.env
    env = Masked(env, name, shape)
    return env, env


# ---------------------------------------------------------------- messages


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
        self._around: Any = None  # its `Masked`, if it has one
        self._begun: Any = None  # the seed and the result of a reset that nobody has seen yet

    def answer(self, kind: bytes, argument: bytes) -> Any:
        """Does what it is asked, and returns what goes back."""
        if kind == STEP:
            obs, reward, terminated, truncated, info = self._env.step(self._block.action(self._index))
            self._block.put(self._index, obs, reward, terminated, truncated)
            return info
        if kind == RESET:
            obs, info = self._env.reset()
            self._block.put(self._index, obs, 0.0, False, False)
            return info
        if kind == SEED:
            return self._seeded(*pickle.loads(argument))
        if kind == LOOK:
            seed = pickle.loads(argument)
            self._begun = (seed, self._env.reset(seed=seed))
            return shapes(self._begun[1][1])
        if kind == MASK:
            self._env, self._around = masked(self._env, pickle.loads(argument))
        if kind == MAKE:
            self.close()
            self._make = self._make or pickle.loads(self._setup["make"])
            self._env = env = self._make(self._index)
            self._around = self._begun = None
            return env.observation_space, env.action_space, getattr(env.spec, "max_episode_steps", None)
        if kind == CALL:
            self._begun = None  # what it does to the environment may show in the reset
            return pickle.loads(pickle.loads(argument))(self._env)  # the function was pickled by cloudpickle
        return None

    def _seeded(self, seed: int, mask: Any) -> Any:
        """The first reset of an environment that was just made; its info."""
        begun, self._begun = self._begun, None
        if mask is not None and self._around is None:
            self._env, self._around = masked(self._env, mask)
        if self._block is None:
            spaces = self._env.observation_space, self._env.action_space
            self._block = Block(*spaces, self._setup["num_envs"], lambda size: mmap.mmap(self._memory, size))
        if begun is not None and begun[0] == seed:
            obs, info = begun[1]
            obs = obs if self._around is None else self._around.joined(obs, info)
        else:
            obs, info = self._env.reset(seed=seed)
        self._block.put(self._index, obs, 0.0, False, False)
        return info

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may have failed already
            if self._env is not None:
                self._env.close()


def _work(source: socket.socket, worker: _Worker) -> None:
    """Answers until nobody asks. Raises ConnectionError where nobody waits for the answer."""
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
            import gymnasium

            # of the user's making, rather than a fault
            wrong = kind == MAKE and isinstance(e, TypeError | ImportError | gymnasium.error.Error)
            wrong, said = (True, str(e)) if isinstance(e, MaskError) else (wrong, f"{type(e).__name__}: {e}")
            answer = message(ERROR, (wrong, said, traceback.format_exc()))
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
    # Ctrl-C, an orderly end and a closed terminal reach the whole group: the run wants to finish a step, then it closes
    # the environments. A handler rather than SIG_IGN, which programs that an environment starts would inherit
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
