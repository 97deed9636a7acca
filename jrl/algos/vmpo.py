"""V-MPO, on-policy maximum a posteriori policy optimisation (arXiv:1909.12238).

    algo = vmpo.make(vmpo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

The paper's target policy is the policy before the update. With A its generalised advantage estimates, and D the rows of
a minibatch among the `top_share` of the rollout with the largest A:

    E-step    psi = softmax over D of A / eta; eta minimises eta (sample_kl + log mean over D of exp(A / eta))
    M-step    minimises -sum psi log pi(a | s) + alpha KL(pi_old || pi); alpha grows while KL > its bound
    value     vf_coef (V - target)^2 / 2, on all rows

The KL of a Gaussian has two parts with their own bounds and alphas, as in MPO: that of the mean and that of the
deviation. All other policies have one KL, named after the mean. eta and alpha are learned as logarithms, with Adam.
Memory works as in PPO. Gradients and metrics are averaged over `make(..., axis_name="d")`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, custom_loss, mpo, parts
from jrl.algos import agent as agents
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.fields.bounds import Count, NonNegative, NonNegativeSchedule, Positive, Share, Unit
from jrl.networks import NetworkConfig
from jrl.ops import collectives, minibatch, schedules
from jrl.types import Algo, Array, EnvSpec, Key, Metrics, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config(Common):
    """Hyper-parameters of V-MPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_critic: ClassVar[bool] = True
    uncorrected: ClassVar[bool] = True  # treats rollouts of older policies (rollout.mode async) as the present policy's

    gae_lambda: Unit = 0.95  # lambda of generalised advantage estimation
    vf_coef: NonNegative = 0.5  # weight of the value loss
    num_epochs: Count = 8  # passes over a rollout in an update
    num_minibatches: Count = 4  # gradient steps per pass
    normalize_advantage: bool = True  # to mean 0 and deviation 1 over the rollout's unmasked rows
    top_share: Share = 0.5  # share of a rollout's rows, those with the largest advantages, that the policy learns
    dual_lr: NonNegativeSchedule = 1e-2  # step size of the logarithms of temperature and multipliers
    sample_kl: Positive = 0.1  # bound of the KL from equal weights to psi
    mean_kl: Positive = 0.01  # bound of the mean KL of the policy with a new mean; not a Gaussian: of the policy
    std_kl: Positive = 5e-4  # bound of the mean KL of the policy with a new deviation
    temperature: Positive = 1.0  # initial eta
    mean_alpha: Positive = 5.0  # initial multiplier of the KL of the mean; not a Gaussian: of the policy
    std_alpha: Positive = 5.0  # initial multiplier of the KL of the deviation
    max_grad_norm: Positive | None = 0.5
    adam_eps: Positive = 1e-5
    exploration: OverDistributions = Stochastic()


@struct.dataclass
class Rows(actor_critic.Rows):
    psi: Array  # f32, 1 on the rows with the largest advantages, else 0; in a loss psi, 1 on average over all rows
    dist: PyTree  # distribution of the policy before the update


def init(cfg: Any, agent: Agent, key: Key) -> State:
    """Returns the initial State; `own` has the logarithms of temperature and multipliers, and their optimizer."""
    start = {"temperature": cfg.temperature, "mean": cfg.mean_alpha, "std": cfg.std_alpha}
    dual = {name: jnp.log(jnp.asarray(x, jnp.float32)) for name, x in start.items()}
    dual_state = agent.optimizer(cfg).init(dual)
    return agents.begin(cfg, agent, key, agent.net.init(key), dual=dual, dual_opt_state=dual_state)


def is_best(cfg: Config, agent: Agent, advantage: Array, mask: Array) -> Array:
    """Returns the rows [T, B] with the largest advantages, `top_share` of the unmasked rows of all devices."""
    every = jnp.where(mask, advantage, -jnp.inf).ravel()
    every = jnp.sort(collectives.all_gather(every, agent.axis_name), descending=True)
    count = jnp.ceil(cfg.top_share * jnp.sum(every > -jnp.inf)).astype(jnp.int32)
    return mask & (advantage >= every[jnp.maximum(count - 1, 0)])


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, Metrics]:
    """Returns Rows [N] with GAE, the choice of the best rows and the distribution before the update, and metrics."""
    rows, _, memory, metrics = actor_critic.gae_rows(cfg, agent, state, rollout)
    best = is_best(cfg, agent, rows.advantage, rollout.mask).astype(jnp.float32)
    rows = agents.cut(agent, Rows(**vars(rows), psi=best, dist=()), memory)
    before = lambda rows: distributions.batched(agent.net.apply(state.params, rows.obs)[0])
    chunk = agents.chunk(cfg, agent, len(rows.weight), length=rows.weight[0].size)
    return replace(rows, dist=minibatch.map_rows(before, rows, chunk)), metrics


def weigh(rows: Rows, temperature: Array, axis_name: str | None) -> tuple[Rows, Array]:
    """Returns Rows [N] with psi of a minibatch (equation 2), and its KL from equal weights on the best rows."""
    score = jnp.where(rows.psi > 0, rows.advantage / temperature, -jnp.inf)
    greatest = collectives.pmax(jnp.max(score), axis_name)
    score = jnp.where(rows.psi > 0, score - greatest, 0.0)
    share = rows.psi * jnp.exp(score)
    mean = lambda x: jnp.maximum(parts.pmean(jnp.mean(x), axis_name), 1e-8)  # not 0, for a minibatch without best rows
    psi = share / mean(share)
    kl = parts.pmean(jnp.mean(psi * score), axis_name) - jnp.log(mean(share) / mean(rows.psi))
    return replace(rows, psi=psi), kl


