"""Scans over time whose body is small or whose results are many, functions that are traced once, exact sums."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

__all__ = ["Packed", "compensated_add", "elementwise", "pack", "small", "trace_once", "unpack"]

_UNROLL = 16  # loop steps per kernel on an accelerator; 8 was slower on an H100
_UNROLL_ON_CPU = 4  # 2 is slower, and 8 is not faster
_SMALL = 250  # most operations of a body that is compiled four times: acting by an MLP and a step of CartPole are 200


def elementwise(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, reverse: bool = False) -> Any:
    """Returns the result of `lax.scan` for an elementwise body, fast on every backend.

    An accelerator starts a kernel per loop step, which takes longer than such a body, so several steps share a kernel.
    A CPU starts no kernels; there unrolled loops over many environments are up to five times slower.
    """
    scan = functools.partial(lax.scan, body, reverse=reverse)
    return lax.platform_dependent(init, xs, cpu=scan, default=functools.partial(scan, unroll=_UNROLL))


def small(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> Any:
    """Returns the result of `lax.scan` for a body of small arrays on a CPU.

    Each iteration of a loop copies the carry. With four steps per iteration 1024 steps of four Pendulums and a policy
    of 64 x 64 take 2.4 ms instead of 3.3. A body of many operations is not unrolled, because compiling takes longer.
    """
    traced = jax.make_jaxpr(body, return_shape=True)(init, jax.tree.map(lambda x: x[0], xs))
    unroll = _UNROLL_ON_CPU if _count_operations(traced[0].jaxpr) <= _SMALL else 1
    return lax.scan(_replay(*traced), init, xs, unroll=unroll)


def _count_operations(jaxpr: Jaxpr) -> int:
    inner = lambda eqn: [x for x in jax.tree.leaves(list(eqn.params.values())) if isinstance(x, ClosedJaxpr)]
    return sum(1 + sum(_count_operations(x.jaxpr) for x in inner(eqn)) for eqn in jaxpr.eqns)


def trace_once(fn: Callable[..., Any], *like: Any) -> tuple[Callable[..., Any], Any]:
    """Returns `fn` for arguments of these shapes and dtypes, and the shapes and dtypes of its results.

    Tracing an update takes 0.1 s and more; the returned function replays the traced operations.

    Args:
      fn: pure function; it may use arrays of the surrounding program.
      like: arguments, or their `jax.ShapeDtypeStruct`.
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*like)
    return _replay(jaxpr, shapes), shapes


def _replay(jaxpr: ClosedJaxpr, shapes: Any) -> Callable[..., Any]:
    flat, tree = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(tree, flat(*jax.tree.leaves(args)))


@struct.dataclass
class Packed:
    """A tree whose arrays of one shape are rows of one array of words; a loop may stack its leaves.

    On a GPU each array that a loop stacks costs a kernel per step, however small.
    """

    words: dict[Any, jax.Array]  # shape -> [k, *shape] u32
    others: list[jax.Array]  # arrays of other types, and those that are alone with their shape
    tree: Any = struct.field(pytree_node=False)
    # per leaf: (shape, row, bit, dtype); bit None: the whole word, shape None: row `row` of `others`
    places: tuple[tuple[Any, ...], ...] = struct.field(pytree_node=False)


def pack(tree: Any) -> Packed:
    """Packs arrays of 32 bits into words, and arrays of bool into bits of words."""
    leaves, structure = jax.tree.flatten(tree)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(leaves):
        if x.dtype == bool or x.dtype.itemsize == 4:
            by_shape.setdefault(x.shape, []).append(i)
    places: list[tuple[Any, ...]] = [()] * len(leaves)
    words: dict[Any, jax.Array] = {}
    for shape, members in by_shape.items():
        if len(members) == 1:
            continue
        rows: list[jax.Array] = []
        flags = [i for i in members if leaves[i].dtype == bool]
        for i in members:
            if leaves[i].dtype != bool:
                places[i] = (shape, len(rows), None, leaves[i].dtype)
                rows.append(jax.lax.bitcast_convert_type(leaves[i], jnp.uint32))
        for first in range(0, len(flags), 32):
            some = flags[first : first + 32]
            for bit, i in enumerate(some):
                places[i] = (shape, len(rows), bit, leaves[i].dtype)
            rows.append(sum(leaves[i].astype(jnp.uint32) << bit for bit, i in enumerate(some)))
        words[shape] = jnp.stack(rows)
    others: list[jax.Array] = []
    for i, x in enumerate(leaves):
        if not places[i]:
            places[i] = (None, len(others), None, x.dtype)
            others.append(x)
    return Packed(words, others, structure, tuple(places))


def unpack(packed: Packed) -> Any:
    """Returns the tree of a Packed, or of its stacked leaves [T, ...] with leaves [T, ...]."""

    def leaf(shape, row, bit, dtype) -> jax.Array:
        if shape is None:
            return packed.others[row]
        found = packed.words[shape]
        word = jax.lax.index_in_dim(found, row, axis=found.ndim - len(shape) - 1, keepdims=False)
        return jax.lax.bitcast_convert_type(word, dtype) if bit is None else ((word >> bit) & 1).astype(bool)

    return jax.tree.unflatten(packed.tree, [leaf(*place) for place in packed.places])


def compensated_add(total: Any, rest: Any, x: Any) -> tuple[jax.Array, jax.Array]:
    """Adds `x` to a sum that is stored as two numbers (Kahan 1965, with the exact error of Knuth's 2Sum).

    Args:
      total: f32, the sum rounded to float32.
      rest:  f32 of the same shape, the rounding error: at most half a unit in the last place of `total`.
      x:     f32 of the same shape.
    Returns:
      The new (total, rest); `total` alone is correct to its last place.

    2^24 + 1 is not a float32 number:

    >>> import jax.numpy as jnp
    >>> total, rest = compensated_add(jnp.float32(2.0**24), jnp.float32(0.0), jnp.float32(1.0))
    >>> float(total), float(rest), float(compensated_add(total, rest, jnp.float32(1.0))[0]) - 2**24
    (16777216.0, 1.0, 2.0)
    """
    coarse = total + x
    added = coarse - total
    rest = rest + ((total - (coarse - added)) + (x - added))  # the exact error of the first line
    total = coarse + rest
    return total, rest - (total - coarse)
