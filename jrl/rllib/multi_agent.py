"""Policies in all forms that RLlib accepts, and the rules of multi-agent keys."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl import registry
from jrl.errors import InputError, short
from jrl.fields import schema
from jrl.rllib.table import ALGORITHMS, KEYS
from jrl.rllib.translation import CORES, DEFAULT_POLICY, Job, is_request, nest_key, rule

_PARTS = ("policy_class", "observation_space", "action_space", "config")  # fields of a PolicySpec, in a tuple's order
_CLASS = re.compile(r"(?:Default)?(\w+?)(?:Torch|TF[12]?)?(?:Policy|RLModule)(?:_eager\w*)?")
_SHARED_CLASSES = {("bc", "marwil"), ("td3", "ddpg")}  # algorithm -> algorithm with the same policy class in RLlib
_OWN = ("algo", "network", "replay")  # sections that a policy can override
_ONE = "there is one policy"


class PolicySpec(NamedTuple):
    """A policy of several, by RLlib's class name: `policies={"a": PolicySpec(config={"lr": 1e-4})}`."""

    policy_class: Any = None  # class that names an algorithm, such as DQNTorchPolicy; None: the run's algorithm
    observation_space: Any = None  # ignored: the environment has the spaces
    action_space: Any = None  # ignored
    config: Any = None  # settings of the policy that override the run's; None: none


class Spec(NamedTuple):
    """Content of a PolicySpec."""

    own_class: Any  # class without a known algorithm; None: none
    config: Any  # mapping of settings, or a config object
    source: str | None = None  # RLlib's name of the class's algorithm, lower case; None: the run's algorithm


def read_policies(value: Any, key: str) -> dict[str, Spec]:
    """Returns the policies of a set or list of ids, or of id -> None, a config, a PolicySpec, or a tuple of its parts.

    Args:
      value: policies in RLlib's form.
      key: name of the key, for messages.
    Raises:
      InputError: another value.

    >>> read_policies({"a": (None, None, None, {"lr": 0.1}), "b": None}, "policies")
    {'a': Spec(own_class=None, config={'lr': 0.1}, source=None), 'b': Spec(own_class=None, config={}, source=None)}
    """
    if isinstance(value, set | frozenset | list | tuple) and all(isinstance(name, str) for name in value):
        names = sorted(value) if isinstance(value, set | frozenset) else value
        return {name: Spec(None, {}) for name in names}
    if not isinstance(value, Mapping):
        raise InputError(f"{key}: expected a list of names, or a mapping of names to configs, got {short(value)}")
    if odd := [name for name in value if not isinstance(name, str)]:
        raise InputError(f"{key}: expected text for the names of policies, got {short(odd[0])}: quote it")
    return {name: _read_spec(given, f"{key}.{name}") for name, given in value.items()}


def _read_spec(given: Any, key: str) -> Spec:
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
    source = None if cls is None else _find_source(cls)
    return Spec(cls if source is None else None, config, source)


def _find_source(cls: Any) -> str | None:
    """Returns RLlib's name of the algorithm of a class, given as a class, path or name.

    >>> _find_source("ray.rllib.algorithms.dqn.dqn_torch_policy.DQNTorchPolicy"), _find_source("ImpalaTF2Policy")
    ('dqn', 'impala')
    >>> _find_source("my.PPOPolicy"), _find_source("<class 'ray.rllib.examples.policy.random_policy.RandomPolicy'>")
    (None, None)
    """
    module, _, last = _class_path(cls).replace(":", ".").rpartition(".")
    found = _CLASS.fullmatch(last)
    if found is None or (module and not module.startswith("ray.rllib.")):
        return None
    name = found[1].lower()
    return name if name in ALGORITHMS else None


def _class_path(cls: Any) -> str:
    """Returns the path of a class, also from its `str(cls)`, which RLlib's files have."""
    return str(cls).strip("<> ").removeprefix("class ").strip("'\" ")


