"""Asynchronous PPO, or IMPACT (arXiv:1912.00167): PPO's clipped surrogate on V-trace advantages, with a target network.

    algo = appo.make(appo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state = algo.ingest(state, rollout)                         # once per new rollout [T, B]: counts, statistics
    state, aux = jax.jit(algo.update)(state, rollout, key)      # on any rollout of any policy, any number of times

There are three policies: the acting policy, of any age, with log-probability `rollout.extras["log_prob"]`; the target
policy, a copy of the parameters that moves every `target_update_every` updates; and the learned policy. The target
network provides values, importance weights of V-trace (target over acting), and the reference of the ratio and of the
KL penalty. It is constant over several passes over a rollout. For a rollout of the target policy itself the update is
PPO's. `learner.on_policy` stores the latest `circular_buffer_num_batches` rollouts. With a core the target network
runs over the rollout from the acting state before its first row; sequences of minibatches begin with its states.
Gradients and statistics are averaged over `make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp

from jrl import distributions
from jrl.algos import actor_critic, parts, ppo, sequences
from jrl.algos import agent as agents
from jrl.algos.agent import Agent, MakeOptions, State
from jrl.fields.bounds import Clip, Count, NonNegativeSchedule, Share, Unit
from jrl.fields.data import Fresh
from jrl.networks import NetworkConfig
from jrl.types import Algo, Array, EnvSpec, Key, Metrics, PyTree, Rollout, UpdateAux, Window, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config(ppo.ClippedSteps):
    """Hyper-parameters of APPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    corrects: ClassVar[bool] = True  # V-trace weighs each step by how likely the present policy is to take it

    lr: NonNegativeSchedule = 5e-4
    vtrace_lambda: Unit = 0.95  # decay of the traces, as GAE's lambda
    clip_rho: Clip = 1.0  # bound of the importance weights of TD errors: it decides which policy the value is of
    clip_c: Clip = 1.0  # bound of the importance weights along a trace: it decides how far corrections reach
    clip_pg_rho: Clip = 1.0  # bound of the importance weights of the advantages
    clip_target_ratio: Clip = 2.0  # bound of acting / target policy in the ratio to the target policy
    target_update_every: Count = 1  # updates between moves of the target network
    tau: Share = 1.0  # share of the way to the parameters that it moves; 1: a copy
    circular_buffer_num_batches: Count = 1  # the latest rollouts that are kept
    circular_buffer_iterations_per_batch: Count = 1  # updates per new rollout, each on one of those kept

    def kl_faults(self, *, moving: bool = False) -> list[str]:
        """Returns PPO's faults; a target network that moves rarely is a policy that is older than the update."""
        return super().kl_faults(moving=moving or self.target_update_every > 1 or self.tau < 1)


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns PPO's initial State with a target network."""
    state = ppo.init(cfg, agent, key)
    return replace(state, target_params=jax.tree.map(jnp.copy, state.params))


def evaluate_target(
    cfg: Config, agent: Agent, state: State, obs: PyTree, last_obs: PyTree, action: PyTree, rollout: Rollout
) -> tuple[Array, Array, PyTree, Callable[[], Array], PyTree]:
    """Returns the target network's outputs for a rollout.

    Returns:
      Log-probabilities, values and distributions [T, B] (() without a KL penalty), a function that gives V(last_obs)
      [B], and the memory before each sequence.
    """

    def row(row):
        dist, value = agent.net.apply(state.target_params, row[0])
        return dist.log_prob(row[1]), value, distributions.batched(dist) if cfg.kl_coef is not None else ()

    if not agent.network.recurrent:
        last_value = lambda: agent.net.value(state.target_params, last_obs)
        return *agents.map_rows(agent, row, (obs, action)), last_value, ()
    values, memory = actor_critic.values(agent, replace(state, params=state.target_params), rollout)
    num_sequences, num_envs = agents.grid(agent, *rollout.reward.shape)
    length = len(rollout.reward) // num_sequences
    obs, action, reset = jax.tree.map(lambda x: sequences.split(x, length), (obs, action, ~rollout.mask))
    log_prob, _, dist = row((Window(obs, sequences.flat(memory), reset), action))
    by_time = lambda x: jnp.swapaxes(x.reshape(num_sequences, num_envs, *x.shape[1:]), 1, 2)
    log_prob, dist = jax.tree.map(lambda x: by_time(x).reshape(-1, num_envs, *x.shape[2:]), (log_prob, dist))
    return log_prob, values[:-1], dist, lambda: values[-1], memory


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[ppo.Rows, PyTree, Metrics]:
    """Returns Rows [T, B] with the target network's V-trace, the memory before each sequence, and metrics."""
    observer = agent.observer
    obs, last_obs = observer.recall(state.obs_stats, rollout), observer.see(state.obs_stats, rollout.last_obs)
    action, acting_log_prob = parts.zero_masked(rollout.mask, (rollout.action, rollout.extras["log_prob"]))
    log_prob, value, dist, last_value, memory = evaluate_target(cfg, agent, state, obs, last_obs, action, rollout)
    log_prob = jnp.where(rollout.mask, log_prob, 0.0)
    trace = actor_critic.vtrace(
        cfg,
        parts.scale_reward(cfg, state.return_stats, rollout.reward),
        rollout.terminated,
        rollout.terminated | rollout.truncated,
        jnp.concatenate([value, last_value()[None]]),
        log_prob - acting_log_prob,
    )
    rows, metrics = actor_critic.make_rows(
        obs,
        rollout,
        *trace,
        value,
        normalize_advantage=bool(cfg.normalize_advantage),
        choice=actor_critic.choice(agent, obs),
        axis_name=agent.axis_name,
    )
    rho = jnp.mean(rows.weight * jnp.minimum(jnp.exp(log_prob - acting_log_prob), cfg.clip_rho))
    metrics["policy/rho"] = parts.pmean(rho, agent.axis_name)
    # pi / target with acting / target bounded is pi / max(target, acting / bound) (section 3.1)
    reference = jnp.maximum(log_prob, acting_log_prob - jnp.log(cfg.clip_target_ratio))
    old_value = value if cfg.value_clip_eps is not None else ()
    kl_log_prob = log_prob if cfg.target_kl is not None else ()
    rows = ppo.Rows(**vars(rows), log_prob=reference, value=old_value, dist=dist, kl_log_prob=kl_log_prob)
    return rows, memory, metrics


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes PPO's gradient steps on a rollout [T, B], then moves the target network if it is due."""
    rows, memory, value_metrics = targets(cfg, agent, state, rollout)
    state, metrics = ppo.improve(cfg, agent, state, rows, memory, key)
    due: Any = state.updates % cfg.target_update_every == 0
    state = replace(state, target_params=parts.moved(state.target_params, state.params, cfg.tau, due))
    return state, UpdateAux(metrics | value_metrics)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes APPO, an on-policy Algo whose rollouts may be of older policies. Arguments and errors: see `jrl.algos`.

    `ingest` adds the statistics of a new rollout. A user's loss gets Rows [N].
    """
    ppo.check_policy_after(cfg, network)
    agent = actor_critic.make_agent(cfg, spec, network, **options)
    return actor_critic.make_algo(
        cfg,
        agent,
        update,
        init=init,
        ingest=agents.ingest,
        data=Fresh(cfg.circular_buffer_num_batches, cfg.circular_buffer_iterations_per_batch),
    )
