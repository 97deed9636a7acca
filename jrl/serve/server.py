"""The routes: requests of clients, and their answers.

An episode is a mapping of agents. Requests of an episode of one agent are turns of the agent `ALONE`.
"""

import asyncio
import functools
import inspect
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from jrl import spaces
from jrl.serve import bodies, openapi, space_values, wire
from jrl.serve.bodies import AgentEndRequest, TurnRequest
from jrl.serve.client_inference import ClientInference
from jrl.serve.http_server import Address, HttpServer
from jrl.serve.inference import Inference, zeros
from jrl.serve.openapi import OPERATIONS, Operation
from jrl.serve.space_values import FLAG, NUMBER, WHOLE
from jrl.serve.table import UNLEARNED, Answer, Episode, Item, Order, Seat, Table
from jrl.serve.wire import NPZ, Refused
from jrl.spaces_json import plain, space_to_json
from jrl.types import Dict, Leaf, PyTree, Space, element

ALONE = ""  # name of the agent of an episode that has one
_LARGE = 2**18  # bytes of a body that is decoded in another thread, so that other clients do not wait for it
# an episode of clients without that header belongs to whoever knows its id, which nobody must be able to guess
_NAMELESS = (
    "episode_id: a client that names an episode must say that it is its own: send the header Jrl-Client, the same in "
    "all requests, or leave episode_id out, and the server gives one"
)


class Agent(NamedTuple):
    """An agent of a policy's episodes, as its clients see it."""

    number: int
    policy: int  # number of the policy that it follows
    observation: Space
    action: Space
    policy_action: Space  # in the policy's units
    # from actions of the environment to actions of the policy, [*]; None: clients may not choose
    own_action: Callable[[PyTree], PyTree] | None


class Policy(NamedTuple):
    """A policy that clients may ask."""

    algorithm: str
    agents: Mapping[str, Agent]  # by name; ALONE if an episode has one
    inference: Inference
    client_inference: ClientInference
    learns: bool
    why: str  # reason if clients may not choose actions
    remembers: bool = False  # actions depend on earlier observations of an episode
    max_lag: int | None = None  # updates that weights may be behind when their steps are learned from; None: any number

    @property
    def is_single(self) -> bool:
        """Returns whether an episode has one agent."""
        return ALONE in self.agents


class Call(NamedTuple):
    """A request whose body was decoded."""

    fields: dict[str, Any]
    client: str  # "" without a name
    query: Mapping[str, str]


class _Fields(NamedTuple):
    """The fields of a `TurnRequest`: a request of an episode of one agent as a turn."""

    observations: Mapping[str, Any]
    rewards: Mapping[str, float]
    step: int | None
    infos: Mapping[str, float]
    actions: Mapping[str, Any] = {}
    log_probs: Mapping[str, Any] = {}
    terminated: Mapping[str, bool] = {}
    truncated: Mapping[str, bool] = {}


class _Turn(NamedTuple):
    """A turn of some agents of an episode, by name: values that are right. The episode has not changed yet."""

    episode: Episode
    obs: Mapping[str, PyTree]  # of agents that act, and of agents that end
    rewards: Mapping[str, float]
    own: Mapping[str, Mapping[str, Any]] = {}  # fields of an Item about actions that the client chose
    ends: Mapping[str, bool] = {}  # agents that end -> whether they are truncated
    infos: Mapping[str, float] = {}


