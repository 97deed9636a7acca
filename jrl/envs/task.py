"""Tasks: the difficulty of environments, changed during a run (curriculum learning).

    def harder(result, env, context):                  # custom.env_task
        return env.get_task() + (result["episode_return_mean"] > 0.9)

* Gymnasium: an environment with `get_task` and `set_task`, such as a `TaskSettableEnv`. They are called between two
  rollouts, in the environment's process.
* In a program: a `jrl.envs.jax_env.Definition` with a `task`. All environments share it; setting it compiles nothing.
* EnvPool: its environments cannot change. A task is a dict of `env.options`, with which the pool is made again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jrl.envs.context import EnvContext
from jrl.envs.jax_env import to_python
from jrl.errors import InputError
from jrl.types import JaxEnv, PyTree

_FIX = "give it get_task() and set_task(task), as jrl.envs.task.TaskSettableEnv has"
TaskFn = Callable[[dict[str, Any], Any, Any], Any]  # (result, env, EnvContext) -> task; None: unchanged


def __getattr__(name: str) -> Any:
    if name != "TaskSettableEnv":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    import gymnasium

    class TaskSettableEnv(gymnasium.Env):
        """A Gymnasium environment with a task, kept as `self.task`: `class Mine(TaskSettableEnv)`.

        Any environment with these two methods will do. A module that imports this class makes worker processes import
        jax.
        """

        task: Any = None

        def get_task(self) -> Any:
            return self.task

        def set_task(self, task: Any) -> None:
            self.task = task

    TaskSettableEnv.__qualname__ = name  # the name in this module, for pickle
    globals()[name] = TaskSettableEnv
    return TaskSettableEnv


class Handle:
    """Stand-in for environments inside a program, passed to curriculum functions: one for the whole vector."""

    def __init__(self, get: Callable[[], PyTree], set: Callable[[PyTree], None]):
        self._get, self._set = get, set

    @property
    def unwrapped(self) -> "Handle":
        return self

    def get_task(self) -> PyTree:
        """Returns the task, with numbers as Python's."""
        return to_python(self._get())

    def set_task(self, task: PyTree) -> None:
        """Sets the task. Raises InputError: another structure."""
        self._set(task)


# ---------------------------------------------------------------- before training


def check(env: Any) -> None:
    """Checks that environments have a task that can be set; EnvPool's pass, because they are made again.

    Args:
      env: JaxEnv, Env or AsyncEnv, or a source with one of the latter.
    Raises:
      InputError: the environments have no task; names the class.
    """
    if isinstance(env, JaxEnv):
        if env.pure and env.set_task is None:
            raise InputError(_no_task())
        return
    each = getattr(env, "foreach_env", None)
    if each is not None:
        for name in each(_missing_task()):
            if name:
                raise InputError(f"env: {name} has no task to set: {_FIX}")


def _no_task() -> str:
    return (
        "env: these environments have no task to set: use an environment whose jrl.envs.jax_env.Definition has a "
        "`task`, such as Corridor-v0, and leave env.randomize out"
    )


# Functions for `foreach_env` are local functions: they are pickled by value, so that worker processes need not import
# jrl and jax.


def _missing_task() -> Callable[[Any], str | None]:
    def fn(env):
        """Returns the name of a class without task methods; None: it has them."""
        found = env if hasattr(env, "set_task") else getattr(env, "unwrapped", env)
        return None if hasattr(found, "set_task") and hasattr(found, "get_task") else type(found).__name__

    return fn


# ---------------------------------------------------------------- in a program


def set_in(state: Any, env: JaxEnv, task: PyTree) -> Any:
    """Returns the `rollout.unroll.UnrollState`, optionally stacked [D, ...], with the task set; a pure function.

    Raises:
      InputError: environments without a task, or a task of another structure.
    """
    if env.set_task is None:
        raise InputError(_no_task())
    return dataclasses.replace(state, env_state=env.set_task(state.env_state, task))


def get_in(state: Any, env: JaxEnv) -> PyTree:
    """Returns the task in a `rollout.unroll.UnrollState`, optionally stacked [D, ...]. Raises InputError: no task."""
    if env.get_task is None:
        raise InputError(_no_task())
    return env.get_task(state.env_state)


def apply_in(state: Any, env: JaxEnv, fn: TaskFn, result: dict[str, Any], context: EnvContext) -> tuple[Any, Any]:
    """Does as `apply` for environments inside a program; returns (state, its task)."""

    def set_task(task: PyTree) -> None:
        nonlocal state
        state = set_in(state, env, task)

    task = call_task_fn(fn, result, context, Handle(lambda: get_in(state, env), set_task))
    return state, task


def call_task_fn(fn: TaskFn, result: dict[str, Any], context: EnvContext, handle: Any) -> Any:
    """Calls a curriculum function, set the task that it returns, and return the current task."""
    task = fn(result, handle, context)
    if task is not None:
        handle.set_task(task)
    return handle.get_task()


# ---------------------------------------------------------------- from the host


def setter(task: Any) -> Callable[[Any], None]:
    """Returns a function for `foreach_env` that sets the task of one environment, inside its wrappers if needed."""

    def fn(env):
        found = env if hasattr(env, "set_task") else getattr(env, "unwrapped", env)
        found.set_task(task)

    return fn


def apply(source: Any, fn: TaskFn, result: dict[str, Any]) -> list[Any]:
    """Calls a curriculum function for every environment, and set the tasks.

    Args:
      source: source of one vector, with `foreach_env`.
      fn: (result, env, context) -> the next task; None: unchanged. `env` has get_task and set_task: the environment, or
        one Handle for a program. The function is pickled and called in the environment's process.
      result: latest result row.
    Returns:
      The current task of each environment, or of each program.
    Raises:
      InputError: environments without a task, or a task that does not fit.
      RuntimeError: `fn` raised in another process.
    """
    check(source)

    def update(env: Any) -> Any:
        found = env if hasattr(env, "set_task") else getattr(env, "unwrapped", env)
        task = fn(result, found, getattr(env, "_jrl_context", {}))
        if task is not None:
            found.set_task(task)
        return found.get_task()

    return source.foreach_env(update)
