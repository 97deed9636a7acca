"""Local inference of clients: the policy's distributions, log-probabilities and versions of weights."""

import io
import json
import os
import subprocess
import sys
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
        """Passes the program and the weights to the client, as over HTTP."""
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
        """Returns (actions by path, the policy's distribution), after a comparison of actions and log-probabilities."""
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
        pytest.param("ppo", BOX, BOUNDED, {}, marks=pytest.mark.slow),
        pytest.param("sac", BOX, BOUNDED, {}, marks=pytest.mark.slow),
        pytest.param("td3", BOX, BOUNDED, {}, marks=pytest.mark.slow),
        pytest.param("dqn", BOX, {"discrete": 3}, {}, marks=pytest.mark.slow),  # a schedule
        ("ppo", MASKED, {"discrete": 3}, {}),
        pytest.param("ppo", BOX, SEVERAL, {}, marks=pytest.mark.slow),
    ],
)
def test_actions_are_drawn_from_the_policy_with_its_probabilities(algo, observation, action, more):
    both = BothPolicies(algo, observation, action, **more)
    both.refresh()
    rng, count = np.random.default_rng(1), 64
    obs = rng.normal(size=(count, 3)).astype(np.float32)
    leaves = {"": obs}
    if observation is MASKED:
        mask = np.array([[1, 0, 1]] * count, np.int8)
        leaves = obs = {"action_mask": mask, "x": obs[:, :2]}
    if algo != "td3":  # its noise is clipped
        both.compared(leaves, obs)
        both.publish(1)
        both.refresh()  # other weights, the same program
        drawn, _ = both.compared(leaves, obs)
        assert both.here.version == 1
        assert observation is not MASKED or not (drawn[""] == 1).any()
    if observation is BOX and action is not SEVERAL and algo in ("ppo", "td3"):
        same_distribution(both, np.array([[0.3, -1.0, 0.5]], np.float32), 20_000)


def same_distribution(both, one, count):
    drawn, _, log_prob, _ = both.here.act(list(map(str, range(count))), {"": np.repeat(one, count, 0)})
    dist, _ = both.algo.choice(both.actor, one, both.algo.carry(1), True)
    if hasattr(dist, "logits"):
        share = np.bincount(drawn[""], minlength=3) / count
        np.testing.assert_allclose(share, jax.nn.softmax(dist.logits)[0], atol=0.015)
        return
    deviation = np.exp(np.broadcast_to(dist.log_std, dist.mean.shape))[0]
    tolerance = 4 * deviation.max() / np.sqrt(count)
    np.testing.assert_allclose(drawn[""].mean(0), dist.mean[0], atol=tolerance)
    np.testing.assert_allclose(drawn[""].std(0), deviation, atol=tolerance)
    np.testing.assert_allclose(log_prob.mean(), -(np.log(deviation) + 0.5 * np.log(2 * np.pi * np.e)).sum(), atol=0.05)


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


def test_invalid_steps_are_refused(run):
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    right = {"observations": [[[0.0] * 4]], "actions": [[1]], "log_probs": [[-0.7]], "versions": [[0]]}
    for fields, status, message in [
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
    ]:
        found, answer = asked(run.address, "POST", "/v1/played", {"episode_ids": [id], **right, **fields})
        assert (found, message in str(answer)) == (status, True), (fields, answer)
    assert asked(run.address, "POST", "/v1/played", {"episode_ids": [id], **right})[0] == 200
    ended = asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observation": [0.0] * 4})
    assert (ended[0], ended[1]["length"]) == (200, 1)


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
    with pytest.raises(RequestRefused, match=r"observation: expected float32 \[4\], got \[3\]"):
        client.steps(ids, np.zeros((4, 3)))

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
    client._local.send(tuple(ids))
    for id in ids:
        asked(alone.address, "POST", f"/v1/episodes/{id}/end", {"observation": [0.0] * 4}, **client._headers)
    client.close()


ALONE = """
import sys, numpy as np
from client import PolicyClient
client = PolicyClient(sys.argv[1], patience_s=0.0, inference_mode="local", seed=0)
episode = client.start_episode(training_enabled=False)
for _ in range(20):
    assert client.get_action(episode, np.zeros(4)) in (0, 1)
    client.log_returns(episode, 2.0)
assert client.end_episode(episode, np.zeros(4)) == {"return": 40.0, "length": 20.0}
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "jrl", "numpy"}))
"""


def test_copied_files_have_local_inference(run, tmp_path):
    (tmp_path / "client.py").write_text(Path(client_module.__file__).read_text())
    command, environment = [sys.executable, "-c", ALONE, run.address], {**os.environ, "PYTHONPATH": ""}
    play = lambda: subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "needs jrl/export/interpreter.py: copy it there" in play().stderr
    (tmp_path / "interpreter.py").write_text(Path(interpreter.__file__).read_text())
    played = play()
    assert (played.returncode, played.stdout) == (0, "['numpy']\n"), played.stderr
    client = PolicyClient("http://127.0.0.1:1", patience_s=0.0)  # no server
    client.version = 3
    assert client.update_policy_weights() == 3  # remote inference fetches no weights
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
