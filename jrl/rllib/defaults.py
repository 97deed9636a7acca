"""Defaults of RLlib's algorithms that differ from jrl's."""

from collections.abc import Iterator
from typing import Any

from jrl.fields import schema
from jrl.rllib.table import KEYS
from jrl.rllib.translation import Job, shown, translate

_COMMON = {"gamma": 0.99}
_ON_POLICY = {
    **_COMMON, "model.fcnet_hiddens": [256, 256], "model.fcnet_activation": "tanh", "model.vf_share_layers": False,
}  # fmt: skip
_VTRACE = {**_ON_POLICY, "lr": 5e-4, "grad_clip": 40.0, "vf_loss_coeff": 0.5, "entropy_coeff": 0.01}
_PRIORITIZED = {
    "replay_buffer_config.type": "PrioritizedReplayBuffer", "replay_buffer_config.alpha": 0.6,
    "replay_buffer_config.beta": 0.4,
}  # fmt: skip
_SIMPLE_Q = {
    **_COMMON, "lr": 5e-4, "train_batch_size": 32, "rollout_fragment_length": 4, "target_network_update_freq": 500,
    "num_steps_sampled_before_learning_starts": 1000, "replay_buffer_config.capacity": 50_000, "grad_clip": 40.0,
    "optimizer.adam_epsilon": 1e-8, "n_step": 1, "double_q": False, "dueling": False,
    "exploration_config": {"type": "EpsilonGreedy"}, "model.fcnet_hiddens": [256, 256],
    "model.fcnet_activation": "tanh",
}  # fmt: skip
_DQN = {**_SIMPLE_Q, **_PRIORITIZED, "double_q": True, "dueling": True, "hiddens": [256]}
_SAC = {
    **_COMMON, **_PRIORITIZED, "train_batch_size": 256, "rollout_fragment_length": 1, "tau": 5e-3, "n_step": 1,
    "critic_lr": 3e-4, "actor_lr": 3e-4, "alpha_lr": 3e-4, "initial_alpha": 1.0, "twin_q": True, "grad_clip": None,
    "num_steps_sampled_before_learning_starts": 1500, "replay_buffer_config.capacity": 1_000_000,
    "policy_model_config.fcnet_hiddens": [256, 256], "policy_model_config.fcnet_activation": "relu",
}  # fmt: skip
_TD3 = {
    **_COMMON, "train_batch_size": 100, "rollout_fragment_length": 1, "tau": 5e-3, "n_step": 1, "critic_lr": 1e-3,
    "actor_lr": 1e-3, "policy_delay": 2, "target_noise": 0.2, "target_noise_clip": 0.5, "grad_clip": None,
    "num_steps_sampled_before_learning_starts": 10_000, "replay_buffer_config.capacity": 1_000_000,
    "policy_model_config.fcnet_hiddens": [400, 300], "policy_model_config.fcnet_activation": "relu",
    "exploration_config": {"type": "GaussianNoise"},
}  # fmt: skip
_MARWIL = {
    **_ON_POLICY, "lr": 1e-4, "train_batch_size": 2000, "grad_clip": None, "actions_in_input_normalized": False,
}  # fmt: skip

