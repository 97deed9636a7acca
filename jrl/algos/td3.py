"""Twin delayed deep deterministic policy gradient, TD3 (arXiv:1802.09477); its flags make it DDPG (arXiv:1509.02971).

    algo = td3.make(td3.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *] in [-1, 1]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

DDPG is `num_critics: 1, policy_every: 1, target_noise: 0` (configs/ddpg.yaml). With memory (`network.core`) it learns
from a SequenceBatch: the memory of both policies before it is the one that acted, the critics' that of an episode's
start, and all run over the K rows of the burn-in before anything is learned. Gradients and metrics are reduced over
`make(..., axis_name="d")`. If `key` is the same on all devices, they learn what one device learns from all their rows.
"""

import math
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks
from jrl.algos import critics, custom_loss, exploration, observer, parameter_noise, parts
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import Gaussian, OverActions
from jrl.bounds import Count, Few, NonNegative, NonNegativeSchedule, Positive, Share, Unit
from jrl.networks import Head, NetworkConfig
from jrl.networks.critics import build_critics
from jrl.ops import normalize, schedules
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Batch,
    Box,
    EnvSpec,
    Key,
    PyTree,
    Rollout,
    SequenceBatch,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")


@hyperparams
class Config:
    """Hyper-parameters of TD3; a Schedule is a number or `[[env_steps, value], ...]`."""

    uses_replay: ClassVar[bool] = True

    lr: NonNegativeSchedule = 3e-4  # Adam's step size, of the critics and, without one of its own, of the policy
    actor_lr: NonNegativeSchedule | None = None  # of the policy; null: lr
    gamma: Unit = 0.99  # discount per step
    tau: Share = 0.005  # share of the way that the target networks move with each step of the policy
    num_critics: Few = 2  # the least of their values is the target; 1: DDPG
    policy_every: Count = 2  # critic steps to one of the policy and of the target networks; 1: DDPG
    target_noise: NonNegative = 0.2  # deviation of the noise on the target policy's actions; 0: DDPG
    target_noise_clip: NonNegative = 0.5  # bound of that noise
    exploration: OverActions = Gaussian()  # how it acts while it learns
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    normalize_obs: bool = False  # by running mean and deviation; images stay as they are
    max_grad_norm: Positive | None = None  # clips the global norm of each gradient; null: no clipping
    adam_eps: Positive = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        return exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: dict[str, PyTree]  # actor, critic [num_critics, ...]
    target_params: dict[str, PyTree]  # the same
    opt_state: dict[str, PyTree]  # of each of `params`
    policy_loss: Array  # [] f32, of the policy's latest step
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    env_steps: Array  # [] u32, environment steps ingested, over all devices
    updates: Array  # [] u32, gradient steps


