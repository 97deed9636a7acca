"""Episodes of several agents: the learner gets each agent's steps, by its own turns."""

import collections
import random
import threading

import jax
import jsonschema
import numpy as np
import pytest
import serving
from serving import asked

from jrl import data
from jrl.callbacks import CallbackList, Callbacks
from jrl.run import build, data_output
from jrl.run.preflight import resolved
from jrl.serve.client import EpisodeLost, PolicyClient, RequestRefused
from jrl.serve.clients import Clients
from jrl.types import COUNTS_STEP

ALIKE = {"agents": ["a", "b", "c"], "observation": {"box": [3]}, "action": {"discrete": 4}}
DIFFERENT = {
    "agents": ["a", "b", "c"],
    "observation": {"a": {"box": [3]}, "b": {"dict": {"x": {"box": [2]}, "n": {"box": []}}}, "c": {"box": [3]}},
    "action": {"a": {"discrete": 4}, "b": {"box": [2], "low": -2, "high": 2}, "c": {"discrete": 4}},
}
REPLAY = {"capacity": 4096, "learning_starts": 100_000, "train_every": 16, "batch_size": 8}


def settings(algo, external, **sections):
    own = {"replay": REPLAY} if algo == "dqn" else {}
    return serving.settings(algo, external=external, **{**own, **sections})


class Record:
    """Steps of an agent: (observation, action, reward until its next action, terminated, truncated)."""

    def __init__(self):
        self.steps = {}

    def acted(self, game, agent, obs, action):
        self.steps.setdefault((game, agent), []).append([obs, action, 0.0, False, False])

    def last(self, game, agent):
        return self.steps[game, agent][-1]


def play(client, rng, record, games, *, observed, own, tell):
    """Plays games with random turns, early ends of agents, and rewards between turns.

    Args:
      observed: (agent, number) -> observation.
      own: whether the client chooses some actions itself.
      tell: called with the return and length of each game.
    """
    for game in range(games):
        id, left, acted, total, turns = client.start_episode(), ["a", "b", "c"], set(), 0.0, 0
        for number in range(1, int(rng.integers(2, 10))):
            acting = [agent for agent in left if rng.random() < 0.6] or left[:1]
            seen = {agent: observed(agent, 100 * game + number) for agent in acting}
            if own and len(acting) == 1 and rng.random() < 0.5:
                actions = {acting[0]: 3}
                client.log_action(id, seen, actions, log_prob={acting[0]: -0.5} if number % 2 else None)
            elif len(acting) == 1 and rng.random() < 0.5:
                actions = {acting[0]: client.get_action(id, seen[acting[0]], agent=acting[0])}
            elif rng.random() < 0.5:
                actions = client.get_action(id, seen)
            else:
                actions = client.turns({id: seen})[id]
            assert set(actions) == set(acting)
            turns += 1
            for agent, action in actions.items():
                record.acted(game, agent, seen[agent], action)
            acted |= set(acting)
            rewards = {agent: float(rng.integers(-3, 4)) for agent in acted & set(left) if rng.random() < 0.7}
            client.log_returns(id, rewards)
            for agent, reward in rewards.items():
                record.last(game, agent)[2] += reward
                total += reward
            if len(left) > 1 and rng.random() < 0.2:
                agent = left.pop(int(rng.integers(len(left))))
                truncated = rng.random() < 0.5
                client.end_agent(id, agent, observed(agent, -1), truncated)
                if agent in acted:
                    record.last(game, agent)[3 + truncated] = True
        truncated = rng.random() < 0.5
        last = {agent: observed(agent, -2) for agent in left} if truncated or rng.random() < 0.5 else None
        for agent in acted & set(left):
            record.last(game, agent)[3 + truncated] = True
        found = client.end_episode(id, last, truncated=truncated)
        assert found["return"] == total
        assert found["length"] == turns
        assert found["return"] == pytest.approx(sum(found["returns"].values()))
        tell(found["return"], found["length"])


