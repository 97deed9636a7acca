"""Spaces of hyper-parameters as typed on the command line, and the points that a sweep tries.

    algo.lr=log(1e-4, 1e-2, 8)       8 values, evenly spaced in the logarithm
    algo.gamma=logit(0.9, 0.999, 4)  evenly spaced in log(x / (1 - x))
    algo.ent_coef=uniform(0, 0.02, 3)
    rollout.length=pow2(16, 256)     16, 32, 64, 128, 256
    algo.num_epochs=int(2, 4)        2, 3, 4; a third number limits the number of values
    network.activation=choice(tanh, relu)

A grid combines every value of a key with every value of the other keys. Drawn points ignore the third number.
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
from jrl.fields import schema

MAX_POINTS = 100_000  # maximum points of a sweep
_KINDS = ("choice", "uniform", "log", "int", "pow2", "logit")
_PATTERN = re.compile(rf"^\s*({'|'.join(_KINDS)})\s*\((.*)\)\s*$", re.S)
KINDS = "choice(a, b, ...), uniform, log, logit (low, high, n), int(low, high[, n]), pow2(low, high)"


class Space(NamedTuple):
    """Possible values of a key."""

    kind: str
    values: tuple[Any, ...]  # values of a choice
    low: float = 0.0  # lower end on the kind's scale, see `_to_scale`
    high: float = 0.0
    num: int | None = None  # number of values in a grid; None: not given

    def to_value(self, share: float) -> Any:
        """Returns the value at a share in [0, 1), which is uniform on the kind's scale."""
        if self.kind == "choice":
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.kind in ("int", "pow2"):
            number = min(int(self.low + share * (self.high - self.low + 1)), int(self.high))
            return 2**number if self.kind == "pow2" else number
        return _from_scale(self.kind, self.low + share * (self.high - self.low))

    @property
    def has_floats(self) -> bool:
        """Whether all values are numbers, of a kind that allows fractions."""
        are_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.values)
        return are_numbers and self.kind not in ("int", "pow2")

    def to_share(self, value: Any) -> float:
        """Returns the share in [0, 1] of a value, the inverse of `to_value`."""
        if self.kind == "choice":
            return (self.values.index(value) + 0.5) / len(self.values)
        offset = _to_scale(self.kind, value) - self.low
        if self.kind in ("int", "pow2"):
            return (offset + 0.5) / (self.high - self.low + 1)
        return float(np.clip(offset / (self.high - self.low), 0.0, 1.0))

    def perturb(self, value: Any, factor: float) -> Any:
        """Returns `value` times `factor`, within the ends of the space.

        A `logit` space multiplies the odds. A choice or a power of two moves to the next value on that side.
        """
        side = 1 if factor > 1 else -1
        if self.kind == "choice":
            i = self.values.index(value) + side
            return self.values[min(max(i, 0), len(self.values) - 1)]
        if self.kind == "pow2":
            return 2 ** int(np.clip(_to_scale("pow2", value) + side, self.low, self.high))
        if self.kind == "int":
            other = round(value * factor)
            return int(np.clip(other if other != value else value + side, self.low, self.high))
        odds = value / (1 - value) * factor if self.kind == "logit" else 0.0
        other = _to_scale(self.kind, odds / (1 + odds) if self.kind == "logit" else value * factor)
        return _from_scale(self.kind, float(np.clip(other, self.low, self.high)))

    def grid_values(self, key: str) -> list[Any]:
        """Returns the values of a grid over `key`. Raises InputError: the number of values is not given."""
        if self.kind == "choice":
            return list(self.values)
        if self.kind == "pow2":
            return [2**n for n in range(int(self.low), int(self.high) + 1)]
        if self.kind == "int" and self.num is None:
            _check_grid_size(key, int(self.high) - int(self.low) + 1)
            return list(range(int(self.low), int(self.high) + 1))
        if self.num is None:
            raise InputError(
                f"{key}: a grid needs the number of values: {self.kind}(low, high, 5), or draw points with --samples N"
            )
        _check_grid_size(key, self.num)
        points = np.linspace(self.low, self.high, self.num).tolist()
        if self.kind == "int":
            return list(dict.fromkeys(round(point) for point in points))
        return [_from_scale(self.kind, point) for point in points]


