"""Numbers that follow from a RunConfig: rows, sequences, batches, gradient steps.

Derived numbers are functions of the config and never stored in it. Reads the config by its attributes only.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jrl.config import datasets, policy_mapping
from jrl.errors import counted
from jrl.fields.data import traits

# rows, and updates from replay, in one call of a fused program
_ROWS_PER_CALL = 16_384
_UPDATES_PER_CALL = 256
_UPDATES_FROM_DATA = 2_500  # in one call of a program that collects nothing
_STEPS_TOLD = 256  # of a call in which a mapping is asked for each game
LENGTH = 128  # steps per environment and iteration, unless the config says otherwise
STEPS_PER_REPORT = 1_000  # of a run without an end


class BatchPlan(NamedTuple):
    """Numbers that follow from the config. Rows are over all devices."""

    rows: int  # per iteration: environments x steps, as they are counted
    minibatch: int | None  # rows of a gradient step; None where the algorithm does not say
    updates: int | None  # gradient steps per iteration
    iterations: int | None  # until stop.env_steps, if no row is masked; None: the run has no end


class Passes(NamedTuple):
    """Passes of an algorithm over rollouts: fields of its Config, with the value of one that it does not have."""

    num_minibatches: int | None = None
    num_epochs: int = 1
    circular_buffer_num_batches: int = 1  # rollouts that are kept
    circular_buffer_iterations_per_batch: int = 1  # of them learned from for each new one


def passes(config: Any) -> Passes:
    """Returns how the algorithm of a Config goes over rollouts."""
    return Passes(**{name: getattr(config, name) for name in Passes._fields if hasattr(config, name)})


def columns(cfg: Any) -> int:
    """Returns the number of environments, of several agents times the agents: the second axis of a rollout."""
    several = cfg.multi_agent
    return cfg.env.num_envs * (max(1, len(several.agents or ())) if several else 1)


def counted_columns(cfg: Any) -> int:
    """Returns what a step of all environments counts: the environments, or agents if `count_steps_by` says so."""
    return columns(cfg) if cfg.rollout.count_steps_by == "agent_steps" else cfg.env.num_envs


def rollout_length(cfg: Any) -> int:
    """Returns the steps per environment and iteration."""
    if cfg.rollout.length is not None:
        return cfg.rollout.length
    if cfg.replay is None:
        return LENGTH
    return max(1, (cfg.replay.train_every or 1) // max(1, cfg.env.num_envs))


def in_step(cfg: Any) -> bool:
    """Returns whether each rollout has as many steps of every environment. Not so: whole episodes, environments that do
    not wait for each other, clients, and runners that come, go and fill in for each other."""
    waits = cfg.env.waits and cfg.external is None
    return waits and not cfg.env_runners.num and cfg.rollout.batch_mode == "truncate_episodes"


SEQUENCE = 20  # steps that are learned from in a sequence from replay, unless the config says otherwise


def sequence_length(cfg: Any) -> int:
    """Returns the steps of the sequences that are learned from; 1 where the network has no memory."""
    if not cfg.network.recurrent:
        return 1
    return cfg.network.max_seq_len or (rollout_length(cfg) if cfg.replay is None else SEQUENCE)


def counts_by(cfg: Any) -> str:
    """Returns what a run counts by: its budget, and the time between rows, evaluations and checkpoints."""
    return "updates" if datasets.alone(cfg) else "env_steps"


def total_steps(cfg: Any) -> int | None:
    """Returns the environment steps that end the run, updates where it learns from data alone; None: it has no end."""
    steps = cfg.stop.get(counts_by(cfg))
    return None if steps is None else int(steps)


def batch_plan(cfg: Any) -> BatchPlan:
    """Returns rows, minibatches and updates of an iteration, and the number of iterations."""
    rows, total = counted_columns(cfg) * rollout_length(cfg), total_steps(cfg)
    if datasets.alone(cfg):  # an iteration is an update
        return BatchPlan(1, cfg.replay.batch_size, 1, total)
    iterations = None if total is None else -(-total // rows)
    if cfg.replay is not None:
        return BatchPlan(rows, cfg.replay.batch_size, round(cfg.replay.updates_per_step * rows), iterations)
    minibatches, epochs, _, drawn = passes(cfg.algo)
    return BatchPlan(
        rows=rows,
        minibatch=columns(cfg) * rollout_length(cfg) // minibatches if minibatches else None,
        updates=minibatches * epochs * drawn if minibatches else None,
        iterations=iterations,
    )


def divisors(n: int) -> list[int]:
    """Returns the divisors of a number above 0, in ascending order; quick up to 1e12."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def num_parameters(cfg: Any) -> int:
    """Returns a lower bound of the parameters by the config's widths: those at inputs and outputs are not known."""
    network, core = cfg.network, cfg.network.core
    size = getattr(core, "size", 0)
    inner = {
        "lstm": 4 * size * size, "gru": 3 * size * size, "lru": 2 * size * getattr(core, "state", 0),
        "gtrxl": size * (3 * getattr(core, "heads", 0) * getattr(core, "head_size", 0) + 2 * getattr(core, "mlp", 0)),
    }.get(core.name, 0) * getattr(core, "layers", 1)  # fmt: skip
    products = lambda *stacks: sum(a * b for widths in stacks for a, b in itertools.pairwise(widths))
    dense = products(network.hidden, network.head_hidden, network.encoder_hidden)
    critic = products(network.of_critics().hidden, network.head_hidden, network.encoder_hidden)
    return dense + (0 if network.shared else critic * getattr(cfg.algo, "num_critics", 1)) + inner


def num_learners(cfg: Any) -> int | None:
    """Returns the number of devices that learn; None where that is left to the machine."""
    devices = cfg.devices
    return len(devices.learners) if devices.learners is not None else devices.fake


