"""Settings of a sweep: section `sweep` of a YAML file, and options of `python -m jrl.sweep` that override it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl import config
from jrl.config import RunConfig, Sizes, checks
from jrl.errors import InputError, short, shown
from jrl.fields import schema
from jrl.fields.bounds import Few
from jrl.fields.validation import section
from jrl.sweep import schedule
from jrl.sweep.space import KINDS, MAX_POINTS, Space, build_grid, parse_space

SECTION = "sweep"
SEARCHES = ("random", "sobol", "tpe", "gp")
OPTUNA_SEARCHES = ("tpe", "gp")  # searches that learn from earlier points
Samples = Annotated[int, Interval(ge=1, le=MAX_POINTS)]


@section
class SweepConfig:
    """Settings of a sweep."""

    set: dict[str, Any] = dataclasses.field(default_factory=dict)  # key -> a space, such as log(1e-4, 1e-2, 8)
    seeds: Few = 1  # runs of each point, with seeds from run.seed on
    samples: Samples | None = None  # number of drawn points; null: the whole grid
    # how points are drawn; tpe and gp learn from earlier points (optuna)
    search: Literal["random", "sobol", "tpe", "gp"] = "sobol"
    batch: Few = 8  # tpe and gp: points that are proposed and trained at once
    scheduler: str = "none"  # or asha, pbt, with its settings in brackets: asha(eta=4)
    objective: str | None = None  # key of result rows, greater is better; null: evaluation/return, else episode/return
    max_members: Few | None = None  # members that are one program at once; null: as many as the memory holds


class SweepPlan:
    """Parsed settings of a sweep.

    Attributes:
      settings: settings as typed.
      spaces: config key -> space.
      scheduler: scheduler of the members; None: members train to their ends.
    Raises:
      InputError: all invalid settings.
    """

    def __init__(self, settings: SweepConfig):
        self.settings = settings
        errors: list[str] = []
        self.spaces: dict[str, Space] = {}
        self.scheduler: schedule.Scheduler | None = None
        for key, typed in settings.set.items():
            try:
                space = parse_space(key, str(typed))
                if space is None:
                    raise InputError(f"{SECTION}.set: {shown(key)}={short(typed)}: expected {KINDS}")
                self.spaces[key] = space
            except InputError as e:
                errors += e.errors
        try:
            self.scheduler = schedule.parse_scheduler(settings.scheduler)
        except InputError as e:
            errors += e.errors
        if "run.seed" in self.spaces:
            errors.append("--set run.seed: expected a value, got a space: give the number of seeds by --seeds")
        if isinstance(self.scheduler, schedule.Pbt):
            errors += [
                f"{key}: pbt changes values during training, which works for floats of the algorithm only: "
                "leave it out, or take another --scheduler"
                for key, space in self.spaces.items()
                if not (key.startswith("algo.") and space.has_floats)
            ]
            if settings.search in OPTUNA_SEARCHES:
                errors.append(f"--search {settings.search}: pbt changes the values itself: take random or sobol")
        if errors:
            raise InputError(*errors)

    def find_objective(self, cfg: RunConfig) -> str:
        """Return the key of result rows that scores a member. Raises InputError: no row can have it."""
        if (objective := self.settings.objective) is not None:
            if fault := checks.metric_fault(cfg, "--objective", objective):
                raise InputError(fault)
            return objective
        return "evaluation/return" if checks.evaluates(cfg) else "episode/return"

    def list_pauses(self, cfg: RunConfig, points: int) -> list[int]:
        """Return the environment steps at which the scheduler compares `points` points.

        Raises InputError: members have no score at the scheduler's steps.
        """
        if self.scheduler is None:
            return []
        if "jsonl" not in cfg.run.log:
            raise InputError("run.log: a scheduler compares the rows of result.jsonl: add jsonl")
        sizes = Sizes(cfg)
        least = sizes.report_every
        if self.find_objective(cfg).startswith("evaluation/"):
            every = cfg.evaluation.every or (cfg.evaluation.interval or 1) * sizes.rows
            least = max(least, every)
        return self.scheduler.list_pauses(int(cfg.stop[sizes.counts_by]), points, least)


def read_settings(
    data: Mapping[str, Any], options: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[SweepPlan, dict, list[str]]:
    """Separate a sweep's settings from the config of its runs.

    Args:
      data: content of a YAML file, with or without a section `sweep`.
      options: options of the command line; None: not given.
      overrides: texts `key=value` of --set; texts with a space belong to the sweep.
    Returns:
      The sweep's plan, the data of its runs, and the overrides of its runs.
    Raises:
      InputError: all invalid settings.
    """
    rest = {name: value for name, value in data.items() if name != SECTION}
    in_file = data.get(SECTION) or {}
    in_file = in_file if isinstance(in_file, Mapping) else {"": in_file}
    spaces, plain = schema.flatten(in_file.get("set") or {}), list[str]()
    for text in overrides:  # the last value of a key counts
        key, _, value = text.partition("=")
        spaces.pop(key, None)
        plain = [other for other in plain if other.partition("=")[0] != key]
        if parse_space(key, value) is None:
            plain.append(text)
        else:
            spaces[key] = value
    problems: list[schema.Problem] = []
    known = [f"{SECTION}.{field.name}" for field in dataclasses.fields(SweepConfig)]
    values = {**in_file, **{name: value for name, value in options.items() if value is not None}, "set": spaces}
    settings = schema.build(SweepConfig, values, problems, prefix=f"{SECTION}.", known=known)
    if problems:
        raise InputError(*(problem.message for problem in problems))
    errors = []
    if "search" in values and settings.samples is None:
        errors.append(
            f"--search {settings.search}: expected a number of points: add --samples N; without --search the whole "
            "grid is trained"
        )
    if "batch" in values and settings.search not in OPTUNA_SEARCHES:
        errors.append(f"--batch {settings.batch}: only for --search {' and '.join(OPTUNA_SEARCHES)}: leave it out")
    if errors:
        raise InputError(*errors)
    if not spaces:
        raise InputError(f"--set: expected at least one space, such as algo.lr=log(1e-4,1e-2,8): {KINDS}")
    return SweepPlan(settings), rest, plain


def read_stored_plan(data: Mapping[str, Any]) -> SweepPlan:
    """Return the plan whose settings population.json holds. Raises InputError: incomplete settings."""
    problems: list[schema.Problem] = []
    settings = schema.build(SweepConfig, data, problems)
    if problems:
        raise InputError(*(f"population.json: {problem.message}" for problem in problems))
    return SweepPlan(settings)


def check_spaces(cfg: RunConfig, sweep_plan: SweepPlan) -> None:
    """Raise InputError if the grid is too large, or if the config lacks a space's key or refuses its values."""
    if sweep_plan.settings.samples is None:
        build_grid(sweep_plan.spaces)
    data, errors = config.to_dict(cfg), dict[str, None]()
    for key, space in sweep_plan.spaces.items():
        for value in space.values or (space.to_value(0.0), space.to_value(1 - 1e-9)):
            try:
                config.override(data, [f"{key}={schema.flow(value)}"])
            except InputError as e:
                errors |= dict.fromkeys(e.errors)
    if errors:
        raise InputError(*errors)
