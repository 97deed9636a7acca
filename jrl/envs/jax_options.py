"""Options of environments in JAX: `env.action_repeat`, `env.action_chunk`, `env.on_nonfinite`. `limits` has others."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.jax_env import select
from jrl.envs.transform import wrap_state
from jrl.spaces import elements, stack_space
from jrl.types import Array, Box, EnvSpec, InputError, JaxEnv, Key, PyTree, Space, StepResult


def repeat(env: JaxEnv, times: int) -> JaxEnv:
    """Returns `env`, whose state has leaves [B, ...], with steps that take each action `times` times.

    A step sums the rewards. It stops at an episode's end, and returns the final observation. A reset is one step. The
    new state holds `env`'s state, and `ended` [B] bool: the next step is a reset.
    """
    return _join_steps(env, times, env.spec, lambda action: None)


def chunk(env: JaxEnv, length: int) -> JaxEnv:
    """Returns `env` with actions [B, length, *], which are taken one after the other; otherwise as `repeat`.

    Raises:
      InputError: the actions are not a Box.
    """
    spec = env.spec._replace(action=chunked_space(env.spec.action, length))
    return _join_steps(env, length, spec, lambda action: jnp.swapaxes(action, 0, 1))


def chunked_space(space: Space, length: int) -> Space:
    """Returns the space of `length` actions, the policy's with `env.action_chunk`. Raises InputError: not a Box."""
    if not isinstance(space, Box) or np.dtype(space.dtype).kind != "f":
        raise InputError(f"env.action_chunk: expected actions in a Box of floats, got {space}: leave it out")
    return stack_space(space, length)


def _join_steps(env: JaxEnv, times: int, spec: EnvSpec, actions_of: Callable[[Array], Array | None]) -> JaxEnv:
    """Returns `env` with steps of up to `times` steps. `actions_of`: action -> actions [times, B, *]; None: itself."""
    limit = env.spec.max_episode_steps
    spec = spec._replace(max_episode_steps=None if limit is None else -(-limit // times))
    no = lambda: jnp.zeros((spec.num_envs,), bool)

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        inner, obs = env.reset(key)
        return {"env": inner, "ended": no()}, obs

    def step(state: PyTree, action: Array, key: Key) -> tuple[PyTree, StepResult]:
        def once(carry: PyTree, x: tuple[Key, Array | None]) -> tuple[PyTree, None]:
            (inner, result, is_over), (key, own) = carry, x
            moved, new = env.step(inner, action if own is None else own, key)
            new = new._replace(reward=result.reward + new.reward)
            inner, result = select(is_over, (inner, result), (moved, new))
            return (inner, result, state["ended"] | result.terminated | result.truncated), None

        obs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), elements(spec.observation, spec.num_envs))
        nothing = StepResult(obs, jnp.zeros((spec.num_envs,), jnp.float32), no(), no())
        start = state["env"], nothing, no()
        (inner, result, _), _ = jax.lax.scan(once, start, (jax.random.split(key, times), actions_of(action)))
        return {"env": inner, "ended": result.terminated | result.truncated}, result

    return wrap_state(env, spec, reset, step)._replace(fps=env.fps / times)


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
