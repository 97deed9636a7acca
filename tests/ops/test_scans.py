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


def test_accelerators_make_several_steps_in_one():
    run = jax.jit(lambda xs: scans.elementwise(body, jnp.ones(2), xs))
    like = jax.ShapeDtypeStruct((64, 2), jnp.float32)
    steps = {}
    for platform in ("cpu", "cuda", "tpu"):
        module = export.export(run, platforms=(platform,))(like).mlir_module()
        steps[platform] = module.count("call @") + module.count("multiply")  # by the version of jax a body is inlined
    assert steps["cuda"] == steps["tpu"] >= steps["cpu"] + scans._UNROLL - 1
