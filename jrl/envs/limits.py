"""Time limits beside the environment's own ends, and what an end means for the learner.

`env.horizon` ends an episode after so many steps; a smaller limit of the environment's own stays. What the learner is
told is `terminated` (the value after the row is 0) or `truncated` (it bootstraps from V of the true next observation):

    no_done_at_end   a true end    the horizon, another time limit
    null (default)   terminated    truncated
    false            terminated    terminated
    true             truncated     truncated

`env.soft_horizon` says what becomes of the environment at the horizon. Together, at the horizon:

                             soft_horizon false             soft_horizon true
    no_done_at_end null      reset, bootstrap               goes on from where it stands, bootstrap
    no_done_at_end false     reset, no bootstrap            goes on, no bootstrap: as if it had ended
    no_done_at_end true      reset, bootstrap (so do true   goes on, bootstrap (so do true ends, which reset)
                             ends, which reset as usual)

An environment that goes on is not stepped on the row after the horizon, where others are reset: that row is masked as
ever, its action is ignored, its reward 0, and its result shows the observation that the horizon had. A bootstrapped
value then is an estimate across the horizon. A recurrent state is not carried across: the collector begins it anew
after every end, and the learner repeats that from the flags, which do not tell a soft horizon from others. A true end,
and a limit of the environment's own, reset it as usual, also on the step that reaches the horizon.

The words are RLlib's; its default, `no_done_at_end: False`, is our false.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.envs.transform import Transform, around
from jrl.types import Array, EnvSpec, JaxEnv, Key, PyTree, StepResult

_PAUSED, _FRESH = -1, -2  # steps of an environment whose next row is the one after an end


def ends(spec: EnvSpec, *, no_done_at_end: bool | None) -> Transform | None:
    """Option `env.no_done_at_end`. Steps keep the environment's own ends: `flags` makes the learner's of them."""
    return None if no_done_at_end is None else Transform(spec._replace(bootstraps=no_done_at_end))


def flags(bootstraps: bool | None) -> Callable[[Array, Array], tuple[Array, Array]] | None:
    """Returns the function from the environment's (terminated, truncated) [B] bool to the learner's; None: the same.

    Args:
      bootstraps: of the EnvSpec.
    """
    if bootstraps is None:
        return None

    def fn(terminated: Array, truncated: Array) -> tuple[Array, Array]:
        end = terminated | truncated
        never = end & ~end
        return (never, end) if bootstraps else (end, never)

    return fn


# ---------------------------------------------------------------- in a program


def soften(env: JaxEnv, horizon: int) -> JaxEnv:
    """Returns `env`, whose state has leaves [B, ...], with episodes that end after `horizon` steps and go on.

    The state has beside that of `env` the latest `obs` [B, *], which is shown once more after the horizon, and `steps`
    [B] i32 since the episode began: -1 after the horizon, -2 after a true end.
    """
    limit = env.spec.max_episode_steps
    spec = env.spec._replace(max_episode_steps=horizon if limit is None else min(horizon, limit))

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        inner, obs = env.reset(key)
        # copies: the caller donates state and observation, which must not share a buffer
        return {"env": inner, "obs": jax.tree.map(jnp.copy, obs), "steps": jnp.zeros((spec.num_envs,), jnp.int32)}, obs

    def step(state: PyTree, action: Array, key: Key) -> tuple[PyTree, StepResult]:
        paused = state["steps"] == _PAUSED
        moved, result = env.step(state["env"], action, key)
        held = lambda old, new: jnp.where(jnp.expand_dims(paused, tuple(range(1, new.ndim))), old, new)
        inner, obs = jax.tree.map(held, (state["env"], state["obs"]), (moved, result.obs))
        terminated, truncated = result.terminated & ~paused, result.truncated & ~paused
        steps = jnp.where(state["steps"] < 0, 0, state["steps"] + 1)
        ended = terminated | truncated
        there = (steps >= horizon) & ~ended
        steps = jnp.where(there, _PAUSED, jnp.where(ended, _FRESH, steps))
        reward = jnp.where(paused, 0.0, result.reward)
        return {"env": inner, "obs": obs, "steps": steps}, StepResult(obs, reward, terminated, truncated | there)

    return around(env, spec, reset, step)


# ---------------------------------------------------------------- from the host


class Limited:
    """One Gymnasium environment whose episodes end after `horizon` steps; all else is its own.

    The reset after the horizon is none with `soft`: the environment goes on, unless `begin_anew` was called before.
    """

    def __init__(self, env: Any, horizon: int, soft: bool):
        self.env, self._horizon, self._soft = env, horizon, soft
        self._steps, self._goes_on, self._obs = 0, False, None

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # of one that is only half there
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        goes_on, self._goes_on, self._steps = self._goes_on, False, 0
        return (self._obs, {}) if goes_on and not how else self.env.reset(**how)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(action)
        if len(result) != 5:  # `jrl.gym.faults` has the words
            return result
        obs, reward, terminated, truncated, info = result
        self._steps += 1
        if self._steps >= self._horizon and not (terminated or truncated):
            truncated = True
            self._goes_on, self._obs = self._soft, obs
        return obs, reward, terminated, truncated, info

    def begin_anew(self) -> None:
        """Makes the next reset one of the environment, too."""
        self._goes_on = False
