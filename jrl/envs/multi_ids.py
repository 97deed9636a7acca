"""Ids of multi-agent environments stepped on the host.

`pettingzoo:MODULE` names a PettingZoo module: `pettingzoo:mpe2.simple_spread_v3`, `pettingzoo:classic.tictactoe_v3`. A
user's class or function makes an object with the members of PettingZoo's or RLlib's interface; see
`jrl.gym.interfaces`.
"""

import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable
from typing import Any

from jrl import registry
from jrl.envs import context as contexts
from jrl.envs.backends import PETTINGZOO
from jrl.errors import cannot_import
from jrl.fields.env import EnvConfig
from jrl.gym.exceptions import format_line, is_environment_error
from jrl.types import InputError

OPTIONS = ("state", "turn_based")  # jrl's options, not passed to the environment
_BASES = ("ParallelEnv", "AECEnv", "MultiAgentEnv")
_LISTS = ("possible_agents", "_agent_ids")


def is_declared(id: str, options: dict[str, Any]) -> bool | None:
    """Return whether an id names a multi-agent environment (host or JaxMARL), without making it; None: unknown.

    A class is recognised by its bases and members, a function by its return annotation. None: no annotation.
    """
    if id.startswith((PETTINGZOO, "jaxmarl:")) and registry.registered(id) is None:
        return True
    found = _load(id)
    if found is None:
        return False
    if inspect.isclass(found):
        return _is_multi_agent_class(found) or _has_own_option(found, options)
    if _has_own_option(found, options):
        return True
    name = _return_type_name(found)
    return None if name is None else name in _BASES or any(base in name for base in _BASES)


def _load(id: str) -> Callable[..., Any] | None:
    from jrl.envs import gym_env

    try:
        return gym_env.load_class(id)
    except InputError:
        return None


def _has_own_option(found: Callable[..., Any], options: dict[str, Any]) -> bool:
    """Return whether an option of `OPTIONS` is given that the callable itself does not take."""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return False
    return any(name in options and name not in parameters for name in OPTIONS)


def _is_multi_agent_class(cls: type) -> bool:
    if any(base.__name__ in _BASES for base in cls.__mro__) or callable(getattr(cls, "observation_space", None)):
        return True
    if any(hasattr(cls, name) for name in (*_LISTS, "get_observation_space")):
        return True
    # attributes set in the constructor
    codes = [getattr(base.__dict__.get("__init__"), "__code__", None) for base in cls.__mro__]
    return any(name in code.co_names for code in codes if code is not None for name in _LISTS)


def _return_type_name(found: Callable[..., Any]) -> str | None:
    """Return the name of a function's return type, or of its first base in `_BASES`."""
    try:
        result = typing.get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):  # names imported under TYPE_CHECKING
        result = getattr(found, "__annotations__", {}).get("return")
    if result is None or result is Any:
        return None
    if inspect.isclass(result):
        return next((base.__name__ for base in result.__mro__ if base.__name__ in _BASES), None) or (
            _BASES[0] if _is_multi_agent_class(result) else result.__name__
        )
    return str(result)


# ---------------------------------------------------------------- options


def remove_own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the environment, without jrl's `OPTIONS`."""
    return {name: value for name, value in options.items() if name not in OPTIONS}


def check(id: str, options: dict[str, Any]) -> list[str]:
    """Return faults in the id and its options, without making an environment."""
    errors = [
        f"env.options.{name}: expected true or false, got {options[name]!r}"
        for name in OPTIONS
        if name in options and not isinstance(options[name], bool)
    ]
    from jrl.envs import gym_env

    if not id.startswith(PETTINGZOO):
        return errors + gym_env.check(id, remove_own_options(options))
    try:
        _load_function(id)
    except InputError as e:
        errors += e.errors
    return errors


# ---------------------------------------------------------------- making


def make_factory(cfg: EnvConfig, context: contexts.EnvContext) -> contexts.EnvFactory:
    from jrl.envs import gym_env

    by_context = False
    if cfg.id.startswith(PETTINGZOO) and registry.registered(cfg.id) is None:
        found = _load_function(cfg.id)
    else:
        loaded = gym_env.load_class(cfg.id)
        assert loaded is not None  # checked by `is_declared`
        found, creator = loaded, registry.registered(cfg.id) is not None
        by_context = contexts.takes_context(found, creator=creator, options=context)
    return contexts.EnvFactory(found, context, by_context=by_context, horizon=None, soft_horizon=False)


def _load_function(id: str) -> Callable[..., Any]:
    """Return the module's function that makes environments. Raises InputError: no such module or function."""
    name = id.removeprefix(PETTINGZOO).replace("/", ".")
    module = _import_module(id, name)
    for function in ("parallel_env", "env"):
        if callable(made := getattr(module, function, None)):
            return made
    raise InputError(f"env.id {id}: module {module.__name__} has neither parallel_env nor env: name another module")


def _import_module(id: str, name: str) -> Any:
    first = name.partition(".")[0]
    try:
        own_package = bool(first) and importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        own_package = False
    if not own_package and importlib.util.find_spec("pettingzoo") is None:
        fix = f"pip install {first}" if "." in name and first else "pip install pettingzoo"
        raise InputError(f"env.id {id}: neither {first or 'a module'} nor pettingzoo is installed: {fix}")
    full = name if own_package else f"pettingzoo.{name}"
    try:
        return importlib.import_module(full)
    except BaseException as e:
        if not is_environment_error(e):
            raise
        if isinstance(e, ModuleNotFoundError) and f"{full}.".startswith(f"{e.name}."):
            fix = "name a module such as mpe2.simple_spread_v3"
            raise InputError(f"env.id {id}: module {full} does not exist: {fix}") from e
        reason = cannot_import(full, e) if isinstance(e, ImportError) else format_line(e)
        raise InputError(f"env.id {id}: {reason}") from e
