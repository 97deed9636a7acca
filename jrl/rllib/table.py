"""The table of RLlib's names: each key of a configuration in all its spellings, what it becomes in jrl, what to tell.

`jrl.rllib.migration` and the builder's methods (`jrl.rllib.builder`) read GROUPS; docs/rllib-users.md prints it. A key
that is more than a move or a conversion has a rule in one of the rules modules.
"""

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.rllib import exploration, policy_server

Condition = Callable[[Any, Any], Any]  # (translation.Job, value of the key) -> result


class Row(NamedTuple):
    """The names of a key, and what becomes of its value. Checks come first, then `unless`, a rule, `to` and `ours`."""

    names: tuple[str, ...]  # RLlib's, newest first; a.b is b in the dict a; (): jrl's builder alone has the argument
    ours: str  # dotted keys of jrl, separated by ", "; "": none
    note: str = ""  # the difference, or the reason why there is no counterpart; for the user
    takes: str = ""  # kind of values that are checked: mapping, whole, number, or the values joined by " or "
    least: float = -math.inf  # smallest number that is accepted
    unless: Mapping[str, Condition] = types.MappingProxyType({})  # reason why nothing follows -> whether it holds
    to: Condition | None = None  # converts the value; None: it moves as it is
    said: str | Condition = ""  # note in the key's line
    lacking: bool = False  # the key changes what is learned, and jrl has nothing like it
    by: str = ""  # methods of AlgorithmConfig that take it as an argument
    argument: str = ""  # name of that argument; "": the newest name
    key: str = ""  # the key that the argument sets; "": `ours`
    doc: str = ""  # documentation of an argument whose keys are worked out with others
    ruled: bool = False  # the argument is translated as in a file; otherwise it sets its key directly

    @property
    def name(self) -> str:
        """Return the newest name, by which rules know the row."""
        return self.names[0]


def row(names: str, ours: str, note: str = "", **more: Any) -> Row:
    return Row(tuple(names.split()), ours, note, **more)


def none(reason: str, names: str) -> list[Row]:
    return [row(n, "", reason) for n in names.split()]


def lacking(reason: str, names: str) -> list[Row]:
    return [row(n, "", reason, lacking=True) for n in names.split()]


_INSIDE = "its keys have rows of their own"


def container(names: str, **more: Any) -> Row:
    return row(names, "", _INSIDE, takes="mapping", **more)


def same(section: str, names: str, **more: Any) -> list[Row]:
    return [row(n, f"{section}.{n}", **more) for n in names.split()]


def own(method: str, section: str, names: str, **more: str) -> list[Row]:
    """Make the rows of arguments that RLlib does not have: fields of a section, and others with their keys."""
    keys = {name: f"{section}.{name}" for name in names.split()} | more
    return [Row((), key, by=method, argument=name, key=key) for name, key in keys.items()]


def _models(name: str) -> str:
    """Return the names of a key of the model, which RNNSAC has once for each of its networks."""
    return f"model.{name} policy_model_config.{name} policy_model.{name} q_model_config.{name} Q_model.{name}"


def schedule(job: Any, value: Any) -> Any:
    """Return a number or schedule [[step, number], ...], which begins with step 0."""
    if not isinstance(value, list | tuple) or not value:
        return value
    points = [list(point) if isinstance(point, list | tuple) else point for point in value]
    first = points[0]
    return [[0, *first[1:]], *points] if isinstance(first, list) and first and first[0] != 0 else points


WITH_CRITICS = ("sac", "td3", "iql")  # algorithms with critics beside the policy
NO_COLLECTION = "nobody collects: the run learns from data alone"
_OF_DT: dict[str, Condition] = {"of DT's transformer": lambda job, x: job.source != "dt"}
_NO_MEMORY: dict[str, Condition] = {
    "there is no memory: use_lstm and use_attention are off": lambda job, x: job.core is None
}
_OF_LSTM: dict[str, Condition] = {**_NO_MEMORY, "use_lstm is off": lambda job, x: job.core != "lstm"}
_OF_ATTENTION: dict[str, Condition] = {**_NO_MEMORY, "use_attention is off": lambda job, x: job.core != "gtrxl"}
_NOT_SET: dict[str, Condition] = {"{value}: not set": lambda job, x: not x}
_NO_INPUT: dict[str, Condition] = {
    "there is no input": lambda job, x: job.given.get("input_", job.settled("data.input")) in (None, "sampler")
}
_NO_OUTPUT: dict[str, Condition] = {
    "nothing is written: output is not set": lambda job, x: job.given.get("output") is None
}
_ONE_POLICY: dict[str, Condition] = {"there is one policy": lambda job, x: job.has_one_policy}
_NO_SMOOTHING: dict[str, Condition] = {
    "smooth_target_policy is off": lambda job, x: not job.given.get("smooth_target_policy", job.source != "ddpg")
}
_AUTO = "jrl does so by itself"
_HELD_OUT = "data.validation holds episodes out, whose loss stands in each result row"
_PER_STEP = "is and wis weigh each step, as pdis and wpdis do; the data need log-probabilities"
_OWN_LOSS = "a loss of your own is custom.loss, a step of your own custom.training_step"
_STACKED = "policies that are alike in all but their weights are stacked in one program, and none is swapped out"
_OBS_FN = (
    "RLlib's is called with worker, base_env, policies and episode: write a pure function {agent: observation} -> "
    "{agent: what it sees}, and name it in multi_agent.observation_fn"
)
_TORSO = "network.torso and network.encoders choose of what there is, by the observations: see docs/networks.md"
_CNN = "CNNs are network.torso=nature_cnn, impala or small_cnn, or one of your own (docs/networks.md): leave it out"
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
_RECORD = "videos: evaluation.record while training, jrl record from a checkpoint"

