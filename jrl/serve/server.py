"""The routes: requests of clients, and their answers.

An episode maps names to agents. Requests of an episode with a single agent are turns of the agent `SINGLE`.
"""

import asyncio
import functools
import inspect
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from jrl import spaces
from jrl.serve import bodies, openapi, space_values, wire
from jrl.serve.bodies import TurnRequest, parse_body
from jrl.serve.client_inference import ClientInference
from jrl.serve.episode_table import SINGLE, UNLEARNED, Answer, ClientEpisode, EpisodeTable, Item, PendingActions, Seat
from jrl.serve.http_server import Address, HttpServer
from jrl.serve.inference import Inference, zeros
from jrl.serve.openapi import ROUTES, ApiRoute
from jrl.serve.space_values import FLAG, INTEGER, LARGEST, NUMBER
from jrl.serve.wire import NPZ, RequestError
from jrl.spaces_json import plain, space_to_json
from jrl.types import Dict, Leaf, PyTree, Space, element

# an episode of a client without the header belongs to every client that knows the id: the id must not be guessable
_NO_CLIENT = (
    "episode_id: expected the header Jrl-Client with it: send the header, the same in all requests, or leave "
    "episode_id out, and the server gives an id"
)


class ServedAgent(NamedTuple):
    """An agent of a policy's episodes."""

    number: int
    policy: int  # index of its policy
    observation: Space
    action: Space
    policy_action: Space  # in the policy's units
    # function from the environment's action to the policy's, [*]; None: clients may not choose actions
    to_policy_action: Callable[[PyTree], PyTree] | None


class ServedPolicy(NamedTuple):
    """A policy for clients."""

    algorithm: str
    agents: Mapping[str, ServedAgent]  # by name; only SINGLE if an episode has a single agent
    inference: Inference
    client_inference: ClientInference
    learns: bool
    refusal: str  # why clients may not choose actions
    has_memory: bool = False  # actions depend on earlier observations of an episode
    max_lag: int | None = None  # maximum updates between weights and learning from their steps; None: unlimited

    @property
    def is_single(self) -> bool:
        """Whether an episode has a single agent."""
        return SINGLE in self.agents


class Call(NamedTuple):
    """A request with its decoded body."""

    fields: dict[str, Any]
    client: str  # "" without a name
    query: Mapping[str, str]


class _Turn(NamedTuple):
    """Checked values of a turn by agent. The episode has not changed yet."""

    episode: ClientEpisode
    obs: Mapping[str, PyTree]  # acting and ending agents
    rewards: Mapping[str, float]
    actions: Mapping[str, Mapping[str, Any]] = {}  # fields of an Item for actions that the client chose
    ends: Mapping[str, bool] = {}  # ending agent -> whether it is truncated
    infos: Mapping[str, float] = {}


