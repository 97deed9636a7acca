"""jrl: a reinforcement-learning engine in JAX. Start at `python -m jrl.train --help`, or at `jrl.algos.ppo`.

`jrl.load(path)` gives a trained policy: see `jrl.policy`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl.policy import Policy, load

__all__ = ["Policy", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # not before it is asked for: commands answer `--help` without jax
        from jrl import policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
