"""Translation of RLlib's keys to jrl's, with a line of the report for each key.

Most keys move or are converted by their row of the table. Other keys have a rule, a function `(job, key, value)` that
calls `put`, `drop`, `refuse` or `add_fault` of the job.
"""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from jrl.config import datasets, plan, sections
from jrl.errors import InputError, counted, short
from jrl.fields import schema
from jrl.fields.bounds import INT64, is_number
from jrl.fields.data import DataSets, Fresh, learns_from, traits
from jrl.rllib.table import CONTAINERS, KEYS, NO_COLLECTION, KeyRow

DEFAULT_ENVS = sections.EnvConfig(id="").num_envs
DEFAULT_POLICY = "default_policy"  # id of the policy that RLlib has by default
# algorithm -> core of a model without a core
CORES = {"r2d2": "lstm", "rnnsac": "lstm", "dt": "gtrxl"}
SWITCHES = {"model.use_lstm": "lstm", "model.use_attention": "gtrxl"}
# algorithm with replay -> environment steps of a train() in RLlib by default
_ITERATION = {"dqn": 1_000, "sac": 100, "td3": 1_000}
_LENGTH = 128  # default of rollout.length
_SEQUENCE = 20  # default steps of a sequence in RLlib, and in jrl's replay
# algorithm -> rows of a gradient step in RLlib by default, if jrl's default differs
_ROWS = {"r2d2": 1000, "dqn": 32, "simpleq": 32, "apex": 512, "td3": 100}
# keys for which -1 is a value; for other keys it means "not set"
_NEGATIVE = {"v_min", "target_entropy", "env_config", "evaluation_config", "exploration_config"}
# keys of the replay section that also apply to data sets
_OF_SAMPLES = {"batch_size", "n_step", "burn_in", "frame_stack"}
# key of jrl -> reason why it has no effect with clients
_NO_USE_WITH_CLIENTS = {
    "env_runners.num": "one server answers all clients, at one port",
    "rollout.mode": "the server answers clients while it learns",
    "rollout.batch_mode": "an episode continues in the next rollout",
    "env.horizon": "clients end their episodes",
    "env.batch_wait_ms": "external.max_wait_ms is the time that a request waits for others",
    **dict.fromkeys(
        ("env.remote_worker_envs", "env_runners.max_requests_in_flight", "env_runners.compress_observations"),
        "clients play the episodes",
    ),
}


