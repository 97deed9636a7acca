"""Trained policies behind HTTP: several policies, memory, local inference, better checkpoints."""

import contextlib
import io
import re
import shutil
import threading
import time

import numpy as np
import pytest
from saved import save_games
from serving import asked, until

import jrl
from jrl.config.external import ExternalConfig
from jrl.host import interruption
from jrl.run.store import checkpoint
from jrl.serve import trained_policies
from jrl.serve.client import PolicyClient, RequestRefused

SECTIONS = {
    "plain": {"env": {"id": "CartPole-v1"}, "network": {"hidden": [4]}},
    "memory": {"env": {"id": "CartPole-v1"}, "network": {"hidden": [4], "core": {"name": "lstm", "size": 4}}},
    "box": {"env": {"id": "Pendulum-v1"}},
    "game": {"env": {"id": "TicTacToe-v0"}, "multi_agent": {"mapping": "by_agent"}},
}


class Runs:
    """Untrained: `plain` has three checkpoints, the others have one each; a run is made when it is first named."""

    def __init__(self, out):
        self.out = out

    def __truediv__(self, name):
        path = self.out / name
        if not path.exists():
            _, state = save_games(path, algo={"name": "ppo"}, stop={"env_steps": 64}, **SECTIONS[name])
            for iteration in (4, 5) if name == "plain" else ():
                meta = {**checkpoint.read_meta(checkpoint.locate(path)), "iteration": iteration}
                checkpoint.write(path / "checkpoints" / str(iteration), {"learner": state}, meta)
        return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@contextlib.contextmanager
def serving(runs, best=None, follow=False):
    """Address of a server of these policies."""
    interrupted, printed = interruption.Signals(), io.StringIO()
    errors = []

    def go():
        try:
            with contextlib.redirect_stdout(printed):
                cfg = ExternalConfig(port=0)
                trained_policies.serve(runs, cfg, best=best, follow=follow, interrupted=interrupted)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not (found := re.search(r"clients: (\S+)", printed.getvalue())) and not errors and time.monotonic() < end:
        time.sleep(0.02)
    try:
        assert errors == []
        yield found[1]
    finally:
        interrupted.number = 15
        thread.join(10)
        assert errors == []


@pytest.fixture(scope="module")
def address(runs):
    """Address of a server of the policies plain and memory."""
    with serving({"default": str(runs / "plain"), "memory": str(runs / "memory")}) as where:
        yield where


def test_actions_are_those_of_the_policy(runs, address):
    rng, client = np.random.default_rng(0), PolicyClient(address)
    assert set(client.policies()) == {"default", "memory"}
    here = jrl.load(runs / "plain")
    for obs in rng.normal(size=(5, 4)).astype(np.float32):
        assert client.get_once(obs) == here.act(obs)
    assert client.version == checkpoint.read_meta(checkpoint.locate(runs / "plain", best=None))["iteration"]
    with pytest.raises(RequestRefused, match="remembers"):
        client.get_once(obs, policy="memory")
    with pytest.raises(RequestRefused, match="there is no 'other'"):
        client.get_once(obs, policy="other")
    with pytest.raises(RequestRefused, match="do not learn"):
        client.log_action(client.start_episode(), np.zeros(4), 0)
    # two alternating episodes have separate memories
    ids, own = client.start_episodes(2, policy="memory"), [jrl.load(runs / "memory") for _ in range(2)]
    for _ in range(4):
        obs = rng.normal(size=(2, 4)).astype(np.float32)
        assert list(client.steps(ids, obs).actions) == [policy.act(x) for policy, x in zip(own, obs)]
    client.close()


@pytest.mark.slow
def test_policies_of_several_agents_have_names(runs):
    rng, game = np.random.default_rng(0), str(runs / "game")
    assert set(trained_policies.list_policies({"x": game, "y": str(runs / "box")}, None)) == {
        "x.player_0",
        "x.player_1",
        "y",
    }
    with serving({"default": game}) as where:
        client = PolicyClient(where)
        assert list(client.policies()) == ["player_0", "player_1"]
        for name in ("player_0", "player_1"):
            here = jrl.load(game, policy=name)
            obs = {"obs": rng.normal(size=19).astype(np.float32), "action_mask": np.array([1] * 9 + [0], np.int8)}
            assert client.get_once(obs, policy=name) == here.act(obs)
        client.close()


