"""Conservative Q-learning, CQL(H) (arXiv:2006.04779, eq. 4), an option of SAC and DQN for offline data.

    loss + weight * mean(gap),   gap(s, a) = temperature * log sum_a' exp(Q(s, a') / temperature) - Q(s, a)

It lowers the values of actions that are not in the data, and raises those of actions in the data. For a Box the sum is
an integral, estimated from samples (appendix F): K uniform actions, K actions of the policy at s and K at s', each
divided by its density. As in the authors' code it is the sum of the 3 K samples, which is log(3 K) above the integral,
so that target gaps have the same meaning.

With a target gap the weight is a Lagrange multiplier (eq. 30): it grows while the gap is larger.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import distributions
from jrl.algos import critics
from jrl.algos.agent import Agent, State
from jrl.ops import minibatch, random
from jrl.ops.exploration import allowed
from jrl.types import Array, Batch, Box, InputError, Key, Metrics, PyTree, Space, Window

SAMPLED = "cql_sampled"  # key of a batch's extras: Sampled of each transition
_MOST = math.log(1e6)  # upper bound of the multiplier's logarithm, as in the authors' code
# activations of a layer per chunk on CPU: 1024 rows of 256 stay in the cache, and are 1.7 times as fast as 7680 rows
_CHUNK = 1024 * 256


class Sampled(NamedTuple):
    """Sampled actions of each observation, and the logarithms of their densities."""

    action: Array  # [N, K, *], or [N, L, K, *]
    log_prob: Array  # [N, K], or [N, L, K]


def check(cfg: Any, space: Space) -> None:
    """Raises InputError if a Config of SAC needs sampled actions and `space` has none."""
    if cfg.cql_max_q_backup and not isinstance(space, Box):
        raise InputError(
            f"algo.cql_max_q_backup takes the best of sampled actions, {space} has no samples: set it to false"
        )


def faults(cfg: Any) -> list[str]:
    """Returns one message per fault of a Config of SAC, with the fix."""
    options = {"cql_target_gap": cfg.cql_target_gap is not None, "cql_max_q_backup": cfg.cql_max_q_backup}
    if not cfg.conservative:
        return [
            f"{name} is a part of CQL: set conservative=true, or leave it out" for name, on in options.items() if on
        ]
    if cfg.cql_target_gap is not None and cfg.cql_weight <= 0:
        return ["cql_target_gap: the weight is learned and starts from cql_weight, so that must be above 0"]
    return []


# ---------------------------------------------------------------- the multiplier


def initial_params(cfg: Any) -> dict[str, Array]:
    """Returns the logarithm of the weight if it is learned."""
    return {} if cfg.cql_target_gap is None else {"log_cql_weight": jnp.log(jnp.float32(cfg.cql_weight))}


def weight_of(cfg: Any, params: dict[str, PyTree]) -> Any:
    """Returns the present weight of the gap."""
    return cfg.cql_weight if cfg.cql_target_gap is None else jnp.exp(params["log_cql_weight"])


def weight_step(cfg: Any, agent: Agent, state: State, metrics: Metrics) -> tuple[State, Metrics]:
    """Makes one gradient ascent step of the weight on weight * (gap - cql_target_gap)."""
    if cfg.cql_target_gap is None:
        return state, metrics
    weight = weight_of(cfg, state.params)
    slope = weight * (metrics["value/gap"] - cfg.cql_target_gap)
    state = critics.descend(cfg, agent, state, "log_cql_weight", cfg.lr, -slope)
    bounded = jnp.minimum(state.params["log_cql_weight"], _MOST)
    state = replace(state, params={**state.params, "log_cql_weight": bounded})
    return state, {**metrics, "train/cql_weight": weight}


# ---------------------------------------------------------------- samples in a Box


def sampled(dist: Any, num_actions: int, key: Key, axis_name: str | None) -> Sampled:
    """Samples K actions of each distribution [N, *] or [N, L, *], with their log-probabilities."""
    shape, num_axes = dist.mean.shape, dist.mean.ndim - dist.event_ndim
    shape = (*shape[1:num_axes], num_actions, *shape[num_axes:])
    spread = jax.tree.map(lambda x: jnp.expand_dims(x, num_axes), distributions.batched(dist))
    return Sampled(*spread.from_noise(critics.noise(key, dist.mean.shape[0], shape, axis_name)))


def with_samples(cfg: Any, agent: Agent, batch: Batch, here: Any, there: Sampled, key: Key) -> Batch:
    """Returns the batch with the samples of its gaps in the extras.

    Args:
      batch: see `critics.read`.
      here: the policy's distributions at `batch.obs` [N, *], or [N, L, *].
      there: samples of the policy at `batch.next_obs`.
      key: the same on all devices.
    """
    space, rows = agent.spec.action, batch.reward.shape
    assert isinstance(space, Box)
    policy_key, uniform_key = jax.random.split(key)
    own = sampled(here, cfg.cql_actions, policy_key, agent.axis_name)
    shape = (*rows[1:], cfg.cql_actions, *space.shape)
    anywhere = 2.0 * critics.noise(uniform_key, rows[0], shape, agent.axis_name, random.uniform) - 1.0
    uniform = Sampled(anywhere, jnp.full(own.log_prob.shape, -math.prod(space.shape) * math.log(2.0)))
    following = Sampled(*(critics.select_following(batch, x) for x in there))
    every = Sampled(*(jnp.concatenate(x, len(rows)) for x in zip(uniform, own, following, strict=True)))
    return replace(batch, extras={**batch.extras, SAMPLED: every})


def before(batch: Batch, dist: Any) -> Any:
    """Returns the distributions at `batch.obs`, a part of those at `batch.next_obs`, for Sequences; else None."""
    if not isinstance(batch, critics.Sequences):
        return None
    return jax.tree.map(lambda x: x[:, :-1], distributions.batched(dist))


def best(agent: Agent, params: PyTree, obs: PyTree, drawn: Sampled, burn_in: int) -> tuple[Array, Array]:
    """Returns (value, log pi) [N] or [N, L] of the sampled action with the highest minimum over critics."""
    critic = agent.net.critic
    q = jnp.min(critic.apply_each(params, critics.critics_read(critic, params, obs, burn_in), drawn.action), 0)
    index = jnp.argmax(q, -1, keepdims=True)
    pick = lambda x: jnp.take_along_axis(x, index, -1)[..., 0]
    return pick(q), pick(drawn.log_prob)


def soft_maximum(agent: Agent, params: PyTree, batch: Batch, temperature: Any) -> Array:
    """Returns temperature * log sum exp(Q / temperature) / density over samples, [], summed over critics.

    It is a mean over rows. On CPU a few rows and their gradient at a time, so that activations stay in the cache.
    """
    drawn: Sampled = batch.extras[SAMPLED]
    parts = {"obs": batch.obs, "drawn": drawn, "weight": batch.weight, "t": jnp.full(batch.weight.shape, temperature)}

    def loss(params: PyTree, rows: Any) -> Array:
        q = agent.net.critic.apply_each(params, rows["obs"], rows["drawn"].action)
        exponents = q / rows["t"][None, ..., None] - rows["drawn"].log_prob[None]
        soft = rows["t"][None] * jax.nn.logsumexp(exponents, -1)
        return jnp.mean(rows["weight"] * soft.sum(0))

    num_rows, num_actions = batch.weight.shape[0], drawn.log_prob.shape[-1]
    if isinstance(batch.obs, Window) or jax.default_backend() != "cpu":
        return loss(params, parts)
    limit = _CHUNK // max(agent.network.of_critics().hidden, default=1)
    return minibatch.mean(loss, params, parts, minibatch.chunk_rows(num_rows, 0, limit, length=num_actions))


# ---------------------------------------------------------------- penalty


def penalty(weight: Any, soft: Array, values: Array, row_weight: Array) -> tuple[Array, Metrics]:
    """Returns (weight * gap, metrics), summed over critics.

    Args:
      weight: weight of the gap.
      soft: [] f32, soft maximum: mean over rows, sum over critics.
      values: [C, N] or [C, N, L] f32, values of the actions in the data.
      row_weight: [N] or [N, L] f32.
    """
    gap = soft - jnp.mean(row_weight * values.sum(0))
    return weight * gap, {"value/gap": gap / values.shape[0]}


def soft_maximum_over_actions(q: Array, mask: Array | None, temperature: Any = 1.0) -> Array:
    """Returns temperature * log sum exp(q / temperature) [...] over the allowed actions of [..., A]."""
    where = None if mask is None else jnp.broadcast_to(allowed(mask), q.shape)
    return temperature * jax.nn.logsumexp(q / temperature, -1, where=where)
