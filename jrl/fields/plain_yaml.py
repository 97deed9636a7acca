"""YAML as plain data and back, for texts and files of any kind: each is read or refused at once.

A config is a small tree of mappings, lists, numbers and texts; what is larger, deeper or of other types is refused.
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
from jrl.fields import shipped

_MOST_BYTES = 4 * 2**20  # of a file
_MOST_VALUES = 20_000  # keys and values of a config, those behind aliases counted wherever they stand
_LONGEST_KEY = 200  # characters: YAML itself takes no key beyond 1024
_MOST_LEVELS = 60  # of nesting
# libyaml's parser, ten times as fast, where there is one: it only splits text into events
if yaml.__with_libyaml__:
    _parser: tuple[type, ...] = (yaml.cyaml.CParser,)  # type: ignore[attr-defined]  # the stubs lack it
else:
    _parser = (yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser)


class _Loader(yaml.composer.Composer, *_parser, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):  # type: ignore[misc]  # which bases depends on the machine
    """YAML 1.1 without its traps: `1e-3` is a number, a date is text, a key given twice is an error. A text of any kind
    is read, or refused by a yaml.YAMLError, at once.
    """

    def __init__(self, text: str):
        for base in _parser:
            base.__init__(self, *([text] if base is _parser[0] else []))  # type: ignore[misc]  # as above
        yaml.composer.Composer.__init__(self)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)
        self._level, self._values = 0, 0
        self._size: dict[int, int] = {}  # of complete nodes, with what aliases in them stand for

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
            found = super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError, AttributeError) as e:  # !!int x, 5,000 digits
            raise yaml.constructor.ConstructorError(
                None, None, f"{short(node.value)} is no {node.tag.rpartition(':')[2]}", node.start_mark
            ) from e
        if is_endless(found):
            self._refuse(_of_floats(found), node)
        return found

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
    """Quotes what `_Loader` would otherwise read as a number; writes no anchors."""

    def ignore_aliases(self, data):
        return True


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
# what YAML 1.1 takes for a date stays text: neither JSON nor any key of a config has dates
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in _Loader.yaml_implicit_resolvers.items()
}
for _tag in ("timestamp", "binary", "omap", "pairs", "set"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_undefined)  # type: ignore[type-var]  # the stubs want one of any loader


def parse(text: str) -> Any:
    """Parses YAML text as plain data. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    finally:
        loader.dispose()


def parse_json(text: str) -> Any:
    """Parses JSON text as plain data, by the rules of YAML here: no key twice, no digits or brackets without end.

    Raises:
      ValueError: says in a line where it is not JSON and why.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as e:
        raise ValueError(f"at line {e.lineno}, column {e.colno}: {e.msg}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {short(next(n for n in names if names.count(n) > 1))}")
    return found


def is_endless(value: Any) -> bool:
    """Returns whether a value is a whole number beyond all floats: nothing here can compute with it."""
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _of_floats(value: int) -> str:
    return f"expected a number of at most {sys.float_info.max:.0e}, got {short(value)}"


def limited(data: Any) -> None:
    """Raises InputError for nested data from elsewhere that `parse` would have refused: too large, too deep, endless,
    or with keys that no file can hold.
    """
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
            if is_endless(part):
                raise InputError(f"{f'{key}.{name}'[:200].removeprefix('.')}: {_of_floats(part)}")
            if isinstance(part, Mapping | list | tuple):
                rest.append((part, f"{key}.{name}"[:200].removeprefix("."), level + 1))
        if level > _MOST_LEVELS or count > _MOST_VALUES:
            most = f"{_MOST_LEVELS} levels of nesting" if level > _MOST_LEVELS else f"{_MOST_VALUES:,} values"
            raise InputError(_too_much(key, most))


def as_plain(data: Any, key: str = "") -> tuple[Any, list[tuple[str, Any]]]:
    """Returns nested data with numbers and arrays of numpy and jax as Python's, paths and other texts as text.

    Args:
      data: of any kind, but neither endless nor deep: see `limited`.
      key: of it.
    Returns:
      The data, and (key, value) of each value that no YAML can hold, which stays as it is.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data, []
    if isinstance(data, Mapping | list | tuple):
        inside = data.items() if isinstance(data, Mapping) else enumerate(data)
        found = {name: as_plain(value, f"{key}.{name}".removeprefix(".")) for name, value in inside}
        odd = [one for _, below in found.values() for one in below]
        if isinstance(data, Mapping):
            return {name: value for name, (value, _) in found.items()}, odd
        parts = [value for value, _ in found.values()]
        return (tuple(parts) if isinstance(data, tuple) else parts), odd
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
    return f"{where}more than {most}: that is no configuration: keep data in a file of its own"


def fault_of_yaml(e: yaml.YAMLError) -> str:
    """Says where a text is not YAML and why, in one line."""
    mark = getattr(e, "problem_mark", None)
    at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    text = getattr(e, "problem", None) or getattr(e, "reason", None) or str(e)
    return f"{at}: {' '.join(text.split())[:200]}"


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML or JSON file. Raises InputError."""
    if path.suffix != ".json" or not path.is_file():
        return read_yaml(path)
    try:
        data = parse_json(read_text(path))
    except ValueError as e:
        raise InputError(f"{path}: not valid JSON{':' * (not str(e).startswith('at '))} {e}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping, got {short(data)}")
    limited(data)
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file; an empty file is an empty one. Raises InputError."""
    try:
        data = parse(read_text(path))
    except yaml.YAMLError as e:
        raise InputError(f"{path}: not valid YAML{fault_of_yaml(e)}") from None
    if data is not None and not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys such as 'rollout:', got {short(data)}")
    return data or {}


def read_text(path: Path) -> str:
    """Reads the text of a file that somebody named. Raises InputError."""
    try:
        with path.open("rb") as file:  # not to its end, which a device has not
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        files = sorted({*path.parent.glob("*.y*ml"), *Path("configs").glob("*.y*ml")})
        names = {p.stem: str(p) for p in files}
        near = [names[n] for n in difflib.get_close_matches(path.stem[:80], names, 3)]
        near = near or difflib.get_close_matches(path.stem[:80], shipped.names(), 3)
        mend = f": did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"{_named(path)}: there is no such file{mend}") from None
    except (OSError, ValueError) as e:  # ValueError: a null byte in the name
        raise InputError(f"{_named(path)}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{_named(path)}: larger than {_MOST_BYTES >> 20} MiB: that is no configuration")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{_named(path)}: cannot be read: not UTF-8 text") from None


def _named(path: Path) -> str:
    return str(path) if len(str(path)) <= 200 else short(str(path))


def dump(
    data: Mapping[str, Any], comments: Mapping[str, str] | None = None, *, prefix: str = "", level: int = 0
) -> str:
    """Writes nested mappings as YAML, one leaf per line, with `comments[dotted key]` behind it."""
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
    """Returns a value as YAML has it, in one line."""
    return _scalar(value) if isinstance(value, str | int | None) else _flow(value)


@functools.lru_cache(maxsize=1024, typed=True)
def _scalar(value: str | int | None) -> str:
    """Returns `_flow` of the few names and numbers of which configs consist; not of floats, where 0.0 is -0.0."""
    return _flow(value)


def _flow(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    )
    text = text.removesuffix("...\n").strip()
    return json.dumps(value) if "\n" in text else text  # a text of several lines
