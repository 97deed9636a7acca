"""Off-policy estimators: the expected return of a target policy from episodes of a behaviour policy.

E episodes are padded to T steps; `mask` [E, T] is True on an episode's steps, which come first. `log_ratio` [E, T] is
log pi(action | obs) - log mu(action | obs) for the target policy pi and the behaviour policy mu. It may be -inf, where
pi never takes the action. w_t is the product of the ratios up to step t, computed as a sum of logarithms; after an
episode's end it keeps its last value, as if the episode continued without rewards. The estimate is the expected
discounted return over the recorded steps. `direct` and the doubly robust estimators also include the value beyond them.

The estimators without `weighted` in their names are unbiased, apart from errors of the value function. The weighted
estimators divide by the sum of the weights: their bias vanishes with E, and their variance is much smaller.

Each takes `weight` [E] f32, the count of each episode (None: 1), which `bootstrap` uses for its intervals.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops.returns import check_shapes

__all__ = [
    "Interval",
    "bootstrap",
    "direct",
    "doubly_robust",
    "effective_sample_size",
    "importance_sampling",
    "mean_ratio",
    "per_decision",
    "returns",
    "weighted_doubly_robust",
    "weighted_importance_sampling",
    "weighted_per_decision",
]

# upper bound of log weights: float32 ends at exp(88), and sums need room. Estimates with such weights are useless
# anyway, as the effective sample size shows
_MOST = 60.0


def returns(reward, mask, gamma, weight=None) -> jax.Array:
    """Returns the mean discounted return of the recorded episodes, [] f32.

    Args:
      reward: [E, T] f32.
      mask:   [E, T] bool.
      gamma:  scalar in [0, 1].
      weight: [E] f32 or None.
    """
    return _mean(jnp.sum(_discounted(reward, mask, gamma), 1), weight)


def importance_sampling(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns IS, the mean of w_T G for an episode's discounted return G (Precup et al., ICML 2000).

    Args:
      reward:    [E, T] f32.
      mask:      [E, T] bool.
      log_ratio: [E, T] f32.
      gamma:     scalar in [0, 1].
      weight:    [E] f32 or None.
    Returns:
      [] f32.

    The target policy takes the first episode's actions twice as often, and the second episode's never:

    >>> reward, log_ratio = jnp.array([[1.0, 1.0], [4.0, 0.0]]), jnp.log(jnp.array([[2.0, 1.0], [0.0, 1.0]]))
    >>> float(importance_sampling(reward, jnp.array([[True, True], [True, False]]), log_ratio, 0.5))
    1.5
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = jnp.exp(jnp.minimum(_log_weights(mask, log_ratio)[:, -1], _MOST))
    return _mean(ratio * jnp.sum(_discounted(reward, mask, gamma), 1), weight)


def weighted_importance_sampling(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns WIS: sum w_T G / sum w_T; 0 if all weights are 0. Arguments as for `importance_sampling`."""
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = _shifted(_log_weights(mask, log_ratio)[:, -1])
    episode_return = jnp.sum(_discounted(reward, mask, gamma), 1)
    return _over(_mean(ratio * episode_return, weight), _mean(ratio, weight))


