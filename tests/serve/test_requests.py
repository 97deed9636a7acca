"""Requests of clients: answers, one clear error for each invalid request, and no effect on other clients."""

import io
import random
import socket
import threading
import time
import urllib.parse

import gymnasium
import jsonschema
import numpy as np
import openapi_spec_validator
import pytest
import serving
from serving import asked

from jrl.serve import space_values, wire
from jrl.serve.client import EpisodeLost, PolicyClient, RequestRefused, _EpisodeState

OBS = [0.1, 0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def run():
    external = {"max_body_mb": 0.1, "timeout_s": 1.0, "max_clients": 12, "max_batch": 16}
    with serving.running(serving.settings(envs=6, length=4, external=external)) as found:
        yield found


@pytest.fixture
def client(run):
    found = PolicyClient(run.address, patience_s=0.0)
    yield found
    found.close()


@pytest.fixture
def alone(run):
    """A run whose episodes of other tests have ended, before `good` begins episodes."""
    serving.until(lambda: asked(run.address, "GET", "/v1/health")[1]["episodes"] == 0)


@pytest.fixture
def good(run):
    """Episodes of another client during the test; at its end they are complete."""
    stop, lengths, lost = threading.Event(), [], []

    def play():
        client, env = PolicyClient(run.address, patience_s=5.0), gymnasium.make("CartPole-v1", max_episode_steps=8)
        try:
            while not stop.is_set():
                lengths.append(one_episode(client, env))
                time.sleep(0.02)  # leaves the processor to the test
        except Exception as e:  # the test asserts that no exception was raised
            lost.append(e)
        client.close()

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    yield
    time.sleep(0.1)
    stop.set()
    thread.join(10)
    assert lost == []
    assert len(lengths) > 0
    assert all(message == counted for message, counted in lengths)


def one_episode(client, env):
    """Pairs (length of the server's answer, number of steps)."""
    obs, _ = env.reset()
    episode, steps, over = client.start_episode(), 0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(int(client.get_action(episode, obs)))
        client.log_returns(episode, reward)
        steps, over = steps + 1, terminated or truncated
    return client.end_episode(episode, obs, truncated=truncated)["length"], steps


def started(run, **headers):
    status, found = asked(run.address, "POST", "/v1/episodes", {}, **headers)
    assert status == 201
    return found["episode_id"]


def counted(run, name):
    """Returns a number of /metrics."""
    lines = asked(run.address, "GET", "/metrics")[1].decode().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"jrl_{name} "))


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


