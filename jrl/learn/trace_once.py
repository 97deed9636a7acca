"""A function whose results' shapes are asked for before it is used, traced once for both."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jrl.types import PyTree


def trace_once(fn: Callable[..., PyTree], *like: Any) -> tuple[Callable[..., PyTree], PyTree]:
    """Returns `fn` for arguments of these shapes and dtypes, and the shapes and dtypes of what it returns.

    To trace an update takes a tenth of a second and more; what was traced is taken over operation by operation.

    Args:
      fn: a pure function; it may use arrays of the program around it.
      like: arguments, or their `jax.ShapeDtypeStruct`.
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*like)
    flat, tree = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(tree, flat(*jax.tree.leaves(args))), shapes
