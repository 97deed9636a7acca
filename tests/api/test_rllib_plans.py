"""The same names of RLlib's, in the calls of a config, in a file and on the command line: one plan."""

import dataclasses

import pytest

from jrl import api, config
from jrl.api import DQNConfig, PPOConfig
from jrl.config import Sizes
from jrl.config import __main__ as command
from jrl.migrate import migrate

RUNNERS = {"num_env_runners", "num_envs_per_env_runner", "rollout_fragment_length"}
BATCH = {"train_batch_size": 4000, "minibatch_size": 128}

# algorithm, what is given -> environments x steps, (minibatches x) rows of a gradient step, updates of an iteration
ON_POLICY = [
    ("ppo", BATCH, (8, 500), (32, 125), 128),  # 4 epochs by default
    ("ppo", {**BATCH, "num_env_runners": 0}, (8, 500), (32, 125), 128),
    ("ppo", {**BATCH, "num_env_runners": 2}, (8, 500), (32, 125), 128),
    ("ppo", {**BATCH, "num_env_runners": 3}, (9, 444), (36, 111), 144),  # 3996 rows
    ("ppo", {**BATCH, "num_envs_per_env_runner": 1}, (1, 4000), (32, 125), 128),
    # 4000 / 12 = 333.3: 333 steps, 3996 rows; 3996 / 500 = 8, and 4 and 9 are the divisors beside it
    ("ppo", {"num_env_runners": 3, "num_envs_per_env_runner": 4, "train_batch_size": 4000, "minibatch_size": 500},
     (12, 333), (9, 444), 36),
    ("ppo", {**BATCH, "rollout_fragment_length": 200}, (8, 500), (32, 125), 128),
    ("ppo", {**BATCH, "rollout_fragment_length": "auto", "num_epochs": 30}, (8, 500), (32, 125), 960),
    ("ppo", {"train_batch_size": 4096, "sgd_minibatch_size": 128, "num_sgd_iter": 10}, (8, 512), (32, 128), 320),
    ("ppo", {"train_batch_size_per_learner": 4096, "minibatch_size": 4096, "num_epochs": 1}, (8, 512), (1, 4096), 1),
    ("ppo", {"rollout_fragment_length": 200, "num_epochs": 1}, (8, 200), (4, 400), 4),
    ("ppo", {"num_env_runners": 2, "num_envs_per_env_runner": 3, "rollout_fragment_length": 50}, (6, 50), (4, 75), 16),
    ("appo", {"train_batch_size": 500, "rollout_fragment_length": 50, "num_epochs": 1}, (8, 50), (1, 400), 1),
    ("appo", {"train_batch_size": 200, "rollout_fragment_length": 50, "num_epochs": 2}, (8, 50), (2, 200), 4),
    ("impala", {"train_batch_size": 80, "rollout_fragment_length": 40}, (8, 40), (4, 80), 4),
    ("impala", {"train_batch_size": 500, "num_env_runners": 4, "rollout_fragment_length": 50}, (8, 50), (1, 400), 1),
    ("impala", {"train_batch_size": 640}, (8, 80), (1, 640), 1),
    ("impala", {"train_batch_size": 320, "rollout_fragment_length": 40, "minibatch_size": 160}, (8, 40), (2, 160), 2),
    ("ppo", {**BATCH, "model": {"use_lstm": True, "max_seq_len": 20}}, (8, 500), (40, 100), 160),  # 200 sequences
    ("ppo", {"train_batch_size": 1024, "model": {"use_lstm": True, "max_seq_len": 10}}, (8, 128), (4, 256), 16),
    ("ppo", {**BATCH, "num_envs_per_env_runner": 1, "model": {"use_lstm": True, "max_seq_len": 20}}, (1, 4000),
     (40, 100), 160),
    ("ppo", {"num_envs_per_env_runner": 3, "rollout_fragment_length": 20, "model": {"use_lstm": True}}, (3, 20),
     (3, 20), 12),  # one sequence of each environment: 4 minibatches would cut them
]  # fmt: skip
REPLAY = [
    ("dqn", {"train_batch_size": 32}, (8, 1), 32, 8),
    ("dqn", {"train_batch_size": 32, "rollout_fragment_length": 4}, (8, 1), 32, 2),
    ("dqn", {"train_batch_size": 32, "rollout_fragment_length": 4, "num_env_runners": 2}, (8, 1), 32, 1),
    ("dqn", {"train_batch_size": 32, "rollout_fragment_length": 4, "num_env_runners": 3}, (9, 4), 32, 3),
    ("dqn", {"train_batch_size": 32, "rollout_fragment_length": 4, "num_envs_per_env_runner": 1}, (1, 4), 32, 1),
    ("dqn", {"train_batch_size": 32, "training_intensity": 1, "num_envs_per_env_runner": 8}, (8, 4), 32, 1),
    ("dqn", {"rollout_fragment_length": "auto"}, (8, 1), 256, 8),
    ("dqn", {"rollout_fragment_length": 3}, (8, 3), 256, 8),
    # 64 rows learned from per step with batches of 32: 2 updates per step
    ("dqn", {"train_batch_size": 32, "num_envs_per_env_runner": 1, "training_intensity": 64}, (1, 1), 32, 2),
    # 1 row per step: an update of 32 after 32 steps, that is 8 fragments of 4
    ("dqn", {"train_batch_size": 32, "rollout_fragment_length": 4, "training_intensity": 1}, (8, 4), 32, 1),
    ("sac", {"train_batch_size": 256, "rollout_fragment_length": 1}, (8, 1), 256, 8),
    ("sac", {"train_batch_size": 128, "rollout_fragment_length": 1, "num_envs_per_env_runner": 4}, (4, 1), 128, 1),
    ("sac", {"train_batch_size": 128, "rollout_fragment_length": 50, "num_env_runners": 0}, (8, 25), 128, 4),
]  # fmt: skip


