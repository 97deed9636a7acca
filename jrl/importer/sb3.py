"""Models of Stable-Baselines3 (`model.save`): PPO, A2C, DQN, SAC, TD3 and DDPG, as a config and a State of jrl.

A `model.zip` has the JSON file `data`, the weights `policy.pth`, and the optimizers' states. Values that JSON cannot
express are pickled inside `data`, beside a text. This reader never unpickles them: it takes sizes from the weights, and
a few numbers from the texts. Names of arrays: `stable_baselines3/common/policies.py`, and `policies.py` of the
algorithms. Torch's dense kernels are [out, in], those of convolutions [out, in, height, width]; the kernels of jrl are
[in, out] and [height, width, in, out].
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.errors import InputError, shown
from jrl.importer import torch_file
from jrl.importer.torch_file import RefusedFile
from jrl.importer.vec_normalize import Moments, Statistics
from jrl.ops.normalize import MAX_COUNT, RunningStats
from jrl.types import Box, Discrete, EnvSpec, MultiDiscrete, PyTree, Space

# module of the policy's class -> algorithm; None: the keys of `data` decide
_POLICIES = {
    "stable_baselines3.common.policies": None,
    "stable_baselines3.dqn.policies": "dqn",
    "stable_baselines3.sac.policies": "sac",
    "stable_baselines3.td3.policies": "td3",
}
_ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "SiLU": "silu", "ELU": "elu"}
_TRAIN_FREQ = {"dqn": 4, "sac": 1, "td3": 1}  # Stable-Baselines3's defaults
_CNN = "cnn.0.weight"
KNOWN = "expected a model.zip of PPO, A2C, DQN, SAC, TD3 or DDPG that Stable-Baselines3 2.x saved"


class Optimizer(NamedTuple):
    """State of an optimizer of torch."""

    first: dict[str, np.ndarray]  # name of a weight -> mean of gradients; {} for RMSprop
    second: dict[str, np.ndarray]  # name of a weight -> mean of squared gradients
    steps: int
    group: dict[str, Any]  # options, such as lr, betas and eps


class Model(NamedTuple):
    """Content of a model.zip."""

    path: Path
    algo: str  # name of the algorithm in jrl
    data: dict[str, Any]  # JSON of `data`
    weights: dict[str, np.ndarray]  # policy.pth
    variables: dict[str, np.ndarray]  # pytorch_variables.pth
    optimizers: dict[str, Any]  # part, such as "policy" or "actor" -> tree of its .pth


Get = Callable[[str], np.ndarray]  # name of an array -> the array


def read(path: Path) -> Model:
    """Reads a model.zip.

    Raises:
      InputError: the file is damaged, or another algorithm, policy or program has made it.
    """
    try:
        with torch_file.open_archive(path) as archive:
            names = archive.namelist()
            if "data" not in names or "policy.pth" not in names:
                raise RefusedFile("it has no data and policy.pth")
            data = json.loads(archive.read("data"))
            parts = {name.removesuffix(".pth"): archive.read(name) for name in names if name.endswith(".pth")}
    except torch_file.DAMAGE as e:
        why = shown(str(e) or type(e).__name__, 200)
        raise InputError(f"{path}: {KNOWN}, got another file ({why}): give such a file") from e
    if not isinstance(data, dict):
        raise InputError(f"{path}: {KNOWN}, got other data: give such a file")
    algo = _algorithm(path, data)
    trees = {}
    for name, content in parts.items():
        try:
            trees[name] = torch_file.read_tensors(content)
        except RefusedFile as e:
            raise InputError(f"{path}: {name}.pth: {e}: save the model again with torch 1.6 or later") from e
    weights, variables = trees.pop("policy"), trees.pop("pytorch_variables", None) or {}
    if not isinstance(weights, dict) or not all(isinstance(x, np.ndarray) for x in weights.values()):
        raise InputError(f"{path}: policy.pth: expected named arrays, got another tree: {KNOWN}")
    optimizers = {name.removesuffix("optimizer").rstrip("._"): tree for name, tree in trees.items()}
    return Model(path, algo, data, weights, variables, optimizers)


@contextlib.contextmanager
def report_values(path: Path, known: str = KNOWN) -> Iterator[None]:
    """Raises InputError instead of errors that values of another type or rank cause in the block."""
    try:
        yield
    except InputError:
        raise
    except torch_file.DAMAGE as e:
        why = shown(f"{type(e).__name__}: {e}", 200)
        raise InputError(f"{path}: {known}, got values of other types ({why}): give such a file") from e


def _algorithm(path: Path, data: Mapping[str, Any]) -> str:
    """Returns the algorithm's name in jrl. Raises InputError: another algorithm or policy class."""
    policy = data.get("policy_class")
    module = policy.get("__module__") if isinstance(policy, dict) else None
    if module not in _POLICIES:
        fix = "train it here: docs/from-sb3.md lists jrl's equivalents"
        raise InputError(f"{path}: {KNOWN}, with its own policies, got a policy of {shown(str(module))}: {fix}")
    if data.get("use_sde"):
        raise InputError(f"{path}: expected use_sde=False, got True: jrl has no state-dependent exploration: train "
                         "without it")  # fmt: skip
    if _POLICIES[module]:
        return str(_POLICIES[module])
    if "clip_range" in data:
        return "ppo"
    if "gae_lambda" in data and "cg_max_steps" not in data:
        return "a2c"
    raise InputError(f"{path}: {KNOWN}, got another algorithm with ActorCriticPolicy: train it here")


