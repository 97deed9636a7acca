"""Trees of plain data, and sections built from them with strict keys; all problems are reported together.

Keys are dotted, such as `rollout.length`. `jrl.fields.validation` checks the values.
"""

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jrl.errors import short, shown
from jrl.fields import validation
from jrl.fields.bounds import hints
from jrl.fields.plain_yaml import describe_yaml_error as describe_yaml_error
from jrl.fields.plain_yaml import dump as dump
from jrl.fields.plain_yaml import flow as flow
from jrl.fields.plain_yaml import parse as parse
from jrl.fields.plain_yaml import parse_json as parse_json
from jrl.fields.plain_yaml import read_mapping as read_mapping
from jrl.fields.plain_yaml import read_text as read_text
from jrl.fields.plain_yaml import read_yaml as read_yaml
from jrl.fields.validation import default_of as default_of
from jrl.fields.validation import docs as docs
from jrl.fields.validation import is_required as is_required
from jrl.fields.validation import section_class as section_class
from jrl.fields.validation import tree_docs as tree_docs


class Problem(NamedTuple):
    key: str  # dotted
    message: str  # the key, the fault and the fix


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

    same = [synonyms[s] for s in difflib.get_close_matches(name, synonyms, 1, 0.85)]
    rounds = (
        lambda: named([name], valid), lambda: close(own, 0.85), lambda: named(same, valid), lambda: close(own, 0.6),
        lambda: close(valid, 0.8), lambda: difflib.get_close_matches(key, valid, 1, 0.8),
    )  # fmt: skip
    for found in (r() for r in rounds):
        if found:
            return max(found, key=lambda k: (k in own, difflib.SequenceMatcher(None, key, k).ratio()))
    return None
