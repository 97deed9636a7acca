"""jrl.migrate: RLlib's configurations of every generation as ours, line by line."""

import dataclasses
import json
from pathlib import Path

import pytest

from jrl import algos, train
from jrl import config as command
from jrl.errors import InputError
from jrl.fields.hyper import Gtrxl, Lstm
from jrl.fields.schema import read_mapping
from jrl.migrate import defaults, looks_like_rllib, main, migrate, tables
from jrl.settings import config, plan
from jrl.settings.sections import RunConfig

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "rllib"
ALGO = {"old_dict.yaml": "A2C", "impala.yaml": "IMPALA", "params.json": "APPO"}  # of those that do not name it

# every key of the old trainer's common config, without those inside the TensorFlow session's arguments
COMMON_CONFIG = (FIXTURES / "common_config.txt").read_text().split()
# every argument of the groups of AlgorithmConfig
ALGORITHM_CONFIG = (FIXTURES / "algorithm_config.txt").read_text().split()
EXPECTED = {
    "old_dict.yaml": {
        "algo": {
            "name": "a2c", "gamma": 0.95, "vf_coef": 0.25, "max_grad_norm": 5.0,
            "ent_coef": [[0, 0.01], [1000, 0.01], [100000, 0.0]],
        },
        "env": {
            "id": "CartPole-v0", "num_envs": 10, "horizon": 200, "no_done_at_end": False, "clip_rewards": [-1, 1],
            "remote_worker_envs": True, "batch_wait_ms": 2,
        },
        "rollout": {"length": 50},  # 500 / (2 x 5)
        "evaluation": {"interval": 2, "duration": 30, "num_env_runners": 1},
        "env_runners": {
            "num": 2, "ignore_env_runner_failures": True, "compress_observations": True, "num_cpus": 0.5,
            "custom_resources": {"box": 1}, "placement": "SPREAD",
        },
        "run": {"report_every_s": 5, "report_every": 1200, "seed": 3},
        "custom": {"env_task": "my_project.tasks:next_task", "evaluation": "my_project.evaluation:evaluate"},
    },
    "cartpole-ppo.yaml": {
        "algo": {
            "name": "ppo", "gae_lambda": 0.9, "normalize_obs": True, "num_minibatches": 8, "num_epochs": 6,
            "vf_coef": 0.02, "value_clip_eps": 5.0, "kl_coef": 0.2, "clip_eps": 0.3,
        },
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "network": {"hidden": [32], "shared": True},
        "rollout": {"length": 250},
        "env_runners": {"num": 1},
        "checkpoint": {"every": 5000, "keep_last": 2},
        "stop": {"episode/return": 150, "env_steps": 100000},
    },
    "pong-dqn.yaml": {
        "algo": {
            "name": "dqn", "gamma": 0.98, "lr": 1e-4, "adam_eps": 0.00015, "double": True, "dueling": True,
            "target_update_every": 1000, "max_grad_norm": 40,  # 8000 steps, an update after each 8
            "exploration": {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [200000, 0.01]]},
        },
        "env": {"id": "PongNoFrameskip-v4", "num_envs": 2},
        "network": {"head_hidden": [512]},
        "replay": {
            "n_step": 3, "train_every": 8, "updates_per_step": 0.125, "batch_size": 64, "learning_starts": 10000,
            "prioritized": True, "capacity": 200000, "priority_alpha": 0.5, "priority_beta": 0.5,
        },
        "run": {"report_every": 1000},
        "evaluation": {"interval": 10, "duration": 20, "config": {"env": {"options": {"frameskip": 4}}}},
        "stop": {"episode/return": 20, "time_s": 7200, "env_steps": 300000},
    },
    "pendulum-sac.yaml": {
        "algo": {
            "name": "sac", "tau": 0.01, "ent_coef": 0.5, "actor_lr": 3e-4, "lr": 5e-4, "ent_coef_lr": 1e-4,
        },
        "env": {"id": "Pendulum-v1", "horizon": 100, "no_done_at_end": True, "clip_actions": False},
        "network": {"hidden": [128, 128], "activation": "relu"},
        "replay": {
            # 256 rows learned from per step / 128 rows of an update = 2 updates per step
            "n_step": 2, "train_every": 8, "updates_per_step": 2.0, "batch_size": 128, "capacity": 50000,
            "prioritized": True, "learning_starts": 500,
        },
        "run": {"report_every": 1000, "smoothing_episodes": 5},
        "stop": {"evaluation/return": -300, "env_steps": 20000},
    },
    "impala.yaml": {
        "algo": {
            "name": "impala", "num_minibatches": 2, "lr": [[0, 0.0005], [20000000, 0.0]], "clip_rho": 2.0,
            "ent_coef": [[0, 0.01], [1000000, 0.001]], "max_grad_norm": None, "max_leaf_norm": 40.0,
        },
        "env": {
            "id": "ALE/Breakout-v5", "num_envs": 32, "clip_rewards": True,
            "options": {"frameskip": 1, "full_action_space": False},
        },
        "rollout": {"length": 50},
        "env_runners": {"num": 4, "num_cpus": 2, "recreate_failed_env_runners": True, "sample_timeout_s": 30},
        "devices": {"learners": [0, 1]},
        "run": {"report_every": 1600, "report_every_s": 10, "seed": 7},
        "evaluation": {
            "interval": 1, "duration": "auto", "unit": "timesteps", "parallel": True, "num_env_runners": 2,
        },
        "custom": {"callbacks": ["my_project.callbacks:Metrics"]},
    },
    "params.json": {
        "algo": {
            "name": "appo", "num_epochs": 2, "max_grad_norm": None, "kl_coef": 0.2, "kl_target": 0.02,
            "target_update_every": 2, "tau": 0.5,  # 4 minibatches of 128 are the default
        },
        "env": {"id": "my_project.envs:Corridor", "num_envs": 1, "options": {"length": 7}},
        "network": {
            "hidden": [64, 32], "activation": "silu", "state_dependent_std": True, "core": {"name": "lstm"},
            "max_seq_len": 16,
        },
        "rollout": {"length": 512, "batch_mode": "complete_episodes"},
        "run": {"log_level": "INFO", "keep_per_episode_metrics": True},
    },
}  # fmt: skip

