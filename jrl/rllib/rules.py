"""Rules of keys that depend on other keys or become several keys. Each rule has the name of its key."""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from jrl import registry
from jrl.config import datasets, metric_names
from jrl.config.external import ExternalConfig
from jrl.fields import schema
from jrl.fields.bounds import INT64, is_number
from jrl.rllib import exploration
from jrl.rllib.table import KEYS, WITH_CRITICS
from jrl.rllib.translation import CORES, DEFAULT_ENVS, SWITCHES, Job, is_named, rule

_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "gelu": "gelu", "elu": "elu", "swish": "silu", "silu": "silu"}
_CLIPS = {"global_norm": "max_grad_norm", "norm": "max_leaf_norm", "value": "max_grad_value"}
_POLICY, _CRITICS = "policy_model_config", "q_model_config"
_BETA_ANNEALING = ("final_prioritized_replay_beta", "prioritized_replay_beta_annealing_timesteps")
_FORMATS = {"json": "rllib-json", "parquet": "rllib-parquet"}
# RLlib's importance sampling weights each step by the product of the ratios up to that step
_ESTIMATORS = {
    "is": "pdis", "importancesampling": "pdis", "wis": "wpdis", "weightedimportancesampling": "wpdis", "dm": "dm",
    "directmethod": "dm", "dr": "dr", "doublyrobust": "dr",
}  # fmt: skip


# ---------------------------------------------------------------- the experiment


@rule("stop")
def _stop(job: Job, key: str, value: Mapping[str, Any]) -> None:
    steps: dict[str, int] = {}
    budget = "updates" if job.is_offline else "env_steps"
    for name, given in value.items():
        key, ours = f"stop.{name}", metric_names.ours(str(name))
        if not is_number(given) or not -INT64 <= given <= INT64:
            job.add_fault(key, "a number", given)
        elif name == "training_iteration":
            each = job.sizes.iteration(job)
            steps[key] = int(given) * each
            job.report(key, f"stop.{budget}", steps[key], f"{given:g} iterations of {job.steps(each)}")
        elif ours == "env_steps" and job.is_offline:
            steps[key] = job.sizes.updates_of(job, given, trained="trained" in name)
            job.report(key, f"stop.{budget}", steps[key], f"of {job.sizes.batch_rows} rows")
        elif ours == "env_steps":
            steps[key] = int(given)
            job.report(key, "stop.env_steps", steps[key])
        elif ours is not None:
            job.tree.setdefault("stop", {})[ours] = given
            job.origins[f"stop.{ours}"] = key
            is_return = ours.startswith("episode/return_")
            job.report(key, f"stop.{ours}", given, "of the episodes since the last row" * is_return)
        else:
            job.drop(key, "not a metric of jrl's result rows: see docs/config.md")
    if steps:
        first = min(steps, key=lambda k: steps[k])
        job.tree.setdefault("stop", {})[budget] = steps[first]
        job.origins[f"stop.{budget}"] = first
        if len(steps) > 1:
            job.lines.append(f"stop.{budget}: {steps[first]}, the smallest of {len(steps)} limits")


@rule("checkpoint_score_attr")
def _score_attr(job: Job, key: str, value: Any) -> None:
    ours = metric_names.ours(str(value).removeprefix("min-"))
    if ours is None:
        return job.drop(key, f"{value} is not a metric of jrl's result rows")
    job.put(key, "checkpoint.keep_best_by", ours)
    return job.put(key, "checkpoint.keep_best", "min") if str(value).startswith("min-") else None


# ---------------------------------------------------------------- environments and runners


@rule("env")
def _env(job: Job, key: str, value: Any) -> None:
    path = None
    if is_named(value, "PolicyClient"):
        return job.refuse(key, "PolicyClient runs elsewhere: the config of its server has input: PolicyServerInput")
    if callable(value) or "<" in str(value) or ("." in str(value) and "-v" not in str(value)):
        path = registry.importable_name(value)
    if path is None and (not isinstance(value, str) or "<" in value):
        return job.add_fault(key, "the name of an environment", value)
    note = "a class is package.module:Class" if path and ":" in path else ""
    if path and path.startswith("ray."):
        note = "a class of RLlib, which must be installed"
    return job.put(key, "env.id", path or value, note)


