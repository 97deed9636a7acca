"""Shapes of arrays that stand beside rewards."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

__all__ = ["check"]


def check(axes: str, reward: Any, others: Mapping[str, Any], **own: Callable[[int, int], tuple[int, int]]) -> None:
    """Raises ValueError unless `reward` has two axes, and each of the others, by name, its shape or its own.

    Args:
      axes: of the reward, for the message, as `[T, B]`.
      reward: an array.
      others: arrays by name.
      own: name -> the shape of the array by that of the reward, where it has another.
    """
    shape = jnp.shape(reward)
    if len(shape) != 2:
        raise ValueError(f"reward must be {axes}, got shape {shape}")
    expected = {name: of_reward(*shape) for name, of_reward in own.items()}
    wrong = [
        f"{name} must be {expected.get(name, shape)}, got {jnp.shape(x)}"
        for name, x in others.items()
        if jnp.shape(x) != expected.get(name, shape)
    ]
    if wrong:
        raise ValueError(f"reward is {shape}: " + "; ".join(wrong))
