"""Sources of rollouts: the base class of all sources, and of those that stand around another."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrl.envs import task as tasks
from jrl.envs.context import EnvContext
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.types import Episodes, Key, PyTree, Rollout


class Source:
    """Yields rollouts of the same columns, one after the other.

    Attributes:
      columns: episode statistics, of several parts [K, ...].
      infos, reset_infos: what environments told in the latest rollout and at the first reset, see FromHost; None
        where nobody asked.
      blocks: the parts of the latest rollout as they were made, where they come from other processes.
      device: where it acts; None where that is not one of this process.
      worker_index: of the env runner that it is in; 0 in the process that learns.
      recreated: env runners that have started in the place of failed ones; whoever reads it empties it.
    """

    columns: episodes.EpisodeState
    _metrics: dict[str, float]
    infos: Any = None
    reset_infos: Any = None
    blocks: Any = None
    device: jax.Device | None = None
    worker_index = 0
    recreated: Sequence[int] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the name -> number, of the latest rollout, beside the episodes."""
        return self._metrics

    def drain(self) -> dict[str, float]:
        """Returns what the next result row has of all that came since the row before, and forgets it."""
        return {}

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the next rollout, made with `actor`, and the report on its episodes."""
        raise TypeError(f"{type(self).__name__} yields nothing: a Source has a method next(actor, key)")

    def like(self, actor: PyTree, key: Key) -> Rollout | None:
        """Shapes and dtypes of what `next` will return, where they are known before it is made."""
        return None

    def reset(self, key: Key) -> None:
        """Resets all environments; `key` counts for environments written in JAX only."""
        raise InputError(f"reset: {type(self).__name__} has no environments that could start anew")

    def discontinue(self) -> None:
        """Begins anew: what comes next does not continue the latest rollout."""

    def set_task(self, task: Any) -> None:
        """Sets the task of all environments, from the next step on.

        Raises:
          InputError: environments without a task, or one of another structure.
          RuntimeError: the environment's own `set_task` raised in another process.
        """
        tasks.check(self)
        self.foreach_env(tasks.setter(task))

    def apply_task(self, fn: tasks.TaskFn, result: dict[str, Any], context: EnvContext) -> list[Any]:
        """Asks a curriculum function for tasks and sets them, see `jrl.envs.task`.

        Args:
          fn: (result, env, context) -> the next task, None for no change. It travels pickled to the environments.
          result: the latest row.
          context: for environments in a program; others know their own.
        Returns:
          The task that each environment has now, or each program.
        Raises:
          InputError: environments without a task, or a task that does not fit.
          RuntimeError: `fn` raised in another process.
        """
        return tasks.apply(self, fn, result)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn` of every environment, in the order of columns. Raises InputError where they are not Python
        objects.
        """
        raise InputError("foreach_env: these environments are no objects of Python")

    def foreach_worker(self, fn: Callable[["Source"], Any]) -> list[Any]:
        """Returns `fn` of each part of it, in its thread or process."""
        return [fn(self)]

    def close(self) -> None:
        """Ends the environments."""


class Parts(Source):
    """A source of several, each in a thread or a process of its own: it has `foreach_worker`."""

    def set_task(self, task: Any) -> None:
        self.foreach_worker(operator.methodcaller("set_task", task))

    def apply_task(self, fn: tasks.TaskFn, result: dict[str, Any], context: EnvContext) -> list[Any]:
        found = self.foreach_worker(operator.methodcaller("apply_task", fn, result, context))
        return [task for part in found for task in part]


def _of_the_inner(name: str) -> Any:
    return property(lambda self: getattr(self._source, name), lambda self, value: setattr(self._source, name, value))


class Wrapper(Source):
    """Hands every call on to `source`; a wrapper replaces those it is about."""

    columns = _of_the_inner("columns")
    infos = _of_the_inner("infos")
    reset_infos = _of_the_inner("reset_infos")
    blocks = _of_the_inner("blocks")
    device = _of_the_inner("device")
    worker_index = _of_the_inner("worker_index")
    recreated = _of_the_inner("recreated")

    def __init__(self, source: Source):
        self._source = source

    @property
    def metrics(self) -> dict[str, float]:
        return self._source.metrics

    def drain(self) -> dict[str, float]:
        return self._source.drain()

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        return self._source.next(actor, key)

    def reset(self, key: Key) -> None:
        self._source.reset(key)

    def discontinue(self) -> None:
        self._source.discontinue()

    def set_task(self, task: Any) -> None:
        self._source.set_task(task)

    def apply_task(self, fn: tasks.TaskFn, result: dict[str, Any], context: EnvContext) -> list[Any]:
        return self._source.apply_task(fn, result, context)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self._source.foreach_env(fn)

    def foreach_worker(self, fn: Callable[[Source], Any]) -> list[Any]:
        return self._source.foreach_worker(fn)

    def close(self) -> None:
        self._source.close()
