"""Table of the server's routes, and their description as OpenAPI 3.1."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import pydantic

from jrl.serve import bodies
from jrl.serve.bodies import MAX_STEPS, Action, Actions, AgentActions, Body, Ids, Name, Step, Version, component
from jrl.serve.space_values import LARGEST, build_schema
from jrl.serve.wire import CLIENT_HEADER, JSON, MAX_NAME, NPZ
from jrl.types import Space

_REF = "#/components/schemas/"
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_CLIENT = {
    "name": CLIENT_HEADER.title(),
    "in": "header",
    "schema": {"type": "string", "maxLength": MAX_NAME},
    "description": "name of the client, the same in all its requests: an episode belongs to the client that began it. "
    "Without the header an episode belongs to every client that knows its id, which the server gives",
}
_POLICY = {"name": "policy", "in": "query", "schema": {"type": "string"}}
_NEWER = {"name": "newer_than", "in": "query", "schema": {"type": "integer", "minimum": -1, "maximum": 10**15 - 1}}
_BINARY = {"type": "string", "format": "binary"}
_ANY, _TEXT = {"type": "object"}, {"type": "string"}

Fields = Mapping[str, Any]  # name -> type; names that end with ? may be absent
_COUNT = Annotated[int, pydantic.Field(ge=0)]
_TURN: Fields = {"actions": AgentActions, "version": Version, "step": Step}
_END: Fields = {"return": float, "length": _COUNT}


class ApiRoute(NamedTuple):
    """A route of the server."""

    method: str
    path: str
    name: str  # server method, and operationId in the document
    summary: str
    body: type[Body] | None = None
    answer: Fields | None = None  # None: see `media_type` and `schema`
    status: int = 200  # status of the answer
    agent_body: type[Body] | None = None  # body for episodes of several agents; None: `body`
    agent_answer: Fields | None = None  # answer for episodes of several agents; None: `answer`
    media_type: str = JSON  # media type of an answer without fields
    schema: Mapping[str, Any] = _ANY  # schema of an answer without fields
    parameters: Sequence[Mapping[str, Any]] = ()


def _post(path: str, name: str, summary: str, body: type[Body], answer: Fields, **more: Any) -> ApiRoute:
    parameters = [_ID, _CLIENT] if "{id}" in path else [_CLIENT]
    return ApiRoute("POST", path, name, summary, body, answer, **{"parameters": parameters, **more})


def _get(path: str, name: str, summary: str, **more: Any) -> ApiRoute:
    return ApiRoute("GET", path, name, summary, **more)


ROUTES = (
    _post("/v1/episodes", "begin", "Begins an episode, or `count` of them.", bodies.BeginRequest,
          {"version": Version, "agents?": list[Name], "episode_id?": Name, "episode_ids?": Ids}, status=201),
    _post("/v1/episodes/{id}/action", "action", "Asks for the action at an observation.", bodies.ActionRequest,
          {"action": Action, "version": Version, "step": Step}),
    _post("/v1/episodes/{id}/log", "log", "Reports an action that the client chose itself.", bodies.LogRequest,
          {"step": Step}),
    _post("/v1/episodes/{id}/reward", "reward", "Adds to the reward of the latest action.", bodies.RewardRequest,
          {"reward": bodies.Number},
          agent_body=bodies.AgentRewardRequest, agent_answer={"rewards": bodies.AgentNumbers}),
    _post("/v1/episodes/{id}/end", "end", "Ends an episode with its last observation.", bodies.EndRequest, _END,
          agent_body=bodies.AgentEndRequest,
          agent_answer={**_END, "returns": Annotated[dict[str, float], component("AgentReturns")]}),
    _post("/v1/episodes/{id}/turn", "turn", "Several agents: asks for the actions of some agents, and ends agents.",
          bodies.TurnRequest, _TURN),
    _post("/v1/turns", "turns", "Sends turns of many episodes of several agents, by their ids.", bodies.TurnsRequest,
          {"turns": Annotated[Any, component("TurnAnswers")], "version": Version}),
    _post("/v1/action", "once", "Asks for an action of a policy without memory, without an episode.",
          bodies.OnceRequest, {"action": Action, "version": Version}, parameters=()),
    _post("/v1/steps", "steps", "Steps many episodes; a new episode replaces each ended episode.",
          bodies.StepsRequest, {"episode_ids": Ids, "actions": Actions, "version": Version}),
    _post("/v1/played", "played", "Reports steps [K, N] whose actions the client chose with the server's weights.",
          bodies.PlayedRequest, {"episode_ids": Ids, "version": Version, "too_old": _COUNT}),
    _get("/v1/program", "program", "Returns the program by which numpy chooses actions.", parameters=[_POLICY]),
    _get("/v1/weights", "weights", "Returns the weights; 204 if they have this version.",
         media_type=NPZ, schema=_BINARY, parameters=[_POLICY, _NEWER]),
    _get("/v1/policies", "policies", "Returns the policies and their spaces."),
    _get("/v1/health", "health", "Returns the state of the server, without a token."),
    _get("/metrics", "metrics", "Returns metrics in Prometheus' format.", media_type="text/plain", schema=_TEXT),
    _get("/openapi.json", "openapi", "Returns this description."),
)  # fmt: skip


def build_document(agents: Sequence[tuple[str, Any]], *, max_episodes: int, has_token: bool = False) -> dict[str, Any]:
    """Returns the OpenAPI document of a server.

    Args:
      agents: names and `ServedAgent`s of all policies; "" is the name of the agent of an episode with a single agent.
      max_episodes: maximum number of episodes in a request.
      has_token: whether requests need a token.
    """
    is_multi_agent = any(name for name, _ in agents)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths[route.path] = {route.method.lower(): _describe_route(route, is_multi_agent=is_multi_agent)}
    paths["/v1/health"]["get"]["security"] = []
    paths["/v1/weights"]["get"]["responses"]["204"] = {"description": "the weights have this version"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jrl", "version": "1", "description": "Episodes that clients play, and a policy that acts."},
        "security": [{"token": []}] if has_token else [],
        "paths": paths,
        "components": {
            "schemas": _build_components(agents, max_episodes),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_route(route: ApiRoute, *, is_multi_agent: bool) -> dict[str, Any]:
    body, answer = route.body, route.answer
    if is_multi_agent:
        body, answer = route.agent_body or body, route.agent_answer or answer
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary}
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if body is not None:
        schema = _build_model_schema(body)
        operation["requestBody"] = {"required": bool(schema.get("required")), "content": _build_content(schema)}
    content = _build_content(_build_fields_schema(answer)) if answer else {route.media_type: {"schema": route.schema}}
    operation["responses"] = {
        str(route.status): {"description": "the answer", "content": content},
        "4XX": {
            "description": "the server refuses the request",
            "content": {JSON: {"schema": {"$ref": _REF + "Error"}}},
        },
    }
    return operation


def _build_content(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a body as JSON or npz; an answer has the type of its request."""
    return {JSON: {"schema": schema}, NPZ: {"schema": {"$ref": _REF + "Arrays"}}}


