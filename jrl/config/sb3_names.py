"""Names of Stable-Baselines3 and its zoo -> the equivalent in jrl, for messages of commands and of `jrl.api`.

`sections.SYNONYMS` has names that differ only in spelling.
"""

# name of an algorithm, in lower case without - and _ -> answer; names of shipped configs need no entry
_MEMORY = "it is ppo with a memory: --algo ppo --set network.core.name=lstm"
_APEX = (
    "it is dqn with prioritised replay and env runners, as in jrl train apex_dqn: "
    "--algo dqn --set replay.prioritized=true --set env_runners.num=4"
)
_GRADIENT = "it is a2c without critic: --algo a2c --set algo.use_critic=false"
ALGORITHMS = {
    "recurrentppo": _MEMORY,
    "maskableppo": "it is ppo, which reads an item action_mask of the observation or the infos: --algo ppo",
    "her": "it is an option of replay: --algo sac --set replay.hindsight={}",
    "reinforce": _GRADIENT,
    "pg": _GRADIENT,
    "rpo": "it is an option of ppo: --algo ppo --set algo.rpo_alpha=0.5",
    "a3c": "its threads are environments here: --algo a2c",
    "ddqn": "it is an option of dqn: --algo dqn --set algo.double=true",
    "doubledqn": "it is an option of dqn: --algo dqn --set algo.double=true",
    "duelingdqn": "it is an option of dqn: --algo dqn --set algo.dueling=true",
    "simpleq": "it is dqn, whose options are off unless they are set: --algo dqn",
    "apex": _APEX,
    "apexdqn": _APEX,
}

_WIDTHS = (
    "network.hidden has the widths of all networks, and network.critic_hidden those of value and critics: {pi: [64], "
    "vf: [256]} is network.hidden=[64] and network.critic_hidden=[256]"
)
_OPTIMIZER = (
    "algo.optimizer names the optimizer and its options, such as algo.optimizer={name: adamw, weight_decay: 0.01}; its "
    "step size is algo.lr"
)
_RMSPROP = "it is algo.optimizer={name: rmsprop, eps: 1e-5}"
_SDE = (
    "jrl does not have it: leave it out; td3 has other noise with a memory, algo.exploration={name: ornstein_uhlenbeck}"
)
_POLICY_ACTS = "the policy is a distribution, whose samples explore: leave it out"
_NO_REPLAY = "the algorithm learns from each rollout once and has no replay: leave it out"
_EPSILON = (
    "epsilon is a schedule, in steps or in fractions of the run: exploration_fraction 0.1 and exploration_final_eps "
    "0.05 are algo.exploration={name: epsilon_greedy, epsilon: [[0, 1.0], [0.1, 0.05]]}"
)
_NOISE = "noise is an exploration of td3: algo.exploration={name: gaussian, std: 0.1}, or ornstein_uhlenbeck"
_CORE = "policy and value have a memory each: network.core={name: lstm, size: 256}"
_REPLAY = "replay has the options of the buffer, such as replay.capacity and replay.prioritized"
_ALWAYS = "TensorBoard's files are written to the run directory, always: leave it out"
_WRAPPER = "write a function that makes the wrapped environment: env.id=package.module:make"