class Server:
    """Answers the requests of clients by the policies of `by_name`. The first policy is the default.

    The server's thread calls the routes, and holds the table's lock. A route returns the fields of its answer, a
    response, or an awaitable of the fields.

    Args:
      table: table of the episodes.
      address: address of the server.
      is_interrupted: function that returns whether the run must end; then all connections are closed.
    """

    # routes have no docstring: `openapi.ROUTES` has a sentence and the fields of each route

    def __init__(self, table: EpisodeTable, address: Address, is_interrupted: Callable[[], bool] = lambda: False):
        self.table, self.address, self._cfg = table, address, address.cfg
        self.by_name: dict[str, ServedPolicy] = {}
        routes = [Route(route.path, _RouteApp(self, route), methods=[route.method]) for route in ROUTES]
        self.http = HttpServer(Router(routes), address, self._tick)
        self._is_interrupted = is_interrupted
        self._start_time = time.monotonic()
        self._num_once = 0  # requests without an episode

    def close(self) -> None:
        """Closes all connections, and the threads that choose actions."""
        self.http.close()
        for policy in self.by_name.values():
            policy.inference.close()
            policy.client_inference.close()

    def _tick(self) -> None:
        self.table.fail_silent(self._cfg.timeout_s)
        if self._is_interrupted():
            self.http.stop()

    def deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        """Passes actions to their requests; called by the thread that chose them."""
        self.http.call_soon(_deliver, chosen)

    # ------------------------------------------------------------ one episode

    def begin(self, call: Call) -> dict[str, Any]:
        body = parse_body(bodies.BeginRequest, call.fields)
        name, policy = self._find_policy(body.policy)
        is_learned = body.training_enabled and policy.learns
        add = functools.partial(self._add_episode, call.client, name, is_learned=is_learned)
        fields: dict[str, Any] = {"version": policy.inference.version}
        if not policy.is_single:
            fields["agents"] = list(policy.agents)
        if body.count is None:
            if body.episode_id is not None and not call.client:
                raise RequestError(400, _NO_CLIENT)
            return {"episode_id": add(body.episode_id).id, **fields}
        most = self._cfg.max_batch
        if body.episode_id is not None or body.count > most:
            raise RequestError(422, f"count: expected 1 to {most}, without episode_id: the server gives the ids")
        ids = [add(count=left).id for left in range(body.count, 0, -1)]  # there is room for all, or none begins
        return {"episode_ids": ids, **fields}

    def action(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        return self._answer_single(call, id, parse_body(bodies.ActionRequest, call.fields)).wait()

    def log(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = parse_body(bodies.LogRequest, call.fields)
        answer = self._answer_single(call, id, body, actions={SINGLE: body.action}, log_probs={SINGLE: body.log_prob})
        return answer.pending.wait(lambda actions, version: {"step": answer.step})

    def turn(self, call: Call, id: str) -> Awaitable[dict[str, Any]]:
        body = parse_body(TurnRequest, call.fields)
        return self._answer_turn(self._find_episode(call, id, is_single=False), body).wait()

    def reward(self, call: Call, id: str) -> dict[str, Any]:
        episode = self.table.find(id, call.client)
        agents, is_single = self._policy_of(episode).agents, self._policy_of(episode).is_single
        body: Any = parse_body(bodies.RewardRequest if is_single else bodies.AgentRewardRequest, call.fields)
        self.table.infos.check(body.infos)
        self._check_step(episode, None)
        rewards = _parse_rewards(agents, episode, {SINGLE: body.reward} if is_single else body.rewards)
        for name, x in rewards.items():
            episode.seats[agents[name].number].reward += x
        self.table.infos.add(body.infos)
        sums = {name: episode.seats[agents[name].number].reward for name in rewards}
        return {"reward": sums[SINGLE]} if is_single else {"rewards": sums}

    def end(self, call: Call, id: str) -> dict[str, Any]:
        if (answer := self.table.find_end_answer(id, call.client)) is not None:
            return answer  # repeated request
        episode = self.table.find(id, call.client)
        policy = self._policy_of(episode)
        body: Any
        if policy.is_single:
            body = parse_body(bodies.EndRequest, call.fields)
            observations, rewards = {SINGLE: body.observation}, {SINGLE: body.reward}
        else:
            body = parse_body(bodies.AgentEndRequest, call.fields)
            observations, rewards = body.observations, body.rewards
        seats = {name: episode.seats[agent.number] for name, agent in policy.agents.items()}
        ended = {name for name, seat in seats.items() if seat.has_ended}
        observations = {name: x for name, x in observations.items() if name not in ended}
        last = {name: True for name, seat in seats.items() if seat.is_active or name in observations}
        turn = TurnRequest.model_construct(
            observations=observations, rewards=rewards, step=body.step, infos=body.infos, truncated=last,
            terminated={} if body.truncated else last,
        )  # fmt: skip
        policy.inference.request(self._end_episode(self._parse_turn(episode, turn)))
        return self.table.find_end_answer(id, call.client)

    def once(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = parse_body(bodies.OnceRequest, call.fields)
        name, policy = self._find_policy(body.policy)
        if policy.has_memory or not policy.is_single:
            why = "remembers earlier observations" if policy.has_memory else "is of several agents"
            raise RequestError(422, f"policy {name} {why}: begin an episode (POST /v1/episodes)")
        obs = _parse_observation(policy.agents[SINGLE], body.observation, "observation")
        self._num_once += 1
        episode = ClientEpisode(f"/{self._num_once}", "", name)  # not in the table: no request can name the id
        episode.seats.append(Seat(episode, 0, UNLEARNED, policy.inference.initial(0)))
        pending = self._request_actions(policy.inference, [Item(episode.seats[0], obs, 0.0)])
        return pending.wait(lambda actions, version: {"action": actions[0], "version": version})

    # ------------------------------------------------------------ many episodes in a request

    def turns(self, call: Call) -> Awaitable[dict[str, Any]]:
        by_id, most = parse_body(bodies.TurnsRequest, call.fields).turns, self._cfg.max_batch
        if not 1 <= len(by_id) <= most:
            raise RequestError(422, f"turns: expected a mapping of 1 to {most} episodes, by their ids")
        turns: list[_Turn] = []
        for id, fields in by_id.items():
            try:
                if not isinstance(fields, Mapping):
                    raise RequestError(422, "expected a mapping, the fields of a turn")
                body = parse_body(TurnRequest, {name: x for name, x in fields.items() if x is not None})
                turns.append(self._parse_turn(self._find_episode(call, id, is_single=False), body))
                if turns[-1].episode.policy != turns[0].episode.policy:
                    raise RequestError(422, "expected episodes of one policy: send a request for each policy")
            except RequestError as e:
                raise RequestError(e.status, f"turns/{id[:80]}: {e.message}") from None
        answers = dict(zip(by_id, self._answer_turns(turns), strict=True))
        build_turns = lambda *chosen: {id: answer.build_fields(*chosen) for id, answer in answers.items()}
        pending = next(iter(answers.values())).pending
        return pending.wait(lambda actions, version: {"turns": build_turns(actions, version), "version": version})

    def steps(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = parse_body(bodies.StepsRequest, call.fields)
        episodes, policy = self._find_episodes(call, body.episode_ids)
        items = self._step(episodes, _parse_results(policy.agents[SINGLE], body, (len(episodes),)))
        pending = self._request_actions(policy.inference, items)
        acting = [item.seat.episode for item in items if not item.final]
        for index, episode in enumerate(acting):
            episode.answer = Answer(pending, {SINGLE: index}, episode.steps - 1)
        ids, space = [episode.id for episode in acting], policy.agents[SINGLE].action
        stack = lambda actions: spaces.map_leaves(lambda leaf, *parts: np.stack(parts), space, *actions)
        build_fields = lambda actions, version: {"episode_ids": ids, "actions": stack(actions), "version": version}
        return pending.wait(build_fields)

    def played(self, call: Call) -> Awaitable[dict[str, Any]]:
        body = parse_body(bodies.PlayedRequest, call.fields)
        episodes, policy = self._find_episodes(call, body.episode_ids)
        inference, items, count = policy.inference, list[Item](), len(episodes)
        rows = len(body.versions) if isinstance(body.versions, list | np.ndarray) else 0
        if not 1 <= rows * count <= bodies.MAX_STEPS:
            raise RequestError(422, f"versions: expected 1 to {bodies.MAX_STEPS} steps, got {rows}")
        results = _parse_results(policy.agents[SINGLE], body, (rows, count))
        chosen = _parse_client_actions(policy, body, (rows, count))
        too_old = 0
        if policy.max_lag is not None:
            is_learned = np.array([episode.is_learned for episode in episodes])
            too_old = int(((chosen["version"] < inference.version - policy.max_lag) & is_learned).sum())
            self.table.num_too_old += too_old
        for k in range(rows):
            step_items = self._step(episodes, _slice(results, k), _slice(chosen, k))
            episodes = [item.seat.episode for item in step_items if not item.final]
            items += step_items
        ids = [episode.id for episode in episodes]
        learned = [item for item in items if item.seat.episode.is_learned]
        # the answer waits until the rows are written, so that clients are not faster than the learner
        pending = PendingActions(bool(learned), inference.version)
        if learned:
            inference.request([*learned[:-1], learned[-1]._replace(pending=pending)])
        build_fields = lambda *_: {"episode_ids": ids, "version": inference.version, "too_old": too_old}
        return pending.wait(build_fields)

    # ------------------------------------------------------------ episodes and their turns

    def _find_policy(self, name: str | None) -> tuple[str, ServedPolicy]:
        name = name or next(iter(self.by_name))
        if name not in self.by_name:
            raise RequestError(404, f"policy: there is no {name[:128]!r}: expected one of {', '.join(self.by_name)}")
        return name, self.by_name[name]

    def _policy_of(self, episode: ClientEpisode) -> ServedPolicy:
        return self.by_name[episode.policy]

    def _add_episode(self, client: str, policy: str, id: str | None = None, **options: Any) -> ClientEpisode:
        return self.table.add(client, id, policy=policy, carry=self.by_name[policy].inference.initial, **options)

    def _find_episode(self, call: Call, id: str, *, is_single: bool) -> ClientEpisode:
        """Returns an episode with a single agent or with several. Raises RequestError."""
        episode = self.table.find(id, call.client)
        if self._policy_of(episode).is_single != is_single:
            has = (
                "several agents: send their turns (POST /v1/episodes/ID/turn)" if is_single
                else "one agent: ask for its action (POST /v1/episodes/ID/action)"
            )  # fmt: skip
            raise RequestError(422, f"episode {id!r} has {has}")
        return episode

    def _find_episodes(self, call: Call, ids: list[str]) -> tuple[list[ClientEpisode], ServedPolicy]:
        """Returns different episodes of one policy without a pending request. Raises RequestError."""
        if not 1 <= len(ids) <= self._cfg.max_batch or len(set(ids)) < len(ids):
            raise RequestError(422, f"episode_ids: expected 1 to {self._cfg.max_batch} different ids, got {len(ids)}")
        episodes = [self._find_episode(call, id, is_single=True) for id in ids]
        if len({episode.policy for episode in episodes}) > 1:
            raise RequestError(422, "episode_ids: expected episodes of one policy: send a request for each policy")
        for episode in episodes:
            self._check_step(episode, None)
        return episodes, self._policy_of(episodes[0])

    def _check_step(self, episode: ClientEpisode, step: int | None) -> None:
        """Raises RequestError if the episode has a pending request, or if `step` is not its next step."""
        if episode.is_pending:
            raise RequestError(409, f"a request of episode {episode.id!r} is pending: wait for its answer")
        if step is not None and step != episode.steps:
            raise RequestError(409, f"step: episode {episode.id!r} is at step {episode.steps}, not at {step}")

    def _answer_single(self, call: Call, id: str, body: bodies.ActionRequest, **fields: Any) -> Answer:
        """Returns the answer to a request of a single agent, as a turn with more `fields`."""
        turn = TurnRequest.model_construct(
            observations={SINGLE: body.observation}, rewards={SINGLE: body.reward}, step=body.step, infos=body.infos,
            **fields,
        )  # fmt: skip
        return self._answer_turn(self._find_episode(call, id, is_single=True), turn)

    def _answer_turn(self, episode: ClientEpisode, body: TurnRequest) -> Answer:
        """Returns the answer to a turn, or the earlier answer to a repeated request."""
        if body.step is not None and body.step == episode.steps - 1 and episode.answer is not None:
            return episode.answer
        return self._answer_turns([self._parse_turn(episode, body)])[0]

    def _parse_turn(self, episode: ClientEpisode, body: TurnRequest) -> _Turn:
        """Returns the checked turn of a body, without changing the episode. Raises RequestError."""
        self._check_step(episode, body.step)
        self.table.infos.check(body.infos)
        policy = self._policy_of(episode)
        agents, ends = policy.agents, dict[str, bool]()
        rewards = _parse_rewards(agents, episode, body.rewards, allow_early=policy.is_single)
        # an agent with both flags is terminated
        for field, flags in (("truncated", body.truncated), ("terminated", body.terminated)):
            _check_agents(agents, episode, flags, field)
            ends |= {name: field == "truncated" for name, has_ended in flags.items() if has_ended}
        _check_agents(agents, episode, body.observations, "observations")
        obs = {
            name: _parse_observation(agents[name], x, _label("observations", name), acts=name not in ends)
            for name, x in body.observations.items()
        }
        for name, truncated in ends.items():
            if name not in obs:
                obs[name] = _fill_observation(agents, name, truncated=truncated)
        actions = {}
        if body.actions or body.log_probs:
            actions = _parse_actions(policy, episode, body, obs.keys() - ends.keys())
        return _Turn(episode, obs, rewards, actions, ends, body.infos)

    def _build_items(self, turn: _Turn) -> list[Item]:
        """Applies a turn to its episode; returns its items."""
        episode, agents = turn.episode, self._policy_of(turn.episode).agents
        items, policies = list[Item](), set[int]()
        names = sorted(turn.obs, key=lambda name: agents[name].number) if len(turn.obs) > 1 else turn.obs
        for name in names:
            agent = agents[name]
            seat, reward = episode.seats[agent.number], turn.rewards.get(name, 0.0)
            if name in turn.ends:
                items += seat.end(turn.obs[name], reward, truncated=turn.ends[name])
                continue
            flags = {"is_first": not policies, "is_policy_first": agent.policy not in policies}
            policies.add(agent.policy)
            items.append(seat.build_item(turn.obs[name], reward, **turn.actions.get(name, {}), **flags))
        for name, reward in turn.rewards.items():
            if name not in turn.obs:  # agent between two turns
                episode.seats[agents[name].number].reward += reward
        self.table.infos.add(turn.infos)
        episode.steps += 1
        episode.length += bool(policies)
        return items

    def _request_actions(self, inference: Inference, items: Sequence[Item]) -> PendingActions:
        """Requests the items of one HTTP request; final items need no action."""
        pending = PendingActions(sum(not item.final for item in items), inference.version)
        requested, count = list[Item](), 0
        for item in items:
            requested.append(item if item.final else item._replace(pending=pending, action_index=count))
            count += not item.final
        inference.request(requested)
        return pending

    def _answer_turns(self, turns: Sequence[_Turn]) -> list[Answer]:
        """Applies turns and request their actions at once; returns and store the answer of each turn."""
        policy = self._policy_of(turns[0].episode)
        items_by_turn, names = [self._build_items(turn) for turn in turns], list(policy.agents)
        pending = self._request_actions(policy.inference, [item for items in items_by_turn for item in items])
        answers, count = list[Answer](), itertools.count()
        for turn, items in zip(turns, items_by_turn, strict=True):
            acting = {names[item.seat.agent]: next(count) for item in items if not item.final}
            # answers to several agents leave out the actions that the client chose
            indices = {name: i for name, i in acting.items() if name == SINGLE or name not in turn.actions}
            turn.episode.answer = Answer(pending, indices, turn.episode.steps - 1)
            answers.append(turn.episode.answer)
        return answers

    def _end_episode(self, turn: _Turn) -> list[Item]:
        """Ends an episode with the last turn of its agents; returns its last items."""
        items, episode, agents = self._build_items(turn), turn.episode, self._policy_of(turn.episode).agents
        answer: dict[str, Any] = {"return": episode.total, "length": episode.length}
        if SINGLE not in agents:
            answer["returns"] = {name: episode.seats[agent.number].total for name, agent in agents.items()}
        self.table.end(episode, answer)
        return items

    def _step(
        self, episodes: list[ClientEpisode], results: tuple[PyTree, ...], chosen: Mapping[str, Any] = {}
    ) -> list[Item]:
        """Returns the items of a step of N episodes with a single agent; a new episode replaces an ended episode.

        `results` [N, *]: see `_parse_results`; `chosen` [N, *]: fields of Items for actions that the client chose.
        """
        obs, rewards, truncated, has_ended, last_obs = results
        items: list[Item] = []
        for i, episode in enumerate(episodes):
            reward = {SINGLE: float(rewards[i])}
            if has_ended[i]:
                ends = {SINGLE: bool(truncated[i])}
                items += self._end_episode(_Turn(episode, {SINGLE: _slice(last_obs, i)}, reward, ends=ends))
                episode = self._add_episode(episode.client, episode.policy, is_learned=episode.is_learned)
                reward = {}
            actions = {SINGLE: _slice(chosen, i)} if chosen else {}
            items += self._build_items(_Turn(episode, {SINGLE: _slice(obs, i)}, reward, actions))
        return items

    # ------------------------------------------------------------ local inference

    async def program(self, call: Call) -> dict[str, Any]:
        return (await self._request_program(call))[0]

    async def weights(self, call: Call) -> Response:
        least = call.query.get("newer_than", "-1")
        if not re.fullmatch(r"-1|\d{1,15}", least):
            raise RequestError(422, f"newer_than: expected a version, got {least[:80]}")
        _, version, file = await self._request_program(call)
        is_other = version != int(least)  # older weights are sent, too: see `_parse_client_actions`
        return Response(file, media_type=NPZ) if is_other else Response(status_code=204, media_type=NPZ)

    async def _request_program(self, call: Call) -> tuple[dict[str, Any], int, bytes]:
        name, policy = self._find_policy(call.query.get("policy"))
        if not policy.is_single:
            raise RequestError(422, f"policy {name} is of several agents: let the server act (inference_mode: remote)")
        return await asyncio.wrap_future(policy.client_inference.request(policy.inference))

    # ------------------------------------------------------------ state of the server

    def health(self, call: Call) -> dict[str, Any]:
        versions = {name: policy.inference.version for name, policy in self.by_name.items()}
        return {"status": "ok", "versions": versions, "episodes": len(self.table.episodes)}

    def policies(self, call: Call) -> dict[str, Any]:
        described = {}
        for name, policy in self.by_name.items():
            describe = lambda agent: {
                field: plain(space_to_json(getattr(agent, field))) for field in ("observation", "action")
            }
            agents = {agent_name: describe(agent) for agent_name, agent in policy.agents.items()}
            described[name] = {
                "algorithm": policy.algorithm, "learns": policy.learns, "remembers": policy.has_memory,
                **(agents[SINGLE] if policy.is_single else {"agents": agents}),
                "version": policy.inference.version,
            }  # fmt: skip
        return {"policies": described}

    def metrics(self, call: Call) -> Response:
        table, gate = self.table, self.http.gate
        values: dict[str, tuple[str, float]] = {
            "requests_total": ("counter", gate.requests),
            "refused_total": ("counter", gate.refused),
            "connections": ("gauge", len(self.http.connections)),
            "episodes": ("gauge", len(table.episodes)),
            "episodes_begun_total": ("counter", table.num_started),
            "episodes_ended_total": ("counter", table.num_ended),
            "episodes_failed_total": ("counter", table.num_failed),
            "inferences_total": ("counter", sum(policy.inference.count for policy in self.by_name.values())),
            "uptime_seconds": ("gauge", time.monotonic() - self._start_time),
        }
        if table.rows is not None:
            values["steps_dropped_total"] = "counter", table.rows.dropped
        lines = [f"# TYPE jrl_{name} {kind}\njrl_{name} {value:.12g}\n" for name, (kind, value) in values.items()]
        inferences = [(f'policy="{name}"', policy.inference) for name, policy in self.by_name.items()]
        lines += ["# TYPE jrl_weights_version gauge\n"]
        lines += [f"jrl_weights_version{{{label}}} {inference.version}\n" for label, inference in inferences]
        for name, attribute in (("jrl_wait_seconds", "waits"), ("jrl_inference_seconds", "calls")):
            lines += [f"# TYPE {name} histogram\n"]
            lines += [getattr(inference, attribute).format(name, label) for label, inference in inferences]
        return Response("".join(lines), media_type="text/plain; version=0.0.4")

    def openapi(self, call: Call) -> dict[str, Any]:
        agents = [pair for policy in self.by_name.values() for pair in policy.agents.items()]
        has_token = self.address.token is not None
        return openapi.build_document(agents, max_episodes=self._cfg.max_batch, has_token=has_token)


class _RouteApp:
    """ASGI application of a route: decodes the body, calls the server's method and encodes the answer."""

    def __init__(self, server: Server, route: ApiRoute):
        self._server, self._status = server, route.status
        self._method = getattr(server, route.name)
        self._has_body = route.body is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, body, server = scope["state"]["headers"], scope["state"]["body"], self._server
        fields = wire.decode(body, headers, server.address.max_body_bytes) if self._has_body else {}
        query = QueryParams(scope["query_string"]) if scope["query_string"] else {}
        call = Call(fields, wire.read_client_name(headers), query)
        with server.table.lock:
            answer = self._method(call, **scope["path_params"])
        if inspect.isawaitable(answer):
            answer = await answer
        request_headers = headers if self._has_body else None
        if not isinstance(answer, Response):
            answer = wire.encode(answer, request_headers, self._status)
        await answer(scope, receive, send)


def _deliver(chosen: list[tuple[Item, PyTree, int]]) -> None:
    now = time.monotonic()
    for item, action, version in chosen:
        if item.pending is not None:
            item.seat.episode.last_request = now
            item.pending.put(item.action_index, action, version)


# ---------------------------------------------------------------- fields of requests; all raise RequestError


def _parse_observation(
    agent: ServedAgent, x: Any, name: str, lead: tuple[int, ...] = (), *, acts: bool = True
) -> PyTree:
    """Returns observations [*lead, *]; `acts`: refuse masks that allow no action, which would end the run."""
    obs = space_values.parse_value(agent.observation, x, name, lead)
    mask = obs.get(spaces.ACTION_MASK) if acts and isinstance(agent.observation, Dict) else None
    if mask is not None and not spaces.any_allowed(agent.action, mask).all():
        raise RequestError(422, f"{name}/{spaces.ACTION_MASK}: it allows no action: end the episode, or allow one")
    return obs


def _label(field: str, agent: str) -> str:
    """Returns the name of an agent's part of a field, or the field's singular for a single agent."""
    return f"{field}/{agent}" if agent else field[:-1]


def _check_agents(
    agents: Mapping[str, ServedAgent], episode: ClientEpisode, names: Collection[str], field: str
) -> None:
    """Checks that all names are agents that have not ended."""
    for name in names:
        if name not in agents:
            raise RequestError(422, f"{field}: there is no agent {name[:80]!r}: expected {', '.join(agents)[:200]}")
        if episode.seats[agents[name].number].has_ended:
            raise RequestError(409, f"{field}/{name}: it has ended in episode {episode.id!r}: leave it out")


def _parse_rewards(
    agents: Mapping[str, ServedAgent], episode: ClientEpisode, by_agent: Mapping[str, Any], *, allow_early: bool = False
) -> dict[str, float]:
    """Returns rewards by agent. `allow_early`: accept a reward before the agent's first action."""
    _check_agents(agents, episode, by_agent, "rewards")
    rewards: dict[str, float] = {}
    for name, x in by_agent.items():
        seat, label = episode.seats[agents[name].number], _label("rewards", name)
        reward = space_values.parse_number(x, label)
        if reward and not seat.steps and not allow_early:
            raise RequestError(409, f"{label}: it has no action yet that a reward could be for: leave it out")
        if abs(total := seat.reward + reward) > LARGEST:
            expected = f"{label}: expected a sum of at most {LARGEST:g} since the latest action"
            raise RequestError(422, f"{expected}, got {total:g}: {space_values.FIX}")
        rewards[name] = reward
    return rewards


def _parse_actions(
    policy: ServedPolicy, episode: ClientEpisode, body: TurnRequest, acting: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Returns the fields of Items for actions that the client chose, by agent."""
    for field, by_agent, allowed, allowed_name in (
        ("actions", body.actions, acting, "observations of acting agents"),
        ("log_probs", body.log_probs, body.actions, "actions"),
    ):
        _check_agents(policy.agents, episode, by_agent, field)
        if unexpected := [name for name in by_agent if name not in allowed]:
            raise RequestError(422, f"{field}/{unexpected[0]}: it is not among the {allowed_name}")
    fields = {}
    for name, x in body.actions.items():
        agent = policy.agents[name]
        action = space_values.parse_value(agent.action, x, _label("actions", name))
        log_prob = space_values.parse_number(body.log_probs.get(name, 0.0), _label("log_probs", name))
        if agent.to_policy_action is None:
            raise RequestError(422, policy.refusal)
        fields[name] = {"action": agent.to_policy_action(action), "log_prob": log_prob}
    return fields


def _fill_observation(agents: Mapping[str, ServedAgent], name: str, *, truncated: bool) -> PyTree:
    """Returns zeros for a missing last observation, which is never used after a termination."""
    if truncated:
        raise RequestError(400, f"observations/{name} is missing: a truncated episode needs its last observation")
    return zeros(element(agents[name].observation))


def _parse_client_actions(policy: ServedPolicy, body: bodies.PlayedRequest, lead: tuple[int, int]) -> dict[str, Any]:
    """Returns the fields of Items for actions [K, N, *] of local inference."""
    version = space_values.parse_array(INTEGER, body.versions, lead, "versions")
    fields = {
        "action": space_values.parse_value(policy.agents[SINGLE].policy_action, body.actions, "actions", lead),
        "log_prob": space_values.parse_array(NUMBER, body.log_probs, lead, "log_probs"),
        "version": version,
        "carry": policy.client_inference.parse_memory(body.memory, lead),
    }
    newest = policy.inference.version
    # without learning the version may fall: the best checkpoint was deleted, and an older checkpoint is served
    if (version < 0).any() or (policy.learns and version.max() > newest):
        raise RequestError(409, f"versions: there are none beyond {newest} here: get the weights again")
    return fields


def _parse_results(
    agent: ServedAgent, body: bodies.StepsRequest | bodies.PlayedRequest, lead: tuple[int, ...]
) -> tuple[PyTree, ...]:
    """Returns (observations, rewards, truncated, has_ended, last observations) of steps, [*lead, *]."""

    def read(name: str, leaf: Leaf) -> np.ndarray:
        x = getattr(body, name)
        return np.zeros(lead, leaf.dtype) if x is None else space_values.parse_array(leaf, x, lead, name)

    obs = _parse_observation(agent, body.observations, "observations", lead)
    rewards, terminated, truncated = read("rewards", NUMBER), read("terminated", FLAG), read("truncated", FLAG)
    has_ended, last_obs = terminated | truncated, obs
    if has_ended.any():
        if body.final_observations is None:
            raise RequestError(400, "final_observations is missing: an ended episode needs its last observation")
        last_obs = space_values.parse_value(agent.observation, body.final_observations, "final_observations", lead)
    return obs, rewards, truncated & ~terminated, has_ended, last_obs


def _slice(tree: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda x: x[i], tree)
