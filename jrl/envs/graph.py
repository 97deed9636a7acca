"""Environments written in JAX: dynamics of one step, and the reset contract around them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.envs.spec import check_action
from jrl.types import Array, EnvSpec, GraphEnv, Key, PyTree, Space, StepResult


class Definition(NamedTuple):
    """A task, for B environments at once. `draws` are uniform numbers in [0, 1), all the randomness there is."""

    observation: Space
    action: Space
    max_episode_steps: int | None
    num_draws: int  # per environment, for a reset or a step
    reset: Callable[[Array], PyTree]  # draws [B, num_draws] -> state, leaves [B, ...]
    step: Callable[[PyTree, Array, Array], tuple[PyTree, Array, Array]]  # (state, action, draws) -> state, reward, end
    observe: Callable[[PyTree], Array]  # state -> [B, *]


@struct.dataclass
class GraphState:
    inner: PyTree
    elapsed: Array  # [B] i32, steps since the reset
    done: Array  # [B] bool: the next step resets


def build(task: Definition, num_envs: int) -> GraphEnv:
    """B environments of a task under the contract: reset on the step after an end."""
    spec = EnvSpec(task.observation, task.action, num_envs, task.max_episode_steps)

    def draw(key: Key) -> Array:
        return jax.random.uniform(key, (num_envs, task.num_draws))

    def reset(key: Key) -> tuple[GraphState, Array]:
        inner = task.reset(draw(key))
        state = GraphState(inner, jnp.zeros((num_envs,), jnp.int32), jnp.zeros((num_envs,), bool))
        return state, jax.tree.map(jnp.copy, task.observe(inner))  # a copy: state and observation are both donated

    def step(state: GraphState, action: Array, key: Key) -> tuple[GraphState, StepResult]:
        check_action(spec, action)
        draws = draw(key)
        moved, reward, terminated = task.step(state.inner, action, draws)
        inner = select(state.done, task.reset(draws), moved)
        elapsed = jnp.where(state.done, 0, state.elapsed + 1)
        terminated = terminated & ~state.done
        truncated = jnp.zeros_like(terminated)
        if task.max_episode_steps is not None:
            truncated = (elapsed >= task.max_episode_steps) & ~terminated & ~state.done
        reward = jnp.where(state.done, 0.0, reward)
        result = StepResult(task.observe(inner), reward, terminated, truncated)
        return GraphState(inner, elapsed, terminated | truncated), result

    return GraphEnv(spec, reset, step)


def select(mask: Array, on_true: Any, on_false: Any) -> Any:
    """Per environment: leaves [B, ...] of `on_true` where mask [B] holds, of `on_false` elsewhere."""
    pick = lambda a, b: jnp.where(jnp.expand_dims(mask, tuple(range(1, a.ndim))), a, b)
    return jax.tree.map(pick, on_true, on_false)
