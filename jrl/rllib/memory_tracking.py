"""RLlib's MemoryTrackingCallbacks: adds the memory of a run to its result rows."""

import math
from typing import Any

import psutil

from jrl.callbacks import Callbacks

_MIB = 2**20


class MemoryTrackingCallbacks(Callbacks):
    """Callback that adds the memory of this process to each result row; environments and learner stay one program.

    `memory/rss_mb` is the process's memory in MiB, `memory/live_arrays` the number of live jax arrays, and
    `memory/device_mb` the memory in use on this machine's devices in MiB; for a CPU the sum over live arrays.
    """

    def on_train_result(self, *, result, **kwargs) -> None:
        import jax  # here, because checks of a config import this module before jax

        arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        known = all("bytes_in_use" in x for x in stats)
        used = sum(x["bytes_in_use"] for x in stats) if known else sum(map(nbytes, arrays))
        result["memory/rss_mb"] = psutil.Process().memory_info().rss / _MIB
        result["memory/device_mb"] = used / _MIB
        result["memory/live_arrays"] = len(arrays)


def nbytes(x: Any) -> int:
    """Returns the bytes of a jax array on this machine's devices; a replicated array counts on each device."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.addressable_devices)
