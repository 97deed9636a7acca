"""Tracing, and each operation of the numpy interpreter against jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jrl.errors import InputError
from jrl.export import interpreter, npz
from jrl.export.traced_program import trace
from jrl.types import Box

SPACE = Box((2, 6))
PI = np.pi * np.arange(1, 7, dtype=np.float32)
KERNEL = np.random.default_rng(3).normal(size=(3, 2, 2, 4)).astype(np.float32)  # h, w, C, F


def program_of(function, space=SPACE):
    return trace(lambda obs, memory, reward, begins: (function(obs), memory), space, lambda n: ())


def run_numpy(program, obs, directory):
    for name, content in npz.build_files(program).items():
        (directory / name).write_bytes(content)
    (action,) = interpreter.load(directory)(obs)
    return action


def names(program):
    return [op.primitive.name for op in program.operations]


image = lambda x: jnp.concatenate([x, -x, 2 * x, x, 3 - x], 1).reshape(-1, 10, 3, 2)
conv = lambda x, kernel, layout, **options: lax.conv_general_dilated(x, kernel, dimension_numbers=layout, **options)

# tested operation, and a function that contains it
FUNCTIONS = [
    ("abs", jnp.abs),
    ("add", lambda x: x + PI[None, None]),
    ("and", lambda x: (x > 0) & (x < 1)),
    ("argmax", lambda x: jnp.argmax(x, 1)),
    ("argmin", lambda x: jnp.argmin(x, 2)),
    ("broadcast_in_dim", lambda x: x[:, None] * jnp.ones((1, 3, 1, 1))),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(PI[None, None], x.shape) + x),
    ("clamp", lambda x: lax.clamp(-0.5, x, 0.7)),
    ("concatenate", lambda x: jnp.concatenate([x, 2 * x], 1)),
    ("conv2d", lambda x: conv(image(x), KERNEL, ("NHWC", "HWIO", "NHWC"), window_strides=(2, 1), padding="SAME")),
    (
        "conv2d",
        lambda x: conv(
            image(x).transpose(0, 3, 1, 2),
            KERNEL.transpose(3, 2, 0, 1),
            ("NCHW", "OIHW", "NCHW"),
            window_strides=(1, 2),
            padding=((1, 0), (0, 2)),
        ),
    ),
    ("convert", lambda x: x.astype(jnp.int32)),
    ("convert", lambda x: (x > 0).astype(jnp.float32)),
    ("cos", jnp.cos),
    ("cumsum", lambda x: jnp.cumsum(x, 2)),
    ("cumsum", lambda x: jnp.cumsum((x > 0).astype(jnp.int8), 1, dtype=jnp.int32)),
    ("div", lambda x: x / PI[None, None]),
    ("dot_general", lambda x: x @ KERNEL.reshape(6, 8)),
    ("dot_general", lambda x: jnp.einsum("nij,nkj->nik", x, 2 * x)),
    ("dot_general", lambda x: jnp.einsum("nij,jik->kn", x, KERNEL.reshape(6, 2, 4))),
    ("eq", lambda x: x == jnp.floor(x)),
    ("erf", lax.erf),
    ("erfc", lambda x: jax.nn.gelu(x, approximate=False)),
    ("exp", lambda x: jnp.exp(40 * x)),  # infinite for some inputs
    ("expm1", jnp.expm1),
    ("floor", jnp.floor),
    ("ge", lambda x: x >= 0.5),
    ("gt", lambda x: x > 0.5),
    ("integer_pow", lambda x: x**3),
    ("integer_pow", lambda x: x**-2),
    ("iota", lambda x: lax.broadcasted_iota(jnp.int32, x.shape, 2) + x.astype(jnp.int32)),
    ("le", lambda x: x <= 0.5),
    ("log", lambda x: jnp.log(jnp.abs(x))),
    ("log1p", lambda x: jnp.log1p(jnp.abs(x))),
    ("logistic", lambda x: jax.nn.sigmoid(30 * x)),
    ("lt", lambda x: x < 0.5),
    ("max", lambda x: jnp.maximum(x, 0.1)),
    ("min", lambda x: jnp.minimum(x, 0.1)),
    ("mul", lambda x: x * x),
    ("ne", lambda x: x != jnp.floor(x)),
    ("neg", lambda x: -x),
    ("not", lambda x: ~(x > 0)),
    ("or", lambda x: (x > 1) | (x < 0)),
    ("pad", lambda x: jnp.pad(x, [(0, 0), (1, 0), (0, 2)], constant_values=3.0)),
    ("pad", lambda x: x.transpose(1, 0, 2).at[1].add(x[:, 0]).transpose(1, 0, 2)),
    ("pow", lambda x: jnp.abs(x) ** 1.5),
    ("reduce_and", lambda x: (x > 0).all(2)),
    ("reduce_or", lambda x: (x > 1).any((1, 2))),
    ("reduce_max", lambda x: x.max((1, 2))),
    ("reduce_min", lambda x: x.min(1)),
    ("reduce_sum", lambda x: x.sum((1, 2))),
    ("reduce_sum", lambda x: (x > 0).sum(2)),
    ("reshape", lambda x: x.reshape(-1, 12)),
    ("round", lambda x: lax.round(2 * x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    ("rsqrt", lambda x: lax.rsqrt(jnp.abs(x))),
    ("select_n", lambda x: jnp.where(x > 0, x, 2 * x)),
    ("sign", jnp.sign),
    ("reshape", lambda x: x.reshape(-1, 6)[:, :3].reshape(-1, 6)),  # 2 N rows in between
    ("sin", jnp.sin),
    ("slice", lambda x: lax.slice(x, (0, 1, 1), (x.shape[0], 2, 5), (1, 1, 2))),
    ("slice", lambda x: jnp.stack(jnp.split(x, [1, 3, 5], -1)[1:3], 1)),
    ("slice", lambda x: x[..., 3]),  # jax gathers for a symbolic batch
    ("slice", lambda x: jax.nn.relu(x)[:, 1, -2:]),
    ("sqrt", lambda x: jnp.sqrt(jnp.abs(x))),
    ("square", jnp.square),
    ("squeeze", lambda x: x[:, :1].squeeze(1)),
    ("sub", lambda x: x - PI[None, None]),
    ("tanh", jnp.tanh),
    ("transpose", lambda x: x.transpose(0, 2, 1)),
    # maximum over a window, which has no operation
    ("max", lambda x: lax.reduce_window(image(x), -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME")),
    ("max", lambda x: lax.reduce_window(image(x), -jnp.inf, lax.max, (1, 4, 1, 2), (1, 3, 2, 1), "VALID")),
]


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_operations_equal_those_of_jax(tmp_path, name, function):
    obs = np.random.default_rng(0).normal(size=(5, 2, 6)).astype(np.float32)
    obs[0, 0] = np.round(obs[0, 0])
    program = program_of(function)
    assert name in npz.build_files(program)["program.json"].decode()
    expected = np.asarray(function(jnp.asarray(obs)))
    for found in (run_numpy(program, obs, tmp_path), np.asarray(jax.jit(lambda x: program(x)[0])(obs))):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=3e-6)


def test_every_operation_is_tested():
    assert {name for name, _ in FUNCTIONS} == set(interpreter.OPERATIONS)


def test_a_large_batch_is_convolved_in_parts(tmp_path):
    obs = np.random.default_rng(0).normal(size=(2 * interpreter.CONV_ROWS + 3, 2, 6)).astype(np.float32)
    function = lambda x: conv(image(x), KERNEL, ("NHWC", "HWIO", "NHWC"), window_strides=(1, 1), padding="VALID")
    found = run_numpy(program_of(function), obs, tmp_path)
    np.testing.assert_allclose(found, function(jnp.asarray(obs)), rtol=3e-6, atol=3e-6)


def test_values_that_no_action_needs_are_dropped(tmp_path):
    """A critic, observation statistics, and jitted or custom-gradient functions."""
    scale = jnp.arange(6.0)

    @jax.jit
    def act(obs):
        _critic = jnp.tanh(obs.sum(1))
        return jax.nn.relu(obs) * (jnp.sqrt(scale) + 1.0)[None, None]

    program = program_of(act)
    assert set(names(program)) <= {"max", "mul"}
    assert len(program.constants) == 2
    np.testing.assert_array_equal(run_numpy(program, np.ones((1, 2, 6), np.float32), tmp_path)[0, 0, 4], 3.0)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jnp.sort(x, 1), "sort"),
        (lambda x: lax.cumsum(x, 1, reverse=True), "cumsum"),
        (lambda x: x.astype(jnp.int32) // 2, "div"),
        (lambda x: jnp.take_along_axis(x, x.astype(jnp.int32), 2), "gather"),
        (lambda x: conv(image(x), KERNEL, ("NHWC", "HWIO", "NHWC"), window_strides=(1, 1), padding="VALID",
                        rhs_dilation=(2, 1)), "conv_general_dilated"),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 1), ((0, 0), (0, 0), (2, 0))),
         "reduce_window_max"),
    ],
)  # fmt: skip
def test_an_operation_that_numpy_lacks_is_named(function, name):
    with pytest.raises(InputError, match=f"uses .*{name}"):
        npz.build_files(program_of(function))


def test_a_size_that_is_not_a_multiple_of_the_batch_is_refused():
    with pytest.raises(InputError, match=r"multiples of the batch size n, got n \+ 1"):
        program_of(lambda x: jnp.concatenate([x, x[:1]]).sum(0))


def test_a_loop_with_a_carry_only_is_unrolled(tmp_path):
    program = program_of(lambda x: lax.fori_loop(0, 3, lambda i, y: 2 * y + x, x))
    assert "scan" not in names(program) and names(program).count("add") == 3
    obs = np.ones((2, 2, 6), np.float32)
    np.testing.assert_array_equal(run_numpy(program, obs, tmp_path), 15 * obs)  # 2 (2 (2 + 1) + 1) + 1


def test_a_constant_action(tmp_path):
    program = program_of(lambda x: jnp.zeros((x.shape[0], 2)) + 1.0)
    np.testing.assert_array_equal(run_numpy(program, np.zeros((3, 2, 6), np.float32), tmp_path), np.ones((3, 2)))
