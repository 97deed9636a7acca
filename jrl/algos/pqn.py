"""Parallelised Q-network: Q-learning from rollouts, without replay and without target network (arXiv:2407.04811).

    algo = pqn.make(pqn.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B], out.extras: value
    state, aux = jax.jit(algo.update)(state, rollout, key)                 # rollout: jrl.types.Rollout [T, B]

Layer norm makes Q-learning stable here (`network.norm: layer`, on in DEFAULT_NETWORK); without it, it may diverge. The
targets are Peng's Q(lambda): lambda-returns with the values max_a Q from acting. The optimizer is Adam; the paper's
RAdam was not better on CartPole. Gradients and statistics are reduced over `make(..., axis_name="d")`; float
hyper-parameters are leaves of Config and can be vmapped.

With an action mask, max_a is over the allowed actions, and only allowed actions are taken. With memory (`network.core`)
minibatches consist of sequences of `network.max_seq_len` steps, which start from the acting memory.

With a `mixer` it acts for a team (`jrl.envs.team`): PQN-VDN (`mixer: sum`) or PQN-QMIX. Then Q is the mixer's value of
the agents' Q values (`jrl.algos.teams`), and targets take each agent's best action.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks as nets
from jrl import spaces
from jrl.algos import agent as agents
from jrl.algos import custom_loss, parameter_noise, parts, sequences, teams
from jrl.algos import observer as observers
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.exploration import EpsilonGreedy, OverQ
from jrl.algos.observer import Observer
from jrl.fields.bounds import Count, NonNegativeSchedule, Positive, Unit
from jrl.networks import Head, Network, NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import losses, returns, schedules
from jrl.types import (
    Algo,
    Array,
    Discrete,
    EnvSpec,
    InputError,
    Key,
    Metrics,
    MultiDiscrete,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(128, 128), activation="relu", norm="layer")


@hyperparams
class Config(teams.Mixing, Common):
    """Hyper-parameters of PQN; a Schedule is a number or `[[env_steps, value], ...]`."""

    acts_in: ClassVar[Any] = Discrete
    uncorrected: ClassVar[bool] = True  # treats rollouts of older policies (rollout.mode async) as the present policy's

    lr: NonNegativeSchedule = 5e-4
    q_lambda: Unit = 0.65  # decay of the lambda-returns; 0: one-step Q-learning, 1: the return of the whole rollout
    num_epochs: Count = 2  # passes over each rollout
    num_minibatches: Count = 4  # gradient steps per pass
    loss: Literal["mse", "huber"] = "mse"  # half the squared error, or huber
    exploration: OverQ = EpsilonGreedy(epsilon=((0, 1.0), (100_000, 0.05)))
    max_grad_norm: Positive | None = 10.0
    # function of a team's Q values: their sum (VDN), or QMIX's network; none: a single agent
    mixer: Literal["none", "sum", "qmix"] = "none"

    @property
    def action_kinds(self) -> Any:
        """Returns the types of the supported action spaces, given the options."""
        return self.acts_in if self.mixer == "none" else MultiDiscrete

    def reading(self, agent: Agent) -> "Reading":
        """Returns the Reading of the network's heads, for one agent or a team."""
        if self.mixer == "none":
            return Reading(lambda heads: heads[0], lambda heads, mask: best(heads[0], mask), taken)

        def best_value(heads: Any, mask: Array | None) -> Array:
            outputs = teams.concatenate_heads(heads)
            return teams.taken(self, agent, outputs, teams.best(agent, outputs, mask))

        return Reading(
            lambda heads: teams.by_agent(agent, teams.concatenate_heads(heads)),
            best_value,
            lambda heads, action: teams.taken(self, agent, teams.concatenate_heads(heads), action),
        )


class Reading(NamedTuple):
    """Functions that interpret a network's heads for observations [..., *]: actions of one agent, or of a team."""

    q: Callable[[Any], Array]  # heads -> Q values for acting [..., A]; for a team [..., agents, A]
    best: Callable[[Any, Array | None], Array]  # (heads, mask) -> value of the best allowed action [...]
    taken: Callable[[Any, Array], Array]  # (heads, actions) -> value of the actions [...]


