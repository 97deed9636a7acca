"""Settings of a sweep: the section `sweep` of a YAML file, and the options of `python -m jrl.sweep` over it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl import config
from jrl.config import RunConfig, Sizes, checks
from jrl.errors import InputError, short, shown
from jrl.fields import plain_yaml, schema
from jrl.fields.bounds import Few
from jrl.fields.validation import section
from jrl.sweep import schedule
from jrl.sweep.space import KINDS, MOST_POINTS, Space, grid, parse

SECTION = "sweep"
SEARCHES = ("random", "sobol", "tpe", "gp")
PROPOSE = ("tpe", "gp")  # those that learn from points before
Samples = Annotated[int, Interval(ge=1, le=MOST_POINTS)]


@section
class SweepConfig:
    """Settings of a sweep."""

    set: dict[str, Any] = dataclasses.field(default_factory=dict)  # key -> a space, such as log(1e-4, 1e-2, 8)
    seeds: Few = 1  # runs of each point, with seeds from run.seed on
    samples: Samples | None = None  # points that are drawn; null: the whole grid
    # how points are drawn; tpe and gp learn from those before (optuna)
    search: Literal["random", "sobol", "tpe", "gp"] = "sobol"
    batch: Few = 8  # of tpe and gp: points that are proposed and trained together
    scheduler: str = "none"  # or asha, pbt, with its settings in brackets: asha(eta=4)
    objective: str | None = None  # key of result rows, greater is better; null: evaluation/return, else episode/return
    max_members: Few | None = None  # members that are one program at once; null: as many as the memory holds


class Plan:
    """A sweep whose settings were read. Raises InputError: all that is wrong."""

    def __init__(self, settings: SweepConfig):
        self.settings = settings
        errors: list[str] = []
        self.spaces: dict[str, Space] = {}  # by key of the config
        self.scheduler: schedule.Scheduler | None = None  # None: members are trained to their ends
        for key, typed in settings.set.items():
            try:
                found = parse(key, str(typed))
                if found is None:
                    raise InputError(f"{SECTION}.set: {shown(key)}={short(typed)}: expected {KINDS}")
                self.spaces[key] = found
            except InputError as e:
                errors += e.errors
        try:
            self.scheduler = schedule.parse(settings.scheduler)
        except InputError as e:
            errors += e.errors
        if "run.seed" in self.spaces:
            errors.append("--set run.seed: --seeds says how many seeds each point has")
        if isinstance(self.scheduler, schedule.Pbt):
            errors += [
                f"{key}: pbt changes values while members are trained, which floats of the algorithm can be: "
                "leave it out, or take another --scheduler"
                for key, found in self.spaces.items()
                if not (key.startswith("algo.") and found.is_of_floats)
            ]
            if settings.search in PROPOSE:
                errors.append(f"--search {settings.search}: pbt changes the values itself: take random or sobol")
        if errors:
            raise InputError(*errors)

    def objective(self, cfg: RunConfig) -> str:
        """Returns the key of result rows that says how good a member is. Raises InputError: no row has it."""
        if (given := self.settings.objective) is not None:
            if fault := checks.metric_fault(cfg, "--objective", given):
                raise InputError(fault)
            return given
        return "evaluation/return" if checks.evaluates(cfg) else "episode/return"

    def pauses(self, cfg: RunConfig, points: int) -> list[int]:
        """Returns steps at which members are compared. Raises InputError: the scheduler asks for others than can be."""
        if self.scheduler is None:
            return []
        if "jsonl" not in cfg.run.log:
            raise InputError("run.log: a scheduler compares the rows of result.jsonl: add jsonl")
        sizes = Sizes(cfg)
        least = sizes.report_every
        if self.objective(cfg).startswith("evaluation/"):
            every = cfg.evaluation.every or (cfg.evaluation.interval or 1) * sizes.rows
            least = max(least, every)
        return self.scheduler.pauses(int(cfg.stop[sizes.counts_by]), points, least)


def read(data: Mapping[str, Any], over_it: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Plan, dict, list[str]]:
    """Divides what was given into the sweep's plan, the data of its runs, and their overrides.

    Args:
      data: of a YAML file, which may have a section `sweep`.
      over_it: options of the command line; None: not given.
      overrides: texts `key=value` of --set, of which those with a space are the sweep's.
    Raises:
      InputError: all that is wrong.
    """
    rest = {name: value for name, value in data.items() if name != SECTION}
    own = data.get(SECTION) or {}
    given = own if isinstance(own, Mapping) else {"": own}
    spaces, plain = schema.flatten(given.get("set") or {}), list[str]()
    for text in overrides:  # the last of a key counts
        key, _, value = text.partition("=")
        spaces.pop(key, None)
        plain = [other for other in plain if other.partition("=")[0] != key]
        if parse(key, value) is None:
            plain.append(text)
        else:
            spaces[key] = value
    problems: list[schema.Problem] = []
    options = {name: value for name, value in over_it.items() if value is not None}
    known = [f"{SECTION}.{field.name}" for field in dataclasses.fields(SweepConfig)]
    asked_for = {**given, **options, "set": spaces}
    settings = schema.build(SweepConfig, asked_for, problems, prefix=f"{SECTION}.", known=known)
    if problems:
        raise InputError(*(problem.message for problem in problems))
    errors = []
    if "search" in asked_for and settings.samples is None:
        errors.append(
            f"--search {settings.search}: --samples says how many points it may try; without it all are tried"
        )
    if "batch" in asked_for and settings.search not in PROPOSE:
        errors.append(f"--batch {settings.batch}: of --search {' and '.join(PROPOSE)} alone: leave it out")
    if errors:
        raise InputError(*errors)
    if not spaces:
        raise InputError(f"--set: none of them is a space, such as algo.lr=log(1e-4,1e-2,8): {KINDS}")
    return Plan(settings), rest, plain


def plain(settings: SweepConfig) -> dict[str, Any]:
    """Returns settings as plain data, which `stored` reads."""
    return dict(schema.plain(settings))


def stored(data: Mapping[str, Any]) -> Plan:
    """Returns the plan whose settings were kept. Raises InputError: they are not whole."""
    problems: list[schema.Problem] = []
    settings = schema.build(SweepConfig, data, problems)
    if problems:
        raise InputError(*(f"population.json: {problem.message}" for problem in problems))
    return Plan(settings)


def checked(cfg: RunConfig, plan_: Plan) -> None:
    """Raises InputError if the grid has too many points, or the config has no key of a space or refuses its values."""
    if plan_.settings.samples is None:
        grid(plan_.spaces)
    data, errors = config.to_dict(cfg), dict[str, None]()
    for key, space in plan_.spaces.items():
        for value in space.values or (space.at(0.0), space.at(1 - 1e-9)):
            try:
                config.override(data, [f"{key}={plain_yaml.flow(value)}"])
            except InputError as e:
                errors |= dict.fromkeys(e.errors)
    if errors:
        raise InputError(*errors)