# ---------------------------------------------------------------- the config


class Settings(NamedTuple):
    """A config of jrl as plain data, and notes on values that the file does not tell."""

    config: dict[str, Any]
    notes: list[str]


def settings(model: Model, statistics: Statistics | None) -> Settings:
    """Returns the config that continues a model's training.

    Raises:
      InputError: an option of the policy that jrl does not have.
    """
    data, notes = model.data, list[str]()
    steps = max(int(data.get("num_timesteps") or 0), 1)
    is_continuous = model.algo in ("sac", "td3")
    config: dict[str, Any] = {
        "algo": {"name": model.algo, **_hyperparameters(model, notes)},
        "network": _network(model),
        "env": {"num_envs": _count(data, "n_envs", 1), "normalize_actions": is_continuous, "clip_actions": True},
        "stop": {"env_steps": max(int(data.get("_total_timesteps") or 0), steps)},
    }
    if model.algo in ("ppo", "a2c"):
        config["rollout"] = {"length": _count(data, "n_steps", 2048 if model.algo == "ppo" else 5)}
    else:
        config["replay"] = _replay(model, notes)
        config["checkpoint"] = {"replay": "none"}  # the file has no replay
        config["stop"]["env_steps"] = max(config["stop"]["env_steps"], config["replay"]["learning_starts"] + 1)
    if statistics is not None:
        config["algo"]["normalize_obs"] = statistics.obs is not None
        if statistics.returns is not None:
            config["algo"] |= {"normalize_reward": True, "normalize_reward_clip": statistics.clip_reward}
    return Settings(config, notes)


def _count(data: Mapping[str, Any], key: str, default: int) -> int:
    value = data.get(key)
    return value if type(value) is int and value > 0 else default


def _number(data: Mapping[str, Any], key: str, default: float, notes: list[str], name: str) -> Any:
    """Returns a number or a schedule of jrl, from JSON or the text of a schedule; else `default`, with a note."""
    value = data.get(key)
    if type(value) in (int, float):
        return value
    text = value.get("value_schedule") if isinstance(value, dict) else None
    numbers = [float(x) for x in re.findall(r"=([-+.\de]+)", text if isinstance(text, str) else "")]
    match str(text).partition("(")[0], numbers:
        case "ConstantSchedule", [number]:
            return number
        case "LinearSchedule", [start, end, fraction]:
            return [[0, start], [fraction, end]]
    notes.append(f"{key} cannot be read: {name}={default:g}")
    return default