def _build_fields_schema(fields: Fields) -> dict[str, Any]:
    types: dict[str, Any] = {name.rstrip("?"): (kind, None if "?" in name else ...) for name, kind in fields.items()}
    return _build_model_schema(pydantic.create_model("Answer", __config__={"extra": "forbid"}, **types))


def _build_model_schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Returns the JSON Schema of a model, with references to the components of the document."""

    def link(x: Any) -> Any:
        if isinstance(x, list):
            return [link(part) for part in x]
        if not isinstance(x, dict):
            return x
        linked = {name: link(part) for name, part in x.items() if name not in ("title", "default", "component")}
        return {**linked, "$ref": _REF + x["component"]} if "component" in x else linked

    return link(model.model_json_schema())


def _build_components(agents: Sequence[tuple[str, Any]], max_episodes: int) -> dict[str, Any]:
    observations, actions = ([getattr(agent, name) for _, agent in agents] for name in ("observation", "action"))
    number: dict[str, Any] = {"type": "number"}
    bounded = {**number, "minimum": -LARGEST, "maximum": LARGEST}
    by_agent = lambda build: {
        "type": "object", "properties": {name: build(agent) for name, agent in agents if name},
        "additionalProperties": False,
    }  # fmt: skip
    by_episode = lambda schema: {
        "type": "object", "additionalProperties": schema, "minProperties": 1, "maxProperties": max_episodes,
    }  # fmt: skip
    of_episodes = lambda schema: {"type": "array", "items": schema, "minItems": 1, "maxItems": max_episodes}
    name = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
    return {
        "Observation": _build_union(observations),
        "Observations": _build_union(observations, max_episodes),
        "ObservationRows": _build_union(observations, MAX_STEPS, MAX_STEPS),
        "Action": _build_union(actions),
        "Actions": _build_union(actions, max_episodes),
        "AgentObservations": by_agent(lambda agent: build_schema(agent.observation)),
        "AgentActions": by_agent(lambda agent: build_schema(agent.action)),
        "AgentNumbers": by_agent(lambda agent: bounded),
        "AgentFlags": by_agent(lambda agent: {"type": "boolean"}),
        "AgentReturns": by_agent(lambda agent: number),
        "Ids": of_episodes(name),
        "Numbers": of_episodes(bounded),
        "Flags": of_episodes({"type": "boolean"}),
        "Count": {"type": "integer", "minimum": 1, "maximum": max_episodes},
        "Turns": by_episode(_build_model_schema(bodies.TurnRequest)),
        "TurnAnswers": by_episode(_build_fields_schema(_TURN)),
        "Error": _build_fields_schema({"error": Annotated[str, pydantic.Field(description="message")]}),
        "Arrays": {**_BINARY, "description": "file of numpy.savez: arrays by the names of the JSON, trees as a/b"},
    }


def _build_union(kinds: Sequence[Space], *sizes: int) -> dict[str, Any]:
    """Returns the schema of an element of any of the spaces; `sizes` as in `build_schema`."""
    schemas = [build_schema(space, *sizes) for space in dict.fromkeys(kinds)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
