"""YAML and JSON to plain data and back, safe for untrusted text.

A config is a small tree of mappings, lists, numbers and text. Larger, deeper and other data are refused at once.
"""

import difflib
import functools
import json
import math
import os
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jrl.errors import InputError, short
from jrl.fields import paths, shipped

_MOST_BYTES = 4 * 2**20  # size of a file
_MOST_VALUES = 20_000  # keys and values of a config; each use of an alias counts
_LONGEST_KEY = 200  # characters; YAML itself allows 1024
_MOST_LEVELS = 60  # nesting
# libyaml's parser, ten times as fast, if available: it only splits text into events
if yaml.__with_libyaml__:
    _parser: tuple[type, ...] = (yaml.cyaml.CParser,)  # type: ignore[attr-defined]  # the stubs lack it
else:
    _parser = (yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser)


class _Loader(yaml.composer.Composer, *_parser, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):  # type: ignore[misc]  # which bases depends on the machine
    """YAML 1.1 without its traps: `1e-3` is a number, a date is text, a duplicate key is an error.

    Any text is either read or refused with a yaml.YAMLError, quickly.
    """

    def __init__(self, text: str):
        for base in _parser:
            base.__init__(self, *([text] if base is _parser[0] else []))  # type: ignore[misc]  # as above
        yaml.composer.Composer.__init__(self)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)
        self._level, self._values = 0, 0
        self._size: dict[int, int] = {}  # id of a complete node -> its number of values, aliases expanded

    def compose_node(self, parent, index):
        event, before = self.peek_event(), self._values
        is_alias = isinstance(event, yaml.AliasEvent)
        self._level += 1
        if self._level > _MOST_LEVELS:
            self._refuse(f"more than {_MOST_LEVELS} levels of nesting", event)
        node = super().compose_node(parent, index)
        self._level -= 1
        if is_alias and id(node) not in self._size:
            self._refuse(f"{event.anchor} contains itself", event)
        self._values += self._size[id(node)] if is_alias else 1
        if self._values > _MOST_VALUES:
            self._refuse(f"more than {_MOST_VALUES:,} values", event)
        if not is_alias:
            self._size[id(node)] = self._values - before
        return node

    def construct_object(self, node, deep=False):
        try:
            value = super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError, AttributeError) as e:  # !!int x, 5,000 digits
            problem = f"{short(node.value)} is not of type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from e
        if exceeds_floats(value):
            self._refuse(_float_limit(value), node)
        return value

    def construct_mapping(self, node, deep=False):
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                self._refuse(f"duplicate key {short(key.value) if len(str(key.value)) > 80 else key.value}", key)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def _refuse(self, problem: str, where: Any) -> typing.NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, where.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number; writes no anchors."""

    def ignore_aliases(self, data):
        return True


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
# dates of YAML 1.1 stay text: neither JSON nor any key of a config has dates
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in _Loader.yaml_implicit_resolvers.items()
}
for _tag in ("timestamp", "binary", "omap", "pairs", "set"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_undefined)  # type: ignore[type-var]  # the stubs expect a constructor of any loader


def parse(text: str) -> Any:
    """Parse YAML text to plain data. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    finally:
        loader.dispose()


def parse_json(text: str) -> Any:
    """Parse JSON text to plain data, with the limits of `parse`: no duplicate keys, no huge numbers, no deep nesting.

    Raises:
      ValueError: the text is not such JSON; the message is one line with the place and the reason.
    """
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as e:
        raise ValueError(f"at line {e.lineno}, column {e.colno}: {e.msg}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {short(next(n for n in names if names.count(n) > 1))}")
    return mapping


def exceeds_floats(value: Any) -> bool:
    """Return whether a value is a whole number beyond the range of floats."""
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _float_limit(value: int) -> str:
    return f"expected a number of at most {sys.float_info.max:.0e}, got {short(value)}"


def check_limits(data: Any) -> None:
    """Raise InputError for nested data that `parse` would refuse: too large, too deep, huge numbers, unusable keys."""
    count, rest = 0, [(data, "", 0)]
    while rest:
        value, key, level = rest.pop()
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in parts:
            if not isinstance(name, str | int | float | None):
                raise InputError(f"{key or 'the config'}: expected text for keys, got {short(name)}")
            if isinstance(name, str) and len(name) > _LONGEST_KEY:
                raise InputError(
                    f"{key or 'the config'}: expected keys of at most {_LONGEST_KEY} characters, got {short(name)}"
                )
            count += 1
            if exceeds_floats(part):
                raise InputError(f"{f'{key}.{name}'[:200].removeprefix('.')}: {_float_limit(part)}")
            if isinstance(part, Mapping | list | tuple):
                rest.append((part, f"{key}.{name}"[:200].removeprefix("."), level + 1))
        if level > _MOST_LEVELS or count > _MOST_VALUES:
            most = f"{_MOST_LEVELS} levels of nesting" if level > _MOST_LEVELS else f"{_MOST_VALUES:,} values"
            raise InputError(_too_much(key, most))


