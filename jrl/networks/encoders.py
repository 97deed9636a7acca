"""Encoders and torsos: from an observation, an array or a tree of arrays, to a feature vector.

An encoder reads one array; the torso is the dense layers after them, or the CNN of a single image.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jrl import registry, spaces
from jrl.errors import did_you_mean
from jrl.fields.hyper import RESIDUAL, NetworkConfig
from jrl.networks.dense import Dense, parameter
from jrl.ops import random
from jrl.types import Array, Box, Discrete, InputError, Leaf, MultiDiscrete, PyTree, Space

# CNN -> its module, a class of `NetworkConfig`, for `cnn`
CNNS = {
    "nature_cnn": "jrl.networks.conv:NatureCnn",
    "impala": "jrl.networks.conv:ImpalaResNet",
    "small_cnn": "jrl.networks.conv:SmallCnn",
}
# torso of residual blocks -> its module, as for CNNS
BLOCKS = {
    "simba": "jrl.networks.residual:Simba",
    "simba_v2": "jrl.networks.residual:SimbaV2",
    "bro": "jrl.networks.residual:Bro",
    "flash": "jrl.networks.residual:Flash",
}
ENCODERS = ("flat", "mlp", "embedding", "grid", *CNNS)
DENSE = ("auto", "mlp", *RESIDUAL)  # torsos that consist of the layers after the encoders
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "elu": nn.elu,
}
_GAIN = math.sqrt(2)  # gain before an activation that halves the variance


def layer_options(cfg: NetworkConfig) -> dict[str, Any]:
    return {"dtype": cfg.dtype, "weights": cfg.init, "scale": _GAIN}


def dense_options(cfg: NetworkConfig) -> dict[str, Any]:
    return {**layer_options(cfg), "has_unit_weights": cfg.unit_weights}


NATURE_LEAST = 36  # height and width of the smallest image for nature_cnn
GRID_LEAST = 4  # height and width of the smallest grid for the three 2 x 2 windows of the encoder grid
_MOST_VALUES = 256  # values of a cell that the encoder grid embeds: all of uint8


def is_image(space: Space) -> bool:
    return (
        isinstance(space, Box)
        and len(space.shape) == 3
        and (space.dtype == "uint8" or np.issubdtype(np.dtype(space.dtype), np.floating))
    )


def to_float(space: Leaf, obs: Array, image_max: float = 255.0) -> Array:
    """Returns observations [..., *space.shape] as float32 features [N, F] or images [N, H, W, C] in [0, 1].

    Integers become one-hot vectors. An array with three axes is an image, with channels on `spaces.channel_axis`. uint8
    is divided by 255, in images by `image_max`.
    """
    if isinstance(space, Discrete):
        return jax.nn.one_hot(obs.reshape(-1), space.n)
    if isinstance(space, MultiDiscrete):
        flat = obs.reshape(-1, len(space.nvec))
        return jnp.concatenate([jax.nn.one_hot(flat[:, i], n) for i, n in enumerate(space.nvec)], -1)
    x = obs.astype(jnp.float32)
    if obs.dtype == jnp.uint8:
        x = x / (image_max if is_image(space) else 255.0)
    if not isinstance(space, Box) or not is_image(space):
        return x.reshape(-1, math.prod(space.shape))
    assert isinstance(space, Box)
    x = x.reshape(-1, *space.shape)
    return jnp.moveaxis(x, 1, 3) if spaces.channel_axis(space) == 0 else x


def activated(module: nn.Module, cfg: NetworkConfig, x: Array, valid: Array | None, name: str | None = None) -> Array:
    """Returns a dense layer's output [N, F] after dropout, normalisation (the child `name` of `module`) and activation.

    Dropout is on if `module` has the random stream "dropout"; `valid`: see `networks.Network`.
    """
    if cfg.dropout and module.has_rng("dropout"):
        keep = random.uniform(module.make_rng("dropout"), x.shape) >= cfg.dropout
        x = jnp.where(keep, x / (1.0 - cfg.dropout), 0.0)
    activation = ACTIVATIONS[cfg.activation]
    if cfg.norm_after_activation:
        return normalized(cfg, activation(x), valid, name)
    return activation(normalized(cfg, x, valid, name))


def normalized(cfg: NetworkConfig, x: Array, valid: Array | None, name: str | None = None) -> Array:
    """Returns x [N, F] after `cfg.norm`, the child `name` of the module that calls it."""
    if cfg.norm == "layer":
        return nn.LayerNorm(dtype=cfg.dtype, name=name)(x)
    if cfg.norm == "batch_renorm":
        from jrl.networks.batch_renorm import BatchRenorm

        return BatchRenorm(cfg.dtype, name=name)(x, valid)
    return x


class Mlp(nn.Module):
    """Dense layers of widths `hidden` (None: `cfg.hidden`), each followed by dropout, `cfg.norm` and the activation.

    With `cfg.norm_after_activation` the norm is after the activation, and the input has a norm, too. `beside` is a
    second input, see Dense; `valid`: see `networks.Network`.
    """

    cfg: NetworkConfig
    hidden: tuple[int, ...] | None = None

    @nn.compact
    def __call__(self, x, beside=None, valid=None):
        if self.cfg.norm_after_activation:
            x = normalized(self.cfg, x, valid, "input_norm")
        for width in self.cfg.hidden if self.hidden is None else self.hidden:
            x, beside = Dense(width, **dense_options(self.cfg))(x, beside), None
            x = activated(self, self.cfg, x, valid)
        return x


def layers(cfg: NetworkConfig, name: str) -> nn.Module:
    """Returns the torso's layers of widths `cfg.hidden`, which are called as a Mlp."""
    module = registry.load(BLOCKS[cfg.torso], "network.torso") if cfg.torso in RESIDUAL else Mlp
    return module(cfg, name=name)


