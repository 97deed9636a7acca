"""YAML and JSON to plain data and back, safe for untrusted text."""

import difflib
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jrl.errors import InputError, short
from jrl.fields import paths, shipped

if yaml.__with_libyaml__:

    class _Base(yaml.composer.Composer, yaml.CSafeLoader):
        """libyaml's parser is ten times as fast, but its composer ends the process for deep nesting."""

        def __init__(self, text: str):
            yaml.CSafeLoader.__init__(self, text)
            yaml.composer.Composer.__init__(self)
else:
    _Base = yaml.SafeLoader  # type: ignore[misc,assignment]  # a name for either


class _Loader(_Base):
    """YAML 1.1 without its traps: `1e-3` is a number, a date is text, a duplicate key is an error."""

    def construct_mapping(self, node, deep=False):
        names = [str(key.value) for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if names[i] in names[:i]:
                problem = f"duplicate key {short(names[i]) if len(names[i]) > 80 else names[i]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


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
    """Parses YAML text to plain data. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, KeyError, IndexError, OverflowError, AttributeError) as e:  # !!int x, 5,000 digits
        raise yaml.YAMLError(f"a value is not of its type: {e}") from e


def parse_json(text: str) -> Any:
    """Parses JSON text to plain data; duplicate keys are errors.

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
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"duplicate key {short(next(n for n in names if names.count(n) > 1))}")
    return dict(pairs)


def as_plain(data: Any, key: str = "") -> tuple[Any, list[tuple[str, Any]]]:
    """Returns nested data with Python numbers instead of numpy's and jax's, lists for arrays, and text for paths.

    Args:
      data: any data.
      key: dotted key of the data.
    Returns:
      The data, and (key, value) of each key and value that YAML cannot hold; such values stay unchanged.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data, []
    if isinstance(data, Mapping | list | tuple):
        inside = data.items() if isinstance(data, Mapping) else enumerate(data)
        converted = {name: as_plain(value, f"{key}.{name}".removeprefix(".")) for name, value in inside}
        unusable = [pair for _, pairs in converted.values() for pair in pairs]
        if isinstance(data, Mapping):
            unusable += [(key, name) for name in data if not isinstance(name, str | int | float | None)]
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
        return data.tolist(), []
    return data, [(key, data)]


def describe_yaml_error(e: yaml.YAMLError) -> str:
    """Returns the place and the reason of a YAML error, in one line."""
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
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file; an empty file has an empty mapping. Raises InputError."""
    try:
        data = parse(read_text(path))
    except yaml.YAMLError as e:
        raise InputError(f"{path}: not valid YAML{describe_yaml_error(e)}") from None
    if data is not None and not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys such as 'rollout:', got {short(data)}")
    return data or {}


def read_text(path: Path) -> str:
    """Reads a text file. Raises InputError, with similar names if the file does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        files = sorted({*path.parent.glob("*.y*ml"), *Path("configs").glob("*.y*ml")})
        names = {p.stem: str(p) for p in files}
        near = [names[n] for n in difflib.get_close_matches(path.stem[:80], names, 3)]
        near = near or difflib.get_close_matches(path.stem[:80], shipped.names(), 3)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"{paths.shorten(path)}: there is no such file{hint}") from None
    except UnicodeDecodeError:
        raise InputError(f"{paths.shorten(path)}: cannot be read: not UTF-8 text") from None
    except (OSError, ValueError) as e:  # ValueError: a null byte in the name
        raise InputError(f"{paths.shorten(path)}: cannot be read: {getattr(e, 'strerror', None) or e}") from None


def dump(
    data: Mapping[str, Any], comments: Mapping[str, str] | None = None, *, prefix: str = "", level: int = 0
) -> str:
    """Writes nested mappings as YAML, one leaf per line, followed by `comments[dotted key]`."""
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
    """Returns a value as YAML, in one line."""
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
