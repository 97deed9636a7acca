"""Soft actor-critic (arXiv:1812.05905): the policy maximises reward plus entropy; learns from replay.

    algo = sac.make(sac.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

The action space decides: in a Box of [-1, 1] the policy is a squashed Gaussian, of Discrete actions a categorical
distribution, whose expectations are sums instead of samples (arXiv:1910.07207), over those actions that an action mask
allows. Many critics of which each target takes a random few, the policy their mean, and many updates per step make it
REDQ (arXiv:2101.05982).

With memory (`network.core`) it learns from a SequenceBatch: the policy's memory before it is the one that acted, the
critics' that of an episode's start, and both run over the K rows of the burn-in before anything is learned.

Gradients and metrics are reduced over `make(..., axis_name="d")`. If `key` is the same on all devices, they learn what
one device learns from all their rows.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions, networks
from jrl.algos import critics, custom_loss, exploration, observer, parts
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.bounds import Count, Few, NonNegativeSchedule, Positive, Share, Unit
from jrl.networks import Head, NetworkConfig
from jrl.networks.critics import build_critics
from jrl.ops import normalize, random, schedules
from jrl.ops.exploration import allowed
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Batch,
    Box,
    Discrete,
    EnvSpec,
    Key,
    PyTree,
    Rollout,
    SequenceBatch,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")
_LOG_STD_RANGE = (-20.0, 2.0)  # beyond it exp and its gradient leave what float32 holds well


@hyperparams
class Config:
    """Hyper-parameters of SAC; a Schedule is a number or `[[env_steps, value], ...]`."""

    uses_replay: ClassVar[bool] = True

    lr: NonNegativeSchedule = 3e-4  # Adam's step size, of the critics and of what has none of its own
    actor_lr: NonNegativeSchedule | None = None  # of the policy; null: lr
    ent_coef_lr: NonNegativeSchedule | None = None  # of the temperature; null: lr
    gamma: Unit = 0.99  # discount per step
    tau: Share = 0.005  # share of the way to the critics that their targets move with each step
    num_critics: Few = 2  # networks that value actions
    target_critics: Few | None = None  # so many, drawn anew for each step, give the target; null: all
    actor_q: Literal["min", "mean"] = "min"  # what the policy takes of the critics' values; a target takes the least
    policy_every: Count = 1  # critic steps to one of the policy and the temperature
    learn_ent_coef: bool = True  # adapts ent_coef so that the entropy comes to target_entropy
    ent_coef: NonNegativeSchedule = 1.0  # temperature, the weight of the entropy; where it is learned, its start
    # null: minus the action's elements; Discrete: 0.98 of the greatest entropy that the allowed actions can have
    target_entropy: float | None = None
    exploration: OverDistributions = Stochastic()  # how it acts while it learns
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    normalize_obs: bool = False  # by running mean and deviation; images stay as they are
    max_grad_norm: Positive | None = None  # clips the global norm of each gradient; null: no clipping
    adam_eps: Positive = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        errors: list[str] = []
        if self.target_critics is not None and self.target_critics > self.num_critics:
            errors.append(f"target_critics {self.target_critics} must be at most num_critics {self.num_critics}")
        if self.learn_ent_coef and (isinstance(self.ent_coef, tuple) or self.ent_coef <= 0):
            errors.append("learn_ent_coef starts from ent_coef, one number above 0: or set learn_ent_coef=false")
        return errors + exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: dict[str, PyTree]  # actor, critic [num_critics, ...] and, where it is learned, log_ent_coef []
    target_critic: PyTree
    opt_state: dict[str, PyTree]  # of each of `params`
    policy_metrics: dict[str, Array]  # of the policy's latest step
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    env_steps: Array  # [] u32, environment steps ingested, over all devices
    updates: Array  # [] u32, gradient steps


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """SAC as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment; actions Discrete or a Box of [-1, 1]. With images every network has a torso.
      network: shape of policy and critics, each with a core of its own where there is one; `log_std_init` is added to
        what the policy puts out for its log_std.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the critics', of TdBatch [N] (`jrl.algos`); None: none does.
    Returns:
      A replay-based Algo.
    Raises:
      InputError: a space or network that SAC cannot handle.
    """
    critics.check_action("sac", spec.action, discrete=True)
    critics.check_network("sac", network)
    network = parts.initialised(network, DEFAULT_NETWORK)
    custom_loss.check(loss)
    watch = observer.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    policy = _policy(watch, network)
    critic = build_critics(watch.spec, network, cfg.num_critics)
    optimizer = critics.adam(cfg)
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("distribution",))
    take = jnp.mean if cfg.actor_q == "mean" else jnp.min
    lrs = {"actor": cfg.actor_lr, "critic": None, "log_ent_coef": cfg.ent_coef_lr}
    lrs = {name: cfg.lr if lr is None else lr for name, lr in lrs.items()}

    def init(key: Key) -> State:
        actor_key, critic_key = jax.random.split(key)
        params = {"actor": policy.init(actor_key), "critic": critic.init(critic_key)}
        if cfg.learn_ent_coef:
            params["log_ent_coef"] = jnp.log(schedules.value(cfg.ent_coef, 0))
        return State(
            params=params,
            target_critic=jax.tree.map(jnp.copy, params["critic"]),  # arrays of its own, so that both can be donated
            opt_state={name: optimizer.init(p) for name, p in params.items()},
            policy_metrics={name: jnp.zeros(()) for name in ("loss/policy", "policy/entropy")},
            obs_stats=watch.init(),
            return_stats=normalize.init(()) if cfg.normalize_reward else (),
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
        )

    def actor(state: State) -> parts.Actor:
        return parts.Actor(state.params["actor"], state.env_steps, obs_stats=state.obs_stats)

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        before, own = parts.split_carry(carry)
        obs = watch.see(actor.obs_stats, obs)
        dist, memory = policy.step(actor.params, obs, before)
        extras = {"carry": before} if network.recurrent else {}
        if not explore:
            return ActOut(dist.mode(), parts.join_carry(memory, own), extras)
        action, own = explorer.sample(dist, key, actor.env_steps, own, watch.mask(obs))
        return ActOut(action, parts.join_carry(memory, own), extras)

    def under_policy(actor_params, critic_params, obs, noise, over: Callable, burn_in: int) -> tuple[Any, Any]:
        """Q and log pi of the policy's next action [N]: of a sample, or their exact expectations; [N, L] of Windows."""
        dist = policy.apply(actor_params, critics.policy_reads(policy, actor_params, obs, burn_in))
        obs = critics.critics_read(critic, critic_params, obs, burn_in)
        if isinstance(dist, distributions.Categorical):
            # of actions that are not allowed the probability is exactly 0, the rest finite
            log_prob = jax.nn.log_softmax(dist.logits)
            prob = jnp.exp(log_prob)
            q = over(critic.apply(critic_params, obs), 0)
            return jnp.sum(prob * q, -1), jnp.sum(prob * log_prob, -1)
        action, log_prob = dist.from_noise(noise)
        return over(critic.apply(critic_params, obs, action), 0), log_prob

    def target_entropy(batch: Batch) -> Any:
        if cfg.target_entropy is not None:
            return cfg.target_entropy
        mask = watch.mask(batch.obs)
        if mask is None:
            return _target_entropy(spec)
        mask = mask[:, critics.burn_in(batch) :] if network.recurrent else mask
        return 0.98 * jnp.log(allowed(mask).sum(-1).astype(jnp.float32))

    def q_taken(critic_params, batch: Batch) -> Array:
        """[num_critics, N], or [num_critics, N, L]"""
        if isinstance(spec.action, Discrete):
            # a comparison instead of an index: its gradient is a select, that of an index is a scatter
            taken: Any = jax.nn.one_hot(batch.action, spec.action.n)
            return jnp.sum(taken[None] * critic.apply(critic_params, batch.obs), -1)
        return critic.apply(critic_params, batch.obs, batch.action)

    def ent_coef_at(state: State) -> Array:
        if cfg.learn_ent_coef:
            return jnp.exp(state.params["log_ent_coef"])
        return schedules.value(cfg.ent_coef, state.env_steps)

    def descend(state: State, name: str, gradient) -> State:
        lr = schedules.value(lrs[name], state.env_steps)
        params, opt_state = parts.descend(optimizer, lr, gradient, state.opt_state[name], state.params[name])
        return replace(state, params={**state.params, name: params}, opt_state={**state.opt_state, name: opt_state})

    def critic_step(state: State, batch: Batch, noise, key) -> tuple[State, dict, Array]:
        """Towards reward + discount (min Q(next_obs, action) - ent_coef log pi) (arXiv:1812.05905, eq. 5 and 6)."""
        target_critic = state.target_critic
        if cfg.target_critics is not None:
            chosen = random.permutation(key, cfg.num_critics)[: cfg.target_critics]
            target_critic = jax.tree.map(lambda x: x[chosen], target_critic)
        params, burn_in = state.params["critic"], critics.burn_in(batch)
        q, log_prob = under_policy(state.params["actor"], target_critic, batch.next_obs, noise, jnp.min, burn_in)
        target = batch.reward + batch.discount * critics.following(batch, q - ent_coef_at(state) * log_prob)
        batch = replace(batch, obs=critics.critics_read(critic, params, batch.obs, burn_in))
        gradient, metrics, priority = critics.td_gradient(
            q_taken, params, batch, target, axis_name, loss=loss, net=critic
        )
        return descend(state, "critic", gradient), metrics, priority

    def policy_step(state: State, batch: Batch, noise) -> State:
        """Of the policy (eq. 9) and of the temperature (eq. 18)."""
        ent_coef, burn_in = ent_coef_at(state), critics.burn_in(batch)
        mean = lambda x: jnp.mean(batch.weight * x)

        def policy_loss(actor_params):
            q, log_prob = under_policy(actor_params, state.params["critic"], batch.obs, noise, take, burn_in)
            return mean(ent_coef * log_prob - q), (mean(log_prob), mean(log_prob + target_entropy(batch)))

        (value, (log_prob, excess)), gradient = jax.value_and_grad(policy_loss, has_aux=True)(state.params["actor"])
        value, log_prob, excess, gradient = parts.pmean((value, log_prob, excess, gradient), axis_name)
        state = descend(state, "actor", gradient)
        if cfg.learn_ent_coef:
            state = descend(state, "log_ent_coef", -ent_coef * excess)  # of -exp(log_ent_coef) * excess
        return replace(state, policy_metrics={"loss/policy": value, "policy/entropy": -log_prob})

    def update(state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
        batch = critics.read(cfg, batch, lambda obs: watch.see(state.obs_stats, obs), state.return_stats)
        noise_key, choice_key = jax.random.split(key) if cfg.target_critics is not None else (key, key)
        noise: Any = (None, None)
        if isinstance(spec.action, Box):
            noise = critics.two_noises(noise_key, batch, spec.action.shape, axis_name)
        state, metrics, priority = critic_step(state, batch, noise[0], choice_key)
        updates = state.updates + 1
        if cfg.policy_every == 1:
            state = policy_step(state, batch, noise[1])
        else:
            due = updates % cfg.policy_every == 0
            state = jax.lax.cond(due, lambda s: policy_step(s, batch, noise[1]), lambda s: s, state)
        target_critic = parts.move_target(state.target_critic, state.params["critic"], cfg.tau)
        state = replace(state, target_critic=target_critic, updates=updates)
        metrics |= state.policy_metrics
        metrics |= {"policy/ent_coef": ent_coef_at(state), "train/lr": schedules.value(cfg.lr, state.env_steps)}
        return state, UpdateAux(metrics, priority)

    def ingest(state: State, rollout: Rollout) -> State:
        return observer.ingested(watch, state, rollout, axis_name)

    def outputs(state: State, obs) -> dict[str, Any]:
        """At an episode's start; `q` of actions that are not allowed, too."""
        obs, params = watch.see(state.obs_stats, obs), state.params["critic"]
        carry = policy.carry(jax.tree.leaves(obs)[0].shape[0])
        dist, _ = policy.step(state.params["actor"], obs, carry)
        if isinstance(dist, distributions.Categorical):
            return {"distribution": dist, "q": jnp.min(critics.at_start(critic, params, obs), 0)}
        return {"distribution": dist, "value": jnp.min(critics.at_start(critic, params, obs, dist.mode()), 0)}

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


def _policy(watch: observer.Observer, network: NetworkConfig) -> critics.Policy:
    """Squashed Gaussian or Categorical; the first one is nearly the same for all observations."""
    spec = watch.spec
    action = distributions.action_distribution(spec.action, squash=True)
    gaussian = isinstance(spec.action, Box)
    net = networks.build(spec, network, {"policy": Head(action.size * (2 if gaussian else 1), 0.01)})

    def output(outputs, obs):
        if not gaussian:
            return action.make(outputs, None, watch.mask(obs))
        mean, log_std = jnp.split(outputs, 2, -1)
        return action.make(mean, jnp.clip(log_std + network.log_std_init, *_LOG_STD_RANGE))

    return critics.policy_of(net, output)


def _target_entropy(spec: EnvSpec) -> float:
    if isinstance(spec.action, Discrete):
        return 0.98 * math.log(spec.action.n)
    assert isinstance(spec.action, Box)
    return -float(math.prod(spec.action.shape))


__all__ = ["Config", "State", "make"]
