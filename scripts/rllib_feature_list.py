"""The table of scripts/rllib_features.py: RLlib's documented features, heading by heading."""

from typing import Any

from rllib_features import (
    DIFFERS,
    NOT_HERE,
    WORKS,
    Feature,
    command,
    config_of,
    equal,
    example,
    has,
    migrates,
    puts,
    refuses,
    takes,
    tells,
    there,
    unmigrated,
    value_at,
)


def W(name: str, note: str, check: Any, *, slow: bool = False) -> Feature:  # noqa: N802
    return Feature(name, WORKS, note, check, slow)


def D(name: str, note: str, check: Any, *, slow: bool = False) -> Feature:  # noqa: N802
    return Feature(name, DIFFERS, note, check, slow)


def N(name: str, note: str, check: Any) -> Feature:  # noqa: N802
    return Feature(name, NOT_HERE, note, check)


# ---------------------------------------------------------------- what takes more than a line to try


def tiny(algo: str = "PPO", **training: Any) -> Any:
    """A config that trains in a moment."""
    made = config_of(algo).debugging(seed=0, log=[])
    made.env_runners(num_envs=4, rollout_fragment_length=16).training(model={"hidden": [8]}, **training)
    return made.reporting(min_sample_timesteps_per_iteration=1)


def first_snippet() -> None:
    from jrl.api import PPOConfig

    made = PPOConfig().environment("CartPole-v1").resources(num_gpus=0).framework("torch").debugging(log=[])
    made.env_runners(num_env_runners=0).training(gamma=0.9, lr=0.01, train_batch_size=256)
    with made.build() as algo:
        for _ in range(2):
            result = algo.train()
        assert {"episode_reward_mean", "timesteps_total", "training_iteration"} <= set(result)
        assert algo.evaluate(duration=1)["num_episodes"] == 1


def saves() -> None:
    import tempfile

    from jrl.api import Algorithm

    with tempfile.TemporaryDirectory() as scratch, tiny().build() as algo:
        algo.train()
        path = algo.save(f"{scratch}/c").checkpoint.path
        with Algorithm.from_checkpoint(path) as other:
            assert other.iteration == 1
        algo.restore(path)
        algo.export_policy_model(f"{scratch}/out")


def by_hand() -> None:
    with tiny("A2C").build() as algo:
        worker = algo.workers.local_worker()
        rollout, count = worker.sample_with_count()
        gradients, _ = worker.compute_gradients(rollout)
        worker.apply_gradients(gradients)
        worker.learn_on_batch(rollout)
        assert count == 64 and worker.get_metrics()["num_episodes"] >= 0
        assert worker.get_filters() == {"default_policy": ()}
        assert worker.foreach_policy(lambda policy, name: name) == ["default_policy"]


def acts() -> None:
    import numpy as np

    with tiny().build() as algo:
        obs = np.zeros(4, np.float32)
        assert algo.compute_single_action(obs, explore=False) in (0, 1)
        assert len(algo.compute_single_action(obs, full_fetch=True)) == 3
        assert set(algo.compute_actions({"a": obs, "b": obs})) == {"a", "b"}
        policy = algo.get_policy()
        assert policy.value_function(obs[None]).shape == (1,) and "in all" in policy.summary()


def stops() -> None:
    with tiny().stop(env_steps=128).build() as algo:
        while not algo.train()["done"]:
            pass
        assert algo.env_steps >= 128


def switched_exploration() -> None:
    soft = config_of("DQN").exploration(exploration_config={"type": "SoftQ", "temperature": 0.5})
    found = value_at(soft, "algo.exploration")
    assert found["name"] == "soft_q" and "epsilon" not in found, found


def overriding() -> None:
    made = config_of().evaluation(evaluation_config=type(config_of()).overrides(explore=False))
    made.to_run_config()
    made.freeze()
    try:
        made.training(lr=1)
    except Exception as e:
        assert "frozen" in str(e)
    else:
        raise AssertionError("a frozen config was changed")


