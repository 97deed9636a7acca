"""Meaning of the K outputs of a Q network for an action: the expected return, or its distribution.

A QHead says how to read the outputs, how to back them up, and how far they are from a target:

    q = head.mean(outputs)                                              # [..., A, K] -> [..., A]
    target = head.backup(next_outputs, policy, bonus, reward, discount)
    loss = head.loss(outputs_of_the_action_taken, target)               # [N]

The backup is that of the random variable r + discount * (Z(s', a') + bonus(a')) with a' from `policy`. A greedy policy
is one-hot and has no bonus; that of a soft one is the entropy's share, -temperature * log policy.
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
    priority_is_loss: bool  # for prioritised replay; else it is the absolute TD error of the expected returns
    scale: Callable[[Array], Array] = lambda q: q  # on which that error is measured


def expected(loss: Literal["huber", "mse"], *, rescaled: bool = False) -> QHead:
    """Returns the expected return itself; the loss of a TD error x is huber(x) or x^2 / 2.

    With `rescaled` the outputs are h(return), the signed hyperbolic scale of arXiv:1805.11593, and errors are those of
    h: the target is h(r + discount * h^-1(output)) (eq. 3).
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
    """Returns QR-DQN: quantiles at the levels (i + 1/2) / K, by the quantile Huber loss (arXiv:1710.10044, algorithm
    1).

    The backup averages quantile functions over the policy, as Munchausen-IQN does (arXiv:2007.14430, appendix).
    """
    mean = lambda x: jnp.mean(x, -1)
    return QHead(num_quantiles, mean, _backup_values, distributional.quantile_huber, mean, False)


def categorical(num_atoms: int, v_min: Any, v_max: Any) -> QHead:
    """Returns C51: logits of fixed atoms v_min .. v_max, by the KL from the projected target (arXiv:1707.06887,
    algorithm 1).

    v_min and v_max may be traced. The loss is the KL divergence, as in Rainbow's priorities (arXiv:1710.02298): its
    gradient is that of the cross-entropy, and it is 0 where there is nothing left to learn.
    """
    support = jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)
    mean = lambda probs: jnp.einsum("...k,k->...", probs, support, precision="highest")

    def backup(outputs, policy, bonus, reward, discount):
        if bonus is None:
            probs, atoms = jax.nn.softmax(jnp.sum(policy[..., None] * outputs, 1)), support[None]
        else:  # a mixture, whose atoms lie at other places for each action
            probs = (policy[..., None] * jax.nn.softmax(outputs)).reshape(policy.shape[0], -1)
            atoms = (support[None, None] + bonus[..., None]).reshape(probs.shape)
        atoms = reward[:, None] + discount[:, None] * atoms
        return distributional.project(probs, atoms, low=v_min, high=v_max, num_atoms=num_atoms)

    def loss(outputs, target):
        log_target = jnp.log(jnp.maximum(target, 1e-12))  # times target, which is 0 where that bound matters
        return jnp.sum(target * (log_target - jax.nn.log_softmax(outputs)), -1)

    return QHead(num_atoms, lambda x: mean(jax.nn.softmax(x)), backup, loss, mean, True)


def _backup_values(outputs, policy, bonus, reward, discount):
    """Returns targets for outputs that are returns."""
    after = outputs if bonus is None else outputs + bonus[..., None]
    return reward[:, None] + discount[:, None] * jnp.sum(policy[..., None] * after, 1)
