"""The routes of clients that act by themselves: they get the weights, and tell of the steps that they chose by them."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jrl.serve import openapi, protocol
from jrl.serve.protocol import NPZ, Refused, Request, Response, encoded
from jrl.serve.served import STEPS, at, came
from jrl.serve.table import Episode, Item
from jrl.serve.web import Reply

if TYPE_CHECKING:
    from jrl.serve.server import Server

_CHOSEN = ("actions", "log_probs", "versions")
_Answer = Callable[[dict[str, Any], int, bytes], Response]


def played(server: "Server", request: Request, reply: Reply) -> None:
    """Takes steps [K, N] of N episodes whose actions the client chose, and tells which of them came too late."""
    given = protocol.decoded(request)
    protocol.fields(given, (*STEPS, *_CHOSEN, "memory"), (*STEPS[:2], *_CHOSEN))
    episodes, facts = server.several(request, given)
    inference, items = server.served(episodes[0].policy).inference, list[Item]()
    version, count = given["versions"], len(episodes)
    rows = len(version) if isinstance(version, list | np.ndarray) and np.ndim(version) else 0
    if not 1 <= rows * count <= openapi.MOST:
        raise Refused(422, f"versions: expected 1 to {openapi.MOST} steps, got {rows}")
    steps = came(facts, given, (rows, count))
    chosen = _chosen(server, episodes, given, (rows, count))
    late = _late(server, episodes, chosen["version"])
    for k in range(rows):
        obs, rewards, truncated, over, last = at(steps, k)
        own = [at(chosen, (k, i)) for i in range(count)]
        found = server.items(episodes, obs, rewards, truncated, over, last, own)
        episodes = [item.seat.episode for item in found if not item.final]
        items += found
    ids = [episode.id for episode in episodes]
    # the learner may be slower than they are: the answer waits until these steps are where it takes them
    answer = lambda: {"episode_ids": ids, "version": inference.version, "too_old": late}
    told = lambda: reply(encoded(answer(), request))
    learned = [item for item in items if item.seat.episode.learns]
    if learned:
        inference.ask([*learned[:-1], learned[-1]._replace(told=told)])
    else:
        told()


def _chosen(
    server: "Server", episodes: list[Episode], given: Mapping[str, Any], lead: tuple[int, int]
) -> dict[str, Any]:
    """Reads what a body tells of the actions [K, N, *] for their Items. Raises Refused."""
    facts, inference, local = server.served(episodes[0].policy)
    action = protocol.read(facts.policy_action or facts.action, given["actions"], "actions", lead)
    log_prob = protocol.array(protocol.NUMBER, given["log_probs"], lead, "log_probs")
    version = protocol.array(protocol.WHOLE, given["versions"], lead, "versions")
    memory = local.remembered(given.get("memory"), lead)
    # without learning they go back to older weights where the best checkpoint is taken away
    if (version < 0).any() or (facts.learns and version.max() > inference.version):
        raise Refused(409, f"versions: there are none beyond {inference.version} here: get the weights again")
    return {"action": action, "log_prob": log_prob, "version": version, "carry": memory}


def _late(server: "Server", episodes: list[Episode], version: np.ndarray) -> int:
    """Counts the steps [K, N] that nobody will learn from, since their weights are too old by now."""
    facts, inference, _ = server.served(episodes[0].policy)
    if facts.max_lag is None:
        return 0
    learns = np.array([episode.learns for episode in episodes])
    late = int(((version < inference.version - facts.max_lag) & learns).sum())
    server.table.too_old += late
    return late


def program(server: "Server", request: Request, reply: Reply) -> None:
    """Answers with how numpy acts by the weights."""
    _local(server, request, reply, lambda told, version, file: encoded(told))


def weights(server: "Server", request: Request, reply: Reply) -> None:
    """Answers with the weights, where they are others than those of the version that the client has."""
    least = request.query.get("newer_than", "-1")
    if not re.fullmatch(r"-1|\d{1,15}", least):
        raise Refused(422, f"newer_than: expected a version, got {least[:80]}")
    new = lambda version: version != int(least)  # older ones, too: see `_chosen`
    answer = lambda told, version, file: Response(200, file, NPZ) if new(version) else Response(204, b"", NPZ)
    _local(server, request, reply, answer)


def _local(server: "Server", request: Request, reply: Reply, answer: _Answer) -> None:
    """Answers with what a client needs that acts by itself, once that is made."""
    name, (facts, inference, local) = server.named(request.query)
    if facts.agents:
        raise Refused(422, f"policy {name} is of several agents: let the server act (inference_mode: remote)")
    say = lambda response: server.web.soon(reply, response)
    local.soon(inference, lambda *made: say(answer(*made)), lambda e: say(protocol.refusal(e)))
