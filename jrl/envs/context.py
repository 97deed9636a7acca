"""Users' environments: loading `env.id`, and the EnvContext passed to it."""

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
from jrl.gym import FIRST_STEPS

CONFIG_NAMES = ("config", "env_config", "env_context", "context")  # names of a first parameter that is an EnvContext
DEFINITIONS = ("Definition", "MultiDefinition")  # classes of environments written in JAX
_ATTRIBUTE = "_jrl_context"  # attribute of an environment that holds its context
ROLES = ("train", "eval", "data")
_BLOCKS = 8_192  # per role, 65,536 seeds each: four roles fit int32


@dataclasses.dataclass(frozen=True)
class Place:
    """A vector's place in the run: role, environment indices, and process."""

    role: str = "train"  # train, eval or data; different roles have different seeds
    index: int = 0  # vectors of one role with different indices have different seeds
    offset: int = 0  # number of environments that earlier vectors of the same seed, role and index have
    worker_index: int = 0  # 0 in the learner process, 1, 2, ... in env runners
    num_workers: int = 0  # number of env runners


def seed_range(seed: int, role: str = "train", index: int = 0) -> int:
    """Return the first seed of a vector of up to 65,536 environments; other roles and indices share no seed with it.

    EnvPool's environment i of seed s is environment 0 of seed s + i: with seed + 1, an evaluation would replay the
    training environments. Indices that differ by a multiple of 8,192 share seeds. All seeds fit int32.

    Raises:
      ValueError: unknown role.
    """
    if role not in ROLES:
        raise ValueError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    block = (seed * 2_654_435_761 + index) % _BLOCKS  # odd factor: close seeds do not collide at close indices
    return (ROLES.index(role) * _BLOCKS + block) << 16


@dataclasses.dataclass(frozen=True)
class OnFailure:
    """Checks of Gymnasium environments, and the handling of failures."""

    restart: bool = False  # make a failed environment again (see `StepResult.failed`); False: a failure ends the run
    step_timeout_s: float | None = None  # time limit of a step or reset in a worker process
    check_steps: int = FIRST_STEPS  # number of first steps per environment that get all checks: see `jrl.gym.faults`


TRAINING = Place()
ENDS_RUN = OnFailure()


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
        """Return the context of the i-th next environment of the vector, with its own copy of the options."""
        context = EnvContext(self)
        context.__dict__.update(self.__dict__)
        context.vector_index = self.vector_index + i
        context.seed = None if self.seed is None else self.seed + i
        return context


def of(env: Any) -> EnvContext | None:
    """Return the context that a Gymnasium environment of a run was made with, for use in `foreach_env`."""
    return getattr(env, _ATTRIBUTE, None)


# ---------------------------------------------------------------- calls of users' classes and functions


def takes_context(found: Callable[..., Any], *, creator: bool, options: dict[str, Any]) -> bool:
    """Return whether a class or function is called with an EnvContext; otherwise with the options as keyword arguments.

    Args:
      found: object named by `env.id`.
      creator: whether it was registered; a registered function always gets the context.
      options: options of the environment; an option with the parameter's name is passed as a keyword argument.
    """
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # a builtin has no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in kinds:
        return creator and bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    name = parameters[0].name
    return (creator and not inspect.isclass(found)) or (name in CONFIG_NAMES and name not in options)


def check_options(
    id: str, found: Callable[..., Any], options: dict[str, Any], others: tuple[str, ...] = ()
) -> list[str]:
    """Return faults in the options of a class or function, without calling it.

    Args:
      id: environment id, for messages.
      found: callable that gets the options as keyword arguments.
      others: further valid option names.
    """
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {name: p for name, p in parameters.items() if p.kind in named}
    errors = []
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            if key not in known and key not in others:
                near = difflib.get_close_matches(key, [*others, *known], 1)
                takes = ", ".join([*others, *known])
                fix = f"did you mean {near[0]}?" if near else f"it takes {takes}" if takes else "it takes none"
                errors.append(f"env.options.{key}: {id} has no such option: {fix}")
    needed = [name for name, p in known.items() if p.default is p.empty and name not in options]
    return errors + [f"env.options.{name}: {id} needs a value: set it" for name in needed]


def is_in_jax(found: Any) -> bool | None:
    """Return whether an object named by `env.id` makes environments written in JAX; None: only a call would tell."""
    if type(found).__name__ in DEFINITIONS:
        return True
    if inspect.isclass(found) or not callable(found):
        return False
    try:
        result = typing.get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):  # names imported under TYPE_CHECKING
        result = getattr(found, "__annotations__", {}).get("return")
    if result is None:
        return None
    return (result if isinstance(result, str) else getattr(result, "__name__", "")).endswith("Definition")


class NotAnEnvironment(Exception):
    """The user's function did not return one environment. `jrl.gym.exceptions` recognises this class by its name."""


class SeveralAgents(Exception):
    """The new environment has several agents. The exception holds it, unless it is in another process."""

    def __init__(self, env: Any = None):
        super().__init__("the environment has several agents: declare them in its class or return annotation")
        self.env = env


def has_agents(env: Any) -> bool:
    """Return whether an object has the members of a multi-agent environment."""
    named = any(getattr(env, name, None) for name in ("possible_agents", "_agent_ids"))
    return named or callable(getattr(env, "observation_space", None))


NOT_ONE = "expected one environment, got {}: name the class or function of one environment, and set env.num_envs"


def is_vector(found: Any) -> bool:
    """Return whether a class or object is a vector environment of Gymnasium, Stable-Baselines3 or EnvPool."""
    bases = found.__mro__ if inspect.isclass(found) else type(found).__mro__
    return any(base.__name__ in ("VectorEnv", "VecEnv", "EnvPoolMixin") for base in bases) or (
        hasattr(found, "num_envs") and hasattr(found, "single_observation_space")
    )


class EnvFactory:
    """`factory(i)` makes environment i of a vector.

    Args:
      found: class or function; called with an EnvContext if `by_context`, else with the options as keyword arguments.
      context: context of environment 0.
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
        """Make environment i without checks of its members."""
        context = self._context.with_offset(i)
        env = self._found(context) if self._by_context else self._found(**context)
        if is_vector(env) or is_vector(getattr(env, "unwrapped", env)):
            with contextlib.suppress(Exception):  # the error below matters more
                env.close()
            raise NotAnEnvironment(NOT_ONE.format(f"a {type(env).__name__} of several"))
        with contextlib.suppress(AttributeError):  # a class with __slots__
            setattr(env, _ATTRIBUTE, context)
        return env

    def __call__(self, i: int) -> Any:
        env = self.raw(i)
        if has_agents(env):
            raise SeveralAgents(env)
        for name in ("observation_space", "action_space"):
            if not hasattr(env, name):
                what = getattr(self._found, "__qualname__", self._found)
                fix = ": set env.backend jax" if type(env).__name__ in DEFINITIONS else ""
                got = f"a {type(env).__name__} without {name}"
                raise NotAnEnvironment(f"{what} returned {got}, not a Gymnasium environment{fix}")
        return env if self.horizon is None else Limited(env, self.horizon, self._soft)


_pickling = threading.Lock()


@contextlib.contextmanager
def pickle_by_value() -> Iterator[None]:
    """Let cloudpickle write factories by value, for a process that does not import jrl."""
    import cloudpickle

    modules = [sys.modules[cls.__module__] for cls in (EnvFactory, Limited)]
    with _pickling:
        try:
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
