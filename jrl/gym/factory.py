"""Makes the environments of a vector by the user's class or function, in this process or in worker processes."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from jrl.gym import CONTEXT, DEFINITIONS, EnvContext
from jrl.gym.exceptions import NotAnEnvironment, SeveralAgents
from jrl.gym.wrappers import Chunked, Limited, Repeated


def has_agents(env: Any) -> bool:
    """Returns whether an object has the members of a multi-agent environment."""
    named = any(getattr(env, name, None) for name in ("possible_agents", "_agent_ids"))
    return named or callable(getattr(env, "observation_space", None))


NOT_ONE = "expected one environment, got {}: name the class or function of one environment, and set env.num_envs"


def is_vector(found: Any) -> bool:
    """Returns whether a class or object is a vector environment of Gymnasium, Stable-Baselines3 or EnvPool."""
    bases = found.__mro__ if inspect.isclass(found) else type(found).__mro__
    return any(base.__name__ in ("VectorEnv", "VecEnv", "EnvPoolMixin") for base in bases) or (
        hasattr(found, "num_envs") and hasattr(found, "single_observation_space")
    )


class EnvFactory:
    """`factory(i)` makes environment i of a vector.

    Args:
      found: class or function; called with an EnvContext if `by_context`, else with the options as keyword arguments.
      context: context of environment 0.
      horizon, soft_horizon: see `jrl.envs.limits`.
      action_repeat: see `Repeated`.
      action_chunk: see `Chunked`.
    """

    def __init__(
        self,
        found: Callable[..., Any],
        context: EnvContext,
        *,
        by_context: bool,
        horizon: int | None,
        soft_horizon: bool,
        action_repeat: int = 1,
        action_chunk: int = 1,
    ):
        self._found, self._context, self._by_context = found, context, by_context
        self._horizon, self._soft, self._repeat, self._chunk = horizon, soft_horizon, action_repeat, action_chunk
        self.options = dict(context)

    def raw(self, i: int) -> Any:
        """Makes environment i without checks of its members."""
        context = self._context.with_offset(i)
        env = self._found(context) if self._by_context else self._found(**context)
        if is_vector(env) or is_vector(getattr(env, "unwrapped", env)):
            with contextlib.suppress(Exception):  # the error below matters more
                env.close()
            raise NotAnEnvironment(NOT_ONE.format(f"a {type(env).__name__} of several"))
        with contextlib.suppress(AttributeError):  # a class with __slots__
            setattr(env, CONTEXT, context)
        return env

    def __call__(self, i: int) -> Any:
        env = self.raw(i)
        if has_agents(env):
            raise SeveralAgents(env)
        for name in ("observation_space", "action_space"):
            if not hasattr(env, name):
                what = getattr(self._found, "__qualname__", self._found)
                fix = ": set env.backend jax" if type(env).__name__ in DEFINITIONS else ""
                got = f"a {type(env).__name__} without {name}"
                raise NotAnEnvironment(f"{what} returned {got}, not a Gymnasium environment{fix}")
        env = env if self._horizon is None else Limited(env, self._horizon, self._soft)
        env = env if self._repeat == 1 else Repeated(env, self._repeat)
        return env if self._chunk == 1 else Chunked(env, self._chunk)
