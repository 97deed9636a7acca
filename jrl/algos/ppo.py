"""Proximal policy optimisation (arXiv:1707.06347), with the options of the field's implementations.

    algo = ppo.make(ppo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

`make(..., axis_name="d")` returns functions for `jax.pmap(..., axis_name="d")` or `jrl.learn.parallel.pmap`: gradients
and statistics are averaged over that axis. Float hyper-parameters are pytree leaves of Config, so they can be vmapped.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, custom_loss, parts
from jrl.algos import agent as agents
from jrl.algos import curiosity as curiosities
from jrl.algos import symmetry as symmetries
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.curiosity import Icm, Rnd
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.algos.symmetry import Symmetry
from jrl.fields.bounds import Amount, Count, NonNegative, NonNegativeSchedule, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import losses, minibatch, schedules
from jrl.types import Algo, Array, EnvSpec, InputError, Key, Metrics, PyTree, Rollout, Space, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()
_KL_COEF_RANGE = 1_000.0  # maximum factor between an adaptive weight and its initial value, up or down


@hyperparams
class ClippedSteps(Common):
    """Hyper-parameters of PPO's gradient steps; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_critic: ClassVar[bool] = True
    has_learning_pass: ClassVar[bool] = True

    clip_eps: NonNegativeSchedule = 0.2  # the probability ratio is clipped to [1 - clip_eps, 1 + clip_eps]
    value_clip_eps: Positive | None = None  # clips the change of the value, too; null: no clipping
    vf_coef: NonNegative = 0.5  # weight of the value loss
    ent_coef: NonNegativeSchedule = 0.0  # weight of the entropy bonus
    num_epochs: Count = 4  # passes over a rollout in an update
    num_minibatches: Count = 4  # gradient steps per pass
    # to mean 0 and deviation 1 over the rollout's unmasked rows, or with `minibatch` over those of each minibatch
    normalize_advantage: bool | Literal["minibatch"] = True
    max_grad_norm: Positive | None = 0.5
    adam_eps: Positive = 1e-5
    # stops the gradient steps on a rollout once the KL from the policy before the update (appo: the target's) exceeds
    # it
    target_kl: Positive | None = None
    # weight of a penalty on the KL from that policy (at the start, if kl_target is set); null: no penalty
    kl_coef: NonNegative | None = None
    # adapts the weight: x 1.5 above twice this KL, x 0.5 below half of it, to a thousandth and a thousand times at most
    kl_target: Positive | None = None
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    # number of first updates that train only the value, for a pretrained policy with an untrained value
    policy_after: Amount = 0
    exploration: OverDistributions = Stochastic()

    def validate(self) -> list[str]:
        return self.kl_faults() + super().validate()

    def kl_faults(self, *, moving: bool = False) -> list[str]:
        """Returns one message per invalid KL option; `moving`: the reference policy may be older than the update."""
        faults = []
        if self.kl_target is not None and not (self.kl_coef or 0.0) > 0:
            faults.append("kl_target adapts kl_coef, which must then start above 0: try 0.2")
        if self.num_epochs * self.num_minibatches == 1 and not moving:
            faults += [
                f"{name} can never act: with num_epochs 1 and num_minibatches 1 one gradient step per rollout is made, "
                "and its KL is 0: set one of them to 2 or more, or leave this out"
                for name in ("target_kl", "kl_target")
                if getattr(self, name) is not None
            ]
        return faults


