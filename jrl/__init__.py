"""jrl: a reinforcement-learning engine in JAX. Start with `python -m jrl.train --help`, or with `jrl.algos.ppo`.

`jrl.load(path)` returns a trained policy (`jrl.play.actor`); `jrl.check_env(env)` lists the faults of an environment.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl.envs.checker import check_env
    from jrl.play.actor import Actor as Policy
    from jrl.play.actor import load

    __version__: str

__all__ = ["Policy", "__version__", "check_env", "load"]

# name -> (module, name in the module); imported on first use, because commands answer `--help` without jax
_LAZY = {
    "Policy": ("jrl.play.actor", "Actor"),
    "check_env": ("jrl.envs.checker", "check_env"),
    "load": ("jrl.play.actor", "load"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("jrl.host.machine").version("jrl") or "unknown"
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    if importlib.util.find_spec(f"jrl.{name}") is not None:
        return importlib.import_module(f"jrl.{name}")
    hints, rllib = importlib.import_module("jrl.rllib.hints"), importlib.import_module("jrl.rllib")
    if not name.startswith("_") and name in {*hints.HINTS["jrl"], *rllib.list_public()}:
        raise hints.build_error(sys.modules[__name__], name, "jrl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
