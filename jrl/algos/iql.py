"""Implicit Q-learning, IQL (arXiv:2110.06169): never evaluates an action outside of the data.

    algo = iql.make(iql.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

With u = min Q'(s, a) - V(s), from the critics' target copies Q' and the actions of the data, an update minimises

    V:   |expectile - 1(u < 0)| u^2                       an expectile of Q over the data's actions (eq. 5)
    Q:   (r + discount V(s') - Q(s, a))^2 / 2             no action is sampled for the target (eq. 6)
    pi:  -min(exp(beta u), weight_clip) log pi(a | s)     better actions of the data have larger weights (eq. 7)

An expectile of 0.5 is the mean; towards 1 it approaches the best action of the data. A beta of 0 is behaviour cloning.
All three losses use the same u and V(s'), computed with the parameters before the update.

For a Box of [-1, 1] the policy is a Gaussian around tanh of a network. Its deviation does not depend on the observation
unless `network.state_dependent_std` is set (appendix B of the paper). Data contain many actions on the bounds, where a
squashed Gaussian has unbounded log-probabilities; this Gaussian has a finite density there, and its samples are
clipped. For Discrete actions the policy is a categorical distribution over the allowed actions.

It learns from data sets and from replay, so training can continue online. With memory (`network.core`) it learns from a
SequenceBatch: the policy starts from the acting memory, critics and value from the memory of an episode's start, and
all run over the burn-in rows first. Gradients and metrics are reduced over `make(..., axis_name="d")`. An update uses
no random numbers.
"""

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax import struct

