"""Encoders from an observation, an array or a tree of arrays, to a feature vector."""

import difflib
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl import spaces
from jrl.networks import initial
from jrl.networks.config import NetworkConfig
from jrl.networks.torsos import CNNS, NATURE_LEAST, Mlp, is_image, to_float
from jrl.types import Array, Discrete, InputError, Leaf, MultiDiscrete, PyTree, Space

ENCODERS = ("flat", "mlp", "embedding", *CNNS)
DENSE = ("auto", "mlp")  # torsos that consist of the dense layers after the encoders


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
            near = difflib.get_close_matches(path, found, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(repr(p) for p in found)}"
            errors.append(f"network.encoders: the observation has no array {path!r}: {fix}")
        elif name not in ENCODERS:
            errors.append(f"network.encoders.{path}: unknown encoder {name!r}: choose one of {', '.join(ENCODERS)}")
        elif message := _misfit(found[path], name):
            errors.append(f"network.encoders.{path}: {message}")
    if errors:
        raise InputError(*errors)
    return {path: cfg.encoders.get(path) or default(leaf, cfg) for path, leaf in found.items()}


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
    return None


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
        table: Any = initial.parameter(self, "table", init, (sum(sizes), self.width))
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
    def __call__(self, obs):
        chosen, cfg = choose(self.space, self.cfg), self.cfg
        features, named = [], names([path for path, encoder in chosen.items() if encoder != "flat"])
        for (path, leaf), x in zip(spaces.leaves(self.space), jax.tree.leaves(obs), strict=True):
            name, encoder = named.get(path), chosen[path]
            if encoder == "flat":
                features.append(flat(leaf, cfg, x))
            elif encoder == "embedding":
                features.append(_Embedding(leaf, cfg.encoder_hidden[-1], name=name)(x))
            elif encoder == "mlp":
                features.append(Mlp(cfg, cfg.encoder_hidden, name=name)(flat(leaf, cfg, x)))
            else:
                features.append(CNNS[encoder](cfg, name=name)(to_float(leaf, x, cfg.image_max)))
        return jnp.concatenate([x.astype(jnp.float32) for x in features], -1)


__all__ = ["DENSE", "ENCODERS", "Encoders", "choose", "default", "flat", "flattened", "names", "single"]
