"""The hash generator, against the distributions it claims."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jrl.ops import random

N = 200_000
DRAWS = {
    "uniform": (random.uniform, stats.uniform),
    "normal": (random.normal, stats.norm),
    "gumbel": (random.gumbel, stats.gumbel_r),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distribution_within_a_key_and_across_keys(name):
    draw, law = DRAWS[name]
    within = np.asarray(jax.jit(draw, static_argnums=1)(jax.random.key(1), (N,)))
    keys = jax.random.split(jax.random.key(2), N)
    across = np.asarray(jax.jit(jax.vmap(lambda k: draw(k, (2,))))(keys))
    for sample in (within, across[:, 0], across[:, 1]):
        assert np.isfinite(sample).all()
        assert stats.kstest(sample, law.cdf).pvalue > 1e-4
    for a, b in ((within[:-1], within[1:]), (across[:, 0], across[:, 1]), (across[:-1, 0], across[1:, 0])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(N)


def test_extremes_are_finite(monkeypatch):
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(random, "bits", lambda key, shape, word=word: jnp.full(shape, word, jnp.uint32))
        assert 0 <= float(random.uniform(None, ())) < 1
        assert np.isfinite(float(random.normal(None, ()))) and np.isfinite(float(random.gumbel(None, ())))
        assert 0 <= int(random.integers(None, (), 7)) < 7


def test_integers_and_permutations_are_uniform():
    integers = jax.jit(random.integers, static_argnums=(1, 2))
    counts = np.bincount(np.asarray(integers(jax.random.key(3), (70_000,), 7)), minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-4
    permute = jax.jit(jax.vmap(lambda k: random.permutation(k, 5)))
    orders = np.asarray(permute(jax.random.split(jax.random.key(4), 24_000)))
    assert (np.sort(orders, 1) == np.arange(5)).all()
    for place in range(5):
        assert stats.chisquare(np.bincount(orders[:, place], minlength=5)).pvalue > 1e-4


def test_another_key_is_another_draw():
    a, b = (random.bits(jax.random.key(i), (64,)) for i in (0, 1))
    assert (a == random.bits(jax.random.key(0), (64,))).all() and not (a == b).any()