@dataclasses.dataclass
class Job:
    """State of a translation: given keys, result and report."""

    algo: str  # jrl's name
    source: str  # RLlib's name, lower case
    config_class: type  # Config of the algorithm
    raw: Mapping[str, Any]  # given keys, as `split_containers` yields them
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # config tree of jrl that the given keys override
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)  # result
    origins: dict[str, str] = dataclasses.field(default_factory=dict)  # jrl's key -> RLlib's
    lines: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)  # lines of keys whose feature jrl lacks

    # ------------------------------------------------------------ reading

    @cached_property
    def given(self) -> dict[str, Any]:
        """Newest name -> value of the known keys that are set."""
        return self.implied | {name: self.raw[spelled] for name, spelled in self.spelled.items()}

    @cached_property
    def implied(self) -> dict[str, Any]:
        """RLlib's defaults of keys for the length of sequences and the rows of an update."""
        found: dict[str, Any] = {}
        if self.rllib_core and not self.has_samples:
            found["model.max_seq_len"] = _SEQUENCE
        elif self.rllib_core:
            if "train_batch_size_per_learner" not in self.spelled:
                found["train_batch_size"] = _ROWS.get(self.source, sections.ReplayConfig().batch_size)
            if self.source == "r2d2":
                found["training_intensity"] = 150
        return {key: value for key, value in found.items() if key not in self.spelled}

    @cached_property
    def spelled(self) -> dict[str, str]:
        """Newest name -> name in `raw` of the known keys that are set."""
        found: dict[str, str] = {}
        for spelled, value in self.raw.items():
            name = KEYS[spelled].name if spelled in KEYS else None
            if name and value is not None and not _is_unset(name, value) and (spelled == name or name not in found):
                found[name] = spelled
        return found

    @cached_property
    def has_samples(self) -> bool:
        """Whether the algorithm learns from samples of a replay or of data sets."""
        return learns_from(self.config_class) is not Fresh

    @cached_property
    def has_clients(self) -> bool:
        """Whether clients play: the input is PolicyServerInput."""
        return is_named(self.given.get("input_"), "PolicyServerInput")

    @cached_property
    def is_offline(self) -> bool:
        """Whether the run learns only from data sets, without environments to collect from."""
        if not self.has_samples or self.has_clients:
            return False
        given = self.given.get("input_", self.base_value("data.input"))
        names = list(given) if isinstance(given, Mapping | list | tuple) else [given]
        return learns_from(self.config_class) is DataSets or not any(x in names for x in (None, "", datasets.SAMPLER))

    @cached_property
    def has_one_policy(self) -> bool:
        """Whether the run has only RLlib's default policy."""
        given = self.given.get("policies")
        return given is not None and not isinstance(given, str) and set(given) <= {DEFAULT_POLICY}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Hyper-parameter of the algorithm -> default."""
        return {f.name: f.default for f in dataclasses.fields(self.config_class)}

    @cached_property
    def rllib_core(self) -> str | None:
        """Core by RLlib's keys, in jrl's name; None: none."""
        cores = (core for key, core in SWITCHES.items() if self.raw.get(self.spelled.get(key, "")) is True)
        return next(cores, CORES.get(self.source))

    @cached_property
    def core(self) -> str | None:
        """Core of the run, in jrl's name; None: none."""
        name = self.base_value("network.core.name")
        return self.rllib_core or (name if isinstance(name, str) else None)

    @cached_property
    def sizes(self) -> "RllibSizes":
        return RllibSizes(self)

    def base_value(self, ours: str) -> Any:
        """Returns the value of a key in `base`; None: not set."""
        return get_value(self.base, ours)

    def base_count(self, ours: str) -> int | None:
        """Returns the value of a key in `base` if it is an integer above 0; None otherwise."""
        found = self.base_value(ours)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def number(self, key: str, *, least: float = -math.inf, whole: bool = True) -> Any:
        """Returns the given number of a key; None: not set, or a fault."""
        name = KEYS[key].name
        value, key = self.given.get(name), self.spelled.get(name, key)
        if value is None or value == "auto":
            return None
        good = is_number(value) and value >= least and abs(value) <= INT64
        if not good or (whole and value != int(value)):
            return self.add_fault(
                key, f"a {'whole ' * whole}number" + f" of at least {least}" * (least > -math.inf), value
            )
        return int(value) if whole else value

    # ------------------------------------------------------------ results of rules

    def put(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Sets a key of jrl and reports it, or reports why the key has no effect in the run."""
        section, _, name = ours.partition(".")
        if section == "algo" and name != "name" and name.partition(".")[0] not in self.fields:
            return self.drop(key, f"{self.algo} has no {name}")
        if section == "replay" and not self.has_samples:
            return self.drop(key, f"{self.algo} learns from each rollout once and keeps no replay")
        if reason := self._no_use(section, name):
            return self.drop(key, reason)
        if self.is_offline and section == "algo" and _is_schedule(value):  # schedules of RLlib count steps
            value = [[self.sizes.updates_of(self, steps), number] for steps, number in value]
            note = "; ".join(filter(None, [note, "steps become updates"]))
        self.set(ours, value, key)
        return self.report(key, ours, value, note)

    def report(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Reports the value of jrl that a key becomes."""
        self.lines.append(f"{key} -> {ours}: {format_value(value)}" + (f"  ({note})" if note else ""))

    def _no_use(self, section: str, name: str) -> str | None:
        if self.has_clients:
            return _NO_USE_WITH_CLIENTS.get(f"{section}.{name}")
        if self.is_offline and (section in ("rollout", "env_runners") or (section, name) == ("env", "num_envs")):
            return NO_COLLECTION
        if self.is_offline and section == "replay" and name not in _OF_SAMPLES:
            return "there is no replay: rows are drawn from the data"
        return None

    def set(self, ours: str, value: Any, key: str) -> None:
        """Sets a key of jrl without a report; a mapping replaces the mapping before."""
        section, _, name = ours.partition(".")
        if isinstance(value, Mapping):
            self.tree.setdefault(section, {})[name] = dict(value)
        else:
            self.tree = schema.merge(self.tree, nest_key(ours, value))
        self.origins[ours] = key

    def drop(self, key: str, reason: str) -> None:
        """Reports that a key has no effect."""
        self.lines.append(f"{key}: dropped: {reason}")

    def refuse(self, key: str, reason: str) -> None:
        """Reports that jrl lacks the feature of a key, so that learning would differ without it."""
        self.lines.append(f"{key}: lacking: {reason}")
        self.refused.append(f"{key}: {reason}")

    def add_fault(self, key: str, expected: str, value: Any) -> None:
        fault = f"{key}: expected {expected}, got {short(value)}"
        self.faults += [fault] if fault not in self.faults else []

    @property
    def builder(self) -> Any:
        """Config class of the algorithm, which translates settings inside a key."""
        from jrl.rllib import config_class

        return config_class(self.algo)

    def build_nested(self, key: str, build: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Returns `build(*args)`, sections of the settings in a key; refuse the settings if they are wrong."""
        try:
            return build(*args)
        except InputError as e:
            for message in e.errors:
                self.refuse(key, message)
            return {}

    def steps(self, number: int) -> str:
        """Returns a number of steps, or of updates in a run from data alone, in words."""
        return counted(number, "update") if self.is_offline else f"{number} steps"


class RllibSizes:
    """Numbers of environments, steps, batches and gradient steps. Each depends on several keys."""

    def __init__(self, job: Job):
        number = job.number
        self.runners = number("num_env_runners", least=0)
        each = number("num_envs_per_env_runner", least=1)
        self.collectors = max(1, self.runners or 0)  # processes
        named = self.collectors * each if each else job.base_count("env.num_envs")
        self.envs_per_round = named or self.collectors  # RLlib learns after a fragment of each of these environments
        # the nearest to jrl's default that runners can share: rows and the rate of updates do not depend on this number
        self.num_envs = named or self.collectors * max(1, round(DEFAULT_ENVS / self.collectors))
        self.fragment = number("rollout_fragment_length", least=1)
        learners = number("num_learners", least=0) or 1
        gpus = number("num_gpus", least=0, whole=False) or 0
        base_value = job.base_value("devices.learners") or ()
        most = len(base_value) if isinstance(base_value, list | tuple) else 1
        self.devices = int(max(gpus, learners, most, 1))
        self.shared = job.is_offline or self.num_envs % self.devices == 0
        self.batch = number("train_batch_size", least=1)
        if self.batch is None and (share := number("train_batch_size_per_learner", least=1)):
            self.batch = share * max(1, learners)
        # sequences of IMPALA, APPO and A3C have the length of a fragment, independent of the batch
        self.sequences = job.algo in ("impala", "appo") or job.source == "a3c"
        self.length = self.fragment
        if self.batch is not None and not (self.sequences and self.fragment):
            self.length = max(1, round(self.batch / self.num_envs))
        self.steps = self.length or job.base_count("rollout.length") or _LENGTH
        self.rows = self.num_envs * self.steps
        self.sequence = self._sequence(job)  # steps of a sequence to learn from; None: no core
        self.minibatch = number("minibatch_size", least=1)
        if self.sequences and self.minibatch is None and self.batch:
            self.minibatch = self.batch
        self.minibatches: int | None = None
        self.fitted_minibatches: int | None = None  # number of minibatches, where a core needs another than the default
        if not job.has_samples and "num_minibatches" in job.fields:
            counts, size = self._counts(job), self.minibatch
            if size:
                self.minibatches = min(counts, key=lambda n: abs(self.rows / n - size))
            elif self.sequence and (default := job.fields["num_minibatches"]) not in counts:
                self.fitted_minibatches = min(counts, key=lambda n: abs(n - default))
        self.train_every: int | None = None
        rate = job.base_value("replay.updates_per_step")
        self.settled_rate = rate if is_number(rate) and rate > 0 else None
        self.updates_per_step = self.settled_rate or sections.ReplayConfig().updates_per_step
        # updates of an iteration of a run from data
        self.updates_per_iteration = (
            number("dataset_num_iters_per_learner", least=1) or job.base_count("data.updates_per_iteration") or 1
        )
        self.batch_rows = self.batch or job.base_count("replay.batch_size") or sections.ReplayConfig().batch_size
        if job.has_samples and not job.is_offline:
            self._replay(job)

    def _sequence(self, job: Job) -> int | None:
        given = job.number("model.max_seq_len", least=1) or job.base_count("network.max_seq_len") if job.core else None
        if job.core is None or job.has_samples:
            return (given or _SEQUENCE) if job.core else None
        if given is None or traits(job.config_class).whole_sequences:
            return given or self.steps
        return min(plan.divisors(self.steps), key=lambda n: abs(math.log(n / given)))

    def _counts(self, job: Job) -> list[int]:
        """Returns the numbers of minibatches that divide the rows of a device."""
        envs = self.num_envs // (self.devices if self.shared else 1)
        whole = traits(job.config_class).whole_sequences  # IMPALA: minibatches of whole environments
        parts = self.steps if self.sequence is None else self.steps // self.sequence
        if whole or self.sequence is None:
            return plan.divisors(envs if whole else envs * parts)
        return [n for n in plan.divisors(envs * parts) if envs % (n // math.gcd(parts, n)) == 0]

    def _replay(self, job: Job) -> None:
        """Sets the rate of updates: RLlib learns once after a fragment of each environment, or by training_intensity.

        If `base` has a rate of updates, a fragment only sets the steps between updates.
        """
        self.length = None
        intensity = job.number("training_intensity", least=0, whole=False)
        if not self.fragment and not intensity:
            return
        steps = (self.fragment or 1) * self.envs_per_round
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
        """Returns the environment steps of a train() of RLlib, or the updates in a run from data alone."""
        if job.is_offline:
            trained = job.number("min_train_timesteps_per_iteration", least=0) or 0
            sampled = job.number("min_sample_timesteps_per_iteration", least=0) or 0
            rounds = max(
                math.ceil(trained / (self.batch_rows * self.updates_per_iteration)),
                math.ceil(sampled / self.batch_rows),
                1,
            )
            return rounds * self.updates_per_iteration
        least = job.number("min_sample_timesteps_per_iteration", least=0)
        if least is None:
            least = _ITERATION.get(job.algo, 0) if job.has_samples else 0
        rows = self.rows if not job.has_samples or self.train_every else self.num_envs
        return max(1, math.ceil(least / rows)) * rows

    def updates_of(self, job: Job, steps: float, *, trained: bool = False) -> int:
        """Returns the number of updates from data after which RLlib has counted `steps` steps.

        RLlib counts the steps of a batch as sampled once per iteration, and as trained once per update.
        """
        return math.ceil(steps / self.batch_rows) * (1 if trained else self.updates_per_iteration)


# ---------------------------------------------------------------- rules and their use

Rule = Callable[[Job, str, Any], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers the rule of rows, by their newest names."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def translate(job: Job) -> None:
    """Translates all given keys, and report each."""
    for key, value in job.implied.items():
        _translate(job, KEYS[key], f"{job.source.upper()}'s {key}", value)
    if job.rllib_core and not any(job.given.get(key) for key in SWITCHES):
        job.put("run", "network.core.name", job.core, f"{job.source} has a memory")
    for spelled, value in job.raw.items():
        row = KEYS.get(spelled)
        if row is None:
            _refuse_unknown(job, spelled)
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


def _translate(job: Job, row: KeyRow, spelled: str, value: Any) -> None:
    """Translates a key by its row: checks the value, then applies the rule or converts the value."""
    for reason, holds in row.unless.items():
        if holds(job, value):
            return job.drop(spelled, reason.format(algo=job.algo, value=format_value(value)))
    if row.takes == "mapping" and not isinstance(value, Mapping):
        return job.add_fault(spelled, "a mapping", value)
    if row.takes == "mapping" and not value:
        return job.drop(spelled, "it is empty")
    if " or " in row.takes and value not in row.takes.split(" or "):
        return job.add_fault(spelled, row.takes, value)
    if row.takes in ("whole", "number"):
        value = job.number(row.name, least=row.least, whole=row.takes == "whole")
        if value is None:
            return None
    if found := RULES.get(row.name):
        return found(job, spelled, value)
    if not row.ours:
        return job.refuse(spelled, row.note) if row.refused and is_request(value) else job.drop(spelled, row.note)
    for ours in row.ours.split(", "):
        converted = row.to(job, value) if row.to else value
        job.put(spelled, ours, converted, row.note if converted != value else "")
    return None


def _refuse_unknown(job: Job, key: str) -> None:
    if key.rpartition(".")[2].startswith("_"):
        return job.drop(key, "an internal switch of RLlib")
    near = difflib.get_close_matches(key, KEYS, 1)
    line = f"{key}: unknown" + (f": the nearest is {near[0]}" if near else "")
    line += f", which is {KEYS[near[0]].ours} here" if near and KEYS[near[0]].ours else ""
    job.lines.append(line)
    return job.refused.append(line)


def split_containers(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields keys in the form of the table: a.b for the key b of a container a of RLlib."""
    for name, value in data.items():
        name = CONTAINERS.get(str(name), str(name))
        if name in CONTAINERS and isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}", given) for inner, given in value.items())
        else:
            yield name, value


def is_request(value: Any) -> bool:
    """Returns whether a value is a user's request; RLlib's files also have its own classes and off values."""
    return bool(value) and "ray.rllib." not in str(value)


def is_named(value: Any, name: str) -> bool:
    """Returns whether a value is the class of this name, its path, or a function that creates an object of it."""
    if isinstance(value, str):
        return re.split(r"[.:]", value)[-1] == name
    code = getattr(value, "__code__", None)
    names = (getattr(value, "__name__", ""), type(value).__name__, *(code.co_names if code else ()))
    return name in (*names, *(code.co_freevars if code else ()))


def format_value(value: Any) -> str:
    """Returns a value as text for the report."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def get_value(tree: Any, key: str) -> Any:
    """Returns the value of a dotted key in a tree; None: not set."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def nest_key(key: str, value: Any) -> dict[str, Any]:
    """Returns the tree with a single dotted key.

    >>> nest_key("algo.lr", 0.1)
    {'algo': {'lr': 0.1}}
    """
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _is_unset(name: str, value: Any) -> bool:
    return name not in _NEGATIVE and value == -1 and not isinstance(value, bool)


def _is_schedule(value: Any) -> bool:
    is_point = lambda x: isinstance(x, list | tuple) and len(x) == 2 and all(map(is_number, x))
    return isinstance(value, list | tuple) and bool(value) and all(map(is_point, value))
