"""The routes: requests of clients, and their answers."""

import asyncio
import functools
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from jrl import spaces
from jrl.data.spaces_json import plain, space_to_json
from jrl.serve import bodies, openapi, space_values, turns, wire
from jrl.serve.client_inference import ClientInference
from jrl.serve.http_server import Address, HttpServer
from jrl.serve.inference import Inference
from jrl.serve.openapi import OPERATIONS, Operation
from jrl.serve.policy_info import PolicyInfo, observed
from jrl.serve.space_values import FLAG, NUMBER, WHOLE
from jrl.serve.table import UNLEARNED, Answer, Episode, Item, Order, Seat, Table
from jrl.serve.wire import NPZ, Refused
from jrl.types import PyTree, Space

_LARGE = 2**18  # bytes of a body that is decoded in another thread, so that other clients do not wait for it
# an episode of clients without that header belongs to whoever knows its id, which nobody must be able to guess
_NAMELESS = (
    "episode_id: a client that names an episode must say that it is its own: send the header Jrl-Client, the same in "
    "all requests, or leave episode_id out, and the server gives one"
)


class Policy(NamedTuple):
    """A policy that clients may ask."""

    info: PolicyInfo
    inference: Inference
    client_inference: ClientInference


class Call(NamedTuple):
    """A request whose body was decoded."""

    fields: dict[str, Any]
    client: str  # "" without a name
    query: Mapping[str, str]


