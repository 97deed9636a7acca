"""A source for the processes of environment runners: a few numbers instead of environments, and faults on order."""

import os
import subprocess
import time

import jax
import numpy as np

from jrl.metrics.episodes import WINDOW, EpisodeState
from jrl.types import Episodes, Rollout

T, B = 3, 2  # of one runner


class Counting:
    """Its rollouts say who made them, with which weights and key, and how many there were before."""

    def __init__(self, index, restarts, fail=None, stall=None, delay=0.0):
        self.index, self.restarts, self.made, self.delay = index, restarts, 0, delay
        self.fail, self.stall = fail, stall  # the number of the rollout that raises, or takes for ever
        self.columns = columns(0)
        self.metrics = {"env/failures": 1.0, "rollout/made": 0.0}
        self.begun = False

    def next(self, actor, key):
        if self.made == self.fail:
            raise ArithmeticError("the sum of its parts")
        if self.made == self.stall:
            time.sleep(600)
        time.sleep(self.delay)
        row = lambda value, dtype=np.float32: np.full((T, B), value, dtype)
        extras = {
            "restarts": row(self.restarts),
            "made": row(self.made),
            "version": row(np.asarray(actor["version"])),
            "draw": row(np.asarray(jax.random.key_data(key))[-1], np.uint32),
        }
        no, going_on = row(False, bool), np.full(B, self.begun)
        obs = row(self.index)
        rollout = Rollout(obs, obs[0], row(0, np.int32), row(1), no, no, row(True, bool), going_on, extras, ())
        self.made, self.begun = self.made + 1, True
        self.columns = self.columns.replace(length=self.columns.length + T)
        self.metrics["rollout/made"] = float(self.made)
        zero, window = np.float32(0), self.columns.window_return
        return rollout, Episodes(np.int32(0), zero, zero, zero, np.int32(0), np.int32(T * B), window, window)

    def reset(self, key):
        self.begun = False
        self.columns = columns(0)

    def foreach_env(self, fn):
        return [fn(f"{self.index}.{i}") for i in range(B)]

    def close(self):
        pass


def columns(length, window=np.nan):
    zeros, ring = np.zeros(B, np.float32), np.full(WINDOW, window, np.float32)
    return EpisodeState(zeros, zeros, np.full(B, length, np.int32), zeros, ring, ring, np.int32(0))


def like():
    """Shapes of a runner's rollouts."""
    rollout, _ = Counting(0, 0).next({"version": 0}, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rollout)


def join(parts):
    """Columns side by side: the last axis of all but the time-major arrays is the only one there is."""
    return jax.tree.map(lambda *x: np.concatenate(x, axis=-1), *parts)


def counting(faults, index, restarts):
    """Faults: index -> arguments, for the first runner of that index; with the key "always", for all."""
    return Counting(index, restarts, **(faults.get(index, {}) if restarts == 0 or "always" in faults else {}))


def with_child(index, restarts):
    """Starts a process of its own, as environments do, and writes its number for the test."""
    child = subprocess.Popen(["sleep", "600"])
    source = Counting(index, restarts)
    source.pids = (os.getpid(), child.pid)
    return source
