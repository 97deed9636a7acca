"""Option `env.on_nonfinite`: environments in JAX with numbers that are not finite begin a new episode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrl.envs.jax_env import select
from jrl.types import Array, JaxEnv, Key, PyTree, StepResult


def reset_nonfinite(env: JaxEnv) -> JaxEnv:
    """Returns `env`, whose state has leaves [B, ...], with a reset of environments that are not finite after a step.

    All floats of the new state, the observation and the reward are checked. A step that is not finite has
    `StepResult.failed`. The new episode has the present task. In a first observation, values that are not finite are 0.
    """

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key)
        return state, jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0) if _is_float(x) else x, obs)

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, StepResult]:
        step_key, reset_key = jax.random.split(key)
        state, result = env.step(state, action, step_key)
        failed = ~_is_finite((state, result.obs, result.reward))

        def replaced() -> tuple[PyTree, PyTree]:
            new, obs = reset(reset_key)
            if env.set_task is not None and env.get_task is not None:
                new = env.set_task(new, env.get_task(state))
            return select(failed, (new, obs), (state, result.obs))

        state, obs = jax.lax.cond(failed.any(), replaced, lambda: (state, result.obs))
        reward = jnp.where(failed, 0.0, result.reward)
        return state, StepResult(obs, reward, result.terminated & ~failed, result.truncated & ~failed, failed)

    return env._replace(reset=reset, step=step)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_finite(tree: PyTree) -> Array:
    """Returns whether all floats of each environment are finite, [B] bool, of leaves [B, ...]."""
    floats = [x for x in jax.tree.leaves(tree) if _is_float(x)]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all(tuple(range(1, x.ndim))) for x in floats])