@hyperparams
class Config(ClippedSteps):
    """Hyper-parameters of PPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    gae_lambda: Unit = 0.95  # lambda of generalised advantage estimation
    symmetry: Symmetry | None = None  # mirror images of each step; null: none
    curiosity: Rnd | Icm | None = None  # intrinsic rewards for exploration; null: none
    # bound of uniform noise on the means of Gaussian actions in the gradient steps (RPO, arXiv:2212.07536); null: none
    rpo_alpha: Positive | None = None

    def validate(self) -> list[str]:
        faults = []
        if self.rpo_alpha is not None and self.target_kl is not None:
            faults.append(
                "target_kl would measure the noise of rpo_alpha: use kl_coef, whose KL has none, or leave one of them "
                "out"
            )
        return faults + symmetries.faults(self.symmetry, self.kl_coef) + super().validate()


@struct.dataclass
class Rows(actor_critic.Rows):
    log_prob: Array  # f32, of the ratio's reference policy
    value: PyTree  # f32, at collection time, of the target's shape; () without value clipping
    dist: PyTree  # reference distribution of the KL penalty; () without a penalty
    kl_log_prob: PyTree  # f32, of the reference policy of target_kl; () without it
    images: PyTree = ()  # symmetry.Images; () without symmetry


def init(cfg: ClippedSteps, agent: Agent, key: Key) -> State:
    """Returns the initial State; `own` has the weight of the KL penalty, which may adapt."""
    kl_coef = jnp.asarray(0.0 if cfg.kl_coef is None else cfg.kl_coef, jnp.float32)
    return agents.begin(cfg, agent, key, agent.net.init(key), kl_coef=kl_coef, **curiosities.init(cfg, agent, key))


def targets(
    cfg: Config, agent: Agent, state: State, rollout: Rollout, intrinsic: Array | None = None
) -> tuple[Rows, PyTree, Metrics]:
    """Returns Rows [T, B] with GAE, the recurrent state before each sequence, and metrics.

    `intrinsic`: intrinsic rewards [T, B]; None without curiosity.
    """
    rows, value, memory, metrics = actor_critic.gae_rows(cfg, agent, state, rollout, intrinsic)
    log_prob, old_value = parts.zero_masked(rollout.mask, (rollout.extras["log_prob"], value))
    old_value = old_value if cfg.value_clip_eps is not None else ()
    images = symmetries.images(cfg.symmetry, agent, state.obs_stats, rollout)
    rows = Rows(**vars(rows), log_prob=log_prob, value=old_value, dist=(), kl_log_prob=(), images=images)
    return rows, memory, metrics


def loss(
    cfg: ClippedSteps,
    agent: Agent,
    params: PyTree,
    rows: Rows,
    *,
    clip_eps: Any,
    ent_coef: Any,
    kl_coef: Any,
    policy_coef: Any = None,
    key: Key | None = None,
) -> tuple[Array, Metrics]:
    """Returns the clipped surrogate + vf_coef value loss - ent_coef entropy + kl_coef KL, the mean over Rows [N].

    Equations 7 and 9 of the paper.

    Args:
      params: parameters of the learned network.
      rows: result of `targets` and `measured`.
      clip_eps, ent_coef, kl_coef: scalars, the present values.
      policy_coef: weight of all terms but the value loss, 0 while the policy does not learn; None: 1.
      key: key of dropout and of the noise of `rpo_alpha`; None: neither.
    """
    dist, value = agent.net.apply(params, rows.obs, key=key, **agents.batch_rows(agent, rows.weight))
    noisy = dist
    if isinstance(cfg, Config) and cfg.rpo_alpha is not None and key is not None:
        noisy = distributions.shift_means(dist, cfg.rpo_alpha, jax.random.fold_in(key, 1))
    # masked rows get ratio 1 before exp: weight 0 would not remove an overflow
    log_prob = jnp.where(rows.weight > 0, noisy.log_prob(rows.action), rows.log_prob)
    mean = lambda x: jnp.mean(rows.weight * x)
    surrogate, clipped = losses.clipped_surrogate(log_prob, rows.log_prob, rows.advantage, clip_eps=clip_eps)
    kl_log_prob = rows.log_prob if cfg.target_kl is None else rows.kl_log_prob
    old_value = rows.value if cfg.value_clip_eps is not None else value
    policy_loss = mean(surrogate)
    value_error = losses.clipped_value_loss(value, old_value, rows.target, clip_eps=cfg.value_clip_eps)
    value_loss = mean(actor_critic.sum_heads(rows, value_error))
    entropy = mean(dist.entropy())
    total = policy_loss + cfg.vf_coef * value_loss - ent_coef * entropy
    metrics = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": mean(losses.approx_kl(log_prob, kl_log_prob)),
        "policy/clip_fraction": mean(clipped),
    }
    if cfg.kl_coef is not None:
        metrics["policy/kl"] = mean(rows.dist.kl(dist))
        total = total + kl_coef * metrics["policy/kl"]
    if policy_coef is not None:
        of_value = cfg.vf_coef * value_loss
        total = of_value + policy_coef * (total - of_value)
    return total, metrics


def measured(cfg: ClippedSteps, agent: Agent, params: PyTree, rows: Rows) -> Rows:
    """Returns Rows [N] with `params` as reference policy of the KL, unless they have another one.

    KL is measured from the policy before the update. The acting policy may be older (`rollout.mode` async), and this
    update cannot reduce the distance between the two.
    """
    measures, penalises = cfg.target_kl is not None, cfg.kl_coef is not None

    def before(rows: Rows):
        dist, _ = agent.net.apply(params, rows.obs)
        log_prob = jnp.where(rows.weight > 0, dist.log_prob(rows.action), rows.log_prob)
        return log_prob if measures else (), distributions.batched(dist) if penalises else ()

    known = lambda x: not isinstance(x, tuple)
    if (not measures or known(rows.kl_log_prob)) and (not penalises or known(rows.dist)):
        return rows
    chunk = agents.chunk(cfg, agent, len(rows.weight), length=rows.weight[0].size)
    log_prob, dist = minibatch.map_rows(before, rows, chunk)
    return replace(rows, kl_log_prob=log_prob, dist=dist)


def with_normalized_advantage(agent: Agent, rows: Rows) -> Rows:
    """Returns Rows [N] whose advantages have mean 0 and deviation 1 over the unmasked rows of all devices."""
    counts, choice = rows.weight > 0, actor_critic.choice(agent, rows.obs)
    among = parts.weights(counts if choice is None else counts & choice, agent.axis_name)
    return replace(rows, advantage=parts.standardize(rows.advantage, among, agent.axis_name))


def improve(
    cfg: ClippedSteps, agent: Agent, state: State, rows: Rows, memory: PyTree, key: Key
) -> tuple[State, Metrics]:
    """Makes the epochs of minibatches of the clipped loss, or the user's loss, with updates of kl_coef.

    Args:
      state: State whose `own` has kl_coef.
      rows: [T, B].
      memory: recurrent state before each sequence of the rollout; () without a core.
      key: the same on all devices.
    """
    grid = agents.grid(agent, *rows.weight.shape)  # with a core the steps are sequences
    length = rows.weight.size // (grid[0] * grid[1])
    chunk = agents.chunk(cfg, agent, grid[0] * grid[1] // cfg.num_minibatches, length=length)
    take = agents.taker(measured(cfg, agent, state.params, agents.cut(agent, rows, memory)))
    lr, clip_eps, ent_coef = (schedules.value(x, state.env_steps) for x in (cfg.lr, cfg.clip_eps, cfg.ent_coef))
    kl_coef = state.own["kl_coef"]
    own = functools.partial(loss, cfg, agent, clip_eps=clip_eps, ent_coef=ent_coef, kl_coef=kl_coef)
    start_opt_state = state.opt_state
    if cfg.policy_after:
        own = functools.partial(own, policy_coef=(state.updates >= cfg.policy_after).astype(jnp.float32))
        start_opt_state = reset_optimizer(cfg, agent, state)
    # metrics that the update depends on
    deciding = [("policy/approx_kl", cfg.target_kl), ("policy/kl", cfg.kl_target)]
    names = [name for name, limit in deciding if limit is not None]

    def step(carry, batch: Rows, key: Key | None = None):
        params, opt_state, stopped = carry
        if cfg.normalize_advantage == "minibatch":
            batch = with_normalized_advantage(agent, batch)
        rows_loss = custom_loss.over_rows(agent.loss, functools.partial(own, key=key), agent.net, metrics=names)
        if isinstance(cfg, Config) and cfg.symmetry is not None:
            rows_loss = symmetries.with_images(cfg.symmetry, agent, rows_loss)
        gradient, metrics = agents.mean_gradient(agent, rows_loss, params, batch, chunk)
        new_params, new_opt_state = agents.descend(cfg, agent, lr, gradient, opt_state, params)
        if cfg.target_kl is not None:
            stopped = stopped | (metrics["policy/approx_kl"] > cfg.target_kl)
            keep = lambda old, new: jax.tree.map(lambda o, n: jnp.where(stopped, o, n), old, new)
            new_params, new_opt_state = keep(params, new_params), keep(opt_state, new_opt_state)
        return (new_params, new_opt_state, stopped), metrics

    start = (state.params, start_opt_state, jnp.zeros((), bool))
    draws = isinstance(cfg, Config) and cfg.rpo_alpha is not None
    (params, opt_state, stopped), metrics = agents.epochs(cfg, agent, step, start, take, grid, key, draws=draws)
    last = jax.tree.map(lambda x: x[-1].mean(), metrics)  # KL and clipping are reported after the last pass
    metrics = jax.tree.map(jnp.mean, metrics) | {k: last[k] for k in last if "kl" in k or "clip" in k}
    if cfg.target_kl is not None:
        metrics["policy/stopped_early"] = stopped.astype(jnp.float32)
    if cfg.kl_target is not None:
        kl_coef = metrics["policy/kl_coef"] = adapted_kl_coef(cfg, kl_coef, last["policy/kl"])
    own_state = {**state.own, "kl_coef": kl_coef}
    state = replace(state, params=params, opt_state=opt_state, own=own_state, updates=state.updates + 1)
    return state, metrics | {"train/lr": lr}


def reset_optimizer(cfg: ClippedSteps, agent: Agent, state: State) -> PyTree:
    """Returns the optimizer's state, re-initialised at the update from which the policy learns.

    Adam corrects its mean of squared gradients by their count. The policy's gradients were 0 until then. With the count
    of the value's gradients, the policy's first steps would be several times too long.
    """
    initial = agent.optimizer(cfg).init(state.params)
    begins = state.updates == cfg.policy_after
    return jax.tree.map(lambda new, old: jnp.where(begins, new, old), initial, state.opt_state)


def check_policy_after(cfg: ClippedSteps, network: NetworkConfig) -> None:
    """Raises InputError if the value's updates would change the policy."""
    if cfg.policy_after and network.shared:
        raise InputError(
            "algo.policy_after: with network.shared the value's updates move the torso that the policy reads: set "
            "network.shared to false, or leave policy_after out"
        )


