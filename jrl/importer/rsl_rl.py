"""Checkpoints of rsl_rl (`OnPolicyRunner.save`, releases 2 to 5): PPO with MLPs, as a config and a State of jrl.

Releases 2 and 3 save `model_state_dict`, later releases save `actor_state_dict` and `critic_state_dict`. This module
renames their arrays to those of Stable-Baselines3's PPO, and `sb3` fills the State. Names of arrays:
`rsl_rl/modules/actor_critic.py` (2.x, 3.x), `rsl_rl/models/mlp_model.py` and `rsl_rl/modules/distribution.py` (4.x,
5.x) of https://github.com/leggedrobotics/rsl_rl. The file has neither the activation nor the hyper-parameters. Isaac
Lab writes them to `params/agent.yaml` beside the file.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.config import RunConfig
from jrl.errors import InputError, shown
from jrl.fields import schema
from jrl.importer import sb3, torch_file
from jrl.importer.sb3 import Model, Settings
from jrl.importer.vec_normalize import Moments, Statistics
from jrl.ops.normalize import MAX_COUNT
from jrl.types import Box, EnvSpec

KNOWN = "expected a model_N.pt of PPO with MLPs that OnPolicyRunner of rsl_rl 2.x to 5.x saved"
# rsl_rl's crelu is torch's CELU, which is ELU for its default alpha of 1; its GELU is not the function of jrl
_ACTIVATIONS = {"elu": "elu", "crelu": "elu", "relu": "relu", "tanh": "tanh", "swish": "silu"}
# defaults of rsl_rl's PPO since release 3
_DEFAULTS = {
    "num_learning_epochs": 5, "num_mini_batches": 4, "clip_param": 0.2, "gamma": 0.99, "lam": 0.95,
    "value_loss_coef": 1.0, "entropy_coef": 0.01, "max_grad_norm": 1.0, "use_clipped_value_loss": True,
}  # fmt: skip
_STEPS_PER_ITERATION = 24  # as in Isaac Lab's and legged_gym's tasks; rsl_rl has no default
_EPS = 0.01  # added to the deviation by rsl_rl's EmpiricalNormalization
_LAYER = r"(actor|critic)\.(\d+)\.(weight|bias)"
_NORMALIZER = r"(actor|critic)_obs_normalizer\.(.+)"
# prefixes of names in releases 4 and 5 -> prefixes in release 3
_RENAMED = {
    "actor.mlp.": "actor.", "actor.obs_normalizer.": "actor_obs_normalizer.",
    "actor.std": "std", "actor.log_std": "log_std",
    "actor.distribution.std_param": "std", "actor.distribution.log_std_param": "log_std",
    "critic.mlp.": "critic.", "critic.obs_normalizer.": "critic_obs_normalizer.",
}  # fmt: skip


def read(path: Path) -> tuple[Model, Statistics | None]:
    """Reads a checkpoint.

    Returns:
      The model with the names of Stable-Baselines3's arrays, and the statistics of observations; None: they are not
      normalised.
    Raises:
      InputError: the file is damaged, or another policy or program has made it.
    """
    try:
        tree = torch_file.read_tensors(path.read_bytes())
    except (torch_file.RefusedFile, OSError) as e:
        raise InputError(f"{path}: {KNOWN}, got another file ({shown(str(e), 200)}): give such a file") from e
    with sb3.report_values(path, KNOWN):
        return _model(path, tree)


def settings(model: Model, statistics: Statistics | None, overrides: Sequence[str]) -> Settings:
    """Returns the config that continues a model's training.

    Args:
      overrides: texts such as "network.activation=elu", which the config gets later.
    Raises:
      InputError: the activation is unknown.
    """
    agent, notes = model.data["agent"], list[str]()
    algorithm = {**_DEFAULTS, **(agent.get("algorithm") or {})}
    if not agent:
        notes.append("the file has no hyper-parameters: rsl_rl's defaults, with rollout.length=24")
    lr = sb3.optimizer_options(model).get("lr", algorithm.get("learning_rate", 1e-3))
    layers = lambda name: [model.weights[f"{x}.weight"].shape[0] for x in sb3.sequence(model, f"mlp_extractor.{name}")]
    network = {"hidden": layers("policy_net"), "critic_hidden": layers("value_net")}
    algo = {
        "name": "ppo",
        "lr": lr,
        "gamma": algorithm["gamma"],
        "gae_lambda": algorithm["lam"],
        "clip_eps": algorithm["clip_param"],
        "num_epochs": algorithm["num_learning_epochs"],
        "num_minibatches": algorithm["num_mini_batches"],
        "ent_coef": algorithm["entropy_coef"],
        "max_grad_norm": algorithm["max_grad_norm"],
        "vf_coef": 2 * algorithm["value_loss_coef"],  # the value's loss of jrl has a factor 1/2
        "value_clip_eps": algorithm["clip_param"] if algorithm["use_clipped_value_loss"] else None,
        "normalize_obs": statistics is not None,
    }
    if algorithm.get("schedule", "adaptive") == "adaptive":
        notes.append(f"jrl has no schedule by the KL: algo.lr={lr:g}, the last step size")
    if model.data["has_rnd"]:
        notes.append("the networks of RND are not taken")
    if not _is_set("env.num_envs", overrides):
        notes.append(
            "the file has no number of environments, so steps are counted for the default: --set env.num_envs=N"
        )
    return Settings(
        {
            "algo": algo,
            "network": network | _activation(model, overrides),
            "env": {"normalize_actions": False, "clip_actions": True},
            "rollout": {"length": agent.get("num_steps_per_env", _STEPS_PER_ITERATION)},
            "stop": {"env_steps": 1},
        },
        notes,
    )


def count_steps(model: Model, cfg: RunConfig) -> tuple[Model, RunConfig]:
    """Returns model and config with the number of steps, from rsl_rl's iterations and the config's environments."""
    steps = model.data["iterations"] * cfg.rollout.length * cfg.env.num_envs
    data = {**model.data, "num_timesteps": steps, "_n_updates": model.data["iterations"]}
    stop = {**cfg.stop, "env_steps": max(steps, cfg.stop["env_steps"])}
    return model._replace(data=data), dataclasses.replace(cfg, stop=stop)


def check_spaces(model: Model, spec: EnvSpec) -> None:
    """Raises InputError: the environment's spaces differ from the model's, or are not one array of floats."""
    for kind, space in (("observations", spec.observation), ("actions", spec.env_action or spec.action)):
        size = model.data[kind]
        if not isinstance(space, Box) or space.shape != (size,):
            raise InputError(f"--env: expected {kind} of [{size}], as {model.path} has, got {space}: name the "
                             "environment of the training, with its options by --set")  # fmt: skip


def fill(model: Model, state: Any, spec: EnvSpec, statistics: Statistics | None) -> tuple[Any, list[str]]:
    """Returns an initial State with a model's weights, moments, statistics and counters, and notes.

    Raises:
      InputError: an array has another shape than the network's.
    """
    notes = []
    if not model.data["has_same_inputs"]:
        notes.append("the critic reads other observations than the actor: it begins anew")
        names = sb3.sequence(model, "mlp_extractor.value_net")
        layers = {name: state.params["value_torso"][f"Dense_{i}"] for i, name in enumerate(names)}
        layers["value_net"] = state.params["value_head"]
        weights = dict(model.weights)
        for name, layer in layers.items():
            weights |= {f"{name}.weight": np.asarray(layer["kernel"]).T, f"{name}.bias": np.asarray(layer["bias"])}
        model = model._replace(weights=weights, optimizers={})
    state, more = sb3.fill(model, state, spec, statistics)
    return state, [*notes, *more]


def _is_set(key: str, overrides: Sequence[str]) -> bool:
    return any(text.startswith(f"{key}=") for text in overrides)


def _activation(model: Model, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the activation of `params/agent.yaml`; {}: an override has it. Raises InputError: neither has it."""
    if _is_set("network.activation", overrides):
        return {}
    sections = (model.data["agent"].get(name) for name in ("policy", "actor", "critic"))
    found = sorted({str(section["activation"]) for section in sections if section and "activation" in section})
    if len(found) == 1 and found[0] in _ACTIVATIONS:
        return {"activation": _ACTIVATIONS[found[0]]}
    file = agent_file(model.path)
    if not found:
        raise InputError(f"{model.path}: expected the activation in {file}, got none: give --set "
                         "network.activation=elu, rsl_rl's default, or the activation of the training")  # fmt: skip
    raise InputError(f"{file}: activation: expected {', '.join(_ACTIVATIONS)}, the same for actor and critic, got "
                     f"{shown(', '.join(found))}: jrl has no equivalent: train it here")  # fmt: skip


