"""Parts of several algorithms: row weights, counters, reward scaling, target networks, checks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

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


def with_default_init(network: NetworkConfig, default: NetworkConfig) -> NetworkConfig:
    """Returns `network` with the initial weights of an algorithm's `default` if it has none."""
    return replace(network, init=network.init or default.init)


def count_steps(env_steps: Array, rollout: Rollout, axis_name: str | None) -> Array:
    """Adds a rollout's environment steps over all devices to `env_steps` [] u32.

    Steps are unmasked rows, or with several agents the rows with at least one agent.
    """
    mask, over = rollout.mask, rollout.over
    if COUNTS_STEP in rollout.extras:
        mask = mask & rollout.extras[COUNTS_STEP]
    is_step = mask if over is None else mask.reshape(*over.shape, -1).any(-1)
    steps = collectives.psum(is_step.sum(dtype=jnp.uint32), axis_name)
    return env_steps + jnp.minimum(steps, jnp.uint32(_SATURATED) - env_steps)


def every(count: int, state: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to a State in every `count`-th update."""
    if count == 1:
        return change(state)
    return jax.lax.cond(state.updates % count == 0, change, lambda state: state, state)


def after(
    count: int, state: Any, change: Callable[[Any], Any], before: Callable[[Any], Any] = lambda state: state
) -> Any:
    """Applies `change` to a State, but `before` in the first `count` updates, the present one included."""
    if count == 0:
        return change(state)
    return jax.lax.cond(state.updates > count, change, before, state)


def moved(target: PyTree, params: PyTree, tau: Any, due: Any = True) -> PyTree:
    """Returns the Polyak average (1 - tau) target + tau params if `due`; with tau 1 exactly `params`."""
    move = lambda old, new: (1.0 - tau) * old + tau * new
    if due is True:
        return jax.tree.map(move, target, params)
    return jax.tree.map(lambda old, new: jnp.where(due, move(old, new), old), target, params)


@struct.dataclass(kw_only=True)
class TdBatch(Batch):
    """A Batch with targets of the values of its actions."""

    target: Array  # [N] f32; for DQN, and critics of distributions, [N, K], as the head reads it


class QNetwork(NamedTuple):
    """A Q network, as a user's loss gets it."""

    init: Callable[[Key], PyTree]  # key -> params
    q: Callable[[PyTree, PyTree], Array]  # (params, obs [N, *]) -> [N, A] f32


def zero_masked(valid: Array, tree: PyTree) -> PyTree:
    """Sets leaves to zero where `valid`, of their leading axes, is False; a product would keep NaN."""
    clear = lambda x: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim))), x, jnp.zeros_like(x))
    return jax.tree.map(clear, tree)


def without_masked(batch: Batch) -> Batch:
    """Sets masked transitions, with weight 0, to zero."""
    return replace(zero_masked(batch.weight > 0, batch), weight=batch.weight, index=batch.index)


def weights(mask: Array, axis_name: str | None) -> Array:
    """Returns [T, B] f32: 0 on masked rows, the same on all others, 1 on average over all rows and devices.

    >>> weights(jnp.array([[True, False], [True, True]]), None).mean(), weights(jnp.array([[True, False]]), None)
    (Array(1., dtype=float32), Array([[2., 0.]], dtype=float32))
    """
    weight = mask.astype(jnp.float32)
    return weight / jnp.maximum(pmean(weight.mean(), axis_name), 1e-8)


def standardize(x: Array, weight: Array, axis_name: str | None) -> Array:
    """Returns `x` scaled to weighted mean 0 and deviation 1, over all devices."""
    mean = pmean(jnp.mean(weight * x), axis_name)
    variance = pmean(jnp.mean(weight * (x - mean) ** 2), axis_name)
    return (x - mean) / (jnp.sqrt(variance) + 1e-8)


def value_metrics(target: Array, value: Array, weight: Array, axis_name: str | None) -> Metrics:
    """Returns the explained variance of `value` [T, B] before the update, and the mean of `target` [T, B]."""
    explained = losses.explained_variance(target, value, weight, axis_name=axis_name)
    return {"value/explained_variance": explained, "value/target": pmean(jnp.mean(weight * target), axis_name)}


