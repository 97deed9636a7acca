"""Local inference of clients: the policy's distributions, log-probabilities and versions of weights."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import serving
from serving import asked

from jrl.envs import client_spaces
from jrl.envs.client_spaces import ClientEnv
from jrl.export import interpreter
from jrl.run import build
from jrl.serve import __main__ as serve
from jrl.serve import client as client_module
from jrl.serve.client import EpisodeLost, LocalPolicy, PolicyClient, RequestRefused
from jrl.serve.client_inference import ClientInference
from jrl.serve.inference import Weights
from jrl.serve.wire import RequestError

BOX = {"box": [3]}
BOUNDED = {"box": [2], "low": -2.0, "high": 2.0}
MASKED = {"dict": {"action_mask": {"box": [3], "dtype": "int8"}, "x": {"box": [2]}}}
SEVERAL = {"dict": {"a": {"multi_discrete": [2, 3]}, "b": {"multi_binary": [2]}, "c": {"tuple": [{"box": [2]}]}}}


class BothPolicies:
    """The client's and the server's form of a policy, without a server."""

    def __init__(self, name, observation, action, **sections):
        cfg = serving.settings(name, external={"observation": observation, "action": action}, **sections)
        spec = client_spaces.build_spec(observation, action, 2)
        env = ClientEnv(spec, cfg.env)
        self.algo, self.spec, self.env = build.algorithm(cfg, env.spec), env.spec, env
        self.local = ClientInference(
            name, self.algo.choice, self.algo.carry(1), env.spec, env.to_env, explore=True,
            clips=cfg.replay is not None, random_steps=getattr(cfg.algo.exploration, "random_timesteps", 0), rows=8,
        )  # fmt: skip
        self.publish(0)
        self.here = None

    def publish(self, version):
        key = jax.random.key(version)
        self.actor = self.algo.actor(self.algo.init(key))
        self.weights = Weights(self.actor, key, version)

    def refresh(self):
        """Pass the program and the weights to the client, as over HTTP."""
        program, version, file = self.local.request(self).result(60)
        program = json.loads(json.dumps({**program, "most": 8}))
        if self.here is None:
            self.here = LocalPolicy(interpreter, np.random.default_rng(0), lambda path: self.answers.pop(0), None)
        with np.load(io.BytesIO(file), allow_pickle=False) as arrays:
            given = {"version": version, "policy": {}, "to_env": {}, "memory": {}}
            for name in arrays.files:
                if name != "version":
                    given[name.split("/")[0]][name.split("/")[1]] = arrays[name]
        self.answers = ([program] if self.here.version < 0 else []) + [given]
        self.here.update()
        return program

    def compared(self, leaves, obs):
        """Return (actions by path, the policy's distribution), after a comparison of actions and log-probabilities."""
        names = list(map(str, range(len(next(iter(leaves.values()))))))
        drawn, changed, log_prob, _ = self.here.act(names, leaves)
        dist, _ = self.algo.choice(self.actor, obs, self.algo.carry(len(log_prob)), True)
        tree = jax.tree.unflatten(jax.tree.structure(dist.mode()), list(drawn.values()))
        np.testing.assert_allclose(log_prob, dist.log_prob(tree), atol=1e-5, rtol=1e-5)
        theirs = tree if self.env.to_env is None else self.env.to_env(tree)
        for mine, its in zip(changed.values(), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-6)
            assert mine.dtype == its.dtype
        return drawn, dist


@pytest.mark.parametrize(
    ("algo", "observation", "action", "more"),
    [
        ("ppo", BOX, {"discrete": 3}, {"algo": {"normalize_obs": True}}),
        pytest.param("impala", BOX, BOUNDED, {}, marks=pytest.mark.slow),
        pytest.param("sac", BOX, BOUNDED, {}, marks=pytest.mark.slow),
        pytest.param("dqn", BOX, {"discrete": 3}, {}, marks=pytest.mark.slow),  # a schedule
        ("ppo", MASKED, {"discrete": 3}, {}),
        pytest.param("ppo", BOX, SEVERAL, {}, marks=pytest.mark.slow),
    ],
)
def test_actions_are_drawn_from_the_policy_with_its_probabilities(algo, observation, action, more):
    both = BothPolicies(algo, observation, action, **more)
    both.refresh()
    rng = np.random.default_rng(1)
    count = 64
    if observation is MASKED:
        mask = np.array([[1, 0, 1]] * count, np.int8)
        leaves = {"action_mask": mask, "x": rng.normal(size=(count, 2))}
        obs = {"action_mask": mask, "x": leaves["x"].astype(np.float32)}
    else:
        leaves = {"": rng.normal(size=(count, 3))}
        obs = leaves[""].astype(np.float32)
    drawn, _ = both.compared(leaves, obs)
    assert observation is not MASKED or not (drawn[""] == 1).any()
    both.publish(1)
    both.refresh()  # other weights, the same program
    both.compared(leaves, obs)
    assert both.here.version == 1


@pytest.mark.parametrize(
    ("algo", "action"),
    [
        ("ppo", {"discrete": 3}),
        pytest.param("ppo", BOUNDED, marks=pytest.mark.slow),
        pytest.param("td3", BOUNDED, marks=pytest.mark.slow),
    ],
)
def test_drawn_actions_have_the_policys_distribution(algo, action):
    both = BothPolicies(algo, BOX, action)
    both.refresh()
    one, count = np.array([[0.3, -1.0, 0.5]], np.float32), 20_000
    drawn, _, log_prob, _ = both.here.act(list(map(str, range(count))), {"": np.repeat(one, count, 0)})
    dist, _ = both.algo.choice(both.actor, one, both.algo.carry(1), True)
    if "discrete" in action:
        share = np.bincount(drawn[""], minlength=3) / count
        np.testing.assert_allclose(share, jax.nn.softmax(dist.logits)[0], atol=0.015)
        return
    deviation = np.exp(np.broadcast_to(dist.log_std, dist.mean.shape))[0]
    tolerance = 4 * deviation.max() / np.sqrt(count)
    np.testing.assert_allclose(drawn[""].mean(0), dist.mean[0], atol=tolerance)
    np.testing.assert_allclose(drawn[""].std(0), deviation, atol=tolerance)
    np.testing.assert_allclose(log_prob.mean(), -(np.log(deviation) + 0.5 * np.log(2 * np.pi * np.e)).sum(), atol=0.05)
    assert algo == "ppo" or np.abs(drawn[""]).max() <= 1.0


@pytest.mark.parametrize(
    ("algo", "core", "shared"),
    [
        ("impala", "lstm", True),
        pytest.param("ppo", "gru", False, marks=pytest.mark.slow),
        pytest.param("dqn", "lstm", True, marks=pytest.mark.slow),
    ],
)
def test_each_episode_has_the_policys_memory(algo, core, shared):
    network = {"core": {"name": core, "size": 5}, "shared": shared}
    both = BothPolicies(algo, BOX, {"discrete": 3}, network=network)
    both.refresh()
    assert both.here.has_memory
    rng, names = np.random.default_rng(2), ["a", "b", "c"]
    start = carry = jax.device_get(both.algo.carry(3))
    for t in range(12):
        obs, begins = rng.normal(size=(3, 3)).astype(np.float32), np.arange(3) == t % 5
        if t == 6:  # memory stays with new weights
            both.publish(1)
            both.refresh()
        fresh = lambda first, x, begins=begins: np.where(begins.reshape(3, *[1] * (x.ndim - 1)), first, x)
        carry = jax.tree.map(fresh, start, carry)
        drawn, _, log_prob, memory = both.here.act(names, {"": obs}, begins)
        for mine, its in zip(memory.values(), jax.tree.leaves(carry), strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-5)
        dist, carry = jax.device_get(both.algo.choice(both.actor, obs, carry, True))
        np.testing.assert_allclose(log_prob, dist.log_prob(drawn[""]), atol=1e-5)
        order = rng.permutation(3)  # other ids, in another order
        later = [f"{names[i][0]}{t}" for i in order]
        both.here.rename_episodes([names[i] for i in order], later)
        names, carry = later, jax.tree.map(lambda x, order=order: x[order], carry)
    both.here.rename_episodes(names[:1], ())
    _, _, _, memory = both.here.act(names, {"": obs})
    gone = [not np.any(x[0]) and bool(np.any(x[1])) for x in memory.values()]
    assert gone == [True] * len(gone)


@pytest.mark.parametrize(
    ("algo", "more", "message"),
    [
        ("td3", {"algo": {"exploration": {"name": "ornstein_uhlenbeck"}}}, "algo.exploration has memory"),
        ("td3", {"algo": {"exploration": {"random_timesteps": 10}}}, "random_timesteps"),
    ],
)
def test_policies_without_local_inference_are_refused_with_the_fix(algo, more, message):
    with pytest.raises(RequestError, match=message) as e:
        BothPolicies(algo, BOX, BOUNDED, **more).refresh()
    assert e.value.status == 422
    assert "inference_mode: remote" in e.value.message


def _running(max_lag=1000):
    return serving.running(serving.settings(envs=4, length=4, external={"max_lag": max_lag}))


@pytest.fixture(scope="module")
def run():
    with _running() as found:
        yield found


@pytest.fixture
def alone(most):
    """A server before its first episode."""
    with _running(most) as found:
        yield found


@pytest.mark.slow
def test_a_client_fetches_new_weights(run):
    client = PolicyClient(run.address, patience_s=0.0, inference_mode="local", seed=0)
    ids, obs, versions = client.start_episodes(4), np.zeros((4, 4), np.float32), []
    end = time.monotonic() + 60
    while not versions or (versions[-1] < versions[0] + 3 and time.monotonic() < end):
        over = np.arange(4) == len(versions) % 50
        ids, actions = client.steps(ids, obs, np.ones(4), terminated=over, final_observations=obs)
        versions.append(client.version)
        assert actions.shape == (4,)
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]
    latest = client.update_policy_weights()
    assert latest >= versions[-1]
    with pytest.raises(RequestRefused, match=r"observation: expected float32 \[4\], got \[3\]"):
        client.steps(ids, np.zeros((4, 3)))
    with pytest.raises(ValueError, match="make another client"):
        client.start_episode(policy="other")
    client._send(tuple(ids))
    for id in ids:
        asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": [0.0] * 4}, **client._headers)
    episode = client.start_episode(training_enabled=False)
    for _ in range(3):
        assert client.get_action(episode, np.zeros(4)) in (0, 1)
        client.log_returns(episode, 2.0)
    assert client.end_episode(episode, np.zeros(4)) == {"return": 6.0, "length": 3.0}
    client.close()


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"versions": [[10**6]]}, 409, "get the weights again"),
        ({"versions": [[-1]]}, 409, "get the weights again"),
        ({"versions": 3}, 422, "expected 1 to 256 steps"),
        ({"versions": [[0]] * 300}, 422, "got 300"),
        ({"actions": [[2]]}, 422, "from 0 to 1"),
        ({"log_probs": [[None]]}, 422, "not numbers"),
        ({"log_probs": [0.0]}, 422, "log_probs: expected"),
        ({"observations": [[[0.0] * 3]]}, 422, "observations: expected"),
        ({"terminated": [[True]]}, 400, "final_observations is missing"),
        ({"versions": None}, 400, "versions is missing"),
        ({"memory": [[[0.0]]]}, 422, "has no memory"),
    ],
)
def test_invalid_steps_are_refused(run, fields, status, message):
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    right = {"observations": [[[0.0] * 4]], "actions": [[1]], "log_probs": [[-0.7]], "versions": [[0]]}
    found, answer = asked(run.address, "POST", "/v1/played", {"episode_ids": [id], **right, **fields})
    assert (found, message in str(answer)) == (status, True), answer
    assert asked(run.address, "POST", "/v1/played", {"episode_ids": [id], **right})[0] == 200
    ended = asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": [0.0] * 4})
    assert (ended[0], ended[1]["length"]) == (200, 1)


