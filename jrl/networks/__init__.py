"""Networks as pairs of pure functions: `build(spec, config, heads) -> Network(init, apply)`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl.networks.config import NetworkConfig
from jrl.networks.torsos import TORSOS, is_image, kernel_init, to_float
from jrl.types import Array, EnvSpec, InputError, Key, PyTree, Space

__all__ = ["Head", "Network", "NetworkConfig", "build", "is_image", "parameter_count"]


class Head(NamedTuple):
    """One output of the network: `size` numbers per observation, last layer initialised with gain `scale`."""

    size: int
    scale: float = 1.0


class Network(NamedTuple):
    """Any flax, nnx or hand-written network fits behind these two functions."""

    init: Callable[[Key], PyTree]  # key -> params
    apply: Callable[..., tuple[Array, ...]]  # (params, obs[..., *], *head names) -> one f32 [..., size] per name


class _Towers(nn.Module):
    space: Space
    cfg: NetworkConfig
    torso: str
    heads: tuple[tuple[str, Head], ...]

    @nn.compact
    def __call__(self, obs, names):
        x, features = to_float(self.space, obs), {}
        outputs = {}
        for name, head in self.heads:
            if name not in names:
                continue
            tower = "torso" if self.cfg.shared else f"{name}_torso"
            if tower not in features:
                features[tower] = TORSOS[self.torso](self.cfg, name=tower)(x)
            dense = nn.Dense(
                head.size, dtype=self.cfg.dtype, kernel_init=kernel_init(self.cfg, head.scale), name=f"{name}_head"
            )
            outputs[name] = dense(features[tower]).astype(jnp.float32)
        return tuple(outputs[name] for name in names)


def build(spec: EnvSpec, cfg: NetworkConfig, heads: Mapping[str, Head]) -> Network:
    """Builds a network with one output per head.

    `cfg.shared` puts all heads on one torso; otherwise each head has a torso of its own.

    Args:
      spec: the environment's spaces.
      cfg: torso, widths, activation.
      heads: name -> Head.
    Returns:
      A Network. `apply(params, obs, *names)` takes observations with any leading axes.
    Raises:
      InputError: the torso does not fit the observation space.
    """
    space = spec.observation
    torso = cfg.torso
    if torso == "auto":
        torso = "nature_cnn" if is_image(space) else "mlp"
    if torso != "mlp" and not is_image(space):
        raise InputError(f"network.torso {torso} needs image observations of 3 axes, not {space}: use mlp")
    if torso == "nature_cnn" and min(sorted(space.shape)[1:]) < 36:
        raise InputError(
            f"network.torso nature_cnn needs images of 36 x 36 or more, not {space.shape}: use impala or mlp"
        )
    module = _Towers(space, cfg, torso, tuple(heads.items()))
    dtype = jnp.dtype(space.dtype)

    def init(key):
        obs = jnp.zeros((1, *space.shape), dtype)
        return jax.jit(module.init, static_argnums=2)(key, obs, tuple(heads))["params"]

    def apply(params, obs, *names):
        batch = obs.shape[: obs.ndim - len(space.shape)]
        outputs: Any = module.apply({"params": params}, obs, names or tuple(heads))
        return tuple(y.reshape(*batch, y.shape[-1]) for y in outputs)

    return Network(init, apply)


def parameter_count(params: PyTree) -> int:
    """Number of scalars in a tree of arrays."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
