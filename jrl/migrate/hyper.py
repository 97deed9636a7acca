"""Rules for hyper-parameters, networks and replay."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jrl.errors import InputError
from jrl.migrate import exploration_names
from jrl.migrate.job import NESTED, Job, rule
from jrl.migrate.tables import KEYS

_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "gelu": "gelu", "elu": "elu", "swish": "silu", "silu": "silu"}
_CLIPS = {"global_norm": "max_grad_norm", "norm": "max_leaf_norm", "value": "max_grad_value"}

_WITH_CRITICS = ("sac", "td3", "iql")  # beside the policy


def _schedule(value: Any) -> tuple[Any, str]:
    """Returns a number or schedule as jrl takes it, and what was changed."""
    if not isinstance(value, list | tuple) or not value:
        return value, ""
    points = [list(point) if isinstance(point, list | tuple) else point for point in value]
    if isinstance(points[0], list) and points[0] and points[0][0] != 0:
        return [[0, *points[0][1:]], *points], "constant up to its first entry"
    return points, ""


@rule("lr")
def _lr(job: Job, key: str, value: Any) -> None:
    for other in ("lr_schedule", "critic_lr"):
        if other in job.given and (other != "critic_lr" or job.algo in _WITH_CRITICS):
            return job.drop(key, f"{other} takes its place")
    return job.put(key, "algo.lr", *_schedule(value))


@rule("lr_schedule")
def _lr_schedule(job: Job, key: str, value: Any) -> None:
    job.put(key, "algo.lr", *_schedule(value))


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
    if "grad_clip" in job.given:
        job.lines.append(f"{job.prefix}{key} -> which of max_grad_norm, max_leaf_norm, max_grad_value: {value}")
    else:
        job.drop(key, "there is no grad_clip")


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
    if number is None:
        return
    twice = job.algo == "ppo"
    job.put(key, "algo.vf_coef", number * (2 if twice else 1), f"2 x {number:g}, of half the squared error" * twice)


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


# ---------------------------------------------------------------- DQN


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
        found = exploration_names.from_rllib(value, job.source)
    except InputError as e:
        job.faults += e.errors
        return None
    return job.put(key, "algo.exploration", found)


# ---------------------------------------------------------------- SAC, TD3, DDPG


@rule("initial_alpha")
def _alpha(job: Job, key: str, value: Any) -> None:
    if job.algo != "sac":
        return job.drop(key, f"{job.algo} has none")
    return job.put(key, "algo.ent_coef", value)


@rule("target_entropy")
def _target_entropy(job: Job, key: str, value: Any) -> None:
    if value == "auto":
        return job.drop(key, "auto: jrl's default is the same")
    return job.put(key, "algo.target_entropy", value)


@rule("twin_q")
def _twin(job: Job, key: str, value: Any) -> None:
    job.put(key, "algo.num_critics", 2 if value else 1)


@rule("smooth_target_policy")
def _smooth(job: Job, key: str, value: Any) -> None:
    if value and job.source == "ddpg" and "target_noise" not in job.given:
        return job.put(key, "algo.target_noise", job.fields["target_noise"])
    if value:
        return job.drop(key, "true: see algo.target_noise")
    return job.put(key, "algo.target_noise", 0.0)


@rule("target_noise", "target_noise_clip")
def _target_noise(job: Job, key: str, value: Any) -> None:
    if not job.given.get("smooth_target_policy", job.source != "ddpg"):
        return job.drop(key, "smooth_target_policy is off")
    return job.put(key, f"algo.{key}", value)


_OWN_WIDTHS = "policy_model_config.fcnet_hiddens"
_OWN_ACTIVATION = "policy_model_config.fcnet_activation"


_CRITIC_WIDTHS = "q_model_config.fcnet_hiddens"


@rule("model.fcnet_hiddens", _OWN_WIDTHS, _CRITIC_WIDTHS)
def _widths(job: Job, key: str, value: Any) -> None:
    own = job.given.get(_OWN_WIDTHS)
    if job.algo in _WITH_CRITICS and KEYS[key].name == _CRITIC_WIDTHS and own is not None and own != value:
        return job.put(key, "network.critic_hidden", list(value) if isinstance(value, tuple) else value)
    return _of_policy(job, key, value, _OWN_WIDTHS, _CRITIC_WIDTHS, "network.hidden")


@rule("model.fcnet_activation", _OWN_ACTIVATION, "q_model_config.fcnet_activation")
def _activation(job: Job, key: str, value: Any) -> None:
    name = _ACTIVATIONS.get(str(value).rpartition(".")[2].lower())
    if name is None:
        return job.drop(key, f"{value}: choose network.activation of {', '.join(dict.fromkeys(_ACTIVATIONS.values()))}")
    return _of_policy(job, key, name, _OWN_ACTIVATION, "q_model_config.fcnet_activation", "network.activation")


def _of_policy(job: Job, key: str, value: Any, policy: str, critic: str, ours: str) -> None:
    """Translates a key of networks that jrl makes alike for policy and critics: the policy's value counts."""
    own, critics, of_model = job.given.get(policy), job.given.get(critic), key.startswith("model.")
    if job.algo not in _WITH_CRITICS:
        own = critics = None
        if not of_model:
            return job.drop(key, f"{job.algo} has no networks of that name")
    if of_model and (own is not None or critics is not None):
        return job.drop(key, "policy and critics have their own")
    if own is not None and KEYS[key].name == critic:
        return job.drop(
            key, "as the policy's" if own == critics else f"the policy's count, {own}, for the critics, too"
        )
    return job.put(key, ours, list(value) if isinstance(value, tuple) else value)


@rule("model.free_log_std")
def _log_std(job: Job, key: str, value: Any) -> None:
    job.put(key, "network.state_dependent_std", not value)


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


@rule("replay_buffer_config.alpha", "replay_buffer_config.beta", "replay_buffer_config.eps")
def _priority(job: Job, key: str, value: Any) -> None:
    which = {"a": "alpha", "b": "beta", "e": "eps"}[key.rpartition(".")[2].removeprefix("prioritized_replay_")[0]]
    end, steps = (job.given.get(k) for k in _ANNEALING)
    if which == "beta" and end is not None and steps is not None:
        value = [[0, value], [steps, end]]
    job.put(key, f"replay.priority_{which}", value)
    said = ("replay_buffer_config.type", "replay_buffer_config.prioritized_replay")
    if job.replays and not any(k in job.given for k in said) and "prioritized" not in job.tree.get("replay", {}):
        job.put(key, "replay.prioritized", True, "it has effect only so")


_ANNEALING = ("final_prioritized_replay_beta", "prioritized_replay_beta_annealing_timesteps")


@rule(*_ANNEALING)
def _annealing(job: Job, key: str, value: Any) -> None:
    needed = (*_ANNEALING, "replay_buffer_config.beta")
    if not all(k in job.given for k in needed):
        job.drop(key, f"a schedule of replay.priority_beta needs all of {', '.join(needed)}")
    else:
        job.lines.append(f"{job.prefix}{key} -> replay.priority_beta: {value}  (in its schedule)")


@rule("store_buffer_in_checkpoints")
def _stored(job: Job, key: str, value: Any) -> None:
    job.put(key, "checkpoint.replay", "full" if value else "none")


@rule(*NESTED)
def _container(job: Job, key: str, value: Any) -> None:
    """Refuses or drops what is no mapping, or an empty one."""
    if isinstance(value, Mapping):
        return job.drop(key, "it is empty")
    return job.wrong(key, "a mapping", value)


__all__: list[str] = []
