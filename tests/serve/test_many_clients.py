"""Two hundred clients at once: the run learns from each step once, as it was played."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from serving import asked, running, settings, until

from jrl.serve.client import EpisodeLost, PolicyClient
from jrl.serve.client_source import DROPPED, ClientSource

ROOT = Path(__file__).parents[2]
CLIENTS, LENGTH, MOST = 200, 20, 4000  # steps of an episode, episodes of a client
SECONDS = 300
PLAYER = """
import json, sys, threading, time
from client import PolicyClient

address, first, count, length, seconds = sys.argv[1], *map(int, sys.argv[2:])
ended, until = [0] * count, time.monotonic() + seconds

def play(i):
    client = PolicyClient(address, patience_s=30.0)
    while time.monotonic() < until:
        episode = client.start_episode()
        for step in range(length):
            action = int(client.get_action(episode, [first + i, ended[i], step, 0]))
            client.log_returns(episode, 10 * step + action)  # rows show which action the server chose
        found = client.end_episode(episode, [first + i, ended[i], length, 0])
        assert found["length"] == length
        ended[i] += 1
    client.close()

threads = [threading.Thread(target=play, args=(i,)) for i in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(ended))
"""


class Seen:
    """Count of each step that the learner got, and errors."""

    def __init__(self):
        self.times = np.zeros((CLIENTS, MOST, LENGTH), np.uint8)
        self.wrong = 0

    def add(self, rollout):
        rollout = jax.device_get(rollout)
        real = rollout.mask.copy()
        if rollout.count is not None:
            real &= np.arange(len(real))[:, None] < rollout.count
        client, episode, step, _ = rollout.obs[real].astype(int).T
        np.add.at(self.times, (client, episode, step), 1)
        self.wrong += int((rollout.reward[real] != 10 * step + rollout.action[real]).sum())
        self.wrong += int((rollout.terminated[real] != (step == LENGTH - 1)).sum())


def played(tmp_path, address, look):
    """Return the number of ended episodes of each client, of two processes; checks every second."""
    (tmp_path / "client.py").write_bytes((ROOT / "jrl" / "serve" / "client.py").read_bytes())
    (tmp_path / "player.py").write_text(PLAYER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    half = CLIENTS // 2
    args = lambda first: [sys.executable, "-P", "player.py", address, *map(str, (first, half, LENGTH, SECONDS))]
    processes = [
        subprocess.Popen(args(first), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for first in (0, half)
    ]
    while any(process.poll() is None for process in processes):
        look()
        time.sleep(1)
    return np.array([count for process in processes for count in json.loads(process.stdout.read())])


@pytest.mark.slow
def test_each_step_is_learned_once(tmp_path, monkeypatch):
    seen, source_next, memory = Seen(), ClientSource.next, []

    def noted(self, actor, key):
        rollout, episodes = source_next(self, actor, key)
        seen.add(rollout)
        return rollout, episodes

    monkeypatch.setattr(ClientSource, "next", noted)
    cfg = settings("dqn", envs=CLIENTS, replay={"capacity": 100_000, "batch_size": 32, "updates_per_step": 0.01})
    with running(cfg) as run:
        process = psutil.Process()
        ended = played(tmp_path, run.address, lambda: memory.append(process.memory_info().rss / 2**20))
        expected = np.arange(MOST)[None, :, None] < ended[:, None, None]
        until = time.monotonic() + 30
        while (seen.times < expected).any() and time.monotonic() < until:
            time.sleep(0.2)
        assert run.source.metrics[DROPPED] == 0
        assert run.source.metrics["env/failures"] == 0
    print(f"{ended.sum() * LENGTH:,} steps; {memory[len(memory) // 5]:.0f} to {memory[-1]:.0f} MiB")
    assert ended.min() > 0
    assert ended.max() < MOST
    assert seen.wrong == 0
    assert (seen.times == expected).all(), (
        f"{(seen.times < expected).sum()} lost, {(seen.times > expected).sum()} twice"
    )
    assert memory[-1] < memory[len(memory) // 5] + 100


@pytest.mark.slow
def test_a_run_ends_while_clients_play():
    """Clients' rows do not delay the end, and connections close before the checkpoint."""
    replay = {"capacity": 256, "learning_starts": 8, "train_every": 8, "batch_size": 8}
    with running(settings("dqn", replay=replay)) as run:
        lost = []

        def play():
            client = PolicyClient(run.address, patience_s=0.0)
            ids, obs = client.start_episodes(2), np.zeros((2, 4), np.float32)
            try:
                while True:
                    client.steps(ids, obs, np.ones(2, np.float32))
            except EpisodeLost as e:
                lost.append(e)

        player = threading.Thread(target=play, daemon=True)
        player.start()
        until(lambda: asked(run.address, "GET", "/v1/health")[1]["versions"]["default"] > 2)
        run.end()
        for thread in (run.thread, player):
            thread.join(30)
            assert not thread.is_alive()
        assert len(lost) == 1
