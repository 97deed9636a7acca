"""Rules for data sets, the algorithms that learn from them alone, and episodes that clients play."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from jrl import registry
from jrl.rllib import policy_server
from jrl.rllib.table import KEYS
from jrl.rllib.translation import NO_COLLECTION, Job, rule
from jrl.settings import datasets
from jrl.settings.external import ExternalConfig

_FORMATS = {"json": "rllib-json", "parquet": "rllib-parquet"}
# RLlib's importance sampling weighs each step by the ratios up to it
_ESTIMATORS = {
    "is": "pdis", "importancesampling": "pdis", "wis": "wpdis", "weightedimportancesampling": "wpdis", "dm": "dm",
    "directmethod": "dm", "dr": "dr", "doublyrobust": "dr",
}  # fmt: skip
_SPACES = {"observation_space": "external.observation", "action_space": "external.action"}


# ---------------------------------------------------------------- inputs


@rule("input_")
def _input(job: Job, key: str, value: Any) -> None:
    if value == datasets.SAMPLER:
        return job.drop(key, "sampler: what jrl does")
    if job.with_clients:
        return _clients(job, key, value)
    if not job.replays:
        return job.lack(key, f"{job.algo} learns from its own rollouts: bc, marwil, iql, cql and dqn learn from data")
    if value == "dataset":
        config = job.given.get("input_config")
        value = (config.get("paths") or config.get("path")) if isinstance(config, Mapping) else None
        if not value:
            return job.wrong("input_config", "a mapping with paths, which input dataset reads", config)
    if callable(value):
        if inspect.isclass(value) or inspect.signature(value).parameters:
            reason = "RLlib's readers take an IOContext: write a function () -> EpisodeStore (docs/data.md)"
            return job.lack(key, reason)
        return job.put(key, "data.input", registry.reference(value))
    paths = list(value) if isinstance(value, Mapping | list | tuple) else [value]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        return job.wrong(key, "a path, a glob, a list of them, or {sampler: 0.4, path: 0.6}", value)
    for path in paths:
        if path.startswith("d4rl."):
            return job.lack(key, f"{path}: data.input names the *.hdf5 file of D4RL, once it is on this machine")
        if "://" in path:
            return job.lack(key, f"{path} is not on this machine: copy it, data.input names files")
    note = "an exact split of each batch" if isinstance(value, Mapping) else ""
    return job.put(key, "data.input", list(value) if isinstance(value, tuple) else value, note)


def _clients(job: Job, key: str, value: Any) -> None:
    """Makes the section `external` of an input that is PolicyServerInput: a run of `python -m jrl.serve`."""
    config = job.given.get("input_config")
    host, port = policy_server.address(value, config if isinstance(config, Mapping) else {})
    start = "clients play: start it with python -m jrl.serve CONFIG; they use PolicyClient of jrl/serve/client.py"
    if isinstance(port, int) and not isinstance(port, bool):
        job.put(key, "external.port", port, start)
    else:
        job.put(key, "external.port", ExternalConfig().port, f"jrl's port; {start}")
    if isinstance(host, str) and host:
        local = host in ("localhost", "127.0.0.1", "::1")
        job.put(key, "external.host", host, "" if local else "others reach it with a token alone: external.token_file")
    if job.given.get("env") or job.settled("env.id") is not None or job.inside:
        return
    if job.settled("external.observation") is not None or job.settled("external.spaces") is not None:
        return
    job.faults += [
        f"{name} is missing: say what clients observe and choose as {ours} does, e.g. observation_space: {{box: [4]}} "
        "and action_space: {discrete: 2}, or name an environment with these spaces"
        for name, ours in _SPACES.items()
        if name not in job.given
    ]


@rule(*_SPACES)
def _space(job: Job, key: str, value: Any) -> None:
    if not job.with_clients:
        return job.drop(key, "spaces come from the environment")
    found = policy_server.space(value, acts=key == "action_space")
    if found is None:
        return job.wrong(key, "a space of Gymnasium, or one as {box: [4]} and {discrete: 2}", str(value))
    return job.put(key, _SPACES[key], found)


@rule("input_config")
def _input_config(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        return job.wrong(key, "a mapping", value)
    if job.with_clients:
        return job.drop(key, "address and port are of external")
    if job.given.get("input_") != "dataset":
        return job.drop(key, "it is read with input dataset alone")
    if found := _FORMATS.get(str(value.get("format"))):
        job.put(key, "data.format", found)
    if unknown := value.keys() - {"format", "path", "paths"}:
        job.drop(f"{key}.{', '.join(sorted(map(str, unknown)))}", "of Ray Data")
    return None


@rule("input_read_method")
def _method(job: Job, key: str, value: Any) -> None:
    name = str(getattr(value, "__name__", value))
    found = _FORMATS.get(name.removeprefix("read_")) if name.startswith("read_") else None
    if found is None:
        return job.lack(key, KEYS[key].note)
    if job.given.get("input_", datasets.SAMPLER) == datasets.SAMPLER:
        return job.drop(key, "there is no input")
    return job.put(key, "data.format", found)


@rule("dataset_num_iters_per_learner")
def _passes(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if not job.from_data:
        return job.drop(key, "the run does not learn from data alone")
    job.put(key, "data.updates_per_iteration", sizes.passes)
    if "evaluation_interval" in job.given or "min_train_timesteps_per_iteration" in job.given:
        return None
    return job.put(key, "run.report_every", sizes.iteration(job), "a result row covers an iteration")


@rule("input_evaluation", "off_policy_estimation_methods")
def _estimators(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, "none is asked for")
    if job.given.get("input_", datasets.SAMPLER) == datasets.SAMPLER:
        return job.drop(key, "it is of samples from files, and there are none")
    if value in ("simulation", ["simulation"], ("simulation",)):
        return job.drop(key, "simulation: evaluation.interval plays in env.id")
    given = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    kinds = [x.get("type") if isinstance(x, Mapping) else x for x in given]
    names = [str(getattr(kind, "__name__", kind)).strip("<>'\" ").rpartition(".")[2].lower() for kind in kinds]
    names = [name for name in names if name != "simulation"]
    if unknown := [name for name in names if name not in _ESTIMATORS]:
        return job.lack(key, f"there is no estimator {unknown[0]}: data.estimate.methods has is, wis, dm, dr and more")
    methods = list(dict.fromkeys(_ESTIMATORS[name] for name in names))
    return job.put(key, "data.estimate", {"methods": methods}, KEYS[key].note)


# ---------------------------------------------------------------- outputs


@rule("output")
def _output(job: Job, key: str, value: Any) -> None:
    if job.from_data:
        return job.drop(key, NO_COLLECTION)
    if isinstance(value, Mapping):  # the section itself
        return job.put(key, "data.output", value)
    config = job.given.get("output_config") or {}
    path = config.get("path") if value == "dataset" and isinstance(config, Mapping) else value
    if not isinstance(path, str) or "<" in path or "://" in path:
        return job.lack(key, f"{str(path)[:60]!r} is no directory of this machine, which data.output.path names")
    if path == "logdir":
        return job.put(key, "data.output.path", None, "logdir: data in the run directory")
    return job.put(key, "data.output.path", path)


@rule("output_config", "output_max_file_size", "output_compress_columns")
def _output_files(job: Job, key: str, value: Any) -> None:
    name = KEYS[key].name
    if job.given.get("output") is None:
        return job.drop(key, "nothing is written: output is not set")
    if name == "output_max_file_size":
        size = job.number(key, least=1, whole=False)
        return None if size is None else job.put(key, "data.output.max_file_mb", size / 2**20)
    if name == "output_compress_columns":
        return job.put(key, "data.output.compress", bool(value), KEYS[key].note)
    if not isinstance(value, Mapping):
        return job.wrong(key, "a mapping", value)
    if found := _FORMATS.get(str(value.get("format"))):
        job.put(key, "data.output.format", found)
    if unknown := value.keys() - {"format", "path"}:
        job.drop(f"{key}.{', '.join(sorted(unknown))}", "files are cut by data.output.max_file_mb alone")
    return None


# ---------------------------------------------------------------- BC, MARWIL, CQL, IQL, DT


@rule("beta")
def _beta(job: Job, key: str, value: Any) -> None:
    if job.algo == "bc":
        return job.drop(key, "bc has none: it is marwil with beta 0" if not value else "bc imitates all alike")
    return job.put(key, "algo.beta", value)


@rule("burnin_len")
def _burn_in(job: Job, key: str, value: Any) -> None:
    if not value or job.core is None:
        return job.drop(key, "0: not set" if not value else "there is no memory to warm up")
    return job.put(key, "replay.burn_in", value)


@rule("bc_iters")
def _imitation(job: Job, key: str, value: Any) -> None:
    number = job.number(key, least=0)
    if number is None:
        return None
    each = job.sizes.iteration(job) if job.from_data else 1
    return job.put(key, "algo.bc_updates", number * each, f"{number} iterations of {each} updates" * (each > 1))


@rule("lagrangian", "lagrangian_thresh")
def _lagrangian(job: Job, key: str, value: Any) -> None:
    if not job.given.get("lagrangian"):
        return job.drop(key, "the weight is not learned: lagrangian is off")
    gap = job.given.get("lagrangian_thresh", 5.0)
    weight = job.given.get("min_q_weight", job.settled("algo.cql_weight") or 5.0)
    if KEYS[key].name == "lagrangian" and "lagrangian_thresh" in job.given:
        return job.drop(key, "true: see lagrangian_thresh")
    for name, number in (("lagrangian_thresh", gap), ("min_q_weight", weight)):
        if not isinstance(number, int | float) or not math.isfinite(number) or (name == "min_q_weight" and not number):
            return job.wrong(name, "a number", number)
    return job.put(key, "algo.cql_target_gap", gap / weight, f"{gap:g} / min_q_weight {weight:g}")
