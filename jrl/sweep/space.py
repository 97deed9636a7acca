"""Spaces of hyper-parameters as they are typed, and the points of them that a sweep tries.

    algo.lr=log(1e-4, 1e-2, 8)       8 values, evenly spaced in the logarithm
    algo.gamma=logit(0.9, 0.999, 4)  evenly spaced in log(x / (1 - x))
    algo.ent_coef=uniform(0, 0.02, 3)
    rollout.length=pow2(16, 256)     16, 32, 64, 128, 256
    algo.num_epochs=int(2, 4)        2, 3, 4; with a third number so many of them
    network.activation=choice(tanh, relu)

In a grid every value meets every other; where points are drawn, the third number counts for nothing and may be missing.
"""

import difflib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import yaml

from jrl.errors import InputError, short, shown
from jrl.fields import plain_yaml

MOST_POINTS = 100_000  # of a sweep
_KINDS = ("choice", "uniform", "log", "int", "pow2", "logit")
_TYPED = re.compile(rf"^\s*({'|'.join(_KINDS)})\s*\((.*)\)\s*$", re.S)
KINDS = "choice(a, b, ...), uniform, log, logit (low, high, n), int(low, high[, n]), pow2(low, high)"


class Space(NamedTuple):
    """The values that one key may have."""

    kind: str
    values: tuple[Any, ...]  # of a choice
    low: float = 0.0  # as the kind scales it, see `_scaled`
    high: float = 0.0
    num: int | None = None  # values in a grid; None: not said

    def at(self, share: float) -> Any:
        """Returns the value at a share in [0, 1) of the space, whose measure is the kind's."""
        if self.kind == "choice":
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.kind in ("int", "pow2"):
            number = min(int(self.low + share * (self.high - self.low + 1)), int(self.high))
            return 2**number if self.kind == "pow2" else number
        return _unscaled(self.kind, self.low + share * (self.high - self.low))

    @property
    def is_of_floats(self) -> bool:
        """Returns whether all its values are numbers, and not all of them whole by kind."""
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.values)
        return numbers and self.kind not in ("int", "pow2")

    def share_of(self, value: Any) -> float:
        """Returns the share of the space at which a value is, the inverse of `at`."""
        if self.kind == "choice":
            return (self.values.index(value) + 0.5) / len(self.values)
        where = _scaled(self.kind, value) - self.low
        if self.kind in ("int", "pow2"):
            return (where + 0.5) / (self.high - self.low + 1)
        return float(np.clip(where / (self.high - self.low), 0.0, 1.0))

    def changed(self, value: Any, factor: float) -> Any:
        """Returns a value nearby: times `factor`, within the ends; of probabilities in (0, 1), `logit`, their odds; of
        a choice and of powers of two the neighbour on that side.
        """
        side = 1 if factor > 1 else -1
        if self.kind == "choice":
            i = self.values.index(value) + side
            return self.values[min(max(i, 0), len(self.values) - 1)]
        if self.kind == "pow2":
            return 2 ** int(np.clip(_scaled("pow2", value) + side, self.low, self.high))
        if self.kind == "int":
            other = round(value * factor)
            return int(np.clip(other if other != value else value + side, self.low, self.high))
        odds = value / (1 - value) * factor if self.kind == "logit" else 0.0
        other = _scaled(self.kind, odds / (1 + odds) if self.kind == "logit" else value * factor)
        return _unscaled(self.kind, float(np.clip(other, self.low, self.high)))

    def grid(self, key: str) -> list[Any]:
        """Returns the values of a grid. Raises InputError: nobody said how many."""
        if self.kind == "choice":
            return list(self.values)
        if self.kind == "pow2":
            return [2**n for n in range(int(self.low), int(self.high) + 1)]
        if self.kind == "int" and self.num is None:
            _grid_fits(key, int(self.high) - int(self.low) + 1)
            return list(range(int(self.low), int(self.high) + 1))
        if self.num is None:
            raise InputError(
                f"{key}: a grid needs to know how many values: {self.kind}(low, high, 5), or draw them with --samples"
            )
        _grid_fits(key, self.num)
        points = np.linspace(self.low, self.high, self.num).tolist()
        if self.kind == "int":
            return list(dict.fromkeys(round(point) for point in points))
        return [_unscaled(self.kind, point) for point in points]


