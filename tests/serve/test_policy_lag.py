"""Policy lag of clients' steps, compared with a list of each step's version."""

import queue
import threading

import numpy as np
import pytest
import serving
from serving import asked

from jrl.config import external
from jrl.run import build
from jrl.serve import client_source
from jrl.serve.clients import Clients

LENGTH, MOST = 4, 2
# for each update: requests with steps of one episode, as the version of each step. Four steps are complete and new
# enough when an update begins; the last step waits for its result
REQUESTS = [
    [[0, 0, 0, 0, 0]],
    [[1, 0, 1, 1]],
    [[0, 2, 0, 1]],
    [[0, 3, 0, 3, 2], [3, 1, 2]],  # version 0 is too old here, and earlier steps are dropped, too
    [[2, 3, 4, 4]],
]
DROPPED = [12, 13, 14, 15]  # numbers of steps
OLD = [[[0] * 5], *[[[0] * 4]] * 6]  # a client that never fetches weights
CASES = [("ppo", MOST, REQUESTS, DROPPED), ("impala", None, OLD, [])]


def _learner(run, found, count):
    """Yields the step numbers and the metrics of each rollout."""
    state = run.program.init(0)
    for i in range(count):
        _, rollout, _ = run.program.collect(state, 0, i)
        numbers = np.asarray(rollout.obs)[:, 0, 0][np.asarray(rollout.mask)[:, 0]]
        found.put((numbers.astype(int).tolist(), dict(run.program.source.metrics)))


def _play(address, episode, first, versions):
    """Sends steps, numbered by their observations; returns the number of steps that were too old."""
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
    return answer["too_old"]


@pytest.mark.parametrize(("algo", "most", "requests", "dropped"), CASES)
def test_the_metrics_equal_those_of_a_list(algo, most, requests, dropped):
    cfg = serving.settings(algo, envs=1, length=LENGTH, external={} if most is None else {"max_lag": most})
    clients, found, chose, taken, late = Clients(), queue.SimpleQueue(), [], [], 0
    with clients.open(cfg.external):
        run = build.run(cfg, external=clients.source(cfg, 0, []))
        thread = threading.Thread(target=_learner, args=(run, found, len(requests)), daemon=True)
        thread.start()
        serving.listening(clients.address)
        episode = asked(clients.address, "POST", "/v1/episodes", {})[1]["episode_id"]
        for update, sent in enumerate(requests):
            serving.until(lambda at=update: asked(clients.address, "GET", "/v1/health")[1]["versions"]["default"] == at)
            for versions in sent:
                told = _play(clients.address, episode, len(chose), versions)
                assert told == sum(update - version > (update if most is None else most) for version in versions)
                chose, late = chose + versions, late + told
            numbers, metrics = found.get(timeout=30)
            taken += numbers
            lags = [update - chose[number] for number in numbers]
            assert most is None or max(lags) <= most
            assert metrics[client_source.LAG] == pytest.approx(np.mean(lags))
            assert metrics[client_source.DROPPED] == max(taken) + 1 - len(taken)
            assert metrics[client_source.TOO_OLD] == late
        thread.join(10)
        run.program.close()
    assert (late > 0) == (most is not None)
    assert [number for number in range(max(taken)) if number not in taken] == dropped
    assert taken == sorted(taken)
    assert max(taken) == len(chose) - 2


@pytest.mark.parametrize(("algo", "most"), [("ppo", 4), ("impala", None), ("appo", None), ("dqn", None)])
def test_algorithms_with_correction_learn_from_any_version(algo, most):
    max_lag = lambda cfg: external.max_lag(cfg.external, cfg.algo)
    assert max_lag(serving.settings(algo)) == most
    assert max_lag(serving.settings(algo, external={"max_lag": 1})) == 1
