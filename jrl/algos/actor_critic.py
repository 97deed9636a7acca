"""A policy and a value function on one set of parameters, for every actor-critic algorithm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl import distributions, networks
from jrl.networks import Head, NetworkConfig
from jrl.types import Array, Box, EnvSpec, Key, PyTree


class ActorCritic(NamedTuple):
    init: Callable[[Key], PyTree]  # key -> params
    apply: Callable[[PyTree, PyTree], tuple[Any, Array]]  # (params, obs[..., *]) -> (distribution [...], value [...])
    value: Callable[[PyTree, PyTree], Array]  # (params, obs[..., *]) -> [...]


def make(spec: EnvSpec, cfg: NetworkConfig) -> ActorCritic:
    """Policy head (gain 0.01, so that the first policy is nearly uniform) and value head (gain 1) on `cfg`'s torsos.

    A Gaussian policy's log standard deviation is a parameter per action element, or an output of the network with
    `cfg.state_dependent_std`.

    Raises:
      InputError: an action space without a distribution, or a torso that does not fit the observations.
    """
    action = distributions.action_distribution(spec.action)
    free_std = isinstance(spec.action, Box) and not cfg.state_dependent_std
    predicted_std = isinstance(spec.action, Box) and cfg.state_dependent_std
    heads = {"policy": Head(action.size * (2 if predicted_std else 1), 0.01), "value": Head(1, 1.0)}
    network = networks.build(spec, cfg, heads)

    def init(key):
        params = dict(network.init(key))
        if free_std:
            params["log_std"] = jnp.full((action.size,), cfg.log_std_init, jnp.float32)
        return params

    def apply(params, obs):
        outputs, value = network.apply(params, obs, "policy", "value")
        log_std = params["log_std"] if free_std else None
        if predicted_std:
            outputs, log_std = jnp.split(outputs, 2, -1)
            log_std = log_std + cfg.log_std_init
        return action.make(outputs, log_std), value[..., 0]

    def value(params, obs):
        return network.apply(params, obs, "value")[0][..., 0]

    return ActorCritic(init, apply, value)
