"""`PPOConfig().environment("CartPole-v1").training(lr=3e-4).build()`: the config tree, written as calls.

An AlgorithmConfig holds the keys that were set, as the tree that YAML holds; nothing is kept twice. Beside it stand
names of RLlib's, which `jrl.migrate` translates when the tree is asked for: many follow from other keys.
"""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from jrl import algos, envs, registry
from jrl.api import groups, translation
from jrl.errors import InputError
from jrl.fields import schema
from jrl.fields.data import Fixed, learns_from
from jrl.fields.paths import resolve, written
from jrl.host import elsewhere
from jrl.migrate import exploration_names
from jrl.migrate.job import Job
from jrl.run import preflight
from jrl.settings import config, sb3_names
from jrl.settings.config import RunConfig
from jrl.settings.sections import SYNONYMS

if TYPE_CHECKING:
    from jrl.api.algorithm import Algorithm


class AlgorithmConfig:
    """The settings of a run. `jrl.api.PPOConfig` and its like are made of it, one per algorithm.

    One of no algorithm, `AlgorithmConfig()`, holds settings that several share: `PPOConfig().update_from_dict(shared)`.

    Args:
      algo_class: the Algorithm that `build` makes; None: the algorithm's own.
    """

    algo_name: ClassVar[str] = ""
    variant: ClassVar[str] = ""  # name of an algorithm that is another one with settings of its own, such as cql
    _settings: ClassVar[Mapping[str, Any]] = {}  # these settings, as a tree
    _arguments: ClassVar[Any] = groups.Shared()

    def __new__(cls, algo_class: "type[Algorithm] | None" = None) -> Self:
        if algo_class is not None and not cls.algo_name and algo_class.algo_name:
            from jrl import api

            cls = cast(type[Self], api.config_class(algo_class.variant or algo_class.algo_name))
        return super().__new__(cls)

    def __init__(self, algo_class: "type[Algorithm] | None" = None):
        # the tree of the keys that were set by our names
        self._given: dict[str, Any] = copy.deepcopy(dict(self._settings))
        self._theirs: dict[str, Any] = {}  # what was set in RLlib's, as `jrl.migrate.KEYS` has the names
        self._said: dict[str, str] = {}  # of older names of arguments, what became of them
        self._frozen = False
        self.algo_class = algo_class

    # ------------------------------------------------------------ setting

    def stop(self, **criteria: float) -> Self:
        """Sets when a run ends by itself: env_steps=1_000_000, or metrics of the result rows such as
        `**{"episode/return": 475}`. `Algorithm.train` may be called without any.
        """
        self._merge({"stop": criteria})
        return self

    def _set(self, group: str, keywords: Mapping[str, Any]) -> None:
        self._check_not_frozen()
        wrong: list[str] = []
        for name, value in keywords.items():
            known = self._arguments.get(group, {})
            if name in known and known[name].key is not None and name not in translation.BY_RULE:
                self._put(known[name].key, value)
            elif name in translation.KEYS:
                wrong += self._put_theirs(group, name, value)
            else:
                wrong.append(self._unknown(name, group))
        if wrong:
            raise InputError(*wrong)

    def _put_theirs(self, group: str, name: str, value: Any) -> list[str]:
        """Takes a name of RLlib's, and returns what is wrong with it."""
        latest = translation.newest(name)
        places = self.names()
        argument = self._arguments[places[latest]][latest] if latest in places else None
        if latest not in translation.BY_RULE and argument and not translation.same_key(name, argument.key):
            # it says here what the argument says, not all that it said there
            self._said |= {} if name == latest else {name: f"{name} -> {latest}: {value}"}
            self._put(argument.key, value)
            return []
        wrong: list[str] = []
        for key, given in translation.spelled(name, value).items():
            if key in translation.KEYS:
                others = {k: v for k, v in self._theirs.items() if not translation.synonymous(k, key)}
                self._theirs = others | {key: given}
            else:
                wrong.append(self._unknown(key, group))
        if self.algo_name and not wrong and (lacking := self._job()[0].lacking):
            wrong += [f"{group}: {line}" for line in lacking]
            self._theirs = {k: v for k, v in self._theirs.items() if not any(x.startswith(f"{k}:") for x in lacking)}
        return wrong

    def _unknown(self, name: str, group: str) -> str:
        places = self.names()
        if name in places:
            return f"{group}: {name} is an argument of {places[name]}()"
        keys = {a.key or n: n for known in reversed(self._arguments.values()) for n, a in known.items()}
        said = sb3_names.answer(name, replay="replay" in keys)
        meant = said or SYNONYMS.get(name, name)
        who = f"{group}: {self.algo_name or 'AlgorithmConfig'} has no argument {name}"
        if meant.startswith("stop."):
            return f"{who}: did you mean stop({meant.removeprefix('stop.')}=...)?"
        found = [
            keys[key] for key in (meant, f"algo.{meant}", meant.partition(".")[0]) if key in keys and "." not in name
        ]
        if said and " " in said:
            return f"{who}: {translation.with_arguments(said, keys, places)}"
        if meant != name and not found:
            return f"{who}: {meant.rpartition('.')[2]} is an argument of other algorithms: leave it out"
        near = found[0] if found else translation.near(name, places)
        where = f" of {places[near]}()" if near in places and places[near] != group else ""
        section, _, inner = meant.partition(".")
        inside = f", with {inner}" if near and near == keys.get(section) and inner else ""
        mend = (
            f": did you mean {near}{where}{inside}?"
            if near
            else f": it takes {', '.join(self._arguments.get(group, places))}"
        )
        return f"{who}{mend}"

    def _put(self, key: str, value: Any) -> None:
        if key == "network" and dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)  # RLlib's DefaultModelConfig
        if key in ("network", "replay") and isinstance(value, Mapping) and not translation.is_search(value):
            value, theirs = translation.split(key, value)
            for name, given in theirs.items():
                if wrong := self._put_theirs("training", name, given):
                    raise InputError(*wrong)
            if theirs and not value:
                return
        plain = self._plain(key, value)
        if key.startswith("multi_agent."):  # another table takes the place of the one before
            (self._given.get("multi_agent") or {}).pop(key.partition(".")[2], None)
        self._merge(translation.nested(key, plain))

    def _plain(self, key: str, value: Any) -> Any:
        """Returns `value` as the tree holds it: objects by their names."""
        if translation.is_search(value) and not isinstance(value, Mapping):
            return value
        if translation.is_search(value):
            return {"grid_search": [self._plain(key, v) for v in value["grid_search"]]}
        if key == "env.id":
            translation.install_environment(value)
        if key == "multi_agent.policies":
            return translation.policies(value, type(self))
        if key in translation.FUNCTIONS and callable(value):
            return registry.reference(value)
        if key in translation.OBJECTS:
            return None if value is None else registry.reference(value)
        if key in translation.LISTS_OF_OBJECTS:
            several = value if isinstance(value, list | tuple) else [] if value is None else [value]
            return [registry.reference(v) for v in several]
        if key == "algo.exploration" and isinstance(value, Mapping) and "type" in value:
            given = {**value, "type": registry.reference(value["type"])}
            return exploration_names.from_rllib(given)
        if key == "network" and isinstance(value, Mapping):
            return {name: self._plain(f"network.{name}", given) for name, given in value.items()}
        if key == "evaluation.config" and isinstance(value, Mapping):
            return self._overriding(value)
        try:
            return copy.deepcopy(value)
        except Exception:
            return _copied(translation.nested(key, value))  # raises, with the name of the key

    def _merge(self, tree: Mapping[str, Any]) -> None:
        self._check_not_frozen()
        for name in translation.forgotten(self._theirs, schema.flatten(tree)):
            del self._theirs[name]
        self._given = config.merge(self._given, tree)

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise AttributeError("this config is frozen: change a copy of it: config.copy(copy_frozen=False)")

    def update_from_dict(self, data: "Mapping[str, Any] | AlgorithmConfig") -> Self:
        """Sets keys by the names that methods take (`lr`, `num_env_runners`, `evaluation_interval`), or sections of the
        tree (`algo: {...}`, `rollout: {...}`); or takes over what another config was given.

        Raises:
          InputError: all unknown keys.
        """
        if isinstance(data, AlgorithmConfig):
            data = data.arguments()
        sections = {f.name for f in dataclasses.fields(RunConfig)}
        places = self.names()
        wrong: list[str] = []
        tree: dict[str, Any] = {}
        for name, value in data.items():
            # `env` is both: a section, or the name of an environment
            if name in sections and isinstance(value, Mapping) and not translation.is_search(value):
                tree[name] = self._plain(name, value) if name == "network" else value
            elif name in sections and value is None:  # such as the replay of algorithms without one
                continue
            else:
                try:
                    self._set(places.get(name, "config"), {name: value})
                except InputError as e:
                    wrong += e.errors
        if wrong:
            raise InputError(*wrong)
        if tree:
            self._set_tree(tree)
        return self

    def _set_tree(self, tree: Mapping[str, Any]) -> None:
        algo = dict(tree.get("algo", {}))
        name = algo.pop("name", self.algo_name)
        if algos.spelled(name) != self.algo_name:
            raise InputError(
                f"algo.name: {name} in a config of {self.algo_name}: use jrl.api.config_class({str(name)!r})"
            )
        # copied at once: the caller's dicts are not ours
        self._merge(_copied({**tree, "algo": algo} if "algo" in tree else dict(tree)))

    def arguments(self) -> dict[str, Any]:
        """Returns what was set, by the names that methods take, searches included: Tune's tables, its schedulers and
        the names of trials show them. `update_from_dict` takes it back; what has no argument stays in its section.
        """
        tree, found = copy.deepcopy(self._given), {}
        for name, group in self.names().items():
            key = self._arguments[group][name].key
            if name in translation.BY_RULE:
                continue
            *sections, last = key.split(".") if key else [""]
            place: Any = tree
            for section in sections:
                place = place.get(section) if isinstance(place, dict) else None
            if key and isinstance(place, dict) and last in place:
                found[name] = place.pop(last)
        return found | self._theirs | {section: rest for section, rest in tree.items() if rest}

    @classmethod
    def names(cls) -> dict[str, str]:
        """Returns the arguments of all methods, and the method of each."""
        return {name: group for group, known in reversed(cls._arguments.items()) for name in known}

    @classmethod
    def overrides(cls, **keywords: Any) -> dict[str, Any]:
        """Returns settings as a tree, for `evaluation(evaluation_config=overrides(explore=False, env_config={...}))`.

        Raises:
          InputError: unknown names.
        """
        if not cls.algo_name:  # whatever the algorithm: `evaluation` reads the names
            return dict(keywords)
        return dict(cls().update_from_dict(keywords)._resolved(defaults=False))

    def _overriding(self, value: Mapping[str, Any]) -> dict[str, Any]:
        if not self.algo_name:
            return dict(value)
        other = type(self)()
        other._given = {}  # the class has the settings of the variant
        tree = other.update_from_dict(value)._resolved(defaults=False)
        tree.get("algo", {}).pop("name", None)
        return {name: section for name, section in tree.items() if section}

    # ------------------------------------------------------------ reading

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole tree, defaults included; `from_dict` makes an equal config of it. Of a config without an
        algorithm what was set, for `update_from_dict`.
        """
        return self._resolved(defaults=True) if self.algo_name else self.arguments()

    def _resolved(self, *, defaults: bool) -> dict[str, Any]:
        if not self.algo_name:
            raise InputError(
                "AlgorithmConfig: it has no algorithm: choose an algorithm's, such as jrl.api.PPOConfig, and take this "
                "over: PPOConfig().update_from_dict(shared)"
            )
        job, _ = self._job()
        if job.faults:
            raise InputError(*job.faults)
        tree = copy.deepcopy(config.merge(config.merge(self._defaults() if defaults else {}, self._given), job.tree))
        if defaults or "algo" in tree:
            tree["algo"] = {"name": self.algo_name, **tree.get("algo", {})}
        return tree

    def _job(self) -> tuple[Job, dict[str, list[str]]]:
        """Translates RLlib's names, with a line or several for each; searches are worked out in each trial."""
        theirs = {name: value for name, value in self._theirs.items() if not translation.is_search(value)}
        own = algos.get_config_class(self.algo_name)
        return translation.job(self.algo_name, self.variant or self.algo_name, own, theirs, self._given)

    @property
    def is_multi_agent(self) -> bool:
        """Returns whether there are several agents: by `multi_agent(...)`, or because the environment has them."""
        return bool(self["multi_agent"]) or (self["env"] is not None and envs.is_multi_agent(self.to_run_config().env))

    def translations(self) -> list[str]:
        """Returns a line for each of RLlib's names that was given, with what became of it: `clip_param ->
        algo.clip_eps: 0.3`. Names that are jrl's, too, have one where not all of it could be had.
        """
        places = self.names()
        lines = [*self._said.values()]
        for name, said in self._job()[1].items() if self.algo_name else ():
            lines += [x for x in said if name not in places or "nearest" in x or ": dropped: " in x]
        return lines

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        data = {"input": "-"} if learns_from(algos.get_config_class(cls.algo_name)) is Fixed else {}
        needed = {"algo": {"name": cls.algo_name}, "env": {"id": "-"}, "data": data}
        made: dict[str, Any] = config.to_dict(config.from_dict(needed))
        del made["env"]["id"]
        if data:  # a default that is none
            del made["data"]["input"]
        return made

    def to_run_config(self) -> RunConfig:
        """Returns the config of a run.

        Raises:
          InputError: all that is wrong.
        """
        tree = self._resolved(defaults=True)
        translation.install_environment((tree.get("env") or {}).get("id"))
        return config.from_dict(tree)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Returns the whole tree as YAML, for `python -m jrl.train`; writes it to `path`, if given."""
        tree, odd = config.plain(self._resolved(defaults=True))
        if odd:
            raise InputError(*(message for _, message in odd))
        text = schema.dump(tree)
        if path is not None:
            with written(resolve(path, "to_yaml", "new file"), "to_yaml") as part:
                part.write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AlgorithmConfig":
        """Makes the config of a tree, whose `algo.name` picks the class; of arguments this class. Raises InputError."""
        from jrl import api

        if cls.algo_name and "algo" not in data:
            return cls().update_from_dict(data)
        name = data.get("algo", {}).get("name") if isinstance(data.get("algo"), Mapping) else None
        return api.config_class(name)().update_from_dict(data)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "AlgorithmConfig":
        """Reads the config of a YAML file. Raises InputError."""
        return cls.from_dict(schema.read_yaml(resolve(path, "from_yaml", "file")))

    def validate(self) -> Self:
        """Raises InputError with all that is wrong, the environment's options included."""
        preflight.check(self.to_run_config())
        return self

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """Returns an equal config; frozen or not as this one, or as told."""
        other = copy.copy(self)
        other._given, other._theirs, other._said = copy.deepcopy(self._given), dict(self._theirs), dict(self._said)
        other._frozen = self._frozen if copy_frozen is None else copy_frozen
        return other

    def freeze(self) -> None:
        """Freezes the config: setting raises AttributeError from now on."""
        self._frozen = True

    def build(self, env: Any = None, logger_creator: Any = None, use_copy: bool = True) -> "Algorithm":
        """Builds the Algorithm, in `env` if given; this config is copied and frozen. Raises InputError.

        Args:
          env: over that of the config.
          logger_creator: RLlib's, which is not taken: see `debugging(log=..., out=...)`.
          use_copy: RLlib's: a copy it is.
        """
        from jrl import api

        if logger_creator is not None:
            raise InputError("logger_creator: leave it out: debugging(out=...) names the directory, log=[...] loggers")
        if not self.algo_name:
            self._resolved(defaults=True)  # says which config to choose
        return (self.algo_class or api.algorithm_class(self.variant or self.algo_name))(self, env)

    build_algo = build

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an argument by the name that methods take, or by RLlib's; or a section of the tree."""
        latest = translation.newest(name) or name
        for given, value in self._theirs.items():
            if translation.newest(given) == latest:
                return value
        tree = self._resolved(defaults=True)
        place = self.names().get(latest)
        if place is None and name in tree:
            return tree[name]
        if place is None and (name not in translation.KEYS or not translation.KEYS[name].ours):
            raise KeyError(self._unknown(name, "config"))
        key = self._arguments[place][latest].key if place else translation.KEYS[name].ours.partition(", ")[0]
        if key is None:  # others follow from it, not it from others
            return None
        found: Any = tree
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        self.update_from_dict({name: value})

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an argument: `config.lr = 1e-3` does what `training(lr=1e-3)` does."""
        if name.startswith("_") or name == "algo_class":
            object.__setattr__(self, name, value)
        else:
            self.update_from_dict({name: value})

    def keys(self) -> list[str]:
        """Returns the names that `config[name]` takes."""
        return list(self.names())

    def values(self) -> list[Any]:
        """Returns the values of `keys()`, in that order."""
        return [self[name] for name in self.names()]

    def items(self) -> list[tuple[str, Any]]:
        """Returns (key, value) of each."""
        return [(name, self[name]) for name in self.names()]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns `config[name]`; `default` where there is no such name."""
        try:
            return self[name]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in elsewhere.NAMES["config"]:
            raise elsewhere.missing(self, name, "config")
        try:
            return self[name]
        except KeyError as e:
            raise AttributeError(str(e)) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AlgorithmConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.arguments()})"


for _group in (*groups.GROUPS, *groups.THEIRS):
    setattr(AlgorithmConfig, _group, groups.method(_group, None, AlgorithmConfig._set))


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a deep copy. Raises InputError: a value has none, such as a generator or a lock."""
    try:
        return copy.deepcopy(dict(tree))
    except Exception as e:
        if odd := config.plain(tree)[1]:
            raise InputError(*(message for _, message in odd)) from e
        raise
