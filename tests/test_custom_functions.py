"""The user's own pure functions of rewards and batches, by name in a config."""

import jax.numpy as jnp
import pytest

from jrl import registry
from jrl.api import A2C, DQN
from jrl.errors import InputError
from jrl.fields import schema

CONFIG = {
    "env": {"id": "RepeatAfterMe-v0", "num_envs": 4, "reward_scale": 0.5},  # rewards are +1 and -1
    "network": {"hidden": [8]},
    "custom": {"reward": "tenfold_where_good", "batch": ["look", "halved"]},
    "run": {"log": [], "report_every": 1},
    "stop": {"env_steps": 100_000},
}


def tenfold_where_good(reward):
    """Of rewards [T, B]."""
    return jnp.where(reward > 0, 10.0 * reward, reward)


def look(batch):
    """Of what an update learns from: a Rollout, or a Batch."""
    return batch, {"mine/least": batch.reward.min(), "mine/most": batch.reward.max()}


def halved(batch):
    return batch.replace(reward=0.5 * batch.reward)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    for function in (tenfold_where_good, look, halved):
        registry.register(function.__name__, function)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        (A2C, {"rollout": {"length": 32}}),
        pytest.param(
            DQN, {"replay": {"capacity": 1000, "batch_size": 64, "learning_starts": 8}}, marks=pytest.mark.slow
        ),
    ],
)
def test_rewards_and_batches(algorithm, more):
    algo = algorithm(schema.merge(CONFIG, more))
    try:
        for _ in range(30 if algorithm is DQN else 1):
            found = algo.train()["learners"]["default_policy"]
    finally:
        algo.stop()
    assert found["mine/most"] == pytest.approx(5.0)  # 1, scaled by 0.5, then tenfold
    assert found["mine/least"] == pytest.approx(-0.5)


def test_a_name_that_is_not_there():
    with pytest.raises(InputError, match=r"custom\.reward nowhere:fn: "):
        A2C(schema.merge(CONFIG, {"custom": {"reward": "nowhere:fn"}}))
