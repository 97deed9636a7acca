"""The routes of episodes of several agents: in a turn some or all of them act, and some may end."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Turn(NamedTuple):
    """What a body tells of a turn, by agent; it was read and found right, and nothing has come of it yet."""

    episode: Episode
    facts: Facts
    obs: Mapping[str, PyTree]  # of those that act, and of those that end
    ends: Mapping[str, bool]  # agents that end -> whether they are truncated
    taken: Mapping[str, Mapping[str, Any]]  # the part of an Item on actions that the client chose itself
    rewards: dict[str, float]
    infos: Mapping[str, float]


def turn(server: "Server", request: Request, reply: Reply, id: str) -> None:
    """Asks for the actions of the agents that are observed, and ends those that are said to have ended."""
    given = protocol.decoded(request)
    protocol.fields(given, _TURN, ("observations",))
    episode, facts = _of_several(server, request, id)
    step = protocol.whole(given, "step")
    if step is not None and step == episode.steps - 1:  # asked again, since the answer was lost on its way
        if episode.pending:
            episode.answer = reply, request
        else:
            reply(encoded(episode.answer, request))
        return
    server.in_turn(episode, step)
    told = _read(server, episode, facts, given)
    episode.answer = reply, request
    _ask(server, [told], lambda answers, version: None)


def turns(server: "Server", request: Request, reply: Reply) -> None:
    """Asks for the turns of many episodes, as `turn` for each; where one is refused, none counts."""
    given = protocol.decoded(request)
    protocol.fields(given, ("turns",), ("turns",))
    bodies, most = given["turns"], server.most_episodes
    if not isinstance(bodies, Mapping) or not 1 <= len(bodies) <= most:
        raise Refused(422, f"turns: expected a mapping of 1 to {most} episodes, by their ids")
    found: list[_Turn] = []
    for id, body in bodies.items():
        try:
            if not isinstance(body, Mapping):
                raise Refused(422, "expected what a turn has, a mapping")
            protocol.fields(body, _TURN, ("observations",))
            episode, facts = _of_several(server, request, id)
            server.in_turn(episode, protocol.whole(body, "step"))
            if found and episode.policy != found[0].episode.policy:
                raise Refused(422, "it follows another policy: send a request for each")
            found.append(_read(server, episode, facts, body))
        except Refused as e:
            raise Refused(e.status, f"turns/{id[:80]}: {e.message}") from None
    for told in found:
        told.episode.answer = None

    def done(answers: list[dict[str, Any]], version: int) -> None:
        by_episode = {told.episode.id: one for told, one in zip(found, answers, strict=True)}
        reply(encoded({"turns": by_episode, "version": version}, request))

    _ask(server, found, done)


def _of_several(server: "Server", request: Request, id: str) -> tuple[Episode, Facts]:
    """Returns an episode with several agents, and what acts in it. Raises Refused: it has one, or as `Table.find`."""
    episode, facts = server.found(request, id)
    if not facts.agents:
        raise Refused(422, f"episode {id!r} has one agent: ask for its action (POST /v1/episodes/ID/action)")
    return episode, facts


def _read(server: "Server", episode: Episode, facts: Facts, given: Mapping[str, Any]) -> _Turn:
    """Reads the body of a turn. Raises Refused where something is wrong with it; nothing has changed then."""
    infos = server.table.infos.read(given)
    rewards = _rewards(facts, episode, given)
    ends = _ends(facts, episode, given)
    told, of = _of_agents(facts, episode, given["observations"], "observations"), facts.agents
    obs = {name: seen(of[name], x, f"observations/{name}", acts=name not in ends) for name, x in told.items()}
    obs |= {name: _last(facts, name, truncated=cut) for name, cut in ends.items() if name not in obs}
    taken = _taken(facts, episode, given, [name for name in obs if name not in ends])
    return _Turn(episode, facts, obs, ends, taken, rewards, infos)


def _items(server: "Server", told: _Turn) -> list[Item]:
    """Returns the items of a turn, which counts from now on."""
    episode, facts, rewards = told.episode, told.facts, told.rewards
    items, policies = list[Item](), set[int]()
    for name in sorted(told.obs, key=lambda name: facts.agents[name].number):
        agent = facts.agents[name]
        seat, reward = episode.seats[agent.number], rewards.pop(name, 0.0)
        if name in told.ends:
            items += _ended(episode, agent.number, told.obs[name], reward, truncated=told.ends[name])
            continue
        flags = {"first": not policies, "leads": agent.policy not in policies}
        policies.add(agent.policy)
        items.append(seat.item(told.obs[name], reward, **told.taken.get(name, {}), **flags))
    server.table.infos.add(told.infos)
    for name, reward in rewards.items():  # of those who wait
        episode.seats[facts.agents[name].number].reward += reward
    episode.steps += 1
    episode.length += any(not item.final for item in items)
    return items


def _ask(server: "Server", found: Sequence[_Turn], done: Callable[[list[dict[str, Any]], int], None]) -> None:
    """Orders the actions of turns; `done` gets the answer of each, which who asks for one of them alone gets, too."""
    steps = [told.episode.steps for told in found]
    each = [_items(server, told) for told in found]
    names = [
        [told.facts.names[item.seat.agent] for item in items if not item.final]
        for told, items in zip(found, each, strict=True)
    ]
    asked = [item for items in each for item in items]

    def answered(actions: list[PyTree], version: int) -> None:
        left, answers = iter(actions), []
        for told, step, acting in zip(found, steps, names, strict=True):
            chosen = {name: action for name, action in zip(acting, left) if name not in told.taken}
            answers.append({"actions": chosen, "version": version, "step": step})
            waiting, told.episode.answer = told.episode.answer, answers[-1]
            if waiting is not None:
                answer, request = waiting
                answer(encoded(answers[-1], request))
        done(answers, version)

    if any(names):
        server.ask(asked, answered)
    else:
        inference = server.served(found[0].episode.policy).inference
        if asked:
            inference.ask(asked)
        answered([], inference.version)


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
        seat = episode.seats[facts.agents[name].number]
        if x and not seat.steps:
            raise Refused(409, f"rewards/{name}: it has no action yet that a reward could be for")
        protocol.summed(seat.reward, x, f"rewards/{name}")
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
