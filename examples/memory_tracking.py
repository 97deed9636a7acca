"""The largest groups of live arrays of a run, beside the memory that `MemoryTrackingCallbacks` adds to each result row.

A leak shows as a group whose number grows.
"""

from collections import Counter

import jax

from jrl.api import MemoryTrackingCallbacks, PPOConfig
from jrl.rllib.memory_tracking import nbytes

TOP = 5


class MemoryTracking(MemoryTrackingCallbacks):
    """Prints the largest groups of arrays with one dtype and shape."""

    def on_train_result(self, *, result, **kwargs) -> None:
        super().on_train_result(result=result, **kwargs)
        count, size = Counter[str](), Counter[str]()
        for x in jax.live_arrays():
            if not x.is_deleted():
                name = f"{x.dtype}{list(x.shape)}"
                count[name] += 1
                size[name] += nbytes(x)
        print(f"{result['memory/rss_mb']:.0f} MiB of the process, {result['memory/device_mb']:.2f} MiB of arrays")
        for name, held in size.most_common(TOP):
            print(f"  {held / 2**20:8.2f} MiB in {count[name]} x {name}")


def main(iterations: int = 3) -> dict[str, float]:
    """Trains for so many results; the numbers of the last one."""
    with PPOConfig().environment("CartPole-v1").callbacks(MemoryTracking).build() as algo:
        for _ in range(iterations):
            result = algo.train()
    return {name: value for name, value in result.items() if name.startswith("memory/")}


if __name__ == "__main__":
    print(main())
