"""Twin delayed deep deterministic policy gradient, TD3 (arXiv:1802.09477); its flags make it DDPG (arXiv:1509.02971).

    algo = td3.make(td3.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *] in [-1, 1]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

DDPG is `num_critics: 1, policy_every: 1, target_noise: 0` (configs/ddpg.yaml). Gradients and metrics are reduced over
`make(..., axis_name="d")`. If `key` is the same on all devices, they learn what one device learns from all their rows.
"""

import math
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks
from jrl.algos import critics, custom_loss, exploration, parameter_noise, parts
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import Gaussian, OverActions
from jrl.hyper import Schedule
from jrl.networks import Head, NetworkConfig
from jrl.networks.critics import build_critics
from jrl.ops import schedules
from jrl.types import ActOut, Algo, Array, Batch, EnvSpec, Key, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")


@hyperparams
class Config:
    """Hyper-parameters of TD3; a Schedule is a number or `[[env_steps, value], ...]`."""

    uses_replay: ClassVar[bool] = True

    lr: Schedule = 3e-4  # Adam's step size, of the critics and, without one of its own, of the policy
    actor_lr: Schedule | None = None  # of the policy; null: lr
    gamma: float = 0.99  # discount per step
    tau: float = 0.005  # share of the way that the target networks move with each step of the policy
    num_critics: int = 2  # the least of their values is the target; 1: DDPG
    policy_every: int = 2  # critic steps to one of the policy and of the target networks; 1: DDPG
    target_noise: float = 0.2  # deviation of the noise on the target policy's actions; 0: DDPG
    target_noise_clip: float = 0.5  # bound of that noise
    exploration: OverActions = Gaussian()  # how it acts while it learns
    max_grad_norm: float | None = None  # clips the global norm of each gradient; null: no clipping
    adam_eps: float = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the values, each with its mend."""
        errors = parts.out_of_range(
            self,
            unit=("gamma", "tau"),
            positive=("num_critics", "policy_every", "max_grad_norm", "adam_eps"),
        )
        errors += [
            f"{name} must be at least 0, not {getattr(self, name)}"
            for name in ("target_noise", "target_noise_clip")
            if getattr(self, name) < 0
        ]
        return errors + exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: dict[str, PyTree]  # actor, critic [num_critics, ...]
    target_params: dict[str, PyTree]  # the same
    opt_state: dict[str, PyTree]  # of each of `params`
    policy_loss: Array  # [] f32, of the policy's latest step
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
      network: shape of policy and critics.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the critics', of TdBatch [N] (`jrl.algos`); None: none does.
    Returns:
      A replay-based Algo.
    Raises:
      InputError: a space or network that TD3 cannot handle.
    """
    critics.check_action("td3", spec.action)
    critics.check_network("td3", network)
    custom_loss.check(loss)
    policy = _policy(spec, network)
    critic = build_critics(spec, network, cfg.num_critics)
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
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
        )
        return noise.init(state, key)

    def actor(state: State) -> parts.Actor:
        params = state.params["actor"]
        return parts.Actor(params, state.env_steps, noise.perturbed(state, params))

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        action = policy.apply(parts.acting(actor, explore), obs)
        if explore:
            action, carry = explorer.sample(action, key, actor.env_steps, carry)
        return ActOut(action, carry, {})

    def descend(state: State, name: str, gradient) -> State:
        lr = schedules.value(lrs[name], state.env_steps)
        params, opt_state = parts.descend(optimizer, lr, gradient, state.opt_state[name], state.params[name])
        return replace(state, params={**state.params, name: params}, opt_state={**state.opt_state, name: opt_state})

    def target_of(state: State, batch: Batch, key: Key) -> Array:
        """reward + discount min Q'(next_obs, pi'(next_obs) + clipped noise) (arXiv:1802.09477, alg. 1)."""
        action = policy.apply(state.target_params["actor"], batch.next_obs)
        if smooth:
            drawn = cfg.target_noise * critics.noise(key, action.shape[0], action.shape[1:], axis_name)
            action = jnp.clip(action + jnp.clip(drawn, -cfg.target_noise_clip, cfg.target_noise_clip), -1.0, 1.0)
        q = critic.apply(state.target_params["critic"], batch.next_obs, action).min(0)
        return batch.reward + batch.discount * q

    def policy_step(state: State, batch: Batch) -> State:
        """Up the first critic's value (alg. 1), and a move of the target networks."""
        first = jax.tree.map(lambda x: x[:1], state.params["critic"])

        def policy_loss(actor_params):
            q = critic.apply(first, batch.obs, policy.apply(actor_params, batch.obs))[0]
            return -jnp.mean(batch.weight * q)

        value, gradient = parts.pmean(jax.value_and_grad(policy_loss)(state.params["actor"]), axis_name)
        state = descend(state, "actor", gradient)
        target_params = parts.move_target(state.target_params, state.params, cfg.tau)
        return replace(state, target_params=target_params, policy_loss=value)

    def update(state: State, batch: Batch, key: Key) -> tuple[State, UpdateAux]:
        batch = parts.without_void(batch)
        gradient, metrics, priority = critics.td_gradient(
            lambda params, batch: critic.apply(params, batch.obs, batch.action),
            state.params["critic"],
            batch,
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
        state = noise.adapted(state, state.params["actor"], rollout.last_obs)
        return replace(state, env_steps=parts.count_steps(state.env_steps, rollout.mask, axis_name))

    def outputs(state: State, obs) -> dict[str, Array]:
        action = policy.apply(state.params["actor"], obs)
        return {"value": jnp.min(critic.apply(state.params["critic"], obs, action), 0)}

    return Algo(init, actor, explorer.carry, act, update, on_policy=False, ingest=ingest, outputs=outputs)


def _policy(spec: EnvSpec, network: NetworkConfig) -> critics.Policy:
    """tanh of a network that starts near 0 everywhere, where tanh has its slope."""
    shape = spec.action.shape
    net = networks.build(spec, network, {"policy": Head(math.prod(shape), 0.01)})

    def apply(params, obs):
        outputs = jnp.tanh(net.apply(params, obs, "policy")[0])
        return outputs.reshape(*outputs.shape[:-1], *shape)

    return critics.Policy(net.init, apply)


__all__ = ["Config", "NoisyState", "State", "make"]
