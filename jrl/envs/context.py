"""The user's own environments: how a name in `env.id` is found, and the EnvContext that it is called with."""

import contextlib
import dataclasses
import difflib
import inspect
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from typing import Any

from jrl.envs.limits import Limited
from jrl.gym.faults import FIRST_STEPS

CONFIG_NAMES = ("config", "env_config", "env_context", "context")  # of a first parameter that takes an EnvContext
DEFINITIONS = ("Definition", "MultiDefinition")  # of environments written in JAX, of one agent and of several
_KEPT_AS = "_jrl_context"  # attribute of an environment
ROLES = ("train", "eval", "data")
_BLOCKS = 8_192  # per role, of 65,536 seeds each: int32 holds those of four roles


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a vector of environments in a run: its role, its environments among all, and its process."""

    role: str = "train"  # or eval, or data: one role has no environment in common with the other
    index: int = 0  # nor have vectors of one role with different indices
    offset: int = 0  # environments of the same seed, role and index that other vectors have before this one
    worker_index: int = 0  # 0 in the process that learns, from 1 on in env runners
    num_workers: int = 0  # env runners in all


def seed_range(seed: int, role: str = "train", index: int = 0) -> int:
    """Returns the first seed of a vector; one of up to 65,536 environments shares none with another role or index.

    EnvPool's environment i of seed s is environment 0 of seed s + i: with seed + 1, an evaluation would replay the
    training environments. Indices that differ by a multiple of 8,192 share. All seeds fit int32.

    Raises:
      ValueError: unknown role.
    """
    if role not in ROLES:
        raise ValueError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    block = (seed * 2_654_435_761 + index) % _BLOCKS  # an odd factor: seeds that are close do not meet at close indices
    return (ROLES.index(role) * _BLOCKS + block) << 16


@dataclasses.dataclass(frozen=True)
class OnFailure:
    """Checks of Gymnasium environments, and what becomes of one that fails."""

    restart: bool = False  # it is made anew (`StepResult.failed` tells); False: the first failure ends the run
    step_timeout_s: float | None = None  # a step or reset in a worker process that takes longer has failed
    check_steps: int = FIRST_STEPS  # of each environment that are looked at closely: see `jrl.gym.faults`


TRAINING = Place()
ENDS_RUN = OnFailure()


class EnvContext(dict):
    """Options of an environment (`env.options`), and its place in the run.

    Attributes:
      worker_index: 0 in the main process, 1 .. num_workers in env runners.
      num_workers: how many env runners there are; also as `num_env_runners`.
      vector_index: which of the run's environments this is, counted over all vectors of its kind (of training, of
        evaluation).
      num_envs: of its vector.
      remote: it has a process of its own.
      in_evaluation: it is not trained on.
      seed: of its first reset; None where random numbers come from keys (environments written in JAX).
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

    def of(self, i: int) -> "EnvContext":
        """Returns the context of the i-th next environment of the vector, with its own copy of the options."""
        there = EnvContext(self)
        there.__dict__.update(self.__dict__)
        there.vector_index = self.vector_index + i
        there.seed = None if self.seed is None else self.seed + i
        return there


def of(env: Any) -> EnvContext | None:
    """Returns the context that a Gymnasium environment of a run was made with, as `foreach_env` hands it out."""
    return getattr(env, _KEPT_AS, None)


# ---------------------------------------------------------------- from a name to an environment


def takes_context(found: Callable[..., Any], *, creator: bool, options: dict[str, Any]) -> bool:
    """Returns whether a class or function is called with an EnvContext, rather than with the options as arguments.

    Args:
      found: what `env.id` names.
      creator: it was registered: a function of the context, whatever its parameter is called.
      options: an option of the parameter's name is an argument.
    """
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # of a builtin
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in kinds:
        return creator and bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    name = parameters[0].name
    return (creator and not inspect.isclass(found)) or (name in CONFIG_NAMES and name not in options)


