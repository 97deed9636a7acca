"""The table of RLlib's keys: all names of each key, jrl's keys, and notes for the user.

`jrl.rllib.migration` and the builder (`jrl.rllib.builder`) read GROUPS; docs/rllib-users.md shows it. Most keys move or
are converted. The modules `rules` and `multi_agent` have rules for the other keys.
"""

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Condition = Callable[[Any, Any], Any]  # (translation.Job, value of the key) -> result


class KeyRow(NamedTuple):
    """Key of RLlib and its translation, in this order: check of the value, `unless`, rule, or `to` and `ours`."""

    names: tuple[str, ...]  # newest first; a.b is b in the dict a; (): an argument of jrl's builder alone
    ours: str  # dotted keys of jrl, separated by ", "; "": none
    note: str = ""  # note for the user: a difference, the conversion, or the reason why jrl has no such key
    takes: str = ""  # kind of accepted values: mapping, whole, number, or the values joined by " or "
    least: float = -math.inf  # smallest accepted number
    unless: Mapping[str, Condition] = types.MappingProxyType({})  # reason why the key has no effect -> its condition
    to: Condition | None = None  # conversion of the value; None: unchanged
    refused: bool = False  # whether the key changes learning, and jrl lacks its feature
    by: str = ""  # methods of AlgorithmConfig with this argument
    argument: str = ""  # name of the argument; "": the newest name
    key: str = ""  # key that the argument sets; "": `ours`
    doc: str = ""  # documentation of an argument that sets several keys
    ruled: bool = False  # whether the argument is translated as in a file; otherwise it sets its key directly

    @property
    def name(self) -> str:
        """Newest name; rules are registered by it."""
        return self.names[0]


def row(names: str, ours: str, note: str = "", **more: Any) -> KeyRow:
    return KeyRow(tuple(names.split()), ours, note, **more)


def omit(reason: str, names: str) -> list[KeyRow]:
    return [row(n, "", reason) for n in names.split()]


def refuse(reason: str, names: str) -> list[KeyRow]:
    return [row(n, "", reason, refused=True) for n in names.split()]


_CONTAINER = "its keys have rows"


def container(names: str, **more: Any) -> KeyRow:
    return row(names, "", _CONTAINER, takes="mapping", **more)


def same(section: str, names: str, **more: Any) -> list[KeyRow]:
    return [row(n, f"{section}.{n}", **more) for n in names.split()]


def args(method: str, section: str, names: str, **more: str) -> list[KeyRow]:
    """Returns the rows of arguments of jrl alone: fields of a section, and arguments with other names."""
    keys = {name: f"{section}.{name}" for name in names.split()} | more
    return [KeyRow((), key, by=method, argument=name, key=key) for name, key in keys.items()]


def _models(name: str) -> str:
    """Returns the names of a key of the model; RNNSAC has the key in the dict of each network."""
    return f"model.{name} policy_model_config.{name} policy_model.{name} q_model_config.{name} Q_model.{name}"


def schedule(job: Any, value: Any) -> Any:
    """Returns a number, or a schedule [[step, number], ...] that begins at step 0."""
    if not isinstance(value, list | tuple) or not value:
        return value
    points = [list(point) if isinstance(point, list | tuple) else point for point in value]
    first = points[0]
    return [[0, *first[1:]], *points] if isinstance(first, list) and first and first[0] != 0 else points


WITH_CRITICS = ("sac", "td3", "iql")  # algorithms with critics beside the policy
NO_COLLECTION = "the run learns from data alone and collects no rollouts"
_OF_DT: dict[str, Condition] = {"of DT's transformer": lambda job, x: job.source != "dt"}
_NO_MEMORY: dict[str, Condition] = {
    "there is no memory: use_lstm and use_attention are off": lambda job, x: job.core is None
}
_OF_LSTM: dict[str, Condition] = {**_NO_MEMORY, "use_lstm is off": lambda job, x: job.core != "lstm"}
_OF_ATTENTION: dict[str, Condition] = {**_NO_MEMORY, "use_attention is off": lambda job, x: job.core != "gtrxl"}
_NOT_SET: dict[str, Condition] = {"{value}: not set": lambda job, x: not x}
_NO_INPUT: dict[str, Condition] = {
    "there is no input": lambda job, x: job.given.get("input_", job.base_value("data.input")) in (None, "sampler")
}
_NO_OUTPUT: dict[str, Condition] = {
    "nothing is written: output is not set": lambda job, x: job.given.get("output") is None
}
_ONE_POLICY: dict[str, Condition] = {"there is one policy": lambda job, x: job.has_one_policy}
_NO_SMOOTHING: dict[str, Condition] = {
    "smooth_target_policy is off": lambda job, x: not job.given.get("smooth_target_policy", job.source != "ddpg")
}
_AUTO = "always so in jrl"
_HELD_OUT = "data.validation holds episodes out; each result row has their loss"
_PER_STEP = "is and wis weight each step, as pdis and wpdis; the data need log-probabilities"
_OWN_LOSS = "custom.loss is a user's loss, custom.training_step a user's training step"
_STACKED = "policies that differ only in their weights are stacked in one program; no policy is swapped out"
_OBS_FN = (
    "RLlib calls it with worker, base_env, policies and episode: write a pure function {agent: observation} -> "
    "{agent: new observation}, and name it in multi_agent.observation_fn"
)
_TORSO = "see network.torso and network.encoders in docs/networks.md"
_CNN = "CNNs are network.torso=nature_cnn, impala or small_cnn, or a user's network (docs/networks.md): leave it out"
_OWN_MODEL = "a class for torch or TensorFlow: write it for JAX, as network.torso and torso_options (docs/networks.md)"
_INITIAL = "network.init: initial weights are orthogonal, LeCun's or torch's default"
_TREES = (
    "observations are trees of arrays in the environment's dtypes, with an encoder for each: network.flatten "
    "concatenates them to one vector"
)
_FRAMES = "Atari observations are four gray frames of 84 x 84; env.frame_stack stacks other observations"
_TUNE = "for Tune: see jrl.api.tune"
_STACK = "a switch between RLlib's old and new stack"
_CONNECT = "custom.transforms are functions of the rollout"
_RESTART = "see env_runners.max_restarts and health_check_timeout_s"
_QUEUES = "a setting of RLlib's queues: see rollout.max_policy_lag"
_RECORD = "videos: evaluation.record while training, jrl record from a checkpoint"

_GAPS = "jrl's transformer has no dropout; algo.lr is a schedule"
_READER = "jrl recognises the content of files: see data.format"
_RAY_DATA = "a setting of Ray Data: jrl reads the files itself, data.placement is the place of the data"
_OWN_DATA = (
    "for other data write a function () -> EpisodeStore, named in data.input as package.module:name; custom.batch "
    "changes each batch"
)
_ENTROPY = "the entropy, which differs from the sum of the log deviations by a constant"
_HERE = "data.input names files of this machine"