@struct.dataclass
class Rows:
    """One row per environment step for the loss: N rows, or with a core sequences [N, L]."""

    obs: PyTree  # normalised; a Window for sequences
    action: Array  # [N] i32, for a team [N, agents]
    target: Array  # [N] f32
    weight: Array  # [N] f32, 0 on masked rows, 1 on average


def networks(cfg: Config, observer: Observer, network: NetworkConfig) -> Network:
    """Returns a network with the head `q` [A]; for a team see `teams.networks`."""
    if cfg.mixer != "none":
        return teams.networks(cfg, observer, network)
    assert isinstance(observer.spec.action, Discrete)
    return nets.build(observer.spec, network, {"q": Head(observer.spec.action.n)})


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State."""
    return agents.begin(cfg, agent, key, agent.net.init(key))


def heads_of(agent: Agent, params: PyTree, obs: PyTree) -> Any:
    """Returns the network's heads for normalised observations [..., *]; see Reading."""
    return agent.net.apply(params, obs, "q")


def q_values(cfg: Config, agent: Agent, params: PyTree, obs: PyTree) -> Array:
    """Returns Q values [..., A] of normalised observations [..., *]; for a team [..., agents, A]."""
    return cfg.reading(agent).q(heads_of(agent, params, obs))


def best(q: Array, mask: Array | None) -> Array:
    """Returns max_a Q over the allowed actions [...]."""
    return jnp.max(ops.masked_q(q, mask), -1)


def taken(heads: Any, action: Array) -> Array:
    """Returns Q [...] of actions [...] of one agent."""
    (q,) = heads
    # a comparison instead of an index: its gradient is a select, that of an index a scatter
    chosen = jax.lax.broadcasted_iota(jnp.int32, q.shape, q.ndim - 1) == action[..., None]
    return jnp.sum(jnp.where(chosen, q, 0.0), -1)


def policy(cfg: Config, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool):
    """Returns Q values [B, A], for a team [B, agents, A], the memory, and extras with max_a Q."""
    heads, memory = agent.net.step(actor.params, obs, memory, "q")
    reading = cfg.reading(agent)
    # values of the learned parameters, even if perturbed parameters act
    value = reading.best(heads, agent.observer.mask(obs))
    if explore and actor.noisy != ():
        heads = heads_of(agent, actor.noisy, obs)
    return reading.q(heads), memory, {"value": value}


def memories(agent: Agent, state: State, obs: PyTree, rollout: Rollout) -> tuple[PyTree, PyTree]:
    """Returns the recurrent states before each sequence of the rollout and after it; () without a core."""
    if not agent.network.recurrent:
        return (), ()
    length = sequences.length_of(agent.network, rollout.reward.shape[0])
    unroll = lambda window: ((), agent.net.unroll(state.params, window, "q")[1])
    _, starts, after = sequences.along(unroll, obs, rollout.mask, agents.split_carry(rollout.carry)[0], length)
    return starts, after


def values(cfg: Config, agent: Agent, state: State, obs: PyTree, rollout: Rollout) -> Array:
    """Returns max_a Q(obs_t) [T, B], recorded while acting because Q does not change during a rollout."""
    mask_of, best = agent.observer.mask, cfg.reading(agent).best

    def compute():
        if not agent.network.recurrent:
            return jax.lax.map(lambda x: best(heads_of(agent, state.params, x), mask_of(x)), obs)
        length, memory = sequences.length_of(agent.network, len(rollout.reward)), agents.split_carry(rollout.carry)[0]

        def unroll(window):
            heads, after = agent.net.unroll(state.params, window, "q")
            return best(heads, mask_of(window)), after

        return sequences.along(unroll, obs, rollout.mask, memory, length)[0]

    return observers.values_seen(rollout, rollout.extras["value"], compute)


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, PyTree]:
    """Returns Rows [T, B] with Q(lambda), and the recurrent state before each sequence."""
    observer = agent.observer
    obs, last_obs = observer.recall(state.obs_stats, rollout), observer.see(state.obs_stats, rollout.last_obs)
    starts, memory = memories(agent, state, obs, rollout)
    last_heads, _ = agent.net.step(state.params, last_obs, memory, "q")
    last = cfg.reading(agent).best(last_heads, observer.mask(last_obs))
    target = returns.lambda_returns(
        parts.scale_reward(cfg, state.return_stats, rollout.reward),
        rollout.terminated,
        rollout.terminated | rollout.truncated,
        jnp.concatenate([values(cfg, agent, state, obs, rollout), last[None]]),
        gamma=cfg.gamma,
        lambda_=cfg.q_lambda,
    )
    action, target = parts.zero_masked(rollout.mask, (rollout.action, target))
    return Rows(obs, action, target, parts.weights(rollout.mask, agent.axis_name)), starts


