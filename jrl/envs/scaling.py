"""Action ranges, and the learner's rewards."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.envs import spec as spaces
from jrl.envs.backends import is_atari
from jrl.envs.transform import Transform
from jrl.fields.env import EnvConfig
from jrl.types import Array, Box, Dict, EnvSpec, InputError, PyTree, Space, Tuple


def scale_actions(spec: EnvSpec, env: EnvConfig) -> Transform | None:
    """Options `env.normalize_actions` and `env.clip_actions`."""
    space, fn = policy_actions(spec.action, env)
    if fn is None:
        return None
    return Transform(spec._replace(action=space, env_action=spec.action), act=lambda xp, state, action: fn(action))


def policy_actions(
    space: Space, env: EnvConfig, *, normalize: bool | None = None, clip: bool | None = None
) -> tuple[Space, Callable[[PyTree], PyTree] | None]:
    """Returns `action_transform` of a section `env`; `normalize` and `clip` override it."""
    return action_transform(
        space,
        normalize=env.normalize_actions if normalize is None else normalize,
        clip=env.clip_actions if clip is None else clip,
    )


def learner_reward(env: EnvConfig, custom: Callable[[Array], Array] | None = None) -> Callable[[Array], Array] | None:
    """Returns `reward_transform` of a section `env`: `env.clip_rewards`, then `env.reward_scale`."""
    return reward_transform(env.clip_rewards, is_atari=is_atari(env.id), scale=env.reward_scale, custom=custom)


def action_transform(space: Space, *, normalize: bool, clip: bool) -> tuple[Space, Callable[[PyTree], PyTree] | None]:
    """Returns the policy's action space, and the function from its actions to the environment's.

    Of a Dict or Tuple, only the Boxes are transformed.

    Args:
      space: environment's action space.
      normalize: whether the policy acts in [-1, 1]; elements without finite bounds stay.
      clip: whether actions are clipped to the environment's bounds, where finite.
    Returns:
      The policy's space, and a function of its elements, numpy or jax arrays [B, *shape], that keeps float32; None: no
      Box, or neither flag.
    """
    match space:
        case Dict():
            named = {name: action_transform(part, normalize=normalize, clip=clip) for name, part in space.items}
            if all(fn is None for _, fn in named.values()):
                return space, None
            of_names = lambda action: {name: x if (f := named[name][1]) is None else f(x) for name, x in action.items()}
            return Dict(tuple((name, part) for name, (part, _) in named.items())), of_names
        case Tuple():
            parts = [action_transform(part, normalize=normalize, clip=clip) for part in space.items]
            if all(fn is None for _, fn in parts):
                return space, None
            of_parts = lambda action: tuple(x if f is None else f(x) for x, (_, f) in zip(action, parts, strict=True))
            return Tuple(tuple(part for part, _ in parts)), of_parts
    if not isinstance(space, Box) or not (normalize or clip):
        return space, None
    low, high = spaces.float32_inside(*space.bounds())
    high = np.maximum(low, high)  # no float32 between the bounds: the environment clips
    affine = np.isfinite(low) & np.isfinite(high) & normalize
    with np.errstate(invalid="ignore"):  # inf - inf, of elements that are not affine
        scale = np.where(affine, (high - low) / 2, 1).astype(np.float32)
        middle = np.where(affine, (high + low) / 2, 0).astype(np.float32)

    def fn(action: Array) -> Array:
        xp: Any = np if isinstance(action, np.ndarray) else jnp
        # constants are [1, *shape]: a missing batch axis raises instead of being added silently
        action = action * scale[None] + middle[None]
        return xp.clip(action, low[None], high[None]) if clip else action

    return spaces.make_box(space.shape, np.where(affine, -1.0, low), np.where(affine, 1.0, high), space.dtype), fn


def reward_transform(
    clip_rewards: bool | float | tuple[float, float] | None,
    *,
    is_atari: bool,
    scale: float = 1.0,
    custom: Callable[[Array], Array] | None = None,
) -> Callable[[Array], Array] | None:
    """Returns the transform of the learner's reward: clip, scale, then `custom`. Statistics keep the raw reward.

    Args:
      clip_rewards: None: the sign for Atari, else unchanged; True: the sign; False: unchanged; a number c: clipped to
        [-c, c]; a pair: clipped to it.
      scale: factor of the clipped reward.
      custom: pure function of rewards f32 that keeps their shape.
    Returns:
      A function of jax arrays f32 to f32; None: unchanged.
    Raises:
      InputError: when called, `custom` returns another shape.
    """
    if clip_rewards is None:
        clip_rewards = is_atari
    parts: list[Callable[[Array], Array]] = []
    if clip_rewards is True:
        parts.append(jnp.sign)
    elif clip_rewards is not False:
        low, high = clip_rewards if isinstance(clip_rewards, tuple | list) else (-clip_rewards, clip_rewards)
        parts.append(lambda reward: jnp.clip(reward, low, high))
    if scale != 1.0:
        parts.append(lambda reward: reward * scale)
    if custom is not None:
        parts.append(_check_shape(custom))
    if len(parts) < 2:
        return parts[0] if parts else None

    def fn(reward: Array) -> Array:
        for part in parts:
            reward = part(reward)
        return reward

    return fn


def _check_shape(custom: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def fn(reward: Array) -> Array:
        found = custom(reward)
        if jnp.shape(found) != reward.shape:
            raise InputError(
                f"custom.reward: expected rewards of shape {reward.shape}, got {jnp.shape(found)}: return one number "
                "per reward"
            )
        return jnp.asarray(found, jnp.float32)

    return fn
