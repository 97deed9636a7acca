"""`PPOConfig().environment("CartPole-v1").training(lr=3e-4).build()`: the config tree, written as calls.

An AlgorithmConfig holds the keys that were set, as the tree that YAML holds; nothing is kept twice. What is derived
from other keys (`num_envs_per_env_runner`, `train_batch_size`, ...) is worked out when the tree is asked for.
"""

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jrl import config, exploration_names, plan, registry, schema
from jrl.api import groups
from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.sections import SYNONYMS

if TYPE_CHECKING:
    from jrl.api.algorithm import Algorithm

_OBJECTS = (
    "env.id", "network.torso", "network.transform", "custom.loss", "custom.reward", "custom.training_step",
    "custom.env_task", "custom.evaluation",
)  # fmt: skip
_LISTS_OF_OBJECTS = ("custom.callbacks", "custom.transforms", "custom.batch", "run.log")


class AlgorithmConfig:
    """The settings of a run. `jrl.api.PPOConfig` and its like are made of it, one per algorithm.

    Args:
      algo_class: the Algorithm that `build` makes; None: the algorithm's own.
    """

    algo_name: ClassVar[str] = ""
    _arguments: ClassVar[dict[str, dict[str, groups.Argument]]] = {}

    def __init__(self, algo_class: "type[Algorithm] | None" = None):
        if not self.algo_name:
            raise InputError("AlgorithmConfig: choose an algorithm's, such as jrl.api.PPOConfig")
        self._given: dict[str, Any] = {}  # the tree of what was set, without what is derived
        self._derived: dict[str, Any] = {}
        self._frozen = False
        self.algo_class = algo_class

    # ------------------------------------------------------------ setting

    def stop(self, **criteria: float) -> Self:
        """When a run ends by itself: env_steps=1_000_000, or metrics of the result rows such as
        `**{"episode/return": 475}`. `Algorithm.train` may be called without any.
        """
        self._merge({"stop": criteria})
        return self

    def _set(self, group: str, keywords: Mapping[str, Any]) -> None:
        self._check_not_frozen()
        known = self._arguments[group]
        wrong = [self._unknown(name, group) for name in keywords if name not in known]
        if wrong:
            raise InputError(*wrong)
        for name, value in keywords.items():
            self._put(name, known[name].key, value)

    def _unknown(self, name: str, group: str) -> str:
        places = {n: g for g, known in self._arguments.items() for n in known}
        if name in places:
            return f"{group}: {name} is an argument of {places[name]}()"
        meant = SYNONYMS.get(name, name)
        keys = {a.key or n: n for known in reversed(self._arguments.values()) for n, a in known.items()}
        near = [keys[key] for key in (meant, f"algo.{meant}", meant.partition(".")[0]) if key in keys]
        near = near or difflib.get_close_matches(name, places, 1, 0.75)
        where = "" if not near or places[near[0]] == group else f" of {places[near[0]]}()"
        section, _, inner = meant.partition(".")
        inside = f", with {inner}" if near and near[0] == keys.get(section) and inner else ""
        mend = (
            f": did you mean {near[0]}{where}{inside}?"
            if near
            else f": it takes {', '.join(self._arguments.get(group, places))}"
        )
        return f"{group}: {self.algo_name} has no argument {name}{mend}"

    def _put(self, name: str, key: str | None, value: Any) -> None:
        if key is None:
            self._derived[name] = value
            return
        if key == "env.num_envs":
            self._derived.pop("num_envs_per_env_runner", None)  # the later of the two counts
        self._merge(_nested(key, self._plain(key, value)))

    def _plain(self, key: str, value: Any) -> Any:
        """`value` as the tree holds it: objects by their names."""
        if _is_search(value) and not isinstance(value, Mapping):
            return value
        if _is_search(value):
            return {"grid_search": [self._plain(key, v) for v in value["grid_search"]]}
        if key in _OBJECTS:
            return None if value is None else registry.reference(value)
        if key in _LISTS_OF_OBJECTS:
            several = value if isinstance(value, list | tuple) else [] if value is None else [value]
            return [registry.reference(v) for v in several]
        if key == "algo.exploration" and isinstance(value, Mapping) and "type" in value:
            given = {**value, "type": registry.reference(value["type"])}
            return exploration_names.from_rllib(given)
        if key == "network" and isinstance(value, Mapping):
            return {name: self._plain(f"network.{name}", given) for name, given in value.items()}
        if key == "rollout.length" and value == "auto":
            return None
        if key == "evaluation.config" and isinstance(value, Mapping):
            return self._overriding(value)
        return copy.deepcopy(value)

    def _merge(self, tree: Mapping[str, Any]) -> None:
        self._check_not_frozen()
        self._given = config.merge(self._given, tree)

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise AttributeError("this config is frozen: change a copy of it: config.copy(copy_frozen=False)")

    def update_from_dict(self, data: Mapping[str, Any]) -> Self:
        """Sets keys by the names that methods take (`lr`, `num_env_runners`, `evaluation_interval`), or sections of the
        tree (`algo: {...}`, `rollout: {...}`).

        Raises:
          InputError: all unknown keys.
        """
        sections = {f.name for f in dataclasses.fields(RunConfig)}
        places = self.names()
        wrong, tree = [], {}
        for name, value in data.items():
            # `env` is both: a section, or the name of an environment
            if name in sections and isinstance(value, Mapping) and not _is_search(value):
                tree[name] = self._plain(name, value) if name == "network" else value
            elif name in places:
                self._set(places[name], {name: value})
            elif name in sections and value is None:  # such as the replay of algorithms without one
                continue
            else:
                wrong.append(self._unknown(name, "config"))
        if wrong:
            raise InputError(*wrong)
        if tree:
            self._set_tree(tree)
        return self

    def _set_tree(self, tree: Mapping[str, Any]) -> None:
        algo = dict(tree.get("algo", {}))
        name = algo.pop("name", self.algo_name)
        if str(name).lower() != self.algo_name:
            raise InputError(
                f"algo.name: {name} in a config of {self.algo_name}: use jrl.api.{str(name).upper()}Config"
            )
        if "num_envs" in tree.get("env", {}):
            self._derived.pop("num_envs_per_env_runner", None)
        # copied at once: the caller's dicts are not ours
        self._merge(copy.deepcopy({**tree, "algo": algo} if "algo" in tree else dict(tree)))

    def arguments(self) -> dict[str, Any]:
        """What was set, by the names that methods take, searches included: Tune's tables, its schedulers and the names
        of trials show them. `update_from_dict` takes it back; what has no argument stays in its section.
        """
        tree, found = copy.deepcopy(self._given), {}
        for name, group in self.names().items():
            key = self._arguments[group][name].key
            *sections, last = key.split(".") if key else [""]
            place: Any = tree
            for section in sections:
                place = place.get(section) if isinstance(place, dict) else None
            if key and isinstance(place, dict) and last in place:
                found[name] = place.pop(last)
        return found | self._derived | {section: rest for section, rest in tree.items() if rest}

    @classmethod
    def names(cls) -> dict[str, str]:
        """The arguments of all methods, and the method of each."""
        return {name: group for group, known in reversed(cls._arguments.items()) for name in known}

    @classmethod
    def overrides(cls, **keywords: Any) -> dict[str, Any]:
        """Some settings as a tree, for `evaluation(evaluation_config=...)`: overrides(explore=False, env_config={...}).

        Raises:
          InputError: unknown names.
        """
        if not cls.algo_name:  # whatever the algorithm: `evaluation` reads the names
            return dict(keywords)
        return dict(cls().update_from_dict(keywords)._resolved(defaults=False))

    def _overriding(self, value: Mapping[str, Any]) -> dict[str, Any]:
        other = type(self)().update_from_dict(value)
        tree = other._resolved(defaults=False)
        tree.get("algo", {}).pop("name", None)
        return {name: section for name, section in tree.items() if section}

    # ------------------------------------------------------------ reading

    def to_dict(self) -> dict[str, Any]:
        """The whole tree, defaults included; `from_dict` gives an equal config back."""
        return self._resolved(defaults=True)

    def _resolved(self, *, defaults: bool) -> dict[str, Any]:
        base = self._defaults() if defaults else {}
        tree = config.merge(base, self._given)
        order = [name for group in groups.DERIVED.values() for name in group]  # others follow from the earlier ones
        for name, value in sorted(self._derived.items(), key=lambda item: order.index(item[0])):
            if _is_search(value):
                continue  # worked out in each trial
            tree = config.merge(tree, self._follows(name, value, config.merge(self._defaults(), tree)))
        tree = copy.deepcopy(tree)
        if defaults or "algo" in tree:
            tree["algo"] = {"name": self.algo_name, **tree.get("algo", {})}
        return tree

    def _follows(self, name: str, value: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
        """What a derived argument makes of the tree."""
        if name == "num_envs_per_env_runner":
            return {"env": {"num_envs": value * max(1, tree["env_runners"]["num"])}}
        if name == "num_learners":
            return {"devices": {"learners": list(range(max(1, min(value, 65_537))))}}  # more than there can be
        num_envs = tree["env"]["num_envs"]
        if name == "train_batch_size":
            if "replay" in tree and tree["replay"] is not None:
                return {"replay": {"batch_size": value}}
            if value % num_envs:
                near = sorted({max(num_envs, value - value % num_envs), value + num_envs - value % num_envs})
                raise InputError(
                    f"train_batch_size {value} is not divisible by {num_envs} environments: "
                    f"{' or '.join(map(str, near))} would do"
                )
            return {"rollout": {"length": value // num_envs}}
        rows = num_envs * (tree["rollout"]["length"] or plan.LENGTH)
        if value < 1 or rows % value:
            closest = sorted(plan.divisors(rows), key=lambda n: abs(n - value))[:2]
            raise InputError(
                f"minibatch_size {value} does not divide the {rows} rows of an iteration: "
                f"{' or '.join(map(str, sorted(closest)))} would do"
            )
        return {"algo": {"num_minibatches": rows // value}}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        made: dict[str, Any] = config.to_dict(config.from_dict({"algo": {"name": cls.algo_name}, "env": {"id": "-"}}))
        del made["env"]["id"]
        return made

    def to_run_config(self) -> RunConfig:
        """The config of a run.

        Raises:
          InputError: all that is wrong.
        """
        return config.from_dict(self._resolved(defaults=True))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The whole tree as YAML, for `python -m jrl.train`; written to `path`, if given."""
        text = schema.dump(self._resolved(defaults=True))
        if path is not None:
            Path(path).write_text(text)
        return text

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "AlgorithmConfig":
        """The config of a tree, whose `algo.name` picks the class. Raises InputError."""
        from jrl import api

        name = data.get("algo", {}).get("name") if isinstance(data.get("algo"), Mapping) else None
        return api.config_class(name)().update_from_dict(data)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "AlgorithmConfig":
        """The config of a YAML file. Raises InputError."""
        return cls.from_dict(schema.read_yaml(Path(path)))

    def validate(self) -> Self:
        """Raises InputError with all that is wrong, the environment's options included."""
        config.check_env(self.to_run_config())
        return self

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """An equal config; frozen or not as this one, or as told."""
        other = copy.copy(self)
        other._given, other._derived = copy.deepcopy(self._given), dict(self._derived)
        other._frozen = self._frozen if copy_frozen is None else copy_frozen
        return other

    def freeze(self) -> None:
        """From now on, setting raises AttributeError."""
        self._frozen = True

    def build(self, env: Any = None) -> "Algorithm":
        """The Algorithm, ready to train, in `env` if given; this config is copied and frozen. Raises InputError."""
        from jrl import api

        return (self.algo_class or api.algorithm_class(self.algo_name))(self, env)

    build_algo = build

    def __getitem__(self, name: str) -> Any:
        """The value of an argument by the name that methods take, or a section of the tree."""
        tree = self._resolved(defaults=True)
        place = self.names().get(name)
        if place is None:
            if name in tree:
                return tree[name]
            raise KeyError(self._unknown(name, "config"))
        key = self._arguments[place][name].key
        if key is None:
            return self._derived.get(name)
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """As `config[name]`; `default` where there is no such name."""
        try:
            return self[name]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in groups.ELSEWHERE:
            raise AttributeError(f"{type(self).__name__} has no method {name}: {groups.ELSEWHERE[name]}")
        try:
            return self[name]
        except KeyError as e:
            raise AttributeError(str(e)) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AlgorithmConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._resolved(defaults=False)})"


def _is_search(value: Any) -> bool:
    """Whether Ray Tune is to choose: a grid, or one of its distributions."""
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"}
    return type(value).__module__.startswith("ray.tune.search")


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def make_class(name: str, algo_config: type) -> type[AlgorithmConfig]:
    """The config class of an algorithm, with a method per group."""
    given = groups.arguments(algo_config)
    methods = {group: groups.method(group, known, AlgorithmConfig._set) for group, known in given.items()}
    doc = (
        f"Settings of {name.upper()}, by group: {', '.join(methods)}. `help({name.upper()}Config.training)` shows them."
    )
    return type(
        f"{name.upper()}Config",
        (AlgorithmConfig,),
        {"__doc__": doc, "__module__": "jrl.api", "algo_name": name, "_arguments": given, **methods},
    )