CARTPOLE_LINES = """
run -> algo.name: ppo
lr: the first of [0.0003, 0.001]: jrl.api.tune takes {"grid_search": [...]} and runs all
env -> env.id: CartPole-v1
framework: dropped: JAX is the only framework
gamma -> algo.gamma: 0.99  (jrl's default)
lr -> algo.lr: 0.0003  (jrl's default)
lambda -> algo.gae_lambda: 0.9
num_workers -> env_runners.num: 1  (processes by Ray; 0 is faster where stepping is cheap)
num_envs_per_worker -> env.num_envs: 4  (4 x 1 runners)
observation_filter -> algo.normalize_obs: true
train_batch_size -> rollout.length: 250  (4 environments x 250 steps = 1000 rows)
sgd_minibatch_size -> algo.num_minibatches: 8  (the nearest that divides 1000 rows: 8 x 125 rows, not 128)
num_sgd_iter -> algo.num_epochs: 6
vf_loss_coeff -> algo.vf_coef: 0.02  (2 x 0.01, of half the squared error)
vf_clip_param -> algo.value_clip_eps: 5.0  (RLlib bounds the squared error by 25, jrl how far the value moves)
kl_coeff -> algo.kl_coef: 0.2  (it stays so: algo.kl_target would adapt it)
clip_param -> algo.clip_eps: 0.3
model.fcnet_hiddens -> network.hidden: [32]
model.fcnet_activation: dropped: linear: choose network.activation of tanh, relu, gelu, elu, silu
model.vf_share_layers -> network.shared: true
stop.episode_reward_mean -> stop.episode/return: 150
stop.timesteps_total -> stop.env_steps: 100000
checkpoint_freq -> checkpoint.every: 5000  (5 iterations of 1000 steps)
checkpoint_at_end: dropped: the end of a run always has a checkpoint
keep_checkpoints_num -> checkpoint.keep_last: 2
num_samples: dropped: for Tune: see jrl.api.tune
""".strip().splitlines()


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


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_becomes_the_tree_that_it_means(name):
    data = read_mapping(FIXTURES / name)
    assert looks_like_rllib(data)
    found = migrate(data, algo=ALGO.get(name), drop=True)
    assert found.config == EXPECTED[name]
    cfg = config.from_dict(found.config)
    # what was left out, because it is a default, is one
    assert config.from_dict(config.to_dict(cfg)) == cfg


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_has_a_line(name):
    data = read_mapping(FIXTURES / name)
    said = migrate(data, algo=ALGO.get(name), drop=True).lines
    for key in keys_of(data):
        assert any(line.startswith((f"{key} -> ", f"{key}: ")) for line in said), key


