"""The load of the machine: numbers that can be checked, and devices that are made up."""

import mmap
import sys
import types

import jax
import psutil
import pytest

from jrl.metrics import system

CPU = {"sys/cpu_percent", "sys/ram_percent", "sys/rss_mb"}


@pytest.fixture(autouse=True)
def _asked_anew():
    system._gpus.cache_clear()
    yield
    system._gpus.cache_clear()


def test_cpu_and_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    before = system.measure_usage()
    assert set(before) == CPU  # the CPU has no memory of its own
    held = mmap.mmap(-1, 64 * 2**20)  # of its own: numpy may be given pages that the process held before
    held.write(bytes(1) * len(held))  # written to, and so really held
    after = system.measure_usage()
    assert after["sys/rss_mb"] - before["sys/rss_mb"] > 50
    assert after["sys/rss_mb"] == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.05)
    assert 0 < after["sys/ram_percent"] <= 100
    assert 0 <= after["sys/cpu_percent"] <= 100
    assert all(isinstance(x, float) for x in after.values())
    held.close()


class Device:
    def __init__(self, mib):
        self._mib = mib

    def memory_stats(self):
        return None if self._mib is None else {"bytes_in_use": self._mib * 2**20, "bytes_limit": 2**40}


def nvml(loads, broken=False):
    """A module that knows GPUs by number and by name."""

    class NVMLError(Exception):
        pass

    def start():
        if broken:
            raise NVMLError("no driver")

    rates = lambda gpu: types.SimpleNamespace(gpu=loads[gpu])
    return types.SimpleNamespace(
        nvmlInit=start,
        nvmlDeviceGetCount=lambda: len(loads),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda name: int(name.removeprefix("GPU-")),
        nvmlDeviceGetUtilizationRates=rates,
    )


def test_accelerators(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml([70, 80]))
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(100), Device(300)])
    found = system.measure_usage()
    assert {k: v for k, v in found.items() if k not in CPU} == {
        "sys/device_memory_mb/0": 100.0,
        "sys/device_memory_mb/1": 300.0,
        "sys/gpu_percent/0": 70.0,
        "sys/gpu_percent/1": 80.0,
    }


@pytest.mark.parametrize("visible", ["1", "GPU-1"])
def test_only_the_gpus_of_this_process(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", nvml([70, 80]))
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None), Device(5)])
    found = system.measure_usage()
    assert {k: v for k, v in found.items() if k not in CPU} == {"sys/device_memory_mb": 5.0, "sys/gpu_percent": 80.0}


def test_a_driver_that_does_not_answer_is_no_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([70], broken=True))
    assert set(system.measure_usage()) == CPU
