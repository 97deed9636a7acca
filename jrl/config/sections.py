"""The sections of a run's configuration: frozen dataclasses, the one source of defaults and of documentation.

The comment on a field is its documentation: `jrl.config show` prints it. Reading and writing is in config.py.
"""

# ruff: noqa: RUF009 - sections are frozen

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.config.datasets import DataConfig as DataConfig
from jrl.config.external import ExternalConfig as ExternalConfig
from jrl.fields import env
from jrl.fields.bounds import (
    MOST_STEPS,
    UINT32,
    Amount,
    Collector,
    Count,
    Few,
    Name,
    NonNegative,
    Positive,
    Processes,
    Seconds,
    Share,
    Steps,
    Unit,
    UnitSchedule,
)
from jrl.fields.env import EnvConfig as EnvConfig
from jrl.fields.hyper import NetworkConfig
from jrl.fields.validation import section
from jrl.host.runtime import RuntimeConfig as RuntimeConfig

Index = Annotated[int, Interval(ge=0, le=65_535)]  # of a device


@section
class RolloutConfig:
    """Collection of experience."""

    # steps per environment and iteration; null: 128, or what replay.train_every asks for
    length: Annotated[int, Interval(ge=1, le=MOST_STEPS)] | None = None
    collector: Collector = "auto"  # program: inside the compiled program; host: from Python
    mode: Literal["sync", "async"] = "sync"  # async: the next rollouts are collected while one is learned from
    # complete_episodes: the learner gets whole episodes only, those that have not ended wait for the next rollouts
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    explore: bool = True  # false: collect with the policy's best actions
    fake: bool = False  # the first rollout again and again, without stepping: the speed of learning alone
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"  # with one agent they are the same
    # async: updates between the weights that acted and the update that learns from it; null: 1, or 2 with env_runners
    max_policy_lag: Few | None = None
    # iterations in one call, where environments and learning are one program; null: chosen by size
    iterations_per_call: Annotated[int, Interval(ge=1, le=2**20)] | None = None


@section
class ReplayConfig:
    """The replay buffer and the rate of updates. Steps and rows count over all environments and devices."""

    capacity: Count = 100_000  # transitions kept
    batch_size: Count = 256  # transitions per gradient step; with network.core sequences of network.max_seq_len steps
    learning_starts: Amount = 1_000  # rows that replay holds before the first gradient step, those of resets included
    train_every: Count | None = None  # environment steps between two learning phases; null: one of each environment
    updates_per_step: Positive = 1.0  # gradient steps per environment step (the update-to-data ratio)
    burn_in: Amount = 20  # with network.core: steps in front of each sequence, from which its memory is recovered
    # steps summed up before bootstrapping; [2, 5]: a random number for each sample
    n_step: Count | tuple[Count, Count] = 1
    frame_stack: Few | None = None  # images of an observation, stored once each; null: Atari's; 1: store stacks whole
    prioritized: bool = False  # sample in proportion to priority ** priority_alpha, not uniformly
    priority_alpha: Annotated[float, Interval(ge=0, le=10)] = 0.6  # 0: uniform
    priority_beta: UnitSchedule = 0.4  # exponent of the importance weights
    priority_eps: NonNegative = 1e-6  # added to each priority


@section
class EvaluationConfig:
    """Episodes played beside training, which never change it."""

    every: Steps | None = None  # environment steps between evaluations; null: as `interval` says
    interval: Count | None = None  # result rows between evaluations; null: none during training, unless `every` is set
    # exactly so many per evaluation; auto: until the training beside it is done
    duration: Count | Literal["auto"] = 100
    unit: Literal["episodes", "timesteps"] = "episodes"  # of `duration`
    # environments of the evaluation; null: as many as suit `duration`
    num_envs: Annotated[int, Interval(ge=1, le=MOST_STEPS)] | None = None
    num_env_runners: Processes = 0  # further processes that play; 0: this one
    parallel: bool = False  # to training, in a thread of its own with the weights from before
    explore: bool = False  # sample actions as in training; false: the policy's best action
    # the run's config, but for evaluation: {env: {options: {...}}}
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    force_reset: bool = True  # begin with new episodes; false: go on with those of the last evaluation
    timeout_s: Seconds | None = 120.0  # then it ends with the episodes so far; null: never
    # episodes with the same weights for a video, videos/STEPS.mp4 of the run directory; 0: none
    record: Annotated[int, Interval(ge=0, le=1000)] = 0
    always_attach: bool = True  # every result row has the latest evaluation; false: only the first after it