def test_local_inference_has_the_memory_of_remote_inference(address):
    rng, local, remote = np.random.default_rng(0), PolicyClient(address, inference_mode="local"), PolicyClient(address)
    here, there = (client.start_episodes(2, policy="memory") for client in (local, remote))
    for t in range(100):
        obs, over = rng.normal(size=(2, 4)), np.array([t % 7 == 6, t % 11 == 10])
        how = {"terminated": over, "final_observations": obs}
        (here, actions), (there, expected) = local.steps(here, obs, **how), remote.steps(there, obs, **how)
        np.testing.assert_array_equal(actions, expected)
    for _ in range(3):  # one after the other
        episodes = [client.start_episode(policy="memory") for client in (local, remote)]
        for obs in rng.normal(size=(20, 4)):
            first, second = (client.get_action(id, obs) for client, id in zip((local, remote), episodes))
            assert first == second
        for client, id in zip((local, remote), episodes):
            client.end_episode(id, obs)


def test_missing_or_invalid_memory_is_refused(address):
    id = asked(address, "POST", "/v1/episodes", {"policy": "memory"})[1]["episode_id"]
    right = {"episode_ids": [id], "observations": [[[0.0] * 4]], "actions": [[1]], "log_probs": [[-0.7]]}
    played = lambda **more: asked(address, "POST", "/v1/played", {**right, "versions": [[1]], **more})
    for memory, status, message in (
        (None, 400, "memory is missing"),
        ([[[[0.0] * 4]]] * 3 + [[[[0.0] * 5]]], 422, "memory/3: expected float32 [1, 1, 4], got [1, 1, 5]"),
        ([], 422, "memory: expected a list of 4 parts"),
    ):
        answer = played(memory=memory)
        assert (answer[0], message in str(answer[1])) == (status, True), answer
    assert played(memory=[[[[0.0] * 4]]] * 4)[0] == 200


def equal_actions(where, name, size):
    """Compares the actions of local inference with those of the server."""
    rng, client, remote = np.random.default_rng(0), PolicyClient(where, inference_mode="local"), PolicyClient(where)
    episode = client.start_episode(policy=name)
    for obs in rng.normal(size=(100, size)).astype(np.float32):
        expected = remote.get_once(obs, policy=name)
        np.testing.assert_allclose(client.get_action(episode, obs), expected, rtol=1e-5, atol=1e-6)
        client.log_returns(episode, 0.5)
    assert client.version == remote.version
    assert client.end_episode(episode, obs) == {"return": 50.0, "length": 100.0}
    ids, obs = client.start_episodes(2, policy=name), rng.normal(size=(2, size)).astype(np.float32)
    expected = [remote.get_once(x, policy=name) for x in obs]
    np.testing.assert_allclose(client.steps(ids, obs).actions, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="make another client"):
        client.start_episode(policy="another")


def test_local_inference_equals_remote_inference(address):
    equal_actions(address, "default", 4)
    with pytest.raises(RequestRefused, match="there is no 'other'"):
        PolicyClient(address, inference_mode="local").start_episode(policy="other")


@pytest.mark.slow
def test_box_actions_are_those_of_the_policy(runs):
    here = jrl.load(runs / "box")
    with serving({"box": str(runs / "box")}) as where:
        client = PolicyClient(where)
        for obs in np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32):
            np.testing.assert_allclose(client.get_once(obs, policy="box"), here.act(obs), rtol=1e-5)
        equal_actions(where, "box", 3)


def test_follow_loads_the_later_checkpoint(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_policies, "_POLL_S", 0.1)
    own = tmp_path / "run"
    shutil.copytree(runs / "plain", own)
    last, obs = checkpoint.locate(own), np.zeros(4)
    shutil.move(last, tmp_path / "later")
    before = checkpoint.read_meta(checkpoint.locate(own))["iteration"]
    with serving({"default": str(own)}, best=False, follow=True) as where:
        version = lambda: asked(where, "GET", "/v1/health")[1]["versions"]["default"]
        weights = lambda other: asked(where, "GET", f"/v1/weights?newer_than={other}")[0]
        assert version() == before
        client = PolicyClient(where, inference_mode="local")
        episode = client.start_episode()
        client.get_action(episode, obs)
        assert client.version == before
        shutil.move(tmp_path / "later", last)
        until(lambda: version() != before)
        later = version()
        assert later == checkpoint.read_meta(last)["iteration"] > before
        client._local.send((episode,))  # the answer names the newer version
        client.get_action(episode, obs)
        assert client.version == later
        assert (weights(later), weights(later + 1)) == (204, 200)
        shutil.move(last, tmp_path / "gone")  # the version falls: clients fetch older weights, and episodes continue
        until(lambda: version() == before)
        client._local.send((episode,))
        client.get_action(episode, obs)
        assert client.version == before
        assert client.end_episode(episode, obs)["length"] == 3
        slow = PolicyClient(where, inference_mode="local", update_interval=None)
        episode = slow.start_episode()
        slow.get_action(episode, obs)
        shutil.move(tmp_path / "gone", last)
        until(lambda: version() == later)
        slow._local.send((episode,))
        slow.get_action(episode, obs)
        assert (slow.version, slow.update_policy_weights()) == (before, later)  # only by update_policy_weights
