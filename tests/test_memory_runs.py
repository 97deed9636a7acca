"""Memory through every way to collect: what acting said, the learner's pass says again, with the previous action and
reward as part of what is seen."""

import jax.numpy as jnp
import pytest

from jrl import registry
from jrl.api import PPO
from jrl.fields import schema


def gap(default, net, params, rows):
    """How far the learner's log-probability of an action is from the one that was stored when it acted."""
    value, metrics = default(params, rows)
    dist, _ = net.apply(params, rows.obs)
    away = jnp.abs(dist.log_prob(rows.action) - rows.log_prob)
    return value, metrics | {"gap": jnp.max(jnp.where(rows.weight > 0, away, 0.0))}


CONFIG = {
    "algo": {"name": "ppo", "lr": 0.0, "num_epochs": 1, "num_minibatches": 1},
    "env": {"id": "StatelessCartPole-v1", "backend": "jax", "num_envs": 8, "horizon": 30},
    "network": {"hidden": [8], "core": {"name": "lstm", "size": 8}, "use_prev_action": True, "use_prev_reward": True},
    "rollout": {"length": 32},
    "custom": {"loss": "gap"},
    "run": {"log": [], "report_every": 1},
    "stop": {"env_steps": 100_000},
}
GYMNASIUM = {"id": "CartPole-v1", "backend": "gymnasium"}
WAYS = {
    "in a program": {},
    "whole episodes": {"rollout": {"batch_mode": "complete_episodes"}},
    "in a thread": {"rollout": {"mode": "async"}},
    "env runners": {"env_runners": {"num": 2}},
    "Gymnasium": {"env": GYMNASIUM},
    "worker processes that do not wait": {"env": {**GYMNASIUM, "remote_worker_envs": True, "batch_wait_ms": 0}},
    "EnvPool in a program": {"env": {"id": "CartPole-v1", "backend": "envpool"}},
    "EnvPool that does not wait": {"env": {"id": "CartPole-v1", "backend": "envpool", "batch_size": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_learning_says_what_acting_said(way):
    registry.register("gap", gap)
    algo = PPO(schema.merge(CONFIG, WAYS[way]))
    try:
        for _ in range(4):  # rollouts that begin within episodes
            found = algo.train()["learners"]["default_policy"]["gap"]
            assert found < 1e-5
    finally:
        algo.stop()
