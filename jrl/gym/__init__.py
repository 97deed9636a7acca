"""Gymnasium environments without jax: what worker processes import. Contexts, faults, masks, memory, the worker."""

from typing import Any

FIRST_STEPS = 32  # steps of each environment that a run checks fully
DEFINITIONS = ("Definition", "MultiDefinition")  # classes of environments written in JAX
CONTEXT = "_jrl_context"  # attribute of an environment that holds its context
_KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")


def space_kind(space: Any) -> str:
    """Returns the name of a space's class, or of its first base class that is a known space."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


class EnvContext(dict):
    """Options of an environment (`env.options`), and its place in the run.

    Attributes:
      worker_index: 0 in the main process, 1 .. num_workers in env runners.
      num_workers: number of env runners; also as `num_env_runners`.
      vector_index: environment index, counted over all vectors of its role (training, evaluation).
      num_envs: number of environments in its vector.
      remote: whether the environment has a process of its own.
      in_evaluation: whether the environment is for evaluation.
      seed: seed of its first reset; None: random numbers come from keys (environments written in JAX).
    """

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        *,
        worker_index: int = 0,
        num_workers: int = 0,
        vector_index: int = 0,
        num_envs: int = 1,
        remote: bool = False,
        in_evaluation: bool = False,
        seed: int | None = None,
    ):
        super().__init__(options or {})
        self.worker_index, self.num_workers, self.vector_index = worker_index, num_workers, vector_index
        self.num_envs, self.remote, self.in_evaluation, self.seed = num_envs, remote, in_evaluation, seed

    @property
    def num_env_runners(self) -> int:
        return self.num_workers

    def with_offset(self, i: int) -> "EnvContext":
        """Returns the context of the i-th next environment of the vector, with its own copy of the options."""
        context = EnvContext(self)
        context.__dict__.update(self.__dict__)
        context.vector_index = self.vector_index + i
        context.seed = None if self.seed is None else self.seed + i
        return context


def of(env: Any) -> EnvContext | None:
    """Returns the context that a Gymnasium environment of a run was made with, for use in `foreach_env`."""
    return getattr(env, CONTEXT, None)
