"""Exploration: from Q values or deterministic actions [B, ...] and a key to actions [B, ...].

Scalars may be traced; a scalar may also be [B], one number per environment. A `mask` is bool, True for allowed actions;
a row without an allowed action counts as a row with all actions allowed.
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
    "held_noise",
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
    """Returns the mask [..., A] bool, with rows that allow no action set to True."""
    return mask | ~jnp.any(mask, -1, keepdims=True)


def masked_q(q, mask) -> jax.Array:
    """Returns Q values [..., A] f32 with the least float32 at masked actions; `q` itself if `mask` is None.

    The maximum is always at an allowed action, however low its value.
    """
    if mask is None:
        return q
    least = float(jnp.finfo(jnp.float32).min)
    return jnp.where(allowed(mask), jnp.maximum(q, 0.5 * least), least)


def masked_argmax(q, mask=None) -> jax.Array:
    """Returns the allowed action of the highest Q of [..., A] f32: [...] i32.

    The last row allows no action, and counts as a row that allows all:

    >>> mask = jnp.array([[True, True, True], [False, True, True], [False, False, False]])
    >>> masked_argmax(jnp.array([[3.0, 1.0, 2.0]] * 3), mask)
    Array([0, 2, 0], dtype=int32)
    """
    return jnp.argmax(masked_q(q, mask), -1).astype(jnp.int32)


def masked_logits(logits, mask) -> jax.Array:
    """Returns logits [..., A] f32 with -1e9 at masked actions; `logits` itself if `mask` is None.

    Other logits are clipped to +-1e8. A masked action then has probability 0 in float32, is never sampled with Gumbel
    noise, and the square of its log-probability is finite.
    """
    if mask is None:
        return logits
    return jnp.where(allowed(mask), jnp.clip(logits, -1e8, 1e8), -1e9)


def epsilon_greedy(q, key, epsilon, mask=None) -> jax.Array:
    """Returns a uniformly random action with probability epsilon, else the greedy action (arXiv:1312.5602, alg. 1).

    Args:
      q:       [B, A] f32.
      key:     PRNG key.
      epsilon: scalar or [B], in [0, 1].
      mask:    [B, A] bool, allowed actions, random and greedy; None: all.
    Returns:
      [B] i32.
    """
    num_actions = q.shape[-1]
    # one draw for both numbers, because splitting the key costs more than the rest of the function
    coin, pick = random.uniform(key, (2, *q.shape[:-1]))
    if mask is None:
        random_action = jnp.minimum((pick * num_actions).astype(jnp.int32), num_actions - 1)
    else:
        random_action = _pick_allowed(allowed(mask), pick)
    return jnp.where(coin < epsilon, random_action, masked_argmax(q, mask))


def ladder_rung(num_envs: int, *, first=0, total: int | None = None) -> jax.Array:
    """Returns i / (N - 1) for `num_envs` consecutive environments i of N, [num_envs] f32.

    Args:
      num_envs: number of environments.
      first:    index of the first environment; may be traced.
      total:    N; None: `num_envs`.
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
    """Samples by Boltzmann exploration: action a with probability proportional to exp(q_a / temperature).

    Args:
      q:           [B, A] f32.
      key:         PRNG key.
      temperature: scalar, at least 0; 0 selects the highest Q.
      mask:        [B, A] bool, allowed actions; None: all.
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
    """Returns one step of time-correlated noise, x - theta x dt + sigma sqrt(dt) N (arXiv:1509.02971, section 7).

    The stationary variance is sigma^2 / (theta (2 - theta dt)); the autocorrelation decays by 1 - theta dt per step.

    Args:
      noise: [B, *] f32, zeros at the start of an episode.
      key:   PRNG key.
      theta: scalar, rate of decay to 0 per unit of time.
      sigma: scalar, standard deviation of the noise added per unit of time.
      dt:    scalar, time per step.
    Returns:
      [B, *] f32, the noise of the next step.
    """
    return noise - theta * dt * noise + sigma * jnp.sqrt(dt) * random.normal(key, noise.shape)


def held_noise(noise, left, key, *, exponent, longest: int) -> tuple[jax.Array, jax.Array]:
    """Returns the noise of the next step, and for how many steps after it this noise stays (arXiv:2604.04539).

    New noise is standard normal. It stays for n steps with a probability proportional to n ** -exponent.

    Args:
      noise:    [B, *] f32, noise of the last step.
      left:     [B] i32, steps that it still stays; 0: draws new noise, as at the start of an episode.
      key:      PRNG key.
      exponent: scalar, at least 0.
      longest:  greatest n, at least 1.
    Returns:
      noise [B, *] f32 and left [B] i32.
    """
    noise_key, steps_key = jax.random.split(key)
    weight = jnp.arange(1, longest + 1, dtype=jnp.float32) ** -exponent
    share = jnp.cumsum(weight)[:-1] / weight.sum()  # probability of at most n steps
    steps = 1 + jnp.sum(random.uniform(steps_key, left.shape)[:, None] >= share[None], -1, dtype=jnp.int32)
    is_over = left == 0
    new = random.normal(noise_key, noise.shape)
    noise = jnp.where(jnp.expand_dims(is_over, tuple(range(1, noise.ndim))), new, noise)
    return noise, jnp.where(is_over, steps, left) - 1


def uniform_action(key, shape: tuple[int, ...], choices: int | tuple[int, ...] | None, mask=None) -> jax.Array:
    """Samples uniformly random allowed actions.

    Args:
      key:     PRNG key.
      shape:   [B, *], shape of the actions.
      choices: n: integers 0 .. n - 1; tuple: number of options of each entry of the last axis; None: numbers in [-1,
        1).
      mask:    [B, n] bool; for a tuple [B, sum(choices)], concatenated; None: all actions are allowed.
    Returns:
      `shape`, i32 or f32.
    """
    u = random.uniform(key, shape)
    if choices is None:
        return 2.0 * u - 1.0
    if mask is not None:
        if isinstance(choices, int):
            return _pick_allowed(allowed(mask), u)
        masks = jnp.split(mask, list(itertools.accumulate(choices))[:-1], axis=-1)
        return jnp.stack([_pick_allowed(allowed(part), u[..., k]) for k, part in enumerate(masks)], axis=-1)
    n = jnp.broadcast_to(jnp.asarray(choices, jnp.int32), shape)
    return jnp.minimum((u * n).astype(jnp.int32), n - 1)


def perturbed(params, key, std):
    """Adds normal noise to all parameters except normalisation layers (arXiv:1706.01905, section 3).

    Args:
      params: tree of f32 arrays with names as keys; layers with "norm" in their names are normalisation layers.
      key:    PRNG key.
      std:    scalar, at least 0.
    Returns:
      A tree like `params`.
    """
    flat, unflatten = ravel_pytree(params)
    noise = unflatten(std * random.normal(key, flat.shape))
    is_norm = lambda path: "norm" in jax.tree_util.keystr(path).lower()
    return jax.tree_util.tree_map_with_path(lambda path, p, n: p if is_norm(path) else p + n, params, noise)


def softmax_kl(q, other, mask=None) -> jax.Array:
    """Returns KL(softmax(q) || softmax(other)), the policy distance of Q functions (arXiv:1706.01905, app. C.1).

    Args:
      q, other: [B, A] f32.
      mask:     [B, A] bool, allowed actions; None: all.
    Returns:
      [B] f32, at least 0.
    """
    log_p = jax.nn.log_softmax(masked_logits(q, mask))
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(masked_logits(other, mask))), -1)


def epsilon_kl(epsilon, num_actions) -> jax.Array:
    """Returns KL of the greedy from the epsilon-greedy policy (arXiv:1706.01905, app. C.1).

    It is -log(1 - epsilon + epsilon / A).

    Args:
      epsilon:     scalar in [0, 1].
      num_actions: A, or [B] i32, number of allowed actions per row.
    Returns:
      f32, of the shape of `num_actions`.
    """
    return -jnp.log(1.0 - epsilon + epsilon / num_actions)


def adapted_std(std, distance, target, factor) -> jax.Array:
    """Returns `std * factor` if the distance is below its target, else `std / factor` (arXiv:1706.01905, eq. 8).

    Args:
      std:      scalar f32.
      distance: scalar, distance between the perturbed and the unperturbed policy.
      target:   scalar, target distance.
      factor:   scalar, above 1.
    Returns:
      Scalar f32, clipped to 1e-6..1e3: it must not diverge where noise has no effect.

    >>> [float(adapted_std(0.5, distance, target=1.0, factor=2.0)) for distance in (0.9, 1.1)]
    [1.0, 0.25]
    """
    return jnp.clip(jnp.where(distance > target, std / factor, std * factor), 1e-6, 1e3)


def _pick_allowed(mask, u) -> jax.Array:
    """Returns the allowed action [...] i32 of the mask [..., A] that a uniform number `u` [...] in [0, 1) selects."""
    count = jnp.sum(mask, -1, dtype=jnp.int32)
    nth = jnp.minimum((u * count).astype(jnp.int32), count - 1)
    return jnp.argmax(jnp.cumsum(mask, -1, dtype=jnp.int32) > nth[..., None], -1).astype(jnp.int32)
