"""Dataclass trees from plain data: strict keys, values coerced by annotation, every problem found at once.

`config.py` holds the tree and what its numbers mean; this file knows dataclasses, YAML and how to word an error.
A *section* is a field whose type is a dataclass, every other field is a leaf. Keys are dotted: `rollout.length`.
A union of dataclasses that each have a field `name: Literal["x"] = "x"` is a section too: the given `name` picks the
class, without one it is that of the field's default.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import operator
import os
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from jrl.errors import short, shown
from jrl.fields import bounds
from jrl.fields.bounds import Points, describe
from jrl.fields.plain_yaml import dump as dump
from jrl.fields.plain_yaml import fault_of_yaml as fault_of_yaml
from jrl.fields.plain_yaml import flow as flow
from jrl.fields.plain_yaml import parse as parse
from jrl.fields.plain_yaml import parse_json as parse_json
from jrl.fields.plain_yaml import read_mapping as read_mapping
from jrl.fields.plain_yaml import read_text as read_text
from jrl.fields.plain_yaml import read_yaml as read_yaml

_MOST_MENDS = 20  # of the unknown keys of a section


class Problem(NamedTuple):
    key: str  # dotted
    message: str  # names the key, what is wrong and the mend


# ---------------------------------------------------------------- trees of plain data


def plain(value: Any) -> Any:
    """Returns a dataclass tree as dicts, lists and scalars that YAML and JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> leaf. An empty mapping is a leaf.

    >>> flatten({"algo": {"name": "ppo", "lr": 0.1}, "custom": {}})
    {'algo.name': 'ppo', 'algo.lr': 0.1, 'custom': {}}
    """
    if not isinstance(data, Mapping) or (prefix and not data):
        return {prefix: data}
    return {k: v for name, sub in data.items() for k, v in flatten(sub, f"{prefix}.{name}" if prefix else name).items()}


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `override` over `base`, recursively; neither is changed.

    Where both have a `name` and the names differ, the section is of another kind: `override` replaces it as a whole.

    >>> merge({"algo": {"name": "ppo", "lr": 0.1}, "seed": 1}, {"algo": {"lr": 0.2}})
    {'algo': {'name': 'ppo', 'lr': 0.2}, 'seed': 1}
    >>> merge({"algo": {"name": "ppo", "lr": 0.1}, "seed": 1}, {"algo": {"name": "dqn"}})
    {'algo': {'name': 'dqn'}, 'seed': 1}
    """
    old, new = base.get("name"), override.get("name")
    if isinstance(old, str) and isinstance(new, str) and old.lower() != new.lower():
        return dict(override)
    nested = [k for k, v in override.items() if isinstance(v, Mapping) and isinstance(base.get(k), Mapping)]
    return {**base, **override, **{k: merge(base[k], override[k]) for k in nested}}


# ---------------------------------------------------------------- plain data -> dataclasses


