"""Maximum a posteriori policy optimisation (arXiv:1806.06920): weights of sampled actions, then a regression on them.

    algo = mpo.make(mpo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

Let pi' and Q' be the target networks, Q' the least value of the critics, and a_1 .. a_K samples of pi'(s). For Discrete
actions all actions take the place of samples, each weighted by pi'(a | s).

    critics        y = reward + discount mean_k Q'(next s, a_k)
    E-step         w_k = softmax_k(Q'(s, a_k) / eta); eta minimises eta (sample_kl + mean log mean_k exp(Q' / eta))
    M-step         minimises -mean sum_k w_k log pi(a_k | s) + alpha KL(pi' || pi); alpha grows while KL > its bound

The M-step of a Gaussian has two parts, each with its own KL, bound and alpha: one part moves the mean at the deviation
of pi', the other part moves the deviation at the mean of pi' (section 4.3). eta and alpha are learned as logarithms.

The policy is that of IQL: a Gaussian with mean in [-1, 1], or a Categorical; the network predicts the deviation. With a
core it learns from a SequenceBatch as SAC does. Gradients and metrics are averaged over `make(..., axis_name="d")`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp

from jrl import distributions
from jrl.algos import agent as agents
from jrl.algos import conservative, critics, iql, parts
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.fields.bounds import Count, Few, NonNegativeSchedule, Positive, Share
from jrl.fields.data import Replay
from jrl.networks import NetworkConfig
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


@hyperparams
class Config(Common):
    """Hyper-parameters of MPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Replay
    acts_in: ClassVar[Any] = Discrete | Box
    has_critic: ClassVar[bool] = True

    actor_lr: NonNegativeSchedule | None = None  # step size of the policy; null: lr
    dual_lr: NonNegativeSchedule = 1e-2  # step size of the logarithms of temperature and multipliers
    num_critics: Few = 2  # number of Q networks
    target_update_every: Count = 100  # updates between moves of the target networks
    tau: Share = 1.0  # share of the way to the parameters that the target networks move; 1: a copy
    num_samples: Few = 20  # actions sampled per state; not for Discrete actions
    sample_kl: Positive = 0.1  # bound of the mean KL from the target policy to the weighted samples
    mean_kl: Positive = 2.5e-3  # bound of the mean KL of the policy with a new mean; Discrete: of the policy
    std_kl: Positive = 1e-5  # bound of the mean KL of the policy with a new deviation
    temperature: Positive = 1.0  # initial eta
    mean_alpha: Positive = 10.0  # initial multiplier of the KL of the mean; Discrete: of the policy
    std_alpha: Positive = 100.0  # initial multiplier of the KL of the deviation
    exploration: OverDistributions = Stochastic()


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State, with copies of policy and critics as targets."""
    params = critics.initial_params(agent, key)
    target = {name: params[name] for name in ("actor", "critic")}
    dual = {"temperature": cfg.temperature, "mean": cfg.mean_alpha}
    dual |= {} if isinstance(agent.spec.action, Discrete) else {"std": cfg.std_alpha}
    params["dual"] = {name: jnp.log(jnp.asarray(x, jnp.float32)) for name, x in dual.items()}
    return agents.begin(cfg, agent, key, params, target_params=target, by_part=True)


def evaluate(cfg: Config, agent: Agent, dist: Any, critic_params: PyTree, obs: PyTree, steps: int, key: Key):
    """Returns K actions of `dist` [N], the logarithms of their shares [N, K], and their least values [N, K].

    For Windows results are [N, L, K]. Discrete: all actions, None in place of the actions.
    """
    critic = agent.net.critic
    obs = critics.critics_read(critic, critic_params, obs, steps)
    if isinstance(dist, distributions.Categorical):
        return None, jax.nn.log_softmax(dist.logits), jnp.min(critic.apply(critic_params, obs), 0)
    action = conservative.sampled(dist, cfg.num_samples, key, agent.axis_name).action
    q = jnp.min(critic.apply_each(critic_params, obs, action), 0)
    return action, jnp.full(q.shape, -jnp.log(cfg.num_samples)), q


def steps_of(dist: Any, target: Any) -> dict[str, Any]:
    """Returns the distributions that the M-step moves, by the name of their multiplier."""
    if not isinstance(dist, distributions.DiagGaussian):
        return {"mean": dist}
    return {"mean": replace(target, mean=dist.mean), "std": replace(target, log_std=dist.log_std)}


def kl_penalty(
    cfg: Any, steps: dict[str, Any], target: Any, dual: PyTree, mean: Callable[[Array], Array]
) -> tuple[Array, Metrics]:
    """Returns the KLs from the target policy, weighted by their multipliers, with the multipliers' loss; and metrics.

    Args:
      cfg: Config with the bounds `mean_kl` and `std_kl`.
      steps: result of `steps_of`.
      target: target policy's distributions [N].
      dual: logarithms of the multipliers by name.
      mean: mean over rows [N].
    """
    bounds, loss = {"mean": cfg.mean_kl, "std": cfg.std_kl}, jnp.zeros(())
    metrics: Metrics = {}
    for name, step in steps.items():
        kl, alpha = mean(target.kl(step)), jnp.exp(dual[name])
        loss = loss + jax.lax.stop_gradient(alpha) * kl + alpha * (bounds[name] - jax.lax.stop_gradient(kl))
        metrics |= {f"policy/{name}_kl": kl, f"policy/{name}_alpha": alpha}
    return loss, metrics


def log_prob(dist: Any, action: PyTree | None, axis: int) -> Array:
    """Returns the log-probabilities [N, K] of K actions [N, K, *] of each distribution [N]; None: of all actions.

    `axis` is the axis of the K actions: 1, or 2 for distributions [N, L].
    """
    if action is None:
        return jax.nn.log_softmax(dist.logits)
    return jax.vmap(dist.log_prob, axis, axis)(action)


def temperature_loss(
    cfg: Any, dual: PyTree, share: Array, q: Array, mean: Callable[[Array], Array]
) -> tuple[Array, Array, Metrics]:
    """Returns the temperature's loss (equation 9), the weights of the E-step [N, K], without gradient, and metrics.

    Args:
      cfg: Config with the bound `sample_kl`.
      dual: logarithms of temperature and multipliers.
      share: [N, K] f32, logarithms of the shares of K actions in the target policy.
      q: [N, K] f32, values of these actions.
      mean: mean over rows [N].
    """
    temperature = jnp.exp(dual["temperature"])
    scores = share + q / temperature
    loss = temperature * (cfg.sample_kl + mean(jax.nn.logsumexp(scores, -1)))
    improved = jax.lax.stop_gradient(jax.nn.softmax(scores))
    sample_kl = jnp.sum(improved * (jax.nn.log_softmax(scores) - share), -1)
    return loss, improved, {"policy/temperature": temperature, "policy/sample_kl": mean(sample_kl)}


def regression_loss(
    cfg: Any, dist: Any, target: Any, dual: PyTree, action: PyTree | None, improved: Array, weight: Array
) -> tuple[Array, Metrics]:
    """Returns the M-step's loss with that of the multipliers, the mean over rows [N], and metrics.

    Args:
      cfg: Config with the bounds `mean_kl` and `std_kl`.
      dist: learned policy's distributions [N].
      target: target policy's distributions [N].
      dual: logarithms of the multipliers.
      action: K actions [N, K, *] of each row; None: all actions.
      improved: [N, K] f32, weights of these actions.
      weight: [N] f32, weight of each row.
    """
    mean = lambda x: jnp.mean(weight * x)
    steps = steps_of(dist, target)
    log_probs = (log_prob(step, action, weight.ndim) for step in steps.values())
    fit = -sum(mean(jnp.sum(improved * x, -1)) for x in log_probs)
    penalty, metrics = kl_penalty(cfg, steps, target, dual, mean)
    return penalty + fit, metrics | {"loss/policy": fit, "policy/entropy": mean(dist.entropy())}


def policy_loss(
    cfg: Config, dist: Any, target: Any, dual: PyTree, action: Array | None, share: Array, q: Array, weight: Array
) -> tuple[Array, Metrics]:
    """Returns the loss of policy and multipliers, the mean over rows [N], and metrics (equations 4, 6 and 9).

    Args:
      dist: learned policy's distributions [N].
      target: target policy's distributions [N].
      dual: logarithms of temperature and multipliers.
      action, share, q: results of `evaluate`, without gradient.
      weight: [N] f32, weight of each row.
    """
    loss, improved, metrics = temperature_loss(cfg, dual, share, q, lambda x: jnp.mean(weight * x))
    fit, found = regression_loss(cfg, dist, target, dual, action, improved, weight)
    return loss + fit, metrics | found


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step of critics, policy and multipliers, and moves the targets if they are due."""
    batch = critics.read(cfg, agent, state, batch)
    burn_in, params, target_params = critics.burn_in(batch), state.params, state.target_params
    output = lambda params, obs: distributions.batched(critics.policy_output(agent, params, obs, burn_in))

    def sample(obs, key):
        dist = output(target_params["actor"], obs)
        found = dist, *evaluate(cfg, agent, dist, target_params["critic"], obs, burn_in, key)
        return jax.lax.stop_gradient(found)

    here_key, there_key = jax.random.split(key)
    target, action, share, q = sample(batch.obs, here_key)
    _, _, next_share, next_q = sample(batch.next_obs, there_key)

    def own_loss(learned):
        dist = output(learned["actor"], batch.obs)
        return policy_loss(cfg, dist, target, learned["dual"], action, share, q, batch.weight)

    learned = {name: params[name] for name in ("actor", "dual")}
    policy_gradient, metrics = parts.pmean(jax.grad(own_loss, has_aux=True)(learned), agent.axis_name)
    next_value = critics.select_following(batch, jnp.sum(jnp.exp(next_share) * next_q, -1))
    obs = critics.critics_read(agent.net.critic, params["critic"], batch.obs, burn_in)
    critic_gradient, critic_metrics, priority = critics.td_gradient(
        functools.partial(critics.q_taken, agent),
        params["critic"],
        replace(batch, obs=obs),
        batch.reward + batch.discount * next_value,
        agent.axis_name,
        loss=agent.loss,
        net=agent.net.critic,
    )
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, critic_gradient)
    actor_lr = cfg.lr if cfg.actor_lr is None else cfg.actor_lr
    state = critics.descend(cfg, agent, state, "actor", actor_lr, policy_gradient["actor"])
    state = critics.descend(cfg, agent, state, "dual", cfg.dual_lr, policy_gradient["dual"])
    updates = state.updates + 1
    moved = {name: state.params[name] for name in target_params}
    due: Any = updates % cfg.target_update_every == 0
    state = replace(state, target_params=parts.moved(target_params, moved, cfg.tau, due), updates=updates)
    lr = schedules.value(cfg.lr, state.env_steps)
    return state, UpdateAux(critic_metrics | metrics | {"train/lr": lr}, priority)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes MPO, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    Actions are Discrete or a Box of [-1, 1]. `log_std_init` is added to the policy's output for its log_std. A user's
    loss replaces the critics' loss and gets TdBatch [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = critics.make_agent(
        cfg,
        spec,
        replace(network, state_dependent_std=True),
        iql.policy_network,
        kind="distribution",
        num_critics=cfg.num_critics,
        **options,
    )
    return critics.make_algo(cfg, agent, init=init, update=update, ingest=agents.ingest, outputs=critics.outputs)