PICKLED = npz(observation=np.array([{"a": 1}], object))
WRONG = [
    ("action", b"{", 400, "not JSON"),
    ("action", b"[1]", 400, "JSON object"),
    ("action", b"[" * 50_000, 400, "not JSON"),
    ("action", {}, 400, "observation is missing"),
    ("action", {"observation": OBS, "typo": 1}, 400, "unknown field"),
    ("action", {"observation": OBS[:3]}, 422, "expected float32 [4], got [3]"),
    ("action", {"observation": [[1], [1, 2]]}, 422, "different lengths"),
    ("action", {"observation": ["a", "b", "c", "d"]}, 422, "not numbers"),
    ("action", {"observation": [10**400, 0, 0, 0]}, 422, "expected float32"),
    ("action", b'{"observation": [NaN, 0, 0, 0]}', 400, "finite"),
    ("action", {"observation": OBS, "reward": "a"}, 422, "reward"),
    ("action", b'{"observation": [0, 0, 0, 0], "reward": 1e999}', 422, "reward: expected float32"),
    ("action", {"observation": [3e38, 0, 0, 0]}, 422, "observation: expected float32 [4] of numbers from -1e+09 to 1e"),
    ("action", {"observation": OBS, "reward": -3e38}, 422, "reward: expected float32 [] of numbers from -1e+09 to 1e"),
    ("action", {"observation": OBS, "reward": 10**12}, 422, "scale the environment's numbers down"),
    ("action", {"observation": OBS, "infos": {"a": 3e38}}, 422, "infos/a: expected float32 [] of numbers from"),
    ("log", {"observation": OBS, "action": 1, "log_prob": -3e38}, 422, "log_prob: expected float32 [] of numbers from"),
    ("end", {"observation": OBS, "reward": 3e38}, 422, "reward: expected float32 [] of numbers from"),
    ("end", {"observation": [0, -3e38, 0, 0]}, 422, "observation: expected float32 [4] of numbers from"),
    ("action", {"observation": OBS, "step": 7}, 409, "at step 0"),
    ("action", {"observation": OBS, "step": -1}, 422, "step: expected greater than or equal to 0"),
    ("log", {"observation": OBS, "action": 1}, 422, "its own policy"),
    ("log", {"observation": OBS, "action": 2}, 422, "from 0 to 1"),
    ("log", {"observation": OBS, "action": 0.5}, 422, "whole numbers"),
    ("log", {"observation": OBS, "action": 1, "log_prob": -0.7}, 422, "its own policy"),
    ("log", {"observation": OBS, "action": 1, "log_prob": "a"}, 422, "log_prob: expected float32"),
    ("action", {"observation": OBS, "infos": {"a": "x"}}, 422, "infos/a: expected float32"),
    ("action", {"observation": OBS, "infos": {"a": [1.0]}}, 422, "infos/a: expected float32 [], got [1]"),
    ("action", {"observation": OBS, "infos": {f"a{i}": 1 for i in range(33)}}, 422, "at most 32 names"),
    ("log", {"observation": OBS, "action": 1, "infos": [1.0]}, 422, "infos: expected a mapping"),
    ("reward", {"reward": 1.0, "infos": {"a\n": 1.0}}, 422, "infos: expected names of 1 to 64"),
    ("reward", {"reward": 1.0}, 409, "no action yet"),
    ("end", {"observation": OBS, "infos": {"a" * 65: 1.0}}, 422, "infos: expected names of 1 to 64"),
    ("end", {"observation": OBS, "truncated": "yes"}, 422, "truncated: expected a boolean"),
    ("end", {"observation": None}, 400, "missing"),
]


def test_an_invalid_request_has_one_clear_error(run, good):
    id = started(run)
    for what, body, status, message in WRONG:
        found = asked(run.address, "POST", f"/v1/episodes/{id}/{what}", body)
        assert (found[0], message in found[1]["error"]) == (status, True), (what, body, found)
    assert asked(run.address, "POST", f"/v1/episodes/{id}/action", {"observation": OBS, "step": 0})[0] == 200
    assert asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": OBS})[1]["length"] == 1


def test_the_largest_accepted_numbers_do_not_end_the_run(run, good):
    """A larger number is refused, alone, in a sum or in a batch, and its request does not count."""
    most, far = space_values.LARGEST, 3e38
    of = lambda path, body, **headers: asked(run.address, "POST", path, body, Jrl_Client="a", **headers)
    one, other = (started(run, Jrl_Client="a") for _ in range(2))
    for id in (one, other):
        assert of(f"/v1/episodes/{id}/action", {"observation": OBS})[0] == 200
    packed = npz(reward=np.float64(far))
    assert of(f"/v1/episodes/{one}/reward", packed, Content_Type=wire.NPZ)[0] == 422
    assert of(f"/v1/episodes/{one}/reward", {"reward": 0.75 * most})[1] == {"reward": 0.75 * most}
    status, found = of(f"/v1/episodes/{one}/reward", {"reward": 0.5 * most, "infos": {"a": 1.0}})
    assert (status, "expected a sum of at most 1e+09" in found["error"]) == (422, True)
    ids, played = [one, other], {"actions": [[0, 1]], "log_probs": [[-most, most]], "versions": [[0, 0]]}
    batch = {"episode_ids": ids, "observations": [OBS, OBS], "rewards": [1.0, far]}
    lead = lambda body: {name: x if name == "episode_ids" else [x] for name, x in body.items()} | played
    assert of("/v1/steps", batch)[0] == of("/v1/played", lead(batch))[0] == 422
    assert of("/v1/played", lead({**batch, "rewards": [0, 0]}) | {"log_probs": [[0, -far]]})[0] == 422
    assert of("/v1/steps", {**batch, "rewards": [0, 0], "observations": [OBS, [far] * 4]})[0] == 422
    last = {"terminated": [False, True], "final_observations": [OBS, [far] * 4], "rewards": [0, 0]}
    assert of("/v1/steps", {**batch, **last})[0] == 422
    rng = np.random.default_rng(0)
    before, sent = of("/v1/steps", {**batch, "rewards": [0, 0]})[1]["version"], 1
    while asked(run.address, "GET", "/v1/health")[1]["versions"]["default"] < before + 4:  # at the limits
        obs, rewards = rng.choice([-most, most], (2, 4)).tolist(), rng.choice([-most, most], 2).tolist()
        body = {"episode_ids": ids, "observations": obs, "rewards": rewards}
        assert of("/v1/played", lead(body))[0] == of("/v1/steps", body)[0] == 200
        sent += 2
    for id in ids:
        status, found = of(f"/v1/episodes/{id}/end", {"observation": OBS})
        assert (status, found["length"]) == (200, 1 + sent)


