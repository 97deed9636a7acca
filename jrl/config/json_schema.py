"""JSON Schema of a run's YAML, for editors that complete and check it."""

import math
from typing import Any, Literal

from jrl.config.sections import RunConfig
from jrl.fields.validation import typed_dict, union_of


def json_schema() -> dict[str, Any]:
    """Returns the schema of a run's YAML: every key with its type, range, choices, default and documentation."""
    from pydantic import TypeAdapter

    from jrl import algos

    named = [typed_dict(algos.get_config_class(name), (("name", Literal[name]),)) for name in algos.names()]
    found: Any = _finite(TypeAdapter(typed_dict(RunConfig, (("algo", union_of(named)),))).json_schema())
    algo = found["$defs"].get("sections_RunConfig", found)["properties"]["algo"]
    algo["oneOf"] = algo.pop("anyOf")
    found["properties"]["sweep"] = {"type": "object", "description": "spaces and options of `python -m jrl.sweep FILE`"}
    found.pop("required", None)  # --algo may say it
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "A run of jrl"}


def _finite(value: Any) -> Any:
    """Returns a schema without infinite limits and defaults, which JSON cannot hold."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if not isinstance(value, dict):
        return value
    infinite = lambda one: isinstance(one, float) and math.isinf(one)
    return {name: _finite(one) for name, one in value.items() if not infinite(one)}