# ---------------------------------------------------------------- the file


def agent_file(path: Path) -> Path:
    """Returns the path of the config that Isaac Lab writes beside a checkpoint."""
    return path.parent / "params" / "agent.yaml"


def _model(path: Path, tree: Any) -> tuple[Model, Statistics | None]:
    arrays = _arrays(tree)
    if arrays is None or type(tree.get("iter")) is not int:
        raise InputError(f"{path}: {KNOWN}, got another tree: give such a file")
    for name, x in arrays.items():
        match = re.fullmatch(_LAYER, name)
        is_known = match and x.ndim == (2 if match[3] == "weight" else 1)
        if not (is_known or re.fullmatch(_NORMALIZER, name) or name in ("std", "log_std")):
            raise InputError(f"{path}: {KNOWN}, got an array {shown(name)}: recurrent, convolutional and distilled "
                             "policies are not read: train it here")  # fmt: skip
    if ("std" in arrays) == ("log_std" in arrays):
        raise InputError(f"{path}: expected a Gaussian with one deviation per action, got another distribution: "
                         "state-dependent deviations and Beta are not read: train it here")  # fmt: skip
    names = {part: _layers(arrays, part) for part in ("actor", "critic")}
    for part, found in names.items():
        if len(found) < 2 or any(f"{name}.bias" not in arrays for name in found):
            raise InputError(f"{path}: {KNOWN}, got no hidden layer of the {part}: give such a file")
    moments = {part: _moments(arrays, part) for part in names}
    inputs = {part: arrays[f"{found[0]}.weight"].shape[1] for part, found in names.items()}
    has_same_inputs = inputs["actor"] == inputs["critic"] and _is_same(moments["actor"], moments["critic"])
    data = {
        "iterations": max(tree["iter"], 0),
        "observations": inputs["actor"],
        "actions": arrays[f"{names['actor'][-1]}.weight"].shape[0],
        "has_same_inputs": has_same_inputs,
        "has_rnd": "rnd_state_dict" in tree,
        "agent": _agent(path),
    }
    weights, optimizer = _as_sb3(arrays, names, tree.get("optimizer_state_dict"))
    statistics = moments["actor"] and Statistics(moments["actor"], None, 10.0)
    return Model(path, "ppo", data, weights, {}, {"policy": optimizer}), statistics


