"""REINFORCE with a baseline (Williams 1992), an algorithm of your own in one file.

python -m jrl.train --algo examples.reinforce --env CartPole-v1 --set rollout.length=32 --stop env_steps=100000
"""

import jax
import jax.numpy as jnp

from jrl.algos import actor_critic, parts
from jrl.algos import agent as agents
from jrl.fields.bounds import NonNegative, NonNegativeSchedule, Positive
from jrl.networks import NetworkConfig
from jrl.ops import returns
from jrl.types import Algo, EnvSpec, Key, Rollout, UpdateAux, hyperparams


@hyperparams
class Config(agents.Common):
    """Hyper-parameters of REINFORCE: each is a key of the section `algo`, beside those that all algorithms have."""

    lr: NonNegativeSchedule = 5e-3
    baseline_coef: NonNegative = 0.5  # weight of the baseline's loss
    max_grad_norm: Positive | None = 0.5


def update(cfg: Config, agent: agents.Agent, state: agents.State, rollout: Rollout, key: Key):
    """One step along the gradient of log pi(action) (G - V), G the return, V the baseline."""
    (value, memory), done = actor_critic.values(agent, state, rollout), rollout.terminated | rollout.truncated
    target = returns.lambda_returns(rollout.reward, rollout.terminated, done, value, gamma=cfg.gamma, lambda_=1.0)
    obs, advantage = agent.observer.see(state.obs_stats, rollout.obs), target - value[:-1]
    rows, metrics = actor_critic.make_rows(obs, rollout, advantage, target, value[:-1], axis_name=agent.axis_name)
    rows = agents.cut(agent, rows, memory)  # steps, or with a memory sequences of them

    def objective(params):
        dist, baseline = agent.net.apply(params, rows.obs)
        policy = -jnp.mean(rows.weight * rows.advantage * dist.log_prob(rows.action))
        error = jnp.mean(rows.weight * (baseline - rows.target) ** 2)
        return policy + cfg.baseline_coef * error, {"loss/policy": policy, "loss/value": error}

    gradient, losses = parts.pmean(jax.grad(objective, has_aux=True)(state.params), agent.axis_name)
    params, opt_state = agents.descend(cfg, agent, cfg.lr, gradient, state.opt_state, state.params)
    state = state.replace(params=params, opt_state=opt_state, updates=state.updates + 1)
    return agents.observed(agent, state, rollout), UpdateAux(metrics | losses)


def make(cfg: Config, spec: EnvSpec, network=NetworkConfig(), *, axis_name=None, loss=None) -> Algo:  # noqa: B008
    """REINFORCE as pure functions."""
    agent = actor_critic.make_agent(cfg, spec, network, axis_name=axis_name, loss=loss)
    return actor_critic.make_algo(cfg, agent, update)


__all__ = ["Config", "make", "update"]