def _hyperparameters(model: Model, notes: list[str]) -> dict[str, Any]:
    """Returns the section `algo`."""
    data, group = model.data, optimizer_options(model)
    number = lambda key, default, name: _number(data, key, default, notes, name)
    found: dict[str, Any] = {"gamma": data.get("gamma", 0.99)}
    found["lr"] = number("learning_rate", group.get("lr", 3e-4), "algo.lr")
    if isinstance(group.get("eps"), float) and not _is_rmsprop(model):
        found["adam_eps"] = group["eps"]
    if _is_rmsprop(model):
        # torch adds eps to the root of the mean square, jrl adds it to the mean square, as RMSpropTFLike does
        eps = group["eps"] if "RMSpropTFLike" in _optimizer_class(model) else group["eps"] ** 2
        found["optimizer"] = {"name": "rmsprop", "decay": group["alpha"], "eps": eps}
    elif group.get("weight_decay"):
        notes.append("weight_decay is not taken: set algo.optimizer={name: adamw, weight_decay: ...}")
    if model.algo in ("ppo", "a2c"):
        # the value's loss of jrl has a factor 1/2
        found["vf_coef"] = 2 * data.get("vf_coef", 0.5)
        found |= {key: data[key] for key in ("gae_lambda", "ent_coef", "max_grad_norm", "normalize_advantage")
                  if key in data}  # fmt: skip
    if model.algo == "ppo":
        rows = _count(data, "n_steps", 2048) * _count(data, "n_envs", 1)
        minibatches = max(1, round(rows / _count(data, "batch_size", 64)))
        while rows % minibatches:
            minibatches -= 1
        found |= {"num_epochs": _count(data, "n_epochs", 10), "num_minibatches": minibatches}
        if data.get("normalize_advantage", True):
            found["normalize_advantage"] = "minibatch"  # true is once per rollout
        found["clip_eps"] = number("clip_range", 0.2, "algo.clip_eps")
        if data.get("clip_range_vf") is not None:
            found["value_clip_eps"] = number("clip_range_vf", 0.2, "algo.value_clip_eps")
        found["target_kl"] = data.get("target_kl")
    if model.algo == "dqn":
        first, last = data.get("exploration_initial_eps", 1.0), data.get("exploration_final_eps", 0.05)
        schedule = [[0, first], [float(data.get("exploration_fraction", 0.1)), last]]
        found["exploration"] = {"name": "epsilon_greedy", "epsilon": schedule}
        found |= {"tau": data.get("tau", 1.0), "max_grad_norm": data.get("max_grad_norm", 10.0)}
        rate = _updates_per_step(model)
        interval = max(_count(data, "target_update_interval", 10_000), _TRAIN_FREQ["dqn"] * _count(data, "n_envs", 1))
        found["target_update_every"] = max(1, round(interval * rate))
    if model.algo in ("sac", "td3"):
        found |= {"tau": data.get("tau", 0.005), "num_critics": len(_critics(model))}
    if model.algo == "sac":
        found["learn_ent_coef"] = "log_ent_coef" in model.variables
        if type(data.get("target_entropy")) is float and found["learn_ent_coef"]:
            found["target_entropy"] = data["target_entropy"]
        if not found["learn_ent_coef"]:
            fixed = model.variables.get("ent_coef_tensor", data.get("ent_coef"))
            found["ent_coef"] = float(np.asarray(fixed, np.float32).reshape(()))
    if model.algo == "td3":
        found["policy_every"] = _count(data, "policy_delay", 2)
        found |= {"target_noise": data.get("target_policy_noise", 0.2)}
        found |= {"target_noise_clip": data.get("target_noise_clip", 0.5)}
        found["exploration"] = {"name": "gaussian", "std": _noise(data, notes)}
    return found


def _noise(data: Mapping[str, Any], notes: list[str]) -> float:
    """Returns the deviation of the actions' noise; 0 without noise."""
    noise = data.get("action_noise")
    if noise is None:
        return 0.0
    numbers = {float(x) for x in re.findall(r"[-+.\de]*\d[-+.\de]*", str(noise.get("_sigma", "")))}
    if "NormalActionNoise" in str(noise.get(":type:")) and len(numbers) == 1:
        return numbers.pop()
    notes.append("action_noise cannot be read: algo.exploration={name: gaussian, std: 0.1}")
    return 0.1


def _updates_per_step(model: Model) -> float:
    per_phase, steps = model.data.get("gradient_steps", 1), _TRAIN_FREQ[model.algo] * _count(model.data, "n_envs", 1)
    return 1.0 if per_phase == -1 else per_phase / steps


