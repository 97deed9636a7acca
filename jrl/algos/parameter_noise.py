"""Noise on the parameters that act, whose deviation adapts to what it does to the policy (arXiv:1706.01905).

    noise = make(cfg.exploration, policy, spec.action, NoisyState, axis_name=axis_name)  # in an algorithm's `make`
    state = noise.init(state, key)                      # a NoisyState; without parameter noise the state as it is
    noise.perturbed(state, state.params)                # of the Actor: parameters that act, or ()
    state = noise.adapted(state, state.params, obs)     # once for each rollout: its latest observations, and their mask

All is a function of the State: the noise follows from a seed and the count of environment steps, so that nothing of its
size is stored, and whoever has the State knows the parameters that acted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.algos import parts
from jrl.algos.exploration import Exploration, ParameterNoiseAction, ParameterNoiseQ
from jrl.hyper import NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import schedules
from jrl.types import Array, Discrete, InputError, Key, Metrics, PyTree, Space


@struct.dataclass
class Noise:
    std: Array  # [] f32
    seed: Array  # [] u32


class ParameterNoise(NamedTuple):
    init: Callable[[Any, Key], Any]  # (State, key) -> NoisyState, or the State
    perturbed: Callable[[Any, PyTree], PyTree]  # (state, params) -> params, or ()
    adapted: Callable[..., Any]  # (state, params, obs [B, *], mask=None | [B, A] bool of the actions) -> state
    metrics: Callable[[Any], Metrics]  # of a state


_NONE = ParameterNoise(
    init=lambda state, key: state,
    perturbed=lambda state, params: (),
    adapted=lambda state, params, obs, mask=None: state,
    metrics=lambda state: {},
)


def refuse_memory(cfg: Exploration, network: NetworkConfig) -> None:
    """Raises InputError for parameter noise where the network has a memory: the distance that the noise is to have is
    one of policies on single observations."""
    if isinstance(cfg, ParameterNoiseQ | ParameterNoiseAction) and network.recurrent:
        other = "epsilon_greedy" if isinstance(cfg, ParameterNoiseQ) else "gaussian"
        raise InputError(f"algo.exploration {cfg.name}: not with network.core {network.core.name}: use {other}")


def make(
    cfg: Exploration,
    policy: Callable[[PyTree, PyTree], Array],
    action_space: Space,
    noisy_state: Callable[..., Any],
    *,
    axis_name: str | None,
) -> ParameterNoise:
    """The functions for `cfg`; for another exploration such that do nothing.

    Args:
      cfg: exploration of the algorithm; floats may be traced.
      policy: (params, obs [B, *]) -> Q values [B, A], or actions [B, *].
      action_space: of the environment.
      noisy_state: class of the algorithm's State with a further field `noise`, a Noise. It is a class of its own so
        that the State of other explorations, and with it their checkpoints, stay as they are.
      axis_name: of the mapped axis over devices; None outside of one.
    """
    if not isinstance(cfg, ParameterNoiseQ | ParameterNoiseAction):
        return _NONE

    def init(state, key: Key):
        # of another stream than the parameters, which are drawn from the same key
        seed = jax.random.bits(jax.random.fold_in(key, 0x6E6F6973))
        return noisy_state(**vars(state), noise=Noise(jnp.asarray(cfg.std, jnp.float32), seed))

    @jax.jit  # acting from the host asks for it outside of any program
    def drawn(noise: Noise, params: PyTree, env_steps: Array) -> PyTree:
        key = jax.random.fold_in(jax.random.key(noise.seed), env_steps // jnp.uint32(cfg.redraw_every))
        return ops.perturbed(params, key, noise.std)

    def perturbed(state, params: PyTree) -> PyTree:
        return drawn(state.noise, params, state.env_steps)

    def adapted(state, params: PyTree, obs: PyTree, mask: Array | None = None):
        exact, noisy = policy(params, obs), policy(perturbed(state, params), obs)
        target, distance = _distance(cfg, action_space, state.env_steps, exact, noisy, mask, axis_name)
        std = ops.adapted_std(state.noise.std, distance, target, cfg.factor)
        return replace(state, noise=replace(state.noise, std=std))

    return ParameterNoise(init, perturbed, adapted, lambda state: {"policy/noise_std": state.noise.std})


def _distance(cfg: Any, space: Space, env_steps, exact, noisy, mask, axis_name) -> tuple[Array, Array]:
    """(the distance that is wanted, the one that there is)."""
    if isinstance(cfg, ParameterNoiseQ):
        assert isinstance(space, Discrete)
        epsilon = schedules.value(cfg.epsilon, env_steps)
        distance = parts.pmean(ops.softmax_kl(exact, noisy, mask).mean(), axis_name)
        if mask is None:
            return ops.epsilon_kl(epsilon, space.n), distance
        num_allowed = ops.allowed(mask).sum(-1, dtype=jnp.int32)
        return parts.pmean(ops.epsilon_kl(epsilon, num_allowed).mean(), axis_name), distance
    mean_square = parts.pmean(jnp.square(exact - noisy).mean(), axis_name)
    return schedules.value(cfg.target_std, env_steps), jnp.sqrt(mean_square)


__all__ = ["Noise", "ParameterNoise", "make", "refuse_memory"]
