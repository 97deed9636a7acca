"""Hints for names of RLlib and Stable-Baselines3 that jrl does not have.

Imports only the standard library: attributes that `jrl` lacks are looked up here.
"""

import difflib
import importlib.util
import inspect
import types
from typing import Any

_LEARNER = "the learner is a program of this process; its devices are learners(learners=[...])"
_MODULE = "a network of your own is training(model={'torso': ...}): docs/networks.md"
_OTHER_LOSS = "a loss of your own is training(loss_fn=fn), or a static method `loss` of an Algorithm"
_OUTPUTS = "distribution(obs), value_function(obs) and q_values(obs) are outputs of the networks, summary() lists them"
_STATE = "save(path) writes the state, restore(path) reads it; get_weights() and set_weights() are the arrays"
_STEP = "train() is one iteration; a subclass can replace its steps by a method training_step(self, step)"
# kinds of objects, missing names, hint
_HINTS = [
    ("api jrl", "A3C A3CConfig", "python -m jrl.train configs/a2c.yaml"),
    ("api jrl", "DDPG DDPGConfig", "python -m jrl.train configs/ddpg.yaml"),
    ("api jrl", "DDPPO DDPPOConfig", "python -m jrl.train configs/ppo.yaml"),
    ("api jrl", "R2D2 R2D2Config", "python -m jrl.train configs/r2d2.yaml"),
    ("api jrl", "Rainbow RainbowConfig", "python -m jrl.train configs/rainbow.yaml"),
    ("api jrl", "RecurrentPPO", "python -m jrl.train configs/ppo_lstm.yaml"),
    ("api jrl", "SimpleQ SimpleQConfig", "python -m jrl.train configs/dqn.yaml"),
    ("api jrl", "CRR CRRConfig", "MARWIL with weight='binary' has its filter, over returns, and IQL its critic"),
    ("api jrl", "CrossQ HerReplayBuffer", "docs/from-sb3.md has the nearest algorithm"),
    ("api jrl", "JsonReader JsonWriter OfflineData", "jrl.data.read(path) and jrl.data.Writer: docs/data.md"),
    ("api jrl", "MultiAgentEnv", "environments of several agents are not made by inheritance: docs/environments.md"),
    ("api jrl", "RLModule TorchModelV2 ModelCatalog", _MODULE),
    ("api jrl", "ExternalEnv PolicyServerInput PolicyClient", "python -m jrl.serve, jrl.serve.client.PolicyClient"),
    ("api", "Policy", "get_policy() of an Algorithm, or jrl.load(path)"),
    ("api", "SampleBatch", "sample() of workers.local_worker() gives a Rollout, sample_replay() a Batch"),
    ("jrl", "make make_vec_env", "jrl.envs.make(id, num_envs=8); a run makes its own, of env.id and env.num_envs"),
    ("jrl", "evaluate_policy", "python -m jrl.evaluate RUN --episodes 20, or evaluate(20) of an Algorithm"),
    ("jrl", "VecNormalize", "algo.normalize_obs=true and algo.normalize_reward=true"),
    ("jrl", "init shutdown", "nothing needs a start: python -m jrl.train CONFIG, or jrl.api"),
    ("algorithm", "get_module rl_module", "get_policy() has the outputs of its networks"),
    ("algorithm", "get_state set_state", _STATE),
    ("algorithm", "setup step step_attempt execution_plan", _STEP),
    ("algorithm", "learner_group optimizer", _LEARNER),
    ("algorithm", "local_replay_buffer replay_buffer", "sample_replay() draws a batch"),
    ("algorithm", "env_runner", "workers.local_worker(), or workers.foreach_worker(func)"),
    ("algorithm", "evaluate_offline", "offline_data(validation=0.1) holds episodes out; each result has their loss"),
    ("algorithm", "get_default_policy_class", _OTHER_LOSS),
    ("algorithm", "validate_env", "python -m jrl.check_env ID, jrl.check_env(...)"),
    ("algorithm", "with_common_config with_updates", "a subclass, and get_default_config().update_from_dict(...)"),
    ("algorithm", "default_resource_request resource_help", "jrl.api.tune.resources(config.to_run_config())"),
    ("algorithm", "import_model import_policy_model_from_h5", "import_weights(path) of npz or safetensors"),
    ("algorithm", "learn", "train() is one iteration: call it in a loop"),
    ("algorithm", "load", "Algorithm.from_checkpoint(path), or jrl.load(path) to act only"),
    ("algorithm", "predict", "get_policy().predict(obs), or compute_single_action(obs)"),
    ("algorithm", "env get_env", "workers.foreach_env(func) calls func(env) in the process of each environment"),
    ("policy", "model forward_inference forward_exploration", _OUTPUTS),
    ("policy", "loss", _OTHER_LOSS),
    ("policy", "optimizer", "learn_on_batch(samples) is an update, compute_gradients and apply_gradients its halves"),
    ("policy", "export_model", "Algorithm.export_policy_model(directory), or python -m jrl.export"),
    ("policy", "export_checkpoint from_checkpoint save", "Algorithm.save(path), and jrl.load(path) to act only"),
    ("policy", "postprocess_trajectory", "training(learner_connector=[fn]), a pure function of the rollout"),
    ("policy", "on_global_var_update", "schedules read env_steps by themselves"),
    ("policy", "get_session device", "JAX is the only framework"),
    ("config", "get_state serialize", "to_dict() and to_yaml() have all settings"),
    ("config", "from_state", "from_dict(tree), or from_yaml(path)"),
    ("config", "pop", "a config has all keys: set one to its default"),
    ("config", "get_default_rl_module_spec get_rl_module_spec", _MODULE),
    ("config", "build_learner build_learner_group", _LEARNER),
    ("config", "is_offline", "jrl.config.datasets.alone(config.to_run_config())"),
]
# kind of object -> missing name -> hint
HINTS: dict[str, dict[str, str]] = {
    kind: {n: hint for kinds, names, hint in _HINTS if kind in kinds.split() for n in names.split()}
    for kind in ("api", "jrl", "algorithm", "policy", "config")
}


def build_error(owner: Any, name: str, kind: str) -> AttributeError | ImportError:
    """Returns the error of a missing attribute, with a hint.

    `from package import name` hides the text of an AttributeError, so the import statement gets an ImportError.

    Args:
      owner: object or package without the attribute.
      name: name of the attribute.
      kind: kind of object in HINTS.
    """
    if name.startswith("_"):
        return AttributeError(name)
    near = difflib.get_close_matches(name, [n for n in dir(owner) if not n.startswith("_")], 1, 0.75)
    otherwise = f"did you mean {near[0]}?" if near else "docs/api.md lists all names"
    fix = HINTS[kind].get(name) or (f"from jrl.api import {name}" if kind == "jrl" else otherwise)
    package = owner.__name__ if isinstance(owner, types.ModuleType) else None
    message = f"{package or type(owner).__name__} has no {name}: {fix}"
    return ImportError(message, name=package) if package and _is_import(package, name) else AttributeError(message)


def _is_import(package: str, name: str) -> bool:
    """Returns whether an import statement reads the name: it tries the attribute first, and then a submodule."""
    callers = inspect.stack(0)[2:5]
    by_import = any(frame.filename.startswith("<frozen importlib") for frame in callers)
    return by_import and importlib.util.find_spec(f"{package}.{name}") is None
