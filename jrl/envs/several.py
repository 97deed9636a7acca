"""Ids of environments of several agents that step on the host, and how these are made.

`pettingzoo:MODULE` names a module of PettingZoo's kind: `pettingzoo:mpe2.simple_spread_v3`,
`pettingzoo:classic.tictactoe_v3`. A class or function of the user's gives an object with PettingZoo's members or with
those of RLlib's MultiAgentEnv; see `jrl.gym.plays`.
"""

import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable
from typing import Any

from jrl import registry
from jrl.envs import context as contexts
from jrl.envs import jaxmarl_env
from jrl.errors import cannot_import
from jrl.fields.env import EnvConfig
from jrl.gym.exceptions import line, own
from jrl.types import InputError

PREFIX = "pettingzoo:"
OPTIONS = ("state", "turn_based")  # of ours, beside those of the environment
_BASES = ("ParallelEnv", "AECEnv", "MultiAgentEnv")
_LISTS = ("possible_agents", "_agent_ids")


def declared(id: str, options: dict[str, Any]) -> bool | None:
    """Returns whether `id`, stepped on the host or JaxMARL's, has several agents, without making one.

    A class is known by its bases and members, a function by its return annotation; None where it has none.
    """
    if id.startswith((PREFIX, jaxmarl_env.PREFIX)) and registry.registered(id) is None:
        return True
    found = _load(id)
    if found is None:
        return False
    if inspect.isclass(found):
        return _is_class_of_several(found) or _asked(found, options)
    if _asked(found, options):
        return True
    name = _returned(found)
    return None if name is None else name in _BASES or any(base in name for base in _BASES)


def _load(id: str) -> Callable[..., Any] | None:
    from jrl.envs import gym_env

    try:
        return gym_env.load_class(id)
    except InputError:
        return None


def _asked(found: Callable[..., Any], options: dict[str, Any]) -> bool:
    """Returns whether an option of `OPTIONS` is not taken by the callable itself."""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # of a builtin
        return False
    return any(name in options and name not in parameters for name in OPTIONS)


def _is_class_of_several(cls: type) -> bool:
    if any(base.__name__ in _BASES for base in cls.__mro__) or callable(getattr(cls, "observation_space", None)):
        return True
    if any(hasattr(cls, name) for name in (*_LISTS, "get_observation_space")):
        return True
    # names that its constructor gives values to
    codes = [getattr(base.__dict__.get("__init__"), "__code__", None) for base in cls.__mro__]
    return any(name in code.co_names for code in codes if code is not None for name in _LISTS)


def _returned(found: Callable[..., Any]) -> str | None:
    """Returns the name of a function's declared result, or the first such name of its bases."""
    try:
        result = typing.get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):  # names that are imported for type checkers only
        result = getattr(found, "__annotations__", {}).get("return")
    if result is None or result is Any:
        return None
    if inspect.isclass(result):
        return next((base.__name__ for base in result.__mro__ if base.__name__ in _BASES), None) or (
            _BASES[0] if _is_class_of_several(result) else result.__name__
        )
    return str(result)


# ---------------------------------------------------------------- options


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the environment gets: without ours."""
    return {name: value for name, value in options.items() if name not in OPTIONS}


def check(id: str, options: dict[str, Any]) -> list[str]:
    """Returns faults in the id and its options that can be found without making an environment."""
    errors = [
        f"env.options.{name}: expected true or false, got {options[name]!r}"
        for name in OPTIONS
        if name in options and not isinstance(options[name], bool)
    ]
    from jrl.envs import gym_env

    if not id.startswith(PREFIX):
        return errors + gym_env.check(id, own_options(options))
    try:
        _maker_of_module(id)
    except InputError as e:
        errors += e.errors
    return errors


# ---------------------------------------------------------------- making


def maker(cfg: EnvConfig, context: contexts.EnvContext) -> contexts.Maker:
    """Returns the Maker of the environments."""
    from jrl.envs import gym_env

    by_context = False
    if cfg.id.startswith(PREFIX) and registry.registered(cfg.id) is None:
        found = _maker_of_module(cfg.id)
    else:
        loaded = gym_env.load_class(cfg.id)
        assert loaded is not None  # who calls has looked
        found, creator = loaded, registry.registered(cfg.id) is not None
        by_context = contexts.takes_context(found, creator=creator, options=context)
    return contexts.Maker(found, context, by_context=by_context, horizon=None, soft_horizon=False)


def _maker_of_module(id: str) -> Callable[..., Any]:
    """Raises InputError: no such module, or it makes no environments."""
    name = id.removeprefix(PREFIX).replace("/", ".")
    module = _module(id, name)
    for function in ("parallel_env", "env"):
        if callable(made := getattr(module, function, None)):
            return made
    raise InputError(f"env.id {id}: module {module.__name__} has neither parallel_env nor env: name one that has")


def _module(id: str, name: str) -> Any:
    first = name.partition(".")[0]
    try:
        own_package = bool(first) and importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        own_package = False
    if not own_package and importlib.util.find_spec("pettingzoo") is None:
        mend = f"pip install {first}" if "." in name and first else "pip install pettingzoo"
        raise InputError(f"env.id {id}: neither {first or 'a module'} nor pettingzoo is installed: {mend}")
    full = name if own_package else f"pettingzoo.{name}"
    try:
        return importlib.import_module(full)
    except BaseException as e:
        if not own(e):
            raise
        if isinstance(e, ModuleNotFoundError) and f"{full}.".startswith(f"{e.name}."):
            mend = "expected one such as mpe2.simple_spread_v3"
            raise InputError(f"env.id {id}: there is no module {full}: {mend}") from e
        raise InputError(f"env.id {id}: {cannot_import(full, e) if isinstance(e, ImportError) else line(e)}") from e
