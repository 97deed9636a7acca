"""Pieces that several algorithms are made of: reductions over devices, weights of rows, counters, rewards."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import algos
from jrl.errors import InputError
from jrl.fields.hyper import NetworkConfig
from jrl.ops import collectives, losses, normalize
from jrl.ops.collectives import pmean
from jrl.types import COUNTS_STEP, Array, Batch, Box, Key, Metrics, PyTree, Rollout, Space

_SATURATED = 2**32 - 1  # environment steps are counted in uint32 on the device and stay there, should they get that far


class RewardClipping(Protocol):
    """The field of a Config that `scaled_reward` reads."""

    normalize_reward_clip: float | None


def with_default_init(network: NetworkConfig, default: NetworkConfig) -> NetworkConfig:
    """Returns `network`, whose initial weights are those of an algorithm's `default` unless it says which."""
    return replace(network, init=network.init or default.init)


def count_steps(env_steps: Array, rollout: Rollout, axis_name: str | None) -> Array:
    """Adds a rollout's steps over all devices to `env_steps` [] u32: its unmasked rows, or of games with several agents
    each row on which somebody is there."""
    mask, over = rollout.mask, rollout.over
    if COUNTS_STEP in rollout.extras:
        mask = mask & rollout.extras[COUNTS_STEP]
    here = mask if over is None else mask.reshape(*over.shape, -1).any(-1)
    steps = collectives.psum(here.sum(dtype=jnp.uint32), axis_name)
    return env_steps + jnp.minimum(steps, jnp.uint32(_SATURATED) - env_steps)


def every(count: int, state: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `change` of a State, in every `count`-th update."""
    if count == 1:
        return change(state)
    return jax.lax.cond(state.updates % count == 0, change, lambda state: state, state)


def after(
    count: int, state: Any, change: Callable[[Any], Any], before: Callable[[Any], Any] = lambda state: state
) -> Any:
    """Returns `change` of a State, and in the first `count` updates `before` of it; `state.updates` has the present
    one.
    """
    if count == 0:
        return change(state)
    return jax.lax.cond(state.updates > count, change, before, state)


def moved(target: PyTree, params: PyTree, tau: Any, due: Any = True) -> PyTree:
    """Averages by Polyak's way where it is `due`: (1 - tau) target + tau params, which with tau 1 is `params` bit
    for bit.
    """
    move = lambda old, new: (1.0 - tau) * old + tau * new
    if due is True:
        return jax.tree.map(move, target, params)
    return jax.tree.map(lambda old, new: jnp.where(due, move(old, new), old), target, params)


@struct.dataclass(kw_only=True)
class TdBatch(Batch):
    """A Batch, and what the values of its actions should be."""

    target: Array  # [N] f32; of DQN [N, K], as its head reads it


class QNetwork(NamedTuple):
    """A Q network as a user's loss gets it."""

    init: Callable[[Key], PyTree]  # key -> params
    q: Callable[[PyTree, PyTree], Array]  # (params, obs [N, *]) -> [N, A] f32


def zero_masked(valid: Array, tree: PyTree) -> PyTree:
    """Puts zeros where `valid`, of the leading axes of each leaf, is False, whatever stood there: 0 * nan is not 0."""
    clear = lambda x: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, jnp.zeros_like(x))
    return jax.tree.map(clear, tree)


def without_masked(batch: Batch) -> Batch:
    """Puts zeros on masked transitions, those of weight 0."""
    return replace(zero_masked(batch.weight > 0, batch), weight=batch.weight, index=batch.index)


def weights(mask: Array, axis_name: str | None) -> Array:
    """Returns [T, B] f32: 0 on masked rows, the same on all others, 1 on average over all rows and devices.

    >>> weights(jnp.array([[True, False], [True, True]]), None).mean(), weights(jnp.array([[True, False]]), None)
    (Array(1., dtype=float32), Array([[2., 0.]], dtype=float32))
    """
    weight = mask.astype(jnp.float32)
    return weight / jnp.maximum(pmean(weight.mean(), axis_name), 1e-8)


def standardize(x: Array, weight: Array, axis_name: str | None) -> Array:
    """Returns `x` with the weighted mean 0 and deviation 1, over all devices."""
    mean = pmean(jnp.mean(weight * x), axis_name)
    variance = pmean(jnp.mean(weight * (x - mean) ** 2), axis_name)
    return (x - mean) / (jnp.sqrt(variance) + 1e-8)


def value_metrics(target: Array, value: Array, weight: Array, axis_name: str | None) -> Metrics:
    """Returns the share of the variance of `target` that `value` explained, both [T, B], before it learned; the mean
    target.
    """
    explained = losses.explained_variance(target, value, weight, axis_name=axis_name)
    return {"value/explained_variance": explained, "value/target": pmean(jnp.mean(weight * target), axis_name)}


def observe_returns(stats: PyTree, rollout: Rollout, axis_name: str | None) -> PyTree:
    """Statistics of the running discounted return with those of a rollout; () stays ()."""
    if not isinstance(stats, normalize.RunningStats):
        return stats
    weight = rollout.mask.astype(jnp.float32)
    return normalize.update(stats, rollout.extras["running_return"], weight, axis_name=axis_name)


def scale_reward(cfg: RewardClipping, stats: PyTree, reward: Array) -> Array:
    """Rewards divided by the deviation of the running discounted return, within the bound; with () as they are.

    Without a bound one rare reward, seen after many small ones, would be a target thousands of deviations away. A
    transition of n steps has one reward, their discounted sum.
    """
    if not isinstance(stats, normalize.RunningStats):
        return reward
    reward, bound = reward / (normalize.std(stats) + 1e-8), cfg.normalize_reward_clip
    return reward if bound is None else jnp.clip(reward, -bound, bound)


def name_of(cfg: Any) -> str:
    """Returns an algorithm's name, which is that of its module."""
    return type(cfg).__module__.rpartition(".")[2]


def check_action(cfg: Any, space: Space) -> None:
    """Raises InputError unless the algorithm of `cfg` acts in `space`; names those that do."""
    kinds = getattr(cfg, "action_kinds", cfg.acts_in)  # some act in others with some options
    if kinds is Space:  # what a policy cannot act in is told by jrl.distributions
        return
    known: dict[str, Any] = {name: algos.get_config_class(name) for name in algos.names()}
    others = [name for name, config in known.items() if isinstance(space, config.acts_in) and not config.in_teams]
    mend = f"use {algos.either(algos.alike(cfg, others))}"
    if isinstance(space, Box) and not np.issubdtype(np.dtype(space.dtype), np.floating):
        mend = "no algorithm handles a Box of integers"
    elif isinstance(space, kinds):
        return
    names = ["float Box" if kind is Box else kind.__name__ for kind in get_args(kinds) or (kinds,)]
    raise InputError(f"{name_of(cfg)} needs a {' or '.join(names)} action space, not {space}: {mend}")


def check_critic(cfg: Any, network: NetworkConfig) -> None:
    """Raises InputError where `network.value_inputs` has no reader in the algorithm of `cfg`."""
    if errors := algos.critic_faults(cfg, network):
        raise InputError(*errors)
