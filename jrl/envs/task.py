"""Tasks: how difficult environments are, changed while a run goes on (curriculum learning).

    def harder(result, env, context):                  # custom.env_task
        return env.get_task() + (result["episode_return_mean"] > 0.9)

* Gymnasium: an environment with `get_task` and `set_task`, such as a `TaskSettableEnv`; they are called at the boundary
  of two rollouts, in the process where the environment lives.
* In a program: a `jrl.envs.jax_env.Definition` with a `task`. All environments have the same; setting it compiles
  nothing.
* EnvPool: its environments cannot be changed. A task is a dict of `env.options`, with which the pool is made anew.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jrl.envs.context import EnvContext
from jrl.envs.jax_env import described
from jrl.errors import InputError
from jrl.types import JaxEnv, PyTree

_MEND = "give it get_task() and set_task(task), as jrl.envs.task.TaskSettableEnv has"
TaskFn = Callable[[dict[str, Any], Any, Any], Any]  # (result, env, EnvContext) -> task; None: as it is


@functools.cache
def _task_settable_env() -> type:
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

    TaskSettableEnv.__module__, TaskSettableEnv.__qualname__ = __name__, "TaskSettableEnv"
    return TaskSettableEnv


def __getattr__(name: str) -> Any:
    if name == "TaskSettableEnv":  # made when it is asked for: Gymnasium is not imported before
        return _task_settable_env()
    raise AttributeError(f"module {__name__} has no attribute {name}")


class Handle:
    """Stand-in for environments that are part of a program, for curriculum functions: one for the whole vector."""

    def __init__(self, get: Callable[[], PyTree], set: Callable[[PyTree], None]):
        self._get, self._set = get, set

    @property
    def unwrapped(self) -> "Handle":
        return self

    def get_task(self) -> PyTree:
        """Returns the present task, with numbers as Python's."""
        return described(self._get())

    def set_task(self, task: PyTree) -> None:
        """Sets the task. Raises InputError for a task of another structure."""
        self._set(task)


# ---------------------------------------------------------------- before training


def check(env: Any) -> None:
    """Checks that the environments have a task that can be set, as EnvPool's do, which are made anew for another.

    Args:
      env: JaxEnv, Env or AsyncEnv, or a source with one of the latter.
    Raises:
      InputError: names the class and what it lacks.
    """
    if isinstance(env, JaxEnv):
        if env.pure and env.set_task is None:
            raise InputError(_no_task())
        return
    each = getattr(env, "foreach_env", None)
    if each is not None:
        for name in each(_lacking()):
            if name:
                raise InputError(f"env: {name} has no task to set: {_MEND}")


def _no_task() -> str:
    return (
        "env: these environments have no task to set: use one whose jrl.envs.jax_env.Definition has a `task`, such as "
        "Corridor-v0"
    )


# Functions for `foreach_env` are made inside others: pickling then takes their code, and worker processes do not import
# jrl, and with it jax, to find them.


def _lacking() -> Callable[[Any], str | None]:
    def fn(env):
        """Returns the name of a class that lacks a method, None if none does."""
        found = env if hasattr(env, "set_task") else getattr(env, "unwrapped", env)
        return None if hasattr(found, "set_task") and hasattr(found, "get_task") else type(found).__name__

    return fn


# ---------------------------------------------------------------- in a program


def set_in(state: Any, env: JaxEnv, task: PyTree) -> Any:
    """Returns the `rollout.unroll.UnrollState`, also stacked [D, ...], with that task set; a pure function.

    Raises:
      InputError: environments without a task, or a task of another structure.
    """
    if env.set_task is None:
        raise InputError(_no_task())
    return dataclasses.replace(state, env_state=env.set_task(state.env_state, task))


def get_in(state: Any, env: JaxEnv) -> PyTree:
    """Returns the task in a `rollout.unroll.UnrollState`, also stacked [D, ...]. Raises InputError: there is none."""
    if env.get_task is None:
        raise InputError(_no_task())
    return env.get_task(state.env_state)


def apply_in(state: Any, env: JaxEnv, fn: TaskFn, result: dict[str, Any], context: EnvContext) -> tuple[Any, Any]:
    """Does what `apply` does for environments without a source, and returns (state, the task that it has now)."""
    held = [state]

    def put(task: PyTree) -> None:
        held[0] = set_in(held[0], env, task)

    task = asked(fn, result, context, Handle(lambda: get_in(held[0], env), put))
    return held[0], task


def asked(fn: TaskFn, result: dict[str, Any], context: EnvContext, handle: Any) -> Any:
    """Returns the task after a curriculum function was asked, for environments that `handle` stands for."""
    task = fn(result, handle, context)
    if task is not None:
        handle.set_task(task)
    return handle.get_task()


# ---------------------------------------------------------------- from the host


def setter(task: Any) -> Callable[[Any], None]:
    """Returns a function for `foreach_env` that sets the task of one environment, behind its wrappers if need be."""

    def fn(env):
        found = env if hasattr(env, "set_task") else getattr(env, "unwrapped", env)
        found.set_task(task)

    return fn


def apply(source: Any, fn: TaskFn, result: dict[str, Any]) -> list[Any]:
    """Asks a curriculum function for the task of every environment, and sets it.

    Args:
      source: one vector's, with `foreach_env`.
      fn: (result, env, context) -> the next task, None for no change. `env` has get_task and set_task: the environment,
        or one Handle for all that are part of a program. It is called where the environment lives: it travels pickled.
      result: the latest row.
    Returns:
      The task that each environment has now, or each program.
    Raises:
      InputError: environments without a task, or a task that does not fit.
      RuntimeError: `fn` raised in another process.
    """
    check(source)

    def one(env: Any) -> Any:
        found = env if hasattr(env, "set_task") else getattr(env, "unwrapped", env)
        task = fn(result, found, getattr(env, "_jrl_context", {}))
        if task is not None:
            found.set_task(task)
        return found.get_task()

    return source.foreach_env(one)
