"""Ids of the gymnasium backend: Gymnasium's, the user's classes and functions, and PettingZoo's modules.

`pettingzoo:MODULE` names a PettingZoo module: `pettingzoo:mpe2.simple_spread_v3`, `pettingzoo:classic.tictactoe_v3`. A
user's class or function makes a Gymnasium environment, or an object with the members of PettingZoo's or RLlib's
interface; see `jrl.gym.interfaces`.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from jrl import registry
from jrl.envs.context import (
    PETTINGZOO,
    TRAINING,
    EnvContext,
    OnFailure,
    Place,
    agent_faults,
    check_options,
    parameters_of,
    return_type,
    takes_context,
)
from jrl.errors import cannot_import
from jrl.fields.env import EnvConfig
from jrl.gym.exceptions import SeveralAgents, format_line, is_environment_error, suggest_install
from jrl.gym.factory import NOT_ONE, EnvFactory, is_vector
from jrl.types import InputError

AGENT_OPTIONS = ("state", "turn_based")  # jrl's options of several agents, not passed to the environment
_BASES = ("ParallelEnv", "AECEnv", "MultiAgentEnv")
_LISTS = ("possible_agents", "_agent_ids")


def ids() -> tuple[str, ...]:
    """Returns every registered id; empty without Gymnasium."""
    try:
        import gymnasium
    except ImportError:
        return ()
    return tuple(gymnasium.registry)


def load_class(id: str) -> Callable[..., Any] | None:
    """Returns the object that `package.module:Name` names or that is registered under the id; None: another form of id.

    Raises:
      InputError: the module or name does not exist.
    """
    if registry.registered(id) is not None or id.startswith("local:"):
        return registry.load(id, "env.id")
    module, colon, name = id.partition(":")
    if not colon:
        return None
    try:
        found = importlib.import_module(module)
    except BaseException as e:
        if not is_environment_error(e):
            raise
        missing = isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")
        # an error inside the module is reported with its line
        reason = e if missing or not module else format_line(e) + suggest_install(e)
        if missing and module:
            reason = f"{e}: start the command in the folder of {module.partition('.')[0]}, or install it"
        raise InputError(f"env.id {id}: cannot import {module or 'a module without a name'}: {reason}") from e
    if not hasattr(found, name):
        # Gymnasium's own `module:Id-v0` form: importing the module registers the id
        import gymnasium

        if name in gymnasium.registry:
            return None
        raise InputError(f"env.id {id}: module {module} has no {name}: name a class or function of that module")
    return getattr(found, name)


def _is_pettingzoo(id: str) -> bool:
    return id.startswith(PETTINGZOO) and registry.registered(id) is None


def _is_registered(id: str) -> bool:
    return registry.registered(id) is not None


# ---------------------------------------------------------------- several agents


def is_declared(id: str, options: dict[str, Any]) -> bool | None:
    """Returns whether an id names a multi-agent environment, without making it; None: unknown.

    A class is recognised by its bases and members, a function by its return annotation. None: no annotation.
    """
    if _is_pettingzoo(id):
        return True
    try:
        found = load_class(id)
    except InputError:
        return False
    if found is None:
        return False
    # an option of jrl's that the callable itself does not take
    parameters = parameters_of(found)
    if parameters is not None and any(name in options and name not in parameters for name in AGENT_OPTIONS):
        return True
    if inspect.isclass(found):
        return _is_multi_agent_class(found)
    result = return_type(found)
    if result is None or result is Any:
        return None
    if inspect.isclass(result):
        return _is_multi_agent_class(result)
    return any(base in str(result) for base in _BASES)


def _is_multi_agent_class(cls: type) -> bool:
    if any(base.__name__ in _BASES for base in cls.__mro__) or callable(getattr(cls, "observation_space", None)):
        return True
    if any(hasattr(cls, name) for name in (*_LISTS, "get_observation_space")):
        return True
    # attributes set in the constructor
    codes = [getattr(base.__dict__.get("__init__"), "__code__", None) for base in cls.__mro__]
    return any(name in code.co_names for code in codes if code is not None for name in _LISTS)


def has_agents(cfg: EnvConfig) -> bool:
    """Returns whether the environments have several agents; False if only making one would tell."""
    return is_declared(cfg.id, cfg.options) is True


def _own_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in AGENT_OPTIONS}


# ---------------------------------------------------------------- the backend


def check(cfg: EnvConfig) -> list[str]:
    """Returns faults in the id and its options, without making an environment."""
    id, options, errors = cfg.id, cfg.options, list[str]()
    if has_agents(cfg):
        errors += [
            f"env.options.{name}: expected true or false, got {options[name]!r}"
            for name in AGENT_OPTIONS
            if name in options and not isinstance(options[name], bool)
        ]
        options = _own_options(options)
    try:
        found = _load_pettingzoo(id) if _is_pettingzoo(id) else load_class(id)
    except InputError as e:
        errors += e.errors
    else:
        if found is not None and is_vector(found):
            return [f"env.id {id}: {NOT_ONE.format('a vector of several')}"]
        if found is None or _is_pettingzoo(id):
            pass  # only a call knows the options
        elif not takes_context(found, creator=_is_registered(id), options=options):
            errors += check_options(id, found, options)
    if "vectorization" in options:
        errors.append(
            "env.options.vectorization: the option was removed: set env.remote_worker_envs=true to give each "
            "environment a process of its own"
        )
    return errors


def make(cfg: EnvConfig, *, seed: int, place: Place, on_failure: OnFailure, state: bool, host: bool = True) -> Any:
    """Makes a GymnasiumEnv, or a MultiHostEnv of games, or an asynchronous one. Raises InputError."""
    from jrl.envs import gym_env, multi_host

    waits = cfg.batch_wait_ms is None
    games: Any = multi_host.MultiHostEnv if waits else multi_host.AsyncMultiHostEnv
    single: Any = gym_env.GymnasiumEnv if waits else gym_env.AsyncGymnasiumEnv
    factory = make_factory(cfg, seed=seed, place=place)
    if has_agents(cfg):
        cfg = dataclasses.replace(cfg, options={**cfg.options, "state": True}) if state else cfg
        return games(cfg, factory, seed=seed, on_failure=on_failure)
    try:
        return single(cfg, factory, seed=seed, on_failure=on_failure)
    except SeveralAgents as e:
        if errors := agent_faults(cfg):
            raise InputError(*errors) from e
        return games(cfg, factory, seed=seed, on_failure=on_failure, first=e.env)


def goal_reward(cfg: EnvConfig) -> Callable[..., Any] | None:
    """Returns the function of `gym_goals.goal_reward`, of one more environment; None: it has no `compute_reward`."""
    from jrl.envs import gym_goals

    return None if has_agents(cfg) else gym_goals.goal_reward(cfg.id, make_factory(cfg, seed=0, place=TRAINING)(0))


def make_factory(cfg: EnvConfig, *, seed: int, place: Place) -> EnvFactory:
    """Returns the factory of the environments; it also works in a process that registered nothing."""
    context = EnvContext(
        _own_options(cfg.options) if has_agents(cfg) else cfg.options,
        worker_index=place.worker_index,
        num_workers=place.num_workers,
        vector_index=place.offset,
        num_envs=cfg.num_envs,
        remote=cfg.remote_worker_envs,
        in_evaluation=place.role == "eval",
        seed=seed,
    )
    by_context = False
    if _is_pettingzoo(cfg.id):
        found: Any = _load_pettingzoo(cfg.id)
    elif (found := load_class(cfg.id)) is not None:
        by_context = takes_context(found, creator=_is_registered(cfg.id), options=context)
    else:
        import gymnasium

        name = cfg.id if cfg.id in gymnasium.registry else cfg.id.partition(":")[2]
        found = functools.partial(gymnasium.make, gymnasium.registry.get(name, cfg.id))
    options = {name: getattr(cfg, name) for name in ("horizon", "soft_horizon", "action_repeat", "action_chunk")}
    return EnvFactory(found, context, by_context=by_context, **options)


def _load_pettingzoo(id: str) -> Callable[..., Any]:
    """Returns the module's function that makes environments. Raises InputError: no such module or function."""
    name = id.removeprefix(PETTINGZOO).replace("/", ".")
    module = _import_pettingzoo(id, name)
    for function in ("parallel_env", "env"):
        if callable(made := getattr(module, function, None)):
            return made
    raise InputError(f"env.id {id}: module {module.__name__} has neither parallel_env nor env: name another module")


def _import_pettingzoo(id: str, name: str) -> Any:
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
