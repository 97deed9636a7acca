"""Distributions under action masks, zeros and ones, and trees of distributions, against what was built by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.special import log_softmax

from jrl import distributions
from jrl.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Joint,
    MultiCategorical,
    TanhGaussian,
    action_distribution,
)
from jrl.types import Box, Dict, Discrete, InputError, MultiBinary, MultiDiscrete, Tuple

N = 100_000
KEY = jax.random.key(7)
NVEC = (2, 3)
PLAN = Dict(  # not in the order of its leaves: b, tree/0, tree/1/go, tree/1/step
    (
        ("tree", Tuple((MultiDiscrete(NVEC), Dict((("step", Box((2,))), ("go", MultiBinary((3,)))))))),
        ("b", Discrete(4)),
    )
)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def some_masks(size, rows=8, seed=0):
    """[rows, size] bool, at least one True in each; one allows all, one a single one."""
    mask = np.random.default_rng(seed).random((rows, size)) < 0.5
    mask[np.arange(rows), np.arange(rows) % size] = True
    mask[0], mask[1] = True, np.arange(size) == size - 1
    return mask


def tiled(x):
    """[rows, *] -> [N, *]: row i is that of i % rows."""
    return jnp.tile(jnp.asarray(x), (N // len(x), *[1] * (np.ndim(x) - 1)))


def counts(action, mask):
    """How often each action was taken under each row of the mask."""
    got = np.zeros(mask.shape, int)
    np.add.at(got, (np.arange(N) % len(mask), np.asarray(action)), 1)
    return got


# ---------------------------------------------------------------- masks

EXTREME = {  # logits of actions that are allowed, and of those that are not
    "ordinary": (0.0, 0.0),
    "the others are higher": (-5.0, 1e9),
    "below any mask": (-3e38, 0.0),
    "minus infinity": (-np.inf, np.inf),
    "one infinite, the others not a number": (np.inf, np.nan),
}


sampled = jax.jit(lambda dist: (dist.sample_and_log_prob(KEY), dist.mode()))


@pytest.mark.parametrize("logits", EXTREME)
def test_no_sample_is_masked_and_every_other_action_occurs(logits):
    mask = some_masks(5)
    high, low = EXTREME[logits]
    dist = action_distribution(Discrete(5)).make(tiled(np.where(mask, high, low)), mask=tiled(mask))
    drawn, mode = sampled(dist)
    got = counts(drawn[0], mask)
    assert not got[~mask].any()
    assert got[mask].all()
    for row, allowed in zip(got, mask, strict=True):  # their logits are the same
        noise_is_heard = abs(high) < 1e6  # float32 has no room for it beside a logit of 1e8
        assert not noise_is_heard or allowed.sum() == 1 or scipy.stats.chisquare(row[allowed]).pvalue > 1e-4
    assert np.take_along_axis(np.asarray(tiled(mask)), np.asarray(mode)[:, None], 1).all()
    np.testing.assert_allclose(drawn[1], -np.log(tiled(mask).sum(-1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("space", (Discrete(5), MultiDiscrete((2, 3))), ids=str)
def test_a_masked_distribution_is_that_over_the_actions_allowed(space):
    """log_prob, entropy, KL and their gradients, row by row, by numpy in float64 over the allowed logits alone."""
    ends = [] if isinstance(space, Discrete) else [2]
    mask = np.concatenate([some_masks(n, rows=6, seed=n) for n in ([5] if not ends else NVEC)], -1)
    outputs, others = 3 * normal(1, 6, 5), 3 * normal(2, 6, 5)
    action = np.stack([part.argmax(-1) for part in np.split(mask, ends, -1)], -1)  # the first of those allowed
    head = action_distribution(space)
    taken = jnp.asarray(action[:, 0] if not ends else action)

    @jax.jit
    def results(outputs, others):
        one, other = head.make(outputs, mask=jnp.asarray(mask)), head.make(others, mask=jnp.asarray(mask))
        return jnp.stack([one.log_prob(taken), one.entropy(), one.kl(other)])

    expected, slopes = np.zeros((3, 6)), np.zeros((3, 6, 5))
    start = 0
    for k, part in enumerate(np.split(mask, ends, -1)):
        for i, allowed in enumerate(part):
            where = start + np.flatnonzero(allowed)
            log_p, log_q = (log_softmax(np.asarray(x, np.float64)[i, where]) for x in (outputs, others))
            p, ratio = np.exp(log_p), log_p - log_q
            at = where == start + action[i, k]
            expected[:, i] += log_p[at][0], -(p * log_p).sum(), (p * ratio).sum()
            # d log p(a) = onehot - p; d H = -p (log p + H); d KL = p (ratio - KL)
            slopes[0, i, where] = at - p
            slopes[1, i, where] = -p * (log_p - (p * log_p).sum())
            slopes[2, i, where] = p * (ratio - (p * ratio).sum())
        start += part.shape[-1]
    np.testing.assert_allclose(results(outputs, others), expected, rtol=1e-4, atol=1e-5)
    of_one, of_other = jax.jit(jax.jacobian(results, (0, 1)))(outputs, others)
    rows = np.arange(6)
    np.testing.assert_allclose(of_one[:, rows, rows], slopes, rtol=1e-3, atol=1e-4)
    for gradient in (of_one, of_other):
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[:, rows, rows][:, ~mask].any()  # exactly 0
    # whatever stands where nothing is allowed changes nothing
    wild = jnp.where(mask, outputs, jnp.asarray(np.random.default_rng(3).choice([1e30, -1e30, 7.0], mask.shape), "f"))
    np.testing.assert_array_equal(results(wild, others), results(outputs, others))


@pytest.mark.parametrize("space", (Discrete(5), MultiDiscrete(NVEC), Tuple((Discrete(2), Discrete(3)))), ids=str)
def test_a_choice_without_any_action_counts_as_one_of_all(space):
    head = action_distribution(space)
    outputs, other = normal(4, 2, 5), normal(5, 2, 5)
    mask = np.zeros((2, 5), bool)
    mask[1, 2] = True  # of two choices this leaves the first one without
    action = {Discrete: jnp.array([1, 2]), MultiDiscrete: jnp.array([[1, 0], [1, 0]])}.get(
        type(space), (jnp.array([1, 1]), jnp.array([0, 0]))
    )

    @jax.jit
    def results(outputs, mask):
        one = head.make(outputs, mask=mask)
        return jnp.stack([one.log_prob(action), one.entropy(), one.kl(head.make(other, mask=mask))])

    got = results(outputs, jnp.asarray(mask))
    np.testing.assert_allclose(got[:, 0], results(outputs, None)[:, 0], rtol=1e-5)
    by_hand = 0.0 if isinstance(space, Discrete) else log_softmax(np.asarray(outputs[1, :2]))[1]
    np.testing.assert_allclose(got[0, 1], by_hand, rtol=1e-5, atol=1e-6)
    slopes = jax.jit(jax.grad(lambda x: results(x, jnp.asarray(mask)).sum()))(outputs)
    assert np.isfinite(slopes).all() and np.all(slopes[0] != 0)


def test_an_action_that_is_masked_has_a_very_low_finite_log_probability():
    mask = jnp.array([[True, False, True]] * 3)
    logits = jnp.array([[0.0, 1.0, 2.0], [1e30, 0.0, -1e30], [-1e30, 0.0, -1e30]])

    def results(logits):
        one, other = (action_distribution(Discrete(3)).make(x, mask=mask) for x in (logits, jnp.zeros((3, 3))))
        out = jnp.stack([one.log_prob(jnp.ones(3, jnp.int32)), one.entropy(), one.kl(other)])
        return out.sum(), out

    (_, got), slope = jax.jit(jax.value_and_grad(results, has_aux=True))(logits)
    log_prob = np.asarray(got[0])
    assert np.all(log_prob < -8e8) and np.all(np.isfinite(log_prob**2))
    assert np.all(np.isfinite(got)) and np.all(np.isfinite(slope))


def test_a_mask_of_the_wrong_size_raises():
    head = action_distribution(MultiDiscrete(NVEC))
    with pytest.raises(ValueError, match=r"mask must have shape \(4, 5\), got \(5,\)"):
        head.make(jnp.zeros((4, 5)), mask=jnp.ones(5, bool))
    with pytest.raises(ValueError, match=r"mask must have shape \(4, 0\), got \(4, 3\)"):
        action_distribution(MultiBinary((3,))).make(jnp.zeros((4, 3)), mask=jnp.ones((4, 3), bool))


# ---------------------------------------------------------------- zeros and ones


def test_bernoulli_by_hand():
    # log-odds log 3, 0, -log 4: probabilities 3/4 1/2 1/5
    p = np.array([0.75, 0.5, 0.2])

    @jax.jit
    def results(logits):
        one = Bernoulli(logits)
        log_probs = [one.log_prob(jnp.array(action, jnp.int8)) for action in ([1, 0, 0], [0, 1, 1])]
        many = Bernoulli(jnp.broadcast_to(logits, (N, 3)))
        action, log_prob = many.sample_and_log_prob(KEY)
        again = many.log_prob(action)
        return [*log_probs, one.entropy(), one.kl(Bernoulli(jnp.zeros(3)))], one.mode(), action, log_prob, again

    numbers, mode, action, log_prob, again = results(jnp.log(jnp.array([3.0, 1.0, 0.25])))
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum()
    # KL to the fair coin: log 2 less the entropy, of each element
    by_hand = [np.log(0.75 * 0.5 * 0.8), np.log(0.25 * 0.5 * 0.2), entropy, 3 * np.log(2) - entropy]
    np.testing.assert_allclose(numbers, by_hand, rtol=1e-5)
    np.testing.assert_array_equal(mode, [1, 0, 0])
    assert mode.dtype == action.dtype == jnp.int8 and log_prob.shape == (N,)
    joint = np.bincount(np.asarray(action) @ np.array([4, 2, 1]), minlength=8)
    each = [np.prod(np.where([i >> 2 & 1, i >> 1 & 1, i & 1], p, 1 - p)) for i in range(8)]
    assert scipy.stats.chisquare(joint, N * np.array(each)).pvalue > 1e-3
    np.testing.assert_allclose(log_prob, again, rtol=1e-6)


def test_bernoulli_of_any_shape_and_of_extreme_logits():
    head = action_distribution(MultiBinary((2, 3)))
    assert (head.size, head.num_gaussian) == (6, 0)
    outputs, others = normal(0, 7, 6), normal(1, 7, 6)

    @jax.jit
    def results():
        one, flat = head.make(outputs), Bernoulli(outputs)
        action, log_prob = one.sample_and_log_prob(KEY)
        got = jnp.stack([log_prob, one.entropy(), one.kl(head.make(others))])
        of_flat = jnp.stack([flat.log_prob(action.reshape(7, 6)), flat.entropy(), flat.kl(Bernoulli(others))])
        return action, got, of_flat

    action, got, of_flat = results()
    assert action.shape == (7, 2, 3) and got.shape == (3, 7)
    np.testing.assert_allclose(got, of_flat, rtol=1e-5)
    assert action_distribution(MultiBinary((2,), "int32")).make(jnp.zeros((4, 2))).mode().dtype == jnp.int32
    with pytest.raises(ValueError, match=r"action must have shape \(7, 2, 3\)"):
        head.make(outputs).log_prob(action[0])

    def total(logits):
        one = Bernoulli(logits)
        return one.log_prob(jnp.array([0, 1])) + one.entropy() + one.kl(Bernoulli(jnp.zeros(2)))

    extreme = jnp.array([[1e9, -1e9], [-1e9, 1e9]])
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(total)))(extreme)
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(slope))
    np.testing.assert_array_equal(jax.jit(lambda x: Bernoulli(x).sample(KEY))(extreme), [[1, 0], [0, 1]])


# ---------------------------------------------------------------- trees


def plan(outputs, log_std, mask=None):
    """The parts of PLAN by hand: outputs are b 4, choices 5, go 3, step 2."""
    if mask is not None:
        hide = lambda x, m: jnp.where(m, x, -1e9)
        outputs = jnp.concatenate([hide(outputs[:, :9], mask), outputs[:, 9:]], -1)
    return [
        Categorical(outputs[:, :4]),
        MultiCategorical(outputs[:, 4:9], NVEC),
        Bernoulli(outputs[:, 9:12]),
        DiagGaussian(outputs[:, 12:], log_std),
    ]


@pytest.mark.parametrize(("masked", "per_row"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_a_joint_distribution_is_the_product_of_its_parts(masked, per_row):
    head = action_distribution(PLAN)
    assert (head.size, head.num_gaussian) == (14, 2)
    outputs, others = normal(0, 6, 14), normal(1, 6, 14)
    log_std = normal(2, *((6, 2) if per_row else (2,)))
    mask = np.concatenate([some_masks(n, rows=6, seed=n) for n in (4, *NVEC)], -1) if masked else None

    @jax.jit
    def both():
        one, other = head.make(outputs, log_std, mask), head.make(others, log_std + 0.1, mask)
        action, log_prob = one.sample_and_log_prob(KEY)
        parts, its = plan(outputs, log_std, mask), plan(others, log_std + 0.1, mask)
        actions = [action["b"], action["tree"][0], action["tree"][1]["go"], action["tree"][1]["step"]]
        by_parts = [
            sum(p.log_prob(a) for p, a in zip(parts, actions, strict=True)),
            sum(p.entropy() for p in parts),
            sum(p.kl(q) for p, q in zip(parts, its, strict=True)),
        ]
        joint = [one.log_prob(action), one.entropy(), one.kl(other)]
        return joint, by_parts, log_prob, action, one.mode(), [p.mode() for p in parts], one.sample(KEY)

    joint, by_parts, log_prob, action, mode, modes, drawn = both()
    for got, expected in zip(joint, by_parts, strict=True):
        assert got.shape == (6,)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_prob, joint[0], rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(action) == jax.tree.structure(mode) == jax.tree.structure(drawn)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(action)] == [
        ((6,), jnp.int32), ((6, 2), jnp.int32), ((6, 3), jnp.int8), ((6, 2), jnp.float32)
    ]  # fmt: skip
    for got, expected in zip(jax.tree.leaves(mode), modes, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_joint_distribution_is_a_tree_of_arrays():
    one = action_distribution(PLAN).make(normal(0, 6, 14), jnp.zeros(2))
    assert [x.shape for x in jax.tree.leaves(one)] == [(6, 4), (6, 5), (6, 3), (6, 2), (2,)]
    rows = distributions.batched(one)
    assert [x.shape for x in jax.tree.leaves(rows)] == [(6, 4), (6, 5), (6, 3), (6, 2), (6, 2)]
    picked = jax.tree.map(lambda x: x[::-2], rows)
    assert isinstance(picked, Joint)
    log_prob = jax.jit(lambda d: d.log_prob(d.mode()))
    np.testing.assert_allclose(log_prob(picked), log_prob(one)[::-2], rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(log_prob)(rows), log_prob(one), rtol=1e-5)


def test_joint_of_squashed_gaussians():
    space = Dict((("a", Box((2,), low=-1, high=1)), ("b", Box((), low=-1, high=1))))
    head = action_distribution(space, squash=True)
    assert (head.size, head.num_gaussian) == (3, 3)
    outputs, log_std = normal(0, 5, 3), normal(1, 3)
    assert isinstance(head.make(outputs, log_std).parts["b"], TanhGaussian)

    @jax.jit
    def results():
        action, log_prob = head.make(outputs, log_std).sample_and_log_prob(KEY)
        flat = jnp.concatenate([action["a"], action["b"][:, None]], -1)
        return log_prob, TanhGaussian(outputs, log_std).log_prob(flat)

    np.testing.assert_allclose(*results(), rtol=1e-3, atol=1e-3)


def test_faulty_trees_are_named():
    head = action_distribution(PLAN)
    one = head.make(jnp.zeros((4, 14)), jnp.zeros(2))
    with pytest.raises(ValueError, match="needs log_std"):
        head.make(jnp.zeros((4, 14)))
    with pytest.raises(ValueError, match=r"log_std must have shape \(2,\), got \(3,\)"):
        head.make(jnp.zeros((4, 14)), jnp.zeros(3))
    with pytest.raises(ValueError, match="b"):
        one.log_prob({"tree": one.mode()["tree"]})
    with pytest.raises(ValueError, match=r"action must have shape \(4,\)"):
        one.log_prob({**one.mode(), "b": jnp.zeros((1,), jnp.int32)})
    with pytest.raises(InputError, match=r"Box\(shape=\(2,\), dtype='int32'.* \(tree/1\)"):
        action_distribution(Dict((("tree", Tuple((Discrete(2), Box((2,), "int32")))),)))
    with pytest.raises(InputError, match="it has no actions"):
        action_distribution(Dict(()))
