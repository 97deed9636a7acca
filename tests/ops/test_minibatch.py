"""Minibatches: every row once, evenly mixed, the same on one device and on four; gathers and chunks change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrl.learn import parallel
from jrl.ops import minibatch

SIZES = [  # T, B, M
    (8, 3, 4),
    (5, 4, 1),
    (6, 4, 4),  # gcd 2: two environment groups
    (5, 6, 3),  # gcd 1: environments only
    (4, 4, 16),  # one row of each
]
COUNT = 4000


@functools.cache
def many_shuffles(T, B, M):
    """[COUNT, M, T * B / M]"""
    keys = jax.random.split(jax.random.key(5), COUNT)
    return np.asarray(jax.jit(jax.vmap(lambda key: minibatch.shuffle(key, T, B, M)))(keys))


@pytest.mark.parametrize(("T", "B", "M"), SIZES)
def test_shuffle_holds_every_row_once(T, B, M):
    index = many_shuffles(T, B, M)[:20]
    assert index.shape == (20, M, T * B // M)
    assert index.dtype == np.int32
    np.testing.assert_array_equal(np.sort(index.reshape(20, -1), -1), np.tile(np.arange(T * B), (20, 1)))
    assert len({i.tobytes() for i in index}) > 10  # the key matters


@pytest.mark.parametrize(("T", "B", "M"), [size for size in SIZES if size[2] > 1])
def test_shuffle_mixes_rows_evenly(T, B, M):
    index = many_shuffles(T, B, M)
    home = np.empty((COUNT, T * B), np.int64)  # the minibatch of each row
    np.put_along_axis(home, index.reshape(COUNT, -1), np.repeat(np.arange(M), T * B // M)[None], -1)
    # a row is in each minibatch equally often: 5.5 standard deviations around 1 / M
    share = np.stack([(home == m).mean(0) for m in range(M)])
    bound = lambda p: 5.5 * np.sqrt(p * (1 - p) / COUNT)
    np.testing.assert_allclose(share, 1 / M, atol=bound(1 / M))

    env, step = np.arange(T * B) % B, np.arange(T * B) // B
    together = (home[:, :, None] == home[:, None, :]).mean(0)
    one_env = (env[:, None] == env[None]) & (step[:, None] != step[None])
    groups = np.gcd(T, M)
    split = M // groups
    # two rows of one environment: as in a permutation of the steps, neighbours in time no more often than others (where
    # environments are split too, an environment's rows of one time group stay together)
    expected = (T / groups - 1) / (T - 1)
    np.testing.assert_allclose(together[one_env], expected, atol=bound(max(expected, 0.05)))
    # rows of different environments: as often as chance, 1 / M; those of one block of neighbours are dealt out instead
    other_block = (env[:, None] // split) != (env[None] // split)
    if other_block.any():
        np.testing.assert_allclose(together[other_block], 1 / M, atol=bound(1 / M))


@pytest.mark.parametrize(("T", "B", "M"), [(8, 8, 4), (6, 8, 4)])
def test_shards_of_a_minibatch_make_the_whole_one(four_devices, T, B, M):
    local = B // 4

    def body(key):
        index = minibatch.shuffle(key, T, local, M, axis_name=parallel.AXIS)
        step, env = index // local, index % local + local * jax.lax.axis_index(parallel.AXIS)
        return (step * B + env)[None]

    key = jax.random.key(3)
    sharded = np.asarray(parallel.pmap(body, four_devices, P(), parallel.PER_DEVICE)(key))  # [D, M, T * B / M / D]
    union = np.sort(np.moveaxis(sharded, 0, 1).reshape(M, -1), -1)
    whole = np.asarray(jax.jit(lambda key: minibatch.shuffle(key, T, B, M))(key))
    np.testing.assert_array_equal(union, np.sort(whole, -1))
    assert not np.array_equal(union, np.arange(T * B).reshape(M, -1))  # it did shuffle


def test_shuffle_refuses_what_cannot_be_split():
    with pytest.raises(ValueError, match=r"7 steps x 3 environments into 4 minibatches.* multiple of 4"):
        minibatch.shuffle(jax.random.key(0), 7, 3, 4)
    with pytest.raises(ValueError, match="multiple of 2"):
        minibatch.shuffle(jax.random.key(0), 6, 3, 4)


def mixed_tree(rows=11):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(rows, *shape))
    return {
        "f32": jnp.asarray(draw(3, 2), jnp.float32),
        "scalar": jnp.asarray(draw(), jnp.float32).at[2].set(jnp.nan).at[3].set(-0.0),
        "i32": jnp.asarray(100 * draw(4), jnp.int32),
        "u32": jnp.asarray(rng.integers(0, 2**32, (rows, 1), np.uint32)),
        "u8": jnp.asarray(rng.integers(0, 256, (rows, 2, 2, 3)), jnp.uint8),
        "bool": jnp.asarray(draw(5) > 0),
        "bf16": jnp.asarray(draw(2), jnp.bfloat16),
        "empty": (),
    }


@pytest.mark.parametrize("names", [None, ["u8", "bool", "bf16"], ["f32"], ["i32", "u8"]])
def test_row_taker_is_indexing(names):
    tree = mixed_tree()
    tree = tree if names is None else {name: tree[name] for name in names}
    index = np.array([3, 0, 10, 3, 2])
    taken = jax.jit(lambda tree, index: minibatch.row_taker(tree)(index))(tree, index)
    assert jax.tree.structure(taken) == jax.tree.structure(tree)
    for got, leaf in zip(jax.tree.leaves(taken), jax.tree.leaves(tree)):
        want = np.asarray(leaf)[index]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()  # bit for bit, NaN and -0 too


@pytest.mark.parametrize("chunk", [1, 3, 4, 12])
def test_mean_gradient_in_chunks_is_that_of_all_rows(chunk):
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(3,)), jnp.float32), "b": jnp.float32(0.3)}
    rows = {
        "x": jnp.asarray(rng.normal(size=(12, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=12), jnp.float32),
    }

    def loss(params, rows):
        error = rows["x"] @ params["w"] + params["b"] - rows["y"]
        return jnp.mean(error**2), {"error": jnp.mean(error), "worst": jnp.mean(jnp.abs(error))}

    gradient, metrics = jax.jit(minibatch.mean_gradient, static_argnums=(0, 3))(loss, params, rows, chunk)
    # by hand: d/dw mean (x w + b - y)^2 = 2 mean(error x)
    x, error = np.asarray(rows["x"]), np.asarray(rows["x"] @ params["w"] + params["b"] - rows["y"])
    np.testing.assert_allclose(gradient["w"], 2 * (error[:, None] * x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(gradient["b"], 2 * error.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["error"], error.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["worst"], abs(error).mean(), rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_map_rows_is_the_function(chunk):
    rows = {"x": jnp.arange(24.0).reshape(12, 2), "y": jnp.arange(12)}
    seen = []

    def fn(rows):
        seen.append(rows["y"].shape[0])
        return rows["x"] * 2 + jnp.expand_dims(rows["y"], 1), rows["y"] + 1

    doubled, plus = minibatch.map_rows(fn, rows, chunk)
    np.testing.assert_array_equal(doubled, np.asarray(rows["x"]) * 2 + np.arange(12)[:, None])
    np.testing.assert_array_equal(plus, np.arange(12) + 1)
    assert set(seen) == {chunk}  # and no more rows than that at once


@pytest.mark.parametrize(
    ("rows", "limit", "expected"), [(12, 5, 4), (12, 12, 12), (12, 100, 12), (13, 5, 1), (4096, 16, 16), (10, 1, 1)]
)
def test_chunk_rows_is_the_largest_divisor(rows, limit, expected):
    assert minibatch.chunk_rows(rows, 16, limit) == expected


def test_chunk_rows_without_a_limit():
    for rows, image_bytes in ((16_384, 0), (512, 28_224), (7, 28_224)):
        chunk = minibatch.chunk_rows(rows, image_bytes)
        assert rows % chunk == 0
        if jax.default_backend() == "cpu":
            assert chunk == {16_384: 8192, 512: 16, 7: 7}[rows]
