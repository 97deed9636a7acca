"""Rewards of Gymnasium's environments with goals, as Gymnasium-Robotics defines them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.gym.exceptions import format_line, is_environment_error
from jrl.types import Array, InputError


def goal_reward(id: str, env: Any) -> Callable[[Array, Array], tuple[Array, Array]] | None:
    """Returns (achieved [N, *], desired [N, *]) -> (reward [N], end [N]), computed by an environment on the host.

    A program calls the environment's `compute_reward(achieved, desired, {})`, which is vectorised by convention, and
    its `compute_terminated`, if it has one, goal by goal.

    Args:
      id: id of the environment, for errors.
      env: environment for these calls alone; closed if it has no `compute_reward`.
    Returns:
      The function; None: the environment has no `compute_reward`.
    Raises:
      InputError: `compute_reward` is not vectorised, or needs infos.
    """
    own = getattr(env, "unwrapped", env)
    if not callable(getattr(own, "compute_reward", None)):
        env.close()
        return None
    ends = getattr(own, "compute_terminated", None)

    def on_host(achieved: Any, desired: Any) -> tuple[np.ndarray, np.ndarray]:
        achieved, desired = np.asarray(achieved), np.asarray(desired)
        reward = np.asarray(own.compute_reward(achieved, desired, {}), np.float32)
        end = [bool(ends(x, y, {})) for x, y in zip(achieved, desired, strict=True)] if ends else [False] * len(reward)
        return reward, np.asarray(end, bool)

    space = env.observation_space["achieved_goal"]
    _check(id, on_host, np.zeros((2, *space.shape), space.dtype))

    def reward(achieved: Array, desired: Array) -> tuple[Array, Array]:
        like = jax.ShapeDtypeStruct(achieved.shape[:1], jnp.float32)
        results = (like, jax.ShapeDtypeStruct(like.shape, jnp.bool_))
        return jax.pure_callback(on_host, results, achieved, desired, vmap_method="sequential")

    return reward


def _check(id: str, on_host: Callable[..., Any], goals: np.ndarray) -> None:
    """Raises InputError unless `compute_reward` returns one number per goal."""
    fix = "set replay.hindsight.reward=package.module:function"
    try:
        shape = on_host(goals, goals)[0].shape
    except BaseException as e:
        if not is_environment_error(e):
            raise
        raise InputError(f"replay.hindsight: compute_reward of {id} fails: {format_line(e)}: {fix}") from e
    if shape != (2,):
        raise InputError(
            f"replay.hindsight: compute_reward of {id}: expected one reward per goal, got shape {shape} of 2: {fix}"
        )
