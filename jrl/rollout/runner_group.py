"""A runner group starts Ray actors, waits for their answers, replaces those that fail, and ends them all."""

import collections
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import RunnersLost
from jrl.metrics.timers import Timers
from jrl.rollout.ray_cluster import Cluster, Failure, RunnerOptions
from jrl.types import Key

_STORE = 128 * 2**20  # bytes of the object store: weights, mostly


class Request(NamedTuple):
    """Names one order that a runner has not answered."""

    ref: Any  # ray.ObjectRef
    version: int  # the call that ordered it
    number: int  # orders to the runner before it


@dataclasses.dataclass
class Runner:
    """Holds what the process that learns knows of a runner."""

    index: int
    restarts: int
    actor: Any  # ray's handle
    starting: Any  # ray.ObjectRef that comes when it has started, then None
    since: float  # when it began what it works on, or later: when that was seen; by time.monotonic
    warm: bool = False  # an answer has come from it: its programs are compiled
    requests: collections.deque[Request] = dataclasses.field(default_factory=collections.deque)
    ordered: int = 0

    @property
    def awaited(self) -> Any:
        """Refers to its next answer, as a ray.ObjectRef."""
        return self.requests[0].ref if self.starting is None else self.starting

    def order(self, ref: Any, version: int = 0) -> None:
        """Notes a call of the actor, by its ray.ObjectRef, as the latest order."""
        if not self.requests:
            self.since = time.monotonic()
        self.requests.append(Request(ref, version, self.ordered))
        self.ordered += 1

    def deadline(self, options: RunnerOptions) -> float:
        """Returns the time by which it has to answer, by time.monotonic."""
        if self.starting is not None:
            return self.since + options.health_check_timeout_s
        return self.since + options.sample_timeout_s + (0.0 if self.warm else options.health_check_timeout_s)


def sendable(key: Key) -> tuple[np.ndarray, str]:
    """Takes a key apart into what Ray can send; `received` puts it together again."""
    return np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key))


def received(data: np.ndarray, impl: str) -> Key:
    """Makes a key of what `sendable` gave."""
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def _foreach_env(source: Any, fn: Callable[[Any], Any]) -> list[Any]:
    return list(source.foreach_env(fn))


