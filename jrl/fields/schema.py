"""Plain data: YAML and JSON, safe for untrusted text; trees; and sections built from them with strict keys.

Keys are dotted, such as `rollout.length`. `jrl.fields.validation` checks the values. All problems are reported at once.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jrl.errors import InputError, short, shown
from jrl.fields import paths, shipped, validation
from jrl.fields.bounds import hints
from jrl.fields.validation import default_of, section_class


class Problem(NamedTuple):
    key: str  # dotted
    message: str  # the key, the fault and the fix


# ---------------------------------------------------------------- YAML and JSON

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


# ---------------------------------------------------------------- trees of plain data


def plain(value: Any) -> Any:
    """Returns a tree of dataclasses as dicts, lists and scalars, for YAML and JSON."""
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
    """Merges `override` over `base`, recursively, into a new dict.

    A section whose `name` differs in the two is of another kind: the section of `override` replaces it whole.

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
    swap: Mapping[str, Any] = types.MappingProxyType({}),
    synonyms: Mapping[str, str] = types.MappingProxyType({}),
    known: Iterable[str] = (),
    answer: Callable[[str], str | None] = lambda key: None,
) -> Any:
    """Builds an instance of `cls` from plain data.

    Args:
      problems: list to which problems are appended.
      prefix: prefix of the keys.
      swap: field -> annotation that replaces the field's own.
      synonyms: name of another library -> name or dotted key of jrl, for "did you mean".
      known: further dotted keys for "did you mean".
      answer: function from an unknown key to the right key, a sentence, or None for the nearest key.
    Returns:
      The instance, with defaults for faulty values; None if that fails, too.
    """
    if not isinstance(data, Mapping):
        problems.append(Problem(prefix[:-1], f"{prefix[:-1] or 'the config'}: expected a mapping, got {short(data)}"))
        data = {}
    changed = tuple(swap.items())
    values, faults = validation.checked(cls, data, prefix, changed)
    if not faults:
        return cls(**values)
    unknown: list[str] = []
    for path, message in faults:
        if not message:
            unknown += flatten(_value_at(data, path), prefix + ".".join(map(str, path)))
    if unknown:
        valid = [*_keys({**hints(cls), **swap}, cls, data, prefix), *known]
        by_answer: dict[str, Problem] = {}  # only the first key of each answer: net_arch.pi and net_arch.vf share one
        for key in unknown:
            message = f"unknown key {shown(key)}: {_hint(key, valid, synonyms, answer)}"
            by_answer.setdefault(answer(key) or key, Problem(key, message))
        problems += by_answer.values()
    problems += [Problem(prefix + ".".join(map(str, path)), message) for path, message in faults if message]
    values, faults = validation.checked(cls, _without(data, [path for path, _ in faults]), prefix, changed)
    return None if faults else cls(**values)


def _value_at(data: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        data = data.get(name)  # None for a key that is not text: paths consist of text
    return data


def _without(data: Any, paths: Iterable[tuple[Any, ...]]) -> Any:
    """Returns nested data without the values at `paths`; missing paths are ignored."""
    below: dict[Any, list[tuple[Any, ...]]] = {}
    for first, *rest in paths:
        below.setdefault(str(first), []).append(tuple(rest))
    if not below or not isinstance(data, Mapping):
        return data
    paths_below = lambda name: below.get(str(name), ())
    return {name: _without(value, paths_below(name)) for name, value in data.items() if () not in paths_below(name)}


def text(value: Any) -> str:
    """Returns a name from a config as text; numbers are shortened, because `str` may refuse a very long int."""
    return value if isinstance(value, str) else short(value)


def _keys(annotations: Mapping[str, Any], cls: Any, data: Any, prefix: str) -> Iterator[str]:
    """Yields the dotted keys of all leaves of the dataclass; `data` selects the class of sections with a `name`."""
    for field in dataclasses.fields(cls):
        value = data.get(field.name) if isinstance(data, Mapping) else None
        section = section_class(annotations[field.name])
        if names := validation.choices(annotations[field.name]):
            named = names.get(text(value.get("name")).lower()) if isinstance(value, Mapping) else None
            default = type(default_of(field))
            section = named or (default if default in names.values() else section)
        if section:
            yield from _keys(hints(section), section, value, f"{prefix}{field.name}.")
        elif field.init:
            yield prefix + field.name


def _hint(key: str, valid: list[str], synonyms: Mapping[str, str], answer: Callable[[str], str | None]) -> str:
    known = answer(key)
    if known and known not in valid:
        return known if " " in known else f"{known} is a key of other algorithms: leave it out"
    near = known or nearest(key, valid, synonyms)
    if near:
        return f"did you mean {near}?"
    head, siblings = key, list[str]()
    while head and not siblings:
        head = head.rpartition(".")[0]
        siblings = [k.rpartition(".")[2] for k in valid if head and k.rpartition(".")[0] == head]
    names = siblings or [k.partition(".")[0] for k in valid]
    return f"{head or 'the config'} has {', '.join(dict.fromkeys(names))}"


def nearest(key: str, valid: Iterable[str], synonyms: Mapping[str, str]) -> str | None:
    """Returns the valid dotted key most similar to `key`: first in the same section, then in the whole tree.

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

    alike = lambda k: difflib.SequenceMatcher(None, name, k.rpartition(".")[2]).ratio() >= 0.5
    same = [synonyms[s] for s in difflib.get_close_matches(name, synonyms, 1, 0.85)]
    rounds = (
        lambda: named([name], valid), lambda: close(own, 0.85), lambda: named(same, valid), lambda: close(own, 0.6),
        lambda: close(valid, 0.8), lambda: difflib.get_close_matches(key, filter(alike, valid), 1, 0.8),
    )  # fmt: skip
    for found in (r() for r in rounds):
        if found:
            return max(found, key=lambda k: (k in own, difflib.SequenceMatcher(None, key, k).ratio()))
    return None
