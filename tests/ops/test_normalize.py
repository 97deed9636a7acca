"""Running statistics against numpy in float64, by hand, split over batches and over fake devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import normalize

update = jax.jit(normalize.update)


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    """Of statistics what they say, not what rounding left beside it."""
    said = lambda x: (x.count, x.mean, x.m2) if isinstance(x, normalize.RunningStats) else x
    a, b = said(a), said(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def exactly(count, mean, m2):
    """Statistics of which nothing is lost to rounding."""
    as_f32 = {"count": jnp.float32(count), "mean": jnp.float32(mean), "m2": jnp.float32(m2)}
    return normalize.init(np.shape(mean)).replace(**as_f32)


def test_by_hand():
    # 1 3 | 8: mean 4, squared distances 9 + 1 + 16 = 26. Weight 2 on the 8: mean 20/4 = 5, 16 + 4 + 2*9 = 38
    stats = update(update(normalize.init(()), jnp.array([1.0, 3.0])), jnp.array([8.0]))
    assert_same(stats, exactly(3.0, 4.0, 26.0))
    stats = update(normalize.init(()), jnp.array([1.0, 3.0, 8.0, 99.0]), jnp.array([1.0, 1.0, 2.0, 0.0]))
    assert_same(stats, exactly(4.0, 5.0, 38.0))
    np.testing.assert_allclose(normalize.std(stats), np.sqrt(38 / 4), rtol=1e-6)
    np.testing.assert_allclose(normalize.normalize(stats, jnp.array([5.0, 8.0])), [0.0, 3 / np.sqrt(9.5)], rtol=1e-6)


@pytest.mark.parametrize("chunk", (64, 1000, 250_000, 1_000_000))
def test_a_million_large_numbers_in_float32(chunk):
    x = np.random.default_rng(0).normal(1000.0, 1.0, size=(1_000_000, 2)).astype(np.float32)
    chunks = jnp.asarray(x).reshape(-1, chunk, 2)
    stats, _ = jax.lax.scan(lambda stats, x: (normalize.update(stats, x), None), normalize.init((2,)), chunks)
    exact = x.astype(np.float64)
    assert stats.count == 1_000_000
    np.testing.assert_allclose(stats.mean, exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(normalize.std(stats, 0.0), exact.std(axis=0), rtol=1e-5)


def test_count_stops_at_its_limit_and_old_samples_fade():
    # At 2^23 samples of mean 0 and variance 1, 2^10 more of 1s: the old count shrinks to 2^23 - 2^10, so with s = 2^-13
    # the mean is s and the variance 1 - s + s (1 - s).
    n = normalize.MAX_COUNT
    full = exactly(n, 0.0, n)
    stats = update(full, jnp.ones(1024))
    share = 2.0**-13
    assert stats.count == n
    np.testing.assert_allclose(stats.mean, share, rtol=1e-6)
    np.testing.assert_allclose(stats.m2 / n, 1 - share + share * (1 - share), rtol=1e-6)

    # 2^15 updates, four times the limit: the old mean has faded to (1 - s)^(2^15) = e^-4, and no increment was lost.
    stats = jax.lax.fori_loop(0, 2**15, lambda _, stats: normalize.update(stats, jnp.ones(1024)), full)
    assert stats.count == n
    np.testing.assert_allclose(1 - stats.mean, np.exp(-4), rtol=0.01)
    # Old variance faded, plus that between the two groups: e^-4 + e^-4 (1 - e^-4)
    np.testing.assert_allclose(normalize.std(stats) ** 2, np.exp(-4) * (2 - np.exp(-4)), rtol=0.01)


def test_a_mean_far_from_zero_goes_on_moving():
    """2^22 samples of 1000, then 2^20 of 1000.5 in batches of 64: each moves the mean by a tenth of what float32 has
    there."""
    n = 2.0**22
    stats = exactly(n, 1000.0, 0.01 * n)
    stats = jax.lax.fori_loop(0, 2**14, lambda _, stats: normalize.update(stats, jnp.full(64, 1000.5)), stats)
    # a fifth of the samples are 0.5 away: the mean moves by 0.1, the variance is 0.8 * 0.01 + 0.2 * 0.8 * 0.25
    np.testing.assert_allclose(stats.mean, 1000.1, atol=1e-4)
    np.testing.assert_allclose(stats.m2 / stats.count, 0.048, rtol=1e-4)
    # 1000.1 itself, to what float32 has there
    np.testing.assert_allclose(np.float64(stats.mean) + np.float64(stats.mean_rest), 1000.1, rtol=1e-7)


def test_single_samples_move_the_variance_at_the_limit():
    """Each of 2^16 samples replaces a part in 2^23 of a sum whose float32 has 24 bits."""
    n = normalize.MAX_COUNT
    full = exactly(n, 0.0, 1.4 * n)
    sign = lambda i: jnp.where(i % 2 == 0, 1.0, -1.0)[None]
    stats = jax.lax.fori_loop(0, 2**16, lambda i, stats: normalize.update(stats, sign(i)), full)
    np.testing.assert_allclose(full.m2 - stats.m2, 0.4 * 2**16, rtol=0.01)


def test_counting_to_the_limit_loses_nothing():
    stats = normalize.init(()).replace(count=jnp.float32(normalize.MAX_COUNT - 5))
    counts = []
    for _ in range(7):
        stats = update(stats, jnp.ones(1))
        counts.append(float(stats.count) - normalize.MAX_COUNT)
    assert counts == [-4, -3, -2, -1, 0, 0, 0]


def test_masked_samples_are_absent():
    rng = np.random.default_rng(1)
    x, mask = jnp.asarray(rng.normal(size=(8, 5, 3)), jnp.float32), jnp.asarray(rng.random((8, 5)) < 0.6)
    before = update(normalize.init((3,)), x + 2)
    assert_same(update(before, x, mask), update(before, x[mask]))
    moved = update(before, jnp.where(mask[..., None], x, 1e4), mask)
    jax.tree.map(np.testing.assert_array_equal, update(before, x, mask), moved)
    jax.tree.map(np.testing.assert_array_equal, update(before, x, jnp.zeros((8, 5))), before)
    nothing = update(normalize.init((3,)), x, jnp.zeros((8, 5)))
    jax.tree.map(np.testing.assert_array_equal, nothing, normalize.init((3,)))


@pytest.mark.parametrize("started", (False, True))
@pytest.mark.parametrize("weighted", (False, True))
def test_devices_equal_one_device(weighted, started):
    """Four fake devices whose parts differ in mean, scale and number of samples."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 6, 5, 3)) * np.arange(1, 5).reshape(4, 1, 1, 1) + np.arange(4).reshape(4, 1, 1, 1) * 10
    x = jnp.asarray(x, jnp.float32)
    weight = jnp.asarray(rng.random((4, 6, 5)) < np.array([0.9, 0.5, 0.2, 0.0]).reshape(4, 1, 1)) if weighted else None
    stats = normalize.init((3,))
    if started:
        stats = update(stats, jnp.asarray(rng.normal(5.0, 2.0, size=(50, 3)), jnp.float32))

    on_device = jax.vmap(
        partial(normalize.update, axis_name="device"), in_axes=(None, 0, 0 if weighted else None), axis_name="device"
    )
    one = update(stats, x, weight)
    many = on_device(stats, x, weight)
    for device in range(4):
        assert_same(jax.tree.map(lambda leaf, d=device: leaf[d], many), one)
    alone = update(stats, x[0], None if weight is None else weight[0])
    assert abs(alone.mean - one.mean).max() > 0.1  # a part is not the whole


