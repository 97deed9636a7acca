"""jrl.migrate: RLlib's LSTM and attention, its sequences, and R2D2."""

import pytest

from jrl import config
from jrl.config import plan
from jrl.migrate import migrate
from jrl.run import preflight

RECURRENT_PPO = {
    "run": "PPO",
    "env": "ray.rllib.examples.env.repeat_after_me_env.RepeatAfterMeEnv",
    "stop": {"episode_reward_mean": 50, "timesteps_total": 100_000},
    "config": {
        "env_config": {"config": {"repeat_delay": 2}},
        "gamma": 0.9,
        "lr": 3e-4,
        "num_workers": 0,
        "num_envs_per_worker": 20,
        "num_sgd_iter": 5,
        "entropy_coeff": 1e-5,
        "model": {
            "lstm_cell_size": 64, "use_lstm": True, "max_seq_len": 20, "fcnet_hiddens": [64], "vf_share_layers": True,
        },
    },
}  # fmt: skip
R2D2 = {
    "run": "R2D2",
    "env": "ray.rllib.examples.env.stateless_cartpole.StatelessCartPole",
    "stop": {"sampler_results/episode_reward_mean": 150, "timesteps_total": 1_000_000},
    "config": {
        "num_workers": 0,
        "batch_mode": "complete_episodes",
        "replay_buffer_config": {
            "type": "MultiAgentReplayBuffer", "storage_unit": "sequences", "replay_burn_in": 10,
            "zero_init_states": True, "capacity": 5000,
        },
        "lr": 0.0005,
        "exploration_config": {"epsilon_timesteps": 50_000},
        "model": {
            "fcnet_hiddens": [64], "fcnet_activation": "linear", "use_lstm": True, "lstm_cell_size": 64,
            "max_seq_len": 20,
        },
    },
}  # fmt: skip
LSTM = {"use_lstm": True}


def ours(algo, model=None, **given):
    return migrate({"env": "CartPole-v1", **given, **({"model": model} if model else {})}, algo=algo).config


def lines(algo, model, **given):
    return migrate({"env": "CartPole-v1", **given, "model": model}, algo=algo, drop=True).lines


def test_recurrent_ppo():
    found = migrate(RECURRENT_PPO)
    assert found.config == {
        "algo": {"name": "ppo", "gamma": 0.9, "num_epochs": 5, "ent_coef": 1e-5},
        "env": {"id": "RepeatAfterMe-v0", "num_envs": 20, "options": {"delay": 2}},
        # 16 and 32 divide a rollout of 128: 20 / 16 < 32 / 20
        "network": {"hidden": [64], "shared": True, "max_seq_len": 16, "core": {"name": "lstm", "size": 64}},
        "stop": {"episode/return": 50, "env_steps": 100_000},
    }
    note = "the nearest divisor of a rollout's 128 steps, not 20"
    assert f"model.max_seq_len -> network.max_seq_len: 16  ({note})" in found.lines
    preflight.check(config.from_dict(found.config))


def test_r2d2():
    found = migrate(R2D2)
    assert found.config == {
        "algo": {
            "name": "dqn", "double": True, "dueling": True, "value_rescaling": True,
            "exploration": {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [50_000, 0.02]]},
        },
        "env": {"id": "StatelessCartPole-v1"},
        "network": {"hidden": [64], "max_seq_len": 20, "core": {"name": "lstm", "size": 64}},
        # 1000 rows of sequences of 10 + 20 steps: 34; 150 rows per step: an update of 1000 for 7 steps, and 8 x 7 of 8
        "replay": {"burn_in": 10, "batch_size": 34, "train_every": 56, "updates_per_step": 1 / 7},
        "stop": {"episode/return": 150, "env_steps": 1_000_000},
    }  # fmt: skip
    assert "replay_buffer_config.capacity -> replay.capacity: 100000  (5000 sequences of 20 steps; jrl's default)" in (
        found.lines
    )
    assert "batch_mode: dropped: sequences from replay end with their episodes by themselves" in found.lines
    preflight.check(config.from_dict(found.config))


def test_the_name_r2d2_is_enough():
    found = ours("R2D2", train_batch_size=640, training_intensity=0)
    assert found["network"] == {"core": {"name": "lstm"}}
    assert found["replay"] == {"prioritized": True, "batch_size": 32}  # jrl's burn_in is no part of RLlib's sequences
    assert ours("R2D2", {"use_attention": True})["network"] == {"core": {"name": "gtrxl"}}
    assert "value_rescaling" not in ours("R2D2", use_h_function=False)["algo"]
    assert "h_function_epsilon: dropped: 0.001 in jrl, as in the paper" in lines("R2D2", LSTM, h_function_epsilon=0.1)