def test_invalid_npz_is_refused(run, good):
    bomb = io.BytesIO()
    np.savez_compressed(bomb, observation=np.zeros(10_000_000))
    little = io.BytesIO()  # exceeds `max_body_mb` only when unpacked
    np.savez_compressed(little, observation=np.random.default_rng(0).integers(0, 2**30, 20_000))
    assert 160_000 / 64 < len(little.getvalue()) < 2**20 / 10
    id = started(run)
    path = f"/v1/episodes/{id}/action"
    of = lambda body: asked(run.address, "POST", path, body, Content_Type="application/x-npz")
    assert of(b"PK nothing")[0] == 400
    status, found = of(PICKLED)
    assert (status, "not npz" in found["error"]) == (400, True)
    status, found = of(bomb.getvalue())
    assert (status, "unpacks to 80,000," in found["error"]) == (413, True)
    assert of(little.getvalue())[0] == 413
    status, found = of(npz(observation=np.array([np.nan, 0, 0, 0])))
    assert (status, "finite" in found["error"]) == (422, True)
    assert of(npz(observation=np.zeros(4)))[0] == 200
    assert asked(run.address, "POST", path, b"a=b", Content_Type="text/csv")[0] == 415
    asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": OBS})


def test_other_clients_and_unknown_episodes_are_refused(run, good, client):
    id = started(run, Jrl_Client="a")
    path = f"/v1/episodes/{id}"
    assert asked(run.address, "POST", f"{path}/action", {"observation": OBS}, Jrl_Client="b")[0] == 403
    assert asked(run.address, "POST", "/v1/episodes/nobody/action", {"observation": OBS})[0] == 404
    assert asked(run.address, "POST", "/v1/episodes", {"episode_id": id}, Jrl_Client="b")[0] == 409
    assert asked(run.address, "POST", f"{path}/end", {"observation": OBS}, Jrl_Client="a")[0] == 200
    status, found = asked(run.address, "POST", f"{path}/action", {"observation": OBS}, Jrl_Client="a")
    assert (status, "has ended" in found["error"]) == (410, True)
    assert asked(run.address, "GET", "/v1/nothing")[0] == 404
    assert asked(run.address, "GET", "/v1/episodes")[0] == 405
    episode = client.start_episode()
    client.end_episode(episode, OBS)
    client._episodes[episode] = _EpisodeState()
    with pytest.raises(EpisodeLost, match="has ended"):
        client.get_action(episode, OBS)
    with pytest.raises(RequestRefused, match="got \\[2\\]"):
        client.get_action(client.start_episode(), OBS[:2])