def last_layer(cfg: NetworkConfig, size: int, name: str, scale: float = 1.0) -> nn.Module:
    """Returns the layer from features to `size` outputs, with the gain `scale` of orthogonal kernels."""
    if cfg.torso == "simba_v2":
        return registry.load("jrl.networks.residual:UnitHead", "network.torso")(size, name=name)
    # float32, because bfloat16 would round a value of 300 to steps of 2
    return Dense(size, weights=cfg.init, scale=scale, has_unit_weights=cfg.torso == "flash", name=name)


def cnn(name: str) -> type[nn.Module]:
    """Returns the class of a CNN of `CNNS`."""
    return registry.load(CNNS[name], "network.torso")


def is_custom(cfg: NetworkConfig) -> bool:
    """Returns whether `cfg.torso` names a user's torso."""
    return ":" in cfg.torso or "." in cfg.torso or registry.registered(cfg.torso) is not None


# ---------------------------------------------------------------- encoders


def single(space: Space, cfg: NetworkConfig) -> Leaf | None:
    """Returns the only array space of an observation without encoders; None if there are several, or encoders."""
    found = spaces.leaves(space)
    return found[0][1] if len(found) == 1 and not cfg.encoders else None


def choose(space: Space, cfg: NetworkConfig) -> dict[str, str]:
    """Returns the encoder name of each array of an observation, by path.

    Raises:
      InputError: `network.encoders` names an unknown array or encoder, or an encoder that does not fit.

    >>> from jrl.types import Box, Dict
    >>> camera, speed = Box((84, 84, 3), "uint8", 0, 255), Box((2,))
    >>> choose(Dict((("camera", camera), ("speed", speed))), NetworkConfig())
    {'camera': 'nature_cnn', 'speed': 'flat'}
    """
    found = dict(spaces.leaves(space))
    errors = []
    for path, name in cfg.encoders.items():
        if path not in found:
            fix = did_you_mean(path, found) or f": it has {', '.join(map(repr, found))}"
            errors.append(f"network.encoders: the observation has no array {path!r}{fix}")
        elif name not in ENCODERS:
            errors.append(f"network.encoders.{path}: unknown encoder {name!r}: choose one of {', '.join(ENCODERS)}")
        elif message := _misfit(found[path], name):
            errors.append(f"network.encoders.{path}: {message}")
    if errors:
        raise InputError(*errors)
    return {path: cfg.encoders.get(path) or default(leaf, cfg) for path, leaf in found.items()}


def convolves(space: Space, cfg: NetworkConfig) -> bool:
    """Returns whether a network of jrl's own encoders convolves an array of the observation."""
    return not (cfg.flatten or is_custom(cfg)) and any(name in ("grid", *CNNS) for name in choose(space, cfg).values())


def default(leaf: Leaf, cfg: NetworkConfig) -> str:
    """Returns the default encoder of an array by its shape and dtype: a CNN for images, else "flat"."""
    if cfg.flatten or not is_image(leaf) or cfg.torso == "mlp":
        return "flat"
    if cfg.torso in CNNS:
        if message := _misfit(leaf, cfg.torso):
            raise InputError(f"network.torso {cfg.torso}: {message}")
        return cfg.torso
    return "nature_cnn" if _misfit(leaf, "nature_cnn") is None else "small_cnn"


def _misfit(leaf: Leaf, name: str) -> str | None:
    """Returns why an encoder cannot read an array; None if it can."""
    if name in CNNS and not is_image(leaf):
        return f"{name} needs images with 3 axes of uint8 or floats, not {leaf}: use mlp or flat"
    if name == "nature_cnn" and min(sorted(leaf.shape)[1:]) < NATURE_LEAST:
        least = f"{NATURE_LEAST} x {NATURE_LEAST}"
        return f"{name} needs images of {least} or more, not {leaf.shape}: use impala, small_cnn or mlp"
    if name == "embedding" and not isinstance(leaf, Discrete | MultiDiscrete):
        return f"an embedding needs integers, Discrete or MultiDiscrete, not {leaf}: use mlp or flat"
    if name == "grid":
        if not (isinstance(leaf, Box) and np.dtype(leaf.dtype).kind in "iu" and len(leaf.shape) in (2, 3)):
            return f"grid needs a Box of integers with 2 or 3 axes, not {leaf}: use mlp or flat"
        if min(cells(leaf, leaf.bounds()[0]).shape[1:3]) < GRID_LEAST:
            return f"grid needs {GRID_LEAST} x {GRID_LEAST} cells or more, not {leaf.shape}: use mlp or flat"
        if not (num := max(grid_values(leaf)[1])) <= _MOST_VALUES:
            return f"grid needs bounds with at most {_MOST_VALUES} values, not {num:g}: set the Box's low and high"
    return None


