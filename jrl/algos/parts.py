"""What several algorithms are made of: gradient clipping with Adam, reductions over devices, void rows, counters."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from jrl.algos import gradients
from jrl.hyper import NetworkConfig
from jrl.ops import normalize
from jrl.types import Array, Batch, Box, Discrete, Key, Metrics, PyTree, Rollout, Space

_SATURATED = 2**32 - 1  # environment steps are counted in uint32 on the device and stay there, should they get that far


class Clipping(Protocol):
    """The fields of a Config that `adam` reads; each clip may be None."""

    max_grad_norm: float | None
    max_leaf_norm: float | None
    max_grad_value: float | None
    adam_eps: float


class RewardClipping(Protocol):
    """The field of a Config that `scaled_reward` reads."""

    normalize_reward_clip: float | None


def adam(cfg: Clipping) -> optax.GradientTransformation:
    """Clipping and Adam without the step size, which a schedule may change: see `descend`."""
    per_leaf = []
    if cfg.max_grad_value is not None:
        per_leaf.append(optax.clip(cfg.max_grad_value))
    if cfg.max_leaf_norm is not None:
        norm = lambda g: jnp.sqrt(jnp.sum(g**2))
        clip = lambda g: g * jnp.minimum(1.0, cfg.max_leaf_norm / (norm(g) + 1e-6))
        per_leaf.append(optax.stateless(lambda updates, params: jax.tree.map(clip, updates)))
    whole = [] if cfg.max_grad_norm is None else [optax.clip_by_global_norm(cfg.max_grad_norm)]
    # one flat vector: ten small arrays cost ten times the overhead of one
    own = optax.chain(*per_leaf, optax.flatten(optax.chain(*whole, optax.scale_by_adam(eps=cfg.adam_eps))))
    return gradients.optimizer(own)


def initialised(network: NetworkConfig, default: NetworkConfig) -> NetworkConfig:
    """`network`, whose initial weights are those of an algorithm's `default` unless it says which."""
    return replace(network, init=network.init or default.init)


def descend(optimizer: optax.GradientTransformation, lr, gradient: PyTree, opt_state: PyTree, params: PyTree):
    """One step of size `lr` against the gradient: (params, opt_state)."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: -lr * u, updates)), opt_state


def pmean(x: PyTree, axis_name: str | None) -> PyTree:
    """The mean over the mapped devices; `x` outside of a mapped program."""
    if axis_name is None:
        return x
    # one vector: the devices meet once, not once per array (2.5 times as fast for a small network on two devices)
    flat, unflatten = ravel_pytree(x)
    return unflatten(jax.lax.pmean(flat, axis_name))


def count_steps(env_steps: Array, mask: Array, axis_name: str | None) -> Array:
    """`env_steps` [] u32 plus the unmasked rows of a rollout, over all devices."""
    steps = mask.sum(dtype=jnp.uint32)
    steps = steps if axis_name is None else jax.lax.psum(steps, axis_name)
    return env_steps + jnp.minimum(steps, jnp.uint32(_SATURATED) - env_steps)


def move_target(target: PyTree, params: PyTree, tau) -> PyTree:
    """Polyak averaging: target + tau (params - target)."""
    return jax.tree.map(lambda t, p: t + tau * (p - t), target, params)


@struct.dataclass
class TdBatch(Batch):
    """A Batch, and what the values of its actions should be."""

    target: Array  # [N] f32; of DQN [N, K], as its head reads it


class QNetwork(NamedTuple):
    """A Q network as a user's loss gets it."""

    init: Callable[[Key], PyTree]  # key -> params
    q: Callable[[PyTree, PyTree], Array]  # (params, obs [N, *]) -> [N, A] f32


@struct.dataclass
class Actor:
    """What acting needs of a State where only the exploration changes with time."""

    params: PyTree
    env_steps: Array  # [] u32, for schedules of the exploration
    noisy: PyTree = ()  # parameters that act when exploring, where those are others
    obs_stats: PyTree = ()  # running statistics of observations, where those are normalised


