"""REINFORCE with a baseline (Williams 1992), an algorithm of your own in one file.

python -m jrl.train --algo examples.reinforce --env CartPole-v1 --set rollout.length=32 --stop env_steps=100000
"""

import jax
import jax.numpy as jnp

from jrl.algos import actor_critic, parts
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.bounds import NonNegative, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import returns
from jrl.types import Algo, EnvSpec, Key, Rollout, UpdateAux, hyperparams


@hyperparams
class Config:
    """Hyper-parameters of REINFORCE: each is a key of the section `algo`."""

    lr: NonNegative = 5e-3  # Adam's step size
    gamma: Unit = 0.99  # discount per step
    baseline_coef: NonNegative = 0.5  # weight of the baseline's loss
    normalize_obs: bool = False  # by running mean and deviation
    normalize_reward: bool = False  # by the running deviation of the discounted return
    max_grad_norm: Positive | None = 0.5  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # the same for each array of parameters
    max_grad_value: Positive | None = None  # the same for each element
    adam_eps: Positive = 1e-5  # added to Adam's denominator
    exploration: OverDistributions = Stochastic()  # how it acts while it learns


def make(cfg: Config, spec: EnvSpec, network=NetworkConfig(), *, axis_name=None, loss=None) -> Algo:  # noqa: B008
    """REINFORCE as pure functions."""
    agent = actor_critic.agent(cfg, spec, network, axis_name=axis_name)

    def update(state, rollout: Rollout, key: Key):
        """One step along the gradient of log pi(action) (G - V), G the return, V the baseline."""
        (value, memory), done = agent.values(state, rollout), rollout.terminated | rollout.truncated
        target = returns.lambda_returns(rollout.reward, rollout.terminated, done, value, gamma=cfg.gamma, lambda_=1.0)
        obs, advantage = agent.see(state.obs_stats, rollout.obs), target - value[:-1]
        rows, metrics = actor_critic.make_rows(obs, rollout, advantage, target, value[:-1], axis_name=axis_name)
        rows = agent.cut(rows, memory)  # steps, or with a memory sequences of them

        def objective(params):
            dist, baseline = agent.net.apply(params, rows.obs)
            policy = -jnp.mean(rows.weight * rows.advantage * dist.log_prob(rows.action))
            error = jnp.mean(rows.weight * (baseline - rows.target) ** 2)
            return policy + cfg.baseline_coef * error, {"loss/policy": policy, "loss/value": error}

        gradient, losses = parts.pmean(jax.grad(objective, has_aux=True)(state.params), axis_name)
        params, opt_state = parts.descend(agent.optimizer, cfg.lr, gradient, state.opt_state, state.params)
        state = agent.observe(state.replace(params=params, opt_state=opt_state), rollout)
        return state, UpdateAux(metrics | losses)

    return agent.algo(update)
