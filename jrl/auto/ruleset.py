"""The choice of a config from the facts of an environment, by the rules of rules.yaml."""

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.fields import schema

_COMPARED = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


class Choice(NamedTuple):
    data: dict[str, Any]  # sections of a config, without env.id and stop
    reasons: list[str]  # a line for each rule that applied
    origins: dict[str, str]  # dotted key -> reason of its value


@functools.cache
def rules() -> tuple[Mapping[str, Any], ...]:
    """Returns the rules, in order: mappings with `when`, `set` and `why`."""
    return tuple(schema.read_yaml(Path(__file__).with_name("rules.yaml"))["rules"])


def choose(facts: Mapping[str, Any]) -> Choice:
    """Returns the config of an environment with these facts.

    Rules apply in their order; later values replace earlier ones. A condition compares a fact, or a key that an earlier
    rule has set, with a value, a list of values, or a text such as "< 100". A key that is not set meets no condition.

    Args:
      facts: result of `facts.inspect`, and `minutes`, the budget of the run.
    """
    data: dict[str, Any] = {}
    reasons: list[str] = []
    origins: dict[str, str] = {}
    for rule in rules():
        known = {**facts, **schema.flatten(data)}
        if all(_holds(known.get(name), wanted) for name, wanted in (rule.get("when") or {}).items()):
            data = schema.merge(data, rule["set"])
            reasons.append(rule["why"].format(**facts))
            origins |= dict.fromkeys(schema.flatten(rule["set"]), reasons[-1])
    return Choice(data, reasons, origins)


def _holds(value: Any, wanted: Any) -> bool:
    if value is None:
        return False
    if isinstance(wanted, list):
        return value in wanted
    sign, _, number = str(wanted).partition(" ")
    return bool(_COMPARED[sign](value, float(number)) if sign in _COMPARED else value == wanted)