def as_plain(data: Any, key: str = "") -> tuple[Any, list[tuple[str, Any]]]:
    """Return nested data with Python numbers instead of numpy's and jax's, lists for arrays, and text for paths.

    Args:
      data: any data within the limits of `check_limits`.
      key: dotted key of the data.
    Returns:
      The data, and (key, value) of each value that YAML cannot hold; such values stay unchanged.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data, []
    if isinstance(data, Mapping | list | tuple):
        inside = data.items() if isinstance(data, Mapping) else enumerate(data)
        converted = {name: as_plain(value, f"{key}.{name}".removeprefix(".")) for name, value in inside}
        unusable = [pair for _, pairs in converted.values() for pair in pairs]
        if isinstance(data, Mapping):
            return {name: value for name, (value, _) in converted.items()}, unusable
        parts = [value for value, _ in converted.values()]
        return (tuple(parts) if isinstance(data, tuple) else parts), unusable
    if isinstance(data, str):
        return str.__str__(data), []
    if isinstance(data, int | float):
        return (int if isinstance(data, int) else float)(data), []
    if isinstance(data, os.PathLike) and isinstance(path := os.fspath(data), str):
        return path, []
    if getattr(getattr(data, "dtype", None), "kind", "") in ("b", "i", "u", "f", "U") and hasattr(data, "tolist"):
        if data.size > _MOST_VALUES:
            raise InputError(_too_much(key, f"{_MOST_VALUES:,} values"))
        return data.tolist(), []
    return data, [(key, data)]


def _too_much(key: str, most: str) -> str:
    where = f"{short(key.partition('.')[0])[1:-1]}: " if key else ""
    return f"{where}more than {most}: too large for a config: keep data in a separate file"


def describe_yaml_error(e: yaml.YAMLError) -> str:
    """Return the place and the reason of a YAML error, in one line."""
    mark = getattr(e, "problem_mark", None)
    at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    text = getattr(e, "problem", None) or getattr(e, "reason", None) or str(e)
    return f"{at}: {' '.join(text.split())[:200]}"


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file. Raises InputError."""
    if path.suffix != ".json" or not path.is_file():
        return read_yaml(path)
    try:
        data = parse_json(read_text(path))
    except ValueError as e:
        raise InputError(f"{path}: not valid JSON{':' * (not str(e).startswith('at '))} {e}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping, got {short(data)}")
    check_limits(data)
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file has an empty mapping. Raises InputError."""
    try:
        data = parse(read_text(path))
    except yaml.YAMLError as e:
        raise InputError(f"{path}: not valid YAML{describe_yaml_error(e)}") from None
    if data is not None and not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys such as 'rollout:', got {short(data)}")
    return data or {}


def read_text(path: Path) -> str:
    """Read a text file of at most 4 MiB. Raises InputError, with similar names if the file does not exist."""
    try:
        with path.open("rb") as file:  # a limited size: a device has no end
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        files = sorted({*path.parent.glob("*.y*ml"), *Path("configs").glob("*.y*ml")})
        names = {p.stem: str(p) for p in files}
        near = [names[n] for n in difflib.get_close_matches(path.stem[:80], names, 3)]
        near = near or difflib.get_close_matches(path.stem[:80], shipped.names(), 3)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"{paths.shorten(path)}: there is no such file{hint}") from None
    except (OSError, ValueError) as e:  # ValueError: a null byte in the name
        raise InputError(f"{paths.shorten(path)}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{paths.shorten(path)}: larger than {_MOST_BYTES >> 20} MiB: too large for a config")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{paths.shorten(path)}: cannot be read: not UTF-8 text") from None


def dump(
    data: Mapping[str, Any], comments: Mapping[str, str] | None = None, *, prefix: str = "", level: int = 0
) -> str:
    """Write nested mappings as YAML, one leaf per line, followed by `comments[dotted key]`."""
    lines = []
    for name, value in data.items():
        key, indent = f"{prefix}{name}", "  " * level
        if isinstance(value, Mapping) and value:
            inner = dump(value, comments, prefix=key + ".", level=level + 1)
            lines += [f"{indent}{flow(name)}:", inner.rstrip("\n")]
        else:
            line = f"{indent}{flow(name)}: {flow(value)}"
            lines.append(f"{line:<38}  # {comments[key]}" if comments and key in comments else line)
    return "\n".join(lines) + "\n"


def flow(value: Any) -> str:
    """Return a value as YAML, in one line."""
    return _scalar(value) if isinstance(value, str | int | None) else _flow(value)


@functools.lru_cache(maxsize=1024, typed=True)
def _scalar(value: str | int | None) -> str:
    """Cached `_flow` for names and whole numbers; not for floats, because 0.0 == -0.0 in the cache."""
    return _flow(value)


def _flow(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    text = text.removesuffix("...\n").strip()
    return json.dumps(value) if "\n" in text else text  # a text of several lines
