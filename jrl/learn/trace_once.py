"""Traces a function once for both its output shapes and its use."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jrl.types import PyTree


def trace_once(fn: Callable[..., PyTree], *like: Any) -> tuple[Callable[..., PyTree], PyTree]:
    """Returns `fn` for arguments of these shapes and dtypes, and the shapes and dtypes of its results.

    Tracing an update takes 0.1 s and more; the returned function replays the traced operations.

    Args:
      fn: pure function; it may use arrays of the surrounding program.
      like: arguments, or their `jax.ShapeDtypeStruct`.
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*like)
    flat, tree = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(tree, flat(*jax.tree.leaves(args))), shapes
