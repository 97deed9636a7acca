"""Methods, whose seeds runs are, and their names: by what its config has that others' have not."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jrl.errors import InputError, shown
from jrl.fields import schema

# keys of a config that say nothing about what was learned
APART = ("run.seed", "run.out", "run.log", "run.compile_cache", "run.report_every", "checkpoint", "stop")
_LONGEST = 300  # characters of a name
_MOST_KEYS = 4  # in a name; of more those that tell the groups apart

Flat = Mapping[str, Any]  # dotted key -> leaf
Key = TypeVar("Key", bound=Hashable)


def learning(config: Flat, apart: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys of a config that say what is learned and how, without those `apart`."""
    return {key: value for key, value in config.items() if not key.startswith((*APART, *apart))}


def names(configs: Mapping[Key, Flat], apart: Sequence[str] = (), by: Sequence[str] = ()) -> dict[Key, str]:
    """Returns the name of each run's method; runs whose configs differ in APART and `apart` alone have one name.

    A name is the algorithm, if there are several, and of each its keys that differ: `ppo, algo.lr=0.001`; where more
    than four differ, some that are enough to tell them apart. It is empty where all are one method.

    Args:
      configs: of the runs.
      apart: further keys that make no other method.
      by: the keys that alone make a method; empty: all.
    Raises:
      InputError: no config has a key of `by`.
    """
    if by:
        _check(configs.values(), by)
        kept = {run: {key: config[key] for key in by if key in config} for run, config in configs.items()}
    else:
        kept = {run: learning(config, apart) for run, config in configs.items()}
    groups = {repr(sorted(config.items(), key=repr)): config for config in kept.values()}
    labels = _labels(groups)
    return {run: labels[repr(sorted(config.items(), key=repr))] for run, config in kept.items()}


def differing(configs: Iterable[Flat]) -> list[str]:
    """Returns the keys whose values differ, or that some have not."""
    configs = list(configs)
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _labels(groups: Mapping[str, Flat]) -> dict[str, str]:
    """Returns the name of each group of equal configs."""
    algos = dict.fromkeys(str(config.get("algo.name")) for config in groups.values())
    labels = {}
    for algo in algos:
        own = {group: config for group, config in groups.items() if str(config.get("algo.name")) == algo}
        keys = _telling(list(own.values()))
        for group, config in own.items():
            parts = [shown(algo)] if len(algos) > 1 else []
            parts += [f"{key}={shown(schema.flow(config[key]))}" for key in keys if key in config]
            labels[group] = shown(", ".join(parts), _LONGEST)
    taken: dict[str, int] = {}
    for group, label in labels.items():  # long ones may differ only where they are not shown
        taken[label] = taken.get(label, 0) + 1
        labels[group] = label if taken[label] == 1 else f"{label} ({taken[label]})"
    return labels


def _telling(configs: Sequence[Flat]) -> list[str]:
    """Returns the keys that differ, or of many some that tell the configs apart, in the order of the configs."""
    keys = differing(configs)
    if len(keys) <= _MOST_KEYS:
        return keys
    chosen: list[str] = []
    count = lambda found: len({tuple(repr(config.get(key)) for key in found) for config in configs})
    while count(chosen) < len(configs):
        chosen.append(max(keys, key=lambda key: count([*chosen, key])))
    return sorted(chosen, key=keys.index)


def _check(configs: Iterable[Flat], by: Sequence[str]) -> None:
    known = list(dict.fromkeys(key for config in configs for key in config))
    errors = []
    for key in by:
        if key not in known:
            near = schema.nearest(key, known, {})
            errors.append(
                f"--by {key}: no run has that key in its config.yaml" + f": did you mean {near}?" * bool(near)
            )
    if errors:
        raise InputError(*errors)
