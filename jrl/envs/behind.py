"""Host environments seen through a view, which changes actions on their way in and results on their way out.

A view is written once, for environments that wait for each other and for those that do not.
"""

from typing import Any

import jax
import numpy as np

from jrl.types import Array, AsyncEnv, EnvSpec, PyTree, StepResult


class View:
    """Changes what passes between a policy and environments on the host; this one changes nothing.

    `rows` [n] i32 are the environments, by number, of whom something is; None: all of them, in their order. Of several
    agents, an environment has the columns of all of them.
    """

    def __init__(self, spec: EnvSpec):
        self.spec = spec  # what the policy sees

    def begin(self) -> None:
        """Forgets what has been: all environments are about to be reset."""

    def first(self, obs: PyTree) -> PyTree:
        """Returns what is seen after that reset, where environments wait for each other; else `told` is."""
        return obs

    def taken(self, action: PyTree, rows: Array | None) -> PyTree:
        """Returns the actions that the environments get."""
        return action

    def told(self, result: StepResult, rows: Array | None) -> StepResult:
        """Returns the results that the policy gets."""
        return result


def through(env: Any, view: View) -> Any:
    """Returns `env`, an Env or AsyncEnv, seen through a view."""
    return _Async(env, view) if isinstance(env, AsyncEnv) else _Waiting(env, view)


class _Behind:
    """A host environment behind a view; its further members are its own."""

    def __init__(self, env: Any, view: View):
        self._env, self._view, self.spec = env, view, view.spec

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def close(self) -> None:
        self._env.close()


class _Waiting(_Behind):
    def reset(self) -> PyTree:
        self._view.begin()
        return self._view.first(self._env.reset())

    def step(self, action: PyTree) -> StepResult:
        return self._view.told(self._env.step(self._view.taken(action, None)), None)


class _Async(_Behind):
    def __init__(self, env: AsyncEnv, view: View):
        super().__init__(env, view)
        self.batch_size, self.least = env.batch_size, env.least

    def reset(self) -> None:
        self._view.begin()
        self._env.reset()

    def send(self, action: PyTree, env_id: Array) -> None:
        self._env.send(self._view.taken(action, env_id), env_id)

    def recv(self) -> tuple[Array, StepResult]:
        env_id, result = self._env.recv()
        return env_id, self._view.told(result, env_id)


# ---------------------------------------------------------------- the columns of some


def index(rows: Array, count: int) -> np.ndarray:
    """Returns the columns of environments, where each has `count` side by side.

    >>> index(np.array([2, 0]), 3)
    array([6, 7, 8, 0, 1, 2])
    """
    rows = np.asarray(rows)
    return rows if count == 1 else (rows[:, None] * count + np.arange(count)).reshape(-1)


def part(tree: PyTree, rows: Array | None, games: int) -> PyTree:
    """Returns the columns of the environments `rows` [n], of arrays [G * c, *]: copies [n * c, *]."""
    return tree if rows is None else jax.tree.map(lambda x: x[index(rows, len(x) // games)], tree)


def put(tree: PyTree, rows: Array | None, new: PyTree, games: int) -> PyTree:
    """Writes the columns of the environments `rows` into arrays [G * c, *], and returns these; `new` for all."""
    if rows is None:
        return new
    for x, own in zip(jax.tree.leaves(tree), jax.tree.leaves(new), strict=True):
        x[index(rows, len(x) // games)] = own
    return tree
