"""Combinations of keys of a RunConfig that do not fit together, each with its mend.

Reads the config by its attributes only.
"""

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from jrl.config import datasets, external
from jrl.config.plan import (
    columns,
    counted_columns,
    counts_by,
    divisors,
    num_learners,
    num_parameters,
    num_pools,
    passes,
    rollout_length,
    sequence_length,
    total_steps,
)
from jrl.errors import counted, short
from jrl.fields import bounds, validation
from jrl.fields.data import traits
from jrl.fields.env import ASYNCHRONOUS, PROCESSES

Fault = tuple[tuple[str, ...], str]  # the keys that were read, the message

# what result rows have to tell of returns; first what a criterion most often names
_SCORES = {
    "episode": ("return", "length", "return_min", "return_max", "return_p10", "return_p90", "count", "window"),
    "evaluation": (
        "return", "length", "return_min", "return_max", "return_std", "length_std", "episodes", "timesteps",
        "weights_version", "timed_out", "time_s", "num_healthy_workers",
    ),
}  # fmt: skip
_METRICS = (
    "env_steps",
    "iteration",
    "updates",
    "time_s",
    "timestamp",
    *(f"{k}/{n}" for k in _SCORES for n in _SCORES[k]),
)


def faults(cfg: Any) -> Iterator[Fault]:
    """Yields every combination of values that cannot be run, with its mend."""
    key = f"stop.{counts_by(cfg)}"
    steps = cfg.stop.get(counts_by(cfg))
    if steps is not None and steps != int(steps):
        yield (key,), f"{key}: expected a whole number, got {short(steps)}"
    elif steps is not None and (message := validation.fault(int(steps), bounds.Steps, key)):
        yield (key,), message
    yield from datasets.faults(cfg)
    yield from external.faults(cfg)
    own = getattr(cfg.algo, "validate", None)
    for message in own() if callable(own) else ():
        yield ("algo",), f"algo: {message}"
    if cfg.checkpoint.exact and cfg.checkpoint.every is None:
        yield (
            ("checkpoint.exact",),
            "checkpoint.exact needs checkpoint.every: checkpoints by the clock are never twice at the same step: "
            f"set it, e.g. checkpoint.every={_tenth(cfg)}",
        )
    yield from _network_faults(cfg)
    yield from _episode_faults(cfg)
    yield from _runtime_faults(cfg.runtime)
    yield from _evaluation_faults(cfg)
    yield from _collection_faults(cfg)
    yield from _device_faults(cfg.devices)
    yield from split_faults(cfg, num_learners(cfg) or 1)


def split_faults(cfg: Any, learners: int) -> Iterator[Fault]:
    """Yields what cannot be split over so many devices that learn, and the devices or runners that collect."""
    minibatches = passes(cfg.algo).num_minibatches
    if isinstance(minibatches, int) and (
        message := validation.fault(minibatches, bounds.Count, "algo.num_minibatches")
    ):
        yield ("algo.num_minibatches",), message  # of a user's own Config, whose annotation has no range
        return
    sizes = list(_memory_faults(cfg))
    yield from sizes
    if sizes:
        return
    yield from _batch_faults(cfg, learners)
    if cfg.replay is not None:
        yield from _replay_faults(cfg, learners)


_MOST_BYTES = 2**40  # 1 TiB: what is smaller is measured once the spaces of the environments are known
_ROW_BYTES = 16  # of a row without its observation
_PROCESS_BYTES = 50e6  # of an environment in a process of its own


def _memory_faults(cfg: Any) -> Iterator[Fault]:
    """Yields the parts of a run that need more memory than any machine has, by a lower bound from the config alone."""
    core, replay, envs = cfg.network.core, cfg.replay, columns(cfg)
    carry = getattr(core, "memory", 1) * getattr(core, "size", 0) * getattr(core, "layers", 1)
    needed: dict[tuple[str, ...], float] = {
        ("network.hidden", "network.head_hidden", "network.core"): 16 * num_parameters(cfg),
        ("network.core", "env.num_envs"): 4 * envs * carry,
        ("rollout.length", "env.num_envs", "algo.circular_buffer_num_batches"): (
            _ROW_BYTES * envs * rollout_length(cfg) * passes(cfg.algo).circular_buffer_num_batches
        ),
    }
    if cfg.env.num_processes:
        needed["env.num_envs", PROCESSES] = _PROCESS_BYTES * cfg.env.num_processes
    if replay is not None:
        steps = max(replay.n_step) if isinstance(replay.n_step, tuple) else replay.n_step
        steps = max(steps, sequence_length(cfg) + replay.burn_in if cfg.network.recurrent else 1)
        needed["replay.batch_size", "replay.n_step", "network.max_seq_len"] = _ROW_BYTES * replay.batch_size * steps
    for keys, size in needed.items():
        if size > _MOST_BYTES:
            others = " or ".join(keys[1:])
            yield keys, f"{keys[0]}: needs {size / 2**40:,.1f} TiB of memory or more: lower it, or {others}"


