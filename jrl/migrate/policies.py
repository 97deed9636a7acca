"""RLlib's policies of several agents in any of their spellings, and what of each can be had."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.errors import InputError
from jrl.fields.bounds import short

DEFAULT = "default_policy"  # the id of the policy that RLlib has where none is named
_PARTS = ("policy_class", "observation_space", "action_space", "config")  # of a PolicySpec, in a tuple's order
NO_CLASS = (
    "a policy's class cannot be given: {algo: {name: ...}} of the policy names another algorithm, policies_to_train "
    "those that learn"
)


class Spec(NamedTuple):
    """What a PolicySpec asks for, beside spaces, which come from the environment."""

    own_class: Any  # a class that is not one of RLlib's algorithms; None: the run's algorithm
    config: Any  # a mapping of what the policy has of its own, or a config object


def read(value: Any, key: str) -> dict[str, Spec]:
    """Reads `policies`: a set or list of ids, or id -> None, a config, a PolicySpec, or a tuple of its four parts.

    Raises:
      InputError: it is something else; names the key.

    >>> read({"a": (None, None, None, {"lr": 0.1}), "b": None}, "policies")
    {'a': Spec(own_class=None, config={'lr': 0.1}), 'b': Spec(own_class=None, config={})}
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
    cls = given.get("policy_class")
    return Spec(None if cls is None or "ray.rllib.algorithms." in str(cls) else cls, given.get("config") or {})


def modules(value: Any) -> Mapping[str, Any] | None:
    """The networks' configs by policy of a MultiRLModuleSpec, {} for one that names none; None of anything else, or
    where a module has a class of its own.
    """
    part = lambda x, name: x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)
    specs = part(value, "rl_module_specs") or part(value, "module_specs")
    if not isinstance(specs, Mapping):
        return None
    classes = [part(spec, "module_class") for spec in specs.values()]
    if any(cls is not None and "ray.rllib.algorithms." not in str(cls) for cls in classes):
        return None
    return {name: part(spec, "model_config") or part(spec, "model_config_dict") or {} for name, spec in specs.items()}


__all__ = ["DEFAULT", "NO_CLASS", "Spec", "modules", "read"]
