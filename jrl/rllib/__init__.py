"""RLlib's names: the table of keys, the migration of configurations, and the classes of `jrl.api`.

Each registered algorithm has a config class and an Algorithm class: PPOConfig and PPO, DQNConfig and DQN, ... CQL is
SAC with the flag `conservative`, TQC is SAC with critics of quantiles; APEX is DQN with prioritised replay, n-step
returns and a ladder of epsilons; PG is
A2C without critic. The classes of a user's module are `config_class("my_project.my_ppo")` and
`algorithm_class("my_project.my_ppo")`.
"""

import functools
import importlib
import sys
from typing import Any

_MODULES = {
    "Algorithm": "jrl.rllib.algorithm",
    "AlgorithmConfig": "jrl.rllib.builder",
    "Callbacks": "jrl.callbacks",
    "DefaultCallbacks": "jrl.callbacks:Callbacks",
    "EnvContext": "jrl.envs.context",
    "Episode": "jrl.data.episode",
    "MemoryTrackingCallbacks": "jrl.rllib.memory_tracking:MemoryTrackingCallbacks",
    "PolicySpec": "jrl.rllib.multi_agent",
    "TaskSettableEnv": "jrl.envs.task",
    "concat_samples": "jrl.run.manual_steps",
    "in_program": "jrl.callbacks",
    "make_multi_callbacks": "jrl.callbacks",
    "register_env": "jrl.registry:register",
}
# RLlib's algorithm -> jrl's algorithm and its settings
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cql": ("sac", {"algo": {"conservative": True}}),
    "tqc": ("sac", {"algo": {"critic": {"kind": "quantiles", "dropped_atoms": 2}, "actor_q": "mean"}}),
    "pg": ("a2c", {"algo": {"use_critic": False, "ent_coef": 0.0}}),
    "apex": (
        "dqn",
        {
            "algo": {"double": True, "dueling": True, "exploration": {"name": "epsilon_greedy", "ladder": True}},
            "replay": {"prioritized": True, "n_step": 3},
        },
    ),
}
# other names of RLlib's classes
_ALIASES = {"Impala": "IMPALA", "ImpalaConfig": "IMPALAConfig", "ApexDQN": "APEX", "ApexDQNConfig": "APEXConfig"}


@functools.cache
def config_class(name: str) -> Any:
    """Returns the config class of an algorithm, such as PPOConfig for ppo, or of a user's module. Raises InputError."""
    if name not in _VARIANTS:
        return importlib.import_module("jrl.rllib.builder").build_class(_find_name(name))
    base, settings = _VARIANTS[name]
    doc = f"Settings of {name.upper()}: the settings of {base.upper()}Config, with {settings}."
    return _subclass(f"{name.upper()}Config", config_class(base), doc, variant=name, variant_settings=settings)


@functools.cache
def algorithm_class(name: str) -> Any:
    """Returns the Algorithm class of an algorithm, such as PPO for ppo, or of a user's module. Raises InputError."""
    from jrl import algos

    if name in _VARIANTS:
        base = algorithm_class(_VARIANTS[name][0])
        doc = f"{name.upper()}, as an Algorithm: {base.__name__} with the settings of {name.upper()}Config."
        return _subclass(name.upper(), base, doc, variant=name)
    title = algos.title(known := _find_name(name))
    doc = f"{title}, as an Algorithm: see {algos.get(known).__name__} and {title}Config."
    return _subclass(title, find_public("Algorithm"), doc, algo_name=known)


def _subclass(name: str, base: type, doc: str, **members: Any) -> type:
    return type(name, (base,), {"__doc__": doc, "__module__": "jrl.api", **members})


def _find_name(name: Any) -> str:
    from jrl import algos

    algos.get(found := algos.spelled(name))
    return found


def _list_classes() -> dict[str, Any]:
    from jrl import algos

    names = [*algos.names(), *_VARIANTS]
    classes = {f"{name.upper()}Config": functools.partial(config_class, name) for name in names}
    return classes | {name.upper(): functools.partial(algorithm_class, name) for name in names}


def find_public(name: str) -> Any:
    """Returns the object of `from jrl.api import name`. Raises AttributeError, ImportError with a hint."""
    if name == "__all__":  # for `from jrl.api import *`
        return list_public()
    if name in _MODULES:
        module, _, found = _MODULES[name].partition(":")
        return getattr(importlib.import_module(module), found or name)
    if name == "tune":
        return importlib.import_module("jrl.rllib.tune")
    if not name.startswith("_") and (known := _ALIASES.get(name, name)) in (classes := _list_classes()):
        return classes[known]()
    raise importlib.import_module("jrl.rllib.hints").build_error(sys.modules["jrl.api"], name, "api")


def list_public() -> list[str]:
    """Returns the names of `jrl.api`."""
    return sorted([*_MODULES, *_list_classes(), *_ALIASES, "tune", "config_class", "algorithm_class"])
