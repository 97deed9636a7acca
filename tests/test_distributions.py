"""Distributions against scipy, numerical sums and integrals, finite differences and sample frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.special import log_softmax

from jrl import distributions
from jrl.distributions import Bernoulli, Categorical, DiagGaussian, MultiCategorical, TanhGaussian, action_distribution
from jrl.types import Box, InputError


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def gaussian(seed=0, lead=(2, 3), shape=(4,), kind=DiagGaussian):
    return kind(normal(seed, *lead, *shape), 0.5 * normal(seed + 100, *shape), len(shape))


# ---------------------------------------------------------------- discrete


def test_categorical_against_numerical_sums():
    logits, other = 3 * normal(0, 2, 3, 5), 3 * normal(1, 2, 3, 5)
    action = jnp.asarray(np.random.default_rng(2).integers(0, 5, size=(2, 3)))
    log_p, log_q = log_softmax(np.float64(logits), axis=-1), log_softmax(np.float64(other), axis=-1)
    got = Categorical(logits)
    np.testing.assert_allclose(
        got.log_prob(action), np.take_along_axis(log_p, np.asarray(action)[..., None], -1)[..., 0], rtol=1e-5
    )
    np.testing.assert_allclose(got.entropy(), scipy.stats.entropy(np.exp(log_p), axis=-1), rtol=1e-5)
    np.testing.assert_allclose(got.kl(Categorical(other)), (np.exp(log_p) * (log_p - log_q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(got.kl(got), np.zeros((2, 3)), atol=1e-6)


def test_categorical_gradient_has_no_scatter():
    gradient = jax.grad(lambda l: Categorical(l).log_prob(jnp.zeros(4, jnp.int32)).sum())  # noqa: E741
    assert "scatter" not in str(jax.make_jaxpr(gradient)(normal(3, 4, 5)))


def test_categorical_sample_frequencies():
    p = np.array([0.1, 0.2, 0.3, 0.4])
    action = Categorical(jnp.broadcast_to(jnp.log(jnp.float32(p)), (200_000, 4))).sample(jax.random.key(0))
    assert action.shape == (200_000,) and action.dtype == jnp.int32
    assert scipy.stats.chisquare(np.bincount(action, minlength=4), 200_000 * p).pvalue > 1e-3


def test_multi_categorical_is_a_product():
    nvec = (2, 3, 4)
    logits, other = normal(4, 5, 9), normal(5, 5, 9)
    got = MultiCategorical(logits, nvec)
    parts = [Categorical(logits[:, :2]), Categorical(logits[:, 2:5]), Categorical(logits[:, 5:])]
    others = [Categorical(other[:, :2]), Categorical(other[:, 2:5]), Categorical(other[:, 5:])]
    action = jnp.asarray(np.random.default_rng(6).integers(0, nvec, size=(5, 3)))

    @jax.jit
    def joint_and_product():
        joint = [got.log_prob(action), got.entropy(), got.kl(MultiCategorical(other, nvec)), got.mode()]
        log_prob = sum(part.log_prob(action[:, k]) for k, part in enumerate(parts))
        kl = sum(part.kl(its) for part, its in zip(parts, others, strict=True))
        modes = jnp.stack([part.mode() for part in parts], -1)
        return joint, [log_prob, sum(part.entropy() for part in parts), kl, modes]

    for joint, product in zip(*joint_and_product(), strict=True):
        np.testing.assert_allclose(joint, product, rtol=1e-5)
    # over all 24 joint actions the probabilities sum to 1
    every = jnp.asarray(np.stack(np.meshgrid(*map(np.arange, nvec), indexing="ij"), -1).reshape(24, 1, 3))
    every = jnp.broadcast_to(every, (24, 5, 3))
    np.testing.assert_allclose(np.exp(jax.jit(jax.vmap(got.log_prob))(every)).sum(0), np.ones(5), rtol=1e-5)


# ---------------------------------------------------------------- continuous


def test_diag_gaussian_against_scipy():
    got, other = gaussian(0), gaussian(1)
    action = normal(2, 2, 3, 4)
    std = np.exp(np.broadcast_to(got.log_std, got.mean.shape))
    its = np.exp(np.broadcast_to(other.log_std, got.mean.shape))
    reference = scipy.stats.norm(np.asarray(got.mean, np.float64), std)
    np.testing.assert_allclose(got.log_prob(action), reference.logpdf(action).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(got.entropy(), reference.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(got.mode(), got.mean)
    # KL as an integral over each element
    grid = np.linspace(-20, 20, 20_001).reshape(-1, 1, 1, 1)
    log_q = scipy.stats.norm(np.asarray(other.mean, np.float64), its).logpdf(grid)
    integrand = reference.pdf(grid) * (reference.logpdf(grid) - log_q)
    np.testing.assert_allclose(got.kl(other), np.trapezoid(integrand, dx=0.002, axis=0).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(got.kl(got), np.zeros((2, 3)), atol=1e-6)


@pytest.mark.parametrize("kind", (DiagGaussian, TanhGaussian))
def test_gaussian_samples(kind):
    """Kolmogorov-Smirnov on what was before tanh; a log-probability that agrees with `log_prob`."""
    mean, std = jnp.array([0.5, -0.3]), jnp.array([0.7, 0.2])
    one = kind(jnp.broadcast_to(mean, (5000, 2)), jnp.log(std))
    for action in (one.sample(jax.random.key(0)), one.sample_and_log_prob(jax.random.key(1))[0]):
        before = np.arctanh(action) if kind is TanhGaussian else action
        for k in range(2):
            assert scipy.stats.kstest(before[:, k], scipy.stats.norm(mean[k], std[k]).cdf).pvalue > 1e-3
    action, log_prob = one.sample_and_log_prob(jax.random.key(1))
    assert action.shape == (5000, 2) and log_prob.shape == (5000,)
    np.testing.assert_allclose(log_prob, one.log_prob(action), rtol=1e-3, atol=1e-3)


def test_tanh_gaussian_density():
    """Integrates to 1; is the normal density over the slope of tanh; the mode is tanh of the mean."""
    one = TanhGaussian(jnp.full((40_001, 1), 0.4), jnp.array([-0.5]))
    action = np.linspace(-1, 1, 40_003)[1:-1]
    density = np.exp(one.log_prob(jnp.asarray(action, jnp.float32)[:, None]))
    np.testing.assert_allclose(np.trapezoid(density, action), 1.0, rtol=1e-3)
    inner = slice(1000, -1000)
    by_formula = scipy.stats.norm(0.4, np.exp(-0.5)).pdf(np.arctanh(action)) / (1 - action**2)
    np.testing.assert_allclose(density[inner], by_formula[inner], rtol=1e-3)
    np.testing.assert_allclose(one.mode()[0], np.tanh([0.4]), rtol=1e-6)


def test_tanh_gaussian_far_out_is_exact_and_finite():
    # mean u, tiny noise: log p = normal part - log(1 - tanh(u)^2), and for large u that slope is log 4 - 2u.
    one = TanhGaussian(jnp.array([[-40.0], [15.0], [0.0]]), jnp.array([-20.0]))
    action, log_prob = one.sample_and_log_prob(jax.random.key(0))
    normal_part = DiagGaussian(one.mean, one.log_std).sample_and_log_prob(jax.random.key(0))[1]
    slope = np.array([np.log(4) - 80, np.log(4) - 30, 0.0])
    np.testing.assert_allclose(log_prob, normal_part - slope, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(action[:, 0], [-1, 1, 0], atol=1e-6)

    def total(mean):
        one = TanhGaussian(mean, jnp.zeros(1))
        drawn = one.sample_and_log_prob(jax.random.key(0))[1]
        return drawn.sum() + one.log_prob(jnp.array([[-1.0], [1.0], [0.0]])).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(one.mean)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_tanh_gaussian_kl_is_an_integral_over_actions():
    one, two = (TanhGaussian(jnp.array([[m]]), jnp.array([s])) for m, s in ((0.3, -0.5), (-0.2, -0.3)))
    action = np.tanh(np.linspace(-4, 4, 8001))
    log_p, log_q = (
        np.float64(jax.vmap(d.log_prob)(jnp.asarray(action, jnp.float32).reshape(-1, 1, 1)))[:, 0] for d in (one, two)
    )
    np.testing.assert_allclose(one.kl(two), [np.trapezoid(np.exp(log_p) * (log_p - log_q), action)], rtol=1e-3)


def test_gradient_flows_through_gaussian_samples():
    # d sample / d mean = 1, d sample / d log_std = std * noise = sample - mean; tanh: times 1 - action^2
    mean, log_std = normal(0, 5), 0.3 * normal(1, 5)
    key = jax.random.key(0)
    sample = DiagGaussian(mean, log_std).sample(key)
    gradients = jax.grad(lambda m, s: DiagGaussian(m, s).sample(key).sum(), (0, 1))(mean, log_std)
    np.testing.assert_allclose(gradients[0], np.ones(5))
    np.testing.assert_allclose(gradients[1], sample - mean, rtol=1e-3, atol=1e-5)  # a difference of floats
    gradient = jax.grad(lambda m: TanhGaussian(m, log_std).sample(key).sum())(mean)
    np.testing.assert_allclose(gradient, 1 - np.tanh(sample) ** 2, rtol=1e-4, atol=1e-6)


CASES = {
    "categorical": (lambda p: Categorical(p), (3, 4), jnp.array([0, 3, 1])),
    "multi": (lambda p: MultiCategorical(p, (2, 3)), (3, 5), jnp.array([[0, 2], [1, 0], [1, 1]])),
    "bernoulli": (lambda p: Bernoulli(p), (3, 2), jnp.array([[0, 1], [1, 1], [0, 0]], jnp.int8)),
    "gaussian": (lambda p: DiagGaussian(p[..., :2], p[..., 2:]), (3, 4), normal(10, 3, 2)),
    "tanh": (lambda p: TanhGaussian(p[..., :2], p[..., 2:]), (3, 4), jnp.tanh(normal(11, 3, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_against_finite_differences(name):
    """Of log_prob, kl and (where there is one) entropy, along a random direction, in float64."""
    build, shape, action = CASES[name]
    rng = np.random.default_rng(12)
    point, other, direction = rng.normal(size=(3, *shape))
    with jax.enable_x64(True):
        action = jnp.asarray(np.asarray(action, np.int32 if jnp.issubdtype(action.dtype, jnp.integer) else np.float64))
        functions = {"log_prob": lambda p: build(p).log_prob(action), "kl": lambda p: build(p).kl(build(other))}
        if name != "tanh":
            functions["entropy"] = lambda p: build(p).entropy()
        totals = jax.jit(lambda p: jnp.stack([function(p).sum() for function in functions.values()]))
        after, before = (np.asarray(totals(point + step * direction)) for step in (1e-6, -1e-6))
        gradients = np.asarray(jax.jit(jax.jacrev(totals))(point))
        for what, slope, gradient in zip(functions, (after - before) / 2e-6, gradients, strict=True):
            np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, err_msg=what)


@pytest.mark.parametrize("name", CASES)
def test_batched_under_jit_and_vmap(name):
    """Row by row equals all at once; shapes and dtypes are those promised."""
    build, shape, action = CASES[name]
    params, others = normal(13, *shape), normal(14, *shape)

    def everything(p, other, action, key):
        one = build(p)
        out = {"log_prob": one.log_prob(action), "kl": one.kl(build(other)), "mode": one.mode()}
        drawn, log_prob = one.sample_and_log_prob(key)
        return out, (drawn, log_prob, one.sample(key), one.log_prob(drawn))

    key = jax.random.key(3)
    together, drawn = jax.jit(everything)(params, others, action, key)
    rows, _ = jax.jit(jax.vmap(everything, in_axes=(0, 0, 0, None)))(params, others, action, key)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), together, rows)
    for leaf in (together["log_prob"], together["kl"], drawn[1]):
        assert leaf.shape == (3,) and leaf.dtype == jnp.float32
    for leaf in (together["mode"], drawn[0], drawn[2]):
        assert leaf.shape == action.shape and leaf.dtype == action.dtype
    np.testing.assert_allclose(drawn[1], drawn[3], rtol=1e-3, atol=1e-4)


def test_tanh_gaussian_promises_no_entropy():
    assert not hasattr(TanhGaussian, "entropy")


@pytest.mark.parametrize("name", CASES)
def test_wrong_shape_raises(name):
    build, shape, action = CASES[name]
    one = build(jnp.zeros(shape))
    with pytest.raises(ValueError, match=r"action must have shape \(3"):
        one.log_prob(action[:1])  # would broadcast
    with pytest.raises(ValueError, match="must have shape"):
        one.kl(build(jnp.zeros((1, *shape[1:]))))


def test_multi_categorical_wants_all_logits():
    with pytest.raises(ValueError, match=r"logits must have shape \(4, 5\), got \(4, 6\)"):
        MultiCategorical(jnp.zeros((4, 6)), (2, 3)).mode()


# ---------------------------------------------------------------- spaces


@pytest.mark.parametrize(  # every pair
    ("shape", "squash", "per_row"),
    [
        ((), False, False),
        ((), True, True),
        ((3,), False, True),
        ((3,), True, False),
        ((2, 3), False, False),
        ((2, 3), True, True),
    ],
)
def test_heads_of_boxes_keep_the_shape_of_actions(shape, squash, per_row):
    size = int(np.prod(shape))
    head = action_distribution(Box(shape), squash=squash)
    assert head.size == size
    outputs, log_std = normal(0, 7, size), 0.1 * normal(1, *((7, size) if per_row else (size,)))
    kind = TanhGaussian if squash else DiagGaussian
    assert type(head.make(outputs, log_std)) is kind

    @jax.jit
    def shaped_and_flat():
        one, flat = head.make(outputs, log_std), kind(outputs, log_std)
        two, flat_two = head.make(outputs + 1, log_std), kind(outputs + 1, log_std)
        action, log_prob = one.sample_and_log_prob(jax.random.key(0))
        assert action.shape == one.mode().shape == (7, *shape)
        shaped = [one.log_prob(action), log_prob, one.kl(two), one.mode().reshape(7, size)]
        of_flat = [flat.log_prob(action.reshape(7, size)), one.log_prob(action), flat.kl(flat_two), flat.mode()]
        if not squash:
            shaped.append(one.entropy())
            of_flat.append(flat.entropy())
        return shaped, of_flat

    for got, expected in zip(*shaped_and_flat(), strict=True):
        assert got.shape == expected.shape and got.shape[0] == 7
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_head_errors():
    with pytest.raises(InputError, match=r"Box\(shape=\(2,\), dtype='int32'"):
        action_distribution(Box((2,), "int32"))
    with pytest.raises(InputError, match="no policy for the action space None"):
        action_distribution(None)
    head = action_distribution(Box((2,)))
    with pytest.raises(ValueError, match="needs log_std"):
        head.make(jnp.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"outputs must have shape \(4, 2\), got \(4, 3\)"):
        head.make(jnp.zeros((4, 3)), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"log_std must have shape \(2,\), got \(3,\)"):
        head.make(jnp.zeros((4, 2)), jnp.zeros(3))


def test_static_fields_are_not_leaves():
    leaves = jax.tree.leaves((gaussian(), MultiCategorical(jnp.zeros(5), (2, 3)), gaussian(kind=TanhGaussian)))
    assert len(leaves) == 5 and all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert set(distributions.__all__) >= {"ActionHead", "action_distribution"}
