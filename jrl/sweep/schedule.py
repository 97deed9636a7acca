"""Schedulers of a sweep: where its members pause, and what becomes of them there.

    none                                                    each member is trained to its end
    asha(eta=3, first=null)                                 of the points that pause, 1 of eta goes on (Li et al. 2018)
    pbt(interval=null, quantile=0.25, resample=0.25,        the worst go on from copies of the best, with other values
        factor=1.25, burn_in=0)                             (Jaderberg et al. 2017)

A decision follows from scores alone. It is plain data, which the sweep writes down before it acts on it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import yaml
from annotated_types import Interval

from jrl.errors import InputError
from jrl.fields import plain_yaml, schema
from jrl.fields.bounds import Steps, Unit
from jrl.fields.validation import section
from jrl.sweep.space import Space

Scores = Mapping[str, float]  # member -> objective, greater is better; NaN: it has none


@section
class Asha:
    """Successive halving: all members pause at rungs, and the best share of the points goes on."""

    eta: Annotated[int, Interval(ge=2, le=100)] = 3  # of so many points one goes on, for so many times the steps
    first: Steps | None = None  # steps to the first rung; null: so that the last rung has one point left, or about

    def pauses(self, budget: int, points: int, least: int) -> list[int]:
        """Returns steps to each rung, the end not among them.

        Args:
          budget: steps of a member that is never stopped.
          points: number of points that begin.
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
        found: list[int] = []
        while rung < budget and len(found) < halvings:
            found.append(rung)
            rung *= self.eta
        return found

    def decided(self, members: Mapping[str, Mapping[str, Any]], scores: Scores) -> dict[str, Any]:
        """Returns {"stopped": names}, of members that have paused, what differs between them, and their scores.

        All seeds of a point go on together.
        """
        points: dict[str, list[str]] = {}
        for name, changed in members.items():
            points.setdefault(point_of(changed), []).append(name)
        means = {point: np.mean([scores[name] for name in names]) for point, names in points.items()}
        order = sorted(points, key=lambda point: -means[point] if math.isfinite(means[point]) else math.inf)
        stopped = order[max(1, len(order) // self.eta) :]
        return {"stopped": [name for point in stopped for name in points[point]]}


@section
class Pbt:
    """Population based training: at every interval the worst members take over the best and change their values."""

    interval: Steps | None = None  # steps between two; null: a twentieth of the run
    quantile: Annotated[float, Interval(gt=0, le=0.5)] = 0.25  # of the members, that are replaced and that are copied
    resample: Unit = 0.25  # probability of a value that is drawn anew; else it is changed by `factor`
    factor: Annotated[float, Interval(gt=1, le=100)] = 1.25  # by which a value is multiplied or divided
    burn_in: Annotated[int, Interval(ge=0)] = 0  # steps before which nobody is replaced

    def pauses(self, budget: int, points: int, least: int) -> list[int]:
        """Returns steps at which members are compared; arguments and errors as `Asha.pauses`."""
        interval = self.interval or max(least, budget // 20)
        if interval < least:
            raise InputError(
                f"--scheduler pbt: interval={interval} must be at least {least}, where members have a score"
            )
        return [step for step in range(interval, budget, interval) if step >= max(self.burn_in, least)]

    def decided(
        self, members: Mapping[str, Mapping[str, Any]], scores: Scores, spaces: Mapping[str, Space], seed: Sequence[int]
    ) -> dict[str, Any]:
        """Returns {"copies": [{member, source, changed}]}, where `changed` has the member's values from now on.

        Args:
          members: members that have paused, and the values by which they were trained.
          scores: of each.
          spaces: of the values that change.
          seed: of the draws.
        """
        rng = np.random.default_rng(seed)
        order = sorted(members, key=lambda name: -scores[name] if math.isfinite(scores[name]) else math.inf)
        good = [name for name in order if math.isfinite(scores[name])]
        count = min(max(1, round(self.quantile * len(order))), len(order) // 2, len(good))
        copies = []
        for name in order[len(order) - count :] if count else []:
            source = good[int(rng.integers(count))]
            values = {key: self._changed(spaces[key], members[source][key], rng) for key in spaces}
            kept = {key: value for key, value in members[name].items() if key not in spaces}
            copies.append({"member": name, "source": source, "changed": {**values, **kept}})
        return {"copies": copies}

    def _changed(self, space: Space, value: Any, rng: np.random.Generator) -> Any:
        if rng.random() < self.resample:
            return space.at(float(rng.random()))
        return space.changed(value, self.factor if rng.random() < 0.5 else 1 / self.factor)


Scheduler = Asha | Pbt
_KINDS: dict[str, type] = {"asha": Asha, "pbt": Pbt}


def parse(text: str) -> Scheduler | None:
    """Reads a scheduler as it is typed, such as `asha` or `pbt(interval=20000, burn_in=1e5)`. Raises InputError."""
    name, bracket, inside = text.strip().partition("(")
    if name.strip() == "none" and not bracket:
        return None
    if name.strip() not in _KINDS or (bracket and not inside.endswith(")")):
        raise InputError(f"--scheduler {text}: expected none, asha, pbt, or one with its settings: asha(eta=4)")
    try:
        pairs = [part.split("=") for part in inside.removesuffix(")").split(",") if part.strip()]
        given = {key.strip(): plain_yaml.parse(value) for key, value in pairs}
        if len(given) < len(pairs):
            raise ValueError("a setting is there twice")
    except (ValueError, yaml.YAMLError) as e:
        raise InputError(f"--scheduler {text}: expected each setting once, as key=value: asha(eta=4)") from e
    problems: list[schema.Problem] = []
    found = schema.build(_KINDS[name.strip()], given, problems)
    if problems:
        raise InputError(*(f"--scheduler {name.strip()}: {problem.message}" for problem in problems))
    return found


def point_of(changed: Mapping[str, Any]) -> str:
    """Returns a member's values, as typed, without the seed: those that its point's members share."""
    return ", ".join(f"{key}={plain_yaml.flow(value)}" for key, value in changed.items() if key != "run.seed")


def text(scheduler: Scheduler) -> str:
    """Returns a scheduler as `parse` reads it."""
    values = {key: value for key, value in vars(scheduler).items() if value is not None}
    return f"{type(scheduler).__name__.lower()}({', '.join(f'{k}={v}' for k, v in values.items())})"