# keyword or key of the zoo -> key of jrl or an answer; a pair: for algorithms with rollouts, and with replay
KEYS: dict[str, str | tuple[str, str]] = {
    "batch_size": (
        "algo.num_minibatches counts the minibatches of an epoch: it is rollout.length x env.num_envs / batch_size",
        "replay.batch_size",
    ),
    "n_steps": ("rollout.length", "replay.n_step"),
    "learning_starts": (_NO_REPLAY, "replay.learning_starts"),
    "buffer_size": (_NO_REPLAY, "replay.capacity"),
    "train_freq": (_NO_REPLAY, "replay.train_every"),
    "gradient_steps": (
        "algo.num_epochs x algo.num_minibatches are the gradient steps of an iteration",
        "replay.updates_per_step",
    ),
    "target_update_interval": (_NO_REPLAY, "algo.target_update_every"),
    "tau": ("the algorithm has no target network: leave it out", "algo.tau"),
    "optimize_memory_usage": "replay keeps each observation once, always: leave it out",
    **dict.fromkeys(("exploration_fraction", "exploration_initial_eps", "exploration_final_eps"),
                    (_POLICY_ACTS, _EPSILON)),
    "action_noise": (_POLICY_ACTS, _NOISE),
    "policy_delay": "algo.policy_every",
    # ARS of sb3-contrib
    "n_delta": "algo.population counts members, two for each direction: it is 2 x n_delta, and env.num_envs a multiple",
    "n_top": "algo.top_directions",
    "delta_std": "algo.noise_std",
    "alive_bonus_offset": "algo.alive_bonus is subtracted from each reward: it is -alive_bonus_offset",
    "zero_policy": "the output layer begins at 0, always: leave it out",
    "n_eval_episodes": "a member plays rollout.length steps in each of its env.num_envs / algo.population environments",
    "target_policy_noise": "algo.target_noise",
    "clip_range_vf": "algo.value_clip_eps",
    **dict.fromkeys(("use_sde", "sde_sample_freq", "use_sde_at_warmup", "use_expln", "full_std"), _SDE),
    **dict.fromkeys(("optimizer_class", "optimizer_kwargs"), _OPTIMIZER),
    **dict.fromkeys(("use_rms_prop", "rms_prop_eps"), _RMSPROP),
    **dict.fromkeys(("rollout_buffer_class", "rollout_buffer_kwargs"),
                    "custom.transforms change a rollout before it is learned from: leave it out"),
    **dict.fromkeys(("replay_buffer_class", "replay_buffer_kwargs"), (_NO_REPLAY, _REPLAY)),
    "goal_selection_strategy": "replay.hindsight.strategy",
    "n_sampled_goal": "replay.hindsight.share is the share of a batch: n_sampled_goal 4 is share 0.8",
    # policy_kwargs
    "policy_kwargs": "its entries are keys of network: network.hidden for net_arch, network.activation for "
    "activation_fn, network.log_std_init, network.init for ortho_init",
    "net_arch": _WIDTHS,
    "activation_fn": "network.activation",
    "features_extractor_kwargs": "network.torso_options",
    "share_features_extractor": "network.shared",
    "normalize_images": "network.image_max divides images of bytes, by 255 unless it is set: leave it out",
    "n_critics": "algo.num_critics",
    "n_quantiles": "algo.num_quantiles",
    "squash_output": "sac squashes its actions, and other algorithms clip them to the bounds: leave it out",
    **dict.fromkeys(("lstm_hidden_size", "n_lstm_layers", "shared_lstm", "enable_critic_lstm", "lstm_kwargs"), _CORE),
    # learn(), logs and the zoo
    "policy": "networks are chosen by the observation, and network.torso names another: leave it out",
    "n_timesteps": "stop.env_steps",
    "n_envs": "env.num_envs",
    "normalize": "algo.normalize_obs and algo.normalize_reward are its halves: set one or both to true",
    "env_wrapper": _WRAPPER,
    "vec_env_wrapper": _WRAPPER,
    "stats_window_size": "run.smoothing_episodes",
    "tensorboard_log": _ALWAYS,
    "tb_log_name": "run.out",
    "log_interval": "run.report_every",
    "verbose": "run.log_level is the level of loggers, and -v of a command shows where the time goes: leave it out",
    "progress_bar": "lines of progress are printed, always: leave it out",
    "callback": "custom.callbacks",
    "reset_num_timesteps": "--resume RUN continues a run: leave it out",
    "device": "set devices=cpu or devices=auto instead; without them accelerators learn, if there are some",
}  # fmt: skip

# prefix of a schedule in the zoo's spelling: a line from the number to 0 at the end of the run
LINE = "lin_"
# sections of a config where names of Stable-Baselines3 are recognised; other sections use similar names themselves
SECTIONS = ("algo", "network", "replay", "rollout")


def answer(key: str, *, replay: bool, sections: tuple[str, ...] = ()) -> str | None:
    """Returns the key of jrl, or a sentence, for an unknown dotted key; None if the table lacks it.

    Args:
      key: unknown key, such as algo.batch_size or algo.policy_kwargs.net_arch.
      replay: the algorithm learns from replay.
      sections: all sections of a config.
    """
    parts = key.split(".")
    if parts[0] in sections and parts[0] not in SECTIONS:
        return None
    entry = next((KEYS[part] for part in reversed(parts) if part in KEYS), None)
    return entry[replay] if isinstance(entry, tuple) else entry


def algorithm(name: str) -> str | None:
    """Returns the equivalent of an unknown algorithm, or None if the table lacks it."""
    return ALGORITHMS.get(name.lower().replace("-", "").replace("_", ""))
