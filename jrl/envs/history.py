"""History in observations: the latest frames, the previous action, the previous reward.

History starts empty with each episode: on the step after an end, and after an environment was made again. At a soft
horizon (`jrl.envs.limits`) the environment continues, but its history starts empty, as a recurrent state does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.envs.transform import State, Transform
from jrl.types import (
    Array,
    Box,
    Dict,
    EnvSpec,
    InputError,
    PyTree,
    Space,
    StepResult,
    Tuple,
)

PREV_ACTION, PREV_REWARD = "prev_action", "prev_reward"
# arguments of `build_history` -> keys of a config
KEYS = {
    "frame_stack": "env.frame_stack",
    PREV_ACTION: "network.use_prev_action",
    PREV_REWARD: "network.use_prev_reward",
}


def history_options(cfg: Any) -> dict[str, Any]:
    """Returns the history that a run's observations have, as arguments of `build_history`; {}: none."""
    found = {"frame_stack": cfg.env.frame_stack, PREV_ACTION: cfg.network.use_prev_action}
    found[PREV_REWARD] = cfg.network.use_prev_reward
    return {name: value for name, value in found.items() if value > 1 or value is True}


class History(NamedTuple):
    """Memory of n environments and its use in their observations; for numpy and jax arrays."""

    spec: EnvSpec  # spec of the policy's observations
    empty: Callable[..., PyTree]  # (n, xp=numpy) -> memory [n, ...] at the start of an episode
    # (memory, obs [n, *], previous action [n, *], its reward [n], whether an episode begins [n] bool)
    # -> (memory, obs [n, *] of `spec`); action and reward are ignored if an episode begins
    see: Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[PyTree, PyTree]]


def build_history(
    spec: EnvSpec, *, frame_stack: int = 1, prev_action: bool = False, prev_reward: bool = False
) -> History | None:
    """Returns the history of a config; None: all arguments are off.

    Args:
      spec: spec of environments without history; its action space is the policy's. Each kind of agents has its own
        history.
      frame_stack: n. Each Box of the observation except action_mask becomes its latest n frames, the newest last; the
        first frame of an episode is repeated. Images with channels (three axes, see `spaces.channel_axis`) become
        [C * n, H, W] or [H, W, C * n]; other arrays become [n, *]. Dtype, bounds and integer spaces stay.
      prev_action, prev_reward: the observation is a Dict of its own parts (or "obs") with these two parts: the action
        that the policy chose, and the environment's reward f32. Zeros at the start of an episode.
    Raises:
      InputError: no Box to stack, or the observation has a part of that name.
    """
    if frame_stack == 1 and not (prev_action or prev_reward):
        return None
    if spec.kinds:
        return _build_by_kind(spec, frame_stack=frame_stack, prev_action=prev_action, prev_reward=prev_reward)
    stacks = [None] * len(spaces.leaves(spec.observation)) if frame_stack == 1 else _build_stacks(spec, frame_stack)
    space = spec.observation
    if frame_stack > 1:
        parts = zip(spaces.leaves(space), stacks, strict=True)
        stacked = [leaf if stack is None else stack.space for (_, leaf), stack in parts]
        space = spaces.replace_leaves(space, iter(stacked))
    added: list[tuple[str, Space]] = []
    if prev_action:
        added.append((PREV_ACTION, spec.action))
    if prev_reward:
        added.append((PREV_REWARD, Box((), "float32")))
    own = space.items if isinstance(space, Dict) else (("obs", space),)
    for name, _ in added:
        if name in dict(own):
            raise InputError(
                f"network.use_{name}: the observation has a part {name} already: leave the key out, or rename the part"
            )
    is_dict = isinstance(space, Dict)

    def empty(n: int, xp: Any = np) -> PyTree:
        return [xp.zeros((n, *stack.space.shape), stack.space.dtype) for stack in stacks if stack is not None]

    def see(memory: PyTree, obs: PyTree, action: PyTree, reward: Array, fresh: Array) -> tuple[PyTree, PyTree]:
        xp: Any = np if isinstance(reward, np.ndarray) else jnp
        if memory:
            leaves, structure = jax.tree.flatten(obs)
            held = iter(memory)
            leaves = [x if s is None else s.push(xp, next(held), x, fresh) for x, s in zip(leaves, stacks, strict=True)]
            memory = [x for x, s in zip(leaves, stacks) if s is not None]
            obs = jax.tree.unflatten(structure, leaves)
        if added:
            obs = dict(obs) if is_dict else {"obs": obs}
        if prev_action:
            obs[PREV_ACTION] = jax.tree.map(lambda x: xp.where(_expand_like(fresh, x), xp.zeros_like(x), x), action)
        if prev_reward:
            obs[PREV_REWARD] = xp.where(fresh, xp.zeros_like(reward), reward).astype("float32")
        return memory, obs

    if added:
        space = Dict((*own, *added))
    return History(spec._replace(observation=space, env_observation=spec.observation), empty, see)


