"""Sampling in proportion to changing weights: a binary tree of sums in one array, root at 1, node i over 2i and 2i + 1.

Every inner node is exactly the f32 sum of its two children, whatever the order of updates. So a node is 0 only if all
its leaves are 0, and a search never ends at a leaf of 0.

The walks up and down are loops, not unrolled, because XLA would fuse each level with all previous levels.
"""

import jax
import jax.numpy as jnp

from jrl.ops import random
from jrl.types import Key


def init(size: int):
    """Makes a tree of `size` leaves of 0: f32 [2 * P], P the next power of two."""
    return jnp.zeros((2 << max(size - 1, 0).bit_length(),), jnp.float32)


def total(tree):
    """Returns the sum of all leaves, [] f32."""
    return tree[1]


def get(tree, index):
    """Returns the leaves at `index`."""
    return tree.at[index + tree.size // 2].get(mode="promise_in_bounds")


def update(tree, index, value):
    """Sets leaves and updates the sums above them.

    Args:
      index: [M] i32; of equal indices any may win.
      value: [M] f32 >= 0.
    """
    depth = _depth(tree)
    full = min(depth, max(index.size - 1, 0).bit_length())  # from this depth up whole levels are summed
    node = index + tree.size // 2
    tree = tree.at[node].set(value, mode="promise_in_bounds")

    def up(_, carry):
        tree, node = carry
        node = node // 2
        children = tree.reshape(-1, 2).at[node].get(mode="promise_in_bounds")
        return tree.at[node].set(children[:, 0] + children[:, 1], mode="promise_in_bounds"), node

    tree, _ = jax.lax.fori_loop(0, depth - full, up, (tree, node))
    levels = [tree[1 << full : 2 << full]]
    while levels[0].size > 1:
        pairs = levels[0].reshape(-1, 2)
        levels.insert(0, pairs[:, 0] + pairs[:, 1])
    return jax.lax.dynamic_update_slice(tree, jnp.concatenate([jnp.zeros((1,), jnp.float32), *levels]), (0,))


def find(tree, mass, key: Key | None = None):
    """Returns the leaves at points of [0, total), if leaves are side by side and each is as wide as its weight.

    Args:
      mass: [N] f32.
      key: draws the points again within the nodes at half the depth if the tree `is_deep`; None: points stay as they
        are. A float32 distinguishes 2^24 points. With more leaves some would never be found, and of 2^20 equal leaves
        some are found a sixteenth more often than others.
    Returns:
      index [N] i32, never a leaf of weight 0 unless all are 0, and the weights [N] of these leaves.
    """

    def down(_, carry):
        node, mass, _ = carry
        children = tree.reshape(-1, 2).at[node].get(mode="promise_in_bounds")
        left, right = children[:, 0], children[:, 1]
        to_right = (mass >= left) & (right > 0)  # rounding can leave a mass beyond the sum
        return 2 * node + to_right, jnp.where(to_right, mass - left, mass), jnp.where(to_right, right, left)

    depth = _depth(tree)
    half = depth // 2 if key is not None and is_deep(tree.size // 2) else depth
    start = (jnp.ones(mass.shape, jnp.int32), mass, jnp.broadcast_to(total(tree), mass.shape))
    node, mass, weight = jax.lax.fori_loop(0, half, down, start)
    if half < depth:
        # redrawing is correct: the points of all parts together are uniform within each node
        start = (node, weight * random.uniform(key, mass.shape), weight)
        node, _, weight = jax.lax.fori_loop(half, depth, down, start)
    return node - tree.size // 2, weight


def is_deep(size: int) -> bool:
    """Returns whether a tree of `size` leaves is too wide for float32 points."""
    return size > 2**20


def _depth(tree) -> int:
    """Returns the depth of the leaves; the root has depth 0."""
    return tree.size.bit_length() - 2
