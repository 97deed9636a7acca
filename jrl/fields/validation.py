"""Sections of a config: frozen dataclasses whose values pydantic checks, those of plain data and of the constructor.

    @section
    class Config:
        gamma: Unit = 0.99  # discount

    Config(gamma=1.5)                # InputError: gamma: expected a number in [0, 1], got 1.5: its default is 0.99
    checked(Config, {"gamma": "1e-3"}) == ({"gamma": 0.001}, [])

A field whose type is a section is a section within it. A union of sections that each have a field
`name: Literal["x"] = "x"` is one, too: the given `name` picks the class, without one it is that of the field's default.
Texts of numbers are numbers; true is none, and "yes" is not true. Imports no jax, and pydantic when it first checks.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import math
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, dataclass_transform

from annotated_types import Ge, Len, MaxLen

from jrl.errors import InputError, short, shown
from jrl.fields.bounds import Formerly, Points, describe, hints, in_float32, is_number, is_union, range_words, renamed

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LIMITS: Any = {"allow_inf_nan": False, "str_max_length": 4096, "arbitrary_types_allowed": True}
_RANGES = (
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "too_long", "too_short",
)  # fmt: skip
Swap = tuple[tuple[str, Any], ...]  # fields of a class, each with the annotation that is to count


class Fault(NamedTuple):
    path: tuple[Any, ...]  # of keys, to the value at fault
    message: str  # names the key, what is wrong and the mend; "" of an unknown key


# ---------------------------------------------------------------- sections


def is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    """Returns the field's default, None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def section_class(hint: Any) -> type | None:
    """Returns the dataclass of a section `X` or `X | None`, the first of a union; None for a leaf."""
    return next((one for one in (hint, *typing.get_args(hint)) if _is_dataclass(one)), None)


def choices(hint: Any) -> dict[str, type]:
    """Returns name -> class of a union of several dataclasses with names, the first of equal names; else nothing."""
    classes: list[Any] = [one for one in typing.get_args(hint) if _is_dataclass(one)]
    named = len(classes) > 1 and all(isinstance(getattr(one, "name", None), str) for one in classes)
    return {one.name: next(c for c in classes if c.name == one.name) for one in classes} if named else {}


@dataclass_transform(frozen_default=True)
def section(cls: type) -> type:
    """Makes a class a frozen dataclass whose constructor raises InputError for values that its annotations refuse.

    Arrays, tracers and None pass in fields of floats; in others an array with axes or a tracer is an error.
    """
    own: Any = cls.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        _check_instance(self)
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]  # that of any dataclass
    return dataclasses.dataclass(frozen=True)(cls)


def _check_instance(instance: Any) -> None:
    cls, errors, given = type(instance), list[str](), dict[str, Any]()
    for field in dataclasses.fields(cls):
        value, hint = getattr(instance, field.name), hints(cls)[field.name]
        if value is field.default or not field.init or (isinstance(value, dict) and not value):
            continue
        array, traceable = _array_in(value), is_traceable(hint)
        if array and not traceable:
            mend = "it decides which program is made: make one for each value, and vmap over numbers that are floats"
            errors.append(f"{field.name}: expected {describe(hint)}, got {array}: {mend}")
        elif not array and not (value is None and traceable):  # None: of in_axes
            given[field.name] = value.item() if hasattr(value, "dtype") else value
    if given:
        errors += [fault.message for fault in checked(cls, given)[1]]
    if errors:
        raise InputError(*errors)


def is_traceable(hint: Any) -> bool:
    """Returns whether a field of this annotation may hold arrays and tracers in the place of its numbers."""
    return "float" in str(hint)


def _array_in(value: Any) -> str:
    """Describes the first tracer or array with axes in a value, or in its list; "" for none."""
    if isinstance(value, tuple | list):
        return next(filter(None, map(_array_in, value)), "")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return "a traced array"
    shape = getattr(value, "shape", ()) if hasattr(value, "dtype") else ()
    return f"an array of shape {tuple(shape)}" if shape else ""


