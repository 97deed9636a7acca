"""What the algorithms with critics of (obs, action) share: SAC, TD3 and DDPG."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.algos import custom_loss, parts
from jrl.algos.custom_loss import Loss
from jrl.networks import NetworkConfig
from jrl.ops import random
from jrl.types import Array, Batch, Box, Discrete, InputError, Key, Metrics, MultiDiscrete, PyTree, Space


class Policy(NamedTuple):
    init: Callable[[Key], PyTree]  # key -> params
    apply: Callable[[PyTree, PyTree], Any]  # (params, obs [N, *]) -> distribution, or actions [N, *]


class Optimization(Protocol):
    """The fields of a Config that `adam` reads."""

    max_grad_norm: float | None
    adam_eps: float


def adam(cfg: Optimization) -> optax.GradientTransformation:
    """Clipping by the global norm and Adam without the step size: see `parts.descend`.

    Leaf by leaf, unlike `parts.adam`: gathering the gradient of two stacked 256 x 256 critics in one vector takes
    longer than their update (on two CPU cores 8 ms beside 4 ms).
    """
    clip = [] if cfg.max_grad_norm is None else [optax.clip_by_global_norm(cfg.max_grad_norm)]
    return optax.chain(*clip, optax.scale_by_adam(eps=cfg.adam_eps))


def check_action(name: str, space: Space, *, discrete: bool = False) -> None:
    """Raises InputError unless `space` is a Box of floats in [-1, 1], or Discrete where `discrete`."""
    if discrete and isinstance(space, Discrete):
        return
    if not isinstance(space, Box) or not np.issubdtype(np.dtype(space.dtype), np.floating):
        able = {Discrete: "use ppo, dqn, pqn or sac", MultiDiscrete: "use ppo"}
        needs = "a Discrete one or a Box of floats" if discrete else "a Box of floats"
        raise InputError(
            f"{name} cannot act in the action space {space}, it needs {needs}: "
            + able.get(type(space), "no algorithm handles a Box of integers")
        )
    low, high = space.bounds()
    if not ((low == -1) & (high == 1)).all():
        mend = "set env.normalize_actions=true"
        if not (np.isfinite(low) & np.isfinite(high)).all():
            mend = "give the environment finite bounds and env.normalize_actions=true, or use ppo"
        raise InputError(f"{name} acts in [-1, 1], not in the action space {space}: {mend}")


def check_network(name: str, network: NetworkConfig) -> None:
    """Raises InputError where policy and critics would share a torso."""
    if network.shared:
        raise InputError(f"network.shared: {name} keeps policy and critics apart: set it to false")


def noise(key: Key, num_rows: int, shape: tuple[int, ...], axis_name: str | None) -> Array:
    """Standard normal numbers [num_rows, *shape]: this device's rows of what one device would draw for all of them."""
    if axis_name is None:
        return random.normal(key, (num_rows, *shape))
    rows = random.normal(key, (jax.lax.axis_size(axis_name) * num_rows, *shape))
    return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(axis_name) * num_rows, num_rows)


def td_gradient(
    q: Callable[[PyTree, parts.TdBatch], Array],
    params: PyTree,
    batch: Batch,
    target: Array,
    axis_name: str | None,
    *,
    loss: Loss | None = None,
    net: Any = None,
) -> tuple[PyTree, Metrics, Array]:
    """The gradient of half the squared TD error, summed over critics that have the same target.

    Args:
      q: (params, batch) -> [C, N] f32, each critic's value of the action taken.
      params: of the critics.
      batch: of weight 0 on void rows.
      target: [N] f32; without gradient.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: a user's in the place of the TD error's, which gets `net`, the critics; None: none is.
    Returns:
      gradient like `params`, metrics, and priority [N] f32: the absolute TD error, averaged over the critics.
    """

    def own_loss(params, batch: parts.TdBatch):
        weight, target = batch.weight, batch.target
        mean = lambda x: jnp.mean(weight * x)
        values = q(params, batch)
        error = values - target[None]
        losses = 0.5 * jnp.mean(weight[None] * jnp.square(error), 1)
        metrics = {"loss/value": losses.mean(), "value/q": mean(values.mean(0)), "value/target": mean(target)}
        return losses.sum(), (metrics, jnp.where(weight > 0, jnp.abs(error).mean(0), 0.0))

    td_batch = parts.TdBatch(**vars(batch), target=jax.lax.stop_gradient(target))
    td_loss = custom_loss.over_replay(loss, own_loss, net)
    gradient, (metrics, priority) = jax.grad(td_loss, has_aux=True)(params, td_batch)
    gradient, metrics = parts.pmean((gradient, metrics), axis_name)
    return gradient, metrics, priority
