"""Frame stacks in replay: only the newest frame is stored; the other frames are in older rows."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jrl.types import Array, Rollout


@dataclasses.dataclass(frozen=True)
class FrameStack:
    """Observations are stacks of the last `size` frames, newest last; the first observation repeats its frame.

    EnvPool and Gymnasium's FrameStackObservation do so by default. Only images are stacks: leaves of three or more
    axes. Without `restarts` some episodes continue with the frames of the previous episode, as in EnvPool after a lost
    life; the observations show which.
    """

    size: int
    axis: Literal[0, -1] = 0  # stack axis of one observation: 0 for [S, H, W], -1 for [H, W, S]
    restarts: bool = True


def is_stack(x, stack: FrameStack) -> bool:
    """Returns whether an observation leaf of one environment is a stack of frames."""
    return stack.size > 1 and len(x.shape) >= 3 and x.shape[stack.axis] == stack.size


def stored(x, stack: FrameStack):
    """Returns the shape and dtype that the ring stores for an observation leaf."""
    if not is_stack(x, stack):
        return x
    return jax.eval_shape(lambda: newest(jnp.zeros(x.shape, x.dtype), stack))


def newest(x, stack: FrameStack):
    """Returns the last frame of stacks [..., S, H, W] or [..., H, W, S]."""
    return x[..., -1, :, :] if stack.axis == 0 else x[..., -1]


def older(x, stack: FrameStack):
    """Returns all but the last frame of stacks [B, S, H, W] or [B, H, W, S], as rows [S - 1, B, H, W]."""
    return jnp.moveaxis(x, 1 if stack.axis == 0 else -1, 0)[:-1]


def broken_stacks(rollout: Rollout, stack: FrameStack) -> Array:
    """Returns the share of a rollout's rows, [] f32, whose next observation replay cannot rebuild from frames."""
    follows, alone = _joined(rollout, stack)
    begins = ~rollout.mask[:-1] & rollout.mask[1:]  # the content of padding is undefined
    begins = jnp.concatenate([begins, jnp.zeros_like(begins[:1])])
    first = alone if stack.restarts else alone | follows
    return jnp.mean(((rollout.mask & ~follows) | (begins & ~first)).astype(jnp.float32))


def begin_anew(rollout: Rollout, stack: FrameStack) -> Array:
    """Returns the rows, [T, B] bool, after which an episode begins with a new stack."""
    is_reset = ~rollout.mask
    return is_reset if stack.restarts else is_reset & _joined(rollout, stack)[1]


def _joined(rollout: Rollout, stack: FrameStack) -> tuple[Array, Array]:
    """Returns two masks, [T, B] bool, about the observation after each row.

    The first: its stack extends the previous stack by one frame. The second: it repeats a single frame.
    """
    follows = alone = jnp.ones(rollout.mask.shape, bool)
    for x, last in zip(jax.tree.leaves(rollout.obs), jax.tree.leaves(rollout.last_obs), strict=True):
        if not is_stack(last[0], stack):
            continue
        frames = lambda x: jnp.moveaxis(x, 2 if stack.axis == 0 else -1, 2)  # [T, B, S, H, W]
        before, after = frames(x), frames(jnp.concatenate([x[1:], last[None]]))
        same = lambda a, b: (a == b).reshape(*a.shape[:2], -1).all(-1)
        follows &= same(after[:, :, :-1], before[:, :, 1:])
        alone &= same(after[:, :, :-1], after[:, :, 1:])
    return follows, alone
