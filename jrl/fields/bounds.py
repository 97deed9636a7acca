"""Annotations of fields: the kind and range of a field's values, and the words for them.

    gamma: Unit = 0.99                          # a field of a config; Unit is Annotated[float, Interval(ge=0, le=1)]

A range holds for each number of a value: for every point of a schedule, every entry of a tuple, every value of a
mapping. Numbers are finite unless a range ends at a closed infinity, `le=math.inf`. `jrl.fields.validation` checks
values by the annotations. Imports no jax and no pydantic.
"""

import dataclasses
import functools
import math
import numbers
import struct
import types
import typing
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval, Len

INT32, UINT32, INT64 = 2**31 - 1, 2**32 - 1, 2**63 - 1
MOST_STEPS = 2**24  # environments, and steps of each, in one rollout: more do not fit any machine
_LIMITS = (INT32, UINT32, INT64)  # of the machine, not of the thing: named only when they are exceeded

# A hyper-parameter that may change during training: one number, or a piecewise linear function of the environment
# steps, such as ((0, 3e-4), (1_000_000, 0)). The first step is 0.
Points = tuple[tuple[float, float], ...]
Schedule = float | Points

Unit = Annotated[float, Interval(ge=0, le=1)]
Share = Annotated[float, Interval(gt=0, le=1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Clip = Annotated[float, Interval(gt=0, le=math.inf)]  # a bound that inf takes away
UnitSchedule = Annotated[Schedule, Interval(ge=0, le=1), Len(1, 1000)]
NonNegativeSchedule = Annotated[Schedule, Ge(0), Len(1, 1000)]
Seconds = Annotated[float, Interval(gt=0, le=1e9)]  # a timeout: the platform's clocks take no more than 9e9
Count = Annotated[int, Interval(ge=1, le=INT32)]
Amount = Annotated[int, Interval(ge=0, le=INT32)]
Steps = Annotated[int, Interval(ge=1, le=INT64)]  # counted on the host
DeviceSteps = Annotated[int, Interval(ge=0, le=UINT32)]  # counted in programs
Processes = Annotated[int, Interval(ge=0, le=10_000)]
Few = Annotated[int, Interval(ge=1, le=1000)]  # of what costs a program or a network each
Width = Annotated[int, Interval(ge=1, le=MOST_STEPS)]
Name = Annotated[str, Len(0, 200)]  # of a thing, a class or a module
Widths = Annotated[tuple[Width, ...], Len(0, 100)]


class Formerly(NamedTuple):
    """Metadata of a choice: a name that one of its values had, which is still read."""

    old: str
    name: str


Backend = Annotated[Literal["auto", "envpool", "gymnasium", "jax"], Formerly("graph", "jax")]
Collector = Annotated[Literal["auto", "program", "host"], Formerly("graph", "program")]


class Range(NamedTuple):
    """An interval of numbers."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = True
    open_high: bool = True

    def __contains__(self, x: Any) -> bool:
        above = x > self.low if self.open_low else x >= self.low
        return bool(above and (x < self.high if self.open_high else x <= self.high))

    def words(self, x: Any = None) -> str:
        """Returns the interval as it stands behind "a number": "in [0, 1]"; `x` is the number that is not in it."""
        high = self.high < math.inf and not (self.high in _LIMITS and (x is None or x <= self.high))
        low = self.low > -math.inf and not (high and self.high in _LIMITS)
        if low and high:
            return f"in {'(['[not self.open_low]}{self.low:.10g}, {self.high:.10g}{')]'[not self.open_high]}"
        if low:
            return f"{'above' if self.open_low else 'of at least'} {_shown(self.low)}"
        return f"{'below' if self.open_high else 'of at most'} {_shown(self.high)}" if high else ""


def _shown(x: float) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:g}"


# ---------------------------------------------------------------- reading annotations


_SIDES = (("ge", "low", False), ("gt", "low", True), ("le", "high", False), ("lt", "high", True))


def range_of(metadata: tuple[Any, ...]) -> Range | None:
    """Returns the interval that the metadata of an Annotated gives."""
    found = Range()
    for one in metadata:
        for name, side, is_open in _SIDES:
            if (at := getattr(one, name, None)) is not None:
                found = found._replace(**{side: at, f"open_{side}": is_open})
    return None if found == Range() else found


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def is_number(value: Any) -> bool:
    """Returns whether `value` is one number of Python's or numpy's; a bool, an array and a tracer are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def in_float32(x: Any) -> float:
    """Returns `x` as programs compute with it."""
    try:
        return struct.unpack("f", struct.pack("f", float(x)))[0]
    except OverflowError:
        return -math.inf if x < 0 else math.inf


_hints: dict[Any, dict[str, Any]] = {}


def hints(cls: Any) -> dict[str, Any]:
    """Returns field -> annotation with extras; as it is, of a class inside a function whose names are gone."""
    if cls not in _hints:
        try:
            _hints[cls] = typing.get_type_hints(cls, include_extras=True)
        except NameError:
            _hints[cls] = {f.name: f.type for f in dataclasses.fields(cls)}
    return _hints[cls]


# ---------------------------------------------------------------- words


def range_words(hint: Any) -> str:
    """Returns the range of the numbers that a field takes, such as "in [0, 1]"; "" where there is none to tell.

    >>> range_words(Unit), range_words(Count | None), range_words(float)
    ('in [0, 1]', 'at least 1', '')
    """
    if is_union(hint):
        return next(filter(None, map(range_words, typing.get_args(hint))), "")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        within = range_of(args[1:])
        return within.words().removeprefix("of ") if within else range_words(args[0])
    if origin in (tuple, list, dict) and args:
        inner = range_words(args[-1] if origin is dict else args[0])
        return f"each {inner}" if inner else ""
    return ""


def renamed(value: Any, hint: Any) -> Any:
    """Returns the value of a choice under its present name.

    >>> renamed("graph", Backend)
    'jax'
    """
    known = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    return next((one.name for one in known if isinstance(one, Formerly) and one.old == value), value)


def describe(hint: Any, x: Any = None, within: Range | None = None, *, lone: bool = False) -> str:
    """Describes what a leaf of type `hint` accepts, for "expected ...".

    Args:
      x: a number that it does not accept: a limit of the machine is told where that exceeds it.
      within: of each number, unless its annotation says otherwise.
      lone: lists and mappings, which a union takes as well, are not told.

    >>> describe(Unit | None), describe(tuple[str, ...])
    ('a number in [0, 1] or null', 'a list, each entry text')
    """
    inner = functools.partial(describe, x=x, within=within, lone=lone)
    words = f" {within.words(x)}" if within and within.words(x) else ""
    simple = {
        int: f"a whole number{words}", float: f"a number{words}", bool: "true or false", str: "text",
        type(None): "null",
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    if hint == Points:
        return "a schedule [[env_steps, value], ...]" + " of such" * bool(words)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is Annotated:
        return describe(args[0], x, range_of(args[1:]) or within, lone=lone)
    if is_union(hint):
        dropped = (int,) * ({int, float} <= set(args)) + (tuple, list, dict) * lone
        args = tuple(a for a in args if a not in dropped and typing.get_origin(a) not in dropped)
        return " or ".join(map(inner, sorted(args, key=lambda a: a is type(None))))
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each entry {inner(args[0])}"
    if origin is tuple:
        return f"a list [{', '.join(map(inner, args))}]"
    if origin is dict:
        return "a mapping"
    return getattr(hint, "__name__", str(hint))


__all__ = [
    "INT32", "INT64", "MOST_STEPS", "UINT32", "Amount", "Clip", "Count", "DeviceSteps", "Few", "Name", "NonNegative",
    "NonNegativeSchedule", "Points", "Positive", "Processes", "Range", "Schedule", "Seconds", "Share", "Steps", "Unit",
    "UnitSchedule", "Width", "Widths", "describe", "hints", "is_number", "range_words",
]  # fmt: skip
