"""Actions that try something: from Q values or deterministic actions [B, ...] and a key to actions [B, ...].

Pure functions of their arguments. Scalars may be traced; a scalar may also be [B], one number per environment. A `mask`
is bool, True where an action can be taken; a row of it that allows none counts as one that allows all.
"""

import itertools

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jrl.ops import random

__all__ = [
    "adapted_std",
    "allowed",
    "epsilon_greedy",
    "epsilon_kl",
    "epsilon_ladder",
    "gaussian",
    "ladder_rung",
    "masked_argmax",
    "masked_logits",
    "masked_q",
    "ornstein_uhlenbeck",
    "perturbed",
    "soft_q",
    "softmax_kl",
    "uniform_action",
]


def allowed(mask) -> jax.Array:
    """Returns the mask [..., A] bool itself, but all True on rows where it allows nothing."""
    return mask | ~jnp.any(mask, -1, keepdims=True)


def masked_q(q, mask) -> jax.Array:
    """Returns Q values [..., A] f32 with the least float32 where the mask [..., A] allows no action; None: Q as it is.

    However low the others are, the highest is one of an action that is allowed.
    """
    if mask is None:
        return q
    least = float(jnp.finfo(jnp.float32).min)
    return jnp.where(allowed(mask), jnp.maximum(q, 0.5 * least), least)


def masked_argmax(q, mask=None) -> jax.Array:
    """Returns the action of the highest Q of [..., A] f32 among those that the mask [..., A] allows: [...] i32.

    The last row allows nothing, and counts as one that allows everything:

    >>> mask = jnp.array([[True, True, True], [False, True, True], [False, False, False]])
    >>> masked_argmax(jnp.array([[3.0, 1.0, 2.0]] * 3), mask)
    Array([0, 2, 0], dtype=int32)
    """
    return jnp.argmax(masked_q(q, mask), -1).astype(jnp.int32)


def masked_logits(logits, mask) -> jax.Array:
    """Logits [..., A] f32 with -1e9 where the mask [..., A] allows no action; None: logits as they are.

    The others are clipped to +-1e8. So an action that is not allowed has the probability 0 in float32, sampling by
    Gumbel noise never gives it, and the square of its log-probability is still finite.
    """
    if mask is None:
        return logits
    return jnp.where(allowed(mask), jnp.clip(logits, -1e8, 1e8), -1e9)


def epsilon_greedy(q, key, epsilon, mask=None) -> jax.Array:
    """Draws a uniformly random action with probability epsilon, else the action of the highest Q (arXiv:1312.5602, alg.
    1).

    Args:
      q:       [B, A] f32.
      key:     PRNG key.
      epsilon: scalar or [B], in [0, 1].
      mask:    [B, A] bool, of both: the random action and the highest Q are among those that are allowed; None: all.
    Returns:
      [B] i32.
    """
    num_actions = q.shape[-1]
    # both numbers of a draw of one key: splitting keys costs more than all the rest
    coin, pick = random.uniform(key, (2, *q.shape[:-1]))
    if mask is None:
        anything = jnp.minimum((pick * num_actions).astype(jnp.int32), num_actions - 1)
    else:
        anything = _any_of(allowed(mask), pick)
    return jnp.where(coin < epsilon, anything, masked_argmax(q, mask))


def ladder_rung(num_envs: int, *, first=0, total: int | None = None) -> jax.Array:
    """Returns i / (N - 1) of `num_envs` neighbouring environments i of N, [num_envs] f32.

    Args:
      num_envs: how many.
      first:    i of the first of them; may be traced.
      total:    N; None: there are no others.
    """
    return (first + jnp.arange(num_envs, dtype=jnp.float32)) / max((total or num_envs) - 1, 1)


def epsilon_ladder(base, alpha, rung) -> jax.Array:
    """Returns base ** (1 + alpha i / (N - 1)), one epsilon per environment i of N (arXiv:1803.00933, section 4.1).

    Args:
      base:  scalar in [0, 1], epsilon of environment 0.
      alpha: scalar, at least 0.
      rung:  [B] f32, see `ladder_rung`.
    Returns:
      [B] f32.

    >>> epsilon_ladder(0.5, 3.0, ladder_rung(4))
    Array([0.5   , 0.25  , 0.125 , 0.0625], dtype=float32)
    """
    return jnp.asarray(base, jnp.float32) ** (1.0 + alpha * rung)


def soft_q(q, key, temperature, mask=None) -> jax.Array:
    """Draws by Boltzmann exploration: action a with probability proportional to exp(q_a / temperature); at 0 the
    highest Q.

    Args:
      q:           [B, A] f32.
      key:         PRNG key.
      temperature: scalar, at least 0.
      mask:        [B, A] bool, the actions that can be taken; None: all.
    Returns:
      [B] i32.
    """
    return masked_argmax(q + temperature * random.gumbel(key, q.shape), mask)