def cells(leaf: Box, x: Any) -> Any:
    """Returns grids [..., *leaf.shape] as [N, H, W, C]."""
    if len(leaf.shape) == 2:
        return x.reshape(-1, *leaf.shape, 1)
    x = x.reshape(-1, *leaf.shape)
    return x.transpose(0, 2, 3, 1) if spaces.channel_axis(leaf) == 0 else x


def grid_values(leaf: Box) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the least value and the number of values of each channel of a grid, by its bounds.

    >>> grid_values(Box((4, 4, 2), "int32", 0, (15.0, 13.0) * 16))
    ((0.0, 0.0), (16.0, 14.0))
    """
    low, high = (cells(leaf, bound) for bound in leaf.bounds())
    least = low.min((0, 1, 2))
    return tuple(least.tolist()), tuple((high.max((0, 1, 2)) - least + 1).tolist())


def flat(leaf: Leaf, cfg: NetworkConfig, x: Array) -> Array:
    """Returns an array [..., *leaf.shape] as vectors [N, F] f32; integers one-hot."""
    x = to_float(leaf, x, cfg.image_max)
    return x.reshape(x.shape[0], -1)


def flattened(space: Space, cfg: NetworkConfig, obs: PyTree) -> Array:
    """Returns an observation [..., *] as vectors [N, F], concatenated in the order of `spaces.leaves`."""
    arrays = [leaf for _, leaf in spaces.leaves(space)]
    return jnp.concatenate([flat(leaf, cfg, x) for leaf, x in zip(arrays, jax.tree.leaves(obs), strict=True)], -1)


class _Embedding(nn.Module):
    """Learned vectors for the values of each integer, concatenated."""

    leaf: Any  # Discrete or MultiDiscrete
    width: int

    @nn.compact
    def __call__(self, x):
        sizes = (self.leaf.n,) if isinstance(self.leaf, Discrete) else self.leaf.nvec
        init = nn.initializers.normal(1.0 / math.sqrt(self.width))
        table: Any = parameter(self, "table", init, (sum(sizes), self.width))
        one_hot = to_float(self.leaf, x)
        parts = jnp.split(one_hot, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)], -1)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return jnp.concatenate([p @ table[a : a + n] for p, a, n in zip(parts, starts, sizes, strict=True)], -1)


def names(paths: Sequence[str]) -> dict[str, str]:
    """Returns the unique parameter name of each encoder, by the path of its array.

    >>> names(["goal/at", "pos"])
    {'goal/at': 'encoder_goal_at', 'pos': 'encoder_pos'}
    >>> names(["goal/at", "goal_at"])
    {'goal/at': 'encoder_goal~1at', 'goal_at': 'encoder_goal_at'}
    """
    plain = [path.replace("/", "_") for path in paths]
    if len(set(plain)) < len(plain):
        plain = [spaces.escape(path) for path in paths]
    return {path: f"encoder_{name}" for path, name in zip(paths, plain, strict=True)}


class Encoders(nn.Module):
    """Encodes each array of an observation [..., *] and concatenates the features: [N, F]."""

    space: Space
    cfg: NetworkConfig

    @nn.compact
    def __call__(self, obs, valid=None):
        chosen, cfg = choose(self.space, self.cfg), self.cfg
        features, named = [], names([path for path, encoder in chosen.items() if encoder != "flat"])
        for (path, leaf), x in zip(spaces.leaves(self.space), jax.tree.leaves(obs), strict=True):
            name, encoder = named.get(path), chosen[path]
            if encoder == "flat":
                features.append(flat(leaf, cfg, x))
            elif encoder == "embedding":
                features.append(_Embedding(leaf, cfg.encoder_hidden[-1], name=name)(x))
            elif encoder == "grid":
                features.append(registry.load("jrl.networks.conv:Grid", "network.encoders")(leaf, cfg, name=name)(x))
            elif encoder == "mlp":
                features.append(Mlp(cfg, cfg.encoder_hidden, name=name)(flat(leaf, cfg, x), valid=valid))
            else:
                features.append(cnn(encoder)(cfg, name=name)(to_float(leaf, x, cfg.image_max)))
        return jnp.concatenate([x.astype(jnp.float32) for x in features], -1)