@section
class CheckpointConfig:
    """Checkpoints to resume from."""

    every: Steps | None = None  # environment steps between checkpoints; null: every 5 minutes. The end has one
    keep_last: Count = 3  # older ones are deleted, but those that the next three keys name
    keep_every: Steps | None = None  # environment steps; of each such stretch the first checkpoint stays
    keep_best_by: str | None = "evaluation/return"  # metric of the result rows; the best checkpoint by it stays
    keep_best: Literal["max", "min"] = "max"  # which value of it is best
    replay: Literal["full", "none"] = "full"  # whether the replay buffer is kept; none: it is filled anew
    # of several policies; trainable: those that do not learn begin anew when a run is resumed, as its seed makes them
    policies: Literal["all", "trainable"] = "all"
    # environments that cannot be stored start anew at each checkpoint, so that a resumed run is the same as one that
    # was never interrupted; needs `every`
    exact: bool = False


@section
class DevicesConfig:
    """Devices of this machine, by index, and their work."""

    actors: tuple[Index, ...] | None = None  # act in the environments; null: those that learn
    learners: tuple[Index, ...] | None = None  # learn, each from its share of the batch; null: all accelerators
    # split the CPU into so many devices, to try what several do; null: real ones
    fake: Annotated[int, Interval(ge=1, le=1024)] | None = None


@section
class EnvRunnersConfig:
    """Env runners: processes on this or other machines that collect, by Ray. Failures of them or of environments."""

    num: Processes = 0  # they share env.num_envs; 0: this process collects, and Ray is not started
    num_cpus: NonNegative = 1.0  # of each
    num_gpus: NonNegative = 0.0  # of each
    custom_resources: dict[str, NonNegative] = dataclasses.field(default_factory=dict)  # of each, by name
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"  # over the nodes of the cluster
    address: str | None = None  # of a Ray cluster, or auto; null: this machine
    max_requests_in_flight: Few = 2  # rollouts that each has on order, with rollout.mode async
    ignore_env_runner_failures: bool = False  # go on without one that failed, as long as there are others
    recreate_failed_env_runners: bool = False  # start another in its place
    restart_failed_sub_environments: bool = False  # an environment that fails is made anew, and its episode dropped
    max_restarts: Amount = 1000  # of runners, in all
    sample_timeout_s: Seconds = 180.0  # without an answer until a runner has failed
    health_check_timeout_s: Seconds = 60.0  # for one that starts
    env_step_timeout_s: Seconds | None = None  # of worker processes: a step that takes longer has failed; null: never
    compress_observations: bool = False  # on their way from the runners


@section
class RunSettings:
    """Settings that do not change the algorithm."""

    seed: Annotated[int, Interval(ge=0, le=UINT32)] = 0  # root of every random key
    out: str | None = None  # run directory; null: runs/<config name>_<env>_<time>
    # environment steps between result rows; null: a hundredth of the run, or where it has no end a rollout or 1000
    report_every: Steps | None = None
    report_every_s: Annotated[float, Interval(ge=0, le=1e9)] | None = None  # seconds between result rows, at least
    report_every_trained: Steps | None = None  # environment steps learned from between result rows, at least
    compile_cache: bool = True  # keep compiled programs on disk for the next run
    # where rows go: jsonl, csv, tensorboard, wandb, or package.module:name of a function of the directory
    log: tuple[str, ...] = ("jsonl", "csv", "tensorboard")
    disable_jit: bool = False  # run operation by operation, so that breakpoint() stops inside a loss
    # programs that iterations may compile again after the first result row; more end the run; null: any number
    max_recompiles: Amount | None = None
    # a loss or parameter that is not finite; stop: the run ends with a bundle for jrl.debug; rollback: it goes on from
    # the last checkpoint with a smaller algo.lr; ignore: nothing looks
    on_nonfinite: Literal["stop", "rollback", "ignore"] = "stop"
    max_rollbacks: Amount = 3  # then it stops
    rollback_lr: Share = 0.5  # factor of algo.lr at each
    # latest episodes whose mean return and length is reported
    smoothing_episodes: Annotated[int, Interval(ge=1, le=10_000_000)] = 100
    # custom metrics of callbacks as lists, an entry per episode; in results of jrl.api the returns of evaluations, too
    keep_per_episode_metrics: bool = False
    log_level: Literal["DEBUG", "INFO", "WARN", "ERROR"] = "WARN"  # of jrl's loggers
    log_sys_usage: bool = False  # load of CPU, memory and accelerators in each result row
    stall_seconds: Seconds | None = 300.0  # without progress until all stacks are printed; null: never


