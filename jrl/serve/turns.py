"""The routes of episodes of several agents: in a turn some or all of them act, and some may end."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jrl.serve import protocol
from jrl.serve.inference import zeros
from jrl.serve.protocol import Refused, Request, encoded
from jrl.serve.served import Facts, seen
from jrl.serve.table import Episode, Item
from jrl.serve.web import Reply
from jrl.types import PyTree, element

if TYPE_CHECKING:
    from jrl.serve.server import Server

_TURN = ("observations", "rewards", "terminated", "truncated", "actions", "log_probs", "step", "infos")


def turn(server: "Server", request: Request, reply: Reply, id: str) -> None:
    """Asks for the actions of the agents that are observed, and ends those that are said to have ended."""
    given = protocol.decoded(request)
    protocol.fields(given, _TURN, ("observations",))
    episode, facts = server.found(request, id)
    if not facts.agents:
        raise Refused(422, f"episode {id!r} has one agent: ask for its action (POST /v1/episodes/ID/action)")
    infos = server.table.infos.read(given)
    step = protocol.whole(given, "step")
    if step is not None and step == episode.steps - 1:  # asked again, since the answer was lost on its way
        if episode.pending:
            episode.answer = reply, request
        else:
            reply(encoded(episode.answer, request))
        return
    server.in_turn(episode, step)
    rewards = _rewards(facts, episode, given)
    ends = _ends(facts, episode, given)
    told, of = _of_agents(facts, episode, given["observations"], "observations"), facts.agents
    obs = {name: seen(of[name], x, f"observations/{name}", acts=name not in ends) for name, x in told.items()}
    obs |= {name: _last(facts, name, truncated=cut) for name, cut in ends.items() if name not in obs}
    taken = _taken(facts, episode, given, [name for name in obs if name not in ends])
    items, policies = list[Item](), set[int]()
    for name in sorted(obs, key=lambda name: facts.agents[name].number):
        agent = facts.agents[name]
        seat, reward = episode.seats[agent.number], rewards.pop(name, 0.0)
        if name in ends:
            items += _ended(episode, agent.number, obs[name], reward, truncated=ends[name])
            continue
        flags = {"first": not policies, "leads": agent.policy not in policies}
        policies.add(agent.policy)
        items.append(seat.item(obs[name], reward, **taken.get(name, {}), **flags))
    server.table.infos.add(infos)
    for name, reward in rewards.items():  # of those who wait
        episode.seats[facts.agents[name].number].reward += reward
    at, acting = episode.steps, [item for item in items if not item.final]
    episode.steps, episode.length = episode.steps + 1, episode.length + bool(acting)
    names = [facts.names[item.seat.agent] for item in acting]
    episode.answer = reply, request

    def done(actions: list[PyTree], version: int) -> None:
        answer, asked = episode.answer
        told = {name: x for name, x in zip(names, actions, strict=True) if name not in taken}
        episode.answer = {"actions": told, "version": version, "step": at}
        answer(encoded(episode.answer, asked))

    if acting:
        server.ask(items, done)
    else:
        inference = server.served(episode.policy).inference
        inference.ask(items)
        done([], inference.version)


def end(server: "Server", request: Request, reply: Reply, episode: Episode, given: Mapping[str, Any]) -> None:
    """Ends an episode with the last observations of the agents that have not ended."""
    protocol.fields(given, ("observations", "rewards", "truncated", "step", "infos"))
    facts, infos = server.served(episode.policy).facts, server.table.infos.read(given)
    truncated = protocol.flag(given, "truncated", False)
    server.in_turn(episode, protocol.whole(given, "step"))
    rewards = _rewards(facts, episode, given)
    told, of = _of_agents(facts, episode, given.get("observations"), "observations", ended=True), facts.agents
    obs = {name: seen(of[name], x, f"observations/{name}", acts=False) for name, x in told.items()}
    left = [name for name, agent in facts.agents.items() if _acts(episode, agent.number)]
    last = {name: obs[name] if name in obs else _last(facts, name, truncated=truncated) for name in left}
    items = list[Item]()
    for name, x in last.items():
        items += _ended(episode, facts.agents[name].number, x, rewards.get(name, 0.0), truncated=truncated)
    table = server.table
    table.ended += 1
    table.infos.add(infos)
    returns = {name: episode.seats[agent.number].total for name, agent in facts.agents.items()}
    answer = {"return": episode.total, "length": episode.length, "returns": returns}
    if episode.learns and episode.length:
        table.finished.append((episode.total, episode.length))
    table.close(episode, "has ended", answer)
    if items:
        server.served(episode.policy).inference.ask(items)
    reply(encoded(answer, request))


def reward(server: "Server", reply: Reply, request: Request, episode: Episode, given: Mapping[str, Any]) -> None:
    """Adds to the rewards of agents' latest actions."""
    protocol.fields(given, ("rewards", "infos"), ("rewards",))
    facts, infos = server.served(episode.policy).facts, server.table.infos.read(given)
    server.in_turn(episode, None)
    found = _rewards(facts, episode, given)
    for name, x in found.items():
        episode.seats[facts.agents[name].number].reward += x
    server.table.infos.add(infos)
    reply(encoded({"rewards": {name: episode.seats[facts.agents[name].number].reward for name in found}}, request))


