"""RLlib's names in an AlgorithmConfig, and what they make of its tree. The table of them is `jrl.migrate`'s."""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jrl import registry
from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.data import Fresh, learns_from
from jrl.fields.hyper import NetworkConfig
from jrl.migrate import KEYS, memory
from jrl.migrate import policies as migrated
from jrl.migrate.job import Job, canonical, translate
from jrl.settings import sections

# arguments of ours that stand for more than their key in RLlib, where a number of atoms makes the head distributional,
# a fragment says how often is learned from replay, an input may be sampler or dataset, an output is a path, a target
# entropy may be auto
BY_RULE = {"target_entropy", "num_atoms", "rollout_fragment_length", "input_", "output"}
# a section of ours that an argument takes as a dict -> RLlib's dict of the same name, and the keys that are ours
_DICTS: dict[str, tuple[str, set[str]]] = {
    "network": ("model", {f.name for f in dataclasses.fields(NetworkConfig)}),
    "replay": ("replay_buffer_config", {f.name for f in dataclasses.fields(sections.ReplayConfig)}),
}

# keys that hold a class or function by its name, a list of such, or such or something else
OBJECTS = (
    "env.id", "network.torso", "network.transform", "custom.loss", "custom.reward", "custom.training_step",
    "custom.env_task", "custom.evaluation", "multi_agent.observation_fn",
)  # fmt: skip
LISTS_OF_OBJECTS = ("custom.callbacks", "custom.transforms", "custom.batch", "run.log")
# a name of RLlib's that becomes several keys -> those that say the same
_SAME = {
    "rollout_fragment_length": ("rollout.length", "replay.train_every"),
    "train_batch_size": ("replay.batch_size",),
}
FUNCTIONS = ("multi_agent.mapping", "multi_agent.policies_to_train")


def newest(name: str) -> str | None:
    """Returns the newest name of a key of RLlib's; None for an unknown name."""
    return KEYS[name].name if name in KEYS else None


def same_key(name: str, key: str | None) -> bool:
    """Returns whether a key of RLlib's becomes this key of ours and nothing else; None: a key that follows from it."""
    return key is None or KEYS[name].ours == key


def spelled(name: str, value: Any) -> dict[str, Any]:
    """Returns the keys of the table that a name stands for: `optimizer={"epsilon": 1}` is optimizer.epsilon."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # RLlib's DefaultModelConfig
        value = dataclasses.asdict(value)
    return dict(canonical({name: value}))


def split(key: str, value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a dict for a section of ours into (our keys, RLlib's keys as the table has them)."""
    theirs, own = _DICTS.get(key, ("", set(value)))
    found = {name: f"{theirs}.{name}" for name in value if name not in own and f"{theirs}.{name}" in KEYS}
    ours = {name: given for name, given in value.items() if name not in found}
    return ours, {found[name]: value[name] for name in found}


