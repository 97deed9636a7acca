"""Off-policy estimators: what one policy would have earned, by the episodes that another one played.

E episodes are padded to T steps: `mask` [E, T] is True on the steps of each, from the first on. `log_ratio` [E, T] is
log pi(action | obs) - log mu(action | obs), of the target policy pi that is judged and the behaviour policy mu that
played; it may be -inf, where pi never does what mu did. w_t is the product of the ratios up to step t, computed as a
sum of logarithms; an episode that is over keeps its last, as if it went on without rewards and choices. What is
estimated is the expected discounted return over the steps that were recorded, and where values bootstrap, as those of
`direct` and of the doubly robust ones do, what comes behind them, too.

The estimators without `weighted` in their names are unbiased, or as good as their values; the weighted ones divide by
what the weights sum to, which is a bias that vanishes with E and much less variance.

All take `weight` [E] f32, how often each episode counts (None: once): so `bootstrap` gets its intervals.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops import shapes

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

# log weights beyond count as this: float32 ends at exp(88), and sums of many need room; estimates are of no use long
# before, which the effective sample size says
_MOST = 60.0


def returns(reward, mask, gamma, weight=None) -> jax.Array:
    """Returns the mean discounted return of the episodes themselves, [] f32.

    Args:
      reward: [E, T] f32.
      mask:   [E, T] bool.
      gamma:  scalar in [0, 1].
      weight: [E] f32 or None.
    """
    return _mean(jnp.sum(_discounted(reward, mask, gamma), 1), weight)


def importance_sampling(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns IS: the mean of w_T G, G an episode's discounted return (Precup et al., ICML 2000).

    Args:
      reward:    [E, T] f32.
      mask:      [E, T] bool.
      log_ratio: [E, T] f32.
      gamma:     scalar in [0, 1].
      weight:    [E] f32 or None.
    Returns:
      [] f32.

    The target does what was done in the first of two episodes twice as often, and never what was done in the second:

    >>> reward, log_ratio = jnp.array([[1.0, 1.0], [4.0, 0.0]]), jnp.log(jnp.array([[2.0, 1.0], [0.0, 1.0]]))
    >>> float(importance_sampling(reward, jnp.array([[True, True], [True, False]]), log_ratio, 0.5))
    1.5
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = jnp.exp(jnp.minimum(_log_weights(mask, log_ratio)[:, -1], _MOST))
    return _mean(ratio * jnp.sum(_discounted(reward, mask, gamma), 1), weight)


def weighted_importance_sampling(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns WIS: sum w_T G / sum w_T; arguments as of `importance_sampling`. 0 where all weights are."""
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = _shifted(_log_weights(mask, log_ratio)[:, -1])
    found = jnp.sum(_discounted(reward, mask, gamma), 1)
    return _over(_mean(ratio * found, weight), _mean(ratio, weight))


