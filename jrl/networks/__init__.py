"""Networks as pairs of pure functions: `build(spec, config, heads) -> Network(init, apply)`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl.networks.config import NetworkConfig
from jrl.networks.dense import Dense
from jrl.networks.noisy import NoisyDense
from jrl.networks.torsos import ACTIVATIONS, TORSOS, is_image, kernel_init, to_float
from jrl.types import Array, EnvSpec, InputError, Key, PyTree, Space

__all__ = ["Head", "Network", "NetworkConfig", "build", "is_image", "parameter_count"]


class Head(NamedTuple):
    """One output of the network: `size` numbers per observation, last layer initialised with gain `scale`.

    With `noise` the head's layers are `noisy.NoisyDense`, whose deviations start at `noise`.
    """

    size: int
    scale: float = 1.0
    noise: Any = None  # a scalar, maybe traced; None: ordinary layers


class Network(NamedTuple):
    """Any flax, nnx or hand-written network fits behind these two functions."""

    init: Callable[[Key], PyTree]  # key -> params
    # (params, obs[..., *], *head names, key=None) -> one f32 [..., size] per name; key: of the noise in noisy layers
    apply: Callable[..., tuple[Array, ...]]


class _Towers(nn.Module):
    space: Space
    cfg: NetworkConfig
    torso: str
    heads: tuple[tuple[str, Head], ...]

    @nn.compact
    def __call__(self, obs, names, key=None):
        x, features = to_float(self.space, obs), {}
        outputs = {}
        keys: Any = None if key is None else jax.random.split(key, (len(self.heads), len(self.cfg.head_hidden) + 1))
        for i, (name, head) in enumerate(self.heads):
            if name not in names:
                continue
            tower = "torso" if self.cfg.shared else f"{name}_torso"
            if tower not in features:
                features[tower] = TORSOS[self.torso](self.cfg, name=tower)(x)
            y = features[tower]
            for layer, width in enumerate(self.cfg.head_hidden):
                dense = self._dense(head, width, math.sqrt(2), f"{name}_hidden_{layer}")
                y = dense(y, None if keys is None else keys[i, layer])
                if self.cfg.layer_norm:
                    y = nn.LayerNorm(dtype=self.cfg.dtype, name=f"{name}_norm_{layer}")(y)
                y = ACTIVATIONS[self.cfg.activation](y)
            dense = self._dense(head, head.size, head.scale, f"{name}_head")
            outputs[name] = dense(y, None if keys is None else keys[i, -1]).astype(jnp.float32)
        return tuple(outputs[name] for name in names)

    def _dense(self, head, features, scale, name):
        """A layer of a head: (x, key or None) -> y."""
        if head.noise is not None:
            return NoisyDense(features, head.noise, self.cfg.dtype, name=name)
        dense = Dense(features, dtype=self.cfg.dtype, kernel_init=kernel_init(self.cfg, scale), name=name)
        return lambda x, key: dense(x)


def build(spec: EnvSpec, cfg: NetworkConfig, heads: Mapping[str, Head]) -> Network:
    """Builds a network with one output per head.

    `cfg.shared` puts all heads on one torso; otherwise each head has a torso of its own. `cfg.head_hidden` gives each
    head dense layers of its own behind the torso.

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

    def apply(params, obs, *names, key=None):
        batch = obs.shape[: obs.ndim - len(space.shape)]
        outputs: Any = module.apply({"params": params}, obs, names or tuple(heads), key)
        return tuple(y.reshape(*batch, y.shape[-1]) for y in outputs)

    return Network(init, apply)


def parameter_count(params: PyTree) -> int:
    """Number of scalars in a tree of arrays."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