def seen_by(different):
    def observed(agent, number):
        if different and agent == "b":
            return {"x": np.array([number, 1], np.float32), "n": np.float32(2)}
        return np.array([number, "abc".index(agent), 0.5], np.float32)

    return observed


class Ended(Callbacks):
    """Records the ended episodes of agents."""

    def __init__(self):
        self.found = []

    def on_episode_end(self, *, episode, **kwargs):
        self.found.append((episode.agent_id, episode.policy_id, episode.env_index, tuple(episode.rewards.tolist())))


def rollouts(cfg, clients, count, interrupted, directory, seen):
    """Returns rollouts and their reports, and the directories of their data sets."""
    run = build.run(cfg, external=clients.source(cfg, 0, interrupted), callback_list=CallbackList(seen))
    run.recorder.begin(directory, 0)
    state, found = run.program.init(cfg.run.seed), []
    for i in range(count):
        _, rollout, report = run.program.collect(state, cfg.run.seed, i)
        found.append(jax.device_get((rollout, report)))
    run.program.close()
    run.recorder.close()
    return found, data_output.list_directories(directory / "data", run.recorder._spec)


def written(directories):
    """Returns (agent, number) -> (action, reward, terminated, truncated) of each step in data sets."""
    found = {}
    for episode in (episode for one in directories for episode in data.read(one).episodes()):
        last, numbers = len(episode.reward) - 1, first(episode.obs)[:-1, 0]
        for t, number in enumerate(numbers):
            ends = (episode.terminated, episode.truncated) if t == last else (False, False)
            key = (episode.labels["agent"], float(number))
            assert key not in found  # no step twice
            found[key] = (episode.action[t], float(episode.reward[t]), *ends)
    return found


POLICIES = {
    "one policy": (ALIKE, {}),
    "a policy each": (ALIKE, {"mapping": "by_agent"}),
    "different spaces": (DIFFERENT, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "a policy each" else [pytest.mark.slow]) for name in POLICIES]
)
def test_rows_are_the_steps_of_each_agents_turns(name, tmp_path):
    external, several = POLICIES[name]
    algo = "ppo" if name == "different spaces" else "dqn"
    cfg = settings(algo, external, multi_agent=several, run={"seed": 2}, data={"output": {}})
    cfg, seen = resolved(cfg), Ended()
    clients, record, message = Clients(), Record(), []
    wrong = []  # an exception in the player ends the run, too

    def go():
        serving.listening(clients.address)
        client = PolicyClient(clients.address, patience_s=0.0)
        rng = np.random.default_rng(0)
        observed = seen_by(name == "different spaces")
        try:
            play(client, rng, record, 1000, observed=observed, own=algo == "dqn", tell=lambda *x: message.append(x))
        except (ConnectionError, EpisodeLost):
            pass  # the run has ended
        except Exception as e:
            wrong.append(e)
            raise
        finally:
            client.close()

    with clients.open(cfg.external):
        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        found, directories = rollouts(cfg, clients, 14, wrong, tmp_path, seen)
        thread.join(10)
    assert wrong == []
    whole = [e for one in directories for e in data.read(one).episodes() if e.terminated or e.truncated]
    labels = lambda e: (str(e.labels["agent"]), str(e.labels["policy"]), int(e.labels["env"]))
    expected = collections.Counter((*labels(e), tuple(e.reward.tolist())) for e in whole)
    if algo == "dqn":
        assert collections.Counter(seen.found) == expected
    else:  # callbacks get no episodes with dropped steps
        assert not collections.Counter(seen.found) - expected
    assert len(seen.found) > 5
    checked, kept = 0, written(directories)
    for k, agent in enumerate("abc"):
        plain = [step for (_, who), steps in sorted(record.steps.items()) if who == agent for step in steps]
        rows = [row for rollout, _ in found for column in (k, 3 + k) for row in rows_of(rollout, column, agent, cfg)]
        begun = {float(np.ravel(first(step[0]))[0]): step for step in plain}
        assert len(rows) == len({row[0] for row in rows}) > 20  # no row twice
        numbers = [row[0] for row in rows]
        order = [number for number in begun if number in set(numbers)]
        assert sorted(numbers) == sorted(order)
        if algo == "dqn":  # no row is dropped
            assert sorted(begun)[: len(numbers)] == sorted(numbers)
        for number, action, reward, terminated, truncated in rows:
            step = begun[number]
            env_action = np.clip(2 * action, -2, 2) if np.ndim(action) else action  # in the Box of `DIFFERENT`
            np.testing.assert_allclose(env_action, step[1], rtol=1e-5, atol=1e-5)
            # before padding, the learner bootstraps from the next observation
            assert (reward, terminated, truncated) == (step[2], step[3], None if truncated is None else step[4])
            its = kept.pop((agent, number))
            np.testing.assert_array_equal(its[0], action)
            assert its[1:3] == (reward, terminated)
            assert truncated is None or its[3] == truncated
            checked += 1
    assert checked > 100
    assert kept == {}
    games = sum(int(report.count) for _, report in found)
    assert games > 5
    lengths = [x for _, report in found[-1:] for x in report.window_length if np.isfinite(x)]
    returns = [x for _, report in found[-1:] for x in report.window_return if np.isfinite(x)]
    latest = message[:games][-len(returns) :]  # episodes in the window of latest episodes
    assert sorted(zip(returns, lengths, strict=True)) == sorted((float(r), float(n)) for r, n in latest)
    leads = [rollout.extras[COUNTS_STEP] & rollout.mask for rollout, _ in found]
    steps = sum(int(report.steps) for _, report in found)
    assert sum(map(np.sum, leads)) >= steps > 0
    if name == "one policy":
        assert sum(map(np.sum, leads)) == steps
    agents = sum(np.asarray(report.agents.steps) for _, report in found)
    assert agents.sum() == checked


