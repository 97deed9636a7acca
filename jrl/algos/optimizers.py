"""Optimizers, as a section of each algorithm's Config: `algo.optimizer: {name: adamw, weight_decay: 0.01}`.

An optimizer is an optax transformation of the mean gradient to a direction, after clipping. It has no step size:
`agent.descend` subtracts `lr` times the direction, so `algo.lr` and its schedule are the same for all optimizers.

Weight decay is decoupled (arXiv:1711.05101): the direction contains weight_decay times the weight. It applies to arrays
whose name ends in `kernel`: the weights of dense layers, convolutions and cores. Biases, normalisation, embeddings,
log_std and temperatures have none.
"""

import functools
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from jrl.fields.bounds import NonNegative, Positive
from jrl.types import PyTree, hyperparams

Decay = Annotated[float, Interval(ge=0, lt=1)]  # decay of an exponential average, per step


@hyperparams
class Adam:
    """Adam (arXiv:1412.6980)."""

    name: Literal["adam"] = "adam"
    b1: Decay = 0.9  # decay of the mean gradient
    b2: Decay = 0.999  # decay of the mean squared gradient
    eps: Positive | None = None  # added to the denominator; null: algo.adam_eps


@hyperparams
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"
    weight_decay: NonNegative = 0.01  # share of a weight that a step of size 1 subtracts from it
    b1: Decay = 0.9  # decay of the mean gradient
    b2: Decay = 0.999  # decay of the mean squared gradient
    eps: Positive | None = None  # added to the denominator; null: algo.adam_eps


@hyperparams
class Muon:
    """Orthogonalised momentum for matrices (Jordan, 2024), scaled to the size of Adam's steps (arXiv:2502.16982).

    Matrices are the weights of dense layers and cores. Adam with Nesterov momentum changes all other arrays.
    """

    name: Literal["muon"] = "muon"
    weight_decay: NonNegative = 0.0  # share of a weight that a step of size 1 subtracts from it
    momentum: Decay = 0.95  # decay of the mean gradient of matrices
    b1: Decay = 0.9  # decay of the mean gradient of other arrays
    b2: Decay = 0.999  # decay of the mean squared gradient of other arrays
    eps: Positive | None = None  # added to the denominators; null: algo.adam_eps


@hyperparams
class Sgd:
    """The gradient, or with momentum the sum of gradients that decays by it."""

    name: Literal["sgd"] = "sgd"
    weight_decay: NonNegative = 0.0  # share of a weight that a step of size 1 subtracts from it
    momentum: Decay = 0.0  # decay of the sum
    nesterov: bool = False  # looks one step of the momentum ahead


@hyperparams
class RmsProp:
    """g / sqrt(mean g^2 + eps), and momentum as in Sgd. The mean starts at 1, as in TensorFlow, which IMPALA used."""

    name: Literal["rmsprop"] = "rmsprop"
    weight_decay: NonNegative = 0.0  # share of a weight that a step of size 1 subtracts from it
    decay: Decay = 0.99  # decay of the mean squared gradient
    eps: Positive = 1e-5  # added to the mean squared gradient
    momentum: Decay = 0.0  # decay of the sum of steps


Optimizer = Adam | AdamW | Muon | Sgd | RmsProp


def make(cfg: Any, *, flat: bool = True, statistics: bool = False) -> optax.GradientTransformation:
    """Returns clipping and the optimizer of a Config, whose floats may be traced, without the step size.

    "Gradients" of running statistics are their changes (`networks.batch_renorm`), which the optimizer does not change.

    Args:
      cfg: Config of an algorithm.
      flat: whether to join all arrays into one vector: ten small arrays have ten times the overhead of one. Not for
        large arrays: gathering the gradient of two stacked 256 x 256 critics takes longer than their update (8 ms and
        4 ms on two CPU cores).
      statistics: whether parameters contain running statistics.
    """
    per_leaf = []
    if cfg.max_grad_value is not None:
        per_leaf.append(optax.clip(cfg.max_grad_value))
    if cfg.max_leaf_norm is not None:
        norm = lambda g: jnp.sqrt(jnp.sum(g**2))
        clip = lambda g: g * jnp.minimum(1.0, cfg.max_leaf_norm / (norm(g) + 1e-6))
        per_leaf.append(optax.stateless(lambda updates, params: jax.tree.map(clip, updates)))
    steps = [] if cfg.max_grad_norm is None else [optax.clip_by_global_norm(cfg.max_grad_norm)]
    steps += _direction(cfg.optimizer, cfg.adam_eps)
    flat = flat and not isinstance(cfg.optimizer, Muon)  # Muon needs the shapes
    decays = [] if isinstance(cfg.optimizer, Adam) else [optax.add_decayed_weights(cfg.optimizer.weight_decay, _decays)]
    whole = optax.chain(*per_leaf, *([optax.flatten(optax.chain(*steps))] if flat else steps), *decays)
    if not statistics:
        return whole
    kind = lambda params: jax.tree.map_with_path(
        lambda path, x: "statistic" if is_statistic(path) else "learned", params
    )
    return optax.partition({"learned": whole, "statistic": optax.identity()}, kind)


def is_statistic(path: tuple[Any, ...]) -> bool:
    """Returns whether the parameter at a path is a running statistic of `networks.batch_renorm`."""
    return _name(path).startswith("running_")


def _direction(optimizer: Optimizer, adam_eps: Any) -> list[optax.GradientTransformation]:
    """Returns the steps from a clipped gradient to the direction, without weight decay."""
    match optimizer:
        case Sgd(momentum=momentum, nesterov=nesterov):
            return [optax.trace(momentum, nesterov)]
        case RmsProp(decay=decay, eps=eps, momentum=momentum):
            return [optax.scale_by_rms(decay, eps, initial_scale=1.0), optax.trace(momentum)]
    eps = adam_eps if optimizer.eps is None else optimizer.eps
    if isinstance(optimizer, Muon):
        # a step size of -1, because `agent.descend` subtracts the direction
        muon: Any = functools.partial(optax.contrib.muon, -1.0, consistent_rms=0.2)
        averages = {"beta": optimizer.momentum, "adam_b1": optimizer.b1, "adam_b2": optimizer.b2}
        return [muon(**averages, eps=eps, muon_weight_dimension_numbers=_matrices)]
    return [optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=eps)]


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)


def _is_kernel(path: tuple[Any, ...]) -> bool:
    return _name(path).endswith("kernel")


def _decays(params: PyTree) -> PyTree:
    """Returns the arrays with weight decay, a tree of bools."""
    return jax.tree.map_with_path(lambda path, x: _is_kernel(path), params)


def _matrices(params: PyTree) -> PyTree:
    """Returns the axes of each matrix, or of each stack of matrices of several critics; None for other arrays."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)
    is_matrix = lambda path, x: _is_kernel(path) and x.ndim in (2, 3)  # convolutions have 4 or more axes
    return jax.tree.map_with_path(lambda path, x: axes if is_matrix(path, x) else None, params)
