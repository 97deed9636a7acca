"""Losses of a batch of N rows, one number per row, and the weighted means that reduce them.

The weight of a masked row is 0; only `weighted_mean` and `explained_variance` read weights.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jrl.ops import collectives

__all__ = [
    "approx_kl",
    "clipped_surrogate",
    "clipped_value_loss",
    "explained_variance",
    "huber",
    "surrogate",
    "weighted_mean",
]

# exp(20) is 5e8: far beyond any clip, and its square is still finite. Without a bound the ratio of a masked row could
# overflow, and 0 * inf would turn the whole batch into NaN.
_MAX_LOG_RATIO = 20.0


def weighted_mean(x, weight, *, axis_name: str | None = None) -> jax.Array:
    """Returns sum(x * weight) / sum(weight); 0 if all weights are 0.

    Args:
      x:      f32 of any shape, usually [N].
      weight: the shape of `x`, f32 or bool, at least 0.
      axis_name: mapped axis over devices, whose rows count together; None: no such axis.
    Returns:
      [] f32.
    Raises:
      ValueError: shapes disagree.

    >>> weighted_mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 0.0]))
    Array(2., dtype=float32)
    """
    _check_shapes(x=x, weight=weight)
    weight = jnp.asarray(weight, jnp.float32)
    total = collectives.psum(jnp.stack([jnp.sum(x * weight), jnp.sum(weight)]), axis_name)
    return total[0] / jnp.maximum(total[1], 1e-8)


def surrogate(log_prob, old_log_prob, advantage) -> jax.Array:
    """Returns the importance-weighted policy loss, -ratio * A (arXiv:1502.05477, eq. 14).

    The ratio is bounded by exp(20), without gradient beyond.

    Args:
      log_prob, old_log_prob, advantage: [N] f32, as for `clipped_surrogate`.
    Returns:
      [N] f32.
    Raises:
      ValueError: shapes disagree.

    >>> surrogate(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])), jnp.array([3.0]))
    Array([-6.], dtype=float32)
    """
    _check_shapes(log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    return -jnp.exp(_log_ratio(log_prob, old_log_prob)) * lax.stop_gradient(advantage)


def clipped_surrogate(log_prob, old_log_prob, advantage, *, clip_eps) -> tuple[jax.Array, jax.Array]:
    """Returns PPO's policy loss, -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) (arXiv:1707.06347, eq. 7).

    The ratio is bounded by exp(20), without gradient beyond.

    Args:
      log_prob:     [N] f32, log pi(action | obs) of the learned policy.
      old_log_prob: [N] f32, of the policy that acted; no gradient.
      advantage:    [N] f32; no gradient.
      clip_eps:     positive scalar.
    Returns:
      loss [N] f32, and clipped [N] f32: 1 if the ratio lies outside 1 +- eps.
    Raises:
      ValueError: shapes disagree.

    Both ratios are 2: a good action gains nothing beyond 1.25, a bad action pays in full.

    >>> log_prob, advantage = jnp.log(jnp.array([0.5, 0.5])), jnp.array([1.0, -1.0])
    >>> clipped_surrogate(log_prob, jnp.log(jnp.array([0.25, 0.25])), advantage, clip_eps=0.25)
    (Array([-1.25,  2.  ], dtype=float32), Array([1., 1.], dtype=float32))
    """
    _check_shapes(log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    advantage = lax.stop_gradient(advantage)
    ratio = jnp.exp(_log_ratio(log_prob, old_log_prob))
    bounded = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    return -jnp.minimum(ratio * advantage, bounded * advantage), (ratio != bounded).astype(jnp.float32)


def clipped_value_loss(value, old_value, target, *, clip_eps=None) -> jax.Array:
    """Returns half the squared error, the maximum over `value` and `value` clipped to `old_value` +- clip_eps.

    Section 3, optimization 1, of arXiv:2005.12729; the maximum is as in PPO's reference code.

    Args:
      value:     [N] f32, of the learned critic.
      old_value: [N] f32, of the critic at collection time; no gradient. Not read if clip_eps is None.
      target:    [N] f32; no gradient.
      clip_eps:  positive scalar, maximum distance of `value` from `old_value`; None: plain half squared error.
    Returns:
      loss [N] f32.
    Raises:
      ValueError: shapes disagree.

    The value equals its target, but it is too far from the old value:

    >>> clipped_value_loss(jnp.array([2.0]), jnp.array([0.0]), jnp.array([2.0]), clip_eps=0.5)
    Array([1.125], dtype=float32)
    """
    _check_shapes(value=value, old_value=old_value, target=target)
    old_value, target = lax.stop_gradient((old_value, target))
    loss = 0.5 * jnp.square(value - target)
    if clip_eps is None:
        return loss
    near = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return jnp.maximum(loss, 0.5 * jnp.square(near - target))


def approx_kl(log_prob, old_log_prob) -> jax.Array:
    """Returns an estimate of KL(old || new) per row, ratio - 1 - log ratio: at least 0, unbiased under the old policy.

    J. Schulman, "Approximating KL Divergence" (2020), estimator k3.

    Args:
      log_prob, old_log_prob: [N] f32, as for `clipped_surrogate`.
    Returns:
      [N] f32.
    Raises:
      ValueError: shapes disagree.
    """
    _check_shapes(log_prob=log_prob, old_log_prob=old_log_prob)
    log_ratio = _log_ratio(log_prob, old_log_prob)
    return jnp.expm1(log_ratio) - log_ratio  # exp(x) - 1 - x would lose all digits of a small step


def huber(x, delta=1.0) -> jax.Array:
    """Returns x^2 / 2 for |x| <= delta, else delta (|x| - delta / 2) (P. J. Huber, Ann. Math. Statist. 35, 1964).

    Args:
      x:     f32 of any shape.
      delta: positive scalar.
    Returns:
      f32 of the shape of `x`.

    >>> huber(jnp.array([0.5, -3.0]))
    Array([0.125, 2.5  ], dtype=float32)
    """
    quadratic = jnp.minimum(jnp.abs(x), delta)
    return quadratic * (jnp.abs(x) - 0.5 * quadratic)


def explained_variance(target, value, weight, *, axis_name: str | None = None) -> jax.Array:
    """Returns 1 - Var(target - value) / Var(target): 1 is perfect, 0 as good as a constant, 0 for constant targets.

    Args:
      target, value: f32 of one shape, usually [N].
      weight:        the same shape, f32 or bool, at least 0.
      axis_name:     mapped axis over devices, whose rows count together; None: no such axis.
    Returns:
      [] f32, at most 1.
    Raises:
      ValueError: shapes disagree.

    >>> target, weight = jnp.array([0.0, 2.0, 4.0]), jnp.ones(3)
    >>> [float(explained_variance(target, value, weight)) for value in (target, target / 2, jnp.full(3, 2.0))]
    [1.0, 0.75, 0.0]
    """
    _check_shapes(target=target, value=value, weight=weight)

    mean = lambda x: weighted_mean(x, weight, axis_name=axis_name)
    variance = lambda x: mean(jnp.square(x - mean(x)))
    total = variance(target)
    varies = total > 1e-12 * mean(jnp.square(target))  # beyond the rounding of a constant
    return jnp.where(varies, 1.0 - variance(target - value) / jnp.where(varies, total, 1.0), 0.0)


def _log_ratio(log_prob, old_log_prob):
    return jnp.minimum(log_prob - lax.stop_gradient(old_log_prob), _MAX_LOG_RATIO)


def _check_shapes(**arrays):
    if len({jnp.shape(x) for x in arrays.values()}) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {jnp.shape(x)}" for name, x in arrays.items()))
