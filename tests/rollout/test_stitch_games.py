"""Callbacks in runs with several agents: an episode is a game, and each agent has its own in it."""

from typing import ClassVar

import numpy as np
import pytest
from counting_envs import Turns

from jrl import config
from jrl.callbacks import Callbacks
from jrl.errors import InputError
from jrl.run.session import Session

AGENTS = ("steady", "late", "guest", "waiting")
SCRIPT = ("xxxxxE", "..xxxE", "xE.xE.", "wxwxwE")  # of late_arrivals: x acts, E ends, w waits
TABLE = {"late|guest": "b", ".*": "a"}
SMALL = {
    "env": {"id": "late_arrivals:late_arrivals", "num_envs": 2},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
    "network": {"hidden": [8]},
    "rollout": {"length": 5},  # games go on from rollout to rollout
    "multi_agent": {"mapping": TABLE},
    "run": {"compile_cache": False, "log": []},
}


SEEN = {"obs": np.zeros((2, 2), np.float32), "action_mask": np.ones((2, 3), np.int8)}


class Script(Callbacks):
    """Checks each moment of late_arrivals against its script; of what was acted it knows what agents were paid."""

    games: ClassVar = []
    told: ClassVar = []
    policies: ClassVar = []

    def on_create_policy(self, *, policy_id, policy, **kwargs):
        Script.policies.append((policy_id, policy))

    def on_episode_created(self, *, episode, env_index, **kwargs):
        assert episode.get_agents() == [] and episode.length == 0 and env_index == episode.env_index
        Script.told.append("created")

    def on_episode_start(self, *, episode, **kwargs):
        assert episode.agent_ids == ("steady", "guest", "waiting") and episode.get_return() == 0
        assert episode.last_action_for("steady") is None
        assert episode.last_observation_for("guest")["obs"].tolist() == [0.0, 2.0]
        episode.user_data["paid"] = dict.fromkeys(AGENTS, 0.0)
        Script.told.append("start")

    def on_episode_step(self, *, episode, **kwargs):
        t, paid = episode.length - 1, episode.user_data["paid"]
        for k, (agent, line) in enumerate(zip(AGENTS, SCRIPT, strict=True)):
            if line[t] == ".":
                continue
            action = int(episode.last_action_for(agent))
            expected = 10.0 * t + (0 if line[t] == "w" else action)
            assert episode.last_reward_for(agent) == expected
            assert episode.last_observation_for(agent)["obs"].tolist() == [t + 1.0, float(k)]
            assert episode.agent_episodes[agent].is_done == (line[t] == "E")
            paid[agent] += expected
        here = {agent for agent, line in zip(AGENTS, SCRIPT, strict=True) if set(line[: t + 1]) & set("xEw")}
        assert set(episode.agent_ids) == here
        follows = {agent: "b" if agent in ("late", "guest") else "a" for agent in AGENTS}
        assert episode.agent_rewards == {(agent, follows[agent]): paid[agent] for agent in AGENTS if agent in here}
        assert episode.get_return() == pytest.approx(sum(paid.values()))
        assert episode.policy_for("late") == episode.module_for("guest") == "b"
        Script.told.append("step")

    def on_episode_end(self, *, episode, **kwargs):
        assert episode.is_done and episode.terminated and len(episode) == 6
        of_guest = episode.agent_episodes["guest"]  # its second life, which ended a step before the game
        assert of_guest.length == len(of_guest.actions) == 2 and of_guest.is_done
        assert of_guest.obs["obs"][:, 0].tolist() == [3.0, 4.0, 5.0]
        assert episode.get_rewards(-1)["guest"] == of_guest.last_reward
        assert len(episode.get_observations()["steady"]["obs"]) == 7 == len(episode.get_actions()["steady"]) + 1
        episode.custom_metrics["guest"] = episode.agent_rewards["guest", "b"]
        where = (episode.in_evaluation, episode.env_index, episode.episode_id)
        Script.games.append((*where, episode.get_return(), dict(episode.agent_rewards)))
        Script.told.append("end")


class Ends(Callbacks):
    """Looks at ends alone, of a history of one step."""

    history = 1
    found: ClassVar = []

    def on_episode_end(self, *, episode, **kwargs):
        waits = episode.agent_episodes["waiting"]
        Ends.found.append((episode.length, episode.get_return(), len(waits.actions), waits.length))


@pytest.fixture(autouse=True)
def nothing_seen():
    for seen in (Script.games, Script.told, Script.policies, Ends.found, Infos.found):
        seen.clear()


