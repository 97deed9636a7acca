"""Names of RLlib's and SB3's objects, and of their packages, that jrl's do not have.

A table of replacements, and the error.
"""

import difflib
import importlib.util
import inspect
import types
from typing import Any

_SEVERAL = "config.to_run_config().multi_agent has policies and mapping; get_policy(policy_id) is one of them"
_ENVS = "environments of several agents are not made by inheritance: docs/environments.md"
_STATE = "save(path) writes all of it and restore(path) takes it back; get_weights() and set_weights() are the arrays"
_STEP = "train() is one iteration; what it does is a method training_step(self, step) of a subclass"
_RUNNERS = "env runners are restarted by themselves: fault_tolerance(recreate_failed_env_runners=True)"
_DATA = "jrl.data.read(path) gives the episodes of any of its formats, jrl.data.Writer writes some: docs/data.md"
_OFFLINE = "offline_data(input_=...) of the config names what is read, jrl.data.read(path) reads it: docs/data.md"
_OUTPUTS = "distribution(obs), value_function(obs) and q_values(obs) are what its networks say, summary() what they are"
_GRADIENTS = "learn_on_batch(samples) is an update, compute_gradients and apply_gradients are its halves"
_LOSS = "a loss of your own is training(loss_fn=fn), or a static method `loss` of an Algorithm"
_MODULE = "a network of your own is training(model={'torso': ...}): docs/networks.md"
_STATELESS = "environments give what policies take: there is nothing in between that has a state"
_FRAMEWORK = "JAX is the only framework"
_LEARNER = "the learner is a program of this process; its devices are learners(learners=[...])"
_LIMITS = "docs/limits.md says what is not here"
_ASYNC = "rollouts are on order all the time with env_runners(sample_mode='async'), and weights come with each request"
_UNITS = "actions come in the environment's own units"
_PLACED = "what a trial reserves is jrl.api.tune.resources(config.to_run_config())"

# of jrl.api, each with a config of the name
_API = ("A2C", "APPO", "DQN", "IMPALA", "IQN", "PPO", "PQN", "SAC", "TD3", "VDN")
_FROM_DATA = ("BC", "CQL", "DT", "IQL", "MARWIL")
_CONFIGS = {
    "A3C": "a2c", "C51": "c51", "DDPG": "ddpg", "DDPPO": "ppo", "MaskablePPO": "ppo_mask",
    "QRDQN": "qrdqn", "R2D2": "r2d2", "Rainbow": "rainbow", "RecurrentPPO": "ppo_lstm", "SimpleQ": "dqn",
}  # fmt: skip
_FROM_API = (
    "APEX", "APEXConfig", "Algorithm", "AlgorithmConfig", "ApexDQN", "ApexDQNConfig", "Callbacks", "DefaultCallbacks",
    "EnvContext", "Episode", "Impala", "ImpalaConfig", "MemoryTrackingCallbacks", "PolicySpec", "TaskSettableEnv",
    "concat_samples", "in_program", "make_multi_callbacks", "register_env", "tune",
)  # fmt: skip


def _run(config: str) -> str:
    return f"python -m jrl.train configs/{config}.yaml"


_CLASSES = {  # of RLlib's packages, what both of ours have nothing by that name for
    **{n + end: _run(config) for n, config in _CONFIGS.items() for end in ("", "Config")},
    **dict.fromkeys(("CRR", "CRRConfig"),
                    "MARWIL with weight='binary' has its filter, over returns, and IQL its critic"),
    **dict.fromkeys(("JsonReader", "DatasetReader", "D4RLReader", "MixedInput", "InputReader", "ShuffledInput",
                     "JsonWriter", "DatasetWriter", "OutputWriter", "OfflineData", "OfflinePreLearner", "IOContext"),
                    _DATA),
    **{n + end: _LIMITS for n in ("ARS", "DreamerV3", "ES", "MAML", "PG", "TRPO") for end in ("", "Config")},
    **dict.fromkeys(("CrossQ", "HerReplayBuffer", "TQC"), "docs/from-sb3.md says what is the nearest"),
    **dict.fromkeys(("MultiAgentEnv", "MultiAgentEnvRunner", "make_multi_agent"), _ENVS),
    **dict.fromkeys(("RLModule", "TorchModelV2", "ModelCatalog", "register_custom_model"), _MODULE),
    **dict.fromkeys(("ExternalEnv", "PolicyServerInput", "PolicyClient"),
                    "python -m jrl.serve CONFIG; its clients use jrl.serve.client.PolicyClient"),
}  # fmt: skip


