"""Load of the machine: CPU, memory, accelerators."""

import functools
import importlib
import os
from typing import Any

import psutil

_MIB = 2**20


def measure_usage() -> dict[str, float]:
    """Measures the current load of this process and its machine, as metrics of a result row.

    Returns:
      `sys/cpu_percent`: load of all cores since the last call; 0 in the first.
      `sys/ram_percent`: used share of the machine's memory.
      `sys/rss_mb`: memory of this process in MiB.
      `sys/device_memory_mb`: used memory of the accelerator in MiB, if jax reports it.
      `sys/gpu_percent`: share of the time in which the NVIDIA GPU was busy, if the module pynvml is installed.
      With several accelerators, the last two have the device's number as a suffix: `sys/gpu_percent/0`.
    """
    found = {
        "sys/cpu_percent": psutil.cpu_percent(),
        "sys/ram_percent": psutil.virtual_memory().percent,
        "sys/rss_mb": _process().memory_info().rss / _MIB,
    }
    return (
        found
        | _number_by_device("sys/device_memory_mb", _device_memory())
        | _number_by_device("sys/gpu_percent", _gpu_load())
    )


def _number_by_device(name: str, values: list[float]) -> dict[str, float]:
    return {name: values[0]} if len(values) == 1 else {f"{name}/{i}": x for i, x in enumerate(values)}


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()


def _device_memory() -> list[float]:
    import jax  # late: loggers do not need jax

    stats = [device.memory_stats() for device in jax.local_devices()]
    return [s["bytes_in_use"] / _MIB for s in stats if s and "bytes_in_use" in s]


def _gpu_load() -> list[float]:
    nvml, gpus = _gpus()
    try:
        return [float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu) for gpu in gpus]
    except Exception:  # NVML's errors are classes of the optional module; an unknown load is left out
        return []


@functools.cache
def _gpus() -> tuple[Any, list[Any]]:
    """Returns the module and its handles of the GPUs that this process may use; empty if they cannot be queried."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    try:
        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(nvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        number, uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
        return nvml, [number(int(n)) if n.strip().isdigit() else uuid(n.strip()) for n in names if n.strip()]
    except Exception:  # no driver, or a missing device
        return nvml, []
