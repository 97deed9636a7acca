"""Asynchronous PPO, or IMPACT (arXiv:1912.00167): PPO's clipped surrogate on V-trace advantages, with a target network.

    algo = appo.make(appo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state = algo.ingest(state, rollout)                         # once for each new rollout [T, B]: counts, statistics
    state, aux = jax.jit(algo.update)(state, rollout, key)      # on any rollout, as often as wanted; of any policy

Three policies meet: the one that acted, however old (its log-probability is `rollout.extras["log_prob"]`); the target,
a copy of the parameters that moves every `target_update_every` updates; and the one that learns. Values, importance
weights of V-trace (target over acting) and the reference of the ratio and of the KL penalty are the target's: they
stand still while a rollout is passed over several times, and acting policies may come and go. Of a rollout that the
target itself made, everything is PPO's. `learner.on_policy` keeps the latest `circular_buffer_num_batches` rollouts.
With memory (`network.core`) the target network runs over the rollout from the memory that acted before its first row,
and the sequences that minibatches are made of begin with the memory that this pass has there.
Gradients and statistics are reduced over `make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, exploration, parts, ppo, sequences
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.bounds import Clip, Count, NonNegative, NonNegativeSchedule, Positive, Share, Unit
from jrl.networks import NetworkConfig
from jrl.types import Algo, Array, EnvSpec, Key, PyTree, Rollout, UpdateAux, Window, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config:
    """Hyper-parameters of APPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    lr: NonNegativeSchedule = 5e-4  # Adam's step size
    gamma: Unit = 0.99  # discount per step
    vtrace_lambda: Unit = 0.95  # decay of the traces, as GAE's lambda
    clip_rho: Clip = 1.0  # bound of the importance weights of TD errors: it decides which policy the value is of
    clip_c: Clip = 1.0  # bound of the importance weights along a trace: it decides how far corrections reach
    clip_pg_rho: Clip = 1.0  # bound of the importance weights of the advantages
    clip_eps: NonNegativeSchedule = 0.2  # the ratio to the target policy is clipped to [1 - clip_eps, 1 + clip_eps]
    clip_target_ratio: Clip = 2.0  # bound of acting / target policy in that ratio
    target_update_every: Count = 1  # updates between moves of the target network
    tau: Share = 1.0  # share of the way to the parameters that it moves; 1: a copy
    circular_buffer_num_batches: Count = 1  # the latest rollouts that are kept
    circular_buffer_iterations_per_batch: Count = 1  # updates per new rollout, each on one of those kept
    num_epochs: Count = 4  # passes over a rollout in an update
    num_minibatches: Count = 4  # gradient steps per pass
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    vf_coef: NonNegative = 0.5  # weight of the value loss
    value_clip_eps: Positive | None = None  # clips the value's move from the target network's; null: no clipping
    ent_coef: NonNegativeSchedule = 0.0  # weight of the entropy bonus
    # weight of a penalty on the KL from the target policy (at the start, if kl_target is set)
    kl_coef: NonNegative = 0.0
    # adapts the weight: x 1.5 above twice this KL, x 0.5 below half of it, to a thousandth and a thousand times at most
    kl_target: Positive | None = None
    # no more gradient steps in an update once the KL from the target policy exceeds it
    target_kl: Positive | None = None
    normalize_advantage: bool = True  # to mean 0 and deviation 1 over the rollout's unmasked rows
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    normalize_obs: bool = False  # by running mean and deviation; images stay as they are
    max_grad_norm: Positive | None = 0.5  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-5  # added to Adam's denominator
    exploration: OverDistributions = Stochastic()  # how it acts while it learns

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        moving = self.target_update_every > 1 or self.tau < 1
        return ppo.kl_faults(self, moving=moving) + exploration.validate(self.exploration)


