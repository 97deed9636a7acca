"""What a buffer takes is known before anything is allocated, and what does not fit is refused."""

import pytest
from replay_oracle import struct

from jrl.host import machine
from jrl.learn import memory
from jrl.replay import prioritized, ring
from jrl.types import InputError


def pong(capacity, make=ring.make, **options):
    options = {"num_envs": 8, "batch_size": 32, "gamma": 0.99, "frame_stack": ring.FrameStack(4), **options}
    return make(struct((4, 84, 84), "uint8"), struct((), "int32"), capacity=capacity, **options)


def test_a_million_transitions_of_pong():
    plain = memory.nbytes(pong(1_000_000))
    assert 84 * 84 * 1e6 < plain < 7.1e9
    by_priority = memory.nbytes(pong(1_000_000, prioritized.make, alpha=0.6, beta=0.4))
    assert by_priority == plain + 4 * 2**21 + 4 + 4  # the tree, the highest priority, the counter
    assert by_priority < 7.3e9
    assert memory.nbytes(pong(1_000_000, frame_stack=None)) > 28e9


def test_what_fits_is_said(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device=None: 10**10)
    assert memory.check_fits(pong, 1_000_000) == "replay: 1,000,000 transitions take 7.07 GB, 10.00 GB are free"
    assert memory.check_fits(pong, 1_000) == "replay: 1,000 transitions take 7.1 MB, 10.00 GB are free"
    monkeypatch.setattr(memory, "available", lambda device=None: None)
    assert memory.check_fits(pong, 10**8) == "replay: 100,000,000 transitions take 706.50 GB"


@pytest.mark.parametrize("make", [ring.make, prioritized.make])
@pytest.mark.parametrize("free", [10**10, 3 * 10**8])
def test_what_does_not_fit_is_refused_with_what_would(monkeypatch, make, free):
    monkeypatch.setattr(memory, "available", lambda device=None: free)
    options = {"alpha": 0.6, "beta": 0.4} if make is prioritized.make else {}
    buffer = lambda capacity: pong(capacity, make, **options)
    with pytest.raises(
        InputError, match=r"replay.capacity: 5,000,000 transitions take 35.* about ([\d,]+) would fit"
    ) as e:
        memory.check_fits(buffer, 5_000_000)
    largest = int(str(e.value).split("about ")[1].split()[0].replace(",", ""))
    assert memory.check_fits(buffer, largest)
    with pytest.raises(InputError):
        memory.check_fits(buffer, int(largest * 1.15))


def test_devices_of_the_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device=None: 10**10)
    buffer = lambda capacity: pong(capacity // 4, num_envs=2)
    assert "7.07 GB" in memory.check_fits(buffer, 1_000_000, devices=4)
    with pytest.raises(InputError, match="1,000,000 transitions take 28"):
        memory.check_fits(lambda capacity: pong(capacity, num_envs=2), 1_000_000, devices=4)


def test_rollouts_and_batches_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device=None: 10**9)
    assert memory.check_rows(10**5, 8, 128) == 8 * 128 * 10**5
    words = (
        r"rollout.length: observations of 1.0 MB each, of 8 envs x 128 steps, take 1.02 GB, but 1.00 GB are free, room "
    )
    with pytest.raises(InputError, match=words + r"for 900: make observations smaller, or lower env.num_envs"):
        memory.check_rows(10**6, 8, 128)
    with pytest.raises(InputError, match=r"8 envs x 10 steps x 12 rollouts, take 0.96 GB"):
        memory.check_rows(10**6, 8, 10, kept=12)
    with pytest.raises(InputError, match=r"8 envs x 1 step, and 1,000 drawn from replay, .* or replay.batch_size$"):
        memory.check_rows(10**6, 8, 1, batch=1000)
    fits = lambda beside: memory.check_fits(pong, 100_000, beside=beside)
    assert fits(10**8)
    with pytest.raises(InputError, match=r"are free, 0.30 GB of them for a rollout and a batch: about 84,000 would"):
        fits(3 * 10**8)


class Accelerator:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_memory_of_an_accelerator():
    assert memory.available(Accelerator({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert memory.available(Accelerator({})) is None
    assert memory.available(Accelerator(None)) is None


def test_memory_of_this_host():
    free = memory.available()
    assert free is None or 10**7 < free < 10**14


def test_memory_of_a_host_by_its_files(tmp_path):
    def write(path, text):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    free = lambda: machine.free_bytes(tmp_path / "proc", tmp_path / "sys")
    assert free() is None  # not Linux
    write("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    assert free() == 5000 * 1024
    # version 2: the group has no limit, the one above has
    write("proc/self/cgroup", "0::/outer/inner\n")
    write("sys/outer/inner/memory.max", "max\n")
    write("sys/outer/inner/memory.current", "77\n")
    assert free() == 5000 * 1024
    write("sys/outer/memory.max", "3000000\n")
    write("sys/outer/memory.current", "1000000\n")
    assert free() == 2_000_000
    write("sys/outer/memory.stat", "anon 5\ninactive_file 400000\n")
    assert free() == 2_400_000
    # version 1, seen from inside of a container: the path is not there, its group is the root
    write("proc/self/cgroup", "9:cpu:/x\n4:memory,hugetlb:/docker/abc\n")
    write("sys/memory/memory.limit_in_bytes", "1500000\n")
    write("sys/memory/memory.usage_in_bytes", "1400000\n")
    assert free() == 100_000
