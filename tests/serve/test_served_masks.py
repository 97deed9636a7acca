"""A server that learns from any action: actions of clients, and action masks."""

import numpy as np
import pytest
import serving
from serving import asked

from jrl.serve.client import PolicyClient, RequestRefused

X = [0.1, 0.2, 0.3, 0.4]
SOME, NOTHING = {"action_mask": [0, 1], "x": X}, {"action_mask": [0, 0], "x": X}


@pytest.fixture(scope="module")
def run():
    external = {"observation": {"dict": {"action_mask": {"multi_binary": [2]}, "x": {"box": [4]}}}}
    replay = {"learning_starts": 8, "train_every": 8, "batch_size": 8, "capacity": 100}
    with serving.running(serving.settings("dqn", envs=1, external=external, replay=replay)) as found:
        yield found


def test_a_clients_action_keeps_its_log_probability(run):
    client = PolicyClient(run.address, patience_s=0.0)
    id = client.start_episode()
    client.log_action(id, SOME, 1, log_prob=np.float32(-0.7))
    client.log_action(id, SOME, 0)
    with pytest.raises(RequestRefused, match=r"log_prob: expected float32 \[\], got \[1\]"):
        client.log_action(id, SOME, 1, log_prob=[-0.7])
    assert client.end_episode(id, SOME)["length"] == 2
    client.close()


@pytest.mark.slow
def test_a_mask_without_an_allowed_action_is_refused(run):
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    many = {name: [part] for name, part in NOTHING.items()}
    for path, body in (
        (f"/v1/episodes/{id}/action", {"observation": NOTHING}),
        (f"/v1/episodes/{id}/log", {"observation": NOTHING, "action": 1}),
        ("/v1/steps", {"episode_ids": [id], "observations": many}),
    ):
        status, found = asked(run.address, "POST", path, body)
        assert (status, "action_mask: it allows no action" in found["error"]) == (422, True)
    for _ in range(20):
        assert asked(run.address, "POST", f"/v1/episodes/{id}/action", {"observation": SOME})[1]["action"] == 1
    last = asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": NOTHING})
    assert (last[0], last[1]["length"]) == (200, 20)
    serving.until(lambda: asked(run.address, "GET", "/v1/health")[1]["versions"]["default"] >= 2)
