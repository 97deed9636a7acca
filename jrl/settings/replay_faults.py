"""Faults of the `replay` section, beside environments, networks and devices, each with its mend."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from jrl.errors import counted
from jrl.settings import datasets
from jrl.settings.plan import columns, counted_columns, rollout_length, sequence_length

Fault = tuple[tuple[str, ...], str]  # the keys that were read, the message


def faults(cfg: Any, devices: int) -> Iterator[Fault]:
    """Yields what in the `replay` section does not fit the environments, the network or so many devices that learn."""
    if datasets.alone(cfg):
        yield from _sampling_faults(cfg, devices)
        return
    replay, envs = cfg.replay, cfg.env.num_envs
    every = replay.train_every
    if envs < 1 or (every is not None and every < 1) or (cfg.rollout.length or 1) < 1:
        return
    if every is not None and every % envs:
        mends = either([every - every % envs, every + envs - every % envs])
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
        mends = either([batch - batch % devices, batch + devices - batch % devices])
        yield (
            ("replay.batch_size", "devices.learners", "devices.fake"),
            f"replay.batch_size {batch} is not divisible by {devices} devices: {mends}",
        )
    low, high = replay.n_step if isinstance(replay.n_step, tuple) else (replay.n_step, replay.n_step)
    if low > high:
        yield ("replay.n_step",), f"replay.n_step: expected [low, high] with low <= high, got {list(replay.n_step)}"


def either(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers if n > 0)
