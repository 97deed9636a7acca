"""Every key that RLlib's configurations have had, in groups: its names, what it is in jrl, and what there is to know.

`jrl.migrate.tables` looks them up.
"""

from typing import NamedTuple


class Key(NamedTuple):
    names: tuple[str, ...]  # newest first; a.b is b in the dict a
    ours: str  # dotted keys, separated by ", "; "": none
    note: str  # what is different, or why there is none
    lacking: bool = False  # what it asks for changes what is learned, and jrl has nothing like it

    @property
    def name(self) -> str:
        """The newest name, by which the rules know the key."""
        return self.names[0]


def _key(names: str, ours: str, note: str = "") -> Key:
    return Key(tuple(names.split()), ours, note)


def _none(reason: str, *names: str) -> list[Key]:
    return [_key(n, "", reason) for n in names]


def _lacking(reason: str, *names: str) -> list[Key]:
    return [_key(n, "", reason)._replace(lacking=True) for n in names]


def _models(name: str) -> str:
    """A key of the model, which RNNSAC has once for each of its networks."""
    return f"model.{name} policy_model_config.{name} policy_model.{name} q_model_config.{name} Q_model.{name}"


_AUTO = "jrl does so by itself"
_FRAMEWORK = "JAX is the only framework"
_OFFLINE = "jrl does not read offline data by RLlib's keys yet"
_ESTIMATORS = "jrl has no off-policy estimators yet"
_OWN_LOSS = "a loss of your own is custom.loss, a step of your own custom.training_step"
_STACKED = "policies that are alike in all but their weights are stacked in one program, and none is swapped out"
_OBS_FN = (
    "RLlib's is called with worker, base_env, policies and episode: write a pure function {agent: observation} -> "
    "{agent: what it sees}, and name it in multi_agent.observation_fn"
)
_TORSO = "network.torso and network.encoders choose of what there is, by the observations: see docs/networks.md"
_OWN_MODEL = "a class for torch or TensorFlow: write it for JAX, as network.torso and torso_options (docs/networks.md)"
_INITIAL = "initial weights are orthogonal, LeCun's or torch's default: network.init"
_TREES = (
    "observations are trees of arrays in the environment's dtypes, with an encoder for each: network.flatten makes one "
    "vector of them"
)
_FRAMES = "Atari comes as 84 x 84 gray frames, four of them; env.frame_stack stacks what others observe"
_TUNE = "for Tune: see jrl.api.tune"
_STACK = "a switch between RLlib's own old and new parts"
_CONNECT = "a function of the rollout is custom.transforms"
_RESTART = "see env_runners.max_restarts and health_check_timeout_s"
_QUEUES = "of RLlib's queues: see rollout.max_policy_lag"
_SPACES = "spaces come from the environment"
_RECORD = "videos: evaluation.record while training, jrl record from a checkpoint"
_INSIDE = "its keys have rows of their own"
_ENV_VARS = "runtime.env goes to env runners, too"