def _agent(path: Path) -> dict[str, Any]:
    """Returns the content of `params/agent.yaml`; {} without the file. Raises InputError: it is not plain YAML."""
    file = agent_file(path)
    try:
        return schema.read_yaml(file) if file.is_file() else {}
    except InputError as e:
        raise InputError(f"{e}: remove what is not plain YAML, or move the file away and give --set "
                         "network.activation=elu") from e  # fmt: skip


def _arrays(tree: Any) -> dict[str, np.ndarray] | None:
    """Returns all arrays by their names in release 3, in the order of torch's parameters; None: another tree."""
    if not isinstance(tree, dict):
        return None
    found = dict(tree.get("model_state_dict") or {})
    for part in ("actor", "critic"):
        for name, x in (tree.get(f"{part}_state_dict") or {}).items():
            name = f"{part}.{name}"
            prefix = max((p for p in _RENAMED if name.startswith(p)), key=len, default="")
            found[_RENAMED.get(prefix, "") + name.removeprefix(prefix)] = x
    actor, critic = (tree.get(f"{name}obs_norm_state_dict") or {} for name in ("", "privileged_"))  # release 2
    critic = tree.get("critic_obs_norm_state_dict") or critic
    if "_mean" in critic and not critic["_mean"].any():  # unused: both networks read what the actor's has normalised
        critic = actor
    found |= {f"actor_obs_normalizer.{name}": x for name, x in actor.items()}
    found |= {f"critic_obs_normalizer.{name}": x for name, x in critic.items()}
    return found if found and all(isinstance(x, np.ndarray) for x in found.values()) else None


def _layers(arrays: Mapping[str, np.ndarray], part: str) -> list[str]:
    """Returns the names of the dense layers of a part, in their order."""
    found = {match[2] for match in (re.fullmatch(_LAYER, name) for name in arrays) if match and match[1] == part}
    return [f"{part}.{i}" for i in sorted(found, key=int)]


def _moments(arrays: Mapping[str, np.ndarray], part: str) -> Moments | None:
    """Returns statistics with which jrl normalises as rsl_rl does; None: observations are not normalised.

    rsl_rl divides by std + 0.01, jrl by sqrt(var + 1e-8): the variance gets the difference.
    """
    get = lambda name: arrays[f"{part}_obs_normalizer.{name}"]
    if f"{part}_obs_normalizer._mean" not in arrays:
        return None
    count = arrays.get(f"{part}_obs_normalizer.count", np.asarray(MAX_COUNT))  # release 2.0 does not save it
    mean, std = (np.asarray(get(name)[0], np.float64) for name in ("_mean", "_std"))
    return Moments(mean, np.square(std + _EPS) - 1e-8, max(float(count), 1.0))


def _is_same(a: Moments | None, b: Moments | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a.mean, b.mean) and np.array_equal(a.var, b.var)


def _as_sb3(
    arrays: Mapping[str, np.ndarray], names: Mapping[str, list[str]], optimizer: Any
) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the weights by the names of Stable-Baselines3, and the optimizer's state for them.

    A deviation `std` becomes `log_std`; its gradient is that of `std` times `std`, and so are Adam's moments.
    """
    renamed = {"std": "log_std", "log_std": "log_std"}
    for part, torso, head in (("actor", "policy_net", "action_net"), ("critic", "value_net", "value_net")):
        for i, name in enumerate(names[part]):
            renamed[name] = head if name == names[part][-1] else f"mlp_extractor.{torso}.{i}"
    weights = dict[str, np.ndarray]()
    for name, x in arrays.items():
        layer, dot, kind = name.rpartition(".")
        if name in renamed or layer in renamed:
            weights[renamed[layer] + dot + kind if dot else renamed[name]] = x
    if "std" not in arrays:
        return weights, optimizer
    std = np.maximum(arrays["std"], 1e-6)
    weights["log_std"] = np.log(std)
    index = list(weights).index("log_std")  # as torch counts parameters
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    if isinstance(states, dict) and isinstance(entry := states.get(index), dict) and "exp_avg_sq" in entry:
        moved = {**entry, "exp_avg": entry["exp_avg"] * std, "exp_avg_sq": entry["exp_avg_sq"] * std**2}
        optimizer = {**optimizer, "state": {**states, index: moved}}
    return weights, optimizer
