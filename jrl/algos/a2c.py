"""Advantage actor-critic (arXiv:1602.01783), synchronous: one gradient step per rollout.

    algo = a2c.make(a2c.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

With gae_lambda 1 the targets are those of the paper: the return to the end of the rollout plus the value after it.
Without critic (`use_critic: false`) it is REINFORCE (Williams, 1992) with the return to the end of the episode or of
the rollout, and no baseline: rollouts must be longer than episodes, or whole episodes (`rollout.batch_mode`).

Rollouts are short (5 to 32 steps) and environments many. Rollouts of an older policy, as with `rollout.mode=async`, are
not corrected: use IMPALA. Gradients and statistics are averaged over `make(..., axis_name="d")`; float
hyper-parameters are leaves of Config and can be vmapped.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, Unpack

from jrl.algos import actor_critic, custom_loss
from jrl.algos import agent as agents
from jrl.algos import curiosity as curiosities
from jrl.algos.actor_critic import Rows
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.curiosity import Icm, Rnd
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.fields.bounds import Count, NonNegative, NonNegativeSchedule, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import schedules
from jrl.types import Algo, Array, EnvSpec, Key, Metrics, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config(Common):
    """Hyper-parameters of A2C; a Schedule is a number or `[[env_steps, value], ...]`."""

    uncorrected: ClassVar[bool] = True  # rollouts of an older policy (rollout.mode async) are treated as on-policy
    has_critic: ClassVar[bool] = True

    lr: NonNegativeSchedule = 1e-3
    gae_lambda: Unit = 1.0  # lambda of generalised advantage estimation; 1: the return to the end of the rollout
    use_critic: bool = True  # false: the advantage is the return to the rollout's end, and no value is learned
    vf_coef: NonNegative = 0.5  # weight of the value loss
    ent_coef: NonNegativeSchedule = 0.01  # weight of the entropy bonus
    normalize_advantage: bool = False  # to mean 0 and deviation 1 over the rollout's unmasked rows
    microbatch_size: Count | None = None  # rows whose gradient is computed at once; null: chosen for the device
    max_grad_norm: Positive | None = 0.5
    adam_eps: Positive = 1e-5
    exploration: OverDistributions = Stochastic()
    curiosity: Rnd | Icm | None = None  # intrinsic rewards for exploration; null: none

    def validate(self) -> list[str]:
        faults = []
        if not self.use_critic and self.gae_lambda != 1:
            faults.append("gae_lambda weighs values of a critic, and use_critic is false: set gae_lambda to 1")
        if not self.use_critic and self.curiosity is not None:
            faults.append("curiosity has a value of its own, and use_critic is false: leave one of them out")
        return faults + super().validate()


def loss(cfg: Config, agent: Agent, params: PyTree, rows: Rows, *, ent_coef: Any) -> tuple[Array, Metrics]:
    """Returns -log pi(action) A + vf_coef (V - target)^2 / 2 - ent_coef entropy, the mean over Rows [N]."""
    dist, value = agent.net.apply(params, rows.obs)
    log_prob = dist.log_prob(rows.action)
    vf_coef = cfg.vf_coef if cfg.use_critic else 0.0
    return actor_critic.policy_gradient(dist, log_prob, value, rows, vf_coef=vf_coef, ent_coef=ent_coef)


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step on a rollout [T, B]; only curiosity uses random numbers."""
    before = state = agents.with_return_stats(agent, state, rollout)
    state, intrinsic, novelty = curiosities.explore(cfg, agent, state, rollout, key)
    first = agents.with_first_stats(agent, state, rollout)
    rows, _, memory, value_metrics = actor_critic.gae_rows(
        cfg, agent, first, rollout, intrinsic, use_critic=cfg.use_critic
    )
    rows = agents.cut(agent, rows, memory)
    lr, ent_coef = (schedules.value(schedule, state.env_steps) for schedule in (cfg.lr, cfg.ent_coef))
    own = functools.partial(loss, cfg, agent, ent_coef=ent_coef)
    rows_loss = custom_loss.over_rows(agent.loss, own, agent.net)
    num_rows = len(rows.weight)
    chunk = agents.chunk(cfg, agent, num_rows, length=rollout.reward.size // num_rows)
    gradient, metrics = agents.mean_gradient(agent, rows_loss, state.params, rows, chunk)
    params, opt_state = agents.descend(cfg, agent, lr, gradient, state.opt_state, state.params)
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    state = curiosities.without_learning(cfg, agent, before, state)
    return agents.observed(agent, state, rollout), UpdateAux(metrics | value_metrics | novelty | {"train/lr": lr})


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes A2C, an on-policy Algo. A user's loss gets Rows [N]. Arguments and errors: see `jrl.algos`."""
    agent = actor_critic.make_agent(cfg, spec, network, **options)
    return actor_critic.make_algo(cfg, agent, update, record_value=network.shared)
