"""The surface that RLlib's users know, over the same loop as `python -m jrl.train`.

    from jrl.api import PPOConfig

    with PPOConfig().environment("CartPole-v1").training(lr=3e-4).build() as algo:
        for _ in range(10):
            print(algo.train()["episode_return_mean"])
        path = algo.save()

A config class and an Algorithm class for each registered algorithm: PPOConfig and PPO, DQNConfig and DQN, ...
"""

import functools
from typing import TYPE_CHECKING, Any

from jrl.errors import InputError

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
    "concat_samples": "jrl.by_hand",
    "make_multi_callbacks": "jrl.callbacks",
    "EnvContext": "jrl.envs.context",
    "TaskSettableEnv": "jrl.envs.task",
    "register_env": "jrl.registry:register",
}


@functools.cache
def config_class(name: str) -> "type[AlgorithmConfig]":
    """The config class of a registered algorithm: ppo -> PPOConfig. Raises InputError."""
    from jrl import algos
    from jrl.api.config import make_class

    return make_class(_known(name), algos.get_config_class(_known(name)))


@functools.cache
def algorithm_class(name: str) -> "type[Algorithm]":
    """The Algorithm class of a registered algorithm: ppo -> PPO. Raises InputError."""
    from jrl.api.algorithm import Algorithm

    known = _known(name)
    doc = f"{known.upper()}, as an Algorithm: see jrl.algos.{known} and {known.upper()}Config."
    return type(known.upper(), (Algorithm,), {"__doc__": doc, "__module__": __name__, "algo_name": known})


def _known(name: Any) -> str:
    from jrl import algos

    if str(name).lower() not in algos.names():
        raise InputError(f"algo.name: unknown algorithm {name!r}: choose one of {', '.join(algos.names())}")
    return str(name).lower()


def _made() -> dict[str, Any]:
    from jrl import algos

    classes = {f"{name.upper()}Config": functools.partial(config_class, name) for name in algos.names()}
    return classes | {name.upper(): functools.partial(algorithm_class, name) for name in algos.names()}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    import importlib

    if name in _HOMES:
        module, _, found = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), found or name)
    if name == "tune":
        return importlib.import_module("jrl.api.tune")
    made = _made()
    if name not in made:
        raise AttributeError(f"jrl.api has no {name}: it has {', '.join(sorted([*_HOMES, *made]))}")
    return made[name]()


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_made(), "tune", "config_class", "algorithm_class"])
