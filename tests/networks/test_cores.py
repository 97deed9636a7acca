"""Cores: what a window of steps gives is what one step after the other gives, and nothing passes an episode's end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl.errors import InputError
from jrl.fields import hyper
from jrl.networks import cores

N, L, IN = 4, 11, 3
GTRXL = hyper.Gtrxl(size=6, layers=2, heads=2, head_size=3, memory=3, mlp=5, gate_bias=0.5)
CONFIGS = {
    "lstm": hyper.Lstm(size=5),
    "gru": hyper.Gru(size=5),
    "gtrxl": GTRXL,
    "lru": hyper.Lru(size=5, state=4, layers=2),
}
# the first row, the last row, several in a row, all
RESET = np.zeros((N, L), bool)
RESET[0, [0, 4, 5, 6]] = RESET[1, [2, L - 1]] = RESET[2] = True


def _some(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def _initial(name):
    core = cores.make(CONFIGS[name], IN, weights="orthogonal" if name in ("lstm", "gru") else "lecun")
    return jax.device_get(jax.jit(core.init)(jax.random.key(0)))


lstm = pytest.mark.parametrize("name", some_quick(CONFIGS, "lstm"))  # the others take up to half a minute to compile


@lstm
def test_kernels_of_the_inputs_begin_as_told(name):
    params = jax.jit(cores.make(CONFIGS[name], IN, weights="uniform").init)(jax.random.key(0))
    kernel = np.asarray(params["input_kernel"])
    assert 0.8 * IN**-0.5 < np.abs(kernel).max() <= IN**-0.5


@functools.cache
def _made(name):
    """A core, parameters of which none is 0 or 1, and a memory in the middle of an episode."""
    core, params = cores.make(CONFIGS[name], IN), _initial(name)
    params = {n: p + np.float32(0.2) * _some(i, *p.shape) for i, (n, p) in enumerate(params.items())}
    step, unroll = jax.jit(core.step), jax.jit(core.unroll)
    carry = core.carry(N)
    for t in range(2):
        _, carry = step(params, _some(t, N, IN), carry)
    carry = jax.tree.map(lambda new, old: _where(np.arange(N) == 0, new, old), core.carry(N), carry)
    return core, params, carry, step, unroll


def _steps(core, step, params, x, carry, reset):
    """The meaning of `unroll`."""
    ys, fresh = [], core.carry(N)
    for t in range(x.shape[1]):
        y, carry = step(params, x[:, t], carry)
        ys.append(y)
        carry = jax.tree.map(lambda new, old, t=t: _where(reset[:, t], new, old), fresh, carry)
    return _numpy(ys[0]).stack(ys, 1), carry


def _numpy(x):
    return jnp if isinstance(x, jax.core.Tracer) else np


def _where(rows, new, old):
    rows = rows.reshape(-1, *[1] * (old.ndim - 1))
    return _numpy(old).where(rows, new, old)


def _close(found, expected, tolerance=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


@lstm
def test_a_window_is_its_steps(name):
    core, params, carry, step, unroll = _made(name)
    x = _some(3, N, L, IN)
    found = jax.device_get(unroll(params, x, carry, RESET))
    _close(found, _steps(core, step, params, x, carry, RESET))
    assert found[0].shape == (N, L, core.size)
    fresh = core.carry(N)
    for after, start in zip(jax.tree.leaves(found[1]), jax.tree.leaves(fresh), strict=True):
        assert (after.shape, after.dtype) == (start.shape, start.dtype)
        np.testing.assert_array_equal(after[1:3], np.asarray(start)[1:3])  # their last row has a reset
        assert np.all(np.any(after[np.array([0, 3])] != 0, axis=tuple(range(1, after.ndim))))


@pytest.mark.slow
def test_attention_in_chunks_is_its_steps():
    core, params, carry, step, unroll = _made("gtrxl")
    x, reset = _some(4, N, 70, IN), _some(5, N, 70) > 1.5  # two chunks of 32 queries and one of 6
    reset[:, 30:34] = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert 0 < reset[:, :30].sum() < 30
    _close(unroll(params, x, carry, reset), _steps(core, step, params, x, carry, reset))


@pytest.mark.parametrize("name", some_quick(("lstm", "gru", "lru"), "lstm"))
def test_the_gradient_is_that_of_the_steps(name):
    core, params, carry, _, _ = _made(name)
    x, reset, weight = _some(3, N, 4, IN), RESET[:, 3:7], _some(6, N, 4, core.size)

    def loss(run):
        def value(params, x, carry):
            y, after = run(params, x, carry, reset)
            return jnp.sum(weight * y) + sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(after))

        return jax.jit(jax.grad(value, (0, 1, 2)))(params, x, carry)

    found, expected = loss(core.unroll), loss(functools.partial(_steps, core, core.step))
    _close(found, expected, 1e-4)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_attention_reaches_as_far_as_its_memory(layers):
    core, params = cores.make(dataclasses.replace(GTRXL, layers=layers), IN), _made("gtrxl")[1]
    last = lambda x: jnp.sum(core.unroll(params, x, core.carry(1), jnp.zeros((1, L), bool))[0][:, -1] ** 2)
    dx = np.asarray(jax.jit(jax.grad(last))(_some(3, 1, L, IN)))[0]
    reached = L - 1 - layers * GTRXL.memory
    np.testing.assert_array_equal(dx[:reached], 0.0)
    assert np.all(np.any(dx[reached:] != 0, axis=-1))


# ---------------------------------------------------------------- by hand


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _by_hand(name, x):
    """The core's outputs for one episode x [L, in], one step after the other in numpy."""
    params = {n: np.asarray(p, np.float64) for n, p in _made(name)[1].items()}
    return {"lstm": _lstm, "gru": _gru, "lru": _lru, "gtrxl": _gtrxl}[name](params, np.asarray(x, np.float64))