def acting(actor: Actor, explore: bool) -> PyTree:
    """The parameters that act."""
    return actor.params if not explore or actor.noisy == () else actor.noisy


@struct.dataclass
class Carry:
    """What an algorithm with memory hands on from step to step: [B, ...] each."""

    memory: PyTree  # of the network
    exploration: PyTree


def split_carry(carry: PyTree) -> tuple[PyTree, PyTree]:
    """(the network's memory, the exploration's state) of what `join_carry` made."""
    return (carry.memory, carry.exploration) if isinstance(carry, Carry) else ((), carry)


def join_carry(memory: PyTree, exploration: PyTree) -> PyTree:
    """`Algo`'s carry: without memory the exploration's state alone."""
    return Carry(memory, exploration) if jax.tree.leaves(memory) else exploration


def carry_of(memory: Callable[[int], PyTree], exploration: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`Algo.carry` of a network's and an `Explorer`'s."""
    return lambda batch_size, first=0, total=None: join_carry(memory(batch_size), exploration(batch_size, first, total))


def cleared(valid: Array, tree: PyTree) -> PyTree:
    """Zeros where `valid`, with the leading axes of each leaf, is False, whatever stood there: 0 * nan is not 0."""
    clear = lambda x: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, jnp.zeros_like(x))
    return jax.tree.map(clear, tree)


def without_void(batch: Batch) -> Batch:
    """Zeros on rows of weight 0."""
    return replace(cleared(batch.weight > 0, batch), weight=batch.weight, index=batch.index)


def weights(mask: Array, axis_name: str | None) -> Array:
    """[T, B] f32: 0 on masked rows, the same on all others, 1 on average over all rows and devices."""
    weight = mask.astype(jnp.float32)
    return weight / jnp.maximum(pmean(weight.mean(), axis_name), 1e-8)


def standardized(x: Array, weight: Array, axis_name: str | None) -> Array:
    """`x` with the weighted mean 0 and deviation 1, over all devices."""
    mean = pmean(jnp.mean(weight * x), axis_name)
    variance = pmean(jnp.mean(weight * (x - mean) ** 2), axis_name)
    return (x - mean) / (jnp.sqrt(variance) + 1e-8)


def value_metrics(target: Array, value: Array, weight: Array, axis_name: str | None) -> Metrics:
    """How well `value` explained `target`, both [T, B], before it learned from it; and the mean target."""
    error = pmean(jnp.mean(weight * (target - value) ** 2), axis_name)
    mean = pmean(jnp.mean(weight * target), axis_name)
    spread = pmean(jnp.mean(weight * (target - mean) ** 2), axis_name)
    return {"value/explained_variance": 1.0 - error / jnp.maximum(spread, 1e-8), "value/target": mean}


def observe_returns(stats: PyTree, rollout: Rollout, axis_name: str | None) -> PyTree:
    """Statistics of the running discounted return with those of a rollout; () stays ()."""
    if not isinstance(stats, normalize.RunningStats):
        return stats
    weight = rollout.mask.astype(jnp.float32)
    return normalize.update(stats, rollout.extras["running_return"], weight, axis_name=axis_name)


def scaled_reward(cfg: RewardClipping, stats: PyTree, reward: Array) -> Array:
    """Rewards divided by the deviation of the running discounted return, within the bound; with () as they are.

    Without a bound one rare reward, seen after many small ones, would be a target thousands of deviations away. A
    transition of n steps has one reward, their discounted sum.
    """
    if not isinstance(stats, normalize.RunningStats):
        return reward
    reward, bound = reward / (normalize.std(stats) + 1e-8), cfg.normalize_reward_clip
    return reward if bound is None else jnp.clip(reward, -bound, bound)


def who_can(space: Space) -> str:
    """The algorithms that can act in `space`, as the mend of an error."""
    match space:
        case Discrete():
            return "use ppo, a2c, impala, appo, dqn, pqn or sac"
        case Box() if np.issubdtype(np.dtype(space.dtype), np.floating):
            return "use ppo, a2c, impala, appo, sac or td3"
        case Box():
            return "no algorithm handles a Box of integers"
    return "use ppo, a2c, impala or appo"
