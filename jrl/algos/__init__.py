"""Algorithms by name. Each is one module with `Config` (a dataclass of hyper-parameters) and
`make(cfg, spec, network, *, axis_name=None) -> Algo`."""

import importlib
from types import ModuleType

from jrl.errors import InputError

_MODULES = {
    "ppo": "jrl.algos.ppo",
    "a2c": "jrl.algos.a2c",
    "impala": "jrl.algos.impala",
    "appo": "jrl.algos.appo",
    "dqn": "jrl.algos.dqn",
    "pqn": "jrl.algos.pqn",
    "sac": "jrl.algos.sac",
    "td3": "jrl.algos.td3",
}


def names() -> tuple[str, ...]:
    """The registered algorithms."""
    return tuple(_MODULES)


def get(name: str) -> ModuleType:
    """The module of an algorithm.

    Raises:
      InputError: no algorithm has that name.
    """
    if name not in _MODULES:
        raise InputError(f"algo.name: unknown algorithm {name!r}: choose one of {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[name])


def get_config_class(name: str) -> type:
    """The dataclass of an algorithm's hyper-parameters."""
    return get(name).Config
