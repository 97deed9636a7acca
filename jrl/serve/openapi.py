"""Description of the server's routes, for machines (OpenAPI 3.1) and as a page for people."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.serve.client import INFO_LENGTH, INFOS
from jrl.serve.protocol import CLIENT, JSON, LARGEST, NPZ
from jrl.types import Box, Dict, Discrete, Leaf, MultiDiscrete, Space, Tuple

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_CLIENT = {
    "name": CLIENT.title(),
    "in": "header",
    "schema": {"type": "string", "maxLength": 128},
    "description": "who the client is, the same in all its requests: an episode is for who began it. Without it an "
    "episode is for who knows its id, which the server gives",
}
_STEP = {"type": "integer", "minimum": 0, "description": "number of the step; a request that is repeated counts once"}
_OF_POLICY = {"name": "policy", "in": "query", "schema": {"type": "string"}}
_NEWER = {"name": "newer_than", "in": "query", "schema": {"type": "integer", "minimum": -1, "maximum": 10**15 - 1}}
_SENT: dict[str, Any] = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}  # by clients
_REWARD = {**_SENT, "description": "that came since the latest action"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 128, "description": "printable characters"}
_NUMBER, _FLAG, _ANY = {"type": "number"}, {"type": "boolean"}, {"type": "object"}
_BINARY = {"type": "string", "format": "binary"}
MOST = 256  # steps of clients that act by themselves in one request, so that others do not wait for it
_VERSION = {"type": "integer", "minimum": 0, "description": "updates before the weights that chose"}
_TOO_OLD = {"type": "integer", "minimum": 0, "description": "steps of these that nobody learns from: see max_lag"}
_OBS, _MANY_OBS, _ROWS, _ACT, _MANY_ACT = (
    {"$ref": f"#/components/schemas/{name}"}
    for name in ("Observation", "Observations", "ObservationRows", "Action", "Actions")
)
_INFOS = {
    "type": "object",
    "additionalProperties": {**_SENT, "type": ["number", "boolean"]},
    "propertyNames": {"minLength": 1, "maxLength": INFO_LENGTH},
    "maxProperties": INFOS,
    "description": "numbers of which rows have the means; their names are printable, and have no / in npz",
}
_ASKED = {"observation": _OBS, "reward": _REWARD, "step": _STEP, "infos": _INFOS}


def schema(space: Space) -> dict[str, Any]:
    """Returns the JSON Schema of an element of a space."""
    return batch(space)


def _leaf(leaf: Leaf) -> dict[str, Any]:
    match leaf:
        case Discrete():
            number: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": leaf.n - 1}
        case MultiDiscrete():
            each = [{"type": "integer", "minimum": 0, "maximum": n - 1} for n in leaf.nvec]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
        case Box() if np.dtype(leaf.dtype).kind == "f":
            number = {"type": "number"}
        case _:
            number = {"type": ["integer", "boolean"]}
    for size in reversed(leaf.shape):
        number = {"type": "array", "items": number, "minItems": size, "maxItems": size}
    return number


def batch(space: Space, *sizes: int) -> dict[str, Any]:
    """Returns the JSON Schema of so many elements of a space at most, along an axis for each size: a tree of arrays."""
    match space:
        case Dict():
            parts = {name: batch(part, *sizes) for name, part in space.items}
            return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        case Tuple():
            each = [batch(part, *sizes) for part in space.items]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
    found = _leaf(space)
    for size in reversed(sizes):
        found = _many(found, size)
    return found


def _many(inner: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": inner, "minItems": 1, "maxItems": most}


def _object(properties: dict[str, Any], *required: str, closed: bool = True) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "required": list(required)}
    return {**found, "additionalProperties": False} if closed else found


def _content(*kinds: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"content": {kind: {"schema": inner} for kind, inner in kinds}}


def _body(inner: dict[str, Any]) -> dict[str, Any]:
    """Returns a body in either of its forms; an answer has that of its request."""
    return _content((JSON, inner), (NPZ, {"$ref": "#/components/schemas/Arrays"}))


def _route(name: str, summary: str, answer: dict[str, Any], *, status: str = "200", **more: Any) -> dict[str, Any]:
    refused = {
        "description": "the request cannot be answered as it is asked",
        **_content((JSON, {"$ref": "#/components/schemas/Error"})),
    }
    responses = {status: {"description": "the answer", **answer}, "4XX": refused}
    return {"operationId": name, "summary": summary, "responses": responses, **more}


def _post(
    name: str,
    summary: str,
    body: dict[str, Any],
    answer: dict[str, Any],
    *,
    status: str = "200",
    parameters: Sequence[dict[str, Any]] = (_CLIENT,),
) -> dict[str, Any]:
    sent = {"requestBody": {"required": bool(body["required"]), **_body(body)}, "parameters": list(parameters)}
    return {"post": _route(name, summary, _body(answer), status=status, **sent)}


def _of_one(name: str, summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Returns a route of one episode."""
    return _post(name, summary, body, answer, parameters=(_ID, _CLIENT))