def option_errors(
    id: str, found: Callable[..., Any], options: dict[str, Any], others: tuple[str, ...] = ()
) -> list[str]:
    """Returns faults in the options of a class or function, without calling it.

    Args:
      id: for the messages.
      found: what is called with the options as keyword arguments.
      others: names that are options, too.
    """
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # of a builtin
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {name: p for name, p in parameters.items() if p.kind in named}
    errors = []
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            if key not in known and key not in others:
                near = difflib.get_close_matches(key, [*others, *known], 1)
                takes = ", ".join([*others, *known])
                mend = f"did you mean {near[0]}?" if near else f"it takes {takes}" if takes else "it takes none"
                errors.append(f"env.options.{key}: {id} has no such option: {mend}")
    needed = [name for name, p in known.items() if p.default is p.empty and name not in options]
    return errors + [f"env.options.{name}: {id} needs it: give it a value" for name in needed]


def is_in_jax(found: Any) -> bool | None:
    """Returns whether `env.id` names an environment written in JAX; None where only a call would tell."""
    if type(found).__name__ in DEFINITIONS:
        return True
    if inspect.isclass(found) or not callable(found):
        return False
    try:
        result = typing.get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):  # names that are imported for type checkers only
        result = getattr(found, "__annotations__", {}).get("return")
    if result is None:
        return None
    return (result if isinstance(result, str) else getattr(result, "__name__", "")).endswith("Definition")


class NotAnEnvironment(Exception):
    """What was made is not one environment. `jrl.gym.exceptions.of_making` knows the class by its name."""


class SeveralAgents(Exception):
    """The environment that was made has several agents; the exception holds it, unless it is in another process."""

    def __init__(self, env: Any = None):
        super().__init__("it has several agents, which its class or its return annotation should say")
        self.env = env


def has_several(env: Any) -> bool:
    """Returns whether an environment has the members of one of several agents."""
    named = any(getattr(env, name, None) for name in ("possible_agents", "_agent_ids"))
    return named or callable(getattr(env, "observation_space", None))


NOT_ONE = "expected one environment, got {}: name the class or function of one, and set env.num_envs"


def is_vector(found: Any) -> bool:
    """Returns whether a class or an environment is a vector of Gymnasium, Stable-Baselines3 or EnvPool."""
    bases = found.__mro__ if inspect.isclass(found) else type(found).__mro__
    return any(base.__name__ in ("VectorEnv", "VecEnv", "EnvPoolMixin") for base in bases) or (
        hasattr(found, "num_envs") and hasattr(found, "single_observation_space")
    )


class Maker:
    """`maker(i)` makes environment i of a vector.

    Args:
      found: a class or function; with `by_context` of an EnvContext, else of the options as keyword arguments.
      context: of environment 0.
      horizon, soft_horizon: see `jrl.envs.limits`.
    """

    def __init__(
        self,
        found: Callable[..., Any],
        context: EnvContext,
        *,
        by_context: bool,
        horizon: int | None,
        soft_horizon: bool,
    ):
        self._found, self._context, self._by_context = found, context, by_context
        self.horizon, self._soft = horizon, soft_horizon

    def raw(self, i: int) -> Any:
        """Makes environment i, and does not look at it."""
        context = self._context.of(i)
        env = self._found(context) if self._by_context else self._found(**context)
        if is_vector(env) or is_vector(getattr(env, "unwrapped", env)):
            with contextlib.suppress(Exception):  # the vector is not needed
                env.close()
            raise NotAnEnvironment(NOT_ONE.format(f"a {type(env).__name__} of several"))
        with contextlib.suppress(AttributeError):  # one with __slots__
            setattr(env, _KEPT_AS, context)
        return env

    def __call__(self, i: int) -> Any:
        env = self.raw(i)
        if has_several(env):
            raise SeveralAgents(env)
        for name in ("observation_space", "action_space"):
            if not hasattr(env, name):
                what = getattr(self._found, "__qualname__", self._found)
                mend = ": set env.backend jax" if type(env).__name__ in DEFINITIONS else ""
                raise NotAnEnvironment(f"{what} gave a {type(env).__name__}, no Gymnasium environment: no {name}{mend}")
        return env if self.horizon is None else Limited(env, self.horizon, self._soft)


_pickling = threading.Lock()


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Lets cloudpickle write Makers by value, for a process that does not import jrl."""
    import cloudpickle

    modules = [sys.modules[cls.__module__] for cls in (Maker, Limited)]
    with _pickling:
        try:
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
