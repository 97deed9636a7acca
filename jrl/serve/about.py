"""Routes about the server: its policies, its counts, its routes."""

from collections.abc import Mapping
from typing import Any

from jrl.data.spaces_json import plain, space_to_json
from jrl.serve import openapi
from jrl.serve.served import Facts, Served
from jrl.serve.table import Table
from jrl.serve.web import Web
from jrl.types import Space


def policies(served: Mapping[str, Served]) -> dict[str, Any]:
    """Tells of each policy its algorithm, spaces and version; of several agents the spaces of each."""
    found = {}
    for name, (facts, inference, _) in served.items():
        told = {"algorithm": facts.algorithm, "learns": facts.learns, "remembers": facts.remembers}
        found[name] = {**told, **_spaces(facts), "version": inference.version}
    return found


def _spaces(facts: Facts) -> dict[str, Any]:
    of = lambda observation, action: {"observation": _json(observation), "action": _json(action)}
    if not facts.agents:
        return of(facts.observation, facts.action)
    return {"agents": {name: of(agent.observation, agent.action) for name, agent in facts.agents.items()}}


def _json(space: Space) -> Any:
    return plain(space_to_json(space))


def metrics(table: Table, web: Web, served: Mapping[str, Served], uptime_s: float) -> str:
    """Counts, as Prometheus reads them."""
    found: dict[str, tuple[str, float]] = {
        "requests_total": ("counter", web.requests),
        "refused_total": ("counter", web.refused),
        "connections": ("gauge", web.clients),
        "episodes": ("gauge", len(table.episodes)),
        "episodes_begun_total": ("counter", table.begun),
        "episodes_ended_total": ("counter", table.ended),
        "episodes_failed_total": ("counter", table.failed),
        "inferences_total": ("counter", sum(one.inference.count for one in served.values())),
        "uptime_seconds": ("gauge", uptime_s),
    }
    if table.columns is not None:
        found["steps_dropped_total"] = "counter", table.columns.dropped
    lines = [f"# TYPE jrl_{name} {kind}\njrl_{name} {value:.12g}\n" for name, (kind, value) in found.items()]
    lines += ["# TYPE jrl_weights_version gauge\n"]
    lines += [f'jrl_weights_version{{policy="{name}"}} {one.inference.version}\n' for name, one in served.items()]
    for name, of in (("wait_seconds", lambda one: one.waits), ("inference_seconds", lambda one: one.calls)):
        lines.append(f"# TYPE jrl_{name} histogram\n")
        lines += [of(one.inference).text(f"jrl_{name}", f'policy="{policy}"') for policy, one in served.items()]
    return "".join(lines)


def document(web: Web, served: Mapping[str, Served], most: int) -> dict[str, Any]:
    """Returns the OpenAPI description of a server of these policies, which takes `most` episodes in a request."""
    seen, taken = list[Space](), list[Space]()
    agents = dict[str, Any]()
    for one in served.values():
        agents |= one.facts.agents
        of = one.facts.agents.values() or (one.facts,)
        seen += [part.observation for part in of]
        taken += [part.action for part in of]
    return openapi.document(seen, taken, agents, most=most, token=web.limits.token is not None)
