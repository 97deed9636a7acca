"""A program that collects with a Ray of its own until it is interrupted; tests/rollout/test_own_ray.py runs it."""

import contextlib
import json
import os
import signal
import sys
import time

import jax
import psutil
import ray_sources

from jrl.rollout.ray_hosts import EnvRunners, RunnerOptions


def listening():
    """Where this process and those that it began listen: process name and address of each TCP port."""
    found, me = [], psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections(kind="inet")
            found += [(process.name(), c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are begun deaf to it
    ended, before = [], {*os.environ}
    handler = lambda number, frame: ended.append(number)
    signal.signal(signal.SIGTERM, handler)
    options = RunnerOptions(num=1, num_cpus=0.5)
    source = EnvRunners(
        ray_sources.with_child, options, num_envs=ray_sources.B, like=ray_sources.like(), join=ray_sources.join
    )
    try:
        (pids,) = source.foreach_worker(lambda s: s.pids)
        source.next({"version": jax.numpy.int32(0)}, jax.random.key(0))
        kept = signal.getsignal(signal.SIGTERM) is handler
        print(
            json.dumps(
                {
                    "pids": pids,
                    "sigterm_kept": kept,
                    "environ": sorted({*os.environ} - before),
                    "listening": listening(),
                }
            )
        )
        sys.stdout.flush()
        while True:  # in short steps: the second of two signals at once may reach another thread, and wakes nobody
            time.sleep(0.1)
    except KeyboardInterrupt:
        # the runner has not been interrupted with us: a run saves its checkpoint and ends where it wants to
        source.next({"version": jax.numpy.int32(1)}, jax.random.key(1))
        source.close()
        source.close()
        print("closed")