@section
class CustomConfig:
    """The user's own classes and functions, as package.module:name."""

    callbacks: tuple[Name, ...] = ()  # classes of jrl.callbacks.Callbacks, called in this order
    transforms: tuple[Name, ...] = ()  # pure functions Rollout -> Rollout between collecting and learning
    reward: Name | None = None  # pure function of rewards [T, B] that the learner sees, after env.reward_scale
    batch: tuple[Name, ...] = ()  # pure functions of what an update learns from: a Batch, or a Rollout
    loss: Name | None = None  # pure function in the place of the algorithm's loss
    training_step: Name | None = None  # function of a jrl.learn.staged.Step that makes one iteration
    env_task: Name | None = None  # curriculum: (result, env, context) -> the next task of an environment
    evaluation: Name | None = None  # (algorithm, evaluation workers) -> metrics, in the place of playing episodes


@section
class SelfPlayConfig:
    """A policy that learns against frozen copies of itself, in games of two agents or more with equal parts.

    In every game it has one seat, each seat in as many games; the other seats of the game are those of one copy.
    """

    policy: Name = "main"  # its name; the places of the pool are main-1, main-2, ...
    pool: Few = 4  # copies that are kept; env.num_envs is a multiple of agents x pool
    # a copy is taken when the share of games won, of at least `window`, is so high; null: not by that
    snapshot_win_rate: Unit | None = 0.6
    snapshot_every: Steps | None = None  # environment steps between copies, whatever is won; null: not by that
    window: Count = 400  # games over which the share is taken; then it is taken over the next
    # uniform: all copies equally often; latest: the newest alone; prioritised: those more often that it beats less
    opponents: Literal["uniform", "latest", "prioritised"] = "uniform"


@section
class MultiAgentConfig:
    """Several agents: the policies, and the policy of each agent."""

    # names of the agents of an environment, with `group` of its teams; null: as the environment says
    agents: tuple[Name, ...] | None = None
    # policy -> what it has of its own: {algo: {lr: 1e-4}, network: {hidden: [32]}}; empty: as `mapping` asks for
    policies: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # shared: all agents follow one policy; by_agent: each follows the policy of its name; or a table {"adversary_.*":
    # hunter, ".*": prey} of regular expressions, of which the first that fits a whole name counts. null: shared, or
    # with several policies by_agent; where agents have different spaces, a policy for each kind of them, named after
    # its agents without their numbers. Or package.module:name of a function of an agent's name and its episode, which
    # is asked once; where it looks at the episode or draws, once for each agent and game
    mapping: Literal["shared", "by_agent"] | Name | dict[str, str] | None = None
    # the others stay as they are; null: all. Or package.module:name of a function of a policy's name
    policies_to_train: Name | tuple[Name, ...] | None = None
    # lockstep: in each update all policies draw the same rows of their replays, the same games and times
    replay_mode: Literal["independent", "lockstep"] = "independent"
    # observations get the environment's global view as the leaf `state`, for network.value_inputs and mixers; null:
    # where network.value_inputs asks for it
    state: bool | None = None
    # teams, {red: [agent_0, agent_1], blue: [agent_2, agent_3]}, each of which acts as one agent of that name, for vdn
    # and whatever learns joint actions; who is in none stays an agent alone. One team of all agents is a single agent
    group: dict[str, tuple[Name, ...]] | None = None
    agent_id: bool = False  # observations get the number of their agent as the leaf `agent_id`
    # pure function {agent: observation} -> {agent: what it sees}, of one environment; before `agent_id`
    observation_fn: Name | None = None
    self_play: SelfPlayConfig | None = None  # one policy, against frozen copies of itself; null: as `policies` says


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    algo: Any  # the Config of the algorithm that `algo.name` picks
    env: EnvConfig = dataclasses.field(default_factory=EnvConfig)
    # data sets to learn from, in the place of environments or beside them
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    multi_agent: MultiAgentConfig | None = None  # of environments with several agents; null: as they come
    external: ExternalConfig | None = None  # episodes that clients play; null: environments are stepped here
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig | None = None  # algorithms that learn from replay have one, others none
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    devices: DevicesConfig = DevicesConfig()
    env_runners: EnvRunnersConfig = EnvRunnersConfig()
    run: RunSettings = RunSettings()
    runtime: RuntimeConfig = RuntimeConfig()
    custom: CustomConfig = CustomConfig()
    # metric -> number; the run ends when the first is reached. A command needs env_steps among them
    stop: dict[str, int | float] = dataclasses.field(default_factory=dict)