def loss(cfg: Config, agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean distance of Q(obs, action) from its target over Rows [N]."""
    value = cfg.reading(agent).taken(heads_of(agent, params, rows.obs), rows.action)
    mean = lambda x: jnp.mean(rows.weight * x)
    distance = losses.huber if cfg.loss == "huber" else lambda x: 0.5 * jnp.square(x)
    error = mean(distance(value - rows.target))
    return error, {"loss/q": error, "value/q": mean(value), "value/target": mean(rows.target)}


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B]."""
    before = agents.with_return_stats(agent, state, rollout)
    rows, memory = targets(cfg, agent, agents.with_first_stats(agent, before, rollout), rollout)
    grid = agents.grid(agent, *rollout.reward.shape)  # with a core the rows are sequences
    length = rollout.reward.size // (grid[0] * grid[1])
    take = agents.taker(agents.cut(agent, rows, memory))
    chunk = agents.chunk(cfg, agent, grid[0] * grid[1] // cfg.num_minibatches, length=length)
    lr = schedules.value(cfg.lr, state.env_steps)
    given = parts.QNetwork(agent.net.init, functools.partial(q_values, cfg, agent))
    rows_loss = custom_loss.over_rows(agent.loss, functools.partial(loss, cfg, agent), given)

    def step(carry, batch: Rows):
        params, opt_state = carry
        gradient, metrics = agents.mean_gradient(agent, rows_loss, params, batch, chunk)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), metrics

    start = (state.params, state.opt_state)
    (params, opt_state), metrics = agents.epochs(cfg, agent, step, start, take, grid, key)
    # the noise adapts with the parameters that acted
    state = replace(
        agents.adapted(cfg, agent, functools.partial(q_values, cfg, agent), before, rollout),
        params=params,
        opt_state=opt_state,
        updates=state.updates + 1,
    )
    metrics = jax.tree.map(jnp.mean, metrics) | {"train/lr": lr} | parameter_noise.metrics(cfg.exploration, state.own)
    return agents.observed(agent, state, rollout), UpdateAux(metrics)


def outputs(cfg: Config, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns Q values of observations [B, *] at an episode's start; for a team [B, agents, A]."""
    memory = agent.net.carry(spaces.batch_shape(agent.spec.observation, obs)[0])
    heads, _ = agent.net.step(state.params, agent.observer.see(state.obs_stats, obs), memory, "q")
    return {"q": cfg.reading(agent).q(heads)}


def _check_team(cfg: Config, spec: EnvSpec) -> None:
    """Raises InputError if there is a mixer without a team, or a team without a mixer."""
    if cfg.mixer != "none":
        teams.team_of(spec, f"pqn with algo.mixer {cfg.mixer}")
    elif teams.is_team(spec):
        raise InputError("algo.mixer: expected sum or qmix for a team of agents, got none: set algo.mixer=sum or qmix")


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes PQN, an on-policy Algo. A user's loss gets Rows [N], with a core [N, L]. Arguments: see `jrl.algos`.

    Raises:
      InputError: an exploration without Q values, parameter noise with a core, a mixer without a team, or a team
        without a mixer; in `update`, a `network.max_seq_len` that does not divide the rollout; see also `jrl.algos`.
    """
    _check_team(cfg, spec)
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = agents.make(cfg, spec, network, networks, kind="q", records=Records(seen=True), **options)
    carry = agent.net.carry
    return agents.algo(cfg, agent, init=init, policy=policy, update=update, outputs=outputs, memory=carry)
