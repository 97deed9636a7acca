"""Twin delayed deep deterministic policy gradient, TD3 (arXiv:1802.09477).

Its options also make DDPG (arXiv:1509.02971), TD3+BC (arXiv:2106.06860) and ReBRAC (arXiv:2305.09836).

    algo = td3.make(td3.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *] in [-1, 1]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

DDPG is `num_critics: 1, policy_every: 1, target_noise: 0` (configs/ddpg.yaml). Critics overestimate actions outside of
a data set. Two options keep the policy near the actions a of the data, at observations s with next observations s':

    TD3+BC, bc_alpha:    policy   -bc_alpha Q(s, pi(s)) / mean |Q| + mean (pi(s) - a)^2       over an action's elements
    ReBRAC, actor_bc:    policy   -Q(s, pi(s)) / mean |Q| + actor_bc |pi(s) - a|^2
            critic_bc:   target   reward + discount (min Q'(s', a') - critic_bc |a' - b|^2)   b: the data's at s'

with the target policy's noisy action a', and b from `types.NEXT_ACTION`, which replay provides if the Config `reads`
it. The last step of an episode has no next action and no penalty. ReBRAC also has layer norm in its critics:
`network.critic_norm: layer`.

With memory (`network.core`) it learns from a SequenceBatch. Both policies start from the acting memory, the critics
from the memory of an episode's start; all run over the K burn-in rows before the loss. Gradients and metrics are
averaged over `make(..., axis_name="d")`. With the same `key` on all devices, the result equals the result of one device
with all rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp

from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import critic_heads, critics, parameter_noise, parts
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.critic_heads import Critic
from jrl.algos.critics import Resets, q_taken
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
    has_learning_pass: ClassVar[bool] = True

    actor_lr: NonNegativeSchedule | None = None  # step size of the policy; null: lr
    tau: Share = 0.005  # step size of the target networks, with each step of the policy
    target_networks: bool = True  # targets of slow copies of the networks; false: of the networks themselves
    critic: Critic = Critic()  # kind of the critics: see the class
    num_critics: Few = 2  # number of Q networks; targets take the least of their values; 1: DDPG
    policy_every: Count = 2  # critic steps per step of the policy and the target networks; 1: DDPG
    target_noise: NonNegative = 0.2  # deviation of the noise on the target policy's actions; 0: DDPG
    target_noise_clip: NonNegative = 0.5  # bound of the target noise
    resets: Resets = Resets()  # new initial weights after every n updates: see the class
    # first updates in which only the critics learn, so that a pre-trained policy does not follow untrained critics
    policy_after: Amount = 0
    bc_alpha: Positive | None = None  # TD3+BC: weight of the critics relative to the data's actions; null: off
    # ReBRAC: weights of squared distances to the data's actions; null: off
    actor_bc: NonNegative | None = None  # distance of the policy's action, in the policy's loss
    critic_bc: NonNegative | None = None  # distance of the target policy's next action, in the critics' target
    exploration: OverActions = Gaussian()

    @property
    def reads(self) -> tuple[str, ...]:
        """Returns the extras of samples beside transitions, see `jrl.fields.data.Traits`."""
        return () if self.critic_bc is None else (NEXT_ACTION,)

    def validate(self) -> list[str]:
        errors: list[str] = []
        if self.bc_alpha is not None and self.actor_bc is not None:
            errors.append(
                "bc_alpha and actor_bc both hold the policy to the actions of the data: set bc_alpha (TD3+BC) or "
                "actor_bc (ReBRAC), and the other to null"
            )
        return errors + self.critic.validate() + super().validate()


def policy_network(observer: Observer, network: NetworkConfig) -> critics.PolicyHeads:
    """Returns tanh of a network with initial outputs near 0, where tanh has its largest slope."""
    assert isinstance(observer.spec.action, Box)
    shape = observer.spec.action.shape
    net = nets.build(observer.spec, network, {"policy": Head(math.prod(shape), 0.01)})

    def output(params, outputs, obs):
        outputs = jnp.tanh(outputs)
        return outputs.reshape(*outputs.shape[:-1], *shape)

    return critics.policy_of(net, output)


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State: copies of policy and critics as targets; `own` has the policy's latest loss."""
    params = critics.initial_params(agent, key)
    target = params if cfg.target_networks else ()
    return agents.begin(cfg, agent, key, params, target_params=target, by_part=True, policy_loss=jnp.zeros(()))


def next_action(cfg: Config, agent: Agent, params: PyTree, batch: Batch, key: Key) -> Array:
    """Returns pi'(next_obs) + clipped noise [N, *] (arXiv:1802.09477, alg. 1).

    Args:
      params: parameters of the target policy.
      key: key of the noise.
    """
    action = critics.policy_output(agent, params, batch.next_obs, critics.burn_in(batch))
    drawn = cfg.target_noise * critics.noise(key, action.shape[0], action.shape[1:], agent.axis_name)
    return jnp.clip(action + jnp.clip(drawn, -cfg.target_noise_clip, cfg.target_noise_clip), -1.0, 1.0)


