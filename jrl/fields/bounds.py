"""Annotations of fields: the type and range of a field's values, and their description in messages.

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

from annotated_types import Ge, Gt, Interval

INT32, UINT32, INT64 = 2**31 - 1, 2**32 - 1, 2**63 - 1
MOST_STEPS = 2**24  # environments, and steps of each, in one rollout: more do not fit any machine
_LIMITS = (INT32, UINT32, INT64)  # limits of the machine: messages name them only for values that exceed them

# A hyper-parameter that may change during training: one number, or a piecewise linear function of the environment
# steps, such as ((0, 3e-4), (1_000_000, 0)). The first step is 0.
Points = tuple[tuple[float, float], ...]
Schedule = float | Points

Unit = Annotated[float, Interval(ge=0, le=1)]
Share = Annotated[float, Interval(gt=0, le=1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Clip = Annotated[float, Interval(gt=0, le=math.inf)]  # a clipping bound; inf: not clipped
UnitSchedule = Annotated[Schedule, Interval(ge=0, le=1)]
NonNegativeSchedule = Annotated[Schedule, Ge(0)]
Seconds = Annotated[float, Interval(gt=0, le=1e9)]  # a timeout: the platform's clocks take no more than 9e9
Count = Annotated[int, Interval(ge=1, le=INT32)]
Amount = Annotated[int, Interval(ge=0, le=INT32)]
Steps = Annotated[int, Interval(ge=1, le=INT64)]  # steps that the host counts
DeviceSteps = Annotated[int, Interval(ge=0, le=UINT32)]  # steps that programs count
Processes = Annotated[int, Interval(ge=0, le=10_000)]
Few = Annotated[int, Interval(ge=1, le=1000)]  # number of things that each need a program or a network
Width = Annotated[int, Interval(ge=1, le=MOST_STEPS)]
Name = str  # name of a policy, class, module, ...
Widths = tuple[Width, ...]


class Formerly(NamedTuple):
    """Metadata of a choice: an earlier name of a value, which is still accepted."""

    old: str
    name: str


Backend = Annotated[Literal["auto", "envpool", "gymnasium", "jax"], Formerly("graph", "jax")]
Collector = Annotated[Literal["auto", "program", "host"], Formerly("graph", "program")]


# ---------------------------------------------------------------- reading annotations


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a number of Python or numpy: not a bool, an array or a tracer."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def in_float32(x: Any) -> float:
    """Returns `x` rounded to float32, the precision of programs."""
    try:
        return struct.unpack("f", struct.pack("f", float(x)))[0]
    except OverflowError:
        return -math.inf if x < 0 else math.inf


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """Returns field -> annotation with its metadata; the source text if the class's names cannot be resolved."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:
        return {f.name: f.type for f in dataclasses.fields(cls)}


# ---------------------------------------------------------------- words


def parse_range(metadata: tuple[Any, ...]) -> Interval | None:
    """Returns the interval that the metadata of an Annotated states, or None."""
    sides = [(side, getattr(item, side, None)) for item in metadata for side in ("ge", "gt", "le", "lt")]
    found = {side: bound for side, bound in sides if bound is not None}
    return Interval(**found) if found else None


def _words(within: Interval, x: Any = None) -> str:
    """Returns the words after "a number", such as "in [0, 1]"; `x` is a number outside of the interval."""
    low, high = (within.ge if within.gt is None else within.gt), (within.le if within.lt is None else within.lt)
    if high in _LIMITS and x is not None and x > high:
        low = None
    elif high in (*_LIMITS, math.inf):
        high = None
    if low is not None and high is not None:
        ends = "[("[within.ge is None], "])"[within.le is None]
        return f"in {ends[0]}{low:.10g}, {high:.10g}{ends[1]}"
    if low is not None:
        return f"{'of at least' if within.gt is None else 'above'} {_format(low)}"
    return f"{'of at most' if within.lt is None else 'below'} {_format(high)}" if high is not None else ""


def _format(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:g}"


def range_words(hint: Any) -> str:
    """Returns the range of the numbers of a field, such as "in [0, 1]"; "" without a range.

    >>> range_words(Unit), range_words(Count | None), range_words(float)
    ('in [0, 1]', 'at least 1', '')
    """
    if is_union(hint):
        return next(filter(None, map(range_words, typing.get_args(hint))), "")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        within = parse_range(args[1:])
        return _words(within).removeprefix("of ") if within else range_words(args[0])
    if origin in (tuple, list, dict) and args:
        inner = range_words(args[-1] if origin is dict else args[0])
        return f"each {inner}" if inner else ""
    return ""


def current_name(value: Any, hint: Any) -> Any:
    """Returns the value of a choice under its present name.

    >>> current_name("graph", Backend)
    'jax'
    """
    metadata = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    return next((item.name for item in metadata if isinstance(item, Formerly) and item.old == value), value)


def describe(hint: Any, x: Any = None, within: Interval | None = None, *, lone: bool = False) -> str:
    """Describes the values that a leaf of type `hint` accepts, for "expected ...".

    Args:
      x: rejected number; a limit of the machine is named only if `x` exceeds it.
      within: range of each number, unless its annotation has a range.
      lone: omit the lists and mappings of a union.

    >>> describe(Unit | None), describe(tuple[str, ...])
    ('a number in [0, 1] or null', 'a list, each entry text')
    """
    inner = functools.partial(describe, x=x, within=within, lone=lone)
    words = f" {_words(within, x)}" if within and _words(within, x) else ""
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
        return describe(args[0], x, parse_range(args[1:]) or within, lone=lone)
    if is_union(hint):
        dropped = (int,) * ({int, float} <= set(args)) + (tuple, list, dict) * lone
        args = tuple(a for a in args if a not in dropped and typing.get_origin(a) not in dropped)
        return " or ".join(map(inner, sorted(args, key=lambda a: a is type(None))))
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each entry {inner(args[0])}"
    if origin is tuple:
        return f"a list [{', '.join(map(inner, args))}]"
    if origin is dict:
        return "a mapping" if args[1] is Any else f"a mapping, each entry {inner(args[1])}"
    return getattr(hint, "__name__", str(hint))
