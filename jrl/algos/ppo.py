"""Proximal policy optimisation (arXiv:1707.06347), with the options of the field's implementations.

    algo = ppo.make(ppo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

`make(..., axis_name="d")` gives functions for `jax.pmap(..., axis_name="d")` or `jrl.parallel.pmap`: gradients and
statistics are reduced over that axis. Float hyper-parameters are pytree leaves of Config, so they can be vmapped.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, custom_loss, exploration, parts
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.bounds import Count, NonNegative, NonNegativeSchedule, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import losses, minibatch, returns, schedules
from jrl.types import Algo, Array, EnvSpec, Key, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()
_KL_COEF_RANGE = 1_000.0  # how far an adaptive weight goes from the one that it starts with, either way


@hyperparams
class Config:
    """Hyper-parameters of PPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    lr: NonNegativeSchedule = 3e-4  # Adam's step size
    gamma: Unit = 0.99  # discount per step
    gae_lambda: Unit = 0.95  # of generalised advantage estimation
    clip_eps: NonNegativeSchedule = 0.2  # the probability ratio is clipped to [1 - clip_eps, 1 + clip_eps]
    value_clip_eps: Positive | None = None  # clips the value's move likewise; null: no clipping
    vf_coef: NonNegative = 0.5  # weight of the value loss
    ent_coef: NonNegativeSchedule = 0.0  # weight of the entropy bonus
    num_epochs: Count = 4  # passes over each rollout
    num_minibatches: Count = 4  # gradient steps per pass
    normalize_advantage: bool = True  # to mean 0 and deviation 1 over the rollout's unmasked rows
    normalize_obs: bool = False  # by running mean and deviation; images stay as they are
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    max_grad_norm: Positive | None = 0.5  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-5  # added to Adam's denominator
    # no more gradient steps on a rollout once the KL from before the first exceeds it
    target_kl: Positive | None = None
    # weight of a penalty on the KL from before the update (at the start, if kl_target is set)
    kl_coef: NonNegative = 0.0
    # adapts the weight: x 1.5 above twice this KL, x 0.5 below half of it, to a thousandth and a thousand times at most
    kl_target: Positive | None = None
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    exploration: OverDistributions = Stochastic()  # how it acts while it learns

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        return kl_faults(self) + exploration.validate(self.exploration)


@struct.dataclass
class State(actor_critic.State):
    kl_coef: Array  # [] f32


@struct.dataclass
class Rows(actor_critic.Rows):
    log_prob: Array  # f32, of the policy that the ratio is clipped against
    value: PyTree  # f32, when the rollout was made; () unless values are clipped
    dist: PyTree  # the distribution that a KL penalty is from; () without one
    kl_log_prob: PyTree  # f32, of the policy that target_kl is measured from; () without it


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """PPO as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment; `num_envs` is not read, the rollout's shape counts.
      network: shape of policy and value network.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the algorithm's own, of Rows [N] (`jrl.algos`); None: none does.
    Returns:
      An on-policy Algo.
    Raises:
      InputError: a space or torso that PPO cannot handle.
    """
    # a value recorded while acting costs no more than its head where the torso is shared; otherwise later is cheaper
    agent = actor_critic.agent(cfg, spec, network, axis_name=axis_name, record_value=network.shared)
    improve = clipped_steps(cfg, agent, axis_name=axis_name, loss=loss)

    def init(key: Key) -> State:
        return State(**vars(agent.init(key)), kl_coef=jnp.asarray(cfg.kl_coef, jnp.float32))

    def rows_of(state: State, rollout: Rollout):
        """GAE and weights: Rows [T, B], the memory before each sequence, and metrics."""
        value, memory = agent.values(state, rollout)
        done = rollout.terminated | rollout.truncated
        reward = parts.scaled_reward(cfg, state.return_stats, rollout.reward)
        advantage, target = returns.gae(
            reward, rollout.terminated, done, value, gamma=cfg.gamma, gae_lambda=cfg.gae_lambda
        )
        rows, metrics = actor_critic.make_rows(
            agent.recall(state.obs_stats, rollout),
            rollout,
            advantage,
            target,
            value[:-1],
            normalize_advantage=cfg.normalize_advantage,
            axis_name=axis_name,
        )
        log_prob, old_value = parts.cleared(rollout.mask, (rollout.extras["log_prob"], value[:-1]))
        return (
            Rows(
                **vars(rows),
                log_prob=log_prob,
                value=old_value if cfg.value_clip_eps is not None else (),
                dist=(),
                kl_log_prob=(),
            ),
            memory,
            metrics,
        )

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
        state = replace(state, return_stats=parts.observe_returns(state.return_stats, rollout, axis_name))
        rows, memory, value_metrics = rows_of(agent.begun(state, rollout), rollout)
        state, metrics = improve(state, rows, memory, key)
        return agent.observe(state, rollout), UpdateAux(metrics | value_metrics)

    return agent.algo(update, init=init)