def _grid_fits(key: str, count: int) -> None:
    if count > MOST_POINTS:
        raise InputError(
            f"{key}: expected a grid of at most {MOST_POINTS:,} points, got {count:,}: draw points with --samples"
        )


def parse(key: str, text: str) -> Space | None:
    """Reads a space as it is typed; None: it is a plain value. Raises InputError."""
    typed = _TYPED.match(text)
    if typed is None:
        call = re.match(r"\s*(\w+)\s*\(", text)
        if call and (near := difflib.get_close_matches(call[1].lower(), _KINDS, 1, 0.7)):
            raise InputError(f"{shown(key)}={shown(text)}: did you mean {near[0]}(...)? Expected {KINDS}")
        return None
    kind, inside = typed.groups()
    given = f"{shown(key)}={shown(text)}"
    try:
        found = plain_yaml.parse(f"[{inside}]")
    except yaml.YAMLError:
        found = []
    found = found if isinstance(found, list) else []
    if kind == "choice" and found:
        if twice := [value for i, value in enumerate(found) if value in found[:i]]:
            raise InputError(f"{given}: {short(twice[0])} is there twice: leave one out, or give --seeds")
        return Space(kind, tuple(found))
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in found)
    most = 2 if kind == "pow2" else 3
    if kind == "choice" or not numbers or not 2 <= len(found) <= most:
        raise InputError(f"{given}: expected {KINDS}")
    low, high, *num = found
    if num and (not isinstance(num[0], int) or num[0] < 1):
        raise InputError(f"{given}: the third number says how many values, at least 1")
    if problem := _fault(kind, low, high):
        raise InputError(f"{given}: {problem}")
    return Space(kind, (), _scaled(kind, low), _scaled(kind, high), num[0] if num else None)


def _fault(kind: str, low: float, high: float) -> str:
    """Describes what is wrong with the ends of a space; "" for nothing."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "expected finite numbers"
    if not low < high:
        return "expected a low end below the high end"
    if kind == "log" and low <= 0:
        return "a logarithm needs numbers above 0"
    if kind == "logit" and not 0 < low < high < 1:
        return "logit needs numbers between 0 and 1"
    if kind in ("int", "pow2") and not (float(low).is_integer() and float(high).is_integer()):
        return "expected whole numbers"
    if kind == "pow2" and (low < 1 or any(int(x) & (int(x) - 1) for x in (low, high))):
        return "expected powers of two"
    return ""


def _scaled(kind: str, x: float) -> float:
    """Returns the place of a value on the line along which its space is even."""
    scale = {"log": math.log, "pow2": math.log2, "logit": lambda p: math.log(p / (1 - p))}
    return float(scale.get(kind, float)(x))


def _unscaled(kind: str, x: float) -> float:
    if kind == "log":
        value = math.exp(x)
    elif kind == "logit":
        value = 1 / (1 + math.exp(-x))
    else:
        value = x
    return float(f"{value:.6g}")  # as people write it: 0.001 and not 0.0010000000000000002


def grid(spaces: Mapping[str, Space]) -> list[dict[str, Any]]:
    """Returns all combinations of the values of all keys. Raises InputError: a space has no number of values."""
    values = [space.grid(key) for key, space in spaces.items()]
    _grid_fits(", ".join(spaces), math.prod(map(len, values)))
    return [dict(zip(spaces, point, strict=True)) for point in itertools.product(*values)]


def drawn(spaces: Mapping[str, Space], count: int, *, sobol: bool, seed: int) -> list[dict[str, Any]]:
    """Draws so many points, at random or of a scrambled Sobol sequence, which leaves fewer holes; both by `seed`."""
    if sobol:
        from scipy.stats import qmc

        sampler = qmc.Sobol(len(spaces), rng=np.random.default_rng(seed))
        # a sequence is balanced at powers of two; the first `count` of such a block are asked for
        shares = sampler.random_base2(math.ceil(math.log2(count)) if count > 1 else 0)[:count]
    else:
        shares = np.random.default_rng(seed).random((count, len(spaces)))
    return [
        {key: space.at(float(share)) for (key, space), share in zip(spaces.items(), row, strict=True)} for row in shares
    ]


def with_seeds(points: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns each point with each seed."""
    return [{**point, "run.seed": seed} for point in points for seed in seeds]
