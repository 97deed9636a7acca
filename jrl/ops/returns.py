"""Targets and advantages of a rollout. Only this file reads `terminated` and `done`.

Time-major: T steps of B environments. Step t is (obs_t, action_t, reward_t, end_t) and `value` is [T + 1, B], V(obs_0)
.. V(obs_T). Environments reset on the step after an end, so after an episode's last step t, `value[t + 1]` is V of the
real final observation: a time limit bootstraps from it, a true end does not. Step t + 1 is masked: its weight is 0.
`done` cuts the trace, so that only `value[t + 1]` affects step t. Results carry no gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrl.ops import scans

__all__ = [
    "VTrace",
    "continuing_gae",
    "gae",
    "lambda_returns",
    "running_returns",
    "signed_hyperbolic",
    "signed_parabolic",
    "vtrace",
]


def gae(reward, terminated, done, value, *, gamma, gae_lambda) -> tuple[jax.Array, jax.Array]:
    """Returns generalised advantage estimates, cut at episode ends (arXiv:1506.02438, eq. 16).

    Args:
      reward:     [T, B] f32.
      terminated: [T, B] bool, true ends: no bootstrap.
      done:       [T, B] bool, terminated or truncated: the trace stops.
      value:      [T + 1, B] f32, V(obs_t); after a finished row it is V of the real final observation.
      gamma, gae_lambda: scalars in [0, 1].
    Returns:
      advantage [T, B] and target [T, B] (the lambda-return), f32, without gradient.
    Raises:
      ValueError: shapes disagree.

    The first of two environments ends; the second is at its time limit, where V is 4:

    >>> reward, value = jnp.ones((3, 2)), jnp.zeros((4, 2)).at[3].set(4.0)
    >>> terminated = jnp.zeros((3, 2), bool).at[2, 0].set(True)
    >>> done = terminated.at[2, 1].set(True)
    >>> gae(reward, terminated, done, value, gamma=0.5, gae_lambda=1.0)[0]
    Array([[1.75, 2.25],
           [1.5 , 2.5 ],
           [1.  , 3.  ]], dtype=float32)
    """
    _check_shapes(reward, terminated=terminated, done=done, value=value)
    reward, value, gamma, gae_lambda = _constants(reward, value, gamma, gae_lambda)
    error = _td_error(reward, terminated, value, gamma)
    advantage = _accumulate(error, jnp.broadcast_to(gamma * gae_lambda, error.shape), done)
    return advantage, advantage + value[:-1]


def lambda_returns(reward, terminated, done, value, *, gamma, lambda_) -> jax.Array:
    """Returns the lambda-return, G_t = r_t + gamma ((1 - lambda) V_{t+1} + lambda G_{t+1}) (arXiv:1506.02438, eq. 16).

    Args:
      reward:     [T, B] f32.
      terminated: [T, B] bool, true ends: no bootstrap.
      done:       [T, B] bool, terminated or truncated: G_t is r_t + gamma V_{t+1}, or r_t at a true end.
      value:      [T + 1, B] f32, as for `gae`.
      gamma, lambda_: scalars in [0, 1].
    Returns:
      target [T, B] f32, without gradient.
    Raises:
      ValueError: shapes disagree.
    """
    return gae(reward, terminated, done, value, gamma=gamma, gae_lambda=lambda_)[1]


def continuing_gae(reward, mask, value, *, gamma, gae_lambda) -> tuple[jax.Array, jax.Array]:
    """Returns generalised advantage estimates of a return that continues over episode ends (arXiv:1810.12894, 2.3).

    Masked rows are left out: an episode's last step is followed by the first step of the next episode.

    Args:
      reward: [T, B] f32.
      mask:   [T, B] bool, False on rows to leave out.
      value:  [T + 1, B] f32, V(obs_t); ignored on masked rows.
      gamma, gae_lambda: scalars in [0, 1].
    Returns:
      advantage [T, B] and target [T, B] (the lambda-return), f32, without gradient; undefined on masked rows.
    Raises:
      ValueError: shapes disagree.

    Row 1 is masked, so that row 0 sees the value and reward of row 2:

    >>> reward, mask = jnp.array([[1.0], [99.0], [2.0]]), jnp.array([[True], [False], [True]])
    >>> continuing_gae(reward, mask, jnp.array([[0.0], [99.0], [4.0], [8.0]]), gamma=0.5, gae_lambda=1.0)[1][mask]
    Array([4., 6.], dtype=float32)
    """
    _check_shapes(reward, mask=mask, value=value)
    reward, value, gamma, gae_lambda = _constants(reward, value, gamma, gae_lambda)

    def row(after, inputs):
        reward, value, mask = inputs
        after_advantage, after_value = after
        advantage = reward + gamma * after_value - value + gamma * gae_lambda * after_advantage
        return (jnp.where(mask, advantage, after_advantage), jnp.where(mask, value, after_value)), advantage

    start = jnp.zeros_like(value[-1]), value[-1]
    advantage = scans.elementwise(row, start, (reward, value[:-1], mask), reverse=True)[1]
    return advantage, advantage + value[:-1]


def running_returns(reward, mask, start, *, gamma) -> jax.Array:
    """Returns running discounted sums of past rewards, x_t = gamma x_{t-1} + reward_t, over episode ends.

    Args:
      reward: [T, B] f32.
      mask:   [T, B] bool, False on rows to leave out, whose sum is that of the row before.
      start:  [] or [B] f32, sum before row 0.
      gamma:  scalar in [0, 1].
    Returns:
      [T, B] f32, without gradient.
    Raises:
      ValueError: shapes disagree.

    >>> running_returns(jnp.ones((3, 1)), jnp.array([[True], [False], [True]]), 4.0, gamma=0.5)[:, 0]
    Array([3. , 3. , 2.5], dtype=float32)
    """
    _check_shapes(reward, mask=mask)
    reward, start, gamma = _constants(reward, start, gamma)

    def row(before, inputs):
        reward, mask = inputs
        x = jnp.where(mask, gamma * before + reward, before)
        return x, x

    return scans.elementwise(row, jnp.broadcast_to(start, reward[0].shape), (reward, mask))[1]


class VTrace(NamedTuple):
    advantage: jax.Array  # [T, B] f32, advantage of the taken action, for the policy gradient
    target: jax.Array  # [T, B] f32, v_t, for the value loss


def vtrace(
    reward, terminated, done, value, log_rho, *, gamma, vtrace_lambda=1.0, clip_rho=1.0, clip_c=1.0, clip_pg_rho=1.0
) -> VTrace:
    """Returns V-trace: lambda-returns corrected for data of an older policy (arXiv:1802.01561, eq. 1, section 4.2).

    With rho_t = min(clip_rho, pi / mu), c_t = lambda min(clip_c, pi / mu) and the TD error d_t of V:
    v_t - V_t = rho_t d_t + gamma c_t (v_{t+1} - V_{t+1}), and the advantage is
    min(clip_pg_rho, pi / mu) (r_t + gamma (lambda v_{t+1} + (1 - lambda) V_{t+1}) - V_t). With lambda = 1 it is the
    paper's formula. On-policy with clips >= 1 it equals `gae`, for every lambda.

    Args:
      reward:     [T, B] f32.
      terminated: [T, B] bool, true ends: no bootstrap.
      done:       [T, B] bool, terminated or truncated: the trace stops.
      value:      [T + 1, B] f32, as for `gae`, of the learner's critic.
      log_rho:    [T, B] f32, log pi(action) - log mu(action) for the learner's policy pi and the acting policy mu.
      gamma, vtrace_lambda: scalars in [0, 1].
      clip_rho, clip_c, clip_pg_rho: positive scalars, upper bounds of the three importance weights.
    Returns:
      VTrace(advantage [T, B], target [T, B]) f32, without gradient.
    Raises:
      ValueError: shapes disagree.

    An action that the learner takes half as often counts half; an action that it takes more often counts once:

    >>> no, log_rho = jnp.zeros((1, 2), bool), jnp.log(jnp.array([[0.5, 4.0]]))
    >>> vtrace(jnp.ones((1, 2)), no, no, jnp.zeros((2, 2)), log_rho, gamma=0.9).target
    Array([[0.5, 1. ]], dtype=float32)
    """
    _check_shapes(reward, terminated=terminated, done=done, value=value, log_rho=log_rho)
    reward, value, log_rho, gamma, decay = _constants(reward, value, log_rho, gamma, gamma * vtrace_lambda)
    clip_rho, clip_c, clip_pg_rho = _constants(clip_rho, clip_c, clip_pg_rho)
    ratio = jnp.exp(log_rho)
    error = _td_error(reward, terminated, value, gamma)
    correction = _accumulate(jnp.minimum(ratio, clip_rho) * error, decay * jnp.minimum(ratio, clip_c), done)
    after = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    advantage = jnp.minimum(ratio, clip_pg_rho) * (error + jnp.where(done, 0.0, decay * after))
    return VTrace(advantage, correction + value[:-1])


def _td_error(reward, terminated, value, gamma):
    return reward + gamma * jnp.where(terminated, 0.0, value[1:]) - value[:-1]


def _accumulate(error, decay, done):
    """Returns x_t = error_t + decay_t x_{t+1}, [T, B]. A done row selects 0 for x_{t+1}, so that NaN cannot pass."""

    def row(after, inputs):
        error, decay, done = inputs
        x = error + jnp.where(done, 0.0, decay * after)
        return x, x

    return scans.elementwise(row, jnp.zeros_like(error[0]), (error, decay, done), reverse=True)[1]


def _constants(*xs):
    return lax.stop_gradient(tuple(jnp.asarray(x, jnp.float32) for x in xs))


def signed_hyperbolic(x, eps=1e-3) -> jax.Array:
    """Returns h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, which compresses large values (arXiv:1805.11593, 3.2).

    Args:
      x:   f32 of any shape.
      eps: positive scalar.
    Returns:
      The shape of `x`, f32; increasing in x, and 0 at 0.

    >>> signed_hyperbolic(jnp.array([-3.0, 0.0, 99.0]), eps=0.0)
    Array([-1.,  0.,  9.], dtype=float32)
    """
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + eps * x


def signed_parabolic(x, eps=1e-3) -> jax.Array:
    """Returns the inverse of `signed_hyperbolic` (arXiv:1805.11593, proposition A.2).

    Args:
      x:   f32 of any shape.
      eps: eps of `signed_hyperbolic`.
    Returns:
      The shape of `x`, f32.
    """
    c = jnp.abs(x) + 1.0 + eps
    # (sqrt(1 + 4 eps c) - 1) / (2 eps), rewritten without the difference of nearly equal numbers
    root = 2.0 * c / (jnp.sqrt(1.0 + 4.0 * eps * c) + 1.0)
    return jnp.sign(x) * (root - 1.0) * (root + 1.0)


def _check_shapes(reward, **others):
    """Raises ValueError unless `value` is [T + 1, B] and all other arrays are [T, B]."""
    check_shapes("[T, B]", reward, others, value=lambda steps, columns: (steps + 1, columns))


def check_shapes(
    axes: str, reward: Any, others: Mapping[str, Any], **rules: Callable[[int, int], tuple[int, int]]
) -> None:
    """Raises ValueError unless `reward` has two axes and all other arrays have its shape, or the shape of their rule.

    Args:
      axes: names of the reward's axes for the message, for example `[T, B]`.
      reward: array.
      others: arrays by name.
      rules: array name -> function from the reward's shape to the array's expected shape.
    """
    shape = jnp.shape(reward)
    if len(shape) != 2:
        raise ValueError(f"reward must be {axes}, got shape {shape}")
    expected = {name: rule(*shape) for name, rule in rules.items()}
    wrong = [
        f"{name} must be {expected.get(name, shape)}, got {jnp.shape(x)}"
        for name, x in others.items()
        if jnp.shape(x) != expected.get(name, shape)
    ]
    if wrong:
        raise ValueError(f"reward is {shape}: " + "; ".join(wrong))
