"""Rules for memory: LSTM and attention, the sequences that they are trained on, and R2D2."""

import math
from typing import Any

from jrl.migrate.job import RULES, WITH_MEMORY, Job, rule
from jrl.migrate.tables import KEYS

_SWITCHES = {"lstm": "model.use_lstm", "gtrxl": "model.use_attention"}
SWITCHES = frozenset(_SWITCHES.values())
_EPSILON = 1e-3  # of the rescaling function, in the paper, RLlib and here


def begin(job: Job) -> None:
    """Sets what follows from the algorithm's name: its core, and RLlib's default sequences."""
    for key, value in job.implied.items():
        RULES[key](job, f"{job.source.upper()}'s {key}", value)
    if job.asked_core and not any(job.given.get(key) for key in _SWITCHES.values()):
        job.put("run", "network.core.name", job.core, f"{job.source} has a memory")


@rule(*_SWITCHES.values())
def _use(job: Job, key: str, value: Any) -> None:
    name = KEYS[key].name
    if not isinstance(value, bool):
        return job.wrong(key, "true or false", value)
    if not value:
        return job.drop(key, "false: not set")
    if all(job.given.get(switch) for switch in _SWITCHES.values()):
        if name == _SWITCHES["gtrxl"]:
            job.wrong(key, f"either this or {_SWITCHES['lstm']}", value)
        return None
    note = ""
    if not job.replays and "model.vf_share_layers" not in job.given and "vf_share_layers" not in job.given:
        note = "policy and value have one each: network.shared true makes it one, as in RLlib's old models"
    job.put(key, "network.core.name", job.core, note)
    if job.sizes.fitted is not None:
        what = f"minibatches are of whole sequences, of {job.sizes.sequence} steps"
        job.put(key, "algo.num_minibatches", job.sizes.fitted, what)
    return None


def _off(job: Job, key: str, core: str = "") -> bool:
    """Returns whether a key has no effect, and reports it."""
    if job.core is None:
        job.drop(key, "there is no memory: use_lstm and use_attention are off")
    elif core and job.core != core:
        job.drop(key, f"{_SWITCHES[core].removeprefix('model.')} is off")
    else:
        return False
    return True


@rule("model.max_seq_len")
def _sequence(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if _off(job, key) or sizes.sequence is None:
        return
    note = f"the nearest that divides a rollout of {sizes.steps} steps, not {value}" if sizes.sequence != value else ""
    job.put(key, "network.max_seq_len", sizes.sequence, note)


@rule("model.lstm_cell_size")
def _size(job: Job, key: str, value: Any) -> None:
    _of_core(job, key, value, "lstm")


_ATTENTION = [key.name for key in KEYS.values() if key.name.startswith("model.attention_")]


@rule(*dict.fromkeys(_ATTENTION))
def _attention(job: Job, key: str, value: Any) -> None:
    _of_core(job, key, value, "gtrxl")


def _of_core(job: Job, key: str, value: Any, core: str) -> None:
    if _off(job, key, core):
        return None
    name, ours = KEYS[key].name, KEYS[key].ours
    inference = job.given.get("model.attention_memory_inference")
    if ours.startswith("network.use_prev"):
        number = job.number(key, least=0)
        note = "the latest one: memory has those before" if number and number > 1 else ""
        return None if number is None else job.put(key, ours, number > 0, note)
    if name == "model.attention_memory_training" and inference is not None:
        return job.drop(key, "jrl trains with the memory that it acts with: attention_memory_inference")
    return job.put(key, ours, value)


@rule("model.lstm_use_prev_action", "model.lstm_use_prev_reward", "model.lstm_use_prev_action_reward")
def _previous(job: Job, key: str, value: Any) -> None:
    if _off(job, key, "lstm"):
        return
    for ours in KEYS[key].ours.split(", "):
        job.put(key, ours, bool(value))


# ---------------------------------------------------------------- R2D2


@rule("replay_buffer_config.replay_burn_in")
def _burn_in(job: Job, key: str, value: Any) -> None:
    if not _off(job, key):
        job.put(key, "replay.burn_in", value)


@rule("replay_buffer_config.replay_sequence_length")
def _replayed(job: Job, key: str, value: Any) -> None:
    if job.core is None or not job.replays:
        return job.drop(key, "without memory what is replayed are transitions")
    return job.drop(key, "it is network.max_seq_len and replay.burn_in together")


@rule("replay_buffer_config.capacity")
def _capacity(job: Job, key: str, value: Any) -> None:
    number = job.number(key, least=1)
    if number is None:
        return
    unit = job.given.get("replay_buffer_config.storage_unit", "sequences" if job.source in WITH_MEMORY else "")
    steps = job.sizes.sequence
    if not steps or not job.replays or not str(unit).lower().endswith("sequences"):
        job.put(key, "replay.capacity", number)
        return
    job.put(key, "replay.capacity", number * steps, f"{number} sequences of {steps} steps")


@rule("replay_buffer_config.replay_zero_init_states")
def _zero(job: Job, key: str, value: Any) -> None:
    if not _off(job, key):
        job.drop(key, "sequences begin with the memory that acting had there, which burn_in brings up to date")


@rule("use_h_function")
def _rescaled(job: Job, key: str, value: Any) -> None:
    job.put(key, "algo.value_rescaling", value)


@rule("h_function_epsilon")
def _epsilon(job: Job, key: str, value: Any) -> None:
    number = job.number(key, least=0, whole=False)
    if number is not None:
        same = math.isclose(number, _EPSILON)
        job.drop(key, f"{_EPSILON:g}: what jrl has" if same else f"jrl's is {_EPSILON:g}, as the paper's")


__all__ = ["SWITCHES", "begin"]