# RLlib's name of an algorithm -> newest name of a key -> its default there
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {
        **_ON_POLICY, "lr": 5e-5, "train_batch_size": 4000, "minibatch_size": 128, "num_epochs": 30, "lambda": 1.0,
        "clip_param": 0.3, "vf_clip_param": 10.0, "vf_loss_coeff": 1.0, "entropy_coeff": 0.0, "kl_coeff": 0.2,
        "kl_target": 0.01, "grad_clip": None,
    },
    "a2c": {**_VTRACE, "lr": 1e-4, "rollout_fragment_length": 20, "lambda": 1.0},
    "impala": {**_VTRACE, "rollout_fragment_length": 50, "train_batch_size": 500},
    "appo": {
        **_VTRACE, "rollout_fragment_length": 50, "train_batch_size": 500, "num_epochs": 1, "clip_param": 0.4,
        "tau": 1.0, "target_network_update_freq": 2,
    },
    "dqn": _DQN,
    "simpleq": _SIMPLE_Q,
    "apex": {
        **_DQN, "n_step": 3, "train_batch_size": 512, "rollout_fragment_length": 50,
        "num_steps_sampled_before_learning_starts": 50_000, "target_network_update_freq": 500_000,
        "replay_buffer_config.capacity": 2_000_000, "exploration_config": {"type": "PerWorkerEpsilonGreedy"},
    },
    "r2d2": {
        "lr": 1e-4, "gamma": 0.997, "optimizer.adam_epsilon": 1e-3, "target_network_update_freq": 1000,
        "replay_buffer_config.capacity": 100_000, "exploration_config": {"type": "EpsilonGreedy"},
        "model.fcnet_hiddens": [256, 256], "model.fcnet_activation": "tanh",
    },
    "sac": _SAC,
    "td3": _TD3,
    "ddpg": {
        **_TD3, "train_batch_size": 256, "tau": 2e-3, "policy_delay": 1, "twin_q": False,
        "num_steps_sampled_before_learning_starts": 1500, "replay_buffer_config.capacity": 50_000,
        "exploration_config": {"type": "OrnsteinUhlenbeckNoise"},
    },
    "bc": _MARWIL,
    "marwil": {
        **_MARWIL, "beta": 1.0, "vf_coeff": 1.0, "moving_average_sqd_adv_norm_update_rate": 1e-8,
        "moving_average_sqd_adv_norm_start": 100.0,
    },
    "cql": {
        **{key: value for key, value in _SAC.items() if not key.startswith(("replay_buffer_config", "rollout", "num"))},
        "critic_lr": 1e-3, "actor_lr": 1e-4, "alpha_lr": 1e-3, "bc_iters": 20_000, "temperature": 1.0,
        "num_actions": 10, "min_q_weight": 5.0, "deterministic_backup": True, "actions_in_input_normalized": False,
    },
    "iql": {
        **_COMMON, "beta": 0.1, "expectile": 0.8, "actor_lr": 3e-4, "critic_lr": 3e-4, "value_lr": 3e-4,
        "train_batch_size": 2000, "twin_q": True, "tau": 1.0, "model.fcnet_hiddens": [256, 256],
        "model.fcnet_activation": "tanh", "grad_clip": None, "actions_in_input_normalized": False,
    },
}  # fmt: skip
_SAME_AS = {"ddppo": "ppo", "a3c": "a2c", "apex_dqn": "apex", "rnnsac": "sac"}
# a key -> the keys that replace it: where one of them is given, the default of the key means nothing
_REPLACED_BY = {
    "lr": ("lr_schedule", "critic_lr"),
    "critic_lr": ("lr", "lr_schedule"),
    "entropy_coeff": ("entropy_coeff_schedule",),
    "train_batch_size": ("train_batch_size_per_learner",),
    "lambda": ("use_gae",),
    "kl_coeff": ("use_kl_loss",),
    "kl_target": ("use_kl_loss",),
    "replay_buffer_config.type": ("replay_buffer_config.prioritized_replay",),
    "exploration_config": ("epsilon",),
    "model.fcnet_hiddens": ("model.custom_model",),
    "policy_model_config.fcnet_hiddens": ("model.fcnet_hiddens",),
    "policy_model_config.fcnet_activation": ("model.fcnet_activation",),
    "rollout_fragment_length": ("train_batch_size", "training_intensity"),
}


def differing(job: Job, whole: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each key that the file leaves out and whose default in RLlib differs from jrl's.

    Args:
      job: the finished translation.
      whole: the whole config of the translation, as `jrl.settings.config.to_dict`.
    """
    known = DEFAULTS.get(_SAME_AS.get(job.source, job.source), {})
    given = {KEYS[name].name for name in job.raw if name in KEYS} | job.given.keys()  # null included
    is_replaced = lambda key: any(other in job.given for other in _REPLACED_BY.get(key, ()))
    absent = {key: value for key, value in known.items() if key not in given and not is_replaced(key)}
    other = Job(job.algo, job.source, job.config_class, {**job.raw, **absent})  # at once: sizes follow from several
    have = schema.flatten(whole)
    for key, default in absent.items():
        other.tree = {}
        translate(other, [key])
        wanted = {k: value for k, value in schema.flatten(other.tree).items() if value != have.get(k)}
        if wanted:
            here = ", ".join(f"{k} is {shown(have.get(k))}" for k in wanted)
            there = ", ".join(f"{k}: {shown(value)}" for k, value in wanted.items())
            yield f"{key}: {shown(default)} in RLlib; here {here}: for RLlib's set {there}"
