"""Rules for environments, runners, batches, hyper-parameters, networks, replay and evaluation."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jrl import registry
from jrl.errors import InputError
from jrl.rllib import exploration, policy_server
from jrl.rllib.table import GROUPS, KEYS
from jrl.rllib.translation import (
    CORES,
    DEFAULT_ENVS,
    NESTED,
    NO_COLLECTION,
    SWITCHES,
    Job,
    canonical,
    rule,
    shown,
    translate,
)

_WITH_CRITICS = ("sac", "td3", "iql")  # algorithms with critics beside the policy
_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "gelu": "gelu", "elu": "elu", "swish": "silu", "silu": "silu"}
_CLIPS = {"global_norm": "max_grad_norm", "norm": "max_leaf_norm", "value": "max_grad_value"}
# environments of RLlib's examples that jrl has, and the names of their options
_EXAMPLES = {"StatelessCartPole": "StatelessCartPole-v1", "RepeatAfterMeEnv": "RepeatAfterMe-v0"}
_REPEAT = {"repeat_delay": "delay", "episode_len": "episode_length"}
_POLICY, _CRITICS = "policy_model_config", "q_model_config"
_ANNEALING = ("final_prioritized_replay_beta", "prioritized_replay_beta_annealing_timesteps")
_RESCALING = 1e-3  # epsilon of the rescaling function, in the paper, RLlib and jrl


@rule(*NESTED)
def _container(job: Job, key: str, value: Any) -> None:
    """What is left of a dict whose keys have rows of their own: an empty one, or another value."""
    if isinstance(value, Mapping):
        return job.drop(key, "it is empty")
    return job.wrong(key, "a mapping", value)


# ---------------------------------------------------------------- environments and runners


@rule("env")
def _env(job: Job, key: str, value: Any) -> None:
    path = None
    if policy_server.is_named(value, policy_server.CLIENT):
        return job.lack(
            key,
            "PolicyClient plays in a program of its own, which uses PolicyClient of jrl/serve/client.py: the config of "
            "what it plays with has input: PolicyServerInput",
        )
    if ours := _example(job):
        return job.put(key, "env.id", ours, "jrl's, inside the compiled program")
    if callable(value) or "<" in str(value) or ("." in str(value) and "-v" not in str(value)):
        path = registry.importable(value)
    if path is None and (not isinstance(value, str) or "<" in value):
        return job.wrong(key, "the name of an environment", value)
    note = "a class is package.module:Class" if path and ":" in path else ""
    if path and path.startswith("ray."):
        note = "a part of RLlib, which must be installed"
    return job.put(key, "env.id", path or value, note)


@rule("env_config")
def _env_config(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        return job.wrong(key, "a mapping", value)
    if not value:
        return job.drop(key, "it is empty")
    options = dict(value)
    if _example(job) == "RepeatAfterMe-v0":
        options = {_REPEAT.get(name, name): given for name, given in _unwrapped(value).items() if name != "continuous"}
    return job.put(key, "env.options", options)


def _unwrapped(options: Any) -> Mapping[str, Any]:
    """Returns an env_config without the `config` around it that some examples have."""
    found = options if isinstance(options, Mapping) else {}
    return found["config"] if isinstance(found.get("config"), Mapping) else found


def _example(job: Job) -> str | None:
    """Returns jrl's environment for an environment of RLlib's examples."""
    given = job.raw.get("env")
    path = registry.importable(given) if isinstance(given, str | type) else None
    if not path or not path.startswith("ray.rllib.") or _unwrapped(job.raw.get("env_config")).get("continuous"):
        return None
    return _EXAMPLES.get(path.rpartition(":")[2])


@rule("action_mask_key")
def _mask(job: Job, key: str, value: Any) -> None:
    if value == "action_mask":
        return job.drop(key, "action_mask: what jrl reads")
    return job.lack(key, f"call the item of the observation action_mask, not {value}")


@rule("remote_env_batch_wait_ms")
def _wait(job: Job, key: str, value: Any) -> None:
    if not job.given.get("remote_worker_envs"):
        return job.drop(key, "it counts with remote_worker_envs only")
    if job.given.get("batch_mode") == "complete_episodes":
        return job.drop(key, "whole episodes are collected from environments that wait for each other")
    return job.put(key, "env.batch_wait_ms", value)


@rule("num_env_runners")
def _runners(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if sizes.runners is None:
        return None
    if job.from_data:
        return job.drop(key, NO_COLLECTION)
    note = "processes by Ray; 0 is faster where stepping is cheap" if value else ""
    job.put(key, "env_runners.num", sizes.runners, note)
    if "num_envs_per_env_runner" in job.given or job.settled("env.num_envs") is not None:
        return None
    note = "num_envs_per_env_runner says how many each has, by default 1 in RLlib"
    if sizes.num_envs != DEFAULT_ENVS:
        note = f"the nearest to {DEFAULT_ENVS} that {sizes.runners} runners share: {note}"
    return job.put(key, "env.num_envs", sizes.num_envs, note)


@rule("num_envs_per_env_runner")
def _envs_each(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    job.put(key, "env.num_envs", sizes.num_envs, f"{value} x {max(1, sizes.runners or 0)} runners")


@rule("observation_filter")
def _filter(job: Job, key: str, value: Any) -> None:
    if value not in ("NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"):
        return job.wrong(key, "NoFilter or MeanStdFilter", value)
    if value == "NoFilter" and "normalize_obs" not in job.fields:
        return job.drop(key, "NoFilter: not set")
    return job.put(key, "algo.normalize_obs", value != "NoFilter")


@rule("num_gpus", "num_learners")
def _devices(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if key == "num_gpus" and value == 0:
        return job.drop(key, "jrl learns on all accelerators that it finds: JAX_PLATFORMS=cpu hides them")
    if isinstance(value, float) and value != int(value):
        return job.drop(key, f"a part of a GPU is XLA_PYTHON_CLIENT_MEM_FRACTION={value:g}")
    if not isinstance(value, int | float) or value <= 1 or job.given.get("_fake_gpus"):
        return job.drop(key, "see devices.fake" if job.given.get("_fake_gpus") else "one device, or all there are")
    if not sizes.shared:
        return job.drop(key, f"{sizes.num_envs} environments cannot be shared by {sizes.devices}: see devices.learners")
    return job.put(key, "devices.learners", list(range(sizes.devices)))


@rule("_fake_gpus")
def _fake(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if not value or sizes.devices < 2:
        return job.drop(key, "false: not set" if not value else "there is one device")
    if not sizes.shared:
        return job.drop(key, f"{sizes.num_envs} environments cannot be shared by {sizes.devices}")
    return job.put(key, "devices.fake", sizes.devices)


# ---------------------------------------------------------------- batches


@rule("rollout_fragment_length")
def _fragment(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if job.from_data:
        job.drop(key, NO_COLLECTION)
    elif value == "auto":
        job.drop(key, "auto: rollout.length follows from the batch")
    elif job.replays:
        if sizes.train_every:
            job.put(key, "replay.train_every", sizes.train_every, f"fragments of {sizes.fragment}")
            if "training_intensity" not in job.given and sizes.settled_rate is None:
                job.put(key, "replay.updates_per_step", sizes.updates_per_step, "one update for each round of them")
    elif sizes.length == sizes.fragment:
        job.put(key, "rollout.length", sizes.length)
    else:
        job.drop(key, f"a rollout is the share of an environment in train_batch_size, {sizes.length} steps")


@rule("train_batch_size", "train_batch_size_per_learner")
def _batch(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if sizes.batch is None:
        return None  # a fault
    if key == "train_batch_size_per_learner" and job.given.get("train_batch_size") is not None:
        return job.drop(key, "train_batch_size is given, too")
    if job.replays and sizes.sequence:
        steps = sizes.sequence + (job.number("replay_buffer_config.replay_burn_in", least=0) or 0)
        note = f"sequences of {steps} steps for {sizes.batch} rows"
        return job.put(key, "replay.batch_size", math.ceil(sizes.batch / steps), note)
    if job.replays:
        return job.put(key, "replay.batch_size", sizes.batch)
    split = f"{sizes.num_envs} environments x {sizes.length} steps = {sizes.rows} rows"
    exact = split if sizes.rows == sizes.batch else f"the nearest: {split}, not {sizes.batch}"
    if not (sizes.sequences and sizes.fragment):
        job.put(key, "rollout.length", sizes.length, exact)
    if not sizes.sequences:
        return None
    if "num_minibatches" in job.fields and "minibatch_size" not in job.given:
        return _minibatches(job, key, value)
    return job.drop(key, f"an update is of {split}") if sizes.fragment else None


@rule("minibatch_size")
def _minibatches(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if sizes.minibatches is None:
        if "num_minibatches" not in job.fields:
            job.drop(key, f"{job.algo} makes one gradient step of a rollout")
        return
    rows = sizes.rows // sizes.minibatches
    note = f"{sizes.minibatches} x {rows} rows"
    if rows != sizes.minibatch:
        note = f"the nearest that divides {sizes.rows} rows: {note}, not {sizes.minibatch}"
    job.put(key, "algo.num_minibatches", sizes.minibatches, note)


@rule("training_intensity")
def _intensity(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if job.from_data:
        return job.drop(key, NO_COLLECTION)
    if not job.replays or sizes.train_every is None:
        return job.drop(key, f"{job.algo} keeps no replay" if not job.replays else "0: not set")
    if "rollout_fragment_length" not in job.given:
        job.put(key, "replay.train_every", sizes.train_every)
    updates = round(sizes.updates_per_step * sizes.train_every)
    return job.put(key, "replay.updates_per_step", sizes.updates_per_step, f"{updates} of {sizes.train_every} steps")


# ---------------------------------------------------------------- hyper-parameters


def _schedule(value: Any) -> tuple[Any, str]:
    """Returns a number or schedule as jrl takes it, and what was changed."""
    if not isinstance(value, list | tuple) or not value:
        return value, ""
    points = [list(point) if isinstance(point, list | tuple) else point for point in value]
    if isinstance(points[0], list) and points[0] and points[0][0] != 0:
        return [[0, *points[0][1:]], *points], "constant up to its first entry"
    return points, ""


@rule("lr", "lr_schedule")
def _lr(job: Job, key: str, value: Any) -> None:
    for other in ("lr_schedule", "critic_lr") if key == "lr" else ():
        if other in job.given and (other != "critic_lr" or job.algo in _WITH_CRITICS):
            return job.drop(key, f"{other} takes its place")
    return job.put(key, "algo.lr", *_schedule(value))


@rule("entropy_coeff", "entropy_coeff_schedule")
def _entropy(job: Job, key: str, value: Any) -> None:
    if job.replays:
        return job.drop(key, f"{job.algo} has none")
    if key == "entropy_coeff" and "entropy_coeff_schedule" in job.given:
        return job.drop(key, "entropy_coeff_schedule takes its place")
    return job.put(key, "algo.ent_coef", *_schedule(value))


@rule("grad_clip")
def _grad_clip(job: Job, key: str, value: Any) -> None:
    kind = job.given.get("grad_clip_by", "global_norm")
    name, by_default = _CLIPS.get(kind, ""), job.fields.get("max_grad_norm")
    if not name:
        return job.wrong("grad_clip_by", "global_norm, norm or value", kind)
    if value is None and by_default is None:
        return job.drop(key, "null: no clipping")
    if value is None:
        return job.put(key, "algo.max_grad_norm", None, "no clipping")
    if name != "max_grad_norm" and name in job.fields and by_default is not None:
        job.put(key, "algo.max_grad_norm", None, f"the {kind} is clipped instead")
    note = "RLlib's IMPALA of the old stack sums over the batch: for the mean this is less clipping"
    return job.put(key, f"algo.{name}", value, note if job.algo == "impala" else "")


@rule("grad_clip_by")
def _grad_clip_by(job: Job, key: str, value: Any) -> None:
    if "grad_clip" not in job.given:
        return job.drop(key, "there is no grad_clip")
    job.lines.append(f"{job.prefix}{key} -> which of max_grad_norm, max_leaf_norm, max_grad_value: {value}")
    return None


@rule("lambda")
def _lambda(job: Job, key: str, value: Any) -> None:
    if "vtrace_lambda" in job.fields:
        return job.drop(key, "RLlib's V-trace does not read it: jrl's is algo.vtrace_lambda, 1 is as in RLlib")
    if job.algo == "marwil":
        if value == 1:
            return job.drop(key, "1: returns go to the episode's end")
        return job.lack(key, "marwil takes returns to the episode's end, which is lambda 1")
    if job.given.get("use_gae") is False:
        return job.drop(key, "use_gae is false")
    return job.put(key, "algo.gae_lambda", value)


@rule("use_gae")
def _use_gae(job: Job, key: str, value: Any) -> None:
    if job.replays:
        return job.drop(key, "advantages are returns less the value" if job.algo == "marwil" else "there is none")
    if value or "gae_lambda" not in job.fields:
        return job.drop(key, "true: what jrl does" if value else f"{job.algo} has V-trace")
    return job.put(key, "algo.gae_lambda", 1.0, "the return to the end of the rollout")


@rule("vf_clip_param")
def _value_clip(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        return job.wrong(key, "a number above 0", value)
    if math.isinf(value):
        return job.drop(key, "no bound")
    note = f"RLlib bounds the squared error by {value:g}, jrl how far the value moves"
    return job.put(key, "algo.value_clip_eps", math.sqrt(value), note)


@rule("vf_loss_coeff")
def _value_loss(job: Job, key: str, value: Any) -> None:
    number = job.number(key, whole=False)
    if number is not None:
        twice = job.algo == "ppo"
        note = f"2 x {number:g}, of half the squared error" * twice
        job.put(key, "algo.vf_coef", number * (2 if twice else 1), note)


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
        note = "it stays so: algo.kl_target would adapt it" if value and "kl_target" not in job.given else ""
        return job.put(key, "algo.kl_coef", value or None, note)
    if coefficient == 0:
        return job.drop(key, "kl_coeff is 0")
    if coefficient is None and "kl_coef" in job.fields:
        job.put(key, "algo.kl_coef", 0.2, "where it starts, as RLlib's")
    return job.put(key, "algo.kl_target", value)


@rule("target_network_update_freq")
def _target(job: Job, key: str, value: Any) -> None:
    if job.algo in _WITH_CRITICS:
        return job.drop(key, f"{job.algo} moves its targets with every step, by algo.tau")
    if job.algo != "dqn":
        return job.put(key, "algo.target_update_every", value)
    number = job.number(key, least=0)
    if number is None:
        return None
    per_step = job.sizes.updates_per_step
    note = f"{number} environment steps x {per_step:g} gradient steps of each"
    return job.put(key, "algo.target_update_every", max(1, round(number * per_step)), note)


@rule("num_atoms")
def _atoms(job: Job, key: str, value: Any) -> None:
    number = job.number(key, least=1)
    if number is None:
        return None
    if number == 1:
        return job.drop(key, "1: the mean, as algo.head expected")
    if job.settled("algo.head") is None:
        job.put(key, "algo.head", "c51")
    return job.put(key, "algo.num_atoms", number)


@rule("epsilon")
def _epsilon(job: Job, key: str, value: Any) -> None:
    if job.algo != "dqn":
        return job.drop(key, "of RMSprop: the optimizer is Adam")
    if "exploration_config" in job.given:
        return job.drop(key, "exploration_config takes its place")
    points, note = _schedule(value)
    return job.put(key, "algo.exploration", {"name": "epsilon_greedy", "epsilon": points}, note)


@rule("exploration_config")
def _exploration(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, "it is empty")
    try:
        found = exploration.from_rllib(value, job.source)
    except InputError as e:
        job.faults += e.errors
        return None
    return job.put(key, "algo.exploration", found)


@rule("smooth_target_policy")
def _smooth(job: Job, key: str, value: Any) -> None:
    if value and job.source == "ddpg" and "target_noise" not in job.given:
        return job.put(key, "algo.target_noise", job.fields["target_noise"])
    if value:
        return job.drop(key, "true: see algo.target_noise")
    return job.put(key, "algo.target_noise", 0.0)


@rule("h_function_epsilon")
def _rescaling(job: Job, key: str, value: Any) -> None:
    number = job.number(key, least=0, whole=False)
    if number is not None:
        same = math.isclose(number, _RESCALING)
        job.drop(key, f"{_RESCALING:g}: what jrl has" if same else f"jrl's is {_RESCALING:g}, as the paper's")


# ---------------------------------------------------------------- networks


@rule(*(f"{model}.fcnet_hiddens" for model in ("model", _POLICY, _CRITICS)))
def _widths(job: Job, key: str, value: Any) -> None:
    policy, widths = job.given.get(f"{_POLICY}.fcnet_hiddens"), list(value) if isinstance(value, tuple) else value
    of_critics = KEYS[key].name == f"{_CRITICS}.fcnet_hiddens"
    if job.algo in _WITH_CRITICS and of_critics and policy is not None and policy != value:
        return job.put(key, "network.critic_hidden", widths)
    return _of_policy(job, key, widths, "fcnet_hiddens", "network.hidden")


@rule(*(f"{model}.fcnet_activation" for model in ("model", _POLICY, _CRITICS)))
def _activation(job: Job, key: str, value: Any) -> None:
    name = _ACTIVATIONS.get(str(value).rpartition(".")[2].lower())
    if name is None:
        return job.drop(key, f"{value}: choose network.activation of {', '.join(dict.fromkeys(_ACTIVATIONS.values()))}")
    return _of_policy(job, key, name, "fcnet_activation", "network.activation")


def _of_policy(job: Job, key: str, value: Any, last: str, ours: str) -> None:
    """Translates a key of networks that jrl makes alike for policy and critics: the policy's value counts."""
    policy, critics = (job.given.get(f"{model}.{last}") for model in (_POLICY, _CRITICS))
    of_model = key.startswith("model.")
    if job.algo not in _WITH_CRITICS:
        policy = critics = None
        if not of_model:
            return job.drop(key, f"{job.algo} has no networks of that name")
    if of_model and (policy is not None or critics is not None):
        return job.drop(key, "policy and critics have their own")
    if policy is not None and KEYS[key].name == f"{_CRITICS}.{last}":
        same = policy == critics
        return job.drop(key, "as the policy's" if same else f"the policy's count, {policy}, for the critics, too")
    return job.put(key, ours, value)