def test_sac_with_memory_in_the_keys_of_its_networks():
    inner = {"use_lstm": True, "lstm_cell_size": 32, "fcnet_hiddens": [16], "lstm_use_prev_action": True}
    found = ours("RNNSAC", {"max_seq_len": 8}, policy_model_config=inner, q_model_config=inner)
    assert found["network"] == {
        "hidden": [16], "max_seq_len": 8, "use_prev_action": True, "core": {"name": "lstm", "size": 32},
    }  # fmt: skip
    assert found["replay"] == {"batch_size": 32}  # 256 rows / 8


def test_attention():
    model = {
        "use_attention": True, "attention_dim": 48, "attention_num_transformer_units": 2, "attention_num_heads": 4,
        "attention_head_dim": 16, "attention_memory_inference": 40, "attention_memory_training": 30,
        "attention_position_wise_mlp_dim": 96, "attention_init_gru_gate_bias": 1.5, "attention_use_n_prev_actions": 2,
        "attention_use_n_prev_rewards": 0, "lstm_cell_size": 9,
    }  # fmt: skip
    cfg = config.from_dict(ours("PPO", model))
    core = cfg.network.core
    assert (core.name, core.size, core.layers, core.heads, core.head_size) == ("gtrxl", 48, 2, 4, 16)
    assert (core.memory, core.mlp, core.gate_bias) == (40, 96, 1.5)
    assert (cfg.network.use_prev_action, cfg.network.use_prev_reward) == (True, False)
    said = lines("PPO", model)
    assert any(line.startswith("model.attention_memory_training: dropped") for line in said)
    assert "model.lstm_cell_size: dropped: use_lstm is off" in said


@pytest.mark.parametrize("model", [{"max_seq_len": 20}, {"use_lstm": False, "lstm_cell_size": 4, "attention_dim": 3}])
def test_without_a_switch_there_is_no_memory(model):
    assert "network" not in ours("PPO", model)
    assert any("there is no memory" in line for line in lines("PPO", model))
    assert ours("DQN", replay_buffer_config={"replay_burn_in": 4, "capacity": 70}).get("replay") == {"capacity": 70}


@pytest.mark.parametrize(
    ("envs", "given", "length", "sequence", "minibatches"),
    [
        (20, {"train_batch_size": 2000}, 100, 20, 4),
        (20, {"train_batch_size": 2000, "sgd_minibatch_size": 250}, 100, 20, 10),  # 100 sequences; 8 would cut them
        (1, {"train_batch_size": 4000, "sgd_minibatch_size": 128}, 4000, 20, 40),  # 200 sequences, 5 in each
        (3, {}, 128, 16, 4),  # 8 of each environment
        (3, {"rollout_fragment_length": 20}, 20, 20, 3),  # one of each: 4 would cut them
        (3, {"rollout_fragment_length": 94}, 94, 2, 0),  # 2 and 47 divide it
    ],
)
def test_minibatches_are_of_whole_sequences(envs, given, length, sequence, minibatches):
    seq_len = 5 if sequence == 2 else 20
    cfg = config.from_dict(ours("PPO", {**LSTM, "max_seq_len": seq_len}, num_envs_per_worker=envs, **given))
    assert (cfg.rollout.length or plan.LENGTH, cfg.network.max_seq_len) == (length, sequence)
    parts = length // sequence
    found = cfg.algo.num_minibatches
    assert found == (minibatches or found) and (parts * envs) % found == 0


def test_sequences_of_impala_are_as_given():
    cfg = config.from_dict(ours("IMPALA", {**LSTM, "max_seq_len": 20}, rollout_fragment_length=50))
    assert (cfg.rollout.length, cfg.network.max_seq_len, cfg.network.core.name) == (50, 20, "lstm")


@pytest.mark.parametrize("key", ["custom_model", "custom_model_config"])
def test_a_model_for_torch_is_told_how_it_becomes_one_for_jax(key):
    (line,) = [line for line in lines("PPO", {key: "my.models.Net"}) if line.startswith(f"model.{key}: ")]
    assert "network.torso" in line


def test_masks_are_read_by_their_name():
    assert "action_mask_key: dropped: action_mask: as in jrl" in lines("PPO", LSTM, action_mask_key="action_mask")
    said = lines("PPO", LSTM, action_mask_key="legal")
    assert any(x.startswith("action_mask_key: lacking: name the item of the observation action_mask") for x in said)


def test_an_environment_of_rllib_that_jrl_has_not_stays_a_class():
    continuous = {**RECURRENT_PPO, "config": {"env_config": {"continuous": True}}}
    assert migrate(continuous).config["env"] == {
        "id": "ray.rllib.examples.env.repeat_after_me_env:RepeatAfterMeEnv", "options": {"continuous": True},
    }  # fmt: skip
