"""The routes of episodes of several agents: in a turn some or all of them act, and some may end."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jrl.serve import bodies, space_values
from jrl.serve.inference import zeros
from jrl.serve.policy_info import PolicyInfo, observed
from jrl.serve.space_values import NUMBER
from jrl.serve.table import Answer, Episode, Item, Order
from jrl.serve.wire import Refused
from jrl.types import PyTree, element

if TYPE_CHECKING:
    from jrl.serve.server import Call, Server


class _Turn(NamedTuple):
    """A turn that was read and found right, by agent; the episode has not changed yet."""

    episode: Episode
    info: PolicyInfo
    obs: Mapping[str, PyTree]  # of agents that act, and of agents that end
    ends: Mapping[str, bool]  # agents that end -> whether they are truncated
    own: Mapping[str, Mapping[str, Any]]  # fields of an Item about actions that the client chose itself
    rewards: dict[str, float]
    infos: Mapping[str, float]


def turn(server: "Server", call: "Call", id: str) -> Awaitable[dict[str, Any]]:
    """Asks for the actions of the agents that are observed, and ends the agents that are said to have ended."""
    body = bodies.read(bodies.TurnRequest, call.fields)
    episode, info = _find(server, call, id)
    if body.step is not None and body.step == episode.steps - 1 and episode.answer is not None:
        return episode.answer.get()  # asked again, since the answer was lost on its way
    server.check_turn(episode, body.step)
    return _take(server, [_read(server, episode, info, body)])[0].get()


def turns(server: "Server", call: "Call") -> Awaitable[dict[str, Any]]:
    """Asks for the turns of many episodes, as `turn` for each; if one of them is refused, none counts."""
    given, most = bodies.read(bodies.TurnsRequest, call.fields).turns, server.most_episodes
    if not 1 <= len(given) <= most:
        raise Refused(422, f"turns: expected a mapping of 1 to {most} episodes, by their ids")
    found: list[_Turn] = []
    for id, fields in given.items():
        try:
            if not isinstance(fields, Mapping):
                raise Refused(422, "expected a mapping, the fields of a turn")
            body = bodies.read(bodies.TurnRequest, {name: x for name, x in fields.items() if x is not None})
            episode, info = _find(server, call, id)
            server.check_turn(episode, body.step)
            if found and episode.policy != found[0].episode.policy:
                raise Refused(422, "it follows another policy: send a request for each")
            found.append(_read(server, episode, info, body))
        except Refused as e:
            raise Refused(e.status, f"turns/{id[:80]}: {e.message}") from None
    answers = _take(server, found)

    def fields_of_all(actions: list[PyTree], version: int) -> dict[str, Any]:
        each = {one.episode.id: answer.fields(actions, version) for one, answer in zip(found, answers, strict=True)}
        return {"turns": each, "version": version}

    return Answer(answers[0].order, fields_of_all).get()


def end(server: "Server", episode: Episode, info: PolicyInfo, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Ends an episode with the last observations of the agents that have not ended."""
    body, table = bodies.read(bodies.AgentEndRequest, fields), server.table
    table.infos.check(body.infos)
    server.check_turn(episode, body.step)
    rewards = _rewards(info, episode, body.rewards)
    given = _of_agents(info, episode, body.observations, "observations", ended=True)
    obs = {name: observed(info.agents[name], x, f"observations/{name}", acts=False) for name, x in given.items()}
    left = [name for name, agent in info.agents.items() if _is_under_way(episode, agent.number)]
    last = {name: obs[name] if name in obs else _last(info, name, truncated=body.truncated) for name in left}
    items = list[Item]()
    for name, x in last.items():
        items += _ended(episode, info.agents[name].number, x, rewards.get(name, 0.0), truncated=body.truncated)
    table.ended += 1
    table.infos.add(body.infos)
    returns = {name: episode.seats[agent.number].total for name, agent in info.agents.items()}
    answer = {"return": episode.total, "length": episode.length, "returns": returns}
    if episode.learns and episode.length:
        table.finished.append((episode.total, episode.length))
    table.close(episode, "has ended", answer)
    if items:
        server.by_name[episode.policy].inference.ask(items)
    return answer