# ---------------------------------------------------------------- annotations as pydantic reads them


@functools.cache
def keys_of(cls: type, swap: Swap = ()) -> Any:
    """Returns the TypedDict of the keys that a section takes."""
    import typing_extensions  # whose TypedDict pydantic reads on each version of Python
    from pydantic import ConfigDict

    annotations, taken = {**hints(cls), **dict(swap)}, {}
    for field in dataclasses.fields(cls):
        if field.init:
            hint = _strict(annotations[field.name], default_of(field))
            taken[field.name] = typing.Required[hint] if is_required(field) else hint
    taken |= {name: typing.Required[hint] for name, hint in swap if name not in taken}
    make: Any = typing_extensions.TypedDict
    made = make(f"{cls.__module__.rpartition('.')[2]}_{cls.__qualname__}", taken, total=False)
    made.__pydantic_config__ = ConfigDict(
        extra="forbid", json_schema_extra=functools.partial(_documented, cls), **_LIMITS
    )
    return made


@functools.cache
def _adapter(hint: Any) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, TypeAdapter

    own = hasattr(hint, "__pydantic_config__")
    return TypeAdapter(hint, config=None if own else ConfigDict(**_LIMITS))


def _strict(hint: Any, default: Any = None, within: tuple[Any, ...] = ()) -> Any:
    """Returns an annotation with pydantic's kindness limited, whose sections are read as such.

    Args:
      default: of the field, from which a section takes what is not given.
      within: metadata of the annotation around it, which are of its numbers.
    """
    from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, StrictBool, WrapValidator

    origin, args = typing.get_origin(hint), typing.get_args(hint)
    ranges = tuple(one for one in within if not isinstance(one, Len))
    if hint is bool:
        return StrictBool
    if hint is int or hint is float:
        infinite = [AllowInfNan(True)] if any(getattr(one, "le", None) == math.inf for one in ranges) else []
        return _with(hint, *ranges, *infinite, WrapValidator(_number))
    if hint == Points:
        lengths = [MaxLen(one.max_length) for one in within if isinstance(one, Len) and one.max_length]
        points: Any = tuple[tuple[_strict(float, within=(Ge(0),)), _strict(float, within=ranges)], ...]  # type: ignore[misc]  # made here
        return _with(points, Field(fail_fast=True), *lengths, AfterValidator(_ordered), _Json(_or_line))
    if _is_dataclass(hint):
        return _with(keys_of(hint), WrapValidator(functools.partial(_made, hint, default)))
    if names := choices(hint):
        union = _with(either(_strict(one, default) for one in names.values()), Field(discriminator="name"))
        first = [type(default) is one for one in names.values()]
        named = _with(union, BeforeValidator(functools.partial(_named, default)), _Json(_one_named(first)))
        return either([named, type(None)]) if type(None) in args else named
    if origin is Annotated:
        return _strict(args[0], default, args[1:])
    if is_union(hint):
        return either(_strict(one, default, within) for one in args)
    if any(isinstance(one, Formerly) for one in within):
        return _with(hint, BeforeValidator(functools.partial(renamed, hint=_with(hint, *within))))
    if origin in (tuple, list, dict) and args:
        hint = origin[tuple(one if one is Ellipsis else _strict(one) for one in args)]
        within = within if origin is dict else (Field(fail_fast=True), *within)  # the first entry at fault says enough
    if isinstance(hint, str):  # of a class inside a function
        return Any
    return _with(hint, *within) if within and hint is not type(None) else hint


def _with(hint: Any, *metadata: Any) -> Any:
    return Annotated[(hint, *metadata)]


def either(hints: Iterable[Any]) -> Any:
    """Returns the union of annotations."""
    return typing.Union[tuple(hints)]  # noqa: UP007 - any number of types


