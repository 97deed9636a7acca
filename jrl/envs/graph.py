"""Environments written in JAX: the dynamics of one step, and the reset contract around them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.envs.spec import check_action
from jrl.ops import random
from jrl.types import Array, EnvSpec, GraphEnv, InputError, Key, PyTree, Space, StepResult

_ENDED = -1  # GraphState.elapsed of an environment whose next step resets


class Definition(NamedTuple):
    """A task, for B environments at once.

    `draws` [num_draws, B] f32 are uniform numbers in [0, 1), all the randomness there is. State leaves are [B, ...];
    tasks keep one [B] array per variable, which XLA fuses into a single loop over the environments.
    """

    observation: Space
    action: Space
    max_episode_steps: int | None
    num_draws: int
    reset: Callable[[Array], PyTree]  # draws -> state
    step: Callable[[PyTree, Array, Array], tuple[PyTree, Array, Array]]  # (state, action, draws) -> state, reward, end
    observe: Callable[[PyTree], Array]  # state -> [B, *]


@struct.dataclass
class GraphState:
    """Where B environments stand."""

    inner: PyTree  # the task's own state, leaves [B, ...]
    elapsed: Array  # [B] i32, steps since the reset; -1 after an end: the next step resets


def build(task: Definition, num_envs: int) -> GraphEnv:
    """B environments of a task."""

    def reset(key: Key) -> tuple[PyTree, Array]:
        inner = task.reset(random.uniform(key, (task.num_draws, num_envs)))
        return inner, task.observe(inner)

    def advance(inner: PyTree, action: Array, key: Key, fresh: Array) -> tuple[PyTree, Array, Array, Array]:
        draws = random.uniform(key, (task.num_draws, num_envs))  # a row uses them to reset or to step, never for both
        moved, reward, terminated = task.step(inner, action, draws)
        inner = select(fresh, task.reset(draws), moved)
        return inner, task.observe(inner), reward, terminated

    return under_contract(EnvSpec(task.observation, task.action, num_envs, task.max_episode_steps), reset, advance)


def under_contract(
    spec: EnvSpec, reset: Callable[[Key], tuple[PyTree, PyTree]], advance: Callable[..., Any]
) -> GraphEnv:
    """Reset on the next step, time limit included (see `jrl.types.StepResult`).

    An episode that ends by itself on its last allowed step is terminated, not truncated.

    Args:
      spec: with the time limit to apply.
      reset: key -> (inner, obs).
      advance: (inner, action, key, fresh) -> (inner, obs, reward, terminated); rows where `fresh` [B] holds are reset,
        their reward and terminated are ignored.
    """
    limit = spec.max_episode_steps

    def first(key: Key) -> tuple[GraphState, PyTree]:
        inner, obs = reset(key)
        # a copy: the caller donates state and observation, which must not share a buffer
        return GraphState(inner, jnp.zeros((spec.num_envs,), jnp.int32)), jax.tree.map(jnp.copy, obs)

    def step(state: GraphState, action: Array, key: Key) -> tuple[GraphState, StepResult]:
        check_action(spec.action, spec.num_envs, action)  # while tracing: shape and dtype
        fresh = state.elapsed == _ENDED
        inner, obs, reward, terminated = advance(state.inner, action, key, fresh)
        elapsed = jnp.where(fresh, 0, state.elapsed + 1)
        terminated = terminated & ~fresh
        truncated = jnp.zeros_like(terminated) if limit is None else (elapsed >= limit) & ~terminated
        reward = jnp.where(fresh, 0.0, reward.astype(jnp.float32))
        elapsed = jnp.where(terminated | truncated, _ENDED, elapsed)
        return GraphState(inner, elapsed), StepResult(obs, reward, terminated, truncated)

    return GraphEnv(spec, first, step)


def select(mask: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Per environment: leaves [B, ...] of `on_true` where mask [B] holds, of `on_false` elsewhere."""
    pick = lambda a, b: jnp.where(jnp.expand_dims(mask, tuple(range(1, a.ndim))), a, b)
    return jax.tree.map(pick, on_true, on_false)


def time_limit(value: Any) -> int:
    """`max_episode_steps` as an option gives it. Raises InputError unless it is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise InputError(f"env.options.max_episode_steps: expected a positive integer, got {value!r}")
    return int(value)
