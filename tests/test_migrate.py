"""jrl.migrate: RLlib's configurations of every generation as ours, line by line."""

import dataclasses
from pathlib import Path

import pytest

from jrl import algos, config
from jrl.config import Sizes
from jrl.config.datasets import OutputConfig
from jrl.config.external import ExternalConfig
from jrl.config.sections import RunConfig
from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.hyper import Gtrxl, Lstm
from jrl.fields.schema import read_mapping
from jrl.migrate import looks_like_rllib, migrate
from jrl.rllib import defaults, table

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "rllib"
TABLE = schema.parse((HERE / "migrations.yaml").read_text())
FILES = TABLE["files"]

# every key of the old trainer's common config, without those inside the TensorFlow session's arguments
COMMON_CONFIG = (FIXTURES / "common_config.txt").read_text().split()
# every argument of the groups of AlgorithmConfig
ALGORITHM_CONFIG = (FIXTURES / "algorithm_config.txt").read_text().split()


def ours(algo, **given):
    """The migrated config of a dict with the environment CartPole-v1."""
    return migrate({"env": "CartPole-v1", **given}, algo=algo, drop=True).config


def lines(algo, **given):
    return migrate({"env": "CartPole-v1", **given}, algo=algo, drop=True).lines


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


# ---------------------------------------------------------------- files of each generation


def migrated(name):
    return migrate(read_mapping(FIXTURES / name), algo=FILES[name].get("algo"), drop=True)


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_tree_that_it_means(name):
    assert looks_like_rllib(read_mapping(FIXTURES / name))
    found = migrated(name).config
    assert found == FILES[name]["config"]
    cfg = config.from_dict(found)
    # what was left out, because it is a default, is one
    assert config.from_dict(config.to_dict(cfg)) == cfg


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_a_line(name):
    said = migrated(name).lines
    for key in keys_of(read_mapping(FIXTURES / name)):
        assert any(line.startswith((f"{key} -> ", f"{key}: ")) for line in said), key
    assert not set(FILES[name].get("lines", ())) - set(said)


def test_lines_of_a_tuned_example():
    assert migrate(read_mapping(FIXTURES / "cartpole-ppo.yaml")).lines == FILES["cartpole-ppo.yaml"]["lines"]


def test_a_config_with_a_stop_can_be_run_as_it_is(tmp_path):
    path = tmp_path / "new.yaml"
    path.write_text(schema.dump(migrate(read_mapping(FIXTURES / "cartpole-ppo.yaml")).config))
    cfg = config.load(path)
    sizes = Sizes(cfg)
    assert (sizes.rows, sizes.minibatch, sizes.updates, sizes.iterations) == (1000, 125, 48, 100)


# ---------------------------------------------------------------- what jrl does not have


LACKING = {
    "observation_fn": "my.fn", "input": "/data", "learner_class": "my.Learner",
    "off_policy_estimation_methods": {"is": {}},
    "model": {"custom_model": "mine", "custom_action_dist": "mine"},
    "callbacks": "<lambda>", "nonsense_key": 1,
}  # fmt: skip


def test_what_jrl_does_not_have_is_an_error_unless_it_is_to_be_dropped():
    found = errors({"env": "CartPole-v1", **LACKING}, algo="PPO")
    names = [name for name in LACKING if name != "model"] + ["model.custom_model", "model.custom_action_dist"]
    assert sorted(line.partition(":")[0] for line in found) == sorted(names)
    assert all(line.endswith("remove it, or use --drop") for line in found)
    left = migrate({"env": "CartPole-v1", **LACKING}, algo="PPO", drop=True)
    assert sorted(line.partition(":")[0] for line in left.dropped) == sorted(names)
    at = left.report().index("dropped, as was asked:")
    assert left.report()[at + 1 : at + 1 + len(names)] == [f"  {line}" for line in left.dropped]


def test_what_one_policy_alone_would_learn_by_is_not_dropped_either():
    given = {"env": "CartPole-v1", "algorithm_config_overrides_per_module": {"default_policy": {"lr": 1}}}
    with pytest.raises(InputError, match="algorithm_config_overrides_per_module: there is one policy"):
        migrate(given, algo="PPO")
    given["algorithm_config_overrides_per_module"] = {}
    assert migrate(given, algo="PPO").dropped == []