def build(
    cls: type,
    data: Any,
    problems: list[Problem],
    *,
    prefix: str = "",
    swap: Mapping[str, type | None] = types.MappingProxyType({}),
    synonyms: Mapping[str, str] = types.MappingProxyType({}),
    known: Iterable[str] | Callable[[], Iterable[str]] = (),
    answer: Callable[[str], str | None] = lambda key: None,
) -> Any:
    """Makes an instance of `cls`. Faults are appended to `problems`, and the field keeps its default (else None).

    Args:
      swap: dotted key -> dataclass to use there in place of the annotation; None skips the field.
      synonyms: name used elsewhere -> ours, a name or a dotted key, for "did you mean".
      known: further dotted keys that "did you mean" may offer, or a function that finds them when one is unknown.
      answer: an unknown key -> the key that was meant, or a sentence; None: "did you mean" finds the nearest.
    """
    offers = lambda: [*(() if prefix else _keys(cls, data, swap)), *(known() if callable(known) else known)]
    if not isinstance(data, Mapping):
        problems.append(Problem(prefix[:-1], f"{prefix[:-1] or 'the config'}: expected a mapping, got {short(data)}"))
        data = {}
    values: dict[str, Any] = {}
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = _hints(cls)
    unknown: list[str] = []
    for name, given in data.items():
        if name not in fields:
            unknown += flatten(given, f"{prefix}{name}")
    valid = offers() if unknown else []
    mends: dict[str, Problem] = {}  # the first key of each answer: net_arch.pi and net_arch.vf have one
    for key in unknown[:_MOST_MENDS]:
        message = f"unknown key {shown(key)}: {_mend(key, valid, synonyms, answer)}"
        mends.setdefault(answer(key) or key, Problem(key, message))
    problems += mends.values()
    if more := unknown[_MOST_MENDS:]:  # to look for what was meant takes milliseconds each
        problems.append(Problem(more[0], f"unknown key {shown(more[0])}, and {len(more) - 1:,} more"))
    for name, field in fields.items():
        key, hint, default = prefix + name, swap.get(prefix + name, hints[name]), default_of(field)
        given = data.get(name)
        section = section_class(hint, default, given)
        if key in swap and swap[key] is None:
            values[name] = None
        elif section and (name in data or is_required(field)) and not (given is None and _optional(hints[name])):
            given = {} if given is None else given
            choices = _choices(hint)
            if choices:
                fault = _choice_fault(choices, default, given, key)
                if fault:
                    problems.append(fault)
                    values |= {name: None} if is_required(field) else {}
                    continue
                given = {**given, "name": next(n for n, c in choices.items() if c is section)}
            if isinstance(default, section) and isinstance(given, Mapping):
                given = merge(plain(default), given)  # the defaults of this field, not those of its class
            inner: dict[str, Any] = {"swap": swap, "synonyms": synonyms, "known": offers, "answer": answer}
            values[name] = build(section, given, problems, prefix=key + ".", **inner)
        elif name in data:
            value, found = _coerce(data[name], hints[name], key, field.default)
            problems += found
            if not found:
                values[name] = value
            elif is_required(field):
                values[name] = None
        elif is_required(field):
            doc = docs(cls).get(name)
            expected = describe(hints[name]) + (f" ({doc})" if doc else "")
            problems.append(Problem(key, f"{key} is missing: expected {expected}"))
            values[name] = None
    return cls(**values)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def text(value: Any) -> str:
    """Returns a name that a config gives, as text; of an int of any length, which `str` may refuse, a short one."""
    return value if isinstance(value, str) else short(value)


def is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def default_of(field: dataclasses.Field) -> Any:
    """Returns the field's default, None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def section_class(hint: Any, default: Any = None, given: Any = None) -> type | None:
    """Returns the dataclass of a section `X` or `X | None`, None for a leaf; of a union the one that `given` names."""
    choices = _choices(hint)
    if choices:
        named = choices.get(text(given.get("name")).lower()) if isinstance(given, Mapping) else None
        return named or (type(default) if type(default) in choices.values() else next(iter(choices.values())))
    return next((one for one in (hint, *typing.get_args(hint)) if _is_dataclass(one)), None)


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _choices(hint: Any) -> dict[str, type]:
    """Returns name -> class of a union of several dataclasses with names, the first of equal names; else nothing."""
    classes: list[Any] = [one for one in typing.get_args(hint) if _is_dataclass(one)]
    named = len(classes) > 1 and all(isinstance(getattr(one, "name", None), str) for one in classes)
    found: dict[str, type] = {}
    for one in classes if named else ():
        found.setdefault(one.name, one)
    return found


def _choice_fault(choices: Mapping[str, type], default: Any, given: Any, key: str) -> Problem | None:
    """Describes what is wrong with the choice of a class in `given`; where nothing is, `given` is a mapping."""
    names = ", ".join(choices)
    if not isinstance(given, Mapping):
        return Problem(key, f"{key}: expected a mapping such as {{name: {next(iter(choices))}}}, got {short(given)}")
    name = given.get("name")
    if name is None:
        return None if default is not None else Problem(key, f"{key}.name is missing: expected one of {names}")
    if text(name).lower() in choices:
        return None
    near = difflib.get_close_matches(short(name).lower(), choices, 1)
    mend = f": did you mean {near[0]}?" if near else ""
    return Problem(f"{key}.name", f"{key}.name: expected one of {names}, got {short(name)}{mend}")


def _keys(cls: type, data: Any, swap: Mapping[str, type | None], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of all leaves that the dataclass may be given beside `data`."""
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        given = data.get(field.name) if isinstance(data, Mapping) else None
        section = section_class(swap.get(key, hints[field.name]), default_of(field), given)
        if section:
            yield from _keys(section, given, swap, key + ".")
        elif field.init:
            yield key


