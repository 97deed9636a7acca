"""Groups of Ray actors: starts them, waits for their answers, replaces failed ones and ends them all."""

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

_STORE = 128 * 2**20  # bytes of the object store, mostly for weights


class Request(NamedTuple):
    """A pending order of a runner."""

    ref: Any  # ray.ObjectRef
    version: int  # number of the call that made the order
    number: int  # number of earlier orders to the runner


@dataclasses.dataclass
class RunnerProcess:
    """State of a runner, as the learning process knows it."""

    index: int
    restarts: int
    actor: Any  # Ray actor handle
    starting: Any  # ray.ObjectRef of its start; None once it has started
    since: float  # start time of its current work, or of its discovery; time.monotonic
    warm: bool = False  # whether it has answered once, so that its programs are compiled
    requests: collections.deque[Request] = dataclasses.field(default_factory=collections.deque)
    ordered: int = 0

    @property
    def awaited(self) -> Any:
        """Returns the ray.ObjectRef of its next answer."""
        return self.requests[0].ref if self.starting is None else self.starting

    def order(self, ref: Any, version: int = 0) -> None:
        """Adds a call of the actor, by its ray.ObjectRef, as the latest order."""
        if not self.requests:
            self.since = time.monotonic()
        self.requests.append(Request(ref, version, self.ordered))
        self.ordered += 1

    def deadline(self, options: RunnerOptions) -> float:
        """Returns the time by which the runner must answer; time.monotonic."""
        if self.starting is not None:
            return self.since + options.health_check_timeout_s
        return self.since + options.sample_timeout_s + (0.0 if self.warm else options.health_check_timeout_s)


def sendable(key: Key) -> tuple[np.ndarray, str]:
    """Returns a key as data that Ray can send; `received` is the inverse."""
    return np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key))


def received(data: np.ndarray, impl: str) -> Key:
    """Returns the key of the data from `sendable`."""
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def _foreach_env(source: Any, fn: Callable[[Any], Any]) -> list[Any]:
    return list(source.foreach_env(fn))


class RunnerGroup:
    """K environment runners, actors that answer their orders in turn; the base class of all groups.

    A runner fails if it raises, its process ends, or it exceeds its time limit (then it is killed). The options decide
    whether this ends the run, another runner replaces it, or the others continue. Runners that fail before any answer
    are not replaced endlessly: the run ends when K of them have failed.

    Subclasses decide what to order (`RunnerProcess.order`), how to use the answers (`_event`), the arguments of an
    actor (`_given`), and the reaction to a start (`_started`) and to the loss of a runner (`_lose`).

    Attributes:
      recreated: indices of runners restarted since the last read; the reader empties it.

    Args:
      host: actor class: host(make, index, restarts, *_given(...)), with the methods `started`, `close` and
        `call(fn, *args) = fn(source, *args)`.
      make: function with which a host makes its source. Pickled by Ray's cloudpickle.
      options: options of the runners.
      store: bytes of the object store in addition to weights, if Ray is started here.
      timers: timers of the stages `wait` and `receive`.
    Raises:
      InputError: the cluster has no room for the runners, or cannot be reached.
    """

    _of = ""  # suffix of "environment runner 3" in messages
    _in_flight = 1  # maximum number of pending orders per runner

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

        self._make, self._options, self._timers = make, options, timers or Timers()
        self._runners: dict[int, RunnerProcess] = {}  # living runners by index
        self._restarts = self._dropped = 0  # numbers of replaced runners and of lost orders
        self._answered = self._closed = False  # whether any runner has answered
        self.recreated: list[int] = []
        self._cluster = Cluster(ray, options, host, _STORE + store)
        try:
            for index in range(options.num):
                self._start(index, 0)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ for subclasses

    def _given(self, index: int, restarts: int) -> tuple:
        """Returns the arguments of a runner's host after `make`, `index` and `restarts`."""
        return ()

    def _started(self, runner: RunnerProcess) -> None:
        """Called after a runner has started."""

    def _proven(self, runner: RunnerProcess) -> bool:
        """Returns whether a runner may be replaced although K runners have failed."""
        return self._answered

    def _lose(self, runner: RunnerProcess) -> None:
        """Called when the others continue without a runner."""

    # ------------------------------------------------------------ orders and answers

    def _ready(self) -> list[RunnerProcess]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is None]

    def _starting(self) -> list[RunnerProcess]:
        return [r for _, r in sorted(self._runners.items()) if r.starting is not None]

    def _start(self, index: int, restarts: int) -> None:
        actor, starting = self._cluster.start(index, self._make, index, restarts, *self._given(index, restarts))
        self._runners[index] = RunnerProcess(index, restarts, actor, starting, time.monotonic())

    def _begin(self) -> None:
        while self._starting():
            self._event([])

    def _event(
        self, wanted: Sequence[RunnerProcess], spare: Sequence[RunnerProcess] = (), seconds: float = math.inf
    ) -> tuple[RunnerProcess, Request, Any] | None:
        """Waits for the first answer of the runners `wanted`, or of a `spare` runner without other pending orders.

        Returns:
          (runner, its request, the answer); None if instead a runner started or failed, or `seconds` have passed.
        Raises:
          RunnersLost: a runner failed and the options end the run, or there is no runner to wait for.
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
                    what = "has not started" if runner.starting is not None else "has sent nothing"
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

    def _forget(self, runners: Sequence[RunnerProcess]) -> None:
        for runner in runners:
            self._dropped += len(runner.requests)
            runner.requests.clear()

    def _fail(self, runner: RunnerProcess, cause: str) -> None:
        options, name = self._options, f"environment runner {runner.index}{self._of}"
        self._cluster.kill(runner.actor)
        self._forget([runner])
        del self._runners[runner.index]
        if options.recreate_failed_env_runners:
            if not self._proven(runner) and self._restarts >= options.num:
                raise RunnersLost(f"{name} failed, as others did before: {cause}")
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
            warnings.warn(f"{name} failed, the others go on without it: {cause}", RuntimeWarning, stacklevel=2)
            self._lose(runner)
        else:
            raise RunnersLost(
                f"{name} failed: {cause}\n"
                "env_runners.recreate_failed_env_runners=true starts another in its place, "
                "env_runners.ignore_env_runner_failures=true goes on without it"
            )

    # ------------------------------------------------------------ calls of every runner

    def _each(self, call: Callable[[RunnerProcess], Any]) -> dict[int, Any]:
        """Returns the answers of all healthy runners to `call`, which makes a ray.ObjectRef, by index in order.

        Exceptions of the called code are raised here.
        """
        self._begin()
        # a runner answers in turn, after its pending orders
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
        """Returns fn(source) of every healthy runner, in order, called in its process; raises its exceptions here."""
        return list(self._each(lambda r: r.actor.call.remote(fn)).values())

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns fn(environment) of every environment of every healthy runner, in column order."""
        found = self._each(lambda r: r.actor.call.remote(_foreach_env, fn))
        return [x for answer in found.values() for x in answer]

    def close(self) -> None:
        """Ends the runners, and Ray if it was started here. May be called again."""
        if self._closed:
            return
        self._closed = True
        idle = [r.actor for r in self._ready() if not r.requests]
        self._cluster.close([r.actor for r in self._runners.values()], idle)
        self._runners.clear()