def _network_faults(cfg: Any) -> Iterator[Fault]:
    network, length = cfg.network, rollout_length(cfg)
    if network.encoders and network.flatten:
        yield (
            ("network.encoders", "network.flatten"),
            "network.flatten puts all of an observation into one vector, without encoders: leave one of them out",
        )
    if network.value_inputs or network.critic_layer_norm or network.critic_hidden is not None:
        from jrl import algos

        asked = "network.value_inputs", "network.critic_layer_norm", "network.critic_hidden"
        for message in algos.critic_faults(cfg.algo, network):
            yield (*asked, "network.shared", "algo.name"), message
    if network.max_seq_len is not None and not network.recurrent:
        yield (
            ("network.max_seq_len", "network.core.name"),
            "network.max_seq_len: without memory nothing is learned from sequences: set network.core.name to lstm, "
            "gru, gtrxl or lru, or leave this out",
        )
    limit = sequence_length(cfg)
    cut = cfg.replay is None and limit > 0 and cfg.rollout.batch_mode == "truncate_episodes"
    if cut and length % limit and not traits(cfg.algo).whole_sequences:
        near = max(n for n in divisors(length) if n <= limit)
        yield (
            ("network.max_seq_len", "rollout.length"),
            f"network.max_seq_len {limit} does not divide rollout.length {length}: use {near}, or rollout.length "
            f"{-(-length // limit) * limit}",
        )


def _device_faults(devices: Any) -> Iterator[Fault]:
    for name in ("learners", "actors"):
        key, indices = f"devices.{name}", getattr(devices, name)
        if indices is None:
            continue
        if not indices:
            yield (key,), f"{key}: expected at least one index, such as [0], or null"
        elif min(indices) < 0 or len(set(indices)) < len(indices):
            yield (key,), f"{key}: expected different indices from 0, got {short(list(indices))}"
        elif devices.fake is not None and max(indices) >= devices.fake:
            yield (key, "devices.fake"), f"{key}: {max(indices)} is not among the {devices.fake} of devices.fake"


def _collection_faults(cfg: Any) -> Iterator[Fault]:
    runners, rollout = cfg.env_runners, cfg.rollout
    if rollout.mode == "sync" and rollout.max_policy_lag is not None:
        yield (
            ("rollout.max_policy_lag", "rollout.mode"),
            "rollout.max_policy_lag: without rollout.mode async no policy lags: set that, or leave this out",
        )
    if runners.ignore_env_runner_failures and runners.recreate_failed_env_runners:
        yield (
            ("env_runners.ignore_env_runner_failures", "env_runners.recreate_failed_env_runners"),
            "env_runners: ignore_env_runner_failures goes on without a runner, recreate_failed_env_runners starts "
            "another: choose one of them",
        )
    if runners.num and cfg.devices.actors is not None:
        yield (
            ("devices.actors", "env_runners.num"),
            "devices.actors: with env_runners this process does not act: leave it out, or env_runners.num 0",
        )
    if cfg.checkpoint.exact and (runners.num or not cfg.env.waits):
        keys = ("checkpoint.exact", "env_runners.num", *ASYNCHRONOUS)
        who = "env_runners" if runners.num else "environments that do not wait for each other"
        yield keys, f"checkpoint.exact: {who} never do the same twice: turn one of them off"
    if cfg.checkpoint.exact and cfg.evaluation.parallel and evaluates(cfg):
        yield (
            ("checkpoint.exact", "evaluation.parallel"),
            "checkpoint.exact: an evaluation beside training (evaluation.parallel) that is under way is not in a "
            "checkpoint: turn one of them off",
        )


