"""History in observations: the latest frames, the previous action, the previous reward.

All of it begins anew with an episode: on the row after an end, and where an environment failed and was made anew. At a
soft horizon (`jrl.envs.limits`) the environment goes on and what an observation tells does not: as the state of a
recurrent policy, it knows nothing of the time before.
"""

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
# arguments of `history` -> keys of a config
KEYS = {
    "frame_stack": "env.frame_stack",
    PREV_ACTION: "network.use_prev_action",
    PREV_REWARD: "network.use_prev_reward",
}


def asked(cfg: Any) -> dict[str, Any]:
    """Returns what a run's observations hold of earlier steps, as arguments of `history`; {} for nothing."""
    found = {"frame_stack": cfg.env.frame_stack, PREV_ACTION: cfg.network.use_prev_action}
    found[PREV_REWARD] = cfg.network.use_prev_reward
    return {name: value for name, value in found.items() if value > 1 or value is True}


class History(NamedTuple):
    """Memory of n environments, and how it enters their observations; for numpy and jax arrays alike."""

    spec: EnvSpec  # what the policy sees
    empty: Callable[..., PyTree]  # (n, xp=numpy) -> memory [n, ...] of environments that begin an episode
    # (memory, obs [n, *], the action before it [n, *], its reward [n], whether an episode begins [n] bool)
    # -> (memory, obs [n, *] of `spec`); action and reward do not count where one begins
    see: Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[PyTree, PyTree]]


def history(
    spec: EnvSpec, *, frame_stack: int = 1, prev_action: bool = False, prev_reward: bool = False
) -> History | None:
    """Makes the history that a config asks for.

    Args:
      spec: of environments without; its action space is the policy's. Of agents by kind each kind has its own history.
      frame_stack: n. Each Box of the observation, but an action_mask, is its latest n, the newest last; the first of
        an episode is repeated. Images with channels, which are the smaller of the first and last of three axes, become
        [C * n, H, W] or [H, W, C * n]; all others [n, *]. Dtype and bounds stay, and so do spaces of integers.
      prev_action, prev_reward: the observation is a Dict, of its own parts if it was one before and else of "obs", with
        these two: an element of the action space, as the policy chose it, and the reward f32 as the environment gave
        it. Zeros where an episode begins.
    Returns:
      None where all is off.
    Raises:
      InputError: no Box to stack, or a part of the observation that has such a name already.
    """
    if frame_stack == 1 and not (prev_action or prev_reward):
        return None
    if spec.kinds:
        return _of_kinds(spec, frame_stack=frame_stack, prev_action=prev_action, prev_reward=prev_reward)
    stacks = [None] * len(spaces.leaves(spec.observation)) if frame_stack == 1 else _stacks(spec, frame_stack)
    space = spec.observation
    if frame_stack > 1:
        parts = zip(spaces.leaves(space), stacks, strict=True)
        space = _replaced(space, iter([leaf if stack is None else stack.space for (_, leaf), stack in parts]))
    added: list[tuple[str, Space]] = []
    if prev_action:
        added.append((PREV_ACTION, spec.action))
    if prev_reward:
        added.append((PREV_REWARD, Box((), "float32")))
    own = space.items if isinstance(space, Dict) else (("obs", space),)
    for name, _ in added:
        if name in dict(own):
            raise InputError(
                f"network.use_{name}: the observation has a part {name} of its own: leave it out, or name that "
                "part otherwise"
            )
    is_dict = isinstance(space, Dict)

    def empty(n: int, xp: Any = np) -> PyTree:
        return [xp.zeros((n, *stack.space.shape), stack.space.dtype) for stack in stacks if stack is not None]

    def see(memory: PyTree, obs: PyTree, action: PyTree, reward: Array, fresh: Array) -> tuple[PyTree, PyTree]:
        xp: Any = np if isinstance(reward, np.ndarray) else jnp
        if memory:
            leaves, structure = jax.tree.flatten(obs)
            held = iter(memory)
            leaves = [x if s is None else s.put(xp, next(held), x, fresh) for x, s in zip(leaves, stacks, strict=True)]
            memory = [x for x, s in zip(leaves, stacks) if s is not None]
            obs = jax.tree.unflatten(structure, leaves)
        if added:
            obs = dict(obs) if is_dict else {"obs": obs}
        if prev_action:
            obs[PREV_ACTION] = jax.tree.map(lambda x: xp.where(_along(fresh, x), xp.zeros_like(x), x), action)
        if prev_reward:
            obs[PREV_REWARD] = xp.where(fresh, xp.zeros_like(reward), reward).astype("float32")
        return memory, obs

    if added:
        space = Dict((*own, *added))
    return History(spec._replace(observation=space, env_observation=spec.observation), empty, see)