GROUPS: dict[str, list[KeyRow]] = {
    "Experiment": [
        row("run algo algo_class", "algo.name", "in a tuned example; otherwise `--algo PPO`",
            unless={"--algo is given, too": lambda job, x: True}),
        row("stop", "stop", "metrics are renamed; jrl needs a number of env_steps among them", takes="mapping"),
        row("checkpoint_freq checkpoint_config.checkpoint_frequency", "checkpoint.every", "iterations become steps",
            takes="whole", unless={"{value}: jrl keeps one every 5 minutes and at the end": lambda job, x: not x},
            to=lambda job, x: x * job.sizes.iteration(job)),
        row("keep_checkpoints_num checkpoint_config.num_to_keep", "checkpoint.keep_last"),
        row("checkpoint_score_attr checkpoint_config.checkpoint_score_attribute", "checkpoint.keep_best_by"),
        row("checkpoint_config.checkpoint_score_order", "checkpoint.keep_best"),
        row("checkpoint_at_end checkpoint_config.checkpoint_at_end", "", "a run always ends with a checkpoint"),
        container("checkpoint_config"),
        row("pass_criteria", "", "put them under stop and use --as-test"),
        row("restore", "", "python -m jrl.train --resume continues a run of jrl"),
        row("local_dir storage_path", "", "run.out is the directory of a run"),
        *omit(_TUNE, "num_samples resources_per_trial trial_resources max_failures sync_config upload_dir scheduler "
              "search_alg name"),
    ],
    "Environment": [
        row("env", "env.id", "a class path has a colon here: `package.module:Class`", by="environment"),
        row("env_config", "env.options", takes="mapping", by="environment"),
        *same("env", "horizon soft_horizon clip_rewards normalize_actions clip_actions", by="environment"),
        row("no_done_at_end", "env.no_done_at_end", "jrl's default, null, bootstraps at time limits only",
            by="environment"),
        row("env_task_fn", "custom.env_task", by="environment"),
        *[row(f"{kind}_space", f"external.{kind}",
              "where clients play (input PolicyServerInput), e.g. {box: [4]} or {discrete: 2}",
              takes="mapping", unless={"spaces come from the environment": lambda job, x: not job.has_clients})
          for kind in ("observation", "action")],
        *omit(_RECORD, "render_env record_env monitor"),
        row("is_atari", "", "jrl recognises Atari by the id"),
        row("action_mask_key", "", "name the item of the observation action_mask, or an entry of the infos by "
            "env.action_mask_info", refused=True,
            unless={"{value}: as in jrl": lambda job, x: x == "action_mask"}),
        row("preprocessor_pref", "", "Atari observations are gray frames of 84 x 84, other observations unchanged"),
        *omit(_AUTO, "disable_env_checking auto_wrap_old_gym_envs"),
        *args("environment", "env", "backend reward_scale reset on_nonfinite action_repeat action_chunk randomize "
              "observe_task observation_noise action_delay frame_stack action_mask_info",
              env_batch_size="env.batch_size"),
    ],
    "Env runners (rollout workers)": [
        row("num_env_runners num_rollout_workers num_workers", "env_runners.num, env.num_envs",
            "env.num_envs is the number of all: max(1, runners) x environments of each, by default about 8",
            takes="whole", least=0, unless={NO_COLLECTION: lambda job, x: job.is_offline},
            by="env_runners", key="env_runners.num"),
        row("num_envs_per_env_runner num_envs_per_worker", "env.num_envs", "times max(1, runners)",
            to=lambda job, x: job.sizes.num_envs, by="env_runners",
            doc="environments of each runner, or of this process without any: sets num_envs"),
        row("rollout_fragment_length sample_batch_size", "rollout.length, replay.train_every",
            "on-policy: a given train_batch_size wins; replay: one update for each round of fragments",
            unless={NO_COLLECTION: lambda job, x: job.is_offline}, by="env_runners", key="rollout.length", ruled=True,
            doc="steps of each environment in a rollout; with replay before an update: sets train_every and "
            "updates_per_step of replay_buffer_config"),
        row("batch_mode", "rollout.batch_mode", by="env_runners",
            unless={"sequences from replay end with their episodes by themselves":
                    lambda job, x: x == "complete_episodes" and job.has_samples and job.core}),
        row("sample_async", "rollout.mode", "true: async", to=lambda job, x: "async" if x else "sync"),
        row("remote_worker_envs", "env.remote_worker_envs", by="environment"),
        row("remote_env_batch_wait_ms", "env.batch_wait_ms", "with remote_worker_envs only", by="environment", unless={
            "it needs remote_worker_envs": lambda job, x: not job.given.get("remote_worker_envs"),
            "whole episodes are collected from synchronous environments":
                lambda job, x: job.given.get("batch_mode") == "complete_episodes"}),
        row("observation_filter", "algo.normalize_obs", "MeanStdFilter: true",
            takes="NoFilter or MeanStdFilter or ConcurrentMeanStdFilter", to=lambda job, x: x != "NoFilter",
            unless={"NoFilter: not set": lambda job, x: x == "NoFilter" and "normalize_obs" not in job.fields}),
        *same("env_runners", "compress_observations sample_timeout_s", by="env_runners"),
        row("max_requests_in_flight_per_env_runner max_requests_in_flight_per_sampler_worker "
            "max_sample_requests_in_flight_per_worker",
            "env_runners.max_requests_in_flight", "with rollout.mode async", by="env_runners"),
        *omit("without runners the learner's process has the environments", "create_local_env_runner "
              "create_env_on_local_worker create_env_on_driver"),
        *omit("every process acts with the learner's statistics", "synchronize_filters update_worker_filter_stats "
              "use_worker_filter_stats"),
        *refuse(_CONNECT, "module_to_env_connector"),
        *omit(_CONNECT, "sample_collector enable_connectors add_default_connectors_to_env_to_module_pipeline "
              "add_default_connectors_to_module_to_env_pipeline"),
        *refuse("see algo.normalize_obs, env.frame_stack, network.flatten, network.use_prev_action and transform",
                 "env_to_module_connector"),
        *omit(_AUTO, "validate_env_runners_after_construction validate_workers_after_construction "
              "merge_env_runner_states use_env_runner_state_server env_runner_state_server_max_concurrency "
              "episode_lookback_horizon enable_tf1_exec_eagerly synchronize_filter gym_env_vectorize_mode "
              "sampler_perf_stats_ema_coef episodes_to_numpy env_runner_cls in_evaluation"),
        *args("env_runners", "rollout", "max_policy_lag collector iterations_per_call", num_envs="env.num_envs",
             sample_mode="rollout.mode"),
    ],
    "Fault tolerance": [
        row("ignore_env_runner_failures ignore_worker_failures", "env_runners.ignore_env_runner_failures",
            by="fault_tolerance"),
        row("restart_failed_env_runners recreate_failed_env_runners recreate_failed_workers",
            "env_runners.recreate_failed_env_runners", by="fault_tolerance", argument="recreate_failed_env_runners"),
        row("restart_failed_sub_environments", "env_runners.restart_failed_sub_environments", by="fault_tolerance"),
        row("max_num_env_runner_restarts max_num_worker_restarts", "env_runners.max_restarts", by="fault_tolerance"),
        row("env_runner_health_probe_timeout_s worker_health_probe_timeout_s", "env_runners.health_check_timeout_s",
            by="fault_tolerance"),
        *omit(_RESTART, "num_consecutive_env_runner_failures_tolerance num_consecutive_worker_failures_tolerance "
              "delay_between_env_runner_restarts_s delay_between_worker_restarts_s env_runner_restore_timeout_s "
              "worker_restore_timeout_s"),
        *args("fault_tolerance", "env_runners", "env_step_timeout_s"),
    ],
    "Training": [
        *same("algo", "gamma microbatch_size circular_buffer_num_batches circular_buffer_iterations_per_batch tau"),
        row("lr", "algo.lr", "a number or [[steps, value], ...]", to=schedule, unless={
            "lr_schedule replaces it": lambda job, x: "lr_schedule" in job.given,
            "critic_lr replaces it": lambda job, x: "critic_lr" in job.given and job.algo in WITH_CRITICS}),
        row("lr_schedule", "algo.lr", "replaces lr", to=schedule),
        row("train_batch_size", "rollout.length, replay.batch_size",
            "on-policy: env.num_envs x rollout.length; replay: transitions of a gradient step", by="training",
            doc="rows of an iteration: sets rollout_fragment_length; with replay rows of an update"),
        row("train_batch_size_per_learner", "rollout.length, replay.batch_size", "times max(1, num_learners)"),
        row("minibatch_size sgd_minibatch_size mini_batch_size_per_learner", "algo.num_minibatches",
            "the nearest divisor of the rows of an iteration", by="training",
            doc="rows of a gradient step: sets num_minibatches"),
        row("num_epochs num_sgd_iter", "algo.num_epochs"),
        row("grad_clip", "algo.max_grad_norm, algo.max_leaf_norm, algo.max_grad_value", "by grad_clip_by"),
        row("grad_clip_by", "algo.max_grad_norm, algo.max_leaf_norm, algo.max_grad_value",
            "global_norm, norm or value"),
        row("optimizer.adam_epsilon optimizer.epsilon optimizer.eps adam_epsilon", "algo.adam_eps"),
        row("lambda lambda_", "algo.gae_lambda",
            "RLlib's V-trace ignores it"),
        row("use_gae", "algo.gae_lambda", "false: gae_lambda 1, the return to the end of the rollout",
            to=lambda job, x: 1.0, unless={
                "{algo} has no gae_lambda": lambda job, x: job.has_samples,
                "true: as in jrl": lambda job, x: x,
                "{algo} has V-trace": lambda job, x: "gae_lambda" not in job.fields}),
        row("clip_param", "algo.clip_eps"),
        row("vf_clip_param", "algo.value_clip_eps",
            "RLlib bounds the squared error, jrl the change of the value: the square root is taken",
            takes="number", least=0, unless={"no bound": lambda job, x: x == math.inf},
            to=lambda job, x: math.sqrt(x)),
        row("vf_loss_coeff", "algo.vf_coef", "PPO: doubled, because jrl has half the squared error", takes="number",
            to=lambda job, x: x * (2 if job.algo == "ppo" else 1)),
        row("entropy_coeff", "algo.ent_coef", to=schedule, unless={
            "{algo} has none": lambda job, x: job.has_samples,
            "entropy_coeff_schedule replaces it": lambda job, x: "entropy_coeff_schedule" in job.given}),
        row("entropy_coeff_schedule", "algo.ent_coef", "replaces entropy_coeff", to=schedule,
            unless={"{algo} has none": lambda job, x: job.has_samples}),
        row("kl_coeff", "algo.kl_coef"),
        row("kl_target", "algo.kl_target", "jrl needs a kl_coef above 0, too"),
        row("use_kl_loss", "algo.kl_coef", "false: null"),
        row("vf_share_layers", "network.shared"),
        row("vtrace_clip_rho_threshold", "algo.clip_rho"),
        row("vtrace_clip_pg_rho_threshold", "algo.clip_pg_rho"),
        row("target_worker_clipping", "algo.clip_target_ratio"),
        row("target_network_update_freq target_update_frequency target_network_update_frequency",
            "algo.target_update_every",
            "DQN: environment steps become gradient steps; SAC and TD3 update their targets with every step",
            takes="whole", least=0,
            to=lambda job, x: max(1, round(x * job.sizes.updates_per_step)) if job.algo == "dqn" else x,
            unless={"{algo} updates its targets with every step, by algo.tau": lambda job, x: job.algo in WITH_CRITICS,
                    "{algo} has no target_update_every": lambda job, x: "target_update_every" not in job.fields}),
        container("optimizer"),
        row("use_critic", "algo.use_critic",
            unless={"{algo} always has a critic": lambda job, x: "use_critic" not in job.fields}),
        *omit("IMPALA and APPO always have V-trace", "vtrace"),
        row("opt_type", "algo.optimizer", "rmsprop: with RLlib's decay, momentum and epsilon",
            takes="adam or rmsprop", unless={"adam: as in jrl": lambda job, x: x == "adam"},
            to=lambda job, x: {"name": "rmsprop", "decay": job.given.get("decay", 0.99),
                               "eps": job.given.get("epsilon", 0.1), "momentum": job.given.get("momentum", 0.0)}),
        *omit("read with opt_type", "decay momentum"),
        *omit("algo.optimizer is one optimizer for all parameters, with options of its own", "optimizer.type "
              "optimizer.beta1 optimizer.beta2 optimizer.weight_decay _separate_vf_optimizer _lr_vf"),
        *omit("rows are always shuffled", "shuffle_batch_per_epoch shuffle_sequences"),
        *omit(_QUEUES, "vtrace_drop_last_ts num_multi_gpu_tower_stacks minibatch_buffer_size replay_proportion "
              "replay_ratio replay_buffer_num_slots learner_queue_size learner_queue_timeout broadcast_interval "
              "broadcast_env_runner_states num_aggregation_workers num_aggregator_actors_per_learner "
              "max_requests_in_flight_per_aggregator_worker max_requests_in_flight_per_aggregator_actor "
              "max_requests_in_flight_per_learner use_circular_buffer simple_queue_size num_gpu_loader_threads "
              "timeout_s_sampler_manager timeout_s_aggregator_manager keep_local_weights_in_sync "
              "optimizer.max_weight_sync_delay optimizer.num_replay_buffer_shards optimizer.debug "
              "max_weight_sync_delay num_replay_buffer_shards"),
        *refuse(_OWN_LOSS, "learner_class policy_class _learner_class"),
        *omit(_OWN_LOSS, "learner_config_dict"),
        *refuse("a method training_step(self, step) of an Algorithm replaces steps of the loop", "after_train_step"),
        *refuse("custom.batch is a pure function of an update's batch", "before_learn_on_batch"),
        row("learner_connector", "", _CONNECT, refused=True, by="training", key="custom.transforms"),
        *omit(_CONNECT, "add_default_connectors_to_learner_pipeline"),
        *omit("jrl has one way to learn on several devices", "simple_optimizer"),
        *args("training", "custom", "training_step", reward_fn="custom.reward", batch_transforms="custom.batch",
             loss_fn="custom.loss"),
    ],
    "DQN": [
        row("double_q", "algo.double"),
        *same("algo", "dueling noisy v_min v_max"),
        row("sigma0", "algo.noisy_sigma"),
        row("num_atoms", "algo.num_atoms, algo.head", "above 1: head c51", takes="whole", least=1, ruled=True),
        row("hiddens", "network.head_hidden"),
        row("td_error_loss_fn", "algo.loss"),
        row("epsilon", "algo.exploration", "a number or [[steps, epsilon], ...]; IMPALA's is read with opt_type",
            to=lambda job, x: {"name": "epsilon_greedy", "epsilon": schedule(job, x)}, unless={
                "of RMSprop: read with opt_type": lambda job, x: job.algo != "dqn",
                "exploration_config replaces it": lambda job, x: "exploration_config" in job.given}),
        *omit("use exploration_config", "exploration_fraction exploration_final_eps exploration_initial_eps "
              "schedule_max_timesteps soft_q softmax_temp parameter_noise per_worker_exploration"),
        *omit("jrl takes the best action instead", "categorical_distribution_temperature"),
        row("use_h_function", "algo.value_rescaling", "R2D2: true by default"),
        row("h_function_epsilon", "", "0.001 in jrl, as in the paper"),
    ],
    "SAC, TQC, TD3 and DDPG": [
        row("critic_lr optimization.critic_learning_rate", "algo.lr"),
        row("actor_lr optimization.actor_learning_rate", "algo.actor_lr"),
        row("alpha_lr optimization.entropy_learning_rate", "algo.ent_coef_lr"),
        row("initial_alpha", "algo.ent_coef", unless={"{algo} has none": lambda job, x: job.algo != "sac"}),
        row("target_entropy", "algo.target_entropy", "auto: null, jrl's default", ruled=True,
            unless={"auto: jrl's default is the same": lambda job, x: x == "auto"}),
        row("twin_q", "algo.num_critics", "true: 2, false: 1", to=lambda job, x: 2 if x else 1),
        row("n_critics", "algo.num_critics", "TQC"),
        row("n_quantiles", "algo.critic.atoms"),
        row("top_quantiles_to_drop_per_net", "algo.critic.dropped_atoms"),
        row("policy_delay", "algo.policy_every"),
        row("smooth_target_policy", "algo.target_noise", "false: 0",
            to=lambda job, x: job.fields.get("target_noise") if x else 0.0, unless={"true: see algo.target_noise":
                lambda job, x: x and (job.source != "ddpg" or "target_noise" in job.given)}),
        *same("algo", "target_noise target_noise_clip", unless=_NO_SMOOTHING),
        row("policy_model_config.fcnet_hiddens policy_model.fcnet_hiddens actor_hiddens", "network.hidden"),
        row("policy_model_config.fcnet_activation policy_model.fcnet_activation actor_hidden_activation",
            "network.activation"),
        row("q_model_config.fcnet_hiddens Q_model.fcnet_hiddens critic_hiddens", "network.critic_hidden",
            "network.hidden if the policy has no widths"),
        row("q_model_config.fcnet_activation Q_model.fcnet_activation critic_hidden_activation",
            "network.activation", "the policy's value wins"),
        *omit(_TORSO, "use_state_preprocessor"),
        *map(container, ("policy_model_config", "q_model_config", "policy_model", "Q_model")),
        *omit("the critics' loss is the squared error, without a penalty on weights",
              "use_huber huber_threshold l2_reg"),
        *omit("policies are Gaussian, squashed by tanh", "_deterministic_loss _use_beta_distribution"),
        container("optimization optimization_config"),
    ],
    "BC, MARWIL, CQL, IQL and DT": [
        row("beta", "algo.beta", "MARWIL and IQL: factor of the advantage",
            unless={"bc is marwil with beta 0": lambda job, x: job.algo == "bc"}),
        row("bc_logstd_coeff", "algo.ent_coef", _ENTROPY, unless=_NOT_SET),
        row("moving_average_sqd_adv_norm_update_rate", "algo.adv_norm_rate"),
        row("moving_average_sqd_adv_norm_start", "algo.adv_norm_start"),
        row("vf_coeff", "algo.vf_coef"),
        row("burnin_len", "replay.burn_in", "with a core", unless={**_NOT_SET, **_NO_MEMORY}),
        row("bc_iters", "algo.bc_updates", "iterations become updates", takes="whole", least=0,
            to=lambda job, x: x * (job.sizes.iteration(job) if job.is_offline else 1)),
        row("temperature", "algo.cql_temperature", "CQL"),
        row("num_actions", "algo.cql_actions"),
        row("min_q_weight", "algo.cql_weight"),
        row("lagrangian", "algo.cql_target_gap", "true: lagrangian_thresh, by default 5, divided by min_q_weight"),
        row("lagrangian_thresh", "algo.cql_target_gap",
            "with lagrangian; divided by min_q_weight, a factor of RLlib's gap"),
        *same("algo", "deterministic_backup expectile value_lr"),
        row("target_return", "algo.target_return", "DT"),
        row("max_ep_len", "algo.step_scale", "step numbers are divided by it, not embedded"),
        row("embed_dim", "network.core.size", "DT, with the core gtrxl", unless=_OF_DT),
        row("num_layers", "network.core.layers", unless=_OF_DT),
        row("num_heads", "network.core.heads", unless=_OF_DT),
        *omit(_GAPS, "embed_pdrop resid_pdrop attn_pdrop num_warmup_steps"),
        *refuse("DT learns only actions", "loss_coef_obs loss_coef_returns_to_go use_obs_output use_return_output"),
        *omit("DT learns only actions", "loss_coef_actions"),
    ],
    "ARS and ES": [
        row("num_rollouts", "algo.population, env.num_envs", "directions become pairs of members, an environment each",
            takes="whole", least=1, ruled=True),
        row("episodes_per_batch", "algo.population, env.num_envs", "the next even number of members, an environment "
            "each", takes="whole", least=1, ruled=True),
        row("rollouts_used", "algo.top_directions", "ARS"),
        row("noise_stdev", "algo.noise_std"),
        row("sgd_stepsize stepsize", "algo.lr"),
        row("l2_coeff", "algo.optimizer", "ES: adamw, whose weight decay is not scaled by Adam's denominator",
            takes="number", least=0, to=lambda job, x: {"name": "adamw", "weight_decay": x}),
        *omit("members act without noise on their actions", "action_noise_std"),
        *omit("members follow from a seed, without a table of noise", "noise_size"),
        *omit("the mean of the population is evaluated by evaluation.every", "eval_prob"),
        *omit("run.smoothing_episodes", "report_length"),
        *omit(_AUTO, "tf_single_threaded"),
    ],
    "Replay": [
        row("replay_buffer_config.capacity buffer_size", "replay.capacity",
            "with memory: sequences become transitions, unless storage_unit has another unit", takes="whole", least=1),
        row("replay_buffer_config.replay_burn_in replay_burn_in burn_in_len burn_in", "replay.burn_in",
            "with memory only", unless=_NO_MEMORY),
        row("replay_buffer_config.replay_sequence_length replay_sequence_length", "",
            "the sum of network.max_seq_len and replay.burn_in"),
        row("replay_buffer_config.replay_zero_init_states replay_buffer_config.zero_init_states zero_init_states", "",
            "sequences begin with the memory of acting; burn_in updates it"),
        row("num_steps_sampled_before_learning_starts replay_buffer_config.learning_starts learning_starts",
            "replay.learning_starts"),
        row("replay_buffer_config.type", "replay.prioritized", "true for a prioritized replay"),
        row("replay_buffer_config.prioritized_replay prioritized_replay", "replay.prioritized"),
        row("replay_buffer_config.alpha replay_buffer_config.prioritized_replay_alpha prioritized_replay_alpha",
            "replay.priority_alpha"),
        row("replay_buffer_config.beta replay_buffer_config.prioritized_replay_beta prioritized_replay_beta",
            "replay.priority_beta"),
        row("replay_buffer_config.eps replay_buffer_config.prioritized_replay_eps prioritized_replay_eps",
            "replay.priority_eps"),
        row("prioritized_replay_beta_annealing_timesteps", "replay.priority_beta",
            "with the next key: a schedule"),
        row("final_prioritized_replay_beta", "replay.priority_beta", "its end"),
        *omit("replay.priority_beta takes a schedule", "beta_annealing_fraction"),
        row("training_intensity", "replay.updates_per_step", "divided by the batch size: gradient steps per step",
            takes="number", least=0, unless={
                NO_COLLECTION: lambda job, x: job.is_offline,
                "{algo} keeps no replay": lambda job, x: not job.has_samples,
                "0: not set": lambda job, x: job.sizes.train_every is None}),
        row("n_step", "replay.n_step"),
        row("store_buffer_in_checkpoints", "checkpoint.replay", "true: full, false: none",
            to=lambda job, x: "full" if x else "none"),
        container("replay_buffer_config", by="training", key="replay"),
        *args("training", "replay", "hindsight"),
        *omit("samples are transitions, or sequences with memory", "replay_buffer_config.storage_unit "
              "replay_buffer_config.replay_batch_size replay_batch_size"),
        *omit("the buffer is on the learner's devices", "replay_buffer_config.num_replay_buffer_shards "
              "replay_buffer_config.no_local_replay_buffer "
              "replay_buffer_config.replay_buffer_shards_colocated_with_driver "
              "replay_buffer_config._enable_replay_buffer_api replay_buffer_config.worker_side_prioritization "
              "worker_side_prioritization replay_buffer_config.metrics_num_episodes_for_smoothing"),
    ],
    "Exploration": [
        row("explore", "rollout.explore", "for evaluation it is evaluation.explore", by="env_runners exploration"),
        row("exploration_config", "algo.exploration, algo.curiosity",
            "see [replay](replay.md); Curiosity and RND: [curiosity](curiosity.md)", by="env_runners exploration",
            key="algo.exploration", unless={"it is empty": lambda job, x: not x}),
    ],
    "Model": [
        row("model.fcnet_hiddens", "network.hidden"),
        row("model.fcnet_activation", "network.activation", "tanh, relu, elu, gelu, swish (silu)"),
        row("model.post_fcnet_hiddens model.head_fcnet_hiddens", "network.head_hidden", "in each head"),
        row("model.vf_share_layers", "network.shared"),
        row("model.free_log_std", "network.state_dependent_std", "the opposite", to=lambda job, x: not x),
        container("model model_config _model_config model_config_dict", by="training", key="network"),
        *refuse(_CNN, "model.conv_filters"),
        *omit(_TORSO, "model.conv_activation model.post_fcnet_activation model.head_fcnet_activation "
              "model.no_final_linear model.encoder_latent_dim"),
        *refuse(_OWN_MODEL, "model.custom_model"),
        *omit(_OWN_MODEL, "model.custom_model_config model.custom_options"),
        *refuse("distributions follow from the action space", "model.custom_action_dist"),
        *omit("distributions follow from the action space", "model.log_std_clip_param"),
        *omit(_INITIAL, "model.fcnet_kernel_initializer model.fcnet_bias_initializer model.lstm_kernel_initializer "
              "model.lstm_bias_initializer"),
        *omit("shapes are known before the first step", "model.always_check_shapes model._time_major"),
        *omit(_TREES, "model._disable_preprocessor_api model._disable_action_flattening"),
        *omit(_STACK, "model._use_default_native_models model.uses_new_env_runners"),
        *omit(_FRAMES, "model.framestack model.num_framestacks model.dim model.grayscale model.zero_mean"),
        *refuse("network.transform is a pure function of an observation", "model.custom_preprocessor"),
        *omit("network.transform is a pure function of an observation", "model.custom_preprocessor_options"),
    ],
    "Memory": [
        row(_models("use_lstm"), "network.core.name", "true: lstm"),
        row("model.use_attention", "network.core.name", "true: gtrxl"),
        row("model.max_seq_len", "network.max_seq_len", "on-policy: the nearest divisor of the rollout's length",
            takes="whole", least=1, unless=_NO_MEMORY, to=lambda job, x: job.sizes.sequence),
        row(_models("lstm_cell_size"), "network.core.size", unless=_OF_LSTM),
        row(_models("lstm_use_prev_action"), "network.use_prev_action", unless=_OF_LSTM, to=lambda job, x: bool(x)),
        row(_models("lstm_use_prev_reward"), "network.use_prev_reward", unless=_OF_LSTM, to=lambda job, x: bool(x)),
        row("model.lstm_use_prev_action_reward", "network.use_prev_action, network.use_prev_reward", unless=_OF_LSTM,
            to=lambda job, x: bool(x)),
        row("model.attention_dim", "network.core.size", unless=_OF_ATTENTION),
        row("model.attention_num_transformer_units", "network.core.layers", unless=_OF_ATTENTION),
        row("model.attention_num_heads", "network.core.heads", unless=_OF_ATTENTION),
        row("model.attention_head_dim", "network.core.head_size", unless=_OF_ATTENTION),
        row("model.attention_memory_inference", "network.core.memory", unless=_OF_ATTENTION),
        row("model.attention_memory_training", "network.core.memory", "without attention_memory_inference",
            unless={**_OF_ATTENTION, "jrl has one memory for acting and training: attention_memory_inference":
                    lambda job, x: "model.attention_memory_inference" in job.given}),
        row("model.attention_position_wise_mlp_dim", "network.core.mlp", unless=_OF_ATTENTION),
        row("model.attention_init_gru_gate_bias", "network.core.gate_bias", unless=_OF_ATTENTION),
        *[row(f"model.attention_use_n_prev_{n}s", f"network.use_prev_{n}", "above 0: true", takes="whole", least=0,
              unless=_OF_ATTENTION, to=lambda job, x: x > 0) for n in ("action", "reward")],
    ],
    "Evaluation": [
        row("evaluation_interval", "evaluation.interval, run.report_every",
            "result rows; each covers an iteration",
            unless={"{value}: no evaluation during training": lambda job, x: not x},
            by="evaluation", key="evaluation.interval"),
        row("evaluation_duration evaluation_num_episodes", "evaluation.duration", by="evaluation"),
        row("evaluation_duration_unit", "evaluation.unit", by="evaluation"),
        row("evaluation_sample_timeout_s", "evaluation.timeout_s", by="evaluation"),
        row("evaluation_parallel_to_training", "evaluation.parallel", by="evaluation"),
        *omit("evaluation.parallel evaluates during training", "enable_async_evaluation"),
        row("evaluation_force_reset_envs_before_iteration", "evaluation.force_reset", by="evaluation"),
        row("evaluation_config", "evaluation.config, evaluation.explore", "keys of environment and exploration",
            takes="mapping", by="evaluation", key="evaluation.config"),
        row("evaluation_num_env_runners evaluation_num_workers", "evaluation.num_env_runners", by="evaluation"),
        row("custom_evaluation_function custom_eval_function", "custom.evaluation", by="evaluation"),
        row("always_attach_evaluation_results", "evaluation.always_attach", by="evaluation"),
        row("off_policy_estimation_methods", "data.estimate", _PER_STEP),
        row("input_evaluation", "data.estimate", "as off_policy_estimation_methods; simulation: evaluation.interval"),
        *omit("estimates need whole episodes", "ope_split_batch_by_episode"),
        *omit(_HELD_OUT, "offline_evaluation_interval num_offline_eval_runners offline_evaluation_type "
              "offline_eval_runner_class offline_loss_for_module_fn offline_eval_batch_size_per_runner "
              "dataset_num_iters_per_offline_eval_runner offline_eval_rl_module_inference_only "
              "num_cpus_per_offline_eval_runner num_gpus_per_offline_eval_runner "
              "custom_resources_per_offline_eval_runner offline_evaluation_timeout_s offline_evaluation_duration "
              "offline_evaluation_parallel_to_training max_requests_in_flight_per_offline_eval_runner "
              "broadcast_offline_eval_runner_states validate_offline_eval_runners_after_construction "
              "restart_failed_offline_eval_runners ignore_offline_eval_runner_failures "
              "max_num_offline_eval_runner_restarts offline_eval_runner_health_probe_timeout_s "
              "offline_eval_runner_restore_timeout_s"),
        *omit("an evaluation has exactly the length evaluation.duration",
              "evaluation_auto_duration_min_env_steps_per_sample "
              "evaluation_auto_duration_max_env_steps_per_sample"),
        *omit(_RESTART, "evaluation_unhealthy_workers_timeout_s evaluation_error_after_n_consecutive_skips"),
        *args("evaluation", "evaluation", "", evaluation_every="evaluation.every",
             evaluation_num_envs="evaluation.num_envs", evaluation_explore="evaluation.explore",
             evaluation_record="evaluation.record", evaluation_elo_games="evaluation.elo_games"),
    ],
    "Offline data": [
        row("input_ input", "data.input",
            "a path, a glob, a list, or a mix {sampler: 0.4, path: 0.6}, an exact split of each batch; sampler: not "
            "set. PolicyServerInput is the section external of python -m jrl.serve", by="offline_data", ruled=True),
        row("input_config", "data.input, data.format", "path or paths, and format, for input dataset", takes="mapping",
            unless={"address and port are keys of external": lambda job, x: job.has_clients,
                    "only input dataset needs it": lambda job, x: job.given.get("input_") != "dataset"}),
        row("actions_in_input_normalized", "data.actions_in_input_normalized",
            "by default false in RLlib, in jrl by the data's meta", by="offline_data",
            unless=_NO_INPUT),
        row("dataset_num_iters_per_learner", "data.updates_per_iteration, run.report_every",
            "updates of an iteration and its result row",
            unless={"only for runs from data alone": lambda job, x: not job.is_offline}, by="offline_data",
            doc="updates of an iteration from data: sets updates_per_iteration"),
        *omit("rows are drawn uniformly from all data", "shuffle_buffer_size"),
        *omit("returns and targets are computed for each batch, by the latest parameters",
              "postprocess_inputs prelearner_module_synch_period"),
        *omit(_READER, "input_read_episodes input_read_sample_batches input_read_batch_size input_compress_columns "
              "input_spaces_jsonable"),
        row("input_read_method", "data.format", "read_json, read_parquet; " + _OWN_DATA),
        *refuse("columns have RLlib's names; " + _OWN_DATA, "input_read_schema"),
        *refuse(_OWN_DATA, "offline_data_class prelearner_class"),
        *refuse(_HERE, "input_filesystem"),
        *omit(_HERE, "input_filesystem_kwargs"),
        *omit(_RAY_DATA, "input_read_method_kwargs materialize_data materialize_mapped_data map_batches_kwargs "
              "iter_batches_kwargs prelearner_buffer_class prelearner_buffer_kwargs offline_sampling"),
        *omit("final observations are read; cut episodes bootstrap from them", "ignore_final_observation"),
        *refuse("sequences begin with an episode's initial memory: replay.burn_in updates it",
                 "prelearner_use_recorded_module_states"),
        row("output", "data.output.path", "a directory; logdir: data in the run directory",
            unless={NO_COLLECTION: lambda job, x: job.is_offline}, by="offline_data",
            key="data.output", ruled=True),
        row("output_config", "data.output.path, data.output.format", "its path and format, json or parquet",
            takes="mapping", unless=_NO_OUTPUT),
        row("output_max_file_size", "data.output.max_file_mb", "bytes become MB", takes="number", least=1,
            unless=_NO_OUTPUT, to=lambda job, x: x / 2**20),
        row("output_compress_columns", "data.output.compress", "all arrays of a file are compressed, or none",
            unless=_NO_OUTPUT, to=lambda job, x: bool(x)),
        *omit("whole episodes are written, in files of data.output.max_file_mb: docs/data.md",
              "output_max_rows_per_file output_write_remaining_data output_write_episodes"),
        *omit("see data.output.format and data.output.path", "output_write_method "
              "output_write_method_kwargs output_filesystem output_filesystem_kwargs"),
        *args("offline_data", "data", "where updates_per_iteration validation validation_batches placement estimate",
             input_format="data.format", data_reward="data.reward"),
    ],
    "Multi-agent": [
        row("count_steps_by multiagent.count_steps_by", "rollout.count_steps_by", by="env_runners"),
        row("policies multiagent.policies", "multi_agent.policies",
            "ids, or id -> None, a dict of settings, a PolicySpec or its tuple; the environment has the spaces; "
            "a policy class of RLlib becomes algo.name, other classes are refused", by="multi_agent"),
        row("policy_mapping_fn multiagent.policy_mapping_fn", "multi_agent.mapping",
            "package.module:name of a function of agent and episode, called once, or for each game; or a table",
            unless={**_ONE_POLICY, "RLlib's default: one policy for all agents":
                    lambda job, x: "AlgorithmConfig." in str(x)}, by="multi_agent"),
        row("policies_to_train multiagent.policies_to_train", "multi_agent.policies_to_train",
            "names, or package.module:name of a function of a name", unless=_ONE_POLICY, by="multi_agent"),
        row("algorithm_config_overrides_per_module multiagent.algorithm_config_overrides_per_module",
            "multi_agent.policies", "settings of each policy, by name", takes="mapping"),
        row("observation_fn multiagent.observation_fn", "", _OBS_FN, by="multi_agent",
            key="multi_agent.observation_fn", refused=True),
        *[row(f"{n} multiagent.{n}", "", _STACKED) for n in (
            "policy_map_capacity", "policy_map_cache", "policy_states_are_swappable")],
        row("replay_mode multiagent.replay_mode replay_buffer_config.replay_mode", "multi_agent.replay_mode",
            "lockstep needs uniform replays of one size; independent is the default",
            takes="independent or lockstep", unless={
                "independent: the default": lambda job, x: x == "independent",
                **_ONE_POLICY}),
        container("multiagent multi_agent"),
        *args("multi_agent", "multi_agent", "agents group state agent_id self_play"),
    ],
    "Reporting, debugging and callbacks": [
        row("min_time_s_per_iteration min_time_s_per_reporting min_iter_time_s", "run.report_every_s", unless=_NOT_SET,
            by="reporting"),
        row("min_sample_timesteps_per_iteration min_sample_timesteps_per_reporting timesteps_per_iteration",
            "run.report_every", unless=_NOT_SET, by="reporting"),
        row("min_train_timesteps_per_iteration min_train_timesteps_per_reporting", "run.report_every_trained",
            unless=_NOT_SET, by="reporting"),
        row("metrics_num_episodes_for_smoothing metrics_smoothing_episodes", "run.smoothing_episodes", by="reporting"),
        row("keep_per_episode_custom_metrics", "run.keep_per_episode_metrics", by="reporting"),
        *same("run", "log_level seed", by="debugging"),
        row("log_sys_usage", "run.log_sys_usage", by="reporting"),
        row("fake_sampler", "rollout.fake", by="env_runners"),
        row("callbacks callbacks_class", "custom.callbacks", "derive the class from jrl.callbacks.Callbacks",
            by="callbacks", argument="callbacks_class"),
        *omit("an episode counts with the rollout in which it ends", "metrics_episode_collection_timeout_s "
              "collect_metrics_timeout"),
        *omit("see run.log and run.out", "logger_config logger_creator log_gradients custom_stats_cls_lookup"),
        *refuse("write a method of this name in a class derived from jrl.api.Callbacks", "on_algorithm_init "
                 "on_train_result on_evaluate_start on_evaluate_end on_evaluate_offline_start on_evaluate_offline_end "
                 "on_env_runners_recreated on_offline_eval_runners_recreated on_checkpoint_loaded "
                 "on_environment_created on_episode_created on_episode_start on_episode_step on_episode_end "
                 "on_sample_end"),
        *omit("python -m jrl.export writes other formats", "export_native_model_files"),
        row("checkpoint_trainable_policies_only", "checkpoint.policies", "true: trainable",
            to=lambda job, x: "trainable",
            unless={"checkpoints hold all policies": lambda job, x: not x, **_ONE_POLICY}),
        *omit(_AUTO, "_run_training_always_in_thread _evaluation_parallel_to_training_wo_thread"),
        *args("checkpointing", "checkpoint", "keep_last keep_every keep_best_by keep_best exact",
             checkpoint_every="checkpoint.every", replay_in_checkpoints="checkpoint.replay",
             policies_in_checkpoints="checkpoint.policies"),
        *args("debugging", "run", "log out compile_cache disable_jit max_recompiles on_nonfinite max_rollbacks "
             "rollback_lr stall_seconds"),
    ],
    "Resources": [
        row("num_gpus", "devices.learners", "above 1: that number; 0 is devices.platform=cpu; null: all accelerators"),
        row("num_learners num_learner_workers", "devices.learners", "above 1: that number", by="learners",
            doc="number of devices that learn: sets learners"),
        row("_fake_gpus", "devices.fake", "as many as num_gpus", to=lambda job, x: job.sizes.devices, unless={
            **_NOT_SET, "there is one device": lambda job, x: job.sizes.devices < 2,
            "the number of environments is not a multiple of the devices": lambda job, x: not job.sizes.shared}),
        row("num_cpus_per_env_runner num_cpus_per_worker", "env_runners.num_cpus", by="env_runners"),
        row("num_gpus_per_env_runner num_gpus_per_worker", "env_runners.num_gpus", by="env_runners"),
        row("custom_resources_per_env_runner custom_resources_per_worker", "env_runners.custom_resources",
            by="env_runners"),
        row("placement_strategy", "env_runners.placement", by="resources"),
        *omit("learners are devices of one process: see devices.learners", "custom_resources_per_learner "
              "num_gpus_per_learner num_gpus_per_learner_worker num_cpus_per_learner num_cpus_per_learner_worker "
              "local_gpu_idx"),
        *omit(_TUNE, "custom_resources_for_main_process num_cpus_for_main_process num_cpus_for_local_worker "
              "num_cpus_for_driver"),
        row("extra_python_environs_for_driver", "runtime.env"),
        *omit("runtime.env also applies to env runners", "extra_python_environs_for_worker"),
        *args("learners", "devices", "learners actors platform", fake_devices="devices.fake"),
        *args("resources", "runtime", "xla_flags preallocate mem_fraction cpu_threads",
             ray_address="env_runners.address", environment="runtime.env"),
    ],
    "Framework and experimental": [
        *omit("JAX is the only framework", "framework tf_session_args local_tf_session_args torch_compile_learner "
              "torch_compile_learner_what_to_compile torch_compile_learner_dynamo_backend "
              "torch_compile_learner_dynamo_mode torch_compile_worker torch_compile_worker_dynamo_backend "
              "torch_compile_worker_dynamo_mode _torch_grad_scaler_class _torch_lr_scheduler_classes torch_ddp_kwargs "
              "torch_skip_nan_gradients"),
        row("eager_max_retraces", "run.max_recompiles", "programs that compile again after the first iteration"),
        *omit("run.disable_jit runs each operation without compilation", "eager_tracing eager trace"),
        *omit(_TREES, "_disable_preprocessor_api _disable_action_flattening"),
        row("rl_module_spec _rl_module_spec", "multi_agent.policies, network",
            "MultiRLModuleSpec: the model_config of each module; " + _OWN_MODEL, refused=True),
        *omit(_STACK, "_validate_config _use_msgpack_checkpoints _tf_policy_handles_more_than_one_loss "
              "_disable_execution_plan_api _disable_initialize_loss_from_dummy_batch _enable_new_api_stack "
              "_enable_rl_module_api _enable_learner_api enable_rl_module_and_learner "
              "enable_env_runner_and_connector_v2 is_online _is_atari _AlgorithmConfig__prior_exploration_config "
              "__all_models__"),
    ],
}  # fmt: skip


