"""A worker process: steps one Gymnasium environment for `jrl.envs.processes`.

Imports neither jax nor `jrl.envs` nor the run's script, unless the environment does.
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

from jrl.gym import exceptions, faults, wrappers
from jrl.gym.block import StepMemory

# Requests. `ARGUED` requests carry an argument, `VALUED` requests get a value. A capital letter also asks for the info
STEP, RESET, MAKE, SEED, LOOK, MASK, CALL = b"s", b"r", b"m", b"i", b"l", b"k", b"c"
ARGUED, VALUED = frozenset((SEED, LOOK, MASK, CALL)), frozenset((MAKE, LOOK, CALL))
# Answers. All but DONE and SEVERAL carry a value; SEVERAL: the environment has several agents
DONE, VALUE, ERROR, INFO, SEVERAL = b"d", b"v", b"e", b"n", b"a"
GRACE_S = 2.0  # time to close an environment


class Setup(NamedTuple):
    """Start parameters of a worker."""

    make: bytes  # function from i to environment i, pickled by cloudpickle
    num_envs: int
    check_steps: int  # see `StepMemory`
    environ: dict[str, str]


def main(link: Any, index: int, setup: Setup) -> None:
    """Steps environment `index` for the other end of a `multiprocessing.connection.Connection`, until it is closed."""
    from jrl.gym import preload  # another library's fork server has not imported it

    os.environ.clear()  # the fork server may be older than the run's variables
    os.environ.update(preload.THREADS | setup.environ)
    # These signals reach the whole process group, but the run finishes its step first and then closes the environments.
    # A handler, not SIG_IGN: programs started by an environment would inherit SIG_IGN
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
    """Ends this process soon after its parent, even if the environment hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(GRACE_S)
    os._exit(1)


class _Worker:
    def __init__(self, link: Any, index: int, setup: Setup):
        self._link, self._index, self._setup = link, index, setup
        self._make: Any = None
        self._env: Any = None
        self._block: Any = None
        self._mask_wrapper: Any = None  # the environment's `MaskWrapper`; None: no mask
        self._pending_reset: Any = None  # seed and result of a reset that is not used yet

    def work(self) -> None:
        """Answers requests. Raises ConnectionError or EOFError when the other end is closed."""
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
            except BaseException as e:  # SystemExit, too: an environment may not end its process
                breach = e.args if isinstance(e, exceptions.Breach) else ()
                texts = exceptions.format_line(e), exceptions.format_stack(e), traceback.format_exc()
                reason = exceptions.explain_make_error(e) if kind == MAKE else None
                answer, value = ERROR, pickle.dumps((breach, reason, texts))
                if isinstance(e, exceptions.SeveralAgents):
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
            return self._reset_first(*argument)
        if kind == LOOK:
            self._pending_reset = (argument, faults.reset_with_seed(self._env, argument))
            return wrappers.list_numeric_shapes(self._pending_reset[1][1])
        if kind == MASK:
            self._env, self._mask_wrapper = wrappers.wrap_with_mask(self._env, argument)
        if kind == MAKE:
            self.close()
            self._make = self._make or pickle.loads(self._setup.make)
            self._env = env = self._make(self._index)
            self._mask_wrapper = self._pending_reset = None
            # a class that does not inherit from gymnasium.Env may lack `spec`
            limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
            return env.observation_space, env.action_space, limit
        if kind == CALL:
            self._pending_reset = None  # the call may change the environment
            return pickle.loads(argument)(self._env)
        return None

    def _reset_first(self, seed: int, mask: Any, memory: bool) -> Any:
        """Resets a new environment with its seed; return its info."""
        if memory:
            self._memory = reduction.recv_handle(self._link)
        pending, self._pending_reset = self._pending_reset, None
        if mask is not None and self._mask_wrapper is None:
            self._env, self._mask_wrapper = wrappers.wrap_with_mask(self._env, mask)
        if self._block is None:
            spaces = self._env.observation_space, self._env.action_space
            buffer = lambda size: mmap.mmap(self._memory, size)
            self._block = StepMemory(*spaces, self._setup.num_envs, buffer, check_steps=self._setup.check_steps)
        if pending is not None and pending[0] == seed:
            result = pending[1]
            if self._mask_wrapper is not None:
                result = self._mask_wrapper.add_mask(*result), result[1]
        else:
            result = faults.reset_with_seed(self._env, seed)
        return self._block.take(self._index, result, reset=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a failed environment may fail here again
            if self._env is not None:
                self._env.close()


def _sendable(info: Any) -> dict[Any, Any]:
    """Returns the entries of an info that can be pickled."""
    if _picklable(info):
        return dict(info)
    return {name: value for name, value in info.items() if _picklable(value)}


def _picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # a user's __reduce__ can raise anything
        return False
    return True
