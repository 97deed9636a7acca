"""RLlib's MemoryTrackingCallbacks: the memory that a run holds, in each of its result rows."""

import math
from typing import Any

import psutil

from jrl.callbacks import Callbacks

_MIB = 2**20


class MemoryTrackingCallbacks(Callbacks):
    """Adds the memory of this process to each result row; environments and learner stay one program.

    `memory/rss_mb` is MiB of the machine's memory, `memory/live_arrays` the number of live jax arrays, and
    `memory/device_mb` MiB in use on this machine's devices, of a CPU the sum over live arrays.
    """

    def on_train_result(self, *, result, **kwargs) -> None:
        import jax  # here, so that the names in a config are checked without it

        arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        known = all("bytes_in_use" in one for one in stats)
        held = sum(one["bytes_in_use"] for one in stats) if known else sum(map(nbytes, arrays))
        result["memory/rss_mb"] = psutil.Process().memory_info().rss / _MIB
        result["memory/device_mb"] = held / _MIB
        result["memory/live_arrays"] = len(arrays)


def nbytes(x: Any) -> int:
    """Return the bytes that a jax array takes on this machine's devices; a replicated array lies on each."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.addressable_devices)