@struct.dataclass
class State(ppo.State):
    target_params: PyTree
    updates: Array  # [] u32


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """APPO as pure functions; arguments and errors as of `ppo.make`.

    Returns:
      An on-policy Algo, whose rollouts may be of older policies. `ingest` takes the statistics from a new rollout.
    """
    agent = actor_critic.agent(cfg, spec, network, axis_name=axis_name)
    improve = ppo.clipped_steps(cfg, agent, axis_name=axis_name, loss=loss)
    penalise_kl = ppo.penalises_kl(cfg)

    def init(key: Key) -> State:
        base = agent.init(key)
        return State(
            **vars(base),
            kl_coef=jnp.asarray(cfg.kl_coef, jnp.float32),
            target_params=jax.tree.map(jnp.copy, base.params),  # arrays of its own, so that both can be donated
            updates=jnp.zeros((), jnp.uint32),
        )

    def of_target(state: State, obs, last_obs, action, rollout: Rollout):
        """By the target network: log-probabilities, values and distributions [T, B] (() without a KL penalty), a
        function that gives V(last_obs) [B], and the memory before each sequence."""

        def row(row):
            dist, value = agent.net.apply(state.target_params, row[0])
            return dist.log_prob(row[1]), value, distributions.batched(dist) if penalise_kl else ()

        if not network.recurrent:
            return *agent.map_rows(row, (obs, action)), lambda: agent.net.value(state.target_params, last_obs), ()
        values, memory = agent.values(replace(state, params=state.target_params), rollout)
        num_sequences, num_envs = agent.grid(*rollout.reward.shape)
        length = len(rollout.reward) // num_sequences
        obs, action, reset = jax.tree.map(lambda x: sequences.split(x, length), (obs, action, ~rollout.mask))
        log_prob, _, dist = row((Window(obs, sequences.flat(memory), reset), action))
        by_time = lambda x: jnp.swapaxes(x.reshape(num_sequences, num_envs, *x.shape[1:]), 1, 2)
        log_prob, dist = jax.tree.map(lambda x: by_time(x).reshape(-1, num_envs, *x.shape[2:]), (log_prob, dist))
        return log_prob, values[:-1], dist, lambda: values[-1], memory

    def rows_of(state: State, rollout: Rollout):
        """V-trace by the target network, and weights: Rows [T, B], the memory before each sequence, and metrics."""
        obs = agent.recall(state.obs_stats, rollout)
        last_obs = agent.see(state.obs_stats, rollout.last_obs)
        action, acting_log_prob = parts.cleared(rollout.mask, (rollout.action, rollout.extras["log_prob"]))
        log_prob, value, dist, last_value, memory = of_target(state, obs, last_obs, action, rollout)
        log_prob = jnp.where(rollout.mask, log_prob, 0.0)
        trace = actor_critic.vtrace(
            cfg,
            parts.scaled_reward(cfg, state.return_stats, rollout.reward),
            rollout.terminated,
            rollout.terminated | rollout.truncated,
            jnp.concatenate([value, last_value()[None]]),
            log_prob - acting_log_prob,
        )
        rows, metrics = actor_critic.make_rows(
            obs, rollout, *trace, value, normalize_advantage=cfg.normalize_advantage, axis_name=axis_name
        )
        metrics["policy/rho"] = parts.pmean(
            jnp.mean(rows.weight * jnp.minimum(jnp.exp(log_prob - acting_log_prob), cfg.clip_rho)), axis_name
        )
        # pi / target with acting / target bounded is pi / max(target, acting / bound) (section 3.1)
        reference = jnp.maximum(log_prob, acting_log_prob - jnp.log(cfg.clip_target_ratio))
        old_value = value if cfg.value_clip_eps is not None else ()
        kl_log_prob = log_prob if cfg.target_kl is not None else ()
        rows = ppo.Rows(**vars(rows), log_prob=reference, value=old_value, dist=dist, kl_log_prob=kl_log_prob)
        return rows, memory, metrics

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
        rows, memory, value_metrics = rows_of(state, rollout)
        state, metrics = improve(state, rows, memory, key)
        updates = state.updates + 1
        due = updates % cfg.target_update_every == 0
        # weights of 0 and 1, not old + tau (new - old): with tau 1 the target is the parameters, bit for bit
        move = lambda old, new: jnp.where(due, (1.0 - cfg.tau) * old + cfg.tau * new, old)
        target_params = jax.tree.map(move, state.target_params, state.params)
        state = replace(state, target_params=target_params, updates=updates)
        return state, UpdateAux(metrics | value_metrics)

    def ingest(state: State, rollout: Rollout) -> State:
        return_stats = parts.observe_returns(state.return_stats, rollout, axis_name)
        return agent.observe(replace(state, return_stats=return_stats), rollout)

    return agent.algo(
        update,
        init=init,
        ingest=ingest,
        rollouts_kept=cfg.circular_buffer_num_batches,
        updates_per_rollout=cfg.circular_buffer_iterations_per_batch,
    )


__all__ = ["Config", "State", "make"]
