"""LSTM and GRU cores, and parts that all cores use.

The gradient of a scan adds a product of the size of the recurrent kernel at each step. `_scan` has a custom gradient:
it keeps the factors of these products and multiplies them once, after the scan.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.fields import hyper
from jrl.networks.dense import kernel_init, linear
from jrl.types import Array, Key, PyTree

Params = dict[str, Array]


class Core(NamedTuple):
    """A recurrent core as pure functions on arrays (N or B rows, L steps)."""

    size: int  # output size
    init: Callable[[Key], Params]  # key -> f32 arrays
    carry: Callable[[int], PyTree]  # batch size -> state at an episode's start [B, ...], f32 and i32
    step: Callable[..., tuple[Array, PyTree]]  # (params, x [B, in], carry) -> (y f32 [B, size], carry)
    # (params, x [N, L, in], carry [N, ...], reset bool [N, L]) -> (y f32 [N, L, size], carry after the last row);
    # after a row with reset the state is the state at an episode's start
    unroll: Callable[..., tuple[Array, PyTree]]


def kernels(key: Key, rows: int, columns: int, count: int = 1, scale: float = 1.0, init: str | None = None) -> Array:
    """Returns `count` initial kernels side by side, f32 [rows, count * columns], see `kernel_init`."""
    one = kernel_init(init, scale, (rows, columns))
    return jnp.concatenate([one(key, (rows, columns), jnp.float32) for key in jax.random.split(key, count)], -1)


def dense(params: Params, name: str, x: Array, dtype: str) -> Array:
    """Returns x [..., in] @ `<name>_kernel` in `dtype`, plus `<name>_bias` if it exists: f32 [..., out]."""
    kernel = jnp.asarray(params[f"{name}_kernel"], dtype)
    y = linear(jnp.asarray(x, dtype).reshape(-1, kernel.shape[0]), kernel)
    y = y.reshape(*x.shape[:-1], kernel.shape[1]).astype(jnp.float32)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + jnp.expand_dims(bias, tuple(range(y.ndim - 1)))


def layer_norm(params: Params, name: str, x: Array) -> Array:
    """Normalises x [..., F] over F, times `<name>_scale` plus `<name>_bias` (arXiv:1607.06450)."""
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    wide = lambda a: jnp.expand_dims(params[f"{name}_{a}"], tuple(range(x.ndim - 1)))
    return x * wide("scale") + wide("bias")


def layer_norm_params(name: str, size: int) -> Params:
    return {f"{name}_scale": jnp.ones(size), f"{name}_bias": jnp.zeros(size)}


# ---------------------------------------------------------------- LSTM and GRU


class _Cell(NamedTuple):
    """One step of H units after the two products, of the input and of the state, each [N, K]."""

    state: tuple[str, ...]  # names of the state arrays [N, H]; "h" is the output
    blocks: int  # K / H
    join: Callable[[Array, Array], Array]  # (input product, state product) -> [N, Z], linear
    advance: Callable[[Array, PyTree], PyTree]  # (joined, state) -> state


def _advance_lstm(joined, state):
    i, f, g, o = jnp.split(joined, 4, -1)  # input, forget, cell and output gate
    c = jax.nn.sigmoid(f) * state["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}


def _join_gru(inputs, recurrent):
    both = 2 * inputs.shape[-1] // 3
    return jnp.concatenate([inputs[..., :both] + recurrent[..., :both], inputs[..., both:], recurrent[..., both:]], -1)


def _advance_gru(joined, state):
    r, z, n, n_h = jnp.split(joined, 4, -1)  # reset gate, update gate and the candidate's two parts
    z = jax.nn.sigmoid(z)
    return {"h": (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r) * n_h) + z * state["h"]}


_LSTM = _Cell(("h", "c"), 4, lambda inputs, recurrent: inputs + recurrent, _advance_lstm)
_GRU = _Cell(("h",), 3, _join_gru, _advance_gru)


def lstm(cfg: hyper.Lstm, in_size: int, *, dtype: str = "float32", weights: str | None = None) -> Core:
    """Makes a long short-term memory with a forget gate (Gers et al., 2000), whose initial bias is 1."""
    bias = lambda: {"recurrent_bias": jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), cfg.size)}
    return _core(_LSTM, cfg.size, in_size, bias, dtype, weights)


def gru(cfg: hyper.Gru, in_size: int, *, dtype: str = "float32", weights: str | None = None) -> Core:
    """Makes a gated recurrent unit (arXiv:1406.1078). The reset gate comes after the product, as in cuDNN."""
    bias = lambda: {"input_bias": jnp.zeros(3 * cfg.size), "recurrent_bias": jnp.zeros(3 * cfg.size)}
    return _core(_GRU, cfg.size, in_size, bias, dtype, weights)


def _core(cell, size, in_size, bias, dtype, weights):
    def init(key):
        first, second = jax.random.split(key)
        return {
            "input_kernel": kernels(first, in_size, size, cell.blocks, init=weights),
            "recurrent_kernel": kernels(second, size, size, cell.blocks),
            **bias(),
        }

    def carry(batch_size):
        return {name: jnp.zeros((batch_size, size)) for name in cell.state}

    def step(params, x, carry):
        products = dense(params, "input", x, dtype), dense(params, "recurrent", carry["h"], dtype)
        carry = cell.advance(cell.join(*products), carry)
        return carry["h"], carry

    def unroll(params, x, carry, reset):
        inputs = dense(params, "input", x.swapaxes(0, 1), dtype)
        kernel, bias = params["recurrent_kernel"], params["recurrent_bias"]
        y, carry = _scan(cell, dtype, kernel, bias, inputs, carry, reset.T)
        return y.swapaxes(0, 1), carry

    return Core(size, init, carry, step, unroll)


def _zero_where(reset, state):
    """Sets `state` [..., H] to zero where `reset` [...]."""
    return jax.tree.map(lambda a: jnp.where(reset[..., None], 0.0, a), state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(cell, dtype, kernel, bias, inputs, state, reset):
    """Runs `cell` over inputs [L, N, K] with the kernel [H, K]: (h f32 [L, N, H], state after the last row)."""
    return _scan_forward(cell, dtype, kernel, bias, inputs, state, reset)[0]


def _scan_forward(cell, dtype, kernel, bias, inputs, state, reset):
    params = {"recurrent_kernel": jnp.asarray(kernel, dtype), "recurrent_bias": bias}

    def body(state, row):
        inputs, reset = row
        joined = cell.join(inputs, dense(params, "recurrent", state["h"], dtype))
        after = cell.advance(joined, state)
        return _zero_where(reset, after), (after, joined)

    last, (after, joined) = jax.lax.scan(body, state, (inputs, reset))
    return (after["h"], last), (kernel, state, reset, after, joined)


def _scan_backward(cell, dtype, residuals, grads):
    kernel, state, reset, after, joined = residuals
    dy, dlast = grads
    shifted = lambda first, a: jnp.concatenate([first[None], a[:-1]])
    before = jax.tree.map(shifted, state, _zero_where(reset, after))
    transposed = jnp.asarray(kernel, dtype).T
    product = jax.ShapeDtypeStruct((*joined.shape[1:-1], kernel.shape[1]), jnp.float32)
    split = lambda d, like: jax.linear_transpose(cell.join, like, like)(d)

    def body(dstate, row):
        joined, before, reset, dy = row
        dstate = _zero_where(reset, dstate)
        _, pull = jax.vjp(cell.advance, joined, before)
        djoined, dbefore = pull({**dstate, "h": dstate["h"] + dy})
        through = jnp.asarray(split(djoined, product)[1], dtype) @ transposed
        return {**dbefore, "h": dbefore["h"] + through.astype(jnp.float32)}, djoined

    dstate, djoined = jax.lax.scan(body, dlast, (joined, before, reset, dy), reverse=True)
    dinputs, drecurrent = split(djoined, jax.ShapeDtypeStruct((len(djoined), *product.shape), jnp.float32))
    flat = lambda a: jnp.asarray(a.reshape(-1, a.shape[-1]), dtype)
    _, pull = jax.vjp(linear, flat(before["h"]), jnp.asarray(kernel, dtype))
    dkernel = pull(flat(drecurrent))[1].astype(jnp.float32)
    return dkernel, jnp.sum(drecurrent, (0, 1)), dinputs, dstate, None


_scan.defvjp(_scan_forward, _scan_backward)