def test_clients_without_a_name_have_separate_episodes(run):
    """Each request has its own connection; the server's random id identifies the episode."""
    one, other = started(run), started(run)
    assert min(len(one), len(other)) == 16
    assert one != other
    for reward, id in ((1.0, one), (2.0, other), (2.0, other)):
        assert asked(run.address, "POST", f"/v1/episodes/{id}/action", {"observation": OBS})[0] == 200
        assert asked(run.address, "POST", f"/v1/episodes/{id}/reward", {"reward": reward})[0] == 200
        assert asked(run.address, "POST", f"/v1/episodes/{id}/action", {"observation": OBS}, Jrl_Client="a")[0] == 403
    ended = [asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": OBS})[1] for id in (one, other)]
    assert ended == [{"return": 1.0, "length": 1}, {"return": 4.0, "length": 2}]
    mine = {"episode_id": "mine"}  # another client could choose the same id
    status, found = asked(run.address, "POST", "/v1/episodes", mine)
    assert (status, "expected the header Jrl-Client" in found["error"]) == (400, True)
    assert asked(run.address, "POST", "/v1/episodes", mine, Jrl_Client="a")[0] == 201
    assert asked(run.address, "POST", "/v1/episodes/mine/end", {"observation": OBS}, Jrl_Client="a")[0] == 200
    status, found = asked(run.address, "POST", "/v1/episodes", {}, Jrl_Client="a" * 129)
    assert (status, "Jrl-Client: expected at most 128 characters, got 129" in found["error"]) == (400, True)


def test_a_repeated_request_counts_once(run):
    id = started(run)
    path = f"/v1/episodes/{id}"
    first = asked(run.address, "POST", f"{path}/action", {"observation": OBS, "step": 0})
    assert asked(run.address, "POST", f"{path}/action", {"observation": OBS, "step": 0}) == first
    assert asked(run.address, "POST", f"{path}/action", {"observation": OBS, "reward": 2.0, "step": 1})[0] == 200
    end = asked(run.address, "POST", f"{path}/end", {"observation": OBS, "reward": 1.0, "step": 2})
    assert end == (200, {"return": 3.0, "length": 2})
    assert asked(run.address, "POST", f"{path}/end", {"observation": OBS, "reward": 1.0, "step": 2}) == end


def test_episodes_and_connections_are_limited(run, alone):
    ids = [started(run) for _ in range(6)]
    status, found = asked(run.address, "POST", "/v1/episodes", {})
    assert (status, "6 episodes" in found["error"]) == (429, True)
    assert asked(run.address, "POST", "/v1/episodes", {"count": 2})[0] == 429
    assert asked(run.address, "POST", "/v1/episodes", {"training_enabled": False})[0] == 201
    for id in ids:
        asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": OBS})
    parts = urllib.parse.urlsplit(run.address)
    held = [socket.create_connection((parts.hostname, parts.port)) for _ in range(12)]
    time.sleep(0.2)
    assert asked(run.address, "GET", "/v1/health")[0] == 429
    for size in (0, 50_000):  # a body that was sent before the answer does not reset the connection
        found = sent(run, b"POST /v1/episodes HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
        assert found.startswith(b"HTTP/1.1 429") and b"try later" in found
    for connection in held:
        connection.close()
    time.sleep(0.2)
    assert asked(run.address, "GET", "/v1/health")[0] == 200


STRAY = [
    b"X: a\rTransfer-Encoding: chunked", b"X: a\nContent-Length: 5", b"X: a\x00b", b"X\x00: a", b"X: a\r", b"X: a\x0bb",
    b"\nX: a", b"X: a\r\r", b"X: \x7f",
]  # fmt: skip


def sent(run, text):
    """Returns all bytes that the server sends until it closes the connection."""
    parts = urllib.parse.urlsplit(run.address)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(text)
        found = b""
        while chunk := connection.recv(4096):
            found += chunk
    return found


def test_an_invalid_request_head_is_refused(run, good):
    for text, status in [
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET /v1/health HTTP/3\r\n\r\n", b"400"),
        (b"POST /v1/episodes HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"POST /v1/episodes HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /v1/episodes HTTP/1.1\r\nConnection: close\r\nContent-Length: 100000000\r\n\r\n", b"413"),
        (b"GET /" + b"a" * 20_000, b"431"),
        *((b"GET /v1/health HTTP/1.1\r\n%s\r\n\r\n" % line, b"400") for line in STRAY),
        (b"GET /v1/hea\x00lth HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /v1/health HTTP/1.1\nHost: localhost\n\n", b"400"),
        (b"GET /v1/health HTTP/1.0\r\n\r\n", b"200"),
    ]:
        assert sent(run, text).startswith(b"HTTP/1.1 " + status), text


def test_pipelined_requests_are_answered_in_order(run):
    three = [b"GET /v1/health HTTP/1.1", b"GET /nothing HTTP/1.1", b"GET /v1/policies HTTP/1.1\r\nConnection: close"]
    found = sent(run, b"".join(part + b"\r\n\r\n" for part in three))
    at = [found.index(part) for part in (b'"status": "ok"', b"404 Not Found", b'"algorithm": "ppo"')]
    assert at == sorted(at)


def test_a_refused_info_does_not_affect_later_requests(run, client):
    id = client.start_episode()
    client.get_action(id, OBS)
    client.log_returns(id, 0.5, {f"a{i}": i for i in range(33)})
    with pytest.raises(RequestRefused, match="infos: expected a mapping of at most 32 names") as e:
        client.get_action(id, OBS)
    assert e.value.status == 422
    client.get_action(id, OBS)
    assert client.end_episode(id, OBS) == {"return": 0.5, "length": 2.0}


def test_a_client_that_disconnects_leaves_one_failed_index(run, alone, client):
    other, env = PolicyClient(run.address), gymnasium.make("CartPole-v1")

    def plays_until(holds):
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end
            message, counted = one_episode(other, env)
            assert message == counted

    plays_until(lambda: "env/failures" in run.source.metrics)  # exists after the first rollout
    before = run.source.metrics["env/failures"]
    episode = client.start_episode()
    client.get_action(episode, OBS)
    client.get_action(episode, OBS)
    client.close()
    plays_until(lambda: run.source.metrics["env/failures"] > before)
    for _ in range(3):
        one_episode(other, env)
    other.close()
    assert run.source.metrics["env/failures"] == before + 1
    with pytest.raises(EpisodeLost, match="sent nothing"):
        client.get_action(episode, OBS)


def test_many_episodes_in_one_request(run, client):
    ids = client.start_episodes(3)
    obs = np.zeros((3, 4), np.float32)
    found = client.steps(ids, obs)
    assert found.episodes == ids
    assert found.actions.shape == (3,)
    over = np.array([False, True, False])
    again = client.steps(ids, obs, np.ones(3), terminated=over, final_observations=obs + 1)
    assert [a == b for a, b in zip(again.episodes, ids)] == [True, False, True]
    with pytest.raises(RequestRefused, match="final_observations is missing"):
        client.steps(again.episodes, obs, np.ones(3), truncated=over)
    with pytest.raises(RequestRefused, match="has ended"):
        client.steps(ids, obs)
    with pytest.raises(RequestRefused, match="different ids"):
        client.steps([ids[0], ids[0]], obs[:2])
    with pytest.raises(RequestRefused, match="expected float32 \\[3, 4\\]"):
        client.steps(again.episodes, obs[:2])
    over = np.ones(3, bool)
    ended = client.steps(again.episodes, obs, np.ones(3), terminated=over, final_observations=obs)
    for id in ended.episodes:
        client._episodes[id] = _EpisodeState()
        client._episodes[id].step = 1
    assert [client.end_episode(id, OBS)["length"] for id in ended.episodes] == [1, 1, 1]


# ---------------------------------------------------------------- the description


def test_the_openapi_document_describes_the_answers(run):
    document = asked(run.address, "GET", "/openapi.json")[1]
    openapi_spec_validator.validate(document)
    resolved = lambda schema: {**schema, "components": document["components"]}
    paths = document["paths"]
    id = started(run, Jrl_Client="a")
    sent = {
        "/v1/episodes": ({}, None),
        "/v1/episodes/{id}/action": ({"observation": OBS, "reward": 0.0, "step": 0, "infos": {"a": True}}, id),
        "/v1/episodes/{id}/reward": ({"reward": 1.5}, id),
        "/v1/steps": ({"episode_ids": [id], "observations": [OBS], "rewards": [1.0]}, None),
        "/v1/episodes/{id}/end": ({"observation": OBS, "truncated": True}, id),
    }
    for path, (body, name) in sent.items():
        route = paths[path]["post"]
        assert "Jrl-Client" in [one["name"] for one in route["parameters"]]
        assert {*route["requestBody"]["content"]} == {wire.JSON, wire.NPZ}
        jsonschema.validate(body, resolved(route["requestBody"]["content"]["application/json"]["schema"]))
        status, answer = asked(run.address, "POST", path.replace("{id}", name or ""), body, Jrl_Client="a")
        described_answer = route["responses"][str(status)]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, resolved(described_answer))
    where, body = "/v1/action", npz(observation=np.array(OBS))
    form = next(form for form in paths[where]["post"]["requestBody"]["content"] if form != wire.JSON)
    status, answer = asked(run.address, "POST", where, body, Content_Type=form)
    assert (status, set(np.load(io.BytesIO(answer)))) == (200, {"action", "version"})
    refused = asked(run.address, "POST", f"/v1/episodes/{id}/action", {"observation": OBS})[1]
    jsonschema.validate(refused, document["components"]["schemas"]["Error"])
    for path, methods in paths.items():  # each route exists
        for method in methods:
            assert asked(run.address, method.upper(), path.replace("{id}", "nobody"), b"{}")[0] != 405
            assert "there is no /" not in str(asked(run.address, method.upper(), path.replace("{id}", "x"), b"{}")[1])


def test_random_requests_never_fail_the_server(run, alone, good):
    rng = random.Random(0)
    values = [None, True, 0, -1, 1e308, "x", "", [], [0.0] * 4, [OBS] * 2, {}, {"a": 1}, 2**70, ["x"], [None]]
    names = "observation reward step episode_id count action truncated training_enabled episode_ids observations infos"
    names = [*names.split(), "rewards", "terminated", "final_observations", "actions", "log_probs", "versions", "other"]
    of_one = [f"/v1/episodes/{{}}/{what}" for what in ("action", "log", "turn", "reward", "end")]
    episodes = lambda: asked(run.address, "GET", "/v1/health")[1]["episodes"]
    failed = counted(run, "episodes_failed_total")
    id, seen, played, ended = started(run), set(), 0, 0
    for _ in range(1000):
        body = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(4))}
        body |= {"observation": OBS} if rng.random() < 0.3 else {}
        path = rng.choice(["/v1/episodes", "/v1/steps", "/v1/played", *of_one])
        path = path.format(rng.choice([id, "x", "%00", "a/b"]))
        if path == "/v1/played" and rng.random() < 0.8:  # most fields are valid
            right = {"actions": [[0]], "log_probs": [[-0.7]], "versions": [[0]], "observations": [[OBS]]}
            end = {"terminated": [[True]], "final_observations": [[OBS]]} if rng.random() < 0.3 else {}
            body = {"episode_ids": [id], **right, **end, **body}
        status, found = asked(run.address, "POST", path, body)
        if path == "/v1/played" and status == 200:
            played, ended, id = played + 1, ended + (found["episode_ids"] != [id]), found["episode_ids"][0]
        seen.add(status)
        assert status < 500, body
        if status == 201:
            for begun in found.get("episode_ids", [found.get("episode_id")]):
                asked(run.address, "POST", f"/v1/episodes/{begun}/end", {"observation": OBS})
        if status == 410 and repr(id) in found["error"]:
            id = started(run)
    assert {200, 400, 404, 422} <= seen
    assert played > ended > 0
    assert asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": OBS})[0] in (200, 410)
    assert episodes() <= 1
    assert counted(run, "episodes_failed_total") == failed  # no episode timed out