def _replay(model: Model, notes: list[str]) -> dict[str, Any]:
    data, frequency = model.data, _TRAIN_FREQ[model.algo]
    train_every = frequency * _count(data, "n_envs", 1)
    notes.append(f"train_freq cannot be read: {frequency}, the default, as replay.train_every={train_every}")
    return {
        "capacity": _count(data, "buffer_size", 1_000_000),
        "batch_size": _count(data, "batch_size", 256),
        "learning_starts": int(data.get("learning_starts", 100)),
        "train_every": train_every,
        "updates_per_step": _updates_per_step(model),
        "n_step": _count(data, "n_steps", 1),
    }


def _network(model: Model) -> dict[str, Any]:
    """Returns the section `network`: widths from the weights, the rest from the texts of `policy_kwargs`."""
    given = model.data.get("policy_kwargs")
    given = given if isinstance(given, dict) else {}
    extractor = str(given.get("features_extractor_class", ""))
    if extractor and not re.search(r"\.(NatureCNN|FlattenExtractor|CombinedExtractor)'>$", extractor):
        raise InputError(f"{model.path}: expected NatureCNN or FlattenExtractor, got {shown(extractor)}: jrl has no "
                         "equivalent: train it here with network.torso")  # fmt: skip
    activation = "tanh" if model.algo in ("ppo", "a2c") else "relu"
    if "activation_fn" in given:
        name = re.sub(r"^.*\.|'>$", "", str(given["activation_fn"]))
        if name not in _ACTIVATIONS:
            expected = f"expected one of {', '.join(_ACTIVATIONS)}"
            raise InputError(f"{model.path}: activation_fn: {expected}, got {shown(name)}: train it with one of them")
        activation = _ACTIVATIONS[name]
    found: dict[str, Any] = {"activation": activation}
    if given.get("normalize_images") in (False, "False"):
        found["image_max"] = 1.0
    policy, value = _hidden(model)
    widths = lambda names: [model.weights[f"{name}.weight"].shape[0] for name in names]
    if not _has_cnn(model):
        critic = {} if model.algo == "dqn" else {"critic_hidden": widths(value)}
        return found | {"hidden": widths(policy), **critic}
    found |= {"torso": "nature_cnn", "head_hidden": widths(policy), "shared": _is_shared(model)}
    if model.algo in ("sac", "td3"):
        found["critic_hidden"] = widths(value)
    elif widths(value) != widths(policy):
        raise InputError(f"{model.path}: net_arch: after a CNN jrl has the same widths for policy and value, got "
                         f"{widths(policy)} and {widths(value)}: train it with one list of widths")  # fmt: skip
    return found


# ---------------------------------------------------------------- names of layers


