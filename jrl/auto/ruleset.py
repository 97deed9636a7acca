"""The choice of a config from the facts of an environment, by the rules of rules.yaml."""

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.fields import schema

_COMPARED = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


class Choice(NamedTuple):
    data: dict[str, Any]  # sections of a config, without env.id and stop
    reasons: list[str]  # a line for each rule that applied
    origins: dict[str, str]  # dotted key -> reason of its value

    def apply(self, rule: Mapping[str, Any], facts: Mapping[str, Any]) -> "Choice":
        """Returns the choice with the values of a rule."""
        why = rule["why"].format(**facts)
        origins = self.origins | dict.fromkeys(schema.flatten(rule["set"]), why)
        return Choice(schema.merge(self.data, rule["set"]), [*self.reasons, why], origins)


@functools.cache
def _file() -> dict[str, Any]:
    return schema.read_yaml(Path(__file__).with_name("rules.yaml"))


def rules() -> Sequence[Mapping[str, Any]]:
    """Returns the rules, in order: mappings with `when`, `set` and `why`."""
    return _file()["rules"]


def trial_rules() -> Sequence[Mapping[str, Any]]:
    """Returns the rules of trials: as `rules`, with a `name`."""
    return _file()["trials"]


def choose(facts: Mapping[str, Any]) -> Choice:
    """Returns the config of an environment with these facts.

    Rules apply in their order; later values replace earlier ones. A condition compares a fact, or a key that an earlier
    rule has set, with a value, a list of values, or a text such as "< 100". A key that is not set meets no condition.

    Args:
      facts: result of `facts.inspect`, and `minutes`, the budget of the run.
    """
    choice = Choice({}, [], {})
    for rule in rules():
        if _applies(rule, facts, choice):
            choice = choice.apply(rule, facts)
    return choice


def choose_trials(facts: Mapping[str, Any], choice: Choice) -> dict[str, Choice]:
    """Returns the candidates that short runs compare, by name: `choice` as "rules", and the trials that apply to it."""
    applying = [rule for rule in trial_rules() if _applies(rule, facts, choice)]
    return {"rules": choice} | {rule["name"]: choice.apply(rule, facts) for rule in applying}


def _applies(rule: Mapping[str, Any], facts: Mapping[str, Any], choice: Choice) -> bool:
    known = {**facts, **schema.flatten(choice.data)}
    return all(_holds(known.get(name), wanted) for name, wanted in (rule.get("when") or {}).items())


def _holds(value: Any, wanted: Any) -> bool:
    if value is None:
        return False
    if isinstance(wanted, list):
        return value in wanted
    sign, _, number = str(wanted).partition(" ")
    return bool(_COMPARED[sign](value, float(number)) if sign in _COMPARED else value == wanted)
