"""The combinations of keys of a RunConfig that do not fit together, each with its mend.

Reads the config by its attributes only.
"""

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from jrl.plan import num_learners, num_pools, rollout_length, sequence_length, total_steps

Fault = tuple[tuple[str, ...], str]  # the keys that were read, the message


def faults(cfg: Any) -> Iterator[Fault]:
    """Every combination of values that cannot be run, with its mend."""
    for key, least in _LEAST.items():
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name, None)
        if isinstance(value, int | float) and value < least:
            yield (key,), f"{key}: expected at least {least}, got {value}"
    for name in ("hidden", "head_hidden", "encoder_hidden"):
        for width in getattr(cfg.network, name):
            if width < 1:
                yield (f"network.{name}",), f"network.{name}: expected widths of at least 1, got {width}"

    steps = cfg.stop.get("env_steps")
    if steps is not None and (steps <= 0 or steps != int(steps)):
        yield ("stop.env_steps",), f"stop.env_steps: expected a whole number above 0, got {steps}"
    for metric, value in cfg.stop.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            yield (f"stop.{metric}",), f"stop.{metric}: expected a number, got {value!r}"

    for name in ("gamma", "gae_lambda"):
        value = getattr(cfg.algo, name, None)
        outside = [v for v in _values(value) if not 0 <= v <= 1]
        if outside:
            yield (f"algo.{name}",), f"algo.{name}: expected a number in [0, 1], got {outside[0]}"
    own = getattr(cfg.algo, "validate", None)
    for message in own() if callable(own) else ():
        yield ("algo",), f"algo: {message}"
    if cfg.run.stall_seconds is not None and cfg.run.stall_seconds <= 0:
        yield ("run.stall_seconds",), f"run.stall_seconds: expected more than 0, or null, got {cfg.run.stall_seconds}"
    if cfg.checkpoint.exact and cfg.checkpoint.every is None:
        yield (
            ("checkpoint.exact",),
            "checkpoint.exact needs checkpoint.every: checkpoints by the clock are never twice at the same step: "
            f"set it, e.g. checkpoint.every={max(1, int(steps or 0) // 10)}",
        )
    yield from _network_faults(cfg)
    yield from _episode_faults(cfg)
    yield from _runtime_faults(cfg.runtime)
    yield from _evaluation_faults(cfg)
    yield from _collection_faults(cfg)
    yield from _device_faults(cfg.devices)
    yield from split_faults(cfg, num_learners(cfg) or 1)


def split_faults(cfg: Any, learners: int) -> Iterator[Fault]:
    """What cannot be split over so many devices that learn, and the devices or runners that collect."""
    yield from _batch_faults(cfg, learners)
    if cfg.replay is not None:
        yield from _replay_faults(cfg, learners)


_LEAST = {
    "env.num_envs": 1, "env.frame_stack": 1, "network.max_seq_len": 1, "replay.burn_in": 0,
    "rollout.length": 1, "rollout.iterations_per_call": 1, "evaluation.every": 1,
    "evaluation.duration": 1, "evaluation.interval": 1, "evaluation.num_env_runners": 0, "env.horizon": 1,
    "run.smoothing_episodes": 1, "run.report_every_trained": 1, "evaluation.num_envs": 1, "checkpoint.every": 1,
    "checkpoint.keep_last": 1, "run.seed": 0, "run.report_every": 1, "devices.fake": 1, "rollout.max_policy_lag": 1,
    "env_runners.num": 0, "env_runners.num_cpus": 0, "env_runners.num_gpus": 0,
    "env_runners.max_requests_in_flight": 1, "env_runners.max_restarts": 0, "env.batch_wait_ms": 0,
    "env.batch_size": 1, "replay.capacity": 1, "replay.batch_size": 1, "replay.learning_starts": 0,
    "replay.train_every": 1, "replay.frame_stack": 1, "replay.priority_alpha": 0, "replay.priority_eps": 0,
    "run.max_recompiles": 0, "runtime.cpu_threads": 1,
    "checkpoint.keep_every": 1, "run.max_rollbacks": 0, "run.rollback_lr": 0,
}  # fmt: skip