@struct.dataclass
class BoundedReturns:
    """Statistics of the discounted return, with `normalize_reward_bound`."""

    stats: normalize.RunningStats
    peak: Array  # [] f32, greatest absolute discounted return so far


def init_returns(cfg: Any) -> PyTree:
    """Returns empty statistics of the discounted return; () without `normalize_reward`."""
    if not cfg.normalize_reward:
        return ()
    stats = normalize.init(())
    return stats if cfg.normalize_reward_bound is None else BoundedReturns(stats, jnp.zeros((), jnp.float32))


def observe_returns(stats: PyTree, rollout: Rollout, axis_name: str | None) -> PyTree:
    """Adds a rollout's running discounted returns to the statistics; () stays ()."""
    if isinstance(stats, BoundedReturns):
        size = jnp.where(rollout.mask, jnp.abs(rollout.extras["running_return"]), 0.0)
        peak = jnp.maximum(stats.peak, collectives.pmax(size.max(), axis_name))
        return BoundedReturns(observe_returns(stats.stats, rollout, axis_name), peak)
    if not isinstance(stats, normalize.RunningStats):
        return stats
    weight = rollout.mask.astype(jnp.float32)
    return normalize.update(stats, rollout.extras["running_return"], weight, axis_name=axis_name)


def scale_reward(cfg: Any, stats: PyTree, reward: Array) -> Array:
    """Returns rewards divided by the deviation of the discounted return and clipped; unchanged without statistics.

    Without clipping, one rare reward after many small ones would be a target thousands of deviations away. An n-step
    transition has one reward, the discounted sum. With `normalize_reward_bound` the divisor is at least the greatest
    discounted return divided by this bound (SimbaV2, arXiv:2502.15280: "reward bounding and scaling").
    """
    if isinstance(stats, BoundedReturns):
        scale = jnp.maximum(normalize.std(stats.stats), stats.peak / cfg.normalize_reward_bound)
    elif isinstance(stats, normalize.RunningStats):
        scale = normalize.std(stats)
    else:
        return reward
    reward, bound = reward / (scale + 1e-8), cfg.normalize_reward_clip
    return reward if bound is None else jnp.clip(reward, -bound, bound)


def name_of(cfg: Any) -> str:
    """Returns an algorithm's name, the name of its module."""
    return type(cfg).__module__.rpartition(".")[2]


def check_action(cfg: Any, space: Space) -> None:
    """Raises InputError unless the algorithm of `cfg` acts in `space`; names the algorithms that do."""
    kinds = getattr(cfg, "action_kinds", cfg.acts_in)  # action_kinds depends on options of the Config
    if kinds is Space:  # jrl.distributions raises for unsupported spaces
        return
    whole = isinstance(space, Box) and not np.issubdtype(np.dtype(space.dtype), np.floating)
    if isinstance(space, kinds) and not whole:
        return
    known: dict[str, Any] = {name: algos.get_config_class(name) for name in algos.names()}
    special = lambda config: config.in_teams or config.has_teacher or config.has_members or not config.has_memory
    fits = lambda config: isinstance(space, config.acts_in) and not special(config)
    others = [name for name, config in known.items() if fits(config)]
    fix = "no algorithm handles a Box of integers" if whole else f"use {algos.either(algos.alike(cfg, others))}"
    names = ["float Box" if kind is Box else kind.__name__ for kind in get_args(kinds) or (kinds,)]
    raise InputError(f"{name_of(cfg)} needs a {' or '.join(names)} action space, not {space}: {fix}")


def check_network(cfg: Any, network: NetworkConfig) -> None:
    """Raises InputError if the algorithm of `cfg` does not support options of the network."""
    errors = algos.critic_faults(cfg, network) + algos.regularization_faults(cfg, network)
    if errors := errors + algos.memory_faults(cfg, network):
        raise InputError(*errors)
