"""RLlib's configs of runs that learn from data: what their keys become, and their budgets in updates."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import yaml

from jrl import config
from jrl.errors import InputError
from jrl.fields import schema
from jrl.migrate import migrate
from jrl.run import preflight

TABLE = yaml.safe_load((Path(__file__).parent / "migrations.yaml").read_text())


def migrated(algo, **given):
    return migrate({"input": "data", **given}, algo=algo)


@pytest.mark.parametrize("row", TABLE["data"], ids=str)
def test_settings(row):
    given = dict(row["given"])
    if "sampler" in given.get("input", ()):
        given["env"] = "CartPole-v1"
    found = migrated(row["algo"], **given)
    cfg = config.from_dict(found.config)
    flat = schema.flatten({k: v for k, v in found.config.items() if k != "env"})
    flat.pop("algo.name")
    if "input" not in row["given"]:
        assert flat.pop("data.input") == "data"
    assert flat == row["becomes"]
    assert config.from_dict(config.to_dict(cfg)) == cfg


@pytest.mark.parametrize(
    ("stop", "updates"),
    [
        ({"training_iteration": 7}, 21),
        ({"timesteps_total": 1000}, 30),  # 100 in each iteration
        ({"num_env_steps_sampled_lifetime": 1050}, 33),
        ({"num_env_steps_trained_lifetime": 1000}, 10),  # 100 in each update
        ({"info/num_env_steps_trained": 1050, "training_iteration": 100}, 11),
    ],
)
def test_budgets_become_updates(stop, updates):
    body = {"input": "data", "train_batch_size": 100, "dataset_num_iters_per_learner": 3}
    found = migrate({"a": {"run": "MARWIL", "stop": stop, "config": body}})
    assert found.config["stop"] == {"updates": updates}
    assert config.from_dict(found.config).stop == {"updates": updates}


def test_iterations_of_a_run_of_ours():
    ours = {"algo": {"name": "bc"}, "data": {"input": "data"}, "stop": {"training_iteration": 3}}
    assert config.from_dict(ours).stop == {"updates": 3000}
    ours["data"]["updates_per_iteration"] = 5
    assert config.from_dict(ours).stop == {"updates": 15} and config.from_dict(ours).run.report_every == 5


@pytest.mark.parametrize(
    ("algo", "given", "message"),
    [
        ("BC", {"input": "sampler", "env": "CartPole-v1"}, "bc learns from a data set alone: set it"),
        ("BC", {"input": {"sampler": 0.5, "a": 0.5}}, "leave sampler out .data.input was input"),
        ("BC", {"input": "d4rl.hopper-medium-v0"}, r"download the \*\.hdf5 file of D4RL.*: remove it, or use --drop"),
        ("BC", {"input": "s3://bucket/a.json"}, "is not on this machine: copy it"),
        ("BC", {"input": {}}, "input: expected a path, a glob, a list of them"),
        ("BC", {"input": "dataset", "input_config": {"format": "json"}}, "a mapping with paths for input dataset"),
        ("BC", {"input_read_method": "read_tfrecords"}, "input_read_method: read_json, read_parquet"),
        ("BC", {"input_filesystem": "gcs"}, "input_filesystem: data.input names files of this machine"),
        ("BC", {"off_policy_estimation_methods": {"is": {"type": "my.Own"}}}, "unknown estimator own"),
        ("BC", {"evaluation_interval": 1}, "evaluations need an environment"),
        ("MARWIL", {"lambda": 0.9}, "lambda: marwil has returns to the episode's end, as lambda 1"),
        ("DT", {"loss_coef_obs": 0.5}, "loss_coef_obs: DT learns only actions"),
        ("CQL", {"lagrangian": True, "min_q_weight": 0}, "min_q_weight: expected a number, got 0"),
        ("CQL", {"bc_iters": -5}, "bc_iters: expected a whole number of at least 0, got -5"),
        ("CRR", {}, "unknown algorithm 'CRR': marwil with weight: binary has its filter"),
        ("PPO", {"env": "CartPole-v1"}, "input: ppo learns from its own rollouts"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_told(algo, given, message):
    with pytest.raises(InputError, match=message):
        migrated(algo, **given)


# ---------------------------------------------------------------- PolicyServerInput

ADDRESS, PORT = "localhost", 9910


def server(ioctx):
    """As RLlib's examples have it: a port for each worker."""
    if ioctx.worker_index > 0 or ioctx.worker.num_workers == 0:
        first = 1 if ioctx.worker_index > 0 else 0
        return PolicyServerInput(ioctx, ADDRESS, PORT + ioctx.worker_index - first)  # noqa: F821
    return None


PATH = "ray.rllib.env.policy_server_input.PolicyServerInput"
BOUNDED = gymnasium.spaces.Box(np.array([-1.0, -2.0], np.float32), 2.0)
MASKED = "Dict('action_mask': MultiBinary(2), 'x': Box([-4.8 -inf], [4.8 inf], (2,), float32))"


@pytest.mark.parametrize(
    ("algo", "given", "external"),
    [
        (
            "PPO",
            {"input": server, "num_workers": 2, "env": None, "observation_space": MASKED, "action_space": "Discrete(2)",
             "batch_mode": "complete_episodes", "sample_async": True},
            {"host": "localhost", "port": 9910, "action": {"discrete": 2},
             "observation": {"dict": {"action_mask": {"multi_binary": [2]}, "x": {"box": [2]}}}},
        ),
        (
            "SAC",
            {"input": PATH, "input_config": {"port": 9911}, "action_space": BOUNDED,
             "observation_space": gymnasium.spaces.Box(0, 255, (8, 8, 1), np.uint8)},
            {"port": 9911, "observation": {"box": [8, 8, 1], "dtype": "uint8"},
             "action": {"box": [2], "low": [-1.0, -2.0], "high": 2.0}},
        ),
        ("DQN", {"input": "PolicyServerInput", "env": "CartPole-v1"}, {"port": 9900}),
        (
            "IMPALA",
            {"input": lambda io: PolicyServerInput(io, io.nothing), "observation_space": {"box": [4]},  # noqa: F821
             "action_space": "MultiDiscrete([2 3])"},
            {"port": 9900, "observation": {"box": [4]}, "action": {"multi_discrete": [2, 3]}},
        ),
    ],
    ids=["example", "path", "environment", "unknown"],
)  # fmt: skip
def test_a_policy_server_becomes_a_run_of_clients(algo, given, external):
    found = migrate(given, algo=algo)
    assert found.config["external"] == external
    cfg = config.from_dict(found.config)
    assert cfg.env_runners.num == 0
    assert preflight.spec_of_clients(cfg.external, cfg.env).num_envs == cfg.env.num_envs
    assert any("start it with python -m jrl.serve CONFIG" in line for line in found.lines)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": PATH}, "observation_space is missing: give .* in the form of external.observation"),
        ({"input": PATH, "observation_space": {"box": [4]}}, "action_space is missing"),
        (
            {"input": PATH, "observation_space": {"box": [4]}, "action_space": gymnasium.spaces.Discrete(2, start=1)},
            "action_space: expected a Gymnasium space, or a mapping such as",
        ),
        ({"env": "ray.rllib.env.policy_client.PolicyClient"}, "has input: PolicyServerInput"),
    ],
)
def test_what_a_policy_server_needs_is_told(given, message):
    with pytest.raises(InputError, match=message):
        migrate(given, algo="PPO")