def add_history(
    spec: EnvSpec, *, frame_stack: int = 1, prev_action: bool = False, prev_reward: bool = False
) -> Transform | None:
    """Options `env.frame_stack`, `network.use_prev_action`, `network.use_prev_reward`; arguments as `build_history`.

    The previous action is the policy's, unless an option further out changes actions.
    """
    found = build_history(spec, frame_stack=frame_stack, prev_action=prev_action, prev_reward=prev_reward)
    if found is None:
        return None

    def init(xp: Any) -> State:
        return {"memory": found.empty(spec.num_envs, xp), "ended": xp.ones(spec.num_envs, bool)}

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        begins = state["ended"]
        if result.several is not None:  # an agent's first observation is on its last absent step
            begins = begins | result.several.absent
        if result.failed is not None:
            begins = begins | result.failed
        memory, obs = found.see(state["memory"], result.obs, action, result.reward, begins)
        state = {**state, "memory": memory, "ended": result.terminated | result.truncated}
        return state, result._replace(obs=obs)

    return Transform(found.spec, observe=observe, init=init)


def _build_by_kind(spec: EnvSpec, **asked: Any) -> History:
    """Returns the histories of agents of different kinds as one."""
    each = [found for one in spaces.by_kind(spec) if (found := build_history(one, **asked)) is not None]
    sizes = [len(kind) for kind in spec.kinds]

    def empty(n: int, xp: Any = np) -> PyTree:
        return [one.empty(n * size // sum(sizes), xp) for one, size in zip(each, sizes, strict=True)]

    def see(memory: PyTree, obs: PyTree, action: PyTree, reward: Array, fresh: Array) -> tuple[PyTree, PyTree]:
        of_all = (spaces.rows_by_kind(spec, x) for x in (reward, fresh))
        rows = zip(each, memory, obs, action, *of_all, strict=True)
        after = [one.see(*own) for one, *own in rows]
        return [held for held, _ in after], tuple(seen for _, seen in after)

    space = Tuple(tuple(one.spec.observation for one in each))
    return History(spec._replace(observation=space, env_observation=spec.observation), empty, see)


# ---------------------------------------------------------------- frames


class _Stack(NamedTuple):
    """The latest n frames of one array of the observation."""

    space: Box  # space of the stack
    n: int
    size: int  # size of one frame along `axis`
    axis: int  # stacked axis of arrays [B, *]
    new: bool  # whether frames lack that axis

    def push(self, xp: Any, held: Array, x: Array, fresh: Array) -> Array:
        frame = xp.expand_dims(x, self.axis) if self.new else x
        older = held[(slice(None),) * self.axis + (slice(self.size, None),)]
        begun = xp.concatenate([frame] * self.n, self.axis)
        return xp.where(_expand_like(fresh, begun), begun, xp.concatenate([older, frame], self.axis))


def _build_stacks(spec: EnvSpec, n: int) -> list[_Stack | None]:
    """Returns the stack of each leaf of the observation; None: the leaf is not stacked."""
    masked = isinstance(spec.observation, Dict)
    found = [
        _build_stack(leaf, n) if isinstance(leaf, Box) and not (masked and path == spaces.ACTION_MASK) else None
        for path, leaf in spaces.leaves(spec.observation)
    ]
    if not any(found):
        raise InputError(f"env.frame_stack: expected an observation with a Box, got {spec.observation}: use 1, not {n}")
    return found


def _build_stack(leaf: Box, n: int) -> _Stack:
    shape = leaf.shape
    new = len(shape) != 3
    at = 0 if new else spaces.channel_axis(leaf)
    size = 1 if new else shape[at]
    frame = (1, *shape) if new else shape

    def bound(b: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if not isinstance(b, tuple):
            return b
        return tuple(np.concatenate([np.asarray(b, np.float64).reshape(frame)] * n, at).reshape(-1).tolist())

    stacked = (*frame[:at], size * n, *frame[at + 1 :])
    space = Box(stacked, leaf.dtype, bound(leaf.low), bound(leaf.high))
    if len(stacked) == 3 and spaces.channel_axis(space) != at:
        space = dataclasses.replace(space, channels=at)
    return _Stack(space, n, size, at + 1, new)


def _expand_like(fresh: Array, x: Array) -> Array:
    """Returns `fresh` [B] as [B, 1, ...], to broadcast over x [B, *]."""
    return fresh.reshape(fresh.shape + (1,) * (x.ndim - 1))
