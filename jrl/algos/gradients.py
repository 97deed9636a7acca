"""Gradients of an algorithm separate from its update, by replacing its optimizer.

    with gradients.taken():
        algo = dqn.make(cfg, spec)      # update changes no parameter: state.opt_state holds the mean gradient
    with gradients.given():
        algo = dqn.make(cfg, spec)      # update makes one step with the gradient in state.opt_state

So loss, targets, clipping, step size and target networks are those of `Algo.update`. It works for algorithms whose
steps use `agent.descend`.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jrl.types import Array, PyTree

_Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]
_Made = Callable[[Any], optax.GradientTransformation]  # Config -> optimizer
_wrap: contextvars.ContextVar[_Wrap | None] = contextvars.ContextVar("gradients", default=None)


def adam(cfg: Any, *, flat: bool = True) -> optax.GradientTransformation:
    """Returns clipping and Adam without the step size, which may be a schedule: see `agent.descend`.

    Args:
      flat: whether to join all arrays into one vector: ten small arrays have ten times the overhead of one. Not for
        large
        arrays: gathering the gradient of two stacked 256 x 256 critics takes longer than their update (8 ms and 4 ms on
          two CPU cores).
    """
    per_leaf = []
    if cfg.max_grad_value is not None:
        per_leaf.append(optax.clip(cfg.max_grad_value))
    if cfg.max_leaf_norm is not None:
        norm = lambda g: jnp.sqrt(jnp.sum(g**2))
        clip = lambda g: g * jnp.minimum(1.0, cfg.max_leaf_norm / (norm(g) + 1e-6))
        per_leaf.append(optax.stateless(lambda updates, params: jax.tree.map(clip, updates)))
    steps = [] if cfg.max_grad_norm is None else [optax.clip_by_global_norm(cfg.max_grad_norm)]
    steps.append(optax.scale_by_adam(eps=cfg.adam_eps))
    return optax.chain(*per_leaf, *([optax.flatten(optax.chain(*steps))] if flat else steps))


@struct.dataclass
class Taken:
    """Accumulated gradients, instead of an optimizer's state."""

    total: PyTree  # sum of gradients, in the structure of the parameters
    count: Array  # [] f32, number of gradients

    def mean(self) -> PyTree:
        """Returns the mean gradient, in the structure of the parameters; 0 without gradients."""
        return jax.tree.map(lambda x: x / jnp.maximum(self.count, 1.0), self.total)


@struct.dataclass
class Given:
    """An optimizer's state, and the gradient of its next step."""

    state: PyTree
    gradient: PyTree  # in the structure of the parameters
    done: Array  # [] bool, the step has been made


def is_node(x: Any) -> bool:
    """Returns whether a part of a State's `opt_state` is a Taken or Given."""
    return isinstance(x, Taken | Given)


def optimizer(own: _Made) -> _Made:
    """Returns an algorithm's function from Config to optimizer, or its replacement within `taken` or `given`."""
    wrap = _wrap.get()
    return own if wrap is None else lambda cfg: wrap(own(cfg))


@contextlib.contextmanager
def _replace_optimizer(wrap: _Wrap) -> Iterator[None]:
    token = _wrap.set(wrap)
    try:
        yield
    finally:
        _wrap.reset(token)


def taken() -> contextlib.AbstractContextManager[None]:
    """Makes algorithms created within accumulate gradients in their `opt_state` (Taken) instead of learning."""

    def wrap(own: optax.GradientTransformation) -> optax.GradientTransformation:
        zeros: Callable[[PyTree], PyTree] = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        add = lambda gradient, state: Taken(jax.tree.map(jnp.add, state.total, gradient), state.count + 1.0)
        return optax.GradientTransformation(
            lambda params: Taken(zeros(params), jnp.zeros(())),
            lambda gradient, state, params=None: (zeros(gradient), add(gradient, state)),
        )

    return _replace_optimizer(wrap)


def given() -> contextlib.AbstractContextManager[None]:
    """Makes algorithms created within make one step per update, with the gradient in their `opt_state` (Given)."""

    def wrap(own: optax.GradientTransformation) -> optax.GradientTransformation:
        def update(gradient: PyTree, state: Given, params: PyTree = None):
            steps, after = own.update(state.gradient, state.state, params)
            pick = lambda old, new: jax.tree.map(lambda o, n: jnp.where(state.done, o, n), old, new)
            none = jax.tree.map(jnp.zeros_like, steps)
            return pick(none, steps), Given(pick(state.state, after), state.gradient, jnp.ones((), bool))

        start = lambda params: Given(own.init(params), jax.tree.map(jnp.zeros_like, params), jnp.zeros((), bool))
        return optax.GradientTransformation(start, update)

    return _replace_optimizer(wrap)


__all__ = ["Given", "Taken", "given", "is_node", "optimizer", "taken"]
