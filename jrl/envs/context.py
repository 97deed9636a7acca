"""An environment's place in the run, its context, and calls of users' classes and functions."""

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jrl.fields.env import EnvConfig
from jrl.gym import DEFINITIONS, FIRST_STEPS, EnvContext, of

__all__ = ["ROLES", "EnvContext", "OnFailure", "Place", "check_options", "of", "seed_range", "takes_context"]

PETTINGZOO = "pettingzoo:"  # prefix of ids of the gymnasium backend
CONFIG_NAMES = ("config", "env_config", "env_context", "context")  # names of a first parameter that is an EnvContext
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
    """Returns the first seed of a vector of up to 65,536 environments; other roles and indices share no seed with it.

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
    report: Callable[[Any], None] | None = None  # gets the faults of all steps, which then do not end the run


TRAINING = Place()
ENDS_RUN = OnFailure()


# ---------------------------------------------------------------- calls of users' classes and functions


def parameters_of(found: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a class or function; None: a builtin without signature."""
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return None


def return_type(found: Callable[..., Any]) -> Any:
    """Returns the return annotation of a function, which can be text; None: it has none."""
    try:
        return typing.get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):  # names imported under TYPE_CHECKING
        return getattr(found, "__annotations__", {}).get("return")


def takes_context(found: Callable[..., Any], *, creator: bool, options: dict[str, Any]) -> bool:
    """Returns whether a class or function is called with an EnvContext; otherwise with the options as arguments.

    Args:
      found: object named by `env.id`.
      creator: whether it was registered; a registered function always gets the context.
      options: options of the environment; an option with the parameter's name is passed as a keyword argument.
    """
    first = next(iter((parameters_of(found) or {}).values()), None)
    if first is None:
        return False
    if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return creator and first.kind is first.VAR_POSITIONAL
    return (creator and not inspect.isclass(found)) or (first.name in CONFIG_NAMES and first.name not in options)


def check_options(
    id: str, found: Callable[..., Any], options: dict[str, Any], others: tuple[str, ...] = ()
) -> list[str]:
    """Returns faults in the options of a class or function, without calling it.

    Args:
      id: environment id, for messages.
      found: callable that gets the options as keyword arguments.
      others: further valid option names.
    """
    if (parameters := parameters_of(found)) is None:
        return []
    known = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    errors = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            if key not in known and key not in others:
                near = difflib.get_close_matches(key, [*others, *known], 1)
                takes = ", ".join([*others, *known])
                fix = f"did you mean {near[0]}?" if near else f"it takes {takes}" if takes else "it takes none"
                errors.append(f"env.options.{key}: {id} has no such option: {fix}")
    needed = [name for name, p in known.items() if p.default is p.empty and name not in options]
    return errors + [f"env.options.{name}: {id} needs a value: set it" for name in needed]


def is_in_jax(found: Any) -> bool | None:
    """Returns whether an object named by `env.id` makes environments written in JAX; None: only a call would tell."""
    if type(found).__name__ in DEFINITIONS:
        return True
    if inspect.isclass(found) or not callable(found):
        return False
    if (result := return_type(found)) is None:
        return None
    return (result if isinstance(result, str) else getattr(result, "__name__", "")).endswith("Definition")


def agent_faults(cfg: EnvConfig) -> list[str]:
    """Returns the options of a section that environments of several agents do not have."""
    given = {"soft_horizon": cfg.soft_horizon, "on_nonfinite": cfg.on_nonfinite is not None}
    given |= {"action_repeat": cfg.action_repeat > 1, "action_chunk": cfg.action_chunk > 1}
    return [f"env.{key}: {cfg.id} has several agents, and {_WITH_AGENTS[key]}" for key, x in given.items() if x]


_WITH_AGENTS = {
    "soft_horizon": "a game ends for all of them: leave it out; env.horizon ends the game for all agents",
    "action_repeat": "agents may end or wait for a turn before a repetition ends: leave it out",
    "action_chunk": "agents may end or wait for a turn before a chunk ends: leave it out",
    "on_nonfinite": "only environments of one agent are checked: leave it out",
}
