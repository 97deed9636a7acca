"""The config classes of algorithms, which are made of them: PPOConfig of ppo."""

from collections.abc import Mapping
from typing import Any

from jrl import algos
from jrl.api import groups
from jrl.api.config import AlgorithmConfig
from jrl.fields import schema


def make_variant(name: str, of: type[AlgorithmConfig], settings: Mapping[str, Any]) -> type[AlgorithmConfig]:
    """Makes the config class of an algorithm with settings under a name of their own: CQLConfig of cql."""
    told = ", ".join(f"{key} {value}" for key, value in schema.flatten(settings).items())
    doc = f"Settings of {name.upper()}: those of {of.__name__}, with {told}."
    members = {"__doc__": doc, "__module__": "jrl.api", "variant": name, "_settings": settings}
    return type(f"{name.upper()}Config", (of,), members)


def make_class(name: str, algo_config: type) -> type[AlgorithmConfig]:
    """Makes the config class of an algorithm, with a method per group."""
    given = groups.arguments(algo_config)
    methods = {group: groups.method(group, known, AlgorithmConfig._set) for group, known in given.items()}
    title = algos.title(name)
    doc = f"Settings of {title}, by group: {', '.join(methods)}. `help({title}Config.training)` shows them."
    return type(
        f"{title}Config",
        (AlgorithmConfig,),
        {"__doc__": doc, "__module__": "jrl.api", "algo_name": name, "_arguments": given, **methods},
    )
