"""Checks of array shapes against the shape of rewards."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

__all__ = ["check"]


def check(axes: str, reward: Any, others: Mapping[str, Any], **rules: Callable[[int, int], tuple[int, int]]) -> None:
    """Raises ValueError unless `reward` has two axes and all other arrays have its shape, or the shape of their rule.

    Args:
      axes: names of the reward's axes for the message, for example `[T, B]`.
      reward: array.
      others: arrays by name.
      rules: array name -> function from the reward's shape to the array's expected shape.
    """
    shape = jnp.shape(reward)
    if len(shape) != 2:
        raise ValueError(f"reward must be {axes}, got shape {shape}")
    expected = {name: rule(*shape) for name, rule in rules.items()}
    wrong = [
        f"{name} must be {expected.get(name, shape)}, got {jnp.shape(x)}"
        for name, x in others.items()
        if jnp.shape(x) != expected.get(name, shape)
    ]
    if wrong:
        raise ValueError(f"reward is {shape}: " + "; ".join(wrong))