# Names used by other libraries -> ours, for "did you mean". A dotted one is meant as it stands.
SYNONYMS = {
    **env.SYNONYMS,
    "learning_rate": "lr", "discount": "gamma", "discount_factor": "gamma", "lambda": "gae_lambda", "lam": "gae_lambda",
    "clip_range": "clip_eps", "clip_param": "clip_eps", "clip_coef": "clip_eps", "entropy_coeff": "ent_coef",
    "entropy_coef": "ent_coef", "vf_loss_coeff": "vf_coef", "value_coef": "vf_coef", "grad_clip": "max_grad_norm",
    "n_epochs": "num_epochs", "update_epochs": "num_epochs", "num_sgd_iter": "num_epochs",
    "n_minibatches": "num_minibatches", "n_envs": "num_envs", "num_env_runners": "env_runners.num",
    "hidden_sizes": "network.hidden", "fcnet_hiddens": "network.hidden", "hiddens": "network.hidden",
    "n_steps": "rollout.length", "num_steps": "rollout.length", "rollout_fragment_length": "rollout.length",
    "num_gpus": "devices.learners", "num_devices": "devices.learners", "devices": "devices.learners",
    "_fake_gpus": "devices.fake", "num_workers": "env_runners.num", "num_rollout_workers": "env_runners.num",
    "sample_async": "rollout.mode",
    "ignore_worker_failures": "env_runners.ignore_env_runner_failures",
    "recreate_failed_workers": "env_runners.recreate_failed_env_runners",
    "max_requests_in_flight_per_sampler_worker": "env_runners.max_requests_in_flight",
    "placement_strategy": "env_runners.placement", "total_timesteps": "stop.env_steps", "total_steps": "stop.env_steps",
    "timesteps_total": "stop.env_steps", "num_env_steps": "stop.env_steps", "buffer_size": "replay.capacity",
    "replay_buffer_capacity": "replay.capacity", "train_freq": "replay.train_every",
    "train_batch_size": "replay.batch_size",
    "gradient_steps": "replay.updates_per_step", "updates_to_data": "replay.updates_per_step",
    "utd": "replay.updates_per_step", "training_intensity": "replay.updates_per_step",
    "num_steps_sampled_before_learning_starts": "replay.learning_starts", "prioritized_replay": "replay.prioritized",
    "prioritized_replay_alpha": "replay.priority_alpha", "prioritized_replay_beta": "replay.priority_beta",
    "prioritized_replay_eps": "replay.priority_eps", "target_network_update_freq": "target_update_every",
    "target_update_interval": "target_update_every", "exploration_config": "algo.exploration",
    "episodes": "evaluation.duration", "evaluation_interval": "evaluation.interval",
    "evaluation_duration": "evaluation.duration", "evaluation_num_episodes": "evaluation.duration",
    "evaluation_num_workers": "evaluation.num_env_runners", "observation_filter": "normalize_obs",
    "evaluation_parallel_to_training": "evaluation.parallel", "evaluation_config": "evaluation.config",
    "custom_evaluation_function": "custom.evaluation", "custom_eval_function": "custom.evaluation",
    "env_task_fn": "custom.env_task", "callbacks": "custom.callbacks", "fake_sampler": "rollout.fake",
    "metrics_num_episodes_for_smoothing": "run.smoothing_episodes",
    "keep_per_episode_custom_metrics": "run.keep_per_episode_metrics",
    "min_time_s_per_iteration": "run.report_every_s", "min_sample_timesteps_per_iteration": "run.report_every",
    "min_train_timesteps_per_iteration": "run.report_every_trained", "eager_max_retraces": "run.max_recompiles",
    "use_lstm": "network.core.name", "use_attention": "network.core.name", "lstm_cell_size": "network.core.size",
    "lstm_hidden_size": "network.core.size", "attention_dim": "network.core.size",
    "attention_num_transformer_units": "network.core.layers", "attention_num_heads": "network.core.heads",
    "attention_head_dim": "network.core.head_size", "attention_memory_inference": "network.core.memory",
    "attention_memory_training": "network.core.memory", "attention_position_wise_mlp_dim": "network.core.mlp",
    "attention_init_gru_gate_bias": "network.core.gate_bias", "max_seq_len": "network.max_seq_len",
    "lstm_use_prev_action": "network.use_prev_action", "lstm_use_prev_reward": "network.use_prev_reward",
    "attention_use_n_prev_actions": "network.use_prev_action",
    "attention_use_n_prev_rewards": "network.use_prev_reward", "vf_share_layers": "network.shared",
    "fcnet_activation": "network.activation", "post_fcnet_hiddens": "network.head_hidden",
    "free_log_std": "network.state_dependent_std", "custom_model": "network.torso",
    "custom_model_config": "network.torso_options", "features_extractor_class": "network.torso",
    "custom_preprocessor": "network.transform", "ortho_init": "network.init", "orthogonal_init": "network.init",
    "kernel_initializer": "network.init", "initial_weights": "network.init",
    "policy_mapping_fn": "multi_agent.mapping", "policy_map": "multi_agent.policies",
    "replay_burn_in": "replay.burn_in", "burn_in": "replay.burn_in", "use_h_function": "value_rescaling",
    "extra_python_environs_for_driver": "runtime.env", "extra_python_environs_for_worker": "runtime.env",
}  # fmt: skip
