"""Requests never wait for an update, and at most for a single call of the policy."""

import gc
import threading

import numpy as np
import serving
from serving import asked

from jrl.serve.client import PolicyClient
from jrl.serve.episode_table import UNLEARNED, ClientEpisode, EpisodeTable, Item, Seat
from jrl.serve.inference import ChosenActions, Inference, Weights

OBS = [0.1, 0.2, 0.3, 0.4]


def histogram(address, name):
    """Returns the counts of a histogram of /metrics, not cumulated."""
    lines = asked(address, "GET", "/metrics")[1].decode().splitlines()
    found = [int(line.split()[-1]) for line in lines if line.startswith(f"jrl_{name}_bucket{{")]
    assert next(line for line in lines if line.startswith(f"jrl_{name}_count")).endswith(f" {found[-1]}")
    return np.diff([0, *found])


def version(run):
    return asked(run.address, "GET", "/v1/health")[1]["versions"]


def test_requests_do_not_wait_for_an_update():
    held, released = threading.Event(), threading.Event()
    frozen = gc.get_freeze_count()

    def update(row):
        held.set()
        assert released.wait(60)

    with serving.running(serving.settings(envs=1, length=4, run={"report_every": 16})) as run:
        run.session.sinks.append(update)
        client = PolicyClient(run.address, patience_s=0.0)
        try:
            episode = client.start_episode()
            while not held.is_set():
                client.get_action(episode, OBS)
            before = histogram(run.address, "wait_seconds").sum()
            then = version(run)
            for _ in range(20):  # during the update
                client.get_action(episode, OBS)
            assert histogram(run.address, "wait_seconds").sum() == before + 20
            assert version(run) == then
            assert (
                gc.get_freeze_count() > frozen
            )  # compiled programs are frozen: a full collection would pause all requests
        finally:
            released.set()
            client.close()
    assert gc.get_freeze_count() == 0


class Slow:
    """A program that waits in each call for a permission, and records the items of the call."""

    sizes = (64,)

    def __init__(self):
        self.calls, self.may = [], threading.Semaphore(0)

    def __call__(self, weights, items, count):
        self.calls.append([item.reward for item in items])
        assert self.may.acquire(timeout=30)
        n = len(items)
        return ChosenActions(np.zeros(n), np.zeros(n), {}, (), [(0, ())] * n)


def test_an_item_is_in_the_next_call():
    rng, program, answered = np.random.default_rng(0), Slow(), []
    table = EpisodeTable(None, 0, 64)
    inference = Inference(table, program, lambda column: (), answered.extend, max_wait_ms=0)
    item = lambda i: Item(Seat(ClientEpisode(str(i), "", ""), 0, UNLEARNED, ()), OBS, float(i))
    inference.publish(Weights(None, None, 0))
    number, group = 1, [0.0]
    inference.request([item(0)])
    for call in range(20):
        serving.until(lambda call=call: len(program.calls) == call + 1)
        assert program.calls[call] == group
        group = [float(number + k) for k in range(rng.integers(1, 20))]
        number += len(group)
        for each in group:  # one after the other, during that call
            inference.request([item(each)])
        program.may.release()
    program.may.release()
    serving.until(lambda: len(answered) == number)
    inference.close()
    assert sum(inference.waits.counts) == number
    assert sum(inference.calls.counts) == 21
