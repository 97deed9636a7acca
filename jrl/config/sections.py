"""The sections of a run's config: frozen dataclasses with the defaults, ranges and documentation of all keys.

`jrl config show` prints the comment of each field. `reader.py` reads and writes configs.
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

Index = Annotated[int, Interval(ge=0, le=65_535)]  # index of a device


@section
class RolloutConfig:
    """Collection of experience."""

    # steps per environment and iteration; null: 128, or with replay the steps of replay.train_every
    length: Annotated[int, Interval(ge=1, le=MOST_STEPS)] | None = None
    collector: Collector = "auto"  # program: inside the compiled program; host: from Python
    mode: Literal["sync", "async"] = "sync"  # async: collect the next rollouts during the update
    # complete_episodes: the learner gets whole episodes; unfinished episodes wait for the next rollouts
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    explore: bool = True  # false: collect with the policy's best actions
    fake: bool = False  # repeat the first rollout without stepping, to measure the speed of learning
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"  # the same with one agent
    # async: most updates between the acting weights and the update that learns from their steps; null: 1, or 2 with
    # env_runners
    max_policy_lag: Few | None = None
    # iterations per call if environments and learning are one program; null: chosen by size
    iterations_per_call: Annotated[int, Interval(ge=1, le=2**20)] | None = None


@section
class HindsightConfig:
    """Hindsight experience replay: samples with goals that their episodes achieved, of environments with goals."""

    # new goal of a transition: an achieved goal of a later step of its episode (future), of the last step (final), of
    # any step (episode)
    strategy: Literal["future", "final", "episode"] = "future"
    share: Share = 0.8  # share of each batch with new goals; 4 new goals for each stored goal are 0.8
    # package.module:function (achieved [N, *], desired [N, *]) -> (reward [N], end [N] bool) in JAX; null: the
    # environment's own
    reward: Name | None = None


@section
class ReplayConfig:
    """The replay buffer and the rate of updates. Numbers of steps and rows are over all environments and devices."""

    capacity: Count = 100_000  # size of the buffer in transitions
    batch_size: Count = 256  # transitions per gradient step; with network.core sequences of network.max_seq_len steps
    learning_starts: Amount = 1_000  # rows in the buffer, reset rows included, before the first gradient step
    train_every: Count | None = None  # environment steps between two learning phases; null: env.num_envs
    updates_per_step: Positive = 1.0  # gradient steps per environment step (the update-to-data ratio)
    burn_in: Amount = 20  # with network.core: steps before each sequence that restore its memory
    # steps of the n-step return; [2, 5]: a random number for each sample
    n_step: Count | tuple[Count, Count] = 1
    # images per observation, stored once each; null: detected for Atari; 1: store stacks whole
    frame_stack: Few | None = None
    prioritized: bool = False  # sample in proportion to priority ** priority_alpha, not uniformly
    priority_alpha: Annotated[float, Interval(ge=0, le=10)] = 0.6  # 0: uniform
    priority_beta: UnitSchedule = 0.4  # exponent of the importance weights
    priority_eps: NonNegative = 1e-6  # constant added to each priority
    hindsight: HindsightConfig | None = None  # new goals for a part of each batch; null: goals as stored


@section
class EvaluationConfig:
    """Evaluation during training. It never changes the training."""

    every: Steps | None = None  # environment steps between evaluations; null: use `interval`
    interval: Count | None = None  # result rows between evaluations; null: no evaluations, unless `every` is set
    # episodes (or steps, see `unit`) per evaluation; auto: until the parallel training is done
    duration: Count | Literal["auto"] = 100
    unit: Literal["episodes", "timesteps"] = "episodes"  # unit of `duration`
    # environments of the evaluation; null: chosen by `duration`
    num_envs: Annotated[int, Interval(ge=1, le=MOST_STEPS)] | None = None
    num_env_runners: Processes = 0  # processes that evaluate; 0: this process
    parallel: bool = False  # evaluate in a thread during training, with the weights from the start of the evaluation
    explore: bool = False  # sample actions as in training; false: the policy's best action
    # changes to the run's config for evaluation: {env: {options: {...}}}
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    force_reset: bool = True  # begin with new episodes; false: continue the episodes of the last evaluation
    timeout_s: Seconds | None = 120.0  # seconds after which an evaluation ends with its finished episodes; null: never
    # episodes of each evaluation's video, videos/STEPS.mp4 in the run directory; 0: no video
    record: Annotated[int, Interval(ge=0, le=1000)] = 0
    # games of each evaluation against the policy of the previous one, for Elo ratings of alphazero's self-play; null:
    # no ratings
    elo_games: Count | None = None
    always_attach: bool = True  # repeat the latest evaluation in every result row; false: only in the first row


@section
class CheckpointConfig:
    """Checkpoints, from which a run can be resumed."""

    every: Steps | None = None  # environment steps between checkpoints; null: 5 minutes. The end also has a checkpoint
    keep_last: Count = 3  # number of latest checkpoints to keep, beside those of the next three keys
    keep_every: Steps | None = None  # keep the first checkpoint of each stretch of so many environment steps
    keep_best_by: str | None = "evaluation/return"  # metric of the result rows whose best checkpoint is kept
    keep_best: Literal["max", "min"] = "max"  # whether the greatest or the least value of the metric is best
    replay: Literal["full", "none"] = "full"  # store the replay buffer or not; none: refill it after resuming
    # several policies to store; trainable: only learning policies, the others are initialised again by the seed
    policies: Literal["all", "trainable"] = "all"
    # reset environments that cannot be stored at each checkpoint, so that a resumed run equals an uninterrupted run;
    # needs `every`
    exact: bool = False


@section
class DevicesConfig:
    """Devices of this machine, by index, for acting and learning."""

    # devices that act, each in its share of the environments; a device named twice acts in one share while the other
    # steps; null: the learning devices
    actors: tuple[Index, ...] | None = None
    learners: tuple[Index, ...] | None = None  # devices that learn, each from its share of the batch; null: all
    # number of devices to split the CPU into, for tests; null: real devices
    fake: Annotated[int, Interval(ge=1, le=1024)] | None = None
    # cpu: no accelerators; auto: the faster of the accelerators and the CPU, measured before the run; null: the
    # accelerators, if there are any
    platform: Literal["auto", "cpu"] | None = None


@section
class EnvRunnersConfig:
    """Env runners: Ray processes on this or other machines that collect rollouts. Also failures of environments."""

    num: Processes = 0  # number of runners, which share env.num_envs; 0: this process collects, without Ray
    num_cpus: NonNegative = 1.0  # CPUs per runner
    num_gpus: NonNegative = 0.0  # GPUs per runner
    custom_resources: dict[str, NonNegative] = dataclasses.field(default_factory=dict)  # name -> amount per runner
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"  # over the nodes of the cluster
    address: str | None = None  # address of a Ray cluster, or auto; null: this machine
    max_requests_in_flight: Few = 2  # ordered rollouts per runner, with rollout.mode async
    ignore_env_runner_failures: bool = False  # continue without a failed runner while other runners are left
    recreate_failed_env_runners: bool = False  # replace a failed runner
    restart_failed_sub_environments: bool = False  # make a failed environment again and drop its episode
    max_restarts: Amount = 1000  # most restarts of runners in a run
    sample_timeout_s: Seconds = 180.0  # seconds without an answer after which a runner has failed
    health_check_timeout_s: Seconds = 60.0  # seconds for a runner to start
    env_step_timeout_s: Seconds | None = None  # seconds for a step of a worker process; null: no limit
    compress_observations: bool = False  # compress observations for the way from the runners


@section
class RunSettings:
    """Settings that do not change the algorithm."""

    seed: Annotated[int, Interval(ge=0, le=UINT32)] = 0  # root of every random key
    out: str | None = None  # run directory; null: runs/<config name>_<env>_<time>
    # environment steps between result rows; null: a hundredth of the run; without an end at least 1000 and a rollout
    report_every: Steps | None = None
    report_every_s: Annotated[float, Interval(ge=0, le=1e9)] | None = None  # least seconds between result rows
    report_every_trained: Steps | None = None  # least environment steps learned from between result rows
    compile_cache: bool = True  # keep compiled programs on disk for the next run
    # loggers of result rows: jsonl, csv, tensorboard, wandb, or package.module:name of a function of the directory
    log: tuple[str, ...] = ("jsonl", "csv", "tensorboard")
    disable_jit: bool = False  # run operation by operation, so that breakpoint() stops inside a loss
    # most compilations after the first result row before the run ends; null: no limit
    max_recompiles: Amount | None = None
    # reaction to a loss or parameter that is not finite; stop: end the run with a bundle for jrl.debug; rollback:
    # continue from the last checkpoint with a smaller algo.lr; ignore: no check
    on_nonfinite: Literal["stop", "rollback", "ignore"] = "stop"
    max_rollbacks: Amount = 3  # rollbacks before the run ends
    rollback_lr: Share = 0.5  # factor of algo.lr at each rollback
    # number of latest episodes in the reported mean return and length
    smoothing_episodes: Annotated[int, Interval(ge=1, le=10_000_000)] = 100
    # report custom metrics of callbacks as lists with an entry per episode; in jrl.api returns of evaluations, too
    keep_per_episode_metrics: bool = False
    log_level: Literal["DEBUG", "INFO", "WARN", "ERROR"] = "WARN"  # level of jrl's loggers
    log_sys_usage: bool = False  # load of CPU, memory and accelerators in each result row
    stall_seconds: Seconds | None = 300.0  # seconds without progress after which all stacks are printed; null: never


@section
class CustomConfig:
    """Your own classes and functions, as package.module:name."""

    callbacks: tuple[Name, ...] = ()  # subclasses of jrl.callbacks.Callbacks, called in this order
    transforms: tuple[Name, ...] = ()  # pure functions Rollout -> Rollout between collecting and learning
    reward: Name | None = None  # pure function of the learner's rewards [T, B], after env.reward_scale
    batch: tuple[Name, ...] = ()  # pure functions of the data of an update: a Batch, or a Rollout
    loss: Name | None = None  # pure function that replaces the algorithm's loss
    training_step: Name | None = None  # function of a jrl.learn.staged.Step that makes one iteration
    env_task: Name | None = None  # curriculum: (result, env, context) -> next task of an environment
    evaluation: Name | None = None  # (algorithm, evaluation workers) -> metrics, replaces the evaluation


@section
class SelfPlayConfig:
    """A policy that learns against frozen copies of itself, in games of two or more agents with equal spaces.

    The learner has one seat in every game, each seat equally often. A frozen copy has the other seats of the game.
    """

    policy: Name = "main"  # name of the learner; the copies are main-1, main-2, ...
    pool: Few = 4  # number of copies; env.num_envs is a multiple of agents x pool
    # share of won games, over at least `window` games, at which a copy is taken; null: not by wins
    snapshot_win_rate: Unit | None = 0.6
    snapshot_every: Steps | None = None  # environment steps between copies, regardless of wins; null: not by steps
    window: Count = 400  # games of a win rate; the next win rate counts the next games
    # uniform: all copies equally often; latest: the newest only; prioritised: copies that win more, more often
    opponents: Literal["uniform", "latest", "prioritised"] = "uniform"


@section
class MultiAgentConfig:
    """Several agents: the policies, and the policy of each agent."""

    # names of the environment's agents, or of the teams of `group`; null: taken from the environment
    agents: tuple[Name, ...] | None = None
    # policy -> its own settings: {algo: {lr: 1e-4}, network: {hidden: [32]}}; empty: the policies of `mapping`
    policies: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # policy of each agent. shared: one policy for all; by_agent: the policy with the agent's name; a table
    # {"adversary_.*": hunter, ".*": prey} of regular expressions, where the first match of the whole name counts;
    # package.module:name of a function of the agent's name and its episode, called once, or, if its result depends on
    # the episode or chance, per game. null: shared; by_agent with several policies; a policy for each kind of agents
    # with different spaces, named after the agents without their numbers
    mapping: Literal["shared", "by_agent"] | Name | dict[str, str] | None = None
    # names of the learning policies, or package.module:name of a function of a policy's name; null: all
    policies_to_train: Name | tuple[Name, ...] | None = None
    # lockstep: all policies sample the same rows of their replays in each update, the same games and times
    replay_mode: Literal["independent", "lockstep"] = "independent"
    # add the environment's global state to observations as `state`, for network.value_inputs and mixers; null: if
    # network.value_inputs needs it
    state: bool | None = None
    # teams, {red: [agent_0, agent_1], blue: [agent_2, agent_3]}; each acts as one agent of this name, for vdn and other
    # joint policies. Agents without a team act alone. One team of all agents makes a single-agent environment
    group: dict[str, tuple[Name, ...]] | None = None
    agent_id: bool = False  # add the agent's number to observations as `agent_id`
    # pure function {agent: observation} -> {agent: observation} of one environment, before `agent_id`
    observation_fn: Name | None = None
    self_play: SelfPlayConfig | None = None  # one policy against frozen copies of itself; null: no self-play


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    algo: Any  # Config of the algorithm `algo.name`
    env: EnvConfig = dataclasses.field(default_factory=EnvConfig)
    # data sets to learn from, instead of environments or together with them
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    multi_agent: MultiAgentConfig | None = None  # several agents; null: one policy for all agents
    external: ExternalConfig | None = None  # episodes played by clients; null: environments are stepped here
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig | None = None  # replay buffer; null for algorithms without replay
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    devices: DevicesConfig = DevicesConfig()
    env_runners: EnvRunnersConfig = EnvRunnersConfig()
    run: RunSettings = RunSettings()
    runtime: RuntimeConfig = RuntimeConfig()
    custom: CustomConfig = CustomConfig()
    # metric -> number; the run ends when any metric reaches its number. Commands need env_steps
    stop: dict[str, int | float] = dataclasses.field(default_factory=dict)


# Names of other libraries -> names or dotted keys of jrl, for "did you mean".
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