GROUPS: dict[str, list[Key]] = {
    "Experiment": [
        _key("run algo algo_class", "algo.name", "in a tuned example; otherwise `--algo PPO`"),
        _key("stop", "stop", "metrics are renamed; jrl needs a number of env_steps among them"),
        _key("checkpoint_freq checkpoint_config.checkpoint_frequency", "checkpoint.every", "iterations become steps"),
        _key("keep_checkpoints_num checkpoint_config.num_to_keep", "checkpoint.keep_last"),
        _key("checkpoint_score_attr checkpoint_config.checkpoint_score_attribute", "checkpoint.keep_best_by"),
        _key("checkpoint_config.checkpoint_score_order", "checkpoint.keep_best"),
        _key(
            "checkpoint_at_end checkpoint_config.checkpoint_at_end", "", "the end of a run always has a checkpoint"
        ),
        _key("checkpoint_config", "", _INSIDE),
        _key("pass_criteria", "", "put them under stop and use --as-test"),
        _key("restore", "", "python -m jrl.train --resume continues a run of jrl"),
        _key("local_dir storage_path", "", "the directory of a run is run.out"),
        *_none(
            _TUNE, "num_samples", "resources_per_trial", "trial_resources", "max_failures", "sync_config", "upload_dir",
            "scheduler", "search_alg", "name",
        ),
    ],
    "Environment": [
        _key("env", "env.id", "a class path has a colon here: `package.module:Class`"),
        _key("env_config", "env.options"),
        _key("horizon", "env.horizon"),
        _key("soft_horizon", "env.soft_horizon"),
        _key("no_done_at_end", "env.no_done_at_end", "jrl's default, null, bootstraps at time limits only"),
        _key("clip_rewards", "env.clip_rewards"),
        _key("normalize_actions", "env.normalize_actions"),
        _key("clip_actions", "env.clip_actions"),
        _key("env_task_fn", "custom.env_task"),
        *_none(_SPACES, "observation_space", "action_space"),
        *_none(_RECORD, "render_env", "record_env", "monitor"),
        _key("is_atari", "", "jrl knows Atari by the id"),
        _key("action_mask_key", "", "it is action_mask; env.action_mask_info names an entry of the infos instead"),
        _key("preprocessor_pref", "", "Atari comes as 84 x 84 gray frames, other observations as they are"),
        *_none(_AUTO, "disable_env_checking", "auto_wrap_old_gym_envs"),
    ],
    "Env runners (rollout workers)": [
        _key("num_env_runners num_rollout_workers num_workers", "env_runners.num, env.num_envs",
             "env.num_envs counts all: max(1, runners) x environments of each, which are 8 in all or the nearest"),
        _key("num_envs_per_env_runner num_envs_per_worker", "env.num_envs", "times max(1, runners)"),
        _key("rollout_fragment_length sample_batch_size", "rollout.length, replay.train_every",
             "on-policy: train_batch_size decides, if it is given; replay: one update for each round of fragments"),
        _key("batch_mode", "rollout.batch_mode"),
        _key("sample_async", "rollout.mode", "true: async"),
        _key("remote_worker_envs", "env.remote_worker_envs"),
        _key("remote_env_batch_wait_ms", "env.batch_wait_ms", "with remote_worker_envs only"),
        _key("observation_filter", "algo.normalize_obs", "MeanStdFilter: true"),
        _key("compress_observations", "env_runners.compress_observations"),
        _key("max_requests_in_flight_per_env_runner max_requests_in_flight_per_sampler_worker "
             "max_sample_requests_in_flight_per_worker",
             "env_runners.max_requests_in_flight", "with rollout.mode async"),
        _key("sample_timeout_s", "env_runners.sample_timeout_s"),
        *_none("the learner's process makes environments where there are no runners",
               "create_local_env_runner", "create_env_on_local_worker", "create_env_on_driver"),
        *_none("every process acts with the learner's statistics",
               "synchronize_filters", "update_worker_filter_stats", "use_worker_filter_stats"),
        *_lacking(_CONNECT, "module_to_env_connector"),
        *_none(_CONNECT, "sample_collector", "enable_connectors",
               "add_default_connectors_to_env_to_module_pipeline", "add_default_connectors_to_module_to_env_pipeline"),
        *_lacking("see algo.normalize_obs, env.frame_stack, network.flatten, network.use_prev_action and transform",
                  "env_to_module_connector"),
        *_none(_AUTO, "validate_env_runners_after_construction", "validate_workers_after_construction",
               "merge_env_runner_states", "use_env_runner_state_server", "env_runner_state_server_max_concurrency",
               "episode_lookback_horizon", "enable_tf1_exec_eagerly", "synchronize_filter",
               "gym_env_vectorize_mode", "sampler_perf_stats_ema_coef", "episodes_to_numpy", "env_runner_cls",
               "in_evaluation"),
    ],
    "Fault tolerance": [
        _key("ignore_env_runner_failures ignore_worker_failures", "env_runners.ignore_env_runner_failures"),
        _key("restart_failed_env_runners recreate_failed_env_runners recreate_failed_workers",
             "env_runners.recreate_failed_env_runners"),
        _key("restart_failed_sub_environments", "env_runners.restart_failed_sub_environments"),
        _key("max_num_env_runner_restarts max_num_worker_restarts", "env_runners.max_restarts"),
        _key("env_runner_health_probe_timeout_s worker_health_probe_timeout_s", "env_runners.health_check_timeout_s"),
        *_none(_RESTART, "num_consecutive_env_runner_failures_tolerance", "num_consecutive_worker_failures_tolerance",
               "delay_between_env_runner_restarts_s", "delay_between_worker_restarts_s", "env_runner_restore_timeout_s",
               "worker_restore_timeout_s"),
    ],
    "Training": [
        _key("gamma", "algo.gamma"),
        _key("lr", "algo.lr", "a number or [[steps, value], ...]"),
        _key("lr_schedule", "algo.lr", "takes the place of lr"),
        _key("train_batch_size", "rollout.length, replay.batch_size",
             "on-policy: env.num_envs x rollout.length; replay: transitions of a gradient step"),
        _key("train_batch_size_per_learner", "rollout.length, replay.batch_size", "times max(1, num_learners)"),
        _key("minibatch_size sgd_minibatch_size mini_batch_size_per_learner", "algo.num_minibatches",
             "the nearest number that divides the rows of an iteration"),
        _key("num_epochs num_sgd_iter", "algo.num_epochs"),
        _key("grad_clip", "algo.max_grad_norm, algo.max_leaf_norm, algo.max_grad_value", "as grad_clip_by says"),
        _key("grad_clip_by", "algo.max_grad_norm, algo.max_leaf_norm, algo.max_grad_value",
             "global_norm, norm or value"),
        _key("optimizer.adam_epsilon optimizer.epsilon optimizer.eps adam_epsilon", "algo.adam_eps"),
        _key("lambda lambda_", "algo.gae_lambda",
             "RLlib's V-trace has none: there it is left out"),
        _key("use_gae", "algo.gae_lambda", "false: gae_lambda 1, the return to the end of the rollout"),
        _key("clip_param", "algo.clip_eps"),
        _key("vf_clip_param", "algo.value_clip_eps",
             "RLlib bounds the squared error, jrl the value's move in an update: the square root is taken"),
        _key("vf_loss_coeff", "algo.vf_coef", "PPO's is doubled: jrl takes half the squared error"),
        _key("entropy_coeff", "algo.ent_coef"),
        _key("entropy_coeff_schedule", "algo.ent_coef", "takes the place of entropy_coeff"),
        _key("kl_coeff", "algo.kl_coef"),
        _key("kl_target", "algo.kl_target", "jrl needs a kl_coef above 0 beside it"),
        _key("use_kl_loss", "algo.kl_coef", "false: null"),
        _key("vf_share_layers", "network.shared"),
        _key("microbatch_size", "algo.microbatch_size"),
        _key("vtrace_clip_rho_threshold", "algo.clip_rho"),
        _key("vtrace_clip_pg_rho_threshold", "algo.clip_pg_rho"),
        _key("circular_buffer_num_batches", "algo.circular_buffer_num_batches"),
        _key("circular_buffer_iterations_per_batch", "algo.circular_buffer_iterations_per_batch"),
        _key("target_worker_clipping", "algo.clip_target_ratio"),
        _key("target_network_update_freq target_update_frequency target_network_update_frequency",
             "algo.target_update_every",
             "DQN: environment steps become gradient steps; SAC and TD3 move their targets with every step"),
        _key("tau", "algo.tau"),
        _key("optimizer", "", _INSIDE),
        *_none("jrl always has a value network, and V-trace in IMPALA and APPO", "use_critic", "vtrace"),
        *_none("the optimizer is Adam", "opt_type", "decay", "momentum", "optimizer.type", "optimizer.beta1",
               "optimizer.beta2", "optimizer.weight_decay", "_separate_vf_optimizer", "_lr_vf"),
        *_none("rows are always shuffled", "shuffle_batch_per_epoch", "shuffle_sequences"),
        *_none(_QUEUES, "vtrace_drop_last_ts", "num_multi_gpu_tower_stacks", "minibatch_buffer_size",
               "replay_proportion", "replay_ratio", "replay_buffer_num_slots", "learner_queue_size",
               "learner_queue_timeout", "broadcast_interval", "broadcast_env_runner_states", "num_aggregation_workers",
               "num_aggregator_actors_per_learner", "max_requests_in_flight_per_aggregator_worker",
               "max_requests_in_flight_per_aggregator_actor", "max_requests_in_flight_per_learner",
               "use_circular_buffer", "simple_queue_size", "num_gpu_loader_threads", "timeout_s_sampler_manager",
               "timeout_s_aggregator_manager", "keep_local_weights_in_sync",
               "optimizer.max_weight_sync_delay", "optimizer.num_replay_buffer_shards", "optimizer.debug",
               "max_weight_sync_delay", "num_replay_buffer_shards"),
        *_lacking(_OWN_LOSS, "learner_class", "policy_class", "_learner_class"),
        *_none(_OWN_LOSS, "learner_config_dict"),
        *_lacking("an Algorithm's own training_step(self, step) replaces steps of the loop", "after_train_step"),
        *_lacking("a pure function of what an update learns from is custom.batch", "before_learn_on_batch"),
        *_none("a pure function of what an update learns from is custom.batch", "postprocess_inputs"),
        *_lacking(_CONNECT, "learner_connector"),
        *_none(_CONNECT, "add_default_connectors_to_learner_pipeline"),
        *_none("there is one way to learn on several devices", "simple_optimizer"),
    ],
    "DQN": [
        _key("double_q", "algo.double"),
        _key("dueling", "algo.dueling"),
        _key("noisy", "algo.noisy"),
        _key("sigma0", "algo.noisy_sigma"),
        _key("num_atoms", "algo.num_atoms, algo.head", "above 1: head c51"),
        _key("v_min", "algo.v_min"),
        _key("v_max", "algo.v_max"),
        _key("hiddens", "network.head_hidden"),
        _key("td_error_loss_fn", "algo.loss"),
        _key("epsilon", "algo.exploration", "a number or [[steps, epsilon], ...]; of IMPALA it is RMSprop's"),
        *_none("use exploration_config", "exploration_fraction", "exploration_final_eps", "exploration_initial_eps",
               "schedule_max_timesteps", "soft_q", "softmax_temp", "parameter_noise", "per_worker_exploration"),
        *_none("jrl takes the best action where RLlib has a temperature", "categorical_distribution_temperature"),
        _key("use_h_function", "algo.value_rescaling", "of R2D2, which has it unless told otherwise"),
        _key("h_function_epsilon", "", "it is 0.001, as in the paper"),
    ],
    "SAC, TD3 and DDPG": [
        _key("critic_lr optimization.critic_learning_rate", "algo.lr"),
        _key("actor_lr optimization.actor_learning_rate", "algo.actor_lr"),
        _key("alpha_lr optimization.entropy_learning_rate", "algo.ent_coef_lr"),
        _key("initial_alpha", "algo.ent_coef"),
        _key("target_entropy", "algo.target_entropy", "auto: null, of which jrl's default is the same"),
        _key("twin_q", "algo.num_critics", "true: 2, false: 1"),
        _key("policy_delay", "algo.policy_every"),
        _key("smooth_target_policy", "algo.target_noise", "false: 0"),
        _key("target_noise", "algo.target_noise"),
        _key("target_noise_clip", "algo.target_noise_clip"),
        _key("policy_model_config.fcnet_hiddens policy_model.fcnet_hiddens actor_hiddens", "network.hidden"),
        _key("policy_model_config.fcnet_activation policy_model.fcnet_activation actor_hidden_activation",
             "network.activation"),
        _key("q_model_config.fcnet_hiddens Q_model.fcnet_hiddens critic_hiddens", "network.hidden",
             "policy and critics have the same widths: the policy's count"),
        _key("q_model_config.fcnet_activation Q_model.fcnet_activation critic_hidden_activation",
             "network.activation", "the policy's counts"),
        *_none(_TORSO, "use_state_preprocessor"),
        *_none(_INSIDE, "policy_model_config", "q_model_config", "policy_model", "Q_model"),
        *_none("the critics' loss is the squared error, without a penalty on weights",
               "use_huber", "huber_threshold", "l2_reg"),
        *_none("policies are Gaussian, squashed by tanh", "_deterministic_loss", "_use_beta_distribution"),
        _key("optimization optimization_config", "", _INSIDE),
    ],
    "Replay": [
        _key("replay_buffer_config.capacity buffer_size", "replay.capacity",
             "with memory: sequences become transitions, unless storage_unit is another"),
        _key("replay_buffer_config.replay_burn_in replay_burn_in burn_in_len burn_in", "replay.burn_in",
             "with memory only"),
        _key("replay_buffer_config.replay_sequence_length replay_sequence_length", "",
             "it is network.max_seq_len and replay.burn_in together"),
        _key("replay_buffer_config.replay_zero_init_states replay_buffer_config.zero_init_states zero_init_states", "",
             "sequences begin with the memory that acting had there, which burn_in brings up to date"),
        _key("num_steps_sampled_before_learning_starts replay_buffer_config.learning_starts learning_starts",
             "replay.learning_starts"),
        _key("replay_buffer_config.type", "replay.prioritized", "whether it is a prioritized one"),
        _key("replay_buffer_config.prioritized_replay prioritized_replay", "replay.prioritized"),
        _key("replay_buffer_config.alpha replay_buffer_config.prioritized_replay_alpha prioritized_replay_alpha",
             "replay.priority_alpha"),
        _key("replay_buffer_config.beta replay_buffer_config.prioritized_replay_beta prioritized_replay_beta",
             "replay.priority_beta"),
        _key("replay_buffer_config.eps replay_buffer_config.prioritized_replay_eps prioritized_replay_eps",
             "replay.priority_eps"),
        _key("prioritized_replay_beta_annealing_timesteps", "replay.priority_beta",
             "with the next key: a schedule"),
        _key("final_prioritized_replay_beta", "replay.priority_beta", "its end"),
        *_none("replay.priority_beta takes a schedule", "beta_annealing_fraction"),
        _key("training_intensity", "replay.updates_per_step", "divided by the batch size: gradient steps per step"),
        _key("n_step", "replay.n_step"),
        _key("store_buffer_in_checkpoints", "checkpoint.replay", "true: full, false: none"),
        _key("replay_buffer_config", "", _INSIDE),
        *_none("what is replayed are transitions, or with memory sequences", "replay_buffer_config.storage_unit",
               "replay_buffer_config.replay_batch_size", "replay_batch_size"),
        *_none("the buffer lies on the learner's devices", "replay_buffer_config.num_replay_buffer_shards",
               "replay_buffer_config.no_local_replay_buffer", "replay_buffer_config.replay_buffer_shards_colocated"
               "_with_driver", "replay_buffer_config._enable_replay_buffer_api",
               "replay_buffer_config.worker_side_prioritization", "worker_side_prioritization",
               "replay_buffer_config.metrics_num_episodes_for_smoothing"),
    ],
    "Exploration": [
        _key("explore", "rollout.explore", "for evaluation it is evaluation.explore"),
        _key("exploration_config", "algo.exploration", "see [replay](replay.md)"),
    ],
    "Model": [
        _key("model.fcnet_hiddens", "network.hidden"),
        _key("model.fcnet_activation", "network.activation", "tanh, relu, elu, gelu, swish (silu)"),
        _key("model.post_fcnet_hiddens model.head_fcnet_hiddens", "network.head_hidden", "each head has its own"),
        _key("model.vf_share_layers", "network.shared"),
        _key("model.free_log_std", "network.state_dependent_std", "the opposite"),
        _key("model model_config _model_config model_config_dict", "", _INSIDE),
        *_none(_TORSO, "model.conv_filters", "model.conv_activation", "model.post_fcnet_activation",
               "model.head_fcnet_activation", "model.no_final_linear", "model.encoder_latent_dim"),
        *_lacking(_OWN_MODEL, "model.custom_model"),
        *_none(_OWN_MODEL, "model.custom_model_config", "model.custom_options"),
        *_lacking("distributions follow from the action space", "model.custom_action_dist"),
        *_none("distributions follow from the action space", "model.log_std_clip_param"),
        *_none(_INITIAL, "model.fcnet_kernel_initializer", "model.fcnet_bias_initializer",
               "model.lstm_kernel_initializer", "model.lstm_bias_initializer"),
        *_none("shapes are known before the first step", "model.always_check_shapes", "model._time_major"),
        *_none(_TREES, "model._disable_preprocessor_api", "model._disable_action_flattening"),
        *_none(_STACK, "model._use_default_native_models", "model.uses_new_env_runners"),
        *_none(_FRAMES, "model.framestack", "model.num_framestacks", "model.dim", "model.grayscale", "model.zero_mean"),
        *_lacking("a pure function of an observation is network.transform", "model.custom_preprocessor"),
        *_none("a pure function of an observation is network.transform", "model.custom_preprocessor_options"),
    ],
    "Memory": [
        _key(_models("use_lstm"), "network.core.name", "true: lstm"),
        _key("model.use_attention", "network.core.name", "true: gtrxl"),
        _key("model.max_seq_len", "network.max_seq_len", "on-policy: the nearest number that divides a rollout"),
        _key(_models("lstm_cell_size"), "network.core.size"),
        _key(_models("lstm_use_prev_action"), "network.use_prev_action"),
        _key(_models("lstm_use_prev_reward"), "network.use_prev_reward"),
        _key("model.lstm_use_prev_action_reward", "network.use_prev_action, network.use_prev_reward"),
        _key("model.attention_dim", "network.core.size"),
        _key("model.attention_num_transformer_units", "network.core.layers"),
        _key("model.attention_num_heads", "network.core.heads"),
        _key("model.attention_head_dim", "network.core.head_size"),
        _key("model.attention_memory_inference", "network.core.memory"),
        _key("model.attention_memory_training", "network.core.memory", "where there is no attention_memory_inference"),
        _key("model.attention_position_wise_mlp_dim", "network.core.mlp"),
        _key("model.attention_init_gru_gate_bias", "network.core.gate_bias"),
        _key("model.attention_use_n_prev_actions", "network.use_prev_action", "above 0: true"),
        _key("model.attention_use_n_prev_rewards", "network.use_prev_reward", "above 0: true"),
    ],
    "Evaluation": [
        _key("evaluation_interval", "evaluation.interval, run.report_every",
             "result rows, each of which covers an iteration"),
        _key("evaluation_duration evaluation_num_episodes", "evaluation.duration"),
        _key("evaluation_duration_unit", "evaluation.unit"),
        _key("evaluation_sample_timeout_s", "evaluation.timeout_s"),
        _key("evaluation_parallel_to_training", "evaluation.parallel"),
        *_none("evaluation.parallel plays beside training", "enable_async_evaluation"),
        _key("evaluation_force_reset_envs_before_iteration", "evaluation.force_reset"),
        _key("evaluation_config", "evaluation.config, evaluation.explore", "keys of environment and exploration"),
        _key("evaluation_num_env_runners evaluation_num_workers", "evaluation.num_env_runners"),
        _key("custom_evaluation_function custom_eval_function", "custom.evaluation"),
        _key("always_attach_evaluation_results", "evaluation.always_attach"),
        *_lacking(_ESTIMATORS, "off_policy_estimation_methods", "input_evaluation"),
        *_none(_ESTIMATORS, "ope_split_batch_by_episode"),
        *_lacking(_OFFLINE, "offline_evaluation_interval"),
        *_none(_OFFLINE, "num_offline_eval_runners", "offline_evaluation_type", "offline_eval_runner_class",
               "offline_loss_for_module_fn", "offline_eval_batch_size_per_runner",
               "dataset_num_iters_per_offline_eval_runner", "offline_eval_rl_module_inference_only",
               "num_cpus_per_offline_eval_runner", "num_gpus_per_offline_eval_runner",
               "custom_resources_per_offline_eval_runner", "offline_evaluation_timeout_s",
               "offline_evaluation_duration",
               "offline_evaluation_parallel_to_training", "max_requests_in_flight_per_offline_eval_runner",
               "broadcast_offline_eval_runner_states", "validate_offline_eval_runners_after_construction",
               "restart_failed_offline_eval_runners", "ignore_offline_eval_runner_failures",
               "max_num_offline_eval_runner_restarts", "offline_eval_runner_health_probe_timeout_s",
               "offline_eval_runner_restore_timeout_s"),
        *_none("evaluation plays exactly what evaluation.duration says",
               "evaluation_auto_duration_min_env_steps_per_sample",
               "evaluation_auto_duration_max_env_steps_per_sample"),
        *_none(_RESTART, "evaluation_unhealthy_workers_timeout_s", "evaluation_error_after_n_consecutive_skips"),
    ],
    "Offline data": [
        _key("input input_", "", "sampler, the default, is what jrl does; " + _OFFLINE)._replace(lacking=True),
        _key("output", "data.output.path", "a directory; logdir: data in the run directory"),
        _key("output_config", "data.output.path, data.output.format", "its path and format, json or parquet"),
        _key("output_max_file_size", "data.output.max_file_mb", "bytes become MB"),
        _key("output_compress_columns", "data.output.compress", "all arrays of a file are compressed, or none"),
        *_none("episodes are written whole, in files of data.output.max_file_mb: docs/data.md",
               "output_max_rows_per_file", "output_write_remaining_data", "output_write_episodes"),
        *_none("data.output.format says how, data.output.path where on this machine",
               "output_write_method", "output_write_method_kwargs", "output_filesystem", "output_filesystem_kwargs"),
        *_none(_OFFLINE, "input_config", "actions_in_input_normalized", "shuffle_buffer_size", "offline_sampling",
               "offline_data_class", "input_read_method",
               "input_read_method_kwargs", "input_read_schema", "input_read_episodes", "input_read_sample_batches",
               "input_read_batch_size", "input_filesystem", "input_filesystem_kwargs", "input_compress_columns",
               "input_spaces_jsonable", "materialize_data", "materialize_mapped_data", "map_batches_kwargs",
               "iter_batches_kwargs", "ignore_final_observation", "prelearner_class", "prelearner_buffer_class",
               "prelearner_buffer_kwargs", "prelearner_module_synch_period", "prelearner_use_recorded_module_states",
               "dataset_num_iters_per_learner"),
    ],
    "Multi-agent": [
        _key("count_steps_by multiagent.count_steps_by", "rollout.count_steps_by"),
        _key("policies multiagent.policies", "multi_agent.policies",
             "ids, or id -> None, a dict of settings, a PolicySpec or its tuple; spaces come from the environment, "
             "a class of a policy's own cannot be had"),
        _key("policy_mapping_fn multiagent.policy_mapping_fn", "multi_agent.mapping",
             "package.module:name of agent and episode, asked once, or for each game that it depends on; or a table"),
        _key("policies_to_train multiagent.policies_to_train", "multi_agent.policies_to_train",
             "names, or package.module:name of a function of a name"),
        _key("algorithm_config_overrides_per_module multiagent.algorithm_config_overrides_per_module",
             "multi_agent.policies", "what each has of its own, under its name"),
        _key("observation_fn multiagent.observation_fn", "", _OBS_FN)._replace(lacking=True),
        *[_key(f"{n} multiagent.{n}", "", _STACKED) for n in (
            "policy_map_capacity", "policy_map_cache", "policy_states_are_swappable")],
        _key("replay_mode multiagent.replay_mode replay_buffer_config.replay_mode", "multi_agent.replay_mode",
             "lockstep with uniform replays of one size alone; independent is what happens by itself"),
        _key("multiagent multi_agent", "", _INSIDE),
    ],
    "Reporting, debugging and callbacks": [
        _key("min_time_s_per_iteration min_time_s_per_reporting min_iter_time_s", "run.report_every_s"),
        _key("min_sample_timesteps_per_iteration min_sample_timesteps_per_reporting timesteps_per_iteration",
             "run.report_every"),
        _key("min_train_timesteps_per_iteration min_train_timesteps_per_reporting", "run.report_every_trained"),
        _key("metrics_num_episodes_for_smoothing metrics_smoothing_episodes", "run.smoothing_episodes"),
        _key("keep_per_episode_custom_metrics", "run.keep_per_episode_metrics"),
        _key("log_level", "run.log_level"),
        _key("log_sys_usage", "run.log_sys_usage"),
        _key("seed", "run.seed"),
        _key("fake_sampler", "rollout.fake"),
        _key("callbacks callbacks_class", "custom.callbacks", "derive the class from jrl.callbacks.Callbacks"),
        *_none("episodes are counted with the rollout that they end in",
               "metrics_episode_collection_timeout_s", "collect_metrics_timeout"),
        *_none("see run.log and run.out", "logger_config", "logger_creator", "log_gradients",
               "custom_stats_cls_lookup"),
        *_lacking("a method of that name of a class derived from jrl.api.Callbacks",
                  "on_algorithm_init", "on_train_result", "on_evaluate_start", "on_evaluate_end",
                  "on_evaluate_offline_start", "on_evaluate_offline_end", "on_env_runners_recreated",
                  "on_offline_eval_runners_recreated", "on_checkpoint_loaded", "on_environment_created",
                  "on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end", "on_sample_end"),
        *_none("python -m jrl.export writes other formats", "export_native_model_files"),
        _key("checkpoint_trainable_policies_only", "checkpoint.policies", "true: trainable"),
        *_none(_AUTO, "_run_training_always_in_thread", "_evaluation_parallel_to_training_wo_thread"),
    ],
    "Resources": [
        _key("num_gpus", "devices.learners", "above 1: so many; 0 is JAX_PLATFORMS=cpu; null: all accelerators"),
        _key("num_learners num_learner_workers", "devices.learners", "above 1: so many"),
        _key("_fake_gpus", "devices.fake", "as many as num_gpus"),
        _key("num_cpus_per_env_runner num_cpus_per_worker", "env_runners.num_cpus"),
        _key("num_gpus_per_env_runner num_gpus_per_worker", "env_runners.num_gpus"),
        _key("custom_resources_per_env_runner custom_resources_per_worker", "env_runners.custom_resources"),
        _key("placement_strategy", "env_runners.placement"),
        *_none("learners are devices of one process: see devices.learners", "custom_resources_per_learner",
               "num_gpus_per_learner",
               "num_gpus_per_learner_worker", "num_cpus_per_learner", "num_cpus_per_learner_worker", "local_gpu_idx"),
        *_none(_TUNE, "custom_resources_for_main_process", "num_cpus_for_main_process", "num_cpus_for_local_worker",
               "num_cpus_for_driver"),
        _key("extra_python_environs_for_driver", "runtime.env"),
        *_none(_ENV_VARS, "extra_python_environs_for_worker"),
    ],
    "Framework and experimental": [
        *_none(_FRAMEWORK, "framework", "tf_session_args", "local_tf_session_args",
               "torch_compile_learner", "torch_compile_learner_what_to_compile", "torch_compile_learner_dynamo_backend",
               "torch_compile_learner_dynamo_mode", "torch_compile_worker", "torch_compile_worker_dynamo_backend",
               "torch_compile_worker_dynamo_mode", "_torch_grad_scaler_class", "_torch_lr_scheduler_classes",
               "torch_ddp_kwargs", "torch_skip_nan_gradients"),
        _key("eager_max_retraces", "run.max_recompiles", "programs that compile again once the run is under way"),
        *_none("run.disable_jit runs operation by operation", "eager_tracing", "eager", "trace"),
        *_none(_TREES, "_disable_preprocessor_api", "_disable_action_flattening"),
        _key("rl_module_spec _rl_module_spec", "multi_agent.policies, network",
             "of a MultiRLModuleSpec each module's model_config; " + _OWN_MODEL)._replace(lacking=True),
        *_none(_STACK, "_validate_config", "_use_msgpack_checkpoints", "_tf_policy_handles_more_than_one_loss",
               "_disable_execution_plan_api",
               "_disable_initialize_loss_from_dummy_batch", "_enable_new_api_stack", "_enable_rl_module_api",
               "_enable_learner_api", "enable_rl_module_and_learner", "enable_env_runner_and_connector_v2",
               "is_online", "_is_atari", "_AlgorithmConfig__prior_exploration_config", "__all_models__"),
    ],
}  # fmt: skip
