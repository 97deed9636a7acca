"""Processes that tests begin and end."""

import time

import psutil


def alive(pid):
    """Whether there is such a process, which is more than a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*pids, seconds=5.0):
    """Whether none of them is alive, at the latest after so long."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def descendants(pid=None):
    """The processes that are alive of those that one began (None: this one), and of those that they began."""
    return {process.pid for process in psutil.Process(pid).children(recursive=True) if alive(process.pid)}