def _check_grid_size(key: str, count: int) -> None:
    if count > MAX_POINTS:
        raise InputError(
            f"{key}: expected a grid of at most {MAX_POINTS:,} points, got {count:,}: draw points with --samples"
        )


def parse_space(key: str, text: str) -> Space | None:
    """Parses a space as typed for `key`; None: `text` is a plain value. Raises InputError: invalid space."""
    match = _PATTERN.match(text)
    if match is None:
        call = re.match(r"\s*(\w+)\s*\(", text)
        if call and (near := difflib.get_close_matches(call[1].lower(), _KINDS, 1, 0.7)):
            raise InputError(f"{shown(key)}={shown(text)}: did you mean {near[0]}(...)? Expected {KINDS}")
        return None
    kind, inside = match.groups()
    typed = f"{shown(key)}={shown(text)}"
    try:
        values = schema.parse(f"[{inside}]")
    except yaml.YAMLError:
        values = []
    values = values if isinstance(values, list) else []
    if kind == "choice" and values:
        if repeated := [value for i, value in enumerate(values) if value in values[:i]]:
            raise InputError(f"{typed}: {short(repeated[0])} is repeated: leave it out, or give --seeds")
        return Space(kind, tuple(values))
    are_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    most = 2 if kind == "pow2" else 3
    if kind == "choice" or not are_numbers or not 2 <= len(values) <= most:
        raise InputError(f"{typed}: expected {KINDS}")
    low, high, *num = values
    if num and (not isinstance(num[0], int) or num[0] < 1):
        raise InputError(f"{typed}: expected a number of values of at least 1, got {short(num[0])}")
    if fault := _find_fault(kind, low, high):
        raise InputError(f"{typed}: {fault}")
    return Space(kind, (), _to_scale(kind, low), _to_scale(kind, high), num[0] if num else None)


def _find_fault(kind: str, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "expected finite numbers"
    if not low < high:
        return "expected a low end below the high end"
    if kind == "log" and low <= 0:
        return "expected numbers above 0 for a logarithm"
    if kind == "logit" and not 0 < low < high < 1:
        return "expected numbers between 0 and 1 for logit"
    if kind in ("int", "pow2") and not (float(low).is_integer() and float(high).is_integer()):
        return "expected whole numbers"
    if kind == "pow2" and (low < 1 or any(int(x) & (int(x) - 1) for x in (low, high))):
        return "expected powers of two"
    return ""


def _to_scale(kind: str, x: float) -> float:
    """Returns a value on the scale on which its space is uniform."""
    scale = {"log": math.log, "pow2": math.log2, "logit": lambda p: math.log(p / (1 - p))}
    return float(scale.get(kind, float)(x))


def _from_scale(kind: str, x: float) -> float:
    if kind == "log":
        value = math.exp(x)
    elif kind == "logit":
        value = 1 / (1 + math.exp(-x))
    else:
        value = x
    return float(f"{value:.6g}")  # 0.001 instead of 0.0010000000000000002


def build_grid(spaces: Mapping[str, Space]) -> list[dict[str, Any]]:
    """Returns all combinations of values. Raises InputError: a space lacks its number of values, or too many points."""
    values = [space.grid_values(key) for key, space in spaces.items()]
    _check_grid_size(", ".join(spaces), math.prod(map(len, values)))
    return [dict(zip(spaces, point, strict=True)) for point in itertools.product(*values)]


def draw_points(spaces: Mapping[str, Space], count: int, *, sobol: bool, seed: int) -> list[dict[str, Any]]:
    """Draws `count` points by `seed`, at random or from a scrambled Sobol sequence, which covers the space evenly."""
    if sobol:
        from scipy.stats import qmc

        sampler = qmc.Sobol(len(spaces), rng=np.random.default_rng(seed))
        # a Sobol sequence is balanced at powers of two: draw such a block and take its first `count` points
        shares = sampler.random_base2(math.ceil(math.log2(count)) if count > 1 else 0)[:count]
    else:
        shares = np.random.default_rng(seed).random((count, len(spaces)))
    return [
        {key: space.to_value(float(share)) for (key, space), share in zip(spaces.items(), row, strict=True)}
        for row in shares
    ]


def add_seeds(points: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns each point combined with each seed."""
    return [{**point, "run.seed": seed} for point in points for seed in seeds]
