"""Memory that a run holds, in each of its result rows: a callback that finds leaks.

custom: {callbacks: [jrl.callbacks.memory_tracking:MemoryTracking]}
"""

import functools
import math
from collections import Counter
from typing import NamedTuple

import psutil

from jrl.callbacks import Callbacks

_MIB = 2**20


class Arrays(NamedTuple):
    """Live arrays of one shape and dtype."""

    number: int
    mb: float  # MiB, of all of them on this machine's devices


class MemoryTracking(Callbacks):
    """Tells with each result row what this process holds; environments and learner stay one program.

    Numbers: `memory/rss_mb`, MiB of the machine's memory; `memory/device_mb`, MiB in use on this machine's devices as
    they report it, or where they do not (CPU) the sum over live jax arrays; `memory/live_arrays`, how many there are.
    `result["memory_top"]` has the `top` largest groups of live arrays, largest first: "float32[128,64]" -> Arrays. It
    is for other callbacks and for what `Algorithm.train` returns, no logger writes it. Arrays that share their memory,
    such as a sharded one and its shards, count each.

    Attributes:
      top: groups in `memory_top`; a subclass may say otherwise.
    """

    top: int = 10

    def on_train_result(self, *, result, **kwargs) -> None:
        groups = live_arrays()
        largest = sorted(groups.items(), key=lambda item: (-item[1].mb, item[0]))
        held = _device_mb()
        result["memory/rss_mb"] = _process().memory_info().rss / _MIB
        result["memory/device_mb"] = sum(group.mb for group in groups.values()) if held is None else held
        result["memory/live_arrays"] = sum(group.number for group in groups.values())
        result["memory_top"] = dict(largest[: self.top])


def live_arrays() -> dict[str, Arrays]:
    """Returns live jax arrays of this process by dtype and shape, such as "float32[128,64]"."""
    import jax  # here, so that the names in a config are checked without it

    counts, sizes = Counter[str](), Counter[str]()
    for x in jax.live_arrays():
        if x.is_deleted():
            continue
        name = f"{x.dtype}[{','.join(map(str, x.shape))}]"
        counts[name] += 1
        copies = len(x.sharding.addressable_devices)  # a replicated array lies on each
        sizes[name] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * copies
    return {name: Arrays(count, sizes[name] / _MIB) for name, count in counts.items()}


def _device_mb() -> float | None:
    """Returns MiB in use on all devices; None unless each of them knows."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    return sum(used) / _MIB if used and len(used) == len(stats) else None


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()