def gaussian(action, key, std) -> jax.Array:
    """Returns the action plus normal noise, clipped to [-1, 1].

    Args:
      action: [B, *] f32 in [-1, 1].
      key:    PRNG key.
      std:    scalar, at least 0.
    Returns:
      [B, *] f32.
    """
    return jnp.clip(action + std * random.normal(key, action.shape), -1.0, 1.0)


def ornstein_uhlenbeck(noise, key, *, theta, sigma, dt) -> jax.Array:
    """Returns one step of noise that is correlated in time, x - theta x dt + sigma sqrt(dt) N (arXiv:1509.02971,
    section 7).

    Its stationary variance is sigma^2 / (theta (2 - theta dt)), its autocorrelation falls by 1 - theta dt a step.

    Args:
      noise: [B, *] f32, zeros at the start of an episode.
      key:   PRNG key.
      theta: scalar, the pull to 0 per unit of time.
      sigma: scalar, the deviation of the noise added in a unit of time.
      dt:    scalar, the time of a step.
    Returns:
      [B, *] f32, the noise of the next step.
    """
    return noise - theta * dt * noise + sigma * jnp.sqrt(dt) * random.normal(key, noise.shape)


def uniform_action(key, shape: tuple[int, ...], choices: int | tuple[int, ...] | None, mask=None) -> jax.Array:
    """Draws uniformly random actions, of those that the mask allows.

    Args:
      key:     PRNG key.
      shape:   [B, *], that of the actions.
      choices: n: integers 0 .. n - 1; a tuple: so many along the last axis; None: numbers in [-1, 1).
      mask:    [B, n] bool, or [B, sum(choices)] of a tuple, one choice after the other; None: all.
    Returns:
      `shape`, i32 or f32.
    """
    u = random.uniform(key, shape)
    if choices is None:
        return 2.0 * u - 1.0
    if mask is not None:
        if isinstance(choices, int):
            return _any_of(allowed(mask), u)
        each = jnp.split(mask, list(itertools.accumulate(choices))[:-1], axis=-1)
        return jnp.stack([_any_of(allowed(one), u[..., k]) for k, one in enumerate(each)], axis=-1)
    n = jnp.broadcast_to(jnp.asarray(choices, jnp.int32), shape)
    return jnp.minimum((u * n).astype(jnp.int32), n - 1)


def perturbed(params, key, std):
    """Parameters plus normal noise of deviation `std`, but for normalisation layers (arXiv:1706.01905, section 3).

    Args:
      params: tree of f32 arrays, with names as keys; a layer whose name contains "norm" is one of normalisation.
      key:    PRNG key.
      std:    scalar, at least 0.
    Returns:
      A tree like `params`.
    """
    flat, unflatten = ravel_pytree(params)
    noise = unflatten(std * random.normal(key, flat.shape))
    still = lambda path: "norm" in jax.tree_util.keystr(path).lower()
    return jax.tree_util.tree_map_with_path(lambda path, p, n: p if still(path) else p + n, params, noise)


def softmax_kl(q, other, mask=None) -> jax.Array:
    """Returns KL(softmax(q) || softmax(other)), the distance between two Q functions as policies (arXiv:1706.01905,
    app. C.1).

    Args:
      q, other: [B, A] f32.
      mask:     [B, A] bool, the actions of both policies; None: all.
    Returns:
      [B] f32, at least 0.
    """
    log_p = jax.nn.log_softmax(masked_logits(q, mask))
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(masked_logits(other, mask))), -1)


def epsilon_kl(epsilon, num_actions) -> jax.Array:
    """Returns KL of the greedy from the epsilon-greedy policy, -log(1 - epsilon + epsilon / A) (arXiv:1706.01905, app.
    C.1).

    Args:
      epsilon:     scalar in [0, 1].
      num_actions: A, or [B] i32, how many actions are allowed in each row.
    Returns:
      f32, of the shape of `num_actions`.
    """
    return -jnp.log(1.0 - epsilon + epsilon / num_actions)


def adapted_std(std, distance, target, factor) -> jax.Array:
    """Returns `std * factor` where the distance is below its target, `std / factor` above (arXiv:1706.01905, eq. 8).

    Args:
      std:      scalar f32.
      distance: scalar, between the perturbed and the unperturbed policy.
      target:   scalar, what it should be.
      factor:   scalar, above 1.
    Returns:
      Scalar f32, in 1e-6..1e3: where no noise makes a difference, it does not run away.

    >>> [float(adapted_std(0.5, distance, target=1.0, factor=2.0)) for distance in (0.9, 1.1)]
    [1.0, 0.25]
    """
    return jnp.clip(jnp.where(distance > target, std / factor, std * factor), 1e-6, 1e3)


def _any_of(mask, u) -> jax.Array:
    """Returns the action [...] i32 that a uniform number `u` [...] in [0, 1) picks of those in the mask [..., A]."""
    count = jnp.sum(mask, -1, dtype=jnp.int32)
    nth = jnp.minimum((u * count).astype(jnp.int32), count - 1)
    return jnp.argmax(jnp.cumsum(mask, -1, dtype=jnp.int32) > nth[..., None], -1).astype(jnp.int32)