def sequence(model: Model, prefix: str) -> list[str]:
    """Returns the names of the dense layers of a `Sequential`, in their order."""
    indices = (re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.weight", name) for name in model.weights)
    return [f"{prefix}.{i}" for i in sorted(int(match[1]) for match in indices if match)]


def _critics(model: Model) -> list[list[str]]:
    """Returns the layers of each critic."""
    found = list[list[str]]()
    while layers := sequence(model, f"critic.qf{len(found)}"):
        found.append(layers)
    if not found:
        raise _missing(model, "critic.qf0.0.weight")
    return found


def _hidden(model: Model) -> tuple[list[str], list[str]]:
    """Returns the hidden layers of the policy (or Q network) and of the value (or a critic)."""
    match model.algo:
        case "dqn":
            layers = sequence(model, "q_net.q_net")[:-1]
            return layers, layers
        case "sac":
            return sequence(model, "actor.latent_pi"), _critics(model)[0][:-1]
        case "td3":
            return sequence(model, "actor.mu")[:-1], _critics(model)[0][:-1]
    return sequence(model, "mlp_extractor.policy_net"), sequence(model, "mlp_extractor.value_net")


def _extractor(model: Model) -> str:
    """Returns the prefix of the policy's feature extractor."""
    return {"dqn": "q_net.", "sac": "actor.", "td3": "actor."}.get(model.algo, "") + "features_extractor"


def _has_cnn(model: Model) -> bool:
    return f"{_extractor(model)}.{_CNN}" in model.weights


def _is_shared(model: Model) -> bool:
    """Returns whether policy and value of PPO or A2C read the same CNN: torch saved one storage for both."""
    if model.algo not in ("ppo", "a2c"):
        return False
    names = (f"{kind}features_extractor.{_CNN}" for kind in ("pi_", "vf_"))
    found = [model.weights[name] for name in names if name in model.weights]
    return len(found) < 2 or _place(found[0]) == _place(found[1])


def _place(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _missing(model: Model, name: str) -> InputError:
    return InputError(f"{model.path}: policy.pth: expected an array {name}, as {model.algo} has, got none: save the "
                      "model again")  # fmt: skip


# ---------------------------------------------------------------- arrays


def _dense(get: Get, name: str) -> dict[str, np.ndarray]:
    return {"kernel": get(f"{name}.weight").T, "bias": get(f"{name}.bias")}


def _mlp(get: Get, names: list[str]) -> dict[str, Any]:
    return {f"Dense_{i}": _dense(get, name) for i, name in enumerate(names)}


def _hidden_of_head(get: Get, head: str, names: list[str]) -> dict[str, Any]:
    return {f"{head}_hidden_{i}": _dense(get, name) for i, name in enumerate(names)}


def _cnn(get: Get, prefix: str, image: tuple[int, int]) -> dict[str, Any]:
    """Returns the Nature CNN for images of (height, width).

    Torch flattens the last convolution's output as [channel, row, column], jrl as [row, column, channel].
    """
    layers: dict[str, Any] = {}
    for i, index in enumerate((0, 2, 4)):
        kernel = get(f"{prefix}.cnn.{index}.weight").transpose(2, 3, 1, 0)
        layers[f"Conv_{i}"] = {"kernel": kernel, "bias": get(f"{prefix}.cnn.{index}.bias")}
    dense = _dense(get, f"{prefix}.linear.0")
    size = tuple((((n - 8) // 4 + 1 - 4) // 2 + 1) - 2 for n in image)
    kernel = dense["kernel"]
    channels = kernel.shape[0] // max(1, size[0] * size[1])
    if kernel.shape[0] == channels * size[0] * size[1]:
        moved = kernel.reshape(channels, *size, -1).transpose(1, 2, 0, 3)
        dense["kernel"] = moved.reshape(kernel.shape)
    return {**layers, "Dense_0": dense}


def _stacked(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if not isinstance(part, dict) or part}


def params(model: Model, get: Get, image: tuple[int, int], *, target: str = "") -> dict[str, Any]:
    """Returns jrl's parameters, without the temperature of SAC.

    Args:
      get: name of an array of policy.pth -> that array, or its moment in an optimizer.
      image: height and width of image observations.
      target: suffix of the networks' names: "_target" for the slow copies.
    """
    policy, value = _hidden(model)
    is_image, shared = _has_cnn(model), _is_shared(model)
    if model.algo in ("sac", "td3"):
        parts = {"critic": _critic(model, get, image, f"critic{target}")}
        if model.algo == "td3" or not target:  # SAC has no slow copy of its policy
            parts["actor"] = _actor(model, get, image, f"actor{target}")
        return parts
    if model.algo == "dqn":
        rename = lambda name: name.replace("q_net.", f"q_net{target}.", 1)
        own = lambda name: get(rename(name))
        head = _dense(own, sequence(model, "q_net.q_net")[-1])
        torso = _cnn(own, "q_net.features_extractor", image) if is_image else _mlp(own, policy)
        heads = _hidden_of_head(own, "q", policy) if is_image else {}
        return _without_empty({"torso": torso, "q_head": head, **heads})
    found: dict[str, Any] = {"policy_head": _dense(get, "action_net"), "value_head": _dense(get, "value_net")}
    if "log_std" in model.weights:
        found["log_std"] = get("log_std")
    if not is_image:
        return _without_empty({**found, "policy_torso": _mlp(get, policy), "value_torso": _mlp(get, value)})
    found |= _hidden_of_head(get, "policy", policy) | _hidden_of_head(get, "value", value)
    if shared:
        return {**found, "torso": _cnn(get, "features_extractor", image)}
    towers = {"policy_torso": "features_extractor", "value_torso": "vf_features_extractor"}
    return {**found, **{name: _cnn(get, prefix, image) for name, prefix in towers.items()}}


def _actor(model: Model, get: Get, image: tuple[int, int], name: str) -> dict[str, Any]:
    own = lambda array: get(array.replace("actor.", f"{name}.", 1))
    hidden = _hidden(model)[0]
    if model.algo == "td3":
        head = _dense(own, sequence(model, "actor.mu")[-1])
    else:  # jrl has one layer for mean and log_std
        both = [_dense(own, f"actor.{part}") for part in ("mu", "log_std")]
        head = {key: np.concatenate([part[key] for part in both], -1) for key in ("kernel", "bias")}
    if not _has_cnn(model):
        return _without_empty({"policy_torso": _mlp(own, hidden), "policy_head": head})
    torso = _cnn(own, "actor.features_extractor", image)
    return {"policy_torso": torso, "policy_head": head, **_hidden_of_head(own, "policy", hidden)}


def _critic(model: Model, get: Get, image: tuple[int, int], name: str) -> dict[str, Any]:
    own = lambda array: get(array.replace("critic.", f"{name}.", 1))

    def one(layers: list[str]) -> dict[str, Any]:
        found = {"layers": _mlp(own, layers[:-1]), "head": _dense(own, layers[-1])}
        if _has_cnn(model):  # critics of jrl have a CNN each
            found["torso"] = _cnn(own, "critic.features_extractor", image)
        return _without_empty(found)

    return _stacked([one(layers) for layers in _critics(model)])


# ---------------------------------------------------------------- optimizers


def optimizer_options(model: Model) -> dict[str, Any]:
    """Returns the options of the policy's optimizer; {} if they cannot be read."""
    for part in ("policy", "actor"):
        groups = model.optimizers[part].get("param_groups") if isinstance(model.optimizers.get(part), dict) else None
        if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict):
            return groups[0]
    return {}


def _optimizer_class(model: Model) -> str:
    given = model.data.get("policy_kwargs")
    return str(given.get("optimizer_class", "")) if isinstance(given, dict) else ""


def _is_rmsprop(model: Model) -> bool:
    """Returns whether the optimizer is RMSprop, the default of A2C."""
    group = optimizer_options(model)
    return {"alpha", "eps"} <= group.keys() and not group.get("centered") and "RMSprop" in _optimizer_class(model)


def _optimizer(model: Model, part: str, names: list[str]) -> Optimizer | None:
    """Returns the state of the optimizer of the arrays `names`; None: there is none, or another kind."""
    tree = model.optimizers.get(part)
    if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict) or len(tree.get("param_groups", ())) != 1:
        return None
    group, entries = tree["param_groups"][0], list(tree["state"].values())
    if len(entries) != len(names) or any(map(group.get, ("amsgrad", "weight_decay", "momentum"))):
        return None
    square = "square_avg" if _is_rmsprop(model) else "exp_avg_sq"
    if not all(isinstance(entry, dict) and square in entry for entry in entries):
        return None
    first = {} if _is_rmsprop(model) else {n: entry["exp_avg"] for n, entry in zip(names, entries, strict=True)}
    second = {name: entry[square] for name, entry in zip(names, entries, strict=True)}
    return Optimizer(first, second, int(np.asarray(entries[0].get("step", 0)).reshape(())), group)


def _own_names(model: Model, prefix: str) -> list[str]:
    """Returns the arrays of a network in the order of torch's `parameters()`: each storage once."""
    places, names = set[int](), list[str]()
    for name, x in model.weights.items():
        if name.startswith(prefix) and _place(x) not in places:
            places.add(_place(x))
            names.append(name)
    return names


def _with_moments(opt_state: PyTree, optimizer: Optimizer, arrange: Callable[[Get], PyTree]) -> PyTree:
    """Returns jrl's optimizer state with the moments; a state of one vector gets the arrays in their tree's order."""
    joined = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    like = lambda old, tree: joined(tree) if hasattr(old, "shape") and len(jax.tree.leaves(tree)) > 1 else tree

    def renew(node: Any) -> Any:
        moments = lambda name, found: like(getattr(node, name), arrange(found.__getitem__))
        match node:
            case optax.ScaleByAdamState() if optimizer.first:
                count = jnp.asarray(optimizer.steps, jnp.int32)
                return node._replace(count=count, mu=moments("mu", optimizer.first), nu=moments("nu", optimizer.second))
            case optax.ScaleByRmsState() if not optimizer.first:
                return node._replace(nu=moments("nu", optimizer.second))
        return node

    is_state = lambda node: isinstance(node, optax.ScaleByAdamState | optax.ScaleByRmsState)
    return jax.tree.map(renew, opt_state, is_leaf=is_state)


# ---------------------------------------------------------------- the State


def check_spaces(model: Model, spec: EnvSpec) -> None:
    """Raises InputError: the environment's spaces differ from the model's, as far as its texts tell them."""
    for key, space in (("observation", spec.observation), ("action", spec.env_action or spec.action)):
        found = model.data.get(f"{key}_space")
        if not isinstance(found, dict):
            continue
        if not any(_fits(found, shape) for shape in _shapes(space)):
            text = str(found.get("n") or found.get("_shape") or found.get("nvec") or found.get(":type:"))
            raise InputError(f"--env: expected {key}s of {shown(text)}, as {model.path} has, got {space}: name the "
                             "environment of the training, with its options by --set")  # fmt: skip


def _shapes(space: Space) -> Iterator[dict[str, Any]]:
    """Yields what `data` may say of a space; {}: it cannot be compared."""
    match space:
        case Discrete(n):
            yield {"n": str(n)}
        case MultiDiscrete(nvec):
            yield {"_shape": [len(nvec)]}
        case Box(shape):
            yield {"_shape": list(shape)}
            if len(shape) == 3:  # Stable-Baselines3 moves the channels of images to the front
                yield {"_shape": [shape[2], shape[0], shape[1]]}
        case _:
            yield {}


def _fits(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(name in found and str(found[name]) == str(value) for name, value in wanted.items())


def fill(model: Model, state: Any, spec: EnvSpec, statistics: Statistics | None) -> tuple[Any, list[str]]:
    """Returns an initial State with a model's weights, targets, moments, statistics and counters, and notes.

    Raises:
      InputError: an array is missing, unknown, or has another shape.
    """
    used, notes = set[int](), list[str]()

    def get(name: str) -> np.ndarray:
        if name not in model.weights:
            raise _missing(model, name)
        used.add(_place(model.weights[name]))
        return model.weights[name]

    image = _image_size(model, spec)
    found = params(model, get, image)
    target: PyTree = () if model.algo in ("ppo", "a2c") else params(model, get, image, target="_target")
    unknown = [name for name, x in model.weights.items() if _place(x) not in used]
    if unknown:
        raise InputError(f"{model.path}: policy.pth: expected the arrays of {model.algo}, got {unknown[0]}, too: jrl "
                         "has no equivalent: train it here")  # fmt: skip
    if "log_ent_coef" in state.params:
        found["log_ent_coef"] = np.asarray(model.variables["log_ent_coef"]).reshape(())
    found, target = _cast(model, found, state.params), _cast(model, target, state.target_params)
    opt_state = _moments(model, state.opt_state, image, notes)
    steps, updates = int(model.data.get("num_timesteps") or 0), int(model.data.get("_n_updates") or 0)
    updates //= _count(model.data, "n_epochs", 1)  # Stable-Baselines3 counts the epochs of PPO
    counter = lambda n: np.asarray(min(n, 2**32 - 1), np.uint32)
    state = dataclasses.replace(state, params=found, target_params=target, opt_state=opt_state)
    state = dataclasses.replace(state, env_steps=counter(steps), updates=counter(updates))
    if statistics is not None:
        if statistics.obs is not None:
            state = dataclasses.replace(state, obs_stats=_running(model, statistics.obs, state.obs_stats))
        if statistics.returns is not None:
            state = dataclasses.replace(state, return_stats=_running(model, statistics.returns, state.return_stats))
    return state, notes


def _image_size(model: Model, spec: EnvSpec) -> tuple[int, int]:
    """Returns height and width of the image observation, by the model's channels; (0, 0) without a CNN."""
    if not _has_cnn(model):
        return 0, 0
    shape = spec.observation.shape if isinstance(spec.observation, Box) else ()
    if len(shape) != 3:
        raise InputError(f"--env: expected one image of 3 axes, as {model.path} has, got {spec.observation}: name the "
                         "environment of the training, with its options by --set")  # fmt: skip
    channels = model.weights[f"{_extractor(model)}.{_CNN}"].shape[1]
    height, width = shape[1:] if shape[0] == channels else shape[:2]
    return height, width


def _moments(model: Model, opt_state: PyTree, image: tuple[int, int], notes: list[str]) -> PyTree:
    """Returns the optimizer's state with the model's moments; parts that do not fit stay new, with a note."""
    parts: dict[str, tuple[list[str], Callable[[Get], PyTree]]]
    if model.algo in ("ppo", "a2c", "dqn"):
        names = _own_names(model, "q_net." if model.algo == "dqn" else "")
        parts = {"policy": (names, lambda get: params(model, get, image))}
    else:
        parts = {
            "actor": (_own_names(model, "actor."), lambda get: _actor(model, get, image, "actor")),
            "critic": (_own_names(model, "critic."), lambda get: _critic(model, get, image, "critic")),
        }
        if "log_ent_coef" in opt_state:
            parts["ent_coef"] = (["log_ent_coef"], lambda get: get("log_ent_coef").reshape(()))
    renewed = {}
    for part, (names, arrange) in parts.items():
        key = {"ent_coef": "log_ent_coef"}.get(part, part)
        optimizer, old = _optimizer(model, part, names), opt_state if part == "policy" else opt_state[key]
        if optimizer is None or not _same_shapes(model, optimizer, names):
            notes.append(f"the optimizer of {part} begins anew: its state is missing, or of another kind")
            renewed[key] = old
            continue
        new = _with_moments(old, optimizer, arrange)
        renewed[key] = jax.tree.map(lambda x, like: np.asarray(x, like.dtype).reshape(like.shape), new, old)
    if isinstance(opt_state, dict):  # an optimizer for each part
        return {**opt_state, **renewed}
    return renewed["policy"]


def _same_shapes(model: Model, optimizer: Optimizer, names: list[str]) -> bool:
    arrays = {**model.weights, **model.variables}
    moments = [moment for moment in (optimizer.first, optimizer.second) if moment]
    return all(np.shape(moment[name]) == arrays[name].shape for moment in moments for name in names)


def _cast(model: Model, found: PyTree, like: PyTree) -> PyTree:
    """Returns `found` with the dtypes of `like`. Raises InputError: names or shapes differ."""
    by_name = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)
    }
    given, wanted = by_name(found), by_name(like)
    for name in [*wanted, *given]:
        shapes = [list(np.shape(tree[name])) if name in tree else None for tree in (given, wanted)]
        if shapes[0] != shapes[1]:
            raise InputError(f"{model.path}: expected {name} of shape {shapes[1] or 'nothing'}, got {shapes[0]}: the "
                             "policy has other layers than jrl's: train it here")  # fmt: skip
    return jax.tree.map(lambda x, old: np.asarray(x, old.dtype), found, like)


def _running(model: Model, moments: Moments, like: PyTree) -> RunningStats:
    """Returns running statistics of jrl. Raises InputError: of another shape, as where observations are images."""
    shape = np.shape(like.mean) if isinstance(like, RunningStats) and not isinstance(like.mean, dict) else None
    if shape != moments.mean.shape:
        raise InputError(f"--vec-normalize: expected statistics of {model.path}'s observations, one array of floats, "
                         f"got those of shape {list(moments.mean.shape)}: give the file of this model")  # fmt: skip
    count = min(moments.num, MAX_COUNT)
    mean = moments.mean.astype(np.float32)
    # the mean's float64 digits beyond float32 are the rounding error that jrl keeps beside it
    fields = count, mean, moments.var * count, moments.mean - mean, np.zeros(mean.shape)
    arrays: list[Any] = [np.asarray(x, np.float32) for x in fields]
    return RunningStats(*arrays)
