"""Results of a step as few arrays: on a GPU each array that a loop stacks costs a kernel per step, however small."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.types import Array, PyTree


@struct.dataclass
class Packed:
    """A tree whose arrays of one shape are rows of one array of words; a loop may stack its leaves."""

    words: dict[Any, Array]  # shape -> [k, *shape] u32
    others: list[Array]  # arrays of other types, and those that are alone with their shape
    tree: Any = struct.field(pytree_node=False)
    # per leaf: (shape, row, bit, dtype); bit None: the whole word, shape None: row `row` of `others`
    places: tuple[tuple[Any, ...], ...] = struct.field(pytree_node=False)


def pack(tree: PyTree) -> Packed:
    """Packs arrays of 32 bits into words, and arrays of bool into bits of words."""
    leaves, structure = jax.tree.flatten(tree)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(leaves):
        if x.dtype == bool or x.dtype.itemsize == 4:
            by_shape.setdefault(x.shape, []).append(i)
    places: list[tuple[Any, ...]] = [()] * len(leaves)
    words: dict[Any, Array] = {}
    for shape, members in by_shape.items():
        if len(members) == 1:
            continue
        rows: list[Array] = []
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
    others: list[Array] = []
    for i, x in enumerate(leaves):
        if not places[i]:
            places[i] = (None, len(others), None, x.dtype)
            others.append(x)
    return Packed(words, others, structure, tuple(places))


def unpack(packed: Packed) -> PyTree:
    """Returns the tree of a Packed, or of its stacked leaves [T, ...] with leaves [T, ...]."""

    def leaf(shape, row, bit, dtype) -> Array:
        if shape is None:
            return packed.others[row]
        found = packed.words[shape]
        word = jax.lax.index_in_dim(found, row, axis=found.ndim - len(shape) - 1, keepdims=False)
        return jax.lax.bitcast_convert_type(word, dtype) if bit is None else ((word >> bit) & 1).astype(bool)

    return jax.tree.unflatten(packed.tree, [leaf(*place) for place in packed.places])