def num_pools(cfg: Any, learners: int) -> int:
    """Returns the parts that the environments are split into: one for each runner, or for each device that acts."""
    return cfg.env_runners.num or (learners if cfg.devices.actors is None else len(cfg.devices.actors))


def policy_lag(cfg: Any) -> int | None:
    """Returns the updates that the acting weights may be behind; None where collection waits for each update."""
    if cfg.rollout.mode == "sync":
        return None
    return cfg.rollout.max_policy_lag or (2 if cfg.env_runners.num else 1)


def rollouts_ahead(cfg: Any) -> int:
    """Returns the most rollouts of an environment that are begun before it is learned from the one that comes first:
    with env runners one of them may make all that are taken in a call.
    """
    return 0 if (lag := policy_lag(cfg)) is None else lag + cfg.env_runners.num


def report_every(cfg: Any) -> int:
    """Returns the environment steps between two result rows."""
    if cfg.run.report_every:
        return cfg.run.report_every
    if (total := total_steps(cfg)) is not None:
        return max(1, total // 100)
    return 1 if batch_plan(cfg).rows >= STEPS_PER_REPORT else STEPS_PER_REPORT  # a rollout, or several short ones


def asked_iteration(cfg: Any) -> int | None:
    """Returns the length of an iteration of `Algorithm.train` by the config, in steps or updates; None: it has none."""
    return cfg.run.report_every or (cfg.data.updates_per_iteration if datasets.alone(cfg) else None)


def estimate_every(cfg: Any) -> int | None:
    """Returns the updates between two estimates by `data.estimate`; None: none, or one with each evaluation."""
    found, how = cfg.evaluation, cfg.data.estimate
    if how is None or how.every is not None:
        return None if how is None else how.every
    return 10 * report_every(cfg) if found.every is None and found.interval is None else None


def iterations_per_call(cfg: Any) -> int:
    """Returns the iterations of one call: enough to hide Python's time, and no more than its user wants to wait for."""
    plan = batch_plan(cfg)
    wanted = (report_every(cfg), cfg.evaluation.every, cfg.checkpoint.every, total_steps(cfg))
    if datasets.alone(cfg):
        due = (*wanted, estimate_every(cfg))
        return cfg.data.updates_per_iteration or min(_UPDATES_FROM_DATA, *(steps for steps in due if steps))
    most = min(_ROWS_PER_CALL, *(steps for steps in wanted if steps)) // plan.rows
    if cfg.replay is not None:
        most = min(most, _UPDATES_PER_CALL // (plan.updates or 1))
    if policy_mapping.by_game(cfg):  # the table of games holds all games of a call
        most = min(most, _STEPS_TOLD // rollout_length(cfg))
    return cfg.rollout.iterations_per_call or max(1, most)


def lines(cfg: Any) -> Iterator[str]:
    """Yields the batch plan in words."""
    plan, envs = batch_plan(cfg), cfg.env.num_envs
    if datasets.alone(cfg):
        yield from _lines_of_data(cfg, plan)
        return
    agents, steps = columns(cfg) // envs, rollout_length(cfg)
    collected, rows = f"{counted(envs, 'env')} x {counted(steps, 'step')}", counted(plan.rows, "row")
    if agents > 1:
        collected += f" x {counted(agents, 'agent')}"
        rows = counted(envs * steps * agents, "transition")
    yield f"{collected} = {rows} per iteration"
    if runners := cfg.env_runners.num:
        yield f"{counted(runners, 'env runner')} of {counted(envs // runners, 'env')}"
    lag = policy_lag(cfg)
    if lag is not None:
        yield f"collected while learning, by weights that are {counted(lag, 'update')} old at most"
        if traits(cfg.algo).uncorrected:
            yield (
                "warning: this algorithm takes each rollout for its own policy's and degrades with the age of weights: "
                "use rollout.mode sync, or what corrects for it, impala or appo"
            )
    if cfg.replay is not None:
        yield (
            f"{_updates(plan)} on {_rows(cfg, plan.minibatch or 0)} from replay, "
            f"once it holds {cfg.replay.learning_starts:,} of at most {cfg.replay.capacity:,}"
        )
        if datasets.is_mixed(cfg):
            named = lambda name: "replay" if name == datasets.SAMPLER else name
            of_each = [f"{share:.0%} from {named(name)}" for name, share in datasets.shares(cfg).items()]
            yield f"of each batch {', '.join(of_each)}"
    elif plan.minibatch is not None:
        minibatches, epochs, _, drawn = passes(cfg.algo)
        split = f"{counted(epochs, 'epoch')} x {counted(minibatches or 1, 'minibatch')}"
        if drawn > 1:
            split = f"{drawn} rollouts x {split}"
        of = counted(plan.minibatch, "row") if agents == 1 else "each policy's transitions"
        yield f"{split} of {of} = {_updates(plan)}"
    if plan.iterations is not None:
        yield f"{counted(plan.iterations, 'iteration')} until stop.env_steps {cfg.stop['env_steps']}"


def _lines_of_data(cfg: Any, plan: BatchPlan) -> Iterator[str]:
    yield f"{counted(iterations_per_call(cfg), 'update', ',')} per call, each on {_rows(cfg, plan.minibatch or 0)}"
    if plan.iterations is not None:
        yield f"{counted(plan.iterations, 'update', ',')} until stop.updates {cfg.stop['updates']}"


def _updates(plan: BatchPlan) -> str:
    return f"{counted(plan.updates or 0, 'update')} per iteration"


def _rows(cfg: Any, n: int) -> str:
    steps = counted(sequence_length(cfg), "step")
    return f"{counted(n, 'sequence')} of {steps}" if cfg.network.recurrent else counted(n, "row")