def _coerce(value: Any, hint: Any, key: str, default: Any) -> tuple[Any, list[Problem]]:
    """Returns `value` as `hint`, or the problems, one for each key of a mapping. `default` is the field's."""
    from pydantic import ValidationError  # a tenth of a second: not at import

    value = bounds.renamed(_texts_of_paths(value), hint)
    try:
        coerced = _adapter(hint).validate_python(value)
    except ValidationError as e:
        if typing.get_origin(hint) is dict and isinstance(value, Mapping):
            if odd := [name for name in value if not isinstance(name, str)]:
                return None, [Problem(key, f"{key}: expected text for keys, got {short(odd[0])}: quote it")]
            expected = describe(typing.get_args(hint)[1])
            wrong = {f"{key}.{err['loc'][0]}": value.get(err["loc"][0]) for err in e.errors(include_url=False)}
        else:
            expected, wrong = describe(hint), {key: value}
        got = {k: f"got {short(v)}{_near_choice(v, hint) or _line(v, hint)}" for k, v in wrong.items()}
        return None, [Problem(k, f"{shown(k)}: expected {expected}, {text}") for k, text in got.items()]
    if isinstance(coerced, dict):  # each of its values has a key of its own
        inner = (typing.get_args(hint) or (Any, Any))[1]
        outside = {f"{key}.{name}": bounds.fault(v, inner, f"{key}.{shown(str(name))}") for name, v in coerced.items()}
    else:
        outside = {key: bounds.fault(coerced, hint, key, default)}
    if found := [Problem(name, message) for name, message in outside.items() if message]:
        return None, found
    fault = _schedule_fault(coerced) if _takes_points(hint) else ""
    return coerced, [Problem(key, f"{key}: {fault}, got {short(value)}")] if fault else []


def _texts_of_paths(value: Any) -> Any:
    """Returns a value whose `pathlib.Path`s are texts, as YAML holds them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_texts_of_paths, value)) if type(value) in (list, tuple) else value
    if type(value) is dict:
        return {_texts_of_paths(k): _texts_of_paths(v) for k, v in value.items()}
    return value


def _takes_points(hint: Any) -> bool:
    """Returns whether a schedule is among what `hint` takes."""
    return hint == Points or any(_takes_points(arg) for arg in typing.get_args(hint))


def _schedule_fault(value: Any) -> str:
    if not isinstance(value, tuple):
        return ""
    steps = [step for step, _ in value]
    if not steps or steps[0] != 0:
        return "the first entry of a schedule must be at 0 env_steps"
    if any(b <= a for a, b in itertools.pairwise(steps)):
        return "the env_steps of a schedule must increase from entry to entry"
    if 0 < steps[-1] <= 1:
        return "a schedule in fractions of the run needs its number of steps: set stop.env_steps"
    return ""


def _line(value: Any, hint: Any) -> str:
    """Returns how a schedule is written, for values that stand for a function of progress elsewhere."""
    meant = callable(value) or (isinstance(value, str) and value.startswith("lin_"))
    if not (meant and _takes_points(hint)):
        return ""
    return ": lin_0.0003 is a line to 0 at stop.env_steps, [[0, 0.0003], [1000000, 0]] one that ends at a step"


@functools.cache
def _adapter(hint: Any):
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_strict(hint), config=ConfigDict(arbitrary_types_allowed=True))


def _strict(hint: Any) -> Any:
    """Returns `hint` with pydantic's kindness limited: "1e-3" is a number, but true is not, and "yes" is not true."""
    from pydantic import AfterValidator, BeforeValidator, StrictBool

    if hint is bool:
        return StrictBool
    if typing.get_origin(hint) is Annotated:  # ranges are looked at afterwards: see `jrl.fields.bounds`
        return _strict(typing.get_args(hint)[0])
    if hint is int or hint is float:
        return Annotated[hint, BeforeValidator(_no_bool), AfterValidator(_no_nan)]
    args = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return functools.reduce(operator.or_, map(_strict, args))
    if typing.get_origin(hint) in (tuple, list, dict):
        return typing.get_origin(hint)[tuple(map(_strict, args))]
    return hint


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    return value


