"""Advantage actor-critic (arXiv:1602.01783), synchronous: PPO's one-pass relative, one gradient step per rollout.

    algo = a2c.make(a2c.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

With gae_lambda 1 the targets are the paper's: every step's return to the end of the rollout, and V of what comes after.
Rollouts are short (5 to 32 steps) and environments many. Nothing corrects for rollouts of an older policy, as they come
with `rollout.mode=async`: IMPALA is A2C with that correction. Gradients and statistics are reduced over
`make(..., axis_name="d")`; float hyper-parameters are leaves of Config and can be vmapped.
"""

import math
from dataclasses import replace
from typing import ClassVar

from jrl.algos import actor_critic, custom_loss, exploration, parts
from jrl.algos.actor_critic import Rows, State
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.bounds import Count, NonNegative, NonNegativeSchedule, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import minibatch, returns, schedules
from jrl.types import Algo, EnvSpec, Key, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config:
    """Hyper-parameters of A2C; a Schedule is a number or `[[env_steps, value], ...]`."""

    uncorrected: ClassVar[bool] = True  # rollouts count as the policy's own, which with rollout.mode async they are not

    lr: NonNegativeSchedule = 1e-3  # Adam's step size
    gamma: Unit = 0.99  # discount per step
    gae_lambda: Unit = 1.0  # of generalised advantage estimation; 1: the return to the end of the rollout
    vf_coef: NonNegative = 0.5  # weight of the value loss
    ent_coef: NonNegativeSchedule = 0.01  # weight of the entropy bonus
    normalize_advantage: bool = False  # to mean 0 and deviation 1 over the rollout's unmasked rows
    normalize_obs: bool = False  # by running mean and deviation; images stay as they are
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    max_grad_norm: Positive | None = 0.5  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-5  # added to Adam's denominator
    exploration: OverDistributions = Stochastic()  # how it acts while it learns

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        return exploration.validate(self.exploration)


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """A2C as pure functions, an on-policy Algo; arguments and errors as of `ppo.make`."""
    agent = actor_critic.agent(cfg, spec, network, axis_name=axis_name, record_value=network.shared)
    custom_loss.check(loss)

    def rows_of(state: State, rollout: Rollout):
        """GAE and weights: what the loss reads [N], and metrics."""
        (value, memory), done = agent.values(state, rollout), rollout.terminated | rollout.truncated
        reward = parts.scaled_reward(cfg, state.return_stats, rollout.reward)
        advantage, target = returns.gae(
            reward, rollout.terminated, done, value, gamma=cfg.gamma, gae_lambda=cfg.gae_lambda
        )
        obs, normalize = agent.recall(state.obs_stats, rollout), cfg.normalize_advantage
        rows, metrics = actor_critic.make_rows(
            obs, rollout, advantage, target, value[:-1], normalize_advantage=normalize, axis_name=axis_name
        )
        return agent.cut(rows, memory), metrics

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
        state = replace(state, return_stats=parts.observe_returns(state.return_stats, rollout, axis_name))
        rows, value_metrics = rows_of(agent.begun(state, rollout), rollout)
        lr, ent_coef = (schedules.value(schedule, state.env_steps) for schedule in (cfg.lr, cfg.ent_coef))

        def own_loss(params, rows: Rows):
            dist, value = agent.net.apply(params, rows.obs)
            log_prob = dist.log_prob(rows.action)
            return actor_critic.policy_gradient(dist, log_prob, value, rows, vf_coef=cfg.vf_coef, ent_coef=ent_coef)

        size = math.prod(agent.grid(*rollout.reward.shape))
        length = rollout.reward.size // size
        chunk = minibatch.chunk_rows(size, agent.row_bytes, cfg.microbatch_size, length=length)
        rows_loss = custom_loss.over_rows(loss, own_loss, agent.net)
        gradient, metrics = minibatch.mean_gradient(rows_loss, state.params, rows, chunk)
        gradient, metrics = parts.pmean((gradient, metrics), axis_name)
        params, opt_state = parts.descend(agent.optimizer, lr, gradient, state.opt_state, state.params)
        state = agent.observe(replace(state, params=params, opt_state=opt_state), rollout)
        return state, UpdateAux(metrics | value_metrics | {"train/lr": lr})

    return agent.algo(update)


__all__ = ["Config", "State", "make"]
