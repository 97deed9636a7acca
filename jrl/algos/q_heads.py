"""Interpretation of a Q network's K outputs per action: the expected return, or its distribution.

A QHead reads the outputs, makes targets and compares outputs with targets:

    q = head.mean(outputs)                                              # [..., A, K] -> [..., A]
    target = head.backup(next_outputs, policy, bonus, reward, discount)
    loss = head.loss(outputs_of_the_action_taken, target)               # [N]

The target represents the random variable r + discount * (Z(s', a') + bonus(a')) with a' from `policy`. A greedy policy
is one-hot and has no bonus. The bonus of a soft policy is its entropy term, -temperature * log policy.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops import distributional, losses, returns
from jrl.types import Array


class QHead(NamedTuple):
    size: int  # K, outputs per action
    mean: Callable[[Array], Array]  # outputs [..., K] -> expected return [...]
    # (outputs [N, A, K] of s', policy [N, A], bonus [N, A] or None, reward [N], discount [N]) -> target [N, K]
    backup: Callable[[Array, Array, Array | None, Array, Array], Array]
    loss: Callable[[Array, Array], Array]  # (outputs [N, K] of the action taken, target [N, K]) -> [N], >= 0
    target_mean: Callable[[Array], Array]  # target [N, K] -> its expected return [N]
    priority_is_loss: bool  # priorities of replay are the losses; otherwise absolute TD errors of expected returns
    scale: Callable[[Array], Array] = lambda q: q  # scale of returns for the TD errors of priorities


def expected(loss: Literal["huber", "mse"], *, rescaled: bool = False) -> QHead:
    """Returns the head for the expected return; the loss of a TD error x is huber(x) or x^2 / 2.

    With `rescaled` outputs and targets are h(return), the signed hyperbolic scale of arXiv:1805.11593: the target is
    h(r + discount * h^-1(output)) (eq. 3).
    """
    distance = losses.huber if loss == "huber" else lambda x: 0.5 * jnp.square(x)
    first = lambda x: x[..., 0]
    error = lambda outputs, target: distance(first(outputs - target))
    if not rescaled:
        return QHead(1, first, _backup_values, error, first, False)
    h, inverse = returns.signed_hyperbolic, returns.signed_parabolic
    backup = lambda outputs, *rest: h(_backup_values(inverse(outputs), *rest))
    mean = lambda outputs: inverse(first(outputs))
    return QHead(1, mean, backup, error, mean, False, h)


def quantiles(num_quantiles: int) -> QHead:
    """Returns the head of QR-DQN: quantiles at the levels (i + 1/2) / K, with the quantile Huber loss.

    Source: arXiv:1710.10044, algorithm 1. The target averages quantile functions over the policy, as in Munchausen-IQN
    (arXiv:2007.14430, appendix).
    """
    mean = lambda x: jnp.mean(x, -1)
    return QHead(num_quantiles, mean, _backup_values, distributional.quantile_huber, mean, False)


def categorical(num_atoms: int, v_min: Any, v_max: Any) -> QHead:
    """Returns the head of C51: logits of fixed atoms v_min .. v_max (arXiv:1707.06887, algorithm 1).

    The loss is the KL divergence from the projected target, as in Rainbow's priorities (arXiv:1710.02298). Its gradient
    is that of the cross-entropy, and it is 0 for a perfect output. v_min and v_max may be traced.
    """
    support = jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)
    mean = lambda probs: jnp.einsum("...k,k->...", probs, support, precision="highest")

    def backup(outputs, policy, bonus, reward, discount):
        if bonus is None:
            probs, atoms = jax.nn.softmax(jnp.sum(policy[..., None] * outputs, 1)), support[None]
        else:  # a mixture; the bonus shifts the atoms of each action differently
            probs = (policy[..., None] * jax.nn.softmax(outputs)).reshape(policy.shape[0], -1)
            atoms = (support[None, None] + bonus[..., None]).reshape(probs.shape)
        atoms = reward[:, None] + discount[:, None] * atoms
        return distributional.project(probs, atoms, low=v_min, high=v_max, num_atoms=num_atoms)

    def loss(outputs, target):
        log_target = jnp.log(jnp.maximum(target, 1e-12))  # where the bound matters, the factor `target` is 0
        return jnp.sum(target * (log_target - jax.nn.log_softmax(outputs)), -1)

    return QHead(num_atoms, lambda x: mean(jax.nn.softmax(x)), backup, loss, mean, True)


def _backup_values(outputs, policy, bonus, reward, discount):
    """Returns targets for outputs that are returns."""
    after = outputs if bonus is None else outputs + bonus[..., None]
    return reward[:, None] + discount[:, None] * jnp.sum(policy[..., None] * after, 1)