def check_rpo(cfg: Config, space: Space) -> None:
    """Raises InputError if there is no Gaussian whose mean could have noise."""
    if cfg.rpo_alpha is not None and not distributions.action_distribution(space).num_gaussian:
        raise InputError(
            f"algo.rpo_alpha: expected a float Box among the actions, got {space}: leave algo.rpo_alpha out"
        )


def adapted_kl_coef(cfg: ClippedSteps, kl_coef: Array, kl: Array) -> Array:
    """Returns the weight of the KL penalty for the next update, after an update with this final `kl` (section 4)."""
    assert cfg.kl_coef is not None and cfg.kl_target is not None
    kl_coef = jnp.where(kl > 2.0 * cfg.kl_target, 1.5 * kl_coef, kl_coef)
    kl_coef = jnp.where(kl < 0.5 * cfg.kl_target, 0.5 * kl_coef, kl_coef)
    # bounded, because a weight of 0 could not grow again
    return jnp.clip(kl_coef, cfg.kl_coef / _KL_COEF_RANGE, cfg.kl_coef * _KL_COEF_RANGE)


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes one update on a rollout [T, B]."""
    before = state = agents.with_return_stats(agent, state, rollout)
    state, intrinsic, novelty = curiosities.explore(cfg, agent, state, rollout, key)
    first = agents.with_first_stats(agent, state, rollout)
    rows, memory, value_metrics = targets(cfg, agent, first, rollout, intrinsic)
    state, metrics = improve(cfg, agent, state, rows, memory, key)
    state = curiosities.without_learning(cfg, agent, before, state)
    return agents.observed(agent, state, rollout), UpdateAux(metrics | value_metrics | novelty)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes PPO, an on-policy Algo. A user's loss gets Rows [N]. Arguments and errors: see `jrl.algos`."""
    check_policy_after(cfg, network)
    symmetries.check(cfg.symmetry, spec, network)
    check_rpo(cfg, spec.action)
    agent = actor_critic.make_agent(cfg, spec, network, **options)
    # with a shared torso, recording the value while acting costs only its head; else computing it later is cheaper
    return actor_critic.make_algo(cfg, agent, update, init=init, record_value=network.shared)