class Server:
    """Answers the requests of clients by the policies that `add` names: the first is the default.

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

    @property
    def most_episodes(self) -> int:
        """Returns the number of episodes that a request may have."""
        return self._cfg.max_batch

    def add(self, name: str, policy: Policy) -> None:
        """Adds a policy, which clients may ask for by its name."""
        self.by_name[name] = policy

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

    # ------------------------------------------------------------ actions

    def order(self, items: Sequence[Item]) -> Order:
        """Asks for the actions of the items of one request that are not final."""
        inference = self.by_name[items[0].seat.episode.policy].inference
        order, asked, count = Order(sum(not item.final for item in items), inference.version), list[Item](), 0
        for item in items:
            asked.append(item if item.final else item._replace(order=order, place=count))
            count += not item.final
        inference.ask(asked)
        return order

    def deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        """Gives actions to the requests that asked; called by the thread that chose them."""
        self.http.soon(_deliver, chosen)

    # ------------------------------------------------------------ episodes

    def find(self, call: Call, id: str) -> tuple[Episode, PolicyInfo]:
        """Returns the episode of an id and its policy. Raises Refused as `Table.find`."""
        episode = self.table.find(id, call.client)
        return episode, self.by_name[episode.policy].info

    def check_turn(self, episode: Episode, step: int | None) -> None:
        """Raises Refused: a request of the episode is under way, or this is not its next step."""
        if episode.is_pending:
            raise Refused(409, f"a request of episode {episode.id!r} is under way: wait for its answer")
        if step is not None and step != episode.steps:
            raise Refused(409, f"step: episode {episode.id!r} is at step {episode.steps}, not at {step}")

    def _find_single(self, call: Call, id: str) -> tuple[Episode, PolicyInfo]:
        episode, info = self.find(call, id)
        if info.agents:
            raise Refused(422, f"episode {id!r} has several agents: send their turns (POST /v1/episodes/ID/turn)")
        return episode, info

    def _named(self, name: str | None) -> tuple[str, Policy]:
        name = name or next(iter(self.by_name))
        if name not in self.by_name:
            raise Refused(404, f"policy: there is no {name[:128]!r}: expected one of {', '.join(self.by_name)}")
        return name, self.by_name[name]

    def begin(self, call: Call) -> dict[str, Any]:
        body = bodies.read(bodies.BeginRequest, call.fields)
        name, policy = self._named(body.policy)
        learns = body.training_enabled and policy.info.learns
        begin = functools.partial(
            self.table.begin, call.client, learns=learns, policy=name, carry=policy.inference.initial
        )
        found: dict[str, Any] = {"version": policy.inference.version}
        if policy.info.agents:
            found["agents"] = list(policy.info.agents)
        if body.count is None:
            if body.episode_id is not None and not call.client:
                raise Refused(400, _NAMELESS)
            return {"episode_id": begin(body.episode_id).id, **found}
        if body.episode_id is not None or body.count > self.most_episodes:
            expected = f"expected 1 to {self.most_episodes}, without an episode_id: the server gives each its own"
            raise Refused(422, f"count: {expected}")
        begun: list[Episode] = []
        try:
            for _ in range(body.count):
                begun.append(begin(None))
        except Refused:
            for episode in begun:
                self.table.close(episode, "was never begun")
            raise
        return {"episode_ids": [episode.id for episode in begun], **found}

    def action(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.ActionRequest, call.fields)
        episode, info = self._find_single(call, id)
        self.table.infos.check(body.infos)
        obs = observed(info, body.observation, "observation")
        if body.step is not None and body.step == episode.steps - 1 and episode.answer is not None:
            return episode.answer.get()  # asked again, since the answer was lost on its way
        self.check_turn(episode, body.step)
        item = _item(episode, obs, body.reward)
        self.table.infos.add(body.infos)
        episode.answer = _answer(self.order([item]), 0, episode)
        return episode.answer.get()

    def log(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.LogRequest, call.fields)
        episode, info = self._find_single(call, id)
        self.table.infos.check(body.infos)
        obs = observed(info, body.observation, "observation")
        action = space_values.read(info.action, body.action, "action")
        if info.own_action is None:
            raise Refused(422, info.why)
        logged = lambda actions, version, step=body.step: {"step": step}
        if body.step is not None and body.step == episode.steps - 1 and episode.answer is not None:
            return Answer(episode.answer.order, logged).get()
        self.check_turn(episode, body.step)
        step = episode.steps
        item = _item(episode, obs, body.reward, action=info.own_action(action), log_prob=body.log_prob)
        self.table.infos.add(body.infos)
        episode.answer = _answer(self.order([item]), 0, episode)
        return Answer(episode.answer.order, lambda actions, version: {"step": step}).get()

    def reward(self, call: Call, id: str) -> dict[str, Any]:
        episode, info = self.find(call, id)
        if info.agents:
            return turns.reward(self, episode, info, call.fields)
        body = bodies.read(bodies.RewardRequest, call.fields)
        self.table.infos.check(body.infos)
        self.check_turn(episode, None)
        if not episode.steps:
            raise Refused(409, f"episode {id!r} has no action yet that a reward could be for")
        episode.seat.reward = space_values.summed(episode.seat.reward, body.reward, "reward")
        self.table.infos.add(body.infos)
        return {"reward": episode.seat.reward}

    def end(self, call: Call, id: str) -> dict[str, Any]:
        if (answer := self.table.ended_with(id, call.client)) is not None:
            return answer  # asked again
        episode, info = self.find(call, id)
        if info.agents:
            return turns.end(self, episode, info, call.fields)
        body = bodies.read(bodies.EndRequest, call.fields)
        self.table.infos.check(body.infos)
        obs = space_values.read(info.observation, body.observation, "observation")
        self.check_turn(episode, body.step)
        items = self._end(episode, obs, body.reward, truncated=body.truncated)
        self.table.infos.add(body.infos)
        answer = {"return": episode.total, "length": episode.steps}
        self.table.close(episode, "has ended", answer)
        if items:
            self.by_name[episode.policy].inference.ask(items)
        return answer

    def _end(self, episode: Episode, obs: PyTree, reward: float, *, truncated: bool) -> list[Item]:
        """Returns the last item of an episode; none if nothing is learned from it."""
        self.table.ended += 1
        item = _item(episode, obs, reward, terminated=not truncated, truncated=truncated, final=True)
        return [item] if episode.steps and episode.learns else []

    def turn(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        return turns.turn(self, call, id)

    def turns(self, call: Call) -> Awaitable[dict[str, Any]]:
        return turns.turns(self, call)

    def once(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.OnceRequest, call.fields)
        name, policy = self._named(body.policy)
        if policy.info.remembers:
            raise Refused(422, f"policy {name} remembers earlier observations: begin an episode (POST /v1/episodes)")
        if policy.info.agents:
            raise Refused(422, f"policy {name} is of several agents: begin an episode (POST /v1/episodes)")
        obs = observed(policy.info, body.observation, "observation")
        self._asked_once += 1
        episode = Episode(f"/{self._asked_once}", "", name)  # of its own, which no request can name
        episode.seats.append(Seat(episode, 0, UNLEARNED, policy.inference.initial(0)))
        fields = lambda actions, version: {"action": actions[0], "version": version}
        return Answer(self.order([Item(episode.seat, obs, 0.0)]), fields).get()

    # ------------------------------------------------------------ steps of many episodes

    def steps(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.StepsRequest, call.fields)
        episodes, info = self._find_several(call, body.episode_ids)
        items = self._items(episodes, _results(info, body, (len(episodes),)))
        going = [item.seat.episode for item in items if not item.final]
        order, ids = self.order(items), [episode.id for episode in going]
        for place, episode in enumerate(going):
            episode.answer = _answer(order, place, episode)
        stacked = lambda actions: spaces.map_leaves(lambda leaf, *parts: np.stack(parts), info.action, *actions)
        return Answer(
            order,
            lambda actions, version: {"episode_ids": ids, "actions": stacked(actions), "version": version},
        ).get()

    def played(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = bodies.read(bodies.PlayedRequest, call.fields)
        episodes, info = self._find_several(call, body.episode_ids)
        inference, items, count = self.by_name[episodes[0].policy].inference, list[Item](), len(episodes)
        rows = len(body.versions) if isinstance(body.versions, list | np.ndarray) else 0
        if not 1 <= rows * count <= bodies.STEPS:
            raise Refused(422, f"versions: expected 1 to {bodies.STEPS} steps, got {rows}")
        results = _results(info, body, (rows, count))
        chosen = self._chosen(episodes, body, (rows, count))
        late = self._count_late(episodes, chosen["version"])
        for k in range(rows):
            own = [_slice(chosen, (k, i)) for i in range(count)]
            found = self._items(episodes, _slice(results, k), own)
            episodes = [item.seat.episode for item in found if not item.final]
            items += found
        ids = [episode.id for episode in episodes]
        learned = [item for item in items if item.seat.episode.learns]
        # the learner may be slower than clients: the answer waits until these steps are where it takes them
        order = Order(bool(learned), inference.version)
        if learned:
            inference.ask([*learned[:-1], learned[-1]._replace(order=order)])
        fields = lambda actions, version: {"episode_ids": ids, "version": inference.version, "too_old": late}
        return Answer(order, fields).get()

    def _chosen(self, episodes: list[Episode], body: bodies.PlayedRequest, lead: tuple[int, int]) -> dict[str, Any]:
        """Returns the fields of Items about actions [K, N, *] that the client chose. Raises Refused."""
        info, inference, client_inference = self.by_name[episodes[0].policy]
        action = space_values.read(info.policy_action or info.action, body.actions, "actions", lead)
        log_prob = space_values.array(NUMBER, body.log_probs, lead, "log_probs")
        version = space_values.array(WHOLE, body.versions, lead, "versions")
        memory = client_inference.memory(body.memory, lead)
        # without learning they go back to older weights where the best checkpoint is taken away
        if (version < 0).any() or (info.learns and version.max() > inference.version):
            raise Refused(409, f"versions: there are none beyond {inference.version} here: get the weights again")
        return {"action": action, "log_prob": log_prob, "version": version, "carry": memory}

    def _count_late(self, episodes: list[Episode], version: np.ndarray) -> int:
        """Counts the steps [K, N] that are not learned from, since their weights are too old by now."""
        info, inference, _ = self.by_name[episodes[0].policy]
        if info.max_lag is None:
            return 0
        learns = np.array([episode.learns for episode in episodes])
        late = int(((version < inference.version - info.max_lag) & learns).sum())
        self.table.too_old += late
        return late

    def _find_several(self, call: Call, ids: list[str]) -> tuple[list[Episode], PolicyInfo]:
        """Returns different episodes of one policy, each of which takes its next step."""
        if not 1 <= len(ids) <= self.most_episodes or len(set(ids)) < len(ids):
            raise Refused(422, f"episode_ids: expected 1 to {self.most_episodes} different ids, got {len(ids)}")
        episodes = [self._find_single(call, id)[0] for id in ids]
        if len({episode.policy for episode in episodes}) > 1:
            raise Refused(422, "episode_ids: they follow different policies: send a request for each")
        for episode in episodes:
            self.check_turn(episode, None)
        return episodes, self.by_name[episodes[0].policy].info

    def _items(
        self,
        episodes: list[Episode],
        results: tuple[PyTree, ...],
        chosen: Sequence[Mapping[str, Any]] = (),
    ) -> list[Item]:
        """Returns the items of several episodes; another begins in place of each that is over.

        Args:
          episodes: N, of one agent.
          results: of `_results`, [N, *].
          chosen: fields of Items about actions that the client chose.
        """
        obs, rewards, truncated, over, last = results
        items: list[Item] = []
        for i, episode in enumerate(episodes):
            reward = float(rewards[i])
            if over[i]:
                items += self._end(episode, _slice(last, i), reward, truncated=bool(truncated[i]))
                self.table.close(episode, "has ended", {"return": episode.total, "length": episode.steps})
                carry = self.by_name[episode.policy].inference.initial
                client, policy, learns = episode.client, episode.policy, episode.learns
                episode, reward = self.table.begin(client, None, learns=learns, policy=policy, carry=carry), 0.0
            items.append(_item(episode, _slice(obs, i), reward, **(chosen[i] if chosen else {})))
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
        name, (info, inference, client_inference) = self._named(call.query.get("policy"))
        if info.agents:
            raise Refused(422, f"policy {name} is of several agents: let the server act (inference_mode: remote)")
        return await asyncio.wrap_future(client_inference.get(inference))

    # ------------------------------------------------------------ the server itself

    def health(self, call: Call) -> dict[str, Any]:
        versions = {name: policy.inference.version for name, policy in self.by_name.items()}
        return {"status": "ok", "versions": versions, "episodes": len(self.table.episodes)}

    def policies(self, call: Call) -> dict[str, Any]:
        found = {}
        for name, (info, inference, _) in self.by_name.items():
            facts = {"algorithm": info.algorithm, "learns": info.learns, "remembers": info.remembers}
            agents = {agent: _spaces(of.observation, of.action) for agent, of in info.agents.items()}
            own = {"agents": agents} if agents else _spaces(info.observation, info.action)
            found[name] = {**facts, **own, "version": inference.version}
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
        lines += ["# TYPE jrl_wait_seconds histogram\n"]
        lines += [inference.waits.text("jrl_wait_seconds", label) for label, inference in inferences]
        lines += ["# TYPE jrl_inference_seconds histogram\n"]
        lines += [inference.calls.text("jrl_inference_seconds", label) for label, inference in inferences]
        return Response("".join(lines), media_type="text/plain; version=0.0.4")

    def openapi(self, call: Call) -> dict[str, Any]:
        observations, actions, agents = list[Space](), list[Space](), dict[str, Any]()
        for policy in self.by_name.values():
            agents |= policy.info.agents
            parts = policy.info.agents.values() or (policy.info,)
            observations += [part.observation for part in parts]
            actions += [part.action for part in parts]
        token = self.address.token is not None
        return openapi.document(observations, actions, agents, most=self.most_episodes, token=token)

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


def _deliver(chosen: list[tuple[Item, PyTree, int]]) -> None:
    now = time.monotonic()
    for item, action, version in chosen:
        if item.order is not None:
            item.seat.episode.heard = now
            item.order.put(item.place, action, version)


def _answer(order: Order, place: int, episode: Episode) -> Answer:
    """Returns the answer to an episode's latest step."""
    step = episode.steps - 1
    return Answer(order, lambda actions, version: {"action": actions[place], "version": version, "step": step})


