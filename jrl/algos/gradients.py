"""Gradients of an algorithm separate from its update, by replacing its optimizer.

    with gradients.taken():
        algo = dqn.make(cfg, spec)      # update changes no parameter: state.opt_state holds the mean gradient
    with gradients.given():
        algo = dqn.make(cfg, spec)      # update makes one step with the gradient in state.opt_state

So loss, targets, clipping, step size and target networks are those of `Algo.update`. It works for algorithms whose
steps use `agent.descend`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jrl.algos.agent import Replace, replacement
from jrl.types import Array, PyTree


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


@contextlib.contextmanager
def _replace_optimizer(wrap: Replace) -> Iterator[None]:
    token = replacement.set(wrap)
    try:
        yield
    finally:
        replacement.reset(token)


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
