"""Rules for environments, runners, batches, evaluation, and the user's own functions."""

import math
from collections.abc import Mapping
from typing import Any

from jrl import registry
from jrl.migrate import server_input
from jrl.migrate.job import DEFAULT_ENVS, NOBODY, Job, canonical, rule, shown, translate
from jrl.migrate.tables import GROUPS, KEYS

# ---------------------------------------------------------------- environments, runners, batches


@rule("env")
def _env(job: Job, key: str, value: Any) -> None:
    path = None
    if server_input.is_named(value, server_input.CLIENT):
        return job.lack(
            key,
            "PolicyClient plays in a program of its own, which uses PolicyClient of jrl/serve/client.py: the config of "
            "what it plays with has input: PolicyServerInput",
        )
    if own := _own_environment(job):
        return job.put(key, "env.id", own, "jrl's, inside the compiled program")
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
    if _own_environment(job) == "RepeatAfterMe-v0":
        options = {_REPEAT.get(name, name): given for name, given in _unwrapped(value).items() if name != "continuous"}
    return job.put(key, "env.options", options)


_OWN = {"StatelessCartPole": "StatelessCartPole-v1", "RepeatAfterMeEnv": "RepeatAfterMe-v0"}
_REPEAT = {"repeat_delay": "delay", "episode_len": "episode_length"}


def _unwrapped(options: Any) -> Mapping[str, Any]:
    """Returns an env_config without the `config` around it that some examples have."""
    found = options if isinstance(options, Mapping) else {}
    return found["config"] if isinstance(found.get("config"), Mapping) else found


def _own_environment(job: Job) -> str | None:
    """Returns jrl's environment for one of RLlib's examples."""
    given = job.raw.get("env")
    path = registry.importable(given) if isinstance(given, str | type) else None
    if not path or not path.startswith("ray.rllib.") or _unwrapped(job.raw.get("env_config")).get("continuous"):
        return None
    return _OWN.get(path.rpartition(":")[2])


@rule("num_env_runners")
def _runners(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if sizes.runners is None:
        return None
    if job.from_data:
        return job.drop(key, NOBODY)
    job.put(
        key, "env_runners.num", sizes.runners, "processes by Ray; 0 is faster where stepping is cheap" if value else ""
    )
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


@rule("rollout_fragment_length")
def _fragment(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if job.from_data:
        job.drop(key, NOBODY)
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
    job.put(
        key,
        "algo.num_minibatches",
        sizes.minibatches,
        note
        if rows == sizes.minibatch
        else f"the nearest that divides {sizes.rows} rows: {note}, not {sizes.minibatch}",
    )


@rule("training_intensity")
def _intensity(job: Job, key: str, value: Any) -> None:
    sizes = job.sizes
    if job.from_data:
        return job.drop(key, NOBODY)
    if not job.replays or sizes.train_every is None:
        return job.drop(key, f"{job.algo} keeps no replay" if not job.replays else "0: not set")
    if "rollout_fragment_length" not in job.given:
        job.put(key, "replay.train_every", sizes.train_every)
    updates = round(sizes.updates_per_step * sizes.train_every)
    return job.put(key, "replay.updates_per_step", sizes.updates_per_step, f"{updates} of {sizes.train_every} steps")


@rule("sample_async")
def _sample_async(job: Job, key: str, value: Any) -> None:
    job.put(key, "rollout.mode", "async" if value else "sync")


@rule("batch_mode")
def _batch_mode(job: Job, key: str, value: Any) -> None:
    if value == "complete_episodes" and job.replays and job.core:
        return job.drop(key, "sequences from replay end with their episodes by themselves")
    return job.put(key, "rollout.batch_mode", value)


@rule("remote_env_batch_wait_ms")
def _wait(job: Job, key: str, value: Any) -> None:
    if not job.given.get("remote_worker_envs"):
        return job.drop(key, "it counts with remote_worker_envs only")
    if job.given.get("batch_mode") == "complete_episodes":
        return job.drop(key, "whole episodes are collected from environments that wait for each other")
    return job.put(key, "env.batch_wait_ms", value)


@rule("observation_filter")
def _filter(job: Job, key: str, value: Any) -> None:
    if value not in ("NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"):
        return job.wrong(key, "NoFilter or MeanStdFilter", value)
    if value == "NoFilter" and "normalize_obs" not in job.fields:
        return job.drop(key, "NoFilter: not set")
    return job.put(key, "algo.normalize_obs", value != "NoFilter")


@rule("action_mask_key")
def _mask(job: Job, key: str, value: Any) -> None:
    if value == "action_mask":
        return job.drop(key, "action_mask: what jrl reads")
    return job.lack(key, f"call the item of the observation action_mask, not {value}")


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
    return _of_evaluation(job, key, value) if value else job.drop(key, "it is empty")


def _of_evaluation(job: Job, key: str, value: Mapping[str, Any]) -> None:
    own = {key.name for key in (*GROUPS["Environment"], *GROUPS["Exploration"])}
    raw = dict(canonical(value))
    inner = Job(job.algo, job.source, job.config_class, raw, prefix=f"{key}.", inside="evaluation.config.")
    for name, given in raw.items():
        known = KEYS.get(name)
        if known and known.name == "explore":
            inner.lines.append(f"{inner.prefix}{name} -> evaluation.explore: {shown(given)}")
            job.set("evaluation.explore", given, name)
        elif known and known.name not in own and known.ours:
            inner.drop(name, "evaluation has its own environments and exploration, all else is the run's")
        else:
            translate(inner, [name])
    if inner.tree:
        job.set("evaluation.config", inner.tree, key)
    job.lines += inner.lines
    job.faults += inner.faults
    job.lacking += inner.lacking


@rule("callbacks", "env_task_fn", "custom_evaluation_function")
def _own(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, "it is empty")
    values = list(value) if isinstance(value, list | tuple) else [value]
    paths = [registry.importable(one) for one in values]
    if all(path and path.startswith("ray.rllib") for path in paths):
        return job.drop(key, "RLlib's own, which does nothing")
    if None in paths:
        return job.lack(key, f"{str(value)[:60]!r} is not the path of a class or function, package.module:name")
    if KEYS[key].name == "callbacks":
        return job.put(key, "custom.callbacks", paths, "derive it from jrl.callbacks.Callbacks")
    return job.put(key, KEYS[key].ours, paths[0])


@rule("count_steps_by")
def _count(job: Job, key: str, value: Any) -> None:
    job.put(key, "rollout.count_steps_by", value)


@rule("min_time_s_per_iteration", "min_sample_timesteps_per_iteration", "min_train_timesteps_per_iteration")
def _least(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, f"{value}: not set")
    if job.from_data and KEYS[key].ours != "run.report_every_s":
        return job.put(key, "run.report_every", job.sizes.iteration(job), f"updates of {job.sizes.drawn} rows")
    return job.put(key, KEYS[key].ours, value)
