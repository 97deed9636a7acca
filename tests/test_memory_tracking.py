"""Memory in result rows: what is counted, and that a leak shows."""

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jrl.callbacks import CallbackList, Callbacks, load, make_multi_callbacks
from jrl.callbacks.memory_tracking import MemoryTracking, live_arrays
from jrl.metrics import results

NAME = "jrl.callbacks.memory_tracking:MemoryTracking"
ROW = {"env_steps": 8, "iteration": 1, "updates": 1, "time_s": 1.0}


class Leak(Callbacks):
    """Keeps a mebibyte per row."""

    def __init__(self):
        self.kept = []

    def on_train_result(self, *, result, **kwargs):
        self.kept.append(jnp.full((256, 1024), len(self.kept), "float32"))


def rows_of(called, count):
    """Results as callbacks left them, and what of them goes to the loggers."""
    for i in range(count):
        result = results.result(ROW, iteration=i + 1, trained=8, before=None)
        before = results.flat(result)
        called.call("on_train_result", algorithm=None, result=result)
        yield result, results.changed(before, results.flat(result))


def test_a_leak_grows_by_what_it_keeps():
    gc.collect()
    called = CallbackList(make_multi_callbacks([Leak, load([NAME]).__class__])())
    found = list(rows_of(called, 4))
    device = [row["memory/device_mb"] for _, row in found]
    count = [row["memory/live_arrays"] for _, row in found]
    if jax.default_backend() == "cpu":  # exactly; an accelerator's allocator rounds
        assert [b - a for a, b in itertools.pairwise(device)] == pytest.approx([1.0] * 3, abs=0.01)
    assert count[-1] - count[0] == 3
    assert [result["memory_top"]["float32[256,1024]"] for result, _ in found] == [(n, n * 1.0) for n in (1, 2, 3, 4)]


def test_a_row_has_the_numbers_and_not_the_groups():
    ((result, row),) = rows_of(CallbackList(load([NAME])), 1)
    assert set(row) == {"memory/rss_mb", "memory/device_mb", "memory/live_arrays"}
    assert 20 < row["memory/rss_mb"] < 100_000
    assert len(result["memory_top"]) <= MemoryTracking.top


def test_the_largest_groups_come_first():
    kept = [jnp.zeros((64, 1024)), jnp.zeros((64, 1024)), jnp.zeros((96, 1024)), jnp.zeros((7,), "int8")]
    top = next(iter(rows_of(CallbackList(load([NAME])), 1)))[0]["memory_top"]
    names = list(top)
    assert names.index("float32[64,1024]") < names.index("float32[96,1024]")  # 512 KiB of two, 384 KiB of one
    assert [group.mb for group in top.values()] == sorted((group.mb for group in top.values()), reverse=True)
    assert live_arrays()["int8[7]"] == (1, 7 / 2**20)
    kept[1].delete()
    assert live_arrays()["float32[64,1024]"].number == 1


def test_sharded_and_replicated_arrays_count_what_they_hold(four_devices):
    put = lambda x, *axes: jax.device_put(x, NamedSharding(four_devices, PartitionSpec(*axes)))
    (axis,) = four_devices.axis_names
    kept = [put(np.zeros((4, 1000, 3), np.float32), axis), put(np.zeros((500, 3), np.float32))]
    found = live_arrays()
    assert found["float32[4,1000,3]"] == (1, 4 * 1000 * 3 * 4 / 2**20)
    assert found["float32[500,3]"] == (1, 4 * 500 * 3 * 4 / 2**20)  # on each of the four
    del kept


def test_it_asks_for_no_rollouts():
    called = CallbackList(load([NAME]))
    assert not called.needs_rollouts and not called.needs_episodes
    called.check(on_policy=False)