def test_what_rllib_writes_down_by_itself_asks_for_nothing():
    given = {
        "policies": {"default_policy": [None] * 4}, "policy_mapping_fn": "<function AlgorithmConfig.DEFAULT>",
        "input": "sampler", "output": None, "off_policy_estimation_methods": {}, "input_evaluation": ["is", "wis"],
        "model": {"custom_model": None}, "callbacks": {}, "_learner_class": None,
        "learner_class": "<class 'ray.rllib.core.Learner'>",
    }  # fmt: skip
    assert migrate({"env": "CartPole-v1", **given}, algo="PPO").dropped == []


def test_defaults_that_differ_are_told_where_a_file_leaves_them_out():
    found = migrate({"env": "CartPole-v1", "lr": 5e-5, "num_sgd_iter": 30}, algo="PPO").defaults
    said = {line.partition(":")[0]: line for line in found}
    assert said["train_batch_size"] == (
        "train_batch_size: 4000 in RLlib; here rollout.length is null: for RLlib's set rollout.length: 500"
    )
    assert said["minibatch_size"].endswith("here algo.num_minibatches is 4: for RLlib's set algo.num_minibatches: 32")
    assert {"lambda", "clip_param", "vf_clip_param", "vf_loss_coeff", "kl_coeff", "grad_clip"} <= set(said)
    assert not {"lr", "num_epochs", "gamma", "entropy_coeff"} & set(said)


@pytest.mark.parametrize("source", defaults.DEFAULTS)
def test_with_rllibs_defaults_given_none_differs(source):
    """Each line says what would do: with all of it set, nothing is left to say."""
    given = {"env": "Pendulum-v1" if source in ("sac", "td3", "ddpg", "cql", "iql") else "CartPole-v1"}
    given |= {"input": "data"} if source in ("bc", "marwil", "cql", "iql") else {}
    assert migrate(given, algo=source).defaults
    assert migrate({**given, **defaults.DEFAULTS[source]}, algo=source).defaults == []


# ---------------------------------------------------------------- batches


def test_batch_of_workers_and_environments():
    cfg = config.from_dict(
        ours("PPO", num_rollout_workers=3, num_envs_per_worker=4, train_batch_size=4000, sgd_minibatch_size=500)
    )
    # 4000 / 12 = 333.3: 333 steps, 3996 rows; 3996 / 500 = 8, and 4 and 9 are the divisors beside it
    assert (cfg.env.num_envs, cfg.env_runners.num, cfg.rollout.length, cfg.algo.num_minibatches) == (12, 3, 333, 9)


@pytest.mark.parametrize(("workers", "envs"), [(0, 8), (2, 8), (3, 9), (7, 7), (32, 32)])
def test_workers_share_about_as_many_environments_as_there_are_without(workers, envs):
    """Nobody said how many each has: jrl's default, 8, as near as they can share it."""
    assert config.from_dict(ours("PPO", num_workers=workers)).env.num_envs == envs
    assert ours("PPO", num_workers=workers, num_envs_per_worker=1)["env"]["num_envs"] == max(1, workers)
    (said,) = [line for line in lines("PPO", num_workers=workers) if "env.num_envs" in line]
    assert ("the nearest to 8" in said) == (envs != 8)


def test_what_is_not_set_stays_ours():
    assert ours("DQN") == {"algo": {"name": "dqn"}, "env": {"id": "CartPole-v1"}}


@pytest.mark.parametrize(
    ("given", "length", "minibatches"),
    [
        ({"rollout_fragment_length": 40}, 40, 1),
        ({"train_batch_size": 640}, 80, 1),  # 8 environments, jrl's default
        ({"rollout_fragment_length": 40, "train_batch_size": 80}, 40, 4),  # 320 rows, 2 sequences at a time
        ({"rollout_fragment_length": 40, "train_batch_size": 640}, 40, 1),  # more than there is
        ({"rollout_fragment_length": 40, "train_batch_size": 320, "minibatch_size": 160}, 40, 2),
    ],
)
def test_impala_learns_from_sequences_of_a_fragment(given, length, minibatches):
    cfg = config.from_dict(ours("IMPALA", **given))
    assert (cfg.rollout.length, cfg.algo.num_minibatches) == (length, minibatches)