def per_decision(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns PDIS: the mean of sum_t gamma^t w_t r_t, where w_t ignores later steps (Precup et al., ICML 2000).

    Arguments as for `importance_sampling`.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = jnp.exp(jnp.minimum(_log_weights(mask, log_ratio), _MOST))
    return _mean(jnp.sum(ratio * _discounted(reward, mask, gamma), 1), weight)


def weighted_per_decision(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns WPDIS: sum_t gamma^t (sum w_t r_t / sum w_t); the sums include episodes that have ended before t.

    RLlib divides by the weights of the episodes that reach step t. This estimates the return of the episodes that the
    behaviour policy keeps alive. Arguments as for `importance_sampling`.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = _shifted(_log_weights(mask, log_ratio))
    return jnp.sum(_over(_mean(ratio * _discounted(reward, mask, gamma), weight), _mean(ratio, weight)))


def direct(value, weight=None) -> jax.Array:
    """Returns DM: the mean of V(first observation).

    Args:
      value:  [E] f32, values of pi, for example from fitted Q evaluation.
      weight: [E] f32 or None.
    Returns:
      [] f32.
    """
    return _mean(value, weight)


def doubly_robust(reward, mask, log_ratio, q, value, gamma, weight=None) -> jax.Array:
    """Returns DR, the mean of V_0 for V_t = v_t + rho_t (r_t + gamma V_{t+1} - q_t) (arXiv:1511.03722, eq. 10).

    Computed as v_0 + sum_t gamma^t w_t (r_t + gamma v_{t+1} - q_t): the same sum, without a product of ratios in
    float32.

    Args:
      reward:    [E, T] f32.
      mask:      [E, T] bool.
      log_ratio: [E, T] f32.
      q:         [E, T] f32, Q of the recorded action.
      value:     [E, T + 1] f32, V of each observation; 0 for the last observation of an episode with a true end.
      gamma:     scalar in [0, 1].
      weight:    [E] f32 or None.
    Returns:
      [] f32.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio, q=q, value=value)
    error = _discounted(reward + gamma * value[:, 1:] - q, mask, gamma)
    ratio = jnp.exp(jnp.minimum(_log_weights(mask, log_ratio), _MOST))
    return _mean(value[:, 0] + jnp.sum(ratio * error, 1), weight)


def weighted_doubly_robust(reward, mask, log_ratio, q, value, gamma, weight=None) -> jax.Array:
    """Returns WDR: DR with weights divided by their sums over episodes (arXiv:1604.00923, section 4).

    Arguments as for `doubly_robust`.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio, q=q, value=value)
    error = _discounted(reward + gamma * value[:, 1:] - q, mask, gamma)
    ratio = _shifted(_log_weights(mask, log_ratio))
    return _mean(value[:, 0], weight) + jnp.sum(_over(_mean(ratio * error, weight), _mean(ratio, weight)))


# ---------------------------------------------------------------- uncertainty


def effective_sample_size(mask, log_ratio) -> jax.Array:
    """Returns (sum w_T)^2 / sum w_T^2, [] f32: the equivalent number of episodes of pi; 0 if all weights are 0.

    >>> mask = jnp.ones((3, 1), bool)
    >>> [float(effective_sample_size(mask, jnp.array([x]).T)) for x in ([9.0, 9.0, 9.0], [1.0, 500.0, 1.0])]
    [3.0, 1.0]
    """
    ratio = _shifted(_log_weights(mask, log_ratio)[:, -1])
    return _over(jnp.square(ratio.sum()), jnp.square(ratio).sum())


def mean_ratio(mask, log_ratio) -> jax.Array:
    """Returns the mean of pi / mu over all steps, [] f32; about 1 if mu's probabilities are correct, for any pi."""
    ratio = jnp.where(mask, jnp.exp(jnp.minimum(log_ratio, _MOST)), 0.0)
    return ratio.sum() / jnp.maximum(mask.sum(), 1)


class Interval(NamedTuple):
    """Estimates with their confidence intervals; all [M] f32."""

    value: jax.Array
    error: jax.Array  # standard error
    low: jax.Array  # lower end of the confidence interval
    high: jax.Array


def bootstrap(
    estimate: Callable[[jax.Array], jax.Array], num_episodes: int, key, *, replicates: int = 1000, level: float = 0.95
) -> Interval:
    """Returns estimates with confidence intervals value +- z * standard error, from bootstrapped episodes.

    For 1000 x 300 episodes of a small decision process, the 95 % intervals contain the truth in 93.9 to 95.3 % of
    cases, depending on the estimator. Bias-corrected and accelerated percentiles (BCa; Efron, JASA 82, 1987) reach 91.2
    to 94.1 %.
    If a few weights dominate, any bootstrap interval is too short: see `effective_sample_size`.

    Args:
      estimate: (count of each episode [E] f32) -> [M] f32.
      num_episodes: E.
      key: PRNG key.
      replicates: number of bootstrap samples of E episodes, drawn with replacement.
      level: confidence level of the intervals.
    Returns:
      An Interval.
    """

    def resample(key):
        index = jax.random.randint(key, (num_episodes,), 0, num_episodes)
        return estimate(jnp.zeros(num_episodes, jnp.float32).at[index].add(1.0))

    value = estimate(jnp.ones(num_episodes, jnp.float32))
    estimates = jax.lax.map(resample, jax.random.split(key, replicates), batch_size=min(replicates, 50))
    error = estimates.std(0, ddof=1)
    margin = error * jax.scipy.special.ndtri(0.5 + 0.5 * level)
    return Interval(value, error, value - margin, value + margin)


# ---------------------------------------------------------------- helpers


def _log_weights(mask, log_ratio):
    """Returns log w_t [E, T]; constant after an episode's end."""
    return jnp.cumsum(jnp.where(mask, log_ratio, 0.0), 1)


def _shifted(log_weight):
    """Returns weights [E, ...] divided by the largest over episodes, so that long episodes do not overflow."""
    most = jnp.max(log_weight, 0, keepdims=True)
    return jnp.exp(log_weight - jnp.where(jnp.isfinite(most), most, 0.0))


def _discounted(x, mask, gamma):
    """Returns gamma^t x_t [E, T]; 0 after an episode's end, even if x is NaN there."""
    return jnp.where(mask, x, 0.0) * jnp.power(jnp.asarray(gamma, jnp.float32), jnp.arange(x.shape[1]))[None]


def _mean(x, weight):
    """Returns the mean over episodes of [E, ...], weighted by the counts `weight` [E]."""
    if weight is None:
        return jnp.mean(x, 0)
    return jnp.tensordot(weight, x, 1) / weight.sum()


def _over(x, y):
    """Returns x / y, or 0 where y is 0."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)


def _check_shapes(reward, **others):
    """Raises ValueError unless `value` is [E, T + 1] and all other arrays are [E, T]."""
    check_shapes("[E, T]", reward, others, value=lambda episodes, steps: (episodes, steps + 1))