def _number(value: Any, read: Callable[[Any], Any]) -> Any:
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    found = read(value)
    if type(found) is float:
        read(in_float32(found))  # as programs compute with it
    return found


def _ordered(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Refuses a schedule whose steps do not begin at 0, or decrease. Two entries at equal steps are a jump."""
    from pydantic_core import PydanticCustomError

    steps = [step for step, _ in points]
    if not steps or steps[0] != 0:
        fault = "the first entry of a schedule must be at 0 env_steps"
    elif any(b < a for a, b in itertools.pairwise(steps)):
        fault = "the env_steps of a schedule must not decrease from entry to entry"
    elif 0 < steps[-1] <= 1:
        fault = "a schedule in fractions of the run needs its number of steps: set stop.env_steps"
    else:
        return points
    raise PydanticCustomError("schedule", fault)


def _made(cls: Any, default: Any, value: Any, read: Callable[[Any], dict[str, Any]]) -> Any:
    """Makes a section of plain data, whose other values are those of the field's default."""
    if isinstance(value, cls):
        return value
    values = read({} if value is None else value)
    return dataclasses.replace(default, **values) if type(default) is cls else cls(**values)


def _named(default: Any, value: Any) -> Any:
    """Returns plain data of a choice with the name of its class in small letters; a `name` of null is none."""
    if not isinstance(value, Mapping | None):
        return value
    given = {key: one for key, one in (value or {}).items() if key != "name" or one is not None}
    name = given.get("name", getattr(default, "name", None))
    return given if name is None else {**given, "name": name.lower() if isinstance(name, str) else name}


# ---------------------------------------------------------------- JSON Schema


class _Json(NamedTuple):
    """Metadata of an annotation: a change of its JSON Schema."""

    change: Callable[[Any], Any]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        return self.change(handler(core))


def _documented(cls: type, schema: dict[str, Any]) -> None:
    """Adds words and defaults to the JSON Schema of a section's keys."""
    schema["description"], said = inspect.getdoc(cls), docs(cls)
    for field in dataclasses.fields(cls):
        about, default = schema["properties"].get(field.name, {}), field.default
        about.pop("title", None)
        if field.name in said:
            about["description"] = said[field.name]
        if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
            about["default"] = _as_lists(default)


def _one_named(first: list[bool]) -> Callable[[Any], Any]:
    """Lets only the default's class do without a `name`."""

    def change(schema: Any) -> Any:
        arms = zip(schema["oneOf"], first, strict=True)
        return {"oneOf": [one if is_default else {**one, "required": ["name"]} for one, is_default in arms]}

    return change


def _or_line(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "string", "pattern": "^lin_", "description": "a line to 0, such as lin_0.001"}]}


# ---------------------------------------------------------------- the check and its words


def checked(cls: type, data: Any, prefix: str = "", swap: Swap = ()) -> tuple[dict[str, Any], list[Fault]]:
    """Returns plain data with the values of the section's fields, {} where there are faults, and all of these.

    Args:
      prefix: of the keys, in messages.
      swap: see `Swap`.
    """
    from pydantic import ValidationError

    try:
        return _adapter(keys_of(cls, swap)).validate_python(data), []
    except ValidationError as error:
        places: dict[tuple[Any, ...], tuple[_Place, list[Any]]] = {}
        for one in error.errors(include_url=False):
            place = _place(cls, one["loc"], data, swap)
            places.setdefault(place.path, (place, []))[1].append(one)
        return {}, [Fault(place.path, _message(place, errors, prefix)) for place, errors in places.values()]


def fault(value: Any, hint: Any, key: str, default: Any = dataclasses.MISSING) -> str:
    """Describes what is wrong with a value of an annotation; "" for nothing."""
    from pydantic import ValidationError

    try:
        _adapter(_strict(hint)).validate_python(value)
    except ValidationError as error:
        return _message(_Place((), hint, value, default), error.errors(include_url=False), key)
    return ""


