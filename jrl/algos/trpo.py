"""Trust region policy optimisation (arXiv:1502.05477), with generalised advantage estimation (arXiv:1506.02438).

    algo = trpo.make(trpo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

One policy step per rollout. With g the gradient of the surrogate loss L, F the Fisher matrix and delta `target_kl`:

    x = (F + cg_damping I)^-1 g                     conjugate gradient; F v is a derivative of the gradient of the KL
    step = sqrt(2 delta / x' (F + cg_damping I) x) x
    policy - line_search_shrink^k step              the first k with KL <= delta and a lower L; else no step

The optimizer (`lr`, `optimizer`) fits the value alone, in epochs of minibatches. Rollouts are long: 1,000 steps or more
over all environments. Gradients, KL and losses are averaged over `make(..., axis_name="d")`; float hyper-parameters are
leaves of Config and can be vmapped.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, parts
from jrl.algos import agent as agents
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.fields.bounds import Count, NonNegative, NonNegativeSchedule, Positive, Share, Unit
from jrl.networks import NetworkConfig
from jrl.ops import losses, minibatch, schedules
from jrl.types import Algo, Array, EnvSpec, InputError, Key, Metrics, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()
_CG_RESIDUAL = 1e-5  # norm of the residual at which the conjugate gradient stops


@hyperparams
class Config(Common):
    """Hyper-parameters of TRPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_critic: ClassVar[bool] = True

    lr: NonNegativeSchedule = 1e-3  # step size of the value
    gae_lambda: Unit = 0.95  # lambda of generalised advantage estimation
    target_kl: Positive = 0.01  # bound of the mean KL from the policy before the update
    cg_steps: Count = 15  # steps of the conjugate gradient at most
    cg_damping: NonNegative = 0.1  # added to the diagonal of the Fisher matrix
    line_search_steps: Count = 10  # step sizes that the line search compares
    line_search_shrink: Share = 0.8  # factor from one step size to the next
    num_epochs: Count = 10  # passes over a rollout that fit the value
    num_minibatches: Count = 4  # gradient steps per pass
    normalize_advantage: bool = True  # to mean 0 and deviation 1 over the rollout's unmasked rows
    adam_eps: Positive = 1e-5
    exploration: OverDistributions = Stochastic()


@struct.dataclass
class Rows(actor_critic.Rows):
    log_prob: Array  # f32, of the acting policy
    dist: PyTree  # distribution of the policy before the update


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, Metrics]:
    """Returns Rows [N] with GAE and the distribution before the update, and metrics."""
    rows, _, memory, metrics = actor_critic.gae_rows(cfg, agent, state, rollout)
    rows = Rows(**vars(rows), log_prob=parts.zero_masked(rollout.mask, rollout.extras["log_prob"]), dist=())
    rows = agents.cut(agent, rows, memory)
    before = lambda rows: distributions.batched(agent.net.apply(state.params, rows.obs)[0])
    return replace(rows, dist=minibatch.map_rows(before, rows, _chunk(cfg, agent, rows))), metrics


def compare(agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Array, Array]:
    """Returns the surrogate loss -ratio A, the KL from the policy before the update, and the entropy, each as Rows."""
    dist, _ = agent.net.apply(params, rows.obs)
    # masked rows get ratio 1 before exp: weight 0 would not remove an overflow
    log_prob = jnp.where(rows.weight > 0, dist.log_prob(rows.action), rows.log_prob)
    return losses.surrogate(log_prob, rows.log_prob, rows.advantage), rows.dist.kl(dist), dist.entropy()