def test_missing_or_invalid_memory_is_refused():
    with serving.running(
        serving.settings("impala", envs=1, network={"core": {"name": "gru", "size": 3}, "shared": True})
    ) as found:
        id = asked(found.address, "POST", "/v1/episodes", {})[1]["episode_id"]
        right = {"episode_ids": [id], "observations": [[[0.0] * 4]], "actions": [[1]], "log_probs": [[-0.7]]}
        played = lambda **more: asked(found.address, "POST", "/v1/played", {**right, "versions": [[0]], **more})
        for memory, status, message in (
            (None, 400, "memory is missing"),
            ([[[[0.0] * 4]]], 422, "memory/0: expected float32 [1, 1, 3], got [1, 1, 4]"),
            ([], 422, "memory: expected a list of 1 parts"),
        ):
            answer = played(memory=memory)
            assert (answer[0], message in str(answer[1])) == (status, True), answer
        assert played(memory=[[[[0.0] * 3]]])[0] == 200


@pytest.mark.parametrize(
    ("interval", "asks", "most"),
    [
        (0.0, True, 1000),
        pytest.param(1000.0, False, 1000, marks=pytest.mark.slow),
        pytest.param(None, False, 0, marks=pytest.mark.slow),
    ],
)
def test_weights_are_fetched_at_the_interval(alone, interval, asks, most, recwarn):
    client = PolicyClient(alone.address, patience_s=0.0, inference_mode="local", update_interval=interval)
    ids, versions = client.start_episodes(4), []

    def play(steps=20):
        nonlocal ids
        for _ in range(steps):
            ids, _ = client.steps(ids, np.zeros((4, 4)), np.ones(4))
            versions.append(client.version)

    def later():
        play()
        return asked(alone.address, "GET", "/v1/health")[1]["versions"]["default"] > versions[0]

    serving.until(later)
    play()
    assert (versions[-1] > versions[0]) == asks
    warned = [each for each in recwarn if "external.max_lag" in str(each.message)]
    assert (client.too_old > 0) == (most == 0) == len(warned)
    if interval is None:
        assert client.update_policy_weights() > versions[0]
    else:
        client._local._load_time -= interval  # lets the interval pass
    play()
    assert versions[-1] > versions[0]
    client._send(tuple(ids))
    for id in ids:
        asked(alone.address, "POST", f"/v1/episodes/{id}/end", {"observation": [0.0] * 4}, **client._headers)
    client.close()


