"""A worker process, seen from inside: it steps one Gymnasium environment for the process of `jrl.envs.processes`.

It imports neither jax nor `jrl.envs` nor the script of the run, unless the environment does.
"""

import contextlib
import faulthandler
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing import reduction
from typing import Any, NamedTuple

from jrl.gym import exceptions, faults, masked
from jrl.gym.block import Block

# Requests. Those in `ARGUED` bring an argument, those in `VALUED` get a value. In capitals they ask for the info, too
STEP, RESET, MAKE, SEED, LOOK, MASK, CALL = b"s", b"r", b"m", b"i", b"l", b"k", b"c"
ARGUED, VALUED = frozenset((SEED, LOOK, MASK, CALL)), frozenset((MAKE, LOOK, CALL))
# Answers. All but DONE and SEVERAL bring a value; SEVERAL: the environment has several agents
DONE, VALUE, ERROR, INFO, SEVERAL = b"d", b"v", b"e", b"n", b"a"
GRACE_S = 2.0  # to close an environment


class Setup(NamedTuple):
    """What a worker is started with."""

    make: bytes  # pickled by cloudpickle, makes environment i when called with i
    num_envs: int
    check_steps: int  # see `Block`
    environ: dict[str, str]


def main(link: Any, index: int, setup: Setup) -> None:
    """Steps environment `index` as a `multiprocessing.connection.Connection` asks, until its other end is closed."""
    from jrl.gym import preload  # a fork server that others started has not imported it

    os.environ.clear()  # the fork server may be older than the run's variables
    os.environ.update(preload.THREADS | setup.environ)
    # Ctrl-C, an orderly end and a closed terminal reach the whole group: the run wants to finish a step, then it closes
    # the environments. A handler rather than SIG_IGN, which programs that an environment starts would inherit
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an environment may print what a pipe cannot encode
            stream.reconfigure(errors="backslashreplace")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = _Worker(link, index, setup)
    try:
        worker.work()
    except (ConnectionError, EOFError):
        pass  # the run has ended
    finally:
        worker.close()


def _end_with_parent() -> None:
    """Ends this process soon after the process that started it, also one whose environment hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(GRACE_S)
    os._exit(1)


class _Worker:
    """One environment and the requests to it."""

    def __init__(self, link: Any, index: int, setup: Setup):
        self._link, self._index, self._setup = link, index, setup
        self._make: Any = None
        self._env: Any = None
        self._block: Any = None
        self._around: Any = None  # the environment's `Masked`, if it has one
        self._begun: Any = None  # the seed and the result of a reset that was not used yet

    def work(self) -> None:
        """Answers requests. Raises ConnectionError or EOFError: the other side is gone."""
        fd, read, write = self._link.fileno(), os.read, os.write
        while asked := read(fd, 1):
            kind, answer, value = asked.lower(), DONE, b""
            argument = self._link.recv() if kind in ARGUED else None
            try:
                result = self._answer(kind, argument)
                if kind in VALUED:
                    answer, value = VALUE, pickle.dumps(result)
                elif asked != kind:
                    answer, value = INFO, pickle.dumps(_sendable(result))
            except BaseException as e:  # SystemExit, too: an environment has no say in when its process ends
                breach = e.args if isinstance(e, faults.Breach) else ()
                said = exceptions.line(e), exceptions.stack(e), traceback.format_exc()
                answer, value = ERROR, pickle.dumps((breach, exceptions.of_making(e) if kind == MAKE else None, said))
                if kind == MAKE and type(e).__name__ == "SeveralAgents":  # of jrl.envs.context, which needs jax
                    answer = SEVERAL
            write(fd, answer)
            if value and answer != SEVERAL:
                self._link.send_bytes(value)

    def _answer(self, kind: bytes, argument: Any) -> Any:
        if kind == STEP:
            return self._block.take(self._index, self._env.step(self._block.action(self._index)))
        if kind == RESET:
            return self._block.take(self._index, self._env.reset(), reset=True)
        if kind == SEED:
            return self._seeded(*argument)
        if kind == LOOK:
            self._begun = (argument, faults.seeded(self._env, argument))
            return masked.shapes(self._begun[1][1])
        if kind == MASK:
            self._env, self._around = masked.put_around(self._env, argument)
        if kind == MAKE:
            self.close()
            self._make = self._make or pickle.loads(self._setup.make)
            self._env = env = self._make(self._index)
            self._around = self._begun = None
            # a class that does not inherit from gymnasium.Env may lack `spec`
            limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
            return env.observation_space, env.action_space, limit
        if kind == CALL:
            self._begun = None  # what it does to the environment may show in the reset
            return pickle.loads(argument)(self._env)  # the function was pickled by cloudpickle
        return None

    def _seeded(self, seed: int, mask: Any, memory: bool) -> Any:
        """Resets an environment that was just made, with its seed, and returns its info."""
        if memory:
            self._memory = reduction.recv_handle(self._link)
        begun, self._begun = self._begun, None
        if mask is not None and self._around is None:
            self._env, self._around = masked.put_around(self._env, mask)
        if self._block is None:
            spaces = self._env.observation_space, self._env.action_space
            buffer = lambda size: mmap.mmap(self._memory, size)
            self._block = Block(*spaces, self._setup.num_envs, buffer, check_steps=self._setup.check_steps)
        if begun is not None and begun[0] == seed:
            result = begun[1]
            if self._around is not None:
                result = self._around.joined(*result), result[1]
        else:
            result = faults.seeded(self._env, seed)
        return self._block.take(self._index, result, reset=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may have failed already
            if self._env is not None:
                self._env.close()


def _sendable(info: Any) -> dict[Any, Any]:
    """Returns the part of an info that can be pickled."""
    if _picklable(info):
        return dict(info)
    return {name: value for name, value in info.items() if _picklable(value)}


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # an object's own __reduce__ may raise whatever it likes
        return False
    return True
