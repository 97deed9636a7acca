"""DQN (Mnih et al. 2015), an algorithm of your own that learns from replay, in one file.

python -m jrl.train --algo examples.own_dqn --env CartPole-v1 --set network.hidden=[64,64] --stop env_steps=30000
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrl import networks
from jrl.algos import agent as agents
from jrl.algos import critics, parts
from jrl.algos.exploration import EpsilonGreedy, SoftQ
from jrl.fields.bounds import NonNegativeSchedule, Share
from jrl.fields.data import Replay
from jrl.networks import Head, NetworkConfig
from jrl.ops import exploration as ops
from jrl.types import Algo, Batch, Discrete, EnvSpec, InputError, Key, UpdateAux, hyperparams


@hyperparams
class Config(agents.Common):
    """Hyper-parameters of DQN: each is a key of the section `algo`, beside those that all algorithms have."""

    learns_from: ClassVar[type] = Replay  # `update` gets a Batch, and the section `replay` says how it is drawn
    acts_in: ClassVar[Any] = Discrete

    lr: NonNegativeSchedule = 1e-3
    tau: Share = 0.01  # share of the way to the network that the target network moves with each update
    exploration: EpsilonGreedy | SoftQ = EpsilonGreedy()


def build(cfg: Config, observer: Any, network: NetworkConfig) -> networks.Network:
    """Returns the network: a value for each action."""
    if network.recurrent:
        raise InputError("network.core: this example learns from single transitions: leave it out")
    return networks.build(observer.spec, network, {"q": Head(observer.spec.action.n)})


def init(cfg: Config, agent: agents.Agent, key: Key) -> agents.State:
    """Returns the State at the start, with a target network."""
    params = agent.net.init(key)
    return agents.begin(cfg, agent, key, params, target_params=params)


def policy(cfg: Config, agent: agents.Agent, actor: agents.ActorState, obs: Any, memory: Any, explore: bool):
    """Returns the values of all actions [B, A], of which the exploration takes one."""
    (q,), memory = agent.net.step(actor.params, obs, memory)
    return q, memory, {}


def update(cfg: Config, agent: agents.Agent, state: agents.State, batch: Batch, key: Key):
    """Makes one step that brings Q(obs, action) nearer to reward + discount max Q'(next_obs)."""
    batch = critics.read(cfg, agent, state, batch)
    (after,) = agent.net.apply(state.target_params, batch.next_obs)
    best = ops.masked_q(after, agent.observer.mask(batch.next_obs)).max(-1)
    target = batch.reward + batch.discount * best

    def objective(params):
        (q,) = agent.net.apply(params, batch.obs)
        error = jnp.take_along_axis(q, batch.action[:, None], -1)[:, 0] - target
        return jnp.mean(batch.weight * error**2), error

    (loss, error), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
    loss, gradient = parts.pmean((loss, gradient), agent.axis_name)
    params, opt_state = agents.descend(cfg, agent, cfg.lr, gradient, state.opt_state, state.params)
    target_params = parts.moved(state.target_params, params, cfg.tau)
    state = replace(state, params=params, opt_state=opt_state, target_params=target_params, updates=state.updates + 1)
    return state, UpdateAux({"loss/q": loss}, priority=jnp.abs(error))


def outputs(cfg: Config, agent: agents.Agent, state: agents.State, obs: Any) -> dict[str, Any]:
    """Returns what the network says of observations [B, *], for those who look at a policy."""
    return {"q": agent.net.apply(state.params, agent.observer.see(state.obs_stats, obs))[0]}


def make(cfg: Config, spec: EnvSpec, network=NetworkConfig(), *, axis_name=None, loss=None) -> Algo:  # noqa: B008
    """DQN as pure functions."""
    agent = agents.make(cfg, spec, network, build, kind="q", records=agents.Records(), axis_name=axis_name, loss=loss)
    functions = {"init": init, "policy": policy, "update": update, "outputs": outputs}
    # `ingest` takes what a new rollout changes beside replay: the count of steps, statistics of observations
    return agents.algo(cfg, agent, **functions, ingest=agents.ingest, memory=agent.net.carry)


__all__ = ["Config", "make", "update"]