def first(obs):
    return obs["x"] if isinstance(obs, dict) else obs


def rows_of(rollout, column, agent, cfg):
    """Returns (number, action, reward, terminated, truncated) of the steps of a column."""
    obs, action, own = rollout.obs, rollout.action, column
    if isinstance(obs, tuple):  # kinds: a and c, b
        kind = int(agent == "b")
        obs, action, own = obs[kind], action[kind], {0: 0, 2: 1, 3: 2, 5: 3, 1: 0, 4: 1}[column]
    padded = rollout.count[column] - 1 if rollout.count[column] < len(rollout.mask) else None
    for t in np.flatnonzero(rollout.mask[:, column]):
        yield (
            float(first(obs)[t, own, 0]),
            action[t, own],
            float(rollout.reward[t, column]),
            bool(rollout.terminated[t, column]),
            None if not rollout.terminated[t, column] and t == padded else bool(rollout.truncated[t, column]),
        )


# ---------------------------------------------------------------- refused, repeated and lost requests

OBS = [0.1, 0.2, 0.3]


@pytest.fixture(scope="module")
def run():
    external = {**ALIKE, "timeout_s": 0.5, "max_clients": 8}
    cfg = settings("ppo", external, multi_agent={"mapping": "by_agent"}, env={"num_envs": 3})  # one program with below
    with serving.running(cfg) as found:
        yield found


def turn(run, id, body):
    return asked(run.address, "POST", f"/v1/episodes/{id}/turn", body)