def build_class_sections(spec: Spec, run: str | None) -> dict[str, Any]:
    """Returns the sections that follow from a policy's class, in a run of RLlib's algorithm `run`; None: unknown.

    Raises:
      InputError: the class names no algorithm.

    >>> build_class_sections(Spec(None, {}, "cql"), "ppo"), build_class_sections(Spec(None, {}, "a3c"), "a2c")
    ({'algo': {'name': 'sac', 'conservative': True}}, {})
    """
    if spec.own_class is not None:
        raise InputError(
            f"expected a policy class of RLlib's algorithms, got {short(_class_path(spec.own_class))}: set the "
            "policy's algorithm by {algo: {name: ...}}, and the policies that learn by policies_to_train"
        )
    source = spec.source
    if source is None or source == run or (run, source) in _SHARED_CLASSES:
        return {}
    algorithm = ALGORITHMS[source]
    name = run if run is None or run not in ALGORITHMS else ALGORITHMS[run].name
    keys = {} if run is not None and name == algorithm.name else {"algo.name": algorithm.name}
    if core := CORES.get(source):
        keys["network.core.name"] = core
    tree: dict[str, Any] = {}
    for key, value in {**keys, **algorithm.parts}.items():
        tree = schema.merge(tree, nest_key(key, value))
    return tree


def _add_policies(job: Job, key: str, specs: Mapping[str, Spec]) -> None:
    """Adds policies, or settings of policies, to the translation; refuse wrong ones."""
    own: dict[str, Any] = {}
    for name, spec in specs.items():
        tree = job.build_nested(f"{key}.{name}", job.builder.build_policy, spec, job.source)
        if others := tree.keys() - set(_OWN):
            reason = f"settings of the run; a policy can only override {', '.join(_OWN)}"
            job.drop(f"{key}.{name}", f"{', '.join(sorted(others))}: {reason}")
        own[name] = {section: values for section, values in tree.items() if section in _OWN}
    job.put(key, "multi_agent.policies", schema.merge(job.tree.get("multi_agent", {}).get("policies", {}), own))


@rule("policies")
def _policies(job: Job, key: str, value: Any) -> None:
    specs = read_policies(value, key)
    is_default = lambda spec: not (spec.config or spec.own_class or build_class_sections(spec, job.source))
    if set(specs) <= {DEFAULT_POLICY} and all(map(is_default, specs.values())):
        return job.drop(key, _ONE)
    return _add_policies(job, key, specs)


@rule("algorithm_config_overrides_per_module")
def _overrides(job: Job, key: str, value: Any) -> None:
    if set(value) == {DEFAULT_POLICY} and "policies" not in job.given:
        return job.refuse(key, f"{_ONE}: set its keys for the run")
    return _add_policies(job, key, read_policies(value, key))


@rule("rl_module_spec")
def _modules(job: Job, key: str, value: Any) -> None:
    """Translates the networks of a MultiRLModuleSpec; a class of modules names no algorithm (IMPALA has PPO's)."""
    part = lambda x, name: x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)
    specs, lacking = part(value, "rl_module_specs") or part(value, "module_specs"), KEYS["model.custom_model"].note
    if not isinstance(specs, Mapping):
        return job.refuse(key, lacking) if is_request(value) else job.drop(key, "a class of RLlib")
    classes = [part(spec, "module_class") for spec in specs.values()]
    if any(cls is not None and _find_source(cls) is None for cls in classes):
        return job.refuse(key, lacking)
    if set(specs) <= {DEFAULT_POLICY}:
        return job.drop(key, f"{_ONE}: it has the network of the run")
    models = {n: part(spec, "model_config") or part(spec, "model_config_dict") or {} for n, spec in specs.items()}
    given = {name: {"model": dict(model)} if isinstance(model, Mapping) else {} for name, model in models.items()}
    return _add_policies(job, key, {name: Spec(None, config) for name, config in given.items()})


@rule("policy_mapping_fn")
def _mapping(job: Job, key: str, value: Any) -> None:
    if isinstance(value, Mapping) or value in ("shared", "by_agent"):
        return job.put(key, "multi_agent.mapping", value)
    fix = "write multi_agent.mapping, a table {agent: policy}"
    return _put_function(job, key, value, fix, "called once for each agent, or for each game if it depends on the game")


@rule("policies_to_train")
def _trained(job: Job, key: str, value: Any) -> None:
    if isinstance(value, list | tuple | set | frozenset):
        return job.put(key, "multi_agent.policies_to_train", sorted(map(str, value)))
    return _put_function(job, key, value, "list the names of the policies", "called once for each policy")


def _put_function(job: Job, key: str, value: Any, fix: str, note: str) -> None:
    path = registry.importable_name(value)
    if path is None:
        return job.refuse(key, f"{str(value)[:60]!r} is not the path of a function, package.module:name: {fix}")
    return job.put(key, KEYS[key].ours, path, note)
