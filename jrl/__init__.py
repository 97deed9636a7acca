"""jrl: a reinforcement-learning engine in JAX. Start at `python -m jrl.train --help`, or at `jrl.algos.ppo`.

`jrl.load(path)` gives a trained policy (`jrl.play.policy`); `jrl.check_env(env)` lists the faults of an environment.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl.envs.checker import check_env
    from jrl.play.policy import Policy, load

    __version__: str

__all__ = ["Policy", "__version__", "check_env", "load"]

_WHERE = {"Policy": "jrl.play.policy", "check_env": "jrl.envs.checker", "load": "jrl.play.policy"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("jrl.host.installed").version("jrl") or "unknown"
    if name in _WHERE:  # not before it is asked for: commands answer `--help` without jax
        return getattr(importlib.import_module(_WHERE[name]), name)
    hints = importlib.import_module("jrl.rllib.hints")
    if name in hints.HINTS["jrl"]:
        raise hints.missing(sys.modules[__name__], name, "jrl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
