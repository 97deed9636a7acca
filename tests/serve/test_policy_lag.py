"""How far the weights that chose the steps of clients are behind, beside a plain record of who chose which."""

import queue
import threading

import numpy as np
import pytest
import serving
from serving import asked

from jrl.run import build
from jrl.serve import source
from jrl.serve.clients import Clients

LENGTH, MOST = 4, 2
# for each update, requests with steps of one episode: of each step the version of the weights that chose it. Four steps
# are complete and young enough when an update begins; the last step waits for what comes of it
REQUESTS = [
    [[0, 0, 0, 0, 0]],
    [[1, 0, 1, 1]],
    [[0, 2, 0, 1]],
    [[0, 3, 0, 3, 2], [3, 1, 2]],  # here version 0 is too old, which costs the steps before those, too
    [[2, 3, 4, 4]],
]
DROPPED = [12, 13, 14, 15]  # numbers of steps


def _learner(run, found):
    """Gives the numbers of the steps of each rollout, and the metrics, as they come."""
    state = run.program.init(0)
    for i in range(len(REQUESTS)):
        _, rollout, _ = run.program.collect(state, 0, i)
        numbers = np.asarray(rollout.obs)[:, 0, 0][np.asarray(rollout.mask)[:, 0]]
        found.put((numbers.astype(int).tolist(), dict(run.program.source.metrics)))


def _play(address, episode, first, versions):
    """Sends steps, numbered by their observations."""
    fields = {
        "episode_ids": [episode],
        "observations": [[[float(first + i)] * 4] for i in range(len(versions))],
        "rewards": [[1.0]] * len(versions),
        "actions": [[1]] * len(versions),
        "log_probs": [[-0.7]] * len(versions),
        "versions": [[version] for version in versions],
    }
    status, answer = asked(address, "POST", "/v1/played", fields)
    assert status == 200, answer


@pytest.mark.parametrize("algo", ["appo", "impala"])
def test_the_row_is_that_of_a_plain_record(algo):
    cfg = serving.settings(algo, envs=1, length=LENGTH, external={"max_lag": MOST})
    clients, found, chose, taken = Clients(), queue.SimpleQueue(), [], []
    with clients.open(cfg):
        run = build.run(cfg, external=clients.source(cfg, 0, []))
        thread = threading.Thread(target=_learner, args=(run, found), daemon=True)
        thread.start()
        serving.listening(clients.address)
        episode = asked(clients.address, "POST", "/v1/episodes", {})[1]["episode_id"]
        for update, requests in enumerate(REQUESTS):
            serving.until(lambda at=update: asked(clients.address, "GET", "/v1/health")[1]["versions"]["default"] == at)
            for versions in requests:
                _play(clients.address, episode, len(chose), versions)
                chose += versions
            numbers, metrics = found.get(timeout=30)
            taken += numbers
            lags = [update - chose[number] for number in numbers]
            assert max(lags) <= MOST
            assert metrics[source.LAG] == pytest.approx(np.mean(lags))
            assert metrics[source.DROPPED] == max(taken) + 1 - len(taken)
        thread.join(10)
        run.program.close()
    assert [number for number in range(max(taken)) if number not in taken] == DROPPED
    assert taken == sorted(taken)
    assert max(taken) == len(chose) - 2
