"""Return distributions: projection onto fixed atoms (C51), quantile Huber loss (QR-DQN, IQN), histograms (HL-Gauss)."""

import jax
import jax.numpy as jnp

__all__ = ["gaussian_histogram", "project", "quantile_huber"]


def project(probs, atoms, *, low, high, num_atoms: int) -> jax.Array:
    """Projects a distribution onto `num_atoms` equally spaced atoms in low .. high (arXiv:1707.06887, eq. 7).

    The mass of an input atom is split between the two nearest grid atoms by distance; mass outside the bounds goes to
    the nearest bound. The total mass is preserved, and within the bounds the mean.

    Args:
      probs:     [N, M] f32, masses of the input atoms.
      atoms:     [N, M] f32, positions of the input atoms.
      low, high: scalars, low < high.
      num_atoms: K, static, at least 2.
    Returns:
      [N, K] f32.
    Raises:
      ValueError: shapes disagree.

    >>> project(jnp.array([[0.5, 0.5]]), jnp.array([[0.25, 9.0]]), low=0.0, high=1.0, num_atoms=3)
    Array([[0.25, 0.25, 0.5 ]], dtype=float32)
    """
    if jnp.ndim(atoms) != 2 or jnp.shape(probs) != jnp.shape(atoms):
        raise ValueError(f"probs and atoms must be one [N, M], got {jnp.shape(probs)} and {jnp.shape(atoms)}")
    position = (jnp.clip(atoms, low, high) - low) * ((num_atoms - 1) / (high - low))
    grid = jnp.arange(num_atoms, dtype=jnp.float32)
    share = jnp.maximum(1.0 - jnp.abs(position[:, :, None] - grid[None, None]), 0.0)
    # einsum, because a sum takes four times as long on CPU
    return jnp.einsum("nmk,nm->nk", share, probs, precision="highest")


def gaussian_histogram(value, *, low, high, num_bins: int, deviation=0.75) -> jax.Array:
    """Returns the probability of each bin under a normal distribution around a value (arXiv:2403.03950, eq. 3.4).

    The bins divide low .. high into equal parts. Mass outside of them is divided among the bins, and a value outside of
    low .. high counts as the nearest bound.

    Args:
      value:     [N] f32.
      low, high: scalars, low < high.
      num_bins:  K, static.
      deviation: positive scalar, standard deviation in widths of a bin.
    Returns:
      [N, K] f32; each row sums to 1.

    >>> gaussian_histogram(jnp.array([0.5, 9.0]), low=0.0, high=1.0, num_bins=2, deviation=0.5).round(2)
    Array([[0.5 , 0.5 ],
           [0.05, 0.95]], dtype=float32)
    """
    width = (high - low) / num_bins
    edges = low + width * jnp.arange(num_bins + 1, dtype=jnp.float32)
    value = jnp.clip(value, low, high)[:, None]
    below = jax.scipy.special.ndtr((edges[None] - value) / (deviation * width))
    return jnp.diff(below) / (below[:, -1:] - below[:, :1])


def quantile_huber(quantiles, target, levels=None, *, kappa=1.0) -> jax.Array:
    """Returns the quantile Huber loss, summed over quantiles and averaged over targets (arXiv:1710.10044, eq. 10).

    Args:
      quantiles: [N, K] f32.
      target:    [N, M] f32, samples or quantiles of the target distribution; no gradient.
      levels:    [N, K] f32 in [0, 1], probability level of each quantile; None: (i + 1/2) / K. No gradient.
      kappa:     positive scalar: the loss is quadratic for errors below it.
    Returns:
      [N] f32.
    Raises:
      ValueError: shapes disagree.

    For the 3/4 quantile, an estimate that is too low costs three times as much as one that is too high:

    >>> zero, level = jnp.zeros((2, 1)), jnp.full((2, 1), 0.75)
    >>> quantile_huber(zero, jnp.array([[2.0], [-2.0]]), level)
    Array([1.125, 0.375], dtype=float32)
    """
    if jnp.ndim(quantiles) != 2 or jnp.ndim(target) != 2 or jnp.shape(quantiles)[0] != jnp.shape(target)[0]:
        raise ValueError(f"quantiles [N, K] and target [N, M], got {jnp.shape(quantiles)} and {jnp.shape(target)}")
    if levels is None:
        num_quantiles = quantiles.shape[1]
        levels = ((jnp.arange(num_quantiles, dtype=jnp.float32) + 0.5) / num_quantiles)[None]
    return _quantile_huber(quantiles, target, levels, kappa)


@jax.custom_vjp
def _quantile_huber(quantiles, target, levels, kappa):
    return _loss_and_slope(quantiles, target, levels, kappa)[0]


def _loss_and_slope(quantiles, target, levels, kappa):
    """Returns the loss [N] and its derivative by the quantiles [N, K]; JAX's derivative takes six times as long."""
    num_targets = target.shape[1]
    error = target[:, :, None] - quantiles[:, None, :]
    clipped = jnp.clip(error, -kappa, kappa)
    # level where the error is positive, 1 - level where it is negative, times the clipped error
    slope = 0.5 * clipped + (levels - 0.5)[:, None] * jnp.abs(clipped)
    # einsum, because a sum takes three times as long on CPU
    mean = lambda x: jnp.einsum("nmk,m->nk", x, jnp.full(num_targets, 1.0 / num_targets), precision="highest") / kappa
    return jnp.sum(mean(slope * (error - 0.5 * clipped)), -1), -mean(slope)


_quantile_huber.defvjp(_loss_and_slope, lambda slope, gradient: (gradient[:, None] * slope, None, None, None))
