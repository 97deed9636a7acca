"""JSON Schema of a run's YAML, for completion and checks in editors."""

import math
from typing import Any, Literal, Union

from jrl.config.sections import RunConfig
from jrl.fields.validation import typed_dict


def json_schema() -> dict[str, Any]:
    """Returns the schema of a run's YAML: every key with its type, range, choices, default and documentation."""
    from pydantic import TypeAdapter

    from jrl import algos

    named = [typed_dict(algos.get_config_class(name), (("name", Literal[name]),)) for name in algos.names()]
    schema: Any = _drop_infinite(TypeAdapter(typed_dict(RunConfig, (("algo", Union[*named]),))).json_schema())
    algo = schema["$defs"].get("sections_RunConfig", schema)["properties"]["algo"]
    algo["oneOf"] = algo.pop("anyOf")
    properties = schema["properties"]
    properties["devices"] = {"anyOf": [properties["devices"], {"enum": ["auto", "cpu"]}]}  # short for devices.platform
    sweep = {"type": "object", "description": "spaces and options of `python -m jrl.sweep FILE`"}
    properties["sweep"] = sweep
    schema.pop("required", None)  # the option --algo may name the algorithm
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A run of jrl"}


def _drop_infinite(value: Any) -> Any:
    """Returns a schema without infinite limits and defaults, because JSON cannot hold them."""
    if isinstance(value, list):
        return [_drop_infinite(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_infinite = lambda item: isinstance(item, float) and math.isinf(item)
    return {name: _drop_infinite(item) for name, item in value.items() if not is_infinite(item)}