def _lstm(p, x):
    h, c, ys = np.zeros(5), np.zeros(5), []
    for row in x:
        z = (row @ p["input_kernel"] + h @ p["recurrent_kernel"] + p["recurrent_bias"]).reshape(4, 5)
        c = _sigmoid(z[1]) * c + _sigmoid(z[0]) * np.tanh(z[2])
        h = _sigmoid(z[3]) * np.tanh(c)
        ys.append(h)
    return ys


def _gru(p, x):
    h, ys = np.zeros(5), []
    for row in x:
        a = (row @ p["input_kernel"] + p["input_bias"]).reshape(3, 5)
        b = (h @ p["recurrent_kernel"] + p["recurrent_bias"]).reshape(3, 5)
        r, z = _sigmoid(a[0] + b[0]), _sigmoid(a[1] + b[1])
        h = (1 - z) * np.tanh(a[2] + r * b[2]) + z * h
        ys.append(h)
    return ys


def _norm(p, name, x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6) * p[f"{name}_scale"] + p[f"{name}_bias"]


def _lru(p, x):
    h, ys = np.zeros((2, 4), complex), []
    for row in x:
        y = row @ p["input_kernel"] + p["input_bias"]
        for i in range(2):
            q = {n.removeprefix(f"layer_{i}_"): value for n, value in p.items()}
            u = _norm(q, "norm", y)
            b, c = q["b_kernel"][:, :4] + 1j * q["b_kernel"][:, 4:], q["c_kernel"][:4] - 1j * q["c_kernel"][4:]
            h[i] = np.exp(-np.exp(q["nu_log"]) + 1j * np.exp(q["theta_log"])) * h[i] + np.exp(q["gamma_log"]) * (u @ b)
            g = np.asarray(jax.nn.gelu((h[i] @ c).real + q["d"] * u))
            value, gate = np.split(g @ q["glu_kernel"] + q["glu_bias"], 2)
            y = y + value * _sigmoid(gate)
        ys.append(y)
    return ys


def _gtrxl(p, x):
    cfg, relu = GTRXL, lambda a: np.maximum(a, 0)
    rows = [row @ p["input_kernel"] + p["input_bias"] for row in x]
    for i in range(cfg.layers):
        q = {n.removeprefix(f"layer_{i}_"): value for n, value in p.items()}

        def gate(name, a, y, q=q):
            r, z, h = np.split(y @ q[f"{name}_y_kernel"] + q[f"{name}_y_bias"], 3)
            r_a, z_a = np.split(a @ q[f"{name}_x_kernel"], 2)
            z = _sigmoid(z + z_a)
            return (1 - z) * a + z * np.tanh(h + (_sigmoid(r + r_a) * a) @ q[f"{name}_reset_x_kernel"])

        normed, outputs = [_norm(q, "attention_norm", row) for row in rows], []
        for t, row in enumerate(rows):
            heads = []
            for head in range(cfg.heads):
                columns = slice(head * cfg.head_size, (head + 1) * cfg.head_size)
                key, value = (part[:, columns] for part in np.split(q["key_value_kernel"], 2, 1))
                query, scores, values = normed[t] @ q["query_kernel"][:, columns], [], []
                for d in range(min(t, cfg.memory) + 1):
                    angle = d / 10_000 ** (np.arange(0, cfg.size, 2) / cfg.size)
                    distance = np.concatenate([np.sin(angle), np.cos(angle)]) @ q["distance_kernel"][:, columns]
                    content = (query + q["content_bias"][head]) @ (normed[t - d] @ key)
                    scores.append((content + (query + q["position_bias"][head]) @ distance) / np.sqrt(cfg.head_size))
                    values.append(normed[t - d] @ value)
                weights = np.exp(scores) / np.exp(scores).sum()
                heads.append(weights @ np.stack(values))
            y = gate("attention_gate", row, relu(np.concatenate(heads) @ q["output_kernel"]))
            hidden = relu(_norm(q, "mlp_norm", y) @ q["mlp_in_kernel"] + q["mlp_in_bias"])
            outputs.append(gate("mlp_gate", y, relu(hidden @ q["mlp_out_kernel"] + q["mlp_out_bias"])))
        rows = outputs
    return rows