@rule(*SWITCHES)
def _use_core(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, bool):
        return job.wrong(key, "true or false", value)
    if not value:
        return job.drop(key, "false: not set")
    if all(job.given.get(switch) for switch in SWITCHES):
        if KEYS[key].name == "model.use_attention":
            job.wrong(key, "either this or model.use_lstm", value)
        return None
    note = ""
    if not job.replays and "model.vf_share_layers" not in job.given and "vf_share_layers" not in job.given:
        note = "policy and value have one each: network.shared true makes it one, as in RLlib's old models"
    job.put(key, "network.core.name", job.core, note)
    if job.sizes.fitted is not None:
        note = f"minibatches are of whole sequences, of {job.sizes.sequence} steps"
        job.put(key, "algo.num_minibatches", job.sizes.fitted, note)
    return None


def _is_off(job: Job, key: str, core: str = "") -> bool:
    """Returns whether a key has no effect without its core, and reports it."""
    if job.core is None:
        job.drop(key, "there is no memory: use_lstm and use_attention are off")
    elif core and job.core != core:
        job.drop(key, f"{'use_lstm' if core == 'lstm' else 'use_attention'} is off")
    else:
        return False
    return True


@rule("model.max_seq_len")
def _sequence(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if not _is_off(job, key) and sizes.sequence is not None:
        note = f"the nearest that divides a rollout of {sizes.steps} steps, not {value}" * (sizes.sequence != value)
        job.put(key, "network.max_seq_len", sizes.sequence, note)


@rule(*dict.fromkeys(row.name for row in GROUPS["Memory"] if row.name.startswith(("model.attention_", "model.lstm_"))))
def _of_core(job: Job, key: str, value: Any) -> None:
    row = KEYS[key]
    is_lstm = row.name.startswith("model.lstm_")
    if _is_off(job, key, "lstm" if is_lstm else "gtrxl"):
        return None
    if is_lstm and ".use_prev" in row.ours:
        for ours in row.ours.split(", "):
            job.put(key, ours, bool(value))
        return None
    if ".use_prev" in row.ours:
        number = job.number(key, least=0)
        note = "the latest one: memory has those before" if number and number > 1 else ""
        return None if number is None else job.put(key, row.ours, number > 0, note)
    if row.name == "model.attention_memory_training" and "model.attention_memory_inference" in job.given:
        return job.drop(key, "jrl trains with the memory that it acts with: attention_memory_inference")
    return job.put(key, row.ours, value)


# ---------------------------------------------------------------- replay


@rule("replay_buffer_config.type")
def _buffer(job: Job, key: str, value: Any) -> None:
    name = str(value).rpartition(".")[2].strip("'>")
    if any(other in name for other in ("Fifo", "MixIn")):
        return job.drop(key, f"{name}: jrl's keeps the latest transitions")
    if re.fullmatch(r"(MultiAgent|Local|Simple)?(Prioritized)?(Episode)?ReplayBuffer", name) is None:
        return job.lack(key, f"{name}: replay is uniform or prioritized, and keeps the latest transitions")
    if "replay_buffer_config.prioritized_replay" in job.given:
        return job.drop(key, "prioritized_replay decides")
    return job.put(key, "replay.prioritized", "Prioritized" in name)


@rule(*(f"replay_buffer_config.{name}" for name in ("alpha", "beta", "eps")))
def _priority(job: Job, key: str, value: Any) -> None:
    which = KEYS[key].name.rpartition(".")[2]
    end, steps = (job.given.get(k) for k in _ANNEALING)
    if which == "beta" and end is not None and steps is not None:
        value = [[0, value], [steps, end]]
    job.put(key, f"replay.priority_{which}", value)
    decided = {"replay_buffer_config.type", "replay_buffer_config.prioritized_replay"} & job.given.keys()
    if job.replays and not decided and "prioritized" not in job.tree.get("replay", {}):
        job.put(key, "replay.prioritized", True, "it has effect only so")


@rule(*_ANNEALING)
def _annealing(job: Job, key: str, value: Any) -> None:
    needed = (*_ANNEALING, "replay_buffer_config.beta")
    if not all(k in job.given for k in needed):
        return job.drop(key, f"a schedule of replay.priority_beta needs all of {', '.join(needed)}")
    job.lines.append(f"{job.prefix}{key} -> replay.priority_beta: {value}  (in its schedule)")
    return None


@rule("replay_buffer_config.capacity")
def _capacity(job: Job, key: str, value: Any) -> None:
    number = job.number(key, least=1)
    if number is None:
        return None
    unit = job.given.get("replay_buffer_config.storage_unit", "sequences" if job.source in CORES else "")
    steps = job.sizes.sequence
    if not steps or not job.replays or not str(unit).lower().endswith("sequences"):
        return job.put(key, "replay.capacity", number)
    return job.put(key, "replay.capacity", number * steps, f"{number} sequences of {steps} steps")


@rule("replay_buffer_config.replay_sequence_length")
def _replayed(job: Job, key: str, value: Any) -> None:
    without = job.core is None or not job.replays
    job.drop(key, "without memory what is replayed are transitions" if without else KEYS[key].note)


@rule("replay_buffer_config.replay_zero_init_states")
def _zero(job: Job, key: str, value: Any) -> None:
    if not _is_off(job, key):
        job.drop(key, KEYS[key].note)


# ---------------------------------------------------------------- evaluation, the user's own functions


@rule("evaluation_interval")
def _interval(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, f"{value}: no evaluation during training")
    if not job.given.get("min_sample_timesteps_per_iteration"):
        steps = job.sizes.iteration(job)
        job.put(key, "run.report_every", steps, f"a result row covers an iteration of {job.steps(steps)}")
    return job.put(key, "evaluation.interval", value)


@rule("evaluation_config")
def _evaluation_config(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        return job.wrong(key, "a mapping", value)
    if not value:
        return job.drop(key, "it is empty")
    own = {row.name for row in (*GROUPS["Environment"], *GROUPS["Exploration"]) if row.names}
    raw = dict(canonical(value))
    inner = Job(job.algo, job.source, job.config_class, raw, prefix=f"{key}.", inside="evaluation.config.")
    for name, given in raw.items():
        row = KEYS.get(name)
        if row and row.name == "explore":
            inner.lines.append(f"{inner.prefix}{name} -> evaluation.explore: {shown(given)}")
            job.set("evaluation.explore", given, name)
        elif row and row.name not in own and row.ours:
            inner.drop(name, "evaluation has its own environments and exploration, all else is the run's")
        else:
            translate(inner, [name])
    if inner.tree:
        job.set("evaluation.config", inner.tree, key)
    return job.take_report(inner)


@rule("callbacks", "env_task_fn", "custom_evaluation_function")
def _function(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, "it is empty")
    paths = [registry.importable(x) for x in (value if isinstance(value, list | tuple) else [value])]
    if all(path and path.startswith("ray.rllib") for path in paths):
        return job.drop(key, "RLlib's own, which does nothing")
    if None in paths:
        return job.lack(key, f"{str(value)[:60]!r} is not the path of a class or function, package.module:name")
    if KEYS[key].name == "callbacks":
        return job.put(key, "custom.callbacks", paths, "derive it from jrl.callbacks.Callbacks")
    return job.put(key, KEYS[key].ours, paths[0])


@rule("min_sample_timesteps_per_iteration", "min_train_timesteps_per_iteration")
def _least(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, f"{value}: not set")
    if job.from_data:
        return job.put(key, "run.report_every", job.sizes.iteration(job), f"updates of {job.sizes.drawn} rows")
    return job.put(key, KEYS[key].ours, value)