def forgotten(theirs: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Returns RLlib's names that mean the same as keys of ours that are set now: the later of two counts."""
    keys = set(keys)
    return [name for name in theirs if keys & {KEYS[name].ours, *_SAME.get(KEYS[name].name, ())}]


def job(
    algo: str, source: str, config_class: type, theirs: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Job, dict]:
    """Translates RLlib's names over a tree of ours, and returns the lines of each name.

    Args:
      algo, config_class: the algorithm.
      source: its name in RLlib.
      theirs: RLlib's names and values.
      given: our tree, without defaults.
    """
    found = Job(algo, source, config_class, dict(_with_sizes(theirs, given, config_class)), base=given)
    memory.begin(found)
    lines = {"": list(found.lines)}
    for name in found.raw:
        before = len(found.lines)
        translate(found, [name])
        lines[name] = found.lines[before:]
    return found, lines


def _with_sizes(theirs: Mapping[str, Any], given: Mapping[str, Any], config_class: type) -> Iterator[tuple[str, Any]]:
    """Yields RLlib's names, and those whose values follow from our tree, on which others depend."""
    yield from theirs.items()
    if runners := _count(given, "env_runners", "num"):
        yield "num_env_runners", runners
    if learns_from(config_class) is Fresh and (length := _count(given, "rollout", "length")):
        yield "rollout_fragment_length", length
    if memory.SWITCHES & {newest(name) for name in theirs} and (steps := _count(given, "network", "max_seq_len")):
        yield "model.max_seq_len", steps


def _count(tree: Mapping[str, Any], section: str, key: str) -> int | None:
    """Returns a whole number above 0 in a tree; None where there is none, which the check of the tree reports."""
    found = (tree.get(section) or {}).get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def install_environment(name: Any) -> None:
    """Registers an environment that is known to Ray Tune only: `ray.tune.register_env(name, creator)`."""
    if not isinstance(name, str) or registry.registered(name) is not None or "ray.tune.registry" not in sys.modules:
        return
    from ray.tune.registry import ENV_CREATOR, _global_registry

    if _global_registry.contains(ENV_CREATOR, name):
        registry.register(name, _global_registry.get(ENV_CREATOR, name))


def near(name: str, among: Iterable[str]) -> str | None:
    """Returns the name of RLlib's, or of those given, that the writer of `name` most likely meant."""
    found = difflib.get_close_matches(name, {*among, *(n for n in KEYS if "." not in n)}, 1, 0.75)
    return found[0] if found else None


def with_arguments(text: str, keys: Mapping[str, str], places: Mapping[str, str]) -> str:
    """Returns a text whose keys of the tree, such as algo.lr=0.1, are written as arguments: training(lr=0.1).

    Args:
      keys: key of the tree, or section that an argument takes as a dict -> argument.
      places: argument -> its method.
    """

    def written(found: re.Match) -> str:
        key, value = found[1], found[2] or "..."
        section, _, inner = key.partition(".")
        if key in keys:
            return f"{places[keys[key]]}({keys[key]}={value})"
        if section in keys:
            return f"{places[keys[section]]}({keys[section]}={{{inner!r}: {value}}})"
        return found[0]

    return re.sub(r"\b([a-z_]+\.[a-z_]+)\b(?:=(\{.*?\}|\[.*?\]|[^\s,;]*[^\s,;:]))?", written, text)


def is_search(value: Any) -> bool:
    """Returns whether Ray Tune is to choose: a grid, or one of its distributions."""
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"}
    return type(value).__module__.startswith("ray.tune.search")


def synonymous(a: str, b: str) -> bool:
    """Returns whether two names of RLlib's are of one key."""
    return newest(a) == newest(b)


def nested(key: str, value: Any) -> dict[str, Any]:
    """Returns the tree of one key.

    >>> nested("algo.lr", 0.1)
    {'algo': {'lr': 0.1}}
    """
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def policies(value: Any, config_class: Any) -> dict[str, dict[str, Any]]:
    """Returns policies in any of RLlib's spellings as the tree has them: each with its own sections.

    Args:
      value: see `jrl.migrate.policies.read`.
      config_class: of the AlgorithmConfig; without an algorithm names stay as they are until there is one.
    Raises:
      InputError: a class that is of none of RLlib's algorithms, or unknown names.
    """
    from jrl import api

    found: dict[str, dict[str, Any]] = {}
    for name, spec in migrated.read(value, "policies").items():
        if spec.own_class is not None:
            raise InputError(f"policies.{name}: {migrated.no_class(spec.own_class)}")
        given = dict(spec.config.arguments() if hasattr(spec.config, "arguments") else spec.config)
        given = schema.merge(migrated.of_class(spec, config_class.variant or config_class.algo_name or None), given)
        if not config_class.algo_name:
            found[name] = given
            continue
        algo = given.get("algo")
        named = api.config_class(algo["name"]) if isinstance(algo, Mapping) and "name" in algo else config_class
        one = named()
        one._given = {} if named is config_class else one._given  # the run has the settings of the variant
        own = one.update_from_dict(given)._resolved(defaults=False)
        if named.algo_name == config_class.algo_name:
            own.get("algo", {}).pop("name", None)
        found[name] = {section: values for section, values in own.items() if values}
    return found
