"""Stage timers add up, over threads and through errors."""

import sys
import threading

import pytest

from jrl.metrics import timers as module
from jrl.metrics.timers import Timers


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_stages_add_up_and_drain_resets(clock):
    timers = Timers()
    for seconds in (1.0, 2.0):
        with timers("env"):
            clock[0] += seconds
    with timers("update"):
        clock[0] += 0.5
        with timers("transfer"):
            clock[0] += 0.25
    timers.add("env", 10.0)
    assert timers.drain() == {"time/env": 13.0, "time/transfer": 0.25, "time/update": 0.75}
    timers.add("update", 1.0)
    assert timers.drain() == {"time/env": 0.0, "time/transfer": 0.0, "time/update": 1.0}


def test_a_stage_that_raises_is_counted(clock):
    timers = Timers()
    with pytest.raises(KeyError), timers("env"):
        clock[0] += 3.0
        raise KeyError
    assert timers.drain() == {"time/env": 3.0}


@pytest.fixture
def eager_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_nothing_is_lost_between_threads_and_drains(eager_threads):
    timers, drained = Timers(), []

    def work():
        for _ in range(2000):
            timers.add("env", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained.append(timers.drain().get("time/env", 0.0))
    drained.append(timers.drain()["time/env"])
    assert sum(drained) == 8000.0