class AlgorithmRow(NamedTuple):
    name: str  # in jrl
    note: str = ""
    parts: Mapping[str, Any] = types.MappingProxyType({})  # jrl's keys of the algorithm; a file's keys win


# name of RLlib's algorithm, lower case -> jrl's
ALGORITHMS = {
    "ppo": AlgorithmRow("ppo"),
    "ddppo": AlgorithmRow("ppo", "jrl's PPO learns data-parallel on all devices"),
    "appo": AlgorithmRow("appo"),
    "impala": AlgorithmRow("impala"),
    "a2c": AlgorithmRow("a2c"),
    "a3c": AlgorithmRow("a2c", "workers apply no gradients: one update learns from all workers"),
    "pg": AlgorithmRow("a2c", "without critic", {"algo.use_critic": False, "algo.ent_coef": 0.0}),
    "dqn": AlgorithmRow("dqn"),
    "simpleq": AlgorithmRow("dqn", "DQN without extensions"),
    "rainbow": AlgorithmRow("dqn", "its parts are keys of dqn: see configs/rainbow.yaml"),
    "apex": AlgorithmRow("dqn", "an epsilon per worker is algo.exploration {name: epsilon_greedy, ladder: true}, "
                      "collection beside learning is rollout.mode async: see configs/apex_dqn.yaml"),
    "apex_dqn": AlgorithmRow("dqn", "see APEX"),
    "r2d2": AlgorithmRow(
        "dqn", "with double, dueling, value_rescaling, prioritised sequences, and network.core lstm",
        {"algo.double": True, "algo.dueling": True, "algo.value_rescaling": True, "replay.prioritized": True},
    ),
    "sac": AlgorithmRow("sac"),
    "tqc": AlgorithmRow(
        "sac", "with critic.kind quantiles, critic.dropped_atoms 2, actor_q mean, as in configs/tqc.yaml",
        {"algo.critic.kind": "quantiles", "algo.critic.dropped_atoms": 2, "algo.actor_q": "mean"},
    ),
    "rnnsac": AlgorithmRow("sac", "with network.core lstm"),
    "td3": AlgorithmRow("td3"),
    "ddpg": AlgorithmRow(
        "td3", "with num_critics 1, policy_every 1, target_noise 0, as in configs/ddpg.yaml",
        {"algo.num_critics": 1, "algo.policy_every": 1, "algo.target_noise": 0.0},
    ),
    "bc": AlgorithmRow("bc"),
    "marwil": AlgorithmRow("marwil"),
    "cql": AlgorithmRow("sac", "with conservative true", {"algo.conservative": True}),
    "iql": AlgorithmRow("iql"),
    "ars": AlgorithmRow("ars", "network.hidden: [] is the linear policy of its paper"),
    "es": AlgorithmRow("es"),
    "dt": AlgorithmRow(
        "dt", "one token for each step, of the observation, the action before it and the return to go",
        {"network.core.name": "gtrxl", "network.use_prev_action": True, "network.use_prev_reward": True},
    ),
}  # fmt: skip
# algorithm of RLlib that jrl lacks -> hint
INSTEAD = {"crr": "marwil with weight: binary has its filter, over returns, and iql its critic"}

KEYS: dict[str, KeyRow] = {name: key for group in GROUPS.values() for key in group for name in key.names}
# name of a container, a dict whose keys have rows -> newest name
CONTAINERS = {name: key.name for name, key in KEYS.items() if key.note == _CONTAINER}


def markdown() -> str:
    """Returns the table in docs/rllib-users.md."""
    lines = []
    for title, keys in GROUPS.items():
        lines += [f"### {title}", "", "| RLlib | jrl | |", "| --- | --- | --- |"]
        found: dict[tuple[str, str], list[str]] = {}
        for key in keys:  # keys that jrl lacks share a line by reason
            if key.names:
                found.setdefault((key.ours and key.name, key.note), []).extend(key.names)
        for (name, note), names in found.items():
            ours = " ".join(f"`{n}`" for n in KEYS[name].ours.split(", ")) if name else "none"
            lines.append(f"| {' '.join(f'`{n}`' for n in names)} | {ours} | {note} |")
        lines.append("")
    return "\n".join(lines)