def per_decision(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns PDIS: the mean of sum_t gamma^t w_t r_t, in which no reward is weighted by what came after it (Precup et
    al.).

    Arguments as of `importance_sampling`.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = jnp.exp(jnp.minimum(_log_weights(mask, log_ratio), _MOST))
    return _mean(jnp.sum(ratio * _discounted(reward, mask, gamma), 1), weight)


def weighted_per_decision(reward, mask, log_ratio, gamma, weight=None) -> jax.Array:
    """Returns WPDIS: sum_t gamma^t (sum w_t r_t / sum w_t), the sums over all episodes, those that are over among them.

    To divide by the weights of the episodes alone that reach step t, as RLlib does, would be to ask what is earned by
    those that the behaviour policy keeps alive. Arguments as of `importance_sampling`.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio)
    ratio = _shifted(_log_weights(mask, log_ratio))
    return jnp.sum(_over(_mean(ratio * _discounted(reward, mask, gamma), weight), _mean(ratio, weight)))


def direct(value, weight=None) -> jax.Array:
    """Returns DM: the mean of V(first observation).

    Args:
      value:  [E] f32, of pi, such as fitted Q evaluation gives it.
      weight: [E] f32 or None.
    Returns:
      [] f32.
    """
    return _mean(value, weight)


def doubly_robust(reward, mask, log_ratio, q, value, gamma, weight=None) -> jax.Array:
    """Returns DR (arXiv:1511.03722, eq. 10): V_t = v_t + rho_t (r_t + gamma V_{t+1} - q_t), backwards, and the mean of
    V_0.

    It is computed as v_0 + sum_t gamma^t w_t (r_t + gamma v_{t+1} - q_t), which is the same sum in another order and
    has no product of ratios in float32.

    Args:
      reward:    [E, T] f32.
      mask:      [E, T] bool.
      log_ratio: [E, T] f32.
      q:         [E, T] f32, Q of the action taken.
      value:     [E, T + 1] f32, V of each observation; that of an episode's last one is 0 where it truly ended.
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
    """Returns WDR: DR with weights that are divided by their sums over the episodes (arXiv:1604.00923, section 4).

    Arguments as of `doubly_robust`.
    """
    _check_shapes(reward, mask=mask, log_ratio=log_ratio, q=q, value=value)
    error = _discounted(reward + gamma * value[:, 1:] - q, mask, gamma)
    ratio = _shifted(_log_weights(mask, log_ratio))
    return _mean(value[:, 0], weight) + jnp.sum(_over(_mean(ratio * error, weight), _mean(ratio, weight)))


# ---------------------------------------------------------------- how far to trust them


def effective_sample_size(mask, log_ratio) -> jax.Array:
    """Returns (sum w_T)^2 / sum w_T^2, [] f32: so many episodes of pi's own would tell as much; 0 where all weights
    are.

    >>> mask = jnp.ones((3, 1), bool)
    >>> [float(effective_sample_size(mask, jnp.array([x]).T)) for x in ([9.0, 9.0, 9.0], [1.0, 500.0, 1.0])]
    [3.0, 1.0]
    """
    ratio = _shifted(_log_weights(mask, log_ratio)[:, -1])
    return _over(jnp.square(ratio.sum()), jnp.square(ratio).sum())


def mean_ratio(mask, log_ratio) -> jax.Array:
    """Returns the mean of pi / mu over all steps, [] f32. It is about 1 where mu is what it is said to be, whatever
    pi is.
    """
    ratio = jnp.where(mask, jnp.exp(jnp.minimum(log_ratio, _MOST)), 0.0)
    return ratio.sum() / jnp.maximum(mask.sum(), 1)


class Interval(NamedTuple):
    """Estimates from episodes of some numbers; all [M] f32."""

    value: jax.Array
    error: jax.Array  # standard error
    low: jax.Array  # of the confidence interval
    high: jax.Array


def bootstrap(
    estimate: Callable[[jax.Array], jax.Array], num_episodes: int, key, *, replicates: int = 1000, level: float = 0.95
) -> Interval:
    """Estimates, and confidence intervals by the standard error over bootstrapped episodes: value +- z errors.

    Of 1000 times 300 episodes of a small decision process these 95 % intervals hold the truth in 93.9 to 95.3 %, by
    estimator; those of bias-corrected and accelerated percentiles (BCa; Efron, JASA 82, 1987) in 91.2 to 94.1 %. Where
    a few weights are nearly all, nothing that is drawn from the episodes can know what is not among them, and any
    interval is too short: see `effective_sample_size`.

    Args:
      estimate: how often each episode counts [E] f32 -> [M] f32.
      num_episodes: E.
      key: PRNG key.
      replicates: how often E episodes are drawn, with replacement.
      level: the share of intervals that shall hold what is estimated.
    Returns:
      An Interval.
    """

    def drawn(key):
        index = jax.random.randint(key, (num_episodes,), 0, num_episodes)
        return estimate(jnp.zeros(num_episodes, jnp.float32).at[index].add(1.0))

    value = estimate(jnp.ones(num_episodes, jnp.float32))
    found = jax.lax.map(drawn, jax.random.split(key, replicates), batch_size=min(replicates, 50))
    error = found.std(0, ddof=1)
    room = error * jax.scipy.special.ndtri(0.5 + 0.5 * level)
    return Interval(value, error, value - room, value + room)


# ---------------------------------------------------------------- parts


def _log_weights(mask, log_ratio):
    """Returns log w_t [E, T]; that of an episode that is over stays."""
    return jnp.cumsum(jnp.where(mask, log_ratio, 0.0), 1)


def _shifted(log_weight):
    """Returns weights [E, ...] over the largest of all episodes: their ratios are right however long episodes are."""
    most = jnp.max(log_weight, 0, keepdims=True)
    return jnp.exp(log_weight - jnp.where(jnp.isfinite(most), most, 0.0))


def _discounted(x, mask, gamma):
    """Returns gamma^t x_t [E, T], 0 behind an episode's end whatever stands there."""
    return jnp.where(mask, x, 0.0) * jnp.power(jnp.asarray(gamma, jnp.float32), jnp.arange(x.shape[1]))[None]


def _mean(x, weight):
    """Returns the mean over episodes of [E, ...]; `weight` [E] says how often each counts."""
    if weight is None:
        return jnp.mean(x, 0)
    return jnp.tensordot(weight, x, 1) / weight.sum()


def _over(x, y):
    """Returns x / y, and 0 where y is 0."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)


def _check_shapes(reward, **others):
    """Checks that `value` is [E, T + 1], everything else [E, T] like `reward`."""
    shapes.check("[E, T]", reward, others, value=lambda episodes, steps: (episodes, steps + 1))