def loss(cfg: Config, agent: Agent, params: PyTree, dual: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the M-step's loss with that of the multipliers, and vf_coef value loss, the mean over Rows [N].

    Equations 3 to 5 of the paper.

    Args:
      params: parameters of the learned network.
      dual: logarithms of the multipliers.
      rows: result of `weigh`.
    """
    dist, value = agent.net.apply(params, rows.obs)
    mean = lambda x: jnp.mean(rows.weight * x)
    fit = -jnp.mean(rows.psi * dist.log_prob(rows.action))
    penalty, metrics = mpo.kl_penalty(cfg, mpo.steps_of(dist, rows.dist), rows.dist, dual, mean)
    value_loss = mean(0.5 * jnp.square(value - rows.target))
    metrics |= {"loss/policy": fit, "loss/value": value_loss, "policy/entropy": mean(dist.entropy())}
    return fit + penalty + cfg.vf_coef * value_loss, metrics


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B]."""
    state = agents.with_return_stats(agent, state, rollout)
    rows, value_metrics = targets(cfg, agent, agents.with_first_stats(agent, state, rollout), rollout)

    def gradient(learned, batch: Rows, chunk: int):
        temperature = jnp.exp(learned[1]["temperature"])
        batch, kl = weigh(batch, temperature, agent.axis_name)
        found, metrics = mean_gradient(cfg, agent, loss, learned, batch, chunk)
        found[1]["temperature"] = temperature * (cfg.sample_kl - kl)
        return found, metrics | {"policy/temperature": temperature, "policy/sample_kl": kl}

    return learn(cfg, agent, state, rollout, rows, gradient, value_metrics, key)


def mean_gradient(cfg: Any, agent: Agent, loss: Callable[..., Any], learned: PyTree, batch: Any, chunk: int):
    """Returns the mean gradient of `loss` or the user's loss by (params, dual), and metrics.

    Args:
      cfg, agent: arguments of `loss`.
      loss: (cfg, agent, params, dual, rows) -> (mean over rows [N], metrics).
      learned: (params, dual), parameters and logarithms of the multipliers.
      batch: rows of a minibatch.
      chunk: number of rows per gradient computation.
    """

    def over_rows(learned, batch):
        own = lambda params, batch: loss(cfg, agent, params, learned[1], batch)
        return custom_loss.over_rows(agent.loss, own, agent.net)(learned[0], batch)

    return agents.mean_gradient(agent, over_rows, learned, batch, chunk)


def learn(
    cfg: Any,
    agent: Agent,
    state: State,
    rollout: Rollout,
    rows: Any,
    gradient: Callable[..., tuple[Any, Metrics]],
    metrics: Metrics,
    key: Key,
) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on the rows of a rollout, for parameters and multipliers together.

    Args:
      cfg, agent, key: arguments of `update`.
      state: result of `init`, with new statistics.
      rollout: [T, B].
      rows: rows [N] of the rollout.
      gradient: ((params, dual), minibatch, chunk) -> (gradient, metrics).
      metrics: metrics of the rollout, which are returned, too.
    """
    grid = agents.grid(agent, *rollout.reward.shape)  # with a core the rows are sequences
    chunk = agents.chunk(cfg, agent, len(rows.weight) // cfg.num_minibatches, length=rows.weight[0].size)
    lr, dual_lr = (schedules.value(x, state.env_steps) for x in (cfg.lr, cfg.dual_lr))

    def step(carry, batch):
        (params, dual), (opt_state, dual_opt_state) = carry
        slopes, metrics = gradient((params, dual), batch, chunk)
        params, opt_state = agents.descend(cfg, agent, lr, slopes[0], opt_state, params)
        dual, dual_opt_state = agents.descend(cfg, agent, dual_lr, slopes[1], dual_opt_state, dual)
        return ((params, dual), (opt_state, dual_opt_state)), metrics

    start = (state.params, state.own["dual"]), (state.opt_state, state.own["dual_opt_state"])
    learned, found = agents.epochs(cfg, agent, step, start, agents.taker(rows), grid, key)
    (params, dual), (opt_state, dual_opt_state) = learned
    last = jax.tree.map(lambda x: x[-1].mean(), found)  # KL and multipliers are reported after the last pass
    found = jax.tree.map(jnp.mean, found) | {name: last[name] for name in last if "kl" in name or "alpha" in name}
    own = {**state.own, "dual": dual, "dual_opt_state": dual_opt_state}
    state = replace(state, params=params, opt_state=opt_state, own=own, updates=state.updates + 1)
    return agents.observed(agent, state, rollout), UpdateAux(found | metrics | {"train/lr": lr})


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes V-MPO, an on-policy Algo. A user's loss gets Rows [N]. Arguments and errors: see `jrl.algos`."""
    agent = actor_critic.make_agent(cfg, spec, network, **options)
    return actor_critic.make_algo(cfg, agent, update, init=init, record_value=network.shared)