def _network_faults(cfg: Any) -> Iterator[Fault]:
    network, length = cfg.network, rollout_length(cfg)
    if network.image_max <= 0:
        yield ("network.image_max",), f"network.image_max: expected more than 0, got {network.image_max}"
    if network.encoders and network.flatten:
        yield (
            ("network.encoders", "network.flatten"),
            "network.flatten puts all of an observation into one vector, without encoders: leave one of them out",
        )
    if network.max_seq_len is not None and not network.recurrent:
        yield (
            ("network.max_seq_len", "network.core.name"),
            "network.max_seq_len: without memory nothing is learned from sequences: set network.core.name to lstm, "
            "gru, gtrxl or lru, or leave this out",
        )
    limit = sequence_length(cfg)
    cut = cfg.replay is None and limit > 0 and cfg.rollout.batch_mode == "truncate_episodes"
    if cut and length % limit and not getattr(cfg.algo, "whole_sequences", False):
        near = next(n for n in range(min(limit, length), 0, -1) if length % n == 0)
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
            yield (key,), f"{key}: expected different indices from 0, got {list(indices)}"
        elif devices.fake is not None and max(indices) >= devices.fake:
            yield (key, "devices.fake"), f"{key}: {max(indices)} is not among the {devices.fake} of devices.fake"


def _collection_faults(cfg: Any) -> Iterator[Fault]:
    runners, rollout = cfg.env_runners, cfg.rollout
    for name in ("sample_timeout_s", "health_check_timeout_s", "env_step_timeout_s"):
        value = getattr(runners, name)
        if value is not None and value <= 0:
            yield (f"env_runners.{name}",), f"env_runners.{name}: expected more than 0, got {value}"
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
    ready = cfg.env.batch_size is not None or cfg.env.batch_wait_ms is not None
    if cfg.checkpoint.exact and (runners.num or ready):
        keys = ("checkpoint.exact", "env_runners.num", "env.batch_size", "env.batch_wait_ms")
        who = "env_runners" if runners.num else "environments that do not wait for each other"
        yield keys, f"checkpoint.exact: {who} never do the same twice: turn one of them off"


def endless(cfg: Any) -> Iterator[Fault]:
    """What is missing for a command, which has to end by itself."""
    if total_steps(cfg) is None:
        near = difflib.get_close_matches("env_steps", cfg.stop, 1)
        mend = f"rename stop.{near[0]}" if near else "set it, e.g. stop.env_steps=1000000"
        yield ("stop.env_steps", "stop"), f"stop.env_steps is missing: every run needs an end: {mend}"


def _episode_faults(cfg: Any) -> Iterator[Fault]:
    env, rollout = cfg.env, cfg.rollout
    if env.soft_horizon and env.horizon is None:
        yield (
            ("env.soft_horizon", "env.horizon"),
            "env.soft_horizon: without env.horizon there is none: set it, e.g. env.horizon=100, or leave this out",
        )
    if rollout.batch_mode == "complete_episodes" and (env.batch_size is not None or env.batch_wait_ms is not None):
        yield (
            ("rollout.batch_mode", "env.batch_size", "env.batch_wait_ms"),
            "rollout.batch_mode complete_episodes: environments that do not wait for each other leave rows empty: "
            "leave env.batch_size and env.batch_wait_ms out",
        )
    for name in ("report_every_s",):
        value = getattr(cfg.run, name)
        if value is not None and value < 0:
            yield (f"run.{name}",), f"run.{name}: expected 0 or more, got {value}"


