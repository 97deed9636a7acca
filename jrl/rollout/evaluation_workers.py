"""What a custom evaluation function plays with: the environments of evaluation, and the weights in them.

def corridors(algorithm, evaluation_workers):
    evaluation_workers.foreach_env(lambda env: env.unwrapped.set_length(7))
    return {"long": evaluation_workers.play(10).returns.mean()}
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jrl.errors import InputError
from jrl.rollout.evaluate import LENGTH, Evaluation, Goal, Here, Until
from jrl.rollout.ray_evaluate import Runners
from jrl.types import Key, PyTree


class EvaluationWorkers:
    """The environments of evaluation: `algorithm.evaluation_workers`.

    Args:
      group: who plays, made if need be.
      num_envs: over all processes.
      timeout_s: of one `play` or `sample`; None: without.
    """

    def __init__(self, group: Callable[[], Here | Runners], *, num_envs: int, timeout_s: float | None):
        self._group, self._num_envs, self._timeout_s = group, num_envs, timeout_s
        self._weights: tuple[PyTree, Key] | None = None
        self._plays = 0  # with these weights

    def foreach_worker(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn` of the source of each process that plays, in its process, between two blocks of rows."""
        return self._group().foreach_worker(fn)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn` of each environment. Raises InputError where they are not Python objects."""
        return self._group().foreach_env(fn)

    def play(self, episodes: int) -> Evaluation:
        """Exactly so many episodes from a reset: `returns` [N] f32, `lengths` [N] i32, and `summary()`.

        Raises:
          RuntimeError: no evaluation is under way, so that there are no weights.
        """
        return self._play(Goal(episodes))

    def sample(self, num_rollouts: int = 1) -> Evaluation:
        """The episodes that end while the environments make 64 * `num_rollouts` steps each, on average, going on from
        where they are. Errors as `play`.
        """
        return self._play(Goal(LENGTH * num_rollouts * self._num_envs, "timesteps", reset=False))

    def begin(self, actor: PyTree, key: Key) -> None:
        """The weights of an evaluation, and what its random numbers follow from."""
        self._weights, self._plays = (actor, key), 0

    def end(self) -> None:
        """The weights are the learner's again, which may overwrite them."""
        self._weights = None

    def _play(self, goal: Goal) -> Evaluation:
        if self._weights is None:
            raise RuntimeError("evaluation_workers has weights to play with while a custom evaluation function runs")
        actor, key = self._weights
        if self._plays:
            key = jax.random.fold_in(key, 2**31 + self._plays)
        self._plays += 1
        group = self._group()
        found = group.play(actor, key, goal, Until(self._timeout_s))
        if group.missing:
            warnings.warn(
                f"evaluation.timeout_s: {group.missing} {goal.unit} are missing after {self._timeout_s:g} s",
                RuntimeWarning,
                stacklevel=3,
            )
        return found


def numbers(found: Any) -> dict[str, float]:
    """The numbers of a custom evaluation function's result, nested ones as `a/b`.

    Raises:
      InputError: it is not a mapping of numbers.
    """
    if not isinstance(found, Mapping):
        raise InputError(f"custom.evaluation: expected a mapping of names to numbers, got {type(found).__name__}")
    row: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            row |= {f"{name}/{inner}": x for inner, x in numbers(value).items()}
            continue
        if np.ndim(value) != 0 or np.asarray(value).dtype.kind not in "buif":
            raise InputError(f"custom.evaluation: {name} must be a number, got {value!r}")
        row[str(name)] = np.asarray(value).item()
    return row
