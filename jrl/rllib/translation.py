"""One translation of RLlib's keys to jrl's: given keys, sizes that follow from several keys, a line for each key.

A rule is a function `(job, key, value)` for a key that is more than a move; it calls `put`, `drop`, `lack` or `wrong`.
"""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from jrl.config import datasets, plan, sections
from jrl.errors import InputError, counted, short
from jrl.fields import schema
from jrl.fields.bounds import INT64, is_number
from jrl.fields.data import Fixed, Fresh, learns_from, traits
from jrl.rllib import policy_server
from jrl.rllib.table import CONTAINERS, KEYS, NO_COLLECTION, Row

DEFAULT_ENVS = sections.EnvConfig(id="").num_envs
DEFAULT_POLICY = "default_policy"  # id of the policy that RLlib has by default
# algorithm -> its core, if the model does not name one
CORES = {"r2d2": "lstm", "rnnsac": "lstm", "dt": "gtrxl"}
SWITCHES = {"model.use_lstm": "lstm", "model.use_attention": "gtrxl"}
# environment steps of a train() of RLlib's algorithms with replay, by default
_ITERATION = {"dqn": 1_000, "sac": 100, "td3": 1_000}
_MOST_DEVICES = 65_537  # more than there can be
_LENGTH = 128  # default of rollout.length
_SEQUENCE = 20  # default steps of a sequence, of RLlib and of replay here
# rows of a gradient step in RLlib by default, where jrl's default differs
_ROWS = {"r2d2": 1000, "dqn": 32, "simpleq": 32, "apex": 512, "td3": 100}
# keys for which -1 is a value; for others it means "not set"
_NEGATIVE = {"v_min", "target_entropy", "env_config", "evaluation_config", "exploration_config"}
# keys of the replay section that data sets have, too
_OF_SAMPLES = {"batch_size", "n_step", "burn_in", "frame_stack"}
# section -> key -> jrl's default
_DEFAULTS = {
    name: {f.name: f.default for f in dataclasses.fields(cls)}
    for name, hint in typing.get_type_hints(sections.RunConfig).items()
    if (cls := schema.section_class(hint))
}