from jrl import distributions, spaces
from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import critics, parts
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.algos.observer import Observer
from jrl.fields.bounds import Few, NonNegative, NonNegativeSchedule, Positive, Share
from jrl.fields.data import Replay
from jrl.networks import Head, NetworkConfig
from jrl.ops import schedules
from jrl.types import (
    Algo,
    Array,
    Batch,
    Box,
    Discrete,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    SequenceBatch,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")
_LOG_STD_RANGE = (-5.0, 2.0)  # with a smaller log_std, one action far from the mean outweighs all others


@hyperparams
class Config(Common):
    """Hyper-parameters of IQL; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Replay
    acts_in: ClassVar[Any] = Discrete | Box
    has_critic: ClassVar[bool] = True

    actor_lr: NonNegativeSchedule | None = None  # step size of the policy; null: lr
    value_lr: NonNegativeSchedule | None = None  # step size of V; null: lr
    tau: Share = 0.005  # step size of the target critics towards the critics
    num_critics: Few = 2  # number of Q networks; the least of their values counts
    expectile: Annotated[float, Interval(ge=0.01, le=0.99)] = 0.7  # 0.5: V is the mean over the data's actions
    beta: NonNegative = 3.0  # influence of the advantage on an action's weight; 0: behaviour cloning
    weight_clip: Positive = 100.0  # greatest weight of an action
    exploration: OverDistributions = Stochastic()


# ---------------------------------------------------------------- networks


@struct.dataclass
class ClippedGaussian(distributions.DiagGaussian):
    """Normal variables with means in [-1, 1]. Samples are clipped to [-1, 1]; densities are those before clipping."""

    def sample(self, key) -> jax.Array:
        return jnp.clip(super().sample(key), -1.0, 1.0)

    def from_noise(self, noise) -> tuple[jax.Array, jax.Array]:
        action, log_prob = super().from_noise(noise)
        return jnp.clip(action, -1.0, 1.0), log_prob


def policy_network(observer: Observer, network: NetworkConfig) -> critics.PolicyHeads:
    """Returns a policy with clipped Gaussians or Categoricals, initially nearly the same for all observations."""
    spec = observer.spec
    if isinstance(spec.action, Box):
        return _gaussian(spec, spec.action, network)
    action = distributions.action_distribution(spec.action)
    net = nets.build(spec, network, {"policy": Head(action.size, 0.01)})
    return critics.policy_of(net, lambda params, outputs, obs: action.make(outputs, None, observer.mask(obs)))


def _gaussian(spec: EnvSpec, space: Box, network: NetworkConfig) -> critics.PolicyHeads:
    """Returns the Gaussian policy; its parameters have `log_std` [action elements] unless the network predicts it."""
    size, free = math.prod(space.shape), not network.state_dependent_std
    net = nets.build(spec, network, {"policy": Head(size if free else 2 * size, 0.01)})

    def own_params(params):
        return {**params, "log_std": jnp.full((size,), network.log_std_init, jnp.float32)} if free else params

    def distribution(params, outputs, obs):
        mean, log_std = (outputs, params["log_std"]) if free else jnp.split(outputs, 2, -1)
        log_std = log_std if free else log_std + network.log_std_init
        shaped = lambda x: x.reshape(*x.shape[:-1], *space.shape)
        return ClippedGaussian(jnp.tanh(shaped(mean)), shaped(jnp.clip(log_std, *_LOG_STD_RANGE)), len(space.shape))

    return critics.policy_of(net, distribution, own_params=own_params)


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State, with copies of the critics as targets."""
    params = critics.initial_params(agent, key)
    return agents.begin(cfg, agent, key, params, target_params={"critic": params["critic"]}, by_part=True)


# ---------------------------------------------------------------- learning


def target_q(agent: Agent, state: State, batch: Batch) -> Array:
    """Returns min Q'(obs, action) of the target critics, [N]; of Sequences [N, L]."""
    params = state.target_params["critic"]
    obs = critics.critics_read(agent.net.critic, params, batch.obs, critics.burn_in(batch))
    return critics.q_taken(agent, params, replace(batch, obs=obs)).min(0)


def value_gradient(
    cfg: Config, agent: Agent, params: PyTree, batch: Batch, q: Array
) -> tuple[tuple[Array, Array], PyTree]:
    """Returns (expectile loss of V, V(obs) [N]) and the gradient (eq. 5).

    Args:
      params: parameters of V.
      q: [N] f32, `target_q`.
    """
    obs = critics.values_read(agent.net.value, params, batch.obs, critics.burn_in(batch))

    def loss(params):
        v = agent.net.value.apply(params, obs)
        u = q - v
        return jnp.mean(batch.weight * jnp.abs(cfg.expectile - (u < 0)) * jnp.square(u)), v

    return jax.value_and_grad(loss, has_aux=True)(params)


def policy_gradient(
    agent: Agent, params: PyTree, batch: Batch, advantage_weight: Array
) -> tuple[tuple[Array, Array], PyTree]:
    """Returns (weighted negative log-likelihood of the data's actions, entropy) and the gradient (eq. 7).

    Args:
      params: parameters of the policy.
      advantage_weight: [N] f32, weight of each action, beside the `weight` of the batch.
    """
    obs = critics.policy_reads(agent.net.policy, params, batch.obs, critics.burn_in(batch))

    def loss(params):
        dist = agent.net.policy.apply(params, obs)
        log_prob = dist.log_prob(batch.action)
        return -jnp.mean(batch.weight * advantage_weight * log_prob), jnp.mean(batch.weight * dist.entropy())

    return jax.value_and_grad(loss, has_aux=True)(params)


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step of V, of the policy and of the critics, and moves the targets."""
    batch = critics.read(cfg, agent, state, batch)
    params, burn_in, mean = state.params, critics.burn_in(batch), lambda x: jnp.mean(batch.weight * x)
    q = target_q(agent, state, batch)
    (value_loss, v), value_grad = value_gradient(cfg, agent, params["value"], batch, q)
    weight = jnp.minimum(jnp.exp(cfg.beta * (q - v)), cfg.weight_clip)
    (policy_loss, entropy), policy_grad = policy_gradient(agent, params["actor"], batch, weight)
    metrics: Metrics = {
        "loss/expectile": value_loss,
        "loss/policy": policy_loss,
        "policy/entropy": entropy,
        "policy/weight": mean(weight),
        "value/v": mean(v),
    }
    value_grad, policy_grad, metrics = parts.pmean((value_grad, policy_grad, metrics), agent.axis_name)
    next_obs = critics.values_read(agent.net.value, params["value"], batch.next_obs, burn_in)
    next_v = critics.select_following(batch, agent.net.value.apply(params["value"], next_obs))
    obs = critics.critics_read(agent.net.critic, params["critic"], batch.obs, burn_in)
    critic_grad, critic_metrics, priority = critics.td_gradient(
        lambda params, batch: critics.q_taken(agent, params, batch),
        params["critic"],
        replace(batch, obs=obs),
        batch.reward + batch.discount * next_v,
        agent.axis_name,
        loss=agent.loss,
        net=agent.net.critic,
    )
    lr = lambda part_lr: cfg.lr if part_lr is None else part_lr
    state = critics.descend(cfg, agent, state, "value", lr(cfg.value_lr), value_grad)
    state = critics.descend(cfg, agent, state, "actor", lr(cfg.actor_lr), policy_grad)
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, critic_grad)
    target = parts.moved(state.target_params["critic"], state.params["critic"], cfg.tau)
    state = replace(state, target_params={"critic": target}, updates=state.updates + 1)
    metrics = critic_metrics | metrics | {"train/lr": schedules.value(cfg.lr, state.env_steps)}
    return state, UpdateAux(metrics, priority)


def outputs(cfg: Config, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the networks' outputs at an episode's start; for Discrete actions also `q` of all actions."""
    batch_size = spaces.batch_shape(agent.spec.observation, obs)[0]
    obs, net, params = agent.observer.see(state.obs_stats, obs), agent.net, state.params
    dist, _ = net.policy.step(params["actor"], obs, net.policy.carry(batch_size))
    value, _ = net.value.step(params["value"], obs, net.value.carry(batch_size))
    result = {"distribution": dist, "value": value}
    if isinstance(agent.spec.action, Discrete):
        result["q"] = jnp.min(critics.at_start(net.critic, params["critic"], obs), 0)
    return result


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes IQL, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    Actions are Discrete or a Box of [-1, 1]. With images every network has its own torso. `log_std_init` is the initial
    log_std of the policy. A user's loss replaces the critics' loss and gets TdBatch [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = critics.make_agent(
        cfg,
        spec,
        network,
        policy_network,
        kind="distribution",
        num_critics=cfg.num_critics,
        value=critics.state_value,
        **options,
    )
    return critics.make_algo(cfg, agent, init=init, update=update, ingest=agents.ingest, outputs=outputs)
