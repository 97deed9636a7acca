"""Behaviour cloning: the policy of a data set, by maximum likelihood (Pomerleau, 1991).

    algo = bc.make(bc.Config(), spec)
    state = algo.init(key)
    state, aux = jax.jit(algo.update)(state, batch, key)        # batch: jrl.types.Batch; one gradient step
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key, explore=False)    # out.action [B, *]

The loss is -log pi(a | s), or with `loss: mse` the squared error of the policy's mode, averaged over the rows of a
batch. Rewards are used only by `top_fraction`: the data set then keeps the episodes of highest return that contain this
share of its steps (10%BC of arXiv:2106.01345 is 0.1).

The network has the parameter names of PPO's policy, so that a PPO run can start from it. With a core it learns from a
SequenceBatch: data sets have no recurrent states, so a sequence starts with the initial state, and the K burn-in rows
update it before the loss.

Gradients and metrics are averaged over `make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import networks as nets
from jrl import spaces
from jrl.algos import actor_critic, critics, custom_loss, parts
from jrl.algos import agent as agents
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.custom_loss import RowsLoss
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.algos.observer import Observer
from jrl.errors import InputError
from jrl.fields.bounds import NonNegativeSchedule, Share
from jrl.fields.data import DataSets
from jrl.networks import Head, NetworkConfig
from jrl.ops import schedules
from jrl.types import (
    Algo,
    Array,
    Batch,
    Box,
    EnvSpec,
    Key,
    Leaf,
    Metrics,
    PyTree,
    SequenceBatch,
    Space,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Cloning(Common):
    """Hyper-parameters of learning from a data set's actions; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = DataSets

    lr: NonNegativeSchedule = 1e-3
    ent_coef: NonNegativeSchedule = 0.0  # weight of the entropy bonus
    exploration: OverDistributions = Stochastic()


@hyperparams
class Config(Cloning):
    """Hyper-parameters of BC; a Schedule is a number or `[[env_steps, value], ...]`."""

    # log_prob: -log pi(a | s); mse: squared error of the mode, for Box actions, which does not train the deviation
    loss: Literal["log_prob", "mse"] = "log_prob"
    top_fraction: Share | None = None  # learns from the best episodes that hold this share of the steps; null: from all

    @property
    def reads_rewards(self) -> bool:
        """Returns whether episodes are selected by their returns."""
        return self.top_fraction is not None

    def validate(self) -> list[str]:
        return loss_faults(self.loss, self.ent_coef) + super().validate()


def loss_faults(loss: str, ent_coef: Any) -> list[str]:
    """Returns the messages for an invalid combination of loss and entropy bonus."""
    if loss != "mse" or ent_coef == 0:
        return []
    return [
        "ent_coef has nothing to hold it with loss mse, which does not read the policy's deviation: leave it out, or "
        "use loss log_prob"
    ]


def check_loss(loss: str, spec: EnvSpec) -> None:
    """Raises InputError if `loss` is mse and an action is not a Box of floats."""
    other = [str(leaf) for _, leaf in spaces.leaves(spec.action) if not _is_real(leaf)]
    if loss == "mse" and other:
        raise InputError(f"algo.loss mse needs actions of float Boxes, not {', '.join(other)}: use loss log_prob")


@struct.dataclass
class Rows:
    """Rows of the loss: [N, *]; with a core sequences [N, L, *]."""

    obs: PyTree  # normalised observations; a Window for sequences
    action: PyTree
    weight: Array  # f32, 0 on masked rows, 1 on average


def policy_network(cfg: Cloning, observer: Observer, network: NetworkConfig) -> critics.PolicyHeads:
    """Returns the policy part of `actor_critic.make`, with the same parameters."""
    head = actor_critic.policy_head(observer.spec.action, network, observer.mask)
    net = nets.build(observer.spec, network, {"policy": Head(head.outputs, 0.01)})
    return critics.policy_of(net, head.distribution, own_params=lambda params: head.with_std(dict(params)))


def init(cfg: Cloning, agent: Agent, key: Key) -> State:
    """Returns the initial State."""
    return agents.begin(cfg, agent, key, agent.net.init(key))


def policy(cfg: Cloning, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool):
    """Returns the distribution of actions [B]."""
    dist, memory = agent.net.step(actor.params, obs, memory)
    return dist, memory, {}


# ---------------------------------------------------------------- data