def _get(name: str, summary: str, kind: str, inner: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"get": _route(name, summary, _content((kind, inner)), **more)}


def _any_of(kinds: Sequence[Space], *sizes: int) -> dict[str, Any]:
    """Returns an element of one of several spaces, or a batch of them as `batch` has it."""
    found = [batch(space, *sizes) for space in dict.fromkeys(kinds)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def document(
    observations: Sequence[Space],
    actions: Sequence[Space],
    agents: Mapping[str, Any] = {},
    *,
    most: int,
    token: bool = False,
) -> dict[str, Any]:
    """Returns the description of a server of policies with these spaces, which takes `most` episodes in a request.

    Args:
      observations, actions: of all policies and agents.
      agents: name -> what has `observation` and `action`, where episodes have several agents.
      token: whether clients have to show one.
    """
    schemas = {
        "Observation": _any_of(observations),
        "Observations": _any_of(observations, most),
        "ObservationRows": _any_of(observations, MOST, MOST),
        "Action": _any_of(actions),
        "Actions": _any_of(actions, most),
        "Error": _object({"error": {"type": "string", "description": "what is wrong, in words"}}, "error"),
        "Arrays": {**_BINARY, "description": "what numpy.savez writes: arrays by the names of the JSON, trees as a/b"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "jrl", "version": "1", "description": "Episodes that clients play, and a policy that acts."},
        "security": [{"token": []}] if token else [],
        "paths": {**_actions(most), **_ends(agents, most), **_many_steps(most), **_weights(), **_server()},
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _actions(most: int) -> dict[str, Any]:
    """Returns the routes by which an episode begins and goes on."""
    begin = {
        "episode_id": _NAME,
        "training_enabled": _FLAG,
        "count": {"type": "integer", "minimum": 1, "maximum": most},
        "policy": _NAME,
    }
    names = {"type": "array", "items": _NAME, "description": "of the agents, where an episode has several"}
    begun = {"agents": names, "episode_id": _NAME, "episode_ids": _many(_NAME, most), "version": _VERSION}
    chosen = {"action": _ACT, "version": _VERSION, "step": _STEP}
    return {
        "/v1/episodes": _post(
            "begin", "Begins an episode, or `count` of them.", _object(begin), _object(begun, "version"), status="201"
        ),
        "/v1/episodes/{id}/action": _of_one(
            "action", "Asks for the action at an observation.", _object(_ASKED, "observation"),
            _object(chosen, *chosen),
        ),
        "/v1/episodes/{id}/log": _of_one(
            "log", "Tells of an action that the client chose itself.",
            _object({**_ASKED, "action": _ACT, "log_prob": _SENT}, "observation", "action"),
            _object({"step": _STEP}, "step"),
        ),
        "/v1/action": _post(
            "once", "Asks for an action without an episode, of a policy that remembers nothing.",
            _object({"observation": _OBS, "policy": _NAME}, "observation"),
            _object({"action": _ACT, "version": _VERSION}, "action", "version"), parameters=(),
        ),
    }  # fmt: skip


def _ends(agents: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Returns the routes of an episode that are others where it has several agents."""
    by_agent = lambda of: _object({name: of(agent) for name, agent in agents.items()})
    seen, taken = (by_agent(lambda one, what=what: schema(getattr(one, what))) for what in ("observation", "action"))
    rewards, flags = (by_agent(lambda one, kind=kind: kind) for kind in (_SENT, _FLAG))
    turn = {"observations": seen, "rewards": rewards, "terminated": flags, "truncated": flags}
    turn |= {"actions": taken, "log_probs": rewards, "step": _STEP, "infos": _INFOS}
    answer = _object({"actions": taken, "version": _VERSION, "step": _STEP}, "actions", "version", "step")
    turn_of_one = _object(turn, "observations")
    by_episode = lambda one: {"type": "object", "additionalProperties": one, "minProperties": 1, "maxProperties": most}
    outcome = {"return": _NUMBER, "length": {"type": "integer", "minimum": 0}}
    if agents:
        reward, needed = {"rewards": rewards}, "rewards"
        end = _object({"observations": seen, "rewards": rewards, "truncated": _FLAG, "step": _STEP, "infos": _INFOS})
        outcome["returns"] = by_agent(lambda one: _NUMBER)
    else:
        reward, needed = {"reward": _SENT}, "reward"
        end = _object({**_ASKED, "truncated": _FLAG}, "observation")
    return {
        "/v1/episodes/{id}/reward": _of_one(
            "reward", "Adds to the reward of the latest action.",
            _object({**reward, "infos": _INFOS}, needed), _object(reward),
        ),
        "/v1/episodes/{id}/end": _of_one(
            "end", "Ends an episode with its last observation.", end, _object(outcome, "return", "length")
        ),
        "/v1/episodes/{id}/turn": _of_one(
            "turn", "Of several agents: asks for the actions of some, and ends some.", turn_of_one, answer
        ),
        "/v1/turns": _post(
            "turns", "The turns of many episodes of several agents, by their ids.",
            _object({"turns": by_episode(turn_of_one)}, "turns"),
            _object({"turns": by_episode(answer), "version": _VERSION}, "turns", "version"),
        ),
    }  # fmt: skip


def _many_steps(most: int) -> dict[str, Any]:
    """Returns the routes of many episodes in a request."""
    ids = {"episode_ids": _many(_NAME, most)}
    each, seen = {"rewards": _SENT, "terminated": _FLAG, "truncated": _FLAG}, ("observations", "final_observations")
    steps = {**ids, **dict.fromkeys(seen, _MANY_OBS), **{name: _many(one, most) for name, one in each.items()}}
    rows = lambda inner: _many(_many(inner, MOST), MOST)
    played = {
        **{name: rows(one) for name, one in each.items()},
        **dict.fromkeys(seen, _ROWS),
        **ids,
        "actions": {"description": "[K, N, *] in the policy's units, a tree of arrays"},
        "log_probs": rows(_SENT),
        "versions": rows(_VERSION),
        "memory": {"description": "arrays [K, N, ...] by number: what a policy that remembers did before each step"},
    }
    together = {**ids, "actions": _MANY_ACT, "version": _VERSION}
    return {
        "/v1/steps": _post(
            "steps", "A step of many episodes; in the place of one that has ended another begins.",
            _object(steps, "episode_ids", "observations"), _object(together, *together),
        ),
        "/v1/played": _post(
            "played", "Tells of steps [K, N] whose actions the client chose by weights from here.",
            _object(played, "episode_ids", "observations", "actions", "log_probs", "versions"),
            _object({**ids, "version": _VERSION, "too_old": _TOO_OLD}, "episode_ids", "version", "too_old"),
        ),
    }  # fmt: skip


def _weights() -> dict[str, Any]:
    """Returns the routes of clients that act by themselves."""
    weights = _get(
        "weights", "The weights, where they are not of this version; else 204.", NPZ, _BINARY,
        parameters=[_OF_POLICY, _NEWER],
    )  # fmt: skip
    weights["get"]["responses"]["204"] = {"description": "they are of this version"}
    tells = "Tells how numpy acts by the weights."
    return {"/v1/program": _get("program", tells, JSON, _ANY, parameters=[_OF_POLICY]), "/v1/weights": weights}


def _server() -> dict[str, Any]:
    """Returns the routes about the server."""
    text = {"type": "string"}
    return {
        "/v1/policies": _get("policies", "Tells of the policies and their spaces.", JSON, _ANY),
        "/v1/health": _get("health", "Tells that the server answers.", JSON, _ANY, security=[]),  # without a token
        "/metrics": _get("metrics", "Counts, as Prometheus reads them.", "text/plain", text),
        "/openapi.json": _get("openapi", "This description.", JSON, _ANY),
        "/docs": _get("docs", "This description, for people.", "text/html", text),
    }


def page(document: dict[str, Any]) -> str:
    """Returns the description as a page for people."""
    rows = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
            fields = ", ".join(f"<b>{f}</b>" if f in body["required"] else f for f in body.get("properties", ()))
            what = html.escape(route["summary"])
            rows.append(
                f"<tr><td>{method.upper()}</td><td><code>{path}</code></td><td>{what}</td><td>{fields}</td></tr>"
            )
    spaces = {name: document["components"]["schemas"][name] for name in ("Observation", "Action")}
    shown = html.escape(json.dumps(spaces, indent=1))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>jrl</title>'
        "<style>body{font:16px sans-serif;margin:2em}td{padding:.3em 1em .3em 0;vertical-align:top}</style>"
        "<h1>jrl</h1><p>A policy behind HTTP. Fields in bold are needed. <a href='/openapi.json'>OpenAPI</a>, "
        "<a href='/metrics'>metrics</a>.</p>"
        f"<table>{''.join(rows)}</table><h2>Spaces</h2><pre>{shown}</pre></html>"
    )
