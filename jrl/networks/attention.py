"""GTrXL: a transformer over the latest steps of an episode, which trains as stably as an LSTM (arXiv:1910.06764).

Each layer attends to its latest inputs and the present input at relative positions (Transformer-XL, arXiv:1901.02860).
Layer normalisation comes before attention and before the dense layers. A gate as in a GRU replaces each residual
connection.
"""

import math

import jax
import jax.numpy as jnp

from jrl.fields import hyper
from jrl.networks.recurrent import Core, dense, kernels, layer_norm, layer_norm_params
from jrl.types import Array

_LEAST_CHUNK = 32  # minimum number of queries per product with the keys, for shorter memories


def gtrxl(cfg: hyper.Gtrxl, in_size: int, *, dtype: str = "float32", weights: str | None = None) -> Core:
    """Makes a Core with the state {"inputs": f32 [B, layers, memory, size], "valid": i32 [B]}.

    The newest inputs are last; `valid` of them belong to the present episode, the others are zero. As in Transformer-XL
    no gradient flows into the state before a window.
    """
    memory, layers, size = cfg.memory, cfg.layers, cfg.size
    inner = cfg.heads * cfg.head_size

    def init(key):
        first, *rest = jax.random.split(key, layers + 1)
        params = {"input_kernel": kernels(first, in_size, size, init=weights), "input_bias": jnp.zeros(size)}
        for layer, key in enumerate(rest):
            keys = iter(jax.random.split(key, 12))
            kernel = lambda rows, columns, count=1, scale=1.0, keys=keys: kernels(
                next(keys), rows, columns, count, scale, weights
            )
            block = {
                **layer_norm_params("attention_norm", size),
                "query_kernel": kernel(size, inner),
                "key_value_kernel": kernel(size, inner, 2),
                "distance_kernel": kernel(size, inner),
                "content_bias": jnp.zeros((cfg.heads, cfg.head_size)),
                "position_bias": jnp.zeros((cfg.heads, cfg.head_size)),
                "output_kernel": kernel(inner, size),
                **layer_norm_params("mlp_norm", size),
                "mlp_in_kernel": kernel(size, cfg.mlp, scale=math.sqrt(2)),
                "mlp_in_bias": jnp.zeros(cfg.mlp),
                "mlp_out_kernel": kernel(cfg.mlp, size),
                "mlp_out_bias": jnp.zeros(size),
            }
            for gate in ("attention_gate", "mlp_gate"):
                block |= {
                    f"{gate}_y_kernel": kernel(size, size, 3),
                    f"{gate}_y_bias": jnp.repeat(jnp.array([0.0, -cfg.gate_bias, 0.0]), size),
                    f"{gate}_x_kernel": kernel(size, size, 2),
                    f"{gate}_reset_x_kernel": kernel(size, size),
                }
            params |= {f"layer_{layer}_{name}": value for name, value in block.items()}
        return params

    def carry(batch_size):
        return {
            "inputs": jnp.zeros((batch_size, layers, memory, size)),
            "valid": jnp.zeros(batch_size, jnp.int32),
        }

    def unroll(params, x, carry, reset):
        past = jax.lax.stop_gradient(carry["inputs"])
        length = x.shape[1]
        queries = min(length, max(memory, _LEAST_CHUNK))  # per chunk, so that the keys lie in two chunks
        # number of resets before each row and before each memory slot; -1: slot of another episode
        ends = jnp.cumsum(reset, 1, dtype=jnp.int32)
        episode = ends - reset
        slot = jnp.arange(-memory, 0)
        before = jnp.where(slot[None] >= -carry["valid"][:, None], 0, -1)
        mask = _keys(jnp.concatenate([before, episode], 1), memory, queries)  # [N, chunks, keys]
        mask = mask[:, :, None] == _chunks(episode, queries)[..., None]  # [N, chunks, queries, keys]
        distance = memory + jnp.arange(queries)[:, None] - jnp.arange(memory + queries)[None]
        mask &= ((distance >= 0) & (distance <= memory))[None, None]

        y, latest = dense(params, "input", x, dtype), []
        for layer in range(layers):
            prefix = f"layer_{layer}_"
            block = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
            both = jnp.concatenate([past[:, layer], y], 1)
            latest.append(both[:, length:])
            y = _block(cfg, dtype, block, both, memory, mask)
        # memory slots that belong to the episode after the last row
        after = jnp.concatenate([before, episode], 1)[:, length:] == ends[:, -1:]
        inputs = jnp.where(after[:, None, :, None], jnp.stack(latest, 1), 0.0)
        return y, {"inputs": inputs, "valid": jnp.sum(after, 1, dtype=jnp.int32)}

    def step(params, x, carry):
        y, carry = unroll(params, x[:, None], carry, jnp.zeros((x.shape[0], 1), bool))
        return y[:, 0], carry

    return Core(size, init, carry, step, unroll)


