"""Numbers that follow from a RunConfig, such as rows, batches and gradient steps. The config never stores them."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jrl.config import datasets, policy_mapping
from jrl.errors import counted
from jrl.fields.data import traits

_ROWS_PER_CALL = 16_384  # most rows in one call of a fused program
_UPDATES_PER_CALL = 256  # most updates from replay in one call
_UPDATES_FROM_DATA = 2_500  # most updates in one call of a run from data alone
_STEPS_BY_GAME = 256  # most steps in one call if a mapping is called per game
LENGTH = 128  # default steps per environment and iteration
GENERATION = 1_000  # the same for populations, whose rollouts hold whole episodes
SEQUENCE = 20  # default steps of a sequence from replay that are learned from
STEPS_PER_REPORT = 1_000  # steps between result rows of a run without an end


class Passes(NamedTuple):
    """Passes of an algorithm over rollouts: fields of its Config, with defaults for Configs without them."""

    num_minibatches: int | None = None
    num_epochs: int = 1
    circular_buffer_num_batches: int = 1  # kept rollouts
    circular_buffer_iterations_per_batch: int = 1  # updates per new rollout, each on one kept rollout


@dataclasses.dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of a run, or of one policy's part of it, that its config decides. Rows are over all devices."""

    cfg: Any

    @functools.cached_property
    def passes(self) -> Passes:
        algo = self.cfg.algo
        return Passes(**{name: getattr(algo, name) for name in Passes._fields if hasattr(algo, name)})

    # ------------------------------------------------------------ rollouts

    @functools.cached_property
    def columns(self) -> int:
        """Returns the second axis of a rollout: the environments, times their agents."""
        several = self.cfg.multi_agent
        return self.cfg.env.num_envs * (max(1, len(several.agents or ())) if several else 1)

    @functools.cached_property
    def counted_columns(self) -> int:
        """Returns the counted steps in a step of all environments: environments, or agents with `count_steps_by`."""
        return self.columns if self.cfg.rollout.count_steps_by == "agent_steps" else self.cfg.env.num_envs

    @functools.cached_property
    def length(self) -> int:
        """Returns the steps per environment and iteration."""
        if self.cfg.rollout.length is not None:
            return self.cfg.rollout.length
        if self.cfg.replay is None:
            return GENERATION if traits(self.cfg.algo).has_members else LENGTH
        return max(1, (self.cfg.replay.train_every or 1) // max(1, self.cfg.env.num_envs))

    @functools.cached_property
    def in_step(self) -> bool:
        """Returns whether each rollout has equally many steps of every environment.

        Not with whole episodes, environments that do not wait for each other, clients, or env runners (replaceable).
        """
        cfg = self.cfg
        waits = cfg.env.waits and cfg.external is None
        return waits and not cfg.env_runners.num and cfg.rollout.batch_mode == "truncate_episodes"

    @functools.cached_property
    def sequence_length(self) -> int:
        """Returns the steps of the sequences for learning; 1 if the network has no memory."""
        if not self.cfg.network.recurrent:
            return 1
        return self.cfg.network.max_seq_len or (self.length if self.cfg.replay is None else SEQUENCE)

    @functools.cached_property
    def policy_lag(self) -> int | None:
        """Returns the most updates that the acting weights lag; None if collection waits for each update."""
        if self.cfg.rollout.mode == "sync":
            return None
        return self.cfg.rollout.max_policy_lag or (2 if self.cfg.env_runners.num else 1)

    @functools.cached_property
    def rollouts_ahead(self) -> int:
        """Returns the most rollouts of an environment that begin before the first of them is learned from."""
        # one env runner may collect all rollouts of a call
        return 0 if self.policy_lag is None else self.policy_lag + self.cfg.env_runners.num

    @functools.cached_property
    def is_numbered(self) -> bool:
        """Returns whether acting needs the environments' numbers: for exploration, members or policies by game."""
        ladder = getattr(getattr(self.cfg.algo, "exploration", None), "ladder", False)
        return policy_mapping.by_game(self.cfg.multi_agent) or ladder or traits(self.cfg.algo).has_members

    @functools.cached_property
    def why_two_programs(self) -> str:
        """Returns why collecting and learning cannot be one program, if the config decides it; "" if they can."""
        cfg = self.cfg
        if cfg.env_runners.num:
            return "env runners collect"
        if cfg.rollout.mode != "sync":
            return f"rollout.mode {cfg.rollout.mode}"
        if cfg.data.output:
            return "data.output writes what is collected"
        if cfg.rollout.fake:
            return "rollout.fake"
        if cfg.rollout.batch_mode != "truncate_episodes":
            return f"rollout.batch_mode {cfg.rollout.batch_mode}"
        return "clients play" if cfg.external is not None else ""

    # ------------------------------------------------------------ updates

    @functools.cached_property
    def rows(self) -> int:
        """Returns the counted rows per iteration; for a run from data alone 1, an update."""
        return 1 if datasets.alone(self.cfg) else self.counted_columns * self.length

    @functools.cached_property
    def minibatch(self) -> int | None:
        """Returns the rows of a gradient step; None if unknown."""
        if datasets.alone(self.cfg) or self.cfg.replay is not None:
            return self.cfg.replay.batch_size
        minibatches = self.passes.num_minibatches
        return self.columns * self.length // minibatches if minibatches else None

    @functools.cached_property
    def updates(self) -> int | None:
        """Returns the gradient steps per iteration; None if unknown."""
        if datasets.alone(self.cfg):
            return 1
        if self.cfg.replay is not None:
            return round(self.cfg.replay.updates_per_step * self.rows)
        minibatches, epochs, _, drawn = self.passes
        return minibatches * epochs * drawn if minibatches else None

    # ------------------------------------------------------------ devices

    @functools.cached_property
    def learners(self) -> int:
        """Returns the number of learning devices; 1 if the config does not name them."""
        devices = self.cfg.devices
        return (devices.fake if devices.learners is None else len(devices.learners)) or 1

    def num_pools(self, learners: int) -> int:
        """Returns the number of parts of the environments: one per env runner, or per acting device."""
        actors = self.cfg.devices.actors
        return self.cfg.env_runners.num or (learners if actors is None else len(actors))

    # ------------------------------------------------------------ budget and intervals

    @functools.cached_property
    def counts_by(self) -> str:
        """Returns the unit of the budget and of intervals of rows, evaluations and checkpoints."""
        return "updates" if datasets.alone(self.cfg) else "env_steps"

    @functools.cached_property
    def total_steps(self) -> int | None:
        """Returns the environment steps (for data alone updates) that end the run; None: it has no end."""
        steps = self.cfg.stop.get(self.counts_by)
        return None if steps is None else int(steps)

    @functools.cached_property
    def iterations(self) -> int | None:
        """Returns the iterations until `total_steps`, if no row is masked; None: the run has no end."""
        return None if self.total_steps is None else -(-self.total_steps // self.rows)

    @functools.cached_property
    def report_every(self) -> int:
        """Returns the environment steps between two result rows."""
        if self.cfg.run.report_every:
            return self.cfg.run.report_every
        if self.total_steps is not None:
            return max(1, self.total_steps // 100)
        return 1 if self.rows >= STEPS_PER_REPORT else STEPS_PER_REPORT  # a rollout, or several short ones

    @functools.cached_property
    def asked_iteration(self) -> int | None:
        """Returns the length of an iteration of `Algorithm.train`, in steps or updates; None: the config has none."""
        per_iteration = self.cfg.data.updates_per_iteration if datasets.alone(self.cfg) else None
        return self.cfg.run.report_every or per_iteration

    @functools.cached_property
    def estimate_every(self) -> int | None:
        """Returns the updates between two estimates by `data.estimate`; None: none, or one with each evaluation."""
        found, how = self.cfg.evaluation, self.cfg.data.estimate
        if how is None or how.every is not None:
            return None if how is None else how.every
        return 10 * self.report_every if found.every is None and found.interval is None else None

    @property
    def rows_per_call(self) -> int:
        """Returns the most rows in one call of a fused program."""
        return _ROWS_PER_CALL

    @functools.cached_property
    def iterations_per_call(self) -> int:
        """Returns the iterations of one call: enough to hide Python's time, few enough for frequent rows."""
        cfg = self.cfg
        wanted = (self.report_every, cfg.evaluation.every, cfg.checkpoint.every, self.total_steps)
        if datasets.alone(cfg):
            due = (*wanted, self.estimate_every)
            return cfg.data.updates_per_iteration or min(_UPDATES_FROM_DATA, *(steps for steps in due if steps))
        most = min(self.rows_per_call, *(steps for steps in wanted if steps)) // self.rows
        if cfg.replay is not None:
            most = min(most, _UPDATES_PER_CALL // (self.updates or 1))
        if policy_mapping.by_game(cfg.multi_agent):  # the table of games holds all games of a call
            most = min(most, _STEPS_BY_GAME // self.length)
        return cfg.rollout.iterations_per_call or max(1, most)

    # ------------------------------------------------------------ in words

    def lines(self) -> Iterator[str]:
        """Yields the sizes in words."""
        cfg, envs = self.cfg, self.cfg.env.num_envs
        if datasets.alone(cfg):
            yield f"{counted(self.iterations_per_call, 'update', ',')} per call, each on {self._drawn()}"
            if self.iterations is not None:
                yield f"{counted(self.iterations, 'update', ',')} until stop.updates {cfg.stop['updates']:,.0f}"
            return
        agents, updates = self.columns // envs, f"{counted(self.updates or 0, 'update')} per iteration"
        collected, rows = f"{counted(envs, 'env')} x {counted(self.length, 'step')}", self.rows
        if agents > 1:
            collected += f" x {counted(agents, 'agent')}"
            rows = envs * self.length * agents
        yield f"{collected} = {counted(rows, 'transition', ',')} per iteration"
        if runners := cfg.env_runners.num:
            yield f"{counted(runners, 'env runner')} of {counted(envs // runners, 'env')}"
        if self.policy_lag is not None:
            yield f"collected while learning, by weights that are {counted(self.policy_lag, 'update')} old at most"
            if traits(cfg.algo).uncorrected:
                yield (
                    "warning: this algorithm takes each rollout for its own policy's and degrades with the age of "
                    "weights: use rollout.mode sync, or what corrects for it, impala or appo"
                )
        if cfg.replay is not None:
            yield (
                f"{updates} on {self._drawn()} from replay, "
                f"once it holds {cfg.replay.learning_starts:,} of at most {cfg.replay.capacity:,}"
            )
            if datasets.is_mixed(cfg.data):
                named = lambda name: "replay" if name == datasets.SAMPLER else name
                of_each = [f"{share:.0%} from {named(name)}" for name, share in datasets.shares(cfg.data).items()]
                yield f"of each batch {', '.join(of_each)}"
        elif self.minibatch is not None:
            minibatches, epochs, _, drawn = self.passes
            split = f"{counted(epochs, 'epoch')} x {counted(minibatches or 1, 'minibatch')}"
            if drawn > 1:
                split = f"{drawn} rollouts x {split}"
            of = counted(self.minibatch, "transition", ",") if agents == 1 else "each policy's transitions"
            yield f"{split} of {of} = {updates}"
        if self.iterations is not None:
            end = f"stop.env_steps {cfg.stop['env_steps']:,.0f}"
            end += f", at most {cfg.stop['time_s']:g} s" if "time_s" in cfg.stop else ""
            yield f"{counted(self.iterations, 'iteration', ',')} until {end}"

    def _drawn(self) -> str:
        size = self.minibatch or 0
        if not self.cfg.network.recurrent:
            return counted(size, "transition", ",")
        return f"{counted(size, 'sequence')} of {counted(self.sequence_length, 'step')}"


def discount_by_action(cfg: Any) -> Any:
    """Returns the config with the discount between two actions of the policy, algo.gamma to their number of steps."""
    if cfg.env.steps_per_action == 1 or not hasattr(cfg.algo, "gamma"):
        return cfg
    gamma = cfg.algo.gamma**cfg.env.steps_per_action
    return dataclasses.replace(cfg, algo=dataclasses.replace(cfg.algo, gamma=gamma))


def with_population(cfg: Any) -> Any:
    """Returns the config with a member for each environment, if its algorithm has a population without a size."""
    if not traits(cfg.algo).has_members or cfg.algo.population is not None:
        return cfg
    return dataclasses.replace(cfg, algo=dataclasses.replace(cfg.algo, population=cfg.env.num_envs))


def divisors(n: int) -> list[int]:
    """Returns the divisors of a number above 0, in ascending order; quick up to 1e12."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