@dataclasses.dataclass
class Job:
    """One translation: the given keys, their results, and the report."""

    algo: str  # jrl's name
    source: str  # RLlib's name, lower case
    config_class: type  # the algorithm's
    raw: Mapping[str, Any]  # given keys, as `canonical` yields them
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # tree of jrl under the given keys
    prefix: str = ""  # prefix of RLlib's keys in lines
    inside: str = ""  # prefix of jrl's keys in lines
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)  # result
    origins: dict[str, str] = dataclasses.field(default_factory=dict)  # jrl's key -> RLlib's
    lines: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    lacking: list[str] = dataclasses.field(default_factory=list)  # keys that change learning, without a counterpart

    # ------------------------------------------------------------ reading

    @cached_property
    def given(self) -> dict[str, Any]:
        """Newest name -> value of the keys that are known and set."""
        return self.implied | {name: self.raw[spelled] for name, spelled in self.spelled.items()}

    @cached_property
    def implied(self) -> dict[str, Any]:
        """RLlib's defaults of the keys that set the lengths of sequences and the rows of an update."""
        found: dict[str, Any] = {}
        if self.asked_core and not self.prefix and not self.replays:
            found["model.max_seq_len"] = _SEQUENCE
        elif self.asked_core and not self.prefix:
            if "train_batch_size_per_learner" not in self.spelled:
                found["train_batch_size"] = _ROWS.get(self.source, sections.ReplayConfig().batch_size)
            if self.source == "r2d2":
                found["training_intensity"] = 150
        return {key: value for key, value in found.items() if key not in self.spelled}

    @cached_property
    def spelled(self) -> dict[str, str]:
        """Newest name -> the name in `raw`, of the keys that are known and set."""
        found: dict[str, str] = {}
        for spelled, value in self.raw.items():
            name = KEYS[spelled].name if spelled in KEYS else None
            if name and value is not None and not _is_unset(name, value) and (spelled == name or name not in found):
                found[name] = spelled
        return found

    @cached_property
    def replays(self) -> bool:
        """Whether the algorithm learns from samples, of a replay or of data."""
        return learns_from(self.config_class) is not Fresh

    @cached_property
    def with_clients(self) -> bool:
        """Whether clients play: the input is PolicyServerInput."""
        return policy_server.is_named(self.given.get("input_"))

    @cached_property
    def from_data(self) -> bool:
        """Whether the run learns from data sets alone, without environments to collect from."""
        if self.prefix or not self.replays or self.with_clients:
            return False
        given = self.given.get("input_", self.settled("data.input"))
        names = list(given) if isinstance(given, Mapping | list | tuple) else [given]
        return learns_from(self.config_class) is Fixed or not any(x in names for x in (None, "", datasets.SAMPLER))

    @cached_property
    def has_one_policy(self) -> bool:
        """Return whether the run has one policy, by RLlib's name for it."""
        given = self.given.get("policies")
        return given is not None and not isinstance(given, str) and set(given) <= {DEFAULT_POLICY}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Hyper-parameters of the algorithm and their defaults."""
        return {f.name: f.default for f in dataclasses.fields(self.config_class)}

    @cached_property
    def asked_core(self) -> str | None:
        """The core that RLlib's keys ask for, by jrl's name; None: none."""
        asked = (core for key, core in SWITCHES.items() if self.raw.get(self.spelled.get(key, "")) is True)
        return next(asked, CORES.get(self.source))

    @cached_property
    def core(self) -> str | None:
        """The core of the run, by jrl's name; None: none."""
        name = self.settled("network.core.name")
        return self.asked_core or (name if isinstance(name, str) else None)

    @cached_property
    def sizes(self) -> "Sizes":
        return Sizes(self)

    def settled(self, ours: str) -> Any:
        """Return the value of a key in `base`; None: it is not set there."""
        return value_at(self.base, ours)

    def count(self, ours: str) -> int | None:
        """Return the value of a key in `base` if it is a whole number above 0."""
        found = self.settled(ours)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def number(self, key: str, *, least: float = -math.inf, whole: bool = True) -> Any:
        """Return the number given for a key; None: there is none, or it was reported as a fault."""
        name = KEYS[key].name
        value, key = self.given.get(name), self.spelled.get(name, key)
        if value is None or value == "auto":
            return None
        good = is_number(value) and value >= least and abs(value) <= INT64
        if not good or (whole and value != int(value)):
            return self.wrong(key, f"a {'whole ' * whole}number" + f" of at least {least}" * (least > -math.inf), value)
        return int(value) if whole else value

    # ------------------------------------------------------------ results of rules

    def put(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Set a key of jrl, unless the run has no use for it, and adds the line."""
        section, _, name = ours.partition(".")
        if section == "algo" and name != "name" and name not in self.fields:
            return self.drop(key, f"{self.algo} has no {name}")
        if section == "replay" and not self.replays:
            return self.drop(key, f"{self.algo} learns from each rollout once and keeps no replay")
        if reason := self._no_use(section, name):
            return self.drop(key, reason)
        if self.from_data and section == "algo" and _is_schedule(value):  # RLlib counts steps there
            value = [[self.sizes.updates_of(self, steps), number] for steps, number in value]
            note = "; ".join(filter(None, [note, "steps become updates"]))
        self.set(ours, value, key)
        defaults = self.fields if section == "algo" else _DEFAULTS.get(section, {})
        if not self.inside and name in defaults and _is_same(value, defaults[name]):
            note = "; ".join(filter(None, [note, "jrl's default"]))
        return self.say(key, f"{self.inside}{ours}", value, note)

    def say(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Add the line of a key that becomes a value of jrl's."""
        self.lines.append(f"{self.prefix}{key} -> {ours}: {shown(value)}" + (f"  ({note})" if note else ""))

    def _no_use(self, section: str, name: str) -> str | None:
        if self.with_clients:
            return policy_server.NO_USE.get(f"{section}.{name}")
        if self.from_data and (section in ("rollout", "env_runners") or (section, name) == ("env", "num_envs")):
            return NO_COLLECTION
        if self.from_data and section == "replay" and name not in _OF_SAMPLES:
            return "there is no replay: rows are drawn from the data"
        return None

    def set(self, ours: str, value: Any, key: str) -> None:
        """Set a key of jrl without a line; a mapping takes the place of the one before."""
        section, _, name = ours.partition(".")
        if isinstance(value, Mapping):
            self.tree.setdefault(section, {})[name] = dict(value)
        else:
            self.tree = schema.merge(self.tree, nested(ours, value))
        self.origins[ours] = key

    def drop(self, key: str, reason: str) -> None:
        """Report that nothing follows from a key."""
        self.lines.append(f"{self.prefix}{key}: dropped: {reason}")

    def lack(self, key: str, reason: str) -> None:
        """Report that jrl lacks what a key asks for, so that something else would be learned without it."""
        self.lines.append(f"{self.prefix}{key}: lacking: {reason}")
        self.lacking.append(f"{self.prefix}{key}: {reason}")

    def wrong(self, key: str, expected: str, value: Any) -> None:
        fault = f"{self.prefix}{key}: expected {expected}, got {short(value)}"
        self.faults += [fault] if fault not in self.faults else []

    def take_report(self, inner: "Job") -> None:
        """Add the report of a translation of nested keys."""
        self.lines += inner.lines
        self.faults += inner.faults
        self.lacking += inner.lacking

    def steps(self, number: int) -> str:
        """Describe so many steps, or updates, by which the run counts."""
        return counted(number, "update") if self.from_data else f"{number} steps"


class Sizes:
    """Numbers of environments, steps, batches and gradient steps, which depend on several keys each."""

    def __init__(self, job: Job):
        number = job.number
        self.runners = number("num_env_runners", least=0)
        each = number("num_envs_per_env_runner", least=1)
        self.collecting = max(1, self.runners or 0)  # processes
        named = self.collecting * each if each else job.count("env.num_envs")
        self.in_a_round = named or self.collecting  # environments that give RLlib a fragment each before it learns
        # jrl's default, as near as runners can share it: rows and the rate of updates do not depend on it
        self.num_envs = named or self.collecting * max(1, round(DEFAULT_ENVS / self.collecting))
        self.fragment = number("rollout_fragment_length", least=1)
        learners = number("num_learners", least=0) or 1
        gpus = number("num_gpus", least=0, whole=False) or 0
        settled = job.settled("devices.learners") or ()
        most = len(settled) if isinstance(settled, list | tuple) else 1
        self.devices = int(min(max(gpus, learners, most, 1), _MOST_DEVICES))
        self.shared = job.from_data or self.num_envs % self.devices == 0
        self.batch = number("train_batch_size", least=1)
        if self.batch is None and (share := number("train_batch_size_per_learner", least=1)):
            self.batch = share * max(1, learners)
        # sequences of IMPALA, APPO and A3C are as long as a fragment, whatever the batch
        self.sequences = job.algo in ("impala", "appo") or job.source == "a3c"
        self.length = self.fragment
        if self.batch is not None and not (self.sequences and self.fragment):
            self.length = max(1, round(self.batch / self.num_envs))
        self.steps = self.length or job.count("rollout.length") or _LENGTH
        self.rows = self.num_envs * self.steps
        self.sequence = self._sequence(job)  # steps that are learned from together; None: there is no core
        self.minibatch = number("minibatch_size", least=1)
        if self.sequences and self.minibatch is None and self.batch:
            self.minibatch = self.batch
        self.minibatches: int | None = None
        self.fitted: int | None = None  # number of minibatches, where a core needs another than the default
        if not job.replays and "num_minibatches" in job.fields:
            counts, size = self._counts(job), self.minibatch
            if size:
                self.minibatches = min(counts, key=lambda n: abs(self.rows / n - size))
            elif self.sequence and (default := job.fields["num_minibatches"]) not in counts:
                self.fitted = min(counts, key=lambda n: abs(n - default))
        self.train_every: int | None = None
        rate = job.settled("replay.updates_per_step")
        self.settled_rate = rate if is_number(rate) and rate > 0 else None
        self.updates_per_step = self.settled_rate or sections.ReplayConfig().updates_per_step
        # updates of an iteration from data
        self.passes = number("dataset_num_iters_per_learner", least=1) or job.count("data.updates_per_iteration") or 1
        self.drawn = self.batch or job.count("replay.batch_size") or sections.ReplayConfig().batch_size
        if job.replays and not job.from_data:
            self._replay(job)

    def _sequence(self, job: Job) -> int | None:
        given = job.number("model.max_seq_len", least=1) or job.count("network.max_seq_len") if job.core else None
        if job.core is None or job.replays:
            return (given or _SEQUENCE) if job.core else None
        if given is None or traits(job.config_class).whole_sequences:
            return given or self.steps
        return min(plan.divisors(self.steps), key=lambda n: abs(math.log(n / given)))

    def _counts(self, job: Job) -> list[int]:
        """Return the numbers of minibatches into which the rows of a device can be cut."""
        envs = self.num_envs // (self.devices if self.shared else 1)
        whole = traits(job.config_class).whole_sequences  # IMPALA's are of columns
        parts = self.steps if self.sequence is None else self.steps // self.sequence
        if whole or self.sequence is None:
            return plan.divisors(envs if whole else envs * parts)
        return [n for n in plan.divisors(envs * parts) if envs % (n // math.gcd(parts, n)) == 0]

    def _replay(self, job: Job) -> None:
        """Set the rate of updates: RLlib learns once after a fragment of every environment, or by training_intensity.

        Where `base` has a rate of updates, a fragment only counts the steps before them.
        """
        self.length = None
        intensity = job.number("training_intensity", least=0, whole=False)
        if not self.fragment and not intensity:
            return
        steps = (self.fragment or 1) * self.in_a_round
        updates = 1
        if intensity:
            rounds = intensity * steps / (self.batch or sections.ReplayConfig().batch_size)
            steps *= 1 if rounds >= 1 else round(1 / rounds)
            updates = max(1, round(rounds))
        rate = Fraction(updates, steps)
        if self.settled_rate and not intensity:
            rate = Fraction(self.settled_rate).limit_denominator(10_000)
        self.updates_per_step = float(rate)
        whole = math.lcm(self.num_envs, rate.denominator)
        self.train_every = whole * max(1, round(steps / whole))
        self.rows = self.train_every

    def iteration(self, job: Job) -> int:
        """Return the environment steps of one train() of RLlib; updates, where the run learns from data alone."""
        if job.from_data:
            trained = job.number("min_train_timesteps_per_iteration", least=0) or 0
            sampled = job.number("min_sample_timesteps_per_iteration", least=0) or 0
            rounds = max(math.ceil(trained / (self.drawn * self.passes)), math.ceil(sampled / self.drawn), 1)
            return rounds * self.passes
        least = job.number("min_sample_timesteps_per_iteration", least=0)
        if least is None:
            least = _ITERATION.get(job.algo, 0) if job.replays else 0
        rows = self.rows if not job.replays or self.train_every else self.num_envs
        return max(1, math.ceil(least / rows)) * rows

    def updates_of(self, job: Job, steps: float, *, trained: bool = False) -> int:
        """Return the updates from data after which RLlib has counted so many steps.

        RLlib counts a batch for each iteration as sampled, and for each update as trained.
        """
        return math.ceil(steps / self.drawn) * (1 if trained else self.passes)


# ---------------------------------------------------------------- rules and their use

Rule = Callable[[Job, str, Any], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of the rows with these newest names."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def translate(job: Job, names: Iterable[str] | None = None) -> None:
    """Translate every given key, or those named: by its rule, as a move, or with the reason why not."""
    for spelled in job.raw if names is None else names:
        row, value = KEYS.get(spelled), job.raw[spelled]
        if row is None:
            _unknown(job, spelled)
        elif value is None and row.name != "grad_clip":
            job.drop(spelled, "null: not set")
        elif _is_unset(row.name, value):
            job.drop(spelled, "-1: not set")
        elif job.spelled.get(row.name, spelled) != spelled:
            job.drop(spelled, f"{job.spelled[row.name]} is given, too")
        else:
            try:
                _translate(job, row, spelled, value)
            except InputError as e:
                job.faults += e.errors


def _translate(job: Job, row: Row, spelled: str, value: Any) -> None:
    """Translate a key by its row: checks the value, and applies the rule or converts it."""
    for reason, holds in row.unless.items():
        if holds(job, value):
            return job.drop(spelled, reason.format(algo=job.algo, value=shown(value)))
    if row.takes == "mapping" and not isinstance(value, Mapping):
        return job.wrong(spelled, "a mapping", value)
    if row.takes == "mapping" and not value:
        return job.drop(spelled, "it is empty")
    if " or " in row.takes and value not in row.takes.split(" or "):
        return job.wrong(spelled, row.takes, value)
    if row.takes in ("whole", "number"):
        value = job.number(row.name, least=row.least, whole=row.takes == "whole")
        if value is None:
            return None
    if found := RULES.get(row.name):
        return found(job, spelled, value)
    if not row.ours:
        return job.lack(spelled, row.note) if row.lacking and asks(value) else job.drop(spelled, row.note)
    for ours in row.ours.split(", "):
        note = row.said if isinstance(row.said, str) else row.said(job, value)
        job.put(spelled, ours, row.to(job, value) if row.to else value, note)
    return None


def _unknown(job: Job, key: str) -> None:
    if key.rpartition(".")[2].startswith("_"):
        return job.drop(key, "an inner switch of RLlib")
    near = difflib.get_close_matches(key, KEYS, 1)
    line = f"{job.prefix}{key}: unknown" + (f": the nearest is {near[0]}" if near else "")
    line += f", which is {KEYS[near[0]].ours} here" if near and KEYS[near[0]].ours else ""
    job.lines.append(line)
    return job.lacking.append(line)


def begin(job: Job) -> None:
    """Set what follows from the algorithm's name: its core, and RLlib's default sequences."""
    for key, value in job.implied.items():
        _translate(job, KEYS[key], f"{job.source.upper()}'s {key}", value)
    if job.asked_core and not any(job.given.get(key) for key in SWITCHES):
        job.put("run", "network.core.name", job.core, f"{job.source} has a memory")


def canonical(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys as the table has them: a.b for b in a dict a that belongs to RLlib."""
    for name, value in data.items():
        name = CONTAINERS.get(str(name), str(name))
        if name in CONTAINERS and isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}", given) for inner, given in value.items())
        else:
            yield name, value


def asks(value: Any) -> bool:
    """Return whether the value of a key asks for something: RLlib also writes its own classes, and what is off."""
    return bool(value) and "ray.rllib." not in str(value)


def shown(value: Any) -> str:
    """Return a value as text for a line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def value_at(tree: Any, key: str) -> Any:
    """Return the value of a dotted key in a tree; None: it is not set there."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the tree of one key.

    >>> nested("algo.lr", 0.1)
    {'algo': {'lr': 0.1}}
    """
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _is_unset(name: str, value: Any) -> bool:
    return name not in _NEGATIVE and value == -1 and not isinstance(value, bool)


def _is_same(value: Any, default: Any) -> bool:
    plain = schema.plain(default)
    return value == plain and isinstance(value, bool) == isinstance(plain, bool)


def _is_schedule(value: Any) -> bool:
    is_point = lambda x: isinstance(x, list | tuple) and len(x) == 2 and all(map(is_number, x))
    return isinstance(value, list | tuple) and bool(value) and all(map(is_point, value))
