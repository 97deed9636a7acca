"""Twin delayed deep deterministic policy gradient, TD3 (arXiv:1802.09477); its flags make it DDPG (arXiv:1509.02971),
TD3+BC (arXiv:2106.06860) and ReBRAC (arXiv:2305.09836).

    algo = td3.make(td3.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *] in [-1, 1]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

DDPG is `num_critics: 1, policy_every: 1, target_noise: 0` (configs/ddpg.yaml). What a data set does not show, critics
overrate: there the policy is held to the actions a of the data, s being observations and s' those that follow,

    TD3+BC, bc_alpha:    policy   -bc_alpha Q(s, pi(s)) / mean |Q| + mean (pi(s) - a)^2       over an action's elements
    ReBRAC, actor_bc:    policy   -Q(s, pi(s)) / mean |Q| + actor_bc |pi(s) - a|^2
            critic_bc:   target   reward + discount (min Q'(s', a') - critic_bc |a' - b|^2)   b: the data's at s'

with a' the target policy's action and its noise, and b the action `types.NEXT_ACTION`, which replay gives where the
Config `reads` it; behind an episode's last step there is none, and no penalty. ReBRAC has layer norm in its critics,
too: `network.critic_layer_norm`.

With memory (`network.core`) it learns
from a SequenceBatch: the memory of both policies before it is the one that acted, the critics' that of an episode's
start, and all run over the K rows of the burn-in before anything is learned. Gradients and metrics are reduced over
`make(..., axis_name="d")`. If `key` is the same on all devices, they learn what one device learns from all their rows.
"""