@pytest.mark.parametrize("name", some_quick(CONFIGS, "lstm", "gru"))
def test_it_is_the_formula(name):
    core, params, _, _, unroll = _made(name)
    x = _some(3, N, L, IN)
    y = np.asarray(unroll(params, x, core.carry(N), np.zeros((N, L), bool))[0])
    np.testing.assert_allclose(y[1], np.stack(_by_hand(name, x[1])), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- programs, types, beginnings


@lstm
def test_bfloat16_is_only_of_the_products(name):
    _, params, carry, _, unroll = _made(name)
    core = cores.make(CONFIGS[name], IN, dtype="bfloat16")
    x = _some(3, N, L, IN)
    y, after = jax.jit(core.unroll)(params, x, carry, RESET)
    exact, exact_after = unroll(params, x, carry, RESET)
    for a, b in zip(jax.tree.leaves((y, after)), jax.tree.leaves((exact, exact_after)), strict=True):
        assert a.dtype == b.dtype
    difference = np.abs(y - exact)
    assert 1e-5 < difference.max() < 0.15
    grads = jax.eval_shape(jax.grad(lambda p: jnp.sum(core.unroll(p, x, carry, RESET)[0])), params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_parameters_at_the_start():
    made = {name: _initial.__wrapped__(name) for name in CONFIGS}
    np.testing.assert_array_equal(made["lstm"]["recurrent_bias"], [0.0] * 5 + [1.0] * 5 + [0.0] * 10)
    for name, gates in (("lstm", 4), ("gru", 3)):
        for kernel in np.split(made[name]["recurrent_kernel"], gates, 1):
            np.testing.assert_allclose(kernel.T @ kernel, np.eye(5), atol=1e-5)
    np.testing.assert_array_equal(made["gtrxl"]["layer_1_mlp_gate_y_bias"], [0.0] * 6 + [-0.5] * 6 + [0.0] * 6)
    for params in made.values():
        assert {p.dtype for p in params.values()} == {jnp.dtype("float32")}
        ones = {name for name, p in params.items() if np.all(p == 1.0)}
        assert ones == {name for name in params if "norm" in name and "scale" in name}


@pytest.mark.slow
@pytest.mark.parametrize(("r_min", "r_max"), [(0.5, 0.6), (0.0, 1.0)])
def test_eigenvalues_lie_in_the_ring(r_min, r_max):
    core = cores.make(hyper.Lru(size=5, state=2_000, r_min=r_min, r_max=r_max), IN)
    params = jax.jit(core.init)(jax.random.key(0))
    modulus, angle = (np.asarray(params[f"layer_0_{name}"]) for name in ("nu_log", "theta_log"))
    modulus, angle = np.exp(-np.exp(modulus)), np.exp(angle)
    assert r_min <= modulus.min() and modulus.max() <= r_max and angle.max() <= 2 * np.pi
    # uniform in the ring's area
    np.testing.assert_allclose(np.mean(modulus**2), (r_min**2 + r_max**2) / 2, atol=0.03 * (r_max**2 - r_min**2))
    np.testing.assert_allclose(np.exp(params["layer_0_gamma_log"]), np.sqrt(1 - modulus**2), rtol=1e-2)


def test_sizes_out_of_range():
    assert all(cores.faults(cfg) == [] for cfg in (*CONFIGS.values(), hyper.NoCore()))
    with pytest.raises(InputError) as e:
        hyper.Gtrxl(heads=0, memory=-1, gate_bias=0)
    assert [message.split(",")[0] for message in e.value.errors] == [
        "heads: expected a whole number in [1",
        "memory: expected a whole number in [1",
    ]
    (fault,) = cores.faults(hyper.Lru(r_min=0.9, r_max=0.9))
    assert fault == "network.core.r_min: expected a number below network.core.r_max 0.9, got 0.9"
    with pytest.raises(InputError, match="lstm, gru, gtrxl or lru"):
        cores.make(hyper.NoCore(), IN)
