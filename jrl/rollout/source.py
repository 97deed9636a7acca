"""Sources of rollouts: the base class, and the base class of wrappers."""

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jrl.envs.context import EnvContext
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.types import Episodes, Key, PyTree, Rollout

if TYPE_CHECKING:
    from jrl.envs import task as tasks

FAILURES = "env/failures"  # metric: number of environment failures so far; absent if no environment can fail


class Source:
    """Yields rollouts of the same columns.

    Attributes:
      columns: episode statistics; with several parts [K, ...].
      infos, reset_infos: environment infos of the latest rollout and of the first reset, see FromHost; None if not
        requested.
      blocks: parts of the latest rollout as other processes made them; None without other processes.
      device: device that acts; None if it belongs to another process.
      worker_index: index of the env runner; 0 in the learning process.
      recreated: env runners restarted since the last read; the reader empties it.
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
        """Returns metrics of the latest rollout by name, in addition to the episode statistics."""
        return self._metrics

    def drain(self) -> dict[str, float]:
        """Returns metrics of everything since the previous result row, and resets them."""
        return {}

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the next rollout, collected with `actor`, and the report on its episodes."""
        raise TypeError(f"{type(self).__name__}: expected a method next(actor, key), as every Source has")

    def like(self, actor: PyTree, key: Key) -> Rollout | None:
        """Returns the shapes and dtypes of the next rollout if they are known in advance, else None."""
        return None

    def reset(self, key: Key) -> None:
        """Resets all environments; `key` is used by environments written in JAX only."""
        raise InputError(f"reset: {type(self).__name__} has no environments to reset")

    def discontinue(self) -> None:
        """Marks the next rollout as not continuing the latest one."""

    def set_task(self, task: Any) -> None:
        """Sets the task of all environments, from the next step on.

        Raises:
          InputError: the environments have no task, or a task of another structure.
          RuntimeError: the environment's own `set_task` raised in another process.
        """
        from jrl.envs import task as tasks

        tasks.check(self)
        self.foreach_env(tasks.setter(task))

    def apply_task(self, fn: "tasks.TaskFn", result: dict[str, Any], context: EnvContext) -> list[Any]:
        """Calls a curriculum function for the next tasks and sets them, see `jrl.envs.task`.

        Args:
          fn: (result, env, context) -> next task, or None for no change. It is sent pickled to the environments.
          result: latest result row.
          context: context for environments in a program; other environments have their own.
        Returns:
          The present task of each environment or program.
        Raises:
          InputError: the environments have no task, or the task does not fit.
          RuntimeError: `fn` raised in another process.
        """
        from jrl.envs import task as tasks

        return tasks.apply(self, fn, result)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` for every environment, in column order. Raises InputError if they are not in Python."""
        raise InputError("foreach_env: expected environments that are Python objects, got environments in a program")

    def foreach_worker(self, fn: Callable[["Source"], Any]) -> list[Any]:
        """Returns `fn(part)` for each part, called in the part's thread or process."""
        return [fn(self)]

    def close(self) -> None:
        """Closes the environments."""


class Parts(Source):
    """A source of several parts, each in its own thread or process; subclasses define `foreach_worker`."""

    def set_task(self, task: Any) -> None:
        self.foreach_worker(operator.methodcaller("set_task", task))

    def apply_task(self, fn: "tasks.TaskFn", result: dict[str, Any], context: EnvContext) -> list[Any]:
        found = self.foreach_worker(operator.methodcaller("apply_task", fn, result, context))
        return [task for part in found for task in part]


class Wrapper(Source):
    """Delegates every call to `source`, except `like`; subclasses override some methods."""

    def __init__(self, source: Source):
        self._source = source


def _delegate(name: str) -> Any:
    return property(lambda self: getattr(self._source, name), lambda self, value: setattr(self._source, name, value))


for _name in (
    "columns", "infos", "reset_infos", "blocks", "device", "worker_index", "recreated", "metrics", "drain", "next",
    "reset", "discontinue", "set_task", "apply_task", "foreach_env", "foreach_worker", "close",
):  # fmt: skip
    setattr(Wrapper, _name, _delegate(_name))
