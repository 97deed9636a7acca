"""Sections of a config: frozen dataclasses with values checked by pydantic, in the constructor and from plain data.

    @section
    class Config:
        gamma: Unit = 0.99  # discount

    Config(gamma=1.5)                # InputError: gamma: expected a number in [0, 1], got 1.5: its default is 0.99
    checked(Config, {"gamma": "1e-3"}) == ({"gamma": 0.001}, [])

Sections nest. A union of sections, each with a field `name: Literal["x"] = "x"`, is a choice: the value of `name`
selects the class; without it, the class of the field's default counts. Text such as "1e-3" is accepted as a number, but
true is not a number and "yes" is not a bool. Imports no jax, and pydantic only at the first check.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, dataclass_transform

from annotated_types import Ge

from jrl.errors import InputError, did_you_mean, short, shown
from jrl.fields.bounds import (
    Formerly,
    Points,
    current_name,
    describe,
    hints,
    in_float32,
    is_number,
    is_union,
    range_words,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LIMITS: Any = {"allow_inf_nan": False, "arbitrary_types_allowed": True}
_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
Swap = tuple[tuple[str, Any], ...]  # (field, annotation that replaces the field's own)


class ValueFault(NamedTuple):
    path: tuple[Any, ...]  # keys from the section to the faulty value
    message: str  # the key, the fault and the fix; "" for an unknown key


# ---------------------------------------------------------------- sections


def is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    """Returns the field's default, or None without a default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def section_class(hint: Any) -> type | None:
    """Returns the dataclass of a section `X` or `X | None`, the first of a union; None for a leaf."""
    return next((option for option in (hint, *typing.get_args(hint)) if _is_dataclass(option)), None)


def choices(hint: Any) -> dict[str, type]:
    """Returns name -> class for a union of several dataclasses with names, the first of equal names; otherwise {}."""
    classes: list[Any] = [option for option in typing.get_args(hint) if _is_dataclass(option)]
    have_names = len(classes) > 1 and all(isinstance(getattr(cls, "name", None), str) for cls in classes)
    return {cls.name: next(c for c in classes if c.name == cls.name) for cls in classes} if have_names else {}


@dataclass_transform(frozen_default=True)
def section(cls: type) -> type:
    """Makes a class a frozen dataclass whose constructor raises InputError for values that its annotations refuse.

    Fields of floats accept arrays, tracers and None. Other fields refuse tracers and arrays with axes.
    """
    own_post_init: Any = cls.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        _check_instance(self)
        if own_post_init is not None:
            own_post_init(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]  # any dataclass may have one
    return dataclasses.dataclass(frozen=True)(cls)


def _check_instance(instance: Any) -> None:
    cls: Any = type(instance)
    errors, data = list[str](), dict[str, Any]()
    for field in dataclasses.fields(cls):
        value, hint = getattr(instance, field.name), hints(cls)[field.name]
        if value is field.default or not field.init or (isinstance(value, dict) and not value):
            continue
        array, traceable = _describe_array(value), is_traceable(hint)
        if array and not traceable:
            fix = "the program depends on it: build one program per value, and vmap over floats only"
            errors.append(f"{field.name}: expected {describe(hint)}, got {array}: {fix}")
        elif not array and not (value is None and traceable):  # None: an entry of in_axes
            data[field.name] = value.item() if hasattr(value, "dtype") else value
    if data:
        errors += [fault.message for fault in checked(cls, data)[1]]
    if errors:
        raise InputError(*errors)


def is_traceable(hint: Any) -> bool:
    """Returns whether a field of this annotation accepts arrays and tracers for its numbers."""
    return "float" in str(hint)


def _describe_array(value: Any) -> str:
    """Describes the first tracer or array with axes in a value or list; "" if there is none."""
    if isinstance(value, tuple | list):
        return next(filter(None, map(_describe_array, value)), "")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return "a traced array"
    shape = getattr(value, "shape", ()) if hasattr(value, "dtype") else ()
    return f"an array of shape {tuple(shape)}" if shape else ""


# ---------------------------------------------------------------- annotations for pydantic