def policy_loss(agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean surrogate loss over Rows [N] (equation 14), and metrics."""
    surrogate, _, entropy = compare(agent, params, rows)
    loss = jnp.mean(rows.weight * surrogate)
    return loss, {"loss/policy": loss, "policy/entropy": jnp.mean(rows.weight * entropy)}


def mean_kl(agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean KL over Rows [N] from the policy before the update."""
    return jnp.mean(rows.weight * compare(agent, params, rows)[1]), {}


def value_loss(agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean over Rows [N] of (V - target)^2 / 2."""
    loss = jnp.mean(rows.weight * 0.5 * (agent.net.value(params, rows.obs) - rows.target) ** 2)
    return loss, {"loss/value": loss}


def full_step(cfg: Config, agent: Agent, params: PyTree, rows: Rows, gradient: PyTree) -> PyTree:
    """Returns the natural gradient, scaled so that the quadratic model of the KL is `target_kl` (appendix C)."""
    chunk, kl = _chunk(cfg, agent, rows), functools.partial(mean_kl, agent)
    # reverse mode, because the recurrent cores have their own derivative and no forward mode
    _, local = jax.vjp(lambda params: minibatch.mean_gradient(kl, params, rows, chunk)[0], params)
    fisher = lambda v: parts.pmean(local(v)[0], agent.axis_name)
    damped = lambda v: jax.tree.map(lambda f, x: f + cfg.cg_damping * x, fisher(v), v)
    x, _ = jax.scipy.sparse.linalg.cg(damped, gradient, tol=0.0, atol=_CG_RESIDUAL, maxiter=cfg.cg_steps)
    curvature = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, x, damped(x))))
    scale = jnp.sqrt(2.0 * cfg.target_kl / jnp.maximum(curvature, 1e-12))
    return jax.tree.map(lambda x: scale * x, x)


def line_search(
    cfg: Config, agent: Agent, params: PyTree, rows: Rows, step: PyTree, loss: Array
) -> tuple[PyTree, Metrics]:
    """Returns the parameters after the longest step that lowers `loss` within `target_kl`, else the same parameters.

    The candidates are independent of each other, so that one reduction over devices is enough.
    """
    sizes = cfg.line_search_shrink ** jnp.arange(cfg.line_search_steps, dtype=jnp.float32)
    moved = lambda size: jax.tree.map(lambda x, s: x - size * s, params, step)

    def measure(size: Array) -> tuple[Array, Array]:
        compared = functools.partial(compare, agent, moved(size))
        surrogate, kl, _ = minibatch.map_rows(compared, rows, _chunk(cfg, agent, rows))
        return jnp.mean(rows.weight * surrogate), jnp.mean(rows.weight * kl)

    surrogate, kl = parts.pmean(jax.lax.map(measure, sizes), agent.axis_name)
    accepted = (kl <= cfg.target_kl) & (surrogate < loss)
    first, success = jnp.argmax(accepted), jnp.any(accepted)
    metrics = {
        "policy/kl": jnp.where(success, kl[first], 0.0),
        "policy/line_search_steps": jnp.where(success, first + 1, cfg.line_search_steps).astype(jnp.float32),
        "policy/line_search_success": success.astype(jnp.float32),
    }
    return jax.tree.map(lambda old, new: jnp.where(success, new, old), params, moved(sizes[first])), metrics


def fit_value(cfg: Config, agent: Agent, lr: Any, state: State, rows: Rows, grid: tuple[int, int], key: Key):
    """Returns (params, opt_state, metrics) after the epochs of minibatches of the value loss."""
    chunk = _chunk(cfg, agent, rows, minibatches=cfg.num_minibatches)

    def step(carry, batch: Rows):
        params, opt_state = carry
        gradient, metrics = agents.mean_gradient(agent, functools.partial(value_loss, agent), params, batch, chunk)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), metrics

    take = agents.taker(rows)
    (params, opt_state), metrics = agents.epochs(cfg, agent, step, (state.params, state.opt_state), take, grid, key)
    return params, opt_state, jax.tree.map(jnp.mean, metrics)


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes one step of the policy, and fits the value, on a rollout [T, B]."""
    state = agents.with_return_stats(agent, state, rollout)
    rows, value_metrics = targets(cfg, agent, agents.with_first_stats(agent, state, rollout), rollout)
    lr = schedules.value(cfg.lr, state.env_steps)
    chunk = _chunk(cfg, agent, rows)
    gradient, metrics = agents.mean_gradient(agent, functools.partial(policy_loss, agent), state.params, rows, chunk)
    step = full_step(cfg, agent, state.params, rows, gradient)
    policy, search_metrics = line_search(cfg, agent, state.params, rows, step, metrics["loss/policy"])
    grid = agents.grid(agent, *rollout.reward.shape)
    value, opt_state, fit_metrics = fit_value(cfg, agent, lr, state, rows, grid, key)
    # the optimizer's weight decay would move the policy, too
    params = {name: (value if name.startswith("value_") else policy)[name] for name in policy}
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    metrics = metrics | search_metrics | fit_metrics | value_metrics | {"train/lr": lr}
    return agents.observed(agent, state, rollout), UpdateAux(metrics)


def _chunk(cfg: Config, agent: Agent, rows: Rows, minibatches: int = 1) -> int:
    """Returns the rows of a chunk of one of `minibatches`."""
    return agents.chunk(cfg, agent, len(rows.weight) // minibatches, length=rows.weight[0].size)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes TRPO, an on-policy Algo. Arguments and errors: see `jrl.algos`.

    Raises:
      InputError: a shared torso, a user's loss, or gradients apart from the update.
    """
    if network.shared:
        raise InputError(
            "network.shared: trpo needs separate torsos, or fitting the value would move the policy: set it to false"
        )
    if options.get("loss") is not None:
        raise InputError("custom.loss: trpo's line search compares its own loss: use ppo or a2c, or leave it out")
    if agents.replacement.get() is not None:
        raise InputError("gradients: trpo steps by a line search, not by a gradient: use learn_on_batch")
    agent = actor_critic.make_agent(cfg, spec, network, **options)
    return actor_critic.make_algo(cfg, agent, update)
