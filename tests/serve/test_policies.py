"""Trained policies behind HTTP: several policies, memory, better checkpoints, tokens and TLS."""

import contextlib
import io
import re
import shutil
import subprocess
import threading
import time
import urllib.request

import numpy as np
import pytest
from saved import save_games
from serving import asked, listening

import jrl
from jrl.config.external import ExternalConfig
from jrl.errors import InputError
from jrl.host import interruption
from jrl.run.store import checkpoint
from jrl.serve import trained_policies
from jrl.serve.client import PolicyClient, RequestRefused
from jrl.serve.http_server import Address

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
def serving(runs, cfg=None, **how):
    """Address of a server of these policies."""
    interrupted, printed = interruption.Signals(), io.StringIO()
    errors = []

    def go():
        try:
            with contextlib.redirect_stdout(printed):
                trained_policies.serve(
                    runs, cfg or ExternalConfig(port=0), best=None, follow=False, interrupted=interrupted, **how
                )
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


@pytest.mark.slow
def test_box_actions_are_those_of_the_policy(runs):
    rng, here = np.random.default_rng(0), jrl.load(runs / "box")
    with serving({"box": str(runs / "box")}) as where:
        client = PolicyClient(where)
        for obs in rng.normal(size=(3, 3)).astype(np.float32):
            np.testing.assert_allclose(client.get_once(obs, policy="box"), here.act(obs), rtol=1e-5)
        client.close()


def test_actions_are_those_of_the_policy(runs):
    rng = np.random.default_rng(0)
    with serving({"default": str(runs / "plain"), "memory": str(runs / "memory")}) as where:
        client = PolicyClient(where)
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
            expected = [policy.act(x) for policy, x in zip(own, obs)]
            assert list(client.steps(ids, obs).actions) == expected
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


def test_local_inference_has_the_memory_of_remote_inference(runs):
    rng = np.random.default_rng(0)
    with serving({"memory": str(runs / "memory")}) as where:
        local, remote = PolicyClient(where, inference_mode="local"), PolicyClient(where)
        here, there = local.start_episodes(2), remote.start_episodes(2)
        for t in range(100):
            obs, over = rng.normal(size=(2, 4)), np.array([t % 7 == 6, t % 11 == 10])
            how = {"terminated": over, "final_observations": obs}
            (here, actions), (there, expected) = local.steps(here, obs, **how), remote.steps(there, obs, **how)
            np.testing.assert_array_equal(actions, expected)
        for _ in range(3):  # one after the other
            episodes = [client.start_episode() for client in (local, remote)]
            for obs in rng.normal(size=(20, 4)):
                first, second = (client.get_action(id, obs) for client, id in zip((local, remote), episodes))
                assert first == second
            for client, id in zip((local, remote), episodes):
                client.end_episode(id, obs)


@pytest.mark.parametrize("name", ["plain", pytest.param("box", marks=pytest.mark.slow)])
def test_local_inference_equals_remote_inference(runs, name):
    rng, size = np.random.default_rng(0), {"plain": 4, "box": 3}[name]
    with serving({"memory": str(runs / "memory"), name: str(runs / name)}) as where:
        client, remote = PolicyClient(where, inference_mode="local"), PolicyClient(where)
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
            client.start_episode()
        with pytest.raises(RequestRefused, match="there is no 'other'"):
            PolicyClient(where, inference_mode="local").start_episode(policy="other")