def test_before_any_data_only_casts():
    x = jnp.array([[0, 200, 255]], jnp.uint8)
    got = normalize.normalize(normalize.init((3,)), x)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [[0, 200, 255]])  # beyond clip
    np.testing.assert_array_equal(normalize.std(normalize.init((3,))), np.ones(3))


def test_normalize_clips_and_survives_a_constant():
    stats = update(normalize.init((2,)), jnp.array([[0.0, 7.0], [2.0, 7.0]]))  # mean 1 7, std 1 0
    x = jnp.array([[3.0, 7.0], [50.0, 8.0], [-50.0, 6.0]])
    got = normalize.normalize(stats, x, clip=5.0)
    np.testing.assert_allclose(got, [[2, 0], [5, 5], [-5, -5]], rtol=1e-6)
    np.testing.assert_allclose(normalize.normalize(stats, x, clip=None)[:, 0], [2, 49, -51], rtol=1e-6)


def test_pytree_of_observations():
    rng = np.random.default_rng(4)
    obs = {
        "image": rng.integers(0, 255, size=(6, 5, 2, 2)).astype(np.uint8),
        "rest": (rng.normal(size=(6, 5, 3)), rng.normal(size=(6, 5))),  # float64
    }
    stats = update(normalize.init({"image": (2, 2), "rest": ((3,), ())}), obs)
    got = normalize.normalize(stats, obs, clip=None, eps=0.0)
    expected = jax.tree.map(lambda x: (x - x.mean(axis=(0, 1))) / x.std(axis=(0, 1)), obs)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    assert_same(got, expected, rtol=1e-4, atol=1e-5)
    one_row, expected = (jax.tree.map(lambda x: x[0, 0], tree) for tree in (obs, expected))  # without batch axes
    assert_same(normalize.normalize(stats, one_row, clip=None, eps=0.0), expected, rtol=1e-4)


def test_wrong_shape_raises():
    stats = normalize.init((3,))
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(5, 2\)"):
        normalize.update(stats, jnp.ones((5, 2)))
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(5, 1\)"):
        normalize.normalize(stats, jnp.ones((5, 1)))
    with pytest.raises(ValueError, match=r"batch's shape \(5,\), got \(1,\)"):
        normalize.update(stats, jnp.ones((5, 3)), jnp.ones(1))
    with pytest.raises(ValueError, match="different batch axes"):
        normalize.update(normalize.init({"a": (), "b": ()}), {"a": jnp.ones(3), "b": jnp.ones(4)})
    with pytest.raises(ValueError, match="the statistics are of"):
        normalize.update(stats, {"a": jnp.ones((5, 3))})