@functools.cache
def typed_dict(cls: type, swap: Swap = (), names: frozenset[str] | None = None) -> Any:
    """Returns the TypedDict of a section's keys, for pydantic.

    Args:
      swap: annotations that replace those of fields.
      names: keys to include beside the required ones; None: all keys.
    """
    import typing_extensions  # pydantic needs this TypedDict on older versions of Python
    from pydantic import ConfigDict

    annotations, keys = {**hints(cls), **dict(swap)}, {}
    for field in dataclasses.fields(cls):
        if field.init and (names is None or field.name in names or is_required(field)):
            hint = _strict(annotations[field.name], default_of(field))
            keys[field.name] = typing.Required[hint] if is_required(field) else hint
    keys |= {name: typing.Required[hint] for name, hint in swap if name not in keys}
    make: Any = typing_extensions.TypedDict
    made = make(f"{cls.__module__.rpartition('.')[2]}_{cls.__qualname__}", keys, total=False)
    made.__pydantic_config__ = ConfigDict(
        extra="forbid", json_schema_extra=functools.partial(_add_documentation, cls), **_LIMITS
    )
    return made


@functools.cache
def _adapter(hint: Any) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, TypeAdapter

    has_config = hasattr(hint, "__pydantic_config__")
    return TypeAdapter(hint, config=None if has_config else ConfigDict(**_LIMITS))


def _strict(hint: Any, default: Any = None, metadata: tuple[Any, ...] = ()) -> Any:
    """Returns an annotation for pydantic; sections take missing values from `default`, numbers their `metadata`."""
    from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, StrictBool

    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return StrictBool
    if hint is int or hint is float:
        infinite = [AllowInfNan(True)] if any(getattr(item, "le", None) == math.inf for item in metadata) else []
        return Annotated[hint, *metadata, *infinite, _Around(_check_number)]
    if hint == Points:
        points: Any = tuple[tuple[_strict(float, None, (Ge(0),)), _strict(float, None, metadata)], ...]  # type: ignore[misc]  # a type made at run time
        return Annotated[points, Field(fail_fast=True), AfterValidator(_check_order), _Json(_allow_line)]
    if _is_dataclass(hint):
        return Annotated[typed_dict(hint), _Around(functools.partial(_build_section, hint, default))]
    if names := choices(hint):
        classes: Any = typing.Union[*(_strict(cls, default) for cls in names.values())]
        json = _Json(_require_names([type(default) is cls for cls in names.values()]))
        metadata = Field(discriminator="name"), BeforeValidator(functools.partial(_add_name, default)), json
        named: Any = Annotated[classes, *metadata]
        return named | None if type(None) in args else named
    if origin is Annotated:
        return _strict(args[0], default, args[1:])
    if is_union(hint):
        return typing.Union[*(_strict(arg, default, metadata) for arg in args)]
    if any(isinstance(item, Formerly) for item in metadata):
        return Annotated[hint, BeforeValidator(functools.partial(current_name, hint=Annotated[hint, *metadata]))]
    if origin in (tuple, list, dict) and args:
        hint = origin[tuple(arg if arg is Ellipsis else _strict(arg) for arg in args)]
        metadata = metadata if origin is dict else (Field(fail_fast=True), *metadata)  # report the first faulty entry
    if isinstance(hint, str):  # an annotation of a class inside a function
        return Any
    return Annotated[hint, *metadata] if metadata and hint is not type(None) else hint


class _Around(NamedTuple):
    """Metadata of an annotation: a function of (value, validate) that calls the annotation's own validation.

    pydantic's WrapValidator does the same, but inspects the function's signature for each key: 0.1 s for a config.
    """

    function: Callable[[Any, Callable[[Any], Any]], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_wrap_validator_function(self.function, handler(source))


def _check_number(value: Any, validate: Callable[[Any], Any]) -> Any:
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    number = validate(value)
    if type(number) is float:
        validate(in_float32(number))  # programs compute with the rounded number
    return number


def _check_order(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
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


def _build_section(cls: Any, default: Any, value: Any, validate: Callable[[Any], dict[str, Any]]) -> Any:
    """Builds a section from plain data; missing values are taken from the field's default."""
    if isinstance(value, cls):
        return value
    values = validate({} if value is None else value)
    return dataclasses.replace(default, **values) if type(default) is cls else cls(**values)


def _add_name(default: Any, value: Any) -> Any:
    """Returns the data of a choice with its `name` in lower case; a missing or null name is the default's."""
    if not isinstance(value, Mapping | None):
        return value
    data = {key: item for key, item in (value or {}).items() if key != "name" or item is not None}
    name = data.get("name", getattr(default, "name", None))
    return data if name is None else {**data, "name": name.lower() if isinstance(name, str) else name}


# ---------------------------------------------------------------- JSON Schema


class _Json(NamedTuple):
    """Metadata of an annotation: a function that changes its JSON Schema."""

    change: Callable[[Any], Any]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        return self.change(handler(core))


def _add_documentation(cls: type, schema: dict[str, Any]) -> None:
    """Adds descriptions and defaults to the JSON Schema of a section."""
    schema["description"], field_docs = inspect.getdoc(cls), docs(cls)
    for field in dataclasses.fields(cls):
        key_schema, default = schema["properties"].get(field.name, {}), field.default
        key_schema.pop("title", None)
        if field.name in field_docs:
            key_schema["description"] = field_docs[field.name]
        if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
            key_schema["default"] = _as_lists(default)


def _require_names(is_default: list[bool]) -> Callable[[Any], Any]:
    """Requires `name` in the JSON Schema of all choices except the default's class."""

    def change(schema: Any) -> Any:
        arms = zip(schema["oneOf"], is_default, strict=True)
        return {"oneOf": [arm if optional else {**arm, "required": ["name"]} for arm, optional in arms]}

    return change


def _allow_line(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "string", "pattern": "^lin_", "description": "a line to 0, such as lin_0.001"}]}