class ClippedSteps(Protocol):
    """The fields of a Config that `clipped_steps` reads, with the meaning that they have in PPO's."""

    lr: NonNegativeSchedule
    clip_eps: NonNegativeSchedule
    value_clip_eps: Positive | None
    vf_coef: NonNegative
    ent_coef: NonNegativeSchedule
    num_epochs: Count
    num_minibatches: Count
    target_kl: Positive | None
    kl_coef: NonNegative
    kl_target: Positive | None
    microbatch_size: Count | None


def kl_faults(cfg: ClippedSteps, *, moving: bool = False) -> list[str]:
    """What is wrong with what KL decides.

    Args:
      cfg: the hyper-parameters.
      moving: the policy that it is measured from may be older than the update.
    """
    faults = []
    if cfg.kl_target is not None and not cfg.kl_coef > 0:
        faults.append("kl_target adapts kl_coef, which must then start above 0: try 0.2")
    if cfg.num_epochs * cfg.num_minibatches == 1 and not moving:
        faults += [
            f"{name} can never act: with num_epochs 1 and num_minibatches 1 the policy makes one step from each "
            "rollout, and is where it was before it: set one of them to 2 or more, or leave this out"
            for name in ("target_kl", "kl_target")
            if getattr(cfg, name) is not None
        ]
    return faults


def penalises_kl(cfg: ClippedSteps) -> bool:
    """Whether there may be a KL penalty: a coefficient that is traced might be any."""
    return cfg.kl_target is not None or not (isinstance(cfg.kl_coef, float | int) and cfg.kl_coef == 0)


