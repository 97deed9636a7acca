"""Clients at once: the run learns from each step once, as it was played, and ends while they play."""

import threading

import jax
import numpy as np
import pytest
from serving import asked, running, settings, until

from jrl.serve.client import EpisodeLost, PolicyClient
from jrl.serve.client_source import DROPPED, ClientSource

CLIENTS, EPISODES, LENGTH = 20, 20, 10


@pytest.mark.slow
def test_each_step_is_learned_once(monkeypatch):
    times, wrong, lengths = np.zeros((CLIENTS, EPISODES, LENGTH), int), [], []
    source_next = ClientSource.next

    def noted(self, actor, key):
        rollout, episodes = source_next(self, actor, key)
        found = jax.device_get(rollout)
        real = found.mask & (np.arange(len(found.mask))[:, None] < found.count)
        client, episode, step, _ = found.obs[real].astype(int).T
        np.add.at(times, (client, episode, step), 1)
        wrong.extend(found.reward[real] - 10 * step - found.action[real])
        wrong.extend(found.terminated[real] ^ (step == LENGTH - 1))
        return rollout, episodes

    def play(i):
        client = PolicyClient(run.address, patience_s=30.0)
        for number in range(EPISODES):
            episode = client.start_episode()
            for step in range(LENGTH):
                action = int(client.get_action(episode, [i, number, step, 0]))
                client.log_returns(episode, 10 * step + action)  # rows show which action the server chose
            lengths.append(client.end_episode(episode, [i, number, LENGTH, 0])["length"])
        client.close()

    monkeypatch.setattr(ClientSource, "next", noted)
    replay = {"capacity": 10_000, "batch_size": 32, "updates_per_step": 0.05}
    with running(settings("dqn", envs=CLIENTS, replay=replay)) as run:
        threads = [threading.Thread(target=play, args=(i,)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: (times > 0).sum() >= 0.9 * times.size)  # the last rows wait for a full rollout
        assert run.source.metrics[DROPPED] == run.source.metrics["env/failures"] == 0
    assert lengths == [LENGTH] * (CLIENTS * EPISODES)
    assert not np.any(wrong)
    assert times.max() == 1
    by_episode = times.reshape(CLIENTS, -1)
    assert (np.diff(by_episode, axis=1) <= 0).all()  # no step is missing between learned steps


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