def remember(
    spec: EnvSpec, *, frame_stack: int = 1, prev_action: bool = False, prev_reward: bool = False
) -> Transform | None:
    """Option `env.frame_stack`, `network.use_prev_action` and `network.use_prev_reward`; arguments as of `history`.

    The previous action is the one that this option gets: the policy's, unless an option after this one changes actions.
    """
    found = history(spec, frame_stack=frame_stack, prev_action=prev_action, prev_reward=prev_reward)
    if found is None:
        return None

    def init(xp: Any) -> State:
        return {"memory": found.empty(spec.num_envs, xp), "ended": xp.ones(spec.num_envs, bool)}

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        begins = state["ended"]
        if result.several is not None:  # an agent's first observation is on the last row on which it is absent
            begins = begins | result.several.absent
        if result.failed is not None:
            begins = begins | result.failed
        memory, obs = found.see(state["memory"], result.obs, action, result.reward, begins)
        state = {**state, "memory": memory, "ended": result.terminated | result.truncated}
        return state, result._replace(obs=obs)

    return Transform(found.spec, observe=observe, init=init)


def _of_kinds(spec: EnvSpec, **asked: Any) -> History:
    """Returns the histories of agents of different kinds, side by side."""
    each = [found for one in spaces.by_kind(spec) if (found := history(one, **asked)) is not None]
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
    """The latest n of one array of the observation."""

    space: Box  # of the stack
    n: int
    size: int  # of one frame along `axis`
    axis: int  # of arrays [B, *]
    new: bool  # frames lack that axis

    def put(self, xp: Any, held: Array, x: Array, fresh: Array) -> Array:
        frame = xp.expand_dims(x, self.axis) if self.new else x
        older = held[(slice(None),) * self.axis + (slice(self.size, None),)]
        begun = xp.concatenate([frame] * self.n, self.axis)
        return xp.where(_along(fresh, begun), begun, xp.concatenate([older, frame], self.axis))


def _stacks(spec: EnvSpec, n: int) -> list[_Stack | None]:
    """Returns the stack of each leaf of the observation; None for one that stays."""
    masked = isinstance(spec.observation, Dict)
    found = [
        _stack(leaf, n) if isinstance(leaf, Box) and not (masked and path == spaces.ACTION_MASK) else None
        for path, leaf in spaces.leaves(spec.observation)
    ]
    if not any(found):
        raise InputError(f"env.frame_stack {n}: the observation {spec.observation} has no Box to stack: use 1")
    return found


def _stack(leaf: Box, n: int) -> _Stack:
    shape = leaf.shape
    new = len(shape) != 3
    at = 0 if new or shape[0] < shape[-1] else 2
    size = 1 if new else shape[at]
    frame = (1, *shape) if new else shape

    def bound(b: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if not isinstance(b, tuple):
            return b
        return tuple(np.concatenate([np.asarray(b, np.float64).reshape(frame)] * n, at).reshape(-1).tolist())

    stacked = (*frame[:at], size * n, *frame[at + 1 :])
    return _Stack(Box(stacked, leaf.dtype, bound(leaf.low), bound(leaf.high)), n, size, at + 1, new)


def _replaced(space: Space, new: Any) -> Space:
    """Returns `space` with the leaves that the iterator `new` gives, in the order of `spaces.leaves`."""
    if isinstance(space, Dict):
        found = {name: _replaced(part, new) for name, part in sorted(space.items)}
        return Dict(tuple((name, found[name]) for name, _ in space.items))
    if isinstance(space, Tuple):
        return Tuple(tuple(_replaced(part, new) for part in space.items))
    return next(new)


def _along(fresh: Array, x: Array) -> Array:
    """Returns `fresh` [B] as [B, 1, ...], for elements [B, *]."""
    return fresh.reshape(fresh.shape + (1,) * (x.ndim - 1))