_GAPS = "jrl's transformer has no dropout and its optimizer no weight decay"
_READER = "files show what they hold: see data.format"
_RAY_DATA = "of Ray Data: jrl reads the files itself, data.placement says where they lie then"
_OWN_DATA = (
    "what makes data of your own is a function () -> EpisodeStore, which data.input names as package.module:name; what "
    "changes each batch is custom.batch"
)
_ENTROPY = "the entropy, which differs from the sum of the log deviations by a constant"
_HERE = "data.input names files of this machine"

GROUPS: dict[str, list[Row]] = {
    "Experiment": [
        row("run algo algo_class", "algo.name", "in a tuned example; otherwise `--algo PPO`",
            unless={"--algo is given, too": lambda job, x: True}),
        row("stop", "stop", "metrics are renamed; jrl needs a number of env_steps among them", takes="mapping"),
        row("checkpoint_freq checkpoint_config.checkpoint_frequency", "checkpoint.every", "iterations become steps",
            takes="whole", unless={"{value}: jrl keeps one every 5 minutes and at the end": lambda job, x: not x},
            to=lambda job, x: x * job.sizes.iteration(job),
            said=lambda job, x: f"{x} iterations of {job.steps(job.sizes.iteration(job))}"),
        row("keep_checkpoints_num checkpoint_config.num_to_keep", "checkpoint.keep_last"),
        row("checkpoint_score_attr checkpoint_config.checkpoint_score_attribute", "checkpoint.keep_best_by"),
        row("checkpoint_config.checkpoint_score_order", "checkpoint.keep_best"),
        row("checkpoint_at_end checkpoint_config.checkpoint_at_end", "", "the end of a run always has a checkpoint"),
        container("checkpoint_config"),
        row("pass_criteria", "", "put them under stop and use --as-test"),
        row("restore", "", "python -m jrl.train --resume continues a run of jrl"),
        row("local_dir storage_path", "", "the directory of a run is run.out"),
        *none(_TUNE, "num_samples resources_per_trial trial_resources max_failures sync_config upload_dir scheduler "
              "search_alg name"),
    ],
    "Environment": [
        row("env", "env.id", "a class path has a colon here: `package.module:Class`", by="environment"),
        row("env_config", "env.options", takes="mapping", by="environment"),
        *same("env", "horizon soft_horizon clip_rewards normalize_actions clip_actions", by="environment"),
        row("no_done_at_end", "env.no_done_at_end", "jrl's default, null, bootstraps at time limits only",
            by="environment"),
        row("env_task_fn", "custom.env_task", by="environment"),
        *[row(name, ours, "where clients play (input PolicyServerInput); otherwise spaces come from the environment",
              unless={"spaces come from the environment": lambda job, x: not job.with_clients}, to=convert)
          for name, ours, convert in (
              ("observation_space", "external.observation", lambda job, x: policy_server.space(x, "observation_space")),
              ("action_space", "external.action", lambda job, x: policy_server.space(x, "action_space")))],
        *none(_RECORD, "render_env record_env monitor"),
        row("is_atari", "", "jrl knows Atari by the id"),
        row("action_mask_key", "", "call the item of the observation action_mask, or name an entry of the infos by "
            "env.action_mask_info", lacking=True,
            unless={"{value}: what jrl reads": lambda job, x: x == "action_mask"}),
        row("preprocessor_pref", "", "Atari comes as 84 x 84 gray frames, other observations as they are"),
        *none(_AUTO, "disable_env_checking auto_wrap_old_gym_envs"),
        *own("environment", "env", "backend reward_scale frame_stack action_mask_info",
             env_batch_size="env.batch_size"),
    ],
    "Env runners (rollout workers)": [
        row("num_env_runners num_rollout_workers num_workers", "env_runners.num, env.num_envs",
            "env.num_envs counts all: max(1, runners) x environments of each, which are 8 in all or the nearest",
            takes="whole", least=0, unless={NO_COLLECTION: lambda job, x: job.from_data},
            by="env_runners", key="env_runners.num"),
        row("num_envs_per_env_runner num_envs_per_worker", "env.num_envs", "times max(1, runners)",
            to=lambda job, x: job.sizes.num_envs, said=lambda job, x: f"{x} x {job.sizes.collecting} runners",
            by="env_runners", doc="environments of each runner, or of this process without any: sets num_envs"),
        row("rollout_fragment_length sample_batch_size", "rollout.length, replay.train_every",
            "on-policy: train_batch_size decides, if it is given; replay: one update for each round of fragments",
            unless={NO_COLLECTION: lambda job, x: job.from_data}, by="env_runners", key="rollout.length", ruled=True),
        row("batch_mode", "rollout.batch_mode", by="env_runners",
            unless={"sequences from replay end with their episodes by themselves":
                    lambda job, x: x == "complete_episodes" and job.replays and job.core}),
        row("sample_async", "rollout.mode", "true: async", to=lambda job, x: "async" if x else "sync"),
        row("remote_worker_envs", "env.remote_worker_envs", by="environment"),
        row("remote_env_batch_wait_ms", "env.batch_wait_ms", "with remote_worker_envs only", by="environment", unless={
            "it counts with remote_worker_envs only": lambda job, x: not job.given.get("remote_worker_envs"),
            "whole episodes are collected from environments that wait for each other":
                lambda job, x: job.given.get("batch_mode") == "complete_episodes"}),
        row("observation_filter", "algo.normalize_obs", "MeanStdFilter: true",
            takes="NoFilter or MeanStdFilter or ConcurrentMeanStdFilter", to=lambda job, x: x != "NoFilter",
            unless={"NoFilter: not set": lambda job, x: x == "NoFilter" and "normalize_obs" not in job.fields}),
        *same("env_runners", "compress_observations sample_timeout_s", by="env_runners"),
        row("max_requests_in_flight_per_env_runner max_requests_in_flight_per_sampler_worker "
            "max_sample_requests_in_flight_per_worker",
            "env_runners.max_requests_in_flight", "with rollout.mode async", by="env_runners"),
        *none("the learner's process makes environments where there are no runners", "create_local_env_runner "
              "create_env_on_local_worker create_env_on_driver"),
        *none("every process acts with the learner's statistics", "synchronize_filters update_worker_filter_stats "
              "use_worker_filter_stats"),
        *lacking(_CONNECT, "module_to_env_connector"),
        *none(_CONNECT, "sample_collector enable_connectors add_default_connectors_to_env_to_module_pipeline "
              "add_default_connectors_to_module_to_env_pipeline"),
        *lacking("see algo.normalize_obs, env.frame_stack, network.flatten, network.use_prev_action and transform",
                 "env_to_module_connector"),
        *none(_AUTO, "validate_env_runners_after_construction validate_workers_after_construction "
              "merge_env_runner_states use_env_runner_state_server env_runner_state_server_max_concurrency "
              "episode_lookback_horizon enable_tf1_exec_eagerly synchronize_filter gym_env_vectorize_mode "
              "sampler_perf_stats_ema_coef episodes_to_numpy env_runner_cls in_evaluation"),
        *own("env_runners", "rollout", "max_policy_lag collector iterations_per_call", num_envs="env.num_envs",
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
        *none(_RESTART, "num_consecutive_env_runner_failures_tolerance num_consecutive_worker_failures_tolerance "
              "delay_between_env_runner_restarts_s delay_between_worker_restarts_s env_runner_restore_timeout_s "
              "worker_restore_timeout_s"),
        *own("fault_tolerance", "env_runners", "env_step_timeout_s"),
    ],
    "Training": [
        *same("algo", "gamma microbatch_size circular_buffer_num_batches circular_buffer_iterations_per_batch tau"),
        row("lr", "algo.lr", "a number or [[steps, value], ...]", to=schedule, unless={
            "lr_schedule takes its place": lambda job, x: "lr_schedule" in job.given,
            "critic_lr takes its place": lambda job, x: "critic_lr" in job.given and job.algo in WITH_CRITICS}),
        row("lr_schedule", "algo.lr", "takes the place of lr", to=schedule),
        row("train_batch_size", "rollout.length, replay.batch_size",
            "on-policy: env.num_envs x rollout.length; replay: transitions of a gradient step", by="training",
            doc="rows of an iteration, which sets rollout_fragment_length; of algorithms with replay the rows of "
            "an update"),
        row("train_batch_size_per_learner", "rollout.length, replay.batch_size", "times max(1, num_learners)"),
        row("minibatch_size sgd_minibatch_size mini_batch_size_per_learner", "algo.num_minibatches",
            "the nearest number that divides the rows of an iteration", by="training",
            doc="rows of a gradient step, of algorithms with minibatches: sets num_minibatches"),
        row("num_epochs num_sgd_iter", "algo.num_epochs"),
        row("grad_clip", "algo.max_grad_norm, algo.max_leaf_norm, algo.max_grad_value", "as grad_clip_by says"),
        row("grad_clip_by", "algo.max_grad_norm, algo.max_leaf_norm, algo.max_grad_value",
            "global_norm, norm or value"),
        row("optimizer.adam_epsilon optimizer.epsilon optimizer.eps adam_epsilon", "algo.adam_eps"),
        row("lambda lambda_", "algo.gae_lambda",
            "RLlib's V-trace has none: there it is left out"),
        row("use_gae", "algo.gae_lambda", "false: gae_lambda 1, the return to the end of the rollout",
            to=lambda job, x: 1.0, said="the return to the end of the rollout", unless={
                "{algo} has no gae_lambda": lambda job, x: job.replays,
                "true: what jrl does": lambda job, x: x,
                "{algo} has V-trace": lambda job, x: "gae_lambda" not in job.fields}),
        row("clip_param", "algo.clip_eps"),
        row("vf_clip_param", "algo.value_clip_eps",
            "RLlib bounds the squared error, jrl the value's move in an update: the square root is taken",
            takes="number", least=0, unless={"no bound": lambda job, x: x == math.inf},
            to=lambda job, x: math.sqrt(x),
            said=lambda job, x: f"RLlib bounds the squared error by {x:g}, jrl how far the value moves"),
        row("vf_loss_coeff", "algo.vf_coef", "PPO's is doubled: jrl takes half the squared error", takes="number",
            to=lambda job, x: x * (2 if job.algo == "ppo" else 1),
            said=lambda job, x: f"2 x {x:g}, of half the squared error" * (job.algo == "ppo")),
        row("entropy_coeff", "algo.ent_coef", to=schedule, unless={
            "{algo} has none": lambda job, x: job.replays,
            "entropy_coeff_schedule takes its place": lambda job, x: "entropy_coeff_schedule" in job.given}),
        row("entropy_coeff_schedule", "algo.ent_coef", "takes the place of entropy_coeff", to=schedule,
            unless={"{algo} has none": lambda job, x: job.replays}),
        row("kl_coeff", "algo.kl_coef"),
        row("kl_target", "algo.kl_target", "jrl needs a kl_coef above 0 beside it"),
        row("use_kl_loss", "algo.kl_coef", "false: null"),
        row("vf_share_layers", "network.shared"),
        row("vtrace_clip_rho_threshold", "algo.clip_rho"),
        row("vtrace_clip_pg_rho_threshold", "algo.clip_pg_rho"),
        row("target_worker_clipping", "algo.clip_target_ratio"),
        row("target_network_update_freq target_update_frequency target_network_update_frequency",
            "algo.target_update_every",
            "DQN: environment steps become gradient steps; SAC and TD3 move their targets with every step",
            takes="whole", least=0,
            to=lambda job, x: max(1, round(x * job.sizes.updates_per_step)) if job.algo == "dqn" else x,
            said=lambda job, x: f"{x} environment steps x {job.sizes.updates_per_step:g} gradient steps of each"
            * (job.algo == "dqn"),
            unless={"{algo} moves its targets with every step, by algo.tau": lambda job, x: job.algo in WITH_CRITICS,
                    "{algo} has no target_update_every": lambda job, x: "target_update_every" not in job.fields}),
        container("optimizer"),
        *none("jrl always has a value network, and V-trace in IMPALA and APPO", "use_critic vtrace"),
        *none("the optimizer is Adam", "opt_type decay momentum optimizer.type optimizer.beta1 optimizer.beta2 "
              "optimizer.weight_decay _separate_vf_optimizer _lr_vf"),
        *none("rows are always shuffled", "shuffle_batch_per_epoch shuffle_sequences"),
        *none(_QUEUES, "vtrace_drop_last_ts num_multi_gpu_tower_stacks minibatch_buffer_size replay_proportion "
              "replay_ratio replay_buffer_num_slots learner_queue_size learner_queue_timeout broadcast_interval "
              "broadcast_env_runner_states num_aggregation_workers num_aggregator_actors_per_learner "
              "max_requests_in_flight_per_aggregator_worker max_requests_in_flight_per_aggregator_actor "
              "max_requests_in_flight_per_learner use_circular_buffer simple_queue_size num_gpu_loader_threads "
              "timeout_s_sampler_manager timeout_s_aggregator_manager keep_local_weights_in_sync "
              "optimizer.max_weight_sync_delay optimizer.num_replay_buffer_shards optimizer.debug "
              "max_weight_sync_delay num_replay_buffer_shards"),
        *lacking(_OWN_LOSS, "learner_class policy_class _learner_class"),
        *none(_OWN_LOSS, "learner_config_dict"),
        *lacking("an Algorithm's own training_step(self, step) replaces steps of the loop", "after_train_step"),
        *lacking("a pure function of what an update learns from is custom.batch", "before_learn_on_batch"),
        row("learner_connector", "", _CONNECT, lacking=True, by="training", key="custom.transforms"),
        *none(_CONNECT, "add_default_connectors_to_learner_pipeline"),
        *none("there is one way to learn on several devices", "simple_optimizer"),
        *own("training", "custom", "training_step", reward_fn="custom.reward", batch_transforms="custom.batch",
             loss_fn="custom.loss"),
    ],
    "DQN": [
        row("double_q", "algo.double"),
        *same("algo", "dueling noisy v_min v_max"),
        row("sigma0", "algo.noisy_sigma"),
        row("num_atoms", "algo.num_atoms, algo.head", "above 1: head c51", takes="whole", least=1, ruled=True),
        row("hiddens", "network.head_hidden"),
        row("td_error_loss_fn", "algo.loss"),
        row("epsilon", "algo.exploration", "a number or [[steps, epsilon], ...]; of IMPALA it is RMSprop's",
            to=lambda job, x: {"name": "epsilon_greedy", "epsilon": schedule(job, x)}, unless={
                "of RMSprop: the optimizer is Adam": lambda job, x: job.algo != "dqn",
                "exploration_config takes its place": lambda job, x: "exploration_config" in job.given}),
        *none("use exploration_config", "exploration_fraction exploration_final_eps exploration_initial_eps "
              "schedule_max_timesteps soft_q softmax_temp parameter_noise per_worker_exploration"),
        *none("jrl takes the best action where RLlib has a temperature", "categorical_distribution_temperature"),
        row("use_h_function", "algo.value_rescaling", "of R2D2, which has it unless told otherwise"),
        row("h_function_epsilon", "", "jrl's is 0.001, as the paper's"),
    ],
    "SAC, TD3 and DDPG": [
        row("critic_lr optimization.critic_learning_rate", "algo.lr"),
        row("actor_lr optimization.actor_learning_rate", "algo.actor_lr"),
        row("alpha_lr optimization.entropy_learning_rate", "algo.ent_coef_lr"),
        row("initial_alpha", "algo.ent_coef", unless={"{algo} has none": lambda job, x: job.algo != "sac"}),
        row("target_entropy", "algo.target_entropy", "auto: null, of which jrl's default is the same", ruled=True,
            unless={"auto: jrl's default is the same": lambda job, x: x == "auto"}),
        row("twin_q", "algo.num_critics", "true: 2, false: 1", to=lambda job, x: 2 if x else 1),
        row("policy_delay", "algo.policy_every"),
        row("smooth_target_policy", "algo.target_noise", "false: 0",
            to=lambda job, x: job.fields.get("target_noise") if x else 0.0, unless={"true: see algo.target_noise":
                lambda job, x: x and (job.source != "ddpg" or "target_noise" in job.given)}),
        *same("algo", "target_noise target_noise_clip", unless=_NO_SMOOTHING),
        row("policy_model_config.fcnet_hiddens policy_model.fcnet_hiddens actor_hiddens", "network.hidden"),
        row("policy_model_config.fcnet_activation policy_model.fcnet_activation actor_hidden_activation",
            "network.activation"),
        row("q_model_config.fcnet_hiddens Q_model.fcnet_hiddens critic_hiddens", "network.critic_hidden",
            "network.hidden without widths of the policy"),
        row("q_model_config.fcnet_activation Q_model.fcnet_activation critic_hidden_activation",
            "network.activation", "the policy's counts"),
        *none(_TORSO, "use_state_preprocessor"),
        *map(container, ("policy_model_config", "q_model_config", "policy_model", "Q_model")),
        *none("the critics' loss is the squared error, without a penalty on weights",
              "use_huber huber_threshold l2_reg"),
        *none("policies are Gaussian, squashed by tanh", "_deterministic_loss _use_beta_distribution"),
        container("optimization optimization_config"),
    ],
    "BC, MARWIL, CQL, IQL and DT": [
        row("beta", "algo.beta", "of MARWIL and IQL: both multiply the advantage with it",
            unless={"bc imitates all alike: it is marwil with beta 0": lambda job, x: job.algo == "bc"}),
        row("bc_logstd_coeff", "algo.ent_coef", _ENTROPY, unless=_NOT_SET, said=_ENTROPY),
        row("moving_average_sqd_adv_norm_update_rate", "algo.adv_norm_rate"),
        row("moving_average_sqd_adv_norm_start", "algo.adv_norm_start"),
        row("vf_coeff", "algo.vf_coef"),
        row("burnin_len", "replay.burn_in", "with a core", unless={**_NOT_SET, **_NO_MEMORY}),
        row("bc_iters", "algo.bc_updates", "iterations become updates", takes="whole", least=0,
            to=lambda job, x: x * (job.sizes.iteration(job) if job.from_data else 1)),
        row("temperature", "algo.cql_temperature", "of CQL"),
        row("num_actions", "algo.cql_actions"),
        row("min_q_weight", "algo.cql_weight"),
        row("lagrangian", "algo.cql_target_gap", "true: lagrangian_thresh, by default 5, over min_q_weight"),
        row("lagrangian_thresh", "algo.cql_target_gap",
            "with lagrangian; over min_q_weight, which RLlib's gap contains"),
        *same("algo", "deterministic_backup expectile value_lr"),
        row("target_return", "algo.target_return", "of DT"),
        row("max_ep_len", "algo.step_scale", "numbers of steps are divided by it, not embedded"),
        row("embed_dim", "network.core.size", "of DT, whose core is gtrxl", unless=_OF_DT),
        row("num_layers", "network.core.layers", unless=_OF_DT),
        row("num_heads", "network.core.heads", unless=_OF_DT),
        *none(_GAPS, "embed_pdrop resid_pdrop attn_pdrop num_warmup_steps"),
        *lacking("DT learns actions alone", "loss_coef_obs loss_coef_returns_to_go use_obs_output use_return_output"),
        *none("actions are all that DT learns", "loss_coef_actions"),
    ],
    "Replay": [
        row("replay_buffer_config.capacity buffer_size", "replay.capacity",
            "with memory: sequences become transitions, unless storage_unit is another", takes="whole", least=1),
        row("replay_buffer_config.replay_burn_in replay_burn_in burn_in_len burn_in", "replay.burn_in",
            "with memory only", unless=_NO_MEMORY),
        row("replay_buffer_config.replay_sequence_length replay_sequence_length", "",
            "it is network.max_seq_len and replay.burn_in together"),
        row("replay_buffer_config.replay_zero_init_states replay_buffer_config.zero_init_states zero_init_states", "",
            "sequences begin with the memory that acting had there, which burn_in brings up to date"),
        row("num_steps_sampled_before_learning_starts replay_buffer_config.learning_starts learning_starts",
            "replay.learning_starts"),
        row("replay_buffer_config.type", "replay.prioritized", "whether it is a prioritized one"),
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
        *none("replay.priority_beta takes a schedule", "beta_annealing_fraction"),
        row("training_intensity", "replay.updates_per_step", "divided by the batch size: gradient steps per step",
            takes="number", least=0, unless={
                NO_COLLECTION: lambda job, x: job.from_data,
                "{algo} keeps no replay": lambda job, x: not job.replays,
                "0: not set": lambda job, x: job.sizes.train_every is None}),
        row("n_step", "replay.n_step"),
        row("store_buffer_in_checkpoints", "checkpoint.replay", "true: full, false: none",
            to=lambda job, x: "full" if x else "none"),
        container("replay_buffer_config", by="training", key="replay"),
        *none("what is replayed are transitions, or with memory sequences", "replay_buffer_config.storage_unit "
              "replay_buffer_config.replay_batch_size replay_batch_size"),
        *none("the buffer lies on the learner's devices", "replay_buffer_config.num_replay_buffer_shards "
              "replay_buffer_config.no_local_replay_buffer "
              "replay_buffer_config.replay_buffer_shards_colocated_with_driver "
              "replay_buffer_config._enable_replay_buffer_api replay_buffer_config.worker_side_prioritization "
              "worker_side_prioritization replay_buffer_config.metrics_num_episodes_for_smoothing"),
    ],
    "Exploration": [
        row("explore", "rollout.explore", "for evaluation it is evaluation.explore", by="env_runners exploration"),
        row("exploration_config", "algo.exploration", "see [replay](replay.md)", by="env_runners exploration",
            to=lambda job, x: exploration.from_rllib(x, job.source), unless={"it is empty": lambda job, x: not x}),
    ],
    "Model": [
        row("model.fcnet_hiddens", "network.hidden"),
        row("model.fcnet_activation", "network.activation", "tanh, relu, elu, gelu, swish (silu)"),
        row("model.post_fcnet_hiddens model.head_fcnet_hiddens", "network.head_hidden", "each head has its own"),
        row("model.vf_share_layers", "network.shared"),
        row("model.free_log_std", "network.state_dependent_std", "the opposite", to=lambda job, x: not x),
        container("model model_config _model_config model_config_dict", by="training", key="network"),
        *lacking(_CNN, "model.conv_filters"),
        *none(_TORSO, "model.conv_activation model.post_fcnet_activation model.head_fcnet_activation "
              "model.no_final_linear model.encoder_latent_dim"),
        *lacking(_OWN_MODEL, "model.custom_model"),
        *none(_OWN_MODEL, "model.custom_model_config model.custom_options"),
        *lacking("distributions follow from the action space", "model.custom_action_dist"),
        *none("distributions follow from the action space", "model.log_std_clip_param"),
        *none(_INITIAL, "model.fcnet_kernel_initializer model.fcnet_bias_initializer model.lstm_kernel_initializer "
              "model.lstm_bias_initializer"),
        *none("shapes are known before the first step", "model.always_check_shapes model._time_major"),
        *none(_TREES, "model._disable_preprocessor_api model._disable_action_flattening"),
        *none(_STACK, "model._use_default_native_models model.uses_new_env_runners"),
        *none(_FRAMES, "model.framestack model.num_framestacks model.dim model.grayscale model.zero_mean"),
        *lacking("a pure function of an observation is network.transform", "model.custom_preprocessor"),
        *none("a pure function of an observation is network.transform", "model.custom_preprocessor_options"),
    ],
    "Memory": [
        row(_models("use_lstm"), "network.core.name", "true: lstm"),
        row("model.use_attention", "network.core.name", "true: gtrxl"),
        row("model.max_seq_len", "network.max_seq_len", "on-policy: the nearest number that divides a rollout",
            takes="whole", least=1, unless=_NO_MEMORY, to=lambda job, x: job.sizes.sequence, said=lambda job, x:
            f"the nearest that divides a rollout of {job.sizes.steps} steps, not {x}" * (job.sizes.sequence != x)),
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
        row("model.attention_memory_training", "network.core.memory", "where there is no attention_memory_inference",
            unless={**_OF_ATTENTION, "jrl trains with the memory that it acts with: attention_memory_inference":
                    lambda job, x: "model.attention_memory_inference" in job.given}),
        row("model.attention_position_wise_mlp_dim", "network.core.mlp", unless=_OF_ATTENTION),
        row("model.attention_init_gru_gate_bias", "network.core.gate_bias", unless=_OF_ATTENTION),
        *[row(f"model.attention_use_n_prev_{n}s", f"network.use_prev_{n}", "above 0: true", takes="whole", least=0,
              unless=_OF_ATTENTION, to=lambda job, x: x > 0) for n in ("action", "reward")],
    ],
    "Evaluation": [
        row("evaluation_interval", "evaluation.interval, run.report_every",
            "result rows, each of which covers an iteration",
            unless={"{value}: no evaluation during training": lambda job, x: not x},
            by="evaluation", key="evaluation.interval"),
        row("evaluation_duration evaluation_num_episodes", "evaluation.duration", by="evaluation"),
        row("evaluation_duration_unit", "evaluation.unit", by="evaluation"),
        row("evaluation_sample_timeout_s", "evaluation.timeout_s", by="evaluation"),
        row("evaluation_parallel_to_training", "evaluation.parallel", by="evaluation"),
        *none("evaluation.parallel plays beside training", "enable_async_evaluation"),
        row("evaluation_force_reset_envs_before_iteration", "evaluation.force_reset", by="evaluation"),
        row("evaluation_config", "evaluation.config, evaluation.explore", "keys of environment and exploration",
            takes="mapping", by="evaluation", key="evaluation.config"),
        row("evaluation_num_env_runners evaluation_num_workers", "evaluation.num_env_runners", by="evaluation"),
        row("custom_evaluation_function custom_eval_function", "custom.evaluation", by="evaluation"),
        row("always_attach_evaluation_results", "evaluation.always_attach", by="evaluation"),
        row("off_policy_estimation_methods", "data.estimate", _PER_STEP),
        row("input_evaluation", "data.estimate", "as off_policy_estimation_methods; simulation: evaluation.interval"),
        *none("estimates are of whole episodes", "ope_split_batch_by_episode"),
        *none(_HELD_OUT, "offline_evaluation_interval num_offline_eval_runners offline_evaluation_type "
              "offline_eval_runner_class offline_loss_for_module_fn offline_eval_batch_size_per_runner "
              "dataset_num_iters_per_offline_eval_runner offline_eval_rl_module_inference_only "
              "num_cpus_per_offline_eval_runner num_gpus_per_offline_eval_runner "
              "custom_resources_per_offline_eval_runner offline_evaluation_timeout_s offline_evaluation_duration "
              "offline_evaluation_parallel_to_training max_requests_in_flight_per_offline_eval_runner "
              "broadcast_offline_eval_runner_states validate_offline_eval_runners_after_construction "
              "restart_failed_offline_eval_runners ignore_offline_eval_runner_failures "
              "max_num_offline_eval_runner_restarts offline_eval_runner_health_probe_timeout_s "
              "offline_eval_runner_restore_timeout_s"),
        *none("evaluation plays exactly what evaluation.duration says",
              "evaluation_auto_duration_min_env_steps_per_sample "
              "evaluation_auto_duration_max_env_steps_per_sample"),
        *none(_RESTART, "evaluation_unhealthy_workers_timeout_s evaluation_error_after_n_consecutive_skips"),
        *own("evaluation", "evaluation", "", evaluation_every="evaluation.every",
             evaluation_num_envs="evaluation.num_envs", evaluation_explore="evaluation.explore",
             evaluation_record="evaluation.record"),
    ],
    "Offline data": [
        row("input_ input", "data.input",
            "a path, a glob, a list, or a mix {sampler: 0.4, path: 0.6}, an exact split of each batch; sampler: not "
            "set. PolicyServerInput is the section external, of python -m jrl.serve", by="offline_data", ruled=True),
        row("input_config", "data.input, data.format", "path or paths, and format, of input dataset", takes="mapping",
            unless={"address and port are of external": lambda job, x: job.with_clients,
                    "it is read with input dataset alone": lambda job, x: job.given.get("input_") != "dataset"}),
        row("actions_in_input_normalized", "data.actions_in_input_normalized",
            "RLlib takes false where nothing is set, jrl what the data say", by="offline_data",
            unless=_NO_INPUT),
        row("dataset_num_iters_per_learner", "data.updates_per_iteration, run.report_every",
            "updates of an iteration, of which there is a result row",
            unless={"the run does not learn from data alone": lambda job, x: not job.from_data}, by="offline_data",
            doc="updates of an iteration from data: sets updates_per_iteration"),
        *none("rows are drawn from all of the data, each as likely as another", "shuffle_buffer_size"),
        *none("returns and targets are made where rows are drawn, by the latest parameters",
              "postprocess_inputs prelearner_module_synch_period"),
        *none(_READER, "input_read_episodes input_read_sample_batches input_read_batch_size input_compress_columns "
              "input_spaces_jsonable"),
        row("input_read_method", "data.format", "read_json, read_parquet; " + _OWN_DATA),
        *lacking("columns have RLlib's names; " + _OWN_DATA, "input_read_schema"),
        *lacking(_OWN_DATA, "offline_data_class prelearner_class"),
        *lacking(_HERE, "input_filesystem"),
        *none(_HERE, "input_filesystem_kwargs"),
        *none(_RAY_DATA, "input_read_method_kwargs materialize_data materialize_mapped_data map_batches_kwargs "
              "iter_batches_kwargs prelearner_buffer_class prelearner_buffer_kwargs offline_sampling"),
        *none("final observations are read; what was cut bootstraps from them", "ignore_final_observation"),
        *lacking("before a sequence memory is that of an episode's start: replay.burn_in warms it up",
                 "prelearner_use_recorded_module_states"),
        row("output", "data.output.path", "a directory; logdir: data in the run directory",
            unless={NO_COLLECTION: lambda job, x: job.from_data}, by="offline_data",
            key="data.output", ruled=True),
        row("output_config", "data.output.path, data.output.format", "its path and format, json or parquet",
            takes="mapping", unless=_NO_OUTPUT),
        row("output_max_file_size", "data.output.max_file_mb", "bytes become MB", takes="number", least=1,
            unless=_NO_OUTPUT, to=lambda job, x: x / 2**20),
        row("output_compress_columns", "data.output.compress", "all arrays of a file are compressed, or none",
            unless=_NO_OUTPUT, to=lambda job, x: bool(x), said="all arrays of a file are compressed, or none"),
        *none("episodes are written whole, in files of data.output.max_file_mb: docs/data.md",
              "output_max_rows_per_file output_write_remaining_data output_write_episodes"),
        *none("data.output.format says how, data.output.path where on this machine", "output_write_method "
              "output_write_method_kwargs output_filesystem output_filesystem_kwargs"),
        *own("offline_data", "data", "where updates_per_iteration validation validation_batches placement estimate",
             input_format="data.format", data_reward="data.reward"),
    ],
    "Multi-agent": [
        row("count_steps_by multiagent.count_steps_by", "rollout.count_steps_by", by="env_runners"),
        row("policies multiagent.policies", "multi_agent.policies",
            "ids, or id -> None, a dict of settings, a PolicySpec or its tuple; spaces come from the environment, "
            "a class of RLlib's becomes algo.name, another cannot be had", by="multi_agent"),
        row("policy_mapping_fn multiagent.policy_mapping_fn", "multi_agent.mapping",
            "package.module:name of agent and episode, asked once, or for each game that it depends on; or a table",
            unless={**_ONE_POLICY, "RLlib's own: all agents follow one policy":
                    lambda job, x: "AlgorithmConfig." in str(x)}, by="multi_agent"),
        row("policies_to_train multiagent.policies_to_train", "multi_agent.policies_to_train",
            "names, or package.module:name of a function of a name", unless=_ONE_POLICY, by="multi_agent"),
        row("algorithm_config_overrides_per_module multiagent.algorithm_config_overrides_per_module",
            "multi_agent.policies", "what each has of its own, under its name", takes="mapping"),
        row("observation_fn multiagent.observation_fn", "", _OBS_FN, by="multi_agent",
            key="multi_agent.observation_fn", lacking=True),
        *[row(f"{n} multiagent.{n}", "", _STACKED) for n in (
            "policy_map_capacity", "policy_map_cache", "policy_states_are_swappable")],
        row("replay_mode multiagent.replay_mode replay_buffer_config.replay_mode", "multi_agent.replay_mode",
            "lockstep with uniform replays of one size alone; independent is what happens by itself",
            takes="independent or lockstep", unless={
                "independent: so it is unless the config says otherwise": lambda job, x: x == "independent",
                **_ONE_POLICY}),
        container("multiagent multi_agent"),
        *own("multi_agent", "multi_agent", "agents group state agent_id self_play"),
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
        *none("episodes are counted with the rollout that they end in", "metrics_episode_collection_timeout_s "
              "collect_metrics_timeout"),
        *none("see run.log and run.out", "logger_config logger_creator log_gradients custom_stats_cls_lookup"),
        *lacking("a method of that name of a class derived from jrl.api.Callbacks", "on_algorithm_init "
                 "on_train_result on_evaluate_start on_evaluate_end on_evaluate_offline_start on_evaluate_offline_end "
                 "on_env_runners_recreated on_offline_eval_runners_recreated on_checkpoint_loaded "
                 "on_environment_created on_episode_created on_episode_start on_episode_step on_episode_end "
                 "on_sample_end"),
        *none("python -m jrl.export writes other formats", "export_native_model_files"),
        row("checkpoint_trainable_policies_only", "checkpoint.policies", "true: trainable",
            to=lambda job, x: "trainable",
            unless={"checkpoints hold all policies": lambda job, x: not x, **_ONE_POLICY}),
        *none(_AUTO, "_run_training_always_in_thread _evaluation_parallel_to_training_wo_thread"),
        *own("checkpointing", "checkpoint", "keep_last keep_every keep_best_by keep_best exact",
             checkpoint_every="checkpoint.every", replay_in_checkpoints="checkpoint.replay",
             policies_in_checkpoints="checkpoint.policies"),
        *own("debugging", "run", "log out compile_cache disable_jit max_recompiles on_nonfinite max_rollbacks "
             "rollback_lr stall_seconds"),
    ],
    "Resources": [
        row("num_gpus", "devices.learners", "above 1: so many; 0 is JAX_PLATFORMS=cpu; null: all accelerators"),
        row("num_learners num_learner_workers", "devices.learners", "above 1: so many", by="learners",
            doc="devices that learn, the first so many: sets learners"),
        row("_fake_gpus", "devices.fake", "as many as num_gpus", to=lambda job, x: job.sizes.devices, unless={
            **_NOT_SET, "there is one device": lambda job, x: job.sizes.devices < 2,
            "the number of environments cannot be shared by so many": lambda job, x: not job.sizes.shared}),
        row("num_cpus_per_env_runner num_cpus_per_worker", "env_runners.num_cpus", by="env_runners"),
        row("num_gpus_per_env_runner num_gpus_per_worker", "env_runners.num_gpus", by="env_runners"),
        row("custom_resources_per_env_runner custom_resources_per_worker", "env_runners.custom_resources",
            by="env_runners"),
        row("placement_strategy", "env_runners.placement", by="resources"),
        *none("learners are devices of one process: see devices.learners", "custom_resources_per_learner "
              "num_gpus_per_learner num_gpus_per_learner_worker num_cpus_per_learner num_cpus_per_learner_worker "
              "local_gpu_idx"),
        *none(_TUNE, "custom_resources_for_main_process num_cpus_for_main_process num_cpus_for_local_worker "
              "num_cpus_for_driver"),
        row("extra_python_environs_for_driver", "runtime.env"),
        *none("runtime.env goes to env runners, too", "extra_python_environs_for_worker"),
        *own("learners", "devices", "learners actors", fake_devices="devices.fake"),
        *own("resources", "runtime", "xla_flags preallocate mem_fraction cpu_threads",
             ray_address="env_runners.address", environment="runtime.env"),
    ],
    "Framework and experimental": [
        *none("JAX is the only framework", "framework tf_session_args local_tf_session_args torch_compile_learner "
              "torch_compile_learner_what_to_compile torch_compile_learner_dynamo_backend "
              "torch_compile_learner_dynamo_mode torch_compile_worker torch_compile_worker_dynamo_backend "
              "torch_compile_worker_dynamo_mode _torch_grad_scaler_class _torch_lr_scheduler_classes torch_ddp_kwargs "
              "torch_skip_nan_gradients"),
        row("eager_max_retraces", "run.max_recompiles", "programs that compile again once the run is under way"),
        *none("run.disable_jit runs operation by operation", "eager_tracing eager trace"),
        *none(_TREES, "_disable_preprocessor_api _disable_action_flattening"),
        row("rl_module_spec _rl_module_spec", "multi_agent.policies, network",
            "of a MultiRLModuleSpec each module's model_config; " + _OWN_MODEL, lacking=True),
        *none(_STACK, "_validate_config _use_msgpack_checkpoints _tf_policy_handles_more_than_one_loss "
              "_disable_execution_plan_api _disable_initialize_loss_from_dummy_batch _enable_new_api_stack "
              "_enable_rl_module_api _enable_learner_api enable_rl_module_and_learner "
              "enable_env_runner_and_connector_v2 is_online _is_atari _AlgorithmConfig__prior_exploration_config "
              "__all_models__"),
    ],
}  # fmt: skip


class Algorithm(NamedTuple):
    name: str  # in jrl
    note: str = ""
    parts: Mapping[str, Any] = types.MappingProxyType({})  # jrl's keys that make it; a file's keys win


# name of RLlib's algorithm, lower case -> jrl's
ALGORITHMS = {
    "ppo": Algorithm("ppo"),
    "ddppo": Algorithm("ppo", "jrl's PPO learns data-parallel on all devices"),
    "appo": Algorithm("appo"),
    "impala": Algorithm("impala"),
    "a2c": Algorithm("a2c"),
    "a3c": Algorithm("a2c", "workers do not apply gradients of their own: one update learns from all"),
    "dqn": Algorithm("dqn"),
    "simpleq": Algorithm("dqn", "a DQN without further parts"),
    "rainbow": Algorithm("dqn", "its parts are keys of dqn: see configs/rainbow.yaml"),
    "apex": Algorithm("dqn", "an epsilon per worker is algo.exploration {name: epsilon_greedy, ladder: true}, "
                      "collection beside learning is rollout.mode async"),
    "apex_dqn": Algorithm("dqn", "see APEX"),
    "r2d2": Algorithm(
        "dqn", "with double, dueling, value_rescaling, prioritised sequences, and network.core lstm",
        {"algo.double": True, "algo.dueling": True, "algo.value_rescaling": True, "replay.prioritized": True},
    ),
    "sac": Algorithm("sac"),
    "rnnsac": Algorithm("sac", "with network.core lstm"),
    "td3": Algorithm("td3"),
    "ddpg": Algorithm(
        "td3", "with num_critics 1, policy_every 1, target_noise 0, as in configs/ddpg.yaml",
        {"algo.num_critics": 1, "algo.policy_every": 1, "algo.target_noise": 0.0},
    ),
    "bc": Algorithm("bc"),
    "marwil": Algorithm("marwil"),
    "cql": Algorithm("sac", "with conservative true", {"algo.conservative": True}),
    "iql": Algorithm("iql"),
    "dt": Algorithm(
        "dt", "one token for each step, of the observation, the action before it and the return to go",
        {"network.core.name": "gtrxl", "network.use_prev_action": True, "network.use_prev_reward": True},
    ),
}  # fmt: skip
# algorithms of RLlib without a counterpart -> the nearest
INSTEAD = {"crr": "marwil with weight: binary has its filter, over returns, and iql its critic"}

KEYS: dict[str, Row] = {name: key for group in GROUPS.values() for key in group for name in key.names}
# names of dicts whose keys have rows -> the newest
CONTAINERS = {name: key.name for name, key in KEYS.items() if key.note == _INSIDE}


def markdown() -> str:
    """Return the table of docs/rllib-users.md."""
    lines = []
    for title, keys in GROUPS.items():
        lines += [f"### {title}", "", "| RLlib | jrl | |", "| --- | --- | --- |"]
        found: dict[tuple[str, str], list[str]] = {}
        for key in keys:  # keys without a counterpart share a line with those of the same reason
            if key.names:
                found.setdefault((key.ours and key.name, key.note), []).extend(key.names)
        for (name, note), names in found.items():
            ours = " ".join(f"`{n}`" for n in KEYS[name].ours.split(", ")) if name else "none"
            lines.append(f"| {' '.join(f'`{n}`' for n in names)} | {ours} | {note} |")
        lines.append("")
    return "\n".join(lines)