class Server:
    """Answers the requests of clients by the policies of `by_name`: the first is the default.

    Routes are called with the table's lock held, in the server's thread. They return the fields of the answer, a
    response, or what to wait for until there are such fields.

    Args:
      table, address: see there.
      is_interrupted: whether the run is to end; then all connections are closed.
    """

    # routes have no docstring: `openapi.OPERATIONS` has a sentence and the fields of each

    def __init__(self, table: Table, address: Address, is_interrupted: Callable[[], bool] = lambda: False):
        self.table, self.address, self._cfg = table, address, address.cfg
        self.by_name: dict[str, Policy] = {}
        routes = [Route(o.path, _Endpoint(self, o), methods=[o.method]) for o in OPERATIONS]
        self.http = HttpServer(Router([*routes, Route("/", routes[-1].endpoint)]), address, self._tick)
        self._is_interrupted = is_interrupted
        self.decoders = ThreadPoolExecutor(1, "jrl-bodies")
        self._started = time.monotonic()
        self._asked_once = 0

    def close(self) -> None:
        """Closes all connections, and the threads that choose actions."""
        self.http.close()
        self.decoders.shutdown(cancel_futures=True)
        for policy in self.by_name.values():
            policy.inference.close()
            policy.client_inference.close()

    def _tick(self) -> None:
        self.table.sweep(self._cfg.timeout_s)
        if self._is_interrupted():
            self.http.stop()

    def deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        """Gives actions to the requests that asked; called by the thread that chose them."""
        self.http.soon(_deliver, chosen)

    # ------------------------------------------------------------ one episode

    def begin(self, call: Call) -> dict[str, Any]:
        body = bodies.read(bodies.BeginRequest, call.fields)
        name, policy = self._named(body.policy)
        begin = functools.partial(self._begin, call.client, name, learns=body.training_enabled and policy.learns)
        found: dict[str, Any] = {"version": policy.inference.version}
        if not policy.is_single:
            found["agents"] = list(policy.agents)
        if body.count is None:
            if body.episode_id is not None and not call.client:
                raise Refused(400, _NAMELESS)
            return {"episode_id": begin(body.episode_id).id, **found}
        most = self._cfg.max_batch
        if body.episode_id is not None or body.count > most:
            raise Refused(422, f"count: expected 1 to {most}, without an episode_id: the server gives each its own")
        begun: list[Episode] = []
        try:
            for _ in range(body.count):
                begun.append(begin())
        except Refused:
            for episode in begun:
                self.table.close(episode, "was never begun")
            raise
        return {"episode_ids": [episode.id for episode in begun], **found}

    def action(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.ActionRequest, call.fields)
        fields = _Fields({ALONE: body.observation}, {ALONE: body.reward}, body.step, body.infos)
        answer = self._ask(self._find(call, id, single=True), fields)
        place, step = answer.places[ALONE], answer.step
        return answer.order.get(lambda actions, version: {"action": actions[place], "version": version, "step": step})

    def log(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.LogRequest, call.fields)
        fields = _Fields(
            {ALONE: body.observation}, {ALONE: body.reward}, body.step, body.infos,
            actions={ALONE: body.action}, log_probs={ALONE: body.log_prob},
        )  # fmt: skip
        answer = self._ask(self._find(call, id, single=True), fields)
        return answer.order.get(lambda actions, version: {"step": answer.step})

    def turn(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = bodies.read(TurnRequest, call.fields)
        answer = self._ask(self._find(call, id, single=False), body)
        return answer.order.get(answer.fields)

    def reward(self, call: Call, id: str) -> dict[str, Any]:
        episode = self.table.find(id, call.client)
        agents, is_single = self._policy(episode).agents, self._policy(episode).is_single
        body: Any = bodies.read(bodies.RewardRequest if is_single else bodies.AgentRewardRequest, call.fields)
        self.table.infos.check(body.infos)
        self._check_turn(episode, None)
        found = _rewards(agents, episode, {ALONE: body.reward} if is_single else body.rewards)
        for name, x in found.items():
            episode.seats[agents[name].number].reward += x
        self.table.infos.add(body.infos)
        sums = {name: episode.seats[agents[name].number].reward for name in found}
        return {"reward": sums[ALONE]} if is_single else {"rewards": sums}

    def end(self, call: Call, id: str) -> dict[str, Any]:
        if (answer := self.table.ended_with(id, call.client)) is not None:
            return answer  # asked again
        episode = self.table.find(id, call.client)
        policy = self._policy(episode)
        agents, body, observations, rewards = policy.agents, *_end_request(call, is_single=policy.is_single)
        self.table.infos.check(body.infos)
        self._check_turn(episode, body.step)
        rewards = _rewards(agents, episode, rewards, is_early=policy.is_single)
        known = _known(agents, observations, "observations")
        obs = {name: observed(agents[name], x, _label("observations", name), acts=False) for name, x in known.items()}
        for name, agent in agents.items():
            if episode.seats[agent.number].is_under_way and name not in obs:
                obs[name] = _last(agents, name, truncated=body.truncated)
        items, answer = self._finish(episode, obs, rewards, truncated=body.truncated)
        self.table.infos.add(body.infos)
        policy.inference.ask(items)
        return answer

    def once(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.OnceRequest, call.fields)
        name, policy = self._named(body.policy)
        if policy.remembers or not policy.is_single:
            why = "remembers earlier observations" if policy.remembers else "is of several agents"
            raise Refused(422, f"policy {name} {why}: begin an episode (POST /v1/episodes)")
        obs = observed(policy.agents[ALONE], body.observation, "observation")
        self._asked_once += 1
        episode = Episode(f"/{self._asked_once}", "", name)  # of its own, which no request can name
        episode.seats.append(Seat(episode, 0, UNLEARNED, policy.inference.initial(0)))
        order = self._order(policy.inference, [Item(episode.seats[0], obs, 0.0)])
        return order.get(lambda actions, version: {"action": actions[0], "version": version})

    # ------------------------------------------------------------ many episodes in a request

    def turns(self, call: Call) -> Awaitable[dict[str, Any]]:
        given, most = bodies.read(bodies.TurnsRequest, call.fields).turns, self._cfg.max_batch
        if not 1 <= len(given) <= most:
            raise Refused(422, f"turns: expected a mapping of 1 to {most} episodes, by their ids")
        turns: list[_Turn] = []
        for id, fields in given.items():
            try:
                if not isinstance(fields, Mapping):
                    raise Refused(422, "expected a mapping, the fields of a turn")
                body = bodies.read(TurnRequest, {name: x for name, x in fields.items() if x is not None})
                turns.append(self._read(self._find(call, id, single=False), body))
                if turns[-1].episode.policy != turns[0].episode.policy:
                    raise Refused(422, "it follows another policy: send a request for each")
            except Refused as e:
                raise Refused(e.status, f"turns/{id[:80]}: {e.message}") from None
        answers = dict(zip(given, self._take(turns), strict=True))
        each = lambda *chosen: {id: answer.fields(*chosen) for id, answer in answers.items()}
        order = next(iter(answers.values())).order
        return order.get(lambda actions, version: {"turns": each(actions, version), "version": version})

    def steps(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.StepsRequest, call.fields)
        episodes, policy = self._find_many(call, body.episode_ids)
        items = self._step(episodes, _results(policy.agents[ALONE], body, (len(episodes),)))
        order = self._order(policy.inference, items)
        going = [item.seat.episode for item in items if not item.final]
        for place, episode in enumerate(going):
            episode.answer = Answer(order, {ALONE: place}, episode.steps - 1)
        ids, space = [episode.id for episode in going], policy.agents[ALONE].action
        stacked = lambda actions: spaces.map_leaves(lambda leaf, *parts: np.stack(parts), space, *actions)
        return order.get(lambda actions, version: {"episode_ids": ids, "actions": stacked(actions), "version": version})

    def played(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.PlayedRequest, call.fields)
        episodes, policy = self._find_many(call, body.episode_ids)
        inference, items, count = policy.inference, list[Item](), len(episodes)
        rows = len(body.versions) if isinstance(body.versions, list | np.ndarray) else 0
        if not 1 <= rows * count <= bodies.STEPS:
            raise Refused(422, f"versions: expected 1 to {bodies.STEPS} steps, got {rows}")
        results = _results(policy.agents[ALONE], body, (rows, count))
        chosen = _chosen(policy, body, (rows, count))
        late = 0
        if policy.max_lag is not None:
            is_learned = np.array([episode.learns for episode in episodes])
            late = int(((chosen["version"] < inference.version - policy.max_lag) & is_learned).sum())
            self.table.too_old += late
        for k in range(rows):
            found = self._step(episodes, _slice(results, k), _slice(chosen, k))
            episodes = [item.seat.episode for item in found if not item.final]
            items += found
        ids = [episode.id for episode in episodes]
        learned = [item for item in items if item.seat.episode.learns]
        # the learner may be slower than clients: the answer waits until these steps are where it takes them
        order = Order(bool(learned), inference.version)
        if learned:
            inference.ask([*learned[:-1], learned[-1]._replace(order=order)])
        return order.get(lambda actions, version: {"episode_ids": ids, "version": inference.version, "too_old": late})

    # ------------------------------------------------------------ episodes and their turns

    def _named(self, name: str | None) -> tuple[str, Policy]:
        name = name or next(iter(self.by_name))
        if name not in self.by_name:
            raise Refused(404, f"policy: there is no {name[:128]!r}: expected one of {', '.join(self.by_name)}")
        return name, self.by_name[name]

    def _policy(self, episode: Episode) -> Policy:
        return self.by_name[episode.policy]

    def _begin(self, client: str, policy: str, id: str | None = None, *, learns: bool) -> Episode:
        carry = self.by_name[policy].inference.initial
        return self.table.begin(client, id, learns=learns, policy=policy, carry=carry)

    def _find(self, call: Call, id: str, *, single: bool) -> Episode:
        """Returns the episode of an id. Raises Refused: as `Table.find`, or it has several agents, or is `single`."""
        episode = self.table.find(id, call.client)
        if self._policy(episode).is_single != single:
            has = (
                "several agents: send their turns (POST /v1/episodes/ID/turn)" if single
                else "one agent: ask for its action (POST /v1/episodes/ID/action)"
            )  # fmt: skip
            raise Refused(422, f"episode {id!r} has {has}")
        return episode

    def _find_many(self, call: Call, ids: list[str]) -> tuple[list[Episode], Policy]:
        """Returns different episodes of one policy, each of which takes its next step."""
        if not 1 <= len(ids) <= self._cfg.max_batch or len(set(ids)) < len(ids):
            raise Refused(422, f"episode_ids: expected 1 to {self._cfg.max_batch} different ids, got {len(ids)}")
        episodes = [self._find(call, id, single=True) for id in ids]
        if len({episode.policy for episode in episodes}) > 1:
            raise Refused(422, "episode_ids: they follow different policies: send a request for each")
        for episode in episodes:
            self._check_turn(episode, None)
        return episodes, self._policy(episodes[0])

    def _check_turn(self, episode: Episode, step: int | None) -> None:
        """Raises Refused: a request of the episode is under way, or this is not its next step."""
        if episode.is_pending:
            raise Refused(409, f"a request of episode {episode.id!r} is under way: wait for its answer")
        if step is not None and step != episode.steps:
            raise Refused(409, f"step: episode {episode.id!r} is at step {episode.steps}, not at {step}")

    def _ask(self, episode: Episode, body: TurnRequest | _Fields) -> Answer:
        """Returns the answer to a turn; the earlier answer if it was lost on its way, and the client asks again."""
        if body.step is not None and body.step == episode.steps - 1 and episode.answer is not None:
            return episode.answer
        return self._take([self._read(episode, body)])[0]

    def _read(self, episode: Episode, body: TurnRequest | _Fields) -> _Turn:
        """Returns a turn of a body. Raises Refused: a value is wrong; nothing has changed then."""
        self._check_turn(episode, body.step)
        self.table.infos.check(body.infos)
        policy = self._policy(episode)
        agents, ends = policy.agents, dict[str, bool]()
        rewards = _rewards(agents, episode, body.rewards, is_early=policy.is_single)
        for kind, flags in (("truncated", body.truncated), ("terminated", body.terminated)):  # both: terminated
            known = _known(agents, flags, kind, episode)
            ends |= {name: kind == "truncated" for name, is_over in known.items() if is_over}
        obs = {
            name: observed(agents[name], x, _label("observations", name), acts=name not in ends)
            for name, x in _known(agents, body.observations, "observations", episode).items()
        }
        obs |= {name: _last(agents, name, truncated=is_cut) for name, is_cut in ends.items() if name not in obs}
        own = {}
        if body.actions or body.log_probs:
            own = _own_actions(policy, episode, body, obs.keys() - ends.keys())
        return _Turn(episode, obs, rewards, own, ends, body.infos)

    def _items(self, turn: _Turn) -> list[Item]:
        """Returns the items of a turn, which counts from now on."""
        episode, agents = turn.episode, self._policy(turn.episode).agents
        items, policies = list[Item](), set[int]()
        names = sorted(turn.obs, key=lambda name: agents[name].number) if len(turn.obs) > 1 else turn.obs
        for name in names:
            agent = agents[name]
            seat, reward = episode.seats[agent.number], turn.rewards.get(name, 0.0)
            if name in turn.ends:
                items += seat.end(turn.obs[name], reward, truncated=turn.ends[name])
                continue
            flags = {"first": not policies, "leads": agent.policy not in policies}
            policies.add(agent.policy)
            items.append(seat.item(turn.obs[name], reward, **turn.own.get(name, {}), **flags))
        for name, reward in turn.rewards.items():
            if name not in turn.obs:  # the agent waits
                episode.seats[agents[name].number].reward += reward
        self.table.infos.add(turn.infos)
        episode.steps += 1
        episode.length += bool(policies)
        return items

    def _order(self, inference: Inference, items: Sequence[Item]) -> Order:
        """Asks for the actions of the items of one request that are not final."""
        order, asked, count = Order(sum(not item.final for item in items), inference.version), list[Item](), 0
        for item in items:
            asked.append(item if item.final else item._replace(order=order, place=count))
            count += not item.final
        inference.ask(asked)
        return order

    def _take(self, turns: Sequence[_Turn]) -> list[Answer]:
        """Orders the actions of turns in one request; returns the answer of each, which its episode keeps."""
        policy = self._policy(turns[0].episode)
        each, names = [self._items(turn) for turn in turns], list(policy.agents)
        order = self._order(policy.inference, [item for items in each for item in items])
        answers, count = list[Answer](), itertools.count()
        for turn, items in zip(turns, each, strict=True):
            acting = {names[item.seat.agent]: next(count) for item in items if not item.final}
            # several agents get no actions back that the client chose
            places = {name: place for name, place in acting.items() if name == ALONE or name not in turn.own}
            turn.episode.answer = Answer(order, places, turn.episode.steps - 1)
            answers.append(turn.episode.answer)
        return answers

    def _finish(
        self, episode: Episode, obs: Mapping[str, PyTree], rewards: Mapping[str, float], *, truncated: bool
    ) -> tuple[list[Item], dict[str, Any]]:
        """Ends an episode with the last observations of its agents; returns their items, and the answer."""
        agents, items, table = self._policy(episode).agents, list[Item](), self.table
        for name, x in obs.items():
            if not (seat := episode.seats[agents[name].number]).over:
                items += seat.end(x, rewards.get(name, 0.0), truncated=truncated)
        table.ended += 1
        answer: dict[str, Any] = {"return": episode.total, "length": episode.length}
        if ALONE not in agents:
            answer["returns"] = {name: episode.seats[agent.number].total for name, agent in agents.items()}
        if episode.learns and episode.length:
            table.finished.append((episode.total, episode.length))
        table.close(episode, "has ended", answer)
        return items, answer

    def _step(self, episodes: list[Episode], results: tuple[PyTree, ...], own: Mapping[str, Any] = {}) -> list[Item]:
        """Returns the items of a step of N episodes of one agent; another begins in place of each that is over.

        Args:
          episodes: N.
          results: of `_results`, [N, *].
          own: fields [N, *] of Items about actions that the client chose.
        """
        obs, rewards, truncated, over, last = results
        items: list[Item] = []
        for i, episode in enumerate(episodes):
            reward = {ALONE: float(rewards[i])}
            if over[i]:
                items += self._finish(episode, {ALONE: _slice(last, i)}, reward, truncated=bool(truncated[i]))[0]
                episode, reward = self._begin(episode.client, episode.policy, learns=episode.learns), {}
            chosen = {ALONE: _slice(own, i)} if own else {}
            items += self._items(_Turn(episode, {ALONE: _slice(obs, i)}, reward, chosen))
        return items

    # ------------------------------------------------------------ clients that act by themselves

    async def program(self, call: Call) -> dict[str, Any]:
        return (await self._client_program(call))[0]

    async def weights(self, call: Call) -> Response:
        least = call.query.get("newer_than", "-1")
        if not re.fullmatch(r"-1|\d{1,15}", least):
            raise Refused(422, f"newer_than: expected a version, got {least[:80]}")
        _, version, file = await self._client_program(call)
        is_other = version != int(least)  # older weights are sent, too: see `_chosen`
        return Response(file, media_type=NPZ) if is_other else Response(status_code=204, media_type=NPZ)

    async def _client_program(self, call: Call) -> tuple[dict[str, Any], int, bytes]:
        name, policy = self._named(call.query.get("policy"))
        if not policy.is_single:
            raise Refused(422, f"policy {name} is of several agents: let the server act (inference_mode: remote)")
        return await asyncio.wrap_future(policy.client_inference.get(policy.inference))

    # ------------------------------------------------------------ the server itself

    def health(self, call: Call) -> dict[str, Any]:
        versions = {name: policy.inference.version for name, policy in self.by_name.items()}
        return {"status": "ok", "versions": versions, "episodes": len(self.table.episodes)}

    def policies(self, call: Call) -> dict[str, Any]:
        found = {}
        for name, policy in self.by_name.items():
            agents = {agent: _spaces(one) for agent, one in policy.agents.items()}
            found[name] = {
                "algorithm": policy.algorithm, "learns": policy.learns, "remembers": policy.remembers,
                **(agents[ALONE] if policy.is_single else {"agents": agents}), "version": policy.inference.version,
            }  # fmt: skip
        return {"policies": found}

    def metrics(self, call: Call) -> Response:
        table, gate = self.table, self.http.gate
        found: dict[str, tuple[str, float]] = {
            "requests_total": ("counter", gate.requests),
            "refused_total": ("counter", gate.refused),
            "connections": ("gauge", len(self.http.admitted)),
            "episodes": ("gauge", len(table.episodes)),
            "episodes_begun_total": ("counter", table.begun),
            "episodes_ended_total": ("counter", table.ended),
            "episodes_failed_total": ("counter", table.failed),
            "inferences_total": ("counter", sum(policy.inference.count for policy in self.by_name.values())),
            "uptime_seconds": ("gauge", time.monotonic() - self._started),
        }
        if table.columns is not None:
            found["steps_dropped_total"] = "counter", table.columns.dropped
        lines = [f"# TYPE jrl_{name} {kind}\njrl_{name} {value:.12g}\n" for name, (kind, value) in found.items()]
        inferences = [(f'policy="{name}"', policy.inference) for name, policy in self.by_name.items()]
        lines += ["# TYPE jrl_weights_version gauge\n"]
        lines += [f"jrl_weights_version{{{label}}} {inference.version}\n" for label, inference in inferences]
        for name, attribute in (("jrl_wait_seconds", "waits"), ("jrl_inference_seconds", "calls")):
            lines += [f"# TYPE {name} histogram\n"]
            lines += [getattr(inference, attribute).text(name, label) for label, inference in inferences]
        return Response("".join(lines), media_type="text/plain; version=0.0.4")

    def openapi(self, call: Call) -> dict[str, Any]:
        every = [pair for policy in self.by_name.values() for pair in policy.agents.items()]
        return openapi.document(
            [agent.observation for _, agent in every], [agent.action for _, agent in every],
            {name: agent for name, agent in every if name != ALONE},
            most=self._cfg.max_batch, token=self.address.token is not None,
        )  # fmt: skip

    def docs(self, call: Call) -> Response:
        return Response(openapi.page(self.openapi(call)), media_type="text/html")


class _Endpoint:
    """An ASGI application for one operation: decodes its body, calls its method, encodes the answer."""

    def __init__(self, server: Server, operation: Operation):
        self._server, self._status = server, operation.status
        self._fn = getattr(server, operation.name)
        self._has_body = operation.body is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, body, server = scope["state"]["headers"], scope["state"]["body"], self._server
        fields: dict[str, Any] = {}
        if self._has_body:
            most = server.address.most_bytes
            if len(body) > _LARGE:
                loop = asyncio.get_running_loop()
                fields = await loop.run_in_executor(server.decoders, wire.decoded, body, headers, most)
            else:
                fields = wire.decoded(body, headers, most)
        query = QueryParams(scope["query_string"]) if scope["query_string"] else {}
        call = Call(fields, wire.client_name(headers), query)
        with server.table.lock:
            found = self._fn(call, **scope["path_params"])
        if inspect.isawaitable(found):
            found = await found
        form = headers if self._has_body else None
        response = found if isinstance(found, Response) else wire.encoded(found, form, self._status)
        await response(scope, receive, send)


def observed(agent: Agent, given: Any, name: str, lead: tuple[int, ...] = (), *, acts: bool = True) -> PyTree:
    """Returns observations [*lead, *].

    Raises:
      Refused: as `space_values.read`; with `acts` also a mask that allows no action. An episode's last observation may
        allow none; elsewhere the learner would end the run for it.
    """
    found = space_values.read(agent.observation, given, name, lead)
    mask = found.get(spaces.ACTION_MASK) if acts and isinstance(agent.observation, Dict) else None
    if mask is not None and not spaces.any_allowed(agent.action, mask).all():
        raise Refused(422, f"{name}/{spaces.ACTION_MASK}: it allows no action: end the episode there, or allow one")
    return found


def _deliver(chosen: list[tuple[Item, PyTree, int]]) -> None:
    now = time.monotonic()
    for item, action, version in chosen:
        if item.order is not None:
            item.seat.episode.heard = now
            item.order.put(item.place, action, version)


def _end_request(call: Call, *, is_single: bool) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Returns a body, and its observations and rewards by agent."""
    if is_single:
        one = bodies.read(bodies.EndRequest, call.fields)
        return one, {ALONE: one.observation}, {ALONE: one.reward}
    body = bodies.read(AgentEndRequest, call.fields)
    return body, body.observations, body.rewards


def _label(field: str, agent: str) -> str:
    """Returns the name of an agent's part of a field, in the singular if an episode has one agent."""
    return f"{field}/{agent}" if agent else field[:-1]


def _known(
    agents: Mapping[str, Agent], given: Mapping[str, Any], field: str, episode: Episode | None = None
) -> Mapping[str, Any]:
    """Returns a field by agent. Raises Refused: an agent is not known, or has ended in this episode."""
    for name in given:
        if name not in agents:
            raise Refused(422, f"{field}: there is no agent {name[:80]!r}: expected {', '.join(agents)[:200]}")
        if episode is not None and episode.seats[agents[name].number].over:
            raise Refused(409, f"{field}/{name}: it has ended in episode {episode.id!r}: leave it out")
    return given


def _rewards(
    agents: Mapping[str, Agent], episode: Episode, given: Mapping[str, Any], *, is_early: bool = False
) -> dict[str, float]:
    """Returns rewards by agent. Raises Refused; with `is_early` not for a reward before the first action."""
    found: dict[str, float] = {}
    for name, x in _known(agents, given, "rewards", episode).items():
        seat, label = episode.seats[agents[name].number], _label("rewards", name)
        reward = space_values.number(x, label)
        if reward and not seat.steps and not is_early:
            raise Refused(409, f"{label}: it has no action yet that a reward could be for")
        space_values.summed(seat.reward, reward, label)
        found[name] = reward
    return found


def _own_actions(
    policy: Policy, episode: Episode, body: TurnRequest | _Fields, acting: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Returns the fields of Items about actions that the client chose itself, by agent."""
    chosen = _known(policy.agents, body.actions, "actions", episode)
    known = _known(policy.agents, body.log_probs, "log_probs", episode)
    for field, names, whole, among in (
        ("actions", chosen, acting, "observations of those that act"),
        ("log_probs", known, chosen, "actions"),
    ):
        if lost := [name for name in names if name not in whole]:
            raise Refused(422, f"{field}/{lost[0]}: it is not among the {among}")
    found = {}
    for name, x in chosen.items():
        agent = policy.agents[name]
        action = space_values.read(agent.action, x, _label("actions", name))
        log_prob = space_values.number(known.get(name, 0.0), _label("log_probs", name))
        if agent.own_action is None:
            raise Refused(422, policy.why)
        found[name] = {"action": agent.own_action(action), "log_prob": log_prob}
    return found


def _last(agents: Mapping[str, Agent], name: str, *, truncated: bool) -> PyTree:
    """Returns zeros for a last observation that was not sent: nothing looks at it behind a true end."""
    if truncated:
        raise Refused(400, f"observations/{name} is missing: what is truncated ends with the observation after it")
    return zeros(element(agents[name].observation))


def _chosen(policy: Policy, body: bodies.PlayedRequest, lead: tuple[int, int]) -> dict[str, Any]:
    """Returns the fields of Items about actions [K, N, *] that the client chose. Raises Refused."""
    version = space_values.array(WHOLE, body.versions, lead, "versions")
    found = {
        "action": space_values.read(policy.agents[ALONE].policy_action, body.actions, "actions", lead),
        "log_prob": space_values.array(NUMBER, body.log_probs, lead, "log_probs"),
        "version": version,
        "carry": policy.client_inference.memory(body.memory, lead),
    }
    newest = policy.inference.version
    # without learning they go back to older weights where the best checkpoint is taken away
    if (version < 0).any() or (policy.learns and version.max() > newest):
        raise Refused(409, f"versions: there are none beyond {newest} here: get the weights again")
    return found


def _results(
    agent: Agent, body: bodies.StepsRequest | bodies.PlayedRequest, lead: tuple[int, ...]
) -> tuple[PyTree, ...]:
    """Returns (observations, rewards, truncated, over, last observations) of steps, [*lead, *]."""

    def read(name: str, leaf: Leaf) -> np.ndarray:
        given = getattr(body, name)
        return np.zeros(lead, leaf.dtype) if given is None else space_values.array(leaf, given, lead, name)

    obs = observed(agent, body.observations, "observations", lead)
    rewards, terminated, truncated = read("rewards", NUMBER), read("terminated", FLAG), read("truncated", FLAG)
    over, last = terminated | truncated, obs
    if over.any():
        if body.final_observations is None:
            raise Refused(400, "final_observations is missing: an episode ends with the observation after it")
        last = space_values.read(agent.observation, body.final_observations, "final_observations", lead)
    return obs, rewards, truncated & ~terminated, over, last


def _slice(tree: PyTree, i: Any) -> PyTree:
    return jax.tree.map(lambda x: x[i], tree)


def _spaces(agent: Agent) -> dict[str, Any]:
    return {
        "observation": plain(space_to_json(agent.observation)),
        "action": plain(space_to_json(agent.action)),
    }