def _block(cfg, dtype, params, x, memory, mask):
    """Applies one layer to x [N, memory + L, S], whose first `memory` rows are only keys: [N, L, S]."""
    y, normed = x[:, memory:], layer_norm(params, "attention_norm", x)
    attended = jax.nn.relu(_attention(cfg, dtype, params, normed, memory, mask))
    y = _gate(params, "attention_gate", y, attended, dtype)
    hidden = jax.nn.relu(dense(params, "mlp_in", layer_norm(params, "mlp_norm", y), dtype))
    return _gate(params, "mlp_gate", y, jax.nn.relu(dense(params, "mlp_out", hidden, dtype)), dtype)


def _gate(params, name, x, y, dtype):
    """Returns (1 - z) x + z h for the update gate z, the reset gate r and the candidate h of a GRU."""
    r, z, h = jnp.split(dense(params, f"{name}_y", y, dtype), 3, -1)
    r_x, z_x = jnp.split(dense(params, f"{name}_x", x, dtype), 2, -1)
    z = jax.nn.sigmoid(z + z_x)
    h = jnp.tanh(h + dense(params, f"{name}_reset_x", jax.nn.sigmoid(r + r_x) * x, dtype))
    return (1 - z) * x + z * h


def _attention(cfg, dtype, params, x, memory, mask):
    """Returns attention of x [N, memory + L, S]: [N, L, S]. `mask` [N, chunks, queries, keys] marks each query's keys.

    Scores are (q + u) k + (q + v) R(distance), u and v the content and position bias (arXiv:1901.02860, section 3.3).
    """
    n, length, queries = x.shape[0], x.shape[1] - memory, mask.shape[2]
    heads = lambda a: jnp.moveaxis(jnp.asarray(a.reshape(*a.shape[:-1], cfg.heads, cfg.head_size), dtype), -2, 2)
    bias = lambda name: jnp.asarray(params[name], dtype)[None, None, :, None]
    product = lambda subscripts, *args: jnp.einsum(subscripts, *args, preferred_element_type=jnp.float32)

    q = heads(_chunks(dense(params, "query", x[:, memory:], dtype), queries))  # [N, chunks, heads, queries, D]
    both = jnp.split(dense(params, "key_value", x, dtype), 2, -1)
    k, v = (heads(_keys(part, memory, queries)) for part in both)  # [N, chunks, heads, keys, D]
    position = dense(params, "distance", _sinusoids(memory, cfg.size), dtype)
    position = jnp.asarray(position.reshape(memory + 1, cfg.heads, cfg.head_size), dtype)
    scores = product("nchqd,nchkd->nchqk", q + bias("content_bias"), k)
    scores += _skew(product("nchqd,phd->nchqp", q + bias("position_bias"), position))
    scores = jnp.where(mask[:, :, None], scores / math.sqrt(cfg.head_size), -1e30)
    y = product("nchqk,nchkd->ncqhd", jnp.asarray(jax.nn.softmax(scores), dtype), v)
    y = y.reshape(n, -1, cfg.heads * cfg.head_size)[:, :length]  # without the padding of the last chunk
    return dense(params, "output", y, dtype)


def _chunks(x: Array, size: int) -> Array:
    """Splits [N, L, ...] into chunks of `size` rows, padded with zeros: [N, chunks, size, ...]."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _keys(x: Array, memory: int, queries: int) -> Array:
    """Returns the keys [N, memory + L, ...] of each chunk of queries: [N, chunks, memory + queries, ...]."""
    if x.shape[1] == memory + queries:
        return x[:, None]
    present = _chunks(x[:, memory:], queries)
    earlier = _chunks(x, queries)[:, : present.shape[1], :memory]
    return jnp.concatenate([earlier, present], 2)


def _skew(x: Array) -> Array:
    """Shifts row i of [..., Q, P] by i columns: [..., Q, P - 1 + Q], from farthest position first to index by key."""
    queries, positions = x.shape[-2:]
    width = positions + queries
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, queries)]).reshape(*x.shape[:-2], queries * width)
    return x[..., : queries * (width - 1)].reshape(*x.shape[:-1], queries, width - 1)


def _sinusoids(memory: int, size: int) -> Array:
    """Returns encodings f32 [memory + 1, size] of the distances memory, ..., 1, 0 (arXiv:1706.03762, section 3.5)."""
    distance = jnp.arange(memory, -1, -1, dtype=jnp.float32)
    frequency = 10_000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle = distance[:, None] * frequency[None]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], 1)[:, :size]