def test_lines_of_a_tuned_example():
    assert migrate(read_mapping(FIXTURES / "cartpole-ppo.yaml")).lines == CARTPOLE_LINES


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pendulum-sac.yaml", "batch_mod: unknown: the nearest is batch_mode, which is rollout.batch_mode here"),
        ("pendulum-sac.yaml", "lr: dropped: critic_lr takes its place"),
        ("pendulum-sac.yaml", "optimization.critic_learning_rate -> algo.lr: 0.0005"),
        ("impala.yaml", "policies: lacking: multi-agent training is not part of jrl yet"),
        ("impala.yaml", "input: lacking: jrl does not read or write offline data yet"),
        ("impala.yaml", "_tf_new_switch: dropped: an inner switch of RLlib"),
        ("impala.yaml", "train_batch_size -> algo.num_minibatches: 2  (2 x 800 rows)"),
        ("params.json", "num_workers: dropped: -1: not set"),
        ("params.json", "multiagent.policies: dropped: there is one policy"),
        ("params.json", "callbacks: dropped: RLlib's own, which does nothing"),
        ("params.json", "seed: dropped: null: not set"),
        ("params.json", "APPO's model.max_seq_len -> network.max_seq_len: 16  (the nearest that divides a rollout of "
                        "512 steps, not 20)"),
        ("params.json", "model.use_lstm -> network.core.name: lstm  (policy and value have one each: network.shared "
                        "true makes it one, as in RLlib's old models)"),
        ("params.json", "minibatch_size -> algo.num_minibatches: 4  (the nearest that divides 512 rows: "
                        "4 x 128 rows, not 100; jrl's default)"),
        ("pong-dqn.yaml", "evaluation_config.explore -> evaluation.explore: false"),
        ("pong-dqn.yaml", 'evaluation_config.env_config -> evaluation.config.env.options: {"frameskip": 4}'),
        ("pong-dqn.yaml", "stop.training_iteration -> stop.env_steps: 300000  (300 iterations of 1000 steps)"),
    ],
)  # fmt: skip
def test_line(name, line):
    assert line in migrate(read_mapping(FIXTURES / name), algo=ALGO.get(name), drop=True).lines


def test_a_config_with_a_stop_can_be_run_as_it_is(tmp_path):
    path = tmp_path / "new.yaml"
    path.write_text(config.schema.dump(migrate(read_mapping(FIXTURES / "cartpole-ppo.yaml")).config))
    cfg = config.load(path)
    assert plan.batch_plan(cfg) == plan.BatchPlan(rows=1000, minibatch=125, updates=48, iterations=100)


# ---------------------------------------------------------------- what jrl does not have


LACKING = {
    "policies": {"a": None, "b": None}, "input": "/data", "output": "/data", "learner_class": "my.Learner",
    "off_policy_estimation_methods": {"is": {}},
    "model": {"custom_model": "mine", "custom_action_dist": "mine"},
    "callbacks": "<lambda>", "nonsense_key": 1,
}  # fmt: skip


def test_what_jrl_does_not_have_is_an_error_unless_it_is_to_be_dropped():
    found = errors({"env": "CartPole-v1", **LACKING}, algo="PPO")
    names = [name for name in LACKING if name != "model"] + ["model.custom_model", "model.custom_action_dist"]
    assert sorted(line.partition(":")[0] for line in found) == sorted(names)
    assert all(line.endswith("remove it, or let --drop do so") for line in found)
    left = migrate({"env": "CartPole-v1", **LACKING}, algo="PPO", drop=True)
    assert sorted(line.partition(":")[0] for line in left.dropped) == sorted(names)
    at = left.told().index("dropped, as was asked:")
    assert left.told()[at + 1 : at + 1 + len(names)] == [f"  {line}" for line in left.dropped]


def test_what_one_policy_alone_would_learn_by_is_not_dropped_either():
    given = {"env": "CartPole-v1", "algorithm_config_overrides_per_module": {"default_policy": {"lr": 1}}}
    with pytest.raises(InputError, match="algorithm_config_overrides_per_module: multi-agent"):
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
    env = "Pendulum-v1" if source in ("sac", "td3", "ddpg") else "CartPole-v1"
    assert migrate({"env": env}, algo=source).defaults
    assert migrate({"env": env, **defaults.DEFAULTS[source]}, algo=source).defaults == []


