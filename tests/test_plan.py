"""jrl.config.plan: derived numbers, and every combination with replay that cannot be run, by its message."""

import pytest

from jrl.config import Sizes, from_dict
from jrl.fields.schema import merge

BASE = {"algo": {"name": "sac"}, "env": {"id": "CartPole-v1", "num_envs": 8}, "stop": {"env_steps": 100_000}}


def made(**changes):
    return from_dict(merge(BASE, changes))


def test_a_replay_section_comes_with_the_algorithm():
    assert made().replay.capacity == 100_000
    assert made(algo={"name": "ppo"}).replay is None


@pytest.mark.parametrize(
    ("changes", "length", "expected"),
    [
        ({}, 1, (8, 256, 8, 12_500)),
        ({"replay": {"train_every": 32, "updates_per_step": 0.25, "batch_size": 128}}, 4, (32, 128, 8, 3125)),
        ({"rollout": {"length": 4}, "replay": {"updates_per_step": 0.25}}, 4, (32, 256, 8, 3125)),
        ({"rollout": {"length": 4}, "replay": {"train_every": 32}}, 4, (32, 256, 32, 3125)),
        ({"env": {"num_envs": 10}, "replay": {"updates_per_step": 0.1}}, 1, (10, 256, 1, 10_000)),
        ({"env": {"num_envs": 1}, "replay": {"updates_per_step": 20}}, 1, (1, 256, 20, 100_000)),
        ({"algo": {"name": "ppo"}}, 128, (1024, 256, 16, 98)),
    ],
)
def test_numbers_that_follow(changes, length, expected):
    cfg = made(**changes)
    sizes = Sizes(cfg)
    assert sizes.length == length
    assert (sizes.rows, sizes.minibatch, sizes.updates, sizes.iterations) == expected


def test_the_plan_of_several_agents_multiplies():
    ppo = {"algo": {"name": "ppo"}, "multi_agent": {"agents": ["a", "b", "c"]}}
    assert list(Sizes(from_dict(merge(BASE, ppo))).lines())[:2] == [
        "8 envs x 128 steps x 3 agents = 3,072 transitions per iteration",
        "4 epochs x 4 minibatches of each policy's transitions = 16 updates per iteration",
    ]


def test_one_of_each_is_no_plural():
    one = {"env": {"num_envs": 1}, "rollout": {"length": 1}, "stop": {"env_steps": 1}}
    replay = {"batch_size": 1, "learning_starts": 0}
    assert list(Sizes(made(**one, replay=replay)).lines()) == [
        "1 env x 1 step = 1 transition per iteration",
        "1 update per iteration on 1 transition from replay, once it holds 0 of at most 100,000",
        "1 iteration until stop.env_steps 1",
    ]
    one |= {"rollout": {"length": 4, "mode": "async"}, "env_runners": {"num": 1}}
    ppo = lambda n: {"algo": {"name": "ppo", "num_epochs": n, "num_minibatches": n}}
    found = list(Sizes(from_dict(merge(BASE, one | ppo(1)))).lines())
    assert found[1] == "1 env runner of 1 env" and "weights that are 2 updates old" in found[2]
    assert found[3] == "1 epoch x 1 minibatch of 4 transitions = 1 update per iteration"
    found = list(Sizes(from_dict(merge(BASE, ppo(4)))).lines())
    assert found[1] == "4 epochs x 4 minibatches of 256 transitions = 16 updates per iteration"


def test_the_mends_that_are_offered_can_be_run():
    for replay in (
        {"updates_per_step": 0.25},
        {"updates_per_step": 0.375},
        {"updates_per_step": 0.3, "train_every": 40},
    ):
        assert Sizes(made(replay=replay)).updates == round(replay["updates_per_step"] * replay.get("train_every", 8))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"replay": {"updates_per_step": 0.125}}, 125),  # 100_000 steps in 100 reports, 8 rows each
        ({"replay": {"updates_per_step": 4}}, 8),  # 32 updates an iteration
        ({"evaluation": {"every": 80}}, 10),
        ({"checkpoint": {"every": 40}}, 5),
        ({"run": {"report_every": 4}}, 1),
        ({"rollout": {"iterations_per_call": 3}}, 3),
        ({"algo": {"name": "ppo"}, "stop": {"env_steps": 10**9}}, 16),  # 1024 rows each
    ],
)
def test_a_call_is_no_longer_than_what_is_to_happen_between_two(changes, expected):
    assert Sizes(made(**changes)).iterations_per_call == expected


@pytest.mark.parametrize(("name", "warned"), [("pqn", True), ("a2c", True), ("ppo", False), ("impala", False)])
def test_what_does_not_correct_for_a_lag_is_told(name, warned):
    run = {"env": {"id": "CartPole-v1"}, "algo": {"name": name}, "stop": {"env_steps": 10_000}}
    told = lambda cfg: any(line.startswith("warning: ") and "rollout.mode sync" in line for line in Sizes(cfg).lines())
    assert told(from_dict({**run, "rollout": {"mode": "async"}})) == warned
    assert not told(from_dict(run))