def endless(cfg: Any) -> Iterator[Fault]:
    """Yields what is missing for a command, which has to end, and to evaluate, by itself."""
    if total_steps(cfg) is None:
        key = counts_by(cfg)
        near = difflib.get_close_matches(key, cfg.stop, 1)
        mend = f"rename stop.{near[0]}" if near else f"set it, e.g. stop.{key}=1000000"
        yield (f"stop.{key}", "stop"), f"stop.{key} is missing: every run needs an end: {mend}"
    yield from _metric_faults(cfg)
    if cfg.evaluation.record > 0 and not evaluates(cfg):
        mend = f"set them, e.g. evaluation.every={_tenth(cfg)}"
        message = f"evaluation.record: expected evaluations to record, got none: {mend}"
        yield ("evaluation.record", "evaluation.every", "evaluation.interval"), message


def evaluates(cfg: Any) -> bool:
    """Returns whether a run is evaluated as it learns."""
    return bool(cfg.evaluation.every or cfg.evaluation.interval)


def _tenth(cfg: Any) -> int:
    return max(1, int(cfg.stop.get(counts_by(cfg)) or 0) // 10)


def _metric_faults(cfg: Any) -> Iterator[Fault]:
    named = {f"stop.{name}": name for name in cfg.stop} | {"checkpoint.keep_best_by": cfg.checkpoint.keep_best_by}
    for key, name in named.items():
        # without evaluations there is no best checkpoint, which is no fault
        if name is not None and (fault := metric_fault(cfg, key, name, evaluated=key.startswith("stop."))):
            more = ("evaluation.every", "evaluation.interval") if name.startswith("evaluation/") else ()
            yield (key, *more), fault


def metric_fault(cfg: Any, key: str, name: str, *, evaluated: bool = True) -> str:
    """Returns why no result row has a metric that `key` names; "" where one may. The user's code may add names.

    Args:
      cfg: of the run.
      key: what names it.
      name: of the metric.
      evaluated: whether those of evaluations need some.
    """
    if any(vars(cfg.custom).values()) or not type(cfg.algo).__module__.startswith("jrl."):
        return ""
    if evaluated and name.startswith("evaluation/") and not evaluates(cfg):
        return f"{key}: there are no evaluations: set them, e.g. evaluation.every={_tenth(cfg)}"
    if "/" in name and name.split("/")[0] not in _SCORES:
        return ""
    if name.startswith(("evaluation/agent/", "evaluation/policy/")) and name.endswith("/return"):
        return ""  # of an agent or policy, whose names are known once the environments are
    return missing_metric(key, name, _METRICS)


def missing_metric(key: str, name: str, rows: Sequence[str]) -> str:
    """Returns why result rows with these keys have no metric that `key` names; "" where they do, or later will."""
    if name in rows or name in _METRICS:
        return ""
    near = [k for k in rows if k.endswith(f"/{name}")][:2] or difflib.get_close_matches(name, rows, 1)
    mend = f"did you mean {' or '.join(near)}?" if near else "such as episode/return or evaluation/return"
    return f"{key}: expected a key of the result rows, got {short(name)}, which they do not have: {mend}"


def _episode_faults(cfg: Any) -> Iterator[Fault]:
    env, rollout = cfg.env, cfg.rollout
    yield from env.faults()
    if rollout.batch_mode == "complete_episodes" and not env.waits:
        yield (
            ("rollout.batch_mode", *ASYNCHRONOUS),
            "rollout.batch_mode complete_episodes: environments that do not wait for each other leave rows empty: "
            f"leave {' and '.join(ASYNCHRONOUS)} out",
        )


def _runtime_faults(runtime: Any) -> Iterator[Fault]:
    for flag in (runtime.xla_flags or "").split():
        if not flag.startswith("--"):  # XLA would end the process
            yield (
                ("runtime.xla_flags",),
                f"runtime.xla_flags: expected --name=value, separated by spaces, got {short(flag)}",
            )
    for name in runtime.env:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            yield ("runtime.env",), f"runtime.env: {short(name)} is no name of an environment variable"
        elif name.startswith("JAX_"):
            yield (
                ("runtime.env",),
                f"runtime.env: {name[:80]} is read when jax is imported, before any config is: set it before the "
                "command",
            )


def _evaluation_faults(cfg: Any) -> Iterator[Fault]:
    found = cfg.evaluation
    if found.every is not None and found.interval is not None:
        yield (
            ("evaluation.every", "evaluation.interval"),
            "evaluation: every counts environment steps, interval result rows: choose one of them",
        )
    if found.duration == "auto" and not found.parallel:
        yield (
            ("evaluation.duration", "evaluation.parallel"),
            "evaluation.duration auto lasts as long as the training beside it: set evaluation.parallel, or a number",
        )
    counted = found.unit == "episodes" and isinstance(found.duration, int)
    if counted and found.num_envs is not None and found.num_envs > found.duration:
        yield (
            ("evaluation.num_envs", "evaluation.duration"),
            f"evaluation.num_envs {found.num_envs}: {found.duration} episodes need no more than so many environments: "
            "lower it",
        )


def _batch_faults(cfg: Any, devices: int) -> Iterator[Fault]:
    envs, length = cfg.env.num_envs, rollout_length(cfg)
    minibatches = passes(cfg.algo).num_minibatches
    minibatches = 1 if minibatches is None else minibatches
    padded = cfg.rollout.batch_mode != "truncate_episodes"  # whole episodes are, to what divides
    if min(envs, length) < 1:
        return
    if envs % devices:
        near = _near(envs, devices)
        message = f"env.num_envs {envs} is not divisible by {devices} devices: {near}"
        yield ("env.num_envs", "devices.learners", "devices.fake"), message
        return
    pools = num_pools(cfg, devices)
    if pools > 0 and envs % pools:
        near = _near(envs, pools)
        what = "env_runners" if cfg.env_runners.num else "devices that act"
        message = f"env.num_envs {envs} is not divisible by {pools} {what}: {near}"
        yield ("env.num_envs", "env_runners.num", "devices.actors"), message
    cols, unit = columns(cfg), "agent" if columns(cfg) > envs else "env"
    if cols * length == 1 and not padded and getattr(cfg.algo, "normalize_advantage", False):
        yield (
            ("algo.normalize_advantage", "env.num_envs", "rollout.length"),
            "algo.normalize_advantage: of the one row of a rollout the advantage is its own mean, and 0: nothing would "
            "be learned: use a rollout.length of 2 or more, more env.num_envs, or turn it off",
        )
    if not isinstance(minibatches, int):
        return
    keys = ("algo.num_minibatches", "env.num_envs", "rollout.length", "devices.learners", "devices.fake")
    rows, limit = cols // devices * length, sequence_length(cfg)
    if limit > 1 and length % limit == 0 and not traits(cfg.algo).whole_sequences:
        if not padded or cfg.network.max_seq_len is None:
            yield from _sequence_faults(minibatches, length // limit, cols // devices, limit, keys)
        return
    if traits(cfg.algo).whole_sequences and (own := cols // devices) % minibatches:
        below = max(n for n in divisors(own) if n <= minibatches)
        more = devices * (own + minibatches - own % minibatches)
        message = (
            f"algo.num_minibatches {minibatches} does not divide the {counted(own, 'environment')} of a device, and a "
            f"minibatch is of whole sequences: use {below}, or env.num_envs {more}"
        )
        yield keys, message
        return
    if rows % minibatches and not padded:
        below = max(n for n in divisors(rows) if n <= minibatches)
        above = min((n for n in divisors(rows) if n >= minibatches), default=0)
        step = minibatches // math.gcd(minibatches, cols // devices)
        lengths = _near(length, step)
        on = f" on each of {devices} devices" if devices > 1 else ""
        message = (
            f"the batch of {counted(cols // devices, unit)} x {counted(length, 'step')} = {counted(rows, 'row')}{on} "
            f"is not divisible by algo.num_minibatches {minibatches}: {_either([below, above])} would do, "
            f"or rollout.length {lengths}"
        )
        yield keys, message


def _sequence_faults(minibatches: int, parts: int, envs: int, length: int, keys: tuple[str, ...]) -> Iterator[Fault]:
    fits = lambda n: envs % (n // math.gcd(parts, n)) == 0
    if fits(minibatches):
        return
    below = max(n for n in divisors(parts * envs) if n <= minibatches and fits(n))
    yield (
        (*keys, "network.max_seq_len"),
        f"algo.num_minibatches {minibatches} does not divide the {parts * envs} sequences of {length} steps, {parts} "
        f"of each of {counted(envs, 'environment')} of a device: use {below}, or a smaller network.max_seq_len",
    )


def _replay_faults(cfg: Any, devices: int) -> Iterator[Fault]:
    """Yields what in the `replay` section does not fit the environments, the network or so many devices that learn."""
    if datasets.alone(cfg):
        yield from _sampling_faults(cfg, devices)
        return
    replay, envs = cfg.replay, cfg.env.num_envs
    every = replay.train_every
    if envs < 1 or (every is not None and every < 1) or (cfg.rollout.length or 1) < 1:
        return
    if every is not None and every % envs:
        mends = _near(every, envs)
        yield (
            ("replay.train_every", "env.num_envs"),
            f"replay.train_every {every} is not divisible by env.num_envs {envs}: {mends}",
        )
        return
    rows = envs * rollout_length(cfg)
    if every is not None and every != rows:
        yield (
            ("replay.train_every", "rollout.length", "env.num_envs"),
            f"replay.train_every {every} and rollout.length {cfg.rollout.length} x {counted(envs, 'env')} = "
            f"{counted(rows, 'row')} disagree: leave one of them out, or rollout.length {every // envs}",
        )
        return
    rows = counted_columns(cfg) * rollout_length(cfg)
    updates = replay.updates_per_step * rows
    if updates <= 0 or abs(updates - round(updates)) > 1e-6 * updates:
        below, above = math.floor(updates), math.ceil(updates)
        ratios = " or ".join(f"{n / rows:.6g}" for n in (below, above) if n > 0) or f"{1 / rows:.6g}"
        # the fewest rows whose updates are whole, as a multiple of the environments
        whole = math.lcm(envs, Fraction(replay.updates_per_step).limit_denominator(10_000).denominator)
        other = f", or replay.train_every {whole}" if replay.updates_per_step > 0 else ""
        yield (
            ("replay.updates_per_step", "replay.train_every", "rollout.length", "env.num_envs"),
            f"replay.updates_per_step {replay.updates_per_step:g} x {counted(rows, 'row')} per iteration = "
            f"{updates:g} updates, not a whole number above 0: replay.updates_per_step {ratios}{other}",
        )
    yield from _sampling_faults(cfg, devices)
    high = max(replay.n_step) if isinstance(replay.n_step, tuple) else replay.n_step
    span, of = max(high, replay.frame_stack or 1) + 1, ""
    if cfg.network.recurrent:
        length = sequence_length(cfg)
        span = replay.burn_in + length + (replay.frame_stack or 1) + 1
        of = f" and sequences of {replay.burn_in} (replay.burn_in) + {length} steps (network.max_seq_len)"
    need = columns(cfg) * (rollout_length(cfg) + span)
    if replay.capacity < need:
        yield (
            ("replay.capacity", "env.num_envs", "rollout.length", "replay.n_step", "network.max_seq_len"),
            f"replay.capacity {replay.capacity} is too small for {counted(envs, 'env')}{of}: at least {need}",
        )
    steps = cfg.stop.get("env_steps")
    if steps is not None and replay.learning_starts >= steps:
        yield (
            ("replay.learning_starts", "stop.env_steps"),
            f"replay.learning_starts {replay.learning_starts} is not below stop.env_steps {steps}: nothing would be "
            "learned, lower it",
        )


def _sampling_faults(cfg: Any, devices: int) -> Iterator[Fault]:
    replay, batch = cfg.replay, cfg.replay.batch_size
    if batch % devices:
        mends = _near(batch, devices)
        yield (
            ("replay.batch_size", "devices.learners", "devices.fake"),
            f"replay.batch_size {batch} is not divisible by {devices} devices: {mends}",
        )
    low, high = replay.n_step if isinstance(replay.n_step, tuple) else (replay.n_step, replay.n_step)
    if low > high:
        yield ("replay.n_step",), f"replay.n_step: expected [low, high] with low <= high, got {list(replay.n_step)}"


def _near(number: int, unit: int) -> str:
    """Returns the multiples of a unit next to a number above 0, in words."""
    return _either([number - number % unit, number + unit - number % unit])


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers if n > 0)
