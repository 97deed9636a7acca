"""The server's routes as one table, and their description: OpenAPI 3.1 for machines, a page for people."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import pydantic

from jrl.serve import bodies
from jrl.serve.bodies import STEPS, Action, Actions, AgentActions, Body, Ids, Name, Step, Version, component
from jrl.serve.space_values import LARGEST, schema
from jrl.serve.wire import CLIENT, JSON, NAME, NPZ
from jrl.types import Space

_REF = "#/components/schemas/"
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_CLIENT = {
    "name": CLIENT.title(),
    "in": "header",
    "schema": {"type": "string", "maxLength": NAME},
    "description": "name of the client, the same in all its requests: an episode belongs to the client that began it. "
    "Without it an episode belongs to whoever knows its id, which the server gives",
}
_POLICY = {"name": "policy", "in": "query", "schema": {"type": "string"}}
_NEWER = {"name": "newer_than", "in": "query", "schema": {"type": "integer", "minimum": -1, "maximum": 10**15 - 1}}
_BINARY = {"type": "string", "format": "binary"}
_ANY, _TEXT = {"type": "object"}, {"type": "string"}

Fields = Mapping[str, Any]  # name -> type; a name that ends with ? may be absent
_COUNT = Annotated[int, pydantic.Field(ge=0)]
_TURN: Fields = {"actions": AgentActions, "version": Version, "step": Step}
_END: Fields = {"return": float, "length": _COUNT}


class Operation(NamedTuple):
    """One route."""

    method: str
    path: str
    name: str  # of the server's method that answers, and of the operation in the document
    summary: str
    body: type[Body] | None = None
    answer: Fields | None = None  # None: see `kind` and `schema`
    status: int = 200  # of the answer
    agent_body: type[Body] | None = None  # where episodes have several agents; None: the same
    agent_answer: Fields | None = None
    kind: str = JSON  # media type and schema of an answer that is not made of fields
    schema: Mapping[str, Any] = _ANY
    parameters: Sequence[Mapping[str, Any]] = ()
    is_closed: bool = True  # whether a token is needed where the server has one


def _post(path: str, name: str, summary: str, body: type[Body], answer: Fields, **more: Any) -> Operation:
    parameters = [_ID, _CLIENT] if "{id}" in path else [_CLIENT]
    return Operation("POST", path, name, summary, body, answer, **{"parameters": parameters, **more})


def _get(path: str, name: str, summary: str, **more: Any) -> Operation:
    return Operation("GET", path, name, summary, **more)


OPERATIONS = (
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
    _post("/v1/episodes/{id}/turn", "turn", "Of several agents: asks for the actions of some, and ends some.",
          bodies.TurnRequest, _TURN),
    _post("/v1/turns", "turns", "The turns of many episodes of several agents, by their ids.", bodies.TurnsRequest,
          {"turns": Annotated[Any, component("TurnAnswers")], "version": Version}),
    _post("/v1/action", "once", "Asks for an action without an episode, of a policy that remembers nothing.",
          bodies.OnceRequest, {"action": Action, "version": Version}, parameters=()),
    _post("/v1/steps", "steps", "A step of many episodes; another episode begins in place of each that has ended.",
          bodies.StepsRequest, {"episode_ids": Ids, "actions": Actions, "version": Version}),
    _post("/v1/played", "played", "Reports steps [K, N] whose actions the client chose by weights from here.",
          bodies.PlayedRequest, {"episode_ids": Ids, "version": Version, "too_old": _COUNT}),
    _get("/v1/program", "program", "Returns how numpy acts by the weights.", parameters=[_POLICY]),
    _get("/v1/weights", "weights", "Returns the weights; 204 if they are of this version.",
         kind=NPZ, schema=_BINARY, parameters=[_POLICY, _NEWER]),
    _get("/v1/policies", "policies", "Returns the policies and their spaces."),
    _get("/v1/health", "health", "Returns that the server answers.", is_closed=False),
    _get("/metrics", "metrics", "Returns counts, as Prometheus reads them.", kind="text/plain", schema=_TEXT),
    _get("/openapi.json", "openapi", "Returns this description."),
    _get("/docs", "docs", "Returns this description, for people.", kind="text/html", schema=_TEXT),
)  # fmt: skip


def document(
    observations: Sequence[Space], actions: Sequence[Space], agents: Mapping[str, Any] = {}, *, most: int,
    token: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the OpenAPI document of a server whose requests have at most `most` episodes.

    `observations` and `actions` are the spaces of all policies and agents, `agents` those by name of several agents.
    """
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths[operation.path] = {operation.method.lower(): _route(operation, several=bool(agents))}
    paths["/v1/weights"]["get"]["responses"]["204"] = {"description": "the weights are of this version"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jrl", "version": "1", "description": "Episodes that clients play, and a policy that acts."},
        "security": [{"token": []}] if token else [],
        "paths": paths,
        "components": {
            "schemas": _components(observations, actions, agents, most),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _route(operation: Operation, *, several: bool) -> dict[str, Any]:
    body, answer = operation.body, operation.answer
    if several:
        body, answer = operation.agent_body or body, operation.agent_answer or answer
    found: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if operation.parameters:
        found["parameters"] = list(operation.parameters)
    if body is not None:
        sent = _of_model(body)
        found["requestBody"] = {"required": bool(sent.get("required")), "content": _both_forms(sent)}
    content = _both_forms(_of_fields(answer)) if answer else {operation.kind: {"schema": operation.schema}}
    wrong = {JSON: {"schema": {"$ref": _REF + "Error"}}}
    found["responses"] = {
        str(operation.status): {"description": "the answer", "content": content},
        "4XX": {"description": "the request cannot be fulfilled", "content": wrong},
    }
    return found if operation.is_closed else {**found, "security": []}


def _both_forms(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a body in either of its forms; an answer has that of its request."""
    return {JSON: {"schema": fields}, NPZ: {"schema": {"$ref": _REF + "Arrays"}}}


def _of_fields(fields: Fields) -> dict[str, Any]:
    kinds: dict[str, Any] = {name.rstrip("?"): (kind, None if "?" in name else ...) for name, kind in fields.items()}
    return _of_model(pydantic.create_model("Answer", __config__={"extra": "forbid"}, **kinds))


def _of_model(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Returns the JSON Schema of a model, with references to the components of this document."""

    def linked(x: Any) -> Any:
        if isinstance(x, list):
            return [linked(part) for part in x]
        if not isinstance(x, dict):
            return x
        kept = {name: linked(part) for name, part in x.items() if name not in ("title", "default", "component")}
        return {**kept, "$ref": _REF + x["component"]} if "component" in x else kept

    return linked(model.model_json_schema())


def _components(
    observations: Sequence[Space], actions: Sequence[Space], agents: Mapping[str, Any], most: int
) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "number"}
    sent = {**number, "minimum": -LARGEST, "maximum": LARGEST}
    by_agent = lambda of: {
        "type": "object", "properties": {name: of(agent) for name, agent in agents.items()},
        "additionalProperties": False,
    }  # fmt: skip
    by_episode = lambda one: {"type": "object", "additionalProperties": one, "minProperties": 1, "maxProperties": most}
    of_episodes = lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": most}
    name = {"type": "string", "minLength": 1, "maxLength": NAME}
    return {
        "Observation": _any_of(observations),
        "Observations": _any_of(observations, most),
        "ObservationRows": _any_of(observations, STEPS, STEPS),
        "Action": _any_of(actions),
        "Actions": _any_of(actions, most),
        "AgentObservations": by_agent(lambda agent: schema(agent.observation)),
        "AgentActions": by_agent(lambda agent: schema(agent.action)),
        "AgentNumbers": by_agent(lambda agent: sent),
        "AgentFlags": by_agent(lambda agent: {"type": "boolean"}),
        "AgentReturns": by_agent(lambda agent: number),
        "Ids": of_episodes(name),
        "Numbers": of_episodes(sent),
        "Flags": of_episodes({"type": "boolean"}),
        "Count": {"type": "integer", "minimum": 1, "maximum": most},
        "Turns": by_episode(_of_model(bodies.TurnRequest)),
        "TurnAnswers": by_episode(_of_fields(_TURN)),
        "Error": _of_fields({"error": Annotated[str, pydantic.Field(description="what is wrong, in words")]}),
        "Arrays": {**_BINARY, "description": "what numpy.savez writes: arrays by the names of the JSON, trees as a/b"},
    }


def _any_of(kinds: Sequence[Space], *sizes: int) -> dict[str, Any]:
    """Returns the schema of an element of one of several spaces; `sizes` as in `schema`."""
    found = [schema(space, *sizes) for space in dict.fromkeys(kinds)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def page(document: Mapping[str, Any]) -> str:
    """Returns the document as a page for people."""
    rows = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
            needed = body.get("required", ())
            fields = ", ".join(f"<b>{f}</b>" if f in needed else f for f in body.get("properties", ()))
            cells = (method.upper(), path, html.escape(route["summary"]), fields)
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    spaces = {name: document["components"]["schemas"][name] for name in ("Observation", "Action")}
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>jrl</title><h1>jrl</h1>'
        "<p>A policy behind HTTP. Fields in bold are needed. <a href='/openapi.json'>OpenAPI</a>, "
        f"<a href='/metrics'>metrics</a>.</p><table>{''.join(rows)}</table>"
        f"<h2>Spaces</h2><pre>{html.escape(json.dumps(spaces, indent=1))}</pre></html>"
    )
