"""Memory that a replay buffer needs, and free memory, before allocation."""

import math
from collections.abc import Callable

import jax
import numpy as np

from jrl.errors import InputError, counted
from jrl.host import machine
from jrl.types import Buffer


def nbytes(buffer: Buffer) -> int:
    """Returns the bytes of a buffer's state, without allocation."""
    leaves = jax.tree.leaves(jax.eval_shape(buffer.init))
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)


def available(device: jax.Device | None = None) -> int | None:
    """Returns the free bytes of an accelerator, or of the host for a CPU device; None if unknown."""
    device = device or jax.local_devices()[0]
    if device.platform == "cpu":
        return machine.free_bytes()
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def check_rows(row: int, envs: int, length: int, *, kept: int = 1, batch: int = 0, devices: int = 1) -> int:
    """Returns the bytes of the observations in rollouts and batches on one device; checks that they fit.

    Args:
      row: bytes of an observation.
      envs, length: environments and steps of a rollout, over all devices.
      kept: number of stored rollouts.
      batch: observations per sample from replay, over all devices.
      devices: number of devices that share them.
    Raises:
      InputError: they do not fit.
    """
    device = jax.local_devices()[0]
    share = 1 if device.platform == "cpu" else devices
    needed, free = (envs * length * kept + batch) * row // share, available(device)
    if free is None or needed <= machine.SHARE * free:
        return needed
    of = (f" x {kept} rollouts" if kept > 1 else "") + (f", and {batch:,} drawn from replay" if batch else "")
    raise InputError(
        f"rollout.length: observations of {machine.format_bytes(row)} each, of {counted(envs, 'env', ',')} x "
        f"{counted(length, 'step', ',')}{of}, take {machine.format_bytes(needed)}, but "
        f"{machine.format_bytes(free)} are free, room for "
        f"{int(machine.SHARE * free / row) * share:,}: make observations smaller, or lower env.num_envs, rollout.length"
        + (" or replay.batch_size" if batch else "")
    )


def check_fits(make: Callable[[int], Buffer], capacity: int, *, devices: int = 1, beside: int = 0) -> str:
    """Returns a message with the size of a replay buffer, if it fits. Nothing is allocated.

    Args:
      make: capacity over all devices -> buffer of one device.
      capacity: rows over all devices.
      devices: number of local devices, each with a buffer.
      beside: bytes of rollouts and batches on one device; see `check_rows`.
    Raises:
      InputError: it does not fit; names a capacity that does.
    """
    device = jax.local_devices()[0]
    shared = devices if device.platform == "cpu" else 1  # CPU devices share the host's memory
    free, needed = available(device), nbytes(make(capacity)) * shared
    where = "" if shared == devices else f" on each of {devices} devices"
    words = f"{capacity:,} transitions take {machine.format_bytes(needed)}{where}"
    if free is None:
        return f"replay: {words}"
    left = machine.SHARE * free - beside
    if needed > left:
        also = f", {machine.format_bytes(beside)} of them for a rollout and a batch" if beside > 0.01 * free else ""
        fits = int(capacity * max(left, 0) / needed)
        fits -= fits % 10 ** max(len(str(fits)) - 2, 0)
        raise InputError(
            f"replay.capacity: {words}, but {machine.format_bytes(free)} are free{also}: about {fits:,} would fit"
        )
    return f"replay: {words}, {machine.format_bytes(free)} are free"
