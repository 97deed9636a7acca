"""Who collects for a run, as callbacks, curricula and examples address them: `algorithm.workers.foreach_worker(fn)`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jrl.errors import InputError
from jrl.rollout import sources

if TYPE_CHECKING:
    from jrl.session import Session


class Worker:
    """One that collects: a part of this process, or an environment runner in its own.

    Attributes:
      worker_index: 0 in this process; environment runners count from 1.
      source: its rollouts come from there; None where environments are part of the program that learns.
    """

    def __init__(self, source: Any, worker_index: int, weights: Any):
        self.source, self.worker_index, self._weights = source, worker_index, weights

    def get_weights(self) -> dict[str, Any]:
        """What it acts with, by the fields of the algorithm's Actor, as numpy arrays."""
        actor = jax.device_get(self._weights() if callable(self._weights) else self._weights)
        return {"default_policy": {name: x for name, x in vars(actor).items() if name != "env_steps"}}

    def get_policy(self, policy_id: str = "default_policy") -> "WorkerPolicy":
        """The policy that it acts with: `get_weights()`."""
        return WorkerPolicy(self.get_weights()[policy_id])

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn` of each of its environments, in their order. Raises InputError where Python cannot call them."""
        if self.source is None:
            raise InputError(
                "foreach_env: these environments are part of a program, Python cannot call them: set_task changes "
                "their parameters; rollout.collector host or another env.backend makes objects of them"
            )
        return self.source.foreach_env(fn)

    def set_task(self, task: Any) -> None:
        """Gives its environments a task."""
        sources.set_task(self.source, task)


class WorkerPolicy(NamedTuple):
    """What a worker acts with."""

    weights: dict[str, Any]

    def get_weights(self) -> dict[str, Any]:
        return self.weights


class Workers:
    """All that collect for a run."""

    def __init__(self, session: "Session"):
        self._session = session

    def foreach_worker(self, fn: Callable[[Worker], Any], *, local_worker: bool = True) -> list[Any]:
        """`fn(worker)` of each, in its own process or thread; what it returns, in order.

        Args:
          fn: of a Worker; for environment runners it travels there.
          local_worker: for the sake of RLlib's callers; there is either this process or environment runners.
        """
        return self.foreach_worker_with_index(lambda worker, index: fn(worker))

    def foreach_worker_with_index(self, fn: Callable[[Worker, int], Any]) -> list[Any]:
        """As `foreach_worker`, with (worker, worker_index)."""
        session = self._session
        program, state = session.run.program, session.state
        if program.source is None:
            return [fn(Worker(None, 0, lambda: program.actor(state)), 0)]
        source: Any = program.source()
        remote = session.config.env_runners.num > 0
        weights = jax.device_get(program.actor(state)) if remote else lambda: program.actor(state)
        return source.foreach_worker(functools.partial(_called, fn, remote, weights))

    def foreach_worker_with_id(self, fn: Callable[[int, Worker], Any]) -> list[Any]:
        """As `foreach_worker`, with (worker_index, worker)."""
        return self.foreach_worker_with_index(lambda worker, index: fn(index, worker))

    def local_worker(self) -> Worker:
        """This process as a worker: the weights as they are here; its environments, where it has any."""
        program, state = self._session.run.program, self._session.state
        here = None if program.source is None or self._session.config.env_runners.num else program.source()
        return Worker(here, 0, lambda: program.actor(state))

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn(env)` of every environment, in the order of columns. Raises InputError where Python cannot call them."""
        return [x for found in self.foreach_worker(lambda worker: worker.foreach_env(fn)) for x in found]

    @property
    def num_healthy_workers(self) -> int:
        """Environment runners that answer; 0 where this process collects."""
        source = self._session.run.program.source
        found = source().metrics if source else {}
        return int(found.get("env_runners/num_healthy_workers", self._session.config.env_runners.num))


def _called(fn: Callable[[Worker, int], Any], remote: bool, weights: Any, source: Any) -> Any:
    index = getattr(source, "worker_index", 0) if remote else 0
    return fn(Worker(source, index, weights), index)