# ---------------------------------------------------------------- validation and messages


def checked(cls: type, data: Any, prefix: str = "", swap: Swap = ()) -> tuple[dict[str, Any], list[ValueFault]]:
    """Validates the plain data of a section.

    Args:
      prefix: prefix of the keys in messages.
      swap: annotations that replace those of fields.
    Returns:
      The converted values, {} if there are faults; all faults.
    """
    from pydantic import ValidationError

    # validators of absent keys are not needed, and took half of the time of reading a short config
    names = frozenset(f.name for f in dataclasses.fields(cls) if f.name in data) if isinstance(data, Mapping) else None
    try:
        return _adapter(typed_dict(cls, swap, names)).validate_python(data), []
    except ValidationError as validation_error:
        places: dict[tuple[Any, ...], tuple[_Place, list[Any]]] = {}
        for error in validation_error.errors(include_url=False):
            place = _place(cls, error["loc"], data, swap)
            places.setdefault(place.path, (place, []))[1].append(error)
        return {}, [ValueFault(place.path, _message(place, errors, prefix)) for place, errors in places.values()]


def fault(value: Any, hint: Any, key: str, default: Any = dataclasses.MISSING) -> str:
    """Returns the message about a value that its annotation refuses; "" for a valid value."""
    from pydantic import ValidationError

    try:
        _adapter(_strict(hint)).validate_python(value)
    except ValidationError as error:
        return _message(_Place((), hint, value, default), error.errors(include_url=False), key)
    return ""


class _Place(NamedTuple):
    """The section, leaf or entry of a mapping at which pydantic reports an error."""

    path: tuple[Any, ...]
    hint: Any  # None: an unknown key
    value: Any  # value from the user
    default: Any = dataclasses.MISSING
    doc: str = ""
    is_inside: bool = False  # the error belongs to a part of the value


def _place(cls: type, loc: tuple[Any, ...], data: Any, swap: Swap) -> _Place:
    place, rest = _Place((), cls, data), list(loc)
    while rest and (section := section_class(place.hint)):
        if names := choices(place.hint):
            section = names[rest.pop(0)]
            if not rest:
                return place
        name, annotations = rest.pop(0), {**hints(section), **(dict(swap) if section is cls else {})}
        value = place.value.get(name) if isinstance(place.value, Mapping) else None
        field = next((f for f in dataclasses.fields(section) if f.init and f.name == name), None)
        default = dataclasses.MISSING if field is None or is_required(field) else default_of(field)
        doc = docs(section).get(name, "") if field else ""
        place = _Place((*place.path, name), annotations[name] if field else None, value, default, doc)
    leaf = typing.get_args(place.hint)[0] if typing.get_origin(place.hint) is Annotated else place.hint
    if rest and typing.get_origin(leaf) is dict and isinstance(place.value, Mapping) and rest[-1] != "[key]":
        inner = typing.get_args(leaf)[1]
        return _Place((*place.path, rest[0]), inner, place.value.get(rest[0]), is_inside=True)
    return place._replace(is_inside=bool(rest))


