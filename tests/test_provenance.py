"""The first bad operation of small functions whose fault is known."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import minibatch
from jrl.run.provenance import first_bad_operation, is_finite

INF, NAN = jnp.inf, jnp.nan


def named(fn, *args, bad=0):
    """The operation, after a check that the result is bad, and that its file is this one."""
    results = jax.tree.leaves(jax.jit(fn)(*args))
    assert not is_finite(results[bad])
    operation = first_bad_operation(fn, args, [f"x{i}" for i in range(len(args))], bad)
    assert operation is not None
    assert Path(operation.file).name == Path(__file__).name
    return operation


def test_log_of_zero():
    def fn(x, y):
        unread = jnp.where(x > 0, jnp.log(x), 0.0)  # -inf, but it is not taken
        read = jnp.log(y)
        return jnp.sum(unread) + jnp.sum(read)

    found = named(fn, jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0, 0.0]))
    assert (found.primitive, found.text, found.function) == ("log", "read = jnp.log(y)", f"{found.function}")
    assert found.operands == ("[1. 2. 0.]",) and found.result.endswith("-inf]")
    assert not found.backward
    assert "log, in" in str(found) and f":{found.line}\n    read = jnp.log(y)" in str(found)


def test_zero_by_zero():
    found = named(lambda x, y: jnp.sum(x / y), jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]))
    assert (found.primitive, found.operands, found.result) == ("div", ("[1. 0.]", "[1. 0.]"), "[ 1. nan]")


def test_an_overflow_in_the_backward_pass_only():
    def loss(x):
        small = 1e30 * x
        return jnp.sum(1e30 * small)

    x = jnp.array([1e-30, 1e-31])
    assert is_finite(loss(x))
    found = named(jax.grad(loss), x)
    assert (found.primitive, found.backward, found.text) == ("mul", True, "small = 1e30 * x")
    assert "in the backward pass of" in str(found)


def test_an_exponential_in_a_custom_backward_pass():
    @jax.custom_vjp
    def identity(x):
        return x

    def backward(x, grad):
        growth = jnp.exp(x)
        return (growth * grad,)

    identity.defvjp(lambda x: (x, x), backward)

    def loss(x):
        return jnp.sum(identity(x))

    found = named(jax.grad(loss), jnp.array([1.0, 100.0]))
    assert (found.primitive, found.backward, found.text) == ("exp", True, "return jnp.sum(identity(x))")
    assert found.operands == ("[  1. 100.]",)


def test_the_gradient_of_a_branch_that_is_not_taken():
    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    assert is_finite(loss(jnp.array([0.0, 4.0])))
    found = named(jax.grad(loss), jnp.array([0.0, 4.0]))
    assert (found.primitive, found.operands[-1]) == ("div", "[0. 2.]")


def test_infinite_constants_are_no_finding():
    mask = jnp.array([True, False, True])

    def fn(logits, scale):
        masked = jnp.where(mask, logits, -jnp.inf)
        prob = jnp.exp(masked - jnp.max(masked))
        return jnp.sum(prob / scale)

    found = named(fn, jnp.array([1.0, 2.0, 3.0]), jnp.zeros(()))
    assert found.text == "return jnp.sum(prob / scale)"


def test_an_infinite_constant_that_becomes_nan_is_one():
    mask = jnp.array([True, False])

    def entropy(logits):
        masked = jnp.where(mask, logits, -jnp.inf)
        return -jnp.sum(jnp.exp(masked) * masked)

    found = named(entropy, jnp.array([1.0, 2.0]))
    assert (found.primitive, found.operands) == ("mul", ("[2.7183 0.    ]", "[  1. -inf]"))


def test_of_two_that_mix_the_one_that_is_enough():
    def fn(x, y):
        harmless = jnp.log(x)
        harmful = jnp.log(y)
        return jnp.exp(harmless + harmful)

    found = named(fn, jnp.array([0.0, 1.0]), jnp.array([1.0, -1.0]))
    assert found.text == "harmful = jnp.log(y)"
    assert found.operands == ("[ 1. -1.]",)


@pytest.mark.parametrize("reverse", [False, True])
def test_inside_scan(reverse):
    def step(carry, x):
        carry = carry / x
        return carry, carry

    def fn(start, xs):
        return jax.lax.scan(step, start, xs, reverse=reverse)[1][0 if reverse else -1]

    found = named(fn, jnp.ones(()), jnp.array([1.0, 2.0, 0.0, 4.0, 5.0]))
    assert (found.text, found.operands) == ("carry = carry / x", ("0.05" if reverse else "0.5", "0."))
    assert len(found.inside) == 1
    assert found.inside[0].startswith("scan at ") and found.inside[0].endswith(", iteration 2")


def test_a_bad_slice_in_a_scan_that_drops_it():
    def fn(xs):
        return jax.lax.scan(lambda carry, x: (carry + x, jnp.log(x)), 0.0, xs)[1][1:].sum()

    assert first_bad_operation(fn, (jnp.array([0.0, 1.0]),), ["x"], 0) is None
    assert named(fn, jnp.array([0.0, 1.0, 0.0])).inside[0].endswith("iteration 2")


def test_inside_while():
    def fn(x):
        return jax.lax.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 1, c[1] * c[1]), (0, x))[1]

    found = named(fn, jnp.asarray(1e10))
    assert (found.primitive, found.inside[0][:5], found.inside[0][-11:]) == ("mul", "while", "iteration 1")


def test_inside_cond_remat_and_jit():
    @jax.jit
    def inner(x):
        return jnp.reciprocal(x)

    def fn(x, take):
        safe = jax.checkpoint(lambda x: inner(x))
        return jax.lax.cond(take, lambda x: safe(x), lambda x: x, x)

    assert named(fn, jnp.zeros(()), jnp.asarray(True)).text == "return jnp.reciprocal(x)"
    assert first_bad_operation(fn, (jnp.zeros(()), jnp.asarray(False)), ["x", "take"], 0) is None


def test_inside_a_function_of_a_library_the_line_is_the_callers():
    def fn(x):
        one = jax.nn.log_softmax(x)
        two = jax.nn.log_softmax(x + INF)
        return one, two

    assert named(fn, jnp.array([1.0, 2.0]), bad=1).text.startswith("two = ")


def test_an_argument_that_is_not_finite():
    def fn(x, y):
        rows = x.reshape(2, 2)[1:]
        return jnp.sum(rows @ y)

    found = named(fn, jnp.array([1.0, 2.0, NAN, 4.0]), jnp.ones((2,)))
    assert (found.read, found.primitive, found.text) == ("x0", "dot_general", "return jnp.sum(rows @ y)")
    assert str(found).startswith("x0 is not finite; the first operation to compute with it: dot_general, in")
    passed = named(lambda x: x[1:], jnp.array([1.0, INF]))
    assert passed.read == "x0"


def test_through_the_bits_of_integers():
    def fn(x, y):
        picked = minibatch.row_taker((x, jnp.log(y)))(jnp.array([2, 0, 1]))
        return jnp.sum(picked[0]), jnp.sum(picked[1])

    x, y = jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 2.0, 3.0])
    assert named(fn, x.at[1].set(NAN), y).read == "x0"
    assert named(fn, x, y.at[1].set(0.0), bad=1).primitive == "log"
    assert first_bad_operation(fn, (x, y.at[1].set(0.0)), ["x", "y"], 0) is None


def test_nothing_to_find():
    assert (
        first_bad_operation(lambda x, key: x + jax.random.normal(key), (1.0, jax.random.key(0)), ["x", "k"], 0) is None
    )


def test_what_is_finite():
    assert all(map(is_finite, [1, 1.0, None, np.zeros(2, np.int32), jnp.zeros(2, jnp.bfloat16), jax.random.key(0)]))
    assert not any(map(is_finite, [np.inf, jnp.array([1.0, NAN]), jnp.full((2,), INF, jnp.bfloat16)]))
