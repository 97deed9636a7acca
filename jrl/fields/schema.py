"""Trees of plain data, and sections made of them: strict keys, and every problem found at once.

Keys are dotted: `rollout.length`. `jrl.fields.validation` knows what a section's fields take.
"""

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jrl.errors import short, shown
from jrl.fields import validation
from jrl.fields.bounds import hints
from jrl.fields.plain_yaml import dump as dump
from jrl.fields.plain_yaml import fault_of_yaml as fault_of_yaml
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

_MOST_MENDS = 20  # of unknown keys


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
    swap: Mapping[str, Any] = types.MappingProxyType({}),
    synonyms: Mapping[str, str] = types.MappingProxyType({}),
    known: Iterable[str] = (),
    answer: Callable[[str], str | None] = lambda key: None,
) -> Any:
    """Makes an instance of `cls`. Problems are appended; values at fault are those of the defaults then, or it is None.

    Args:
      prefix: of the keys.
      swap: field -> annotation that is to count in the place of its own.
      synonyms: name used elsewhere -> ours, a name or a dotted key, for "did you mean".
      known: further dotted keys that "did you mean" may offer.
      answer: an unknown key -> the key that was meant, or a sentence; None: "did you mean" finds the nearest.
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
            unknown += flatten(_at(data, path), prefix + ".".join(map(str, path)))
    if unknown:
        valid = [*_keys({**hints(cls), **swap}, cls, data, prefix), *known]
        mends: dict[str, Problem] = {}  # the first key of each answer: net_arch.pi and net_arch.vf have one
        for key in unknown[:_MOST_MENDS]:
            message = f"unknown key {shown(key)}: {_mend(key, valid, synonyms, answer)}"
            mends.setdefault(answer(key) or key, Problem(key, message))
        problems += mends.values()
    if more := unknown[_MOST_MENDS:]:  # to look for what was meant takes milliseconds each
        problems.append(Problem(more[0], f"unknown key {shown(more[0])}, and {len(more) - 1:,} more"))
    problems += [Problem(prefix + ".".join(map(str, path)), message) for path, message in faults if message]
    values, faults = validation.checked(cls, _without(data, [path for path, _ in faults]), prefix, changed)
    return None if faults else cls(**values)


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        data = data.get(name)  # None of a key that is no text, which a path has as text
    return data


def _without(data: Any, paths: Iterable[tuple[Any, ...]]) -> Any:
    """Returns nested data without the values at these paths, of which some may not be there."""
    below: dict[Any, list[tuple[Any, ...]]] = {}
    for first, *rest in paths:
        below.setdefault(str(first), []).append(tuple(rest))
    if not below or not isinstance(data, Mapping):
        return data
    of = lambda name: below.get(str(name), ())
    return {name: _without(one, of(name)) for name, one in data.items() if () not in of(name)}


def text(value: Any) -> str:
    """Returns a name that a config gives, as text; of an int of any length, which `str` may refuse, a short one."""
    return value if isinstance(value, str) else short(value)


def _keys(annotations: Mapping[str, Any], cls: Any, data: Any, prefix: str) -> Iterator[str]:
    """Yields the dotted keys of all leaves that the dataclass may be given beside `data`."""
    for field in dataclasses.fields(cls):
        given = data.get(field.name) if isinstance(data, Mapping) else None
        of = section_class(annotations[field.name])
        if names := validation.choices(annotations[field.name]):
            named = names.get(text(given.get("name")).lower()) if isinstance(given, Mapping) else None
            default = type(default_of(field))
            of = named or (default if default in names.values() else of)
        if of:
            yield from _keys(hints(of), of, given, f"{prefix}{field.name}.")
        elif field.init:
            yield prefix + field.name


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