WRONG = [
    ("turn", {}, 400, "observations is missing"),
    ("turn", {"observations": {"a": OBS}, "typo": 1}, 400, "unknown field"),
    ("turn", {"observations": OBS}, 422, "observations: expected a mapping"),
    ("turn", {"observations": {"d": OBS}}, 422, "no agent 'd': expected a, b, c"),
    ("turn", {"observations": {"a": OBS[:2]}}, 422, "observations/a: expected float32 [3]"),
    ("turn", {"observations": {"c": OBS}}, 409, "observations/c: it has ended"),
    ("turn", {"observations": {"a": OBS}, "rewards": {"b": 1.0}}, 409, "rewards/b: it has no action yet"),
    ("turn", {"observations": {"a": OBS}, "rewards": {"a": "x"}}, 422, "rewards/a"),
    (
        "turn",
        {"observations": {"a": OBS}, "rewards": {"a": 3e38}},
        422,
        "rewards/a: expected float32 [] of numbers from",
    ),
    ("turn", {"observations": {"a": [0, 3e38, 0]}}, 422, "observations/a: expected float32 [3] of numbers from"),
    ("reward", {"rewards": {"a": -3e38}}, 422, "rewards/a: expected float32 [] of numbers from"),
    ("end", {"rewards": {"a": 3e38}}, 422, "rewards/a: expected float32 [] of numbers from"),
    ("turn", {"observations": {}, "truncated": {"a": True}}, 400, "observations/a is missing"),
    ("turn", {"observations": {}, "terminated": {"a": "yes"}}, 422, "terminated/a: expected a boolean"),
    ("turn", {"observations": {"a": OBS}, "actions": {"a": 1}}, 422, "its own policy"),
    ("turn", {"observations": {"a": OBS}, "actions": {"b": 1}}, 422, "actions/b: it is not among"),
    ("turn", {"observations": {"a": OBS}, "log_probs": {"a": -1.0}}, 422, "log_probs/a: it is not among the actions"),
    ("turn", {"observations": {"a": OBS}, "step": 9}, 409, "at step 2"),
    ("turn", {"observations": {"a": OBS}, "infos": {"a": {"x": 1.0}}}, 422, "infos/a: expected float32"),
    ("action", {"observation": OBS}, 422, "several agents"),
    ("log", {"observation": OBS, "action": 1}, 422, "several agents"),
    ("reward", {"reward": 1.0}, 400, "unknown field"),
    ("reward", {"rewards": {"b": 1.0}}, 409, "no action yet"),
    ("reward", {"rewards": {}, "infos": {"a": None}}, 422, "infos/a: expected float32"),
    ("end", {"infos": {"": 1.0}}, 422, "infos: expected names"),
    ("end", {"observation": OBS}, 400, "unknown field"),
    ("end", {"truncated": True}, 400, "observations/a is missing"),
    ("end", {"observations": {"d": OBS}}, 422, "observations: there is no agent 'd'"),
]


@pytest.fixture(scope="module")
def game(run):
    """An episode in which a has acted, b has not, and c has ended; a thread keeps it alive."""
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    assert set(turn(run, id, {"observations": {"a": OBS, "c": OBS}})[1]["actions"]) == {"a", "c"}
    assert turn(run, id, {"observations": {}, "terminated": {"c": True}})[1]["actions"] == {}
    stop = threading.Event()

    def speak():
        while not stop.wait(0.1):
            asked(run.address, "POST", f"/v1/episodes/{id}/reward", {"rewards": {}})

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    yield id
    stop.set()
    thread.join(5)
    assert asked(run.address, "POST", f"/v1/episodes/{id}/end", {"observations": {"c": OBS}})[0] == 200  # c: ignored


def test_an_invalid_turn_has_one_clear_error(run, game):
    for what, body, status, message in WRONG:
        found = asked(run.address, "POST", f"/v1/episodes/{game}/{what}", body)
        assert (found[0], message in found[1]["error"]) == (status, True), (what, body, found)


