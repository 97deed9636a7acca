"""Annotations of fields: which numbers a field takes, in words and as a check.

    gamma: Unit = 0.99                          # a field of a config; Unit is Annotated[float, Interval(ge=0, le=1)]
    fault(1.5, Unit, "algo.gamma")              # "algo.gamma: expected a number in [0, 1], got 1.5"

A range holds for each number of a value: for every point of a schedule, every entry of a tuple, every value of a
mapping. Numbers are finite unless a range ends at a closed infinity, `le=math.inf`. Arrays and tracers are not looked
at, so that hyper-parameters can be traced. Imports no jax and no pydantic.
"""

import dataclasses
import math
import numbers
import struct
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval, Len, MaxLen

from jrl.errors import InputError, short

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
_LONGEST = 4096  # characters of any other text
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


def _range(metadata: tuple[Any, ...]) -> Range | None:
    """Returns the interval that the metadata of an Annotated gives."""
    found = Range()
    for one in metadata:
        for name, side, is_open in _SIDES:
            if (at := getattr(one, name, None)) is not None:
                found = found._replace(**{side: at, f"open_{side}": is_open})
    return None if found == Range() else found


def _longest(metadata: tuple[Any, ...]) -> int | None:
    parts = (part for item in metadata for part in (item if isinstance(item, Len) else [item]))
    return next((part.max_length for part in parts if isinstance(part, MaxLen)), None)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def is_number(value: Any) -> bool:
    """Returns whether `value` is one number of Python's or numpy's; a bool, an array and a tracer are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether `value` is of the kind that `hint` takes."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if _is_union(hint):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if hint in (int, float):
        return is_number(value)
    kinds: dict[Any, Any] = {tuple: (tuple, list), list: (tuple, list), dict: Mapping}
    return isinstance(value, kinds.get(typing.get_origin(hint), ()))


def _each(value: Any, hint: Any, within: Range | None = None) -> Iterator[tuple[Any, type, Range]]:
    """Yields every number of `value`, whether int or float was asked for, and its range."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from _each(value, args[0], _range(args[1:]) or within)
    elif _is_union(hint):
        fitting = next((one for one in args if _fits(value, one)), None)
        if fitting is not None:
            yield from _each(value, fitting, within)
    elif hint in (int, float) and is_number(value):
        yield value, hint, within or Range()
    elif hint == Points and isinstance(value, tuple | list):
        for point in value:
            if isinstance(point, tuple | list) and len(point) == 2:
                yield from _each(point[0], NonNegative)
                yield from _each(point[1], float, within)
    elif origin in (tuple, list) and isinstance(value, tuple | list):
        inner = [args[0]] * len(value) if args[-1] is Ellipsis or origin is list else args
        for one, of in zip(value, inner, strict=False):
            yield from _each(one, of, within)
    elif origin is dict and isinstance(value, Mapping):
        for one in value.values():
            yield from _each(one, args[1], within)


# ---------------------------------------------------------------- the check


def _in_float32(x: Any) -> float:
    """Returns `x` as programs compute with it."""
    try:
        return struct.unpack("f", struct.pack("f", float(x)))[0]
    except OverflowError:
        return -math.inf if x < 0 else math.inf


def _inside(x: Any, kind: type, within: Range) -> bool:
    return x in within and (kind is int or _in_float32(x) in within)


def fault(value: Any, hint: Any, key: str, default: Any = dataclasses.MISSING) -> str:
    """Describes what is wrong with the numbers of a value of the right type; "" for nothing.

    Args:
      value: of a field.
      hint: its annotation, with extras.
      key: names the field in the message.
      default: of the field, which is what the message offers; a value equal to it is right.
    """
    if value is default or (is_number(value) and is_number(default) and value == default):
        return ""
    for x, kind, within in _each(value, hint):
        if _inside(x, kind, within):
            continue
        number = "whole number" if kind is int else "number"
        rounded = _in_float32(x)
        of = "a" if isinstance(x, int) or math.isfinite(rounded) else "a finite"
        expected = " ".join(filter(None, [of, number, within.words(x)]))
        got = short(x) + (f", which is {rounded:g} in float32" if kind is float and x in within else "")
        return f"{key}: expected {expected}{_or_null(hint)}, got {got}{_offer(default)}"
    most = next((n for one in _arms(hint) if (n := _longest(typing.get_args(one)[1:])) is not None), None)
    if most is not None and isinstance(value, tuple | list) and len(value) > most:
        return f"{key}: expected a list of at most {most} entries, got {len(value):,}{_offer(default)}"
    longest = most if isinstance(value, str) and most is not None else _LONGEST
    for text in () if hint is Any else (value,) if isinstance(value, str) else value if type(value) is tuple else ():
        if isinstance(text, str) and len(text) > longest:
            return f"{key}: expected text of at most {longest:,} characters, got {short(text)}"
    return ""


def _arms(hint: Any) -> Iterator[Any]:
    """Yields the parts of a union that are Annotated."""
    for one in typing.get_args(hint) if _is_union(hint) else [hint]:
        if typing.get_origin(one) is Annotated:
            yield one


def _or_null(hint: Any) -> str:
    return " or null" if _is_union(hint) and type(None) in typing.get_args(hint) else ""


def _offer(default: Any) -> str:
    if default is dataclasses.MISSING:
        return ""
    return f": its default is {'null' if default is None else short(_as_lists(default))}"


def _as_lists(value: Any) -> Any:
    """Returns tuples as YAML writes them."""
    return [_as_lists(one) for one in value] if isinstance(value, tuple) else value


_hints: dict[Any, dict[str, Any]] = {}


