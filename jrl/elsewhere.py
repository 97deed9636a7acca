"""Names of RLlib's and SB3's objects, and of their packages, that jrl's do not have.

A table of what does it instead, and the error.
"""

import difflib
import types
from typing import Any

_ONE = "one agent has one policy, default_policy: several are not part of jrl yet"
_STATE = "save(path) writes all of it and restore(path) takes it back; get_weights() and set_weights() are the arrays"
_STEP = "train() is one iteration; what it does is a method training_step(self, step) of a subclass"
_RUNNERS = "env runners are restarted by themselves: fault_tolerance(recreate_failed_env_runners=True)"
_OFFLINE = "jrl does not read data from files yet"
_OUTPUTS = "distribution(obs), value_function(obs) and q_values(obs) are what its networks say, summary() what they are"
_GRADIENTS = "learn_on_batch(samples) is an update, compute_gradients and apply_gradients are its halves"
_LOSS = "a loss of your own is training(loss_fn=fn), or a static method `loss` of an Algorithm"
_MODULE = "a network of your own is training(model={'torso': ...}): docs/networks.md"
_STATELESS = "environments give what policies take: there is nothing in between that has a state"
_FRAMEWORK = "JAX is the only framework"
_LEARNER = "the learner is a program of this process; its devices are learners(learners=[...])"
_PLACED = "what a trial reserves is jrl.api.tune.resources(config.to_run_config())"

_API = ("A2C", "APPO", "DQN", "IMPALA", "PPO", "PQN", "SAC", "TD3")  # classes of jrl.api that have a config of the name
_CONFIGS = {
    "A3C": "a2c", "APEX": "dqn", "C51": "c51", "DDPG": "ddpg", "DDPPO": "ppo", "MaskablePPO": "ppo_mask",
    "QRDQN": "qrdqn", "R2D2": "r2d2", "Rainbow": "rainbow", "RecurrentPPO": "ppo_lstm", "SimpleQ": "dqn",
}  # fmt: skip
_FROM_API = (
    "Algorithm", "AlgorithmConfig", "Callbacks", "DefaultCallbacks", "EnvContext", "Episode", "TaskSettableEnv",
    "concat_samples", "in_program", "make_multi_callbacks", "register_env", "tune",
)  # fmt: skip


def _run(config: str) -> str:
    return f"python -m jrl.train configs/{config}.yaml"


# by kind of object: name -> what does it instead
NAMES: dict[str, dict[str, str]] = {
    "algorithm": {
        **dict.fromkeys(("get_module", "rl_module"), "get_policy() shows what its networks say"),
        **dict.fromkeys(("add_module", "remove_module", "add_policy", "remove_policy", "policy_map"), _ONE),
        **dict.fromkeys(("get_state", "set_state", "get_checkpointable_components", "get_ctor_args_and_kwargs",
                         "get_metadata", "save_to_object", "restore_from_object"), _STATE),
        "from_state": "Algorithm.from_checkpoint(path)",
        **dict.fromkeys(("setup", "step", "step_attempt", "execution_plan", "train_buffered", "training_iteration_fn",
                         "train_exec_impl"), _STEP),
        **dict.fromkeys(("restore_workers", "restore_env_runners", "restore_offline_eval_runners"), _RUNNERS),
        "evaluate_offline": _OFFLINE,
        "env_runner": "workers.local_worker(), or workers.foreach_worker(fn)",
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
        "get_env": "workers.foreach_env(fn) calls fn(env) where the environments are",
        "load": "Algorithm.from_checkpoint(path), or jrl.load(path) to act only",
        "set_parameters": "set_weights(weights)",
        "get_parameters": "get_weights()",
        "get_vec_normalize_env": "observation statistics are part of the weights: training(normalize_obs=True)",
        "set_logger": "debugging(log=[...])",
        "logger": "debugging(log=[...]) chooses where result rows go; train() returns them",
        "env": "workers.foreach_env(fn) calls fn(env) where the environments are",
        "observation_space": "get_policy().observation_space",
        "action_space": "get_policy().action_space",
    },
    "policy": {
        **dict.fromkeys(("model", "base_model", "forward_inference", "forward_exploration", "forward_train", "apply",
                         "make_model", "make_model_and_action_dist", "action_sampler_fn", "action_distribution_fn",
                         "extra_action_out"), _OUTPUTS),
        "compute_actions_from_input_dict": "compute_actions(obs, state, prev_action=..., prev_reward=...)",
        **dict.fromkeys(("learn_on_batch_from_replay_buffer", "load_batch_into_buffer", "learn_on_loaded_batch",
                         "get_num_samples_loaded_into_buffer", "extra_grad_process", "extra_compute_grad_fetches",
                         "get_batch_divisibility_req", "optimizer", "get_tower_stats", "stats_fn"), _GRADIENTS),
        "export_model": "Algorithm.export_policy_model(directory), or python -m jrl.export",
        **dict.fromkeys(("loss", "loss_initialized"), _LOSS),
        "postprocess_trajectory": "training(learner_connector=[fn]), a pure function of the rollout",
        **dict.fromkeys(("get_state", "set_state", "from_state", "export_checkpoint", "from_checkpoint"),
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
        **dict.fromkeys(("get_config_for_module", "get_multi_agent_setup", "is_multi_agent",
                         "DEFAULT_POLICY_MAPPING_FN", "DEFAULT_AGENT_TO_MODULE_MAPPING_FN"), _ONE),
        "is_offline": _OFFLINE,
        "uses_new_env_runners": "there is one stack",
        "get_evaluation_config_object": "config.evaluation_config has what is different there",
        "get_rollout_fragment_length": "jrl.plan.rollout_length(config.to_run_config())",
        "validate_train_batch_size_vs_rollout_fragment_length": "validate()",
        **dict.fromkeys(("get_torch_compile_worker_config", "get_torch_compile_learner_config"), _FRAMEWORK),
        "total_train_batch_size": "jrl.plan.batch_plan(config.to_run_config()).rows",
    },
    "jrl": {
        **{n: f"from jrl.api import {n}, or {_run(n.lower())}" for n in _API},
        **{f"{n}Config": f"from jrl.api import {n}Config, or {_run(n.lower())}" for n in _API},
        **{n + end: _run(config) for n, config in _CONFIGS.items() for end in ("", "Config")},
        **{n: f"from jrl.api import {n}" for n in _FROM_API},
        **dict.fromkeys(("make", "make_vec", "make_vec_env", "VecEnv", "DummyVecEnv", "SubprocVecEnv"),
                        "jrl.envs.make(id, num_envs=8); a run makes its own, of env.id and env.num_envs"),
        **dict.fromkeys(("init", "shutdown"), "there is nothing to start: python -m jrl.train CONFIG, or jrl.api"),
    },
}  # fmt: skip


def missing(owner: Any, name: str, kind: str) -> AttributeError:
    """The error for an attribute that an object does not have, with what does it instead.

    Args:
      owner: the object, or the package.
      kind: which part of the table is for it.
    """
    if name.startswith("_"):
        return AttributeError(name)
    near = difflib.get_close_matches(name, [n for n in dir(owner) if not n.startswith("_")], 1, 0.75)
    mend = NAMES[kind].get(name) or (f"did you mean {near[0]}?" if near else "docs/api.md lists what there is")
    who = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__name__
    return AttributeError(f"{who} has no {name}: {mend}")


__all__ = ["NAMES", "missing"]
