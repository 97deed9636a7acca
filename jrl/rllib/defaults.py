"""Defaults of RLlib's algorithms that differ from jrl's."""

from collections.abc import Iterator
from typing import Any

from jrl.fields import schema
from jrl.rllib.table import KEYS
from jrl.rllib.translation import Job, format_value, translate

_WIDE = {"model.fcnet_hiddens": [256, 256]}
_VTRACE = {**_WIDE, "rollout_fragment_length": 50, "train_batch_size": 500}
_SIMPLE_Q = {
    **_WIDE, "train_batch_size": 32, "rollout_fragment_length": 4, "target_network_update_freq": 500,
    "replay_buffer_config.capacity": 50_000, "grad_clip": 40.0, "exploration_config": {"type": "EpsilonGreedy"},
}  # fmt: skip
_DQN = {
    **_SIMPLE_Q, "replay_buffer_config.type": "PrioritizedReplayBuffer", "double_q": True, "dueling": True,
    "hiddens": [256],
}  # fmt: skip
_RATES = {"actor_lr": 3e-4, "alpha_lr": 3e-4}
_SQUASHED = {
    "policy_model_config.fcnet_hiddens": [256, 256], "policy_model_config.fcnet_activation": "relu",
    "replay_buffer_config.type": "PrioritizedReplayBuffer",
}  # fmt: skip
_TD3 = {
    "train_batch_size": 100, "rollout_fragment_length": 1, "critic_lr": 1e-3, "actor_lr": 1e-3,
    "num_steps_sampled_before_learning_starts": 10_000, "replay_buffer_config.capacity": 1_000_000,
    "policy_model_config.fcnet_hiddens": [400, 300], "policy_model_config.fcnet_activation": "relu",
    "exploration_config": {"type": "GaussianNoise"},
}  # fmt: skip
_DATA = {"train_batch_size": 2000, "actions_in_input_normalized": False}
# RLlib's name of an algorithm -> newest name of a key -> RLlib's default, if jrl's default differs
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {
        **_WIDE, "lr": 5e-5, "train_batch_size": 4000, "minibatch_size": 128, "num_epochs": 30, "lambda": 1.0,
        "clip_param": 0.3, "vf_clip_param": 10.0, "vf_loss_coeff": 1.0, "kl_coeff": 0.2, "kl_target": 0.01,
        "grad_clip": None,
    },
    "a2c": {**_WIDE, "lr": 1e-4, "grad_clip": 40.0, "rollout_fragment_length": 20},
    "impala": {**_VTRACE, "lr": 5e-4},
    "appo": {
        **_VTRACE, "grad_clip": 40.0, "entropy_coeff": 0.01, "num_epochs": 1, "clip_param": 0.4,
        "target_network_update_freq": 2,
    },
    "dqn": _DQN,
    "simpleq": _SIMPLE_Q,
    "apex": {
        **_DQN, "n_step": 3, "train_batch_size": 512, "rollout_fragment_length": 50,
        "num_steps_sampled_before_learning_starts": 50_000, "target_network_update_freq": 500_000,
        "replay_buffer_config.capacity": 2_000_000, "exploration_config": {"type": "PerWorkerEpsilonGreedy"},
    },
    "r2d2": {
        **_WIDE, "lr": 1e-4, "gamma": 0.997, "optimizer.adam_epsilon": 1e-3, "target_network_update_freq": 1000,
        "replay_buffer_config.capacity": 100_000, "exploration_config": {"type": "EpsilonGreedy"},
    },
    "sac": {
        **_SQUASHED, **_RATES, "rollout_fragment_length": 1, "num_steps_sampled_before_learning_starts": 1500,
        "replay_buffer_config.capacity": 1_000_000,
    },
    "td3": _TD3,
    "ddpg": {
        **_TD3, "train_batch_size": 256, "tau": 2e-3, "num_steps_sampled_before_learning_starts": 1500,
        "replay_buffer_config.capacity": 50_000, "exploration_config": {"type": "OrnsteinUhlenbeckNoise"},
    },
    "bc": {**_WIDE, **_DATA, "lr": 1e-4},
    "marwil": {**_WIDE, **_DATA, "lr": 1e-4, "moving_average_sqd_adv_norm_update_rate": 1e-8},
    "cql": {
        **_SQUASHED, "critic_lr": 1e-3, "actor_lr": 1e-4, "alpha_lr": 1e-3, "bc_iters": 20_000,
        "deterministic_backup": True, "actions_in_input_normalized": False,
    },
    "iql": {**_WIDE, **_DATA, "beta": 0.1, "expectile": 0.8, "actor_lr": 3e-4, "value_lr": 3e-4, "tau": 1.0},
}  # fmt: skip
_SAME_AS = {"ddppo": "ppo", "a3c": "a2c", "apex_dqn": "apex", "rnnsac": "sac"}
# key -> key that replaces it
_REPLACED_BY = {
    "critic_lr": "lr", "train_batch_size": "train_batch_size_per_learner", "exploration_config": "epsilon",
    "policy_model_config.fcnet_hiddens": "model.fcnet_hiddens", "rollout_fragment_length": "training_intensity",
    "policy_model_config.fcnet_activation": "model.fcnet_activation",
}  # fmt: skip


def list_differing(job: Job, whole: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key that is not set and has another default in RLlib than in jrl.

    Args:
      job: finished translation.
      whole: complete config of the translation, as `jrl.config.reader.to_dict` returns it.
    """
    known = DEFAULTS.get(_SAME_AS.get(job.source, job.source), {})
    given = {KEYS[name].name for name in job.raw if name in KEYS} | job.given.keys()  # with null
    absent = {k: v for k, v in known.items() if k not in given and _REPLACED_BY.get(k) not in job.given}
    other = Job(job.algo, job.source, job.config_class, {**job.raw, **absent})  # all keys: sizes depend on several
    have = schema.flatten(whole)
    for key, default in absent.items():
        other.tree = {}
        translate(other, [key])
        wanted = {k: value for k, value in schema.flatten(other.tree).items() if value != have.get(k)}
        if wanted:
            here = ", ".join(f"{k} is {format_value(have.get(k))}" for k in wanted)
            there = ", ".join(f"{k}: {format_value(value)}" for k, value in wanted.items())
            yield f"{key}: {format_value(default)} in RLlib; here {here}: for RLlib's set {there}"
