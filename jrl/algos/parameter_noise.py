"""Parameter noise for exploration, with a deviation that adapts to its effect on the policy (arXiv:1706.01905).

    own = init_noise(cfg.exploration, key)                                      # part of `State.own`
    noisy = perturb(cfg.exploration, state.own, state.params, state.env_steps)  # acting act
    state = adapt(cfg.exploration, policy, state, params, obs, axis_name=None)  # once per rollout

The noise follows from a seed and the number of environment steps, so only the seed and the deviation are stored, and
the State is enough to compute the acting parameters again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.algos import parts
from jrl.algos.exploration import Exploration, ParameterNoise, ParameterNoiseQ, by_choice
from jrl.fields.hyper import NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import schedules
from jrl.types import Array, InputError, Key, Metrics, PyTree


@struct.dataclass
class Noise:
    """State of the noise, `State.own["noise"]`."""

    std: Array  # [] f32
    seed: Array  # [] u32


def refuse_memory(cfg: ParameterNoise, network: NetworkConfig) -> None:
    """Raises InputError for parameter noise with memory: its distance compares policies on single observations."""
    if network.recurrent:
        other = "epsilon_greedy" if isinstance(cfg, ParameterNoiseQ) else "gaussian"
        raise InputError(f"algo.exploration {cfg.name}: not with network.core {network.core.name}: use {other}")


def init_noise(cfg: ParameterNoise, key: Key) -> dict[str, Noise]:
    """Returns {"noise": initial noise} for `State.own`."""
    # another stream than the parameters, which use the same key
    seed = jax.random.bits(jax.random.fold_in(key, 0x6E6F6973))
    return {"noise": Noise(jnp.asarray(cfg.std, jnp.float32), seed)}


def perturb(cfg: ParameterNoise, own: dict[str, PyTree], params: PyTree, env_steps: Array) -> PyTree:
    """Returns the parameters with the noise of this number of environment steps."""
    return _add_noise(cfg, own["noise"], params, env_steps)


def adapt(
    cfg: ParameterNoise,
    policy: Callable[[PyTree, PyTree], Array],
    state: Any,
    params: PyTree,
    obs: PyTree,
    mask: Array | None = None,
    *,
    axis_name: str | None,
) -> Any:
    """Returns the State with a deviation of the noise that is adapted towards the target distance of the policies.

    Args:
      cfg: exploration of the algorithm; floats may be traced.
      policy: (params, obs [B, *]) -> Q values [B, A], or actions [B, *].
      state: State with `env_steps` and `own`.
      params: parameters without noise.
      obs: [B, *], normalised.
      mask: [B, A] bool, allowed actions; None: all.
      axis_name: mapped axis over devices, or None.
    """
    noise, noisy_params = state.own["noise"], perturb(cfg, state.own, params, state.env_steps)
    exact, noisy = policy(params, obs), policy(noisy_params, obs)
    target, distance = _distance(cfg, state.env_steps, exact, noisy, mask, axis_name)
    std = ops.adapted_std(noise.std, distance, target, cfg.factor)
    return replace(state, own={**state.own, "noise": replace(noise, std=std)})


def metrics(cfg: Exploration, own: dict[str, PyTree]) -> Metrics:
    """Returns the metric of the noise's deviation; {} for another exploration."""
    return {"policy/noise_std": own["noise"].std} if isinstance(cfg, ParameterNoise) else {}


@jax.jit  # acting from the host calls it outside of any program
def _add_noise(cfg: ParameterNoise, noise: Noise, params: PyTree, env_steps: Array) -> PyTree:
    key = jax.random.fold_in(jax.random.key(noise.seed), env_steps // jnp.uint32(cfg.redraw_every))
    return ops.perturbed(params, key, noise.std)


def _distance(cfg: Any, env_steps, exact, noisy, mask, axis_name) -> tuple[Array, Array]:
    """Returns (target distance, present distance)."""
    if isinstance(cfg, ParameterNoiseQ):
        mask = by_choice(mask, exact)
        epsilon = schedules.value(cfg.epsilon, env_steps)
        distance = parts.pmean(ops.softmax_kl(exact, noisy, mask).mean(), axis_name)
        if mask is None:
            return ops.epsilon_kl(epsilon, exact.shape[-1]), distance
        num_allowed = ops.allowed(mask).sum(-1, dtype=jnp.int32)
        return parts.pmean(ops.epsilon_kl(epsilon, num_allowed).mean(), axis_name), distance
    mean_square = parts.pmean(jnp.square(exact - noisy).mean(), axis_name)
    return schedules.value(cfg.target_std, env_steps), jnp.sqrt(mean_square)
