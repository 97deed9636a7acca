"""Monotonic advantage re-weighted imitation learning, MARWIL (Wang et al., NeurIPS 2018).

    algo = marwil.make(marwil.Config(), spec)
    state = algo.init(key)
    state, aux = jax.jit(algo.update)(state, batch, key)        # batch: jrl.types.Batch; one gradient step
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key, explore=False)    # out.action [B, *]

It imitates the actions of a data set, with larger weights for actions with higher returns:

    y = reward + discount V(next_obs)          the return to the end of the episode; bootstrapped where it was cut
    A = y - V(obs)
    c^2 <- c^2 + adv_norm_rate (mean A^2 - c^2)
    loss = -w(A) log pi(a | s) + vf_coef (V(obs) - y)^2 / 2 - ent_coef entropy

y, A, c and w have no gradient. In batches of data sets, `reward` is the discounted return to the episode's end and
`next_obs` is the final observation (`Config.to_end`); in other batches y is the n-step target.

    weight: exp        w = min(exp(beta A / c), weight_clip)                           beta = 0: BC with a value
    weight: softmax    w = min(exp(beta A / c) / its mean in the batch, weight_clip)   beta = 0: BC with a value
    weight: binary     w = 1 if A > 0, else 0, for any beta

With `adv_norm_start: 1, adv_norm_rate: 0`, c is 1 and beta an inverse temperature. The weights are those of other
algorithms, but the advantages are not:

    AWR (arXiv:1910.00177)     `weight: exp`, with its bound. AWR uses TD(lambda) returns; here lambda is 1.
                               `jrl.algos.awr` collects its own data.
    AWAC (arXiv:2006.09359)    `weight: softmax`: exp(A / temperature), normalised over the batch as implementations do.
    CRR (arXiv:2006.15134)     `weight: binary`, or `exp`: its two filters.

AWAC and CRR take A from a critic Q of the learned policy, trained by TD. Here A comes from returns and from V of the
acting policies, so parts of several episodes are never combined.

With memory (`network.core`) it learns from a SequenceBatch as BC does (`jrl.algos.bc`); targets bootstrap inside the
sequence. Gradients, metrics, c and the softmax are reduced over `make(..., axis_name="d")`.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import jax.numpy as jnp
from flax import struct

from jrl.algos import actor_critic, bc, critics, parts
from jrl.algos import agent as agents
from jrl.algos.agent import Agent, MakeOptions, State
from jrl.fields.bounds import Clip, NonNegative, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import collectives
from jrl.types import Algo, Array, Batch, EnvSpec, Key, Metrics, PyTree, SequenceBatch, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config(bc.Cloning):
    """Hyper-parameters of MARWIL; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_critic: ClassVar[bool] = True
    to_end: ClassVar[bool] = True  # the rewards of its batches are returns to the end of the episode

    beta: NonNegative = 1.0  # influence of the advantage on an action's weight; 0: equal weights, as in bc
    weight: Literal["exp", "binary", "softmax"] = "exp"  # function from a row's advantage to its weight
    weight_clip: Clip = 20.0  # bound of the weight
    vf_coef: NonNegative = 1.0  # weight of the value loss
    adv_norm_start: Positive = 100.0  # initial c^2, the running mean square of advantages, which scales them
    adv_norm_rate: Unit = 1e-2  # step size of c^2 towards a batch's mean square


