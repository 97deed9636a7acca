"""`PPOConfig().environment("CartPole-v1").training(lr=3e-4).build()`: the config tree, written as calls.

An AlgorithmConfig holds jrl's keys as a tree, as in YAML, and RLlib's keys by name. RLlib's keys depend on each other,
so `jrl.rllib.translation` translates all of them whenever the tree is read.
"""

import copy
import dataclasses
import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from jrl import algos, config, envs, registry
from jrl.config import RunConfig, sb3_names
from jrl.config.sections import SYNONYMS, ReplayConfig
from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.data import DataSets, Fresh, learns_from, traits
from jrl.fields.hyper import NetworkConfig
from jrl.fields.paths import resolve, written
from jrl.rllib import arguments, exploration, hints, migration, multi_agent
from jrl.rllib.arguments import RULE_ARGUMENTS, Argument
from jrl.rllib.table import KEYS
from jrl.rllib.translation import SWITCHES, Job, get_value, nest_key, split_containers, translate
from jrl.run import preflight

assert migration.RULES  # registered by the import
# section given as a dict -> RLlib's container of the same meaning, and jrl's keys of the section
_DICT_KEYS: dict[str, tuple[str, set[str]]] = {
    "network": ("model", {f.name for f in dataclasses.fields(NetworkConfig)}),
    "replay": ("replay_buffer_config", {f.name for f in dataclasses.fields(ReplayConfig)}),
    "algo.optimizer": ("optimizer", {"eps", "weight_decay"}),  # the others have names of their own
}
# keys whose value is a class or function, stored by name; lists of them; functions or other values
_OBJECT_KEYS = (
    "env.id", "network.torso", "network.transform", "custom.loss", "custom.reward", "custom.training_step",
    "custom.env_task", "custom.evaluation", "multi_agent.observation_fn",
)  # fmt: skip
_LIST_KEYS = ("custom.callbacks", "custom.transforms", "custom.batch", "run.log")
_FUNCTION_KEYS = ("multi_agent.mapping", "multi_agent.policies_to_train")
# key of RLlib that becomes several keys -> keys of jrl that replace it if they are set later
_REPLACING_KEYS = {
    "num_env_runners": ("env_runners.num",),
    "rollout_fragment_length": ("rollout.length", "replay.train_every"),
    "train_batch_size": ("replay.batch_size",),
}