def _item(episode: Episode, obs: PyTree, reward: float, **fields: Any) -> Item:
    """Returns the next item of an episode with one agent, with the rewards since its latest action."""
    item = episode.seat.item(obs, reward, **fields)
    episode.steps = episode.seat.steps
    return item


def _results(
    info: PolicyInfo, body: bodies.StepsRequest | bodies.PlayedRequest, lead: tuple[int, ...]
) -> tuple[PyTree, ...]:
    """Returns (observations, rewards, truncated, over, last observations) of steps, [*lead, *]."""

    def flags(name: str) -> np.ndarray:
        given = getattr(body, name)
        return np.zeros(lead, bool) if given is None else space_values.array(FLAG, given, lead, name)

    obs = observed(info, body.observations, "observations", lead)
    rewards = np.zeros(lead, np.float32)
    if body.rewards is not None:
        rewards = space_values.array(NUMBER, body.rewards, lead, "rewards")
    terminated, truncated = flags("terminated"), flags("truncated")
    over, last = terminated | truncated, obs
    if over.any():
        if body.final_observations is None:
            raise Refused(400, "final_observations is missing: an episode ends with the observation after it")
        last = space_values.read(info.observation, body.final_observations, "final_observations", lead)
    return obs, rewards, truncated & ~terminated, over, last


def _slice(tree: PyTree, i: Any) -> PyTree:
    return jax.tree.map(lambda x: x[i], tree)


def _spaces(observation: Space, action: Space) -> dict[str, Any]:
    return {"observation": plain(space_to_json(observation)), "action": plain(space_to_json(action))}