@struct.dataclass
class Rows(actor_critic.Rows):
    imitation: Array  # f32, w(A), the weight of the row's action


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State; `own` has c^2."""
    adv_norm = jnp.asarray(cfg.adv_norm_start, jnp.float32)
    return agents.begin(cfg, agent, key, agent.net.init(key), adv_norm=adv_norm)


def values(agent: Agent, params: PyTree, batch: Batch) -> tuple[Array, Array]:
    """Returns V(obs) and V(next_obs), both [N]; of Sequences [N, L]."""
    net, steps = agent.net, critics.burn_in(batch)
    after = net.value(params, critics.values_read(net, params, batch.next_obs, steps))
    # the Window of next_obs contains the one of obs
    value = after[:, :-1] if isinstance(batch, critics.Sequences) else net.value(params, batch.obs)
    return value, critics.select_following(batch, after)


def imitation_weight(cfg: Config, advantage: Array, weight: Array, adv_norm: Array, axis_name: str | None) -> Array:
    """Returns w(A) of each row, shaped like `advantage`; any finite number where `weight` is 0.

    Args:
      advantage, weight: [N] or [N, L] f32.
      adv_norm: [] f32, c^2.
      axis_name: mapped axis over devices, or None.
    """
    if cfg.weight == "binary":
        return (advantage > 0).astype(jnp.float32)
    scaled = jnp.where(weight > 0, cfg.beta * advantage / (jnp.sqrt(adv_norm) + 1e-8), 0.0)
    if cfg.weight == "exp":
        return jnp.exp(jnp.minimum(scaled, jnp.log(cfg.weight_clip)))
    highest = collectives.pmax(jnp.max(jnp.where(weight > 0, scaled, -jnp.inf)), axis_name)
    exponential = jnp.where(weight > 0, jnp.exp(scaled - highest), 0.0)
    mean = parts.pmean(jnp.mean(weight * exponential), axis_name)
    return jnp.minimum(exponential / jnp.maximum(mean, 1e-8), cfg.weight_clip)


def targets(cfg: Config, agent: Agent, state: State, batch: Batch) -> tuple[Rows, Array, Metrics]:
    """Returns rows, the next c^2, and metrics, all without gradient."""
    value, after = values(agent, state.params, batch)
    target = batch.reward + batch.discount * after
    advantage, mean = target - value, lambda x: parts.pmean(jnp.mean(batch.weight * x), agent.axis_name)
    adv_norm = state.own["adv_norm"]
    adv_norm = adv_norm + cfg.adv_norm_rate * (mean(jnp.square(advantage)) - adv_norm)
    imitation = imitation_weight(cfg, advantage, batch.weight, adv_norm, agent.axis_name)
    metrics = parts.value_metrics(target, value, batch.weight, agent.axis_name)
    metrics |= {"policy/imitation": mean(imitation), "policy/adv_norm": jnp.sqrt(adv_norm)}
    obs = critics.values_read(agent.net, state.params, batch.obs, critics.burn_in(batch))
    return Rows(obs, batch.action, advantage, target, batch.weight, imitation), adv_norm, metrics


def loss(cfg: Config, agent: Agent, params: PyTree, rows: Rows, *, ent_coef: Any) -> tuple[Array, Metrics]:
    """Returns the mean over Rows [N] of -w(A) log pi(a | s) + vf_coef (V(s) - y)^2 / 2 - ent_coef entropy."""
    dist, value = agent.net.apply(params, rows.obs)
    weighted = replace(rows, advantage=rows.imitation)
    total, metrics = actor_critic.policy_gradient(
        dist, dist.log_prob(rows.action), value, weighted, vf_coef=cfg.vf_coef, ent_coef=ent_coef
    )
    return total, metrics | bc.agreement(agent.spec.action, dist, rows.action, rows.weight)


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step."""
    rows, adv_norm, value_metrics = targets(cfg, agent, state, critics.read(cfg, agent, state, batch))
    state, metrics = bc.descend(cfg, agent, state, functools.partial(loss, cfg, agent), rows)
    return replace(state, own={**state.own, "adv_norm": adv_norm}), UpdateAux(metrics | value_metrics)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes MARWIL, an Algo that learns from data sets. Arguments and errors: see `jrl.algos`.

    With `network.shared` the value network shares the policy's torso. A user's loss gets Rows [N].
    """
    agent = bc.make_agent(cfg, spec, network, actor_critic.networks, **options)
    return actor_critic.make_algo(cfg, agent, update, init=init, ingest=agents.ingest)
