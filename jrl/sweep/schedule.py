"""Schedulers of a sweep: the steps at which members pause, and the decisions there.

    none                                                    each member trains to its end
    asha(eta=3, first=null)                                 one of `eta` paused points continues (Li et al. 2018)
    pbt(interval=null, quantile=0.25, resample=0.25,        the worst members become copies of the best, with other
        factor=1.25, burn_in=0)                             values (Jaderberg et al. 2017)

A decision depends on scores only. It is plain data, which the sweep writes to population.json before applying it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import yaml
from annotated_types import Interval

from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.bounds import Steps, Unit
from jrl.fields.validation import section
from jrl.sweep.space import Space

Scores = Mapping[str, float]  # member -> objective, greater is better; NaN: no objective


@section
class Asha:
    """Successive halving: all members pause at rungs, and the best share of the points continues."""

    eta: Annotated[int, Interval(ge=2, le=100)] = 3  # one of `eta` points continues, for `eta` times the steps
    first: Steps | None = None  # steps to the first rung; null: chosen so that about one point passes the last rung

    def list_pauses(self, budget: int, points: int, least: int) -> list[int]:
        """Return the environment steps of each rung, without the end.

        Args:
          budget: steps of a member that is never stopped.
          points: number of points at the start.
          least: steps until a member has a score.
        Raises:
          InputError: `first` is not between `least` and the budget.
        """
        if self.first is not None and not least <= self.first < budget:
            raise InputError(
                f"--scheduler asha: first={self.first} must be at least {least}, where members have a score, and below "
                f"the {budget} steps of a run"
            )
        halvings = math.floor(math.log(max(points, 1), self.eta) + 1e-9)
        rung = self.first or max(least, math.ceil(budget / self.eta**halvings))
        rungs: list[int] = []
        while rung < budget and len(rungs) < halvings:
            rungs.append(rung)
            rung *= self.eta
        return rungs

    def decide(self, members: Mapping[str, Mapping[str, Any]], scores: Scores) -> dict[str, Any]:
        """Return {"stopped": names}. All seeds of a point continue or stop together.

        Args:
          members: name -> values of each paused member.
          scores: score of each paused member.
        """
        points: dict[str, list[str]] = {}
        for name, values in members.items():
            points.setdefault(format_point(values), []).append(name)
        means = {point: np.mean([scores[name] for name in names]) for point, names in points.items()}
        order = sorted(points, key=lambda point: -means[point] if math.isfinite(means[point]) else math.inf)
        stopped = order[max(1, len(order) // self.eta) :]
        return {"stopped": [name for point in stopped for name in points[point]]}


@section
class Pbt:
    """Population based training: regularly the worst members become copies of the best, with other values."""

    interval: Steps | None = None  # steps between two comparisons; null: a twentieth of the run
    quantile: Annotated[float, Interval(gt=0, le=0.5)] = 0.25  # share of members replaced, and share copied
    resample: Unit = 0.25  # probability that a value is drawn again; otherwise `factor` changes it
    factor: Annotated[float, Interval(gt=1, le=100)] = 1.25  # multiplies or divides a value
    burn_in: Annotated[int, Interval(ge=0)] = 0  # steps before the first replacement

    def list_pauses(self, budget: int, points: int, least: int) -> list[int]:
        """Return the environment steps at which members are compared; arguments and errors as `Asha.list_pauses`."""
        interval = self.interval or max(least, budget // 20)
        if interval < least:
            raise InputError(
                f"--scheduler pbt: interval={interval} must be at least {least}, where members have a score"
            )
        return [step for step in range(interval, budget, interval) if step >= max(self.burn_in, least)]

    def decide(
        self, members: Mapping[str, Mapping[str, Any]], scores: Scores, spaces: Mapping[str, Space], seed: Sequence[int]
    ) -> dict[str, Any]:
        """Return {"copies": [{member, source, changed}]}; `changed` holds the member's next values.

        Args:
          members: name -> current values of each paused member.
          scores: score of each paused member.
          spaces: spaces of the values that change.
          seed: seed of the draws.
        """
        rng = np.random.default_rng(seed)
        order = sorted(members, key=lambda name: -scores[name] if math.isfinite(scores[name]) else math.inf)
        good = [name for name in order if math.isfinite(scores[name])]
        count = min(max(1, round(self.quantile * len(order))), len(order) // 2, len(good))
        copies = []
        for name in order[len(order) - count :] if count else []:
            source = good[int(rng.integers(count))]
            values = {key: self._change_value(spaces[key], members[source][key], rng) for key in spaces}
            unchanged = {key: value for key, value in members[name].items() if key not in spaces}
            copies.append({"member": name, "source": source, "changed": {**values, **unchanged}})
        return {"copies": copies}

    def _change_value(self, space: Space, value: Any, rng: np.random.Generator) -> Any:
        if rng.random() < self.resample:
            return space.to_value(float(rng.random()))
        return space.perturb(value, self.factor if rng.random() < 0.5 else 1 / self.factor)


Scheduler = Asha | Pbt
_SCHEDULERS: dict[str, type] = {"asha": Asha, "pbt": Pbt}


def parse_scheduler(text: str) -> Scheduler | None:
    """Parse a scheduler such as `asha` or `pbt(interval=20000, burn_in=1e5)`; None for `none`. Raises InputError."""
    name, bracket, inside = text.strip().partition("(")
    name = name.strip()
    if name == "none" and not bracket:
        return None
    if name not in _SCHEDULERS or (bracket and not inside.endswith(")")):
        raise InputError(f"--scheduler {text}: expected none, asha, pbt, or a scheduler with settings: asha(eta=4)")
    try:
        pairs = [part.split("=") for part in inside.removesuffix(")").split(",") if part.strip()]
        settings = {key.strip(): schema.parse(value) for key, value in pairs}
        if len(settings) < len(pairs):
            raise ValueError("repeated setting")
    except (ValueError, yaml.YAMLError) as e:
        raise InputError(f"--scheduler {text}: expected each setting once, as key=value: asha(eta=4)") from e
    problems: list[schema.Problem] = []
    scheduler = schema.build(_SCHEDULERS[name], settings, problems)
    if problems:
        raise InputError(*(f"--scheduler {name}: {problem.message}" for problem in problems))
    return scheduler


def format_point(values: Mapping[str, Any]) -> str:
    """Return a member's values as typed, without the seed; members of the same point have the same text."""
    return ", ".join(f"{key}={schema.flow(value)}" for key, value in values.items() if key != "run.seed")
