"""Fitted Q evaluation: action values of a given policy from data (arXiv:1907.07712, algorithm 3).

    Q(s, a) <- r + discount E_{a' ~ pi(s')} Q'(s', a')

by gradient steps on samples of replay, with a slow copy Q'. Only the policy's choices at each observation are needed:
the probabilities of a Discrete space, for an exact expectation, else some sampled actions. They are computed once in
advance, with the policy's recurrent state; Q reads only the observation.

    fqe = make(spec, network, settings, level=40.0, scale=30.0)
    state = fqe.init(key)
    state, loss = jax.jit(fqe.update)(state, batch)      # batch.extras[NEXT]: the choices at batch.next_obs
    q, v = fqe.values(state, obs, action, choices)
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jrl.algos import observer, parts
from jrl.fields.hyper import NoCore
from jrl.networks import NetworkConfig
from jrl.networks.critics import build_critics
from jrl.networks.encoders import flattened
from jrl.types import Array, Batch, Box, Discrete, EnvSpec, Key, PyTree, Space, element

NEXT = "next_choices"  # key of a batch's extras: the policy's choices at `next_obs`


class Settings(NamedTuple):
    """Settings of the fit of Q; see `settings.datasets.FqeConfig`."""

    updates: int
    lr: float
    tau: float
    hidden: tuple[int, ...] | None


@struct.dataclass
class State:
    """Arrays of the fit."""

    params: PyTree
    target_params: PyTree
    opt_state: PyTree
    obs_stats: PyTree  # statistics of the observations in the data


class Fqe(NamedTuple):
    """Fitted Q evaluation as pure functions."""

    init: Callable[[Key], State]
    observe: Callable[[State, PyTree, Array], State]  # (state, obs [T, B, *], mask [T, B]) -> with their statistics
    update: Callable[[State, Batch], tuple[State, Array]]  # -> state, mean squared TD error
    # (state, obs [N, *], action [N, *], choices [N, ...]) -> Q of the actions [N], V under the choices [N]
    values: Callable[[State, PyTree, PyTree, Array], tuple[Array, Array]]


def make(spec: EnvSpec, network: NetworkConfig, settings: Settings, *, level: float, scale: float) -> Fqe:
    """Makes fitted Q evaluation as pure functions.

    Args:
      spec: environment's spaces, as the policy reads them.
      network: shape of Q; its core is ignored, and `hidden` may be set by `settings`.
      settings: settings of the fit. The step size decays to 0 along half a cosine.
      level, scale: initial value of Q, and its approximate deviation: the network outputs (Q - level) / scale.
    Raises:
      InputError: the network does not fit the observation.
    """
    hidden = network.hidden if settings.hidden is None else settings.hidden
    network = replace(network, core=NoCore(), hidden=hidden, critic_hidden=None, shared=False)
    sees = observer.make(spec, network, normalize_obs=True, axis_name=None)
    choices = isinstance(spec.action, Discrete)
    like = sees.spec if choices else sees.spec._replace(action=Box((num_features(spec.action),)))
    critic = build_critics(like, network, 1)
    schedule: Any = optax.cosine_decay_schedule(settings.lr, max(1, settings.updates))
    optimizer = optax.flatten(optax.adam(schedule))

    def init(key: Key) -> State:
        params = critic.init(key)
        return State(params, jax.tree.map(jnp.copy, params), optimizer.init(params), sees.init())

    def observe(state: State, obs: PyTree, mask: Array) -> State:
        return replace(state, obs_stats=sees.observe(state.obs_stats, obs, mask))

    def q_of_actions(params: PyTree, obs: PyTree, action: PyTree) -> Array:
        if isinstance(spec.action, Discrete):
            return jnp.sum(critic.apply(params, obs)[0] * jax.nn.one_hot(action, spec.action.n), -1)
        return critic.apply(params, obs, features(spec.action, action))[0]

    def q_of_choices(params: PyTree, obs: PyTree, chosen: Array) -> Array:
        if choices:
            return jnp.sum(critic.apply(params, obs)[0] * chosen, -1)
        rows, samples, _ = chosen.shape
        repeated = jax.tree.map(lambda x: jnp.repeat(x, samples, 0), obs)
        q = critic.apply(params, repeated, chosen.reshape(rows * samples, -1))[0]
        return q.reshape(rows, samples).mean(1)

    def update(state: State, batch: Batch) -> tuple[State, Array]:
        obs, next_obs = (sees.see(state.obs_stats, x) for x in (batch.obs, batch.next_obs))
        after = level + scale * q_of_choices(state.target_params, next_obs, batch.extras[NEXT])
        target = (batch.reward + batch.discount * after - level) / scale

        def loss(params: PyTree) -> Array:
            return jnp.mean(batch.weight * jnp.square(q_of_actions(params, obs, batch.action) - target))

        value, gradient = jax.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target_params = parts.moved(state.target_params, params, settings.tau)
        moved = replace(state, params=params, target_params=target_params, opt_state=opt_state)
        return moved, value * scale**2

    def values(state: State, obs: PyTree, action: PyTree, chosen: Array) -> tuple[Array, Array]:
        obs = sees.see(state.obs_stats, obs)
        q, v = q_of_actions(state.params, obs, action), q_of_choices(state.params, obs, chosen)
        return level + scale * q, level + scale * v

    return Fqe(init, observe, update, values)


def features(space: Space, action: PyTree) -> Array:
    """Returns actions [N, *] of any space as vectors [N, D] f32; integers one-hot."""
    return flattened(space, NetworkConfig(), action)


def num_features(space: Space) -> int:
    """Returns D of `features`."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), element(space))
    return math.prod(jax.eval_shape(lambda x: features(space, x), one).shape)