class _Place(NamedTuple):
    path: tuple[Any, ...]
    hint: Any  # None: an unknown key
    value: Any  # that the user gave
    default: Any = dataclasses.MISSING
    doc: str = ""
    inside: bool = False  # the error is of a part of the value


def _place(cls: type, loc: tuple[Any, ...], data: Any, swap: Swap) -> _Place:
    """Returns where an error of pydantic's is: a section, a leaf, or an entry of a mapping."""
    place, rest = _Place((), cls, data), list(loc)
    while rest and (of := section_class(place.hint)):
        if names := choices(place.hint):
            of = names[rest.pop(0)]
            if not rest:
                return place
        name, annotations = rest.pop(0), {**hints(of), **(dict(swap) if of is cls else {})}
        given = place.value.get(name) if isinstance(place.value, Mapping) else None
        field = next((f for f in dataclasses.fields(of) if f.init and f.name == name), None)
        default = dataclasses.MISSING if field is None or is_required(field) else default_of(field)
        doc = docs(of).get(name, "") if field else ""
        place = _Place((*place.path, name), annotations[name] if field else None, given, default, doc)
    leaf = typing.get_args(place.hint)[0] if typing.get_origin(place.hint) is Annotated else place.hint
    if rest and typing.get_origin(leaf) is dict and isinstance(place.value, Mapping) and rest[-1] != "[key]":
        inner = typing.get_args(leaf)[1]
        return _Place((*place.path, rest[0]), inner, place.value.get(rest[0]), inside=True)
    return place._replace(inside=bool(rest))


def _message(place: _Place, errors: list[Any], prefix: str) -> str:
    """Says in the form `key: expected X, got Y: do Z` what errors of one value mean; "" of an unknown key."""
    hint, value = place.hint, place.value
    if hint is None:
        return ""
    key = prefix + shown(".".join(map(str, place.path)))
    by_type = {one["type"]: one for one in errors}
    names = choices(hint)
    if by_type.keys() & {"missing", "union_tag_not_found"} and not place.inside:
        expected = f"one of {', '.join(names)}" if names else describe(hint) + f" ({place.doc})" * bool(place.doc)
        return f"{key}{'.name' if names else ''} is missing: expected {expected}"
    if names and not isinstance(value, Mapping | str) and by_type.keys() & {"union_tag_invalid", "union_tag_not_found"}:
        return f"{key}: expected {' or '.join(c.__name__ for c in names.values())}, got {type(value).__name__}"
    if "union_tag_invalid" in by_type:
        mend = _near(short(value["name"]).lower(), names)
        return f"{key}.name: expected one of {', '.join(names)}, got {short(value['name'])}{mend}"
    if section_class(hint):
        if "value_error" in by_type:  # of its own __post_init__
            return f"{key}: {by_type['value_error']['ctx']['error']}"
        such = f" such as {{name: {next(iter(names))}}}" if names else ""
        return f"{key}: expected a mapping{such}, got {short(value)}"
    if isinstance(errors[0]["loc"], tuple) and errors[0]["loc"][-1:] == ("[key]",):
        return f"{key}: expected text for keys, got {short(errors[0]['input'])}: quote it"
    if "schedule" in by_type:
        return f"{key}: {by_type['schedule']['msg']}, got {short(value)}"
    if longer := by_type.get("string_too_long"):
        return f"{key}: expected text of at most {longer['ctx']['max_length']:,} characters, got {short(value)}"
    outside = next((one["input"] for one in errors if one["type"] in _RANGES), None)
    infinite = isinstance(outside, float) and math.isinf(outside)
    x = outside if is_number(outside) and not infinite else None
    expected, got = describe(hint, x, lone=outside is not None and is_number(value)), short(value)
    if infinite:
        expected = expected.replace("a ", "a finite ", 1)
    if longer := by_type.get("too_long"):
        expected, got = f"a list of at most {longer['ctx']['max_length']} entries", f"{len(value):,}"
    if isinstance(value, float) and (rounded := in_float32(value)) != value and abs(rounded) in (0, math.inf):
        got += f", which is {rounded:g} in float32"
    offer = outside is not None and place.default is not dataclasses.MISSING
    mend = f": its default is {'null' if place.default is None else short(_as_lists(place.default))}" if offer else ""
    return f"{key}: expected {expected}, got {got}{_near_choice(value, hint) or _line(value, hint) or mend}"


