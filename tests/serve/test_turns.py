"""Episodes of several agents: what the learner gets is a plain record of what they did, each by its own turns."""

import threading

import jax
import numpy as np
import pytest
import serving

from jrl.run import build, build_policies
from jrl.serve.client import EpisodeLost, PolicyClient
from jrl.serve.clients import Clients
from jrl.types import LEADS

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
    """What an agent did: (observation, action, reward until its next action, terminated, truncated) of each step."""

    def __init__(self):
        self.steps = {}

    def acted(self, game, agent, obs, action):
        self.steps.setdefault((game, agent), []).append([obs, action, 0.0, False, False])

    def last(self, game, agent):
        return self.steps[game, agent][-1]


def play(client, rng, record, games, *, observed, cut, tell=None):
    """Plays games of random turns, agents that end early, and rewards for those that wait, too.

    Args:
      observed: (agent, number) -> observation.
      cut: whether a game may be truncated.
      tell: called with the return and length of each game.
    """
    for game in range(games):
        id, left, acted, total, turns = client.start_episode(), ["a", "b", "c"], set(), 0.0, 0
        for number in range(1, int(rng.integers(2, 10))):
            acting = [agent for agent in left if rng.random() < 0.6] or left[:1]
            seen = {agent: observed(agent, 100 * game + number) for agent in acting}
            if len(acting) == 1 and rng.random() < 0.5:
                actions = {acting[0]: client.get_action(id, seen[acting[0]], agent=acting[0])}
            else:
                actions = client.get_action(id, seen)
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
                truncated = cut and rng.random() < 0.5
                client.end_agent(id, agent, observed(agent, -1), truncated)
                if agent in acted:
                    record.last(game, agent)[3 + truncated] = True
        truncated = cut and rng.random() < 0.5
        last = {agent: observed(agent, -2) for agent in left} if truncated or rng.random() < 0.5 else None
        for agent in acted & set(left):
            record.last(game, agent)[3 + truncated] = True
        found = client.end_episode(id, last, truncated=truncated)
        assert found["return"] == total
        assert found["length"] == turns
        assert found["return"] == pytest.approx(sum(found["returns"].values()))
        if tell is not None:
            tell(found["return"], found["length"])


def seen_by(different):
    def observed(agent, number):
        if different and agent == "b":
            return {"x": np.array([number, 1], np.float32), "n": np.float32(2)}
        return np.array([number, "abc".index(agent), 0.5], np.float32)

    return observed


def rollouts(cfg, clients, count, interrupted):
    run = build.run(cfg, external=clients.source(cfg, 0, interrupted))
    state, found = run.program.init(cfg.run.seed), []
    for i in range(count):
        _, rollout, report = run.program.collect(state, cfg.run.seed, i)
        found.append(jax.device_get((rollout, report)))
    run.program.close()
    return found


POLICIES = {
    "one policy": (ALIKE, {}),
    "a policy each": (ALIKE, {"mapping": "by_agent"}),
    "two policies": (
        ALIKE,
        {"policies": {"x": {}, "y": {"network": {"hidden": [4]}}}, "mapping": {"b": "y", ".*": "x"}},
    ),
    "different spaces": (DIFFERENT, {}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_rows_are_a_record_of_each_agents_turns(name):
    external, several = POLICIES[name]
    algo = "ppo" if name == "different spaces" else "dqn"
    cfg = settings(algo, external, multi_agent=several, run={"seed": 2})
    cfg = build_policies.resolved(cfg)
    clients, record, told = Clients(), Record(), []
    wrong = []  # what ended the player ends the run, too

    def go():
        serving.listening(clients.address)
        client = PolicyClient(clients.address, patience_s=0.0)
        rng = np.random.default_rng(0)
        observed = seen_by(name == "different spaces")
        try:
            play(client, rng, record, 1000, observed=observed, cut=True, tell=lambda *x: told.append(x))
        except (ConnectionError, EpisodeLost):
            pass  # the learner has what it needs, and is gone
        except Exception as e:
            wrong.append(e)
            raise
        finally:
            client.close()

    with clients.open(cfg):
        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        found = rollouts(cfg, clients, 14, wrong)
        thread.join(10)
    assert wrong == []
    checked = 0
    for k, agent in enumerate("abc"):
        plain = [step for (_, who), steps in sorted(record.steps.items()) if who == agent for step in steps]
        rows = [row for rollout, _ in found for column in (k, 3 + k) for row in rows_of(rollout, column, agent, cfg)]
        begun = {float(np.ravel(first(step[0]))[0]): step for step in plain}
        assert len(rows) == len({row[0] for row in rows}) > 20  # none twice
        numbers = [row[0] for row in rows]
        order = [number for number in begun if number in set(numbers)]
        assert sorted(numbers) == sorted(order)
        if algo == "dqn":  # none is dropped
            assert sorted(begun)[: len(numbers)] == sorted(numbers)
        for number, action, reward, terminated, truncated in rows:
            step = begun[number]
            env_action = np.clip(2 * action, -2, 2) if np.ndim(action) else action  # as the box of `DIFFERENT` has it
            np.testing.assert_allclose(env_action, step[1], rtol=1e-5, atol=1e-5)
            # where padding follows, the learner bootstraps from the observation behind the row
            assert (reward, terminated, truncated) == (step[2], step[3], None if truncated is None else step[4])
            checked += 1
    assert checked > 100
    games = sum(int(report.count) for _, report in found)
    assert games > 5
    lengths = [x for _, report in found[-1:] for x in report.window_length if np.isfinite(x)]
    returns = [x for _, report in found[-1:] for x in report.window_return if np.isfinite(x)]
    assert sorted(zip(returns, lengths, strict=True)) == sorted((float(r), float(n)) for r, n in told[:games])
    leads = [rollout.extras[LEADS] & rollout.mask for rollout, _ in found]
    steps = sum(int(report.steps) for _, report in found)
    assert sum(map(np.sum, leads)) >= steps > 0
    if name == "one policy":
        assert sum(map(np.sum, leads)) == steps
    agents = sum(np.asarray(report.agents.steps) for _, report in found)
    assert agents.sum() == checked


def first(obs):
    return obs["x"] if isinstance(obs, dict) else obs


def rows_of(rollout, column, agent, cfg):
    """(number, action, reward, terminated, truncated) of the steps of a column."""
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