def clipped_steps(
    cfg: ClippedSteps, agent: actor_critic.Agent, *, axis_name: str | None, loss: Loss | None = None
) -> Callable[..., Any]:
    """PPO's loss, or another, and its epochs of minibatches: (state, Rows [T, B], memory, key) -> (state, metrics).

    The state is a State, or one with its fields; parameters, optimizer and kl_coef move. KL is measured from the
    policies in the rows, or where there are none from that of the state: the acting policy may be older (`rollout.mode`
    async), and how far the parameters have gone since is nothing that this update could do less of.
    """
    net, penalise_kl = agent.net, penalises_kl(cfg)
    custom_loss.check(loss)
    # metrics that decide something
    deciding = {"policy/approx_kl": cfg.target_kl is not None, "policy/kl": cfg.kl_target is not None}

    def clipped_loss(params, rows: Rows, clip_eps, ent_coef, kl_coef):
        dist, value = net.apply(params, rows.obs)
        # on a masked row the ratio is 1 before it is exponentiated: weight 0 alone would not undo an overflow
        log_prob = jnp.where(rows.weight > 0, dist.log_prob(rows.action), rows.log_prob)
        mean = lambda x: jnp.mean(rows.weight * x)
        surrogate, clipped = losses.clipped_surrogate(log_prob, rows.log_prob, rows.advantage, clip_eps=clip_eps)
        kl_log_prob = rows.log_prob if cfg.target_kl is None else rows.kl_log_prob
        old_value = rows.value if cfg.value_clip_eps is not None else value
        policy_loss = mean(surrogate)
        value_loss = mean(losses.clipped_value_loss(value, old_value, rows.target, clip_eps=cfg.value_clip_eps))
        entropy = mean(dist.entropy())
        total = policy_loss + cfg.vf_coef * value_loss - ent_coef * entropy
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy,
            "policy/approx_kl": mean(losses.approx_kl(log_prob, kl_log_prob)),
            "policy/clip_fraction": mean(clipped),
        }
        if penalise_kl:
            metrics["policy/kl"] = mean(rows.dist.kl(dist))
            total = total + kl_coef * metrics["policy/kl"]
        return total, metrics

    def measured(params, rows: Rows) -> Rows:
        """`rows` [N], of which those that say no policy to measure KL from say that of `params`."""

        def before(rows: Rows):
            dist, _ = net.apply(params, rows.obs)
            log_prob = jnp.where(rows.weight > 0, dist.log_prob(rows.action), rows.log_prob)
            return log_prob if measures else (), distributions.batched(dist) if penalise_kl else ()

        measures = cfg.target_kl is not None
        if (not measures or rows.kl_log_prob != ()) and (not penalise_kl or rows.dist != ()):
            return rows
        length = rows.weight[0].size
        chunk = minibatch.chunk_rows(len(rows.weight), agent.row_bytes, cfg.microbatch_size, length=length)
        log_prob, dist = minibatch.map_rows(before, rows, chunk)
        return replace(rows, kl_log_prob=log_prob, dist=dist)

    def improve(state, rows: Rows, memory: PyTree, key: Key):
        num_steps, num_envs = agent.grid(*rows.weight.shape)  # with a core the steps are sequences
        take = minibatch.row_taker(measured(state.params, agent.cut(rows, memory)))
        size = num_steps * num_envs // cfg.num_minibatches
        length = rows.weight.shape[0] // num_steps
        chunk = minibatch.chunk_rows(size, agent.row_bytes, cfg.microbatch_size, length=length)
        at = lambda schedule: schedules.value(schedule, state.env_steps)
        lr, clip_eps, ent_coef = at(cfg.lr), at(cfg.clip_eps), at(cfg.ent_coef)
        own_loss = lambda params, rows: clipped_loss(params, rows, clip_eps, ent_coef, state.kl_coef)
        rows_loss = custom_loss.over_rows(loss, own_loss, net, metrics=[name for name, on in deciding.items() if on])

        def step(carry, batch: Rows):
            params, opt_state, stopped = carry
            gradient, metrics = minibatch.mean_gradient(rows_loss, params, batch, chunk)
            gradient, metrics = parts.pmean((gradient, metrics), axis_name)
            new_params, new_opt_state = parts.descend(agent.optimizer, lr, gradient, opt_state, params)
            if cfg.target_kl is not None:
                stopped = stopped | (metrics["policy/approx_kl"] > cfg.target_kl)
                keep = lambda old, new: jax.tree.map(lambda o, n: jnp.where(stopped, o, n), old, new)
                new_params, new_opt_state = keep(params, new_params), keep(opt_state, new_opt_state)
            return (new_params, new_opt_state, stopped), metrics

        def epoch(carry, key):
            index = minibatch.shuffle(key, num_steps, num_envs, cfg.num_minibatches, axis_name=axis_name)
            shuffled = take(index.reshape(-1))  # one gather for the epoch: 3% less than one for each minibatch
            return jax.lax.scan(step, carry, jax.tree.map(lambda x: x.reshape(*index.shape, *x.shape[1:]), shuffled))

        start = (state.params, state.opt_state, jnp.zeros((), bool))
        (params, opt_state, stopped), metrics = jax.lax.scan(epoch, start, jax.random.split(key, cfg.num_epochs))
        last = jax.tree.map(lambda x: x[-1].mean(), metrics)  # KL and clipping after the last pass, not on average
        metrics = jax.tree.map(jnp.mean, metrics) | {k: last[k] for k in last if "kl" in k or "clip" in k}
        if cfg.target_kl is not None:
            metrics["policy/stopped_early"] = stopped.astype(jnp.float32)
        kl_coef = state.kl_coef
        if cfg.kl_target is not None:
            kl = last["policy/kl"]
            kl_coef = jnp.where(kl > 2.0 * cfg.kl_target, 1.5 * kl_coef, kl_coef)
            kl_coef = jnp.where(kl < 0.5 * cfg.kl_target, 0.5 * kl_coef, kl_coef)
            # within bounds: halved for long enough it would be 0, and what is 0 does not grow
            kl_coef = jnp.clip(kl_coef, cfg.kl_coef / _KL_COEF_RANGE, cfg.kl_coef * _KL_COEF_RANGE)
            metrics["policy/kl_coef"] = kl_coef
        return replace(state, params=params, opt_state=opt_state, kl_coef=kl_coef), metrics | {"train/lr": lr}

    return improve


__all__ = ["ClippedSteps", "Config", "Rows", "State", "clipped_steps", "kl_faults", "make", "penalises_kl"]
