"""Dropout and batch renormalisation of layers, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.networks import Head, NetworkConfig, build
from jrl.networks.batch_renorm import BatchRenorm
from jrl.networks.critics import build_critics
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
SPEC = EnvSpec(Box((4,)), Discrete(3), 1)
BOX = EnvSpec(Box((4,)), Box((2,), low=-1.0, high=1.0), 1)


def plain(x, valid, running, scale, bias):
    """One learning pass in float64: (output, statistics after it)."""
    mean, var, steps = running
    rows = x[valid]
    m, v = rows.mean(0), rows.var(0)
    s, std = np.sqrt(v + 1e-3), np.sqrt(var + 1e-3)
    warm = steps >= 100_000
    r = np.clip(s / std, 1 / 3, 3) if warm else 1.0
    d = np.clip((m - mean) / std, -5, 5) if warm else 0.0
    after = 0.99 * mean + 0.01 * m, 0.99 * var + 0.01 * v, steps + 1
    return ((x - m) / s * r + d) * scale + bias, after


def test_three_learning_passes_by_hand():
    """The third is the first after the warm-up; its columns reach both bounds of r and one of d."""
    scale, bias = np.array([1.0, 2.0, -0.5]), np.array([0.0, 1.0, 3.0])
    running = np.zeros(3), np.array([1.0, 1e-4, 400.0]), 99_998.0
    valid = np.array([True, True, False, True, True, False])

    def learn(params, x):
        """The output; the gradient of its sum with respect to the statistics."""
        apply = lambda params: BatchRenorm().apply({"params": params}, x, jnp.asarray(valid))
        return apply(params), jax.grad(lambda params: 7.0 * apply(params).sum())(params)

    learn = jax.jit(learn)
    for i in range(3):
        x = RNG.normal(size=(6, 3)) * np.array([1.0, 5.0, 0.5]) + np.array([0.0, 3.0, 0.2])
        params = dict(zip(("running_mean", "running_var", "running_steps"), running)) | {"scale": scale, "bias": bias}
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
        got, change = learn(params, x.astype(np.float32))
        want, after = plain(x, valid, running, scale, bias)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
        if i == 2:
            assert not np.allclose(got, plain(x, valid, (*running[:2], 0.0), scale, bias)[0], atol=0.1)
        for name, old, new in zip(("mean", "var", "steps"), running, after, strict=True):
            np.testing.assert_allclose(change[f"running_{name}"], new - old, rtol=1e-3, atol=1e-5, err_msg=name)
        running = after
    acting = BatchRenorm().apply({"params": params}, x.astype(np.float32))
    mean, var = np.asarray(params["running_mean"]), np.asarray(params["running_var"])
    np.testing.assert_allclose(acting, (x - mean) / np.sqrt(var + 1e-3) * scale + bias, rtol=2e-4, atol=2e-5)


def test_without_valid_rows_statistics_stay_and_outputs_are_finite():
    params = jax.jit(BatchRenorm().init)(KEY, jnp.ones((2, 3)))["params"]
    loss = lambda params: BatchRenorm().apply({"params": params}, jnp.ones((2, 3)), jnp.zeros(2, bool)).sum()
    value, change = jax.value_and_grad(loss)(params)
    assert np.isfinite(value)
    assert not any(np.any(change[name]) for name in change if name.startswith("running_"))


def test_gradients_go_through_the_statistics_of_the_batch():
    """As those of the plain formula, in which r and d are numbers."""
    x, ones = RNG.normal(size=(5, 2)).astype(np.float32), jnp.ones(5, bool)
    params = {"scale": jnp.ones(2), "bias": jnp.zeros(2), "running_mean": jnp.full(2, 0.3)}
    params |= {"running_var": jnp.full(2, 2.0), "running_steps": jnp.asarray(2e5)}

    def formula(x):
        m, s = x.mean(0), jnp.sqrt(x.var(0) + 1e-3)
        std = np.sqrt(2.0 + 1e-3)
        r, d = jax.lax.stop_gradient((s / std, (m - 0.3) / std))
        return jnp.sum(jnp.sin((x - m[None]) / s[None] * r[None] + d[None]))

    got = jax.grad(lambda x: jnp.sum(jnp.sin(BatchRenorm().apply({"params": params}, x, ones))))(x)
    np.testing.assert_allclose(got, jax.grad(formula)(x), rtol=1e-4, atol=1e-5)


def test_dropout_sets_a_share_to_0_and_keeps_the_mean():
    """Only `apply` with a key has it: a step with a key, which acting calls, has not."""
    cfg = NetworkConfig(hidden=(4000,), dropout=0.25, activation="relu", shared=True)
    net = build(SPEC, cfg, {"q": Head(1)})
    params = jax.tree.map(
        lambda x: np.abs(np.asarray(x)), jax.jit(net.init)(KEY)
    )  # all outputs of the layer are positive
    params["q_head"]["kernel"] = np.full((4000, 1), 1 / 4000, np.float32)
    obs, apply = np.ones((3, 4), np.float32), jax.jit(net.apply)
    whole = apply(params, obs)[0]
    np.testing.assert_array_equal(net.step(params, obs, (), key=KEY)[0][0], whole)
    one, same, other = (apply(params, obs, key=jax.random.key(i))[0] for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.all(one != other) and len(np.unique(one)) == 3  # each row has a mask of its own
    np.testing.assert_allclose(one, whole, rtol=0.1)
    # a layer's outputs are 0 or 4 / 3 of what they are
    params["q_head"]["kernel"] = np.eye(4000, 1, dtype=np.float32)
    one = np.stack([apply(params, obs, key=jax.random.key(i))[0] for i in range(40)]).ravel()
    whole = apply(params, obs)[0][0, 0]
    kept = one > 0
    np.testing.assert_allclose(one[kept], whole / 0.75, rtol=1e-5)
    assert 0.6 < kept.mean() < 0.9


@pytest.mark.parametrize("spec", [BOX, SPEC], ids=["box", "discrete"])
def test_critics_have_masks_and_statistics_of_their_own(spec):
    cfg = NetworkConfig(hidden=(8, 8), critic_dropout=0.5, critic_norm="batch_renorm")
    critics = build_critics(spec, cfg, 2)
    params = jax.tree.map(lambda x: jnp.stack([x[0]] * 2), jax.jit(critics.init)(KEY))  # the same critic twice
    obs = RNG.normal(size=(5, 4)).astype(np.float32)
    args = (obs, RNG.uniform(-1, 1, (5, 2)).astype(np.float32)) if spec is BOX else (obs,)
    apply = jax.jit(critics.apply)
    one, two = apply(params, *args)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    one, two = apply(params, *args, key=KEY)
    assert not np.allclose(one, two)
    params["layers" if spec is BOX else "value_torso"]["BatchRenorm_0"]["running_mean"] += jnp.array([[0.0], [1.0]])
    one, two = apply(params, *args)
    assert not np.allclose(one, two)
    alone = apply(jax.tree.map(lambda x: x[1:], params), *args)[0]
    np.testing.assert_allclose(two, alone, rtol=1e-5, atol=1e-6)


def test_the_policy_has_neither_where_critics_alone_have_both():
    heads = {"policy": Head(3), "value": Head(1, privileged=True)}
    cfg = NetworkConfig(hidden=(8,), head_hidden=(4,), critic_dropout=0.5, critic_norm="batch_renorm")
    net = build(SPEC, cfg, heads)
    params = jax.jit(net.init)(KEY)
    with_statistics = {name for name, part in params.items() if "running_mean" in str(part)}
    assert with_statistics == {"value_torso", "value_norm_0"}
    obs = RNG.normal(size=(5, 4)).astype(np.float32)
    apply = jax.jit(net.apply)
    (policy, value), (same, other) = apply(params, obs), apply(params, obs, key=KEY, valid=jnp.ones(5, bool))
    np.testing.assert_array_equal(policy, same)
    assert not np.allclose(value, other)
