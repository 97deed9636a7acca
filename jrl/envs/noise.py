"""Sensor noise: Gaussian numbers added to observations."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.envs.randomization import TASK
from jrl.envs.transform import Draws, State, Transform
from jrl.types import Array, Box, EnvSpec, InputError, Leaf, PyTree, StepResult


def add_noise(spec: EnvSpec, *, deviation: float | Mapping[str, float]) -> Transform:
    """Option `env.observation_noise`: add Gaussian noise to observations of floats, a new one with each observation.

    The policy acts on the same numbers that rollouts and replay store. The bounds of noisy arrays become infinite.

    Args:
      spec: spec of environments with a single agent.
      deviation: standard deviation of all Boxes of floats but `task` and `action_mask`; or item -> deviation, which
        holds for all Boxes of floats within the item.
    Raises:
      InputError: an unknown item, or there are no floats.
    """
    leaves = spaces.leaves(spec.observation)
    deviations = [_find_deviation(path, leaf, deviation) for path, leaf in leaves]
    if isinstance(deviation, Mapping):
        for item in deviation:
            inside = [d for (path, _), d in zip(leaves, deviations, strict=True) if spaces.is_within(path, [item])]
            if not any(d is not None for d in inside):
                floats = [path for path, leaf in leaves if path and _is_float(leaf)]
                fix = f"name some of {', '.join(floats)}" if floats else "use a number"
                raise InputError(f"env.observation_noise.{item}: observations have no floats of this name: {fix}")
    elif not any(d is not None for d in deviations):
        raise InputError(f"env.observation_noise: expected floats, got observations {spec.observation}: leave it out")
    sizes = [0 if d is None else int(np.prod(leaf.shape)) for (_, leaf), d in zip(leaves, deviations, strict=True)]
    ends = np.cumsum(sizes)

    def observe(xp: Any, state: State, action: PyTree, result: StepResult, draws: Array) -> tuple[State, StepResult]:
        arrays, structure = jax.tree.flatten(result.obs)
        noisy = [
            x if d is None else (x + d * draws[:, end - size : end].reshape(x.shape)).astype(x.dtype)
            for x, d, size, end in zip(arrays, deviations, sizes, ends, strict=True)
        ]
        return state, result._replace(obs=jax.tree.unflatten(structure, noisy))

    unbounded = iter(
        leaf if d is None else Box(leaf.shape, leaf.dtype) for (_, leaf), d in zip(leaves, deviations, strict=True)
    )
    space = spaces.replace_leaves(spec.observation, unbounded)
    return Transform(spec._replace(observation=space), observe=observe, draws=Draws(int(ends[-1]), normal=True))


def _is_float(leaf: Leaf) -> bool:
    return isinstance(leaf, Box) and np.dtype(leaf.dtype).kind == "f"


def _find_deviation(path: str, leaf: Leaf, deviation: float | Mapping[str, float]) -> float | None:
    """Returns the deviation of a leaf's noise; None: it has no noise."""
    if not _is_float(leaf):
        return None
    if isinstance(deviation, Mapping):
        return next((d for item, d in deviation.items() if spaces.is_within(path, [item])), None)
    return None if path in (TASK, spaces.ACTION_MASK) else deviation
