"""Names of classes and methods of RLlib and Stable-Baselines3 that jrl does not have, and what to use instead.

Imports the standard library alone: `import jrl` reads it for unknown names.
"""

import difflib
import importlib.util
import inspect
import types
from typing import Any

_LEARNER = "the learner is a program of this process; its devices are learners(learners=[...])"
_MODULE = "a network of your own is training(model={'torso': ...}): docs/networks.md"
_OTHER_LOSS = "a loss of your own is training(loss_fn=fn), or a static method `loss` of an Algorithm"
_OUTPUTS = "distribution(obs), value_function(obs) and q_values(obs) are what its networks say, summary() what they are"
_STATE = "save(path) writes all of it and restore(path) takes it back; get_weights() and set_weights() are the arrays"
_STEP = "train() is one iteration; what it does is a method training_step(self, step) of a subclass"
# kinds of objects, names that they do not have, what to use
_HINTS = [
    ("api jrl", "A3C A3CConfig", "python -m jrl.train configs/a2c.yaml"),
    ("api jrl", "DDPG DDPGConfig", "python -m jrl.train configs/ddpg.yaml"),
    ("api jrl", "DDPPO DDPPOConfig", "python -m jrl.train configs/ppo.yaml"),
    ("api jrl", "R2D2 R2D2Config", "python -m jrl.train configs/r2d2.yaml"),
    ("api jrl", "Rainbow RainbowConfig", "python -m jrl.train configs/rainbow.yaml"),
    ("api jrl", "RecurrentPPO", "python -m jrl.train configs/ppo_lstm.yaml"),
    ("api jrl", "SimpleQ SimpleQConfig", "python -m jrl.train configs/dqn.yaml"),
    ("api jrl", "CRR CRRConfig", "MARWIL with weight='binary' has its filter, over returns, and IQL its critic"),
    ("api jrl", "CrossQ HerReplayBuffer TQC", "docs/from-sb3.md says what is the nearest"),
    (
        "api jrl",
        "JsonReader JsonWriter OfflineData",
        "jrl.data.read(path) gives the episodes of any of its formats, jrl.data.Writer writes some: docs/data.md",
    ),
    ("api jrl", "MultiAgentEnv", "environments of several agents are not made by inheritance: docs/environments.md"),
    ("api jrl", "RLModule TorchModelV2 ModelCatalog", _MODULE),
    (
        "api jrl",
        "ExternalEnv PolicyServerInput PolicyClient",
        "python -m jrl.serve CONFIG; its clients use jrl.serve.client.PolicyClient",
    ),
    ("api", "Policy", "get_policy() of an Algorithm, or jrl.load(path)"),
    ("api", "SampleBatch", "sample() of workers.local_worker() gives a Rollout, sample_replay() a Batch"),
    ("jrl", "make make_vec_env", "jrl.envs.make(id, num_envs=8); a run makes its own, of env.id and env.num_envs"),
    ("jrl", "evaluate_policy", "python -m jrl.evaluate RUN --episodes 20, or evaluate(20) of an Algorithm"),
    ("jrl", "VecNormalize", "algo.normalize_obs=true and algo.normalize_reward=true"),
    ("jrl", "init shutdown", "there is nothing to start: python -m jrl.train CONFIG, or jrl.api"),
    ("algorithm", "get_module rl_module", "get_policy() shows what its networks say"),
    ("algorithm", "get_state set_state", _STATE),
    ("algorithm", "setup step step_attempt execution_plan", _STEP),
    ("algorithm", "learner_group optimizer", _LEARNER),
    ("algorithm", "local_replay_buffer replay_buffer", "sample_replay() draws a batch of it"),
    ("algorithm", "env_runner", "workers.local_worker(), or workers.foreach_worker(func)"),
    ("algorithm", "evaluate_offline", "offline_data(validation=0.1) holds episodes out, whose loss each result has"),
    ("algorithm", "get_default_policy_class", _OTHER_LOSS),
    ("algorithm", "validate_env", "python -m jrl.check_env ID, jrl.check_env(...)"),
    ("algorithm", "with_common_config with_updates", "a subclass, and get_default_config().update_from_dict(...)"),
    (
        "algorithm",
        "default_resource_request resource_help",
        "what a trial reserves is jrl.api.tune.resources(config.to_run_config())",
    ),
    ("algorithm", "import_model import_policy_model_from_h5", "import_weights(path) of npz or safetensors"),
    ("algorithm", "learn", "train() is one iteration: call it until its result says what you want"),
    ("algorithm", "load", "Algorithm.from_checkpoint(path), or jrl.load(path) to act only"),
    ("algorithm", "predict", "get_policy().predict(obs), or compute_single_action(obs)"),
    ("algorithm", "env get_env", "workers.foreach_env(func) calls func(env) where the environments are"),
    ("policy", "model forward_inference forward_exploration", _OUTPUTS),
    ("policy", "loss", _OTHER_LOSS),
    ("policy", "optimizer", "learn_on_batch(samples) is an update, compute_gradients and apply_gradients its halves"),
    ("policy", "export_model", "Algorithm.export_policy_model(directory), or python -m jrl.export"),
    ("policy", "export_checkpoint from_checkpoint save", "Algorithm.save(path), and jrl.load(path) to act only"),
    ("policy", "postprocess_trajectory", "training(learner_connector=[fn]), a pure function of the rollout"),
    ("policy", "on_global_var_update", "schedules read env_steps, which acting has"),
    ("policy", "get_session device", "JAX is the only framework"),
    ("config", "get_state serialize", "to_dict() and to_yaml() hold all of it"),
    ("config", "from_state", "from_dict(tree), or from_yaml(path)"),
    ("config", "pop", "a config has all keys: set one to its default"),
    ("config", "get_default_rl_module_spec get_rl_module_spec", _MODULE),
    ("config", "build_learner build_learner_group", _LEARNER),
    ("config", "is_offline", "jrl.config.datasets.alone(config.to_run_config())"),
]
_ALGORITHMS = "A2C APEX APPO ApexDQN BC CQL DQN DT IMPALA IQL IQN Impala MARWIL PPO PQN SAC TD3 VDN"
_NAMES = (
    "Algorithm AlgorithmConfig Callbacks DefaultCallbacks EnvContext Episode MemoryTrackingCallbacks PolicySpec "
    "TaskSettableEnv concat_samples in_program make_multi_callbacks register_env tune"
)
# kind of object -> name that it does not have -> what to use
HINTS: dict[str, dict[str, str]] = {
    kind: {n: hint for kinds, names, hint in _HINTS if kind in kinds.split() for n in names.split()}
    for kind in ("api", "jrl", "algorithm", "policy", "config")
}
_names = [*_NAMES.split(), *(name + end for name in _ALGORITHMS.split() for end in ("", "Config"))]
HINTS["jrl"] |= {name: f"from jrl.api import {name}" for name in _names}


def missing(owner: Any, name: str, kind: str) -> AttributeError | ImportError:
    """Return the error for an attribute that an object or a package does not have, with what to use instead.

    `from package import name` hides the text of an AttributeError, so the import statement gets an ImportError.

    Args:
      owner: the object, or the package.
      kind: the part of HINTS.
    """
    if name.startswith("_"):
        return AttributeError(name)
    near = difflib.get_close_matches(name, [n for n in dir(owner) if not n.startswith("_")], 1, 0.75)
    fix = HINTS[kind].get(name) or (f"did you mean {near[0]}?" if near else "docs/api.md lists what there is")
    package = owner.__name__ if isinstance(owner, types.ModuleType) else None
    message = f"{package or type(owner).__name__} has no {name}: {fix}"
    return ImportError(message, name=package) if package and _fails_import(package, name) else AttributeError(message)


def _fails_import(package: str, name: str) -> bool:
    """Return whether an import statement asks for a name. It tries the attribute first, and then a submodule."""
    callers = inspect.stack(0)[2:5]
    by_import = any(frame.filename.startswith("<frozen importlib") for frame in callers)
    return by_import and importlib.util.find_spec(f"{package}.{name}") is None
