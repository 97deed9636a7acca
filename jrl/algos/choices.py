"""Action distributions of an algorithm with or without its exploration, to compute action probabilities.

A greedy policy gives its best choice the probability 1. There is no distribution for a single point of a continuum, for
noise with a state, and for a user's own exploration: these raise InputError.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos import exploration
from jrl.distributions import Bernoulli, Categorical, DiagGaussian, Joint, MultiCategorical, is_distribution
from jrl.errors import InputError
from jrl.ops import exploration as ops
from jrl.ops import schedules
from jrl.types import Array, PyTree

_NEVER = -1e9  # logit of a choice with probability 0, as in `ops.exploration.masked_logits`


def make_distribution(
    cfg: exploration.Exploration, kind: str, output: Any, env_steps: Any, carry: PyTree, mask: Array | None,
    explore: bool,
) -> Any:  # fmt: skip
    """Returns the distribution [B] of an exploration's actions, after the steps of `random_timesteps`.

    Args:
      cfg: exploration.
      kind, output, env_steps, carry, mask: inputs of `exploration.Explorer.sample`.
      explore: False: the distribution of the greedy actions.
    Returns:
      An object of `jrl.distributions`. For normal noise on actions, it describes the actions before clipping.
    Raises:
      InputError: there is no distribution.
    """
    if not explore:
        if kind == "action":
            raise InputError(
                "policy: expected a policy with action probabilities, got one that is deterministic in a Box"
            )
        if kind == "distribution":
            return _best(output)
        return _chosen(_sure(ops.masked_argmax(output, exploration.by_choice(mask, output)), output))
    match cfg:
        case exploration.Stochastic() if hasattr(output, "log_prob"):  # FQL's actions of noise have no density
            return output
        case exploration.EpsilonGreedy():
            epsilon = schedules.value(cfg.ladder_base if cfg.ladder else cfg.epsilon, env_steps)
            epsilon = ops.epsilon_ladder(epsilon, cfg.ladder_alpha, carry) if cfg.ladder else epsilon
            return _epsilon_greedy(output, epsilon, exploration.by_choice(mask, output))
        case exploration.ParameterNoiseQ():
            return _epsilon_greedy(output, cfg.random_share, exploration.by_choice(mask, output))
        case exploration.SoftQ():
            temperature = jnp.asarray(schedules.value(cfg.temperature, env_steps))
            allowed = exploration.by_choice(mask, output)
            soft = ops.masked_logits(output / jnp.where(temperature > 0, temperature, 1.0), allowed)
            return _chosen(jnp.where(temperature > 0, soft, _sure(ops.masked_argmax(output, allowed), output)))
        case exploration.Gaussian():
            return DiagGaussian(output, jnp.log(schedules.value(cfg.std, env_steps)), output.ndim - 1)
    raise InputError(f"algo.exploration.name {cfg.name}: the probability of its actions is not known")


def _chosen(logits: jax.Array) -> Any:
    """Returns the distribution of logits [B, A]; for a team's [B, agents, A] one choice per agent."""
    if logits.ndim == 2:
        return Categorical(logits)
    return MultiCategorical(logits.reshape(len(logits), -1), (logits.shape[2],) * logits.shape[1])


def _sure(action: Array, like: Array) -> jax.Array:
    """Returns logits like [..., A] that give an action [...] the probability 1."""
    return jnp.where(jax.nn.one_hot(action, like.shape[-1], dtype=bool), 0.0, _NEVER)


def _epsilon_greedy(q: Array, epsilon: Any, mask: Array | None) -> Any:
    allowed = jnp.ones(q.shape, bool) if mask is None else ops.allowed(mask)
    best = jax.nn.one_hot(ops.masked_argmax(q, mask), q.shape[-1], dtype=bool)
    epsilon = jnp.asarray(epsilon)[..., None]
    epsilon = jnp.broadcast_to(epsilon.reshape(*epsilon.shape, *[1] * (q.ndim - epsilon.ndim)), (*q.shape[:-1], 1))
    share = allowed * epsilon / allowed.sum(-1, keepdims=True) + best * (1.0 - epsilon)
    return _chosen(jnp.where(share > 0, jnp.log(jnp.maximum(share, 1e-30)), _NEVER))


def _best(dist: Any) -> Any:
    """Returns the distribution that always gives the mode of `dist`."""
    match dist:
        case Categorical():
            return Categorical(_sure(dist.mode(), dist.logits))
        case MultiCategorical():
            sure = [_sure(choice.mode(), choice.logits) for choice in dist.choices()]
            return MultiCategorical(jnp.concatenate(sure, -1), dist.nvec)
        case Bernoulli():
            return Bernoulli(jnp.where(dist.logits > 0, -_NEVER, _NEVER), dist.event_ndim, dist.dtype)
        case Joint():
            parts = [_best(part) for part in jax.tree.leaves(dist.parts, is_leaf=is_distribution)]
            tree: Any = jax.tree.structure(dist.parts, is_leaf=is_distribution)
            return Joint(tree.unflatten(parts))
    raise InputError("policy: expected a policy with action probabilities, got the mode of a density in a Box")