def hints(cls: Any) -> dict[str, Any]:
    """Returns field -> annotation with extras; as it is, of a class inside a function whose names are gone."""
    if cls not in _hints:
        try:
            _hints[cls] = typing.get_type_hints(cls, include_extras=True)
        except NameError:
            _hints[cls] = {f.name: f.type for f in dataclasses.fields(cls)}
    return _hints[cls]


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not is_number(value)


def _decides(value: Any) -> str:
    """Describes an array that a static value cannot be or have: one with axes, or a tracer; "" for none."""
    if isinstance(value, tuple | list):
        return next(filter(None, map(_decides, value)), "")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return "a traced array"
    return f"an array of shape {tuple(value.shape)}" if _is_array(value) and len(value.shape) else ""


def _is_of(value: Any, hint: Any) -> bool:
    """Returns whether a value is of the type of its annotation. Arrays are numbers; for unknown annotations it is."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _is_of(renamed(value, hint), args[0])
    if _is_union(hint):
        return any(_is_of(value, one) for one in args)
    if origin is Literal:
        return value in args
    if hint is int:
        return (is_number(value) and value == value // 1) or (_is_array(value) and not value.shape)
    if hint is float:
        return is_number(value) or _is_array(value)
    if hint is bool:
        return isinstance(value, bool) or _is_array(value) or (is_number(value) and value in (0, 1))
    if hint == Points:
        points = isinstance(value, tuple | list)
        return points and all(isinstance(one, tuple | list) and len(one) == 2 for one in value)
    if origin in (tuple, list) and args:
        inner = args[0] if args[-1] is Ellipsis or origin is list else Any
        return isinstance(value, tuple | list) and all(_is_of(one, inner) for one in value)
    if isinstance(hint, type):
        return isinstance(value, Mapping if hint is dict else hint)
    return True


def type_fault(value: Any, hint: Any, key: str, default: Any = dataclasses.MISSING, *, whole: bool = True) -> str:
    """Describes a value that is not of its field's type, or an array in a field that is static; "" for neither.

    Args:
      value, hint, key, default: as of `fault`.
      whole: the type is looked at; False: only whether a static field has an array.
    """
    static = "float" not in str(hint)
    if static and (what := _decides(value)):
        mend = "it decides which program is made: make one for each value, and vmap over numbers that are floats"
        return f"{key}: expected {describe(hint)}, got {what}: {mend}"
    if not whole or value is default or _is_of(value, hint) or (value is None and not static):  # None: of in_axes
        return ""
    return f"{key}: expected {describe(hint)}, got {short(value)}{_offer(default)}"


def check_types(instance: Any) -> None:
    """Raises InputError with all values of a dataclass that are not of the types of their annotations.

    Of a dataclass that is not of hyper-parameters only arrays in static fields are looked at: a config's reader has
    looked at the types.
    """
    cls: Any = type(instance)
    whole = getattr(cls, "is_hyperparams", False)
    of = lambda field: (getattr(instance, field.name), hints(cls)[field.name], field.name, field.default)
    found = [type_fault(*of(field), whole=whole) for field in dataclasses.fields(cls) if field.init]
    if any(found):
        raise InputError(*filter(None, found))


def check(instance: Any) -> None:
    """Raises InputError with all numbers of a dataclass that are outside the ranges of their annotations."""
    cls: Any = type(instance)
    found = []
    for field in dataclasses.fields(cls):
        if message := fault(getattr(instance, field.name), hints(cls)[field.name], field.name, field.default):
            found.append(message)
    if found:
        raise InputError(*found)


def bounded(cls: type) -> type:
    """Decorates a dataclass, so that its constructor raises InputError for numbers out of range.

    Values of another type are refused, too, where it is one of hyper-parameters: see `check_types`.
    """
    before: Any = getattr(cls, "__post_init__", None)
    if getattr(before, "checks_bounds", False):
        return cls

    def __post_init__(self) -> None:
        check_types(self)
        if before is not None:
            before(self)
        check(self)

    __post_init__.checks_bounds = True  # type: ignore[attr-defined]  # a mark on the function
    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]  # that of any dataclass
    return cls


# ---------------------------------------------------------------- words


def range_words(hint: Any) -> str:
    """Returns the range of the numbers that a field takes, such as "in [0, 1]"; "" where there is none to tell.

    >>> range_words(Unit), range_words(Count | None), range_words(float)
    ('in [0, 1]', 'at least 1', '')
    """
    if _is_union(hint):
        return next(filter(None, map(range_words, typing.get_args(hint))), "")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        within = _range(args[1:])
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


def describe(hint: Any, within: Range | None = None) -> str:
    """Describes what a leaf of type `hint` accepts, for "expected ...".

    >>> describe(Unit | None), describe(tuple[str, ...])
    ('a number in [0, 1] or null', 'a list, each entry text')
    """
    words = f" {within.words()}" if within and within.words() else ""
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
        return describe(args[0], _range(args[1:]) or within)
    if _is_union(hint):
        if {int, float} <= set(args):
            args = tuple(a for a in args if a is not int)
        return " or ".join(describe(a, within) for a in sorted(args, key=lambda a: a is type(None)))
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each entry {describe(args[0])}"
    if origin is tuple:
        return f"a list [{', '.join(map(describe, args))}]"
    if origin is dict:
        return "a mapping"
    return getattr(hint, "__name__", str(hint))


__all__ = [
    "INT32", "INT64", "MOST_STEPS", "UINT32", "Amount", "Clip", "Count", "DeviceSteps", "Few", "Name", "NonNegative",
    "NonNegativeSchedule", "Points", "Positive", "Processes", "Range", "Schedule", "Seconds", "Share", "Steps", "Unit",
    "UnitSchedule", "Width", "Widths", "bounded", "check", "describe", "fault", "hints", "is_number", "range_words",
]  # fmt: skip