def reward(server: "Server", episode: Episode, info: PolicyInfo, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to the rewards of agents' latest actions."""
    body = bodies.read(bodies.AgentRewardRequest, fields)
    server.table.infos.check(body.infos)
    server.check_turn(episode, None)
    found = _rewards(info, episode, body.rewards)
    for name, x in found.items():
        episode.seats[info.agents[name].number].reward += x
    server.table.infos.add(body.infos)
    return {"rewards": {name: episode.seats[info.agents[name].number].reward for name in found}}


def _find(server: "Server", call: "Call", id: str) -> tuple[Episode, PolicyInfo]:
    episode, info = server.find(call, id)
    if not info.agents:
        raise Refused(422, f"episode {id!r} has one agent: ask for its action (POST /v1/episodes/ID/action)")
    return episode, info


def _read(server: "Server", episode: Episode, info: PolicyInfo, body: bodies.TurnRequest) -> _Turn:
    """Returns a turn of a body. Raises Refused: a value is wrong; nothing has changed then."""
    server.table.infos.check(body.infos)
    rewards = _rewards(info, episode, body.rewards)
    ends: dict[str, bool] = {}
    for kind, flags in (("truncated", body.truncated), ("terminated", body.terminated)):  # both: terminated
        of_agents = _of_agents(info, episode, flags, kind)
        ends |= {name: kind == "truncated" for name, is_over in of_agents.items() if is_over}
    given, agents = _of_agents(info, episode, body.observations, "observations"), info.agents
    obs = {name: observed(agents[name], x, f"observations/{name}", acts=name not in ends) for name, x in given.items()}
    obs |= {name: _last(info, name, truncated=is_cut) for name, is_cut in ends.items() if name not in obs}
    own = _own(info, episode, body, [name for name in obs if name not in ends])
    return _Turn(episode, info, obs, ends, own, rewards, body.infos)


def _items(server: "Server", one: _Turn) -> list[Item]:
    """Returns the items of a turn, which counts from now on."""
    episode, info, rewards = one.episode, one.info, one.rewards
    items, policies = list[Item](), set[int]()
    for name in sorted(one.obs, key=lambda name: info.agents[name].number):
        agent = info.agents[name]
        seat, reward = episode.seats[agent.number], rewards.pop(name, 0.0)
        if name in one.ends:
            items += _ended(episode, agent.number, one.obs[name], reward, truncated=one.ends[name])
            continue
        flags = {"first": not policies, "leads": agent.policy not in policies}
        policies.add(agent.policy)
        items.append(seat.item(one.obs[name], reward, **one.own.get(name, {}), **flags))
    server.table.infos.add(one.infos)
    for name, reward in rewards.items():  # of agents that wait
        episode.seats[info.agents[name].number].reward += reward
    episode.steps += 1
    episode.length += any(not item.final for item in items)
    return items


def _take(server: "Server", found: Sequence[_Turn]) -> list[Answer]:
    """Orders the actions of turns in one request; returns the answer of each, which its episode keeps."""
    steps = [one.episode.steps for one in found]
    each = [_items(server, one) for one in found]
    acting = [[item for item in items if not item.final] for items in each]
    asked = [item for items in each for item in items]
    inference = server.by_name[found[0].episode.policy].inference
    order = server.order(asked) if asked else Order(0, inference.version)
    answers, first = [], 0
    for one, step, items in zip(found, steps, acting, strict=True):
        # the places of an episode's agents in the order; actions that the client chose are not sent back
        names = [one.info.names[item.seat.agent] for item in items]
        places = {name: first + i for i, name in enumerate(names) if name not in one.own}
        first += len(items)

        def fields(
            actions: list[PyTree], version: int, places: Mapping[str, int] = places, step: int = step
        ) -> dict[str, Any]:
            chosen = {name: actions[place] for name, place in places.items()}
            return {"actions": chosen, "version": version, "step": step}

        one.episode.answer = Answer(order, fields)
        answers.append(one.episode.answer)
    return answers


def _is_under_way(episode: Episode, agent: int) -> bool:
    """Returns whether an agent has acted and not ended."""
    return episode.seats[agent].steps > 0 and not episode.seats[agent].over


def _of_agents(
    info: PolicyInfo, episode: Episode, given: Mapping[str, Any], name: str, *, ended: bool = False
) -> Mapping[str, Any]:
    """Returns a field by agent. Raises Refused: an agent is not known, or, without `ended`, has ended."""
    for agent in given:
        if agent not in info.agents:
            raise Refused(422, f"{name}: there is no agent {agent[:80]!r}: expected {', '.join(info.names)[:200]}")
        if not ended and episode.seats[info.agents[agent].number].over:
            raise Refused(409, f"{name}/{agent}: it has ended in episode {episode.id!r}: leave it out")
    return given


def _rewards(info: PolicyInfo, episode: Episode, given: Mapping[str, Any]) -> dict[str, float]:
    found = _of_agents(info, episode, given, "rewards")
    rewards = {name: float(space_values.array(NUMBER, x, (), f"rewards/{name}")) for name, x in found.items()}
    for name, x in rewards.items():
        seat = episode.seats[info.agents[name].number]
        if x and not seat.steps:
            raise Refused(409, f"rewards/{name}: it has no action yet that a reward could be for")
        space_values.summed(seat.reward, x, f"rewards/{name}")
    return rewards


def _own(
    info: PolicyInfo, episode: Episode, body: bodies.TurnRequest, acting: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns the fields of Items about actions that the client chose itself, by agent."""
    chosen = _of_agents(info, episode, body.actions, "actions")
    known = _of_agents(info, episode, body.log_probs, "log_probs")
    for field, names, whole, among in (
        ("actions", chosen, acting, "observations of those that act"),
        ("log_probs", known, chosen, "actions"),
    ):
        if lost := [name for name in names if name not in whole]:
            raise Refused(422, f"{field}/{lost[0]}: it is not among the {among}")
    found = {}
    for name, x in chosen.items():
        agent = info.agents[name]
        if agent.own_action is None:
            raise Refused(422, info.why)
        log_prob = space_values.array(NUMBER, known.get(name, 0.0), (), f"log_probs/{name}")
        action = agent.own_action(space_values.read(agent.action, x, f"actions/{name}"))
        found[name] = {"action": action, "log_prob": float(log_prob)}
    return found


def _last(info: PolicyInfo, name: str, *, truncated: bool) -> PyTree:
    """Returns zeros for a last observation that was not sent: nothing looks at it behind a true end."""
    if truncated:
        raise Refused(400, f"observations/{name} is missing: what is truncated ends with the observation after it")
    return zeros(element(info.agents[name].observation))


def _ended(episode: Episode, agent: int, obs: PyTree, reward: float, *, truncated: bool) -> list[Item]:
    """Returns the last item of an agent; none if nothing is learned from it."""
    seat, was_under_way = episode.seats[agent], _is_under_way(episode, agent)
    item = seat.item(obs, reward, terminated=not truncated, truncated=truncated, final=True)
    seat.over = True
    return [item] if was_under_way and episode.learns else []