def _as_lists(value: Any) -> Any:
    """Returns tuples as YAML writes them."""
    return [_as_lists(one) for one in value] if isinstance(value, tuple) else value


def _near(given: str, names: Any) -> str:
    near = difflib.get_close_matches(given[:80], names, 1)
    return f": did you mean {near[0]}?" if near else ""


def _near_choice(value: Any, hint: Any) -> str:
    literals = [h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is Literal]
    names = [name for one in literals for name in typing.get_args(one) if isinstance(name, str)]
    return _near(value, names) if isinstance(value, str) else ""


def _line(value: Any, hint: Any) -> str:
    """Returns how a schedule is written, for values that stand for a function of progress elsewhere."""
    meant = callable(value) or (isinstance(value, str) and value.startswith("lin_"))
    if not (meant and _takes_points(hint)):
        return ""
    return ": lin_0.0003 is a line to 0 at stop.env_steps, [[0, 0.0003], [1000000, 0]] one that ends at a step"


def _takes_points(hint: Any) -> bool:
    return hint == Points or any(_takes_points(arg) for arg in typing.get_args(hint))


# ---------------------------------------------------------------- documentation: the comments in the source


@functools.cache
def docs(cls: type) -> Mapping[str, str]:
    """Returns field -> the comment on its line, or the lines directly above it. Empty where there is no source."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        comments: dict[int, str] = {}
        own_line: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                whole = not token.line[: token.start[1]].strip()
                (own_line if whole else comments)[token.start[0]] = token.string.lstrip("# ")
        body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)).body
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if "ClassVar" in ast.unparse(node.annotation):  # no field
                    continue
                first = node.lineno
                while first - 1 in own_line:
                    first -= 1
                above = " ".join(own_line[n] for n in range(first, node.lineno))
                doc = comments.get(node.end_lineno or node.lineno, above)
                if doc:
                    found[node.target.id] = doc
    return found


def tree_docs(tree: Any, prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> comment and range, of a dataclass instance and of the sections within it."""
    ranges = {name: range_words(hint) for name, hint in hints(type(tree)).items()}
    found = {prefix + name: words for name, words in ranges.items() if words}
    cls: type = type(tree)
    for name, doc in docs(cls).items():
        found[prefix + name] = f"{doc}; {ranges[name]}" if ranges.get(name) else doc
    for field in dataclasses.fields(tree):
        if dataclasses.is_dataclass(getattr(tree, field.name)):
            found |= tree_docs(getattr(tree, field.name), f"{prefix}{field.name}.")
    return found


# ---------------------------------------------------------------- refused combinations of keys


class Row(NamedTuple):
    """A combination of values that cannot be run.

        Row("rollout.max_policy_lag rollout.mode", lambda c: c.rollout.mode == "sync" and c.rollout.max_policy_lag,
            "rollout.max_policy_lag: without rollout.mode async no policy lags: set that, or leave this out")

    Where a row reads a key that is at fault itself, it is left out.
    """

    keys: str  # that it reads, with spaces between; the first is the one at fault
    refuses: Callable[..., Any]  # config -> whether it is refused; or the message, or a list of them
    message: str = ""  # of a row whose function does not say it


def refused(rows: Iterable[Row], *given: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys and the message of each row that refuses a config.

    Args:
      given: the config, and what else the rows are asked about.
    """
    for row in rows:
        if found := row.refuses(*given):
            for message in found if isinstance(found, list) else [row.message or found]:
                yield tuple(row.keys.split()), message
