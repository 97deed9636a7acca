"""Loops over time, as a CPU and as an accelerator makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jrl.ops import scans


def body(total, x):
    total = total * 0.5 + x
    return total, total * 2


@pytest.mark.parametrize("length", [1, 16, 37])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_a_scan(monkeypatch, length, reverse):
    xs = jnp.arange(length * 2, dtype=jnp.float32).reshape(length, 2)
    expected = lax.scan(body, jnp.ones(2), xs, reverse=reverse)
    run = jax.jit(lambda xs: scans.elementwise(body, jnp.ones(2), xs, reverse=reverse))
    jax.tree.map(np.testing.assert_array_equal, run(xs), expected)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    unrolled = scans.elementwise(body, jnp.ones(2), xs, reverse=reverse)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), unrolled, expected)


@pytest.mark.parametrize("length", [1, 4, 10])
def test_small_bodies_are_unrolled(length):
    xs = jnp.arange(length * 2, dtype=jnp.float32).reshape(length, 2)
    small = lambda xs: scans.small(body, jnp.ones(2), xs)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(small)(xs), lax.scan(body, jnp.ones(2), xs))

    def large(xs):
        many = lambda total, x: (lax.fori_loop(0, 3, lambda i, y: y + x, total), [body(total, x) for _ in range(400)])
        return scans.small(many, jnp.ones(2), xs)

    assert [find_unroll(fn, xs) for fn in (small, large)] == [4, 1]


def find_unroll(fn, xs):
    return next(eqn.params["unroll"] for eqn in jax.make_jaxpr(fn)(xs).eqns if eqn.primitive.name == "scan")


def test_accelerators_make_several_steps_in_one():
    run = jax.jit(lambda xs: scans.elementwise(body, jnp.ones(2), xs))
    like = jax.ShapeDtypeStruct((64, 2), jnp.float32)
    steps = {}
    for platform in ("cpu", "cuda", "tpu"):
        module = export.export(run, platforms=(platform,))(like).mlir_module()
        steps[platform] = module.count("call @") + module.count("multiply")  # by the version of jax a body is inlined
    assert steps["cuda"] == steps["tpu"] >= steps["cpu"] + scans._UNROLL - 1