class AlgorithmConfig:
    """Settings of a run. Each algorithm has a subclass, such as `jrl.api.PPOConfig`.

    `AlgorithmConfig()`, without an algorithm, holds settings shared by several: `PPOConfig().update_from_dict(shared)`.

    Args:
      algo_class: Algorithm class for `build`; None: the algorithm's class.
    """

    algo_name: ClassVar[str] = ""
    variant: ClassVar[str] = ""  # name of an algorithm with settings of its own, such as cql
    variant_settings: ClassVar[Mapping[str, Any]] = {}  # settings of the variant, as a tree

    def __new__(cls, algo_class: type[Any] | None = None) -> Self:
        if algo_class is not None and not cls.algo_name and algo_class.algo_name:
            from jrl.rllib import config_class

            cls = cast(type[Self], config_class(algo_class.variant or algo_class.algo_name))
        return super().__new__(cls)

    def __init__(self, algo_class: type[Any] | None = None):
        self._given: dict[str, Any] = copy.deepcopy(dict(self.variant_settings))  # tree of jrl's keys that are set
        self._rllib: dict[str, Any] = {}  # RLlib's key -> value
        self._frozen = False
        self.algo_class = algo_class

    @classmethod
    def methods(cls) -> dict[str, dict[str, Argument]]:
        """Returns method -> keyword -> Argument; without an algorithm of all algorithms."""
        return arguments.build_arguments(cls.algo_name)

    @classmethod
    def names(cls) -> dict[str, str]:
        """Returns argument -> method, for all methods."""
        return {name: method for method, known in reversed(cls.methods().items()) for name in known}

    # ------------------------------------------------------------ setting

    def stop(self, **criteria: float) -> Self:
        """Sets the end of a run: env_steps=1_000_000, or metrics such as `**{"episode/return": 475}`."""
        self._merge({"stop": criteria})
        return self

    def _set(self, method: str, keywords: Mapping[str, Any]) -> None:
        self._check_not_frozen()
        known = self.methods().get(method, {})
        wrong: list[str] = []
        for name, value in keywords.items():
            key = known[name].key if name in known and name not in RULE_ARGUMENTS else None
            if key is not None:
                self._set_key(key, value)
            else:
                wrong += self._set_rllib(method, name, value)
        if wrong:
            raise InputError(*wrong)

    def _set_rllib(self, method: str, name: str, value: Any) -> list[str]:
        """Sets a key of RLlib, and returns its faults."""
        wrong: list[str] = []
        for spelled, given in split_containers({name: _to_dict(value)}):
            if spelled in KEYS:
                others = {k: v for k, v in self._rllib.items() if KEYS[k].name != KEYS[spelled].name}
                self._rllib = others | {spelled: given}
            else:
                wrong.append(self._describe_unknown(spelled, method))
        if self.algo_name and not wrong and (refused := self._translate().refused):
            wrong += [f"{method}: {line}" for line in refused]
            self._rllib = {k: v for k, v in self._rllib.items() if not any(x.startswith(f"{k}:") for x in refused)}
        return wrong

    def _set_key(self, key: str, value: Any) -> None:
        value = _to_dict(value) if key == "network" else value
        if key in _DICT_KEYS and isinstance(value, Mapping) and not _is_search(value):
            prefix, ours = _DICT_KEYS[key]
            rllib = [name for name in value if name not in ours and f"{prefix}.{name}" in KEYS]
            for name in rllib:
                if wrong := self._set_rllib("training", f"{prefix}.{name}", value[name]):
                    raise InputError(*wrong)
            value = {name: given for name, given in value.items() if name not in rllib}
            if rllib and not value:
                return
        plain = self._to_plain(key, value)
        if key.startswith("multi_agent."):  # a table replaces the table before
            (self._given.get("multi_agent") or {}).pop(key.partition(".")[2], None)
        self._merge(nest_key(key, plain))

    def _to_plain(self, key: str, value: Any) -> Any:
        """Returns a value for the tree, with the names of objects."""
        if _is_search(value):
            if not isinstance(value, Mapping):
                return value
            return {"grid_search": [self._to_plain(key, v) for v in value["grid_search"]]}
        if key == "env.id":
            register_ray_environment(value)
        if key == "multi_agent.policies":
            return self._build_policies(value)
        if key in _OBJECT_KEYS or (key in _FUNCTION_KEYS and callable(value)):
            return None if value is None else registry.reference(value)
        if key in _LIST_KEYS:
            values = value if isinstance(value, list | tuple) else [] if value is None else [value]
            return [registry.reference(v) for v in values]
        if key == "algo.exploration" and isinstance(value, Mapping) and "type" in value:
            return exploration.from_rllib({**value, "type": registry.reference(value["type"])})
        if key == "network" and isinstance(value, Mapping):
            return {name: self._to_plain(f"network.{name}", given) for name, given in value.items()}
        if key == "evaluation.config" and isinstance(value, Mapping):
            return self.build_sections(value) if self.algo_name else dict(value)
        return copy.deepcopy(value)

    def _merge(self, tree: Mapping[str, Any]) -> None:
        self._check_not_frozen()
        keys = set(schema.flatten(tree))  # the later of a key of RLlib and a key of jrl with the same meaning wins
        replacing = lambda row: _REPLACING_KEYS.get(row.name, (row.ours,))
        self._rllib = {n: value for n, value in self._rllib.items() if keys.isdisjoint(replacing(KEYS[n]))}
        self._given = config.merge(self._given, tree)

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise AttributeError("this config is frozen: change a copy of it: config.copy(copy_frozen=False)")

    @classmethod
    def build_sections(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings as sections that override a run of this algorithm, or of the algorithm that they name."""
        from jrl.rllib import config_class

        algo = given.get("algo")
        owner = config_class(algo["name"]) if isinstance(algo, Mapping) and "name" in algo else cls
        other = owner()
        if owner is cls:
            other._given = {}  # the run already has the settings of the variant
        tree = other.update_from_dict(given)._build_tree(defaults=False)
        if owner.algo_name == cls.algo_name:
            tree.get("algo", {}).pop("name", None)
        return {name: section for name, section in tree.items() if section}

    @classmethod
    def build_policy(cls, spec: multi_agent.Spec, run: str | None = None) -> dict[str, Any]:
        """Returns the sections of a policy, in a run of RLlib's algorithm `run`.

        Without an algorithm its settings stay untranslated. Raises InputError.
        """
        given = spec.config.arguments() if isinstance(spec.config, AlgorithmConfig) else spec.config
        by_class = multi_agent.build_class_sections(spec, run or cls.variant or cls.algo_name or None)
        given = schema.merge(by_class, given)
        return cls.build_sections(given) if cls.algo_name else given

    @classmethod
    def _build_policies(cls, value: Any) -> dict[str, dict[str, Any]]:
        found = {}
        for name, spec in multi_agent.read_policies(value, "policies").items():
            try:
                found[name] = cls.build_policy(spec)
            except InputError as e:
                raise InputError(*(f"policies.{name}: {message}" for message in e.errors)) from None
        return found

    def update_from_dict(self, data: "Mapping[str, Any] | AlgorithmConfig") -> Self:
        """Sets arguments of methods by name (`lr`), sections of the tree (`algo: {...}`), or the settings of a config.

        Raises:
          InputError: unknown keys, all of them.
        """
        if isinstance(data, AlgorithmConfig):
            data = data.arguments()
        sections = {f.name for f in dataclasses.fields(RunConfig)}
        places = self.names()
        wrong: list[str] = []
        tree: dict[str, Any] = {}
        for name, value in data.items():
            # `env` is a section, or the name of an environment
            if name in sections and isinstance(value, Mapping) and not _is_search(value):
                tree[name] = self._to_plain(name, value) if name == "network" else value
            elif name in sections and value is None:  # such as the replay of algorithms without replay
                continue
            else:
                try:
                    self._set(places.get(name, "config"), {name: value})
                except InputError as e:
                    wrong += e.errors
        if wrong:
            raise InputError(*wrong)
        tree = copy.deepcopy(tree)  # the caller may change its dicts later
        name = tree["algo"].pop("name", self.algo_name) if "algo" in tree else self.algo_name
        if algos.spelled(name) != self.algo_name:
            raise InputError(
                f"algo.name: {name} in a config of {self.algo_name}: use jrl.api.config_class({str(name)!r})"
            )
        if tree:
            self._merge(tree)
        return self

    # ------------------------------------------------------------ unknown names

    def _describe_unknown(self, name: str, method: str) -> str:
        """Returns the message about an unknown argument, with the most similar name."""
        places, methods = self.names(), self.methods()
        if name in places:
            return f"{method}: {name} is an argument of {places[name]}()"
        keys = {x.key or n: n for known in reversed(methods.values()) for n, x in known.items()}
        answer = sb3_names.answer(name, replay="replay" in keys)
        meant = answer or SYNONYMS.get(name, name)
        title = f"{method}: {self.algo_name or 'AlgorithmConfig'} has no argument {name}"
        if meant.startswith("stop."):
            return f"{title}: did you mean stop({meant.removeprefix('stop.')}=...)?"
        section, _, inner = meant.partition(".")
        found = [keys[key] for key in (meant, f"algo.{meant}", section) if key in keys and "." not in name]
        if answer and " " in answer:
            return f"{title}: {answer}"
        if meant != name and not found:
            return f"{title}: {meant.rpartition('.')[2]} is an argument of other algorithms: leave it out"
        names = {*places, *(n for n in KEYS if "." not in n)}
        near = next(iter(found or difflib.get_close_matches(name, names, 1, 0.75)), None)
        if near is None:
            return f"{title}: it takes {', '.join(methods.get(method, places))}"
        where = f" of {places[near]}()" if near in places and places[near] != method else ""
        inside = f", with {inner}" if near == keys.get(section) and inner else ""
        return f"{title}: did you mean {near}{where}{inside}?"

    # ------------------------------------------------------------ reading

    def arguments(self) -> dict[str, Any]:
        """Returns the settings by name of argument, with searches, for `update_from_dict`."""
        tree, found = copy.deepcopy(self._given), {}
        for name, method in self.names().items():
            key = self.methods()[method][name].key
            if key is None or name in RULE_ARGUMENTS:
                continue
            section, _, last = key.rpartition(".")
            place = tree.get(section) if section else tree
            if isinstance(place, dict) and last in place:
                found[name] = place.pop(last)
        return found | self._rllib | {section: rest for section, rest in tree.items() if rest}

    @classmethod
    def overrides(cls, **keywords: Any) -> dict[str, Any]:
        """Returns settings as a tree, such as `evaluation_config=overrides(explore=False)`. Raises InputError."""
        return cls.build_sections(keywords) if cls.algo_name else keywords  # `evaluation` translates the names later

    def to_dict(self) -> dict[str, Any]:
        """Returns the complete tree, with defaults, for `from_dict`; without an algorithm `arguments()`."""
        return self._build_tree(defaults=True) if self.algo_name else self.arguments()

    def _build_tree(self, *, defaults: bool) -> dict[str, Any]:
        if not self.algo_name:
            raise InputError(
                "AlgorithmConfig: expected a config with an algorithm: use one such as jrl.api.PPOConfig, and copy "
                "these settings: PPOConfig().update_from_dict(shared)"
            )
        job = self._translate()
        if job.faults:
            raise InputError(*job.faults)
        tree = copy.deepcopy(
            config.merge(config.merge(self._build_defaults() if defaults else {}, self._given), job.tree)
        )
        if defaults or "algo" in tree:
            tree["algo"] = {"name": self.algo_name, **tree.get("algo", {})}
        return tree

    def _translate(self) -> Job:
        """Returns the translation of RLlib's keys. Searches are left out, for the trials."""
        raw = {name: value for name, value in self._rllib.items() if not _is_search(value)}
        own = algos.get_config_class(self.algo_name)
        job = Job(self.algo_name, self.variant or self.algo_name, own, raw, base=self._given)
        # sizes in the tree on which RLlib's keys depend
        sizes = {"num_env_runners": job.base_count("env_runners.num")}
        if learns_from(own) is Fresh:
            sizes["rollout_fragment_length"] = job.base_count("rollout.length")
        if SWITCHES.keys() & {KEYS[name].name for name in raw}:
            sizes["model.max_seq_len"] = job.base_count("network.max_seq_len")
        raw |= {name: size for name, size in sizes.items() if size}
        translate(job)
        return job

    def translations(self) -> list[str]:
        """Returns a line for each given key of RLlib: `clip_param -> algo.clip_eps: 0.3`.

        A key that is also a name of jrl has a line only if its value changes.
        """
        places, lines = self.names(), self._translate().lines if self.algo_name else []
        changes = lambda line: "nearest" in line or ": dropped: " in line
        return [line for line in lines if changes(line) or re.split(" -> |: ", line)[0] not in places]

    @classmethod
    def _build_defaults(cls) -> dict[str, Any]:
        own = algos.get_config_class(cls.algo_name)
        data = {"input": "-"} if learns_from(own) is DataSets else {}
        teacher = {"teacher": "-"} if traits(own).has_teacher else {}
        needed = {"algo": {"name": cls.algo_name, **teacher}, "env": {"id": "-"}, "data": data}
        made: dict[str, Any] = config.to_dict(config.from_dict(needed))
        del made["env"]["id"]
        for section, placeholders in {"data": data, "algo": teacher}.items():
            for name in placeholders:
                del made[section][name]
        return made

    def to_run_config(self) -> RunConfig:
        """Returns the config of a run. Raises InputError: all faults."""
        tree = self._build_tree(defaults=True)
        register_ray_environment((tree.get("env") or {}).get("id"))
        return config.from_dict(tree)

    @property
    def is_multi_agent(self) -> bool:
        """Whether the run has several agents, by `multi_agent(...)` or by the environment."""
        return bool(self["multi_agent"]) or (self["env"] is not None and envs.is_multi_agent(self.to_run_config().env))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Returns the complete tree as YAML, for `python -m jrl.train`, and write it to `path` if given."""
        tree, odd = config.plain(self._build_tree(defaults=True))
        if odd:
            raise InputError(*(message for _, message in odd))
        text = schema.dump(tree)
        if path is not None:
            with written(resolve(path, "to_yaml", "new file"), "to_yaml") as part:
                part.write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AlgorithmConfig":
        """Returns the config of a tree, with the class of its `algo.name`, or of arguments. Raises InputError."""
        from jrl.rllib import config_class

        if cls.algo_name and "algo" not in data:
            return cls().update_from_dict(data)
        name = data.get("algo", {}).get("name") if isinstance(data.get("algo"), Mapping) else None
        return config_class(name)().update_from_dict(data)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "AlgorithmConfig":
        """Returns the config of a YAML file. Raises InputError."""
        return cls.from_dict(schema.read_yaml(resolve(path, "from_yaml", "file")))

    def validate(self) -> Self:
        """Checks the settings, with the environment's options, and returns self. Raises InputError: all faults."""
        preflight.check(self.to_run_config())
        return self

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """Returns an equal config. `copy_frozen`: whether it is frozen; None: like this config."""
        other = copy.copy(self)
        other._given, other._rllib = copy.deepcopy(self._given), {**self._rllib}
        other._frozen = self._frozen if copy_frozen is None else copy_frozen
        return other

    def freeze(self) -> None:
        """Makes later changes raise AttributeError."""
        self._frozen = True

    def build(self, env: Any = None, logger_creator: Any = None, use_copy: bool = True) -> Any:
        """Returns the Algorithm of a frozen copy of this config. Raises InputError.

        Args:
          env: environment; None: the environment of the config.
          logger_creator: argument of RLlib that is refused: see `debugging(log=..., out=...)`.
          use_copy: argument of RLlib that is ignored.
        """
        from jrl.rllib import algorithm_class

        if logger_creator is not None:
            raise InputError("logger_creator: use debugging(out=...) for the directory, debugging(log=[...]) for logs")
        if not self.algo_name:
            self._build_tree(defaults=True)  # raises InputError
        return (self.algo_class or algorithm_class(self.variant or self.algo_name))(self, env)

    build_algo = build

    # ------------------------------------------------------------ access as a mapping, and by attributes

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an argument by jrl's or RLlib's name, or a section of the tree."""
        latest = KEYS[name].name if name in KEYS else name
        if found := [value for given, value in self._rllib.items() if KEYS[given].name == latest]:
            return found[0]
        tree = self._build_tree(defaults=True)
        place = self.names().get(latest)
        if place is None and name in tree:
            return tree[name]
        if place is None and (name not in KEYS or not KEYS[name].ours):
            raise KeyError(self._describe_unknown(name, "config"))
        key = self.methods()[place][latest].key if place else KEYS[name].ours.partition(", ")[0]
        return None if key is None else get_value(tree, key)  # None: other keys follow from the argument

    def __setitem__(self, name: str, value: Any) -> None:
        self.update_from_dict({name: value})

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an argument: `config.lr = 1e-3` equals `training(lr=1e-3)`."""
        if name.startswith("_") or name == "algo_class":
            object.__setattr__(self, name, value)
        else:
            self.update_from_dict({name: value})

    def keys(self) -> list[str]:
        """Returns the names for `config[name]`."""
        return list(self.names())

    def items(self) -> list[tuple[str, Any]]:
        """Returns (name, value) of each."""
        return [(name, self[name]) for name in self.names()]

    def values(self) -> list[Any]:
        """Returns the values of `keys()`, in that order."""
        return [value for _, value in self.items()]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns `config[name]`; `default` for an unknown name."""
        try:
            return self[name]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in hints.HINTS["config"]:
            raise hints.build_error(self, name, "config")
        try:
            return self[name]
        except KeyError as e:
            raise AttributeError(str(e)) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AlgorithmConfig) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.arguments()})"


for _name in (*arguments.METHODS, *arguments.ONLY_RLLIB):
    setattr(AlgorithmConfig, _name, arguments.build_method(_name, None, AlgorithmConfig._set))


def build_class(name: str) -> type[AlgorithmConfig]:
    """Returns the config class of an algorithm, with its arguments in the signatures of the methods."""
    title, known = algos.title(name), arguments.build_arguments(name)
    doc = f"Settings of {title}, by group: {', '.join(known)}. `help({title}Config.training)` shows them."
    made = {method: arguments.build_method(method, given, AlgorithmConfig._set) for method, given in known.items()}
    members = {"__doc__": doc, "__module__": "jrl.api", "algo_name": name, **made}
    return type(f"{title}Config", (AlgorithmConfig,), members)


def register_ray_environment(name: Any) -> None:
    """Registers an environment that only Ray Tune knows, by `ray.tune.register_env(name, creator)`."""
    if not isinstance(name, str) or registry.registered(name) is not None or "ray.tune.registry" not in sys.modules:
        return
    from ray.tune.registry import ENV_CREATOR, _global_registry

    if _global_registry.contains(ENV_CREATOR, name):
        registry.register(name, _global_registry.get(ENV_CREATOR, name))


def _is_search(value: Any) -> bool:
    """Returns whether a value is a search of Ray Tune: a grid, or a distribution."""
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"}
    return type(value).__module__.startswith("ray.tune.search")


def _to_dict(value: Any) -> Any:
    """Returns the dict of a dataclass, such as RLlib's DefaultModelConfig; other values unchanged."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