def test_remote_inference_fetches_no_weights(tmp_path):
    alone = tmp_path / "client.py"  # a copy of the file
    alone.write_text(Path(client_module.__file__).read_text())
    spec = importlib.util.spec_from_file_location("alone", alone)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.PolicyClient("http://127.0.0.1:1", patience_s=0.0)  # no server
    client.version = 3
    assert client.update_policy_weights() == 3


ALONE = """
import sys, numpy as np
from one_file import PolicyClient
client = PolicyClient(sys.argv[1], patience_s=0.0, inference_mode="local", seed=0)
episode = client.start_episode(training_enabled=False)
for _ in range(20):
    assert client.get_action(episode, np.zeros(4)) in (0, 1)
    client.log_returns(episode, 2.0)
assert client.end_episode(episode, np.zeros(4)) == {"return": 40.0, "length": 20.0}
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "jrl", "numpy"}))
"""


def test_the_written_client_has_local_inference(run, tmp_path, capsys):
    file = tmp_path / "one_file.py"
    assert serve.main(["--write-client", str(file)]) == 0
    command, environment = [sys.executable, "-c", ALONE, run.address], {**os.environ, "PYTHONPATH": ""}
    played = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (played.returncode, played.stdout) == (0, "['numpy']\n"), played.stderr
    file.write_text("mine")
    assert serve.main(["--write-client", str(file)]) == 2
    assert serve.main(["--write-client", str(file / "one_file.py")]) == 2
    errors = capsys.readouterr().err
    assert "exists: name another file" in errors
    assert errors.count("error: --write-client: ") == 2
    assert file.read_text() == "mine"


def test_an_invalid_interval_is_refused():
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="update_interval: expected seconds"):
            PolicyClient(inference_mode="local", update_interval=wrong)


def test_a_client_with_unknown_versions_loses_its_episode_and_fetches_weights(run):
    client = PolicyClient(run.address, patience_s=0.0, inference_mode="local")
    client.update_policy_weights()
    client._local.version += 10**6
    episode = client.start_episode()
    client.get_action(episode, np.zeros(4))
    with pytest.raises(EpisodeLost, match="get the weights again"):
        client.end_episode(episode, np.zeros(4))
    asked(run.address, "POST", f"/v1/episodes/{episode}/end", {"observation": [0.0] * 4}, **client._headers)
    episode = client.start_episode()
    client.get_action(episode, np.zeros(4))
    assert client.version < 10**6
    assert client.end_episode(episode, np.zeros(4))["length"] == 1.0
    client.close()
