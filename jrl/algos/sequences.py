"""Rollouts and replay samples as sequences, for recurrent networks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos import parts
from jrl.networks import NetworkConfig
from jrl.types import Array, InputError, PyTree, SequenceBatch, Window


def flat(tree: PyTree) -> PyTree:
    """Reshapes [T, B, *] to [T * B, *]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def length_of(network: NetworkConfig, num_steps: int) -> int:
    """Returns L, the steps per sequence of a rollout of `num_steps`; 1 without a core.

    Raises:
      InputError: `network.max_seq_len` does not divide the rollout.
    """
    length = (network.max_seq_len or num_steps) if network.recurrent else 1
    if num_steps % length:
        near = next(n for n in range(length, 0, -1) if num_steps % n == 0)
        raise InputError(
            f"network.max_seq_len {length} does not divide rollouts of {num_steps} steps: use {near}, or "
            f"rollout.length {-(-num_steps // length) * length}"
        )
    return length


def split(x: Array, length: int) -> Array:
    """Reshapes [T, B, *] to [T / L * B, L, *]: row k B + b is sequence k of column b.

    >>> split(jnp.arange(8).reshape(4, 2), length=2)  # 4 steps of 2 environments
    Array([[0, 2],
           [1, 3],
           [4, 6],
           [5, 7]], dtype=int32)
    """
    steps, columns = x.shape[:2]
    x = x.reshape(steps // length, length, columns, *x.shape[2:])
    return jnp.swapaxes(x, 1, 2).reshape(-1, length, *x.shape[3:])


def cut(rows, memory: PyTree, length: int):
    """Returns Rows [T, B, *] as sequences [T / L * B, L, *].

    Args:
      rows: dataclass with fields `obs` and `weight`, 0 on masked rows.
      memory: recurrent state before each sequence [T / L, B, ...], from `along`.
      length: L.
    Returns:
      `rows`, whose `obs` is a Window.
    """
    rows = jax.tree.map(lambda x: split(x, length), rows)
    return replace(rows, obs=Window(rows.obs, flat(memory), rows.weight == 0))


def along(
    unroll: Callable[[Window], tuple[PyTree, PyTree]], obs: PyTree, mask: Array, memory: PyTree, length: int
) -> tuple[PyTree, PyTree, PyTree]:
    """Applies a recurrent network to all rows of a rollout, sequence by sequence.

    Args:
      unroll: Window [B, L] -> (outputs [B, L, *], recurrent state after it).
      obs: [T, B, *], network input.
      mask: [T, B] bool, mask of the rollout.
      memory: recurrent state before row 0 [B, ...].
      length: L.
    Returns:
      (outputs [T, B, *], state before each sequence [T / L, B, ...], state after row T - 1 [B, ...])
    """

    def sequence(memory, rows):
        obs, mask = rows
        out, after = unroll(Window(obs, memory, ~mask))
        return after, (out, memory)

    by_sequence = lambda x: split(x, length).reshape(-1, x.shape[1], length, *x.shape[2:])
    after, (out, starts) = jax.lax.scan(sequence, memory, jax.tree.map(by_sequence, (obs, mask)))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).reshape(*mask.shape, *x.shape[3:]), out), starts, after


def without_masked(batch: SequenceBatch) -> SequenceBatch:
    """Sets everything that must not be read to zero: data of masked steps, and observations after a masked step.

    The observation of the first masked step is kept, because it is the final observation of an episode.
    """
    reset = batch.window.reset
    unread = reset & jnp.concatenate([jnp.ones_like(reset[:, :1]), reset[:, :-1]], 1)
    window = replace(batch.window, obs=parts.zero_masked(~unread, batch.window.obs))
    done = {name: getattr(batch, name) for name in ("action", "reward", "discount", "ahead", "extras")}
    return replace(batch, window=window, **parts.zero_masked(batch.weight > 0, done))


def burn_in(batch: SequenceBatch) -> int:
    """Returns K, the number of burn-in rows."""
    return batch.window.reset.shape[1] - batch.weight.shape[1] - 1


def warm_up(unroll: Callable[..., tuple[Any, PyTree]], params: PyTree, window: Window, steps: int) -> Window:
    """Returns a window without its first `steps` rows, which update its recurrent state without gradient.

    This is R2D2's burn-in (Kapturowski et al., 2019). `unroll`: (params, Window) -> (anything, state after the window).
    """
    if steps == 0:
        return window
    part = lambda rows: Window(jax.tree.map(lambda x: x[:, rows], window.obs), window.carry, window.reset[:, rows])
    carry = unroll(params, part(slice(None, steps)))[1]
    return replace(part(slice(steps, None)), carry=jax.lax.stop_gradient(carry))


def sequence_priority(error: Array, weight: Array, eta: float = 0.9) -> Array:
    """Returns eta max |error| + (1 - eta) mean |error| over a sequence's unmasked rows (R2D2, section 2.3).

    Args:
      error, weight: [N, L].
    Returns:
      [N] f32, 0 if all rows are masked.

    >>> sequence_priority(jnp.array([[1.0, -3.0, 100.0]]), jnp.array([[1.0, 1.0, 0.0]]), eta=0.5)
    Array([2.5], dtype=float32)
    """
    valid = (weight > 0).astype(jnp.float32)
    error = jnp.where(weight > 0, jnp.abs(error), 0.0)
    return eta * error.max(1) + (1.0 - eta) * error.sum(1) / jnp.maximum(valid.sum(1), 1.0)


def pick(x: Array, index: Array) -> Array:
    """Returns rows `index` [N, L] of x [N, M, *], [N, L, *]."""
    return jnp.take_along_axis(x, jnp.expand_dims(index, tuple(range(2, x.ndim))), 1)
