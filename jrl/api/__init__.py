"""The surface that RLlib's users know, over the same loop as `python -m jrl.train`.

    from jrl.api import PPOConfig

    with PPOConfig().environment("CartPole-v1").training(lr=3e-4).build() as algo:
        for _ in range(10):
            print(algo.train()["episode_return_mean"])
        path = algo.save()

A config class and an Algorithm class for each registered algorithm: PPOConfig and PPO, DQNConfig and DQN, ...; CQL is
SAC with its flag `conservative`, and APEX is DQN with prioritised replay, n-step returns and a ladder of epsilons.
Those of a module of one's own are `config_class("my_project.my_ppo")` and `algorithm_class("my_project.my_ppo")`.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl.api.algorithm import Algorithm as Algorithm
    from jrl.api.config import AlgorithmConfig as AlgorithmConfig

_HOMES = {
    "Algorithm": "jrl.api.algorithm",
    "AlgorithmConfig": "jrl.api.config",
    "Callbacks": "jrl.callbacks",
    "DefaultCallbacks": "jrl.callbacks:Callbacks",
    "Episode": "jrl.rollout.replay_episodes",
    "in_program": "jrl.callbacks",
    "concat_samples": "jrl.run.by_hand",
    "make_multi_callbacks": "jrl.callbacks",
    "MemoryTrackingCallbacks": "jrl.callbacks.memory_tracking:MemoryTracking",
    "PolicySpec": "jrl.migrate.policies",
    "EnvContext": "jrl.envs.context",
    "TaskSettableEnv": "jrl.envs.task",
    "register_env": "jrl.registry:register",
}

# a name of RLlib's -> the algorithm, and the settings that make it so
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cql": ("sac", {"algo": {"conservative": True}}),
    "apex": (
        "dqn",
        {
            "algo": {"double": True, "dueling": True, "exploration": {"name": "epsilon_greedy", "ladder": True}},
            "replay": {"prioritized": True, "n_step": 3},
        },
    ),
}
# other spellings of RLlib's classes
_ALIASES = {"Impala": "IMPALA", "ImpalaConfig": "IMPALAConfig", "ApexDQN": "APEX", "ApexDQNConfig": "APEXConfig"}


@functools.cache
def config_class(name: str) -> "type[AlgorithmConfig]":
    """Returns the config class of an algorithm: PPOConfig of ppo, or that of the user's module. Raises InputError."""
    from jrl import algos
    from jrl.api.classes import make_class, make_variant

    if name in _VARIANTS:
        of, settings = _VARIANTS[name]
        return make_variant(name, config_class(of), settings)
    return make_class(_known(name), algos.get_config_class(_known(name)))


@functools.cache
def algorithm_class(name: str) -> "type[Algorithm]":
    """Returns the Algorithm class of an algorithm: PPO of ppo, or that of the user's module. Raises InputError."""
    from jrl import algos
    from jrl.api.algorithm import Algorithm

    if name in _VARIANTS:
        of = algorithm_class(_VARIANTS[name][0])
        doc = f"{name.upper()}, as an Algorithm: {of.__name__} with the settings of {name.upper()}Config."
        return type(name.upper(), (of,), {"__doc__": doc, "__module__": __name__, "variant": name})
    known = _known(name)
    title = algos.title(known)
    doc = f"{title}, as an Algorithm: see {algos.get(known).__name__} and {title}Config."
    return type(title, (Algorithm,), {"__doc__": doc, "__module__": __name__, "algo_name": known})


def _known(name: Any) -> str:
    from jrl import algos

    algos.get(found := algos.spelled(name))
    return found


def _made() -> dict[str, Any]:
    from jrl import algos

    names = [*algos.names(), *_VARIANTS]
    classes = {f"{name.upper()}Config": functools.partial(config_class, name) for name in names}
    return classes | {name.upper(): functools.partial(algorithm_class, name) for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # `from jrl.api import *` asks for it
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(name)
    import importlib

    if name in _HOMES:
        module, _, found = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), found or name)
    if name == "tune":
        return importlib.import_module("jrl.api.tune")
    made = _made()
    if (known := _ALIASES.get(name, name)) in made:
        return made[known]()
    raise importlib.import_module("jrl.host.elsewhere").missing(sys.modules[__name__], name, "api")


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_made(), *_ALIASES, "tune", "config_class", "algorithm_class"])
