"""The projection of C51 and the quantile Huber loss: hand numbers, plain Python loops, and what they promise."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl.ops import distributional

LOW, HIGH, K = -2.0, 3.0, 6  # atoms -2, -1, 0, 1, 2, 3


_project = jax.jit(functools.partial(distributional.project, low=LOW, high=HIGH, num_atoms=K))


def project(probs, atoms):
    return np.asarray(_project(probs, atoms))


def plain_projection(probs, atoms):
    """Algorithm 1 of arXiv:1707.06887: one atom after the other, to the two neighbours."""
    out = np.zeros((len(probs), K))
    for n in range(len(probs)):
        for p, z in zip(probs[n], atoms[n]):
            b = (min(max(float(z), LOW), HIGH) - LOW) / ((HIGH - LOW) / (K - 1))
            lower, upper = math.floor(b), math.ceil(b)
            if lower == upper:
                out[n, lower] += p
            else:
                out[n, lower] += p * (upper - b)
                out[n, upper] += p * (b - lower)
    return out


@pytest.mark.parametrize("num_given", [1, 6, 15])
def test_projection_is_the_papers_loop(num_given):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(num_given), 40).astype(np.float32)
    atoms = rng.uniform(-4, 5, (40, num_given)).astype(np.float32)
    atoms[:10] = np.round(atoms[:10])  # on the grid, and on its bounds
    out = project(probs, atoms)
    np.testing.assert_allclose(out, plain_projection(probs, atoms), atol=1e-6)
    np.testing.assert_allclose(out.sum(1), 1, atol=1e-6)
    assert (out >= 0).all()
    inside = np.abs(atoms - 0.5).max(1) <= 2.5
    assert inside.any() or num_given > 6
    grid = np.linspace(LOW, HIGH, K)
    np.testing.assert_allclose((out @ grid)[inside], (probs * atoms).sum(1)[inside], atol=1e-5)


def test_projection_by_hand():
    given = [0.1, 0.2, 0.3, 0.1, 0.2, 0.1]
    grid = np.linspace(LOW, HIGH, K, dtype=np.float32)
    shift = lambda reward, discount: np.asarray([reward + discount * grid], np.float32)
    # nothing changes on the grid itself
    np.testing.assert_array_equal(project(np.float32([given]), shift(0, 1)), np.float32([given]))
    # a true end with reward 0.25: three quarters on 0, a quarter on 1
    np.testing.assert_allclose(project(np.float32([given]), shift(0.25, 0)), [[0, 0, 0.75, 0.25, 0, 0]], atol=1e-6)
    # one up: what was on 2 and 3 is on the bound
    np.testing.assert_allclose(project(np.float32([given]), shift(1, 1)), [[0, 0.1, 0.2, 0.3, 0.1, 0.3]], atol=1e-6)
    # far below
    np.testing.assert_allclose(project(np.float32([given]), shift(-1e6, 1)), [[1, 0, 0, 0, 0, 0]], atol=1e-6)


def test_projection_of_traced_bounds():
    probs, atoms = jnp.full((1, 2), 0.5), jnp.array([[0.0, 1.0]])
    run = jax.jit(lambda high: distributional.project(probs, atoms, low=0.0, high=high, num_atoms=3))
    np.testing.assert_allclose(run(1.0), [[0.5, 0, 0.5]])
    np.testing.assert_allclose(run(2.0), [[0.5, 0.5, 0]])


def plain_quantile_huber(quantiles, target, kappa, levels=None):
    """Eq. 10 of arXiv:1710.10044 for one row, which with levels that are drawn is eq. 3 of arXiv:1806.06923."""
    total = 0.0
    for i, theta in enumerate(quantiles):
        level = (i + 0.5) / len(quantiles) if levels is None else levels[i]
        for z in target:
            u = z - theta
            huber = 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
            total += abs(level - (u < 0)) * huber / kappa / len(target)
    return total


def test_quantile_huber_by_hand():
    # levels 1/4 and 3/4; errors 3 and -0.5 of the first, 1 and -2.5 of the second quantile
    # (1/4 * 2.5 + 3/4 * 0.125) / 2 + (3/4 * 0.5 + 1/4 * 2) / 2
    loss = distributional.quantile_huber(jnp.array([[0.0, 2.0]]), jnp.array([[3.0, -0.5]]))
    np.testing.assert_allclose(loss, [0.359375 + 0.4375], rtol=1e-6)


@pytest.mark.parametrize(
    ("num_quantiles", "num_targets", "kappa", "drawn"),
    some_quick(
        [(*sizes, drawn) for sizes in ((4, 7, 1.0), (5, 1, 0.3), (1, 3, 2.0)) for drawn in (False, True)],
        (4, 7, 1.0, False), (5, 1, 0.3, True),
    ),
)  # fmt: skip
def test_quantile_huber_is_the_papers_loop_and_so_is_its_gradient(num_quantiles, num_targets, kappa, drawn):
    rng = np.random.default_rng(1)
    quantiles = rng.normal(size=(20, num_quantiles)).astype(np.float32)
    target = rng.normal(size=(20, num_targets)).astype(np.float32)
    levels = rng.uniform(size=quantiles.shape).astype(np.float32) if drawn else None
    loss = lambda q, t: distributional.quantile_huber(q, t, levels, kappa=kappa)
    of_row = lambda n, q: plain_quantile_huber(q, target[n], kappa, levels[n] if drawn else None)
    want = [of_row(n, q) for n, q in enumerate(quantiles)]
    np.testing.assert_allclose(jax.jit(loss)(quantiles, target), want, rtol=1e-5)
    weight = rng.uniform(size=20).astype(np.float32)
    slopes = jax.jit(jax.grad(lambda q, t: jnp.sum(weight * loss(q, t)), (0, 1)))(quantiles, target)
    slope, of_target = map(np.asarray, slopes)
    for n in range(20):
        for i in range(num_quantiles):
            step = np.zeros(num_quantiles)
            step[i] = 1e-5
            q = quantiles[n].astype(np.float64)
            ends = [of_row(n, q + sign * step) for sign in (1, -1)]
            np.testing.assert_allclose(slope[n, i], weight[n] * (ends[0] - ends[1]) / 2e-5, atol=1e-4)
    assert not of_target.any()  # the target is a constant


def test_shapes_that_disagree():
    with pytest.raises(ValueError, match=r"one \[N, M\]"):
        distributional.project(jnp.ones((2, 3)), jnp.ones((2, 4)), low=0, high=1, num_atoms=3)
    with pytest.raises(ValueError, match=r"target \[N, M\]"):
        distributional.quantile_huber(jnp.ones((2, 3)), jnp.ones(3))
