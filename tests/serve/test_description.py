"""OpenAPI document of the routes: it follows the specification, and agrees with the parsers of requests."""

import json
import types

import jax
import jsonschema
import numpy as np
import openapi_spec_validator
import pytest

from jrl.serve import openapi, space_values
from jrl.serve.wire import RequestError
from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


@pytest.mark.parametrize("token", [False, True])
def test_the_description_of_several_agents_is_openapi(token):
    agents = [(name, types.SimpleNamespace(observation=Box((2,)), action=Discrete(3))) for name in ("a", "b")]
    document = openapi.build_document(agents, max_episodes=4, has_token=token)
    openapi_spec_validator.validate(document)
    routes = {path: route for path, methods in document["paths"].items() for route in methods.values()}
    needed = {path for path, route in routes.items() if route.get("security", document["security"])}
    assert needed == ({*routes} - {"/v1/health"} if token else set())


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (Box((2, 2)), [[1, 2], [3, 4.5]], [[1, 2]]),
        (Box((2,), "uint8", 0, 255), [0, 255], [0.5, 1]),
        (Discrete(3), 2, 3),
        (MultiDiscrete((2, 3)), [1, 2], [2, 0]),
        (MultiBinary((2,)), [0, 1], ["a", 1]),
        (Dict((("a", Box(())), ("b", Discrete(2)))), {"a": 1.0, "b": 0}, {"a": 1.0}),
        (Tuple((Discrete(2), Box((1,)))), [1, [0.5]], [1]),
    ],
)
def test_schema_and_parser_agree_about_a_space(space, right, wrong):
    jsonschema.validate(right, space_values.build_schema(space))
    one = space_values.parse_value(space, right, "x")
    two = json.loads(json.dumps(jax.tree.map(lambda x: np.stack([x, x]).tolist(), one)))  # a tree of arrays
    jsonschema.validate(two, space_values.build_schema(space, 2))
    assert jax.tree.structure(space_values.parse_value(space, two, "x", (2,))) == jax.tree.structure(one)
    with pytest.raises(jsonschema.ValidationError, match="is too long"):
        jsonschema.validate(two, space_values.build_schema(space, 1))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, space_values.build_schema(space))
    with pytest.raises(RequestError):
        space_values.parse_value(space, wrong, "x")