@struct.dataclass
class NoisyState(State):
    """With exploration by parameter noise."""

    noise: parameter_noise.Noise


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """TD3 as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment; actions a Box of [-1, 1]. With images every network has a torso of its own.
      network: shape of policy and critics, each with a core of its own where there is one.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the critics', of TdBatch [N] (`jrl.algos`); None: none does.
    Returns:
      A replay-based Algo.
    Raises:
      InputError: a space or network that TD3 cannot handle.
    """
    critics.check_action("td3", spec.action)
    critics.check_network("td3", network)
    network = parts.initialised(network, DEFAULT_NETWORK)
    custom_loss.check(loss)
    parameter_noise.refuse_memory(cfg.exploration, network)
    watch = observer.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    policy = _policy(watch.spec, network)
    critic = build_critics(watch.spec, network, cfg.num_critics)
    optimizer = critics.adam(cfg)
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("action",))
    noise = parameter_noise.make(cfg.exploration, policy.apply, spec.action, NoisyState, axis_name=axis_name)
    smooth = not (isinstance(cfg.target_noise, float | int) and cfg.target_noise == 0)
    lrs = {"actor": cfg.lr if cfg.actor_lr is None else cfg.actor_lr, "critic": cfg.lr}

    def init(key: Key) -> State:
        actor_key, critic_key = jax.random.split(key)
        params = {"actor": policy.init(actor_key), "critic": critic.init(critic_key)}
        state = State(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),  # arrays of its own, so that both can be donated
            opt_state={name: optimizer.init(p) for name, p in params.items()},
            policy_loss=jnp.zeros(()),
            obs_stats=watch.init(),
            return_stats=normalize.init(()) if cfg.normalize_reward else (),
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
        )
        return noise.init(state, key)

    def actor(state: State) -> parts.Actor:
        params = state.params["actor"]
        return parts.Actor(params, state.env_steps, noise.perturbed(state, params), state.obs_stats)

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        before, own = parts.split_carry(carry)
        obs = watch.see(actor.obs_stats, obs)
        action, memory = policy.step(parts.acting(actor, explore), obs, before)
        if explore:
            action, own = explorer.sample(action, key, actor.env_steps, own)
        return ActOut(action, parts.join_carry(memory, own), {"carry": before} if network.recurrent else {})

    def chosen(params, obs, burn_in: int) -> Array:
        """The policy's actions [N, *]; of Windows [N, L, *]."""
        return policy.apply(params, critics.policy_reads(policy, params, obs, burn_in))

    def descend(state: State, name: str, gradient) -> State:
        lr = schedules.value(lrs[name], state.env_steps)
        params, opt_state = parts.descend(optimizer, lr, gradient, state.opt_state[name], state.params[name])
        return replace(state, params={**state.params, name: params}, opt_state={**state.opt_state, name: opt_state})

    def target_of(state: State, batch: Batch, key: Key) -> Array:
        """reward + discount min Q'(next_obs, pi'(next_obs) + clipped noise) (arXiv:1802.09477, alg. 1)."""
        params, burn_in = state.target_params["critic"], critics.burn_in(batch)
        action = chosen(state.target_params["actor"], batch.next_obs, burn_in)
        if smooth:
            drawn = cfg.target_noise * critics.noise(key, action.shape[0], action.shape[1:], axis_name)
            action = jnp.clip(action + jnp.clip(drawn, -cfg.target_noise_clip, cfg.target_noise_clip), -1.0, 1.0)
        q = critic.apply(params, critics.critics_read(critic, params, batch.next_obs, burn_in), action).min(0)
        return batch.reward + batch.discount * critics.following(batch, q)

    def policy_step(state: State, batch: Batch) -> State:
        """Up the first critic's value (alg. 1), and a move of the target networks."""
        first, burn_in = jax.tree.map(lambda x: x[:1], state.params["critic"]), critics.burn_in(batch)
        obs = critics.critics_read(critic, first, batch.obs, burn_in)

        def policy_loss(actor_params):
            q = critic.apply(first, obs, chosen(actor_params, batch.obs, burn_in))[0]
            return -jnp.mean(batch.weight * q)

        value, gradient = parts.pmean(jax.value_and_grad(policy_loss)(state.params["actor"]), axis_name)
        state = descend(state, "actor", gradient)
        target_params = parts.move_target(state.target_params, state.params, cfg.tau)
        return replace(state, target_params=target_params, policy_loss=value)

    def update(state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
        batch = critics.read(cfg, batch, lambda obs: watch.see(state.obs_stats, obs), state.return_stats)
        params = state.params["critic"]
        gradient, metrics, priority = critics.td_gradient(
            lambda params, batch: critic.apply(params, batch.obs, batch.action),
            params,
            replace(batch, obs=critics.critics_read(critic, params, batch.obs, critics.burn_in(batch))),
            target_of(state, batch, key),
            axis_name,
            loss=loss,
            net=critic,
        )
        state = replace(descend(state, "critic", gradient), updates=state.updates + 1)
        if cfg.policy_every == 1:
            state = policy_step(state, batch)
        else:
            due = state.updates % cfg.policy_every == 0
            state = jax.lax.cond(due, lambda state: policy_step(state, batch), lambda state: state, state)
        metrics |= {"loss/policy": state.policy_loss, "train/lr": schedules.value(cfg.lr, state.env_steps)}
        return state, UpdateAux(metrics | noise.metrics(state), priority)

    def ingest(state: State, rollout: Rollout) -> State:
        state = noise.adapted(state, state.params["actor"], watch.see(state.obs_stats, rollout.last_obs))
        return observer.ingested(watch, state, rollout, axis_name)

    def outputs(state: State, obs) -> dict[str, Array]:
        """At an episode's start."""
        obs = watch.see(state.obs_stats, obs)
        action, _ = policy.step(state.params["actor"], obs, policy.carry(jax.tree.leaves(obs)[0].shape[0]))
        return {"value": jnp.min(critics.at_start(critic, state.params["critic"], obs, action), 0)}

    return Algo(
        init=init,
        actor=actor,
        carry=parts.carry_of(policy.carry, explorer.carry),
        act=act,
        update=update,
        on_policy=False,
        ingest=ingest,
        running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
        outputs=outputs,
        sequences=network.recurrent,
    )


def _policy(spec: EnvSpec, network: NetworkConfig) -> critics.Policy:
    """tanh of a network that starts near 0 everywhere, where tanh has its slope."""
    assert isinstance(spec.action, Box)
    shape = spec.action.shape
    net = networks.build(spec, network, {"policy": Head(math.prod(shape), 0.01)})

    def output(outputs, obs):
        outputs = jnp.tanh(outputs)
        return outputs.reshape(*outputs.shape[:-1], *shape)

    return critics.policy_of(net, output)


__all__ = ["Config", "NoisyState", "State", "make"]