def updated() -> None:
    shared = config_of().training(gamma=0.5)
    equal(value_at(type(shared)().update_from_dict(shared.to_dict()), "algo.gamma"), 0.5)


def unknown_key() -> None:
    refuses("training", gama=0.9)()
    unmigrated({"gama": 0.9})()


def every_callback() -> None:
    names = "on_algorithm_init on_workers_recreated on_checkpoint_loaded on_create_policy on_environment_created "
    names += "on_sub_environment_created on_episode_created on_episode_start on_episode_step on_episode_end "
    names += "on_evaluate_start on_evaluate_end on_postprocess_trajectory on_sample_end on_learn_on_batch "
    has("callbacks", *(names + "on_train_result").split())()


_MODEL = {"fcnet_hiddens": [32], "fcnet_activation": "relu"}
_LSTM = {"use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 8}

FEATURES: dict[str, list[Feature]] = {
    "The trainer's common config": [
        W("one default config, the algorithm's over it, the user's over both", "`PPOConfig()`; `config show` prints all",
          command("jrl.config", "show", "ROOT/configs/ppo.yaml", stdout="gae_lambda"), slow=True),
        W("an unknown key is an error", "with the nearest one; in calls, files and `--set`", unknown_key),
        D("`_allow_unknown_configs`", "there is no such switch: an unknown key is never taken", refuses("training", any_key=1)),
        W("`env_config`, `model` and others are open or nested dicts", "`environment(env_config=...)`",
          puts("environment", "env_config", {}, "env.options", {})),
        W("another `exploration_config.type` replaces the whole dict", "the same", switched_exploration),
        W("`validate_config`: errors across keys", "all at once, each with a mend, before anything starts",
          refuses("training", num_minibatches=7, num_epochs=0)),
        W("deprecated names still work", "all of five generations; a line says what they became",
          migrates({"num_workers": 0, "num_sgd_iter": 6}, "algo.num_epochs", 6)),
        W("schedules `[[t, value], ...]`", "on any float that has one; `lr_schedule`, too",
          migrates({"lr_schedule": [[0, 0.1], [100, 0.01]]}, "algo.lr", [[0, 0.1], [100, 0.01]])),
        W("`gamma`, `lr`, `train_batch_size`, `rollout_fragment_length`, `num_envs_per_worker`", "a batch is a product, "
          "and the plan is printed", migrates({"train_batch_size": 256, "num_envs_per_worker": 4}, "rollout.length", 64)),
        W("`model`", "[networks](networks.md)", puts("training", "model", _MODEL, "network.hidden", [32])),
        D("`optimizer`", "Adam: `lr`, `adam_eps`, three kinds of clipping", takes("training", optimizer={"epsilon": 1e-5})),
        W("`horizon`, `soft_horizon`, `no_done_at_end`", "the same", puts("environment", "horizon", 50, "env.horizon")),
        W("`batch_mode`", "`complete_episodes` pads and masks",
          puts("env_runners", "batch_mode", "complete_episodes", "rollout.batch_mode")),
        W("`create_env_on_driver`, `num_workers=0`", "this process collects unless there are env runners",
          migrates({"num_workers": 0, "create_env_on_driver": True}, "env_runners.num", 0)),
        W("`observation_filter`", "`training(normalize_obs=True)`, a part of the weights",
          migrates({"observation_filter": "MeanStdFilter"}, "algo.normalize_obs", True)),
        W("`synchronize_filters`", "there is one copy, which travels with the weights",
          takes("env_runners", synchronize_filters=True)),
        W("`clip_rewards`: None, bool, float, range", "the same five forms",
          puts("environment", "clip_rewards", [-2, 2], "env.clip_rewards")),
        W("`normalize_actions`, `clip_actions`", "the same",
          puts("environment", "normalize_actions", False, "env.normalize_actions", False)),
        W("`preprocessor_pref`, Atari wrappers", "EnvPool's Atari has them; `env_config` sets them", there("configs/ppo_atari.yaml")),
        W("`sample_async`", "`env_runners(sample_mode='async')`, with the lag as a metric",
          migrates({"sample_async": True}, "rollout.mode", "async")),
        W("`fake_sampler`", "the same", puts("env_runners", "fake_sampler", True, "rollout.fake")),
        W("`compress_observations`", "for env runners", puts("env_runners", "compress_observations", True,
          "env_runners.compress_observations")),
        W("`remote_worker_envs`, `remote_env_batch_wait_ms`", "environments in processes; batches of whoever is ready",
          puts("environment", "remote_worker_envs", True, "env.remote_worker_envs")),
        D("`sample_collector`", "`learner_connector=[fn]`: pure functions of a rollout",
          puts("training", "learner_connector", [], "custom.transforms", [])),
        W("`log_level`, `log_sys_usage`, `seed`", "the same", puts("debugging", "seed", 7, "run.seed")),
        W("`min_time_s_per_reporting`, `min_train_...`, `min_sample_timesteps_per_reporting`", "never change learning",
          puts("reporting", "min_time_s_per_iteration", 2, "run.report_every_s", 2)),
        W("`metrics_num_episodes_for_smoothing`", "the same",
          puts("reporting", "metrics_num_episodes_for_smoothing", 7, "run.smoothing_episodes")),
        D("`framework`, `eager_tracing`, `tf_session_args`, `torch_compile_*`", "JAX is the only one; "
          "`debugging(disable_jit=True)` runs operation by operation", takes("framework", framework="torch")),
        W("`eager_max_retraces`", "`max_recompiles`", migrates({"eager_max_retraces": 5}, "run.max_recompiles", 5)),
        D("`render_env`, `record_env`, `monitor`", "`evaluation(evaluation_record=n)`, `python -m jrl.record`: mp4",
          puts("evaluation", "evaluation_record", 1, "evaluation.record")),
        W("`extra_python_environs_for_driver`", "`resources(environment=...)`",
          migrates({"extra_python_environs_for_driver": {"A": "1"}}, "runtime.env", {"A": "1"})),
        W("`_disable_preprocessor_api`, `_disable_action_flattening`", "so it is: observations and actions are trees",
          takes("experimental", _disable_preprocessor_api=True)),
        N("`_tf_policy_handles_more_than_one_loss` and other switches of TensorFlow's", "one pure update per algorithm",
          tells("policy", "get_session")),
    ],
    "Trainer / Algorithm methods": [
        W("`Trainer(config, env)`, `train()`", "`PPO(config, env)`, `train()`; dicts of RLlib's are migrated", first_snippet, slow=True),
        W("`training_step`", "a method `training_step(self, step)`, or `training(training_step=fn)`", example("training_step.py"), slow=True),
        D("`execution_plan`, `step`, `step_attempt`", "pure functions: [functions](../examples/functions.py)",
          tells("algorithm", "execution_plan", "step", "step_attempt")),
        W("`evaluate()`", "`evaluate(duration=...)`", has("algorithm", "evaluate", "evaluation_workers")),
        W("`compute_single_action`", "state, prev_action, prev_reward, explore, full_fetch, unsquash_action, clip_action", acts, slow=True),
        W("`compute_actions`, also by agent's name", "the same", has("algorithm", "compute_actions")),
        W("`get_policy`, `get_weights`, `set_weights`", "numpy trees, of the one policy", has("algorithm", "get_policy", "get_weights", "set_weights")),
        N("`add_policy`, `remove_policy`, `policy_map`", "one agent has one policy", tells("algorithm", "add_policy", "remove_policy", "policy_map")),
        W("`export_policy_model`, `export_policy_checkpoint`", "npz, StableHLO, ONNX", has("algorithm", "export_policy_model", "export_policy_checkpoint")),
        D("`import_policy_model_from_h5`, `import_model`", "`import_weights(path, mapping)`: npz or safetensors",
          has("algorithm", "import_weights")),
        W("`save`, `restore`, `from_checkpoint`, `save_checkpoint`, `load_checkpoint`", "the same", saves, slow=True),
        W("`__getstate__`, `__setstate__`", "all of the run, as a checkpoint has it", has("algorithm", "__getstate__", "__setstate__")),
        W("`log_result`", "called with each result; a subclass may replace it", has("algorithm", "log_result")),
        W("`get_config`", "the frozen config", has("algorithm", "get_config")),
        W("`stop`, `cleanup`", "ends processes and threads", has("algorithm", "stop", "cleanup")),
        D("`default_resource_request`, `resource_help`", "`jrl.api.tune.resources(cfg)`", tells("algorithm", "default_resource_request", "resource_help")),
        D("`merge_trainer_configs`, `with_common_config`, `with_updates`", "`update_from_dict`, a subclass",
          tells("algorithm", "with_common_config", "with_updates")),
        D("`get_default_policy_class`, policies of one's own", "`training(loss_fn=fn)`, [your own algorithm](own-algorithm.md)",
          tells("algorithm", "get_default_policy_class")),
        W("`validate_env`", "`jrl.check_env`, `python -m jrl.check_env`", tells("algorithm", "validate_env")),
        W("`try_recover_from_step_attempt`", "env runners are restarted by themselves", puts("fault_tolerance",
          "recreate_failed_env_runners", True, "env_runners.recreate_failed_env_runners")),
    ],
    "Command line": [
        W("`rllib train --algo X --env Y --config JSON --stop JSON`", "`python -m jrl.train`, the same options",
          command("jrl.train", "--run", "A2C", "--env", "CartPole-v1", "--config", '{"num_env_runners": 0}', "--stop",
                  '{"training_iteration": 2, "timesteps_total": 2000}', "--out", "SCRATCH/run"), slow=True),
        W("`rllib train file x.yaml`", "jrl's files, and RLlib's, which are migrated", there("tests/fixtures/rllib/cartpole-ppo.yaml")),
        W("`rllib evaluate CHECKPOINT`", "`python -m jrl.evaluate DIR`", command("jrl.evaluate", "--help", stdout="--episodes"), slow=True),
        W("`rllib rollout --video-dir`", "`python -m jrl.record DIR --out x.mp4`", command("jrl.record", "--help", stdout="--out"), slow=True),
        W("tuned examples", "`jrl train ppo`, `jrl config list`", command("jrl", "config", "list", stdout="ppo"), slow=True),
        W("params.json, result.json, progress.csv, TensorBoard", "config.yaml, result.jsonl, progress.csv, tb/; `debugging(log=[...])`",
          puts("debugging", "log", ["jsonl"], "run.log")),
        W("stop criteria", "any metric, RLlib's names, too", stops, slow=True),
        D("`--checkpoint-freq`, `--checkpoint-at-end`", "`--set checkpoint.every=...` in steps; the end is always saved",
          puts("checkpointing", "checkpoint_every", 5000, "checkpoint.every")),
        W("`-v`, `-vv`", "`-v` and `run.log_level`", puts("debugging", "log_level", "DEBUG", "run.log_level")),
    ],
    "Python API and Tune": [
        W("`PPOConfig().environment(...).training(...).build()`", "the same", first_snippet, slow=True),
        W("`AlgorithmConfig.overrides`, `copy`, `freeze`", "the same", overriding),
        W("`to_dict`, `from_dict`, `update_from_dict`", "the same", updated),
        W("`tune.Tuner(...).fit()`, `grid_search`, `get_best_result`", "`from jrl.api import tune`: [Tune](tune.md)",
          example("tune_three_learning_rates.py"), slow=True),
        W("custom training function under Tune", "the same", example("tune_custom_training_function.py"), slow=True),
        W("PBT and other schedulers", "Ray's, over Algorithms", there("examples/tune_pbt.py")),
        W("policy state: weights of each worker", "`workers.foreach_worker(fn)`", example("weights.py"), slow=True),
        D("model state: `model(...)`, `base_model.summary()`", "`distribution`, `value_function`, `q_values`, `summary`",
          has("policy", "distribution", "value_function", "q_values", "summary")),
        D("preprocessors", "environments give what policies take; `FlattenObservations` is `network.flatten`",
          migrates({"model": {"fcnet_hiddens": [8]}}, "network.hidden", [8])),
        W("Q values and state values of DQN", "`q_values(obs)`", example("q_values.py"), slow=True),
        W("action distribution of PPO", "`distribution(obs)`", example("action_distribution.py"), slow=True),
    ],
    "Training options": [
        W("`gamma`, `lr`", "the same", puts("training", "gamma", 0.9, "algo.gamma")),
        W("`grad_clip`, `grad_clip_by`", "`max_grad_norm`, `max_leaf_norm`, `max_grad_value`",
          migrates({"grad_clip": 3.0, "grad_clip_by": "value"}, "algo.max_grad_value", 3.0)),
        W("`train_batch_size`, `minibatch_size`, `num_epochs`", "the nearest that divides, which is said",
          takes("training", train_batch_size=512, minibatch_size=128)),
        W("`train_batch_size_per_learner`", "times the devices", takes("training", train_batch_size_per_learner=512)),
        W("`use_lstm`, `use_attention`", "cores `lstm`, `gru`, `lru`, `gtrxl`", migrates({"model": _LSTM}, "network.max_seq_len", 8)),
        D("`learner_class`", "`loss_fn`, `training_step`, an algorithm of one's own", refuses("training", learner_class=dict)),
        D("`learner_connector`", "a list of pure functions of the rollout", puts("training", "learner_connector", [], "custom.transforms", [])),
        W("`max_requests_in_flight_per_env_runner`", "the same", puts("env_runners", "max_requests_in_flight_per_env_runner", 3,
          "env_runners.max_requests_in_flight")),
        W("PPO, APPO, IMPALA, A2C and A3C", "`ppo`, `appo`, `impala`, `a2c`", has("api", "PPO", "APPO", "IMPALA", "A2C")),
        W("DQN with its parts, Rainbow, Ape-X, R2D2", "`dqn` and its flags; as an addition `pqn`", has("api", "DQN", "PQN")),
        W("SAC, TD3, DDPG", "`sac` (also Discrete), `td3`", has("api", "SAC", "TD3")),
        N("BC, MARWIL, CQL, IQL, CRR", "offline learning is not here yet", lambda: _unknown_algorithms("BC", "MARWIL", "CQL")),
        N("DreamerV3, AlphaZero, MuZero, ES, ARS, bandits, MAML, QMIX, MADDPG", "see [limits](limits.md)",
          lambda: _unknown_algorithms("DreamerV3", "ES", "QMIX")),
    ],
    "Environment options": [
        W("a Gymnasium id, a class, a class path, a registered name", "the same; `backend` says how it is stepped", takes("environment", env="CartPole-v1")),
        W("`env_config`, `EnvContext`", "`env_config`; worker_index, vector_index, num_workers", has("api", "EnvContext", "register_env")),
        D("`observation_space`, `action_space`", "environments have theirs: the argument is not needed, and said so",
          takes("environment", observation_space=None)),
        W("`env_task_fn`, `TaskSettableEnv`", "the same", has("api", "TaskSettableEnv")),
        W("`action_mask_key`", "the item `action_mask` of the observation, for every algorithm", there("configs/ppo_mask.yaml")),
        W("`is_atari`", "known by the id", there("configs/dqn_atari.yaml")),
        W("Dict, Tuple, MultiDiscrete and MultiBinary spaces", "an encoder for each array", example("observations.py"), slow=True),
        N("`ExternalEnv`, policy server and client", "`jrl.load(path).act(obs)` behind a server of one's own", lambda: _no_name("ExternalEnv", "PolicyClient")),
        N("`MultiAgentEnv`, `VectorEnv`, `BaseEnv`", "Gymnasium environments, EnvPool, environments in JAX", lambda: _no_name("MultiAgentEnv", "VectorEnv")),
    ],
    "Env runners (rollout workers)": [
        W("`num_env_runners`, `num_envs_per_env_runner`", "the same", puts("env_runners", "num_env_runners", 2, "env_runners.num")),
        W("`sample()`, `sample_with_count()`", "a Rollout [T, B] of the run's environments", by_hand, slow=True),
        W("`compute_gradients`, `apply_gradients`, `learn_on_batch`", "of the run's algorithm, optimizer and devices; "
          "on-policy of rollouts, with replay of `sample_replay()`", has("worker", "compute_gradients", "apply_gradients", "learn_on_batch")),
        D("gradients of SAC and TD3", "those of all parts at the same parameters; an update takes them one after another", has("algorithm", "compute_gradients")),
        D("`set_weights`, `sync_filters` in an env runner", "in the process that learns: what runners act with comes with each request",
          has("workers", "local_worker", "sync_weights")),
        W("`foreach_policy`, `foreach_trainable_policy`, `for_policy`", "of the one policy", has("worker", "foreach_policy", "foreach_trainable_policy", "for_policy")),
        W("`get_filters`, `sync_filters`", "the running statistics", has("worker", "get_filters", "sync_filters")),
        D("`get_metrics`", "the latest episodes, as newer RLlib has it; reading does not drain them", has("worker", "get_metrics")),
        W("`foreach_env`, `foreach_worker`, `_with_index`, `_with_id`", "the same", has("workers", "foreach_env", "foreach_worker",
          "foreach_worker_with_index", "foreach_worker_with_id")),
        W("`concat_samples`", "`jrl.api.concat_samples`", has("api", "concat_samples")),
        D("`set_global_vars`, `get_global_vars`", "schedules read env_steps, which acting has", tells("policy", "on_global_var_update")),
        D("`save`, `restore` of a worker", "`Algorithm.save`: one state, no pickle", tells("policy", "get_state", "set_state")),
        D("`as_remote`, `creation_args`, `setup_torch_data_parallel`", "Ray by `num_env_runners`, devices by `learners`",
          takes("learners", num_learners=1)),
        D("`split_by_episode`, `SampleBatch`", "`Rollout`: time-major arrays with `mask`, `terminated`, `truncated`", lambda: __import__("jrl.types")),
    ],
    "Evaluation options": [
        W("`evaluation_interval`, `evaluation_duration`, `_unit`", "exactly so many episodes", puts("evaluation", "evaluation_duration", 7, "evaluation.duration")),
        W("`evaluation_duration='auto'`, `evaluation_parallel_to_training`", "the same",
          takes("evaluation", evaluation_interval=1, evaluation_parallel_to_training=True, evaluation_duration="auto")),
        W("`evaluation_num_env_runners`", "the same", puts("evaluation", "evaluation_num_env_runners", 1, "evaluation.num_env_runners")),
        W("`evaluation_config`", "any key", takes("evaluation", evaluation_config={"explore": True})),
        W("`custom_evaluation_function`", "the same", example("custom_evaluation.py"), slow=True),
        W("`always_attach_evaluation_results`", "the same", puts("evaluation", "always_attach_evaluation_results", True, "evaluation.always_attach")),
        W("`evaluation_sample_timeout_s`", "the same", puts("evaluation", "evaluation_sample_timeout_s", 9.0, "evaluation.timeout_s")),
        W("`evaluation_force_reset_envs_before_iteration`", "the same", puts("evaluation",
          "evaluation_force_reset_envs_before_iteration", False, "evaluation.force_reset", False)),
        W("evaluation beside training", "with the weights' version in the row", example("parallel_evaluation.py"), slow=True),
        N("`off_policy_estimation_methods`, `ope_split_batch_by_episode`", "no data from files", unmigrated({"off_policy_estimation_methods": {"is": {"type": "is"}}})),
    ],
    "Offline data options": [
        N("`input`: files, mixtures, functions", "jrl does not read data from files yet", unmigrated({"input": "/tmp/data"})),
        N("`output`, `output_compress_columns`, `output_max_file_size`", "nor write them", unmigrated({"output": "/tmp/data"})),
        N("`input_evaluation`: is, wis, simulation", "an evaluation plays episodes", unmigrated({"input_evaluation": ["is"]})),
        N("`actions_in_input_normalized`, `shuffle_buffer_size`, `postprocess_inputs`", "nothing is read", unmigrated({"input": "d", "shuffle_buffer_size": 9})),
    ],
    "Multi-agent options": [
        N("`policies`, `policy_mapping_fn`, `policies_to_train`", "one agent, one policy", unmigrated({"multiagent": {"policies": ["a", "b"]}})),
        N("`policy_map_capacity`, `policy_states_are_swappable`, `observation_fn`, `replay_mode`", "one agent, one policy", refuses("multi_agent", policies={"a", "b"})),
        W("`count_steps_by`", "one agent: both are the same number", puts("env_runners", "count_steps_by", "agent_steps", "rollout.count_steps_by")),
    ],
    "Reporting, checkpointing, debugging": [
        W("`keep_per_episode_custom_metrics`", "the same", puts("reporting", "keep_per_episode_custom_metrics", True, "run.keep_per_episode_metrics")),
        D("`metrics_episode_collection_timeout_s`", "episodes are counted with the rollout that they end in", takes("reporting", metrics_episode_collection_timeout_s=9)),
        W("checkpoints every so often, the last and the best kept", "`checkpointing(...)`", puts("checkpointing", "keep_last", 3, "checkpoint.keep_last")),
        D("`export_native_model_files`", "`export_policy_model`, `python -m jrl.export`", takes("checkpointing", export_native_model_files=True)),
        W("`store_buffer_in_checkpoints`", "`replay_in_checkpoints`", puts("checkpointing", "replay_in_checkpoints", "none", "checkpoint.replay")),
        D("`logger_creator`, `logger_config`", "`debugging(log=[...], out=...)`: jsonl, csv, TensorBoard, W&B, a class", puts("debugging", "log", ["csv"], "run.log")),
        W("stack traces", "`kill -USR1 PID`; a watchdog prints them when a run stalls", puts("debugging", "stall_seconds", 60, "run.stall_seconds", 60)),
        W("gym monitor", "videos: `evaluation_record`", puts("evaluation", "evaluation_record", 2, "evaluation.record")),
        N("episode traces by the output API", "result rows and `hist_stats`; no samples in files", unmigrated({"output": "logdir"})),
    ],
    "Callbacks and custom metrics": [
        W("DefaultCallbacks and all its moments", "`jrl.api.Callbacks`", every_callback),
        W("`episode.user_data`, `custom_metrics`, `hist_data`", "the same", example("custom_metric.py"), slow=True),
        W("chaining: `make_multi_callbacks`", "the same, or a list", example("several_callbacks.py"), slow=True),
        W("`MemoryTrackingCallbacks`", "`callbacks('jrl.memory_tracking:MemoryTracking')`", takes("callbacks", callbacks_class="jrl.memory_tracking:MemoryTracking")),
        W("rewriting trajectories", "`on_postprocess_trajectory`, or a pure function", example("backdate_rewards.py"), slow=True),
        W("visualising custom metrics", "TensorBoard, `jrl plot`", command("jrl.plot", "--help"), slow=True),
    ],
    "Advanced Python API": [
        W("curriculum by `env_task_fn`", "the same", example("curriculum_env_task.py"), slow=True),
        W("curriculum by a callback", "the same", example("curriculum_callback.py"), slow=True),
        W("curriculum by the train loop", "the same", example("curriculum_train_loop.py"), slow=True),
        W("global coordination by a named actor", "Ray's, as it is", there("examples/global_counter.py")),
        W("custom training workflows", "pure functions, a generator, an Algorithm", example("functions.py"), slow=True),
    ],
    "Exploration": [
        W("`explore`, per call and per config", "the same", puts("env_runners", "explore", False, "rollout.explore", False)),
        W("`StochasticSampling` with `random_timesteps`", "the same", takes("exploration", exploration_config={"type": "StochasticSampling"})),
        W("`EpsilonGreedy`, `PerWorkerEpsilonGreedy`", "`epsilon_greedy`, `ladder: true`",
          takes("exploration", "DQN", exploration_config={"type": "EpsilonGreedy", "final_epsilon": 0.05, "epsilon_timesteps": 100})),
        W("`SoftQ`", "`softq`", switched_exploration),
        W("`Random`", "the same", takes("exploration", exploration_config={"type": "Random"})),
        W("`GaussianNoise`, `OrnsteinUhlenbeckNoise`", "the same", takes("exploration", "TD3", exploration_config={"type": "GaussianNoise"})),
        W("`ParameterNoise`", "for dqn and pqn", takes("exploration", "DQN", exploration_config={"type": "ParameterNoise"})),
        W("a class of one's own", "a pure function", example("custom_exploration.py"), slow=True),
        N("`Curiosity`, `RE3`, RND, `SlateEpsilonGreedy`, `ThompsonSampling`", "see [limits](limits.md)", refuses("exploration", exploration_config={"type": "Curiosity"})),
    ],
    "Resources and fault tolerance": [
        W("`num_gpus`", "devices that learn", takes("resources", num_gpus=0)),
        W("`num_learners`", "`learners`: devices by index", puts("learners", "learners", [0], "devices.learners", [0])),
        D("`num_gpus_per_learner`, `local_gpu_idx`", "learners are devices of one process", takes("learners", num_gpus_per_learner=0)),
        W("`num_cpus_per_worker`, `num_gpus_per_worker`, `custom_resources_per_worker`", "of env runners",
          migrates({"num_cpus_per_worker": 2}, "env_runners.num_cpus", 2)),
        W("`placement_strategy`", "the same", puts("resources", "placement_strategy", "SPREAD", "env_runners.placement")),
        W("`_fake_gpus`", "`fake_devices`", puts("learners", "fake_devices", 2, "devices.fake")),
        W("`ignore_env_runner_failures`, `recreate_failed_env_runners`, `restart_failed_sub_environments`", "the same",
          puts("fault_tolerance", "restart_failed_sub_environments", True, "env_runners.restart_failed_sub_environments")),
        D("several machines that learn", "one machine's devices learn, others collect: [scaling](scaling.md)", there("docs/scaling.md")),
        N("Windows", "nothing was tried there", there("docs/limits.md")),
    ],
    "Replay": [
        W("`replay_buffer_config`: capacity, prioritised, alpha, beta, eps", "the same",
          puts("training", "replay_buffer_config", {"capacity": 5000}, "replay.capacity", 5000, algo="DQN")),
        W("`n_step`", "a number or a range", migrates({"n_step": 3}, "replay.n_step", 3, "DQN")),
        W("`training_intensity`", "rows learned from per step", takes("training", "DQN", training_intensity=4)),
        W("`num_steps_sampled_before_learning_starts`, `learning_starts`", "the same",
          migrates({"learning_starts": 500}, "replay.learning_starts", 500, "DQN")),
        W("sequences and burn-in (R2D2)", "`replay.burn_in`", there("configs/r2d2.yaml")),
        D("a buffer class of one's own", "three kinds over one storage: [replay](replay.md)", there("docs/replay.md")),
        D("`local_replay_buffer`", "it lies on the devices: `sample_replay()` draws a batch", tells("algorithm", "local_replay_buffer")),
    ],
}  # fmt: skip


def _unknown_algorithms(*names: str) -> None:
    from jrl import migrate
    from jrl.errors import InputError

    for name in names:
        try:
            migrate.migrate({"env": "CartPole-v1"}, algo=name)
        except InputError:
            continue
        raise AssertionError(f"{name} is an algorithm")


def _no_name(*names: str) -> None:
    from jrl import api

    for name in names:
        try:
            getattr(api, name)
        except AttributeError as e:
            assert "jrl.api has no" in str(e)
        else:
            raise AssertionError(f"jrl.api has {name}")