# by kind of object: name -> what does it instead
NAMES: dict[str, dict[str, str]] = {
    "algorithm": {
        **dict.fromkeys(("get_module", "rl_module", "rllib_module", "foreach_module"),
                        "get_policy() shows what its networks say"),
        **dict.fromkeys(("get_state", "set_state", "get_checkpointable_components", "get_ctor_args_and_kwargs",
                         "get_metadata", "save_to_object", "restore_from_object"), _STATE),
        "from_state": "Algorithm.from_checkpoint(path)",
        **dict.fromkeys(("setup", "step", "step_attempt", "execution_plan", "train_buffered", "training_iteration_fn",
                         "train_exec_impl"), _STEP),
        **dict.fromkeys(("restore_workers", "restore_env_runners", "restore_offline_eval_runners"), _RUNNERS),
        "evaluate_offline": "offline_data(validation=0.1) holds episodes out, whose loss each result has",
        "env_runner": "workers.local_worker(), or workers.foreach_worker(func)",
        "eval_env_runner": "evaluation_workers",
        "trial_id": "train() has trial_id; jrl.api.tune makes trials of Algorithms",
        **dict.fromkeys(("learner_group", "learner", "optimizer"), _LEARNER),
        **dict.fromkeys(("local_replay_buffer", "replay_buffer"), "sample_replay() draws a batch of it"),
        "get_default_policy_class": _LOSS,
        "validate_env": "python -m jrl.check_env ID, jrl.check_env(...)",
        "validate_config": "config.validate()",
        "merge_algorithm_configs": "config.update_from_dict(...)",
        "merge_trainer_configs": "config.update_from_dict(...)",
        "with_common_config": "get_default_config().update_from_dict(...)",
        "with_updates": "a subclass",
        **dict.fromkeys(("get_auto_filled_metrics", "get_current_ip_pid"), "train() has hostname, node_ip, pid, date"),
        **dict.fromkeys(("default_resource_request", "resource_help"), _PLACED),
        **dict.fromkeys(("reset", "reset_config"), "make another of config.copy(copy_frozen=False)"),
        "is_actor": "jrl.api.tune makes trials of Algorithms",
        "trial_name": "train() has trial_id; jrl.api.tune makes trials of Algorithms",
        "trial_resources": _PLACED,
        "import_policy_model_from_h5": "import_weights(path) of npz or safetensors",
        "import_model": "import_weights(path) of npz or safetensors",
        "model": _OUTPUTS.replace("distribution", "get_policy().distribution", 1),
        "optimizers": _LEARNER,
        "learn": "train() is one iteration: call it until its result says what you want, or use `python -m jrl.train`",
        "set_env": "an Algorithm is made for one environment: config.environment(...).build()",
        "get_env": "workers.foreach_env(func) calls func(env) where the environments are",
        "load": "Algorithm.from_checkpoint(path), or jrl.load(path) to act only",
        "set_parameters": "set_weights(weights)",
        "get_parameters": "get_weights()",
        "get_vec_normalize_env": "observation statistics are part of the weights: training(normalize_obs=True)",
        "set_logger": "debugging(log=[...])",
        "logger": "debugging(log=[...]) chooses where result rows go; train() returns them",
        "env": "workers.foreach_env(func) calls func(env) where the environments are",
        "observation_space": "get_policy().observation_space",
        "action_space": "get_policy().action_space",
        "predict": "get_policy().predict(obs), or compute_single_action(obs)",
        "local_worker": "workers.local_worker()",
        **dict.fromkeys(("rollout_buffer", "collect_rollouts"), "workers.local_worker().sample() is a rollout"),
        "num_timesteps": "train() has num_env_steps_sampled_lifetime",
        "ep_info_buffer": "train() has episode_return_mean, _min and _max",
        "metrics": "train() returns them",
        "set_random_seed": "debugging(seed=...)",
        "tensorboard_log": "logdir has tb/",
        "n_envs": "env_runners(num_envs=...)",
        "verbose": "debugging(log_level=...)",
        "callbacks": "callbacks(...) of the config",
        "offline_data": _OFFLINE,
    },
    "policy": {
        **dict.fromkeys(("model", "base_model", "forward_inference", "forward_exploration", "forward_train", "apply",
                         "make_model", "make_model_and_action_dist", "action_sampler_fn", "action_distribution_fn",
                         "extra_action_out"), _OUTPUTS),
        "compute_actions_from_input_dict": "compute_actions(obs, state, prev_action=..., prev_reward=...)",
        **dict.fromkeys(("learn_on_batch_from_replay_buffer", "load_batch_into_buffer", "learn_on_loaded_batch",
                         "get_num_samples_loaded_into_buffer", "extra_grad_process", "extra_compute_grad_fetches",
                         "get_batch_divisibility_req", "optimizer", "get_tower_stats", "stats_fn"), _GRADIENTS),
        **dict.fromkeys(("export_model", "export_policy_model", "to_torch"),
                        "Algorithm.export_policy_model(directory), or python -m jrl.export"),
        **dict.fromkeys(("loss", "loss_initialized"), _LOSS),
        "postprocess_trajectory": "training(learner_connector=[fn]), a pure function of the rollout",
        **dict.fromkeys(("from_state", "export_checkpoint", "from_checkpoint"),
                        "Algorithm.save(path), and jrl.load(path) to act only"),
        **dict.fromkeys(("get_exploration_state", "exploration", "get_exploration_info"),
                        "how actions are chosen is training's schedule: config.exploration_config"),
        **dict.fromkeys(("get_connector_metrics", "reset_connectors", "restore_connectors", "agent_connectors",
                         "action_connectors", "preprocessor", "view_requirements", "init_view_requirements",
                         "maybe_remove_time_dimension"), _STATELESS),
        **dict.fromkeys(("on_global_var_update", "global_timestep"), "schedules read env_steps, which acting has"),
        "import_model_from_h5": "Algorithm.import_weights(path) of npz or safetensors",
        **dict.fromkeys(("get_session", "device", "devices", "framework"), _FRAMEWORK),
        "get_host": "train() has hostname",
        "num_state_tensors": "get_initial_state() is the state",
        "obs_to_tensor": "observations are taken as the environment gives them",
        "evaluate_actions": "distribution(obs).log_prob(actions) and .entropy(), value_function(obs)",
        "predict_values": "value_function(obs)",
        "get_distribution": "distribution(obs)",
        "forward": _OUTPUTS,
        "state_dict": "get_weights()",
        "load_state_dict": "set_weights(weights)",
        "save": "Algorithm.save(path)",
        "load": "jrl.load(path)",
        **dict.fromkeys(("scale_action", "unscale_action"), _UNITS),
    },
    "loaded": {  # by jrl.load
        **dict.fromkeys(("compute_actions", "compute_single_action", "forward", "policy"), "act(obs)"),
        **dict.fromkeys(("scale_action", "unscale_action"), _UNITS),
        **dict.fromkeys(("set_env", "get_env", "env"), "it needs no environment: act(obs)"),
        **dict.fromkeys(("learn", "train"), "python -m jrl.train --resume RUN goes on"),
        **dict.fromkeys(("export", "export_model", "export_policy_model", "save", "to_torch"),
                        "python -m jrl.export RUN"),
    },
    "workers": {  # RLlib's WorkerSet and EnvRunnerGroup
        **dict.fromkeys(("foreach_worker_async", "foreach_env_runner_async", "fetch_ready_async_reqs",
                         "sync_env_runner_states", "num_in_flight_async_reqs", "num_in_flight_async_calls"), _ASYNC),
        "foreach_env_with_context": "foreach_worker(func), and source.foreach_env(func) there",
        "is_policy_to_train": "foreach_policy_to_train(func) calls func(policy, policy_id) of those that learn",
        **dict.fromkeys(("actors", "healthy_worker_ids", "healthy_env_runner_ids"),
                        "foreach_worker(func)"),
        **dict.fromkeys(("num_remote_workers", "num_remote_env_runners", "num_healthy_remote_workers",
                         "num_healthy_env_runners"), "num_healthy_workers, an attribute"),
        **dict.fromkeys(("probe_unhealthy_workers", "probe_unhealthy_env_runners", "num_remote_worker_restarts",
                         "num_remote_env_runner_restarts", "restore_env_runners"), _RUNNERS),
        **dict.fromkeys(("add_policy", "remove_policy"), "Algorithm.add_policy(...), .remove_policy(...)"),
        **dict.fromkeys(("add_workers", "add_env_runners"), "env_runners(num_env_runners=...), before build()"),
        **dict.fromkeys(("stop", "reset"), "Algorithm.stop() ends them; build() makes others"),
    },
    "worker": {  # RLlib's RolloutWorker and SingleAgentEnvRunner
        **dict.fromkeys(("env", "async_env", "vector_env", "get_spaces"), "foreach_env(func) calls func(env)"),
        **dict.fromkeys(("filters", "get_filter"), "get_filters()"),
        **dict.fromkeys(("policy_dict", "policy_mapping_fn"), "policy_map; " + _SEVERAL),
        **dict.fromkeys(("config", "policy_config"), "config of the Algorithm"),
        "global_vars": "schedules read env_steps, which acting has",
        "foreach_env_with_context": "source.foreach_env(func)",
        **dict.fromkeys(("set_policy_mapping_fn", "add_policy", "remove_policy", "set_is_policy_to_train",
                         "is_policy_to_train"), "Algorithm.add_policy(...), .remove_policy(...)"),
        **dict.fromkeys(("get_state", "set_state", "save", "restore"), "Algorithm.save(path), .restore(path)"),
        **dict.fromkeys(("module", "rl_module"), "get_policy()"),
        "metrics": "get_metrics()",
        "sample_and_learn": _GRADIENTS,
        **dict.fromkeys(("lock", "unlock", "ping", "assert_healthy", "find_free_port", "setup_torch_data_parallel",
                         "creation_args", "get_global_vars", "set_global_vars"), "nothing: jrl does so by itself"),
        **dict.fromkeys(("get_host", "get_node_ip"), "socket.gethostname() in foreach_worker(func)"),
        "apply": "foreach_worker(func) calls func(worker)",
        "num_workers": "config.num_env_runners",
        "stop": "Algorithm.stop()",
    },
    "config": {
        **dict.fromkeys(("get_state", "serialize"), "to_dict() and to_yaml() hold all of it"),
        "from_state": "from_dict(tree), or from_yaml(path)",
        "pop": "a config has all keys: set one to its default",
        **dict.fromkeys(("build_env_to_module_connector", "build_module_to_env_connector", "build_learner_connector"),
                        "training(learner_connector=[fn]) takes pure functions of the rollout"),
        **dict.fromkeys(("build_learner", "build_learner_group", "get_default_learner_class"), _LEARNER),
        **dict.fromkeys(("get_default_rl_module_spec", "get_rl_module_spec", "get_multi_rl_module_spec",
                         "get_marl_module_spec"), _MODULE),
        **dict.fromkeys(("get_config_for_module", "get_multi_agent_setup", "DEFAULT_POLICY_MAPPING_FN",
                         "DEFAULT_AGENT_TO_MODULE_MAPPING_FN"), _SEVERAL),
        "is_offline": "jrl.settings.datasets.alone(config.to_run_config())",
        "uses_new_env_runners": "there is one stack",
        "get_evaluation_config_object": "config.evaluation_config has what is different there",
        "get_rollout_fragment_length": "jrl.settings.plan.rollout_length(config.to_run_config())",
        "validate_train_batch_size_vs_rollout_fragment_length": "validate()",
        **dict.fromkeys(("get_torch_compile_worker_config", "get_torch_compile_learner_config"), _FRAMEWORK),
        "total_train_batch_size": "jrl.settings.plan.batch_plan(config.to_run_config()).rows",
    },
    "api": {
        **_CLASSES,
        "Policy": "get_policy() of an Algorithm, or jrl.load(path)",
        "SampleBatch": "sample() of workers.local_worker() gives a Rollout, sample_replay() a Batch",
    },
    "jrl": {
        **{n: f"from jrl.api import {n}, or {_run(n.lower())}" for n in _API},
        **{f"{n}Config": f"from jrl.api import {n}Config, or {_run(n.lower())}" for n in _API},
        **_CLASSES,
        **{n + end: f"from jrl.api import {n}{end}" for n in _FROM_DATA for end in ("", "Config")},
        **{n: f"from jrl.api import {n}" for n in _FROM_API},
        **dict.fromkeys(("make", "make_vec", "make_vec_env", "VecEnv", "DummyVecEnv", "SubprocVecEnv"),
                        "jrl.envs.make(id, num_envs=8); a run makes its own, of env.id and env.num_envs"),
        "evaluate_policy": "python -m jrl.evaluate RUN --episodes 20, or evaluate(20) of an Algorithm",
        "Monitor": "result rows have returns and lengths, always",
        "VecNormalize": "algo.normalize_obs=true and algo.normalize_reward=true",
        "VecFrameStack": "env.frame_stack=4",
        "EvalCallback": "evaluation.every: docs/evaluation.md",
        "CheckpointCallback": "checkpoint.every: docs/checkpoints.md",
        **dict.fromkeys(("BaseCallback", "CallbackList"), "custom.callbacks: docs/callbacks.md"),
        "set_random_seed": "run.seed",
        **dict.fromkeys(("init", "shutdown"), "there is nothing to start: python -m jrl.train CONFIG, or jrl.api"),
    },
}  # fmt: skip

_ELSE = {"loaded": "act(obs) is what it does; jrl.api.Algorithm.from_checkpoint(path).get_policy() has what is inside"}


def missing(owner: Any, name: str, kind: str) -> AttributeError | ImportError:
    """Returns the error for an attribute that an object does not have, with what replaces it.

    `from package import name` replaces an AttributeError by words of its own: it gets an ImportError, as long as no
    submodule has that name.

    Args:
      owner: the object, or the package.
      kind: which part of the table is for it.
    """
    if name.startswith("_"):
        return AttributeError(name)
    near = difflib.get_close_matches(name, [n for n in dir(owner) if not n.startswith("_")], 1, 0.75)
    mend = NAMES[kind].get(name) or (
        f"did you mean {near[0]}?" if near else _ELSE.get(kind, "docs/api.md lists what there is")
    )
    who = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__name__
    message = f"{who} has no {name}: {mend}"
    if isinstance(owner, types.ModuleType) and _is_imported() and importlib.util.find_spec(f"{who}.{name}") is None:
        return ImportError(message, name=who)
    return AttributeError(message)


def _is_imported() -> bool:
    """Returns whether an import statement asks, three frames up, behind `__getattr__` of a package."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame and frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")


__all__ = ["NAMES", "missing"]
