"""The routes: what clients may ask, and what becomes of it."""

import functools
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.serve import about, openapi, origins, played, protocol, turns
from jrl.serve.bodies import Bodies
from jrl.serve.inference import Inference
from jrl.serve.local import Local
from jrl.serve.protocol import Refused, Request, Response, encoded
from jrl.serve.served import STEPS, Answer, Facts, Served, at, came, seen, together
from jrl.serve.table import UNLEARNED, Episode, Item, Seat, Table
from jrl.serve.web import Limits, Reply, Web
from jrl.settings.external import ExternalConfig
from jrl.types import PyTree

# an episode of clients without that header is for whoever knows its id, which nobody is to guess
_NAMELESS = (
    "episode_id: who names an episode has to say whose it is: send the header Jrl-Client, the same in all requests, or "
    "leave episode_id out, and the server gives one"
)
_LOGGED = ("observation", "action", "log_prob", "reward", "step", "infos")


class Server:
    """Answers the requests of clients, by the policies that `add` names: the first is that of who names none.

    Args:
      table: the episodes.
      cfg: the `external` section.
      token: what clients have to show; None: nothing.
      interrupted: whether the run is to end; clients are then served no longer, so that it ends as fast as it can.
    """

    def __init__(
        self,
        table: Table,
        cfg: ExternalConfig,
        token: bytes | None,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.table, self._cfg = table, cfg
        self._served: dict[str, Served] = {}
        most, pages = int(cfg.max_body_mb * 2**20), origins.allowed(cfg, token)
        limits = Limits(most, cfg.max_clients, cfg.max_rate, cfg.timeout_s, token, pages)
        self.web = Web(self._handle, limits, tick=self._tick)
        self._interrupted = interrupted
        # who waits for an action
        self._waiting: dict[Seat, tuple[Answer, int]] = {}
        self._bodies = Bodies(self.web.soon)
        self._begun = time.monotonic()
        self._asked_once = 0
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., None]]] = [
            ("POST", re.compile(r"/v1/episodes"), self._begin),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/action"), self._action),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/turn"), functools.partial(turns.turn, self)),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/log"), self._log),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/reward"), self._reward),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/end"), self._end),
            ("POST", re.compile(r"/v1/steps"), self._steps),
            ("POST", re.compile(r"/v1/turns"), functools.partial(turns.turns, self)),
            ("POST", re.compile(r"/v1/played"), functools.partial(played.played, self)),
            ("GET", re.compile(r"/v1/program"), functools.partial(played.program, self)),
            ("GET", re.compile(r"/v1/weights"), functools.partial(played.weights, self)),
            ("POST", re.compile(r"/v1/action"), self._once),
            ("GET", re.compile(r"/v1/policies"), self._policies),
            ("GET", re.compile(r"/v1/health"), self._health),
            ("GET", re.compile(r"/metrics"), self._metrics),
            ("GET", re.compile(r"/openapi\.json"), self._openapi),
            ("GET", re.compile(r"/(?:docs)?"), self._docs),
        ]

    def add(self, name: str, facts: Facts, inference: Inference, local: Local) -> None:
        """Adds a policy, which clients may ask for by its name."""
        self._served[name] = Served(facts, inference, local)

    def _tick(self) -> None:
        self.table.sweep(self._cfg.timeout_s)
        if self._interrupted():
            self.web.stop()

    def close(self) -> None:
        """Closes all connections, and ends who chooses."""
        self.web.close()
        self._bodies.close()
        for served in self._served.values():
            served.inference.close()
            served.local.close()

    # ------------------------------------------------------------ from a request to its answer

    def _handle(self, request: Request, reply: Reply) -> None:
        there = [(method, fn, at) for method, path, fn in self._routes if (at := path.fullmatch(request.path))]
        if not there:
            raise Refused(404, f"there is no {request.path[:200]}: /docs tells what there is")
        fits = [(fn, at.groups()) for method, fn, at in there if method == request.method]
        if not fits:
            raise Refused(405, f"{request.path[:200]} takes {there[0][0]}, not {request.method[:20]}")
        self._bodies.read(request, lambda read: self._answer(read, reply, *fits[0]))

    def _answer(
        self, request: Request | Exception, reply: Reply, fn: Callable[..., None], found: Sequence[str]
    ) -> None:
        """Answers a request whose body was read; in the thread of all connections."""
        try:
            if isinstance(request, Exception):
                raise request
            with self.table.lock:
                fn(request, reply, *found)
        except Refused as e:
            reply(protocol.refusal(e))
        except Exception:  # a fault of ours must not end the thread that answers all
            traceback.print_exc()
            reply(protocol.Response(500, b'{"error": "the server failed on this request; its log tells more"}'))

    def deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        """Gives actions to those who asked; called by the thread that chose them."""
        self.web.soon(self._deliver, chosen)

    def _deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        for item, action, version in chosen:
            episode = item.seat.episode
            if item.told is not None:
                item.told()
            if item.final or item.version is not None:
                continue
            episode.pending, episode.seen = episode.pending - 1, time.monotonic()
            if len(episode.seats) == 1:
                episode.answer = action, version
            waiting = self._waiting.pop(item.seat, None)
            if waiting is not None:
                waiting[0].add(waiting[1], action, version)

    def ask(self, items: list[Item], done: Callable[[list[PyTree], int], None]) -> None:
        """Orders the actions of one request; `done` gets those of the items that are not final, in order."""
        answer = Answer(sum(not item.final for item in items), done)
        i = 0
        for item in items:
            if not item.final:
                self._waiting[item.seat] = answer, i
                item.seat.episode.pending += 1
                i += 1
        self._served[items[0].seat.episode.policy].inference.ask(items)

    @property
    def most_episodes(self) -> int:
        """Returns the number of episodes that a request may have."""
        return self._cfg.max_batch

    def served(self, policy: str) -> Served:
        """Returns the policy of a name."""
        return self._served[policy]

    # ------------------------------------------------------------ episodes

    def named(self, given: Mapping[str, Any]) -> tuple[str, Served]:
        """Returns the policy that a body names, or the first."""
        name = protocol.text(given, "policy") or next(iter(self._served))
        if name not in self._served:
            raise Refused(404, f"policy: there is no {name!r}: expected one of {', '.join(self._served)}")
        return name, self._served[name]

    def _begin(self, request: Request, reply: Reply) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("episode_id", "training_enabled", "count", "policy"))
        name, served = self.named(given)
        learns = protocol.flag(given, "training_enabled", True) and served.facts.learns
        how: dict[str, Any] = {"learns": learns, "policy": name, "carry": served.inference.initial}
        client, version = protocol.client_of(request), served.inference.version
        count, id = protocol.whole(given, "count", self._cfg.max_batch), protocol.text(given, "episode_id")
        told = {"agents": list(served.facts.names)} if served.facts.agents else {}
        if count is None:
            if id is not None and not client:
                raise Refused(400, _NAMELESS)
            episode = self.table.begin(client, id, **how)
            reply(encoded({"episode_id": episode.id, "version": version, **told}, request, 201))
            return
        if id is not None or count == 0:
            raise Refused(422, "count: expected 1 or more, without an episode_id: the server gives each its own")
        begun: list[Episode] = []
        try:
            for _ in range(count):
                begun.append(self.table.begin(client, None, **how))
        except Refused:
            for episode in begun:
                self.table.close(episode, "was never begun")
            raise
        reply(encoded({"episode_ids": [e.id for e in begun], "version": version, **told}, request, 201))

    def found(self, request: Request, id: str) -> tuple[Episode, Facts]:
        """Returns the episode of an id and what acts in it. Raises Refused as `Table.find`."""
        episode = self.table.find(id, protocol.client_of(request))
        return episode, self._served[episode.policy].facts

    def _alone(self, request: Request, id: str) -> tuple[Episode, Facts]:
        """Finds an episode with one agent, as `found`."""
        episode, facts = self.found(request, id)
        if facts.agents:
            raise Refused(422, f"episode {id!r} has several agents: tell of their turns (POST /v1/episodes/ID/turn)")
        return episode, facts

    def _action(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("observation", "reward", "step", "infos"), ("observation",))
        episode, facts = self._alone(request, id)
        infos = self.table.infos.read(given)
        obs = seen(facts, given["observation"], "observation")
        reward = protocol.number(given, "reward")

        def done(actions: list[PyTree], version: int, step: int) -> None:
            reply(encoded({"action": actions[0], "version": version, "step": step}, request))

        step = protocol.whole(given, "step")
        if step is not None and step == episode.steps - 1:  # asked again, since the answer was lost on its way
            if episode.pending:
                self._waiting[episode.seat] = Answer(1, lambda actions, version: done(actions, version, step)), 0
            else:
                done([episode.answer[0]], episode.answer[1], step)
            return
        self.in_turn(episode, step)
        at = episode.steps
        item = self._item(episode, obs, reward)
        self.table.infos.add(infos)
        self.ask([item], lambda actions, version: done(actions, version, at))

    def in_turn(self, episode: Episode, step: int | None) -> None:
        """Raises Refused: a request of the episode is under way, or this is not its next step."""
        if episode.pending:
            raise Refused(409, f"a request of episode {episode.id!r} is under way: wait for its answer")
        if step is not None and step != episode.steps:
            raise Refused(409, f"step: episode {episode.id!r} is at step {episode.steps}, not at {step}")

    def _item(self, episode: Episode, obs: PyTree, reward: float, **how: Any) -> Item:
        """Returns the next item of an episode with one agent, with the rewards since its latest action."""
        item = episode.seat.item(obs, reward, **how)
        episode.steps = episode.seat.steps
        return item

    def _log(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, _LOGGED, _LOGGED[:2])
        episode, facts = self._alone(request, id)
        infos = self.table.infos.read(given)
        obs = seen(facts, given["observation"], "observation")
        action = protocol.read(facts.action, given["action"], "action")
        reward, log_prob = protocol.number(given, "reward"), protocol.number(given, "log_prob")
        if facts.own_action is None:
            raise Refused(422, facts.why)
        step = protocol.whole(given, "step")
        if step is not None and step == episode.steps - 1 and not episode.pending:
            reply(encoded({"step": step}, request))
            return
        self.in_turn(episode, step)
        at = episode.steps
        item = self._item(episode, obs, reward, action=facts.own_action(action), log_prob=log_prob)
        self.table.infos.add(infos)
        self.ask([item], lambda actions, version: reply(encoded({"step": at}, request)))

    def _reward(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        episode, facts = self.found(request, id)
        if facts.agents:
            turns.reward(self, reply, request, episode, given)
            return
        protocol.fields(given, ("reward", "infos"), ("reward",))
        reward, infos = protocol.number(given, "reward"), self.table.infos.read(given)
        self.in_turn(episode, None)
        if not episode.steps:
            raise Refused(409, f"episode {id!r} has no action yet that a reward could be for")
        episode.seat.reward = protocol.summed(episode.seat.reward, reward, "reward")
        self.table.infos.add(infos)
        reply(encoded({"reward": episode.seat.reward}, request))

    def _end(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        if (answer := self.table.ended_with(id, protocol.client_of(request))) is not None:
            reply(encoded(answer, request))  # asked again
            return
        episode, facts = self.found(request, id)
        if facts.agents:
            turns.end(self, request, reply, episode, given)
            return
        protocol.fields(given, ("observation", "reward", "truncated", "step", "infos"), ("observation",))
        infos = self.table.infos.read(given)
        obs = protocol.read(facts.observation, given["observation"], "observation")
        reward, truncated = protocol.number(given, "reward"), protocol.flag(given, "truncated", False)
        self.in_turn(episode, protocol.whole(given, "step"))
        item = self._ended(episode, obs, reward, truncated=truncated)
        self.table.infos.add(infos)
        answer = {"return": episode.total, "length": episode.steps}
        self.table.close(episode, "has ended", answer)
        if item is not None:
            self._served[episode.policy].inference.ask([item])
        reply(encoded(answer, request))

    def _ended(self, episode: Episode, obs: PyTree, reward: float, *, truncated: bool) -> Item | None:
        """Returns the last item of an episode; None where there is nothing to learn from it."""
        self.table.ended += 1
        item = self._item(episode, obs, reward, terminated=not truncated, truncated=truncated, final=True)
        return item if episode.steps and episode.learns else None

    def _steps(self, request: Request, reply: Reply) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, STEPS, STEPS[:2])
        episodes, facts = self.several(request, given)
        obs, rewards, *ends = came(facts, given, (len(episodes),))
        items = self.items(episodes, obs, rewards, *ends)
        names = [item.seat.episode.id for item in items if not item.final]
        kind = facts.action
        self.ask(
            items,
            lambda actions, version: reply(
                encoded({"episode_ids": names, "actions": together(kind, actions), "version": version}, request)
            ),
        )

    def several(self, request: Request, given: Mapping[str, Any]) -> tuple[list[Episode], Facts]:
        """Returns the episodes that a body names, whose turn it is, and what acts in them."""
        ids = protocol.texts(given["episode_ids"], "episode_ids")
        if not 1 <= len(ids) <= self._cfg.max_batch or len(set(ids)) < len(ids):
            raise Refused(422, f"episode_ids: expected 1 to {self._cfg.max_batch} different ids, got {len(ids)}")
        episodes = [self._alone(request, id)[0] for id in ids]
        if len({episode.policy for episode in episodes}) > 1:
            raise Refused(422, "episode_ids: they follow different policies: send a request for each")
        for episode in episodes:
            self.in_turn(episode, None)
        return episodes, self._served[episodes[0].policy].facts

    def items(
        self,
        episodes: list[Episode],
        obs: PyTree,
        rewards: np.ndarray,
        truncated: np.ndarray,
        over: np.ndarray,
        last: Any,
        chosen: Sequence[Mapping[str, Any]] = (),
    ) -> list[Item]:
        """Returns the items of several episodes; those that are over end, and others begin in their places.

        `chosen` has what an Item says of actions that the client chose.
        """
        items: list[Item] = []
        for i, episode in enumerate(episodes):
            reward = float(rewards[i])
            if over[i]:
                item = self._ended(episode, at(last, i), reward, truncated=bool(truncated[i]))
                self.table.close(episode, "has ended", {"return": episode.total, "length": episode.steps})
                carry = self._served[episode.policy].inference.initial
                how: dict[str, Any] = {"policy": episode.policy, "carry": carry}
                episode = self.table.begin(episode.client, None, learns=episode.learns, **how)
                items += [] if item is None else [item]
                reward = 0.0
            items.append(self._item(episode, at(obs, i), reward, **(chosen[i] if chosen else {})))
        return items

    # ------------------------------------------------------------ about the server

    def _once(self, request: Request, reply: Reply) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("observation", "policy"), ("observation",))
        name, (facts, inference, _) = self.named(given)
        if facts.remembers:
            raise Refused(422, f"policy {name} remembers what it saw in an episode: begin one (POST /v1/episodes)")
        if facts.agents:
            raise Refused(422, f"policy {name} is of several agents: begin an episode (POST /v1/episodes)")
        obs = seen(facts, given["observation"], "observation")
        # an episode of its own, which nobody can ask again
        self._asked_once += 1
        episode = Episode(f"/{self._asked_once}", "", name)
        episode.seats.append(Seat(episode, 0, UNLEARNED, inference.initial(0)))

        def done(actions: list[PyTree], version: int) -> None:
            reply(encoded({"action": actions[0], "version": version}, request))

        self.ask([Item(episode.seat, obs, 0.0)], done)

    def _policies(self, request: Request, reply: Reply) -> None:
        reply(encoded({"policies": about.policies(self._served)}))

    def _health(self, request: Request, reply: Reply) -> None:
        versions = {name: served.inference.version for name, served in self._served.items()}
        reply(encoded({"status": "ok", "versions": versions, "episodes": len(self.table.episodes)}))

    def _metrics(self, request: Request, reply: Reply) -> None:
        text = about.metrics(self.table, self.web, self._served, time.monotonic() - self._begun)
        reply(Response(200, text.encode(), "text/plain; version=0.0.4"))

    def _openapi(self, request: Request, reply: Reply) -> None:
        reply(encoded(about.document(self.web, self._served, self._cfg.max_batch)))

    def _docs(self, request: Request, reply: Reply) -> None:
        page = openapi.page(about.document(self.web, self._served, self._cfg.max_batch))
        reply(Response(200, page.encode(), "text/html; charset=utf-8"))
