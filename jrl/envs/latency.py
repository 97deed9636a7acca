"""Latency: actions take effect some steps after they were chosen."""

from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.envs.transform import Draws, State, Transform
from jrl.types import Array, Box, Dict, EnvSpec, InputError, Leaf, PyTree, StepResult

_KEY = "delay"  # its entry in the state


def delay_actions(spec: EnvSpec, *, delay: int | tuple[int, int]) -> Transform:
    """Option `env.action_delay`: the environment gets the action that was chosen some steps ago.

    Before the first action of an episode takes effect, the environment gets the middle of the bounds: 0 without finite
    bounds, choice 0 of a Discrete. Rollouts and replay store the chosen action.

    Args:
      spec: spec of environments with a single agent; actions are the environment's.
      delay: number of steps; (low, high): drawn at each reset, both ends included.
    Raises:
      InputError: observations have an action mask.
    """
    if isinstance(spec.observation, Dict) and spaces.ACTION_MASK in dict(spec.observation.items):
        raise InputError("env.action_delay: an action may no longer be allowed after its delay: leave it out")
    low, high = delay if isinstance(delay, tuple) else (delay, delay)
    start = spaces.from_leaves(spec.action, [_find_middle(leaf) for _, leaf in spaces.leaves(spec.action)])

    def init(xp: Any) -> State:
        waiting = jax.tree.map(lambda x: xp.zeros((spec.num_envs, high, *x.shape), x.dtype), start)
        steps = xp.full(spec.num_envs, low, "int32")
        return {_KEY: {"waiting": waiting, "steps": steps, "ended": xp.ones(spec.num_envs, bool)}}

    def push(xp: Any, state: State, action: PyTree) -> PyTree:
        """Returns the chosen actions [B, high + 1, *], the newest first."""
        return jax.tree.map(lambda x, held: xp.concatenate([x[:, None], held], 1), action, state[_KEY]["waiting"])

    def act(xp: Any, state: State, action: PyTree) -> PyTree:
        steps = state[_KEY]["steps"]
        return jax.tree.map(lambda x: x[xp.arange(len(steps)), steps], push(xp, state, action))

    def observe(
        xp: Any, state: State, action: PyTree, result: StepResult, draws: Array | None = None
    ) -> tuple[State, StepResult]:
        steps, begins = state[_KEY]["steps"], state[_KEY]["ended"]
        if result.failed is not None:
            begins = begins | result.failed
        waiting = jax.tree.map(
            lambda x, first: xp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), first[None, None], x[:, :high]),
            push(xp, state, action),
            start,
        )
        if draws is not None:
            drawn = xp.minimum(low + (draws[:, 0] * (high - low + 1)).astype("int32"), high)  # a product may round up
            steps = xp.where(begins, drawn, steps)
        ended = result.terminated | result.truncated
        return {**state, _KEY: {"waiting": waiting, "steps": steps, "ended": ended}}, result

    return Transform(spec, act=act, observe=observe, init=init, draws=Draws(1) if low < high else None)


def _find_middle(leaf: Leaf) -> np.ndarray:
    """Returns the element of a space that is sent before the first action."""
    if not isinstance(leaf, Box):
        return np.zeros(leaf.shape, leaf.dtype)
    low, high = leaf.bounds()
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(bounded, low + (high - low) / 2, np.clip(0.0, low, high)).astype(leaf.dtype)
