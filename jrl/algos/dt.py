"""Decision Transformer: a return-conditioned policy of a data set (arXiv:2106.01345).

    algo = dt.make(dt.Config(target_return=500.0), spec, network)       # a network with a core, such as gtrxl
    state, aux = jax.jit(algo.update)(state, batch, key)                # batch: jrl.types.SequenceBatch
    out = algo.act(algo.actor(state), obs, carry, key, explore=False)   # out.action [B, *]

It is behaviour cloning (`jrl.algos.bc`) with two more observations: the return to go, which is the sum of rewards from
the step to the end of the episode in the data, and the step number. When acting, the return to go begins as
`target_return`, and each reward is subtracted: so it imitates episodes with that return.

In the paper return, observation and action are three tokens of a transformer. Here they are one token, of the
observation with the previous action (`network.use_prev_action`), and the core attends to the latest steps: the same
information is available at each step. `network.use_prev_reward` provides the rewards. Without a core it is
return-conditioned cloning (RvS-R, arXiv:2112.10751).

Gradients and metrics are averaged over `make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl.algos import agent as agents
from jrl.algos import bc, critics
from jrl.algos.agent import ActorState, Agent, MakeOptions, State
from jrl.errors import InputError
from jrl.fields.bounds import Positive
from jrl.fields.data import RETURN_TO_GO, TIMESTEP
from jrl.networks import NetworkConfig
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Batch,
    Box,
    Dict,
    EnvSpec,
    Key,
    PyTree,
    Rollout,
    SequenceBatch,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig()
_PREV_REWARD = "prev_reward"  # item of the observation, see jrl.envs.history


@hyperparams
class Config(bc.Cloning):
    """Hyper-parameters of DT; a Schedule is a number or `[[env_steps, value], ...]`."""

    reads: ClassVar[tuple[str, ...]] = (RETURN_TO_GO, TIMESTEP)

    # log_prob: -log pi(a | s); mse: squared error of the mode, for Box actions, which does not train the deviation
    loss: Literal["log_prob", "mse"] = "log_prob"
    target_return: float = 0.0  # desired return of an episode when acting
    return_scale: Positive = 1_000.0  # divisor of returns before the network reads them
    step_scale: Positive = 1_000.0  # divisor of step numbers before the network reads them

    def validate(self) -> list[str]:
        return bc.loss_faults(self.loss, self.ent_coef) + super().validate()


@struct.dataclass
class Carry:
    """Recurrent state of acting."""

    inner: PyTree  # the network's memory and the exploration's state
    to_go: Array  # [B] f32, return to go at the latest step
    steps: Array  # [B] i32, number of steps of the episode so far


def conditioned(cfg: Config, obs: dict[str, PyTree], to_go: Array, step: Array) -> dict[str, PyTree]:
    """Returns observations with the return to go and the step number.

    Args:
      obs: [..., *], by the names of a Dict.
      to_go: [...] f32.
      step: [...] i32.
    """
    return {**obs, RETURN_TO_GO: to_go / cfg.return_scale, TIMESTEP: step.astype(jnp.float32) / cfg.step_scale}


def conditioned_spec(spec: EnvSpec) -> EnvSpec:
    """Returns the spec of the conditioned observations.

    Raises:
      InputError: observations do not contain the previous reward.
    """
    found = spec.observation
    if not isinstance(found, Dict) or _PREV_REWARD not in dict(found.items):
        raise InputError(
            "dt subtracts each reward from its target return: set network.use_prev_reward (and for its "
            "memory network.use_prev_action) to true"
        )
    numbers = ((RETURN_TO_GO, Box((), "float32")), (TIMESTEP, Box((), "float32")))
    return spec._replace(observation=Dict((*found.items, *numbers)))


def with_columns(cfg: Config, obs: PyTree, extras: Any) -> PyTree:
    """Returns observations conditioned by a data set's columns. Raises InputError if the columns are missing."""
    if missing := [name for name in Config.reads if name not in extras]:
        raise InputError(f"dt: the batch has no {' and '.join(missing)}: it learns from data sets, not from rollouts")
    return conditioned(cfg, obs, extras[RETURN_TO_GO], extras[TIMESTEP])


def read(cfg: Config, batch: Batch | SequenceBatch) -> Batch | SequenceBatch:
    """Returns a sample of a data set with conditioned observations.

    Raises:
      InputError: the sample has burn-in rows, whose returns are unknown.
    """
    if isinstance(batch, Batch):
        obs = with_columns(cfg, batch.obs, batch.extras)
        return replace(batch, obs=obs, next_obs=obs)  # next_obs is not used
    if batch.window.reset.shape[1] != batch.weight.shape[1] + 1:
        raise InputError("replay.burn_in: dt reads sequences from their first row on: set it to 0")
    # the last row is repeated, as the row after it
    one_more = jax.tree.map(lambda x: jnp.concatenate([x, x[:, -1:]], 1), dict(batch.extras))
    window = replace(batch.window, obs=with_columns(cfg, batch.window.obs, one_more))
    return replace(batch, window=window)


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step."""
    batch = critics.read(cfg, agent, state, read(cfg, batch))
    obs = critics.values_read(agent.net, state.params, batch.obs, critics.burn_in(batch))
    rows = bc.Rows(obs, batch.action, batch.weight)
    state, metrics = bc.descend(cfg, agent, state, functools.partial(bc.loss, cfg, agent), rows)
    return state, UpdateAux(metrics)


def ingest(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State with a data set's observation statistics."""
    extras = jax.tree.map(lambda x: x[-1], {name: rollout.extras[name] for name in Config.reads})
    rollout = replace(
        rollout,
        obs=with_columns(cfg, rollout.obs, rollout.extras),
        last_obs=with_columns(cfg, rollout.last_obs, extras),
    )
    return agents.ingest(cfg, agent, state, rollout)


def act(
    cfg: Config, agent: Agent, actor: ActorState, obs: PyTree, carry: Carry, key: Key, explore: bool = True
) -> ActOut:
    """Returns actions for observations [B, *], conditioned by the return to go."""
    to_go = jnp.where(carry.steps == 0, cfg.target_return, carry.to_go - obs[_PREV_REWARD])
    seen = conditioned(cfg, obs, to_go, carry.steps)
    out = agents.act(cfg, agent, bc.policy, actor, seen, carry.inner, key, explore)
    return out._replace(carry=Carry(out.carry, to_go, carry.steps + 1))


def outputs(cfg: Config, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the distribution of actions of observations [B, *] at an episode's start."""
    num = jax.tree.leaves(obs)[0].shape[0]
    to_go = jnp.full((num,), jnp.asarray(cfg.target_return, jnp.float32))
    return bc.outputs(cfg, agent, state, conditioned(cfg, obs, to_go, jnp.zeros((num,), jnp.int32)))


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes DT, an Algo that learns from data sets. Arguments and errors as for `bc.make`."""
    bc.check_loss(cfg.loss, spec)
    agent = bc.make_agent(cfg, conditioned_spec(spec), network, bc.policy_network, **options)
    algo = agents.algo(
        cfg, agent, init=bc.init, act=act, update=update, outputs=outputs, memory=agent.net.carry, ingest=ingest
    )

    def carry(batch_size: int, first: Any = 0, total: int | None = None) -> Carry:
        inner = algo.carry(batch_size, first, total)
        return Carry(inner, jnp.zeros((batch_size,), jnp.float32), jnp.zeros((batch_size,), jnp.int32))

    return algo._replace(carry=carry)