def test_the_sum_of_rewards_between_turns_is_limited(run):
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    assert turn(run, id, {"observations": {"a": OBS, "b": OBS}})[0] == 200
    assert turn(run, id, {"observations": {"b": OBS}, "rewards": {"a": 6e8}})[0] == 200
    for path, more in (("turn", {"observations": {"b": OBS}}), ("reward", {}), ("end", {})):
        status, found = asked(run.address, "POST", f"/v1/episodes/{id}/{path}", {"rewards": {"a": 6e8}, **more})
        assert (status, "rewards/a: expected a sum of at most 1e+09" in found["error"]) == (422, True)
    both = {"turns": {id: {"observations": {"b": OBS}, "rewards": {"a": 6e8}}}}
    assert asked(run.address, "POST", "/v1/turns", both)[0] == 422
    assert asked(run.address, "POST", f"/v1/episodes/{id}/end", {})[1]["returns"] == {"a": 6e8, "b": 0.0, "c": 0.0}


def test_requests_for_single_agents_are_refused(run, game):
    for path, body in (
        ("/v1/steps", {"episode_ids": [game], "observations": [OBS]}),
        ("/v1/action", {"observation": OBS}),
    ):
        status, found = asked(run.address, "POST", path, body)
        assert (status, "several agents" in found["error"]) == (422, True), found
    for path in ("/v1/program", "/v1/weights"):
        status, found = asked(run.address, "GET", path)
        assert (status, "inference_mode: remote" in found["error"]) == (422, True), found
    message = asked(run.address, "GET", "/v1/policies")[1]["policies"]["default"]
    assert list(message["agents"]) == ["a", "b", "c"]
    under_way = lambda: asked(run.address, "GET", "/v1/health")[1]["episodes"]
    client, before = PolicyClient(run.address, inference_mode="local"), under_way()
    for begin in (client.start_episode, lambda: client.start_episodes(1)):
        with pytest.raises(RequestRefused, match=r"several agents: let the server act \(inference_mode: remote\)"):
            begin()
    assert under_way() == before  # no episode was added
    client.close()


def test_a_repeated_turn_counts_once(run):
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    body = {"observations": {"a": OBS, "b": OBS}, "step": 0}
    first = turn(run, id, body)
    assert first[0] == 200
    assert turn(run, id, body) == first
    body = {"observations": {"a": OBS}, "rewards": {"a": 2.0, "b": 1.0}, "step": 1}
    assert turn(run, id, body) == turn(run, id, body)
    message = asked(run.address, "POST", f"/v1/episodes/{id}/reward", {"rewards": {"b": 1.5}})[1]
    assert message == {"rewards": {"b": 2.5}}
    end = asked(run.address, "POST", f"/v1/episodes/{id}/end", {"rewards": {"a": 1.0}, "step": 2})
    assert end == (200, {"return": 5.5, "length": 2, "returns": {"a": 3.0, "b": 2.5, "c": 0.0}})
    assert asked(run.address, "POST", f"/v1/episodes/{id}/end", {"rewards": {"a": 1.0}, "step": 2}) == end


def test_turns_of_many_episodes_equal_single_turns():
    cfg = settings("ppo", ALIKE, multi_agent={"mapping": "by_agent"}, env={"num_envs": 3})
    with serving.running(cfg) as found:
        client, of = PolicyClient(found.address), lambda agents: {agent: np.array(OBS, np.float32) for agent in agents}
        ids = client.start_episodes(3)
        acting = dict(zip(ids, ("abc", "a", "bc"), strict=True))
        for number in range(4):
            for id in ids if number else ():
                client.log_returns(id, {agent: 1.0 + ids.index(id) for agent in acting[id]}, info={f"a/{id[:3]}": 1})
            if number == 2:
                client.end_agent(ids[0], "b", np.array(OBS, np.float32))
                acting[ids[0]] = "ac"
            actions = client.turns({id: of(agents) for id, agents in acting.items()})
            assert {id: "".join(sorted(one)) for id, one in actions.items()} == acting
        wrong = {"turns": {ids[1]: {"observations": {"a": OBS}}, ids[2]: {"observations": {"z": OBS}}}}
        message = asked(found.address, "POST", "/v1/turns", wrong, **client._headers)
        assert message[0] == 422 and message[1]["error"].startswith(
            f"turns/{ids[2]}: observations: there is no agent 'z'"
        )
        ends = [client.end_episode(id) for id in ids]
        assert [end["length"] for end in ends] == [4, 4, 4]  # the refused request does not count
        earned = [[end["returns"][agent] for agent in "abc"] for end in ends]
        assert earned == [[3.0, 2.0, 3.0], [6.0, 0.0, 0.0], [0.0, 9.0, 9.0]]
        for turns in (None, {}, [1], {"x": 3}, {"nobody": {"observations": {}}}):
            body = {"turns": turns}
            assert 400 <= asked(found.address, "POST", "/v1/turns", body)[0] < 500
        client.close()