def test_follow_loads_the_later_checkpoint(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_policies, "_POLL_S", 0.1)
    own = tmp_path / "run"
    shutil.copytree(runs / "plain", own)
    kept = sorted((own / "checkpoints").iterdir(), key=lambda path: path.name)
    last = checkpoint.locate(own)
    shutil.move(last, tmp_path / "later")
    before = checkpoint.read_meta(checkpoint.locate(own))["iteration"]
    assert len(kept) > 2
    interrupted, printed = interruption.Signals(), io.StringIO()

    def go():
        with contextlib.redirect_stdout(printed):
            trained_policies.serve({"default": str(own)}, ExternalConfig(port=0), best=False, follow=True,
                           interrupted=interrupted)  # fmt: skip

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    while not (found := re.search(r"clients: (\S+)", printed.getvalue())):
        time.sleep(0.02)
    version = lambda: asked(found[1], "GET", "/v1/health")[1]["versions"]["default"]
    assert version() == before
    client = PolicyClient(found[1], inference_mode="local")
    episode = client.start_episode()
    client.get_action(episode, np.zeros(4))
    assert client.version == before
    shutil.move(tmp_path / "later", last)
    end = time.monotonic() + 10
    while version() == before and time.monotonic() < end:
        time.sleep(0.05)
    assert version() == checkpoint.read_meta(last)["iteration"] > before
    client._send((episode,))  # the answer names the newer version
    client.get_action(episode, np.zeros(4))
    later = client.version
    assert later == version()
    weights = lambda other: asked(found[1], "GET", f"/v1/weights?newer_than={other}")[0]
    assert (weights(later), weights(later + 1)) == (204, 200)
    shutil.move(
        last, tmp_path / "gone"
    )  # the version falls: clients fetch the older weights, and their episodes continue
    end = time.monotonic() + 10
    while version() == later and time.monotonic() < end:
        time.sleep(0.05)
    assert version() == before
    client._send((episode,))
    client.get_action(episode, np.zeros(4))
    assert client.version == before
    assert client.end_episode(episode, np.zeros(4))["length"] == 3
    slow = PolicyClient(found[1], inference_mode="local", update_interval=None)
    episode = slow.start_episode()
    slow.get_action(episode, np.zeros(4))
    shutil.move(tmp_path / "gone", last)
    while version() == before and time.monotonic() < end + 10:
        time.sleep(0.05)
    slow._send((episode,))
    slow.get_action(episode, np.zeros(4))
    assert (slow.version, slow.update_policy_weights()) == (before, later)  # only by update_policy_weights
    with pytest.raises(ValueError, match="update_interval: expected seconds"):
        PolicyClient(found[1], update_interval=-1.0)
    interrupted.number = 15
    thread.join(10)


def test_requests_need_the_token(runs, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef\n")
    with serving({"default": str(runs / "plain")}, ExternalConfig(port=0, token_file=str(secret))) as where:
        obs = {"observation": [0.0] * 4}
        assert asked(where, "GET", "/v1/health")[0] == 200
        assert asked(where, "POST", "/v1/action", obs)[0] == 401
        assert asked(where, "POST", "/v1/action", obs, Authorization="Bearer 0123456789abcdeF")[0] == 401
        assert asked(where, "POST", "/v1/action", obs, Authorization="Bearer 0123456789abcdef")[0] == 200
        assert asked(where, "GET", "/openapi.json")[0] == 401
        document = asked(where, "GET", "/openapi.json", Authorization="Bearer 0123456789abcdef")[1]
        assert document["security"] == [{"token": []}]
        with pytest.raises(RequestRefused, match="token is needed"):
            PolicyClient(where).start_episode()
        assert PolicyClient(where, token="0123456789abcdef").get_once([0.0] * 4) in (0, 1)
    secret.write_text("short")
    with pytest.raises(InputError, match="16 characters"):
        Address(ExternalConfig(port=0, token_file=str(secret)))


def test_too_many_requests_are_refused(runs):
    with serving({"default": str(runs / "plain")}, ExternalConfig(port=0, max_rate=5.0)) as where:
        client = PolicyClient(where, patience_s=0.0)
        with pytest.raises(RequestRefused, match="more than 5 requests per second"):
            for _ in range(20):
                client.get_once([0.0] * 4)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(runs, tmp_path):
    import ssl

    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem",
            "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    files = {"certificate": str(tmp_path / "cert.pem"), "private_key": str(tmp_path / "key.pem")}
    with serving({"default": str(runs / "plain")}, ExternalConfig(port=0, **files)) as where:
        assert where.startswith("https://")
        client = PolicyClient(where, context=ssl.create_default_context(cafile=files["certificate"]))
        assert client.get_once([0.0] * 4) in (0, 1)
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(where + "/v1/health", timeout=5)


def test_a_port_in_use_is_refused(runs):
    with serving({"default": str(runs / "plain")}) as where:
        listening(where)
        port = int(where.rpartition(":")[2])
        with pytest.raises(InputError, match="name another port"):
            trained_policies.serve({"a": str(runs / "plain")}, ExternalConfig(port=port), best=None, follow=False,
                           interrupted=interruption.Signals())  # fmt: skip