# ---------------------------------------------------------------- batches


def test_batch_of_workers_and_environments():
    cfg = config.from_dict(
        ours("PPO", num_rollout_workers=3, num_envs_per_worker=4, train_batch_size=4000, sgd_minibatch_size=500)
    )
    # 4000 / 12 = 333.3: 333 steps, 3996 rows; 3996 / 500 = 8, and 4 and 9 are the divisors beside it
    assert (cfg.env.num_envs, cfg.env_runners.num, cfg.rollout.length, cfg.algo.num_minibatches) == (12, 3, 333, 9)


def test_no_worker_is_one_environment():
    assert ours("PPO", num_workers=0)["env"] == {"id": "CartPole-v1", "num_envs": 1}


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
        ({"num_workers": 0, "rollout_fragment_length": 4}, 4, 1),
        ({"num_workers": 2, "num_envs_per_worker": 3, "rollout_fragment_length": 4}, 24, 1),
        ({"rollout_fragment_length": 4}, 8, 2),  # one environment in RLlib, eight here: the ratio counts
        ({"rollout_fragment_length": 3}, 24, 8),
        # 64 rows learned from per step with batches of 32: 2 updates per step
        ({"num_workers": 0, "train_batch_size": 32, "training_intensity": 64}, 1, 2),
        # 1 row per step: an update of 32 after 32 steps, that is 8 fragments of 4
        ({"num_workers": 0, "train_batch_size": 32, "rollout_fragment_length": 4, "training_intensity": 1}, 32, 1),
    ],
)
def test_replay_learns_after_each_round_of_fragments(given, train_every, updates):
    cfg = config.from_dict(ours("DQN", **given))
    assert (cfg.replay.train_every, plan.batch_plan(cfg).updates) == (train_every, updates)


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

SOFT_Q = {"type": "SoftQ", "temperature": 0.5}
EVERY_FOURTH = {"num_workers": 0, "rollout_fragment_length": 4}  # an update after each four steps


@pytest.mark.parametrize(
    ("algo", "given", "expected"),
    [
        ("PPO", {"lr": 0.1, "lr_schedule": [[0, 0.2], [10, 0.0]]}, {"lr": [[0, 0.2], [10, 0.0]]}),
        ("PPO", {"lr_schedule": [[5, 0.2], [10, 0.0]]}, {"lr": [[0, 0.2], [5, 0.2], [10, 0.0]]}),
        ("PPO", {"lr": "1e-3"}, {"lr": "1e-3"}),
        ("PPO", {"vf_loss_coeff": 0.5}, {"vf_coef": 1.0}),
        ("A2C", {"vf_loss_coeff": 1.0}, {"vf_coef": 1.0}),
        ("PPO", {"use_gae": False, "lambda": 0.3}, {"gae_lambda": 1.0}),
        ("PPO", {"kl_coeff": 0.0, "kl_target": 0.01}, {}),
        ("PPO", {"kl_target": 0.01}, {"kl_coef": 0.2, "kl_target": 0.01}),
        ("PPO", {"use_kl_loss": False, "kl_coeff": 0.3}, {}),
        ("APPO", {"kl_coeff": 0.3}, {}),
        ("APPO", {"use_kl_loss": True, "kl_coeff": 0.3}, {"kl_coef": 0.3}),
        ("APPO", {"lambda": 0.7}, {}),
        ("PPO", {"grad_clip": 3.0, "grad_clip_by": "value"}, {"max_grad_value": 3.0, "max_grad_norm": None}),
        ("PPO", {"grad_clip": None}, {"max_grad_norm": None}),
        ("SAC", {"grad_clip": 3.0, "grad_clip_by": "norm"}, {"max_leaf_norm": 3.0}),
        ("PPO", {"observation_filter": "MeanStdFilter"}, {"normalize_obs": True}),
        ("DQN", {"observation_filter": "MeanStdFilter"}, {"normalize_obs": True}),
        ("DQN", {"num_atoms": 11, "v_min": -1}, {"head": "c51", "num_atoms": 11, "v_min": -1}),
        ("DQN", {"noisy": True, "sigma0": 0.2}, {"noisy": True, "noisy_sigma": 0.2}),
        ("DQN", {"epsilon": 0.1}, {"exploration": {"name": "epsilon_greedy", "epsilon": 0.1}}),
        ("DQN", {"exploration_config": SOFT_Q}, {"exploration": {"name": "soft_q", "temperature": 0.5}}),
        ("DQN", {"optimizer": {"adam_epsilon": 1e-3}}, {"adam_eps": 1e-3}),
        ("DQN", {"target_network_update_freq": 300}, {"target_update_every": 300}),  # one update per step by default
        ("DQN", {**EVERY_FOURTH, "target_network_update_freq": 1000}, {"target_update_every": 250}),
        ("SAC", {"entropy_coeff": 0.3}, {}),
        ("SAC", {"target_entropy": -1, "twin_q": False}, {"target_entropy": -1, "num_critics": 1}),
        ("DDPG", {}, {"num_critics": 1, "policy_every": 1, "target_noise": 0.0}),
        ("DDPG", {"twin_q": True, "policy_delay": 2, "smooth_target_policy": True}, {}),  # which is td3
        ("DDPG", {"target_noise": 0.4}, {"num_critics": 1, "policy_every": 1, "target_noise": 0.0}),
        ("TD3", {"smooth_target_policy": False}, {"target_noise": 0.0}),
        ("TD3", {"critic_lr": 1e-3, "actor_lr": 1e-4, "lr": 9}, {"lr": 1e-3, "actor_lr": 1e-4}),
    ],
)  # fmt: skip
def test_hyper_parameters(algo, given, expected):
    found = ours(algo, **given)["algo"]
    assert found.pop("name") == {"DDPG": "td3"}.get(algo, algo.lower())
    assert found == expected


