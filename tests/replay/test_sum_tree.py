"""The tree of sums against plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.replay import sum_tree

update, find = jax.jit(sum_tree.update), jax.jit(sum_tree.find)


def assert_is_consistent(tree):
    tree = np.asarray(tree)
    nodes = np.arange(1, tree.size // 2)
    np.testing.assert_array_equal(tree[nodes], tree[2 * nodes] + tree[2 * nodes + 1])  # to the last bit


@pytest.mark.parametrize(("size", "count"), [(1, 1), (3, 5), (8, 64), (100, 64)])
def test_updates_leave_every_sum_exact(size, count):
    tree, leaves, rng = sum_tree.init(size), np.zeros(size, np.float32), np.random.default_rng(size)
    for _ in range(20):
        index = rng.integers(size, size=count).astype(np.int32)  # with duplicates
        value = (rng.random(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32)
        tree = update(tree, index, value)
        now = np.asarray(sum_tree.get(tree, jnp.arange(size)))
        for i in range(size):  # of duplicates any may have won
            assert now[i] in (value[index == i] if (index == i).any() else [leaves[i]])
        leaves = now
        assert_is_consistent(tree)
    np.testing.assert_allclose(sum_tree.total(tree), leaves.astype(np.float64).sum(), rtol=1e-5)


def test_find_by_hand():
    tree = update(sum_tree.init(6), jnp.arange(6), jnp.array([1.0, 0.0, 2.0, 0.0, 3.0, 0.0]))
    index, weight = find(tree, jnp.array([0.0, 0.9, 1.0, 2.9, 3.0, 5.9, 6.0, 7.0]))
    np.testing.assert_array_equal(index, [0, 0, 2, 2, 4, 4, 4, 4])  # beyond the sum: the last leaf that is not 0
    np.testing.assert_array_equal(weight, [1, 1, 2, 2, 3, 3, 3, 3])


def test_a_leaf_of_zero_is_never_found():
    """Where weights of all sizes make sums that round, and one leaf in three is 0."""
    rng = np.random.default_rng(0)
    leaves = (10.0 ** rng.uniform(-8, 8, 1000) * (rng.random(1000) < 0.67)).astype(np.float32)
    tree = update(sum_tree.init(1000), jnp.arange(1000), leaves)
    edges = np.concatenate([np.cumsum(leaves), np.nextafter(np.cumsum(leaves), np.inf), [0.0]]).astype(np.float32)
    mass = np.concatenate([edges, rng.random(5000).astype(np.float32) * np.float32(sum_tree.total(tree))])
    index, weight = find(tree, mass)
    np.testing.assert_array_equal(leaves[index], weight)
    assert (np.asarray(weight) > 0).all()


def test_find_follows_the_cumulative_sum():
    leaves = np.random.default_rng(1).integers(0, 5, 300).astype(np.float32)  # whole numbers: no rounding
    tree = update(sum_tree.init(300), jnp.arange(300), leaves)
    mass = np.arange(leaves.sum(), dtype=np.float32) + 0.5
    index, _ = find(tree, mass)
    np.testing.assert_array_equal(index, np.searchsorted(np.cumsum(leaves), mass, side="right"))


def test_every_leaf_of_a_deep_tree_is_found():
    """1,024 leaves of 1 behind a weight of 2^24, where float32 counts by twos."""
    size, first = 2**21, 2**20
    some = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.arange(first, first + 1024)])
    tree = update(sum_tree.init(size), some, jnp.ones(1025).at[0].set(2.0**24))
    assert sum_tree.total(tree) == 2**24 + 1024
    mass = 2.0**24 + 2.0 * jnp.arange(512.0).repeat(40)
    assert len(np.unique(find(tree, mass)[0])) == 512
    index, weight = find(tree, mass, jax.random.key(0))
    count = np.bincount(np.asarray(index) - first, minlength=1024)
    assert (weight == 1).all() and count.min() > 0 and count.max() < 60  # 20 on average
    np.testing.assert_array_equal(find(tree, jnp.zeros(1), jax.random.key(1))[0], 0)