def agreement(space: Space, dist: Any, action: PyTree, weight: Array) -> Metrics:
    """Measures how near the policy's mode comes to the actions that were taken.

    Args:
      space: of actions.
      dist: [N] or [N, L].
      action: [N, *] or [N, L, *].
      weight: [N] or [N, L].
    Returns:
      `policy/accuracy`, the share of rows on which all choices are the same, where there are choices; `policy/mse`, the
      squared error in the mean over the elements, where there are Boxes.
    """
    mean = lambda x: jnp.mean(weight * x)
    same, squared, elements = [], [], 0
    pairs = zip(spaces.leaves(space), jax.tree.leaves(dist.mode()), jax.tree.leaves(action), strict=True)
    for (_, leaf), best, taken in pairs:
        inner = tuple(range(weight.ndim, best.ndim))
        if _is_real(leaf):
            squared.append(jnp.sum(jnp.square(best - taken), inner))
            elements += math.prod(leaf.shape)
        else:
            same.append(jnp.all(best == taken, inner))
    metrics = {"policy/accuracy": mean(functools.reduce(jnp.logical_and, same).astype(jnp.float32))} if same else {}
    return metrics | ({"policy/mse": mean(sum(squared) / elements)} if squared else {})


def _is_real(leaf: Leaf) -> bool:
    return isinstance(leaf, Box) and np.issubdtype(np.dtype(leaf.dtype), np.floating)


# ---------------------------------------------------------------- learning


def loss(cfg: Any, agent: Agent, params: PyTree, rows: Rows, *, ent_coef: Any) -> tuple[Array, Metrics]:
    """Returns -log pi(a | s), or |mode(s) - a|^2 in the mean over its elements, - ent_coef entropy: the mean over
    Rows [N].
    """
    dist = agent.net.apply(params, rows.obs)
    mean = lambda x: jnp.mean(rows.weight * x)
    metrics = agreement(agent.spec.action, dist, rows.action, rows.weight)
    error = metrics["policy/mse"] if cfg.loss == "mse" else -mean(dist.log_prob(rows.action))
    entropy = mean(dist.entropy())
    return error - ent_coef * entropy, {"loss/policy": error, "policy/entropy": entropy, **metrics}


def descend(cfg: Cloning, agent: Agent, state: State, own: Callable[..., Any], rows: Any) -> tuple[State, Metrics]:
    """Makes one gradient step on rows, and returns its metrics.

    Args:
      own: the algorithm's loss, (params, rows, ent_coef=) -> (scalar, metrics).
      rows: what it reads, and a user's in its place.
    """
    lr, ent_coef = (schedules.value(schedule, state.env_steps) for schedule in (cfg.lr, cfg.ent_coef))
    own_loss: RowsLoss = functools.partial(own, ent_coef=ent_coef)
    gradient, metrics = jax.grad(custom_loss.over_rows(agent.loss, own_loss, agent.net), has_aux=True)(
        state.params, rows
    )
    gradient, metrics = parts.pmean((gradient, metrics), agent.axis_name)
    params, opt_state = agents.descend(cfg, agent, lr, gradient, state.opt_state, state.params)
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    return state, metrics | {"train/lr": lr}


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step."""
    batch = critics.read(cfg, agent, state, batch)
    obs = critics.values_read(agent.net, state.params, batch.obs, critics.burn_in(batch))
    rows = Rows(obs, batch.action, batch.weight)
    state, metrics = descend(cfg, agent, state, functools.partial(loss, cfg, agent), rows)
    return state, UpdateAux(metrics)


def outputs(cfg: Cloning, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the distribution of actions of observations [B, *] at an episode's start."""
    memory = agent.net.carry(spaces.batch_shape(agent.spec.observation, obs)[0])
    return {"distribution": agent.net.step(state.params, agent.observer.see(state.obs_stats, obs), memory)[0]}


def make_agent(
    cfg: Cloning,
    spec: EnvSpec,
    network: NetworkConfig,
    networks: Callable[[Any, Observer, NetworkConfig], Any],
    **options: Unpack[MakeOptions],
) -> Agent:
    """Makes an Agent whose policy, a distribution, learns from a data set; arguments and errors: see `agent.make`."""
    records = Records(log_prob=True)
    # flat=False: for single gradient steps, gathering the arrays into a vector would be extra work
    return agents.make(cfg, spec, network, networks, kind="distribution", records=records, flat=False, **options)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes BC, an Algo that learns from data sets. A user's loss gets Rows [N]. Arguments and errors: see `jrl.algos`.

    Raises:
      InputError: `loss: mse` with actions that are not Boxes; see also `jrl.algos`.
    """
    check_loss(cfg.loss, spec)
    agent = make_agent(cfg, spec, network, policy_network, **options)
    return agents.algo(
        cfg,
        agent,
        init=init,
        policy=policy,
        update=update,
        outputs=outputs,
        memory=agent.net.carry,
        ingest=agents.ingest,
    )
