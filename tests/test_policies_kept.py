"""Which policies a checkpoint holds, and which of them another run takes over."""

import jax
import numpy as np
import pytest

import jrl
from jrl import api, config, evaluate, train
from jrl.errors import InputError

SMALL = {
    "env": {"id": "MultiAgentCartPole-v1", "num_envs": 4, "options": {"num_agents": 3}},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": 16, "iterations_per_call": 1},
    "multi_agent": {"mapping": "by_agent", "policies_to_train": ["agent_0", "agent_2"]},
    "run": {"compile_cache": False, "log": [], "report_every": 64},
    "stop": {"env_steps": 128},
}


def made(**sections):
    return config.merge(SMALL, sections)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint with the policies that learn alone, and the States of all when it was written."""
    with api.AlgorithmConfig.from_dict(made(checkpoint={"policies": "trainable"})).build() as algo:
        algo.train()
        path = algo.save(tmp_path_factory.mktemp("saved") / "trainable")
        return path, jax.device_get(algo.session.learner_state_of_all())


@pytest.mark.slow
def test_policies_that_do_not_learn_are_left_out_and_begin_anew(saved, capsys):
    path, states = saved
    for name in ("agent_0", "agent_2"):
        assert jrl.load(path, policy=name).act(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(InputError, match="policy agent_1: it does not learn, and"):
        jrl.load(path, policy="agent_1")
    assert evaluate.main([str(path)]) == 2
    assert "got only those that learn (checkpoint.policies trainable), without agent_1" in capsys.readouterr().err
    with api.Algorithm.from_checkpoint(path) as algo:
        equal(algo.session.learner_state_of_all(), states)  # as the seed made it


@pytest.mark.slow
def test_a_run_takes_over_some_policies_of_another(saved):
    path, states = saved
    how = {"policy_mapping_fn": {".*": "agent_2"}, "policies_to_train": ["agent_2"]}
    with api.Algorithm.from_checkpoint(path, ["agent_2"], **how) as algo:
        assert algo.session.policies == ("agent_2",) and algo.env_steps == 0
        equal(algo.session.learner_state("agent_2"), states["agent_2"])
        algo.train()
    with pytest.raises(InputError, match=r"policy_ids: expected some of agent_0, agent_1, agent_2, got agent_9"):
        api.Algorithm.from_checkpoint(path, ["agent_9"])
    with pytest.raises(InputError, match=r"multi_agent\.policies: no policy for|names the policy"):
        api.Algorithm.from_checkpoint(path, ["agent_2"])


@pytest.mark.slow
def test_the_run_says_what_each_policy_sees_and_does(tmp_path, capsys):
    config.write(config.from_dict(made(checkpoint={"policies": "trainable"})), tmp_path)
    assert train.main([str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"), "--quiet"][:3]) == 0
    said = capsys.readouterr().out.splitlines()
    line = next(line for line in said if line.startswith("policy agent_1"))
    assert line.startswith("policy agent_1: agent_1, 1 agent x 4 envs, does not learn: Box(") and "-> Discrete(" in line
