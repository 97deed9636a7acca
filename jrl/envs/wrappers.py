"""What stands between policy and environment: the action's range, the reward the learner sees."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.envs import spec as spaces
from jrl.types import Array, Box, Space


def action_transform(space: Space, *, normalize: bool, clip: bool) -> tuple[Space, Callable[[Array], Array] | None]:
    """The space that the policy acts in, and the function from its actions to the environment's.

    Args:
      space: of the environment.
      normalize: the policy acts in [-1, 1]; elements whose bounds are not finite stay as they are.
      clip: what reaches the environment is clipped to its bounds, where they are finite.
    Returns:
      The policy's space, and a function of numpy or jax arrays [B, *shape] that keeps float32; None where there is
      nothing to do: no Box, or neither flag.
    """
    if not isinstance(space, Box) or not (normalize or clip):
        return space, None
    low, high = (b.astype(np.float32) for b in space.bounds())
    affine = np.isfinite(low) & np.isfinite(high) & normalize
    with np.errstate(invalid="ignore"):  # inf - inf, of elements that are not affine
        scale = np.where(affine, (high - low) / 2, 1).astype(np.float32)
        middle = np.where(affine, (high + low) / 2, 0).astype(np.float32)

    def fn(action: Array) -> Array:
        xp: Any = np if isinstance(action, np.ndarray) else jnp
        # [1, *shape] constants: batch axes are never added silently
        action = action * scale[None] + middle[None]
        return xp.clip(action, low[None], high[None]) if clip else action

    return spaces.box(space.shape, np.where(affine, -1.0, low), np.where(affine, 1.0, high), space.dtype), fn


def reward_transform(
    clip_rewards: bool | float | tuple[float, float] | None, *, is_atari: bool
) -> Callable[[Array], Array] | None:
    """What the learner sees of a reward; episode statistics keep the raw one.

    Args:
      clip_rewards: None: the sign for Atari, else as it is; True: the sign; False: as it is; a number c: clipped to
        [-c, c]; a pair: clipped to it.
    Returns:
      A function of jax arrays, or None for no change.
    """
    if clip_rewards is None:
        clip_rewards = is_atari
    if clip_rewards is False:
        return None
    if clip_rewards is True:
        return jnp.sign
    low, high = clip_rewards if isinstance(clip_rewards, tuple | list) else (-clip_rewards, clip_rewards)
    return lambda reward: jnp.clip(reward, low, high)