@pytest.mark.parametrize(
    ("given", "train_every", "updates"),
    [
        ({"num_envs_per_worker": 1, "rollout_fragment_length": 4}, 4, 1),
        ({"num_workers": 2, "num_envs_per_worker": 3, "rollout_fragment_length": 4}, 24, 1),
        ({"rollout_fragment_length": 4}, 8, 2),  # one environment in RLlib, eight here: the ratio counts
        ({"rollout_fragment_length": 4, "num_workers": 3}, 36, 3),  # three, and nine
        ({"rollout_fragment_length": 3}, 24, 8),
        # 64 rows learned from per step with batches of 32: 2 updates per step
        ({"num_envs_per_worker": 1, "train_batch_size": 32, "training_intensity": 64}, 1, 2),
        ({"num_workers": 0, "train_batch_size": 32, "training_intensity": 64}, 8, 16),
        # 1 row per step: an update of 32 after 32 steps, that is 8 fragments of 4
        ({"num_workers": 0, "train_batch_size": 32, "rollout_fragment_length": 4, "training_intensity": 1}, 32, 1),
    ],
)
def test_replay_learns_after_each_round_of_fragments(given, train_every, updates):
    cfg = config.from_dict(ours("DQN", **given))
    assert (cfg.replay.train_every, Sizes(cfg).updates) == (train_every, updates)


def test_devices_share_the_environments():
    given = {
        "num_workers": 2,
        "num_envs_per_worker": 4,
        "num_gpus": 4,
        "train_batch_size": 96,
        "sgd_minibatch_size": 10,
    }
    cfg = config.from_dict(ours("PPO", **given))
    # 24 rows on each device: of 8, 12 and 24 minibatches the first has 12 rows, nearest to 10
    assert (cfg.devices.learners, cfg.algo.num_minibatches) == ((0, 1, 2, 3), 8)
    assert ours("PPO", **given, _fake_gpus=True)["devices"] == {"fake": 4}
    assert "devices" not in ours("PPO", num_workers=3, num_gpus=2)


# ---------------------------------------------------------------- hyper-parameters


@pytest.mark.parametrize("row", TABLE["hyper-parameters"], ids=str)
def test_hyper_parameters(row):
    found = ours(row["algo"], **row["given"])["algo"]
    assert found.pop("name") == {"DDPG": "td3"}.get(row["algo"], row["algo"].lower())
    assert found == row["becomes"]


def test_networks_of_policy_and_critics_are_the_policys():
    both = {"actor_hiddens": [400, 300], "critic_hiddens": [64], "model": {"fcnet_hiddens": [8]}}
    assert ours("TD3", **both)["network"] == {"hidden": [400, 300], "critic_hidden": [64]}
    assert ours("TD3", critic_hiddens=[8])["network"] == {"hidden": [8]}
    assert ours("TD3", **both | {"critic_hiddens": [400, 300]})["network"] == {"hidden": [400, 300]}


def test_annealing_of_the_importance_weights():
    given = {"prioritized_replay": True, "prioritized_replay_beta": 0.4, "final_prioritized_replay_beta": 1.0}
    found = ours("DQN", **given, prioritized_replay_beta_annealing_timesteps=20000)["replay"]
    assert found == {"prioritized": True, "priority_beta": [[0, 0.4], [20000, 1.0]]}
    assert "priority_beta" not in ours("DQN", **given)["replay"]


def test_priorities_without_a_type_mean_a_prioritized_buffer():
    assert ours("DQN", replay_buffer_config={"alpha": 0.7})["replay"] == {"priority_alpha": 0.7, "prioritized": True}
    uniform = {"type": "EpisodeReplayBuffer", "alpha": 0.7}
    assert ours("DQN", replay_buffer_config=uniform)["replay"] == {"priority_alpha": 0.7}


@pytest.mark.parametrize("name", ["ReservoirReplayBuffer", "my_project.replay.Recent"])
def test_a_buffer_of_another_kind_is_not_taken_for_a_uniform_one(name):
    given = {"type": name}
    assert any("replay_buffer_config.type: lacking: " in line for line in lines("DQN", replay_buffer_config=given))
    assert "replay" not in ours("DQN", replay_buffer_config=given)


def test_the_newest_name_counts():
    assert ours("PPO", num_sgd_iter=3, num_epochs=5)["algo"]["num_epochs"] == 5
    assert "num_sgd_iter: dropped: num_epochs is given, too" in lines("PPO", num_sgd_iter=3, num_epochs=5)
    assert ours("PPO", num_sgd_iter=3, num_epochs=-1)["algo"]["num_epochs"] == 3


# ---------------------------------------------------------------- environments, stop, the user's own


class Environment:
    """A class that is given, not named."""


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