def _message(place: _Place, errors: list[Any], prefix: str) -> str:
    """Returns `key: expected X, got Y: do Z` for pydantic's errors at one place; "" for an unknown key."""
    hint, value = place.hint, place.value
    if hint is None:
        return ""
    key = prefix + shown(".".join(map(str, place.path)))
    by_type = {error["type"]: error for error in errors}
    names = choices(hint)
    if by_type.keys() & {"missing", "union_tag_not_found"} and not place.is_inside:
        expected = f"one of {', '.join(names)}" if names else describe(hint) + f" ({place.doc})" * bool(place.doc)
        return f"{key}{'.name' if names else ''} is missing: expected {expected}"
    if names and not isinstance(value, Mapping | str) and by_type.keys() & {"union_tag_invalid", "union_tag_not_found"}:
        return f"{key}: expected {' or '.join(c.__name__ for c in names.values())}, got {type(value).__name__}"
    if "union_tag_invalid" in by_type:
        fix = did_you_mean(short(value["name"]).lower(), names)
        return f"{key}.name: expected one of {', '.join(names)}, got {short(value['name'])}{fix}"
    if section_class(hint):
        if "value_error" in by_type:  # raised by its own __post_init__
            return f"{key}: {by_type['value_error']['ctx']['error']}"
        such = f" such as {{name: {next(iter(names))}}}" if names else ""
        return f"{key}: expected a mapping{such}, got {short(value)}"
    if isinstance(errors[0]["loc"], tuple) and errors[0]["loc"][-1:] == ("[key]",):
        return f"{key}: expected text for keys, got {short(errors[0]['input'])}: quote it"
    if "schedule" in by_type:
        return f"{key}: {by_type['schedule']['msg']}, got {short(value)}"
    outside = next((error["input"] for error in errors if error["type"] in _RANGES), None)
    is_infinite = isinstance(outside, float) and math.isinf(outside)
    x = outside if is_number(outside) and not is_infinite else None
    expected, got = describe(hint, x, lone=outside is not None and is_number(value)), short(value)
    if is_infinite:
        expected = expected.replace("a ", "a finite ", 1)
    if isinstance(value, float) and (rounded := in_float32(value)) != value and abs(rounded) in (0, math.inf):
        got += f", which is {rounded:g} in float32"
    has_default = outside is not None and place.default is not dataclasses.MISSING
    fix = f": its default is {'null' if place.default is None else short(_as_lists(place.default))}"
    advice = _similar_choice(value, hint) or _schedule_syntax(value, hint) or fix * has_default
    return f"{key}: expected {expected}, got {got}{advice}"


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _similar_choice(value: Any, hint: Any) -> str:
    literals = [h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is Literal]
    names = [name for literal in literals for name in typing.get_args(literal) if isinstance(name, str)]
    return did_you_mean(value, names) if isinstance(value, str) else ""


def _schedule_syntax(value: Any, hint: Any) -> str:
    """Returns the syntax of a schedule, for functions of progress and other spellings of Stable-Baselines3."""
    is_function = callable(value) or (isinstance(value, str) and value.startswith("lin_"))
    if not (is_function and _accepts_points(hint)):
        return ""
    return ": lin_0.0003 falls to 0 at stop.env_steps, [[0, 0.0003], [1000000, 0]] at step 1000000"


def _accepts_points(hint: Any) -> bool:
    return hint == Points or any(_accepts_points(arg) for arg in typing.get_args(hint))


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
        lines, (class_node,) = source.splitlines(), ast.parse(source).body
        assert isinstance(class_node, ast.ClassDef)
        for node in class_node.body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            comments = [lines[(node.end_lineno or 0) - 1][node.end_col_offset :]]
            if not comments[0].strip():
                is_comment = lambda line: line.lstrip().startswith("#")
                comments = [*itertools.takewhile(is_comment, reversed(lines[: node.lineno - 1]))][::-1]
            doc = " ".join(line.strip().lstrip("# ") for line in comments)
            if doc and "ClassVar" not in ast.unparse(node.annotation):
                found[node.target.id] = doc
    return found


def tree_docs(tree: Any, prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> comment and range, of a dataclass instance and of the sections within it."""
    cls: Any = type(tree)
    ranges = {name: range_words(hint) for name, hint in hints(cls).items()}
    found = {prefix + name: words for name, words in ranges.items() if words}
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

    keys: str  # keys that the condition reads, separated by spaces; errors name the first key
    refuses: Callable[..., Any]  # config -> whether it is refused; or the message, or a list of them
    message: str = ""  # error message; "" if the function returns the message


def refused(rows: Iterable[Row], *given: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys and the message of each row that refuses a config.

    Args:
      given: the config, and what else the rows are asked about.
    """
    for row in rows:
        if found := row.refuses(*given):
            for message in found if isinstance(found, list) else [row.message or found]:
                yield tuple(row.keys.split()), message