def _acts(episode: Episode, agent: int) -> bool:
    """Returns whether an agent has acted and not ended."""
    return episode.seats[agent].steps > 0 and not episode.seats[agent].over


def _of_agents(facts: Facts, episode: Episode, given: Any, name: str, *, ended: bool = False) -> Mapping[str, Any]:
    """Returns a field by agent, of agents that have not ended, or with `ended` of any."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Refused(422, f"{name}: expected a mapping of agents, {', '.join(facts.names)[:200]}")
    for agent in given:
        if agent not in facts.agents:
            raise Refused(422, f"{name}: there is no agent {agent[:80]!r}: expected {', '.join(facts.names)[:200]}")
        if not ended and episode.seats[facts.agents[agent].number].over:
            raise Refused(409, f"{name}/{agent}: it has ended in episode {episode.id!r}: leave it out")
    return given


def _rewards(facts: Facts, episode: Episode, given: Mapping[str, Any]) -> dict[str, float]:
    found = _of_agents(facts, episode, given.get("rewards"), "rewards")
    rewards = {name: float(protocol.array(protocol.NUMBER, x, (), f"rewards/{name}")) for name, x in found.items()}
    for name, x in rewards.items():
        if x and not episode.seats[facts.agents[name].number].steps:
            raise Refused(409, f"rewards/{name}: it has no action yet that a reward could be for")
    return rewards


def _taken(
    facts: Facts, episode: Episode, given: Mapping[str, Any], acting: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns the part of an Item on actions that the client chose itself, by agent."""
    chosen, known = (_of_agents(facts, episode, given.get(name), name) for name in ("actions", "log_probs"))
    for what, names, whole, of in (
        ("actions", chosen, acting, "observations of those that act"),
        ("log_probs", known, chosen, "actions"),
    ):
        if lost := [name for name in names if name not in whole]:
            raise Refused(422, f"{what}/{lost[0]}: it is not among the {of}")
    found = {}
    for name, x in chosen.items():
        agent = facts.agents[name]
        if agent.own_action is None:
            raise Refused(422, facts.why)
        log_prob = protocol.array(protocol.NUMBER, known.get(name, 0.0), (), f"log_probs/{name}")
        action = agent.own_action(protocol.read(agent.action, x, f"actions/{name}"))
        found[name] = {"action": action, "log_prob": float(log_prob)}
    return found


def _ends(facts: Facts, episode: Episode, given: Mapping[str, Any]) -> dict[str, bool]:
    """Agents that end with this turn -> whether they are truncated."""
    found: dict[str, bool] = {}
    for kind in ("truncated", "terminated"):  # who is both is terminated
        flags = _of_agents(facts, episode, given.get(kind), kind)
        ended = {name: kind == "truncated" for name in flags if protocol.flag(flags, name, False)}
        found |= ended
    return found


def _last(facts: Facts, name: str, *, truncated: bool) -> PyTree:
    """Returns the last observation of an agent of whom none was sent: nobody looks at it behind a true end."""
    if truncated:
        raise Refused(400, f"observations/{name} is missing: what is truncated ends with the observation after it")
    return zeros(element(facts.agents[name].observation))


def _ended(episode: Episode, agent: int, obs: PyTree, reward: float, *, truncated: bool) -> list[Item]:
    """Returns the last item of an agent; none where nobody learns from it."""
    seat, begun = episode.seats[agent], _acts(episode, agent)
    item = seat.item(obs, reward, terminated=not truncated, truncated=truncated, final=True)
    seat.over = True
    return [item] if begun and episode.learns else []