@pytest.mark.parametrize("row", TABLE["stop"], ids=str)
def test_stop_criteria(row):
    given = {"run": "PPO", "env": "CartPole-v1", "stop": row["given"]}
    found = migrate({**given, "config": {"num_workers": 2, "train_batch_size": 200}})
    assert found.config["stop"] == row["becomes"]


def test_the_users_own_functions():
    found = ours("PPO", callbacks=Environment, env_task_fn="a.b.c", custom_evaluation_function="a.b:c")["custom"]
    assert found == {"callbacks": [f"{__name__}:Environment"], "env_task": "a.b:c", "evaluation": "a.b:c"}
    assert any(
        line.startswith("env_task_fn: lacking: expected the path of a class or function")
        for line in lines("PPO", env_task_fn="<lambda>")
    )


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"output": "out", "output_max_file_size": 2**21}, {"path": "out", "max_file_mb": 2.0}),
        ({"output": "logdir", "output_compress_columns": []}, {"path": None, "compress": False}),
        (
            {"output": "dataset", "output_config": {"path": "a/b", "format": "json"}},
            {"path": "a/b", "format": "rllib-json"},
        ),
        ({"output": None, "output_max_file_size": 3}, None),
    ],
)
def test_output(given, becomes):
    assert ours("PPO", **given).get("data", {}).get("output") == becomes


def test_output_elsewhere_is_lacking():
    told = "output: data.output.path: expected a directory of this machine, got 's3://bucket/a'"
    assert errors({"env": "CartPole-v1", "output": "s3://bucket/a"}, algo="PPO")[0].startswith(told)


def test_evaluation_has_environments_and_exploration_of_its_own():
    inner = {"env": "Pong-v5", "explore": True, "exploration_config": {"type": "Random"}, "lr": 1.0, "foo": 2}
    found = ours("DQN", evaluation_config=inner)["evaluation"]
    assert found == {
        "explore": True,
        "config": {"env": {"id": "Pong-v5"}, "algo": {"exploration": {"name": "random"}}},
    }
    said = lines("DQN", evaluation_config=inner)
    assert any(line.startswith("evaluation_config.lr: dropped: ") for line in said)
    assert any(line.startswith("evaluation_config.foo: unknown") for line in said)


# ---------------------------------------------------------------- what is not RLlib's, what is wrong


def test_our_own_configs_do_not_look_like_rllib():
    files = sorted((HERE.parent / "configs").glob("*.yaml"))
    assert files
    for file in files:
        assert not looks_like_rllib(schema.read_yaml(file)), file
    assert not looks_like_rllib({})
    assert not looks_like_rllib({"stop": {"env_steps": 5}})
    assert not looks_like_rllib({"env": {"id": "CartPole-v1"}, "lr": 3})
    assert not looks_like_rllib({"algo": {"name": "ppo"}, "num_workers": 3})


@pytest.mark.parametrize(
    "data",
    [
        {"num_env_runners": 8},
        {"env": "CartPole-v1"},
        {"run": "PPO", "env": "CartPole-v1"},
        {"name": {"run": "PPO", "env": "CartPole-v1", "config": {}}},
        {"model": {"fcnet_hiddens": [8]}},
    ],
)
def test_rllib_in_every_shape(data):
    assert looks_like_rllib(data)


TWO = {
    name: {"run": "PPO", "env": "CartPole-v1", "config": {"gamma": gamma}} for name, gamma in (("a", 0.5), ("b", 0.6))
}


def test_all_errors_at_once():
    assert len(errors({"num_workers": "two", "train_batch_size": 0.5, "num_sgd_iter": 2}, algo="PPO")) == 3


def test_one_of_several_experiments():
    assert migrate(TWO, name="b").config["algo"] == {"name": "ppo", "gamma": 0.6}


# ---------------------------------------------------------------- the table


def test_every_documented_key_has_an_entry():
    assert len(set(COMMON_CONFIG)) == 97
    assert [name for name in (*COMMON_CONFIG, *ALGORITHM_CONFIG) if name not in table.KEYS] == []


def test_a_key_without_a_counterpart_has_the_reason():
    assert [key.name for key in table.KEYS.values() if not key.ours and not key.note] == []


def test_names_are_in_the_table_once():
    names = [name for group in table.GROUPS.values() for key in group for name in key.names]
    assert len(names) == len(set(names))


def test_our_keys_exist():
    sections = {f.name: f for f in dataclasses.fields(RunConfig)}
    hyper = {f.name for name in algos.names() for f in dataclasses.fields(algos.get_config_class(name))}
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