def _no_nan(value: Any) -> Any:
    if value != value:
        raise ValueError("not a number")
    return value


# ---------------------------------------------------------------- words for errors


def _near_choice(value: Any, hint: Any) -> str:
    hints = [hint, *typing.get_args(hint)]
    choices = [c for h in hints if typing.get_origin(h) is Literal for c in typing.get_args(h) if isinstance(c, str)]
    near = difflib.get_close_matches(value[:80], choices, 1) if isinstance(value, str) else []
    return f": did you mean {near[0]}?" if near else ""


def _mend(key: str, valid: list[str], synonyms: Mapping[str, str], answer: Callable[[str], str | None]) -> str:
    said = answer(key)
    if said and said not in valid:
        return said if " " in said else f"{said} is a key of other algorithms: leave it out"
    near = said or nearest(key, valid, synonyms)
    if near:
        return f"did you mean {near}?"
    head, siblings = key, list[str]()
    while head and not siblings:
        head = head.rpartition(".")[0]
        siblings = [k.rpartition(".")[2] for k in valid if head and k.rpartition(".")[0] == head]
    names = siblings or [k.partition(".")[0] for k in valid]
    return f"{head or 'the config'} has {', '.join(dict.fromkeys(names))}"


def nearest(key: str, valid: Iterable[str], synonyms: Mapping[str, str]) -> str | None:
    """Returns the valid dotted key that was most likely meant by `key`; the own section first, then the whole tree.

    >>> nearest("algo.learning_rat", ["algo.lr", "algo.gamma", "env.id"], {"learning_rate": "lr"})
    'algo.lr'
    """
    valid, key = list(valid), key[-200:]
    head, _, name = key.rpartition(".")
    name = name[:80]
    own = [k for k in valid if k.rpartition(".")[0] == head]

    def named(names: Iterable[str], keys: list[str]) -> list[str]:
        return [k for n in names for k in keys if k == n or k.rpartition(".")[2] == n]

    def close(keys: list[str], cutoff: float) -> list[str]:
        return named(difflib.get_close_matches(name, {k.rpartition(".")[2] for k in keys}, 1, cutoff), keys)

    same = [synonyms[s] for s in difflib.get_close_matches(name, synonyms, 1, 0.85)]
    rounds = (
        lambda: named([name], valid), lambda: close(own, 0.85), lambda: named(same, valid), lambda: close(own, 0.6),
        lambda: close(valid, 0.8), lambda: difflib.get_close_matches(key, valid, 1, 0.8),
    )  # fmt: skip
    for found in (r() for r in rounds):
        if found:
            return max(found, key=lambda k: (k in own, difflib.SequenceMatcher(None, key, k).ratio()))
    return None


# ---------------------------------------------------------------- documentation


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
    ranges = {name: bounds.range_words(hint) for name, hint in bounds.hints(type(tree)).items()}
    found = {prefix + name: words for name, words in ranges.items() if words}
    cls: type = type(tree)
    for name, doc in docs(cls).items():
        found[prefix + name] = f"{doc}; {ranges[name]}" if ranges.get(name) else doc
    for field in dataclasses.fields(tree):
        if dataclasses.is_dataclass(getattr(tree, field.name)):
            found |= tree_docs(getattr(tree, field.name), f"{prefix}{field.name}.")
    return found