class RunnerGroup:
    """Keeps K environment runners, each an actor that answers in turn what it was asked; the base class of all kinds.

    A runner fails when it raises, when its process ends, or when it does not answer in time (it is killed). By the
    options this ends the run, or another starts in its place, or the others go on without it. Runners that fail before
    they have proven that they can work are not replaced for ever: when each has failed once, it ends.

    A kind of runners says what it orders (`Runner.order`) and what it does with the answers (`_event`); which arguments
    an actor gets (`_given`), and what follows from a start (`_started`) and from the loss of a runner (`_lose`).

    Attributes:
      recreated: indices of runners in the place of failed ones; whoever reads it empties it.

    Args:
      host: class of the actors: host(make, index, restarts, *what `_given` says), with the methods `started`, `close`
        and `call`, which gives `call(fn, *args) = fn(source, *args)`.
      make: how a host makes what it holds. Pickled by Ray's cloudpickle.
      options: of the runners.
      store: bytes of the object store beside weights, if Ray is begun here.
      timers: where the stages `wait` and `receive` are timed.
    Raises:
      InputError: the cluster has no place for them, or cannot be reached.
    """

    _of = ""  # in messages, behind "environment runner 3"
    _owed = "no rollout"  # what one has sent that is late
    _unproven = ", and no rollout has come yet"
    _without = "the others go on without it"
    _in_flight = 1  # most orders of one runner

    def __init__(
        self,
        host: type,
        make: Callable[..., Any],
        options: RunnerOptions,
        *,
        store: int = 0,
        timers: Timers | None = None,
    ):
        import ray

        options.check()
        self._make, self._options, self._timers = make, options, timers or Timers()
        self._runners: dict[int, Runner] = {}  # those that live, by index
        self._restarts = self._dropped = 0  # runners that were replaced, orders that were lost
        self._answered = self._closed = False  # an answer has come from any of them
        self.recreated: list[int] = []
        self._cluster = Cluster(ray, options, host, _STORE + store)
        try:
            for index in range(options.num):
                self._start(index, 0)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ what a kind of runners says

    def _given(self, index: int, restarts: int) -> tuple:
        """Returns the arguments of a runner's host behind `make`, `index` and `restarts`."""
        return ()

    def _started(self, runner: Runner) -> None:
        """Takes note that a runner has started."""

    def _proven(self, runner: Runner) -> bool:
        """Says whether another may work in the place of this one, though as many have failed as there are."""
        return self._answered

    def _lose(self, runner: Runner) -> None:
        """Does what has to be done when the others go on without a runner."""

    # ------------------------------------------------------------ orders and answers

    def _ready(self) -> list[Runner]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is None]

    def _starting(self) -> list[Runner]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is not None]

    def _start(self, index: int, restarts: int) -> None:
        actor, starting = self._cluster.start(index, self._make, index, restarts, *self._given(index, restarts))
        self._runners[index] = Runner(index, restarts, actor, starting, time.monotonic())

    def _begin(self) -> None:
        while self._starting():
            self._event([])

    def _event(
        self, wanted: Sequence[Runner], spare: Sequence[Runner] = (), seconds: float = math.inf
    ) -> tuple[Runner, Request, Any] | None:
        """Waits for the first answer of the runners `wanted`, or of one of `spare` that has answered all it was asked.

        Returns:
          Who, what it was asked, the answer; None if something else came first: a runner has started, or failed, or so
          many seconds have passed.
        Raises:
          RunnersLost: a runner failed and the run ends by the options, or there is none to wait for.
        """
        watched = [*wanted, *self._starting()]
        if not watched and seconds:
            raise RunnersLost(f"no environment runner{self._of} is left")
        refs = [*(r.awaited for r in watched), *(r.requests[-1].ref for r in spare)]
        patience = min([seconds, *(r.deadline(self._options) - time.monotonic() for r in watched)])
        with self._timers("wait"):
            found = self._cluster.wait(refs, max(0.0, patience))
        if found is None:
            for runner in watched:
                if time.monotonic() > (end := runner.deadline(self._options)):
                    what = "has not started" if runner.starting is not None else f"has sent {self._owed}"
                    key = "health_check_timeout_s" if runner.starting is not None else "sample_timeout_s"
                    self._fail(runner, f"it {what} within {end - runner.since:g} s (env_runners.{key})")
            return None
        runner = [*watched, *spare][found]
        try:
            with self._timers("receive"):
                answer = self._cluster.get(runner.awaited)
        except Failure as e:
            self._fail(runner, str(e))
            return None
        runner.since = time.monotonic()
        if runner.starting is not None:
            runner.starting = None
            self._started(runner)
            return None
        runner.warm = self._answered = True
        return runner, runner.requests.popleft(), answer

    def _forget(self, runners: Sequence[Runner]) -> None:
        for runner in runners:
            self._dropped += len(runner.requests)
            runner.requests.clear()

    def _fail(self, runner: Runner, cause: str) -> None:
        options, name = self._options, f"environment runner {runner.index}{self._of}"
        self._cluster.kill(runner.actor)
        self._forget([runner])
        del self._runners[runner.index]
        if options.recreate_failed_env_runners:
            if not self._proven(runner) and self._restarts >= options.num:
                raise RunnersLost(f"{name} failed, as others did before{self._unproven}: {cause}")
            if self._restarts >= options.max_restarts:
                raise RunnersLost(
                    f"{name} failed: {cause}\n{self._restarts} runners have been replaced already, and "
                    "env_runners.max_restarts allows no more"
                )
            self._restarts += 1
            warnings.warn(f"{name} failed, another starts in its place: {cause}", RuntimeWarning, stacklevel=2)
            self._start(runner.index, runner.restarts + 1)
        elif options.ignore_env_runner_failures:
            if not self._runners:
                raise RunnersLost(
                    f"{name}, the last one, failed: {cause}\n"
                    "env_runners.recreate_failed_env_runners=true starts another in the place of one that fails"
                )
            warnings.warn(f"{name} failed, {self._without}: {cause}", RuntimeWarning, stacklevel=2)
            self._lose(runner)
        else:
            raise RunnersLost(
                f"{name} failed: {cause}\n"
                "env_runners.recreate_failed_env_runners=true starts another in its place, "
                "env_runners.ignore_env_runner_failures=true goes on without it"
            )

    # ------------------------------------------------------------ calls of every runner

    def _each(self, call: Callable[[Runner], Any]) -> dict[int, Any]:
        """Gathers the answers of all healthy runners to `call`, which makes a ray.ObjectRef, by index in their order.

        What the code of a call raises is raised here.
        """
        self._begin()
        # a runner answers in turn: after what is on order
        patience = self._options.sample_timeout_s * (1 + self._in_flight) + self._options.health_check_timeout_s
        found = {}
        for runner, ref in [(r, call(r)) for r in self._ready()]:
            try:
                if self._cluster.wait([ref], patience) is None:
                    raise Failure(f"no answer within {patience:g} s")
                found[runner.index] = self._cluster.get(ref)
            except Failure as e:
                if e.raised is not None:
                    raise e.raised from None
                self._fail(runner, str(e))
        return found

    def foreach_worker(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Calls fn(source) in the process of every healthy runner, in their order; what it raises is raised here."""
        return list(self._each(lambda r: r.actor.call.remote(fn)).values())

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Calls fn(environment) of every sub-environment of every healthy runner, in the order of columns."""
        found = self._each(lambda r: r.actor.call.remote(_foreach_env, fn))
        return [x for answer in found.values() for x in answer]

    def close(self) -> None:
        """Ends the runners, and Ray if it was begun here. May be called again."""
        if self._closed:
            return
        self._closed = True
        idle = [r.actor for r in self._ready() if not r.requests]
        self._cluster.close([r.actor for r in self._runners.values()], idle)
        self._runners.clear()
