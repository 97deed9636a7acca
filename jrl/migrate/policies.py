"""RLlib's policies of several agents in any of their spellings, and what each becomes in jrl."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.errors import InputError, short
from jrl.fields import schema
from jrl.migrate.job import WITH_MEMORY
from jrl.migrate.tables import ALGORITHMS, PARTS

DEFAULT = "default_policy"  # the id of the policy that RLlib has where none is named
_PARTS = ("policy_class", "observation_space", "action_space", "config")  # of a PolicySpec, in a tuple's order
_CLASS = re.compile(r"(?:Default)?(\w+?)(?:Torch|TF[12]?)?(?:Policy|RLModule)(?:_eager\w*)?")
_BORROWED = {("bc", "marwil"), ("td3", "ddpg")}  # in RLlib the first has the policy class of the second, and no other


class PolicySpec(NamedTuple):
    """A policy of several, as RLlib's class of this name says it: `policies={"a": PolicySpec(config={"lr": 1e-4})}`."""

    policy_class: Any = None  # names an algorithm, as DQNTorchPolicy does; None: the run's
    observation_space: Any = None  # not read: spaces come from the environment
    action_space: Any = None  # not read
    config: Any = None  # what the policy has of its own; None: nothing


class Spec(NamedTuple):
    """Contents of a PolicySpec, beside spaces, which come from the environment."""

    own_class: Any  # a class of no known algorithm; None: there is none
    config: Any  # a mapping of what the policy has of its own, or a config object
    source: str | None = None  # RLlib's name, lower case, of the algorithm that the class is of; None: the run's


def read(value: Any, key: str) -> dict[str, Spec]:
    """Reads `policies`: a set or list of ids, or id -> None, a config, a PolicySpec, or a tuple of its four parts.

    Raises:
      InputError: it is something else; names the key.

    >>> read({"a": (None, None, None, {"lr": 0.1}), "b": None}, "policies")
    {'a': Spec(own_class=None, config={'lr': 0.1}, source=None), 'b': Spec(own_class=None, config={}, source=None)}
    """
    if isinstance(value, set | frozenset | list | tuple) and all(isinstance(name, str) for name in value):
        names = sorted(value) if isinstance(value, set | frozenset) else value
        return {name: Spec(None, {}) for name in names}
    if not isinstance(value, Mapping):
        raise InputError(f"{key}: expected a list of names, or a mapping of names to configs, got {short(value)}")
    if odd := [name for name in value if not isinstance(name, str)]:
        raise InputError(f"{key}: expected text for the names of policies, got {short(odd[0])}: quote it")
    return {name: _spec(given, f"{key}.{name}") for name, given in value.items()}


def _spec(given: Any, key: str) -> Spec:
    if given is None:
        return Spec(None, {})
    if isinstance(given, list | tuple):
        if len(given) != len(_PARTS):
            raise InputError(f"{key}: expected ({', '.join(_PARTS)}), got {len(given)} of them: write a mapping")
        given = dict(zip(_PARTS, given, strict=True))
    elif hasattr(given, "policy_class"):
        given = {part: getattr(given, part, None) for part in _PARTS}
    elif not isinstance(given, Mapping) and not hasattr(given, "update_from_dict"):
        raise InputError(f"{key}: expected null, a mapping or a PolicySpec, got {short(given)}")
    if not isinstance(given, Mapping) or not given or set(given) - set(_PARTS):
        return Spec(None, given)
    cls, config = given.get("policy_class"), given.get("config") or {}
    source = None if cls is None else _source(cls)
    return Spec(cls if source is None else None, config, source)


def _source(cls: Any) -> str | None:
    """Returns RLlib's name of the algorithm of one of its classes, given as itself, its path or its bare name.

    >>> _source("ray.rllib.algorithms.dqn.dqn_torch_policy.DQNTorchPolicy"), _source("ImpalaTF2Policy")
    ('dqn', 'impala')
    >>> _source("my.PPOTorchPolicy"), _source("<class 'ray.rllib.examples.policy.random_policy.RandomPolicy'>")
    (None, None)
    """
    path = _path(cls)
    module, _, last = path.replace(":", ".").rpartition(".")
    found = _CLASS.fullmatch(last)
    if found is None or (module and not module.startswith("ray.rllib.")):
        return None
    name = found[1].lower()
    return name if name in ALGORITHMS else None


def _path(cls: Any) -> str:
    """Returns the path of a class, of which RLlib's files have `str(cls)`."""
    return str(cls).strip("<> ").removeprefix("class ").strip("'\" ")


def no_class(cls: Any) -> str:
    """Returns the message that a policy's class cannot be had, and what to give instead."""
    return (
        f"a policy's class cannot be given, got {short(_path(cls))}: {{algo: {{name: ...}}}} of the policy names "
        "another algorithm, policies_to_train those that learn"
    )


def of_class(spec: Spec, run: str | None) -> dict[str, Any]:
    """Returns the sections that a policy has by its class, in a run of RLlib's algorithm `run`; None: not known yet.

    >>> of_class(Spec(None, {}, "cql"), "ppo"), of_class(Spec(None, {}, "a3c"), "a2c")
    ({'algo': {'name': 'sac', 'conservative': True}}, {})
    """
    source = spec.source
    if source is None or source == run or (run, source) in _BORROWED:
        return {}
    name = ALGORITHMS[source][0]
    keys = {} if run is not None and ALGORITHMS.get(run, (run, ""))[0] == name else {"algo.name": name}
    if core := WITH_MEMORY.get(source):
        keys["network.core.name"] = core
    tree: dict[str, Any] = {}
    for key, value in {**keys, **PARTS.get(source, {})}.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = schema.merge(tree, value)
    return tree


def modules(value: Any) -> dict[str, Spec] | None:
    """Returns the networks' configs by policy of a MultiRLModuleSpec, {} for one without any; None of anything else.

    A class of RLlib's is a network and says nothing of the algorithm: IMPALA has that of PPO.
    """
    part = lambda x, name: x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)
    specs = part(value, "rl_module_specs") or part(value, "module_specs")
    if not isinstance(specs, Mapping):
        return None
    found = {}
    for name, spec in specs.items():
        cls, config = part(spec, "module_class"), part(spec, "model_config") or part(spec, "model_config_dict") or {}
        found[name] = Spec(None if cls is None or _source(cls) else cls, config)
    return found


__all__ = ["DEFAULT", "PolicySpec", "Spec", "modules", "no_class", "of_class", "read"]
