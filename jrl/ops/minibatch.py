"""Minibatches of a rollout: a cheap shuffle, one gather for all leaves, gradients in chunks that fit the cache."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.ops import random

IMAGE_BYTES = 4096  # images of at least this size per row are treated as large


def shuffle(key, num_steps: int, num_envs: int, num_minibatches: int, *, axis_name: str | None = None):
    """Returns row indices of the minibatches of one epoch; every row of the rollout is in exactly one of them.

    A full permutation sorts all rows, which takes a quarter of a PPO update on CPU. This function sorts only the T
    steps. Each environment starts at a random position of that order. Two rows of different environments share a
    minibatch as often as under a full permutation. Rows of one environment that are close in time are together as often
    as others. If the number of minibatches does not divide T, environments are split as well, at random within blocks
    of neighbours. The draw depends on an environment's global index, so that sharding the columns does not change the
    (global) minibatches.

    Args:
      key: PRNG key, the same on all devices.
      num_steps, num_envs: T and B on this device.
      num_minibatches: M; `gcd(T, M)` splits the steps, `M / gcd(T, M)` must divide B.
      axis_name: mapped axis over devices, over which the columns are sharded; None: no such axis.
    Returns:
      [M, T * B / M] i32 indices into rows flattened from [T, B].
    Raises:
      ValueError: T * B cannot be split that way.

    >>> index = shuffle(jax.random.key(0), num_steps=4, num_envs=2, num_minibatches=2)
    >>> index.shape, sorted(index.ravel().tolist())
    ((2, 4), [0, 1, 2, 3, 4, 5, 6, 7])
    """
    time_groups = math.gcd(num_steps, num_minibatches)
    env_groups = num_minibatches // time_groups
    if num_envs % env_groups:
        raise ValueError(
            f"cannot split {num_steps} steps x {num_envs} environments into {num_minibatches} minibatches: the number "
            f"of environments must be a multiple of {env_groups}"
        )
    blocks = num_envs // env_groups
    key_order, key_start, key_group = jax.random.split(key, 3)
    order = random.permutation(key_order, num_steps)
    shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    start = random.integers(key_start, (shards * num_envs,), num_steps)
    turn = random.integers(key_group, (shards * blocks, time_groups), env_groups)
    if axis_name is not None:
        device = jax.lax.axis_index(axis_name)
        start = jax.lax.dynamic_slice_in_dim(start, device * num_envs, num_envs)
        turn = jax.lax.dynamic_slice_in_dim(turn, device * blocks, blocks)
    # axes: time group, environment group, step within the group, block of environments
    group, env_group, step, block = jnp.meshgrid(
        *(jnp.arange(n) for n in (time_groups, env_groups, num_steps // time_groups, blocks)), indexing="ij"
    )
    env = block * env_groups + (env_group - turn[block, group]) % env_groups
    position = (group * (num_steps // time_groups) + step + start[env]) % num_steps
    return (order[position] * num_envs + env).reshape(num_minibatches, -1)


def row_taker(tree) -> Callable:
    """Returns `take(index)`, which selects rows of every leaf, with one gather for all leaves of 4-byte elements.

    Args:
      tree: leaves [N, ...].
    Returns:
      A function from an index array [K] to the tree with leaves [K, ...].
    """
    leaves, treedef = jax.tree.flatten(tree)
    packs = [x.dtype.itemsize == 4 for x in leaves]
    widths = [math.prod(x.shape[1:]) for x in leaves]
    columns = [
        jax.lax.bitcast_convert_type(x.reshape(x.shape[0], w), jnp.uint32)
        for x, w, pack in zip(leaves, widths, packs)
        if pack
    ]
    packed = jnp.concatenate(columns, -1) if columns else jnp.zeros((leaves[0].shape[0], 0), jnp.uint32)

    def take(index):
        rows, at, out = packed[index], 0, []
        for x, width, pack in zip(leaves, widths, packs):
            if pack:
                column = jax.lax.bitcast_convert_type(rows[:, at : at + width], x.dtype)
                out.append(column.reshape(index.shape[0], *x.shape[1:]))
                at += width
            else:
                out.append(x[index])
        return jax.tree.unflatten(treedef, out)

    return take


def chunk_rows(
    num_rows: int, image_bytes: int, limit: int | None = None, convolves: bool = False, *, length: int = 1
) -> int:
    """Returns the number of rows per gradient computation: the largest divisor of `num_rows` up to `limit`.

    If a row is a sequence of `length` steps, `image_bytes` is the size of one step's images, and `limit` counts steps.
    Without a limit all rows are in one chunk, except on CPU. There a chunk whose activations stay in the cache is up to
    twice as fast (measured: 8192 rows of a small MLP, 16 frames of 28 kB, 64 grids of 7 x 7 or 12 x 12 cells that
    `convolves`, 256 of them in sequences). Vectors of any width count as a small MLP: with 1,345 numbers, 512 rows at
    once are 1.3 times as fast as 16.

    >>> chunk_rows(96, image_bytes=0, limit=40), chunk_rows(96, image_bytes=0, limit=40, length=10)
    (32, 4)
    """
    if limit is None:
        if jax.default_backend() != "cpu":
            return num_rows
        grids = 64 if length == 1 else 256  # a core needs several sequences at once
        limit = 16 if image_bytes >= IMAGE_BYTES else grids if convolves else 8192
    most = max(1, limit // length)
    return next(n for n in range(min(most, num_rows), 0, -1) if num_rows % n == 0)


def map_rows(fn, rows, chunk: int):
    """Returns `fn(rows)` for leaves [N, ...], computed for `chunk` rows at a time. `chunk` divides N."""
    num_chunks = jax.tree.leaves(rows)[0].shape[0] // chunk
    if num_chunks == 1:
        return fn(rows)
    out = jax.lax.map(fn, jax.tree.map(lambda x: x.reshape(num_chunks, chunk, *x.shape[1:]), rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


def mean_gradient(loss, params, batch, chunk: int):
    """Returns the gradient and metrics of a mean loss over rows, computed chunk by chunk.

    Args:
      loss: (params, rows) -> (scalar mean over the rows, dict of such means).
      params: tree of arrays.
      batch: leaves [N, ...].
      chunk: rows per chunk, a divisor of N.
    Returns:
      (gradient like params, dict of means over all rows)
    """
    gradient = jax.grad(loss, has_aux=True)
    num_chunks = jax.tree.leaves(batch)[0].shape[0] // chunk
    if num_chunks == 1:
        return gradient(params, batch)
    chunks = jax.tree.map(lambda x: x.reshape(num_chunks, chunk, *x.shape[1:]), batch)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], chunks))
    )
    total, _ = jax.lax.scan(
        lambda total, rows: (jax.tree.map(jnp.add, total, gradient(params, rows)), None), zeros, chunks
    )
    return jax.tree.map(lambda x: x / num_chunks, total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def mean(loss, params, batch, chunk: int):
    """Returns a mean loss over rows, computed chunk by chunk; differentiable with one pass for value and gradient.

    Args:
      loss: (params, rows) -> scalar mean over the rows; static, so traced values must be in the arguments.
      params: tree of arrays.
      batch: leaves [N, ...], constants.
      chunk: rows per chunk, a divisor of N.
    Returns:
      [] f32.
    """
    return _mean_and_gradient(loss, params, batch, chunk)[0]


def _mean_and_gradient(loss, params, batch, chunk: int):
    def with_value(params, rows):
        value = loss(params, rows)
        return value, value

    gradient, value = mean_gradient(with_value, params, batch, chunk)
    return value, gradient


def _mean_backward(loss, chunk: int, gradient, cotangent):
    return jax.tree.map(lambda g: cotangent * g, gradient), None


mean.defvjp(_mean_and_gradient, _mean_backward)