def test_a_client_that_disconnects_leaves_one_failed_episode(run):
    before, failures = counted(run, "episodes_failed_total"), _rows(run).failures
    id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
    assert turn(run, id, {"observations": {"a": OBS, "b": OBS}})[0] == 200
    serving.until(lambda: counted(run, "episodes_failed_total") == before + 1)
    status, found = turn(run, id, {"observations": {"a": OBS}})
    assert (status, "has failed" in found["error"]) == (410, True)
    for _ in range(3):  # its column is free again
        other = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
        assert turn(run, other, {"observations": {"a": OBS}})[0] == 200
        assert asked(run.address, "POST", f"/v1/episodes/{other}/end", {})[0] == 200
    assert _rows(run).failures == failures + 1  # once for the episode, not for each agent


def _rows(run):
    return run.source._parts[0]._rings


def counted(run, name):
    """Returns a number of /metrics."""
    lines = asked(run.address, "GET", "/metrics")[1].decode().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"jrl_{name} ")))


def test_the_openapi_document_of_several_agents(run):
    document = asked(run.address, "GET", "/openapi.json")[1]
    body = lambda path: document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = lambda schema: {**schema, "components": document["components"]}
    right = {"observations": {"a": OBS}, "rewards": {"a": 1.0}, "terminated": {"b": True}, "step": 0}
    jsonschema.validate(right, whole(body("/v1/episodes/{id}/turn")))
    own = {"actions": {"a": 1}, "log_probs": {"a": -0.7}}
    jsonschema.validate(right | own, whole(body("/v1/episodes/{id}/turn")))
    jsonschema.validate({"turns": {"x": right | own}}, whole(body("/v1/turns")))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"observations": {"d": OBS}}, whole(body("/v1/episodes/{id}/turn")))
    jsonschema.validate({"observations": {"a": OBS}, "truncated": True}, whole(body("/v1/episodes/{id}/end")))
    jsonschema.validate({"rewards": {"a": 1.0}}, whole(body("/v1/episodes/{id}/reward")))


def test_random_turns_never_fail_the_server(run):
    rng = random.Random(0)
    values = [None, True, 0, -1, 1e308, "x", [], OBS, {}, {"a": OBS}, {"b": OBS, "c": OBS}, {"a": 1.0}, {"a": True}]
    names = ["observations", "rewards", "terminated", "truncated", "actions", "step", "observation", "reward", "infos"]
    seen, id = set(), None
    for _ in range(600):
        if id is None:
            id = asked(run.address, "POST", "/v1/episodes", {})[1]["episode_id"]
        body = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(4))}
        if rng.random() < 0.4:
            body |= {"observations": {agent: OBS for agent in "abc" if rng.random() < 0.6}}
        what = rng.choice(["turn", "turn", "reward", "end"])
        status, _ = asked(run.address, "POST", f"/v1/episodes/{id}/{what}", body)
        assert status < 500, body
        seen.add(status)
        id = None if status == 410 else id
    assert {200, 400, 409, 410, 422} <= seen
    if id is not None:
        assert asked(run.address, "POST", f"/v1/episodes/{id}/end", {})[0] in (200, 410)
