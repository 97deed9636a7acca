"""IMPALA: an actor-critic that learns from rollouts of older policies, corrected by V-trace (arXiv:1802.01561).

    algo = impala.make(impala.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B], of any policy

`rollout.extras["log_prob"]` is the acting policy's log-probability, of any age. Each gradient step computes the
importance weights again, as the ratio of the present policy's probability to it. Sequences stay whole: minibatches
split the columns. The loss is A2C's; on a rollout of the present policy the gradients are equal. The optimizer is Adam
instead of the paper's RMSProp. With memory (`network.core`) the network runs over the whole rollout, from the acting
memory before the first row; `network.max_seq_len` limits the steps of backpropagation.
Gradients and statistics are reduced over `make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, custom_loss, parts
from jrl.algos import agent as agents
from jrl.algos.actor_critic import Rows
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.fields.bounds import Clip, Count, NonNegative, NonNegativeSchedule, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import losses, schedules
from jrl.types import Algo, Array, EnvSpec, InputError, Key, Metrics, PyTree, Rollout, UpdateAux, Window, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config(Common):
    """Hyper-parameters of IMPALA; a Schedule is a number or `[[env_steps, value], ...]`."""

    whole_sequences: ClassVar[bool] = True  # minibatches split the environments, not the rows
    corrects: ClassVar[bool] = True  # V-trace weighs each step by the present policy's probability of its action
    has_critic: ClassVar[bool] = True

    lr: NonNegativeSchedule = 1e-3
    vtrace_lambda: Unit = 1.0  # decay of the traces, as GAE's lambda; 1 in the paper
    clip_rho: Clip = 1.0  # bound of the importance weights of TD errors; selects the policy that the value estimates
    clip_c: Clip = 1.0  # bound of the importance weights along a trace; limits the reach of corrections
    clip_pg_rho: Clip = 1.0  # bound of the importance weights of the policy gradient
    num_epochs: Count = 1  # passes over each rollout
    num_minibatches: Count = 1  # gradient steps per pass, each on a share of the environments
    vf_coef: NonNegative = 0.5  # weight of the value loss
    ent_coef: NonNegativeSchedule = 0.01  # weight of the entropy bonus
    max_grad_norm: Positive | None = 40.0
    adam_eps: Positive = 1e-5
    exploration: OverDistributions = Stochastic()


@struct.dataclass
class Columns:
    """Whole sequences of b environments for the loss."""

    obs: PyTree  # [T, b, *], normalised
    last_obs: PyTree  # [1, b, *], normalised
    action: PyTree  # [T, b, *]
    log_prob: Array  # [T, b] f32, the acting policy's
    reward: Array  # [T, b] f32
    terminated: Array  # [T, b] bool
    done: Array  # [T, b] bool
    mask: Array  # [T, b] bool
    weight: Array  # [T, b] f32, 0 on masked rows, 1 on average over the rollout
    carry: PyTree  # [1, b, ...], memory before row 0; () without a core


def to_columns(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> Columns:
    """Returns the Columns of a rollout [T, B]."""
    observer = agent.observer
    action, log_prob = parts.zero_masked(rollout.mask, (rollout.action, rollout.extras["log_prob"]))
    return Columns(
        obs=observer.recall(state.obs_stats, rollout),
        last_obs=jax.tree.map(lambda x: x[None], observer.see(state.obs_stats, rollout.last_obs)),
        action=action,
        log_prob=log_prob,
        reward=parts.scale_reward(cfg, state.return_stats, rollout.reward),
        terminated=rollout.terminated,
        done=rollout.terminated | rollout.truncated,
        mask=rollout.mask,
        weight=parts.weights(rollout.mask, agent.axis_name),
        carry=jax.tree.map(lambda x: x[None], agents.split_carry(rollout.carry)[0]),
    )


def evaluate(agent: Agent, params: PyTree, columns: Columns) -> tuple[Any, Array, Callable[[], Array]]:
    """Returns the distribution [T, b], V(obs_0) .. V(obs_T-1) [T, b], and a function () -> V(last_obs) [1, b]."""
    net = agent.net
    if not agent.network.recurrent:
        return *net.apply(params, columns.obs), lambda: net.value(params, columns.last_obs)
    dist, value = net.apply(params, window(columns))
    dist, value = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (distributions.batched(dist), value))
    return jax.tree.map(lambda x: x[:-1], dist), value[:-1], lambda: value[-1:]


def loss(cfg: Config, agent: Agent, params: PyTree, columns: Columns, *, ent_coef: Any) -> tuple[Array, Metrics]:
    """Returns the mean actor-critic loss over Columns [T, b], with V-trace's advantages and targets (section 4).

    One forward pass gives the outputs and, without gradient, their targets.
    """
    dist, value, last_value = evaluate(agent, params, columns)
    log_prob = jnp.where(columns.mask, dist.log_prob(columns.action), columns.log_prob)
    values = jax.lax.stop_gradient(jnp.concatenate([value, last_value()]))
    log_rho = jax.lax.stop_gradient(log_prob - columns.log_prob)
    trace = actor_critic.vtrace(cfg, columns.reward, columns.terminated, columns.done, values, log_rho)
    advantage, target = parts.zero_masked(columns.mask, (trace.advantage, trace.target))
    rows = Rows(columns.obs, columns.action, advantage, target, columns.weight)
    total, metrics = actor_critic.policy_gradient(dist, log_prob, value, rows, vf_coef=cfg.vf_coef, ent_coef=ent_coef)
    mean = lambda x: jnp.mean(columns.weight * x)
    metrics["policy/approx_kl"] = mean(losses.approx_kl(columns.log_prob + log_rho, columns.log_prob))
    metrics["policy/rho"] = mean(jnp.minimum(jnp.exp(log_rho), cfg.clip_rho))
    return total, metrics | parts.value_metrics(target, values[:-1], columns.weight, agent.axis_name)


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches of whole sequences.

    Raises:
      InputError: num_minibatches does not divide the environments.
    """
    num_envs = rollout.reward.shape[1]
    if num_envs % cfg.num_minibatches:
        below = next(n for n in range(min(cfg.num_minibatches, num_envs), 0, -1) if num_envs % n == 0)
        more = num_envs + cfg.num_minibatches - num_envs % cfg.num_minibatches
        raise InputError(
            f"algo.num_minibatches {cfg.num_minibatches} does not divide the {num_envs} environments of a device, and "
            f"impala learns from whole sequences: use {below}, or {more} environments on each device"
        )
    state = agents.with_return_stats(agent, state, rollout)
    columns = to_columns(cfg, agent, agents.with_first_stats(agent, state, rollout), rollout)
    lr, ent_coef = (schedules.value(schedule, state.env_steps) for schedule in (cfg.lr, cfg.ent_coef))
    own = functools.partial(loss, cfg, agent, ent_coef=ent_coef)
    columns_loss = custom_loss.over_rows(agent.loss, own, agent.net)

    def step(carry, index):
        params, opt_state = carry
        batch = columns if cfg.num_minibatches == 1 else jax.tree.map(lambda x: x[:, index], columns)
        gradient, metrics = parts.pmean(jax.grad(columns_loss, has_aux=True)(params, batch), agent.axis_name)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), metrics

    start, grid = (state.params, state.opt_state), (1, num_envs)  # minibatches split the environments
    (params, opt_state), metrics = agents.epochs(cfg, agent, step, start, lambda index: index, grid, key)
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    return agents.observed(agent, state, rollout), UpdateAux(jax.tree.map(jnp.mean, metrics) | {"train/lr": lr})


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes IMPALA, an on-policy Algo that accepts rollouts of older policies. Arguments and errors: see `jrl.algos`.

    A user's loss gets Columns [T, b], whole sequences; with a core the network reads their `window`. `update` raises
    InputError if num_minibatches does not divide the columns.
    """
    agent = actor_critic.make_agent(cfg, spec, network, **options)
    return actor_critic.make_algo(cfg, agent, update)


def window(columns: Columns) -> Window:
    """Returns the Window [b, T + 1] of the sequences and their last observations, for networks with a core."""
    join = lambda rows, last: jnp.swapaxes(jnp.concatenate([rows, last]), 0, 1)
    obs = jax.tree.map(join, columns.obs, columns.last_obs)
    reset = join(~columns.mask, jnp.zeros_like(columns.mask[:1]))
    return Window(obs, jax.tree.map(lambda x: x[0], columns.carry), reset)