def target_of(cfg: Config, agent: Agent, batch: Batch, outputs: Array, action: Array) -> Array:
    """Returns reward + discount min Q'(next_obs, action) [N]; for critics of distributions [N, M].

    Args:
      outputs: [C, N, ...], outputs of the target critics.
      action: [N, *], see `next_action`.
    """
    if agent.net.has_distribution:
        if cfg.critic_bc is not None:
            cost = cfg.critic_bc * next_distance(batch, action)
            batch = replace(batch, reward=batch.reward - batch.discount * cost)
        one = jnp.ones((*outputs.shape[1:-1], 1))  # there is one action, without a bonus
        return critics.distribution_target(agent.net.head, batch, jnp.expand_dims(outputs, -2), one, 0.0 * one)
    q = critics.select_following(batch, agent.net.mean(outputs).min(0))
    if cfg.critic_bc is not None:
        q -= cfg.critic_bc * next_distance(batch, action)
    return batch.reward + batch.discount * q


def next_distance(batch: Batch, action: Array) -> Array:
    """Returns |a' - b|^2 between actions a' for `batch.next_obs` and the data's next actions (arXiv:2305.09836, eq. 5).

    Args:
      action: [N, *]; for Sequences [N, L + 1, *].
    Returns:
      [N] f32 (Sequences: [N, L]), 0 where the data have no next action.
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


def loss_near_data(cfg: Config, agent: Agent, batch: Batch, action: Array, q: Array) -> Array:
    """Returns the policy's loss with TD3+BC or ReBRAC, [N] or [N, L].

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


def policy_step(cfg: Config, agent: Agent, state: State, batch: Batch, key: Key | None) -> State:
    """Makes a gradient ascent step of the policy on the first critic (alg. 1); moves the target networks.

    Args:
      key: key of dropout in policy and critic; None: no dropout.
    """
    critic = agent.net.critic
    first, burn_in = jax.tree.map(lambda x: x[:1], state.params["critic"]), critics.burn_in(batch)
    obs = critics.critics_read(critic, first, batch.obs, burn_in)

    def policy_loss(actor_params):
        learning = {"key": key, **agents.batch_rows(agent, batch.weight)}
        action = critics.policy_output(agent, actor_params, batch.obs, burn_in, **learning)
        q = critic.apply(first, obs, action, key=key)[0]
        if cfg.bc_alpha is None and cfg.actor_bc is None:
            return -jnp.mean(batch.weight * q)
        return jnp.mean(batch.weight * loss_near_data(cfg, agent, batch, action, q))

    value, gradient = parts.pmean(jax.value_and_grad(policy_loss)(state.params["actor"]), agent.axis_name)
    lr: Any = cfg.lr if cfg.actor_lr is None else cfg.actor_lr
    state = critics.descend(cfg, agent, state, "actor", lr, gradient)
    target_params = parts.moved(state.target_params, state.params, cfg.tau) if cfg.target_networks else ()
    return replace(state, target_params=target_params, own={**state.own, "policy_loss": value})


def move_critic_targets(cfg: Config, state: State) -> State:
    """Moves the critics' target networks, if there are any; the policy's target network stays."""
    if not cfg.target_networks:
        return state
    target = parts.moved(state.target_params["critic"], state.params["critic"], cfg.tau)
    return replace(state, target_params={**state.target_params, "critic": target})


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step of the critics and, if it is due, of the policy."""
    batch = critics.read(cfg, agent, state, batch)
    params, critic, burn_in = state.params["critic"], agent.net.critic, critics.burn_in(batch)
    obs = critics.critics_read(critic, params, batch.obs, burn_in)
    target_drop, drop, policy_drop = agents.dropout_keys(agent, key, 3)
    taken: Callable[..., Any] = functools.partial(q_taken, agent, key=drop)
    slow = state.target_params if cfg.target_networks else state.params
    action = next_action(cfg, agent, slow["actor"], batch, key)
    if critics.is_joint(cfg, agent):
        batch = critics.with_next_action(batch, action)
        taken = lambda params, batch: critics.joint_outputs(agent, params, batch, key=drop)[0]
        after = critics.joint_outputs(agent, params, batch, key=drop)[1]
    else:
        next_obs = critics.critics_read(critic, slow["critic"], batch.next_obs, burn_in)
        after = critic.outputs(slow["critic"], next_obs, action, key=target_drop)
    target = target_of(cfg, agent, batch, after, action)
    own = {"loss": agent.loss, "net": critic, "head": agent.net.head}
    gradient, metrics, priority = critics.td_gradient(
        taken, params, replace(batch, obs=obs), target, agent.axis_name, **own
    )
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, gradient)
    state = replace(state, updates=state.updates + 1)
    improve = lambda state: policy_step(cfg, agent, state, batch, policy_drop)
    wait = functools.partial(move_critic_targets, cfg)
    state = parts.every(cfg.policy_every, state, lambda state: parts.after(cfg.policy_after, state, improve, wait))
    state = critics.reset(cfg, agent, state, key, init)
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


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes TD3, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    Actions are a Box of [-1, 1]. With images every network has its own torso. A user's loss replaces the critics' loss
    and gets TdBatch [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = critics.make_agent(
        cfg,
        spec,
        network,
        policy_network,
        kind="action",
        num_critics=cfg.num_critics,
        head=critic_heads.make(cfg.critic),
        **options,
    )
    return critics.make_algo(cfg, agent, init=init, update=update, ingest=ingest, outputs=outputs)