def _runtime_faults(runtime: Any) -> Iterator[Fault]:
    if runtime.mem_fraction is not None and not 0 < runtime.mem_fraction <= 1:
        key = "runtime.mem_fraction"
        yield (key,), f"{key}: expected above 0 and at most 1, got {runtime.mem_fraction}"
    for flag in (runtime.xla_flags or "").split():
        if not flag.startswith("--"):  # XLA would end the process
            yield (
                ("runtime.xla_flags",),
                f"runtime.xla_flags: expected --name=value, separated by spaces, got {flag!r}",
            )
    for name in runtime.env:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            yield ("runtime.env",), f"runtime.env: {name!r} is no name of an environment variable"
        elif name.startswith("JAX_"):
            yield (
                ("runtime.env",),
                f"runtime.env: {name} is read when jax is imported, before any config is: set it before the command",
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
    if found.timeout_s is not None and found.timeout_s <= 0:
        yield ("evaluation.timeout_s",), f"evaluation.timeout_s: expected more than 0, or null, got {found.timeout_s}"
    counted = found.unit == "episodes" and isinstance(found.duration, int)
    if counted and found.num_envs is not None and found.num_envs > found.duration:
        yield (
            ("evaluation.num_envs", "evaluation.duration"),
            f"evaluation.num_envs {found.num_envs}: {found.duration} episodes need no more than so many environments: "
            "lower it",
        )


def _batch_faults(cfg: Any, devices: int) -> Iterator[Fault]:
    envs, length = cfg.env.num_envs, rollout_length(cfg)
    minibatches = getattr(cfg.algo, "num_minibatches", 1)
    if min(envs, length) < 1:
        return
    if envs % devices:
        near = _either([envs - envs % devices, envs + devices - envs % devices])
        message = f"env.num_envs {envs} is not divisible by {devices} devices: {near}"
        yield ("env.num_envs", "devices.learners", "devices.fake"), message
        return
    pools = num_pools(cfg, devices)
    if pools > 0 and envs % pools:
        near = _either([envs - envs % pools, envs + pools - envs % pools])
        what = "env_runners" if cfg.env_runners.num else "devices that act"
        message = f"env.num_envs {envs} is not divisible by {pools} {what}: {near}"
        yield ("env.num_envs", "env_runners.num", "devices.actors"), message
    if not isinstance(minibatches, int):
        return
    keys = ("algo.num_minibatches", "env.num_envs", "rollout.length", "devices.learners", "devices.fake")
    if minibatches < 1:
        yield keys[:1], f"algo.num_minibatches: expected at least 1, got {minibatches}"
        return
    rows, limit = envs // devices * length, sequence_length(cfg)
    padded = cfg.rollout.batch_mode != "truncate_episodes"  # whole episodes are, to what divides
    if limit > 1 and length % limit == 0 and not getattr(cfg.algo, "whole_sequences", False):
        if not padded or cfg.network.max_seq_len is None:
            yield from _sequence_faults(minibatches, length // limit, envs // devices, limit, keys)
        return
    if getattr(cfg.algo, "whole_sequences", False) and (own := envs // devices) % minibatches:
        below = next(n for n in range(min(minibatches, own), 0, -1) if own % n == 0)
        more = devices * (own + minibatches - own % minibatches)
        message = (
            f"algo.num_minibatches {minibatches} does not divide the {own} environments of a device, and a minibatch "
            f"is of whole sequences: use {below}, or env.num_envs {more}"
        )
        yield keys, message
        return
    if rows % minibatches and not padded:
        below = next(n for n in range(minibatches, 0, -1) if rows % n == 0)
        above = next((n for n in range(minibatches, rows + 1) if rows % n == 0), 0)
        step = minibatches // math.gcd(minibatches, envs // devices)
        lengths = _either([length - length % step, length + step - length % step])
        on = f" on each of {devices} devices" if devices > 1 else ""
        message = (
            f"the batch of {envs // devices} envs x {length} steps = {rows} rows{on} is not divisible by "
            f"algo.num_minibatches {minibatches}: {_either([below, above])} would do, or rollout.length {lengths}"
        )
        yield keys, message


def _sequence_faults(minibatches: int, parts: int, envs: int, length: int, keys: tuple[str, ...]) -> Iterator[Fault]:
    """Of minibatches of sequences: `parts` of each of `envs` environments."""
    fits = lambda n: envs % (n // math.gcd(parts, n)) == 0
    if fits(minibatches):
        return
    below = next(n for n in range(minibatches, 0, -1) if fits(n))
    yield (
        (*keys, "network.max_seq_len"),
        f"algo.num_minibatches {minibatches} does not divide the {parts * envs} sequences of {length} steps, {parts} "
        f"of each of {envs} environments of a device: use {below}, or a smaller network.max_seq_len",
    )


def _replay_faults(cfg: Any, devices: int) -> Iterator[Fault]:
    replay, envs = cfg.replay, cfg.env.num_envs
    every, batch = replay.train_every, replay.batch_size
    if envs < 1 or (every is not None and every < 1) or (cfg.rollout.length or 1) < 1:
        return
    if every is not None and every % envs:
        mends = _either([every - every % envs, every + envs - every % envs])
        yield (
            ("replay.train_every", "env.num_envs"),
            f"replay.train_every {every} is not divisible by env.num_envs {envs}: {mends}",
        )
        return
    rows = envs * rollout_length(cfg)
    if every is not None and every != rows:
        yield (
            ("replay.train_every", "rollout.length", "env.num_envs"),
            f"replay.train_every {every} and rollout.length {cfg.rollout.length} x {envs} envs = {rows} rows disagree: "
            f"leave one of them out, or rollout.length {every // envs}",
        )
        return
    updates = replay.updates_per_step * rows
    if updates <= 0 or abs(updates - round(updates)) > 1e-6 * updates:
        below, above = math.floor(updates), math.ceil(updates)
        ratios = " or ".join(f"{n / rows:.6g}" for n in (below, above) if n > 0) or f"{1 / rows:.6g}"
        # the fewest rows whose updates are whole, as a multiple of the environments
        whole = math.lcm(envs, Fraction(replay.updates_per_step).limit_denominator(10_000).denominator)
        other = f", or replay.train_every {whole}" if replay.updates_per_step > 0 else ""
        yield (
            ("replay.updates_per_step", "replay.train_every", "rollout.length", "env.num_envs"),
            f"replay.updates_per_step {replay.updates_per_step:g} x {rows} rows per iteration = {updates:g} updates, "
            f"not a whole number above 0: replay.updates_per_step {ratios}{other}",
        )
    if batch % devices:
        mends = _either([batch - batch % devices, batch + devices - batch % devices])
        yield (
            ("replay.batch_size", "devices.learners", "devices.fake"),
            f"replay.batch_size {batch} is not divisible by {devices} devices: {mends}",
        )
    low, high = replay.n_step if isinstance(replay.n_step, tuple) else (replay.n_step, replay.n_step)
    if not 1 <= low <= high:
        yield ("replay.n_step",), f"replay.n_step: expected n or [low, high] with 1 <= low <= high, got {replay.n_step}"
    span, of = max(high, replay.frame_stack or 1) + 1, ""
    if cfg.network.recurrent:
        length = sequence_length(cfg)
        span = replay.burn_in + length + (replay.frame_stack or 1) + 1
        of = f" and sequences of {replay.burn_in} (replay.burn_in) + {length} steps (network.max_seq_len)"
    need = envs * (rollout_length(cfg) + span)
    if replay.capacity < need:
        yield (
            ("replay.capacity", "env.num_envs", "rollout.length", "replay.n_step", "network.max_seq_len"),
            f"replay.capacity {replay.capacity} is too small for {envs} envs{of}: at least {need}",
        )
    steps = cfg.stop.get("env_steps")
    if steps is not None and replay.learning_starts >= steps:
        yield (
            ("replay.learning_starts", "stop.env_steps"),
            f"replay.learning_starts {replay.learning_starts} is not below stop.env_steps {steps}: nothing would be "
            "learned, lower it",
        )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers if n > 0)


def _values(value: Any) -> list[float]:
    """The numbers of a hyper-parameter or of its schedule."""
    if isinstance(value, tuple):
        return [v for _, v in value]
    return [value] if isinstance(value, int | float) else []
