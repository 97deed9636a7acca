"""Time limits, and the meaning of an end for the learner.

`env.horizon` ends an episode after so many steps; a smaller limit of the environment stays. The learner gets
`terminated` (the value after the step is 0) or `truncated` (it bootstraps from V of the true next observation):

    no_done_at_end   a true end    the horizon, another time limit
    null (default)   terminated    truncated
    false            terminated    terminated
    true             truncated     truncated

`env.soft_horizon` decides if the environment is reset at the horizon. Both together, at the horizon:

                             soft_horizon false             soft_horizon true
    no_done_at_end null      reset, bootstrap               continue from the same state, bootstrap
    no_done_at_end false     reset, no bootstrap            continue, no bootstrap: as if it had ended
    no_done_at_end true      reset, bootstrap (true ends    continue, bootstrap (true ends, too; they reset)
                             too)

A continuing environment is not stepped on the step after the horizon, where others reset. That step is masked as usual:
its action is ignored, its reward is 0, and its result repeats the observation of the horizon. A bootstrapped value then
is an estimate across the horizon. A recurrent state is not carried across: the collector resets it after every end, and
the learner does the same from the flags, which do not mark soft horizons. A true end and a limit of the environment
reset it as usual, also on the step that reaches the horizon.

`env.action_repeat` is outside of the limits, which count steps of the environment.

The names are RLlib's; its default, `no_done_at_end: False`, is jrl's false.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.envs.transform import Transform, wrap_state
from jrl.types import Array, EnvSpec, JaxEnv, Key, PyTree, StepResult

_PAUSED, _FRESH = -1, -2  # `steps` if the next step is the one after a soft horizon, or after a true end


def ends(spec: EnvSpec, *, no_done_at_end: bool | None) -> Transform | None:
    """Option `env.no_done_at_end`. Steps keep the environment's flags; `flags` converts them for the learner."""
    return None if no_done_at_end is None else Transform(spec._replace(bootstraps=no_done_at_end))


def flags(bootstraps: bool | None) -> Callable[[Array, Array], tuple[Array, Array]] | None:
    """Returns the function from the environment's (terminated, truncated) [B] bool to the learner's; None: unchanged.

    Args:
      bootstraps: `EnvSpec.bootstraps`.
    """
    if bootstraps is None:
        return None

    def fn(terminated: Array, truncated: Array) -> tuple[Array, Array]:
        end = terminated | truncated
        never = end & ~end
        return (never, end) if bootstraps else (end, never)

    return fn


def soften(env: JaxEnv, horizon: int) -> JaxEnv:
    """Returns `env`, whose state has leaves [B, ...], with episodes that end after `horizon` steps without a reset.

    The new state holds `env`'s state, the latest `obs` [B, *], which is repeated after the horizon, and `steps` [B] i32
    since the episode began: -1 after the horizon, -2 after a true end.
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
        at_horizon = (steps >= horizon) & ~ended
        steps = jnp.where(at_horizon, _PAUSED, jnp.where(ended, _FRESH, steps))
        reward = jnp.where(paused, 0.0, result.reward)
        return {"env": inner, "obs": obs, "steps": steps}, StepResult(obs, reward, terminated, truncated | at_horizon)

    return wrap_state(env, spec, reset, step)