def test_networks_of_policy_and_critics_are_the_policys():
    both = {"actor_hiddens": [400, 300], "critic_hiddens": [64], "model": {"fcnet_hiddens": [8]}}
    assert ours("TD3", **both)["network"] == {"hidden": [400, 300]}
    assert ours("TD3", critic_hiddens=[8])["network"] == {"hidden": [8]}
    assert "critic_hiddens: dropped: the policy's count, [400, 300], for the critics, too" in lines("TD3", **both)


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


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"env_runners/episode_return_mean": 9}, {"episode/return": 9}),
        ({"evaluation/env_runners/episode_return_mean": 9}, {"evaluation/return": 9}),
        ({"num_env_steps_sampled_lifetime": 500, "timesteps_total": 400}, {"env_steps": 400}),
        ({"training_iteration": 7, "timesteps_total": 10_000}, {"env_steps": 1400}),
        ({"custom_metrics/angle_mean": 1}, {"custom/angle_mean": 1}),
        ({"time_total_s": 60, "info/num_steps_trained": 3}, {"time_s": 60}),
    ],
)
def test_stop_criteria(stop, expected):
    given = {"num_workers": 2, "train_batch_size": 200}
    assert migrate({"run": "PPO", "env": "CartPole-v1", "stop": stop, "config": given}).config["stop"] == expected


def test_the_users_own_functions():
    found = ours("PPO", callbacks=Environment, env_task_fn="a.b.c", custom_evaluation_function="a.b:c")["custom"]
    assert found == {"callbacks": [f"{__name__}:Environment"], "env_task": "a.b:c", "evaluation": "a.b:c"}
    assert any(line.startswith("env_task_fn: lacking: '<lambda>'") for line in lines("PPO", env_task_fn="<lambda>"))


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
        assert not looks_like_rllib(config.schema.read_yaml(file)), file
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
    assert [name for name in (*COMMON_CONFIG, *ALGORITHM_CONFIG) if name not in tables.KEYS] == []


def test_a_key_without_a_counterpart_has_the_reason():
    assert [key.name for key in tables.KEYS.values() if not key.ours and not key.note] == []


def test_names_are_in_the_table_once():
    names = [name for group in tables.GROUPS.values() for key in group for name in key.names]
    assert len(names) == len(set(names))


def test_our_keys_exist():
    sections = {f.name: f for f in dataclasses.fields(RunConfig)}
    hyper = {f.name for name in algos.names() for f in dataclasses.fields(algos.get_config_class(name))}
    default = config.to_dict(config.from_dict({"algo": {"name": "dqn"}, "env": {"id": "x"}}))
    default["network"] |= dict.fromkeys(f"core.{f.name}" for core in (Lstm, Gtrxl) for f in dataclasses.fields(core))
    for key in tables.KEYS.values():
        for ours_ in filter(None, key.ours.split(", ")):
            section, _, field = ours_.partition(".")
            assert section in sections
            assert not field or field in (hyper | {"name"} if section == "algo" else default[section]), ours_