import functools
import math
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import critics, parameter_noise, parts
from jrl.algos.agent import Agent, Common, State
from jrl.algos.critics import q_taken
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import Gaussian, OverActions
from jrl.algos.observer import Observer
from jrl.fields.bounds import Amount, Count, Few, NonNegative, NonNegativeSchedule, Positive, Share
from jrl.fields.data import Replay
from jrl.networks import Head, NetworkConfig
from jrl.ops import schedules
from jrl.types import (
    NEXT_ACTION,
    Algo,
    Array,
    Batch,
    Box,
    EnvSpec,
    InputError,
    Key,
    PyTree,
    Rollout,
    SequenceBatch,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")


@hyperparams
class Config(Common):
    """Hyper-parameters of TD3; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Replay
    acts_in: ClassVar[Any] = Box
    has_critic: ClassVar[bool] = True

    actor_lr: NonNegativeSchedule | None = None  # of the policy; null: lr
    tau: Share = 0.005  # share of the way that the target networks move with each step of the policy
    num_critics: Few = 2  # the least of their values is the target; 1: DDPG
    policy_every: Count = 2  # critic steps to one of the policy and of the target networks; 1: DDPG
    target_noise: NonNegative = 0.2  # deviation of the noise on the target policy's actions; 0: DDPG
    target_noise_clip: NonNegative = 0.5  # bound of that noise
    # updates in which the critics alone learn, before a policy that was trained elsewhere follows critics that were not
    policy_after: Amount = 0
    bc_alpha: Positive | None = None  # TD3+BC: how much more the critics count than the actions of the data; null: off
    # ReBRAC: weights of the squared distance to the actions of the data; null: off
    actor_bc: NonNegative | None = None  # of the policy's
    critic_bc: NonNegative | None = None  # of the target policy's, to the data's next action, in the critics' target
    exploration: OverActions = Gaussian()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names what replay gives beside transitions, see `jrl.fields.data.reads`."""
        return () if self.critic_bc is None else (NEXT_ACTION,)

    def validate(self) -> list[str]:
        """Returns one message per invalid combination of values, with the fix."""
        errors: list[str] = []
        if self.bc_alpha is not None and self.actor_bc is not None:
            errors.append(
                "bc_alpha and actor_bc both hold the policy to the actions of the data: set bc_alpha (TD3+BC) or "
                "actor_bc (ReBRAC), and the other to null"
            )
        return errors + super().validate()


def policy_network(observer: Observer, network: NetworkConfig) -> critics.Policy:
    """Returns tanh of a network with initial outputs near 0, where tanh has its largest slope."""
    assert isinstance(observer.spec.action, Box)
    shape = observer.spec.action.shape
    net = nets.build(observer.spec, network, {"policy": Head(math.prod(shape), 0.01)})

    def output(outputs, obs):
        outputs = jnp.tanh(outputs)
        return outputs.reshape(*outputs.shape[:-1], *shape)

    return critics.policy_of(net, output)


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State: copies of policy and critics as targets; `own` has the policy's latest loss."""
    params = critics.initial_params(agent, key)
    return agents.begin(cfg, agent, key, params, target_params=params, by_part=True, policy_loss=jnp.zeros(()))


def chosen(agent: Agent, params: PyTree, obs: PyTree, burn_in: int) -> Array:
    """Returns the policy's actions [N, *]; of Windows [N, L, *]."""
    policy = agent.net.policy
    return policy.apply(params, critics.policy_reads(policy, params, obs, burn_in))


def target_of(cfg: Config, agent: Agent, state: State, batch: Batch, key: Key) -> Array:
    """Returns reward + discount min Q'(next_obs, pi'(next_obs) + clipped noise) [N] (arXiv:1802.09477, alg. 1)."""
    critic, params, burn_in = agent.net.critic, state.target_params["critic"], critics.burn_in(batch)
    action = chosen(agent, state.target_params["actor"], batch.next_obs, burn_in)
    drawn = cfg.target_noise * critics.noise(key, action.shape[0], action.shape[1:], agent.axis_name)
    action = jnp.clip(action + jnp.clip(drawn, -cfg.target_noise_clip, cfg.target_noise_clip), -1.0, 1.0)
    q = critic.apply(params, critics.critics_read(critic, params, batch.next_obs, burn_in), action).min(0)
    q = critics.select_following(batch, q)
    if cfg.critic_bc is not None:
        q -= cfg.critic_bc * next_distance(batch, action)
    return batch.reward + batch.discount * q


def next_distance(batch: Batch, action: Array) -> Array:
    """Returns |a' - b|^2 of actions a' for `batch.next_obs` [N, *] and the data's (arXiv:2305.09836, eq. 5), 0 where
    the data have none: [N] f32; of Sequences, of [N, L + 1, *] those that follow, [N, L].
    """
    if NEXT_ACTION not in batch.extras:
        raise InputError(
            "critic_bc: the batch has no next action of the data: make the buffer with next_action=True, or set "
            "critic_bc to null"
        )
    after = batch.extras[NEXT_ACTION]
    return jnp.where(after["valid"], distance(batch, critics.select_following(batch, action), after["action"]), 0.0)


def distance(batch: Batch, action: Array, other: Array) -> Array:
    """Returns squared distances of actions [N, *], or [N, L, *], summed over the elements: [N], or [N, L]."""
    axes = tuple(range(batch.reward.ndim, action.ndim))
    return jnp.sum(jnp.square(action - other), axes)


def held_to_data(cfg: Config, agent: Agent, batch: Batch, action: Array, q: Array) -> Array:
    """Returns the policy's loss of each transition where it is held to the data's actions [N], or [N, L].

    Args:
      action: pi(obs) [N, *].
      q: Q(obs, action) [N].
    """
    mean = jnp.mean(batch.weight * jnp.abs(jax.lax.stop_gradient(q)))
    scale = 1.0 / jnp.maximum(parts.pmean(mean, agent.axis_name), 1e-8)
    penalty = distance(batch, action, batch.action)
    if cfg.bc_alpha is None:
        assert cfg.actor_bc is not None
        return cfg.actor_bc * penalty - scale * q
    return penalty / math.prod(action.shape[batch.reward.ndim :]) - cfg.bc_alpha * scale * q


def policy_step(cfg: Config, agent: Agent, state: State, batch: Batch) -> State:
    """Makes a gradient ascent step of the policy on the first critic (alg. 1); moves the target networks."""
    critic = agent.net.critic
    first, burn_in = jax.tree.map(lambda x: x[:1], state.params["critic"]), critics.burn_in(batch)
    obs = critics.critics_read(critic, first, batch.obs, burn_in)

    def policy_loss(actor_params):
        action = chosen(agent, actor_params, batch.obs, burn_in)
        q = critic.apply(first, obs, action)[0]
        if cfg.bc_alpha is None and cfg.actor_bc is None:
            return -jnp.mean(batch.weight * q)
        return jnp.mean(batch.weight * held_to_data(cfg, agent, batch, action, q))

    value, gradient = parts.pmean(jax.value_and_grad(policy_loss)(state.params["actor"]), agent.axis_name)
    lr: Any = cfg.lr if cfg.actor_lr is None else cfg.actor_lr
    state = critics.descend(cfg, agent, state, "actor", lr, gradient)
    target_params = parts.moved(state.target_params, state.params, cfg.tau)
    return replace(state, target_params=target_params, own={**state.own, "policy_loss": value})


def move_critic_targets(cfg: Config, state: State) -> State:
    """Moves the critics' target networks; the policy's target network stays."""
    target = parts.moved(state.target_params["critic"], state.params["critic"], cfg.tau)
    return replace(state, target_params={**state.target_params, "critic": target})


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step of the critics and, if it is due, of the policy."""
    batch = critics.read(cfg, batch, lambda obs: agent.observer.see(state.obs_stats, obs), state.return_stats)
    params = state.params["critic"]
    obs = critics.critics_read(agent.net.critic, params, batch.obs, critics.burn_in(batch))
    taken = functools.partial(q_taken, agent)
    target = target_of(cfg, agent, state, batch, key)
    gradient, metrics, priority = critics.td_gradient(
        taken, params, replace(batch, obs=obs), target, agent.axis_name, loss=agent.loss, net=agent.net.critic
    )
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, gradient)
    state = replace(state, updates=state.updates + 1)
    improve = lambda state: policy_step(cfg, agent, state, batch)
    wait = functools.partial(move_critic_targets, cfg)
    state = parts.every(cfg.policy_every, state, lambda state: parts.after(cfg.policy_after, state, improve, wait))
    metrics |= {"loss/policy": state.own["policy_loss"], "train/lr": schedules.value(cfg.lr, state.env_steps)}
    return state, UpdateAux(metrics | parameter_noise.metrics(cfg.exploration, state.own), priority)


def ingest(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State with a new rollout's statistics and adapted parameter noise."""
    state = agents.adapted(cfg, agent, agent.net.policy.apply, state, rollout)
    return agents.ingest(cfg, agent, state, rollout)


def outputs(cfg: Config, agent: Agent, state: State, obs: PyTree) -> dict[str, Array]:
    """Returns the value of the policy's action at an episode's start [B]."""
    policy, critic = agent.net.policy, agent.net.critic
    obs = agent.observer.see(state.obs_stats, obs)
    action, _ = policy.step(state.params["actor"], obs, policy.carry(jax.tree.leaves(obs)[0].shape[0]))
    return {"value": jnp.min(critics.at_start(critic, state.params["critic"], obs, action), 0)}


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """Makes TD3, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    Actions are a Box of [-1, 1]. With images every network has its own torso. A user's loss replaces the critics' loss
    and gets TdBatch [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = critics.make_agent(
        cfg, spec, network, policy_network, kind="action", num_critics=cfg.num_critics, axis_name=axis_name, loss=loss
    )
    return critics.make_algo(cfg, agent, init=init, update=update, ingest=ingest, outputs=outputs)


__all__ = [
    "Config",
    "chosen",
    "distance",
    "held_to_data",
    "init",
    "make",
    "move_critic_targets",
    "next_distance",
    "policy_network",
    "policy_step",
    "q_taken",
    "target_of",
    "update",
]