def sizes(cfg):
    found = Sizes(cfg)
    return found.rows, found.minibatch, found.updates


def built(algo, given):
    made = api.config_class(algo)().environment("Pendulum-v1" if algo == "sac" else "CartPole-v1")
    made.env_runners(**{name: value for name, value in given.items() if name in RUNNERS})
    return made.training(**{name: value for name, value in given.items() if name not in RUNNERS}).to_run_config()


@pytest.mark.parametrize(("algo", "given", "rollout", "learned", "updates"), [*ON_POLICY, *REPLAY], ids=str)
def test_calls_files_and_the_command_have_one_plan(algo, given, rollout, learned, updates):
    cfg = built(algo, given)
    found = Sizes(cfg)
    assert (cfg.env.num_envs, found.length) == rollout
    assert (found.rows, found.updates) == (rollout[0] * rollout[1], updates)
    assert (found.minibatch if cfg.replay else (cfg.algo.num_minibatches, found.minibatch)) == learned
    assert config.from_dict(migrate({"env": cfg.env.id, **given}, algo=algo).config) == cfg
    data = command.given(None, algo=algo, env=cfg.env.id, drop=False, over_it=given, tell=print)
    run = config.load(data, algo=algo, env=cfg.env.id, stop=["env_steps=1000000"])
    assert dataclasses.replace(run, stop=cfg.stop) == cfg


def test_what_is_told_where_a_number_is_not_what_was_asked_for():
    said = PPOConfig().env_runners(num_env_runners=3, rollout_fragment_length=200).training(**BATCH).translations()
    for line in (
        "num_env_runners -> env.num_envs: 9  (the nearest to 8 that 3 runners share: ",
        "rollout_fragment_length: dropped: rollout.length is train_batch_size divided by the environments, 444 steps",
        "train_batch_size -> rollout.length: 444  (the nearest: 9 environments x 444 steps = 3996 rows, not 4000)",
        "minibatch_size -> algo.num_minibatches: 36  (the nearest divisor of 3996 rows: 36 x 111 rows, not 128)",
    ):
        assert any(found.startswith(line) for found in said), (line, said)


def test_environments_that_are_named_by_jrls_name_stay():
    made = PPOConfig().environment("CartPole-v1").env_runners(num_envs=12, num_env_runners=3).training(**BATCH)
    assert made.to_run_config().env.num_envs == 12
    counted = DQNConfig().environment("CartPole-v1").env_runners(num_envs=16, rollout_fragment_length=4)
    cfg = built("dqn", {"num_envs_per_env_runner": 16, "rollout_fragment_length": 4})
    assert counted.to_run_config() == cfg
    assert sizes(cfg) == (64, 256, 1)


@pytest.mark.parametrize("first", [True, False])
def test_a_rate_of_updates_counts_beside_a_fragment(first):
    """A fragment stands for one update in RLlib; `updates_per_step` says another number, whatever the order."""
    made = DQNConfig().environment("CartPole-v1")
    steps = [lambda: made.training(replay_buffer_config={"updates_per_step": 0.25})]
    steps.insert(first, lambda: made.env_runners(rollout_fragment_length=32))
    for step in steps:
        step()
    assert sizes(made.to_run_config()) == (32, 256, 8)


def test_of_a_fragment_and_the_steps_between_updates_the_later_counts():
    made = DQNConfig().environment("CartPole-v1").env_runners(num_envs=4, rollout_fragment_length=8)
    assert made.to_run_config().replay.train_every == 32 == made.copy().to_run_config().replay.train_every
    assert DQNConfig().update_from_dict(made.arguments()).to_dict()["replay"] == made.to_dict()["replay"]
    later = made.copy().training(replay_buffer_config={"train_every": 16}, train_batch_size=64).to_run_config()
    assert (later.replay.train_every, later.replay.updates_per_step, later.replay.batch_size) == (16, 1.0, 64)
    later = made.update_from_dict({"rollout": {"length": 3}}).training(replay_buffer_config={"batch_size": 16})
    assert sizes(later.to_run_config()) == (12, 16, 12)
    assert made.env_runners(rollout_fragment_length="auto").to_run_config().rollout.length == 3