def test_the_page_has_the_table():
    page = (HERE.parent / "docs" / "rllib-users.md").read_text()
    assert tables.markdown() in page


# ---------------------------------------------------------------- the command


def test_command_writes_yaml_that_can_be_read_and_a_line_for_each_key(capsys):
    assert main([str(FIXTURES / "cartpole-ppo.yaml")]) == 0
    out, err = capsys.readouterr()
    assert config.schema.parse(out) == EXPECTED["cartpole-ppo.yaml"]
    assert "num_epochs: 6                         # num_sgd_iter" in out
    assert err.splitlines()[: len(CARTPOLE_LINES)] == CARTPOLE_LINES


def test_command_reads_json_with_what_it_lacks(capsys, tmp_path):
    path = tmp_path / "params.json"
    path.write_text(json.dumps({"num_env_runners": 6}, indent="\t"))
    assert main([str(path), "--algo", "A2C", "--env", "Pong-v5"]) == 0
    found = config.schema.parse(capsys.readouterr().out)
    assert found == {
        "algo": {"name": "a2c"}, "env": {"id": "Pong-v5", "num_envs": 6}, "env_runners": {"num": 6},
    }  # fmt: skip


def test_command_drops_only_when_it_is_told_to(capsys):
    name = str(FIXTURES / "impala.yaml")
    assert main([name, "--algo", "IMPALA"]) == 2
    out, err = capsys.readouterr()
    assert not out and "error: policies: multi-agent training is not part of jrl yet: remove it" in err
    assert main([name, "--algo", "IMPALA", "--drop"]) == 0
    out, err = capsys.readouterr()
    assert config.schema.parse(out) == EXPECTED["impala.yaml"]
    assert "dropped, as was asked:\n  policies: multi-agent training is not part of jrl yet\n" in err
    assert "for RLlib's set network.hidden: [256, 256]" in err


def test_the_flags_of_rllibs_command():
    """`rllib train --run=A2C --config '{...}' --stop '{...}'`, and the same over a file."""
    said = []

    def load(path=None, algo=None, env=None, drop=False, over_it=None, **more):
        data = command.given(path, algo=algo, env=env, drop=drop, over_it=over_it, tell=said.append)
        return config.load(data, algo=algo, env=env, **more)

    given = {"num_workers": 0, "lambda": 0.5}
    stop = ['{"training_iteration": 2, "env_runners": {"episode_return_mean": 150}}']
    cfg = load(None, algo="A2C", env="CartPole-v1", over_it=given, stop=stop)
    assert (cfg.env.num_envs, cfg.algo.gae_lambda) == (1, 0.5)
    assert cfg.stop == {"env_steps": 2000, "episode/return": 150}
    assert "migrated: lambda -> algo.gae_lambda: 0.5" in said
    cfg = load(FIXTURES / "cartpole-ppo.yaml", over_it={"lambda": 0.5, "model": {"fcnet_hiddens": [8]}})
    assert (cfg.algo.gae_lambda, cfg.network.hidden, cfg.network.shared) == (0.5, (8,), True)
    with pytest.raises(InputError, match="is a configuration of jrl: use --set"):
        load(HERE.parent / "configs" / "ppo.yaml", over_it=given)
    with pytest.raises(InputError, match="--drop: there is no configuration of RLlib"):
        load(HERE.parent / "configs" / "ppo.yaml", drop=True)
    with pytest.raises(InputError, match=r"--stop {nonsense: expected metric=number, or JSON"):
        config.load(None, algo="ppo", env="CartPole-v1", stop=["{nonsense"])
    with pytest.raises(InputError, match="--config: expected JSON such as"):
        train._rllib("ppo.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", "expected a mapping"),
        ("{", "not valid"),
        ("algo: {name: ppo}\nenv: {id: CartPole-v1}", "no configuration of RLlib"),
        ("env: CartPole-v1", "--algo"),
    ],
)
@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_command_refuses_bad_input(capsys, tmp_path, text, expected, kind):
    if kind == "json" and text[0] not in "[{":
        text = json.dumps(config.schema.parse(text))
    path = tmp_path / f"old.{kind}"
    path.write_text(text)
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert expected in err
    assert err.count("\n") == 1


def test_command_without_a_file(capsys, tmp_path):
    assert main([str(tmp_path / "params.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err