@rule("num_env_runners")
def _runners(job: Job, key: str, value: int) -> None:
    sizes = job.sizes
    job.put(key, "env_runners.num", value, "processes of Ray; 0 is faster for cheap environments" if value else "")
    if "num_envs_per_env_runner" not in job.given and job.base_value("env.num_envs") is None:
        note = "num_envs_per_env_runner is the number of each, by default 1 in RLlib"
        if sizes.num_envs != DEFAULT_ENVS:
            note = f"the nearest to {DEFAULT_ENVS} that {value} runners share: {note}"
        job.put(key, "env.num_envs", sizes.num_envs, note)


@rule("num_gpus", "num_learners")
def _devices(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if key == "num_gpus" and value == 0:
        return job.drop(key, "jrl learns on all accelerators: devices.platform=cpu hides them")
    if isinstance(value, float) and value != int(value):
        return job.drop(key, f"XLA_PYTHON_CLIENT_MEM_FRACTION={value:g} is for a part of a GPU")
    if not isinstance(value, int | float) or value <= 1 or job.given.get("_fake_gpus"):
        return job.drop(key, "see devices.fake" if job.given.get("_fake_gpus") else "one device, or all devices")
    if not sizes.shared:
        return job.drop(key, f"{sizes.num_envs} environments cannot be shared by {sizes.devices}: see devices.learners")
    return job.put(key, "devices.learners", list(range(sizes.devices)))


# ---------------------------------------------------------------- batches


@rule("rollout_fragment_length")
def _fragment(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if value == "auto":
        job.drop(key, "auto: rollout.length follows from the batch size")
    elif job.has_samples:
        if sizes.train_every:
            job.put(key, "replay.train_every", sizes.train_every, f"fragments of {sizes.fragment}")
            if "training_intensity" not in job.given and sizes.settled_rate is None:
                job.put(
                    key, "replay.updates_per_step", sizes.updates_per_step, "one update for each round of fragments"
                )
    elif sizes.length == sizes.fragment:
        job.put(key, "rollout.length", sizes.length)
    else:
        job.drop(key, f"rollout.length is train_batch_size divided by the environments, {sizes.length} steps")


@rule("train_batch_size", "train_batch_size_per_learner")
def _batch(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if sizes.batch is None:
        return None  # reported as a fault
    if key == "train_batch_size_per_learner" and job.given.get("train_batch_size") is not None:
        return job.drop(key, "train_batch_size is given, too")
    if job.has_samples and sizes.sequence:
        steps = sizes.sequence + (job.number("replay_buffer_config.replay_burn_in", least=0) or 0)
        note = f"sequences of {steps} steps for {sizes.batch} rows"
        return job.put(key, "replay.batch_size", math.ceil(sizes.batch / steps), note)
    if job.has_samples:
        return job.put(key, "replay.batch_size", sizes.batch)
    split = f"{sizes.num_envs} environments x {sizes.length} steps = {sizes.rows} rows"
    if not (sizes.sequences and sizes.fragment):
        exact = split if sizes.rows == sizes.batch else f"the nearest: {split}, not {sizes.batch}"
        job.put(key, "rollout.length", sizes.length, exact)
    if not sizes.sequences:
        return None
    if "num_minibatches" in job.fields and "minibatch_size" not in job.given:
        return _minibatches(job, key, value)
    return job.drop(key, f"an update has {split}") if sizes.fragment else None


@rule("minibatch_size")
def _minibatches(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if sizes.minibatches is None:
        if "num_minibatches" not in job.fields:
            job.drop(key, f"{job.algo} makes one gradient step per rollout")
        return
    rows = sizes.rows // sizes.minibatches
    note = f"{sizes.minibatches} x {rows} rows"
    if rows != sizes.minibatch:
        note = f"the nearest divisor of {sizes.rows} rows: {note}, not {sizes.minibatch}"
    job.put(key, "algo.num_minibatches", sizes.minibatches, note)


@rule("training_intensity")
def _intensity(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if "rollout_fragment_length" not in job.given:
        job.put(key, "replay.train_every", sizes.train_every)
    updates = round(sizes.updates_per_step * (sizes.train_every or 1))
    job.put(key, "replay.updates_per_step", sizes.updates_per_step, f"{updates} of {sizes.train_every} steps")


# ---------------------------------------------------------------- hyper-parameters


@rule("grad_clip")
def _grad_clip(job: Job, key: str, value: Any) -> None:
    kind = job.given.get("grad_clip_by", "global_norm")
    name, by_default = _CLIPS.get(kind, ""), job.fields.get("max_grad_norm")
    if not name:
        return job.add_fault("grad_clip_by", "global_norm, norm or value", kind)
    if value is None and by_default is None:
        return job.drop(key, "null: no clipping")
    if value is None:
        return job.put(key, "algo.max_grad_norm", None, "no clipping")
    if name != "max_grad_norm" and name in job.fields and by_default is not None:
        job.put(key, "algo.max_grad_norm", None, f"the {kind} is clipped instead")
    note = "RLlib's IMPALA of the old stack sums over the batch: jrl's mean is clipped less"
    return job.put(key, f"algo.{name}", value, note if job.algo == "impala" else "")


@rule("grad_clip_by")
def _grad_clip_by(job: Job, key: str, value: Any) -> None:
    if "grad_clip" not in job.given:
        return job.drop(key, "there is no grad_clip")
    return job.report(key, "one of max_grad_norm, max_leaf_norm, max_grad_value", value)


@rule("lambda")
def _lambda(job: Job, key: str, value: Any) -> None:
    if "vtrace_lambda" in job.fields:
        return job.drop(key, "RLlib's V-trace ignores it: jrl has algo.vtrace_lambda, 1 is as in RLlib")
    if job.algo == "marwil":
        report = job.drop if value == 1 else job.refuse
        return report(key, "marwil has returns to the episode's end, as lambda 1")
    if job.given.get("use_gae") is False:
        return job.drop(key, "use_gae is false")
    return job.put(key, "algo.gae_lambda", value)


@rule("num_rollouts", "episodes_per_batch")
def _members(job: Job, key: str, value: int) -> None:
    members = 2 * (value if key == "num_rollouts" else -(-value // 2))
    job.put(key, "algo.population", members)
    job.put(key, "env.num_envs", members, "an environment for each member")


@rule("kl_coeff", "use_kl_loss", "kl_target")
def _kl(job: Job, key: str, value: Any) -> None:
    used = job.given.get("use_kl_loss", job.algo != "appo")  # RLlib's APPO has it off
    coefficient = job.given.get("kl_coeff")
    if key == "use_kl_loss":
        if "kl_coef" not in job.fields or value:
            return job.drop(key, f"{str(value).lower()}: see kl_coeff")
        return job.put(key, "algo.kl_coef", None)
    if not used:
        return job.drop(key, "use_kl_loss is off")
    if key == "kl_coeff":
        note = "constant: algo.kl_target would adapt it" if value and "kl_target" not in job.given else ""
        return job.put(key, "algo.kl_coef", value or None, note)
    if coefficient == 0:
        return job.drop(key, "kl_coeff is 0")
    if coefficient is None and "kl_coef" in job.fields:
        job.put(key, "algo.kl_coef", 0.2, "initial value, as in RLlib")
    return job.put(key, "algo.kl_target", value)


@rule("num_atoms")
def _atoms(job: Job, key: str, value: int) -> None:
    if value == 1:
        return job.drop(key, "1: the mean, as with algo.head expected")
    if job.base_value("algo.head") is None:
        job.put(key, "algo.head", "c51")
    return job.put(key, "algo.num_atoms", value)


@rule("lagrangian", "lagrangian_thresh")
def _lagrangian(job: Job, key: str, value: Any) -> None:
    if not job.given.get("lagrangian"):
        return job.drop(key, "lagrangian is off: the weight is constant")
    gap = job.given.get("lagrangian_thresh", 5.0)
    weight = job.given.get("min_q_weight", job.base_value("algo.cql_weight") or 5.0)
    if KEYS[key].name == "lagrangian" and "lagrangian_thresh" in job.given:
        return job.drop(key, "true: see lagrangian_thresh")
    for name, number in (("lagrangian_thresh", gap), ("min_q_weight", weight)):
        if not isinstance(number, int | float) or not math.isfinite(number) or (name == "min_q_weight" and not number):
            return job.add_fault(name, "a number", number)
    return job.put(key, "algo.cql_target_gap", gap / weight, f"{gap:g} / min_q_weight {weight:g}")


# ---------------------------------------------------------------- networks


@rule(*(f"{model}.fcnet_hiddens" for model in ("model", _POLICY, _CRITICS)))
def _widths(job: Job, key: str, value: Any) -> None:
    policy, widths = job.given.get(f"{_POLICY}.fcnet_hiddens"), list(value) if isinstance(value, tuple) else value
    of_critics = KEYS[key].name == f"{_CRITICS}.fcnet_hiddens"
    if job.algo in WITH_CRITICS and of_critics and policy is not None and policy != value:
        return job.put(key, "network.critic_hidden", widths)
    return _put_network_key(job, key, widths, "fcnet_hiddens", "network.hidden")


@rule(*(f"{model}.fcnet_activation" for model in ("model", _POLICY, _CRITICS)))
def _activation(job: Job, key: str, value: Any) -> None:
    name = _ACTIVATIONS.get(str(value).rpartition(".")[2].lower())
    if name is None:
        return job.drop(key, f"{value}: choose network.activation of {', '.join(dict.fromkeys(_ACTIVATIONS.values()))}")
    return _put_network_key(job, key, name, "fcnet_activation", "network.activation")


def _put_network_key(job: Job, key: str, value: Any, last: str, ours: str) -> None:
    """Translates a key of networks that is the same for policy and critics in jrl: the policy's value wins."""
    policy, critics = (job.given.get(f"{model}.{last}") for model in (_POLICY, _CRITICS))
    of_model = key.startswith("model.")
    if job.algo not in WITH_CRITICS and not of_model:
        return job.drop(key, f"{job.algo} has no networks of this name")
    if of_model and job.algo in WITH_CRITICS and (policy is not None or critics is not None):
        return job.drop(key, "policy and critics have their own")
    if policy is not None and KEYS[key].name == f"{_CRITICS}.{last}":
        same = policy == critics
        return job.drop(key, "as the policy's" if same else f"critics have the policy's value, {policy}")
    return job.put(key, ours, value)


@rule(*SWITCHES)
def _core(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, bool):
        return job.add_fault(key, "true or false", value)
    if not value:
        return job.drop(key, "false: not set")
    if all(job.given.get(switch) for switch in SWITCHES):
        if KEYS[key].name == "model.use_attention":
            job.add_fault(key, "either this or model.use_lstm", value)
        return None
    note = ""
    if not job.has_samples and "model.vf_share_layers" not in job.given and "vf_share_layers" not in job.given:
        note = "policy and value have a core each: network.shared true shares it, as in RLlib's old models"
    job.put(key, "network.core.name", job.core, note)
    if job.sizes.fitted_minibatches is not None:
        note = f"minibatches have whole sequences of {job.sizes.sequence} steps"
        job.put(key, "algo.num_minibatches", job.sizes.fitted_minibatches, note)
    return None


# ---------------------------------------------------------------- replay


@rule("replay_buffer_config.type")
def _buffer(job: Job, key: str, value: Any) -> None:
    name = str(value).rpartition(".")[2].strip("'>")
    if any(other in name for other in ("Fifo", "MixIn")):
        return job.drop(key, f"{name}: jrl's replay keeps the latest transitions")
    if re.fullmatch(r"(MultiAgent|Local|Simple)?(Prioritized)?(Episode)?ReplayBuffer", name) is None:
        return job.refuse(key, f"{name}: replay is uniform or prioritized, and keeps the latest transitions")
    if "replay_buffer_config.prioritized_replay" in job.given:
        return job.drop(key, "prioritized_replay decides")
    return job.put(key, "replay.prioritized", "Prioritized" in name)


@rule(*(f"replay_buffer_config.{name}" for name in ("alpha", "beta", "eps")))
def _priority(job: Job, key: str, value: Any) -> None:
    ours = KEYS[key].ours
    end, steps = (job.given.get(k) for k in _BETA_ANNEALING)
    if ours == "replay.priority_beta" and end is not None and steps is not None:
        value = [[0, value], [steps, end]]
    job.put(key, ours, value)
    decided = {"replay_buffer_config.type", "replay_buffer_config.prioritized_replay"} & job.given.keys()
    if job.has_samples and not decided and "prioritized" not in job.tree.get("replay", {}):
        job.put(key, "replay.prioritized", True, "without priorities it has no effect")


@rule(*_BETA_ANNEALING)
def _annealing(job: Job, key: str, value: Any) -> None:
    needed = (*_BETA_ANNEALING, "replay_buffer_config.beta")
    if not all(k in job.given for k in needed):
        return job.drop(key, f"a schedule of replay.priority_beta needs all of {', '.join(needed)}")
    return job.report(key, "replay.priority_beta", value, "in its schedule")


@rule("replay_buffer_config.capacity")
def _capacity(job: Job, key: str, value: int) -> None:
    unit = job.given.get("replay_buffer_config.storage_unit", "sequences" if job.source in CORES else "")
    steps = job.sizes.sequence
    if not steps or not job.has_samples or not str(unit).lower().endswith("sequences"):
        return job.put(key, "replay.capacity", value)
    return job.put(key, "replay.capacity", value * steps, f"{value} sequences of {steps} steps")


# ---------------------------------------------------------------- exploration


@rule("exploration_config")
def _exploration(job: Job, key: str, value: Any) -> None:
    curiosity = exploration.curiosity_from_rllib(value)
    if curiosity is None:
        return job.put(key, "algo.exploration", exploration.from_rllib(value, job.source))
    if "curiosity" not in job.fields:
        return job.refuse(key, f"{job.algo} has no intrinsic rewards: use PPO or A2C")
    job.put(key, "algo.curiosity", curiosity, "scaled by the deviation of its return, with a value head of its own")
    for name in value:
        if name not in ("type", "sub_exploration") and not exploration.is_curiosity_option(value, name):
            job.drop(f"{key}.{name}", "algo.curiosity has no such option")
    if not (inner := value.get("sub_exploration")):
        return None
    return job.put(f"{key}.sub_exploration", "algo.exploration", exploration.from_rllib(inner, job.source))


# ---------------------------------------------------------------- evaluation, the user's own functions


@rule("evaluation_interval")
def _interval(job: Job, key: str, value: Any) -> None:
    if not job.given.get("min_sample_timesteps_per_iteration"):
        steps = job.sizes.iteration(job)
        job.put(key, "run.report_every", steps, f"a result row covers an iteration of {job.steps(steps)}")
    job.put(key, "evaluation.interval", value)


@rule("evaluation_config")
def _evaluation_config(job: Job, key: str, value: Mapping[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for name, given in value.items():
        own = job.build_nested(f"{key}.{name}", job.builder.build_sections, {name: given})
        explore = own.get("rollout", {}).get("explore")
        if explore is not None:
            job.put(f"{key}.{name}", "evaluation.explore", explore)
        elif own.keys() <= {"env", "algo"} and own.get("algo", {}).keys() <= {"exploration"}:
            tree = schema.merge(tree, own)
            job.report(f"{key}.{name}", "evaluation.config", own)
        else:
            job.drop(f"{key}.{name}", "evaluation can only change environments and exploration")
    if tree:
        job.set("evaluation.config", tree, key)


@rule("callbacks", "env_task_fn", "custom_evaluation_function")
def _custom_functions(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, "it is empty")
    paths = [registry.importable_name(x) for x in (value if isinstance(value, list | tuple) else [value])]
    if all(path and path.startswith("ray.rllib") for path in paths):
        return job.drop(key, "a class of RLlib without effect")
    if None in paths:
        return job.refuse(
            key, f"expected the path of a class or function, package.module:name, got {str(value)[:60]!r}"
        )
    if KEYS[key].name == "callbacks":
        return job.put(key, "custom.callbacks", paths, "derive it from jrl.callbacks.Callbacks")
    return job.put(key, KEYS[key].ours, paths[0])


@rule("min_sample_timesteps_per_iteration", "min_train_timesteps_per_iteration")
def _min_timesteps(job: Job, key: str, value: Any) -> None:
    if job.is_offline:
        return job.put(key, "run.report_every", job.sizes.iteration(job), f"updates of {job.sizes.batch_rows} rows")
    return job.put(key, KEYS[key].ours, value)


# ---------------------------------------------------------------- data sets, and episodes that clients play


@rule("input_")
def _input(job: Job, key: str, value: Any) -> None:
    if value == datasets.SAMPLER:
        return job.drop(key, "sampler: as jrl by default")
    if job.has_clients:
        return _put_clients(job, key, value)
    if not job.has_samples:
        return job.refuse(key, f"{job.algo} learns from its own rollouts: bc, marwil, iql, cql and dqn learn from data")
    if value == "dataset":
        config = job.given.get("input_config")
        value = (config.get("paths") or config.get("path")) if isinstance(config, Mapping) else None
        if not value:
            return job.add_fault("input_config", "a mapping with paths for input dataset", config)
    if callable(value):
        if inspect.isclass(value) or inspect.signature(value).parameters:
            return job.refuse(key, "a reader of RLlib takes an IOContext: write () -> EpisodeStore (docs/data.md)")
        return job.put(key, "data.input", registry.reference(value))
    paths = list(value) if isinstance(value, Mapping | list | tuple) else [value]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        return job.add_fault(key, "a path, a glob, a list of them, or {sampler: 0.4, path: 0.6}", value)
    for path in paths:
        if path.startswith("d4rl."):
            return job.refuse(key, f"{path}: download the *.hdf5 file of D4RL and name it in data.input")
        if "://" in path:
            return job.refuse(key, f"{path} is not on this machine: copy it, and name the file in data.input")
    note = "an exact split of each batch" if isinstance(value, Mapping) else ""
    return job.put(key, "data.input", list(value) if isinstance(value, tuple) else value, note)


def _put_clients(job: Job, key: str, value: Any) -> None:
    """Sets the section `external` for the input PolicyServerInput: a run of `python -m jrl.serve`."""
    config = job.given.get("input_config")
    config = config if isinstance(config, Mapping) else {}
    host, port = config.get("address"), config.get("port")
    note = "start it with python -m jrl.serve CONFIG; clients use PolicyClient of jrl/serve/client.py"
    is_known = isinstance(port, int) and not isinstance(port, bool)
    job.put(key, "external.port", port if is_known else ExternalConfig().port, note)
    if isinstance(host, str) and host:
        local = host in ("localhost", "127.0.0.1", "::1")
        job.put(key, "external.host", host, "" if local else "other machines need a token: external.token_file")
    known = ("env.id", "external.observation", "external.spaces")
    if job.given.get("env") or any(job.base_value(ours) is not None for ours in known):
        return
    job.faults += [
        f"{name} is missing: give the clients' spaces in the form of {KEYS[name].ours}, e.g. observation_space: "
        "{box: [4]} and action_space: {discrete: 2}, or an environment with these spaces"
        for name in ("observation_space", "action_space")
        if name not in job.given
    ]


@rule("input_config", "output_config")
def _file_config(job: Job, key: str, value: Mapping[str, Any]) -> None:
    if found := _FORMATS.get(str(value.get("format"))):
        job.put(key, f"data.{'' if key == 'input_config' else 'output.'}format", found)
    if unknown := value.keys() - {"format", "path", "paths"}:
        job.drop(f"{key}.{', '.join(sorted(map(str, unknown)))}", "of Ray Data")


@rule("input_read_method")
def _read_method(job: Job, key: str, value: Any) -> None:
    name = str(getattr(value, "__name__", value))
    found = _FORMATS.get(name.removeprefix("read_")) if name.startswith("read_") else None
    if found is None:
        return job.refuse(key, KEYS[key].note)
    if job.given.get("input_", datasets.SAMPLER) == datasets.SAMPLER:
        return job.drop(key, "there is no input")
    return job.put(key, "data.format", found)


@rule("dataset_num_iters_per_learner")
def _data_updates(job: Job, key: str, value: Any) -> None:
    job.put(key, "data.updates_per_iteration", job.sizes.updates_per_iteration)
    if "evaluation_interval" not in job.given and "min_train_timesteps_per_iteration" not in job.given:
        job.put(key, "run.report_every", job.sizes.iteration(job), "a result row covers an iteration")


@rule("input_evaluation", "off_policy_estimation_methods")
def _estimators(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, "no method")
    if job.given.get("input_", datasets.SAMPLER) == datasets.SAMPLER:
        return job.drop(key, "there is no data set")
    given = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    kinds = [x.get("type") if isinstance(x, Mapping) else x for x in given]
    names = [str(getattr(kind, "__name__", kind)).strip("<>'\" ").rpartition(".")[2].lower() for kind in kinds]
    names = [name for name in names if name != "simulation"]
    if not names:
        return job.drop(key, "simulation: evaluation.interval evaluates in env.id")
    if unknown := [name for name in names if name not in _ESTIMATORS]:
        return job.refuse(key, f"unknown estimator {unknown[0]}: data.estimate.methods has is, wis, dm, dr and more")
    methods = list(dict.fromkeys(_ESTIMATORS[name] for name in names))
    return job.put(key, "data.estimate", {"methods": methods}, KEYS[key].note)


@rule("output")
def _output(job: Job, key: str, value: Any) -> None:
    if isinstance(value, Mapping):  # jrl's section
        return job.put(key, "data.output", value)
    config = job.given.get("output_config") or {}
    path = config.get("path") if value == "dataset" and isinstance(config, Mapping) else value
    if not isinstance(path, str) or "<" in path or "://" in path:
        return job.refuse(key, f"data.output.path: expected a directory of this machine, got {str(path)[:60]!r}")
    if path == "logdir":
        return job.put(key, "data.output.path", None, "logdir: data in the run directory")
    return job.put(key, "data.output.path", path)