def played(calls, name="Script", **sections):
    """The result row after so many rollouts."""
    data = config.merge(SMALL, {"custom": {"callbacks": [f"{__name__}:{name}"]}, **sections})
    with Session(config.from_dict(data), endless=True) as session:
        session.start()
        for _ in range(calls):
            session.reporter.add(session.advance())
        session.reporter.flush()
        return session.reporter.row


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {"rollout": {"count_steps_by": "agent_steps", "batch_mode": "complete_episodes"}}, marks=pytest.mark.slow
        ),
    ],
)
def test_games_are_told_as_their_script_says(more):
    row = played(6, **more)
    # thirty rows of two environments are four games each, of six rows and the one that resets, and two rows more
    assert sorted(where[:2] for where in Script.games) == [(False, 0)] * 4 + [(False, 1)] * 4
    assert [number for _, _, number, *_ in Script.games] == list(range(8))
    assert [name for name, _ in Script.policies] == ["a", "b"]
    one = ["created", "start", "step"]
    assert Script.told[:6] == one * 2 and Script.told.count("step") == 2 * (4 * 6 + 2)
    assert Script.told[-8:] == one * 2 + ["step"] * 2 and Script.told.count("start") == 10
    returns = [total for *_, total, _ in Script.games]
    assert row["episode/return"] == pytest.approx(np.mean(returns), rel=1e-6)
    guests = [rewards["guest", "b"] for *_, rewards in Script.games]
    assert row["custom/guest_mean"] == pytest.approx(np.mean(guests)) and row["custom/guest_max"] == max(guests)


def test_ends_alone_are_the_same_games():
    row = played(6, "Ends")
    assert len(Ends.found) == 8 and {(n, kept, steps) for n, _, kept, steps in Ends.found} == {(6, 1, 6)}
    assert row["episode/return"] == pytest.approx(np.mean([total for _, total, *_ in Ends.found]), rel=1e-6)


@pytest.mark.slow
def test_each_policy_is_told_of_once_and_evaluations_tell_of_games():
    from jrl.api import PPOConfig

    class Evaluated(Script):
        pass

    how = PPOConfig().environment("late_arrivals:late_arrivals")
    how = how.training(num_epochs=1, minibatch_size=8, train_batch_size=32)
    how = how.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, *_, **__: follows(agent))
    algo = how.evaluation(evaluation_duration=3).callbacks(Evaluated).build()
    assert [name for name, _ in Script.policies] == ["a", "b"]
    assert [policy.compute_actions(SEEN, explore=False).shape for _, policy in Script.policies] == [(2,)] * 2
    for _ in range(2):
        found = algo.evaluate()["env_runners"]
    algo.stop()
    games = [game for game in Script.games if game[0]]
    assert len(games) == 6
    assert found["episode_return_mean"] == pytest.approx(np.mean([total for *_, total, _ in games[3:]]), rel=1e-5)


def follows(agent):
    return "b" if agent in ("late", "guest") else "a"


class Infos(Callbacks):
    found: ClassVar = []

    def on_episode_end(self, *, episode, **kwargs):
        infos = {agent: episode.last_info_for(agent) for agent in episode.get_agents()}
        Infos.found.append((episode.env_index, len(episode), episode.agent_rewards, infos))


@pytest.mark.slow
def test_infos_of_agents_who_take_turns_and_a_game_that_broke_off():
    Turns.fails[:] = ["once"]
    runners = {"restart_failed_sub_environments": True}
    env = {"env": {"id": "counting_envs:Turns", "num_envs": 1}, "multi_agent": {"mapping": "shared"}}
    played(4, "Infos", **env, env_runners=runners)
    assert Turns.fails == []
    # of twenty rows the first three are those of the game that broke, told of by nobody; games have four, and a reset
    expected = (0, 4, {("a", "shared"): 2.0, ("b", "shared"): 2.0})
    assert [found[:3] for found in Infos.found] == [expected] * 3
    assert [found[3] for found in Infos.found] == [{"a": {"turn": 3}, "b": {"turn": 4}}] * 3  # after its own steps


@pytest.mark.slow
def test_games_that_do_not_wait_are_told_with_the_infos_of_their_agents():
    ready = {"id": "counting_envs:Turns", "remote_worker_envs": True, "batch_wait_ms": 0.0}
    played(4, "Infos", env=ready, multi_agent={"mapping": "shared"})
    # of twenty rows of each game every fifth resets it
    rewards, infos = {("a", "shared"): 2.0, ("b", "shared"): 2.0}, {"a": {"turn": 3}, "b": {"turn": 4}}
    assert sorted(found[0] for found in Infos.found) == [0] * 4 + [1] * 4
    assert all(found[1:] == (4, rewards, infos) for found in Infos.found)


def test_what_an_episode_of_several_agents_does_not_have():
    class Asks(Callbacks):
        def on_episode_end(self, *, episode, **kwargs):
            with pytest.raises(AttributeError, match=r"no last_obs: use episode\.agent_episodes\[agent\]"):
                _ = episode.last_obs
            with pytest.raises(KeyError, match="agent_id: expected an agent of this episode"):
                episode.last_action_for("none")
            Ends.found.append(episode.episode_id)

    globals()["Asks"] = Asks
    played(2, "Asks")
    assert Ends.found == [0, 1]


def test_env_runners_with_whole_episodes_tell_of_no_games():
    how = {"rollout": {"batch_mode": "complete_episodes"}, "env_runners": {"num": 1}}
    with pytest.raises(InputError, match=r"custom\.callbacks: env runners send whole episodes of each agent"):
        played(1, **how)
