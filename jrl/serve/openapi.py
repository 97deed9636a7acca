"""What can be asked of the server, for machines (OpenAPI 3.1) and as a page for people."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.types import Box, Dict, Discrete, Leaf, MultiDiscrete, Space, Tuple

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_STEP = {"type": "integer", "minimum": 0, "description": "number of the step; a request that is repeated counts once"}
_OF_POLICY = {"name": "policy", "in": "query", "schema": {"type": "string"}}
_NEWER = {"name": "newer_than", "in": "query", "schema": {"type": "integer", "minimum": -1, "maximum": 10**15 - 1}}
_REWARD = {"type": "number", "description": "that came since the latest action"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 128}
MOST = 256  # steps of clients that act by themselves in one request, so that others do not wait for it
_VERSION = {"type": "integer", "minimum": 0, "description": "updates before the weights that chose"}


def schema(space: Space) -> dict[str, Any]:
    """The JSON Schema of an element of a space."""
    match space:
        case Dict():
            parts = {name: schema(part) for name, part in space.items}
            return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        case Tuple():
            each = [schema(part) for part in space.items]
            return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
    return _leaf(space)


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


def _many(inner: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": inner, "minItems": 1, "maxItems": most}


def _object(properties: dict[str, Any], *required: str, closed: bool = True) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "required": list(required)}
    return {**found, "additionalProperties": False} if closed else found


def _json(inner: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": inner}}}


def _route(
    name: str,
    summary: str,
    body: dict[str, Any] | None,
    answer: dict[str, Any],
    *,
    status: str = "200",
    of_one: bool = False,
    query: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    refused = {
        "description": "the request cannot be answered as it is asked",
        **_json({"$ref": "#/components/schemas/Error"}),
    }
    found: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {status: {"description": "the answer", **answer}, "4XX": refused},
    }
    if of_one or query:
        found["parameters"] = [_ID] if of_one else list(query)
    if name == "weights":
        found["responses"]["204"] = {"description": "they are of this version"}
    if body is not None:
        found["requestBody"] = {"required": bool(body["required"]), **_json(body)}
    return found


def _any_of(kinds: Sequence[Space]) -> dict[str, Any]:
    """An element of one of several spaces."""
    found = [schema(space) for space in dict.fromkeys(kinds)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def document(
    observations: Sequence[Space], actions: Sequence[Space], agents: Mapping[str, Any] = {}, *, most: int
) -> dict[str, Any]:
    """The description of a server of policies with these spaces, which takes `most` episodes in a request.

    Args:
      observations, actions: of all policies and agents.
      agents: name -> what has `observation` and `action`, where episodes have several agents.
    """
    obs, act = ({"$ref": f"#/components/schemas/{name}"} for name in ("Observation", "Action"))
    number = {"type": "number"}
    by_agent = lambda of: _object({name: of(agent) for name, agent in agents.items()})
    seen_of, taken_of = (
        by_agent(lambda one, what=what: schema(getattr(one, what))) for what in ("observation", "action")
    )
    rewards, flags = (by_agent(lambda one, kind=kind: {"type": kind}) for kind in ("number", "boolean"))
    turn = {"observations": seen_of, "rewards": rewards, "terminated": flags, "truncated": flags}
    ended = {"return": number, "length": {"type": "integer", "minimum": 0}, **({"returns": rewards} if agents else {})}
    outcome = _object(ended, "return", "length")
    asked = {"observation": obs, "reward": _REWARD, "step": _STEP}
    chosen = {"action": act, "version": _VERSION, "step": _STEP}
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    page = {"content": {"text/html": {"schema": {"type": "string"}}}}
    begin = {
        "episode_id": _NAME,
        "training_enabled": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 1, "maximum": most},
        "policy": _NAME,
    }
    steps = {
        "episode_ids": _many(_NAME, most),
        "observations": _many(obs, most),
        "rewards": _many(number, most),
        "terminated": _many({"type": "boolean"}, most),
        "truncated": _many({"type": "boolean"}, most),
        "final_observations": _many(obs, most),
    }
    rows = lambda inner: _many(_many(inner, MOST), MOST)
    played = {
        **{name: rows(part["items"]) for name, part in steps.items() if name != "episode_ids"},
        "episode_ids": _many(_NAME, most),
        "actions": rows({"description": "in the policy's units"}),
        "log_probs": rows(number),
        "versions": rows(_VERSION),
        "memory": {"description": "arrays [K, N, ...] by number: what a policy that remembers did before each step"},
    }
    weights = {"content": {"application/x-npz": {"schema": {"type": "string", "format": "binary"}}}}
    names = {"type": "array", "items": _NAME, "description": "of the agents, where an episode has several"}
    begun = {"agents": names, "episode_id": _NAME, "episode_ids": _many(_NAME, most), "version": _VERSION}
    together = {"episode_ids": _many(_NAME, most), "actions": _many(act, most), "version": _VERSION}
    paths = {
        "/v1/episodes": {
            "post": _route(
                "begin", "Begins an episode, or `count` of them.", _object(begin), _json(_object(begun, "version")),
                status="201",
            )
        },
        "/v1/episodes/{id}/action": {
            "post": _route(
                "action", "Asks for the action at an observation.", _object(asked, "observation"),
                _json(_object(chosen, *chosen)), of_one=True,
            )
        },
        "/v1/episodes/{id}/log": {
            "post": _route(
                "log", "Tells of an action that the client chose itself.",
                _object({**asked, "action": act, "log_prob": number}, "observation", "action"),
                _json(_object({"step": _STEP}, "step")), of_one=True,
            )
        },
        "/v1/episodes/{id}/reward": {
            "post": _route(
                "reward", "Adds to the reward of the latest action.",
                _object({"rewards": rewards}, "rewards") if agents else _object({"reward": number}, "reward"),
                _json(_object({"rewards": rewards} if agents else {"reward": number})), of_one=True,
            )
        },
        "/v1/episodes/{id}/end": {
            "post": _route(
                "end", "Ends an episode with its last observation.",
                _object({"observations": seen_of, "rewards": rewards, "truncated": {"type": "boolean"}, "step": _STEP})
                if agents
                else _object({**asked, "truncated": {"type": "boolean"}}, "observation"),
                _json(outcome), of_one=True,
            )
        },
        "/v1/episodes/{id}/turn": {
            "post": _route(
                "turn", "Of several agents: asks for the actions of some, and ends some.",
                _object({**turn, "actions": taken_of, "log_probs": rewards, "step": _STEP}, "observations"),
                _json(_object({"actions": taken_of, "version": _VERSION, "step": _STEP}, "actions", "version", "step")),
                of_one=True,
            )
        },
        "/v1/steps": {
            "post": _route(
                "steps", "A step of many episodes; in the place of one that has ended another begins.",
                _object(steps, "episode_ids", "observations"), _json(_object(together, *together)),
            )
        },
        "/v1/played": {
            "post": _route(
                "played", "Tells of steps [K, N] whose actions the client chose by weights from here.",
                _object(played, "episode_ids", "observations", "actions", "log_probs", "versions"),
                _json(_object({"episode_ids": _many(_NAME, most), "version": _VERSION}, "episode_ids", "version")),
            )
        },
        "/v1/program": {
            "get": _route(
                "program", "Tells how numpy acts by the weights.", None, _json({"type": "object"}), query=[_OF_POLICY]
            )
        },
        "/v1/weights": {
            "get": _route(
                "weights", "The weights, where they are not of this version; else 204.", None, weights,
                query=[_OF_POLICY, _NEWER],
            )
        },
        "/v1/action": {
            "post": _route(
                "once", "Asks for an action without an episode, of a policy that remembers nothing.",
                _object({"observation": obs, "policy": _NAME}, "observation"),
                _json(_object({"action": act, "version": _VERSION}, "action", "version")),
            )
        },
        "/v1/policies": {
            "get": _route("policies", "Tells of the policies and their spaces.", None, _json({"type": "object"}))
        },
        "/v1/health": {"get": _route("health", "Tells that the server answers.", None, _json({"type": "object"}))},
        "/metrics": {"get": _route("metrics", "Counts, as Prometheus reads them.", None, text)},
        "/openapi.json": {"get": _route("openapi", "This description.", None, _json({"type": "object"}))},
        "/docs": {"get": _route("docs", "This description, for people.", None, page)},
    }  # fmt: skip
    error = _object({"error": {"type": "string", "description": "what is wrong, in words"}}, "error")
    schemas = {"Observation": _any_of(observations), "Action": _any_of(actions), "Error": error}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jrl", "version": "1", "description": "Episodes that clients play, and a policy that acts."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def page(document: dict[str, Any]) -> str:
    """The description as a page for people."""
    rows = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
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
