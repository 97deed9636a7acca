"""jrl.migrate: RLlib's configurations of every generation as jrl's, and the commands that take them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jrl import algos, config, registry, train
from jrl.algos.critic_heads import Critic
from jrl.algos.exploration import OverActions, OverDistributions, OverQ
from jrl.config import Sizes
from jrl.config import __main__ as command
from jrl.config.datasets import OutputConfig
from jrl.config.external import ExternalConfig
from jrl.config.sections import RunConfig
from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.hyper import Gtrxl, Lstm
from jrl.fields.schema import read_mapping
from jrl.migrate import looks_like_rllib, main, migrate
from jrl.rllib import table
from jrl.rllib.exploration import from_rllib
from jrl.rllib.translation import nest_key
from jrl.run import preflight

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "rllib"
TABLE = schema.parse((HERE / "migrations.yaml").read_text())
FILES = TABLE["files"]
# every key of the old trainer's common config, without those inside the TensorFlow session's arguments
COMMON_CONFIG = (FIXTURES / "common_config.txt").read_text().split()
# every argument of the groups of AlgorithmConfig
ALGORITHM_CONFIG = (FIXTURES / "algorithm_config.txt").read_text().split()


def migrated(algo, **given):
    return migrate({"env": "CartPole-v1", **given}, algo=algo, drop=True)


def errors(data, **more):
    with pytest.raises(InputError) as e:
        migrate(data, **more)
    return list(e.value.errors)


def keys_of(data):
    """The keys that a line is due for, as they are spelled in the file."""
    body = next(iter(data.values())) if "env" not in data else data
    inner = body.get("config", body)
    nested = ("model", "replay_buffer_config", "multiagent", "optimization", "q_model_config", "policy_model_config")
    for key, value in {**{k: v for k, v in body.items() if k != "config"}, **inner}.items():
        if key in (*nested, "stop", "evaluation_config") and value:
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


# ---------------------------------------------------------------- what files and settings become


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_config_that_it_means(name):
    given, expected = read_mapping(FIXTURES / name), FILES[name]
    assert looks_like_rllib(given)
    found = migrate(given, algo=expected.get("algo"), drop=True)
    assert config.from_dict(found.config) == config.from_dict(expected["config"])
    for key in keys_of(given):
        assert any(line.startswith((f"{key} -> ", f"{key}: ")) for line in found.lines), key
    assert not set(expected.get("lines", ())) - set(found.lines)


@pytest.mark.parametrize("row", TABLE["settings"], ids=str)
def test_settings(row):
    becomes = dict(row["becomes"])
    learns_from_data = row["algo"] in ("BC", "MARWIL", "CQL", "IQL", "DT")
    given = {"input": "data"} if learns_from_data else {"env": "CartPole-v1"}
    found = migrate({**given, **row["given"]}, algo=row["algo"]).config
    expected = {"env": {"id": "CartPole-v1"}} if "env" in given else {}
    if learns_from_data and "input" not in row["given"]:
        becomes["data.input"] = "data"
    for key, value in {"algo.name": found["algo"]["name"], **becomes}.items():
        expected = schema.merge(expected, nest_key(key, value))
    assert config.from_dict(found) == config.from_dict(expected)


@pytest.mark.parametrize("row", TABLE["stop"], ids=str)
def test_stop_criteria(row):
    found = migrate({"env": "CartPole-v1", "run": "PPO", **row.get("more", {}), "stop": row["given"]})
    assert found.config["stop"] == row["becomes"]


@pytest.mark.parametrize("row", TABLE["exploration_config"], ids=lambda row: str(row["given"])[:60])
def test_exploration(row):
    found = from_rllib(row["given"], row.get("algo"))
    assert found.keys() == row["becomes"].keys()
    for key, value in row["becomes"].items():
        if isinstance(value, list):
            np.testing.assert_allclose(found[key], value)
        else:
            assert found[key] == (pytest.approx(value) if isinstance(value, float) else value)


def test_exploration_fits_the_algorithms_and_needs_no_jax():
    fits = {
        OverQ: ("EpsilonGreedy", "PerWorkerEpsilonGreedy", "SoftQ", "ParameterNoise", "Random"),
        OverActions: ("GaussianNoise", "OrnsteinUhlenbeckNoise", "ParameterNoise", "Random"),
        OverDistributions: ("StochasticSampling", "Random"),
    }
    for union, types in fits.items():
        classes = {cls.name: cls for cls in union.__args__}
        for given in types:
            section, problems = from_rllib({"type": given}), []
            assert schema.build(classes[section["name"]], section, problems, prefix="algo.exploration.").name
            assert problems == []
    code = "import sys, jrl.rllib.exploration; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Environment:
    """A class that is given, not named."""


def test_exploration_of_a_class(monkeypatch):
    custom = {"name": "custom", "path": f"{__name__}:Environment", "options": {"x": 1}}
    assert from_rllib({"type": Environment, "x": 1}) == custom
    monkeypatch.setattr(registry, "_registered", {"my-noise": Environment})
    assert from_rllib({"type": "my-noise"})["path"] == "my-noise"
    theirs = type("SoftQ", (), {"__module__": "ray.rllib.utils.exploration.soft_q"})
    assert from_rllib({"type": theirs}) == {"name": "soft_q", "temperature": 1.0}


@pytest.mark.parametrize(
    ("given", "id"),
    [
        ("CartPole-v0", "CartPole-v0"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("my.module.Env", "my.module:Env"),
        ("ray.rllib.examples.env.random_env.RandomEnv", "ray.rllib.examples.env.random_env:RandomEnv"),
        (Environment, f"{__name__}:Environment"),
        ({"grid_search": ["Pong-v5", "Breakout-v5"]}, "Pong-v5"),
    ],
)
def test_environments(given, id):
    data = {"run": "PPO", "env": given, "config": {}}
    assert looks_like_rllib(data)
    assert migrate(data).config["env"] == {"id": id}


def test_the_users_own_functions():
    found = migrated("PPO", callbacks=Environment, env_task_fn="a.b.c", custom_evaluation_function="a.b:c")
    assert found.config["custom"] == {
        "callbacks": [f"{__name__}:Environment"], "env_task": "a.b:c", "evaluation": "a.b:c",
    }  # fmt: skip
    (line,) = migrated("PPO", env_task_fn="<lambda>").dropped
    assert line.startswith("env_task_fn: expected the path of a class or function")


def test_evaluation_has_environments_and_exploration_of_its_own():
    inner = {"env": "Pong-v5", "explore": True, "exploration_config": {"type": "Random"}, "lr": 1.0, "foo": 2}
    found = migrated("DQN", evaluation_config=inner)
    own = {"env": {"id": "Pong-v5"}, "algo": {"exploration": {"name": "random"}}}
    assert found.config["evaluation"] == {"explore": True, "config": own}
    assert "evaluation_config.lr: dropped: evaluation can only change environments and exploration" in found.lines
    (line,) = found.dropped
    assert line.startswith("evaluation_config.foo: config: dqn has no argument foo")


# ---------------------------------------------------------------- what jrl lacks, what is wrong


LACKING = {
    "observation_fn": "my.fn", "input": "/data", "learner_class": "my.Learner",
    "off_policy_estimation_methods": {"is": {}}, "output": "s3://bucket/a",
    "model": {"custom_model": "mine", "custom_action_dist": "mine"},
    "replay_buffer_config": {"type": "ReservoirReplayBuffer"},
    "callbacks": "<lambda>", "nonsense_key": 1, "action_mask_key": "legal",
}  # fmt: skip


def test_what_jrl_does_not_have_is_an_error_unless_it_is_to_be_dropped():
    found = errors({"env": "CartPole-v1", **LACKING}, algo="PPO")
    names = [name for name in LACKING if name not in ("model", "replay_buffer_config")]
    names += ["model.custom_model", "model.custom_action_dist", "replay_buffer_config.type"]
    assert sorted(line.partition(":")[0] for line in found) == sorted(names)
    assert all(line.endswith("remove it, or use --drop") for line in found)
    left = migrated("PPO", **LACKING)
    assert sorted(line.partition(":")[0] for line in left.dropped) == sorted(names)
    assert config.from_dict(left.config) == config.from_dict(migrated("PPO").config)
    at = left.report().index("dropped, as was asked:")
    assert left.report()[at + 1 : at + 1 + len(names)] == [f"  {line}" for line in left.dropped]


def test_what_rllib_writes_down_by_itself_asks_for_nothing():
    given = {
        "policies": {"default_policy": [None] * 4}, "policy_mapping_fn": "<function AlgorithmConfig.DEFAULT>",
        "input": "sampler", "output": None, "off_policy_estimation_methods": {}, "input_evaluation": ["is", "wis"],
        "model": {"custom_model": None}, "callbacks": {}, "_learner_class": None,
        "learner_class": "<class 'ray.rllib.core.Learner'>", "algorithm_config_overrides_per_module": {},
        "action_mask_key": "action_mask", "h_function_epsilon": 0.1,
    }  # fmt: skip
    assert migrate({"env": "CartPole-v1", **given}, algo="PPO").dropped == []


def test_lines_say_why_a_key_has_no_effect():
    attention = {"use_attention": True, "attention_memory_inference": 4, "attention_memory_training": 3}
    said = migrated("PPO", num_sgd_iter=3, num_epochs=5, model={**attention, "lstm_cell_size": 9}).lines
    assert "num_sgd_iter: dropped: num_epochs is given, too" in said
    assert "model.lstm_cell_size: dropped: use_lstm is off" in said
    assert any(line.startswith("model.attention_memory_training: dropped: jrl has one memory") for line in said)
    said = migrated("R2D2", h_function_epsilon=0.1, replay_buffer_config={"capacity": 5000}).lines
    assert "h_function_epsilon: dropped: 0.001 in jrl, as in the paper" in said
    assert "replay_buffer_config.capacity -> replay.capacity: 100000  (5000 sequences of 20 steps)" in said
    assert any("there is no memory" in line for line in migrated("PPO", model={"max_seq_len": 20}).lines)


def test_all_errors_at_once_and_one_of_several_experiments():
    assert len(errors({"num_workers": "two", "train_batch_size": 0.5, "num_sgd_iter": 2}, algo="PPO")) == 3
    two = {name: {"run": "PPO", "env": "CartPole-v1", "config": {"gamma": g}} for name, g in (("a", 0.5), ("b", 0.6))}
    assert migrate(two, name="b").config["algo"] == {"name": "ppo", "gamma": 0.6}


def test_what_looks_like_rllib():
    files = sorted((HERE.parent / "configs").glob("*.yaml"))
    ours = [{}, {"stop": {"env_steps": 5}}, {"env": {"id": "CartPole-v1"}, "lr": 3}]
    ours += [{"algo": {"name": "ppo"}, "num_workers": 3}, *map(schema.read_yaml, files)]
    assert files and not any(map(looks_like_rllib, ours))
    theirs = [{"num_env_runners": 8}, {"env": "CartPole-v1"}, {"run": "PPO", "env": "CartPole-v1"}]
    theirs += [{"name": {"run": "PPO", "env": "CartPole-v1", "config": {}}}, {"model": {"fcnet_hiddens": [8]}}]
    assert all(map(looks_like_rllib, theirs))


# ---------------------------------------------------------------- PolicyServerInput

PATH = "ray.rllib.env.policy_server_input.PolicyServerInput"
OBSERVATION = {"dict": {"action_mask": {"multi_binary": [2]}, "x": {"box": [2]}}}


@pytest.mark.parametrize(
    ("algo", "given", "external"),
    [
        (
            "PPO",
            {"input": PATH, "input_config": {"address": "localhost", "port": 9910}, "num_workers": 2, "env": None,
             "observation_space": OBSERVATION, "action_space": {"discrete": 2}, "batch_mode": "complete_episodes",
             "sample_async": True},
            {"host": "localhost", "port": 9910, "action": {"discrete": 2}, "observation": OBSERVATION},
        ),
        (
            "DQN",
            {"input": lambda io: PolicyServerInput(io, "localhost", 9911), "env": "CartPole-v1"},  # noqa: F821
            {"port": 9900},
        ),
    ],
    ids=["spaces", "environment"],
)  # fmt: skip
def test_a_policy_server_becomes_a_run_of_clients(algo, given, external):
    found = migrate(given, algo=algo)
    assert found.config["external"] == external
    cfg = config.from_dict(found.config)
    assert cfg.env_runners.num == 0
    assert preflight.spec_of_clients(cfg.external, cfg.env).num_envs == cfg.env.num_envs
    assert any("start it with python -m jrl.serve CONFIG" in line for line in found.lines)


# ---------------------------------------------------------------- commands


def test_command_writes_yaml_that_can_be_run_and_a_line_for_each_key(capsys, tmp_path):
    assert main([str(FIXTURES / "cartpole-ppo.yaml")]) == 0
    out, err = capsys.readouterr()
    assert "num_epochs: 6                         # num_sgd_iter" in out
    assert err.splitlines() == FILES["cartpole-ppo.yaml"]["lines"]
    (tmp_path / "new.yaml").write_text(out)
    sizes = Sizes(config.load(tmp_path / "new.yaml"))
    assert (sizes.rows, sizes.minibatch, sizes.updates, sizes.iterations) == (1000, 125, 48, 100)
    path = tmp_path / "params.json"
    path.write_text(json.dumps({"num_env_runners": 6}, indent="\t"))
    assert main([str(path), "--algo", "A2C", "--env", "Pong-v5"]) == 0
    found = schema.parse(capsys.readouterr().out)
    assert found == {
        "algo": {"name": "a2c"}, "env": {"id": "Pong-v5", "num_envs": 6}, "env_runners": {"num": 6},
    }  # fmt: skip


def test_command_drops_only_when_it_is_told_to(capsys):
    name = str(FIXTURES / "impala.yaml")
    assert main([name, "--algo", "IMPALA"]) == 2
    out, err = capsys.readouterr()
    own = "impala learns from its own rollouts: bc, marwil, iql, cql and dqn learn from data"
    assert not out and f"error: input: {own}: remove it" in err
    assert main([name, "--algo", "IMPALA", "--drop"]) == 0
    out, err = capsys.readouterr()
    assert config.from_dict(schema.parse(out)) == config.from_dict(FILES["impala.yaml"]["config"])
    assert f"dropped, as was asked:\n  input: {own}\n" in err


def test_the_flags_of_rllibs_command():
    """`rllib train --run=A2C --config '{...}' --stop '{...}'`, and the same over a file."""
    said = []

    def load(path=None, algo=None, env=None, drop=False, over_it=None, **more):
        data = command.given(path, algo=algo, env=env, drop=drop, over_it=over_it, tell=said.append)
        return config.load(data, algo=algo, env=env, **more)

    given = {"num_workers": 0, "lambda": 0.5}
    stop = ['{"training_iteration": 2, "env_runners": {"episode_return_mean": 150}}']
    cfg = load(None, algo="A2C", env="CartPole-v1", over_it=given, stop=stop)
    assert (cfg.env.num_envs, cfg.algo.gae_lambda) == (8, 0.5)
    assert cfg.stop == {"env_steps": 2048, "episode/return": 150}
    assert "migrated: lambda -> algo.gae_lambda: 0.5" in said
    cfg = load(FIXTURES / "cartpole-ppo.yaml", over_it={"lambda": 0.5, "model": {"fcnet_hiddens": [8]}})
    assert (cfg.algo.gae_lambda, cfg.network.hidden, cfg.network.shared) == (0.5, (8,), True)
    with pytest.raises(InputError, match="is a configuration of jrl: use --set"):
        load(HERE.parent / "configs" / "ppo.yaml", over_it=given)
    with pytest.raises(InputError, match="--drop: expected a configuration of RLlib"):
        load(HERE.parent / "configs" / "ppo.yaml", drop=True)
    with pytest.raises(InputError, match=r"--stop {nonsense: expected metric=number, or JSON"):
        config.load(None, algo="ppo", env="CartPole-v1", stop=["{nonsense"])
    with pytest.raises(InputError, match="--config: expected JSON such as"):
        train._read_mapping("--config", "ppo.yaml", "{}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", "expected a mapping"),
        ("{", "not valid"),
        ("algo: {name: ppo}\nenv: {id: CartPole-v1}", "expected a configuration of RLlib"),
        (None, "there is no such file"),
    ],
)
def test_command_refuses_bad_input(capsys, tmp_path, text, expected):
    path = tmp_path / "old.yaml"
    if text:
        path.write_text(text)
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and expected in err and err.count("\n") == 1


# ---------------------------------------------------------------- the table


def test_every_documented_key_has_one_row_with_a_key_of_jrl_or_the_reason():
    assert len(set(COMMON_CONFIG)) == 97
    assert [name for name in (*COMMON_CONFIG, *ALGORITHM_CONFIG) if name not in table.KEYS] == []
    assert [key.name for key in table.KEYS.values() if not key.ours and not key.note] == []
    names = [name for group in table.GROUPS.values() for key in group for name in key.names]
    assert len(names) == len(set(names))


def test_our_keys_exist():
    sections = {f.name: f for f in dataclasses.fields(RunConfig)}
    hyper = {f.name for name in algos.names() for f in dataclasses.fields(algos.get_config_class(name))}
    hyper |= {f"critic.{f.name}" for f in dataclasses.fields(Critic)}
    default = config.to_dict(config.from_dict({"algo": {"name": "dqn"}, "env": {"id": "x"}}))
    default["network"] |= dict.fromkeys(f"core.{f.name}" for core in (Lstm, Gtrxl) for f in dataclasses.fields(core))
    default["data"] |= {f"output.{f.name}": None for f in dataclasses.fields(OutputConfig)}
    default["multi_agent"] = {f.name for f in dataclasses.fields(config.MultiAgentConfig)}
    default["external"] = {f.name for f in dataclasses.fields(ExternalConfig)}
    for key in table.KEYS.values():
        for ours_ in filter(None, key.ours.split(", ")):
            section, _, field = ours_.partition(".")
            assert section in sections
            assert not field or field in (hyper | {"name"} if section == "algo" else default[section]), ours_


def test_the_page_has_the_table():
    page = (HERE.parent / "docs" / "rllib-users.md").read_text()
    assert table.markdown() in page
